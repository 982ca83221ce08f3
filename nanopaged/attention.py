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

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nanopaged.batch import Batch, Draws

Ints: TypeAlias = NDArray[np.integer[Any]]
# How many queries are computed at once. A small number keeps the mask small and, if
# there is a window, the number of gathered keys.
QUERIES_AT_ONCE = 256
# What the device needs of a step. The order matters to `gpu/graphs.py`: only the last
# one may have another size when a recorded step is repeated.
INPUTS = ("token_ids", "positions", "slots", "plan", "last_indices", "draws",
          "block_tables")


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


class Metadata:
    """A step as the model sees it. All fields are arrays at first. Then
    `ModelRunner.prepare` replaces those in INPUTS with tensors on the device.
    """

    def __init__(self, batch: Batch, backend: "TorchAttention") -> None:
        self.seqs = batch.seqs  # the sequence of each entry, for models with states
        # [num_seqs]: how many tokens this step computes, and how many keys there are
        self.counts, self.ends = np.array(batch.counts), np.array(batch.ends)
        # [num_tokens]: the entry of each token, and its index there
        self.entries, self.indices = spread(self.counts)
        table_sizes = cdiv(self.ends, backend.block_size)
        # [num_tokens]: where the block table of its entry starts
        self.table_starts = (np.cumsum(table_sizes) - table_sizes)[self.entries]

        self.token_ids: Any = np.array(batch.token_ids)  # [num_tokens]
        self.positions: Any = (self.ends - self.counts)[self.entries] + self.indices
        self.block_tables: Any = np.array(batch.block_ids)  # [num_table_blocks]
        block, offset = np.divmod(self.positions, backend.block_size)
        block_ids = self.block_tables[self.table_starts + block]
        self.slots: Any = block_ids * backend.block_size + offset
        # [num_samples]: the token that each sample follows
        self.last_indices: Any = np.cumsum(self.counts)[batch.sample_entries] - 1
        # A row for each field of `Draws`, and a column for each sample. All inputs
        # travel in one buffer of integers, and so do the bits of these floats.
        draws = np.zeros(len(batch.sample_entries) * len(Draws._fields))
        draws[: len(batch.draws)] = batch.draws
        self.draws: Any = draws.reshape(-1, len(Draws._fields)).T.view(np.int64)
        self.plan: Any = backend.plan(self)  # what else the backend needs


class Scoring(NamedTuple):
    """How a layer scores keys."""

    scale: float  # a score is the product of a query and a key times this number
    window: int | None = None  # how many keys a query sees, up to its own; None: all
    # [num_heads]: the score of one more key for each head. Its V is zero, so it only
    # takes weight from the others.
    sinks: Tensor | None = None


class TorchAttention:
    """The reference, on any device: gather K and V, then call torch's own attention."""

    def __init__(self, model_config: Any, block_size: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.num_kv_heads = model_config.num_key_value_heads
        self.group_size = model_config.num_attention_heads // self.num_kv_heads
        self.head_dim = model_config.head_dim
        self.block_size, self.dtype, self.device = block_size, dtype, device
        self.block_shape = 2, self.num_kv_heads, block_size, self.head_dim
        self.ops: Any = None  # what else a device computes in its own way: `fused.Ops`
        self.uses_pdl = False  # see `gpu/kernels.py`

    def plan(self, metadata: Metadata) -> Ints:
        """Whatever else the backend needs on the device. Here it is nothing; on a GPU
        it says which program computes what.
        """
        return metadata.counts[:0]

    def store(self, k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """Put K and V into their slots."""
        kv, size = torch.stack((k, v), 1), self.block_size
        # Both sides are [num_tokens, 2, num_kv_heads, head_dim].
        kv_cache[slots // size, :, :, slots % size] = kv.to(kv_cache.dtype)

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Metadata, scoring: Scoring
               ) -> Tensor:
        """[num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]"""
        out = q.new_empty(q.shape)
        for entry in range(len(metadata.counts)):
            self.attend_entry(entry, q, kv_cache, metadata, scoring, out)
        return out.flatten(1)

    def attend_entry(self, entry: int, q: Tensor, kv_cache: Tensor, metadata: Metadata,
                     scoring: Scoring, out: Tensor) -> None:
        """Fill the rows of `out` that belong to one entry of the batch."""
        scale, window, sinks = scoring
        size, end = self.block_size, int(metadata.ends[entry])
        row = int(metadata.counts[:entry].sum())  # of q: the entry's first query
        block_table = metadata.block_tables[metadata.table_starts[row] :]
        for start in range(end - int(metadata.counts[entry]), end, QUERIES_AT_ONCE):
            # The queries from position `start` on, which see no key from `stop` on.
            stop = min(start + QUERIES_AT_ONCE, end)
            rows = slice(row, row + stop - start)
            queries = q[rows].transpose(0, 1)  # [num_heads, num_queries, head_dim]
            first_block = max(0, start + 1 - window) // size if window else 0
            used = block_table[first_block : cdiv(stop, size)]
            # [2, num_kv_heads, num_blocks, block_size, head_dim]
            blocks = kv_cache.permute(1, 2, 0, 3, 4).index_select(2, used)
            # [num_kv_heads, num_keys, head_dim] each. From `stop` on, the last block
            # holds old values, which are left out: a NaN among them would spread.
            k, v = blocks.flatten(2, 3)[:, :, : stop - first_block * size]
            mask = self.mask(queries, k.shape[1], window, sinks)
            if sinks is not None:  # one more key, with K = V = 0
                k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
            attended = F.scaled_dot_product_attention(
                queries[None], k.to(q.dtype)[None], v.to(q.dtype)[None], mask,
                scale=scale, enable_gqa=True)
            out[rows] = attended[0].transpose(0, 1)
            row = rows.stop

    def mask(self, q: Tensor, num_keys: int, window: int | None, sinks: Tensor | None
             ) -> Tensor:
        """What is added to the scores: 0 where a query sees a key, and -inf elsewhere.
        The last query sees the last key. A sink's K is zero: the mask adds its score.

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
