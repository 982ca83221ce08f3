"""The server, by the client that everybody uses: `openai`. It talks to 127.0.0.1 only.

    python server.py [the file of another server, with its make_app(llm, name)]
"""

import asyncio
import gc
import importlib.util
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count as count_up
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import openai
import torch
import uvicorn
import xgrammar
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import nanopaged
from nanopaged import LLM, SamplingParams
from nanopaged.sequence import Logprob

SERVER = Path(__file__).parent.parent / "server.py"
if sys.argv[1:]:
    SERVER = Path(sys.argv[1])
sys.path.insert(0, str(SERVER.parent))  # for the files that it imports
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] %}{{ call['function']['arguments']['text'] }}"
    "{% endfor %}{{ '\n' }}{% endfor %}")
NAME = "shakespeare"


def load_server():
    spec = importlib.util.spec_from_file_location("openai_server", SERVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def serve(llm):
    """A client of a server that runs in another thread."""
    app = load_server().make_app(llm, NAME)
    config = uvicorn.Config(app, port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="event loop")
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-",
                           max_retries=0, timeout=60)
    try:
        yield client
    finally:
        client.close()
        server.should_exit = True
        thread.join()


def complete(client, prompt, **options):
    options = {"max_tokens": 24, "temperature": 0} | options
    return client.completions.create(model=NAME, prompt=prompt, **options)


def stream(client, prompt, **options):
    """The pieces of a streamed completion, and why it ended."""
    chunks = list(complete(client, prompt, stream=True, **options))
    choices = [chunk.choices[0] for chunk in chunks]
    assert all(choice.finish_reason is None for choice in choices[:-1])
    return [choice.text for choice in choices], choices[-1].finish_reason


def check_answers(llm, client):
    """What the engine says is what arrives, in one piece or in many."""
    params = SamplingParams(temperature=0, max_tokens=24)
    text = llm.generate("ROMEO:", params, use_tqdm=False)[0].outputs[0].text
    whole = complete(client, "ROMEO:")
    found = whole.choices[0].text, whole.choices[0].finish_reason
    assert found == (text, "length"), (found, text)
    assert whole.usage.completion_tokens == 24, whole.usage
    pieces, reason = stream(client, "ROMEO:")
    assert "".join(pieces) == text and reason == "length" and len(pieces) > 8, pieces
    pieces, reason = stream(client, "ROMEO:", stop=[text[10:13]])
    assert "".join(pieces) == text[: text.index(text[10:13])] and reason == "stop"

    options = {"temperature": 1.0, "n": 3, "seed": 7}
    whole = [choice.text for choice in complete(client, "JULIET:", **options).choices]
    texts, ends = [""] * 3, [0] * 3
    for chunk in complete(client, "JULIET:", stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] += choice.finish_reason is not None
    assert texts == whole and len(set(texts)) == 3 and ends == [1, 1, 1], texts


def check_chat(llm, client):
    messages = [{"role": "user", "content": "Who is there?"}]
    options = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 16}
    params = SamplingParams(temperature=0, max_tokens=16)
    text = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
    whole = client.chat.completions.create(**options).choices[0].message
    assert (whole.role, whole.content) == ("assistant", text), (whole, text)
    chunks = list(client.chat.completions.create(stream=True, **options))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == text, (pieces, text)
    assert [model.id for model in client.models.list()] == [NAME]


def check_options(llm, client):
    """Several prompts, penalties, log-probabilities, usage, and what is ignored."""
    health = urllib.request.urlopen(str(client.base_url).replace("v1/", "health"))
    assert health.status == 200
    texts = [complete(client, prompt).choices[0].text for prompt in ("ROMEO:", "KING:")]
    ids = [llm.tokenizer(prompt).input_ids for prompt in ("ROMEO:", "KING:")]
    for prompts in ["ROMEO:", "KING:"], ids:
        both = complete(client, prompts, n=2)
        assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in both.choices] == [
            texts[0], texts[0], texts[1], texts[1]]
        pieces = [""] * 4
        for chunk in complete(client, prompts, n=2, stream=True):
            for choice in chunk.choices:
                pieces[choice.index] += choice.text
        assert pieces == [texts[0], texts[0], texts[1], texts[1]], pieces

    for neutral in ({"user": "me"}, {"frequency_penalty": 0}, {"echo": False},
                    {"best_of": 1}, {"suffix": None}, {"logit_bias": {}}):
        assert complete(client, "ROMEO:", **neutral).choices[0].text == texts[0]
    other = complete(client, "ROMEO:", frequency_penalty=1.5, presence_penalty=1)
    assert other.choices[0].text != texts[0]
    forced = complete(client, "ROMEO:", logit_bias={str(ids[0][0]): 100}, max_tokens=3)
    assert forced.choices[0].text == llm.tokenizer.decode(ids[0][:1] * 3)

    scored = complete(client, "ROMEO:", logprobs=2, max_tokens=5).choices[0].logprobs
    assert len(scored.tokens) == len(scored.token_logprobs) == 5
    assert "".join(scored.tokens) == complete(
        client, "ROMEO:", max_tokens=5).choices[0].text
    options = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}],
               "temperature": 0, "max_completion_tokens": 6, "logprobs": True,
               "top_logprobs": 2, "store": False, "parallel_tool_calls": True}
    chat = client.chat.completions.create(**options)
    content = chat.choices[0].logprobs.content
    assert len(content) == 6 == chat.usage.completion_tokens
    assert content[0].top_logprobs[0].logprob == content[0].logprob
    *_, last = client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **options)
    assert last.choices == [] and last.usage == chat.usage


