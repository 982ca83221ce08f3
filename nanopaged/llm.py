"""The engine's front end: prompts in, text out. Start reading here, at `LLM._step`.

The engine repeats that one step. Most other files explain one of its lines. The rest of
this file turns prompts into requests, and requests into outputs. The top of
`sequence.py` defines the terms.
"""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from nanopaged import loader
from nanopaged.block_manager import BlockManager
from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams, check
from nanopaged.model_runner import ModelRunner
from nanopaged.outputs import EngineStats, RequestOutput
from nanopaged.parallel import Ranks
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Outbox, SequenceGroup


class LLM(AbstractContextManager["LLM"]):
    """An engine that serves one model. See `EngineConfig` for the keyword arguments.

    >>> with LLM() as llm:  # the bundled model
    ...     print(llm.generate("ROMEO:")[0].outputs[0].text)

    Threads may share an engine. Their requests then share batches.
    """

    # -- The engine --------------------------------------------------------------------

    def _step(self) -> None:
        """The whole engine: who runs, one forward pass, what came out of it.

        On a GPU, `execute` only launches the forward pass, and the engine runs one step
        ahead: the host reads the tokens of the previous step while this one runs. What
        depends on a token's value, such as whether the sequence has ended, is therefore
        noticed one step late. By then one extra step has been launched for that
        sequence. The token that it samples is ignored. The K and V that it stores may
        go into a block that has been freed. But steps run in order, so the block's next
        owner writes later.
        """
        batch = self.scheduler.schedule()
        self._launched.append((batch, self.runner.execute(batch)))
        if len(self._launched) > self.runs_ahead:
            self.scheduler.update(*self._launched.popleft())

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        model = loader.BUNDLED if model is None else model
        self.config = EngineConfig(model, **options)
        self.model_config = loader.load_config(model)
        self.tokenizer = loader.load_tokenizer(model)
        self.eos_token_ids, self.default_params = loader.load_generation_config(
            model, self.model_config)
        self.ranks = Ranks(self.config, self.model_config)
        self.runner = ModelRunner(self.config, self.model_config, self.ranks)
        weakref.finalize(self, self.runner.free)
        self.ranks.serve(self.runner.run)  # this returns only on rank 0

        self.runs_ahead = self.runner.is_gpu  # see `_step`
        # For the rest see "Threads and Ctrl-C".
        self._ids = itertools.count()
        self.requests: dict[str, SequenceGroup] = {}  # by id, oldest first
        self._outbox: Outbox = {}
        self._lock: Any = threading.RLock()
        self._in_step = False
        self._reset()

    # -- Prompts in, text out ----------------------------------------------------------

    def generate(self, prompts: Any, sampling_params: Any = None,
                 use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete all prompts, and return an output for each, in the same order.

        A prompt is a string, a list of token ids, {"prompt": ...} or
        {"prompt_token_ids": ...}. A dict may also have a "cache_salt".
        `sampling_params` is one object for all prompts, or a list with one for each.
        None stands for `default_params`, from the model's generation_config.json.
        """
        groups = self._make_groups(prompts, sampling_params)
        with closing(self._run(groups, final_only=True)) as outputs:
            # Every bar, even if hidden, has a finalizer, and Python drops a Ctrl-C
            # that arrives in a finalizer. So there is no bar unless one is wanted.
            bar = tqdm(outputs, total=len(groups)) if use_tqdm else outputs
            return sorted(bar, key=lambda output: int(output.request_id))

    def stream(self, prompts: Any,
               sampling_params: Any = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yield each request's output so far whenever it grows.

        The first `next` queues the requests. Closing the iterator aborts those that
        have not finished.
        """
        return self._run(self._make_groups(prompts, sampling_params))

    def chat(self, messages: list[Any], sampling_params: Any = None,
             use_tqdm: bool = True,
             chat_template_kwargs: Any = None) -> list[RequestOutput]:
        """Answer one or more conversations: lists of {"role": ..., "content": ...}.

        `chat_template_kwargs` are passed on to the tokenizer's `apply_chat_template`.
        """
        options = {"add_generation_prompt": True, "return_dict": False}
        options |= chat_template_kwargs or {}
        ids = self.get_tokenizer().apply_chat_template(messages, **options)
        return self.generate(ids, sampling_params, use_tqdm)

    def beam_search(self, prompts: Any,
                    params: BeamSearchParams) -> list[RequestOutput]:
        """The `beam_width` best continuations of every prompt, best first.

        `cumulative_logprob` is the plain sum of the log-probabilities, which `logprobs`
        lists token by token.
        """
        return self.generate(prompts, params, use_tqdm=False)

    # -- Requests one by one -----------------------------------------------------------

    def add_request(self, prompt: Any, sampling_params: Any = None) -> str:
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
        return self._serve(self._outbox)

    def abort_request(self, request_id: str) -> None:
        """Have the next step end a request and free its blocks.

        The request's last output is what it has so far, with finish_reason "abort". If
        it has finished already, nothing happens.
        """
        check(isinstance(request_id, str), "request_id", "a str", request_id, TypeError)
        if group := self.requests.get(request_id):
            group.is_aborted = True

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        return bool(self.requests or self._outbox or self._in_step)

    # -- From prompts to requests ------------------------------------------------------

    def _make_groups(self, prompts: Any, params: Any) -> list[SequenceGroup]:
        """A request for each prompt. A list that contains an int is one prompt."""
        if not isinstance(prompts, list) or int in map(type, prompts):
            prompts = [prompts]
        params = params if isinstance(params, list) else [params] * len(prompts)
        check(len(params) == len(prompts), "sampling_params",
              f"one object, or a list of {len(prompts)}, one for each prompt", params)
        prompts = [p if isinstance(p, dict) else {"prompt": p} for p in prompts]
        return [self._make_group(param, **prompt)
                for prompt, param in zip(prompts, params, strict=True)]

    def _make_group(self, params: Any, prompt: Any = None, prompt_token_ids: Any = None,
                    cache_salt: Any = None) -> SequenceGroup:
        """A request that can be served; ValueError or TypeError if it never can be."""
        ids = prompt if prompt_token_ids is None else prompt_token_ids
        if isinstance(ids, str):
            ids = self.get_tokenizer()(ids).input_ids
        check(isinstance(ids, list) and {*map(type, ids)} <= {int}, "prompt",
              "a string or a list of token ids", ids, TypeError)
        params = self.default_params if params is None else params
        check(isinstance(params, SamplingParams | BeamSearchParams), "sampling_params",
              "SamplingParams or BeamSearchParams", params, TypeError)
        eos_ids = [] if params.ignore_eos else self.eos_token_ids
        vocabulary, most_seqs = self.model_config.vocab_size, self.config.max_num_seqs
        beam_params = params if isinstance(params, BeamSearchParams) else None
        if beam_params:
            # A group of `beam_width` sequences. Each reports enough candidates for
            # `beam_width` to go on, even if every EOS token is among them.
            most_seqs = min(most_seqs, vocabulary - len(eos_ids))
            params = SamplingParams(
                n=params.beam_width, temperature=0, max_tokens=params.max_tokens,
                logprobs=params.beam_width + len(eos_ids))
        check(params.n <= most_seqs, "n (or beam_width)", f"at most {most_seqs}, "
              "because of max_num_seqs or the vocabulary", params.n)
        if cache_salt is not None:
            params = replace(params, cache_salt=cache_salt)
        if params.stop:
            self.get_tokenizer()  # an error if there is none

        stop_ids = params.stop_token_ids or []
        wrong = [id for id in ids + stop_ids if not 0 <= id < vocabulary]
        check(not wrong, "token ids", f"from 0 to {vocabulary - 1}", wrong)
        longest = self.runner.max_model_len
        check(0 < len(ids) < longest, "number of prompt tokens",
              f"at least 1 and less than max_model_len={longest}", len(ids))
        text = prompt if isinstance(prompt, str) else None
        group = SequenceGroup(text, list(ids), params, {*stop_ids, *eos_ids}, longest,
                              self.tokenizer, beam_params)

        # A group runs as a whole, so all its sequences must fit at their longest.
        needed = self.block_manager.most_blocks(len(ids), [group.max_len] * params.n)
        check(needed <= self.runner.num_blocks, "num_blocks", f"at least {needed} for "
              "this request (raise it, or lower max_tokens, n or beam_width)",
              self.runner.num_blocks)
        return group

    # -- Threads and Ctrl-C ------------------------------------------------------------
    #
    # Only one thread at a time runs a step, and it does so for the requests of all
    # threads. Anyone may do two things at any time, even in the middle of a step: add
    # to `requests`, and mark a request as aborted. The next step sees both. A step puts
    # every request that changes into the request's outbox. Each call to `generate` or
    # `stream` has its own outbox, and all requests made by `add_request` share one.
    #
    # Ctrl-C, or an error, may arrive at any line. `generate` and `stream` then abort
    # their own requests. While `_in_step` is False it does no other harm. While it is
    # True, the engine's state may be left half-changed. Then `_in_step` stays True, and
    # the next call aborts every request that has started, no matter who made it,
    # and starts with a new state. (With several ranks that is impossible, because each
    # of them may be anywhere in the step. In that case every later call fails.) Aborted
    # requests are still reported, because they enter their outbox before they change.

    def _submit(self, groups: list[SequenceGroup], outbox: Outbox) -> None:
        """Add requests, all at once."""
        for group in groups:
            group.request_id = str(next(self._ids))
            group.outbox = outbox
            if group.params.seed is None:
                group.seed = f"{self.config.seed} {group.request_id}"
        self.requests.update({group.request_id: group for group in groups})

    def _run(self, groups: list[SequenceGroup],
             final_only: bool = False) -> Generator[RequestOutput, None, None]:
        """Step until these requests have finished, and yield outputs as they change."""
        outbox: Outbox = {}
        try:
            self._submit(groups, outbox)
            # Look at `live` before the outbox. A group enters its outbox before it
            # ends. So if none is live, no report can be added any more.
            while any(group.live for group in groups) or outbox:
                yield from self._serve(outbox, final_only)
        finally:  # an error, Ctrl-C, or a stream that is closed early or collected
            for group in groups:
                group.is_aborted = True

    def _serve(self, outbox: Outbox, final_only: bool = False) -> list[RequestOutput]:
        """Step, unless the outbox already has something. Then report what is in it."""
        self._check_not_in_step()
        with self._lock:
            if self.runner.model is None or (self._in_step and self.ranks.size > 1):
                raise RuntimeError("this engine was shut down, or a step on several "
                                   "ranks failed: start a new one")
            if self._in_step:
                self._reset()
            self._in_step = True
            # The step of another thread may have filled the outbox already.
            if not outbox and self.requests:
                self._step()
            self._in_step = False
            outputs = [group.output() for group in outbox.values()
                       if not (final_only and group.live)]
            outbox.clear()
            return outputs

    def _check_not_in_step(self) -> None:
        """A signal handler or a finalizer may run in the middle of a step, on the same
        thread. It gets an error, because a step within a step would do harm. (This asks
        the lock, not `_in_step`, which stays True after a step has failed.)
        """
        if self._lock._is_owned():
            raise RuntimeError("this cannot be called from within a step")

    def _reset(self) -> None:
        """Start with all blocks free and an empty prefix cache.

        Requests that have started are aborted, without looking at the old state.
        """
        for group in list(self.requests.values()):
            if group.num_cached_tokens >= 0 or group.is_aborted:
                group.report()
                for seq in group.live:
                    seq.finish_reason = "abort"
                group.live = []
                del self.requests[group.request_id]
        self._launched: deque[Any] = deque()  # steps whose tokens are still to be read
        self.block_manager = BlockManager(
            self.runner.num_blocks, self.config.block_size,
            self.config.enable_prefix_caching, self.runner.num_swap_blocks)
        self.scheduler = Scheduler(self.config, self.block_manager, self.requests)

    # -- The rest ----------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer; ValueError if the model has none."""
        check(self.tokenizer is not None, "model", "one with a tokenizer (needed for "
              "text, but not for token ids)", self.config.model)
        return self.tokenizer

    def stats(self) -> EngineStats:
        """What the engine holds now, and what it has done since it started."""
        manager = self.block_manager
        return replace(self.scheduler.stats, blocks_cached=len(manager.published),
                       blocks_used=manager.num_blocks - len(manager.free_blocks))

    def shutdown(self) -> None:
        """Free this process's memory. The engine cannot be used after that."""
        self._check_not_in_step()
        with self._lock:
            self.runner.free()

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
