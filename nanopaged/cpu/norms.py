"""The operations of `nanopaged/fused.py`, where loops compute them faster."""

from torch import Tensor

from nanopaged import fused
from nanopaged.cpu import kernels
from nanopaged.cpu.attention import bits

silu_mul = fused.silu_mul
# In steps of more tokens than this, torch computes norms and rotation: it uses all
# threads, and our kernels for them use one.
MAX_TOKENS = 64


def add_norm(x: Tensor, residual: Tensor, weight: Tensor,
             eps: float) -> tuple[Tensor, Tensor]:
    """As in `nanopaged/fused.py`, but for few tokens `residual` itself becomes the sum.
    """
    if len(x) > MAX_TOKENS:
        return fused.add_norm(x, residual, weight, eps)
    out = x.new_empty(x.shape)
    kernels.add_norm(*map(bits, (out, x, residual, weight)), eps)
    return out, residual


def norm_rotate(x: Tensor, weights: list[Tensor], num_kv_heads: int, eps: float,
                cos: Tensor, sin: Tensor) -> Tensor:
    """As in `nanopaged/fused.py`. (Rotation alone is left to torch.)"""
    if not weights or len(x) > MAX_TOKENS:
        return fused.norm_rotate(x, weights, num_kv_heads, eps, cos, sin)
    out = x.new_empty(x.shape)
    kernels.norm_rotate(*map(bits, (out, x, *weights, cos, sin)), num_kv_heads, eps)
    return out
