"""The engine's front: prompts in, text out. Start reading here, at `LLM._step`.

That method is the whole engine. The rest of this file turns prompts into requests and
sequences into text, and every other file explains one line of it.
"""

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
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
)
from nanopaged.loader import load_config, load_tokenizer, resolve
from nanopaged.model_runner import ModelRunner
from nanopaged.outputs import CompletionOutput, EngineStats, RequestOutput
from nanopaged.parallel import Ranks
from nanopaged.scheduler import Batch, Scheduler
from nanopaged.sequence import SequenceGroup

Prompt: TypeAlias = str | list[int] | dict[str, Any]
Params: TypeAlias = SamplingParams | BeamSearchParams
Observer: TypeAlias = Callable[[str, Batch | None], None]


class LLM(AbstractContextManager["LLM"]):
    """An engine with one model. For the keyword arguments see `EngineConfig`.

    >>> with LLM() as llm:  # the bundled model
    ...     print(llm.generate("ROMEO:")[0].outputs[0].text)

    Threads may share an engine: their requests then run in common batches.
    """

    def __init__(self, model: Any = None, **options: Any) -> None:
        self.config = config = EngineConfig(model, **options)
        path = resolve(config)
        self.model_config = load_config(path)
        self.tokenizer, self.eos_token_ids = load_tokenizer(path, self.model_config)
        self.ranks = Ranks(config, self.model_config)
        with self.ranks.watched():
            self.runner = ModelRunner(config, self.model_config, path, self.ranks)
            if self.ranks.rank > 0:
                self.ranks.serve(self.runner.run)  # until rank 0 ends; does not return

        self._ids = itertools.count()
        self._random = random.Random(config.seed)
        self._requests: dict[str, SequenceGroup] = {}  # their end is not reported yet
        self._for_step: set[str] = set()  # ids of those that `add_request` made
        self._forgotten: list[SequenceGroup] = []  # nobody waits for them: abort them
        self._lock = threading.Lock()
        self._owner = 0  # the thread that holds it
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
        step late. By then one step too many has been launched for that sequence. Its
        token is ignored. It may write K and V into a block that has been freed, but
        steps run in order, so the block's next owner writes later.
        """
        if not (self.scheduler.waiting or self.scheduler.running):
            return
        started = time.perf_counter()
        self._notify("begin")

        batch = self.scheduler.schedule()
        assert batch.message.rows or self._launched, "nobody can run: blocks were lost"
        self._notify("scheduled", batch)

        sampled = self.runner.execute(batch)
        self._notify("executed", batch)

        # On a GPU the newest step is still running: read the tokens of the one before.
        # An empty batch means that all requests wait for tokens: then read all steps.
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

        The books are the queues, the block tables and the prefix cache. If something
        fails in here, Ctrl-C included, nobody knows whether they are right. So all
        requests end, and the engine starts again with empty books. With several ranks,
        each of which may be anywhere in the step, it shuts down.
        """
        with self._lock:
            self._check_open()
            self._owner = threading.get_ident()
            try:
                while self._forgotten:
                    group = self._forgotten.pop()
                    self.scheduler.abort([group])
                    self.scheduler.changed.pop(group.request_id, None)
                yield
            except BaseException:
                self._closed = True  # it stays closed if this is interrupted as well
                self._end_all_requests()
                if self.ranks.size > 1:
                    self._close()
                else:
                    self._closed = False
                raise
            finally:
                self._owner = 0

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

    # -- Requests one by one -----------------------------------------------------------

    def add_request(self, prompt: Prompt, sampling_params: Params | None = None) -> str:
        """Queue a request for `step`; returns its id. A bad one changes nothing."""
        params = SamplingParams() if sampling_params is None else sampling_params
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

    def abort_request(self, request_id: str) -> None:
        """End a request and free its blocks; does nothing if it has finished.

        The next `step` returns what it has so far, with finish_reason "abort".
        """
        check_type("request_id", request_id, str)
        with self._exclusive():
            if request_id in self._requests:
                self.scheduler.abort([self._requests[request_id]])

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._for_step)

    # -- Prompts in, text out ----------------------------------------------------------

    def generate(self, prompts: Any, sampling_params: Any = None,
                 use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete all prompts; returns an output for each, in their order.

        A prompt is a string, a list of token ids, {"prompt": ..} or
        {"prompt_token_ids": ..}. `sampling_params` are for all prompts, or a list with
        one for each.
        """
        groups = self._make_groups(prompts, sampling_params)
        num_finished = 0
        before = self.scheduler.stats.output_tokens
        with tqdm(unit=" tokens", disable=not use_tqdm) as bar:
            for group in self._run(groups):
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
        groups = self._make_groups(prompts, sampling_params)
        return (self._locked_output(group) for group in self._run(groups))

    def chat(self, messages: list[Any], sampling_params: Any = None,
             use_tqdm: bool = True) -> list[RequestOutput]:
        """Answer a conversation: a list of {"role": .., "content": ..}. Or several."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError(
                "chat needs a tokenizer with a chat template: this model has none")
        check_type("messages", messages, list)
        several = bool(messages) and isinstance(messages[0], list)
        for message in itertools.chain(*messages) if several else messages:
            check_type("every message", message, dict)
        ids = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False)
        return self.generate(ids, sampling_params, use_tqdm)

    def beam_search(self, prompts: Any,
                    params: BeamSearchParams) -> list[RequestOutput]:
        """The `beam_width` best continuations of every prompt, best first.

        `cumulative_logprob` is the plain sum, and `logprobs` has that of each token.
        """
        check_type("params", params, BeamSearchParams)
        return self.generate(prompts, params, use_tqdm=False)

    def _run(self, groups: list[SequenceGroup]) -> Iterator[SequenceGroup]:
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

        The garbage collector may close a stream at any moment, even inside a step of
        this very thread. Then the groups are aborted when the next step begins.
        """
        for group in groups:
            self._requests.pop(group.request_id, None)
            self._forgotten.append(group)
        in_a_step = self._owner == threading.get_ident()
        if self._forgotten and not self._closed and not in_a_step:
            with self._exclusive():
                pass  # on its way in, it aborts all groups in _forgotten

    # -- From prompts to groups --------------------------------------------------------

    def _make_groups(self, prompts: Any, params: Any) -> list[SequenceGroup]:
        is_list = isinstance(prompts, (list, tuple))
        if not is_list or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not isinstance(params, (list, tuple)):
            params = [SamplingParams() if params is None else params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"sampling_params must be as many as the prompts, or one for all: got "
                f"{len(params)} for {len(prompts)} prompts")
        return [self._make_group(*pair) for pair in zip(prompts, params, strict=True)]

    def _make_group(self, prompt: Any, params: Any) -> SequenceGroup:
        """A request that can be served; ValueError or TypeError if it never can."""
        self._check_open()
        vocab_size = self.model_config.vocab_size
        longest = self.runner.max_model_len
        beams = None
        if isinstance(params, BeamSearchParams):
            beams = copy(params)
            params = self._beam_sampling_params(beams)
        params = copy(check_type("sampling_params", params, SamplingParams))
        max_num_seqs = self.config.max_num_seqs
        check_int(f"n, with max_num_seqs={max_num_seqs},", params.n, 1, max_num_seqs)
        check_int(
            f"logprobs, with {vocab_size} tokens,", params.logprobs or 0, 0, vocab_size)

        text, ids = self._encode(prompt)
        what = f"number of prompt tokens, with max_model_len={longest},"
        check_int(what, len(ids), 1, longest - 1)
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"stop needs a tokenizer: use stop_token_ids, got {params.stop!r}")
        stop_ids = check_token_ids(
            "stop_token_ids", params.stop_token_ids or [], vocab_size)
        eos_ids = [] if params.ignore_eos else self.eos_token_ids
        group = SequenceGroup(
            text, ids, params, {*stop_ids, *eos_ids}, longest, self.tokenizer, beams)

        # A group runs as a whole, so all its sequences must fit at their longest.
        num_blocks = self.block_manager.most_blocks(
            len(ids), [group.max_len] * params.n)
        if num_blocks > self.block_manager.num_blocks:
            raise ValueError(
                f"{params.n} sequences of up to {group.max_len} tokens need "
                f"{num_blocks} blocks, but num_blocks is {self.runner.num_blocks}: "
                "lower n, beam_width or max_tokens, or raise num_blocks")
        return group

    def _beam_sampling_params(self, beams: BeamSearchParams) -> SamplingParams:
        """A beam search is a group of `beam_width` sequences that report candidates.

        EOS tokens may be among the best candidates of a beam. So each asks for more
        than `beam_width`: enough must be left that go on.
        """
        width = beams.beam_width
        num_eos = len(self.eos_token_ids)
        most = self.model_config.vocab_size - num_eos
        check_int(
            f"beam_width, with {most} tokens that do not end a beam,", width, 1, most)
        check_int("beam_width", width, 1, self.config.max_num_seqs)
        num_candidates = min(most + num_eos, width * max(2, 1 + num_eos))
        return SamplingParams(n=width, temperature=0, max_tokens=beams.max_tokens,
                              ignore_eos=beams.ignore_eos, logprobs=num_candidates)

    def _encode(self, prompt: Any) -> tuple[str | None, list[int]]:
        """The text of a prompt, if it has one, and its token ids."""
        text = token_ids = prompt
        if isinstance(prompt, Mapping):
            has_one_key = len(prompt) == 1
            text = prompt.get("prompt") if has_one_key else None
            token_ids = prompt.get("prompt_token_ids") if has_one_key else None
        if isinstance(text, str) and self.tokenizer is not None:
            return text, self.tokenizer(text).input_ids
        if isinstance(token_ids, Iterable) and not isinstance(token_ids, (str, bytes)):
            return None, check_token_ids(
                "prompt", token_ids, self.model_config.vocab_size)
        raise ValueError(
            "prompt must be a list of token ids or, with a tokenizer, a string, or "
            f"{{'prompt': str}} or {{'prompt_token_ids': list}}, got {prompt!r:.200}")

    def _add(self, group: SequenceGroup) -> str:
        group.request_id = str(next(self._ids))
        seed = group.params.seed
        group.seed = self._random.getrandbits(63) if seed is None else seed
        self._requests[group.request_id] = group
        self.scheduler.waiting.append(group)
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

    def _locked_output(self, group: SequenceGroup) -> RequestOutput:
        with self._lock:
            return self._output(group)

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
                finish_reason=seq.finish_reason))
        return RequestOutput(
            group.request_id, group.prompt, group.prompt_token_ids, completions,
            finished=not group.live, num_cached_tokens=group.num_cached_tokens,
            metrics=group.metrics)

    # -- The rest ----------------------------------------------------------------------

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
