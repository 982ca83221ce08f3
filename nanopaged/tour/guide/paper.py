"""The paper's figures, for the tour: its Figures 2, 13, 15, 16, 18 and 19.

Most come from the simulations in `nanopaged.tour.memory`, with fewer requests.
"""

from nanopaged import SamplingParams
from nanopaged.tour import kv, memory
from nanopaged.tour.guide import figures
from nanopaged.tour.guide.claims import RATE
from nanopaged.tour.guide.lab import SPEECH, Values, engine
from nanopaged.tour.memory import WIDTHS
from nanopaged.tour.reported import PAPER_RUNNING, PAPER_SAVED, PAPER_TOKENS, PREEMPTED
from nanopaged.tour.workloads import DATA_SETS, LONGEST, SLOTS, draw_lengths

REQUESTS = 300  # in the simulations of memory: as many as the paper's figures need
SIZES = (1, 4, 16, 64, 256)  # of blocks
# For the model of preemption: the bus of an A100, by its data sheet, and what it takes
# to start a copy, about (an assumption).
BUS = 32e9  # bytes/s: PCIe 4.0 with 16 lanes
COPY_S = 5e-6
OPT_PARAMETERS = 13e9
PAPER_GAINS = {80: 1.67, 341: 3.58}  # its Figure 16: shared tokens -> throughput


def uses_of_memory() -> Values:
    """Figures 2 and 13: where the slots go, and how many requests run."""
    measured = memory.allocation(REQUESTS)
    parts = {"tokens": "tokens", "reserved": "reserved for later",
             "internal": "internal waste", "rounding": "external: rounding",
             "free": "external: gaps", "unused": "unused blocks"}
    # Any block is as good as any other, so what is free is no gap.
    measured["nanopaged"]["unused"] = measured["nanopaged"].pop("free")
    slots = {name: {label: run.get(part, 0.0) for part, label in parts.items()}
             for name, run in measured.items()}
    running = {name: {"requests": run["running"]} for name, run in measured.items()}
    paper = {name: {"requests": number}
             for name, number in PAPER_RUNNING.items()}
    safe = measured["Orca (max)"]
    oracle = measured["Orca (oracle)"]
    paged = measured["nanopaged"]
    lengths = DATA_SETS["ShareGPT"]
    return {
        "figure_waste": figures.stacked(
            "Where the slots go (the paper's Figure 2).", slots,
            "Simulated: Orca's three policies, with a buddy allocator. The last bar is "
            "the engine's own scheduler and block manager, with a stand-in for the "
            "model.", PAPER_TOKENS),
        "figure_running": figures.bars(
            "Requests that run at a time (the paper's Figure 13).", running,
            "From the same simulation.", paper),
        "slots": f"{SLOTS:,}",
        "longest": f"{LONGEST:,}",
        "mean_in": f"{lengths.prompt.mean:.0f}",
        "mean_out": f"{lengths.output.mean:.0f}",
        "requests": REQUESTS,
        "max_tokens_share": f"{safe['tokens']:.0f}",
        "max_internal": f"{safe['internal']:.0f}",
        "oracle_share": f"{oracle['tokens']:.0f}",
        "oracle_reserved": f"{oracle['reserved']:.0f}",
        "oracle_external": f"{oracle['rounding'] + oracle['free']:.0f}",
        "paged_share": f"{paged['tokens']:.0f}",
        "more": f"{paged['running'] / safe['running']:.1f}",
    }


def paper_gains() -> Values:
    """What the paper gained by sharing a prefix (its Figure 16)."""
    (short, short_gain), (long, long_gain) = PAPER_GAINS.items()
    return {
        "paper_short_tokens": short, "paper_short_gain": short_gain,
        "paper_long_tokens": long, "paper_long_gain": long_gain,
    }


def sharing() -> tuple[figures.Rows, dict[str, dict[str, float]]]:
    """Percent of the blocks that sharing saves, and what the paper found.

    As in the paper, where both have the same widths: 2, 4 and 6, or the two ends.
    """
    with engine(block_size=16, num_blocks=64) as llm:
        params = SamplingParams(max_tokens=64, seed=0, logprobs=2 * max(WIDTHS))
        outputs = llm.generate(["ROMEO:\n", SPEECH], params, use_tqdm=False)
    likely = [row for output in outputs for row in output.outputs[0].logprobs or ()]

    saved: dict[str, dict[str, float]] = {}
    paper: dict[str, dict[str, float]] = {}
    for name, by_width in PAPER_SAVED.items():
        data_set, _, kind = name.partition(", ")
        choices = likely if kind == "beams" else None
        lengths = draw_lengths(data_set, 8 if choices else 48, seed=0)
        saved[name], paper[name] = {}, {}
        for width, percent in by_width.items():
            served = memory.serve_paged(lengths, width=int(width), likely=choices)
            saved[name][f"{width} sequences"] = served["saved"]
            paper[name][f"{width} sequences"] = percent
    return saved, paper


