"""One step ahead: the next step is launched before this one's tokens are read.

On a GPU that hides the host's work. What it must never do is change an answer: whatever depends on
the value of a token (end of text, stop strings, beams, forks) is found out one step late, and the
step that was too many leaves no trace. Here the CPU runs that way, which the engine itself never
does, beside an engine that reads every token at once.
"""

import itertools
import random

import pytest

TIGHT = {"max_num_seqs": 64, "max_num_batched_tokens": 64}


def draw_requests(seed):
    from nanopaged import BeamSearchParams, SamplingParams

    rng = random.Random(seed)
    for _ in range(12):
        prompt = [rng.randrange(500) for _ in range(rng.randrange(1, 40))]
        if rng.random() < 0.25:
            yield prompt, BeamSearchParams(rng.randrange(1, 5), rng.randrange(1, 20))
            continue
        yield prompt, SamplingParams(
            n=rng.randrange(1, 6), max_tokens=rng.randrange(1, 25), seed=rng.randrange(99),
            min_tokens=rng.choice([0, 1]), logprobs=rng.choice([None, 2]),
            temperature=rng.choice([0, 0.7]), stop=rng.choice([None, "e", "th"]),
            stop_token_ids=rng.choice([None, list(range(0, 500, 17))]),
        )  # fmt: skip


def answers(llm, requests):
    outputs = llm.generate([p for p, _ in requests], [q for _, q in requests], use_tqdm=False)
    return [[(c.token_ids, c.text, c.finish_reason, c.logprobs and len(c.logprobs))
             for c in output.outputs] for output in outputs]  # fmt: skip


@pytest.fixture(scope="module")
def expected():
    """The requests' answers from an engine that reads every token at once and has room for all."""
    from nanopaged import LLM

    with LLM(dtype="float32", device="cpu", num_blocks=1000, block_size=4, max_model_len=96) as llm:
        assert llm.steps_ahead == 0, "a CPU computes while it is asked: nothing to be ahead of"
        yield {seed: answers(llm, list(draw_requests(seed))) for seed in range(3)}


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("caching", [True, False])
def test_one_step_ahead_changes_no_answer(engine, expected, mode, caching):
    before = {"recompute": 0, "swap": 0}
    for seed, block_size in itertools.product(expected, (4, 8)):
        llm = engine(None, block_size=block_size, num_blocks=200 // block_size,
                     enable_prefix_caching=caching, preemption_mode=mode, **TIGHT)  # fmt: skip
        llm.steps_ahead = 1
        assert answers(llm, list(draw_requests(seed))) == expected[seed]
        stats = llm.stats()
        assert len(llm.blocks.free_swap_blocks) == llm.runner.num_swap_blocks
        assert sorted(llm.scheduler.free_rows) == list(range(64))
        before["recompute"] += stats.preemptions_recompute
        before["swap"] += stats.preemptions_swap
    assert before["swap" if mode == "swap" else "recompute"] > 0, "nothing was preempted"


def test_it_is_ahead(engine):
    from nanopaged import SamplingParams

    llm = engine(None)
    llm.steps_ahead = 1
    llm.add_request([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
    assert llm.step() == []  # launched and not read
    (seq,) = llm.scheduler.running[0].live
    assert (seq.num_computed_tokens, seq.num_unread_tokens, len(seq.token_ids)) == (3, 1, 3)
    (output,) = llm.step()  # the second one is launched, then the first is read
    assert len(output.outputs[0].token_ids) == 1
    assert (seq.num_computed_tokens, seq.num_unread_tokens, len(seq.token_ids)) == (4, 1, 4)
    assert [len(llm.step()[0].outputs[0].token_ids) for _ in range(2)] == [2, 3]
    assert not llm.has_unfinished_requests()


def test_an_abort_between_launch_and_reading_leaves_nothing(engine):
    from nanopaged import SamplingParams

    llm = engine(None)
    llm.steps_ahead = 1
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    alone = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    first, second = (llm.add_request(prompt, params) for prompt in prompts)
    for _ in range(4):
        llm.step()
    llm.abort_request(first)
    told = {}
    while llm.has_unfinished_requests():
        told.update({output.request_id: output.outputs[0] for output in llm.step()})
    assert told[first].finish_reason == "abort" and told[first].token_ids == alone[0][:3]
    assert told[second].token_ids == alone[1]


def test_after_a_step_that_failed_the_next_requests_are_served(engine, monkeypatch):
    from nanopaged import SamplingParams

    llm = engine(None)
    llm.steps_ahead = 1
    params = SamplingParams(max_tokens=10, n=2, seed=5, ignore_eos=True)
    (expected,) = answers(llm, [([5, 6, 7], params)])
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
    assert answers(llm, [([5, 6, 7], params)]) == [expected]
