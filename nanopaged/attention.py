"""Attention over the paged cache: what a step has to say about it, and the torch backend.

K and V of this step's tokens are stored first, then attention reads everything through the block
tables. So a prompt's first chunk, its later ones, a cached prefix and a decode are one and the same
case: some queries at known positions, and keys from position 0 to theirs.

Shapes, here and everywhere:

    num_tokens     tokens of the flat batch, all sequences one behind the other, no padding
    num_heads      query heads; group_size of them share one of the num_kv_heads
    q              [num_tokens, num_heads, head_dim]
    k, v           [num_tokens, num_kv_heads, head_dim]
    kv_cache       [2, num_blocks, num_kv_heads, block_size, head_dim], one for every layer
    block_tables   [num_seqs, max_blocks]: physical block of a logical block; any, past the end
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints: TypeAlias = NDArray[np.int64]

QUERY_TILE = 128  # queries in a tile: keys behind its last query are never read
TILE_BYTES = 4 << 20  # K and V that tiles done together may gather: what the CPU's caches hold


@dataclass
class Tiles:
    """Some tiles of equally many queries, computed together over the longest context among them."""

    tokens: Tensor  # [num_tiles * num_queries]: their rows in the flat batch
    cache_rows: Tensor  # [num_tiles * num_kv_heads * num_keys / block_size]: (block, head) pairs
    hidden: Tensor  # [num_tiles, 1, 1, num_queries, num_keys]: True where a query must not look


@dataclass
class AttentionMetadata:
    """Where this step's tokens are stored and what they attend to; the same for every layer."""

    store_rows: Tensor  # [num_tokens * num_kv_heads]: (block, head, offset in the block) triples
    tiles: list[Tiles]


class TorchAttention:
    """Plain torch, on any device: gather whole blocks, two batched matrix products, a softmax.

    Tiles of equal size are batched until their K and V fill the processor's caches: one gather for
    all of them would go through memory twice, one at a time would drown in calls.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
                 dtype: torch.dtype, device: torch.device) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.block_size = block_size
        self.block_bytes = 2 * num_kv_heads * block_size * head_dim * dtype.itemsize
        self.buffer = torch.empty(0, dtype=dtype, device=device)  # for gathered K and V, reused

    def prepare(self, block_tables: Ints, starts: Ints, counts: Ints) -> AttentionMetadata:
        """Plan a step: sequence i has `counts[i]` new tokens at the positions from `starts[i]`."""
        seqs, positions = flatten(starts, counts)
        blocks, offsets = np.divmod(positions, self.block_size)
        heads = np.arange(self.num_kv_heads)
        rows = block_tables[seqs, blocks][:, None] * self.num_kv_heads + heads
        store_rows = self._tensor((rows * self.block_size + offsets[:, None]).ravel())
        # Cut every sequence's queries into tiles, and order those by size, then by context.
        seqs, index = flatten(np.zeros_like(counts), -(-counts // QUERY_TILE))
        sizes = np.minimum(QUERY_TILE, counts[seqs] - index * QUERY_TILE)
        firsts = (np.cumsum(counts) - counts)[seqs] + index * QUERY_TILE  # rows in the flat batch
        starts = starts[seqs] + index * QUERY_TILE
        num_blocks = -(-(starts + sizes) // self.block_size)
        groups: list[list[int]] = []
        for tile in np.lexsort((num_blocks, sizes)).tolist():
            size = len(groups[-1]) + 1 if groups and sizes[groups[-1][0]] == sizes[tile] else 1
            if size == 1 or size * num_blocks[tile] * self.block_bytes > TILE_BYTES:
                groups.append([])
            groups[-1].append(tile)
        tables = (block_tables[seqs[g], : num_blocks[g].max()] for g in groups)
        return AttentionMetadata(store_rows, [self._plan(table, firsts[g], starts[g], sizes[g[0]])
                                              for table, g in zip(tables, groups, strict=True)])

    def _plan(self, tables: Ints, firsts: Ints, starts: Ints, num_queries: int) -> Tiles:
        """tables: [num_tiles, num_blocks]; firsts, starts: row and position of the first query."""
        queries, keys = np.arange(num_queries), np.arange(tables.shape[1] * self.block_size)
        heads = np.arange(self.num_kv_heads)[:, None]
        positions = (starts[:, None] + queries)[:, None, None, :, None]
        return Tiles(tokens=self._tensor((firsts[:, None] + queries).ravel()),
                     cache_rows=self._tensor((tables[:, None] * self.num_kv_heads + heads).ravel()),
                     hidden=self._tensor(keys > positions))

    def store(self, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> None:
        for cache, new in zip(kv_cache, (k, v), strict=True):
            rows = cache.view(-1, self.head_dim)  # one for every (block, head, offset)
            rows.index_copy_(0, metadata.store_rows, new.reshape(-1, self.head_dim))

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """q: [num_tokens, num_heads, head_dim]; returns [num_tokens, num_heads * head_dim]."""
        out = torch.empty_like(q)
        q = q * self.head_dim**-0.5
        for tiles in metadata.tiles:
            n, _, _, num_queries, num_keys = tiles.hidden.shape
            k, v = self._gather(kv_cache, tiles)  # [n * num_kv_heads, num_keys, head_dim]
            # The query heads of one KV head become rows of one matrix: K and V are read once.
            rows = q.index_select(0, tiles.tokens).view(n, num_queries, self.num_kv_heads, -1,
                                                        self.head_dim).permute(0, 2, 3, 1, 4)
            scores = torch.bmm(rows.reshape(len(k), -1, self.head_dim), k.transpose(1, 2))
            scores = scores.view(n, self.num_kv_heads, -1, num_queries, num_keys)
            probs = scores.masked_fill_(tiles.hidden, -torch.inf).softmax(-1)
            result = torch.bmm(probs.view(len(k), -1, num_keys), v).view(rows.shape)
            result = result.permute(0, 3, 1, 2, 4).reshape(-1, self.num_heads, self.head_dim)
            out.index_copy_(0, tiles.tokens, result)
        return out.flatten(1)

    def _gather(self, kv_cache: Tensor, tiles: Tiles) -> list[Tensor]:
        shape = 2, len(tiles.cache_rows), self.block_size * self.head_dim
        if self.buffer.numel() < shape[0] * shape[1] * shape[2]:
            self.buffer = self.buffer.new_empty(shape).view(-1)
        out = self.buffer[: shape[0] * shape[1] * shape[2]].view(shape)
        for cache, buffer in zip(kv_cache, out, strict=True):
            torch.index_select(cache.view(-1, shape[2]), 0, tiles.cache_rows, out=buffer)
        num_keys = tiles.hidden.shape[-1]
        return [buffer.view(-1, num_keys, self.head_dim) for buffer in out]

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self.buffer.device)


def flatten(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """starts=[5, 0], counts=[2, 3] -> which=[0, 0, 1, 1, 1], values=[5, 6, 0, 1, 2]"""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) + (starts - np.cumsum(counts) + counts)[which]
