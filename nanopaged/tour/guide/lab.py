"""The engine of the tour, and runs that are recorded while they are made."""

from dataclasses import dataclass
from typing import Any, TypeAlias

from nanopaged import LLM, SamplingParams
from nanopaged.outputs import RequestOutput
from nanopaged.scheduler import Batch
from nanopaged.tour.guide.markdown import Html
from nanopaged.tour.observers import observers
from nanopaged.tour.recorder import Trace, trace
from nanopaged.tour.state import State

Values: TypeAlias = dict[str, Any]  # of a chapter's text, by name

SPEECH = "First Citizen:\nWe are accounted poor citizens"
# The requests A and B of which the engine's files tell: six tokens each, and the first
# four are the same.
STORY = ["Good morrow,", "Good morning"]


def engine(**options: Any) -> LLM:
    """The bundled model, the same on every machine: blocks of 4 fit on a screen."""
    defaults: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "attention_backend": "torch",
        "block_size": 4, "num_blocks": 24, "max_num_seqs": 8,
        "max_num_batched_tokens": 256, "swap_space": 0,
    }
    return LLM(**(defaults | options))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@dataclass
class Watched:
    """A run that was recorded for the player, and what the text says about it."""

    trace: Trace
    ident: str  # of its player
    outputs: list[RequestOutput]
    batches: list[Batch]  # one for each step
    opens_at: int | None = None  # a step

    @property
    def player(self) -> Html:
        return Html(self.trace.player(self.ident, self.opens_at))

    def state(self, step: int, phase: str) -> State:
        """What the engine held after a phase of a step."""
        places = [(frame["step"], frame["phase"]) for frame in self.trace.frames]
        return self.trace.states()[places.index((step, phase))]

    def new_blocks(self, step: int, key: str) -> list[int]:
        """The blocks that a sequence takes in a step, for its end."""
        before = self.state(step - 1, "updated")["seqs"][key]["table"]
        table: list[int] = self.state(step, "scheduled")["seqs"][key]["table"]
        return table[len(before) :]

    def counts(self, request: int) -> list[int]:
        """How many tokens of a request each step computes."""
        states = [state for state, frame in
                  zip(self.trace.states(), self.trace.frames, strict=True)
                  if frame["phase"] == "scheduled"]
        return [sum(seq["now"] for key, seq in state["seqs"].items()
                    if key.startswith(f"{request}.")) for state in states]


def watch(llm: LLM, ident: str, title: str, prompts: list[Any], params: Any,
          together: bool = True) -> Watched:
    """Serve the prompts, and record every step. If they do not come together, a step
    runs after each.
    """
    batches: list[Batch] = []

    def note(phase: str, batch: Batch | None) -> None:
        if phase == "scheduled" and batch is not None:
            batches.append(batch)

    params = params if isinstance(params, list) else [params] * len(prompts)
    outputs: dict[str, RequestOutput] = {}
    observers(llm).append(note)
    with trace(llm, title=title) as run:
        for prompt, own in zip(prompts, params, strict=True):
            llm.add_request(prompt, own)
            if not together:
                outputs |= {output.request_id: output for output in llm.step()}
        while llm.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.step()}
    observers(llm).remove(note)
    in_order = [outputs[request_id] for request_id in sorted(outputs, key=int)]
    return Watched(run, ident, in_order, batches)
