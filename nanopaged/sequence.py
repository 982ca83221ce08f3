"""A request and its sequences: what has been said so far, and where its K and V are.

A `Sequence` has some tokens, of which the first `num_computed_tokens` have their K and V in the
cache (or will have, once the scheduled step has run). A step gives it some more; decoding is the
case of one more. It knows its block table and not what a block is.

The sequences of a group begin with the same prompt. Until that is computed only the first of them,
the leader, is worked on; then the group forks: the others share the leader's blocks and go on from
there, each its own way.
"""

from __future__ import annotations

import math
import time
from copy import copy
from typing import Any

from nanopaged.config import BeamSearchParams, SamplingParams
from nanopaged.detokenizer import Detokenizer
from nanopaged.outputs import RequestMetrics


class Sequence:
    """One continuation of a prompt.

    With block_size=4, 6 prompt tokens and 1 sampled one, after the prompt's step:
    token_ids=[p0 .. p5, t0], num_computed_tokens=6, block_table=[8, 3]: t0's K and V are not in the
    cache yet; the next step computes them, in block 3, and samples t1.
    """

    def __init__(self, group: SequenceGroup, index: int, detokenizer: Detokenizer) -> None:
        self.group, self.index = group, index
        self.token_ids = list(group.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_unread_tokens = 0  # sampled, but only the device knows them yet
        self.row = -1  # its row in the runner's table of block tables, while it is running
        self.block_table: list[int] = []  # physical block of every logical block
        self.num_published = 0  # leading blocks that the prefix cache knows
        self.num_sent_blocks = 0  # leading blocks that the runner's table knows
        self.detokenizer = copy(detokenizer)
        self.logprobs: list[dict[int, float]] = []
        # All beams begin alike: the first one's continuations are to be the first beams.
        self.cumulative_logprob = -math.inf if group.beams and index else 0.0
        self.candidates: dict[int, float] = {}  # of a beam: its most likely next tokens
        self.finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        """How many of its tokens are to be computed: before the fork, those that all share.

        The last one that `max_len` allows is never computed: nothing follows it.
        """
        group = self.group
        if len(group.live) > 1 and not group.forked:  # the first half is there for speed
            return group.num_prompt_tokens
        return min(len(self.token_ids) + self.num_unread_tokens, group.max_len - 1)

    @property
    def score(self) -> float:
        """By which complete beams are ranked; `length_penalty=0` ranks by probability alone."""
        length = len(self.token_ids) - self.group.num_prompt_tokens
        return self.cumulative_logprob / math.pow(length, self.group.beams.length_penalty)

    def detokenize(self) -> Detokenizer:
        """Turn its new tokens into text, and look for a stop string there."""
        check_stops = len(self.token_ids) > self.group.min_len
        self.detokenizer.update(self.token_ids, check_stops, self.finish_reason is not None)
        return self.detokenizer

    def extend(self, parent: Sequence, token: int, logprob: float) -> None:
        """Become what `parent` says, and `token`."""
        self.token_ids = [*parent.token_ids, token]
        self.logprobs = [*parent.logprobs, {token: logprob}]
        self.cumulative_logprob = parent.cumulative_logprob + logprob
        self.detokenizer = copy(parent.detokenizer)


class SequenceGroup:
    """One request: its parameters, and the sequences that answer it; scheduled as a whole."""

    request_id = ""  # this, the owner and the seed are given when it is queued
    owner: object = None  # the `generate` or `stream` that it belongs to, if not to `step`
    seed = 0
    num_cached_tokens = 0  # prompt tokens found in the prefix cache, at its first admission

    def __init__(self, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams,
                 stop_token_ids: set[int], max_model_len: int, tokenizer: Any,
                 beams: BeamSearchParams | None = None) -> None:
        self.prompt, self.prompt_token_ids = prompt, prompt_token_ids
        self.params = params
        self.beams: Any = beams  # where a group has none, nobody asks for their fields
        self.stop_token_ids = stop_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.min_len = self.num_prompt_tokens + params.min_tokens
        max_tokens = params.max_tokens or max_model_len
        self.max_len = min(self.num_prompt_tokens + max_tokens, max_model_len)
        detokenizer = Detokenizer(tokenizer, self.num_prompt_tokens, params.stop_strings)
        self.sequences = [Sequence(self, index, detokenizer) for index in range(params.n)]
        self.live = list(self.sequences)  # those that have not finished
        self.finished: list[Sequence] = []  # of a beam search: the best complete beams, best first
        self.metrics = RequestMetrics(time.perf_counter())

    @property
    def forked(self) -> bool:
        return len(self.live) == 1 or self.live[-1].block_table != []

    @property
    def scheduled(self) -> list[Sequence]:
        """Whose tokens are computed next: everybody's, or the leader's before the fork."""
        return self.live if self.forked else self.live[:1]
