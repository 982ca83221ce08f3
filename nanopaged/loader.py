"""From a directory or a hub id to config, tokenizer and weights: none missing, none unused."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from nanopaged.config import EngineConfig, check
from nanopaged.model import CausalLM

BUNDLED = Path(__file__).parent / "shakespeare"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose angles depend on the position alone


def resolve(config: EngineConfig) -> Path:
    """The model's directory: the bundled one, a local one, or a snapshot from the hub."""
    path = BUNDLED if config.model is None else Path(config.model).expanduser()
    if (path / "config.json").is_file():
        return path
    patterns = ["*.json", "*.txt", "*.model", "*.jinja"]
    patterns += ["model*.safetensors"] if config.load_format == "auto" else []
    try:
        return Path(snapshot_download(str(config.model), allow_patterns=patterns))
    except Exception as error:  # the hub client raises its own errors, httpx's and OSError
        raise ValueError(f"model must be a directory with a config.json, or a repository's id on "
                         f"the hub, got {config.model!r}: {error}") from error


def read(file: Path) -> Any:
    """The tensors of a safetensors file; the fields of a JSON file, none if there is no such file.

    Tensors are mapped: they take no memory until they are read.
    """
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        return json.loads(file.read_text()) if file.is_file() else {}
    except (ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{file} must be a {file.suffix} file, not cut short: {error}") from error


def load_config(path: Path) -> Any:
    """transformers' config, with what the families differ in spelled out for `model.py`.

    Refuses by name what the decoder does not compute.
    """
    raw = read(path / "config.json")
    check("model_type in config.json", raw.get("model_type"), "str", choices=FAMILIES)
    check("quantization_config in config.json", raw.get("quantization_config"), "None")
    config = AutoConfig.from_pretrained(path)
    rope = config.rope_parameters  # where transformers 5 puts all that older versions spread out
    check("rope_type in config.json", rope.get("rope_type"), "str", choices=ROPE_TYPES)
    check("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), "float", 1, 1)
    check("hidden_act in config.json", config.hidden_act, "str", choices=("silu",))
    default = config.hidden_size // config.num_attention_heads
    config.head_dim = getattr(config, "head_dim", None) or default
    config.o_bias = raw.get("attention_bias", False)
    config.qkv_bias = config.o_bias or config.model_type == "qwen2"
    config.mlp_bias = raw.get("mlp_bias", False)
    config.qk_norm = config.model_type == "qwen3"
    # Within its window, sliding-window attention is full attention: serve that far, exactly.
    if config.model_type != "llama" and config.sliding_window:  # None where it is switched off
        config.max_position_embeddings = min(config.max_position_embeddings, config.sliding_window)
    return config


def load_tokenizer(path: Path, config: Any) -> tuple[Any, list[int]]:
    """The tokenizer, or None where the directory has none and prompts are token ids; the EOS ids.

    Of these generation_config.json may name several where config.json has one or none.
    """
    found = [*path.glob("tokenizer.*"), *path.glob("vocab.json")]
    # Cleaned up, what a token looks like would depend on what follows.
    tokenizer = None if not found else AutoTokenizer.from_pretrained(
        path, clean_up_tokenization_spaces=False)
    generation = read(path / "generation_config.json").get("eos_token_id")
    sources = generation, config.eos_token_id, getattr(tokenizer, "eos_token_id", None)
    eos = next((ids if isinstance(ids, list) else [ids] for ids in sources if ids is not None), [])
    return tokenizer, [token for token in eos if token in range(config.vocab_size)]


def load_weights(model: CausalLM, whole: CausalLM, starts: dict[str, int], path: Path) -> None:
    """Copy of every tensor in the safetensors files what the model has a share of to its place.

    `whole` has the shapes of the whole tensors; `starts` says where the shares begin.

    Raises ValueError naming the tensors that are missing, unknown or misshapen, or the unreadable
    file; FileNotFoundError naming the absent one.
    """
    targets, missing, misfits = find_targets(model), find_targets(whole), {}
    shards = read(path / "model.safetensors.index.json").get("weight_map", {}).values()
    for file in sorted({path / name for name in shards or ["model.safetensors"]}):
        for name, tensor in read(file).items():
            if name in missing and missing[name].shape == tensor.shape:
                del missing[name]
                if name in targets:  # a bias that is added to a sum is rank 0's
                    for dim, size in enumerate(targets[name].shape):
                        start = starts[name.split(".")[-2]] if size < tensor.shape[dim] else 0
                        tensor = tensor.narrow(dim, start, size)
                    targets[name].copy_(tensor)
            # Some store what config.json implies: a tied head, the rotary frequencies.
            elif name in missing or not name.endswith(("lm_head.weight", "rotary_emb.inv_freq")):
                misfits[name] = list(tensor.shape)
    if missing or misfits:
        shapes = {name: list(target.shape) for name, target in missing.items()}
        raise ValueError(f"the weights in {path} must be those of config.json: tensors {shapes} "
                         f"are missing, and {misfits} have no place")


def load_dummy_weights(model: CausalLM, seed: int) -> None:
    """Random weights, for benchmarks: normal with std 0.02, around one for norms."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.normal_(float(name.endswith("norm.weight")), 0.02, generator=generator)


def find_targets(model: CausalLM) -> dict[str, Tensor]:
    """The checkpoint's names, and the parameters or slices of stacked parameters they fill."""
    targets: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():  # of a tied head and embedding, the latter
        path, own_name = name.rpartition(".")[0], name.split(".")[-2]  # .., qkv_proj
        parts = getattr(model.get_submodule(path), "parts", {own_name: len(parameter)})
        slices = torch.split(parameter, list(parts.values()))
        for part, rows in zip(parts, slices, strict=True):  # model.layers.0.self_attn.q_proj ..
            targets[name.replace(own_name, part)] = rows
    return targets
