"""Whatever the caller passes wrongly raises one sentence that names the field, what it
must be, and what it was. Nothing has changed then.

`n must be at least 1, got 0` is such a sentence. Here are calls, as one would write
them, and the sentences that must answer them.
"""

import contextlib
from functools import partial
from inspect import signature

import pytest
import torch

import nanopaged
from helpers import (
    CPU,
    add_all,
    counters,
    drain,
    greedy,
    message_of,
    new_group,
    tokens_of,
)
from nanopaged import LLM, EngineConfig

with contextlib.suppress(ImportError):
    import nanopaged.gpu.kernels  # while Triton's interpreter is on

VALUE_ERRORS = {
    "SamplingParams(n=0)": "n must be at least 1, got 0",
    "SamplingParams(temperature=-0.1)": "temperature must be at least 0, got -0.1",
    "SamplingParams(temperature=inf)": "temperature must be at most 1e+30, got inf",
    "SamplingParams(top_p=0)": "top_p must be at least 1e-06, got 0",
    "SamplingParams(top_p=nan)": "top_p must be at least 1e-06, got nan",
    "SamplingParams(top_k=-2)": "top_k must be at least -1, got -2",
    "SamplingParams(max_tokens=0)": "max_tokens must be at least 1, got 0",
    "SamplingParams(min_tokens=17)": "min_tokens must be at most max_tokens=16, got 17",
    "SamplingParams(stop=['a', ''])": "stop must be free of empty strings, got ['a', '",
    "SamplingParams(logprobs=-2)": "logprobs must be at least 0, got -2",
    "SamplingParams(repetition_penalty=0)": "repetition_penalty must be at least ",
    "SamplingParams(presence_penalty=2.5)": "presence_penalty must be at most 2, got 2",
    "SamplingParams(logit_bias={7: nan})": "logit_bias must be numbers up to 1e30",
    "SamplingParams(logit_bias={7: 1e39})": "logit_bias must be numbers up to 1e30",
    "BeamSearchParams(0, 4)": "beam_width must be at least 1, got 0",
    "BeamSearchParams(2, 4, length_penalty=11)":
        "length_penalty must be at most 10, got 11",
    "start(block_size=24)": "block_size must be Literal[1, 2, 4, 8, 16, 32, 64, 128, ",
    "start(block_size=True)": "512, 1024], got True",
    "start(num_blocks=0)": "num_blocks must be at least 1, got 0",
    "start(max_model_len=1)": "max_model_len must be at least 2, got 1",
    "start(max_model_len=257)": "max_model_len must be at most 256 for this model, got",
    "start(dtype='int8')": "dtype must be Literal['auto', 'float32', 'float16', 'bfloa",
    "start(attention_backend='triton')": "'auto', or one of ['numba', 'torch'] with",
    "start(attention_backend='flash')": "dtype and packages, got 'flash'",
    "start(preemption_mode='drop')": "must be Literal['recompute', 'swap'], got 'drop'",
    "start(device='cuda')": "device must be 'cpu', because torch sees no GPU, got",
    "start(tensor_parallel_size=3)": "must be a divisor of num_attention_heads=4, got ",
    "start(tensor_parallel_size=2)": "must be 1, the number of processes (torch",
    "ask([])": "number of prompt tokens must be at least 1 and less than max_model_le",
    "ask([7] * 96)": "less than max_model_len=96, got 96",
    "ask([5, -1])": "token ids must be from 0 to 159, got [-1]",
    "ask([5, 2**70])": f"token ids must be from 0 to 159, got [{2**70}]",
    "ask([5], SamplingParams(logit_bias={160: 1}))": "must be from 0 to 159",
    "ask('text')": "model must be one with a tokenizer (needed for text, but not fo",
    "ask([5], greedy(stop='a'))": "model must be one with a tokenizer (needed for ",
    "ask([5], greedy(n=9))": "n (or beam_width) must be at most max_num_seqs=8, got 9",
    "ask([5], BeamSearchParams(9, 4))": "at most max_num_seqs=8, got 9",
    "ask([5], greedy(90, n=8))": "num_blocks must be at least 184 for this request (ra",
    "llm.generate([[5], [6]], [greedy()])": "sampling_params must be one object, or a ",
    "llm.stream([[5], [160]])": "token ids must be from 0 to 159, got [160]",
}
TYPE_ERRORS = {
    "SamplingParams(n=True)": "n must be int, got True",
    "SamplingParams(max_tokens=1.5)": "max_tokens must be int | None, got 1.5",
    "SamplingParams(stop=['a', 3])": "stop must be str | list[str] | None, got ['a', 3",
    "SamplingParams(stop_token_ids=5)": "stop_token_ids must be list[int] | None, got ",
    "SamplingParams(stop_token_ids=[True])": "stop_token_ids must be list[int] | None",
    "SamplingParams(logit_bias={'7': 1})": "logit_bias must be ",
    "SamplingParams(logits_processors=[3])": "logits_processors must be ",
    "SamplingParams(ignore_eos=1)": "ignore_eos must be bool, got 1",
    "SamplingParams(temprature=1)": "unexpected keyword argument 'temprature'",
    "BeamSearchParams(2, None)": "max_tokens must be int, got None",
    "start(blocksize=16)": "got an unexpected keyword argument 'blocksize'",
    "start(num_blocks='64')": "num_blocks must be int | None, got '64'",
    "LLM(5)": "model must be str | pathlib.Path | None, got 5",
    "ask(None)": "prompt must be a string or a list of token ids, got None",
    "ask({'prompt': [5], 'cache_salt': 5})": "cache_salt must be str | None, got 5",
    "ask([5], {'n': 2})": "sampling_params must be SamplingParams or BeamSearchParams,",
    "llm.abort_request(7)": "request_id must be a str, got 7",
}
CASES = [(call, kind, message) for kind, table in (
    (ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS))
    for call, message in table.items()]


