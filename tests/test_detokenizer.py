"""Token ids become text as they arrive: whole characters, and no stop strings.

Two stand-ins take the place of a tokenizer: bytes and merges of bytes (any text, split
into tokens anywhere), and words whose text loses its first space, as in Llama 2 and
Mistral. The reference decodes everything at once.
"""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nanopaged.detokenizer import Detokenizer

SPECIAL = 0
HALF = "\ufffd"  # what a decoder puts for a part of a character


def update(detokenizer, *args, **options):
    detokenizer.update(*args, **options)
    return detokenizer.stopped_by is not None


class Bytes:
    """Token t stands for the bytes `pieces[t]`; token 0 is special and has no text."""

    def __init__(self, pieces):
        self.pieces = [b"", *pieces]

    def decode(self, ids, skip_special_tokens=False):
        assert skip_special_tokens
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


class Words(Bytes):
    """Like a sentencepiece model: the text loses its leading space."""

    def decode(self, ids, skip_special_tokens=False):
        return super().decode(ids, skip_special_tokens).removeprefix(" ")


def cut(tokens, sizes):
    """The lengths at which `update` is called: not every one, but always the last."""
    ends, end = [], 0
    while end < tokens:
        end = min(tokens, end + sizes[len(ends) % len(sizes)])
        ends.append(end)
    return ends


def stream(tokenizer, prompt, answer, stops=(), sizes=(1,)):
    """Feed the answer; yields detokenizer and visible text after each update."""
    detokenizer = Detokenizer(tokenizer, prompt, stops)
    for end in cut(len(answer), sizes):
        detokenizer.update(prompt + answer[:end])
        yield (
            detokenizer,
            detokenizer.text if detokenizer.stopped_by else detokenizer.visible(),
        )
    detokenizer.update(prompt + answer, final=True)
    yield detokenizer, detokenizer.text


def texts(tokenizer, prompt, answer, stops=(), sizes=(1,)):
    return [d.text for d, _ in stream(tokenizer, prompt, answer, stops, sizes)]


def split(data):
    """One token for each byte of a text."""
    return list(range(1, 1 + len(data)))


# --- characters ---


def test_a_character_appears_with_its_last_byte():
    data = "a\u00e9\u20ac\U0001f600z".encode()
    tokenizer = Bytes([bytes([b]) for b in data])
    assert texts(tokenizer, [], split(data)) == [
        "a",
        "a",
        "a\u00e9",
        "a\u00e9",
        "a\u00e9",
        "a\u00e9\u20ac",
        "a\u00e9\u20ac",
        "a\u00e9\u20ac",
        "a\u00e9\u20ac",
        "a\u00e9\u20ac\U0001f600",
        "a\u00e9\u20ac\U0001f600z",
        "a\u00e9\u20ac\U0001f600z",
    ]


def test_a_token_may_end_one_character_and_begin_the_next():
    tokenizer = Bytes([b"x\xc3", b"\xa9\xe2\x82", b"\xac"])
    assert texts(tokenizer, [], [1, 2, 3]) == ["", "", "x\u00e9\u20ac", "x\u00e9\u20ac"]


def test_half_a_character_appears_at_the_end():
    tokenizer = Bytes([b"abc\xe2\x82"])
    assert texts(tokenizer, [], [1]) == ["", f"abc{HALF}"]


def test_invalid_bytes_appear_once_something_follows():
    tokenizer = Bytes([b"a", b"\x80", b"b"])
    assert texts(tokenizer, [], [1, 2, 3]) == ["a", "a", f"a{HALF}b", f"a{HALF}b"]


def test_the_prompt_is_not_part_of_the_text():
    tokenizer = Bytes([b"one ", b"two ", b"three"])
    for prompt in ([1], [1, 2], [2] * 9):
        assert texts(tokenizer, prompt, [3])[-1] == "three"


def test_updates_without_a_new_token_change_nothing():
    detokenizer = Detokenizer(Bytes([b"a", b"b"]), [1], ["z"])
    for ids in ([1], [1], [1, 2], [1, 2], [1, 2]):
        assert not update(detokenizer, ids)
    assert detokenizer.text == "b"


