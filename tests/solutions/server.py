"""An OpenAI-compatible server: python server.py [MODEL] [--port 8000]

One thread steps the engine for all clients. It hands what has changed to the event
loop, where each client waits for its own answers. When a client goes away, its requests
are aborted. server_requests.py says what a request may contain.
"""

import asyncio
import json
import logging
import socket
import threading
import time
from argparse import ArgumentParser
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4
from weakref import ref

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from server_requests import Chat, Completion, Reader
from server_tools import read_calls
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from nanopaged import LLM, __version__
from nanopaged.checks import check
from nanopaged.frontend.detokenizer import token_bytes

OBJECTS = {"text": "text_completion", "message": "chat.completion",
           "delta": "chat.completion.chunk"}  # by where the text is


class StepError(Exception):
    """A step has failed, and these requests with it."""

    status_code = 500


ERRORS = (HTTPException, ImportError, RecursionError, RequestValidationError, StepError,
          TypeError, ValueError)


class Engine:
    """A thread that steps the engine. All methods but `run` are for the event loop."""

    def __init__(self, llm):
        self.llm, self.work = llm, threading.Event()
        self.owners = {}  # `Answers` by request id
        threading.Thread(target=self.run, daemon=True).start()

    def add(self, answers, prompts, params, field):
        """Queue a request for each prompt, or none of them."""
        self.loop = asyncio.get_running_loop()
        for number, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            try:
                request_id = self.llm.add_request(prompt, param)
            except (TypeError, ValueError) as error:  # too long, for example
                self.drop(answers)
                where = f"{field}[{number}]" if len(prompts) > 1 else field
                raise ValueError(f"{where} cannot be served: {error}") from error
            self.owners[request_id] = answers
            answers.numbers[request_id] = number
        self.work.set()

    def drop(self, answers):
        """End what is left of them. Their client has them, or is gone."""
        for request_id in answers.numbers:
            self.owners.pop(request_id, None)
            self.llm.abort_request(request_id)
        self.work.set()

    def run(self):
        failure = None
        while self.work.wait():
            self.work.clear()
            while self.llm.has_unfinished_requests():
                try:
                    outputs = self.llm.step()
                except Exception as error:  # the next step reports what this one ended
                    failure = error
                else:
                    self.loop.call_soon_threadsafe(self.give, outputs, failure)

    def give(self, outputs, failure):
        for output in outputs:
            if answers := self.owners.get(output.request_id):
                answers.take(output, failure)


class Answers:
    """The answers to one HTTP request, which may have several prompts."""

    def __init__(self, llm, params, tools=(), most_calls=None):
        self.llm, self.params = llm, params
        self.tools, self.most_calls = tools, most_calls
        self.id, self.created = uuid4().hex, int(time.time())
        self.numbers = {}  # of the prompts, by request id
        self.outputs, self.choices = {}, {}  # by prompt; by index
        self.changed, self.news = {}, asyncio.Event()  # choices by index; there are any
        self.said = {}  # by index: how many characters, tokens and calls of it are told
        self.failure = None

    def take(self, output, failure=None):
        """Note an output, and its choices that have changed."""
        number = self.numbers[output.request_id]
        self.outputs[number] = output
        new = {index: choice
               for index, choice in enumerate(output.outputs, number * self.params.n)
               if choice != self.choices.get(index)}
        if any(choice.finish_reason == "abort" for choice in new.values()):
            self.failure = StepError(f"a step has failed: {failure!r}")
            logging.getLogger("nanopaged").error("%s", self.failure, exc_info=failure)
        self.choices |= new
        self.changed |= new
        self.news.set()

    async def changes(self):
        """The choices that have changed, again and again until all have ended."""
        is_done = False
        while not is_done:
            await self.news.wait()
            self.news.clear()
            if self.failure:
                raise self.failure
            changed, self.changed = self.changed, {}
            done = [output.finished for output in self.outputs.values()]
            is_done = sum(done) == len(self.numbers)
            yield changed

    async def end(self):
        async for _ in self.changes():
            pass

    def parts(self, choices, key):
        """What is new in these choices."""
        parts = []
        for index, choice in sorted(choices.items()):
            start, first, told = self.said.get(index, (0, 0, 0))
            text, calls, reason = choice.text, [], choice.finish_reason
            if self.tools:
                text, calls = read_calls(text, self.tools, reason is not None)
                calls = calls[: self.most_calls]
                reason = "tool_calls" if calls and reason == "stop" else reason
            content = text[start:]
            if key != "text":
                content = {} if index in self.said else {"role": "assistant"}
                content["content"] = text[start:] or (None if calls else "")
                if calls[told:]:
                    content["tool_calls"] = calls[told:]
            self.said[index] = len(text), len(choice.token_ids), len(calls)
            parts.append({"index": index, key: content, "logprobs": None,
                          "finish_reason": reason})
            if choice.logprobs is not None:
                show = self.text_logprobs if key == "text" else self.chat_logprobs
                parts[-1]["logprobs"] = show(choice.logprobs[first:])
        return parts

    def entries(self, row):
        """What to say of each token: first the sampled one, then the most likely ones.

        Bytes that are not a whole character are shown as "\\xc3".
        """
        entries = {}
        for token, logprob in row.items():
            _, data = token_bytes(ref(self.llm.get_tokenizer()), token, False)
            entries[token] = {"token": data.decode(errors="backslashreplace"),
                              "logprob": logprob.logprob, "bytes": list(data)}
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
        tokens, logprobs, tops = [], [], []
        for row in rows:
            top = {}
            for token, entry in self.entries(row).items():
                # Two tokens may have the same text, and JSON has it only once.
                text = entry["token"]
                top[f"token_id:{token}" if text in top else text] = entry["logprob"]
            sampled, *_ = top
            tokens.append(sampled)
            logprobs.append(top[sampled])
            tops.append(top)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops}

    def usage(self):
        outputs = self.outputs.values()
        asked = sum(len(output.prompt_token_ids) for output in outputs)
        said = sum(len(choice.token_ids) for output in outputs
                   for choice in output.outputs)
        cached = sum(output.num_cached_tokens for output in outputs)
        return {"prompt_tokens": asked, "completion_tokens": said,
                "total_tokens": asked + said,
                "prompt_tokens_details": {"cached_tokens": cached}}


