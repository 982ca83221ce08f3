"""Slides for a projector: one page, which needs no network.

The text is in `slides.md`, with a line "---" between two slides. As in the guided tour,
its numbers are computed when the page is made, and its run is one of this engine.
"""

from pathlib import Path

from nanopaged.tour import guide, kv
from nanopaged.tour.guide import figures, lessons, paper
from nanopaged.tour.guide.markdown import Html, render
from nanopaged.tour.page import TEMPLATES, page

HERE = Path(__file__).parent
# From the data sheets: bytes/s of the memory, operations/s in bfloat16, and the bytes/s
# of all links to other GPUs, in one direction.
GPUS = {"A100": {"bytes_per_s": 2.039e12, "flops_per_s": 312e12, "links": 300e9},
        "H100": {"bytes_per_s": 3.35e12, "flops_per_s": 989e12, "links": 450e9}}


def write(path):
    text = HERE.joinpath("slides.md").read_text("utf-8")
    slides = render(text, paper.MEASURED | lessons.opening() | values())
    style = guide.TEXTS.joinpath("guide.css").read_text("utf-8") + figures.style()
    template = HERE.joinpath("slides.html").read_text("utf-8")
    path.write_text(page(TEMPLATES.from_string(template), guide_css=Html(style),
                         slides=slides.split("<hr />")), "ascii")


def values():
    # A token takes two operations for each weight, and a weight has two bytes. So with
    # n tokens in a step, there are n operations for each byte.
    reached = {name: {str(n): min(n * gpu["bytes_per_s"], gpu["flops_per_s"]) / 1e12
                      for n in (2**power for power in range(12))}
               for name, gpu in GPUS.items()}
    roofline = figures.lines(
        "TFLOP/s that can be reached, by the tokens in a step.", reached,
        "Calculated for Llama-3-8B in bfloat16: only its weights are read.",
        "tokens that a step computes (twice as many each time)", y_label="TFLOP/s")
    return kv.EXAMPLE | {"roofline": roofline, "gpus": GPUS}
