"""What people have reported of engines like this one, as small inputs.

Each kind of report is a table: what a caller passes as a prompt, where EOS tokens come
from, what a checkpoint says and what it holds, numbers in containers, what the prefix
cache keeps, ranks among ties. (What concerns a server: solutions/checks/server.py.)
"""

import json
import logging
from copy import deepcopy

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

from helpers import (
    Column,
    complete,
    first_tokens_of,
    greedy,
    message_of,
    new_group,
    sample_for,
    tokens_of,
)
from nanopaged import SamplingParams
from nanopaged.loading import checkpoint
from nanopaged.logits import report_logprobs

CHAT = [{"role": "user", "content": "the block"}]
TEXT = "the block table"


# -- What is passed as a prompt --------------------------------------------------------


# {name: (what is passed, with the tokenizer; how many prompts TEXT it is)}
PROMPTS = {
    "str": (lambda tok: TEXT, 1), "list of str": (lambda tok: [TEXT, TEXT], 2),
    "tuple of str": (lambda tok: (TEXT, TEXT), 2),
    "generator": (lambda tok: (TEXT for _ in range(3)), 3),
    "column": (lambda tok: Column([TEXT, TEXT]), 2),
    "array of str": (lambda tok: np.array([TEXT, TEXT]), 2),
    "ids": (lambda tok: tok.encode(TEXT), 1),
    "tuple of ids": (lambda tok: tuple(tok.encode(TEXT)), 1),
    "array of ids": (lambda tok: np.array(tok.encode(TEXT), np.int32), 1),
    "tensor of ids": (lambda tok: torch.tensor(tok.encode(TEXT)), 1),
    "list of numbers of numpy": (lambda tok: list(np.array(tok.encode(TEXT))), 1),
    "list of numbers of torch": (lambda tok: list(torch.tensor(tok.encode(TEXT))), 1),
    "two rows": (lambda tok: np.array([tok.encode(TEXT)] * 2), 2),
    "list of arrays": (lambda tok: [np.array(tok.encode(TEXT))] * 2, 2),
    "list of tensors": (lambda tok: [torch.tensor(tok.encode(TEXT))] * 2, 2),
    "dict": (lambda tok: {"prompt": TEXT}, 1),
    "dict with ids": (lambda tok: {"prompt_token_ids": tok.encode(TEXT)}, 1),
    "dict with a tensor": (
        lambda tok: {"prompt_token_ids": torch.tensor(tok.encode(TEXT))}, 1),
    "BatchEncoding": (lambda tok: tok(TEXT), 1),
    "BatchEncoding as a dict": (lambda tok: dict(tok(TEXT)), 1),
    "BatchEncoding of two": (lambda tok: tok([TEXT, TEXT]), 2),
    "BatchEncoding with tensors": (lambda tok: tok([TEXT] * 2, return_tensors="pt"), 2),
    "BatchEncoding of one row": (lambda tok: tok(TEXT, return_tensors="np"), 1),
    "padded": (lambda tok: {
        "input_ids": [[0, 0, *tok.encode(TEXT)], [*tok.encode(TEXT), 0, 0]],
        "attention_mask": [[0, 0] + [1] * len(tok.encode(TEXT)),
                           [1] * len(tok.encode(TEXT)) + [0, 0]]}, 2),
    "Encoding": (lambda tok: tok(TEXT).encodings[0], 1),
    "list of BatchEncodings": (lambda tok: [tok(TEXT)] * 2, 2),
    "list of Encodings": (lambda tok: [tok(TEXT).encodings[0]] * 2, 2),
    "mixed": (lambda tok: [TEXT, tok(TEXT), {"prompt": TEXT}, tok.encode(TEXT)], 4)}