SCHEMA = {"type": "object", "additionalProperties": False,
          "properties": {"name": {"type": "string", "maxLength": 12},
                         "age": {"type": "integer", "minimum": 0, "maximum": 99},
                         "alive": {"type": "boolean"}},
          "required": ["name", "age", "alive"]}


def check_json(llm, client):
    """Sampled answers that keep to a schema, beside others that do not change."""
    from structured import check_enforced

    alone = complete(client, "ROMEO:", max_tokens=80).choices[0].text
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(lambda: [complete(
            client, "ROMEO:", max_tokens=80).choices[0].text for _ in range(4)])
        answers = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "A person:"}], n=50,
            temperature=1, seed=3, max_tokens=80, response_format=FORM)
        assert beside.result() == [alone] * 4
    people = [json.loads(choice.message.content) for choice in answers.choices]
    assert all({*person} == {*SCHEMA["required"]} and type(person["age"]) is int
               and 0 <= person["age"] <= 99 and type(person["alive"]) is bool
               and len(person["name"]) <= 12 for person in people)
    for schema in ENFORCED:
        check_enforced(schema)
    print(f"{len(people)} answers keep to the schema, such as {people[0]}")


# -- What a client may ask for ---------------------------------------------------------

# What libraries write is enforced, and so it is accepted.
ENFORCED = [
    {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}], "default": None},
    {"enum": ["a", "b"], "type": "string", "title": "A"},
    {"const": 1, "type": "number"},
    {"allOf": [{"$ref": "#/$defs/a"}], "description": "b", "$defs": {"a": SCHEMA}},
    {"type": ["string", "null"], "maxLength": 3}, {"properties": {"a": {}}},
    {"type": "array", "prefixItems": [{"type": "null"}], "uniqueItems": False},
    {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
     "discriminator": {"propertyName": "kind"}, "$defs": {kind: {
         "type": "object", "properties": {"kind": {"const": kind}},
         "required": ["kind"]} for kind in ("a", "b")}}]
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
CALL = {"id": "a", "type": "function", "function": {
    "name": "say", "arguments": '{"text": "Who?"}'}}
TOOL = {"type": "function", "function": {"name": "say", "parameters": {
    "type": "object", "properties": {"text": {"$ref": "#/$defs/words"}},
    "$defs": {"words": {"type": "string", "maxLength": 8}}, "required": ["text"]}}}
