"""Record a run of the engine: what it held at every step, and what happened there.

    with trace(llm, "run.html"):
        llm.generate(prompts)

writes one page that shows every step. The recorder is an observer: the engine calls it
at the phases of a step, and it only looks. It changes no token, and when the block
ends, it is gone.
"""

import html
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from nanopaged.llm import LLM
from nanopaged.scheduler import Batch
from nanopaged.sequence import SequenceGroup
from nanopaged.tour.events import Event, find_events
from nanopaged.tour.kinds import KINDS, Kind
from nanopaged.tour.observers import observers
from nanopaged.tour.page import check_writable, embed, page
from nanopaged.tour.pieces import Pieces
from nanopaged.tour.source import excerpt
from nanopaged.tour.state import (
    Delta,
    State,
    count_tokens,
    diff,
    fold,
    take_state,
)

# A long run is thinned out: from MANY frames or characters on, frames are kept only if
# something rare happens, and beyond the MOST, only the last one.
MANY_FRAMES, MOST_FRAMES = 2_000, 4_000
MANY_CHARACTERS, MOST_CHARACTERS = 2_000_000, 4_000_000
NUM_FINISHED = 6  # requests that are shown after their end


def trace(
    llm: LLM, path: str | Path | None = None, title: str = "A run of nanopaged"
) -> "Trace":
    """Record what `llm` does inside a `with` block, and write it to `path`, if given.

    Requests that are under way when the block begins are recorded from there on.
    ValueError says so before the run if `path` cannot be written.
    """
    if path is not None:
        check_writable(path)
    return Trace(llm, path, title)


class Trace(AbstractContextManager["Trace"]):
    """The frames of a run. A frame is the engine's state after a phase of a step.

    Frames are kept as JSON text, so a trace in memory is as large as its page.
    """

    def __init__(self, llm: LLM, path: str | Path | None, title: str) -> None:
        self.llm = llm
        self.path = path
        self.title = title
        self.frames: list[str] = []
        self.num_characters = 0
        self.left_out = 0  # frames
        self.pieces = Pieces(llm.tokenizer)
        self._known: dict[str, SequenceGroup] = {}
        self._now: dict[str, int] = {}  # tokens of the last step, by sequence
        self._last: State = {}  # at the last phase
        self._kept: State = {}  # in the last frame that was kept
        self._num_steps = 0

    def __enter__(self) -> "Trace":
        with self.llm._lock:
            self._last = take_state(self.llm.scheduler, self._known, {})
            self._keep("start", self._last, [])
            observers(self.llm).append(self._observe)
        return self

    def __exit__(self, *exception: object) -> None:
        with self.llm._lock:
            observers(self.llm).remove(self._observe)
            if not self.llm._in_step:  # otherwise the state is half changed
                self._look("end", None, is_last=True)
        if self.path is not None:
            self.save(self.path)

    # -- Recording ---------------------------------------------------------------------

    def _observe(self, phase: str, batch: Batch | None) -> None:
        """Called by the engine, which holds its lock."""
        if phase == "scheduled" and batch is not None:
            self._num_steps += 1
            self._now = count_tokens(self.llm.scheduler, batch)
            self._look(phase, batch)
        elif phase != "executed":  # that changes no state
            self._look(phase, None)

    def _look(self, phase: str, batch: Batch | None, is_last: bool = False) -> None:
        """Compare the state with that of the phase before, and keep it as a frame."""
        scheduler = self.llm.scheduler
        state = take_state(scheduler, self._known, self._now, self._last)
        events = find_events(self._last, state, batch)
        has_changed = state != self._last
        self._last = state
        for request_id in state["finished"][:-NUM_FINISHED]:
            del self._known[request_id]

        # The last frame is the state in the end, whatever was left out before.
        if (has_changed and self._has_room(events)) or (is_last and self.left_out):
            self._keep(phase, state, events)
        elif has_changed:
            self.left_out += 1

    def _has_room(self, events: list[Event]) -> bool:
        num_frames, num_characters = len(self.frames), self.num_characters
        if num_frames >= MOST_FRAMES or num_characters >= MOST_CHARACTERS:
            return False
        is_long = num_frames >= MANY_FRAMES or num_characters >= MANY_CHARACTERS
        is_rare = any(not KINDS[event.kind].is_minor for event in events)
        return is_rare or not is_long

    def _keep(self, phase: str, state: State, events: list[Event]) -> None:
        for group in state["groups"].values():
            self.pieces.add(group["prompt_tokens"])
        for seq in state["seqs"].values():
            self.pieces.add(seq["tokens"])

        frame = {
            "step": self._num_steps,
            "phase": phase,
            "delta": diff(self._kept, state),
            "events": events,
        }
        text = json.dumps(frame, separators=(",", ":"))
        self.frames.append(text)
        self.num_characters += len(text)
        self._kept = state

    # -- What it gives -----------------------------------------------------------------

    def data(self) -> dict[str, Any]:
        """The whole trace, as data that JSON can express."""
        frames = [json.loads(frame) for frame in self.frames]
        return {**self.header(), "frames": frames}

    def header(self) -> dict[str, Any]:
        """All but the frames. Only what happened is explained."""
        kinds = {}
        for name, kind in KINDS.items():
            if name == "compute" or any(f'["{name}",' in f for f in self.frames):
                kinds[name] = {
                    "label": kind.label,
                    "paper": kind.paper,
                    "minor": kind.is_minor,
                    **self._quote(kind),
                }
        return {
            "title": self.title,
            "pieces": self.pieces.texts,
            "left_out": self.left_out,
            "kinds": kinds,
        }

    def _quote(self, kind: Kind) -> dict[str, Any]:
        try:
            return excerpt(kind.symbol, kind.line)
        except (AttributeError, ValueError):  # whoever changes the engine can trace it
            return {"file": "", "name": kind.symbol, "lines": [kind.line], "at": 0}

    def html(self) -> str:
        """A page that plays it, and that needs nothing else."""
        return page(self.header(), self.frames)

    def player(self, ident: str, opens_at: int | None = None) -> str:
        """A player of it, as a part of a larger page: see `embed`."""
        return embed(self.header(), self.frames, ident, opens_at)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.html(), encoding="utf-8")

    def _repr_html_(self) -> str:
        """In a notebook: the page, in a frame of its own."""
        source = html.escape(self.html())
        style = "width: 100%; height: 760px; border: 0"
        return f'<iframe srcdoc="{source}" style="{style}"></iframe>'

    def states(self) -> list[State]:
        """The state at every frame, in full."""
        return unfold([json.loads(frame)["delta"] for frame in self.frames])


def unfold(deltas: list[Delta]) -> list[State]:
    """All states on the way: each is a copy of its own."""
    states = []
    state: State = {}
    for delta in deltas:
        fold(state, delta)
        states.append(json.loads(json.dumps(state)))
    return states
