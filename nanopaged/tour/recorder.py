"""Record a run of the engine: what it held at every step, and what happened there.

    with trace(llm, "run.html"):
        llm.generate(prompts)

writes one page that shows every step. The recorder changes no token. When the block
ends, the engine is as it was.
"""

import base64
import html
import json
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from markupsafe import Markup

from nanopaged.batch import Batch
from nanopaged.frontend.llm import LLM
from nanopaged.scheduler import Scheduler
from nanopaged.tour.events import Events, TracedScheduler, key
from nanopaged.tour.observers import observers
from nanopaged.tour.page import TEMPLATES, check_writable, page
from nanopaged.tour.state import Groups, State, group_state, take_state, token_texts

MOST_CHARACTERS = 20_000_000  # of the states: after these, only the last one is kept
NUM_FINISHED = 6  # requests that are shown after their end


class Trace(AbstractContextManager["Trace"]):
    """Record what `llm` does inside a `with` block, and write it to `path`, if given.

    Requests that are under way when the block begins are recorded from there on.
    ValueError says so before the run if `path` cannot be written.

    A frame is the engine's state after a phase of a step. `frames` has the step, the
    phase and the events of each. The states, a line of JSON for each frame, are
    compressed while they come.
    """

    def __init__(self, llm: LLM, path: str | Path | None = None,
                 title: str = "A run of nanopaged") -> None:
        if path is not None:
            check_writable(path)
        self.llm = llm
        self.path = path
        self.title = title
        self.questions: list[dict[str, Any]] = []  # see `ask`
        self.frames: list[dict[str, Any]] = []
        self.groups: dict[str, State] = {}  # all requests that were shown
        self.num_left_out = 0  # frames
        self._texts = partial(token_texts, llm.tokenizer)
        self._known: Groups = {}
        self._events = Events()
        self._scheduler = llm.engine.scheduler  # the one that is recorded
        self._last = ""  # the state of the last frame
        self._num_characters = self._num_steps = 0
        self._packer = zlib.compressobj(9)
        self._packed = b""

    def __enter__(self) -> Self:
        with self.llm._lock:
            self._look("start")
            watching = observers(self.llm)
            watching.append(self._observe)
            self._before = self.llm.engine.scheduler
            self._use(TracedScheduler(self._before, watching, self._events))
        return self

    def __exit__(self, *exception: object) -> None:
        with self.llm._lock:
            observers(self.llm).remove(self._observe)
            # The engine's own scheduler and manager go on where these have come to.
            manager = self._before.block_manager
            vars(manager).update(vars(self._scheduler.block_manager))
            vars(self._before).update(vars(self._scheduler), block_manager=manager)
            self._use(self._before)
            if not self.llm._step_unfinished:  # otherwise the state is half changed
                self._look("end")
        if self.path is not None:
            self.save(self.path)

    def _use(self, scheduler: Scheduler) -> None:
        self.llm.engine.scheduler = self._scheduler = scheduler
        self.llm.engine.block_manager = scheduler.block_manager

    # -- Recording ---------------------------------------------------------------------

    def _observe(self, phase: str, batch: Batch | None) -> None:
        """Called by the engine, which holds its lock."""
        if phase == "begin":
            self._look(phase)
            self._num_steps += 1
            self._events.now = {}
        elif phase == "executed" and batch is not None:
            for seq in batch.receivers:
                if seq.finish_reason is None:
                    done = "scored" if seq.group.beam_params else "sampled"
                    self._events.say("sample", f"The step has {done} what comes next "
                                     "in {}.", key(seq))
        else:
            self._look(phase)

    def _look(self, phase: str) -> None:
        """Keep the state as a frame, if it has changed since the one before."""
        if self._num_characters > MOST_CHARACTERS and phase != "end":
            self._events.collect()  # nobody will read them
            self.num_left_out += 1
            return
        new = [id for id in self._scheduler.unfinished if id not in self._known]
        self._known |= self._scheduler.unfinished
        for request_id in new:
            group = group_state(self._known[request_id], self._texts)
            self.groups[request_id] = group
            if phase != "start":
                self._events.say(
                    "arrive", "New in the queue: {}.",
                    f"request {request_id} ({group['kind']}, prompt length "
                    f"{len(group['prompt'])})")
        state = take_state(self._scheduler, self._known, self._events.now, self._texts)
        text = json.dumps(state, separators=(",", ":"))
        events = self._events.collect()
        for request_id in state["finished"][:-NUM_FINISHED]:
            del self._known[request_id]
        if text != self._last:
            self._last = text
            self._num_characters += len(text)
            self._packed += self._packer.compress(text.encode() + b"\n")
            self.frames.append(
                {"step": self._num_steps, "phase": phase, "events": events})

    def ask(self, step: int, text: str, choices: dict[str, str], right: str) -> None:
        """Let the player stop before this step is scheduled, and ask what it will do.

        Each choice comes with what is said to those who make it. The choices are
        shuffled, in the same way each time.
        """
        [place] = [index for index, frame in enumerate(self.frames)
                   if frame["step"] == step and frame["phase"] == "scheduled"]
        assert right in choices, f"{right} is none of {choices}"
        shuffled = sorted(choices.items(),
                          key=lambda item: zlib.crc32("".join((text, *item)).encode()))
        self.questions.append({"frame": place - 1, "text": text, "choices": shuffled,
                               "right": shuffled.index((right, choices[right]))})

    # -- What it gives -----------------------------------------------------------------

    def header(self) -> dict[str, Any]:
        """All but the states."""
        manager = self._scheduler.block_manager
        return {
            "title": self.title, "left_out": self.num_left_out, "groups": self.groups,
            "block_size": manager.block_size, "num_blocks": manager.num_blocks,
            "num_swap_blocks": len(manager.ref_counts) - manager.num_blocks,
            "budget": self._scheduler.config.max_num_batched_tokens,
            "frames": self.frames, "questions": self.questions,
        }

    def data(self) -> str:
        """The states, and then the header: lines of JSON, compressed, as text."""
        packer = self._packer.copy()
        header = json.dumps(self.header(), separators=(",", ":"))
        packed = self._packed + packer.compress(header.encode()) + packer.flush()
        return base64.b64encode(packed).decode()

    def states(self) -> list[State]:
        """The state at every frame."""
        return unpack(self.data())[:-1]

    def html(self) -> str:
        """A page that plays it, and that needs nothing else."""
        return page("run.html", title=self.title, runs={"": self.data()})

    def player(self, ident: str, opens_at: int | None = None, setting: str = "",
               others: Mapping[str, "Trace"] = MappingProxyType({})) -> Markup:
        """A player of it, as a part of a larger page that has the style and the script.

        A link to "#ident=12" leads to step 12. The player opens at step `opens_at`, or
        at the first step. Readers can switch to `others`, which are by their settings.
        """
        macros: Any = TEMPLATES.get_template("player.html").module
        runs = {setting: self.data()}
        runs |= {name: run.data() for name, run in others.items()}
        player: Markup = macros.player(ident, runs, opens_at or "")
        return player

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.html(), encoding="ascii")

    def _repr_html_(self) -> str:
        """In a notebook: the page, in a frame of its own."""
        style = "width: 100%; height: 760px; border: 0"
        return f'<iframe srcdoc="{html.escape(self.html())}" style="{style}"></iframe>'


def unpack(data: str) -> list[Any]:
    """The states of a trace, and its header."""
    lines = zlib.decompress(base64.b64decode(data)).split(b"\n")
    return [json.loads(line) for line in lines]
