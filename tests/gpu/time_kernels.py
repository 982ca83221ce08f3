"""Every kernel against what the device can do, and against what torch has for it.

    python tests/gpu/time_kernels.py --json FILE
    compute-sanitizer python tests/gpu/time_kernels.py --once  # every kernel, no timing
    TRITON_INTERPRET=1 python tests/gpu/time_kernels.py --shape tiny  # without a GPU

Rates count what must be done: for decodes K and V of all keys once, for prompts the
operations of causal attention, for moves reads and writes. Our K and V lie in scattered
blocks; torch's are gathered before, at no cost. Every call is a replayed CUDA graph, as
in the engine, after a flush of the L2 cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import bench
from nanopaged import LLM
from nanopaged.attention import TorchAttention
from nanopaged.model_runner import record_cuda_graph
from nanopaged.scheduler import Batch, ControlMessage
from nanopaged.tour.limits import fastest, machine_limits
from nanopaged.triton_attention import FlashAttention, TritonAttention

Figures: TypeAlias = "dict[str, Any]"
Seqs: TypeAlias = (
    "list[tuple[int, int]]"  # tokens in the cache, new tokens, of every sequence
)
Way: TypeAlias = "Callable[[], Any]"


def spread_lengths(count: int, shortest: int, longest: int) -> Seqs:
    """Decodes of different lengths, long and short ones mixed."""
    lengths = [shortest + (longest - shortest) * i // (count - 1) for i in range(count)]
    return [(lengths[97 * i % count] - 1, 1) for i in range(count)]


@dataclass
class Shapes:
    """What is timed, and with how many heads, KV heads and numbers a head."""

    heads: tuple[int, int, int]
    num_layers: int
    num_blocks: int  # half of them are copied
    num_stored: int
    seqs: dict[str, Seqs]
    block_size: int = 16


QWEN3 = Shapes(
    heads=(16, 8, 128),
    num_layers=28,
    num_blocks=256,
    num_stored=8192,
    seqs={
        **{f"decode {n} x 1024": [(1023, 1)] * n for n in (64, 128, 256)},
        **{f"decode {n} x 4096": [(4095, 1)] * n for n in (1, 64, 128, 256)},
        "decode 256 x 100..2048": spread_lengths(256, 100, 2048),
        "decode 63 x 500, 1 x 32768": [(499, 1)] * 63 + [(32767, 1)],
        **{f"prefill {n}": [(0, n)] for n in (1024, 4096, 16384)},
        "prefill 2048 after 6144": [(6144, 2048)],
    },
)
TINY = Shapes(
    heads=(4, 2, 16),
    num_layers=2,
    num_blocks=4,
    num_stored=8,
    seqs={
        "decode 2 x 24": [(23, 1)] * 2,
        "decode 1 x 300": [(299, 1)],
        "decode mixed": [(4, 1), (19, 1)],
        "prefill 40": [(0, 40)],
        "prefill 8 after 20": [(20, 8)],
    },
)


@dataclass
class Task:
    """Something to time: our way, torch's ways to the same, and the work it takes."""

    ours: Way
    work: int  # bytes, or operations
    limit: str  # of `machine_limits`
    torch: dict[str, Way] = field(default_factory=dict)
    variants: dict[str, Way] = field(
        default_factory=dict
    )  # ours, as the engine does not
    graph: bool = True  # whether it can be recorded


# -- timing ----------------------------------------------------------------------------


def seconds_of(way: Way, device: torch.device, graph: bool) -> Figures:
    if device.type == "cpu":
        way()  # in the interpreter: no figure to look at
        return {"median_s": fastest(way, device, runs=1)}
    from triton.testing import do_bench

    if graph:
        place = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        way, _ = record_cuda_graph(*place, way)
    median, low, high = do_bench(way, warmup=20, rep=200, quantiles=[0.5, 0.1, 0.9])
    return {"median_s": median / 1e3, "p10_s": low / 1e3, "p90_s": high / 1e3}


def attempt(way: Callable[..., Figures], *arguments: Any) -> Figures:
    try:
        return way(*arguments)
    except Exception as error:
        return {"unavailable": f"{type(error).__name__}: {error}"}


