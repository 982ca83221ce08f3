"""Bad input raises an error that says what is wrong, and changes nothing.

Each case names the words its message must contain: the field, tensor or file, and the
offending value.
"""

import json
import math
from collections import UserDict
from functools import partial

import pytest
import torch

import helpers
from helpers import complete, counters, drain, tokens_of
from nanopaged import LLM, BeamSearchParams, SamplingParams

greedy = partial(helpers.greedy, max_tokens=12)

NAN = math.nan
INF = math.inf

# SamplingParams: field, value, more fields
PARAMS = [
    ("n", 0),
    ("n", -3),
    ("n", 1.5),
    ("n", True),
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", INF),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_p", NAN),
    ("top_p", "most"),
    ("top_k", -2),
    ("top_k", 2.5),
    ("top_k", True),
    ("top_k", 2**63),
    ("min_p", -0.25),
    ("min_p", 1.25),
    ("min_p", NAN),
    ("max_tokens", 0),
    ("max_tokens", -7),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", 17),  # more than max_tokens
    ("min_tokens", 2.5),
    ("min_tokens", 2**63),
    ("min_tokens", True),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", 5),
    ("stop", ["a", 3]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", 5),
    ("stop_token_ids", "abc"),
    ("ignore_eos", "yes"),
    ("ignore_eos", 1),
    ("seed", 1.5),
    ("seed", True),
    ("seed", "lucky"),
    ("logprobs", -2),
    ("logprobs", 2.5),
    ("logprobs", True),
    ("cache_salt", 5),
]

# LLM: option, value
OPTIONS = [
    ("block_size", 0),
    ("block_size", -16),
    ("block_size", 24),
    ("block_size", 16.0),
    ("block_size", True),
    ("block_size", "16"),
    ("num_blocks", 0),
    ("num_blocks", -4),
    ("num_blocks", 2.5),
    ("num_blocks", 10**30),
    ("swap_space", 1e300),
    ("max_num_seqs", 10**30),
    ("num_blocks", True),
    ("max_model_len", 0),
    ("max_model_len", -5),
    ("max_model_len", 1.5),
    ("max_model_len", True),
    ("max_model_len", 257),  # the model has 256 positions
    ("max_num_seqs", 0),
    ("max_num_seqs", 2.5),
    ("max_num_seqs", True),
    ("max_num_batched_tokens", 0),
    ("max_num_batched_tokens", 255),  # max_num_seqs is 256
    ("max_num_batched_tokens", True),
    ("gpu_memory_utilization", 0.0),
    ("gpu_memory_utilization", 1.5),
    ("gpu_memory_utilization", NAN),
    ("gpu_memory_utilization", "all"),
    ("swap_space", -1),
    ("swap_space", NAN),
    ("swap_space", "4GB"),
    ("enable_prefix_caching", "no"),
    ("enable_prefix_caching", 1),
    ("preemption_mode", "drop"),
    ("attention_backend", "magic"),
    ("attention_backend", None),
    ("dtype", "float7"),
    ("dtype", "int8"),
    ("device", "tpu"),
    ("enforce_eager", "yes"),
    ("tensor_parallel_size", 0),
    ("tensor_parallel_size", 1.5),
    ("tensor_parallel_size", True),
    ("load_format", "magic"),
    ("seed", 1.5),
    ("seed", "lucky"),
]

# BeamSearchParams: field, value
BEAMS = [
    ("beam_width", 0),
    ("beam_width", 2.0),
    ("beam_width", True),
    ("max_tokens", 0),
    ("max_tokens", None),
    ("length_penalty", NAN),
    ("length_penalty", 1e9),  # a length to that power overflows
    ("length_penalty", "long"),
    ("early_stopping", "never"),
    ("ignore_eos", 1),
]

