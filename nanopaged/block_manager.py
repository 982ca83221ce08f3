"""Physical blocks: who holds them, which are free, and what the free ones still remember.

A block belongs to whoever holds a reference to it. Ref count 0 means free *and still cached*: it
waits in the free list, least recently used first, until it is taken for something else. The manager
knows block ids and token ids, not tensors; nobody else changes a ref count.

With block_size=4, a prompt of 6 tokens and free blocks 0 to 3: `allocate` gives the block table
[0, 1]; its step publishes block 0, and not block 1 (half full). A second prompt with the same first
4 tokens gets [0, 2]: block 0 has two references, and 4 tokens are not computed. If the first one
forks, both have [0, 1]; who writes token 7 first takes a copy, [0, 3] (copy-on-write).
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

import xxhash

from nanopaged.sequence import Sequence

FreeList: TypeAlias = OrderedDict[int, None]  # in eviction order; takes from the middle in O(1)
Moves: TypeAlias = list[tuple[int, int]]  # (from, to): physical blocks whose contents are copied
Content: TypeAlias = tuple[int | str | None, list[int]]
"""Of a full block: the prefix_id of the block before it (of the first, the salt), its tokens."""


@dataclass(slots=True)
class Block:
    """One physical block, and what `publish` says of it until it is taken for something else."""

    ref_count: int = 0
    hash: int = 0  # it is published while `BlockManager.published` has it under this hash
    content: Content | None = None
    prefix_id: int = 0  # names all tokens from the start to its end


class BlockManager:
    """Blocks 0 to num_blocks - 1 are the device's, those behind them the CPU's, for swapping."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True,
                 num_swap_blocks: int = 0,
                 hash_function: Callable[[bytes], int] = xxhash.xxh3_64_intdigest) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching, self.hash_function = enable_prefix_caching, hash_function
        self.blocks = [Block() for _ in range(num_blocks + num_swap_blocks)]
        self.free_blocks: FreeList = OrderedDict.fromkeys(range(num_blocks))
        self.free_swap_blocks: FreeList = OrderedDict.fromkeys(range(num_blocks, len(self.blocks)))
        self.published: dict[int, int] = {}  # chained hash -> physical block
        self.prefix_ids = count(1)

    def match_prefix(self, seq: Sequence) -> list[int]:
        """The physical blocks that hold the longest cached prefix of `seq`.

        Its last token is never among them: somebody has to compute the logits that follow it. A
        hash only finds a candidate; token ids and parent prove it, so a collision can cost a hit.
        """
        found: list[int] = []
        for index in range((seq.num_tokens - 1) // self.block_size):
            hash, content = self._identify(seq, found, index)
            block_id = self.published.get(hash, -1)
            if block_id < 0 or self.blocks[block_id].content != content:
                break
            found.append(block_id)
        return found

    def room(self, num_shared_tokens: int, lengths: Iterable[int]) -> int:
        """The most blocks that sequences of these lengths hold which share their first tokens."""
        shared = num_shared_tokens // self.block_size
        return shared + sum(-(-length // self.block_size) - shared for length in lengths)

    def allocate(self, seq: Sequence, prefix: list[int], room: int, spare: int = 0) -> bool:
        """Fill the empty block table of `seq`: the matched `prefix`, then blocks for the rest.

        False, and nothing has changed, if the `room` that its group is going to need, matched
        blocks included, would leave fewer than `spare` blocks free.
        """
        revived = sum(self.blocks[block_id].ref_count == 0 for block_id in prefix)
        if room - len(prefix) + revived > len(self.free_blocks) - spare:
            return False
        self._hold(seq, prefix)
        seq.num_published = len(prefix)
        seq.num_computed_tokens = len(prefix) * self.block_size
        self.grow(seq)
        return True

    def missing(self, seqs: list[Sequence]) -> int:
        """How many free blocks `grow` is going to take for these sequences of one group."""
        size = self.block_size
        new = sum(-(-seq.num_tokens // size) - len(seq.block_table) for seq in seqs)
        written = Counter(seq.block_table[index] for seq in seqs
                          if (index := seq.num_computed_tokens // size) < len(seq.block_table))
        # Each writer of a shared block copies it, but for the last one to hold it.
        return new + sum(min(self.blocks[block_id].ref_count - 1, writers)
                         for block_id, writers in written.items())

    def grow(self, seq: Sequence) -> Moves:
        """Room for all tokens of `seq`: new blocks behind, and one of its own to write to next.

        The caller knows that there are enough; what it gets is to be copied before the next write.
        """
        table, index, moves = seq.block_table, seq.num_computed_tokens // self.block_size, []
        if index < len(table) and self.blocks[table[index]].ref_count > 1:  # copy-on-write
            moves.append((table[index], self._take(self.free_blocks)))
            self.blocks[table[index]].ref_count -= 1
            table[index] = moves[0][1]
            seq.num_sent_blocks = min(seq.num_sent_blocks, index)
        while len(table) * self.block_size < seq.num_tokens:
            table.append(self._take(self.free_blocks))
        return moves

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` have what `parent` has computed, in the same blocks: the last one too."""
        self.free(child)  # a beam that dies has blocks, a new sequence has none
        computed, size = parent.num_computed_tokens, self.block_size
        child.num_published, child.num_computed_tokens = parent.num_published, computed
        self._hold(child, parent.block_table[: -(-computed // size)])

    def swap(self, seqs: list[Sequence], free: FreeList, spare: int = 0) -> Moves:
        """Move the blocks of these sequences, shared ones once, to the pool with this free list.

        No moves, and nothing has changed, if that would leave fewer than `spare` blocks free.
        """
        held = dict.fromkeys(block_id for seq in seqs for block_id in seq.block_table)
        if len(held) > len(free) - spare:
            return []
        moved = {block_id: self._take(free) for block_id in held}
        for seq in seqs:
            table = [moved[block_id] for block_id in seq.block_table]
            self.free(seq)
            self._hold(seq, table)
        for block_id in moved.values():
            self.blocks[block_id].ref_count -= 1  # the one of `_take`
        return list(moved.items())

    def free(self, seq: Sequence) -> None:
        """Drop the references of `seq`, tail first: a prefix outlives what follows it."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                free = self.free_blocks if block_id < self.num_blocks else self.free_swap_blocks
                free[block_id] = None  # with nothing to remember it is the first to be taken again
                free.move_to_end(block_id, last=self.published.get(block.hash) == block_id)
        seq.block_table = []
        seq.num_published = seq.num_sent_blocks = 0

    def publish(self, seq: Sequence) -> None:
        """Let others find the full blocks of `seq` that are computed, or will be by this step.

        Of two blocks with the same content the first stays published, and lends the other its
        `prefix_id`. After a collision the block stays private, and those behind it are not found.
        """
        known = min(seq.num_computed_tokens, len(seq.token_ids))
        full = known // self.block_size if self.enable_prefix_caching else 0
        for index in range(seq.num_published, full):
            block_id = seq.block_table[index]
            block = self.blocks[block_id]
            block.hash, content = self._identify(seq, seq.block_table, index)
            first = self.blocks[self.published.setdefault(block.hash, block_id)]
            # A sibling may have published this very block before: then its name stays.
            names = (x.prefix_id for x in (block, first) if x.content == content)
            block.prefix_id = next(names, 0) or next(self.prefix_ids)
            block.content = content
            seq.num_published = index + 1

    def _take(self, free: FreeList) -> int:
        block_id, _ = free.popitem(last=False)
        block = self.blocks[block_id]
        if self.published.get(block.hash) == block_id:
            del self.published[block.hash]
        block.content, block.ref_count = None, 1
        return block_id

    def _hold(self, seq: Sequence, block_table: list[int]) -> None:
        for block_id in block_table:
            if self.blocks[block_id].ref_count == 0:
                del self.free_blocks[block_id]
            self.blocks[block_id].ref_count += 1
        seq.block_table = list(block_table)

    def _identify(self, seq: Sequence, table: list[int], index: int) -> tuple[int, Content]:
        """How a full block is found, a hash, and what proves it; the blocks before are in `table`.

        The hash is chained: it covers the `prefix_id` of the block before, which names all of them.
        """
        before = self.blocks[table[index - 1]].prefix_id if index else seq.group.params.cache_salt
        tokens = seq.token_ids[index * self.block_size : (index + 1) * self.block_size]
        data = array("q", [hash(before), *tokens])  # an int is its own hash, a salt is not
        return self.hash_function(data.tobytes()), (before, tokens)