def test_the_first_word_keeps_its_space_after_a_prompt():
    tokenizer = Words([b" one", b" two", b" three"])
    assert texts(tokenizer, [1, 2], [3, 1])[-1] == " three one"
    # Here it starts the text.
    assert texts(tokenizer, [SPECIAL], [3, 1])[-1] == "three one"


def test_a_special_token_within_the_text_removes_no_space():
    tokenizer = Words([b" one", b" two"])
    assert (
        texts(tokenizer, [1], [2, SPECIAL, 2, SPECIAL, SPECIAL, 1])[-1]
        == " two two one"
    )


LETTERS = "ab  \u00e9\u20ac\U0001f600\u0301"
characters = st.one_of(st.sampled_from(LETTERS), st.characters(codec="utf-8"))
text_strategy = st.text(characters, max_size=12).filter(lambda text: HALF not in text)
sizes_strategy = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@st.composite
def tokenized(draw, data=None):
    """Bytes cut into tokens, even within characters: (tokenizer, prompt, answer)."""
    if data is None:
        data = draw(st.one_of(text_strategy.map(str.encode), st.binary(max_size=12)))
    pieces = []
    while data:
        size = draw(st.integers(1, 3))
        pieces.append(data[:size])
        data = data[size:]

    prompt = draw(text_strategy).encode()
    kind = draw(st.sampled_from([Bytes, Words]))
    answer = split(pieces)
    for _ in range(draw(st.integers(0, 2))):
        answer.insert(draw(st.integers(0, len(answer))), SPECIAL)
    words = [prompt[i : i + 2] for i in range(0, len(prompt), 2)]
    tokenizer = kind([*pieces, *words])
    return tokenizer, [len(pieces) + 1 + i for i in range(len(words))], answer


def whole(tokenizer, prompt, answer):
    """The one-shot decode, without the prompt."""
    text = tokenizer.decode(prompt + answer, skip_special_tokens=True)
    return text[len(tokenizer.decode(prompt, skip_special_tokens=True)) :]


@settings(max_examples=500, deadline=None)
@given(tokenized(), sizes_strategy)
def test_updates_append_whole_characters_up_to_the_one_shot_decode(case, sizes):
    before = ""
    for detokenizer, shown in stream(*case, sizes=sizes):
        assert shown == detokenizer.text
        assert detokenizer.text.startswith(before)
        before = detokenizer.text
    assert before == whole(*case)


# --- stop strings ---


def letters(text):
    """A tokenizer with one token a letter, and the text's tokens."""
    alphabet = sorted(set(text))
    return Bytes([c.encode() for c in alphabet]), [1 + alphabet.index(c) for c in text]


def run(text, stops, sizes=(1,)):
    tokenizer, answer = letters(text)
    return list(texts(tokenizer, [], answer, stops, sizes))[-1]


@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (1, 3), (99,)], ids=str)
@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("hello world", ["o w"], "hell"),
        ("hello world", ["x"], "hello world"),
        ("hello world", ["hello"], ""),
        ("hello world", ["world"], "hello "),
        ("hello world", ["o", "l"], "he"),
        ("aaab", ["aab"], "a"),
        ("ababac", ["abac"], "ab"),
    ],
)
def test_text_ends_before_the_first_stop_string(text, stops, expected, sizes):
    assert run(text, stops, sizes) == expected


def test_of_several_stop_strings_the_one_that_is_complete_first_counts():
    for sizes in ((99,), (1,)):  # "c" is complete before "bcd" is
        assert run("xabcdy", ["c", "bcd"], sizes) == "xab"


def test_a_stopped_text_stays_as_it_is():
    tokenizer, ids = letters("abcabc")
    detokenizer = Detokenizer(tokenizer, [], ["b"])
    assert [update(detokenizer, ids[:n]) for n in range(1, 7)] == [False] + [True] * 5
    assert update(detokenizer, ids, final=True)
    assert detokenizer.text == "a"


def test_stop_strings_are_not_searched_for_in_the_prompt_or_across_its_end():
    tokenizer, ids = letters("abab")
    detokenizer = Detokenizer(tokenizer, ids[:1], ["ab"])
    assert [update(detokenizer, ids[:n]) for n in (2, 3, 4)] == [False, False, True]
    assert detokenizer.text == "b"


