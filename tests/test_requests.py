"""The life of a request, from whatever way it is made to its last output.

The tokens are those of transformers, whoever asks and whatever else is going on: other
requests, a tight pool, aborts, streams that are closed early.
"""

import itertools
import json
import pickle
from collections import defaultdict

import pytest
import torch

import helpers
from helpers import CPU, add_all, complete, drain, first_tokens_of, tokens_of, watch
from nanopaged import LLM, BeamSearchParams
from nanopaged.frontend.prompts import make_requests

COUNT = 24
LENGTHS = [5, 12, 7, 16, 9, 20]


def greedy(max_tokens=COUNT, **more):
    return helpers.greedy(max_tokens, **more)


@pytest.fixture(scope="session")
def work(llama, reference, draw_prompts):
    """Six prompts, and the tokens that must follow them."""
    prompts = draw_prompts(llama, LENGTHS, COUNT, seed=31)
    return prompts, [reference.generate(llama, prompt, COUNT) for prompt in prompts]


@pytest.fixture
def llm(ahead, llama, engine):
    llm = engine(llama, max_num_seqs=8)
    assert not llm.engine.steps_ahead, "only on a GPU"
    llm.engine.steps_ahead = ahead
    return llm


# -- Ways to ask -----------------------------------------------------------------------


def test_each_step_reports_one_more_token_of_each_request(llm, work):
    """Of those that `add_request` made, and they are transformers' tokens."""
    prompts, expected = work
    requests, seen, joining = [], defaultdict(list), iter(prompts)
    while len(seen) < 6 or llm.has_unfinished_requests():
        new = list(itertools.islice(joining, 1))
        requests += add_all(llm, new, greedy(logprobs=0))
        for output in llm.step():
            seen[output.request_id].append(output)
    for request, prompt, tokens in zip(requests, prompts, expected, strict=True):
        outputs = seen[request]
        assert first_tokens_of(outputs) == [tokens[: i + 1] for i in range(COUNT)]
        assert [o.finished for o in outputs] == [False] * (COUNT - 1) + [True]
        assert [len(o.outputs[0].logprobs) for o in outputs] == [*range(1, COUNT + 1)]
        assert outputs[-1].outputs[0].finish_reason == "length"
        assert {(o.prompt, *o.prompt_token_ids) for o in outputs} == {(None, *prompt)}
        assert {o.outputs[0].text for o in outputs} == {""}, "there is no tokenizer"
    assert llm.step() == []


def test_one_step_ahead_a_step_is_launched_before_the_last_is_read(llm, monkeypatch):
    events, execute, update = [], llm.engine.runner.execute, llm.engine.scheduler.update
    monkeypatch.setattr(llm.engine.runner, "execute", lambda *arguments:
                        events.append("launch") or execute(*arguments))
    monkeypatch.setattr(llm.engine.scheduler, "update", lambda *arguments:
                        events.append("read") or update(*arguments))
    complete(llm, [5, 6, 7], greedy(3))
    ahead, in_turn = ["launch", "launch", "read", "launch"], ["launch", "read"] * 2
    assert events[:4] == (ahead if llm.engine.steps_ahead else in_turn)


def test_a_stream_that_is_left_takes_its_requests_with_it(llm, work):
    prompts, expected = work
    llm.stream(prompts, greedy()).close()
    assert not llm.has_unfinished_requests(), "it has not begun"
    for num_taken in (1, 2, 7):
        request = llm.add_request(prompts[0], greedy())
        with pytest.raises(ZeroDivisionError):
            for index, _ in enumerate(llm.stream(prompts[1:4], greedy()), 1):
                1 / (index - num_taken)
        before = llm.stats().output_tokens
        assert tokens_of(drain(llm)[request]) == expected[0]
        assert llm.stats().output_tokens - before <= COUNT + 3


# -- Aborts ----------------------------------------------------------------------------


def test_an_abort_ends_a_request_of_generate_and_an_unknown_id_does_nothing(llm, work):
    def abort_the_second(phase, batch):
        assert llm.has_unfinished_requests()
        if phase == "updated" and llm.stats().output_tokens == 4:
            llm.abort_request("1")

    watch(llm, abort_the_second)
    first, second = llm.generate(work[0][:2], greedy(), use_tqdm=False)
    assert tokens_of(first) == work[1][0] and tokens_of(second) == work[1][1][:2]
    assert second.finished and second.outputs[0].finish_reason == "abort"
    for unknown in ("0", "no such id"):
        llm.abort_request(unknown)
        assert llm.step() == []


