"""From a directory or a hub id to config, tokenizer and weights.

Every tensor of a checkpoint is accounted for: none is missing, and none is left over.
"""

import json
import logging
from math import inf
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from nanopaged.config import EngineConfig, PathLike, SamplingParams, check_range
from nanopaged.model import CausalLM
from nanopaged.parallel import Ranks

BUNDLED = Path(__file__).parent / "shakespeare"
TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # angles depend on positions alone
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads", "num_key_value_heads")
# Fields of generation_config.json, and what they are called here.
DEFAULT_PARAMS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
                  "min_p": "min_p", "max_new_tokens": "max_tokens"}

logger = logging.getLogger("nanopaged")


# -- Files -----------------------------------------------------------------------------

def resolve(name: PathLike | None, config: EngineConfig, patterns: list[str],
            marker: str = "config.json") -> Path:
    """A directory: bundled, local (it has the `marker`), or a snapshot from the hub."""
    path = BUNDLED if name is None else Path(name).expanduser()
    if (path / marker).is_file():
        return path
    try:
        return Path(snapshot_download(
            str(name), revision=config.revision, cache_dir=config.download_dir,
            allow_patterns=patterns))
    except Exception as error:  # the hub client's own, httpx's and OSError
        kind = "tokenizer" if marker == "tokenizer_config.json" else "model"
        raise ValueError(
            f"{kind} must be a directory with a {marker}, or the id of a repository on "
            f"the hub (revision={config.revision!r}), got {str(name)!r:.200}: "
            f"{str(error):.500}") from error


def resolve_model(config: EngineConfig) -> Path:
    weights = ["model*.safetensors"] if config.load_format != "dummy" else []
    return resolve(config.model, config, TOKENIZER_FILES + weights)


