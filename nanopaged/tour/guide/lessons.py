"""What each chapter shows: small runs of the engine, measured while the page is made.

A lesson returns the values of its chapter's text, by name. They are computed here, so
that no number in the text can be wrong tomorrow.
"""

import time
from unittest.mock import patch

import numpy as np

from nanopaged import BeamSearchParams, SamplingParams
from nanopaged.attention import place_tokens, spread
from nanopaged.config import EngineConfig
from nanopaged.parallel import FIELDS
from nanopaged.scheduler import Batch
from nanopaged.tour import kv
from nanopaged.tour.guide import blockwise, figures, paper
from nanopaged.tour.guide.claims import BANDWIDTH, RATE, TOKENS, claims
from nanopaged.tour.guide.exercises import EXERCISES, exercise_list
from nanopaged.tour.guide.lab import (
    SPEECH,
    STORY,
    Values,
    Watched,
    engine,
    greedy,
    watch,
)
from nanopaged.tour.guide.markdown import Html, table
from nanopaged.tour.guide.mutants import MUTANTS, mutant_list
from nanopaged.tour.guide.source import part
from nanopaged.tour.state import utilisation
from nanopaged.tour.words import join

__all__ = [  # a lesson for each chapter that has values
    "attention", "blocks", "build", "cache", "claims", "fork", "full", "loop", "prefix",
    "ranks", "schedule", "step",
]

CONSTANT_HASH = 7


def loop() -> Values:
    with engine(num_blocks=8) as llm:
        run = watch(llm, "loop-run", "One request, from its prompt to its last token",
                    STORY[:1], greedy(8))
        output = run.outputs[0]
        pieces = [repr(llm.tokenizer.decode([token]))
                  for token in output.prompt_token_ids]
        size = llm.config.block_size
    first = run.batches[0]
    seq = run.state(1, "updated")["seqs"]["0.0"]
    positions, slots = places(first, size)
    return {
        "player": run.player,
        "second_answer": "0.1",  # as the player marks it, and
        "place": "#3",
        "size": size,
        "prompt_tokens": len(pieces),
        "pieces": " ".join(pieces),
        "output_tokens": len(output.outputs[0].token_ids),
        "steps": len(run.batches),
        "first_count": first.counts[0],
        "later_counts": ", ".join(str(batch.counts[0]) for batch in run.batches[1:]),
        "ids": str(first.token_ids),
        "table": str(seq["table"]),
        "positions": str(positions),
        "slots": str(slots),
        "computed": seq["computed"],
        "new_id": seq["tokens"][0],
        "new_length": len(pieces) + len(seq["tokens"]),
        "text": repr(run.texts()[0]),
    }


