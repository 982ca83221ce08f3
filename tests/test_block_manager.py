"""Who holds which block, which block is taken next, and what a hit may say.

Worked examples with exact block ids, then a Hypothesis machine that drives a `BlockManager` beside
an independent model of what every slot of every block holds. A wrong hit serves one prompt's cache
to another; a leaked block never comes back: both show here, with a minimal script.
"""

import itertools
from collections import Counter

import pytest
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.sequence import SequenceGroup

A, B, C, D, E = ([digit] * 4 for digit in range(1, 6))  # a block's worth of tokens each
SALTS = [None, "", "1", "tenant"]


def constant_hash(data):
    return 7


def two_valued_hash(data):
    return xxhash.xxh3_64_intdigest(data) & 1


def blind_hash(data):
    """Hashes a block's own tokens only: the same block after another parent collides."""
    return xxhash.xxh3_64_intdigest(data[8:])


def sequence(tokens, salt=None):
    params = SamplingParams(cache_salt=salt)
    return SequenceGroup(None, list(tokens), params, set(), 10**6, None).sequences[0]


def allocate(manager, seq, spare=0):
    """What the scheduler does on admission: look up, allocate, skip what was found."""
    prefix = manager.match_prefix(seq)
    if not manager.allocate(seq, prefix, spare):
        return False
    seq.num_computed_tokens = len(prefix) * manager.block_size
    return True


def admit(manager, tokens, salt=None):
    seq = sequence(tokens, salt)
    assert allocate(manager, seq)
    return seq


def compute(manager, seq, until=None):
    """What a step does: `until` tokens (all by default) are computed, full blocks published."""
    seq.num_computed_tokens = len(seq.token_ids) if until is None else until
    manager.publish(seq)
    return seq


def run(manager, tokens, salt=None):
    return compute(manager, admit(manager, tokens, salt))


def free(manager, seq):
    manager.free(seq)
    seq.num_computed_tokens = 0


def hits(manager, tokens, salt=None):
    return manager.match_prefix(sequence(tokens, salt))


def state(manager, *sequences):
    """Everything that an operation may change; the memoised `block_hashes` are not part of it."""
    return (
        list(manager.free_blocks),
        list(manager.published.items()),
        manager.last_prefix_id,
        [(b.ref_count, b.hash, b.parent, b.prefix_id, b.token_ids[:]) for b in manager.blocks],
        [
            (s.token_ids[:], s.block_table[:], s.num_published, s.prefix_id, s.num_computed_tokens)
            for s in sequences
        ],
    )


# --- which block is taken next ---


def test_blocks_are_taken_in_order_and_as_many_as_the_tokens_need():
    manager = BlockManager(8, 4)
    assert admit(manager, range(6)).block_table == [0, 1]
    assert admit(manager, range(10, 14)).block_table == [2]
    assert admit(manager, range(20, 29)).block_table == [3, 4, 5]
    assert list(manager.free_blocks) == [6, 7]
    assert [block.ref_count for block in manager.blocks] == [1, 1, 1, 1, 1, 1, 0, 0]


def test_blocks_that_hold_nothing_findable_are_taken_again_first():
    manager = BlockManager(6, 4)
    seq = run(manager, A + B + [9])
    assert seq.block_table == [0, 1, 2]
    manager.free(seq)
    assert list(manager.free_blocks) == [2, 3, 4, 5, 1, 0]
    uncomputed = admit(manager, C + D)  # nothing of it is ever published
    assert uncomputed.block_table == [2, 3]
    manager.free(uncomputed)
    assert list(manager.free_blocks) == [2, 3, 4, 5, 1, 0]


def test_the_least_recently_used_content_is_evicted_first():
    manager = BlockManager(3, 4)
    first, second, third = run(manager, A), run(manager, B), run(manager, C)
    for seq in (second, first, third):
        manager.free(seq)
    assert list(manager.free_blocks) == [1, 0, 2]
    again = admit(manager, B + [9])  # a hit on block 1, and block 0 for the token after it
    assert again.block_table == [1, 0]
    manager.free(again)
    assert list(manager.free_blocks) == [0, 2, 1]  # B is now the most recently used
    assert [hits(manager, content + [9]) for content in (A, B, C)] == [[], [1], [2]]


