"""Exercise: the stop string stays in the text, and what comes after it does not."""

import pytest

from nanopaged import LLM, SamplingParams

PROMPT = "ROMEO:\n"


@pytest.fixture(scope="module")
def llm():
    with LLM(device="cpu", dtype="float32", attention_backend="torch") as llm:
        yield llm


def both(llm, **params):
    """The answers without and with their stop strings, of one batch."""
    params = {"temperature": 0, "max_tokens": 40, "ignore_eos": True} | params
    asked = [SamplingParams(include_stop_str_in_output=included, **params)
             for included in (False, True)]
    without, included = llm.generate([PROMPT] * 2, asked, use_tqdm=False)
    return list(zip(without.outputs, included.outputs, strict=True))


@pytest.fixture(scope="module")
def text(llm):
    return both(llm)[0][0].text


def test_the_text_goes_on_to_the_end_of_any_stop_string(llm, text):
    for length in (1, 2, 5):
        for at in range(4, 30, 3):
            stop = text[at : at + length]
            without, included = both(llm, stop=stop)[0]
            assert included.text == without.text + stop
            assert text.startswith(included.text)
            assert included.token_ids == without.token_ids
            assert (included.finish_reason, included.stop_reason) == ("stop", stop)


def test_of_several_the_one_that_is_complete_first_counts(llm, text):
    for at in range(4, 30):
        stops = [text[at : at + 4], text[at + 1 : at + 3], text[at + 2 : at + 3]]
        without, included = both(llm, stop=stops)[0]
        assert included.stop_reason == without.stop_reason
        assert included.text == without.text + without.stop_reason


def test_each_sequence_has_its_own_end(llm):
    pairs = both(llm, n=8, temperature=1.0, seed=3, stop=["e", "ou"])
    assert len({included.text for _, included in pairs}) > 4
    for without, included in pairs:
        assert included.text == without.text + (without.stop_reason or "")


def test_a_text_without_a_stop_string_is_as_before(llm, text):
    assert both(llm, stop="never this")[0][1].text == text


def test_a_stream_never_takes_anything_back(llm, text):
    stop = text[20:24]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop,
                            include_stop_str_in_output=True)
    texts = [output.outputs[0].text for output in llm.stream(PROMPT, params)]
    assert texts[-1].endswith(stop)
    assert all(new.startswith(old) for old, new in zip(texts, texts[1:], strict=False))
