"""Attention over the paged cache: what a step must know about it, and the backends.

K and V of this step's tokens are stored first, then attention reads everything through
the block tables. So a prompt's first chunk, its later chunks, a cached prefix and a
decode are one and the same case: some queries at known positions, and the keys from
position 0 to theirs.

Shapes, here and everywhere:

    num_tokens     tokens of the flat batch, one sequence after the other, no padding
                   (but in recorded graphs, at position -1)
    num_heads      query heads; group_size of them share one of the num_kv_heads
    q              [num_tokens, num_heads, head_dim]
    k, v           [num_tokens, num_kv_heads, head_dim]
    kv_cache       [num_blocks, 2, num_kv_heads, block_size, head_dim], one per layer: a
                   block is one piece of memory, first all its K, then all its V, head
                   by head
    block_tables   [num_seqs, max_blocks]: physical block of a logical block; entries
                   after the last one are stale, but valid block ids
    slots          [num_tokens], the slot mapping: where a token's K and V are stored,
                   physical block * block_size + offset; -1: nowhere (padding)

Where the work is divided:

    tile           some neighbouring queries of one sequence, computed together
    part           some of a sequence's keys: attention to each part is computed by
                   itself, then the parts are merged
    program        one run of a kernel's code, for one KV head of one tile or part
    item           what a program of Triton's is told to compute
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

# Compute capability. GPUs before Ampere have neither the shared memory nor the
# asynchronous loads on which the tiles of `kernels.py` rest.
KERNELS_NEED = (8, 0)
MASKED_QUERIES = 512  # a longer chunk is cut, so that masks stay small
# On a CPU, in keys of one KV head:
MIN_PART = 256  # merging a shorter part costs more than it gains
MIN_CALL = 2048  # a shorter call of the kernel is not worth waking another thread


@dataclass
class AttentionMetadata:
    """Where this step's tokens stand and where their K and V go, the same in all
    layers.
    """

    positions: Tensor  # [num_tokens]: of a token in its sequence
    slots: Tensor  # [num_tokens]: the slot mapping


@dataclass
class Chunk:
    """Some queries of one sequence, and the blocks that hold their keys."""

    tokens: slice  # of the flat batch
    block_ids: Tensor  # [num_blocks]
    num_keys: int
    mask: Tensor | None  # [num_queries, num_keys]; None: plain causal, from 0


@dataclass
class TorchMetadata(AttentionMetadata):
    chunks: list[Chunk]


class TorchAttention:
    """The reference, on any device: gather K and V, then torch's own attention."""

    min_queries = 1  # sequences with fewer are left out of `chunks`

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int,
                 block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_kv_heads = num_kv_heads
        self.group_size = num_heads // num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        # How arrays get there. The model runner collects those of a step instead.
        self.to_device: Any = partial(to_device, device=device)

    def prepare(self, block_tables: Ints, starts: Ints, counts: Ints) -> Any:
        """Plan a step: sequence i has counts[i] new tokens, from starts[i] on."""
        positions, slots = self.place_tokens(block_tables, starts, counts)
        chunks = []
        first_tokens = np.cumsum(counts) - counts
        for seq in np.flatnonzero(counts >= self.min_queries).tolist():
            start, count = int(starts[seq]), int(counts[seq])
            most = MASKED_QUERIES if start else count
            for first in range(0, count, most):
                tokens = first_tokens[seq] + np.arange(first, min(first + most, count))
                num_keys = start + first + len(tokens)
                num_blocks = ceil_div(num_keys, self.block_size)
                block_ids = self.to_device(block_tables[seq, :num_blocks])
                mask = None
                if start:
                    last_keys = positions[tokens]
                    seen = np.arange(num_keys) <= last_keys[:, None]
                    mask = self.to_device(seen)
                token_slice = slice(tokens[0], tokens[-1] + 1)
                chunks.append(Chunk(token_slice, block_ids, num_keys, mask))

        on_device = self.to_device(positions), self.to_device(slots)
        return TorchMetadata(*on_device, chunks)

    def place_tokens(
        self, block_tables: Ints, starts: Ints, counts: Ints
    ) -> tuple[Ints, Ints]:
        """The positions and slots of all tokens.

        starts=[5, 0] and counts=[2, 3] give positions=[5, 6, 0, 1, 2].
        """
        seqs = np.repeat(np.arange(len(counts)), counts)
        first_tokens = np.cumsum(counts) - counts
        positions = np.arange(len(seqs)) - first_tokens[seqs] + starts[seqs]
        indices, offsets = np.divmod(positions, self.block_size)
        slots = block_tables[seqs, indices] * self.block_size + offsets
        return positions, np.where(positions < 0, -1, slots)

    def rotate_and_store(self, qkv: Tensor, weights: list[Tensor], eps: float,
                         rotation: tuple[Tensor, Tensor], kv_cache: Tensor,
                         metadata: Any) -> Tensor:
        """Normalise and rotate Q and K, and store K and V; returns Q.

        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; weights: of the norms
        of Q's heads and K's, [head_dim] each, or none; rotation: see `norm_rotate`.
        """
        num_heads = qkv.shape[1] - 2 * self.num_kv_heads
        qk = qkv[:, : -self.num_kv_heads]
        if weights:
            weights = [weights[0].expand(num_heads, -1),
                       weights[1].expand(self.num_kv_heads, -1)]
        qk = norm_rotate(qk, weights, eps, *rotation)

        kv = torch.stack((qk[:, num_heads:], qkv[:, -self.num_kv_heads :]), 1)
        block_ids = metadata.slots // self.block_size
        kv_cache[block_ids, :, :, metadata.slots % self.block_size] = kv
        return qk[:, :num_heads]

    def copy_blocks(self, source: Tensor, target: Tensor, moves: Ints) -> None:
        """Copy blocks of all layers; source, target: [num_layers, num_blocks, ...];
        moves: [num_moves, 2], blocks of the source and of the target.
        """
        sources = to_device(moves[:, 0].copy(), source.device)
        targets = to_device(moves[:, 1].copy(), target.device)
        for from_layer, to_layer in zip(source, target, strict=True):
            # All are read before any is written, so their order does not matter.
            blocks = from_layer.index_select(0, sources).to(target.device)
            to_layer.index_copy_(0, targets, blocks)

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Any) -> Tensor:
        """[num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]"""
        out = q.new_empty(q.shape)
        for chunk in metadata.chunks:
            out[chunk.tokens] = self.attend_chunk(q[chunk.tokens], kv_cache, chunk)
        return out.flatten(1)

    def attend_chunk(self, q: Tensor, kv_cache: Tensor, chunk: Chunk) -> Tensor:
        """q and the result: [num_queries, num_heads, head_dim]"""
        # [2, num_kv_heads, num_blocks, block_size, head_dim]
        blocks = kv_cache.permute(1, 2, 0, 3, 4).index_select(2, chunk.block_ids)
        # After the last key its block holds old values: a NaN there would spread.
        k, v = blocks.flatten(2, 3)[:, :, : chunk.num_keys]

        # [num_kv_heads, group_size, num_queries or num_keys, head_dim]; K is not copied
        q = q.view(len(q), self.num_kv_heads, self.group_size, -1).permute(1, 2, 0, 3)
        k = k.unsqueeze(1).expand(-1, self.group_size, -1, -1)
        v = v.unsqueeze(1).expand(-1, self.group_size, -1, -1)
        causal = chunk.mask is None
        result = F.scaled_dot_product_attention(q, k, v, chunk.mask, is_causal=causal)
        return result.permute(2, 0, 1, 3).flatten(1, 2)


