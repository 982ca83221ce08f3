"""A request and its sequences: the tokens so far, and where their K and V are.

The words of the engine:

    token        an id of the vocabulary; a sequence has the prompt's, then its own
    sequence     one continuation of a prompt
    group        the sequences of one request; admitted, preempted, swapped as a whole
    leader       the first live sequence of a group: until they fork, it computes the
                 prompt for all
    block        room for the K and V of block_size tokens. A sequence counts its
                 logical blocks from 0; a physical block is a place in the pool
    block table  the physical block of each logical block of a sequence
    slot         a token's place in the pool: physical block * block_size + offset
    computed     a token is computed when its K and V are in the cache, or will be there
                 when the scheduled step has run
    pending      a token is pending from when the step that samples it is scheduled
                 until the host has read it
    publish      to enter a full block into the prefix cache, so that others can find it
    fork         to let one more sequence share the blocks that another one has filled
    swap         to move blocks between the device's pool and the CPU's
    preempt      to take a group off the device because the pool is full
    step         one forward pass over the tokens of many sequences, one flat batch
    entry        the part of a batch that belongs to one sequence
    budget       how many tokens one step may compute
"""

from __future__ import annotations

import time
from array import array
from copy import copy
from typing import Any

from nanopaged.config import BeamSearchParams, SamplingParams
from nanopaged.detokenizer import Detokenizer
from nanopaged.outputs import CompletionOutput, Logprobs, RequestMetrics, RequestOutput


class Sequence:
    """One continuation of a prompt.

    The files that follow tell the story of two requests, A and B, with block_size=4. A
    has a prompt of 6 tokens. After the step that computed it and sampled the first
    token t0, its sequence has

        token_ids = [p0, p1, p2, p3, p4, p5, t0]
        num_computed_tokens = 6
        block_table = [0, 1]

    so block 0 is full, and block 1 holds p4 and p5. The K and V of t0 are not in the
    cache yet. The next step computes them, stores them in block 1, and samples t1.
    """

    def __init__(self, group: SequenceGroup, index: int) -> None:
        self.group = group
        self.index = index
        self.token_ids = list(group.prompt_token_ids)  # changed by methods here only
        self.num_pending_tokens = 0
        self.sample_index = 0  # of its pending token, among the samples of its step

        # These belong to the block manager: nobody else writes them.
        self.block_table = array("q")
        self.num_computed_tokens = 0

        self.detokenizer = copy(group.detokenizer)
        self.logprobs: list[Logprobs] = []
        self.cumulative_logprob = 0.0
        self.candidates: Logprobs = {}  # of a beam: its most likely next tokens
        self.finish_reason: str | None = None

    @property
    def compute_end(self) -> int:
        """The tokens before this position must be computed next: before the fork, the
        prompt, which all sequences of the group share; after it, all that there are,
        pending ones too. Then the next token is sampled.

        A decode of request A goes like this:

                     token_ids  computed  pending  compute_end
            before           7         6        0            7
            schedule         7         7        1            8  t0 gets a slot; t1 is
                                                                pending
            forward                                             t0's K, V are stored
            sample                                              the device knows t1
            update           8         7        0            8  t1 is appended
        """
        group = self.group
        num_tokens = group.num_prompt_tokens
        if group.forked:
            num_tokens = len(self.token_ids) + self.num_pending_tokens
        # Nothing follows the last token that max_len allows: nobody needs its K and V.
        return min(num_tokens, group.max_len - 1)

    def append(self, token: int, logprobs: Logprobs | None) -> None:
        """Add a sampled token; `logprobs` has its log-probability and those of others.
        """
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token].logprob

    def child(self, token: int) -> Sequence:
        """A new beam: this one, continued by one of its candidates."""
        beam = Sequence(self.group, self.index)
        beam.token_ids = list(self.token_ids)
        beam.logprobs = list(self.logprobs)
        beam.cumulative_logprob = self.cumulative_logprob
        beam.append(token, {token: self.candidates[token]})
        return beam

    @property
    def ended_by_token(self) -> bool:
        """Whether the last token is EOS or a stop token of the request."""
        return self.token_ids[-1] in self.group.stop_token_ids

    def detokenize(self, final: bool) -> Detokenizer:
        """Turn new tokens into text; `final` means that no more tokens will follow."""
        token_ids = self.token_ids[:-1] if self.ended_by_token else self.token_ids
        may_stop = len(self.token_ids) > self.group.min_len
        self.detokenizer.update(token_ids, final, may_stop)
        return self.detokenizer

    def output(self, index: int) -> CompletionOutput:
        """What the caller gets to see of it so far."""
        is_final = self.finish_reason is not None
        text = self.detokenize(is_final).visible(is_final)
        has_logprobs = self.group.params.logprobs is not None
        return CompletionOutput(
            index, text, self.token_ids[self.group.num_prompt_tokens :],
            cumulative_logprob=self.cumulative_logprob if has_logprobs else None,
            logprobs=list(self.logprobs) if has_logprobs else None,
            finish_reason=self.finish_reason, stop_reason=self.detokenizer.stopped_by)


class SequenceGroup:
    """One request: its parameters, and the sequences that answer it.

    All sequences begin with the same prompt. Until it is computed only the leader is
    worked on. Then the group forks: the others share the leader's blocks, and each goes
    its own way.
    """

    def __init__(self, prompt: str | None, prompt_token_ids: list[int],
                 params: SamplingParams, stop_token_ids: set[int], max_model_len: int,
                 tokenizer: Any, beam_params: BeamSearchParams | None = None) -> None:
        # Submission gives it an id, an outbox, and a seed unless the request has one.
        # The outbox holds a group that has changed until its client has seen that.
        self.request_id = ""
        self.seed: Any = params.seed
        self.outbox: Outbox = {}
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.beam_params: Any = beam_params  # None: it is no beam search
        self.stop_token_ids = stop_token_ids
        self.min_len = self.num_prompt_tokens + params.min_tokens
        max_tokens = params.max_tokens or max_model_len
        self.max_len = min(self.num_prompt_tokens + max_tokens, max_model_len)
        # Prompt tokens found in the prefix cache when it started; -1: it has not yet.
        self.num_cached_tokens = -1
        self.metrics = RequestMetrics(arrival_time=time.perf_counter())

        self.detokenizer = Detokenizer(tokenizer, prompt_token_ids, params.stop_strings)
        self.sequences = [Sequence(self, index) for index in range(params.n)]
        self.live = list(self.sequences)  # those that have not finished
        # False while the leader computes the prompt for all; True once each live
        # sequence goes its own way. A single sequence does so from the start.
        self.forked = params.n == 1
        self.complete_beams: list[Sequence] = []  # the best so far, best first

    @property
    def next_sequences(self) -> list[Sequence]:
        """The sequences whose tokens are computed next: before the fork, the leader.

        An empty list while beams have pending tokens: the next beams are not known yet.
        """
        if self.beam_params and any(seq.num_pending_tokens for seq in self.live):
            return []
        return self.live if self.forked else self.live[:1]

    def report(self) -> None:
        """Let the client know of a change. This comes before the change, as Ctrl-C may
        strike in between.
        """
        self.outbox[self.request_id] = self

    def output(self) -> RequestOutput:
        outputs = [seq.output(index) for index, seq in enumerate(self.sequences)]
        return RequestOutput(
            request_id=self.request_id, prompt=self.prompt, outputs=outputs,
            prompt_token_ids=self.prompt_token_ids, finished=not self.live,
            num_cached_tokens=max(0, self.num_cached_tokens), metrics=self.metrics)


Outbox = dict[str, SequenceGroup]  # by request id, in order of change
