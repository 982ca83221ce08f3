"""Prefill here, decode there: one engine computes prompts, another one goes on.

A long prompt holds up everyone who waits for the next token. So let one engine compute
prompts only. It hands over the K and V of each, in blocks, together with the request,
which has its first token by then. The other engine, in another process, takes this for
a request of its own that was swapped out: the blocks go into its CPU memory, and are
swapped in when there is room.

Both engines need the same model, dtype, block_size and max_model_len, and the other one
also preemption_mode="swap". To unpickle is to run code, so they must trust each other.
"""

import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from nanopaged import LLM, RequestOutput
from nanopaged.checks import check
from nanopaged.frontend.prompts import make_request
from nanopaged.sequence import SequenceGroup


def prefill(llm: LLM, prompts: Iterable[Any], params: Iterable[Any]) -> Iterator[bytes]:
    """Compute prompts, and hand over each of these requests when it has a token."""
    groups: dict[str, SequenceGroup] = {}
    outputs: dict[str, RequestOutput] = {}
    for request in zip(prompts, params, strict=True):
        request_id = llm.add_request(*request)
        groups[request_id] = llm.engine.scheduler.unfinished[request_id]
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step()}
        for request_id, group in list(groups.items()):
            if has_prompt(group):
                kv = read_prompt(llm, group) if group.live else None
                yield pickle.dumps((outputs[request_id], group, kv))
                llm.abort_request(request_id)
                del groups[request_id]


def has_prompt(group: SequenceGroup) -> bool:
    """Whether a request has K and V of its prompt, and a token. (It has no K and V when
    it starts over, after a preemption.) One that has finished needs none.
    """
    count = group.num_prompt_tokens
    return not group.live or (
        group.live[0].num_computed_tokens >= count < len(group.live[0].token_ids))


def read_prompt(llm: LLM, group: SequenceGroup) -> Tensor:
    """A copy of the blocks of its prompt: [num_blocks, num_layers, 2, num_kv_heads,
    block_size, head_dim].
    """
    count = llm.engine.block_manager.num_blocks_for(group.num_prompt_tokens)
    block_ids = group.live[0].block_table[:count]
    return torch.stack([llm.engine.runner._block(id) for id in block_ids]).cpu()


def take_over(llm: LLM, output: RequestOutput, group: SequenceGroup, kv: Tensor) -> str:
    """Queue a request that another engine has begun; returns its new id."""
    manager, runner = llm.engine.block_manager, llm.engine.runner
    shape = runner.swapped_kv[:, 0].shape
    check(kv.shape[1:] == shape, "the shape of blocks", shape, kv.shape[1:])
    request = make_request(
        llm, group.beam_params or group.params, output.prompt, group.prompt_token_ids)
    request.group = group
    request.read()  # a stop string depends on when each token is read
    if len(kv) <= len(manager.free_swap_blocks):  # otherwise it starts over
        block_ids = [manager._take(manager.free_swap_blocks, ref_count=0) for _ in kv]
        for block_id, block in zip(block_ids, kv, strict=True):
            runner._block(block_id).copy_(block)
        leader, *others = group.live
        manager.hold(leader, block_ids, group.num_prompt_tokens)
        for seq in others:
            manager.fork(leader, seq)
    llm._submit([request], llm._outbox)
    return group.request_id


def decode(llm: LLM, handed: Iterable[bytes]) -> list[RequestOutput]:
    """Complete requests that another engine has begun: their outputs, in this order."""
    check(llm.engine.runner.num_swap_blocks > 0, "preemption_mode", "'swap'",
          llm.config.preemption_mode)
    waiting, keys = deque(map(pickle.loads, handed)), []
    outputs: dict[str, RequestOutput] = {}
    while waiting or llm.has_unfinished_requests():
        while waiting:
            output, group, kv = waiting[0]
            num_free = len(llm.engine.block_manager.free_swap_blocks)
            if group.live and len(kv) > num_free and llm.has_unfinished_requests():
                break  # those will make room
            waiting.popleft()
            keys.append(take_over(llm, output, group, kv) if group.live
                        else f"finished {output.request_id}")
            outputs[keys[-1]] = output
        outputs |= {output.request_id: output for output in llm.step()}
    return [outputs[key] for key in keys]
