"""From a directory or a hub id to config, tokenizer and weights: none missing, none unused."""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from nanopaged.config import EngineConfig, check
from nanopaged.layers import Linear
from nanopaged.model import CausalLM

BUNDLED = Path(__file__).parent / "shakespeare"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose angles depend on the position alone
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
IMPLIED = ("lm_head.weight", "rotary_emb.inv_freq")  # stored by some, though config.json has it


def resolve(config: EngineConfig) -> Path:
    """The model's directory: the bundled one, a local one, or a snapshot from the hub."""
    path = BUNDLED if config.model is None else Path(config.model).expanduser()
    if not path.is_dir():
        patterns = ["*.json", "*.txt", "*.model", "*.jinja"]
        patterns += ["*.safetensors"] if config.load_format == "auto" else []
        try:
            path = Path(snapshot_download(str(config.model), allow_patterns=patterns,
                                          ignore_patterns=["consolidated*", "original/*"]))
        except Exception as error:  # the hub client raises its own errors, httpx's and OSError
            raise ValueError("model must be a directory or the id of a repository on the hub, "
                             f"got {config.model!r}: {error}") from error
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"model must be a directory with a config.json, got {str(path)!r}")
    return path


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} must be a JSON file: {error}") from error


def load_config(path: Path) -> Any:
    """transformers' config, with what the families differ in spelled out for `model.py`.

    Refuses by name what the decoder does not compute.
    """
    raw = read_json(path / "config.json")
    family = raw.get("model_type")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    check("model_type in config.json", family, "str", choices=FAMILIES)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    check("rope_type in config.json", rope_type, "str", choices=ROPE_TYPES)
    config = AutoConfig.from_pretrained(path)
    check("hidden_act in config.json", config.hidden_act, "str", choices=("silu",))
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    check("partial_rotary_factor in config.json", partial, "float", 1, 1)
    if "quantization_config" in raw:
        raise ValueError("quantization_config in config.json must be absent: no kernels for it")
    default = config.hidden_size // config.num_attention_heads
    config.head_dim = getattr(config, "head_dim", None) or default
    config.o_bias = raw.get("attention_bias", False)
    config.qkv_bias = config.o_bias or family == "qwen2"
    config.mlp_bias = raw.get("mlp_bias", False)
    config.qk_norm = family == "qwen3"
    # Within its window, sliding-window attention is full attention: serve that far, exactly.
    if (family == "mistral" or raw.get("use_sliding_window")) and config.sliding_window:
        config.max_position_embeddings = min(config.max_position_embeddings, config.sliding_window)
    return config


def load_tokenizer(path: Path) -> Any:
    """The tokenizer, or None where the directory has none and prompts are token ids."""
    found = any((path / name).is_file() for name in TOKENIZER_FILES)
    return AutoTokenizer.from_pretrained(path) if found else None


def load_eos_token_ids(path: Path, config: Any, tokenizer: Any) -> list[int]:
    """All of them: generation_config.json may name several where config.json has one or none."""
    eos = config.eos_token_id
    if (path / "generation_config.json").is_file():
        eos = read_json(path / "generation_config.json").get("eos_token_id", eos)
    if eos is None:
        eos = getattr(tokenizer, "eos_token_id", None)
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def load_weights(model: CausalLM, path: Path) -> None:
    """Copy every tensor of the safetensors files to its place.

    Raises ValueError naming the tensor that is missing, unknown or misshapen, or the unreadable
    file; FileNotFoundError naming the file that the index promises.
    """
    targets = find_targets(model)
    for file in find_weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in sorted(tensors.keys()):
                    target, tensor = targets.pop(name, None), tensors.get_tensor(name)
                    if target is None:
                        if not name.endswith(IMPLIED):
                            raise ValueError(f"tensor {name!r} in {file} is not part of the model")
                    elif target.shape != tensor.shape:
                        raise ValueError(f"tensor {name!r} must have shape {list(target.shape)} as "
                                         f"in config.json, got {list(tensor.shape)}")
                    else:
                        target.copy_(tensor)
        except SafetensorError as error:
            raise ValueError(f"{file} is not a readable safetensors file: {error}") from error
    if targets:
        raise ValueError(f"{path} lacks the tensors {', '.join(targets)}")


def load_dummy_weights(model: CausalLM, seed: int) -> None:
    """Random weights, for benchmarks: normal with std 0.02, around one for norms."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.normal_(float(name.endswith("norm.weight")), 0.02, generator=generator)


def find_targets(model: CausalLM) -> dict[str, Tensor]:
    """The checkpoint's names, and the parameters or slices of stacked parameters they fill."""
    targets: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, Linear):  # a.b.qkv_proj.weight -> a.b.q_proj.weight and so on
                prefix = path[: path.rfind(".") + 1]
                slices = parameter.split(list(module.parts.values()))
                for part, rows in zip(module.parts, slices, strict=True):
                    targets[f"{prefix}{part}.{name}"] = rows
            else:
                targets[f"{path}.{name}"] = parameter
    if model.lm_head.weight is model.model.embed_tokens.weight:
        del targets["lm_head.weight"]
    return targets


def find_weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({path / name for name in read_json(index)["weight_map"].values()})
    else:
        single = path / "model.safetensors"  # where there is one, other files repeat it
        files = [single] if single.is_file() else sorted(path.glob("*.safetensors")) or [single]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"the weights file {file.name} is missing in {path}")
    return files
