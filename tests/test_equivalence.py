"""Greedy tokens equal those of transformers, however the engine schedules the work.

Every model variant meets block sizes, budgets, prefix caching and pools too small for
the batch. A batch has lengths around block boundaries, shared prefixes and identical
prompts. Half of the requests stop at an EOS id, half run on past it.
"""

import itertools
import random

import pytest

from helpers import complete, first_tokens_of, greedy
from nanopaged.loading.checkpoint import BUNDLED

LENGTHS = [1, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33]
NEW_TOKENS, MAX_MODEL_LEN = 16, 64
# block size, (max_num_seqs, max_num_batched_tokens), prefix caching, a tight pool
MATRIX = list(itertools.product(
    [1, 4, 8, 16, 32], [(4, 4), (7, 16), (32, 2048)], [True, False], [True, False]))
random.Random(0).shuffle(MATRIX)


@pytest.fixture(scope="session")
def corpus(variant, draw_prompts):
    """A variant's batch of prompts, long and short ones in random order."""
    prompts = draw_prompts(variant.path, LENGTHS, NEW_TOKENS, seed=variant.index)
    prompts += draw_prompts(variant.path, [33, 40], NEW_TOKENS, 50, prompts[10])
    prompts += [prompts[0], prompts[7], prompts[10]]
    random.Random(variant.index).shuffle(prompts)
    return prompts


def check_batch(llm, path, prompts, reference):
    """All answers are those of transformers; every second request stops at an EOS."""
    eos = [[] if i % 2 else reference.eos_ids for i in range(len(prompts))]
    params = [greedy(NEW_TOKENS, ignore_eos=not stop) for stop in eos]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    expected = [reference.generate(path, prompt, NEW_TOKENS, stop)
                for prompt, stop in zip(prompts, eos, strict=True)]
    assert first_tokens_of(outputs) == expected
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [output.outputs[0].finish_reason for output in outputs] == [
        "stop" if tokens[-1] in stop else "length"
        for tokens, stop in zip(expected, eos, strict=True)]
    return outputs


def check_case(case, variant, prompts, engine, reference):
    block_size, (max_num_seqs, budget), caching, is_tight = MATRIX[case % len(MATRIX)]
    one = MAX_MODEL_LEN // block_size
    llm = engine(
        variant.path, block_size=block_size, max_model_len=MAX_MODEL_LEN,
        num_blocks=one + 1 if is_tight else 2 * len(prompts) * one,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
        enable_prefix_caching=caching, swap_space=0.001,
        preemption_mode="recompute" if case % 2 else "swap",
        attention_backend="torch" if case % 3 == 0 else "auto")
    check_batch(llm, variant.path, prompts, reference)
    stats = llm.stats()
    preempted = stats.preemptions_recompute + stats.preemptions_swap > 0
    assert is_tight == preempted or block_size == 32, "is the pool tight or not?"
    if not is_tight:
        again = check_batch(llm, variant.path, prompts, reference)
        # The last token is always computed; and all before it is cached.
        assert [output.num_cached_tokens for output in again] == [
            (len(prompt) - 1) // block_size * block_size * caching
            for prompt in prompts]


def test_greedy_tokens_equal_transformers(variant, corpus, engine, reference):
    """Two cases for each variant, other ones for each."""
    outputs = [reference.generate(variant.path, p, NEW_TOKENS) for p in corpus]
    assert len(set(map(str, outputs))) == len(set(map(str, corpus)))
    assert len(set(itertools.chain(*outputs))) > 40, "weights whose outputs hardly vary"
    for case in (2 * variant.index, 2 * variant.index + 1):
        check_case(case, variant, corpus, engine, reference)


@pytest.mark.slow
def test_greedy_tokens_equal_transformers_in_all_cases(
    variant, corpus, engine, reference
):
    """Each case for three variants."""
    for case in range(variant.index % 3, len(MATRIX), 3):
        check_case(case, variant, corpus, engine, reference)


# -- Checkpoints and configs of other times --------------------------------------------


def drop(*names):
    return lambda fields: [fields.pop(name, None) for name in names]


def as_transformers_4(fields):
    old = fields.pop("rope_parameters")
    fields |= {"rope_theta": old.pop("rope_theta"), "rope_scaling": old,
               "torch_dtype": fields.pop("dtype")}


def rope(kind, **more):
    return {"rope_theta": 5000.0, "rope_type": kind, "factor": 4.0} | more


LLAMA3 = rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)


@pytest.mark.parametrize(("family", "fields", "config"), [
    ("llama", {"rope_parameters": LLAMA3}, as_transformers_4),
    # The first Llamas state neither KV heads nor head_dim nor biases nor tying.
    ("llama", {"num_key_value_heads": 4}, drop(
        "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias",
        "tie_word_embeddings", "rope_parameters", "rope_theta")),
    ("llama", {"rope_parameters": rope("linear")}, None),
    ("llama", {"rope_parameters": rope(
        "yarn", original_max_position_embeddings=32)}, None),
    ("llama", {"rope_theta": 37.0}, None),
    ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, None),
], ids=["transformers-4", "first-llama", "linear", "yarn", "theta", "window-off"])
def test_a_config_means_what_it_means_to_transformers(
    family, fields, config, make_model, edit_model, engine, reference, draw_prompts
):
    path = make_model(family, seed=8, **fields)
    llm = engine(edit_model(path, config))
    for prompt in draw_prompts(path, [5, 60], 12):
        expected = reference.generate(path, prompt, 12)
        assert complete(llm, prompt, greedy(12)).token_ids == expected


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_sequences_may_be_longer_than_their_window(
    family, make_model, engine, reference, draw_prompts
):
    """In Mistral every layer has one, in Qwen those after the first."""
    window = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    path = make_model(family, seed=9, **window)
    prompts = draw_prompts(path, [3, 8, 40], 24)
    for options in ({}, {"attention_backend": "torch", "max_num_batched_tokens": 11},
                    {"block_size": 16, "max_num_batched_tokens": 7}):
        llm = engine(path, **options)
        outputs = llm.generate(prompts, greedy(24), use_tqdm=False)
        assert first_tokens_of(outputs) == [
            reference.generate(path, prompt, 24) for prompt in prompts]


def test_the_bundled_model_and_its_tokenizer_are_those_of_transformers(
    engine, reference
):
    llm = engine(None, max_model_len=128)
    tokenizer = llm.get_tokenizer()
    assert llm.eos_token_ids == [tokenizer.eos_token_id]
    for prompt in ("ROMEO:\n", "naïve 😀: this is no Shakespeare."):
        ids = tokenizer(prompt).input_ids
        assert tokenizer.decode(ids) == prompt
        assert reference.is_clear(BUNDLED, ids, 24), f"choose another than {prompt!r}"
        output = complete(llm, prompt, greedy(24))
        assert output.token_ids == reference.generate(BUNDLED, ids, 24)
        assert output.text == tokenizer.decode(output.token_ids)
