"""Several continuations of one prompt share its blocks, and nobody can tell from the tokens.

Worked examples with exact block ids: fork inside a block and on its boundary, copy-on-write by all
but the last holder, swapping what is shared once. Then the engine: a group comes, goes and comes
back as a whole, in order of arrival, and its tokens are those of an engine with room for everybody.
"""

import dataclasses
import itertools
import random
from collections import Counter

import pytest
import torch

from nanopaged import SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.sequence import SequenceGroup

A, B, C = ([digit] * 4 for digit in (1, 2, 3))  # a block's worth of tokens each
PROMPT = [5, 9, 33, 2, 8, 60, 61]


# --- the block manager: what a fork and a copy do ---


def is_swapped(group):
    """It waits, and its blocks are in CPU memory."""
    return any(seq.row < 0 and seq.block_table for seq in group.live)


def new_group(tokens, n):
    params = SamplingParams(n=n, max_tokens=None)
    return SequenceGroup(None, list(tokens), params, set(), 10**6, None)


def allocate(manager, seq):
    """What the scheduler does on admission; False, and nothing has changed, if there is no room."""
    prefix = manager.match_prefix(seq)
    if not manager.allocate(seq, prefix, manager.room(0, [seq.num_tokens])):
        return False
    seq.num_computed_tokens = len(prefix) * manager.block_size
    return True


def fork(manager, leader, child):
    manager.fork(leader, child)
    child.num_computed_tokens = leader.num_computed_tokens


def free(manager, seq):
    manager.free(seq)
    seq.num_computed_tokens = 0
    seq.group.live.remove(seq)


def forked(manager, tokens, n=2):
    """The sequences of a group whose prompt has been computed, and that has just forked."""
    leader, *others = sequences = new_group(tokens, n).sequences
    assert allocate(manager, leader)
    leader.num_computed_tokens = len(tokens)
    manager.publish(leader)
    for other in others:
        fork(manager, leader, other)
    return sequences


def say(manager, *sequences, count=1, token=9):
    """Every sequence gets tokens of its own, and then the room that it needs for them."""
    for i, seq in enumerate(sequences):
        seq.token_ids += [token + i] * count
    return [manager.grow(seq) for seq in sequences]


def compute(manager, *sequences):
    for seq in sequences:
        seq.num_computed_tokens = len(seq.token_ids)
        manager.publish(seq)


def tables(sequences):
    return [seq.block_table for seq in sequences]


def ref_counts(manager):
    return [block.ref_count for block in manager.blocks]


def state(manager, sequences):
    return (
        list(manager.free_blocks), list(manager.free_swap_blocks), ref_counts(manager),
        dict(manager.published), [seq.block_table[:] for seq in sequences],
    )  # fmt: skip


def test_a_fork_shares_every_block_the_partly_filled_last_one_included():
    manager = BlockManager(8, 4)
    sequences = forked(manager, A + [2, 2], n=3)
    assert tables(sequences) == [[0, 1]] * 3
    assert ref_counts(manager) == [3, 3, 0, 0, 0, 0, 0, 0]
    assert list(manager.free_blocks) == [2, 3, 4, 5, 6, 7]


def test_a_fork_gives_away_computed_blocks_only():
    manager = BlockManager(8, 4)
    leader, child = new_group(A + B + [9], 2).sequences
    assert allocate(manager, leader)
    assert leader.block_table == [0, 1, 2]
    leader.num_computed_tokens = 6
    fork(manager, leader, child)
    assert child.block_table == [0, 1]
    assert ref_counts(manager) == [2, 2, 1, 0, 0, 0, 0, 0]


def test_tables_of_parent_and_child_are_not_one_list():
    manager = BlockManager(8, 4)
    first, second = forked(manager, A)
    assert first.block_table is not second.block_table


def test_the_first_write_inside_a_shared_block_copies_it_except_for_the_last_holder():
    manager = BlockManager(8, 4)
    sequences = forked(manager, A + [2, 2], n=3)
    for seq in sequences:
        seq.token_ids.append(9)
    assert manager.missing(sequences) == 2
    assert [manager.grow(seq) for seq in sequences] == [[(1, 2)], [(1, 3)], []]
    assert tables(sequences) == [[0, 2], [0, 3], [0, 1]]
    assert ref_counts(manager) == [3, 1, 1, 1, 0, 0, 0, 0]
    compute(manager, *sequences)
    assert manager.missing(sequences) == 0
    assert say(manager, *sequences) == [[], [], []]  # each has its own by now
    assert tables(sequences) == [[0, 2], [0, 3], [0, 1]]


