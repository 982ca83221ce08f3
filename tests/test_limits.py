"""What people have reported of such engines, third collection: limits that leave no
token, weights that are half of each, settings of torch, files of a checkpoint.
"""

import gc
import itertools
import json
import math
import os
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
import transformers
from torch._subclasses import FakeTensorMode

from helpers import CPU, complete, greedy, message_of, tokens_of
from nanopaged import LLM, SamplingParams
from nanopaged.config import EngineConfig
from nanopaged.loading.checkpoint import load_config, load_generation_config

PROMPT = [5, 9, 44, 7]
NO_TOKEN = "logits must be finite for at least one token"


# -- Limits that leave nothing ---------------------------------------------------------


def force(value):
    """A processor that leaves token 7 alone, with this logit."""
    return lambda _, logits: torch.full_like(logits, -math.inf).index_fill_(
        1, torch.tensor([7]), value)


def raise_one(value):
    return lambda _, logits: logits.index_fill(1, torch.tensor([7]), value)


NOTHING_LEFT = {
    "bans": {"logit_bias": dict.fromkeys(range(160), -math.inf)},
    "min_tokens": {"min_tokens": 3, "stop_token_ids": list(range(160))},
    "both": {"min_tokens": 3, "stop_token_ids": list(range(80)),
             "logit_bias": dict.fromkeys(range(80, 160), -math.inf)},
    "one NaN": {"logits_processors": [raise_one(math.nan)]}}
FORCED = {
    "+inf alone": {"logits_processors": [force(math.inf)]},
    "3e38 alone": {"logits_processors": [force(3e38)]},
    "+inf": {"logits_processors": [raise_one(math.inf)]},
    "3e38": {"logits_processors": [raise_one(3e38)]},
    "a bias": {"logit_bias": {7: 1e30}, "repetition_penalty": 1e-6}}
DRAWS = [{"temperature": 0}, {"temperature": 0.5}, {"temperature": 1e-5, "top_k": 5},
         {"temperature": 1, "top_p": 0.5, "n": 2}]


@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_a_row_without_a_finite_logit_never_yields_a_token(draw, llama, engine):
    llm = engine(llama)
    for limits in NOTHING_LEFT.values():
        params = SamplingParams(**draw, **limits)
        assert NO_TOKEN in message_of(
            lambda params=params: complete(llm, PROMPT, params), ValueError)
    for limits in FORCED.values():
        params = SamplingParams(max_tokens=3, ignore_eos=True, **draw, **limits)
        assert complete(llm, PROMPT, params).token_ids == [7, 7, 7]


def test_a_processor_may_keep_its_logits_and_must_return_logits(llama, engine):
    kept, llm = [], engine(llama)

    def keep(_, logits):
        kept.append((logits, logits.clone()))
        return logits

    complete(llm, PROMPT, greedy(4, logits_processors=[keep], logit_bias={5: 3.0}))
    assert len(kept) == 4 and all(torch.equal(*pair) for pair in kept)
    for wrong in (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.int,
                  lambda logits: logits > 0):
        params = greedy(2, logits_processors=[lambda _, x, wrong=wrong: wrong(x)])
        assert "what logits_processors return must be [1, 160] logits" in message_of(
            lambda params=params: complete(llm, PROMPT, params), ValueError)


# -- Weights: the old ones, the new ones, or no answers --------------------------------


class Unreadable(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, kinds, args=(), kwargs=None):
        if function in (torch.Tensor.copy_, torch.cat):
            raise OSError("this tensor cannot be read")
        return super().__torch_function__(function, kinds, args, kwargs or {})


