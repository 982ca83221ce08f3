"""Exercise: the answer is one of the given strings."""

import pytest

from nanopaged import LLM, SamplingParams

ENGINE = {"device": "cpu", "dtype": "float32", "attention_backend": "torch"}
# One is the beginning of another, and two begin with the same token.
CHOICE = ["yes", "no", "yes, sir", "nor do I"]


@pytest.fixture(scope="module")
def llm():
    with LLM(block_size=4, num_blocks=512, **ENGINE) as llm:
        yield llm


def answers(llm, prompt="ROMEO:\n", **params):
    params = SamplingParams(**{"choice": CHOICE, "seed": 3} | params)
    outputs = llm.generate(prompt, params, use_tqdm=False)
    return [answer for output in outputs for answer in output.outputs]


@pytest.mark.parametrize("text", CHOICE)
def test_a_single_choice_is_the_whole_answer(llm, text):
    answer = answers(llm, choice=[text], temperature=0)[0]
    assert (answer.text, answer.finish_reason) == (text, "stop")
    assert answer.token_ids == [*llm.tokenizer(text).input_ids, *llm.eos_token_ids]


def test_each_sequence_ends_with_a_choice_and_all_choices_occur(llm):
    drawn = answers(llm, n=60, temperature=1e3)
    assert {answer.text for answer in drawn} == set(CHOICE)
    assert {answer.finish_reason for answer in drawn} == {"stop"}


def test_others_in_the_batch_choose_freely(llm):
    params = [SamplingParams(temperature=0, choice=choice) for choice in (None, ["no"])]
    free, bound = llm.generate(["ROMEO:\n"] * 2, params, use_tqdm=False)
    assert free.outputs == answers(llm, choice=None, temperature=0)
    assert bound.outputs[0].text == "no"


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_it_survives_preemption(llm, mode, steps_ahead):
    params = {"prompt": ["ROMEO:\n", "JULIET:\n"] * 4, "n": 4, "temperature": 1e3,
              "max_tokens": 8}
    expected = answers(llm, **params)
    with LLM(block_size=2, num_blocks=28, preemption_mode=mode, **ENGINE) as small:
        small.engine.steps_ahead = steps_ahead
        assert answers(small, **params) == expected
        stats = small.stats()
    assert stats.preemptions_swap + stats.preemptions_recompute > 0


@pytest.mark.parametrize("wrong", [
    {"choice": []}, {"choice": ["yes", ""]}, {"max_tokens": 2}, {"min_tokens": 3},
    {"ignore_eos": True}])
def test_what_cannot_be_answered_is_refused(llm, wrong):
    with pytest.raises(ValueError):
        answers(llm, **wrong)


def test_it_needs_a_tokenizer(llm, monkeypatch):
    monkeypatch.setattr(llm, "tokenizer", None)
    with pytest.raises(ValueError, match="tokenizer"):
        answers(llm, prompt=[1, 2])
