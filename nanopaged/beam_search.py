"""Beam search: continue every beam, keep the best continuations, fork and drop beams.

A beam is a sequence, and the group always has as many as the search is wide. After a
step the most likely next tokens of every beam are known. The best continuations among
those that are not complete become the new beams. The best child of a beam takes
its place; its other children take the places of beams that have no child. This file
decides which; sharing the blocks is the block manager's `fork`.

The rules are those of transformers' `generate(num_beams=..)`, so the results are the
same.
"""

from collections.abc import Callable
from typing import NamedTuple

from nanopaged.sequence import Sequence, SequenceGroup


class Child(NamedTuple):
    """A beam, continued by one token."""

    parent: Sequence
    token: int

    @property
    def cumulative_logprob(self) -> float:
        logprob = self.parent.candidates[self.token].logprob
        return self.parent.cumulative_logprob + logprob


def advance_beams(group: SequenceGroup,
                  fork: Callable[[Sequence, Sequence], None]) -> bool:
    """Replace the live beams by their best continuations; `fork` shares a parent's
    blocks.

    True means that the search is over, and `group.complete_beams` has the best beams.
    """
    assert group.beam_params is not None, "not a beam search"
    width = group.beam_params.beam_width
    length = len(group.live[0].token_ids)
    # After the prompt all beams are equal: only the leader's children count.
    is_first = length == group.num_prompt_tokens
    parents = group.live[:1] if is_first else group.live
    children = [Child(parent, token) for parent in parents
                for token in parent.candidates]
    children.sort(key=lambda child: child.cumulative_logprob, reverse=True)

    # A complete child counts only if it is among the `width` best of all children.
    at_max_len = length + 1 >= group.max_len
    for child in children[:width]:
        is_stop = child.token in group.stop_token_ids
        if is_stop or at_max_len:
            complete = Sequence(group, index=0)
            complete.continue_beam(*child)
            complete.finish_reason = "stop" if is_stop else "length"
            group.complete_beams.append(complete)
    group.complete_beams.sort(key=lambda seq: seq.score, reverse=True)
    del group.complete_beams[width:]
    if at_max_len:
        return True

    survivors = [child for child in children if child.token not in group.stop_token_ids]
    best_score = _replace_beams(group, survivors[:width], fork)
    if len(group.complete_beams) < width:
        return False
    # With early_stopping the search is over now. Otherwise it goes on while the best
    # running beam scores above the worst complete one.
    worst_score = group.complete_beams[-1].score
    return group.beam_params.early_stopping or best_score <= worst_score


def _replace_beams(group: SequenceGroup, survivors: list[Child],
                   fork: Callable[[Sequence, Sequence], None]) -> float:
    """Make the survivors, best first, the live beams; returns the best new score."""
    best_children: dict[Sequence, Child] = {}
    other_children: list[Child] = []
    for child in survivors:
        if child.parent not in best_children:
            best_children[child.parent] = child
        else:
            other_children.append(child)

    # Forks come first: a parent must not change while others still need what it was. A
    # beam without a child gives back its blocks, and a fork takes its place.
    # There are as many survivors as beams, so both lists have the same length.
    childless = [seq for seq in group.live if seq not in best_children]
    for child, seq in zip(other_children, childless, strict=True):
        fork(child.parent, seq)
        seq.continue_beam(*child)
    for parent, child in best_children.items():
        parent.continue_beam(*child)
    # The object that was the best survivor's parent has just become this survivor.
    best = survivors[0].parent
    return best.score
