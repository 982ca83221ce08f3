"""A script for vLLM runs after a change of its import line, or is told by name why it
does not.

Names, defaults and shapes are those of vLLM 0.10 and later: keyword arguments of `LLM`
and `SamplingParams`, the forms of a prompt, the arguments of `chat`, and the fields of
what comes back. A value that asks for nothing we lack is taken; what we lack is refused
by name and with a reason, and a slip of the pen gets a "did you mean". At the end are
vLLM's offline examples, shortened, with nothing changed but the import lines and the
model.
"""

import copy
import inspect
import json
import logging
import math
import pydoc
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import helpers
from helpers import drain, first_tokens_of, message_of

OPTIONS = {"dtype": "float32", "device": "cpu", "num_blocks": 64, "block_size": 4}
greedy = partial(helpers.greedy, max_tokens=8)


def one(llm, prompt, params=None):
    """The first completion of a prompt."""
    return llm.generate(prompt, params or greedy(), use_tqdm=False)[0].outputs[0]


@pytest.fixture(scope="module")
def llm(text_model):
    """One engine for all that only asks; it must be idle between two tests."""
    from nanopaged import LLM

    with LLM(str(text_model), max_model_len=128, **OPTIONS) as engine:
        yield engine
        assert not engine.has_unfinished_requests()
        assert engine.stats().blocks_used == 0


# --- the keyword arguments of LLM ---

# What vLLM's scripts pass, and what we can do: name, values that are taken.
TAKEN = [
    ("trust_remote_code", [False, True]),
    ("tokenizer", [None]),
    ("skip_tokenizer_init", [False]),
    ("revision", [None, "main"]),
    ("download_dir", [None]),
    ("tokenizer_mode", ["auto"]),
    ("enable_chunked_prefill", [None, True]),
    ("disable_log_stats", [True, False]),
    ("disable_custom_all_reduce", [True, False]),
    ("distributed_executor_backend", [None, "mp"]),
    ("quantization", [None]),
    ("hf_overrides", [None, {}]),
    ("num_gpu_blocks_override", [None]),
    ("max_logprobs", [20, -1]),
    ("dtype", ["float", "half", torch.float32, torch.bfloat16, "bfloat16", "auto"]),
    ("load_format", ["auto", "safetensors"]),
    ("seed", [None, 0, 7]),
    ("swap_space", [0, 0.5]),
    ("gpu_memory_utilization", [0.5]),
    ("enforce_eager", [True, False]),
    ("tensor_parallel_size", [1]),
    ("enable_prefix_caching", [True, False]),
]

# What vLLM can do and we cannot.
REFUSED = [
    ("quantization", "awq"),
    ("tokenizer_mode", "slow"),
    ("tokenizer_mode", "mistral"),
    ("enable_chunked_prefill", False),
    ("distributed_executor_backend", "ray"),
    ("load_format", "gguf"),
    ("load_format", "bitsandbytes"),
    ("enable_lora", True),
    ("speculative_config", {"method": "ngram"}),
    ("pipeline_parallel_size", 2),
    ("kv_cache_dtype", "fp8"),
    ("cpu_offload_gb", 4),
    ("limit_mm_per_prompt", {"image": 1}),
    ("guided_decoding_backend", "xgrammar"),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in TAKEN for value in values],
    ids=str,
)
def test_keyword_arguments_of_vllm_are_taken(name, value, text_model):
    from nanopaged import LLM

    with LLM(
        model=str(text_model), **(OPTIONS | {"max_model_len": 64, name: value})
    ) as llm:
        assert len(one(llm, "the block").token_ids) == 8


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=str)
def test_what_is_lacking_is_refused_by_name_and_reason(name, value, text_model):
    """And no other name is suggested for one that vLLM has."""
    from nanopaged import LLM

    message = message_of(lambda: LLM(str(text_model), **(OPTIONS | {name: value})))
    assert name in message
    assert len(message) > len(name) + 20, "a name is no reason"
    assert "unexpected keyword" not in message
    assert "did you mean" not in message.lower()


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("max_model_length", "max_model_len"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("tensor_paralel_size", "tensor_parallel_size"),
        ("trust_remote", "trust_remote_code"),
        ("enforce_eagre", "enforce_eager"),
    ],
)
def test_a_typo_of_llm_gets_a_suggestion(typo, meant, text_model):
    from nanopaged import LLM

    message = message_of(lambda: LLM(str(text_model), **{typo: 1}), TypeError)
    assert typo in message
    assert re.search(f"did you mean.*{meant}", message, re.IGNORECASE), message


def test_a_name_like_no_other_gets_no_suggestion(text_model):
    from nanopaged import LLM, SamplingParams

    for make in (
        lambda: LLM(str(text_model), zebra=1),
        lambda: SamplingParams(zebra=1),
    ):
        message = message_of(make, TypeError)
        assert "zebra" in message
        assert "did you mean" not in message.lower()


