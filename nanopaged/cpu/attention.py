"""Attention on a CPU: the loops of `paged_attention.py`, on several threads."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from nanopaged import fused
from nanopaged.attention import Ints, Metadata, TorchAttention, locate
from nanopaged.cpu import kernels, threads
from nanopaged.paged_attention import run_program

# The fewest queries of an entry that are left to torch. (Measured: up to 8, the kernel
# is usually faster.)
MIN_QUERIES = 9
# Between products, torch computes steps of more tokens, on all threads.
MAX_TOKENS = 64


def bits(x: Tensor) -> Any:
    """A tensor as an array for the kernels. NumPy has no bfloat16, so it gets the bits.
    """
    x = x.contiguous()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def add_norm(x: Tensor, residual: Tensor, weight: Tensor,
             eps: float) -> tuple[Tensor, Tensor]:
    """As in `nanopaged/fused.py`, but the sum is written into `residual`."""
    if len(x) > MAX_TOKENS:
        return fused.add_norm(x, residual, weight, eps)
    out = torch.empty_like(x)
    kernels.add_norm(*map(bits, (out, x, residual, weight)), eps)
    return out, residual


def norm_rotate(x: Tensor, weights: list[Tensor], num_kv_heads: int, eps: float,
                cos: Tensor, sin: Tensor) -> Tensor:
    """As in `nanopaged/fused.py`."""
    if not weights or len(x) > MAX_TOKENS:
        return fused.norm_rotate(x, weights, num_kv_heads, eps, cos, sin)
    out = x.new_empty(x.shape)
    kernels.norm_rotate(*map(bits, (out, x, *weights, cos, sin)), num_kv_heads, eps)
    return out


class NumbaAttention(TorchAttention):
    """`paged_attention.py` computes decodes and short chunks, and torch the rest.

    A decode uses every key for only one query, so gathering K and V first, as torch
    needs them, would take longer than the attention. For a long chunk it pays off.
    """

    fused = SimpleNamespace(add_norm=add_norm, norm_rotate=norm_rotate)

    def plan(self, counts: Ints, ends: Ints) -> Ints:
        """[3, num_queries], the queries for the kernel: which token each of them is,
        where its block table starts, and how many keys it sees.
        """
        at = locate(counts, ends, self.block_size)
        tokens = np.arange(len(at.entries))
        plan = np.stack((tokens, at.table_starts, at.positions + 1))
        return plan[:, counts[at.entries] < MIN_QUERIES]

    def store(self, k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        k, v = k.to(kv_cache.dtype), v.to(kv_cache.dtype)
        kernels.store(bits(k), bits(v), bits(kv_cache), slots.numpy())

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Metadata, scale: float,
               window: int | None = None, sinks: Tensor | None = None) -> Tensor:
        tokens, table_starts, num_keys = metadata.plan.numpy()
        is_all = len(tokens) == len(q)  # then no query has to be copied
        queries = q if is_all else q[tokens]
        shape = self.num_kv_heads, self.group_size
        # [num_queries, num_kv_heads, group_size, head_dim]
        queries = queries.view(-1, *shape, self.head_dim)
        attended = queries.new_empty(queries.shape)
        sink_scores = None if sinks is None else sinks.float().view(shape).numpy()
        threads.run(
            run_programs, *map(bits, (attended, queries, kv_cache)),
            metadata.block_tables.numpy(), table_starts, num_keys, scale,
            window or 2**40, sink_scores)
        attended = attended.flatten(1, 2)
        if is_all:
            return attended.flatten(1)
        out = q.new_empty(q.shape)
        out[tokens] = attended
        for entry in np.flatnonzero(metadata.counts >= MIN_QUERIES):
            self.attend_entry(
                int(entry), q, kv_cache, metadata, scale, window, sinks, out)
        return out.flatten(1)


@threads.keep
@njit(nogil=True)
def run_programs(out: Any, q: Any, *others: Any) -> None:
    """Run all programs. `prange` is a `range` that may be divided among threads."""
    num_queries, num_kv_heads, _, _ = q.shape
    for program in prange(num_queries * num_kv_heads):
        # Head by head, so that each thread gets short sequences as well as long ones.
        kv_head, query = divmod(np.int64(program), num_queries)  # prange is unsigned
        run_program(query, kv_head, out, q, *others)
