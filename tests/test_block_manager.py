"""Which sequence holds which block, which is taken next, and what a hit may return.

Worked examples with exact block ids come first. Then a Hypothesis machine drives a
`BlockManager` together with an independent model of what every slot of every block
holds. A wrong hit would serve one prompt's cache to another, a missing copy one
sequence's cache to its sibling, and a leaked block would never come back: the machine
finds each of them, with a minimal script.
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

from helpers import (
    allocate,
    allocate_if_fits,
    block_state,
    compute,
    constant_hash,
    forked_group,
    free,
    new_group,
    ref_counts,
    tables,
)
from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager

A, B, C, D, E = ([digit] * 4 for digit in range(1, 6))  # a block's worth of tokens each
SALTS = [None, "", "1", "tenant"]


def two_valued_hash(data):
    return xxhash.xxh3_64_intdigest(data) & 1


def blind_hash(data):
    """Hash only a block's own tokens: the same block after another parent collides."""
    return xxhash.xxh3_64_intdigest(data[8:])


def sequence_group(tokens, n=1, salt=None):
    return new_group(tokens, SamplingParams(n=n, cache_salt=salt))


def sequence(tokens, salt=None):
    return sequence_group(tokens, salt=salt).sequences[0]


def admit(manager, tokens, salt=None):
    seq = sequence(tokens, salt)
    assert allocate(manager, seq)
    return seq


def run(manager, tokens, salt=None):
    seq = admit(manager, tokens, salt)
    compute(manager, seq)
    return seq


def hits(manager, tokens, salt=None):
    return manager.match_prefix(sequence(tokens, salt))


# --- which block is taken next ---


def test_blocks_are_taken_in_order_and_as_many_as_the_tokens_need():
    manager = BlockManager(8, 4)
    assert admit(manager, range(6)).block_table == [0, 1]
    assert admit(manager, range(10, 14)).block_table == [2]
    assert admit(manager, range(20, 29)).block_table == [3, 4, 5]
    assert list(manager.free_blocks) == [6, 7]
    assert ref_counts(manager) == [1, 1, 1, 1, 1, 1, 0, 0]


def test_blocks_whose_content_cannot_be_found_are_taken_first():
    manager = BlockManager(6, 4)
    seq = run(manager, A + B + [9])
    assert seq.block_table == [0, 1, 2]

    manager.free(seq)
    assert list(manager.free_blocks) == [2, 3, 4, 5, 1, 0]

    uncomputed = admit(manager, C + D)  # none of it is ever published
    assert uncomputed.block_table == [2, 3]

    manager.free(uncomputed)
    assert list(manager.free_blocks) == [2, 3, 4, 5, 1, 0]


def test_the_least_recently_used_content_is_evicted_first():
    manager = BlockManager(3, 4)
    first = run(manager, A)
    second = run(manager, B)
    third = run(manager, C)
    for seq in (second, first, third):
        manager.free(seq)
    assert list(manager.free_blocks) == [1, 0, 2]

    # A hit on block 1, and block 0 for the token after it.
    again = admit(manager, B + [9])
    assert again.block_table == [1, 0]
    assert sorted(manager.published.values()) == [1, 2]

    manager.free(again)
    assert list(manager.free_blocks) == [0, 2, 1]  # B is now the most recently used
    assert [hits(manager, content + [9]) for content in (A, B, C)] == [[], [1], [2]]


def test_a_prefix_outlives_what_follows_it():
    manager = BlockManager(4, 4)
    manager.free(run(manager, A + B + C))
    assert list(manager.free_blocks) == [3, 2, 1, 0]
    for taken, left in ((2, [0, 1]), (3, [0]), (4, [])):
        other = sequence([8] * 4 * taken)
        assert allocate(manager, other)
        assert hits(manager, A + B + C + [9]) == left
        manager.free(other)


def test_a_hit_revives_a_free_block():
    manager = BlockManager(4, 4)
    manager.free(run(manager, A + B + [9]))
    assert list(manager.free_blocks) == [2, 3, 1, 0]
    seq = admit(manager, A + B + [8])
    assert seq.block_table == [0, 1, 2]
    assert seq.num_computed_tokens == 8
    assert list(manager.free_blocks) == [3]
    assert ref_counts(manager) == [1, 1, 1, 0]


def test_a_generated_sequence_can_be_continued_from_the_cache():
    manager = BlockManager(6, 4)
    seq = run(manager, A + [2])
    for token in B[1:] + [5]:  # decode: one more token a step
        seq.token_ids.append(token)
        assert manager.grow(seq) == []
        compute(manager, seq)

    assert seq.block_table == [0, 1, 2]
    manager.free(seq)
    assert hits(manager, A + B + [5, 5]) == [0, 1]


# --- sharing a prefix ---