OTHER = {"type": "function", "function": {"name": "wait"}}
NAMED = {"type": "function", "function": {"name": "say"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
LONG = "ROMEO: " * 20


def user(content):
    return [{"role": "user", "content": content}]


def text_of(answer):
    """Of a completion, a chat, or the chunks of either."""
    if not isinstance(answer, list):
        return getattr(answer.choices[0], "text", None) or (
            answer.choices[0].message.content)
    return "".join(getattr(choice, "text", None) or choice.delta.content
                   for chunk in answer for choice in chunk.choices)


def says(answer):
    """Whether it is one call of `say`, whose argument is a text."""
    is_stream = isinstance(answer, list)
    [choice] = answer[-1].choices if is_stream else answer.choices
    messages = [chunk.choices[0].delta for chunk in answer] if is_stream else [
        choice.message]
    [call] = [call for message in messages for call in message.tool_calls or []]
    said = json.loads(call.function.arguments)
    return (choice.finish_reason == "tool_calls" and call.function.name == "say"
            and said.keys() == {"text"} and len(said["text"]) <= 8
            and not any(message.content for message in messages))


def top_counts(answer):
    return {len(row.top_logprobs) for row in answer.choices[0].logprobs.content}


# Options of a completion or, if they have messages, of a chat. Then what must hold of
# the answer, given the greedy one to "ROMEO:" or, in chats, to "user:\nWho?\n".
FEATURES = [
    ({}, lambda a, text: text_of(a) == text and a.choices[0].finish_reason == "length"),
    ({"stream": True}, lambda a, text: text_of(a) == text and len(a) > 8),
    ({"prompt": ["ROMEO:", "A"]},
     lambda a, text: text_of(a) == text and a.choices[1].index == 1),
    ({"prompt": [5, 6, 7]}, lambda a, _: a.usage.prompt_tokens == 3),
    ({"prompt": [[5, 6, 7], [8]]}, lambda a, _: a.usage.prompt_tokens == 4),
    ({"n": 3}, lambda a, text: [c.text for c in a.choices] == [text] * 3),
    ({"temperature": 1, "seed": 7, "prompt": ["A", "A"]},
     lambda a, _: a.choices[0].text == a.choices[1].text),
    ({"temperature": 1, "top_p": 1e-6, "seed": 3}, lambda a, text: text_of(a) == text),
    ({"stop": "e"}, lambda a, text: text_of(a) == text[: text.index("e")]),
    ({"stop": ["xyz", "e"]}, lambda a, _: a.choices[0].finish_reason == "stop"),
    ({"max_tokens": 3}, lambda a, _: a.usage.completion_tokens == 3),
    ({"presence_penalty": 2}, lambda a, text: text_of(a) != text),
    ({"frequency_penalty": 2}, lambda a, text: text_of(a) != text),
    ({"logit_bias": {"60": 100}}, lambda a, _: len(set(text_of(a))) == 1),
    ({"logprobs": 5, "temperature": 1, "seed": 3}, lambda a, _: {5, 6} >= {
        len(row) for row in a.choices[0].logprobs.top_logprobs}),
    ({"logprobs": 1, "stream": True}, lambda a, _: sum(
        len(chunk.choices[0].logprobs.tokens) for chunk in a) == 24),
    ({"prompt": [LONG, LONG]},
     lambda a, _: a.usage.prompt_tokens_details.cached_tokens >= 48),
    ({"stream": True, "stream_options": {"include_usage": True}},
     lambda a, _: a[-1].choices == [] and a[-1].usage.completion_tokens == 24),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}},
     lambda a, _: [c.usage.total_tokens - c.usage.prompt_tokens for c in a][-1] == 24
     and all(c.usage and c.choices for c in a)),
    ({"stream": True, "stream_options": {"continuous_usage_stats": False}},
     lambda a, _: not any(c.usage for c in a)),
    ({"messages": user("Who?"), "stream": True, "stream_options": {
        "continuous_usage_stats": True, "include_usage": True}},
     lambda a, _: all(c.usage for c in a) and a[-1].choices == []),
    ({"extra_body": {"top_k": 1, "min_p": 0.1, "ignore_eos": True}, "temperature": 1,
      "seed": 3},
     lambda a, text: text_of(a) == text),
    ({"user": "me", "best_of": 1, "echo": False}, lambda a, text: text_of(a) == text),
    ({"messages": user("Who?")}, lambda a, text: text_of(a) == text
     and a.choices[0].message.role == "assistant"),
    ({"messages": user("Who?"), "stream": True}, lambda a, text: text_of(a) == text
     and [c.choices[0].delta.role for c in a] == ["assistant"] + [None] * (len(a) - 1)),
    ({"messages": [{"role": "developer", "content": "Be brief.", "tool_calls": None},
                   *user("Who?")]}, lambda a, _: text_of(a)),
    ({"messages": user([{"type": "text", "text": part} for part in ("Who?",)])},
     lambda a, text: text_of(a) == text),
    ({"messages": [{"role": "user", "content": None, "tool_calls": [CALL]}]},
     lambda a, text: text_of(a) == text),
    ({"messages": user("Who?"), "max_completion_tokens": 3},
     lambda a, _: a.usage.completion_tokens == 3),
    ({"messages": user("Who?"), "logprobs": True, "top_logprobs": 2, "temperature": 1,
      "seed": 3}, lambda a, _: top_counts(a) == {2}),
    ({"messages": user("Who?"), "logprobs": True, "top_logprobs": 0},
     lambda a, _: top_counts(a) == {0}),
    ({"messages": user("Who?"), "logprobs": True}, lambda a, text: text == b"".join(
        bytes(row.bytes) for row in a.choices[0].logprobs.content).decode()),
    ({"messages": user("Who?"), "response_format": {"type": "json_object"},
      "max_tokens": 3}, lambda a, _: text_of(a).startswith("{")),
    ({"messages": user("Who?"), "response_format": FORM, "max_tokens": 80},
     lambda a, _: json.loads(text_of(a)).keys() == SCHEMA["properties"].keys()),
    ({"messages": user("Who?"), "response_format": FORM, "max_tokens": 80,
      "stream": True}, lambda a, _: json.loads(text_of(a))["age"] >= 0),
    ({"messages": user("Who?"), "tools": [TOOL], "tool_choice": "required",
      "max_tokens": 99}, lambda a, _: says(a)),
    ({"messages": user("Who?"), "tools": [OTHER, TOOL], "tool_choice": NAMED,
      "max_tokens": 99, "stream": True, "parallel_tool_calls": False},
     lambda a, _: says(a)),
    ({"messages": user("Who?"), "tools": [TOOL], "tool_choice": "auto"},
     lambda a, text: text_of(a) == text),
    ({"messages": user("Who?"), "tools": [TOOL], "tool_choice": "none",
      "stream": True}, lambda a, text: text_of(a) == text),
    ({"messages": user("Who?"), "parallel_tool_calls": False, "tool_choice": "auto",
      "reasoning_effort": "low", "extra_body": {
          "priority": 0, "add_generation_prompt": True, "n": None, "tools": None,
          "spaces_between_special_tokens": True,
          "chat_template_kwargs": {"enable_thinking": False}}},
     lambda a, text: text_of(a) == text),
    # What is still missing is refused.
    ({"messages": user([IMAGE])}, None)]


def check_features(llm, client):
    params = SamplingParams(temperature=0, max_tokens=24)
    works = 0
    for options, is_right in FEATURES:
        is_chat = "messages" in options
        prompt = {} if is_chat else {"prompt": "ROMEO:"}
        create = (client.chat if is_chat else client).completions.create
        outputs = llm.generate("user:\nWho?\n" if is_chat else "ROMEO:", params, False)
        try:
            answer = create(**{"model": NAME, "max_tokens": 24, "temperature": 0}
                            | prompt | options)
            answer = list(answer) if options.get("stream") else answer
        except openai.BadRequestError as error:
            assert is_right is None, (options, error)
        else:
            assert is_right(answer, outputs[0].outputs[0].text), (options, answer)
            works += 1
    assert client.models.retrieve(NAME).id == NAME
    print(f"{works} of {len(FEATURES)} features work, and the others are refused")


