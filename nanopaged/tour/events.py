"""What happened between two states, in sentences, with the code that did it.

Nothing here watches the engine: events are read off the states before and after, and
off the batch. In a sentence, "#5" is block 5 and "@0.1" is sequence 1 of request 0;
the page turns these into marks that light up.
"""

from collections.abc import Iterator
from typing import NamedTuple

from nanopaged.scheduler import Batch
from nanopaged.tour.state import State
from nanopaged.tour.words import MOST_LISTED, be, count, join, listed, listed_moves


class Event(NamedTuple):
    kind: str
    sentence: str


def find_events(before: State, after: State, batch: Batch | None) -> list[Event]:
    """What happened from one phase to the next.

    batch: the step's, if `after` is the state after `schedule`; else None. The events
    are in the order in which the scheduler does such things.
    """
    events: list[Event] = []
    if batch is None:
        events += find_arrivals(before, after)
        events += find_samples(before, after)
        events += find_beams(before, after)
        events += find_ends(before, after)
        return events

    events += find_preemptions(before, after, batch)
    events += find_evictions(before, after)
    events += find_copies(after, batch)
    events += find_growth(before, after)
    events += find_admissions(before, after, batch)
    events += find_chunks(after)
    events += find_computed(after)
    events += find_forks(before, after)
    events += find_publications(before, after)
    return events


# -- Between steps, and after the forward pass -----------------------------------------


def find_arrivals(before: State, after: State) -> Iterator[Event]:
    new = [id for id in after["groups"] if id not in before["groups"]]
    for request_id in new[:MOST_LISTED]:
        group = after["groups"][request_id]
        yield Event(
            "arrive",
            f"Request {request_id} ({group['kind']}) joins the queue with "
            f"{count(len(group['prompt_tokens']), 'prompt token')}.",
        )
    if len(new) > MOST_LISTED:
        yield Event("arrive", f"{len(new) - MOST_LISTED} more requests join the queue.")


def find_samples(before: State, after: State) -> Iterator[Event]:
    longer = [
        key
        for key, seq in after["seqs"].items()
        if len(seq["tokens"]) > len(before["seqs"].get(key, seq)["tokens"])
    ]
    if longer:
        what = count(len(longer), "token")
        yield Event(
            "sample", f"{what} {be(longer)} sampled, for {listed(longer, '@')}."
        )


def find_beams(before: State, after: State) -> Iterator[Event]:
    """A new beam has the tokens of the one from which it goes on, and one more."""
    for request_id in after["groups"]:
        beams = sequences_of(before, request_id)
        children: dict[str, list[str]] = {}
        for key in beams:
            seq = after["seqs"][key]
            parents = [one for one in (key, *beams)
                       if before["seqs"][one]["tokens"] == seq["tokens"][:-1]]
            if parents and seq["tokens"] and not seq["end"]:
                children.setdefault(parents[0], []).append(key)

        if any([parent] != keys for parent, keys in children.items()):
            parts = [f"{listed(keys, '@')} from what was @{parent}"
                     for parent, keys in children.items()]
            childless = [key for key in beams if key not in children]
            text = f"The best continuations are the new beams: {join(parts)}."
            if childless:
                text += f" Nothing goes on from {listed(childless, '@')}."
            yield Event("beam", text)


def find_ends(before: State, after: State) -> Iterator[Event]:
    """Sequences that have ended; those of one request share a sentence."""
    ended: dict[tuple[str, str], list[str]] = {}
    for key, seq in after["seqs"].items():
        was_over = before["seqs"].get(key, {}).get("end", "")
        if seq["end"] and not was_over:
            ended.setdefault((group_of(key), seq["end"]), []).append(key)

    for (_, reason), keys in ended.items():
        tables = [before["seqs"].get(key, {}).get("table", []) for key in keys]
        held = dict.fromkeys(id for table in tables for id in table)
        freed = [id for id in held if refs(after, id) == 0]
        one = len(keys) == 1
        given = f"{'It lets' if one else 'They let'} go of {count(len(held), 'block')}"
        if len(freed) < len(held):
            given += ", which others go on holding"
            if freed:
                given += f", apart from {listed(freed, '#')}"
        who = listed(keys, "@")
        if reason == "abort":
            yield Event("abort", f"{who} {be(keys)} aborted. {given}.")
        elif reason == "stop":
            verb = "meets" if one else "meet"
            yield Event("finish", f"{who} {verb} a stop token or string. {given}.")
        else:
            verb, its = ("reaches", "its") if one else ("reach", "their")
            yield Event("finish", f"{who} {verb} {its} maximum length. {given}.")


