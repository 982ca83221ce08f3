"""Who runs in the next step, and with how many tokens.

First come, first served, with a budget of tokens for each step. The scheduler goes
through the requests from the oldest to the youngest. The oldest ones run: each of their
sequences computes one token if it decodes, or a chunk of its prompt if that has not
been computed yet. The rest of the budget admits waiting requests. The scheduler deals
in block ids and token ids, and never sees a tensor.

A group is admitted, preempted and resumed as a whole (gang scheduling). When the pool
is full, the youngest running group has to wait again. Either its blocks move to CPU
memory (swap), or its K and V are given up and computed again later (recompute).

A request that can never fit is refused when it is made. All others are served sooner
or later: the oldest group is the last to be preempted, and it fits into the pool on
its own.
"""

from array import array
from dataclasses import dataclass, field
from typing import Any

from nanopaged.beam_search import advance_beams
from nanopaged.block_manager import BlockManager, Moves
from nanopaged.config import EngineConfig
from nanopaged.outputs import EngineStats
from nanopaged.sequence import Sequence, SequenceGroup


@dataclass
class Batch:
    """One step in plain numbers: all that a rank needs to know about it.

    Entry i of the step computes `counts[i]` tokens of a sequence, up to, but not
    including, position `ends[i]`. Sample j is drawn from the logits after entry
    `samples[j]`, and goes to the sequence `receivers[j]`. When a group forks, all its
    sequences receive samples from the one entry that computed the prompt.

    In the story of `sequence.py`, A decodes t0 while B computes what is new in its
    prompt, and forks, with block_size=4:

        token_ids = [t0, q4, q5]   counts = [1, 2]   ends = [7, 6]
        block_ids = [0, 1, 0, 2]   samples = [0, 1, 1]

    The next step decodes all three sequences, after moves=[(2, 3)]. If it is launched
    before the host has read the tokens of this step, they are still pending. In that
    case its token_ids are [-1, -2, -3]: samples 0, 1 and 2 of the previous step.
    """

    token_ids: list[int] = field(default_factory=list)  # of one entry after another
    counts: list[int] = field(default_factory=list)  # how many of them in each entry
    ends: list[int] = field(default_factory=list)  # the position after each entry
    # For each entry, the blocks of all positions from 0 to its end.
    block_ids: Any = field(default_factory=lambda: array("q"))
    samples: list[int] = field(default_factory=list)  # the entry of each sample
    # Copies of blocks to make before the model runs, one after another: for swaps and
    # for copy-on-write. A later one may overwrite what an earlier one has read.
    moves: Moves = field(default_factory=list)
    receivers: list[Sequence] = field(default_factory=list)  # only on rank 0


