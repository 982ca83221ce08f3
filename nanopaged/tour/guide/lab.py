"""The engine of the tour, and runs that are recorded while they are made."""

import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from nanopaged import LLM, SamplingParams
from nanopaged.batch import Batch
from nanopaged.block_manager import Moves
from nanopaged.frontend.outputs import RequestOutput
from nanopaged.tour.recorder import Trace
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


class Run(Trace):
    """A run that was recorded for the player, and what the text says about it."""

    def __init__(self, llm: LLM, title: str) -> None:
        super().__init__(llm, title=title)
        self.batches: list[Batch] = []  # one for each step
        self.outputs: list[RequestOutput] = []

    def _observe(self, phase: str, batch: Batch | None) -> None:
        super()._observe(phase, batch)
        if phase == "scheduled" and batch is not None:
            self.batches.append(batch)

    @property
    def num_computed(self) -> int:
        """How many tokens all steps have computed."""
        return sum(len(batch.token_ids) for batch in self.batches)

    @property
    def moves(self) -> Moves:
        """The blocks that all steps have copied, or swapped out and in."""
        return [move for batch in self.batches for move in batch.moves]

    def scheduled(self) -> list[State]:
        """What the engine held when each step had been scheduled."""
        return [state for state, frame in zip(self.states(), self.frames, strict=True)
                if frame["phase"] == "scheduled"]

    def counts(self, request: int) -> list[int]:
        """How many tokens of a request each step computes."""
        return [sum(seq["now"] for key, seq in state["seqs"].items()
                    if key.startswith(f"{request}.")) for state in self.scheduled()]


def fastest(function: Callable[[], Any], device: torch.device, runs: int = 5) -> float:
    """Seconds of the fastest run: a limit is what was reached once."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    function()  # a warm-up
    seconds = []
    for _ in range(runs):
        wait()
        began = time.perf_counter()
        function()
        wait()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def others(settings: dict[str, Values], prompts: list[Any], params: Any,
           **common: Any) -> dict[str, Run]:
    """The same requests, served under other settings, by the names of these."""
    runs = {}
    for name, options in settings.items():
        with engine(**common | options) as llm:
            runs[name] = watch(llm, name, prompts, params)
    return runs


def watch(llm: LLM, title: str, prompts: list[Any], params: Any, together: bool = True
          ) -> Run:
    """Serve the prompts, and record every step. If they do not come together, a step
    runs after each.
    """
    params = params if isinstance(params, list) else [params] * len(prompts)
    outputs: dict[int, RequestOutput] = {}
    with Run(llm, title) as run:
        for prompt, own in zip(prompts, params, strict=True):
            llm.add_request(prompt, own)
            if not together:
                llm.step()
        while llm.has_unfinished_requests():
            outputs |= {int(output.request_id): output for output in llm.step()}
    run.outputs = [outputs[request_id] for request_id in sorted(outputs)]
    return run