def test_an_ide_and_help_know_the_keyword_arguments():
    from nanopaged import LLM

    parameters = inspect.signature(LLM).parameters
    text = pydoc.plain(pydoc.render_doc(LLM))
    names = {name for name, _ in TAKEN}
    names |= {
        "model",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
    }
    for name in sorted(names):
        assert name in parameters, f"{name} is not in the signature"
        assert parameters[name].annotation is not inspect.Parameter.empty
        assert name in text, f"help(LLM) does not list {name}"


def test_dtypes_by_any_name_are_what_they_say(text_model):
    from nanopaged import LLM

    names = {
        "half": torch.float16,
        "float": torch.float32,
        torch.bfloat16: torch.bfloat16,
    }
    for name, dtype in names.items():
        with LLM(str(text_model), **(OPTIONS | {"dtype": name})) as llm:
            assert llm.runner.dtype == dtype
    message = message_of(
        lambda: LLM(str(text_model), **(OPTIONS | {"dtype": torch.int8}))
    )
    assert "dtype" in message and "int8" in message


def test_num_gpu_blocks_override_is_num_blocks(text_model):
    from nanopaged import LLM

    options = {"dtype": "float32", "device": "cpu", "block_size": 4}
    with LLM(str(text_model), num_gpu_blocks_override=33, **options) as llm:
        assert llm.stats().blocks_total == 33


def test_a_tokenizer_of_its_own(llama, text_model, tokenizer):
    """The model's directory has none; another one has."""
    from nanopaged import LLM

    options = OPTIONS | {"max_model_len": 64}
    for name in (str(text_model), Path(text_model)):
        with LLM(str(llama), tokenizer=name, **options) as llm:
            assert llm.get_tokenizer().encode("a block") == tokenizer.encode("a block")
    message = message_of(lambda: LLM(str(llama), tokenizer="/no/such/place", **options))
    assert "tokenizer" in message and "/no/such/place" in message


def test_skip_tokenizer_init_serves_token_ids_alone(text_model, llm):
    from nanopaged import LLM

    expected = one(llm, [5, 6, 7])
    with LLM(
        str(text_model), skip_tokenizer_init=True, max_model_len=64, **OPTIONS
    ) as plain:
        output = one(plain, {"prompt_token_ids": [5, 6, 7]})
        assert list(output.token_ids) == list(expected.token_ids)
        assert output.text == ""
        assert "tokenizer" in message_of(lambda: one(plain, "text"))
        assert "tokenizer" in message_of(
            plain.get_tokenizer, (ValueError, TypeError, RuntimeError)
        )


def test_hf_overrides_change_the_config(text_model):
    from nanopaged import LLM

    overrides = {"max_position_embeddings": 40}
    with LLM(str(text_model), hf_overrides=overrides, **OPTIONS) as llm:
        assert "40" in message_of(lambda: llm.add_request([5] * 50, greedy()))
    bad = {"model_type": "falcon"}
    message = message_of(lambda: LLM(str(text_model), hf_overrides=bad, **OPTIONS))
    assert "falcon" in message
    message = message_of(lambda: LLM(str(text_model), hf_overrides=[1], **OPTIONS))
    assert "hf_overrides" in message


def test_max_logprobs_bounds_logprobs(text_model):
    from nanopaged import LLM

    with LLM(str(text_model), max_logprobs=5, max_model_len=64, **OPTIONS) as llm:
        assert len(one(llm, [5, 6], greedy(logprobs=5)).logprobs) == 8
        message = message_of(lambda: one(llm, [5, 6], greedy(logprobs=6)))
        assert "logprobs" in message and "6" in message and "5" in message
        assert "logprobs" in message_of(lambda: one(llm, [5, 6], greedy(logprobs=-1)))
    with LLM(str(text_model), max_logprobs=0, max_model_len=64, **OPTIONS) as llm:
        assert "logprobs" in message_of(lambda: one(llm, [5, 6], greedy(logprobs=1)))


# --- SamplingParams ---

NEUTRAL = [
    ("presence_penalty", 0.0),
    ("presence_penalty", 0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1.0),
    ("repetition_penalty", 1),
    ("skip_special_tokens", True),
    ("skip_special_tokens", False),
    ("spaces_between_special_tokens", True),
    ("spaces_between_special_tokens", False),
    ("detokenize", True),
    ("detokenize", False),
    ("include_stop_str_in_output", True),
    ("logprobs", -1),
    ("seed", -1),
    ("bad_words", []),
    ("bad_words", None),
    ("top_k", None),
    ("top_k", -1),
    ("stop", []),
    ("stop_token_ids", []),
    ("prompt_logprobs", None),
    ("logit_bias", None),
    ("allowed_token_ids", None),
    ("structured_outputs", None),
    ("guided_decoding", None),
]

