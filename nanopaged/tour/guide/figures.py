"""Figures as SVG: bars, stacked bars and lines, with their numbers as a table.

Colours are variables of the page's style sheet, so a figure follows its light and dark
schemes. Colour is never alone: bars carry their numbers, lines have markers of their
own, and the table below a figure says everything.
"""

import html
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from nanopaged.tour.guide.markdown import Html, fold, slug, table

Rows: TypeAlias = Mapping[str, Mapping[str, float]]  # name -> {column: number}

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 48, 46  # margins around the plot
PAPER = "the paper's"
LEAST_BAR = 30  # a shorter bar has no room for its number
MARKERS = (
    '<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
    '<rect x="{x0:.1f}" y="{y0:.1f}" width="8" height="8"/>',
    '<path d="M{x:.1f} {y0:.1f} l5 9 h-10 z"/>',
)
DIAMOND = "M{x:.1f} {y:.1f} m0 -5 l5 5 l-5 5 l-5 -5 z"


def stacked(title: str, rows: Rows, caption: str,
            paper: Mapping[str, float] | None = None, unit: str = "%") -> Html:
    """A bar for every row, its columns on top of each other; `paper`: diamonds for the
    first column.
    """
    plot = Plot(max(sum(row.values()) for row in rows.values()))
    columns = list(next(iter(rows.values())))
    for x, name in plot.places(list(rows)):
        low = 0.0
        for index, value in enumerate(rows[name].values()):
            plot.bar(x, 64, low, low + value, index)
            if index == 0:
                plot.text(x, plot.y(value / 2) + 5, f"{value:.1f}", "on-bar")
            low += value
        if paper:
            plot.diamond(x, paper[name])
    plot.legend(columns, with_paper=bool(paper))
    return plot.figure(title, rows, caption, paper, unit)


def bars(title: str, rows: Rows, caption: str,
         paper: Mapping[str, Mapping[str, float]] | None = None,
         unit: str = "", digits: int = 1) -> Html:
    """A group of bars for every row, one for each column; `paper`: diamonds.

    The first row has all columns, others may lack some.
    """
    plot = Plot(max(max(row.values()) for row in rows.values()) * 1.1)
    columns = list(next(iter(rows.values())))
    for center, name in plot.places(list(rows)):
        width = min(56, plot.step * 0.8 / len(columns))
        for column, value in rows[name].items():
            index = columns.index(column)
            x = center + (index - (len(columns) - 1) / 2) * width
            plot.bar(x, width - 4, 0, value, index)
            number = (paper or {}).get(name, {}).get(column)
            if number is not None:
                plot.diamond(x, number)
            text = f"{value:,.{digits}f}"
            if plot.y(0) - plot.y(value) > LEAST_BAR:
                plot.text(x, plot.y(0) - 4, text, "on-bar")
            else:
                plot.text(x, plot.y(max(value, number or 0)) - 9, text, "label")
    plot.legend(columns if len(columns) > 1 else [], with_paper=bool(paper))
    return plot.figure(title, rows, caption, paper, unit)


def lines(title: str, rows: Rows, caption: str, x_label: str, unit: str = "") -> Html:
    """A line for every row; its columns are evenly spaced along the x axis."""
    plot = Plot(max(max(row.values()) for row in rows.values()) * 1.05)
    columns = list(next(iter(rows.values())))
    xs = dict((name, x) for x, name in plot.places(columns))
    for index, row in enumerate(rows.values()):
        plot.line([(xs[column], plot.y(value)) for column, value in row.items()], index)
    plot.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, "label")
    plot.legend(list(rows), with_paper=False, markers=True)
    return plot.figure(title, rows, caption, None, unit)


