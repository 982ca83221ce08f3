"""A request and its sequences: what has been said so far, and where its K and V are.

A `Sequence` has some tokens, of which the first `num_computed_tokens` have their K and V in the
cache (or will have, once the scheduled step has run). A step gives it some more; decoding is the
case of one more. It knows its block table and not what a block is.
"""

from __future__ import annotations

import time

from nanopaged.config import SamplingParams
from nanopaged.detokenizer import Detokenizer
from nanopaged.outputs import RequestMetrics


class Sequence:
    """One continuation of a prompt.

    With block_size=4, 6 prompt tokens and 1 sampled one, after the prompt's step:
    token_ids=[p0 .. p5, t0], num_computed_tokens=6, block_table=[8, 3]: t0's K and V are not in the
    cache yet; the next step computes them, in block 3, and samples t1.
    """

    def __init__(self, group: SequenceGroup, index: int, token_ids: list[int],
                 detokenizer: Detokenizer) -> None:
        self.group = group
        self.index = index
        self.token_ids = token_ids
        self.num_computed_tokens = 0
        self.row = -1  # its row in the runner's table of block tables, while it is running
        self.block_table: list[int] = []  # physical block of every logical block
        self.block_hashes: list[int] = []  # chained hash of every full block, as far as needed yet
        self.num_published = 0  # leading blocks that the prefix cache knows
        self.prefix_id = 0  # names the content of these blocks: see BlockManager.publish
        self.detokenizer = detokenizer
        self.logprobs: list[dict[int, float]] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None


class SequenceGroup:
    """One request: its parameters, and the sequences that answer it; scheduled as a whole."""

    request_id = ""  # this, the owner and the seed are given when it is queued
    owner: object = None  # the `generate` or `stream` that it belongs to, if not to `step`
    seed = 0
    num_cached_tokens = 0  # prompt tokens found in the prefix cache, at its first admission

    def __init__(self, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams,
                 stop_token_ids: set[int], max_model_len: int, detokenizer: Detokenizer) -> None:
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.stop_token_ids = stop_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.min_len = self.num_prompt_tokens + params.min_tokens
        max_tokens = params.max_tokens or max_model_len
        self.max_len = min(self.num_prompt_tokens + max_tokens, max_model_len)
        self.sequences = [Sequence(self, 0, list(prompt_token_ids), detokenizer)]
        self.live = list(self.sequences)  # those that have not finished
        self.metrics = RequestMetrics(time.perf_counter())
