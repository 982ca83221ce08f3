"""Who runs in the next step, and with how many tokens.

First come, first served, with a budget of tokens for each step. The oldest requests
run: each of their sequences computes one token if it decodes, or a chunk of its prompt.
The rest of the budget admits waiting requests.

A group is admitted, preempted and resumed as a whole (gang scheduling). When the pool
is full, the youngest running group waits again. All groups finish, because the oldest
is preempted last, and alone it always fits (`Engine.check_fits`).

Another policy reorders `unfinished`, and must keep `running` in the same order, because
`_preempt` takes its last group. A limit on who runs belongs in `_admit`. One thing must
stay true: a preempted group has no entry in this step's batch, because others own its
blocks now. It is the last group, so it has none yet. It is not admitted again in the
same step either: a token that it would compute again may still be pending.
"""

from collections import deque
from itertools import islice

from nanopaged.batch import Batch, failure
from nanopaged.beam_search import advance_beams
from nanopaged.block_manager import BlockManager
from nanopaged.config import EngineConfig
from nanopaged.sampler import SamplerOutput
from nanopaged.sequence import Sequence, SequenceGroup
from nanopaged.stats import EngineStats


class Scheduler:
    """Plans the steps of the requests that have not finished."""

    def __init__(self, config: EngineConfig, block_manager: BlockManager,
                 most_tokens: int = 0) -> None:
        self.config, self.block_manager = config, block_manager
        # The budget of a step with prompts only, whose first tokens nobody awaits.
        self.most_tokens = most_tokens or config.budget
        # By request id, oldest first. Threads may add to `unfinished` and `aborted`.
        self.unfinished: dict[str, SequenceGroup] = {}
        self.running: dict[str, SequenceGroup] = {}
        self.aborted: deque[str] = deque()  # ids of requests that the next step ends
        # To be reported. A group enters before it changes, so no interrupt loses it.
        self.changed: dict[str, SequenceGroup] = {}
        self.stats = EngineStats(block_manager.num_blocks)

    # -- Before the forward pass -------------------------------------------------------

    def schedule(self) -> Batch:
        """Plan the next step. From now on its tokens count as computed."""
        self.end_aborted()
        batch, has_preempted = Batch(), False
        manager, budget = self.block_manager, self.most_tokens
        for request_id in list(islice(self.unfinished, self.config.max_num_seqs)):
            group = self.unfinished[request_id]
            if group.is_awaited or not group.live[0].is_prompt:
                budget = self.config.budget  # from here on
            if len(batch.token_ids) >= budget:
                break  # it is used up
            # After a preemption no group is admitted in this step: the pool was full.
            if request_id not in self.running and not has_preempted:
                self._admit(group, batch)
            # Preempt the youngest groups until this one fits, or is itself preempted.
            seqs = group.next_sequences
            while request_id in self.running and not manager.grow(seqs, batch.moves):
                self._preempt(batch)
                has_preempted = True
            if request_id not in self.running:
                break  # it was not admitted, or has left: so all younger ones wait, too
            for seq in seqs:
                self._schedule_sequence(seq, batch, budget - len(batch.token_ids))
        self.stats.steps += 1
        return batch

    def _schedule_sequence(self, seq: Sequence, batch: Batch, budget: int) -> None:
        """Let `seq` compute its next tokens, as many as the budget allows. If these are
        all that can be computed now, it also samples. It already has the blocks.
        """
        computable_end = seq.computable_end
        end = min(computable_end, seq.num_computed_tokens + budget)
        if end == seq.num_computed_tokens:
            return  # no budget is left, or this sequence waits for its last token
        num_blocks = self.block_manager.num_blocks_for(end)
        batch.add_entry(seq, end, seq.block_table[:num_blocks])
        self.block_manager.mark_computed(seq, end)
        if end == computable_end:
            receivers = [seq] if seq.group.forked else self._fork(seq.group, end)
            for receiver in receivers:
                batch.add_sample(receiver)

    def _fork(self, group: SequenceGroup, end: int) -> list[Sequence]:
        """Give all siblings the blocks of the leader, which has computed the prompt.
        Returns who samples now: all, except those that compute an answer again first.
        """
        leader, *siblings = group.live
        for sibling in siblings:
            self.block_manager.fork(leader, sibling)
        return [seq for seq in group.live if seq.computable_end == end]

    # -- In and out of the device's pool -----------------------------------------------

    def _admit(self, group: SequenceGroup, batch: Batch) -> None:
        """Put a group into `running`, if `max_num_seqs` allows it, and if enough blocks
        are free: for its tokens so far and, while others run, 1% of the pool besides,
        the watermark. This takes cached or swapped blocks, and `grow` takes the rest.
        """
        num_seqs = sum(len(each.live) for each in [group, *self.running.values()])
        if num_seqs > self.config.max_num_seqs:
            return
        manager, leader = self.block_manager, group.live[0]
        is_swapped = bool(leader.block_table)  # other waiting groups have no blocks
        may_match = group.uses_prefix_cache and not is_swapped
        prefix = manager.prefix_cache.match(leader) if may_match else []
        num_needed = manager.max_blocks(
            group.num_prompt_tokens, [len(seq.token_ids) for seq in group.live])
        # A cached block that others hold costs no free one.
        num_needed -= sum(manager.ref_counts[block_id] > 0 for block_id in prefix)
        watermark = manager.num_blocks // 100 if self.running else 0
        if num_needed + watermark > len(manager.free_blocks):
            return
        self.running[group.request_id] = group
        num_cached = len(prefix) * manager.block_size
        if not group.has_started:
            group.has_started, group.num_cached_tokens = True, num_cached
        if is_swapped:
            batch.moves += manager.swap(group.live, manager.free_blocks)
            return
        manager.hold(leader, prefix, num_cached)
        self.stats.prefix_hit_tokens += num_cached

    def _preempt(self, batch: Batch) -> None:
        """Make the youngest group wait again. Swap its blocks out, or give them up."""
        _, group = self.running.popitem()
        manager = self.block_manager
        if moves := manager.swap(group.live, manager.free_swap_blocks):
            batch.moves += moves
            self.stats.preemptions_swap += 1
        else:
            for seq in group.live:
                manager.free(seq)
            self.stats.preemptions_recompute += 1

    # -- After the forward pass --------------------------------------------------------

    def update(self, batch: Batch, output: SamplerOutput) -> None:
        """Append the sampled tokens, and finish the sequences that are complete."""
        tokens = output.read()  # this waits for the device
        for i, (seq, token) in enumerate(zip(batch.receivers, tokens, strict=True)):
            group = seq.group
            seq.pending.pop(0)
            if seq.finish_reason is not None:
                continue  # it has ended meanwhile
            self.changed[group.request_id] = group
            self.stats.output_tokens += 1
            if token < 0 and not group.errors:
                group.errors = [failure(token)]
            if group.errors:
                self.end_live(group)
            elif group.beam_params:
                seq.candidates = output.logprobs[i]  # the last beam gets them last
                if seq is group.live[-1] and advance_beams(group, self.block_manager):
                    group.sequences = group.complete_beams
                    self.end_live(group)  # the beams that are not complete
            else:
                seq.append(token, output.logprobs.get(i))
                if reason := seq.end_reason():
                    self.finish(seq, reason)

    # -- The end of sequences and requests ---------------------------------------------

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence, whether it runs or waits, and free its blocks."""
        group = seq.group
        self.changed[group.request_id] = group
        seq.finish_reason = reason
        group.live.remove(seq)
        self.block_manager.free(seq)
        if not group.live:
            self.unfinished.pop(group.request_id, None)
            self.running.pop(group.request_id, None)

    def end_live(self, group: SequenceGroup) -> None:
        for seq in list(group.live):
            self.finish(seq, "abort")

    def end_aborted(self) -> None:
        while self.aborted:
            if group := self.unfinished.get(self.aborted[0]):
                self.end_live(group)
            self.aborted.popleft()  # only now, so that an interrupt loses nothing

    def reset(self) -> None:
        """Abort groups that a failed step or an interrupt may have half-changed."""
        for group in list(self.unfinished.values()):
            if group.has_started or not group.live:
                self.end_live(group)
                self.unfinished.pop(group.request_id, None)
        self.running = {}
        self.block_manager.reset()
        self.end_aborted()
        self.stats = EngineStats(self.block_manager.num_blocks)
