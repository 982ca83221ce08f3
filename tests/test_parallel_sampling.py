"""Several continuations of a prompt share its blocks, and their tokens do not show it.

Worked examples with exact block ids come first: a fork inside a block and on its
boundary, copy-on-write by all but the last holder, shared blocks that are swapped once.
Then the engine: a group comes, goes and comes back as a whole, in order of arrival, and
its tokens are those of an engine with room for everything.
"""

import dataclasses
import itertools
import random
from collections import Counter

import pytest
import torch

from helpers import (
    add_all,
    all_tokens_of,
    allocate,
    block_state,
    check_invariants,
    compute,
    counters,
    drain_checked,
    forked_group,
    free,
    generate,
    is_swapped,
    most_blocks,
    new_group,
    ref_counts,
    running_groups,
    step,
    step_until_swapped,
    swap_space,
    tables,
)
from nanopaged import LLM, SamplingParams
from nanopaged.block_manager import BlockManager

A, B, C = ([digit] * 4 for digit in (1, 2, 3))  # a block's worth of tokens each
PROMPT = [5, 9, 33, 2, 8, 60, 61]


# --- the block manager: what a fork and a copy do ---


def finish(manager, seq):
    free(manager, seq)
    seq.group.live.remove(seq)


def append_tokens(manager, *sequences, count=1, token=9):
    """Give every sequence tokens of its own, and then the blocks they need."""
    for i, seq in enumerate(sequences):
        seq.token_ids += [token + i] * count
    return [manager.grow(seq) for seq in sequences]


def test_a_fork_shares_every_block_the_partly_filled_last_one_included():
    manager = BlockManager(8, 4)
    sequences = forked_group(manager, A + [2, 2], n=3)
    assert tables(*sequences) == [[0, 1]] * 3
    assert ref_counts(manager) == [3, 3, 0, 0, 0, 0, 0, 0]
    assert list(manager.free_blocks) == [2, 3, 4, 5, 6, 7]


def test_a_fork_gives_away_computed_blocks_only():
    manager = BlockManager(8, 4)
    leader, child = new_group(
        A + B + [9], SamplingParams(n=2, max_tokens=None)
    ).sequences

    assert allocate(manager, leader)
    assert leader.block_table == [0, 1, 2]

    leader.num_computed_tokens = 6
    manager.fork(leader, child)
    assert child.block_table == [0, 1]
    assert ref_counts(manager) == [2, 2, 1, 0, 0, 0, 0, 0]


def test_tables_of_parent_and_child_are_not_one_list():
    manager = BlockManager(8, 4)
    first, second = forked_group(manager, A)
    assert first.block_table is not second.block_table


def test_the_first_write_inside_a_shared_block_copies_it_except_for_the_last_holder():
    manager = BlockManager(8, 4)
    sequences = forked_group(manager, A + [2, 2], n=3)
    for seq in sequences:
        seq.token_ids.append(9)

    assert manager.num_blocks_to_grow(sequences) == 2
    assert [manager.grow(seq) for seq in sequences] == [[(1, 2)], [(1, 3)], []]
    assert tables(*sequences) == [[0, 2], [0, 3], [0, 1]]
    assert ref_counts(manager) == [3, 1, 1, 1, 0, 0, 0, 0]

    compute(manager, *sequences)
    assert manager.num_blocks_to_grow(sequences) == 0
    # Each has its own block by now.
    assert append_tokens(manager, *sequences) == [[], [], []]
    assert tables(*sequences) == [[0, 2], [0, 3], [0, 1]]


