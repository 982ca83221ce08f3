"""Which sequence holds which block, which is taken next, and what a hit may return:
worked examples with exact block ids.

Random operations on tiny pools are in test_scheduler.py, where a wrong hit, a missing
copy and a block that leaks show in an answer.
"""

import itertools

from helpers import new_group
from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager

A, B, C, D = ([digit] * 4 for digit in range(1, 5))  # a block's worth of tokens each
SAME_HASH = 2**61 - 1  # Python's hash of an int is the remainder of this division


def group_of(tokens, n=1, salt=None):
    return new_group(tokens, SamplingParams(n=n, max_tokens=None, cache_salt=salt))


def admit(manager, tokens, n=1, salt=None):
    """A sequence with its blocks, whose prefix may come from the cache."""
    seq = group_of(tokens, n, salt).live[0]
    prefix = manager.prefix_cache.match(seq)
    manager.hold(seq, prefix, len(prefix) * manager.block_size)
    assert manager.grow([seq], [])
    return seq


def compute(manager, *sequences):
    """What a step does: all tokens count as computed, full blocks are published."""
    for seq in sequences:
        manager.mark_computed(seq, seq.computable_end)


def run(manager, tokens, salt=None, n=1):
    seq = admit(manager, tokens, n, salt)
    compute(manager, seq)
    return seq


def decode(manager, seqs, *tokens):
    for seq, token in zip(seqs, tokens, strict=True):
        seq.token_ids.append(token)
    assert manager.grow(seqs, [])
    compute(manager, *seqs)


def fork(manager, tokens, n):
    """The sequences of a group that has just forked: they share all blocks."""
    leader = run(manager, tokens, n=n)
    for other in leader.group.live[1:]:
        manager.fork(leader, other)
    return leader.group.live


def hits(manager, tokens, salt=None):
    return manager.prefix_cache.match(group_of(tokens, salt=salt).live[0])


def tables(*sequences):
    return [list(seq.block_table) for seq in sequences]


def cached(manager):
    """The blocks that the prefix cache leads to."""
    return [content.block_id
            for content in manager.prefix_cache.published.values()]


def refs(manager):
    return manager.ref_counts


# -- Exact examples --------------------------------------------------------------------


def test_the_story_of_the_module():
    manager = BlockManager(4, 4)
    a = run(manager, [10, 11, 12, 13, 14, 15])
    assert (tables(a), cached(manager)) == ([[0, 1]], [0])

    b, sibling = fork(manager, [10, 11, 12, 13, 24, 25], 2)
    assert tables(b, sibling) == [[0, 2], [0, 2]] and refs(manager) == [3, 1, 2, 0]
    b.token_ids.append(1)
    sibling.token_ids.append(2)
    copies = []
    assert manager.grow([b, sibling], copies) and copies == [(2, 3)]
    assert tables(b, sibling) == [[0, 3], [0, 2]] and refs(manager) == [3, 1, 1, 1]


def test_what_cannot_be_found_is_taken_first_then_the_least_recently_used():
    manager = BlockManager(7, 4)
    one, two = run(manager, A + B + [9]), run(manager, C)
    assert tables(one, two) == [[0, 1, 2], [3]]
    manager.free(one)  # block 2 was never full; of the others the last goes first
    manager.free(two)
    assert list(manager.free_blocks) == [2, 4, 5, 6, 1, 0, 3]

    again = admit(manager, A + [8])  # a hit revives block 0
    assert tables(again) == [[0, 2]]
    manager.free(again)  # now it is the most recently used
    assert list(manager.free_blocks) == [2, 4, 5, 6, 1, 3, 0]
    run(manager, D * 5)
    assert [hits(manager, tokens + [9]) for tokens in (A + B, C)] == [[0], [3]]


def test_a_block_is_published_when_all_its_tokens_are_known_and_computed():
    manager = BlockManager(4, 4)
    seq = admit(manager, A + B[:3])
    for num_computed, found in ((3, []), (4, [0]), (7, [0])):
        manager.mark_computed(seq, num_computed)
        assert hits(manager, A + B + C) == found
    seq.pending = [-1]  # only the device knows the last token of block 1
    assert manager.grow([seq], [])
    compute(manager, seq)
    assert hits(manager, A + B + C) == [0]
    decode(manager, [seq], B[3])
    assert hits(manager, A + B + C) == [0, 1]
    assert hits(manager, A + B) == [0]  # the last token is always computed


def test_a_hit_follows_the_same_block_and_has_the_same_salt():
    salts = [None, "", "1", "tenant"]
    for salt, other in itertools.product(salts, salts):
        manager = BlockManager(8, 4)
        block = run(manager, A + B + C, salt).block_table[0]
        run(manager, C + D, salt)
        expected = [[block] if salt == other else []] * 3
        found = [hits(manager, A + rest + [9], other) for rest in ([], C + C, D)]
        assert found == expected
    collision = [token + SAME_HASH for token in A]
    assert hash(tuple(A)) == hash(tuple(collision))
    assert hits(manager, collision + [9], "tenant") == []


def test_twins_share_their_content_and_the_newer_is_found():
    manager = BlockManager(9, 4)
    first, second = admit(manager, A + [9]), admit(manager, A + B + [9])
    compute(manager, first, second)  # both computed A, in blocks 0 and 2
    assert hits(manager, A + B + [8]) == [2, 3]
    manager.free(second)
    late = admit(manager, C + [9])
    late.token_ids[:4] = A  # as if it had come before the others were published
    compute(manager, late)
    # What follows the one is found after the other.
    assert hits(manager, A + B + [8]) == [*tables(late)[0][:1], 3]
