"""The guided tour: how LLMs are served, as one HTML page.

The text is in `chapters/`, one file each. What a chapter shows is computed by the
function of the same name in `lessons`, while the page is made. To add a chapter, write
both, and put it among the `CHAPTERS`.
"""

import platform
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import torch

from nanopaged.loading.settings import own_settings
from nanopaged.tour import kv
from nanopaged.tour.guide import figures, lessons, paper
from nanopaged.tour.guide.lab import Values
from nanopaged.tour.guide.markdown import Html, render
from nanopaged.tour.page import page

TEXTS = files("nanopaged.tour.guide")


class Chapter(NamedTuple):
    """A part of the page. `name` is that of its text, and of its lesson if it has one.
    """

    name: str
    title: str
    is_timed: bool = True  # or else homework, or to look things up


CHAPTERS = [
    Chapter("loop", "What is the loop?"),
    Chapter("cache", "Why cache K and V?"),
    Chapter("batch", "Why a batch?"),
    Chapter("blocks", "Why blocks?"),
    Chapter("schedule", "Who runs?"),
    Chapter("full", "What if the pool is full?"),
    Chapter("prefix", "Who shares a prompt?"),
    Chapter("fork", "Who shares an answer?"),
    Chapter("step", "What is one step?"),
    Chapter("attention", "How is attention paged?"),
    Chapter("ranks", "Several GPUs?"),
    Chapter("gpu", "What a GPU adds"),
    Chapter("results", "What does it buy?"),
    Chapter("measure", "How is a server measured?"),
    Chapter("sizes", "How many GPUs?"),
    Chapter("beyond", "What else makes it faster?"),
    Chapter("today", "vLLM today"),
    Chapter("oncall", "It is three in the morning"),
    Chapter("build", "Break it, then build it", is_timed=False),
    Chapter("glossary", "Glossary", is_timed=False),
]
WORDS_PER_MINUTE = 130  # of slow readers, in a text that is new to them
Progress = Callable[[int, int, str], None]


def write(directory: Path, progress: Progress = lambda *_: None) -> Path:
    """Write the tour into a directory; returns the page's path.

    `progress` is called before each chapter: its number, how many there are, its title.
    """
    path = (directory / "index.html").resolve()
    # The model is so small that a second thread hardly helps. And on a busy machine,
    # threads that wait for each other are slow.
    with own_settings(torch.device("cpu"), 1):
        path.write_text(make_page(progress), encoding="ascii")
    return path


def make_page(progress: Progress) -> str:
    sections = []
    for number, chapter in enumerate(CHAPTERS, start=1):
        progress(number, len(CHAPTERS), chapter.title)
        values: Values = getattr(lessons, chapter.name, dict)()
        text = render(read_chapter(chapter.name), paper.MEASURED | kv.EXAMPLE | values)
        sections.append({"chapter": chapter, "html": text,
                         "minutes": chapter.is_timed and minutes(text)})
    opening = render(read_chapter("opening"), lessons.opening() | {"parts": sections})
    style = TEXTS.joinpath("guide.css").read_text(encoding="utf-8") + figures.style()
    return page("tour.html", guide_css=Html(style), opening=opening, sections=sections,
                platform=platform)


def minutes(text: Html) -> int:
    """How long slow readers take, with all questions and runs."""
    seen = re.sub("(?s)<(script|svg)[ >].*?</\\1>|<[^>]+>", " ", text)
    stops = text.count("Check yourself") + 3 * text.count('class="np-player"')
    return round(len(seen.split()) / WORDS_PER_MINUTE + stops)


def read_chapter(name: str) -> str:
    return TEXTS.joinpath("chapters", f"{name}.md").read_text(encoding="utf-8")
