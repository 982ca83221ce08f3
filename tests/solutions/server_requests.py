"""What a request to server.py may say: from JSON to prompts and their parameters.

pydantic checks the fields below, and SamplingParams checks those that it has. Whatever
is wrong is a ValueError or a TypeError that names the field.
"""

import json
import re
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PositiveInt, WrapValidator
from server_tools import marks_of
from structured import Grammars

from nanopaged.checks import check
from nanopaged.frontend.prompts import render_chats, tokenizer_of

# What changes nothing here, whatever its value, or with this value.
IGNORED = {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store",
           "user"}
NEUTRAL = {"add_generation_prompt": True, "best_of": 1, "echo": False,
           "include_stop_str_in_output": False, "modalities": ["text"],
           "priority": 0, "spaces_between_special_tokens": True, "suffix": "",
           "tool_choice": "none", "tools": []}
# How many log-probabilities of a token: thousands would take the event loop's time.
Few = Annotated[int, Field(ge=0, le=20)]


class Strict(BaseModel, extra="allow", strict=True):
    pass


# It stays as the client has sent it, with its own order of keys.
Kept = WrapValidator(lambda given, validate: validate(given) and given)


class Message(Strict):
    role: Literal["assistant", "developer", "function", "system", "tool", "user"]
    content: str | list | None = None
    tool_calls: list[dict] | None = None


class Named(Strict):
    name: str
    parameters: dict | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Named


def plain(message, name):
    """What a chat template reads. It may take null for a value, but many write tool
    calls only where the content is null.
    """
    check(message.get("content") is not None or bool(message.get("tool_calls")),
          f"{name}.content", "a string or a list of text parts", None)
    return {key: value for key, value in message.items()
            if value is not None or key == "content"}


# -- What is asked ---------------------------------------------------------------------

class Text(Strict, extra="forbid"):
    model: str | None = None
    prompt: Any
    add_special_tokens: bool | None = None

    def usable_tools(self):
        return {}

    def prompts(self, llm):
        def is_prompt(value):
            is_ids = isinstance(value, list) and {*map(type, value)} == {int}
            return isinstance(value, str) or is_ids

        prompts = [self.prompt] if is_prompt(self.prompt) else self.prompt
        check(isinstance(prompts, list) and prompts and all(map(is_prompt, prompts)),
              "prompt", "a string, token ids, or a list of either", self.prompt)
        adds = self.add_special_tokens is not False
        return [tokenizer_of(llm)(prompt, add_special_tokens=adds).input_ids
                if isinstance(prompt, str) else prompt for prompt in prompts]


class Conversation(Strict, extra="forbid"):
    model: str | None = None
    messages: list[Annotated[Message, Kept]] = Field(min_length=1)
    add_special_tokens: Literal[False] | None = None  # the template has them
    tools: list[Annotated[Tool, Kept]] | None = None
    tool_choice: Literal["auto", "none", "required"] | Tool | None = None
    chat_template_kwargs: dict | None = None
    reasoning_effort: str | None = None

    def usable_tools(self):
        """By name: those that the answer may call."""
        functions = [tool["function"] for tool in self.tools or []]
        tools = {function["name"]: function for function in functions}
        if isinstance(self.tool_choice, Tool):
            name = self.tool_choice.function.name
            check(name in tools, "tool_choice", f"one of the tools {[*tools]}", name)
            return {name: tools[name]}
        check(bool(tools) or self.tool_choice != "required", "tools",
              "given if tool_choice is 'required'", self.tools)
        return {} if self.tool_choice == "none" else tools

    def prompts(self, llm):
        messages = [plain(m, f"messages.{i}") for i, m in enumerate(self.messages)]
        options = self.model_dump(include={"reasoning_effort"}, exclude_none=True)
        if self.usable_tools():
            options["tools"] = self.tools
        options |= self.chat_template_kwargs or {}
        # A client's own template might compute for hours.
        check("chat_template" not in options, "chat_template_kwargs",
              "without a chat_template", self.chat_template_kwargs)
        try:
            return [render_chats(llm, messages, options)[0]["prompt_token_ids"]]
        except Exception as error:  # whatever a template may raise
            raise ValueError("messages do not fit the model's chat template: "
                             f"{error}") from error


# -- What the answer shall be ----------------------------------------------------------

