"""What tokens look like: the text of every token that a trace has.

A token may hold a part of a character only. Alone it has no text, so runs of such
tokens that make up a character have an entry of their own, "227,152,128": "\u2600".
"""

from typing import Any

HALF = "\ufffd"  # what a tokenizer gives for bytes that are no character
LONGEST_RUN = 4  # a character has at most four bytes


class Pieces:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.texts: dict[int | str, str] = {}  # by token id, or by several of them
        self.halves: set[int] = set()

    def add(self, token_ids: list[int]) -> None:
        for token in sorted(set(token_ids) - self.texts.keys()):
            self.texts[token] = self.text(token)
            if HALF in self.texts[token]:
                self.halves.add(token)
        if not self.halves.isdisjoint(token_ids):
            self.add_runs(token_ids)

    def add_runs(self, token_ids: list[int]) -> None:
        for start, token in enumerate(token_ids):
            if token not in self.halves:
                continue
            for length in range(2, LONGEST_RUN + 1):
                run = token_ids[start : start + length]
                key = ",".join(map(str, run))
                if key not in self.texts and len(run) == length:
                    text = self.tokenizer.decode(run)
                    if HALF not in text:
                        self.texts[key] = text
                        break

    def text(self, token: int) -> str:
        """One token in the middle of a text; without a tokenizer, its id."""
        if self.tokenizer is None:
            return f" {token}"
        # Alone, or after a special token, some tokenizers drop a leading space.
        (anchor, *_) = self.tokenizer("a", add_special_tokens=False).input_ids
        before = self.tokenizer.decode([anchor])
        text = str(self.tokenizer.decode([anchor, token]))
        return text[len(before) :] if text.startswith(before) else text
