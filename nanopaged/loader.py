"""From a directory or a hub id to config, tokenizer and weights, by transformers.

Every tensor of a checkpoint is accounted for: none is missing, and none is left over.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanopaged.config import EngineConfig, SamplingParams, check
from nanopaged.model import CausalLM, Linear
from nanopaged.parallel import Ranks

BUNDLED = Path(__file__).parent / "shakespeare"
WEIGHTS = "model*.safetensors"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Angles depend on positions alone, not on the length of the sequence.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def load_config(name: str | Path) -> Any:
    """transformers' config, if the decoder can compute what it says.

    In transformers 5, `rope_parameters` has all about positions.
    """
    config = transformers.AutoConfig.from_pretrained(name)
    for field, value, known in (
            ("model_type", config.model_type, FAMILIES),
            ("hidden_act", config.hidden_act, ("silu",)),
            ("rope_type", config.rope_parameters["rope_type"], ROPE_TYPES)):
        check(value in known, f"{field} in config.json", f"one of {known}", value)
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer; None for a directory without one."""
    path = Path(name)
    if path.is_dir() and not {*path.glob("tokenizer.*"), *path.glob("vocab.*")}:
        return None
    # With clean-up, the text of a token would depend on what follows it.
    return transformers.AutoTokenizer.from_pretrained(
        name, clean_up_tokenization_spaces=False)


def load_generation_config(name: str | Path,
                           model_config: Any) -> tuple[list[int], SamplingParams]:
    """The ids of all EOS tokens, and the parameters for requests without any."""
    fields: dict[str, Any] = {}
    with suppress(OSError):  # if the model has none
        fields = transformers.GenerationConfig.from_pretrained(name).to_diff_dict()
    # It may name several EOS tokens where config.json has one or none.
    eos = fields.get("eos_token_id", model_config.eos_token_id)
    eos_ids = [id for id in (eos if isinstance(eos, list) else [eos])
               if id in range(model_config.vocab_size)]
    names = ("temperature", "top_p", "top_k", "min_p")
    params = {name: fields[name] for name in names if fields.get(name) is not None}
    return eos_ids, SamplingParams(
        max_tokens=fields.get("max_new_tokens") or 16, **params)


# -- Weights ---------------------------------------------------------------------------

@torch.no_grad()
def load_weights(model: CausalLM, config: EngineConfig) -> None:
    """Give every parameter its values: a checkpoint's; or random ones, for benchmarks:
    normal with std 0.02, around one for norms.
    """
    if config.load_format == "dummy":
        generator = torch.Generator(model.lm_head.weight.device)
        generator.manual_seed(config.seed)
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(mean, 0.02, generator=generator)
    else:
        load_checkpoint(model, config.model or BUNDLED)
    for module in model.modules():
        if isinstance(module, Linear):
            module.pack()


def load_checkpoint(model: CausalLM, name: str | Path) -> None:
    """Copy every tensor to its place; ValueError if one is missing or left over."""
    path = Path(name)
    if not path.is_dir():
        path = Path(snapshot_download(str(name), allow_patterns=WEIGHTS))
    files: dict[str, Path] = {}
    for file in sorted(path.glob(WEIGHTS)):
        try:
            with safe_open(file, "pt") as tensors:
                files |= dict.fromkeys(tensors.keys(), file)
        except SafetensorError as error:
            raise ValueError(f"{file} is broken, or cut short: {error}") from error

    missing = []
    for name, parameter in model.named_parameters():
        # For example model.layers.0.self_attn.qkv_proj.weight, which has several parts.
        *parents, own_name, kind = name.split(".")
        module = model.get_submodule(".".join([*parents, own_name]))
        parts = getattr(module, "parts", {own_name: len(parameter)})
        targets = parameter.split(list(parts.values()))
        for part, target in zip(parts, targets, strict=True):  # q_proj, k_proj, v_proj
            source = ".".join([*parents, part, kind])
            if source in files:
                copy_part(files.pop(source), source, target, model.ranks)
            else:
                missing.append(source)
        if own_name in ("o_proj", "down_proj") and kind == "bias" and model.ranks.rank:
            parameter.zero_()  # the ranks' results are added up: rank 0 adds the bias

    files.pop("lm_head.weight", None)  # some files have it although it is tied
    check(not missing and not files, f"the weights in {path}",
          "the tensors of config.json, no more and no fewer",
          {"missing": missing, "left over": list(files)})


def copy_part(file: Path, name: str, target: Tensor, ranks: Ranks) -> None:
    """Copy a rank's part of a tensor: an equal part of each dimension that is divided.

    The file is opened anew, or else all that was read of it would stay in memory.
    """
    with safe_open(file, "pt") as tensors:
        whole = tensors.get_slice(name)
        shape, parts = whole.get_shape(), list(target.shape)
        pairs = list(zip(shape, parts, strict=False))
        fits = all(size in (part, part * ranks.size) for size, part in pairs)
        check(fits and len(shape) == len(parts), f"the shape of {name} in {file}",
              f"{parts} for each rank", shape)
        firsts = [0 if size == part else ranks.rank * part for size, part in pairs]
        target.copy_(whole[tuple(
            slice(first, first + part)
            for first, part in zip(firsts, parts, strict=True))])