class Scheduler:
    def __init__(self, config: EngineConfig, block_manager: BlockManager,
                 unfinished: dict[str, SequenceGroup]) -> None:
        self.config = config
        self.block_manager = block_manager
        # Groups by request id, oldest first. The oldest ones run, and the others wait.
        # New ones may be added at any time, so `schedule` goes through a copy.
        self.unfinished = unfinished
        self.running: dict[str, SequenceGroup] = {}
        self.stats = EngineStats(block_manager.num_blocks)

    # -- Before the forward pass -------------------------------------------------------

    def schedule(self) -> Batch:
        """Plan the next step. What it will compute counts as computed from here on.
        """
        for group in list(self.unfinished.values()):
            if group.is_aborted:
                self.abort(group)
        batch = Batch()
        num_running = len(self.running)
        for request_id, group in list(self.unfinished.items()):
            if len(batch.token_ids) == self.config.max_num_batched_tokens:
                break
            # After a preemption no group is admitted. A pool that was just full has no
            # room for another group. And one that was just preempted may have pending
            # tokens, so it is not yet known what it must compute. (Groups are admitted
            # only after the last running one has been visited. So if fewer run than at
            # the start, there was a preemption.)
            has_preempted = len(self.running) < num_running
            if request_id not in self.running and not has_preempted:
                self._admit(group, batch)
            # If the pool is full the youngest gives way, and that may be this group.
            while request_id in self.running and not self.block_manager.grow(
                    group.next_sequences, batch.moves):
                self._preempt(batch)
            if request_id not in self.running:
                break  # all groups after it are younger, so they wait, too
            for seq in group.next_sequences:
                self._schedule_sequence(seq, batch)
        self.stats.steps += 1
        return batch

    def _schedule_sequence(self, seq: Sequence, batch: Batch) -> None:
        """Let `seq` compute its next tokens, and sample if that computes all of them.

        If the budget is too small for all sequences of a group, the last ones wait for
        the next step. In a beam search, the first ones then keep their candidates until
        the last one has its own, because all of them are compared.

        When the leader has computed the prompt, the other sequences share its blocks,
        including a last block that is not full, and each samples from the same logits.
        In the next step all of them write into that block: in the order of `live`, each
        takes a copy of it, except the last, which is then its only holder.
        """
        group = seq.group
        manager = self.block_manager
        budget = self.config.max_num_batched_tokens - len(batch.token_ids)
        first = seq.num_computed_tokens
        end = min(seq.compute_end, first + budget)
        if end == first:  # no budget is left, or the last token needs no K and V
            return
        manager.advance(seq, end - first)
        # A pending token is not in token_ids yet. An entry that computes one computes
        # nothing else, so the slice is empty. (Only a group that was preempted computes
        # several of its own tokens at once, and by then none of them is pending.)
        batch.token_ids += seq.token_ids[first:end] or seq.pending[-1:]
        batch.counts.append(end - first)
        batch.ends.append(end)
        batch.block_ids += seq.block_table[: manager.num_blocks_for(end)]

        receivers = [seq]
        if end == group.num_prompt_tokens and not group.forked:
            group.forked = True
            receivers = group.live
            for child in group.live[1:]:
                manager.fork(seq, child)
        for receiver in receivers:
            # One that was preempted may have more tokens, and computes them first.
            if end == receiver.compute_end:
                receiver.pending.append(-1 - len(batch.receivers))
                batch.samples.append(len(batch.counts) - 1)
                batch.receivers.append(receiver)

    # -- In and out of the device's pool -----------------------------------------------

    def _admit(self, group: SequenceGroup, batch: Batch) -> None:
        """Let a waiting group run, if there is room for all its sequences.

        The rule is the same for groups that are new, swapped out or to be recomputed.
        Enough blocks must be free for all its sequences at their present lengths,
        not counting blocks of a cached prefix that others hold. While others run, 1% of
        the pool must also stay free (the watermark). Otherwise the group would be
        preempted as soon as an older one needs a block.
        """
        num_seqs = sum(len(each.live) for each in [group, *self.running.values()])
        if num_seqs > self.config.max_num_seqs:
            return
        manager = self.block_manager
        leader = group.live[0]
        is_swapped = bool(leader.block_table)  # no other waiting group has blocks
        prefix = [] if is_swapped else manager.match_prefix(leader)
        num_needed = manager.most_blocks(
            group.num_prompt_tokens, [len(seq.token_ids) for seq in group.live])
        num_needed -= sum(manager.ref_counts[id] > 0 for id in prefix)
        watermark = manager.num_blocks // 100 if self.running else 0
        if num_needed + watermark > len(manager.free_blocks):
            return

        num_cached = len(prefix) * manager.block_size
        if group.num_cached_tokens < 0:  # from now on it has started
            group.num_cached_tokens = num_cached
        self.running[group.request_id] = group
        if is_swapped:
            batch.moves += manager.swap(group.live, manager.free_blocks)
            return
        manager.replace_blocks(leader, prefix, num_cached)
        self.stats.prefix_hit_tokens += num_cached

    def _preempt(self, batch: Batch) -> None:
        """Make the youngest running group wait again. It keeps its tokens.

        If the CPU's pool has no room for its blocks, they are freed. (That pool is
        empty if preemption_mode is "recompute".) Then the leader will compute the
        prompt again, and the group will fork again.
        """
        _, group = self.running.popitem()
        manager = self.block_manager
        moves = manager.swap(group.live, manager.free_swap_blocks)
        if moves:
            batch.moves += moves
            self.stats.preemptions_swap += 1
        else:
            for seq in group.live:
                manager.free(seq)
            group.forked = len(group.live) == 1
            self.stats.preemptions_recompute += 1

    # -- After the forward pass --------------------------------------------------------

    def update(self, batch: Batch, output: Any) -> None:
        """Append the sampled tokens, and finish the sequences that are complete.

        `output` is a `SamplerOutput`. Reading it waits for the device.
        """
        tokens = output.read()
        for i, (seq, token) in enumerate(zip(batch.receivers, tokens, strict=True)):
            group = seq.group
            seq.pending.pop(0)
            if seq.finish_reason is not None:
                # It ended in the previous step, after this one had been launched.
                continue
            group.report()
            self.stats.output_tokens += 1

            if group.beam_params:
                seq.candidates = output.logprobs[i]
                # Once the last beam has its candidates, the search goes on.
                if seq is group.live[-1] and advance_beams(group, self.block_manager):
                    # The answer is the complete beams. Drop those still running.
                    group.sequences = group.complete_beams
                    self.abort(group)
            else:
                seq.append(token, output.logprobs.get(i))
                at_max_len = len(seq.token_ids) >= group.max_len
                is_stop = seq.ended_by_token
                if group.params.stop:
                    detokenizer = seq.detokenize(final=is_stop or at_max_len)
                    is_stop |= detokenizer.stopped_by is not None
                if is_stop or at_max_len:
                    self.finish(seq, "stop" if is_stop else "length")

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence, whether running or waiting, and free its blocks."""
        group = seq.group
        group.report()
        seq.finish_reason = reason
        group.live.remove(seq)
        self.block_manager.free(seq)
        if not group.live:
            del self.unfinished[group.request_id]
            self.running.pop(group.request_id, None)

    def abort(self, group: SequenceGroup) -> None:
        """End all sequences of a group that have not finished."""
        for seq in list(group.live):
            self.finish(seq, "abort")