WRONG_PROMPTS = {
    "None": (None, "a string, a list of token ids"), "number": (5, "a string, a list"),
    "bytes": (b"the block", "a string, a list of token ids"),
    "floats": ([1.0, 2.0], "a string or a list of token ids, got [1.0, 2.0]"),
    "bools": ([True], "a string or a list of token ids, got [True]"),
    "string among ids": ([1, "2"], "a string or a list of token ids"),
    "string as ids": ({"prompt_token_ids": "1 2"}, "prompt_token_ids must be a list"),
    "misspelt": ({"promt": "a"}, "a dict with names among"),
    "image": ({"prompt": "a", "multi_modal_data": {}}, "a dict with names among"),
    "nothing in a list": (["a", None], "prompts[1]: prompt must be a string, a list"),
    "two in one": (["a", ["b", "c"]], "prompts[1]: prompt must be one prompt"),
    "a mask of another length": (
        {"input_ids": [[1, 2, 3]], "attention_mask": [[1]]}, "of the same length"),
    "ids and a salt": ({"input_ids": [1], "cache_salt": "s"}, "input_ids without"),
    "bytearray": (bytearray(b"ab"), "a string, a list of token ids"),
    "set": ({1, 2}, "a string, a list of token ids"),
    "half a character": ("\ud800", "surrogates not allowed"),
    "too long": ([[5]] * 99 + [[5] * 200] + [[5]], "prompts[99]: number of prompt tok")}

# {a part of the message: chats}
WRONG_CHATS = {
    "messages must be a list of {'role'": ["hi", ["hi"], [{}], [{"content": "a"}],
                                           [[3]]],
    "content must be a string, or a list of text parts": [
        [{"role": "user", "content": content}]
        for content in ([{"type": "image_url", "image_url": {}}], 3, {"text": "a"})],
    "tool_calls must be a list of calls": [
        [{"role": "assistant", "content": "", "tool_calls": calls}]
        for calls in ([{"function": {"arguments": "{bad"}}], [{}], "x")]}


@pytest.fixture(scope="module")
def shared(text_model):
    """One engine for the tests that only ask it something."""
    from nanopaged import LLM

    with LLM(text_model, dtype="float32", device="cpu", block_size=4, num_blocks=128,
             max_model_len=96) as llm:
        yield llm


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_prompt_of_any_kind_is_answered_as_its_text_is(kind, shared, tokenizer):
    expected = complete(shared, TEXT, greedy(4)).token_ids
    make, count = PROMPTS[kind]
    outputs = shared.generate(make(tokenizer), greedy(4), use_tqdm=False)
    assert first_tokens_of(outputs) == [expected] * count
    assert all(output.prompt_token_ids == tokenizer.encode(TEXT) for output in outputs)


@pytest.mark.parametrize("kind", WRONG_PROMPTS)
def test_any_other_prompt_is_an_error_that_says_what_to_pass(kind, shared):
    prompts, words = WRONG_PROMPTS[kind]
    assert words in message_of(lambda: shared.generate(prompts, greedy(4)))
    assert not shared.has_unfinished_requests()


@pytest.mark.parametrize("options", [
    {}, {"return_dict": False}, {"return_tensors": "pt"}], ids=str)
def test_what_a_chat_template_returns_is_a_prompt(options, shared, tokenizer):
    encoding = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, **options)
    (output,) = shared.generate(encoding, greedy(4), use_tqdm=False)
    (chatted,) = shared.chat(CHAT, greedy(4), use_tqdm=False)
    assert tokens_of(output) == tokens_of(chatted)
    text = tokenizer.decode(output.prompt_token_ids)
    assert text.startswith("<|bos|><user>the block")


def test_the_parts_of_a_message_are_its_text(shared):
    parts = [{"type": "text", "text": "the block"}, {"type": "text", "text": "table"}]
    plain = [{"role": "user", "content": "the block\ntable"}]
    asked = [{"role": "user", "content": parts}]
    answers = [shared.chat(chat, greedy(4), use_tqdm=False)[0]
               for chat in (plain, asked)]
    assert answers[0].prompt_token_ids == answers[1].prompt_token_ids
    (from_generator,) = shared.chat(iter(plain), greedy(4), use_tqdm=False)
    assert from_generator.prompt_token_ids == answers[0].prompt_token_ids


