"""Text from token ids, and stop strings.

Whatever tokens come, the text is the same whether it is streamed or not. It only grows,
and where the tokens make whole characters it is what the tokenizer says of all of them
at once. The tokenizers are of the kinds that models have: bytes of characters, and
words with marked spaces, of which the first may be cut off.
"""

import copy
import random
import weakref
from collections import defaultdict
from itertools import product

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from helpers import HALF, complete, greedy, tokens_of
from nanopaged import SamplingParams
from nanopaged.frontend.detokenizer import Detokenizer
from nanopaged.loading import checkpoint

CHARACTERS = "ab  stheé€你的热情😀\u0301\n"


@pytest.fixture(params=["tokenizer", "sentencepiece_tokenizer"])
def kind(request):
    """Both kinds of tokenizers that models have."""
    return request.getfixturevalue(request.param)


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def decode(tokenizer, prompt, answer):
    """The text of the answer, from the text of all tokens."""
    whole = tokenizer.decode(prompt + answer, skip_special_tokens=True)
    return whole[len(tokenizer.decode(prompt, skip_special_tokens=True)) :]


def random_text(rng, most):
    return "".join(rng.choices(CHARACTERS, k=rng.randrange(most)))


def random_answer(rng, tokenizer):
    """Tokens of texts, and sometimes any others: special ones, parts of characters."""
    ids = []
    for _ in range(rng.randrange(1, 5)):
        ids += encode(tokenizer, random_text(rng, 8))
        if rng.random() < 0.3:
            ids += rng.choices(tokenizer.all_special_ids, k=rng.randrange(1, 4))
        if rng.random() < 0.2:
            ids += [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(9))]
    return ids


def texts_of(tokenizer, prompt, answer, ends, stops=(), min_tokens=0):
    """What is visible with these numbers of tokens, then with all, then at the end."""
    first = Detokenizer(tokenizer, prompt, stops)
    ours, shown = copy.copy(first), []  # as sequences copy that of their group
    for end in [*ends, len(answer)]:
        ours.update(prompt + answer[:end], False, end > min_tokens)
        shown.append(ours.visible(ours.stopped_by is not None))
    ours.update(prompt + answer, True, len(answer) > min_tokens)
    assert (first.text, first.stopped_by) == ("", None), "the copy is not independent"
    return [*shown, ours.visible(True)]


def finals_of(tokenizer, prompt, answer):
    """The text at the end, streamed and not."""
    return {texts_of(tokenizer, prompt, answer, ends)[-1]
            for ends in ([], range(1, len(answer)))}


# -- Characters ------------------------------------------------------------------------


def test_any_tokens_have_the_same_text_streamed_or_not(kind):
    rng, num_whole = random.Random(1), 0
    for _ in range(300):
        prompt, answer = encode(kind, random_text(rng, 20)), random_answer(rng, kind)
        shown = texts_of(
            kind, prompt, answer, range(1, len(answer), rng.choice([1, 1, 3])))
        assert {shown[-1]} == finals_of(kind, prompt, answer)
        assert all(b.startswith(a) for a, b in zip(shown, shown[1:], strict=False))
        expected = decode(kind, prompt, answer)
        if HALF not in expected:
            num_whole += 1
            assert shown[-1] == expected and not any(HALF in text for text in shown)
    assert 100 < num_whole < 300


def test_a_character_is_streamed_with_its_last_byte(kind):
    prompt, answer = encode(kind, "the"), encode(kind, "hé€u😀nд. table")
    shown, expected = texts_of(kind, prompt, answer, range(1, len(answer))), ""
    for count, text in enumerate(shown[:-1], 1):
        now = decode(kind, prompt, answer[:count])
        expected = expected if HALF in now else now
        assert text == expected


def test_the_prompt_may_end_with_any_part_of_a_character(kind):
    """The answer has the rest of it, and all of the character is the answer's text."""
    ids = encode(kind, "你的热😀情朋友")
    for first in range(1, len(ids)):
        known = [decode(kind, [], ids[:end]) for end in range(first + 1)]
        begun = max((text for text in known if HALF not in text), key=len)
        rest = decode(kind, [], ids).removeprefix(begun)
        assert finals_of(kind, ids[:first], ids[first:]) == {rest}


@pytest.mark.parametrize("decoder", [
    None, decoders.Metaspace(), decoders.WordPiece(), decoders.WordPiece(cleanup=False),
    decoders.Strip("▁", 1, 0)], ids=str)
