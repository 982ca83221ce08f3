"""Just enough Markdown for the chapters: readable as text, and safe as HTML.

A chapter has headings, paragraphs, lists, tables, fenced code, asides (lines that begin
with `>`) and folded parts (`::: Title` .. `:::`), and within a line `code`, **strong**,
*emphasis* and [links](#somewhere). Names in braces are values:

    The run took {steps} steps.      a value within a line, escaped
    {figure}                         alone in its line: a block of HTML
    {source:llm.LLM._step}           the source of this symbol, as it is now

A name that has no value is an error, and so is a value that no chapter uses.
"""

import html
import re
from collections.abc import Callable, Iterator, Mapping

from nanopaged.tour.guide.source import code_block, excerpt, fold, highlight

NAME = re.compile(r"\{([a-z][a-z0-9_]*)\}")
SOURCE = re.compile(r"\{source:([\w.]+)\}")
INLINE = re.compile(
    r"`(?P<code>[^`]+)`|\*\*(?P<strong>.+?)\*\*|\*(?P<em>[^*]+)\*"
    r"|\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)"
)


class Html(str):
    """A value that is HTML already, and stands alone in its line."""


Values = Mapping[str, object]


class Renderer:
    """Renders chapters, and remembers which of the values it has used."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.used: set[str] = set()
        # What a block begins with, and how it is rendered; else it is a paragraph.
        self.kinds: list[tuple[str, Callable[[list[str]], str]]] = [
            ("#", self.heading),
            ("- ", self.bullets),
            ("1. ", self.steps),
            ("|", self.table),
            ("> ", self.aside),
        ]

    def render(self, text: str) -> str:
        parts = [self.block(lines) for lines in blocks(text)]
        return "\n".join(parts)

    def block(self, lines: list[str]) -> str:
        first = lines[0]
        if first.startswith("```"):
            return self.code(first[3:].strip(), lines[1:-1])
        if first.startswith("::: "):
            inside = self.render("\n".join(lines[1:-1]))
            title = self.inline(first[4:])
            return fold(title, inside)
        if len(lines) == 1 and (source := SOURCE.fullmatch(first)):
            return excerpt(source[1])
        if len(lines) == 1 and (name := NAME.fullmatch(first)):
            value = self.value(name[1])
            if isinstance(value, Html):
                return value
        for start, render in self.kinds:
            if first.startswith(start):
                return render(lines)
        return f"<p>{self.inline(' '.join(lines))}</p>"

    # -- Blocks ------------------------------------------------------------------------

    def heading(self, lines: list[str]) -> str:
        marks, _, title = lines[0].partition(" ")
        level = len(marks) + 1  # the page has the only h1
        return f'<h{level} id="{slug(title)}">{self.inline(title)}</h{level}>'

    def bullets(self, lines: list[str]) -> str:
        return f"<ul>{self.items(lines, '- ')}</ul>"

    def steps(self, lines: list[str]) -> str:
        return f"<ol>{self.items(lines, '1. ')}</ol>"

    def items(self, lines: list[str], mark: str) -> str:
        """List items; a line without a mark goes on with the item before it."""
        items: list[str] = []
        for line in lines:
            if line.startswith(mark):
                items.append(line.removeprefix(mark))
            else:
                items[-1] += " " + line.strip()
        return "".join(f"<li>{self.inline(item)}</li>" for item in items)

    def table(self, lines: list[str]) -> str:
        rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")]
                for line in lines]
        head, _, *body = rows
        return table([self.inline(cell) for cell in head],
                     [[self.inline(cell) for cell in row] for row in body])

    def aside(self, lines: list[str]) -> str:
        text = " ".join(line.lstrip("> ") for line in lines)
        return f'<aside class="note"><p>{self.inline(text)}</p></aside>'

    def code(self, language: str, lines: list[str]) -> str:
        code = NAME.sub(lambda match: str(self.value(match[1])), "\n".join(lines))
        body = highlight(code) if language == "python" else html.escape(code)
        return code_block(body)

    # -- Within a line -----------------------------------------------------------------

    def inline(self, text: str) -> str:
        parts: list[str] = []
        end = 0
        for match in INLINE.finditer(text):
            parts.append(self.plain(text[end : match.start()]))
            parts.append(self.marked(match))
            end = match.end()
        return "".join([*parts, self.plain(text[end:])])

    def marked(self, match: re.Match[str]) -> str:
        if match["code"]:
            return f"<code>{self.plain(match['code'])}</code>"
        if match["strong"]:
            return f"<strong>{self.inline(match['strong'])}</strong>"
        if match["em"]:
            return f"<em>{self.inline(match['em'])}</em>"
        target = self.plain(match["target"])
        return f'<a href="{target}">{self.inline(match["text"])}</a>'

    def plain(self, text: str) -> str:
        """Escaped text with its values. They are escaped too, and hold no markup."""
        filled = NAME.sub(lambda match: str(self.value(match[1])), text)
        return html.escape(filled)

    def value(self, name: str) -> object:
        if name not in self.values:
            raise KeyError(f"the chapter names {{{name}}}, which has no value")
        self.used.add(name)
        return self.values[name]


def blocks(text: str) -> Iterator[list[str]]:
    """The blocks of a text: its lines between blank ones; fences keep theirs."""
    block: list[str] = []
    fence = ""
    for line in text.splitlines():
        if fence:
            block.append(line)
            if line.strip() == fence:
                yield block
                block, fence = [], ""
        elif line.startswith(("```", "::: ")):
            if block:
                yield block
            block, fence = [line], line[:3]
        elif line.strip():
            block.append(line)
        elif block:
            yield block
            block = []
    assert not fence, f"a block that begins with {fence} has no end"
    if block:
        yield block


def table(head: list[str], body: list[list[str]]) -> str:
    """A table of cells that are HTML already."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    rows = ""
    for row in body:
        name, *cells = row
        rest = "".join(f"<td>{cell}</td>" for cell in cells)
        rows += f'<tr><th scope="row">{name}</th>{rest}</tr>\n'
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{top}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>")


def slug(title: str) -> str:
    """What a heading is called in links: `Who runs?` is `who-runs`."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
