"""Beam search: expand every beam, keep the best continuations, fork where a beam has several.

A beam is a sequence, and the group has always as many as the search is wide. A step gives every
beam's most likely next tokens. The best of all these continuations that are not complete are the
new beams: a beam's best child takes its place, other children the places of beams that have none.
This file decides; the block manager's `fork` shares the blocks.

The rules are those of transformers' `generate(num_beams=..)`, so the results are too.
"""

from collections.abc import Callable
from heapq import nlargest

from nanopaged.sequence import Sequence, SequenceGroup


def advance(group: SequenceGroup, fork: Callable[[Sequence, Sequence], None]) -> bool:
    """Replace the live beams by their best continuations, and `fork` parents to new beams.

    True says that the search is over; then `group.finished` has the best complete beams.
    """
    width, ends = group.beams.beam_width, group.stop_token_ids
    # A child is a beam continued by one token; the best have the highest summed log-probability.
    children = [(parent, token, logprob) for parent in group.live
                for token, logprob in parent.candidates.items()]
    children.sort(key=lambda child: child[0].cumulative_logprob + child[2], reverse=True)
    at_end = len(group.live[0].token_ids) + 1 >= group.max_len
    for parent, token, logprob in children[:width]:  # what ends behind them is not good enough
        if at_end or token in ends:
            complete = Sequence(group, 0, parent.detokenizer)
            complete.extend(parent, token, logprob)
            complete.finish_reason = "stop" if token in ends else "length"
            group.finished.append(complete)
    group.finished = nlargest(width, group.finished, lambda seq: seq.score)
    if at_end:
        return True
    kept = [child for child in children if child[1] not in ends][:width]
    parents = {child[0]: child for child in reversed(kept)}  # and the best child of each
    others = [child for child in kept if parents[child[0]] is not child]
    idle = [seq for seq in group.live if seq not in parents]
    for child, seq in zip(others, idle, strict=True):
        fork(child[0], seq)
        seq.extend(*child)
    for parent, child in parents.items():  # at last: others need what they said before
        parent.extend(*child)
    if len(group.finished) < width:
        return False
    return group.beams.early_stopping or kept[0][0].score <= group.finished[-1].score
