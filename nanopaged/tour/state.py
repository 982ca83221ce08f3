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

from nanopaged.block_manager import Block
from nanopaged.scheduler import Batch, ControlMessage, Scheduler
from nanopaged.sequence import Sequence, SequenceGroup

State: TypeAlias = dict[str, Any]
Delta: TypeAlias = dict[str, Any]

STATS = (
    "blocks_used",
    "tokens_held",
    "output_tokens",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "preemptions_recompute",
    "preemptions_swap",
    "blocks_copied",
    "blocks_swapped",
)


# -- What the engine holds -------------------------------------------------------------


def take_state(
    scheduler: Scheduler,
    known: dict[str, SequenceGroup],
    batch: Batch | None,
    last: State | None = None,
) -> State:
    """Everything that the page shows, as it is now.

    known: all requests that are shown, by id; those that are new in a queue are added.
    batch: the step that is under way, or the last one.
    last: the state before this one. What has not changed is taken from it, so that a
    large engine leaves little work to the garbage collector.
    """
    for group in (*scheduler.running, *scheduler.waiting):
        known[group.request_id] = group
    waiting = [group.request_id for group in scheduler.waiting]
    running = [group.request_id for group in scheduler.running]
    in_queue = {*waiting, *running}
    finished = [request_id for request_id in known if request_id not in in_queue]

    old = last or {"groups": {}, "seqs": {}, "blocks": {}}
    message = batch.message if batch else ControlMessage()
    counts = dict(zip(message.rows, message.counts, strict=True))
    groups: State = {}
    seqs: State = {}
    for request_id, group in known.items():
        groups[request_id] = old["groups"].get(request_id) or group_state(group)
        for index, seq in enumerate(group.sequences):
            key = f"{request_id}.{index}"
            seqs[key] = reuse(old["seqs"].get(key), sequence_state(seq, counts))

    manager = scheduler.block_manager
    blocks: State = {}
    for block_id, block in enumerate(manager.blocks):
        if block.ref_count > 0 or block.content is not None:
            key = str(block_id)
            is_cached = manager.published.get(block.hash) == block_id
            state = block_state(block, is_cached)
            blocks[key] = reuse(old["blocks"].get(key), state)

    stats = scheduler.measure()
    return {
        "block_size": manager.block_size,
        "num_blocks": manager.num_blocks,
        "num_swap_blocks": len(manager.blocks) - manager.num_blocks,
        "budget": scheduler.config.max_num_batched_tokens,
        "waiting": waiting,
        "running": running,
        "finished": finished,
        "groups": groups,
        "seqs": seqs,
        "blocks": blocks,
        "free": list(manager.free_blocks),
        "free_swap": list(manager.free_swap_blocks),
        "stats": {name: getattr(stats, name) for name in STATS},
    }


def reuse(old: State | None, new: State) -> State:
    return old if old is not None and old == new else new


def group_state(group: SequenceGroup) -> State:
    kind = "greedy" if group.params.temperature == 0 else "sampled"
    if group.is_beam_search:
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


def sequence_state(seq: Sequence, counts: dict[int, int]) -> State:
    """counts: how many tokens the step computes, by row."""
    return {
        "tokens": seq.token_ids[seq.group.num_prompt_tokens :],
        "computed": seq.num_computed_tokens,
        "now": counts.get(seq.row, 0),  # how many of these are this step's
        "table": list(seq.block_table),
        "row": seq.row,
        "end": seq.finish_reason or "",
    }


def block_state(block: Block, is_cached: bool) -> State:
    """is_cached: others can find it. Of several blocks with one name, one is found."""
    if block.content is None:
        return {"refs": block.ref_count}
    _, token_ids = block.content
    return {
        "refs": block.ref_count,
        "name": block.name,
        "cached": is_cached,
        "tokens": token_ids,
    }


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
