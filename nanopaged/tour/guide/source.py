"""Excerpts of the engine's source by symbol, never by line number, with colours."""

import html
import inspect
import io
import keyword
import textwrap
import tokenize

from nanopaged.tour.source import find

FOLDED = 45  # lines: a longer excerpt is closed until somebody opens it

KINDS = {
    tokenize.STRING: "string",
    tokenize.COMMENT: "comment",
    tokenize.NUMBER: "number",
}
# Python 3.12 and later cut f-strings into pieces.
F_STRINGS = ("FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END")
KINDS |= {getattr(tokenize, name): "string" for name in F_STRINGS
          if hasattr(tokenize, name)}


def excerpt(symbol: str) -> str:
    """The source of a function or class, with the file it is in."""
    found = find(symbol)
    found = getattr(found, "py_func", found)  # what Numba compiles
    found = getattr(found, "fget", found)  # of a property
    code = textwrap.dedent(inspect.getsource(inspect.unwrap(found))).rstrip()
    module = inspect.getmodule(found)
    assert module is not None
    path = module.__name__.removeprefix("nanopaged.").replace(".", "/") + ".py"
    name = symbol.removeprefix(path.removesuffix(".py").replace("/", ".") + ".")

    title = f"<code>{html.escape(path)}</code>, <code>{html.escape(name)}</code>"
    is_open = code.count("\n") <= FOLDED
    return fold(title, code_block(highlight(code)), is_open)


def part(symbol: str, first: str, last: str) -> str:
    """Lines of a function, as HTML: from the one with `first` to the one with `last`.
    """
    found = find(symbol)
    lines = inspect.getsource(getattr(found, "py_func", found)).splitlines()
    start = next(i for i, line in enumerate(lines) if first in line)
    end = next(i for i, line in enumerate(lines) if last in line)
    code = textwrap.dedent("\n".join(lines[start : end + 1]))
    return code_block(highlight(code))


def fold(title: str, body: str, is_open: bool = False) -> str:
    """Something that opens and closes; both arguments are HTML."""
    state = " open" if is_open else ""
    return (
        f'<details class="fold"{state}><summary>{title}</summary>\n{body}\n</details>')


def code_block(code: str) -> str:
    """Lines of code that are HTML already; the keyboard can scroll them."""
    return f'<pre class="code" tabindex="0"><code>{code}</code></pre>'


def highlight(code: str) -> str:
    """Python source as HTML: keywords, strings, comments, numbers and new names."""
    lines = code.splitlines(keepends=True)
    parts: list[str] = []
    row, column = 1, 0
    before = ""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    except (tokenize.TokenError, SyntaxError):
        return html.escape(code)  # an excerpt that is not whole

    for token in tokens:
        kind = KINDS.get(token.type)
        if token.type == tokenize.NAME:
            if keyword.iskeyword(token.string):
                kind = "keyword"
            elif before in ("def", "class"):
                kind = "name"
            before = token.string
        if kind is None or not token.string:
            continue
        parts.append(html.escape(between(lines, (row, column), token.start)))
        text = html.escape(between(lines, token.start, token.end))
        parts.append(f'<span class="{kind}">{text}</span>')
        row, column = token.end
    parts.append(html.escape(between(lines, (row, column), (len(lines) + 1, 0))))
    return "".join(parts)


def between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """The text between two places; rows count from 1, columns from 0."""
    first, last = start[0] - 1, end[0] - 1
    if first == last:
        return lines[first][start[1] : end[1]] if first < len(lines) else ""
    tail = lines[last][: end[1]] if last < len(lines) else ""
    return "".join([lines[first][start[1] :], *lines[first + 1 : last], tail])
