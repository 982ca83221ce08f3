"""Figures as SVG: bars, stacked bars and lines, with their numbers as a table.

`figures.css` has the colours, for light and for dark pages. Colour is never alone: bars
carry their numbers, lines have markers of their own, and the table below a figure has
all numbers.
"""

from collections.abc import Iterable, Mapping
from importlib.resources import files
from math import floor, log, log10
from typing import TypeAlias

from nanopaged.tour.guide.markdown import Html
from nanopaged.tour.page import TEMPLATES

Rows: TypeAlias = Mapping[str, Mapping[str, float]]  # name -> {column: number}

WIDTH, HEIGHT = 480, 300  # readable on a telephone
LEFT, TOP, RIGHT, BOTTOM = 46, 52, 468, 254  # of the plot in it
PAPER = "the paper's"
LEAST_BAR = 18  # a lower bar has no room for its number
LEAST_STEP = 34  # between two labels of the x axis
SQUARE = "M-4 -4 h8 v8 h-8 z"
MARKERS = (
    "M-4 0 a4 4 0 0 0 8 0 a4 4 0 0 0 -8 0", SQUARE, "M0 -5 l5 9 h-10 z",
    "M0 5 l5 -9 h-10 z")
DIAMOND = "M0 -5 l5 5 l-5 5 l-5 -5 z"


def bars(title: str, rows: Rows, caption: str, paper: Rows, unit: str = "",
         stacked: bool = False) -> Html:
    """A group of bars for every row, one for each column; diamonds for the paper's.

    stacked: the bars of a row stand on top of each other. The first row has all
    columns, and others may lack some.
    """
    add = sum if stacked else max
    plot = Plot(max(add(row.values()) for row in [*rows.values(), *paper.values()]))
    columns = list(next(iter(rows.values())))
    step = (RIGHT - LEFT) / len(rows)
    width = 60 if stacked else min(60, step * 0.8 / len(columns))
    for number, (name, row) in enumerate(rows.items()):
        x = LEFT + step * (number + 0.5)
        first, _, rest = name.partition(" ")
        plot.text(first, x, BOTTOM + 16)
        plot.text(rest, x, BOTTOM + 30)
        if not stacked:
            x -= (len(columns) - 1) / 2 * width
        low = 0.0
        for index, column in enumerate(columns):
            value = row.get(column, 0.0)
            plot.bar(x, width - 4, low, low + value, index)
            if column in paper.get(name, {}):
                plot.draw(DIAMOND, "paper", x, plot.y(paper[name][column]))
            if stacked:
                low += value
            else:
                x += width
    plot.legend(columns if len(columns) > 1 else [], [SQUARE] * len(columns))
    return plot.figure(title, rows, caption, paper, unit)


def lines(title: str, rows: Rows, caption: str, x_label: str, unit: str = "",
          top: float = 0) -> Html:
    """A line for every row, over its columns, which are numbers; it ends at `top`.

    If every column is the same multiple of the one before (2 or more), the axis is
    logarithmic, and says so. The first row has all columns.
    """
    plot = Plot(top or max(max(row.values()) for row in rows.values()))
    columns = list(next(iter(rows.values())))
    numbers = [float(column) for column in columns]
    factors = {high / low for low, high in zip(numbers, numbers[1:], strict=False)}
    if len(factors) == 1 and min(factors) >= 2:
        x_label += f" (each is {factors.pop():g} times the one before)"
        numbers = [log(number) for number in numbers]
    scale = (RIGHT - LEFT - 32) / (numbers[-1] - numbers[0])
    places = {}
    labelled = 0.0
    for column, number in zip(columns, numbers, strict=True):
        x = places[column] = LEFT + 16 + scale * (number - numbers[0])
        if x - labelled > LEAST_STEP:
            plot.text(column, x, BOTTOM + 16)
            labelled = x
    for index, row in enumerate(rows.values()):
        plot.line([(places[column], value) for column, value in row.items()], index)
    plot.text(x_label, (LEFT + RIGHT) / 2, HEIGHT - 8)
    plot.legend(rows, MARKERS)
    return plot.figure(title, rows, caption, {}, unit)


class Plot:
    """Shapes and texts, above a y axis from 0 to `top`, or to a rounder number."""

    def __init__(self, top: float) -> None:
        self.shapes: list[tuple[str, str, float, float]] = []
        self.texts: list[tuple[str, str, float, float]] = []
        scale = 10.0 ** floor(log10(top))
        steps = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)  # four parts divide them well
        self.top = next(scale * step for step in steps if scale * step >= top * 0.999)
        for quarter in range(5):
            value = self.top * quarter / 4
            self.draw(f"M0 0 H{RIGHT - LEFT}", "grid", LEFT, self.y(value))
            self.text(f"{value:,g}", LEFT - 6, self.y(value) + 4, "tick")

    def y(self, value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * value / self.top

    def draw(self, shape: str, kind: str, x: float = 0, y: float = 0) -> None:
        self.shapes.append((shape, kind, x, y))

    def text(self, text: str, x: float, y: float, kind: str = "label") -> None:
        self.texts.append((text, kind, x, y))

    def bar(self, x: float, width: float, low: float, high: float, series: int) -> None:
        """With its number in it, or above it if it stands alone and is too low."""
        height = self.y(low) - self.y(high)
        shape = f"M{-width / 2:.1f} 0 v{-height:.1f} h{width:.1f} v{height:.1f} z"
        self.draw(shape, f"series-{series}", x, self.y(low))
        if height > LEAST_BAR:
            self.text(f"{high - low:.3g}", x, self.y(low) - 4, "on-bar")
        elif height and not low:
            self.text(f"{high:.3g}", x, self.y(high) - 9)

    def line(self, points: list[tuple[float, float]], series: int) -> None:
        """A line with its markers; if it leaves the plot, up to the upper edge."""
        path = "M"
        before = points[0]
        for x, value in points:
            if value > self.top:
                share = (self.top - before[1]) / (value - before[1])
                x, value = before[0] + share * (x - before[0]), self.top
            else:
                self.draw(MARKERS[series], f"series-{series}", x, self.y(value))
            path += f" {x:.1f} {self.y(value):.1f}"
            before = x, value
            if value == self.top:
                break
        self.draw(path, f"line line-{series}")

    def legend(self, names: Iterable[str], markers: Iterable[str]) -> None:
        entries = [(name, marker, f"series-{index}") for index, (name, marker)
                   in enumerate(zip(names, markers, strict=False))]
        if any(kind == "paper" for _, kind, _, _ in self.shapes):
            entries.append((PAPER, DIAMOND, "paper"))
        x, y = 14.0, 12.0
        for name, marker, kind in entries:
            length = 34 + 7 * len(name)
            if x + length > WIDTH:
                x, y = 14.0, y + 19
            self.draw(marker, kind, x, y)
            self.text(name, x + 10, y + 5, "legend")
            x += length

    def figure(self, title: str, rows: Rows, caption: str, paper: Rows, unit: str
               ) -> Html:
        return Html(TEMPLATES.get_template("figure.html").render(
            plot=self, title=title, rows=rows, caption=caption, paper=paper, unit=unit,
            columns=list(next(iter(rows.values()))), width=WIDTH, height=HEIGHT))


def style() -> str:
    return files("nanopaged.tour.guide").joinpath("figures.css").read_text("utf-8")


def standalone(figure: str) -> str:
    """The picture in a figure, as an SVG file."""
    start, end = figure.index("<svg ") + 5, figure.index("</svg>")
    attributes, content = figure[start:end].split(">", 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" {attributes}>'
        f"<style>{style()}</style>{content}</svg>\n")