def test_two_sequences_share_the_blocks_of_a_common_prefix():
    manager = BlockManager(6, 4)
    first = run(manager, A + B + [9])
    second = run(manager, A + B + [8, 8])
    third = run(manager, A + C + [9])

    assert tables(first, second, third) == [[0, 1, 2], [0, 1, 3], [0, 4, 5]]
    assert ref_counts(manager) == [3, 2, 1, 1, 1, 1]

    manager.free(first)
    assert ref_counts(manager) == [2, 1, 0, 1, 1, 1]
    assert list(manager.free_blocks) == [2]

    manager.free(third)
    manager.free(second)
    assert ref_counts(manager) == [0] * 6
    assert sorted(manager.free_blocks) == list(range(6))


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_the_last_token_is_always_computed(num_blocks):
    manager = BlockManager(16, 4)
    prompt = (A + B + C)[: 4 * num_blocks]
    run(manager, prompt)
    whole = list(range(num_blocks))

    # Exactly k blocks: the last is not matched.
    assert hits(manager, prompt) == whole[:-1]
    assert hits(manager, prompt[:-1]) == whole[:-1]
    assert hits(manager, prompt + [9]) == whole

    seq = admit(manager, prompt)
    assert seq.num_computed_tokens == 4 * (num_blocks - 1) < len(prompt)
    assert seq.block_table[-1] == num_blocks  # its own block for the token it computes


def test_a_block_is_published_when_its_last_token_is_computed():
    manager = BlockManager(4, 4)
    seq = admit(manager, A + B + [9])
    for until, found in ((3, []), (4, [0]), (7, [0]), (8, [0, 1]), (9, [0, 1])):
        compute(manager, seq, until=until)
        assert hits(manager, A + B + C) == found
        assert seq.num_published_blocks == len(found)


def test_the_same_block_after_another_prefix_is_no_hit():
    manager = BlockManager(8, 4)
    run(manager, A + B)
    run(manager, C)
    assert hits(manager, C + B + [9]) == [2]
    assert hits(manager, B + [9]) == []
    assert hits(manager, A + B + [9]) == [0, 1]


@pytest.mark.parametrize(
    "hash_function", [xxhash.xxh3_64_intdigest, constant_hash, blind_hash]
)
def test_a_salt_separates_even_where_hashes_collide(hash_function):
    for mine, other in itertools.permutations(SALTS, 2):
        manager = BlockManager(4, 4, hash_function=hash_function)
        run(manager, A, mine)
        assert hits(manager, A + [9], mine) == [0]
        assert hits(manager, A + [9], other) == []


def test_of_two_blocks_with_the_same_content_the_first_stays_published():
    manager = BlockManager(8, 4)
    first = admit(manager, A + B + [9])
    second = admit(manager, A + B + C + [9])
    assert tables(first, second) == [[0, 1, 2], [3, 4, 5, 6]]

    compute(manager, first)
    compute(manager, second)
    # In the cache, what only the second computed follows what the first published.
    assert hits(manager, A + B + C + [9]) == [0, 1, 5]
    assert len(manager.published) == 3

    manager.free(second)  # nothing in its blocks 3, 4 and 6 can be found
    assert list(manager.free_blocks) == [3, 4, 6, 7, 5]


def test_a_returning_sequence_finds_its_blocks_and_publishes_only_what_it_adds():
    manager = BlockManager(4, 4)
    seq = run(manager, A + B + [9])
    free(manager, seq)
    assert (seq.block_table, seq.num_published_blocks) == ([], 0)

    seq.token_ids += [9, 9, 9]
    assert allocate(manager, seq)
    assert seq.block_table == [0, 1, 2]
    assert seq.num_computed_tokens == 8
    assert seq.num_published_blocks == 2

    compute(manager, seq)
    assert seq.num_published_blocks == 3
    assert hits(manager, seq.token_ids + [9]) == [0, 1, 2]


def test_without_caching_nothing_is_published_or_found():
    manager = BlockManager(4, 4, enable_prefix_caching=False)
    seq = run(manager, A + B)
    assert manager.published == {}
    assert seq.num_published_blocks == 0
    assert hits(manager, A + B + [9]) == []
    manager.free(seq)
    assert list(manager.free_blocks) == [0, 1, 2, 3]


# --- collisions ---


def test_under_a_constant_hash_a_collision_costs_a_miss_and_never_a_wrong_block():
    manager = BlockManager(8, 4, hash_function=constant_hash)
    first = run(manager, A + B)
    assert manager.published == {7: 0}  # B after A collides with A and stays private

    second = run(manager, C + D)
    assert manager.published == {7: 0}
    assert hits(manager, A + B + [9]) == [0]
    assert hits(manager, C + D + [9]) == []
    assert hits(manager, A + A + [9]) == [0]

    manager.free(first)
    manager.free(second)
    # Private blocks go first: 2, 3 and 1; the published block 0 goes last.
    assert list(manager.free_blocks) == [2, 3, 1, 4, 5, 6, 7, 0]

    manager.free(admit(manager, [8] * 32))
    third = run(manager, C + D)  # nothing has this hash any more: C may take it
    assert hits(manager, C + D + [9]) == third.block_table[:1]
    assert hits(manager, A + B + [9]) == []