def test_an_abort_has_no_stop_reason_even_if_the_prompt_ends_with_a_stop_token(llm):
    request = llm.add_request([5, 6, 7], greedy(stop_token_ids=[7]))
    llm.abort_request(request)
    [output] = llm.step()
    [answer] = output.outputs
    assert (answer.finish_reason, answer.stop_reason) == ("abort", None)


# -- When a sequence ends --------------------------------------------------------------


@pytest.fixture(scope="session")
def stopping(llama, reference, draw_prompts):
    """Prompts whose greedy answers meet different EOS tokens."""
    prompts = draw_prompts(llama, [6] * 60, 16, seed=50)
    ends = [reference.generate(llama, prompt, 16, reference.eos_ids)[-1]
            for prompt in prompts]
    found = {end: prompt for end, prompt in zip(ends, prompts, strict=True)
             if end in reference.eos_ids}
    assert len(found) >= 3, "too few EOS tokens were met"
    return list(found.values())


@pytest.mark.parametrize("min_tokens", [0, 1, 4, 10, 16])
def test_each_of_several_eos_tokens_ends_a_sequence(
        min_tokens, llm, llama, stopping, reference):
    """But not before `min_tokens`, and not at all with `ignore_eos`."""
    for prompt in stopping:
        params = greedy(16, ignore_eos=False, min_tokens=min_tokens)
        answer = complete(llm, prompt, params)
        assert answer.token_ids == reference.run(
            llama, prompt, max_new_tokens=16, eos_token_id=reference.eos_ids,
            min_new_tokens=min_tokens)[0]
        is_stopped = answer.token_ids[-1] in reference.eos_ids
        assert answer.finish_reason == ("stop" if is_stopped else "length")
        # The first EOS token is the model's own. For the others, the reason is told.
        is_told = is_stopped and answer.token_ids[-1] != llm.eos_token_ids[0]
        assert answer.stop_reason == (answer.token_ids[-1] if is_told else None)
    assert len(complete(llm, stopping[0], greedy()).token_ids) == COUNT


def test_stop_tokens_max_tokens_and_max_model_len_end_a_sequence(llama, work, engine):
    prompts, expected = work
    llm = engine(llama, max_model_len=32)
    for tokens, prompt in zip(expected[:4], prompts, strict=False):
        answer = complete(llm, prompt, greedy(stop_token_ids=[tokens[3], 159]))
        assert answer.token_ids == tokens[: tokens.index(tokens[3]) + 1]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", tokens[3])
    for max_tokens in (1, 2, 11, 12, 13, 100, None):
        answer = complete(llm, prompts[5], greedy(max_tokens))  # it has 20 tokens
        assert answer.token_ids == expected[5][: min(max_tokens or 12, 12)]
        assert answer.finish_reason == "length"
    assert len(complete(llm, [7] * 31, greedy(None)).token_ids) == 1


def test_requests_without_params_take_the_models_own(llama, work, edit_model, engine):
    """What generation_config.json may say is in test_loader.py."""
    prompts, expected = work
    path = edit_model(llama)
    (path / "generation_config.json").write_text(json.dumps({
        "temperature": 0, "max_new_tokens": 5, "eos_token_id": [expected[0][3]]}))
    outputs = engine(path).generate(prompts[:2], use_tqdm=False)
    assert first_tokens_of(outputs) == [expected[0][:4], expected[1][:5]]


# -- What else is reported -------------------------------------------------------------


