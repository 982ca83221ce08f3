"""Attention over the paged cache: what a step has to say about it, and the backends.

K and V of this step's tokens are stored first, then attention reads everything through the block
tables. So a prompt's first chunk, its later ones, a cached prefix and a decode are one and the same
case: some queries at known positions, and keys from position 0 to theirs.

Shapes, here and everywhere:

    num_tokens     tokens of the flat batch, all sequences one behind the other, no padding
                   (but in recorded graphs, at position -1)
    num_heads      query heads; group_size of them share one of the num_kv_heads
    q              [num_tokens, num_heads, head_dim]
    k, v           [num_tokens, num_kv_heads, head_dim]
    kv_cache       [num_blocks, 2, num_kv_heads, block_size, head_dim], one for every layer: a block
                   is one piece of memory, first all its K, then all its V, head by head
    block_tables   [num_seqs, max_blocks]: physical block of a logical block; any, past the end
    slots          [num_tokens], the slot mapping: where a token's K and V are stored, physical
                   block * block_size + place in there; -1: they are not (padding)
"""

import os
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Ints: TypeAlias = NDArray[np.int64]

QUERY_TILE = 128  # queries in a tile: keys behind its last query are never read
GATHER_BYTES = 8 << 20  # K and V that tiles done together may gather: what the CPU's caches hold


@dataclass
class AttentionMetadata:
    """Where this step's tokens are, where they are stored and what they attend to.

    The same for every layer.
    """

    plan: Any  # of the torch backend: a list of gathers; of Triton: tiles, tables, rows, splits
    positions: Tensor  # [num_tokens]: of a token in its sequence
    slots: Tensor  # [num_tokens]: the slot mapping
    prompts: Any = None  # of flash: places of all keys, where sequences begin, the longest

    @property
    def tensors(self) -> list[Tensor]:
        """Of the Triton backend: whose contents say which step this is, if the shapes stay."""
        return [self.positions, self.slots, *self.plan[:2]]


