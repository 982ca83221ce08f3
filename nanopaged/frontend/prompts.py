"""From prompts to requests: what a caller may pass, and what can never be served."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from functools import lru_cache
from numbers import Number
from typing import Any, TypeAlias

from nanopaged.checks import check, plain
from nanopaged.config import BeamSearchParams, SamplingParams
from nanopaged.frontend.detokenizer import Detokenizer
from nanopaged.frontend.outputs import Request
from nanopaged.loading.errors import explained
from nanopaged.sequence import SequenceGroup

MESSAGES = "a list of {'role': ..., 'content': ...}, or several such lists"
NAMES = ("prompt", "prompt_token_ids", "cache_salt")  # of a prompt that is a dict
# What to look for in a chat template. A content that is a list of parts:
# `for part in message.content ... part.text`, or `part['text']`, or `content[0].text`,
# or a filter, `attribute='text'`. (Documents have a text, too, so a loop over them does
# not count.) A content that may also be a string: `message.content is string`.
PARTS = re.compile(r"""(?sx)\bfor\s+(\w+)\s+in\s+(?!documents\b) .*?
                   \b\1 (?:\.|\[['"]|\.get\(['"]) text\b
                   | \[\d\] (?:\.|\[['"]) text\b | \battribute\s*=\s*['"]text\b""")
STRING = re.compile(r"(\S+)\s+is\s+(?:not\s+)?string\b")
Params: TypeAlias = SamplingParams | BeamSearchParams


# -- Whatever is passed, as a list of prompts ------------------------------------------

def as_prompts(given: Any) -> list[Any]:
    """One or several prompts as a list of strings, dicts and lists of token ids."""
    if isinstance(given, str | Mapping):
        return [given]
    given = plain(given)
    is_list = hasattr(given, "__iter__") or hasattr(given, "__getitem__")
    check(is_list and not isinstance(given, bytes | bytearray | memoryview | Set),
          "prompt", f"a string, a list of token ids, a dict with names among {NAMES}, "
          "or several of these (from a tokenizer, its input_ids)", given, TypeError)
    items = plain([*given])
    # A list of nothing but numbers is a single prompt.
    is_one = all(issubclass(kind, Number) for kind in {*map(type, items)})
    return [items] if items and is_one else items


def as_dict(prompt: Any) -> Mapping[str, Any]:
    """One prompt as a dict."""
    if not isinstance(prompt, Mapping):
        return {"prompt": prompt}
    content = {name: each for name, each in prompt.items() if each is not None}
    unknown = content.keys() - NAMES
    check(not unknown, "prompt", f"a dict with names among {NAMES} (from a "
          "tokenizer, pass its input_ids)", unknown, TypeError)
    return content


# -- Conversations ---------------------------------------------------------------------

def render_chats(llm: Any, messages: Any, options: dict[str, Any]) -> list[Any]:
    """One or more conversations as prompts, by the tokenizer's chat template."""
    chats: Any = list(messages)
    chats = [chats] if chats and isinstance(chats[0], Mapping) else chats
    is_new = not options.get("continue_final_message")
    options = {"add_generation_prompt": is_new} | options | {"tokenize": False}
    tokenizer = llm.get_tokenizer()

    def render(chat: Any) -> dict[str, Any]:
        chat = list(chat) if isinstance(chat, Iterable) else [chat]
        check(bool(chat), "messages", "a list of at least one message", chat)
        kinds = takes(tokenizer.get_chat_template(
            options.get("chat_template"), options.get("tools")))
        text = tokenizer.apply_chat_template(
            [as_message(each, kinds) for each in chat], **options)
        ids = llm.tokenizer(text, add_special_tokens=False).input_ids
        return {"prompt": text, "prompt_token_ids": ids}

    return of_each("messages", chats, render)


@lru_cache(8)
def takes(template: str) -> tuple[type, ...]:
    """What the content of a message may be: a string, a list of parts, or either.

    A template that asks parts for their text takes lists. It takes strings, too, if it
    asks whether anything but a part is one.
    """
    parts = PARTS.search(template)
    asks = parts and any(name != parts[1] for name in STRING.findall(template))
    takes_parts = (str, list) if asks else (list,)
    return takes_parts if parts else (str,)


def as_message(given: Any, kinds: tuple[type, ...]) -> dict[str, Any]:
    """A chat message whose content is of a kind that the template takes."""
    is_message = isinstance(given, Mapping) and isinstance(given.get("role"), str)
    check(is_message, "messages", MESSAGES, given, TypeError)
    message: dict[str, Any] = dict(given)
    content: Any = message.get("content")
    if content is not None:
        part = {"type": "text", "text": content}
        parts = content if isinstance(content, list) else [part]
        texts: Any = [p.get("text") if isinstance(p, Mapping) else p for p in parts]
        check(all(isinstance(text, str) for text in texts), "content",
              "a string, or a list of text parts", content, TypeError)
        if not isinstance(content, kinds):
            message["content"] = parts if list in kinds else "\n".join(texts)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = list(map(as_tool_call, calls))
    return message


def as_tool_call(call: Any) -> dict[str, Any]:
    """A tool call whose arguments are a dict. They may be its JSON, or missing."""
    with explained("tool_calls must be a list of calls, with arguments in JSON, got "
                   f"{call!r:.200}: "):
        function = call["function"]
        found = function.get("arguments")
        if isinstance(found, str):
            found = json.loads(found.strip() or "null")
        return {**call, "function": {**function, "arguments": {**(found or {})}}}


# -- Requests --------------------------------------------------------------------------

def make_requests(llm: Any, prompts: Any, params: Any) -> list[Request]:
    """A request to `llm` for each prompt; ValueError or TypeError names a wrong one."""
    prompts = as_prompts(prompts)
    params = list(params) if isinstance(params, Iterable) else [params] * len(prompts)
    check(len(params) == len(prompts), "sampling_params",
          f"one object, or a list of {len(prompts)}, one for each prompt", params)
    return of_each("prompts", list(zip(prompts, params, strict=True)),
                   lambda pair: make_request(llm, pair[1], **as_dict(pair[0])))


def of_each(name: str, inputs: list[Any], act: Callable[[Any], Any]) -> list[Any]:
    """What `act` makes of several inputs. Its errors say which of them is wrong."""
    found = []
    for number, each in enumerate(inputs):
        with explained(f"{name}[{number}]: " if len(inputs) > 1 else ""):
            found.append(act(each))  # its errors may be a template's, too
    return found


def tokenizer_of(llm: Any) -> Any:
    """The tokenizer that the engine uses; ValueError if the model has none."""
    check(llm.tokenizer is not None, "model", "one with a tokenizer (needed for text, "
          "but not for token ids)", llm.config.model)
    return llm.tokenizer


def make_request(llm: Any, params: Any, prompt: Any = None,
                 prompt_token_ids: Any = None, cache_salt: Any = None) -> Request:
    """A request that can be served; ValueError or TypeError if it never can be."""
    ids = given = plain(prompt if prompt_token_ids is None else prompt_token_ids)
    if isinstance(ids, str) and prompt_token_ids is None:
        ids.encode()  # an error for a lone surrogate
        ids = tokenizer_of(llm)(ids).input_ids
    # Anything else becomes [None], which the next line refuses.
    ids = plain([*ids]) if isinstance(ids, list | tuple) else [None]
    check({*map(type, ids)} <= {int}, "prompt", "a string or a list of token ids",
          given, TypeError)
    params = llm.default_params if params is None else params
    check(isinstance(params, Params), "sampling_params",
          "SamplingParams or BeamSearchParams", params, TypeError)
    eos_ids = llm.eos_token_ids
    vocab_size, max_seqs = llm.model_config.vocab_size, llm.config.max_num_seqs
    beam_params = params if isinstance(params, BeamSearchParams) else None
    if beam_params:
        # A group of `beam_width` sequences. Each reports enough candidates for
        # `beam_width` to go on, even if every EOS token is among them.
        num_eos = 0 if params.ignore_eos else len(eos_ids)
        max_seqs = min(max_seqs, vocab_size - num_eos)
        params = SamplingParams(
            n=params.beam_width, temperature=0, max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos, logprobs=params.beam_width + num_eos)
    check(params.n <= max_seqs, "n (or beam_width)", f"at most {max_seqs}, "
          "because of max_num_seqs or the vocabulary", params.n)
    if cache_salt is not None:
        params = replace(params, cache_salt=cache_salt)
    # Stop strings need a tokenizer.
    tokenizer = tokenizer_of(llm) if params.stop else llm.tokenizer
    all_ids = [*ids, *(params.stop_token_ids or []), *(params.logit_bias or {})]
    wrong = [id for id in all_ids if not 0 <= id < vocab_size]
    check(not wrong, "token ids", f"from 0 to {vocab_size - 1}", wrong)
    longest = llm.engine.max_model_len
    check(0 < len(ids) < longest, "number of prompt tokens",
          f"at least 1 and less than max_model_len={longest}", len(ids))
    group = SequenceGroup(ids, params, eos_ids, longest, beam_params)
    llm.engine.check_fits(group)
    detokenizer = Detokenizer(
        tokenizer, ids, params.stop_strings, params.skip_special_tokens)
    main_eos = None if params.ignore_eos or not eos_ids else eos_ids[0]
    text = prompt if isinstance(prompt, str) else None
    return Request(group, text, main_eos, detokenizer)
