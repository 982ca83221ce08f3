"""What people have reported of engines like this one, as small inputs.

Each kind of report is a table: what a caller passes as a prompt, where EOS tokens come
from, what a checkpoint says and what it holds, numbers in containers, what the prefix
cache keeps, ranks among ties. (What concerns a server: solutions/checks/server.py.)
"""

import gc
import json
import math
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer

from helpers import (
    CPU,
    Column,
    complete,
    drain,
    first_tokens_of,
    generate,
    greedy,
    message_of,
    tokens_of,
)
from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.frontend import llm as frontend
from nanopaged.frontend.outputs import Request
from nanopaged.frontend.prompts import render_chats
from nanopaged.loading import checkpoint, start_up
from nanopaged.loading.any_decoder import AnyDecoder
from nanopaged.sequence import Sequence, SequenceGroup

CHAT = [{"role": "user", "content": "the block"}]
TEXT = "the block table"


# -- What is passed as a prompt --------------------------------------------------------


# {name: (what is passed, with the tokenizer; how many prompts TEXT it is)}
PROMPTS = {
    "str": (lambda tok: TEXT, 1), "list of str": (lambda tok: [TEXT, TEXT], 2),
    "generator": (lambda tok: (TEXT for _ in range(3)), 3),
    "column": (lambda tok: Column([TEXT, TEXT]), 2),
    "array of str": (lambda tok: np.array([TEXT, TEXT]), 2),
    "ids": (lambda tok: tok.encode(TEXT), 1),
    "array of ids": (lambda tok: np.array(tok.encode(TEXT), np.int32), 1),
    "tensor of ids": (lambda tok: torch.tensor(tok.encode(TEXT)), 1),
    "list of numbers of numpy": (lambda tok: list(np.array(tok.encode(TEXT))), 1),
    "two rows": (lambda tok: np.array([tok.encode(TEXT)] * 2), 2),
    "list of arrays": (lambda tok: [np.array(tok.encode(TEXT))] * 2, 2),
    "dict": (lambda tok: {"prompt": TEXT}, 1),
    "dict with ids": (lambda tok: {"prompt_token_ids": tok.encode(TEXT)}, 1),
    "dict with a tensor": (
        lambda tok: {"prompt_token_ids": torch.tensor(tok.encode(TEXT))}, 1),
    "ids and None": (lambda tok: {"prompt_token_ids": tok.encode(TEXT), "prompt": None,
                                  "mm_processor_kwargs": None}, 1),
    "mixed": (lambda tok: [TEXT, {"prompt": TEXT}, tok.encode(TEXT)], 3)}
WRONG_PROMPTS = {
    "None": (None, "a string, a list of token ids"), "number": (5, "a string, a list"),
    "bytes": (b"the block", "a string, a list of token ids"),
    "floats": ([1.0, 2.0], "a string or a list of token ids, got [1.0, 2.0]"),
    "None among ids": ([[1], [1, None]], "a string or a list of token ids, got [1, N"),
    "NaN among thousands": (
        [TEXT] * 1723 + [math.nan] + [TEXT] * 1276, "prompts[1723]: prompt must be a"),
    "string as ids": ({"prompt_token_ids": "1 2"}, "a list of token ids, got '1 2'"),
    "misspelt": ({"promt": "a"}, "a dict with names among"),
    "image": ({"prompt": "a", "multi_modal_data": {"image": 1}}, "a dict with names"),
    "two in one": (["a", ["b", "c"]], "prompts[1]: prompt must be a string or a list"),
    "BatchEncoding": ({"input_ids": [[1, 2, 3]]}, "pass its input_ids"),
    "bytearray": (bytearray(b"ab"), "a string, a list of token ids"),
    "half a character": ("\ud800", "surrogates not allowed"),
    "too long": ([[5]] * 99 + [[5] * 200] + [[5]], "prompts[99]: number of prompt tok")}