class TorchAttention:
    """Plain torch, on any device: gather whole blocks, then torch's own attention.

    Tiles of equal size are batched until their K and V fill the processor's caches: one gather for
    all of them would go through memory twice, one at a time would drown in calls.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
                 dtype: torch.dtype, device: torch.device) -> None:
        self.num_kv_heads, self.group_size = num_kv_heads, num_heads // num_kv_heads
        self.head_dim, self.block_size = head_dim, block_size
        self.dtype, self.device = dtype, device
        self.block_bytes = 2 * num_kv_heads * block_size * head_dim * dtype.itemsize
        self.tile_sizes = [QUERY_TILE] * 2  # for few and for many queries

    def prepare(self, block_tables: Ints, starts: Ints, counts: Ints) -> AttentionMetadata:
        """Plan a step: sequence i has `counts[i]` new tokens at the positions from `starts[i]`."""
        # starts=[5, 0], counts=[2, 3] -> seqs=[0, 0, 1, 1, 1], positions=[5, 6, 0, 1, 2]:
        # place in the batch - place of the sequence's first token + that one's position.
        seqs = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(seqs)) + (starts - np.cumsum(counts) + counts)[seqs]
        indices, offsets = np.divmod(positions, self.block_size)
        slots = np.where(positions < 0, -1, block_tables[seqs, indices] * self.block_size + offsets)
        # Cut every sequence's queries into tiles: some rows of the flat batch each. Those with the
        # most keys come first, since a chip should run empty on short ones.
        size = self.tile_sizes[int(counts.mean() > self.tile_sizes[0])]
        firsts = np.flatnonzero((positions - starts[seqs]) % size == 0)
        sizes = np.diff(firsts, append=len(seqs))
        tiles = np.stack((seqs[firsts], firsts, positions[firsts], sizes), 1)
        tiles = tiles[np.argsort(-positions[firsts] - sizes)]
        return AttentionMetadata(self._plan(tiles, size, block_tables),
                                 to_device(positions, self.device), to_device(slots, self.device))

    def _plan(self, tiles: Ints, size: int, block_tables: Ints) -> Any:
        """tiles: [num_tiles, 4]: sequence, first token, its position, number of queries (<= size).

        Here as many of one size as may be gathered together, those of the longest context first,
        are one element of the plan.
        """
        plan = []
        heads = np.arange(2 * self.num_kv_heads).reshape(2, 1, -1, 1)
        for count in np.unique(tiles[:, 3]).tolist():
            seqs, firsts, positions, _ = tiles[tiles[:, 3] == count].T[:, :, None]
            queries, positions = firsts + np.arange(count), positions + np.arange(count)
            begin = 0
            while begin < len(seqs):
                width = int(positions[begin, -1]) // self.block_size + 1  # blocks of the longest
                some = slice(begin, begin + max(1, GATHER_BYTES // (width * self.block_bytes)))
                # [2, num_tiles, num_kv_heads, num_blocks]:
                cache_rows = block_tables[seqs[some], :width] * heads.size + heads
                seen = np.arange(width * self.block_size) <= positions[some, None, :, None]
                # Rows in the flat batch, rows of the cache (all K, then all V), and the mask,
                # [num_tiles, 1, num_queries, num_keys].
                arrays = queries[some].ravel(), cache_rows.ravel(), seen
                plan.append([to_device(array, self.device) for array in arrays])
                begin = some.stop
        return plan

    def store(self, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> None:
        kv_cache[self.places(metadata.slots)] = torch.stack((k, v), 1)

    def places(self, slots: Tensor) -> tuple[Any, ...]:
        """Index of a layer's cache, for K and V [num_tokens, 2, num_kv_heads, head_dim]."""
        return slots // self.block_size, slice(None), slice(None), slots % self.block_size

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """q: [num_tokens, num_heads, head_dim]; returns [num_tokens, num_heads * head_dim]."""
        out = torch.empty_like(q)
        cache = kv_cache.view(-1, self.block_size * self.head_dim)  # rows: (block, K or V, head)
        for queries, cache_rows, seen in metadata.plan:
            out.index_copy_(0, queries, self._attend(q[queries], cache, cache_rows, seen))
        return out.flatten(1)

    def _attend(self, q: Tensor, cache: Tensor, cache_rows: Tensor, seen: Tensor) -> Tensor:
        """q and the result: [num_tiles * num_queries, num_heads, head_dim]

        A function of its own, so that the next tiles get the memory of these, warm in the caches.
        """
        n, _, _, num_keys = seen.shape
        k, v = cache.index_select(0, cache_rows).view(2, n, self.num_kv_heads, num_keys, -1)
        rows = q.view(n, -1, *q.shape[1:]).transpose(1, 2)
        result = F.scaled_dot_product_attention(rows, k, v, seen, enable_gqa=True)
        return result.transpose(1, 2).reshape(q.shape)


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(values)
    # To a GPU from pinned memory, or else the copy may wait for it.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class TritonAttention(TorchAttention):
    """The same calls, by the kernels of `kernels.py`.

    A query at position -1 is padding: its slot is -1 too, it is not stored, it sees no key, and
    its result is zero. With other contents in the metadata's tensors, `store` and `attend` do
    another step, of the same shapes.
    """

    def __init__(self, *shape: Any) -> None:
        super().__init__(*shape)
        on_gpu, size = self.device.type == "cuda", self.dtype.itemsize
        if find_spec("triton") is None or not (on_gpu or os.environ.get("TRITON_INTERPRET") == "1"):
            raise ValueError("attention_backend 'triton' or 'flash' needs triton (`pip install "
                             f"triton`) and device 'cuda', got {self.device.type!r}: use 'torch'")
        from nanopaged import kernels

        self.kernels = kernels
        rows = kernels.FEW_ROWS, kernels.MANY_ROWS[size]  # queries x the group's heads
        self.tile_sizes = [max(1, number // self.group_size) for number in rows]
        self.dim: int = max(16, 1 << (self.head_dim - 1).bit_length())  # tl.dot takes no less
        self.key_tile = max(16, min(128, kernels.TILE_BYTES // (self.dim * size)))
        num_sms = torch.cuda.get_device_properties().multi_processor_count if on_gpu else 4
        self.num_programs = kernels.PROGRAMS_PER_SM * num_sms  # that run at the same time

    def _plan(self, tiles: Ints, size: int, block_tables: Ints) -> Any:
        """The tiles, the tables, how many rows a tile has, and how many splits its keys."""
        # Few tiles are split, so that they fill the chip too; each split has a tile of the longest.
        # All of a step's tiles count: tokens x splits is what there is memory for.
        most = -(-block_tables.shape[1] * self.block_size // self.key_tile)
        splits = min(self.num_programs // (len(tiles) * self.num_kv_heads), most, 64)
        splits = 1 << (max(1, splits).bit_length() - 1)  # a power of two
        rows = max(self.kernels.FEW_ROWS, 1 << (size * self.group_size - 1).bit_length())
        both = (to_device(array.astype(np.int32), self.device) for array in (tiles, block_tables))
        return *both, rows, splits

    def store(self, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> None:
        self.kernels.store_kv[len(k), self.num_kv_heads](
            k, v, metadata.slots, kv_cache, k.stride(0), v.stride(0),
            self.num_kv_heads, self.head_dim, self.block_size, self.dim, num_warps=1)

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        out, (tiles, tables, rows, splits) = q.new_empty(q.shape), metadata.plan
        lse = torch.empty(*q.shape[:2], splits, device=q.device)
        parts = torch.empty(*lse.shape, self.head_dim, device=q.device) if splits > 1 else out
        self.kernels.paged_attention[len(tiles) * self.num_kv_heads, splits](
            q, kv_cache, tables, tiles, parts, lse, q.stride(0), tables.stride(0),
            self.num_kv_heads, self.group_size, self.head_dim, self.block_size, rows,
            self.key_tile, self.dim, num_warps=max(4, rows // 16), num_stages=3)
        if splits > 1:
            self.kernels.merge_splits[q.shape[:2]](parts, lse, out, self.head_dim, splits, self.dim)
        return out.flatten(1)


class FlashAttention(TritonAttention):
    """Prompts by FlashAttention-2 (Dao 2023): the kernel of flash-attn, or else of torch.

    It gets copies of K and V, sequence by sequence, as it cannot read small blocks. So it is for
    steps with few keys a query: the others are Triton's, all decodes among them, and float32.
    """

    def __init__(self, *shape: Any) -> None:
        super().__init__(*shape)
        try:
            from flash_attn import flash_attn_varlen_func

            self.varlen: Any = partial(flash_attn_varlen_func, causal=True)
        except ImportError:
            from torch.nn.attention.varlen import varlen_attn

            options: Any = {"window_size": (-1, 0), "enable_gqa": True}
            names = varlen_attn.__kwdefaults__ or {}  # torch 2.11's has no enable_gqa, needs none
            self.varlen = partial(varlen_attn, **{x: options[x] for x in options if x in names})

    def prepare(self, block_tables: Ints, starts: Ints, counts: Ints) -> AttentionMetadata:
        metadata = super().prepare(block_tables, starts, counts)
        ends, most = starts + counts, int(counts.max())
        # A copy costs less than what a prompt's queries do with it; 4 is to be measured.
        if most > 1 and ends.sum() <= 4 * counts.sum() and self.dtype != torch.float32:
            places = self.places(super().prepare(block_tables, np.zeros_like(ends), ends).slots)
            sums = np.cumsum([[0, *counts], [0, *ends]], 1, np.int32)  # where sequences begin
            metadata.prompts = places, *to_device(sums, self.device), most, int(ends.max())
        return metadata

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        if metadata.prompts is None:
            return super().attend(q, kv_cache, metadata)
        places, *lengths = metadata.prompts
        k, v = kv_cache[places].unbind(1)  # [num_keys, num_kv_heads, head_dim]
        return torch.flatten(self.varlen(q, k, v, *lengths), 1)
