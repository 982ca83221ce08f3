"""Text from token ids as they arrive: no half characters, nothing past a stop string.

A token stands for a few bytes of UTF-8, which may begin or end within a character. So
the bytes of new tokens are joined, whatever characters they complete become text, and
the bytes of an incomplete one wait. If the bundled model answers " so é!", for example:

    token id   its name   its bytes   waiting   text
       366     "Ġso"      20 73 6F              " so"
       221     "Ġ"        20                    " so "
       128     "Ã"        C3          C3        " so "
       103     "©"        A9                    " so é"
         1     "!"        21                    " so é!"
"""

import codecs
import logging
from functools import lru_cache
from typing import Any
from weakref import ref

from transformers.convert_slow_tokenizer import bytes_to_unicode

# Many tokenizers write each byte in a token's name as one character, as above.
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


@lru_cache(2**18)  # weak references, so that the cache keeps no tokenizer in memory
def token_bytes(tokenizer_ref: ref[Any], token: int) -> tuple[bytes, bytes]:
    """The bytes of a token at the beginning of a text, and those after other tokens.

    They differ if the tokenizer drops the space before the first word. Such a tokenizer
    decodes a token as "block", and the same token twice as "block block", so the bytes
    are those of "block" and " block". Special tokens have none.
    """
    tokenizer: Any = tokenizer_ref()
    once, twice = (tokenizer.decode([token] * count, skip_special_tokens=True)
                   for count in (1, 2))
    first, later = once.encode(), twice[len(once) :].encode()
    if "\ufffd" in once:  # this is "�", which stands for bytes that are no character
        name = tokenizer.convert_ids_to_tokens(token)
        if name.startswith("<0x"):  # such as "<0xC3>"
            first = later = bytes.fromhex(name[3:5])
        elif set(name) <= BYTE_OF.keys():  # such as "Ã"
            first = later = bytes(BYTE_OF[character] for character in name)
    return first, later


class Detokenizer:
    """The text of one sequence."""

    def __init__(self, tokenizer: Any, prompt_ids: list[int], stops: list[str]) -> None:
        self.tokenizer = tokenizer
        self.stops = sorted(stops)  # of two that begin together, the shorter one counts
        self.stopped_by: str | None = None
        self.waiting = b""  # the first bytes of a character that is not complete yet
        self.has_begun = False  # whether there has been any text, even in the prompt
        self.text = ""
        # The prompt may end within a character. So read its end, and drop the text.
        self.num_read = max(0, len(prompt_ids) - 16)
        self.update(prompt_ids, final=False, may_stop=False)
        self.text = ""

    def update(self, token_ids: list[int], final: bool, may_stop: bool) -> None:
        """Decode what is new in `token_ids`, which begin with the prompt. Look for stop
        strings if they may end the sequence already.

        `final` means that nothing follows. Then an incomplete character becomes "�".
        """
        if self.tokenizer is None or self.stopped_by is not None:
            return
        data = bytearray(self.waiting)
        try:
            for token in token_ids[self.num_read :]:
                first, later = token_bytes(ref(self.tokenizer), token)
                data += later if self.has_begun else first
                self.has_begun |= bool(later)
        except Exception:  # this text ends here, but other requests go on
            logging.getLogger("nanopaged").exception("cannot decode token %d", token)
            self.tokenizer = None
            final = True
        self.num_read = len(token_ids)
        num_old = len(self.text)
        new, num_decoded = codecs.utf_8_decode(data, "replace", final)
        self.waiting = bytes(data[num_decoded:])
        self.text = text = self.text + new

        for stop in self.stops if may_stop else []:
            # A stop string that was not there before ends in the new text.
            at = text.find(stop, max(0, num_old + 1 - len(stop)))
            if 0 <= at < len(self.text):  # the one that begins first counts
                self.text, self.stopped_by = text[:at], stop

    def visible(self, final: bool) -> str:
        """The text. Before the end, its last characters are held back, because a stop
        string may begin with them. For "END", these are the last two.
        """
        num_held_back = 0 if final else max(map(len, self.stops), default=1) - 1
        return self.text[: max(0, len(self.text) - num_held_back)]