def check_calls_in_texts():
    """However a template marks calls, and wherever a stream is cut."""
    from server_tools import Calls

    call = '{"name": "say", "arguments": {"a": "}\\"<"}}'
    other = call.replace("say", "sing")
    plain, tag = '{"name": "Bob", "age": 3}', f"<tool_call>\n{call}\n</tool_call>"
    unknown, broken = tag.replace("say", "sing"), f"<tool_call>{call[:-1]}"
    thought = f"<think>{tag} or {broken}</think>"
    for text, content, count in (
            (f"Well. {tag}\n<tool_call>{call}</tool_call>", "Well. ", 2),
            (f"[TOOL_CALLS] [{call}, {call}]", "", 2),
            (f"[TOOL_CALLS] [{call}] and, ", " and, ", 1),
            (f"[TOOL_CALLS] [{other}, {call}]", f"[TOOL_CALLS] [{other}, ]", 1),
            (call.replace("arguments", "parameters"), "", 1), (plain, plain, 0),
            (f"<|python_tag|>{call}; {call}", "", 2), ("1 <tool", "1 <tool", 0),
            ('<tool_call>{"name": [5]}', '<tool_call>{"name": [5]}', 0),
            (f"{tag} then, {tag}.", " then, .", 2), (thought + tag, thought, 1),
            (f"{unknown}{tag}", unknown, 1), (f"{broken}{tag}, ", f"{broken}, ", 1)):
        found, calls = Calls(["say"]).read(text, True)
        assert (found, len(calls)) == (content, count), (text, found, calls)
        assert all(json.loads(each["function"]["arguments"]) == {"a": '}"<'}
                   for each in calls)
    for arguments, count in (('{"a": "東京"}', 1), ('{"a":"Gr\\u00fc\u00dfe"}', 1),
                             ('{"a": [1e3, 1.0]}', 1), ('{"a": NaN}', 0)):
        text = f'{{"name": "say", "arguments": {arguments}}}'
        content, calls = Calls(["say"]).read(text, True)
        assert len(calls) == count and content == (text if not calls else "")
        assert all(call["function"]["arguments"] == arguments for call in calls)
    assert Calls(["say"], thinks=True).read(f"{tag}</think>{tag}", True)[0] == (
        f"{tag}</think>")

    rng = random.Random(0)
    pieces = {" I say, ": " I say, ", "1 < 2.": "1 < 2.", tag: "", thought: thought,
              unknown: unknown, broken: broken, "[tool": "[tool"}
    for _ in range(100):
        parts = rng.choices([*pieces], k=rng.randrange(1, 9))
        text, calls, said, at = "".join(parts), [], "", 0
        parser = Calls(["say"])
        while at < len(text):
            at, before = at + rng.randrange(1, 21), at
            content, new = parser.read(text[before:at], at >= len(text))
            said, calls = said + content, calls + new
        assert said == "".join(map(pieces.get, parts)), (text, said)
        assert [each["index"] for each in calls] == [*range(parts.count(tag))], text


def check_grammars(compilers):
    """One compiler, which keeps its grammars, serves all requests; and it was not the
    event loop that waited for it.
    """
    [(compiler, thread)] = compilers
    assert compiler.get_cache_size_bytes() > 0 and thread.name != "event loop"


@contextmanager
def noted_compilers():
    """The compilers that are made meanwhile, and the threads that make them."""
    made, make = [], xgrammar.GrammarCompiler

    def note(*arguments, **options):
        made.append((make(*arguments, **options), threading.current_thread()))
        return made[-1][0]

    xgrammar.GrammarCompiler = note
    try:
        yield made
    finally:
        xgrammar.GrammarCompiler = make


def check_token_texts(llm):
    """Every token has its own bytes and, in completions, its own text."""
    tokenizer, byte_of = llm.tokenizer, {c: b for b, c in bytes_to_unicode().items()}
    answers = load_server().Answers(llm, SamplingParams(logprobs=512))
    row = {id: Logprob(-1.0 - id, id + 1) for id in range(512)}
    [said] = answers.chat_logprobs([row])["content"]
    names = tokenizer.convert_ids_to_tokens(range(512))
    known = [bytes(byte_of.get(c, 0) for c in name)
             for name in names if name not in tokenizer.all_special_tokens]
    known += [token.encode() for token in tokenizer.all_special_tokens]
    assert sorted(bytes(top["bytes"]) for top in said["top_logprobs"]) == sorted(known)
    [top] = answers.text_logprobs([row])["top_logprobs"]
    assert len(top) == 512
    assert all(tokenizer.decode([id]) in top for id in range(512)
               if "\ufffd" not in tokenizer.decode([id]))


