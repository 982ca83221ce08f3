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
(`total`) separately, and divides at the end. The exponential of a high score would
overflow, so the highest score so far is subtracted from all. When a block has a higher
one, both sums are shrunk. This is the online softmax of Milakov and Gimelshein.

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
# Coefficients of 2^x for x from 0 to 1, the highest power first; off by 2e-7 at most.
POLYNOMIAL = np.float32(
    [1.8775767e-3, 8.98934e-3, 5.582631e-2, 0.2401536, 0.6931531, 0.99999994])


@njit(nogil=True, fastmath=FASTMATH)
def run_program(program, out, q, kv_cache, block_tables, plan, window, sinks,
                heads_each):
    """Attention of one query, for `heads_each` KV heads and the query heads that share
    them. In Triton's terms this is one program, and threads share out the programs of a
    step.

    out, q        [num_tokens, num_kv_heads, group_size, head_dim]. q is float32, and
                  has been multiplied by 1 / sqrt(d), or whatever the model has instead
    kv_cache      [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables  [num_table_blocks]: one after another
    plan          [3, num_queries], for each query: which token of the step it is; where
                  the block table of its sequence starts; how many keys it sees. Later
                  ones are not read
    window        if it is not None, only the last `window` of these keys count
    sinks         [num_kv_heads, group_size]: the score of one more key. Its V is zero,
                  so it only adds to the denominator. Most models have none: None

    bfloat16 values are passed as raw bits (uint16), because NumPy has no bfloat16.
    """
    # A thread runs successive programs, which take successive queries. So it usually
    # gets short and long sequences.
    part, query = divmod(program, plan.shape[1])
    token, table_start, end = plan[0, query], plan[1, query], plan[2, query]
    first, stop = part * heads_each, (part + 1) * heads_each  # of the KV heads
    # [heads_each, group_size, head_dim]
    q, out = q[token, first:stop], out[token, first:stop]
    _, group_size, head_dim = q.shape
    block_size = kv_cache.shape[3]
    scores = np.empty((heads_each, group_size, block_size), np.float32)
    block_table = block_tables[table_start:]
    start = 0 if window is None else max(0, end - window)
    # Begin as if the sink had just been seen: `highest` is its score, the sum of
    # exponentials is e^0 = 1, and `acc` is 0, like its V. Without a sink the score is
    # -1e30, so the first real key shrinks this 1 to 0.
    highest = np.full((heads_each, group_size), np.float32(-1e30))
    if sinks is not None:
        highest = np.maximum(highest, sinks[first:stop])  # -inf means no sink
    total = np.ones((heads_each, group_size), np.float32)
    acc = np.zeros(q.shape, np.float32)

    num_blocks = (end + block_size - 1) // block_size
    for j in range(start // block_size, num_blocks):
        # [heads_each, block_size, head_dim] each. One slice for both, as below, would
        # take five times as long: Numba would no longer know that the numbers of a row
        # lie side by side, and could not use vector instructions.
        k = kv_cache[block_table[j], 0, first:stop]
        v = kv_cache[block_table[j], 1, first:stop]
        # The next block, if there is one. It is only prefetched.
        following = kv_cache[block_table[min(j + 1, num_blocks - 1)], :, first:stop]
        # Of this block, the keys first_here to end_here - 1 count.
        first_here = max(0, start - j * block_size)
        end_here = min(block_size, end - j * block_size)

        # K and V are read in the order in which they lie in memory. All query heads of
        # a group use a key while it is in the processor's cache.
        for head in range(heads_each):
            for key in range(first_here, end_here):
                prefetch(following[0, head, key])
                for g in range(group_size):
                    score = np.float32(0)
                    for dim in range(head_dim):
                        score += q[head, g, dim] * to_float32(k[head, key, dim])
                    scores[head, g, key] = score

        # If this block has a higher score, shrink the sums so far. From here on,
        # `scores` holds the exponentials.
        for head in range(heads_each):
            for g in range(group_size):
                here = scores[head, g, first_here:end_here]
                new_highest = highest[head, g]
                for key in range(len(here)):
                    new_highest = max(new_highest, here[key])
                shrink = np.exp(highest[head, g] - new_highest)
                highest[head, g] = new_highest
                for dim in range(head_dim):
                    acc[head, g, dim] *= shrink
                total_here = np.float32(0)
                for key in range(len(here)):
                    here[key] = exponential(here[key] - new_highest)
                    total_here += here[key]
                total[head, g] = shrink * total[head, g] + total_here

        for head in range(heads_each):
            for key in range(first_here, end_here):
                prefetch(following[1, head, key])
                for g in range(group_size):
                    weight = scores[head, g, key]
                    for dim in range(head_dim):
                        acc[head, g, dim] += weight * to_float32(v[head, key, dim])

    for head in range(heads_each):
        for g in range(group_size):
            for dim in range(head_dim):
                number = acc[head, g, dim] / total[head, g]
                out[head, g, dim] = rounded(number, out[head, g, dim])


def prefetch(row):
    """Ask the processor to fetch a row of the next block while it computes this one.
    Without this, attention takes up to 1.5 times as long. Plain Python does nothing
    here. In compiled code, `compiled_prefetch` of `cpu/kernels.py` takes its place.
    """


@njit(nogil=True, fastmath=FASTMATH)
def exponential(x):
    """e^x, for x <= 0, as a power of 2, and at least 2^-126. A NaN stays one, because
    `max` keeps its first argument then. The compiler turns this into vector
    instructions; np.exp would be a call for each number.
    """
    power = max(x * np.float32(1.44269504), np.float32(-126))
    whole = np.floor(power)
    result = np.float32(0)  # 2^(power - whole)
    for coefficient in POLYNOMIAL:
        result = result * (power - whole) + coefficient
    # The exponent is in the upper bits of a float32, where 127 stands for 2^0.
    return result * np.int32((np.int32(whole) + 127) << 23).view(np.float32)


@njit(inline="always")
def to_float32(number):
    """A number as float32. The bits of a bfloat16 are the upper half of a float32's."""
    if isinstance(number, np.uint16):
        return np.uint32(np.uint32(number) << 16).view(np.float32)
    return number


@njit(inline="always")
def rounded(number, like):
    """A float32 in the type of `like`: as it is, or the bits of the nearest bfloat16.
    A tie goes to the one whose last bit is 0.
    """
    if isinstance(like, np.uint16):
        whole = np.float32(number).view(np.uint32)
        last = (whole >> np.uint32(16)) & np.uint32(1)
        return np.uint16((whole + np.uint32(0x7FFF) + last) >> np.uint32(16))
    return number
