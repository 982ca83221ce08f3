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

    queries: Tensor  # [num_tiles * num_queries]: their rows in the flat batch
    cache_rows: Tensor  # [2 * num_tiles * num_kv_heads * num_keys / block_size]: all K, then all V
    hidden: Tensor  # [num_tiles, 1, 1, num_queries, num_keys]: True where a query must not look


@dataclass
class AttentionMetadata:
    """Where this step's tokens are stored and what they attend to; the same for every layer."""

    store_rows: Tensor  # [num_tokens * 2 * num_kv_heads]: where a token's K go, and where its V
    tiles: list[Tiles]


class TorchAttention:
    """Plain torch, on any device: gather whole blocks, two batched matrix products, a softmax.

    Tiles of equal size are batched until their K and V fill the processor's caches: one gather for
    all of them would go through memory twice, one at a time would drown in calls.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
                 dtype: torch.dtype, device: torch.device) -> None:
        self.num_kv_heads, self.group_size = num_kv_heads, num_heads // num_kv_heads
        self.head_dim, self.block_size, self.device = head_dim, block_size, device
        self.block_bytes = 2 * num_kv_heads * block_size * head_dim * dtype.itemsize

    def prepare(self, block_tables: Ints, starts: Ints, counts: Ints) -> AttentionMetadata:
        """Plan a step: sequence i has `counts[i]` new tokens at the positions from `starts[i]`."""
        tables = block_tables * 2 * self.num_kv_heads  # in units of (block, K or V, head)
        heads = np.arange(2 * self.num_kv_heads)
        seqs, positions = flatten(starts, counts)
        blocks, offsets = np.divmod(positions, self.block_size)
        store_rows = (tables[seqs, blocks, None] + heads) * self.block_size + offsets[:, None]
        # Cut every sequence's queries into tiles: some rows of the flat batch each.
        firsts = np.flatnonzero((positions - starts[seqs]) % QUERY_TILE == 0)
        sizes = np.diff(firsts, append=len(seqs))
        num_blocks = blocks[firsts + sizes - 1] + 1  # up to the one of a tile's last query
        # Take as many of one size as may be gathered together, those of the longest context first.
        tiles, left = [], np.lexsort((-num_blocks, sizes))
        while left.size:
            group = left[: max(1, TILE_BYTES // (num_blocks[left[0]] * self.block_bytes))]
            group = group[sizes[group] == sizes[group[0]]]
            left = left[len(group) :]
            queries = firsts[group, None] + np.arange(sizes[group[0]])  # [num_tiles, num_queries]
            table = tables[seqs[firsts[group]], None, : num_blocks[group[0]]]
            cache_rows = table + heads.reshape(2, 1, -1, 1)  # [2, num_tiles, num_kv_heads, blocks]
            keys = np.arange(table.shape[2] * self.block_size)
            hidden = keys > positions[queries][:, None, None, :, None]
            arrays = queries.ravel(), cache_rows.ravel(), hidden
            tiles.append(Tiles(*(to_device(array, self.device) for array in arrays)))
        return AttentionMetadata(to_device(store_rows.ravel(), self.device), tiles)

    def store(self, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> None:
        rows = kv_cache.view(-1, self.head_dim)  # one for every (block, K or V, head, offset)
        rows.index_copy_(0, metadata.store_rows, torch.cat((k, v), 1).view(-1, self.head_dim))

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """q: [num_tokens, num_heads, head_dim]; returns [num_tokens, num_heads * head_dim]."""
        q, out = q * self.head_dim**-0.5, torch.empty_like(q)
        cache = kv_cache.view(-1, self.block_size * self.head_dim)  # rows: (block, K or V, head)
        for tiles in metadata.tiles:
            result = self._attend(q.index_select(0, tiles.queries), cache, tiles)
            out.index_copy_(0, tiles.queries, result)
        return out.flatten(1)

    def _attend(self, q: Tensor, cache: Tensor, tiles: Tiles) -> Tensor:
        """q and the result: [num_tiles * num_queries, num_heads, head_dim]

        A function of its own, so that the next tiles get the memory of these, warm in the caches.
        """
        n, _, _, num_queries, num_keys = tiles.hidden.shape
        heads, dim = self.num_kv_heads, self.head_dim
        k, v = cache.index_select(0, tiles.cache_rows).view(2, n * heads, num_keys, dim)
        # The query heads of one KV head become rows of one matrix: K and V are read once.
        rows = q.view(n, num_queries, heads, self.group_size, dim).permute(0, 2, 3, 1, 4)
        scores = torch.bmm(rows.reshape(n * heads, -1, dim), k.transpose(1, 2))
        scores = scores.view(n, heads, -1, num_queries, num_keys)
        probs = scores.masked_fill_(tiles.hidden, -torch.inf).softmax(-1)
        result = torch.bmm(probs.view(n * heads, -1, num_keys), v).view(rows.shape)
        return result.permute(0, 3, 1, 2, 4).reshape(q.shape)


def flatten(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """starts=[5, 0], counts=[2, 3] -> which=[0, 0, 1, 1, 1], values=[5, 6, 0, 1, 2]"""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) + (starts - np.cumsum(counts) + counts)[which]


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