def check_spaces_of_tokens():
    """In a tokenizer like the first Llama's, where `decode([token])` drops a space, and
    where a byte and a letter may have the same text.
    """
    ids = {f"<0x{byte:02X}>": byte for byte in range(256)} | {
        "▁true": 256, "true": 257, "t": 258}
    raw = Tokenizer(models.BPE(ids, [], byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    llm = SimpleNamespace(get_tokenizer=lambda: tokenizer)
    answers = load_server().Answers(llm, SamplingParams(logprobs=len(ids)))
    row = {id: Logprob(-1.0 - id, id + 1) for id in ids.values()}
    [said] = answers.chat_logprobs([row])["content"]
    found = {bytes(top["bytes"]) for top in said["top_logprobs"]}
    assert found == {bytes([byte]) for byte in range(256)} | {b" true", b"true"}
    [top] = answers.text_logprobs([row])["top_logprobs"]
    assert len(top) == len(ids) and {"\\xc3", " true", "true", "t"} <= top.keys(), top


# -- Wrong requests --------------------------------------------------------------------

def bias(value):
    return {"logit_bias": value}


def message(**fields):
    return {"messages": [fields]}


def form(**fields):
    return {"response_format": fields}


# What is wrong with the body of a completion, or of a chat; and what the answer names
# if that is not the first of these fields.
WRONG_TEXTS = [
    ({"prompt": 5},), ({"prompt": None},), ({"prompt": {}},), ({"prompt": []},),
    ({"prompt": [[]]},), ({"prompt": ["A", 5]},), ({"prompt": [-1]},),
    ({"prompt": [99999]},), ({"prompt": [1.5]},), ({"prompt": ""},),
    ({"prompt": [5] * 5000},), ({"model": 5},),
    ({"max_tokens": 0},), ({"max_tokens": "x"},), ({"temperature": -1},),
    ({"temperature": math.nan},), ({"temperature": "hot"},), ({"top_p": 2},),
    ({"n": 0},), ({"n": 10**6},), ({"n": True},), ({"seed": "x"},),
    ({"stop": 3, "stream": True},), ({"stop": [""]},), ({"stop": [3]},),
    ({"stop_token_ids": [99999]},), ({"logprobs": -2},), ({"logprobs": True},),
    ({"logprobs": 21},), ({"prompt": "\ud800"},), ({"stop": "\udfff"},),
    ({"prompt": ["A", "\ud800"]},),
    ({"presence_penalty": 3},), ({"frequency_penalty": math.inf},), (bias(5),),
    (bias({"a": 1}),), (bias({"5": math.nan}),), (bias({"5": math.inf}),),
    (bias({"5": "x"}),), (bias({"99999": 1}),), (bias({"-1": 1}),), ({"best_of": 2},),
    ({"echo": True},), ({"suffix": "the end"},), ({"stream": "yes"},),
    ({"stream_options": {"include_usage": True}}, "stream"),
    ({"stream_options": 5, "stream": True},),
    ({"stream_options": {"include_usage": 5}, "stream": True},),
    ({"logits_processors": [1]},), ({"prompt_logprobs": 1},), ({"top_logprobs": 2},),
    ({"colour": "red"},)]
WRONG_CHATS = [
    ({"messages": None},), ({"messages": []},), ({"messages": "Hello"},),
    ({"messages": ["Hello"]},), (message(role="user"), "content"),
    (message(role="user", content=None), "content"), (message(content="A"), "role"),
    (message(role="wizard", content="A"), "role"),
    (message(role="user", content=5), "content"),
    (message(role="user", content=[IMAGE]), "content"),
    (message(role="user", content=[{"type": "text"}]), "content"),
    (message(role="assistant", tool_calls=5), "tool_calls"),
    (message(role="assistant", tool_calls=[{}]), "function"),
    (message(role="assistant", tool_calls=[
        {"function": {"name": "a", "arguments": "{"}}]), "arguments"),
    (message(role="assistant", tool_calls=[
        {"function": {"name": "a", "arguments": "5"}}]), "arguments"),
    ({"messages": [{"role": "user", "content": "long " * 5000}]},),
    ({"chat_template_kwargs": {"chat_template": TEMPLATE}},),
    ({"chat_template_kwargs": {"chat_template": None}},), ({"chat_template": "A"},),
    ({"logprobs": 5},), ({"top_logprobs": 2}, "logprobs"),
    ({"top_logprobs": -1, "logprobs": True},), ({"add_special_tokens": True},),
    ({"top_logprobs": 21, "logprobs": True},),
    (message(role="user", content=[{"type": "text", "text": "\ud800"}]), "messages"),
 ({"max_completion_tokens": 0},),
    ({"max_completion_tokens": "x"},), ({"tool_choice": "required"},),
    ({"modalities": ["audio"]},), ({"response_format": "json"},),
    (form(type="xml"),), (form(type="json_schema"),),
    (form(type="json_schema", json_schema={"name": "a"}),),
    (form(type="json_schema", json_schema={"schema": 5}),),
    (form(type="json_schema", json_schema={"schema": {"type": "strng"}}), "strng"),
    (form(type="json_schema", json_schema={
        "schema": {"type": "string", "pattern": "("}}), "parenthesis"),
    (form(type="json_object") | {"min_tokens": 1}, "min_tokens"),
    *((form(type="json_schema", json_schema={"schema": schema}), word)
      for schema, word in (
          ({"type": "array", "uniqueItems": True}, "uniqueItems"),
          ({"type": "object", "propertyNames": {"maxLength": 2}}, "propertyNames"),
          ({"properties": {"a": {"not": {}}}}, "not"),
          ({"allOf": [{"type": "string"}, {"const": "a"}]}, "allOf"),
          ({"type": "string", "pattern": "a", "maxLength": 2}, "pattern"),
          ({"type": "string", "pattern": "a", "format": "date"}, "pattern"),
          ({"type": "string", "format": "regex"}, "format"),
          ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
          ({"maxLength": 3}, "maxLength without a type"),
          ({"required": ["a"]}, "required"), ({"contains": {}}, "contains"),
          ({"properties": {"a": {}}, "required": ["b"]}, "required 'b'"),
          ({"enum": [1, 5], "minimum": 2}, "minimum beside enum"),
          ({"enum": [1, "a"], "type": "string"}, "type beside enum"),
          ({"anyOf": [{"type": "null"}], "multipleOf": 2}, "multipleOf beside anyOf"),
          ({"$ref": "#/$defs/a", "type": "null", "$defs": {"a": {}}}, "type beside"),
          ({"$ref": "http://localhost/a"}, "$ref"),
          ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
          ({"properties": {"xa": {}}, "patternProperties": {"x": {"type": "null"}}},
           "patternProperties"))),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {
        "name": "sing"}}}, "tool_choice"), ({"tools": [{}]},), ({"tools": 5},),
    ({"tool_choice": "sometimes"},),
    (form(type="json_object") | {"extra": 5}, "extra")]
