"""An OpenAI-compatible server, at port 8000: python server.py [MODEL]

Every client reads a stream of its own, in a pool of threads: whoever asks for more
steps the engine for all. When a client goes away its streams are closed, and that
aborts its requests. `response_format` with a JSON schema needs xgrammar.
"""

import json
import sys
import time
from contextlib import aclosing, closing
from dataclasses import fields, replace

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from starlette.concurrency import iterate_in_threadpool

from nanopaged import LLM, SamplingParams

OBJECTS = {"text": "text_completion", "message": "chat.completion",
           "delta": "chat.completion.chunk"}  # by where the text is
ERRORS = (AttributeError, ImportError, KeyError, TypeError, ValueError,
          TemplateError)  # of a wrong request
# What changes nothing here, whatever its value, or with this value.
IGNORED = {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store",
           "user"}
NEUTRAL = {"best_of": 1, "echo": False, "logprobs": False, "modalities": ["text"],
           "parallel_tool_calls": True, "suffix": "", "tool_choice": "none",
           "tools": []}


class Events(StreamingResponse):
    async def __call__(self, *arguments):
        async with aclosing(self.body_iterator):  # also if the client goes away
            await super().__call__(*arguments)


async def refuse(_, error):
    return JSONResponse({"error": {"message": str(error), "code": None, "param": None,
                                   "type": "invalid_request_error"}}, 400)


def json_processor(llm, schema, num_prompt_tokens):
    """A logits processor that lets only tokens pass that lead to a JSON text, of this
    schema if there is one. It reads the answer anew each time, so it has no state.
    """
    import xgrammar

    tokenizer, size = llm.get_tokenizer(), llm.model_config.vocab_size
    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=size, stop_token_ids=llm.eos_token_ids)
    compiler = xgrammar.GrammarCompiler(info)
    grammar = compiler.compile_builtin_json_grammar()
    if schema is not None:
        # With any whitespace, a small model might never stop writing spaces.
        grammar = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)

    def process(token_ids, logits):
        matcher = xgrammar.GrammarMatcher(grammar)
        for token in token_ids[0, num_prompt_tokens:].tolist():
            matcher.accept_token(token)
        mask = xgrammar.allocate_token_bitmask(1, size)
        matcher.fill_next_token_bitmask(mask)
        xgrammar.apply_token_bitmask_inplace(logits, mask.to(logits.device))
        return logits

    return process


def read_params(llm, body, num_prompt_tokens):
    """SamplingParams from the fields of a request; ValueError names a wrong one."""
    body = {name: value for name, value in body.items()
            if value is not None and name not in IGNORED
            and repr(value) != repr(NEUTRAL.get(name))}
    for name, ours in (("max_completion_tokens", "max_tokens"),
                       ("top_logprobs", "logprobs")):  # the names in chats
        if name in body:
            body[ours] = body.pop(name)
    if body.get("logprobs") is True:
        body["logprobs"] = 0
    if "logit_bias" in body:  # JSON has only strings as keys
        body["logit_bias"] = {int(id): bias for id, bias in body["logit_bias"].items()}
    form = body.pop("response_format", {"type": "text"})
    if form.get("type") not in ("text", "json_object", "json_schema"):
        raise ValueError(f"response_format must have a known type, got {form}")
    if form["type"] != "text":
        schema = (form.get("json_schema") or {}).get("schema")
        body["logits_processors"] = [json_processor(llm, schema, num_prompt_tokens)]
    unknown = sorted(body.keys() - {field.name for field in fields(SamplingParams)})
    if unknown:
        raise ValueError(f"{unknown[0]} is not supported")
    return replace(llm.default_params, **body)