def test_after_a_fork_on_a_boundary_nothing_is_copied():
    manager = BlockManager(8, 4)
    sequences = forked_group(manager, A + B, n=3)
    for seq in sequences:
        seq.token_ids.append(9)
    assert manager.num_blocks_to_grow(sequences) == 3
    assert [manager.grow(seq) for seq in sequences] == [[], [], []]
    assert tables(*sequences) == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert ref_counts(manager) == [3, 3, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_the_only_block_of_a_short_prompt_is_shared_like_any_other(length):
    manager = BlockManager(8, 4)
    first, second = forked_group(manager, A[:length])
    copies = append_tokens(manager, first, second)
    if length < 4:
        assert (copies, tables(first, second)) == ([[(0, 1)], []], [[1], [0]])
    else:
        assert (copies, tables(first, second)) == ([[], []], [[0, 1], [0, 2]])


def test_one_step_may_need_a_copy_and_new_blocks():
    """As after a preemption by recompute: several tokens after the prompt are known."""
    manager = BlockManager(8, 4)
    first, second = sequences = forked_group(manager, A + [2, 2])
    for seq in sequences:
        seq.token_ids += [9] * 4

    assert manager.num_blocks_to_grow([first]) == 2
    assert manager.num_blocks_to_grow(sequences) == 3
    assert manager.grow(first) == [(1, 2)]
    assert manager.num_blocks_to_grow([second]) == 1
    assert manager.grow(second) == []
    assert tables(*sequences) == [[0, 2, 3], [0, 1, 4]]


def test_missing_counts_the_blocks_any_of_the_holders_will_take():
    manager = BlockManager(8, 4)
    a, b, c = sequences = forked_group(manager, A + [2], n=3)
    for seq in sequences:
        seq.token_ids.append(9)

    assert manager.num_blocks_to_grow([]) == 0
    assert [manager.num_blocks_to_grow([seq]) for seq in sequences] == [1, 1, 1]
    assert [manager.num_blocks_to_grow(pair) for pair in ([a, b], [b, c], [a, c])] == [
        2,
        2,
        2,
    ]
    assert manager.num_blocks_to_grow(sequences) == 2

    finish(manager, b)
    assert manager.num_blocks_to_grow([a]) == 1
    assert manager.num_blocks_to_grow([a, c]) == 1

    finish(manager, c)
    assert manager.num_blocks_to_grow([a]) == 0


def test_a_copy_without_a_free_block_is_not_needed_once_the_other_holder_goes():
    manager = BlockManager(2, 4)
    first, second = forked_group(manager, A + [2, 2])
    for seq in (first, second):
        seq.token_ids.append(9)

    assert not manager.free_blocks
    assert manager.num_blocks_to_grow([first, second]) == 1

    finish(manager, second)
    assert manager.num_blocks_to_grow([first]) == 0
    assert manager.grow(first) == []
    assert first.block_table == [0, 1]
    assert ref_counts(manager) == [1, 1]


def test_a_copied_block_leaves_the_free_list_from_its_front():
    manager = BlockManager(6, 4)
    (other,) = forked_group(manager, C + C, n=1)
    first, second = forked_group(manager, A + [2])
    assert tables(other, first) == [[0, 1], [2, 3]]
    finish(manager, other)
    assert list(manager.free_blocks) == [4, 5, 1, 0]
    assert append_tokens(manager, first, second) == [[(3, 4)], []]
    assert list(manager.free_blocks) == [5, 1, 0]


def test_freeing_one_of_several_keeps_the_blocks_of_the_others():
    manager = BlockManager(8, 4)
    a, b, c = forked_group(manager, A + [2, 2], n=3)
    finish(manager, a)
    assert ref_counts(manager) == [2, 2, 0, 0, 0, 0, 0, 0]
    assert append_tokens(manager, b, c) == [[(1, 2)], []]

    compute(manager, b, c)
    finish(manager, c)
    assert list(manager.free_blocks) == [1, 3, 4, 5, 6, 7]

    finish(manager, b)
    # 0 holds A and can still be found.
    assert list(manager.free_blocks) == [2, 1, 3, 4, 5, 6, 7, 0]


def test_each_continuation_is_found_later_after_the_common_prompt():
    manager = BlockManager(12, 4)
    sequences = forked_group(manager, A + [2, 2], n=3)
    append_tokens(manager, *sequences, count=3)
    compute(manager, *sequences)
    assert tables(*sequences) == [[0, 2, 3], [0, 1, 5], [0, 4, 6]] or tables(
        *sequences
    ) == [[0, 2, 3], [0, 4, 5], [0, 1, 6]]

    for seq in sequences:
        later = new_group(seq.token_ids + [7]).sequences[0]
        assert manager.match_prefix(later) == seq.block_table[:2]


def test_of_two_equal_continuations_one_block_is_found():
    manager = BlockManager(12, 4)
    first, second = forked_group(manager, A + [2, 2])
    for seq in (first, second):
        seq.token_ids += [9, 9]
        manager.grow(seq)
    assert tables(first, second) == [[0, 2], [0, 1]]

    compute(manager, first, second)
    later = new_group(A + [2, 2, 9, 9, 7]).sequences[0]
    assert manager.match_prefix(later) == [0, 2]
    assert len(manager.published) == 2


# --- the block manager: swapping ---


def test_shared_blocks_are_swapped_once_and_come_back_shared():
    manager = BlockManager(4, 4, num_swap_blocks=4)
    sequences = forked_group(manager, A + [2, 2], n=3)
    assert list(manager.free_swap_blocks) == [4, 5, 6, 7]
    assert manager.swap(sequences, manager.free_swap_blocks) == [(0, 4), (1, 5)]
    assert tables(*sequences) == [[4, 5]] * 3
    assert ref_counts(manager) == [0, 0, 0, 0, 3, 3, 0, 0]
    assert sorted(manager.free_blocks) == [0, 1, 2, 3]
    assert list(manager.free_swap_blocks) == [6, 7]

    back = manager.swap(sequences, manager.free_blocks)
    assert [source for source, _ in back] == [4, 5]

    first, second = (target for _, target in back)
    assert first != second and {first, second} < {0, 1, 2, 3}
    assert tables(*sequences) == [[first, second]] * 3
    assert sorted(manager.free_swap_blocks) == [4, 5, 6, 7]
    assert sum(ref_counts(manager)) == 6

    copies = append_tokens(manager, *sequences)  # still shared as before
    assert [[source for source, _ in copy] for copy in copies] == [
        [second],
        [second],
        [],
    ]


def test_diverged_sequences_are_swapped_separately():
    manager = BlockManager(6, 4, num_swap_blocks=6)
    sequences = forked_group(manager, A + [2, 2])
    append_tokens(manager, *sequences, count=3)
    compute(manager, *sequences)
    assert tables(*sequences) == [[0, 2, 3], [0, 1, 4]]

    moves = manager.swap(sequences, manager.free_swap_blocks)
    assert moves == [(0, 6), (2, 7), (3, 8), (1, 9), (4, 10)]
    assert tables(*sequences) == [[6, 7, 8], [6, 9, 10]]
    assert ref_counts(manager) == [0] * 6 + [2, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("room", [0, 1, 2, 3, 4])
def test_a_swap_that_does_not_fit_changes_nothing(room):
    manager = BlockManager(6, 4, num_swap_blocks=room)
    sequences = forked_group(manager, A + [2, 2])
    append_tokens(manager, *sequences, count=3)
    compute(manager, *sequences)
    before = block_state(manager, *sequences)  # five blocks
    assert manager.swap(sequences, manager.free_swap_blocks) == []
    assert block_state(manager, *sequences) == before


def test_a_group_that_does_not_fit_back_stays_swapped():
    manager = BlockManager(3, 4, num_swap_blocks=2)
    sequences = forked_group(manager, A + [2, 2])
    assert manager.swap(sequences, manager.free_swap_blocks) == [(0, 3), (1, 4)]

    (other,) = forked_group(manager, B + C, n=1)
    before = block_state(manager, *sequences)
    assert manager.swap(sequences, manager.free_blocks) == []
    assert block_state(manager, *sequences) == before

    finish(manager, other)
    assert len(manager.swap(sequences, manager.free_blocks)) == 2


def test_a_block_shared_between_groups_is_swapped_for_one_and_stays_for_the_other():
    manager = BlockManager(6, 4, num_swap_blocks=6)
    (other,) = forked_group(manager, A + C, n=1)
    sequences = forked_group(manager, A + [2, 2])
    assert (other.block_table, tables(*sequences)) == ([0, 1], [[0, 2], [0, 2]])
    assert ref_counts(manager)[:3] == [3, 1, 2]
    assert manager.swap(sequences, manager.free_swap_blocks) == [(0, 6), (2, 7)]
    assert tables(*sequences) == [[6, 7], [6, 7]]
    assert other.block_table == [0, 1]
    assert ref_counts(manager) == [1, 1, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0]

    finish(manager, other)
    assert sorted(manager.free_blocks) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_freeing_swapped_sequences_gives_back_swap_blocks(order):
    manager = BlockManager(6, 4, num_swap_blocks=6)
    sequences = forked_group(manager, A + [2, 2], n=3)
    append_tokens(manager, *sequences, count=1)
    compute(manager, *sequences)
    manager.swap(sequences, manager.free_swap_blocks)
    assert len(manager.free_swap_blocks) == 2

    for left, index in zip((2, 1, 0), order, strict=True):
        finish(manager, sequences[index])
        assert len(manager.free_swap_blocks) == 6 - (left + 1 if left else 0)
    assert sorted(manager.free_swap_blocks) == list(range(6, 12))
    assert sorted(manager.free_blocks) == list(range(6))


def test_the_prefix_cache_never_returns_a_swap_block():
    manager = BlockManager(3, 4, num_swap_blocks=4)
    sequences = forked_group(manager, A + B)
    manager.swap(sequences, manager.free_swap_blocks)
    for tokens in (A + B + [9], A + [9]):
        prefix = manager.match_prefix(new_group(tokens).sequences[0])
        assert all(block_id < 3 for block_id in prefix)
    forked_group(manager, C + C + [9], n=1)  # takes all three blocks of the device
    assert manager.match_prefix(new_group(A + B + [9]).sequences[0]) == []


# --- the block manager: any order ---


class Contents:
    """What the K and V in every slot stand for: all tokens up to that position.

    Moves and copies move contents. `write` is a step: it computes all tokens of a
    sequence and checks that the sequence can read its past.
    """

    def __init__(self, rng):
        self.rng = rng
        self.size = rng.choice([1, 2, 4])
        self.manager = BlockManager(
            rng.randint(6, 20),
            self.size,
            rng.random() < 0.7,
            num_swap_blocks=rng.randint(0, 16),
        )
        self.slots = {}
        self.groups = []  # lists of unfinished sequences
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
            assert self.manager.blocks[block_id].ref_count == 1, (
                "a shared block is written"
            )
            self.slots[block_id, i % self.size] = tuple(seq.token_ids[: i + 1])
        self.read(seq, len(seq.token_ids))
        compute(self.manager, seq)

    def read(self, seq, count):
        for i in range(count):
            slot = seq.block_table[i // self.size], i % self.size
            assert self.slots.get(slot) == tuple(seq.token_ids[: i + 1]), (
                "not its own past"
            )

    def admit(self):
        rng = self.rng
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 3 * self.size + 1))]
        leader, *others = sequences = new_group(
            tokens, SamplingParams(n=rng.randint(1, 5), max_tokens=None)
        ).sequences
        if not allocate(self.manager, leader):
            return
        self.write(leader)
        for other in others:
            self.manager.fork(leader, other)
        leader.group.forked = True
        self.groups.append(sequences)
        self.events["admitted"] += 1

    def decode(self):
        sequences = self.rng.choice(self.groups)
        count = self.rng.choice([1, 1, 1, self.size + 1])
        for seq in sequences:
            seq.token_ids += [self.rng.randrange(2) for _ in range(count)]

        missing = self.manager.num_blocks_to_grow(sequences)
        free = len(self.manager.free_blocks)
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
        """As in a beam search: one beam is dropped, and another continues twice."""
        sequences = self.rng.choice(self.groups)
        if len(sequences) > 1:
            gone, parent = self.rng.sample(range(len(sequences)), 2)
            child = sequences[gone]
            self.manager.free(child)
            child.token_ids = list(sequences[parent].token_ids)
            self.manager.fork(sequences[parent], child)
            self.read(child, len(child.token_ids))
            self.events["branched"] += 1

    def drop(self):
        groups = self.rng.choice([self.groups, self.swapped])
        if groups:
            sequences = self.rng.choice(groups)
            finish(self.manager, sequences.pop(self.rng.randrange(len(sequences))))
            groups[:] = [group for group in groups if group]
            self.events["dropped"] += 1

    def swap_out(self):
        self.swap(
            self.groups, self.swapped, self.manager.free_swap_blocks, "swapped out"
        )

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
        manager = self.manager
        live = list(itertools.chain(*self.groups, *self.swapped))
        references = Counter(block for seq in live for block in seq.block_table)
        assert ref_counts(manager) == [
            references[i] for i in range(len(manager.blocks))
        ]

        unheld = set(range(len(manager.blocks))) - references.keys()
        assert {*manager.free_blocks, *manager.free_swap_blocks} == unheld
        assert all(block_id < manager.num_blocks for block_id in manager.free_blocks)
        assert all(
            block_id >= manager.num_blocks for block_id in manager.free_swap_blocks
        )

        for seq in live:
            self.read(seq, seq.num_computed_tokens)

    def run(self, count):
        acts = [
            self.admit,
            self.decode,
            self.decode,
            self.decode,
            self.branch,
            self.branch,
            self.drop,
            self.swap_out,
            self.swap_in,
        ]
        for _ in range(count):
            act = self.rng.choice(acts) if self.groups else self.admit
            act = self.swap_in if self.swapped and not self.groups else act
            act()
            self.check()
        for seq in itertools.chain(*self.groups, *self.swapped):
            finish(self.manager, seq)

        assert len(self.manager.free_blocks) == self.manager.num_blocks
        return self.events


