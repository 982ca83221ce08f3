"""From logits to tokens: each row against slow arithmetic, and each row by itself.

What a row draws depends on its logits, its seed and its position. So a batch is
compared with its rows one by one, frequencies with the softmax in float64, and single
numbers with the sums of the probabilities that they must exceed.
"""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper

from helpers import OPS, chi_square, floats, new_group, sample_for
from nanopaged import SamplingParams
from nanopaged.sampler import RESOLUTION, draw, highest_logits, keep_likely, lowest_kept

INF = math.inf
PROBS = [0.1, 0.4, 0.05, 0.25, 0.2]
LOGITS = torch.tensor([PROBS]).log()


def sequence(params, seed=0, position=3, stop=(), index=0):
    """A sequence that gets its token at this position, after a prompt of 3 tokens."""
    group = new_group([1, 2, 3], params, stop, 100)
    group.seed = seed
    group.sequences[index].num_computed_tokens = position
    return group.sequences[index]


def random_logits(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens_at(logits, seqs):
    """The tokens of one row of logits for all these sequences."""
    return sample_for(logits.expand(len(seqs), -1), seqs).read()


def expected_probs(logits, params):
    """The probabilities of one row's tokens by their definition, in float64."""
    scaled = logits.double() / params.temperature
    probs = scaled.softmax(-1)
    likely = scaled[probs >= params.min_p * probs.max()]
    top = likely.sort(descending=True).values[: params.top_k or None]
    probs = top.softmax(-1)
    is_kept = probs.cumsum(-1) - probs < params.top_p
    return scaled.masked_fill(scaled < top[is_kept].min(), -INF).softmax(-1)


def check_frequencies(tokens, probs):
    """Pearson's test, at five standard deviations of its statistic."""
    degrees = int((probs > 0).sum()) - 1
    statistic = chi_square(np.bincount(tokens, minlength=len(probs)), probs)
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


# -- Which tokens, and how often -------------------------------------------------------


@pytest.mark.parametrize(("limits", "tokens"), [
    ({}, {0, 1, 2, 3, 4}),
    ({"top_k": 1}, {1}), ({"top_k": 3}, {1, 3, 4}), ({"top_k": 99}, {0, 1, 2, 3, 4}),
    ({"top_p": 1e-6}, {1}), ({"top_p": 0.39}, {1}),
    ({"top_p": 0.41}, {1, 3}),  # 0.4 is not enough: the token that crosses it stays
    ({"top_p": 0.66}, {1, 3, 4}), ({"top_p": 0.96}, {0, 1, 2, 3, 4}),
    # After top-k 0.4 of 0.85 is 0.47, so two tokens are enough for top-p.
    ({"top_k": 3, "top_p": 0.7}, {1, 3}), ({"top_k": 3, "top_p": 0.77}, {1, 3, 4}),
    ({"top_k": 4, "top_p": 0.99}, {0, 1, 3, 4}), ({"min_p": 0.4}, {1, 3, 4}),
    ({"min_p": 1, "top_p": 0.9}, {1}), ({"min_p": 0.4, "top_p": 0.5}, {1, 3}),
    # Temperature comes first: 0.16 / 0.275 is 0.58.
    ({"temperature": 0.5, "top_p": 0.57}, {1})], ids=str)
def test_the_likely_tokens_are_kept(limits, tokens):
    params = SamplingParams(**limits)
    drawn = tokens_at(LOGITS, [sequence(params, seed) for seed in range(400)])
    assert set(drawn) == tokens
    assert set(expected_probs(LOGITS[0], params).nonzero()[:, 0].tolist()) == tokens


@pytest.mark.parametrize("limits", [
    {}, {"temperature": 0.6}, {"temperature": 3.0}, {"top_k": 40}, {"top_p": 0.7},
    {"top_k": 100, "top_p": 0.8, "temperature": 1.3}], ids=str)
def test_frequencies_are_the_probabilities(limits):
    """Of many seeds at one position, and of many positions with one seed."""
    logits, params = random_logits(1, 300), SamplingParams(**limits)
    probs, count = expected_probs(logits[0], params), 3000
    rng = random.Random(1)
    seqs = [sequence(params, rng.getrandbits(63)) for _ in range(count)]
    check_frequencies(tokens_at(logits, seqs), probs)
    seqs = [sequence(params, 2**63 - 1, position) for position in range(count)]
    check_frequencies(tokens_at(logits, seqs), probs)


def test_the_draws_of_neighbours_are_independent():
    """Of seeds, positions and continuations of one prompt: all pairs are likely."""
    params, count = SamplingParams(n=2), 3000

    def draw(seed=0, position=0, index=0):
        return np.array(tokens_at(LOGITS, [
            sequence(params, seed + i, position + i % 100, (), index)
            for i in range(count)]))

    probs = torch.tensor(PROBS).outer(torch.tensor(PROBS)).flatten()
    first = draw()
    for other in (draw(seed=1), draw(position=1), draw(index=1)):
        check_frequencies(5 * first + other, probs)


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 300, 1000])
def test_numbers_draw_the_first_token_whose_sum_exceeds_them(vocab_size):
    logits = random_logits(1, vocab_size, scale=3)
    numbers = torch.linspace(0, 1 - RESOLUTION, 2000, dtype=torch.float64)[:, None]
    drawn = draw(logits.expand(2000, -1), torch.full((2000, 1), 0.8), numbers)
    sums = (logits[0].double() / 0.8).softmax(-1).cumsum(-1)
    for number, token in zip(numbers, drawn.tolist(), strict=True):
        exact = int((sums > number).byte().argmax())
        assert token == exact or (sums - number).abs().min() < 1e-6


