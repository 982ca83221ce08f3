"""K and V in int8: how exact attention is, how many blocks fit, and nothing gets lost.

    python int8_kv.py [number of random runs]
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from nanopaged import LLM, SamplingParams
from nanopaged.attention import Scoring
from nanopaged.batch import Batch

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 64, "max_position_embeddings": 128,
    "eos_token_id": None}
LENGTHS = [70, 1, 33]
ROUNDING = 1 / 254  # half a step, where the largest number is 127 steps


def engine(folder=None, **options):
    """A tiny model with large weights, so that it does not repeat itself; without a
    folder the bundled model.
    """
    if folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        options |= {"load_format": "dummy", "max_model_len": 32}
    defaults = {"device": "cpu", "dtype": "float32", "attention_backend": "torch",
                "kv_cache_dtype": "int8", "block_size": 4, "num_blocks": 64}
    llm = LLM(folder, **defaults | options)
    if folder:
        for weight in llm.engine.runner.model.parameters():
            weight.mul_(8 if weight.ndim > 1 else 1)
    return llm


def exact_attention(q, k, v):
    """float64; q: [num_heads, head_dim]; k, v: [num_kv_heads, num_keys, head_dim].

    Returns the result, and how far away one with rounded K and V may be. Scores that
    are wrong by at most e change each probability by a factor of at most exp(2e).
    """
    q, k, v = [x.double().numpy() for x in (q, k, v)]
    k, v = [x.repeat(len(q) // len(x), axis=0) for x in (k, v)]
    q = q / np.sqrt(q.shape[-1])
    scores = np.einsum("hd,hnd->hn", q, k)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    k_error, v_error = [abs(x).max(-1) * ROUNDING for x in (k, v)]
    score_error = (abs(q).sum(-1, keepdims=True) * k_error).max(-1)
    v_error, largest = v_error.max(-1), abs(v).max((1, 2))
    bound = v_error + np.expm1(2 * score_error) * (largest + v_error)
    return np.einsum("hn,hnd->hd", probs, v), bound[:, None]


def check_error(backend_name):
    """Against float64, with keys that differ in size: in chunks, then token by token.
    """
    generator = torch.Generator().manual_seed(3)
    with engine(attention_backend=backend_name) as llm:
        runner = llm.engine.runner
        backend, cache = runner.backend, runner.kv_caches[0]
    kv_heads, heads, dim = backend.num_kv_heads, 4, backend.head_dim
    tables = torch.randperm(63, generator=generator)[:60].view(3, 20)
    sizes = torch.rand(3, 80, 2 * kv_heads, 1, generator=generator) * 2
    kv = torch.randn(3, 80, 2 * kv_heads, dim, generator=generator) * sizes
    worst, squares = 0, []
    for counts, ends in [(LENGTHS, LENGTHS)] + [
            ([1, 1, 1], [length + i for length in LENGTHS]) for i in range(1, 6)]:
        q = torch.randn(sum(counts), heads, dim, generator=generator)
        # The part of each table that its sequence has filled, one after another.
        table = torch.cat([own[: -(-end // backend.block_size)]
                           for own, end in zip(tables, ends, strict=True)])
        metadata = runner.prepare(Batch(
            token_ids=[0] * sum(counts), counts=counts, ends=ends, block_ids=table,
            sample_entries=[0]))
        new = torch.cat([own[end - count : end]
                         for own, count, end in zip(kv, counts, ends, strict=True)])
        backend.store(*new.chunk(2, 1), cache, metadata.slots)
        out = backend.attend(q, cache, metadata, Scoring(dim**-0.5))
        owners, positions = metadata.entries, metadata.positions
        for i, (owner, position) in enumerate(zip(owners, positions, strict=True)):
            k, v = kv[owner, : position + 1].permute(1, 0, 2).chunk(2)
            exact, bound = exact_attention(q[i], k, v)
            error = abs(out[i].view(heads, dim).double().numpy() - exact)
            worst = max(worst, (error / (bound + 1e-6)).max())
            squares += [(error**2).mean(), (exact**2).mean()]
    error = np.sqrt(np.mean(squares[::2]) / np.mean(squares[1::2]))
    assert worst < 1, f"{backend_name}: {worst:.2f} times the bound"
    assert error < 0.01, f"{backend_name}: an error of {error:.2%}"
    return error


def count_blocks(**options):
    """How many blocks of 1024 tokens the engine takes for 4 GiB."""
    with engine(num_blocks=None, block_size=1024, max_num_seqs=1 << 14,
                **options) as llm:
        assert llm.engine.runner.kv_caches.nbytes <= 1.01 * (4 << 30)
        return llm.engine.runner.num_blocks


def check_text():
    """The bundled model is as sure of its tokens as before."""
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=0, ignore_eos=True)
    answers = []
    for kv_cache_dtype in ("auto", "int8"):
        with engine(kv_cache_dtype=kv_cache_dtype) as llm:
            output = llm.generate("ROMEO:\nGood morrow", params, use_tqdm=False)[0]
            answers.append([p[token].logprob for p, token in zip(
                output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)])
    difference = abs(np.subtract(*answers)[:6]).max()
    assert difference < 0.1, difference


def check_tokens(folder, run, roomy):
    """In a tiny pool, with preemption, swap and copies: as in a roomy one."""
    rng = random.Random(run)
    prompts = [[*range(rng.choice([0, 5, 9])), *rng.choices(range(64), k=5)]
               for _ in range(5)]
    params = [SamplingParams(temperature=0, n=rng.choice([1, 3]), max_tokens=12)
              for _ in prompts]
    llm = engine(folder, num_blocks=rng.randrange(20, 24), max_num_batched_tokens=16,
                 preemption_mode=rng.choice(["recompute", "swap"]))
    answers = [[[c.token_ids for c in output.outputs]
                for output in served_by.generate(prompts, params, use_tqdm=False)]
               for served_by in (llm, roomy)]
    assert answers[0] == answers[1], f"run {run}"
    stats = llm.stats()
    assert stats.blocks_used == 0
    return stats.preemptions_recompute + stats.preemptions_swap


def main(num_runs=10):
    errors = [check_error(name) for name in ("torch", "numba")]
    num_blocks = count_blocks()
    for dtype, factor in [("bfloat16", 1.85), ("float32", 3.7)]:
        num_plain = count_blocks(dtype=dtype, kv_cache_dtype="auto")
        assert num_blocks >= factor * num_plain, (dtype, num_blocks, num_plain)
    check_text()
    with tempfile.TemporaryDirectory() as folder:
        roomy = engine(folder, num_blocks=300)
        total = sum(check_tokens(folder, run, roomy) for run in range(num_runs))
    print(f"K and V in int8: an error of {max(errors):.2%}, {num_blocks} blocks where "
          f"float32 has {num_plain}, and {num_runs} random runs with {total} "
          "preemptions lost no token.")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