def make_app(llm, name):
    app = FastAPI(exception_handlers=dict.fromkeys(ERRORS, refuse))

    @app.get("/health")
    async def health():
        return {}

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [{"id": name, "object": "model"}]}

    @app.post("/v1/completions")
    async def completions(request: Request, body: dict):
        prompts = body.pop("prompt", None)
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        encode = llm.get_tokenizer()
        ids = [encode(p).input_ids if isinstance(p, str) else p for p in prompts or []]
        return await answer(request, ids, body, "text", "text")

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: dict):
        ids = llm.get_tokenizer().apply_chat_template(
            body.pop("messages", []), add_generation_prompt=True, return_dict=False)
        body = {"max_tokens": None} | body
        return await answer(request, [ids], body, "message", "delta")

    async def answer(request, prompts, body, key, chunk_key):
        """The whole completion, or a stream of chunks."""
        is_stream, model = body.pop("stream", False), body.pop("model", name)
        options = dict(body.pop("stream_options", None) or {})
        if model != name:
            raise ValueError(f"model must be {name!r}, got {model!r}")
        if not prompts:
            raise ValueError("prompt must be a string or a non-empty list")
        params = [read_params(llm, body, len(ids)) for ids in prompts]
        answers = Answers(llm, params[0].n)
        outputs = llm.stream(prompts, params)
        if is_stream:
            return Events(chunks(outputs, answers, chunk_key, options),
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
                yield f"data: {json.dumps(wrap(answers.id, parts, key))}\n\n"
        if options.get("include_usage"):
            end = wrap(answers.id, [], key) | {"usage": answers.usage()}
            yield f"data: {json.dumps(end)}\n\n"
        yield "data: [DONE]\n\n"

    def wrap(id, parts, key):
        return {"id": id, "object": OBJECTS[key], "model": name,
                "created": int(time.time()), "choices": parts}

    return app


class Answers:
    """The answers to one HTTP request, which may have several prompts."""

    def __init__(self, llm, n):
        self.llm, self.n = llm, n
        self.id = None  # of the first prompt
        self.outputs, self.choices = {}, {}  # by prompt; by index
        self.said = {}  # by index: how many characters and tokens of it are told

    def take(self, output):
        """Note an output. Returns its choices that have changed, by index."""
        self.id = self.id or output.request_id
        number = int(output.request_id) - int(self.id)
        self.outputs[number] = output
        new = {index: choice
               for index, choice in enumerate(output.outputs, number * self.n)
               if choice != self.choices.get(index)}
        self.choices |= new
        return new

    def parts(self, choices, key):
        """What is new in these choices."""
        parts = []
        for index, choice in sorted(choices.items()):
            start, first = self.said.get(index, (0, 0))
            self.said[index] = len(choice.text), len(choice.token_ids)
            text = choice.text[start:]
            content = text if key == "text" else {"role": "assistant", "content": text}
            parts.append({"index": index, key: content, "logprobs": None,
                          "finish_reason": choice.finish_reason})
            if choice.logprobs is not None:
                parts[-1]["logprobs"] = self.logprobs(choice, first, key)
        return parts

    def logprobs(self, choice, first, key):
        """In the form of completions, or in that of chats."""
        def entry(token, logprob):
            text = self.llm.get_tokenizer().decode([token])
            return {"token": text, "logprob": logprob.logprob,
                    "bytes": list(text.encode())}

        rows = [[entry(*pair) for pair in report.items()]
                for report in choice.logprobs[first:]]
        if key != "text":
            return {"content": [row[0] | {"top_logprobs": row} for row in rows]}
        return {"tokens": [row[0]["token"] for row in rows],
                "token_logprobs": [row[0]["logprob"] for row in rows],
                "top_logprobs": [{each["token"]: each["logprob"] for each in row}
                                 for row in rows]}

    def usage(self):
        outputs = self.outputs.values()
        counts = {
            "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
            "completion_tokens": sum(len(choice.token_ids) for output in outputs
                                     for choice in output.outputs)}
        return counts | {"total_tokens": sum(counts.values())}


if __name__ == "__main__":
    path = sys.argv[1] if sys.argv[1:] else None
    uvicorn.run(make_app(LLM(path), path or "nanopaged"))