@pytest.mark.parametrize("distance", [1, 50, 150])
def test_very_unlikely_tokens_can_be_drawn(distance):
    """By about one number of 2**31: first, between two others, and last."""
    rarely = -30.5 * math.log(2)
    for row, start in [([rarely, 0.0], 0.0), ([0.0, rarely, 0.0], 0.5 - 4 * RESOLUTION),
                       ([0.0, rarely], 1 - 8 * RESOLUTION)]:
        logits = torch.full((1, 400), -INF)
        logits[0, : len(row) * distance : distance] = torch.tensor(row)
        numbers = start + RESOLUTION * torch.arange(8).double()[:, None]
        drawn = draw(logits.expand(8, -1), torch.ones(8, 1), numbers)
        count = drawn.tolist().count(row.index(rarely) * distance)
        assert 1 <= count <= 3


# -- Tokens that cannot be -------------------------------------------------------------


@pytest.mark.parametrize("noise", [0, -1e-12, 1e-12])
def test_no_number_draws_an_excluded_token(noise, monkeypatch):
    """Even if sums are rounded as on a GPU: they may shrink, or grow where a
    probability is 0.
    """
    exact = torch.Tensor.cumsum

    def rough(self, dim, **options):
        sums = exact(self, dim, **options)
        return sums * (1 + noise * (torch.arange(sums.shape[dim]) % 3))

    monkeypatch.setattr(torch.Tensor, "cumsum", rough)
    numbers = torch.tensor(
        [[0.0], [RESOLUTION], [0.5], [1 - RESOLUTION]], dtype=torch.float64)
    for place in range(0, 1000, 37):
        logits = torch.full((4, 1000), -INF)
        logits[:, [place, (place * 7 + 200) % 1000]] = 0.0
        drawn = draw(logits, torch.ones(4, 1), numbers)
        assert (logits.gather(1, drawn[:, None]) == 0).all()
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 0.0]]).expand(4, -1)
    assert draw(weights.log(), torch.ones(4, 1), numbers).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("kind", ["smooth", "steep", "tied", "bfloat16"])
def test_limits_keep_what_float64_and_transformers_keep(kind):
    """Tied tokens, too, stay or go together. 2,500 rows, with and without top_k."""
    logits = random_logits(2500, 300, scale=20 if kind == "steep" else 2)
    logits = logits.round() if kind == "tied" else logits
    logits = logits.bfloat16() if kind == "bfloat16" else logits
    heat, top_p = torch.rand(2, 2500, 1, generator=torch.Generator().manual_seed(1))
    heat, whole = heat + 0.1, torch.ones(2500, 1)
    for top_k in (300, 20):
        top = logits.sort(descending=True).values[:, :top_k]
        probs = (top.double() / heat).softmax(-1)
        before = probs.cumsum(-1) - probs
        expected = top.float().masked_fill(before >= top_p, INF).amin(-1, keepdim=True)
        clear = ((before - top_p).abs() > 1e-5).all(-1)  # other rows depend on rounding
        found = lowest_kept(highest_logits(logits, top_k), -INF * whole, heat,
                            top_k * whole, top_p).float()
        assert clear.sum() > 2000 and torch.equal(found[clear], expected[clear])
    drawing = [SamplingParams(min_p=0.1)]
    draws = torch.stack((whole, heat, 300 * whole, 2 * whole, 0.1 * whole))[:, :, 0]
    left = keep_likely(logits, drawing, draws, OPS) > -INF
    scores = logits.float() / heat
    kept = MinPLogitsWarper(0.1)(None, scores) > -INF
    gaps = scores - scores.amax(-1, keepdim=True) - math.log(0.1)
    clear = (gaps.abs() > 1e-5).all(-1)
    assert clear.sum() > 2000 and torch.equal(left[clear], kept[clear])