def test_a_prefix_outlives_what_follows_it():
    manager = BlockManager(4, 4)
    manager.free(run(manager, A + B + C))
    assert list(manager.free_blocks) == [3, 2, 1, 0]
    for taken, left in ((2, [0, 1]), (3, [0]), (4, [])):
        other = sequence([8] * 4 * taken)
        assert manager.allocate(other, [])
        assert hits(manager, A + B + C + [9]) == left
        manager.free(other)


def test_a_taken_block_is_no_longer_published():
    manager = BlockManager(1, 4)
    manager.free(run(manager, A))
    assert list(manager.published.values()) == [0]
    seq = admit(manager, B)
    assert manager.published == {}
    assert hits(manager, A + [9]) == []
    compute(manager, seq)
    assert hits(manager, B + [9]) == [0]


def test_a_hit_revives_a_free_block():
    manager = BlockManager(4, 4)
    manager.free(run(manager, A + B + [9]))
    assert list(manager.free_blocks) == [2, 3, 1, 0]
    seq = admit(manager, A + B + [8])
    assert seq.block_table == [0, 1, 2]
    assert seq.num_computed_tokens == 8
    assert list(manager.free_blocks) == [3]
    assert [block.ref_count for block in manager.blocks] == [1, 1, 1, 0]


def test_a_generated_sequence_can_be_continued_from_the_cache():
    manager = BlockManager(6, 4)
    seq = run(manager, A + [2])
    for token in B[1:] + [5]:  # decoding: one more token, one more step
        seq.token_ids.append(token)
        assert manager.grow(seq)
        compute(manager, seq)
    assert seq.block_table == [0, 1, 2]
    manager.free(seq)
    assert hits(manager, A + B + [5, 5]) == [0, 1]


# --- sharing ---


def test_two_sequences_share_the_blocks_of_a_common_prefix():
    manager = BlockManager(6, 4)
    first = run(manager, A + B + [9])
    second = run(manager, A + B + [8, 8])
    third = run(manager, A + C + [9])
    assert [s.block_table for s in (first, second, third)] == [[0, 1, 2], [0, 1, 3], [0, 4, 5]]
    assert [block.ref_count for block in manager.blocks] == [3, 2, 1, 1, 1, 1]
    manager.free(first)
    assert [block.ref_count for block in manager.blocks] == [2, 1, 0, 1, 1, 1]
    assert list(manager.free_blocks) == [2]
    manager.free(third)
    manager.free(second)
    assert [block.ref_count for block in manager.blocks] == [0] * 6
    assert sorted(manager.free_blocks) == list(range(6))


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_the_last_token_is_always_computed(num_blocks):
    manager = BlockManager(16, 4)
    prompt = (A + B + C)[: 4 * num_blocks]
    run(manager, prompt)
    whole = list(range(num_blocks))
    assert hits(manager, prompt) == whole[:-1]  # exactly k blocks: the last one is not matched
    assert hits(manager, prompt[:-1]) == whole[:-1]
    assert hits(manager, prompt + [9]) == whole
    seq = admit(manager, prompt)
    assert seq.num_computed_tokens == 4 * (num_blocks - 1) < len(prompt)
    assert seq.block_table[-1] == num_blocks  # a block of its own for the one that it computes


def test_a_block_is_published_when_its_last_token_is_computed():
    manager = BlockManager(4, 4)
    seq = admit(manager, A + B + [9])
    for until, found in ((3, []), (4, [0]), (7, [0]), (8, [0, 1]), (9, [0, 1])):
        compute(manager, seq, until)
        assert hits(manager, A + B + C) == found
        assert seq.num_published == len(found)


def test_the_same_block_after_another_prefix_is_no_hit():
    manager = BlockManager(8, 4)
    run(manager, A + B)
    run(manager, C)
    assert hits(manager, C + B + [9]) == [2]
    assert hits(manager, B + [9]) == []
    assert hits(manager, A + B + [9]) == [0, 1]


def test_a_salt_separates():
    manager = BlockManager(16, 4)
    tables = [run(manager, A + B, salt).block_table for salt in (None, "1", "tenant")]
    assert tables == [[0, 1], [2, 3], [4, 5]]
    for salt, table in zip((None, "1", "tenant", "2"), [*tables, []], strict=True):
        assert hits(manager, A + B + [9], salt) == table


