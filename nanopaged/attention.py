"""Attention over the paged cache: what a step needs to know about it, and a reference.

In every layer the K and V of the step's tokens are stored first. Then attention reads
all K and V through the block tables. So there is only one case: some queries at known
positions, each of which sees the keys from position 0 to its own. This covers the first
chunk of a prompt, later chunks, the rest after a cached prefix, and decodes.

Shapes, here and everywhere:

    num_tokens     tokens of the flat batch, one sequence after the other
    num_seqs       sequences (entries) in the batch
    num_heads      query heads; group_size of them share one of the num_kv_heads
    q              [num_tokens, num_heads, head_dim]
    k, v           [num_tokens, num_kv_heads, head_dim] each
    kv_cache       [num_blocks, 2, num_kv_heads, block_size, head_dim], one per layer: a
                   block is one piece of memory, first all its K, then all its V, head
                   by head
    block_tables   [num_table_blocks]: the physical block of each logical block of the
                   first sequence, then of the second, and so on
    slots          [num_tokens], the slot mapping: where a token's K and V are stored,
                   physical block * block_size + offset

In the story of `sequence.py`, with block_size=4, while A decodes t0 and B computes the
last two tokens of its prompt:

    counts = [1, 2]   ends = [7, 6]   block_tables = [0, 1, 0, 2]
    positions = [6, 4, 5]   slots = [6, 8, 9]

and `locate` gives seqs = [0, 1, 1], numbers = [0, 0, 1] and table_starts = [0, 2, 2].
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

Ints: TypeAlias = NDArray[np.integer[Any]]


@dataclass
class Metadata:
    """A step as the model sees it. Its tensors are on the device."""

    counts: Ints  # [num_seqs]: how many tokens of each sequence this step computes
    ends: Ints  # [num_seqs]: how many keys each sequence then has
    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]: where each token is in its sequence
    slots: Tensor  # [num_tokens]
    plan: Tensor  # integers: what this backend's `plan` returned
    block_tables: Tensor  # [num_table_blocks]
    last_indices: Tensor  # [num_samples]: the token that each sample follows


def cdiv(number: Any, divisor: Any) -> Any:
    """Divide and round up: 10 tokens need cdiv(10, 4) = 3 blocks of 4."""
    return -(-number // divisor)


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """For runs of these lengths, the run of each element, and its index there:
    [2, 3] -> runs [0, 0, 1, 1, 1], indices [0, 1, 0, 1, 2].
    """
    runs = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return runs, np.arange(len(runs)) - starts[runs]


class Places(NamedTuple):
    """Where the tokens of a step belong. Every field is [num_tokens]."""

    seqs: Ints  # its sequence (entry)
    numbers: Ints  # its number within the entry
    positions: Ints  # its position in the whole sequence
    table_starts: Ints  # where the block table of the sequence starts


def locate(counts: Ints, ends: Ints, block_size: int) -> Places:
    """Where the tokens of a step belong."""
    seqs, numbers = spread(counts)
    table_sizes = cdiv(ends, block_size)
    table_starts = np.cumsum(table_sizes) - table_sizes
    return Places(seqs, numbers, (ends - counts)[seqs] + numbers, table_starts[seqs])


def place_tokens(block_tables: Ints, counts: Ints, ends: Ints,
                 block_size: int) -> tuple[Ints, Ints]:
    """The positions and slots of all tokens, as in the story above."""
    at = locate(counts, ends, block_size)
    block_ids = block_tables[at.table_starts + at.positions // block_size]
    return at.positions, block_ids * block_size + at.positions % block_size


class TorchAttention:
    """The reference, on any device: gather K and V, then call torch's own attention."""

    can_be_recorded = False  # in CUDA graphs

    def __init__(self, model_config: Any, block_size: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.num_kv_heads = model_config.num_key_value_heads
        self.group_size = model_config.num_attention_heads // self.num_kv_heads
        self.head_dim = model_config.head_dim
        self.scale = self.head_dim**-0.5
        self.block_size = block_size
        self.dtype = dtype
        self.device = device

    def plan(self, counts: Ints, ends: Ints) -> Ints:
        """Whatever else the backend needs on the device; here, nothing."""
        return counts[:0]

    def store(self, k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """Put K and V into their slots."""
        kv, size = torch.stack((k, v), 1), self.block_size
        # Both sides are [num_tokens, 2, num_kv_heads, head_dim].
        kv_cache[slots // size, :, :, slots % size] = kv.to(kv_cache.dtype)

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Metadata) -> Tensor:
        """[num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]"""
        return self.attend_gathered(q, kv_cache, metadata, min_queries=1)

    def attend_gathered(self, q: Tensor, kv_cache: Tensor, metadata: Metadata,
                        min_queries: int) -> Tensor:
        """The same for sequences with at least `min_queries` tokens in this step. (The
        loops of `cpu_kernels.py` compute the others.)
        """
        out = q.new_empty(q.shape)
        counts, ends = metadata.counts, metadata.ends
        for seq in np.flatnonzero(counts >= min_queries):
            count, num_keys = int(counts[seq]), int(ends[seq])
            tokens = slice(counts[:seq].sum(), counts[: seq + 1].sum())
            start = cdiv(ends[:seq], self.block_size).sum()
            num_blocks = cdiv(num_keys, self.block_size)
            table = metadata.block_tables[start : start + num_blocks]
            # [2, num_kv_heads, num_blocks, block_size, head_dim]
            blocks = kv_cache.permute(1, 2, 0, 3, 4).index_select(2, table).to(q.dtype)
            # [1, num_kv_heads, num_keys, head_dim] each, without the rest of the last
            # block: it holds old values, and a NaN among them would spread.
            k, v = blocks.flatten(2, 3)[:, None, :, :num_keys]
            mask = causal_lower_right(count, num_keys)  # the last query sees all keys
            # [1, num_heads, count, head_dim]
            attended = F.scaled_dot_product_attention(
                q[None, tokens].transpose(1, 2), k, v, mask, scale=self.scale,
                enable_gqa=True)
            out[tokens] = attended[0].transpose(0, 1)
        return out.flatten(1)