LACKING = [
    ("presence_penalty", 0.2),
    ("frequency_penalty", -0.5),
    ("repetition_penalty", 1.1),
    ("bad_words", ["block"]),
    ("prompt_logprobs", 1),
    ("logit_bias", {5: 1.0}),
    ("allowed_token_ids", [5]),
    ("structured_outputs", {"regex": "a*"}),
    ("guided_decoding", {"regex": "a*"}),
]


@pytest.mark.parametrize(("name", "value"), NEUTRAL, ids=str)
def test_sampling_params_of_vllm_are_taken(name, value, llm):
    plain = one(llm, [5, 6, 7])
    output = one(llm, [5, 6, 7], greedy(**{name: value}))
    assert list(output.token_ids) == list(plain.token_ids)


@pytest.mark.parametrize("top_k", [None, 0])
def test_no_top_k_means_all_tokens(top_k):
    assert greedy(top_k=top_k).top_k == 0


@pytest.mark.parametrize(("name", "value"), LACKING, ids=str)
def test_sampling_params_that_are_lacking_are_refused(name, value):
    message = message_of(lambda: greedy(**{name: value}))
    assert name in message
    assert "unexpected keyword" not in message
    assert len(message) > len(name) + 20
    if name.endswith("penalty"):
        assert "tour" in message, "it is an exercise there"


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("top-k", "top_k")],
)
def test_a_typo_of_sampling_params_gets_a_suggestion(typo, meant):
    from nanopaged import SamplingParams

    message = message_of(lambda: SamplingParams(**{typo: 1}), TypeError)
    assert typo in message
    assert re.search(f"did you mean.*{meant}", message, re.IGNORECASE), message


def test_params_can_be_changed_and_every_change_is_checked():
    params = greedy(min_tokens=2)
    params.max_tokens = 64
    params.temperature = 0.5
    params.stop = ["x"]
    assert (params.max_tokens, params.temperature) == (64, 0.5)
    for name, bad in (
        ("max_tokens", -1),
        ("max_tokens", 1),  # fewer than min_tokens
        ("min_tokens", 100),  # more than max_tokens
        ("temperature", math.nan),
        ("n", True),
        ("stop", [5]),
        ("repetition_penalty", 1.5),
    ):
        before = repr(params)
        assert name in message_of(lambda name=name, bad=bad: setattr(params, name, bad))
        assert repr(params) == before, "a refused change changes nothing"


def test_a_change_by_a_wrong_name_is_an_error():
    params = greedy()
    kinds = (AttributeError, TypeError)
    message = message_of(lambda: setattr(params, "temprature", 0.5), kinds)
    assert "temprature" in message and "temperature" in message.replace(
        "temprature", ""
    )


@pytest.mark.parametrize(
    "how",
    [copy.copy, copy.deepcopy, lambda params: params.clone()],
    ids=["copy", "deep", "clone"],
)
def test_params_can_be_copied(how):
    params = greedy(stop=["a", "b"], stop_token_ids=[3], seed=5)
    other = how(params)
    assert other == params and other is not params
    other.max_tokens = 64
    other.seed = None
    assert (params.max_tokens, params.seed) == (8, 5)


def test_a_request_in_flight_keeps_what_it_was_given(llm):
    """Its params, and the lists in them."""
    prompt = [5, 6, 7]
    expected = list(one(llm, prompt, greedy(max_tokens=20)).token_ids)
    tokens = []
    params = greedy(max_tokens=20, stop=["never to be said"], stop_token_ids=tokens)
    request = llm.add_request(prompt, params)
    llm.step()
    params.max_tokens = 2
    params.temperature = 5.0
    params.stop = ["e"]
    tokens.append(expected[5])
    params.stop_token_ids = [expected[6]]
    assert list(drain(llm)[request][-1].outputs[0].token_ids) == expected
    assert len(one(llm, prompt, params).token_ids) <= 2, (
        "the next request has what is there now"
    )


def test_seed_minus_one_is_no_seed(llm):
    from nanopaged import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=12, seed=-1, ignore_eos=True)
    outputs = llm.generate([[5, 6]] * 3, params, use_tqdm=False)
    assert len({tuple(tokens) for tokens in first_tokens_of(outputs)}) > 1


# --- what becomes text ---


@pytest.fixture(scope="module")
def speaker(make_scripted_model, tokenizer):
    """A model that says "a", the begin token, "b", and the end token; and these four
    ids.
    """
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    (b,) = tokenizer.encode("b", add_special_tokens=False)
    ids = [a, tokenizer.bos_token_id, b, tokenizer.eos_token_id]
    return make_scripted_model(ids), ids


