"""Text from token ids as they arrive: no half characters, nothing past a stop string.

A token can hold a part of a character's bytes, and what a token looks like can depend
on the one before it. So new tokens are always decoded together with a few known ones,
and the text of the known ones is cut off again, as in Hugging Face's
text-generation-inference.
"""

from collections.abc import Sequence
from typing import Any

NUM_CONTEXT_TOKENS = 5  # of the prompt, so that the first word gets its leading space
MOST_UNKNOWN_TOKENS = 16  # then their text is taken, except its unfinished end
NUM_KEPT_TOKENS = 9  # enough for the bytes of an unfinished character
INCOMPLETE = "\ufffd"  # what a decoder puts for bytes that are not a whole character


class Detokenizer:
    """The text of one sequence.

    `context` holds the last tokens that have been turned into text. It decodes to a
    string whose first `num_known` characters are in `text` already, or belong to the
    prompt. `unknown` holds the tokens after it. Their text is not in `text` yet,
    because they may end within a character.

    For example, "so" and four tokens of one byte each, which together are an emoji:
    `context` is ["so"], num_known=2, and `unknown` grows to four tokens. Only then does
    the text after "so" not end with an incomplete character. It is added to `text`, and
    the four tokens become the context.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: list[int],
                 stops: Sequence[str] = (), skip_special_tokens: bool = True,
                 include_stop: bool = False) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.skip_special_tokens = skip_special_tokens
        self.include_stop = include_stop
        self.context = prompt_token_ids[-NUM_CONTEXT_TOKENS:]
        self.num_known = len(self._decode(self.context)) if tokenizer else 0
        self.unknown: list[int] = []
        self.num_tokens = len(prompt_token_ids)  # that were seen, the prompt's included
        self.text = ""
        self.start = 0  # stop strings count from this character on
        self.stopped_by: str | None = None

    def update(self, token_ids: list[int], check_stops: bool = True,
               final: bool = False) -> None:
        """Decode what is new in `token_ids` (prompt included), and look for stop
        strings.

        `final` says that nothing follows: then the bytes of an incomplete character
        come out, too.
        """
        if self.tokenizer is None:
            return
        new_tokens = token_ids[self.num_tokens :]
        self.num_tokens = len(token_ids)
        if final and not self.stops and self._add_complete(new_tokens):
            return
        for token in new_tokens:
            if self.stopped_by is None:
                self.unknown = [*self.unknown, token]  # a copy may share the list
                self._add_unknown(check_stops, final=False)
        if final and self.stopped_by is None:
            self._add_unknown(check_stops, final)

    def _add_complete(self, new_tokens: list[int]) -> bool:
        """Decode the last tokens at once, if each of their characters is complete.

        Token by token the text would be the same: this only takes less time.
        """
        new = self._decode(self.context + self.unknown + new_tokens)[self.num_known :]
        is_complete = INCOMPLETE not in new
        if is_complete:
            self.text += new
            self.unknown = []
        return is_complete

    def _add_unknown(self, check_stops: bool, final: bool) -> None:
        """Add the text of the unknown tokens, unless it may end within a character."""
        new = self._decode(self.context + self.unknown)[self.num_known :]
        are_many = len(self.unknown) == MOST_UNKNOWN_TOKENS
        if final or (new and not new.endswith(INCOMPLETE)):
            # The usual case: the text ends with a whole character, or nothing follows.
            self._set_context(self.unknown, num_open=0)
        elif are_many and new:
            # Bytes that never became a whole character. Take the text of all but the
            # last few, which may still become one.
            num_open = count_open(new)
            new = new[: len(new) - num_open]
            self._set_context(self.unknown[-NUM_KEPT_TOKENS:], num_open)
        elif are_many:
            # Tokens without text (special ones) would be useless as context: the next
            # word would be decoded like the first of a text.
            self.unknown = []
        else:
            return  # until more tokens come

        self.text += new
        if not check_stops:
            self.start = len(self.text)
        self._find_stop(len(new))

    def _set_context(self, context: list[int], num_open: int) -> None:
        """Decode with this context from now on. Its text is known, except the last
        `num_open` characters.
        """
        self.context = context
        self.num_known = len(self._decode(context)) - num_open
        self.unknown = []

    def _find_stop(self, num_new: int) -> None:
        """Cut the text at the first stop string that ends in its last characters."""
        hits = []
        for stop in self.stops:
            low = max(self.start, len(self.text) - num_new - len(stop))
            at = self.text.find(stop, low)
            if at >= 0:
                hits.append((at, stop))
        if hits:
            at, self.stopped_by = min(hits)
            end = at + len(self.stopped_by) if self.include_stop else at
            self.text = self.text[:end]

    def visible(self, final: bool = False) -> str:
        """The text; before the end without what may become a stop string."""
        held_back = 0
        if not final and self.stopped_by is None:
            held_back = max((self._match(stop) for stop in self.stops), default=0)
        return self.text[: len(self.text) - held_back]

    def _match(self, stop: str) -> int:
        """How many characters at the end of the text may begin this stop string."""
        at = max(self.start, len(self.text) - len(stop) + 1)
        while (at := self.text.find(stop[0], at)) >= 0:
            if stop.startswith(self.text[at:]):
                return len(self.text) - at
            at += 1
        return 0

    def name_of(self, token: int) -> str | None:
        """The text of a single token; None without a tokenizer."""
        return None if self.tokenizer is None else str(self.tokenizer.decode([token]))

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(
            token_ids, skip_special_tokens=self.skip_special_tokens))


def count_open(text: str) -> int:
    """How many characters at the end of a text may change when more bytes follow."""
    num_incomplete = len(text) - len(text.rstrip(INCOMPLETE))
    return min(num_incomplete, 3)  # an unfinished character has at most 3 bytes
