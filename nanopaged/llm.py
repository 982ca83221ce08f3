"""The engine's front end: prompts in, text out. Start reading here, at `LLM._step`.

The engine repeats that one step until no request is left, and the files of the first
reading explain its lines. The top of `sequence.py` defines the terms. `serving.py`,
which the methods below use, belongs to the second reading: it makes requests from
prompts, calls `_step`, and copes with threads and Ctrl-C.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from nanopaged.block_manager import BlockManager
from nanopaged.config import BeamSearchParams, EngineConfig, check
from nanopaged.outputs import RequestOutput
from nanopaged.scheduler import Scheduler
from nanopaged.serving import Messages, Params, ParamsForAll, Prompt, Prompts, Serving


class LLM(Serving, AbstractContextManager["LLM"]):
    """An engine that serves one model. See `EngineConfig` for the keyword arguments.

    >>> with LLM() as llm:  # the bundled model
    ...     print(llm.generate("ROMEO:")[0].outputs[0].text)

    Threads may share an engine, and their requests then share batches.
    """

    # -- The engine --------------------------------------------------------------------

    def _step(self) -> None:
        """The whole engine: who runs, one forward pass, what came out of it.

        On a CPU, `runs_ahead` is False, so a step's tokens are read as soon as it has
        run. On a GPU, the engine runs one step ahead: it reads the tokens of the
        previous step while this one runs. (`ModelRunner.execute` says what follows from
        that. Until then, think of a CPU.)
        """
        batch = self.scheduler.schedule()
        self._launched.append((batch, self.runner.execute(batch)))
        if len(self._launched) > self.runs_ahead:
            self.scheduler.update(*self._launched.popleft())

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        super().__init__(EngineConfig(model, **options))  # makes `self.runner`, too
        self.runs_ahead = self.runner.is_gpu
        self._reset()

    def _begin(self) -> None:
        """All blocks are free, the prefix cache is empty, and nothing runs. `_reset`
        calls this at the start, and again after a step that has failed.
        """
        self._launched: deque[Any] = deque()  # steps whose tokens are still to be read
        self.block_manager = BlockManager(
            self.runner.num_blocks, self.config.block_size,
            self.config.enable_prefix_caching, self.runner.num_swap_blocks)
        self.scheduler = Scheduler(
            self.config, self.block_manager, self.unfinished, self.aborted)

    # -- Prompts in, text out ----------------------------------------------------------

    def generate(self, prompts: Prompts, sampling_params: ParamsForAll = None,
                 use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete all prompts, and return an output for each, in the same order.

        A prompt is a string, a list of token ids, {"prompt": ...} or
        {"prompt_token_ids": ...}. A dict may also have a "cache_salt".
        `sampling_params` is one object for all prompts, or a list with one for each.
        None stands for `default_params`, from the model's generation_config.json.
        """
        groups = self._make_groups(prompts, sampling_params)
        with closing(self._outputs_of(groups, final_only=True)) as outputs:
            # Every bar, even if hidden, has a finalizer, and Python drops a Ctrl-C
            # that arrives in a finalizer. So there is no bar unless one is wanted.
            bar = tqdm(outputs, total=len(groups)) if use_tqdm else outputs
            return sorted(bar, key=lambda output: int(output.request_id))

    def stream(self, prompts: Prompts,
               sampling_params: ParamsForAll = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yield each request's output so far whenever it grows.

        The first `next` queues the requests. Closing the iterator aborts those that
        have not finished.
        """
        return self._outputs_of(self._make_groups(prompts, sampling_params))

    def chat(self, messages: Messages | list[Messages],
             sampling_params: ParamsForAll = None, use_tqdm: bool = True,
             chat_template_kwargs: dict[str, Any] | None = None) -> list[RequestOutput]:
        """Answer one or more conversations: lists of {"role": ..., "content": ...}.

        `chat_template_kwargs` are passed on to the tokenizer's `apply_chat_template`.
        """
        options = {"add_generation_prompt": True, "return_dict": False}
        options |= chat_template_kwargs or {}
        ids = self.get_tokenizer().apply_chat_template(messages, **options)
        return self.generate(ids, sampling_params, use_tqdm)

    def beam_search(self, prompts: Prompts,
                    params: BeamSearchParams) -> list[RequestOutput]:
        """The `beam_width` best continuations of every prompt, best first.

        `logprobs` has each token's log-probability, and `cumulative_logprob` their sum.
        """
        return self.generate(prompts, params, use_tqdm=False)

    # -- Requests one by one -----------------------------------------------------------

    def add_request(self, prompt: Prompt, sampling_params: Params | None = None) -> str:
        """Queue a request for `step`, and return its id.

        An invalid request raises an error and leaves the engine unchanged.
        """
        groups = self._make_groups([prompt], [sampling_params])
        self._submit(groups, self._outbox)
        return groups[0].request_id

    def step(self) -> list[RequestOutput]:
        """Run a step, unless there is already something to report.

        Returns the current output of each request from `add_request` that has changed.
        (`generate` and `stream` report their own.)
        """
        return self._collect(self._outbox)

    def abort_request(self, request_id: str) -> None:
        """Have the next step end a request and free its blocks.

        The request's last output is what it has so far, with finish_reason "abort". If
        it has finished already, nothing happens.
        """
        check(isinstance(request_id, str), "request_id", "a str", request_id, TypeError)
        if group := self.unfinished.get(request_id):
            self.aborted.append(group)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        # `_in_step`: a step has failed, and what it aborts is still to be reported.
        return bool(self.unfinished or self._outbox or self._in_step)