def test_the_token_that_stopped_stays_in_token_ids_and_out_of_text(speaker, engine):
    path, (a, bos, b, end) = speaker
    llm = engine(path)
    plain = one(llm, [end], greedy(ignore_eos=False))
    assert list(plain.token_ids) == [a, bos, b, end]
    assert (plain.text, plain.finish_reason, plain.stop_reason) == ("ab", "stop", None)
    stopped = one(llm, [end], greedy(stop_token_ids=[b]))
    assert list(stopped.token_ids) == [a, bos, b]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (
        "a",
        "stop",
        b,
    )
    kept = one(llm, [end], greedy(stop_token_ids=[b], include_stop_str_in_output=True))
    assert (list(kept.token_ids), kept.text) == ([a, bos, b], "ab")
    for params in (greedy(stop_token_ids=[b]), greedy(ignore_eos=False)):
        *_, last = llm.stream([[end]], params)
        assert last.outputs[0].text == one(llm, [end], params).text, "streamed or not"


def test_special_tokens_are_text_where_they_are_asked_for(speaker, engine):
    """But for the one that stops."""
    path, (*_, end) = speaker
    llm = engine(path)
    params = greedy(ignore_eos=False, skip_special_tokens=False)
    assert one(llm, [end], params).text == "a<|bos|>b"
    more = greedy(max_tokens=6, skip_special_tokens=False)
    assert one(llm, [end], more).text == "a<|bos|>b<|end|>a<|bos|>"


def test_stop_strings_are_left_out_or_kept(make_scripted_model, tokenizer, engine):
    script = tokenizer.encode("the block", add_special_tokens=False)
    llm = engine(make_scripted_model(script))
    out = one(llm, script[-1:], greedy(stop=["zzz", "bl"]))
    assert (out.text, out.finish_reason, out.stop_reason) == ("the ", "stop", "bl")
    kept = one(llm, script[-1:], greedy(stop="bl", include_stop_str_in_output=True))
    assert (kept.text, kept.stop_reason) == ("the bl", "bl")
    assert list(kept.token_ids) == list(out.token_ids)
    long = one(llm, script[-1:], greedy(max_tokens=2))
    assert (long.finish_reason, long.stop_reason) == ("length", None)


def test_without_detokenizing_there_is_no_text(llm):
    output = one(llm, "the block", greedy(detokenize=False))
    assert output.text == ""
    assert list(output.token_ids) == list(one(llm, "the block").token_ids)
    assert "detokenize" in message_of(lambda: greedy(detokenize=False, stop=["x"]))


# --- prompts ---


def test_all_forms_of_a_prompt_give_the_same_answer(llm, tokenizer):
    from nanopaged import TextPrompt, TokensPrompt

    text = "the block table"
    ids = tokenizer(text).input_ids
    expected = list(one(llm, text).token_ids)
    forms = [
        text,
        {"prompt": text},
        TextPrompt(prompt=text),
        ids,
        tuple(ids),
        {"prompt_token_ids": ids},
        TokensPrompt(prompt_token_ids=ids),
        {"prompt_token_ids": tuple(ids)},
        {"prompt_token_ids": np.array(ids)},
        np.array(ids),
        np.array(ids, np.int32),
        torch.tensor(ids),
        torch.tensor(ids, dtype=torch.int32),
        [np.int64(token) for token in ids],
        tokenizer(text),
        dict(tokenizer(text)),
        {"prompt": text, "prompt_token_ids": ids},
        {"prompt": text, "cache_salt": "mine"},
        {"prompt_token_ids": ids, "cache_salt": "mine"},
    ]
    for form in forms:
        assert list(one(llm, form).token_ids) == expected, form
        output = llm.generate([form], greedy(), use_tqdm=False)[0]
        assert output.prompt_token_ids == ids, form
        assert all(type(token) is int for token in output.prompt_token_ids)
    assert first_tokens_of(llm.generate(forms, greedy(), use_tqdm=False)) == [
        expected
    ] * len(forms)


def test_with_both_forms_the_ids_count_and_the_text_is_told(llm):
    output = llm.generate(
        {"prompt": "what it says", "prompt_token_ids": [5, 6, 7]},
        greedy(),
        use_tqdm=False,
    )[0]
    assert output.prompt == "what it says"
    assert output.prompt_token_ids == [5, 6, 7]
    assert list(output.outputs[0].token_ids) == list(one(llm, [5, 6, 7]).token_ids)


