"""Attention on a CPU: the loops of `cpu_kernels.py`, on several threads."""

import ctypes
import os
import sys
import threading
from contextlib import suppress
from functools import cache, partial
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from nanopaged import product_kernel
from nanopaged.attention import Ints, Metadata, TorchAttention, locate
from nanopaged.cpu_kernels import run_program

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
        is_all = len(tokens) == len(q)  # then no query has to be copied
        queries = (q if is_all else q[tokens]).float()
        # [num_queries, num_kv_heads, group_size, head_dim]
        queries = self.scale * queries.unflatten(1, (self.num_kv_heads, -1))
        # NumPy has no bfloat16, so it gets the bits.
        is_bfloat16 = kv_cache.dtype == torch.bfloat16
        bits = kv_cache.view(torch.uint16) if is_bfloat16 else kv_cache
        attended = torch.empty_like(queries)
        # With fewer keys, waking the threads would take longer than reading them.
        is_large = self.num_kv_heads * int(num_keys.sum()) > 4096
        run(run_programs, is_large, attended.numpy(), queries.numpy(),
            bits.numpy(), metadata.block_tables.numpy(), table_starts.numpy(),
            num_keys.numpy())
        attended = attended.flatten(1).to(q.dtype)
        if is_all:
            return attended
        out = self.attend_gathered(q, kv_cache, metadata, MIN_QUERIES)
        out[tokens] = attended
        return out


# -- Threads and memory ----------------------------------------------------------------

@njit(nogil=True)
def run_programs(out: Any, q: Any, *others: Any) -> None:
    """Run all programs. `prange` is a `range` that may be divided among threads."""
    num_queries, num_kv_heads, _, _ = q.shape
    for program in prange(num_queries * num_kv_heads):
        # Head by head, so that each thread gets short sequences as well as long ones.
        kv_head, query = divmod(np.int64(program), num_queries)  # it is unsigned
        run_program(query, kv_head, out, q, *others)


# Numba divides work among its threads by OpenMP (the library libgomp), by TBB, or by a
# queue of its own. After each operation torch's threads spin for a while, ready for the
# next one, and compete with Numba's for the cores. With OpenMP that costs nothing that
# we could measure, but with the queue a step takes up to 1.5 times as long.
CONFIG: Any = numba.config
CONFIG.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
LOCK = threading.RLock()  # Numba's queue fails if two threads use it at once


def run(kernel: Any, is_large: bool, *arrays: Any) -> None:
    """Run a kernel. If there is much to do, use as many threads as torch."""
    num_threads = min(torch.get_num_threads(), CONFIG.NUMBA_NUM_THREADS)
    if num_threads == 1 or not is_large:
        kernel(*arrays)
        return
    with LOCK:
        numba.set_num_threads(num_threads)
        with_threads(kernel)(*arrays)


@cache
def with_threads(kernel: Any) -> Any:
    """The same kernel, in which `prange` divides its range among threads."""
    source = getattr(kernel, "py_func", kernel)
    function = FunctionType(source.__code__, source.__globals__)
    function.__qualname__ += "_with_threads"  # so it has its own place in the cache
    return keep(njit(parallel=True, nogil=True)(function))


def keep(kernel: Any) -> Any:
    """Keep the compiled code for the next start, unless there is no folder where it can
    be written (RuntimeError) or the function is plain Python (AttributeError).
    """
    with suppress(RuntimeError, AttributeError):
        kernel.enable_caching()
    return kernel


keep(run_programs)
keep(product_kernel.run_products)

if sys.platform == "linux":
    # Let glibc's malloc keep freed memory, because the next step needs it again. By
    # default large pieces go back to the system, and getting them again takes a tenth
    # of a step.
    libc = ctypes.CDLL(None)
    libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
    libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD

if sys.platform != "win32":
    # A forked process has one thread. torch would wait for those its parent had, and
    # GNU's OpenMP would end the process.
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))
