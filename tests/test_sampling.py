"""What is drawn, and when to stop: the right distribution, from seed and position only.

Frequencies are compared with transformers' logits over thousands of fixed seeds, so a
test always passes or always fails; the bounds are so wide that a correct sampler meets
them with any numbers.
"""

import itertools
import math
import random

import pytest
import torch

from helpers import chi_square, complete, drain, generate, greedy, tokens_of
from nanopaged import SamplingParams

DRAWS = 3000
PROMPT = [5, 9, 33, 2, 8, 60, 61]


@pytest.fixture(scope="session")
def small(make_model):
    """A vocabulary of 40, so that every token is drawn often enough to count."""
    return make_model("qwen3", seed=21, vocab_size=40, eos=[39, 38])


@pytest.fixture(scope="session")
def prompts():
    rng = random.Random(0)
    return [[rng.randrange(160) for _ in range(rng.randint(1, 40))] for _ in range(12)]


def sample(llm, prompts, params):
    return [tokens for (tokens,) in generate(llm, prompts, params)]


def seeded(seed, **more):
    defaults = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True, "seed": seed}
    return SamplingParams(**(defaults | more))


# --- seeds ---


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 2, "num_blocks": 300},
        {"block_size": 32, "num_blocks": 40, "enable_prefix_caching": False},
        {"max_num_seqs": 5, "max_num_batched_tokens": 7},
        {"block_size": 4, "num_blocks": 26},  # preempts
    ],
    ids=["plain", "block-2", "block-32-uncached", "chunked", "preempted"],
)
def test_a_seeded_request_draws_the_same_tokens_alone_and_in_any_batch(
    llama, prompts, options, engine
):
    params = [
        seeded(
            100 + i, temperature=0.5 + 0.1 * i, top_p=1 - 0.02 * i, top_k=[0, 30][i % 2]
        )
        for i in range(len(prompts))
    ]
    alone = [
        sample(engine(llama, num_blocks=96), [prompt], param)[0]
        for prompt, param in zip(prompts, params, strict=True)
    ]

    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    llm = engine(llama, **({"num_blocks": 200} | options))
    assert sample(llm, prompts, params) == alone

    rng = random.Random(1)
    for _ in range(4):  # other neighbours, another order, unseeded requests in between
        chosen = rng.sample(range(len(prompts)), rng.randint(1, len(prompts)))
        batch, batch_params = [], []
        for i in chosen:
            batch += [prompts[i], prompts[rng.randrange(len(prompts))]]
            batch_params += [params[i], seeded(None, max_tokens=rng.randint(1, 20))]
        drawn = sample(llm, batch, batch_params)[::2]
        assert drawn == [alone[i] for i in chosen]

    if options.get("num_blocks") == 26:
        assert llm.stats().preemptions_recompute > 0


def test_different_seeds_draw_different_tokens(llama, engine):
    drawn = sample(engine(llama), [PROMPT] * 20, [seeded(seed) for seed in range(20)])
    assert len({tuple(tokens) for tokens in drawn}) == 20


def test_one_seed_draws_different_numbers_at_different_positions(small, engine):
    """At a very high temperature, a token shows the uniform number that drew it."""
    llm = engine(small, max_model_len=256)
    drawn = sample(
        llm, [[1]] * 4, [seeded(s, temperature=1e6, max_tokens=200) for s in range(4)]
    )
    for tokens in drawn:
        assert len(set(tokens)) > 36  # of 40; fewer than 37 have odds below 1 in 1,000
        repeats = sum(a == b for a, b in itertools.pairwise(tokens))
        assert repeats < 20  # expected: 5

    agreements = [
        sum(a == b for a, b in zip(one, other, strict=True))
        for one, other in itertools.combinations(drawn, 2)
    ]

    assert max(agreements) < 20  # expected: 5


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1])
def test_any_seed_can_be_repeated(llama, seed, engine):
    llm = engine(llama)
    first, second = sample(llm, [PROMPT, PROMPT], [seeded(seed), seeded(seed)])
    assert first == second
    assert sample(llm, [PROMPT], seeded(seed)) == [first]


