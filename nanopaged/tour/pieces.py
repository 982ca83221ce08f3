"""What tokens look like: the text of each."""

from typing import Any

HALF = "\ufffd"  # what a tokenizer gives for bytes that are no whole character
LONGEST = 4  # a character has at most four bytes, each of which may be a token


class Pieces:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.known: dict[int, str] = {}

    def texts(self, token_ids: list[int]) -> list[str]:
        """A text for each token. If several tokens make up one character, the first has
        it, and the others are empty.
        """
        texts = [self.text(token) for token in token_ids]
        for start, text in enumerate(texts):
            lengths = range(2, LONGEST + 1) if HALF in text else ()
            for end in [start + length for length in lengths]:
                whole = self.tokenizer.decode(token_ids[start:end])
                if end <= len(texts) and HALF not in whole:
                    texts[start:end] = [whole, *[""] * (end - start - 1)]
                    break
        return texts

    def text(self, token: int) -> str:
        """One token in the middle of a text. Without a tokenizer this is its id."""
        if self.tokenizer is None:
            return f" {token}"
        if token not in self.known:
            # Alone, or after a special token, some tokenizers drop a leading space.
            anchor = self.tokenizer("a", add_special_tokens=False).input_ids[:1]
            before = self.tokenizer.decode(anchor)
            after = self.tokenizer.decode([*anchor, token])
            text = after if after.startswith(before) else self.tokenizer.decode([token])
            self.known[token] = text.removeprefix(before)
        return self.known[token]
