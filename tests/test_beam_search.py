"""Beam search finds the beams of transformers, in order, with their scores.

The oracle is `generate(num_beams=...)` in float32, one prompt at a time. A search
counts only if no choice came close to a tie, where the order of a float32 sum decides
and not the engine. Each search runs on a roomy pool and on pools that preempt by
recomputing and by swapping, next to other searches and ordinary requests. These tests
protect expanding, forking and pruning, and the blocks of dropped beams.
"""

import itertools
import json
import math
import random
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import helpers
from helpers import (
    add_all,
    check_invariants,
    counters,
    drain_checked,
    most_blocks,
    step,
    step_until_swapped,
    swap_space,
    tokens_of,
)
from nanopaged import BeamSearchParams

NEW_TOKENS = 14
greedy = partial(helpers.greedy, max_tokens=NEW_TOKENS)
EOS = list(range(5, 160, 4))  # so many that beams of all lengths occur
NEAR_TIE = 1e-4
WIDTHS = [2, 3, 4, 5, 6]
PENALTIES = [0.0, 0.5, 1.0, 2.0]
LENGTHS = [5, 8, 11, 6]  # of the prompts of a case: within a block, on a boundary
POOLS = ["roomy", "recompute", "swap"]


class Watch(LogitsProcessor):
    """Follows a search in transformers, and records how close its choices were."""

    def __init__(self, width, eos):
        self.width = width
        self.eos = torch.tensor(list(eos), dtype=torch.int64)
        self.sums = {}  # running sequence -> its log-probability
        self.margin = math.inf
        self.steps = 0

    def __call__(self, input_ids, log_probs):
        width = self.width
        beams = [tuple(row) for row in input_ids.tolist()]
        if not self.sums:  # the first step: all rows are the prompt, only one counts
            self.sums = {beams[0]: 0.0}
            beams = beams[:1]

        sums = torch.tensor([self.sums[beam] for beam in beams])[:, None]
        totals = sums + log_probs[: len(beams)]
        count = min(totals.numel(), (1 + len(self.eos)) * width + 1)
        values, places = totals.flatten().topk(count)
        tokens = places % log_probs.shape[1]
        going_on = values[~torch.isin(tokens, self.eos)]
        for ranked in (values, going_on):  # which beams are complete, and which go on
            self.margin = min(self.margin, float(ranked[width - 1] - ranked[width]))
        parents = (places // log_probs.shape[1]).tolist()
        self.sums = {
            (*beams[parent], token): value
            for parent, token, value in zip(
                parents, tokens.tolist(), values.tolist(), strict=True
            )
        }
        self.steps += 1
        return log_probs


@dataclass
class Beams:
    """What transformers found, best first; by what margin; in how many steps."""

    tokens: list[list[int]]
    scores: list[float]
    margin: float
    steps: int


@pytest.fixture(scope="session")
def beam_model(make_model):
    return make_model("llama", seed=11, eos=EOS)


@pytest.fixture(scope="session")
def beam_reference(reference):
    """`beam_reference(path, prompt, params, eos)`; its answers are cached."""
    known = {}

    @torch.inference_mode()
    def search(path, prompt, params, eos=EOS):
        eos = [] if params.ignore_eos else eos
        key = (path, tuple(prompt), params, tuple(eos))
        if key in known:
            return known[key]
        config = GenerationConfig(
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=float(params.length_penalty),
            early_stopping=params.early_stopping,
            eos_token_id=list(eos) or None,
            pad_token_id=0,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        ids = torch.tensor([list(prompt)])
        watch = Watch(params.beam_width, eos)
        result = reference.model(path).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=LogitsProcessorList([watch]),
        )

        found = []
        for row in result.sequences[:, len(prompt) :].tolist():
            ends = [i for i, token in enumerate(row) if token in eos]
            found.append(row[: ends[0] + 1] if ends else row)
        scores = result.sequences_scores.tolist()
        # Compare sums: a high penalty would make near ties of all scores.
        gaps = [
            (a - b)
            * min(len(one) ** params.length_penalty, len(two) ** params.length_penalty)
            for (a, one), (b, two) in itertools.pairwise(
                zip(scores, found, strict=True)
            )
        ]
        known[key] = Beams(found, scores, min([watch.margin, *gaps]), watch.steps)
        return known[key]

    return search


@pytest.fixture(scope="session")
def draw_beams(beam_reference):
    """`draw_beams(path, length, params, seed)`: a prompt with a clear search."""

    def draw(path, length, params, seed, prefix=(), eos=EOS):
        rng = random.Random(seed)
        vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
        for _ in range(30):
            prompt = [
                *prefix,
                *(rng.randrange(vocab_size) for _ in range(length - len(prefix))),
            ]
            if beam_reference(path, prompt, params, eos).margin > NEAR_TIE:
                return prompt
        raise AssertionError(f"no clear search of width {params.beam_width}")

    return draw


def beam_params(width=4, **more):
    return BeamSearchParams(beam_width=width, **({"max_tokens": NEW_TOKENS} | more))


def score(output, length_penalty):
    """What transformers calls sequences_scores."""
    return output.cumulative_logprob / len(output.token_ids) ** length_penalty


def assert_equal(output, expected, params, eos=EOS):
    """All beams are there, best first, with their scores and finish reasons."""
    assert output.finished
    eos = () if params.ignore_eos else eos
    assert [list(beam.token_ids) for beam in output.outputs] == expected.tokens

    scores = [score(beam, params.length_penalty) for beam in output.outputs]
    assert scores == pytest.approx(expected.scores, rel=1e-6, abs=1e-4)
    assert scores == sorted(scores, reverse=True)

    for beam in output.outputs:
        stopped = beam.token_ids[-1] in eos
        assert beam.finish_reason == ("stop" if stopped else "length")
        assert not set(eos) & set(beam.token_ids[:-1])


def settings(length_penalty):
    """The four searches of a case: early stopping or not, EOS obeyed or ignored."""
    return [
        {
            "length_penalty": length_penalty,
            "early_stopping": early,
            "ignore_eos": ignore,
        }
        for early, ignore in itertools.product([False, True], [False, True])
    ]


def pool_options(pool, width, path, block_size=4):
    """Room for everything, or for the largest search alone and one block more."""
    largest = max(
        most_blocks(length, width, NEW_TOKENS, block_size) for length in LENGTHS
    )
    return {
        "block_size": block_size,
        "num_blocks": 400 if pool == "roomy" else largest + 1,
        "max_model_len": 32,
        "max_num_seqs": 4 * width + 2,
        "max_num_batched_tokens": 4 * width + 6,
        "preemption_mode": "auto" if pool == "roomy" else pool,
        "swap_space": swap_space(path, 100, block_size),
        "enable_prefix_caching": bool(width % 2),
    }


# --- the oracle ---


def test_the_reference_searches_branch_stop_and_differ(
    beam_model, beam_reference, draw_beams
):
    """If searches never branched, any engine that can decode greedily would pass."""
    late = 0
    stopped = 0
    early = 0
    total = 0
    for width, settings_ in itertools.product([2, 4, 6], settings(1.0)):
        params = beam_params(width, **settings_)
        prompt = draw_beams(beam_model, 8, params, seed=width)
        found = beam_reference(beam_model, prompt, params)
        assert len({tuple(tokens) for tokens in found.tokens}) == width

        common = len(
            list(
                itertools.takewhile(
                    lambda column: len(set(column)) == 1,
                    zip(*found.tokens, strict=False),
                )
            )
        )
        late += common > 0
        stopped += sum(len(tokens) < NEW_TOKENS for tokens in found.tokens)
        early += found.steps < NEW_TOKENS
        total += 1

    assert late > total // 4, "all beams differ from the first token"
    assert stopped > 8, "hardly any beam met an EOS"
    assert early >= 2, "no search ended early"


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("length_penalty", PENALTIES)
@pytest.mark.parametrize("width", WIDTHS)
def test_beams_equal_transformers(
    beam_model,
    width,
    length_penalty,
    pool,
    engine,
    reference,
    beam_reference,
    draw_beams,
    draw_prompts,
):
    """240 searches: 5 widths, 4 penalties, early stopping, EOS, 3 pools."""
    llm = engine(beam_model, **pool_options(pool, width, beam_model))
    params = [beam_params(width, **more) for more in settings(length_penalty)]
    prompts = [
        draw_beams(beam_model, length, param, seed=100 * width + i)
        for i, (length, param) in enumerate(zip(LENGTHS, params, strict=True))
    ]
    plain = draw_prompts(beam_model, [7], NEW_TOKENS, seed=width)[0]
    requests = add_all(llm, prompts, params)
    requests.insert(2, llm.add_request(plain, greedy()))

    last = drain_checked(llm)

    ordinary = last[requests.pop(2)]
    assert tokens_of(ordinary) == reference.generate(beam_model, plain, NEW_TOKENS)
    for request, prompt, param in zip(requests, prompts, params, strict=True):
        assert_equal(last[request], beam_reference(beam_model, prompt, param), param)

    stats = llm.stats()
    assert stats.blocks_copied > 0
    assert (stats.preemptions_recompute > 0) == (pool == "recompute")
    assert (stats.preemptions_swap > 0) == (pool == "swap")


@pytest.mark.parametrize("block_size", [1, 2, 8, 32])
@pytest.mark.parametrize("caching", [True, False])
def test_block_size_and_chunks_change_no_beam(
    beam_model, block_size, caching, engine, beam_reference, draw_beams
):
    params = [beam_params(3, early_stopping=True), beam_params(4, length_penalty=0.5)]
    prompts = [draw_beams(beam_model, 36 - 3 * i, params[i], seed=i) for i in range(2)]

    llm = engine(
        beam_model,
        block_size=block_size,
        num_blocks=512 // block_size,
        max_model_len=56,
        max_num_seqs=8,
        max_num_batched_tokens=8,
        enable_prefix_caching=caching,
        swap_space=swap_space(beam_model, 64, block_size),
    )
    for _ in range(2):  # the second time from the cache
        requests = add_all(llm, prompts, params)
        last = drain_checked(llm)
        for request, prompt, param in zip(requests, prompts, params, strict=True):
            found = beam_reference(beam_model, prompt, param)
            assert_equal(last[request], found, param)
            hits = last[request].num_cached_tokens
            assert hits == 0 or caching

    assert (llm.stats().prefix_hit_tokens > 0) == caching


def test_one_call_takes_several_prompts_and_keeps_their_order(
    beam_model, engine, beam_reference, draw_beams
):
    param = beam_params(3, length_penalty=2.0)
    prompts = [
        draw_beams(beam_model, length, param, seed=length) for length in (9, 3, 14, 3)
    ]
    llm = engine(beam_model, num_blocks=200, swap_space=swap_space(beam_model, 16, 4))
    outputs = llm.beam_search(prompts, param)

    assert [output.prompt_token_ids for output in outputs] == prompts
    for output, prompt in zip(outputs, prompts, strict=True):
        found = beam_reference(beam_model, prompt, param)
        assert_equal(output, found, param)
        assert [beam.index for beam in output.outputs] == [0, 1, 2]

    (single,) = llm.beam_search(prompts[0], param)
    assert [list(beam.token_ids) for beam in single.outputs] == beam_reference(
        beam_model, prompts[0], param
    ).tokens


def test_prompts_with_a_common_beginning_share_it_and_keep_their_beams(
    beam_model, engine, beam_reference, draw_beams
):
    param = beam_params(4)
    stem = draw_beams(beam_model, 12, param, seed=40)
    prompts = [draw_beams(beam_model, 15, param, seed=i, prefix=stem) for i in range(3)]
    prompts += [stem, stem]
    llm = engine(beam_model, num_blocks=200, swap_space=swap_space(beam_model, 16, 4))
    requests = add_all(llm, prompts, param)

    last = drain_checked(llm)
    for request, prompt in zip(requests, prompts, strict=True):
        found = beam_reference(beam_model, prompt, param)
        assert_equal(last[request], found, param)

    assert llm.stats().prefix_hit_tokens >= 2 * 12 + 8 + 8


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("early_stopping", [True, False])
def test_very_short_searches(
    beam_model, max_tokens, early_stopping, engine, beam_reference, draw_beams
):
    llm = engine(beam_model, swap_space=swap_space(beam_model, 16, 4))
    for width, length in itertools.product([2, 5], [1, 4, 7]):
        param = beam_params(width, max_tokens=max_tokens, early_stopping=early_stopping)
        prompt = draw_beams(beam_model, length, param, seed=width)
        request = llm.add_request(prompt, param)
        found = beam_reference(beam_model, prompt, param)
        assert_equal(drain_checked(llm)[request], found, param)


def test_a_search_ends_at_max_model_len(beam_model, engine, beam_reference, draw_beams):
    """It behaves as if max_tokens were the room that is left."""
    param = beam_params(3, max_tokens=9, ignore_eos=True)
    prompt = draw_beams(beam_model, 15, param, seed=3)
    llm = engine(beam_model, max_model_len=24, swap_space=swap_space(beam_model, 16, 4))
    request = llm.add_request(prompt, beam_params(3, max_tokens=50, ignore_eos=True))
    assert_equal(
        drain_checked(llm)[request], beam_reference(beam_model, prompt, param), param
    )


def test_a_search_of_width_one_is_greedy(beam_model, engine, reference, draw_prompts):
    prompt = draw_prompts(beam_model, [6], NEW_TOKENS)[0]
    llm = engine(beam_model, swap_space=swap_space(beam_model, 16, 4))
    (output,) = llm.beam_search([prompt], beam_params(1, ignore_eos=True))
    (beam,) = output.outputs
    assert list(beam.token_ids) == reference.generate(beam_model, prompt, NEW_TOKENS)


@pytest.mark.parametrize("early_stopping", [True, False])
@pytest.mark.parametrize("count", [1, 40, 120])
def test_few_and_many_eos_ids(
    make_model, count, early_stopping, engine, beam_reference, draw_beams
):
    """With 120 of 160 tokens ending a beam, all the best candidates may be complete."""
    eos = list(range(2, 2 + count))
    path = make_model("llama", seed=11, eos=eos)
    llm = engine(path, num_blocks=100, swap_space=swap_space(path, 16, 4))
    for width, length_penalty in itertools.product([2, 4], [0.5, 2.0]):
        param = beam_params(
            width, length_penalty=length_penalty, early_stopping=early_stopping
        )
        prompt = draw_beams(path, 6, param, seed=count + width, eos=eos)
        request = llm.add_request(prompt, param)
        found = beam_reference(path, prompt, param, eos)
        assert_equal(drain_checked(llm)[request], found, param, eos)


def test_each_beam_has_the_text_of_its_tokens(text_model, engine, tokenizer):
    llm = engine(text_model, num_blocks=100, swap_space=swap_space(text_model, 16, 4))
    (output,) = llm.beam_search(["the block"], beam_params(5, max_tokens=20))
    assert output.prompt == "the block"

    texts = [beam.text for beam in output.outputs]
    assert len(set(texts)) > 2

    for beam in output.outputs:
        full = tokenizer.decode(beam.token_ids, skip_special_tokens=True)
        assert full.startswith(beam.text)
        assert beam.text.rstrip("\ufffd") == full.rstrip("\ufffd")


# --- blocks ---


def test_beams_share_the_blocks_of_their_common_prefix(beam_model, engine, draw_beams):
    """Every beam holds the prompt's full blocks; a step may add one block for each."""
    width = 5
    param = beam_params(5, ignore_eos=True)
    prompt = draw_beams(beam_model, 30, param, seed=9)
    llm = engine(beam_model, num_blocks=100, swap_space=swap_space(beam_model, 16, 4))
    llm.add_request(prompt, param)
    llm.step()
    assert llm.stats().blocks_used == 8

    together, apart = 0, 0
    while llm.has_unfinished_requests():
        llm.step()
        check_invariants(llm)

        live = [seq for group in llm.scheduler.running for seq in group.live]
        if not live:
            continue
        tables = [seq.block_table for seq in live]

        assert len(live) == width
        assert len({tuple(table[:7]) for table in tables}) == 1
        assert all(
            llm.block_manager.blocks[block].ref_count == width
            for block in tables[0][:7]
        )

        held = {block for table in tables for block in table}
        assert len(held) == llm.stats().blocks_used

        together += len(held)
        apart += sum(map(len, tables))

    assert together < 0.5 * apart


def test_a_dropped_beam_frees_its_blocks_at_once(beam_model, engine, draw_beams):
    """With one token a block, the blocks held are the nodes of the tree of beams."""
    param = beam_params(4, ignore_eos=True)
    prompt = draw_beams(beam_model, 6, param, seed=12)
    llm = engine(
        beam_model,
        block_size=1,
        num_blocks=100,
        swap_space=swap_space(beam_model, 16, 1),
    )
    llm.add_request(prompt, param)

    pruned = 0
    while llm.has_unfinished_requests():
        before = llm.stats().blocks_used
        llm.step()
        check_invariants(llm)

        live = [seq for group in llm.scheduler.running for seq in group.live]
        nodes = {
            tuple(s.token_ids[:i])
            for s in live
            for i in range(1, s.num_computed_tokens + 1)
        }

        assert llm.stats().blocks_used == len(nodes)
        pruned += bool(live) and len(nodes) < before + 4

    assert pruned > 3
    assert llm.stats().blocks_copied == 0  # no block is ever partly filled


@pytest.mark.parametrize("steps", range(0, 12, 2))
@pytest.mark.parametrize("pool", POOLS)
def test_aborting_a_search_at_any_step_frees_all_its_blocks(
    beam_model, pool, steps, engine, beam_reference, draw_beams
):
    param = beam_params(4, ignore_eos=True)
    prompts = [draw_beams(beam_model, length, param, seed=20) for length in LENGTHS[:3]]
    for victim in range(3):
        llm = engine(beam_model, **pool_options(pool, 4, beam_model))
        requests = add_all(llm, prompts, param)
        last = step(llm, steps)
        llm.abort_request(requests[victim])
        check_invariants(llm)

        last.update(drain_checked(llm))
        aborted = last[requests[victim]]
        assert aborted.finished
        assert "abort" in {beam.finish_reason for beam in aborted.outputs}

        for request, prompt in zip(requests, prompts, strict=True):
            if request != requests[victim]:
                found = beam_reference(beam_model, prompt, param)
                assert_equal(last[request], found, param)


def test_aborting_a_swapped_search_frees_its_swap_blocks(
    beam_model, engine, beam_reference, draw_beams
):
    param = beam_params(4, ignore_eos=True)
    prompts = [draw_beams(beam_model, length, param, seed=20) for length in LENGTHS[:3]]
    llm = engine(beam_model, **pool_options("swap", 4, beam_model))
    requests = add_all(llm, prompts, param)
    total = len(llm.block_manager.free_swap_blocks)
    assert total == 100

    (swapped,) = step_until_swapped(llm)
    distinct = {block for seq in swapped.live for block in seq.block_table}
    assert len(llm.block_manager.free_swap_blocks) == total - len(distinct)

    llm.abort_request(swapped.request_id)
    check_invariants(llm)
    assert len(llm.block_manager.free_swap_blocks) == total

    last = drain_checked(llm)
    for request, prompt in zip(requests, prompts, strict=True):
        if request != swapped.request_id:
            found = beam_reference(beam_model, prompt, param)
            assert_equal(last[request], found, param)


@pytest.mark.parametrize("pool", POOLS)
def test_after_a_failed_step_new_searches_are_right(
    beam_model, pool, engine, beam_reference, draw_beams, monkeypatch
):
    param = beam_params(4, ignore_eos=True)
    prompts = [draw_beams(beam_model, length, param, seed=20) for length in LENGTHS[:3]]
    for failing in range(1, 30, 3):
        llm = engine(beam_model, **pool_options(pool, 4, beam_model))
        requests = add_all(llm, prompts, param)
        last = step(llm, failing)

        with monkeypatch.context() as patch:
            patch.setattr(llm.runner, "execute", lambda batch: 1 / 0)
            if llm.scheduler.waiting or llm.scheduler.running:
                with pytest.raises(ZeroDivisionError):
                    llm.step()
        check_invariants(llm)

        last.update(step(llm))
        assert all(last[request].finished for request in requests)

        requests = add_all(llm, prompts, param)
        last.update(drain_checked(llm))
        for request, prompt in zip(requests, prompts, strict=True):
            found = beam_reference(beam_model, prompt, param)
            assert_equal(last[request], found, param)


# --- what is rejected ---


def test_a_search_that_can_never_run_is_refused(beam_model, engine):
    llm = engine(
        beam_model,
        num_blocks=24,
        max_model_len=96,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        swap_space=swap_space(beam_model, 16, 4),
    )
    before = counters(llm)

    for params, word in (
        (beam_params(7, max_tokens=2, ignore_eos=True), "beam_width"),
        (beam_params(6, max_tokens=40, ignore_eos=True), "blocks"),
    ):
        for call in (llm.add_request, llm.beam_search):
            with pytest.raises(ValueError, match=word):
                call([5] * 20, params)
    assert counters(llm) == before
    assert not llm.has_unfinished_requests()


def test_a_search_is_at_most_as_wide_as_the_vocabulary(llama, engine):
    """Less its EOS tokens: every beam must have a child that goes on."""
    llm = engine(llama, num_blocks=1000, max_num_seqs=256, max_num_batched_tokens=256)
    most = llm.model_config.vocab_size - len(llm.eos_token_ids)
    with pytest.raises(ValueError, match=f"beam_width, with {most} tokens"):
        llm.beam_search([5, 6], beam_params(most + 1, max_tokens=2))
    outputs = llm.beam_search([5, 6], beam_params(most, max_tokens=2))
    assert len(outputs[0].outputs) == most


@pytest.mark.parametrize(
    "fields",
    [
        {"beam_width": 0, "max_tokens": 4},
        {"beam_width": -1, "max_tokens": 4},
        {"beam_width": 2, "max_tokens": 0},
        {"beam_width": 2.0, "max_tokens": 4},
        {"beam_width": True, "max_tokens": 4},
        {"beam_width": 2, "max_tokens": 4, "length_penalty": math.nan},
        {"beam_width": 2, "max_tokens": 4, "length_penalty": math.inf},
        {"beam_width": 2, "max_tokens": 4, "length_penalty": "1"},
        {"beam_width": 2, "max_tokens": 4, "early_stopping": "never"},
        {"beam_width": 2, "max_tokens": 4, "early_stopping": 1},
        {"beam_width": 2, "max_tokens": 4, "ignore_eos": None},
        {"beam_width": 2, "max_tokens": None},
        {"beam_width": 2},
        {"max_tokens": 2},
        {"beam_width": 2, "max_tokens": 4, "temperature": 1.0},
    ],
    ids=repr,
)
def test_bad_params_are_refused(fields):
    with pytest.raises((TypeError, ValueError)) as error:
        BeamSearchParams(**fields)
    names = {
        "beam_width",
        "max_tokens",
        "length_penalty",
        "early_stopping",
        "ignore_eos",
    }
    assert any(name in str(error.value) for name in names | {"temperature"})


def test_beam_params_and_sampling_params_are_not_interchangeable(beam_model, engine):
    llm = engine(beam_model, swap_space=swap_space(beam_model, 16, 4))
    before = counters(llm)
    with pytest.raises(TypeError):
        llm.beam_search([[1, 2]], greedy())
    with pytest.raises(TypeError):
        llm.beam_search([[1, 2]], None)
    with pytest.raises(TypeError):
        llm.beam_search([[1, 2], ["x"]], beam_params(2))
    assert counters(llm) == before


# --- at random ---


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_searches_equal_transformers(
    variant, seed, engine, reference, beam_reference, draw_beams
):
    """352 more searches: any settings, any model, pools hardly larger than needed."""
    rng = random.Random(1000 * variant.index + seed)
    eos = reference.eos_ids
    requests = []
    for _ in range(8):
        params = beam_params(
            rng.choice([2, 2, 3, 4, 5, 6]),
            max_tokens=rng.randint(1, 20),
            length_penalty=rng.choice([-1.0, 0.0, 0.3, 0.5, 1.0, 1.0, 2.0, 3.0]),
            early_stopping=rng.random() < 0.5,
            ignore_eos=rng.random() < 0.2,
        )
        prompt_seed = rng.randrange(10**6)
        prompt = draw_beams(
            variant.path, rng.randint(1, 24), params, prompt_seed, eos=eos
        )
        requests.append((prompt, params))

    block_size = rng.choice([1, 2, 4, 8, 16])
    worst = max(
        p.beam_width * -(-(len(r) + p.max_tokens) // block_size) for r, p in requests
    )
    max_num_seqs = rng.randint(max(params.beam_width for _, params in requests), 24)
    llm = engine(
        variant.path,
        block_size=block_size,
        num_blocks=max(worst, -(-48 // block_size)) + rng.randint(0, 4),
        max_model_len=48,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 7, 60]),
        preemption_mode=rng.choice(["auto", "swap", "recompute"]),
        swap_space=swap_space(
            variant.path, rng.choice([0, worst // 2, 4 * worst]), block_size
        ),
        enable_prefix_caching=rng.random() < 0.7,
    )
    ids = [llm.add_request(*request) for request in requests]

    last = drain_checked(llm)
    for request, (prompt, params) in zip(ids, requests, strict=True):
        found = beam_reference(variant.path, prompt, params, eos)
        assert_equal(last[request], found, params, eos)
