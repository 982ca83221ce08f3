"""Faster matrix products on CPUs."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def pack(linear: nn.Linear) -> None:
    """On CPUs with bfloat16 instructions, reorder W for oneDNN, which makes the
    product 1.3 to 2.7 times as fast.

    torch.compile uses these operators, too. They are private to torch, so they appear
    only here. Where they are missing, nothing changes.
    """
    reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    is_bfloat16 = linear.weight.is_cpu and linear.weight.dtype == torch.bfloat16
    if reorder and is_bfloat16 and torch.cpu._is_avx512_bf16_supported():
        linear.weight = nn.Parameter(reorder(linear.weight, None), False)
        linear.forward = partial(  # type: ignore[method-assign]
            packed_product, weight=linear.weight, bias=linear.bias)


def packed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of a weight that `pack` has reordered.

    Without AMX, which is Intel's unit for matrices, one to three rows take longer than
    six: one row takes 1.25 times as long, measured on an EPYC. So rows of zeros are
    added.
    """
    num_rows = len(x)
    if num_rows < 4 and not torch.cpu._is_amx_tile_supported():
        x = F.pad(x, (0, 0, 0, 6 - num_rows))
    product = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product[:num_rows]  # type: ignore[no-any-return]
