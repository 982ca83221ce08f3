"""Who runs in the next step, and with how many tokens.

First come, first served, with a budget of tokens for each step. The scheduler goes
through the requests from the oldest to the youngest. The oldest ones run: each of their
sequences computes one token if it decodes, or a chunk of its prompt if that has not
been computed yet. The rest of the budget admits waiting requests.

A group is admitted, preempted and resumed as a whole (gang scheduling). When the pool
is full, the youngest running group has to wait again. Either its blocks move to CPU
memory (swap), or its K and V are given up and computed again later (recompute).

A request that can never fit is refused when it is made. All others finish eventually:
the oldest group is the last to be preempted, and it fits into the pool on its own.
"""

from itertools import islice
from typing import Any

from nanopaged.batch import Batch
from nanopaged.beam_search import advance_beams
from nanopaged.block_manager import BlockManager
from nanopaged.config import EngineConfig
from nanopaged.outputs import EngineStats
from nanopaged.sequence import Sequence, SequenceGroup


class Scheduler:
    def __init__(self, config: EngineConfig, block_manager: BlockManager,
                 unfinished: dict[str, SequenceGroup], aborted: Any = ()) -> None:
        self.config = config
        self.block_manager = block_manager
        # Groups by request id, oldest first. The oldest ones run, and the others wait.
        # Other threads may add to them, and to `aborted`: groups that are to end.
        self.unfinished, self.aborted = unfinished, aborted
        self.running: dict[str, SequenceGroup] = {}
        self.stats = EngineStats(block_manager.num_blocks)

    # -- Before the forward pass -------------------------------------------------------

    def schedule(self) -> Batch:
        """Plan the next step. From here on, what it computes counts as computed."""
        self.end_aborted()
        batch = Batch()
        has_preempted = False
        # At most max_num_seqs groups can run, and the next one ends the loop.
        for request_id in list(islice(self.unfinished, self.config.max_num_seqs + 1)):
            group = self.unfinished[request_id]
            if len(batch.token_ids) == self.config.max_num_batched_tokens:
                break  # the budget is used up
            # After a preemption nobody is admitted: the pool was just full, and a group
            # just preempted may have a token that is pending until the next step.
            if request_id not in self.running and not has_preempted:
                self._admit(group, batch)
            # If the pool is full the youngest gives way: this group, or a later one. It
            # has no entry in the batch yet.
            while request_id in self.running and not self.block_manager.grow(
                    group.next_sequences, batch.moves):
                self._preempt(batch)
                has_preempted = True
            if request_id not in self.running:
                break  # all groups after it are younger, so they wait, too
            for seq in group.next_sequences:
                self._schedule_sequence(seq, batch)
        self.stats.steps += 1
        return batch

    def _schedule_sequence(self, seq: Sequence, batch: Batch) -> None:
        """Let `seq` compute its next tokens, and sample if that computes all of them.

        If the budget is too small for all sequences of a group, the last ones wait for
        the next step. When the leader has computed the prompt, the others share its
        blocks, full or not, and each samples from the same logits.
        """
        group, manager = seq.group, self.block_manager
        budget = self.config.max_num_batched_tokens - len(batch.token_ids)
        first = seq.num_computed_tokens
        end = min(seq.compute_end, first + budget)
        if end == first:  # no budget is left, or (on a GPU) the last token is pending
            return
        manager.mark_computed(seq, end - first)
        if first < len(seq.token_ids):
            batch.token_ids += seq.token_ids[first:end]
        else:  # on a GPU: it computes one token, the previous step's, which is pending
            batch.token_ids.append(seq.pending[-1])
        batch.counts.append(end - first)
        batch.ends.append(end)
        batch.groups.append(group)
        batch.block_ids += seq.block_table[: manager.num_blocks_for(end)]

        receivers = [seq]
        if end == group.num_prompt_tokens and not group.forked:
            group.forked = True  # so from here on `compute_end` counts all tokens
            receivers = group.live
            for child in group.live[1:]:
                manager.fork(seq, child)
        for receiver in receivers:
            # (A recomputed one has tokens after the prompt, and computes them first.)
            if end == receiver.compute_end:
                receiver.pending.append(-1 - len(batch.receivers))
                batch.samples.append(len(batch.counts) - 1)
                batch.receivers.append(receiver)

    # -- In and out of the device's pool -----------------------------------------------

    def _admit(self, group: SequenceGroup, batch: Batch) -> None:
        """Let a waiting group run, if there is room for all its sequences.

        The rule is the same for groups that are new, swapped out or to be recomputed.
        Enough blocks must be free for all its sequences at their present lengths, not
        counting blocks of a cached prefix that others hold. While others run, 1% of the
        pool must stay free, too (the watermark), because they may soon need a block.
        """
        num_seqs = sum(len(each.live) for each in [group, *self.running.values()])
        if num_seqs > self.config.max_num_seqs:
            return
        manager, leader = self.block_manager, group.live[0]
        is_swapped = bool(leader.block_table)  # no other waiting group has blocks
        prefix = [] if is_swapped else manager.prefix_cache.match(leader)
        num_needed = manager.max_blocks(
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
            batch.moves += manager.swap_in(group.live)
            return
        manager.replace_blocks(leader, prefix, num_cached)
        self.stats.prefix_hit_tokens += num_cached

    def _preempt(self, batch: Batch) -> None:
        """Make the youngest running group wait again. It keeps its tokens. If the CPU's
        pool has no room for its blocks, they are freed, and the group starts over.
        (That pool is empty if preemption_mode is "recompute".)
        """
        _, group = self.running.popitem()
        if moves := self.block_manager.swap_out(group.live):
            batch.moves += moves
            self.stats.preemptions_swap += 1
        else:
            for seq in group.live:
                self.block_manager.free(seq)
            group.forked = len(group.live) == 1
            self.stats.preemptions_recompute += 1

    # -- After the forward pass --------------------------------------------------------

    def update(self, batch: Batch, output: Any) -> None:
        """Append the sampled tokens, and finish the sequences that are complete."""
        tokens = output.read()  # of a `SamplerOutput`; this waits for the device
        for i, (seq, token) in enumerate(zip(batch.receivers, tokens, strict=True)):
            group = seq.group
            seq.pending.pop(0)
            if seq.finish_reason is not None:
                continue  # it ended a step earlier; see `ModelRunner.execute`
            group.report()
            self.stats.output_tokens += 1
            if group.error:  # of a logits processor
                self.abort(group)
            elif group.beam_params:
                seq.candidates = output.logprobs[i]
                # Once the last beam has its candidates, too, the search goes on.
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
        """End a sequence, whether it runs or waits, and free its blocks."""
        group = seq.group
        group.report()
        seq.finish_reason = reason
        group.live.remove(seq)
        self.block_manager.free(seq)
        if not group.live:
            self.unfinished.pop(group.request_id, None)
            self.running.pop(group.request_id, None)

    def end_aborted(self) -> None:
        while self.aborted:
            self.abort(self.aborted[0])
            self.aborted.popleft()

    def abort(self, group: SequenceGroup) -> None:
        """End all sequences of a group that have not finished."""
        for seq in list(group.live):
            self.finish(seq, "abort")