def costs_of_preemption() -> Values:
    """Figure 19: modelled for a large model on a GPU, and measured here."""
    modelled, back = modelled_milliseconds(SIZES), milliseconds_back(SIZES)
    return {
        "model_swap": f"{modelled['swap']['16']:.0f}",
        "model_recompute": f"{modelled['recompute']['16']:.0f}",
        "back_ratio": f"{back['recompute']['16'] / back['swap']['16']:.0f}",
        "preempted": PREEMPTED,
        "copy_us": f"{COPY_S * 1e6:g}",
        "figure_model": figures.lines(
            "Modelled: milliseconds to bring a preempted sequence back, by block size "
            "(the paper's Figure 19).", modelled,
            "These are lower bounds, for OPT-13B on an A100. Recompute: "
            f"{RATE / 1e12:g} TFLOP/s. Swap: all blocks out and in again, at "
            f"{BUS / 1e9:g} GB/s, and {COPY_S * 1e6:g} microseconds to start the copy "
            "of a block's K or V in a layer.",
            "tokens in a block", "ms"),
        "figure_back": figures.lines(
            "Milliseconds to bring a preempted sequence back, by block size (after the "
            "paper's Figure 19).", back,
            "Measured on one core of the machine that made this page, with the "
            "bundled model.",
            "tokens in a block", "ms"),
    }


def costs_of_block_sizes() -> Values:
    """Figure 18, its memory side: what large blocks waste."""
    waste = memory.waste_by_block_size(REQUESTS, block_sizes=SIZES)
    wasted: dict[str, dict[str, float]] = {}
    running: dict[str, dict[str, float]] = {}
    for name, by_size in waste.items():
        wasted[name] = {size: 100 - run["tokens"] for size, run in by_size.items()}
        running[name] = {size: run["running"] for size, run in by_size.items()}
    small, large = "16", "256"
    return {
        "small_block": small,
        "large_block": large,
        "least_waste": f"{wasted['ShareGPT']['1']:.3g}",
        "small_waste": f"{wasted['Alpaca'][small]:.0f}",
        "large_waste": f"{wasted['Alpaca'][large]:.0f}",
        "figure_waste": figures.lines(
            "Slots without a token, by block size (the memory side of the paper's "
            "Figure 18).", wasted,
            "The engine's scheduler and block manager at full load.",
            "tokens in a block", "%"),
        "figure_running": figures.lines(
            "Requests that run at a time, by block size.", running,
            "From the same simulation.", "tokens in a block", "requests"),
    }


def milliseconds_back(block_sizes: tuple[int, ...]) -> figures.Rows:
    """How long it takes to bring back a sequence, by mode and block size."""
    rows: dict[str, dict[str, float]] = {"recompute": {}, "swap": {}}
    for mode, row in rows.items():
        for size in block_sizes:
            with engine(block_size=size, num_blocks=2 * PREEMPTED // size,
                        max_num_batched_tokens=2 * PREEMPTED, swap_space=0.02,
                        preemption_mode=mode, enable_prefix_caching=False) as llm:
                llm.runner.swap_space.zero_()  # faults its pages in
                row[str(size)] = 1e3 * memory.seconds_back(llm)
    return rows


def modelled_milliseconds(block_sizes: tuple[int, ...]) -> figures.Rows:
    """The same for a large model on a GPU, from counts and data sheets."""
    shape = kv.MODELS["OPT-13B"]
    tokens = PREEMPTED
    recompute_s = 2 * OPT_PARAMETERS * tokens / RATE
    rows: dict[str, dict[str, float]] = {"recompute": {}, "swap": {}}
    for size in block_sizes:
        num_copies = 2 * shape.layers * -(-tokens // size)
        swap_s = num_copies * COPY_S + shape.total(tokens, seqs=1) / BUS
        rows["recompute"][str(size)] = 1e3 * recompute_s
        rows["swap"][str(size)] = 1e3 * 2 * swap_s
    return rows
