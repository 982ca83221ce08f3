"""One step in plain numbers: what the scheduler hands to the model runner.

Running ahead. On a CPU, a step's tokens are read as soon as it has run. On a GPU, the
next step is scheduled and launched before the tokens of this one are read, so the GPU
has work while Python reads them. Where a token is not known yet, the batch has a
negative number, which the GPU replaces with the token. This changes no token: it is
there before the GPU needs it, and a group whose next step needs it in Python waits
(`needs_last_token`). Therefore:

  - the next step may have an entry for a sequence that has ended. Its new token is
    ignored. Its K and V do no harm: whoever takes their block, in a later step, writes
    each slot before reading it
  - if all sequences wait for tokens to be read, the batch is empty
  - after the last request has ended, one launched step is left. It is read with the
    next request, and its tokens are ignored
"""

from array import array
from dataclasses import dataclass, field
from typing import Any

from nanopaged.block_manager import Moves
from nanopaged.sequence import Sequence


@dataclass(kw_only=True)
class Work:
    """What a step computes, in numbers. Rank 0 sends this to the other ranks.

    Entry i of the step computes `counts[i]` tokens of a sequence, up to, but not
    including, position `ends[i]`. Sample j is drawn from the logits after entry
    `sample_entries[j]`, and goes to the sequence `receivers[j]`. When a group forks,
    all its sequences receive samples from the one entry that computed the prompt.

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
    # Copies of blocks to make before the model runs, one after another: for swaps and
    # for copy-on-write. A later one may overwrite what an earlier one has read.
    moves: Moves = field(default_factory=list)


@dataclass(kw_only=True)
class Batch(Work):
    """A step as the scheduler plans it: its work, and whom that is for. Only rank 0
    fills the two lists that are added here.
    """

    seqs: list[Sequence] = field(default_factory=list)  # the sequence of each entry
    receivers: list[Sequence] = field(default_factory=list)  # and of each sample

    def add_entry(self, seq: Sequence, end: int, block_ids: "array[int]") -> None:
        """Compute those tokens of `seq` that are not computed yet, up to `end`."""
        start = seq.num_computed_tokens
        # Known tokens, or the one pending token that the step in flight samples. (Never
        # both: all before it are computed. `add_sample` adds this step's own later.)
        self.token_ids += seq.token_ids[start:end] or seq.pending
        self.counts.append(end - start)
        self.ends.append(end)
        self.block_ids += block_ids
        self.seqs.append(seq)

    @property
    def sample_positions(self) -> list[int]:
        """The position of each sampled token: the one after its entry."""
        return [self.ends[entry] for entry in self.sample_entries]

    def add_sample(self, receiver: Sequence) -> None:
        """Sample a token for this sequence from the logits after the last entry."""
        receiver.pending.append(-1 - len(self.receivers))
        self.sample_entries.append(len(self.counts) - 1)
        self.receivers.append(receiver)
