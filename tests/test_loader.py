"""From files to weights: checkpoints of every form, and the memory."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import (
    CPU,
    all_tokens_of,
    complete,
    drain,
    floats,
    generate,
    greedy,
    message_of,
    run_python,
)
from nanopaged import LLM, EngineConfig, SamplingParams
from nanopaged.loading.checkpoint import load_config, load_generation_config
from nanopaged.loading.weights import products

PROMPT = [5, 9, 44, 7, 12, 150]
TIED = {"tie_word_embeddings": True}
BIASES = {"attention_bias": True, "mlp_bias": True}


# -- Files of every form ---------------------------------------------------------------


def add_head_and_angles(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # Llama 2


def add_other_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)


def to_bfloat16(tensors):
    tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})


def to_float16_in_part(tensors):
    tensors.update({name: tensor.half() for name, tensor in tensors.items()
                    if "mlp" in name})


def compare_with(reference, path, llm):
    """A completion, its log-probabilities of all tokens, and those of transformers."""
    completion = complete(llm, PROMPT, greedy(4, logprobs=160))
    logits = reference.logits(path, PROMPT + completion.token_ids)
    found = torch.tensor([[entry[token] for token in range(160)]
                          for entry in map(floats, completion.logprobs)])
    return completion, found, logits.log_softmax(-1)[len(PROMPT) - 1 : -1]


@pytest.mark.parametrize(("family", "fields", "edit"), [
    ("llama", {"max_shard_size": "30KB"}, None),
    ("mistral", {"sliding_window": None, "max_shard_size": "30KB"}, None),
    ("qwen3", TIED, None), ("qwen3", TIED, add_head_and_angles), ("qwen2", {}, None),
    ("qwen2", TIED, add_other_head),
    ("llama", BIASES | TIED | {"max_shard_size": "30KB"}, None),
    ("qwen3", {"attention_bias": True}, to_bfloat16),
    ("qwen2", TIED, to_float16_in_part)],
    ids=lambda value: getattr(value, "__name__", str(value)))
def test_log_probabilities_are_those_of_transformers(
        family, fields, edit, make_model, edit_model, reference, engine, monkeypatch):
    if products:
        monkeypatch.setattr(products, "pack", print)  # weights can be seen
    path = make_model(family, seed=31, **fields)
    path = edit_model(path, weights=edit) if edit else path
    num_files = len(list(path.glob("*.safetensors")))
    assert (num_files > 5) == ("max_shard_size" in fields)
    llm = engine(path)
    completion, found, expected = compare_with(reference, path, llm)
    assert (found - expected).abs().max() < 1e-4
    total = found.gather(1, torch.tensor(completion.token_ids)[:, None]).sum().item()
    assert completion.cumulative_logprob == pytest.approx(total)
    silent = complete(llm, PROMPT, greedy(4))
    assert silent.token_ids == completion.token_ids
    assert silent.logprobs is silent.cumulative_logprob is None
    model, is_tied = llm.engine.runner.model, TIED.items() <= fields.items()
    is_one = model.lm_head.weight is model.model.embed_tokens.weight
    assert is_one == (is_tied and edit is not add_other_head)


@pytest.mark.parametrize("fields", [{}, {"max_shard_size": "30KB"}], ids=str)
def test_files_beside_the_checkpoint_are_not_read(
        fields, make_model, edit_model, reference, engine):
    path, other = (make_model("llama", seed=seed, **fields) for seed in (31, 32))
    expected, path = reference.generate(path, PROMPT, 8), edit_model(path)
    for file in other.glob("*.safetensors"):
        old = file.name.replace("model", "model_old")
        (path / old).write_bytes(file.read_bytes())
    assert complete(engine(path), PROMPT, greedy(8)).token_ids == expected


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:6b\nsize 173\n"
LAYERS = b"""{
    "model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["linear_attention"]}
"""
FIX = "(repair it or download it again): "


@pytest.mark.parametrize(("name", "content", "message"), [
    ("model.safetensors", None, "cannot read {path}/{name} " + FIX),  # it is cut short
    ("model.safetensors", LFS, "cannot read {path}/{name} " + FIX),
    ("tokenizer.json", b"{}", "cannot read the tokenizer of {path} " + FIX),
    ("generation_config.json", b'{"top_p": 2}', "cannot read {name} of {path} " + FIX),
    ("generation_config.json", b"[]", "cannot read {name} of {path} " + FIX),
    ("generation_config.json", b"", "cannot read {name} of {path} " + FIX),
    ("config.json", b'{"model_type": "llama", "hidden_size": "64"}',
     "cannot read {name} of {path} " + FIX + "Validation error for field 'hidden_size'"
     ": TypeError: Field 'hidden_size' expected int, got str (value: '64')"),
    ("config.json", LAYERS, "layer_types in {name} must be one of (None, 'full_atten")])
def test_an_error_in_a_file_is_one_sentence_that_names_it(
        name, content, message, llama, edit_model):
    file = edit_model(llama) / name
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    # (A wrong default is an error for those who want it.)
    found = message_of(
        lambda: LLM(file.parent, **CPU).generate([[5]], use_tqdm=False))
    assert message.format(name=name, path=file.parent) in found and "\n" not in found


@pytest.mark.parametrize(("change", "message"), [
    (lambda path, others: path.unlink(), "cannot read {path} " + FIX),
    (lambda path, others: path.write_bytes(LFS), "cannot read {path} " + FIX),
    (lambda path, others: shutil.copy(others[-1], path), "missing ['model.layers.0"),
    (lambda path, others: path.with_name("model.safetensors.index.json").unlink(),
     "must be in one of ('model.safetensors',")],
    ids=["missing", "Git LFS", "copied", "no index"])
def test_a_wrong_shard_is_named(change, message, make_model, edit_model):
    path = edit_model(make_model("llama", seed=31, max_shard_size="30KB"))
    _, shard, *others = sorted(path.glob("model-*"))
    change(shard, others)
    assert message.format(path=shard) in message_of(lambda: LLM(path, **CPU))


@pytest.mark.parametrize("dtype", ["int8", "bool", "float8_e4m3fn"])
def test_weights_that_are_no_floats_are_refused(dtype, llama, edit_model):
    name = "model.layers.0.mlp.up_proj.weight"
    path = edit_model(llama, weights=lambda tensors: tensors.update(
        {name: tensors[name].to(getattr(torch, dtype))}))
    message = message_of(lambda: LLM(path, **CPU))
    assert f"{name} must be a dense tensor of floating-point numbers" in message


# -- Memory ----------------------------------------------------------------------------

PEAK = """
import re, sys, torch
from nanopaged import LLM

def measured(*arguments, **options):
    status = open("/proc/self/status").read()
    sizes.append(int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]) * 1024)
    return copy(*arguments, **options)

