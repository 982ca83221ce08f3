"""Decoders of transformers with our attention put in: its tokens, or a refusal.

families.py makes tiny models of all families, and compares tokens. What is wrong with a
family must not show in its answers, but in an error when the engine starts.
"""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import families
from helpers import complete, counters, draw_requests, greedy, message_of, serve
from nanopaged.loading.any_decoder import AnyDecoder
from nanopaged.loading.weights import load_model
from nanopaged.ranks import Ranks
from tools.cpus import EACH_CPU

# One of each kind: layers without positions, MLA, windows, learned positions, sinks,
# scales of its own, a mixture of experts, K and V of two shapes. The sweep has all.
QUICK = ["cohere2", "deepseek_v3", "gemma3_text", "gemma4_text", "gpt2", "gpt_oss",
         "granite", "mixtral"]
# A GPU's kernels take long in the interpreter.
ON_GPU = {"num_hidden_layers": 2, "num_key_value_heads": 1, "num_attention_heads": 2,
          "layer_types": ["sliding_attention", "full_attention"]}


# -- The same tokens -------------------------------------------------------------------


@pytest.mark.parametrize("name", QUICK)
def test_a_family_gets_the_tokens_of_transformers(name):
    # (YaRN stretches the 128 positions of gpt_oss, and the pool holds 144 tokens.)
    longest = 144 if name == "gpt_oss" else 128
    assert families.try_family(name) == ("equal", f"up to {longest} tokens")


@pytest.mark.sweep
def test_all_families_get_their_tokens_or_a_refusal():
    outcomes = {name: families.try_family(name) for name in families.names()}
    kinds = [kind for kind, _ in outcomes.values()]
    assert kinds.count("equal") >= 112
    assert not {"wrong", "crashed"} & {*kinds}, outcomes


@pytest.mark.parametrize(("name", "mode"), [
    ("gemma3_text", "recompute"), ("gpt_oss", "swap"), ("deepseek_v3", "swap")])
def test_all_kinds_of_requests_get_the_same_answers_in_a_tight_pool(
    name, mode, family, engine
):
    """Several answers, beams and shared prefixes, one step ahead, far past a window."""
    path, _ = family(name)
    prefix = [5, 6, 7, 8, 9, 10, 11, 12]
    drawn = draw_requests(3, 10, vocab_size=160, most=3, stop=())
    requests = [(prefix * (i % 2) + prompt, params)
                for i, (prompt, params) in enumerate(drawn)]
    expected = serve(engine(path, num_blocks=400, enable_prefix_caching=False,
                            attention_backend="torch"), requests)
    llm = engine(path, num_blocks=40, max_num_batched_tokens=9, preemption_mode=mode)
    llm.engine.steps_ahead = 1
    assert serve(llm, requests) == expected
    assert counters(llm)[f"preemptions_{mode}"] > 0
    assert counters(llm)["prefix_hit_tokens"] > 0


def test_a_llama_that_our_own_decoder_lacks_is_computed_by_transformers(
    llama, make_model, engine, reference
):
    assert not isinstance(engine(llama).engine.runner.model, AnyDecoder)
    path = make_model("llama", seed=11, hidden_act="gelu")
    message = message_of(lambda: engine(path, model_impl="nanopaged"))
    assert "hidden_act in config.json must be one of ('silu',)" in message
    expected = reference.generate(path, [5, 6, 7], 20)
    assert complete(engine(path), [5, 6, 7], greedy(20)).token_ids == expected


@EACH_CPU
def test_sixteen_bits_on_a_cpu(cpu, family, engine):
    """Products are packed, or computed in float32 where that is faster."""
    path, _ = family("granite")
    llm = engine(path, dtype="bfloat16")
    assert len(set(complete(llm, [5, 6, 7], greedy(20)).token_ids)) > 3


def test_dummy_weights_need_no_checkpoint(family, engine, tmp_path):
    path, _ = family("qwen3_moe")
    shutil.copy(path / "config.json", tmp_path)
    answers = [complete(engine(tmp_path, load_format="dummy", seed=seed), [5, 6, 7],
                        greedy(8)).token_ids for seed in (0, 0, 1)]
    assert answers[0] == answers[1] != answers[2]


# -- CUDA graphs -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "fields", "waits"), [
    pytest.param("olmo3", {}, False, marks=pytest.mark.slow),
    ("gemma3n_text", {"activation_sparsity_pattern": [0.95, 0.0],
                      "intermediate_size": [96] * 2, "num_kv_shared_layers": 1,
                      "layer_types": ["full_attention"] * 2}, True)])