def test_after_a_fork_on_a_boundary_nothing_is_copied():
    manager = BlockManager(8, 4)
    sequences = forked(manager, A + B, n=3)
    for seq in sequences:
        seq.token_ids.append(9)
    assert manager.missing(sequences) == 3
    assert [manager.grow(seq) for seq in sequences] == [[], [], []]
    assert tables(sequences) == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert ref_counts(manager) == [3, 3, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_the_only_block_of_a_short_prompt_is_shared_like_any_other(length):
    manager = BlockManager(8, 4)
    first, second = forked(manager, A[:length])
    copies = say(manager, first, second)
    if length < 4:
        assert (copies, tables([first, second])) == ([[(0, 1)], []], [[1], [0]])
    else:
        assert (copies, tables([first, second])) == ([[], []], [[0, 1], [0, 2]])


def test_one_step_may_need_a_copy_and_new_blocks_behind_it():
    """As after a preemption by recompute: several tokens are known beyond the prompt."""
    manager = BlockManager(8, 4)
    first, second = sequences = forked(manager, A + [2, 2])
    for seq in sequences:
        seq.token_ids += [9] * 4
    assert manager.missing([first]) == 2
    assert manager.missing(sequences) == 3
    assert manager.grow(first) == [(1, 2)]
    assert manager.missing([second]) == 1
    assert manager.grow(second) == []
    assert tables(sequences) == [[0, 2, 3], [0, 1, 4]]


def test_missing_says_for_any_of_the_holders_what_they_will_take():
    manager = BlockManager(8, 4)
    a, b, c = sequences = forked(manager, A + [2], n=3)
    for seq in sequences:
        seq.token_ids.append(9)
    assert manager.missing([]) == 0
    assert [manager.missing([seq]) for seq in sequences] == [1, 1, 1]
    assert [manager.missing(pair) for pair in ([a, b], [b, c], [a, c])] == [2, 2, 2]
    assert manager.missing(sequences) == 2
    free(manager, b)
    assert manager.missing([a]) == 1
    assert manager.missing([a, c]) == 1
    free(manager, c)
    assert manager.missing([a]) == 0


def test_a_copy_that_finds_no_block_becomes_needless_when_the_other_holder_goes():
    manager = BlockManager(2, 4)
    first, second = forked(manager, A + [2, 2])
    for seq in (first, second):
        seq.token_ids.append(9)
    assert not manager.free_blocks
    assert manager.missing([first, second]) == 1
    free(manager, second)
    assert manager.missing([first]) == 0
    assert manager.grow(first) == []
    assert first.block_table == [0, 1]
    assert ref_counts(manager) == [1, 1]


def test_a_copied_block_leaves_the_free_list_from_its_front():
    manager = BlockManager(6, 4)
    other, = forked(manager, C + C, n=1)
    first, second = forked(manager, A + [2])
    assert tables([other, first]) == [[0, 1], [2, 3]]
    free(manager, other)
    assert list(manager.free_blocks) == [4, 5, 1, 0]
    assert say(manager, first, second) == [[(3, 4)], []]
    assert list(manager.free_blocks) == [5, 1, 0]


def test_freeing_one_of_several_keeps_what_the_others_hold():
    manager = BlockManager(8, 4)
    a, b, c = forked(manager, A + [2, 2], n=3)
    free(manager, a)
    assert ref_counts(manager) == [2, 2, 0, 0, 0, 0, 0, 0]
    assert say(manager, b, c) == [[(1, 2)], []]
    compute(manager, b, c)
    free(manager, c)
    assert list(manager.free_blocks) == [1, 3, 4, 5, 6, 7]
    free(manager, b)
    assert list(manager.free_blocks) == [2, 1, 3, 4, 5, 6, 7, 0]  # 0 holds A, and is still found


def test_what_each_of_them_said_is_found_later_after_the_common_prompt():
    manager = BlockManager(12, 4)
    sequences = forked(manager, A + [2, 2], n=3)
    say(manager, *sequences, count=3)
    compute(manager, *sequences)
    assert tables(sequences) == [[0, 2, 3], [0, 1, 5], [0, 4, 6]] or tables(sequences) == [
        [0, 2, 3], [0, 4, 5], [0, 1, 6]
    ]  # fmt: skip
    for seq in sequences:
        later = new_group(seq.token_ids + [7], 1).sequences[0]
        assert manager.match_prefix(later) == seq.block_table[:2]


def test_of_two_that_said_the_same_one_block_is_found():
    manager = BlockManager(12, 4)
    first, second = forked(manager, A + [2, 2])
    for seq in (first, second):
        seq.token_ids += [9, 9]
        manager.grow(seq)
    assert tables([first, second]) == [[0, 2], [0, 1]]
    compute(manager, first, second)
    later = new_group(A + [2, 2, 9, 9, 7], 1).sequences[0]
    assert manager.match_prefix(later) == [0, 2]
    assert len(manager.published) == 2


# --- the block manager: swapping ---


def test_what_is_shared_is_swapped_once_and_comes_back_shared():
    manager = BlockManager(4, 4, num_swap_blocks=4)
    sequences = forked(manager, A + [2, 2], n=3)
    assert list(manager.free_swap_blocks) == [4, 5, 6, 7]
    assert manager.swap(sequences, manager.free_swap_blocks) == [(0, 4), (1, 5)]
    assert tables(sequences) == [[4, 5]] * 3
    assert ref_counts(manager) == [0, 0, 0, 0, 3, 3, 0, 0]
    assert sorted(manager.free_blocks) == [0, 1, 2, 3]
    assert list(manager.free_swap_blocks) == [6, 7]
    back = manager.swap(sequences, manager.free_blocks)
    assert [source for source, _ in back] == [4, 5]
    first, second = (target for _, target in back)
    assert first != second and {first, second} < {0, 1, 2, 3}
    assert tables(sequences) == [[first, second]] * 3
    assert sorted(manager.free_swap_blocks) == [4, 5, 6, 7]
    assert sum(ref_counts(manager)) == 6
    copies = say(manager, *sequences)  # it is as shared as it was
    assert [[source for source, _ in copy] for copy in copies] == [[second], [second], []]


def test_what_has_parted_is_swapped_apart():
    manager = BlockManager(6, 4, num_swap_blocks=6)
    sequences = forked(manager, A + [2, 2])
    say(manager, *sequences, count=3)
    compute(manager, *sequences)
    assert tables(sequences) == [[0, 2, 3], [0, 1, 4]]
    moves = manager.swap(sequences, manager.free_swap_blocks)
    assert moves == [(0, 6), (2, 7), (3, 8), (1, 9), (4, 10)]
    assert tables(sequences) == [[6, 7, 8], [6, 9, 10]]
    assert ref_counts(manager) == [0] * 6 + [2, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("room", [0, 1, 2, 3, 4])
def test_a_swap_that_does_not_fit_changes_nothing(room):
    manager = BlockManager(6, 4, num_swap_blocks=room)
    sequences = forked(manager, A + [2, 2])
    say(manager, *sequences, count=3)
    compute(manager, *sequences)
    before = state(manager, sequences)  # five blocks
    assert manager.swap(sequences, manager.free_swap_blocks) == []
    assert state(manager, sequences) == before


def test_what_does_not_fit_back_stays_where_it_is():
    manager = BlockManager(3, 4, num_swap_blocks=2)
    sequences = forked(manager, A + [2, 2])
    assert manager.swap(sequences, manager.free_swap_blocks) == [(0, 3), (1, 4)]
    (other,) = forked(manager, B + C, n=1)
    before = state(manager, sequences)
    assert manager.swap(sequences, manager.free_blocks) == []
    assert state(manager, sequences) == before
    free(manager, other)
    assert len(manager.swap(sequences, manager.free_blocks)) == 2


def test_a_block_that_another_group_holds_too_is_swapped_for_one_and_stays_for_the_other():
    manager = BlockManager(6, 4, num_swap_blocks=6)
    (other,) = forked(manager, A + C, n=1)
    sequences = forked(manager, A + [2, 2])
    assert (other.block_table, tables(sequences)) == ([0, 1], [[0, 2], [0, 2]])
    assert ref_counts(manager)[:3] == [3, 1, 2]
    assert manager.swap(sequences, manager.free_swap_blocks) == [(0, 6), (2, 7)]
    assert tables(sequences) == [[6, 7], [6, 7]]
    assert other.block_table == [0, 1]
    assert ref_counts(manager) == [1, 1, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0]
    free(manager, other)
    assert sorted(manager.free_blocks) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_freeing_who_is_swapped_gives_back_swap_blocks(order):
    manager = BlockManager(6, 4, num_swap_blocks=6)
    sequences = forked(manager, A + [2, 2], n=3)
    say(manager, *sequences, count=1)
    compute(manager, *sequences)
    manager.swap(sequences, manager.free_swap_blocks)
    assert len(manager.free_swap_blocks) == 2
    for left, index in zip((2, 1, 0), order, strict=True):
        free(manager, sequences[index])
        assert len(manager.free_swap_blocks) == 6 - (left + 1 if left else 0)
    assert sorted(manager.free_swap_blocks) == list(range(6, 12))
    assert sorted(manager.free_blocks) == list(range(6))


def test_nobody_finds_a_swap_block_in_the_prefix_cache():
    manager = BlockManager(3, 4, num_swap_blocks=4)
    sequences = forked(manager, A + B)
    manager.swap(sequences, manager.free_swap_blocks)
    for tokens in (A + B + [9], A + [9]):
        prefix = manager.match_prefix(new_group(tokens, 1).sequences[0])
        assert all(block_id < 3 for block_id in prefix)
    forked(manager, C + C + [9], n=1)  # takes all three device blocks
    assert manager.match_prefix(new_group(A + B + [9], 1).sequences[0]) == []


# --- the block manager: any order ---


class Contents:
    """What the K and V in every slot stand for: all tokens up to there. Moves and copies move it.

    `write` is a step: it computes all tokens of a sequence and checks that it can read its past.
    """

    def __init__(self, rng):
        self.rng = rng
        self.size = rng.choice([1, 2, 4])
        self.manager = BlockManager(rng.randint(6, 20), self.size, rng.random() < 0.7,
                                    num_swap_blocks=rng.randint(0, 16))  # fmt: skip
        self.slots = {}
        self.groups = []  # lists of live sequences
        self.swapped = []
        self.events = Counter()

    def copy(self, pairs):
        before = dict(self.slots)
        for source, target in pairs:
            for offset in range(self.size):
                self.slots[target, offset] = before.get((source, offset))

    def write(self, seq):
        for i in range(seq.num_computed_tokens, len(seq.token_ids)):
            block_id = seq.block_table[i // self.size]
            assert self.manager.blocks[block_id].ref_count == 1, "a shared block is written"
            self.slots[block_id, i % self.size] = tuple(seq.token_ids[: i + 1])
        self.read(seq, len(seq.token_ids))
        compute(self.manager, seq)

    def read(self, seq, count):
        for i in range(count):
            slot = seq.block_table[i // self.size], i % self.size
            assert self.slots.get(slot) == tuple(seq.token_ids[: i + 1]), "not its own past"

    def admit(self):
        rng = self.rng
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 3 * self.size + 1))]
        leader, *others = sequences = new_group(tokens, rng.randint(1, 5)).sequences
        if not allocate(self.manager, leader):
            return
        self.write(leader)
        for other in others:
            fork(self.manager, leader, other)
        self.groups.append(sequences)
        self.events["admitted"] += 1

    def decode(self):
        sequences = self.rng.choice(self.groups)
        count = self.rng.choice([1, 1, 1, self.size + 1])
        for seq in sequences:
            seq.token_ids += [self.rng.randrange(2) for _ in range(count)]
        missing, free = self.manager.missing(sequences), len(self.manager.free_blocks)
        if missing > free:
            for seq in sequences:
                del seq.token_ids[-count:]
            self.events["no room"] += 1
            return
        copies = [self.manager.grow(seq) for seq in sequences]
        assert free - len(self.manager.free_blocks) == missing
        assert all(len(copy) <= 1 for copy in copies)
        self.copy(itertools.chain.from_iterable(copies))
        self.events["copied"] += sum(map(len, copies))
        for seq in sequences:
            self.write(seq)

    def branch(self):
        """As a beam search does: a beam goes, and another one continues twice."""
        sequences = self.rng.choice(self.groups)
        if len(sequences) > 1:
            gone, parent = self.rng.sample(range(len(sequences)), 2)
            child = sequences[gone]
            self.manager.free(child)
            child.token_ids = list(sequences[parent].token_ids)
            fork(self.manager, sequences[parent], child)
            self.read(child, len(child.token_ids))
            self.events["branched"] += 1

    def drop(self):
        groups = self.rng.choice([self.groups, self.swapped])
        if groups:
            sequences = self.rng.choice(groups)
            free(self.manager, sequences.pop(self.rng.randrange(len(sequences))))
            groups[:] = [group for group in groups if group]
            self.events["dropped"] += 1

    def swap_out(self):
        self.swap(self.groups, self.swapped, self.manager.free_swap_blocks, "swapped out")

    def swap_in(self):
        if self.swapped:
            self.swap(self.swapped, self.groups, self.manager.free_blocks, "swapped in")

    def swap(self, groups, others, free_list, event):
        index = self.rng.randrange(len(groups))
        pairs = self.manager.swap(groups[index], free_list)
        if pairs:
            self.move(pairs)
            others.append(groups.pop(index))
            self.events[event] += 1

    def move(self, pairs):
        sources, targets = zip(*pairs, strict=True)
        assert len(set(sources)) == len(sources) and len(set(targets)) == len(targets)
        self.copy(pairs)

    def check(self):
        manager, live = self.manager, list(itertools.chain(*self.groups, *self.swapped))
        references = Counter(block for seq in live for block in seq.block_table)
        assert ref_counts(manager) == [references[i] for i in range(len(manager.blocks))]
        unheld = set(range(len(manager.blocks))) - references.keys()
        assert {*manager.free_blocks, *manager.free_swap_blocks} == unheld
        assert all(block_id < manager.num_blocks for block_id in manager.free_blocks)
        assert all(block_id >= manager.num_blocks for block_id in manager.free_swap_blocks)
        for seq in live:
            self.read(seq, seq.num_computed_tokens)

    def run(self, count):
        acts = [self.admit, self.decode, self.decode, self.decode, self.branch, self.branch,
                self.drop, self.swap_out, self.swap_in]  # fmt: skip
        for _ in range(count):
            act = self.rng.choice(acts) if self.groups else self.admit
            act = self.swap_in if self.swapped and not self.groups else act
            act()
            self.check()
        for seq in itertools.chain(*self.groups, *self.swapped):
            free(self.manager, seq)
        assert len(self.manager.free_blocks) == self.manager.num_blocks
        return self.events


def test_any_forks_writes_drops_and_swaps_leave_everybody_its_own_past():
    events = Counter()
    for seed in range(60):
        events += Contents(random.Random(seed)).run(120)
    for event in ("admitted", "copied", "branched", "dropped", "swapped out", "swapped in",
                  "no room"):  # fmt: skip
        assert events[event] > 150, (event, events)


@pytest.mark.slow
def test_many_forks_writes_drops_and_swaps_leave_everybody_its_own_past():
    for seed in range(1000, 2500):
        Contents(random.Random(seed)).run(150)


# --- the engine: helpers ---


def sampled(n, seed=7, **more):
    defaults = {"temperature": 1.0, "top_k": 20, "max_tokens": 16, "ignore_eos": True}
    return SamplingParams(n=n, seed=seed, **(defaults | more))


def tokens_of(output):
    return [list(completion.token_ids) for completion in output.outputs]


def generate(llm, prompts, params):
    return [tokens_of(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def groups_of(llm):
    return [group for group in llm.scheduler.running if group.live]


def blocks_of(group):
    """The different blocks that a group holds."""
    return {block_id for seq in group.live for block_id in seq.block_table}


def record(llm):
    """Every batch that the engine's scheduler makes from now on."""
    batches, schedule = [], llm.scheduler.schedule

    def recording():
        batches.append(schedule())
        return batches[-1]

    llm.scheduler.schedule = recording
    return batches


def most_blocks(length, n, count, block_size=4):
    """What a group can need at most: the prompt's full blocks once, the rest for each of the n."""
    shared = length // block_size
    return shared + n * (-(-(length + count) // block_size) - shared)


# --- the engine: tokens ---


@pytest.mark.parametrize("n", range(1, 9))
def test_the_first_draws_what_one_alone_would_and_the_others_something_else(
    llama, n, engine, swap_space
):
    llm = engine(llama, num_blocks=200, swap_space=swap_space(llama, 8, 4))
    (alone,), several, again = generate(llm, [PROMPT] * 3, [sampled(1), sampled(n), sampled(n)])
    assert len(several) == n
    assert several[0] == alone
    assert len({tuple(tokens) for tokens in several}) == n
    assert again == several
    ((other, *_),) = generate(llm, [PROMPT], sampled(n, seed=8))
    assert other not in several


def test_several_are_drawn_the_same_alone_and_in_any_batch(llama, engine, swap_space):
    prompts = [PROMPT, PROMPT[:4], PROMPT * 2, [3]]
    params = [sampled(3, seed=i) for i in range(4)]
    llm = engine(llama, num_blocks=200, swap_space=swap_space(llama, 8, 4))
    together = generate(llm, prompts, params)
    alone = [generate(llm, [prompts[i]], params[i])[0] for i in range(4)]
    assert together == alone


def test_each_draws_its_own_numbers_at_every_position(make_model, engine, swap_space):
    """At a very high temperature a token shows the number that drew it, so streams can be told."""
    path = make_model("qwen3", seed=21, vocab_size=40, eos=[39, 38])
    llm = engine(path, num_blocks=400, max_model_len=256, swap_space=swap_space(path, 8, 4))
    params = sampled(6, temperature=1e6, top_k=0, max_tokens=200)
    (streams,) = generate(llm, [[1]], params)
    for (i, one), (j, other) in itertools.product(enumerate(streams), repeat=2):
        for shift in range(-8, 9):
            if i == j and shift == 0:
                continue
            pairs = zip(one[8:-8], other[8 + shift : 192 + shift], strict=True)
            assert sum(a == b for a, b in pairs) < 20, (i, j, shift)  # expected: 4.6 of 184


def test_the_frequencies_of_each_are_the_probabilities(make_model, engine, reference, swap_space):
    path = make_model("qwen3", seed=21, vocab_size=40, eos=[39, 38])
    llm = engine(path, num_blocks=400, max_model_len=64, swap_space=swap_space(path, 8, 4))
    params = [sampled(4, seed=seed, top_k=0, max_tokens=1) for seed in range(600)]
    drawn = generate(llm, [PROMPT[:5]] * 600, params)
    expected = torch.softmax(reference.logits(path, PROMPT[:5])[-1], -1)
    for index in range(4):
        counts = Counter(outputs[index][0] for outputs in drawn)
        found = torch.tensor([counts[token] / 600 for token in range(40)])
        assert float((found - expected).abs().sum()) / 2 < 0.15
    same = sum(a == b for (a,), (b,), *_ in drawn) / 600
    assert abs(same - float((expected**2).sum())) < 0.08  # the first two are independent


@pytest.mark.parametrize("length", [4, 5, 7, 8, 9])
def test_greedy_sequences_are_all_the_same(
    llama, length, engine, reference, draw_prompts, swap_space
):
    (prompt,) = draw_prompts(llama, [length], 16, seed=length)
    llm = engine(llama, swap_space=swap_space(llama, 8, 4))
    params = SamplingParams(n=4, temperature=0, max_tokens=16, ignore_eos=True)
    assert generate(llm, [prompt], params) == [[reference.generate(llama, prompt, 16)] * 4]


def test_unseeded_requests_draw_n_different_sequences(llama, engine, swap_space):
    llm = engine(llama, num_blocks=200, swap_space=swap_space(llama, 8, 4))
    drawn = generate(llm, [PROMPT, PROMPT], sampled(4, seed=None))
    assert len({tuple(tokens) for outputs in drawn for tokens in outputs}) == 8


def test_logprobs_are_those_of_each_sequence(llama, engine, reference, swap_space):
    llm = engine(llama, swap_space=swap_space(llama, 8, 4))
    (output,) = llm.generate([PROMPT], sampled(3, logprobs=2), use_tqdm=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    for completion in output.outputs:
        tokens = list(completion.token_ids)
        rows = torch.log_softmax(reference.logits(llama, PROMPT + tokens), -1)[len(PROMPT) - 1 :]
        chosen = [float(row[token]) for row, token in zip(rows, tokens, strict=False)]
        given = [logprobs[token] for logprobs, token in
                 zip(completion.logprobs, tokens, strict=True)]  # fmt: skip
        assert given == pytest.approx(chosen, abs=1e-3)
        assert completion.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-3)


def test_each_ends_at_its_own_stop_token(llama, engine, swap_space, check_invariants):
    llm = engine(llama, num_blocks=200, swap_space=swap_space(llama, 8, 4))
    (endless,) = generate(llm, [PROMPT], sampled(6))
    stop = [endless[i][2 * i + 1] for i in range(5)]  # ends the first early, the fifth late
    llm.add_request(PROMPT, sampled(6, stop_token_ids=stop))
    living = set()
    while llm.has_unfinished_requests():
        outputs = llm.step()
        check_invariants(llm)
        living.add(sum(len(group.live) for group in groups_of(llm)))
    for tokens, completion in zip(endless, outputs[0].outputs, strict=True):
        ends = [i for i, token in enumerate(tokens) if token in stop]
        expected = tokens[: ends[0] + 1] if ends else tokens
        assert list(completion.token_ids) == expected
        assert completion.finish_reason == ("stop" if ends else "length")
    assert len(living) > 3


def test_each_ends_at_its_own_stop_string(text_model, engine, swap_space):
    llm = engine(text_model, num_blocks=200, swap_space=swap_space(text_model, 8, 4))
    params = {"max_tokens": 24, "top_k": 0}
    (endless,) = llm.generate(["the block"], sampled(6, **params), use_tqdm=False)
    texts = [completion.text for completion in endless.outputs]
    assert len(set(texts)) == 6
    letters = Counter(char for text in texts for char in set(text) if char.isalnum())
    stop = min(letters, key=lambda char: abs(letters[char] - 3))
    assert 0 < letters[stop] < 6
    (output,) = llm.generate(["the block"], sampled(6, stop=stop, **params), use_tqdm=False)
    for text, completion in zip(texts, output.outputs, strict=True):
        assert completion.text == text.partition(stop)[0]
        assert completion.finish_reason == ("stop" if stop in text else "length")


def test_a_stream_tells_all_n_after_every_step(llama, engine, swap_space):
    llm = engine(llama, swap_space=swap_space(llama, 8, 4))
    (expected,) = generate(llm, [PROMPT], sampled(3))
    told = [tokens_of(output) for output in llm.stream([PROMPT], sampled(3))]
    assert told == [[tokens[:count] for tokens in expected] for count in range(1, 17)]


# --- the engine: the prompt is computed once, and its blocks are shared ---


def test_the_prompt_is_computed_once(llama, engine, swap_space):
    llm = engine(llama, max_num_seqs=8, max_num_batched_tokens=8,
                 swap_space=swap_space(llama, 8, 4))  # fmt: skip
    batches = record(llm)
    llm.add_request(range(20), sampled(5, max_tokens=4))
    while llm.has_unfinished_requests():
        llm.step()
    assert [batch.counts for batch in batches] == [[8], [8], [4], [1] * 5, [1] * 5, [1] * 5]
    takers = [[(i, seq.index) for i, seq in zip(batch.samples, batch.drawn, strict=True)]
              for batch in batches]  # fmt: skip
    assert takers[:2] == [[], []]
    assert takers[2] == [(0, index) for index in range(5)]  # one row of logits for all
    assert takers[3:] == [[(index, index) for index in range(5)]] * 3
    assert llm.stats().prompt_tokens == 20
    assert llm.stats().output_tokens == 20


def test_a_fork_inside_a_block(llama, engine, swap_space, check_invariants):
    """Six tokens in blocks of four, three sequences: blocks 0 and 1 are shared by all."""
    llm = engine(llama, num_blocks=16, max_model_len=16, swap_space=swap_space(llama, 8, 4))
    batches = record(llm)
    request = llm.add_request(PROMPT[:6], sampled(3, temperature=9.0, top_k=0, max_tokens=6))
    steps = [
        ([[0, 1]] * 3, [3, 3], []),
        ([[0, 2], [0, 3], [0, 1]], [3, 1, 1, 1], [(1, 2), (1, 3)]),
        ([[0, 2], [0, 3], [0, 1]], [3, 1, 1, 1], []),
        ([[0, 2, 4], [0, 3, 5], [0, 1, 6]], [3, 1, 1, 1, 1, 1, 1], []),
        ([[0, 2, 4], [0, 3, 5], [0, 1, 6]], [3, 1, 1, 1, 1, 1, 1], []),
    ]
    for expected, counts, copies in steps:
        llm.step()
        check_invariants(llm)
        (group,) = groups_of(llm)
        assert tables(group.live) == expected
        assert ref_counts(llm.blocks)[:16] == counts + [0] * (16 - len(counts))
        assert batches[-1].copies == copies
    (output,) = llm.step()
    assert output.request_id == request
    assert len({tuple(tokens[:2]) for tokens in tokens_of(output)}) == 3
    assert llm.stats().blocks_copied == 2
    # Tail first. What is full and known goes to the back: 1, 2 and 3 say something, and 0.
    assert list(llm.blocks.free_blocks)[-4:] == [2, 3, 1, 0]
    assert len(llm.blocks.free_blocks) == 16


def test_a_fork_on_a_boundary(llama, engine, swap_space, check_invariants):
    llm = engine(llama, num_blocks=16, max_model_len=16, swap_space=swap_space(llama, 8, 4))
    llm.add_request(range(8), sampled(3, max_tokens=3))
    for expected in ([[0, 1]] * 3, [[0, 1, 2], [0, 1, 3], [0, 1, 4]]):
        llm.step()
        check_invariants(llm)
        assert tables(groups_of(llm)[0].live) == expected
    assert ref_counts(llm.blocks)[:6] == [3, 3, 1, 1, 1, 0]
    llm.step()
    assert llm.stats().blocks_copied == 0


def test_who_ends_with_its_first_token_copies_nothing(llama, engine, swap_space, check_invariants):
    """Of three, the middle one ends before it writes: the other two need one copy."""
    llm = engine(llama, num_blocks=16, max_model_len=16, swap_space=swap_space(llama, 8, 4))
    params = next(
        params for params in (sampled(3, seed, max_tokens=4) for seed in range(50))
        if len({tokens[0] for tokens in generate(llm, [PROMPT[:6]], params)[0]}) == 3
    )  # fmt: skip
    ((_, (first, *_), _),) = generate(llm, [PROMPT[:6]], params)
    fresh = engine(llama, num_blocks=16, max_model_len=16, swap_space=swap_space(llama, 8, 4))
    fresh.add_request(PROMPT[:6], sampled(3, params.seed, max_tokens=2, stop_token_ids=[first]))
    fresh.step()
    check_invariants(fresh)
    assert ref_counts(fresh.blocks)[:3] == [2, 2, 0]
    fresh.step()
    assert fresh.stats().blocks_copied == 1
    assert not fresh.has_unfinished_requests()


@pytest.mark.parametrize("length", [5, 6, 7, 8, 9])
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_at_most_one_copy_per_sequence_and_none_for_the_last_holder(
    llama, n, length, engine, swap_space
):
    llm = engine(llama, num_blocks=100, swap_space=swap_space(llama, 8, 4))
    generate(llm, [list(range(length))], sampled(n, max_tokens=9))
    assert llm.stats().blocks_copied == (n - 1 if length % 4 else 0)


def test_two_groups_with_one_prompt_share_its_full_blocks(
    llama, engine, swap_space, check_invariants
):
    llm = engine(llama, num_blocks=32, max_model_len=16, swap_space=swap_space(llama, 8, 4))
    for seed in (1, 2):
        llm.add_request(PROMPT[:6], sampled(2, seed, max_tokens=4))
    for expected in (
        [[[0, 1], [0, 1]], [[0, 2], [0, 2]]],
        [[[0, 3], [0, 1]], [[0, 4], [0, 2]]],
    ):
        llm.step()
        check_invariants(llm)
        assert [tables(group.live) for group in groups_of(llm)] == expected
    assert ref_counts(llm.blocks)[:6] == [4, 1, 1, 1, 1, 0]
    while llm.has_unfinished_requests():
        llm.step()


def test_sequences_that_share_hold_few_blocks(llama, engine, swap_space):
    """Eight continuations of 41 tokens: 10 blocks of the prompt, and then 1 or 2 for each."""
    llm = engine(llama, num_blocks=100, max_model_len=64, swap_space=swap_space(llama, 8, 4))
    llm.add_request(range(41), sampled(8, max_tokens=6))
    used = []
    while llm.has_unfinished_requests():
        llm.step()
        used.append((llm.stats().blocks_used, llm.stats().tokens_held))
    assert used == [(11, 41), (18, 56), (18, 64), (18, 72), (26, 80), (0, 0)]


# --- the engine: no free block ---


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_copy_that_finds_no_block_sends_the_youngest_away_as_a_whole(
    llama, mode, engine, swap_space, check_invariants, drain_checked
):
    """Five blocks. The first holds 0 and 1, the fork 2 and 3; the first takes the last one, 4."""
    roomy = engine(llama, num_blocks=64, max_model_len=16, swap_space=swap_space(llama, 8, 4))
    prompts = [[*PROMPT, 1], PROMPT[1:7]]
    params = [sampled(1, 3, max_tokens=4), sampled(2, 4, max_tokens=2)]
    expected = generate(roomy, prompts, params)
    llm = engine(llama, num_blocks=5, max_model_len=16, swap_space=swap_space(llama, 4, 4),
                 preemption_mode=mode)  # fmt: skip
    batches = record(llm)
    requests = [llm.add_request(*pair) for pair in zip(prompts, params, strict=True)]
    llm.step()
    check_invariants(llm)
    first, second = groups_of(llm)
    assert (tables(first.live), tables(second.live)) == ([[0, 1]], [[2, 3], [2, 3]])
    assert list(llm.blocks.free_blocks) == [4]
    llm.step()
    check_invariants(llm)
    assert groups_of(llm) == [first] and list(llm.scheduler.waiting) == [second]
    assert tables(first.live) == [[0, 1, 4]]
    if mode == "swap":
        assert is_swapped(second)
        assert batches[-1].swaps_out == [(2, 5), (3, 6)]
        assert tables(second.live) == [[5, 6], [5, 6]]
        assert ref_counts(llm.blocks) == [1, 1, 0, 0, 1, 2, 2, 0, 0]
    else:
        assert not is_swapped(second)
        assert ref_counts(llm.blocks) == [1, 1, 0, 0, 1, 0, 0, 0, 0]
    last = drain_checked(llm)
    assert [tokens_of(last[request]) for request in requests] == expected
    stats = llm.stats()
    counts = (stats.preemptions_swap, stats.preemptions_recompute, stats.blocks_swapped)
    assert counts == ((1, 0, 4) if mode == "swap" else (0, 1, 0))


def test_a_group_may_fill_the_whole_pool_alone(llama, engine, swap_space, drain_checked):
    """Every length of prompt: exactly as many blocks as it can need, and it runs alone."""
    for length, n in itertools.product([4, 5, 6, 7, 8], [2, 3, 5]):
        exact = most_blocks(length, n, 10)
        roomy, llm = (
            engine(llama, num_blocks=num_blocks, max_model_len=length + 10, preemption_mode=mode,
                   swap_space=swap_space(llama, 0, 4))
            for num_blocks, mode in ((100, "auto"), (exact, "swap"))
        )  # fmt: skip
        prompt = list(range(length))
        request = llm.add_request(prompt, sampled(n, max_tokens=10))
        last = drain_checked(llm)
        assert [tokens_of(last[request])] == generate(roomy, [prompt], sampled(n, max_tokens=10))
        assert llm.stats().preemptions_recompute == llm.stats().preemptions_swap == 0


# --- the engine: groups as a whole, in order ---


def test_a_group_that_does_not_fit_waits_as_a_whole_and_nobody_overtakes(
    llama, engine, swap_space, check_invariants
):
    llm = engine(llama, num_blocks=100, max_num_seqs=6, max_num_batched_tokens=64,
                 swap_space=swap_space(llama, 8, 4))  # fmt: skip
    first = llm.add_request(PROMPT, sampled(4, max_tokens=6))
    second = llm.add_request(PROMPT[:3], sampled(4, max_tokens=3))
    third = llm.add_request(PROMPT[:2], sampled(1, max_tokens=2))
    order = []
    while llm.has_unfinished_requests():
        order.append([output.request_id for output in llm.step()])
        check_invariants(llm)
        for group in groups_of(llm):
            assert len(group.live) in (group.params.n, 0)
    assert order == [[first]] * 6 + [[second, third]] * 2 + [[second]]


def test_sequences_that_have_ended_make_room_for_the_next_group(
    llama, engine, swap_space, check_invariants
):
    """Rows are counted by living sequences: four of six end early, and four more may come."""
    llm = engine(llama, num_blocks=100, max_num_seqs=6, max_num_batched_tokens=64,
                 swap_space=swap_space(llama, 8, 4))  # fmt: skip
    (endless,) = generate(llm, [PROMPT], sampled(6))
    stop = [tokens[1] for tokens in endless[:4]]
    ends = [next((i for i, t in enumerate(tokens) if t in stop), 16) for tokens in endless]
    free_at = sorted(ends)[3]  # when four have ended
    assert free_at < 15
    llm.add_request(PROMPT, sampled(6, stop_token_ids=stop))
    second = llm.add_request(PROMPT[:3], sampled(4, max_tokens=3))
    steps = 0
    while llm.has_unfinished_requests():
        came = second in [output.request_id for output in llm.step()]
        check_invariants(llm)
        steps += 1
        if came:
            break
    assert steps == free_at + 2
    while llm.has_unfinished_requests():
        llm.step()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_youngest_goes_first_and_all_come_back_in_order(
    llama, mode, engine, swap_space, check_invariants
):
    llm = engine(llama, num_blocks=17, max_model_len=24, preemption_mode=mode,
                 swap_space=swap_space(llama, 60, 4))  # fmt: skip
    for seed in range(4):
        llm.add_request([seed + 1] * 6, sampled(3, seed, max_tokens=14))
    preempted, seen = [], set()
    while llm.has_unfinished_requests():
        before = groups_of(llm)
        llm.step()
        check_invariants(llm)  # the order of arrival, too
        after = groups_of(llm)
        gone = [group for group in before if group.live and group not in after]
        assert gone == before[len(before) - len(gone) :] or not gone
        preempted += gone
        for group in gone:
            assert is_swapped(group) == (mode == "swap")
        for group in after:
            assert len({len(seq.token_ids) for seq in group.live}) == 1, "one has fallen behind"
            seen.add((group.request_id, len(group.live[0].token_ids)))
    assert len({group.request_id for group in preempted}) > 1
    stats = llm.stats()
    count = stats.preemptions_swap if mode == "swap" else stats.preemptions_recompute
    assert count == len(preempted)
    assert stats.preemptions_swap + stats.preemptions_recompute == count


def test_what_is_swapped_keeps_its_sharing_and_moves_once_each_way(
    llama, engine, swap_space, check_invariants
):
    llm = engine(llama, num_blocks=17, max_model_len=24, preemption_mode="swap",
                 swap_space=swap_space(llama, 60, 4))  # fmt: skip
    batches = record(llm)
    for seed in range(4):
        llm.add_request([seed + 1] * 6, sampled(3, seed, max_tokens=14))
    moved, pattern, trips = 0, {}, 0
    while llm.has_unfinished_requests():
        llm.step()
        check_invariants(llm)
        batch = batches[-1]
        moved += len(batch.swaps_out) + len(batch.swaps_in)
        for pairs in (batch.swaps_out, batch.swaps_in):
            assert len(dict(pairs)) == len({target for _, target in pairs}) == len(pairs)
        for group in llm.scheduler.waiting:
            if is_swapped(group):
                assert group not in [seq.group for seq in batch.drawn]
                assert all(seq.row < 0 for seq in group.live)
                first, second, third = tables(group.live)
                assert first[0] == second[0] == third[0]  # the prompt's full block
                assert len(blocks_of(group)) == len({*first, *second, *third})
                pattern[group] = [len(table) for table in tables(group.live)]
        for group in groups_of(llm):
            if group in pattern:  # it is back: the lengths are those it left with, or grown
                before = pattern.pop(group)
                trips += 1
                assert all(len(t) >= b for t, b in zip(tables(group.live), before, strict=True))
                assert len({table[0] for table in tables(group.live)}) == 1
    assert trips > 1
    stats = llm.stats()
    assert stats.blocks_swapped == moved > 0
    assert sum(len(b.swaps_out) for b in batches) == sum(len(b.swaps_in) for b in batches)
    assert stats.preemptions_recompute == 0
    assert sum(sum(batch.counts) for batch in batches) == 4 * (6 + 3 * 13)  # nothing twice


@pytest.mark.parametrize(
    ("mode", "n", "swaps"),
    [("auto", 1, False), ("auto", 2, True), ("swap", 1, True), ("swap", 2, True),
     ("recompute", 1, False), ("recompute", 2, False)],
)  # fmt: skip
def test_auto_swaps_groups_of_several_and_computes_single_ones_again(
    llama, mode, n, swaps, engine, swap_space, drain_checked
):
    llm = engine(llama, num_blocks=most_blocks(6, n, 16) + 3, max_model_len=22,
                 preemption_mode=mode, swap_space=swap_space(llama, 60, 4))  # fmt: skip
    for seed in range(4):
        llm.add_request([seed + 1] * 6, sampled(n, seed))
    drain_checked(llm)
    stats = llm.stats()
    assert (stats.preemptions_swap > 0, stats.preemptions_recompute > 0) == (swaps, not swaps)
    assert (stats.blocks_swapped > 0) == swaps


@pytest.mark.parametrize("mode", ["auto", "swap"])
def test_without_swap_space_groups_are_computed_again(llama, mode, engine, swap_space,
                                                      drain_checked):  # fmt: skip
    roomy = engine(llama, num_blocks=200, swap_space=0)
    llm = engine(llama, num_blocks=most_blocks(6, 3, 16) + 3, max_model_len=22,
                 preemption_mode=mode, swap_space=0)  # fmt: skip
    prompts, params = [[seed + 1] * 6 for seed in range(4)], [sampled(3, i) for i in range(4)]
    requests = [llm.add_request(*pair) for pair in zip(prompts, params, strict=True)]
    last = drain_checked(llm)
    assert [tokens_of(last[request]) for request in requests] == generate(roomy, prompts, params)
    stats = llm.stats()
    assert stats.preemptions_recompute > 0
    assert stats.preemptions_swap == stats.blocks_swapped == 0


@pytest.mark.parametrize("blocks", [0, 1, 5, 12])
def test_swap_space_is_counted_in_whole_blocks(llama, blocks, engine, swap_space):
    for extra in (0.0, 0.5):
        llm = engine(llama, swap_space=swap_space(llama, blocks, 4) + extra * swap_space(llama, 1,
                     4))  # fmt: skip
        assert len(llm.blocks.free_swap_blocks) == blocks  # however little more there is


# --- the engine: constrained is unconstrained ---

MODES = ["recompute", "swap", "both pools tiny"]
NEW_TOKENS = 15
MATRIX = list(itertools.product(range(1, 9), MODES, [True, False], range(3)))
SOME = [  # a third of them, each n in each mode with and without prefix caching
    (n, mode, caching, budget)
    for n, mode, caching, budget in MATRIX
    if budget == (n + MODES.index(mode) + caching) % 3
]


def work(n):
    """Prompts of all kinds of length, groups of n among single ones; two share a beginning."""
    rng = random.Random(n)
    prompts = [[rng.randrange(160) for _ in range(length)] for length in (9, 16, 5, 11, 6)]
    prompts.append(prompts[1][:12] + [7, 7])
    counts = [n, 1, n, n, n, n]
    params = [sampled(count, seed=10 * n + i, max_tokens=NEW_TOKENS, ignore_eos=i % 2 == 0)
              for i, count in enumerate(counts)]  # fmt: skip
    return prompts, params


@pytest.fixture(scope="session")
def unconstrained(llama, swap_space):
    """`unconstrained(n)`: the tokens of `work(n)` on an engine with room for everything."""
    from nanopaged import LLM

    known = {}

    def run(n):
        if n not in known:
            with LLM(str(llama), dtype="float32", device="cpu", block_size=16, num_blocks=300,
                     max_model_len=96, enable_prefix_caching=False,
                     swap_space=0) as llm:  # fmt: skip
                known[n] = generate(llm, *work(n))
                stats = llm.stats()
                assert stats.preemptions_recompute == stats.preemptions_swap == 0
        return known[n]

    return run


def constrained(llama, n, mode, caching, budget_kind, swap_space):
    """Engine options: a pool for the largest group alone and hardly more, chunks, swap space."""
    max_num_seqs, block_size = 3 * n + 1, 4
    if budget_kind == 0:  # one block
        max_num_seqs = 2 * n
        while block_size < max_num_seqs:
            block_size *= 2
    lengths = [len(prompt) for prompt in work(n)[0]]
    largest = max(most_blocks(length, n, NEW_TOKENS, block_size) for length in lengths)
    swap_blocks = {"recompute": 50, "swap": 400, "both pools tiny": largest // 3}[mode]
    budget = max(max_num_seqs, [block_size, max_num_seqs + 5, 512][budget_kind])
    return {
        "block_size": block_size,
        "num_blocks": max(largest, -(-32 // block_size)) + 1,
        "max_model_len": 32,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "enable_prefix_caching": caching,
        "preemption_mode": "recompute" if mode == "recompute" else "swap",
        "swap_space": swap_space(llama, swap_blocks, block_size),
    }


def run_constrained(case, llama, engine, swap_space, unconstrained, drain_checked):
    n, mode, caching, budget_kind = case
    options = constrained(llama, n, mode, caching, budget_kind, swap_space)
    llm = engine(llama, **options)
    requests = [llm.add_request(*pair) for pair in zip(*work(n), strict=True)]
    last = drain_checked(llm)
    assert [tokens_of(last[request]) for request in requests] == unconstrained(n)
    return llm.stats(), options


def preempts_as_told(stats, mode):
    counts = stats.preemptions_recompute, stats.preemptions_swap
    return {
        "recompute": counts[0] > 0 and counts[1] == 0,
        "swap": counts[0] == 0 and counts[1] > 0,
        "both pools tiny": min(counts) > 0,
    }[mode]


@pytest.mark.parametrize("n", range(1, 9))
def test_the_unconstrained_outputs_vary(unconstrained, n):
    outputs = unconstrained(n)
    several = [tuple(tokens) for output in outputs for tokens in output]
    assert len(set(several)) > 0.9 * len(several)
    assert n == 1 or {len(tokens) for tokens in several} != {NEW_TOKENS}, "none met an EOS"


@pytest.mark.parametrize("case", SOME, ids=str)
def test_tight_pools_and_small_chunks_change_no_token(
    case, llama, engine, swap_space, unconstrained, drain_checked
):
    stats, options = run_constrained(case, llama, engine, swap_space, unconstrained, drain_checked)
    assert preempts_as_told(stats, case[1]), (stats, options)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in MATRIX if case not in SOME], ids=str)
def test_all_other_tight_pools_and_small_chunks_change_no_token(
    case, llama, engine, swap_space, unconstrained, drain_checked
):
    stats, options = run_constrained(case, llama, engine, swap_space, unconstrained, drain_checked)
    assert preempts_as_told(stats, case[1]), (stats, options)


def test_logprobs_survive_being_swapped_and_computed_again(
    llama, engine, swap_space, drain_checked
):
    prompts, params = work(4)
    params = [dataclasses.replace(param, logprobs=3) for param in params]
    roomy = engine(llama, num_blocks=300, max_model_len=32, swap_space=0)
    expected = roomy.generate(prompts, params, use_tqdm=False)
    for mode in MODES:
        options = constrained(llama, 4, mode, True, 1, swap_space)
        llm = engine(llama, **options)
        requests = [llm.add_request(*pair) for pair in zip(prompts, params, strict=True)]
        last = drain_checked(llm)
        assert preempts_as_told(llm.stats(), mode)
        for request, output in zip(requests, expected, strict=True):
            for one, other in zip(last[request].outputs, output.outputs, strict=True):
                assert list(one.token_ids) == list(other.token_ids)
                assert len(one.logprobs) == len(one.token_ids)
                assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)


# --- the engine: aborts and failures ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("victim", range(0, 6, 2))
def test_abort_at_any_step_gives_back_all_blocks_and_changes_no_other_token(
    llama, mode, victim, engine, swap_space, unconstrained, check_invariants, drain_checked
):
    expected, stages = unconstrained(3), Counter()
    for steps in range(victim, 40, 7):
        llm = engine(llama, **constrained(llama, 3, mode, steps % 2 == 0, 1, swap_space))
        requests = [llm.add_request(*pair) for pair in zip(*work(3), strict=True)]
        last = {}
        for _ in range(steps):
            last.update({output.request_id: output for output in llm.step()})
        groups = [*llm.scheduler.running, *llm.scheduler.waiting]
        group = next((g for g in groups if g.live and g.request_id == requests[victim]), None)
        llm.abort_request(requests[victim])
        if group is None:
            drain_checked(llm)
            continue
        stages["swapped" if is_swapped(group) else "running" if group in groups_of(llm) else
               "waiting"] += 1  # fmt: skip
        check_invariants(llm)
        last.update(drain_checked(llm))
        for i, (request, tokens) in enumerate(zip(requests, expected, strict=True)):
            outputs = last[request].outputs
            if i != victim:
                assert tokens_of(last[request]) == tokens
                continue
            assert last[request].finished
            assert "abort" in {completion.finish_reason for completion in outputs}
            for completion, whole in zip(outputs, tokens, strict=True):
                assert list(completion.token_ids) == whole[: len(completion.token_ids)]
    assert stages["running"] + stages["waiting"] + stages["swapped"] > 2, stages


def test_abort_while_swapped_gives_back_the_swap_blocks(
    llama, engine, swap_space, unconstrained, check_invariants, drain_checked
):
    llm = engine(llama, **constrained(llama, 3, "swap", True, 1, swap_space))
    requests = [llm.add_request(*pair) for pair in zip(*work(3), strict=True)]
    total = len(llm.blocks.free_swap_blocks)
    while not any(is_swapped(group) for group in llm.scheduler.waiting):
        assert llm.has_unfinished_requests(), "nothing was swapped"
        llm.step()
    (group,) = (group for group in llm.scheduler.waiting if is_swapped(group))
    assert len(llm.blocks.free_swap_blocks) == total - len(blocks_of(group))
    llm.abort_request(group.request_id)
    check_invariants(llm)
    assert len(llm.blocks.free_swap_blocks) == total
    last = drain_checked(llm)
    for request, tokens in zip(requests, unconstrained(3), strict=True):
        if request != group.request_id and request in last:
            assert tokens_of(last[request]) == tokens


def test_abort_of_all_while_some_are_swapped(llama, engine, swap_space, check_invariants):
    llm = engine(llama, **constrained(llama, 3, "swap", True, 1, swap_space))
    requests = [llm.add_request(*pair) for pair in zip(*work(3), strict=True)]
    total = len(llm.blocks.free_swap_blocks)
    while not any(is_swapped(group) for group in llm.scheduler.waiting):
        assert llm.has_unfinished_requests(), "nothing was swapped"
        llm.step()
    for request in requests:
        llm.abort_request(request)
        check_invariants(llm)
    assert not (llm.scheduler.waiting or llm.scheduler.running)
    assert len(llm.blocks.free_blocks) == llm.blocks.num_blocks
    assert len(llm.blocks.free_swap_blocks) == total
    llm.step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("caching", [True, False])
def test_after_a_step_that_failed_what_ran_has_ended_and_new_requests_are_served(
    llama, mode, caching, engine, swap_space, unconstrained, check_invariants, drain_checked,
    monkeypatch,
):  # fmt: skip
    """Copies and swaps of the failed step may or may not have been made."""
    for failing, early in itertools.product(range(1, 40, 9), [True, False]):
        llm = engine(llama, **constrained(llama, 3, mode, caching, 1, swap_space))
        requests = [llm.add_request(*pair) for pair in zip(*work(3), strict=True)]
        last = {}
        for _ in range(failing):
            last.update({output.request_id: output for output in llm.step()})
        if not (llm.scheduler.waiting or llm.scheduler.running):
            break
        with monkeypatch.context() as patch:
            place = (llm.runner, "execute") if early else (llm.runner.model, "forward")
            patch.setattr(*place, lambda *inputs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.step()
        check_invariants(llm)
        last.update({output.request_id: output for output in llm.step()})
        assert not llm.has_unfinished_requests()
        for request, wanted in zip(requests, unconstrained(3), strict=True):
            for answer, tokens in zip(tokens_of(last[request]), wanted, strict=True):
                assert answer == tokens[: len(answer)]
        requests = [llm.add_request(*pair) for pair in zip(*work(3), strict=True)]
        last.update(drain_checked(llm))
        assert [tokens_of(last[request]) for request in requests] == unconstrained(3)
    assert failing > 20


# --- what is refused ---


def test_a_group_that_can_never_run_is_refused(llama, engine, counters, swap_space):
    llm = engine(llama, num_blocks=24, max_model_len=96, max_num_seqs=6,
                 max_num_batched_tokens=16, swap_space=swap_space(llama, 100, 4))  # fmt: skip
    before = counters(llm)
    for prompt, params, word in (
        (PROMPT, sampled(7), "max_num_seqs"),
        (PROMPT, sampled(6, max_tokens=22), "blocks"),  # 1 and 6 times 7, and there are 24
        (PROMPT, sampled(2, max_tokens=None), "blocks"),
    ):
        with pytest.raises(ValueError, match=word):
            llm.add_request(prompt, params)
        with pytest.raises(ValueError, match=word):
            llm.generate([PROMPT, prompt], [sampled(1), params], use_tqdm=False)
    assert counters(llm) == before
    assert not llm.has_unfinished_requests()
    assert len(generate(llm, [PROMPT], sampled(6, max_tokens=6))[0]) == 6


@pytest.mark.parametrize("n", [2, 3, 6])
@pytest.mark.parametrize("length", [4, 6, 7])
def test_the_pool_may_be_one_block_too_small(llama, n, length, engine, swap_space, counters):
    exact = most_blocks(length, n, 12)
    llm = engine(llama, num_blocks=exact - 1, max_model_len=length + 12,
                 swap_space=swap_space(llama, 100, 4))  # fmt: skip
    before = counters(llm)
    with pytest.raises(ValueError, match="blocks"):
        llm.add_request(list(range(length)), sampled(n, max_tokens=12))
    assert counters(llm) == before
    generate(llm, [list(range(length))], sampled(n, max_tokens=8))
