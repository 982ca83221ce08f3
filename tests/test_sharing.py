"""Everything at once: groups, beams, aborts and abandoned streams on tiny pools.

Plain requests, several continuations, beam searches, shared prefixes, stop strings,
chunks, scored prompts and processors: after every step every block must be held by
exactly the tables that name it. In the end every request must have produced what it
produces alone, and what was aborted a part of that. This finds leaks, deadlocks and
mixed-up K and V that only show up after much else has happened.
"""

import random
from collections import Counter

import pytest
import torch

from helpers import (
    CPU,
    check_invariants,
    draw_requests,
    floats,
    is_swapped,
    same_bits,
    swap_space,
    waiting,
    watch,
)
from nanopaged import LLM, BeamSearchParams

LONGEST = 40  # tokens of prompt and answer


# -- Everything at once ----------------------------------------------------------------


def forbid_a_third(token_ids, logits):
    """A logits processor that depends on all tokens so far."""
    at = int(token_ids.sum()) % 3
    return logits.index_fill(1, torch.arange(at, logits.shape[1], 3), -torch.inf)


def draw_mixed(seed, count):
    """Random requests. Two in three prompts share a prefix with others."""
    rng = random.Random(seed)
    stems = [[rng.randrange(300) for _ in range(20)] for _ in range(6)]
    for body, params in draw_requests(
            seed, count, vocab_size=300, lengths=range(1, 24), max_tokens=16,
            more=lambda rng: {
                "top_p": rng.choice([1.0, 0.9]), "ignore_eos": rng.random() < 0.6,
                "cache_salt": rng.choice([None, None, None, "a"]),
                "prompt_logprobs": rng.choice([None, None, None, 0]),
                "frequency_penalty": rng.choice([0, 0, 0.5]),
                "logits_processors": rng.choice([None, None, [forbid_a_third]])}):
        stem = rng.choice([*stems, *stems, *[[]] * 6])[: rng.choice([4, 7, 20])]
        yield (stem + body)[:24], params


class Stress:
    """Adds requests to a small engine, takes steps, and gives up some requests."""

    def __init__(self, path, options, runs_ahead, requests, rng):
        self.llm, self.requests, self.rng = LLM(path, **options), requests, rng
        self.llm.engine.steps_ahead = runs_ahead
        watch(self.llm, self.check)
        # The streams, and the numbers of requests by their id or that of their stream.
        self.streams, self.under_way = [], {}
        self.last, self.given_up, self.seen = {}, set(), Counter()

    def check(self, phase, batch):
        if phase in ("scheduled", "updated"):
            check_invariants(self.llm)
        if phase == "scheduled":
            device = self.llm.engine.block_manager.num_blocks
            self.seen["copied"] += sum(max(move) < device for move in batch.moves)
            kinds = {"beams" if group.beam_params else len(group.live) > 1
                     for group in self.llm.engine.scheduler.running.values()}
            self.seen["all kinds in one step"] += len(kinds) == 3

    def run(self):
        for number, (prompt, params) in enumerate(self.requests):
            while len(self.under_way) > 14 or self.rng.random() < 0.5:
                self.go_on()
            if self.rng.random() < 0.2:
                self.under_way[len(self.streams)] = number
                self.streams.append(self.llm.stream([prompt], params))
            else:
                self.under_way[self.llm.add_request(prompt, params)] = number
        while self.under_way:
            self.go_on()
        while self.llm.has_unfinished_requests():
            self.llm.step()

    def go_on(self):
        streams = [key for key in self.under_way if isinstance(key, int)]
        swapped = [key for key, group in waiting(self.llm.engine.scheduler).items()
                   if is_swapped(group) and key in self.under_way]
        if self.under_way and self.rng.random() < (0.2 if swapped else 0.05):
            self.give_up(self.rng.choice(swapped or list(self.under_way)))
        elif streams and self.rng.random() < 0.4:
            index = self.rng.choice(streams)
            self.note(index, next(self.streams[index]))
        else:
            for output in self.llm.step():
                self.note(output.request_id, output)

    def note(self, key, output):
        self.last[self.under_way[key]] = output
        if output.finished:
            del self.under_way[key]

    def give_up(self, key):
        number = self.under_way[key]
        self.given_up.add(number)
        if isinstance(key, str):  # its last output comes with the next step
            self.llm.abort_request(key)
            group = waiting(self.llm.engine.scheduler).get(key)
            place = "running" if key in self.llm.engine.scheduler.running else "waiting"
            place = "swapped" if group and is_swapped(group) else place
            self.seen[f"aborted while {place}"] += 1
        else:
            self.streams[key] = None
            self.seen["abandoned"] += 1
            del self.under_way[key]

    def check_answers(self, expected):
        for number, ((_, params), whole) in enumerate(
                zip(self.requests, expected, strict=True)):
            output = self.last.get(number)
            is_whole = number not in self.given_up
            assert (output and output.finished) or not is_whole, f"request {number}"
            if not output or isinstance(params, BeamSearchParams) and not is_whole:
                continue
            for one, other in zip(output.outputs, whole.outputs, strict=True):
                count = None if is_whole else len(one.token_ids)
                tokens = other.token_ids[:count]
                assert one.token_ids == tokens, f"request {number}: {params}"
                reason = other.finish_reason if tokens == other.token_ids else "abort"
                assert one.finish_reason in (None, reason), f"request {number}"
                if is_whole:
                    assert outcome(one) == outcome(other), f"request {number}"
                    check_logprobs(one.logprobs, other.logprobs)
            if is_whole:
                check_logprobs(output.prompt_logprobs, whole.prompt_logprobs)


