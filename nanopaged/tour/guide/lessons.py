"""What each chapter shows: small runs of the engine, made while the page is made.

A lesson returns the values of its chapter's text, by name. So no number in the text can
be wrong tomorrow.
"""

import time

import numpy as np

from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.attention import place_tokens
from nanopaged.config import EngineConfig
from nanopaged.parallel import FIELDS
from nanopaged.scheduler import Batch
from nanopaged.tour import kv
from nanopaged.tour.guide import blockwise, figures, paper
from nanopaged.tour.guide.lab import SPEECH, STORY, Run, Values, engine, greedy, watch
from nanopaged.tour.guide.markdown import Html, python
from nanopaged.tour.memory import LIMIT, SLOTS
from nanopaged.tour.workloads import DATA_SETS, LONGEST

TOKENS = 4096  # in each sequence of an example
# An A100 with 80 GB, from its data sheet: bytes/s, and operations/s in bfloat16.
BANDWIDTH, RATE = 2.0e12, 312e12


def loop() -> Values:
    with engine(num_blocks=8) as llm:
        run = watch(llm, "One request, from its prompt to its last token",
                    STORY[:1], greedy(8))
        pieces = [repr(llm.tokenizer.decode([token]))
                  for token in run.outputs[0].prompt_token_ids]
        size = llm.config.block_size
    positions, slots = places(run.batches[0], size)
    return {"run": run, "size": size, "pieces": pieces, "positions": positions,
            "slots": slots, "seq": run.scheduled()[0]["seqs"]["0.0"],
            "answer": run.outputs[0].outputs[0],
            "counts": [batch.counts[0] for batch in run.batches]}


def places(batch: Batch, size: int) -> tuple[list[int], list[int]]:
    """The positions and slots of a batch's tokens, in blocks of this size."""
    positions, slots = place_tokens(
        np.array(batch.block_ids), np.array(batch.counts), np.array(batch.ends), size)
    return positions.tolist(), slots.tolist()


def cache() -> Values:
    """Generate with the cache, and without: then each token computes the whole text."""
    count = 128
    with engine(enable_prefix_caching=False, num_blocks=128) as llm:
        prompt = llm.tokenizer("ROMEO:\n").input_ids
        llm.generate(prompt, greedy(4), use_tqdm=False)  # warm-up
        seconds_with, answer = timed(llm, prompt, count)
        text, seconds_without = list(prompt), 0.0
        for _ in range(count):
            seconds, token = timed(llm, text, 1)
            text += token
            seconds_without += seconds
        token_bytes = kv.token_bytes(llm)
    assert text == prompt + answer
    marks = [1, *range(16, count + 1, 16)]
    without = {n: sum(len(prompt) + i for i in range(n)) for n in marks}
    curves = {"without the cache": {str(n): float(without[n]) for n in marks},
              "with the cache": {str(n): float(len(prompt) + n - 1) for n in marks}}
    return {
        "count": count, "prompt": prompt, "token_bytes": token_bytes,
        "computed_with": len(prompt) + count - 1, "computed_without": without[count],
        "seconds_with": seconds_with, "seconds_without": seconds_without,
        "figure": figures.lines(
            "Tokens computed so far", curves,
            "Counted, not timed. Without the cache the work grows with the square of "
            "the length.", "tokens generated", "tokens"),
        "models": kv.MODELS, "tokens": TOKENS, "GIB": kv.GIB,
        "kv_output": kv.describe(kv.MODELS["Qwen3-0.6B"], TOKENS, seqs=8, memory=24)}


def timed(llm: LLM, prompt: list[int], count: int) -> tuple[float, list[int]]:
    """The seconds that an answer takes, and its tokens."""
    began = time.perf_counter()
    [output] = llm.generate(prompt, greedy(count), use_tqdm=False)
    return time.perf_counter() - began, output.outputs[0].token_ids


def blocks() -> Values:
    with engine(num_blocks=16) as llm:
        run = watch(llm, "Two requests of different lengths", ["ROMEO:\n", SPEECH],
                    [greedy(14), greedy(6)])
        size = llm.config.block_size
    held = [[(seq["computed"], size * len(seq["table"]))
             for seq in state["seqs"].values() if seq["table"]]
            for state in run.states()]
    used = [sum(n for n, _ in pairs) / sum(slots for _, slots in pairs)
            for pairs in held if pairs]
    tables = [state["seqs"]["0.0"]["table"] for state in run.scheduled()]
    grows = next(i for i in range(1, len(tables)) 
                 if len(tables[i]) > len(tables[i - 1]))
    return {"run": run, "size": size, "default_size": EngineConfig().block_size,
            "step": grows + 1, "table": tables[grows],
            "utilisation": 100 * sum(used) / len(used), "slots": SLOTS,
            "longest": LONGEST, "lengths": DATA_SETS["ShareGPT"],
            } | paper.use_of_memory(seconds=240)