def test_what_follows_a_collision_is_private_too():
    manager = BlockManager(8, 4, hash_function=blind_hash)
    run(manager, A + B)
    # C is block 2; B collides with block 1, whose parent is A.
    seq = run(manager, C + B + D)
    assert seq.block_table == [2, 3, 4]
    # D is cached, but only after C and B.
    assert hits(manager, A + B + D + [9]) == [0, 1]
    assert hits(manager, C + B + D + [9]) == [2]


@pytest.mark.parametrize("keeper_publishes_later", [False, True])
def test_a_reused_block_is_not_mistaken_for_the_parent_it_was(keeper_publishes_later):
    manager = BlockManager(3, 4, hash_function=blind_hash)
    parent = admit(manager, A)
    keeper = admit(manager, A + B)
    assert tables(parent, keeper) == [[0], [1, 2]]

    compute(manager, parent)
    # A again: it follows block 0.
    compute(manager, keeper, until=4 if keeper_publishes_later else 8)
    manager.free(parent)
    assert run(manager, C).block_table == [0]  # A is evicted, B after A is not

    compute(manager, keeper)
    assert hits(manager, C + B + [9]) == [0]
    assert hits(manager, A + B + [9]) == []


def test_the_successor_of_an_evicted_block_does_not_hide_a_later_one():
    manager = BlockManager(6, 4)
    first = admit(manager, A)
    keeper = admit(manager, A + B)
    assert tables(first, keeper) == [[0], [1, 2]]

    compute(manager, first)
    compute(manager, keeper)  # its B follows block 0
    manager.free(first)
    # Takes the free blocks: A is evicted, B is not.
    other = run(manager, C + D + E + [9])

    assert other.block_table == [3, 4, 5, 0]
    assert hits(manager, A + B + [9]) == []

    manager.free(other)
    again = run(manager, A + B)
    assert hits(manager, A + B + [9]) == again.block_table


def test_no_identity_is_given_twice():
    manager = BlockManager(2, 4)
    seen = set()
    for content in (A, B, C, A, B, C):
        seq = run(manager, content + content)
        seen.update(manager.blocks[block_id].name for block_id in seq.block_table)
        manager.free(seq)
        manager.published.clear()
    assert len(seen) == 12


# --- all or nothing ---


def test_an_allocation_that_does_not_fit_changes_nothing():
    manager = BlockManager(5, 4)
    holder = run(manager, A + B + [9])
    manager.free(run(manager, C))  # free: block 4, and block 3, which still holds C
    assert list(manager.free_blocks) == [4, 3]

    for tokens, spare in (
        (A + B + D + E + [9], 0),
        ([8] * 9, 0),
        ([8] * 5, 1),
        ([8], 2),
        (A, 2),
    ):
        seq = sequence(tokens)
        before = block_state(manager, holder, seq)
        assert not allocate(manager, seq, spare)
        assert block_state(manager, holder, seq) == before
    for tokens, spare in (([8] * 8, 0), ([8] * 4, 1), (A + B + D + E, 0)):
        seq = sequence(tokens)
        assert allocate(manager, seq, spare)
        manager.free(seq)


def test_a_hit_on_a_free_block_needs_that_block():
    manager = BlockManager(2, 4)
    holder = run(manager, A)
    manager.free(run(manager, B))
    seq = sequence(B + [9])
    # The only free block: none is left for the rest.
    assert manager.match_prefix(seq) == [1]

    before = block_state(manager, holder, seq)
    assert not allocate(manager, seq)
    assert block_state(manager, holder, seq) == before
    assert allocate(manager, sequence(A + [9]))


def test_a_group_needs_room_for_all_its_sequences_and_its_leader_takes_its_own():
    manager = BlockManager(6, 4)
    # They share one full block.
    for lengths, room in (([6], 2), ([6, 6, 6], 4), ([9, 9, 6], 6)):
        assert manager.most_blocks(6, lengths) == room

    leader, *others = sequence_group(A + [9, 9], 3).sequences
    before = block_state(manager, leader)
    assert not allocate_if_fits(manager, leader, [], room=7)
    assert not allocate_if_fits(manager, leader, [], room=6, spare=1)
    assert block_state(manager, leader) == before
    assert allocate_if_fits(manager, leader, [], room=6)
    assert tables(leader, *others) == [[0, 1], [], []]
    assert allocate_if_fits(
        manager, sequence(A), [], room=4
    )  # room is checked, not reserved

    compute(manager, leader)
    manager.free(leader)
    seq = sequence(A + [8])
    assert not allocate_if_fits(manager, seq, manager.match_prefix(seq), room=6)
    # With the hit on block 0.
    assert allocate_if_fits(manager, seq, manager.match_prefix(seq), room=5)


def test_growing_takes_what_is_missing_and_no_more():
    manager = BlockManager(4, 4)
    seq = run(manager, A[:3])
    for length, table in (
        (3, [0]),
        (4, [0]),
        (5, [0, 1]),
        (8, [0, 1]),
        (13, [0, 1, 2, 3]),
    ):
        seq.token_ids += [6] * (length - len(seq.token_ids))
        before = block_state(manager, seq)
        assert manager.num_blocks_to_grow([seq]) == len(table) - len(seq.block_table)
        assert block_state(manager, seq) == before
        assert manager.grow(seq) == []
        assert seq.block_table == table