# {the beginning of the message: what may be one of many conversations}
WRONG_CHATS = {
    "messages must be a list of at least one message, got []": [[]],
    "messages must be a list of {'role'": [
        "hi", ["hi"], [{}], [{"content": "a"}], [[3]], math.nan, None, CHAT[0]],
    "content must be a string, or a list of text parts": [
        [{"role": "user", "content": content}]
        for content in ([{"type": "image_url", "image_url": {}}], 3, {"text": "a"})],
    "tool_calls must be a list of calls": [
        [{"role": "assistant", "content": "", "tool_calls": calls}]
        for calls in ([{"function": {"arguments": "{bad"}}], [{}], "x",
                      [{"function": {"arguments": [1]}}])]}
# How templates write arguments, and what `ARGUMENTS` are in the prompt.
ARGUMENTS = [{"x": "ü"}, '{"x":  "ü"}', None, "", "{}"]
CALLS = {
    "'' + {}": ['{"x": "ü"}', '{"x":  "ü"}', "{}", "", "{}"],
    "{} ~ '.'": ['{"x": "ü"}.', '{"x":  "ü"}.', "{}.", ".", "{}."],
    "{}|trim": ['{"x": "ü"}', '{"x":  "ü"}', "{}", "", "{}"],
    "{}|tojson": ['{"x": "ü"}', '{"x": "ü"}', "{}", "{}", "{}"],
    "{}.x": ["ü", "ü", "", "", ""],
    "{}|items|map('last')|join": ["ü", "ü", "", "", ""],
    "{} if {} is string else {}|tojson": [
        '{"x": "ü"}', '{"x":  "ü"}', "{}", "", "{}"]}
# What a template says of a message `m` with a call, by its content.
HISTORY = {
    "{% if not m.content %}{{ m.tool_calls|length }}{% endif %}": {
        None: "1", "": "1", "a": ""},
    "{{ m.content or '' }}{{ m.tool_calls[0].name }}": {None: "f", "": "f", "a": "af"},
    "{{ '' + m.content }}{{ m.tool_calls[0].name }}": {None: "f", "": "f", "a": "af"}}


@pytest.fixture(scope="module")
def shared(text_model):
    """One engine for the tests that only ask it something."""
    with LLM(text_model, dtype="float32", device="cpu", block_size=4, num_blocks=128,
             max_model_len=96) as llm:
        yield llm


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_prompt_of_any_kind_is_answered_as_its_text_is(kind, shared, tokenizer):
    expected = complete(shared, TEXT, greedy(4)).token_ids
    make, count = PROMPTS[kind]
    outputs = shared.generate(make(tokenizer), greedy(4), use_tqdm=False)
    assert first_tokens_of(outputs) == [expected] * count
    assert all(output.prompt_token_ids == tokenizer.encode(TEXT) for output in outputs)


@pytest.mark.parametrize("kind", WRONG_PROMPTS)
def test_any_other_prompt_is_an_error_that_says_what_to_pass(kind, shared):
    prompts, words = WRONG_PROMPTS[kind]
    assert words in message_of(lambda: shared.generate(prompts, greedy(4)))
    assert not shared.has_unfinished_requests()


@pytest.mark.parametrize("options", [{}, {"return_tensors": "pt"}], ids=str)
def test_what_a_chat_template_returns_is_a_prompt(options, shared, tokenizer):
    ids = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, **options).input_ids
    (output,) = shared.generate(ids, greedy(4), use_tqdm=False)
    (chatted,) = shared.chat(CHAT, greedy(4), use_tqdm=False)
    assert tokens_of(output) == tokens_of(chatted)
    text = tokenizer.decode(output.prompt_token_ids)
    assert text.startswith("<|bos|><user>the block")


