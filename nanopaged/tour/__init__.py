"""The tour: watch the engine's own runs, and the paper's results reproduced.

    with nanopaged.tour.trace(llm, "run.html"):
        llm.generate(prompts)

`recorder` records a run, and `page` makes the page that plays it. `memory` has the
paper's figures on memory. Nothing in the engine imports this package.
"""

from nanopaged.tour.recorder import Trace as trace

__all__ = ["trace"]