def test_the_engine_seed_makes_unseeded_requests_repeatable(llama, prompts, engine):
    runs = [
        sample(engine(llama, seed=seed), prompts, seeded(None)) for seed in (7, 7, 8)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_unseeded_requests_with_the_same_prompt_draw_different_tokens(llama, engine):
    llm = engine(llama)
    drawn = sample(llm, [PROMPT] * 10, seeded(None)) + sample(
        llm, [PROMPT] * 10, seeded(None)
    )
    assert len({tuple(tokens) for tokens in drawn}) == 20


# --- the distribution ---


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution by definition: temperature, top-k, top-p of the rest, min-p."""
    probs = torch.softmax(logits.double() / temperature, -1)
    if top_k:
        probs[probs < probs.topk(min(top_k, len(probs))).values[-1]] = 0
        probs /= probs.sum()

    if top_p < 1:
        ordered, order = probs.sort(descending=True)
        before = ordered.cumsum(0) - ordered
        probs[order[before >= top_p]] = 0  # the token that crosses p stays

    probs[probs < min_p * probs.max()] = 0
    return probs / probs.sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_k": 1000},  # more than there are
        {"top_k": -1},
        {"top_p": 0.5},
        {"top_p": 0.9, "temperature": 1.5},
        {"min_p": 0.1},
        {"min_p": 0.3, "temperature": 2.0},
        {"top_k": 6, "top_p": 0.8, "temperature": 1.4},
    ],
    ids=lambda settings: "-".join(f"{k}={v}" for k, v in settings.items()) or "plain",
)
def test_frequencies_match_the_softmax(small, settings, engine, reference):
    prompt = [token % 40 for token in PROMPT]
    by_definition = settings | {"top_k": max(0, settings.get("top_k", 0))}
    probs = probabilities(reference.logits(small, prompt)[-1], **by_definition)
    assert (probs > 0.02).sum() >= 2, "one token alone would prove nothing"

    llm = engine(small)
    params = [seeded(seed, max_tokens=1, **settings) for seed in range(DRAWS)]

    drawn = [tokens[0] for tokens in sample(llm, [prompt] * DRAWS, params)]

    counts = torch.bincount(torch.tensor(drawn), minlength=40).double()
    assert counts[probs == 0].sum() == 0, "a token outside the support was drawn"

    expected = probs * DRAWS
    often = expected >= 5
    assert (counts[often] > 0).all()

    statistic = chi_square(counts[often], probs[often], DRAWS)
    rest = expected[~often].sum()
    assert abs(counts[~often].sum() - rest) <= 5 * math.sqrt(rest) + 1

    freedom = int(often.sum())
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_top_p_keeps_the_token_that_crosses_p(small, engine, reference):
    prompt = [token % 40 for token in PROMPT]
    probs, order = torch.softmax(reference.logits(small, prompt)[-1].double(), -1).sort(
        descending=True
    )
    for kept in (1, 2, 3):
        below = probs[: kept - 1].sum()
        # In the middle of the last token that is kept.
        top_p = float(below + probs[kept - 1] / 2)
        params = [seeded(seed, max_tokens=1, top_p=top_p) for seed in range(300)]
        drawn = {tokens[0] for tokens in sample(engine(small), [prompt] * 300, params)}
        assert drawn == set(order[:kept].tolist())


def test_a_tiny_top_p_or_top_k_1_or_min_p_1_is_greedy(llama, prompts, engine):
    llm = engine(llama)
    expected = sample(llm, prompts, greedy())
    for settings in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert sample(llm, prompts, seeded(3, temperature=1.3, **settings)) == expected


def test_temperature_0_is_greedy_among_sampled_requests(
    llama, engine, reference, draw_prompts
):
    clear = draw_prompts(llama, [3, 8, 20], 16)
    params = [greedy(), seeded(1), greedy(), seeded(2), greedy()]
    drawn = sample(
        engine(llama), [clear[0], clear[0], clear[1], clear[1], clear[2]], params
    )
    assert drawn[::2] == [reference.generate(llama, prompt, 16) for prompt in clear]
    assert drawn[1] != drawn[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e-40},
        {"temperature": 1e-300},
        {"top_p": 1e-40},
        {"top_p": 1e-300},
    ],
    ids=str,
)
def test_what_float32_cannot_hold_is_greedy_or_rejected(llama, settings, engine):
    llm = engine(llama)
    expected = sample(llm, [PROMPT], greedy())
    try:
        params = seeded(1, **settings)
    except ValueError as error:
        assert next(iter(settings)) in str(error)
    else:
        assert sample(llm, [PROMPT], params) == expected


@pytest.mark.parametrize("temperature", [1e30, 1e300])
def test_an_enormous_temperature_is_uniform_or_rejected(llama, temperature, engine):
    try:
        params = [seeded(seed, temperature=temperature) for seed in range(40)]
    except ValueError as error:
        assert "temperature" in str(error)
    else:
        drawn = sample(engine(llama), [PROMPT] * 40, params)
        # Of 160, in 640 draws.
        assert len(set(itertools.chain.from_iterable(drawn))) > 130


def test_a_very_low_temperature_is_greedy(llama, engine, reference, draw_prompts):
    prompt = draw_prompts(llama, [9], 16)[0]
    assert sample(engine(llama), [prompt], seeded(1, temperature=1e-5)) == [
        reference.generate(llama, prompt, 16)
    ]


# --- log-probabilities ---


def value(logprob):
    """A log-probability, as a number or in an object like vLLM's."""
    return getattr(logprob, "logprob", logprob)


@pytest.mark.parametrize("params", [greedy, seeded], ids=["greedy", "sampled"])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_those_of_the_raw_logits(llama, params, count, engine, reference):
    param = (
        greedy(logprobs=count)
        if params is greedy
        else seeded(4, temperature=1.8, top_k=50, logprobs=count)
    )
    llm = engine(llama, max_num_seqs=4, max_num_batched_tokens=4)
    output = complete(llm, PROMPT, param)
    tokens = list(output.token_ids)
    logits = reference.logits(llama, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits, -1)

    assert len(output.logprobs) == len(tokens) == 16
    for i, (token, given) in enumerate(zip(tokens, output.logprobs, strict=True)):
        assert set(given) == {token} | set(expected[i].topk(count).indices.tolist())
        for candidate, logprob in given.items():
            assert value(logprob) == pytest.approx(
                float(expected[i, candidate]), abs=1e-3
            )
    assert output.cumulative_logprob == pytest.approx(
        sum(
            value(given[token])
            for token, given in zip(tokens, output.logprobs, strict=True)
        ),
        abs=1e-4,
    )


def test_without_logprobs_there_are_none(llama, engine):
    with_them, without = (
        engine(llama)
        .generate([PROMPT], seeded(1, logprobs=k), use_tqdm=False)[0]
        .outputs[0]
        for k in (2, None)
    )
    assert without.logprobs is None
    assert without.cumulative_logprob is None
    assert list(without.token_ids) == list(with_them.token_ids)


def test_logprobs_survive_preemption(llama, prompts, engine):
    params = [seeded(i, logprobs=3, max_tokens=30) for i in range(len(prompts))]
    tight = engine(llama, num_blocks=26)
    ample = engine(llama, num_blocks=300)
    results = [llm.generate(prompts, params, use_tqdm=False) for llm in (tight, ample)]
    assert tight.stats().preemptions_recompute > 0
    for one, other in zip(*results, strict=True):
        assert tokens_of(one) == tokens_of(other)
        assert len(one.outputs[0].logprobs) == 30
        assert one.outputs[0].cumulative_logprob == pytest.approx(
            other.outputs[0].cumulative_logprob, abs=1e-3
        )


# --- when to stop ---


@pytest.fixture(scope="session")
def stopping_prompts(llama, reference, draw_prompts):
    """Prompts whose greedy outputs meet EOS ids, different ones where possible."""
    found = {}
    for prompt in draw_prompts(llama, [6] * 120, 16, seed=50):
        tokens = reference.generate(llama, prompt, 16, reference.eos_ids)
        if 1 < len(tokens) < 16:
            found.setdefault(tokens[-1], prompt)
    assert len(found) >= 2, "only one EOS id was met"
    return list(found.values())


def test_each_of_several_eos_ids_stops(llama, stopping_prompts, engine, reference):
    outputs = engine(llama).generate(
        stopping_prompts, greedy(ignore_eos=False), use_tqdm=False
    )
    ends = set()
    for output, prompt in zip(outputs, stopping_prompts, strict=True):
        tokens = tokens_of(output)
        assert tokens == reference.generate(llama, prompt, 16, reference.eos_ids)
        assert output.outputs[0].finish_reason == "stop"
        ends.add(tokens[-1])
    assert len(ends) >= 2


def test_ignore_eos_continues(llama, stopping_prompts, engine, reference):
    outputs = engine(llama).generate(
        stopping_prompts, greedy(ignore_eos=True), use_tqdm=False
    )
    for output, prompt in zip(outputs, stopping_prompts, strict=True):
        assert tokens_of(output) == reference.generate(llama, prompt, 16)
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("min_tokens", [1, 4, 10, 16])
def test_min_tokens_suppresses_every_eos_id(
    llama, stopping_prompts, min_tokens, engine, reference
):
    params = greedy(ignore_eos=False, min_tokens=min_tokens)
    outputs = engine(llama).generate(stopping_prompts, params, use_tqdm=False)
    for output, prompt in zip(outputs, stopping_prompts, strict=True):
        assert tokens_of(output) == suppressed(
            reference, llama, prompt, min_tokens, reference.eos_ids
        )


def suppressed(reference, path, prompt, min_tokens, stops, max_tokens=16):
    """Greedy tokens of transformers whose first `min_tokens` may not be a stop id."""
    return reference.run(
        path,
        prompt,
        max_new_tokens=max_tokens,
        eos_token_id=stops,
        min_new_tokens=min_tokens,
    )[0]


def test_min_tokens_suppresses_stop_token_ids_too(
    llama, engine, reference, draw_prompts
):
    prompt = draw_prompts(llama, [6], 16, seed=3)[0]
    tokens = reference.generate(llama, prompt, 16)
    stop = tokens[2]
    params = greedy(ignore_eos=False, min_tokens=8, stop_token_ids=[stop])
    output = complete(engine(llama), prompt, params)
    assert list(output.token_ids) == suppressed(
        reference, llama, prompt, 8, [*reference.eos_ids, stop]
    )


def test_min_tokens_holds_while_sampling(llama, engine, reference):
    params = [
        seeded(s, ignore_eos=False, min_tokens=6, max_tokens=12, temperature=2.0)
        for s in range(60)
    ]
    drawn = sample(engine(llama), [PROMPT] * 60, params)

    assert min(map(len, drawn)) > 6
    assert all(
        token not in reference.eos_ids for tokens in drawn for token in tokens[:6]
    )
    assert any(tokens[-1] in reference.eos_ids for tokens in drawn)


def test_stop_token_ids_stop_even_with_ignore_eos(
    llama, engine, reference, draw_prompts
):
    prompt = draw_prompts(llama, [6], 16, seed=4)[0]
    tokens = reference.generate(llama, prompt, 16)
    for position in (0, 3, 15):
        params = greedy(stop_token_ids=[tokens[position], 159])
        output = complete(engine(llama), prompt, params)
        first = tokens.index(tokens[position])
        assert list(output.token_ids) == tokens[: first + 1]
        assert output.finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 33])
