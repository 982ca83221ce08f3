"""Compiled loops on as many threads as torch has, and the memory of freed tensors."""

import ctypes
import os
import sys
import threading
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import torch
import xxhash
from numba import njit

from nanopaged import paged_attention

# Numba divides work among its threads by OpenMP (the library libgomp), by TBB, or by a
# queue of its own. After each operation torch's threads spin for a while, ready for the
# next one, and compete with Numba's for the cores. With OpenMP that costs nothing that
# we could measure, but with the queue a step takes up to 1.5 times as long.
LAYERS = ["omp", "tbb", "workqueue"]
CONFIG: Any = numba.config
SOURCES = Path(paged_attention.__file__), Path(__file__).with_name("kernels.py")
LOCK = threading.RLock()  # Numba's queue fails if two threads use it at once


def run(kernel: Any, *arguments: Any) -> None:
    """Run a kernel on as many threads as torch has."""
    num_threads = min(torch.get_num_threads(), CONFIG.NUMBA_NUM_THREADS)
    if num_threads == 1:
        kernel(*arguments)
        return
    with LOCK:
        numba.set_num_threads(num_threads)
        with_threads(kernel)(*arguments)


@cache
def with_threads(kernel: Any) -> Any:
    """The same kernel, in which `prange` divides its range among threads.

    (The plain one does not even enter OpenMP, so a forked process can run it.)
    """
    CONFIG.THREADING_LAYER_PRIORITY = LAYERS
    source = getattr(kernel, "py_func", kernel)  # if Numba is disabled: plain Python
    function = FunctionType(source.__code__, source.__globals__)
    function.__qualname__ += "_with_threads"  # its name in Numba's cache on disk
    return kept_on_disk(njit(parallel=True, nogil=True)(function))


def kept_on_disk(kernel: Any) -> Any:
    """Keep the compiled code on disk, as `njit(cache=True)` does. But do nothing if no
    folder can be written to (RuntimeError), if Numba is disabled (AttributeError), or
    if there are no sources (OSError).
    """
    with suppress(RuntimeError, AttributeError, OSError):
        kernel.py_func.__qualname__ += version()
        kernel.enable_caching()
    return kernel


@cache
def version() -> str:
    """Of the kernels. Numba notices when a kernel's own file has changed, but not that
    of what it calls. So its name in the cache on disk depends on these files.
    """
    return xxhash.xxh3_64_hexdigest(b"".join(map(Path.read_bytes, SOURCES)))


@cache  # once in a process
def prepare_process() -> None:
    """Change what malloc and fork do. Call this only after the model has been loaded:
    malloc would also keep what loading frees, and that is not needed again.
    """
    if sys.platform == "linux":
        # Let glibc's malloc keep freed memory, because the next step needs it again. By
        # default large pieces go back to the system, and getting them again takes a
        # tenth of a step.
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
    if sys.platform != "win32":
        # A forked process has one thread. torch would wait for its parent's threads,
        # and GNU's OpenMP would end the process.
        os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def give_memory_back() -> None:
    """Return to the system what malloc has kept."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
