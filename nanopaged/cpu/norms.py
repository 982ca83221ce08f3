"""The operations of `nanopaged/fused.py` that a CPU computes in another way."""

import torch
from torch import Tensor

from nanopaged.cpu import kernels, threads
from nanopaged.fused import silu_mul as fused_silu_mul


def add_norm(x: Tensor, residual: Tensor, weight: Tensor,
             eps: float) -> tuple[Tensor, Tensor]:
    """As in `nanopaged/fused.py`, but `residual` itself becomes the sum."""
    out = x.new_empty(x.shape)
    threads.run(kernels.add_norm, len(x), out, x, residual, weight, eps)
    return out, residual


def norm_rotate(x: Tensor, weights: list[Tensor], num_kv_heads: int, eps: float,
                cos: Tensor, sin: Tensor) -> Tensor:
    """As in `nanopaged/fused.py`."""
    out = x.new_empty(x.shape)
    both = weights or (None, None)
    threads.run(kernels.norm_rotate, len(x), out, x, *both, cos, sin, num_kv_heads, eps)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """As in `nanopaged/fused.py`, on one thread, for `batch_invariant`. Several threads
    may divide a row, and next to a border torch rounds exponentials differently.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = fused_silu_mul(gate_up)
    torch.set_num_threads(num_threads)
    return out