def test_max_tokens_is_exact(llama, max_tokens, engine):
    outputs = engine(llama).generate(
        [PROMPT, [1]], greedy(max_tokens=max_tokens), use_tqdm=False
    )
    for output in outputs:
        assert len(output.outputs[0].token_ids) == max_tokens
        assert output.outputs[0].finish_reason == "length"


def test_generation_ends_at_max_model_len_at_the_latest(
    llama, engine, reference, draw_prompts
):
    """Rejected at once, or cut off there: never longer."""
    prompt = draw_prompts(llama, [20], 12)[0]
    llm = engine(llama, max_model_len=32)
    try:
        output = complete(llm, prompt, greedy(max_tokens=100))
    except ValueError as error:
        assert "max_model_len" in str(error) and "32" in str(error)
    else:
        assert list(output.token_ids) == reference.generate(llama, prompt, 12)
        assert output.finish_reason == "length"


def test_the_default_params_are_those_of_vllm():
    params = SamplingParams()
    assert params.n == 1
    assert params.temperature == 1
    assert params.top_p == 1
    assert params.top_k == 0
    assert params.min_p == 0
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (16, 0, False)
    assert params.seed is None and params.logprobs is None and params.cache_salt is None


def test_params_can_be_changed_and_a_running_request_keeps_what_it_was_given(
    llama, engine
):
    llm = engine(llama)
    params = SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=4, stop_token_ids=[]
    )
    stops = params.stop_token_ids
    request = llm.add_request([1, 2, 3], params)
    params.max_tokens = 9
    stops.extend(range(160))

    outputs = drain(llm)[request]
    assert len(outputs[-1].outputs[0].token_ids) == 4
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        params.max_tokens = 0
    with pytest.raises(AttributeError, match="max_token"):
        params.max_token = 5
    assert params.max_tokens == 9