@pytest.mark.parametrize("hash_function", [constant_hash, blind_hash])
def test_a_salt_separates_even_where_hashes_collide(hash_function):
    for mine, other in itertools.permutations((None, "", "1", "tenant"), 2):
        manager = BlockManager(4, 4, hash_function=hash_function)
        run(manager, A, mine)
        assert hits(manager, A + [9], mine) == [0]
        assert hits(manager, A + [9], other) == []


def test_of_two_blocks_with_one_content_the_first_stays_published():
    manager = BlockManager(8, 4)
    first, second = admit(manager, A + B + [9]), admit(manager, A + B + C + [9])
    assert [first.block_table, second.block_table] == [[0, 1, 2], [3, 4, 5, 6]]
    compute(manager, first)
    compute(manager, second)
    # What only the second has computed follows, in the cache, what the first has published.
    assert hits(manager, A + B + C + [9]) == [0, 1, 5]
    assert len(manager.published) == 3
    manager.free(second)  # its blocks 3, 4 and 6 hold nothing findable
    assert list(manager.free_blocks) == [3, 4, 6, 7, 5]


def test_a_sequence_that_was_admitted_by_hits_publishes_only_what_it_adds():
    manager = BlockManager(8, 4)
    manager.free(run(manager, A + B + [9]))
    seq = admit(manager, A + B + C + [9])
    assert (seq.block_table, seq.num_published) == ([0, 1, 2, 3], 2)
    compute(manager, seq)
    assert seq.num_published == 3
    assert hits(manager, A + B + C + D) == [0, 1, 2]


def test_a_sequence_that_comes_back_finds_its_own_blocks():
    manager = BlockManager(4, 4)
    seq = run(manager, A + B + [9])
    free(manager, seq)
    assert (seq.block_table, seq.num_published) == ([], 0)
    seq.token_ids += [9, 9, 9]
    assert allocate(manager, seq)
    assert (seq.block_table, seq.num_computed_tokens) == ([0, 1, 2], 8)
    compute(manager, seq)
    assert hits(manager, seq.token_ids + [9]) == [0, 1, 2]


def test_without_caching_nothing_is_published_or_found():
    manager = BlockManager(4, 4, enable_prefix_caching=False)
    seq = run(manager, A + B)
    assert manager.published == {}
    assert seq.num_published == 0
    assert hits(manager, A + B + [9]) == []
    manager.free(seq)
    assert list(manager.free_blocks) == [0, 1, 2, 3]


# --- collisions ---


def test_under_a_constant_hash_a_collision_costs_a_miss_and_never_a_wrong_block():
    manager = BlockManager(8, 4, hash_function=constant_hash)
    first = run(manager, A + B)
    assert manager.published == {7: 0}  # B after A collides with A: it stays private
    second = run(manager, C + D)
    assert manager.published == {7: 0}
    assert hits(manager, A + B + [9]) == [0]
    assert hits(manager, C + D + [9]) == []
    assert hits(manager, A + A + [9]) == [0]
    manager.free(first)
    manager.free(second)
    # All that is private goes first: 2, 3 and 1; the published block 0 is the last.
    assert list(manager.free_blocks) == [2, 3, 1, 4, 5, 6, 7, 0]
    seq = sequence([8] * 32)
    assert manager.allocate(seq, [])
    manager.free(seq)
    third = run(manager, C + D)  # nobody holds the hash any more: C may have it
    assert hits(manager, C + D + [9]) == third.block_table[:1]
    assert hits(manager, A + B + [9]) == []


def test_what_follows_a_collision_is_private_too():
    manager = BlockManager(8, 4, hash_function=blind_hash)
    run(manager, A + B)
    seq = run(manager, C + B + D)  # C is block 2; B collides with block 1, whose parent is A
    assert seq.block_table == [2, 3, 4]
    assert hits(manager, A + B + D + [9]) == [0, 1]  # D is cached, but after C and B
    assert hits(manager, C + B + D + [9]) == [2]


