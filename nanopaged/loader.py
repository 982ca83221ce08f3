"""From a directory or a hub id to the config, the tokenizer and the weights.

transformers reads the first two. Every weight tensor is accounted for: it is an error
if one is missing, or if one is left over that could change an answer.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_local_safetensors_metadata, snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from nanopaged.config import EngineConfig, SamplingParams, check
from nanopaged.cpu_products import compute_dtype, pack, unpack
from nanopaged.model import CausalLM, Linear
from nanopaged.parallel import Ranks

BUNDLED = Path(__file__).parent / "shakespeare"
# What config.json may say. There are more ways to rotate Q and K, but with these the
# angles depend on the position alone, and not on the length of the sequence.
KNOWN = {
    "model_type": ("llama", "mistral", "qwen2", "qwen3"), "hidden_act": ("silu",),
    "rope_type": ("default", "linear", "llama3", "yarn"), "is_causal": (None, True),
    "layer_types": (None, "full_attention", "sliding_attention")}


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Make a library's errors say what could not be read, and what to do about it."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"cannot read {what} (repair it or download it again): "
                         f"{error.__cause__ or error!r}") from error


def load_config(name: str | Path) -> Any:
    """The config, as transformers reads it; ValueError if our decoder cannot run it."""
    with reading(f"config.json of {name}"):
        config = AutoConfig.from_pretrained(name)
    facts = config.to_dict()
    # In transformers 5, all fields about positions are in this one.
    facts |= facts.get("rope_parameters", {})
    quantization = facts.get("quantization_config")
    check(quantization is None, "quantization_config in config.json",
          "absent (quantised weights are not supported)", quantization)
    for field, known in KNOWN.items():
        value = facts.get(field)
        values = value if isinstance(value, list) else [value]
        check(set(values) <= set(known), f"{field} in config.json",
              f"one of {known}", value)
    size = config.hidden_size // config.num_attention_heads
    config.head_dim = facts.get("head_dim") or size
    return config


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer; None for a directory without one."""
    path = Path(name)
    if path.is_dir() and not [*path.glob("tokenizer.*"), *path.glob("vocab.*")]:
        return None
    with reading(f"the tokenizer of {name}"):
        # With clean-up, the text of a token would depend on the tokens after it.
        return AutoTokenizer.from_pretrained(name, clean_up_tokenization_spaces=False)


def load_generation_config(name: str | Path,
                           model_config: Any) -> tuple[list[int], SamplingParams]:
    """The ids of all EOS tokens, and the parameters for requests without their own.

    Both come from generation_config.json, if the model has one. It may name several EOS
    tokens where config.json has one or none.
    """
    fields: dict[str, Any] = {"eos_token_id": model_config.eos_token_id}
    with reading(f"generation_config.json of {name}"):
        with suppress(OSError):  # there is no such file
            fields |= GenerationConfig.from_pretrained(name).to_diff_dict()
        top_k, top_p = fields.pop("top_k", 0), fields.pop("top_p", 1.0)
        params = SamplingParams(
            temperature=fields.pop("temperature", 1.0),
            top_k=top_k,
            top_p=top_p or 1e-6,  # 0 is another way to keep only the most likely one
            min_p=fields.pop("min_p", 0.0),
            repetition_penalty=fields.pop("repetition_penalty", None) or 1.0,
            max_tokens=fields.pop("max_new_tokens", 16))
    eos = fields["eos_token_id"]
    eos_ids = [id for id in (eos if isinstance(eos, list) else [eos])
               if id in range(model_config.vocab_size)]
    # The engine ignores the other fields. With one of these values, a field has no
    # effect anywhere, so it needs no warning.
    ignored = [field for field, value in fields.items() if value not in (None, 0, 1, [])
               and not field.endswith(("_token_id", "_version"))]
    if ignored:
        logging.getLogger("nanopaged").warning(
            "generation_config.json of %s has unsupported fields: %s", name, ignored)
    return eos_ids, params


# -- Weights ---------------------------------------------------------------------------

@torch.no_grad()
def load_model(config: EngineConfig, backend: Any, ranks: Ranks) -> nn.Module:
    """A rank's share of the model, with the weights of its checkpoint.

    For benchmarks, load_format="dummy" makes them random: normally distributed with a
    standard deviation of 0.02, around 1 in norms and around 0 elsewhere.
    """
    dtype = compute_dtype(backend.dtype, backend.device)
    with backend.device, local_torch_dtype(dtype), no_init_weights():
        model = CausalLM(ranks.local_config, backend, ranks).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.to(backend.dtype)
    if config.load_format == "dummy":
        generator = torch.Generator(backend.device).manual_seed(config.seed)
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(mean, 0.02, generator=generator)
    else:
        load_checkpoint(model, BUNDLED if config.model is None else config.model, ranks)
    for linear in linears(model):
        pack(linear)
    return model