def test_extreme_logits_and_temperatures_draw_possible_tokens():
    limits = [{}, {"top_p": 0.5}, {"top_k": 7}, {"top_p": 0.1}] * 5
    for scale, heat in itertools.product((1e-30, 1, 1e30), (1e-5, 1e-3, 1.0, 1e30)):
        logits = random_logits(20, 130, scale=scale)
        logits[:, ::2] = -INF
        seqs = [sequence(SamplingParams(temperature=heat, **limits[i]), i)
                for i in range(20)]
        assert all(token % 2 for token in sample_for(logits, seqs).read())


# -- Rows by themselves ----------------------------------------------------------------


def draw_sequence(rng):
    """Greedy, limited or unlimited; the last two as often as not in one batch."""
    limits = {"top_k": [0, 1, 2, 7, 500], "top_p": [1.0, 0.95, 0.6, 0.1],
              "min_p": [0.0, 0.03, 0.6]}
    chosen = {name: rng.choice(values) for name, values in limits.items()
              if rng.random() < 0.3}
    params = SamplingParams(
        temperature=rng.choice([0, 1e-6, 0.3, 1.0, 2.5]), n=2,
        logprobs=rng.choice([None, None, 0, 3]), min_tokens=rng.choice([0, 2]),
        **chosen)
    return sequence(params, rng.getrandbits(63), rng.randrange(3, 9), (0, 5),
                    rng.randrange(2))


@pytest.mark.parametrize("levels", [3, 20, 10**6])  # few make ties, as bfloat16 does
def test_a_row_draws_the_same_in_any_batch_and_within_its_limits(levels):
    rng = random.Random(levels)
    for _ in range(60):
        seqs = [draw_sequence(rng) for _ in range(rng.randrange(2, 9))]
        shape = len(seqs), rng.choice([20, 160, 1000])
        values = np.random.default_rng(rng.randrange(99)).integers(0, levels, shape)
        logits = torch.from_numpy(12 / levels * values).float()
        before = logits.clone()
        output = sample_for(logits, seqs)
        assert torch.equal(logits, before), "it changed its input"
        for i, (seq, token) in enumerate(zip(seqs, output.read(), strict=True)):
            alone = sample_for(logits[i : i + 1], [seq])
            assert alone.read() == [token], seq.group.params
            assert alone.logprobs.get(0) == output.logprobs.get(i)
            allowed = logits[i].clone()
            if seq.num_computed_tokens < 5 and seq.group.params.min_tokens:
                allowed[[0, 5]] = -INF
            if seq.group.params.temperature > 1e-5:
                allowed = expected_probs(allowed, seq.group.params).sign()
            assert allowed[token] == allowed.max()


# -- Log-probabilities -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_are_of_the_raw_logits_and_include_the_sampled_token(dtype):
    logits = random_logits(4, 9, seed=3).to(dtype)
    expected = logits.float().log_softmax(-1)
    best = int(logits[3].argmax())
    for position in range(3, 23):
        seqs = [sequence(SamplingParams(**fields), i, position, stop={best})
                for i, fields in enumerate((
                    {"logprobs": 3, "temperature": 0.2, "top_k": 2}, {},
                    {"logprobs": 0, "temperature": 3.0},
                    {"logprobs": 99, "max_tokens": 50, "min_tokens": 50}))]
        output = sample_for(logits, seqs)
        assert list(output.logprobs) == [0, 2, 3]
        for row, count in ((0, 3), (2, 0), (3, 9)):
            token, found = output.read()[row], output.logprobs[row]
            likely = expected[row].topk(count).indices.tolist()
            assert next(iter(found)) == token and set(found) == {token, *likely}
            for other, logprob in floats(found).items():
                assert logprob == pytest.approx(expected[row, other].item(), abs=1e-6)
        assert best in output.logprobs[3] and output.read()[3] != best