@pytest.mark.parametrize("keeper_publishes_later", [False, True])
def test_a_block_that_is_reused_is_not_taken_for_the_parent_it_was(keeper_publishes_later):
    manager = BlockManager(3, 4, hash_function=blind_hash)
    parent, keeper = admit(manager, A), admit(manager, A + B)
    assert (parent.block_table, keeper.block_table) == ([0], [1, 2])
    compute(manager, parent)
    compute(manager, keeper, 4 if keeper_publishes_later else 8)  # A again: follows block 0
    manager.free(parent)
    assert run(manager, C).block_table == [0]  # A is evicted, B after A is not
    compute(manager, keeper)
    assert hits(manager, C + B + [9]) == [0]
    assert hits(manager, A + B + [9]) == []


def test_no_identity_is_given_twice():
    manager = BlockManager(2, 4)
    seen = set()
    for content in (A, B, C, A, B, C):
        seq = run(manager, content + content)
        seen.update(manager.blocks[block_id].prefix_id for block_id in seq.block_table)
        manager.free(seq)
        manager.forget()
    assert len(seen) == 12


# --- all or nothing ---


def test_an_allocation_that_does_not_fit_changes_nothing():
    manager = BlockManager(5, 4)
    holder = run(manager, A + B + [9])
    manager.free(run(manager, C))  # free: block 4, and block 3 that remembers C
    assert list(manager.free_blocks) == [4, 3]
    for tokens, spare in ((A + B + D + E + [9], 0), ([8] * 9, 0), ([8] * 5, 1), ([8], 2), (A, 2)):
        seq = sequence(tokens)
        prefix = manager.match_prefix(seq)
        before = state(manager, holder, seq)
        assert not manager.allocate(seq, prefix, spare)
        assert state(manager, holder, seq) == before
    for tokens, spare in (([8] * 8, 0), ([8] * 4, 1), (A + B + D + E, 0)):
        seq = sequence(tokens)
        assert allocate(manager, seq, spare)
        manager.free(seq)


def test_a_hit_on_a_free_block_needs_that_block():
    manager = BlockManager(2, 4)
    holder = run(manager, A)
    manager.free(run(manager, B))
    seq = sequence(B + [9])
    prefix = manager.match_prefix(seq)
    assert prefix == [1]  # the only free block: nothing is left for the token after it
    before = state(manager, holder, seq)
    assert not manager.allocate(seq, prefix)
    assert state(manager, holder, seq) == before
    assert manager.allocate(sequence(A + [9]), manager.match_prefix(sequence(A + [9])))


def test_growing_takes_blocks_only_where_tokens_need_them():
    manager = BlockManager(4, 4)
    seq = run(manager, A[:3])
    for length, table in ((3, [0]), (4, [0]), (5, [0, 1]), (8, [0, 1]), (13, [0, 1, 2, 3])):
        seq.token_ids += [6] * (length - len(seq.token_ids))
        assert manager.grow(seq)
        assert seq.block_table == table


def test_growth_that_does_not_fit_changes_nothing():
    manager = BlockManager(4, 4)
    holder, seq = run(manager, A + [9]), run(manager, B)
    seq.token_ids += [6] * 5  # two blocks more, and only one is free
    before = state(manager, holder, seq)
    assert not manager.grow(seq)
    assert state(manager, holder, seq) == before
    manager.free(holder)
    assert manager.grow(seq)
    assert seq.block_table == [2, 1, 3]


def test_freeing_what_holds_nothing_changes_nothing():
    manager = BlockManager(2, 4)
    seq = run(manager, A)
    manager.free(seq)
    before = state(manager, seq)
    manager.free(seq)
    assert state(manager, seq) == before


# --- forget ---


def test_after_forget_nothing_is_found_and_nothing_is_lost():
    manager = BlockManager(6, 4)
    manager.free(run(manager, A + B))
    holder = run(manager, C + [9])
    manager.forget()
    assert manager.published == {}
    for tokens in (A + B, C):
        assert hits(manager, tokens + [9]) == []
    assert holder.block_table == [2, 3]
    manager.free(holder)
    assert sorted(manager.free_blocks) == list(range(6))
    again = run(manager, A + B)
    assert hits(manager, A + B + [9]) == again.block_table


# --- any order of operations ---