def test_a_family_runs_in_cuda_graphs_unless_its_host_waits(
        name, fields, waits, family, engine, caplog):
    """With windows, and with the K and V of another layer."""
    pytest.importorskip("triton", reason="pip install triton")
    from gpu.pretended import PretendedGpu

    path, _ = family(name, **ON_GPU | fields)
    options = {"max_num_seqs": 2, "max_model_len": 16, "max_num_batched_tokens": 8}
    requests = [([*range(5, 15)][:n], greedy(2 if waits else 6)) for n in (3, 10)]
    expected = serve(engine(path, **options), requests)
    with PretendedGpu() as gpu, caplog.at_level("WARNING", "nanopaged"):
        llm = engine(path, device="cuda", **options)
        assert serve(llm, requests) == expected
        assert (gpu.launches.count("graph") > 4) == (not waits)
    assert waits == ("wait for the GPU" in caplog.text)


# -- Refusals --------------------------------------------------------------------------


class LeakyLayer(torch.nn.Module):
    """Attends, and remembers the token before: across the sequences of a flat batch."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.attention_type = layer, "full_attention"

    def forward(self, states, **more):
        before = torch.nn.functional.pad(states, (0, 0, 1, 0))[:, :-1]
        return self.layer(states + before, **more)


class LeakyConfig(LlamaConfig):
    model_type = "leaky"


class LeakyForCausalLM(LlamaForCausalLM):
    config_class = LeakyConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.layers = torch.nn.ModuleList(map(LeakyLayer, self.model.layers))


def test_what_a_layer_remembers_in_another_way_is_found_at_the_start(
    engine, tmp_path
):
    AutoConfig.register("leaky", LeakyConfig, exist_ok=True)
    AutoModelForCausalLM.register(LeakyConfig, LeakyForCausalLM, exist_ok=True)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 160}
    torch.manual_seed(0)
    LeakyForCausalLM(LeakyConfig(**sizes)).save_pretrained(tmp_path)
    for dtype in ("float32", "bfloat16"):
        message = message_of(lambda dtype=dtype: engine(tmp_path, dtype=dtype))
        assert message.startswith("model_type in config.json must be a family that "
                                  "remembers earlier tokens by attention")
        assert "'leaky'" in message


@pytest.mark.parametrize(("name", "words"), [
    ("falcon", "lets attention be exchanged, got 'falcon'"),
    *[(name, f"a state in transformers' cache, and lets attention be exchanged, got "
       f"{name!r}") for name in ("rwkv", "xlstm", "recurrent_gemma", "minimax")],
    ("llama4_text", "chunked_attention"), ("qwen4_exp_text", "indexed_attention")])
def test_a_refusal_needs_no_weights(name, words, engine, tmp_path):
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    assert words in message_of(lambda: engine(tmp_path))


@pytest.mark.parametrize(("name", "words"), [
    ("gemma2", "'softcap'"), ("jetmoe", "must be (2, 16)"), ("bert", "'later keys'")])
def test_attention_that_ours_lacks_is_refused(name, words, family, engine):
    message = message_of(lambda: engine(family(name)[0]))
    assert words in message and f"got {name!r}" in message


def test_a_window_that_only_a_mask_knows_limits_the_length(family, engine):
    """Up to the size of a window, attention within it is full attention."""
    path, model = family("phimoe")
    llm = engine(path)
    assert llm.engine.max_model_len == 8
    tokens = complete(llm, [5, 6, 7], greedy(5)).token_ids
    assert families.compare(model, [5, 6, 7], tokens)
    assert "max_model_len" in message_of(lambda: complete(llm, [5] * 9, greedy(1)))


def test_what_only_our_own_decoder_can_do_says_so(family, engine, monkeypatch):
    path, model = family("granite")
    message = message_of(lambda: engine(path, model_impl="nanopaged"))
    assert "model_type in config.json must be one of ('llama'" in message
    llm = engine(path)
    message = message_of(lambda: llm.load_weights(model.state_dict().items()))
    assert message == ("model_impl must be 'nanopaged', on one rank, for load_weights, "
                       "got 'transformers'")
    backend = llm.engine.runner.backend
    message = message_of(lambda: load_model(
        llm.config, llm.model_config, backend, Ranks(size=2)))
    assert message == ("tensor_parallel_size must be 1 for modules of transformers, "
                       "got 2")


def test_the_table_is_what_the_sweep_found():
    """112 families and more; the reasons of the others are sentences."""
    table = json.loads(families.RESULTS.read_text())
    kinds = [kind for kind, _ in table.values()]
    assert kinds.count("equal") >= 112 and not {"wrong", "crashed"} & {*kinds}
    assert all(reason for _, reason in table.values())
