"""Look on while the engine works: a list of functions that are called in every step.

    observers(llm).append(print)

The engine itself has no hooks for this. Its scheduler becomes one that tells the
observers about each phase of the step: "begin" (without a batch), "scheduled",
"executed" (the tokens are known) and "updated" (the sequences have them).
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from nanopaged.batch import Batch
from nanopaged.llm import LLM
from nanopaged.scheduler import Scheduler

Observer: TypeAlias = Callable[[str, Batch | None], None]


class WatchedScheduler(Scheduler):
    observers: list[Observer]

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


class WatchedLLM(LLM):
    observers: list[Observer]

    def _reset(self) -> None:
        super()._reset()
        self.watch_scheduler()

    def watch_scheduler(self) -> None:
        scheduler: Any = self.scheduler
        scheduler.__class__, scheduler.observers = WatchedScheduler, self.observers


def observers(llm: LLM) -> list[Observer]:
    """The observers of an engine. Add to this list, or remove from it."""
    engine: Any = llm
    if not isinstance(engine, WatchedLLM):
        engine.__class__, engine.observers = WatchedLLM, []
        engine.watch_scheduler()
    found: list[Observer] = engine.observers
    return found
