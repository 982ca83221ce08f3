"""Who runs in the next step, and with how many tokens.

First come, first served, with a budget of tokens for each step. Running sequences come
first: one token each where they decode, a chunk where their prompt is not computed yet.
Then come those that wait. The scheduler deals in block ids and token ids and never sees
a tensor.

A group is admitted, preempted and resumed as a whole (gang scheduling). When the pool
is full, the youngest group goes back to the head of the queue: either its blocks move
to CPU memory (swap), or its K and V are given up and computed again later (recompute).

A request that can never fit is refused when it is made. Every other one is served
sooner or later: the oldest group is the last to be preempted, and alone it fits into
the pool.
"""

import time
from array import array
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from nanopaged.beam_search import advance_beams
from nanopaged.block_manager import BlockManager, Moves
from nanopaged.config import EngineConfig
from nanopaged.outputs import EngineStats
from nanopaged.sequence import Sequence, SequenceGroup


@dataclass
class Batch:
    """One step, in plain numbers: what every rank must know about it.

    Entry i of the step computes `counts[i]` tokens of a sequence, up to, but not
    including, position `ends[i]`. Sample j is drawn from the logits after entry
    `samples[j]`. When a group forks, all its sequences sample from the one entry that
    computed the prompt.

    In the story of `sequence.py`, A decodes t0 while B computes what is new in its
    prompt, and forks, with block_size=4:

        token_ids = [t0, q4, q5]   counts = [1, 2]   ends = [7, 6]
        block_ids = [0, 1, 0, 2]   samples = [0, 1, 1]

    The next step decodes all three, and copies=[(2, 3)] comes first. If it is launched
    before the host has read the tokens of this one, they are still pending: then its
    token_ids are [-1, -2, -3], for samples 0, 1 and 2 of the step before.
    """

    # Of all entries, one after another: the tokens to compute, how many these are,
    # where they end, and the blocks of all tokens from 0 to that end.
    token_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    block_ids: Any = field(default_factory=lambda: array("q"))
    samples: list[int] = field(default_factory=list)
    # Blocks are moved in this order before the model runs: a copy may go to a block
    # that a swap out has left, and may be made of one that has just been swapped in.
    swaps_out: Moves = field(default_factory=list)
    swaps_in: Moves = field(default_factory=list)
    copies: Moves = field(default_factory=list)
    # Only on rank 0: who gets the sampled tokens.
    sampled: list[Sequence] = field(default_factory=list)


Observer = Callable[[str, Batch | None], None]


