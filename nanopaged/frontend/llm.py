"""The API: prompts in, text out, from any thread, no matter what interrupts it.

Threads share the engine. One of them at a time runs a step, for the requests of all.
Then it puts each request that has changed into the outbox of the call that made it:
each call to `generate` or `stream` has an outbox of its own, and all requests made by
`add_request` share one. Everyone else only adds or aborts requests, and may do so at
any time, even in the middle of a step. The next step sees both.

Ctrl-C, or an error, may arrive at any line. `generate` and `stream` then abort their
own requests. If a step breaks off, the engine's state may be half-changed. Then
`_step_unfinished` stays True, and the next step resets the engine instead: every
request that has started is aborted, no matter who made it, and still reported. With
several ranks that is impossible, because each of them may be anywhere in the step. In
that case every later call that needs a step fails.
"""

import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from copy import deepcopy
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, TypeAlias

from tqdm.auto import tqdm

from nanopaged.checks import check
from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams
from nanopaged.engine import Changed
from nanopaged.frontend.outputs import Outbox, Request, RequestOutput, let_go
from nanopaged.frontend.prompts import Params, make_requests, render_chats, tokenizer_of
from nanopaged.loading import checkpoint
from nanopaged.loading.errors import REPAIR, explained
from nanopaged.loading.start_up import free_runner, make_engine
from nanopaged.loading.weights import check_weights, replace_weights
from nanopaged.sequence import SequenceGroup
from nanopaged.stats import EngineStats

# Arrays and tensors of token ids, and any iterable of prompts, also work.
Prompt: TypeAlias = str | list[int] | dict[str, Any]
Prompts: TypeAlias = Prompt | Iterable[Prompt]
ParamsForAll: TypeAlias = Params | Iterable[Params | None] | None
P = ParamSpec("P")


def takes(source: Callable[P, object]
          ) -> Callable[[Callable[..., None]], Callable[Concatenate["LLM", P], None]]:
    """Show the parameters of a class for a method of LLM, in editors and in `help`."""
    def give(method: Any) -> Any:
        method.__wrapped__ = vars(source)["__init__"]  # `inspect.signature` looks there
        return method

    return give


