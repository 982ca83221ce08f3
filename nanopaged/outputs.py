"""What the caller gets back. The names are vLLM's where vLLM has them."""

from dataclasses import dataclass
from typing import NamedTuple


class Logprob(NamedTuple):
    """The log-probability of a token, before any option changes it, and its rank: 1 is
    the most likely token.
    """

    logprob: float
    rank: int = 1


# By token id: first the sampled token, then the most likely ones.
Logprobs = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One continuation so far.

    `finish_reason` is None while the sequence runs, then "stop", "length" or "abort".
    `stop_reason` is the stop string, or the id in `stop_token_ids`, that ended it. A
    token that ended it is the last of `token_ids`, but not part of `text`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Logprobs] | None  # a dict for every token
    finish_reason: str | None
    stop_reason: str | int | None = None


@dataclass
class RequestOutput:
    """The answer to a request so far.

    `num_cached_tokens` is how many prompt tokens were found in the prefix cache.
    `prompt_logprobs` has None for the first token of the prompt, and then a dict for
    every one that has been computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: list[Logprobs | None] | None = None


@dataclass
class EngineStats:
    """What the engine holds now, and what it has done since it started.

    An error or Ctrl-C within a step makes it start over, with all counters at 0.
    """

    blocks_total: int
    blocks_used: int = 0  # held by a sequence
    blocks_cached: int = 0  # in the prefix cache, held or free
    steps: int = 0
    output_tokens: int = 0
    prefix_hit_tokens: int = 0  # found in the prefix cache, and not computed again
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
