"""The guided tour: an hour in which one learns how LLMs are served, as one HTML page.

The text is in `chapters/`, one file each. What a chapter shows is computed by the
function of the same name in `lessons`, while the page is made. To add a chapter, write
both, and put it among the `CHAPTERS`.
"""

import html
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import torch

from nanopaged.tour.guide import lessons
from nanopaged.tour.guide.lab import Values
from nanopaged.tour.guide.markdown import Renderer
from nanopaged.tour.page import HEAD, assets

TEXTS = files("nanopaged.tour.guide")
ESCAPED = ("ascii", "xmlcharrefreplace")  # the page is pure ASCII, whatever reads it


class Chapter(NamedTuple):
    """A part of the page. `name` is that of its text, and of its lesson if it has one.
    """

    name: str
    title: str
    minutes: int = 0  # of the hour; what has none comes after it


CHAPTERS = [
    Chapter("loop", "What is the loop?", 6),
    Chapter("cache", "Why cache K and V?", 5),
    Chapter("claims", "Claims, checked", 3),
    Chapter("blocks", "Why blocks?", 5),
    Chapter("step", "What is one step?", 6),
    Chapter("attention", "How is attention paged?", 6),
    Chapter("schedule", "Who runs?", 6),
    Chapter("prefix", "Who shares a prompt?", 5),
    Chapter("fork", "Fork, copy, search: who shares an answer?", 6),
    Chapter("full", "What if the pool is full?", 6),
    Chapter("ranks", "Several GPUs?", 4),
    Chapter("build", "Break it, then build it", 2),
    Chapter("extend", "Build on it"),
    Chapter("glossary", "Glossary"),
]

PAGE = """<style>
{style}</style>
{assets}</head>
<body class="guide">
<a class="skip" href="#main">Skip to the text</a>
<header>
<h1>How a language model is served</h1>
{opening}
<nav aria-label="Chapters"><ol>
{contents}
</ol></nav>
</header>
<main id="main">
{chapters}
</main>
<footer><p>{footer}</p></footer>
</body>
</html>
"""


def write(directory: Path,
          progress: Callable[[int, int, str], None] = lambda *_: None) -> Path:
    """Write the tour into a directory; returns the page's path.

    `progress` is called before each chapter: its number, how many there are, its title.
    """
    path = (directory / "index.html").resolve()
    with one_thread():
        text = make_page(progress)
    path.write_bytes(text.encode(*ESCAPED))
    return path


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one core: the model is so small that a second one hardly helps, and
    while the machine does something else, threads that wait for each other are slow.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def make_page(progress: Callable[[int, int, str], None]) -> str:
    sections = []
    contents = []
    start = 0
    for number, chapter in enumerate(CHAPTERS, start=1):
        progress(number, len(CHAPTERS), chapter.title)
        values: Values = getattr(lessons, chapter.name, dict)()
        title = html.escape(chapter.title)
        link = f'<a href="#{chapter.name}">{title}</a>'
        note = ""
        if chapter.minutes:
            end = start + chapter.minutes
            link += f" <span>{start}&ndash;{end}</span>"
            note = f'<p class="minutes">minutes {start} to {end}</p>'
            start = end
        contents.append(f"<li>{link}</li>")
        sections.append(
            f'<section class="chapter" id="{chapter.name}">\n{note}<h2>{title}</h2>\n'
            f"{render(chapter.name, values)}\n</section>")

    return HEAD.format(title="nanopaged: a guided tour") + PAGE.format(
        style="".join(TEXTS.joinpath(name).read_text(encoding="utf-8")
                      for name in ("guide.css", "figures.css")),
        assets=assets(),
        opening=render("opening", {"minutes": start}),
        contents="\n".join(contents),
        chapters="\n".join(sections),
        footer=html.escape(
            "Made by python -m nanopaged.tour, with Python "
            f"{platform.python_version()} on {platform.system()} "
            f"({platform.machine()})."))


def render(name: str, values: Values) -> str:
    """The HTML of a chapter's text; every value must be used, and every name known."""
    renderer = Renderer(values)
    rendered = renderer.render(read_chapter(name))
    unused = set(values) - renderer.used
    if unused:
        raise ValueError(f"{name}.md uses no {', '.join(sorted(unused))}")
    return rendered


def read_chapter(name: str) -> str:
    return TEXTS.joinpath("chapters", f"{name}.md").read_text(encoding="utf-8")