def step() -> Values:
    """The story of A and B, as the files of the engine tell it."""
    with engine(num_blocks=8) as llm:
        params = [greedy(5), SamplingParams(n=2, max_tokens=4, seed=1, ignore_eos=True)]
        run = watch(llm, "A, and one step later B, which asks for two answers", STORY,
                    params, together=False)
        size = llm.config.block_size
    first, second, third = run.batches[:3]
    positions, slots = places(second, size)
    assert second.counts == [1, 2] and third.moves, "the text describes these steps"
    return {"run": run, "first": listing(first), "second": listing(second),
            "third": listing(third), "size": size, "batch": second, "later": third,
            "positions": positions, "slots": slots,
            "pending": [-1 - sample for sample in range(len(second.samples))]}


def listing(batch: Batch) -> Html:
    """What a batch of the story says, a line for each list that is not empty.

    Tokens have names as in the engine's files: p and q in prompts, then t, u and v.
    """
    names = []
    for entry, (count, end) in enumerate(zip(batch.counts, batch.ends, strict=True)):
        for position in range(end - count, end):
            if position < 6:  # the length of both prompts
                names.append(f"{'q' if entry and position >= 4 else 'p'}{position}")
            else:
                names.append(f"{'tuv'[entry]}{position - 6}")
    lines = [f"token_ids = [{', '.join(names)}]", *lists(batch, FIELDS[1:])]
    return python("\n".join(lines))


def lists(batch: Batch, names: list[str]) -> list[str]:
    return [f"{name} = {list(getattr(batch, name))}" for name in names
            if len(getattr(batch, name))]


def attention() -> Values:
    with engine(block_size=16, num_blocks=32) as llm:
        params = SamplingParams(n=2, max_tokens=24, seed=1, ignore_eos=True)
        expected, given = blockwise.compare(llm, ["ROMEO:\n", SPEECH], params)
        config = llm.model_config
    difference = abs(expected - given).max()
    assert difference < 1e-4, "the engine's attention is not the paper's formula"
    return {"difference": difference, "config": config, "results": len(given),
            "largest": abs(given).max()}


def schedule() -> Values:
    budget = 8
    with engine(num_blocks=32, max_num_batched_tokens=budget) as llm:
        run = watch(llm, f"Two short requests and a long one; {budget} tokens a step",
                    ["ROMEO:\n", "JULIET:\n", "\n".join([SPEECH] * 2)],
                    [greedy(12), greedy(12), greedy(4)])
    counts = run.counts(2)
    num_tokens = len(run.outputs[2].prompt_token_ids)
    chunks = [number for number in counts if number][:-3]
    assert sum(chunks) == num_tokens and not absent(run, 0) + absent(run, 1)
    mixed = [b for b in run.batches if len(b.counts) > 1 and max(b.counts) > 1]
    speeds = tokens_per_second((1, 2, 4, 8, 16, 32))
    return {
        "run": run, "budget": budget, "num_tokens": num_tokens, "chunks": chunks,
        "mixed": mixed[-1].counts, "step": 1 + counts.index(budget - 2),
        "batch": max(speeds), "rate": RATE / 1e12, "bandwidth": BANDWIDTH / 1e12,
        "balance": RATE / BANDWIDTH, "speeds": speeds,
        "gain": speeds[max(speeds)] / speeds[1],
        "default_budget": EngineConfig().max_num_batched_tokens,
        "figure": figures.lines(
            "Tokens per second, by the number of sequences in a batch.",
            {"tokens/s": {str(n): speed for n, speed in speeds.items()}},
            "The bundled model, on one core of the machine that made this page.",
            "sequences that decode together (twice as many each time)", "tokens/s",
            is_logarithmic=True)}


def absent(run: Run, request: int) -> list[int]:
    """The steps, counted from 1, in which a request did not run, before its end."""
    present = [step for step, number in enumerate(run.counts(request), 1) if number]
    return sorted(set(range(1, max(present))) - set(present))


