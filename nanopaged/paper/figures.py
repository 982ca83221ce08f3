"""The paper's Figures 2 and 12 to 18: its numbers, and ours by the simulation.

Each function simulates some seconds of a server, and returns what it found by figure.
`bench.py memory` prints and draws that. The tour shows results that were kept.
"""

import re
from collections.abc import Callable
from typing import Any

from nanopaged.paper.simulation import (
    SYSTEMS,
    Workload,
    latencies,
    likely_tokens,
    simulate,
    sustained,
)
from nanopaged.paper.workloads import draw_lengths
from nanopaged.tour.guide import paper
from nanopaged.tour.guide.figures import HEIGHT, WIDTH, Figure, Rows, bars, lines, style

USE: Rows = {  # Figure 2: percent of the slots that hold tokens
    "nanopaged": {"tokens": 96.3}, "Orca (oracle)": {"tokens": 38.2},
    "Orca (pow2)": {"tokens": 26.8}, "Orca (max)": {"tokens": 20.4}}
RUNNING: Rows = {  # Figure 13
    "nanopaged": {"requests": 30.4}, "Orca (oracle)": {"requests": 13.6},
    "Orca (pow2)": {"requests": 9.8}, "Orca (max)": {"requests": 7.0}}
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


def use_of_memory(seconds: float = paper.SECONDS) -> dict[str, Figure]:
    """Figures 2 and 13: a server with more requests than it can serve."""
    workload = Workload(draw_lengths("ShareGPT", 2000))
    labels = {"tokens": "tokens", "reserved": "reserved", "internal": "internal waste",
              "rounding": "external: rounding", "free": "free (in Orca: gaps)"}
    use, running = {}, {}
    for system in SYSTEMS:
        usage = simulate(system, workload, 8, seconds).usage
        use[system] = {label: usage[part] for part, label in labels.items()}
        running[system] = {"requests": usage["running"]}
    return {"memory": paper.use_of_memory(beside(use, USE), seconds),
            "running": paper.running(beside(running, RUNNING))}


def latency(seconds: float = paper.SECONDS) -> dict[str, Figure]:
    """Figure 12: latency by request rate, and the rates that are sustained."""
    workload = Workload(draw_lengths("ShareGPT", 2000))
    curves = {system: latencies(system, workload, 0.625, seconds)
              for system in SYSTEMS}
    rows = {system: {f"{rate:.2f}": value for rate, value in curve.items()}
            for system, curve in curves.items()}
    rates = {system: sustained(curve) for system, curve in curves.items()}
    table = {system: {"requests/s": rate, "nanopaged / this": rates["nanopaged"] / rate,
                      "the paper's": SUSTAINED.get(system, "")}
             for system, rate in rates.items()}
    title = f"Rates with a mean latency of at most {paper.LIMIT:g} s per token"
    return {"latency": paper.latency(rows, seconds), "rates": Figure(title, table)}


def gains(seconds: float = 60) -> dict[str, Figure]:
    """Figures 14, 16 and 17: what paging gains with other requests."""
    alpaca, sentences = (draw_lengths(name, 2000) for name in ("Alpaca", "WMT16"))
    chats = [(1024, min(1024, out)) for _, out in draw_lengths("ShareGPT", 2000)]
    likely = likely_tokens(6)
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
            sustained(latencies(system, workload, first_rate, its_seconds))
            for system in SYSTEMS[:2])
        rows[name] = {"times": ours / oracle}
    return {"gains": bars(
        "nanopaged's rate over Orca (oracle)'s (the paper's Figures 14, 16 and 17).",
        beside(rows, GAINS),
        "Simulated. The modelled GPU runs out of operations at 6,000 tokens/s, "
        "so beams gain less than in the paper. A shared prefix gains more, because the "
        "modelled steps cost the host nothing per sequence; if they cost 0.1 ms, it "
        "gains 1.8 and 3.6 times. In chats 1.7 times as many requests run, but they "
        "also read more K and V.", "times")}


def sharing(seconds: float = 10) -> dict[str, Figure]:
    """Figure 15: percent of blocks that sharing saves."""
    rows: dict[str, dict[str, float]] = {}
    for name, widths in SAVED.items():
        data_set, _, kind = name.partition(", ")
        # So few of these requests run at a time that it takes longer to see the mean.
        its_seconds = 10 * seconds if name == "ShareGPT, samples" else seconds
        rows[name] = {}
        for width in map(int, widths):
            likely = likely_tokens(width) if kind == "beams" else None
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


def beside(rows: Rows, paper: Rows) -> Rows:
    """Our rows, with the paper's numbers in more columns."""
    both: dict[str, Any] = {}
    for name, row in rows.items():
        both[name] = {**row}
        for column, number in paper.get(name, {}).items():
            both[name][f"{column} (paper)"] = number
    return both


def standalone(figure: str) -> str:
    """The picture in a figure, as an SVG file with its title."""
    start = figure.index("<svg ") + 5
    end = figure.rindex("</svg>")
    svg = str(figure)[start:end].replace('"0 0 ', '"0 -42 ', 1).replace(
        f" {HEIGHT}\"", f" {HEIGHT + 42}\"", 1)
    attributes, content = svg.split(">", 1)
    title, source = re.findall(r"<strong>(.*?) (\(.*?\))\.?</strong>", figure)[0]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" {attributes}>'
        f'<style>{style()}</style><text class="title" x="{WIDTH / 2:g}" y="-26">{title}'
        f'</text><text x="{WIDTH / 2:g}" y="-9">{source}</text>{content}</svg>\n')