def freed(tensor):
    """As FSDP leaves a parameter whose parts it has given back."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def fake(tensor):
    with FakeTensorMode():
        return torch.empty(tensor.shape)


@pytest.fixture
def new_weights(llama):
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    return {name: 1.7 * tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_broke_off_answer_nothing_until_they_are_whole(
        dtype, llama, engine, new_weights):
    llm = engine(llama, dtype=dtype)
    old = complete(llm, PROMPT, greedy(6)).token_ids
    for name in (list(new_weights)[0], "model.norm.weight", "lm_head.weight"):
        broken = new_weights | {name: new_weights[name].as_subclass(Unreadable)}
        with pytest.raises(OSError, match="cannot be read"):
            llm.load_weights(broken.items())
        for call in (lambda: llm.generate([PROMPT]), lambda: llm.add_request(PROMPT)):
            assert message_of(call, RuntimeError).startswith("load_weights broke off")
    llm.load_weights(new_weights.items())
    new = complete(llm, PROMPT, greedy(6)).token_ids
    for name, wrong in itertools.product(("model.norm.weight", "lm_head.weight"), (
            freed, fake, torch.Tensor.to_sparse, torch.Tensor.bool,
            torch.Tensor.numpy)):
        with pytest.raises(TypeError, match=f"{name} must be a dense tensor"):
            llm.load_weights((new_weights | {name: wrong(new_weights[name])}).items())
        assert complete(llm, PROMPT, greedy(6)).token_ids == new != old


# -- The caller's torch ----------------------------------------------------------------


MODES = {"none": nullcontext, "inference": torch.inference_mode,
         "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
         "meta": lambda: torch.device("meta")}


@pytest.mark.parametrize("within", MODES)
def test_an_engine_may_be_made_run_and_changed_within_any_mode(
        within, llama, make_model, reference, new_weights):
    for path in (llama, make_model("olmo2")):
        expected = reference.generate(path, PROMPT, 6)
        with MODES[within](), LLM(path, **CPU) as llm:
            params = greedy(6, logprobs=1, prompt_logprobs=1)
            assert complete(llm, PROMPT, params).token_ids == expected
    with MODES[within]():
        llm = LLM(llama, **CPU)
    with llm:
        llm.load_weights(new_weights.items())
        changed = complete(llm, PROMPT, greedy(6)).token_ids
        with MODES[within]():
            llm.load_weights(new_weights.items())
        assert complete(llm, PROMPT, greedy(6)).token_ids == changed


def test_two_engines_in_two_threads_leave_the_callers_settings(llama):
    def settings():
        return (torch.get_num_threads(),
                torch.utils.deterministic.fill_uninitialized_memory)

    llms, seen = [LLM(llama, **CPU) for _ in range(2)], []
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    threads = [threading.Thread(target=llm.generate, args=([PROMPT] * 3, greedy(30)),
                                kwargs={"use_tqdm": False}) for llm in llms]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            torch.ones(9, 9) @ torch.ones(9, 9)
        new = threading.Thread(target=lambda: seen.append(settings()))
        new.start()
        new.join()
        assert settings() == seen[0] == (3, True)
    finally:
        torch.set_num_threads(num_threads)
        for llm in llms:
            llm.shutdown()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_answers_while_a_thread_of_its_parent_generates(llama, engine):
    llm, is_over, has_begun = engine(llama), threading.Event(), threading.Event()
    expected = complete(llm, PROMPT, greedy(6)).token_ids

    def keep_busy():
        while not is_over.is_set():
            for _ in llm.stream([PROMPT] * 2, greedy(20)):
                has_begun.set()

    thread = threading.Thread(target=keep_busy)
    thread.start()
    has_begun.wait(60)
    child = os.fork()
    if child == 0:
        try:
            os._exit(complete(llm, PROMPT, greedy(6)).token_ids != expected)
        finally:
            os._exit(2)
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("family", ["llama", "olmo2", "phi3"])
def test_shutdown_frees_the_weights_without_a_garbage_collector(family, make_model):
    llm = LLM(make_model(family), **CPU)
    complete(llm, PROMPT, greedy(2))
    weights = [weakref.ref(each) for each in llm.engine.runner.model.parameters()]
    gc.collect()
    gc.disable()
    try:
        llm.shutdown()
        assert not any(each() is not None for each in weights)
    finally:
        gc.enable()


# -- What files say --------------------------------------------------------------------


def test_an_adapter_is_refused_beside_a_model_too(llama, edit_model):
    path = edit_model(llama)
    (path / "adapter_config.json").write_text("{}")
    for _ in range(2):
        assert "not an adapter (peft's `merge_and_unload`" in message_of(
            lambda: load_config(EngineConfig(path)), ValueError)
        (path / "config.json").unlink(missing_ok=True)


def test_a_model_with_more_than_text_is_named(tmp_path):
    transformers.LlavaConfig(text_config=transformers.LlamaConfig()).save_pretrained(
        tmp_path)
    assert "got 'llava'" in message_of(
        lambda: load_config(EngineConfig(tmp_path)), ValueError)


def test_eos_of_the_outer_config_counts(tmp_path):
    transformers.Gemma3Config(eos_token_id=[9, 11]).save_pretrained(tmp_path)
    model_config = load_config(EngineConfig(tmp_path))
    assert load_generation_config(model_config)[0] == [9, 11]


def test_defaults_out_of_range_are_an_error_for_those_who_use_them(
        llama, edit_model, engine):
    path = edit_model(llama)
    (path / "generation_config.json").write_text(json.dumps({"top_p": 1.5}))
    llm = engine(path)
    assert len(complete(llm, PROMPT, greedy(3)).token_ids) == 3
    assert "top_p must be at most 1" in message_of(
        lambda: llm.generate([PROMPT]), ValueError)


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_a_file_that_changes_after_loading_changes_no_answer(
        family, make_model, edit_model, engine):
    path = edit_model(make_model(family))
    llm = engine(path)
    before = complete(llm, PROMPT, greedy(6)).token_ids
    for file in path.glob("*.safetensors"):
        with file.open("r+b") as opened:
            opened.write(bytes(file.stat().st_size))
    llm.reset_prefix_cache()
    assert tokens_of(llm.generate([PROMPT], greedy(6), use_tqdm=False)[0]) == before
