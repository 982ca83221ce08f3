"""Hash-based prefix caching: find blocks that hold, or will hold, K and V of a prompt.

K and V depend on all tokens from the start of the sequence. So a full block is found by
its own tokens together with everything before them. The key of a dict is this pair: the
`Content` of the block before it, and the tokens. Python's dict hashes the key, and then
compares it. Only equal prefixes share a `Content`, so every hit is exact.
"""

from dataclasses import dataclass
from typing import TypeAlias

from nanopaged.sequence import Sequence


@dataclass(eq=False)
class Content:
    """What a full block holds: its own tokens, after those of the blocks before it.

    Published blocks with equal contents share one Content. With `eq=False` a Content
    equals only itself, so comparing `before` takes one step, however long the prefix.
    """

    # The Content of the preceding block. For a first block it is the request's
    # `cache_salt`: requests with different salts share nothing.
    before: "Content | str | None"
    token_ids: tuple[int, ...]
    block_id: int = -1  # the newest block that holds this


Before: TypeAlias = Content | str | None
Key = tuple[Before, tuple[int, ...]]


class PrefixCache:
    """Only the block manager changes it."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        # By block id: what the block holds, or None until it is published. In
        # `published`, each Content is found by its `before` and `token_ids`. If several
        # blocks hold the same, only the newest can be found.
        self.contents: list[Content | None] = [None] * num_blocks
        self.published: dict[Key, Content] = {}

    def match(self, seq: Sequence) -> list[int]:
        """The physical blocks that hold the longest cached prefix of `seq`, except its
        last token, which is always computed: its logits give the next one.
        """
        found: list[int] = []
        before: Before = seq.group.params.cache_salt
        for index in range((seq.computable_end - 1) // self.block_size):
            before = self.published.get(self._key(seq, index, before))
            if before is None:
                break
            found.append(before.block_id)
        return found

    def publish(self, seq: Sequence) -> None:
        """List the blocks of `seq` that have become full, so that others find them."""
        table, salt = seq.block_table, seq.group.params.cache_salt
        # The id of a pending token is unknown, so its block cannot be published yet.
        num_known_tokens = min(seq.num_computed_tokens, len(seq.token_ids))
        first = num_full = num_known_tokens // self.block_size
        # Begin with the first block that is not published yet. That is usually the
        # newest full one. After a swap, it is block 0.
        while first and self.contents[table[first - 1]] is None:
            first -= 1
        before = self.contents[table[first - 1]] if first else salt
        for index in range(first, num_full):
            key = self._key(seq, index, before)
            content = self.published.setdefault(key, Content(*key))
            content.block_id = table[index]  # the newest that holds this
            self.contents[content.block_id] = before = content

    def _key(self, seq: Sequence, index: int, before: Before) -> Key:
        """All that K and V in logical block `index` of `seq` depend on."""
        start = index * self.block_size
        return before, tuple(seq.token_ids[start : start + self.block_size])

    def can_find(self, block_id: int) -> bool:
        """Whether this block is the one that is listed for what it holds. If several
        hold the same, that is the newest, which usually lives longest.
        """
        content = self.contents[block_id]
        return content is not None and content.block_id == block_id

    def forget(self, block_id: int) -> None:
        """Forget what a block holds, because it is taken for other tokens.

        The blocks that follow it cannot be found any more either, because their keys
        have this Content. The same tokens, computed again, get a new one. The blocks
        that nobody finds stay in `published` until they are taken.
        """
        content = self.contents[block_id]
        if content and self.can_find(block_id):
            del self.published[content.before, content.token_ids]
        self.contents[block_id] = None
