"""Figures as SVG: bars, stacked bars and lines, with their numbers as a table.

Here is where everything goes; `figure.html` draws it. `figures.css` has the colours,
for light and for dark pages. Colour is never alone: bars carry their numbers, lines
have markers of their own, and the table below a figure has all numbers.
"""

from collections.abc import Mapping
from importlib.resources import files
from math import floor, log, log10
from typing import TypeAlias

from nanopaged.tour.guide.markdown import Html
from nanopaged.tour.page import TEMPLATES

Rows: TypeAlias = Mapping[str, Mapping[str, float]]  # name -> {column: number}

WIDTH, HEIGHT = 480, 300  # readable on a telephone
LEFT, TOP, RIGHT, BOTTOM = 46, 52, 468, 254  # of the plot in it
LEAST_STEP = 34  # between two labels of the x axis
SQUARE = "M-4 -4 h8 v8 h-8 z"
DIAMOND = "M0 -5 l5 5 l-5 5 l-5 -5 z"
MARKERS = (  # of lines
    "M-4 0 a4 4 0 0 0 8 0 a4 4 0 0 0 -8 0", SQUARE, "M0 -5 l5 9 h-10 z",
    "M0 5 l5 -9 h-10 z")


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
    plot.bar_width = 60 if stacked else min(60, step * 0.8 / len(columns))
    for number, (name, row) in enumerate(rows.items()):
        x = LEFT + step * (number + 0.5)
        plot.labels.append((x, name))
        if not stacked:
            x -= (len(columns) - 1) / 2 * plot.bar_width
        low = 0.0
        for index, column in enumerate(columns):
            value = row.get(column, 0.0)
            plot.bars.append((x, low, value, index))
            if column in paper.get(name, {}):
                plot.markers.append((x, paper[name][column], "paper", DIAMOND))
            if stacked:
                low += value
            else:
                x += plot.bar_width
    if len(columns) > 1:
        plot.legend = [(column, f"series-{index}", SQUARE)
                       for index, column in enumerate(columns)]
    plot.legend.append(("the paper's", "paper", DIAMOND))
    return plot.figure(title, rows, caption, paper, unit)


def lines(title: str, rows: Rows, caption: str, x_label: str, unit: str = "",
          top: float = 0, is_logarithmic: bool = False) -> Html:
    """A line for every row, over its columns, which are numbers. What is above `top` is
    cut off. The first row has all columns.
    """
    plot = Plot(top or max(max(row.values()) for row in rows.values()))
    plot.x_label = x_label
    columns = list(next(iter(rows.values())))
    numbers = [log(float(c)) if is_logarithmic else float(c) for c in columns]
    scale = (RIGHT - LEFT - 32) / (numbers[-1] - numbers[0])
    places = {column: LEFT + 16 + scale * (number - numbers[0])
              for column, number in zip(columns, numbers, strict=True)}
    for column, x in places.items():
        if not plot.labels or x - plot.labels[-1][0] > LEAST_STEP:
            plot.labels.append((x, column))
    for index, (name, row) in enumerate(rows.items()):
        points = [(places[column], value) for column, value in row.items()]
        look = f"series-{index}", MARKERS[index]
        plot.lines.append(points)
        plot.legend.append((name, *look))
        plot.markers += [(x, y, *look) for x, y in points if y <= plot.top]
    return plot.figure(title, rows, caption, {}, unit)


class Plot:
    """What is drawn above a y axis from 0 to `top`, or to a rounder number.

    x is in the units of the picture, and y in those of the numbers.
    """

    def __init__(self, top: float) -> None:
        scale = 10.0 ** floor(log10(top))
        steps = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)  # four parts divide them well
        self.top = next(scale * step for step in steps if scale * step >= top * 0.999)
        self.x_label = ""
        self.bar_width = 0.0
        self.labels: list[tuple[float, str]] = []
        self.bars: list[tuple[float, float, float, int]] = []  # x, low, value, series
        self.lines: list[list[tuple[float, float]]] = []
        self.markers: list[tuple[float, float, str, str]] = []
        self.legend: list[tuple[str, str, str]] = []

    def y(self, value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * value / self.top

    def figure(self, title: str, rows: Rows, caption: str, paper: Rows, unit: str
               ) -> Html:
        return Html(TEMPLATES.get_template("figure.html").render(
            plot=self, title=title, rows=rows, caption=caption, paper=paper, unit=unit,
            columns=list(next(iter(rows.values()))), width=WIDTH, height=HEIGHT,
            left=LEFT, top=TOP, right=RIGHT, bottom=BOTTOM))


def style() -> str:
    return files("nanopaged.tour.guide").joinpath("figures.css").read_text("utf-8")


def standalone(figure: str) -> str:
    """The picture in a figure, as an SVG file."""
    start, end = figure.index("<svg ") + 5, figure.rindex("</svg>")
    attributes, content = figure[start:end].split(">", 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" {attributes}>'
        f"<style>{style()}</style>{content}</svg>\n")
