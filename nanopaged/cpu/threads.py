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
import numpy as np
import torch
import xxhash
from numba import njit, prange
from torch import Tensor

from nanopaged import paged_attention

# Numba divides work among its threads by OpenMP (the library libgomp), by TBB, or by a
# queue of its own. After each operation torch's threads spin for a while, ready for the
# next one, and compete with Numba's for the cores. With OpenMP that costs nothing that
# we could measure, but with the queue a step takes up to 1.5 times as long. On a Mac,
# a second OpenMP library beside torch's would end the process.
numba.config.THREADING_LAYER_PRIORITY = (
    ["workqueue"] if sys.platform == "darwin" else ["omp", "tbb", "workqueue"])
SOURCES = [Path(paged_attention.__file__), *sorted(Path(__file__).parent.glob("*.py"))]
LOCK = threading.RLock()  # Numba's queue fails if two threads use it at once


def run(program: Any, count: int, *arguments: Any) -> None:
    """Call program(i, *arguments) for each i below `count`, on as many threads as torch
    has. `program` is a function that Numba compiles. It gets tensors as arrays.
    """
    arrays = [bits(each) if isinstance(each, Tensor) else each for each in arguments]
    num_threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    if num_threads == 1:
        # This does not even enter OpenMP, so a forked process can run it.
        loop(program, parallel=False)(count, *arrays)
        return
    with LOCK:
        numba.set_num_threads(num_threads)
        loop(program, parallel=True)(count, *arrays)


def bits(x: Tensor) -> Any:
    """A tensor as an array. NumPy has no bfloat16, so it gets the bits (uint16)."""
    x = x.contiguous()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


class Cache(numba.core.caching.FunctionCache):  # type: ignore
    """What Numba keeps on disk. If it cannot be read, perhaps because the disk was full
    when it was written, it is forgotten, and Numba compiles again. If it cannot be
    written, this process does without.
    """

    def load_overload(self, *key: Any) -> Any:
        with suppress(Exception):
            return super().load_overload(*key)
        with suppress(OSError):
            self.flush()

    def save_overload(self, *compiled: Any) -> None:
        with suppress(OSError):
            super().save_overload(*compiled)


@cache
def loop(program: Any, parallel: bool) -> Any:
    """`run_programs` for this program, compiled: a copy of that function, whose global
    `program` is this one, so that Numba compiles a loop that calls it directly.

    The compiled code is kept on disk, much as `njit(cache=True)` does it. It is not if
    no folder can be written to (RuntimeError), if Numba is disabled (AttributeError),
    or if there are no sources (OSError).
    """
    function = FunctionType(run_programs.__code__, globals() | {"program": program})
    kernel: Any = njit(parallel=parallel, nogil=True)(function)
    with suppress(RuntimeError, AttributeError, OSError):
        # Numba would not notice that a program has changed, so the name on disk depends
        # on the sources of all programs.
        sources = xxhash.xxh3_64_hexdigest(b"".join(map(Path.read_bytes, SOURCES)))
        function.__qualname__ = f"{program.__name__}_{parallel}_{sources}"
        kernel._cache = Cache(function)
    return kernel


def program(i: np.int64, *arguments: Any) -> None:
    """Stands for the program that `loop` puts in its place."""


def run_programs(count: int, *arguments: Any) -> None:
    """Run all programs. `prange` is a `range` that may be divided among threads."""
    for i in prange(count):
        program(np.int64(i), *arguments)  # (Numba's own i is unsigned.)


@cache  # once in a process
def prepare_process() -> None:
    """Change what malloc and fork do. Call this only after the model has been loaded:
    malloc would also keep what loading frees, and that is not needed again.
    """
    if sys.platform == "linux":
        # Let glibc's malloc keep freed memory, because the next step needs it again. By
        # default large pieces go back to the system, and getting them again takes a
        # tenth of a step.
        # Other C libraries have no such function. Then `max` takes its place, and does
        # nothing.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", max)
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
    if sys.platform != "win32":
        # A forked process has one thread. torch would wait for its parent's threads,
        # and GNU's OpenMP would end the process.
        os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def give_memory_back() -> None:
    """Return to the system what malloc has kept."""
    if sys.platform == "linux":  # where it is missing, `abs` does nothing
        getattr(ctypes.CDLL(None), "malloc_trim", abs)(0)