def test_several_prompts_in_one_array_or_batch(llm, tokenizer):
    texts = ["the block table", "first come, first served"]
    expected = first_tokens_of(llm.generate(texts, greedy(), use_tqdm=False))
    matrix = np.array([[5, 6, 7], [8, 9, 10]])
    rows = first_tokens_of(llm.generate(matrix.tolist(), greedy(), use_tqdm=False))
    arrays = [np.array(texts), np.array(texts, object)]
    for batch in (tuple(texts), *arrays, tokenizer(texts).input_ids):
        assert (
            first_tokens_of(llm.generate(batch, greedy(), use_tqdm=False)) == expected
        )
    for batch in (
        matrix,
        torch.tensor(matrix),
        list(matrix),
        list(torch.tensor(matrix)),
    ):
        assert first_tokens_of(llm.generate(batch, greedy(), use_tqdm=False)) == rows
    encoded = tokenizer(texts[0], return_tensors="pt").input_ids
    assert (
        first_tokens_of(llm.generate(encoded, greedy(), use_tqdm=False)) == expected[:1]
    )
    assert llm.generate([], greedy(), use_tqdm=False) == []


def test_a_salt_in_the_prompt_keeps_the_cache_apart(llm):
    prompt = [(11 * i) % 290 for i in range(20)]
    salted = {"prompt_token_ids": prompt, "cache_salt": "a"}

    def cached(prompt):
        return llm.generate(prompt, greedy(), use_tqdm=False)[0].num_cached_tokens

    assert [cached(prompt), cached(prompt), cached(salted), cached(salted)] == [
        0,
        16,
        0,
        16,
    ]
    assert cached(salted | {"cache_salt": "b"}) == 0
    for bad in (5, "", b"a"):
        assert "cache_salt" in message_of(
            lambda bad=bad: cached(salted | {"cache_salt": bad})
        )


def test_what_a_prompt_holds_and_we_lack_is_refused_by_name(llm):
    for key in ("multi_modal_data", "prompt_embeds", "encoder_prompt"):
        message = message_of(
            lambda key=key: llm.add_request({"prompt": "a", key: {}}, greedy())
        )
        assert key in message
    message = message_of(lambda: llm.add_request({"promt": "a"}, greedy()))
    assert "promt" in message and "prompt" in message


def test_arguments_of_generate_in_vllms_order_and_by_its_names(llm):
    expected = first_tokens_of(llm.generate([[5, 6]], greedy(), use_tqdm=False))
    calls = [
        lambda: llm.generate([[5, 6]], greedy(), use_tqdm=False),
        lambda: llm.generate(
            prompts=[[5, 6]], sampling_params=greedy(), use_tqdm=False
        ),
        lambda: llm.generate([[5, 6]], [greedy()], use_tqdm=False),
    ]
    for call in calls:
        assert first_tokens_of(call()) == expected
    message = message_of(
        lambda: llm.generate([[5, 6]], greedy(), use_tqdm=False, lora_request=object())
    )
    assert "lora_request" in message


# --- chat ---

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a block?"},
]