def test_the_start_of_a_stop_string_is_held_back_until_resolved():
    tokenizer, ids = letters("xabyabc")
    detokenizer = Detokenizer(tokenizer, [], ["abc"])
    seen = []
    for n in range(1, 8):
        detokenizer.update(ids[:n])
        seen.append(detokenizer.visible())
    assert seen == ["x", "x", "x", "xaby", "xaby", "xaby", "xaby"]


def test_without_stop_strings_nothing_is_held_back():
    tokenizer, ids = letters("abc")
    detokenizer = Detokenizer(tokenizer, [])
    detokenizer.update(ids)
    assert detokenizer.visible() == detokenizer.text == "abc"


@pytest.mark.parametrize("stops", [["ab"], ["ab", "zzzzzz"], ["b", "bx"]], ids=str)
@pytest.mark.parametrize("sizes", [(1,), (2,)], ids=str)
def test_a_stop_string_before_min_tokens_does_not_stop_later_either(stops, sizes):
    tokenizer, ids = letters("ababxyzxyz")
    detokenizer = Detokenizer(tokenizer, [], stops)
    for end in cut(len(ids), sizes):
        assert not update(detokenizer, ids[:end], check_stops=end > 4)
    assert detokenizer.text == "ababxyzxyz"


def test_stop_strings_are_searched_for_in_new_text_only():
    searched = []

    class Text(str):
        def __add__(self, other):
            return Text(str(self) + other)

        def find(self, stop, start):
            searched.append(len(self) - start)
            return super().find(stop, start)

    tokenizer, ids = letters("abc" * 20 + "xy")
    detokenizer = Detokenizer(tokenizer, [], ["xy", "zz"])
    detokenizer.text = Text()
    stopped = [update(detokenizer, ids[: n + 1]) for n in range(62)]
    assert stopped == [False] * 61 + [True]
    assert max(searched) <= 3


def test_a_stop_string_after_min_tokens_stops():
    tokenizer, ids = letters("ababxab")
    detokenizer = Detokenizer(tokenizer, [], ["ab"])
    found = [update(detokenizer, ids[:n], check_stops=n > 4) for n in range(1, 8)]
    assert found == [False] * 6 + [True]
    assert detokenizer.text == "ababx"


def first_stop(emitted, stops):
    """The right text: cut at the first update after which it contains a stop string."""
    for text in emitted:
        hits = [text.index(stop) for stop in stops if stop in text]
        if hits:
            return text[: min(hits)]
    return emitted[-1]


stops_strategy = st.lists(
    st.text("ab\u20ac", min_size=1, max_size=5), min_size=1, max_size=3
)


@settings(max_examples=500, deadline=None)
@given(st.data(), st.text("ab\u20ac", max_size=14), stops_strategy, sizes_strategy)
def test_any_text_ends_before_its_first_stop_string(data, text, stops, sizes):
    case = data.draw(tokenized(text.encode()))
    expected = first_stop(texts(*case), stops)  # however many come at a time

    before = ""
    for detokenizer, shown in stream(*case, stops, sizes):
        assert shown.startswith(before), "text was taken back"
        assert detokenizer.text.startswith(shown)
        assert expected.startswith(shown), "part of a stop string was shown"
        before = shown

    assert detokenizer.text == expected
    is_stopped = detokenizer.stopped_by is not None
    assert is_stopped == any(stop in whole(*case) for stop in stops)


@settings(max_examples=300, deadline=None)
@given(st.text("ab", max_size=14), stops_strategy, st.integers(0, 14))
def test_a_stop_string_counts_from_min_tokens_on(text, stops, unchecked):
    tokenizer, answer = letters(text)
    assume(unchecked < len(answer))
    detokenizer = Detokenizer(tokenizer, [], stops)
    for end in range(1, len(answer) + 1):
        detokenizer.update(answer[:end], check_stops=end > unchecked)
    after = text[:unchecked] + first_stop(
        [text[unchecked:end] for end in range(unchecked, len(text) + 1)], stops
    )
    # A stop string across the boundary may count, as in vLLM, or not.
    across = [
        text[:begin]
        for stop in stops
        for begin in range(unchecked)
        if text.startswith(stop, begin) and begin + len(stop) > unchecked
    ]

    assert detokenizer.text in [after, *across]