def test_any_forks_writes_drops_and_swaps_leave_each_its_own_past():
    events = Counter()
    for seed in range(60):
        events += Contents(random.Random(seed)).run(120)
    for event in (
        "admitted",
        "copied",
        "branched",
        "dropped",
        "swapped out",
        "swapped in",
        "no room",
    ):
        assert events[event] > 150, (event, events)


@pytest.mark.slow
def test_many_forks_writes_drops_and_swaps_leave_each_its_own_past():
    for seed in range(1000, 2500):
        Contents(random.Random(seed)).run(150)


# --- the engine: helpers ---


def sampled(n, seed=7, **more):
    defaults = {"temperature": 1.0, "top_k": 20, "max_tokens": 16, "ignore_eos": True}
    return SamplingParams(n=n, seed=seed, **(defaults | more))


def blocks_of(group):
    """The distinct blocks that a group holds."""
    return {block_id for seq in group.live for block_id in seq.block_table}


def record(llm):
    """A list that collects every batch the scheduler makes from now on."""
    batches = []
    schedule = llm.scheduler.schedule

    def recording():
        batches.append(schedule())
        return batches[-1]

    llm.scheduler.schedule = recording
    return batches


# --- the engine: tokens ---


@pytest.mark.parametrize("n", range(1, 9))
def test_the_first_draws_what_it_would_alone_and_the_others_differ(llama, n, engine):
    llm = engine(llama, num_blocks=200, swap_space=swap_space(llama, 8, 4))
    (alone,), several, again = generate(
        llm, [PROMPT] * 3, [sampled(1), sampled(n), sampled(n)]
    )

    assert len(several) == n
    assert several[0] == alone
    assert len({tuple(tokens) for tokens in several}) == n
    assert again == several

    ((other, *_),) = generate(llm, [PROMPT], sampled(n, seed=8))
    assert other not in several


