"""The tour: watch the engine's own runs, step by step.

    with nanopaged.tour.trace(llm, "run.html"):
        llm.generate(prompts)

`recorder` records a run, and `page` makes the page that plays it. `guide` explains the
engine with such runs, and `live` serves a page for your own. Nothing in the engine
imports this package.
"""

from nanopaged.tour.recorder import Trace as trace

__all__ = ["trace"]