NO_OBJECTS = [b"", b"{", b"[]", b"5", b"[" * 10**5, b'{"prompt": "\xff"}']


def post(client, path, data):
    """The status, and what the server says."""
    url = urllib.parse.urljoin(str(client.base_url), path)
    request = urllib.request.Request(url, data, headers={
        "Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def check_wrong_requests(llm, client):
    """Each is a 400 that names the field, and nothing of it is left in the engine."""
    for path, right, wrongs in (
            ("completions", {"prompt": "A"}, WRONG_TEXTS),
            ("chat/completions", {"messages": user("A")}, WRONG_CHATS)):
        for wrong, *words in wrongs:
            body = {"max_tokens": 2} | right | wrong
            status, said = post(client, path, json.dumps(body).encode())
            word = words[0] if words else next(iter(wrong))
            assert status == 400 and word in said, (wrong, status, said)
            error, field = json.loads(said)["error"], next(iter(wrong))
            is_long = "number of prompt tokens" in said and "less than" in said
            assert error["code"] == ("context_length_exceeded" if is_long else None)
            assert error["param"] in (field, "tools", *words[-1:]), (wrong, said)
        for data in NO_OBJECTS:
            status, said = post(client, path, data)
            assert status == 400, (data[:20], status, said)
    assert not llm.has_unfinished_requests()
    number = len(WRONG_TEXTS) + len(WRONG_CHATS) + 2 * len(NO_OBJECTS)
    print(f"{number} wrong requests: each is a 400 that names the field")


def check_errors(client):
    """All have OpenAI's form: unknown paths, methods, models, and other content."""
    root = str(client.base_url).removesuffix("v1/")
    body, is_json = b'{"prompt": "A"}', {"Content-Type": "application/json"}
    for path, data, headers, status, word in (
            ("v1/responses", body, is_json, 404, "/v1/responses"),
            ("v1/completions", None, {}, 405, "GET"),
            ("v1/completions", body, {"Content-Type": "text/plain"}, 400, "text/plain"),
            ("v1/completions", b'{"model": "gpt", "prompt": "A"}', is_json, 404, "gpt"),
            ("v1/models/gpt", None, {}, 404, "gpt")):
        try:
            urllib.request.urlopen(urllib.request.Request(root + path, data, headers))
        except urllib.error.HTTPError as error:
            said = json.load(error)["error"]
            assert error.code == status and word in said["message"], (path, said)
            found = said["code"], said["param"]
            assert found == (("model_not_found", "model") if word == "gpt" else
                             (None, None)), said
        else:
            raise AssertionError(f"{path} was answered")
    used = root.rpartition(":")[2].strip("/")
    run = subprocess.run([sys.executable, SERVER, "--port", used], check=False,
                         capture_output=True, text=True)
    assert run.returncode == 2 and used in run.stderr and not run.stdout, run


def check_failed_step(llm, client):
    """In a stream it is an event, before it a status; then others are served."""
    def fail(_):
        del llm.engine.runner.execute
        raise MemoryError("no room")

    chunks = complete(client, "ROMEO:", stream=True, max_tokens=900,
                      extra_body={"ignore_eos": True})
    next(chunks)
    for unlucky in chunks, None:
        llm.engine.runner.execute = fail
        try:
            [*(unlucky or complete(client, "ROMEO:", max_tokens=900))]
        except openai.APIError as error:
            assert "no room" in str(error), error
        else:
            raise AssertionError("nobody says that a step has failed")
    assert complete(client, "ROMEO:").choices[0].text


def check_no_token_left(client):
    """It is the request that is wrong, and others go on."""
    beside = complete(client, "ROMEO:", stream=True, max_tokens=300)
    for stream in False, True:
        body = {"prompt": "A", "stream": stream, "logit_bias": dict.fromkeys(
            range(512), -math.inf)}
        status, said = post(client, "completions", json.dumps(body).encode())
        assert status == (200 if stream else 400) and "logit_bias" in said, said
        assert "invalid_request_error" in said, said
    assert text_of([*beside])


def check_histories(llm, client):
    """Many templates write calls only where there is no content: null, which newer
    versions of transformers leave out. An empty list of calls is none.
    """
    tokenizer = llm.get_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if not m.content and m.content != '' %}"
        "{{ m.tool_calls[0].function.arguments }}{% else %}{{ m.content }}{% endif %}"
        "{% if m.tool_calls is defined %}!{% endif %}{% endfor %}")
    called = CALL["function"]["arguments"]
    try:
        for fields, text in (
                ({"content": None, "tool_calls": [CALL]}, f"A{called}!"),
                ({"tool_calls": [CALL]}, f"A{called}!"),
                ({"content": "", "tool_calls": [CALL]}, "A!"),
                ({"content": "B", "tool_calls": []}, "AB"),
                ({"content": "B", "tool_calls": None}, "AB")):
            messages = [*user("A"), {"role": "assistant"} | fields]
            body = json.dumps({"messages": messages}).encode()
            status, said = post(client, "/tokenize", body)
            assert status == 200, said
            found = llm.tokenizer.decode(json.loads(said)["tokens"])
            assert found == text, (fields, found)
    finally:
        tokenizer.chat_template = TEMPLATE


