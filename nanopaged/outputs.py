"""What the caller gets back; names are vLLM's where it has them."""

from dataclasses import dataclass


@dataclass
class RequestMetrics:
    """Points in time, in seconds of `time.perf_counter`; 0 where it has not come to that yet."""

    arrival_time: float
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0


@dataclass
class CompletionOutput:
    """One continuation so far; finish_reason is None while it runs, "stop", "length" or "abort"."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, float]] | None  # for every token: token id -> log-probability
    finish_reason: str | None


@dataclass
class RequestOutput:
    """A request's answer so far; `num_cached_tokens` of its prompt came from the prefix cache."""

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
    blocks_cached: int = 0  # findable by their content, held or free
    tokens_held: int = 0  # whose K and V sequences hold, shared ones once
    kv_utilisation: float = 0.0  # tokens held over the room in the used blocks
    steps: int = 0
    prompt_tokens: int = 0  # of the requests admitted so far, cached or not
    output_tokens: int = 0
    prefix_query_tokens: int = 0  # looked up at admissions
    prefix_hit_tokens: int = 0  # of these, found
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    blocks_copied: int = 0  # before a sequence wrote into one that it shared
    blocks_swapped: int = 0  # out and in
    step_seconds: float = 0.0