def linears(model: nn.Module) -> list[Linear]:
    return [module for module in model.modules() if type(module) is Linear]


def load_checkpoint(model: CausalLM, source: str | Path, ranks: Ranks) -> None:
    """Copy every tensor to its place; ValueError if one is missing or left over.

    A file is mapped into memory, so no more is read than is copied. It is opened again
    for each tensor. Otherwise everything read from it would stay in memory.
    """
    files = find_tensors(source)

    def read(name: str) -> Tensor:
        with reading(str(files[name])), safe_open(files[name], "pt") as tensors:
            return tensors.get_tensor(name)  # type: ignore[no-any-return]

    for target, share in match_tensors(model, files, read, ranks, str(source)):
        target.copy_(share)


@torch.no_grad()
def replace_weights(model: CausalLM, weights: dict[str, Tensor], ranks: Ranks) -> None:
    """The same for tensors in memory. Nothing changes before all have been checked."""
    check(ranks.size == 1, "tensor_parallel_size", "1 for load_weights", ranks.size)
    for name, tensor in weights.items():
        check(isinstance(tensor, Tensor) and not tensor.is_meta, name, "a tensor",
              tensor, TypeError)
    for linear in linears(model):
        unpack(linear)
    try:
        # `pack` has made a copy of a tied head, so it gets the new embeddings, too.
        is_shared = model.lm_head.weight is model.model.embed_tokens.weight
        if ranks.local_config.tie_word_embeddings and not is_shared:
            tied: Any = weights.get("model.embed_tokens.weight")
            weights = {"lm_head.weight": tied} | weights
        places = dict.fromkeys(weights, "load_weights")
        for target, tensor in list(match_tensors(
                model, places, weights.__getitem__, ranks, "load_weights")):
            target.copy_(tensor)
    finally:
        for linear in linears(model):
            pack(linear)


def match_tensors(
        model: CausalLM, places: Mapping[str, Any], read: Callable[[str], Tensor],
        ranks: Ranks, source: str) -> Iterator[tuple[Tensor, Tensor]]:
    """For every tensor of a checkpoint: where it belongs in the model, and this rank's
    share of it; ValueError if one does not fit. `places` says, for errors, where each
    tensor comes from.
    """
    if "lm_head.weight" in places:  # it counts, even if config.json says it is tied
        head = model.lm_head
        head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)

    targets: dict[str, tuple[Tensor, Any]] = {}
    for name, parameter in model.named_parameters():
        # For example model.layers.0.self_attn.qkv_proj.weight. It stacks three matrices
        # of the checkpoint: `stacked` has the names q_proj, k_proj and v_proj, and
        # how many rows each of them has.
        *_, own_name, kind = name.split(".")
        module = model.get_submodule(name.removesuffix(f".{kind}"))
        stacked = getattr(module, "stacked", {own_name: len(parameter)})
        divided = getattr(module, "divided", None)
        rows = parameter.split([*stacked.values()])
        for each, target in zip(stacked, rows, strict=True):
            targets[name.replace(own_name, each)] = target, divided
    # Old checkpoints also have the angles by which Q and K are rotated.
    known = {name for name in places if ".rotary_emb." not in name}
    check(known == targets.keys(), f"the weights in {source}",
          "exactly the tensors that config.json calls for",
          {"missing": sorted(targets.keys() - known),
           "left over": sorted(known - targets.keys())})

    for name, (target, divided) in targets.items():
        tensor = share = read(name)
        if divided in range(tensor.ndim):  # neither None, nor columns of a bias
            share = tensor.tensor_split(ranks.size, divided)[ranks.rank]
        check(share.shape == target.shape, f"the shape of {name} in {places[name]}",
              f"{list(target.shape)} for each rank", list(tensor.shape))
        # This bias is not divided, although its matrix is. The ranks' results are added
        # up, so only rank 0 may add it.
        is_added = divided != 1 or target.ndim != 1 or ranks.rank == 0
        yield target, share if is_added else torch.zeros_like(share)


def find_tensors(source: str | Path) -> dict[str, Path]:
    """The file of each tensor: {"lm_head.weight": path, ...}.

    If a checkpoint has several files, an index says which tensor is in which file. Any
    other file in the directory is ignored.
    """
    path = Path(source)
    if not path.is_dir():
        path = Path(snapshot_download(str(source), allow_patterns="*.safetensors*"))
    with reading(f"the weights in {path}"):
        places = get_local_safetensors_metadata(path).weight_map
    return {name: path / place for name, place in places.items()}
