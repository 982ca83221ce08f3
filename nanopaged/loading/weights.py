"""From a checkpoint to the weights of a model.

Our own decoder is filled with tensors that are named as transformers names them, from
files or from `load_weights`. Transformers reads the files of its own decoders. Every
tensor is accounted for: it is an error if one is missing, or if one is left over that
could change an answer.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_utils import load_state_dict, local_torch_dtype

from nanopaged.attention import TorchAttention
from nanopaged.checks import check
from nanopaged.config import EngineConfig
from nanopaged.loading.any_decoder import AnyDecoder
from nanopaged.loading.checkpoint import ModelConfig, find_file
from nanopaged.loading.errors import REPAIR, explained
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


@torch.no_grad()
def load_model(config: EngineConfig, model_config: ModelConfig, backend: TorchAttention,
               ranks: Ranks) -> Any:
    """A rank's share of the model, with the weights of its checkpoint.

    For benchmarks, load_format="dummy" makes them random: normally distributed with a
    standard deviation of 0.02, around 1 in norms and around 0 elsewhere.
    """
    is_dummy = config.load_format == "dummy"
    tensors = {} if is_dummy else stored_tensors(model_config.source)
    if model_config.model_impl == "nanopaged":
        model: Any = make_ours(model_config, backend, ranks)
        if tensors:
            check_weights(model_config, tensors)
            fill(model, tensors, ranks)
    else:
        check(ranks.size == 1, "tensor_parallel_size",
              "1 for modules of transformers", ranks.size)
        pretrained = make_pretrained(model_config, backend.dtype, tensors)
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


def make_ours(model_config: ModelConfig, backend: TorchAttention, ranks: Ranks
              ) -> CausalLM:
    """Our own decoder, without weights. Matrices have the dtype of K and V. All else
    has that of the activations, which differs on a CPU that is slow in bfloat16.
    """
    dtype = backend.dtype
    if products:
        dtype = products.compute_dtype(dtype, backend.device)
    with backend.device, local_torch_dtype(dtype), no_init_weights():
        model = CausalLM(model_config, backend, ranks)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.to(backend.dtype)
    return model


def make_pretrained(model_config: ModelConfig, dtype: torch.dtype,
                    tensors: dict[str, Tensor] | None = None) -> Any:
    """Transformers' model, with the checkpoint's tensors. Without these `tensors`, its
    weights mean nothing.
    """
    options: Any = {"config": model_config.hf_config, "dtype": dtype,
                    "attn_implementation": "eager", "trust_remote_code": False}
    if not tensors:
        return AutoModelForCausalLM.from_config(**options).eval()
    model, info = AutoModelForCausalLM.from_pretrained(
        model_config.source, ignore_mismatched_sizes=True, output_loading_info=True,
        **options)
    check_fit(model_config.source, info["missing_keys"], info["unexpected_keys"],
              info["mismatched_keys"])
    check_kinds({name: tensors[name]
                 for name in tensors.keys() & dict(model.named_parameters())})
    return model


# -- Tensors, and whether they fit -----------------------------------------------------

def stored_tensors(source: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, mapped into memory: they are read when they are
    used, and the system may forget that again.

    ValueError names a file that is missing or damaged. Files that an index does not
    name are ignored, and are not downloaded.
    """
    with explained(f"cannot read the weights in {source} ({REPAIR}): "):
        found = next(filter(None, (find_file(source, name) for name in FILES)), "")
        files = [found] if found else []
        if found.endswith(".json"):
            names = json.loads(Path(found).read_text())["weight_map"].values()
            files = [find_file(source, name) or str(Path(source, name))
                     for name in sorted({*names})]
    tensors: dict[str, Tensor] = {}
    for file in files:
        with explained(f"cannot read {file} ({REPAIR}): "):
            tensors |= load_state_dict(file)
    check(bool(tensors), f"the weights in {source}", f"in one of {FILES}", "none")
    return tensors


def check_weights(model_config: ModelConfig, weights: dict[str, Any]) -> None:
    """ValueError or TypeError if these cannot be the weights of our own decoder,
    because one is missing, is left over, or does not fit.
    """
    check_kinds(weights)
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


def check_kinds(tensors: dict[str, Any]) -> None:
    """TypeError if one of these cannot be copied. (A DTensor has only a part of its
    numbers. A FakeTensor has none, and a parameter that FSDP has divided has no
    memory.)
    """
    for name, tensor in tensors.items():
        kind: Any = type(tensor)
        is_right = (
            isinstance(tensor, Tensor) and tensor.layout == torch.strided
            and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
            and tensor.is_floating_point() and tensor.itemsize > 1  # no float8
            and tensor.untyped_storage().data_ptr() != 0)
        found = f"{kind.__name__} of {getattr(tensor, 'dtype', None)}"
        check(is_right, name, "a dense tensor of floating-point numbers, all here",
              found, TypeError)


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


# -- Into our own decoder --------------------------------------------------------------

@torch.no_grad()
def fill(model: CausalLM, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    """Write these tensors into the model."""
    tensors = {HEAD: tensors[EMBEDDINGS]} | tensors  # in case that the head is tied
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    head, embeddings = tensors[HEAD], tensors[EMBEDDINGS]
    is_same = head.dtype == embeddings.dtype and torch.equal(head, embeddings)
    if is_tied and not is_same:
        # There is another head, although config.json says that it is tied.
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
        if target.is_mkldnn:  # packed: it cannot be written to
            del module.forward  # it holds the packed weight
            target = module.weight = nn.Parameter(
                torch.empty(target.shape, dtype=target.dtype), requires_grad=False)
        stacked = getattr(module, "stacked", {own_name: len(target)})
        # In place: CUDA graphs have its address.
        for each, part in zip(stacked, target.split([*stacked.values()]), strict=True):
            part.copy_(share(tensors[name.replace(own_name, each)], module, ranks))


def share(tensor: Tensor, module: Any, ranks: Ranks) -> Tensor:
    """This rank's share of a tensor."""
    divided = getattr(module, "divided", None)  # the dimension that ranks divide
    if divided is not None and divided < tensor.ndim:
        return tensor.tensor_split(ranks.size, divided)[ranks.rank]
    # A bias has no dimension 1. The ranks' results are added up, so rank 0 adds it.
    return torch.zeros_like(tensor) if divided == 1 and ranks.rank > 0 else tensor


def replace_weights(runner: Any, weights: dict[str, Tensor]) -> None:
    """Replace the weights of a model in use. If this breaks off, only some are new."""
    with runner.settings(), torch.inference_mode(False):
        head = runner.model.lm_head.weight
        fill(runner.model, weights, runner.ranks)
        if runner.graphs and runner.model.lm_head.weight is not head:
            # The recorded steps have the address of the old one.
            runner.graphs.free()
            runner.graphs = type(runner.graphs)(runner)
        if products:
            products.pack_products(runner.model, runner.config.batch_invariant)
