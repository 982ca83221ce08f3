"""Text from token ids as they arrive: no half characters, nothing past a stop string.

A token can hold a part of a character's bytes, and what a token looks like can depend
on the one before it. So new tokens are always decoded together with those that came
just before them, and the text of the known ones is cut off again, as in Hugging Face's
text-generation-inference.
"""

import logging
from typing import Any

MOST_CONTEXT_TOKENS = 64  # it only gets so large by tokens that have no text
MOST_UNKNOWN_TOKENS = 16  # bytes that never become a character do not wait for ever
INCOMPLETE = "\ufffd"  # what a decoder puts for bytes that are not a whole character

logger = logging.getLogger("nanopaged")


class Detokenizer:
    """The text of one sequence.

    `text` has the tokens up to `known_end`, and the next ones are decoded together with
    those from `context_start`.

    For example, "so" and four tokens of one byte each, which together are an emoji:
    `text` stays "so" while the decoded text ends with an incomplete character. With the
    fourth byte the emoji is added, and the four tokens become the context.
    """

    def __init__(self, tokenizer: Any, prompt_ids: list[int], stops: list[str]) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        last = len(prompt_ids)
        # Context that begins within a character would spoil what follows: take more.
        size = 8  # tokens, so that the first word gets its leading space
        while size < last and self._decode(prompt_ids[-size:]).startswith(INCOMPLETE):
            size *= 2
        self.context_start = max(0, last - size)
        # A character that the prompt has begun (by 1 to 3 bytes) is a part of the text.
        whole = [end for end in range(max(0, last - 3), last + 1) if not self._decode(
            prompt_ids[self.context_start : end]).endswith(INCOMPLETE)]
        self.known_end = max(whole, default=last)
        self.text = ""
        self.stopped_by: str | None = None

    def update(self, token_ids: list[int], final: bool, may_stop: bool) -> None:
        """Decode what is new in `token_ids` (prompt included), and look for stop
        strings, unless they do not count yet.

        `final` says that nothing follows: then the bytes of an incomplete character
        come out, too.
        """
        if self.stopped_by is not None:
            return
        num_old = len(self.text)
        first, last = self.known_end + 1, len(token_ids)
        if INCOMPLETE not in self._decode(token_ids[self.context_start :]):
            first = last  # nothing is broken: all at once, the text is the same
        for end in range(first, last + 1):
            known = self._decode(token_ids[self.context_start : self.known_end])
            new = self._decode(token_ids[self.context_start : end])[len(known) :]
            is_late = end - self.known_end >= MOST_UNKNOWN_TOKENS
            if not new:  # special tokens have no text, and become context
                self.context_start = max(self.context_start, end - MOST_CONTEXT_TOKENS)
                self.known_end = end
            # The end may be within a character.
            elif not new.endswith(INCOMPLETE) or is_late or (final and end == last):
                self.text += new
                self.context_start, self.known_end = self.known_end, end

        if may_stop:
            # A stop string that was not there before ends in the new text.
            found = [(self.text.find(stop, max(0, num_old + 1 - len(stop))), stop)
                     for stop in self.stops]
            hits = [hit for hit in found if hit[0] >= 0]
            if hits:
                at, self.stopped_by = min(hits)
                self.text = self.text[:at]

    def visible(self, final: bool) -> str:
        """The text; before the end without as many characters as may turn out to begin
        a stop string.
        """
        if final:
            return self.text
        num_held_back = max(map(len, self.stops), default=1) - 1
        return self.text[: max(0, len(self.text) - num_held_back)]

    def _decode(self, token_ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        try:
            return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
        except Exception:  # it must not end the requests of others
            logger.exception("the tokenizer cannot decode %s", token_ids)
            return INCOMPLETE
