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
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from nanopaged.beam_search import advance_beams
from nanopaged.block_manager import BlockManager, Moves
from nanopaged.config import EngineConfig
from nanopaged.outputs import EngineStats, Logprobs
from nanopaged.sequence import Sequence, SequenceGroup

PENDING = -1  # in a message: a token that so far only the device knows
FAILED = -1  # among the results: no token, as the logits have NaN or allow none


@dataclass
class ControlMessage:
    """What every rank must know about a step, in plain numbers.

    Entry i of the step computes `counts[i]` tokens of the sequence in row `rows[i]`, up
    to, but not including, position `ends[i]`. Sample j is drawn from the logits after
    entry `samples[j]`, and its token goes to the sequence in row `sampled_rows[j]`.
    That need not be the entry's own sequence: when a group forks, all its sequences
    sample from the one that computed the prompt.

    For example, a prompt of 10 tokens in row 0, asked for two continuations, and a
    decode at position 4 in row 2 have

        counts = [10, 1]   ends = [10, 5]   rows = [0, 2]
        samples = [0, 0, 1]   sampled_rows = [0, 1, 2]
    """

    # Of all entries, one after another.
    token_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)
    # Blocks are moved in this order before the model runs.
    swaps_out: Moves = field(default_factory=list)
    swaps_in: Moves = field(default_factory=list)
    copies: Moves = field(default_factory=list)
    # What is new in block tables: (row, index of a logical block, physical blocks from
    # there).
    table_updates: list[tuple[int, int, list[int]]] = field(default_factory=list)


@dataclass
class Batch:
    """One step: the message to all ranks, and what only rank 0 needs to know about it.
    """

    message: ControlMessage = field(default_factory=ControlMessage)
    sampled: list[Sequence] = field(default_factory=list)  # who gets the sampled tokens
    # Sequences that got a row in this step.
    admitted: list[Sequence] = field(default_factory=list)

    def add_sample(self, seq: Sequence) -> None:
        """Sample a token for `seq` after the entry that was added last."""
        self.message.samples.append(len(self.message.rows) - 1)
        self.message.sampled_rows.append(seq.row)
        self.sampled.append(seq)
        seq.num_pending_tokens += 1


