"""The tour: watch the engine's own runs, and the paper's results reproduced.

    with nanopaged.tour.trace(llm, "run.html"):
        llm.generate(prompts)

`recorder` records a run, and `page` makes the page that plays it. `memory` has the
paper's figures on memory. Nothing in the engine imports this package.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanopaged.tour.recorder import trace

__all__ = ["trace"]


def __getattr__(name: str) -> Any:
    """Import the recorder, and so the engine, only when somebody asks for it."""
    if name == "trace":
        from nanopaged.tour.recorder import trace

        return trace
    raise AttributeError(f"module 'nanopaged.tour' has no attribute {name!r}")
