"""Physical blocks: who holds them, which are free, and in which order they are taken.

A block belongs to every sequence that holds a reference to it. Without references it is
free. If it was published, it stays cached while it is free: requests find it by its
tokens (`prefix_cache.py`, which comes next) until it is reused. Blocks that are not in
the prefix cache are taken first, then the least recently freed. The manager knows block
ids and token ids, and never sees a tensor. No other file changes a reference count or a
block table.

The story of `sequence.py`, with block_size=4 and the free blocks 0, 1, 2, 3:

    A arrives: p0 ... p5             [0, 1]   its step publishes block 0, which is full
    B arrives: p0 ... p3, q4, q5     [0, 2]   block 0 has two references now
    B forks, because it has n=2      [0, 2]   its sibling has the same block table
    one of them writes its 7th token [0, 3]   not into block 2, which both share, but
                                              into a copy of it: copy-on-write
    the other writes its own         [0, 2]   it is the only holder of block 2 now
"""

from array import array
from collections import OrderedDict

from nanopaged.prefix_cache import PrefixCache
from nanopaged.sequence import NO_STATES, Sequence, States

# Block ids in the order in which they are taken. An OrderedDict adds at both ends, and
# drops a block from its middle in O(1), when a request finds it in the prefix cache.
FreeList = OrderedDict[int, None]
# Pairs (from, to) of physical blocks: the contents of one are copied to the other.
Moves = list[tuple[int, int]]


