"""Figures as SVG: bars, stacked bars and lines, with their numbers as a table.

Here is where everything goes; `figure.html` draws it. `figures.css` has the colours,
for light and for dark pages. Colour is never alone: bars carry their numbers, lines
have markers of their own, and the table below a figure has all numbers.
"""

from collections.abc import Mapping
from importlib.resources import files
from math import ceil, floor, log10
from typing import Any, NamedTuple, TypeAlias

from nanopaged.tour.guide.markdown import Html
from nanopaged.tour.page import TEMPLATES

Rows: TypeAlias = Mapping[str, Mapping[str, Any]]  # name -> {column: number}

WIDTH, HEIGHT = 480, 300  # readable on a telephone
LEFT, TOP, RIGHT, BOTTOM = 46, 52, 468, 254  # of the plot in it
LEAST_STEP = 34  # between two labels of the x axis
MOST_WIDTH = 60  # of a bar
SQUARE = "M-4 -4 h8 v8 h-8 z"
DIAMOND = "M0 -5 l5 5 l-5 5 l-5 -5 z"
MARKERS = (  # of lines
    "M-4 0 a4 4 0 0 0 8 0 a4 4 0 0 0 -8 0", SQUARE, "M0 -5 l5 9 h-10 z",
    "M0 5 l5 -9 h-10 z")


class Figure(NamedTuple):
    title: str
    rows: Rows
    chart: Html = Html()


class Plot:
    """What is drawn over names at equal distances on the x axis, and above a y axis
    from 0 to `top`, or to a rounder number.
    """

    def __init__(self, names: list[str], top: float, x_label: str = "") -> None:
        scale = 10.0 ** floor(log10(top))
        steps = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)  # four parts divide them well
        self.top = next(scale * step for step in steps if scale * step >= top * 0.999)
        self.step = (RIGHT - LEFT) / len(names)
        places = [(self.x(number), name) for number, name in enumerate(names)]
        self.labels = places[:: ceil(LEAST_STEP / self.step)]
        self.x_label = x_label
        self.bar_width = 0.0
        self.bars: list[tuple[float, float, float, int]] = []  # x, low, value, series
        self.lines: list[list[tuple[float, float]]] = []
        self.markers: list[tuple[float, float, str, str]] = []
        self.legend: list[tuple[str, str, str]] = []

    def x(self, number: int) -> float:
        """The middle of the place of a name, in the units of the picture."""
        return LEFT + self.step * (number + 0.5)

    def y(self, value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * value / self.top

    def figure(self, title: str, rows: Rows, caption: str, unit: str) -> Figure:
        columns = dict.fromkeys(column for row in rows.values() for column in row)
        chart = TEMPLATES.get_template("figure.html").render(
            plot=self, title=title, rows=rows, caption=caption, unit=unit,
            columns=columns, width=WIDTH, height=HEIGHT,
            left=LEFT, top=TOP, right=RIGHT, bottom=BOTTOM)
        return Figure(title, rows, Html(chart))


def bars(title: str, rows: Rows, caption: str, paper: Rows, unit: str = "",
         stacked: bool = False) -> Figure:
    """A group of bars for every row, one for each column; diamonds for the paper's.

    stacked: the bars of a row stand on top of each other. The first row has all
    columns, and others may lack some.
    """
    add = sum if stacked else max
    top = max(add(row.values()) for row in [*rows.values(), *paper.values()])
    plot = Plot(list(rows), top)
    columns = list(next(iter(rows.values())))
    middle = (len(columns) - 1) / 2
    plot.bar_width = MOST_WIDTH
    if not stacked:
        plot.bar_width = min(MOST_WIDTH, 0.8 * plot.step / len(columns))
    beside = {}  # the numbers of ours and of the paper's
    for number, (name, row) in enumerate(rows.items()):
        beside[name] = {**row}
        low = 0.0
        for index, column in enumerate(columns):
            value = row.get(column, 0.0)
            x = plot.x(number)
            if not stacked:
                x += plot.bar_width * (index - middle)
            plot.bars.append((x, low, value, index))
            if stacked:
                low += value
            if column in paper.get(name, {}):
                measured = paper[name][column]
                beside[name][f"{column} (paper)"] = measured
                plot.markers.append((x, measured, "paper", DIAMOND))
    if len(columns) > 1:
        plot.legend = [(column, f"series-{index}", SQUARE)
                       for index, column in enumerate(columns)]
    plot.legend.append(("the paper's", "paper", DIAMOND))
    return plot.figure(title, beside, caption, unit)


def lines(title: str, rows: Rows, caption: str, x_label: str, unit: str = "",
          top: float = 0) -> Figure:
    """A line for every row, over its columns. What is above `top` is cut off. The first
    row has all columns, and others may lack the last ones.
    """
    columns = list(next(iter(rows.values())))
    top = top or max(max(row.values()) for row in rows.values())
    plot = Plot(columns, top, x_label)
    for index, (name, row) in enumerate(rows.items()):
        points = [(plot.x(number), value) for number, value in enumerate(row.values())]
        look = f"series-{index}", MARKERS[index]
        plot.lines.append(points)
        plot.legend.append((name, *look))
        plot.markers += [(x, y, *look) for x, y in points if y <= plot.top]
    return plot.figure(title, rows, caption, unit)


def style() -> str:
    return files("nanopaged.tour.guide").joinpath("figures.css").read_text("utf-8")


def standalone(figure: str) -> str:
    """The picture in a figure, as an SVG file."""
    start, end = figure.index("<svg ") + 5, figure.rindex("</svg>")
    attributes, content = figure[start:end].split(">", 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" {attributes}>'
        f"<style>{style()}</style>{content}</svg>\n")
