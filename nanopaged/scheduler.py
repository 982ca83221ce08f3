"""Who runs this step, and with how many tokens.

First come, first served, under one budget of tokens a step: running sequences first (one token
each where they decode, a chunk where their prompt is not computed yet), then whoever waits. When
the pool is full the youngest group goes back to the head of the queue and is computed again later:
that is no more than `num_computed_tokens = 0`. The scheduler knows no tensors and no text.

Admission is now, later or never. Never was told when the request was made; later ends, because the
oldest group always fits into the pool and is the last to be preempted.
"""

import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import compress

from nanopaged.block_manager import BlockManager
from nanopaged.config import EngineConfig
from nanopaged.outputs import EngineStats
from nanopaged.sampler import SamplerOutput
from nanopaged.sequence import Sequence, SequenceGroup


@dataclass
class Batch:
    """One step's work: sequence i computes `counts[i]` tokens, up to its `num_computed_tokens`."""

    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)  # whether that reaches its last token
    admitted: list[Sequence] = field(default_factory=list)  # those that have just got their row
    table_updates: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(row, first logical block, physical blocks): what changed in the block tables"""


class Scheduler:
    def __init__(self, config: EngineConfig, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.waiting: deque[SequenceGroup] = deque()
        self.running: list[SequenceGroup] = []  # oldest first, all older than those who wait
        self.free_rows = list(range(config.max_num_seqs))[::-1]
        # Blocks that admission leaves free while others run: else the next block they need would
        # preempt the newcomer at once.
        self.watermark = len(blocks.blocks) // 100
        self.stats = EngineStats(len(blocks.blocks))

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting) or any(group.live for group in self.running)

    def schedule(self) -> Batch:
        """Decide the next step. What it will have computed counts as computed from here on."""
        batch = Batch()
        budget = self.max_num_batched_tokens
        running = self.running = [group for group in self.running if group.live]
        served, preempted = 0, False
        while served < len(running):
            group = running[served]
            if self._make_room(group, batch):
                for seq in group.live:
                    budget -= self._schedule_tokens(seq, batch, budget)
                served += 1
            else:
                self._preempt(running.pop())  # the youngest, which may be this very group
                preempted = True
        while self.waiting and budget and not preempted and self._admit(self.waiting[0], batch):
            running.append(self.waiting.popleft())
            budget -= self._schedule_tokens(running[-1].live[0], batch, budget)
        self.stats.steps += 1
        return batch

    def update(self, batch: Batch, sampled: SamplerOutput) -> list[SequenceGroup]:
        """Append what was sampled, finish what is complete; returns the groups that got a token."""
        tokens = sampled.token_ids.tolist()  # the one place that waits for the device
        seqs = list(compress(batch.sequences, batch.samples))
        for seq, token in zip(seqs, tokens, strict=True):
            group, length = seq.group, len(seq.token_ids) + 1
            seq.token_ids.append(token)
            if length == group.num_prompt_tokens + 1:
                group.metrics.first_token_time = time.perf_counter()
            if token in group.stop_token_ids:
                self.finish(seq, "stop")
            elif length >= group.max_len:
                self.finish(seq, "length")
        for i, logprobs in sampled.logprobs.items():
            seqs[i].logprobs.append(logprobs)
            seqs[i].cumulative_logprob += logprobs[tokens[i]]
        self.stats.output_tokens += len(seqs)
        return [seq.group for seq in seqs]

    def finish(self, seq: Sequence, reason: str) -> None:
        """Take a sequence out, wherever it is, and give back its blocks and its row."""
        group, seq.finish_reason = seq.group, reason
        if seq in group.live:
            group.live.remove(seq)
            self._release(seq)
            group.metrics.finished_time = time.perf_counter()

    def abort(self, group: SequenceGroup) -> None:
        if group in self.waiting:
            self.waiting.remove(group)
        for seq in list(group.live):
            self.finish(seq, "abort")

    def rollback(self) -> None:
        """A step failed half-way: compute again whatever was running, and trust no cached block."""
        while self.running:
            self._preempt(self.running.pop())
        self.blocks.forget()

    def measure(self) -> EngineStats:
        size = self.blocks.block_size
        filled: dict[int, int] = {}  # physical block -> tokens whose K and V are in it
        for seq in (seq for group in self.running for seq in group.live):
            for index, block_id in enumerate(seq.block_table):
                tokens = max(0, min(size, seq.num_computed_tokens - index * size))
                filled[block_id] = max(tokens, filled.get(block_id, 0))
        held = sum(filled.values())
        return replace(
            self.stats, tokens_held=held, kv_utilisation=held / max(1, len(filled) * size),
            blocks_used=len(self.blocks.blocks) - len(self.blocks.free_blocks),
            blocks_cached=len(self.blocks.published), requests_waiting=len(self.waiting),
            requests_running=sum(bool(group.live) for group in self.running))

    def _make_room(self, group: SequenceGroup, batch: Batch) -> bool:
        """Give a running group the blocks for its newest tokens."""
        for seq in group.live:
            held = len(seq.block_table)
            if len(seq.token_ids) > held * self.blocks.block_size:
                if not self.blocks.grow(seq):
                    return False
                batch.table_updates.append((seq.row, held, seq.block_table[held:]))
        return True

    def _schedule_tokens(self, seq: Sequence, batch: Batch, budget: int) -> int:
        count = min(len(seq.token_ids) - seq.num_computed_tokens, budget)
        if count:
            seq.num_computed_tokens += count
            batch.sequences.append(seq)
            batch.counts.append(count)
            batch.samples.append(seq.num_computed_tokens == len(seq.token_ids))
            if seq.num_computed_tokens // self.blocks.block_size > seq.num_published:
                self.blocks.publish(seq)
        return count

    def _admit(self, group: SequenceGroup, batch: Batch) -> bool:
        """Give a waiting group its row, and blocks for all its tokens: cached ones where found."""
        (seq,) = group.live
        prefix = self.blocks.match_prefix(seq)
        spare = self.watermark if self.running else 0
        if not self.free_rows or not self.blocks.allocate(seq, prefix, spare):
            return False
        seq.row = self.free_rows.pop()
        seq.num_computed_tokens = len(prefix) * self.blocks.block_size
        batch.admitted.append(seq)
        batch.table_updates.append((seq.row, 0, seq.block_table))
        self.stats.prefix_query_tokens += len(seq.token_ids)
        self.stats.prefix_hit_tokens += seq.num_computed_tokens
        if not group.metrics.first_scheduled_time:
            group.metrics.first_scheduled_time = time.perf_counter()
            group.num_cached_tokens = seq.num_computed_tokens
            self.stats.prompt_tokens += group.num_prompt_tokens
        return True

    def _preempt(self, group: SequenceGroup) -> None:
        """Back to the head of the queue. The tokens stay, so what was sampled is not lost."""
        if group.live:
            for seq in group.live:
                self._release(seq)
            self.waiting.appendleft(group)
            self.stats.preemptions_recompute += 1

    def _release(self, seq: Sequence) -> None:
        self.blocks.free(seq)
        seq.num_computed_tokens = 0
        if seq.row >= 0:
            self.free_rows.append(seq.row)
            seq.row = -1
