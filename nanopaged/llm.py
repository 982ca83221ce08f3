"""The engine's front: prompts in, text out. Start reading here.

`LLM._step` is the whole engine; the rest of this file turns prompts into requests and sequences
into text, and every other file explains one of that method's lines.
"""

import itertools
import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from tqdm.auto import tqdm

from nanopaged.block_manager import BlockManager
from nanopaged.config import BeamSearchParams, EngineConfig, SamplingParams, check, check_token_ids
from nanopaged.loader import load_config, load_tokenizer, resolve
from nanopaged.model_runner import ModelRunner
from nanopaged.outputs import CompletionOutput, EngineStats, RequestOutput
from nanopaged.parallel import Ranks
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import SequenceGroup

Prompt: TypeAlias = str | list[int] | dict[str, Any]
Prompts: TypeAlias = Prompt | Sequence[Prompt]
AnyParams: TypeAlias = SamplingParams | BeamSearchParams
Params: TypeAlias = AnyParams | Sequence[AnyParams] | None


class LLM(AbstractContextManager["LLM"]):
    """An engine with one model. Keyword arguments: see `EngineConfig`.

    >>> with LLM() as llm:  # the bundled model
    ...     print(llm.generate("ROMEO:", SamplingParams(max_tokens=32))[0].outputs[0].text)
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.config = config = EngineConfig(model, **options)
        path = resolve(config)
        self.model_config = whole = load_config(path)
        self.tokenizer, self.eos_token_ids = load_tokenizer(path, whole)
        check("tensor_parallel_size", config.tensor_parallel_size, high=whole.num_attention_heads)
        self.ranks = Ranks(config)
        with self.ranks.watched():
            self.runner = runner = ModelRunner(config, whole, path, self.ranks)
            if self.ranks.rank:
                self.ranks.serve(runner.execute)
        self.blocks = BlockManager(runner.num_blocks, config.block_size,
                                   config.enable_prefix_caching, runner.num_swap_blocks)
        self.scheduler = Scheduler(config, self.blocks)
        self._ids = itertools.count()
        self._random = random.Random(config.seed)
        # On a GPU the next step is prepared and launched before this one's tokens are read.
        self.steps_ahead = 1 if runner.device.type == "cuda" else 0
        self._launched: list[Any] = []  # steps, and what the runner gave for them, oldest first
        self._closed = False
        room = runner.num_blocks * config.block_size / runner.max_model_len
        logging.getLogger("nanopaged").info(
            f"{path.name}: {runner.dtype} on {runner.device}; KV: {runner.num_blocks:,} blocks of "
            f"{config.block_size} tokens of {runner.token_bytes:,} bytes, {room:.1f} sequences of "
            f"{runner.max_model_len:,}; attention: {runner.attention} ({config.attention_backend})")

    # -- the engine ----------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step; returns what is new of the requests made by `add_request`, each so far."""
        self._step()
        return [self._output(group) for group in self.scheduler.news.pop(None, {}).values()]

    def _step(self) -> None:
        """The whole engine: who runs, one forward pass, what came out."""
        if not (self.scheduler.waiting or self.scheduler.running):
            return
        started = time.perf_counter()
        try:
            with self.ranks.watched():
                batch = self.scheduler.schedule()
                self._launched.append((batch, self.runner.execute(batch)))
                # On a GPU all but the newest; all, where nobody could be scheduled.
                while len(self._launched) > (self.steps_ahead if batch.rows else 0):
                    self.scheduler.update(*self._launched.pop(0))
        except BaseException:  # Ctrl-C too: who catches it may go on, with other requests
            self._launched.clear()
            self.scheduler.abort([*self.scheduler.waiting, *self.scheduler.running])
            self.blocks.published.clear()  # nobody knows what is in the blocks
            free = len(self.blocks.free_blocks) + len(self.scheduler.free_rows)
            # But not with ranks that were left half-way, or if a change of the books was.
            if self.ranks.size > 1 or free < self.blocks.num_blocks + self.config.max_num_seqs:
                self.shutdown()
            raise
        self.scheduler.stats.step_seconds += time.perf_counter() - started

    # -- prompts in ----------------------------------------------------------------------------

    def add_request(self, prompt: Prompt, sampling_params: AnyParams | None = None) -> str:
        """Queue a request for `step` and return its id. A bad one raises and changes nothing."""
        params = SamplingParams() if sampling_params is None else sampling_params
        return self._add(self._make_group(prompt, params))

    def abort_request(self, request_id: str) -> None:
        """End a request, if it has not finished, and free its blocks.

        What it has so far comes out of the next `step`, with finish_reason "abort".
        """
        groups = [*self.scheduler.waiting, *self.scheduler.running]
        self.scheduler.abort(group for group in groups if group.request_id == request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to do or to return."""
        return bool(self.scheduler.waiting or self.scheduler.running or None in self.scheduler.news)

    def _make_group(self, prompt: Any, params: Any) -> SequenceGroup:
        """A request that the engine can serve; ValueError or TypeError if it never will."""
        if self._closed:
            raise RuntimeError("this engine has been shut down: make a new LLM")
        vocab_size, longest = self.model_config.vocab_size, self.runner.max_model_len
        beams = params if isinstance(params, BeamSearchParams) else None
        if beams:  # sequences whose candidates are so many that enough are left if all may end
            most = beams.beam_width * max(2, 1 + len(self.eos_token_ids))
            params = SamplingParams(beams.beam_width, 0, max_tokens=beams.max_tokens,
                                    ignore_eos=beams.ignore_eos, logprobs=min(most, vocab_size))
        check("sampling_params", params, "SamplingParams")
        text, ids = self._encode(prompt)
        check(f"prompt tokens, with max_model_len={longest},", len(ids), "int", 1, longest - 1)
        check_token_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
        check("logprobs", params.logprobs or 0, high=vocab_size)
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop needs a tokenizer: use stop_token_ids, got {params.stop!r}")
        eos_token_ids = () if params.ignore_eos else self.eos_token_ids
        stop_token_ids = {*(params.stop_token_ids or ()), *eos_token_ids}
        check("n or beam_width, within max_num_seqs,", params.n, high=self.config.max_num_seqs)
        group = SequenceGroup(text, ids, params, stop_token_ids, longest, self.tokenizer, beams)
        # Never: a group runs as a whole, so all its sequences must fit at their longest.
        room = self.blocks.room(len(ids), [group.max_len] * params.n)
        check(f"blocks for n or beam_width={params.n} (lower it or max_tokens), within num_blocks,",
              room, high=self.blocks.num_blocks)
        return group

    def _make_groups(self, prompts: Any, params: Any) -> list[SequenceGroup]:
        one = not isinstance(prompts, (list, tuple)) or (prompts and isinstance(prompts[0], int))
        prompts = [prompts] if one else prompts
        if not isinstance(params, (list, tuple)):
            params = [SamplingParams() if params is None else params] * len(prompts)
        check("number of sampling_params", len(params), choices=[len(prompts)])
        return [self._make_group(*pair) for pair in zip(prompts, params, strict=True)]

    def _encode(self, prompt: Any) -> tuple[str | None, list[int]]:
        one = not hasattr(prompt, "keys") or len(prompt) == 1  # patterns match more keys, too
        match prompt:
            case str(text) | {"prompt": str(text)} if one and self.tokenizer is not None:
                return text, self.tokenizer(text).input_ids
            case [*ids] | {"prompt_token_ids": [*ids]} if one:
                check_token_ids("prompt", ids, self.model_config.vocab_size)
                return None, ids
        raise ValueError("prompt must be a list of token ids or, with a tokenizer, a string, or "
                         f"{{'prompt': str}} or {{'prompt_token_ids': list}}, got {prompt!r}")

    def _add(self, group: SequenceGroup, owner: object = None) -> str:
        group.request_id, group.owner = str(next(self._ids)), owner
        seed = group.params.seed
        group.seed = self._random.getrandbits(63) if seed is None else seed
        self.scheduler.waiting.append(group)
        return group.request_id

    # -- text out ------------------------------------------------------------------------------

    def generate(self, prompts: Prompts, sampling_params: Params = None,
                 use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete all prompts; returns one output for each, in their order.

        A prompt is a string, a list of token ids, {"prompt": ..} or {"prompt_token_ids": ..}.
        """
        groups = self._make_groups(prompts, sampling_params)
        before, finished = self.scheduler.stats.output_tokens, 0
        with tqdm(unit=" tokens", disable=not use_tqdm) as bar:
            for group in self._run(groups):
                finished += not group.live
                bar.set_description_str(f"{finished}/{len(groups)} requests", refresh=False)
                bar.update(self.scheduler.stats.output_tokens - before - bar.n)
        return [self._output(group) for group in groups]

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a request's output so far whenever it got a token.

        Closing the iterator aborts what has not finished.
        """
        groups = self._make_groups(prompts, sampling_params)
        return (self._output(group) for group in self._run(groups))

    def chat(self, messages: list[Any], sampling_params: Params = None,
             use_tqdm: bool = True) -> list[RequestOutput]:
        """Answer a conversation, a list of {"role": .., "content": ..}, or each of several."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError("chat needs a tokenizer with a chat template, which the model has not")
        check("messages", messages, "list")
        several = any(isinstance(message, list) for message in messages)
        for message in itertools.chain(*messages) if several else messages:
            check("every message, with role and content,", message, "dict")
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True,
                                                 return_dict=False)
        return self.generate(ids, sampling_params, use_tqdm)

    def beam_search(self, prompts: Prompts, params: BeamSearchParams) -> list[RequestOutput]:
        """The `beam_width` best continuations of every prompt, best first.

        Their `cumulative_logprob` is the plain sum; `logprobs` has the tokens' own.
        """
        check("params", params, "BeamSearchParams")
        return self.generate(prompts, params, use_tqdm=False)

    def _run(self, groups: list[SequenceGroup]) -> Iterator[SequenceGroup]:
        """Step until all have finished; yields a group whenever it got a token."""
        owner, unfinished = object(), set(groups)
        try:
            for group in groups:
                self._add(group, owner)
            while unfinished:
                self._step()
                for group in self.scheduler.news.pop(owner, {}).values():
                    if group in unfinished:  # else it was aborted meanwhile, and has been told
                        unfinished -= set() if group.live else {group}
                        yield group
        finally:  # an error, Ctrl-C, or a stream that is closed early
            self.scheduler.abort(groups)
            self.scheduler.news.pop(owner, None)

    def _output(self, group: SequenceGroup) -> RequestOutput:
        asked = group.params.logprobs is not None
        return RequestOutput(
            group.request_id, group.prompt, group.prompt_token_ids,
            [CompletionOutput(index, seq.detokenize().visible(seq.finish_reason is not None),
                              seq.token_ids[group.num_prompt_tokens :],
                              seq.cumulative_logprob if asked else None,
                              list(seq.logprobs) if asked else None, seq.finish_reason)
             for index, seq in enumerate(group.sequences)],
            not group.live, group.num_cached_tokens, group.metrics)

    # -- the rest ------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        return self.scheduler.measure()

    def shutdown(self) -> None:
        """Abort what runs and give back the memory; the engine serves nothing afterwards."""
        self.scheduler.abort([*self.scheduler.waiting, *self.scheduler.running])
        self._closed, self._launched = True, []
        vars(self.runner).clear()  # whoever holds the engine still does not hold its tensors
        self.ranks.close()

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