# What templates say of one message `m`, by what its content may be. What comes after a
# "@" comes before all messages.
PARTS = "{% for p in m.content %}<{{ p.text }}>{% endfor %}"
TEMPLATES = {
    "strings": [
        "{{ m.role }}@{% if messages[0].role != 'system' %}{{ raise_exception('x') }}"
        "{% endif %}", "{{ m.content|upper }}@{{ messages[1]['content'].split()[0] }}",
        "{{ m.content|replace(' ', '_') }}@{{ tools[0].name }}",
        "{% set c = m.content %}{% for w in c.split() %}<{{ w }}>{% endfor %}",
        "{{ m.content }}{% for c in m.tool_calls %}{{ c['arguments']['text'] }}"
        "{% endfor %}", "{{ m.content }}@{% for d in documents %}{{ d.text }}"
        "{% endfor %}", "{% generation %}{{ m.content }}{% endgeneration %}{% break %}",
        "{% if %}"],
    "either": [
        "{% if m.content is string %}'{{ m.content|lower }}'{% else %}" + PARTS
        + "{% endif %}", "{{ show(m) }}@{% macro show(m) %}{% set c = m.get('content') "
        "%}{% if c is not string %}" + PARTS + "{% else %}{{ c }}{% endif %}"
        "{% endmacro %}"],
    "parts": [
        PARTS, "{{ m.content[0].text }}", "{{ m.content|map(attribute='text')|join }}",
        "{% for p in m['content']|selectattr('type', 'equalto', 'text') %}"
        "{% if p is not string %}<{{ p['text'] }}>{% endif %}{% endfor %}",
        "{{ show(c=m.content) }}@{% macro show(c) %}{% for p in c[:1] %}"
        "<{{ p.get('text') }}>{% endfor %}{% endmacro %}"]}
OPTIONS = ({}, {"tools": [{"name": "sing"}]}, {"add_generation_prompt": False},
           {"continue_final_message": True})


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_conversation_is_what_transformers_makes_of_it(kind, shared):
    """Or it is the same error. Only where a template cannot take a string is it a part,
    and only where it cannot take parts are they a string.
    """
    texts = [{"role": "system", "content": "Be Brief."},
             {"role": "user", "content": "Who is it?"},
             {"role": "assistant", "content": "I"}]
    parts = [each | {"content": [{"type": "text", "text": each["content"]}]}
             for each in texts]

    def expected(chat, options):
        text = shared.tokenizer.apply_chat_template(chat, tokenize=False, **{
            "add_generation_prompt": "continue_final_message" not in options} | options)
        return [{"prompt": text}]

    def said(render, *arguments):
        try:
            return render(*arguments)[0]["prompt"]
        except Exception as error:
            return " ".join(str(error).split())  # ours are one line

    for template, options, start in product(TEMPLATES[kind], OPTIONS, (0, 1)):
        one, _, before = template.partition("@")
        options = options | {"chat_template": before + "{% for m in messages %}" + one
                             + "{% endfor %}{% if add_generation_prompt %}>{% endif %}"}
        for given, like in ((texts, parts if kind == "parts" else texts),
                            (parts, texts if kind == "strings" else parts)):
            ours = said(partial(render_chats, shared), given[start:], options)
            assert ours == said(expected, like[start:], options), (template, options)


@pytest.mark.parametrize("words", WRONG_CHATS)
def test_a_wrong_conversation_is_numbered_and_told(words, shared):
    for chat in WRONG_CHATS[words]:
        chats = [CHAT] * 32 + [chat] + [CHAT] * 17
        message = message_of(lambda chats=chats: shared.chat(chats, greedy(4)))
        assert message.startswith(f"messages[32]: {words}")


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("template", CALLS)
def test_arguments_are_a_dict_or_text_as_the_template_needs_them(
        template, is_flat, shared):
    name = "m.tool_calls[0].function.arguments"
    options = {"chat_template": "{% set m = messages[0] %}{{ "
               + template.replace("{}", name) + " }}"}
    for arguments, expected in zip(ARGUMENTS, CALLS[template], strict=True):
        call = {"name": "f", "arguments": arguments}
        chat = [{"role": "assistant", "tool_calls": [
            call if is_flat else {"function": call}]}]
        before = deepcopy(chat)
        (prompt,) = render_chats(shared, chat, options)
        assert prompt["prompt"] == expected
        assert chat == before, "the caller's was changed"