# --- fork and copy-on-write ---


def test_fork_shares_every_block_and_a_write_copies_only_the_last_partial_one():
    manager = BlockManager(6, 4)
    first, second = forked_group(manager, A + B + [9], 2)
    assert tables(first, second) == [[0, 1, 2], [0, 1, 2]]
    assert ref_counts(manager) == [2, 2, 2, 0, 0, 0]
    assert (second.num_computed_tokens, second.num_published_blocks) == (9, 2)

    first.num_sent_blocks = second.num_sent_blocks = 3
    first.token_ids.append(5)
    second.token_ids.append(6)
    assert manager.num_blocks_to_grow([first, second]) == 1
    assert manager.grow(first) == [(2, 3)]
    assert manager.grow(second) == []  # the last holder writes in place
    assert tables(first, second) == [[0, 1, 3], [0, 1, 2]]
    assert ref_counts(manager) == [2, 2, 1, 1, 0, 0]
    # The runner must be sent it.
    assert (first.num_sent_blocks, second.num_sent_blocks) == (2, 3)
    assert manager.num_blocks_to_grow([first, second]) == 0


def test_fork_on_a_block_boundary_leaves_nothing_to_copy():
    manager = BlockManager(6, 4)
    first, second = forked_group(manager, A + B, 2)
    assert tables(first, second) == [[0, 1], [0, 1]]
    for seq in (first, second):
        seq.token_ids.append(9)
    assert manager.num_blocks_to_grow([first, second]) == 2
    assert manager.grow(first) == manager.grow(second) == []
    assert tables(first, second) == [[0, 1, 2], [0, 1, 3]]


@pytest.mark.parametrize("writers", [1, 2, 3])
def test_every_writer_copies_except_the_last_holder(writers):
    manager = BlockManager(7, 4)
    seqs = forked_group(manager, A + [9, 9], 3)
    for seq in seqs:
        seq.token_ids += B  # to the end of the block and into the next
    copies = [(1, 2), (1, 4)][:writers]

    assert manager.num_blocks_to_grow(seqs[:writers]) == len(copies) + writers
    assert [move for seq in seqs[:writers] for move in manager.grow(seq)] == copies
    assert tables(*seqs[:writers]) == [[0, 2, 3], [0, 4, 5], [0, 1, 6]][:writers]
    assert ref_counts(manager)[1] == max(1, 3 - writers)


def test_a_fork_over_another_beam_takes_only_computed_blocks():
    manager = BlockManager(8, 4)
    first, second = forked_group(manager, A + [9], 2)
    for seq in (first, second):
        seq.token_ids += [seq.index] * 4
        manager.grow(seq)
    assert tables(first, second) == [[0, 2, 3], [0, 1, 4]]

    compute(manager, first, until=8)
    second.token_ids = first.token_ids[:-1] + [7]
    manager.fork(first, second)
    # Block 3 belongs to the first alone.
    assert tables(first, second) == [[0, 2, 3], [0, 2]]
    assert (second.num_computed_tokens, second.num_sent_blocks) == (8, 0)
    assert list(manager.free_blocks) == [1, 4, 5, 6, 7]
    assert manager.num_blocks_to_grow([first, second]) == 1
    assert manager.grow(first) == manager.grow(second) == []
    assert tables(first, second) == [[0, 2, 3], [0, 2, 1]]


def test_siblings_publish_what_each_of_them_wrote():
    manager = BlockManager(8, 4)
    first, second = forked_group(manager, A + [2], 2)
    for seq, tokens in ((first, B), (second, [2, 2, 3, 3])):
        seq.token_ids[4:] = tokens
        manager.grow(seq)
        compute(manager, seq)

    assert tables(first, second) == [[0, 2], [0, 1]]
    assert hits(manager, A + B + [9]) == [0, 2]
    assert hits(manager, A + [2, 2, 3, 3, 9]) == [0, 1]


# --- swap ---


def test_swap_moves_shared_blocks_once_and_they_stay_shared():
    manager = BlockManager(6, 4, num_swap_blocks=4)
    first, second = forked_group(manager, A + [9], 2)
    for seq in (first, second):
        seq.token_ids.append(seq.index)
        manager.grow(seq)
        compute(manager, seq)
        seq.num_sent_blocks = 2

    other = run(manager, A + [8])
    assert tables(first, second, other) == [[0, 2], [0, 1], [0, 3]]
    assert manager.swap([first, second], manager.free_swap_blocks) == [
        (0, 6),
        (2, 7),
        (1, 8),
    ]
    assert tables(first, second, other) == [[6, 7], [6, 8], [0, 3]]
    assert ref_counts(manager) == [1, 0, 0, 1, 0, 0, 2, 1, 1, 0]
    assert list(manager.free_blocks) == [1, 2, 4, 5]
    assert list(manager.free_swap_blocks) == [9]
    # On the device, still held by the other.
    assert list(manager.published.values()) == [0]
    assert first.num_computed_tokens == 6
    assert first.num_published_blocks == 0
    assert first.num_sent_blocks == 0
    assert manager.swap([first, second], manager.free_blocks) == [
        (6, 1),
        (7, 2),
        (8, 4),
    ]
    assert tables(first, second) == [[1, 2], [1, 4]]
    assert ref_counts(manager) == [1, 2, 1, 1, 1, 0, 0, 0, 0, 0]
    assert sorted(manager.free_swap_blocks) == [6, 7, 8, 9]


