"""Exercise: a penalty for repetition, compared with transformers'."""

import pytest
import torch
from transformers import AutoModelForCausalLM, RepetitionPenaltyLogitsProcessor

from nanopaged import LLM, SamplingParams
from nanopaged.loader import BUNDLED

PROMPTS = ["ROMEO:\n", "First Citizen:\nWe are"]
ENGINE = {"device": "cpu", "dtype": "float32", "attention_backend": "torch"}


def tokens(prompts=PROMPTS, num_blocks=64, runs_ahead=False, **params):
    defaults = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    params = SamplingParams(**defaults | params)
    with LLM(block_size=4, num_blocks=num_blocks, **ENGINE) as llm:
        llm.runs_ahead = runs_ahead
        outputs = llm.generate(prompts, params, use_tqdm=False)
        was_preempted = llm.stats().preemptions_recompute > 0
    assert was_preempted == (num_blocks < 64)
    return [answer.token_ids for output in outputs for answer in output.outputs]


@pytest.fixture(scope="module")
def expected():
    """What transformers' model gives, token by token, with transformers' penalty."""
    with LLM(**ENGINE) as llm:
        prompts = [llm.tokenizer(prompt).input_ids for prompt in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    penalise = RepetitionPenaltyLogitsProcessor(1.3)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(20):
            with torch.no_grad():
                logits = model(ids).logits[:, -1]
            ids = torch.cat((ids, penalise(ids, logits).argmax(-1, keepdim=True)), 1)
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


def test_it_is_transformers_rule(expected):
    assert tokens(repetition_penalty=1.3) == expected


def test_it_changes_the_answers_and_a_penalty_of_1_does_not(expected):
    assert tokens(repetition_penalty=1.0) == tokens() != expected


def test_it_survives_preemption(expected):
    assert tokens(repetition_penalty=1.3, num_blocks=12) == expected


def test_it_knows_the_last_token_when_the_engine_runs_ahead(expected):
    assert tokens(repetition_penalty=1.3, runs_ahead=True) == expected


def num_repeated(answers):
    return sum(len(answer) - len(set(answer)) for answer in answers)


def test_each_sequence_of_a_request_has_its_own_tokens():
    """With a very high penalty, hardly any token comes twice."""
    params = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 60}
    plain = tokens(PROMPTS[:1], **params)
    answers = tokens(PROMPTS[:1], repetition_penalty=1e6, **params)
    assert len({tuple(answer) for answer in answers}) == 3
    assert 4 * num_repeated(answers) < num_repeated(plain)


def test_a_penalty_that_is_no_positive_number_is_refused():
    with pytest.raises(ValueError, match="repetition_penalty"):
        SamplingParams(repetition_penalty=0.0)
