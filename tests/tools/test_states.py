"""Families with a state beside the block table, or with K and V of two shapes: they get
the tokens of transformers, whatever happens to a sequence.

A state that is lost or exchanged gives plausible nonsense. So some tests break
transformers' modules on purpose, and the engine must notice at its start.
"""

import gc
import os
import pickle
import random
from functools import cache

import pytest
import torch
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

import families
from helpers import (
    CPU,
    add_all,
    check_invariants,
    counters,
    drain,
    draw_requests,
    greedy,
    message_of,
    serve,
)
from nanopaged import LLM, BeamSearchParams
from nanopaged.loading import start_up, states

NAMES = ["falcon_h1", "gemma4_text", "granitemoehybrid", "kimi_linear", "lfm2",
         "mamba2", "nemotron_h", "qwen3_5_text", "qwen3_next"]
SLOW_FAMILY = pytest.param("qwen3_next", marks=pytest.mark.slow)


def forbid_even(token_ids, logits):
    """A processor of logits: after an even token comes an odd one."""
    logits[:, :: 2] -= 1e9 * (token_ids[0, -1] % 2 == 0)
    return logits


def further(rng):
    return {"prompt_logprobs": rng.choice([None, 1]), "repetition_penalty": 1.1,
            "logits_processors": rng.choice([None, [forbid_even]])}


@pytest.fixture(scope="session")
def roomy():
    """`roomy(path)`: an engine that has room for all, made once."""
    @cache
    def make(path):
        return LLM(path, block_size=4, num_blocks=400, max_model_len=96,
                   attention_backend="torch", **CPU)

    return make


def compare(path, model, engine, roomy, seed, ahead=0, **options):
    """Serve all kinds of requests, and compare greedy answers and beams with those of
    transformers, and the others with those of an engine that has room for all.
    """
    drawn = list(draw_requests(seed, 6, vocab_size=160, most=3, stop=(), more=further))
    prompts = random.Random(seed).sample(families.prompts(), 3)
    search = BeamSearchParams(3, 8, ignore_eos=True)
    ours = [(prompt, greedy(12, n=3)) for prompt in prompts] + [(prompts[0], search)]
    llm = engine(path, **options)
    llm.engine.steps_ahead = ahead
    answers = serve(llm, ours + drawn)
    check_invariants(llm)
    for prompt, sequences in zip(prompts, answers, strict=False):
        assert len(sequences) == 3
        assert all(families.compare(model, prompt, tokens) for tokens, *_ in sequences)
    beams = model.generate(
        torch.tensor(prompts[:1]), num_beams=3, num_return_sequences=3, do_sample=False,
        max_new_tokens=8, early_stopping=False, eos_token_id=None)
    wanted = beams[:, len(prompts[0]):].tolist()
    assert [tokens for tokens, *_ in answers[len(prompts)]] == wanted
    assert answers[len(ours):] == serve(roomy(path), drawn)
    return counters(llm)


# -- The same tokens -------------------------------------------------------------------


# The random engines below have all families.
@pytest.mark.parametrize(("name", "mode"), [
    ("falcon_h1", "swap"), ("lfm2", "swap"), ("mamba2", "recompute"),
    ("qwen3_next", "swap"), *(pytest.param(name, "recompute", marks=pytest.mark.slow)
                              for name in ("gemma4_text", "kimi_linear"))])
def test_the_tokens_of_transformers_in_a_tight_pool(name, mode, family, engine, roomy):
    """Forks, beams, both preemptions, one step ahead, scored prompts, processors."""
    found = compare(*family(name), engine, roomy, seed=3, ahead=1, preemption_mode=mode,
                    num_blocks=44, max_num_batched_tokens=19)
    assert found[f"preemptions_{mode}"] > 0


