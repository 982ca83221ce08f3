"""Which groups run, with how many tokens, in which blocks: without a model.

`World` stands in for the runner. It moves blocks as a step emit, mirrors the block
tables from `table_updates`, and writes into every slot what its K and V would stand
for. After each `schedule` it checks that every sequence can read all of its past,
wherever that is, that no slot is written twice, that groups are treated as a whole, and
that blocks, rows and order are consistent.
"""

import itertools
import random
from collections import Counter

import pytest
import torch

from helpers import block_state, floats, is_swapped
from nanopaged import BeamSearchParams, EngineConfig, Logprob, SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.sampler import SamplerOutput
from nanopaged.scheduler import Batch, Scheduler
from nanopaged.sequence import SequenceGroup


def count_up(position, index):
    return 1000 * (index + 1) + position


def as_logprobs(values):
    """What the sampler reports; `values` are log-probabilities, the highest first."""
    items = enumerate(values.items(), start=1)
    return {token: Logprob(value, rank) for rank, (token, value) in items}


def likely(tokens, count):
    """Some next tokens of a beam and their log-probabilities, always the same."""
    rng = random.Random(hash(tuple(tokens)))
    return {token: -4 * rng.random() for token in rng.sample(range(count + 2), count)}


class World:
    def __init__(
        self,
        num_blocks=8,
        block_size=4,
        max_num_seqs=4,
        budget=64,
        caching=True,
        max_model_len=None,
        num_swap_blocks=0,
        mode="auto",
    ):
        config = EngineConfig(
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            preemption_mode=mode,
        )
        self.blocks = BlockManager(
            num_blocks, block_size, caching, num_swap_blocks=num_swap_blocks
        )
        self.scheduler = Scheduler(config, self.blocks)
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.max_model_len = max_model_len or num_blocks * block_size
        self.mode = mode
        self.groups = []  # in order of arrival
        self.members = {}  # group -> its sequences, which a beam search replaces
        self.emits = {}  # group -> the function that samples its tokens
        self.mirror = [[0] * num_blocks for _ in range(max_num_seqs)]
        self.names = {}  # (name of the previous token, token) -> name of this token
        self.events = Counter()
        self.lose_contents()

    def lose_contents(self):
        """Reset the slots: each holds the name of the token whose K and V are there."""
        self.content = [[None] * self.block_size for _ in self.blocks.blocks]

    def add(
        self, prompt, max_tokens=4, stop=(), emit=count_up, salt=None, n=1, beams=None
    ):
        """`emit(position, index)` is a token; for beams, `emit(tokens, k)` logprobs."""
        logprobs = None
        if beams:
            n = beams.beam_width
            max_tokens = beams.max_tokens
            logprobs = n * max(2, 1 + len(stop))
            emit = likely if emit is count_up else emit

        params = SamplingParams(
            n=n, max_tokens=max_tokens, logprobs=logprobs, cache_salt=salt
        )
        limit = self.max_model_len
        group = SequenceGroup(None, list(prompt), params, set(stop), limit, None, beams)
        room = self.blocks.most_blocks(len(prompt), [group.max_len] * n)

        assert n <= self.max_num_seqs and room <= self.blocks.num_blocks, (
            "the engine would reject it"
        )
        self.groups.append(group)
        self.emits[group] = emit
        self.members[group] = group.sequences
        self.scheduler.waiting[group] = None
        return group

    def schedule(self):
        """Schedule a step, carry it out and check it; returns its batch."""
        scheduler = self.scheduler
        blocks = self.blocks.blocks
        settled = {i: blocks[i].name for i in self.blocks.published.values()}
        free = list(self.blocks.free_blocks)
        live = [group for group in self.groups if group.live]
        before = {
            "rows": {seq: seq.row for group in live for seq in group.live},
            "forked": {group for group in live if group.forked},
            "held": {
                group: self.held(group) for group in live if group in scheduler.running
            },
            "swap_room": len(self.blocks.free_swap_blocks),
            "counted": self.counted(),
        }
        batch = scheduler.schedule()

        assert bool(batch.message.rows) == bool(live), "a step without work"
        self.move(batch.message.swaps_out)

        found = set(self.blocks.published.values())
        for i in free:  # what was taken and is not a hit has lost its content
            if blocks[i].ref_count and (
                i not in found or settled.get(i) != blocks[i].name
            ):
                self.content[i] = [None] * self.block_size

        self.move(batch.message.swaps_in)
        self.move(batch.message.copies)
        for row, first, block_ids in batch.message.table_updates:
            self.mirror[row][first : first + len(block_ids)] = block_ids

        self.check_work(batch, before)
        self.check_preemptions(batch, before)
        self.check_slots(batch, settled)
        self.check_residents()

        return batch

    def working(self, batch):
        rows = {seq.row: seq for group in self.scheduler.running for seq in group.live}
        return [rows[row] for row in batch.message.rows]

    def held(self, group):
        return {block for seq in group.live for block in seq.block_table}

    def counted(self):
        stats = self.scheduler.stats
        return Counter(
            copied=stats.blocks_copied,
            swapped=stats.blocks_swapped,
            swaps=stats.preemptions_swap,
            again=stats.preemptions_recompute,
        )

    def move(self, moves):
        # Read everything, then write.
        contents = [list(self.content[source]) for source, _ in moves]
        targets = [target for _, target in moves]
        assert len(set(targets)) == len(targets)
        for target, content in zip(targets, contents, strict=True):
            self.content[target] = content

    def check_work(self, batch, before):
        """Groups run in order, each as a whole or as far as the budget allows."""
        scheduler = self.scheduler
        budget = self.budget
        catching_up = False
        working = self.working(batch)
        counts = dict(zip(working, batch.message.counts, strict=True))
        assert all(count > 0 for count in counts.values())

        worked = [
            seq for group in scheduler.running for seq in group.live if seq in counts
        ]
        assert working == worked
        assert batch.message.ends == [seq.num_computed_tokens for seq in worked]

        spans = zip(worked, batch.message.counts, batch.message.ends, strict=True)
        assert batch.message.token_ids == [
            t for s, count, e in spans for t in s.token_ids[e - count : e]
        ]
        assert sum(counts.values()) <= budget

        admitted, samples = [], []
        for group in scheduler.running:
            leader, *others = group.live
            forked = group in before["forked"]
            seqs = group.live if forked else [leader]
            ends = [
                len(seq.token_ids) if forked else group.num_prompt_tokens
                for seq in seqs
            ]
            done = [counts.get(seq, 0) for seq in seqs]
            left = [
                end - seq.num_computed_tokens + count
                for seq, end, count in zip(seqs, ends, done, strict=True)
            ]

            if sum(left) <= budget:
                assert done == left
            else:  # no sequence samples, and the group takes what it can
                assert sum(done) == min(budget, sum(left) - len(seqs))
                assert all(map(int.__lt__, done, left))
            new = before["rows"][leader] < 0

            assert any(done) or max(left) > 1 or new or catching_up, (
                "a decode waits for a prompt"
            )
            catching_up |= len(seqs) > 1 and max(left) > 1
            self.events["waits"] += len(seqs) > 1 and sum(left) > budget
            self.events["several again"] += len(seqs) > 1 and max(left) > 1
            budget -= sum(done)
            size = self.block_size

            assert [len(s.block_table) for s in seqs] == [
                -(-end // size) for end in ends
            ]
            if not forked and done == left:  # it has just forked
                assert all(s.block_table == leader.block_table for s in others)
                assert all(
                    s.num_computed_tokens == group.num_prompt_tokens for s in others
                )
            elif not forked:
                assert not any(s.block_table or s.num_computed_tokens for s in others)

            if all(s.num_computed_tokens == len(s.token_ids) for s in group.live):
                samples += [(s if forked else leader, s) for s in group.live]
            admitted += [s for s in group.live if before["rows"][s] < 0]

        takers = zip(batch.message.samples, batch.sampled, strict=True)
        assert [(working[i], seq) for i, seq in takers] == samples
        assert batch.admitted == admitted

        order = [group for group in self.groups if group.live]
        assert [*scheduler.running, *scheduler.waiting] == order, (
            "not first come, first served"
        )

    def check_preemptions(self, batch, before):
        """The youngest are preempted, to the CPU if mode and room allow it."""
        running = self.scheduler.running
        room = before["swap_room"]
        expected = Counter()
        swapped = 0
        for group in [group for group in before["held"] if group not in running][::-1]:
            several = self.mode == "swap" or (
                self.mode == "auto" and len(group.live) > 1
            )
            need = len(before["held"][group])
            assert is_swapped(group) == (several and need <= room)

            self.events["no room"] += several and not is_swapped(group)
            within = group.live[0].num_computed_tokens < group.num_prompt_tokens
            self.events["swapped within its prompt"] += is_swapped(group) and within
            room -= need * is_swapped(group)
            swapped += need * is_swapped(group)
            expected["swaps" if is_swapped(group) else "again"] += 1

        assert len(batch.message.swaps_out) == swapped
        expected.update(
            copied=len(batch.message.copies),
            swapped=swapped + len(batch.message.swaps_in),
        )
        assert self.counted() - before["counted"] == +expected

    def check_slots(self, batch, settled):
        blocks = self.blocks.blocks
        written = set()
        names = {seq: self.name(seq) for group in self.groups for seq in group.live}
        for seq, count in zip(self.working(batch), batch.message.counts, strict=True):
            row = self.mirror[seq.row]
            assert row[: len(seq.block_table)] == seq.block_table, (
                "the runner has another table"
            )

            for position in range(
                seq.num_computed_tokens - count, seq.num_computed_tokens
            ):
                block = row[position // self.block_size]
                offset = position % self.block_size
                assert (block, offset) not in written, "two sequences write one slot"
                written.add((block, offset))
                old = settled.get(block) == blocks[block].name
                found = block in self.blocks.published.values()
                assert not (found and old), "a published block is written"
                self.content[block][offset] = names[seq][position]

        # Read after all writes, as in each layer of the model.
        for seq, past in names.items():
            read = [slot for block in seq.block_table for slot in self.content[block]]
            end = seq.num_computed_tokens
            assert read[:end] == past[:end], "it reads another sequence's K and V"

    def check_residents(self):
        manager = self.blocks
        scheduler = self.scheduler
        live = [seq for group in scheduler.running for seq in group.live]
        assert len(live) <= self.max_num_seqs

        rows = [seq.row for seq in live]
        assert sorted(rows + scheduler.free_rows) == list(range(self.max_num_seqs))
        for group in scheduler.waiting:
            assert all(seq.row == -1 for seq in group.live)
            if not is_swapped(group):
                assert not any(
                    s.block_table or s.num_computed_tokens for s in group.live
                )

        for group in [*scheduler.running, *scheduler.waiting]:
            swapped = {block >= manager.num_blocks for block in self.held(group)}
            assert swapped <= {is_swapped(group)}
        slots = {
            (seq.block_table[i // self.block_size], i % self.block_size)
            for seq in live
            for i in range(seq.num_computed_tokens)
        }

        assert scheduler.measure().tokens_held == len(slots)
        references = Counter(
            block
            for group in self.groups
            for seq in group.live
            for block in seq.block_table
        )
        ids = range(len(manager.blocks))

        assert [block.ref_count for block in manager.blocks] == [
            references[i] for i in ids
        ]
        free = [*manager.free_blocks], [*manager.free_swap_blocks]

        assert all(block < manager.num_blocks for block in free[0])
        assert sorted(free[0] + free[1]) == [i for i in ids if i not in references]
        assert all(block < manager.num_blocks for block in manager.published.values())

    def name(self, seq):
        """A name for each token that includes the salt and all tokens before it."""
        names = []
        name = seq.group.params.cache_salt
        for token in seq.token_ids:
            name = self.names.setdefault((name, token), len(self.names))
            names.append(name)
        return names

    def update(self, batch):
        tokens, logprobs = [], {}
        for i, seq in enumerate(batch.sampled):
            emit = self.emits[seq.group]
            if seq.group.is_beam_search:
                logprobs[i] = as_logprobs(
                    emit(seq.token_ids, seq.group.params.logprobs)
                )
            is_beam = seq.group.is_beam_search
            tokens.append(0 if is_beam else emit(len(seq.token_ids), seq.index))
        output = SamplerOutput(torch.tensor(tokens, dtype=torch.int64), logprobs)
        self.scheduler.update(batch, output.read(), output.logprobs)

    def step(self):
        """Take a whole step; returns {group: number of tokens computed}."""
        batch = self.schedule()
        done = Counter()
        working = self.working(batch)
        self.update(batch)
        for seq, count in zip(working, batch.message.counts, strict=True):
            done[seq.group] += count
        return dict(done)

    def fail(self):
        """As if a step raised after `schedule`: the contents of blocks are unknown."""
        counted = self.counted()
        self.scheduler.abort([*self.scheduler.waiting, *self.scheduler.running])
        self.blocks.published.clear()
        self.lose_contents()
        self.check_residents()
        assert self.counted() == counted
        assert (self.scheduler.running, list(self.scheduler.waiting)) == ([], [])
        assert not any(group.live or self.held(group) for group in self.groups)

    def abort(self, group):
        self.scheduler.abort([group])
        assert not group.live
        assert group not in self.scheduler.waiting
        self.check_residents()

    def finish(self, limit=1000):
        """Step until nothing is left, then check that everything was given back."""
        for _ in range(limit):
            if not (self.scheduler.waiting or self.scheduler.running):
                break
            self.step()
        assert not (self.scheduler.waiting or self.scheduler.running), "no end in sight"

        self.scheduler.schedule()  # forgets finished groups
        assert not self.scheduler.running and not self.scheduler.waiting
        self.check_residents()

        for group in self.groups:
            assert all(
                (seq.row, seq.block_table) == (-1, []) for seq in self.members[group]
            )
            if any(seq.finish_reason == "abort" for seq in group.sequences):
                continue
            if group.is_beam_search:
                assert self.results(group) == self.results(self.alone(group))
                self.events["searches"] += 1
            else:
                answers = [self.answer(group, seq.index) for seq in self.members[group]]
                assert [seq.token_ids for seq in group.sequences] == answers

    def answer(self, group, index):
        """The tokens that a sequence must end with, whatever happened on the way."""
        tokens = list(group.prompt_token_ids)
        while len(tokens) < min(group.max_len, self.max_model_len):
            tokens.append(self.emits[group](len(tokens), index))
            if tokens[-1] in group.stop_token_ids:
                break
        return tokens

    def alone(self, group):
        """The same beam search on its own, with enough of everything."""
        num_blocks = self.blocks.most_blocks(0, [group.max_len] * group.params.n)
        world = World(
            num_blocks,
            self.block_size,
            group.params.n,
            budget=1000,
            max_model_len=self.max_model_len,
        )
        search = world.add(
            group.prompt_token_ids,
            stop=group.stop_token_ids,
            emit=self.emits[group],
            beams=group.beam_params,
        )
        while search.live:
            world.step()
        return search

    def results(self, group):
        return [
            (s.token_ids, s.finish_reason, s.cumulative_logprob)
            for s in group.sequences
        ]


def prompt(length, name=0):
    return [100 * name + i for i in range(length)]


def tables(*groups):
    return [seq.block_table for group in groups for seq in group.live]


def only(group):
    (seq,) = group.sequences
    return seq


# --- order and budget ---


def test_prompts_are_admitted_in_the_order_of_their_arrival():
    world = World(num_blocks=20, max_num_seqs=10, budget=20)
    groups = [world.add(prompt(7, name), max_tokens=2) for name in range(4)]
    assert world.step() == {groups[0]: 7, groups[1]: 7, groups[2]: 6}
    assert world.step() == {groups[0]: 1, groups[1]: 1, groups[2]: 1, groups[3]: 7}
    world.finish()


def test_a_small_request_does_not_overtake_a_large_one():
    world = World(num_blocks=8)
    first = world.add(prompt(12), max_tokens=4)
    big = world.add(prompt(24, 1))
    small = world.add(prompt(2, 2))
    for _ in range(4):
        assert list(world.step()) == [first]
    assert list(world.step()) == [big, small]
    world.finish()


def test_chunks_of_a_long_prompt_leave_decodes_their_token_and_add_up():
    world = World(num_blocks=40, budget=16)
    short = [world.add(prompt(3, 1), 20), world.add(prompt(4, 2), 20)]
    world.step()
    long = world.add(prompt(50))
    chunks = [world.step() for _ in range(5)]

    assert [chunk[long] for chunk in chunks] == [14, 14, 14, 8, 1]
    assert all(chunk[group] == 1 for chunk in chunks for group in short)
    assert len(only(long).token_ids) == 52

    world.finish()


def test_a_step_samples_only_where_it_reaches_the_last_token():
    world = World(num_blocks=20, budget=4)
    group = world.add(prompt(10), max_tokens=3)

    steps = []
    while world.scheduler.waiting or world.scheduler.running:
        batch = world.schedule()
        steps.append((batch.message.counts, batch.sampled, len(only(group).token_ids)))
        world.update(batch)

    sample = [only(group)]
    assert steps == [
        ([4], [], 10),
        ([4], [], 10),
        ([2], sample, 10),
        ([1], sample, 11),
        ([1], sample, 12),
    ]
    assert only(group).token_ids == prompt(10) + [1010, 1011, 1012]


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 8, 64])
def test_any_budget_gives_the_same_tokens(budget):
    world = World(num_blocks=30, max_num_seqs=1, budget=budget)
    for length in (1, 3, 4, 5, 8, 17):
        world.add(prompt(length), max_tokens=5)
    world.finish()


# --- what may be resident ---


def test_no_more_than_max_num_seqs_hold_a_row_and_blocks():
    world = World(num_blocks=20, max_num_seqs=2, budget=2)
    groups = [world.add(prompt(5, name), max_tokens=name + 1) for name in range(5)]

    seen = Counter()
    while world.scheduler.waiting or world.scheduler.running:
        seen[len(world.step())] += 1
        holders = [group for group in groups if only(group).block_table]
        assert len(holders) <= 2

    assert seen[2] > 0
    assert sorted(world.scheduler.free_rows) == [0, 1]

    world.finish()


def test_admission_leaves_a_few_blocks_to_running_groups():
    for length, admitted in ((196, True), (197, False)):
        world = World(num_blocks=300, block_size=1, budget=1000)
        first = world.add(prompt(100), max_tokens=2)
        world.step()
        second = world.add(range(1000, 1000 + length), max_tokens=1)
        # Of 300 blocks the first needs 101 now; 3 (one in a hundred) must stay free.
        assert (second in world.step()) == admitted
        world.finish()
        assert only(first).finish_reason == "length"


def test_a_group_alone_may_fill_the_whole_pool():
    world = World(num_blocks=300, block_size=1, budget=1000)
    group = world.add(range(299), max_tokens=50)
    assert world.step() == {group: 299}
    world.finish()
    assert only(group).finish_reason == "length"


# --- prefix hits ---


def test_prompts_that_arrive_together_share_in_their_first_step():
    world = World(num_blocks=20)
    groups = [world.add(prompt(9), salt=salt) for salt in ("a", "a", "b", "a")]
    assert list(world.step().values()) == [9, 1, 9, 1]
    assert tables(*groups) == [[0, 1, 2], [0, 1, 3], [4, 5, 6], [0, 1, 7]]
    assert [group.num_cached_tokens for group in groups] == [0, 8, 0, 8]
    world.finish()


def test_a_prompt_shares_what_another_fills_in_chunks():
    world = World(num_blocks=20, budget=6)
    groups = [world.add(prompt(9)) for _ in range(2)]
    assert world.step() == {groups[0]: 6}
    assert world.step() == {groups[0]: 3, groups[1]: 1}
    world.finish()


# --- preemption ---


def test_preemption_takes_the_youngest_and_queues_it_first():
    world = World(num_blocks=6)
    first, second, third = (
        world.add(prompt(7, name), max_tokens=4) for name in range(3)
    )
    fourth = world.add(prompt(2, 3))
    world.step()
    world.step()  # all have 9 tokens now and need a third block each

    assert list(world.step()) == [first, second]
    assert list(world.scheduler.waiting) == [third, fourth]
    assert only(third).token_ids == prompt(7, 2) + [1007, 1008]
    assert world.scheduler.stats.preemptions_recompute == 1

    world.finish()


def test_preemption_continues_until_the_oldest_has_room():
    world = World(num_blocks=4, block_size=2, max_num_seqs=4)
    first = world.add(prompt(1), max_tokens=7)
    others = [world.add(prompt(1, name), max_tokens=3) for name in (1, 2, 3)]
    world.step()
    assert list(world.step()) == [first, *others]
    assert list(world.step()) == [first, others[0]]  # both need a second block
    assert list(world.scheduler.waiting) == others[1:]
    world.finish()


def test_a_group_that_preempts_itself_is_not_in_that_step():
    world = World(num_blocks=4)
    first = world.add(prompt(6), max_tokens=2)
    second = world.add(prompt(8, 1), max_tokens=3)
    world.step()
    # The second needs a third block, and is itself the youngest.
    batch = world.schedule()

    assert world.working(batch) == [only(first)]
    assert list(world.scheduler.waiting) == [second]

    world.update(batch)
    assert only(second).token_ids == prompt(8, 1) + [1008]

    world.finish()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [7, 8, 9])
def test_a_preempted_sequence_keeps_its_tokens_and_resumes_from_what_is_cached(
    length, caching
):
    world = World(num_blocks=4, caching=caching)
    first = world.add(prompt(6), max_tokens=5)
    second = world.add(prompt(length - 3, 1), max_tokens=6)
    for _ in range(3):
        assert list(world.step()) == [first, second]

    so_far = prompt(length - 3, 1) + [1000 + i for i in range(length - 3, length)]
    for _ in range(2):
        assert list(world.step()) == [first]  # which needs the third block
        assert only(second).token_ids == so_far

    batch = world.schedule()  # the first has finished
    # Its second block was taken before its first: blocks are freed tail first.
    assert batch.message.counts == [length - 4 if caching else length]
    assert batch.sampled == [only(second)]
    assert second.num_cached_tokens == 0  # counted at its first admission

    world.update(batch)
    world.finish()


def test_a_sequence_that_is_preempted_within_its_prompt_starts_again():
    world = World(num_blocks=9, block_size=2, max_num_seqs=2, budget=3, caching=False)
    first = world.add(prompt(2), max_tokens=14)
    second = world.add(prompt(12, 1), max_tokens=2)
    seen = [world.step() for _ in range(5)]

    assert [step.get(second) for step in seen] == [1, 2, 2, 2, 2]
    assert only(second).num_computed_tokens == 9
    assert list(world.step()) == [first]  # which needs its fourth block
    assert only(second).num_computed_tokens == 0
    assert only(second).token_ids == prompt(12, 1)

    world.finish()
    assert only(first).finish_reason == only(second).finish_reason == "length"


# --- groups of several ---


def test_a_group_computes_its_prompt_once_then_each_writes_to_its_own_block():
    world = World(num_blocks=8)
    group = world.add(prompt(6), n=3)
    a, b, c = group.sequences
    batch = world.schedule()

    assert (batch.message.rows, batch.message.counts, batch.admitted) == (
        [a.row],
        [6],
        [a, b, c],
    )
    assert (batch.message.samples, batch.sampled) == ([0, 0, 0], [a, b, c])
    assert tables(group) == [[0, 1], [0, 1], [0, 1]]

    world.update(batch)
    assert [seq.token_ids[-1] for seq in group.live] == [1006, 2006, 3006]

    batch = world.schedule()
    assert (batch.message.rows, batch.message.counts) == (
        [a.row, b.row, c.row],
        [1, 1, 1],
    )
    assert (batch.message.samples, batch.sampled) == ([0, 1, 2], [a, b, c])
    assert batch.message.copies == [(1, 2), (1, 3)]
    assert tables(group) == [[0, 2], [0, 3], [0, 1]]
    assert batch.message.table_updates == [
        (a.row, 1, [2]),
        (b.row, 0, [0, 3]),
        (c.row, 0, [0, 1]),
    ]

    world.update(batch)
    world.finish()


def test_sequences_of_a_group_sample_in_the_same_step_or_not_at_all():
    world = World(num_blocks=30, budget=6, mode="recompute", caching=False)
    group = world.add(prompt(5), n=3, max_tokens=7)
    for _ in range(5):
        world.step()
    assert {len(seq.token_ids) for seq in group.live} == {10}

    world.scheduler._preempt(world.scheduler.running.pop(), Batch())
    steps = []
    while {len(seq.token_ids) for seq in group.live} == {10}:
        batch = world.schedule()
        steps.append((batch.message.counts, len(batch.message.samples)))
        world.update(batch)

    # The leader's prompt; all but the last of 5 tokens for each; then the last of each.
    assert steps == [([5], 0), ([4, 2], 0), ([2, 4], 0), ([1, 1, 1], 3)]
    world.finish()


def test_a_group_needs_rows_and_blocks_for_all_its_sequences():
    for rows, num_blocks, fits in ((4, 7, True), (3, 7, False), (4, 6, False)):
        world = World(num_blocks=num_blocks, max_num_seqs=rows)
        first = world.add(prompt(12), max_tokens=2)
        second = world.add(prompt(6, 1), n=3, max_tokens=2)  # may hold 1 + 3 blocks
        third = world.add(prompt(1, 2), max_tokens=1)
        assert list(world.step()) == ([first, second] if fits else [first])
        assert third in world.scheduler.waiting  # it does not overtake
        world.finish()


def test_a_finished_sequence_frees_its_row_and_blocks_and_its_siblings_continue():
    world = World(num_blocks=10, max_num_seqs=3)
    group = world.add(prompt(6), n=3, max_tokens=9, stop=[2008, 1010])
    waiting = world.add(prompt(1, 1), max_tokens=8)
    a, b, c = group.sequences

    for _ in range(3):
        assert list(world.step()) == [group]
    assert group.live == [a, c]
    assert b.finish_reason == "stop"
    assert b.row == -1
    assert b.block_table == []
    assert world.step() == {group: 2, waiting: 1}

    world.scheduler.finish(c, "stop")  # its last token completed a stop string
    world.check_residents()
    assert world.step() == {group: 1, waiting: 1}
    assert [seq.finish_reason for seq in group.sequences] == ["stop", "stop", "stop"]
    assert len(c.token_ids) == 10

    c.token_ids = world.answer(group, 2)  # what `finish` will expect
    world.finish()


def test_a_dropped_beam_makes_room_for_a_fork():
    """The two best continuations come from two beams, then both from the second."""
    best = {6: {7: -1.0, 8: -2.0}, 7: {5: -9.0, 6: -9.5}, 8: {1: -0.5, 2: -0.6}}
    emit = lambda tokens, k: {3: -50.0, 4: -60.0} | best.get(tokens[-1], {})  # noqa: E731
    world = World(num_blocks=8)
    group = world.add([5, 5, 5, 5, 5, 6], beams=BeamSearchParams(2, 3), emit=emit)
    first, second = group.sequences
    world.step()

    assert (first.token_ids[6:], second.token_ids[6:]) == ([7], [8])
    batch = world.schedule()
    assert batch.message.copies == [(1, 2)]
    assert tables(group) == [[0, 2], [0, 1]]

    world.update(batch)
    assert (first.token_ids[6:], second.token_ids[6:]) == ([8, 2], [8, 1])
    assert tables(group) == [[0, 1], [0, 1]]
    assert first.cumulative_logprob == -2.6

    batch = world.schedule()  # a copied block again, in the row of the first one
    assert batch.message.copies == [(1, 2)]
    assert batch.message.table_updates == [(first.row, 0, [0, 2])]

    world.update(batch)
    assert {seq.finish_reason for seq in group.sequences} == {"length"}

    world.finish()


# --- swap ---


@pytest.mark.parametrize(
    ("mode", "n", "num_swap_blocks", "swaps"),
    [
        ("auto", 1, 9, False),
        ("auto", 2, 9, True),
        ("swap", 1, 9, True),
        ("swap", 2, 3, True),
        ("swap", 2, 2, False),
        ("auto", 2, 0, False),
        ("recompute", 2, 9, False),
    ],
)
def test_the_mode_and_the_swap_space_decide_what_is_swapped(
    mode, n, num_swap_blocks, swaps
):
    world = World(
        num_blocks=5, num_swap_blocks=num_swap_blocks, mode=mode, caching=False
    )
    first = world.add(prompt(7), 7)
    second = world.add(prompt(7, 1), 5, n=n)
    while second in world.step():
        pass

    assert is_swapped(second) == swaps
    assert len(world.held(second)) == (n + 1) * swaps

    stats = world.scheduler.stats
    assert (stats.preemptions_swap, stats.preemptions_recompute) == (swaps, not swaps)

    computed = []
    while second.live:
        computed += [world.step().get(second)]
    # It returns when the first has finished: with its K and V, or only with its tokens.
    again = [n] if swaps else [9] if n == 1 else [7, 2 * n]

    assert list(filter(None, computed))[: len(again)] == again
    assert stats.blocks_swapped == 2 * (n + 1) * swaps

    world.finish()
    assert only(first).finish_reason == "length"


# --- the end ---


@pytest.mark.parametrize(
    ("max_tokens", "stop", "reason", "answer"),
    [
        (9, [1007, 5], "stop", [1005, 1006, 1007]),  # it is kept
        (2, [3], "length", [1005, 1006]),  # in the prompt it ends nothing
        (2, [1006], "stop", [1005, 1006]),  # as the last possible token
    ],
)
def test_a_stop_token_ends_a_sequence(max_tokens, stop, reason, answer):
    world = World()
    group = world.add(prompt(5), max_tokens, stop)
    world.finish()
    assert (only(group).finish_reason, only(group).token_ids[5:]) == (reason, answer)


@pytest.mark.parametrize("length", [1, 30, 31])
def test_a_sequence_ends_at_max_model_len(length):
    world = World(num_blocks=8)
    group = world.add(prompt(length), max_tokens=100)
    world.finish()
    assert only(group).finish_reason == "length"
    assert len(only(group).token_ids) == 32


def test_what_ends_in_one_step_makes_room_in_the_next():
    world = World(num_blocks=4, max_num_seqs=1)
    first = world.add(prompt(3), max_tokens=1)
    second = world.add(prompt(3, 1), max_tokens=1)

    assert list(world.step()) == [first]
    assert len(world.blocks.free_blocks) == 4
    assert list(world.step()) == [second]

    world.finish()


def test_an_abort_after_the_end_changes_nothing():
    world = World()
    first = world.add(prompt(5), max_tokens=1)
    second = world.add(prompt(5), max_tokens=5)
    world.step()

    assert only(first).finish_reason == "length"
    held = block_state(world.blocks)
    world.abort(first)  # too late
    assert only(first).finish_reason == "length"
    assert block_state(world.blocks) == held

    world.finish()
    assert only(second).finish_reason == "length"


def stage(group):
    if not group.live:
        return "finished"
    seq = group.live[0]
    if seq.row < 0:
        started = is_swapped(group) or len(seq.token_ids) > group.num_prompt_tokens
        return "swapped" if is_swapped(group) else "preempted" if started else "waiting"
    within = seq.num_computed_tokens < group.num_prompt_tokens
    return "within its prompt" if within else "decoding"


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_aborting_frees_blocks_and_rows_at_every_stage(mode, n, caching):
    seen = set()
    for steps, victim in itertools.product(range(16), range(3)):
        world = World(
            max(4, 2 * n + 1), budget=5, caching=caching, num_swap_blocks=9, mode=mode
        )
        groups = [
            world.add(prompt(2), max_tokens=9),
            world.add(prompt(6, 1), max_tokens=4, n=n),
            world.add(prompt(6, 2), max_tokens=4),
        ]

        for _ in range(steps):
            if world.scheduler.waiting or world.scheduler.running:
                world.step()
        group = groups[victim]
        seen.add((victim, stage(group)))
        expected = {seq: seq.finish_reason or "abort" for seq in group.sequences}
        world.abort(group)

        assert {seq: seq.finish_reason for seq in group.sequences} == expected
        if world.scheduler.waiting or world.scheduler.running:
            assert group not in world.step()

        world.finish()
        for other in set(groups) - {group}:
            assert {seq.finish_reason for seq in other.sequences} == {"length"}

    away = "preempted" if mode == "recompute" else "swapped"
    assert {place for _, place in seen} == {
        "waiting",
        "within its prompt",
        "decoding",
        away,
        "finished",
    }
    assert (1, away) in seen


def test_aborting_all_leaves_nothing_to_do():
    world = World(num_blocks=4)
    groups = [world.add(prompt(6, name)) for name in range(4)]
    world.step()
    for group in groups:
        world.abort(group)
    assert not (world.scheduler.waiting or world.scheduler.running)
    assert len(world.blocks.free_blocks) == 4
    world.finish()


# --- a step that failed ---


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_after_a_failed_step_all_have_ended_and_new_requests_are_served(mode):
    swapped = 0
    for steps in range(16):
        world = World(num_blocks=6, num_swap_blocks=6, budget=8, mode=mode)
        for name in range(4):
            world.add(prompt(5, name), max_tokens=5, n=1 + name % 2)
        for _ in range(steps):
            world.step()
        tokens = [seq.token_ids[:] for group in world.groups for seq in group.sequences]
        world.schedule()
        swapped += any(is_swapped(group) for group in world.groups)
        world.fail()

        assert tokens == [
            seq.token_ids for group in world.groups for seq in group.sequences
        ]
        for name in range(4):
            world.add(prompt(5, name), max_tokens=5, n=1 + name % 2)
        world.finish()

    assert bool(swapped) == (mode == "swap")


def test_logprobs_go_to_the_sequence_that_asked_for_them():
    world = World()
    first = world.add(prompt(3), max_tokens=2)
    second = world.add(prompt(3, 1), max_tokens=2)

    for tokens, logprob in (([5, 6], -0.5), ([7, 8], -0.25)):
        batch = world.scheduler.schedule()
        reported = as_logprobs({tokens[1]: logprob, 9: -2.0})
        output = SamplerOutput(torch.tensor(tokens), {1: reported})
        world.scheduler.update(batch, output.read(), output.logprobs)

    assert only(first).logprobs == []
    given = [floats(logprobs) for logprobs in only(second).logprobs]
    assert given == [{6: -0.5, 9: -2.0}, {8: -0.25, 9: -2.0}]
    assert only(second).cumulative_logprob == -0.75


# --- everything at once ---


def draw_world(rng):
    block_size = rng.choice([1, 2, 4, 8])
    num_blocks = rng.randint(max(2, 8 // block_size), max(4, 48 // block_size))
    max_num_seqs = rng.randint(1, 8)
    return World(
        num_blocks,
        block_size,
        max_num_seqs,
        budget=max_num_seqs + rng.choice([0, 1, 5, 40]),
        caching=rng.random() < 0.7,
        max_model_len=rng.randint(
            num_blocks * block_size // 3, num_blocks * block_size - 1
        )
        + 1,
        num_swap_blocks=rng.choice([0, num_blocks // 3, num_blocks, 3 * num_blocks]),
        mode=rng.choice(["auto", "auto", "swap", "recompute"]),
    )


def draw_request(rng, world, number, most):
    """Prompts repeat and share prefixes; answers may be parts of other requests."""
    length = rng.randint(1, min(world.max_model_len - 1, 24))
    pattern = rng.choice([[1], [1, 2], [1, 1, 1, 1, 2]])
    tokens = (pattern * length)[:length]
    if rng.random() < 0.5:
        tokens[rng.randrange(length)] = rng.randrange(3)
    key = rng.choice([0, number])
    max_tokens = rng.randint(1, 30)
    stop = [2] if rng.random() < 0.2 else []
    max_len = min(length + max_tokens, world.max_model_len)
    n = rng.randint(1, most)
    while world.blocks.most_blocks(length, [max_len] * n) > world.blocks.num_blocks:
        n -= 1  # the engine would reject it

    salt = rng.choice([None, None, "a"])
    if n > 1 and rng.random() < 0.4:
        beams = BeamSearchParams(
            n, max_tokens, rng.choice([0.0, 1.0, 2.0]), rng.random() < 0.5
        )
        world.add(tokens, stop=stop, salt=salt, beams=beams)
    else:
        world.add(
            tokens,
            max_tokens,
            stop,
            salt=salt,
            n=n,
            emit=lambda position, index: (
                (position * 7 + (key + index) * position // 3) % 3
            ),
        )


def simulate(seed, num_requests):
    """Random requests, aborts and failures to the end; returns counts of events."""
    rng = random.Random(seed)
    world = draw_world(rng)
    fails = rng.choice([0, 0, 0.03])
    aborts = rng.choice([0, 0.05])

    most = min(world.max_num_seqs, rng.choice([1, 3, 5]))
    while len(world.groups) < num_requests or (
        world.scheduler.waiting or world.scheduler.running
    ):
        while len(world.groups) < num_requests and rng.random() < 0.4:
            draw_request(rng, world, len(world.groups), most)
        if not (world.scheduler.waiting or world.scheduler.running):
            continue

        if rng.random() < aborts:
            world.abort(rng.choice([group for group in world.groups if group.live]))
            continue
        batch = world.schedule()
        if rng.random() < fails:
            world.fail()
        else:
            world.update(batch)

        assert world.scheduler.stats.steps < 400 * num_requests, "no end in sight"

    world.finish()
    assert all(seq.finish_reason for group in world.groups for seq in group.sequences)

    hits = world.scheduler.stats.prefix_hit_tokens
    return world.counted() + world.events + Counter(hits=hits)


EVENTS = {
    "hits": 4000,
    "copied": 300,
    "swapped": 1000,
    "swaps": 100,
    "again": 300,
    "no room": 50,
    "waits": 30,
    "several again": 50,
    "swapped within its prompt": 5,
    "searches": 100,
}


def test_random_requests_on_tiny_pools_all_finish_with_their_tokens():
    counts = sum((simulate(seed, 25) for seed in range(150)), Counter())
    assert all(counts[event] > least for event, least in EVENTS.items()), counts


@pytest.mark.slow
def test_many_random_requests_on_tiny_pools_all_finish_with_their_tokens():
    for seed in range(1000, 1600):
        simulate(seed, 40)