def test_words_are_joined_as_their_tokenizer_joins_them(decoder):
    """The first word may look different if the prompt has no text: here it has one word
    and special tokens. Words may contain U+FFFD, or what means a byte elsewhere.
    """
    words = ["<s>", "▁", "▁ab", "##b", "d", "'s", "▁▁Ã", "▁" + HALF]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<s>"))
    raw.decoder = decoder
    ours = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")
    for first, *answer in product(range(len(words)), repeat=4):
        prompt = [first, *[0] * 9]
        assert finals_of(ours, prompt, answer) == {decode(ours, prompt, answer)}


@pytest.mark.parametrize("decoder", [
    decoders.CTC("a", "b"), decoders.BPEDecoder("b")], ids=str)
def test_where_tokens_change_each_other_the_whole_answer_is_decoded(decoder):
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate("abcd")}, "a"))
    raw.decoder = decoder
    ours = PreTrainedTokenizerFast(tokenizer_object=raw)
    for answer in product(range(4), repeat=5):
        assert finals_of(ours, [2], [*answer]) == {ours.decode(answer)}


# -- Stop strings ----------------------------------------------------------------------


def first_stop(texts, stops, min_tokens):
    """The right text: cut at the first update after which it has a stop string that
    was not there after `min_tokens`. Of several, the one that ends first counts, or
    that is first in the list.
    """
    known = len(texts[:-1][: min_tokens][-1]) if min_tokens else 0
    found = [(at + len(stop), number, at) for number, stop in enumerate(stops)
             for at in range(len(texts[-1]))
             if texts[-1].startswith(stop, at) and at + len(stop) > known]
    for text in texts:
        hits = [hit for hit in found if hit[0] <= len(text)]
        if hits:
            return text[: min(hits)[2]]
    return texts[-1]


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_any_text_ends_before_its_first_stop_string(min_tokens, kind):
    """One that is complete before `min_tokens` never counts. What may become one is not
    shown.
    """
    rng, num_stopped = random.Random(2), 0
    for _ in range(300):
        prompt = encode(kind, random_text(rng, 6))
        answer = encode(kind, "".join(rng.choices("ab€ ", k=rng.randrange(1, 14))))
        stops = ["".join(rng.choices("ab€ ", k=rng.randrange(1, 5)))
                 for _ in range(rng.randrange(1, 4))]
        each = range(1, len(answer))
        expected = first_stop(
            free := texts_of(kind, prompt, answer, each), stops, min_tokens)
        shown = texts_of(kind, prompt, answer, each, stops, min_tokens)
        assert shown[-1] == expected
        assert all(b.startswith(a) for a, b in zip(shown, shown[1:], strict=False))
        num_stopped += expected != free[-1]
    assert 30 < num_stopped < 270


@pytest.mark.parametrize("mark", ["</w>", "_", "@@ "])
def test_no_stop_string_before_min_tokens_counts_where_words_are_merged(mark):
    words = ["a", "b", f"a{mark}", f"b{mark}", f"ab{mark}"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "a"))
    raw.decoder = decoders.BPEDecoder(mark)
    ours, rng = PreTrainedTokenizerFast(tokenizer_object=raw), random.Random(3)
    for min_tokens in [0, 3, 6] * 40:
        answer = rng.choices(range(5), k=12)
        free = texts_of(ours, [0], answer, range(1, 12))
        stops = ["".join(rng.choices("ab ", k=rng.randrange(1, 4))) for _ in range(2)]
        shown = texts_of(ours, [0], answer, range(1, 12), stops, min_tokens)
        assert shown[-1] == first_stop(free, stops, min_tokens)


@pytest.fixture(scope="session")
def script(tokenizer):
    """Distinct tokens, whose characters have one to four bytes, mostly split up."""
    return encode(tokenizer, "hé€u 😀nдblo.")


@pytest.mark.parametrize(("stop", "text"), [
    ("€u 😀n", "hé"), ("hé€u", ""), (".h", "hé€u 😀nдblo"), (["nд", "€"], "hé"),
    (["u 😀nдX", "nд"], "hé€u 😀"),  # begins earlier, but never ends
    (["€u", "é€u"], "hé"), (["é€u", "€u"], "h"),  # both end at once
    ("X", None)], ids=str)