@pytest.mark.parametrize("template", HISTORY)
def test_null_beside_calls_stays_null_where_the_template_takes_it(template, shared):
    for content, expected in HISTORY[template].items():
        chat = [{"role": "assistant", "content": content, "tool_calls": [
            {"name": "f", "arguments": {}}]}, {"role": "user", "content": "b"}]
        (prompt,) = render_chats(shared, chat, {
            "chat_template": "{% set m = messages[0] %}" + template})
        assert prompt["prompt"] == expected


def test_an_empty_list_of_calls_is_none(shared):
    template = "{% for m in messages %}{{ '!' if 'tool_calls' in m else m.content }}"
    for calls in [], None, ():
        chat = [{"role": "assistant", "content": "a", "tool_calls": calls}]
        (prompt,) = render_chats(shared, chat, {
            "chat_template": template + "{% endfor %}"})
        assert prompt["prompt"] == "a"


def test_parts_become_a_string_only_for_the_roles_that_need_it(shared):
    template = ("{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content "
                "%}<{{ p.text }}>{% endfor %}{% elif m.content is string %}"
                "{{ m.content }}{% endif %}{% endfor %}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for roles, expected in ((["system", "user"], "a\nb<a><b>"), (["user"], "<a><b>"),
                            (["user", "assistant", "user"], "<a><b>a\nb<a><b>")):
        (prompt,) = render_chats(shared, [
            {"role": role, "content": parts} for role in roles],
            {"chat_template": template})
        assert prompt["prompt"] == expected


# -- One set of stop tokens ------------------------------------------------------------


def test_eos_of_the_tokenizer_ends_an_answer_too(
        make_scripted_model, tokenizer, engine, edit_model):
    end = tokenizer.eos_token_id
    path = make_scripted_model([40, 41, end, 42])
    path = edit_model(path, lambda config: config.update(eos_token_id=7))
    (path / "generation_config.json").write_text('{"eos_token_id": [7]}')
    answer = complete(engine(path), [40], SamplingParams(temperature=0, max_tokens=9))
    assert (answer.token_ids, answer.finish_reason) == ([41, end], "stop")


def test_a_stop_string_that_is_a_special_token_stops(
        make_scripted_model, tokenizer, engine):
    """The text does not have it, because special tokens are skipped."""
    bos = tokenizer.bos_token_id
    llm = engine(make_scripted_model([40, 41, bos, 42]))
    for stop in ("<|bos|>", ["zz", "<|bos|>"]):
        answer = complete(llm, [40], greedy(9, stop=stop))
        assert (answer.token_ids, answer.finish_reason) == ([41, bos], "stop")
        assert answer.stop_reason == "<|bos|>"
        shown = complete(llm, [40], greedy(9, stop=stop, skip_special_tokens=False))
        assert shown == answer
    # No other stop string is found within it, but one before it is.
    first = tokenizer.decode([41])
    for other, found in {"<|": "<|bos|>", first: first}.items():
        answer = complete(llm, [40], greedy(9, stop=[other, "<|bos|>"]))
        assert answer.stop_reason == found


def test_a_stop_string_that_is_a_special_token_need_not_be_decoded_to_itself(
        make_scripted_model, sentencepiece_tokenizer, engine):
    tokenizer = deepcopy(sentencepiece_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["\u2581<EOT>"]})
    end = tokenizer.convert_tokens_to_ids("\u2581<EOT>")
    assert tokenizer.decode([end]) != "\u2581<EOT>"
    llm = engine(make_scripted_model([40, 41, end, 42], tokenizer))
    answer = complete(llm, [40], greedy(9, stop="\u2581<EOT>"))
    assert (answer.token_ids, answer.stop_reason) == ([41, end], "\u2581<EOT>")


# -- What a checkpoint says ------------------------------------------------------------


def test_the_tokenizer_is_that_of_its_file(text_model, edit_model):
    """Transformers lets a wrong tokenizer_class replace its rules."""
    path = edit_model(text_model)
    raw = Tokenizer.from_file(str(path / "tokenizer.json"))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=True)])
    raw.save(str(path / "tokenizer.json"))
    file = path / "tokenizer_config.json"
    fields = json.loads(file.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}
    file.write_text(json.dumps(fields))
    text = "1234 + 56"
    assert checkpoint.load_tokenizer(path).encode(text) == raw.encode(text).ids
    assert AutoTokenizer.from_pretrained(path).encode(text) != raw.encode(text).ids


