"""One step ahead: the next step is launched before this one's tokens are read.

On a GPU that hides the host's work. It must never change an answer: whatever depends on
a token's value (ends, stop strings, beams, forks) is found out one step late, and the
extra step leaves no trace. Here a CPU runs one step ahead, too.
"""

import random

import pytest

from helpers import (
    add_all,
    check_invariants,
    counters,
    drain,
    draw_requests,
    greedy,
    serve,
)

TIGHT = {"num_blocks": 40, "max_num_seqs": 24, "max_num_batched_tokens": 48}


@pytest.fixture
def both(engine):
    """`both(path, **options)`: an engine that runs ahead, and one that does not."""

    def make(path, **options):
        llms = [engine(path, **options) for _ in range(2)]
        assert not llms[0].runs_ahead, "no CPU does"
        llms[0].runs_ahead = True
        return llms

    return make


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_running_ahead_changes_no_answer(text_model, both, mode, caching):
    ahead, plain = both(text_model, preemption_mode=mode,
                        enable_prefix_caching=caching, **TIGHT)
    for seed in range(4):
        requests = list(draw_requests(seed, 16, vocab_size=300))
        assert serve(ahead, requests) == serve(plain, requests)
        check_invariants(ahead)
    assert counters(ahead)[f"preemptions_{mode}"] > 0, "nothing was preempted"


@pytest.mark.parametrize("seed", range(6))
def test_aborts_leave_what_was_read_before(text_model, both, seed):
    """What an aborted request has is a beginning of what it would have had."""
    rng = random.Random(seed)
    ahead, plain = both(text_model, **TIGHT)
    prompts = [[rng.randrange(300) for _ in range(rng.randint(1, 20))]
               for _ in range(6)]
    params = [greedy(20, n=rng.choice([1, 2]), seed=i, temperature=0.7)
              for i in range(6)]
    expected = plain.generate(prompts, params, use_tqdm=False)
    ids, outputs = add_all(ahead, prompts, params), {}
    aborted = rng.sample(ids, 3)
    for request_id in aborted:
        for _ in range(rng.randint(0, 6)):
            outputs |= {output.request_id: output for output in ahead.step()}
        ahead.abort_request(request_id)
    outputs |= drain(ahead)
    for request_id, whole in zip(ids, expected, strict=True):
        for part, completion in zip(
                outputs[request_id].outputs, whole.outputs, strict=True):
            count = len(part.token_ids)
            assert part.token_ids == completion.token_ids[:count]
            is_whole = part.token_ids == completion.token_ids
            assert is_whole or part.finish_reason == "abort"
            assert request_id in aborted or part.finish_reason == "length"


def test_a_step_is_launched_before_the_one_before_is_read(llama, both, monkeypatch):
    for llm in both(llama):
        events, execute, update = [], llm.runner.execute, llm.scheduler.update
        monkeypatch.setattr(llm.runner, "execute", lambda *args, do=execute, to=events:
                            to.append("launch") or do(*args))
        monkeypatch.setattr(llm.scheduler, "update", lambda *args, do=update, to=events:
                            to.append("read") or do(*args))
        serve(llm, [([5, 6, 7], greedy(3))])
        ahead = ["launch", "launch", "read", "launch", "read"]
        plain = ["launch", "read", "launch", "read", "launch"]
        assert events[:5] == (ahead if llm.runs_ahead else plain)