def read_json(file: Path) -> dict[str, Any]:
    """The fields of a JSON file; none if there is no such file."""
    if not file.is_file():
        return {}
    try:
        fields = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} must be a JSON file, not cut short: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file} must hold a JSON object, got {str(fields):.80}")
    return fields


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped: they are read when they are used."""
    if not file.is_file():
        others = [other.name for other in file.parent.glob("*.bin")]
        hint = f": convert {others[0]} to safetensors first" if others else ""
        raise FileNotFoundError(f"{file} must be a safetensors file{hint}")
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(file)
        return tensors
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{file} must be a safetensors file, not cut short: {error}") from error


# -- config.json -----------------------------------------------------------------------

def load_config(path: Path, overrides: dict[str, Any] | None = None) -> Any:
    """transformers' config, with the differences between the families spelled out.

    ValueError names what the decoder cannot compute.
    """
    overrides = overrides or {}
    raw = read_json(path / "config.json") | overrides
    require("model_type", raw.get("model_type"), FAMILIES)
    require("quantization_config", raw.get("quantization_config"), (None,))
    for size in SIZES:
        check_range(f"{size} in config.json", raw.get(size, 1), 1, inf)
    config = AutoConfig.from_pretrained(path, **overrides)
    rope = config.rope_parameters  # in transformers 5 it has all about positions
    require("rope_type", rope.get("rope_type"), ROPE_TYPES)
    require("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,))
    require("hidden_act", config.hidden_act, ("silu",))
    check_range("rope_theta in config.json", rope.get("rope_theta"), 1, 1e30)
    check_range("rms_norm_eps in config.json", config.rms_norm_eps, 0, 1)

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
            f"{field} in config.json must be one of {names}, got {value!r:.80}")


# -- The tokenizer, and generation_config.json -----------------------------------------

def load_tokenizer(path: Path, config: EngineConfig) -> Any:
    """The tokenizer; None if there is none, or if it is not wanted."""
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        path = resolve(
            config.tokenizer, config, TOKENIZER_FILES, "tokenizer_config.json")
    elif not any(path.glob("tokenizer.*")) and not any(path.glob("vocab.json")):
        return None
    try:
        # With clean-up, the text of a token would depend on what follows it.
        return AutoTokenizer.from_pretrained(
            path, clean_up_tokenization_spaces=False,
            trust_remote_code=config.trust_remote_code)
    except Exception as error:  # of any kind: KeyError, TypeError, AttributeError, ..
        raise ValueError(
            f"the tokenizer in {path} cannot be loaded: {error!r:.600}") from error


def load_generation_config(
    path: Path, model_config: Any, tokenizer: Any
) -> tuple[list[int], SamplingParams]:
    """The ids of all EOS tokens, and the parameters for requests without any."""
    file = path / "generation_config.json"
    fields = read_json(file)

    # It may name several EOS tokens where config.json has one or none.
    eos = fields.get("eos_token_id")
    if eos is None:
        eos = model_config.eos_token_id
    if eos is None:
        eos = getattr(tokenizer, "eos_token_id", None)
    eos_ids: Any = eos if isinstance(eos, list) else [] if eos is None else [eos]
    for token in eos_ids:
        if type(token) is not int:
            raise ValueError(
                f"eos_token_id in {path} must be token ids, got {token!r:.80}")

    params = {}
    for name, own_name in DEFAULT_PARAMS.items():
        if fields.get(name) is not None:
            params[own_name] = fields[name]
    if fields.get("repetition_penalty", 1.0) != 1.0:
        logger.info("repetition_penalty in %s is not supported: it is left out", file)
    try:
        default_params = SamplingParams(**params)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error
    eos_ids = [id for id in eos_ids if id in range(model_config.vocab_size)]
    return eos_ids, default_params


# -- Weights ---------------------------------------------------------------------------

def load_weights(model: CausalLM, whole: CausalLM, ranks: Ranks, path: Path) -> None:
    """Copy this rank's part of every tensor in the safetensors files to its place.

    `whole` is a model with the shapes of the whole tensors. ValueError names the
    tensors that are missing, unknown, misshapen or not finite, FileNotFoundError the
    file that is absent.
    """
    targets = find_targets(model)
    missing = find_targets(whole)  # all of them, so far
    is_tied = HEAD not in missing  # the head is the embedding then, and has no own name
    tied: dict[str, Tensor] = {}
    misfits: dict[str, list[int]] = {}
    seen: set[str] = set()
    for file in weight_files(path):
        for name, tensor in read_tensors(file).items():
            if name in seen:
                raise ValueError(f"{file} must not repeat {name} of another file")
            seen.add(name)
            if is_tied and name in (HEAD, EMBEDDING):
                tied[name] = tensor
            if name in missing and missing[name].shape == tensor.shape:
                check_numbers(name, tensor)
                del missing[name]
                if name in targets:  # a bias that all ranks would add is only rank 0's
                    copy_part(tensor, targets[name], ranks)
            elif name in tied or name.endswith("rotary_emb.inv_freq"):
                pass  # some files also have what config.json implies
            else:
                misfits[name] = list(tensor.shape)

    check_names(path, missing, misfits)
    if HEAD in tied and not torch.equal(tied[HEAD], tied[EMBEDDING]):
        raise ValueError(
            f"{HEAD} in {path} must equal {EMBEDDING}, as tie_word_embeddings is set "
            "in config.json: unset it")


def check_names(path: Path, missing: dict[str, Tensor],
                misfits: dict[str, list[int]]) -> None:
    """Raise an error unless every tensor of the model was there, and no others.

    missing: targets without a tensor; misfits: shapes of tensors without a target.
    """
    # transformers' base models have no head, and no "model." before the names.
    if set(missing) == {HEAD} or EMBEDDING.removeprefix("model.") in misfits:
        raise ValueError(
            f"the weights in {path} must have {HEAD}, which gives the logits: those of "
            "a base model are not enough")
    if missing or misfits:
        shapes = {name: list(target.shape) for name, target in missing.items()}
        raise ValueError(
            f"the weights in {path} must be those of config.json: tensors "
            f"{str(shapes):.600} are missing, and {str(misfits):.600} have no place")


def weight_files(path: Path) -> list[Path]:
    weight_map = read_json(path / INDEX).get("weight_map", {})
    if not isinstance(weight_map, dict):
        raise ValueError(f"weight_map in {path / INDEX} must be a JSON object")
    for file_name in weight_map.values():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ValueError(
                f"weight_map in {path / INDEX} must name files of this directory, got "
                f"{file_name!r:.200}")
    names = sorted(set(weight_map.values())) or ["model.safetensors"]
    return [path / name for name in names]


def check_numbers(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in WEIGHT_DTYPES:
        raise ValueError(
            f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}: "
            "quantized weights are not supported")
    lowest, highest = torch.aminmax(tensor)  # both are NaN if any element is
    if not (lowest.isfinite() and highest.isfinite()):
        raise ValueError(f"{name} must be finite, but has NaN or infinity")


def copy_part(tensor: Tensor, target: Tensor, ranks: Ranks) -> None:
    for dim, part in enumerate(target.shape):
        start = ranks.start_of(part, tensor.shape[dim])
        tensor = tensor.narrow(dim, start, part)
    target.copy_(tensor)


def load_dummy_weights(model: CausalLM, seed: int | None) -> None:
    """Random weights, for benchmarks: normal with std 0.02, around one for norms."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed or 0)
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