# -- While the step is scheduled -------------------------------------------------------


def find_preemptions(before: State, after: State, batch: Batch) -> Iterator[Event]:
    for request_id in reversed(before["running"]):
        if request_id not in after["waiting"]:
            continue
        keys = sequences_of(after, request_id)
        tables = [after["seqs"][key]["table"] for key in keys]
        full = f"The pool is full, and request {request_id} is the youngest that runs"
        if any(tables):
            moved = {id for table in tables for id in table}
            moves = [pair for pair in batch.swaps_out if pair[1] in moved]
            yield Event(
                "swap_out",
                f"{full}. Its {count(len(moves), 'block')} move to CPU memory: "
                f"{listed_moves(moves)}.",
            )
        else:
            yield Event(
                "recompute",
                f"{full}. It gives up its K and V, keeps its tokens, and waits to be "
                "admitted again.",
            )


def find_evictions(before: State, after: State) -> Iterator[Event]:
    """Blocks that could be found and have lost their content, which stays until a block
    is taken again. A preemption may have freed them just before, in the same step.
    """
    evicted = []
    for block_id, block in before["blocks"].items():
        now = after["blocks"].get(block_id, {}).get("hash", "")
        if block.get("cached", False) and now != block["hash"]:
            evicted.append(block_id)
    if evicted:
        was, it = ("was", "it") if len(evicted) == 1 else ("were", "they")
        yield Event(
            "evict",
            f"{listed(evicted, '#')} {was} free and still cached, and {be(evicted)} "
            f"taken again: what {it} held can no longer be found.",
        )


def find_copies(after: State, batch: Batch) -> Iterator[Event]:
    """Copies of one block share a sentence: after a fork, all writers but one copy."""
    copies_of: dict[int, list[int]] = {}
    for shared, copy in batch.copies:
        copies_of.setdefault(shared, []).append(copy)

    for shared, copies in copies_of.items():
        writers = [
            key
            for key, seq in after["seqs"].items()
            if not set(copies).isdisjoint(seq["table"])
        ]
        gets = "It gets a copy" if len(copies) == 1 else "They get copies"
        yield Event(
            "copy",
            f"{listed(writers, '@')} {be(writers)} about to write into #{shared}, "
            f"which others hold too. {gets} to write into, {listed(copies, '#')}.",
        )


def find_growth(before: State, after: State) -> Iterator[Event]:
    grown = {}
    for request_id in after["running"]:
        if request_id not in before["running"]:
            continue
        for key in sequences_of(after, request_id):
            old = before["seqs"][key]["table"]
            new = after["seqs"][key]["table"]
            if old and len(new) > len(old):
                grown[key] = new[len(old) :]
    if grown:
        parts = [f"@{key} takes {listed(ids, '#')}" for key, ids in grown.items()]
        yield Event("grow", f"For the tokens of this step, {join(parts)}.")


def find_admissions(before: State, after: State, batch: Batch) -> Iterator[Event]:
    for request_id in after["running"]:
        if request_id in before["running"]:
            continue
        keys = sequences_of(after, request_id)
        tables = [before["seqs"].get(key, {}).get("table", []) for key in keys]
        held = {id for table in tables for id in table}
        if held:
            moves = [pair for pair in batch.swaps_in if pair[0] in held]
            yield Event(
                "swap_in",
                f"There is room for request {request_id} again. Its "
                f"{count(len(moves), 'block')} come back from CPU memory: "
                f"{listed_moves(moves)}.",
            )
            continue

        leader = next(key for key in keys if after["seqs"][key]["table"])
        seq = after["seqs"][leader]
        num_found = seq["computed"] - seq["now"]
        first_size = len(seq["table"])
        yield Event(
            "admit",
            f"Request {request_id} is admitted: @{leader} gets a block table of "
            f"{count(first_size, 'block')}, {listed(seq['table'], '#')}.",
        )
        if num_found > 0:
            yield prefix_hit(after, leader, num_found)


