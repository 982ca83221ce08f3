"""An OpenAI-compatible server: python server.py MODEL --port 8000

Every client reads a stream of its own, in a pool of threads: whoever asks for more
steps the engine for all. When a client goes away its stream is closed, and that aborts
its request.
"""

import argparse
import json
import time
from contextlib import closing
from dataclasses import replace

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import iterate_in_threadpool

from nanopaged import LLM

OBJECTS = {"text": "text_completion", "message": "chat.completion",
           "delta": "chat.completion.chunk"}  # by where the text is


class Events(StreamingResponse):
    """Server-sent events, made of outputs."""

    def __init__(self, outputs, events):
        super().__init__(events, media_type="text/event-stream")
        self.outputs = outputs

    async def __call__(self, *arguments):
        with closing(self.outputs):  # it is cancelled if the client goes away
            await super().__call__(*arguments)


def make_app(llm, name):
    app = FastAPI()

    @app.exception_handler(TypeError)
    @app.exception_handler(ValueError)
    async def refuse(_, error):
        return JSONResponse({"error": {"message": str(error)}}, 400)

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [{"id": name, "object": "model"}]}

    @app.post("/v1/completions")
    async def completions(request: Request):
        body = await request.json()
        return await answer(request, body.pop("prompt", None), body, "text", "text")

    @app.post("/v1/chat/completions")
    async def chat(request: Request):
        body = {"max_tokens": None} | await request.json()
        ids = llm.get_tokenizer().apply_chat_template(
            body.pop("messages", []), add_generation_prompt=True, return_dict=False)
        return await answer(request, ids, body, "message", "delta")

    async def answer(request, prompt, body, key, chunk_key):
        """The whole completion, or a stream of chunks."""
        is_stream, model = body.pop("stream", False), body.pop("model", name)
        if model != name or "logprobs" in body:
            raise ValueError(f"the model is {name!r}, and there are no logprobs")
        params = replace(llm.default_params, **body)  # TypeError: an unknown name
        outputs = llm.stream({"prompt": prompt}, params)
        if is_stream:
            return Events(outputs, chunks(outputs, chunk_key))
        async for output in iterate_in_threadpool(outputs):
            if output.finished or await request.is_disconnected():
                break
        choices = output.outputs
        numbers = {"prompt_tokens": len(output.prompt_token_ids),
                   "completion_tokens": sum(len(c.token_ids) for c in choices)}
        usage = numbers | {"total_tokens": sum(numbers.values())}
        return describe(output, choices, key, {}) | {"usage": usage}

    def chunks(outputs, key):
        """Server-sent events, with what is new in the choices that have changed."""
        before, starts = [], {}
        for output in outputs:
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="default: the bundled model")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    with LLM(args.model) as llm:
        uvicorn.run(make_app(llm, args.model or "nanopaged"), port=args.port)


if __name__ == "__main__":
    main()
