"""The engine's front: prompts in, text out. Start reading here, at `LLM._step`.

That method is the whole engine. The rest of this file turns prompts into requests and
requests into outputs, and most other files explain one line of it. The words are
explained at the top of `sequence.py`.

The books of the engine are the queues, the block tables and the prefix cache. Only a
step touches them, one thread at a time. Everybody else puts new requests, and the ids
of those to be aborted, into an inbox, which the next step empties. What has changed is
put into an outbox. Each call of `generate` or `stream` has its own, and all requests
made by `add_request` share one.
"""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from nanopaged import loader
from nanopaged.block_manager import BlockManager
from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams, check, fits
from nanopaged.model_runner import ModelRunner
from nanopaged.outputs import EngineStats, RequestOutput
from nanopaged.parallel import Ranks
from nanopaged.scheduler import Observer, Scheduler
from nanopaged.sequence import Outbox, SequenceGroup


class LLM(AbstractContextManager["LLM"]):
    """An engine with one model. For the keyword arguments see `EngineConfig`.

    >>> with LLM() as llm:  # the bundled model
    ...     print(llm.generate("ROMEO:")[0].outputs[0].text)

    Threads may share an engine: their requests then run in common batches.
    """

    # -- The engine --------------------------------------------------------------------

    def _step(self) -> None:
        """The whole engine: who runs, one forward pass, what came out of it.

        The scheduler calls all `observers` with the name of the phase and the batch:
        "begin" (without a batch), "scheduled", "executed" (the tokens are known) and
        "updated" (they are in the books).
        """
        batch = self.scheduler.schedule()
        sampled = self.runner.execute(batch)
        self.scheduler.update(batch, sampled)

    def _step_ahead(self) -> None:
        """The same on a GPU, where `execute` only launches the forward pass. The tokens
        of the step before are read while this one runs.

        So what depends on a token's value (an end, a stop string) is noticed one step
        late. By then one step too many has been launched for that sequence. The token
        that it samples is ignored. The K and V that it stores may go into a block that
        has been freed, but steps run in order, so the block's next owner writes later.
        """
        batch = self.scheduler.schedule()
        self._launched.append((batch, self.runner.execute(batch)))
        if len(self._launched) > 1:
            self.scheduler.update(*self._launched.popleft())

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self.config = config = EngineConfig(model, **options)
        name = config.model or loader.BUNDLED
        self.model_config = loader.load_config(name)
        self.tokenizer = loader.load_tokenizer(name)
        self.eos_token_ids, self.default_params = loader.load_generation_config(
            name, self.model_config)
        self.ranks = Ranks(config, self.model_config)
        self.runner = ModelRunner(config, self.model_config, self.ranks)
        weakref.finalize(self, self.runner.free)
        if self.ranks.rank > 0:
            self.ranks.serve(self.runner.run)  # until rank 0 ends; does not return

        self._ids = itertools.count()
        # Requests, and the ids of those that are to be aborted.
        self._inbox: deque[SequenceGroup | str] = deque()
        self._outbox: Outbox = {}  # for requests made by `add_request`
        self._lock: Any = threading.RLock()
        self._in_step = False  # it stays True if an error or Ctrl-C ended the step
        self.observers: list[Observer] = []
        self.runs_ahead = self.runner.device.type == "cuda"
        self._start_books()

    def _start_books(self, unfinished: Iterable[SequenceGroup] = ()) -> None:
        """Begin with all blocks free and an empty prefix cache. What is unfinished is
        aborted, whatever the old books say.
        """
        for group in unfinished:
            group.report()
            for seq in group.live:
                seq.finish_reason = "abort"
            group.live = []
        self._launched: deque[Any] = deque()  # steps whose tokens are not read yet
        self.block_manager = BlockManager(
            self.runner.num_blocks, self.config.block_size,
            self.config.enable_prefix_caching, self.runner.num_swap_blocks)
        self.scheduler = Scheduler(self.config, self.block_manager, self.observers)

    def _serve(self, outbox: Outbox, final_only: bool = False) -> list[RequestOutput]:
        """Step, unless the outbox has something already; then report what is in it.

        If an error or Ctrl-C interrupts this, nobody knows whether the books are right.
        So the next call finds `_in_step` set, aborts all requests that wait or run,
        whoever made them, and starts new books. With several ranks, each of which may
        be anywhere in the step, that is not possible: then every later call fails.
        """
        self._check_not_in_step()
        with self._lock:
            is_closed = self.runner.model is None
            if is_closed or (self._in_step and self.ranks.size > 1):
                raise RuntimeError("this engine is shut down: start a new one")
            if self._in_step:
                self._start_books(self.scheduler.unfinished.values())
            self._in_step = True
            self._read_inbox()
            # The step of another thread may have filled the outbox already.
            if not outbox and self.scheduler.unfinished:
                self._step_ahead() if self.runs_ahead else self._step()
            self._in_step = False
            outputs = [group.output() for group in outbox.values()
                       if not (final_only and group.live)]
            outbox.clear()
            return outputs

    def _check_not_in_step(self) -> None:
        if self._lock._is_owned():
            raise RuntimeError("a step is running: an observer cannot call this")

    def _read_inbox(self) -> None:
        while self._inbox:
            item = self._inbox[0]  # it stays there until this is done
            if isinstance(item, SequenceGroup):
                if item.live:
                    self.scheduler.waiting[item.request_id] = item
            elif item in self.scheduler.unfinished:
                self.scheduler.abort(self.scheduler.unfinished[item])
            self._inbox.popleft()

    # -- Prompts in, text out ----------------------------------------------------------

    def generate(self, prompts: Any, sampling_params: Any = None,
                 use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete all prompts; returns an output for each, in their order.

        A prompt is a string, a list of token ids, {"prompt": ..} or
        {"prompt_token_ids": ..}; a dict may also have a "cache_salt".
        `sampling_params` are for all prompts, or a list with one for each. None takes
        `default_params`, those of the model's generation_config.json.
        """
        groups = self._make_groups(prompts, sampling_params)
        with closing(self._run(groups, final_only=True)) as outputs:
            # A bar has a finalizer, and Python drops a Ctrl-C that strikes in one. So
            # there is no bar, not even a hidden one, unless it is asked for.
            bar = tqdm(outputs, total=len(groups)) if use_tqdm else outputs
            return sorted(bar, key=lambda output: int(output.request_id))

    def stream(self, prompts: Any,
               sampling_params: Any = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yields the output so far of each request as it grows.

        The requests are queued by the first `next`. Closing the iterator aborts what
        has not finished.
        """
        return self._run(self._make_groups(prompts, sampling_params))

    def chat(self, messages: list[Any], sampling_params: Any = None,
             use_tqdm: bool = True, **options: Any) -> list[RequestOutput]:
        """Answer a conversation: a list of {"role": .., "content": ..}. Or several.

        `options` are those of the tokenizer's `apply_chat_template`.
        """
        options = {"add_generation_prompt": True, "return_dict": False} | options
        ids = self.get_tokenizer().apply_chat_template(messages, **options)
        return self.generate(ids, sampling_params, use_tqdm)

    def beam_search(self, prompts: Any,
                    params: BeamSearchParams) -> list[RequestOutput]:
        """The `beam_width` best continuations of every prompt, best first.

        `cumulative_logprob` is the plain sum, and `logprobs` has that of each token.
        """
        return self.generate(prompts, params, use_tqdm=False)

    def _run(self, groups: list[SequenceGroup],
             final_only: bool = False) -> Generator[RequestOutput, None, None]:
        """Step until these groups have finished; yields their outputs as they change.
        """
        outbox: Outbox = {}
        try:
            self._submit(groups, outbox)
            # Look at `live` first: another thread reports a group before it ends it.
            while any(group.live for group in groups) or outbox:
                yield from self._serve(outbox, final_only)
        finally:  # an error, Ctrl-C, or a stream that is closed early or collected
            self._inbox.extend([group.request_id for group in groups if group.live])

    # -- Requests one by one -----------------------------------------------------------

    def add_request(self, prompt: Any, sampling_params: Any = None) -> str:
        """Queue a request for `step`; returns its id. A bad one changes nothing."""
        group = self._make_group(prompt, sampling_params)
        self._submit([group], self._outbox)
        return group.request_id

    def step(self) -> list[RequestOutput]:
        """Run a step, unless there is something to report already; returns the outputs
        so far of all requests that changed.

        These are requests made by `add_request`; `generate` and `stream` report their
        own.
        """
        return self._serve(self._outbox)

    def abort_request(self, request_id: str) -> None:
        """Let the next step end a request, and free its blocks.

        The request's last output is what it has so far, with finish_reason "abort".
        Nothing happens to one that has finished.
        """
        check(isinstance(request_id, str), "request_id", "a str", request_id, TypeError)
        self._inbox.append(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        return bool(self._inbox or self._outbox or self._in_step
                    or self.scheduler.unfinished)

    # -- From prompts to requests ------------------------------------------------------

    def _submit(self, groups: list[SequenceGroup], outbox: Outbox) -> None:
        """Put groups into the inbox, all at once."""
        for group in groups:
            group.request_id = str(next(self._ids))
            group.outbox = outbox
            if group.params.seed is None:
                group.seed = f"{self.config.seed} {group.request_id}"
        self._inbox.extend(groups)

    def _make_groups(self, prompts: Any, params: Any) -> list[SequenceGroup]:
        if not isinstance(prompts, list) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        params = params if isinstance(params, list) else [params] * len(prompts)
        check(len(params) == len(prompts), "sampling_params",
              f"one for all prompts, or {len(prompts)}, one for each", params)
        return [self._make_group(*pair) for pair in zip(prompts, params, strict=True)]

    def _make_group(self, prompt: Any, params: Any) -> SequenceGroup:
        """A request that can be served; ValueError or TypeError if it never can."""
        params = self.default_params if params is None else params
        max_n = self.config.max_num_seqs
        beam_params = params if isinstance(params, BeamSearchParams) else None
        if beam_params:
            # A group of `beam_width` sequences that report candidates: so many that
            # `beam_width` are left that go on, even if all EOS tokens are among them.
            width, num_eos = beam_params.beam_width, len(self.eos_token_ids)
            max_n = min(max_n, self.model_config.vocab_size - num_eos)
            params = SamplingParams(
                n=width, temperature=0, max_tokens=params.max_tokens,
                ignore_eos=params.ignore_eos, logprobs=width + num_eos)
        check(isinstance(params, SamplingParams), "sampling_params",
              "SamplingParams or BeamSearchParams", params, TypeError)
        check(params.n <= max_n, "n (or beam_width)", f"at most {max_n}, because of "
              "max_num_seqs or the vocabulary", params.n)
        if params.stop:
            self.get_tokenizer()

        fields = prompt if isinstance(prompt, dict) else {"prompt": prompt}
        text, ids, salt = self._encode(**fields)
        if salt is not None:
            params = replace(params, cache_salt=salt)
        stop_ids = params.stop_token_ids or []
        last = self.model_config.vocab_size - 1
        wrong = [id for id in ids + stop_ids if not 0 <= id <= last]
        check(not wrong, "token ids", f"from 0 to {last}", wrong)
        eos_ids = [] if params.ignore_eos else self.eos_token_ids
        longest = self.runner.max_model_len
        check(0 < len(ids) < longest, "number of prompt tokens",
              f"at least 1, and below max_model_len={longest}", len(ids))
        group = SequenceGroup(text, ids, params, {*stop_ids, *eos_ids}, longest,
                              self.tokenizer, beam_params)

        # A group runs as a whole, so all its sequences must fit at their longest.
        needed = self.block_manager.most_blocks(len(ids), [group.max_len] * params.n)
        check(needed <= self.runner.num_blocks, "num_blocks", f"at least {needed} for "
              "this request (raise it, or lower max_tokens, n or beam_width)",
              self.runner.num_blocks)
        return group

    def _encode(self, prompt: Any = None, prompt_token_ids: Any = None,
                cache_salt: Any = None) -> tuple[str | None, list[int], Any]:
        """The text of a prompt, if it is known, its token ids, and its cache salt."""
        ids = prompt if prompt_token_ids is None else prompt_token_ids
        if isinstance(ids, str):
            ids = self.get_tokenizer()(ids).input_ids
        is_right = fits(ids, list[int])
        check(is_right, "prompt", "a string or a list of token ids", ids, TypeError)
        return prompt if isinstance(prompt, str) else None, list(ids), cache_salt

    # -- The rest ----------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer; ValueError if the model has none."""
        check(self.tokenizer is not None, "model", "one with a tokenizer, which text "
              "needs, and token ids do not", self.config.model)
        return self.tokenizer

    def stats(self) -> EngineStats:
        """What the engine holds now, and what it has done since its books began."""
        manager = self.block_manager
        return replace(self.scheduler.stats, blocks_cached=len(manager.published),
                       blocks_used=manager.num_blocks - len(manager.free_blocks))

    def shutdown(self) -> None:
        """Give back this process's memory. Nothing is served after that."""
        self._check_not_in_step()
        with self._lock:
            self.runner.free()

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
