"""Text from token ids, and stop strings.

Whatever tokens come, the text is the same whether it is streamed or not. It only grows,
and where the tokens make whole characters it is what the tokenizer says of all of them
at once. The tokenizers are of the kinds that models have: bytes of characters, and
words with marked spaces, of which the first may be cut off.
"""

import copy
import random
from collections import defaultdict

import pytest
from tokenizers import decoders

from helpers import HALF, add_all, complete, drain, greedy, tokens_of
from nanopaged import LLM, SamplingParams
from nanopaged.detokenizer import Detokenizer

CHARACTERS = "ab  stheé€你的热情😀\u0301\n"


@pytest.fixture(params=["bytes", "first space cut", "spaces kept", "bundled"])
def kind(request, tokenizer, sentencepiece_tokenizer):
    """One of several kinds of tokenizers."""
    if request.param == "bundled":
        with LLM(num_blocks=64, device="cpu") as llm:
            return llm.tokenizer
    if request.param == "spaces kept":
        kept = copy.deepcopy(sentencepiece_tokenizer)
        kept.backend_tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        return kept
    return tokenizer if request.param == "bytes" else sentencepiece_tokenizer


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def decode(tokenizer, prompt, answer):
    """The text of the answer, from the text of all tokens."""
    begin, whole = (tokenizer.decode(ids, skip_special_tokens=True)
                    for ids in (prompt, prompt + answer))
    return whole[len(begin) :]


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
    detokenizer, shown = Detokenizer(tokenizer, prompt, stops), []
    for end in [*ends, len(answer)]:
        detokenizer.update(prompt + answer[:end], False, end > min_tokens)
        shown.append(detokenizer.visible(detokenizer.stopped_by is not None))
    detokenizer.update(prompt + answer, True, len(answer) > min_tokens)
    return [*shown, detokenizer.visible(True)]


def finals_of(tokenizer, prompt, answer):
    """The text at the end, streamed and not."""
    each = range(1, len(answer))
    return {texts_of(tokenizer, prompt, answer, ends)[-1] for ends in ([], each)}


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
    assert len(set(shown)) < len(answer), "no character of several tokens"


def test_tokens_without_text_change_nothing_however_many_there_are(kind):
    """Special ones, for example, that come after the end with `ignore_eos`."""
    text = encode(kind, "the block")
    for count in range(40):
        answer = text + [kind.eos_token_id] * count + encode(kind, "é block")
        assert finals_of(kind, text, answer) == {decode(kind, text, answer)}


def test_the_prompt_may_end_with_any_part_of_a_character(kind):
    """A tokenizer of bytes turns a run of them that is no text into U+FFFD, so whatever
    begins within a character is spoilt.
    """
    ids = encode(kind, "你的热情朋友")
    text = decode(kind, [], ids)
    for first in range(1, len(ids)):
        begun = max((decode(kind, [], ids[:end]) for end in range(first + 1)),
                    key=lambda known: len(known.rstrip(HALF)) * (HALF not in known))
        (final,) = finals_of(kind, ids[:first], ids[first:])
        # Later, the character that the prompt has begun may be there or not.
        assert final in (text[len(begun) :], text[len(begun) + (first > 3) :])


# -- Stop strings ----------------------------------------------------------------------


def first_stop(texts, stops, min_tokens):
    """The right text: cut at the first update after which it has a stop string that
    was not there after `min_tokens`.
    """
    known = len(texts[:-1][: min_tokens][-1]) if min_tokens else 0
    found = [(at, at + len(stop)) for stop in stops for at in range(len(texts[-1]))
             if texts[-1].startswith(stop, at) and at + len(stop) > known]
    for text in texts:
        hits = [at for at, end in found if end <= len(text)]
        if hits:
            return text[: min(hits)]
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


@pytest.fixture(scope="session")
def script(tokenizer):
    """Distinct tokens, whose characters have one to four bytes, mostly split up."""
    tokens = encode(tokenizer, "hé€u 😀nдblo.")
    assert len(tokens) > 14
    return tokens


