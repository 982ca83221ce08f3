"""Triton kernels: attention over the paged cache, and what writes to it.

The Triton backend in `attention.py` imports and launches them, and has the glossary of the shapes.
With `TRITON_INTERPRET=1` they run on a CPU, one program after the other, for tests and debuggers;
in float32 or float16, for the interpreter takes bfloat16 numbers for integers in its products.

A kernel is the code of one program of a grid; `tl.program_id` tells it which. Its arguments are
pointers to the first elements of tensors | strides, in elements | meta-parameters, compiled in.
Sizes of `tl.arange` have to be powers of two, so DIM is head_dim rounded up, and masks cut it off.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

# What decides the speed of decoding is how much of K and V is on its way at any time: an H200 needs
# 4.8 TB/s x 1 us = 4.8 MB, 36 KB for each of 132 multiprocessors. A program has two or three tiles
# of 16 KiB of K, and as many of V, in shared memory (num_stages=3: one that is computed, the others
# loading): 70 KiB, so that three programs of 4 warps and about 110 registers a thread fit into one.
TILE_BYTES = 16 << 10  # 64 keys of head_dim 128 in bf16
PROGRAMS_PER_SM = 3
FEW_ROWS = 16  # the least that tl.dot takes: all the query heads of a decode
# For chunks, operations count: with 128 rows, 8 warps, K and V are read once for 128 / group_size
# queries, and accumulators are 64 registers a thread. Float32, for tests, has no tensor cores.
MANY_ROWS = {2: 128, 4: 32}  # by bytes of an element
LOG2_E = tl.constexpr(1.4426950408889634)  # e^x = 2^(x log2 e), and 2^x is one instruction


@triton.jit
def store_kv(k, v, slots, kv_cache,
             k_stride, v_stride,
             NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
             DIM: tl.constexpr):
    """Write a token's K and V of one head into its place. Grid: [num_tokens, num_kv_heads].

    k, v [num_tokens, num_kv_heads, head_dim], tokens a stride apart, since they may be columns of a
    wider matrix; slots [num_tokens], -1: not stored; kv_cache. In torch: `TorchAttention.store`.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)  # a pool has more elements than 32 bits can count
    if slot >= 0:
        dim = tl.arange(0, DIM)
        row = (slot // BLOCK_SIZE * 2 * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
        k_row = tl.load(k + token * k_stride + head * HEAD_DIM + dim, mask=dim < HEAD_DIM)
        v_row = tl.load(v + token * v_stride + head * HEAD_DIM + dim, mask=dim < HEAD_DIM)
        to = kv_cache + row * HEAD_DIM + dim
        tl.store(to, k_row, mask=dim < HEAD_DIM)
        tl.store(to + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, v_row, mask=dim < HEAD_DIM)


@triton.jit(do_not_specialize=["table_stride"])
def paged_attention(q, kv_cache, block_tables, tiles, out, lse,
                    q_stride, table_stride,
                    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
                    DIM: tl.constexpr):
    """A tile of queries, one KV head, one split of the keys, in one pass over them.

    q [num_tokens, num_heads, head_dim]; kv_cache; block_tables; tiles [num_tiles, 4]: sequence,
    first token, its position, number of queries. Grid: [num_tiles * num_kv_heads, num_splits].
    out [num_tokens, num_heads, num_splits, head_dim]: with one split, the result; lse [num_tokens,
    num_heads, num_splits]: log2 of the split's sum. In torch: `TorchAttention.attend`.
    """
    tile, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    seq, token = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1).to(tl.int64)
    position, num_queries = tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
    # Rows are queries x the group's heads: K and V are read once for all of them.
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    mask = (query < num_queries)[:, None] & (dim < HEAD_DIM)[None, :]
    q += token * q_stride  # 64 bits for the tile's place, 32 for all places in it: few registers
    q_at = query[:, None] * q_stride + head[:, None] * HEAD_DIM + dim[None, :]
    q_tile = tl.load(q + q_at, mask=mask, other=0.0)  # [ROWS, DIM]
    highest = tl.full([ROWS], -1e30, tl.float32)  # not -inf: that minus itself is not a number
    total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)
    # Split-KV (FlashDecoding): all splits but the last are as many whole tiles; some may be empty.
    end = position + num_queries  # what comes behind the tile's last query is never read
    size = tl.cdiv(tl.cdiv(end, KEYS), num_splits) * KEYS
    key = split * size + tl.arange(0, KEYS)  # positions
    block_table = block_tables + seq * table_stride
    block = tl.load(block_table + key // BLOCK_SIZE, mask=key < end, other=0)  # [KEYS]
    for _ in range(split * size, tl.minimum(end, (split + 1) * size), KEYS):
        kv_row = (block.to(tl.int64) * 2 * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
        k_at = kv_cache + kv_row[:, None] * HEAD_DIM + dim[None, :]
        v_at = k_at + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
        kv_mask = (key < end)[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_at, mask=kv_mask, other=0.0)  # [KEYS, DIM]
        v = tl.load(v_at, mask=kv_mask, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k), input_precision="ieee") * (LOG2_E * HEAD_DIM**-0.5)
        seen = key[None, :] <= position + query[:, None]  # causal, by position
        scores = tl.where(seen, scores, -float("inf"))  # [ROWS, KEYS]
        # Online softmax (Milakov and Gimelshein): sums are relative to the highest score so far.
        higher = tl.maximum(highest, tl.max(scores, 1))
        probs, shrink = tl.exp2(scores - higher[:, None]), tl.exp2(highest - higher)
        total, highest = total * shrink + tl.sum(probs, 1), higher
        acc = acc * shrink[:, None] + tl.dot(probs.to(v.dtype), v, input_precision="ieee")
        # Prefetch: if K's addresses came from a load in the same round, it could not be pipelined.
        key += KEYS
        block = tl.load(block_table + key // BLOCK_SIZE, mask=key < end, other=0)
    total = tl.maximum(total, 1e-30)  # a row that has seen no key: its result is 0, its weight too
    out_row = ((token + query) * NUM_KV_HEADS * GROUP + head) * num_splits + split
    tl.store(out + out_row[:, None] * HEAD_DIM + dim[None, :], acc / total[:, None], mask=mask)
    tl.store(lse + out_row, highest + tl.log2(total), mask=query < num_queries)


@triton.jit
def merge_splits(parts, lse, out,
                 HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr, DIM: tl.constexpr):
    """The mean of a token's splits, weighted by their sums (log-sum-exp merge), for one head.

    parts, lse: `out` and `lse` of `paged_attention`; out [num_tokens, num_heads, head_dim]. Grid:
    [num_tokens, num_heads]. In torch: there, splits change nothing.
    """
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split, dim = tl.arange(0, NUM_SPLITS), tl.arange(0, DIM)
    weight = tl.load(lse + row * NUM_SPLITS + split)
    weight = tl.exp2(weight - tl.max(weight, 0))
    at = (row * NUM_SPLITS + split)[:, None] * HEAD_DIM + dim[None, :]
    part = tl.load(parts + at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    mean = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + row * HEAD_DIM + dim, mean, mask=dim < HEAD_DIM)
