"""Text from token ids as they arrive: no half characters, nothing past a stop string.

A token can hold a part of a character's bytes, and what a token looks like can depend
on the one before it. So new tokens are always decoded together with a few known ones,
and the text of the known ones is cut off again: the two offsets of Hugging Face's
text-generation-inference.
"""

from collections.abc import Sequence
from typing import Any

NUM_CONTEXT_TOKENS = 5  # of the prompt, so that the first word gets its leading space
INCOMPLETE = "\ufffd"  # what a decoder puts for bytes that are no character (yet)


class Detokenizer:
    def __init__(self, tokenizer: Any, num_prompt_tokens: int,
                 stops: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.text = ""
        self.stopped = False
        self.known = num_prompt_tokens  # tokens with text in `text` or in the prompt
        self.context = max(0, num_prompt_tokens - NUM_CONTEXT_TOKENS)
        self.start = 0  # stop strings count from this character on

    def update(self, token_ids: list[int], check_stops: bool = True,
               final: bool = False) -> None:
        """Decode what is new in `token_ids` (prompt included), and look for stop
        strings.

        `final` says that nothing follows: characters before an incomplete one come out
        now.
        """
        if self.stopped or self.known == len(token_ids) or self.tokenizer is None:
            return
        known = self._decode(token_ids[self.context : self.known])
        new = self._decode(token_ids[self.context :])[len(known) :]
        if new and (final or not new.endswith(INCOMPLETE)):
            self.text += new.rstrip(INCOMPLETE) if final else new
            self.context, self.known = self.known, len(token_ids)
            self.start = self.start if check_stops else len(self.text)
            # What ends in the known text has been searched for.
            longest = max(map(len, self.stops), default=0)
            low = max(self.start, len(self.text) - len(new) - longest)
            hits = [at for stop in self.stops if (at := self.text.find(stop, low)) >= 0]
            if hits:
                self.text, self.stopped = self.text[: min(hits)], True

    def visible(self, final: bool = False) -> str:
        """The text; before the end without what may become a stop string."""
        if final or not self.stops:
            return self.text
        held_back = max(length for stop in self.stops for length in range(len(stop))
                        if self.text.endswith(stop[:length]))
        return self.text[: len(self.text) - held_back]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
