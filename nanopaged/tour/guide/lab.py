"""The engine of the tour, and runs that are recorded while they are made."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeAlias

from nanopaged import LLM, SamplingParams
from nanopaged.outputs import RequestOutput
from nanopaged.scheduler import Batch
from nanopaged.tour.guide.markdown import Html
from nanopaged.tour.observers import observers
from nanopaged.tour.recorder import Trace, trace
from nanopaged.tour.state import State

Values: TypeAlias = dict[str, object]  # of a chapter's text, by name

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

    @property
    def player(self) -> Html:
        return self.player_at(None)

    def player_at(self, step: int | None) -> Html:
        """A player that opens at this step."""
        return Html(self.trace.player(self.ident, step))

    def state(self, step: int, phase: str) -> State:
        """What the engine held after a phase of a step."""
        frames = self.trace.data()["frames"]
        places = [(frame["step"], frame["phase"]) for frame in frames]
        return self.trace.states()[places.index((step, phase))]

    def chunks(self) -> list[dict[int, int]]:
        """How many tokens each step computed, by request."""
        steps = []
        for frame, state in zip(
                self.trace.data()["frames"], self.trace.states(), strict=True):
            if frame["phase"] == "scheduled":
                counts: Counter[int] = Counter()
                for key, seq in state["seqs"].items():
                    counts[int(key.partition(".")[0])] += seq["now"]
                steps.append(dict(+counts))
        return steps

    def texts(self) -> list[str]:
        return [answer.text for output in self.outputs for answer in output.outputs]


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
