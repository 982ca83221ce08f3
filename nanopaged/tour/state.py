"""The engine's state as plain data, and the differences between two states.

A trace is the first state and a delta for every frame; folding the deltas gives back
every state. A state has only dicts, lists, numbers, strings and bools, so that it can
be written as JSON, and no None, which stands for "deleted" in a delta:

    state  {"running": ["0", "1"],     "seqs": {"0.0": {"computed": 6, ..}, "1.0": ..}}
    delta  {"running": [[1, 1, ["2"]]], "seqs": {"0.0": {"computed": 7}, "1.0": None}}

A dict in a delta goes one level down. A list has splices, [start, how many are deleted,
what is inserted there], and items that are appended. Everything else is a new value.
"""

from typing import Any, TypeAlias

from nanopaged.block_manager import Content
from nanopaged.scheduler import Batch, Scheduler
from nanopaged.sequence import Sequence, SequenceGroup

State: TypeAlias = dict[str, Any]
Delta: TypeAlias = dict[str, Any]


# -- What the engine holds -------------------------------------------------------------


def take_state(
    scheduler: Scheduler,
    known: dict[str, SequenceGroup],
    now: dict[str, int],
    last: State | None = None,
) -> State:
    """Everything that the page shows, as it is now.

    known: all requests that are shown, by id; those that are new in a queue are added.
    now: how many tokens the step computes, or the last one did, by sequence.
    last: the state before this one. What has not changed is taken from it, so that a
    large engine leaves little work to the garbage collector.
    """
    unfinished = scheduler.unfinished
    known |= unfinished
    finished = [request_id for request_id in known if request_id not in unfinished]

    old = last or {"groups": {}, "seqs": {}, "blocks": {}}
    groups: State = {}
    seqs: State = {}
    for request_id, group in known.items():
        groups[request_id] = old["groups"].get(request_id) or group_state(group)
        for index, seq in enumerate(group.sequences):
            key = f"{request_id}.{index}"
            state = sequence_state(seq, now.get(key, 0))
            seqs[key] = reuse(old["seqs"].get(key), state)

    manager = scheduler.block_manager
    blocks: State = {}
    held = zip(manager.ref_counts, manager.contents, strict=True)
    for block_id, (refs, content) in enumerate(held):
        if refs > 0 or content is not None:
            key = str(block_id)
            state = block_state(refs, content, manager.is_cached(block_id))
            blocks[key] = reuse(old["blocks"].get(key), state)

    return {
        "block_size": manager.block_size,
        "num_blocks": manager.num_blocks,
        "num_swap_blocks": len(manager.ref_counts) - manager.num_blocks,
        "budget": scheduler.config.max_num_batched_tokens,
        "waiting": [id for id in unfinished if id not in scheduler.running],
        "running": list(scheduler.running),
        "finished": finished,
        "groups": groups,
        "seqs": seqs,
        "blocks": blocks,
        "free": list(manager.free_blocks),
        "free_swap": list(manager.free_swap_blocks),
    }


def reuse(old: State | None, new: State) -> State:
    return old if old is not None and old == new else new


def group_state(group: SequenceGroup) -> State:
    kind = "greedy" if group.params.temperature == 0 else "sampled"
    if group.beam_params:
        kind = f"beam search, width {group.params.n}"
    elif group.params.n > 1:
        kind = f"{group.params.n} samples"
    return {
        "kind": kind,
        "prompt": group.prompt or "",
        "prompt_tokens": group.prompt_token_ids,
        # The most slots it can ever fill: what a contiguous allocation reserves.
        "reserved": group.params.n * group.max_len,
    }


def sequence_state(seq: Sequence, now: int) -> State:
    # What has ended holds nothing, even if an error made the engine begin new books.
    has_ended = seq.finish_reason is not None
    return {
        "tokens": seq.token_ids[seq.group.num_prompt_tokens :],
        "computed": seq.num_computed_tokens,
        "now": 0 if has_ended else now,  # how many of these are this step's
        "table": [] if has_ended else list(seq.block_table),
        "end": seq.finish_reason or "",
    }


def count_tokens(scheduler: Scheduler, batch: Batch) -> dict[str, int]:
    """How many tokens a step that was just scheduled computes, by sequence.

    A batch does not say whose its entries are, but they come in the order of those that
    run. Some do not take part; who does, has come to the entry's end in its blocks.
    """
    counts = {}
    entry = first = 0
    for request_id, group in scheduler.running.items():
        for index, seq in enumerate(group.sequences):
            if entry == len(batch.counts):
                break
            end = batch.ends[entry]
            num_blocks = scheduler.block_manager.num_blocks_for(end)
            blocks = list(batch.block_ids[first : first + num_blocks])
            if (seq.num_computed_tokens == end
                    and list(seq.block_table[:num_blocks]) == blocks):
                counts[f"{request_id}.{index}"] = batch.counts[entry]
                entry += 1
                first += num_blocks
    assert entry == len(batch.counts), "an entry is nobody's"
    return counts


