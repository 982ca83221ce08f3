"""Who runs this step, and with how many tokens.

First come, first served, under one budget of tokens a step: running sequences first (one token
each where they decode, a chunk where their prompt is not computed yet), then whoever waits. The
scheduler knows no tensors, and of the text only whether a stop string has come.

A group is admitted, preempted and resumed as a whole (gang scheduling). When the pool is full the
youngest goes back to the head of the queue. Its blocks move to CPU memory (swap), or its tokens are
computed again (recompute), which is no more than `num_computed_tokens = 0`.

Admission is now, later or never. Never is told when the request is made; later ends, because the
oldest group always fits into the pool and is the last to be preempted.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from nanopaged.beam_search import advance
from nanopaged.block_manager import BlockManager, Moves
from nanopaged.config import EngineConfig
from nanopaged.outputs import EngineStats
from nanopaged.sampler import SamplerOutput
from nanopaged.sequence import Sequence, SequenceGroup

UNREAD = -1  # a token that was sampled in the step before and that only the device knows yet


@dataclass
class Batch:
    """One step's work: sequence i computes `counts[i]` tokens, up to `ends[i]`.

    The model's part is plain numbers; who they belong to comes last.
    """

    token_ids: list[int] = field(default_factory=list)  # of all, one sequence behind the other
    counts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # in the runner's table of block tables
    samples: list[int] = field(default_factory=list)  # of every token that is drawn: behind whom
    swaps_out: Moves = field(default_factory=list)  # first these blocks move,
    swaps_in: Moves = field(default_factory=list)  # then these,
    copies: Moves = field(default_factory=list)  # then these are copied, and then the model runs
    table_updates: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(row, first logical block, physical blocks): what changed in the block tables"""
    drawn_rows: list[int] = field(default_factory=list)  # of those who get the tokens of `samples`
    drawn: list[Sequence] = field(default_factory=list)  # them
    admitted: list[Sequence] = field(default_factory=list)  # those that have just got their row