@pytest.mark.parametrize("words", WRONG_CHATS)
def test_any_other_chat_is_an_error_that_names_what_is_wrong(words, shared):
    for chat in WRONG_CHATS[words]:
        assert words in message_of(lambda chat=chat: shared.chat(chat, greedy(4)))


def test_the_arguments_of_a_tool_call_may_be_json(shared, monkeypatch):
    seen = []
    monkeypatch.setattr(
        type(shared.tokenizer), "apply_chat_template",
        lambda _, chat, **options: seen.append(chat) or "a text")
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    chat = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    shared.chat(chat, greedy(2), use_tqdm=False)
    (message,) = seen[-1]
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": [1]}
    assert call["function"]["arguments"] == '{"x": [1]}', "the caller's was changed"


# -- One set of stop tokens ------------------------------------------------------------


def test_eos_of_the_tokenizer_ends_an_answer_too(
        make_scripted_model, tokenizer, engine, edit_model):
    end = tokenizer.eos_token_id
    path = make_scripted_model([40, 41, end, 42])
    path = edit_model(path, lambda config: config.update(eos_token_id=7))
    (path / "generation_config.json").write_text('{"eos_token_id": [7]}')
    answer = complete(engine(path), [40], SamplingParams(temperature=0, max_tokens=9))
    assert (answer.token_ids, answer.finish_reason) == ([41, end], "stop")


def test_a_stop_string_that_is_a_special_token_stops(
        make_scripted_model, tokenizer, engine):
    """The text does not have it, because special tokens are skipped."""
    bos = tokenizer.bos_token_id
    llm = engine(make_scripted_model([40, 41, bos, 42]))
    for stop in ("<|bos|>", ["zz", "<|bos|>"]):
        answer = complete(llm, [40], greedy(9, stop=stop))
        assert (answer.token_ids, answer.finish_reason) == ([41, bos], "stop")
        assert answer.stop_reason == "<|bos|>"
        shown = complete(llm, [40], greedy(9, stop=stop, skip_special_tokens=False))
        assert shown == answer
    # No other stop string is found within it, but one before it is.
    first = tokenizer.decode([41])
    for other, found in {"<|": "<|bos|>", first: first}.items():
        answer = complete(llm, [40], greedy(9, stop=[other, "<|bos|>"]))
        assert answer.stop_reason == found


def test_a_stop_string_that_is_a_special_token_need_not_be_decoded_to_itself(
        make_scripted_model, sentencepiece_tokenizer, engine):
    tokenizer = deepcopy(sentencepiece_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["\u2581<EOT>"]})
    end = tokenizer.convert_tokens_to_ids("\u2581<EOT>")
    assert tokenizer.decode([end]) != "\u2581<EOT>"
    llm = engine(make_scripted_model([40, 41, end, 42], tokenizer))
    answer = complete(llm, [40], greedy(9, stop="\u2581<EOT>"))
    assert (answer.token_ids, answer.stop_reason) == ([41, end], "\u2581<EOT>")


# -- What a checkpoint says ------------------------------------------------------------


def test_a_tokenizer_that_disagrees_with_its_file_is_told(
        text_model, edit_model, caplog, monkeypatch):
    checkpoint.load_tokenizer(text_model)
    assert not caplog.records, "they agree"
    load = checkpoint.AutoTokenizer.from_pretrained

    def load_another(*arguments, **options):
        tokenizer = load(*arguments, **options)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(True)])
        return tokenizer

    monkeypatch.setattr(checkpoint.AutoTokenizer, "from_pretrained", load_another)
    with caplog.at_level(logging.WARNING, "nanopaged"):
        checkpoint.load_tokenizer(text_model)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "turns '1234 + 56' into the tokens [" in told and "tokenizer_class" in told


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_config_without_a_dtype_takes_that_of_the_weights(
        dtype, llama, edit_model, engine, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    path = edit_model(llama, lambda config: config.pop("dtype", None))
    file = path / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()},
              file, metadata={"format": "pt"})
    assert engine(path, dtype="auto").engine.runner.dtype == dtype