@pytest.mark.parametrize("cpu", ["blocks"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_config_without_a_dtype_takes_that_of_the_weights(
        dtype, llama, edit_model, engine, cpu):
    path = edit_model(llama, lambda config: config.pop("dtype", None))
    file = path / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()},
              file, metadata={"format": "pt"})
    assert engine(path, dtype="auto").engine.runner.dtype == dtype


@pytest.mark.parametrize(("rope", "longest"), [
    ({"rope_type": "default"}, 64), ({"rope_type": "yarn", "factor": 4.0}, 256),
    ({"rope_type": "linear", "factor": 2.0}, 128),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
      "high_freq_factor": 4.0, "original_max_position_embeddings": 32}, 64)], ids=str)
def test_stretched_positions_count(rope, longest, llama, edit_model, engine):
    path = edit_model(llama, lambda config: config.update(
        max_position_embeddings=64, rope_parameters={"rope_theta": 1e4} | rope))
    llm = engine(path, max_model_len=None, num_blocks=256)
    assert llm.engine.max_model_len == longest


def test_a_missing_directory_is_not_called_damaged(llama, tmp_path, engine):
    file = tmp_path / "model.gguf"
    file.touch()
    for path in ("", "./c", str(tmp_path / "a/b"), tmp_path / "a", tmp_path, file,
                 str(llama / "config.json")):
        message = message_of(lambda path=path: engine(path))
        assert "an existing directory with a config.json" in message


# -- Numbers ---------------------------------------------------------------------------


def test_numbers_of_numpy_and_torch_are_numbers():
    params = SamplingParams(
        max_tokens=np.int64(4), temperature=np.float32(0), seed=np.int32(1), top_k=-1,
        logit_bias={np.int64(7): np.float32(2), 8: torch.tensor(1.5)},
        stop_token_ids=[np.int64(3), torch.tensor(4)])
    assert type(params.max_tokens) is type(params.seed) is int and params.top_k == 0
    assert params.logit_bias == {7: 2.0, 8: 1.5} and params.stop_token_ids == [3, 4]
    assert SamplingParams(stop_token_ids=np.array([5, 6])).stop_token_ids == [5, 6]


# -- The prefix cache, and ranks -------------------------------------------------------


def test_scored_prompts_take_no_place_in_the_prefix_cache(llama, engine):
    """Nobody could find their blocks, so others stay longer."""
    llm = engine(llama, num_blocks=64, max_model_len=120)
    system = [i % 160 for i in range(101)]
    complete(llm, system, greedy(1))
    for start in range(6):
        scored = [(start + 7 * i) % 160 for i in range(60)]
        complete(llm, scored, greedy(1, prompt_logprobs=0))
    (output,) = llm.generate([system], greedy(1), use_tqdm=False)
    assert output.num_cached_tokens == 100


# -- Weights that do not fit -----------------------------------------------------------


@pytest.mark.parametrize("model_impl", ["nanopaged", "transformers"])
def test_weights_that_do_not_fit_are_counted_and_named(model_impl, llama, edit_model):
    """As GPTQ names them."""
    name = "model.layers.0.mlp.up_proj."
    path = edit_model(llama, weights=lambda tensors: tensors.update(
        {f"{name}qweight": tensors.pop(f"{name}weight")}))
    message = message_of(lambda: LLM(path, model_impl=model_impl, **CPU))
    assert f"1 missing ['{name}weight'] and 1 left over ['{name}qweight']" in message
    assert "`save_pretrained`" in message


def test_weights_in_another_format_are_read(llama, edit_model, engine):
    expected = complete(engine(llama), [5, 6, 7], greedy(8)).token_ids
    path = edit_model(llama)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert complete(engine(path), [5, 6, 7], greedy(8)).token_ids == expected