class BlockManager:
    """Blocks 0 to num_blocks - 1 are on the device, and the rest are in CPU memory."""

    def __init__(self, num_blocks: int, block_size: int,
                 enable_prefix_caching: bool = True, num_swap_blocks: int = 0) -> None:
        self.num_blocks, self.num_swap_blocks = num_blocks, num_swap_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.reset()

    def reset(self) -> None:
        """Begin empty: all blocks are free, and nothing is cached."""
        ids = range(self.num_blocks + self.num_swap_blocks)
        self.ref_counts = [0 for _ in ids]
        self.free_blocks: FreeList = OrderedDict.fromkeys(ids[: self.num_blocks])
        self.free_swap_blocks: FreeList = OrderedDict.fromkeys(ids[self.num_blocks :])
        self.prefix_cache = PrefixCache(self.block_size, len(ids))

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # rounded up

    def max_blocks(self, num_shared_tokens: int, lengths: list[int]) -> int:
        """The most blocks that sequences of these lengths can need if they share their
        first tokens. Only full blocks can stay shared: into a half-full one, each
        sequence will write its own tokens.
        """
        num_shared = num_shared_tokens // self.block_size
        return num_shared + sum(self.num_blocks_for(n) - num_shared for n in lengths)

    # -- A sequence comes, grows and goes ----------------------------------------------

    def hold(self, seq: Sequence, block_ids: list[int], num_tokens: int,
             states: States = NO_STATES) -> None:
        """Give these blocks to a sequence that has none. They hold the K and V of its
        first `num_tokens` tokens, and `states` are those after these tokens.
        """
        for block_id in block_ids:
            self.free_blocks.pop(block_id, None)  # a cached block may be free
            self.ref_counts[block_id] += 1
        seq.block_table = array("q", block_ids)
        seq.num_computed_tokens, seq.states = num_tokens, states

    def free(self, seq: Sequence) -> None:
        """Drop all blocks of `seq`, the last one first, so the beginning of a sequence
        stays cached longest. None of its tokens counts as computed any more.
        """
        for block_id in reversed(seq.block_table):
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                on_device = block_id < self.num_blocks
                free_list = self.free_blocks if on_device else self.free_swap_blocks
                free_list[block_id] = None
                # Blocks are taken from the front. A block that nobody can find goes to
                # the front, and any other to the back.
                can_find = self.prefix_cache.can_find(block_id)
                free_list.move_to_end(block_id, last=can_find)
        self.hold(seq, [], 0)  # nothing

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all blocks that `parent` has computed, full or not, and its
        states.
        """
        num_tokens = parent.num_computed_tokens
        shared = parent.block_table[: self.num_blocks_for(num_tokens)]
        self.hold(child, list(shared), num_tokens, parent.states)

    def grow(self, seqs: list[Sequence], moves: Moves) -> bool:
        """Give a group's sequences blocks for all tokens before their `computable_end`:
        for the whole prompt, even if it is computed in chunks. If too few are free,
        this returns False and changes nothing.

        A sequence must not write into a block that others hold. So it gets a copy, and
        `moves` tells the step to make it. The last holder of a block writes in place.
        Only the block that a sequence writes next can be shared. `fork` shares only
        blocks that hold a computed token, so each later block has one owner.
        """
        size = self.block_size
        if len(seqs) == 1 and len(seqs[0].block_table) * size >= seqs[0].computable_end:
            # The usual case, decided fast. A lone sequence, or a leader before the
            # fork, shares only full blocks, and never writes into those: no copies.
            return True
        # num_needed: all blocks from `first` on, as if each sequence owned its own.
        # held: those of them that exist. A shared one counts once, because exactly one
        # of its holders keeps it. The difference comes from the free list. For example,
        # two siblings that share a half-full block need 2, hold 1, and take 1.
        num_needed = 0
        held: set[int] = set()
        for seq in seqs:
            first = seq.num_computed_tokens // size  # the logical block it writes next
            num_needed += self.num_blocks_for(seq.computable_end) - first
            held.update(seq.block_table[first:])
        if num_needed - len(held) > len(self.free_blocks):
            return False

        for seq in seqs:
            table, first = seq.block_table, seq.num_computed_tokens // size
            if first < len(table) and self.ref_counts[table[first]] > 1:
                shared = table[first]
                self.ref_counts[shared] -= 1
                table[first] = self._take(self.free_blocks)
                moves.append((shared, table[first]))
            while len(table) * size < seq.computable_end:
                table.append(self._take(self.free_blocks))
        return True

    def mark_computed(self, seq: Sequence, end: int) -> None:
        """Count all tokens before position `end` as computed, and publish the blocks
        that are now full.

        They count before they are computed. So a request that is admitted later in this
        step finds blocks whose K and V have not been written yet. That is safe, because
        in every layer the step stores all new K and V before it reads any, and a GPU
        runs steps in the order in which they are launched. If a step fails, the whole
        prefix cache is forgotten.
        """
        # (before, after) -> (after, {}): see `States`.
        seq.num_computed_tokens, seq.states = end, (seq.states[1], {})
        if self.enable_prefix_caching and seq.group.uses_prefix_cache:
            self.prefix_cache.publish(seq)

    def _take(self, free_list: FreeList, ref_count: int = 1) -> int:
        """Take the first block of a free list, and forget what it holds."""
        block_id, _ = free_list.popitem(last=False)
        self.prefix_cache.forget(block_id)
        self.ref_counts[block_id] = ref_count
        return block_id

    # -- Swap --------------------------------------------------------------------------

    def swap(self, seqs: list[Sequence], target: FreeList) -> Moves:
        """Move the blocks of these sequences to CPU memory, or back: `target` has the
        free blocks there. If they are too few, this returns no moves and changes
        nothing. A block that several sequences share moves once.

        The way of a swap: `Scheduler._preempt` asks for it, the moves go into the
        batch, and `ModelRunner.run` copies. `Scheduler._admit` brings the blocks back.
        They have other ids then, which the prefix cache does not know, so the next
        `mark_computed` publishes them again.
        """
        held = dict.fromkeys(each for seq in seqs for each in seq.block_table)
        if len(held) > len(target):
            return []
        # `hold` counts the holders, below.
        moved = {block_id: self._take(target, ref_count=0) for block_id in held}
        for seq in seqs:
            table, states = [moved[each] for each in seq.block_table], seq.states
            num_tokens = seq.num_computed_tokens
            self.free(seq)
            self.hold(seq, table, num_tokens, states)
        return list(moved.items())
