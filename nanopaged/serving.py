"""What surrounds a step: requests from prompts, threads, Ctrl-C, and outputs.

`LLM` inherits from `Serving`, and adds the step itself and the public methods.
"""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import replace
from numbers import Integral
from typing import Any, TypeAlias, TypedDict
from uuid import uuid4

import numpy as np

from nanopaged import loader
from nanopaged.block_manager import BlockManager
from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams, check
from nanopaged.outputs import CompletionOutput, EngineStats, RequestOutput
from nanopaged.parallel import Ranks
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Outbox, Sequence, SequenceGroup
from nanopaged.start_up import Runner


class PromptDict(TypedDict, total=False):
    """A prompt with either of the first two."""

    prompt: str | list[int]
    prompt_token_ids: list[int]
    cache_salt: str


# What the public methods take.
Prompt: TypeAlias = str | list[int] | PromptDict
Prompts: TypeAlias = Prompt | Collection[Prompt]
Params: TypeAlias = SamplingParams | BeamSearchParams
ParamsForAll: TypeAlias = Params | Collection[Params | None] | None
Messages: TypeAlias = list[dict[str, Any]]


class Serving:
    """Requests from any thread, and one step at a time."""

    # `LLM` has these.
    block_manager: BlockManager
    scheduler: Scheduler
    _step: Callable[[], None]
    _begin: Callable[[], None]

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        model = loader.BUNDLED if config.model is None else config.model
        self.model_config = loader.load_config(model)
        self.tokenizer = loader.load_tokenizer(model)
        self.eos_token_ids, self.default_params = loader.load_generation_config(
            model, self.model_config)
        self.ranks = Ranks(config, self.model_config)
        self.runner = Runner(config, self.model_config, self.ranks)
        weakref.finalize(self, self.runner.free)
        # With several ranks, all processes but the first stay here, and run the batches
        # that it sends.
        self.ranks.serve(self.runner.run)

        self.unfinished: dict[str, SequenceGroup] = {}  # by request id, oldest first
        self.aborted: deque[SequenceGroup] = deque()  # those that the next step ends
        self._ids, self._id_lock = itertools.count(), threading.RLock()
        self._outbox: Outbox = {}
        self._lock: Any = threading.RLock()
        self._in_step = False

    # -- From prompts to requests ------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer; ValueError if the model has none."""
        check(self.tokenizer is not None, "model", "one with a tokenizer (needed for "
              "text, but not for token ids)", self.config.model)
        return self.tokenizer

    def _make_groups(self, prompts: Any, params: Any) -> list[SequenceGroup]:
        """A request for each prompt. A sequence that contains an int is one prompt."""
        is_one = isinstance(prompts, str | dict) or not hasattr(prompts, "__len__")
        if is_one or any(isinstance(each, Integral) for each in prompts):
            prompts = [prompts]
        params = params if hasattr(params, "__len__") else [params] * len(prompts)
        check(len(params) == len(prompts), "sampling_params",
              f"one object, or a list of {len(prompts)}, one for each prompt", params)
        prompts = [p if isinstance(p, dict) else {"prompt": p} for p in prompts]
        return [self._make_group(param, **prompt)
                for prompt, param in zip(prompts, params, strict=True)]

    def _token_ids(self, prompt: Any) -> list[int]:
        """A prompt as token ids; TypeError if it is neither these nor a string."""
        if isinstance(prompt, str):
            prompt = self.get_tokenizer()(prompt).input_ids
        if isinstance(prompt, list | tuple | np.ndarray):  # numpy's numbers will do
            prompt = [id.item() if isinstance(id, np.integer) else id for id in prompt]
        check(isinstance(prompt, list) and {*map(type, prompt)} <= {int}, "prompt",
              "a string or a list of token ids", prompt, TypeError)
        return prompt  # type: ignore[no-any-return]

    def _make_group(self, params: Any, prompt: Any = None, prompt_token_ids: Any = None,
                    cache_salt: Any = None) -> SequenceGroup:
        """A request that can be served; ValueError or TypeError if it never can be."""
        ids = self._token_ids(prompt if prompt_token_ids is None else prompt_token_ids)
        params = self.default_params if params is None else params
        check(isinstance(params, Params), "sampling_params",
              "SamplingParams or BeamSearchParams", params, TypeError)
        eos_ids = [] if params.ignore_eos else self.eos_token_ids
        vocabulary, max_seqs = self.model_config.vocab_size, self.config.max_num_seqs
        beam_params = params if isinstance(params, BeamSearchParams) else None
        if beam_params:
            # A group of `beam_width` sequences. Each reports enough candidates for
            # `beam_width` to go on, even if every EOS token is among them.
            max_seqs = min(max_seqs, vocabulary - len(eos_ids))
            params = SamplingParams(
                n=params.beam_width, temperature=0, max_tokens=params.max_tokens,
                logprobs=params.beam_width + len(eos_ids))
        check(params.n <= max_seqs, "n (or beam_width)", f"at most {max_seqs}, "
              "because of max_num_seqs or the vocabulary", params.n)
        if params.prompt_logprobs is not None:
            cache_salt = uuid4().hex  # all tokens have to be computed, so find nothing
        if cache_salt is not None:
            params = replace(params, cache_salt=cache_salt)
        if params.stop:
            self.get_tokenizer()  # an error if there is none

        stop_ids = params.stop_token_ids or []
        all_ids = [*ids, *stop_ids, *(params.logit_bias or {})]
        wrong = [id for id in all_ids if not 0 <= id < vocabulary]
        check(not wrong, "token ids", f"from 0 to {vocabulary - 1}", wrong)
        longest = self.runner.max_model_len
        check(0 < len(ids) < longest, "number of prompt tokens",
              f"at least 1 and less than max_model_len={longest}", len(ids))
        text = prompt if isinstance(prompt, str) else None
        group = SequenceGroup(text, ids, params, {*stop_ids, *eos_ids}, longest,
                              self.tokenizer, beam_params)

        # A group runs as a whole, so all its sequences must fit at their longest.
        needed = self.block_manager.max_blocks(len(ids), [group.max_len] * params.n)
        check(needed <= self.runner.num_blocks, "num_blocks", f"at least {needed} for "
              "this request (raise it, or lower max_tokens, n or beam_width)",
              self.runner.num_blocks)
        return group

    # -- Threads and Ctrl-C ------------------------------------------------------------
    #
    # One thread at a time runs a step, for the requests of all threads. Everyone else
    # only adds to `unfinished` or to `aborted`, and may do so at any time, even in the
    # middle of a step. The next step sees both. A step puts every request that changes
    # into the request's outbox. Each call to `generate` or `stream` has its own outbox,
    # and all requests made by `add_request` share one.
    #
    # Ctrl-C, or an error, may arrive at any line. `generate` and `stream` then abort
    # their own requests. If a step breaks off, the engine's state may be half-changed.
    # Then `_in_step` stays True, and the next call aborts every request that has
    # started, no matter who made it, and begins empty. (With several ranks that is
    # impossible, because each of them may be anywhere in the step. In that case every
    # later call fails.) Aborted requests are still reported, because a request enters
    # its outbox before it changes.

    def _submit(self, groups: list[SequenceGroup], outbox: Outbox) -> None:
        """Queue requests, all at once."""
        with self._id_lock:  # so they have consecutive ids
            for group in groups:
                group.request_id = str(next(self._ids))
        for group in groups:
            group.outbox = outbox
            if group.params.seed is None:
                group.seed = f"{self.config.seed} {group.request_id}"
        self.unfinished.update({group.request_id: group for group in groups})

    def _outputs_of(self, groups: list[SequenceGroup],
                    final_only: bool = False) -> Generator[RequestOutput, None, None]:
        """Step until these requests have finished, and yield outputs as they change."""
        outbox: Outbox = {}
        try:
            self._submit(groups, outbox)
            # Look at `live` before the outbox. A group enters its outbox before it
            # ends. So if none is live, no report can be added any more.
            while any(group.live for group in groups) or outbox:
                yield from self._collect(outbox, final_only)
        finally:  # an error, Ctrl-C, or a stream that is closed or garbage-collected
            self.aborted.extend([group for group in groups if group.live])

    def _collect(self, outbox: Outbox, final_only: bool = False) -> list[RequestOutput]:
        """Step, unless the outbox already has something. Then report what is in it."""
        self._check_not_in_step()
        with self._lock:
            self._check_open()
            if self._in_step:
                self._reset()
            self._in_step = True
            # The step of another thread may have filled the outbox already.
            if not outbox and self.unfinished:
                self._step()
            self._in_step = False
            for group in outbox.values():
                if (error := group.error) and not group.live:
                    group.error = None  # the next call reports what the request has
                    raise error
            outputs = [request_output(group) for group in outbox.values()
                       if not (final_only and group.live)]
            outbox.clear()
            return outputs

    def _check_open(self) -> None:
        if self.runner.model is None or (self._in_step and self.ranks.size > 1):
            raise RuntimeError("this engine was shut down, or a step on several ranks "
                               "failed: start a new one")

    def _check_not_in_step(self) -> None:
        """A signal handler or a finalizer may run in the middle of a step, on the same
        thread. It gets an error, because a step within a step would do harm. (This asks
        the lock, not `_in_step`, which stays True after a step has failed.)
        """
        if self._lock._is_owned():
            raise RuntimeError("this cannot be called from within a step")

    def _reset(self) -> None:
        """Begin with an empty engine. Requests that have started, or ended in the step
        that broke off, are aborted without looking at the old state. Others will run.
        """
        for group in list(self.unfinished.values()):
            if group.num_cached_tokens >= 0 or not group.live:
                group.report()
                for seq in group.live:
                    seq.finish_reason = "abort"
                group.live = []
                del self.unfinished[group.request_id]
        self._begin()

    # -- The rest ----------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """What the engine holds now, and what it has done since it started."""
        manager = self.block_manager
        return replace(
            self.scheduler.stats, blocks_cached=len(manager.prefix_cache.published),
            blocks_used=manager.num_blocks - len(manager.free_blocks))

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache and reset the statistics. If requests are unfinished,
        do nothing and return False.
        """
        self._check_not_in_step()
        with self._lock:
            return self._reset_if_idle()

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Replace the model's weights, and reset the prefix cache.

        weights: the names and tensors of a whole checkpoint. Raises ValueError, and
        changes no weight, if a name or a shape is wrong, or if requests are unfinished.
        """
        self._check_not_in_step()
        with self._lock:
            # The cache is emptied first, in case what follows is interrupted.
            check(self._reset_if_idle(), "the number of unfinished requests",
                  "0 for load_weights", len(self.unfinished))
            loader.replace_weights(self.runner.model, dict(weights), self.ranks)

    def _reset_if_idle(self) -> bool:
        self._check_open()
        self.scheduler.end_aborted()
        if not self.unfinished:
            self._reset()
        return not self.unfinished

    def shutdown(self) -> None:
        """Free this process's memory. The engine cannot be used after that."""
        self._check_not_in_step()
        with self._lock:
            self.runner.free()

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


