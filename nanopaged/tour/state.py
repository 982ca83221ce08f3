"""The engine's state as plain data, for a page to show."""

from codecs import getincrementaldecoder
from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import ref

from nanopaged.frontend.detokenizer import token_bytes
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Sequence, SequenceGroup

State: TypeAlias = dict[str, Any]
Groups: TypeAlias = dict[str, SequenceGroup]  # by request id
Texts: TypeAlias = Callable[[list[int]], list[str]]  # what tokens look like


def take_state(scheduler: Scheduler, known: Groups, now: dict[Sequence, int],
               texts: Texts) -> State:
    """All that changes from step to step, as it is now.

    known: the requests that are shown. Some of them may have finished.
    now: how many tokens of a sequence this step computes, or the last one did. In
        `total`, those of beams that are gone count as well.
    """
    unfinished, running = scheduler.unfinished, scheduler.running
    return {
        "running": list(running),
        "waiting": [id for id in unfinished if id not in running],
        "finished": [id for id in known if id not in unfinished],
        "seqs": {f"{id}.{index}": sequence_state(seq, now.get(seq, 0), texts)
                 for id, group in known.items()
                 for index, seq in enumerate(group.sequences)},
        "total": sum(now.values()),
        "blocks": block_states(scheduler.block_manager, texts),
    }


def sequence_state(seq: Sequence, now: int, texts: Texts) -> State:
    # A sequence that has ended holds nothing, even if an error has kept its table.
    has_ended = seq.finish_reason is not None
    score = {"score": round(seq.cumulative_logprob, 2)} if seq.group.beam_params else {}
    return score | {
        "tokens": texts(seq.token_ids[seq.group.num_prompt_tokens :]),
        "computed": seq.num_computed_tokens,
        "now": now,  # how many of these are this step's
        "table": [] if has_ended else list(seq.block_table),
        "end": seq.finish_reason or "",
    }


def block_states(manager: Any, texts: Texts) -> State:
    """The blocks that are held or can be found, by block id.

    `rank` is the place of a free block in the order in which free blocks are taken.
    """
    ranks = {block_id: rank for rank, block_id in enumerate(manager.free_blocks, 1)}
    blocks: State = {}
    for block_id, refs in enumerate(manager.ref_counts):
        cached = manager.prefix_cache.can_find(block_id)
        if refs > 0:
            blocks[str(block_id)] = {"refs": refs, "cached": cached}
        elif cached:
            held = texts(list(manager.prefix_cache.contents[block_id].token_ids))
            blocks[str(block_id)] = {
                "refs": 0, "cached": True, "rank": ranks[block_id], "tokens": held}
    return blocks


def group_state(group: SequenceGroup, texts: Texts) -> State:
    """What stays the same about a request."""
    kind = "greedy" if group.params.temperature == 0 else "sampled"
    if group.beam_params:
        kind = f"beam search, width {group.params.n}"
    elif group.params.n > 1:
        kind = f"{group.params.n} samples"
    # Contiguous memory would reserve room for the longest answers.
    return {"kind": kind, "prompt": texts(group.prompt_token_ids),
            "reserved": group.params.n * group.max_len}


def token_texts(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """A text for each token; without a tokenizer this is its id.

    If several tokens make up one character, the last has it, and the others are empty.
    """
    if tokenizer is None:
        return [f" {token}" for token in token_ids]
    decoder = getincrementaldecoder("utf-8")("replace")
    # Special tokens have no bytes, so their names are shown. Some ids have no name.
    return [decoder.decode(token_bytes(ref(tokenizer), token)[1] or (
        tokenizer.convert_ids_to_tokens(token) or f"<{token}>").encode())
            for token in token_ids]
