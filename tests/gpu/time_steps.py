"""How much of the time of a decode step the device runs nothing, and what it runs.

    python tests/gpu/time_steps.py --batch-sizes 1 256 --prompt-len 512

The step's time is that of steps that are not profiled. Busy time is the union of all
kernels and copies that torch.profiler saw in as many steps; on a CPU, of torch's
operators.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import bench
from nanopaged import LLM


def bench_timeline(args: argparse.Namespace) -> dict[str, Any]:
    count = max(args.batch_sizes)
    llm = bench.make_engine(args, enable_prefix_caching=False, max_num_seqs=count)
    vocab_size = llm.model_config.vocab_size
    random.seed(args.seed)
    prompts = [bench.random_prompt(args.prompt_len, vocab_size) for _ in range(count)]
    bench.generate(llm, [(prompt, 4) for prompt in prompts], args.temperature)

    figures: dict[str, Any] = {}
    for size in args.batch_sizes:
        for prompt in prompts[:size]:
            llm.add_request(
                prompt, bench.sampling(2 * args.tokens + 64, args.temperature)
            )
        decoding = 0
        while decoding < size:
            outputs = llm.step()
            decoding = sum(len(output.outputs[0].token_ids) > 1 for output in outputs)
        figures[str(size)] = watch(llm, args.tokens)
        while llm.has_unfinished_requests():
            llm.step()
    llm.shutdown()

    bench.show(f"decode steps, {args.prompt_len} tokens and more a sequence", figures)
    for name, seconds in figures[str(size)]["kernels_s"].items():
        print(f"  {seconds * 1e6:10,.1f} us a step  {name}")
    return figures


def watch(llm: LLM, steps: int) -> dict[str, Any]:
    """Seconds of a step, of a profiled one, and of busy device time in that."""
    on_gpu = llm.runner.device.type == "cuda"
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)

    def run() -> float:
        wait()
        began = time.perf_counter()
        for _ in range(steps):
            llm.step()
        wait()
        return (time.perf_counter() - began) / steps

    wall = run()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        profiled = run()

    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in profiler.events() or () if event.device_type == kind]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    busy = covered(spans) / 1e6 / steps
    spent: Counter[str] = Counter()
    for event, (start, end) in zip(events, spans, strict=True):
        spent[event.name[:80]] += (end - start) / 1e6 / steps
    return {
        "step_s": wall,
        "profiled_step_s": profiled,
        "busy_s": busy,
        "idle_share": max(0.0, 1 - busy / wall),
        "profiled_idle_share": 1 - busy / profiled,
        "events_per_step": len(events) / steps,
        "kernels_s": dict(spent.most_common(15)),
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of what these intervals cover."""
    total = 0.0
    reached = -inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


if __name__ == "__main__":
    bench.COMMANDS["timeline"] = bench_timeline
    sys.exit(bench.main(["timeline", *sys.argv[1:]]))