def prefix_hit(after: State, leader: str, num_found: int) -> Event:
    """The first blocks of a table were found in the cache. Who holds them, too?

    Only requests that were there before: those that run, and are older.
    """
    running = after["running"]
    older = running[: running.index(group_of(leader))]
    held: set[int] = set()
    for request_id in older:
        for key in sequences_of(after, request_id):
            held.update(after["seqs"][key]["table"])

    found = after["seqs"][leader]["table"][: num_found // after["block_size"]]
    revived = [id for id in found if id not in held]
    where = "which others hold"
    if len(revived) == len(found):
        where = "which nobody held, but whose K and V were still there"
    elif revived:
        where = f"of which nobody held {listed(revived, '#')}"
    return Event(
        "prefix",
        f"The first {num_found} tokens of @{leader} need not be computed: they are in "
        f"{listed(found, '#')}, {where}.",
    )


def find_chunks(after: State) -> Iterator[Event]:
    for request_id in after["running"]:
        num_prompt = len(after["groups"][request_id]["prompt_tokens"])
        for key in sequences_of(after, request_id):
            seq = after["seqs"][key]
            if seq["now"] and seq["computed"] < num_prompt:
                yield Event(
                    "chunk",
                    f"The budget is used up: @{key} computes {seq['now']} of its "
                    f"{num_prompt} prompt tokens now, {seq['computed']} so far.",
                )


def find_computed(after: State) -> Iterator[Event]:
    counts = {key: seq["now"] for key, seq in after["seqs"].items() if seq["now"]}
    prompts = [f"{now} for @{key}" for key, now in counts.items() if now > 1]
    decodes = [key for key, now in counts.items() if now == 1]
    parts = prompts
    if decodes:
        each = "" if len(decodes) == 1 else " each"
        parts = [*prompts, f"1{each} for {listed(decodes, '@')}"]
    if parts:
        total = count(sum(counts.values()), "token")
        yield Event("compute", f"The step will compute {total}: {join(parts)}.")


def find_forks(before: State, after: State) -> Iterator[Event]:
    """Sequences whose table was empty, in a group in which another one has entries."""
    for request_id in after["running"]:
        keys = sequences_of(after, request_id)
        alive = [key for key in keys if not after["seqs"][key]["end"]]
        new = [
            key
            for key in alive[1:]
            if after["seqs"][key]["table"] and not before["seqs"][key]["table"]
        ]
        if new:
            shared = after["seqs"][alive[0]]["table"]
            yield Event(
                "fork",
                f"@{alive[0]} computes the end of the prompt, and {listed(new, '@')} "
                f"{'forks' if len(new) == 1 else 'fork'} from it: they share "
                f"{listed(shared, '#')}, and no K or V is copied.",
            )


def find_publications(before: State, after: State) -> Iterator[Event]:
    named = [
        block_id
        for block_id, block in after["blocks"].items()
        if block.get("cached", False)
        and block["hash"] != before["blocks"].get(block_id, {}).get("hash", "")
    ]
    if named:
        yield Event(
            "publish",
            f"{listed(named, '#')} {be(named)} full: from now on, others can find "
            f"{'it' if len(named) == 1 else 'them'}.",
        )


# -- Reading states --------------------------------------------------------------------


def group_of(key: str) -> str:
    return key.partition(".")[0]


def sequences_of(state: State, request_id: str) -> list[str]:
    keys: list[str] = []
    while (key := f"{request_id}.{len(keys)}") in state["seqs"]:
        keys.append(key)
    return keys


def refs(state: State, block_id: int | str) -> int:
    return int(state["blocks"].get(str(block_id), {}).get("refs", 0))
