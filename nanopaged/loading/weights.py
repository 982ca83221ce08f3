"""From the tensors of a checkpoint to the weights of a model.

Every tensor is accounted for: it is an error if one is missing, or if one is left over
that could change an answer.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from nanopaged.checks import check
from nanopaged.config import EngineConfig
from nanopaged.loading.any_decoder import AnyDecoder, Sizes
from nanopaged.loading.checkpoint import find_tensors, reading
from nanopaged.model import CausalLM, Linear
from nanopaged.ranks import Ranks


def optional(module: str) -> Any:
    """A module of this package; None if it, or a package that it needs, is missing."""
    try:
        return import_module(f"nanopaged.{module}")
    except ImportError:
        return None


products = optional("cpu.products")
# The ends of the names of layers whose weight is used only in their matrix product.
PACKED = ("proj", "lm_head", "dense", "fc1", "fc2", "embed_out")


@torch.no_grad()
def load_model(config: EngineConfig, backend: Any, ranks: Ranks) -> nn.Module:
    """A rank's share of the model, with the weights of its checkpoint.

    For benchmarks, load_format="dummy" makes them random: normally distributed with a
    standard deviation of 0.02, around 1 in norms and around 0 elsewhere.
    """
    dtype = backend.dtype  # of matrices, K and V; products may be in another one
    if products:
        dtype = products.compute_dtype(dtype, backend.device)
    if isinstance(ranks.local_config, Sizes):
        check(ranks.size == 1, "tensor_parallel_size",
              "1 for modules of transformers", ranks.size)
        with reading(f"the weights of {config.model}"):
            model: nn.Module = AnyDecoder(config, ranks.local_config, backend)
    else:
        with backend.device, local_torch_dtype(dtype), no_init_weights():
            model = CausalLM(ranks.local_config, backend, ranks)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.to(backend.dtype)
    model.requires_grad_(False)
    if config.load_format == "dummy":
        generator = torch.Generator(backend.device).manual_seed(config.seed)
        for name, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.normal_(float(is_norm), 0.02, generator=generator)
    elif isinstance(model, CausalLM):
        load_checkpoint(model, config.model, ranks)  # type: ignore[arg-type]
    pack_products(model)
    return model


def pack_products(model: nn.Module) -> None:
    """On a CPU, let the model compute its matrix products faster."""
    if products:
        linears = [module for name, module in model.named_modules()
                   if type(module) in (nn.Linear, Linear) and name.endswith(PACKED)]
        for linear in linears:
            products.pack(linear)
        products.pad_if_faster(linears)


def load_checkpoint(model: CausalLM, source: str | Path, ranks: Ranks) -> None:
    """Copy every tensor to its place; ValueError if one is missing or left over.

    A file is mapped into memory, so no more is read than is copied. It is opened again
    for each tensor. Otherwise everything read from it would stay in memory.
    """
    found = find_tensors(source)
    shapes = {name: info.shape for name, (_, info) in found.items()}

    def read(name: str) -> Tensor:
        file, _ = found[name]
        with reading(str(file)), safe_open(file, "pt") as tensors:
            return tensors.get_tensor(name)  # type: ignore[no-any-return]

    for place in match_tensors(model, shapes, ranks, str(source)):
        write(place, read, ranks)


@torch.no_grad()
def replace_weights(model: CausalLM, weights: dict[str, Tensor], ranks: Ranks) -> None:
    """The same for tensors in memory. Nothing changes before all have been checked."""
    check(ranks.size == 1, "tensor_parallel_size", "1 for load_weights", ranks.size)
    check(isinstance(model, CausalLM), "model_impl", "'nanopaged' for load_weights",
          "transformers")
    for name, tensor in weights.items():
        is_right = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        check(is_right and tensor.is_floating_point() and not tensor.is_meta, name,
              "a dense tensor of floating-point numbers", tensor, TypeError)
    shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
    for place in match_tensors(model, shapes, ranks, "load_weights"):
        write(place, weights.__getitem__, ranks)
    pack_products(model)


class Place(NamedTuple):
    """A parameter of the model, and the tensors of the checkpoint that it stacks."""

    module: Any
    kind: str  # "weight" or "bias"
    names: list[str]
    divided: int | None  # the dimension of the tensors that ranks divide


def match_tensors(model: CausalLM, shapes: Mapping[str, list[int]], ranks: Ranks,
                  source: str) -> list[Place]:
    """Where the tensors with these names and shapes belong; ValueError if one is
    missing, is left over, or does not fit.
    """
    head, embeddings = "lm_head.weight", "model.embed_tokens.weight"
    # A head in the checkpoint counts, even if config.json says that it is tied.
    is_tied = ranks.local_config.tie_word_embeddings and head not in shapes
    if not is_tied and model.lm_head.weight is model.model.embed_tokens.weight:
        model.lm_head.weight = nn.Parameter(
            model.lm_head.weight.clone(), requires_grad=False)
    places: list[Place] = []
    expected: dict[str, list[int]] = {}
    # (If the head is the same parameter as the embeddings, only those are listed.)
    for name, parameter in model.named_parameters():
        # For example model.layers.0.self_attn.qkv_proj.weight. It stacks three matrices
        # of the checkpoint: `stacked` has the names q_proj, k_proj and v_proj, and
        # how many rows each of them has.
        path, _, kind = name.rpartition(".")
        module, own_name = model.get_submodule(path), path.rpartition(".")[2]
        stacked = getattr(module, "stacked", {own_name: len(parameter)})
        names = [name.replace(own_name, each) for each in stacked]
        if is_tied and names == [head]:
            names = [embeddings]
        divided = getattr(module, "divided", None)
        if kind == "bias" and divided == 1:
            divided = None  # it has no columns
        places.append(Place(module, kind, names, divided))
        for each, num_rows in zip(names, stacked.values(), strict=True):
            expected[each] = [num_rows, *parameter.shape[1:]]
            if divided is not None:
                expected[each][divided] *= ranks.size

    # Old checkpoints also have the angles by which Q and K are rotated.
    known = {name for name in shapes if ".rotary_emb." not in name}
    check(known == expected.keys(), f"the weights in {source}",
          "exactly the tensors that config.json calls for",
          {"missing": sorted(expected.keys() - known),
           "left over": sorted(known - expected.keys())})
    for name, shape in expected.items():
        check(list(shapes[name]) == shape, f"the shape of {name} in {source}", shape,
              list(shapes[name]))
    return places


def write(place: Place, read: Callable[[str], Tensor], ranks: Ranks) -> None:
    """Give a parameter this rank's share of its tensors."""
    module, kind, names, divided = place
    shares = [read(name) for name in names]
    if divided is not None:
        shares = [each.tensor_split(ranks.size, divided)[ranks.rank] for each in shares]
    # The results of a matrix whose columns are divided are added up, so only rank 0 may
    # add its bias.
    is_added_up = getattr(module, "divided", None) == 1
    if kind == "bias" and is_added_up and ranks.rank > 0:
        shares = [torch.zeros_like(share) for share in shares]
    value = torch.cat(shares) if len(shares) > 1 else shares[0]
    target = getattr(module, kind)
    if target.is_mkldnn:  # a packed weight cannot be overwritten
        target = torch.empty(value.shape, dtype=target.dtype)
        module.weight = nn.Parameter(target, requires_grad=False)
    target.copy_(value)  # in place: CUDA graphs have its address
