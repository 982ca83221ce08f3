"""Physical blocks: who holds them, which are free, and what the free ones still remember.

A block belongs to whoever holds a reference to it. Ref count 0 means free *and still cached*: it
waits in the free list, least recently used first, until it is taken for something else. The manager
knows block ids and token ids, not tensors; nobody else changes a ref count.

With block_size=4, a prompt of 6 tokens and free blocks 0, 1, 2: `allocate` gives the block table
[0, 1]; once computed, block 0 is published, block 1 (half full) is not. A second prompt with the
same first 4 tokens gets [0, 2]: block 0 has two references, and 4 tokens need not be computed.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from nanopaged.sequence import Sequence


@dataclass(slots=True)
class Block:
    """One physical block. `hash` is None unless it is published; then the rest says as what."""

    ref_count: int = 0
    hash: int | None = None
    token_ids: list[int] = field(default_factory=list)
    parent: int | str | None = None  # prefix_id of the block before it; of the first, the salt
    prefix_id: int = 0  # names the content from the start to here; never used twice


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True,
                 hash_function: Callable[[bytes], int] = xxhash.xxh3_64_intdigest) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.hash_function = hash_function
        self.blocks = [Block() for _ in range(num_blocks)]
        # In eviction order. An OrderedDict takes a block out of the middle in O(1), as a hit must.
        self.free_blocks = OrderedDict.fromkeys(range(num_blocks))
        self.published: dict[int, int] = {}  # chained hash -> physical block
        self.last_prefix_id = 0

    def match_prefix(self, seq: Sequence) -> list[int]:
        """The physical blocks that hold the longest cached prefix of `seq`.

        Its last token is never among them: somebody has to compute the logits that follow it. A
        hash only finds a candidate; token ids and parent prove it, so a collision can cost a hit.
        """
        found: list[int] = []
        parent: int | str | None = seq.group.params.cache_salt
        last = (len(seq.token_ids) - 1) // self.block_size if self.enable_prefix_caching else 0
        for index in range(last):
            block_id = self.published.get(self._chained_hash(seq, index), -1)
            if block_id < 0 or not self._holds(block_id, parent, seq, index):
                break
            found.append(block_id)
            parent = self.blocks[block_id].prefix_id
        return found

    def allocate(self, seq: Sequence, prefix: list[int], spare: int = 0) -> bool:
        """Fill the empty block table of `seq`: the matched `prefix`, then blocks for the rest.

        All or nothing: False, and nothing has changed, if that would leave fewer than `spare` free.
        """
        revived = [block_id for block_id in prefix if self.blocks[block_id].ref_count == 0]
        fresh = -(-len(seq.token_ids) // self.block_size) - len(prefix)
        if fresh + len(revived) > len(self.free_blocks) - spare:
            return False
        for block_id in revived:
            del self.free_blocks[block_id]
        for block_id in prefix:
            self.blocks[block_id].ref_count += 1
            seq.prefix_id = self.blocks[block_id].prefix_id
        seq.num_published = len(prefix)
        seq.block_table = prefix + [self._take() for _ in range(fresh)]
        return True

    def grow(self, seq: Sequence) -> bool:
        """Make room for all tokens of `seq`; False, and nothing has changed, if there is none."""
        missing = -(-len(seq.token_ids) // self.block_size) - len(seq.block_table)
        if missing > len(self.free_blocks):
            return False
        seq.block_table.extend(self._take() for _ in range(missing))
        return True

    def free(self, seq: Sequence) -> None:
        """Drop the references of `seq`, tail first: a prefix outlives what follows it."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_blocks[block_id] = None
                if block.hash is None:  # nothing to remember: the first to be taken again
                    self.free_blocks.move_to_end(block_id, last=False)
        seq.block_table = []
        seq.num_published = seq.prefix_id = 0

    def publish(self, seq: Sequence) -> None:
        """Let others find the full blocks of `seq` that are computed, or will be by this step.

        Of two blocks with the same content the first stays published, and both sequences go on from
        its `prefix_id`. After a collision the block stays private, and so will those behind it.
        """
        full = seq.num_computed_tokens // self.block_size if self.enable_prefix_caching else 0
        for index in range(seq.num_published, full):
            parent = seq.prefix_id if index else seq.group.params.cache_salt
            hash = self._chained_hash(seq, index)
            block_id = self.published.setdefault(hash, seq.block_table[index])
            block = self.blocks[block_id]
            self.last_prefix_id += 1
            if block.hash is None:
                block.hash, block.parent, block.prefix_id = hash, parent, self.last_prefix_id
                block.token_ids = self._tokens(seq, index)
            same = self._holds(block_id, parent, seq, index)
            seq.prefix_id = block.prefix_id if same else self.last_prefix_id
            seq.num_published = index + 1

    def forget(self) -> None:
        """Withdraw every publication: a step failed, and what blocks hold is not known."""
        for block_id in self.published.values():
            self.blocks[block_id].hash = None
        self.published.clear()

    def _take(self) -> int:
        block_id, _ = self.free_blocks.popitem(last=False)
        block = self.blocks[block_id]
        if block.hash is not None:
            del self.published[block.hash]
        block.hash, block.ref_count = None, 1
        return block_id

    def _tokens(self, seq: Sequence, index: int) -> list[int]:
        return seq.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def _holds(self, block_id: int, parent: int | str | None, seq: Sequence, index: int) -> bool:
        block = self.blocks[block_id]
        return block.parent == parent and block.token_ids == self._tokens(seq, index)

    def _chained_hash(self, seq: Sequence, index: int) -> int:
        """Hash of a full block and, through its parent's hash, of everything before it."""
        hashes = seq.block_hashes
        while len(hashes) <= index:
            salt = (seq.group.params.cache_salt or "").encode()
            parent = hashes[-1] if hashes else self.hash_function(salt)
            content = array("Q", [parent, *self._tokens(seq, len(hashes))])
            hashes.append(self.hash_function(content.tobytes()))
        return hashes[index]