sizes, copy, torch.Tensor.copy_ = [], torch.Tensor.copy_, measured
llm = LLM(sys.argv[1], dtype="float32", device="cpu", attention_backend="torch",
          num_blocks=8, max_num_seqs=4, max_num_batched_tokens=64)
print(max(sizes) - sizes[0])
"""


@pytest.mark.slow
def test_loading_takes_the_memory_of_the_model_and_of_one_tensor(make_model, tmp_path):
    """Pages of the file, which the system can drop, do not count."""
    path = make_model("llama", vocab_size=24_000, hidden_size=1024, head_dim=64,
                      num_attention_heads=16, num_key_value_heads=4,
                      intermediate_size=4096, num_hidden_layers=2,
                      max_position_embeddings=128)
    (file,) = path.glob("*.safetensors")
    model, largest = file.stat().st_size, 24_000 * 1024 * 4
    assert 290e6 < model < 330e6
    used = int(run_python("-c", PEAK, str(path), cwd=tmp_path, OMP_NUM_THREADS="1"))
    print(f"{used / 1e6:.0f} MB for {model / 1e6:.0f} MB")
    assert 0.9 * model < used < model + largest + 60e6


# -- What is there without a checkpoint, or beside it ----------------------------------


def test_random_weights_depend_on_the_seed_alone(llama, tmp_path, monkeypatch):
    if products:
        monkeypatch.setattr(products, "pack", print)  # weights can be seen
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())

    def weights(seed):
        options = {"load_format": "dummy", "seed": seed, "device": "cpu"}
        with LLM(tmp_path, dtype="float32", num_blocks=8, **options) as llm:
            assert len(complete(llm, PROMPT, greedy(4)).token_ids) == 4
            return dict(llm.engine.runner.model.named_parameters())

    first, again, other = weights(1), weights(1), weights(2)
    for name, weight in first.items():
        assert torch.equal(weight, again[name]) and not torch.equal(weight, other[name])
        mean = 1 if name.endswith("norm.weight") else 0
        assert abs(weight.mean() - mean) < 0.01 and 0.014 < weight.std() < 0.026


@pytest.mark.parametrize(("fields", "eos_ids", "params"), [
    (None, [3], {}), ({}, [3], {}), ({"eos_token_id": 9}, [9], {}),
    ({"eos_token_id": [4, 5, 160, 6]}, [4, 5, 6], {}),  # there is no token 160
    ({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, [3],
     {"temperature": 0.7, "top_p": 0.8, "top_k": 20}),
    ({"temperature": 0, "top_p": 0.5, "top_k": -1}, [3],
     {"temperature": 0, "top_p": 0.5}),
    ({"do_sample": True, "repetition_penalty": 1.0, "pad_token_id": 5}, [3], {}),
    ({"repetition_penalty": 1.1}, [3], {"repetition_penalty": 1.1}),
    ({"max_new_tokens": 99, "length_penalty": 1.1}, [3], {"max_tokens": 99})], ids=str)
def test_the_generation_config_names_eos_tokens_and_defaults(
        fields, eos_ids, params, llama, edit_model):
    path = edit_model(llama)
    (path / "generation_config.json").unlink()
    if fields is not None:
        (path / "generation_config.json").write_text(json.dumps(fields))
    found_ids, found = load_generation_config(load_config(EngineConfig(path)))
    assert (found_ids, SamplingParams(**found)) == (eos_ids, SamplingParams(**params))
    if eos_ids == [3]:  # as in config.json
        path = edit_model(path, lambda config: config.update(eos_token_id=None))
        assert load_generation_config(load_config(EngineConfig(path)))[0] == []


# -- Weights that change ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_weights_are_those_of_a_checkpoint_with_them(
        dtype, variant, engine, tmp_path):
    """And the old ones are those of the first one; the prefix cache is emptied."""
    prompt, tensors = [*range(2, 25)], {}
    for path in variant.path.glob("*.safetensors"):
        tensors |= load_file(path)
    changed = {name: tensor if "norm" in name else tensor.flip(0).contiguous()
               for name, tensor in tensors.items()}
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for file in variant.path.glob("*config.json"):
        shutil.copy(file, tmp_path)
    llm, fresh = engine(variant.path, dtype=dtype), engine(tmp_path, dtype=dtype)
    before = generate(llm, [prompt], greedy(6))
    llm.load_weights(changed.items())
    after = llm.generate([prompt], greedy(6), use_tqdm=False)[0]
    assert after.num_cached_tokens == 0
    assert generate(fresh, [prompt], greedy(6)) == [all_tokens_of(after)] != before
    llm.load_weights(tensors.items())
    assert generate(llm, [prompt], greedy(6)) == before


def test_wrong_weights_change_nothing(llama, engine):
    llm, prompt = engine(llama), [5, 6, 7]
    expected = generate(llm, [prompt], greedy(8))
    tensors = load_file(llama / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    other = {key: -tensor for key, tensor in tensors.items()}
    for wrong, words in (({"model.up": tensors[name]}, "model.up"),
                         ({name: tensors[name].T}, "the shape of model.layers.0.mlp")):
        weights = (other | wrong).items()
        assert words in message_of(lambda weights=weights: llm.load_weights(weights))
    assert "missing" in message_of(lambda: llm.load_weights([(name, other[name])]))
    for _ in range(2):
        assert llm.reset_prefix_cache()
        assert generate(llm, [prompt], greedy(8)) == expected
    stream = llm.stream([prompt], greedy(8))
    next(stream)
    stream.close()  # it is aborted, although no step has seen that yet
    assert llm.reset_prefix_cache() and llm.stats().blocks_cached == 0
    llm.add_request(prompt, greedy(2))
    assert not llm.reset_prefix_cache()
    assert "unfinished" in message_of(lambda: llm.load_weights(other.items()))
    drain(llm)
