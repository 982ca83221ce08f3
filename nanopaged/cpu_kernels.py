"""PagedAttention in plain loops, compiled by Numba: read this before Triton's `kernels.py`.

The Numba backend in `attention.py` calls it and has the glossary of the shapes. With
`NUMBA_DISABLE_JIT=1` this is ordinary Python, so a debugger can step through it.

The paper's equation 4, for one query q_i and the blocks of keys K_j and values V_j:

    A_ij = exp(q_i K_j / sqrt(d)) / sum over all blocks t of exp(q_i K_t / sqrt(d))
    o_i  = sum over j of A_ij V_j

The sum is not known before the last block. So each tile of keys adds to a running sum and
to a running output, both relative to the highest score so far, and the division comes at
the end: the online softmax of Milakov and Gimelshein.

Half precision arrives as its bits, in uint16, because Numba computes in float32 only.
"""
# mypy: ignore-errors

import math

import numpy as np
from numba import njit

KEYS = 32  # keys in a tile: K and V of a tile stay in the processor's first cache

# Sums in any order, so that they use vector instructions. NaN and infinity stay what
# they are: "nnan" and "ninf" are not among these.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


@njit(cache=True, fastmath=FASTMATH)
def to_float32(bits, is_float16, floats):
    """Widen one vector: bits [head_dim] of the cache into floats [head_dim]."""
    wide = floats.view(np.uint32)
    if bits.itemsize == 4:
        for dim in range(len(bits)):
            wide[dim] = bits[dim]
    elif not is_float16:
        # A bfloat16 is the upper half of a float32.
        for dim in range(len(bits)):
            wide[dim] = np.uint32(bits[dim]) << 16
    else:
        # Move sign, exponent and fraction to where float32 has them. Its exponents count
        # from -127, those of float16 from -15: multiply by 2^112. All ones stay all ones.
        for dim in range(len(bits)):
            half = np.uint32(bits[dim])
            wide[dim] = (half & 0x8000) << 16 | (half & 0x7FFF) << 13
            if half & 0x7C00 == 0x7C00:
                wide[dim] |= 0x7F800000
        for dim in range(len(bits)):
            floats[dim] *= np.float32(2.0**112)


@njit(cache=True, nogil=True, fastmath=FASTMATH, error_model="numpy")
def paged_attention(programs, q, kv_cache, block_tables, ends, is_float16, out, lse):
    """One query per sequence: attention over keys 0 to ends[seq] - 1 of its blocks.

    programs     (first, last): the part of the work for this thread
    q            [num_seqs, num_heads, head_dim], float32
    kv_cache     [num_blocks, 2, num_kv_heads, block_size, head_dim], the bits
    block_tables [num_seqs, max_blocks]
    ends         [num_seqs]: what comes after a sequence's end is never read
    out          [num_splits, num_seqs, num_heads, head_dim], float32
    lse          [num_splits, num_seqs, num_heads]: log of the split's sum
    """
    num_splits, num_seqs, num_heads, head_dim = out.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group_size = num_heads // num_kv_heads
    scale = np.float32(1 / math.sqrt(head_dim))

    # Each program has one sequence, one KV head and one split of the keys.
    for program in range(programs[0], programs[1]):
        kv_head = program // (num_splits * num_seqs)
        split = program // num_seqs % num_splits
        seq = program % num_seqs
        first_head = kv_head * group_size
        split_size = (ends[seq] + num_splits - 1) // num_splits
        end = min((split + 1) * split_size, ends[seq])

        k = np.empty((KEYS, head_dim), np.float32)
        v = np.empty((KEYS, head_dim), np.float32)
        scores = np.empty(KEYS, np.float32)
        highest = np.full(group_size, -1e30, np.float32)
        total = np.zeros(group_size, np.float32)
        acc = np.zeros((group_size, head_dim), np.float32)

        for first_key in range(split * split_size, end, KEYS):
            num_keys = min(KEYS, end - first_key)

            # Look up where each key is: this is what paging costs.
            for i in range(num_keys):
                block = block_tables[seq, (first_key + i) // block_size]
                offset = (first_key + i) % block_size
                to_float32(kv_cache[block, 0, kv_head, offset], is_float16, k[i])
                to_float32(kv_cache[block, 1, kv_head, offset], is_float16, v[i])

            # All query heads of the group use this tile while it is in the cache.
            for g in range(group_size):
                higher = highest[g]
                for i in range(num_keys):
                    score = np.float32(0)
                    for dim in range(head_dim):
                        score += q[seq, first_head + g, dim] * k[i, dim]
                    scores[i] = score * scale
                    higher = max(higher, scores[i])

                # What was summed so far was relative to a lower score: shrink it.
                shrink = math.exp(highest[g] - higher)
                highest[g] = higher
                total[g] *= shrink
                for dim in range(head_dim):
                    acc[g, dim] *= shrink

                for i in range(num_keys):
                    prob = math.exp(scores[i] - higher)
                    total[g] += prob
                    for dim in range(head_dim):
                        acc[g, dim] += prob * v[i, dim]

        for g in range(group_size):
            lse[split, seq, first_head + g] = highest[g] + math.log(total[g])
            weight = 1 / total[g] if total[g] != 0 else np.float32(0)
            for dim in range(head_dim):
                out[split, seq, first_head + g, dim] = acc[g, dim] * weight