@contextmanager
def edited(tensor=None, row=0, value=0.0, **generation):
    """The bundled model with another row in one of its tensors, and with other values
    in generation_config.json.
    """
    with TemporaryDirectory() as folder:
        shutil.copytree(Path(nanopaged.__file__).parent / "shakespeare", folder,
                        dirs_exist_ok=True)
        weights, settings = (Path(folder, name) for name in (
            "model.safetensors", "generation_config.json"))
        config = Path(folder, "config.json")
        config.write_text(config.read_text().replace(
            '"tie_word_embeddings": true', '"tie_word_embeddings": false'))
        tensors = load_file(weights)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if tensor:
            tensors[tensor][row] = value
        save_file(tensors, weights, metadata={"format": "pt"})
        settings.write_text(json.dumps(json.loads(settings.read_text()) | generation))
        with LLM(folder, dtype="float32", device="cpu", num_blocks=100) as llm:
            llm.tokenizer.chat_template = TEMPLATE
            with serve(llm) as client:
                yield client


def check_useless_models():
    """A model whose own logits are NaN or inf is a 500 that says so, and no JSON."""
    ways = [(path, body | more | {"stream": stream}) for stream in (False, True)
            for path, body, *mores in (
                ("completions", {"prompt": "A"}, {}, {"logprobs": 2, "n": 2}),
                ("chat/completions", {"messages": user("A")}, {"temperature": 0},
                 {"logprobs": True, "top_logprobs": 2})) for more in mores]
    for edit in (("model.norm.weight", 3, math.nan), ("lm_head.weight", 9, math.nan),
                 ("lm_head.weight", slice(None), math.inf)):
        with edited(*edit) as client:
            for path, body in ways:
                status, said = post(client, path, json.dumps(body).encode())
                assert status == (200 if body["stream"] else 500), (edit, body, said)
                assert "server_error" in said and "model's own logits" in said, said
                assert "NaN," not in said and "Infinity" not in said, said


def check_who_is_to_blame():
    """Of requests that fail in the same step, each has its own error. A NaN in the
    embedding of a token spoils only the prompts that have it.
    """
    bans = dict.fromkeys(range(512), -math.inf)
    bodies = {500: {"prompt": [[7]]}, 200: {"prompt": [[8]], "max_tokens": 40},
              400: {"prompt": [[8]], "logit_bias": bans}}
    with edited("model.embed_tokens.weight", 7, math.nan) as client, (
            ThreadPoolExecutor(48)) as pool:
        bodies[200]["logit_bias"] = {7: -math.inf}
        expected = [500, 200, 400, 400, 500, 400] * 8
        found = [*pool.map(lambda status: post(
            client, "completions", json.dumps(bodies[status]).encode())[0], expected)]
        assert found == expected, found


def check_the_model_s_own_length():
    with edited(max_new_tokens=5) as client:
        for more, count in (({}, 5), ({"max_tokens": 3}, 3), ({"max_tokens": 9}, 9)):
            body = {"ignore_eos": True, "model": NAME} | more
            for path, asked in (("completions", {"prompt": "A"}),
                                ("chat/completions", {"messages": user("A")})):
                _, said = post(client, path, json.dumps(body | asked).encode())
                assert json.loads(said)["usage"]["completion_tokens"] == count, said


def check_many_prompts(llm, client):
    """Others get answers all the while. The last prompt is too long, so none runs."""
    body = json.dumps({"prompt": [[5]] * 20000 + [[5] * 5000]}).encode()
    add, seen = llm.add_request, []
    counted = count_up()
    llm.add_request = lambda *arguments: next(counted) and None or add(*arguments)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, client, "completions", body)
        while not asked.done():
            assert post(client, "/health", None)[0] == 200
            seen.append(int(repr(counted)[6:-1]))
    del llm.add_request
    status, said = asked.result()
    assert status == 400 and "prompt[20000]" in said, said
    assert len({*seen} - {0, 20001}) > 20, seen


def check_closed_loop():
    """Nobody steps for clients whose event loop has closed, or fails in vain."""
    with LLM(dtype="float32", device="cpu", num_blocks=100) as llm:
        engine = load_server().Engine(llm)
        engine.loop = asyncio.new_event_loop()
        engine.loop.close()
        llm.add_request("A")
        before, closed = llm.stats().steps, threading.Event()
        is_closed, engine.loop = engine.loop.is_closed, SimpleNamespace(
            is_closed=lambda: closed.set() or is_closed())
        engine.work.set()
        assert closed.wait(60) and llm.stats().steps == before


def check_other_paths(llm, client):
    root = str(client.base_url).removesuffix("v1/")
    with urllib.request.urlopen(root + "metrics") as answer:
        numbers = dict(line.split() for line in answer.read().decode().splitlines())
    assert numbers["nanopaged_blocks_total"] == "400" and len(numbers) > 8, numbers
    for body, expected in (
            ({"prompt": "ROMEO:"}, llm.tokenizer("ROMEO:").input_ids),
            ({"prompt": "<|bos|>A", "add_special_tokens": False, "model": NAME},
             llm.tokenizer("<|bos|>A", add_special_tokens=False).input_ids),
            ({"messages": user("Who?"), "add_special_tokens": False},
             llm.tokenizer("user:\nWho?\n").input_ids),
            ({"prompt": "A", "model": "gpt"}, "gpt"),
            ({"prompt": ["A", "B"]}, "prompt"), ({"prompt": "A", "echo": True}, "echo"),
            ({"prompt": "A", "colour": 5}, "colour"),
            ({"messages": user("A"), "add_special_tokens": True}, "add_special_tokens"),
            ({"messages": user("A"), "max_tokens": 5}, "max_tokens")):
        status, said = post(client, "/tokenize", json.dumps(body).encode())
        if isinstance(expected, str):
            assert status in (400, 404) and expected in said, (body, said)
        else:
            assert json.loads(said).get("tokens") == expected, (body, said)
    assert urllib.request.urlopen(root + "version").status == 200


