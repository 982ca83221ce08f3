"""Attention on GPUs: the work of a step is planned here, and done by `kernels.py`.

The shapes, and the words for how work is divided, are explained in `attention.py`. Two
more words are needed here:

    tile    some neighbouring queries of one sequence, computed together
    item    what a program is told to compute: a tile, over all its keys or over a part
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged.attention import (
    AttentionMetadata,
    Ints,
    TorchAttention,
    ceil_div,
    to_device,
)

# Compute capability. GPUs before Ampere have neither the shared memory nor the
# asynchronous loads on which the tiles of `kernels.py` rest.
KERNELS_NEED = (8, 0)


@dataclass
class TritonMetadata(AttentionMetadata):
    """The work of a step, cut into items: see `TritonAttention.plan`."""

    items: Tensor  # [num_items, 7]
    merges: Tensor  # [num_merges, 4]
    block_tables: Tensor  # [num_seqs, max_blocks]
    num_rows: int  # of a tile: queries times group_size, rounded up
    num_part_rows: int  # for the results of all parts


class TritonAttention(TorchAttention):
    """The same calls, by the kernels of `kernels.py`.

    A query at position -1 is padding: it is not stored, it sees no key, and its result
    is zero. With other contents in the metadata's tensors, the same calls compute other
    decodes of as many sequences: CUDA graphs rest on this.
    """

    def __init__(self, *shape: Any) -> None:
        super().__init__(*shape)
        on_gpu = self.device.type == "cuda"
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if find_spec("triton") is None or not (on_gpu or interpreted):
            raise ValueError(
                "attention_backend 'triton' or 'flash' needs triton (`pip install "
                f"triton`) and device 'cuda', got {self.device.type!r}: use 'torch'")
        capability = torch.cuda.get_device_capability() if on_gpu else KERNELS_NEED
        if capability < KERNELS_NEED:
            raise ValueError(
                "attention_backend 'triton' or 'flash' needs a GPU of compute "
                f"capability {KERNELS_NEED}, got {capability}: use 'torch'")
        from nanopaged import kernels

        self.kernels = kernels
        size = self.dtype.itemsize
        # tl.dot takes sizes that are powers of two, 16 or more.
        self.dim = max(16, next_power_of_2(self.head_dim))
        # With a head_dim of 256, queries and accumulators are twice as wide as with
        # 128, and there is room for half the rows.
        self.width = max(1, self.dim // 128)
        many_rows = kernels.MANY_ROWS[size] // self.width
        self.few_queries = max(1, kernels.FEW_ROWS // self.group_size)
        self.many_queries = max(1, many_rows // self.group_size)
        self.key_tile = max(16, min(128, kernels.TILE_BYTES // (self.dim * size)))

        num_sms = 4
        if on_gpu:
            num_sms = torch.cuda.get_device_properties().multi_processor_count
        # Programs of one KV head that run at the same time, with few and many queries
        self.few_places = max(1, kernels.PROGRAMS_PER_SM * num_sms // self.num_kv_heads)
        self.many_places = max(1, num_sms // self.num_kv_heads)

    def prepare(self, block_tables: Ints, starts: Ints, counts: Ints) -> TritonMetadata:
        positions, slots = self.place_tokens(block_tables, starts, counts)

        # Large tiles would be mostly empty where sequences have few queries.
        size, num_places = self.few_queries, self.few_places
        if counts.mean() > size:
            size, num_places = self.many_queries, self.many_places
        items, merges, num_part_rows = self.plan(
            starts, counts, positions, size, num_places, block_tables.shape[1])

        num_rows = next_power_of_2(size * self.group_size)
        return TritonMetadata(
            positions=self.to_device(positions),
            slots=self.to_device(slots),
            items=self.to_device(items.astype(np.int32)),
            merges=self.to_device(merges.astype(np.int32)),
            # Last: with longer sequences tables become wider, and what came before them
            # must stay in place for graphs. `items` says where each table begins.
            block_tables=self.to_device(block_tables.astype(np.int32)),
            num_rows=max(self.kernels.FEW_ROWS, num_rows),
            num_part_rows=num_part_rows,
        )

    def plan(self, starts: Ints, counts: Ints, positions: Ints, size: int,
             num_places: int, table_size: int) -> tuple[Ints, Ints, int]:
        """Cut the queries into tiles, and the keys of long tiles into parts.

        size: queries in a tile; num_places: programs per KV head that run at the same
        time; table_size: entries of a block table. Returns the work items, whole tiles
        or parts of them, what is to be merged, and the number of rows of partial
        results:

            items   [num_items, 7]: where the block table begins; first token, its
                    position, number of queries; first key, end of the keys; row of the
                    partial result, or -1 for a whole tile
            merges  [num_merges, 4], for each token of a divided tile: the token, row of
                    its first part, number of parts, rows between one and the next

        An example: two decodes have 1,000 and 100 keys to read, with num_places=2 and
        table_size=80. If all programs read equally much, each would read 550 keys. A
        part gets at most half of that, 275, so that no program takes much longer than
        the others. So the first sequence has four parts, of 250 keys each:

            items = [[0, 0, 999, 1,   0,  250,  0],
                     [0, 0, 999, 1, 250,  500,  1],
                     [0, 0, 999, 1, 500,  750,  2],
                     [0, 0, 999, 1, 750, 1000,  3],
                     [80, 1, 99, 1,   0,  100, -1]]
            merges = [[0, 0, 4, 1]]

        before they are filled up, see below. The values on the right, in the code, are
        those of this example.

        Items with the most keys come first: a long one that starts last would keep all
        others waiting. With n keys in all, the limit is n / (2 * num_places), so there
        are at most 2 * num_places items more than tiles. Decodes are filled up to that
        number with zeros: then shapes depend on the number of sequences alone, as
        graphs need it.
        """
        # A tile begins at every size-th query of a sequence.
        seqs = np.repeat(np.arange(len(counts)), counts)  # of each token: [0, 1]
        first_tokens = np.flatnonzero((positions - starts[seqs]) % size == 0)  # [0, 1]
        num_queries = np.diff(first_tokens, append=len(seqs))  # [1, 1]
        first_positions = positions[first_tokens]  # [999, 99]
        ends = first_positions + num_queries  # [1000, 100]
        tables = seqs[first_tokens] * table_size  # [0, 80]
        tiles = np.stack((tables, first_tokens, first_positions, num_queries), 1)

        # The keys of a tile are divided if they are more than the limit.
        most_added = 2 * num_places
        limit = max(ceil_div(ends.sum(), most_added), self.key_tile)  # 275
        num_parts = np.maximum(ceil_div(ends, limit), 1)  # [4, 1]
        part_sizes = ceil_div(ends, num_parts)  # [250, 100]

        # An item for every part. Those of divided tiles get rows for their results.
        tile = np.repeat(np.arange(len(tiles)), num_parts)  # its own: [0, 0, 0, 0, 1]
        first_items = np.cumsum(num_parts) - num_parts  # of each tile: [0, 4]
        part = np.arange(len(tile)) - first_items[tile]  # of its tile: [0, 1, 2, 3, 0]
        first_keys = part * part_sizes[tile]  # [0, 250, 500, 750, 0]
        end_keys = np.minimum(first_keys + part_sizes[tile], ends[tile])
        rows_needed = np.where(num_parts > 1, num_queries, 0)[tile]  # [1, 1, 1, 1, 0]
        first_rows = np.cumsum(rows_needed) - rows_needed  # [0, 1, 2, 3, 4]
        items = np.column_stack((
            tiles[tile], first_keys, end_keys,
            np.where(rows_needed > 0, first_rows, -1)))
        items = items[np.argsort(first_keys - end_keys, kind="stable")]

        # The tokens of divided tiles are merged: a row of each part, starting with the
        # first.
        tile_of_token = np.repeat(np.arange(len(tiles)), num_queries)
        tokens = np.flatnonzero(num_parts[tile_of_token] > 1)  # [0]
        merged = tile_of_token[tokens]  # the tile of each merge
        merges = np.column_stack((
            tokens, first_rows[first_items[merged]] + tokens - first_tokens[merged],
            num_parts[merged], num_queries[merged]))
        if counts.max() > 1:
            return items, merges, int(rows_needed.sum())

        # At most most_added items are added, and each divided tile adds at least one.
        # So at most most_added tiles are divided, and they have at most twice as many
        # parts: what they add, and the one that each had. A part of a decode has a row.
        items = filled_up(items, len(tiles) + most_added)
        merges = filled_up(merges, min(len(tiles), most_added))
        return items, merges, 2 * most_added

    def rotate_and_store(self, qkv: Tensor, weights: list[Tensor], eps: float,
                         rotation: tuple[Tensor, Tensor], kv_cache: Tensor,
                         metadata: Any) -> Tensor:
        num_tokens, num_rows, head_dim = qkv.shape
        num_heads = num_rows - 2 * self.num_kv_heads
        q = qkv.new_empty(num_tokens, num_heads, head_dim)
        q_weight, k_weight = weights or (None, None)
        rows = next_power_of_2(num_rows)
        self.kernels.rotate_and_store[(num_tokens,)](
            qkv, q_weight, k_weight, *rotation, metadata.slots, q, kv_cache, eps,
            num_heads, self.num_kv_heads, head_dim, self.block_size, rows, self.dim,
            num_warps=min(16, max(1, rows * self.dim // 1024)))
        return q

    def copy_blocks(self, source: Tensor, target: Tensor, moves: Ints) -> None:
        # All at once: within a pool nothing is copied from a block that is written, as
        # somebody still holds every block that is copied.
        self.kernels.copy_blocks[len(moves), len(source)](
            source, target, to_device(moves, self.device),
            source.shape[1], target.shape[1], SIZE=source[0, 0].numel(), STEP=2048)

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: TritonMetadata) -> Tensor:
        num_heads = q.shape[1]
        out = q.new_empty(q.shape)
        lse = torch.empty(metadata.num_part_rows, num_heads, device=q.device)
        parts = torch.empty(*lse.shape, self.head_dim, device=q.device)

        num_rows = metadata.num_rows
        is_large = num_rows > self.kernels.FEW_ROWS and self.width > 1
        num_stages = 2 if is_large else 3  # so that it fits into 99 KiB
        self.kernels.paged_attention[(len(metadata.items) * self.num_kv_heads,)](
            q, kv_cache, metadata.block_tables, metadata.items, out, parts, lse,
            q.stride(0), self.num_kv_heads, self.group_size, self.head_dim,
            self.block_size, num_rows, self.key_tile, self.dim,
            num_warps=max(4, num_rows * self.width // 16), num_stages=num_stages)
        if len(metadata.merges):
            self.kernels.merge_parts[len(metadata.merges), num_heads](
                parts, lse, metadata.merges, out, self.head_dim, self.dim)
        return out.flatten(1)


@dataclass
class FlashMetadata(TritonMetadata):
    first_queries: Tensor  # [num_seqs + 1]: where sequences begin in the flat batch
    first_keys: Tensor  # [num_seqs + 1]
    most_queries: int
    most_keys: int


class FlashAttention(TritonAttention):
    """Computes steps with prompts by FlashAttention-2 (Dao 2023), of flash-attn.

    It reads the pool in place, too, if blocks are large enough for it. Steps of decodes
    alone, which CUDA graphs record, are left to Triton, and so is float32. (Torch has
    the same function, but its FlashAttention-2 knows no block tables.)
    """

    def __init__(self, *shape: Any) -> None:
        super().__init__(*shape)
        if self.block_size % 256:
            raise ValueError(
                "block_size must be a multiple of 256 for attention_backend='flash', "
                f"got {self.block_size}: use 256, or attention_backend='triton'")
        try:
            from flash_attn import flash_attn_varlen_func
        except ImportError:
            raise ValueError(
                "attention_backend='flash' needs flash-attn (`pip install flash-attn`):"
                " install it, or use 'triton'") from None
        self.flash: Any = flash_attn_varlen_func

    def prepare(self, block_tables: Ints, starts: Ints, counts: Ints) -> TritonMetadata:
        metadata = super().prepare(block_tables, starts, counts)
        ends = starts + counts
        most_queries = int(counts.max())
        if most_queries == 1 or self.dtype == torch.float32:
            return metadata

        first_queries = np.cumsum([0, *counts], dtype=np.int32)
        first_keys = np.cumsum([0, *ends], dtype=np.int32)
        return FlashMetadata(
            **vars(metadata),
            first_queries=self.to_device(first_queries),
            first_keys=self.to_device(first_keys),
            most_queries=most_queries,
            most_keys=int(ends.max()),
        )

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: TritonMetadata) -> Tensor:
        if not isinstance(metadata, FlashMetadata):
            return super().attend(q, kv_cache, metadata)

        # Views, not copies: [num_blocks, block_size, num_kv_heads, head_dim]
        k, v = kv_cache.transpose(2, 3).unbind(1)
        out = self.flash(
            q, k, v, metadata.first_queries, metadata.first_keys,
            metadata.most_queries, metadata.most_keys,
            causal=True, block_table=metadata.block_tables)
        return torch.flatten(out, 1)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def filled_up(rows: Ints, count: int) -> Ints:
    """`rows`, followed by rows of zeros."""
    return np.concatenate((rows, np.zeros((count - len(rows), rows.shape[1]), int)))
