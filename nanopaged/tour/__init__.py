"""The tour: watch the engine's own runs, step by step.

    with nanopaged.tour.trace(llm, "run.html"):
        llm.generate(prompts)

`recorder` records a run, and `page` makes the page that plays it. `guide` explains the
engine with such runs, and `live` serves a page for your own. Nothing in the engine
imports this package.
"""

from typing import Any


def trace(*arguments: Any, **options: Any) -> Any:
    """A `Trace` of these arguments. It is imported here because it imports torch."""
    from nanopaged.tour.recorder import Trace

    return Trace(*arguments, **options)


__all__ = ["trace"]
