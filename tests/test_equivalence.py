"""Greedy tokens equal those of transformers, however the engine schedules the work.

The matrix crosses every model variant with block sizes, chunk budgets, prefix caching
and pools too small for the batch. Each case is a batch of 24 prompts: lengths around
block boundaries, shared prefixes, identical prompts. Half of the requests stop at an
EOS id, half run on past it.
"""

import itertools
import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import complete, floats, greedy, tokens_of
from nanopaged import SamplingParams

# Around multiples of 2..32.
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 48]
NEW_TOKENS = 24
MAX_MODEL_LEN = 96
BATCH = 24  # 16 lengths, 4 prompts on a shared prefix, 4 repeated prompts
CASES_PER_VARIANT = 12
VARIANT_COUNT = 11

# block size, (max_num_seqs, max_num_batched_tokens), prefix caching, small pool
MATRIX = list(
    itertools.product(
        [2, 4, 8, 16, 32], [(4, 4), (7, 16), (32, 2048)], [True, False], [True, False]
    )
)
random.Random(0).shuffle(MATRIX)


@pytest.fixture(scope="session")
def corpus(variant, draw_prompts):
    """A variant's batch of prompts, long and short ones in random order."""
    prompts = draw_prompts(variant.path, LENGTHS, NEW_TOKENS, seed=variant.index)
    prompts += draw_prompts(
        variant.path,
        [33, 34, 40, 48],
        NEW_TOKENS,
        seed=100 + variant.index,
        prefix=prompts[13],
    )
    prompts += [prompts[0], prompts[6], prompts[10], prompts[13]]
    random.Random(variant.index).shuffle(prompts)
    return prompts


def pool(block_size, tight):
    """Blocks for one sequence of full length plus one, or for the whole batch."""
    one = MAX_MODEL_LEN // block_size
    return one + 1 if tight else BATCH * one


def stopping(reference, index):
    return [] if index % 2 else reference.eos_ids


def greedy_batch(llm, prompts, reference):
    """Even requests stop at EOS, odd ones ignore it."""
    params = [
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=bool(i % 2))
        for i in range(len(prompts))
    ]
    return llm.generate(prompts, params, use_tqdm=False)


def expected_batch(path, prompts, reference):
    return [
        reference.generate(path, prompt, NEW_TOKENS, stopping(reference, i))
        for i, prompt in enumerate(prompts)
    ]


def test_the_matrix_covers_every_setting_and_a_thousand_generations():
    assert VARIANT_COUNT * CASES_PER_VARIANT * BATCH >= 1000
    taken = {
        (v * CASES_PER_VARIANT + c) % len(MATRIX)
        for v in range(VARIANT_COUNT)
        for c in range(12)
    }
    assert taken == set(range(len(MATRIX)))