@pytest.fixture(scope="session")
def work(llama, reference, draw_prompts):
    prompts = draw_prompts(llama, [6, 11], 16, seed=77)
    return prompts, [reference.generate(llama, prompt, 16) for prompt in prompts]


@pytest.mark.parametrize(("call", "kind", "message"), CASES, ids=[c[0] for c in CASES])
def test_a_wrong_call_says_what_is_wrong_and_changes_nothing(
        call, kind, message, llama, work, engine, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    llm = engine(llama, max_num_seqs=8)
    requests = add_all(llm, work[0], greedy())
    llm.step()
    before = counters(llm)
    names = {"llm": llm, "ask": llm.add_request, "start": partial(LLM, llama, **CPU),
             "LLM": LLM, "greedy": greedy, "nan": float("nan"), "inf": float("inf")}
    with pytest.raises(kind) as caught:
        eval(call, vars(nanopaged) | names)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert counters(llm) == before
    last = drain(llm)
    assert sorted(last) == sorted(requests), "the wrong call left something behind"
    assert [tokens_of(last[request]) for request in requests] == work[1]


def test_an_editor_shows_the_options_of_an_engine():
    assert str(signature(LLM)) == str(signature(EngineConfig))


def test_a_group_that_can_never_run_is_refused_without_a_front_end(llama, engine):
    """The bare engine would wait for it for ever."""
    bare = engine(llama, max_num_seqs=3).engine
    group = new_group([5, 6], greedy(4, n=4))
    assert message_of(lambda: bare.check_fits(group)) == (
        "n (or beam_width) must be at most max_num_seqs=3, got 4")


# -- Models ----------------------------------------------------------------------------

NORM, K_PROJ = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"
EXTRA = "model.layers.2.mlp.up_proj.weight"


def config(**fields):
    return {"config": lambda config: config.update(fields)}


def shape(name, *size):
    return {"weights": lambda tensors: tensors.update({name: torch.zeros(size)})}


@pytest.mark.parametrize(("edit", "message"), [
    (config(quantization_config={"quant_method": "fp8"}),
     "quantization_config in config.json must be one of (None,)"),
    (config(is_causal=False), "is_causal in config.json must be one of (None, True)"),
    (config(rope_parameters={"rope_type": "dynamic", "rope_theta": 9.0, "factor": 2.0}),
     "rope_type in config.json must be one of ('default', "),
    ({"weights": lambda tensors: [tensors.pop(name) for name in (NORM, K_PROJ)]},
     f"calls for, got 2 missing ['{K_PROJ}', '{NORM}'] and 0 left over []"),
    (shape(EXTRA, 136, 64), f"got 0 missing [] and 1 left over ['{EXTRA}']"),
    (shape(K_PROJ, 64, 32), "must be [32, 64], got [64, 32]"),
    (shape(NORM, 1), "must be [64], got [1]"),  # it would broadcast
    (shape(NORM, 64, 1), "must be [64], got [64, 1]"),
])
def test_a_model_that_cannot_be_served_is_refused(edit, message, llama, edit_model):
    with pytest.raises(ValueError) as caught:
        LLM(edit_model(llama, **edit), **CPU)
    assert message in str(caught.value)