def test_several_are_drawn_alike_alone_and_in_any_batch(llama, engine):
    prompts = [PROMPT, PROMPT[:4], PROMPT * 2, [3]]
    params = [sampled(3, seed=i) for i in range(4)]
    llm = engine(llama, num_blocks=200, swap_space=swap_space(llama, 8, 4))
    together = generate(llm, prompts, params)
    alone = [generate(llm, [prompts[i]], params[i])[0] for i in range(4)]
    assert together == alone


def test_each_draws_its_own_numbers_at_every_position(make_model, engine):
    """At a very high temperature, a token shows the random number that drew it."""
    path = make_model("qwen3", seed=21, vocab_size=40, eos=[39, 38])
    llm = engine(
        path, num_blocks=400, max_model_len=256, swap_space=swap_space(path, 8, 4)
    )
    params = sampled(6, temperature=1e6, top_k=0, max_tokens=200)

    (streams,) = generate(llm, [[1]], params)
    for (i, one), (j, other) in itertools.product(enumerate(streams), repeat=2):
        for shift in range(-8, 9):
            if i == j and shift == 0:
                continue
            pairs = zip(one[8:-8], other[8 + shift : 192 + shift], strict=True)
            # Expected: 4.6 of 184.
            assert sum(a == b for a, b in pairs) < 20, (i, j, shift)


def test_the_frequencies_of_each_match_the_probabilities(make_model, engine, reference):
    path = make_model("qwen3", seed=21, vocab_size=40, eos=[39, 38])
    llm = engine(
        path, num_blocks=400, max_model_len=64, swap_space=swap_space(path, 8, 4)
    )
    params = [sampled(4, seed=seed, top_k=0, max_tokens=1) for seed in range(600)]
    drawn = generate(llm, [PROMPT[:5]] * 600, params)

    expected = torch.softmax(reference.logits(path, PROMPT[:5])[-1], -1)
    for index in range(4):
        counts = Counter(outputs[index][0] for outputs in drawn)
        found = torch.tensor([counts[token] / 600 for token in range(40)])
        assert float((found - expected).abs().sum()) / 2 < 0.15

    same = sum(a == b for (a,), (b,), *_ in drawn) / 600
    # The first two are independent.
    assert abs(same - float((expected**2).sum())) < 0.08


@pytest.mark.parametrize("length", [4, 5, 7, 8, 9])
def test_greedy_sequences_are_all_the_same(
    llama, length, engine, reference, draw_prompts
):
    (prompt,) = draw_prompts(llama, [length], 16, seed=length)
    llm = engine(llama, swap_space=swap_space(llama, 8, 4))
    params = SamplingParams(n=4, temperature=0, max_tokens=16, ignore_eos=True)
    assert generate(llm, [prompt], params) == [
        [reference.generate(llama, prompt, 16)] * 4
    ]


def test_unseeded_requests_draw_n_different_sequences(llama, engine):
    llm = engine(llama, num_blocks=200, swap_space=swap_space(llama, 8, 4))
    drawn = generate(llm, [PROMPT, PROMPT], sampled(4, seed=None))
    assert len({tuple(tokens) for outputs in drawn for tokens in outputs}) == 8


def test_logprobs_are_those_of_each_sequence(llama, engine, reference):
    llm = engine(llama, swap_space=swap_space(llama, 8, 4))
    (output,) = llm.generate([PROMPT], sampled(3, logprobs=2), use_tqdm=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]

    for completion in output.outputs:
        tokens = list(completion.token_ids)
        rows = torch.log_softmax(reference.logits(llama, PROMPT + tokens), -1)[
            len(PROMPT) - 1 :
        ]
        chosen = [float(row[token]) for row, token in zip(rows, tokens, strict=False)]
        given = [
            logprobs[token].logprob
            for logprobs, token in zip(completion.logprobs, tokens, strict=True)
        ]

        assert given == pytest.approx(chosen, abs=1e-3)
        assert completion.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-3)


def test_each_ends_at_its_own_stop_token(llama, engine):
    llm = engine(llama, num_blocks=200, swap_space=swap_space(llama, 8, 4))
    (endless,) = generate(llm, [PROMPT], sampled(6))
    # Ends the first early and the fifth late.
    stop = [endless[i][2 * i + 1] for i in range(5)]
    llm.add_request(PROMPT, sampled(6, stop_token_ids=stop))

    living = set()
    while llm.has_unfinished_requests():
        outputs = llm.step()
        check_invariants(llm)
        living.add(sum(len(group.live) for group in running_groups(llm)))

    for tokens, completion in zip(endless, outputs[0].outputs, strict=True):
        ends = [i for i, token in enumerate(tokens) if token in stop]
        expected = tokens[: ends[0] + 1] if ends else tokens
        assert list(completion.token_ids) == expected
        assert completion.finish_reason == ("stop" if ends else "length")

    assert len(living) > 3


def test_each_ends_at_its_own_stop_string(text_model, engine):
    llm = engine(text_model, num_blocks=200, swap_space=swap_space(text_model, 8, 4))
    params = {"max_tokens": 24, "top_k": 0}
    (endless,) = llm.generate(["the block"], sampled(6, **params), use_tqdm=False)
    texts = [completion.text for completion in endless.outputs]
    assert len(set(texts)) == 6

    letters = Counter(char for text in texts for char in set(text) if char.isalnum())
    stop = min(letters, key=lambda char: abs(letters[char] - 3))
    assert 0 < letters[stop] < 6

    (output,) = llm.generate(
        ["the block"], sampled(6, stop=stop, **params), use_tqdm=False
    )
    for text, completion in zip(texts, output.outputs, strict=True):
        assert completion.text == text.partition(stop)[0]
        assert completion.finish_reason == ("stop" if stop in text else "length")


