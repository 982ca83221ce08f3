"""What the caller gets back. The names are vLLM's where it has them."""

from dataclasses import dataclass


@dataclass
class RequestMetrics:
    """Points in time, in seconds of `time.perf_counter`; 0 where it is yet to come."""

    arrival_time: float
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0


@dataclass
class CompletionOutput:
    """One continuation so far.

    `logprobs` has a dict for every token: token id -> log-probability. `finish_reason`
    is None while the sequence runs, then "stop", "length" or "abort".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None


@dataclass
class RequestOutput:
    """The answer to a request so far.

    `num_cached_tokens` of the prompt were found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics


@dataclass
class EngineStats:
    """What the engine holds now, and what it has done since it started."""

    blocks_total: int
    blocks_used: int = 0  # held by a sequence
    blocks_cached: int = 0  # in the prefix cache, held or free
    tokens_held: int = 0  # tokens whose K and V sequences hold; shared ones count once
    kv_utilisation: float = 0.0  # tokens held / slots in the used blocks
    steps: int = 0
    prompt_tokens: int = 0  # of all requests that have started, cached or not
    output_tokens: int = 0
    prefix_query_tokens: int = 0  # tokens that were looked up in the prefix cache
    prefix_hit_tokens: int = 0  # how many of them were found
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    blocks_copied: int = 0  # copy-on-write
    blocks_swapped: int = 0  # out and in
    step_seconds: float = 0.0
