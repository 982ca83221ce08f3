"""What callers pass to the engine, in all its forms, and the token ids it stands for.

Nothing here changes the engine, so a bad prompt is refused before anything happens.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypedDict

from nanopaged.config import check_name, check_token_ids, check_type


class TextPrompt(TypedDict, total=False):
    """A prompt as text; for `cache_salt` see `SamplingParams`."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; its text, if given, is only reported with the output."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str


class EncodedPrompt(NamedTuple):
    text: str | None
    token_ids: list[int]
    cache_salt: str | None


PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
# What a tokenizer returns: only the ids count.
TOKENIZER_KEYS = ("input_ids", "attention_mask", "token_type_ids")
EXPECTED = ("a list of token ids or, with a tokenizer, a string, or {'prompt': str} or "
            "{'prompt_token_ids': list}")


def to_list(values: Any) -> Any:
    """An array or a tensor as a list; everything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def split_prompts(prompts: Any) -> list[Any]:
    """A list of prompts. A single one is put into a list; a list of ints is a single
    one.
    """
    prompts = to_list(prompts)
    if not isinstance(prompts, (list, tuple)):
        return [prompts]
    is_single = bool(prompts) and isinstance(to_list(prompts[0]), int)
    return [prompts] if is_single else list(prompts)


def encode(prompt: Any, tokenizer: Any, vocab_size: int) -> EncodedPrompt:
    """The token ids of one prompt, which may be text; ValueError if it is neither."""
    text = token_ids = salt = None
    prompt = to_list(prompt)
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        for key in prompt:
            check_name("prompt", key, TOKENIZER_KEYS)
        token_ids = prompt["input_ids"]
    elif isinstance(prompt, Mapping):
        for key in prompt:
            check_name("prompt", key, PROMPT_KEYS)
        text = check_type("prompt", prompt.get("prompt"), str, optional=True)
        token_ids = prompt.get("prompt_token_ids")
        salt = check_type("cache_salt", prompt.get("cache_salt"), str, optional=True)
        if salt == "":
            raise ValueError("cache_salt must not be empty, got ''")
    elif isinstance(prompt, str):
        text = prompt
    else:
        token_ids = prompt

    if token_ids is None and text is not None and tokenizer is not None:
        token_ids = tokenizer(text).input_ids
    token_ids = to_list(token_ids)
    if not isinstance(token_ids, Iterable) or isinstance(token_ids, (str, bytes)):
        raise ValueError(f"prompt must be {EXPECTED}, got {prompt!r:.200}")
    return EncodedPrompt(text, check_token_ids("prompt", token_ids, vocab_size), salt)


def render(messages: Any, tokenizer: Any, options: dict[str, Any]) -> list[Any]:
    """The token ids of one or several conversations, by a chat template."""
    has_template = options.get("chat_template") or getattr(
        tokenizer, "chat_template", None)
    if tokenizer is None or not has_template:
        raise ValueError(
            "chat needs a tokenizer with a chat template: this model has none")
    check_type("messages", messages, list)
    is_single = not (messages and isinstance(messages[0], list))
    conversations = [messages] if is_single else messages
    return [
        tokenizer.apply_chat_template(
            [plain_message(i, message) for i, message in enumerate(conversation)],
            return_dict=False, **options)
        for conversation in conversations]


def plain_message(index: int, message: Any) -> Any:
    """The message, with its text in place of a list of parts."""
    name = f"messages[{index}]"
    check_type(name, message, dict)
    check_type(f"role of {name}", message.get("role"), str)
    content = message.get("content")
    if isinstance(content, list):
        parts = [text_of_part(name, part) for part in content]
        return message | {"content": "\n".join(parts)}  # as vLLM joins them
    if not isinstance(content, str) and "tool_calls" not in message:
        raise TypeError(
            f"content of {name} must be a string or a list of text parts, got "
            f"{content!r:.80}")
    return message


def text_of_part(name: str, part: Any) -> str:
    check_type(f"every part of the content of {name}", part, dict)
    if part.get("type") != "text":
        raise ValueError(
            f"content of {name} must be text, got a part of type {part.get('type')!r}")
    return str(check_type(f"text of the content of {name}", part.get("text"), str))
