"""PagedAttention in plain loops, by Numba: read this before Triton's `kernels.py`.

`NumbaAttention` in `attention.py` calls it; the shapes are explained there. Under
`NUMBA_DISABLE_JIT=1` this is plain Python, and a debugger steps through it.

A query q_i attends to the blocks of its sequence, one after the other: K_j and V_j are
the keys and values of block j. This is equation 4 of the paper:

    A_ij = exp(q_i^T K_j / sqrt(d)) / sum over blocks t of exp(q_i^T K_t / sqrt(d))
    o_i  = sum over blocks j of A_ij V_j

where the sum over a block is also one over its keys. The denominator is known only
after the last block. So numerator and denominator are both summed up, relative to the
highest score so far, and divided at the end. This is the online softmax of Milakov and
Gimelshein.
"""
# mypy: ignore-errors

import ctypes
import math

import numpy as np
import torch
from numba import njit

# Sums may be reordered, or else they could not use vector instructions. The flags that
# assume there is no NaN and no infinity are left out.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
PROCESS = ctypes.CDLL(None)  # the functions of all its libraries


@njit(cache=True, nogil=True, fastmath=FASTMATH, error_model="numpy")
def run_programs(first, stride, q, kv_cache, block_tables, seqs, ends, out):
    """Run the programs first, first + stride, first + 2 * stride, .. A program, as
    Triton calls it, here computes one KV head of one decode (a sequence of one query).

    q, out        [num_decodes, num_kv_heads, group_size, head_dim], float32; q is
                  divided by sqrt(d) already
    kv_cache      [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables  [num_seqs, max_blocks]
    seqs          [num_decodes]: the sequence of each
    ends          [num_seqs]: number of keys; nothing after them is read
    """
    num_decodes, num_kv_heads, group_size, head_dim = q.shape
    block_size = kv_cache.shape[3]
    scores = np.empty(block_size, np.float32)
    highest = np.empty(group_size, np.float32)
    total = np.empty(group_size, np.float32)
    acc = np.empty((group_size, head_dim), np.float32)

    # The heads of a long sequence go to different threads.
    for program in range(first, num_decodes * num_kv_heads, stride):
        decode = program // num_kv_heads
        kv_head = program % num_kv_heads
        block_table = block_tables[seqs[decode]]
        end = ends[seqs[decode]]
        highest[:] = -1e30  # not -inf: that minus itself is not a number
        total[:] = 0
        acc[:] = 0

        for j in range((end + block_size - 1) // block_size):
            k = kv_cache[block_table[j], 0, kv_head]  # [block_size, head_dim]
            v = kv_cache[block_table[j], 1, kv_head]
            num_keys = min(block_size, end - j * block_size)

            # All heads of the group use the block while it is in the processor's cache.
            for g in range(group_size):
                query = q[decode, kv_head, g]
                higher = highest[g]
                for key in range(num_keys):
                    score = np.float32(0)
                    for dim in range(head_dim):
                        score += query[dim] * to_float32(k[key, dim])
                    scores[key] = score
                    higher = max(higher, score)

                # The sums so far are relative to a lower score: shrink them.
                shrink = math.exp(highest[g] - higher)
                highest[g] = higher
                total[g] *= shrink
                for dim in range(head_dim):
                    acc[g, dim] *= shrink

                for key in range(num_keys):
                    prob = math.exp(scores[key] - higher)
                    total[g] += prob
                    for dim in range(head_dim):
                        acc[g, dim] += prob * to_float32(v[key, dim])

        out[decode, kv_head] = acc / total.reshape(-1, 1)


@njit(inline="always")
def to_float32(number):
    """float32, or the bits of bfloat16, which are the upper half of a float32."""
    if isinstance(number, np.uint16):
        return np.uint32(np.uint32(number) << 16).view(np.float32)
    return number


def keep_freed_memory():
    """Let glibc's malloc keep what is freed: the next step needs it again.

    By default large pieces go back to the system, and getting their pages again takes a
    tenth of every step. See M_TRIM_THRESHOLD (-1) and M_MMAP_THRESHOLD (-3) in
    mallopt(3).
    """
    for parameter in (-1, -3):
        PROCESS.mallopt(parameter, 1 << 30)


def paged_attention(num_keys, *arrays):
    """All decodes of a step, which read about `num_keys` keys. The other arguments are
    those of `run_programs`.

    After an operation torch's threads do not sleep, they spin for some milliseconds.
    Threads of our own would have to fight them for the cores, so the kernel runs on the
    very same threads: each takes the next share of the programs until none are left.
    A call takes its time, too, so a few keys are one share.
    """
    num_shares = torch.get_num_threads() * min(4, num_keys // 2048) or 1
    firsts = iter(range(num_shares))
    errors = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def work(_):
        try:
            for first in firsts:
                run_programs(first, num_shares, *arrays)
        except BaseException as error:  # Ctrl-C, too: C code would drop it
            errors.append(error)

    # What a compiler makes of "#pragma omp parallel", from torch's own library.
    PROCESS.GOMP_parallel(work, None, 0, 0)  # the first 0: all of torch's threads
    if errors:
        raise errors[0]
