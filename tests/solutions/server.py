"""An OpenAI-compatible server: python server.py [MODEL] [--port 8000]

One thread steps the engine for all clients. It hands what has changed to the event
loop, where each client waits for its own answers. When a client goes away, its requests
are aborted. server_requests.py says what a request may contain.
"""

import asyncio
import gc
import json
import logging
import re
import socket
import threading
import time
from argparse import ArgumentParser
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from uuid import uuid4
from weakref import ref

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from server_requests import Chat, Completion, Conversation, Reader, Text
from server_tools import Calls
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from nanopaged import LLM, __version__
from nanopaged.checks import check
from nanopaged.frontend.detokenizer import token_bytes

OBJECTS = {"text": "text_completion", "message": "chat.completion",
           "delta": "chat.completion.chunk"}  # by where the text is
# What programs tell errors by: a code for some words, and the field that is wrong.
CODES = {"model must be '": "model_not_found",
         "max_model_len=": "context_length_exceeded"}
FIELD = re.compile(r"(?:body\.(?:[A-Z]\w+\.)?|[A-Z]+ /\S+ )?([a-z_]+)"
                   r"(?=[.:\[]| must| cannot| do not| is wrong)")
ERRORS = (HTTPException, ImportError, RecursionError, RequestValidationError,
          TypeError, ValueError)


class Engine:
    """A thread that steps the engine. All methods but `run` are for the event loop."""

    def __init__(self, llm):
        self.llm, self.work = llm, threading.Event()
        self.owners = {}  # `Answers` by request id
        threading.Thread(target=self.run, daemon=True).start()

    async def add(self, answers, prompts, params, field):
        """Queue a request for each prompt, or none of them."""
        self.loop = asyncio.get_running_loop()
        for number, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            await asyncio.sleep(0)  # of thousands of prompts, let others take turns
            try:
                request_id = self.llm.add_request(prompt, param)
            except (TypeError, ValueError) as error:  # too long, for example
                await self.drop(answers)
                where = f"{field}[{number}]" if len(prompts) > 1 else field
                raise ValueError(f"{where} cannot be served: {error}") from error
            self.owners[request_id] = answers
            answers.numbers[request_id] = number
        self.work.set()

    async def drop(self, answers):
        """End what is left of them. Their client has them, or is gone."""
        for request_id in answers.numbers:
            await asyncio.sleep(0)
            self.owners.pop(request_id, None)
            self.llm.abort_request(request_id)
        self.work.set()

    def run(self):
        failures = [None]
        while self.work.wait():
            self.work.clear()
            while self.llm.has_unfinished_requests() and not self.loop.is_closed():
                try:
                    self.loop.call_soon_threadsafe(self.give, self.llm.step(), failures)
                    failures = [None]
                except Exception as error:  # a later step reports what this one ended
                    failures.append(error)

    def give(self, outputs, failures):
        """Requests with errors of their own come last, in the order of these errors. If
        a step has failed, its error is that of all others it has ended.
        """
        for output in reversed(outputs):
            if answers := self.owners.get(output.request_id):
                answers.take(output, failures)