class Scheduler:
    def __init__(self, config: EngineConfig, block_manager: BlockManager,
                 observers: Iterable[Observer] = ()) -> None:
        self.config = config
        self.block_manager = block_manager
        self.observers = observers
        # Groups by request id, oldest first; all that run are older than those that
        # wait. Whoever moves from one to the other is in both for a moment, so that no
        # group is lost if Ctrl-C strikes.
        self.waiting: OrderedDict[str, SequenceGroup] = OrderedDict()
        self.running: dict[str, SequenceGroup] = {}
        self.unfinished = ChainMap(self.waiting, self.running)  # a view of both
        self.stats = EngineStats(block_manager.num_blocks)

    def _notify(self, phase: str, batch: Batch | None = None) -> None:
        """Tell observers where the step is: for timing, tracing and tests."""
        for observer in self.observers:
            observer(phase, batch)

    # -- Before the forward pass -------------------------------------------------------

    def schedule(self) -> Batch:
        """Decide the next step. What it will compute counts as computed from here on.
        """
        self._notify("begin")
        batch = Batch()
        budget = self.config.max_num_batched_tokens
        num_running = len(self.running)
        for request_id, group in list(self.running.items()):
            # If the pool is full the youngest gives way, and that may be this group.
            while request_id in self.running and not self.block_manager.grow(
                    group.next_sequences, batch.copies):
                self._preempt(next(reversed(self.running.values())), batch)
            if request_id in self.running:
                budget = self._schedule_group(group, batch, budget)

        # After a preemption nobody is admitted. A pool that was just full has no room
        # for newcomers. And a group that was just preempted may have a pending token,
        # so it cannot tell yet what to compute.
        num_seqs = sum(len(group.live) for group in self.running.values())
        while self.waiting and budget > 0 and len(self.running) >= num_running:
            group = next(iter(self.waiting.values()))
            num_seqs += len(group.live)
            if num_seqs > self.config.max_num_seqs or not self._admit(group, batch):
                break
            budget = self._schedule_group(group, batch, budget)

        self.stats.steps += 1
        self._notify("scheduled", batch)
        return batch

    def _schedule_group(self, group: SequenceGroup, batch: Batch, budget: int) -> int:
        """Spend budget on the sequences of a group; returns what is left.

        If it is too small for all, the last ones wait until some is left for them.
        Beams must be compared with each other: the first ones keep their candidates
        until the last has its own.
        """
        for seq in group.next_sequences:
            count = min(seq.compute_end - seq.num_computed_tokens, budget)
            if count > 0:
                self._schedule_sequence(seq, count, batch)
                budget -= count
        return budget

    def _schedule_sequence(self, seq: Sequence, count: int, batch: Batch) -> None:
        """Let `seq` compute its next `count` tokens, and sample if they are the last.

        When the leader has computed the prompt, the others go on from there. They share
        all its blocks, the partly filled last one included, and each samples from the
        same logits. In the next step all of them write into that last block, unless it
        is full: in the order of `live` each takes a copy of it, but for the last, which
        is by then its only holder.
        """
        group = seq.group
        manager = self.block_manager
        first = seq.num_computed_tokens
        end = first + count
        manager.advance(seq, count)
        # A pending token is not in token_ids yet. An entry that computes one computes
        # nothing else, so the slice is empty. (Only a group that was preempted computes
        # several of its own tokens at once, and by then none of them is pending.)
        batch.token_ids += seq.token_ids[first:end] or [-1 - seq.sample_index]
        batch.counts.append(count)
        batch.ends.append(end)
        batch.block_ids += seq.block_table[: manager.num_blocks_for(end)]

        samplers = [seq]
        if end == group.num_prompt_tokens and not group.forked:
            group.forked = True
            samplers = group.live
            for child in group.live[1:]:
                manager.fork(seq, child)
        for sampler in samplers:
            # One that was preempted may have more tokens, and computes them first.
            if end == len(sampler.token_ids) + sampler.num_pending_tokens:
                sampler.sample_index = len(batch.samples)
                sampler.num_pending_tokens += 1
                batch.samples.append(len(batch.counts) - 1)
                batch.sampled.append(sampler)

    # -- In and out of the device's pool -----------------------------------------------

    def _admit(self, group: SequenceGroup, batch: Batch) -> bool:
        """Let a waiting group run, if there are blocks for all its sequences.

        One rule for all, whether they are new, swapped out or to be recomputed: as many
        blocks must be free as its sequences can need at their present lengths, but for
        those of a cached prefix that somebody holds. While others run, a hundredth of
        the pool stays free, too (the watermark): without it, the newcomer would be
        preempted as soon as a running group needs a block.
        """
        manager = self.block_manager
        leader = group.live[0]
        is_swapped = bool(leader.block_table)  # no other waiting group has blocks
        prefix = [] if is_swapped else manager.match_prefix(leader)
        lengths = [len(seq.token_ids) for seq in group.live]
        num_needed = manager.most_blocks(group.num_prompt_tokens, lengths)
        num_needed -= sum(manager.blocks[id].ref_count > 0 for id in prefix)
        if self.running:
            num_needed += manager.num_blocks // 100
        if num_needed > len(manager.free_blocks):
            return False

        if is_swapped:
            batch.swaps_in += manager.swap(group.live, manager.free_blocks)
        else:
            manager.hold(leader, prefix, len(prefix) * manager.block_size)
            self.stats.prefix_hit_tokens += leader.num_computed_tokens
            if group.num_cached_tokens < 0:
                group.num_cached_tokens = leader.num_computed_tokens
        self.running[group.request_id] = self.waiting[group.request_id]
        del self.waiting[group.request_id]
        # This is True: enough blocks are free.
        return manager.grow(group.next_sequences, batch.copies)

    def _preempt(self, group: SequenceGroup, batch: Batch) -> None:
        """Send a group back to the head of the queue. It keeps its tokens.

        If the CPU's pool has no room for its blocks (if nothing is to be swapped, it
        has none at all), they are freed. Then the leader computes the prompt again, and
        they fork again.
        """
        self.waiting[group.request_id] = group
        self.waiting.move_to_end(group.request_id, last=False)
        del self.running[group.request_id]
        manager = self.block_manager
        moves = manager.swap(group.live, manager.free_swap_blocks)
        if moves:
            batch.swaps_out += moves
            self.stats.preemptions_swap += 1
        else:
            for seq in group.live:
                manager.free(seq)
            group.forked = len(group.live) == 1
            self.stats.preemptions_recompute += 1

    # -- After the forward pass --------------------------------------------------------

    def update(self, batch: Batch, sampled: Any) -> None:
        """Append the sampled tokens, and finish the sequences that are complete.

        `sampled` is a `SamplerOutput`, which waits for the device here.
        """
        token_ids = sampled.read()
        self._notify("executed", batch)
        for i, (seq, token) in enumerate(zip(batch.sampled, token_ids, strict=True)):
            group = seq.group
            seq.num_pending_tokens -= 1
            if seq.finish_reason is not None:
                # It ended in the step before, when this step was already launched.
                continue
            group.report()
            self.stats.output_tokens += 1
            metrics = group.metrics
            metrics.first_token_time = metrics.first_token_time or time.perf_counter()

            if group.beam_params:
                seq.candidates = sampled.logprobs[i]
                # After the last beam all have their candidates, and the search goes on.
                if seq is group.live[-1] and advance_beams(group, self.block_manager):
                    # The complete ones are the answer. Drop the beams that still run.
                    group.sequences = group.complete_beams
                    self.abort(group, "length")
            else:
                seq.append(token, sampled.logprobs.get(i))
                self._finish_if_complete(seq)

        self._notify("updated", batch)

    def _finish_if_complete(self, seq: Sequence) -> None:
        at_max_len = len(seq.token_ids) >= seq.group.max_len
        is_stop = seq.ended_by_token
        if seq.group.params.stop:
            detokenizer = seq.detokenize(final=is_stop or at_max_len)
            is_stop |= detokenizer.stopped_by is not None
        if is_stop or at_max_len:
            self.finish(seq, "stop" if is_stop else "length")

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence, wherever it is, and give back its blocks."""
        group = seq.group
        group.report()
        seq.finish_reason = reason
        group.live.remove(seq)
        self.block_manager.free(seq)
        if not group.live:
            self.waiting.pop(group.request_id, None)
            self.running.pop(group.request_id, None)

    def abort(self, group: SequenceGroup, reason: str = "abort") -> None:
        """End all sequences of a group that have not finished."""
        for seq in list(group.live):
            self.finish(seq, reason)
