"""Triton kernels: attention over the paged cache, and the kernels that write to it.

Read `paged_attention.py` first: it has the same steps in plain loops. The file
`gpu/attention.py` launches these kernels and explains the terms;
`nanopaged/attention.py` explains the shapes. With `TRITON_INTERPRET=1` the kernels run
on a CPU, one program after another, for tests and debuggers. Use float32 or float16
there, because the interpreter cannot multiply bfloat16.

A kernel is the code of one program. It is launched on a grid of many programs, and
`tl.program_id` says which one this is. Its arguments come in three groups: pointers (to
the first elements of tensors), numbers, and compiled-in constants (in capital letters).
A program computes with whole arrays, such as `tl.arange(0, DIM)`. Their sizes must be
powers of two, so DIM is head_dim rounded up, and masks leave out the rest.
"""
# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language import constexpr
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = constexpr(1.4426950408889634)  # e^x = 2^(x log2 e): 2^x is one instruction
# The columns of `items`. `TritonAttention.plan` shows an example.
TABLE, TOKEN, POSITION, NUM_KEYS, FIRST_KEY, END, COLUMNS = map(constexpr, range(7))


@triton.jit
def wait_for_results(PDL: constexpr):
    """With programmatic dependent launch (PDL, from Hopper on), a kernel may start
    while the one before it still runs:

        kernel A   | waits | computes        |
        kernel B           | starts |  waits  | computes          |
        kernel C                              | starts |  waits   | computes |

    When B calls this function, it waits until A has ended, and then lets C start. A
    program may read the step's inputs, items and slots before the call, because no
    kernel of the step writes them. What a kernel has written may be read only after it.
    Every program must make the call, even an idle one. Otherwise B could end before A
    has, and C, which waits only for B, would read A's results too early.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


# Triton compiles a kernel again when a number or an address becomes divisible by 16, or
# stops being so. `do_not_specialize` exempts the pointers into `ModelRunner.inputs`,
# because their places there depend on the batch.
@triton.jit(do_not_specialize=["slots"])
def store(k, v, slots, kv_cache, k_stride, v_stride, SIZE: constexpr,
          HEAD_DIM: constexpr, BLOCK_SIZE: constexpr, PDL: constexpr):
    """Put a token's K and V into its slot.

    Grid: [num_tokens].

    k, v      [num_tokens, num_kv_heads, head_dim]; SIZE is num_kv_heads * head_dim
    slots     [num_tokens]
    kv_cache  [num_blocks, 2, num_kv_heads, block_size, head_dim]
    """
    token = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, triton.next_power_of_2(SIZE))  # of all heads
    mask = element < SIZE
    head, dim = element // HEAD_DIM, element % HEAD_DIM
    slot = tl.load(slots + token)  # in 64 bits: a pool has too many elements for 32
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    wait_for_results(PDL)
    # A block has all its K, [num_kv_heads, block_size, head_dim], and then all its V.
    at = (head * BLOCK_SIZE + offset) * HEAD_DIM + dim
    k_at = kv_cache + block * 2 * SIZE * BLOCK_SIZE + at
    v_at = k_at + SIZE * BLOCK_SIZE
    tl.store(k_at, tl.load(k + token * k_stride + element, mask), mask)
    tl.store(v_at, tl.load(v + token * v_stride + element, mask), mask)


@triton.jit
def place_tile(tensor, item_at, stride, GROUP: constexpr, HEAD_DIM: constexpr,
               ROWS: constexpr, DIM: constexpr):
    """Where this tile is in `q` or `out`, and which of its elements exist.

    A tile has a row for each query of each head of the group: the row's number is
    query * GROUP + head. All rows use the same K and V, which are read only once. The
    last query sees num_keys keys, so a tile has num_keys - position queries.
    """
    token = tl.load(item_at + TOKEN)
    num_queries = tl.load(item_at + NUM_KEYS) - tl.load(item_at + POSITION)
    row = tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, DIM)[None, :]
    query = row // GROUP
    head = tl.program_id(1) * GROUP + row % GROUP
    # The tile's address needs 64 bits. Offsets in it need 32, which saves registers.
    offset = query * stride + head * HEAD_DIM + dim
    mask = (query < num_queries.to(tl.int32)) & (dim < HEAD_DIM)
    return tensor + token * stride + offset, mask


@triton.jit(do_not_specialize=["block_tables", "items"])
def paged_attention(q, kv_cache, block_tables, items, sinks, out, parts, log_sums,
                    scale, q_stride, WINDOW: constexpr, NUM_KV_HEADS: constexpr,
                    GROUP: constexpr, HEAD_DIM: constexpr, ROWS: constexpr,
                    DIM: constexpr, PDL: constexpr, BLOCK_SIZE: constexpr,
                    KEYS: constexpr):
    """One item of work, a tile of queries and a part of its keys, for one KV head.

    Grid: [num_items, num_kv_heads].

    q             [num_tokens, num_heads, head_dim]
    kv_cache      [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables  [num_table_blocks]: one after another
    items         [num_items, 6]: the columns are those of `TritonAttention.plan`
    sinks         [num_heads], or None: the score of one more key, whose V is zero
    out           [num_tokens, num_heads, head_dim]: results of tiles with a single part
    parts         [max_parts, num_kv_heads, ROWS, head_dim]: other results, in float32
    log_sums      [max_parts, num_kv_heads, ROWS]: log2 of the sum of 2^score over the
                  keys of a part. That sum is the weight of its result

    WINDOW is how many keys a query sees, up to its own; None: all of them. An item may
    lie entirely before the window, so that it sees no key. Then its log_sum keeps its
    first value: the sink's score in a first part, and otherwise -1e30, so that
    `merge_parts` gives the item a weight of 0.
    """
    item = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    item_at = items + item * COLUMNS
    position = tl.load(item_at + POSITION).to(tl.int32)
    first_key = tl.load(item_at + FIRST_KEY).to(tl.int32)
    end = tl.load(item_at + END).to(tl.int32)
    wait_for_results(PDL)
    block_table = block_tables + tl.load(item_at + TABLE)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    last = position + row[:, None] // GROUP  # the last key that a row sees
    q_at, mask = place_tile(q, item_at, q_stride, GROUP, HEAD_DIM, ROWS, DIM)
    q_tile = tl.load(q_at, mask=mask, other=0.0)  # [ROWS, DIM]

    start = first_key
    # Skip the whole rounds that not even the first query sees: it sees the oldest keys.
    if WINDOW is not None:
        start += tl.maximum(position + 1 - WINDOW - first_key, 0) // KEYS * KEYS

    # Positions of keys. They are unsigned so that the division by BLOCK_SIZE, which is
    # a power of two, becomes a shift.
    key = (start + tl.arange(0, KEYS)).to(tl.uint32)  # [KEYS]
    block = tl.load(block_table + key // BLOCK_SIZE, mask=key < end, other=0)

    # As in `paged_attention.py`, the sink counts as the first key: `highest` starts as
    # its score, and `total` as 1. Where there is no sink, and in all parts but the
    # first, the score is -1e30: so low that the first key that a row sees shrinks this
    # 1 to 0. A row that sees no key keeps it, so that nothing is divided by 0.
    highest = tl.full([ROWS], -1e30, tl.float32)  # not -inf: -inf minus -inf is NaN
    total = tl.full([ROWS], 1.0, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + kv_head * GROUP + row % GROUP).to(tl.float32)
        # -inf means no sink.
        highest = tl.where(first_key == 0, tl.maximum(sink * LOG2_E, highest), highest)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for _ in range(start, end, KEYS):
        # Find each key by its block: this is what paging costs. `vector` is the index
        # of its K in the pool, counted in vectors of head_dim numbers. Block ids have
        # 64 bits, and so have addresses.
        vector = (block * 2 * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
        k_at = kv_cache + vector[:, None] * HEAD_DIM + dim[None, :]
        v_at = k_at + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
        kv_mask = (key < end)[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_at, mask=kv_mask, other=0.0)  # [KEYS, DIM]
        v = tl.load(v_at, mask=kv_mask, other=0.0)

        # [ROWS, KEYS]; "ieee": without TF32
        scores = LOG2_E * scale * tl.dot(q_tile, tl.trans(k), input_precision="ieee")
        # A query sees keys up to its own position, and none after the end of the part.
        seen = key[None, :] < tl.minimum(last + 1, end)
        if WINDOW is not None:
            seen &= key[None, :] + WINDOW > last
        scores = tl.where(seen, scores, -float("inf"))

        # Online softmax: if a higher score appears, the sums are scaled down.
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, 1)
        acc *= shrink[:, None]
        acc += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = new_highest

        # Look up the blocks of the next round now: Triton can issue its loads of K and
        # V ahead of time only if their addresses are already known.
        key += KEYS
        block = tl.load(block_table + key // BLOCK_SIZE, mask=key < end, other=0)

    result = acc / total[:, None]
    if end - first_key == tl.load(item_at + NUM_KEYS):  # there are no other parts
        stride = NUM_KV_HEADS * GROUP * HEAD_DIM
        out_at, mask = place_tile(out, item_at, stride, GROUP, HEAD_DIM, ROWS, DIM)
        tl.store(out_at, result, mask=mask)
    else:
        first_row = (item * NUM_KV_HEADS + kv_head) * ROWS
        at = row[:, None] * HEAD_DIM + dim[None, :]
        tl.store(parts + first_row * HEAD_DIM + at, result, mask=mask)
        tl.store(log_sums + first_row + row, highest + tl.log2(total))


@triton.jit(do_not_specialize=["items"])
def merge_parts(parts, log_sums, items, out, NUM_KV_HEADS: constexpr, GROUP: constexpr,
                HEAD_DIM: constexpr, ROWS: constexpr, DIM: constexpr, PDL: constexpr,
                MOST_PARTS: constexpr, SOME_ROWS: constexpr):
    """Merge the parts of a cut tile, for some of its rows. This is the softmax once
    more, as if each part were a key: its score is its log_sum, and its V is its result.
    So the merged result is the mean of the parts' results, each weighted by its sum of
    exponentials.

    Grid: [max_parts, num_kv_heads, row_groups]. `plan` has put the parts of a tile one
    after another, so they are the items from `first` on. The programs of the first part
    load all of them at once, and merge them. Those of the other parts do nothing.
    """
    first = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    item_at = items + first * COLUMNS
    num_keys = tl.load(item_at + NUM_KEYS)
    first_key = tl.load(item_at + FIRST_KEY)
    part_keys = tl.load(item_at + END)  # the end of a first part is also its size
    wait_for_results(PDL)
    if (first_key > 0) | (part_keys == num_keys):
        return  # this is not the first part, or there are no others

    part = tl.arange(0, MOST_PARTS)[:, None]
    row = tl.program_id(2) * SOME_ROWS + tl.arange(0, SOME_ROWS)
    dim = tl.arange(0, DIM)
    # The number of each row among those of all parts and KV heads.
    vector = ((first + part) * NUM_KV_HEADS + kv_head) * ROWS + row[None, :]
    is_row = row < (num_keys - tl.load(item_at + POSITION)) * GROUP
    mask = (part < tl.cdiv(num_keys, part_keys)) & is_row[None, :]
    scores = tl.load(log_sums + vector, mask, other=-1e30)  # [MOST_PARTS, SOME_ROWS]
    weights = tl.exp2(scores - tl.max(scores, 0)[None, :])
    results = tl.load(  # [MOST_PARTS, SOME_ROWS, DIM]
        parts + vector[:, :, None] * HEAD_DIM + dim[None, None, :],
        mask[:, :, None] & (dim < HEAD_DIM)[None, None, :], other=0.0)
    total = tl.sum(results * weights[:, :, None], 0) / tl.sum(weights, 0)[:, None]

    # The query and the head of each row are those of `place_tile`.
    token = tl.load(item_at + TOKEN) + row // GROUP
    head = kv_head * GROUP + row % GROUP
    at = (token * NUM_KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out + at, total, is_row[:, None] & (dim < HEAD_DIM)[None, :])
