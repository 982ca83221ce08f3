"""From a checkpoint to the weights of a model.

Transformers reads the checkpoint, whoever computes the model. `fill` then writes the
weights of transformers' model into our own decoder. Every tensor is accounted for: it
is an error if one is missing, or if one is left over that could change an answer.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_utils import load_state_dict, local_torch_dtype
from transformers.utils import logging
from transformers.utils.hub import get_checkpoint_shard_files

from nanopaged.attention import TorchAttention
from nanopaged.checks import check
from nanopaged.config import EngineConfig
from nanopaged.loading.any_decoder import AnyDecoder
from nanopaged.loading.checkpoint import ModelConfig, find_file, reading
from nanopaged.model import CausalLM
from nanopaged.ranks import Ranks

# Faster matrix products, for which weights are packed; None if they cannot run here.
products: Any = None
with suppress(ImportError):
    from nanopaged.cpu import products

# Where the weights are: in one file, or in those that an index names. The first of
# these four that there is counts, as for transformers.
FILES = ("model.safetensors", "model.safetensors.index.json",
         "pytorch_model.bin", "pytorch_model.bin.index.json")
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@torch.no_grad()
def load_model(config: EngineConfig, model_config: ModelConfig, backend: TorchAttention,
               ops: Any, ranks: Ranks) -> Any:
    """A rank's share of the model, with the weights of its checkpoint.

    For benchmarks, load_format="dummy" makes them random: normally distributed with a
    standard deviation of 0.02, around 1 in norms and around 0 elsewhere.
    """
    is_dummy = config.load_format == "dummy"
    if model_config.model_impl == "nanopaged":
        model: Any = make_ours(model_config, backend, ops, ranks)
        if not is_dummy:
            pretrained = load_pretrained(model_config)
            tensors = dict(pretrained.named_parameters(remove_duplicate=False))
            fill(config, model, tensors, ranks)
    else:
        check(ranks.size == 1, "tensor_parallel_size",
              "1 for modules of transformers", ranks.size)
        load = make_pretrained if is_dummy else load_pretrained
        pretrained = load(model_config, backend.dtype)
        for parameter in pretrained.parameters():  # out of the file, which may change
            parameter.data = parameter.data.to(backend.device, copy=True)
        model = AnyDecoder(pretrained, model_config, backend)
    if is_dummy:
        generator = torch.Generator(backend.device).manual_seed(config.seed)
        for name, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.normal_(float(is_norm), 0.02, generator=generator)
    model.requires_grad_(False)
    if products:
        products.pack_products(model, config.batch_invariant)
    return model


def make_ours(model_config: ModelConfig, backend: TorchAttention, ops: Any, ranks: Ranks
              ) -> CausalLM:
    """Our own decoder, without weights. Matrices have the dtype of K and V. All else
    has that of the activations, which differs on a CPU that is slow in bfloat16.
    """
    dtype = backend.dtype
    if products:
        dtype = products.compute_dtype(dtype, backend.device)
    with backend.device, local_torch_dtype(dtype), no_init_weights():
        model = CausalLM(model_config, backend, ops, ranks)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.to(backend.dtype)
    return model


# -- From files ------------------------------------------------------------------------

def stored_tensors(source: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, with shape and dtype, but without their numbers.

    ValueError if a file is missing or damaged: transformers would not say which one.
    And if two files have the same tensor: it would take the last one.
    Files that an index does not name are ignored, and are not downloaded.
    """
    with reading(f"the weights in {source}"):
        found = next(filter(None, (find_file(source, name) for name in FILES)), "")
        files = [found]
        if found.endswith(".json"):
            files, _ = get_checkpoint_shard_files(source, found)
    check(bool(found), f"the weights in {source}", f"in one of {FILES}", "none")
    tensors: dict[str, Tensor] = {}
    for file in files:
        with reading(file):
            more = load_state_dict(file, map_location="meta")
        twice = sorted(tensors.keys() & more.keys())
        check(not twice, f"the tensors in {file}", "in no other file, too", twice)
        tensors |= more
    return tensors


def main_dtype(tensors: dict[str, Tensor]) -> torch.dtype:
    """The dtype of the largest of these tensors."""
    return max(tensors.values(), key=Tensor.numel).dtype


def load_pretrained(model_config: ModelConfig, dtype: torch.dtype | None = None) -> Any:
    """Transformers' model, with the weights of the checkpoint; ValueError if a tensor
    is missing, is left over, or does not fit.

    Tensors that are stored in this dtype (None: that of the largest one) are mapped
    into memory: they are read when they are used, and the system may forget that again.
    """
    source = model_config.source
    stored = stored_tensors(source)
    dtype = dtype or main_dtype(stored)
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with reading(f"the weights in {source}"):
            model, info = AutoModelForCausalLM.from_pretrained(
                source, config=model_config.hf_config, dtype=dtype,
                attn_implementation="eager", ignore_mismatched_sizes=True,
                output_loading_info=True, trust_remote_code=False)
    finally:
        if shows_bars:
            logging.enable_progress_bar()
    check_fit(source, info["missing_keys"], info["unexpected_keys"],
              info["mismatched_keys"])
    for name in sorted(stored.keys() & dict(model.named_parameters())):
        check(stored[name].dtype in FLOATS, f"the dtype of {name}",
              f"one of {FLOATS}", stored[name].dtype)
    return model


