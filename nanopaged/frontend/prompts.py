"""From prompts to requests: what a caller may pass, and what can never be served."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from functools import partial
from itertools import product
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
KINDS = (None, "function", dict, str)  # see `as_tool_call`
as_json = partial(json.dumps, ensure_ascii=False)
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
    write = partial(llm.get_tokenizer().apply_chat_template, **options)

    def render(chat: Any) -> dict[str, Any]:
        chat = list(chat) if isinstance(chat, Iterable) else [chat]
        check(bool(chat), "messages", "a list of at least one message", chat)
        text = write(as_needed([as_message(each) for each in chat], write))
        ids = llm.tokenizer(text, add_special_tokens=False).input_ids
        return {"prompt": text, "prompt_token_ids": ids}

    return of_each("messages", chats, render)


def as_message(given: Any, changes: tuple[Any, ...] = (None,)) -> dict[str, Any]:
    """A chat message, without an empty list of tool calls, and with these changes: the
    roles whose parts become a string, or the other way round; "null" for a string
    instead of it beside calls; and last, what `as_tool_call` shall do.
    """
    is_message = isinstance(given, Mapping) and isinstance(given.get("role"), str)
    check(is_message, "messages", MESSAGES, given, TypeError)
    message: dict[str, Any] = dict(given)
    content: Any = message.get("content")
    part = {"type": "text", "text": content}
    parts = content if isinstance(content, list) else [part]
    texts: Any = [p.get("text") if isinstance(p, Mapping) else p for p in parts]
    check(content is None or all(isinstance(text, str) for text in texts), "content",
          "a string, or a list of text parts", content, TypeError)
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = [as_tool_call(call, changes[-1]) for call in calls]
        if content is None and "null" in changes:
            message["content"] = ""
    if content is not None and message["role"] in changes:
        message["content"] = "\n".join(texts) if parts is content else [part]
    return message


def as_tool_call(call: Any, kind: Any) -> dict[str, Any]:
    """A tool call as it is, with a dict for arguments that are missing. If there is a
    kind, the call is in a function; `dict` or `str` (JSON) is that of the arguments.
    """
    with explained("tool_calls must be a list of calls, with arguments in JSON, got "
                   f"{call!r:.200}: "):
        is_flat = "name" in call
        function = dict(call if is_flat else call["function"])
        given = function.get("arguments")
        found = json.loads(given.strip() or "null") if isinstance(given, str) else given
        found = {**(found or {})}
        if kind is dict or not isinstance(given, str):
            function["arguments"] = as_json(found) if kind is str else found
        outer = {"type": "function"} if is_flat else call
        return {**outer, "function": function} if kind or not is_flat else function


def as_needed(chat: list[dict[str, Any]], write: Any) -> list[dict[str, Any]]:
    """The chat, or what has fewer faults if `write` renders it by the template.

    A mark instead of each content shows which of them are lost. The other faults are
    errors, lists and dicts as Python shows them, and JSON that is a string in JSON.
    """
    marked = [each | {"content": f"q{i}z" if isinstance(each["content"], str) else [
        {"type": "text", "text": f"q{i}z"}]} if each.get("content") else each
        for i, each in enumerate(chat)]
    marks = [f"q{i}z" for i, each in enumerate(chat) if each.get("content")]

    def faults(changes: tuple[Any, ...]) -> float:
        tried = [as_message(each, changes) for each in marked]
        given = [call.get("function", call)["arguments"]
                 for each in tried for call in each.get("tool_calls", ())]
        wrong = [as_json(each) if isinstance(each, str) else str(each)
                 for each in given if each != {}] + ["'text':"]
        try:
            text: str = write(tried, continue_final_message=False).lower()
        except Exception:
            return math.inf
        lost = [each for each in given if isinstance(each, str)
                and each.strip().lower() not in text]
        lost += [mark for mark in marks if mark not in text]
        return len(lost) + sum(text.count(each.lower()) for each in wrong)

    # At first the contents of all roles are changed together, so a chat that no change
    # helps is rendered 16 times, however many roles it has.
    roles = list({each["role"]: 0 for each in chat})
    axes: list[Any] = [*((None, role) for role in roles), (None, "null"), KINDS]
    tries: list[Any] = [(*(role if flips else None for role in roles), null, kind)
                        for flips, null, kind in product((0, 1), *axes[-2:])]
    best = next((each for each in tries if faults(each) < math.inf), tries[0])
    for i, axis in enumerate(axes if best != tries[0] or faults(best) else ()):
        best = min(((*best[:i], each, *best[i + 1 :]) for each in axis), key=faults)
    return [as_message(each, best) for each in chat]


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
    vocab_size = llm.model_config.vocab_size
    beam_params = params if isinstance(params, BeamSearchParams) else None
    if beam_params:
        # A group of `beam_width` sequences. Each reports enough candidates for
        # `beam_width` to go on, even if every EOS token is among them.
        num_eos = 0 if params.ignore_eos else len(eos_ids)
        check(params.beam_width <= vocab_size - num_eos, "beam_width", "at most "
              f"{vocab_size - num_eos} with this vocabulary", params.beam_width)
        params = SamplingParams(
            n=params.beam_width, temperature=0, max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos, logprobs=params.beam_width + num_eos)
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
