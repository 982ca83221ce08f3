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
from functools import lru_cache
from os.path import commonprefix
from typing import Any
from weakref import ref

from transformers.convert_slow_tokenizer import bytes_to_unicode

# Many tokenizers write each byte of a token as one character: "Ġ" for 20, "Ã" for C3.
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


@lru_cache(2**18)  # its weak references keep no tokenizer in memory
def token_bytes(tokenizer_ref: ref[Any], token: int,
                skip_special_tokens: bool = True) -> tuple[bytes, bytes]:
    """The bytes of a token at the beginning of a text, and after other tokens.

    They differ if the tokenizer drops the space before the first word. Such a tokenizer
    decodes a token as "block", and the same token twice as "block block", so the bytes
    are those of "block" and " block". Special tokens that are skipped have none.

    This assumes that the text of a token does not depend on its neighbours.
    """
    tokenizer: Any = tokenizer_ref()
    once, twice = (
        tokenizer.decode([token] * count, skip_special_tokens=skip_special_tokens)
        for count in (1, 2))
    first, later = once.encode(), twice[len(once) :].encode()
    if "\ufffd" in once:  # "�", which stands for bytes that are not a whole character
        name = tokenizer.convert_ids_to_tokens(token)
        if name.startswith("<0x"):  # such as "<0xC3>"
            first = later = bytes.fromhex(name[3:5])
        elif set(name) <= BYTE_OF.keys():  # such as "Ã"
            first = later = bytes(BYTE_OF[character] for character in name)
    return first, later


@lru_cache(16)
def special_tokens(tokenizer_ref: ref[Any]) -> dict[str, int]:
    """The ids of special tokens. (A tokenizer makes this table anew for each look.)"""
    tokens = tokenizer_ref().added_tokens_decoder.items()  # type: ignore[union-attr]
    return {token.content: id for id, token in tokens if token.special}


class Detokenizer:
    """The text of one sequence."""

    def __init__(self, tokenizer: Any, prompt_ids: list[int], stops: list[str],
                 skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        # In a few decoders the text of a token depends on its neighbours, and so it may
        # in a tokenizer that is written in Python (CTRL's): they decode all, each time.
        raw = getattr(tokenizer, "backend_tokenizer", None)
        self.is_additive = raw and not any(
            merging in str(raw.decoder) for merging in ("CTC", "BPEDecoder"))
        self.stops = stops
        self.stopped_by: str | None = None
        # Stop strings that are special tokens. The text may skip those.
        known = special_tokens(ref(tokenizer)) if tokenizer and stops else {}
        self.special_stops = {known[stop]: stop for stop in stops if stop in known}
        self.waiting = b""  # the first bytes of a character that is not complete yet
        self.has_begun = False  # whether the prompt or the answer has any text yet
        self.text = ""
        self.num_prompt_tokens = len(prompt_ids)
        # The prompt may end within a character. So its last tokens (16 are more than a
        # character has) are read like the answer, and then their text is dropped.
        self.num_read = max(0, len(prompt_ids) - 16)  # tokens
        self.update(prompt_ids, final=False, may_stop=False)
        self.text = ""

    def update(self, token_ids: list[int], final: bool, may_stop: bool) -> None:
        """Decode what is new in `token_ids`, which begin with the prompt. Look for stop
        strings if they may already end the sequence.

        `final` means that nothing follows, so an incomplete character becomes "�".
        """
        if self.tokenizer is None or self.stopped_by is not None:
            return
        data = bytearray(self.waiting)
        for token in token_ids[self.num_read :]:
            if may_stop and token in self.special_stops:
                self.stopped_by, final = self.special_stops[token], True
                break
            first, later = token_bytes(
                ref(self.tokenizer), token, self.skip_special_tokens)
            data += later if self.has_begun else first
            self.has_begun |= bool(later)
        self.num_read = len(token_ids)
        new, num_decoded = codecs.utf_8_decode(data, "replace", final)
        self.waiting = bytes(data[num_decoded:])
        if not self.is_additive:
            whole = self.tokenizer.decode(
                token_ids[self.num_prompt_tokens :],
                skip_special_tokens=self.skip_special_tokens)
            self.text = commonprefix([self.text, whole])
            new = whole[len(self.text) :]
        self.text = text = self.text + new

        # Of several stop strings, the one that is complete first counts.
        ends: dict[int, str] = {}
        for stop in self.stops if may_stop else []:
            # One that was not found earlier must end in the new text.
            at = text.find(stop, max(0, len(text) - len(new) - len(stop) + 1))
            if at >= 0:
                ends.setdefault(at + len(stop), stop)
        if ends:
            self.stopped_by = stop = ends[min(ends)]
            self.text = text[: min(ends) - len(stop)]

    def visible(self, final: bool) -> str:
        """The text, and unless `final`, without what is held back: the last two
        characters, for example, if "END" is a stop string.
        """
        # So many last characters may be the beginning of a stop string.
        held_back = 0 if final else max(map(len, self.stops), default=1) - 1
        return self.text[: max(0, len(self.text) - held_back)]
