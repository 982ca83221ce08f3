"""Priorities: who comes first, who gives way, and that all who were admitted finish.

    python priorities.py [number of random runs]
"""

import json
import random
import sys
import tempfile
from pathlib import Path

from nanopaged import LLM, SamplingParams

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 128,
    "eos_token_id": None}


def engine(folder, **options):
    """A tiny model, whose weights are so large that it does not repeat itself."""
    Path(folder, "config.json").write_text(json.dumps(CONFIG))
    defaults = {"block_size": 2, "num_blocks": 64, "dtype": "float32", "device": "cpu",
                "attention_backend": "torch", "load_format": "dummy"}
    llm = LLM(folder, **defaults | options)
    for weight in llm.engine.runner.model.parameters():
        weight.mul_(10 if weight.ndim > 1 else 1)
    return llm


def params(priority, max_tokens=8, n=1):
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, priority=priority, n=n)


def check_admission(folder):
    """The smallest priority first; of equal ones, the first that came."""
    llm = engine(folder, max_num_seqs=1)
    ids = [llm.add_request([i], params(p)) for i, p in enumerate([2, 0, 1, 0, -5])]
    finished = []
    while llm.has_unfinished_requests():
        finished += [output.request_id for output in llm.step() if output.finished]
    assert finished == [ids[i] for i in (4, 1, 3, 2, 0)], finished


def step(llm, given_way):
    """A step's outputs. The ids of the groups that it preempts are added to the list.
    """
    scheduler = llm.engine.scheduler
    running = list(scheduler.running)
    outputs = llm.step()
    given_way += [request_id for request_id in running
                  if request_id in scheduler.unfinished.keys() - scheduler.running]
    return outputs


def check_preemption(folder, mode, priorities, expected):
    """The largest priority gives way, although it came first; of equal ones, the last.
    """
    llm = engine(folder, num_blocks=20, max_model_len=40, preemption_mode=mode)
    given_way, outputs = [], {}
    for i, priority in enumerate(priorities):
        llm.add_request([i] * 6, params(priority, 20))
        step(llm, given_way)
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in step(llm, given_way)}
    assert given_way[: len(expected)] == expected, given_way
    assert all(len(o.outputs[0].token_ids) == 20 for o in outputs.values())


def check_no_starvation(folder, mode, n):
    """Once admitted, a request ends, even if better ones keep coming forever."""
    llm = engine(folder, num_blocks=4 + 12 * n, max_model_len=32,
                 max_num_batched_tokens=8, preemption_mode=mode)
    given_way = []
    low = llm.add_request([1] * 8, params(9, 20, n))
    for i in range(400):
        outputs = step(llm, given_way)
        if any(output.request_id == low and output.finished for output in outputs):
            break
        llm.add_request([i % 64] * 9, params(0, 16))
    else:
        raise AssertionError("a request of low priority was admitted, and starved")
    assert low in given_way, "the one of low priority should have given way once"
    for request_id in llm.engine.scheduler.unfinished:
        llm.abort_request(request_id)
    llm.step()
    assert llm.stats().blocks_used == 0


def check_tokens(folder, run, roomy):
    """Whatever the priorities: all finish, with the tokens that they get in peace."""
    rng = random.Random(run)
    requests = [
        ([*range(rng.choice([1, 4, 7])), *rng.choices(range(64), k=rng.randrange(9))],
         params(rng.randrange(-2, 3), rng.randrange(1, 16), rng.choice([1, 1, 3])))
        for _ in range(rng.randrange(4, 11))]
    llm = engine(folder, num_blocks=rng.randrange(31, 35), max_model_len=32,
                 max_num_batched_tokens=rng.choice([4, 9, 64]), max_num_seqs=8,
                 preemption_mode=rng.choice(["recompute", "swap"]))
    answers = []
    for served_by in (llm, roomy):
        outputs = served_by.generate(*map(list, zip(*requests, strict=True)), False)
        answers.append([[c.token_ids for c in o.outputs] for o in outputs])
    assert answers[0] == answers[1], f"run {run}"
    stats = llm.stats()
    assert stats.blocks_used == 0
    return stats.preemptions_recompute + stats.preemptions_swap


def main(num_runs=20):
    with tempfile.TemporaryDirectory() as folder:
        check_admission(folder)
        for mode in ("recompute", "swap"):
            check_preemption(folder, mode, [5, 0, 3], ["0", "2"])
            check_preemption(folder, mode, [1, 1, 1], ["2"])
            for n in (1, 3):  # with n=3 it has to fork again
                check_no_starvation(folder, mode, n)
        roomy = engine(folder, num_blocks=500)
        total = sum(check_tokens(folder, run, roomy) for run in range(num_runs))
    print(f"Priorities: admission and preemption follow them, nobody starves, and "
          f"{num_runs} random runs with {total} preemptions lost no token.")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
