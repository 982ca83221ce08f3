"""From a directory or a hub id to config, tokenizer and weights, all of them used."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from nanopaged.config import EngineConfig
from nanopaged.model import CausalLM
from nanopaged.parallel import Ranks

BUNDLED = Path(__file__).parent / "shakespeare"
IMPLIED = ("lm_head.weight", "rotary_emb.inv_freq")  # a tied head, and angles
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # angles depend on positions alone


def resolve(config: EngineConfig) -> Path:
    """The model's directory: bundled, local, or a snapshot from the hub."""
    path = BUNDLED if config.model is None else Path(config.model).expanduser()
    if (path / "config.json").is_file():
        return path
    patterns = ["*.json", "*.txt", "*.model", "*.jinja"]
    if config.load_format == "auto":
        patterns.append("model*.safetensors")
    try:
        return Path(snapshot_download(str(config.model), allow_patterns=patterns))
    except Exception as error:  # the hub client's own, httpx's and OSError
        raise ValueError(
            "model must be a directory with a config.json, or the id of a repository "
            f"on the hub, got {config.model!r}: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """The fields of a JSON file; none if there is no such file."""
    if not file.is_file():
        return {}
    try:
        fields = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(
            f"{file} must be a JSON file, not cut short: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file} must hold a JSON object, got {str(fields):.80}")
    return fields


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped: they are read when they are used."""
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(file)
        return tensors
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{file} must be a safetensors file, not cut short: {error}") from error


def load_config(path: Path) -> Any:
    """transformers' config, with the differences between the families spelled out.

    ValueError names what the decoder cannot compute.
    """
    raw = read_json(path / "config.json")
    require("model_type", raw.get("model_type"), FAMILIES)
    require("quantization_config", raw.get("quantization_config"), (None,))
    config = AutoConfig.from_pretrained(path)
    rope = config.rope_parameters  # in transformers 5 it has all about positions
    require("rope_type", rope.get("rope_type"), ROPE_TYPES)
    require("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,))
    require("hidden_act", config.hidden_act, ("silu",))

    default_dim = config.hidden_size // config.num_attention_heads
    config.head_dim = getattr(config, "head_dim", None) or default_dim
    config.o_bias = raw.get("attention_bias", False)
    config.qkv_bias = config.o_bias or config.model_type == "qwen2"
    config.mlp_bias = raw.get("mlp_bias", False)
    config.qk_norm = config.model_type == "qwen3"
    # Sliding-window attention is full attention as long as everything fits into the
    # window.
    window = None if config.model_type == "llama" else config.sliding_window
    if window:
        config.max_position_embeddings = min(config.max_position_embeddings, window)
    return config


def require(field: str, value: Any, supported: tuple[Any, ...]) -> None:
    if value not in supported:
        names = ", ".join(map(str, supported))
        raise ValueError(
            f"{field} in config.json must be one of {names}, got {value!r}")


def load_tokenizer(path: Path, config: Any) -> tuple[Any, list[int]]:
    """The tokenizer, None if there is none, and the ids of all EOS tokens."""
    tokenizer = None
    if any(path.glob("tokenizer.*")) or any(path.glob("vocab.json")):
        # With clean-up, the text of a token would depend on what follows it.
        tokenizer = AutoTokenizer.from_pretrained(
            path, clean_up_tokenization_spaces=False)

    # generation_config.json may name several where config.json has one or none.
    eos = read_json(path / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = config.eos_token_id
    if eos is None:
        eos = getattr(tokenizer, "eos_token_id", None)
    eos_ids: Any = eos if isinstance(eos, list) else [eos]
    return tokenizer, [token for token in eos_ids if token in range(config.vocab_size)]


def load_weights(model: CausalLM, whole: CausalLM, ranks: Ranks, path: Path) -> None:
    """Copy this rank's part of every tensor in the safetensors files to its place.

    `whole` is a model with the shapes of the whole tensors. ValueError names the
    tensors that are missing, unknown or misshapen, FileNotFoundError the file that is
    absent.
    """
    targets = find_targets(model)
    missing = find_targets(whole)
    misfits: dict[str, list[int]] = {}
    weight_map = read_json(path / "model.safetensors.index.json").get("weight_map", {})
    for file_name in sorted(set(weight_map.values())) or ["model.safetensors"]:
        for name, tensor in read_tensors(path / file_name).items():
            if name in missing and missing[name].shape == tensor.shape:
                del missing[name]
                if name in targets:  # a bias that all ranks would add is only rank 0's
                    copy_part(tensor, targets[name], ranks)
            # Some files also have what config.json implies.
            elif name in missing or not name.endswith(IMPLIED):
                misfits[name] = list(tensor.shape)

    if missing or misfits:
        shapes = {name: list(target.shape) for name, target in missing.items()}
        raise ValueError(
            f"the weights in {path} must be those of config.json: tensors {shapes} are "
            f"missing, and {misfits} have no place")


def copy_part(tensor: Tensor, target: Tensor, ranks: Ranks) -> None:
    for dim, part in enumerate(target.shape):
        start = ranks.start_of(part, tensor.shape[dim])
        tensor = tensor.narrow(dim, start, part)
    target.copy_(tensor)


def load_dummy_weights(model: CausalLM, seed: int) -> None:
    """Random weights, for benchmarks: normal with std 0.02, around one for norms."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        parameter.normal_(mean, 0.02, generator=generator)


def find_targets(model: CausalLM) -> dict[str, Tensor]:
    """The checkpoint's names, and the parameters or slices they belong to."""
    targets: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        # For example model.layers.0.self_attn.qkv_proj and weight.
        module_path, _, kind = name.rpartition(".")
        module = model.get_submodule(module_path)
        parent, _, own_name = module_path.rpartition(".")
        parts = getattr(module, "parts", {own_name: len(parameter)})
        slices = torch.split(parameter, list(parts.values()))
        for part, rows in zip(parts, slices, strict=True):  # q_proj, k_proj, v_proj
            targets[".".join(filter(None, (parent, part, kind)))] = rows
    return targets
