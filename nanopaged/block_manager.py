"""Physical blocks: who holds them, which are free, and what the free ones still hold.

A block belongs to every sequence that holds a reference to it. With a reference count
of 0 it is free *and still cached*: it waits in the free list until it is taken for
other tokens. Blocks that nobody can find again are taken first, then the least recently
used. The manager deals in block ids and token ids and never sees a tensor. Nobody else
changes a reference count or a block table.

An example with block_size=4 and the free blocks 0, 1, 2, 3:

    a prompt of 6 tokens comes       [0, 1]   its step publishes block 0, which is full
    one with the same first 4 tokens [0, 2]   block 0 has two references now
    the first sequence forks         [0, 1]   its child has the same block table
    one of them writes its 7th token [0, 3]   not into block 1, which both share, but
                                              into a copy of it: copy-on-write
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

import xxhash

from nanopaged.sequence import Sequence

# Block ids in the order in which they are taken. An OrderedDict without values can also
# drop a block from its middle in O(1): the prefix cache revives free blocks.
FreeList: TypeAlias = OrderedDict[int, None]
# Pairs (from, to) of physical blocks: the contents of one are copied to the other.
Moves: TypeAlias = list[tuple[int, int]]
# What a full block holds: the name of the block before it (the salt, for a first
# block), and its own token ids.
Content: TypeAlias = tuple[int | str | None, list[int]]
Hash: TypeAlias = Callable[[bytes], int]


@dataclass(slots=True)
class Block:
    """One physical block, and what it was published as.

    Its name stands for all tokens from the start of the sequence to the end of this
    block. A block is named once, when it is published, and keeps the name until it is
    taken again. A block published while the cache holds one with the same
    content gets that one's name. A name never stands for two contents.
    """

    ref_count: int = 0
    content: Content | None = None  # None: it has no name
    name: int = 0
    hash: int = 0  # of the content


class BlockManager:
    """Blocks 0 to num_blocks - 1 are on the device, those that follow in CPU memory."""

    def __init__(self, num_blocks: int, block_size: int,
                 enable_prefix_caching: bool = True, num_swap_blocks: int = 0,
                 hash_function: Hash = xxhash.xxh3_64_intdigest) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.hash_function = hash_function
        num_all_blocks = num_blocks + num_swap_blocks
        self.blocks = [Block() for _ in range(num_all_blocks)]
        self.free_blocks: FreeList = OrderedDict.fromkeys(range(num_blocks))
        swap_blocks = range(num_blocks, num_all_blocks)
        self.free_swap_blocks: FreeList = OrderedDict.fromkeys(swap_blocks)
        self.published: dict[int, int] = {}  # the prefix cache: hash -> physical block
        self.names = count(1)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # rounded up

    def most_blocks(self, num_shared_tokens: int, lengths: Iterable[int]) -> int:
        """The most blocks that sequences with a common beginning can need."""
        num_shared = num_shared_tokens // self.block_size
        return num_shared + sum(self.num_blocks_for(n) - num_shared for n in lengths)

    # -- A sequence comes, grows and goes ----------------------------------------------

    def match_prefix(self, seq: Sequence) -> list[int]:
        """The physical blocks that hold the longest cached prefix of `seq`.

        They never hold its last token: that one is computed, to get the logits that
        follow. A hash only suggests a block; its content must be equal, and the content
        names the block before. So a hash collision can cost a hit, but never gives a
        wrong one.
        """
        found: list[int] = []
        num_full_blocks = (seq.compute_end - 1) // self.block_size
        for index in range(num_full_blocks):
            content = self._content(seq, index, found)
            block_id = self.published.get(self._hash(content))
            if block_id is None or self.blocks[block_id].content != content:
                break
            found.append(block_id)
        return found

    def can_allocate(self, prefix: list[int], num_blocks: int, num_spare: int) -> bool:
        """Whether `num_spare` blocks stay free if a group gets `num_blocks`.

        These include the cached `prefix`. Of the prefix, a block that somebody holds
        costs nothing; one that is free leaves the free list, like a new block.
        """
        num_revived = sum(self.blocks[block_id].ref_count == 0 for block_id in prefix)
        num_taken = num_blocks - len(prefix) + num_revived
        return num_taken + num_spare <= len(self.free_blocks)

    def allocate(self, seq: Sequence, prefix: list[int]) -> None:
        """Give `seq` a block table: its cached prefix, then new blocks for the rest."""
        self._hold(seq, prefix)
        seq.num_published_blocks = len(prefix)
        seq.num_computed_tokens = len(prefix) * self.block_size
        self.grow(seq)  # makes no copies: the blocks of a prefix are full

    def num_blocks_to_grow(self, seqs: list[Sequence]) -> int:
        """How many free blocks `grow` will take for these sequences of a group."""
        num_new = 0
        writers: Counter[int] = Counter()
        for seq in seqs:
            num_blocks = self.num_blocks_for(seq.compute_end)
            num_new += num_blocks - len(seq.block_table)
            index = seq.num_computed_tokens // self.block_size
            if index < len(seq.block_table):
                writers[seq.block_table[index]] += 1

        # Writers take their copies one by one, and each drops a reference. If all
        # holders write, the last of them is the only one left, and writes in place: 3
        # holders take 2 copies. If some holder does not write, every writer takes one.
        for block_id, num_writers in writers.items():
            num_new += min(num_writers, self.blocks[block_id].ref_count - 1)
        return num_new

    def grow(self, seq: Sequence) -> Moves:
        """Give `seq` blocks for all tokens it has to compute; there must be enough.

        Returns the copies that must be made before the next step writes.
        """
        table = seq.block_table
        copies: Moves = []
        index = seq.num_computed_tokens // self.block_size  # it writes there next
        if index < len(table) and self.blocks[table[index]].ref_count > 1:
            # Others hold this block too: copy-on-write.
            shared = table[index]
            table[index] = self._take(self.free_blocks)
            self.blocks[shared].ref_count -= 1
            copies.append((shared, table[index]))
            # The model runner must be sent this entry of the table again.
            seq.num_sent_blocks = min(seq.num_sent_blocks, index)

        while len(table) * self.block_size < seq.compute_end:
            table.append(self._take(self.free_blocks))
        return copies

    def advance(self, seq: Sequence, num_tokens: int) -> None:
        """Count more tokens as computed, and publish the blocks that are now full."""
        seq.num_computed_tokens += num_tokens
        if seq.num_computed_tokens // self.block_size > seq.num_published_blocks:
            self.publish(seq)

    def unsent_blocks(self, seq: Sequence) -> tuple[int, list[int]]:
        """What is new in a block table since the last call: (index, blocks)."""
        first = seq.num_sent_blocks
        seq.num_sent_blocks = len(seq.block_table)
        return first, seq.block_table[first:]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all blocks that `parent` has computed, full or not."""
        self.free(child)  # a beam that another one replaces still has blocks
        num_computed_blocks = self.num_blocks_for(parent.num_computed_tokens)
        self._hold(child, parent.block_table[:num_computed_blocks])
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_published_blocks = parent.num_published_blocks

    def free(self, seq: Sequence) -> None:
        """Drop all references of `seq`; nothing of it counts as computed any more."""
        self._drop(seq)
        seq.num_computed_tokens = 0

    # -- Swapping ----------------------------------------------------------------------

    def swap(self, seqs: list[Sequence], free_list: FreeList,
             num_spare: int = 0) -> Moves:
        """Move the blocks of these sequences to the pool that has this free list.

        Returns no moves, and changes nothing, if that would leave fewer than
        `num_spare` free. A block that another group holds too is copied: that group
        keeps it. The new blocks have no names: they are published when their group next
        runs.
        """
        held = {block_id for seq in seqs for block_id in seq.block_table}
        if len(held) + num_spare > len(free_list):
            return []

        # A block that several of them share moves once, and they go on sharing it.
        moved: dict[int, int] = {}
        for seq in seqs:
            for block_id in seq.block_table:
                if block_id not in moved:
                    moved[block_id] = self._take(free_list)
        for seq in seqs:
            table = [moved[block_id] for block_id in seq.block_table]
            self._drop(seq)
            self._hold(seq, table)
        for block_id in moved.values():
            self.blocks[block_id].ref_count -= 1  # the reference that `_take` gave
        return list(moved.items())

    # -- The prefix cache --------------------------------------------------------------

    def publish(self, seq: Sequence) -> None:
        """Let others find the full blocks of `seq`, even before the step has run.

        That is safe. Whoever finds such a block reads it in a later step, or in this
        one. Steps run in order, and within a step every layer stores the K and V of all
        tokens before it reads any.
        """
        if not self.enable_prefix_caching:
            return
        # The id of a pending token is unknown, so its block cannot be published yet.
        num_known_tokens = min(seq.num_computed_tokens, len(seq.token_ids))
        num_full_blocks = num_known_tokens // self.block_size
        for index in range(seq.num_published_blocks, num_full_blocks):
            block_id = seq.block_table[index]
            if self.blocks[block_id].content is None:  # no sibling has published it
                self._name(block_id, self._content(seq, index, seq.block_table))
            seq.num_published_blocks = index + 1

    def _name(self, block_id: int, content: Content) -> None:
        """Give a block its name, and let others find it if they can."""
        block = self.blocks[block_id]
        block.content = content
        block.hash = self._hash(content)
        if block.hash not in self.published:
            self.published[block.hash] = block_id
            block.name = next(self.names)
            return

        other = self.blocks[self.published[block.hash]]
        if other.content != content:
            # The hashes collide: nobody finds this block.
            block.name = next(self.names)
            return
        # Both blocks hold the same tokens. They get one name, so that a block published
        # after one of them is also found after the other. The cache refers to one of
        # the two. If that one is free, it may be taken soon: refer to this one, then.
        block.name = other.name
        if other.ref_count == 0:
            self.published[block.hash] = block_id

    def reset_prefix_cache(self) -> bool:
        """Forget what blocks hold; False, and nothing changes, if any is in use."""
        if any(block.ref_count for block in self.blocks):
            return False
        for block in self.blocks:
            block.content = None
        self.published.clear()
        return True

    def _content(self, seq: Sequence, index: int, table: list[int]) -> Content:
        """What logical block `index` holds; `table` has the blocks before it."""
        first = index * self.block_size
        token_ids = seq.token_ids[first : first + self.block_size]
        if index == 0:
            return seq.group.params.cache_salt, token_ids
        return self.blocks[table[index - 1]].name, token_ids

    def _hash(self, content: Content) -> int:
        """A chained hash: by the name of the block before, it covers all tokens."""
        before, token_ids = content
        start = before if isinstance(before, int) else hash(before)  # a salt, or None
        return self.hash_function(array("q", [start, *token_ids]).tobytes())

    # -- References --------------------------------------------------------------------

    def _take(self, free_list: FreeList) -> int:
        """Take the first block of a free list, and forget what it holds."""
        block_id, _ = free_list.popitem(last=False)
        block = self.blocks[block_id]
        if self._can_be_found(block_id):
            del self.published[block.hash]
        block.content = None
        block.ref_count = 1
        return block_id

    def _hold(self, seq: Sequence, block_table: list[int]) -> None:
        for block_id in block_table:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self.free_blocks[block_id]
            block.ref_count += 1
        seq.block_table = list(block_table)

    def _drop(self, seq: Sequence) -> None:
        """Drop references, last block first: a prefix outlives what follows it."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                on_device = block_id < self.num_blocks
                free_list = self.free_blocks if on_device else self.free_swap_blocks
                free_list[block_id] = None
                # A block that nobody can find again is the first to be taken.
                free_list.move_to_end(block_id, last=self._can_be_found(block_id))
        seq.block_table = []
        seq.num_published_blocks = 0
        seq.num_sent_blocks = 0

    def _can_be_found(self, block_id: int) -> bool:
        block = self.blocks[block_id]
        return block.content is not None and self.published.get(block.hash) == block_id
