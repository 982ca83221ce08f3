"""PagedAttention in plain loops, compiled by Numba: read this before `kernels.py`.

On a CPU this computes decodes and short chunks: each query attends to the keys of its
sequence, from position 0 to its own. `NumbaAttention` in `attention.py` calls it; the
shapes are explained there. With `NUMBA_DISABLE_JIT=1` it is plain Python, and you can
step through it with a debugger.

Equation 4 of the PagedAttention paper (Kwon et al. 2023) says what a query q_i
computes. K_j and V_j are the keys and values of block j, and d is head_dim:

    A_ij = exp(q_i^T K_j / sqrt(d)) / sum over blocks t of exp(q_i^T K_t / sqrt(d))
    o_i  = sum over blocks j of A_ij V_j

where a sum over blocks also runs over the keys in each block. The denominator is known
only after the last block, so the loop adds up the numerator (`acc`) and the denominator
(`total`) separately, and divides at the end. The exponential of a high score would
overflow, so both are relative to the highest score so far. When a block has a higher
one, they are scaled down. This is the online softmax of Milakov and Gimelshein.

For example, let one block hold keys with the scores 1 and 3, and the next block a key
with the score 5:

    first block    total = e^(1-3) + e^(3-3)           acc = e^-2 v_1 + v_2
    shrink         total = e^(3-5) (e^-2 + 1)          acc = e^-4 v_1 + e^-2 v_2
    second block   total = e^-4 + e^-2 + e^(5-5)       acc = e^-4 v_1 + e^-2 v_2 + v_3
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


# The flags allow sums in any order, which vector instructions need. Flags that rule out
# NaN and infinity are left out.
@njit(nogil=True, fastmath={"reassoc", "contract", "arcp", "nsz"})
def run_programs(
        stride, out, q, kv_cache, block_tables, table_starts, num_keys, first):
    """Run the programs `first`, `first + stride`, and so on. A program (Triton's word)
    computes one KV head for one query. `first` is the last argument because `map`, in
    `paged_attention`, supplies it.

    out, q        [num_queries, num_kv_heads, group_size, head_dim], float32; q is
                  already divided by sqrt(d)
    kv_cache      [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables  [num_table_blocks]: one after another
    table_starts  [num_queries]: where the block table of each query's sequence starts
    num_keys      [num_queries]: how many keys each sees; nothing after them is read
    """
    num_queries, num_kv_heads, group_size, head_dim = q.shape
    block_size = kv_cache.shape[3]
    scores = np.empty(block_size, np.float32)

    for program in range(first, num_queries * num_kv_heads, stride):
        query, kv_head = divmod(program, num_kv_heads)
        block_table = block_tables[table_starts[query] :]
        end = num_keys[query]
        highest = np.full(group_size, -1e30, np.float32)  # below any score
        total = np.zeros(group_size, np.float32)
        acc = np.zeros((group_size, head_dim), np.float32)

        for j in range((end + block_size - 1) // block_size):
            k = kv_cache[block_table[j], 0, kv_head]  # [block_size, head_dim]
            v = kv_cache[block_table[j], 1, kv_head]
            num_here = min(block_size, end - j * block_size)  # keys in this block

            # All query heads of the group use the block while it is in the processor's
            # cache. One head after the other would take about twice as long.
            for g in range(group_size):
                higher = highest[g]
                for key in range(num_here):
                    score = np.float32(0)
                    for dim in range(head_dim):
                        score += q[query, kv_head, g, dim] * to_float32(k[key, dim])
                    scores[key] = score
                    higher = max(higher, score)

                # If this block has a higher score, shrink the sums so far.
                shrink = np.exp(highest[g] - higher)
                highest[g] = higher
                total[g] *= shrink
                for dim in range(head_dim):
                    acc[g, dim] *= shrink

                for key in range(num_here):
                    prob = np.exp(scores[key] - higher)
                    total[g] += prob
                    for dim in range(head_dim):
                        acc[g, dim] += prob * to_float32(v[key, dim])

        out[query, kv_head] = acc / total.reshape(-1, 1)


@njit(inline="always")
def to_float32(number):
    """float32, or the bits of bfloat16, which are the upper half of a float32."""
    if isinstance(number, np.uint16):
        return np.uint32(np.uint32(number) << 16).view(np.float32)
    return number


# -- The rest is about speed, and can be skipped ---------------------------------------

# Keep the compiled code for the next start, unless there is no folder where it can be
# written (RuntimeError) or the function is plain Python (AttributeError).
with suppress(RuntimeError, AttributeError):
    run_programs.enable_caching()

PROCESS = ctypes.CDLL(None)  # the functions of all libraries in this process


def paged_attention(num_reads, q, *arrays):
    """Run all programs on torch's threads; together they read `num_reads` keys. The
    other arguments are those of `run_programs`, and its `out` is returned.

    After each operation torch's threads keep spinning for a few milliseconds, ready for
    the next one. Threads of our own would compete with them for the cores. So torch's
    threads run the kernel: each takes a share of the programs, then the next share,
    until none is left. A share has a fixed cost, so there is only one if there are few
    keys, and otherwise at most four for each thread.

    The threads must not run any Python code. Python would call signal handlers there,
    and an exception from a handler, such as Ctrl-C, would get lost in the C code that
    started the thread's work. So they run `extend`, which pulls the shares through
    `map`. Both are written in C: between two shares a thread holds Python's lock, but
    runs no Python code. `run_programs` releases the lock (nogil), so the shares run in
    parallel.
    """
    out = np.empty_like(q)
    num_shares = max(1, torch.get_num_threads() * min(4, num_reads // 2048))
    run = partial(run_programs, num_shares, out, q, *arrays)
    done = deque()
    work = partial(done.extend, map(run, range(num_shares)))
    if num_shares > 1:
        # This is what "#pragma omp parallel" calls, in the OpenMP library that torch
        # uses. The first 0 stands for all of its threads.
        PROCESS.GOMP_parallel(ctypes.CFUNCTYPE(None)(work), None, 0, 0)
    work()  # the only share; if threads took the shares, usually none is left
    if len(done) < num_shares:
        raise RuntimeError("the CPU kernel failed; see the traceback above")
    return out


# Let glibc's malloc keep freed memory, because the next step needs it again. By default
# large pieces go back to the system, and getting them again takes a tenth of a step.
PROCESS.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
PROCESS.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD

# A forked process has only one thread. torch would wait for all those its parent had.
os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))
