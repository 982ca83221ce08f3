"""Who runs, with how many tokens, in which blocks: the scheduler without a model.

`World` stands in for the runner. It mirrors the block tables from `table_updates`, writes into
every slot what its K and V would stand for, and after each `schedule` checks that every sequence
can read all of its past, that no slot is written twice, and that blocks, rows and order add up.
"""

import random
from collections import Counter

import pytest
import torch

from nanopaged import EngineConfig, SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.sampler import SamplerOutput
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import SequenceGroup


class World:
    def __init__(self, num_blocks=8, block_size=4, max_num_seqs=4, budget=64, caching=True,
                 max_model_len=None):  # fmt: skip
        config = EngineConfig(block_size=block_size, max_num_seqs=max_num_seqs,
                              max_num_batched_tokens=budget)  # fmt: skip
        self.blocks = BlockManager(num_blocks, block_size, caching)
        self.scheduler = Scheduler(config, self.blocks)
        self.budget, self.max_num_seqs, self.block_size = budget, max_num_seqs, block_size
        self.max_model_len = max_model_len or num_blocks * block_size
        self.groups = []  # in the order of their arrival
        self.says = {}  # group -> the token that it will sample at a position
        self.mirror = [[0] * num_blocks for _ in range(max_num_seqs)]
        self.slots = {}  # (block, offset) -> what its K and V stand for
        self.names = {}  # (what stands before, token) -> a name for the token in this place
        self.settled = {}  # published blocks whose step has run -> their identity

    def add(self, prompt, max_tokens=4, stop=(), says=lambda position: 1000 + position, salt=None):
        params = SamplingParams(max_tokens=max_tokens, cache_salt=salt)
        group = SequenceGroup(None, list(prompt), params, set(stop), self.max_model_len, None)
        self.groups.append(group)
        self.says[group] = says
        self.scheduler.waiting.append(group)
        return group

    def schedule(self):
        """One `schedule`, checked; returns its batch."""
        self.settled = {i: self.blocks.blocks[i].prefix_id for i in self.blocks.published.values()}
        busy = self.scheduler.has_unfinished
        batch = self.scheduler.schedule()
        assert bool(batch.sequences) == busy, "a step without work"
        for row, first, block_ids in batch.table_updates:
            self.mirror[row][first : first + len(block_ids)] = block_ids
        self.check_work(batch)
        self.check_slots(batch)
        self.check_residents()
        return batch

    def check_work(self, batch):
        scheduler = self.scheduler
        assert sum(batch.counts) <= self.budget
        assert all(count > 0 for count in batch.counts)
        # Whoever runs is in the batch: decodes never wait for a long prompt.
        assert batch.sequences == [seq for group in scheduler.running for seq in group.live]
        for seq, samples in zip(batch.sequences, batch.samples, strict=True):
            assert samples == (seq.num_computed_tokens == len(seq.token_ids))
        order = [group for group in self.groups if group.live]
        assert [*scheduler.running, *scheduler.waiting] == order, "not first come, first served"
        for group in scheduler.waiting:
            assert all((s.row, s.num_computed_tokens, s.block_table) == (-1, 0, [])
                       for s in group.live)  # fmt: skip

    def check_slots(self, batch):
        blocks, written = self.blocks.blocks, set()
        for seq, count in zip(batch.sequences, batch.counts, strict=True):
            names = self.name(seq)
            for position in range(seq.num_computed_tokens - count, seq.num_computed_tokens):
                slot = block, _ = self.slot(seq, position)
                assert slot not in written, "two sequences write one slot"
                written.add(slot)
                settled = self.settled.get(block) == blocks[block].prefix_id
                assert blocks[block].hash is None or not settled, "a published block is written"
                self.slots[slot] = names[position]
        for seq in batch.sequences:  # after all writes, as in each layer of the model
            read = [self.slots.get(self.slot(seq, i)) for i in range(seq.num_computed_tokens)]
            assert read == self.name(seq)[: seq.num_computed_tokens], "it reads another's K and V"

    def check_residents(self):
        manager, live = self.blocks, [s for g in self.scheduler.running for s in g.live]
        assert len(live) <= self.max_num_seqs
        rows = [seq.row for seq in live]
        assert sorted(rows + self.scheduler.free_rows) == list(range(self.max_num_seqs))
        for seq in live:
            assert self.mirror[seq.row][: len(seq.block_table)] == seq.block_table
            assert len(seq.block_table) == -(-len(seq.token_ids) // self.block_size)
        references = Counter(block for seq in live for block in seq.block_table)
        assert [block.ref_count for block in manager.blocks] == [
            references[i] for i in range(len(manager.blocks))
        ]
        assert set(manager.free_blocks) == set(range(len(manager.blocks))) - references.keys()

    def name(self, seq):
        """A name for each token that says the salt and all tokens before it, too."""
        names, name = [], seq.group.params.cache_salt
        for token in seq.token_ids:
            name = self.names.setdefault((name, token), len(self.names))
            names.append(name)
        return names

    def slot(self, seq, position):
        block, offset = divmod(position, self.block_size)
        return self.mirror[seq.row][block], offset

    def update(self, batch):
        sampling = [s for s, yes in zip(batch.sequences, batch.samples, strict=True) if yes]
        tokens = [self.says[seq.group](len(seq.token_ids)) for seq in sampling]
        got = self.scheduler.update(batch, SamplerOutput(torch.tensor(tokens, dtype=torch.int64)))
        assert got == [seq.group for seq in sampling]

    def step(self):
        """One whole step; returns {group: number of tokens that it computed}."""
        batch = self.schedule()
        self.update(batch)
        groups = [seq.group for seq in batch.sequences]
        return dict(zip(groups, batch.counts, strict=True))

    def finish(self, limit=1000):
        """Step until nothing is left, then check that everything has come back."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert not self.scheduler.has_unfinished, "no end in sight"
        self.scheduler.schedule()  # forgets who has finished
        assert not self.scheduler.running and not self.scheduler.waiting
        self.check_residents()
        for group in self.groups:
            (seq,) = group.sequences
            assert (seq.row, seq.block_table) == (-1, [])
            if seq.finish_reason != "abort":
                assert seq.token_ids == self.answer(group)

    def answer(self, group):
        """What the tokens of a group must be in the end, whatever happened to it on the way."""
        tokens = list(group.prompt_token_ids)
        longest = len(tokens) + group.params.max_tokens
        while len(tokens) < min(longest, self.max_model_len):
            tokens.append(self.says[group](len(tokens)))
            if tokens[-1] in group.stop_token_ids:
                break
        return tokens


def prompt(length, name=0):
    return [100 * name + i for i in range(length)]


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


def test_a_small_request_does_not_overtake_a_big_one():
    world = World(num_blocks=8)
    first = world.add(prompt(12), max_tokens=4)
    big, small = world.add(prompt(24, 1)), world.add(prompt(2, 2))
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
    told = []
    while world.scheduler.has_unfinished:
        batch = world.schedule()
        told.append((batch.counts, batch.samples, len(only(group).token_ids)))
        world.update(batch)
    assert told == [([4], [False], 10), ([4], [False], 10), ([2], [True], 10),
                    ([1], [True], 11), ([1], [True], 12)]  # fmt: skip
    assert only(group).token_ids == prompt(10) + [1010, 1011, 1012]


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 8, 64])
def test_any_budget_gives_the_same_tokens(budget):
    world = World(num_blocks=30, max_num_seqs=1, budget=budget)
    for length in (1, 3, 4, 5, 8, 17):
        world.add(prompt(length), max_tokens=5)
    world.finish()


# --- who may be resident ---


def test_no_more_than_max_num_seqs_hold_a_row_and_blocks():
    world = World(num_blocks=20, max_num_seqs=2, budget=2)
    groups = [world.add(prompt(5, name), max_tokens=name + 1) for name in range(5)]
    seen = Counter()
    while world.scheduler.has_unfinished:
        seen[len(world.step())] += 1
        holders = [group for group in groups if only(group).block_table]
        assert len(holders) <= 2
    assert seen[2] > 0
    assert sorted(world.scheduler.free_rows) == [0, 1]
    world.finish()


def test_admission_leaves_a_few_blocks_to_those_who_run():
    for length, admitted in ((196, True), (197, False)):
        world = World(num_blocks=300, block_size=1, budget=1000)
        first = world.add(prompt(100), max_tokens=2)
        world.step()
        second = world.add(range(1000, 1000 + length), max_tokens=1)
        # Of 300 blocks the first needs 101 now; 3 (one in a hundred) must stay free.
        assert (second in world.step()) == admitted
        world.finish()
        assert only(first).finish_reason == "length"


def test_who_is_alone_may_fill_the_whole_pool():
    world = World(num_blocks=300, block_size=1, budget=1000)
    group = world.add(range(299), max_tokens=50)
    assert world.step() == {group: 299}
    world.finish()
    assert only(group).finish_reason == "length"


# --- prefix hits ---


def test_prompts_that_arrive_together_share_in_their_first_step():
    world = World(num_blocks=20)
    groups = [world.add(prompt(9)) for _ in range(3)]
    assert world.step() == {groups[0]: 9, groups[1]: 1, groups[2]: 1}
    assert [only(group).block_table for group in groups] == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert [group.num_cached_tokens for group in groups] == [0, 8, 8]
    world.finish()


def test_a_prompt_shares_what_another_fills_in_chunks():
    world = World(num_blocks=20, budget=6)
    groups = [world.add(prompt(9)) for _ in range(2)]
    assert world.step() == {groups[0]: 6}
    assert world.step() == {groups[0]: 3, groups[1]: 1}
    world.finish()


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_prompt_that_is_cached_to_its_last_token_computes_its_last_block(num_blocks):
    world = World(num_blocks=20)
    world.add(prompt(4 * num_blocks))
    world.finish()
    again = world.add(prompt(4 * num_blocks))
    assert world.step() == {again: 4}
    world.finish()


def test_salts_do_not_share():
    world = World(num_blocks=20)
    groups = [world.add(prompt(9), salt=salt) for salt in (None, "a", "b", "a")]
    assert list(world.step().values()) == [9, 9, 9, 1]
    assert [group.num_cached_tokens for group in groups] == [0, 0, 0, 8]
    world.finish()


# --- preemption ---


def test_preemption_takes_the_youngest_and_puts_it_first_in_the_queue():
    world = World(num_blocks=6)
    first, second, third = (world.add(prompt(7, name), max_tokens=4) for name in range(3))
    fourth = world.add(prompt(2, 3))
    world.step()
    world.step()  # all have 9 tokens now, and need a third block each
    assert list(world.step()) == [first, second]
    assert list(world.scheduler.waiting) == [third, fourth]
    assert only(third).token_ids == prompt(7, 2) + [1007, 1008]
    assert world.scheduler.stats.preemptions_recompute == 1
    world.finish()


def test_preemption_goes_on_until_the_oldest_has_room():
    world = World(num_blocks=4, block_size=2, max_num_seqs=4)
    first = world.add(prompt(1), max_tokens=7)
    others = [world.add(prompt(1, name), max_tokens=3) for name in (1, 2, 3)]
    world.step()
    assert list(world.step()) == [first, *others]
    assert list(world.step()) == [first, others[0]]  # both need a second block
    assert list(world.scheduler.waiting) == others[1:]
    world.finish()


def test_who_preempts_itself_is_not_in_that_step():
    world = World(num_blocks=4)
    first, second = world.add(prompt(6), max_tokens=2), world.add(prompt(8, 1), max_tokens=3)
    world.step()
    batch = world.schedule()  # the second needs a third block; nobody is younger
    assert batch.sequences == [only(first)]
    assert list(world.scheduler.waiting) == [second]
    world.update(batch)
    assert only(second).token_ids == prompt(8, 1) + [1008]
    world.finish()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [7, 8, 9])
def test_a_preempted_sequence_keeps_its_tokens_and_resumes_from_what_is_cached(length, caching):
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
    assert batch.sequences == [only(second)]
    # Its second block was taken before its first: tail first.
    assert batch.counts == [length - 4 if caching else length]
    assert batch.samples == [True]
    assert second.num_cached_tokens == 0  # at its first admission
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
    assert (only(second).num_computed_tokens, only(second).token_ids) == (0, prompt(12, 1))
    world.finish()
    assert only(first).finish_reason == only(second).finish_reason == "length"


# --- the end ---


def test_a_stop_token_ends_a_sequence_and_stays_in():
    world = World()
    group = world.add(prompt(5), max_tokens=9, stop=[1007, 5])
    world.finish()
    assert only(group).finish_reason == "stop"
    assert only(group).token_ids[5:] == [1005, 1006, 1007]


def test_a_stop_token_in_the_prompt_ends_nothing():
    world = World()
    group = world.add(prompt(5), max_tokens=2, stop=[3])
    world.finish()
    assert only(group).finish_reason == "length"


def test_a_stop_token_as_the_last_possible_one_is_a_stop():
    world = World()
    group = world.add(prompt(5), max_tokens=2, stop=[1006])
    world.finish()
    assert only(group).finish_reason == "stop"


@pytest.mark.parametrize("length", [1, 30, 31])
def test_a_sequence_ends_at_max_model_len(length):
    world = World(num_blocks=8)
    group = world.add(prompt(length), max_tokens=100)
    world.finish()
    assert only(group).finish_reason == "length"
    assert len(only(group).token_ids) == 32


def test_what_ends_in_a_step_makes_room_in_the_next():
    world = World(num_blocks=4, max_num_seqs=1)
    first, second = world.add(prompt(3), max_tokens=1), world.add(prompt(3, 1), max_tokens=1)
    assert list(world.step()) == [first]
    assert len(world.blocks.free_blocks) == 4
    assert list(world.step()) == [second]
    world.finish()


def test_a_later_reason_replaces_the_first_and_frees_nothing_twice():
    world = World()
    first, second = world.add(prompt(5), max_tokens=1), world.add(prompt(5), max_tokens=5)
    world.step()
    assert only(first).finish_reason == "length"
    world.scheduler.finish(only(first), "stop")  # its last token completed a stop string
    assert only(first).finish_reason == "stop"
    world.scheduler.abort(first)  # comes too late
    assert only(first).finish_reason == "stop"
    world.finish()
    assert only(second).finish_reason == "length"


STAGES = ["waiting", "within its prompt", "decoding", "preempted", "finished"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("caching", [True, False])
def test_abort_gives_back_blocks_and_row_at_every_stage(stage, caching):
    world = World(num_blocks=4, budget=4, caching=caching)
    first = world.add(prompt(2), max_tokens=9)
    group = world.add(prompt(6, 1), max_tokens=4)
    third = world.add(prompt(6, 2), max_tokens=4)
    seq = only(group)
    stages = {
        "waiting": lambda: seq.row < 0 and len(seq.token_ids) == 6,
        "within its prompt": lambda: 0 < seq.num_computed_tokens < 6,
        "decoding": lambda: seq.row >= 0 and len(seq.token_ids) > 6,
        "preempted": lambda: seq.row < 0 and len(seq.token_ids) > 6,
        "finished": lambda: seq.finish_reason is not None,
    }
    while not stages[stage]():
        assert world.scheduler.has_unfinished, "the stage was never reached"
        world.step()
    world.scheduler.abort(group)
    assert not group.live
    assert group not in world.scheduler.waiting
    assert seq.finish_reason == ("length" if stage == "finished" else "abort")
    assert (seq.row, seq.block_table) == (-1, [])
    assert group not in world.step()
    world.finish()
    assert only(first).finish_reason == only(third).finish_reason == "length"


def test_aborting_all_leaves_nothing_to_do():
    world = World(num_blocks=4)
    groups = [world.add(prompt(6, name)) for name in range(4)]
    world.step()
    for group in groups:
        world.scheduler.abort(group)
    assert not world.scheduler.has_unfinished
    assert len(world.blocks.free_blocks) == 4
    world.finish()


# --- a step that failed ---


@pytest.mark.parametrize("steps", range(6))
def test_after_a_failed_step_all_is_computed_again_in_the_old_order(steps):
    world = World(num_blocks=12, budget=8)
    for name in range(4):
        world.add(prompt(9, name), max_tokens=4)
    for _ in range(steps):
        world.step()
    tokens = [only(group).token_ids[:] for group in world.groups]
    world.schedule()
    world.scheduler.rollback()
    world.slots.clear()  # what the blocks hold is not known
    assert [only(group).token_ids for group in world.groups] == tokens
    assert list(world.scheduler.waiting) == [group for group in world.groups if group.live]
    assert world.blocks.published == {}
    assert len(world.blocks.free_blocks) == 12
    assert sorted(world.scheduler.free_rows) == [0, 1, 2, 3]
    world.finish()


def test_logprobs_go_to_the_sequence_that_asked():
    world = World()
    first, second = world.add(prompt(3), max_tokens=2), world.add(prompt(3, 1), max_tokens=2)
    for tokens, logprob in (([5, 6], -0.5), ([7, 8], -0.25)):
        batch = world.scheduler.schedule()
        output = SamplerOutput(torch.tensor(tokens), {1: {tokens[1]: logprob, 9: -2.0}})
        world.scheduler.update(batch, output)
    assert only(first).logprobs == []
    assert only(second).logprobs == [{6: -0.5, 9: -2.0}, {8: -0.25, 9: -2.0}]
    assert only(second).cumulative_logprob == -0.75


# --- everything at once ---


def draw_world(rng):
    block_size = rng.choice([1, 2, 4, 8])
    num_blocks = rng.randint(max(2, 8 // block_size), max(4, 48 // block_size))
    max_num_seqs = rng.randint(1, 8)
    return World(
        num_blocks, block_size, max_num_seqs, budget=max_num_seqs + rng.choice([0, 1, 5, 40]),
        caching=rng.random() < 0.7,
        max_model_len=rng.randint(num_blocks * block_size // 3, num_blocks * block_size - 1) + 1,
    )  # fmt: skip


def draw_request(rng, world, number):
    """Prompts repeat and share prefixes, and answers may run into another one's continuation."""
    length = rng.randint(1, min(world.max_model_len - 1, 24))
    pattern = rng.choice([[1], [1, 2], [1, 1, 1, 1, 2]])
    tokens = (pattern * length)[:length]
    if rng.random() < 0.5:
        tokens[rng.randrange(length)] = rng.randrange(3)
    key = rng.choice([0, number])
    stop = [2] if rng.random() < 0.2 else []
    world.add(tokens, rng.randint(1, 30), stop, salt=rng.choice([None, None, "a"]),
              says=lambda position: (position * 7 + key * position // 3) % 3)  # fmt: skip


def simulate(seed, num_requests):
    """Random requests, aborts and failures until all is done; returns the scheduler's counters."""
    rng = random.Random(seed)
    world = draw_world(rng)
    fails = rng.choice([0, 0, 0.03])
    aborts = rng.choice([0, 0.05])
    while len(world.groups) < num_requests or world.scheduler.has_unfinished:
        while len(world.groups) < num_requests and rng.random() < 0.4:
            draw_request(rng, world, len(world.groups))
        if not world.scheduler.has_unfinished:
            continue
        if rng.random() < aborts:
            world.scheduler.abort(rng.choice([group for group in world.groups if group.live]))
            continue
        batch = world.schedule()
        if rng.random() < fails:
            world.scheduler.rollback()
            world.slots.clear()
        else:
            world.update(batch)
        assert world.scheduler.stats.steps < 200 * num_requests, "no end in sight"
    world.finish()
    assert all(only(group).finish_reason for group in world.groups)
    return world.scheduler.stats, fails


def test_random_requests_on_tiny_pools_all_finish_with_their_tokens():
    preempted = hits = 0
    for seed in range(150):
        stats, fails = simulate(seed, 25)
        hits += stats.prefix_hit_tokens
        preempted += 0 if fails else stats.preemptions_recompute
    assert preempted > 300
    assert hits > 4000


@pytest.mark.slow
def test_many_random_requests_on_tiny_pools_all_finish_with_their_tokens():
    for seed in range(1000, 1600):
        simulate(seed, 40)
