"""Triton kernels: attention over the paged cache, and what writes to it.

Read `cpu_kernels.py` first: it has the same steps in plain loops. `triton_attention.py`
launches these kernels, and `attention.py` has the glossary of the shapes. With
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
# program has two tiles of K and two of V, 16 KiB each, in shared memory: while it
# computes one, the next loads. With its queries that makes 70 KiB, so three programs of
# 4 warps and about 110 registers a thread fit into a multiprocessor.
TILE_BYTES = 16 << 10  # 64 keys of head_dim 128 in bf16
PROGRAMS_PER_SM = 3
FEW_ROWS = 16  # the least that tl.dot takes: all the query heads of a decode
# For chunks, operations count. With 128 rows and 8 warps, K and V are read once for
# 128 / group_size queries, and the accumulators take 64 registers a thread. With 96 KiB
# they fit into every GPU from Ampere on. Float32 is for tests: tensor cores do not have
# it.
MANY_ROWS = {2: 128, 4: 32}  # by bytes of an element
LOG2_E = tl.constexpr(1.4426950408889634)  # e^x = 2^(x log2 e): 2^x is one instruction


@triton.jit
def rotate_and_store(qkv, q_weight, k_weight, cos, sin, slots, q, kv_cache, eps,
                     NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
                     HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                     ROWS: tl.constexpr, DIM: tl.constexpr):
    """Normalise and rotate a token's Q and K; Q goes to `q`, K and V to the cache.

    Grid: [num_tokens]. In torch: `TorchAttention.rotate_and_store`. A row of the tile
    is a head of Q, K or V, in this order; ROWS is their number, rounded up.

    qkv                 [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    q_weight, k_weight  [head_dim]; None: there are no norms
    cos, sin            [num_tokens, head_dim]
    slots               [num_tokens]; -1: the token is padding, and is not stored
    q                   [num_tokens, num_heads, head_dim]
    kv_cache            [num_blocks, 2, num_kv_heads, block_size, head_dim]
    """
    token = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    # A head's halves turn into each other: the second operand is half a head away.
    other_dim = tl.where(dim < HEAD_DIM // 2, dim + HEAD_DIM // 2, dim - HEAD_DIM // 2)
    in_dim = dim < HEAD_DIM
    mask = (row < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_dim[None, :]
    qkv += token * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    x = tl.load(qkv + row[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    other = tl.load(qkv + row[:, None] * HEAD_DIM + other_dim[None, :], mask=mask,
                    other=0.0)

    a = x.to(tl.float32)  # [ROWS, DIM]
    b = other.to(tl.float32)
    if q_weight is not None:
        scale = tl.rsqrt(tl.sum(a * a, 1) / HEAD_DIM + eps)[:, None]
        is_q = (row < NUM_HEADS)[:, None]
        q_a = tl.load(q_weight + dim, mask=in_dim).to(tl.float32)
        k_a = tl.load(k_weight + dim, mask=in_dim).to(tl.float32)
        q_b = tl.load(q_weight + other_dim, mask=in_dim).to(tl.float32)
        k_b = tl.load(k_weight + other_dim, mask=in_dim).to(tl.float32)
        a *= scale * tl.where(is_q, q_a[None, :], k_a[None, :])
        b *= scale * tl.where(is_q, q_b[None, :], k_b[None, :])
    cosine = tl.load(cos + token * HEAD_DIM + dim, mask=in_dim).to(tl.float32)
    sine = tl.load(sin + token * HEAD_DIM + dim, mask=in_dim).to(tl.float32)
    sine = tl.where(dim < HEAD_DIM // 2, -sine, sine)
    rotated = (a * cosine[None, :] + b * sine[None, :]).to(x.dtype)

    q_at = q + (token * NUM_HEADS + row[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(q_at, rotated, mask=mask & (row < NUM_HEADS)[:, None])

    slot = tl.load(slots + token).to(tl.int64)  # 32 bits cannot count a pool's elements
    if slot >= 0:
        kv_row = row - NUM_HEADS  # K's heads, then V's, as in a block
        first_row = (slot // BLOCK_SIZE * 2 * NUM_KV_HEADS + kv_row) * BLOCK_SIZE
        at = (first_row + slot % BLOCK_SIZE)[:, None] * HEAD_DIM + dim[None, :]
        is_v = (row >= NUM_HEADS + NUM_KV_HEADS)[:, None]
        values = tl.where(is_v, x, rotated)
        tl.store(kv_cache + at, values, mask=mask & (kv_row >= 0)[:, None])


@triton.jit(do_not_specialize=["source_blocks", "target_blocks"])
def copy_blocks(source, target, moves, source_blocks, target_blocks,
                SIZE: tl.constexpr, STEP: tl.constexpr):
    """Copy blocks of all layers, also from and to pinned memory of the CPU.

    Grid: [num_moves, num_layers]. In torch: `TorchAttention.copy_blocks`.

    source, target  [num_layers, source_blocks or target_blocks, SIZE]
    moves           [num_moves, 2]: a block of the source and one of the target
    """
    move = moves + tl.program_id(0) * 2
    layer = tl.program_id(1).to(tl.int64)
    source += (layer * source_blocks + tl.load(move)) * SIZE
    target += (layer * target_blocks + tl.load(move + 1)) * SIZE
    for first in range(0, SIZE, STEP):
        at = first + tl.arange(0, STEP)
        values = tl.load(source + at, mask=at < SIZE)
        tl.store(target + at, values, mask=at < SIZE)


@triton.jit
def paged_attention(q, kv_cache, block_tables, items, out, parts, lse,
                    q_stride,
                    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
                    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr):
    """A tile of queries and one KV head: one pass over its keys, or a part of them.

    Grid: [num_items * num_kv_heads]. In torch: `TorchAttention.attend`.

    q             [num_tokens, num_heads, head_dim]
    kv_cache      [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables  [num_seqs, max_blocks]
    items         [num_items, 7]: see `TritonAttention.plan`
    out           [num_tokens, num_heads, head_dim]: results of whole tiles
    parts         [num_part_rows, num_heads, head_dim]: those of parts, in float32
    lse           [num_part_rows, num_heads]: log2 of a part's sum
    """
    items += tl.program_id(0) // NUM_KV_HEADS * 7
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    num_queries = tl.load(items + 3)
    if num_queries == 0:
        return
    block_table = block_tables + tl.load(items)
    token = tl.load(items + 1).to(tl.int64)
    position = tl.load(items + 2)
    first_key = tl.load(items + 4)
    end = tl.load(items + 5)
    part_row = tl.load(items + 6)

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

    # Positions of keys. They are unsigned, and BLOCK_SIZE is a power of two, so that
    # the division compiles to a shift.
    key = (first_key + tl.arange(0, KEYS)).to(tl.uint32)  # [KEYS]
    block = tl.load(block_table + key // BLOCK_SIZE, mask=key < end, other=0)

    highest = tl.full([ROWS], -1e30, tl.float32)  # -inf minus itself is not a number
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for _ in range(first_key, end, KEYS):
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
        # A query sees keys up to its own position, and none after the end of the item.
        seen = key[None, :] < tl.minimum(position + query[:, None] + 1, end)
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
    result = acc / total[:, None]
    if part_row < 0:
        out_row = (token + query) * NUM_KV_HEADS * GROUP + head
        tl.store(out + out_row[:, None] * HEAD_DIM + dim[None, :], result, mask=mask)
    else:
        out_row = (part_row.to(tl.int64) + query) * NUM_KV_HEADS * GROUP + head
        tl.store(parts + out_row[:, None] * HEAD_DIM + dim[None, :], result, mask=mask)
        tl.store(lse + out_row, highest + tl.log2(total), mask=query < num_queries)


@triton.jit
def merge_parts(parts, lse, merges, out,
                HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """The mean of a token's parts for one head, weighted by their sums (log-sum-exp).

    Grid: [num_merges, num_heads]. In torch it has no counterpart: nothing is divided.

    parts, lse, out  as in `paged_attention`
    merges           [num_merges, 4]: see `TritonAttention.plan`
    """
    merges += tl.program_id(0) * 4
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    token = tl.load(merges).to(tl.int64)
    first_row = tl.load(merges + 1)
    num_parts = tl.load(merges + 2)
    step = tl.load(merges + 3)
    if num_parts == 0:
        return

    dim = tl.arange(0, DIM)
    highest = tl.full([1], -1e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([DIM], tl.float32)
    for first in range(0, num_parts, 16):
        part = first + tl.arange(0, 16)
        row = (first_row + part * step) * num_heads + head
        mask = (part < num_parts)[:, None] & (dim < HEAD_DIM)[None, :]
        values = tl.load(parts + row[:, None] * HEAD_DIM + dim[None, :], mask=mask,
                         other=0.0)  # [16, DIM]
        logs = tl.load(lse + row, mask=part < num_parts, other=-float("inf"))

        higher = tl.maximum(highest, tl.max(logs, 0))
        weights = tl.exp2(logs - higher)
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        highest = higher

    out_at = out + (token * num_heads + head) * HEAD_DIM + dim
    tl.store(out_at, acc / total, mask=dim < HEAD_DIM)
