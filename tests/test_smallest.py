"""The engine in one file gives the model's tokens: `nanopaged/smallest.py`.

Transformers answers each prompt alone. The smallest engine answers all of them at once,
as they arrive, in pools that are hardly large enough for the longest. Only one test
needs the other engine, so students can begin with this one.
"""

import inspect
import json
import random
import re
import runpy
from collections import Counter

import pytest
import torch
from transformers import AutoTokenizer

from helpers import CPU, first_tokens_of
from nanopaged import LLM, SamplingParams, smallest

TEXT = ("First Citizen:\nBefore we proceed any further, hear me speak.\n\nROMEO:\nO, "
        "she doth teach the torches to burn bright! What is the matter with the king?")


def answers(reference, prompts, most):
    return [reference.generate(smallest.MODEL, prompt, count, {smallest.EOS})
            for prompt, count in zip(prompts, most, strict=True)]


class Watched(smallest.Scheduler):
    """Counts preemptions and hits, and checks the blocks after each plan and step."""

    def __init__(self, *args):
        super().__init__(*args)
        self.counts = Counter()

    def schedule(self):
        before = list(self.running)
        batch = super().schedule()
        assert 1 <= len(batch) <= self.budget
        self.counts["preemptions"] += sum(seq not in self.running for seq in before)
        new = [seq for seq in self.running if seq not in before]
        self.counts["hits"] += sum(seq.num_computed_tokens for seq in new)
        self.check()
        return batch

    def check(self):
        manager, running = self.block_manager, self.running
        assert running == self.unfinished[: len(running)], "the oldest run"
        held = Counter(block for seq in self.unfinished for block in seq.block_table)
        blocks = range(len(manager.ref_counts))
        assert [held[block] for block in blocks] == manager.ref_counts
        assert sorted([*held, *manager.free_blocks]) == [*blocks]
        assert len(set(manager.published.values())) == len(manager.published)
        for seq in self.unfinished:
            assert bool(seq.block_table) == (seq in running)
            num_full = seq.num_computed_tokens // manager.block_size
            assert all(held[block] == 1 for block in seq.block_table[num_full:])


def serve(requests, num_blocks, block_size, budget):
    scheduler = Watched(smallest.BlockManager(num_blocks, block_size), budget)
    runner = smallest.ModelRunner(num_blocks, block_size)
    waiting = list(requests)
    while waiting or scheduler.unfinished:
        if waiting:  # one arrives in each step
            scheduler.add(waiting.pop(0))
        batch = scheduler.schedule()
        scheduler.update(batch, runner.execute(batch))
        scheduler.check()
    return scheduler.counts


@pytest.mark.parametrize("block_size, spare, budget", [
    (1, 1, 7), (4, 0, 8), (4, 3, 1), (4, 9, 64), (16, 1, 5)])