def test_a_stop_string_ends_a_sequence_and_is_not_its_text(
        stop, text, script, tokenizer, make_scripted_model, engine):
    """Nor is any part of it streamed. The prompt does not count."""
    llm = engine(make_scripted_model(script))
    params = greedy(2 * len(script), stop=stop)
    answer = complete(llm, script[-2:], params)
    assert answer.text == ("hé€u 😀nдblo." * 2 if text is None else text)
    assert answer.finish_reason == ("length" if text is None else "stop")
    stops = [stop] if isinstance(stop, str) else stop
    assert (answer.stop_reason in stops) == (text is not None)
    # The tokens end with the one that completes the string.
    said = tokenizer.decode(answer.token_ids)
    before = tokenizer.decode(answer.token_ids[:-1])
    assert said.startswith(answer.text + (answer.stop_reason or ""))
    assert text is None or answer.stop_reason not in before

    *shown, last = llm.stream(script[-2:], params)
    assert (last.outputs[0].text, tokens_of(last)) == (answer.text, answer.token_ids)
    assert all(answer.text.startswith(output.outputs[0].text) for output in shown)


# -- In the engine ---------------------------------------------------------------------


def test_generate_and_stream_agree_to_the_letter(text_model, tokenizer, engine):
    """On arbitrary bytes, half characters at the end, stop strings, and several
    sequences; in a pool where they are preempted.
    """
    rng = random.Random(4)
    params = [SamplingParams(
        n=1 + seed % 2, temperature=1.5, max_tokens=rng.randrange(1, 60), seed=seed,
        ignore_eos=seed % 3 > 0, min_tokens=rng.choice([0, 0, 1]),
        stop=rng.choice([None, "e", ["q", "th"], HALF + HALF])) for seed in range(24)]
    prompts = [[4, 5, seed % 7] for seed in range(24)]
    llm = engine(text_model, num_blocks=34)
    whole = llm.generate(prompts, params, use_tqdm=False)
    streamed = defaultdict(list)
    for output in llm.stream(prompts, params):
        streamed[int(output.request_id) - 24].append(output)
    for index, output in enumerate(whole):
        *before, last = streamed[index]
        assert last.outputs == output.outputs
        for answer, *shown in zip(
                last.outputs, *(o.outputs for o in before), strict=True):
            texts = [a.text for a in shown] + [answer.text]
            assert all(map(str.startswith, texts[1:], texts))
            full = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            assert full == answer.text or answer.finish_reason == "stop"
    assert llm.stats().preemptions_recompute > 0
    reasons = [answer.finish_reason for output in whole for answer in output.outputs]
    assert min(reasons.count("stop"), reasons.count("length")) > 6


def test_tokens_that_the_tokenizer_does_not_know_have_no_text(
        make_model, edit_model, tokenizer, engine):
    """Vocabularies are padded. And nothing is cleaned up, which would depend on what
    follows.
    """
    path = edit_model(make_model("llama", seed=5, vocab_size=len(tokenizer) + 200))
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.save_pretrained(path)
    tokenizer.clean_up_tokenization_spaces = False
    params = SamplingParams(temperature=2.0, max_tokens=60, ignore_eos=True, seed=1)
    answer = complete(engine(path), [4, 5, len(tokenizer) + 3], params)
    assert sum(token >= len(tokenizer) for token in answer.token_ids) > 5
    assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert checkpoint.load_tokenizer(path).clean_up_tokenization_spaces is False


class Counting:
    """A tokenizer that notes which tokens it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, []
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens
        self.added_tokens_decoder = {}
        self.backend_tokenizer = tokenizer.backend_tokenizer

    def decode(self, ids, **options):
        self.decoded += ids
        return self.tokenizer.decode(ids, **options)


# -- Growth ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["<|end|>", "a", "Ã", "the"])
def test_a_token_is_decoded_once_and_no_tokenizer_is_kept(text, tokenizer):
    """Whether it has text or none (a special token, a byte of a character)."""
    token = tokenizer.convert_tokens_to_ids(text) or encode(tokenizer, text)[0]
    counting = Counting(tokenizer)
    texts_of(counting, [token], [token] * 800, range(1, 800), ["x" * 1000])
    assert counting.decoded == [token] * 3, "alone, and twice in a row"
    reference = weakref.ref(counting)
    del counting
    assert reference() is None
