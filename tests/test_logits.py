"""Logits that a request changes, and those that it asks for.

The oracle is transformers: its own processors in its own `generate`, and its logits for
the tokens of a prompt. Penalties follow vLLM's definition, written down once more.
"""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from helpers import complete, counters, drain, generate, greedy, tokens_of
from nanopaged import Logprob, SamplingParams, logits

V = 160
PROCESSORS = {
    "repetition": [hf.RepetitionPenaltyLogitsProcessor(1.3)],
    "n-grams": [hf.NoRepeatNGramLogitsProcessor(2)],
    "bias": [hf.SequenceBiasLogitsProcessor([[[5], 3.0], [[7, 9], 4.0]])],
    "prefix": [hf.PrefixConstrainedLogitsProcessor(
        lambda _, ids: [t for t in range(V) if t % 7 == len(ids) % 7], 1)],
    "two": [hf.RepetitionPenaltyLogitsProcessor(1.2),
            hf.NoRepeatNGramLogitsProcessor(3)],
}


@pytest.fixture(scope="session")
def prompts():
    rng = random.Random(3)
    return [[rng.randrange(V) for _ in range(rng.randrange(1, 40))] for _ in range(6)]


@pytest.fixture(scope="session")
def processed(llama, reference, prompts):
    """What transformers answers. Every third prompt has no processor."""
    return {name: [run_with(reference.model(llama), prompt, processors if i % 3 else [])
                   for i, prompt in enumerate(prompts)]
            for name, processors in PROCESSORS.items()}


# -- Processors ------------------------------------------------------------------------


def test_transformers_own_processors(ahead, llama, processed, engine, prompts):
    llm = engine(llama, num_blocks=200)
    llm.engine.steps_ahead = ahead
    for name, processors in PROCESSORS.items():
        params = [greedy(24, logits_processors=processors if i % 3 else None)
                  for i in range(len(prompts))]
        answers = generate(llm, prompts, params)
        assert [tokens for tokens, in answers] == processed[name]


@torch.inference_mode()
def run_with(model, prompt, processors):
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24,
                         do_sample=False, pad_token_id=0, eos_token_id=None,
                         logits_processor=hf.LogitsProcessorList(processors))
    return out[0, len(prompt) :].tolist()


def plain_penalties(row, prompt, answer, params):
    """vLLM's definition, token by token."""
    counts = Counter(answer)
    for token in range(len(row)):
        value = row[token] + (params.logit_bias or {}).get(token, 0)
        if token in prompt or token in counts:
            factor = params.repetition_penalty
            value = value / factor if value > 0 else value * factor
        value -= params.frequency_penalty * counts[token]
        row[token] = value - params.presence_penalty * (token in counts)
    return row


@pytest.mark.parametrize("options", [
    {"repetition_penalty": 1.4}, {"repetition_penalty": 0.8}, {"presence_penalty": 1.5},
    {"frequency_penalty": -0.5}, {"logit_bias": {7: 3, 11: -100.0}},
    {"repetition_penalty": 2, "presence_penalty": -1, "frequency_penalty": 0.7,
     "logit_bias": {3: 2.5}}], ids=lambda options: " ".join(options))
def test_penalties_are_those_of_vllm_and_log_probabilities_are_raw(
        options, llama, reference, engine, prompts):
    params, llm = greedy(16, logprobs=0, **options), engine(llama)
    for prompt in prompts[:4]:
        answer, found = [], complete(llm, prompt, params)
        for token, report in zip(found.token_ids, found.logprobs, strict=True):
            raw = reference.logits(llama, prompt + answer)[-1]
            row = plain_penalties(raw.tolist(), prompt, answer, params)
            assert row[token] > max(row) - 1e-4
            rank = 1 + int((raw > raw[token]).sum())
            logprob = pytest.approx(float(raw.log_softmax(-1)[token]), abs=1e-4)
            assert report == {token: Logprob(logprob, rank)}
            answer.append(token)


def test_every_sample_has_its_own_tokens_its_seed_and_min_tokens(llama, engine):
    """Drawn with n=3, beside a request without a processor, which changes nothing."""
    seen = []

    def process(token_ids, logits):
        assert token_ids.shape[0] == 1 and logits.shape == (1, V)
        seen.append(token_ids[0].tolist())
        return logits.masked_fill(torch.arange(V) % 2 == 1, -torch.inf)

    llm = engine(llama)
    plain = SamplingParams(n=2, seed=3, max_tokens=9, ignore_eos=True)
    alone = generate(llm, [[9, 8]], plain)
    even = SamplingParams(n=3, seed=7, max_tokens=12, min_tokens=12, stop_token_ids=[2],
                          logits_processors=[process])
    answers, others = generate(llm, [[5, 6, 7], [9, 8]], [even, plain])
    assert [others] == alone
    assert len({*map(tuple, answers)}) == 3, "three different samples"
    for tokens in answers:
        assert len(tokens) == 12 and not [t for t in tokens if t % 2 or t == 2]
        assert all([5, 6, 7, *tokens[:i]] in seen for i in range(12))
    assert generate(llm, [[5, 6, 7]], even) == [answers], "the seed decides"


class Trouble(Exception):
    pass


