"""The paper's Figures 2 and 12 to 18: its numbers, and ours by `nanopaged.tour.memory`.

Each function simulates some seconds of a server, and returns what it found by figure.
`bench.py memory` prints and draws that, and the tour shows it.
"""

from collections.abc import Callable
from functools import cache

from nanopaged.tour import memory
from nanopaged.tour.guide.figures import Figure, Rows, bars, beside, lines
from nanopaged.tour.guide.lab import Values
from nanopaged.tour.memory import SYSTEMS, Workload, simulate, sustained
from nanopaged.tour.workloads import draw_lengths

USE: Rows = {  # Figure 2: percent of the slots that hold tokens
    "nanopaged": {"tokens": 96.3}, "Orca (oracle)": {"tokens": 38.2},
    "Orca (pow2)": {"tokens": 26.8}, "Orca (max)": {"tokens": 20.4}}
RUNNING: Rows = {  # Figure 13
    "nanopaged": {"requests": 30.4}, "Orca (oracle)": {"requests": 13.6},
    "Orca (pow2)": {"requests": 9.8}, "Orca (max)": {"requests": 7.0}}
EVEN = "16 to 64"  # tokens in a block: section 7.3 finds recompute and swap even
OVERHEAD = "20 to 26"  # Figure 18a: percent, of the kernel that follows block tables
SUSTAINED = {"Orca (oracle)": "1.7 to 2.7", "Orca (max)": "2.7 to 8"}  # Figure 12
GAINS: Rows = {  # Figures 14, 16 and 17
    "Alpaca, 1 sample": {"times": 1.3}, "Alpaca, 6 beams": {"times": 2.3},
    "WMT16, prefix 80": {"times": 1.67}, "WMT16, prefix 341": {"times": 3.58},
    "ShareGPT, chat": {"times": 2.0}}
SAVED: Rows = {  # Figure 15, by sequences per request; for ShareGPT only the two ends
    "Alpaca, samples": {"2": 6.1, "4": 8.5, "6": 9.8},
    "Alpaca, beams": {"2": 37.6, "4": 53.1, "6": 55.2},
    "ShareGPT, samples": {"2": 16.2, "6": 30.5},
    "ShareGPT, beams": {"2": 44.3, "6": 66.3}}


@cache  # two chapters show it
def use_of_memory(seconds: float = 360) -> dict[str, Figure]:
    """Figures 2 and 13: a server with more requests than it can serve."""
    workload = Workload(draw_lengths("ShareGPT", 2000))
    labels = {"tokens": "tokens", "reserved": "reserved", "internal": "internal waste",
              "rounding": "external: rounding", "free": "free (in Orca: gaps)"}
    use, running = {}, {}
    for system in SYSTEMS:
        usage = simulate(system, workload, 8, seconds).usage
        use[system] = {label: usage[part] for part, label in labels.items()}
        running[system] = {"requests": usage["running"]}
    return {
        "memory": bars(
            "Where the slots go (the paper's Figure 2).", use,
            f"Simulated for {seconds:g} s at full load, in percent. As in the paper, "
            "rounding up to a power of two is external waste; textbooks call it "
            "internal.", USE,
            "% of the slots"),
        "running": bars(
            "Requests running at the same time (the paper's Figure 13).", running,
            "Simulated, at full load.", RUNNING, "requests")}


def latency(seconds: float = 360) -> dict[str, Figure]:
    """Figure 12: latency by request rate, and the rates that are sustained."""
    workload = Workload(draw_lengths("ShareGPT", 2000))
    curves = {system: memory.latencies(system, workload, 0.625, seconds)
              for system in SYSTEMS}
    rows = {system: {f"{rate:.2f}": value for rate, value in curve.items()}
            for system, curve in curves.items()}
    figure = lines(
        "Seconds per generated token, by request rate (the paper's Figure 12).", rows,
        "Simulated: a modelled A100, OPT-13B, ShareGPT's lengths, "
        f"{seconds / 60:g} minutes of requests. Only the memory differs. A line that "
        "leaves the figure at the top is a server in overload, whose queue grows as "
        "long as requests come.", "requests/s (each rate is "
        f"{memory.RATE_STEP} times the one before)", memory.OVERLOAD, "s per token")
    rates = {system: sustained(curve) for system, curve in curves.items()}
    table = {system: {"requests/s": rate, "nanopaged / this": rates["nanopaged"] / rate,
                      "the paper's": SUSTAINED.get(system, "")}
             for system, rate in rates.items()}
    title = f"Rates with a mean latency of at most {memory.LIMIT:g} s per token"
    return {"latency": figure, "rates": Figure(title, table)}