def check_logprobs(found, expected):
    for given, at in zip(found or [], expected or [], strict=True):
        assert floats(given or {}) == pytest.approx(floats(at or {}), abs=1e-4)


def outcome(completion):
    return completion.text, completion.finish_reason, completion.stop_reason


# name: engine options, swap blocks, whether it runs one step ahead as on a GPU
SETTINGS = {
    "recompute": ({}, 0, False),
    "recompute-ahead-uncached": ({"enable_prefix_caching": False}, 0, True),
    "swap": ({"preemption_mode": "swap"}, 40, False),
    "swap-ahead": ({"preemption_mode": "swap"}, 40, True),
    "swap-and-recompute": (
        {"preemption_mode": "swap", "max_num_batched_tokens": 40}, 8, False),
}


@pytest.fixture(scope="module")
def work(text_model):
    """`work(seed, count)`: random requests, and what each gets by itself, with room for
    everything and no cache. Blocks are as large as there, because each size has bits of
    its own.
    """
    known = {}
    with LLM(text_model, **CPU | same_bits(), enable_prefix_caching=False,
             block_size=4, num_blocks=240) as llm:
        def make(seed, count):
            if (seed, count) not in known:
                requests = list(draw_mixed(seed, count))
                known[seed, count] = requests, [
                    llm.generate([prompt], params, use_tqdm=False)[0]
                    for prompt, params in requests]
            return known[seed, count]

        yield make


@pytest.mark.parametrize(("name", "seed", "count"), [
    ("recompute-ahead-uncached", 5, 80), ("swap-and-recompute", 5, 80), *(
        pytest.param(name, 8, 250, marks=pytest.mark.slow) for name in SETTINGS)])
def test_mixed_requests_on_a_small_pool_get_what_they_get_alone(
    name, seed, count, text_model, work
):
    options, num_swap_blocks, runs_ahead = SETTINGS[name]
    options = {
        **CPU, **same_bits(), "block_size": 4, "num_blocks": 36,
        "max_model_len": LONGEST, "max_num_seqs": 48, "max_num_batched_tokens": 56,
        "swap_space": swap_space(text_model, num_swap_blocks, 4)} | options
    requests, expected = work(seed, count)
    stress = Stress(text_model, options, runs_ahead, requests, random.Random(seed + 3))
    stress.run()
    stress.check_answers(expected)

    # The pool must really be tight, and the requests must really mix.
    stats, seen = stress.llm.stats(), stress.seen
    assert stats.blocks_used == 0, f"{stats.blocks_used} blocks leaked"
    assert min(seen["copied"], seen["all kinds in one step"]) > count / 20, seen
    assert (stats.prefix_hit_tokens > 0) == ("uncached" not in name)
    assert (stats.preemptions_swap > count / 40) == bool(num_swap_blocks), stats
    assert (stats.preemptions_recompute > count / 40) == ("recompute" in name), stats
    assert len(stress.given_up) > count / 40 and seen["abandoned"], seen
    assert (seen["aborted while swapped"] > 0) == bool(num_swap_blocks), seen
    stress.llm.shutdown()