def measure(task: Task, limits: Figures, device: torch.device) -> Figures:
    """`failed` if our result differs from torch's: right first, then fast."""
    run = {"work": task.work, **seconds_of(task.ours, device, task.graph)}
    run["rate"] = task.work / run["median_s"]
    run["share"] = run["rate"] / limits[task.limit]
    run["variants"] = {}
    for name, way in task.variants.items():
        run["variants"][name] = attempt(seconds_of, way, device, task.graph)

    run["torch"] = {}
    for name, way in task.torch.items():
        run["torch"][name] = peer = attempt(seconds_of, way, device, task.graph)
        if "unavailable" in peer:  # a way that this torch does not have
            continue
        peer["difference"] = difference(task.ours(), way())
        if not peer["difference"] < 2e-2:
            run["failed"] = f"differs from torch's {name} by {peer['difference']:.2g}"
        if peer["median_s"] < run.get("torch_s", 1e9):
            run["torch_s"] = peer["median_s"]
            run["fastest torch"] = name
    if "torch_s" in run:
        run["ratio"] = run["torch_s"] / run["median_s"]  # above 1: we are faster
    return run


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Relative."""
    theirs = theirs.float()
    error = (ours.view(theirs.shape).float() - theirs).norm() / theirs.norm()
    return error.item()


# -- tasks -----------------------------------------------------------------------------


def attention_task(
    seqs: Seqs, shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> Task:
    """One layer's attention of a step."""
    num_heads, kv_heads, head_dim = shapes.heads
    size = shapes.block_size
    past, new = (np.array(column) for column in zip(*seqs, strict=True))
    width = -(-int((past + new).max()) // size)
    num_blocks = int((-(-(past + new) // size)).sum())
    order = np.random.default_rng(0).permutation(num_blocks)
    tables = np.zeros((len(seqs), width), np.int64)
    taken = 0
    for row, length in enumerate((past + new).tolist()):
        count = -(-length // size)
        tables[row, :count] = order[taken : taken + count]
        taken += count

    cache = torch.randn(
        num_blocks, 2, kv_heads, size, head_dim, device=device, dtype=dtype
    )
    q = torch.randn(int(new.sum()), num_heads, head_dim, device=device, dtype=dtype)
    backend = TritonAttention(*shapes.heads, size, dtype, device)
    metadata = backend.prepare(tables, past, new)
    if new.max() == 1:
        keys = int((past + new).sum())
        work = 2 * keys * kv_heads * head_dim * dtype.itemsize
        limit = "copy_bytes_per_s"
    else:
        pairs = int((new * past + new * (new + 1) // 2).sum())
        work = 4 * num_heads * head_dim * pairs
        limit = "flops_per_s"
    task = Task(partial(backend.attend, q, cache, metadata), work, limit)
    if len(set(seqs)) == 1:  # torch's wants all of one length
        blocks = cache[torch.from_numpy(tables).to(device)].permute(2, 0, 3, 1, 4, 5)
        dense = blocks.reshape(2, len(seqs), kv_heads, -1, head_dim)[
            ..., : sum(seqs[0]), :
        ]
        task.torch = torch_attention(q, *dense.contiguous(), *seqs[0])
    if new.max() > 1:
        task.variants = flash_attention(q, kv_heads, past, new)
    return task


def flash_attention(q: Tensor, kv_heads: int, past: Any, new: Any) -> dict[str, Way]:
    """The flash backend, in blocks of the size that it can read."""
    size = 256
    try:
        backend = FlashAttention(
            *q.shape[1:2], kv_heads, q.shape[2], size, q.dtype, q.device
        )
    except ValueError:  # flash-attn is not installed
        return {}
    width = -(-int((past + new).max()) // size)
    tables = np.arange(len(past) * width).reshape(len(past), width)
    shape = tables.size, 2, kv_heads, size, q.shape[2]
    cache = torch.randn(shape, device=q.device, dtype=q.dtype)
    return {
        "flash": partial(backend.attend, q, cache, backend.prepare(tables, past, new))
    }


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, past: int, new: int
) -> dict[str, Way]:
    """q: [num_tokens, num_heads, head_dim]; k, v: [num_seqs, num_kv_heads, keys,
    head_dim]
    """
    num_seqs, kv_heads, keys, head_dim = k.shape
    attend = F.scaled_dot_product_attention
    if new == 1:  # a group's query heads are rows of one product: K and V are read once
        rows = q.view(num_seqs, kv_heads, -1, head_dim)
        return {"sdpa": lambda: attend(rows, k, v).reshape(num_seqs, -1)}

    group_size = q.shape[1] // kv_heads
    k = k.repeat_interleave(group_size, 1)
    v = v.repeat_interleave(group_size, 1)
    heads = q.transpose(0, 1)[None].contiguous()  # [1, num_heads, num_tokens, head_dim]

    def dense(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            out = attend(heads, k, v, is_causal=True)
        return out[0].transpose(0, 1).flatten(1)

    def masked() -> Tensor:
        return attend(heads, k, v, mask)[0].transpose(0, 1).flatten(1)

    if past:
        mask = torch.ones(new, keys, dtype=torch.bool, device=q.device).tril(past)
        ways: dict[str, Way] = {"sdpa, mask": masked}
        if q.is_cuda:
            flat = [x[0].transpose(0, 1).contiguous() for x in (k, v)]
            ways["varlen"] = partial(varlen, q, *flat)
        return ways
    if q.is_cuda:
        return {
            "flash": partial(dense, SDPBackend.FLASH_ATTENTION),
            "cudnn": partial(dense, SDPBackend.CUDNN_ATTENTION),
        }
    return {"sdpa": partial(dense, SDPBackend.MATH)}


def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v: [tokens, num_heads, head_dim] of one sequence"""
    from torch.nn.attention.varlen import varlen_attn

    ends = [
        torch.tensor([0, len(x)], device=q.device, dtype=torch.int32) for x in (q, k)
    ]
    out: Any = varlen_attn(q, k, v, *ends, len(q), len(k), window_size=(-1, 0))
    return out.flatten(1)


def store_task(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Task:
    """Q and K of a step's tokens are normalised and rotated, K and V go to their slots.
    """
    num_heads, kv_heads, head_dim = shapes.heads
    count = shapes.num_stored
    options: Any = {"device": device, "dtype": dtype}
    qkv = torch.randn(count, num_heads + 2 * kv_heads, head_dim, **options)
    weights = [torch.rand(head_dim, **options) for _ in range(2)]
    rotation = torch.randn(2, count, 1, head_dim, **options).unbind()
    num_blocks = -(-count // shapes.block_size)
    tables = np.random.default_rng(0).permutation(num_blocks)[None]
    where = tables, np.zeros(1, np.int64), np.array([count])

    def into(kind: Any) -> Way:
        backend = kind(*shapes.heads, shapes.block_size, dtype, device)
        metadata = backend.prepare(*where)
        shape = num_blocks, 2, kv_heads, shapes.block_size, head_dim
        cache = torch.zeros(shape, **options)

        def store() -> Tensor:
            backend.rotate_and_store(qkv, weights, 1e-6, rotation, cache, metadata)
            return cache

        return store

    work = 2 * qkv.nbytes  # read and written
    torch_way = {"torch": into(TorchAttention)}
    return Task(into(TritonAttention), work, "copy_bytes_per_s", torch_way)


def copy_task(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Task:
    """Copy-on-write of many blocks: a step that does nothing else, so not recorded."""
    num_heads, kv_heads, head_dim = shapes.heads
    sizes = bench.SHAPES["tiny"] | {
        "num_hidden_layers": shapes.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            bench.write_config(folder, sizes),
            load_format="dummy",
            dtype=str(dtype).removeprefix("torch."),
            device=device.type,
            num_blocks=shapes.num_blocks,
            swap_space=0,
            enforce_eager=True,
        )
    half = shapes.num_blocks // 2
    order = np.random.default_rng(0).permutation(shapes.num_blocks).tolist()
    message = ControlMessage(copies=list(zip(order[:half], order[half:], strict=True)))
    copy = partial(llm.runner.execute, Batch(message=message))
    work = llm.runner.kv_caches.nbytes  # half of it, read and written
    return Task(copy, work, "copy_bytes_per_s", graph=False)


def make_tasks(
    shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], Task]]:
    tasks: dict[str, Callable[[], Task]] = {}
    for name, seqs in shapes.seqs.items():
        tasks[name] = partial(attention_task, seqs, shapes, dtype, device)
    tasks[f"store {shapes.num_stored}"] = partial(store_task, shapes, dtype, device)
    copied = f"copy {shapes.num_blocks // 2} blocks"
    tasks[copied] = partial(copy_task, shapes, dtype, device)
    return tasks


# -- the command line ------------------------------------------------------------------


def time_kernels(tasks: dict[str, Callable[[], Task]], device: torch.device) -> Figures:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    limits = machine_limits(device, dtype)
    figures: Figures = {}
    rows: Figures = {"limits": limits}
    for name, make in tasks.items():
        try:
            figures[name] = measure(make(), limits, device)
        except Exception as error:
            figures[name] = {"failed": f"{type(error).__name__}: {error}"}
        gc.collect()
        torch.cuda.empty_cache()
    bench.show("limits", rows)
    bench.show("kernels; ratio: how much faster ours is", figures)
    for name, run in figures.items():
        bench.show(
            f"{name}: torch's ways, and other ones of ours",
            {**run.get("torch", {}), **run.get("variants", {})},
        )
    return figures | rows


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--shape", choices=("qwen3-0.6b", "tiny"), default="qwen3-0.6b")
    parser.add_argument("--once", action="store_true", help="tiny shapes, no timing")
    args = parser.parse_args(argv)

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (torch.cuda.is_available() or interpreted):
        raise SystemExit("this needs a CUDA device; or TRITON_INTERPRET=1 --shape tiny")
    device = torch.device("cpu" if interpreted else "cuda")
    dtype = (
        torch.float32 if interpreted else torch.bfloat16
    )  # the interpreter has no bf16
    tasks = make_tasks(TINY if args.once or interpreted else QWEN3, dtype, device)
    if args.once:
        for make in tasks.values():
            make().ours()
        return 0

    figures = time_kernels(tasks, device)
    report = {"machine": bench.machine(), "kernels": figures}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(any("failed" in run for run in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