class Answers:
    """The answers to one HTTP request, which may have several prompts."""

    def __init__(self, llm, params, make_reader=None):
        self.llm, self.params = llm, params
        self.readers = make_reader and defaultdict(make_reader)  # by index
        self.id, self.created = uuid4().hex, int(time.time())
        self.numbers = {}  # of the prompts, by request id
        self.outputs, self.news = {}, asyncio.Event()  # by prompt; whether any is new
        self.said = {}  # by index: how many characters and tokens of it are told
        self.failure = None

    def take(self, output, failures):
        self.outputs[self.numbers[output.request_id]] = output
        if any(choice.finish_reason == "abort" for choice in output.outputs):
            failure = failures.pop() if failures[2:] else failures[-1]
            status = 400 if isinstance(failure, ValueError) else 500
            self.failure = HTTPException(status, f"a step has failed: {failure!r}")
            logging.getLogger("nanopaged").error("%s", self.failure, exc_info=failure)
        self.news.set()

    def choices(self):
        """All that there are, by index."""
        return {number * self.params.n + choice.index: choice
                for number, output in self.outputs.items() for choice in output.outputs}

    async def changes(self):
        """The choices that have changed, again and again until all have ended."""
        told, is_done = {}, False
        while not is_done:
            await self.news.wait()
            self.news.clear()
            if self.failure:
                raise self.failure
            done = [output.finished for output in self.outputs.values()]
            is_done, before, told = sum(done) == len(self.numbers), told, self.choices()
            yield {index: choice for index, choice in told.items()
                   if choice != before.get(index)}

    async def end(self):
        async for _ in self.changes():
            pass

    def parts(self, choices, key):
        """What is new in these choices."""
        parts = []
        for index, choice in sorted(choices.items()):
            start, first = self.said.get(index, (0, 0))
            new, calls, reason = choice.text[start:], [], choice.finish_reason
            if self.readers is not None:
                reader = self.readers[index]
                new, calls = reader.read(new, reason is not None)
                reason = "tool_calls" if reader.count and reason == "stop" else reason
            content = new
            if key != "text":
                content = {} if index in self.said else {"role": "assistant"}
                content["content"] = new or (None if calls else "")
                if calls:
                    content["tool_calls"] = calls
            self.said[index] = len(choice.text), len(choice.token_ids)
            show = self.text_logprobs if key == "text" else self.chat_logprobs
            rows = choice.logprobs
            parts.append({"index": index, key: content, "finish_reason": reason,
                          "logprobs": None if rows is None else show(rows[first:])})
        return parts

    def entries(self, row):
        """What to say of each token: first the sampled one, then the most likely ones.

        Bytes that are not a whole character are shown as "\\xc3".
        """
        entries = {}
        for token, logprob in row.items():
            _, data = token_bytes(ref(self.llm.get_tokenizer()), token, False)
            entries[token] = {"token": data.decode(errors="backslashreplace"),
                              # JSON has no infinity.
                              "logprob": max(logprob.logprob, -9999.0),
                              "bytes": list(data)}
        return entries

    def chat_logprobs(self, rows):
        content = []
        for row in rows:
            entries = self.entries(row)
            likely = sorted(row, key=lambda token: row[token].rank)
            top = [entries[token] for token in likely[: self.params.logprobs]]
            sampled, *_ = entries.values()
            content.append(sampled | {"top_logprobs": top})
        return {"content": content}

    def text_logprobs(self, rows):
        tops = [{} for _ in rows]
        for top, row in zip(tops, rows, strict=True):
            for token, entry in self.entries(row).items():
                # Two tokens may have the same text, and JSON has it only once.
                text = entry["token"]
                top[f"token_id:{token}" if text in top else text] = entry["logprob"]
        firsts = [next(iter(top.items())) for top in tops]
        return {"tokens": [text for text, _ in firsts],
                "token_logprobs": [value for _, value in firsts], "top_logprobs": tops}

    def usage(self):
        outputs = self.outputs.values()
        asked = sum(len(output.prompt_token_ids) for output in outputs)
        said = sum(len(choice.token_ids) for choice in self.choices().values())
        cached = sum(output.num_cached_tokens for output in outputs)
        return {"prompt_tokens": asked, "completion_tokens": said,
                "total_tokens": asked + said,
                "prompt_tokens_details": {"cached_tokens": cached}}


def error_body(message, status):
    kind = "invalid_request_error" if status < 500 else "server_error"
    field = FIELD.match(message)
    return {"error": {
        "message": message, "type": kind, "param": field and field[1],
        "code": next((CODES[words] for words in CODES if words in message), None)}}


async def refuse(request, error):
    status, message = getattr(error, "status_code", 400), str(error)
    sent = request.headers.get("content-type")
    if isinstance(error, HTTPException):  # for 404 and 405
        message = f"{request.method} {request.url.path}: {error.detail}"
    elif isinstance(error, RequestValidationError) and "json" not in str(sent):
        message = f"Content-Type must be application/json, got {sent}"
    elif isinstance(error, RequestValidationError):  # from pydantic
        # It knows where each mistake is: ("body", "messages", 0, "role"), for example.
        message = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
                            for each in error.errors())
    return JSONResponse(error_body(message, status), status)