def gains(seconds: float = 60) -> dict[str, Figure]:
    """Figures 14, 16 and 17: what paging gains with other requests."""
    alpaca, sentences = (draw_lengths(name, 2000) for name in ("Alpaca", "WMT16"))
    chats = [(1024, min(1024, out)) for _, out in draw_lengths("ShareGPT", 2000)]
    likely = memory.likely_tokens(6)
    workloads = {  # and the rate to begin with, and the seconds
        "Alpaca, 1 sample": (Workload(alpaca), 32, seconds),
        "Alpaca, 6 samples": (Workload(alpaca, width=6), 5, seconds),
        "Alpaca, 6 beams": (Workload(alpaca, width=6, likely=likely), 7, seconds / 2),
        "WMT16, prefix 80": (Workload(sentences, prefix=80), 20, seconds),
        "WMT16, prefix 341": (Workload(sentences, prefix=341), 8, seconds),
        "ShareGPT, chat": (Workload(chats), 0.4, 10 * seconds)}
    rows = {}
    for name, (workload, first_rate, its_seconds) in workloads.items():
        ours, oracle = (
            sustained(memory.latencies(system, workload, first_rate, its_seconds))
            for system in SYSTEMS[:2])
        rows[name] = {"times": ours / oracle}
    return {"gains": bars(
        "nanopaged's rate over Orca (oracle)'s (the paper's Figures 14, 16 and 17).",
        rows, "Simulated. The modelled GPU runs out of operations at 6,000 tokens/s, "
        "so beams gain less than in the paper. A shared prefix gains more, because the "
        "modelled steps cost the host nothing per sequence; if they cost 0.1 ms, it "
        "gains 1.8 and 3.6 times. In chats 1.7 times as many requests run, but they "
        "also read more K and V.", GAINS, "times")}


def sharing(seconds: float = 10) -> dict[str, Figure]:
    """Figure 15: percent of blocks that sharing saves."""
    rows: dict[str, dict[str, float]] = {}
    for name, widths in SAVED.items():
        data_set, _, kind = name.partition(", ")
        # So few of these requests run at a time that it takes longer to see the mean.
        its_seconds = 10 * seconds if name == "ShareGPT, samples" else seconds
        rows[name] = {}
        for width in map(int, widths):
            likely = memory.likely_tokens(width) if kind == "beams" else None
            workload = Workload(draw_lengths(data_set, 500), 0, width, likely)
            usage = simulate("nanopaged", workload, 30, its_seconds).usage
            rows[name][str(width)] = usage["saved"]
    return {"sharing": Figure(
        "Percent of blocks saved by sharing, by sequences in a request (Figure 15)",
        beside(rows, SAVED))}


def block_sizes(seconds: float = 90) -> dict[str, Figure]:
    """Figure 18, its memory side: what large blocks waste."""
    rows: dict[str, dict[str, float]] = {}
    for name, rate, its_seconds in (
            ("ShareGPT", 8, seconds), ("Alpaca", 120, seconds / 6)):
        workload = Workload(draw_lengths(name, 2000))
        rows[name] = {}
        for size in (1, 4, 16, 64, 256):
            usage = simulate("nanopaged", workload, rate, its_seconds, size).usage
            rows[name][str(size)] = 100 - usage["tokens"]
    return {"blocks": lines(
        "Slots without a token, by block size (after the paper's Figure 18).", rows,
        f"Simulated for {seconds:g} s at full load, in percent, free blocks included.",
        "tokens in a block (each size is four times the one before)",
        y_label="% of the slots")}


FIGURES: dict[str, Callable[..., dict[str, Figure]]] = {
    "memory": use_of_memory, "latency": latency, "gains": gains, "sharing": sharing,
    "blocks": block_sizes}


def costs_of_preemption() -> Values:
    """What it costs to bring 256 tokens of OPT-13B back (after the paper's Figure 19).
    """
    tokens, layers, bus = 256, 40, 32e9  # bytes/s: PCIe 4.0 with 16 lanes
    copy_s = 10e-6  # to start a copy, by our assumption
    num_bytes = tokens * memory.TOKEN_BYTES
    recompute_s = 2 * memory.PARAMETERS * tokens / memory.RATE
    swap_s = 2 * num_bytes / bus
    most_copies = 2 * 2 * layers * tokens  # out and in, K and V, blocks of one token
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    times = {"swap": {str(size): 1000 * (swap_s + copy_s * most_copies / size)
                      for size in sizes},
             "recompute": {str(size): 1000 * recompute_s for size in sizes}}
    return {"even": EVEN, "bus": bus, "preempted": tokens, "layers": layers,
            "bytes": num_bytes, "recompute_s": recompute_s, "swap_s": swap_s,
            "copy_s": copy_s, "most_copies": most_copies, "preemption": lines(
                "Milliseconds to bring a sequence back, by block size.", times,
                f"Calculated: {tokens} tokens of OPT-13B on the modelled A100.",
                "tokens in a block (twice as many each time)", 150, "ms")}