def test_an_error_ends_its_own_request_alone(ahead, llama, engine):
    """Whoever asked gets the error; the others get their tokens."""

    def fail_later(token_ids, logits):
        if token_ids.shape[1] == 6:
            raise Trouble
        return logits

    llm = engine(llama)
    llm.engine.steps_ahead = ahead
    expected = generate(llm, [[5, 6], [7]], greedy(12))
    bad = greedy(12, n=2, logits_processors=[fail_later])
    others = [llm.add_request(prompt, greedy(12)) for prompt in ([5, 6], [7])]
    with pytest.raises(Trouble):
        generate(llm, [[1, 2, 3]], bad)
    last = drain(llm)
    assert [[o.token_ids for o in last[id].outputs] for id in others] == expected

    wrong_shape = greedy(12, logits_processors=[lambda _, logits: logits[0, :5]])
    not_finite = [greedy(12, logits_processors=[
        lambda _, logits, value=value: logits.fill_(float(value))])
        for value in ("nan", "inf", "-inf")]
    nothing_left = greedy(12, min_tokens=5, stop_token_ids=list(range(160)), n=2)
    failing = [llm.add_request([1, 2, 3], param)
               for param in (bad, wrong_shape, *not_finite, nothing_left)]
    others = [llm.add_request([7], greedy(12))]
    errors, last = [], {}
    while llm.has_unfinished_requests():
        try:
            last |= {output.request_id: output for output in llm.step()}
        except (Trouble, ValueError) as error:
            errors.append(str(error))
    assert sorted("finite for at least one token" in error for error in errors) == [
        False, False, True, True, True, True]
    assert {last[id].outputs[0].finish_reason for id in failing} == {"abort"}
    assert [o.token_ids for o in last[others[0]].outputs] == expected[1]


def test_an_error_is_not_lost_to_another_callers_steps(llama, engine):
    """One step ahead, the stream's step calls the processor, and `step` reports it."""
    calls = []

    def third(token_ids, logits):
        calls.append(token_ids)
        return logits if len(calls) < 3 else 1 / 0

    llm = engine(llama)
    llm.engine.steps_ahead = True
    request = llm.add_request([5, 6], greedy(10, logits_processors=[third]))
    stream = llm.stream([[7, 8]], greedy(30))
    while len(calls) < 3:
        next(stream)
    with pytest.raises(ZeroDivisionError):
        while True:
            llm.step()
    last = drain(llm)
    assert last[request].outputs[0].finish_reason == "abort"
    assert len(tokens_of(list(stream)[-1])) == 30


def test_penalties_count_a_token_once(llama, engine, monkeypatch):
    """However long a sequence is, a step counts its new token: also after a fork, a
    preemption and a hit in the prefix cache.
    """
    sent, to_device = [], logits.to_device
    monkeypatch.setattr(logits, "to_device", lambda numbers, *more: (
        sent.append(np.size(numbers)), to_device(numbers, *more))[1])
    llm = engine(llama, num_blocks=24, max_num_seqs=4)
    params = greedy(20, n=2, presence_penalty=1, repetition_penalty=1.1)
    prompt = list(range(5, 25))
    for _ in range(2):
        for _ in range(2):
            llm.add_request(prompt, params)
        drain(llm)
    assert counters(llm)["preemptions_recompute"] > 0
    assert counters(llm)["prefix_hit_tokens"] > 0
    assert sent.count(len(prompt)) == 2 * 2 * 2, "each sequence's prompt, once"
    # For each of at most four sequences: a row and a token, and two pairs of padding.
    assert max(size for size in sent if size != len(prompt)) <= 2 * (4 + 2)


def test_after_a_failed_step_no_two_sequences_share_their_counts(
        llama, engine, monkeypatch):
    """It may have broken off while the row of one sequence went to another."""
    def fail(numbers, *more):
        return to_device(1 / 0 if numbers == [9, 9] else numbers, *more)

    to_device = logits.to_device
    llm, params = engine(llama, max_num_seqs=2), greedy(12, frequency_penalty=2)
    expected = generate(llm, [[5, 6], [15]], params)
    monkeypatch.setattr(logits, "to_device", fail)
    with pytest.raises(ZeroDivisionError):
        generate(llm, [[9, 9]], params)
    assert generate(llm, [[5, 6], [15]], params) == expected


# -- Scored prompts --------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_prompt_logprobs_are_those_of_transformers(
        chunk, caching, llama, reference, engine, prompts):
    """Twice, so that the second time there is something in the cache; one has n=2."""
    llm = engine(llama, max_num_batched_tokens=chunk, enable_prefix_caching=caching)
    for n in (1, 2):
        params = SamplingParams(n=n, max_tokens=2, prompt_logprobs=3, logprobs=0)
        outputs = llm.generate([*prompts, [5]], params, use_tqdm=False)
        for output in outputs:
            ids, reports = output.prompt_token_ids, output.prompt_logprobs
            assert reports[0] is None and len(reports) == len(ids)
            assert output.num_cached_tokens == 0
            raw = reference.logits(llama, ids).log_softmax(-1)
            for row, token, report in zip(raw, ids[1:], reports[1:], strict=False):
                assert next(iter(report)) == token
                assert {*report} == {token, *row.topk(3).indices.tolist()}
                for id, entry in report.items():
                    assert abs(entry.logprob - row[id]) < 1e-4
                    assert entry.rank == 1 + int((row > row[id]).sum())
    assert llm.generate([prompts[0]], greedy(1))[0].prompt_logprobs is None
