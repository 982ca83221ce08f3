"""Exercise: how likely was the prompt? Compared with transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanopaged import LLM, SamplingParams
from nanopaged.loader import BUNDLED

PROMPT = "First Citizen:\nWe are accounted poor citizens"
ASKED = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=True)
ENGINE = {"device": "cpu", "dtype": "float32", "attention_backend": "torch"}


@pytest.fixture(scope="module")
def llm():
    with LLM(block_size=4, num_blocks=64, **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm):
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    ids = torch.tensor([llm.tokenizer(PROMPT).input_ids])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()


def check(outputs, expected):
    for output in outputs:
        first, *others = output.prompt_logprobs
        assert first is None
        assert others == pytest.approx(expected, abs=1e-3)


def test_they_are_transformers(llm, expected):
    check(llm.generate(PROMPT, ASKED, use_tqdm=False), expected)


def test_a_prompt_that_is_cached_has_them_too(llm, expected):
    for _ in range(2):
        check(llm.generate([PROMPT] * 2, ASKED, use_tqdm=False), expected)


@pytest.mark.parametrize("budget", [2, 3, 8, 25])
def test_they_do_not_depend_on_the_chunks(budget, expected):
    options = {"max_num_seqs": 2, "max_num_batched_tokens": budget} | ENGINE
    with LLM(block_size=4, num_blocks=64, **options) as llm:
        check(llm.generate([PROMPT, PROMPT], ASKED, use_tqdm=False), expected)


def test_several_answers_have_one_prompt(llm, expected):
    params = SamplingParams(n=3, max_tokens=3, seed=1, prompt_logprobs=True)
    check(llm.generate(PROMPT, params, use_tqdm=False), expected)


def test_answers_are_the_same_and_who_does_not_ask_gets_none(llm):
    plain = SamplingParams(temperature=0, max_tokens=2)
    asked, other = llm.generate([PROMPT] * 2, [ASKED, plain], use_tqdm=False)
    assert asked.outputs[0].token_ids == other.outputs[0].token_ids
    assert asked.prompt_logprobs is not None and other.prompt_logprobs is None