def test_a_stream_yields_all_n_after_every_step(llama, engine):
    llm = engine(llama, swap_space=swap_space(llama, 8, 4))
    (expected,) = generate(llm, [PROMPT], sampled(3))
    streamed = [all_tokens_of(output) for output in llm.stream([PROMPT], sampled(3))]
    assert streamed == [
        [tokens[:count] for tokens in expected] for count in range(1, 17)
    ]


# --- the engine: the prompt is computed once, and its blocks are shared ---


def test_the_prompt_is_computed_once(llama, engine):
    llm = engine(
        llama,
        max_num_seqs=8,
        max_num_batched_tokens=8,
        swap_space=swap_space(llama, 8, 4),
    )
    batches = record(llm)
    llm.add_request(range(20), sampled(5, max_tokens=4))
    while llm.has_unfinished_requests():
        llm.step()

    assert [batch.message.counts for batch in batches] == [
        [8],
        [8],
        [4],
        [1] * 5,
        [1] * 5,
        [1] * 5,
    ]
    takers = [
        [
            (i, seq.index)
            for i, seq in zip(batch.message.samples, batch.sampled, strict=True)
        ]
        for batch in batches
    ]

    assert takers[:2] == [[], []]
    # One row of logits for all of them.
    assert takers[2] == [(0, index) for index in range(5)]
    assert takers[3:] == [[(index, index) for index in range(5)]] * 3
    assert llm.stats().prompt_tokens == 20
    assert llm.stats().output_tokens == 20


def test_a_fork_inside_a_block(llama, engine):
    """Six tokens in blocks of four, three sequences: all share blocks 0 and 1."""
    llm = engine(
        llama, num_blocks=16, max_model_len=16, swap_space=swap_space(llama, 8, 4)
    )
    batches = record(llm)
    request = llm.add_request(
        PROMPT[:6], sampled(3, temperature=9.0, top_k=0, max_tokens=6)
    )

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
        (group,) = running_groups(llm)
        assert tables(*group.live) == expected
        assert ref_counts(llm.block_manager)[:16] == counts + [0] * (16 - len(counts))
        assert batches[-1].message.copies == copies

    (output,) = llm.step()
    assert output.request_id == request
    assert len({tuple(tokens[:2]) for tokens in all_tokens_of(output)}) == 3
    assert llm.stats().blocks_copied == 2
    # Tail first; full blocks can be found, so they go to the back.
    assert list(llm.block_manager.free_blocks)[-4:] == [2, 3, 1, 0]
    assert len(llm.block_manager.free_blocks) == 16


def test_a_fork_on_a_boundary(llama, engine):
    llm = engine(
        llama, num_blocks=16, max_model_len=16, swap_space=swap_space(llama, 8, 4)
    )
    llm.add_request(range(8), sampled(3, max_tokens=3))

    for expected in ([[0, 1]] * 3, [[0, 1, 2], [0, 1, 3], [0, 1, 4]]):
        llm.step()
        check_invariants(llm)
        assert tables(*running_groups(llm)[0].live) == expected
    assert ref_counts(llm.block_manager)[:6] == [3, 3, 1, 1, 1, 0]

    llm.step()
    assert llm.stats().blocks_copied == 0


def test_a_sequence_that_ends_with_its_first_token_copies_nothing(llama, engine):
    """Of three, the middle one ends before writing: the other two need one copy."""
    llm = engine(
        llama, num_blocks=16, max_model_len=16, swap_space=swap_space(llama, 8, 4)
    )
    params = next(
        params
        for params in (sampled(3, seed, max_tokens=4) for seed in range(50))
        if len({tokens[0] for tokens in generate(llm, [PROMPT[:6]], params)[0]}) == 3
    )
    ((_, (first, *_), _),) = generate(llm, [PROMPT[:6]], params)
    fresh = engine(
        llama, num_blocks=16, max_model_len=16, swap_space=swap_space(llama, 8, 4)
    )
    fresh.add_request(
        PROMPT[:6], sampled(3, params.seed, max_tokens=2, stop_token_ids=[first])
    )
    fresh.step()

    check_invariants(fresh)
    assert ref_counts(fresh.block_manager)[:3] == [2, 2, 0]

    fresh.step()
    assert fresh.stats().blocks_copied == 1
    assert not fresh.has_unfinished_requests()


@pytest.mark.parametrize("length", [5, 6, 7, 8, 9])
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_at_most_one_copy_per_sequence_and_none_for_the_last_holder(
    llama, n, length, engine
):
    llm = engine(llama, num_blocks=100, swap_space=swap_space(llama, 8, 4))
    generate(llm, [list(range(length))], sampled(n, max_tokens=9))
    assert llm.stats().blocks_copied == (n - 1 if length % 4 else 0)


def test_two_groups_with_one_prompt_share_its_full_blocks(llama, engine):
    llm = engine(
        llama, num_blocks=32, max_model_len=16, swap_space=swap_space(llama, 8, 4)
    )
    for seed in (1, 2):
        llm.add_request(PROMPT[:6], sampled(2, seed, max_tokens=4))

    for expected in (
        [[[0, 1], [0, 1]], [[0, 2], [0, 2]]],
        [[[0, 3], [0, 1]], [[0, 4], [0, 2]]],
    ):
        llm.step()
        check_invariants(llm)
        assert [tables(*group.live) for group in running_groups(llm)] == expected

    assert ref_counts(llm.block_manager)[:6] == [4, 1, 1, 1, 1, 0]
    while llm.has_unfinished_requests():
        llm.step()


def test_sequences_that_share_hold_few_blocks(llama, engine):
    """Eight continuations of 41 tokens: 10 prompt blocks, then 1 or 2 for each."""
    llm = engine(
        llama, num_blocks=100, max_model_len=64, swap_space=swap_space(llama, 8, 4)
    )
    llm.add_request(range(41), sampled(8, max_tokens=6))

    used = []
    while llm.has_unfinished_requests():
        llm.step()
        used.append((llm.stats().blocks_used, llm.stats().tokens_held))

    assert used == [(11, 41), (18, 56), (18, 64), (18, 72), (26, 80), (0, 0)]