def test_a_swap_that_does_not_fit_changes_nothing():
    manager = BlockManager(4, 4, num_swap_blocks=3)
    seq = run(manager, A + B + [9])
    for spare, fits in ((1, False), (0, True)):
        before = block_state(manager, seq)
        assert bool(manager.swap([seq], manager.free_swap_blocks, spare)) == fits
        assert (block_state(manager, seq) == before) != fits

    holder = admit(manager, D)
    for spare, fits in ((1, False), (0, True)):
        before = block_state(manager, seq, holder)
        assert bool(manager.swap([seq], manager.free_blocks, spare)) == fits
        assert (block_state(manager, seq, holder) == before) != fits


def test_swapped_content_is_found_until_overwritten_and_again_once_it_is_back():
    manager = BlockManager(3, 4, num_swap_blocks=3)
    seq = run(manager, A + B + [9])
    manager.swap([seq], manager.free_swap_blocks)
    assert hits(manager, A + B + [8]) == [0, 1]

    manager.free(run(manager, C + D + [9]))
    assert hits(manager, A + B + [8]) == []

    manager.swap([seq], manager.free_blocks)
    assert hits(manager, A + B + [8]) == []

    manager.publish(seq)
    assert hits(manager, A + B + [8]) == seq.block_table[:2]


def test_blocks_that_are_freed_while_swapped_go_back_to_their_own_pool():
    manager = BlockManager(4, 4, num_swap_blocks=3)
    seqs = forked_group(manager, A + [9], 2)
    manager.swap(seqs, manager.free_swap_blocks)
    for seq in seqs:
        manager.free(seq)
    assert sorted(manager.free_blocks) == [0, 1, 2, 3]
    assert sorted(manager.free_swap_blocks) == [4, 5, 6]
    assert ref_counts(manager) == [0] * 7


# --- withdrawing everything published ---


def test_after_a_failed_step_nothing_is_found_and_nothing_is_lost():
    manager = BlockManager(6, 4)
    manager.free(run(manager, A + B))
    holder = run(manager, C + [9])
    manager.published.clear()

    for tokens in (A + B, C):
        assert hits(manager, tokens + [9]) == []
    assert holder.block_table == [2, 3]

    manager.free(holder)
    assert sorted(manager.free_blocks) == list(range(6))

    again = run(manager, A + B)
    assert hits(manager, A + B + [9]) == again.block_table


# --- any order of operations ---


