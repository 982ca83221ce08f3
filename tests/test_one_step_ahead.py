"""One step ahead: the next step is launched before this one's tokens are read.

On a GPU that hides the host's work. It must never change an answer: whatever depends on
a token's value (end of text, stop strings, beams, forks) is found out one step late,
and the extra step leaves no trace. Here the CPU runs one step ahead, which the engine
itself never does, and is compared with an engine that reads every token at once.
"""

import itertools

import pytest

from helpers import CPU, drain, draw_requests, serve
from nanopaged import LLM, SamplingParams

TIGHT = {"max_num_seqs": 64, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def expected():
    """Answers from an engine that reads every token at once and has room for all."""
    with LLM(num_blocks=1000, block_size=4, max_model_len=96, **CPU) as llm:
        assert llm.steps_ahead == 0, "a CPU does not run ahead"
        yield {seed: serve(llm, draw_requests(seed)) for seed in range(3)}


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("caching", [True, False])
def test_one_step_ahead_changes_no_answer(engine, expected, mode, caching):
    before = {"recompute": 0, "swap": 0}
    for seed, block_size in itertools.product(expected, (4, 8)):
        llm = engine(
            None,
            block_size=block_size,
            num_blocks=200 // block_size,
            enable_prefix_caching=caching,
            preemption_mode=mode,
            **TIGHT,
        )
        llm.steps_ahead = 1

        assert serve(llm, draw_requests(seed)) == expected[seed]
        stats = llm.stats()
        assert len(llm.block_manager.free_swap_blocks) == llm.runner.num_swap_blocks
        assert sorted(llm.scheduler.free_rows) == list(range(64))

        before["recompute"] += stats.preemptions_recompute
        before["swap"] += stats.preemptions_swap

    assert before["swap" if mode == "swap" else "recompute"] > 0, (
        "nothing was preempted"
    )


def test_a_step_is_launched_before_the_previous_one_is_read(engine):
    llm = engine(None)
    llm.steps_ahead = 1
    llm.add_request([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
    assert llm.step() == []  # launched, not read

    (seq,) = llm.scheduler.running[0].live
    assert seq.num_computed_tokens == 3
    assert seq.num_pending_tokens == 1
    assert len(seq.token_ids) == 3

    (output,) = llm.step()  # the second is launched, then the first is read
    assert len(output.outputs[0].token_ids) == 1
    assert seq.num_computed_tokens == 4
    assert seq.num_pending_tokens == 1
    assert len(seq.token_ids) == 4
    assert [len(llm.step()[0].outputs[0].token_ids) for _ in range(2)] == [2, 3]
    assert not llm.has_unfinished_requests()


def test_an_abort_between_launch_and_reading_leaves_nothing(engine):
    llm = engine(None)
    llm.steps_ahead = 1
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    alone = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    first, second = (llm.add_request(prompt, params) for prompt in prompts)
    for _ in range(4):
        llm.step()
    llm.abort_request(first)
    outputs = drain(llm)
    last = {request: outputs[request][-1].outputs[0] for request in (first, second)}

    assert (
        last[first].finish_reason == "abort" and last[first].token_ids == alone[0][:3]
    )
    assert last[second].token_ids == alone[1]


def test_after_a_failed_step_new_requests_are_served(engine, monkeypatch):
    llm = engine(None)
    llm.steps_ahead = 1
    params = SamplingParams(max_tokens=10, n=2, seed=5, ignore_eos=True)
    (expected,) = serve(llm, [([5, 6, 7], params)])
    request = llm.add_request([5, 6, 7], params)
    for _ in range(3):
        llm.step()
    execute = llm.runner.execute

    def fail(batch):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(llm.runner, "execute", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        llm.step()

    monkeypatch.setattr(llm.runner, "execute", execute)
    (output,) = llm.step()
    assert output.request_id == request and output.finished
    for answer, (tokens, *_) in zip(output.outputs, expected, strict=True):
        assert answer.finish_reason == "abort" and answer.token_ids == tokens[:2]
    assert not llm.has_unfinished_requests()
    assert serve(llm, [([5, 6, 7], params)]) == [expected]
