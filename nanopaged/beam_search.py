"""Beam search: expand every beam, keep the best continuations, fork where a beam has several.

A beam is a sequence, and the group has always as many as the search is wide. A step gives every
beam's most likely next tokens. The best of all these continuations that are not complete are the
new beams: a beam's best child takes its place, other children the places of beams that have none.
This file decides; the block manager's `fork` shares the blocks.

The rules are those of transformers' `generate(num_beams=..)`, so the results are too.
"""

from collections.abc import Callable
from heapq import nlargest
from typing import NamedTuple

from nanopaged.sequence import Sequence, SequenceGroup


class Child(NamedTuple):
    """A beam continued by one token; `total` is its summed log-probability."""

    total: float
    parent: Sequence
    token: int
    logprob: float


def num_candidates(beam_width: int, num_stop_tokens: int) -> int:
    """So many that enough are left if every beam may end with each of these tokens."""
    return beam_width * max(2, 1 + num_stop_tokens)


def advance(group: SequenceGroup, fork: Callable[[Sequence, Sequence], None]) -> bool:
    """Replace the live beams by their best continuations, and `fork` parents to new beams.

    True says that the search is over; then `group.finished` has the best complete beams.
    """
    assert group.beams, "only the group of a beam search has beams"
    width, ends = group.beams.beam_width, group.stop_token_ids
    children = (Child(seq.cumulative_logprob + logprob, seq, token, logprob)
                for seq in group.live for token, logprob in seq.candidates.items())
    best = nlargest(num_candidates(width, len(ends)), children, lambda child: child.total)
    at_end = len(group.live[0].token_ids) + 1 >= group.max_len
    for _, parent, token, logprob in best[:width]:  # what ends behind them is not good enough
        if at_end or token in ends:
            complete = Sequence(group, 0, parent.detokenizer)
            complete.extend(parent, token, logprob)
            complete.finish_reason = "stop" if token in ends else "length"
            group.finished.append(complete)
    group.finished = nlargest(width, group.finished, lambda seq: seq.score)
    if at_end:
        return True
    kept = [child for child in best if child.token not in ends][:width]
    parents = {child.parent: child for child in reversed(kept)}  # and the best child of each
    others = [child for child in kept if parents[child.parent] is not child]
    idle = [seq for seq in group.live if seq not in parents]
    for child, seq in zip(others, idle, strict=True):
        fork(child.parent, seq)
        seq.extend(*child[1:])
    for child in parents.values():  # at last: what they said before is their other children's, too
        child.parent.extend(*child[1:])
    if len(group.finished) < width:
        return False
    return group.beams.early_stopping or kept[0].parent.score <= group.finished[-1].score
