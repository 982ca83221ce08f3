"""A request and its sequences: the tokens so far, and where their K and V are.

The words of the engine:

    token        an id of the vocabulary; a sequence has the prompt's, then its own
    sequence     one continuation of a prompt
    group        the sequences of one request; scheduled, preempted, swapped as a whole
    leader       the first live sequence of a group: it computes the prompt for all
    block        room for the K and V of block_size tokens. A sequence counts its
                 logical blocks from 0; a physical block is a place in the pool
    block table  the physical block of each logical block of a sequence
    slot         a token's place in the pool: physical block * block_size + offset
    computed     said of a token whose K and V are in the cache, or will be there when
                 the scheduled step has run
    pending      said of a token that a scheduled step samples, until the host reads it
    row          the place of a running sequence in the tables of the model runner
    publish      to enter a full block into the prefix cache, so that others can find it
    fork         to let one more sequence share the blocks that another one has filled
    swap         to move blocks between the device's pool and the CPU's
    preempt      to take a group off the device because the pool is full
    step         one forward pass over the tokens of many sequences, one flat batch
    entry        the part of a batch that belongs to one sequence
    budget       how many tokens one step may compute
"""

from __future__ import annotations

import math
import time
from copy import copy
from dataclasses import replace
from typing import Any

from nanopaged.config import BeamSearchParams, SamplingParams
from nanopaged.detokenizer import Detokenizer
from nanopaged.outputs import Logprobs, RequestMetrics


class Sequence:
    """One continuation of a prompt.

    An example with block_size=4: after the step that computed a prompt of 6 tokens and
    sampled the first token t0,

        token_ids = [p0, p1, p2, p3, p4, p5, t0]
        num_computed_tokens = 6
        block_table = [8, 3]

    so block 8 is full, and block 3 holds p4 and p5. The K and V of t0 are not in the
    cache yet. The next step computes them, stores them in block 3, and samples t1.
    """

    def __init__(self, group: SequenceGroup, index: int) -> None:
        self.group = group
        self.index = index
        self.token_ids = list(group.prompt_token_ids)  # changed by methods here only
        self.num_pending_tokens = 0
        self.row = -1  # none: it is not running

        # These belong to the block manager: nobody else writes them.
        self.block_table: list[int] = []
        self.num_computed_tokens = 0
        self.num_published_blocks = 0  # the first ones, which the prefix cache has seen
        self.num_sent_blocks = 0  # the first ones, which the model runner knows

        self.detokenizer = copy(group.detokenizer)
        self.logprobs: list[Logprobs] = []
        self.cumulative_logprob = 0.0
        self.candidates: Logprobs = {}  # of a beam: its most likely next tokens
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def compute_end(self) -> int:
        """Tokens before this position must be computed: then the next one is sampled,
        or the group forks.
        """
        group = self.group
        if not group.forked:
            # The part that all sequences of the group share.
            return group.num_prompt_tokens
        num_tokens = len(self.token_ids) + self.num_pending_tokens
        # Nothing follows the last token that max_len allows: nobody needs its K and V.
        return min(num_tokens, group.max_len - 1)

    @property
    def score(self) -> float:
        """What beams are compared by: log-probability, normalised by the length."""
        assert self.group.beam_params is not None, "only beams have a score"
        length = len(self.token_ids) - self.group.num_prompt_tokens
        return self.cumulative_logprob / math.pow(
            length, self.group.beam_params.length_penalty)

    def append(self, token: int, logprobs: Logprobs | None) -> None:
        """Add a sampled token; `logprobs` has its log-probability and those of others.
        """
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append({
                id: replace(entry, decoded_token=self.detokenizer.name_of(id))
                for id, entry in logprobs.items()})
            self.cumulative_logprob += logprobs[token].logprob

    def continue_beam(self, parent: Sequence, token: int) -> None:
        """Become the beam `parent`, continued by one of its candidates."""
        logprob = parent.candidates[token]
        self.token_ids = [*parent.token_ids, token]
        self.logprobs = [*parent.logprobs, {token: logprob}]
        self.cumulative_logprob = parent.cumulative_logprob + logprob.logprob
        self.detokenizer = copy(parent.detokenizer)

    def detokenize(self, final: bool) -> Detokenizer:
        """Turn new tokens into text; `final` means that no more tokens will follow."""
        token_ids = self.token_ids
        may_stop = len(token_ids) > self.group.min_len
        if self.ended_by_token and not self.group.params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        self.detokenizer.update(token_ids, may_stop, final)
        return self.detokenizer

    @property
    def ended_by_token(self) -> bool:
        """Whether the last token is EOS or a stop token of the request."""
        is_sampled = len(self.token_ids) > self.group.num_prompt_tokens
        return is_sampled and self.token_ids[-1] in self.group.stop_token_ids


class SequenceGroup:
    """One request: its parameters, and the sequences that answer it.

    All sequences begin with the same prompt. Until it is computed only the leader is
    worked on. Then the group forks: the others share the leader's blocks, and each goes
    its own way.
    """

    def __init__(self, prompt: str | None, prompt_token_ids: list[int],
                 params: SamplingParams, stop_token_ids: set[int], max_model_len: int,
                 tokenizer: Any, beam_params: BeamSearchParams | None = None) -> None:
        self.request_id = ""  # this and the seed are given when the request is queued
        self.seed = 0
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.beam_params = beam_params
        self.is_beam_search = beam_params is not None
        self.stop_token_ids = stop_token_ids
        self.min_len = self.num_prompt_tokens + params.min_tokens
        max_tokens = params.max_tokens or max_model_len
        self.max_len = min(self.num_prompt_tokens + max_tokens, max_model_len)
        # Prompt tokens found in the prefix cache when it started.
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics(arrival_time=time.perf_counter())

        self.detokenizer = Detokenizer(
            tokenizer if params.detokenize else None, prompt_token_ids,
            params.stop_strings, params.skip_special_tokens,
            params.include_stop_str_in_output)
        self.sequences = [Sequence(self, index) for index in range(params.n)]
        self.live = list(self.sequences)  # those that have not finished
        # False while the leader computes the prompt for all; True once each live
        # sequence goes its own way. A single sequence does so from the start.
        self.forked = params.n == 1
        self.complete_beams: list[Sequence] = []  # the best so far, best first

    @property
    def next_sequences(self) -> list[Sequence]:
        """The sequences whose tokens are computed next: before the fork, the leader."""
        return self.live if self.forked else self.live[:1]
