"""Calls of tools: from what the model writes to what OpenAI's clients read.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

The chat template shows the model a mark to write before a call. Mistral's comes before
a list of calls; and Llama writes a call with "parameters", often without a mark. What
looks like a call, but is broken or of an unknown tool, is text, and so is all thinking.
"""

import json
import re
from uuid import uuid4

MARKS = {"<tool_call>": "</tool_call>", "[TOOL_CALLS]": "", "<|tool_call|>": "",
         "<|python_tag|>": ""}  # before a call, and after it
BEGINS = [*MARKS, "<think>"]
BEGIN = re.compile("|".join(map(re.escape, BEGINS)))
OPEN, BETWEEN = re.compile(r"[\s\[]*"), re.compile(r"[\s,;]*")
KEY, DECODER = re.compile(r'"(arguments|parameters)"\s*:\s*'), json.JSONDecoder()
TOKEN = re.compile(r'\\.?|["{}<]', re.DOTALL)  # what counts in an object of JSON


def marks_of(template):
    """What this chat template has before a call, and after it."""
    mark = next((mark for mark in MARKS if mark in template), "<tool_call>")
    return mark, MARKS[mark]


class Calls:
    """Reads an answer, whole or piece by piece: its content, and its calls of tools
    with these names. What may yet become a call waits in `rest`.

    `step` reads on from there. It returns False where it needs more text.
    """

    def __init__(self, names, thinks=False, most=2**31):
        self.names, self.most, self.count, self.rest = {*names}, most, 0, ""
        self.step = self.think if thinks else self.start

    def read(self, new, final):
        """The content and the calls that are complete with what is new."""
        self.rest, self.final = self.rest + new, final
        self.content, self.calls = "", []
        while self.step():
            pass
        if final:
            self.say(len(self.rest), self.text)
        return self.content, self.calls

    def say(self, size, step):
        """So many characters are content."""
        self.content, self.rest = self.content + self.rest[:size], self.rest[size:]
        self.step = step
        return True

    def think(self):
        end = self.rest.find("</think>")
        if end < 0:
            return self.say(max(0, len(self.rest) - 7), self.think) and False
        return self.say(end + 8, self.text)

    def start(self):
        """At the beginning, a call needs no mark."""
        left = self.rest.lstrip()
        if left.startswith("{"):
            return self.expect(len(self.rest) - len(left), "")
        return bool(left) and self.say(0, self.text)

    def text(self):
        found = BEGIN.search(self.rest)
        if found is None:
            sure = len(self.rest) - unsure(self.rest, BEGINS)
            return self.say(sure, self.text) and False
        if found[0] == "<think>":
            return self.say(found.end(), self.think)
        self.say(found.start(), self.text)
        return self.expect(len(found[0]), MARKS[found[0]])

    def expect(self, lead, close):
        """An object after so many characters, and then perhaps a mark."""
        self.lead, self.close, self.step = lead, close, self.object
        self.at = self.depth = self.is_string = 0
        return True

    def object(self):
        start = OPEN.match(self.rest, self.lead).end()
        if self.rest[start : start + 1] not in ("", "{"):
            return self.say(max(1, self.lead), self.text)
        for token in TOKEN.finditer(self.rest, self.at or start):
            if token[0] == "\\":  # whatever it escapes has not come yet
                break
            self.at = token.end()
            self.is_string ^= token[0] == '"'
            if not self.is_string:
                self.depth += {"{": 1, "}": -1}.get(token[0], 0)
                if self.depth == 0 or token[0] == "<":
                    return self.end(start)
        else:
            self.at = max(start, len(self.rest))
        return self.final and self.say(max(1, self.lead), self.text)

    def end(self, start):
        """The object is complete, or cannot be one."""
        try:
            # NaN and Infinity are no JSON.
            call = json.loads(self.rest[start : self.at], parse_constant=int)
        except (RecursionError, ValueError):
            return self.say(max(1, self.lead), self.text)
        self.is_known = call.get("name") in [*self.names]  # it may be of any type
        if not self.is_known:
            return self.say(self.at, self.after)
        said = call.get("arguments", call.get("parameters", {}))
        if not isinstance(said, str):  # in the model's own characters
            texts = [self.rest[key.end() : DECODER.raw_decode(self.rest, key.end())[1]]
                     for key in KEY.finditer(self.rest, start, self.at)]
            said = next((text for text in texts if json.loads(text) == said), "{}")
        if self.count < self.most:
            self.calls.append({
                "index": self.count, "id": f"call_{uuid4().hex}", "type": "function",
                "function": {"name": call["name"], "arguments": said}})
        self.close = self.close or "]" * ("[" in self.rest[self.lead : start])
        self.count, self.rest = self.count + 1, self.rest[self.at :]
        return self.say(0, self.after)

    def after(self):
        """Another call, or text. Mere space before a mark, or at the end, is none."""
        gap = BETWEEN.match(self.rest).end()
        left, space = self.rest[gap:], not self.rest[:gap].strip()
        if not self.is_known:
            return bool(left) and (self.say(gap, self.after) and self.expect(
                0, "") if left[0] == "{" else self.say(0, self.text))
        if left.startswith("{") and self.close != "</":
            return self.expect(gap, self.close)
        marks = [self.close, *BEGINS] if self.close else BEGINS
        if not self.final and unsure(left, marks) == len(left):
            return False
        if self.close and space and left.startswith(self.close):
            self.rest, self.close = left[len(self.close) :], "</"
            return True
        if space and (not left or BEGIN.match(left)):
            self.rest = left
        return self.say(0, self.text)


def unsure(text, marks):
    """How many characters at the end of a text may begin one of these marks."""
    return max(size for size in range(min(len(text) + 1, max(map(len, marks))))
               if any(mark.startswith(text[len(text) - size :]) for mark in marks))
