"""Attention on a CPU: the loops of `paged_attention.py`, on several threads."""

from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from nanopaged.attention import Ints, Metadata, TorchAttention, locate
from nanopaged.cpu import threads
from nanopaged.paged_attention import run_program

# The fewest queries of an entry that are left to torch. (Measured: up to 8, the kernel
# is usually faster.)
MIN_QUERIES = 9


class NumbaAttention(TorchAttention):
    """`paged_attention.py` computes decodes and short chunks, and torch the rest.

    A decode uses every key for only one query, so gathering K and V first, as torch
    needs them, would take longer than the attention. For a long chunk it pays off.
    """

    def plan(self, counts: Ints, ends: Ints) -> Ints:
        """[3, num_queries], the queries for the kernel: which token each of them is,
        where its block table starts, and how many keys it sees.
        """
        at = locate(counts, ends, self.block_size)
        tokens = np.arange(len(at.entries))
        plan = np.stack((tokens, at.table_starts, at.positions + 1))
        return plan[:, counts[at.entries] < MIN_QUERIES]

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Metadata, scale: float,
               window: int | None = None, sinks: Tensor | None = None) -> Tensor:
        tokens, table_starts, num_keys = metadata.plan
        is_all = len(tokens) == len(q)  # then no query has to be copied
        queries = (q if is_all else q[tokens]).float()
        # [num_queries, num_kv_heads, group_size, head_dim]
        queries = scale * queries.unflatten(1, (self.num_kv_heads, -1))
        # Without sinks, a score so low that it counts for nothing.
        sink_scores = queries.new_full(queries.shape[1:3], -1e30)
        if sinks is not None:
            sink_scores = sinks.detach().float().view_as(sink_scores)
        # NumPy has no bfloat16, so it gets the bits.
        is_bfloat16 = kv_cache.dtype == torch.bfloat16
        bits = kv_cache.view(torch.uint16) if is_bfloat16 else kv_cache
        attended = torch.empty_like(queries)
        threads.run(
            run_programs, attended.numpy(), queries.numpy(), bits.numpy(),
            metadata.block_tables.numpy(), table_starts.numpy(), num_keys.numpy(),
            window or 2**40, sink_scores.numpy())
        attended = attended.flatten(1, 2).to(q.dtype)
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
