"""Attention over the paged cache: what a step needs to know about it, and the backends.

In every layer the K and V of the step's tokens are stored first. Then attention reads
all K and V through the block tables. So there is only one case: some queries at known
positions, each of which sees the keys from position 0 to its own. This covers the first
chunk of a prompt, later chunks, the rest after a cached prefix, and decodes.

Shapes, here and everywhere:

    num_tokens     tokens of the flat batch, one sequence after the other
    num_seqs       sequences (entries) in the batch. A CUDA graph may need padding:
                   more sequences, of one token each
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
"""

import os
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
    """A step as the model and its attention see it, the same in all layers. The first
    two fields are on the host, and the tensors are on the device.
    """

    counts: Ints  # [num_seqs]: how many tokens of each sequence this step computes
    ends: Ints  # [num_seqs]: how many keys each sequence then has
    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]: where each token is in its sequence
    slots: Tensor  # [num_tokens]
    plan: Tensor  # integers: what this backend's `plan` returned
    block_tables: Tensor  # [num_table_blocks]
    last_indices: Tensor  # [num_samples]: the token that each sample follows


def divide_up(number: Any, divisor: Any) -> Any:
    """Divide and round up: 10 tokens need divide_up(10, 4) = 3 blocks of 4."""
    return -(-number // divisor)


def starts_of(counts: Ints) -> Ints:
    """Where each group starts, if groups of these sizes lie one after another: [2, 3]
    -> [0, 2].
    """
    return np.cumsum(counts) - counts


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """The group that each element belongs to, and the element's number within it, for
    groups of these sizes: [2, 3] -> groups [0, 0, 1, 1, 1], numbers [0, 1, 0, 1, 2].
    """
    groups = np.repeat(np.arange(len(counts)), counts)
    return groups, np.arange(len(groups)) - starts_of(counts)[groups]


def locate(counts: Ints, ends: Ints, block_size: int) -> tuple[Ints, Ints, Ints, Ints]:
    """For each token of a step: its sequence, its number among the tokens that the step
    computes of it, its position, and where the block table of its sequence starts.
    """
    seqs, numbers = spread(counts)
    table_starts = starts_of(divide_up(ends, block_size))
    return seqs, numbers, (ends - counts)[seqs] + numbers, table_starts[seqs]


def place_tokens(block_tables: Ints, counts: Ints, ends: Ints,
                 block_size: int) -> tuple[Ints, Ints]:
    """The positions and slots of all tokens, as in the story above."""
    _, _, positions, table_starts = locate(counts, ends, block_size)
    block_ids = block_tables[table_starts + positions // block_size]
    return positions, block_ids * block_size + positions % block_size


class TorchAttention:
    """The reference, on any device: gather K and V, then call torch's own attention."""

    can_be_recorded = False  # in CUDA graphs
    min_queries = 1  # `attend` skips sequences with fewer; a subclass computes those

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
        kv_cache[slots // size, :, :, slots % size] = kv

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Metadata) -> Tensor:
        """[num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]"""
        out = q.new_empty(q.shape)
        counts, ends = metadata.counts, metadata.ends
        for seq in np.flatnonzero(counts >= self.min_queries):
            count, num_keys = int(counts[seq]), int(ends[seq])
            tokens = slice(counts[:seq].sum(), counts[: seq + 1].sum())
            start = divide_up(ends[:seq], self.block_size).sum()
            num_blocks = divide_up(num_keys, self.block_size)
            table = metadata.block_tables[start : start + num_blocks]
            # [2, num_kv_heads, num_blocks, block_size, head_dim]
            blocks = kv_cache.permute(1, 2, 0, 3, 4).index_select(2, table)
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


class NumbaAttention(TorchAttention):
    """On a CPU: `cpu_kernels.py` computes decodes and short chunks, and torch the rest.

    A decode uses every key for only one query, so gathering K and V first, as torch
    needs them, would take longer than the attention. For a long chunk it pays off.
    """

    min_queries = 9  # measured: with up to 8 queries, the kernel is usually faster

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        from nanopaged import cpu_kernels

        self.kernels: Any = cpu_kernels

    def plan(self, counts: Ints, ends: Ints) -> Ints:
        """[3, num_queries], the queries for the kernel: which token each of them is,
        where its block table starts, and how many keys it sees.
        """
        seqs, _, positions, table_starts = locate(counts, ends, self.block_size)
        plan = np.stack((np.arange(len(seqs)), table_starts, positions + 1))
        return plan[:, counts[seqs] < self.min_queries]

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Metadata) -> Tensor:
        tokens, table_starts, num_keys = metadata.plan
        num_reads = self.num_kv_heads * int(num_keys.sum())
        is_all = len(tokens) == len(q)  # then no query has to be copied
        queries = (q if is_all else q[tokens]).float()
        # [num_queries, num_kv_heads, group_size, head_dim]
        queries = self.scale * queries.unflatten(1, (self.num_kv_heads, -1))
        # NumPy has no bfloat16, so it gets the bits.
        bits = kv_cache.view(torch.uint16) if q.dtype == torch.bfloat16 else kv_cache
        attended = torch.from_numpy(self.kernels.paged_attention(
            num_reads, queries.numpy(), bits.numpy(), metadata.block_tables.numpy(),
            table_starts.numpy(), num_keys.numpy()))
        attended = attended.flatten(1).to(q.dtype)
        if is_all:
            return attended
        out = super().attend(q, kv_cache, metadata)  # only the long chunks
        out[tokens] = attended
        return out


class TritonAttention(TorchAttention):
    """On a GPU: the kernels in `kernels.py` do everything. Terms used below:

        program  one run of a kernel's code. A GPU runs hundreds of them at once
        tile     a few consecutive queries of one sequence
        row      of a tile: one of its queries, for one query head
        part     a range of a tile's keys. If a tile has many keys, several programs
                 share them
        item     a tile and one of its parts: what one program computes for one KV head
        round    the keys that a program loads at a time

    What is launched, and with which sizes, depends on `counts` alone. So a CUDA graph
    of decodes can be replayed with new contents in the same tensors.
    """

    can_be_recorded = True

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        from triton import next_power_of_2

        from nanopaged import kernels

        self.kernels = kernels
        num_processors = 4  # for the interpreter
        if self.device.type == "cuda":
            gpu = torch.cuda.get_device_properties(self.device)
            num_processors = gpu.multi_processor_count
        # tl.dot takes sizes that are powers of two, 16 or more.
        self.dim = max(16, next_power_of_2(self.head_dim))
        # The speed of decoding depends on how much of K and V is in flight, on its way
        # from memory. An H200 can deliver 4.8 TB/s, and a byte takes about 1 us. So to
        # keep its memory busy, 4.8 MB must be in flight: 36 KB for each of its 132
        # multiprocessors. A program computes one round while the next one is in flight:
        # 16 KB of K and as much of V (64 keys of head_dim 128 in bfloat16). Three such
        # programs fit into a multiprocessor at once, and have 96 KB in flight together.
        # That is more than enough. (tl.dot needs at least 16 keys, and the scores of
        # more than 128 would need too many registers.)
        key_bytes = self.dim * self.dtype.itemsize
        self.keys_per_round = max(16, min(128, (16 << 10) // key_bytes))
        # Twice as many as can run at once for one KV head. (An item needs a program for
        # each KV head.)
        self.num_parts = 2 * divide_up(3 * num_processors, self.num_kv_heads)
        # Large tiles are for chunks. One fills all registers of a multiprocessor.
        can_be_large = self.dtype.itemsize == 2 and self.dim <= 128
        self.few_rows: int = next_power_of_2(max(16, self.group_size))
        self.many_rows = max(self.few_rows, 128 if can_be_large else 32)

    def rows_per_tile(self, counts: Ints) -> int:
        """How many rows each tile of a step has. Large tiles would be mostly empty if
        the sequences have few queries on average.
        """
        is_large = counts.mean() * self.group_size > self.few_rows
        return self.many_rows if is_large else self.few_rows

    def plan(self, counts: Ints, ends: Ints) -> Ints:
        """Cut a step into items, [num_items, 6].

        Without parts, a step would take as long as its longest sequence. So the keys of
        a long tile are cut into parts. Each of them has a program of its own (for each
        KV head), and `merge_parts` joins their results.

        How many keys does a part have? The same number in the whole step, except that
        the last part of a tile may be smaller. Add up the keys of all tiles, and divide
        them among the programs that run at once: each would get an equal share. A part
        is half of that, rounded up to whole rounds. So there are about twice as many
        programs, and when one ends early, another one starts.

        For example, let 2 programs (of a KV head) run at once, and let a round have 64
        keys. Two decodes have 1000 and 100 keys. An equal share is 550 keys, and half
        of it is 275. Rounded up to 5 rounds, a part has 320 keys. So the first decode
        has four parts, and the second has one:

            table  token  position  num_keys  first_key   end
                0      0       999      1000          0   320
                0      0       999      1000        320   640
                0      0       999      1000        640   960
                0      0       999      1000        960  1000
               63      1        99       100          0   100

        table: where the block table of the tile's sequence starts. (The first one has
        63 blocks of 16 tokens.) token, position: the tile's first token, and where it
        is in its sequence. num_keys: how many keys the tile sees. first_key, end: the
        part. Items without keys follow, so that the shape depends on counts alone.
        """
        queries_per_tile = self.rows_per_tile(counts) // self.group_size
        seqs, numbers, positions, table_starts = locate(counts, ends, self.block_size)
        tokens = np.flatnonzero(numbers % queries_per_tile == 0)  # first of each tile
        firsts = positions[tokens]
        num_keys = np.minimum(firsts + queries_per_tile, ends[seqs[tokens]])
        tiles = np.stack((table_starts[tokens], tokens, firsts, num_keys), 1)

        # The size of a part is chosen so that all keys together fill at most num_parts
        # full parts. Each tile may add one that is not full, so there are at most
        # len(tiles) + num_parts items. Every tile that is cut fills at least one part,
        # so at most num_parts tiles are cut. Together they have at most num_parts full
        # parts, and one each that is not full: 2 * num_parts.
        rounds = divide_up(num_keys.sum(), self.num_parts * self.keys_per_round)
        part_keys = rounds * self.keys_per_round
        owners, parts = spread(divide_up(num_keys, part_keys))
        first_keys = parts * part_keys
        end_keys = np.minimum(first_keys + part_keys, num_keys[owners])
        items = np.zeros((len(tiles) + self.num_parts, 6), np.int64)
        items[: len(owners)] = np.column_stack((tiles[owners], first_keys, end_keys))
        # Tiles with many keys first: if such a tile started last, the whole step would
        # wait for it. The sort is stable, because `merge_parts` expects the parts of a
        # tile one after another.
        return items[np.argsort(-items[:, 3], kind="stable")]

    def store(self, k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        self.kernels.store[(len(k),)](
            k, v, slots, kv_cache, k.stride(0), v.stride(0), k[0].numel(),
            self.head_dim, self.block_size)

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Metadata) -> Tensor:
        items, rows = metadata.plan, self.rows_per_tile(metadata.counts)
        out = q.new_empty(q.shape)
        # The result of item i goes to parts[i] if its tile is cut. Such tiles have the
        # most keys, so they come first in the plan, and there is room for as many parts
        # as they can have. It is the same room in every step, so the trial steps of
        # `ModelRunner._start` need as much memory as any other.
        most_parts = 2 * self.num_parts
        shape = most_parts, self.num_kv_heads, rows
        parts = torch.empty(*shape, self.head_dim, device=q.device)
        log_sums = torch.empty(*shape, device=q.device)
        sizes = self.num_kv_heads, self.group_size, self.head_dim, rows, self.dim
        num_warps = 8 if rows > 64 else 4
        self.kernels.paged_attention[len(items), self.num_kv_heads](
            q, kv_cache, metadata.block_tables, items, out, parts, log_sums, self.scale,
            q.stride(0), *sizes, self.block_size, self.keys_per_round,
            num_warps=num_warps)
        self.kernels.merge_parts[min(len(items), most_parts), self.num_kv_heads](
            parts, log_sums, items, out, *sizes, num_warps=num_warps)
        return out.flatten(1)


class FlashAttention(TritonAttention):
    """Steps with chunks of prompts run FlashAttention-2 (Dao 2023), from flash-attn.

    It reads the pool in place, too. It needs a block_size that is a multiple of 256 and
    a 16-bit dtype. Decode-only steps, which CUDA graphs record, are left to Triton.
    """

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        from flash_attn import flash_attn_varlen_func

        self.flash: Any = flash_attn_varlen_func

    def plan(self, counts: Ints, ends: Ints) -> Ints:
        if counts.max() == 1:
            return super().plan(counts, ends)
        # [3, num_seqs + 1]: the running totals of the sequences' queries, keys and
        # blocks, from 0. flash-attn calls the first two cu_seqlens_q and cu_seqlens_k.
        sizes = counts, ends, divide_up(ends, self.block_size)
        return np.cumsum(np.pad(sizes, ((0, 0), (1, 0))), 1)

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Metadata) -> Tensor:
        counts, ends = metadata.counts, metadata.ends
        if counts.max() == 1:
            return super().attend(q, kv_cache, metadata)
        # Views, not copies: [num_blocks, block_size, num_kv_heads, head_dim]
        k, v = kv_cache.transpose(2, 3).unbind(1)
        queries, keys, table_starts = metadata.plan.int()
        # [num_seqs, max_blocks]: a table in each row. After a short one the row holds
        # whatever comes next, which is never read, because flash-attn knows how many
        # keys a sequence has. The modulo only keeps the index in range.
        width = divide_up(int(ends.max()), self.block_size)
        at = table_starts[:-1, None] + torch.arange(width, device=q.device)
        table = metadata.block_tables[at % len(metadata.block_tables)]
        out = self.flash(
            q, k, v, queries, keys, int(counts.max()), int(ends.max()),
            softmax_scale=self.scale, causal=True, block_table=table.int())
        return torch.flatten(out, 1)


BACKENDS: dict[str, type[TorchAttention]] = {
    "torch": TorchAttention, "numba": NumbaAttention,
    "triton": TritonAttention, "flash": FlashAttention}


def make_backend(name: str, model_config: Any, block_size: int, dtype: torch.dtype,
                 device: torch.device) -> TorchAttention:
    """An attention backend; ValueError if it cannot run here."""
    names = ["torch"]  # what can run here, the best one first
    if device.type == "cuda":
        if torch.cuda.get_device_properties(device).major >= 8:
            names = ["triton", "flash", "torch"]
    else:
        if sys.platform == "linux" and dtype != torch.float16:
            names = ["numba", "torch"]
        if os.environ.get("TRITON_INTERPRET") == "1":  # for tests of both classes
            names += ["triton", "flash"]
    name = names[0] if name == "auto" else name
    check(name in names, "attention_backend",
          f"'auto', or one of {names} with this device and dtype", name)
    try:
        return BACKENDS[name](model_config, block_size, dtype, device)
    except ImportError as error:
        raise ValueError(f"attention_backend={name!r} needs a package that is missing "
                         f"(install it, or use 'torch'): {error}") from error
