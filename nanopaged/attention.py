"""Attention over the paged cache: what a step must know about it, and the backends.

K and V of this step's tokens are stored first, then attention reads everything through
the block tables. So a prompt's first chunk, its later chunks, a cached prefix and a
decode are one and the same case: some queries at known positions, and the keys from
position 0 to theirs.

Shapes, here and everywhere:

    num_tokens     tokens of the flat batch, one sequence after the other. (A recorded
                   graph is padded with sequences of one token, which have a block of
                   their own.)
    num_seqs       entries of the batch: here, each is called a sequence
    num_heads      query heads; group_size of them share one of the num_kv_heads
    q              [num_tokens, num_heads, head_dim]
    k, v           [num_tokens, num_kv_heads, head_dim] each
    kv_cache       [num_blocks, 2, num_kv_heads, block_size, head_dim], one per layer: a
                   block is one piece of memory, first all its K, then all its V, head
                   by head
    block_tables   [num_seqs, max_blocks]: physical block of a logical block; after the
                   last one comes the block that is for padding
    slots          [num_tokens], the slot mapping: where a token's K and V are stored,
                   physical block * block_size + offset

In the story of `sequence.py`, while A decodes t0 and B computes the last two tokens of
its prompt:

    counts = [1, 2]   ends = [7, 6]   block_tables = [[0, 1], [0, 2]]
    positions = [6, 4, 5]   slots = [6, 8, 9]
"""

import sys
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from nanopaged.config import check

Ints: TypeAlias = NDArray[np.integer[Any]]


@dataclass
class Metadata:
    """What attention must know about a step, the same in all layers."""

    positions: Tensor  # [num_tokens]: of a token in its sequence
    slots: Tensor  # [num_tokens]
    block_tables: Tensor  # [num_seqs, max_blocks]
    counts: Ints  # [num_seqs]: how many tokens of each sequence are computed
    ends: Ints  # [num_seqs]: how many keys it has then
    plan: list[Tensor]  # what the backend's own `plan` has made of counts and ends


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """Number the things of several owners, each from 0: counts [2, 3] -> owners
    [0, 0, 1, 1, 1], numbers [0, 1, 0, 1, 2].
    """
    owners = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return owners, np.arange(len(owners)) - starts[owners]