def test_the_reference_outputs_vary(variant, corpus, reference):
    outputs = [
        reference.generate(variant.path, prompt, NEW_TOKENS) for prompt in corpus
    ]
    assert variant.index < VARIANT_COUNT
    assert len(corpus) == BATCH
    assert len({tuple(output) for output in outputs}) == len({tuple(p) for p in corpus})
    assert len(set(itertools.chain.from_iterable(outputs))) > 50
    assert sum(len(set(output)) > NEW_TOKENS // 3 for output in outputs) > BATCH / 2


def test_cutting_at_eos_matches_transformers(variant, corpus, reference):
    stopped = 0
    for prompt in corpus[:6]:
        cut = reference.generate(variant.path, prompt, NEW_TOKENS, reference.eos_ids)
        eos = {"max_new_tokens": NEW_TOKENS, "eos_token_id": reference.eos_ids}
        assert reference.run(variant.path, prompt, **eos)[0] == cut
        stopped += len(cut) < NEW_TOKENS
    assert variant.index or stopped  # some do stop, at least for the first variant


@pytest.mark.parametrize("case", range(CASES_PER_VARIANT))
def test_greedy_tokens_equal_transformers(variant, corpus, case, engine, reference):
    block_size, (max_num_seqs, budget), caching, tight = MATRIX[
        (variant.index * CASES_PER_VARIANT + case) % len(MATRIX)
    ]
    llm = engine(
        variant.path,
        block_size=block_size,
        num_blocks=pool(block_size, tight),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    expected = expected_batch(variant.path, corpus, reference)

    outputs = greedy_batch(llm, corpus, reference)

    assert [tokens_of(output) for output in outputs] == expected
    assert [list(output.prompt_token_ids) for output in outputs] == corpus

    for i, (output, tokens) in enumerate(zip(outputs, expected, strict=True)):
        stopped = tokens[-1] in stopping(reference, i)
        assert output.outputs[0].finish_reason == ("stop" if stopped else "length")
        assert output.finished
        assert output.num_cached_tokens < len(output.prompt_token_ids)

    stats = llm.stats()
    assert tight == (stats.preemptions_recompute > 0), (
        "a tight pool did not preempt, or a roomy one did"
    )
    assert stats.output_tokens == sum(map(len, expected))
    if not caching:
        assert stats.prefix_hit_tokens == 0
        assert all(output.num_cached_tokens == 0 for output in outputs)


@pytest.mark.parametrize("block_size", [2, 8, 32])
def test_prompts_that_are_fully_cached_give_the_same_tokens(
    variant, corpus, block_size, engine, reference
):
    llm = engine(
        variant.path,
        block_size=block_size,
        num_blocks=pool(block_size, tight=False),
        max_model_len=MAX_MODEL_LEN,
    )
    expected = expected_batch(variant.path, corpus, reference)
    greedy_batch(llm, corpus, reference)

    again = greedy_batch(llm, corpus, reference)

    assert [tokens_of(output) for output in again] == expected
    # The last token is always computed.
    for output, prompt in zip(again, corpus, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // block_size * block_size


def test_a_prompt_computed_alone_in_chunks_of_one_token(
    variant, corpus, engine, reference
):
    llm = engine(variant.path, max_num_seqs=1, max_num_batched_tokens=1)
    assert [tokens_of(o) for o in greedy_batch(llm, corpus[:4], reference)] == (
        expected_batch(variant.path, corpus[:4], reference)
    )


@pytest.mark.parametrize("length", [14, 15, 16, 17, 18])
def test_preemption_at_a_block_boundary_keeps_every_token(
    llama, length, engine, reference, draw_prompts
):
    prompts = draw_prompts(llama, [length] * 4, 40, seed=length)
    for block_size, caching in itertools.product([4, 16], [True, False]):
        llm = engine(
            llama,
            block_size=block_size,
            num_blocks=64 // block_size + 1,
            max_model_len=64,
            enable_prefix_caching=caching,
        )
        params = greedy(40)
        outputs = llm.generate(prompts, params, use_tqdm=False)

        assert [tokens_of(output) for output in outputs] == [
            reference.generate(llama, prompt, 40) for prompt in prompts
        ]
        assert llm.stats().preemptions_recompute > 0


def test_one_sequence_may_fill_the_whole_pool(llama, engine, reference, draw_prompts):
    prompt = draw_prompts(llama, [8], 24)[0]
    llm = engine(llama, block_size=4, num_blocks=8, max_model_len=32)
    params = greedy(24)
    outputs = llm.generate([prompt] * 3, params, use_tqdm=False)
    assert [tokens_of(output) for output in outputs] == [
        reference.generate(llama, prompt, 24)
    ] * 3


def greedy_one(llm, prompt, count=16):
    params = greedy(count)
    return list(complete(llm, prompt, params).token_ids)


def test_a_tied_checkpoint_may_contain_the_head_too(
    make_model, edit_model, engine, reference, draw_prompts
):
    """Like Qwen3-0.6B: tie_word_embeddings, and an lm_head.weight all the same."""
    path = make_model("qwen3", seed=3, tie_word_embeddings=True)
    copy = edit_model(
        path,
        weights=lambda t: t.update(
            {"lm_head.weight": t["model.embed_tokens.weight"].clone()}
        ),
    )
    for prompt in draw_prompts(path, [5, 20], 16):
        assert greedy_one(engine(copy), prompt) == reference.generate(path, prompt, 16)


def test_a_config_written_by_transformers_4_means_the_same(
    make_model, edit_model, engine, reference, draw_prompts
):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    path = make_model("llama", seed=4, rope_parameters=rope)

    def rewrite(fields):
        old = fields.pop("rope_parameters")
        fields["rope_theta"] = old.pop("rope_theta")
        fields["rope_scaling"] = old
        fields["torch_dtype"] = fields.pop("dtype")

    old_style = edit_model(path, config=rewrite)
    for prompt in draw_prompts(path, [5, 40], 16):
        assert greedy_one(engine(old_style), prompt) == reference.generate(
            path, prompt, 16
        )


def test_optional_config_fields_may_be_absent(
    make_model, edit_model, engine, reference, draw_prompts
):
    """The first Llamas specify neither KV heads nor head_dim nor biases nor tying."""
    path = make_model("llama", seed=6, num_key_value_heads=4)

    def strip(fields):
        for name in (
            "num_key_value_heads",
            "head_dim",
            "attention_bias",
            "mlp_bias",
            "tie_word_embeddings",
            "rope_parameters",
            "rope_theta",
        ):
            fields.pop(name, None)

    sparse = edit_model(path, config=strip)
    for prompt in draw_prompts(path, [5, 40], 16):
        assert greedy_one(engine(sparse), prompt) == reference.generate(
            path, prompt, 16
        )


def test_rotary_base_is_read_from_the_config(
    make_model, engine, reference, draw_prompts
):
    path = make_model("llama", seed=7, rope_theta=37.0)
    plain = make_model("llama", seed=7)

    differs = 0
    for prompt in draw_prompts(path, [20, 40, 60], 16):
        assert greedy_one(engine(path), prompt) == reference.generate(path, prompt, 16)
        differs += reference.generate(path, prompt, 16) != reference.generate(
            plain, prompt, 16
        )

    assert differs


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_other_rotary_scaling_is_right_or_refused_by_name(
    rope, make_model, engine, reference, draw_prompts
):
    rope = {"rope_theta": 10000.0} | rope
    path = make_model("llama", seed=8, rope_parameters=rope, max_position_embeddings=64)
    try:
        llm = engine(path, max_model_len=64)
    except ValueError as error:
        assert rope["rope_type"] in str(error)
    else:
        for prompt in draw_prompts(path, [40], 16):
            assert greedy_one(llm, prompt) == reference.generate(path, prompt, 16)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_a_sliding_window_is_right_or_limits_the_length(
    family, make_model, engine, reference, draw_prompts
):
    """Within the window there is no difference; beyond it, the right tokens or none."""
    fields = {"sliding_window": 16, "use_cache": True}
    if family != "mistral":
        fields |= {"use_sliding_window": True, "max_window_layers": 0}

    path = make_model(family, seed=9, **fields)
    for prompt in draw_prompts(path, [5, 12], 4):
        llm = engine(path, max_model_len=16)
        assert greedy_one(llm, prompt, 4) == reference.generate(path, prompt, 4)

    try:
        llm = engine(path, max_model_len=96)
    except ValueError as error:
        assert "max_model_len" in str(error) and "16" in str(error)
    else:
        for prompt in draw_prompts(path, [5, 60], 16):
            assert greedy_one(llm, prompt) == reference.generate(path, prompt, 16)
    try:
        outputs = greedy_one(engine(path, max_model_len=None), [7] * 60)
    except ValueError as error:
        assert "max_model_len" in str(error) and "16" in str(error)
    else:
        assert outputs == reference.generate(path, [7] * 60, 16)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_sliding_window_that_is_switched_off_changes_nothing(
    family, make_model, engine, reference, draw_prompts
):
    """Qwen2's configs have a window and use_sliding_window = false."""
    path = make_model(family, seed=9, sliding_window=16, use_sliding_window=False)
    for prompt in draw_prompts(path, [60], 16):
        assert greedy_one(engine(path), prompt) == reference.generate(path, prompt, 16)


def test_a_bfloat16_checkpoint_runs_in_float32(
    make_model, tmp_path, engine, reference, draw_prompts
):
    path = make_model("qwen3", seed=10)
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    halves = {
        k: v.to(torch.bfloat16)
        for k, v in load_file(path / "model.safetensors").items()
    }
    save_file(halves, tmp_path / "model.safetensors", metadata={"format": "pt"})

    for prompt in draw_prompts(tmp_path, [5, 20], 16):
        assert greedy_one(engine(tmp_path), prompt) == reference.generate(
            tmp_path, prompt, 16
        )


def test_bfloat16_is_near_float32(make_model, engine, reference, draw_prompts):
    path = make_model("qwen3", seed=10)
    prompt = draw_prompts(path, [30], 16)[0]
    params = greedy(16, logprobs=4)
    llm = engine(path, dtype="bfloat16")
    output = complete(llm, prompt, params)
    tokens = list(output.token_ids)
    expected = torch.log_softmax(reference.logits(path, prompt + tokens), -1)[
        len(prompt) - 1 :
    ]

    for given, row in zip(output.logprobs, expected, strict=False):
        for token, logprob in floats(given).items():
            assert abs(logprob - float(row[token])) < 0.5


def test_eos_ids_come_from_the_config_where_there_is_no_generation_config(
    make_model, edit_model, engine, reference, draw_prompts
):
    path = make_model("llama", seed=11)
    prompt = draw_prompts(path, [6], 16)[0]
    tokens = reference.generate(path, prompt, 16)
    copy = edit_model(
        path, config=lambda fields: fields.update(eos_token_id=[tokens[5], 2])
    )
    (copy / "generation_config.json").unlink()
    params = SamplingParams(temperature=0, max_tokens=16)
    output = complete(engine(copy), prompt, params)

    assert list(output.token_ids) == reference.generate(
        path, prompt, 16, eos=[tokens[5], 2]
    )
    assert output.finish_reason == "stop"


def test_eos_ids_outside_the_vocabulary_are_left_out(
    make_model, edit_model, engine, reference
):
    path = make_model("llama", seed=11)
    copy = edit_model(path)
    eos = {"eos_token_id": [3, 10**6, -1]}
    (copy / "generation_config.json").write_text(json.dumps(eos))
    llm = engine(copy)
    prompt = [9, 8, 7]
    assert llm.eos_token_ids == [3]

    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=5)
    output = complete(llm, prompt, params)
    free = reference.generate(path, prompt, 12)
    assert 3 not in free[:5]  # nothing is suppressed
    assert list(output.token_ids) == reference.generate(path, prompt, 12, eos=[3])


def test_a_model_without_any_eos_runs_to_max_tokens(
    make_model, edit_model, engine, reference, draw_prompts
):
    path = make_model("llama", seed=11)
    copy = edit_model(path, config=lambda fields: fields.update(eos_token_id=None))
    (copy / "generation_config.json").write_text(
        json.dumps({"transformers_version": "5.0.0"})
    )
    prompts = draw_prompts(path, [3, 6, 9], 40)
    params = SamplingParams(temperature=0, max_tokens=40)

    for output, prompt in zip(
        engine(copy).generate(prompts, params, use_tqdm=False), prompts, strict=True
    ):
        assert tokens_of(output) == reference.generate(path, prompt, 40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_greedy_tokens_equal_transformers_under_random_settings(
    variant, seed, engine, reference, draw_prompts
):
    """Prompts that extend each other, in random batches through one engine."""
    rng = random.Random(1000 * variant.index + seed)
    block_size = rng.choice([2, 4, 8, 16, 32])
    max_num_seqs = rng.randint(1, 24)
    llm = engine(
        variant.path,
        block_size=block_size,
        num_blocks=rng.randint(1, 4) * 96 // block_size + rng.randint(0, 3),
        max_model_len=96,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 7, 60, 500]),
        enable_prefix_caching=rng.random() < 0.7,
    )

    stems = draw_prompts(variant.path, [rng.randint(8, 40) for _ in range(3)], 40, seed)
    for round_number in range(3):
        prompts = []
        for _ in range(rng.randint(1, 24)):
            stem = rng.choice(stems)
            if rng.random() < 0.3:
                prompts.append(stem)
                continue
            prefix = stem[: rng.randint(0, len(stem))]
            length = len(prefix) + rng.randint(1, 16)
            prompt_seed = rng.randrange(10**6)
            prompts += draw_prompts(variant.path, [length], 40, prompt_seed, prefix)

        counts = [rng.randint(1, 40) for _ in prompts]
        params = [
            SamplingParams(
                temperature=0, max_tokens=count, ignore_eos=i % 2 == round_number % 2
            )
            for i, count in enumerate(counts)
        ]

        outputs = llm.generate(prompts, params, use_tqdm=False)
        for output, prompt, count, param in zip(
            outputs, prompts, counts, params, strict=True
        ):
            eos = [] if param.ignore_eos else reference.eos_ids
            expected = reference.generate(variant.path, prompt, count, eos)
            assert tokens_of(output) == expected