def rendered(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(
        messages, return_dict=False, **({"add_generation_prompt": True} | options)
    )


def test_chat_renders_as_the_tokenizer_does(llm, tokenizer):
    talk = [*TALK, {"role": "assistant", "content": "It is"}]
    template = (
        "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{{ mood }}{{ tools }}"
    )
    tools = [{"type": "function", "function": {"name": "look", "description": "Look."}}]
    cases = [
        ({}, {}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        (
            {"add_generation_prompt": False, "continue_final_message": True},
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
        ({"chat_template": template}, {"chat_template": template}),
        (
            {"chat_template": template, "chat_template_kwargs": {"mood": "glad"}},
            {"chat_template": template, "mood": "glad"},
        ),
        (
            {"chat_template": template, "tools": tools},
            {"chat_template": template, "tools": tools},
        ),
    ]
    for options, expected in cases:
        output = llm.chat(talk, greedy(), use_tqdm=False, **options)[0]
        assert output.prompt_token_ids == rendered(tokenizer, talk, **expected), options
    several = llm.chat([TALK, talk], greedy(), use_tqdm=False)
    assert [output.prompt_token_ids for output in several] == [
        rendered(tokenizer, TALK),
        rendered(tokenizer, talk),
    ]


def test_chat_refuses_both_ways_to_go_on(llm):
    options = {"add_generation_prompt": True, "continue_final_message": True}
    talk = [*TALK, {"role": "assistant", "content": "It is"}]
    message = message_of(lambda: llm.chat(talk, greedy(), use_tqdm=False, **options))
    assert "continue_final_message" in message and "add_generation_prompt" in message


def test_content_may_be_a_list_of_text_parts(llm, tokenizer):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "a block?"}]
    single = [
        {"role": "user", "content": [{"type": "text", "text": "What is a block?"}]}
    ]
    plain = [{"role": "user", "content": "What is a block?"}]
    expected = rendered(tokenizer, plain)
    assert llm.chat(single, greedy(), use_tqdm=False)[0].prompt_token_ids == expected
    # vLLM joins the parts of one message by line breaks.
    joined = rendered(tokenizer, [{"role": "user", "content": "What is \na block?"}])
    several = [{"role": "user", "content": parts}]
    assert llm.chat(several, greedy(), use_tqdm=False)[0].prompt_token_ids == joined
    assert several[0]["content"] is parts, "the caller's messages stay as they are"


def test_chat_with_a_template_needs_none_of_the_tokenizer(
    make_model, tokenizer, engine, tmp_path
):
    path = shutil.copytree(
        make_model("llama", seed=5, vocab_size=len(tokenizer)), tmp_path / "model"
    )
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    bare.save_pretrained(path)
    llm = engine(path)
    assert "chat template" in message_of(
        lambda: llm.chat(TALK, greedy(), use_tqdm=False)
    )
    template = "{{ messages[0]['content'] }}"
    output = llm.chat(TALK, greedy(), use_tqdm=False, chat_template=template)[0]
    assert output.prompt_token_ids == rendered(tokenizer, TALK, chat_template=template)


# --- results ---


def test_logprobs_are_objects_with_rank_and_token(llm, tokenizer):
    """The sampled token first, then the most likely ones in their order."""
    from nanopaged import Logprob, SamplingParams

    params = SamplingParams(
        temperature=1.5, seed=3, max_tokens=20, logprobs=3, ignore_eos=True
    )
    output = one(llm, [5, 6, 7], params)
    full = one(llm, [5, 6, 7], SamplingParams(**(vars_of(params) | {"logprobs": -1})))
    assert list(full.token_ids) == list(output.token_ids)
    assert len(output.logprobs) == len(output.token_ids) == 20
    outside = 0
    rows = zip(output.token_ids, output.logprobs, full.logprobs, strict=True)
    for token, row, everything in rows:
        order = sorted(everything, key=lambda t: -everything[t].logprob)
        assert len(everything) == len(tokenizer)
        assert next(iter(row)) == next(iter(everything)) == token
        outside += token not in order[:3]
        assert list(row) == [token, *(t for t in order[:3] if t != token)]
        for t, entry in row.items():
            assert isinstance(entry, Logprob)
            assert entry.logprob == pytest.approx(everything[t].logprob)
            assert entry.rank == order.index(t) + 1
            assert entry.decoded_token == tokenizer.decode([t])
        assert sum(math.exp(e.logprob) for e in everything.values()) == pytest.approx(
            1, abs=1e-3
        )
    assert outside > 3, "the sampled token should be a rare one now and then"
    total = sum(
        row[t].logprob for t, row in zip(output.token_ids, output.logprobs, strict=True)
    )
    assert output.cumulative_logprob == pytest.approx(total)


def vars_of(params):
    """What the test set, whatever kind of class the params are."""
    names = ("temperature", "seed", "max_tokens", "ignore_eos")
    return {name: getattr(params, name) for name in names}


def test_logprobs_zero_is_the_sampled_token_alone(llm):
    output = one(llm, [5, 6, 7], greedy(logprobs=0))
    assert [list(row) for row in output.logprobs] == [
        [token] for token in output.token_ids
    ]
    assert all(
        row[t].rank == 1
        for t, row in zip(output.token_ids, output.logprobs, strict=True)
    )
    assert one(llm, [5, 6, 7]).logprobs is None


def test_logprobs_without_a_tokenizer_have_no_text(llama, engine):
    output = one(engine(llama), [5, 6, 7], greedy(logprobs=1))
    entry = output.logprobs[0][output.token_ids[0]]
    assert entry.decoded_token is None
    assert entry.rank == 1


def test_the_fields_of_an_output(llm):
    output = llm.generate(["the block"], greedy(n=1), use_tqdm=False)[0]
    assert output.finished is True
    assert output.outputs[0].finished() is True
    assert output.prompt == "the block"
    assert output.prompt_logprobs is None
    assert output.num_cached_tokens is not None
    assert output.outputs[0].index == 0
    assert output.outputs[0].stop_reason is None
    assert isinstance(output.request_id, str)
    first = next(iter(llm.stream(["the block"], greedy())))
    assert first.finished is False
    assert first.outputs[0].finished() is False


def test_beams_have_vllms_shape_beside_ours(llm, tokenizer):
    """There `tokens` and `text` begin with the prompt; here `outputs` has the answer
    alone.
    """
    from nanopaged import BeamSearchParams

    prompt = tokenizer.encode("the block", add_special_tokens=False)
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    (output,) = llm.beam_search([{"prompt_token_ids": prompt}], params)
    assert len(output.sequences) == len(output.outputs) == 3
    for beam, completion in zip(output.sequences, output.outputs, strict=True):
        assert list(beam.tokens) == prompt + list(completion.token_ids)
        assert beam.cum_logprob == completion.cumulative_logprob
        plain = tokenizer.decode(beam.tokens, skip_special_tokens=True)
        assert beam.text in (plain, tokenizer.decode(beam.tokens))
        assert beam.text.startswith("the block")
        rows = zip(completion.token_ids, beam.logprobs, strict=True)
        assert sum(row[t].logprob for t, row in rows) == pytest.approx(beam.cum_logprob)
    scores = [beam.cum_logprob for beam in output.sequences]
    assert scores == sorted(scores, reverse=True)


def test_beam_search_takes_the_params_of_vllm(llm):
    from nanopaged import BeamSearchParams

    plain = llm.beam_search([[5, 6]], BeamSearchParams(beam_width=2, max_tokens=4))
    more = BeamSearchParams(
        beam_width=2,
        max_tokens=4,
        ignore_eos=False,
        temperature=0.0,
        length_penalty=1.0,
        include_stop_str_in_output=False,
    )
    assert first_tokens_of(llm.beam_search([[5, 6]], more)) == first_tokens_of(plain)
    assert "temperature" in message_of(lambda: BeamSearchParams(2, 4, temperature=0.7))
    assert first_tokens_of(
        llm.beam_search([[5, 6]], params=more, use_tqdm=False)
    ) == first_tokens_of(plain)


def test_get_tokenizer_is_the_tokenizer(llm, tokenizer):
    assert llm.get_tokenizer().encode("a block") == tokenizer.encode("a block")
    assert llm.get_tokenizer() is llm.tokenizer


def test_reset_prefix_cache_forgets(llm):
    prompt = [(13 * i) % 290 for i in range(20)]

    def cached():
        return llm.generate([prompt], greedy(), use_tqdm=False)[0].num_cached_tokens

    assert [cached(), cached()] == [0, 16]
    expected = one(llm, prompt).token_ids
    assert llm.reset_prefix_cache() is True
    assert llm.stats().blocks_cached == 0
    assert [cached(), cached()] == [0, 16]
    # While a request runs its blocks stay what they are: vLLM says False and resets
    # nothing.
    request = llm.add_request(prompt, greedy())
    llm.step()
    assert llm.reset_prefix_cache() is False
    assert list(drain(llm)[request][-1].outputs[0].token_ids) == list(expected)
    assert list(one(llm, prompt).token_ids) == list(expected)
    assert llm.reset_prefix_cache() is True


# --- defaults of the model ---


@pytest.fixture
def with_defaults(text_model, tmp_path):
    """`with_defaults(**fields)`: the model with these fields in its
    generation_config.json.
    """

    def make(**fields):
        path = shutil.copytree(
            text_model, tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        )
        file = path / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        return path

    return make


def test_the_models_own_defaults_are_taken_without_params(
    with_defaults, engine, text_model
):
    from nanopaged import SamplingParams

    fields = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.1,
        "max_new_tokens": 5,
    }
    llm = engine(with_defaults(do_sample=True, **fields))
    params = llm.get_default_sampling_params()
    assert isinstance(params, SamplingParams)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.95)
    assert (params.min_p, params.max_tokens) == (0.1, 5)
    params.max_tokens = 3
    assert llm.get_default_sampling_params().max_tokens == 5, "each call gets its own"
    seeded = SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, max_tokens=5
    )
    with_params = engine(text_model)  # the same seed of the engine gives the same draws
    prompts = [[5, 6, 7], [8, 9]]
    expected = first_tokens_of(with_params.generate(prompts, seeded, use_tqdm=False))
    assert first_tokens_of(llm.generate(prompts, use_tqdm=False)) == expected
    assert max(map(len, expected)) <= 5


