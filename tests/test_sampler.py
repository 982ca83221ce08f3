"""From logits to tokens: each piece against slow Python, and each row by itself.

What a row draws depends only on its logits, seed and position. So a batch is compared
with its rows one by one, frequencies with the softmax, and random numbers with
splitmix64 on Python's ints.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers import chi_square, floats, new_group
from nanopaged import SamplingParams
from nanopaged.sampler import Sampler, lowest_kept, uniform

MASK = 2**64 - 1
INF = math.inf


def make_sampler(*requests, prompt=(1, 2, 3), stop=()):
    """A sampler whose row i holds request i, a pair of seed and SamplingParams."""
    sampler = Sampler(len(requests))
    for row, (seed, params) in enumerate(requests):
        stops = {*stop, *(params.stop_token_ids or ())}
        group = new_group(prompt, params, stops)
        group.seed = seed
        group.sequences[0].row = row
        sampler.set_row(group.sequences[0])
    return sampler


def sample(sampler, logits, rows=None, positions=None):
    """The token of every row; the logits are not modified."""
    rows = np.arange(len(logits)) if rows is None else np.array(rows)
    positions = np.full(len(rows), 3) if positions is None else np.array(positions)
    return sampler.sample(logits.clone(), sampler.plan(rows, positions)).read()


# --- random numbers ---


def splitmix64(seed, position):
    """Output `position` (from 0) of splitmix64 from the state `seed`, in 23 bits."""
    z = (seed + position * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return ((z ^ (z >> 31)) >> 41) / 2**23


def draw(pairs):
    seeds, positions = zip(*pairs, strict=True)
    return uniform(np.array(seeds, np.uint64), np.array(positions, np.int64))


def test_the_generator_is_splitmix64():
    # The published test vector: the state 1234567 and its first outputs.
    for position, output in ((1, 6457827717110365317), (2, 3203168211198807973)):
        assert splitmix64(1234567, position) == (output >> 41) / 2**23
        assert draw([(1234567, position)]).item() == (output >> 41) / 2**23


@given(
    st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**20)), min_size=1)
)
def test_a_random_number_depends_on_seed_and_position_only(pairs):
    numbers = draw(pairs)
    assert numbers.dtype == np.float32
    assert numbers.tolist() == [splitmix64(*pair) for pair in pairs]
    assert numbers.tolist() == [draw([pair]).item() for pair in pairs]


def test_random_numbers_have_23_bits_and_fill_the_interval():
    numbers = draw(itertools.product(range(300), range(300)))
    scaled = numbers.astype(np.float64) * 2**23
    assert (scaled == scaled.astype(np.int64)).all()
    assert 0 <= numbers.min() < 1e-4
    assert 1 - 1e-4 < numbers.max() <= 1 - 2**-23

    counts = np.histogram(numbers, 100, (0, 1))[0]
    assert abs(counts - 900).max() < 6 * 30  # six standard deviations

    # Neighbours in seed or position are uncorrelated.
    grid = numbers.reshape(300, 300) - 0.5
    for shifted in (grid[1:] * grid[:-1], grid[:, 1:] * grid[:, :-1]):
        assert abs(shifted.mean()) < 6 / 12 / 300


@given(st.floats(2**-20, 2**20, width=32))
def test_the_largest_random_number_times_a_sum_is_below_the_sum(total):
    assert np.float32(1 - 2**-23) * np.float32(total) < np.float32(total)


# --- top-k, top-p, min-p ---


def column(value, dtype=torch.float32):
    return torch.tensor([[value]], dtype=dtype)


def kept(logits, top_k=0, top_p=1.0, min_p=0.0):
    rows = torch.tensor([logits], dtype=torch.float32)
    most = top_k if top_k > 0 else len(logits)
    limits = column(top_k, torch.int64), column(top_p), column(min_p)
    lowest = lowest_kept(rows, most, column(1.0), *limits)
    return (rows >= lowest)[0].nonzero()[:, 0].tolist()


LOGITS = [math.log(p) for p in (0.1, 0.4, 0.05, 0.25, 0.2)]


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": -1}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),  # 0.4 is not enough: the token that crosses it stays
        ({"top_p": 0.64}, [1, 3]),
        ({"top_p": 0.66}, [1, 3, 4]),
        ({"top_p": 0.96}, [0, 1, 2, 3, 4]),
        ({"min_p": 1.0}, [1]),
        ({"min_p": 0.51}, [1, 3]),
        ({"min_p": 0.49}, [1, 3, 4]),
        ({"min_p": 0.24}, [0, 1, 3, 4]),
        # After top-k 0.4 of 0.85 is 0.47, so two tokens are enough for top-p.
        ({"top_k": 3, "top_p": 0.7}, [1, 3]),
        ({"top_k": 3, "top_p": 0.77}, [1, 3, 4]),
        ({"top_k": 4, "top_p": 0.99, "min_p": 0.3}, [1, 3, 4]),
    ],
    ids=str,
)
def test_the_likely_tokens_are_kept(limits, tokens):
    assert kept(LOGITS, **limits) == tokens


@settings(max_examples=400, deadline=None)
@given(
    logits=st.one_of(
        st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=40),  # ties
        st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40),
    ),
    top_k=st.integers(-1, 45),
    top_p=st.one_of(st.just(1.0), st.floats(2**-6, 1, width=32)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1, width=32)),
)
def test_what_is_kept_follows_the_definition(logits, top_k, top_p, min_p):
    values = sorted(logits, reverse=True)[: top_k if top_k > 0 else None]
    weights = [math.exp(value - values[0]) for value in values]
    probs = [weight / math.fsum(weights) for weight in weights]
    before = [math.fsum(probs[:i]) for i in range(len(probs))]
    expected = [
        value
        for value, prob, total in zip(values, probs, before, strict=True)
        if total < top_p and prob >= min_p * probs[0]
    ]
    # Where float32 cannot tell, either answer is right.
    assume(all(abs(total - top_p) > 1e-5 for total in before))
    assume(
        min_p in (0, 1) or all(abs(prob - min_p * probs[0]) > 1e-6 for prob in probs)
    )
    found = sorted(
        (logits[token] for token in kept(logits, top_k, top_p, min_p)), reverse=True
    )

    assert found[: len(expected)] == expected
    # Equally likely tokens may stay together.
    assert set(found[len(expected) :]) <= {expected[-1]}


def test_every_row_is_restricted_by_its_own_limits():
    logits = torch.tensor([LOGITS] * 5)
    top_k = torch.tensor([[0], [2], [5], [1], [3]])
    # The last: 0.65 / 0.85 reaches it.
    top_p = torch.tensor([[0.5], [1.0], [1.0], [0.9], [0.75]])
    min_p = torch.tensor([[0.0], [0.0], [0.3], [0.0], [0.0]])
    ones = torch.ones(5, 1)
    lowest = lowest_kept(logits, logits.shape[1], ones, top_k, top_p, min_p)
    tokens = [row.nonzero()[:, 0].tolist() for row in logits >= lowest]

    assert tokens == [[1, 3], [1, 3], [1, 3, 4], [1], [1, 3]]


# --- drawing ---


@pytest.mark.parametrize(
    ("limits", "probs"),
    [
        ({}, [0.1, 0.4, 0.05, 0.25, 0.2]),
        ({"temperature": 0.5}, [p * p / 0.275 for p in (0.1, 0.4, 0.05, 0.25, 0.2)]),
        ({"top_k": 2}, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        ({"top_p": 0.8}, [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]),
        ({"min_p": 0.2}, [0.1 / 0.95, 0.4 / 0.95, 0, 0.25 / 0.95, 0.2 / 0.95]),
    ],
    ids=str,
)
def test_frequencies_match_the_probabilities(limits, probs):
    count = 20_000
    logits = torch.tensor([LOGITS]).expand(count, -1)
    sampler = make_sampler((5, SamplingParams(**limits)))
    over_positions = sample(
        sampler, logits, np.zeros(count, np.int64), np.arange(count)
    )
    params = SamplingParams(**limits)
    sampler = make_sampler(*((seed, params) for seed in range(count)))

    over_seeds = sample(sampler, logits)
    for tokens in (over_positions, over_seeds):
        counts = np.bincount(tokens, minlength=5).tolist()
        assert chi_square(counts, probs) < 30  # p < 1e-5 for 4 degrees of freedom


def test_the_token_is_the_first_whose_cumulative_probability_exceeds_the_number():
    sampler = make_sampler((77, SamplingParams()))
    logits = torch.tensor([LOGITS])
    probs = [0.1, 0.4, 0.05, 0.25, 0.2]
    for position in range(300):
        total = np.cumsum(probs)
        u = splitmix64(77, position)
        assert min(abs(total - u)) > 1e-6, "too close for float32"
        assert sample(sampler, logits, [0], [position]) == [int((total > u).argmax())]


@pytest.mark.parametrize("number", [0.0, 2**-23, 0.5, 1 - 2**-23])
def test_a_token_of_probability_0_is_never_drawn(number, monkeypatch):
    numbers = np.full(1, number, np.float32)
    monkeypatch.setattr("nanopaged.sampler.uniform", lambda seeds, positions: numbers)
    sampler = make_sampler((1, SamplingParams()))
    for places in ([0], [3], [6], [2, 4]):
        logits = torch.full((1, 7), -INF)
        logits[:, places] = 0.0
        assert sample(sampler, logits) == [places[0] if number < 0.5 else places[-1]]


def first_above(probs, number):
    """The token by its definition, in float64, and how near the number is to a sum."""
    sums = probs.double().cumsum(-1)
    sums /= sums[-1].item()
    distance = (sums - number).abs().min().item()
    return int((sums > number).nonzero()[0]), distance


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 300, 1024])
def test_a_token_of_any_group_is_found(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(1, vocab_size, generator=generator)
    sampler = make_sampler((7, SamplingParams(temperature=0.8)))
    positions = range(500)
    tokens = sample(sampler, logits.expand(500, -1), [0] * 500, positions)

    probs = (logits[0] / 0.8).softmax(-1)
    for position, token in zip(positions, tokens, strict=True):
        expected, distance = first_above(probs, splitmix64(7, position))
        assert token == expected or distance < 1e-6


@pytest.mark.parametrize("noise", [-1e-6, 1e-6])
@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-23])
def test_sums_that_are_rounded_badly_let_no_excluded_token_through(
    noise, number, monkeypatch
):
    """As on a GPU, where a sum may shrink, or grow where a probability is 0."""
    exact = torch.Tensor.cumsum

    def rough(self, dim, **options):
        sums = exact(self, dim, **options)
        return sums * (1 + noise * (torch.arange(sums.shape[dim]) % 3))

    monkeypatch.setattr(torch.Tensor, "cumsum", rough)
    monkeypatch.setattr(torch.Tensor, "cumsum_", rough)
    numbers = np.full(1, number, np.float32)
    monkeypatch.setattr("nanopaged.sampler.uniform", lambda seeds, positions: numbers)
    sampler = make_sampler((1, SamplingParams()))
    for place in range(0, 1000, 37):
        logits = torch.full((1, 1000), -INF)
        logits[:, [place, (place * 7 + 200) % 1000]] = 0.0
        (token,) = sample(sampler, logits)
        assert logits[0, token] == 0


# --- logits that allow no token ---


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_p=0.9, top_k=4, logprobs=2),
        SamplingParams(temperature=0, logprobs=0),
    ],
    ids=str,
)
@pytest.mark.parametrize("broken", ["one NaN", "all NaN", "nothing left"])
def test_a_row_without_a_token_fails_alone(broken, params):
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    sampler = make_sampler(*[(seed, params) for seed in range(3)])
    expected = sample(sampler, logits)

    if broken == "one NaN":
        logits[1, 290] = torch.nan
    else:
        logits[1] = torch.nan if broken == "all NaN" else -INF
    output = sampler.sample(logits, sampler.plan(np.arange(3), np.full(3, 3)))

    assert output.read() == [expected[0], -1, expected[2]]
    has_logprobs = [] if params.logprobs is None else [0, 2]
    assert list(output.logprobs) == has_logprobs


def test_temperature_0_takes_the_most_likely():
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    for temperature in (0, 1e-6):
        sampler = make_sampler(
            *[(s, SamplingParams(temperature=temperature)) for s in range(50)]
        )
        assert sample(sampler, logits) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "limits", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str
)
def test_the_tightest_limits_keep_the_most_likely(limits):
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(1))
    sampler = make_sampler(*[(s, SamplingParams(**limits)) for s in range(50)])
    assert sample(sampler, logits) == logits.argmax(-1).tolist()


def test_extreme_logits_and_temperatures_draw_valid_tokens():
    for scale, temperature in itertools.product(
        (1e-30, 1.0, 1e4, 1e30), (1e-5, 1e-3, 1.0, 1e6)
    ):
        logits = scale * torch.randn(20, 30, generator=torch.Generator().manual_seed(2))
        params = [
            SamplingParams(temperature=temperature, **limits)
            for limits in ({}, {"top_p": 0.5}, {"top_k": 7}, {"min_p": 0.1})
        ]
        sampler = make_sampler(*[(s, params[s % 4]) for s in range(20)])
        assert all(0 <= token < 30 for token in sample(sampler, logits))


# --- rows by themselves ---


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 1e-6, 0.3, 1.0, 1.0, 2.5]),
    top_k=st.sampled_from([0, -1, 1, 2, 3, 7, 20, 500]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.6, 0.1]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    logprobs=st.sampled_from([None, None, 0, 3]),
    min_tokens=st.sampled_from([0, 0, 2]),
)


# The number of distinct logits: few make many ties, as bfloat16 does.
@pytest.mark.parametrize("levels", [3, 20, 10**6])
@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 2**63 - 1), params_strategy), min_size=2, max_size=8
    ),
    vocab_size=st.sampled_from([20, 160, 1000]),
    seed=st.integers(0, 10**6),
)
def test_a_row_draws_the_same_in_any_batch(levels, requests, vocab_size, seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, levels, (len(requests), vocab_size)) * (12 / levels)
    logits = torch.from_numpy(values.astype(np.float32))
    sampler = make_sampler(*requests, stop=(0, 5))
    rows = rng.permutation(len(requests))
    positions = rng.integers(3, 8, len(requests))

    together = sampler.sample(logits.clone(), sampler.plan(rows, positions))
    for i in range(len(requests)):
        plan = sampler.plan(rows[i : i + 1], positions[i : i + 1])
        alone = sampler.sample(logits[i : i + 1].clone(), plan)
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs.get(0) == together.logprobs.get(i)


def test_a_reused_row_forgets_its_first_request():
    strict = SamplingParams(
        top_k=1, top_p=0.1, min_p=0.9, logprobs=2, min_tokens=5, stop_token_ids=[1]
    )
    used = make_sampler((9, strict))
    fresh = make_sampler((4, SamplingParams()))
    group = new_group([1, 2, 3], SamplingParams())
    group.seed = 4
    group.sequences[0].row = 0
    used.set_row(group.sequences[0])
    logits = torch.zeros(200, 50)
    rows = np.zeros(200, np.int64)
    positions = np.arange(200)

    assert sample(used, logits, rows, positions) == sample(
        fresh, logits, rows, positions
    )
    assert used.sample(logits, used.plan(rows, positions)).logprobs == {}


# --- min_tokens ---


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_no_stop_token_comes_before_min_tokens(temperature):
    params = SamplingParams(temperature=temperature, min_tokens=4, stop_token_ids=[2])
    sampler = make_sampler(
        (1, params), (1, SamplingParams(temperature=temperature)), stop=(1,)
    )
    logits = torch.tensor([[0.0, 30.0, 20.0, 10.0]]).repeat(2, 1)
    # After a prompt of 3: the first new token is at position 3.
    for position in range(3, 12):
        first, second = sample(sampler, logits, [0, 1], [position] * 2)
        assert first == (3 if position < 3 + 4 else 1)
        assert second == 1  # the other row may stop at once


# --- log-probabilities ---


def test_logprobs_are_of_the_raw_logits_and_include_the_sampled_token():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(3))
    expected = logits.log_softmax(-1)

    sampler = make_sampler(
        (0, SamplingParams(logprobs=3, temperature=0.2, top_k=2)),
        (1, SamplingParams()),
        (2, SamplingParams(logprobs=0, temperature=3.0)),
        (3, SamplingParams(logprobs=9, temperature=0, min_tokens=1)),
        stop=(int(logits[3].argmax()),),
    )
    for position in range(3, 40):
        out = sampler.sample(
            logits.clone(), sampler.plan(np.arange(4), np.full(4, position))
        )
        assert list(out.logprobs) == [0, 2, 3]
        for row, count in ((0, 3), (2, 0), (3, 9)):
            token = int(out.token_ids[row])
            named = {*expected[row].topk(count).indices.tolist(), token}
            assert out.logprobs[row].keys() == named
            assert next(iter(out.logprobs[row])) == token
            for other, logprob in floats(out.logprobs[row]).items():
                assert logprob == pytest.approx(expected[row, other].item(), abs=1e-6)


def test_logits_in_half_precision_give_logprobs_in_full():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(4)).bfloat16()
    sampler = make_sampler((0, SamplingParams(logprobs=2)))
    out = sampler.sample(logits.clone(), sampler.plan(np.arange(1), np.array([3])))
    expected = logits.float().log_softmax(-1)[0]
    for token, logprob in floats(out.logprobs[0]).items():
        assert logprob == pytest.approx(expected[token].item(), abs=1e-6)
