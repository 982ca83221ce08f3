"""The server, by the client that everybody uses: `openai`. It talks to 127.0.0.1 only.

    python server.py [the file of another server, with its make_app(llm, name)]
"""

import gc
import importlib.util
import json
import os
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import openai
import torch
import uvicorn

from nanopaged import LLM, SamplingParams

SERVER = Path(__file__).parent.parent / "server.py"
if sys.argv[1:]:
    SERVER = Path(sys.argv[1])
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}"
NAME = "shakespeare"


@contextmanager
def serve(llm):
    """A client of a server that runs in another thread."""
    spec = importlib.util.spec_from_file_location("openai_server", SERVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = uvicorn.Config(module.make_app(llm, NAME), port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
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


def refusal(create, **options):
    """What the server says of a bad request."""
    try:
        create(model=options.pop("model", NAME), **options)
    except openai.BadRequestError as error:
        return str(error)
    raise AssertionError(f"{options} was not refused")


def check_refusals(client):
    for wrong, word in (
            ({"temperature": -1}, "temperature"), ({"best_of": 2}, "best_of"),
            ({"logprobs": -2}, "logprobs"), ({"prompt": []}, "prompt"),
            ({"model": "gpt"}, NAME), ({"stop": 3, "stream": True}, "stop"),
            ({"suffix": "the end"}, "suffix"), ({"echo": True}, "echo"),
            ({"presence_penalty": 3}, "presence_penalty"),
            ({"extra_body": {"logits_processors": [1]}}, "logits_processors")):
        said = refusal(client.completions.create, **{"prompt": "A"} | wrong)
        assert word in said, (wrong, said)
    for messages in "Hello", ["Hello"]:
        refusal(client.chat.completions.create, messages=messages)


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
    try:
        import xgrammar  # noqa: F401
    except ImportError:
        print("without xgrammar: no JSON")
        return
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    alone = complete(client, "ROMEO:", max_tokens=80).choices[0].text
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(lambda: [complete(
            client, "ROMEO:", max_tokens=80).choices[0].text for _ in range(4)])
        answers = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "A person:"}], n=50,
            temperature=1, seed=3, max_tokens=80, response_format=form)
        assert beside.result() == [alone] * 4
    people = [json.loads(choice.message.content) for choice in answers.choices]
    assert all({*person} == {*SCHEMA["required"]} and type(person["age"]) is int
               and 0 <= person["age"] <= 99 and type(person["alive"]) is bool
               and len(person["name"]) <= 12 for person in people)
    print(f"{len(people)} answers keep to the schema, such as {people[0]}")


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
    with LLM(device="cpu", attention_backend="torch", num_blocks=400) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        with serve(engine) as openai_client:
            check_answers(engine, openai_client)
            check_chat(engine, openai_client)
            check_refusals(openai_client)
            check_options(engine, openai_client)
            check_json(engine, openai_client)
            check_eight_clients(engine, openai_client)
            check_that_nobody_is_left(engine, openai_client)
    print("server: ok")