def test_chat_stream_and_add_request_take_the_defaults_too(with_defaults, engine):
    llm = engine(with_defaults(temperature=0.0, max_new_tokens=3))
    chat = llm.chat(TALK, use_tqdm=False)[0]
    *_, streamed = llm.stream([chat.prompt_token_ids])
    request = llm.add_request(chat.prompt_token_ids)
    stepped = drain(llm)[request][-1]
    assert 1 <= len(chat.outputs[0].token_ids) <= 3
    assert (
        first_tokens_of([chat])
        == first_tokens_of([streamed])
        == first_tokens_of([stepped])
    )


def test_without_defaults_they_are_those_of_sampling_params(llm):
    from nanopaged import SamplingParams

    assert llm.get_default_sampling_params() == SamplingParams()


def test_a_default_that_is_lacking_is_told_once_and_left_out(
    with_defaults, engine, caplog
):
    """Qwen2.5 has repetition_penalty=1.05: no reason not to serve it."""
    with caplog.at_level(logging.INFO, "nanopaged"):
        llm = engine(with_defaults(repetition_penalty=1.05, temperature=0.7))
    assert "repetition_penalty" in caplog.text
    assert llm.get_default_sampling_params().temperature == 0.7
    assert llm.generate([[5, 6]], use_tqdm=False)