@pytest.mark.parametrize(("rope", "longest"), [
    ({"rope_type": "default"}, 64), ({"rope_type": "yarn", "factor": 4.0}, 256),
    ({"rope_type": "linear", "factor": 2.0}, 128),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
      "high_freq_factor": 4.0, "original_max_position_embeddings": 32}, 64)], ids=str)
def test_stretched_positions_count(rope, longest, llama, edit_model, engine):
    path = edit_model(llama, lambda config: config.update(
        max_position_embeddings=64, rope_parameters={"rope_theta": 1e4} | rope))
    llm = engine(path, max_model_len=None, num_blocks=256)
    assert llm.engine.max_model_len == longest


def test_only_the_files_of_the_index_are_downloaded(tmp_path, llama, monkeypatch):
    """Not those of other formats, of which a repository may have several."""
    asked = []

    def download(source, allow_patterns):
        asked.append(sorted(allow_patterns))
        return tmp_path

    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, file in index["weight_map"].items():
        save_file({name: torch.ones(2)}, tmp_path / file)
    save_file({"a": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    monkeypatch.setattr(checkpoint, "snapshot_download", download)
    found = checkpoint.find_tensors("owner/name")
    assert asked == [["model.safetensors", "model.safetensors.index.json"],
                     ["model-1.safetensors", "model-2.safetensors"]]
    assert {name: (path.name, info.shape) for name, (path, info) in found.items()} == {
        "a": ("model-1.safetensors", [2]), "b": ("model-2.safetensors", [2])}


def test_a_missing_directory_is_not_called_damaged(tmp_path, engine):
    file = tmp_path / "model.gguf"
    file.touch()
    for path in ("", "./c", str(tmp_path / "a/b"), tmp_path / "a", tmp_path, file):
        message = message_of(lambda path=path: engine(path))
        assert "an existing directory with a config.json" in message


# -- Numbers ---------------------------------------------------------------------------


def test_numbers_of_numpy_and_torch_are_numbers():
    params = SamplingParams(
        max_tokens=np.int64(4), temperature=np.float32(0), seed=np.int32(1), top_k=-1,
        logit_bias={np.int64(7): np.float32(2), 8: torch.tensor(1.5)},
        stop_token_ids=[np.int64(3), torch.tensor(4)])
    assert type(params.max_tokens) is type(params.seed) is int and params.top_k == 0
    assert params.logit_bias == {7: 2.0, 8: 1.5} and params.stop_token_ids == [3, 4]
    assert SamplingParams(stop_token_ids=np.array([5, 6])).stop_token_ids == [5, 6]


# -- The prefix cache, and ranks -------------------------------------------------------


def test_scored_prompts_take_no_place_in_the_prefix_cache(llama, engine):
    """Nobody could find their blocks, so others stay longer."""
    llm = engine(llama, num_blocks=64, max_model_len=120)
    system = [i % 160 for i in range(101)]
    complete(llm, system, greedy(1))
    for start in range(6):
        scored = [(start + 7 * i) % 160 for i in range(60)]
        complete(llm, scored, greedy(1, prompt_logprobs=0))
    (output,) = llm.generate([system], greedy(1), use_tqdm=False)
    assert output.num_cached_tokens == 100


def test_tied_tokens_have_the_same_rank():
    logits = torch.tensor([[3.0, 4, 1, 2, 1, 3, 5, 5, 4, 5, 4, 1]])
    group = new_group([1, 2], SamplingParams(temperature=0, logprobs=5))
    group.sequences[0].num_computed_tokens = 2
    for token in (6, 7, 9):
        (report,) = report_logprobs(logits, torch.tensor([token]), [5])
        assert report[token].rank == 1 and next(iter(report)) == token
        assert sorted(entry.rank for entry in report.values())[:3] == [1, 1, 1]
        assert {entry.rank for entry in report.values()} <= {1, 4}
    (found,) = sample_for(logits, group.sequences).logprobs.values()
    assert {entry.rank for entry in found.values()} == {1, 4}