def test_stats_count_what_happened(llm, work):
    add_all(llm, work[0][:3], greedy())
    llm.step()
    assert llm.stats().blocks_used == sum(-(-length // 4) for length in LENGTHS[:3])
    drain(llm)
    end = llm.stats()
    assert end.output_tokens == 3 * COUNT and COUNT <= end.steps <= COUNT + 1
    assert (end.blocks_used, end.preemptions_recompute) == (0, 0)
    # All full blocks are kept. One step ahead, the last may not be known in time.
    num_full = sum((length + COUNT - 1) // 4 for length in LENGTHS[:3])
    assert num_full - 3 * llm.engine.steps_ahead <= end.blocks_cached <= num_full


# -- Text ------------------------------------------------------------------------------


def test_outputs_have_the_prompt_that_was_passed_and_a_salt_is_kept_apart(
        text_model, tokenizer, engine):
    """What else may be passed is in test_reports.py."""
    text = "the block table"
    ids = tokenizer.encode(text)
    llm = engine(text_model)
    kinds = [text, ids, {"prompt": text},
             {"prompt": text, "prompt_token_ids": ids, "cache_salt": "mine"}]
    outputs = llm.generate(kinds, greedy(), use_tqdm=False)
    assert [o.num_cached_tokens > 0 for o in outputs] == [0, 1, 1, 0]
    assert len({tuple(tokens_of(output)) for output in outputs}) == 1
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert [output.prompt for output in outputs] == [text, None, text, text]
    assert llm.generate([], greedy(), use_tqdm=False) == list(llm.stream([])) == []
    assert llm.chat([], greedy(), use_tqdm=False) == []


def test_chat_applies_the_template_of_the_tokenizer(text_model, tokenizer, engine):
    llm = engine(text_model)
    chats = [[{"role": "user", "content": word}] for word in ("block", "table")]
    outputs = llm.chat(chats, [greedy(), greedy(3)], use_tqdm=False)
    outputs += llm.chat(chats[0], greedy(), False, {"add_generation_prompt": False})
    texts = ["block\n<assistant>", "table\n<assistant>", "block\n"]
    assert [output.prompt_token_ids for output in outputs] == [
        tokenizer.encode(f"<|bos|><user>{text}", add_special_tokens=False)
        for text in texts]
    assert [len(tokens_of(output)) for output in outputs] == [COUNT, 3, COUNT]


def test_a_progress_bar_is_made_only_if_it_is_wanted(
        text_model, engine, capfd, monkeypatch):
    """Each has a finalizer, and Python drops a Ctrl-C that strikes in one."""
    llm = engine(text_model)
    llm.generate(["the", "a block"], greedy())
    assert "2/2" in capfd.readouterr().err
    monkeypatch.setattr("nanopaged.frontend.llm.tqdm", None)
    llm.generate(["the", "a block"], greedy(), use_tqdm=False)
    assert capfd.readouterr().err == ""


# -- The engine ------------------------------------------------------------------------


def test_after_its_end_an_engine_says_that_it_is_shut_down(llama, work):
    with LLM(str(llama), num_blocks=64, **CPU) as llm:
        waiting = llm.stream(work[0][1], greedy())
        next(waiting)
    for call in (lambda: llm.generate([5], greedy()), llm.step, lambda: next(waiting)):
        with pytest.raises(RuntimeError, match="shut down"):
            call()
    llm.shutdown()  # the second time nothing happens


def test_two_engines_in_one_process_leave_each_other_and_torch_alone(
        llama, work, make_model, reference, engine):
    other = make_model("qwen3", seed=33, tie_word_embeddings=True)
    state = torch.get_rng_state()
    engines = [engine(llama, block_size=2), engine(other, block_size=16)]
    streams = [llm.stream(work[0][0], greedy()) for llm in engines]
    *_, last = zip(*streams, strict=True)
    expected = [reference.generate(path, work[0][0], COUNT) for path in (llama, other)]
    assert first_tokens_of(last) == expected
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()


@pytest.mark.parametrize(("options", "num_blocks", "longest"), [
    ({}, 4096, 256), ({"max_model_len": 64}, 1024, 64), ({"num_blocks": 3}, 3, 48)])
def test_the_pool_and_the_longest_sequence_fit(options, num_blocks, longest, llama):
    with LLM(str(llama), **CPU, **options) as llm:
        assert llm.stats().blocks_total == num_blocks
        assert len(complete(llm, [5] * 9, greedy(None)).token_ids) == longest - 9


# -- Plain data ------------------------------------------------------------------------


@pytest.mark.parametrize("params", [
    greedy(), greedy(n=3, temperature=0.8, seed=5, logprobs=2, frequency_penalty=0.5),
    BeamSearchParams(3, COUNT, ignore_eos=True)], ids=["greedy", "drawn", "beams"])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 9, 99])
def test_a_request_can_be_pickled_at_any_time_and_goes_on_in_another_engine(
        num_steps, params, llm, llama, engine, work):
    """It takes its tokens along, and leaves its blocks behind."""
    def finish(engine):
        while engine.num_unfinished:
            engine.step().clear()

    (request,) = make_requests(llm, work[0][:1], [params])
    group = request.group
    llm.engine.add([group])
    for _ in range(num_steps):
        llm.engine.step().clear()
    copy = pickle.loads(pickle.dumps(group))
    finish(llm.engine)
    other = engine(llama, max_num_seqs=8).engine
    if copy.live:
        other.add([copy])
        finish(other)
    assert [(seq.token_ids, seq.finish_reason) for seq in copy.sequences] == [
        (seq.token_ids, seq.finish_reason) for seq in group.sequences]
    for mine, theirs in zip(copy.sequences, group.sequences, strict=True):
        assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob)