def places(batch: Batch, size: int) -> tuple[list[int], list[int]]:
    """The positions and slots of a batch's tokens, in blocks of this size."""
    ends = np.array(batch.ends)
    num_blocks = -(-ends // size)
    tables = np.zeros((len(ends), num_blocks.max()), np.int64)
    tables[spread(num_blocks)] = batch.block_ids
    positions, slots = place_tokens(tables, np.array(batch.counts), ends, size)
    return positions.tolist(), slots.tolist()


def cache() -> Values:
    """Generate with the cache, and without: then each token computes the whole text."""
    count = 128
    with engine(enable_prefix_caching=False, num_blocks=128) as llm:
        prompt = llm.tokenizer("ROMEO:\n").input_ids
        llm.generate(prompt, greedy(4), use_tqdm=False)  # warm-up

        began = time.perf_counter()
        with_cache = llm.generate(prompt, greedy(count), use_tqdm=False)
        seconds_with = time.perf_counter() - began

        began = time.perf_counter()
        text = list(prompt)
        for _ in range(count):
            one = llm.generate(text, greedy(1), use_tqdm=False)[0].outputs[0]
            text += one.token_ids
        seconds_without = time.perf_counter() - began
        token_bytes = kv.token_bytes(llm)

    assert text[len(prompt):] == with_cache[0].outputs[0].token_ids
    length = len(prompt)
    computed_with = length + count - 1
    computed_without = sum(length + i for i in range(count))
    marks = [1, *range(16, count + 1, 16)]
    curves = {
        "without the cache": {
            str(n): float(sum(length + i for i in range(n))) for n in marks},
        "with the cache": {str(n): float(length + n - 1) for n in marks},
    }
    return {
        "count": count,
        "prompt_tokens": length,
        "computed_with": f"{computed_with:,}",
        "computed_without": f"{computed_without:,}",
        "work_ratio": f"{computed_without / computed_with:.0f}",
        "seconds_with": f"{seconds_with:.2f}",
        "seconds_without": f"{seconds_without:.2f}",
        "time_ratio": f"{seconds_without / seconds_with:.1f}",
        "figure": figures.lines(
            "Tokens computed so far", curves,
            "Counted, not timed. Without the cache the work grows with the square of "
            "the length.", "tokens generated", "tokens"),
        "token_bytes": f"{token_bytes:,}",
    } | sizes_of_caches(tokens=4096, seqs=8)


def sizes_of_caches(tokens: int, seqs: int) -> Values:
    rows = []
    for name, shape in kv.MODELS.items():
        total = kv.gib(shape.total(tokens, seqs))
        rows.append([name, str(shape.layers), str(shape.kv_heads), str(shape.head_dim),
                     str(shape.item_bytes), f"{shape.bytes_per_token:,}", total])
    head = ["", "layers", "KV heads", "head size", "bytes a number", "bytes a token",
            f"{seqs} sequences of {tokens:,} tokens"]
    old, new = kv.MODELS["Llama-2-7B"], kv.MODELS["Llama-3-8B"]
    assert old.bytes_per_token == 4 * new.bytes_per_token, "the text says: a quarter"
    return {
        "models": Html(f'<div class="models">{table(head, rows)}</div>'),
        "kv_output": kv.describe(kv.MODELS["Qwen3-0.6B"], tokens, seqs, memory=24),
    }


def blocks() -> Values:
    with engine(num_blocks=16) as llm:
        size = llm.config.block_size
        run = watch(llm, "blocks-run", "Two requests of different lengths",
                    ["ROMEO:\n", SPEECH], [greedy(14), greedy(6)])
    used = [utilisation(state) for state in run.trace.states() if state["running"]]
    return {
        "player": run.player,
        "block_size": size,
        "default_size": EngineConfig().block_size,
        "most_waste": size - 1,
        "default_most_waste": EngineConfig().block_size - 1,
        "utilisation": f"{100 * sum(used) / len(used):.0f}",
    } | paper.uses_of_memory()


def step() -> Values:
    """The story of A and B, as the files of the engine tell it."""
    with engine(num_blocks=8) as llm:
        params = [greedy(5), SamplingParams(n=2, max_tokens=4, seed=1, ignore_eos=True)]
        run = watch(llm, "step-run", "A, and one step later B, which asks for two "
                    "answers", STORY, params, together=False)
        size = llm.config.block_size
    first, second, third = run.batches[:3]
    positions, slots = places(second, size)
    assert second.counts == [1, 2] and third.copies, "the text describes these steps"
    [(copy_from, copy_to)] = third.copies
    logical = positions[-1] // size
    return {
        "player": run.player,
        "first": listing(first),
        "second": listing(second),
        "third": listing(third),
        "size": size,
        "common": size,
        "counts": str(second.counts),
        "ends": str(second.ends),
        "samples": str(second.samples),
        "block_ids": str(list(second.block_ids)),
        "shared": second.block_ids[0],
        "position": positions[-1],
        "logical": logical,
        "offset": positions[-1] % size,
        "physical": slots[-1] // size,
        "slot": slots[-1],
        "positions": str(positions),
        "slots": str(slots),
        "later_counts": str(third.counts),
        "copies": str(third.copies),
        "copy_from": copy_from,
        "copy_to": copy_to,
        "pending": str([-1 - sample for sample in range(len(second.samples))]),
        "begins": Html(part("model_runner.ModelRunner.run", "batch.swaps_out",
                            "batch.copies")),
    }


def listing(batch: Batch) -> str:
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
    return "\n".join([f"token_ids = [{', '.join(names)}]", *lists(batch, FIELDS[1:])])


def lists(batch: Batch, names: list[str]) -> list[str]:
    return [f"{name} = {list(getattr(batch, name))}" for name in names
            if len(getattr(batch, name))]


def attention() -> Values:
    with engine(block_size=16, num_blocks=32) as llm:
        params = SamplingParams(n=2, max_tokens=24, seed=1, ignore_eos=True)
        recorded = blockwise.record(llm, ["ROMEO:\n", SPEECH], params)
        config = llm.model_config
        moved = blockwise.difference_when_moved(recorded[-1])
    difference = blockwise.max_difference(recorded)
    assert difference < 1e-4, "the engine's attention is not the paper's formula"
    assert moved == 0, "the place of a block changed the result"
    largest = max(float(abs(step.out).max()) for step in recorded)
    table_example = recorded[-1].tables[-1]
    return {
        "difference": f"{difference:.1e}",
        "largest": f"{largest:.1f}",
        "results": f"{sum(step.q.shape[0] * step.q.shape[1] for step in recorded):,}",
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "example_table": str(table_example),
        "moved": f"{moved:g}",
        "equation": Html(blockwise.EQUATION),
        "inner": Html(part(
            "cpu_kernels.run_programs", "# The sums so far", "acc[g, dim] +=")),
    }


def schedule() -> Values:
    budget = 8
    with engine(num_blocks=32, max_num_batched_tokens=budget) as llm:
        long_prompt = "\n".join([SPEECH] * 2)
        run = watch(llm, "schedule-run",
                    f"Two short requests and a long one; {budget} tokens a step",
                    ["ROMEO:\n", "JULIET:\n", long_prompt],
                    [greedy(12), greedy(12), greedy(4)])
        long_answer = run.outputs[2].outputs[0].token_ids
        long_tokens = len(run.outputs[2].prompt_token_ids)
        assert not llm.stats().preemptions_recompute, "the pool is too small"
    chunks = [step[2] for step in run.chunks() if 2 in step][: -(len(long_answer) - 1)]
    assert sum(chunks) == long_tokens
    assert not absent_steps(run, 0) + absent_steps(run, 1), "a decode was stalled"
    mixed = [b for b in run.batches if len(b.counts) > 1 and max(b.counts) > 1]
    assert mixed, "no chunk ran beside a decode"
    speeds = tokens_per_second((1, 2, 4, 8, 16, 32))
    gain = speeds[max(speeds)] / speeds[1]
    speed_rows = {"tokens/s": {str(n): speed for n, speed in speeds.items()}}
    return {
        "player": run.player,
        "budget": budget,
        "long_tokens": long_tokens,
        "chunks": ", ".join(map(str, chunks)),
        "num_chunks": len(chunks),
        "example_counts": str(mixed[-1].counts),
        "figure": figures.lines(
            "Tokens per second, by the number of sequences in a batch.", speed_rows,
            "The bundled model, on one core of the machine that made this page.",
            "sequences that decode together", "tokens/s"),
        "batch": max(speeds),
        "rate": f"{RATE / 1e12:g}",
        "bandwidth": f"{BANDWIDTH / 1e12:g}",
        "balance": f"{RATE / BANDWIDTH:.0f}",
        "speed_one": f"{speeds[1]:,.0f}",
        "speed_many": f"{speeds[max(speeds)]:,.0f}",
        "gain": f"{gain:.1f}",
        "slower": f"{max(speeds) / gain:.1f}",
        "default_budget": f"{EngineConfig().max_num_batched_tokens:,}",
    }


def tokens_per_second(batch_sizes: tuple[int, ...]) -> dict[int, float]:
    """The speed of decoding, by the number of sequences that decode together."""
    speeds = dict.fromkeys(batch_sizes, 0.0)
    count = 16
    with engine(block_size=16, num_blocks=256, max_num_seqs=64) as llm:
        for size in batch_sizes:
            prompts = [[token + 1] for token in range(size)]
            for _ in range(5):  # the best of several rounds: a machine is never quiet
                began = time.perf_counter()
                llm.generate(prompts, greedy(count), use_tqdm=False)
                speed = size * count / (time.perf_counter() - began)
                speeds[size] = max(speed, speeds[size])
    return speeds


def prefix() -> Values:
    system = "You are a citizen of Verona, and you speak in verse.\n\n"
    questions = ["ROMEO:\n", "FRIAR LAURENCE:\n", "Nurse:\n"]
    prompts = [system + question for question in questions]
    with engine(num_blocks=32) as llm:
        run = watch(llm, "prefix-run", "Three prompts that begin alike",
                    prompts, greedy(5))
        stats = llm.stats()
        hits = [output.num_cached_tokens for output in run.outputs]
        lengths = [len(output.prompt_token_ids) for output in run.outputs]

    with (engine(num_blocks=32) as llm,
          patch("nanopaged.block_manager.hash_content", lambda *_: CONSTANT_HASH)):
        collided = llm.generate(prompts, greedy(5), use_tqdm=False)
        collided_hits = llm.stats().prefix_hit_tokens
    assert collided_hits < stats.prefix_hit_tokens, "a collision costs hits"
    assert ([output.outputs[0].token_ids for output in collided]
            == [output.outputs[0].token_ids for output in run.outputs])
    with engine(num_blocks=64) as llm:
        salted = [SamplingParams(temperature=0, max_tokens=5, cache_salt=name)
                  for name in ("Capulet", "Montague", "Escalus")]
        outputs = llm.generate(prompts, salted, use_tqdm=False)
        salted_hits = sum(output.num_cached_tokens for output in outputs)
    assert salted_hits == 0, "a salt did not separate"
    return {
        "player": run.player,
        "lengths": join([str(length) for length in lengths]),
        "hits": join([str(hit) for hit in hits]),
        "hit_tokens": stats.prefix_hit_tokens,
        "query_tokens": sum(lengths),
        "hit_share": f"{100 * stats.prefix_hit_tokens / sum(lengths):.0f}",
        "collided_hits": collided_hits,
        "salted_hits": salted_hits,
        "hash_value": CONSTANT_HASH,
        **paper.paper_gains(),
    }


def fork() -> Values:
    with engine(num_blocks=16) as llm:
        params = SamplingParams(n=3, temperature=0.9, max_tokens=8, seed=4)
        samples = watch(llm, "fork-run", "One prompt, three answers", [SPEECH[:22]],
                        params)
        copies = samples.batches[1].copies
        prompt_tokens = len(samples.outputs[0].prompt_token_ids)
    with engine(num_blocks=20) as llm:
        beams = watch(llm, "beam-run", "A beam search, three beams wide", [SPEECH[:22]],
                      BeamSearchParams(beam_width=3, max_tokens=8))
        best = beams.outputs[0].outputs[0]

    return {
        "player": samples.player,
        "children": Html(part("beam_search.advance_beams", "# Now every child",
                              "manager.free(parent)")),
        "beam_player": beams.player,
        "prompt_tokens": prompt_tokens,
        "in_last_block": prompt_tokens % 4,
        "copies": str(copies),
        "num_copies": len(copies),
        "best": repr(best.text),
        "best_logprob": f"{best.cumulative_logprob:.2f}",
        "figure": paper.sharing(seconds=15)["sharing"].chart,
    }


def full() -> Values:
    return preempted_runs() | paper.full_pool()


def preempted_runs() -> Values:
    """The same two requests in a pool that is too small, recomputed and swapped."""
    prompts = ["ROMEO:\n", "JULIET:\n"]
    num_blocks = 8
    with engine() as llm:
        alone = llm.generate(prompts, greedy(16), use_tqdm=False)
    expected = [output.outputs[0].token_ids for output in alone]

    values: Values = {"pool": num_blocks}
    for mode in ("recompute", "swap"):
        with engine(
            num_blocks=num_blocks, preemption_mode=mode, swap_space=2e-4
        ) as llm:
            title = f"Two requests in a pool for one: {mode}"
            run = watch(llm, f"{mode}-run", title, prompts, greedy(16))
            stats = llm.stats()
        assert expected == [output.outputs[0].token_ids for output in run.outputs]
        absent = absent_steps(run, request=1)
        # The runs are the same until then, and the first has shown that part.
        opens_at = min(absent) if mode == "swap" else None
        values |= {
            f"{mode}_player": run.player_at(opens_at),
            f"{mode}_count": stats.preemptions_recompute + stats.preemptions_swap,
            f"{mode}_tokens": sum(sum(batch.counts) for batch in run.batches),
            f"{mode}_moves": sum(len(batch.swaps_out + batch.swaps_in)
                                 for batch in run.batches),
            f"{mode}_leaves": min(absent),
            f"{mode}_returns": max(absent) + 1,
        }
    return values


def absent_steps(run: Watched, request: int) -> list[int]:
    """The steps, counted from 1, in which a request did not run, before its end."""
    present = [number for number, step in enumerate(run.chunks(), start=1)
               if request in step]
    return sorted(set(range(1, max(present))) - set(present))


def ranks() -> Values:
    with engine(num_blocks=24) as llm:
        run = watch(llm, "", "", ["ROMEO:\n", SPEECH, "JULIET:\n"], greedy(6))
        config = llm.model_config
        token_bytes = kv.token_bytes(llm)
    first, second = run.batches[:2]
    return {
        "message": "\n".join(lists(second, FIELDS)),
        "fields": len(FIELDS),
        "first_bytes": f"{message_bytes(first):,}",
        "later_bytes": f"{message_bytes(second):,}",
        "tables_kib": 8 * EngineConfig().max_num_seqs * TOKENS
        // EngineConfig().block_size // 1024,
        "tables_tokens": f"{TOKENS:,}",
        "kv_written": f"{sum(first.counts) * token_bytes:,}",
        "layers": config.num_hidden_layers,
        "exchanges": 2 * config.num_hidden_layers + 1,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
    }


def message_bytes(batch: Batch) -> int:
    """How much `Ranks.send` sends: a number for each list, then all numbers in them."""
    sizes = [np.size(getattr(batch, name)) for name in FIELDS]
    return 8 * (len(sizes) + sum(sizes))


def build() -> Values:
    return {
        "mutants": mutant_list(),
        "num_mutants": len(MUTANTS),
        "exercise_minutes": sum(exercise.minutes for exercise in EXERCISES),
        "exercises": exercise_list(EXERCISES),
    }