def norm_rotate(x: Tensor, weights: list[Tensor], eps: float, cos: Tensor,
                sin: Tensor) -> Tensor:
    """Normalise the heads of Q and K, if there are weights for it, then rotate them
    (RoFormer).

    x: [num_tokens, num_heads + num_kv_heads, head_dim]; weights: those of Q's heads and
    K's; cos, sin: [num_tokens, 1, head_dim], of angles that grow with the position. The
    halves of a head turn like (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).
    """
    if weights:
        x = F.rms_norm(x, x.shape[-1:], None, eps) * torch.cat(weights)
    x1, x2 = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((-x2, x1), -1), sin)


@dataclass
class NumbaMetadata(TorchMetadata):
    decodes: Tensor  # [num_decodes]: their tokens in the flat batch
    block_tables: Ints  # [num_decodes, max_blocks]
    ends: Ints  # [num_decodes]: number of keys
    num_parts: int
    calls: list[tuple[int, int]]  # first and last program (not included) of each call


class NumbaAttention(TorchAttention):
    """On a CPU: decodes by the kernel of `cpu_kernels.py`, prompts' chunks by torch.

    A decode uses every key once per head, so a copy would cost more than the attention.
    """

    min_queries = 2

    def __init__(self, *shape: Any) -> None:
        super().__init__(*shape)
        if find_spec("numba") is None or self.device.type != "cpu":
            raise ValueError(
                "attention_backend 'numba' needs numba (`pip install numba`) and "
                f"device 'cpu', got {self.device.type!r}: use 'torch'")
        from nanopaged import cpu_kernels

        self.kernels: Any = cpu_kernels
        # NumPy has no bfloat16, and Numba no float16: the kernel gets their bits.
        bits = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
        self.view_dtype = bits.get(self.dtype, self.dtype)
        self.num_threads = torch.get_num_threads()

    def compile(self) -> None:
        """Compile the kernel for this dtype; the next process finds it on the disk."""
        shape = 1, 2, self.num_kv_heads, self.block_size, self.head_dim
        kv_cache = torch.zeros(shape, dtype=self.dtype)
        q = torch.zeros(1, self.num_kv_heads * self.group_size, self.head_dim)
        zero = np.zeros(1, np.int64)
        metadata = self.prepare(zero[None], starts=zero, counts=zero + 1)
        self.attend(q.to(self.dtype), kv_cache, metadata)

    def prepare(self, block_tables: Ints, starts: Ints, counts: Ints) -> NumbaMetadata:
        chunks: TorchMetadata = super().prepare(block_tables, starts, counts)
        seqs = np.flatnonzero(counts == 1)
        ends = starts[seqs] + 1

        # The keys of all sequences are divided alike: into as many parts as the longest
        # sequence needs, so that no part is more than a quarter of a thread's share of
        # all keys.
        num_keys = int(ends.sum()) * self.num_kv_heads
        longest_part = max(num_keys // self.num_threads // 4, MIN_PART)
        num_parts = ceil_div(int(ends.max(initial=0)), longest_part)

        # Programs are independent. Each thread takes the next few until none are left,
        # so that no thread waits for one whose core is busy with something else.
        num_programs = num_parts * len(seqs) * self.num_kv_heads
        num_calls = min(4 * self.num_threads, ceil_div(num_keys, MIN_CALL))
        size = ceil_div(num_programs, num_calls) if num_calls else 1
        calls = [(first, min(first + size, num_programs))
                 for first in range(0, num_programs, size)]

        decodes = torch.from_numpy(np.cumsum(counts)[seqs] - 1)
        tables = block_tables[seqs]
        return NumbaMetadata(**vars(chunks), decodes=decodes, block_tables=tables,
                             ends=ends, num_parts=num_parts, calls=calls)

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: NumbaMetadata) -> Tensor:
        out = super().attend(q, kv_cache, metadata)
        if len(metadata.ends):
            decoded = self.decode(q[metadata.decodes], kv_cache, metadata)
            out[metadata.decodes] = decoded.flatten(1)
        return out

    def decode(self, q: Tensor, kv_cache: Tensor, metadata: NumbaMetadata) -> Tensor:
        """q and the result: [num_decodes, num_heads, head_dim]"""
        parts = torch.empty(metadata.num_parts, *q.shape)
        lse = torch.empty(parts.shape[:3])
        tensors = q.float(), kv_cache.view(self.view_dtype)
        tables = metadata.block_tables, metadata.ends
        arrays = *(x.numpy() for x in tensors), *tables, parts.numpy(), lse.numpy()

        calls = iter(metadata.calls)

        def work() -> None:
            for first, last in calls:
                self.kernels.paged_attention(first, last, *arrays)

        if len(metadata.calls) > 1:
            self.kernels.run_on_threads(work, self.num_threads)
        else:
            work()

        # Log-sum-exp merge: the mean of the parts, weighted by their sums.
        weights = torch.softmax(lse, 0).unsqueeze(-1)
        return (parts * weights).sum(0).to(q.dtype)


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

        before they are filled up, see below.

        Items with the most keys come first, so that a long one does not start when all
        others end. All parts but the last of a tile are as long as the limit, roughly,
        so dividing adds at most 2 * num_places items. Decodes are filled up to that
        with zeros: then shapes depend on the number of sequences alone, as graphs need
        it.
        """
        # A tile begins at every size-th query of a sequence.
        seqs = np.repeat(np.arange(len(counts)), counts)
        first_tokens = np.flatnonzero((positions - starts[seqs]) % size == 0)
        num_queries = np.diff(first_tokens, append=len(seqs))
        first_positions = positions[first_tokens]
        ends = first_positions + num_queries
        tables = seqs[first_tokens] * table_size
        tiles = np.stack((tables, first_tokens, first_positions, num_queries), 1)

        # The keys of a tile are divided if they are more than the limit.
        most_added = 2 * num_places
        limit = max(ceil_div(ends.sum(), most_added), self.key_tile)
        num_parts = np.maximum(ceil_div(ends, limit), 1)
        part_sizes = ceil_div(ends, num_parts)

        # An item for every part. Those of divided tiles get rows for their results.
        tile = np.repeat(np.arange(len(tiles)), num_parts)  # of each item
        first_items = np.cumsum(num_parts) - num_parts  # of each tile
        first_keys = (np.arange(len(tile)) - first_items[tile]) * part_sizes[tile]
        end_keys = np.minimum(first_keys + part_sizes[tile], ends[tile])
        num_rows = np.where(num_parts > 1, num_queries, 0)[tile]
        rows = np.cumsum(num_rows) - num_rows
        items = np.column_stack(
            (tiles[tile], first_keys, end_keys, np.where(num_rows > 0, rows, -1)))
        num_keys = end_keys - first_keys
        items = items[np.argsort(-num_keys, kind="stable")]

        # The tokens of divided tiles are merged: a row of each part, starting with the
        # first.
        tile_of_token = np.repeat(np.arange(len(tiles)), num_queries)
        tokens = np.flatnonzero(num_parts[tile_of_token] > 1)
        tile = tile_of_token[tokens]  # of each merge
        first_rows = rows[first_items[tile]] + tokens - first_tokens[tile]
        merges = np.column_stack(
            (tokens, first_rows, num_parts[tile], num_queries[tile]))
        if counts.max() > 1:
            return items, merges, int(num_rows.sum())

        # A divided tile adds at least one item, so there are at most as many of them as
        # items are added, and they have at most twice as many parts, of one row each.
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
        # Within a pool, moves may depend on their order: in [(1, 2), (3, 1)] block 1 is
        # copied, given up, and taken for another copy. Then they are made one by one.
        sources, targets = moves.T
        in_turn = source is target and np.isin(sources, targets).any()
        count = 1 if in_turn else len(moves)
        on_device = to_device(moves, self.device)
        for first in range(0, len(moves), count):
            some = on_device[first : first + count]
            self.kernels.copy_blocks[len(some), len(source)](
                source, target, some, source.shape[1], target.shape[1],
                SIZE=source[0, 0].numel(), STEP=2048)

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
    lengths: Tensor  # [num_seqs]: number of keys
    first_queries: Tensor  # [num_seqs + 1]: where sequences begin in the flat batch
    first_keys: Tensor  # [num_seqs + 1]
    most_queries: int
    most_keys: int


class FlashAttention(TritonAttention):
    """Computes steps with prompts by FlashAttention-2 (Dao 2023), flash-attn's or
    torch's.

    It reads the pool in place, too, if blocks are large enough for it. Steps of decodes
    alone, which CUDA graphs record, are left to Triton, and so is float32.
    """

    def __init__(self, *shape: Any) -> None:
        super().__init__(*shape)
        if self.block_size % 256:
            raise ValueError(
                "block_size must be a multiple of 256 for attention_backend='flash', "
                f"got {self.block_size}: use 256, or attention_backend='triton'")
        try:
            from flash_attn import flash_attn_varlen_func

            self.from_torch = False
            self.flash: Any = partial(flash_attn_varlen_func, causal=True)
        except ImportError:
            from torch.nn.attention.varlen import varlen_attn

            self.from_torch = True
            self.flash = partial(varlen_attn, window_size=(-1, 0), enable_gqa=True)

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
            lengths=self.to_device(ends.astype(np.int32)),
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
        options = {"block_table": metadata.block_tables}
        if self.from_torch:
            options["seqused_k"] = metadata.lengths
        out = self.flash(
            *(q, k, v, metadata.first_queries, metadata.first_keys),
            *(metadata.most_queries, metadata.most_keys),
            **options,
        )
        return torch.flatten(out, 1)


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    # To a GPU from pinned memory, or else the copy may wait for it.
    return tensor.pin_memory().to(device, non_blocking=True)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def ceil_div(numbers: Any, divisors: Any) -> Any:
    return -(-numbers // divisors)


def filled_up(rows: Ints, count: int) -> Ints:
    """`rows`, followed by rows of zeros."""
    return np.concatenate((rows, np.zeros((count - len(rows), rows.shape[1]), int)))


BACKENDS: dict[str, Any] = {
    "torch": TorchAttention,
    "numba": NumbaAttention,
    "triton": TritonAttention,
    "flash": FlashAttention,
}
