"""Physical blocks: who holds them, which are free, and what the free ones still hold.

A block belongs to every sequence that holds a reference to it. With a reference count
of 0 it is free *and still cached*, if it was published: it waits in the free list until
it is taken for other tokens. Blocks that are not in the prefix cache are taken first,
then the least recently used. The manager deals in block ids and token ids and never
sees a tensor. Nobody else changes a reference count or a block table.

The story of `sequence.py`, with block_size=4 and the free blocks 0, 1, 2, 3:

    A comes: p0 .. p5                [0, 1]   its step publishes block 0, which is full
    B comes: p0 .. p3, q4, q5        [0, 2]   block 0 has two references now
    B forks, as it has n=2           [0, 2]   its sibling has the same block table
    one of them writes its 7th token [0, 3]   not into block 2, which both share, but
                                              into a copy of it: copy-on-write
    the other writes its own         [0, 2]   it is the only holder of block 2 now
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import xxhash

from nanopaged.sequence import Sequence

# Block ids in the order in which they are taken. An OrderedDict without values can also
# drop a block from its middle in O(1): the prefix cache revives free blocks.
FreeList = OrderedDict[int, None]
# Pairs (from, to) of physical blocks: the contents of one are copied to the other.
Moves = list[tuple[int, int]]
# What a full block holds: its own token ids, after the name of the block before it. In
# place of a name, a first block has the salt of the request.
Content = tuple[int | str | None, list[int]]


@dataclass(slots=True)
class Block:
    """One physical block, and what it was published as.

    A block is found by the hash of its content. The hash covers the block's own tokens
    and the *name* of the block before it. A name is not the block's id: ids are used
    again, for other tokens. A name is never given twice to different contents. It
    stands for all tokens from the start of the sequence to the end of the block, as the
    block's K and V depend on all of them.
    """

    ref_count: int = 0
    content: Content | None = None  # None: it was not published
    hash: int = 0  # of the content
    name: int = 0


class BlockManager:
    """Blocks 0 to num_blocks - 1 are on the device, those that follow in CPU memory."""

    def __init__(self, num_blocks: int, block_size: int,
                 enable_prefix_caching: bool = True, num_swap_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        ids = range(num_blocks + num_swap_blocks)
        self.blocks = [Block() for _ in ids]
        self.free_blocks: FreeList = OrderedDict.fromkeys(ids[:num_blocks])
        self.free_swap_blocks: FreeList = OrderedDict.fromkeys(ids[num_blocks:])
        self.published: dict[int, int] = {}  # the prefix cache: block ids, by hash
        self.names = count(1)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # rounded up

    def most_blocks(self, num_shared_tokens: int, lengths: Iterable[int]) -> int:
        """The most blocks that sequences with a common beginning can need."""
        num_shared = num_shared_tokens // self.block_size
        return num_shared + sum(self.num_blocks_for(n) - num_shared for n in lengths)

    # -- A sequence comes, grows and goes ----------------------------------------------

    def hold(self, seq: Sequence, block_ids: Iterable[int], num_tokens: int) -> None:
        """Let `seq` hold these blocks, in which its first `num_tokens` have K and V,
        and drop those that it held before.

        Of the old ones the last is put into the free list first, and so taken first: a
        prefix outlives what follows it.
        """
        for block_id in block_ids:
            self.free_blocks.pop(block_id, None)  # it may have been free and cached
            self.blocks[block_id].ref_count += 1
        for block_id in reversed(seq.block_table):
            self.blocks[block_id].ref_count -= 1
            if self.blocks[block_id].ref_count == 0:
                on_device = block_id < self.num_blocks
                free_list = self.free_blocks if on_device else self.free_swap_blocks
                free_list[block_id] = None
                # A block that is not in the prefix cache is the first to be taken.
                free_list.move_to_end(block_id, last=self.is_cached(block_id))
        seq.block_table = array("q", block_ids)
        seq.num_computed_tokens = num_tokens

    def free(self, seq: Sequence) -> None:
        """Drop all blocks of `seq`; nothing of it counts as computed any more."""
        self.hold(seq, [], 0)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all blocks that `parent` has computed, full or not."""
        num_tokens = parent.num_computed_tokens
        shared = parent.block_table[: self.num_blocks_for(num_tokens)]
        self.hold(child, shared, num_tokens)

    def grow(self, seqs: list[Sequence], copies: Moves) -> bool:
        """Give a group's sequences blocks for all tokens they have to compute; False,
        and nothing changes, if too few blocks are free.

        Each needs blocks of its own from where it writes next. A block that they hold
        there already serves the last of its holders. The others take copies of it:
        `copies` gets what must be copied before the next step writes.
        """
        size = self.block_size
        if len(seqs) == 1 and seqs[0].compute_end <= len(seqs[0].block_table) * size:
            # The usual case, decided fast. A sequence alone, or a leader before the
            # fork, shares only full blocks, and never writes to those: no copies.
            return True
        num_needed = 0
        held: set[int] = set()
        for seq in seqs:
            first = seq.num_computed_tokens // size
            num_needed += self.num_blocks_for(seq.compute_end) - first
            held.update(seq.block_table[first:])
        if num_needed - len(held) > len(self.free_blocks):
            return False

        for seq in seqs:
            table = seq.block_table
            index = seq.num_computed_tokens // size
            if index < len(table) and self.blocks[table[index]].ref_count > 1:
                # Others hold this block too: copy-on-write.
                shared = table[index]
                self.blocks[shared].ref_count -= 1
                table[index] = self._take(self.free_blocks)
                copies.append((shared, table[index]))
            while len(table) * size < seq.compute_end:
                table.append(self._take(self.free_blocks))
        return True

    def swap(self, seqs: list[Sequence], free_list: FreeList) -> Moves:
        """Move the blocks of these sequences to the pool whose free list this is.

        Returns no moves, and changes nothing, if that pool has too few. A block that
        several of them share moves once, and they go on sharing it. The new blocks are
        published when their group next runs.
        """
        held = dict.fromkeys(chain.from_iterable(seq.block_table for seq in seqs))
        if len(held) > len(free_list):
            return []
        moved = {block_id: self._take(free_list) for block_id in held}
        for seq in seqs:
            table = [moved[block_id] for block_id in seq.block_table]
            self.hold(seq, table, seq.num_computed_tokens)
        for block_id in moved.values():
            self.blocks[block_id].ref_count -= 1  # the reference that `_take` gave
        return list(moved.items())

    # -- The prefix cache --------------------------------------------------------------

    def match_prefix(self, seq: Sequence) -> list[int]:
        """The physical blocks that hold the longest cached prefix of `seq`.

        They never hold its last token: that one is computed, to get the logits that
        follow.
        """
        found: list[int] = []
        for index in range((seq.compute_end - 1) // self.block_size):
            block_id = self._find(self._content(seq, index, found))
            if block_id is None:
                break
            found.append(block_id)
        return found

    def advance(self, seq: Sequence, num_tokens: int) -> None:
        """Count more tokens as computed, and publish the blocks that are now full.

        So others find them even before the step has run. That is safe. Whoever finds
        such a block reads it in a later step, or in this one. Steps run in order, and
        within a step every layer stores the K and V of all tokens before it reads any.
        And if the step fails, all books are thrown away, this cache among them.
        """
        seq.num_computed_tokens += num_tokens
        # The id of a pending token is unknown, so its block cannot be published yet.
        num_known_tokens = min(seq.num_computed_tokens, len(seq.token_ids))
        num_full = num_known_tokens // self.block_size
        if self.enable_prefix_caching:
            first = num_full
            # What comes before a published block has been published, too.
            while first and self.blocks[seq.block_table[first - 1]].content is None:
                first -= 1
            for index in range(first, num_full):
                self._publish(seq, index)

    def _publish(self, seq: Sequence, index: int) -> None:
        """Give logical block `index` its name, and let others find it."""
        block_id = seq.block_table[index]
        block = self.blocks[block_id]
        block.content = self._content(seq, index, seq.block_table)
        block.hash = hash_content(block.content)
        # If there is a block of the same content, both get one name, and whatever
        # follows the one is found after the other. The cache has the newer one.
        twin = self._find(block.content)
        block.name = next(self.names) if twin is None else self.blocks[twin].name
        self.published[block.hash] = block_id

    def _content(self, seq: Sequence, index: int, table: Any) -> Content:
        """What logical block `index` holds; `table` has the blocks before it."""
        first = index * self.block_size
        token_ids = seq.token_ids[first : first + self.block_size]
        salt = seq.group.params.cache_salt
        return self.blocks[table[index - 1]].name if index else salt, token_ids

    def _find(self, content: Content) -> int | None:
        """The block of this content.

        A hash only suggests a block: its content must be equal. So if hashes collide,
        that can cost a hit, but never gives a wrong one.
        """
        block_id = self.published.get(hash_content(content))
        if block_id is None or self.blocks[block_id].content != content:
            return None
        return block_id

    def is_cached(self, block_id: int) -> bool:
        return self.published.get(self.blocks[block_id].hash) == block_id

    def _take(self, free_list: FreeList) -> int:
        """Take the first block of a free list, and forget what it holds."""
        block_id, _ = free_list.popitem(last=False)
        if self.is_cached(block_id):
            del self.published[self.blocks[block_id].hash]
        self.blocks[block_id] = Block(ref_count=1)
        return block_id


def hash_content(content: Content) -> int:
    # The name is hashed as data. As XXH3's seed it would not do: then short inputs of
    # small numbers, with different seeds, often have the same hash.
    before, token_ids = content
    numbers = array("q", [hash(before), *token_ids])
    return xxhash.xxh3_64_intdigest(numbers.tobytes())