# --- the engine: no free block ---


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_copy_without_a_free_block_preempts_the_youngest_group(llama, mode, engine):
    """Of five blocks, one group holds 0 and 1, the fork 2 and 3; the first takes 4."""
    roomy = engine(
        llama, num_blocks=64, max_model_len=16, swap_space=swap_space(llama, 8, 4)
    )
    prompts = [[*PROMPT, 1], PROMPT[1:7]]
    params = [sampled(1, 3, max_tokens=4), sampled(2, 4, max_tokens=2)]
    expected = generate(roomy, prompts, params)
    llm = engine(
        llama,
        num_blocks=5,
        max_model_len=16,
        swap_space=swap_space(llama, 4, 4),
        preemption_mode=mode,
    )
    batches = record(llm)
    requests = add_all(llm, prompts, params)
    llm.step()

    check_invariants(llm)
    first, second = running_groups(llm)
    assert (tables(*first.live), tables(*second.live)) == ([[0, 1]], [[2, 3], [2, 3]])
    assert list(llm.block_manager.free_blocks) == [4]

    llm.step()
    check_invariants(llm)
    assert running_groups(llm) == [first] and list(llm.scheduler.waiting) == [second]
    assert tables(*first.live) == [[0, 1, 4]]
    if mode == "swap":
        assert is_swapped(second)
        assert batches[-1].message.swaps_out == [(2, 5), (3, 6)]
        assert tables(*second.live) == [[5, 6], [5, 6]]
        assert ref_counts(llm.block_manager) == [1, 1, 0, 0, 1, 2, 2, 0, 0]
    else:
        assert not is_swapped(second)
        assert ref_counts(llm.block_manager) == [1, 1, 0, 0, 1, 0, 0, 0, 0]

    last = drain_checked(llm)
    assert [all_tokens_of(last[request]) for request in requests] == expected

    stats = llm.stats()
    counts = (stats.preemptions_swap, stats.preemptions_recompute, stats.blocks_swapped)
    assert counts == ((1, 0, 4) if mode == "swap" else (0, 1, 0))


def test_a_group_may_fill_the_whole_pool_alone(llama, engine):
    """For every prompt length, exactly the blocks it can need are enough."""
    for length, n in itertools.product([4, 5, 6, 7, 8], [2, 3, 5]):
        exact = most_blocks(length, n, 10)
        roomy, llm = (
            engine(
                llama,
                num_blocks=num_blocks,
                max_model_len=length + 10,
                preemption_mode=mode,
                swap_space=swap_space(llama, 0, 4),
            )
            for num_blocks, mode in ((100, "auto"), (exact, "swap"))
        )
        prompt = list(range(length))
        request = llm.add_request(prompt, sampled(n, max_tokens=10))
        last = drain_checked(llm)

        assert [all_tokens_of(last[request])] == generate(
            roomy, [prompt], sampled(n, max_tokens=10)
        )
        assert llm.stats().preemptions_recompute == llm.stats().preemptions_swap == 0


# --- the engine: groups as a whole, in order ---


def test_a_group_that_does_not_fit_waits_as_a_whole_and_is_not_overtaken(llama, engine):
    llm = engine(
        llama,
        num_blocks=100,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        swap_space=swap_space(llama, 8, 4),
    )
    first = llm.add_request(PROMPT, sampled(4, max_tokens=6))
    second = llm.add_request(PROMPT[:3], sampled(4, max_tokens=3))
    third = llm.add_request(PROMPT[:2], sampled(1, max_tokens=2))

    order = []
    while llm.has_unfinished_requests():
        order.append([output.request_id for output in llm.step()])
        check_invariants(llm)
        for group in running_groups(llm):
            assert len(group.live) in (group.params.n, 0)

    assert order == [[first]] * 6 + [[second, third]] * 2 + [[second]]


def test_sequences_that_have_ended_make_room_for_the_next_group(llama, engine):
    """Live sequences occupy rows: four of six end early, so four more are admitted."""
    llm = engine(
        llama,
        num_blocks=100,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        swap_space=swap_space(llama, 8, 4),
    )
    (endless,) = generate(llm, [PROMPT], sampled(6))
    stop = [tokens[1] for tokens in endless[:4]]
    ends = [
        next((i for i, t in enumerate(tokens) if t in stop), 16) for tokens in endless
    ]
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
def test_the_youngest_is_preempted_first_and_all_return_in_order(llama, mode, engine):
    llm = engine(
        llama,
        num_blocks=17,
        max_model_len=24,
        preemption_mode=mode,
        swap_space=swap_space(llama, 60, 4),
    )
    for seed in range(4):
        llm.add_request([seed + 1] * 6, sampled(3, seed, max_tokens=14))

    preempted = []
    seen = set()
    while llm.has_unfinished_requests():
        before = running_groups(llm)
        llm.step()
        check_invariants(llm)  # including the order of arrival

        after = running_groups(llm)
        gone = [group for group in before if group.live and group not in after]
        assert gone == before[len(before) - len(gone) :] or not gone

        preempted += gone
        for group in gone:
            assert is_swapped(group) == (mode == "swap")

        for group in after:
            assert len({len(seq.token_ids) for seq in group.live}) == 1, (
                "one has fallen behind"
            )
            seen.add((group.request_id, len(group.live[0].token_ids)))

    assert len({group.request_id for group in preempted}) > 1
    stats = llm.stats()
    count = stats.preemptions_swap if mode == "swap" else stats.preemptions_recompute
    assert count == len(preempted)
    assert stats.preemptions_swap + stats.preemptions_recompute == count


