"""What a request to server.py may say: from JSON to the arguments of `LLM.stream`.

pydantic checks the fields below, and SamplingParams checks those that it has. Whatever
is wrong is a ValueError or a TypeError that names the field.
"""

import json
from dataclasses import fields, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, NonNegativeInt, PositiveInt
from structured import Grammars

from nanopaged import SamplingParams
from nanopaged.checks import check

# What changes nothing here, whatever its value, or with this value.
IGNORED = {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store",
           "user"}
NEUTRAL = {"best_of": 1, "echo": False, "modalities": ["text"],
           "parallel_tool_calls": True, "suffix": "", "tool_choice": "none",
           "tools": []}
# No answer shows the one, and JSON cannot hold the other.
FIELDS = {field.name for field in fields(SamplingParams)} - {
    "prompt_logprobs", "logits_processors"}


class Strict(BaseModel, extra="allow", strict=True):
    pass


def parse(arguments):
    """OpenAI's clients send a JSON text, and chat templates want an object."""
    return json.loads(arguments) if isinstance(arguments, str) else arguments


class Function(Strict):
    name: str
    arguments: Annotated[dict, BeforeValidator(parse)]


class Call(Strict):
    function: Function


class Message(Strict):
    role: Literal["assistant", "developer", "function", "system", "tool", "user"]
    content: Any = None
    tool_calls: list[Call] | None = None

    def plain(self, name):
        """What a chat template reads: the content is one string."""
        content = self.content
        if content is None and self.tool_calls:
            content = ""
        if isinstance(content, list):
            for part in content:
                is_text = isinstance(part, dict) and part.get("type") == "text"
                check(is_text and isinstance(part.get("text"), str),
                      f"part of {name}.content", '{"type": "text", "text": ..}', part)
            content = "\n".join(part["text"] for part in content)
        check(isinstance(content, str), f"{name}.content",
              "a string or a list of text parts", content)
        # Templates may take "tool_calls": null for calls.
        said = {field: value for field, value in self.model_dump().items()
                if value is not None}
        return said | {"content": content}


class Schema(Strict):
    value: dict = Field(alias="schema")


class AnyFormat(Strict):
    type: Literal["text", "json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: Schema


class StreamOptions(Strict, extra="forbid"):
    include_usage: bool = False
    include_obfuscation: bool = False


class Body(Strict):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Annotated[
        AnyFormat | SchemaFormat, Field(discriminator="type")] | None = None
    # JSON has only strings as keys.
    logit_bias: dict[Annotated[int, Field(strict=False)],
                     Annotated[float, Field(ge=-100, le=100)]] | None = None


class Completion(Body):
    prompt: Any = None

    def prompts(self, llm):
        def is_prompt(value):
            is_ids = isinstance(value, list) and {*map(type, value)} == {int}
            return isinstance(value, str) or is_ids

        prompts = [self.prompt] if is_prompt(self.prompt) else self.prompt
        is_list = isinstance(prompts, list) and prompts
        check(is_list and all(map(is_prompt, prompts)), "prompt",
              "a string, a list of token ids, or a list of these", self.prompt)
        return prompts

    def options(self):
        return {}


class Chat(Body):
    messages: list[Message] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: NonNegativeInt | None = None
    max_completion_tokens: PositiveInt | None = None
    max_tokens: PositiveInt | None = None  # the old name

    def prompts(self, llm):
        messages = [message.plain(f"messages.{i}")
                    for i, message in enumerate(self.messages)]
        try:
            return [llm.get_tokenizer().apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False)]
        except Exception as error:  # whatever a template may raise
            raise ValueError("messages do not fit the model's chat template: "
                             f"{error}") from error

    def options(self):
        """What has other names in completions."""
        check(self.top_logprobs is None or self.logprobs, "logprobs",
              "true for top_logprobs", self.logprobs)
        return {"max_tokens": self.max_completion_tokens or self.max_tokens,
                "logprobs": (self.top_logprobs or 0) if self.logprobs else None}


class Reader:
    """From a body to the arguments of `LLM.stream`; errors name a wrong field."""

    def __init__(self, llm):
        self.llm = llm
        self.grammars = lru_cache(1)(lambda: Grammars(llm))

    def read(self, body):
        prompts = body.prompts(self.llm)
        given = {name: value for name, value in body.model_extra.items()
                 if value is not None and name not in IGNORED
                 and repr(value) != repr(NEUTRAL.get(name))}
        for name, value in given.items():
            check(name in FIELDS, name, "left out: it is not supported", value)
        params = replace(self.llm.default_params, **body.options() | given,
                         logit_bias=body.logit_bias)
        ids = range(self.llm.model_config.vocab_size)
        for name in "logit_bias", "stop_token_ids":
            wrong = [id for id in getattr(params, name) or [] if id not in ids]
            check(not wrong, name, f"about token ids below {len(ids)}", wrong)
        return prompts, [self.with_format(params, body.response_format)
                         for _ in prompts]

    def with_format(self, params, form):
        if form is None or form.type == "text":
            return params
        for name in "ignore_eos", "min_tokens":  # the end of a JSON text is the end
            value = getattr(params, name)
            check(not value, name, "left out if there is a response_format", value)
        schema = {"type": "object"}
        if form.type == "json_schema":
            schema = form.json_schema.value
        return replace(params, logits_processors=[self.grammars().processor(
            "json", schema, "response_format.json_schema.schema")])
