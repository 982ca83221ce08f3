"""Exercise: a bias for some tokens."""

from dataclasses import replace

import pytest

from nanopaged import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm():
    with LLM(device="cpu", dtype="float32", attention_backend="torch") as llm:
        yield llm


def tokens(llm, **params):
    defaults = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    params = SamplingParams(**defaults | params)
    output = llm.generate("ROMEO:\n", params, use_tqdm=False)[0]
    return output.outputs[0].token_ids


def test_a_large_negative_bias_forbids_a_token(llm):
    first = tokens(llm)[0]
    assert first not in tokens(llm, logit_bias={first: -1000.0})


def test_a_large_positive_bias_forces_a_token(llm):
    assert tokens(llm, logit_bias={7: 1000.0}) == [7] * 12


def test_it_also_works_when_tokens_are_drawn(llm):
    drawn = tokens(llm, temperature=1.0, seed=3, logit_bias={7: 1000.0})
    assert drawn == [7] * 12


def test_a_bias_of_zero_changes_nothing(llm):
    assert tokens(llm, logit_bias={7: 0.0}) == tokens(llm, logit_bias={}) == tokens(llm)


def test_each_request_of_a_batch_has_its_own(llm):
    forced = SamplingParams(temperature=0, max_tokens=4, logit_bias={7: 1000.0})
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = llm.generate(["ROMEO:\n"] * 3, [plain, forced, plain], use_tqdm=False)
    answers = [output.outputs[0].token_ids for output in outputs]
    assert answers == [tokens(llm)[:4], [7] * 4, tokens(llm)[:4]]


def test_log_probabilities_are_still_those_of_the_raw_logits(llm):
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    plain = llm.generate("ROMEO:\n", params, use_tqdm=False)[0].outputs[0]
    params = replace(params, logit_bias={plain.token_ids[0]: 5.0})
    biased = llm.generate("ROMEO:\n", params, use_tqdm=False)[0].outputs[0]
    assert biased.logprobs == plain.logprobs


def test_a_token_that_does_not_exist_is_refused(llm):
    with pytest.raises(ValueError, match="logit_bias"):
        tokens(llm, logit_bias={10**6: 1.0})