def make_pretrained(model_config: ModelConfig, dtype: torch.dtype) -> Any:
    """Transformers' model, with weights that mean nothing."""
    return AutoModelForCausalLM.from_config(
        model_config.hf_config, dtype=dtype, attn_implementation="eager",
        trust_remote_code=False).eval()


def check_fit(source: object, missing: Any, left_over: Any, shapes: Any) -> None:
    """ValueError if tensors are missing, if nobody needs some of them, or if a shape is
    not what is expected. `shapes` has names, the shapes found, and those expected.
    """
    found = (f"{len(missing)} missing {sorted(missing)[:2]} and "
             f"{len(left_over)} left over {sorted(left_over)[:2]}")
    if missing or left_over:
        raise ValueError(f"the weights in {source} must be exactly the tensors that "
                         f"config.json calls for, got {found} (are names or prefixes "
                         "as `save_pretrained` of transformers writes them?)")
    for name, shape, expected in sorted(shapes):
        check(shape == expected, f"the shape of {name}", [*expected], [*shape])


# -- From `load_weights` ---------------------------------------------------------------

def check_weights(model_config: ModelConfig, weights: dict[str, Tensor], ranks: Ranks
                  ) -> None:
    """ValueError or TypeError if these tensors cannot replace the weights of a model,
    because one is missing, is left over, or does not fit.
    """
    check(ranks.size == 1, "tensor_parallel_size", "1 for load_weights", ranks.size)
    check(model_config.model_impl == "nanopaged", "model_impl",
          "'nanopaged' for load_weights", model_config.model_impl)
    for name, tensor in weights.items():
        # (A DTensor has only a part of its numbers. A FakeTensor has none, and a
        # parameter that FSDP has divided has no memory.)
        kind: Any = type(tensor)
        is_right = (
            isinstance(tensor, Tensor) and tensor.layout == torch.strided
            and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
            and tensor.dtype in FLOATS and tensor.untyped_storage().data_ptr() != 0)
        found = f"{kind.__name__} of {getattr(tensor, 'dtype', None)}"
        check(is_right, name, "a dense tensor of floating-point numbers, all here",
              found, TypeError)
    with torch.device("meta"):  # names and shapes alone
        expected = make_pretrained(model_config, torch.float32).state_dict()
    if model_config.tie_word_embeddings and HEAD not in weights:
        del expected[HEAD]
    # Old checkpoints also have the angles by which Q and K are rotated.
    given = {name for name in weights if ".rotary_emb." not in name}
    missing, left_over = expected.keys() - given, given - expected.keys()
    shapes = [(name, weights[name].shape, expected[name].shape)
              for name in given & expected.keys()]
    check_fit(model_config.source, missing, left_over, shapes)


def replace_weights(runner: Any, weights: dict[str, Tensor]) -> None:
    """Replace the weights of a model in use. If this breaks off, only some are new."""
    with runner.settings(), torch.inference_mode(False):
        fill(runner.config, runner.model, weights, runner.ranks)
        if products:
            products.pack_products(runner.model, runner.config.batch_invariant)


# -- Into our own decoder --------------------------------------------------------------

@torch.no_grad()
def fill(config: EngineConfig, model: CausalLM, tensors: dict[str, Tensor],
         ranks: Ranks) -> None:
    """Write these tensors into the model."""
    tensors = {HEAD: tensors[EMBEDDINGS]} | tensors  # in case that the head is tied
    is_tied = tensors[HEAD] is tensors[EMBEDDINGS]
    if not is_tied and model.lm_head.weight is model.model.embed_tokens.weight:
        # The checkpoint has a head, although config.json says that it is tied.
        model.lm_head.weight = nn.Parameter(
            torch.empty_like(model.lm_head.weight), requires_grad=False)
    # (Where the head and the embeddings are one parameter, it is listed once.)
    for name in [name for name, _ in model.named_parameters()]:
        # For example model.layers.0.self_attn.qkv_proj.weight. It stacks three matrices
        # of the checkpoint: `stacked` has the names q_proj, k_proj and v_proj, and how
        # many rows of each are on this rank.
        path, _, kind = name.rpartition(".")
        module, own_name = model.get_submodule(path), path.rpartition(".")[2]
        target = getattr(module, kind)
        stacked = getattr(module, "stacked", {own_name: len(target)})
        shares = [share(tensors[name.replace(own_name, each)], module, ranks)
                  for each in stacked]
        if target.is_mkldnn:  # packed: it cannot be written to
            module.weight = nn.Parameter(
                torch.cat(shares).to(target.dtype), requires_grad=False)
            products.pack(module, config.batch_invariant)
        else:  # in place: CUDA graphs have its address
            parts = target.split([*stacked.values()])
            for part, new in zip(parts, shares, strict=True):
                part.copy_(new)


def share(tensor: Tensor, module: Any, ranks: Ranks) -> Tensor:
    """This rank's share of a tensor."""
    divided = getattr(module, "divided", None)  # the dimension that ranks divide
    if divided is not None and divided < tensor.ndim:
        return tensor.tensor_split(ranks.size, divided)[ranks.rank]
    # A bias has no dimension 1. The ranks' results are added up, so rank 0 adds it.
    return torch.zeros_like(tensor) if divided == 1 and ranks.rank > 0 else tensor
