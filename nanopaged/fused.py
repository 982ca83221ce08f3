"""The operations between the matrix products, compiled into few kernels on GPUs.

Each of them would cost several kernel launches and passes over memory. So on a GPU,
torch.compile makes each function into as few kernels as possible. Weights are
arguments, so that all layers share the compiled code.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

Op = Callable[..., Any]


class Ops(NamedTuple):
    """These operations, compiled or as they are. For some, a CPU has its own functions
    (`cpu/norms.py`). `loading/start_up.py` chooses.
    """

    # CUDA graphs record these five (`gpu/graphs.py`).
    add_norm: Op
    norm_rotate: Op
    silu_mul: Op
    draw: Op  # from `sampler.py`
    fill_pending: Op  # from `logits.py`, as are the next two
    mark: Op
    penalize: Op
    lowest_kept: Op  # from `sampler.py`


@cache  # all engines share the compiled code
def compiled(function: Op, uses_pdl: bool) -> Op:
    # Programmatic dependent launch (PDL): from Hopper on, a kernel may start while the
    # one before it still runs, and waits where it needs the other's results. Each such
    # kernel takes half a second to set up, so only the five in CUDA graphs use it.
    pdl = uses_pdl and function.__name__ in Ops._fields[:5]
    return torch.compile(function, dynamic=True, options={"triton.enable_pdl": pdl})


def add_norm(x: Tensor, residual: Tensor, weight: Tensor,
             eps: float) -> tuple[Tensor, Tensor]:
    """The sum, normalised by RMSNorm, and the sum itself: the next residual."""
    residual = x + residual
    return F.rms_norm(residual, weight.shape, weight, eps), residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """[num_tokens, 2 * size] -> [num_tokens, size]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def norm_rotate(x: Tensor, weights: list[Tensor], num_kv_heads: int, eps: float,
                cos: Tensor, sin: Tensor) -> Tensor:
    """Normalise the heads of Q and K, if there are weights for that, and rotate them:
    the halves x1 and x2 of a head become x1 cos - x2 sin and x2 cos + x1 sin. The
    angles grow with the position (RoFormer).

    x: [num_tokens, num_heads + num_kv_heads, head_dim]; weights: [head_dim] for Q's
    heads, and for K's; cos, sin: [num_tokens, 1, head_dim].
    """
    if weights:
        q_weight, k_weight = weights
        num_heads = x.shape[1] - num_kv_heads
        rows = q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1)
        x = F.rms_norm(x, x.shape[-1:], None, eps) * torch.cat(rows)
    return torch.addcmul(x * cos, rotate_half(x), sin)
