"""Attention on a CPU: the loops of `paged_attention.py`, run on several threads."""

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention import Ints, Metadata, Scoring, TorchAttention
from nanopaged.cpu import kernels, threads
from nanopaged.paged_attention import run_program


class NumbaAttention(TorchAttention):
    """`paged_attention.py` computes decodes and short chunks, and torch the rest.

    In a decode only one query uses each key, so gathering K and V first, as torch
    requires, would take longer than attention itself. For a long chunk it pays off.

    min_queries: torch computes entries with at least this many tokens, because up to
        8 the loops are usually faster. The bits of torch's results depend on the number
        of tokens; those of the loops do not. So with `batch_invariant` this is so high
        that the loops compute everything.
    """

    min_queries = 9

    def plan(self, metadata: Metadata) -> Ints:
        """[3, num_queries], the queries for the kernel: which token each of them is,
        where its block table starts, and how many keys it sees. In the story of
        `sequence.py`: [[0, 1, 2], [0, 2, 2], [7, 5, 6]].
        """
        entries, num_keys = metadata.entries, metadata.positions + 1
        plan = np.stack((np.arange(len(entries)), metadata.table_starts, num_keys))
        return plan[:, metadata.counts[entries] < self.min_queries]

    def store(self, k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        threads.run(kernels.store, len(k), k, v, kv_cache, slots)

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Metadata, scoring: Scoring
               ) -> Tensor:
        scale, window, sinks = scoring
        shape = -1, self.num_kv_heads, self.group_size, self.head_dim
        sink_scores = None if sinks is None else sinks.float().view(shape[1:3])
        out = q.new_empty(q.shape)
        # The KV heads of a block lie side by side in memory. So if threads can share
        # them out evenly, a program computes a thread's whole share.
        share, rest = divmod(self.num_kv_heads, torch.get_num_threads())
        heads_each = 1 if rest else share
        threads.run(
            run_program, metadata.plan.shape[1] * self.num_kv_heads // heads_each,
            out.view(shape), (scale * q.float()).view(shape), kv_cache,
            metadata.block_tables, metadata.plan, window, sink_scores, heads_each)
        for entry in np.flatnonzero(metadata.counts >= self.min_queries):
            self.attend_entry(int(entry), q, kv_cache, metadata, scoring, out)
        return out.flatten(1)