class Scheduler:
    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        self.config = config
        self.block_manager = block_manager
        # Oldest first; without values, so that any group leaves it in O(1).
        self.waiting: OrderedDict[SequenceGroup, None] = OrderedDict()
        # The group that did not fit when it was last tried, and how many blocks were
        # free.
        self.did_not_fit: tuple[SequenceGroup | None, int] = (None, 0)
        # Oldest first, all older than those waiting.
        self.running: list[SequenceGroup] = []
        self.free_rows = list(reversed(range(config.max_num_seqs)))
        self.stats = EngineStats(block_manager.num_blocks)
        # Requests that got a token or ended, until somebody takes them out to report
        # it.
        self.changed: dict[str, SequenceGroup] = {}

    # -- Before the forward pass -------------------------------------------------------

    def schedule(self) -> Batch:
        """Decide the next step. What it will compute counts as computed from here on.
        """
        batch = Batch()
        budget = self.config.max_num_batched_tokens

        has_preempted = False
        index = 0
        while index < len(self.running):
            group = self.running[index]
            if group.is_beam_search and group.live[0].num_pending_tokens:
                index += 1  # its next beams are not known yet
            elif self._make_room(group, batch):
                budget -= self._schedule_group(group, batch, budget)
                index += 1
            else:
                # The pool is full. The youngest gives way, and that may be this very
                # group.
                self._preempt(self.running.pop(), batch)
                has_preempted = True

        # A pool that was just full has no room for newcomers.
        while self.waiting and budget > 0 and not has_preempted:
            group = next(iter(self.waiting))
            if not self._admit(group, batch):
                break
            del self.waiting[group]
            self.running.append(group)
            budget -= self._schedule_group(group, batch, budget)

        message = batch.message
        self.stats.steps += 1
        self.stats.blocks_copied += len(message.copies)
        self.stats.blocks_swapped += len(message.swaps_out) + len(message.swaps_in)
        return batch

    def _make_room(self, group: SequenceGroup, batch: Batch) -> bool:
        """Give a group the blocks for what it computes next, if enough are free."""
        manager = self.block_manager
        seqs = group.next_sequences
        if len(seqs) == 1:
            # The usual case, kept short. The only live sequence of a group shares full
            # blocks at most, and never writes to those, so it needs no copy.
            num_slots = len(seqs[0].block_table) * manager.block_size
            if seqs[0].compute_end <= num_slots:
                return True

        if manager.num_blocks_to_grow(seqs) > len(manager.free_blocks):
            return False
        for seq in seqs:
            batch.message.copies += manager.grow(seq)
        return True

    def _schedule_group(self, group: SequenceGroup, batch: Batch, budget: int) -> int:
        """Spend budget on the sequences of a group; returns how much.

        All of them sample in the same step, as a beam search compares all its beams,
        and a sequence samples when its last token is computed. So if the budget is too
        small for all, nobody computes its last token in this step. For a decode that is
        its only token: it waits. A long prompt is cut to the budget anyway.
        """
        left = budget
        seqs = group.next_sequences
        counts = [seq.compute_end - seq.num_computed_tokens for seq in seqs]
        if sum(counts) > budget:
            counts = [count - 1 for count in counts]

        for seq, count in zip(seqs, counts, strict=True):
            count = min(count, left)
            if count > 0:
                self._schedule_sequence(seq, count, batch)
                left -= count
        return budget - left

    def _schedule_sequence(self, seq: Sequence, count: int, batch: Batch) -> None:
        """Add an entry to the batch: `seq` computes its next `count` tokens."""
        group = seq.group
        message = batch.message
        self.block_manager.advance(seq, count)
        end = seq.num_computed_tokens
        # A pending token is not in token_ids yet. If this entry computes it, the slice
        # is empty, and count is 1. (Only a group that was preempted computes several of
        # its own tokens at once, and by then none of them is pending.)
        known = seq.token_ids[end - count : end]
        message.token_ids += known or [PENDING]
        message.counts.append(count)
        message.ends.append(end)
        message.rows.append(seq.row)
        if seq.num_sent_blocks < len(seq.block_table):
            update = (seq.row, *self.block_manager.unsent_blocks(seq))
            message.table_updates.append(update)

        if end == len(seq.token_ids) + seq.num_pending_tokens:
            batch.add_sample(seq)  # its last token is computed: sample the next
        if end == group.num_prompt_tokens and not group.forked:
            self._fork(group, batch)

    def _fork(self, group: SequenceGroup, batch: Batch) -> None:
        """The leader computes the end of the prompt: the others go on from there.

        They share all its blocks, the partly filled last one included, and each samples
        from the same logits. In the next step all of them write into that last block:
        in the order of `live` they take a copy, until the last is the only holder.
        """
        leader = group.live[0]
        for seq in group.live[1:]:
            self.block_manager.fork(leader, seq)
            # A sequence that was preempted has tokens of its own, and computes them
            # first.
            if len(seq.token_ids) == group.num_prompt_tokens:
                batch.add_sample(seq)
        group.forked = True

    # -- In and out of the device's pool -----------------------------------------------

    def _admit(self, group: SequenceGroup, batch: Batch) -> bool:
        """Let a waiting group run, if there are rows and blocks for all its sequences.
        """
        manager = self.block_manager
        leader = group.live[0]
        if len(self.free_rows) < len(group.live):
            return False
        # While others run, a hundredth of the pool stays free (the watermark). Without
        # it, the newcomer would be preempted as soon as a running group needs a block.
        num_spare = manager.num_blocks // 100 if self.running else 0

        if leader.block_table:  # it was swapped out: no other waiting group has blocks
            num_spare += manager.num_blocks_to_grow(group.next_sequences)
            moves = manager.swap(group.live, manager.free_blocks, num_spare)
            if not moves:
                return False
            batch.message.swaps_in += moves
        else:
            # If no blocks became free since, it is not worth hashing the prompt again.
            num_free = len(manager.free_blocks)
            last_tried, num_free_then = self.did_not_fit
            if last_tried is group and num_free <= num_free_then:
                return False
            prefix = manager.match_prefix(leader)
            lengths = [len(seq.token_ids) for seq in group.live]
            num_blocks = manager.most_blocks(group.num_prompt_tokens, lengths)
            if not manager.can_allocate(prefix, num_blocks, num_spare):
                self.did_not_fit = (group, num_free)
                return False
            manager.allocate(leader, prefix)
            self.stats.prefix_query_tokens += leader.compute_end
            self.stats.prefix_hit_tokens += leader.num_computed_tokens

        for seq in group.live:
            seq.row = self.free_rows.pop()
            batch.admitted.append(seq)
        if not group.metrics.first_scheduled_time:
            group.metrics.first_scheduled_time = time.perf_counter()
            group.num_cached_tokens = leader.num_computed_tokens
            self.stats.prompt_tokens += group.num_prompt_tokens
        # A group that was swapped out may need blocks for its next tokens, too. They
        # have been counted, so this succeeds.
        return self._make_room(group, batch)

    def _preempt(self, group: SequenceGroup, batch: Batch) -> None:
        """Send a group back to the head of the queue. It keeps its tokens.

        In mode "auto" a single sequence is recomputed: its blocks may even still be
        cached. A group of several is swapped: a block that they share moves only once.
        If the CPU's pool has no room, any group is recomputed.
        """
        self.waiting[group] = None
        self.waiting.move_to_end(group, last=False)
        manager = self.block_manager
        mode = self.config.preemption_mode
        moves: Moves = []
        if mode == "swap" or (mode == "auto" and len(group.live) > 1):
            moves = manager.swap(group.live, manager.free_swap_blocks)

        if moves:
            batch.message.swaps_out += moves
            self.stats.preemptions_swap += 1
            for seq in group.live:
                self._free_row(seq)
        else:  # recompute: also if the CPU's pool is full
            self.stats.preemptions_recompute += 1
            for seq in group.live:
                self._free_row(seq)
                manager.free(seq)
            # The leader computes the prompt again, and then they fork again.
            group.forked = len(group.live) == 1

    def _free_row(self, seq: Sequence) -> None:
        if seq.row >= 0:
            self.free_rows.append(seq.row)
            seq.row = -1

    # -- After the forward pass --------------------------------------------------------

    def update(self, batch: Batch, token_ids: list[int],
               logprobs: dict[int, Logprobs]) -> None:
        """Append the sampled tokens, and finish the sequences that are complete.

        logprobs: those of sample i, if its request asked for them.
        """
        for i, (seq, token) in enumerate(zip(batch.sampled, token_ids, strict=True)):
            seq.num_pending_tokens -= 1
            if seq.finish_reason is not None:
                # It ended in the step before, when this step was already launched.
                continue
            group = seq.group
            self.changed[group.request_id] = group
            if token == FAILED:
                if group.is_beam_search:
                    # Beams are compared with each other, so none can go on alone.
                    self.abort([group], "error")
                else:
                    self.finish(seq, "error")
                continue
            self.stats.output_tokens += 1
            if not group.metrics.first_token_time:
                group.metrics.first_token_time = time.perf_counter()

            if group.is_beam_search:
                seq.candidates = logprobs[i]
            else:
                seq.append(token, logprobs.get(i))
                reason = self._reason_to_finish(seq)
                if reason is not None:
                    self.finish(seq, reason)

        # Every beam has its candidates now, so the search can go on.
        beam_searches = dict.fromkeys(
            seq.group for seq in batch.sampled if seq.group.is_beam_search)
        for group in beam_searches:
            if group.live and advance_beams(group, self.block_manager.fork):
                # Drop the beams that still run. The answer is the complete ones.
                self.abort([group], "length")
                group.sequences = group.complete_beams

    def _reason_to_finish(self, seq: Sequence) -> str | None:
        params = seq.group.params
        reason = None
        if seq.ended_by_token:
            reason = "stop"
            if seq.token_ids[-1] in (params.stop_token_ids or ()):
                seq.stop_reason = seq.token_ids[-1]
        elif len(seq.token_ids) >= seq.group.max_len:
            reason = "length"

        if params.stop:
            stopped_by = seq.detokenize(final=reason is not None).stopped_by
            if stopped_by is not None:
                reason = "stop"
                seq.stop_reason = stopped_by
        return reason

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence, wherever it is, and give back its row and its blocks."""
        group = seq.group
        seq.finish_reason = reason
        group.live.remove(seq)
        self._free_row(seq)
        self.block_manager.free(seq)
        self.changed[group.request_id] = group
        if not group.live:
            if group in self.waiting:
                del self.waiting[group]
            else:
                self.running.remove(group)
            group.metrics.finished_time = time.perf_counter()

    def abort(self, groups: Iterable[SequenceGroup], reason: str = "abort") -> None:
        """End all sequences of these groups that have not finished."""
        for group in groups:
            for seq in list(group.live):
                self.finish(seq, reason)

    def measure(self) -> EngineStats:
        """The statistics so far, with what the pool holds now."""
        manager = self.block_manager
        tokens_in_block: dict[int, int] = {}  # whoever shares one has the same number
        for group in self.running:
            for seq in group.live:
                for index, block_id in enumerate(seq.block_table):
                    num_tokens = seq.num_computed_tokens - index * manager.block_size
                    num_tokens = min(manager.block_size, max(0, num_tokens))
                    tokens_in_block[block_id] = num_tokens

        tokens_held = sum(tokens_in_block.values())
        num_slots = len(tokens_in_block) * manager.block_size
        return replace(
            self.stats,
            blocks_used=manager.num_blocks - len(manager.free_blocks),
            blocks_cached=len(manager.published),
            tokens_held=tokens_held,
            kv_utilisation=tokens_held / max(1, num_slots),
        )
