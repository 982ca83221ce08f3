"""Prefill in one process, decode in another: what a single engine answers.

    python disaggregated.py [number of random runs [a solution]]
"""

import math
import multiprocessing
import random
import runpy
import sys
from pathlib import Path

from nanopaged import LLM, BeamSearchParams, SamplingParams

SOLUTION = Path(__file__).parents[1] / "disaggregated.py"
TEXT = "First Citizen:\nWe are accounted poor citizens, the patricians good. " * 2
NUM_REQUESTS = 30


def engine(**options):
    defaults = {"dtype": "float32", "device": "cpu", "attention_backend": "torch",
                "block_size": 4, "num_blocks": 2000, "max_model_len": 128}
    llm = LLM(**defaults | options)
    llm.engine.steps_ahead = 0
    return llm


def draw_requests(run):
    """Prompts that begin alike or not, of any length, and all kinds of parameters."""
    rng = random.Random(run)
    for _ in range(NUM_REQUESTS):
        start = rng.choice([0, 0, rng.randrange(40)])
        prompt = TEXT[start : start + rng.randrange(1, 90)]
        max_tokens = rng.choice([1, *range(2, 24)])
        if rng.random() < 0.1:
            yield prompt, BeamSearchParams(3, max_tokens)
            continue
        yield prompt, SamplingParams(
            n=rng.choice([1, 3]), temperature=rng.choice([0, 0.8]),
            seed=rng.randrange(99), max_tokens=max_tokens,
            min_tokens=rng.choice([0, 1]),
            stop=rng.choice([None, None, "e", ["th", "ou"]]),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
            frequency_penalty=rng.choice([0, 0, 0.5]))


def draw_options(run):
    """Those of the engine that computes prompts, and of the one that goes on."""
    rng = random.Random(-1 - run)
    mode = ["recompute", "swap"][run % 2]
    return (
        {"num_blocks": rng.randrange(45, 55), "preemption_mode": mode,
         "max_num_batched_tokens": rng.choice([9, 64, 512]), "max_num_seqs": 40},
        {"num_blocks": 2000 if run % 4 == 3 else rng.randrange(100, 120),
         "max_num_seqs": 40, "max_num_batched_tokens": rng.choice([40, 512])})


def serve_prompts(connection, solution):
    """The process of the engine that computes prompts: a run after another."""
    prefill = runpy.run_path(solution)["prefill"]
    while (run := connection.recv()) is not None:
        with engine(**draw_options(run)[0]) as llm:
            llm.engine.steps_ahead = run // 2 % 2
            for handed in prefill(llm, *zip(*draw_requests(run), strict=True)):
                connection.send_bytes(handed)
            stats = llm.stats()
        connection.send((stats.preemptions_recompute, stats.preemptions_swap))


def facts(output):
    """What must be identical, and the log-probabilities, which floats may round."""
    exact = [output.prompt, output.prompt_token_ids,
             [(c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason)
              for c in output.outputs]]
    numbers = [entry.logprob for each in [
        output.prompt_logprobs, *(c.logprobs for c in output.outputs)]
        for position in each or [] for entry in (position or {}).values()]
    return exact, numbers


def check_run(run, connection, decode, plain_engine):
    """Returns the preemptions of both engines, and how many tokens were computed."""
    connection.send(run)
    handed = [connection.recv_bytes() for _ in range(NUM_REQUESTS)]
    preemptions = connection.recv()
    options = draw_options(run)[1]
    num_swap_blocks = 600 if run % 4 == 3 else random.Random(run).randrange(30, 60)
    sizes = plain_engine.engine.runner.kv_caches[:, 0]
    swap_space = num_swap_blocks * sizes.nbytes / 2**30
    with engine(preemption_mode="swap", swap_space=swap_space, **options) as llm:
        llm.engine.steps_ahead = run // 2 % 2
        execute, counts = llm.engine.runner.execute, []
        llm.engine.runner.execute = lambda batch: (
            counts.extend(batch.counts), execute(batch))[1]
        found = decode(llm, handed)
        stats = llm.stats()
        assert not any(llm.engine.block_manager.ref_counts), "blocks are still held"
    if run % 4 == 3:  # there was room for all
        assert max(counts) == 1, "a prompt was computed again"
    prompts, params = map(list, zip(*draw_requests(run), strict=True))
    expected = plain_engine.generate(prompts, params, use_tqdm=False)
    # The engine that computes prompts hands them over in any order.
    expected, found = (sorted(map(facts, each), key=lambda pair: repr(pair[0]))
                       for each in (expected, found))
    for (exact, numbers), (right, right_numbers) in zip(found, expected, strict=True):
        assert exact == right, f"run {run}: {exact}, and not {right}"
        assert len(numbers) == len(right_numbers) and all(
            math.isclose(*pair, abs_tol=1e-4)
            for pair in zip(numbers, right_numbers, strict=True)), f"run {run}: {exact}"
    return (*preemptions, stats.preemptions_recompute, stats.preemptions_swap)


def main(num_runs=12, solution=SOLUTION):
    decode = runpy.run_path(str(solution))["decode"]
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe()
    process = context.Process(
        target=serve_prompts, args=(other, str(solution)), daemon=True)
    process.start()
    other.close()
    with engine() as plain_engine:
        counts = [check_run(run, connection, decode, plain_engine)
                  for run in range(num_runs)]
    connection.send(None)
    process.join()
    totals = [*map(sum, zip(*counts, strict=True))]
    assert all(totals[2:]) or num_runs < 12, totals
    print(f"Disaggregated: {num_runs} runs of {NUM_REQUESTS} requests are answered as "
          f"by one engine, with {totals} preemptions (recompute and swap, of prompts "
          "and of answers).")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
