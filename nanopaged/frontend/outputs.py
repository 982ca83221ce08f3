"""What the caller gets back. The names are vLLM's where vLLM has them."""

from copy import copy
from dataclasses import dataclass
from typing import TypeAlias
from weakref import proxy

from nanopaged.frontend.detokenizer import Detokenizer
from nanopaged.sequence import Logprobs, Sequence, SequenceGroup


@dataclass
class CompletionOutput:
    """One continuation so far.

    `finish_reason` is None while the sequence runs, then "stop", "length" or "abort".
    `stop_reason` is the stop string, or the id of the token, that ended it; for the
    tokenizer's own EOS token it is None. A token that ended it is the last of
    `token_ids`, but not part of `text`.
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

class Request:
    """What the front end knows of a request, and the engine does not."""

    def __init__(self, group: SequenceGroup, prompt: str | None,
                 eos_token_id: int | None, detokenizer: Detokenizer) -> None:
        self.group, self.prompt = group, prompt
        # A copy for all outputs: the caller may change it.
        self.prompt_token_ids = list(group.prompt_token_ids)
        self.eos_token_id = eos_token_id  # the one that is not told as a stop_reason
        self.outbox: Outbox = {}  # of the call that made it
        self.at_start = detokenizer  # it has read the prompt
        self.detokenizers: dict[Sequence, Detokenizer] = {}

    def read(self) -> list[Sequence]:
        """Read what is new. Returns the live sequences that a stop string ends."""
        # (The beams of a step may be other sequences than those of the last one.)
        self.detokenizers = {
            seq: self.detokenizers.get(seq) or copy(self.at_start)
            for seq in self.group.sequences}
        for seq, detokenizer in self.detokenizers.items():
            token_ids = seq.token_ids[:-1] if seq.ended_by_token else seq.token_ids
            may_stop = len(seq.token_ids) > self.group.min_len
            detokenizer.update(token_ids, seq.finish_reason is not None, may_stop)
        return [seq for seq in self.group.live if self.detokenizers[seq].stopped_by]

    def output(self) -> RequestOutput:
        group = self.group
        if group.errors and not group.live:
            raise group.errors.pop()  # the next call reports what it has
        self.read()
        has_scores = group.params.prompt_logprobs is not None
        scores = [None, *group.prompt_logprobs.values()] if has_scores else None
        return RequestOutput(
            group.request_id, self.prompt, self.prompt_token_ids,
            # A beam has the index of its parent, so outputs are numbered anew here.
            [self._completion(seq, i) for i, seq in enumerate(group.sequences)],
            not group.live, group.num_cached_tokens, scores)

    def _completion(self, seq: Sequence, index: int) -> CompletionOutput:
        params, reason = seq.group.params, seq.finish_reason
        text = self.detokenizers[seq].visible(final=reason is not None)
        stop_reason: str | int | None = self.detokenizers[seq].stopped_by
        if stop_reason is not None:
            reason = "stop"  # even if the last token that fits has completed it
        elif reason == "stop" and seq.token_ids[-1] != self.eos_token_id:
            stop_reason = seq.token_ids[-1]
        has_logprobs = params.logprobs is not None
        return CompletionOutput(
            index, text, seq.token_ids[seq.group.num_prompt_tokens :],
            cumulative_logprob=seq.cumulative_logprob if has_logprobs else None,
            logprobs=list(seq.logprobs) if has_logprobs else None,
            finish_reason=reason, stop_reason=stop_reason)


def let_go(group: SequenceGroup) -> None:
    """Break the cycle between a request that has finished and its sequences. It would
    keep them in memory until the garbage collector runs.
    """
    for seq in [*group.sequences, *group.complete_beams]:
        seq.group = proxy(group)


Outbox: TypeAlias = dict[str, Request]  # requests by id, in the order of their changes