# -- From requests to outputs ----------------------------------------------------------

def request_output(group: SequenceGroup) -> RequestOutput:
    """What the caller sees of a request so far."""
    scores: Any = None
    if group.params.prompt_logprobs is not None:
        scores = [None, *group.prompt_logprobs.values()]
    return RequestOutput(
        group.request_id, group.prompt, group.prompt_token_ids,
        [completion_output(seq, index) for index, seq in enumerate(group.sequences)],
        not group.live, max(0, group.num_cached_tokens), scores)


def completion_output(seq: Sequence, index: int) -> CompletionOutput:
    """What the caller sees of a sequence so far."""
    params, is_final = seq.group.params, seq.finish_reason is not None
    text = seq.detokenize(is_final).visible(is_final)
    stop_reason: str | int | None = seq.detokenizer.stopped_by
    stop_ids = params.stop_token_ids or []
    if seq.finish_reason == "stop" and seq.token_ids[-1] in stop_ids:
        stop_reason = stop_reason or seq.token_ids[-1]
    has_logprobs = params.logprobs is not None
    return CompletionOutput(
        index, text, seq.token_ids[seq.group.num_prompt_tokens :],
        cumulative_logprob=seq.cumulative_logprob if has_logprobs else None,
        logprobs=list(seq.logprobs) if has_logprobs else None,
        finish_reason=seq.finish_reason, stop_reason=stop_reason)
