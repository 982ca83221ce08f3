"""What happened, in sentences, told by the calls that did it.

While a run is recorded, the engine has a scheduler and a block manager of the classes
below. Their methods do what the engine's own do, and then say what has changed. In a
sentence, "#5" is block 5 and "@0.1" is sequence 1 of request 0. The page turns these
into marks that light up.
"""

from collections.abc import Iterable

from nanopaged.batch import Batch
from nanopaged.block_manager import BlockManager, FreeList, Moves
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Sequence, SequenceGroup
from nanopaged.tour.kinds import KINDS
from nanopaged.tour.observers import Observer, WatchedScheduler

Event = tuple[str, str]  # its kind, and a sentence

MOST_LISTED = 6  # blocks or sequences in one sentence
REASONS = {"length": "reached its maximum length", "abort": "was aborted",
           "stop": "reached a stop token or a stop string"}


def key(seq: Sequence) -> str:
    return f"@{seq.group.request_id}.{seq.group.sequences.index(seq)}"


def join(parts: list[str]) -> str:
    """a; a and b; a, b and c; a, b, c and 4 more."""
    if len(parts) > MOST_LISTED:
        parts = [*parts[: MOST_LISTED - 1], f"{len(parts) - MOST_LISTED + 1} more"]
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def listed(block_ids: Iterable[int]) -> str:
    return join([f"#{block_id}" for block_id in block_ids])


def listed_moves(moves: Moves) -> str:
    return join([f"#{source} to #{target}" for source, target in moves])


class Events:
    """Collects the sentences of a phase."""

    def __init__(self) -> None:
        self.now: dict[Sequence, int] = {}  # the tokens that a step computes
        self._said: dict[Event, list[str]] = {}

    def say(self, kind: str, sentence: str, item: str = "") -> None:
        """Say a sentence. One with "{}" is said once in a phase, and lists all items
        there.
        """
        self._said.setdefault((kind, sentence), []).append(item)

    def count(self, kind: str, sentence: str) -> int:
        """How many items a sentence of this phase has so far."""
        return len(self._said.get((kind, sentence), ()))

    def collect(self) -> list[Event]:
        """The events since the last call of this, in the order of `KINDS`."""
        events = [(kind, sentence.format(join(items)))
                  for (kind, sentence), items in self._said.items()]
        self._said = {}
        order = list(KINDS)
        return sorted(events, key=lambda event: order.index(event[0]))