class Machine(RuleBasedStateMachine):
    """Random operations, each followed by a check of everything against an independent model.

    The model writes into every slot what the K and V there would stand for: the salt and all tokens
    up to that position. A taken block loses its content; a hit must find exactly its own.
    """

    counts: Counter[str] = Counter()
    hash_functions = (xxhash.xxh3_64_intdigest, constant_hash, two_valued_hash, blind_hash)

    @initialize(
        hash_function=st.sampled_from(hash_functions),
        caching=st.sampled_from([True, True, True, False]),
        num_blocks=st.integers(1, 12),
        block_size=st.sampled_from([1, 2, 4]),
    )
    def start(self, hash_function, caching, num_blocks, block_size):
        self.manager = BlockManager(num_blocks, block_size, caching, hash_function)
        self.content = [[None] * block_size for _ in range(num_blocks)]
        self.free_order = list(range(num_blocks))
        self.live = []
        self.gone = []

    def pick(self, sequences, index):
        return sequences[index % len(sequences)]

    def state(self):
        return state(self.manager, *self.live, *self.gone)

    def take(self, blocks):
        """The model of taking: in eviction order, and what was there is lost."""
        assert blocks == self.free_order[: len(blocks)]
        del self.free_order[: len(blocks)]
        for block in blocks:
            self.content[block] = [None] * self.manager.block_size

    def whole(self, seq, index):
        """What the block must hold that stands at `index` in the block table of `seq`."""
        size, salt = self.manager.block_size, seq.group.params.cache_salt
        ends = range(index * size + 1, (index + 1) * size + 1)
        return [(salt, tuple(seq.token_ids[:end])) for end in ends]

    def try_to_admit(self, seq, spare):
        manager, before = self.manager, self.state()
        prefix = manager.match_prefix(seq)
        assert self.state() == before
        assert len(prefix) * manager.block_size < len(seq.token_ids)
        assert manager.enable_prefix_caching or not prefix
        for index, block in enumerate(prefix):
            assert self.content[block] == self.whole(seq, index), "a wrong hit"
        revived = [block for block in prefix if block in self.free_order]
        fresh = -(-len(seq.token_ids) // manager.block_size) - len(prefix)
        fits = len(revived) + fresh <= len(self.free_order) - spare
        assert manager.allocate(seq, prefix, spare) == fits
        if not fits:
            assert self.state() == before
            self.counts["refused"] += 1
            return False
        for block in revived:
            self.free_order.remove(block)
        assert seq.block_table[: len(prefix)] == prefix
        evicted = sum(self.content[block][-1] is not None for block in self.free_order[:fresh])
        self.take(seq.block_table[len(prefix) :])
        seq.num_computed_tokens = len(prefix) * manager.block_size
        self.live.append(seq)
        self.counts.update(admitted=1, hit_blocks=len(prefix), revived=len(revived))
        self.counts["evicted"] += evicted
        return True

    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
    indices = st.integers(0, 11)
    spares = st.sampled_from([0, 0, 0, 1, 3])

    @rule(tokens=tokens, salt=st.sampled_from(SALTS), spare=spares)
    def admit_a_new_sequence(self, tokens, salt, spare):
        self.try_to_admit(sequence(tokens, salt), spare)

    @precondition(lambda self: self.live or self.gone)
    @rule(index=indices, keep=st.integers(1, 14), more=tokens, spare=spares)
    def admit_one_like_another(self, index, keep, more, spare):
        like = self.pick(self.live + self.gone, index)
        tokens = like.token_ids[:keep] + more[:3]
        self.try_to_admit(sequence(tokens, like.group.params.cache_salt), spare)

    @precondition(lambda self: self.gone)
    @rule(index=indices, spare=spares)
    def admit_one_again(self, index, spare):
        seq = self.pick(self.gone, index)
        self.gone.remove(seq)
        if not self.try_to_admit(seq, spare):
            self.gone.append(seq)

    @precondition(lambda self: self.live)
    @rule(index=indices, tokens=st.lists(st.integers(0, 1), max_size=5))
    def grow(self, index, tokens):
        seq = self.pick(self.live, index)
        seq.token_ids += tokens
        before, held = self.state(), len(seq.block_table)
        missing = max(0, -(-len(seq.token_ids) // self.manager.block_size) - held)
        fits = missing <= len(self.free_order)
        assert self.manager.grow(seq) == fits
        if fits:
            assert len(seq.block_table) == held + missing
            self.take(seq.block_table[held:])
            self.counts["grown"] += missing
        else:
            assert self.state() == before
            self.counts["refused"] += 1

    @precondition(lambda self: self.live)
    @rule(index=indices, count=st.sampled_from([1, 2, 5, 99, 99]))
    def compute(self, index, count):
        seq, size = self.pick(self.live, index), self.manager.block_size
        start, salt = seq.num_computed_tokens, seq.group.params.cache_salt
        end = min(start + count, len(seq.token_ids), len(seq.block_table) * size)
        published = set(self.manager.published.values())
        for position in range(start, end):
            block, offset = seq.block_table[position // size], position % size
            assert block not in published, "a published block was written"
            self.content[block][offset] = (salt, tuple(seq.token_ids[: position + 1]))
        seq.num_computed_tokens = end
        self.manager.publish(seq)
        full = end // size if self.manager.enable_prefix_caching else 0
        assert seq.num_published == full
        self.counts["computed"] += end - start

    @precondition(lambda self: self.live)
    @rule(index=indices)
    def free(self, index):
        seq = self.pick(self.live, index)
        self.live.remove(seq)
        for block in reversed(seq.block_table):
            if not any(block in other.block_table for other in self.live):
                remembers = block in self.manager.published.values()
                self.free_order.insert(len(self.free_order) if remembers else 0, block)
        free(self.manager, seq)
        assert (seq.block_table, seq.num_published) == ([], 0)
        self.gone = [*self.gone[-7:], seq]

    @precondition(lambda self: self.live or self.gone)
    @rule(index=st.integers(0, 39))
    def forget(self, index):
        """As after a failed step: all give back their blocks. Rare, or no cache grows old."""
        if index == 0:
            while self.live:
                self.free(0)
            self.manager.forget()
            assert self.manager.published == {}
            self.counts["forgotten"] += 1
        else:
            before = self.state()
            for seq in self.live:
                self.manager.publish(seq)  # nothing new is computed: nothing happens
            for seq in self.gone:
                self.manager.free(seq)  # holds nothing: nothing happens
            assert self.state() == before

    @invariant()
    def everything_adds_up(self):
        self.counts["operations"] += 1
        manager, size = self.manager, self.manager.block_size
        references = Counter(block for seq in self.live for block in seq.block_table)
        for block_id, block in enumerate(manager.blocks):
            assert block.ref_count == references[block_id]
            assert (block.ref_count == 0) == (block_id in manager.free_blocks)
        assert list(manager.free_blocks) == self.free_order
        assert len(manager.free_blocks) + len(references) == len(manager.blocks)
        published = manager.published
        assert len(set(published.values())) == len(published)
        assert published == {b.hash: i for i, b in enumerate(manager.blocks) if b.hash is not None}
        names = [manager.blocks[block_id].prefix_id for block_id in published.values()]
        assert len(set(names)) == len(names)
        for block_id in published.values():
            assert None not in self.content[block_id]
            assert manager.blocks[block_id].token_ids == [
                tokens[-1] for _, tokens in self.content[block_id]
            ]
        contents = [self.content[block_id][-1] for block_id in published.values()]
        assert len(set(contents)) == len(contents), "one content, published twice"
        for seq in self.live:
            assert len(set(seq.block_table)) == len(seq.block_table)
            assert seq.num_published <= seq.num_computed_tokens // size
            for index in range(seq.num_computed_tokens // size):
                assert self.content[seq.block_table[index]] == self.whole(seq, index)


def drive(max_examples, steps):
    """Run the machine; returns how often what happened, so that a test can ask for enough of it."""

    class Counted(Machine):
        counts = Counter()

    run_state_machine_as_test(
        Counted,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    for event in ("admitted", "hit_blocks", "revived", "evicted", "grown", "computed", "refused"):
        assert Counted.counts[event] > max_examples // 20, (event, Counted.counts)
    return Counted.counts


def test_any_operations_keep_every_invariant():
    drive(200, 50)


@pytest.mark.slow
def test_a_hundred_thousand_operations_keep_every_invariant():
    counts = drive(1300, 100)
    assert counts["operations"] >= 100_000
