"""The figures of `memory` as SVG files, readable on light and on dark pages."""

from pathlib import Path
from textwrap import fill
from typing import Any

from nanopaged.tour.reported import (
    CAPTIONS,
    PAPER_RUNNING,
    PAPER_SAVED,
    PAPER_TOKENS,
    PREEMPTED,
)

try:
    import matplotlib
except ImportError as error:
    raise ImportError("plots need matplotlib: pip install nanopaged[bench]") from error

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

INK = "#1f2328"
INK_AT_NIGHT = "#e6edf3"
ON_BARS = "#101010"
COLORS = ("#2da44e", "#54aeff", "#d4a72c")
SLOT_COLORS = {
    "tokens": ("token states", "#2da44e"),
    "reserved": ("reserved for later tokens", "#54aeff"),
    "internal": ("internal: never used", "#d4a72c"),
    "rounding": ("external: rounding to 2^k", "#e16f24"),
    "free": ("external: free", "#8c959f"),
}
DIAMOND: Any = {
    "marker": "D",
    "markersize": 5,
    "markeredgecolor": ON_BARS,
    "color": "#ffffff",
    "linestyle": "",
}
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nanopaged",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def draw(figures: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context(STYLE):
        draw_memory(figures["allocation"], figures["sharing"], folder)
        draw_running(figures["allocation"], folder)
        draw_block_sizes(figures["waste"], figures["preemption"], folder)
        draw_preemption(figures["preemption"], folder)


def draw_memory(
    allocation: dict[str, Any], sharing: dict[str, Any], folder: Path
) -> None:
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(9.6, 4.6), width_ratios=(2, 3)
    )
    draw_slots(left, allocation)

    widths = list(sharing["Alpaca, beams"])
    saved = {name: [by_width[n] for n in widths] for name, by_width in sharing.items()}
    paper = []
    for name in sharing:
        numbers = PAPER_SAVED[name.replace("real ", "")]
        paper.append([numbers.get(n) for n in widths])
    draw_bars(right, saved, paper, [f"{n} sequences" for n in widths], "%.0f")
    right.set(title="blocks saved by sharing, %", ylim=(0, 105))
    save(figure, folder / "memory.svg", "allocation", "sharing")


def draw_slots(axis: Any, allocation: dict[str, Any]) -> None:
    """Stacked bars: where the slots of the KV memory go."""
    places = range(len(allocation))
    bottom = [0.0] * len(allocation)
    for part, (label, color) in SLOT_COLORS.items():
        slots = [run.get(part, 0.0) for run in allocation.values()]
        bars = axis.bar(places, slots, 0.6, bottom, color=color, label=label)
        bottom = [low + height for low, height in zip(bottom, slots, strict=True)]
        if part == "tokens":
            axis.bar_label(bars, fmt="%.1f", label_type="center", color=ON_BARS)
    paper = [PAPER_TOKENS[name] for name in allocation]
    axis.plot(places, paper, label="token states in the paper", **DIAMOND)
    axis.set(title="KV memory, % of all slots", ylim=(0, 155), yticks=range(0, 101, 20))
    axis.set_xticks(places, [name.replace(" ", "\n") for name in allocation])
    axis.legend(loc="upper left")


def draw_running(allocation: dict[str, Any], folder: Path) -> None:
    figure, axis = pyplot.subplots(figsize=(6, 3.2))
    ours = {name: [run["running"]] for name, run in allocation.items()}
    paper = [[PAPER_RUNNING[name]] for name in allocation]
    draw_bars(axis, ours, paper, ["ours"], "%.1f")
    axis.set(title="requests in a batch")
    save(figure, folder / "running.svg", "allocation")


def draw_block_sizes(
    waste: dict[str, Any], preemption: dict[str, Any], folder: Path
) -> None:
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(9.6, 3.4))
    wasted = {}
    running = {}
    for name, runs in waste.items():
        wasted[name] = {size: 100 - run["tokens"] for size, run in runs.items()}
        running[name] = {size: run["running"] for size, run in runs.items()}
    recompute = preemption["recompute"].items()
    speed = {"Alpaca": {size: run["tokens_per_s"] for size, run in recompute}}
    draw_lines(left, "slots without a token, %", wasted)
    draw_lines(middle, "requests in a batch", running)
    draw_lines(right, "tokens/s", speed)
    save(figure, folder / "block_size.svg", "block size")


def draw_preemption(preemption: dict[str, Any], folder: Path) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 3.4))
    back = {}
    speed = {}
    for mode, runs in preemption.items():
        back[mode] = {size: 1e3 * run["back_s"] for size, run in runs.items()}
        speed[mode] = {size: run["tokens_per_s"] for size, run in runs.items()}
    draw_lines(left, f"ms for {PREEMPTED} tokens", back)
    draw_lines(right, "tokens/s", speed)
    save(figure, folder / "preemption.svg", "preemption")


def draw_bars(
    axis: Any,
    ours: dict[str, list[float]],
    paper: list[list[Any]],
    labels: list[str],
    style: str,
) -> None:
    """A group of bars for every name, and the paper's numbers as diamonds."""
    for i, label in enumerate(labels):
        places = [
            group + (i - (len(labels) - 1) / 2) * 0.28 for group in range(len(ours))
        ]
        heights = [values[i] for values in ours.values()]
        axis.bar(places, heights, 0.26, color=COLORS[i], label=label)
        for x, height in zip(places, heights, strict=True):
            axis.text(
                x, 0, style % height, color=ON_BARS, ha="center", va="bottom", size=7
            )
        numbers = [values[i] for values in paper]
        axis.plot(places, numbers, label="" if i else "the paper's", **DIAMOND)
    axis.set_xticks(range(len(ours)), [name.replace(", ", "\n") for name in ours])
    axis.legend(loc="upper left", ncols=2)


def draw_lines(axis: Any, title: str, lines: dict[str, dict[str, float]]) -> None:
    for color, (label, values) in zip(COLORS, lines.items(), strict=False):
        axis.plot(list(values), list(values.values()), "o-", color=color, label=label)
    axis.set(title=title, xlabel="block size", ylim=(0, None))
    axis.legend()


def save(figure: Any, path: Path, *captions: str) -> None:
    """With its captions below; a style sheet turns the ink light on dark pages."""
    width = int(16.5 * figure.get_figwidth())
    text = "\n".join(fill(CAPTIONS[caption], width) for caption in captions)
    figure.supxlabel(text, x=0.01, ha="left", fontsize=7.5)
    figure.savefig(path, transparent=True, metadata={"Date": None, "Title": text})
    pyplot.close(figure)

    rules = ""
    for key in ("fill", "stroke"):
        rules += f' [style*="{key}: {INK}"] {{ {key}: {INK_AT_NIGHT} !important }}'
    dark = f"@media (prefers-color-scheme: dark) {{{rules} }}</style>"
    path.write_text(path.read_text().replace("</style>", dark, 1))