class LLM(AbstractContextManager["LLM"]):
    """An engine that serves one model. See `EngineConfig` for the keyword arguments.

    >>> with LLM() as llm:  # the bundled model
    ...     print(llm.generate("ROMEO:")[0].outputs[0].text)

    Threads may share an engine, and their requests then share batches.
    """

    @takes(EngineConfig)
    def __init__(self, *args: Any, **options: Any) -> None:
        self.config = EngineConfig(*args, **options)
        self.model_config = checkpoint.load_config(self.config)
        # The engine's own: `get_tokenizer` hands out another. None if there is none.
        self.tokenizer = checkpoint.load_tokenizer(self.model_config.source)
        self._tokenizer_copy: Any = None
        self.eos_token_ids, self._defaults = checkpoint.load_generation_config(
            self.model_config, self.tokenizer)
        self.engine = make_engine(self.config, self.model_config)
        self._requests: dict[SequenceGroup, Request] = {}  # that have not finished
        self._outbox: Outbox = {}  # of all requests from `add_request`
        self._make_locks()
        self._step_unfinished = False  # it stays True after a step that has failed
        self._half_loaded = False  # and this, after `load_weights` has broken off

    @cached_property
    def default_params(self) -> SamplingParams:
        """The parameters of requests without their own; ValueError if the model's
        generation_config.json has wrong ones.
        """
        source = self.model_config.source
        with explained(f"cannot read generation_config.json of {source} ({REPAIR}): "):
            return SamplingParams(**self._defaults)

    # -- Prompts in, text out ----------------------------------------------------------

    def generate(self, prompts: Prompts, sampling_params: ParamsForAll = None,
                 use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete all prompts, and return an output for each, in the same order.

        A prompt is a string, a list of token ids, {"prompt": ...} or
        {"prompt_token_ids": ...}. A dict may also have a "cache_salt".
        `sampling_params` is one object for all prompts, or a list with one for each.
        None stands for `default_params`, from the model's generation_config.json.
        """
        requests = make_requests(self, prompts, sampling_params)
        with closing(self._outputs_of(requests, final_only=True)) as outputs:
            # Every bar, even if hidden, has a finalizer, and Python drops a Ctrl-C
            # that arrives in a finalizer. So there is no bar unless one is wanted.
            bar = tqdm(outputs, total=len(requests)) if use_tqdm else outputs
            return sorted(bar, key=lambda output: int(output.request_id))

    def stream(self, prompts: Prompts,
               sampling_params: ParamsForAll = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yield each request's output so far whenever it grows.

        The first `next` queues the requests. Closing the iterator aborts those that
        have not finished.
        """
        return self._outputs_of(make_requests(self, prompts, sampling_params))

    def chat(self, messages: list[Any],
             sampling_params: ParamsForAll = None, use_tqdm: bool = True,
             chat_template_kwargs: dict[str, Any] | None = None) -> list[RequestOutput]:
        """Answer one or more conversations: lists of {"role": ..., "content": ...}.

        `chat_template_kwargs` are passed on to the tokenizer's `apply_chat_template`.
        """
        prompts = render_chats(self, messages, chat_template_kwargs or {})
        return self.generate(prompts, sampling_params, use_tqdm)

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
        requests = make_requests(self, [prompt], [sampling_params])
        self._submit(requests, self._outbox)
        return requests[0].group.request_id

    def step(self) -> list[RequestOutput]:
        """Run a step, unless a request has changed already. Return the current output
        of each request from `add_request` that has changed. (`generate` and `stream`
        report their own.)
        """
        return self._collect(self._outbox)

    def abort_request(self, request_id: str) -> None:
        """Have the next step end a request and free its blocks.

        The request's last output is what it has so far, with finish_reason "abort". If
        it has finished already, nothing happens.
        """
        check(isinstance(request_id, str), "request_id", "a str", request_id, TypeError)
        self.engine.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        # After a step that has failed, what it aborts is still to be reported.
        return bool(self.engine.num_unfinished or self._outbox or self._step_unfinished)

    # -- Many callers, one engine ------------------------------------------------------

    def _submit(self, requests: list[Request], outbox: Outbox,
                final_only: bool = False) -> None:
        """Queue requests, all at once. What they report will be in this outbox."""
        # Perhaps another thread is loading weights now. Then wait.
        with self._exclusive() if self._half_loaded else nullcontext():
            self._check_open()
        for request in requests:
            request.outbox, request.group.is_awaited = outbox, not final_only
        try:
            self._requests.update({request.group: request for request in requests})
            self.engine.add([request.group for request in requests])
        except BaseException:  # Ctrl-C: they may be queued, but nobody waits for them
            for request in requests:
                self._requests.pop(request.group, None)
            raise

    def _outputs_of(self, requests: list[Request], final_only: bool = False
                    ) -> Generator[RequestOutput, None, None]:
        """Step until these requests have finished, and yield outputs as they change."""
        outbox: Outbox = {}
        try:
            self._submit(requests, outbox, final_only)
            left = len(requests)
            while left:
                for output in self._collect(outbox):
                    left -= output.finished
                    yield output
        finally:  # an error, Ctrl-C, or a stream that is closed or garbage-collected
            for request in requests:
                self.engine.abort(request.group.request_id)
                self._requests.pop(request.group, None)
            outbox.clear()

    def _collect(self, outbox: Outbox) -> list[RequestOutput]:
        """Step, unless the outbox already has something. Then report what is in it."""
        with self._exclusive():
            # The step of another thread may have filled the outbox already. If a step
            # has failed, `_run` resets the engine instead of taking the next one.
            if self._step_unfinished or (not outbox and self.engine.num_unfinished):
                self._run(self.engine.step)
            outputs = [request.output() for request in outbox.values()]
            outbox.clear()
            return outputs

    def _run(self, act: Callable[[], Changed]) -> None:
        """Let the engine act. Read the text of what it changes, as far as stop strings
        need it, and put it into outboxes. If a step has failed, reset the engine.
        """
        self._check_open(act)
        act = self.engine.reset if self._step_unfinished else act
        self._step_unfinished = True
        changed = act()
        for request_id, group in changed.items():
            request = self._requests.get(group)  # None: its stream was closed
            if request and group.params.stop:
                for seq in request.read():
                    self.engine.stop(seq)
            if request and (group.is_awaited or not group.live):
                request.outbox[request_id] = request
            if not group.live:
                self._requests.pop(group, None)
                let_go(group)
        changed.clear()
        self._step_unfinished = False

    def _check_open(self, act: Any = None) -> None:
        runner = self.engine.runner
        is_broken = self._step_unfinished and runner.ranks.size > 1
        if runner.model is None or is_broken:
            raise RuntimeError("this engine was shut down, or a step on several ranks "
                               "failed: start a new one")
        # `load_weights` begins with a reset.
        if self._half_loaded and act != self.engine.reset_if_idle:
            raise RuntimeError("load_weights broke off, so only some weights are new: "
                               "call it again, with a whole checkpoint")

    def _make_locks(self) -> None:
        self._process_id = os.getpid()  # to see that this is not a fork of that process
        self._lock: Any = threading.RLock()
        self._last = threading.RLock()  # of the last thread that asked for a turn

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keep other threads out, and let them take turns: each caller holds a lock of
        its own, `mine`, and waits for that of the caller before it (a queue lock of
        Craig, Landin and Hagersten). `_lock` alone would often go to the thread that
        has just released it. But it is the one that can be asked who holds it.

        A signal handler or a finalizer may run in the middle of a step, on the same
        thread. It gets an error, because a step within a step would do harm. (This asks
        the lock, not `_step_unfinished`, which stays True after a step has failed.)
        """
        if self._process_id != os.getpid():
            # The threads that held the locks are not in this process. If one of them
            # was within a step, the next step resets the engine.
            self._make_locks()
        if self._lock._is_owned():
            raise RuntimeError("this cannot be called from within a step")
        mine = threading.RLock()
        with mine:
            before, self._last = self._last, mine
            with before, self._lock:
                yield

    # -- The rest ----------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer; ValueError if the model has none.

        It is a copy, always the same. `chat` uses its chat template. Nothing else that
        you set on it, such as truncation, changes what the engine does.
        """
        tokenizer = tokenizer_of(self)
        self._tokenizer_copy = self._tokenizer_copy or deepcopy(tokenizer)
        return self._tokenizer_copy

    def stats(self) -> EngineStats:
        """What the engine holds now, and what it has counted."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache and reset the statistics. If requests are unfinished,
        keep both and return False.
        """
        with self._exclusive():
            self._run(self.engine.reset_if_idle)
            return not self.engine.num_unfinished

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Replace the model's weights, and reset the prefix cache.

        weights: the names and tensors of a whole checkpoint. Raises ValueError or
        TypeError, and changes no weight, if a name or a tensor is wrong, or if requests
        are unfinished. If it breaks off later, by Ctrl-C for example, the engine
        answers nothing until it has been called again.
        """
        impl, runner = self.model_config.model_impl, self.engine.runner
        check(impl == "nanopaged" and runner.ranks.size == 1, "model_impl",
              "'nanopaged', on one rank, for load_weights", impl)
        named = dict(weights)  # without the lock: this may run any code
        check_weights(self.model_config, named)
        with self._exclusive():
            # The cache is emptied first: if the rest is interrupted, no old K and V
            # remain.
            self._run(self.engine.reset_if_idle)
            check(not self.engine.num_unfinished, "the number of unfinished requests",
                  "0 for load_weights", self.engine.num_unfinished)
            self._half_loaded = True
            replace_weights(runner, named)
            self._half_loaded = False

    def shutdown(self) -> None:
        """Free this process's memory. The engine cannot be used after that."""
        with self._exclusive():
            free_runner(self.engine.runner)

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