# prompts for 160 tokens and max_model_len 96: name, prompt, words of the message
PROMPTS = [
    ("empty list", [], ["prompt", "token"]),
    ("empty ids in a dict", {"prompt_token_ids": []}, ["prompt", "token"]),
    ("negative id", [5, -1, 7], ["-1"]),
    ("id of the vocabulary size", [5, 160], ["160"]),
    ("huge id", [5, 2**70], [str(2**70)]),
    ("float id", [5, 6.0], ["6.0"]),
    ("nan id", [NAN], ["nan"]),
    ("bool id", [5, True], ["True"]),
    ("none id", [5, None], ["None"]),
    ("str id", [5, "six"], ["six"]),
    ("nested ids", [5, [6]], ["[6]"]),
    ("negative id in a dict", {"prompt_token_ids": [-9]}, ["-9"]),
    ("ids are a str", {"prompt_token_ids": "abc"}, ["prompt", "abc"]),
    ("ids are an int", {"prompt_token_ids": 12}, ["prompt", "12"]),
    ("text is an int", {"prompt": 5}, ["prompt"]),
    ("unknown key", {"text": "x"}, ["text"]),
    ("no key", {}, ["prompt"]),
    ("no dict, more keys", UserDict(prompt="hello", mask=[1]), ["prompt", "mask"]),
    ("a key too many", {"prompt_token_ids": [5], "text": "hello"}, ["prompt", "text"]),
    ("none", None, ["None"]),
    ("bytes", b"abc", ["prompt", "abc"]),
    ("text without a tokenizer", "hello", ["tokenizer"]),
    ("longer than max_model_len", [7] * 97, ["97", "max_model_len", "96"]),
    ("much longer", [7] * 5000, ["5000", "max_model_len", "96"]),
]


