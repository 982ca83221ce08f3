"""From prompts to requests: what a caller may pass, and what can never be served."""

import json
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from numbers import Number
from typing import Any, TypeAlias

from nanopaged.checks import check, plain
from nanopaged.config import BeamSearchParams, SamplingParams
from nanopaged.frontend.detokenizer import Detokenizer
from nanopaged.frontend.outputs import Request
from nanopaged.sequence import SequenceGroup

MESSAGES = "a list of {'role': ..., 'content': ...}, or several such lists"
NAMES = ("prompt", "prompt_token_ids", "cache_salt")  # of a prompt that is a dict
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
    kinds = {*map(type, items)}
    is_one = kinds and all(issubclass(kind, Number) for kind in kinds)
    return [items] if is_one else items


def as_dict(prompt: Any) -> Mapping[str, Any]:
    """One prompt as a dict."""
    content, *others = as_prompts(prompt) or [[]]
    check(not others, "prompt", "one prompt, a string or a list of token ids", prompt,
          TypeError)
    if not isinstance(content, Mapping):
        return {"prompt": content}
    unknown = content.keys() - NAMES
    check(not unknown, "prompt", f"a dict with names among {NAMES} (from a "
          "tokenizer, pass its input_ids)", unknown, TypeError)
    ids = content.get("prompt_token_ids")
    check(not isinstance(ids, str), "prompt_token_ids", "a list of ids", ids, TypeError)
    return content


# -- Conversations ---------------------------------------------------------------------

def render_chats(llm: Any, messages: Any, options: dict[str, Any]
                 ) -> list[dict[str, Any]]:
    """One or more conversations as prompts, by the tokenizer's chat template."""
    chats: Any = list(messages)
    chats = [chats] if chats and isinstance(chats[0], Mapping) else chats
    options = {"add_generation_prompt": True} | options | {"tokenize": False}
    template = partial(llm.get_tokenizer().apply_chat_template, **options)
    # Some templates expect the content of a message as a list, and drop a string.
    takes_text = "a probe" in template([{"role": "user", "content": "a probe"}])
    prompts = []
    for number, chat in enumerate(chats):
        with numbered("messages", number, len(chats)):
            is_list = isinstance(chat, Iterable) and not isinstance(chat, str | Mapping)
            check(is_list, "messages", MESSAGES, chat, TypeError)
            chat = list(chat)
            check(bool(chat), "messages", "a list of at least one message", chat)
            text = template([as_message(each, takes_text) for each in chat])
            ids = llm.tokenizer(text, add_special_tokens=False).input_ids
        prompts.append({"prompt": text, "prompt_token_ids": ids})
    return prompts


def as_message(given: Any, takes_text: bool) -> dict[str, Any]:
    """A chat message as the template expects it."""
    is_message = isinstance(given, Mapping) and isinstance(given.get("role"), str)
    check(is_message, "messages", MESSAGES, given, TypeError)
    message: dict[str, Any] = dict(given)
    content = message.get("content")
    if content is not None:
        texts = [content]
        if isinstance(content, list):
            texts = [p.get("text") if isinstance(p, Mapping) else p for p in content]
        check(all(isinstance(text, str) for text in texts), "content",
              "a string, or a list of text parts", content, TypeError)
        message["content"] = "\n".join(texts) if takes_text else [
            {"type": "text", "text": text} for text in texts]
    if calls := message.get("tool_calls"):
        message["tool_calls"] = list(map(as_tool_call, calls))
    return message


def as_tool_call(call: Any) -> dict[str, Any]:
    """A tool call whose arguments are a dict. They may be its JSON, or missing."""
    try:
        function = call["function"]
        found = function.get("arguments")
        if isinstance(found, str):
            found = json.loads(found.strip() or "{}")
        found = {} if found is None else {**found}
        return {**call, "function": {**function, "arguments": found}}
    except Exception as error:
        raise ValueError("tool_calls must be a list of calls, with arguments in JSON, "
                         f"got {call!r:.200} ({error})") from error


# -- Requests --------------------------------------------------------------------------

def make_requests(llm: Any, prompts: Any, params: Any) -> list[Request]:
    """A request to `llm` for each prompt; ValueError or TypeError names a wrong one."""
    prompts = as_prompts(prompts)
    params = list(params) if isinstance(params, Iterable) else [params] * len(prompts)
    check(len(params) == len(prompts), "sampling_params",
          f"one object, or a list of {len(prompts)}, one for each prompt", params)
    requests = []
    for number, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        with numbered("prompts", number, len(prompts)):
            requests.append(make_request(llm, param, **as_dict(prompt)))
    return requests


@contextmanager
def numbered(name: str, number: int, count: int) -> Iterator[None]:
    """Make errors say which of several inputs is wrong."""
    try:
        yield
    except Exception as error:  # from a template, too
        # (A subclass, such as UnicodeEncodeError, takes other arguments.)
        kind = TypeError if isinstance(error, TypeError) else ValueError
        where = f"{name}[{number}]: " if count > 1 else ""
        raise kind(f"{where}{error}") from error


def tokenizer_of(llm: Any) -> Any:
    """The tokenizer that the engine uses; ValueError if the model has none."""
    check(llm.tokenizer is not None, "model", "one with a tokenizer (needed for text, "
          "but not for token ids)", llm.config.model)
    return llm.tokenizer


def make_request(llm: Any, params: Any, prompt: Any = None,
                 prompt_token_ids: Any = None, cache_salt: Any = None) -> Request:
    """A request that can be served; ValueError or TypeError if it never can be."""
    ids = given = plain(prompt if prompt_token_ids is None else prompt_token_ids)
    if isinstance(ids, str):
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
    if params.stop:
        tokenizer_of(llm)  # an error if there is none
    all_ids = [*ids, *(params.stop_token_ids or []), *(params.logit_bias or {})]
    wrong = [id for id in all_ids if not 0 <= id < vocab_size]
    check(not wrong, "token ids", f"from 0 to {vocab_size - 1}", wrong)
    longest = llm.engine.max_model_len
    check(0 < len(ids) < longest, "number of prompt tokens",
          f"at least 1 and less than max_model_len={longest}", len(ids))
    group = SequenceGroup(ids, params, eos_ids, longest, beam_params)
    llm.engine.check_fits(group)
    detokenizer = Detokenizer(
        llm.tokenizer, ids, params.stop_strings, params.skip_special_tokens)
    main_eos = None if params.ignore_eos or not eos_ids else eos_ids[0]
    text = prompt if isinstance(prompt, str) else None
    return Request(group, text, main_eos, detokenizer)