def make_app(llm, name, origins=()):
    # A full collection pauses everything: spare it what was there before any request.
    gc.freeze()
    app = FastAPI(exception_handlers=dict.fromkeys(ERRORS, refuse))
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"],
                           allow_headers=["*"])
    # Grammars leave most threads to others.
    compiling = asyncio.Semaphore(2)
    reader, engine, longest = Reader(llm), Engine(llm), llm.engine.max_model_len
    card = {"id": name, "object": "model", "created": 0, "owned_by": "nanopaged",
            "max_model_len": longest}

    @app.get("/health")
    async def health():
        return {}

    @app.get("/version")
    async def version():
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics():
        """For Prometheus."""
        running = len(llm.engine.scheduler.running)
        waiting = llm.engine.num_unfinished - running
        numbers = {"running": running, "waiting": waiting} | asdict(llm.stats())
        return PlainTextResponse("".join(
            f"nanopaged_{name} {number}\n" for name, number in numbers.items()))

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}")
    async def model(model):
        if model != name:
            raise HTTPException(404, f"model must be {name!r}, got {model!r}")
        return card

    @app.post("/tokenize")
    async def tokenize(body: Conversation | Text):
        await model(name if body.model is None else body.model)
        ids, *others = await run_in_threadpool(reader.prompts, body)
        check(not others, "prompt", "a single one here", 1 + len(others))
        return {"count": len(ids), "max_model_len": longest, "tokens": ids}

    @app.post("/v1/completions")
    async def completions(request: Request, body: Completion):
        return await answer(request, body, "prompt", "text", "text")

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: Chat):
        return await answer(request, body, "messages", "message", "delta")

    async def answer(request, body, field, key, chunk_key):
        """The whole completion, or a stream of chunks."""
        await model(name if body.model is None else body.model)
        check(body.stream or body.stream_options is None, "stream",
              "true for stream_options", body.stream)
        # Long prompts and grammars take time, and the event loop must not wait.
        prompts, params, form = await run_in_threadpool(reader.read, body)
        if form:
            async with compiling:
                if await request.is_disconnected():
                    return None
                params = await run_in_threadpool(reader.guide, params, form)
        make_reader, tools = None, body.usable_tools()
        if tools:  # some templates begin to think before the answer does
            end = llm.tokenizer.decode(prompts[0][-9:]).rstrip()
            make_reader = partial(Calls, tools, end.endswith("<think>"),
                                  1 if body.parallel_tool_calls is False else 2**31)
        answers = Answers(llm, params[0], make_reader)
        await engine.add(answers, prompts, params, field)
        if body.stream:  # it ends when all is said, or when the client goes away
            return StreamingResponse(chunks(answers, chunk_key, body.stream_options),
                                     media_type="text/event-stream",
                                     background=BackgroundTask(engine.drop, answers))
        # The only thing that a client says now is that it goes away.
        waiting = {*map(asyncio.ensure_future, (answers.end(), request.receive()))}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await engine.drop(answers)
            for each in waiting:
                each.cancel()
        if answers.failure:
            raise answers.failure
        # FastAPI would take long to look through thousands of choices.
        return JSONResponse(wrap(answers, answers.parts(answers.choices(), key), key))

    async def chunks(answers, key, options):
        """Events with what is new in the choices that have changed."""
        always = (options or {}).get("continuous_usage_stats")
        try:
            async for changed in answers.changes():
                yield event(wrap(answers, answers.parts(changed, key), key, always))
        except HTTPException as error:
            yield event(error_body(error.detail, error.status_code))
        if options and options.get("include_usage"):
            yield event(wrap(answers, [], key))
        yield "data: [DONE]\n\n"

    def event(content):
        return f"data: {json.dumps(content, allow_nan=False)}\n\n"

    def wrap(answers, parts, key, has_usage=True):
        usage = {"usage": answers.usage()} if has_usage else {}
        return {"id": answers.id, "object": OBJECTS[key], "model": name,
                "created": answers.created, "choices": parts} | usage

    return app


def main():
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a directory, or an id of the hub")
    parser.add_argument("--dtype", default="auto", help="as that of nanopaged.LLM")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", help="what clients call the model")
    parser.add_argument("--allowed-origins", nargs="*", default=[], help="of web pages")
    options = parser.parse_args()
    name = options.served_model_name or Path(options.model or "nanopaged").name
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:  # so that another server cannot take it while this one loads
        address = socket.create_server((options.host, options.port), family=family)
    except (OSError, OverflowError) as error:
        parser.error(f"--host {options.host} --port {options.port}: {error}")
    port = address.getsockname()[1]
    print(f"Loading. {name} will be at http://{options.host}:{port}/v1", flush=True)
    with suppress(KeyboardInterrupt), LLM(options.model, dtype=options.dtype) as llm:
        app = make_app(llm, name, options.allowed_origins)
        config = uvicorn.Config(app, timeout_graceful_shutdown=2)
        uvicorn.Server(config).run(sockets=[address])


if __name__ == "__main__":
    main()