def place_tokens(block_tables: Ints, counts: Ints, ends: Ints,
                 block_size: int) -> tuple[Ints, Ints]:
    """The positions and slots of all tokens, as in the story above."""
    seqs, numbers = spread(counts)
    positions = (ends - counts)[seqs] + numbers
    block_ids = block_tables[seqs, positions // block_size]
    return positions, block_ids * block_size + positions % block_size


class TorchAttention:
    """The reference, on any device: gather K and V, then torch's own attention."""

    min_queries = 1  # `attend` leaves out sequences with fewer

    def __init__(self, model_config: Any, block_size: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.num_kv_heads = model_config.num_key_value_heads
        self.group_size = model_config.num_attention_heads // self.num_kv_heads
        self.head_dim = model_config.head_dim
        self.scale = self.head_dim**-0.5
        self.block_size = block_size
        self.dtype = dtype
        self.device = device

    def plan(self, counts: Ints, ends: Ints, table_size: int) -> list[Ints]:
        """What else a backend must know on the device: here nothing."""
        return []

    def store(self, k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """Put K and V into their slots."""
        kv, size = torch.stack((k, v), 1), self.block_size
        kv_cache[slots // size, :, :, slots % size] = kv

    def copy_blocks(self, source: Tensor, target: Tensor, moves: Ints) -> None:
        """Copy blocks of all layers; source, target: [num_layers, num_blocks, ...];
        moves: [num_moves, 2], blocks of the source and of the target.
        """
        target[:, moves[:, 1]] = source[:, moves[:, 0]].to(target.device)

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Metadata) -> Tensor:
        """[num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]"""
        out = q.new_empty(q.shape)
        counts = metadata.counts
        for seq in np.flatnonzero(counts >= self.min_queries):
            num_keys = int(metadata.ends[seq])
            table = metadata.block_tables[seq, : -(-num_keys // self.block_size)]
            # [2, num_kv_heads, num_blocks, block_size, head_dim]
            blocks = kv_cache.permute(1, 2, 0, 3, 4).index_select(2, table)
            # [1, num_kv_heads, num_keys, head_dim] each. After the last key there are
            # old values: a NaN there would spread.
            k, v = blocks.flatten(2, 3)[:, None, :, :num_keys]
            # [1, num_heads, num_queries, head_dim]; the last query sees all keys
            tokens = slice(counts[:seq].sum(), counts[: seq + 1].sum())
            mask = causal_lower_right(int(counts[seq]), num_keys)
            attended = F.scaled_dot_product_attention(
                q[None, tokens].transpose(1, 2), k, v, mask, scale=self.scale,
                enable_gqa=True)
            out[tokens] = attended[0].transpose(0, 1)
        return out.flatten(1)


class NumbaAttention(TorchAttention):
    """On a CPU: decodes by the kernel of `cpu_kernels.py`, prompts' chunks by torch.

    A decode uses every key once per head, so a copy would cost more than the attention.
    """

    min_queries = 2

    def __init__(self, *shape: Any) -> None:
        super().__init__(*shape)
        from nanopaged import cpu_kernels

        fits = self.device.type == "cpu" and self.dtype != torch.float16
        check(fits, "attention_backend", "'auto' for this device and dtype", "numba")
        self.kernels: Any = cpu_kernels
        self.kernels.keep_freed_memory()

    def plan(self, counts: Ints, ends: Ints, table_size: int) -> list[Ints]:
        """The sequences that decode, and their tokens in the flat batch."""
        seqs = np.flatnonzero(counts == 1)
        return [seqs, np.cumsum(counts)[seqs] - 1]

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Metadata) -> Tensor:
        out = super().attend(q, kv_cache, metadata)
        seqs, tokens = metadata.plan
        queries = self.scale * q[tokens].float().unflatten(1, (self.num_kv_heads, -1))
        if self.dtype == torch.bfloat16:  # NumPy does not know it, so it gets the bits
            kv_cache = kv_cache.view(torch.uint16)
        attended = self.kernels.paged_attention(
            queries.numpy(), kv_cache.numpy(), metadata.block_tables.numpy(),
            seqs.numpy(), metadata.ends)
        out[tokens] = torch.from_numpy(attended).flatten(1).to(q.dtype)
        return out


class TritonAttention(TorchAttention):
    """On a GPU: everything by the kernels of `kernels.py`.

    With other contents in the metadata's tensors, the same calls compute other decodes
    of as many sequences: CUDA graphs rest on this.
    """

    def __init__(self, *shape: Any) -> None:
        super().__init__(*shape)
        from triton import knobs, next_power_of_2

        from nanopaged import kernels

        self.kernels = kernels
        can_run = knobs.runtime.interpret  # as in tests
        num_processors = 4
        if self.device.type == "cuda":
            gpu = torch.cuda.get_device_properties(self.device)
            can_run, num_processors = gpu.major >= 8, gpu.multi_processor_count
        check(can_run, "attention_backend", "'torch' (on an older GPU with "
              "dtype='float16') below compute capability 8.0", "triton")
        # tl.dot takes sizes that are powers of two, 16 or more.
        self.dim = max(16, next_power_of_2(self.head_dim))
        row_bytes = self.dim * self.dtype.itemsize
        self.keys = max(16, min(128, kernels.TILE_BYTES // row_bytes))
        # Rows of a tile: large ones are for chunks. They fill all of a multiprocessor's
        # registers, where three small ones run at the same time.
        self.few_rows: int = next_power_of_2(max(16, self.group_size))
        self.many_rows = max(self.few_rows, 128 if row_bytes <= 256 else 32)
        # How many programs of a KV head run at the same time if tiles are small.
        self.num_places = -(-3 * num_processors // self.num_kv_heads)

    def pick_rows(self, counts: Ints) -> int:
        """Large tiles would be mostly empty where sequences have few queries."""
        is_large = counts.mean() * self.group_size > self.few_rows
        return self.many_rows if is_large else self.few_rows

    def plan(self, counts: Ints, ends: Ints, table_size: int) -> list[Ints]:
        """The work of a step, cut up for the programs of the kernel.

        A tile is some neighbouring queries of one sequence, which are computed
        together. The keys of a long tile are divided into parts: else a step would take
        as long as its longest sequence. A part has at most half of what each program
        would read if all read equally much, rounded up to whole rounds of the kernel's
        loop, of `self.keys` keys each.

        Returns items of work, [num_items, 6], with these columns: where the block table
        begins among all tables, one after another; the tile's first token, the position
        of that, and the position after the last one, which is how many keys the tile
        has; the first key of the part, and the end of its keys.

        An example: if 2 programs per KV head run at the same time, and read 64 keys in
        a round, two decodes have 16 and 2 rounds to go, 18 in all, or 9 for each
        program. So a part has at most 5, and the first decode has four parts
        (block_size is 16, so table_size is 63):

            [[0, 0, 999, 1000,   0,  320],
             [0, 0, 999, 1000, 320,  640],
             [0, 0, 999, 1000, 640,  960],
             [0, 0, 999, 1000, 960, 1000],
             [63, 1, 99,  100,   0,  100]]

        Empty items follow, so that shapes depend on the counts alone, as graphs need
        it.
        """
        size = self.pick_rows(counts) // self.group_size
        seqs, numbers = spread(-(-counts // size))
        first = numbers * size  # query of each tile
        tokens = (np.cumsum(counts) - counts)[seqs] + first
        positions = (ends - counts)[seqs] + first
        num_keys = np.minimum(positions + size, ends[seqs])
        tiles = np.stack((seqs * table_size, tokens, positions, num_keys), 1)
        # Long ones first: one that starts last would keep all others waiting.
        tiles = tiles[np.argsort(-num_keys, kind="stable")]

        num_keys = tiles[:, 3]
        rounds = -(-num_keys // self.keys)
        part_keys = -(-rounds.sum() // (2 * self.num_places)) * self.keys
        tile, number = spread(-(-num_keys // part_keys))
        first_keys = number * part_keys
        end_keys = np.minimum(first_keys + part_keys, num_keys[tile])
        items = np.zeros((len(tiles) + 2 * self.num_places, 6), np.int64)
        items[: len(tile)] = np.column_stack((tiles[tile], first_keys, end_keys))
        return [items]

    def store(self, k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        self.kernels.store[(len(k),)](
            k, v, slots, kv_cache, k.stride(0), v.stride(0), k[0].numel(),
            self.head_dim, self.block_size)

    def copy_blocks(self, source: Tensor, target: Tensor, moves: Ints) -> None:
        # All at once: within a pool nothing is copied from a block that is written, as
        # somebody still holds every block that is copied.
        size, step = source[0, 0].numel(), 2048
        self.kernels.copy_blocks[len(moves), len(source), -(-size // step)](
            source, target, to_device(moves, self.device), source.shape[1],
            target.shape[1], size, step)

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Metadata) -> Tensor:
        [items] = metadata.plan
        rows = self.pick_rows(metadata.counts)
        grid = len(items), self.num_kv_heads
        out = q.new_empty(q.shape)
        parts = torch.empty(*grid, rows, self.head_dim, device=q.device)
        lse = torch.empty(*grid, rows, device=q.device)
        sizes = self.num_kv_heads, self.group_size, self.head_dim, rows, self.dim
        num_warps = 8 if rows > 64 else 4
        self.kernels.paged_attention[grid](
            q, kv_cache, metadata.block_tables, items, out, parts, lse, self.scale,
            q.stride(0), *sizes, self.block_size, self.keys, num_warps=num_warps)
        self.kernels.merge_parts[grid](
            parts, lse, items, out, *sizes, num_warps=num_warps)
        return out.flatten(1)


class FlashAttention(TritonAttention):
    """Computes steps with prompts by FlashAttention-2 (Dao 2023), of flash-attn.

    It reads the pool in place, too. It needs a block_size that is a multiple of 256,
    and a dtype of 16 bits. Steps of decodes alone, which CUDA graphs record, are left
    to Triton.
    """

    def __init__(self, *shape: Any) -> None:
        super().__init__(*shape)
        from flash_attn import flash_attn_varlen_func

        self.flash: Any = flash_attn_varlen_func

    def plan(self, counts: Ints, ends: Ints, table_size: int) -> list[Ints]:
        if counts.max() == 1:
            return super().plan(counts, ends, table_size)
        # Where sequences begin, and where their keys would if they were in one piece.
        return [np.cumsum([0, *counts]), np.cumsum([0, *ends])]

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Metadata) -> Tensor:
        if metadata.counts.max() == 1:
            return super().attend(q, kv_cache, metadata)
        starts = [bounds.int() for bounds in metadata.plan]
        # Views, not copies: [num_blocks, block_size, num_kv_heads, head_dim]
        k, v = kv_cache.transpose(2, 3).unbind(1)
        longest = int(metadata.counts.max()), int(metadata.ends.max())
        out = self.flash(q, k, v, *starts, *longest, softmax_scale=self.scale,
                         causal=True, block_table=metadata.block_tables.int())
        return torch.flatten(out, 1)


BACKENDS = {"torch": TorchAttention, "numba": NumbaAttention,
            "triton": TritonAttention, "flash": FlashAttention}


def make_backend(name: str, *shape: Any) -> TorchAttention:
    """An attention backend; ValueError if it cannot run here."""
    *_, dtype, device = shape
    if name == "auto":
        can_use_numba = sys.platform == "linux" and dtype != torch.float16
        on_cpu = "numba" if can_use_numba else "torch"
        name = "triton" if device.type == "cuda" else on_cpu
    try:
        return BACKENDS[name](*shape)  # type: ignore[no-any-return]
    except ImportError as error:
        raise ValueError("attention_backend must be 'torch', or one whose package is "
                         f"installed, got {name!r}: {error}") from error


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """To a GPU from pinned memory: from other memory, the host waits for the copy."""
    tensor = torch.from_numpy(values)
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)