def block_state(refs: int, content: Content | None, is_cached: bool) -> State:
    """`is_cached`: others can find it. Of several blocks with equal content, one is
    found. The hash tells contents apart; it is text, because it has 64 bits.
    """
    if content is None:
        return {"refs": refs}
    return {"refs": refs, "hash": str(content.hash), "cached": is_cached,
            "tokens": content.token_ids}


def utilisation(state: State) -> float:
    """How many of the slots of the device's blocks in use hold a token: 0 to 1."""
    size = state["block_size"]
    filled: dict[int, int] = {}  # of those that share a block, one has filled most
    for seq in state["seqs"].values():
        for index, block_id in enumerate(seq["table"]):
            tokens = min(size, max(0, seq["computed"] - index * size))
            filled[block_id] = max(filled.get(block_id, 0), tokens)
    held = [tokens for block, tokens in filled.items() if block < state["num_blocks"]]
    return sum(held) / (size * len(held)) if held else 0.0


# -- Deltas ----------------------------------------------------------------------------


def diff(old: State, new: State) -> Delta:
    """What `fold` needs to turn `old` into `new`."""
    delta: Delta = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if value == before:
            continue
        if isinstance(value, dict):
            delta[key] = diff(before or {}, value)
        elif isinstance(value, list):
            delta[key] = splices(before or [], value)
        else:
            delta[key] = value
    return delta


def fold(state: State, delta: Delta) -> None:
    """Change `state` by `delta`."""
    for key, change in delta.items():
        if change is None:
            del state[key]
        elif isinstance(change, dict):
            fold(state.setdefault(key, {}), change)
        elif isinstance(change, list):
            items = state.setdefault(key, [])
            for part in change:
                if isinstance(part, list):
                    start, num_deleted, inserted = part
                    items[start : start + num_deleted] = unpack(inserted)
                else:
                    items.append(part)
        else:
            state[key] = change


def splices(old: list[Any], new: list[Any]) -> list[Any]:
    """The splices that turn `old` into `new`, last one first, so that indices hold.

    Lists of tokens and tables grow at their end. Queues and free lists also lose items
    anywhere and get some at the front. What they keep, keeps its order.
    """
    if new[: len(old)] == old:
        appended = new[len(old) :]
        return appended if len(appended) < 3 else [[len(old), 0, pack(appended)]]
    first, last = longest_kept(old, new)
    if first == last:
        return [[0, len(old), pack(new)]]

    position = {item: index for index, item in enumerate(old)}
    found: list[Any] = []
    end = len(old)
    inserted = new[last:]
    for item in reversed(new[first:last]):
        start = position[item] + 1
        if start < end or inserted:
            found.append([start, end - start, pack(inserted)])
        end = start - 1
        inserted = []
    if end > 0 or first > 0:
        found.append([0, end, pack(new[:first])])
    return found


def longest_kept(old: list[Any], new: list[Any]) -> tuple[int, int]:
    """The longest stretch of `new` in the order of `old`, as (first, last + 1)."""
    position = {item: index for index, item in enumerate(old)}
    best = (0, 0)
    first = 0
    previous = -1
    for index, item in enumerate(new):
        at = position.get(item, -1)
        if at <= previous:
            first = index if at >= 0 else index + 1
        previous = at
        if index + 1 - first > best[1] - best[0]:
            best = (first, index + 1)
    return best


def pack(items: list[Any]) -> list[Any]:
    """Write runs of numbers such as 4, 5, 6, 7 as [4, 7]: a whole pool is one run."""
    packed: list[Any] = []
    for item in items:
        run = packed[-1] if packed else None
        if isinstance(run, list) and item == run[1] + 1:
            run[1] = item
        elif isinstance(item, int) and packed[-2:] == [item - 2, item - 1]:
            packed[-2:] = [[item - 2, item]]
        else:
            packed.append(item)
    return packed


def unpack(items: list[Any]) -> list[Any]:
    unpacked: list[Any] = []
    for item in items:
        if isinstance(item, list):
            unpacked.extend(range(item[0], item[1] + 1))
        else:
            unpacked.append(item)
    return unpacked