def check_crowd(llm, client):
    """Of sixty clients twenty go away, and a wrong request waits for none of them."""
    options = {"max_tokens": 900, "stream": True, "extra_body": {"ignore_eos": True}}
    crowd = [complete(client, f"{i}:", **options) for i in range(20)]
    try:
        complete(client, "A", top_p=7)
    except openai.BadRequestError:
        assert llm.has_unfinished_requests()
    else:
        raise AssertionError("top_p=7 was answered")
    with ThreadPoolExecutor(40) as pool:
        texts = pool.map(lambda i: stream(client, f"{i % 4}:", seed=1)[0], range(40))
        for chunks in crowd:
            next(chunks)
            chunks.close()
        # Each of the four prompts has one answer, whoever asks.
        assert len({(i % 4, "".join(text)) for i, text in enumerate(texts)}) == 4


def check_schemas_of_those_gone(client):
    """Nobody waits for large schemas of clients who have gone."""
    schema = {"enum": [f"{i} {random.random()}" for i in range(3000)]}
    body = {"messages": user("A"), "max_tokens": 1, "response_format": {
        "type": "json_schema", "json_schema": {"schema": schema}}}

    def leave(number):
        schema["title"] = str(number)  # another, so that it is compiled
        try:
            client.with_options(timeout=0.5).chat.completions.create(
                model=NAME, messages=user("A"), response_format=json.loads(
                    json.dumps(body["response_format"])))
        except openai.APITimeoutError:
            return
        raise AssertionError("so soon?")

    with ThreadPoolExecutor(50) as pool:
        assert len([*pool.map(leave, range(50))]) == 50
    start = time.monotonic()
    complete(client, "A", max_tokens=1)
    response_format = {"type": "json_object"}
    client.chat.completions.create(
        model=NAME, messages=user("A"), max_tokens=1, response_format=response_format)
    print(f"after 50 who have gone: {time.monotonic() - start:.1f} s")


def check_eight_clients(llm, client):
    """Together they get what each gets alone, in far fewer steps; one goes away."""
    prompts = [f"{name}:" for name in ("ROMEO", "JULIET", "KING", "QUEEN", "DUKE",
                                       "NURSE", "LADY", "FIRST CITIZEN")]
    options = {"max_tokens": 24, "temperature": 1.0, "seed": 5, "extra_body": {
        "ignore_eos": True}}
    alone = [complete(client, prompt, **options).choices[0].text for prompt in prompts]
    before = llm.stats()
    barrier = threading.Barrier(len(prompts) + 1)

    def read(prompt):
        barrier.wait()
        return "".join(stream(client, prompt, **options)[0])

    def leave():
        barrier.wait()
        endless = options | {"max_tokens": 900, "stream": True}
        chunks = complete(client, "ROMEO:", **endless)
        for _, _ in zip(range(3), chunks, strict=False):
            pass
        chunks.close()

    with ThreadPoolExecutor(9) as pool:
        texts = pool.map(read, prompts)
        pool.submit(leave).result()
        assert list(texts) == alone
    after = llm.stats()
    assert after.steps - before.steps < 4 * 24, (before, after)
    assert 8 * 24 < after.output_tokens - before.output_tokens < 8 * 24 + 400


def check_that_nobody_is_left(llm, client):
    """Clients that go away, in a stream and before an answer, leave nothing behind.

    No garbage collector helps.
    """
    gc.disable()
    options = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}
    try:
        complete(client.with_options(timeout=0.2), "ROMEO:", **options)
    except openai.APITimeoutError:
        pass
    else:
        raise AssertionError("900 tokens in 0.2 seconds?")
    complete(client, "ROMEO:", stream=True, **options).close()
    for _ in range(20):
        complete(client, "ROMEO:", max_tokens=2)  # its steps read who has gone away
        if not llm.has_unfinished_requests():
            break
        time.sleep(0.05)
    assert not llm.has_unfinished_requests() and llm.stats().blocks_used == 0


if __name__ == "__main__":
    os.environ["NO_PROXY"] = "*"
    torch.set_num_threads(1)
    check_spaces_of_tokens()
    check_calls_in_texts()
    check_useless_models()
    check_who_is_to_blame()
    check_the_model_s_own_length()
    check_closed_loop()
    with LLM(dtype="float32", device="cpu", num_blocks=400) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        with noted_compilers() as made, serve(engine) as openai_client:
            check_answers(engine, openai_client)
            check_chat(engine, openai_client)
            check_features(engine, openai_client)
            check_wrong_requests(engine, openai_client)
            check_options(engine, openai_client)
            check_token_texts(engine)
            check_json(engine, openai_client)
            check_grammars(made)
            check_errors(openai_client)
            check_histories(engine, openai_client)
            check_many_prompts(engine, openai_client)
            check_other_paths(engine, openai_client)
            check_no_token_left(openai_client)
            check_failed_step(engine, openai_client)
            check_crowd(engine, openai_client)
            check_schemas_of_those_gone(openai_client)
            check_eight_clients(engine, openai_client)
            check_that_nobody_is_left(engine, openai_client)
    print("server: ok")