class Machine(RuleBasedStateMachine):
    """Random operations, each followed by a full check against an independent model.

    The model writes into every slot what the K and V there stand for: a name for the
    salt and all tokens up to that position, and the token itself. A block that is taken
    loses its content; only the moves that the manager returns carry content between
    blocks. A hit must find exactly its own content, and a sequence must find everything
    it has computed, no matter where it forked and whether it was swapped.
    """

    counts: Counter[str] = Counter()
    hash_functions = (
        xxhash.xxh3_64_intdigest,
        constant_hash,
        two_valued_hash,
        blind_hash,
    )

    @initialize(
        hash_function=st.sampled_from(hash_functions),
        caching=st.sampled_from([True, True, True, False]),
        block_size=st.sampled_from([4, 2, 1]),
        num_slots=st.sampled_from([40, 4, 8, 12, 20, 60]),
        num_swap_slots=st.sampled_from([40, 0, 8, 16]),
    )
    def start(self, hash_function, caching, block_size, num_slots, num_swap_slots):
        num_blocks = num_slots // block_size
        num_swap_blocks = num_swap_slots // block_size
        self.manager = BlockManager(
            num_blocks, block_size, caching, num_swap_blocks, hash_function
        )
        total = num_blocks + num_swap_blocks
        self.content = [[None] * block_size for _ in range(total)]
        self.free_order = list(range(num_blocks))
        self.free_swap_order = list(range(num_blocks, total))
        self.names, self.rows = {}, {}
        # On the device, on the CPU, nowhere.
        self.groups, self.swapped, self.gone = ([], [], [])

    # -- the model --

    def pick(self, items, index):
        return items[index % len(items)]

    def holding(self):
        return [seq for group in self.groups + self.swapped for seq in group.live]

    def state(self):
        return block_state(
            self.manager, *self.holding(), *(s for g in self.gone for s in g.live)
        )

    def holders(self):
        return Counter(block for seq in self.holding() for block in seq.block_table)

    def name(self, seq):
        names = []
        name = seq.group.params.cache_salt
        for token in seq.token_ids:
            name = self.names.setdefault((name, token), len(self.names))
            names.append((name, token))
        return names

    def take(self, count, order):
        """Take the first `count` blocks in eviction order; their content is lost."""
        taken = order[:count]
        order[:] = order[count:]
        for block in taken:
            self.counts["evicted"] += self.content[block][-1] is not None
            self.content[block] = [None] * self.manager.block_size
        return taken

    def drop(self, seqs):
        """Free in the model: tail first; what cannot be found goes to the front."""
        holders = self.holders()
        for block in (block for seq in seqs for block in reversed(seq.block_table)):
            holders[block] -= 1
            if not holders[block]:
                device = block < self.manager.num_blocks
                order = self.free_order if device else self.free_swap_order
                found = block in self.manager.published.values()
                order.insert(len(order) if found else 0, block)

    def move(self, moves):
        for source, target in moves:
            self.content[target] = list(self.content[source])

    # -- operations --

    def append_tokens(self, group, tokens):
        """Append tokens. Of three sequences, the last gets the same as the first."""
        for i, seq in enumerate(group.live if group.forked else ()):
            seq.token_ids += [token ^ i % 2 for token in tokens]

    def try_to_admit(self, group, spare, steps):
        manager = self.manager
        size = self.manager.block_size
        leader = group.live[0]
        before = self.state()
        lengths = [len(seq.token_ids) for seq in group.live]
        prefix = manager.match_prefix(leader)
        room = manager.most_blocks(group.num_prompt_tokens, lengths)

        assert self.state() == before
        assert room == len(
            {
                (i, (i + 1) * size > group.num_prompt_tokens and number)
                for number, length in enumerate(lengths)
                for i in range(-(-length // size))
            }
        )
        assert len(prefix) * size < leader.compute_end
        assert manager.enable_prefix_caching or not prefix

        names = self.name(leader)
        for index, block in enumerate(prefix):
            assert self.content[block] == names[index * size :][:size], "a wrong hit"

        revived = [block for block in prefix if block in self.free_order]
        fits = len(revived) + room - len(prefix) <= len(self.free_order) - spare
        assert allocate_if_fits(manager, leader, prefix, room, spare) == fits

        if not fits:
            assert self.state() == before
            self.counts["refused"] += 1
            if self.groups and not spare:
                self.release(self.groups[0])  # or it would be refused forever
            return False
        for block in revived:
            self.free_order.remove(block)
        fresh = -(-leader.compute_end // size) - len(prefix)

        assert leader.block_table == prefix + self.take(fresh, self.free_order)
        assert leader.num_computed_tokens == len(prefix) * size

        self.groups.append(group)
        self.counts.update(admitted=1, hit_blocks=len(prefix), revived=len(revived))
        self.run(group, steps)
        return True

    def run(self, group, steps):
        for some in steps:
            self.step(group, 99, some, tokens=[1])

    def grow(self, seqs):
        """As in a step: check with `missing` that there is room, then let each grow."""
        manager = self.manager
        size = self.manager.block_size
        before = self.state()
        missing = manager.num_blocks_to_grow(seqs)
        shared = self.holders()
        assert self.state() == before

        if missing > len(self.free_order):
            self.counts["refused"] += 1
            return False
        left = len(self.free_order) - missing

        for seq in seqs:
            table = list(seq.block_table)
            index = seq.num_computed_tokens // size
            write = table[index : index + 1]
            copied = [block for block in write if self.holders()[block] > 1]
            new = -(-seq.compute_end // size) - len(table)
            moves = manager.grow(seq)
            taken = self.take(len(copied) + new, self.free_order)

            assert moves == list(zip(copied, taken, strict=False))
            table[index : index + len(copied)] = taken[: len(copied)]
            assert seq.block_table == table + taken[len(copied) :]

            self.move(moves)
            self.counts.update(grown=new, copied=len(copied))
            self.counts["last_holders"] += not copied and any(
                shared[block] > 1 for block in write
            )

        assert len(self.free_order) == left, "`missing` was wrong"
        return True

    def write(self, seq, count):
        """Send the runner new blocks, compute `count` tokens, publish full blocks."""
        manager = self.manager
        size = self.manager.block_size
        names = self.name(seq)
        row = self.rows.setdefault(seq, [])
        sent = seq.num_sent_blocks
        row[sent:] = seq.block_table[sent:]
        seq.num_sent_blocks = len(row)
        assert row == seq.block_table, "the runner's table is not the sequence's"

        holders = self.holders()
        published = set(manager.published.values())
        start = seq.num_computed_tokens
        end = min(seq.num_computed_tokens + count, seq.compute_end)
        for position in range(start, end):
            block = row[position // size]
            offset = position % size
            assert block not in published, "a published block is written"
            assert holders[block] == 1, "a shared block is written"
            self.content[block][offset] = names[position]

        seq.num_computed_tokens = end
        manager.publish(seq)
        assert seq.num_published_blocks == (
            end // size if manager.enable_prefix_caching else 0
        )

        self.counts["computed"] += end - start

    def fork_to(self, parent, child):
        self.drop([child])
        self.manager.fork(parent, child)
        computed = parent.num_computed_tokens
        size = self.manager.block_size
        assert child.block_table == parent.block_table[: -(-computed // size)]
        assert child.num_computed_tokens == computed
        self.counts["forked"] += 1

    def step(self, group, count, some, tokens):
        seqs = [seq for i, seq in enumerate(group.next_sequences) if some >> i & 1]
        while not self.grow(seqs):
            others = [other for other in self.groups if other is not group]
            if not others:
                return
            self.release(others[-1])
        for seq in seqs:
            self.write(seq, count)

        leader, *others = group.live
        if not group.forked and leader.num_computed_tokens == group.num_prompt_tokens:
            for other in others:
                self.fork_to(leader, other)
            group.forked = True
        self.append_tokens(group, tokens)

    def release(self, group):
        place = self.swapped if group in self.swapped else self.groups
        self.counts["freed_while_swapped"] += place is self.swapped
        self.drop(group.live)
        place.remove(group)
        for seq in group.live:
            free(self.manager, seq)
            assert (seq.block_table, seq.num_published_blocks) == ([], 0)
        group.forked = len(group.live) == 1
        self.gone = [*self.gone[-7:], group]

    def try_to_swap(self, group, out, spare):
        manager = self.manager
        before = self.state()
        free = manager.free_swap_blocks if out else manager.free_blocks
        order = self.free_swap_order if out else self.free_order
        old = tables(*group.live)
        held = list(dict.fromkeys(block for table in old for block in table))
        fits = len(held) <= len(order) - spare
        if fits:
            self.drop(group.live)

        moves = manager.swap(group.live, free, spare)
        if not fits:
            assert moves == []
            assert self.state() == before
            self.counts["refused"] += 1
            return False

        assert moves == list(zip(held, self.take(len(held), order), strict=True))
        assert tables(*group.live) == [
            [dict(moves)[block] for block in table] for table in old
        ]

        self.move(moves)
        self.counts["swapped_out" if out else "swapped_in"] += len(moves)
        return True

    # -- rules --

    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
    indices = st.integers(0, 11)
    spares = st.sampled_from([0, 0, 0, 1, 3])
    # Which of a group's sequences, bit by bit.
    some = st.sampled_from([7, 7, 1, 2, 4, 5, 6])
    # Values of `some`.
    steps = st.sampled_from([[7, 7, 7], [], [7], [7, 1], [7, 6], [7, 4, 7]])
    widths = st.sampled_from([2, 1, 3])

    @precondition(lambda self: len(self.groups) < 4)
    @rule(
        tokens=tokens, n=widths, salt=st.sampled_from(SALTS), spare=spares, steps=steps
    )
    def admit_a_new_group(self, tokens, n, salt, spare, steps):
        self.try_to_admit(sequence_group(tokens, n, salt), spare, steps)

    @precondition(lambda self: 0 < len(self.groups + self.swapped + self.gone) < 12)
    @rule(
        index=indices,
        keep=st.integers(1, 14),
        more=tokens,
        n=widths,
        spare=spares,
        steps=steps,
    )
    def admit_one_like_another(self, index, keep, more, n, spare, steps):
        like = self.pick(self.groups + self.swapped + self.gone, index)
        tokens = self.pick(like.live, index).token_ids[:keep] + more[:3]
        self.try_to_admit(
            sequence_group(tokens, n, like.params.cache_salt), spare, steps
        )

    @precondition(lambda self: self.gone)
    @rule(index=indices, spare=spares, steps=steps)
    def admit_one_again(self, index, spare, steps):
        group = self.pick(self.gone, index)
        self.gone.remove(group)
        if not self.try_to_admit(group, spare, steps):
            self.gone.append(group)

    @precondition(lambda self: self.groups)
    @rule(index=indices, tokens=st.lists(st.integers(0, 1), max_size=5), some=some)
    def grow_some(self, index, tokens, some):
        group = self.pick(self.groups, index)
        self.append_tokens(group, tokens)
        self.grow([seq for i, seq in enumerate(group.next_sequences) if some >> i & 1])

    @precondition(lambda self: self.groups)
    @rule(
        index=indices,
        count=st.sampled_from([99, 99, 1, 2, 5]),
        some=some,
        tokens=st.lists(st.integers(0, 1), max_size=3),
    )
    def compute(self, index, count, some, tokens):
        self.step(self.pick(self.groups, index), count, some, tokens)

    @precondition(lambda self: any(len(g.live) > 1 and g.forked for g in self.groups))
    @rule(index=indices, parent=indices, child=indices, tokens=tokens)
    def fork(self, index, parent, child, tokens):
        """As in a beam search, where a beam becomes another beam plus a token."""
        group = self.pick(
            [g for g in self.groups if len(g.live) > 1 and g.forked], index
        )
        parent = self.pick(group.live, parent)
        child = self.pick([seq for seq in group.live if seq is not parent], child)
        child.token_ids = parent.token_ids[: parent.num_computed_tokens] + tokens[:2]
        self.fork_to(parent, child)

    @precondition(lambda self: any(len(g.live) > 1 and g.forked for g in self.groups))
    @rule(index=indices, which=indices)
    def finish_one(self, index, which):
        group = self.pick(
            [g for g in self.groups if len(g.live) > 1 and g.forked], index
        )
        seq = self.pick(group.live, which)
        self.drop([seq])
        self.manager.free(seq)
        group.live.remove(seq)

    @precondition(lambda self: self.groups)
    @rule(index=indices, spare=spares)
    def swap_out(self, index, spare):
        group = self.pick(self.groups, index)
        if self.try_to_swap(group, out=True, spare=spare):
            self.groups.remove(group)
            self.swapped.append(group)

    @precondition(lambda self: self.swapped)
    @rule(index=indices, spare=spares, steps=steps)
    def swap_in(self, index, spare, steps):
        group = self.pick(self.swapped, index)
        if self.try_to_swap(group, out=False, spare=spare):
            self.swapped.remove(group)
            self.groups.append(group)
            self.run(group, steps)

    @precondition(lambda self: self.groups + self.swapped)
    @rule(index=indices)
    def free(self, index):
        before = self.state()
        size = self.manager.block_size
        for seq in self.holding():
            if seq.num_published_blocks == seq.num_computed_tokens // size:
                self.manager.publish(seq)  # nothing new was computed: no effect
        for seq in (seq for group in self.gone for seq in group.live):
            self.manager.free(seq)  # it holds nothing: no effect
        assert self.state() == before
        self.release(self.pick(self.groups + self.swapped, index))

    @precondition(lambda self: len(self.gone) > 3)
    @rule()
    def forget(self):
        """As after a failed step: free everything. Rare, or no cache would grow old."""
        for group in self.groups + self.swapped:
            self.release(group)
        self.manager.published.clear()
        self.gone = []
        self.counts["forgotten"] += 1

    @invariant()
    def everything_adds_up(self):
        self.counts["operations"] += 1
        manager = self.manager
        content = self.content
        holders = self.holders()
        assert ref_counts(manager) == [holders[i] for i in range(len(manager.blocks))]
        assert list(manager.free_blocks) == self.free_order
        assert list(manager.free_swap_blocks) == self.free_swap_order

        free = {i for i, block in enumerate(manager.blocks) if block.ref_count == 0}
        assert free == {*self.free_order, *self.free_swap_order}
        assert all(block < manager.num_blocks for block in self.free_order)

        published = manager.published
        assert all(
            manager.blocks[block].hash == hash for hash, block in published.items()
        )
        assert len(set(published.values())) == len(published)

        ids = [manager.blocks[block].name for block in published.values()]
        assert len(set(ids)) == len(ids)
        for block in published.values():
            assert block < manager.num_blocks
            assert manager.blocks[block].content[1] == [
                token for _, token in content[block]
            ]

        contents = [
            (manager.blocks[block].content[0], *manager.blocks[block].content[1])
            for block in published.values()
        ]
        assert len(set(contents)) == len(contents), "one content, published twice"

        for group in self.groups + self.swapped:
            held = {block for seq in group.live for block in seq.block_table}
            lengths = [len(seq.token_ids) for seq in group.live]
            assert len(held) <= manager.most_blocks(group.num_prompt_tokens, lengths)
            assert {block < manager.num_blocks for block in held} == {
                group in self.groups
            }

        for seq in self.holding():
            self.check_sequence(seq)

    def check_sequence(self, seq):
        size = self.manager.block_size
        computed = seq.num_computed_tokens
        names = self.name(seq)

        assert len(set(seq.block_table)) == len(seq.block_table)
        assert seq.num_published_blocks <= computed // size

        found = [slot for block in seq.block_table for slot in self.content[block]]
        assert found[:computed] == names[:computed], (
            "it reads another sequence's K and V"
        )


EVENTS = (
    "admitted",
    "hit_blocks",
    "revived",
    "evicted",
    "grown",
    "computed",
    "refused",
    "forked",
    "copied",
    "last_holders",
    "swapped_out",
    "swapped_in",
    "freed_while_swapped",
)


def drive(max_examples, steps):
    """Run the machine; returns how often each event happened, for tests to check."""

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

    for event in EVENTS:
        assert Counted.counts[event] > max_examples // 20, (event, Counted.counts)
    return Counted.counts


def test_any_operations_keep_every_invariant():
    drive(200, 50)


@pytest.mark.slow
def test_a_hundred_thousand_operations_keep_every_invariant():
    counts = drive(1700, 100)
    assert counts["operations"] >= 100_000


def test_after_a_collision_siblings_publish_the_same_blocks_without_renaming_them():
    """Found by the machine: renaming a shared block changed the next block's hash."""

    # First blocks share a hash, others get that of the name before them.
    def collide(data):
        return data[0] if not any(data[1:8]) else -1

    manager = BlockManager(9, 4, num_swap_blocks=9, hash_function=collide)
    run(manager, [9, 9, 9, 9, 1])
    first, second = forked_group(manager, A + B + [9], 2)
    for free_list in (manager.free_swap_blocks, manager.free_blocks):
        manager.swap([first, second], free_list)
    for seq in (first, second):
        manager.publish(seq)
    blocks = manager.blocks

    assert all(blocks[block].hash == hash for hash, block in manager.published.items())