# -- Defaults of a CPU -----------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [2**40, 2**62, 2**63 - 1])
def test_a_pool_that_cannot_be_allocated_is_told(num_blocks, llama):
    message = message_of(lambda: LLM(llama, num_blocks=num_blocks, **CPU))
    assert message.startswith(f"num_blocks={num_blocks} (or swap_space) must be lower")


def test_the_pool_follows_the_memory_that_there_is(llama, monkeypatch):
    def pool_bytes(**options):
        with LLM(llama, max_num_seqs=4096, **CPU | options) as llm:
            return llm.engine.runner.kv_caches.nbytes

    monkeypatch.setattr(start_up, "free_memory", lambda: 20 << 20)
    assert 9 << 20 < pool_bytes() <= 11 << 20
    assert pool_bytes(num_blocks=8000) > 40 << 20, "what is asked for is not changed"


def test_a_long_prompt_holds_no_stream_up_on_a_cpu(llama, engine):
    llm = engine(llama, max_model_len=256, num_blocks=512)
    assert llm.config.max_num_batched_tokens is None
    assert llm.engine.config.max_num_batched_tokens == 256
    llm = engine(llama, max_num_batched_tokens=99)
    assert llm.engine.config.max_num_batched_tokens == 99


# -- What is the caller's --------------------------------------------------------------


def test_what_is_set_on_the_tokenizer_changes_no_prompt(text_model, engine):
    llm = engine(text_model)
    before = llm.generate([TEXT * 3], greedy(4), use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    assert tokenizer is llm.get_tokenizer() and tokenizer is not llm.tokenizer
    tokenizer(TEXT, truncation=True, max_length=2)
    tokenizer.add_tokens(["the block"])
    after = llm.generate([TEXT * 3], greedy(4), use_tqdm=False)
    assert after[0].prompt_token_ids == before[0].prompt_token_ids
    assert tokens_of(after[0]) == tokens_of(before[0])


@pytest.mark.parametrize("set_length", [
    lambda raw: raw.enable_padding(length=40), lambda raw: raw.enable_truncation(3)])
def test_padding_in_the_file_of_a_tokenizer_is_no_disagreement(
        set_length, text_model, edit_model, caplog):
    path = edit_model(text_model)
    raw = Tokenizer.from_file(str(path / "tokenizer.json"))
    set_length(raw)
    raw.save(str(path / "tokenizer.json"))
    tokenizer = checkpoint.load_tokenizer(path)
    assert not caplog.records
    assert tokenizer(TEXT).input_ids == checkpoint.load_tokenizer(
        text_model)(TEXT).input_ids


def test_a_request_waits_for_weights_that_another_thread_loads(
        llama, engine, monkeypatch):
    llm, begun, replace = engine(llama), threading.Event(), frontend.replace_weights
    expected = complete(llm, [5, 6], greedy(3))

    def replace_slowly(runner, weights):
        begun.set()
        time.sleep(0.2)
        replace(runner, weights)

    monkeypatch.setattr(frontend, "replace_weights", replace_slowly)
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(
            llm.load_weights, load_file(llama / "model.safetensors"))
        begun.wait()
        assert complete(llm, [5, 6], greedy(3)) == expected
        loading.result()


# -- Growth ----------------------------------------------------------------------------


def test_eight_streams_take_turns(text_model, engine):
    """None waits while others take many steps."""
    llm = engine(text_model, num_blocks=512)
    start, jumps = threading.Barrier(8), []

    def read(number):
        start.wait()
        counts = [len(tokens_of(output)) for output in llm.stream(
            [[number, 9, 9]], greedy(60))]
        jumps.extend(b - a for a, b in pairwise([0, *counts]))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(read, range(8)))
    assert sum(jumps) == 8 * 60 and max(jumps) <= 4


# -- What has finished is freed --------------------------------------------------------


def end_in_an_error(llm):
    with suppress(ZeroDivisionError):
        fail = greedy(3, logits_processors=[lambda *_: 1 / 0])
        llm.generate([[5]], fail, use_tqdm=False)


