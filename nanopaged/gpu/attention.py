"""Attention on a GPU: how a step is divided among the programs of `kernels.py`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton import next_power_of_2

from nanopaged.attention import Ints, Metadata, Scoring, TorchAttention, cdiv, spread
from nanopaged.gpu import kernels


class TritonAttention(TorchAttention):
    """On a GPU: the kernels in `kernels.py` do everything. A step is divided like this:

        the queries of a sequence    | tile | tile | tile |   a few queries each
        the keys that a tile sees    | part | part | part |   often only one part
        the keys of a part           | round | round |        loaded one after another

    An item is a tile with one part of its keys. A program, one run of a kernel's code,
    computes an item for one KV head and all query heads that share it. So a tile has a
    row for each of its queries and each of these heads. A GPU runs hundreds of programs
    at once.

    What is launched, and with which sizes, depends on `counts` alone. So a CUDA graph
    of decodes can be replayed with new contents in the same tensors.
    """

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        # The speed of decoding depends on how much of K and V is in flight, on its way
        # from memory. An H200 can deliver 4.8 TB/s, and a load takes about 1 us. So to
        # keep its memory busy, 4.8 MB must be in flight: 36 KB for each of its 132
        # multiprocessors. A program computes one round while the next one is in flight:
        # 16 KB of K and as much of V (64 keys of head_dim 128 in bfloat16). Three such
        # programs fit into a multiprocessor at once, and have 96 KB in flight together.
        # That is more than enough.
        num_processors = 4  # in Triton's interpreter, on a CPU
        if self.device.type == "cuda":
            gpu = torch.cuda.get_device_properties(self.device)
            num_processors = gpu.multi_processor_count
            # PDL within CUDA graphs came with CUDA 12.3. AMD has none.
            self.uses_pdl = (gpu.major >= 9 and not torch.version.hip and
                             torch._C._cuda_getDriverVersion() >= 12030)  # type: ignore
        # tl.dot takes sizes that are powers of two, 16 or more.
        self.dim = max(16, next_power_of_2(self.head_dim))
        # The scores of more than 128 keys would need too many registers.
        key_bytes = self.dim * self.dtype.itemsize
        self.keys_per_round = max(16, min(128, (16 << 10) // key_bytes))
        # How many programs run at once for each KV head: 4 in the example of `plan`.
        self.target_parts = cdiv(3 * num_processors, self.num_kv_heads)
        # Large tiles are for chunks. One fills all registers of a multiprocessor.
        can_be_large = self.dtype.itemsize == 2 and self.dim <= 128
        self.few_rows: int = next_power_of_2(max(16, self.group_size))
        self.many_rows = max(self.few_rows, 128 if can_be_large else 32)

    def tile_sizes(self, counts: Ints) -> tuple[int, int, int]:
        """Three limits of a step.

        rows: how many rows each tile has. If the sequences have few queries on average,
            large tiles would be mostly empty.
        target: into how many parts all keys of the step are cut, for each KV head: as
            many as there are programs that run at once. A large tile fills a
            multiprocessor, where three small ones fit, so then it is a third.
        most: how many parts one tile may have. `merge_parts` loads one row of each at
            once: most * dim numbers, and at most 2^14.

        On an H200 with 8 KV heads and a head_dim of 128, target is 50, or 17 with large
        tiles, and most is 64 or 32.
        """
        is_large = counts.mean() * self.group_size > self.few_rows
        rows = self.many_rows if is_large else self.few_rows
        target = self.target_parts if rows <= 64 else cdiv(self.target_parts, 3)
        return rows, target, next_power_of_2(min(target, 2**14 // self.dim))

    def plan(self, metadata: Metadata) -> Ints:
        """Cut a step into items, [num_items, 6].

        First without parts: each tile is an item. For example, let two decodes have
        1000 and 100 keys, in blocks of 16 tokens:

            table  token  position  num_keys  first_key   end
                0      0       999      1000          0  1000
               63      1        99       100          0   100

        table: where the block table of the tile's sequence starts. The first one has 63
        blocks. token, position: the tile's first token, and where it is in its
        sequence. num_keys: how many keys the tile sees. first_key, end: those of the
        item.

        But then a step takes as long as its longest sequence. So the keys of a long
        tile are cut into parts, an item each, and `merge_parts` joins their results.
        The first decode has four items then:

                0      0       999      1000          0   320
                0      0       999      1000        320   640
                0      0       999      1000        640   960
                0      0       999      1000        960  1000

        How many keys does a part have? The same number in the whole step, except that
        the last part of a tile may be smaller. Let 4 programs per KV head run at once.
        Divided among them, the two decodes' 1100 keys make 275 each, or 320 in whole
        rounds of 64 keys.

        Items without keys follow, so that the shape depends on counts alone.
        """
        rows, target, most = self.tile_sizes(metadata.counts)
        size = rows // self.group_size  # how many queries a tile has
        first = np.flatnonzero(metadata.indices % size == 0)  # each tile's first token
        positions, ends = metadata.positions[first], metadata.ends[metadata.entries]
        num_keys = np.minimum(positions + size, ends[first])
        tiles = np.stack((metadata.table_starts[first], first, positions, num_keys), 1)

        # An item is full if it has part_keys keys. As part_keys * target is at least
        # the number of all keys, at most `target` items are full. A tile adds at most
        # one that is not: len(tiles) + target in all. For `attend`: a cut tile has a
        # full item, so at most `target` tiles are cut, into at most 2 * target items.
        part_keys = max(cdiv(num_keys.sum(), target), cdiv(num_keys.max(), most))
        part_keys = cdiv(part_keys, self.keys_per_round) * self.keys_per_round
        tile, part = spread(cdiv(num_keys, part_keys))  # of each item
        first_keys = part * part_keys
        end_keys = np.minimum(first_keys + part_keys, num_keys[tile])
        items = np.zeros((len(tiles) + target, 6), np.int64)
        items[: len(tile)] = np.column_stack((tiles[tile], first_keys, end_keys))
        # Tiles with many keys first: if such a tile started last, the whole step would
        # wait for it. Also, `attend` expects cut tiles first: they have more keys than
        # a part. The sort is stable, because `merge_parts` expects the parts of a tile
        # one after another.
        return items[np.argsort(-items[:, 3], kind="stable")]

    def store(self, k: Tensor, v: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        kernels.store[(len(k),)](
            k, v, slots, kv_cache, k.stride(0), v.stride(0), k[0].numel(),
            self.head_dim, self.block_size, self.uses_pdl, launch_pdl=self.uses_pdl)

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Metadata, scoring: Scoring
               ) -> Tensor:
        rows, target, most = self.tile_sizes(metadata.counts)
        items, out = metadata.plan, q.new_empty(q.shape)
        # If its tile is cut, the result of item i goes to parts[i]: `plan` puts cut
        # tiles first. The number of their items has this limit whatever the keys are,
        # so the trial steps at the start take as much memory as any step.
        max_parts = 2 * target
        shape = max_parts, self.num_kv_heads, rows
        parts = torch.empty(*shape, self.head_dim, device=q.device)
        log_sums = torch.empty(*shape, device=q.device)
        # Both kernels take NUM_KV_HEADS, GROUP, HEAD_DIM, ROWS, DIM and PDL.
        sizes = (self.num_kv_heads, self.group_size, self.head_dim, rows, self.dim,
                 self.uses_pdl)
        kernels.paged_attention[len(items), self.num_kv_heads](
            q, kv_cache, metadata.block_tables, items, scoring.sinks, out, parts,
            log_sums, scoring.scale, q.stride(0), scoring.window, *sizes,
            self.block_size, self.keys_per_round, num_warps=8 if rows > 64 else 4,
            launch_pdl=self.uses_pdl)
        # A program of `merge_parts` merges `some_rows` rows at once, and so loads at
        # most 2^14 numbers. No tile uses more than its first `num_rows` rows.
        some_rows = 2**14 // self.dim // most
        num_rows = min(rows, self.group_size * int(metadata.counts.max()))
        grid = min(len(items), max_parts), self.num_kv_heads, cdiv(num_rows, some_rows)
        kernels.merge_parts[grid](
            parts, log_sums, items, out, *sizes, most, some_rows,
            launch_pdl=self.uses_pdl)
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

    def plan(self, metadata: Metadata) -> Ints:
        counts, ends = metadata.counts, metadata.ends
        if counts.max() == 1:
            return super().plan(metadata)
        # With chunks, [num_seqs + 1, 2 + width]. The first two columns are running
        # totals of queries and keys, from 0: cu_seqlens_q and cu_seqlens_k. The others
        # are block tables, as wide as the longest. The tables stand end to end, so the
        # row of a short one runs on into the next. flash-attn knows how many keys a
        # sequence has, and does not read that. The modulo keeps the index in range.
        totals = np.cumsum(np.pad((counts, ends), ((0, 0), (1, 0))), 1)
        sizes, tables = cdiv(ends, self.block_size), metadata.block_tables
        at = (np.cumsum(sizes) - sizes)[:, None] + np.arange(sizes.max())
        rows = np.pad(tables[at % len(tables)], ((0, 1), (0, 0)))
        return np.column_stack((totals.T, rows))

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Metadata, scoring: Scoring
               ) -> Tensor:
        counts, ends = metadata.counts, metadata.ends
        if counts.max() == 1:
            return super().attend(q, kv_cache, metadata, scoring)
        if scoring.sinks is not None:
            # flash-attn has none, and Triton cannot read the plan that is made for it.
            return TorchAttention.attend(self, q, kv_cache, metadata, scoring)
        # Views, not copies: [num_blocks, block_size, num_kv_heads, head_dim]
        k, v = kv_cache.transpose(2, 3).unbind(1)
        plan = metadata.plan.int()
        query_starts, key_starts = plan[:, :2].T.contiguous()
        out = self.flash(
            q, k, v, query_starts, key_starts, int(counts.max()), int(ends.max()),
            softmax_scale=scoring.scale, causal=True, block_table=plan[:-1, 2:],
            window_size=(scoring.window - 1, 0) if scoring.window else (-1, -1))
        return torch.flatten(out, 1)
