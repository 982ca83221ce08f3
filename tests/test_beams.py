"""Beam search finds the beams of transformers, in order, with their scores.

The oracle is `generate(num_beams=..)` in float32, one prompt at a time. A search counts
only if no choice came close to a tie, where the order of a float32 sum decides and not
the engine. Searches run next to each other and to ordinary requests, with room for all;
test_sharing.py has them on pools that are too small.
"""

import itertools
import json
import math
import random
from collections import namedtuple

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from helpers import all_tokens_of, drain, floats, greedy, message_of
from nanopaged import BeamSearchParams

NEW_TOKENS = 14
EOS = list(range(5, 160, 4))  # so many that beams of all lengths occur
NEAR_TIE = 1e-4


class Watch(LogitsProcessor):
    """Follows a search in transformers, and records how close its choices were."""

    def __init__(self, width, eos):
        self.width, self.eos = width, torch.tensor(list(eos), dtype=torch.int64)
        self.sums, self.margin = {}, math.inf

    def __call__(self, input_ids, log_probs):
        beams = [tuple(row) for row in input_ids.tolist()]
        if not self.sums:  # the first step: all rows are the prompt, and one counts
            beams = beams[:1]
            self.sums = {beams[0]: 0.0}
        sums = torch.tensor([self.sums[beam] for beam in beams])[:, None]
        totals = (sums + log_probs[: len(beams)]).flatten()
        count = min(len(totals), (1 + len(self.eos)) * self.width + 1)
        values, places = totals.topk(count)
        vocab_size = log_probs.shape[1]
        going_on = values[~torch.isin(places % vocab_size, self.eos)]
        for ranked in (values, going_on):  # which are complete, and which go on
            lead = ranked[self.width - 1] - ranked[self.width]
            self.margin = min(self.margin, float(lead))
        self.sums = {(*beams[place // vocab_size], place % vocab_size): value
                     for place, value in zip(places.tolist(), values.tolist(),
                                             strict=True)}
        return log_probs


# What transformers found, best first, and how clearly.
Found = namedtuple("Found", "tokens scores margin")


@pytest.fixture(scope="session")
def beam_model(make_model):
    return make_model("llama", seed=11, eos=EOS)


@pytest.fixture(scope="session")
def search(reference):
    """`search(path, prompt, params, eos)`: as transformers does; answers are cached."""
    known = {}

    @torch.inference_mode()
    def search(path, prompt, params, eos=EOS):
        key = str((path, prompt, params, eos))
        if key in known:
            return known[key]
        eos = [] if params.ignore_eos else eos
        ids = torch.tensor([prompt])
        watch = Watch(params.beam_width, eos)
        config = GenerationConfig(
            num_beams=params.beam_width, num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens, length_penalty=params.length_penalty,
            eos_token_id=eos or None, pad_token_id=0, do_sample=False,
            output_scores=True, return_dict_in_generate=True)
        result = reference.model(path).generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config,
            logits_processor=LogitsProcessorList([watch]))
        tokens = []
        for row in result.sequences[:, len(prompt) :].tolist():
            ends = [i for i, token in enumerate(row) if token in eos]
            tokens.append(row[: ends[0] + 1] if ends else row)
        scores = result.sequences_scores.tolist()
        # Compare sums: a high penalty would make near ties of all scores.
        gaps = [(a - b) * min(len(one), len(two)) ** params.length_penalty
                for (a, one), (b, two) in itertools.pairwise(
                    zip(scores, tokens, strict=True))]
        known[key] = Found(tokens, scores, min([watch.margin, *gaps]))
        return known[key]

    return search


@pytest.fixture(scope="session")
def draw(search):
    """`draw(path, length, params, seed, eos)`: a prompt with a clear search."""

    def draw(path, length, params, seed, eos=EOS):
        rng = random.Random(seed)
        vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
        for _ in range(30):
            prompt = [rng.randrange(vocab_size) for _ in range(length)]
            if search(path, prompt, params, eos).margin > NEAR_TIE:
                return prompt
        raise AssertionError(f"no clear search: {params}")

    return draw


def check_beams(output, found, params, eos=EOS):
    """All beams are there, best first, with scores, log-probabilities and reasons."""
    eos = [] if params.ignore_eos else eos
    assert all_tokens_of(output) == found.tokens, params
    scores = [beam.cumulative_logprob / len(beam.token_ids) ** params.length_penalty
              for beam in output.outputs]
    assert scores == pytest.approx(found.scores, rel=1e-6, abs=1e-4)
    for beam in output.outputs:
        values = [floats(at)[token]
                  for token, at in zip(beam.token_ids, beam.logprobs, strict=True)]
        assert sum(values) == pytest.approx(beam.cumulative_logprob, abs=1e-4)
        is_stop = beam.token_ids[-1] in eos
        assert beam.finish_reason == ("stop" if is_stop else "length")


def params_of(width, index=0, **more):
    """Eight ways to search, that differ in all they can."""
    fields = {"max_tokens": [NEW_TOKENS, 1 + 2 * index][index // 3 % 2],
              "length_penalty": [1.0, 0.0, 2.0, -0.5][index // 2],
              "ignore_eos": index % 4 > 2}
    return BeamSearchParams(width, **(fields | more))


def check_searches(llm, path, requests, search, eos=EOS):
    ids = [llm.add_request(*request) for request in requests]
    outputs = drain(llm)
    for request_id, request in zip(ids, requests, strict=True):
        check_beams(outputs[request_id], search(path, *request, eos), request[1], eos)
    return outputs


# -- The beams of transformers ---------------------------------------------------------


@pytest.mark.parametrize("width", [
    2, 3, *(pytest.param(width, marks=pytest.mark.slow) for width in (4, 6))])
def test_beams_equal_transformers(
    width, beam_model, engine, reference, search, draw, draw_prompts
):
    params = [params_of(width, index) for index in range(8)]
    requests = [(draw(beam_model, 5 + 3 * (index % 3), each, 100 * width + index), each)
                for index, each in enumerate(params)]
    llm = engine(
        beam_model, num_blocks=400, max_model_len=32, max_num_seqs=4 * width,
        max_num_batched_tokens=4 * width + 6, enable_prefix_caching=width % 2 > 0)
    (plain,) = draw_prompts(beam_model, [7], NEW_TOKENS, seed=width)
    plain_id = llm.add_request(plain, greedy(NEW_TOKENS))
    outputs = check_searches(llm, beam_model, requests, search)
    expected = reference.generate(beam_model, plain, NEW_TOKENS)
    assert all_tokens_of(outputs[plain_id]) == [expected]

    # If searches never branched, any engine that decodes greedily would pass.
    found = [search(beam_model, *request) for request in requests]
    assert sum(len({tokens[0] for tokens in each.tokens}) < width for each in found) > 3
    assert sum(len(tokens) < NEW_TOKENS for each in found for tokens in each.tokens) > 5


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_block_size_chunks_and_the_cache_change_no_beam(
    block_size, beam_model, engine, search, draw
):
    params = [params_of(3, 1), params_of(4, 6)]
    requests = [(draw(beam_model, 36 - i, each, i), each)
                for i, each in enumerate(params)]
    llm = engine(beam_model, block_size=block_size, num_blocks=512 // block_size,
                 max_model_len=56, max_num_seqs=8, max_num_batched_tokens=8)
    for _ in range(2):  # the second time from the cache
        outputs = check_searches(llm, beam_model, requests, search)
    assert sum(output.num_cached_tokens for output in outputs.values()) == sum(
        (len(prompt) - 1) // block_size * block_size for prompt, _ in requests)


@pytest.mark.parametrize("count", [1, 120])
def test_few_and_many_eos_ids(count, make_model, engine, search, draw):
    """With 120 of 160 tokens ending a beam, all the best candidates may be complete."""
    eos = list(range(2, 2 + count))
    path = make_model("llama", seed=11, eos=eos)
    requests = [(draw(path, 6, params_of(width, index), count + width, eos),
                 params_of(width, index)) for width in (2, 4) for index in (2, 7)]
    check_searches(engine(path, num_blocks=300), path, requests, search, eos)


def test_a_search_that_fills_the_model_ends_as_if_max_tokens_were_the_room_left(
    beam_model, engine, search, draw, reference
):
    llm = engine(beam_model, num_blocks=200, max_model_len=24)
    short, long = (params_of(3, max_tokens=count, ignore_eos=True) for count in (9, 50))
    prompt = draw(beam_model, 15, short, 3)
    (output,) = llm.beam_search([prompt], long)
    check_beams(output, search(beam_model, prompt, short), short)
    (output,) = llm.beam_search(prompt, params_of(1, ignore_eos=True, max_tokens=9))
    assert all_tokens_of(output) == [reference.generate(beam_model, prompt, 9)]


# -- Blocks, limits, text --------------------------------------------------------------


def test_a_search_is_at_most_as_wide_as_the_vocabulary_without_eos(llama, engine):
    llm = engine(llama, num_blocks=1000, max_num_seqs=256, max_num_batched_tokens=256)
    most = llm.model_config.vocab_size - len(llm.eos_token_ids)
    assert f"at most {most}" in message_of(
        lambda: llm.beam_search([5, 6], BeamSearchParams(most + 1, 2)))
    (output,) = llm.beam_search([5, 6], BeamSearchParams(most, 2))
    assert len(set(map(str, all_tokens_of(output)))) == most


def test_beams_come_in_the_order_of_prompts_with_text(text_model, engine, tokenizer):
    llm = engine(text_model, num_blocks=100)
    prompts = ["the block", "of", "the block table"]
    outputs = llm.beam_search(prompts, BeamSearchParams(3, 12))
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert [beam.index for beam in output.outputs] == [0, 1, 2]
        texts = [tokenizer.decode(tokens, skip_special_tokens=True)
                 for tokens in all_tokens_of(output)]
        assert [beam.text for beam in output.outputs] == texts and len(set(texts)) > 1