def test_swapped_groups_keep_sharing_and_move_once_each_way(llama, engine):
    llm = engine(
        llama,
        num_blocks=17,
        max_model_len=24,
        preemption_mode="swap",
        swap_space=swap_space(llama, 60, 4),
    )
    batches = record(llm)
    for seed in range(4):
        llm.add_request([seed + 1] * 6, sampled(3, seed, max_tokens=14))

    moved, pattern, trips = 0, {}, 0
    while llm.has_unfinished_requests():
        llm.step()
        check_invariants(llm)

        batch = batches[-1]
        moved += len(batch.message.swaps_out) + len(batch.message.swaps_in)
        for pairs in (batch.message.swaps_out, batch.message.swaps_in):
            assert (
                len(dict(pairs)) == len({target for _, target in pairs}) == len(pairs)
            )

        for group in llm.scheduler.waiting:
            if is_swapped(group):
                assert group not in [seq.group for seq in batch.sampled]
                assert all(seq.row < 0 for seq in group.live)
                first, second, third = tables(*group.live)
                assert first[0] == second[0] == third[0]  # the prompt's full block
                assert len(blocks_of(group)) == len({*first, *second, *third})
                pattern[group] = [len(table) for table in tables(*group.live)]
        for group in running_groups(llm):
            if group in pattern:  # it is back: no table is shorter than before
                before = pattern.pop(group)
                trips += 1
                assert all(
                    len(t) >= b
                    for t, b in zip(tables(*group.live), before, strict=True)
                )
                assert len({table[0] for table in tables(*group.live)}) == 1

    assert trips > 1
    stats = llm.stats()
    assert stats.blocks_swapped == moved > 0
    assert sum(len(b.message.swaps_out) for b in batches) == sum(
        len(b.message.swaps_in) for b in batches
    )
    assert stats.preemptions_recompute == 0
    # Nothing was computed twice.
    assert sum(sum(batch.message.counts) for batch in batches) == 4 * (6 + 3 * 13)


@pytest.mark.parametrize(
    ("mode", "n", "swaps"),
    [
        ("auto", 1, False),
        ("auto", 2, True),
        ("swap", 1, True),
        ("swap", 2, True),
        ("recompute", 1, False),
        ("recompute", 2, False),
    ],
)
def test_auto_swaps_groups_of_several_and_recomputes_single_sequences(
    llama, mode, n, swaps, engine
):
    llm = engine(
        llama,
        num_blocks=most_blocks(6, n, 16) + 3,
        max_model_len=22,
        preemption_mode=mode,
        swap_space=swap_space(llama, 60, 4),
    )
    for seed in range(4):
        llm.add_request([seed + 1] * 6, sampled(n, seed))
    drain_checked(llm)
    stats = llm.stats()

    assert (stats.preemptions_swap > 0) == swaps
    assert (stats.preemptions_recompute > 0) == (not swaps)
    assert (stats.blocks_swapped > 0) == swaps


@pytest.mark.parametrize("mode", ["auto", "swap"])
def test_without_swap_space_groups_are_recomputed(llama, mode, engine):
    roomy = engine(llama, num_blocks=200, swap_space=0)
    llm = engine(
        llama,
        num_blocks=most_blocks(6, 3, 16) + 3,
        max_model_len=22,
        preemption_mode=mode,
        swap_space=0,
    )
    prompts = [[seed + 1] * 6 for seed in range(4)]
    params = [sampled(3, i) for i in range(4)]
    requests = add_all(llm, prompts, params)
    last = drain_checked(llm)

    assert [all_tokens_of(last[request]) for request in requests] == generate(
        roomy, prompts, params
    )
    stats = llm.stats()

    assert stats.preemptions_recompute > 0
    assert stats.preemptions_swap == stats.blocks_swapped == 0


@pytest.mark.parametrize("blocks", [0, 1, 5, 12])
def test_swap_space_is_counted_in_whole_blocks(llama, blocks, engine):
    for extra in (0.0, 0.5):
        llm = engine(
            llama,
            swap_space=swap_space(llama, blocks, 4) + extra * swap_space(llama, 1, 4),
        )
        # A part of a block does not count.
        assert len(llm.block_manager.free_swap_blocks) == blocks


# --- the engine: constrained is unconstrained ---

MODES = ["recompute", "swap", "both pools tiny"]
NEW_TOKENS = 15
MATRIX = list(itertools.product(range(1, 9), MODES, [True, False], range(3)))
SOME = [  # a third: each n in each mode, with and without prefix caching
    (n, mode, caching, budget)
    for n, mode, caching, budget in MATRIX
    if budget == (n + MODES.index(mode) + caching) % 3
]


def work(n):
    """Prompts of several lengths, groups of n and a single one; two share a prefix."""
    rng = random.Random(n)
    prompts = [
        [rng.randrange(160) for _ in range(length)] for length in (9, 16, 5, 11, 6)
    ]
    prompts.append(prompts[1][:12] + [7, 7])
    counts = [n, 1, n, n, n, n]
    params = [
        sampled(count, seed=10 * n + i, max_tokens=NEW_TOKENS, ignore_eos=i % 2 == 0)
        for i, count in enumerate(counts)
    ]
    return prompts, params


@pytest.fixture(scope="session")
def unconstrained(llama):
    """`unconstrained(n)`: the tokens of `work(n)` with room for everything."""
    known = {}

    def run(n):
        if n not in known:
            with LLM(
                str(llama),
                dtype="float32",
                device="cpu",
                block_size=16,
                num_blocks=300,
                max_model_len=96,
                enable_prefix_caching=False,
                swap_space=0,
            ) as llm:
                known[n] = generate(llm, *work(n))
                stats = llm.stats()
                assert stats.preemptions_recompute == stats.preemptions_swap == 0
        return known[n]

    return run


def constrained(llama, n, mode, caching, budget_kind):
    """Engine options: a pool hardly larger than the largest group needs, and chunks."""
    max_num_seqs = 3 * n + 1
    block_size = 4
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


def run_constrained(case, llama, engine, unconstrained):
    n, mode, caching, budget_kind = case
    options = constrained(llama, n, mode, caching, budget_kind)
    llm = engine(llama, **options)
    requests = add_all(llm, *work(n))
    last = drain_checked(llm)
    assert [all_tokens_of(last[request]) for request in requests] == unconstrained(n)
    return llm.stats(), options


def preempts_as_expected(stats, mode):
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
    assert n == 1 or {len(tokens) for tokens in several} != {NEW_TOKENS}, (
        "none met an EOS"
    )


@pytest.mark.parametrize("case", SOME, ids=str)
def test_tight_pools_and_small_chunks_change_no_token(
    case, llama, engine, unconstrained
):
    stats, options = run_constrained(case, llama, engine, unconstrained)
    assert preempts_as_expected(stats, case[1]), (stats, options)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in MATRIX if case not in SOME], ids=str)
