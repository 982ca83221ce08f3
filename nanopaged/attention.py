"""Attention over the paged cache: what a step needs to know about it, and a reference.

In every layer the K and V of the step's tokens are stored first. Then attention reads
all K and V through the block tables. So there is only one case: some queries at known
positions, each of which sees the keys from position 0 to its own. This covers the first
chunk of a prompt, later chunks, the rest after a cached prefix, and decodes.

Shapes, here and everywhere:

    num_tokens     tokens of the flat batch, one sequence after the other
    num_seqs       sequences in the batch, each with one entry
    num_heads      query heads; group_size of them share one of the num_kv_heads
    q              [num_tokens, num_heads, head_dim]
    k, v           [num_tokens, num_kv_heads, head_dim] each
    kv_cache       [num_blocks, 2, num_kv_heads, block_size, head_dim], one per layer: a
                   block is one piece of memory, first all its K, then all its V, head
                   by head
    block_tables   [num_table_blocks]: the block table of the first entry, then that of
                   the second, and so on
    slots          [num_tokens], the slot mapping: where a token's K and V are stored,
                   physical block * block_size + offset

In the story of `sequence.py`, with block_size=4, while A decodes t0 and B computes the
last two tokens of its prompt:

    counts = [1, 2]   ends = [7, 6]   block_tables = [0, 1, 0, 2]
    entries = [0, 1, 1]   positions = [6, 4, 5]   slots = [6, 8, 9]
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Ints: TypeAlias = NDArray[np.integer[Any]]
# So many queries are computed at once: few, for a small mask, and for few gathered keys
# if there is a window.
QUERIES_AT_ONCE = 256


@dataclass
class Metadata:
    """A step as the model sees it. Its tensors are on the device."""

    counts: Ints  # [num_seqs]: how many tokens of each sequence this step computes
    ends: Ints  # [num_seqs]: how many keys each sequence then has
    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]: where each token is in its sequence
    slots: Tensor  # [num_tokens]
    plan: Tensor  # what else the backend needs: see its method `plan`
    block_tables: Tensor  # [num_table_blocks]
    last_indices: Tensor  # [num_samples]: the token that each sample follows
    draws: Any = None  # [5, num_samples]: see `draw_table` in `sampler.py`
    seqs: Any = ()  # the sequence of each entry, for models with states


def cdiv(number: Any, divisor: Any) -> Any:
    """Divide and round up: 10 tokens need cdiv(10, 4) = 3 blocks of 4."""
    return -(-number // divisor)


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """For elements in runs of these lengths: the run of each, and its index there.
    Lengths [2, 3] give runs [0, 0, 1, 1, 1] and indices [0, 1, 0, 1, 2].
    """
    runs = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return runs, np.arange(len(runs)) - starts[runs]


class Places(NamedTuple):
    """Where the tokens of a step belong. Every field is [num_tokens]."""

    entries: Ints  # the entry of each token
    indices: Ints  # its index in the entry
    positions: Ints  # its position in the whole sequence
    table_starts: Ints  # where the block table of the entry starts


def locate(counts: Ints, ends: Ints, block_size: int) -> Places:
    """Entry i has counts[i] tokens, and they end before position ends[i]."""
    entries, indices = spread(counts)
    table_sizes = cdiv(ends, block_size)
    table_starts = np.cumsum(table_sizes) - table_sizes
    positions = (ends - counts)[entries] + indices
    return Places(entries, indices, positions, table_starts[entries])


def slot_mapping(block_tables: Ints, at: Places, block_size: int) -> Ints:
    block_ids: Ints = block_tables[at.table_starts + at.positions // block_size]
    return block_ids * block_size + at.positions % block_size


class TorchAttention:
    """The reference, on any device: gather K and V, then call torch's own attention."""

    def __init__(self, model_config: Any, block_size: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.num_kv_heads = model_config.num_key_value_heads
        self.group_size = model_config.num_attention_heads // self.num_kv_heads
        self.head_dim = model_config.head_dim
        self.block_size = block_size
        self.dtype = dtype
        self.device = device

    def plan(self, counts: Ints, ends: Ints) -> Ints:
        """Whatever else the backend needs on the device. Here it is nothing; on a GPU
        it says which program computes what.
        """
        return counts[:0]

    def store(self, k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """Put K and V into their slots."""
        kv, size = torch.stack((k, v), 1), self.block_size
        # Both sides are [num_tokens, 2, num_kv_heads, head_dim].
        kv_cache[slots // size, :, :, slots % size] = kv.to(kv_cache.dtype)

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Metadata, scale: float,
               window: int | None = None, sinks: Tensor | None = None) -> Tensor:
        """[num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]

        scale: a score is the product of a query and a key times this number.
        window: how many keys a query sees, up to its own; None: all of them.
        sinks: [num_heads], the score of one more key for each head. Its V is zero, so
            it only takes weight from the others.
        """
        out = q.new_empty(q.shape)
        for entry in range(len(metadata.counts)):
            self.attend_entry(entry, q, kv_cache, metadata, scale, window, sinks, out)
        return out.flatten(1)

    def attend_entry(self, entry: int, q: Tensor, kv_cache: Tensor, metadata: Metadata,
                     scale: float, window: int | None, sinks: Tensor | None,
                     out: Tensor) -> None:
        """Fill the rows of `out` that belong to one entry of the batch."""
        counts, ends = metadata.counts, metadata.ends
        first_block = int(cdiv(ends[:entry], self.block_size).sum())
        block_table = metadata.block_tables[first_block:]  # and what follows it
        start, end = int(ends[entry] - counts[entry]), int(ends[entry])
        # The query at position p is row p + to_row of q.
        to_row = int(counts[:entry].sum()) - start
        for first in range(start, end, QUERIES_AT_ONCE):
            stop = min(first + QUERIES_AT_ONCE, end)
            first_key = 0 if window is None else max(0, first + 1 - window)
            k, v = self.gather(kv_cache, block_table, first_key, stop)
            rows = slice(to_row + first, to_row + stop)
            queries = q[rows].transpose(0, 1)  # [num_heads, num_queries, head_dim]
            mask = self.mask(queries, k.shape[1], window, sinks)
            if sinks is not None:  # one more key, with K = V = 0
                k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
            attended = F.scaled_dot_product_attention(
                queries[None], k.to(q.dtype)[None], v.to(q.dtype)[None], mask,
                scale=scale, enable_gqa=True)
            out[rows] = attended[0].transpose(0, 1)

    def gather(self, kv_cache: Tensor, block_table: Tensor, start: int, end: int
               ) -> tuple[Tensor, Tensor]:
        """K and V of a sequence, from position `start` to `end` - 1: [num_kv_heads,
        num_keys, head_dim] each. Nothing from `end` on is returned: the rest of the
        last block holds old values, and a NaN among them would spread.
        """
        first_block = start // self.block_size
        used = block_table[first_block : cdiv(end, self.block_size)]
        # [2, num_kv_heads, num_blocks, block_size, head_dim]
        blocks = kv_cache.permute(1, 2, 0, 3, 4).index_select(2, used)
        skipped = first_block * self.block_size
        k, v = blocks.flatten(2, 3)[:, :, start - skipped : end - skipped]
        return k, v

    def mask(self, q: Tensor, num_keys: int, window: int | None, sinks: Tensor | None
             ) -> Tensor:
        """What is added to the scores: 0 where a query sees a key, and -inf elsewhere.
        The last query sees the last key. A sink's K is zero: the mask brings its score.

        q: [num_heads, num_queries, head_dim] -> [num_queries, num_keys], or with sinks
        [num_heads, num_queries, num_keys + 1]
        """
        num_heads, num_queries, _ = q.shape
        key = torch.arange(num_keys, device=q.device)
        query = key[num_keys - num_queries :, None]
        seen = (key <= query) & (key > query - (window or num_keys))
        mask = q.new_zeros(seen.shape).masked_fill(~seen, -torch.inf)
        if sinks is None:
            return mask
        scores = sinks.to(q.dtype)[:, None, None].expand(-1, num_queries, 1)
        return torch.cat((mask.expand(num_heads, -1, -1), scores), -1)
