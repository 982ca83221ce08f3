"""The operations between the matrix products, compiled into few kernels on GPUs.

Each of these operations would cost a kernel launch and a pass over memory. So
torch.compile turns a function that is marked `@fused` into as few kernels as possible.
Such a function takes weights as arguments, so that all layers share the compiled code.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

Result = TypeVar("Result")
# Whether the engine for which this thread computes wants compiled code.
compiles = ContextVar("compiles", default=True)


def fused(function: Callable[..., Result]) -> Callable[..., Result]:
    """Run a function as one piece of compiled code, if the engine compiles."""
    # One launch for each sum: Inductor may otherwise split a long one over two.
    compiled = torch.compile(function, dynamic=True, options={
        "split_reductions": False}, disable=not torch.cuda.is_available())

    @wraps(function)
    def run(*arguments: object) -> Result:
        return compiled(*arguments) if compiles.get() else function(*arguments)

    return run


@fused
def add_norm(x: Tensor, residual: Tensor, weight: Tensor,
             eps: float) -> tuple[Tensor, Tensor]:
    """The sum, normalised by RMSNorm, and the sum itself: the next residual."""
    residual = x + residual
    return F.rms_norm(residual, weight.shape, weight, eps), residual


@fused
def silu_mul(gate_up: Tensor) -> Tensor:
    """[num_tokens, 2 * size] -> [num_tokens, size]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@fused
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