class Events(StreamingResponse):
    """Server-sent events, which may end because the client goes away."""

    def __init__(self, events, at_end):
        super().__init__(events, media_type="text/event-stream")
        self.at_end = at_end

    async def __call__(self, *arguments):
        try:
            await super().__call__(*arguments)
        finally:
            self.at_end()


def error_body(message, status):
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


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
    app = FastAPI(exception_handlers=dict.fromkeys(ERRORS, refuse))
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"],
                           allow_headers=["*"])
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
    async def tokenize(body: Chat | Completion):
        [ids] = await run_in_threadpool(body.prompts, llm)
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
        prompts, params = await run_in_threadpool(reader.read, body)
        most_calls = 1 if body.parallel_tool_calls is False else None
        answers = Answers(llm, params[0], body.usable_tools(), most_calls)
        engine.add(answers, prompts, params, field)
        if body.stream:
            return Events(chunks(answers, chunk_key, body.stream_options),
                          lambda: engine.drop(answers))
        # The only thing that a client says now is that it goes away.
        waiting = {*map(asyncio.ensure_future, (answers.end(), request.receive()))}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            engine.drop(answers)
            for each in waiting:
                each.cancel()
        if answers.failure:
            raise answers.failure
        parts = answers.parts(answers.choices, key)
        return wrap(answers, parts, key) | {"usage": answers.usage()}

    async def chunks(answers, key, options):
        """Events with what is new in the choices that have changed."""
        try:
            async for changed in answers.changes():
                yield event(wrap(answers, answers.parts(changed, key), key))
        except StepError as error:
            yield event(error_body(str(error), 500))
        if options and options.include_usage:
            yield event(wrap(answers, [], key) | {"usage": answers.usage()})
        yield "data: [DONE]\n\n"

    def event(content):
        return f"data: {json.dumps(content)}\n\n"

    def wrap(answers, parts, key):
        return {"id": answers.id, "object": OBJECTS[key], "model": name,
                "created": answers.created, "choices": parts}

    return app


def main():
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a directory, or an id of the hub")
    parser.add_argument("--dtype", default="auto", help="as that of nanopaged.LLM")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", help="what clients call the model")
    parser.add_argument("--allowed-origins", nargs="*", default=[], help="web pages "
                        "that may ask, such as https://example.org, or '*'")
    options = parser.parse_args()
    name = options.served_model_name or Path(options.model or "nanopaged").name
    address = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
    address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        address.bind((options.host, options.port))
    except (OSError, OverflowError) as error:
        parser.error(f"--host {options.host} --port {options.port}: {error}")
    port = address.getsockname()[1]
    print(f"Loading. {name} will be at http://{options.host}:{port}/v1", flush=True)
    with LLM(options.model, dtype=options.dtype) as llm, suppress(KeyboardInterrupt):
        app = make_app(llm, name, options.allowed_origins)
        config = uvicorn.Config(app, timeout_graceful_shutdown=2)
        uvicorn.Server(config).run(sockets=[address])


if __name__ == "__main__":
    main()