def tokens_per_second(batch_sizes: tuple[int, ...]) -> dict[int, float]:
    """The speed of decoding, by the number of sequences that decode together."""
    speeds = dict.fromkeys(batch_sizes, 0.0)
    count = 16
    with engine(block_size=16, num_blocks=256, max_num_seqs=64) as llm:
        for size in batch_sizes:
            prompts = [[token + 1] for token in range(size)]
            for _ in range(3):  # the best of several rounds: a machine is never quiet
                began = time.perf_counter()
                llm.generate(prompts, greedy(count), use_tqdm=False)
                speed = size * count / (time.perf_counter() - began)
                speeds[size] = max(speed, speeds[size])
    return speeds


def prefix() -> Values:
    system = "You are a citizen of Verona, and you speak in verse.\n\n"
    prompts = [system + name for name in ("ROMEO:\n", "FRIAR LAURENCE:\n", "Nurse:\n")]
    with engine(num_blocks=32) as llm:
        run = watch(llm, "Three prompts that begin alike", prompts, greedy(5))
    with engine(num_blocks=64) as llm:
        salted = llm.generate(
            [{"prompt": prompt, "cache_salt": prompt} for prompt in prompts],
            greedy(5), use_tqdm=False)
    hits, salted_hits = [[output.num_cached_tokens for output in outputs]
                         for outputs in (run.outputs, salted)]
    assert sum(hits) and not sum(salted_hits)
    lengths = [len(output.prompt_token_ids) for output in run.outputs]
    return {"run": run, "lengths": lengths, "hits": hits,
            "salted_hits": sum(salted_hits), "gains": paper.GAINS}


def fork() -> Values:
    with engine(num_blocks=16) as llm:
        samples = watch(llm, "One prompt, three answers", [SPEECH[:22]],
                        SamplingParams(n=3, temperature=0.9, max_tokens=8, seed=4))
    with engine(num_blocks=20) as llm:
        beams = watch(llm, "A beam search, three beams wide", [SPEECH[:22]],
                      BeamSearchParams(beam_width=3, max_tokens=8))
    return {
        "samples": samples, "beams": beams, "copies": samples.batches[1].moves,
        "prompt_tokens": len(samples.outputs[0].prompt_token_ids),
        "best": beams.outputs[0].outputs[0],
    } | paper.sharing(seconds=10)


def full() -> Values:
    """The same two requests in a pool that is too small, recomputed and swapped."""
    prompts, pool = ["ROMEO:\n", "JULIET:\n"], 8
    with engine() as llm:
        alone = llm.generate(prompts, greedy(16), use_tqdm=False)
    expected = [output.outputs[0].token_ids for output in alone]
    values: Values = {"pool": pool}
    for mode in ("recompute", "swap"):
        with engine(num_blocks=pool, preemption_mode=mode, swap_space=2e-4) as llm:
            title = f"Two requests in a pool for one: {mode}"
            run = watch(llm, title, prompts, greedy(16))
            stats = llm.stats()
        assert expected == [output.outputs[0].token_ids for output in run.outputs]
        leaves, returns = min(absent(run, 1)), max(absent(run, 1)) + 1
        values[mode] = {
            "run": run, "leaves": leaves, "returns": returns,
            "count": stats.preemptions_recompute + stats.preemptions_swap,
            "tokens": sum(sum(batch.counts) for batch in run.batches),
            "moves": sum(len(b.moves) for b in run.batches)}
    return (values | paper.costs_of_preemption() | {
        "sustained": paper.SUSTAINED, "limit": LIMIT,
        "default_size": EngineConfig().block_size}
            | paper.latency(seconds=240) | paper.block_sizes(seconds=90))


def ranks() -> Values:
    with engine(num_blocks=24) as llm:
        run = watch(llm, "", ["ROMEO:\n", SPEECH, "JULIET:\n"], greedy(6))
        config, token_bytes = llm.model_config, kv.token_bytes(llm)
    first, second = run.batches[:2]
    defaults = EngineConfig()
    return {"message": python("\n".join(lists(second, FIELDS))), "config": config,
            "num_fields": len(FIELDS), "first_bytes": message_bytes(first),
            "later_bytes": message_bytes(second), "tokens": TOKENS,
            "kv_written": sum(first.counts) * token_bytes,
            "tables": 8 * defaults.max_num_seqs * TOKENS // defaults.block_size}


def message_bytes(batch: Batch) -> int:
    """How much `Ranks.send` sends: a number for each list, then all numbers in them."""
    sizes = [np.size(getattr(batch, name)) for name in FIELDS]
    return 8 * (len(sizes) + sum(sizes))