class Wanted(Strict):
    stream: bool | None = None
    stream_options: dict[Literal["continuous_usage_stats", "include_usage",
                                 "include_obfuscation"], bool | None] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict | None = None
    # JSON has only strings as keys.
    logit_bias: dict[Annotated[int, Field(strict=False)], float] | None = None


class Completion(Wanted, Text, extra="allow"):
    logprobs: Few | None = None

    def options(self, _):
        return {"logprobs": self.logprobs}


class Chat(Wanted, Conversation, extra="allow"):
    logprobs: bool | None = None
    top_logprobs: Few | None = None
    max_completion_tokens: PositiveInt | None = None
    max_tokens: PositiveInt | None = None  # the old name

    def options(self, most):
        """What has other names in completions, or by default other values: as many
        tokens as the model's own file says, or up to the end.
        """
        check(self.top_logprobs is None or self.logprobs, "logprobs",
              "true for top_logprobs", self.logprobs)
        # The mark before a call may be a special token.
        return {"max_tokens": self.max_completion_tokens or self.max_tokens or most,
                "logprobs": (self.top_logprobs or 0) if self.logprobs else None
                } | ({"skip_special_tokens": False} if self.usable_tools() else {})


class Reader:
    """From a body to prompts and their parameters; errors name a wrong field."""

    def __init__(self, llm):
        self.llm = llm
        self.grammars = lru_cache(1)(lambda: Grammars(llm))

    def read(self, body):
        """Prompts, their parameters, and what form their answers must have."""
        prompts, form = self.prompts(body), self.form(body)
        given = {name: value for name, value in body.model_extra.items()
                 if value is not None and name not in IGNORED
                 and repr(value) != repr(NEUTRAL.get(name))}
        known = vars(self.llm.default_params).keys() - {"prompt_logprobs"}
        for name in given.keys() - known:
            check(False, name, "left out", given[name])
        options = body.options(self.llm._defaults.get("max_tokens")) | given
        params = replace(self.llm.default_params, **options, logit_bias=body.logit_bias)
        if params.logprobs is not None:
            tokenizer_of(self.llm)  # their texts need it
        check(params.n <= self.llm.config.max_num_seqs, "n",
              f"at most {self.llm.config.max_num_seqs}", params.n)
        ids = range(self.llm.model_config.vocab_size)
        for name in "logit_bias", "stop_token_ids":
            wrong = [id for id in getattr(params, name) or [] if id not in ids]
            check(not wrong, name, f"about token ids below {len(ids)}", wrong)
        for name in ("ignore_eos", "min_tokens") if form else ():
            value = getattr(params, name)  # the end of a JSON text is the end
            check(not value, name, "left out where JSON is wanted", value)
        return prompts, [params] * len(prompts), form

    def prompts(self, body):
        for name, value in body:
            said = json.dumps(value, ensure_ascii=False, default=str)
            check(not re.search("[\ud800-\udfff]", said), name,
                  "free of surrogates, which are halves of characters", value)
        return body.prompts(self.llm)

    def guide(self, params, form):
        """The same, with processors that keep each prompt's answers to their form."""
        return [replace(each, logits_processors=[self.grammars().processor(*form)])
                for each in params]

    def form(self, body):
        """What an answer must be, for `Grammars.processor`. None if it is free."""
        tools, form = body.usable_tools(), body.response_format or {"type": "text"}
        if tools and body.tool_choice not in (None, "auto"):
            schemas = {name: {"type": "object"} | (function.get("parameters") or {})
                       for name, function in tools.items()}
            marks = marks_of(self.llm.get_tokenizer().get_chat_template())
            # A small model might never stop calling, so several are for those who ask.
            return "calls", (*marks, schemas, body.parallel_tool_calls is True), "tools"
        if form.get("type") == "text":
            return None
        kinds = "json_object", "json_schema", "text"
        check(form.get("type") in kinds, "response_format.type", f"in {kinds}", form)
        schema = {"type": "object"}
        if form["type"] == "json_schema":
            schema = form.get("json_schema")
            schema = schema.get("schema") if isinstance(schema, dict) else None
            check(isinstance(schema, dict), "response_format.json_schema.schema",
                  "an object", form)
        return "json", schema, "response_format.json_schema.schema"
