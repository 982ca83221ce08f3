"""The engine's front: prompts in, text out. Start reading here, at `LLM._step`.

That method is the whole engine. The rest of this file turns prompts into requests and
sequences into text, and every other file explains one line of it. The words are
explained at the top of `sequence.py`.
"""

import itertools
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from copy import copy
from typing import Any, TypeAlias

from tqdm.auto import tqdm

from nanopaged.block_manager import BlockManager
from nanopaged.config import (
    BeamSearchParams,
    EngineConfig,
    SamplingParams,
    check_int,
    check_token_ids,
    check_type,
    takes_arguments_of,
)
from nanopaged.inputs import TextPrompt, TokensPrompt, encode, render, split_prompts
from nanopaged.loader import (
    load_config,
    load_generation_config,
    load_tokenizer,
    resolve_model,
)
from nanopaged.model_runner import ModelRunner
from nanopaged.outputs import (
    BeamSearchSequence,
    CompletionOutput,
    EngineStats,
    RequestOutput,
)
from nanopaged.parallel import Ranks
from nanopaged.scheduler import Batch, Scheduler
from nanopaged.sequence import SequenceGroup

Prompt: TypeAlias = str | list[int] | TextPrompt | TokensPrompt
Params: TypeAlias = SamplingParams | BeamSearchParams
Observer: TypeAlias = Callable[[str, Batch | None], None]


