"""An OpenAI-compatible server, at port 8000: python server.py [MODEL]

Every client reads a stream of its own, in a pool of threads: whoever asks for more
steps the engine for all. When a client goes away its stream is closed, and that aborts
its request.
"""

import json
import sys
import time
from contextlib import aclosing, closing
from dataclasses import replace

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from starlette.concurrency import iterate_in_threadpool

from nanopaged import LLM

OBJECTS = {"text": "text_completion", "message": "chat.completion",
           "delta": "chat.completion.chunk"}  # by where the text is
ERRORS = TypeError, ValueError, AttributeError, TemplateError  # of a wrong request


class Events(StreamingResponse):
    async def __call__(self, *arguments):
        async with aclosing(self.body_iterator):  # also if the client goes away
            await super().__call__(*arguments)


async def refuse(_, error):
    return JSONResponse({"error": {"message": str(error)}}, 400)


def make_app(llm, name):
    app = FastAPI(exception_handlers=dict.fromkeys(ERRORS, refuse))

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [{"id": name, "object": "model"}]}

    @app.post("/v1/completions")
    async def completions(request: Request, body: dict):
        return await answer(request, body.pop("prompt", None), body, "text", "text")

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: dict):
        ids = llm.get_tokenizer().apply_chat_template(
            body.pop("messages", []), add_generation_prompt=True, return_dict=False)
        body = {"max_tokens": None} | body
        return await answer(request, ids, body, "message", "delta")

    async def answer(request, prompt, body, key, chunk_key):
        """The whole completion, or a stream of chunks."""
        is_stream, model = body.pop("stream", False), body.pop("model", name)
        if model != name or "logprobs" in body:
            raise ValueError(f"the model is {name!r}, and there are no logprobs")
        # An unknown name is a TypeError here, and a wrong value a ValueError.
        outputs = llm.stream({"prompt": prompt}, replace(llm.default_params, **body))
        if is_stream:
            return Events(chunks(outputs, chunk_key), media_type="text/event-stream")
        async for output in iterate_in_threadpool(outputs):
            if output.finished or await request.is_disconnected():
                break
        counts = {"prompt_tokens": len(output.prompt_token_ids),
                  "completion_tokens": sum(len(c.token_ids) for c in output.outputs)}
        usage = counts | {"total_tokens": sum(counts.values())}
        return describe(output, output.outputs, key, {}) | {"usage": usage}

    async def chunks(outputs, key):
        """Server-sent events, with what is new in the choices that have changed."""
        before, starts = [], {}
        with closing(outputs):
            async for output in iterate_in_threadpool(outputs):
                news = [choice for choice in output.outputs if choice not in before]
                yield f"data: {json.dumps(describe(output, news, key, starts))}\n\n"
                before = output.outputs
                starts = {choice.index: len(choice.text) for choice in before}
        yield "data: [DONE]\n\n"

    def describe(output, choices, key, starts):
        """A response, or a chunk of one: the text of each choice from its start on."""
        parts = []
        for choice in choices:
            text = choice.text[starts.get(choice.index, 0) :]
            content = text if key == "text" else {"role": "assistant", "content": text}
            parts.append({"index": choice.index, key: content,
                          "finish_reason": choice.finish_reason})
        return {"id": output.request_id, "object": OBJECTS[key], "model": name,
                "created": int(time.time()), "choices": parts}

    return app


if __name__ == "__main__":
    path = sys.argv[1] if sys.argv[1:] else None
    uvicorn.run(make_app(LLM(path), path or "nanopaged"))