@pytest.mark.upstream  # solutions/state_cache.patch lets them share
@pytest.mark.parametrize("name", sorted({*NAMES} - {"gemma4_text"}))
def test_a_prefix_is_of_no_use_without_the_state_after_it(name, family, engine):
    llm = engine(family(name)[0])
    for _ in range(3):
        serve(llm, [([*range(3, 24)], greedy(4))])
    assert counters(llm)["prefix_hit_tokens"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", 100))))
def test_the_tokens_of_transformers_in_random_engines(
        seed, family, engine, roomy):
    """Blocks of 1 to 16 tokens, chunks of 1 to 40, pools that hold few sequences."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8, 16])
    compare(*family(NAMES[seed % len(NAMES)]), engine, roomy, seed,
            ahead=rng.choice([0, 1]), block_size=block_size,
            num_blocks=rng.randrange(190, 300) // block_size + 9,
            max_num_batched_tokens=rng.randrange(1, 41),
            max_num_seqs=rng.randrange(3, 10),
            preemption_mode=rng.choice(["recompute", "swap"]),
            attention_backend=rng.choice(["torch", "numba"]))


# -- Memory ----------------------------------------------------------------------------


def test_the_memory_of_states_is_counted(family, engine, monkeypatch):
    """A sequence has its old state and its new one. What K and V get is the rest."""
    path, _ = family("qwen3_next")
    # Two layers, each with 4 heads of 16 x 16 floats, and 4 inputs of 128 numbers.
    size = 2 * 4 * (4 * 16 * 16 + 4 * 128)
    assert size == 12_288
    monkeypatch.setattr(start_up, "free_bytes", lambda runner: 10 * 2 * size + 2**14)
    options = {"num_blocks": None, "enable_prefix_caching": False}
    llm = engine(path, max_num_seqs=10, **options)
    assert llm.engine.runner.state_bytes == size
    # A block of 4 tokens: K and V of 2 heads of 16 floats, in one layer.
    assert llm.engine.block_manager.num_blocks == 2**14 // (4 * 2 * 2 * 16 * 4)
    message = message_of(lambda: engine(path, max_num_seqs=11, **options))
    assert message == ("max_num_seqs must be at most 10 (the states of a sequence take "
                       "0.02 MiB of 0.25 MiB), got 11")


def test_old_states_are_freed(family, engine):
    """After a step there is one state for each sequence, with tensors of its own."""
    llm = engine(family("lfm2")[0])
    add_all(llm, [[5, 6, 7], [8, 9]], greedy(8, n=2))
    for _ in range(3):
        llm.step()
    [found] = {type(layer) for group in llm.engine.scheduler.running.values()
               for seq in group.live for layer in seq.states[1].values()}
    gc.collect()
    layers = [each for each in gc.get_objects() if type(each) is found]
    tensors = [each.conv_states[0] for each in layers]
    tensors = [tensor for tensor in tensors if tensor is not None]
    assert len(tensors) == 4 * 2  # four sequences, two layers with a state
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in tensors)
    drain(llm)


def test_a_request_is_pickled_without_its_state(family, engine):
    llm = engine(family("lfm2")[0])
    add_all(llm, [[5, 6, 7]], greedy(8))
    llm.step()
    [group] = llm.engine.scheduler.running.values()
    copied = pickle.loads(pickle.dumps(group))
    assert group.live[0].states[1] and copied.live[0].states == (None, None)
    drain(llm)


# -- Broken on purpose -----------------------------------------------------------------


def exchange_decodes(patch):
    find_runs = states.find_runs
    patch.setattr(states, "find_runs", lambda metadata: [
        (entries[::-1], tokens) for entries, tokens in find_runs(metadata)])


def test_decodes_that_are_exchanged_are_found_at_the_start(
        family, engine, monkeypatch):
    path, _ = family("lfm2")
    exchange_decodes(monkeypatch)
    assert "must be a family that remembers" in message_of(lambda: engine(path))


def forget(kind, when, patch):
    """Transformers' own modules of this kind lose their state where `when` says so."""
    forward = kind.forward

    def forgetful(self, hidden_states, cache=None, **more):
        if cache is not None and when(hidden_states.shape[1]):
            cache.layers[self.layer_idx].has_previous_state = {0: False}
        return forward(self, hidden_states, cache=cache, **more)

    patch.setattr(kind, "forward", forgetful)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "kind", "sizes"), [
    ("lfm2", Lfm2ShortConv, (1, 16)), ("qwen3_next", Qwen3NextGatedDeltaNet, (16,)),
    pytest.param("qwen3_next", Qwen3NextGatedDeltaNet, (1,), marks=pytest.mark.slow)])
def test_a_family_that_loses_its_state_is_found_at_the_start(
        name, kind, sizes, dtype, family, engine, monkeypatch):
    """In decodes, or in chunks."""
    path, _ = family(name)
    for block_size in sizes:
        options = {"dtype": dtype, "block_size": block_size, "max_model_len": 32}
        engine(path, **options)
        for when in (lambda count: count == 1, lambda count: count > 1):
            with monkeypatch.context() as patch:
                forget(kind, when, patch)
                message = message_of(lambda more=options: engine(path, **more))
            assert "a family that remembers earlier tokens by" in message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [
    "mamba", pytest.param("jamba", marks=pytest.mark.slow)])
def test_chunks_of_mamba_1_are_computed_by_token(name, dtype, family, engine,
                                                 monkeypatch):
    """As transformers computes them, a chunk of several tokens starts without state."""
    path, _ = family(name)
    engine(path, dtype=dtype)
    make = states.Stateful.__init__

    def broken(self, *settings):
        make(self, *settings)
        self.by_token = False

    monkeypatch.setattr(states.Stateful, "__init__", broken)
    for block_size in (1, 16):
        message = message_of(lambda size=block_size: engine(
            path, dtype=dtype, block_size=size, max_model_len=32))
        assert "a family that remembers earlier tokens by" in message