def test_the_tokens_are_those_of_transformers(reference, block_size, spare, budget):
    """Some prompts begin alike, and two are equal."""
    rng = random.Random(f"{block_size} {budget}")
    ids = AutoTokenizer.from_pretrained(smallest.MODEL)(TEXT).input_ids
    starts = [0, 0, 0, 31, 31, rng.randrange(40)]
    prompts = [ids[start : start + rng.randrange(9, 40)] for start in starts]
    prompts.append(prompts[0])
    most = [rng.randrange(1, 24) for _ in prompts]
    requests = [*map(smallest.Sequence, prompts, most)]
    needed = max(-(-seq.max_len // block_size) for seq in requests)
    counts = serve(requests, needed + spare, block_size, budget)
    assert answers(reference, prompts, most) == [
        seq.token_ids[len(prompt) :]
        for seq, prompt in zip(requests, prompts, strict=True)]
    assert counts["hits"] and counts["preemptions"], counts


def test_llm_gives_the_same_tokens(reference):
    params = SamplingParams(temperature=0, max_tokens=24)
    with LLM(**CPU) as llm:
        ids = llm.tokenizer(TEXT).input_ids
        prompts = [ids[start : start + 20] for start in range(0, 30, 5)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert first_tokens_of(outputs) == answers(reference, prompts, [24] * len(prompts))


def test_a_request_larger_than_the_pool_is_refused():
    scheduler = smallest.Scheduler(smallest.BlockManager(3, 4), budget=8)
    scheduler.add(smallest.Sequence([5] * 8, max_tokens=4))
    with pytest.raises(ValueError, match=r"at least 4 .* got 3: .* lower max_tokens"):
        scheduler.add(smallest.Sequence([5] * 8, max_tokens=5))
    assert len(scheduler.unfinished) == 1 and not scheduler.running
    assert scheduler.block_manager.free_blocks == [0, 1, 2]
    assert len(scheduler.schedule()) == 8, "the other one runs"


def test_blocks_are_taken_when_they_are_needed_and_all_or_none():
    manager = smallest.BlockManager(3, 4)
    first, second = smallest.Sequence([5] * 5, 8), smallest.Sequence([6] * 5, 8)
    assert manager.grow(first) and manager.grow(first)
    assert first.block_table == [0, 1]
    assert not manager.grow(second)
    assert second.block_table == [] and manager.free_blocks == [2]
    assert manager.ref_counts == [1, 1, 0]


def test_a_step_computes_the_oldest_first_up_to_its_budget():
    scheduler = smallest.Scheduler(smallest.BlockManager(8, 4), budget=4)
    first, second = smallest.Sequence([5] * 3, 8), smallest.Sequence([6] * 6, 8)
    scheduler.add(first)
    scheduler.add(second)
    batch = scheduler.schedule()
    assert batch == [(first, 0), (first, 1), (first, 2), (second, 0)]
    scheduler.update(batch, [7] * 4)
    assert scheduler.schedule() == [(first, 3), (second, 1), (second, 2), (second, 3)]


def test_the_youngest_makes_room_for_the_oldest():
    scheduler = smallest.Scheduler(smallest.BlockManager(3, 4), budget=9)
    first, second = smallest.Sequence([5] * 4, 8), smallest.Sequence([6] * 5, 7)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.update(scheduler.schedule(), [7] * 9)
    assert scheduler.schedule() == [(first, 4)] and scheduler.running == [first]
    assert len(first.block_table) == 2 and second.block_table == []
    assert second.token_ids == [6] * 5 + [7] and second.num_computed_tokens == 0


def test_a_token_attends_to_its_sequence_up_to_itself():
    """What it must not read is NaN."""
    runner = smallest.ModelRunner(num_blocks=5, block_size=2)
    torch.manual_seed(0)
    query, (k, v) = torch.randn(4, 64), torch.randn(2, 3, 2, 64)
    runner.kv_cache.fill_(torch.nan)
    runner.kv_cache[5, [3, 3, 0], [0, 1, 0]] = torch.stack((k, v), 1)
    seq = smallest.Sequence([7] * 5, 1)
    seq.block_table = [3, 0, 2]
    expected = [(k[:, head // 2] @ query[head] / 8).softmax(0) @ v[:, head // 2]
                for head in range(4)]
    torch.testing.assert_close(runner.attend(5, query, seq, 2), torch.cat(expected))


def test_a_prefix_that_is_cached_is_not_computed_again():
    manager = smallest.BlockManager(8, 4)
    first = smallest.Sequence([*range(10)], 1)
    assert manager.grow(first) and first.block_table == [0, 1, 2]
    for end in range(1, 11):
        manager.mark_computed(first, end)
    for prompt, blocks in [([*range(9), 0], [0, 1]), ([*range(8)], [0]), ([1] * 9, [])]:
        other = smallest.Sequence(prompt, 1)
        manager.match(other)
        assert other.block_table == blocks
        assert other.num_computed_tokens == 4 * len(blocks)
        manager.free(other)
    manager.free(first)
    assert manager.free_blocks == [3, 4, 5, 6, 7, 2, 1, 0]  # the first block goes last
    long = smallest.Sequence([99] * 28, 1)
    assert manager.grow(long) and [*manager.published.values()] == [0]


def test_the_demonstration_prints_what_its_comment_says(capsys):
    runpy.run_path(smallest.__file__, run_name="__main__")
    printed = capsys.readouterr().out
    rows = ["", *printed.splitlines()]
    assert printed.isascii() and len(rows) < 40
    assert "[0, 1]" in rows[3] and "[0, 2]" in rows[3] and "done" in rows[17]
    assert [rows.index(row) for row in rows if "waits" in row] == [*range(11, 18)]
    assert [row.count("waits") for row in rows[11:18]] == [1, 1, 1, 1, 2, 2, 2]
    assert "[0, 2, 6, 5]" in rows[14] and "[0, 2, 6, 5, 4]" in rows[18]


def test_its_numbers_are_those_of_the_model():
    config = json.loads((smallest.MODEL / "config.json").read_text("utf-8"))
    names = "num_hidden_layers num_key_value_heads head_dim rms_norm_eps eos_token_id"
    ours = "NUM_LAYERS NUM_KV_HEADS HEAD_DIM EPS EOS"
    assert [config[name] for name in names.split()] == [
        getattr(smallest, name) for name in ours.split()]
    assert config["rope_parameters"]["rope_theta"] == 10000


def test_it_imports_nothing_from_the_package():
    imports = re.findall(r"^ *(?:from|import) (\w+)", inspect.getsource(smallest), re.M)
    assert {*imports} == {"json", "pathlib", "safetensors", "torch"}
