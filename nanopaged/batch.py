"""One step in plain numbers: what the scheduler hands to the model runner."""

from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

from nanopaged.block_manager import Moves
from nanopaged.sequence import Sequence

# Random numbers are multiples of this. A less likely token may never be drawn.
RESOLUTION = 2.0**-32
# What is sampled instead of a token if nothing can be chosen, and why.
MODEL_FAILED, REQUEST_FAILED = -1, -2


def failure(token: int) -> Exception:
    """The error for MODEL_FAILED or REQUEST_FAILED."""
    if token == MODEL_FAILED:
        return RuntimeError("the model's own logits have a NaN or +inf, or nothing but "
                            "-inf (check its weights; float16 may overflow)")
    return ValueError(
        "logits must be finite for at least one token, and no NaN, once "
        "logits_processors, logit_bias and min_tokens have changed them")


class Draws(NamedTuple):
    """How to draw a token. A step has such a row for each sample. Without a receiver,
    as in padding and on ranks above 0, all numbers are 0, so the sample is greedy.
    """

    uniform: float  # a random number from 0 to 1
    temperature: float
    top_k: float  # larger than any vocabulary if all tokens may stay
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float


@dataclass(kw_only=True)
class Batch:
    """A step as the scheduler plans it: what it computes, and for whom.

    Entry i of the step computes `counts[i]` tokens of a sequence, those before position
    `ends[i]`. Sample j is drawn from the logits after entry `sample_entries[j]`, for
    the sequence `receivers[j]`. When a group forks, all its sequences receive samples
    from the one entry that computed the prompt.

    In the story of `sequence.py`, A decodes t0 while B computes what is new in its
    prompt, and forks, with block_size=4:

        token_ids = [t0, q4, q5]   counts = [1, 2]   ends = [7, 6]
        block_ids = [0, 1, 0, 2]   sample_entries = [0, 1, 1]

    The next step decodes all three sequences, after moves=[(2, 3)]. If these samples
    are still pending then, it has token_ids = [-1, -2, -3]: samples 0, 1 and 2 of the
    step before.
    """

    token_ids: list[int] = field(default_factory=list)  # of one entry after another
    counts: list[int] = field(default_factory=list)  # how many of them in each entry
    ends: list[int] = field(default_factory=list)  # the position after each entry
    # For each entry, the blocks of all positions from 0 to its end.
    block_ids: Any = field(default_factory=lambda: array("q"))
    sample_entries: list[int] = field(default_factory=list)  # the entry of each sample
    # Copies of blocks to make before the model runs, for swaps and copy-on-write. The
    # order matters: a later copy may overwrite what an earlier one has read.
    moves: Moves = field(default_factory=list)
    # Only rank 0 knows the rest.
    seqs: list[Sequence] = field(default_factory=list)  # the sequence of each entry
    receivers: list[Sequence] = field(default_factory=list)  # and of each sample
    draws: list[float] = field(default_factory=list)  # the `Draws` of each sample

    def add_entry(self, seq: Sequence, end: int, block_ids: "array[int]") -> None:
        """Compute those tokens of `seq` that are not computed yet, up to `end`."""
        start = seq.num_computed_tokens
        # The tokens of a chunk are known. That of a decode may be pending: then the
        # slice is empty, and `pending` has just its stand-in, a negative number.
        self.token_ids += seq.token_ids[start:end] or seq.pending
        self.counts.append(end - start)
        self.ends.append(end)
        self.block_ids += block_ids
        self.seqs.append(seq)

    def add_sample(self, receiver: Sequence) -> None:
        """Sample a token for this sequence from the logits after the last entry.

        The random number is a hash of the seed, the sequence's index and the token's
        position. So it depends neither on the batch nor on earlier draws.
        """
        group, uniform = receiver.group, 0.0
        if group.params.temperature:
            name = f"{group.seed} {receiver.index} {self.ends[-1]}".encode()
            uniform = RESOLUTION * (xxhash.xxh3_64_intdigest(name) >> 32)
        self.draws.append(uniform)
        self.draws += group.params.draw_numbers
        receiver.pending.append(-1 - len(self.receivers))
        self.sample_entries.append(len(self.counts) - 1)
        self.receivers.append(receiver)


# -- One step ahead --------------------------------------------------------------------

# On a GPU, the next step is scheduled and launched before the tokens of this one are
# read, so the GPU has work while Python reads them. A token that is not known yet has a
# stand-in: -1 - j is sample j of the step that runs. The GPU replaces it with the token
# (`fill_pending`). This changes no token, but some things follow:
#
#   - a group whose next step needs its last token in Python waits for it
#     (`SequenceGroup.needs_last_token`)
#   - the step already launched may have an entry for a sequence that turns out to have
#     ended. Its sample is ignored. Its K and V do no harm: the blocks are freed only
#     after that step was launched, and the GPU runs steps in order. The next owner's
#     step comes later, and writes each slot before it reads it
#   - if all sequences wait for tokens to be read, the batch is empty
#   - after the last request has ended, one launched step is left in `Engine.launched`.
#     The next request's first step reads it, and its tokens are ignored
#   - log-probabilities are read at once, so a step that reports some does wait