def overwrite(path, name, content):
    (path / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def change_shape(name, shape):
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def index_with(path, files):
    """Replace a checkpoint's only file by an index: `files` maps tensors to files."""
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    overwrite(path, "model.safetensors.index.json", json.dumps(index))


def truncate(path):
    content = (path / "model.safetensors").read_bytes()
    overwrite(path, "model.safetensors", content[: len(content) * 2 // 3])


def absent_shard(path):
    index_with(path, {"model.norm.weight": "model-00007-of-00009.safetensors"})
    (path / "model.safetensors").unlink()


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
Q_BIAS = "model.layers.0.self_attn.q_proj.bias"
EXTRA = "model.layers.2.mlp.up_proj.weight"

# name: edits to a good directory (config, weights, files), words of the message
DIRECTORIES = {
    "unsupported architecture": (
        {
            "config": lambda c: c.update(
                architectures=["FalconForCausalLM"], model_type="falcon"
            )
        },
        ["falcon"],
    ),
    "no architecture": (
        {"config": lambda c: (c.pop("architectures"), c.pop("model_type"))},
        ["config.json"],
    ),
    "unknown rope type": (
        {
            "config": lambda c: c.update(
                rope_parameters={
                    "rope_type": "wobbly",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                }
            )
        },
        ["wobbly"],
    ),
    "unknown rope type in the old form": (
        {
            "config": lambda c: (
                c.pop("rope_parameters", None),
                c.update(
                    rope_theta=1e4, rope_scaling={"type": "wobbly", "factor": 2.0}
                ),
            )
        },
        ["wobbly"],
    ),
    "unknown activation": ({"config": lambda c: c.update(hidden_act="wavy")}, ["wavy"]),
    "missing tensor": ({"weights": lambda t: t.pop(K_PROJ)}, [K_PROJ]),
    "missing head": (
        {"weights": lambda t: t.pop("lm_head.weight")},
        ["lm_head.weight"],
    ),
    "missing embedding": (
        {"weights": lambda t: t.pop("model.embed_tokens.weight")},
        ["model.embed_tokens.weight"],
    ),
    "missing norm": (
        {"weights": lambda t: t.pop("model.norm.weight")},
        ["model.norm.weight"],
    ),
    "unused bias": ({"weights": change_shape(Q_BIAS, 64)}, [Q_BIAS]),
    "unused layer": ({"weights": change_shape(EXTRA, (136, 64))}, [EXTRA]),
    "unknown tensor": ({"weights": change_shape("surprise", 3)}, ["surprise"]),
    "wrong shape of a matrix": (
        {"weights": change_shape(K_PROJ, (33, 64))},
        [K_PROJ, "33"],
    ),
    "transposed matrix": (
        {"weights": change_shape(K_PROJ, (64, 32))},
        [K_PROJ, "64", "32"],
    ),
    "wrong shape of a norm": (
        {"weights": change_shape("model.norm.weight", 63)},
        ["model.norm.weight", "63"],
    ),
    "wrong shape of the embedding": (
        {"weights": change_shape("model.embed_tokens.weight", (159, 64))},
        ["model.embed_tokens.weight", "159"],
    ),
    "one number for a vector": (  # it would broadcast
        {"weights": change_shape("model.norm.weight", 1)},
        ["model.norm.weight", "1"],
    ),
    "truncated file": ({"files": truncate}, ["model.safetensors"]),
    "empty file": (
        {"files": lambda p: overwrite(p, "model.safetensors", b"")},
        ["model.safetensors"],
    ),
    "not safetensors at all": (
        {"files": lambda p: overwrite(p, "model.safetensors", b"pickle" * 100)},
        ["model.safetensors"],
    ),
    "index naming an absent file": (
        {"files": absent_shard},
        ["model-00007-of-00009.safetensors"],
    ),
    "no weights": (
        {"files": lambda p: (p / "model.safetensors").unlink()},
        ["safetensors"],
    ),
    "no config": ({"files": lambda p: (p / "config.json").unlink()}, ["config.json"]),
    "config is not JSON": (
        {"files": lambda p: overwrite(p, "config.json", '{"architectures": [')},
        ["config.json"],
    ),
}


def name_case(case):
    return f"{case[0]}={case[1]}"


def assert_rejected(call, words, kinds=(ValueError, TypeError)):
    """The call raises one of `kinds`, and its message contains all the words."""
    with pytest.raises(kinds) as caught:
        call()
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"
    return caught.value


def shown(value):
    """How a value appears in a message: a list by its bad item."""
    if isinstance(value, list):
        return shown(value[-1])
    return str(value)


@pytest.fixture(scope="session")
def good(llama, reference, draw_prompts):
    """Good prompts and the tokens they must produce."""
    prompts = draw_prompts(llama, [6, 11, 17], 12, seed=77)
    return prompts, [reference.generate(llama, prompt, 12) for prompt in prompts]


@pytest.fixture
def busy(llama, engine, good):
    """An engine with two requests running; no rejected call may affect them."""
    prompts, expected = good
    llm = engine(llama, max_num_seqs=8, max_num_batched_tokens=16)
    ids = [llm.add_request(prompt, greedy()) for prompt in prompts[:2]]
    last = {i: None for i in ids}
    for _ in range(3):
        last |= {output.request_id: output for output in llm.step()}
    before = counters(llm)

    assert before["blocks_used"] > 0

    yield llm

    assert counters(llm) == before, "a rejected request left a trace"
    last |= {request: outputs[-1] for request, outputs in drain(llm).items()}
    assert set(last) == set(ids)
    for request, tokens in zip(ids, expected[:2], strict=True):
        assert tokens_of(last[request]) == tokens

    after = llm.generate(prompts, greedy(), use_tqdm=False)
    assert [tokens_of(output) for output in after] == expected


def test_there_are_at_least_forty_kinds_of_bad_input():
    assert len(PARAMS) + len(OPTIONS) + len(PROMPTS) + len(DIRECTORIES) >= 40
    for table in (PARAMS, OPTIONS, BEAMS):
        assert len({name_case(case) for case in table}) == len(table)
    assert len({name for name, *_ in PROMPTS}) == len(PROMPTS)


# --- sampling parameters ---


@pytest.mark.parametrize("case", PARAMS, ids=name_case)
def test_bad_sampling_params_are_rejected(case):
    field, bad = case
    assert_rejected(lambda: SamplingParams(**{field: bad}), [field, shown(bad)])


def test_an_unknown_sampling_param_is_a_type_error():
    assert_rejected(lambda: SamplingParams(temprature=0.5), ["temprature"], TypeError)


@pytest.mark.parametrize("case", BEAMS, ids=name_case)
def test_bad_beam_search_params_are_rejected(case):
    field, bad = case
    params = {"beam_width": 2, "max_tokens": 4, field: bad}
    assert_rejected(lambda: BeamSearchParams(**params), [field, shown(bad)])


def test_a_group_that_can_never_run_is_rejected(busy, good):
    prompt = good[0][0]
    assert busy.config.max_num_seqs == 8
    assert_rejected(lambda: busy.add_request(prompt, greedy(n=9)), ["n", "8", "9"])
    assert_rejected(
        lambda: busy.beam_search(prompt, BeamSearchParams(9, 4)), ["beam_width", "9"]
    )
    assert_rejected(
        lambda: busy.beam_search(prompt, greedy(n=2)), ["BeamSearchParams"], TypeError
    )
    assert_rejected(
        lambda: busy.beam_search(prompt, None), ["BeamSearchParams"], TypeError
    )


def test_a_group_larger_than_the_pool_is_rejected(llama, engine, good):
    llm = engine(llama, num_blocks=16, block_size=8, max_model_len=128)
    prompt = good[0][0]  # 6 tokens
    assert llm.add_request(prompt, greedy(n=4, max_tokens=26))  # 4 blocks each

    words = ["17 sequences", "17 blocks", "num_blocks is 16", "lower n", "max_tokens"]
    assert_rejected(
        lambda: llm.add_request(prompt[:1], greedy(n=17, max_tokens=7)), words
    )

    while llm.has_unfinished_requests():
        llm.step()
    assert llm.stats().blocks_used == 0


# --- engine options ---


@pytest.mark.parametrize("case", OPTIONS, ids=name_case)
def test_bad_engine_options_are_rejected(case, llama):
    option, bad = case
    options = {"dtype": "float32", "device": "cpu", "num_blocks": 64, option: bad}
    assert_rejected(lambda: LLM(str(llama), **options), [option, shown(bad)])


def test_an_unknown_engine_option_is_a_type_error(llama):
    assert_rejected(lambda: LLM(str(llama), blocksize=16), ["blocksize"], TypeError)


def test_a_pool_too_small_for_max_model_len_is_rejected(llama):
    options = {
        "dtype": "float32",
        "device": "cpu",
        "block_size": 16,
        "max_model_len": 64,
    }
    assert_rejected(
        lambda: LLM(str(llama), num_blocks=3, **options),
        ["num_blocks", "max_model_len", "3", "64"],
    )
    LLM(str(llama), num_blocks=4, **options).shutdown()


def test_max_model_len_defaults_to_what_fits_the_pool(llama, engine):
    llm = engine(llama, block_size=16, num_blocks=3, max_model_len=None)
    assert_rejected(lambda: llm.add_request([7] * 49, greedy()), ["49", "48"])
    llm.generate([[7] * 30], greedy(max_tokens=18), use_tqdm=False)


def test_fewer_batched_tokens_than_sequences_are_rejected(llama):
    assert_rejected(
        lambda: LLM(
            str(llama), num_blocks=64, max_num_seqs=9, max_num_batched_tokens=8
        ),
        ["max_num_batched_tokens", "max_num_seqs", "8", "9"],
    )


@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_a_gpu_backend_on_the_cpu_is_rejected(llama, backend, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    options = {"dtype": "float32", "device": "cpu", "num_blocks": 64}
    assert_rejected(
        lambda: LLM(str(llama), attention_backend=backend, **options),
        [backend],
        (ValueError, ImportError),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_rejected(llama):
    assert_rejected(
        lambda: LLM(str(llama), device="cuda", num_blocks=64), ["device", "cuda"]
    )


# --- model directories ---


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_bad_model_directory_is_rejected(name, llama, edit_model):
    edits, words = DIRECTORIES[name]
    path = edit_model(llama, config=edits.get("config"), weights=edits.get("weights"))
    edits.get("files", lambda _: None)(path)
    options = {"dtype": "float32", "device": "cpu", "num_blocks": 64}
    kinds = (ValueError, TypeError, FileNotFoundError)
    assert_rejected(lambda: LLM(str(path), **options), words, kinds)


def test_a_truncated_shard_is_named(make_model, edit_model):
    path = edit_model(make_model("llama", seed=12, max_shard_size="60KB"))
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) >= 3
    shards[1].write_bytes(shards[1].read_bytes()[:-100])
    assert_rejected(
        lambda: LLM(str(path), dtype="float32", device="cpu", num_blocks=64),
        [shards[1].name],
    )


def test_a_tensor_in_another_shard_than_indexed_is_found_or_named(
    make_model, edit_model
):
    """A tensor that the index promises and its shard lacks is a missing tensor."""
    path = edit_model(make_model("llama", seed=12, max_shard_size="60KB"))
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    shards = sorted(set(index["weight_map"].values()))
    moved = next(
        name for name, shard in index["weight_map"].items() if shard == shards[0]
    )
    index["weight_map"][moved] = shards[1]
    file.write_text(json.dumps(index))

    try:
        llm = LLM(str(path), dtype="float32", device="cpu", num_blocks=64)
    except ValueError as error:
        assert moved in str(error)
    else:
        llm.shutdown()


@pytest.mark.parametrize(
    "model", ["/no/such/directory", "./nor/this/one", "nobody/no-such-model"]
)
def test_a_model_that_does_not_exist_is_rejected(model):
    kinds = (ValueError, FileNotFoundError)
    assert_rejected(lambda: LLM(model, dtype="float32", device="cpu"), [model], kinds)


@pytest.mark.parametrize("model", [5, ["a"], True], ids=str)
def test_a_model_that_is_not_a_name_is_rejected(model):
    assert_rejected(
        lambda: LLM(model, dtype="float32", device="cpu"), ["model", str(model)]
    )


# --- requests ---


@pytest.mark.parametrize(
    ("prompt", "words"), [p[1:] for p in PROMPTS], ids=[p[0] for p in PROMPTS]
)
def test_a_bad_prompt_is_rejected_and_leaves_no_trace(prompt, words, busy):
    assert_rejected(lambda: busy.add_request(prompt, greedy()), words)


@pytest.mark.parametrize(
    ("prompt", "words"), [p[1:] for p in PROMPTS], ids=[p[0] for p in PROMPTS]
)
def test_one_bad_prompt_rejects_the_whole_call(prompt, words, busy):
    batch = [[1, 2, 3], prompt, [4, 5]]
    assert_rejected(lambda: busy.generate(batch, greedy(), use_tqdm=False), words)
    assert_rejected(lambda: list(busy.stream(batch, greedy())), words)


@pytest.mark.parametrize("prompts", [5, None, b"abc", {"text": "abc"}], ids=str)
def test_what_is_no_prompt_is_rejected(prompts, busy):
    words = ["prompt", "text" if isinstance(prompts, dict) else str(prompts)]
    assert_rejected(lambda: busy.generate(prompts, greedy(), use_tqdm=False), words)
    assert_rejected(lambda: busy.stream(prompts, greedy()), words)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_different_number_of_params_than_prompts_is_rejected(count, busy):
    prompts = [[1, 2], [3, 4]]
    params = [greedy()] * count
    assert_rejected(
        lambda: busy.generate(prompts, params, use_tqdm=False), ["2", str(count)]
    )
    assert_rejected(lambda: list(busy.stream(prompts, params)), ["2", str(count)])


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, "greedy", 3, [None], {}, "", 0], ids=repr
)
def test_params_of_the_wrong_type_are_rejected(params, busy):
    words = ["SamplingParams"]
    assert_rejected(lambda: busy.generate([[1, 2]], params, use_tqdm=False), words)
    assert_rejected(lambda: busy.add_request([1, 2], params), words)


def test_more_logprobs_than_the_vocabulary_are_rejected(busy):
    assert_rejected(
        lambda: busy.add_request([1, 2], greedy(logprobs=161)), ["logprobs", "161"]
    )


@pytest.mark.parametrize("min_tokens", [0, 4])
def test_a_stop_token_beyond_the_vocabulary_does_no_harm(
    min_tokens, llama, good, engine
):
    """Rejected, or without effect, even where min_tokens would have to suppress it."""
    prompts, expected = good
    llm = engine(llama)

    params = greedy(stop_token_ids=[10**6], min_tokens=min_tokens)
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    except ValueError as error:
        assert "stop_token_ids" in str(error) and "1000000" in str(error)
        outputs = llm.generate(prompts, greedy(), use_tqdm=False)

    assert [tokens_of(output) for output in outputs] == expected


def test_an_unknown_argument_of_generate_is_a_type_error(busy):
    assert_rejected(
        lambda: busy.generate([[1]], smapling_params=greedy()), ["smapling"], TypeError
    )


@pytest.mark.parametrize(
    "prompt",
    [{"prompt_token_ids": "the block"}, {"prompt": [4, 5]}],
    ids=["ids", "text"],
)
def test_text_is_not_accepted_as_ids_nor_ids_as_text(prompt, text_model, engine):
    """Although the model has a tokenizer and could make something of either."""
    llm = engine(text_model)
    before = counters(llm)
    with pytest.raises((ValueError, TypeError), match="prompt"):
        llm.add_request(prompt, greedy())
    assert counters(llm) == before


@pytest.mark.parametrize(
    "messages", ["hello", 5, [5]], ids=["str", "int", "list of int"]
)
def test_bad_messages_are_rejected(messages, text_model, engine):
    llm = engine(text_model)
    before = counters(llm)
    with pytest.raises((ValueError, TypeError)):
        llm.chat(messages, greedy())
    assert counters(llm) == before
    assert not llm.has_unfinished_requests()


@pytest.mark.parametrize("request_id", ["never-seen", 10**9, None])
def test_aborting_an_unknown_request_changes_nothing(request_id, busy):
    """Silently, as in vLLM, or with an error that names it."""
    try:
        busy.abort_request(request_id)
    except (ValueError, KeyError, TypeError) as error:
        assert str(request_id) in str(error)


@pytest.mark.parametrize("length", [94, 95, 96])
def test_a_prompt_that_nearly_fills_max_model_len(
    length, llama, engine, reference, draw_prompts
):
    """If it is not rejected, its tokens are right and end in time."""
    prompt = draw_prompts(llama, [length], 3, seed=5)[0]
    llm = engine(llama, num_blocks=24)
    try:
        output = complete(llm, prompt, greedy(max_tokens=50))
    except ValueError as error:
        assert length >= 95 or "50" in str(error)
        assert "max_model_len" in str(error) and "96" in str(error)
    else:
        tokens = list(output.token_ids)
        assert 1 <= len(tokens) <= 97 - length
        assert tokens == reference.generate(llama, prompt, len(tokens))
        assert output.finish_reason == "length"


def test_after_shutdown_the_error_says_so(llama):
    llm = LLM(str(llama), dtype="float32", device="cpu", num_blocks=64)
    llm.shutdown()
    llm.shutdown()  # the second time does nothing
    with pytest.raises((RuntimeError, ValueError), match="(?i)shut"):
        llm.generate([[1, 2]], greedy(), use_tqdm=False)
