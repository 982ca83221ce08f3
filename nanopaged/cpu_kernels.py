"""PagedAttention in plain loops, compiled by Numba: read this before `kernels.py`.

On a CPU this computes the decodes of a step: the one new query of a sequence attends to
all of its keys. `NumbaAttention` in `attention.py` calls it; the shapes are explained
there. With `NUMBA_DISABLE_JIT=1` this is plain Python, and a debugger can step through
it.

What a query q_i computes is equation 4 of the paper, where K_j and V_j are the keys and
values of block j, and d is head_dim:

    A_ij = exp(q_i^T K_j / sqrt(d)) / sum over blocks t of exp(q_i^T K_t / sqrt(d))
    o_i  = sum over blocks j of A_ij V_j

A sum over a block includes each of its keys. The denominator is known only after the
last block, so the kernel sums up numerators and denominators separately, and divides at
the end. The exponential of a large score would overflow. So both sums are relative to
the highest score so far, and shrink when a block has a higher one. This is the online
softmax of Milakov and Gimelshein. For instance, if two keys have the scores 1 and 3, and
the third is in the next block and has 5:

    after the first block    total = e^(1-3) + e^0       acc = e^-2 v1 + v2
    both times e^(3-5)       total = e^-4 + e^-2         acc = e^-4 v1 + e^-2 v2
    after the second block   total = e^-4 + e^-2 + e^0   acc = e^-4 v1 + e^-2 v2 + v3

and the result is acc / total.
"""
# mypy: ignore-errors

import ctypes
import os
from collections import deque
from contextlib import suppress
from functools import partial

import numpy as np
import torch
from numba import njit


# Sums may be computed in any order, which vector instructions need. The flags that would
# rule out NaN and infinity are left out.
@njit(nogil=True, fastmath={"reassoc", "contract", "arcp", "nsz"})
def run_programs(stride, q, kv_cache, block_tables, seqs, ends, out, first):
    """Run the programs first, first + stride, first + 2 * stride, ... A program, as
    Triton calls it, here computes one KV head of one decode.

    q, out        [num_decodes, num_kv_heads, group_size, head_dim], float32; q is
                  already divided by sqrt(d)
    kv_cache      [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables  [num_seqs, max_blocks]
    seqs          [num_decodes]: which sequence each decode belongs to
    ends          [num_seqs]: number of keys; nothing after them is read
    """
    num_decodes, num_kv_heads, group_size, head_dim = q.shape
    block_size = kv_cache.shape[3]
    scores = np.empty(block_size, np.float32)

    # Neighbouring programs are run by different threads, which so share the heads of a
    # long sequence.
    for program in range(first, num_decodes * num_kv_heads, stride):
        decode, kv_head = divmod(program, num_kv_heads)
        block_table = block_tables[seqs[decode]]
        end = ends[seqs[decode]]
        highest = np.full(group_size, -1e30, np.float32)  # -inf minus -inf is NaN
        total = np.zeros(group_size, np.float32)
        acc = np.zeros((group_size, head_dim), np.float32)

        for j in range((end + block_size - 1) // block_size):
            k = kv_cache[block_table[j], 0, kv_head]  # [block_size, head_dim]
            v = kv_cache[block_table[j], 1, kv_head]
            num_keys = min(block_size, end - j * block_size)

            # All query heads of the group use the block while it is in the CPU's cache.
            for g in range(group_size):
                higher = highest[g]
                for key in range(num_keys):
                    score = np.float32(0)
                    for dim in range(head_dim):
                        score += q[decode, kv_head, g, dim] * to_float32(k[key, dim])
                    scores[key] = score
                    higher = max(higher, score)

                shrink = np.exp(highest[g] - higher)
                highest[g] = higher
                total[g] *= shrink
                for dim in range(head_dim):
                    acc[g, dim] *= shrink

                for key in range(num_keys):
                    prob = np.exp(scores[key] - higher)
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


# -- The rest is about speed, and can be skipped ---------------------------------------

# The next start finds the compiled code, unless no folder for it can be written, or the
# function is plain Python.
with suppress(RuntimeError, AttributeError):
    run_programs.enable_caching()

PROCESS = ctypes.CDLL(None)  # the functions of all libraries that this process uses


def paged_attention(q, kv_cache, block_tables, seqs, ends):
    """Run the kernel on all CPU cores. Arguments and result: see `run_programs`.

    After each operation torch's threads spin for some milliseconds, ready for the next
    one. Threads of our own, or Numba's, would compete with them for the cores. So the
    kernel runs on torch's threads: each takes a share of the programs, then the next,
    until none is left. Starting a share costs some microseconds, so few keys are one.

    Python calls signal handlers between any two lines of Python, and an exception from
    there, such as Ctrl-C, would be lost if C had called those lines. So the threads call
    nothing but functions written in C: `extend` pulls shares out of `map`.
    """
    out = np.empty_like(q)
    num_keys = q.shape[1] * ends[seqs].sum()  # that all programs read
    num_shares = torch.get_num_threads() * min(4, num_keys // 2048) or 1
    run = partial(run_programs, num_shares, q, kv_cache, block_tables, seqs, ends, out)
    done = deque()
    work = partial(done.extend, map(run, range(num_shares)))
    if num_shares > 1:
        # What a compiler makes of "#pragma omp parallel", from the library that torch
        # uses. The first 0 means all of torch's threads.
        PROCESS.GOMP_parallel(ctypes.CFUNCTYPE(None)(work), None, 0, 0)
    work()  # on this thread, what is left
    if len(done) < num_shares:
        raise RuntimeError("the kernel failed; Python has printed why")
    return out


def keep_freed_memory():
    """Let glibc's malloc keep what is freed, because the next step needs it again.

    By default large pieces go back to the system, and getting their pages again takes a
    tenth of every step.
    """
    PROCESS.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
    PROCESS.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD


# A forked child has none of the threads: torch would wait for them forever.
os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))
