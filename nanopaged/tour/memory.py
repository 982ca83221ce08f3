"""The paper's memory results, reproduced: its Figures 2, 13, 15, 18 and 19.

Figures 2, 13 and 15 need no model: the engine's own scheduler and block manager serve
requests with the paper's lengths, and a stand-in for the model samples token 0. For
beams the stand-in hands out probabilities that the bundled model gave. Figures 18 and
19 time the bundled model in a pool that is too small.

    figures = measure(requests=200)
    for title, rows in tables(figures):
        ...
    draw_plots(figures, Path("plots"))  # pip install nanopaged[bench]
"""

import random
import time
from collections.abc import Callable
from itertools import count, cycle
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.block_manager import BlockManager
from nanopaged.config import EngineConfig
from nanopaged.outputs import Logprobs
from nanopaged.scheduler import Batch, Scheduler
from nanopaged.sequence import SequenceGroup
from nanopaged.tour.contiguous import RESERVE, serve_contiguous
from nanopaged.tour.observers import observers
from nanopaged.tour.reported import (
    CAPTIONS,
    PAPER_RUNNING,
    PAPER_SAVED,
    PAPER_TOKENS,
    PREEMPTED,
    SMALL_POOL,
)
from nanopaged.tour.workloads import DATA_SETS, LONGEST, SLOTS, Lengths, draw_lengths

Figures: TypeAlias = dict[str, Any]

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDTHS = (2, 4, 6)  # samples or beams a request


