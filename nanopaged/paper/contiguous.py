"""How K and V were stored before paging: one contiguous piece of memory per sequence.

This is Orca's memory as the paper describes it: a buddy allocator, and three policies
that differ in how many slots they reserve for an output of unknown length. The rest is
the engine's own scheduler, so nothing except the memory differs.
"""

from collections.abc import Callable
from typing import TypeAlias

from nanopaged.batch import Batch
from nanopaged.block_manager import BlockManager
from nanopaged.config import EngineConfig
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Sequence, SequenceGroup
from nanopaged.tour.kv import LONGEST

Policy: TypeAlias = Callable[[int, int], int]  # tokens in and out -> reserved slots


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


POLICIES: dict[str, Policy] = {
    "Orca (oracle)": lambda prompt, output: prompt + output,  # it knows the future
    "Orca (pow2)": lambda prompt, output: min(LONGEST, prompt + power_of_two(output)),
    "Orca (max)": lambda prompt, output: LONGEST,
}


class BuddyAllocator:
    """Pieces of 2^k slots: halved to serve less, joined with their buddy when free."""

    def __init__(self, slots: int) -> None:
        self.free: dict[int, set[int]] = {  # offsets of free pieces, by size
            1 << k: set() for k in range(slots.bit_length())}
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


class ContiguousScheduler(Scheduler):
    """Admits a group if each of its sequences gets a piece, and keeps it to the end.

    To its block manager a piece is one large block, so no sequence ever needs another.
    """

    def __init__(self, config: EngineConfig, slots: int, policy: Policy) -> None:
        super().__init__(config, BlockManager(2 * config.max_num_seqs, LONGEST, False))
        self.policy = policy
        self.buddies = BuddyAllocator(slots)
        self.pieces: dict[str, list[int]] = {}  # offsets, by request id

    def reserved(self, group: SequenceGroup) -> int:
        """The slots that each sequence of a group asks for."""
        prompt = group.num_prompt_tokens
        return self.policy(prompt, group.max_len - prompt)

    def _admit(self, group: SequenceGroup, batch: Batch) -> None:
        size = power_of_two(self.reserved(group))
        offsets = [self.buddies.take(size) for _ in group.live]
        pieces = [offset for offset in offsets if offset is not None]
        if len(pieces) == len(group.live):
            super()._admit(group, batch)
        if group.request_id in self.running:
            self.pieces[group.request_id] = pieces
        else:
            for offset in pieces:
                self.buddies.give(offset, size)

    def finish(self, seq: Sequence, reason: str) -> None:
        super().finish(seq, reason)
        group = seq.group
        if not group.live:
            for offset in self.pieces.pop(group.request_id):
                self.buddies.give(offset, power_of_two(self.reserved(group)))