@pytest.mark.parametrize(("stop", "text"), [
    ("€u 😀n", "hé"), ("hé€u", ""), (".h", "hé€u 😀nдblo"), (["nд", "€"], "hé"),
    (["u 😀nдX", "nд"], "hé€u 😀"),  # begins earlier, but never ends
    (["€u", "é€u"], "h"),  # both end at once
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
    """On arbitrary bytes, half characters at the end, stop strings, several sequences,
    and in a pool where they are preempted.
    """
    rng, results = random.Random(4), []
    params = [SamplingParams(
        n=1 + seed % 2, temperature=1.5, max_tokens=rng.randrange(1, 60), seed=seed,
        ignore_eos=seed % 3 > 0, min_tokens=rng.choice([0, 0, 1]),
        stop=rng.choice([None, "e", ["q", "th"], HALF + HALF])) for seed in range(40)]
    prompts = [[4, 5, seed % 7] for seed in range(40)]
    for num_blocks in (300, 34):
        llm = engine(text_model, num_blocks=num_blocks)
        whole = llm.generate(prompts, params, use_tqdm=False)
        streamed = defaultdict(list)
        for output in llm.stream(prompts, params):
            streamed[int(output.request_id) - 40].append(output)
        for index, output in enumerate(whole):
            *before, last = streamed[index]
            assert last.outputs == output.outputs
            for answer, *shown in zip(
                    last.outputs, *(o.outputs for o in before), strict=True):
                texts = [a.text for a in shown] + [answer.text]
                assert all(map(str.startswith, texts[1:], texts))
                full = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
                assert full.startswith(answer.text)
                assert full == answer.text or answer.finish_reason == "stop"
        results.append([output.outputs for output in whole])
    assert results[0] == results[1] and llm.stats().preemptions_recompute > 0
    reasons = [a.finish_reason for outputs in results[0] for a in outputs]
    assert min(reasons.count("stop"), reasons.count("length")) > 10
    assert sum(a.text.endswith(HALF) for outputs in results[0] for a in outputs) > 3


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
    llm = engine(path)
    answer = complete(llm, [4, 5, len(tokenizer) + 3], params)
    assert sum(token >= len(tokenizer) for token in answer.token_ids) > 5
    assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert llm.tokenizer.clean_up_tokenization_spaces is False


class Broken:
    """A tokenizer that fails at one token."""

    def __init__(self, tokenizer, token):
        self.tokenizer, self.token = tokenizer, token

    def decode(self, ids, **options):
        if self.token in ids:
            raise ZeroDivisionError
        return self.tokenizer.decode(ids, **options)


@pytest.mark.parametrize("stop", [None, "zz"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_tokenizer_that_fails_ends_no_request(
        stop, place, script, tokenizer, make_scripted_model, engine):
    """Others have the text that they would have, and the bad one has its tokens."""
    llm = engine(make_scripted_model(script))
    llm.tokenizer = Broken(tokenizer, script[5])
    prompts = [encode(tokenizer, character) for character in "nh"]
    params = [greedy(3), greedy(4)]
    prompts.insert(place, script[1:2])  # its fourth token is script[5]
    params.insert(place, greedy(20, stop=stop))
    requests = add_all(llm, prompts, params)
    last = drain(llm)
    for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        first, answer = script.index(*prompt) + 1, last[requests[index]].outputs[0]
        expected = (script * 3)[first : first + param.max_tokens]
        assert (answer.token_ids, answer.finish_reason) == (expected, "length")
        assert index == place or answer.text == tokenizer.decode(expected)


# -- Growth ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["<|end|>", "a", "Ã", "the"])
@pytest.mark.parametrize("stops", [[], ["x" * 1000]], ids=["free", "stop"])
def test_the_work_of_a_stream_grows_with_its_tokens(text, stops, tokenizer):
    """Whether they have text or none (a special token, a byte of a character)."""
    token = tokenizer.convert_tokens_to_ids(text) or encode(tokenizer, text)[0]
    work = []
    for count in (200, 800):
        counting = Counting(tokenizer)
        texts_of(counting, [token], [token] * count, range(1, count), stops)
        work.append(counting.work)
    assert work[1] < 5 * work[0] < 5 * 200 * 400


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.work = tokenizer, 0

    def decode(self, ids, **options):
        self.work += len(ids)
        return self.tokenizer.decode(ids, **options)


def test_a_whole_text_is_decoded_at_once(tokenizer):
    """Which takes less time than token by token: nobody has asked for its parts."""
    counting = Counting(tokenizer)
    answer = encode(tokenizer, "the block table of é") * 40
    texts_of(counting, answer[:9], answer, [])
    assert counting.work < 6 * len(answer)