class LLM(AbstractContextManager["LLM"]):
    """An engine with one model. For the keyword arguments see `EngineConfig`.

    >>> with LLM() as llm:  # the bundled model
    ...     print(llm.generate("ROMEO:")[0].outputs[0].text)

    Threads may share an engine: their requests then run in common batches.
    """

    @takes_arguments_of(EngineConfig)
    def __init__(self, *values: Any, **options: Any) -> None:
        self.config = config = EngineConfig(*values, **options)
        path = resolve_model(config)
        self.model_config = load_config(path, config.hf_overrides)
        self.tokenizer = load_tokenizer(path, config)
        self.eos_token_ids, self._default_params = load_generation_config(
            path, self.model_config, self.tokenizer)
        self.ranks = Ranks(config, self.model_config)
        weakref.finalize(self, self.ranks.close)  # if nobody calls `shutdown`
        with self.ranks.watched():
            self.runner = ModelRunner(config, self.model_config, path, self.ranks)
            if self.ranks.rank > 0:
                self.ranks.serve(self.runner.run)  # until rank 0 ends; does not return

        self._ids = itertools.count()
        self._random = random.Random(config.seed)
        self._requests: dict[str, SequenceGroup] = {}  # whose end was not reported
        self._for_step: set[str] = set()  # ids of those that `add_request` made
        self._forgotten: list[SequenceGroup] = []  # to abort: nobody waits for them
        self._lock = threading.Lock()
        # The books are the queues, the block tables and the prefix cache. They are not
        # right while they change, nor if an error interrupts `_end_all_requests`.
        self._are_books_right = True
        self._closed = False
        self.observers: list[Observer] = []
        # On a GPU the next step is launched before the tokens of this one are read.
        self.steps_ahead = 1 if self.runner.device.type == "cuda" else 0
        self._launched: list[Any] = []  # steps and their outputs, oldest first
        self._start_books()
        logging.getLogger("nanopaged").info("%s: %s", path.name, self.runner.describe())

    def _start_books(self) -> None:
        """Begin with all blocks free, nothing in the prefix cache and no requests."""
        config, runner = self.config, self.runner
        self.block_manager = BlockManager(
            runner.num_blocks, config.block_size, config.enable_prefix_caching,
            runner.num_swap_blocks)
        self.scheduler = Scheduler(config, self.block_manager)

    # -- The engine --------------------------------------------------------------------

    def _step(self) -> None:
        """The whole engine: who runs, one forward pass, what came out of it.

        On a GPU, what depends on a token's value (an end, a stop string) is noticed one
        step late. By then one step too many has been launched for that sequence. The
        token that it samples is ignored. The K and V that it stores may go into a block
        that has been freed, but steps run in order, so the block's next owner writes
        later.
        """
        if not (self.scheduler.waiting or self.scheduler.running):
            return
        started = time.perf_counter()
        self._notify("begin")

        batch = self.scheduler.schedule()
        if not (batch.message.rows or self._launched):
            # Alone, the oldest group always fits.
            raise RuntimeError("nobody can run: blocks were lost, which is a bug")
        self._notify("scheduled", batch)

        sampled = self.runner.execute(batch)
        self._notify("executed", batch)

        # On a GPU the newest step is still running: read the tokens of the one before.
        # If the batch is empty, everybody waits for a token's value, so read them all.
        self._launched.append((batch, sampled))
        num_ahead = self.steps_ahead if batch.message.rows else 0
        while len(self._launched) > num_ahead:
            batch, sampled = self._launched.pop(0)
            self.scheduler.update(batch, sampled.read(), sampled.logprobs)
            self._notify("updated", batch)
        self.scheduler.stats.step_seconds += time.perf_counter() - started

    def _notify(self, phase: str, batch: Batch | None = None) -> None:
        """Tell observers where the step is: for timing, tracing and tests."""
        for observer in self.observers:
            observer(phase, batch)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Let one thread at a time change the books, and never leave them half-changed.

        If something fails in here, Ctrl-C included, nobody knows whether the books are
        right. So all requests end, and the engine starts again with empty books. With
        several ranks, each of which may be anywhere in the step, it shuts down.
        """
        with self._lock:
            self._check_open()
            if not self._are_books_right:
                # An earlier call failed, and so did cleaning up after it: do it now.
                self._end_all_requests()
            self._are_books_right = False  # until everything below has been done
            try:
                while self._forgotten:
                    group = self._forgotten.pop()
                    self._requests.pop(group.request_id, None)
                    self.scheduler.abort([group])
                    self.scheduler.changed.pop(group.request_id, None)
                yield
            except BaseException:
                self._end_all_requests()
                if self.ranks.size > 1:
                    self._close()
                raise
            self._are_books_right = True

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this engine has been shut down: make a new LLM")

    def _end_all_requests(self) -> None:
        """Start new books, in which every request has been aborted."""
        stats = self.scheduler.stats
        self._launched = []
        self._start_books()
        self.scheduler.stats = stats
        for group in self._requests.values():
            self.scheduler.changed[group.request_id] = group
            for seq in group.live:
                seq.finish_reason = "abort"
            group.live = []
        self._are_books_right = True

    # -- Requests one by one -----------------------------------------------------------

    def add_request(self, prompt: Prompt, sampling_params: Params | None = None) -> str:
        """Queue a request for `step`; returns its id. A bad one changes nothing."""
        params = self._default_params if sampling_params is None else sampling_params
        group = self._make_group(prompt, params)
        with self._exclusive():
            request_id = self._add(group)
            self._for_step.add(request_id)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs so far of all requests that changed.

        These are requests made by `add_request`; `generate` and `stream` report theirs.
        """
        if self._closed:  # what has been aborted is still reported
            return [self._output(group) for group in self._take_changed(self._for_step)]
        with self._exclusive(), self.ranks.watched():
            self._step()
            return [self._output(group) for group in self._take_changed(self._for_step)]

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End one request or several, and free their blocks.

        Does nothing to those that have finished. The next `step` returns what the
        others have so far, with finish_reason "abort".
        """
        ids = [request_id] if isinstance(request_id, str) else request_id
        ids = list(check_type("request_id", ids, (str, Iterable)))
        for id in ids:
            check_type("request_id", id, str)
        with self._exclusive():
            self.scheduler.abort(
                [self._requests[id] for id in ids if id in self._requests])

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._for_step)

    # -- Prompts in, text out ----------------------------------------------------------

    def generate(self, prompts: Any, sampling_params: Any = None,
                 use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete all prompts; returns an output for each, in their order.

        A prompt is a string, a list (or array) of token ids, {"prompt": ..} or
        {"prompt_token_ids": ..}; a dict may also have a "cache_salt".
        `sampling_params` are for all prompts, or a list with one for each. None takes
        `get_default_sampling_params()`.
        """
        groups = self._make_groups(prompts, sampling_params)
        num_finished = 0
        before = self.scheduler.stats.output_tokens
        # Python drops a Ctrl-C that strikes in a finalizer, and a bar has one. So a bar
        # is made only if it is shown.
        with tqdm(unit=" tokens") if use_tqdm else nullcontext() as bar:
            for group in self._run(groups):
                if bar is not None:
                    num_finished += not group.live
                    bar.set_description_str(
                        f"{num_finished}/{len(groups)} requests", refresh=False)
                    bar.update(self.scheduler.stats.output_tokens - before - bar.n)
        return [self._output(group) for group in groups]

    def stream(self, prompts: Any,
               sampling_params: Any = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yields the output so far of each request as it grows.

        Closing the iterator aborts what has not finished.
        """
        return self._outputs(self._make_groups(prompts, sampling_params))

    def _outputs(self, groups: list[SequenceGroup]) -> Iterator[RequestOutput]:
        with closing(self._run(groups)) as changed_groups:
            for group in changed_groups:
                with self._lock:
                    output = self._output(group)
                yield output

    def chat(self, messages: list[Any], sampling_params: Any = None,
             use_tqdm: bool = True, *, chat_template: str | None = None,
             add_generation_prompt: bool = True, continue_final_message: bool = False,
             tools: list[dict[str, Any]] | None = None,
             chat_template_kwargs: dict[str, Any] | None = None) -> list[RequestOutput]:
        """Answer a conversation: a list of {"role": .., "content": ..}. Or several.

        The other arguments are those of the tokenizer's `apply_chat_template`.
        """
        options = {
            "chat_template": chat_template, "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message}
        options |= chat_template_kwargs or {}
        prompts = render(messages, self.tokenizer, options)
        return self.generate(prompts, sampling_params, use_tqdm)

    def beam_search(self, prompts: Any, params: BeamSearchParams,
                    use_tqdm: bool = False) -> list[RequestOutput]:
        """The `beam_width` best continuations of every prompt, best first.

        `cumulative_logprob` is the plain sum, and `logprobs` has that of each token.
        """
        check_type("params", params, BeamSearchParams)
        return self.generate(prompts, params, use_tqdm)

    def _run(self, groups: list[SequenceGroup]) -> Generator[SequenceGroup, None, None]:
        """Step until these groups have finished; yields a group whenever it changed."""
        mine: dict[str, SequenceGroup] = {}
        try:
            with self._exclusive():
                for group in groups:
                    mine[self._add(group)] = group
            while mine:
                with self._exclusive(), self.ranks.watched():
                    # The step of another thread may have changed them already.
                    if self.scheduler.changed.keys().isdisjoint(mine):
                        self._step()
                    changed = self._take_changed(mine)
                for group in changed:
                    if not group.live:
                        del mine[group.request_id]
                    yield group
        finally:  # an error, Ctrl-C, or a stream that is closed early
            self._forget(mine.values())

    def _forget(self, groups: Iterable[SequenceGroup]) -> None:
        """Abort groups that nobody waits for.

        The garbage collector may close a stream at any moment, even while this very
        thread holds the lock. Then the groups are aborted when the next step begins.
        """
        self._forgotten += groups
        if self._forgotten and not self._closed and not self._lock.locked():
            with self._exclusive():
                pass  # on its way in, it aborts all groups in _forgotten

    # -- From prompts to groups --------------------------------------------------------

    def _make_groups(self, prompts: Any, params: Any) -> list[SequenceGroup]:
        prompts = split_prompts(prompts)
        if params is None:
            params = self._default_params
        if not isinstance(params, (list, tuple)):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                "sampling_params must be one for all prompts, or a list with one for "
                f"each: got {len(params)} for {len(prompts)} prompts")

        groups = []
        for index, (prompt, own_params) in enumerate(zip(prompts, params, strict=True)):
            try:
                groups.append(self._make_group(prompt, own_params))
            except (ValueError, TypeError) as error:
                if len(prompts) == 1:
                    raise
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"prompts[{index}]: {error}") from error
        return groups

    def _make_group(self, prompt: Any, params: Any) -> SequenceGroup:
        """A request that can be served; ValueError or TypeError if it never can."""
        self._check_open()
        beam_params = None
        if isinstance(params, BeamSearchParams):
            beam_params = copy(params)
            params = self._beam_sampling_params(beam_params)
        params = check_type("sampling_params", params, SamplingParams).clone()
        self._check_limits(params, is_beam_search=beam_params is not None)

        vocab_size = self.model_config.vocab_size
        text, ids, salt = encode(prompt, self.tokenizer, vocab_size)
        if salt is not None:
            params.cache_salt = salt
        longest = self.runner.max_model_len
        what = f"number of prompt tokens, with max_model_len={longest},"
        check_int(what, len(ids), 1, longest - 1)
        group = SequenceGroup(text, ids, params, self._stop_token_ids(params), longest,
                              self.tokenizer, beam_params)

        # A group runs as a whole, so all its sequences must fit at their longest.
        num_blocks = self.block_manager.most_blocks(
            len(ids), [group.max_len] * params.n)
        if num_blocks > self.block_manager.num_blocks:
            raise ValueError(
                f"{params.n} sequences of up to {group.max_len} tokens need "
                f"{num_blocks} blocks, but num_blocks is {self.runner.num_blocks}: "
                "lower n, beam_width or max_tokens, or raise num_blocks")
        return group

    def _check_limits(self, params: SamplingParams, is_beam_search: bool) -> None:
        """What parameters may ask of this engine and this model."""
        max_num_seqs = self.config.max_num_seqs
        check_int(f"n, with max_num_seqs={max_num_seqs},", params.n, 1, max_num_seqs)

        vocab_size = self.model_config.vocab_size
        max_logprobs = self.config.max_logprobs
        no_limit = max_logprobs < 0 or is_beam_search
        if params.logprobs == -1:
            params.logprobs = vocab_size
        check_int(
            f"logprobs, with max_logprobs={max_logprobs} and {vocab_size} tokens,",
            params.logprobs or 0, 0, vocab_size if no_limit else max_logprobs)
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"stop needs a tokenizer: use stop_token_ids, got {params.stop!r:.80}")

    def _stop_token_ids(self, params: SamplingParams) -> set[int]:
        """The request's own, and EOS."""
        vocab_size = self.model_config.vocab_size
        stop_ids = set(check_token_ids(
            "stop_token_ids", params.stop_token_ids or [], vocab_size))
        if not params.ignore_eos:
            stop_ids.update(self.eos_token_ids)
        if params.min_tokens and len(stop_ids) == vocab_size:
            raise ValueError(
                "min_tokens must be 0 if every token is a stop token, got "
                f"{params.min_tokens}")
        return stop_ids

    def _beam_sampling_params(self, params: BeamSearchParams) -> SamplingParams:
        """A beam search is a group of `beam_width` sequences that report candidates.

        EOS tokens may be among the best candidates of a beam. So each asks for more
        than `beam_width`: enough must be left that go on.
        """
        width = params.beam_width
        vocab_size = self.model_config.vocab_size
        num_eos = len(self.eos_token_ids)
        most = vocab_size - num_eos
        check_int(
            f"beam_width, with {most} tokens that do not end a beam,", width, 1, most)
        check_int("beam_width", width, 1, self.config.max_num_seqs)
        # As many as transformers takes.
        num_candidates = min(vocab_size, width * max(2, 1 + num_eos))
        return SamplingParams(
            n=width, temperature=0, max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos, logprobs=num_candidates,
            cache_salt=params.cache_salt)

    def _add(self, group: SequenceGroup) -> str:
        group.request_id = str(next(self._ids))
        seed = group.params.seed
        group.seed = self._random.getrandbits(63) if seed is None else seed
        self._requests[group.request_id] = group
        self.scheduler.waiting[group] = None
        return group.request_id

    # -- From groups to outputs --------------------------------------------------------

    def _take_changed(self, request_ids: Collection[str]) -> list[SequenceGroup]:
        """Take out of the scheduler's report what belongs to these requests."""
        changed = self.scheduler.changed
        groups = [changed.pop(id) for id in list(changed) if id in request_ids]
        for group in groups:
            if not group.live:
                self._requests.pop(group.request_id, None)
                self._for_step.discard(group.request_id)
        return groups

    def _output(self, group: SequenceGroup) -> RequestOutput:
        wants_logprobs = group.params.logprobs is not None
        completions = []
        for index, seq in enumerate(group.sequences):
            is_final = seq.finish_reason is not None
            completions.append(CompletionOutput(
                index=index,
                text=seq.detokenize(is_final).visible(is_final),
                token_ids=seq.token_ids[group.num_prompt_tokens :],
                cumulative_logprob=seq.cumulative_logprob if wants_logprobs else None,
                logprobs=list(seq.logprobs) if wants_logprobs else None,
                finish_reason=seq.finish_reason, stop_reason=seq.stop_reason))
        return RequestOutput(
            group.request_id, group.prompt, group.prompt_token_ids, completions,
            finished=not group.live, num_cached_tokens=group.num_cached_tokens,
            metrics=group.metrics, sequences=self._beams(group))

    def _beams(self, group: SequenceGroup) -> list[BeamSearchSequence]:
        """The beams of a finished search, with the prompt, as vLLM reports them."""
        if group.live or not group.is_beam_search:
            return []
        beams = []
        for seq in group.sequences:
            text = None
            if self.tokenizer is not None:
                text = self.tokenizer.decode(seq.token_ids, skip_special_tokens=True)
            beams.append(BeamSearchSequence(
                list(seq.token_ids), text, seq.cumulative_logprob, list(seq.logprobs)))
        return beams

    # -- The rest ----------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("this engine has no tokenizer: its prompts are token ids")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of the model's generation_config.json, for requests without any."""
        return self._default_params.clone()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing changes, while requests run.
        """
        with self._exclusive():
            return self.block_manager.reset_prefix_cache()

    def __repr__(self) -> str:
        state = "shut down" if self._closed else self.runner.describe()
        return f"LLM({self.config.model or 'bundled'}: {state})"

    def stats(self) -> EngineStats:
        """What the engine holds now, and what it has done since it started."""
        return self.scheduler.measure()

    def shutdown(self) -> None:
        """Abort what runs and give back the memory; nothing is served after that."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._closed = True
        self._launched = []
        self.scheduler.abort([*self.scheduler.waiting, *self.scheduler.running])
        self.runner.free()
        self.ranks.close()

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
