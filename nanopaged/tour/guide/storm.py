"""A preemption storm: the same requests, more of them in each step from run to run.

The clock counts steps, so a run is the same each time, and on every machine.
"""

from collections import defaultdict

from nanopaged.batch import Batch
from nanopaged.tour.guide.lab import Values, engine, greedy
from nanopaged.tour.observers import observers

RATES = (0.3, 0.4, 0.5, 0.7)  # requests a step
COUNT, TOKENS_IN, TOKENS_OUT = 20, 12, 16
BLOCK_SIZE, SLOTS = 2, 128
FIRST, GAP = 10, 2  # the most steps to the first token, and on average to each other


def serve(rate: float, max_num_seqs: int = 32) -> Values:
    """Let the requests come, and step until all are finished. Returns means of all
    steps, but of the usage of the pool the most.
    """
    came: list[int] = []  # in which step
    times: dict[str, list[int]] = defaultdict(list)  # the steps that gave a token
    answers: dict[str, list[int]] = {}
    seen: list[tuple[int, int, int]] = []  # of each step
    used = 0
    with engine(block_size=BLOCK_SIZE, num_blocks=SLOTS // BLOCK_SIZE,
                attention_backend="auto", max_num_batched_tokens=12,
                max_num_seqs=max_num_seqs) as llm:
        scheduler = llm.engine.scheduler

        def look(phase: str, batch: Batch | None) -> None:
            if phase == "scheduled" and batch is not None:
                running, unfinished = len(scheduler.running), len(scheduler.unfinished)
                seen.append((running, unfinished - running, len(batch.token_ids)))

        observers(llm).append(look)
        while len(answers) < COUNT:
            while len(came) < COUNT and len(came) <= rate * len(seen):
                start = 20 * len(came)  # no two prompts begin alike
                llm.add_request([*range(start, start + TOKENS_IN)], greedy(TOKENS_OUT))
                came.append(len(seen))
            for output in llm.step():
                times[output.request_id].append(len(seen))
                if output.finished:
                    answers[output.request_id] = output.outputs[0].token_ids
            used = max(used, llm.stats().blocks_used)
        stats = llm.stats()

    running, waiting, computed = (sum(column) for column in zip(*seen, strict=True))
    needed = COUNT * (TOKENS_IN + TOKENS_OUT - 1)  # the last token is only sampled
    in_time = sum(times[request][0] - came[int(request)] <= FIRST
                  and times[request][-1] - times[request][0] <= GAP * (TOKENS_OUT - 1)
                  for request in answers)
    sums = {"running": running, "waiting": waiting, "tokens": stats.output_tokens,
            "again": computed - needed, "in_time": in_time * TOKENS_OUT}
    return {name: number / len(seen) for name, number in sums.items()} | {
        "usage": used / stats.blocks_total, "answers": answers,
        "preemptions": stats.preemptions_recompute}