class TracedScheduler(WatchedScheduler):
    """Goes on where a watched scheduler is, and says what it does."""

    def __init__(self, scheduler: Scheduler, observers: list[Observer],
                 events: Events) -> None:
        super().__init__(scheduler, observers)
        self.events = events
        self.block_manager = TracedManager(scheduler.block_manager, events)

    def reset(self) -> None:
        if self.running:
            self.events.say("abort", "A step has failed. All requests that have "
                            "started are aborted, and the engine starts anew.")
        super().reset()

    def _admit(self, group: SequenceGroup, batch: Batch) -> None:
        num_moves, manager = len(batch.moves), self.block_manager
        name = f"request {group.request_id}"
        super()._admit(group, batch)
        moves = batch.moves[num_moves:]
        if group.request_id not in self.running:
            needed = manager.max_blocks(
                group.num_prompt_tokens, [len(seq.token_ids) for seq in group.live])
            free = len(manager.free_blocks)
            self.events.say("wait", f"There is no room yet for {name}: it needs up to "
                            f"{needed} blocks, and {free} are free.")
        elif moves:
            self.events.say("swap_in", f"There is room for {name} again. Its blocks "
                            f"come back from CPU memory: {listed_moves(moves)}.")
        else:
            self.events.say("admit", f"There is room for {name}, so it is admitted.")
            self.tell_prefix(group.live[0])

    def tell_prefix(self, leader: Sequence) -> None:
        """Which blocks a group that was just admitted has found in the cache."""
        found = list(leader.block_table)
        if not found:
            return
        revived = [id for id in found if self.block_manager.ref_counts[id] == 1]
        where = "which others hold"
        if revived == found:
            where = "which nobody held any more, but whose K and V were still there"
        elif revived:
            where = ("of which others hold some, and nobody held "
                     f"{listed(revived)} any more")
        self.events.say(
            "prefix", f"The first {leader.num_computed_tokens} tokens of {key(leader)} "
            f"need not be computed: they are in {listed(found)}, {where}.")

    def _preempt(self, batch: Batch) -> None:
        request_id = next(reversed(self.running))
        num_moves = len(batch.moves)
        super()._preempt(batch)
        full = ("Too few blocks are free for the next tokens. The youngest running "
                f"request is {request_id}, so it gives way.")
        moves = batch.moves[num_moves:]
        if moves:
            self.events.say(
                "swap_out", f"{full} Its blocks are copied to CPU memory (from "
                f"#{self.block_manager.num_blocks} on): {listed_moves(moves)}.")
        else:
            self.events.say("recompute", f"{full} It gives up its K and V and keeps "
                            "its tokens.")

    def _schedule_sequence(self, seq: Sequence, batch: Batch, budget: int) -> None:
        first, name = seq.num_computed_tokens, key(seq)
        super()._schedule_sequence(seq, batch, budget)
        end, num_prompt_tokens = seq.num_computed_tokens, seq.group.num_prompt_tokens
        number = end - first
        if number == 0:
            if seq.computable_end > first:
                self.events.say(
                    "budget", "The budget is used up, so {} must wait for the next "
                    "step.", name)
            return
        self.events.now[seq] = number
        if end < num_prompt_tokens:
            self.events.say(
                "chunk", f"The budget is used up, so {name} computes {number} of its "
                f"{num_prompt_tokens} prompt tokens now. That makes {end} so far.")
        self.events.say("compute", "The step will compute {}.", f"{number} of {name}")

    def finish(self, seq: Sequence, reason: str) -> None:
        held, group = list(seq.block_table), seq.group
        super().finish(seq, reason)
        if seq not in group.sequences:  # a beam that is none of the best answers
            if not group.live:
                self.events.say("finish", "The beam search of request "
                                f"{group.request_id} has ended.")
            return
        counts = self.block_manager.ref_counts
        freed = [id for id in held if counts[id] == 0]
        kept = [id for id in held if counts[id] > 0]
        sentence = f"{key(seq)} has ended: it {REASONS[reason]}."
        if freed:
            sentence += f" That frees {listed(freed)}."
        if kept:
            sentence += f" Others still hold {listed(kept)}."
        self.events.say("abort" if reason == "abort" else "finish", sentence)


class TracedManager(BlockManager):
    def __init__(self, manager: BlockManager, events: Events) -> None:
        vars(self).update(vars(manager))
        self.events = events

    def grow(self, seqs: list[Sequence], moves: Moves) -> bool:
        num_moves, lengths = len(moves), [len(seq.block_table) for seq in seqs]
        has_room = super().grow(seqs, moves)
        for shared, copy in moves[num_moves:]:
            [writer] = [key(seq) for seq in seqs if copy in seq.block_table]
            self.events.say(
                "copy", f"{writer} is about to write into #{shared}, which others hold "
                f"too. It gets a copy, #{copy}, to write into.")
        for seq, length in zip(seqs, lengths, strict=True):
            if len(seq.block_table) > length:
                new = listed(seq.block_table[length:])
                self.events.say("grow", "So that all tokens so far have a slot, {}.",
                                f"{key(seq)} takes {new}")
        return has_room

    def fork(self, parent: Sequence, child: Sequence) -> None:
        super().fork(parent, child)
        if child in child.group.sequences:
            self.events.say(
                "fork", f"{key(parent)} computes the end of the prompt. It shares its "
                "blocks with {} now, and no K or V is copied.", key(child))
        else:
            request_id = child.group.request_id
            sentence = f"The new beams of request {request_id}: {{}}."
            number = self.events.count("beam", sentence)
            self.events.say("beam", sentence, f"@{request_id}.{number} continues the "
                            f"old {key(parent)}")

    def mark_computed(self, seq: Sequence, end: int) -> None:
        contents = self.prefix_cache.contents
        old = [contents[id] for id in seq.block_table]
        super().mark_computed(seq, end)
        for block_id, content in zip(seq.block_table, old, strict=True):
            if contents[block_id] is not content:
                self.events.say(
                    "publish", "These are full, so others can find them from now on: "
                    "{}.", f"#{block_id}")

    def _take(self, free_list: FreeList, ref_count: int = 1) -> int:
        block_id = next(iter(free_list))
        if self.prefix_cache.can_find(block_id):
            self.events.say(
                "evict", "Taken for other tokens: {}. What was cached there can no "
                "longer be found.", f"#{block_id}")
        return super()._take(free_list, ref_count)