def close_early(llm):
    stream = llm.stream([[5, 6]] * 3, greedy(9))
    next(stream)
    stream.close()
    llm.generate([[7]], greedy(1), use_tqdm=False)  # its step ends those


def abort(llm):
    llm.abort_request(llm.add_request([5, 6], greedy(9)))
    drain(llm)


def step(llm):
    for number in range(3):
        llm.add_request([5, number], greedy(4))
    drain(llm)


ENDS = {
    "generate": lambda llm: generate(llm, [[5, 6]] * 3, greedy(4, n=2, stop="zzz")),
    "stream": lambda llm: [*llm.stream([[5, 6]] * 3, greedy(4, logprobs=1))],
    "step": step, "a stream is closed": close_early, "abort": abort,
    "beams": lambda llm: llm.beam_search([[5, 6]], BeamSearchParams(3, 4)),
    "an error": end_in_an_error}


@pytest.mark.parametrize("kind", ENDS)
def test_a_finished_request_waits_for_no_garbage_collector(kind, text_model, engine):
    llm = engine(text_model)
    gc.collect()
    gc.freeze()  # so that only what comes from here on is looked at
    gc.disable()
    try:
        ENDS[kind](llm)
        left = set(map(type, gc.get_objects()))
        assert not left & {SequenceGroup, Sequence, Request}
    finally:
        gc.enable()
        gc.unfreeze()


# -- Files that are not what their names say -------------------------------------------


