"""Torch's settings, whatever the caller has set."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

LOCK = threading.Lock()
CALLERS: list[tuple[int, bool]] = []


@contextmanager
def own_settings(device: torch.device, num_threads: int = 0) -> Iterator[None]:
    """Torch's settings while an engine is made, and while it computes. The caller may
    have set others: autocast, for example, or another default device. Two belong to the
    process, where several engines may compute at once: the number of threads (0:
    unchanged), and whether new memory is filled. Whoever leaves puts back what the
    first found: the threads at once, the filling when nobody is left.
    """
    torch_fills: Any = torch.utils.deterministic
    is_default = torch.get_default_device().type == "cpu"
    is_gpu = device.type == "cuda"
    with LOCK:
        callers = torch.get_num_threads(), torch_fills.fill_uninitialized_memory
        CALLERS.append(CALLERS[0] if CALLERS else callers)
    try:
        torch_fills.fill_uninitialized_memory = False
        torch.set_num_threads(num_threads or CALLERS[0][0])
        with (torch.inference_mode(), torch.autocast(device.type, enabled=False),
              torch.accelerator.device_index(device.index),
              nullcontext() if is_default else torch.device("cpu"),
              torch.compiler.set_stance("default") if is_gpu else nullcontext()):
            yield
    finally:
        with LOCK:
            num_threads, fills = CALLERS.pop()
            torch.set_num_threads(num_threads)
            torch_fills.fill_uninitialized_memory = fills and not CALLERS
