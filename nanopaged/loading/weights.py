"""From the tensors of a checkpoint to the weights of a model.

Every tensor is accounted for: it is an error if one is missing, or if one is left over
that could change an answer.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from nanopaged.attention import TorchAttention
from nanopaged.checks import check, check_tensors
from nanopaged.config import EngineConfig
from nanopaged.loading.any_decoder import AnyDecoder
from nanopaged.loading.checkpoint import ModelConfig, find_tensors, reading
from nanopaged.model import CausalLM
from nanopaged.ranks import Ranks


def optional(module: str) -> Any:
    """A module of this package; None if it, or a package that it needs, is missing."""
    try:
        return import_module(f"nanopaged.{module}")
    except ImportError:
        return None


# Faster matrix products, for which weights are packed; None if they cannot run here.
products = optional("cpu.products")


@torch.no_grad()
def load_model(config: EngineConfig, model_config: ModelConfig, backend: TorchAttention,
               ops: Any, ranks: Ranks) -> Any:
    """A rank's share of the model, with the weights of its checkpoint.

    For benchmarks, load_format="dummy" makes them random: normally distributed with a
    standard deviation of 0.02, around 1 in norms and around 0 elsewhere.
    """
    # Matrices, K and V have backend.dtype; norms and activations have compute_dtype.
    compute_dtype = backend.dtype
    if products:
        compute_dtype = products.compute_dtype(compute_dtype, backend.device)
    is_ours = model_config.model_impl == "nanopaged"
    model: Any
    if not is_ours:
        check(ranks.size == 1, "tensor_parallel_size",
              "1 for modules of transformers", ranks.size)
        with reading(f"the weights of {model_config.source}"):
            model = AnyDecoder(config, model_config, backend)
    else:
        with backend.device, local_torch_dtype(compute_dtype), no_init_weights():
            model = CausalLM(model_config, backend, ops, ranks)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.to(backend.dtype)
    model.requires_grad_(False)
    if config.load_format == "dummy":
        generator = torch.Generator(backend.device).manual_seed(config.seed)
        for name, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.normal_(float(is_norm), 0.02, generator=generator)
    elif is_ours:  # an AnyDecoder has loaded its own
        fill(model, model_config, find_tensors(model_config.source), ranks)
    if products:
        products.pack_products(model)
    return model


@torch.no_grad()
def replace_weights(model: CausalLM, model_config: ModelConfig,
                    weights: dict[str, Tensor], ranks: Ranks) -> None:
    """Replace the weights of a model in use."""
    check(ranks.size == 1, "tensor_parallel_size", "1 for load_weights", ranks.size)
    check(model_config.model_impl == "nanopaged", "model_impl",
          "'nanopaged' for load_weights", model_config.model_impl)
    for name, tensor in weights.items():
        is_right = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        check(is_right and tensor.is_floating_point() and not tensor.is_meta, name,
              "a dense tensor of floating-point numbers", tensor, TypeError)
    fill(model, model_config, weights, ranks)
    if products:
        products.pack_products(model)


def fill(model: CausalLM, model_config: ModelConfig, tensors: dict[str, Tensor],
         ranks: Ranks) -> None:
    """Write these tensors into the model; ValueError, before anything changes, if one
    is missing, is left over, or does not fit.
    """
    head, embeddings = "lm_head.weight", "model.embed_tokens.weight"
    # A head in the checkpoint is used even if config.json says that it is tied.
    is_tied = model_config.tie_word_embeddings and head not in tensors
    places = []
    expected: dict[str, list[int]] = {}
    # A tied head is the same parameter as the embeddings, and is left out.
    for name, parameter in model.named_parameters(remove_duplicate=is_tied):
        # For example model.layers.0.self_attn.qkv_proj.weight. It stacks three matrices
        # of the checkpoint: `stacked` has the names q_proj, k_proj and v_proj, and
        # how many rows of each are on this rank.
        path, _, kind = name.rpartition(".")
        module, own_name = model.get_submodule(path), path.rpartition(".")[2]
        stacked = getattr(module, "stacked", {own_name: len(parameter)})
        names = [name.replace(own_name, each) for each in stacked]
        if is_tied and names == [head]:
            names = [embeddings]  # packing has made a tied head a parameter of its own
        # The dimension that ranks divide. (A bias has no dimension 1: see `write`.)
        divided = getattr(module, "divided", None)
        places.append((module, kind, names))
        for each, num_rows in zip(names, stacked.values(), strict=True):
            expected[each] = [num_rows, *parameter.shape[1:]]
            if divided is not None and divided < parameter.ndim:
                expected[each][divided] *= ranks.size

    # Old checkpoints also have the angles by which Q and K are rotated.
    given = {name for name in tensors if ".rotary_emb." not in name}
    check_tensors(
        model_config.source, expected.keys() - given, given - expected.keys())
    for name, shape in expected.items():
        found = list(tensors[name].shape)
        check(found == shape, f"the shape of {name}", shape, found)
    if not is_tied and model.lm_head.weight is model.model.embed_tokens.weight:
        model.lm_head.weight = nn.Parameter(  # all is checked, so it may change
            torch.empty_like(model.lm_head.weight), requires_grad=False)
    for module, kind, names in places:
        write(module, kind, [tensors[name] for name in names], ranks)


def write(module: nn.Module, kind: str, tensors: list[Tensor], ranks: Ranks) -> None:
    """Give a parameter this rank's share of its tensors."""
    divided = getattr(module, "divided", None)
    target = getattr(module, kind)
    if divided is not None and divided < target.ndim:
        tensors = [each.tensor_split(ranks.size, divided)[ranks.rank]
                   for each in tensors]
    elif divided == 1 and ranks.rank > 0:
        # This is a bias. The ranks' results are added up, so only rank 0 may add it.
        tensors = [torch.zeros_like(each) for each in tensors]
    value = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    if target.is_mkldnn:  # it is packed, and only a new one can be
        module.weight = nn.Parameter(value.to(target.dtype), requires_grad=False)
        products.pack(module)
    else:
        target.copy_(value)  # in place: CUDA graphs have its address
