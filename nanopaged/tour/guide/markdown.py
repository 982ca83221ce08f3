"""Chapters as HTML: Markdown with values, and source by symbol.

    The run took {{ steps }} steps.     a value of the chapter, always shown as text
    {{ source("engine.Engine.step") }}       the source of this symbol, as it is now
    ::: Why?                            a part that opens and closes, up to a line that
    Because ...                         is only three colons
    :::

A name that has no value is an error.
"""

import html
import re
import textwrap
from collections.abc import Mapping
from typing import TypeAlias

from jinja2 import Environment, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import DiffLexer, PythonLexer

from nanopaged.tour import source as sources

Html: TypeAlias = Markup

FOLDED = 45  # lines: longer source is closed at first
FOLD = re.compile(r"^::: (.+?)\n(.*?)^:::$", re.MULTILINE | re.DOTALL)
PLAIN = re.compile(  # names and signs: guide.css gives them no colour
    '<span class="(?:n|p|o|bp|nb|nd|nn|w)">(.*?)</span>', re.DOTALL)
LEXERS = {"python": PythonLexer(stripnl=False), "diff": DiffLexer()}


def render(text: str, values: Mapping[str, object]) -> Html:
    """Values are put in last, so nothing in them can be taken for Markdown or HTML."""
    held: list[Html] = []

    def hold(value: object) -> str:
        held.append(escape(value))
        return f"\ue000{len(held) - 1}\ue001"

    def fold_marked(match: re.Match[str]) -> str:
        return fold(markdown.renderInline(match[1]), f"\n{match[2]}\n") + "\n"

    markdown = MarkdownIt("commonmark", {"html": True, "highlight": colour})
    markdown.enable("table").add_render_rule("table_open", open_table)
    markdown.normalizeLink = str  # type: ignore[assignment, method-assign]
    environment = Environment(
        undefined=StrictUndefined, finalize=hold, extensions=["jinja2.ext.do"])
    environment.filters |= {"comma": "{:,}".format, "fixed": fixed, "repr": repr}
    functions = {"source": source, "part": part}
    filled = environment.from_string(text).render(functions | dict(values))
    page = markdown.render(FOLD.sub(fold_marked, filled))
    page = page.replace("</table>", "</table></div>").replace(
        "<pre>", '<pre class="code" tabindex="0">')
    # A block of HTML is no paragraph.
    page = re.sub("<p>\ue000(\\d+)\ue001</p>", lambda match: block(held[int(match[1])]),
                  page)
    return Html(re.sub("\ue000(\\d+)\ue001", lambda match: held[int(match[1])], page))


def block(value: Html) -> str:
    return value if value.startswith("<") else f"<p>{value}</p>"


def open_table(*_: object) -> str:
    return '<div class="scroll" tabindex="0"><table>'


def fixed(number: float, digits: int = 0) -> str:
    return f"{number:,.{digits}f}"


# -- Pieces of HTML --------------------------------------------------------------------


def source(symbol: str) -> Html:
    """The source of a function or class, with the file it is in."""
    file, name = sources.place(symbol)
    code = sources.source(symbol)
    title = f"<code>{html.escape(file)}</code>, <code>{html.escape(name)}</code>"
    return fold(title, python(code), is_open=code.count("\n") <= FOLDED)


def part(symbol: str, first: str, last: str) -> Html:
    """Lines of a function: from the one with `first` to the one with `last`."""
    code = sources.source(symbol) + "\n"
    start = code.rindex("\n", 0, code.index(first)) + 1
    end = code.index("\n", code.index(last, start))
    return python(textwrap.dedent(code[start:end]))


def python(code: str) -> Html:
    """Python source, which the keyboard can scroll."""
    return Html('<pre class="code" tabindex="0"><code>{}</code></pre>').format(
        Html(colour(code, "python", "")))


def colour(code: str, language: str, _: str) -> str:
    if language not in LEXERS:
        return html.escape(code)
    coloured: str = highlight(code, LEXERS[language], HtmlFormatter(nowrap=True))
    return PLAIN.sub(r"\1", coloured)


def fold(title: str, body: str, is_open: bool = False) -> Html:
    """Something that opens and closes; both arguments are HTML."""
    state = " open" if is_open else ""
    return Html(f'<details class="fold"{state}><summary>{title}</summary>\n{body}\n'
                "</details>")
