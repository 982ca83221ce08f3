"""Matrix products on CPUs, each at the speed at which memory delivers the weights."""

from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HAS_KERNEL = find_spec("numba") is not None


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of what is between the products. On a CPU without bfloat16
    instructions this is float32, even if the weights, K and V are bfloat16.
    """
    is_slow = device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported()
    is_split = HAS_KERNEL and is_slow and dtype == torch.bfloat16
    return torch.float32 if is_split else dtype


def pack(linear: nn.Linear) -> None:
    """On a CPU, replace the product of `linear` with a faster one."""
    weight, bias = linear.weight.detach(), linear.bias
    reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    can_pack = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported())
    if compute_dtype(weight.dtype, weight.device) != weight.dtype:
        product = float32_product
    elif reorder and weight.is_cpu and can_pack:
        weight = reorder(weight, None)
        linear.weight = nn.Parameter(weight, False)
        product = packed_product
    else:
        return
    linear.forward = partial(product, weight=weight, bias=bias)  # type: ignore


def unpack(linear: nn.Linear) -> None:
    """Undo `pack`, so that the weights can be changed."""
    vars(linear).pop("forward", None)
    if linear.weight.is_mkldnn:
        linear.weight = nn.Parameter(linear.weight.to_dense(), False)


def packed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of a weight that oneDNN has reordered, 1.3 to 4 times as fast.

    torch.compile uses these operators, too. They are private to torch, so they appear
    only here. Where they are missing, nothing changes. With AVX512-BF16 but without
    AMX, which is Intel's unit for matrices, one to three rows take longer than six: one
    row takes 1.25 times as long, measured on an EPYC. So rows of zeros are added.
    """
    shape = x.shape[:-1]
    x = x.flatten(0, -2)
    num_rows = len(x)
    has_avx512 = torch.cpu._is_avx512_bf16_supported()
    if num_rows < 4 and has_avx512 and not torch.cpu._is_amx_tile_supported():
        x = F.pad(x, (0, 0, 0, 6 - num_rows))
    product = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product[:num_rows].unflatten(0, shape)  # type: ignore[no-any-return]


def float32_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by bfloat16 weights in float32, without instructions for bfloat16.

    Up to 32 rows our kernel takes no longer than oneDNN with float32 weights, and for a
    few rows half as long, because there is half as much to read. For more rows, pieces
    of W that fit into the processor's cache become float32.
    """
    inputs = x.float().flatten(0, -2)
    if len(inputs) <= 32 and inputs.shape[1] % 2 == 0:
        from nanopaged import cpu_attention, product_kernel

        out = inputs.new_empty(len(inputs), len(weight))
        # NumPy has no bfloat16, and the kernel takes pairs.
        pairs = weight.view(torch.uint16).numpy().view("uint32")
        even, odd = (inputs[:, i::2].contiguous().numpy() for i in (0, 1))
        cpu_attention.run(product_kernel.run_products, weight.numel() > 2**16,
                          out.numpy(), even, odd, pairs)
    else:
        out = torch.cat([F.linear(inputs, w.float()) for w in weight.split(1024)], 1)
    out = out if bias is None else out + bias
    return out.to(x.dtype).unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]
