"""The paper's results on memory: its numbers, and ours.

Ours are in `results.json`. `python bench.py memory` simulates them (in the folder
`nanopaged/paper`), and they are the same on every machine.
"""

import json
from importlib.resources import files
from typing import Any

from nanopaged.tour.guide.figures import Figure, Rows, bars, lines

RESULTS: dict[str, Any] = json.loads(
    files("nanopaged.tour.guide").joinpath("results.json").read_text("utf-8"))
# What an H100 did, and what `bench.py serve` printed: from tests/results.
MEASURED: dict[str, Any] = json.loads(
    files("nanopaged.tour.guide").joinpath("measured.json").read_text("utf-8"))
SECONDS = 360  # that were simulated for the figures below

LIMIT = 0.1  # s: latency per token up to which a server sustains a rate
OVERLOAD = 4 * LIMIT  # such a server falls behind as long as requests come
RATE_STEP = 1.25
EVEN = "16 to 64"  # tokens in a block: section 7.3 finds recompute and swap even
OVERHEAD = "20 to 26"  # Figure 18a: percent, of the kernel that follows block tables
MEAN_LENGTHS = (161.31, 337.99)  # Figure 11, ShareGPT: tokens in, tokens out
HALF_ANSWERED = MEAN_LENGTHS[0] + MEAN_LENGTHS[1] / 2  # tokens of a mean chat


def use_of_memory(rows: Rows, seconds: float = SECONDS) -> Figure:
    return bars(
        "Where the slots go (the paper's Figure 2).", rows,
        f"Simulated for {seconds:g} s at full load, in percent. As in the paper, "
        "rounding up to a power of two is external waste; textbooks call it internal.",
        "% of the slots")


def running(rows: Rows) -> Figure:
    return bars("Requests running at the same time (the paper's Figure 13).", rows,
                "Simulated, at full load.", "requests")


def latency(rows: Rows, seconds: float = SECONDS) -> Figure:
    return lines(
        "Seconds per generated token, by request rate (the paper's Figure 12).", rows,
        "Simulated: a modelled A100, OPT-13B, ShareGPT's lengths, "
        f"{seconds / 60:g} minutes of requests. Only the memory differs. A line that "
        "leaves the figure at the top is a server in overload, whose queue grows as "
        "long as requests come.",
        f"requests/s (each rate is {RATE_STEP} times the one before)", OVERLOAD,
        "s per token")
