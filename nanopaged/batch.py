"""One step in plain numbers: what the scheduler hands to the model runner.

Running ahead. On a CPU, a step's tokens are read as soon as it has run. On a GPU, the
next step is scheduled and launched before the tokens of this one are read, so the GPU
has work while Python reads them. Where a token is not known yet, the batch has a
negative number, which the GPU replaces with the token. Therefore:

  - the next step may have an entry for a sequence that has ended. Its new token is
    ignored. Its K and V do no harm: whoever takes the block that they are written to,
    in a later step, writes each slot before reading it
  - if all sequences wait for tokens to be read, the batch is empty
  - after the last request has ended, one launched step is left. It is read with the
    next request, and its tokens are ignored
"""

from array import array
from dataclasses import dataclass, field, fields
from typing import Any

from nanopaged.block_manager import Moves
from nanopaged.sequence import Sequence, SequenceGroup, State


@dataclass
class Batch:
    """All that a rank needs to know about a step.

    Entry i of the step computes `counts[i]` tokens of a sequence, up to, but not
    including, position `ends[i]`. Sample j is drawn from the logits after entry
    `sample_entries[j]`, and goes to the sequence `receivers[j]`. When a group forks,
    all its sequences receive samples from the one entry that computed the prompt.

    In the story of `sequence.py`, A decodes t0 while B computes what is new in its
    prompt, and forks, with block_size=4:

        token_ids = [t0, q4, q5]   counts = [1, 2]   ends = [7, 6]
        block_ids = [0, 1, 0, 2]   sample_entries = [0, 1, 1]

    The next step decodes all three sequences, after moves=[(2, 3)]. If the tokens of
    this step are still pending then, its token_ids are [-1, -2, -3]: samples 0, 1 and 2
    of this step.
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
    # For the sampler and for `Scheduler.update`. Only rank 0 has the last three.
    receivers: list[Sequence] = field(default_factory=list)
    groups: list[SequenceGroup] = field(default_factory=list)  # of each entry
    # The state before each entry, and the one after it, which the step fills. (A model
    # whose sequences have states runs on a single rank.)
    states: list[tuple[State | None, State]] = field(default_factory=list)

    def add_entry(self, seq: Sequence, end: int, block_ids: "array[int]") -> None:
        """Compute those tokens of `seq` that are not computed yet, up to `end`."""
        start = seq.num_computed_tokens
        # If all known tokens are computed, it is the turn of the pending one. (There is
        # one only: older ones have been read, and this step's own is added later.)
        self.token_ids += seq.token_ids[start:end] or seq.pending
        self.counts.append(end - start)
        self.ends.append(end)
        self.block_ids += block_ids
        self.groups.append(seq.group)
        self.states.append((seq.state, {}))

    @property
    def sample_positions(self) -> list[int]:
        """The position of each sampled token: the one after its entry."""
        return [self.ends[entry] for entry in self.sample_entries]

    def add_sample(self, receiver: Sequence) -> None:
        """Sample a token for this sequence from the logits after the last entry."""
        receiver.pending.append(-1 - len(self.receivers))
        self.sample_entries.append(len(self.counts) - 1)
        self.receivers.append(receiver)


HERE = ("receivers", "groups", "states")  # these stay on rank 0
# The fields that are sent to other ranks: those with numbers.
SENT = [each.name for each in fields(Batch) if each.name not in HERE]