def measure(
    requests: int = 2000, repeats: int = 3, seed: int = 0,
    widths: tuple[int, ...] = WIDTHS,
    block_sizes: tuple[int, ...] = BLOCK_SIZES) -> Figures:
    """All figures. 2,000 requests take some minutes; 200 show the same."""
    return {
        "data_sets": DATA_SETS, "slots": SLOTS,
        "allocation": allocation(requests, seed),
        "sharing": sharing(requests, seed, widths),
        "waste": waste_by_block_size(requests // 8 + 8, seed, block_sizes),
        "preemption": preemption_by_block_size(requests, repeats, seed, block_sizes)}


# -- the engine's scheduler and block manager, without a model -------------------------


class PoolState(NamedTuple):
    """What is in the pool at one moment, or on average."""

    tokens: float  # slots that hold a token
    reserved: float  # slots that will get one
    internal: float  # slots that never will: the rest of last blocks
    used_blocks: float
    table_entries: int  # more than used blocks, where some are shared
    running: float  # requests

    @classmethod
    def of(cls, scheduler: Scheduler) -> "PoolState":
        manager = scheduler.block_manager
        tokens = final = slots = entries = 0
        for group in scheduler.running.values():
            for seq in group.live:
                held = len(seq.block_table) * manager.block_size
                tokens += seq.num_computed_tokens
                final += min(held, group.max_len)
                slots += held
                entries += len(seq.block_table)
        used = manager.num_blocks - len(manager.free_blocks)
        running = len(scheduler.running)
        return cls(tokens, final - tokens, slots - final, used, entries, running)


def serve_paged(
    lengths: Lengths, block_size: int = 16, width: int = 1,
    likely: list[Logprobs] | None = None) -> dict[str, float]:
    """Serve at full load; the figures of `serve_contiguous`, and percent of blocks
    saved.

    Every request has `width` samples. With `likely`, a model's most likely tokens at
    some positions, it has as many beams, and each of them gets those of a random
    position.
    """
    num_blocks = SLOTS // block_size
    # Groups are swapped, as their sequences share blocks; single ones are recomputed.
    num_swap_blocks = num_blocks if width > 1 else 0
    manager = BlockManager(num_blocks, block_size, False, num_swap_blocks)
    config = EngineConfig(max_num_seqs=4096)  # memory is the limit
    scheduler = Scheduler(config, manager)
    queue = zip(count(), cycle(lengths))
    choices = [dict(list(tokens.items())[: 2 * width]) for tokens in likely or ()]
    rng = random.Random(0)

    states: list[PoolState] = []
    finished = warm = 0
    while not states or finished < warm + len(lengths):
        while len(scheduler.unfinished) - len(scheduler.running) < 64:
            number, (prompt, output) = next(queue)
            group = make_group(prompt, output, width, beams=bool(likely))
            group.request_id = str(number)
            scheduler.unfinished[group.request_id] = group

        batch = scheduler.schedule()
        if not warm and finished > 2 * len(scheduler.running):
            warm = finished
        if warm and scheduler.stats.steps % 4 == 0:
            states.append(PoolState.of(scheduler))

        tokens = [0] * len(batch.receivers)
        logprobs = rng.choices(choices, k=len(tokens)) if choices else []
        stand_in = SimpleNamespace(
            read=tokens.copy, logprobs=dict(enumerate(logprobs)))
        scheduler.update(batch, stand_in)
        groups = {seq.group for seq in batch.receivers}
        finished += sum(not group.live for group in groups)

    average = PoolState(*(mean(values) for values in zip(*states, strict=True)))
    parts = {
        "tokens": average.tokens, "reserved": average.reserved,
        "internal": average.internal, "free": SLOTS - average.used_blocks * block_size}
    figures = {name: 100 * part / SLOTS for name, part in parts.items()}
    figures["running"] = average.running
    figures["saved"] = 100 * (1 - average.used_blocks / average.table_entries)
    return figures


def make_group(prompt: int, output: int, width: int, beams: bool) -> SequenceGroup:
    """A request with `prompt` tokens, all of them 0, that runs to its full length."""
    params = SamplingParams(
        n=width, max_tokens=output, ignore_eos=True,
        logprobs=2 * width if beams else None)
    search = BeamSearchParams(width, output, ignore_eos=True) if beams else None
    return SequenceGroup(
        prompt=None, prompt_token_ids=[0] * prompt, params=params, stop_token_ids=set(),
        max_model_len=LONGEST, tokenizer=None, beam_params=search)


# -- Figures 2, 13 and 15 --------------------------------------------------------------


def allocation(requests: int, seed: int = 0) -> Figures:
    """Figures 2 and 13: where the slots go, and how many requests run."""
    lengths = draw_lengths("ShareGPT", requests, seed)
    figures: Figures = {}
    for name, reserve in RESERVE.items():
        figures[name] = serve_contiguous(lengths, reserve)
    figures["nanopaged"] = serve_paged(lengths)
    return figures


def sharing(requests: int, seed: int = 0, widths: tuple[int, ...] = WIDTHS) -> Figures:
    """Figure 15: percent of blocks saved, by data set, kind and width."""
    figures: Figures = {}
    for name, divisor in (("Alpaca", 50), ("ShareGPT", 700)):
        many = draw_lengths(name, requests // 4 + 8, seed)
        fewer = draw_lengths(name, requests // 20 + 8, seed)
        real, likely = real_beams(name, requests // divisor + 4, seed, widths)
        samples = {str(n): serve_paged(many, width=n)["saved"] for n in widths}
        beams = {
            str(n): serve_paged(fewer, width=n, likely=likely)["saved"] for n in widths}
        figures[f"{name}, samples"] = samples
        figures[f"{name}, beams"] = beams
        figures[f"{name}, real beams"] = real
    return figures


def real_beams(
    name: str, count: int, seed: int, widths: tuple[int, ...]
) -> tuple[Figures, list[Logprobs]]:
    """Percent saved by the bundled model's own beam search; and its likely tokens.

    The model writes the prompts itself, so that it can go on.
    """
    with LLM(num_blocks=2048, enable_prefix_caching=False) as llm:
        lengths = draw_lengths(name, count, seed, llm.runner.max_model_len)
        texts = [
            SamplingParams(temperature=0.8, max_tokens=prompt, ignore_eos=True)
            for prompt, _ in lengths]
        outputs = llm.generate([[0]] * count, texts, use_tqdm=False)
        prompts: Any = [output.outputs[0].token_ids for output in outputs]

        saved: Figures = {}
        for width in widths:
            states: list[PoolState] = []

            def note(phase: str, batch: Any, states: list[PoolState] = states) -> None:
                if phase == "scheduled":
                    states.append(PoolState.of(llm.scheduler))

            observers(llm).append(note)
            params: Any = [
                BeamSearchParams(width, output, ignore_eos=True)
                for _, output in lengths]
            llm.generate(prompts, params, use_tqdm=False)
            observers(llm).remove(note)
            used = sum(state.used_blocks for state in states)
            saved[str(width)] = 100 * (
                1 - used / sum(state.table_entries for state in states))

        asked = SamplingParams(temperature=0.8, max_tokens=64, logprobs=2 * max(widths))
        outputs = llm.generate(prompts, asked, use_tqdm=False)
    likely = [row for output in outputs for row in output.outputs[0].logprobs or ()]
    return saved, likely


# -- Figures 18 and 19 -----------------------------------------------------------------


def waste_by_block_size(
    requests: int, seed: int = 0, block_sizes: tuple[int, ...] = BLOCK_SIZES
) -> Figures:
    """The memory side of Figure 18: what large blocks waste."""
    figures: Figures = {}
    for name in DATA_SETS:
        lengths = draw_lengths(name, requests, seed)
        figures[name] = {str(size): serve_paged(lengths, size) for size in block_sizes}
    return figures


def preemption_by_block_size(
    requests: int, repeats: int = 3, seed: int = 0,
    block_sizes: tuple[int, ...] = BLOCK_SIZES) -> Figures:
    """The speed side of Figure 18, and Figure 19: the bundled model in a pool too
    small.

    Tokens/s by mode of preemption, and the seconds to bring one sequence back. All
    engines take turns, so that whatever else the machine does slows them all.
    """
    figures: Figures = {"recompute": {}, "swap": {}}
    engines: list[tuple[LLM, Figures]] = []
    for size in block_sizes:
        for mode, runs in figures.items():
            llm = LLM(
                block_size=size, num_blocks=SMALL_POOL // size, swap_space=0.02,
                preemption_mode=mode, enable_prefix_caching=False)
            llm.runner.swap_space.zero_()  # faults its pages in
            run: Figures = {"runs": [], "seconds_back": []}
            runs[str(size)] = run
            engines.append((llm, run))

    rng = random.Random(seed)
    lengths = draw_lengths("Alpaca", requests // 100 + 6, seed, SMALL_POOL)
    vocab_size = llm.model_config.vocab_size
    prompts: Any = [[rng.randrange(vocab_size) for _ in range(n)] for n, _ in lengths]
    params: Any = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in lengths
    ]
    tokens = sum(output for _, output in lengths)
    for llm, _ in engines:  # warm-up
        llm.generate(prompts[:4], params[:4], use_tqdm=False)
    for _ in range(repeats):
        for llm, run in engines:
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            run["runs"].append(tokens / (time.perf_counter() - began))
            run["seconds_back"].append(seconds_back(llm))

    for llm, run in engines:
        stats = llm.stats()
        preemptions = stats.preemptions_recompute + stats.preemptions_swap
        run["preemptions"] = preemptions / repeats
        run["tokens_per_s"] = median(run["runs"])
        run["back_s"] = min(run["seconds_back"])
        llm.shutdown()
    return figures


def seconds_back(llm: LLM) -> float:
    """How long it takes until a preempted sequence of 256 tokens is where it was.

    Recompute is one prefill. Swap is the way out and the way in, as steps that do
    nothing but move blocks.
    """
    runner = llm.runner
    num_blocks = -(-PREEMPTED // llm.config.block_size)
    out = [(block, runner.num_blocks + block) for block in range(num_blocks)]
    back = [(target, source) for source, target in out]
    one_token = SamplingParams(temperature=0, max_tokens=1)

    def recompute() -> None:
        llm.generate([[0] * PREEMPTED], one_token, use_tqdm=False)

    def swap() -> None:
        runner.execute(Batch(swaps_out=out))
        runner.execute(Batch(swaps_in=back))

    bring_back: Callable[[], None] = swap
    if llm.config.preemption_mode == "recompute":
        bring_back = recompute
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        bring_back()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


# -- as tables and plots ---------------------------------------------------------------

def tables(figures: Figures) -> list[tuple[str, Figures]]:
    """A caption and {row: {column: number}} for every figure."""
    slots: Figures = {}
    for name, run in figures["allocation"].items():
        slots[name] = {
            "tokens, %": run["tokens"], "the paper's": PAPER_TOKENS[name],
            "reserved": run["reserved"], "internal": run["internal"],
            "rounding": run.get("rounding", 0.0), "free": run["free"],
            "requests": run["running"], "the paper's requests": PAPER_RUNNING[name]}

    saved: Figures = {}
    for name, by_width in figures["sharing"].items():
        paper = PAPER_SAVED[name.replace("real ", "")]
        saved[name] = {}
        for width, percent in by_width.items():
            saved[name][width] = percent
            saved[name][f"the paper's {width}"] = paper.get(width, "")

    waste: Figures = {}
    speed: Figures = {}
    again = figures["preemption"]["recompute"]
    swap = figures["preemption"]["swap"]
    for size in again:
        row = {}
        for name, runs in figures["waste"].items():
            row[f"{name}: waste, %"] = 100 - runs[size]["tokens"]
            row[f"{name}: requests"] = runs[size]["running"]
        waste[f"blocks of {size}"] = row | {"tokens/s": again[size]["tokens_per_s"]}
        speed[f"blocks of {size}"] = {
            "recompute, ms": again[size]["back_s"] * 1e3,
            "swap, ms": swap[size]["back_s"] * 1e3,
            "recompute, tokens/s": again[size]["tokens_per_s"],
            "swap, tokens/s": swap[size]["tokens_per_s"],
            "preemptions": swap[size]["preemptions"]}
    rows = (slots, saved, waste, speed)
    return list(zip(CAPTIONS.values(), rows, strict=True))


def draw_plots(figures: Figures, folder: Path) -> None:
    """Write the figures as SVG files."""
    from nanopaged.tour.memory_plots import draw

    draw(figures, folder)
