"""Look on while the engine works: a list of functions that are called in every step.

    observers(llm).append(print)

The engine itself has no hooks for this. It gets a scheduler that tells the observers
about each phase of the step: "begin" (without a batch), "scheduled", "executed" (the
tokens are known) and "updated" (the sequences have them).
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from nanopaged.batch import Batch
from nanopaged.frontend.llm import LLM
from nanopaged.scheduler import Scheduler

Observer: TypeAlias = Callable[[str, Batch | None], None]


class WatchedScheduler(Scheduler):
    """Goes on where another scheduler is, with the same queues and the same books."""

    def __init__(self, scheduler: Scheduler, observers: list[Observer]) -> None:
        vars(self).update(vars(scheduler))
        self.observers = observers

    def tell(self, phase: str, batch: Batch | None = None) -> None:
        for observer in self.observers:
            observer(phase, batch)

    def schedule(self) -> Batch:
        self.tell("begin")
        batch = super().schedule()
        self.tell("scheduled", batch)
        return batch

    def update(self, batch: Batch, output: Any) -> None:
        output.read()
        self.tell("executed", batch)
        super().update(batch, output)
        self.tell("updated", batch)


def observers(llm: LLM) -> list[Observer]:
    """The observers of an engine. Add to this list, or remove from it."""
    scheduler = llm.engine.scheduler
    if not isinstance(scheduler, WatchedScheduler):
        scheduler = llm.engine.scheduler = WatchedScheduler(scheduler, [])
    return scheduler.observers
