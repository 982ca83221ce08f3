"""What happened, in sentences, told by the calls that did it.

While a run is recorded, some methods of its scheduler and block manager are wrapped. A
wrapper looks at what is there before the call, and says what has changed after it. In a
sentence, "#5" is block 5 and "@0.1" is sequence 1 of request 0. The page turns these
into marks that light up.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nanopaged.block_manager import BlockManager, FreeList, Moves
from nanopaged.scheduler import Batch, Scheduler
from nanopaged.sequence import Sequence, SequenceGroup

Event = tuple[str, str]  # its kind, and a sentence

# What is told of many things at once has one sentence a phase, with a list.
LISTS = {
    "arrive": "New in the queue: {0}.",
    "sample": "The step has sampled the next token of {0}.",
    "compute": "The step will compute {0}.",
    "grow": "For the tokens of this step, {0}.",
    "publish": "Full, so that others can find them from now on: {0}.",
    "evict": "Taken for new tokens, though still cached: {0}. What was there can no "
             "longer be found.",
    "fork": "{1} computes the end of the prompt. It shares its blocks with {0} now, "
            "and no K or V is copied.",
    "beam": "The old {1} is continued by the new {0}.",
}
MOST_LISTED = 6  # blocks or sequences in one sentence
REASONS = {"length": "reached its maximum length", "abort": "was aborted",
           "stop": "met a stop token or string"}


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
    """Collects the sentences of a phase. Each method that is named like a method of the
    engine tells about its calls: what comes before `yield` happens before the call.
    """

    def __init__(self) -> None:
        self.now: dict[Sequence, int] = {}  # the tokens that a step computes
        self.beams: dict[SequenceGroup, list[str]] = {}  # the parents of new beams
        self._said: list[Event | tuple[str, str, list[str]]] = []

    def collect(self) -> list[Event]:
        """The events since the last call of this."""
        self.tell_beams()
        events = []
        for kind, sentence, *lists in self._said:
            if lists:
                [items] = lists
                sentence = LISTS[kind].format(join(items), sentence)
            events.append((kind, sentence))
        self._said = []
        return sorted(events, key=lambda event: event[0] == "compute")  # that is last

    def say(self, kind: str, sentence: str) -> None:
        self._said.append((kind, sentence))

    def add(self, kind: str, item: str, subject: str = "") -> None:
        """Add an item to the list of the sentence of this kind about this subject."""
        for said in self._said:
            if len(said) == 3 and said[:2] == (kind, subject):
                said[2].append(item)
                return
        self._said.append((kind, subject, [item]))

    # -- Wrapping ----------------------------------------------------------------------

    def watch(self, scheduler: Scheduler) -> None:
        for owner, name in calls(scheduler):
            tell = getattr(self, name.strip("_"))
            vars(owner)[name] = self.told(getattr(owner, name), tell)

    @staticmethod
    def unwatch(scheduler: Scheduler) -> None:
        for owner, name in calls(scheduler):
            vars(owner).pop(name, None)  # the method of its class again

    def told(self, method: Callable[..., Any], tell: Callable[..., Iterator[None]]
             ) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            teller = tell(method.__self__, *arguments)  # type: ignore[attr-defined]
            next(teller)
            result = method(*arguments, **options)
            next(teller, None)
            return result

        return call

    # -- The scheduler -----------------------------------------------------------------

    def admit(self, scheduler: Scheduler, group: SequenceGroup, batch: Batch
              ) -> Iterator[None]:
        num_moves = len(batch.moves)
        yield
        moves = batch.moves[num_moves:]
        if moves:
            self.say("swap_in", f"There is room for request {group.request_id} again. "
                     f"Its blocks come back from CPU memory: {listed_moves(moves)}.")
        if moves or group.request_id not in scheduler.running:
            return
        self.say("admit", f"There is room for request {group.request_id}, so it is "
                 "admitted.")
        leader, manager = group.live[0], scheduler.block_manager
        found = list(leader.block_table)
        if found:
            revived = [id for id in found if manager.ref_counts[id] == 1]
            where = "which others hold"
            if revived == found:
                where = "which nobody held, but whose K and V were still there"
            elif revived:
                where = f"of which nobody held {listed(revived)}"
            self.say("prefix", f"The first {leader.num_computed_tokens} tokens of "
                     f"{key(leader)} need not be computed: they are in "
                     f"{listed(found)}, {where}.")

    def preempt(self, scheduler: Scheduler, batch: Batch) -> Iterator[None]:
        request_id = next(reversed(scheduler.running))
        num_moves = len(batch.moves)
        yield
        full = (f"The pool is full, and request {request_id} is the youngest "
                "running request, so it gives way.")
        moves = batch.moves[num_moves:]
        if moves:
            self.say("swap_out", f"{full} Its blocks move to CPU memory: "
                     f"{listed_moves(moves)}.")
        else:
            self.say("recompute", f"{full} It gives up its K and V and keeps its "
                     "tokens.")

    def schedule_sequence(self, scheduler: Scheduler, seq: Sequence, batch: Batch
                          ) -> Iterator[None]:
        first, name = seq.num_computed_tokens, key(seq)
        yield
        number, end = seq.num_computed_tokens - first, seq.num_computed_tokens
        if number == 0:
            return
        self.now[seq] = number
        if end < seq.group.num_prompt_tokens:
            self.say("chunk", f"The budget is used up, so {name} computes {number} of "
                     f"its {seq.group.num_prompt_tokens} prompt tokens now. That makes "
                     f"{end} so far.")
        self.add("compute", f"{number} of {name}")

    def finish(self, scheduler: Scheduler, seq: Sequence, reason: str
               ) -> Iterator[None]:
        held, group = list(seq.block_table), seq.group
        yield
        kind = "abort" if reason == "abort" else "finish"
        if seq not in group.sequences:  # a beam that is none of the best answers
            if not group.live:
                self.say("finish", f"The beam search of request {group.request_id} has "
                         "ended.")
            return
        counts = scheduler.block_manager.ref_counts
        freed = [id for id in held if counts[id] == 0]
        kept = [id for id in held if counts[id] > 0]
        sentence = f"{key(seq)} has ended: it {REASONS[reason]}."
        if freed:
            sentence += f" That frees {listed(freed)}."
        if kept:
            sentence += f" Others still hold {listed(kept)}."
        self.say(kind, sentence)

    # -- The block manager -------------------------------------------------------------

    def grow(self, manager: BlockManager, seqs: list[Sequence], copies: Moves
             ) -> Iterator[None]:
        num_copies, lengths = len(copies), [len(seq.block_table) for seq in seqs]
        yield
        for shared, copy in copies[num_copies:]:
            [writer] = [key(seq) for seq in seqs if copy in seq.block_table]
            self.say("copy", f"{writer} is about to write into #{shared}, which others "
                     f"hold too. It gets a copy to write into, #{copy}.")
        for seq, length in zip(seqs, lengths, strict=True):
            if len(seq.block_table) > length:
                new = listed(seq.block_table[length:])
                self.add("grow", f"{key(seq)} takes {new}")

    def fork(self, manager: BlockManager, parent: Sequence, child: Sequence
             ) -> Iterator[None]:
        yield
        if child in child.group.sequences:
            self.add("fork", key(child), subject=key(parent))
        else:
            self.beams.setdefault(child.group, []).append(key(parent))

    def tell_beams(self) -> None:
        """Of a beam search that goes on: who the parents of the new beams were."""
        for group, parents in self.beams.items():
            names = [f"@{group.request_id}.{index}" for index in range(len(parents))]
            if parents != names:
                for name, parent in zip(names, parents, strict=True):
                    self.add("beam", name, subject=parent)
                childless = [name for name in names if name not in parents]
                if childless:
                    self.say("beam", f"Nothing goes on from {join(childless)}.")
        self.beams = {}

    def advance(self, manager: BlockManager, seq: Sequence, num_tokens: int
                ) -> Iterator[None]:
        old = [manager.contents[id] for id in seq.block_table]
        yield
        for block_id, content in zip(seq.block_table, old, strict=True):
            if manager.contents[block_id] is not content:
                self.add("publish", f"#{block_id}")

    def take(self, manager: BlockManager, free_list: FreeList) -> Iterator[None]:
        block_id = next(iter(free_list))
        if manager.is_cached(block_id):
            self.add("evict", f"#{block_id}")
        yield


def calls(scheduler: Scheduler) -> list[tuple[Any, str]]:
    """The methods that are wrapped."""
    manager = scheduler.block_manager
    return [(scheduler, "_admit"), (scheduler, "_preempt"),
            (scheduler, "_schedule_sequence"), (scheduler, "finish"),
            (manager, "grow"), (manager, "fork"), (manager, "advance"),
            (manager, "_take")]
