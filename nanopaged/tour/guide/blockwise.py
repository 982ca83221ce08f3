"""The paper's blockwise attention in NumPy: its equation 4, one query at a time.

Nothing here is fast. It is the formula, and the engine's attention must agree with it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanopaged import LLM, SamplingParams

Floats = NDArray[np.float64]


def attend(query: Floats, blocks: Floats, block_table: list[int], num_keys: int
           ) -> Floats:
    """What one query sees: the mean of the values, weighted by exp(query . key).

    query: [head_dim]; blocks: [num_blocks, 2, block_size, head_dim], one KV head of the
    pool; the sequence's first `num_keys` tokens are in the first blocks of the table.
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

        # If this block has a higher score, shrink the sums so far.
        higher = max(highest, scores.max())
        shrink = np.exp(highest - higher)  # 0 for the first block
        weights = np.exp(scores - higher)
        numerator = numerator * shrink + weights @ values
        denominator = denominator * shrink + weights.sum()
        highest = higher
    return numerator / denominator


@contextmanager
def looking(llm: LLM, look: Callable[..., None]) -> Iterator[None]:
    """Call `look` with what the engine's attention gets and gives, in every layer."""
    backend: Any = llm.engine.runner.backend
    attend_by_engine = backend.attend

    def attend_and_look(q: Any, kv_cache: Any, metadata: Any, *how: Any) -> Any:
        out = attend_by_engine(q, kv_cache, metadata, *how)
        look(q, kv_cache, metadata, out)
        return out

    backend.attend = attend_and_look
    try:
        yield
    finally:
        del backend.attend  # the method of its class again


def compare(llm: LLM, prompts: list[Any], params: SamplingParams
            ) -> tuple[Floats, Floats]:
    """Serve the prompts. Returns what `attend` gives for every token, layer and head,
    and what the engine's attention gave: [number, head_dim] each.
    """
    backend: Any = llm.engine.runner.backend
    expected: list[Floats] = []
    given: list[Floats] = []

    def look(q: Any, kv_cache: Any, metadata: Any, out: Any) -> None:
        given.extend(out.double().reshape(-1, backend.head_dim).numpy())
        blocks = kv_cache.double().numpy()
        queries = iter(q.double().numpy())
        tables = metadata.block_tables.tolist()
        for count, end in zip(metadata.counts, metadata.ends, strict=True):
            for position in range(end - count, end):
                for head, query in enumerate(next(queries)):
                    kv_head = blocks[:, :, head // backend.group_size]
                    result = attend(query, kv_head, tables, num_keys=position + 1)
                    expected.append(result)
            # On to the next one.
            del tables[: llm.engine.block_manager.num_blocks_for(end)]

    with looking(llm, look):
        llm.generate(prompts, params, use_tqdm=False)
    return np.array(expected), np.array(given)


def example(llm: LLM, prompt: str) -> dict[str, Any]:
    """One query of a decode: for each block the scores of its keys and one number of
    each value, and the same number of the result that the engine's kernel gave.
    """
    scale, size = llm.engine.runner.backend.head_dim**-0.5, llm.config.block_size
    # Of the last layer of the last step:
    seen: dict[str, Any] = {"pool_size": llm.config.num_blocks}

    def look(q: Any, kv_cache: Any, metadata: Any, out: Any) -> None:
        blocks = []
        for j, block in enumerate(metadata.block_tables.tolist()):
            num_here = int(metadata.ends[0]) - j * size
            keys, values = kv_cache[block, :, 0, :num_here]
            scores = keys @ q[-1, 0] * scale
            blocks.append({"id": block, "scores": scores.tolist(),
                           "values": values[:, 0].tolist()})
        seen.update(blocks=blocks, result=float(out[-1, 0]))

    with looking(llm, look):
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2),
                     use_tqdm=False)
    return seen
