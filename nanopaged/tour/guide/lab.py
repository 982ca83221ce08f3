"""The engine of the tour, and runs that are recorded while they are made."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeAlias

from nanopaged import LLM, SamplingParams
from nanopaged.outputs import RequestOutput
from nanopaged.scheduler import Batch, ControlMessage
from nanopaged.tour.guide.markdown import Html
from nanopaged.tour.page import embed
from nanopaged.tour.recorder import Trace, trace

Values: TypeAlias = dict[str, object]  # of a chapter's text, by name

SPEECH = "First Citizen:\nWe are accounted poor citizens"


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
    messages: list[ControlMessage]  # one for each step
    chunks: list[dict[int, int]]  # of each step: request -> tokens computed

    @property
    def player(self) -> Html:
        return self.player_at(None)

    def player_at(self, step: int | None) -> Html:
        """A player that opens at this step."""
        return Html(embed(self.trace, self.ident, step))

    def texts(self) -> list[str]:
        return [answer.text for output in self.outputs for answer in output.outputs]


def watch(llm: LLM, ident: str, title: str, prompts: Any, params: Any) -> Watched:
    """Serve the prompts, and record every step."""
    messages: list[ControlMessage] = []
    chunks: list[dict[int, int]] = []

    def note(phase: str, batch: Batch | None) -> None:
        if phase != "scheduled" or batch is None:
            return
        requests = {seq.row: int(group.request_id)
                    for group in llm.scheduler.running for seq in group.live}
        counts: Counter[int] = Counter()
        for row, count in zip(batch.message.rows, batch.message.counts, strict=True):
            counts[requests[row]] += count
        messages.append(batch.message)
        chunks.append(dict(counts))

    llm.observers.append(note)
    with trace(llm, title=title) as run:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.observers.remove(note)
    return Watched(run, ident, outputs, messages, chunks)