class Plot:
    """An SVG with a y axis from 0 to `top`."""

    def __init__(self, top: float) -> None:
        self.top = nice(top)
        self.step = 0.0
        self.parts: list[str] = []
        for i in range(5):
            value = self.top * i / 4
            y = self.y(value)
            self.parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" '
                f'y1="{y:.1f}" y2="{y:.1f}"/>')
            self.text(LEFT - 6, y + 4, f"{value:,g}", "tick")

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.top

    def places(self, names: list[str]) -> Iterator[tuple[float, str]]:
        """The middle of each name's part of the x axis, with the name below it."""
        self.step = (WIDTH - LEFT - RIGHT) / len(names)
        for index, name in enumerate(names):
            x = LEFT + self.step * (index + 0.5)
            self.text(x, HEIGHT - BOTTOM + 17, name, "label")
            yield x, name

    def bar(self, x: float, width: float, low: float, high: float, series: int) -> None:
        height = self.y(low) - self.y(high)
        self.parts.append(
            f'<rect class="series-{series}" x="{x - width / 2:.1f}" '
            f'y="{self.y(high):.1f}" width="{width:.1f}" height="{height:.1f}"/>')

    def line(self, points: list[tuple[float, float]], series: int) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline class="line-{series}" points="{path}"/>')
        for x, y in points:
            self.marker(x, y, series)

    def marker(self, x: float, y: float, series: int) -> None:
        shape = MARKERS[series].format(x=x, y=y, x0=x - 4, y0=y - 4)
        self.parts.append(f'<g class="series-{series}">{shape}</g>')

    def diamond(self, x: float, value: float) -> None:
        path = DIAMOND.format(x=x, y=self.y(value))
        self.parts.append(f'<path class="paper" d="{path}"/>')

    def text(self, x: float, y: float, text: str, kind: str) -> None:
        self.parts.append(
            f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{html.escape(text)}</text>')

    def legend(self, names: list[str], with_paper: bool, markers: bool = False) -> None:
        x, y = float(LEFT), 12.0
        for index, name in enumerate([*names, PAPER] if with_paper else names):
            length = 34 + 7 * len(name)
            if x + length > WIDTH:
                x, y = float(LEFT), y + 18
            if name == PAPER:
                path = DIAMOND.format(x=x + 5, y=y)
                self.parts.append(f'<path class="paper" d="{path}"/>')
            elif markers:
                self.marker(x + 5, y, index)
            else:
                self.parts.append(
                    f'<rect class="series-{index}" x="{x:.1f}" y="{y - 5:.1f}" '
                    'width="10" height="10"/>')
            self.text(x + 15, y + 5, name, "legend")
            x += length

    def figure(self, title: str, rows: Rows, caption: str,
               paper: Mapping[str, object] | None, unit: str) -> Html:
        ident = f"figure-{slug(title)}"
        title, caption = html.escape(title), html.escape(caption)
        unit = html.escape(unit)
        numbers_title = f"The numbers, in {unit}" if unit else "The numbers"
        return Html(
            f'<figure class="plot"><figcaption id="{ident}"><strong>{title}</strong> '
            f'{caption}</figcaption>\n'
            f'<div class="scroll" tabindex="0"><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'role="img" aria-labelledby="{ident}">{"".join(self.parts)}</svg></div>\n'
            f"{fold(numbers_title, numbers(rows, paper))}</figure>")


def numbers(rows: Rows, paper: Mapping[str, object] | None = None) -> str:
    """The table of a figure; the paper's numbers follow ours after a slash."""
    columns = list(next(iter(rows.values())))
    body = []
    for name, row in rows.items():
        cells = [html.escape(name)]
        for index, column in enumerate(columns):
            theirs = (paper or {}).get(name)
            if isinstance(theirs, Mapping):
                theirs = theirs.get(column)
            elif index > 0:
                theirs = None  # of stacked bars: the paper has the first part alone
            text = shorten(row[column]) if column in row else ""
            cells.append(text if theirs is None else f"{text} (paper: {theirs})")
        body.append(cells)
    return table(["", *map(html.escape, columns)], body)


def shorten(value: float) -> str:
    is_whole = value == int(value) or abs(value) >= 100
    return f"{value:,.0f}" if is_whole else f"{value:.3g}"


def nice(value: float) -> float:
    """The next number that a y axis may end at, and that four parts divide well."""
    scale: float = 1
    while scale * 10 <= value:
        scale *= 10
    while scale > value:
        scale /= 10
    steps = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)
    return next(scale * step for step in steps if scale * step >= value * 0.999)
