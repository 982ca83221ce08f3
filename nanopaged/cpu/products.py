"""Matrix products on CPUs, as fast as the weights can be read from memory."""

from functools import partial
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopaged.attention import cdiv
from nanopaged.cpu import kernels, threads
from nanopaged.cpu.attention import bits
from nanopaged.model import Linear

# Endings of the names of linear layers whose weight nothing else reads. (Mamba reads
# that of its dt_proj itself.)
PACKED = ("proj", "lm_head", "dense", "fc1", "fc2", "embed_out")


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of activations. On a CPU without bfloat16 instructions this is float32,
    even if the weights, K and V are bfloat16.
    """
    is_slow = device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported()
    return torch.float32 if is_slow and dtype == torch.bfloat16 else dtype


def pack_products(model: nn.Module) -> None:
    """On a CPU, let a model compute its matrix products faster."""
    linears = [module for name, module in model.named_modules()
               if type(module) in (nn.Linear, Linear) and name.endswith(PACKED)
               and not name.endswith("dt_proj")]
    for linear in linears:
        if not linear.weight.is_mkldnn:
            pack(linear)
    pad_if_faster(linears)


def pack(linear: nn.Linear) -> None:
    """On a CPU, let `linear` compute its product faster:

    - bfloat16 weights without instructions for bfloat16: `float32_product`
    - other weights that oneDNN can reorder: `packed_product`. The old weight is gone
    - all others: as before
    """
    weight = linear.weight.detach()
    reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    if compute_dtype(weight.dtype, weight.device) != weight.dtype:
        product = float32_product
    elif reorder and weight.is_cpu and weight.dtype in (torch.float32, torch.bfloat16):
        product, weight = packed_product, reorder(weight, None)
        linear.weight = nn.Parameter(weight, requires_grad=False)
    else:
        return
    linear.forward = partial(product, weight=weight, bias=linear.bias)  # type: ignore


def packed_product(x: Tensor, weight: Tensor, bias: Tensor | None,
                   min_rows: int = 1) -> Tensor:
    """The product of a weight that oneDNN has reordered, 1.3 to 4 times as fast.
    `pad_if_faster` sets `min_rows`.

    (These operators are private to torch, so they appear only in this file. Where they
    are missing, nothing changes.)
    """
    num_rows = x.shape[-2]
    if num_rows < min_rows:
        padded = F.pad(x, (0, 0, 0, min_rows - num_rows))
        return packed_product(padded, weight, bias)[..., :num_rows, :]
    product = torch.ops.mkldnn._linear_pointwise.default
    return product(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def pad_if_faster(linears: list[nn.Linear]) -> None:
    """On some processors, oneDNN multiplies six rows in bfloat16 faster than one. Test
    this on four of the layers' matrices (about 30 ms). If it is so here, pad all of
    these products to six rows with zeros.
    """
    packed = [each for each in linears if each.weight.is_mkldnn
              and each.weight.dtype == torch.bfloat16]
    packed.sort(key=lambda each: each.weight.numel())
    tried = packed[-5:-1]  # the largest is the output head

    def seconds(num_rows: int) -> float:
        began = perf_counter()
        for each in tried:
            each(torch.ones(num_rows, each.in_features, dtype=torch.bfloat16))
        return perf_counter() - began

    pairs = [(seconds(6), seconds(1)) for _ in range(4)]
    six, one = map(min, zip(*pairs, strict=True))
    if tried and six < 0.95 * one:
        for linear in packed:
            linear.forward = partial(linear.forward, min_rows=6)  # type: ignore


def float32_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by bfloat16 weights in float32, without instructions for bfloat16.

    For up to 32 rows, our kernel takes no longer than oneDNN with float32 weights, and
    for a few rows it takes half as long, because there is half as much to read. For
    more than 32 rows, W is converted to float32 in pieces that fit into the processor's
    cache.
    """
    inputs = x.float().flatten(0, -2)
    if len(inputs) <= 32 and inputs.shape[1] % 2 == 0:
        out = inputs.new_empty(len(inputs), len(weight))
        # The kernel reads two numbers of W as one uint32. It takes the even and the odd
        # columns of x apart.
        pairs = bits(weight).view("uint32")
        even, odd = (inputs[:, i::2].contiguous().numpy() for i in (0, 1))
        num_programs = cdiv(len(weight), 4)
        threads.run(
            kernels.multiply_four, num_programs, out.numpy(), even, odd, pairs)
    else:
        out = torch.cat([F.linear(inputs, w.float()) for w in weight.split(1024)], 1)
    out = out if bias is None else out + bias
    return out.to(x.dtype).unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]
