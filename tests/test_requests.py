"""The life of a request from add_request to its last output.

Aborts at every stage give all blocks back and change no other request's tokens;
requests are served first come, first served; decodes continue during long prompts;
prompts share what they have in common.
"""

import itertools
import random
import sys
from functools import partial

import pytest
import torch

import helpers
from helpers import add_all, constant_hash, tokens_of
from nanopaged import LLM, BeamSearchParams, SamplingParams

MAX_TOKENS = 24
greedy = partial(helpers.greedy, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="session")
def work(llama, reference, draw_prompts):
    """Six prompts and the tokens they must produce."""
    prompts = draw_prompts(llama, [5, 12, 7, 16, 9, 20], MAX_TOKENS, seed=31)
    return prompts, [
        reference.generate(llama, prompt, MAX_TOKENS) for prompt in prompts
    ]


class Watch:
    """Steps an engine and keeps all outputs of each request."""

    def __init__(self, llm):
        self.llm = llm
        self.outputs = {}

    def step(self):
        outputs = self.llm.step()
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        return outputs

    def tokens(self, request):
        return tokens_of(self.outputs[request][-1]) if request in self.outputs else []

    def finished(self, request):
        return request in self.outputs and self.outputs[request][-1].finished

    def drain(self):
        for _ in range(5000):
            more = self.llm.has_unfinished_requests()
            self.step()
            if not more:
                return self
        raise AssertionError("the engine never finishes")


# --- the loop ---


def test_requests_stepped_by_hand_give_the_tokens_of_generate(llama, work, engine):
    prompts, expected = work
    llm = engine(llama)
    assert not llm.has_unfinished_requests()

    requests = add_all(llm, prompts, greedy())
    assert len(set(requests)) == len(requests)
    assert llm.has_unfinished_requests()

    watch = Watch(llm).drain()
    assert [watch.tokens(request) for request in requests] == expected

    for request in requests:
        outputs = watch.outputs[request]
        finished = [output.finished for output in outputs]
        assert finished == [False] * (MAX_TOKENS - 1) + [True]
        lengths = [len(tokens_of(output)) for output in outputs]
        assert lengths == list(range(1, MAX_TOKENS + 1))

    assert not llm.has_unfinished_requests()


def test_requests_of_generate_count_as_unfinished(llama, work, engine):
    prompts, _ = work
    llm = engine(llama)
    seen = []
    llm.observers.append(
        lambda phase, batch: seen.append((phase, llm.has_unfinished_requests()))
    )
    llm.generate(prompts, greedy(), use_tqdm=False)
    assert ("begin", True) in seen and ("begin", False) not in seen
    assert ("scheduled", False) not in seen


def test_a_step_with_nothing_to_do_returns_nothing(llama, engine):
    llm = engine(llama)
    assert llm.step() == []
    assert llm.step() == []


def test_requests_may_join_at_any_step(llama, work, engine):
    prompts, expected = work
    watch = Watch(engine(llama, max_num_seqs=4, max_num_batched_tokens=9))

    requests = []
    for prompt in prompts:
        requests += add_all(watch.llm, [prompt], greedy())
        watch.step()
        watch.step()

    watch.drain()
    assert [watch.tokens(request) for request in requests] == expected


