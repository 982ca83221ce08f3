"""Triton kernels: attention over the paged cache, and what writes to it.

Read `cpu_kernels.py` first: it has the same steps in plain loops. The Triton backend in
`attention.py` launches these kernels, and has the glossary of the shapes. With
`TRITON_INTERPRET=1` they run on a CPU, one program after another, for tests and
debuggers; in float32 or float16, because the interpreter cannot multiply bfloat16.

A kernel is the code of one program of a grid; `tl.program_id` says which. Its arguments
come in three groups: pointers to the first elements of tensors, strides in elements,
and meta-parameters, which are compiled in. Sizes of `tl.arange` must be powers of two,
so DIM is head_dim rounded up, and masks cut it off.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

# The speed of decoding depends on how much of K and V is on its way at any time: an
# H200 needs 4.8 TB/s x 1 us = 4.8 MB, 36 KB for each of its 132 multiprocessors. A
# program has two or three tiles of 16 KiB of K, and as many of V, in shared memory
# (num_stages=3: it computes one while the others load). With 70 KiB, three programs of
# 4 warps and about 110 registers a thread fit into a multiprocessor.
TILE_BYTES = 16 << 10  # 64 keys of head_dim 128 in bf16
PROGRAMS_PER_SM = 3
FEW_ROWS = 16  # the least that tl.dot takes: all the query heads of a decode
# For chunks, operations count. With 128 rows and 8 warps, K and V are read once for
# 128 / group_size queries, and the accumulators take 64 registers a thread. Float32 is
# for tests: tensor cores do not have it.
MANY_ROWS = {2: 128, 4: 32}  # by bytes of an element
LOG2_E = tl.constexpr(1.4426950408889634)  # e^x = 2^(x log2 e): 2^x is one instruction


@triton.jit
def store_kv(k, v, slots, kv_cache,
             k_stride, v_stride,
             NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
             BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr):
    """Write one head of a token's K and V to its slot.

    Grid: [num_tokens, num_kv_heads]. In torch: `TorchAttention.store`.

    k, v      [num_tokens, num_kv_heads, head_dim]; tokens are a stride apart, as these
              may be columns of a wider matrix
    slots     [num_tokens]; -1: the token is padding, and is not stored
    kv_cache  [num_blocks, 2, num_kv_heads, block_size, head_dim]
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)  # 32 bits cannot count a pool's elements
    if slot >= 0:
        dim = tl.arange(0, DIM)
        mask = dim < HEAD_DIM
        k_row = tl.load(k + token * k_stride + head * HEAD_DIM + dim, mask=mask)
        v_row = tl.load(v + token * v_stride + head * HEAD_DIM + dim, mask=mask)

        block = slot // BLOCK_SIZE
        row = (block * 2 * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
        k_at = kv_cache + row * HEAD_DIM + dim
        tl.store(k_at, k_row, mask=mask)
        tl.store(k_at + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, v_row, mask=mask)


@triton.jit(do_not_specialize=["table_stride"])
def paged_attention(q, kv_cache, block_tables, tiles, out, lse,
                    q_stride, table_stride,
                    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
                    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr):
    """A tile of queries, one KV head, one split of the keys, in one pass over them.

    Grid: [num_tiles * num_kv_heads, num_splits]. In torch: `TorchAttention.attend`.

    q             [num_tokens, num_heads, head_dim]
    kv_cache      [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables  [num_seqs, max_blocks]
    tiles         [num_tiles, 4]: sequence, first token, its position, number of queries
    out           [num_tokens, num_heads, num_splits, head_dim]
    lse           [num_tokens, num_heads, num_splits]: log2 of the split's sum
    """
    tile = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    seq = tl.load(tiles + tile * 4)
    token = tl.load(tiles + tile * 4 + 1).to(tl.int64)
    position = tl.load(tiles + tile * 4 + 2)
    num_queries = tl.load(tiles + tile * 4 + 3)

    # Rows are queries x the group's heads: K and V are read once for all of them.
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    mask = (query < num_queries)[:, None] & (dim < HEAD_DIM)[None, :]
    # 64 bits for the place of the tile, 32 for places in it: that saves registers.
    q += token * q_stride
    q_at = query[:, None] * q_stride + head[:, None] * HEAD_DIM + dim[None, :]
    q_tile = tl.load(q + q_at, mask=mask, other=0.0)  # [ROWS, DIM]

    # Split-KV (FlashDecoding): each split has the same number of whole tiles, but for
    # the last ones, which may be empty. Keys after the tile's last query are not read.
    end = position + num_queries
    size = tl.cdiv(tl.cdiv(end, KEYS), num_splits) * KEYS
    key = split * size + tl.arange(0, KEYS)  # positions
    block_table = block_tables + seq * table_stride
    block = tl.load(block_table + key // BLOCK_SIZE, mask=key < end, other=0)  # [KEYS]

    highest = tl.full([ROWS], -1e30, tl.float32)  # -inf minus itself is not a number
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for _ in range(split * size, tl.minimum(end, (split + 1) * size), KEYS):
        # Look up where each key is: this is what paging costs.
        first_row = (block.to(tl.int64) * 2 * NUM_KV_HEADS + kv_head) * BLOCK_SIZE
        kv_row = first_row + key % BLOCK_SIZE
        k_at = kv_cache + kv_row[:, None] * HEAD_DIM + dim[None, :]
        v_at = k_at + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
        kv_mask = (key < end)[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_at, mask=kv_mask, other=0.0)  # [KEYS, DIM]
        v = tl.load(v_at, mask=kv_mask, other=0.0)

        scores = tl.dot(q_tile, tl.trans(k), input_precision="ieee")  # [ROWS, KEYS]
        scores *= LOG2_E * HEAD_DIM**-0.5
        seen = key[None, :] <= position + query[:, None]  # causal, by position
        scores = tl.where(seen, scores, -float("inf"))

        # Online softmax (Milakov and Gimelshein): sums are relative to the highest
        # score so far. If there is a higher one, what was summed shrinks.
        higher = tl.maximum(highest, tl.max(scores, 1))
        probs = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(probs, 1)
        update = tl.dot(probs.to(v.dtype), v, input_precision="ieee")
        acc = acc * shrink[:, None] + update
        highest = higher

        # Look ahead: if the addresses of K came from a load in the same round, that
        # round could not be pipelined.
        key += KEYS
        block = tl.load(block_table + key // BLOCK_SIZE, mask=key < end, other=0)

    total = tl.maximum(total, 1e-30)  # a row that saw no key gets 0, with weight 0
    out_row = ((token + query) * NUM_KV_HEADS * GROUP + head) * num_splits + split
    out_at = out + out_row[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_at, acc / total[:, None], mask=mask)
    tl.store(lse + out_row, highest + tl.log2(total), mask=query < num_queries)


@triton.jit
def merge_splits(parts, lse, out,
                 HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr, DIM: tl.constexpr):
    """The mean of a token's splits for one head, weighted by their sums (log-sum-exp).

    Grid: [num_tokens, num_heads]. In torch: nothing there is split.

    parts, lse  `out` and `lse` of `paged_attention`
    out         [num_tokens, num_heads, head_dim]
    """
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split = tl.arange(0, NUM_SPLITS)
    dim = tl.arange(0, DIM)
    weight = tl.load(lse + row * NUM_SPLITS + split)
    weight = tl.exp2(weight - tl.max(weight, 0))
    part_at = (row * NUM_SPLITS + split)[:, None] * HEAD_DIM + dim[None, :]
    part = tl.load(parts + part_at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    mean = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + row * HEAD_DIM + dim, mean, mask=dim < HEAD_DIM)
