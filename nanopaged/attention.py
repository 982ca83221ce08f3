"""Attention over the paged cache: what a step has to say about it, and the torch backend.

K and V of this step's tokens are stored first, then attention reads everything through the block
tables. So a prompt's first chunk, its later ones, a cached prefix and a decode are one and the same
case: some queries at known positions, and keys from position 0 to theirs.

Shapes, here and everywhere:

    num_tokens     tokens of the flat batch, all sequences one behind the other, no padding
    num_heads      query heads; group_size of them share one of the num_kv_heads
    q              [num_tokens, num_heads, head_dim]
    k, v           [num_tokens, num_kv_heads, head_dim]
    kv_cache       [num_blocks, 2, num_kv_heads, block_size, head_dim], one for every layer: a block
                   is one piece of memory, first all its K, then all its V, head by head
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
TILE_BYTES = 8 << 20  # K and V that tiles done together may gather: what the CPU's caches hold


@dataclass
class Tiles:
    """Some tiles of equally many queries, computed together over the longest context among them."""

    queries: slice  # their rows among the ordered queries
    cache_rows: Tensor  # [2 * num_tiles * num_kv_heads * num_keys / block_size]: all K, then all V
    hidden: Tensor  # [num_tiles, 1, 1, num_queries, num_keys]: True where a query must not look


@dataclass
class AttentionMetadata:
    """Where this step's tokens are stored and what they attend to; the same for every layer."""

    store_rows: Tensor  # [num_tokens * 2 * num_kv_heads]: where a token's K go, and where its V
    order: Tensor  # [num_tokens]: rows of the flat batch as the tiles have them, one by one
    inverse: Tensor  # [num_tokens]: and back
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
        tables = block_tables * 2 * self.num_kv_heads  # in units of (block, K or V, head)
        heads = np.arange(2 * self.num_kv_heads)
        seqs, positions = flatten(starts, counts)
        blocks, offsets = np.divmod(positions, self.block_size)
        store_rows = (tables[seqs, blocks, None] + heads) * self.block_size + offsets[:, None]
        # Cut every sequence's queries into tiles, and order those by size, then by context.
        seqs, index = flatten(np.zeros_like(counts), -(-counts // QUERY_TILE))
        sizes = np.minimum(QUERY_TILE, counts[seqs] - index * QUERY_TILE)
        firsts = starts[seqs] + index * QUERY_TILE  # position of a tile's first query
        used = -(-(firsts + sizes) // self.block_size)  # blocks up to its last one
        by_size = np.lexsort((used, sizes))
        seqs, firsts, sizes, used = (x[by_size] for x in (seqs, firsts, sizes, used))
        _, order = flatten((np.cumsum(counts) - counts - starts)[seqs] + firsts, sizes)
        tiles, begin, row = [], 0, 0
        size_of, used_by = sizes.tolist(), used.tolist()
        while begin < len(seqs):
            end = begin + 1
            while (end < len(seqs) and size_of[end] == size_of[begin]
                   and (end + 1 - begin) * used_by[end] * self.block_bytes <= TILE_BYTES):
                end += 1
            table = tables[seqs[begin:end], None, : used_by[end - 1]]  # [num_tiles, 1, blocks]
            cache_rows = table + heads.reshape(2, 1, -1, 1)  # [2, num_tiles, num_kv_heads, blocks]
            keys = np.arange(table.shape[2] * self.block_size)
            positions = firsts[begin:end, None] + np.arange(size_of[begin])
            hidden = keys > positions[:, None, None, :, None]
            queries = slice(row, row + positions.size)
            tiles.append(Tiles(queries, self._tensor(cache_rows.ravel()), self._tensor(hidden)))
            begin, row = end, queries.stop
        return AttentionMetadata(self._tensor(store_rows.ravel()), self._tensor(order),
                                 self._tensor(np.argsort(order)), tiles)

    def store(self, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> None:
        rows = kv_cache.view(-1, self.head_dim)  # one for every (block, K or V, head, offset)
        rows.index_copy_(0, metadata.store_rows, torch.cat((k, v), 1).view(-1, self.head_dim))

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """q: [num_tokens, num_heads, head_dim]; returns [num_tokens, num_heads * head_dim]."""
        heads, dim = self.num_kv_heads, self.head_dim
        q = q.index_select(0, metadata.order) * dim**-0.5
        out = torch.empty_like(q)
        cache = kv_cache.view(-1, self.block_size * dim)  # one row for every (block, K or V, head)
        for tiles in metadata.tiles:
            n, _, _, num_queries, num_keys = tiles.hidden.shape
            gathered = self._reserve(len(tiles.cache_rows), cache.shape[1])
            torch.index_select(cache, 0, tiles.cache_rows, out=gathered)
            k, v = gathered.view(2, n * heads, num_keys, dim)
            # The query heads of one KV head become rows of one matrix: K and V are read once.
            shape = n, num_queries, heads, self.num_heads // heads, dim
            rows = q[tiles.queries].view(shape).permute(0, 2, 3, 1, 4)
            scores = torch.bmm(rows.reshape(n * heads, -1, dim), k.transpose(1, 2))
            scores = scores.view(n, heads, -1, num_queries, num_keys)
            probs = scores.masked_fill_(tiles.hidden, -torch.inf).softmax(-1)
            result = torch.bmm(probs.view(n * heads, -1, num_keys), v).view(rows.shape)
            out[tiles.queries].view(shape).copy_(result.permute(0, 3, 1, 2, 4))
        return out.index_select(0, metadata.inverse).flatten(1)

    def _reserve(self, num_rows: int, size: int) -> Tensor:
        if self.buffer.numel() < num_rows * size:
            self.buffer = self.buffer.new_empty(num_rows * size)
        return self.buffer[: num_rows * size].view(num_rows, size)

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self.buffer.device)


def flatten(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """starts=[5, 0], counts=[2, 3] -> which=[0, 0, 1, 1, 1], values=[5, 6, 0, 1, 2]"""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) + (starts - np.cumsum(counts) + counts)[which]
