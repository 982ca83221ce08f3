"""The guided tour: how LLMs are served, as one HTML page.

The text is in `chapters/`, one file each. What a chapter shows is computed by the
function of the same name in `lessons`, while the page is made. To add a chapter, write
both, and put it among the `CHAPTERS`.
"""

import platform
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import torch

from nanopaged.model_runner import own_settings
from nanopaged.tour import kv
from nanopaged.tour.guide import figures, lessons, paper
from nanopaged.tour.guide.lab import Values
from nanopaged.tour.guide.markdown import Html, render
from nanopaged.tour.page import page

TEXTS = files("nanopaged.tour.guide")


class Chapter(NamedTuple):
    """A part of the page. `name` is that of its text, and of its lesson if it has one.

    Minutes are as quick learners read, and as slow ones did. For text that has been
    added since, they grow with its words. 0: homework, or to look things up.
    """

    name: str
    title: str
    quick: int = 0
    slow: int = 0


CHAPTERS = [
    Chapter("loop", "What is the loop?", 7, 15),
    Chapter("cache", "Why cache K and V?", 5, 13),
    Chapter("batch", "Why a batch?", 8, 17),
    Chapter("blocks", "Why blocks?", 12, 20),
    Chapter("schedule", "Who runs?", 12, 19),
    Chapter("full", "What if the pool is full?", 8, 13),
    Chapter("prefix", "Who shares a prompt?", 11, 19),
    Chapter("fork", "Who shares an answer?", 11, 16),
    Chapter("step", "What is one step?", 12, 20),
    Chapter("attention", "How is attention paged?", 12, 23),
    Chapter("ranks", "Several GPUs?", 9, 18),
    Chapter("gpu", "What a GPU adds", 9, 20),
    Chapter("results", "What does it buy?", 8, 14),
    Chapter("measure", "How is a server measured?", 14, 24),
    Chapter("sizes", "How many GPUs?", 3, 6),
    Chapter("beyond", "What else makes it faster?", 10, 19),
    Chapter("today", "vLLM today", 9, 23),
    Chapter("build", "Break it, then build it"),
    Chapter("glossary", "Glossary"),
]
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
        sections.append({"chapter": chapter, "html": text})
    opening = render(read_chapter("opening"), lessons.opening())
    style = TEXTS.joinpath("guide.css").read_text(encoding="utf-8") + figures.style()
    return page("tour.html", guide_css=Html(style), opening=opening, sections=sections,
                platform=platform)


def read_chapter(name: str) -> str:
    return TEXTS.joinpath("chapters", f"{name}.md").read_text(encoding="utf-8")
