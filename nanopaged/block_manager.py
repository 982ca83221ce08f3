"""Physical blocks: who holds them, which are free, and what the free ones still hold.

A block belongs to every sequence that holds a reference to it. Without references it is
free. If it was published, it is then free but still cached, until it is taken for other
tokens. Blocks outside the prefix cache are taken first, then the least recently used.
The manager deals in block ids and token ids, and never sees a tensor. No other file
changes a reference count or a block table.

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
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanopaged.sequence import Sequence

# Block ids in the order in which they are taken. An OrderedDict without values can also
# drop a block from its middle in O(1), which happens when the prefix cache revives it.
FreeList = OrderedDict[int, None]
# Pairs (from, to) of physical blocks: the contents of one are copied to the other.
Moves = list[tuple[int, int]]


@dataclass(eq=False)
class Content:
    """What a full block holds: its own tokens, after those of the blocks before it.

    The K and V of a block depend on all tokens from the start of the sequence. So two
    blocks hold the same K and V only if everything before them is the same as well.
    Such blocks share one Content object. To compare two blocks it is therefore enough
    to compare their own tokens, and to check whether `before` is the same object.
    """

    before: "Content | str | None"  # the preceding block's; for a first block, the salt
    token_ids: tuple[int, ...]
    block_id: int | None = None  # the newest block that holds this


class BlockManager:
    """Blocks 0 to num_blocks - 1 are on the device, and the rest are in CPU memory."""

    def __init__(self, num_blocks: int, block_size: int,
                 enable_prefix_caching: bool = True, num_swap_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        ids = range(num_blocks + num_swap_blocks)
        self.ref_counts = [0 for _ in ids]
        self.contents: list[Any] = [None for _ in ids]  # of the published blocks
        self.free_blocks: FreeList = OrderedDict.fromkeys(ids[:num_blocks])
        self.free_swap_blocks: FreeList = OrderedDict.fromkeys(ids[num_blocks:])
        # The prefix cache, by `before` and `token_ids`. A dict finds an entry by the
        # hash of its key and then compares the key itself, so every hit is exact.
        self.published: dict[Any, Content] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # rounded up

    def most_blocks(self, num_shared_tokens: int, lengths: Iterable[int]) -> int:
        """The most blocks that sequences with a common beginning can need."""
        num_shared = num_shared_tokens // self.block_size
        return num_shared + sum(self.num_blocks_for(n) - num_shared for n in lengths)

    # -- A sequence comes, grows and goes ----------------------------------------------

    def replace_blocks(self, seq: Sequence, block_ids: list[int],
                       num_tokens: int) -> None:
        """Replace the blocks of `seq` with these, which hold the K and V of its first
        `num_tokens` tokens.

        Its old blocks are freed from the last to the first, so the beginning of a
        sequence stays cached longest.
        """
        for block_id in block_ids:
            self.free_blocks.pop(block_id, None)  # it may have been free and cached
            self.ref_counts[block_id] += 1
        for block_id in reversed(seq.block_table):
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                on_device = block_id < self.num_blocks
                free_list = self.free_blocks if on_device else self.free_swap_blocks
                free_list[block_id] = None
                # A block that no request can find is the next one to be taken.
                free_list.move_to_end(block_id, last=self.is_cached(block_id))
        seq.block_table = array("q", block_ids)
        seq.num_computed_tokens = num_tokens

    def free(self, seq: Sequence) -> None:
        """Drop all blocks of `seq`. None of its tokens counts as computed any more."""
        self.replace_blocks(seq, [], 0)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all blocks that `parent` has computed, full or not."""
        num_tokens = parent.num_computed_tokens
        shared = parent.block_table[: self.num_blocks_for(num_tokens)]
        self.replace_blocks(child, list(shared), num_tokens)

    def grow(self, seqs: list[Sequence], moves: Moves) -> bool:
        """Give a group's sequences blocks for all tokens that they will compute next.
        If too few are free, this returns False and changes nothing.

        A sequence must not share a block that it will write to. Say that two
        siblings share block 2, and write there next. They need two blocks and hold one,
        so one is taken. The first sibling gets it, as a copy of block 2, which `moves`
        tells the step to make. Then the second is the only holder of block 2.
        """
        size = self.block_size
        if len(seqs) == 1 and seqs[0].compute_end <= len(seqs[0].block_table) * size:
            # The usual case, decided fast. A lone sequence, or a leader before the
            # fork, shares only full blocks, and never writes into those.
            return True
        num_needed = 0
        held: set[int] = set()
        for seq in seqs:
            first = seq.num_computed_tokens // size  # the logical block it writes next
            num_needed += self.num_blocks_for(seq.compute_end) - first
            held.update(seq.block_table[first:])
        if num_needed - len(held) > len(self.free_blocks):
            return False

        for seq in seqs:
            table = seq.block_table
            first = seq.num_computed_tokens // size
            if first < len(table) and self.ref_counts[table[first]] > 1:
                shared = table[first]
                self.ref_counts[shared] -= 1
                table[first] = self._take(self.free_blocks)
                moves.append((shared, table[first]))
            while len(table) * size < seq.compute_end:
                table.append(self._take(self.free_blocks))
        return True

    def swap(self, seqs: list[Sequence], target: FreeList) -> Moves:
        """Move the blocks of these sequences to the pool that has `target` as its free
        list. If there is too little room, this returns no moves and changes nothing.

        A block that several of them share moves once, and they go on sharing it. The
        new blocks are published when their group next runs.
        """
        held = dict.fromkeys(id for seq in seqs for id in seq.block_table)
        if len(held) > len(target):
            return []
        # No references yet: `replace_blocks` counts them.
        moved = {block_id: self._take(target, ref_count=0) for block_id in held}
        for seq in seqs:
            new_table = [moved[block_id] for block_id in seq.block_table]
            self.replace_blocks(seq, new_table, seq.num_computed_tokens)
        return list(moved.items())

    # -- The prefix cache --------------------------------------------------------------

    def match_prefix(self, seq: Sequence) -> list[int]:
        """The physical blocks that hold the longest cached prefix of `seq`.

        They never hold its last token. That one is always computed, because its logits
        give the next token. (Without prefix caching nothing is published or found.)
        """
        found: list[int] = []
        content: Any = seq.group.params.cache_salt  # what comes before the first block
        for index in range((seq.compute_end - 1) // self.block_size):
            content = self._content(seq, index, content)
            if content.block_id is None:
                break
            found.append(content.block_id)
        return found

    def advance(self, seq: Sequence, num_tokens: int) -> None:
        """Count more tokens as computed, and publish the blocks that are now full.

        Others can then find these blocks before the step has run. That is safe, because
        they read them in a later step, or in this one. Steps run in order, and within a
        step every layer stores the K and V of all tokens before it reads any. If the
        step fails, the engine forgets the whole cache.
        """
        seq.num_computed_tokens += num_tokens
        if not self.enable_prefix_caching:
            return
        # The id of a pending token is unknown, so its block cannot be published yet.
        num_known_tokens = min(seq.num_computed_tokens, len(seq.token_ids))
        num_full = num_known_tokens // self.block_size
        first = num_full
        # Go back to the last block that is published: all before it are, too.
        while first and self.contents[seq.block_table[first - 1]] is None:
            first -= 1
        content: Any = seq.group.params.cache_salt
        if first:
            content = self.contents[seq.block_table[first - 1]]
        for index in range(first, num_full):
            content = self._content(seq, index, content)
            content.block_id = seq.block_table[index]
            self.contents[content.block_id] = content
            self.published[content.before, content.token_ids] = content

    def _content(self, seq: Sequence, index: int, before: Any) -> Content:
        """What logical block `index` of `seq` holds, after `before`: the Content in the
        cache, or a new one if there is none.
        """
        first = index * self.block_size
        token_ids = tuple(seq.token_ids[first : first + self.block_size])
        return self.published.get((before, token_ids)) or Content(before, token_ids)

    def is_cached(self, block_id: int) -> bool:
        """Whether the prefix cache lists this block. If several blocks hold the same K
        and V, it lists the one that was published last.
        """
        content = self.contents[block_id]
        return content is not None and content.block_id == block_id

    def _take(self, free_list: FreeList, ref_count: int = 1) -> int:
        """Take the first block of a free list, and forget what it holds."""
        block_id, _ = free_list.popitem(last=False)
        if self.is_cached(block_id):
            content = self.contents[block_id]
            del self.published[content.before, content.token_ids]
        self.contents[block_id] = None
        self.ref_counts[block_id] = ref_count
        return block_id
