"""Compiled loops on as many threads as torch has, and the memory of freed tensors."""

import ctypes
import os
import sys
import threading
from contextlib import suppress
from functools import cache, partial
from types import FunctionType
from typing import Any

import numba
import torch
from numba import njit

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
    """Keep the compiled code on disk for the next start. Do nothing if no folder can be
    written to (RuntimeError), or if Numba is disabled (AttributeError).
    """
    with suppress(RuntimeError, AttributeError):
        kernel.enable_caching()
    return kernel


def on_one_thread(function: Any) -> Any:
    """The same function on a single thread, for small models. They gain nothing from
    more, and on a busy machine threads that wait for each other take very long.
    """
    def run(*arguments: Any) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*arguments)
        finally:
            torch.set_num_threads(before)

    return run


@cache  # once in a process
def prepare_process() -> None:
    """Change what malloc and fork do. An engine on a CPU calls this when it starts."""
    if sys.platform == "linux":
        # Let glibc's malloc keep freed memory, because the next step needs it again. By
        # default large pieces go back to the system, and getting them again takes a
        # tenth of a step.
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
    if sys.platform != "win32":
        # A forked process has one thread. torch would wait for those its parent had,
        # and GNU's OpenMP would end the process.
        os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def give_memory_back() -> None:
    """Return the memory that malloc has kept to the system."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
