"""Figures as SVG: bars, stacked bars and lines, with their numbers as a table.

`figures.css` has the colours, for light and for dark pages. Colour is never alone: bars
carry their numbers, lines have markers of their own, and the table below a figure has
all numbers.
"""

import html
from collections.abc import Mapping, Sequence
from importlib.resources import files
from math import floor, log, log10
from typing import TypeAlias

from nanopaged.tour.guide.markdown import Html, fold, table

Rows: TypeAlias = Mapping[str, Mapping[str, float]]  # name -> {column: number}

WIDTH, HEIGHT = 480, 300  # readable on a telephone
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 52, 46  # margins around the plot
PAPER = "the paper's"
LEAST_BAR = 18  # a lower bar has no room for its number
LEAST_STEP = 34  # between two labels of the x axis
SQUARE = "M-4 -4 h8 v8 h-8 z"
SHAPES = (  # of the markers of lines
    "M-4 0 a4 4 0 0 0 8 0 a4 4 0 0 0 -8 0", SQUARE, "M0 -5 l5 9 h-10 z",
    "M0 5 l5 -9 h-10 z")
DIAMOND = "M0 -5 l5 5 l-5 5 l-5 -5 z"


def bars(title: str, rows: Rows, caption: str, paper: Rows | None = None,
         unit: str = "", stacked: bool = False) -> Html:
    """A group of bars for every row, one for each column; diamonds for the paper's.

    stacked: the bars of a row stand on top of each other. The first row has all
    columns, and others may lack some.
    """
    paper = paper or {}
    add = sum if stacked else max
    plot = Plot(max(add(row.values()) for row in [*rows.values(), *paper.values()]))
    columns = list(next(iter(rows.values())))
    step = (WIDTH - LEFT - RIGHT) / len(rows)
    width = 60 if stacked else min(60, step * 0.8 / len(columns))
    for number, (name, row) in enumerate(rows.items()):
        center = LEFT + step * (number + 0.5)
        first, _, rest = name.partition(" ")
        plot.text(center, HEIGHT - BOTTOM + 16, first)
        plot.text(center, HEIGHT - BOTTOM + 30, rest)
        low = 0.0
        for index, column in enumerate(columns):
            x = center
            if not stacked:
                x += (index - (len(columns) - 1) / 2) * width
            value = row.get(column, 0.0)
            plot.bar(x, width - 4, low, low + value, index)
            if theirs := paper.get(name, {}).get(column):
                plot.mark(x, plot.y(theirs), DIAMOND, "paper")
            low += value * stacked
    names = columns if len(columns) > 1 else []
    plot.legend([*names, PAPER] if paper else names, [SQUARE] * len(names))
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
    scale = (WIDTH - LEFT - RIGHT - 32) / (numbers[-1] - numbers[0])
    places = {column: LEFT + 16 + scale * (number - numbers[0])
              for column, number in zip(columns, numbers, strict=True)}
    last = 0.0
    for column, x in places.items():
        if x - last > LEAST_STEP:
            plot.text(x, HEIGHT - BOTTOM + 16, column)
            last = x
    for index, row in enumerate(rows.values()):
        plot.line([(places[column], value) for column, value in row.items()], index)
    plot.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label)
    plot.legend(list(rows), SHAPES)
    return plot.figure(title, rows, caption, {}, unit)


class Plot:
    """An SVG with a y axis from 0 to `top`, or to a rounder number above it."""

    def __init__(self, top: float) -> None:
        scale = 10.0 ** floor(log10(top))
        steps = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)  # four parts divide them well
        self.top = next(scale * step for step in steps if scale * step >= top * 0.999)
        self.svg = ""
        for quarter in range(5):
            value = self.top * quarter / 4
            self.svg += (
                f'<path class="grid" d="M{LEFT} {self.y(value):.1f}'
                f'H{WIDTH - RIGHT}"/>')
            self.text(LEFT - 6, self.y(value) + 4, f"{value:,g}", "tick")

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.top

    def text(self, x: float, y: float, text: str, kind: str = "label") -> None:
        self.svg += (
            f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{html.escape(text)}</text>')

    def mark(self, x: float, y: float, shape: str, kind: str) -> None:
        place = f"translate({x:.1f} {y:.1f})"
        self.svg += f'<path class="{kind}" d="{shape}" transform="{place}"/>'

    def bar(self, x: float, width: float, low: float, high: float, series: int
            ) -> None:
        """With its number in it, or above it if it stands alone and is too low."""
        height = self.y(low) - self.y(high)
        shape = f"M{-width / 2:.1f} 0 v{-height:.1f} h{width:.1f} v{height:.1f} z"
        self.mark(x, self.y(low), shape, f"series-{series}")
        if height > LEAST_BAR:
            self.text(x, self.y(low) - 4, f"{high - low:.3g}", "on-bar")
        elif height and not low:
            self.text(x, self.y(high) - 9, f"{high:.3g}")

    def line(self, points: list[tuple[float, float]], series: int) -> None:
        """A line with its markers; if it leaves the plot, up to the upper edge."""
        drawn: list[tuple[float, float]] = []
        for x, value in points:
            if value > self.top:
                before, low = drawn[-1]
                x = before + (x - before) * (self.top - low) / (value - low)
                drawn.append((x, self.top))
                break
            drawn.append((x, value))
            self.mark(x, self.y(value), SHAPES[series], f"series-{series}")
        path = " ".join(f"{x:.1f},{self.y(value):.1f}" for x, value in drawn)
        self.svg += f'<polyline class="line-{series}" points="{path}"/>'

    def legend(self, names: list[str], shapes: Sequence[str]) -> None:
        x, y = 14.0, 12.0
        for index, name in enumerate(names):
            length = 34 + 6.5 * len(name)
            if x + length > WIDTH:
                x, y = 14.0, y + 19
            if name == PAPER:
                self.mark(x, y, DIAMOND, "paper")
            else:
                self.mark(x, y, shapes[index], f"series-{index}")
            self.text(x + 10, y + 5, name, "legend")
            x += length

    def figure(self, title: str, rows: Rows, caption: str, paper: Rows, unit: str
               ) -> Html:
        columns = list(next(iter(rows.values())))
        body = []
        for name, row in rows.items():
            theirs = paper.get(name, {})
            body.append([html.escape(name)] + [
                (f"{row[column]:,.4g}" if column in row else "")
                + (f" (paper: {theirs[column]:g})" if column in theirs else "")
                for column in columns])
        numbers = fold(f"The numbers, in {unit}" if unit else "The numbers",
                       table(["", *map(html.escape, columns)], body))
        return Html(
            "<figure><figcaption><strong>{title}</strong> {caption}</figcaption>\n"
            '<svg class="plot" viewBox="0 0 {width} {height}" role="img" '
            'aria-label="{title}">{svg}</svg>\n{numbers}</figure>').format(
                title=title, caption=caption, width=WIDTH, height=HEIGHT,
                svg=Html(self.svg), numbers=numbers)


def style() -> str:
    return files("nanopaged.tour.guide").joinpath("figures.css").read_text("utf-8")


def standalone(figure: str) -> str:
    """The picture in a figure, as an SVG file."""
    start, end = figure.index("<svg ") + 5, figure.index("</svg>")
    attributes, content = figure[start:end].split(">", 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" {attributes}>'
        f"<style>{style()}</style>{content}</svg>\n")
