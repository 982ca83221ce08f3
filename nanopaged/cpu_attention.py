"""Attention on a CPU: the loops of `cpu_kernels.py`, on several threads."""

import ctypes
import os
from collections import deque
from contextlib import suppress
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopaged import cpu_kernels, product_kernel
from nanopaged.attention import Ints, Metadata, TorchAttention, locate

MIN_QUERIES = 9  # measured: with up to 8 queries, the kernel is usually faster


class NumbaAttention(TorchAttention):
    """`cpu_kernels.py` computes decodes and short chunks, and torch the rest.

    A decode uses every key for only one query, so gathering K and V first, as torch
    needs them, would take longer than the attention. For a long chunk it pays off.
    """

    def plan(self, counts: Ints, ends: Ints) -> Ints:
        """[3, num_queries], the queries for the kernel: which token each of them is,
        where its block table starts, and how many keys it sees.
        """
        at = locate(counts, ends, self.block_size)
        plan = np.stack((np.arange(len(at.seqs)), at.table_starts, at.positions + 1))
        return plan[:, counts[at.seqs] < MIN_QUERIES]

    def attend(self, q: Tensor, kv_cache: Tensor, metadata: Metadata) -> Tensor:
        tokens, table_starts, num_keys = metadata.plan
        num_reads = self.num_kv_heads * int(num_keys.sum())
        is_all = len(tokens) == len(q)  # then no query has to be copied
        queries = (q if is_all else q[tokens]).float()
        # [num_queries, num_kv_heads, group_size, head_dim]
        queries = self.scale * queries.unflatten(1, (self.num_kv_heads, -1))
        # NumPy has no bfloat16, so it gets the bits.
        is_bfloat16 = kv_cache.dtype == torch.bfloat16
        bits = kv_cache.view(torch.uint16) if is_bfloat16 else kv_cache
        attended = torch.from_numpy(paged_attention(
            num_reads, queries.numpy(), bits.numpy(), metadata.block_tables.numpy(),
            table_starts.numpy(), num_keys.numpy()))
        attended = attended.flatten(1).to(q.dtype)
        if is_all:
            return attended
        out = self.attend_gathered(q, kv_cache, metadata, MIN_QUERIES)
        out[tokens] = attended
        return out


# -- Threads and memory ----------------------------------------------------------------

# Keep the compiled code for the next start, unless there is no folder where it can be
# written (RuntimeError) or the function is plain Python (AttributeError).
with suppress(RuntimeError, AttributeError):
    cpu_kernels.run_programs.enable_caching()
    product_kernel.run_products.enable_caching()

PROCESS = ctypes.CDLL(None)  # the functions of all libraries in this process


def paged_attention(num_reads: int, q: Any, *arrays: Any) -> Any:
    """Run all programs; together they read `num_reads` keys. The other arguments are
    those of `run_programs`, and its `out` is returned.

    A portion has a fixed cost, so there is only one if there are few keys, and
    otherwise at most four for each thread.
    """
    out = np.empty_like(q)
    num_portions = max(1, torch.get_num_threads() * min(4, num_reads // 2048))
    run_portions(cpu_kernels.run_programs, num_portions, out, q, *arrays)
    return out


def run_portions(kernel: Any, num_portions: int, *arrays: Any) -> None:
    """Run a kernel on torch's threads, in portions.

    After each operation torch's threads keep spinning for a few milliseconds, ready for
    the next one. Threads of our own would compete with them for the cores. So torch's
    threads run the kernel: each takes a portion of the work, then the next one, until
    none is left.

    In effect, all threads run this loop together, and each takes the next i:

        for i in range(num_portions):
            done.append(kernel(i, num_portions, *arrays))

    But they must not run any Python code. Python would call signal handlers there, and
    an exception from a handler, such as Ctrl-C, would get lost in the C code that
    started the thread's work. So the loop is `extend`, which pulls the calls through
    `map`. Both are written in C. A thread holds the GIL while it takes the next i, so
    no two get the same one. A kernel releases it (nogil), so portions run in parallel.
    """
    same = map(repeat, (num_portions, *arrays))  # arguments of every portion
    done: deque[None] = deque()
    work = partial(done.extend, map(kernel, range(num_portions), *same))
    if num_portions > 1:
        # This is what "#pragma omp parallel" calls, in the OpenMP library that torch
        # uses. The first 0 stands for all of its threads.
        PROCESS.GOMP_parallel(ctypes.CFUNCTYPE(None)(work), None, 0, 0)
    work()  # the only portion; if threads took them, usually none is left
    if len(done) < num_portions:
        raise RuntimeError("the CPU kernel failed; see the traceback above")


# Let glibc's malloc keep freed memory, because the next step needs it again. By default
# large pieces go back to the system, and getting them again takes a tenth of a step.
PROCESS.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
PROCESS.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD

# A forked process has only one thread. torch would wait for all those its parent had.
os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))