def to_nothing(path):
    path.symlink_to("nothing")


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("name", [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", "model.safetensors", "model.safetensors.index.json"])
def test_a_name_without_a_file_is_an_error_that_names_it(
        name, is_cached, text_model, tmp_path, monkeypatch):
    """In a directory, or in the hub's cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for i, spoil in enumerate((to_nothing, Path.mkdir, Path.touch)):
        folder = tmp_path / f"models--me--m{i}/snapshots/5"
        shutil.copytree(text_model, folder)
        (folder / name).unlink(missing_ok=True)
        spoil(folder / name)
        (folder.parents[1] / "refs").mkdir()
        (folder.parents[1] / "refs/main").write_text("5")
        source = f"me/m{i}" if is_cached else folder
        assert name in message_of(lambda source=source: LLM(source, **CPU))


@pytest.mark.parametrize("metadata", [{}, {"metadata": None}, {"metadata": {}}])
def test_an_index_needs_its_weight_map_alone(metadata, llama, edit_model, engine):
    path = edit_model(llama)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").rename(path / "a.safetensors")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps(metadata | {
        "weight_map": dict.fromkeys(tensors, "a.safetensors")}))
    expected = complete(engine(llama), [5, 6, 7], greedy(8)).token_ids
    assert complete(engine(path), [5, 6, 7], greedy(8)).token_ids == expected
    index.write_text('{"weight_map": {}}')
    assert "the weights in" in message_of(lambda: engine(path))


YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(("field", "value"), [
    *(("num_key_value_heads", count) for count in (3, 5, 16)),
    *(("partial_rotary_factor", YARN | {"partial_rotary_factor": part})
      for part in (0.25, 0.5, 0.75))], ids=str)
def test_shapes_that_cannot_be_are_named(field, value, llama, edit_model, engine):
    name = "rope_parameters" if isinstance(value, dict) else field
    path = edit_model(llama, lambda config: config.update({name: value}))
    assert message_of(lambda: engine(path)).startswith(f"{field} in config.json must")


def test_a_tokenizer_may_have_no_vocabulary(make_model, edit_model, engine):
    """And so no file but its config."""
    path = edit_model(make_model("llama", seed=11, vocab_size=384))
    ByT5Tokenizer().save_pretrained(path)
    (output,) = engine(path).generate("hé", greedy(4), use_tqdm=False)
    assert output.prompt_token_ids == [107, 198, 172, 1]


@pytest.mark.parametrize("error", [
    MemoryError(), torch.OutOfMemoryError("Tried to allocate 2 GiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=repr)
def test_a_lack_of_memory_is_no_fault_of_the_model(error, llama, monkeypatch):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(AnyDecoder, "compute_in_blocks", fail)
    assert message_of(lambda: LLM(llama, model_impl="transformers", **CPU),
                      type(error)) == str(error)


@pytest.mark.parametrize("length", [0, 40, -1])
def test_a_compiled_file_that_was_cut_short_is_compiled_again(
        length, tmp_path, monkeypatch):
    threads = pytest.importorskip("nanopaged.cpu.threads")
    monkeypatch.setattr(threads.numba.config, "CACHE_DIR", str(tmp_path))

    def compiled():
        kernel = threads.loop.__wrapped__(count_up, parallel=False)
        kernel(3, array := np.zeros(3))
        assert array.tolist() == [1, 1, 1]
        return sum(kernel.stats.cache_misses.values())

    count_up = threads.njit(count_one)
    assert (compiled(), compiled()) == (1, 0)
    files = [*tmp_path.rglob("*.nb?")]
    assert {path.suffix for path in files} == {".nbi", ".nbc"}
    for path in files:
        path.write_bytes(path.read_bytes()[:length])
        assert (compiled(), compiled()) == (1, 0)


def test_on_a_full_disk_nothing_is_kept(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("No space left on device")

    threads = pytest.importorskip("nanopaged.cpu.threads")
    monkeypatch.setattr(threads.numba.config, "CACHE_DIR", str(tmp_path))
    for name in ("save_overload", "load_overload", "flush"):
        monkeypatch.setattr(threads.Cache.__base__, name, fail)
    kernel = threads.loop.__wrapped__(threads.njit(count_one), parallel=False)
    kernel(3, array := np.zeros(3))
    assert array.tolist() == [1, 1, 1]


def count_one(i, array):
    array[i] += 1


# -- A model whose own logits are useless ----------------------------------------------

SPOILED = {  # the tensor, the row of it (None: all), and what it holds then
    "a NaN in a norm": ("model.norm.weight", 3, math.nan),
    "a NaN in the head": ("lm_head.weight", 7, math.nan),
    "infinity in the head": ("lm_head.weight", 7, math.inf),
    "nothing but NaN": ("model.layers.1.mlp.down_proj.weight", None, math.nan)}
WAYS = [
    greedy(8), greedy(8, n=2, temperature=1, seed=1), greedy(8, logprobs=3),
    greedy(8, temperature=0.7, top_p=0.9, top_k=20, seed=1),
    greedy(8, temperature=1, min_p=0.1, seed=1), greedy(8, prompt_logprobs=2),
    greedy(8, repetition_penalty=1.2, presence_penalty=1),
    greedy(8, logit_bias={3: 5.0}), greedy(8, min_tokens=4, stop_token_ids=[5]),
    greedy(8, logits_processors=[lambda _, logits: logits]), BeamSearchParams(3, 8)]


@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_model_with_useless_logits_is_named_and_nothing_is_answered(
        spoiled, llama, edit_model, engine):
    """Whatever is asked for, and whether weights are loaded or brought."""
    name, row, value = SPOILED[spoiled]
    tensors = load_file(llama / "model.safetensors")
    tensors[name][slice(None) if row is None else row] = value
    path = edit_model(llama)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    brought = engine(llama)
    brought.load_weights(tensors.items())
    for llm in (engine(path), brought):
        for params in WAYS:
            request = llm.add_request([5, 6, 7], params)
            message = message_of(lambda llm=llm: drain(llm), RuntimeError)
            assert message.startswith("the model's own logits have a NaN or +inf")
            (output,) = llm.step()
            assert output.request_id == request
            assert output.outputs[0].finish_reason == "abort"
            assert not output.outputs[0].token_ids


def test_a_request_is_named_if_it_is_to_blame(llama, engine):
    """A model that is sound, and requests that leave nothing to choose."""
    llm = engine(llama)
    for value in (math.nan, math.inf, -math.inf):
        params = greedy(8, logits_processors=[
            lambda _, logits, value=value: logits.fill_(value)])
        message = message_of(lambda params=params: generate(llm, [[5]], params))
        assert message.startswith("logits must be finite for at least one token")