class Scheduler:
    def __init__(self, config: EngineConfig, blocks: BlockManager) -> None:
        self.config, self.blocks = config, blocks
        self.waiting: deque[SequenceGroup] = deque()
        self.running: list[SequenceGroup] = []  # oldest first, all older than those who wait
        self.free_rows = list(range(config.max_num_seqs))[::-1]
        self.stats = EngineStats(blocks.num_blocks)
        # By owner: the groups that got a token or have ended, until the owner takes them out.
        self.news: dict[object, dict[str, SequenceGroup]] = defaultdict(dict)

    def schedule(self) -> Batch:
        """Decide the next step. What it will have computed counts as computed from here on."""
        batch, budget = Batch(), self.config.max_num_batched_tokens
        served, preempted = 0, False
        while served < len(self.running):
            group = self.running[served]
            if group.beams and group.live[0].num_unread_tokens:
                served += 1  # what its beams will be is not known yet
            elif self._make_room(seqs := group.scheduled, batch):
                budget -= self._schedule_tokens(seqs, batch, budget)
                served += 1
            else:
                self._preempt(self.running.pop(), batch)  # the youngest: maybe this very group
                preempted = True
        while self.waiting and budget and not preempted and self._admit(self.waiting[0], batch):
            self.running.append(self.waiting.popleft())
            budget -= self._schedule_tokens(self.running[-1].scheduled, batch, budget)
        for seq in batch.drawn:
            seq.num_unread_tokens += 1
            batch.drawn_rows.append(seq.row)
        self.stats.steps += 1
        self.stats.blocks_copied += len(batch.copies)
        self.stats.blocks_swapped += len(batch.swaps_out) + len(batch.swaps_in)
        return batch

    def update(self, batch: Batch, sampled: SamplerOutput) -> None:
        """Append what was sampled, and finish what is complete."""
        tokens = sampled.read()  # the one place that waits for the device
        for i, (seq, token) in enumerate(zip(batch.drawn, tokens, strict=True)):
            group, length = seq.group, len(seq.token_ids) + 1
            seq.num_unread_tokens -= 1
            if seq.finish_reason:  # found out only now that this step was one too many for it
                continue
            self.news[group.owner][group.request_id] = group
            self.stats.output_tokens += 1
            if not group.metrics.first_token_time:
                group.metrics.first_token_time = time.perf_counter()
            if group.beams:
                seq.candidates = sampled.logprobs[i]
                continue
            seq.token_ids.append(token)
            if i in sampled.logprobs:
                seq.logprobs.append(sampled.logprobs[i])
                seq.cumulative_logprob += sampled.logprobs[i][token]
            if token in group.stop_token_ids:
                self.finish(seq, "stop")
            elif length >= group.max_len:
                self.finish(seq, "length")
            if group.params.stop and seq.detokenize().stopped:
                self.finish(seq, "stop")
        for group in dict.fromkeys(seq.group for seq in batch.drawn if seq.group.beams):
            if group.live and advance(group, self.blocks.fork):  # the search is over
                self.abort([group], "length")
                group.sequences = group.finished

    def finish(self, seq: Sequence, reason: str) -> None:
        """Take a sequence out, wherever it is, and give back its blocks and its row."""
        group, seq.finish_reason = seq.group, reason
        if seq in group.live:
            group.live.remove(seq)
            queue = self.running if group in self.running else self.waiting
            if not group.live and group in queue:  # in none, if a step was interrupted half-way
                queue.remove(group)
            self._release(seq)
            self.news[group.owner][group.request_id] = group
            group.metrics.finished_time = time.perf_counter()

    def abort(self, groups: Iterable[SequenceGroup], reason: str = "abort") -> None:
        for seq in [seq for group in groups for seq in group.live]:
            self.finish(seq, reason)

    def measure(self) -> EngineStats:
        size = self.blocks.block_size
        # Physical block -> tokens whose K and V are in it: as many for all who share it.
        filled = {block_id: min(size, max(0, seq.num_computed_tokens - index * size))
                  for group in self.running for seq in group.live
                  for index, block_id in enumerate(seq.block_table)}
        held = sum(filled.values())
        return replace(
            self.stats, tokens_held=held, kv_utilisation=held / max(1, len(filled) * size),
            blocks_used=self.blocks.num_blocks - len(self.blocks.free_blocks),
            blocks_cached=len(self.blocks.published))

    def _make_room(self, seqs: list[Sequence], batch: Batch) -> bool:
        """Give a group's sequences the blocks for what they compute next, if there are enough."""
        # A sequence alone shares full blocks only, and writes to none of them.
        if len(seqs) > 1 or seqs[0].num_tokens > len(seqs[0].block_table) * self.blocks.block_size:
            if self.blocks.missing(seqs) > len(self.blocks.free_blocks):
                return False
            for seq in seqs:
                batch.copies += self.blocks.grow(seq)
        return True

    def _schedule_tokens(self, seqs: list[Sequence], batch: Batch, budget: int) -> int:
        """Returns how many tokens a group computes. All its sequences sample, or none.

        If not all can, each leaves its last token for later: it `waits`.
        """
        group, left = seqs[0].group, budget
        waits = len(seqs) > 1 and budget < sum(s.num_tokens - s.num_computed_tokens for s in seqs)
        for seq in seqs:
            count = min(seq.num_tokens - seq.num_computed_tokens - waits, left)
            if count <= 0:
                continue
            left -= count
            seq.num_computed_tokens += count
            end = seq.num_computed_tokens
            batch.token_ids += seq.token_ids[end - count : end] or [UNREAD]
            batch.counts.append(count)
            batch.ends.append(end)
            batch.rows.append(seq.row)
            if seq.num_sent_blocks < len(seq.block_table):
                first, seq.num_sent_blocks = seq.num_sent_blocks, len(seq.block_table)
                batch.table_updates.append((seq.row, first, seq.block_table[first:]))
            if end // self.blocks.block_size > seq.num_published:
                self.blocks.publish(seq)
            if end == len(seq.token_ids) + seq.num_unread_tokens:
                batch.drawn.append(seq)
            if end == group.num_prompt_tokens and not group.forked:
                for other in group.live[1:]:
                    self.blocks.fork(seq, other)
                    if len(other.token_ids) == end:  # else it was preempted
                        batch.drawn.append(other)
            batch.samples += [len(batch.rows) - 1] * (len(batch.drawn) - len(batch.samples))
        return budget - left

    def _admit(self, group: SequenceGroup, batch: Batch) -> bool:
        """Give a waiting group rows and blocks: its own from the CPU, or cached and new ones."""
        leader, blocks = group.live[0], self.blocks
        # While others run a hundredth stays free (the watermark): else the next block that they
        # need would preempt the newcomer at once.
        spare = blocks.num_blocks // 100 if self.running else 0
        if len(self.free_rows) < len(group.live):
            return False
        if leader.block_table:  # it was swapped
            spare += blocks.missing(group.scheduled)
            moves = blocks.swap(group.live, blocks.free_blocks, spare)
            if not moves:
                return False
            batch.swaps_in += moves
        else:
            room = blocks.room(group.num_prompt_tokens, [len(seq.token_ids) for seq in group.live])
            if not blocks.allocate(leader, blocks.match_prefix(leader), room, spare):
                return False
            self.stats.prefix_query_tokens += leader.num_tokens
            self.stats.prefix_hit_tokens += leader.num_computed_tokens
        for seq in group.live:
            seq.row = self.free_rows.pop()
            batch.admitted.append(seq)
        if not group.metrics.first_scheduled_time:
            group.metrics.first_scheduled_time = time.perf_counter()
            group.num_cached_tokens = leader.num_computed_tokens
            self.stats.prompt_tokens += group.num_prompt_tokens
        return self._make_room(group.scheduled, batch)  # there is room: it has been counted

    def _preempt(self, group: SequenceGroup, batch: Batch) -> None:
        """Back to the head of the queue. The tokens stay, so what was sampled is not lost."""
        self.waiting.appendleft(group)
        mode, several = self.config.preemption_mode, len(group.live) > 1
        swap = mode == "swap" or (mode == "auto" and several)
        moves = self.blocks.swap(group.live, self.blocks.free_swap_blocks) if swap else []
        batch.swaps_out += moves  # none, if the CPU's pool is full as well: then recompute
        self.stats.preemptions_swap += bool(moves)
        self.stats.preemptions_recompute += not moves
        for seq in group.live:
            self._release(seq, keep_blocks=bool(moves))

    def _release(self, seq: Sequence, keep_blocks: bool = False) -> None:
        if seq.row >= 0:
            self.free_rows.append(seq.row)
            seq.row = -1
        if not keep_blocks:
            self.blocks.free(seq)
            seq.num_computed_tokens = 0
