"""What the caller gets back. The names are vLLM's where vLLM has them."""

from dataclasses import dataclass
from typing import Any

from nanopaged.sequence import Logprobs, Sequence, SequenceGroup


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


# -- From requests to outputs ----------------------------------------------------------

def request_output(group: SequenceGroup) -> RequestOutput:
    scores: Any = None
    if group.params.prompt_logprobs is not None:
        scores = [None, *group.prompt_logprobs.values()]
    return RequestOutput(
        group.request_id, group.reader.prompt, list(group.prompt_token_ids),
        # (A beam has the index of its parent, so the outputs are numbered anew here.)
        [completion_output(seq, index) for index, seq in enumerate(group.sequences)],
        not group.live, group.num_cached_tokens, scores)


def completion_output(seq: Sequence, index: int) -> CompletionOutput:
    params, is_final = seq.group.params, seq.finish_reason is not None
    seq.reader.finds_stop(seq, is_final)  # it reads what is new
    text = seq.reader.visible(is_final)
    stop_reason: str | int | None = seq.reader.stopped_by
    stop_ids = params.stop_token_ids or []
    if seq.finish_reason == "stop" and seq.token_ids[-1] in stop_ids:
        stop_reason = seq.token_ids[-1]
    has_logprobs = params.logprobs is not None
    return CompletionOutput(
        index, text, seq.token_ids[seq.group.num_prompt_tokens :],
        cumulative_logprob=seq.cumulative_logprob if has_logprobs else None,
        logprobs=list(seq.logprobs) if has_logprobs else None,
        finish_reason=seq.finish_reason, stop_reason=stop_reason)
