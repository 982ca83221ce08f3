"""The paper's blockwise attention in NumPy: its equation 4, one query at a time.

Nothing here is fast. It is the formula, and the engine's attention must agree with it.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanopaged import LLM, SamplingParams
from nanopaged.tour.observers import observers

Floats = NDArray[np.float64]


def attend(query: Floats, blocks: Floats, block_table: list[int], num_keys: int
           ) -> Floats:
    """What one query sees: the mean of the values, weighted by exp(query . key).

    query: [head_dim]; blocks: [num_blocks, 2, block_size, head_dim], one KV head of the
    pool; the sequence's first `num_keys` tokens are in the blocks of its table.
    """
    block_size, head_dim = blocks.shape[2:]
    highest = -np.inf
    numerator = np.zeros(head_dim)
    denominator = 0.0
    for j, block in enumerate(block_table):
        num_here = min(block_size, num_keys - j * block_size)
        if num_here <= 0:
            break
        keys, values = blocks[block, :, :num_here]  # K_j and V_j
        scores = keys @ query / np.sqrt(head_dim)

        # The sums so far are relative to a lower score: shrink them.
        higher = max(highest, scores.max())
        shrink = np.exp(highest - higher)
        weights = np.exp(scores - higher)
        numerator = numerator * shrink + weights @ values
        denominator = denominator * shrink + weights.sum()
        highest = higher
    return numerator / denominator


class Recorded(NamedTuple):
    """What the engine's attention was given in one layer of one step, and its answer.
    """

    q: Floats  # [num_tokens, num_heads, head_dim]
    kv_cache: Floats  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    positions: list[int]  # of the tokens, each in its sequence
    tables: list[list[int]]  # the block table of each token's sequence
    out: Floats  # [num_tokens, num_heads, head_dim]


def record(llm: LLM, prompts: list[Any], params: SamplingParams) -> list[Recorded]:
    """Serve the prompts, and keep what went in and out of every attention."""
    backend: Any = llm.runner.backend
    attend_by_engine = backend.attend
    recorded: list[Recorded] = []
    tables: list[list[int]] = []

    def note(phase: str, batch: Any) -> None:
        if phase == "scheduled":
            tables.clear()
            first = 0
            for count, end in zip(batch.counts, batch.ends, strict=True):
                last = first + llm.block_manager.num_blocks_for(end)
                tables.extend([list(batch.block_ids[first:last])] * count)
                first = last

    def attend_and_keep(q: Any, kv_cache: Any, metadata: Any) -> Any:
        out = attend_by_engine(q, kv_cache, metadata)
        recorded.append(Recorded(
            to_numpy(q), to_numpy(kv_cache), metadata.positions.tolist(), list(tables),
            to_numpy(out).reshape(q.shape)))
        return out

    observers(llm).append(note)
    backend.attend = attend_and_keep
    try:
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        del backend.attend  # the method of its class again
        observers(llm).remove(note)
    return recorded


def to_numpy(tensor: Any) -> Floats:
    array: Floats = tensor.double().cpu().numpy().copy()
    return array


def max_difference(recorded: list[Recorded]) -> float:
    """The largest difference between the engine's answers and the formula's."""
    largest = 0.0
    for step in recorded:
        num_tokens, num_heads, _ = step.q.shape
        group_size = num_heads // step.kv_cache.shape[2]
        for token in range(num_tokens):
            for head in range(num_heads):
                blocks = step.kv_cache[:, :, head // group_size]
                expected = attend(step.q[token, head], blocks, step.tables[token],
                                  num_keys=step.positions[token] + 1)
                difference = np.abs(expected - step.out[token, head]).max()
                largest = max(largest, float(difference))
    return largest
