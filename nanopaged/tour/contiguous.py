"""How K and V were stored before paging: one contiguous piece of memory a request.

This is Orca's way, simulated as the paper describes it: a buddy allocator, and three
policies that differ in how many tokens they reserve for an output of unknown length.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import cycle
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanopaged.tour.workloads import LONGEST, SLOTS, Lengths


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


# (prompt length, output length) -> slots that are reserved
RESERVE: dict[str, Callable[[int, int], int]] = {
    "Orca (max)": lambda prompt, output: LONGEST,
    "Orca (pow2)": lambda prompt, output: min(LONGEST, prompt + power_of_two(output)),
    "Orca (oracle)": lambda prompt, output: prompt + output,  # it knows the future
}


class BuddyAllocator:
    """Pieces of 2^k slots: halved to serve less, joined with their buddy when free."""

    def __init__(self, slots: int) -> None:
        self.free: dict[int, set[int]] = {
            1 << k: set() for k in range(slots.bit_length())
        }
        offset = 0
        for size in reversed(self.free):
            if slots & size:
                self.free[size].add(offset)
                offset += size

    def take(self, size: int) -> int | None:
        """The offset of a piece of `size` slots, cut from the smallest that is free."""
        large_enough = (s for s in self.free if s >= size and self.free[s])
        found = next(large_enough, None)
        if found is None:
            return None
        offset = self.free[found].pop()
        while found > size:
            found //= 2
            self.free[found].add(offset + found)
        return offset

    def give(self, offset: int, size: int) -> None:
        while offset ^ size in self.free[size]:  # its buddy is free
            self.free[size].remove(offset ^ size)
            offset &= ~size
            size *= 2
        self.free[size].add(offset)


class Running(NamedTuple):
    """A request in memory; a heap of them has the one that ends first on top."""

    end: int
    prompt: int
    output: int
    reserved: int
    piece: int
    offset: int


def serve_contiguous(
    lengths: Lengths, reserve: Callable[[int, int], int], slots: int = SLOTS
) -> dict[str, float]:
    """Percent of the slots that hold tokens, and where the others go; mean requests.

    First come, first served, and some request always waits. A step gives every running
    request a token, so between two ends nothing but their lengths changes, and time
    goes from end to end. Measuring begins when twice as many have ended as run: by then
    those that began together are gone.
    """
    allocator = BuddyAllocator(slots)
    queue = cycle(lengths)
    running: list[Running] = []
    totals = np.zeros(5)
    now = steps = finished = warm = 0
    prompt, output = next(queue)
    while not warm or finished < warm + len(lengths):
        reserved = reserve(prompt, output)
        piece = power_of_two(reserved)
        offset = allocator.take(piece)
        if offset is not None:
            heappush(
                running, Running(now + output, prompt, output, reserved, piece, offset)
            )
            prompt, output = next(queue)
            continue

        # Memory is full until the next request ends.
        end = running[0].end
        if not warm and finished > 2 * len(running):
            warm = finished
        if warm:
            totals += (end - now) * mean_slots(running, now, end)
            steps += end - now
        now = end
        while running and running[0].end == now:
            ended = heappop(running)
            allocator.give(ended.offset, ended.piece)
            finished += 1

    tokens, final, reserved_slots, pieces, requests = (totals / steps).tolist()
    parts = {
        "tokens": tokens,
        "reserved": final - tokens,
        "internal": reserved_slots - final,
        "rounding": pieces - reserved_slots,
        "free": slots - pieces,
    }
    return {name: 100 * part / slots for name, part in parts.items()} | {
        "running": requests
    }


def mean_slots(running: list[Running], now: int, end: int) -> NDArray[np.float64]:
    """Means over the steps from `now` to `end`.

    Slots that hold a token, that will ever hold one, that are reserved, and that are
    allocated; and the number of requests.
    """
    final = sum(request.prompt + request.output for request in running)
    missing = sum(request.end - now for request in running)
    tokens = final - missing + len(running) * (end - now - 1) / 2
    reserved = sum(request.reserved for request in running)
    pieces = sum(request.piece for request in running)
    return np.array([tokens, final, reserved, pieces, len(running)])