def test_all_other_tight_pools_and_small_chunks_change_no_token(
    case, llama, engine, unconstrained
):
    stats, options = run_constrained(case, llama, engine, unconstrained)
    assert preempts_as_expected(stats, case[1]), (stats, options)


def test_logprobs_survive_swapping_and_recomputing(llama, engine):
    prompts, params = work(4)
    params = [dataclasses.replace(param, logprobs=3) for param in params]
    roomy = engine(llama, num_blocks=300, max_model_len=32, swap_space=0)

    expected = roomy.generate(prompts, params, use_tqdm=False)
    for mode in MODES:
        options = constrained(llama, 4, mode, True, 1)
        llm = engine(llama, **options)
        requests = add_all(llm, prompts, params)
        last = drain_checked(llm)

        assert preempts_as_expected(llm.stats(), mode)
        for request, output in zip(requests, expected, strict=True):
            for one, other in zip(last[request].outputs, output.outputs, strict=True):
                assert list(one.token_ids) == list(other.token_ids)
                assert len(one.logprobs) == len(one.token_ids)
                assert one.cumulative_logprob == pytest.approx(
                    other.cumulative_logprob, abs=1e-3
                )


# --- the engine: aborts and failures ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("victim", range(0, 6, 2))
def test_aborting_at_any_step_frees_all_blocks_and_changes_no_other_token(
    llama, mode, victim, engine, unconstrained
):
    expected = unconstrained(3)
    stages = Counter()
    for steps in range(victim, 40, 7):
        llm = engine(llama, **constrained(llama, 3, mode, steps % 2 == 0, 1))
        requests = add_all(llm, *work(3))
        last = step(llm, steps)
        groups = [*llm.scheduler.running, *llm.scheduler.waiting]
        group = next(
            (g for g in groups if g.live and g.request_id == requests[victim]), None
        )
        llm.abort_request(requests[victim])

        if group is None:
            drain_checked(llm)
            continue
        stages[
            "swapped"
            if is_swapped(group)
            else "running"
            if group in running_groups(llm)
            else "waiting"
        ] += 1

        check_invariants(llm)
        last.update(drain_checked(llm))
        for i, (request, tokens) in enumerate(zip(requests, expected, strict=True)):
            outputs = last[request].outputs
            if i != victim:
                assert all_tokens_of(last[request]) == tokens
                continue
            assert last[request].finished
            assert "abort" in {completion.finish_reason for completion in outputs}
            for completion, whole in zip(outputs, tokens, strict=True):
                assert list(completion.token_ids) == whole[: len(completion.token_ids)]

    assert stages["running"] + stages["waiting"] + stages["swapped"] > 2, stages


def test_aborting_a_swapped_group_frees_its_swap_blocks(llama, engine, unconstrained):
    llm = engine(llama, **constrained(llama, 3, "swap", True, 1))
    requests = add_all(llm, *work(3))
    total = len(llm.block_manager.free_swap_blocks)
    (group,) = step_until_swapped(llm)
    assert len(llm.block_manager.free_swap_blocks) == total - len(blocks_of(group))

    llm.abort_request(group.request_id)
    check_invariants(llm)
    assert len(llm.block_manager.free_swap_blocks) == total

    last = drain_checked(llm)
    for request, tokens in zip(requests, unconstrained(3), strict=True):
        if request != group.request_id and request in last:
            assert all_tokens_of(last[request]) == tokens


def test_aborting_all_while_some_are_swapped(llama, engine):
    llm = engine(llama, **constrained(llama, 3, "swap", True, 1))
    requests = add_all(llm, *work(3))
    total = len(llm.block_manager.free_swap_blocks)
    step_until_swapped(llm)

    for request in requests:
        llm.abort_request(request)
        check_invariants(llm)
    assert not (llm.scheduler.waiting or llm.scheduler.running)
    assert len(llm.block_manager.free_blocks) == llm.block_manager.num_blocks
    assert len(llm.block_manager.free_swap_blocks) == total

    llm.step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("caching", [True, False])
def test_after_a_failed_step_all_have_ended_and_new_requests_are_served(
    llama, mode, caching, engine, unconstrained, monkeypatch
):
    """The failed step's copies and swaps may or may not have happened."""
    for failing, early in itertools.product(range(1, 40, 9), [True, False]):
        llm = engine(llama, **constrained(llama, 3, mode, caching, 1))
        requests = add_all(llm, *work(3))
        last = step(llm, failing)
        if not (llm.scheduler.waiting or llm.scheduler.running):
            break

        with monkeypatch.context() as patch:
            place = (llm.runner, "execute") if early else (llm.runner.model, "forward")
            patch.setattr(*place, lambda *inputs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.step()
        check_invariants(llm)

        last.update(step(llm))
        assert not llm.has_unfinished_requests()
        for request, wanted in zip(requests, unconstrained(3), strict=True):
            for answer, tokens in zip(
                all_tokens_of(last[request]), wanted, strict=True
            ):
                assert answer == tokens[: len(answer)]

        requests = add_all(llm, *work(3))
        last.update(drain_checked(llm))
        assert [all_tokens_of(last[request]) for request in requests] == unconstrained(
            3
        )
    assert failing > 20


# --- what is rejected ---


def test_a_group_that_can_never_run_is_rejected(llama, engine):
    llm = engine(
        llama,
        num_blocks=24,
        max_model_len=96,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        swap_space=swap_space(llama, 100, 4),
    )
    before = counters(llm)

    for prompt, params, word in (
        (PROMPT, sampled(7), "max_num_seqs"),
        (PROMPT, sampled(6, max_tokens=22), "blocks"),  # 1 + 6 * 7 of 24
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
def test_a_request_one_block_too_large_is_rejected(llama, n, length, engine):
    exact = most_blocks(length, n, 12)
    llm = engine(
        llama,
        num_blocks=exact - 1,
        max_model_len=length + 12,
        swap_space=swap_space(llama, 100, 4),
    )
    before = counters(llm)

    with pytest.raises(ValueError, match="blocks"):
        llm.add_request(list(range(length)), sampled(n, max_tokens=12))
    assert counters(llm) == before

    generate(llm, [list(range(length))], sampled(n, max_tokens=8))