def test_stats_count_what_happened(llama, work, engine):
    prompts, _ = work
    llm = engine(llama)
    start = llm.stats()
    assert (start.blocks_total, start.blocks_used, start.tokens_held) == (64, 0, 0)
    assert (start.steps, start.prompt_tokens, start.output_tokens) == (0, 0, 0)

    watch = Watch(llm)
    add_all(llm, prompts[:3], greedy())
    watch.step()
    held = llm.stats()
    lengths = [len(prompt) for prompt in prompts[:3]]

    assert held.blocks_used == sum(-(-length // 4) for length in lengths)
    assert held.tokens_held == sum(lengths)
    assert held.kv_utilisation == pytest.approx(sum(lengths) / (4 * held.blocks_used))

    watch.drain()
    end = llm.stats()
    assert end.prompt_tokens == sum(lengths)
    assert end.output_tokens == 3 * MAX_TOKENS
    assert end.steps >= MAX_TOKENS
    assert end.preemptions_recompute == 0


# --- aborts ---


def check_abort(watch, requests, expected, victim):
    """Abort one request now: it is reported once, and no other tokens change."""
    watch.llm.abort_request(requests[victim])
    before = len(watch.outputs.get(requests[victim], []))
    watch.drain()
    last = watch.outputs[requests[victim]][before:]

    assert len(last) == 1, "an aborted request is reported once"
    assert last[0].finished
    assert last[0].outputs[0].finish_reason == "abort"

    tokens = tokens_of(last[0])
    assert tokens == expected[victim][: len(tokens)]
    assert len(tokens) < MAX_TOKENS
    for i, request in enumerate(requests):
        if i != victim:
            assert watch.tokens(request) == expected[i]
            assert watch.outputs[request][-1].outputs[0].finish_reason == "length"
    assert watch.llm.stats().blocks_used == 0


def test_aborting_before_the_first_step(llama, work, engine):
    prompts, expected = work
    watch = Watch(engine(llama))
    requests = add_all(watch.llm, prompts, greedy())
    check_abort(watch, requests, expected, 2)


def test_aborting_the_only_request(llama, work, engine):
    prompts, expected = work
    for steps in (0, 1, 5):
        watch = Watch(engine(llama))
        requests = add_all(watch.llm, prompts[:1], greedy())
        for _ in range(steps):
            watch.step()
        check_abort(watch, requests, expected, 0)


def test_aborting_while_waiting_for_a_place(llama, work, engine):
    prompts, expected = work
    watch = Watch(engine(llama, max_num_seqs=2))
    requests = add_all(watch.llm, prompts, greedy())
    for _ in range(4):
        watch.step()
    assert requests[4] not in watch.outputs
    check_abort(watch, requests, expected, 4)


def test_aborting_in_the_middle_of_a_prompt(llama, work, engine):
    prompts, expected = work
    watch = Watch(engine(llama, max_num_seqs=4, max_num_batched_tokens=4))
    requests = add_all(watch.llm, prompts, greedy())

    steps_in_prompt = 0
    while not watch.outputs.get(requests[1]):  # 12 tokens in chunks of at most 4
        watch.step()
        first, second = (watch.outputs.get(request) for request in requests[:2])
        steps_in_prompt += bool(first) and not second
        if steps_in_prompt == 2:
            break

    assert steps_in_prompt == 2
    check_abort(watch, requests, expected, 1)


@pytest.mark.parametrize("steps", [1, 2, 5, 9, MAX_TOKENS - 1])
def test_aborting_while_decoding(llama, work, steps, engine):
    prompts, expected = work
    watch = Watch(engine(llama))
    requests = add_all(watch.llm, prompts, greedy())
    for _ in range(steps):
        watch.step()
    assert len(watch.tokens(requests[3])) == steps
    check_abort(watch, requests, expected, 3)


def step_until_preempted(watch, requests):
    """Step until a request is preempted after its first tokens; returns its index."""
    preemptions = watch.llm.stats().preemptions_recompute
    for _ in range(500):
        outputs = {output.request_id for output in watch.step()}
        now = watch.llm.stats().preemptions_recompute
        if now > preemptions:
            out = [
                i
                for i, request in enumerate(requests)
                if watch.tokens(request)
                and not watch.finished(request)
                and request not in outputs
            ]
            if out:
                return out[-1]

        preemptions = now

    raise AssertionError("nothing was preempted")


@pytest.mark.parametrize("caching", [True, False])
def test_aborting_a_preempted_request(llama, work, caching, engine):
    prompts, expected = work
    llm = engine(llama, num_blocks=16, max_model_len=48, enable_prefix_caching=caching)
    watch = Watch(llm)
    requests = add_all(llm, prompts, greedy())
    check_abort(watch, requests, expected, step_until_preempted(watch, requests))


def test_aborting_the_others_lets_a_preempted_request_continue(llama, work, engine):
    prompts, expected = work
    watch = Watch(engine(llama, num_blocks=16, max_model_len=48))
    requests = add_all(watch.llm, prompts, greedy())

    preempted = step_until_preempted(watch, requests)
    for i, request in enumerate(requests):
        if i != preempted and not watch.finished(request):
            watch.llm.abort_request(request)
    watch.drain()

    assert watch.tokens(requests[preempted]) == expected[preempted]


def test_aborting_one_of_two_that_share_a_prefix(
    llama, reference, draw_prompts, engine
):
    prompt = draw_prompts(llama, [21], MAX_TOKENS, seed=4)[0]
    for victim, steps in itertools.product((0, 1), (0, 1, 2, 7)):
        watch = Watch(engine(llama))
        requests = add_all(watch.llm, [prompt, prompt], greedy())
        for _ in range(steps):
            watch.step()
        check_abort(
            watch, requests, [reference.generate(llama, prompt, MAX_TOKENS)] * 2, victim
        )


def test_aborting_the_one_that_fills_a_shared_block_in_chunks(
    llama, reference, draw_prompts, engine
):
    """The second request shares blocks that the first is still computing."""
    prompt = draw_prompts(llama, [40], MAX_TOKENS, seed=6)[0]
    expected = [reference.generate(llama, prompt, MAX_TOKENS)] * 2
    for victim, steps in itertools.product((0, 1), range(8)):
        watch = Watch(engine(llama, max_num_seqs=8, max_num_batched_tokens=8))
        requests = add_all(watch.llm, [prompt, prompt], greedy())
        for _ in range(steps):
            watch.step()
        check_abort(watch, requests, expected, victim)


def test_aborting_twice_reports_once(llama, work, engine):
    prompts, _ = work
    watch = Watch(engine(llama))
    requests = add_all(watch.llm, prompts[:2], greedy())
    watch.step()
    watch.llm.abort_request(requests[0])

    try:
        watch.llm.abort_request(requests[0])
    except (KeyError, ValueError) as error:
        assert str(requests[0]) in str(error)

    watch.drain()
    assert [output.finished for output in watch.outputs[requests[0]]].count(True) == 1


def test_aborting_after_the_end_reports_nothing(llama, work, engine):
    prompts, _ = work
    watch = Watch(engine(llama))
    requests = add_all(watch.llm, prompts[:1], greedy())
    watch.drain()

    try:
        watch.llm.abort_request(requests[0])
    except (KeyError, ValueError) as error:
        assert str(requests[0]) in str(error)

    assert watch.llm.step() == []
    assert not watch.llm.has_unfinished_requests()


@pytest.mark.parametrize("seed", range(6))
def test_random_aborts_on_a_tight_pool(llama, work, seed, engine):
    prompts, expected = work
    rng = random.Random(seed)
    llm = engine(
        llama,
        num_blocks=rng.choice([12, 14, 20]),
        max_model_len=48,
        max_num_seqs=rng.choice([3, 8]),
        max_num_batched_tokens=rng.choice([8, 11, 64]),
    )
    watch = Watch(llm)

    added = []
    aborted = set()
    for _ in range(120):
        action = rng.random()
        if action < 0.25 and len(added) < 30:
            i = rng.randrange(len(prompts))
            added.append((i, llm.add_request(prompts[i], greedy())))
        elif action < 0.32 and added:
            _, request = rng.choice(added)
            if not watch.finished(request) and request not in aborted:
                llm.abort_request(request)
                aborted.add(request)
        watch.step()

    watch.drain()
    assert aborted and llm.stats().preemptions_recompute > 0

    for i, request in added:
        last = watch.outputs[request][-1]
        assert last.finished
        assert sum(output.finished for output in watch.outputs[request]) == 1
        if request in aborted:
            assert tokens_of(last) == expected[i][: len(tokens_of(last))]
            assert last.outputs[0].finish_reason == "abort"
        else:
            assert tokens_of(last) == expected[i]


# --- what runs when ---


def test_first_come_first_served(llama, work, engine):
    prompts, _ = work
    watch = Watch(engine(llama, max_num_seqs=2, max_num_batched_tokens=8))
    requests = add_all(watch.llm, prompts, greedy())
    watch.drain()
    assert list(watch.outputs) == requests  # in the order of their first outputs


def test_a_short_request_does_not_overtake_one_that_waits_for_blocks(
    llama, engine, draw_prompts
):
    """A long prompt does not starve: later requests wait for it."""
    long, short, first = draw_prompts(llama, [40, 3, 30], 8, seed=8)
    watch = Watch(
        engine(llama, num_blocks=12, max_model_len=48, enable_prefix_caching=False)
    )
    requests = add_all(watch.llm, [first, long, short], greedy(max_tokens=8))
    watch.drain()
    assert list(watch.outputs) == requests


def test_max_num_seqs_limits_the_running_requests(llama, work, engine):
    prompts, expected = work
    for num_blocks in (64, 14):
        llm = engine(llama, num_blocks=num_blocks, max_model_len=48, max_num_seqs=3)
        watch = Watch(llm)
        requests = add_all(llm, prompts + prompts, greedy())

        most = 0
        while llm.has_unfinished_requests():
            outputs = watch.step()
            assert len({output.request_id for output in outputs}) <= 3
            under_way = [
                r for r in requests if r in watch.outputs and not watch.finished(r)
            ]
            most = max(most, len(under_way))

        assert most == 3 or num_blocks == 14
        assert most <= 3
        assert [watch.tokens(request) for request in requests] == expected + expected


def test_a_batch_of_17_under_a_limit_of_20(llama, work, engine):
    prompts, expected = work
    llm = engine(llama, num_blocks=256, max_num_seqs=20)
    outputs = llm.generate((prompts * 3)[:17], greedy(), use_tqdm=False)
    assert [tokens_of(output) for output in outputs] == (expected * 3)[:17]


def test_a_step_computes_no_more_tokens_than_the_budget(llama, draw_prompts, engine):
    prompts = draw_prompts(llama, [40, 30, 20], 4, seed=9)
    llm = engine(
        llama, max_num_seqs=4, max_num_batched_tokens=8, enable_prefix_caching=False
    )
    watch = Watch(llm)
    add_all(llm, prompts, greedy(max_tokens=4))

    held = 0
    for _ in range(9):
        watch.step()
        now = llm.stats().tokens_held
        assert now - held <= 8
        held = now

    watch.drain()
    assert llm.stats().steps >= (90 + 9) // 8


def test_decodes_continue_in_every_step_of_a_long_prompt(
    llama, reference, draw_prompts, engine
):
    short, long = draw_prompts(llama, [4, 64], 20, seed=10)
    llm = engine(llama, max_num_seqs=4, max_num_batched_tokens=8)
    watch = Watch(llm)
    decoding = llm.add_request(short, greedy(max_tokens=20))
    watch.step()
    assert len(watch.tokens(decoding)) == 1

    prompt = llm.add_request(long, greedy(max_tokens=20))
    steps = 0
    while prompt not in watch.outputs:
        before = len(watch.tokens(decoding))
        watch.step()
        steps += 1
        assert len(watch.tokens(decoding)) == before + 1, "the decode stalled"

    assert steps == -(-64 // 7)  # one of eight tokens a step is the decode
    watch.drain()
    assert watch.tokens(decoding) == reference.generate(llama, short, 20)
    assert watch.tokens(prompt) == reference.generate(llama, long, 20)


def test_requests_beyond_the_pool_wait_and_finish(
    llama, reference, draw_prompts, engine
):
    """Thirty requests share room for one and a half."""
    prompts = draw_prompts(llama, [20] * 6, 12, seed=12) * 5
    llm = engine(llama, num_blocks=12, max_model_len=32)
    outputs = llm.generate(prompts, greedy(max_tokens=12), use_tqdm=False)
    assert [tokens_of(output) for output in outputs] == [
        reference.generate(llama, prompt, 12) for prompt in prompts
    ]


# --- prefix caching ---


@pytest.mark.parametrize(
    ("shared", "length", "cached"),
    [
        (24, 31, 24),
        # All of it is cached, but at least one token, so one block, is computed.
        (24, 24, 20),
        (23, 31, 20),
        (25, 31, 24),
        (3, 31, 0),
        (24, 25, 24),
    ],
)
def test_a_second_request_reuses_the_full_blocks_they_share(
    llama, reference, draw_prompts, shared, length, cached, engine
):
    first = draw_prompts(llama, [31], 8, seed=13)[0]
    second = draw_prompts(llama, [length], 8, seed=14, prefix=first[:shared])[0]
    if length > shared:
        second[shared] = (first[shared] + 1) % 160
    llm = engine(llama)
    one = llm.generate([first], greedy(max_tokens=8), use_tqdm=False)[0]
    before = llm.stats()
    other = llm.generate([second], greedy(max_tokens=8), use_tqdm=False)[0]
    after = llm.stats()

    assert one.num_cached_tokens == 0
    assert other.num_cached_tokens == cached
    assert after.prefix_hit_tokens - before.prefix_hit_tokens == cached
    assert after.prefix_query_tokens - before.prefix_query_tokens >= cached
    assert tokens_of(other) == reference.generate(llama, second, 8)


@pytest.mark.parametrize("length", [3, 4, 5, 8, 21, 24])
def test_identical_prompts_that_arrive_together_share(
    llama, reference, draw_prompts, length, engine
):
    prompt = draw_prompts(llama, [length], 8, seed=15)[0]
    llm = engine(llama)
    watch = Watch(llm)
    requests = add_all(llm, [prompt] * 3, greedy(max_tokens=8))
    watch.step()
    common = (length - 1) // 4
    blocks = -(-length // 4)

    assert llm.stats().blocks_used == common + 3 * (blocks - common)
    watch.drain()
    cached = [watch.outputs[request][-1].num_cached_tokens for request in requests]
    assert cached == [0, 4 * common, 4 * common]
    for request in requests:
        assert watch.tokens(request) == reference.generate(llama, prompt, 8)


def test_the_next_turn_of_a_conversation_reuses_the_answer_too(
    llama, reference, draw_prompts, engine
):
    prompt = draw_prompts(llama, [10], 12, seed=16)[0]
    llm = engine(llama)
    answer = tokens_of(llm.generate([prompt], greedy(max_tokens=12), use_tqdm=False)[0])
    turn = [*prompt, *answer, 7, 8, 9]
    output = llm.generate([turn], greedy(max_tokens=4), use_tqdm=False)[0]

    # The last answer token was never computed.
    assert output.num_cached_tokens == (10 + 12 - 1) // 4 * 4
    assert tokens_of(output) == reference.generate(llama, turn, 4)


def test_the_same_block_after_another_prefix_is_no_hit(llama, reference, engine):
    block = [1, 2, 3, 4]
    llm = engine(llama)
    llm.generate([[9, 9, 9, 9, *block, 5]], greedy(max_tokens=2), use_tqdm=False)
    for prompt in ([*block, 5], [8, 8, 8, 8, *block, 5]):
        output = llm.generate([prompt], greedy(max_tokens=8), use_tqdm=False)[0]
        assert output.num_cached_tokens == 0
        assert tokens_of(output) == reference.generate(llama, prompt, 8)


def test_a_cache_salt_separates(llama, draw_prompts, engine):
    prompt = draw_prompts(llama, [21], 8, seed=17)[0]
    llm = engine(llama)
    cached = []
    for salt in (None, None, "a", "a", "b", None, "b", "a"):
        (output,) = llm.generate([prompt], greedy(cache_salt=salt), use_tqdm=False)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 20, 0, 20, 0, 20, 20, 20]


def test_salts_separate_within_one_step(llama, draw_prompts, engine):
    prompt = draw_prompts(llama, [21], 8, seed=17)[0]
    llm = engine(llama, num_blocks=128)
    params = [greedy(cache_salt=salt) for salt in (None, "a", "b", "a")]
    outputs = llm.generate([prompt] * 4, params, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 20]
    assert len({tuple(tokens_of(output)) for output in outputs}) == 1


def test_the_cache_gives_way_when_blocks_are_needed(
    llama, reference, draw_prompts, engine
):
    prompts = draw_prompts(llama, [30] * 8, 8, seed=18)
    llm = engine(llama, num_blocks=12, max_model_len=48)
    for prompt in prompts * 2:
        output = llm.generate([prompt], greedy(max_tokens=8), use_tqdm=False)[0]
        assert tokens_of(output) == reference.generate(llama, prompt, 8)
        stats = llm.stats()
        assert stats.blocks_used == 0
        assert 0 < stats.blocks_cached <= 12


def test_the_start_of_a_prompt_outlives_its_end_in_the_cache(
    llama, draw_prompts, engine
):
    """Blocks are freed tail first, so those that fewest prompts share go first."""
    first, other = draw_prompts(llama, [41, 13], 1, seed=19)
    llm = engine(llama, num_blocks=12, max_model_len=48)
    # 11 blocks, 10 of them full.
    llm.generate([first], greedy(max_tokens=1), use_tqdm=False)
    llm.generate([other], greedy(max_tokens=1), use_tqdm=False)  # takes 4
    output = llm.generate([first], greedy(max_tokens=1), use_tqdm=False)[0]
    assert 24 <= output.num_cached_tokens < 40


def test_without_prefix_caching_nothing_is_shared(llama, draw_prompts, engine):
    prompt = draw_prompts(llama, [21], 8, seed=17)[0]
    llm = engine(llama, enable_prefix_caching=False)
    watch = Watch(llm)
    requests = add_all(llm, [prompt, prompt], greedy())
    watch.step()
    assert llm.stats().blocks_used == 12

    watch.drain()
    cached = [watch.outputs[request][-1].num_cached_tokens for request in requests]
    assert cached == [0, 0]
    assert llm.stats().prefix_hit_tokens == 0


# --- generate and stream among other requests ---


def test_generate_loses_nothing_of_requests_in_flight(llama, work, engine):
    prompts, expected = work
    watch = Watch(engine(llama))
    requests = add_all(watch.llm, prompts[:2], greedy())
    watch.step()
    outputs = watch.llm.generate(prompts[2:4], greedy(max_tokens=4), use_tqdm=False)

    assert [tokens_of(output) for output in outputs] == [
        tokens[:4] for tokens in expected[2:4]
    ]
    assert watch.llm.has_unfinished_requests()

    watch.drain()
    assert [watch.tokens(request) for request in requests] == expected[:2]
    assert set(watch.outputs) == set(requests)


def test_outputs_that_finish_during_generate_come_with_the_next_step(
    llama, work, engine
):
    prompts, expected = work
    watch = Watch(engine(llama))
    requests = add_all(watch.llm, prompts[:2], greedy(max_tokens=6))
    watch.step()
    outputs = watch.llm.generate(prompts[2:4], greedy(), use_tqdm=False)
    assert [tokens_of(output) for output in outputs] == expected[2:4]

    watch.step()
    for request, tokens in zip(requests, expected, strict=False):
        assert watch.finished(request)
        assert watch.tokens(request) == tokens[:6]
        assert sum(output.finished for output in watch.outputs[request]) == 1
    assert watch.llm.step() == []


def test_outputs_that_finish_during_a_stream_come_with_the_next_step(
    llama, work, engine
):
    prompts, expected = work
    watch = Watch(engine(llama))
    requests = add_all(watch.llm, prompts[:1], greedy(max_tokens=3))
    streamed = list(watch.llm.stream(prompts[1:3], greedy()))
    assert {output.request_id for output in streamed}.isdisjoint(requests)
    watch.step()
    assert watch.finished(requests[0])
    assert watch.tokens(requests[0]) == expected[0][:3]


def test_closing_a_stream_aborts_its_requests(llama, work, engine):
    prompts, expected = work
    for taken in (1, 2, 7):
        watch = Watch(engine(llama))
        requests = add_all(watch.llm, prompts[:1], greedy())
        stream = watch.llm.stream(prompts[1:4], greedy())
        for _ in range(taken):
            next(stream)
        stream.close()
        watch.drain()
        assert watch.tokens(requests[0]) == expected[0]
        assert watch.llm.stats().blocks_used == 0
        assert watch.llm.stats().output_tokens < 3 * MAX_TOKENS


def test_a_stream_that_never_starts_leaves_nothing(llama, work, engine):
    prompts, _ = work
    llm = engine(llama)
    llm.stream(prompts, greedy()).close()
    assert not llm.has_unfinished_requests()
    assert llm.step() == []


def test_an_exception_inside_a_stream_aborts_its_requests(llama, work, engine):
    prompts, _ = work
    llm = engine(llama)
    with pytest.raises(ZeroDivisionError):
        for _ in llm.stream(prompts, greedy()):
            raise ZeroDivisionError
    assert not llm.has_unfinished_requests()
    assert llm.stats().blocks_used == 0


def test_two_streams_may_take_turns(llama, work, engine):
    prompts, expected = work
    llm = engine(llama)
    streams = [llm.stream([prompt], greedy()) for prompt in prompts[:2]]
    last = {}
    for pair in itertools.zip_longest(*streams):
        last |= {i: output for i, output in enumerate(pair) if output is not None}
    assert [tokens_of(last[i]) for i in (0, 1)] == expected[:2]
    assert all(last[i].finished for i in (0, 1))


# --- the engine as a whole ---


def test_the_context_manager_shuts_down(llama, work):
    prompts, expected = work
    with LLM(str(llama), dtype="float32", device="cpu", num_blocks=64) as llm:
        outputs = llm.generate(prompts[:1], greedy(), use_tqdm=False)
    assert tokens_of(outputs[0]) == expected[0]
    with pytest.raises((RuntimeError, ValueError)):
        llm.generate(prompts[:1], greedy(), use_tqdm=False)


def test_two_engines_in_one_process_do_not_interfere(
    llama, work, make_model, reference, engine
):
    """Different models and block sizes, in alternating steps."""
    prompts, expected = work
    other = make_model("qwen3", seed=33, tie_word_embeddings=True)
    watches = [Watch(engine(llama, block_size=2)), Watch(engine(other, block_size=16))]

    requests = [add_all(watch.llm, prompts[:3], greedy()) for watch in watches]
    for _ in range(MAX_TOKENS):
        for watch in watches:
            watch.step()
    for watch in watches:
        watch.drain()

    assert [watches[0].tokens(request) for request in requests[0]] == expected[:3]
    assert [watches[1].tokens(request) for request in requests[1]] == [
        reference.generate(other, prompt, MAX_TOKENS) for prompt in prompts[:3]
    ]


def test_dummy_weights_need_only_a_config(llama, tmp_path, engine):
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    runs = [
        tokens_of(
            engine(tmp_path, load_format="dummy", seed=seed).generate(
                [[1, 2, 3]], greedy(), use_tqdm=False
            )[0]
        )
        for seed in (1, 1)
    ]

    assert len(runs[0]) == MAX_TOKENS
    assert runs[0] == runs[1]
    assert all(0 <= token < 160 for token in runs[0])


def test_the_number_of_blocks_is_found_if_not_given(llama, work):
    prompts, expected = work
    options = {"dtype": "float32", "device": "cpu", "gpu_memory_utilization": 0.05}
    with LLM(str(llama), **options) as llm:
        assert llm.stats().blocks_total * 16 >= 256
        outputs = llm.generate(prompts, greedy(), use_tqdm=False)
    assert [tokens_of(output) for output in outputs] == expected


def test_generate_leaves_torch_as_it_was(llama, work, engine):
    prompts, _ = work
    state = torch.get_rng_state()
    grad = torch.is_grad_enabled()
    dtype = torch.get_default_dtype()
    engine(llama, seed=5).generate(prompts[:1], greedy(temperature=1.0), use_tqdm=False)

    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled() == grad
    assert torch.get_default_dtype() == dtype


@pytest.mark.parametrize("num_blocks", [64, 10])
def test_a_constant_hash_costs_hits_and_never_a_token(
    llama, engine, reference, draw_prompts, num_blocks
):
    (stem,) = draw_prompts(llama, [12], MAX_TOKENS, seed=5)
    prompts = draw_prompts(llama, [9, 13, 9], MAX_TOKENS, seed=6)
    prompts += [stem, stem, stem[:8] + prompts[1][:5]]
    expected = [reference.generate(llama, prompt, MAX_TOKENS) for prompt in prompts]

    hits = []
    for constant in (False, True):
        llm = engine(llama, block_size=4, num_blocks=num_blocks, max_model_len=40)
        if constant:
            llm.block_manager.hash_function = constant_hash
        for _ in range(2):
            outputs = llm.generate(prompts, greedy(), use_tqdm=False)
            assert [tokens_of(output) for output in outputs] == expected
        hits.append(llm.stats().prefix_hit_tokens)

    assert 0 < hits[1] < hits[0]


def test_ctrl_c_after_scheduling_leaves_nothing_uncomputed_in_the_cache(
    llama, work, engine
):
    prompts, expected = work
    llm = engine(llama)

    def interrupt(phase, batch):
        if phase == "scheduled":
            raise KeyboardInterrupt

    llm.observers.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, greedy(), use_tqdm=False)

    llm.observers.clear()
    outputs = llm.generate(prompts, greedy(), use_tqdm=False)
    assert [tokens_of(output) for output in outputs] == expected
    assert llm.stats().blocks_cached and not outputs[0].num_cached_tokens


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_after_ctrl_c_anywhere_an_engine_is_right_or_shut_down(ahead):
    """Interrupt a random line of the scheduler or block manager."""
    files = {
        sys.modules[f"nanopaged.{name}"].__file__
        for name in ("scheduler", "block_manager", "beam_search", "sequence")
    }
    options = {
        "num_blocks": 24,
        "block_size": 4,
        "max_model_len": 96,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "dtype": "float32",
        "device": "cpu",
    }
    prompts = [[5, 6, 7, 8, 9], [9, 8, 7], [1, 2, 3, 4, 5, 6, 7]]
    several = SamplingParams(n=3, max_tokens=8, seed=1)
    params = [several, greedy(max_tokens=9), BeamSearchParams(3, 6)]
    events, at = 0, 0

    def trace(frame, event, arg):
        nonlocal events
        if frame.f_code.co_filename not in files:
            return None
        events += event == "line"
        if event == "line" and events == at:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    def answers(llm):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [[answer.token_ids for answer in output.outputs] for output in outputs]

    def interrupted(llm, number):
        nonlocal events, at
        events, at = 0, number
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            answers(llm)
        finally:
            sys.settrace(before)

    llm = LLM(**options)
    llm.steps_ahead = ahead
    expected = answers(llm)
    interrupted(llm, -1)

    total = events
    closed = 0
    rng = random.Random(ahead)
    for _ in range(40):
        with pytest.raises(KeyboardInterrupt):
            interrupted(llm, rng.randint(1, total))
        try:
            assert answers(llm) == expected
            assert (
                not llm.scheduler.changed and len(llm.block_manager.free_blocks) == 24
            )
        except RuntimeError as error:
            assert "shut down" in str(error)
            closed += 1
            llm = LLM(**options)
            llm.steps_ahead = ahead

    print(f"{closed} of 40 were closed")
    assert closed < 20


def test_a_stream_continues_when_one_of_its_requests_is_aborted(llama, work, engine):
    prompts, expected = work
    llm = engine(llama)

    finished, last = [], {}
    for output in llm.stream(prompts[:3], greedy()):
        if not last:
            llm.abort_request("1")  # which this very step has an output for
        last[output.request_id] = output
        finished += [output.request_id] * output.finished

    assert sorted(finished) == ["0", "1", "2"], "each ends once"
    assert last["1"].outputs[0].finish_reason == "abort"
    assert [tokens_of(last[name]) for name in ("0", "2")] == [expected[0], expected[2]]


def test_metrics_are_the_moments_of_a_request(llama, engine, work):
    """Each moment is set once, in the order of life; a queued request starts late."""
    llm = engine(llama, max_num_seqs=1)
    prompts, _ = work
    requests = add_all(llm, prompts[:2], greedy())
    watch = Watch(llm)
    watch.step()
    first, second = (llm._requests[request].metrics for request in requests)
    assert 0 < first.arrival_time <= first.first_scheduled_time
    assert first.first_token_time > first.first_scheduled_time
    assert first.finished_time == second.first_scheduled_time == 0
    first_token_time = first.first_token_time

    watch.drain()
    metrics = [watch.outputs[request][-1].metrics for request in requests]
    assert metrics == [first, second]
    assert first.first_token_time == first_token_time < first.finished_time
    assert first.finished_time <= second.first_scheduled_time
    assert second.first_scheduled_time < second.first_token_time < second.finished_time
