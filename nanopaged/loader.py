"""From a directory or a hub id to config, tokenizer (by transformers) and weights.

Every tensor of a checkpoint is accounted for: none is missing, and none is left over
but what follows from the others.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers.modeling_utils import local_torch_dtype

from nanopaged.config import EngineConfig, SamplingParams, check
from nanopaged.model import CausalLM, Linear, pack
from nanopaged.parallel import Ranks

BUNDLED = Path(__file__).parent / "shakespeare"
WEIGHTS = "model*.safetensors"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Angles depend on positions alone, not on the length of the sequence.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def load_config(name: str | Path) -> Any:
    """transformers' config, if the decoder can compute what it says.

    In transformers 5, `rope_parameters` has everything about positions.
    """
    config = transformers.AutoConfig.from_pretrained(name)
    facts = config.to_dict()
    facts |= facts.get("rope_parameters", {})
    for field, known in (("model_type", FAMILIES), ("hidden_act", ("silu",)),
                         ("rope_type", ROPE_TYPES), ("is_causal", (None, True))):
        value = facts.get(field)
        check(value in known, f"{field} in config.json", f"one of {known}", value)
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer; None for a directory without one."""
    path = Path(name)
    if path.is_dir() and not [*path.glob("tokenizer.*"), *path.glob("vocab.*")]:
        return None
    # With clean-up, the text of a token would depend on what follows it.
    return transformers.AutoTokenizer.from_pretrained(
        name, clean_up_tokenization_spaces=False)


def load_generation_config(name: str | Path,
                           model_config: Any) -> tuple[list[int], SamplingParams]:
    """The ids of all EOS tokens, and the parameters for requests without any."""
    fields = {"eos_token_id": model_config.eos_token_id}
    with suppress(OSError):  # if the model has no generation_config.json
        # It may name several EOS tokens where config.json has one or none.
        fields |= transformers.GenerationConfig.from_pretrained(name).to_diff_dict()
    eos = fields["eos_token_id"]
    eos_ids = [id for id in (eos if isinstance(eos, list) else [eos])
               if id in range(model_config.vocab_size)]
    names = fields.keys() & {"temperature", "top_p", "top_k"}
    params = {name: fields[name] for name in names}
    return eos_ids, SamplingParams(
        max_tokens=fields.get("max_new_tokens") or 16, **params)


# -- Weights ---------------------------------------------------------------------------

@torch.no_grad()
def load_model(config: EngineConfig, backend: Any, ranks: Ranks) -> nn.Module:
    """A rank's share of the model, with the values of a checkpoint; or random ones, for
    benchmarks: normal with std 0.02, around one for norms.
    """
    with backend.device, local_torch_dtype(backend.dtype):
        model = CausalLM(ranks.share, backend, ranks).requires_grad_(False)
    if config.load_format == "dummy":
        generator = torch.Generator(backend.device).manual_seed(config.seed)
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(mean, 0.02, generator=generator)
    else:
        load_checkpoint(model, config.model or BUNDLED, ranks)
    for module in model.modules():
        if type(module) is Linear:
            pack(module)
    return model


def load_checkpoint(model: CausalLM, name: str | Path, ranks: Ranks) -> None:
    """Copy every tensor to its place; ValueError if one is missing or left over."""
    path = Path(name)
    if not path.is_dir():
        path = Path(snapshot_download(str(name), allow_patterns=WEIGHTS))
    files: dict[str, Path] = {}
    for file in sorted(path.glob(WEIGHTS)):
        with safe_open(file, "pt") as tensors:
            files |= dict.fromkeys(tensors.keys(), file)

    targets: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        # For example model.layers.0.self_attn.qkv_proj.weight, which has several parts.
        *_, own_name, kind = name.split(".")
        module = model.get_submodule(name.removesuffix(f".{kind}"))
        parts = getattr(module, "parts", {own_name: len(parameter)})
        names = [name.replace(own_name, part) for part in parts]  # q_proj, k_proj, ..
        rows = parameter.split(list(parts.values()))
        targets |= zip(names, rows, strict=True)
    missing = sorted(targets.keys() - files.keys())
    # Some files have a head although it is tied; old ones have the angles of positions.
    left_over = sorted(name for name in files.keys() - targets.keys()
                       if name != "lm_head.weight" and ".rotary_emb." not in name)
    check(not missing and not left_over, f"the weights in {path}",
          "the tensors of config.json, no more and no fewer",
          {"missing": missing, "left over": left_over})

    for name, target in targets.items():
        copy_part(files[name], name, target, ranks)
        if ranks.rank and name.endswith(("o_proj.bias", "down_proj.bias")):
            target.zero_()  # the ranks' results are added up: rank 0 adds the bias


def copy_part(file: Path, name: str, target: Tensor, ranks: Ranks) -> None:
    """Copy a rank's part of a tensor: an equal part of each dimension that is divided.

    The file is mapped into memory, so no more is read than is copied. It is opened anew
    for each tensor, or else all that was read of it would stay in memory.
    """
    with safe_open(file, "pt") as tensors:
        tensor = tensors.get_tensor(name)
        shape = list(tensor.shape)
        for dim, (size, part) in enumerate(zip(shape, target.shape, strict=False)):
            if size == part * ranks.size:
                tensor = tensor.chunk(ranks.size, dim)[ranks.rank]
        check(tensor.shape == target.shape, f"the shape of {name} in {file}",
              f"{list(target.shape)} for each rank", shape)
        target.copy_(tensor)
