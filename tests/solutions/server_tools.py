"""Calls of tools: from what the model writes to what OpenAI's clients read.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

The chat template shows the model a mark to write before a call. Mistral's comes before
a list of calls; and Llama writes a call with "parameters", often without a mark.
"""

import json
import re
from uuid import uuid4

MARKS = {"<tool_call>": "</tool_call>", "[TOOL_CALLS]": "", "<|tool_call|>": "",
         "<|python_tag|>": ""}  # before a call, and after it
EITHER = "|".join(re.escape(mark) for mark in [*MARKS, *MARKS.values()] if mark)
FIRST = re.compile("|".join(map(re.escape, MARKS)) + r"|^\s*\{")
BETWEEN = re.compile(rf"(?:[\s\[\],;]|{EITHER})*(?=\{{)")


def marks_of(template):
    """What this chat template has before a call, and after it."""
    mark = next((mark for mark in MARKS if mark in template), "<tool_call>")
    return mark, MARKS[mark]


def read_calls(text, names, final):
    """The content of an answer, and its calls of tools with these names. Unless it is
    final, what may yet become a call is in neither.
    """
    found, calls = FIRST.search(text), []
    if found is None:
        unsure = 0 if final else max(
            size for size in range(max(map(len, MARKS)))
            if any(mark.startswith(text[len(text) - size :]) for mark in MARKS))
        return text[: len(text) - unsure], calls
    at = found.start()
    while start := BETWEEN.match(text, at):
        try:
            call, at = json.JSONDecoder().raw_decode(text, start.end())
        except (RecursionError, ValueError):  # it is not complete yet
            break
        if call.get("name") not in [*names]:  # it may be of any type
            break
        said = call.get("arguments", call.get("parameters", {}))
        said = said if isinstance(said, str) else json.dumps(said)
        calls.append({
            "index": len(calls), "id": f"call_{uuid4().hex}", "type": "function",
            "function": {"name": call["name"], "arguments": said}})
    return text if final and not calls else text[: found.start()], calls
