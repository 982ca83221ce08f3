"""An OpenAI-compatible server, at port 8000: python server.py [MODEL] [--dtype float32]

Every client reads a stream of its own, in a pool of threads: whoever asks for more
steps the engine for all. When a client goes away its streams are closed, and that
aborts its requests. server_requests.py says what a request may contain.
"""

import json
import time
from argparse import ArgumentParser
from contextlib import aclosing, closing
from weakref import ref

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from server_requests import Chat, Completion, Reader
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool

from nanopaged import LLM
from nanopaged.checks import check
from nanopaged.frontend.detokenizer import token_bytes

OBJECTS = {"text": "text_completion", "message": "chat.completion",
           "delta": "chat.completion.chunk"}  # by where the text is
ERRORS = (ImportError, RecursionError, RequestValidationError, TypeError,
          ValueError)  # of a wrong request


class Events(StreamingResponse):
    async def __call__(self, *arguments):
        async with aclosing(self.body_iterator):  # also if the client goes away
            await super().__call__(*arguments)


async def refuse(_, error):
    message = str(error)
    if isinstance(error, RequestValidationError):  # from pydantic
        # It knows where each mistake is: ("body", "messages", 0, "role"), for example.
        message = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
                            for each in error.errors())
    return JSONResponse({"error": {"message": message, "code": None, "param": None,
                                   "type": "invalid_request_error"}}, 400)


def make_app(llm, name):
    app = FastAPI(exception_handlers=dict.fromkeys(ERRORS, refuse))
    reader = Reader(llm)
    card = {"id": name, "object": "model", "created": 0, "owned_by": "nanopaged"}

    @app.get("/health")
    async def health():
        return {}

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}")
    async def model(model):
        check(model == name, "model", repr(name), model)
        return card

    @app.post("/v1/completions")
    async def completions(request: Request, body: Completion):
        return await answer(request, body, "text", "text")

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: Chat):
        return await answer(request, body, "message", "delta")

    def start(body):
        check(body.model in (None, name), "model", repr(name), body.model)
        check(body.stream or body.stream_options is None, "stream",
              "true for stream_options", body.stream)
        prompts, params = reader.read(body)
        try:
            return llm.stream(prompts, params), Answers(llm, params[0])
        except (TypeError, ValueError) as error:  # too long, for example
            field = "messages" if isinstance(body, Chat) else "prompt"
            raise ValueError(f"{field} cannot be served: {error}") from error

    async def answer(request, body, key, chunk_key):
        """The whole completion, or a stream of chunks."""
        # Long prompts and grammars take time, and the event loop must not wait.
        outputs, answers = await run_in_threadpool(start, body)
        if body.stream:
            return Events(chunks(outputs, answers, chunk_key, body.stream_options),
                          media_type="text/event-stream")
        async for output in iterate_in_threadpool(outputs):
            answers.take(output)
            if await request.is_disconnected():
                break
        parts = answers.parts(answers.choices, key)
        return wrap(answers.id, parts, key) | {"usage": answers.usage()}

    async def chunks(outputs, answers, key, options):
        """Server-sent events, with what is new in the choices that have changed."""
        with closing(outputs):
            async for output in iterate_in_threadpool(outputs):
                parts = answers.parts(answers.take(output), key)
                yield event(wrap(answers.id, parts, key))
        if options and options.include_usage:
            yield event(wrap(answers.id, [], key) | {"usage": answers.usage()})
        yield "data: [DONE]\n\n"

    def event(content):
        return f"data: {json.dumps(content)}\n\n"

    def wrap(id, parts, key):
        return {"id": id, "object": OBJECTS[key], "model": name,
                "created": int(time.time()), "choices": parts}

    return app


class Answers:
    """The answers to one HTTP request, which may have several prompts."""

    def __init__(self, llm, params):
        self.llm, self.params = llm, params
        self.id = None  # of the first prompt
        self.outputs, self.choices = {}, {}  # by prompt; by index
        self.said = {}  # by index: how many characters and tokens of it are told

    def take(self, output):
        """Note an output. Returns its choices that have changed, by index."""
        self.id = self.id or output.request_id
        number = int(output.request_id) - int(self.id)
        self.outputs[number] = output
        new = {index: choice
               for index, choice in enumerate(output.outputs, number * self.params.n)
               if choice != self.choices.get(index)}
        self.choices |= new
        return new

    def parts(self, choices, key):
        """What is new in these choices."""
        parts = []
        for index, choice in sorted(choices.items()):
            role = {} if index in self.said else {"role": "assistant"}
            start, first = self.said.get(index, (0, 0))
            self.said[index] = len(choice.text), len(choice.token_ids)
            text = choice.text[start:]
            content = text if key == "text" else role | {"content": text}
            parts.append({"index": index, key: content, "logprobs": None,
                          "finish_reason": choice.finish_reason})
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


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a directory, or an id of the hub")
    parser.add_argument("--dtype", default="auto", help="as that of nanopaged.LLM")
    options = parser.parse_args()
    llm = LLM(options.model, dtype=options.dtype)
    uvicorn.run(make_app(llm, options.model or "nanopaged"))
