"""Matrix products on CPUs: for few rows, as fast as memory delivers the weights."""

import ctypes
import platform
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopaged.attention import cdiv
from nanopaged.checks import check
from nanopaged.cpu import kernels, threads
from nanopaged.cpu.threads import bits
from nanopaged.model import Linear

# Endings of the names of linear layers to pack. (Mamba itself reads the weight of its
# dt_proj. Embeddings that are tied to a head keep theirs.)
PACKED = ("proj", "lm_head", "dense", "fc1", "fc2", "embed_out")


def has_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16."""
    if platform.machine() in ("aarch64", "arm64"):
        ask = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
        return bool(ask())
    return torch.cpu._is_avx512_bf16_supported()


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of activations. On a CPU without bfloat16 instructions this is float32,
    even if the weights, K and V are bfloat16.
    """
    is_slow = device.type == "cpu" and not has_bfloat16()
    return torch.float32 if is_slow and dtype == torch.bfloat16 else dtype


def pack_products(model: nn.Module, batch_invariant: bool) -> None:
    """On a CPU, let a model compute its matrix products faster."""
    for name, module in model.named_modules():
        if (type(module) in (nn.Linear, Linear) and name.endswith(PACKED)
                and not name.endswith("dt_proj") and not module.weight.is_mkldnn):
            pack(module, batch_invariant)


def pack(linear: nn.Linear, batch_invariant: bool) -> None:
    """On a CPU, let `linear` compute its product faster:

    - bfloat16 weights without instructions for bfloat16: `float32_product`
    - other weights that oneDNN can reorder: `packed_product`. The old weight is gone
    - all others: as before

    With `batch_invariant`, ValueError if the bits of a product depend on its rows.
    """
    weight = linear.weight.detach()
    more: Any = {"bias": linear.bias, "batch_invariant": batch_invariant}
    if compute_dtype(weight.dtype, weight.device) != weight.dtype:
        if weight.shape[1] % 2:  # the kernel takes pairs
            weight = F.pad(weight, (0, 1))
        linear.forward = partial(  # type: ignore
            float32_product, weight=weight, pairs=bits(weight).view("uint32"), **more)
    elif (packed := reorder(weight)) is not None:
        linear.weight = nn.Parameter(packed, requires_grad=False)
        linear.forward = partial(  # type: ignore
            packed_product, weight=packed, blocks=find_blocks(packed, weight), **more)
    check(not batch_invariant or rows_are_alone(linear, weight.dtype),
          "batch_invariant", "False (with this processor, torch and Numba, the number "
          f"of rows changes the bits of a product in {weight.dtype})", True)


def rows_are_alone(linear: nn.Linear, dtype: torch.dtype) -> bool:
    """Whether rows of a product get the same bits in any company. Libraries compute
    several rows at once, and what is left of them in another way, so some numbers of
    rows are tried.
    """
    if not isinstance(linear.forward, partial):  # torch computes it, and promises less
        return False
    # The caller's random numbers stay as they are.
    x = torch.randn(40, linear.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(compute_dtype(dtype, x.device))
    together = linear(x)
    return all(torch.equal(linear(x[:count]), together[:count])
               for count in (1, 2, 3, 4, 7, 16))


def reorder(weight: Tensor) -> Tensor | None:
    """The weight as oneDNN arranges it. None if it cannot do so, because torch was
    built without it, or because the processor lacks the instructions.
    """
    if not weight.is_cpu or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, None)  # type: ignore
    except (AttributeError, RuntimeError):
        return None


def packed_product(x: Tensor, weight: Tensor, bias: Tensor | None, blocks: Any,
                   batch_invariant: bool) -> Tensor:
    """x W^T, with W as oneDNN has reordered it: 1.3 to 4 times as fast as before. For
    one or two rows, our kernel reads the same memory faster still.

    These operators are private to torch, so they appear only in this file.
    """
    num_rows = x.shape[:-1].numel()
    if batch_invariant and num_rows == 1:
        # oneDNN gives a row the same bits for any number of rows, except for one alone.
        padded = F.pad(x, (0, 0, 0, 1))
        return packed_product(padded, weight, bias, None, False)[..., :1, :]
    if batch_invariant or blocks is None or num_rows not in (1, 2):
        product = torch.ops.mkldnn._linear_pointwise.default
        return product(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    rows = x.flatten(0, -2)
    out = x.new_empty(len(rows), 64 * len(blocks))
    threads.run(kernels.multiply_block, len(blocks), out, rows, blocks)
    out = out if bias is None else out + bias
    return out.view(*x.shape[:-1], -1)


def find_blocks(packed: Tensor, weight: Tensor) -> Any:
    """The memory of a packed weight as `multiply_block` reads it. None if oneDNN has
    arranged it in another way.
    """
    num_outputs, size = weight.shape
    data_ptr = getattr(torch.ops.mkldnn, "data_ptr", None)
    if weight.dtype != torch.bfloat16 or num_outputs % 64 or size % 2 or not data_ptr:
        return None
    pointer = ctypes.cast(data_ptr(packed), ctypes.POINTER(ctypes.c_uint32))
    blocks = np.ctypeslib.as_array(pointer, (num_outputs // 64, size // 2, 64))
    last = bits(weight[-64:]).view("uint32")
    return blocks if np.array_equal(blocks[-1], last.T) else None


def float32_product(x: Tensor, weight: Tensor, pairs: Any, bias: Tensor | None,
                    batch_invariant: bool) -> Tensor:
    """Multiply by bfloat16 weights in float32, without instructions for bfloat16.

    For up to 32 rows, our kernel takes no longer than oneDNN with float32 weights, and
    for a few rows it takes half as long, because there is half as much to read. For
    more than 32 rows, W is converted to float32 in pieces that fit into the processor's
    cache.

    pairs: the memory of `weight`, with two numbers in each uint32
    """
    inputs = x.float().flatten(0, -2)
    if inputs.shape[1] < weight.shape[1]:
        inputs = F.pad(inputs, (0, 1))
    if len(inputs) <= 32 or batch_invariant:
        out = inputs.new_empty(len(inputs), len(pairs))
        # [2, num_rows, size / 2]: the even columns of x, then the odd ones
        halves = inputs.view(len(inputs), pairs.shape[1], 2).permute(2, 0, 1)
        threads.run(kernels.multiply_four, cdiv(len(pairs), 4), out, halves, pairs)
    else:
        out = torch.cat([F.linear(inputs, w.float()) for w in weight.split(1024)], 1)
    out = out if bias is None else out + bias
    return out.to(x.dtype).view(*x.shape[:-1], len(pairs))
