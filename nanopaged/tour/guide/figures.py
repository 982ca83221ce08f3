"""Figures as SVG: stacked bars and lines, with their numbers as a table.

This module decides where everything goes; `figure.html` draws it. `figures.css` has the
colours, for light and for dark pages. Colour is never the only sign: bars carry their
numbers, lines have markers of their own, and the table below a figure has all numbers.
"""

from collections.abc import Iterable, Mapping
from importlib.resources import files
from math import ceil, floor, log10
from typing import Any, NamedTuple, TypeAlias

from nanopaged.tour.guide.markdown import Html
from nanopaged.tour.page import TEMPLATES

Rows: TypeAlias = Mapping[str, Mapping[str, Any]]  # name -> {column: number}
Look: TypeAlias = tuple[str, str]  # a class of the style, and a shape

WIDTH = 480  # readable on a telephone
HEIGHT = 300
LEFT = 46  # of the plot in the picture
RIGHT = 468
TOP = 52
BOTTOM = 254
LEAST_STEP = 34  # between two labels of the x axis
BAR_WIDTH = 56
ROUND = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)  # four parts divide these well
CIRCLE = "M-4 0 a4 4 0 0 0 8 0 a4 4 0 0 0 -8 0"
SQUARE = "M-4 -4 h8 v8 h-8 z"
UP = "M0 -5 l5 9 h-10 z"
DOWN = "M0 5 l5 -9 h-10 z"
PAPER = "paper", "M0 -5 l5 5 l-5 5 l-5 -5 z"  # a diamond
MARKERS = (CIRCLE, SQUARE, UP, DOWN)  # of lines


class Figure(NamedTuple):
    title: str
    rows: Rows
    chart: Html = Html()


class Plot:
    """What is drawn. An x is the number of a place on the x axis, and a y is a value on
    the y axis, which goes from 0 to `top`, or to a rounder number.
    """

    def __init__(self, names: Iterable[str], top: float, x_label: str = "",
                 y_label: str = "") -> None:
        scale = 10.0 ** floor(log10(top))
        tops = [scale * step for step in ROUND]
        self.top = next(each for each in tops if each >= 0.999 * top)
        places = list(enumerate(names))
        self.step = (RIGHT - LEFT) / len(places)
        every = ceil(LEAST_STEP / self.step)
        self.labels = places[::every]
        self.x_label, self.y_label = x_label, y_label
        self.bars: list[tuple[int, float, float, int]] = []  # x, low, value, series
        self.lines: list[list[tuple[int, float]]] = []
        self.markers: list[tuple[float, float, Look]] = []
        self.legend: dict[str, Look] = {}

    def x(self, number: float) -> float:
        """Where a place is in the picture: its middle."""
        return LEFT + self.step * (number + 0.5)

    def y(self, value: float) -> float:
        share = value / self.top
        return BOTTOM - (BOTTOM - TOP) * share

    def figure(self, title: str, rows: Rows, caption: str) -> Figure:
        template = TEMPLATES.get_template("figure.html")
        chart = template.render(
            plot=self, title=title, caption=caption, rows=rows,
            width=WIDTH, height=HEIGHT, bar_width=BAR_WIDTH,
            left=LEFT, right=RIGHT,
            top=TOP, bottom=BOTTOM)
        return Figure(title, rows, Html(chart))


def bars(title: str, rows: Rows, caption: str, y_label: str = "") -> Figure:
    """A bar for every row, with its columns stacked. Columns that end with "(paper)"
    have the paper's numbers: each is a diamond.
    """
    papers = {column for row in rows.values() for column in row if "(paper)" in column}
    own = {name: {column: row[column] for column in row if column not in papers}
           for name, row in rows.items()}
    heights = [max(sum(own[name].values()), *row.values())
               for name, row in rows.items()]
    plot = Plot(rows, max(heights), y_label=y_label)
    columns, *_ = own.values()
    for series, column in enumerate(columns):
        plot.legend[column] = f"series-{series}", SQUARE
    plot.legend["the paper's"] = PAPER
    for x, (name, row) in enumerate(rows.items()):
        low = 0.0
        for series, value in enumerate(own[name].values()):
            plot.bars.append((x, low, value, series))
            low += value
        edge = x + BAR_WIDTH / 2 / plot.step  # where no number is
        plot.markers += [(edge, row[column], PAPER) for column in papers & row.keys()]
    return plot.figure(title, rows, caption)


def lines(title: str, rows: Rows, caption: str, x_label: str, top: float = 0,
          y_label: str = "") -> Figure:
    """A line for every row, over its columns. What is above `top` is cut off. The first
    row has all columns, and others may lack the last ones.
    """
    columns, *_ = rows.values()
    if top == 0:
        top = max(max(row.values()) for row in rows.values())
    plot = Plot(columns, top, x_label, y_label)
    for series, (name, row) in enumerate(rows.items()):
        points = list(enumerate(row.values()))
        look = f"series-{series}", MARKERS[series]
        plot.lines.append(points)
        if len(rows) > 1:
            plot.legend[name] = look
        for x, y in points:
            if y <= plot.top:
                plot.markers.append((x, y, look))
    return plot.figure(title, rows, caption)


def style() -> str:
    return files("nanopaged.tour.guide").joinpath("figures.css").read_text("utf-8")
