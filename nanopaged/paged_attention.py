"""PagedAttention in plain loops, compiled by Numba.

On a CPU, this computes decodes and short chunks. `nanopaged/attention.py` explains the
shapes, and `cpu/attention.py` calls this. With `NUMBA_DISABLE_JIT=1` it is plain
Python, and you can step through it with a debugger.

Equation 4 of the PagedAttention paper (Kwon et al. 2023) gives the output o_i of a
query q_i. K_j and V_j are the keys and values of block j, and d is head_dim:

    A_ij = exp(q_i^T K_j / sqrt(d)) / sum over blocks t of exp(q_i^T K_t / sqrt(d))
    o_i  = sum over blocks j of A_ij V_j

where a sum over blocks also runs over the keys in each block. The denominator is known
only after the last block, so the loop adds up the numerator (`acc`) and the denominator
(`total`) separately, and divides at the end. Both are relative to the highest score so
far, because the exponential of a high score would overflow. When a block has a higher
one, both are shrunk. This is the online softmax of Milakov and Gimelshein.

For example, let one block hold keys with the scores 1 and 3, and the next block a key
with the score 5:

    first block    total = e^(1-3) + e^(3-3)           acc = e^-2 v_1 + v_2
    shrink         total = e^(3-5) (e^-2 + 1)          acc = e^-4 v_1 + e^-2 v_2
    second block   total = e^-4 + e^-2 + e^(5-5)       acc = e^-4 v_1 + e^-2 v_2 + v_3
"""
# mypy: ignore-errors

import numpy as np
from numba import njit

# Let sums be reordered, so that vector instructions can be used. NaNs still propagate.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


@njit(nogil=True, fastmath=FASTMATH)
def run_program(program, out, q, kv_cache, block_tables, tokens, table_starts, num_keys,
                scale, window, sinks):
    """Attention of one query, for the query heads that share one KV head. In Triton's
    words this is one program, and threads share out the programs of a step.

    out, q        [num_tokens, num_kv_heads, group_size, head_dim]
    kv_cache      [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables  [num_table_blocks]: one after another
    tokens        [num_queries]: which token of the step each query is
    table_starts  [num_queries]: where the block table of its sequence starts
    num_keys      [num_queries]: how many keys it sees; later ones are not read
    scale         1 / sqrt(d), for most models
    window        if it is not None, only the last `window` of these keys count
    sinks         [num_kv_heads, group_size]: the score of one more key. Its V is zero,
                  so it only adds to the denominator. Most models have none: None

    bfloat16 values are passed as raw bits (uint16), because NumPy has no bfloat16.
    """
    # Successive programs take successive queries, so a thread gets short and long ones.
    kv_head, query = divmod(program, len(tokens))
    _, _, group_size, head_dim = q.shape
    block_size = kv_cache.shape[3]
    token = tokens[query]
    heads = np.empty((group_size, head_dim), np.float32)  # as float32, and scaled once
    for g in range(group_size):
        for dim in range(head_dim):
            heads[g, dim] = scale * to_float32(q[token, kv_head, g, dim])
    scores = np.empty((group_size, block_size), np.float32)
    block_table = block_tables[table_starts[query] :]
    end = num_keys[query]
    start = 0 if window is None else max(0, end - window)
    # Begin as if the sink had just been seen: `highest` is its score, the sum of
    # exponentials is e^0 = 1, and `acc` is 0, like its V. Without a sink the score is
    # -1e30, so the first real key shrinks this 1 to 0.
    highest = np.full(group_size, np.float32(-1e30))
    if sinks is not None:
        highest = np.maximum(highest, sinks[kv_head])  # -inf means no sink
    total = np.ones(group_size, np.float32)
    acc = np.zeros((group_size, head_dim), np.float32)

    num_blocks = (end + block_size - 1) // block_size
    for j in range(start // block_size, num_blocks):
        k = kv_cache[block_table[j], 0, kv_head]  # [block_size, head_dim]
        v = kv_cache[block_table[j], 1, kv_head]
        following = kv_cache[block_table[min(j + 1, num_blocks - 1)]]  # the next block
        # Of this block, the keys first_here to end_here - 1 count.
        first_here = max(0, start - j * block_size)
        end_here = min(block_size, end - j * block_size)

        # All query heads of the group use a key while it is in the processor's cache.
        for key in range(first_here, end_here):
            prefetch(following[0, kv_head, key])
            for g in range(group_size):
                score = np.float32(0)
                for dim in range(head_dim):
                    score += heads[g, dim] * to_float32(k[key, dim])
                scores[g, key] = score

        # If this block has a higher score, shrink the sums so far.
        for g in range(group_size):
            new_highest = highest[g]
            for key in range(first_here, end_here):
                new_highest = max(new_highest, scores[g, key])
            shrink = np.exp(highest[g] - new_highest)
            highest[g] = new_highest
            total[g] *= shrink
            for dim in range(head_dim):
                acc[g, dim] *= shrink

        for key in range(first_here, end_here):
            prefetch(following[1, kv_head, key])
            for g in range(group_size):
                weight = np.exp(scores[g, key] - highest[g])
                total[g] += weight
                for dim in range(head_dim):
                    acc[g, dim] += weight * to_float32(v[key, dim])

    for g in range(group_size):
        for dim in range(head_dim):
            number = acc[g, dim] / total[g]
            out[token, kv_head, g, dim] = rounded(number, q[token, kv_head, g, dim])


def prefetch(row):
    """Ask the processor to fetch a row of the next block while it computes this one.
    Without this, attention takes up to 1.5 times as long. Plain Python does nothing
    here. In compiled code, `compiled_prefetch` of `cpu/kernels.py` takes its place.
    """


@njit(inline="always")
def to_float32(number):
    """A number as float32. The bits of a bfloat16 are the upper half of a float32's."""
    if isinstance(number, np.uint16):
        return np.uint32(np.uint32(number) << 16).view(np.float32)
    return number


@njit(inline="always")
def rounded(number, like):
    """A float32 in the type of `like`: as it is, or the bits of the nearest bfloat16.
    Halfway between two, that is the one whose last bit is 0.
    """
    if isinstance(like, np.uint16):
        whole = np.float32(number).view(np.uint32)
        last = (whole >> np.uint32(16)) & np.uint32(1)
        return np.uint16((whole + np.uint32(0x7FFF) + last) >> np.uint32(16))
    return number