def test_a_default_that_is_no_number_is_refused(with_defaults):
    from nanopaged import LLM

    path = with_defaults(temperature="hot")
    message = message_of(lambda: LLM(str(path), **OPTIONS))
    assert "temperature" in message and "generation_config.json" in message


# --- vLLM's offline examples, shortened ---
# examples/offline_inference/basic/{basic,chat,generate}.py, prefix_caching.py,
# llm_engine_example.py and the beam search of the documentation: the calls are theirs.

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]


@pytest.fixture(scope="module")
def script(text_model):
    """What stands for the model in all of them: small, and with a chat template."""
    return str(text_model)


def test_example_basic(script, capsys):
    from nanopaged import LLM, SamplingParams

    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=script)
    outputs = llm.generate(PROMPTS, sampling_params)
    print("\nGenerated Outputs:\n" + "-" * 60)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt:    {prompt!r}")
        print(f"Output:    {generated_text!r}")
        print("-" * 60)
    assert all(repr(prompt) in capsys.readouterr().out for prompt in PROMPTS[:1])
    assert [output.prompt for output in outputs] == PROMPTS
    llm.shutdown()


def test_example_chat(script):
    from nanopaged import LLM, SamplingParams

    sampling_params = SamplingParams(
        max_tokens=16, temperature=0.5, top_p=0.9, top_k=10
    )
    llm = LLM(model=script, enforce_eager=True, trust_remote_code=False)
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "Write an essay about higher education."},
    ]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    assert len(outputs) == 1
    conversations = [conversation for _ in range(10)]
    outputs = llm.chat(conversations, sampling_params, use_tqdm=True)
    assert len(outputs) == 10
    outputs = llm.chat(
        conversations,
        sampling_params,
        use_tqdm=False,
        chat_template="{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
    )
    assert [len(output.outputs) for output in outputs] == [1] * 10
    llm.shutdown()


def test_example_generate(script):
    from nanopaged import LLM

    llm = LLM(model=script)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 12
    sampling_params.temperature = 0.7
    sampling_params.top_p = 0.9
    sampling_params.top_k = 5
    outputs = llm.generate(PROMPTS, sampling_params)
    assert all(1 <= len(output.outputs[0].token_ids) <= 12 for output in outputs)
    llm.shutdown()


def test_example_prefix_caching(script):
    from nanopaged import LLM, SamplingParams

    prefix = (
        "You are an expert school principal, skilled in managing faculty and staff. "
    )
    generating_prompts = [prefix + prompt for prompt in PROMPTS]
    sampling_params = SamplingParams(temperature=0.0)
    options = {"gpu_memory_utilization": 0.4, "dtype": "float32"}
    regular_llm = LLM(model=script, enable_prefix_caching=False, **options)
    outputs = regular_llm.generate(generating_prompts, sampling_params)
    regular_generated_texts = [output.outputs[0].text for output in outputs]
    del regular_llm
    prefix_cached_llm = LLM(model=script, enable_prefix_caching=True, **options)
    prefix_cached_llm.generate(generating_prompts[0], sampling_params)
    outputs = prefix_cached_llm.generate(generating_prompts, sampling_params)
    assert [output.outputs[0].text for output in outputs] == regular_generated_texts
    assert all(output.num_cached_tokens for output in outputs)
    prefix_cached_llm.shutdown()


def test_example_beam_search(script):
    from nanopaged import LLM, BeamSearchParams

    llm = LLM(model=script)
    params = BeamSearchParams(beam_width=5, max_tokens=10)
    outputs = llm.beam_search([{"prompt": "Hello, my name is "}], params)
    for output in outputs:
        generated_text = output.sequences[0].text
        assert generated_text.removeprefix("<|bos|>").startswith("Hello, my name is")
    llm.shutdown()


def test_example_llm_engine(script):
    """Theirs makes an `LLMEngine` from command line arguments; the loop is the same.

    Its penalties are at their neutral values here, and `add_request` gives the id.
    """
    from nanopaged import LLM, SamplingParams

    engine = LLM(model=script)
    test_prompts = [
        (
            "A robot may not injure a human being",
            SamplingParams(temperature=0.0, logprobs=1),
        ),
        (
            "To be or not to be,",
            SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.0),
        ),
        (
            "What is the meaning of life?",
            SamplingParams(n=2, temperature=0.8, top_p=0.95),
        ),
    ]
    finished = []
    requests = []
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params = test_prompts.pop(0)
            requests.append(engine.add_request(prompt, sampling_params))
        for request_output in engine.step():
            if request_output.finished:
                finished.append(request_output)
    assert sorted(output.request_id for output in finished) == sorted(requests)
    assert sorted(len(output.outputs) for output in finished) == [1, 1, 2]
    engine.shutdown()
