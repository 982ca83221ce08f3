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

    part           some of a sequence's keys: attention to each part is computed by
                   itself, then the parts are merged
    program        one run of a kernel's code: one KV head, over one part or over all
                   keys of a sequence
"""

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
        # How arrays get to the device. The model runner replaces it by `Staging.add`.
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

        # The keys of all sequences are divided into the same number of parts. No part
        # should be more than a quarter of a thread's share of all keys, and that of the
        # longest sequence decides.
        num_keys = int(ends.sum()) * self.num_kv_heads
        max_part_keys = max(num_keys // self.num_threads // 4, MIN_PART)
        num_parts = ceil_div(int(ends.max(initial=0)), max_part_keys)

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


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    # To a GPU from pinned memory, or else the copy may wait for it.
    return tensor.pin_memory().to(device, non_blocking=True)


def ceil_div(numbers: Any, divisors: Any) -> Any:
    return -(-numbers // divisors)
