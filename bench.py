"""Measure nanopaged, beside transformers and beside what the machine could do at best.

    python bench.py                           # 32 requests, Qwen3-0.6B's shape, random weights
    python bench.py --vs transformers         # the same requests through transformers; the ratio
    python bench.py --full                    # nano-vllm's reference workload; wants a GPU
    python bench.py --shared-prefix 512       # prompts that begin alike
    python bench.py --model DIR --threads 4   # a checkpoint
    python bench.py decode --vs transformers  # tokens/s by batch size, and of prefill
    python bench.py host                      # what a step costs outside the model
    python bench.py prefix                    # a second request with a prefix that was seen before
    python bench.py memory --plots DIR        # the paper's memory results, its numbers beside ours
    python bench.py kernels                   # each kernel, and torch's attention; wants a GPU
    python bench.py timeline                  # what of a decode step the device idles, and why
    python bench.py gpu --json FILE           # every test and figure that wants a GPU: 8 minutes
    python bench.py decode --shape tiny --repeats 1 --json out.json  # in seconds; all to a file

Random weights cost what trained ones cost. Every measurement follows a warm-up; figures are medians
over `--repeats` runs, ratios come from one process on one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pickle
import platform
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from heapq import heappop, heappush
from itertools import cycle
from logging import CRITICAL, getLogger
from math import inf
from pathlib import Path
from statistics import NormalDist, mean, median
from textwrap import fill
from types import SimpleNamespace
from typing import Any, TypeAlias
from xml.etree import ElementTree

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType

import nanopaged
from nanopaged import LLM, BeamSearchParams, RequestOutput, SamplingParams
from nanopaged.attention import FlashAttention, TorchAttention, TritonAttention
from nanopaged.block_manager import BlockManager
from nanopaged.config import EngineConfig
from nanopaged.model import Linear
from nanopaged.model_runner import ModelRunner, record_cuda_graph
from nanopaged.sampler import SamplerOutput
from nanopaged.scheduler import Scheduler
from nanopaged.sequence import SequenceGroup

Figures: TypeAlias = "dict[str, Any]"
Requests: TypeAlias = "list[tuple[list[int], int]]"  # token ids of the prompt, tokens to generate

# Arguments of Qwen3Config: layers, hidden and MLP size, heads, KV heads, head_dim, vocabulary.
SHAPES = {
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 128, 151936),
    "shakespeare": (6, 256, 768, 4, 2, 64, 512),  # the bundled model's
    "tiny": (2, 64, 128, 4, 2, 16, 256),
}
HOST_VOCAB = 16  # of the stand-in for a model
PREFILL_BATCH = 32


# -- what is run ---------------------------------------------------------------------------------


def write_config(folder: Path, shape: str, **changes: Any) -> str:
    """A model directory with nothing but a config.json: enough for random weights."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
             "num_key_value_heads", "head_dim", "vocab_size")  # fmt: skip
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "dtype": "bfloat16",
        **dict(zip(names, SHAPES[shape], strict=True)), **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make_engine(args: argparse.Namespace, **changes: Any) -> LLM:
    options = {
        "model": args.model, "load_format": args.load_format, "dtype": args.dtype,
        "device": args.device, "block_size": args.block_size, "num_blocks": args.num_blocks,
        "max_num_seqs": args.max_num_seqs, "max_num_batched_tokens": args.max_num_batched_tokens,
        "enforce_eager": args.enforce_eager, "seed": args.seed,
        "attention_backend": args.attention_backend,
        "tensor_parallel_size": args.tensor_parallel_size,
    }  # fmt: skip
    llm = LLM(**{**options, **changes})
    if args.steps_ahead is not None:
        llm.steps_ahead = args.steps_ahead
    llm.runner.kv_caches.zero_()  # fault its pages in, as on a server that has run for a while
    return llm


def random_prompt(length: int, vocab_size: int) -> list[int]:
    return [random.randint(0, min(10_000, vocab_size - 1)) for _ in range(length)]


def workload(args: argparse.Namespace, vocab_size: int) -> Requests:
    """nano-vllm's: the same draws in the same order, so the same lengths and (vocabulary
    permitting) the same tokens for the same arguments. A shared prefix comes on top."""
    random.seed(args.seed)
    count = range(args.requests)
    prompts = [random_prompt(random.randint(*args.input_len), vocab_size) for _ in count]
    lengths = [random.randint(*args.output_len) for _ in count]
    prefix = random_prompt(args.shared_prefix, vocab_size)
    return [(prefix + prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]


def sampling(temperature: float, max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)


def generate(llm: LLM, requests: Requests, temperature: float) -> list[RequestOutput]:
    prompts: list[Any] = [prompt for prompt, _ in requests]
    params = [sampling(temperature, length) for _, length in requests]
    return llm.generate(prompts, params, use_tqdm=False)


def warm_up_requests(vocab_size: int) -> Requests:
    random.seed(-1)  # not the measured prompts: those are to find an empty prefix cache
    return [(random_prompt(24, vocab_size), 4) for _ in range(4)]


# -- what the machine can do ---------------------------------------------------------------------


def fastest(function: Callable[[], Any], device: torch.device, runs: int = 5) -> float:
    """Seconds of the fastest run: a limit is what was reached once."""
    seconds = []
    for _ in range(runs + 1):
        if device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            function()
            events[1].record()
            events[1].synchronize()
            seconds.append(events[0].elapsed_time(events[1]) / 1e3)
            continue
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def machine_limits(device: torch.device, dtype: torch.dtype) -> Figures:
    """Measured bytes/s and FLOP/s.

    Bytes: a large copy (its reads and its writes), or one row times 268 MB (in bf16) of matrices
    (reads), whichever is faster. Operations: 256 and more rows times two of these matrices.
    The matrices are the engine's `Linear`, packed where the engine packs.
    """
    layers = [Linear(2048, {"": 8192}, bias=False).to(device, dtype) for _ in range(8)]
    for layer in layers:
        layer.requires_grad_(False).weight.normal_()
        layer.pack()

    def multiply(rows: int, count: int) -> float:
        x = torch.randn(rows, 2048).to(device, dtype)
        return fastest(lambda: [layer(x) for layer in layers[:count]], device)

    size = 2048 * 8192
    source = torch.ones(2**28 if device.type == "cpu" else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / fastest(lambda: target.copy_(source), device)
    read = 8 * size * dtype.itemsize / multiply(1, 8)
    rows = (256, 1024) if device.type == "cpu" else (1024, 8192)
    flops = max(2 * count * 2 * size / multiply(count, 2) for count in rows)
    return {"copy_bytes_per_s": copy, "read_bytes_per_s": read, "bytes_per_s": max(copy, read),
            "flops_per_s": flops}  # fmt: skip


def floor(requests: Requests, cached: int, llm: LLM, limits: Figures) -> Figures:
    """The least time in which this machine could serve `requests`, `cached` prompt tokens aside.

    Bytes: all weights once a step, in as few steps as the longest output (and max_num_seqs) allow;
    K and V of its whole context for every generated token but the first of a request, and of the
    prompt once. Operations: 2 for every weight and token (output head: for generated tokens only),
    and 4 x heads x head_dim for every query and key in every layer. Neither activations nor writes
    count, and bytes and operations are taken to overlap perfectly: the floor is the larger one.
    """
    c, layers = llm.model_config, llm.model_config.num_hidden_layers
    heads_size = 2 * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim  # q, o, k, v
    layer_weights = layers * c.hidden_size * (heads_size + 3 * c.intermediate_size)
    head_weights = c.vocab_size * c.hidden_size
    tokens_in, tokens_out = (sum(x) for x in zip(*((len(p), n) for p, n in requests), strict=True))
    longest = max(length for _, length in requests)
    steps = max(longest, -(-tokens_out // llm.config.max_num_seqs))
    # p prompt tokens and n generated ones: n - 1 decodes, with p + 1 .. p + n - 1 keys.
    decode_keys = sum((n - 1) * len(p) + n * (n - 1) // 2 for p, n in requests)
    prompt_pairs = sum(len(p) * (len(p) + 1) // 2 for p, _ in requests) * (1 - cached / tokens_in)
    weight_bytes = steps * (layer_weights + head_weights) * llm.runner.dtype.itemsize
    kv_bytes = (decode_keys + tokens_in) * llm.runner.token_bytes
    forwarded = tokens_in - cached + tokens_out - len(requests)
    flops = 2 * layer_weights * forwarded + 2 * head_weights * tokens_out
    flops += 4 * layers * c.num_attention_heads * c.head_dim * (decode_keys + prompt_pairs)
    bytes_s = (weight_bytes + kv_bytes) / limits["bytes_per_s"]
    flops_s = flops / limits["flops_per_s"]
    return {"weight_bytes": weight_bytes, "kv_bytes": kv_bytes, "flops": flops,
            "bytes_s": bytes_s, "flops_s": flops_s, "floor_s": max(bytes_s, flops_s)}  # fmt: skip


# -- the other engine ----------------------------------------------------------------------------


class Transformers:
    """transformers with the same shape, dtype, device and threads, and the same requests."""

    def __init__(self, args: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        # It misses psutil, which it needs for defaults that we set. What fails raises below.
        getLogger("ContinuousBatchingLogger").setLevel(CRITICAL)
        options = {"dtype": dtype, "attn_implementation": "sdpa"}
        if args.load_format == "dummy":
            config = AutoConfig.from_pretrained(args.model)
            self.model = AutoModelForCausalLM.from_config(config, **options)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(args.model, **options)
        self.model = self.model.to(device).eval()

    def static(self, requests: Requests, temperature: float, batch: int) -> float:
        """Seconds for all, `batch` at a time; each batch runs to the longest output in it."""
        began = time.perf_counter()
        for first in range(0, len(requests), batch):
            prompts, lengths = zip(*requests[first : first + batch], strict=True)
            self.generate(list(prompts), max(lengths), temperature)
        return time.perf_counter() - began

    def generate(self, prompts: list[list[int]], length: int, temperature: float) -> list[float]:
        """One left-padded batch; returns when each of its `length` tokens had been chosen."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        times: list[float] = []

        def clock(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            done = torch.full((len(ids),), len(times) + 1 >= length, device=ids.device)
            done.tolist()  # wait for the device
            times.append(time.perf_counter())
            return done

        with torch.inference_mode():
            self.model.generate(
                ids.to(self.model.device), attention_mask=mask.to(self.model.device),
                generation_config=self._config(temperature, length), stopping_criteria=[clock],
            )  # fmt: skip
        if len(times) != length:
            raise RuntimeError(f"transformers generated {len(times)} tokens instead of {length}")
        return times

    def continuous(self, requests: Requests, temperature: float) -> float:
        """Seconds for all by continuous batching, once it has been set up.

        This is the body of `generate_batch`, which knows only one output length for all requests.
        """
        from transformers import ContinuousBatchingConfig

        # On a CPU a step is one masked product of all its queries with all its keys per layer, and
        # the default pool is 60% of the memory: so a small budget and pool. On a GPU: its defaults.
        options = {}
        if self.model.device.type == "cpu":
            blocks = sum(-(-(len(prompt) + length) // 32) for prompt, length in requests) + 8
            options = {"page_size": 32, "num_blocks": blocks, "max_batch_tokens": 256}
        longest = max(length for _, length in requests)
        with self.model.continuous_batching_context_manager(
            generation_config=self._config(temperature, longest), timeout=5,
            continuous_batching_config=ContinuousBatchingConfig(**options),
        ) as manager:  # fmt: skip
            began = time.perf_counter()
            for prompt, length in requests:
                manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
            done: list[int] = []
            while len(done) < len(requests):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("transformers' generation thread ended early")
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    done.append(len(result.generated_tokens))
            seconds = time.perf_counter() - began
        if sum(done) != sum(length for _, length in requests):
            raise RuntimeError(f"transformers generated {sum(done)} tokens, not those asked for")
        return seconds

    def _config(self, temperature: float, length: int) -> Any:
        from transformers import GenerationConfig

        # top_k and top_p off: what we compute, and less work than its default of top_k=50.
        choice: Figures = {"do_sample": False}
        if temperature:
            choice = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        return GenerationConfig(**choice, eos_token_id=-1, max_new_tokens=length, pad_token_id=0)


# -- the measurements ----------------------------------------------------------------------------


def repeat(way: Callable[..., float], warm_up: Any, real: Any, repeats: int) -> Figures:
    """Median of `way(real)` over `repeats` runs, after `way(warm_up)`."""
    way(warm_up)
    runs = [way(real) for _ in range(repeats)]
    return {"median": median(runs), "runs": runs}


def attempt(function: Callable[[], Figures]) -> Figures:
    """A peer's failure is a finding, not the end of the run."""
    try:
        return function()
    except Exception as error:  # whatever another project may raise
        return {"failed": f"{type(error).__name__}: {error}"}


@contextlib.contextmanager
def timed(llm: LLM) -> Iterator[dict[str, list[float]]]:
    """The seconds of every call of the parts of a step; model and sampler are inside execute."""
    spent: dict[str, list[float]] = {}
    parts = [(llm.scheduler, "schedule"), (llm.scheduler, "update"), (llm.runner, "execute"),
             (llm.runner, "model"), (llm.runner.sampler, "sample"),
             (llm.ranks, "send")]  # fmt: skip
    originals = [getattr(owner, name) for owner, name in parts]

    def wrap(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments)
            seconds.append(time.perf_counter() - began)
            return result

        return run

    for (owner, name), original in zip(parts, originals, strict=True):
        spent[name] = []
        setattr(owner, name, wrap(original, spent[name]))
    try:
        yield spent
    finally:
        for (owner, name), original in zip(parts, originals, strict=True):
            setattr(owner, name, original)


def host_parts(spent: dict[str, list[float]]) -> list[Figures]:
    """What every step cost outside model and sampler: the scheduler's part and the inputs'.

    Not counted either, and told by itself: the message to other ranks.
    """
    parts = []
    for values in zip(*spent.values(), strict=True):
        seconds = dict(zip(spent, values, strict=True))
        inputs = seconds["execute"] - seconds["model"] - seconds["sample"] - seconds["send"]
        parts.append({
            "schedule_s": seconds["schedule"], "inputs_s": inputs, "update_s": seconds["update"],
            "step_s": seconds["schedule"] + inputs + seconds["update"],
            "sampler_s": seconds["sample"], "message_s": seconds["send"]})  # fmt: skip
    return parts


def summary(values: list[float]) -> Figures:
    return {"mean": mean(values), "p50": median(values), "p99": float(np.percentile(values, 99))}


def serve_once(llm: LLM, requests: Requests, temperature: float) -> Figures:
    llm.blocks.published.clear()  # no run profits from the one before it
    before, running, filled = asdict(llm.stats()), [], []
    every = max(1, max(length for _, length in requests) // 16)
    with timed(llm) as parts:
        execute = llm.runner.execute

        def note(batch: Any) -> Any:  # in every step, or in some, as counting filled blocks is slow
            running.append(len(batch.rows))
            if len(running) % every == 0:
                filled.append(llm.stats().kv_utilisation)
            return execute(batch)

        llm.runner.execute = note  # type: ignore[method-assign]
        began = time.perf_counter()
        outputs = generate(llm, requests, temperature)
        seconds = time.perf_counter() - began
    spent = {key: value - before[key] for key, value in asdict(llm.stats()).items()}
    times = [output.metrics for output in outputs]
    rates = [(m.finished_time - m.first_token_time) / (length - 1)
             for m, (_, length) in zip(times, requests, strict=True) if length > 1]  # fmt: skip
    # On a GPU `update` waits for the model, and a replayed graph is no call of it.
    on_cpu = llm.runner.device.type == "cpu"
    return {
        "seconds": seconds,
        "output_tokens_per_s": spent["output_tokens"] / seconds,
        "total_tokens_per_s": (spent["prompt_tokens"] + spent["output_tokens"]) / seconds,
        "time_to_first_token_s": summary([m.first_token_time - m.arrival_time for m in times]),
        "time_per_output_token_s": summary(rates or [0.0]),
        "prefix_hit_rate": spent["prefix_hit_tokens"] / max(1, spent["prefix_query_tokens"]),
        "prefix_hit_tokens": spent["prefix_hit_tokens"],
        "preemptions": sum(spent[key] for key in spent if key.startswith("preemptions")),
        "steps": spent["steps"],
        "mean_running": mean(running),
        "kv_utilisation": mean(filled or [0.0]),
        "host_s_per_step": median(x["step_s"] for x in host_parts(parts)) if on_cpu else None,
    }


def bench_workload(args: argparse.Namespace) -> Figures:
    """The nano-vllm workload."""
    llm = make_engine(args)
    requests = workload(args, llm.model_config.vocab_size)
    tokens_in, tokens_out = sum(len(p) for p, _ in requests), sum(n for _, n in requests)
    generate(llm, warm_up_requests(llm.model_config.vocab_size), args.temperature)
    runs = [serve_once(llm, requests, args.temperature) for _ in range(args.repeats)]
    run = sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]  # the median one
    dtype, device = llm.runner.dtype, llm.runner.device
    limits = machine_limits(device, dtype)
    least = floor(requests, run["prefix_hit_tokens"], llm, limits)
    llm.shutdown()  # make room for the others
    first, each = run["time_to_first_token_s"], run["time_per_output_token_s"]
    share = least["floor_s"] / run["seconds"]
    speed = f"{limits['bytes_per_s'] / 1e9:,.1f} GB/s, {limits['flops_per_s'] / 1e12:,.3f} TFLOP/s"
    host = f"{run['host_s_per_step'] * 1e6:,.0f} us" if device.type == "cpu" else "bench.py host"
    table(f"{args.requests} requests, {tokens_in:,} tokens in, {tokens_out:,} out", [
        ("wall time", f"{run['seconds']:.2f} s, {run['steps']} steps"),
        ("output tokens/s", f"{run['output_tokens_per_s']:,.1f}"),
        ("total tokens/s", f"{run['total_tokens_per_s']:,.1f}"),
        ("time to first token, mean / p50 / p99", spread(first, "ms")),
        ("time per output token, mean / p50 / p99", spread(each, "ms")),
        ("prefix-cache hit rate", f"{run['prefix_hit_rate']:.1%}"),
        ("preemptions", f"{run['preemptions']}"),
        ("mean running requests", f"{run['mean_running']:.1f}"),
        ("KV utilisation", f"{run['kv_utilisation']:.1%}"),
        ("host cost of a step outside the model", host),
        ("machine", speed),
        ("floor: bytes / operations", f"{least['bytes_s']:.2f} / {least['flops_s']:.2f} s"),
        ("share of the machine's limit", f"{share:.1%}"),
    ])  # fmt: skip
    figures = {"tokens_in": tokens_in, "tokens_out": tokens_out, **run, "runs": runs,
               "limits": limits, "floor": least, "share_of_limit": share}  # fmt: skip
    if args.vs:
        release_memory(device)
        figures["transformers"] = attempt(
            lambda: serve_peers(Transformers(args, dtype, device), args, requests, run["seconds"])
        )
        report_failure(figures["transformers"])
    return figures


def serve_peers(peer: Transformers, args: argparse.Namespace, requests: Requests,
                ours: float) -> Figures:  # fmt: skip
    ways: dict[str, Callable[[Requests], float]] = {
        f"static batches of {args.vs_batch}":
            lambda requests: peer.static(requests, args.temperature, args.vs_batch),
        "continuous batching": lambda requests: peer.continuous(requests, args.temperature),
    }  # fmt: skip
    useful = sum(length for _, length in requests)
    warm_up = warm_up_requests(peer.model.config.vocab_size)
    figures: Figures = {}
    rows: list[tuple[str, ...]] = [("nanopaged", f"{useful / ours:,.1f}", "")]
    for name, way in ways.items():
        figures[name] = run = attempt(partial(repeat, way, warm_up, requests, args.repeats))
        if "failed" in run:
            rows.append((f"transformers, {name}", "FAILED", run["failed"]))
            continue
        run["output_tokens_per_s"], run["ratio"] = useful / run["median"], run["median"] / ours
        rate, ratio = f"{run['output_tokens_per_s']:,.1f}", f"we: {run['ratio']:.2f}x"
        rows.append((f"transformers, {name}", rate, ratio))
    table("the same requests, useful output tokens/s", rows)
    return figures


def decode_rate(llm: LLM, prompts: list[list[int]], batch: int, length: int) -> float:
    """Tokens/s over the steps in which all sequences of the batch decode."""
    for prompt in prompts[:batch]:
        llm.add_request(prompt, sampling(0.0, length))
    seconds, tokens = 0.0, 0
    while llm.has_unfinished_requests():
        began = time.perf_counter()
        outputs = llm.step()
        ended = time.perf_counter()
        if sum(len(output.outputs[0].token_ids) > 1 for output in outputs) == batch:
            seconds, tokens = seconds + ended - began, tokens + len(outputs)
    if not tokens:
        raise SystemExit(f"{batch} sequences never ran together: raise --num-blocks")
    return tokens / seconds


def bench_decode(args: argparse.Namespace) -> Figures:
    """Decode tokens/s by batch size, and prefill tokens/s."""
    count = max(*args.batch_sizes, PREFILL_BATCH)
    llm = make_engine(args, enable_prefix_caching=False, max_num_seqs=count)
    dtype, device, vocab_size = llm.runner.dtype, llm.runner.device, llm.model_config.vocab_size
    random.seed(args.seed)
    prompts = [random_prompt(args.prompt_len, vocab_size) for _ in range(count)]

    def our_prefill(batch: int) -> float:
        began = time.perf_counter()
        generate(llm, [(prompt, 1) for prompt in prompts[:batch]], 0.0)
        return batch * args.prompt_len / (time.perf_counter() - began)

    figures = {"nanopaged": all_rates(args, our_prefill, partial(decode_rate, llm, prompts))}
    llm.shutdown()
    if args.vs:
        release_memory(device)
        figures["transformers"] = attempt(lambda: peer_rates(args, dtype, device, prompts))
        report_failure(figures["transformers"])
    header = ("", "nanopaged", "transformers", "ratio")
    rows: list[tuple[str, ...]] = [header[: 4 if args.vs else 2]]
    for name, ours in figures["nanopaged"].items():
        row = [name, f"{ours['median']:,.1f}"]
        theirs = figures.get("transformers", {}).get(name, {})
        if "failed" in theirs:
            row += ["FAILED", theirs["failed"]]
        elif theirs:
            theirs["ratio"] = ours["median"] / theirs["median"]
            row += [f"{theirs['median']:,.1f}", f"{theirs['ratio']:.2f}x"]
        rows.append(tuple(row))
    table(f"tokens/s: {args.prompt_len} tokens in, {args.tokens} out, greedy", rows)
    return figures


def peer_rates(args: argparse.Namespace, dtype: torch.dtype, device: torch.device,
               prompts: list[list[int]]) -> Figures:  # fmt: skip
    peer = Transformers(args, dtype, device)

    def prefill(batch: int) -> float:
        began = time.perf_counter()
        times = peer.generate(prompts[:batch], 1, 0.0)
        return batch * args.prompt_len / (times[0] - began)

    def decode(batch: int, length: int) -> float:
        times = peer.generate(prompts[:batch], length, 0.0)
        return batch * (length - 1) / (times[-1] - times[0])

    return all_rates(args, prefill, decode, guard=attempt)


def all_rates(
    args: argparse.Namespace,
    prefill: Callable[[int], float],
    decode: Callable[[int, int], float],
    guard: Callable[[Callable[[], Figures]], Figures] = lambda function: function(),
) -> Figures:
    def rate(batch: int) -> Figures:
        return repeat(lambda n: decode(batch, n), min(4, args.tokens), args.tokens, args.repeats)

    figures = {f"decode, batch {n}": guard(partial(rate, n)) for n in args.batch_sizes}
    name = f"prefill, batch {PREFILL_BATCH}"
    figures[name] = guard(lambda: repeat(prefill, 2, PREFILL_BATCH, args.repeats))
    return figures


def bench_host(args: argparse.Namespace) -> Figures:
    """What a step costs outside the model, by number of running sequences.

    The model is replaced by one that returns the same logits at once, for a vocabulary of 16; heads
    and head_dim stay, as the step's inputs depend on them. Not counted: that model and the sampler.
    """
    if args.load_format != "dummy":
        raise SystemExit("host needs --shape: it runs no model, so it takes no --model")
    write_config(Path(args.model), args.shape, num_hidden_layers=1, vocab_size=HOST_VOCAB)
    figures: Figures = {}
    header = ("sequences", "schedule", "inputs", "update", "step", "a sequence", "(sampler)",
              "(message)", "(its bytes)")  # fmt: skip
    rows: list[tuple[str, ...]] = [header]
    for size in args.host_sizes:
        per_seq = -(-(args.prompt_len + args.tokens) // args.block_size)
        num_blocks = size * per_seq * 102 // 100 + 4096 // args.block_size  # nobody is to wait
        budget = max(8192, size * args.prompt_len // 4)  # all get in before the first one ends
        llm = make_engine(args, max_num_seqs=size, max_num_batched_tokens=budget,
                          num_blocks=num_blocks, enforce_eager=True)  # fmt: skip
        llm.steps_ahead = 0
        figures[str(size)] = run = host_cost(llm, size, args)
        keys = ("schedule_s", "inputs_s", "update_s", "step_s", "sampler_s", "message_s")
        *parts, sampler, message = (f"{run[key] * 1e6:,.0f}" for key in keys)
        rows.append((f"{size:,}", *parts, f"{run['step_s'] / size * 1e6:.2f}", sampler, message,
                     f"{run['message_bytes']:,}"))  # fmt: skip
        llm.shutdown()
    table(f"host cost of a decode step, us; {args.prompt_len} tokens and more a sequence", rows)
    return figures


def host_cost(llm: LLM, size: int, args: argparse.Namespace) -> Figures:
    logits = torch.zeros(size, HOST_VOCAB, device=llm.runner.device)

    def stand_in(token_ids: Tensor, sampling_rows: Tensor, *_: Any) -> Tensor:
        return logits[: len(sampling_rows)]

    llm.runner.model = stand_in  # type: ignore[assignment]
    random.seed(args.seed)
    for _ in range(size):
        prompt = random_prompt(args.prompt_len, HOST_VOCAB)
        llm.add_request(prompt, sampling(0.0, args.tokens))
    messages: list[bytes] = []  # what every step would be to other ranks
    llm.ranks.send = lambda batch: messages.append(pickle.dumps(batch))  # type: ignore[method-assign]
    decoding: list[int] = []  # the steps in which all sequences do, and none ends
    with timed(llm) as spent:
        while llm.has_unfinished_requests():
            outputs = llm.step()
            lengths = {len(output.outputs[0].token_ids) for output in outputs}
            if len(outputs) == size and min(lengths) > 1 and max(lengths) < args.tokens:
                decoding.append(len(spent["update"]) - 1)
    parts = host_parts(spent)
    steps = [parts[number] for number in decoding]
    return {**{key: median(step[key] for step in steps) for key in steps[0]}, "steps": steps,
            "message_bytes": max(len(messages[number]) for number in decoding)}  # fmt: skip


def bench_prefix(args: argparse.Namespace) -> Figures:
    """Two requests with the same prefix, one after the other."""
    llm = make_engine(args)
    vocab_size = llm.model_config.vocab_size
    random.seed(args.seed)
    generate(llm, [(random_prompt(args.prefix_len, vocab_size), 2)], 0.0)
    runs: list[list[Figures]] = [[], []]
    for _ in range(args.repeats):
        prefix = random_prompt(args.prefix_len, vocab_size)
        for which in runs:
            own = random_prompt(args.own_len, vocab_size)
            (output,) = generate(llm, [(prefix + own, 2)], 0.0)
            computed = len(output.prompt_token_ids) - output.num_cached_tokens
            seconds = output.metrics.first_token_time - output.metrics.arrival_time
            which.append({"computed_tokens": computed, "time_to_first_token_s": seconds})
    medians = [{key: median(run[key] for run in which) for key in which[0]} for which in runs]
    llm.shutdown()
    table(f"a prefix of {args.prefix_len} tokens, then {args.own_len} of one's own", [
        ("", "prompt tokens computed", "time to first token"),
        *((name, f"{run['computed_tokens']:,.0f}", f"{run['time_to_first_token_s'] * 1e3:,.1f} ms")
          for name, run in zip(("first request", "second request"), medians, strict=True)),
        ("ratio", *(f"{medians[0][key] / medians[1][key]:.1f}x" for key in medians[0])),
    ])  # fmt: skip
    return {"first": medians[0], "second": medians[1], "runs": runs}


# -- the paper's memory results ------------------------------------------------------------------

# The paper's figures 2 (percent), 13 (requests) and 15 (percent; of ShareGPT it tells the ends).
PAPER_TOKENS = {"Orca (max)": 20.4, "Orca (pow2)": 26.8, "Orca (oracle)": 38.2, "nanopaged": 96.3}
PAPER_RUNNING = {"Orca (max)": 7.0, "Orca (pow2)": 9.8, "Orca (oracle)": 13.6, "nanopaged": 30.4}
PAPER_SAVED = {
    ("Alpaca", "samples"): {"2": 6.1, "4": 8.5, "6": 9.8},
    ("Alpaca", "beams"): {"2": 37.6, "4": 53.1, "6": 55.2},
    ("ShareGPT", "samples"): {"2": 16.2, "6": 30.5}, ("ShareGPT", "beams"): {"2": 44.3, "6": 66.3},
}  # fmt: skip
# Mean tokens in and out (the paper's Fig 11), each with the sigma of its log-normal (ours). For
# ShareGPT's output that follows from Fig 2: in Orca (max), 20.4% of the slots are in 7 requests:
# 458 tokens each, 161 of them the prompt's. So 297 have been generated, on average over time; a
# mean of 338 makes that many with a sigma of 0.8 and the cut. Prompts vary more, Alpaca's less.
LENGTHS = {"ShareGPT": ((161.31, 1.25), (337.99, 0.8)), "Alpaca": ((19.31, 0.5), (58.45, 0.8))}
SLOTS = 12 * 2**30 // 819_200  # tokens whose K and V fit beside OPT-13B into an A100 with 40 GB
LONGEST = 2048  # tokens in and out: OPT's context
REAL_SLOTS, SWAPPED = 768, 256  # tokens in the bundled model's pool; tokens of one preempted
Lengths: TypeAlias = "list[tuple[int, int]]"  # tokens in, tokens out

# What Orca sets aside for a request; only (oracle) knows how long the output will be.
RESERVE: dict[str, Callable[[int, int], int]] = {
    "Orca (max)": lambda prompt, output: LONGEST,
    "Orca (pow2)": lambda prompt, output: min(LONGEST, prompt + power_of_two(output)),
    "Orca (oracle)": lambda prompt, output: prompt + output,
}
CAPTIONS = {
    "allocation": f"KV memory at full load: {SLOTS:,} slots, ShareGPT's mean lengths, log-normal "
    "with sigma {} in and {} out (the latter from the paper's figure for Orca (max)). The paper's "
    "numbers: its Fig 2 and 13. Ours: Orca's policies with a buddy allocator, simulated, and "
    "nanopaged's scheduler and block manager with a stand-in for the model.".format(
        *(sigma for _, sigma in LENGTHS["ShareGPT"])
    ),
    "sharing": "Blocks saved by sharing, with 2, 4 and 6 sequences a request. The paper's numbers: "
    "its Fig 15. Ours: nanopaged's scheduler and block manager at full load; \"beams\" branch by "
    "probabilities that the bundled model gave, \"real beams\" are its own beam search, in its "
    "context of 1,024 tokens. Samples share only their prompt: of the same requests 6 save 5/3 of "
    "what 2 save. ShareGPT's 30.5% and 16.2% are 1.9 apart: no one set of requests gives both.",
    "block size": "By block size, as in the paper's Fig 18; the figures are ours. Slots without a "
    "token and requests in a batch: nanopaged's scheduler and block manager at full load. Tokens/s:"
    f" the bundled model, Alpaca's lengths, {REAL_SLOTS} slots.",
    "preemption": "Recompute and swap by block size, as in the paper's Fig 19; the figures are "
    f"ours, the bundled model's: the time to compute {SWAPPED} tokens again, or to swap them out "
    f"and in; then tokens/s of requests with Alpaca's lengths in {REAL_SLOTS} slots.",
}


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def draw_lengths(name: str, count: int, seed: int, longest: int = LONGEST) -> Lengths:
    """Log-normal, cut off where in and out together pass `longest`; the means are the paper's.

    The draws are evenly spaced quantiles in a random order, short and long prompts with short and
    long outputs alike (a golden ratio lattice), so that a few requests are like many.
    """
    (mean_in, sigma_in), (mean_out, sigma_out) = LENGTHS[name]
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    by_in = np.random.default_rng(seed).permutation(count)
    by_out = np.argsort(np.argsort(by_in * 0.6180339887 % 1))
    scale_in, scale_out = mean_in, mean_out
    for _ in range(50):  # until the means are right in spite of the cut
        prompts = np.clip(np.rint(scale_in * np.exp(sigma_in * normal[by_in])), 1, longest - 1)
        outputs = np.rint(scale_out * np.exp(sigma_out * normal[by_out]))
        outputs = np.clip(outputs, 1, longest - prompts)
        scale_in *= mean_in / prompts.mean()
        scale_out *= mean_out / outputs.mean()
    return [(int(prompt), int(output)) for prompt, output in zip(prompts, outputs, strict=True)]


class BuddyAllocator:
    """Contiguous pieces of 2^k slots: halved to serve less, joined with their buddy when free."""

    def __init__(self, slots: int) -> None:
        self.free: dict[int, set[int]] = {1 << k: set() for k in range(slots.bit_length())}
        offset = 0
        for size in reversed(self.free):
            if slots & size:
                self.free[size].add(offset)
                offset += size

    def take(self, size: int) -> int | None:
        found = next((s for s in self.free if s >= size and self.free[s]), None)  # the smallest
        if found is None:
            return None
        offset = self.free[found].pop()
        while found > size:
            found //= 2
            self.free[found].add(offset + found)
        return offset

    def give(self, offset: int, size: int) -> None:
        while offset ^ size in self.free[size]:
            self.free[size].remove(offset ^ size)
            offset, size = offset & ~size, size * 2
        self.free[size].add(offset)


def serve_contiguous(lengths: Lengths, reserve: Callable[[int, int], int]) -> Figures:
    """Orca: first come, first served, each in one piece of memory that it keeps to its end.

    There is always a request that waits. A step gives every running one a token, and nothing else
    changes until the next one ends: so time goes from end to end. What counts is what happens after
    twice as many as run have ended: those who began together are gone.
    """
    pool, queue = BuddyAllocator(SLOTS), cycle(lengths)
    running: list[tuple[int, ...]] = []  # a heap: (end, prompt, output, reserved, piece, offset)
    sums, steps, now, finished, warm = np.zeros(5), 0, 0, 0, 0
    prompt, output = next(queue)
    while not warm or finished < warm + len(lengths):
        reserved = reserve(prompt, output)
        piece = power_of_two(reserved)
        offset = pool.take(piece)
        if offset is not None:
            heappush(running, (now + output, prompt, output, reserved, piece, offset))
            prompt, output = next(queue)
            continue
        then = running[0][0]
        warm = warm or (finished if finished > 2 * len(running) else 0)
        if warm:
            ends, prompts, outputs, reserves, pieces, _ = np.array(running).T
            final = (prompts + outputs).sum()
            tokens = final - (ends - now).sum() + len(running) * (then - now - 1) / 2
            state = np.array([tokens, final, reserves.sum(), pieces.sum(), len(running)])
            sums, steps = sums + state * (then - now), steps + then - now
        now = then
        while running and running[0][0] == now:
            *_, piece, offset = heappop(running)
            pool.give(offset, piece)
            finished += 1
    *parts, count = sums / steps
    tokens, final, reserved, pieces = (100 * slots / SLOTS for slots in parts)
    return {"tokens": tokens, "reserved": final - tokens, "internal": reserved - final,
            "rounding": pieces - reserved, "free": 100 - pieces, "running": count}  # fmt: skip


def serve_paged(lengths: Lengths, block_size: int, width: int = 1,
                likely: list[dict[int, float]] | None = None) -> Figures:  # fmt: skip
    """Ours: the engine's scheduler and block manager at full load, and a stand-in for the model.

    A request has `width` samples; or as many beams, if there are `likely` tokens (a model's at some
    positions, and their log-probabilities): every beam gets those of a random position.
    """
    count, finished, warm, states = SLOTS // block_size, 0, 0, []
    blocks = BlockManager(count, block_size, enable_prefix_caching=False, num_swap_blocks=count)
    config = EngineConfig(block_size=block_size, max_num_seqs=4096)  # memory is to be the limit
    scheduler, queue, draw = Scheduler(config, blocks), cycle(lengths), random.Random(0)
    zeros = torch.zeros(config.max_num_seqs, dtype=torch.int64)
    choices = [dict(list(tokens.items())[: 2 * width]) for tokens in likely or ()]
    while not warm or finished < warm + len(lengths):
        while len(scheduler.waiting) < 64:
            prompt, output = next(queue)
            beams = BeamSearchParams(width, output, ignore_eos=True) if choices else None
            params = SamplingParams(n=width, max_tokens=output, ignore_eos=True,
                                    logprobs=2 * width if choices else None)  # fmt: skip
            scheduler.waiting.append(SequenceGroup(
                None, [0] * prompt, params, set(), LONGEST, None, beams
            ))  # fmt: skip
        batch = scheduler.schedule()
        warm = warm or (finished if finished > 2 * len(scheduler.running) else 0)
        if warm and scheduler.stats.steps % 4 == 0:
            states.append(paged_state(scheduler))
        rows = draw.choices(choices, k=len(batch.samples)) if choices else ()
        sampled = SamplerOutput(zeros[: len(batch.samples)], dict(enumerate(rows)))
        scheduler.update(batch, sampled)
        finished += sum(not group.live for group in {seq.group for seq in batch.drawn})
    tokens, reserved, internal, used, listed, running = np.mean(states, axis=0).tolist()
    figures = {"tokens": tokens, "reserved": reserved, "internal": internal,
               "free": SLOTS - used * block_size}  # fmt: skip
    return {**{key: 100 * slots / SLOTS for key, slots in figures.items()},
            "saved": 100 * (1 - used / listed), "running": running}  # fmt: skip


def paged_state(scheduler: Scheduler) -> tuple[int, ...]:
    """Slots with a token, to get one, never to get one (if nothing is shared); blocks in use, and
    in how many places the block tables name them; running requests."""
    blocks, tokens, final, room, listed = scheduler.blocks, 0, 0, 0, 0
    for seq in (seq for group in scheduler.running for seq in group.live):
        slots = len(seq.block_table) * blocks.block_size
        tokens, listed = tokens + seq.num_computed_tokens, listed + len(seq.block_table)
        final, room = final + min(slots, seq.group.max_len), room + slots
    used = blocks.num_blocks - len(blocks.free_blocks)
    return tokens, final - tokens, room - final, used, listed, len(scheduler.running)


def bench_memory(args: argparse.Namespace) -> Figures:
    """The paper's figures 2, 13, 15, 18 and 19: its numbers, and ours beside them."""
    for name, ((mean_in, sigma_in), (mean_out, sigma_out)) in LENGTHS.items():
        print(f"{name}'s lengths: log-normal, mean {mean_in} in (sigma {sigma_in}), {mean_out} out "
              f"(sigma {sigma_out}), at most {LONGEST:,} together")  # fmt: skip
    figures = {"allocation": memory_allocation(args), "sharing": memory_sharing(args),
               "block_size": memory_by_block_size(args)}  # fmt: skip
    if args.plots:
        draw_plots(figures, args.plots)
    return {"lengths": LENGTHS, "slots": SLOTS, **figures}


def memory_allocation(args: argparse.Namespace) -> Figures:
    lengths = draw_lengths("ShareGPT", args.requests, args.seed)
    figures = {name: serve_contiguous(lengths, reserve) for name, reserve in RESERVE.items()}
    figures["nanopaged"] = serve_paged(lengths, args.block_size)
    keys = ("reserved", "internal", "rounding", "free")
    table(fill(CAPTIONS["allocation"], 100), [
        ("", "token states", "the paper's", "reserved", "internal", "rounding", "free", "requests",
         "the paper's"),
        *((name, f"{run['tokens']:.1f}%", f"{PAPER_TOKENS[name]}%",
           *(f"{run.get(key, 0):.1f}%" for key in keys),
           f"{run['running']:.1f}", f"{PAPER_RUNNING[name]}") for name, run in figures.items()),
    ])  # fmt: skip
    return figures


def memory_sharing(args: argparse.Namespace) -> Figures:
    figures = {f"{name}, {kind}": saved for name in ("Alpaca", "ShareGPT")
               for kind, saved in saved_by_sharing(args, name).items()}  # fmt: skip
    widths = [str(n) for n in args.widths]
    rows: list[tuple[str, ...]] = [("sequences a request", *widths, "", *widths)]
    for key, saved in figures.items():
        name, kind = key.split(", ")
        paper = PAPER_SAVED[name, kind.removeprefix("real ")]
        rows.append((key, *(f"{saved[n]:.1f}%" for n in widths), "the paper's:",
                     *(f"{paper[n]}%" if n in paper else "" for n in widths)))  # fmt: skip
    table(fill(CAPTIONS["sharing"], 100), rows)
    return figures


def saved_by_sharing(args: argparse.Namespace, name: str) -> Figures:
    few = args.requests // (50 if name == "Alpaca" else 700) + 4
    llm = make_engine(args, num_blocks=2**15 // args.block_size, enable_prefix_caching=False)
    own = draw_lengths(name, few, args.seed, llm.runner.max_model_len)
    texts = [sampling(0.8, length) for length, _ in own]  # by the model itself: it is to go on
    outputs = llm.generate([[0]] * few, texts, use_tqdm=False)
    prompts = [output.outputs[0].token_ids for output in outputs]
    real = {str(n): real_beams(llm, prompts, [length for _, length in own], n)
            for n in args.widths}  # fmt: skip
    asked = SamplingParams(temperature=0.8, max_tokens=64, logprobs=2 * max(args.widths))
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    likely = [row for output in outputs for row in output.outputs[0].logprobs or ()]
    llm.shutdown()
    many, fewer = (draw_lengths(name, args.requests // i + 8, args.seed) for i in (4, 20))
    size = args.block_size
    return {
        "samples": {str(n): serve_paged(many, size, n)["saved"] for n in args.widths},
        "beams": {str(n): serve_paged(fewer, size, n, likely)["saved"] for n in args.widths},
        "real beams": real,
    }


def real_beams(llm: LLM, prompts: list[list[int]], lengths: list[int], width: int) -> float:
    """Percent of blocks saved, over all steps of the real engine's beam search."""
    execute, used, listed = llm.runner.execute, 0, 0

    def note(batch: Any) -> Any:
        nonlocal used, listed
        state = paged_state(llm.scheduler)
        used, listed = used + state[3], listed + state[4]
        return execute(batch)

    llm.runner.execute = note  # type: ignore[method-assign]
    params: Any = [BeamSearchParams(width, length, ignore_eos=True) for length in lengths]
    llm.generate(prompts, params, use_tqdm=False)
    llm.runner.execute = execute  # type: ignore[method-assign]
    return 100 * (1 - used / listed)


def memory_by_block_size(args: argparse.Namespace) -> Figures:
    figures: Figures = preemption_by_block_size(args)
    lengths = {name: draw_lengths(name, args.requests // 8 + 8, args.seed) for name in LENGTHS}
    waste: list[tuple[str, ...]] = [("", "ShareGPT: waste", "requests", "Alpaca: waste", "requests",
                                     "tokens/s")]  # fmt: skip
    ways: list[tuple[str, ...]] = [("", "recompute", "swap", "recompute", "swap", "preemptions")]
    for size, run in figures.items():
        run.update({name: serve_paged(lengths[name], int(size)) for name in LENGTHS})
        again, swap = run["recompute"], run["swap"]
        cells = (cell for name in LENGTHS
                 for cell in (f"{100 - run[name]['tokens']:.1f}%", f"{run[name]['running']:.1f}"))
        rates = (f"{again['median']:,.0f}", f"{swap['median']:,.0f}")
        costs = (f"{again['back_s'] * 1e3:.2f} ms", f"{swap['back_s'] * 1e3:.2f} ms")
        waste.append((f"blocks of {size}", *cells, rates[0]))
        ways.append((f"blocks of {size}", *costs, *rates, f"{swap['preemptions']:.0f}"))
    table(fill(CAPTIONS["block size"], 100), waste)
    table(fill(CAPTIONS["preemption"], 100), ways)
    return figures


def preemption_by_block_size(args: argparse.Namespace) -> Figures:
    """Tokens/s of the real engine in a pool too small for all, and the cost of one preemption.

    All configurations take turns, so that whatever else this machine does slows them all.
    """
    figures: Figures = {}
    engines: list[tuple[LLM, Figures]] = []
    for size in args.kv_block_sizes:
        for mode in ("recompute", "swap"):
            llm = make_engine(args, block_size=size, num_blocks=REAL_SLOTS // size, swap_space=0.02,
                              preemption_mode=mode, enable_prefix_caching=False)  # fmt: skip
            llm.runner.swap_space.zero_()  # fault its pages in
            engines.append((llm, {"runs": [], "back_s": inf}))
            figures.setdefault(str(size), {})[mode] = engines[-1][1]
    vocab_size = llm.model_config.vocab_size
    random.seed(args.seed)
    requests = [(random_prompt(prompt, vocab_size), output) for prompt, output
                in draw_lengths("Alpaca", args.requests // 100 + 6, args.seed, REAL_SLOTS)]
    prompt = random_prompt(SWAPPED, vocab_size)
    for i in range(args.repeats + 1):  # the first is the warm-up
        for llm, run in engines:
            began = time.perf_counter()
            generate(llm, requests if i else requests[:4], 0.0)
            rate = sum(length for _, length in requests) / (time.perf_counter() - began)
            run["runs"] = [*run["runs"], rate] if i else []
            run["back_s"] = min(run["back_s"], bring_back(llm, prompt))
    for llm, run in engines:
        stats, run["median"] = llm.stats(), median(run["runs"])
        preemptions = stats.preemptions_recompute + stats.preemptions_swap
        run["preemptions"] = preemptions / args.repeats
        llm.shutdown()
    return figures


def bring_back(llm: LLM, prompt: list[int]) -> float:
    """Seconds until a preempted sequence is where it was: one prefill, or out and in again."""
    if llm.config.preemption_mode == "recompute":
        return fastest(lambda: generate(llm, [(prompt, 1)], 0.0), llm.runner.device)
    runner = llm.runner
    out = [(i, runner.num_blocks + i) for i in range(-(-len(prompt) // llm.config.block_size))]

    def swap() -> None:
        runner._move_blocks(runner.kv_caches, runner.swap_space, out)
        runner._move_blocks(runner.swap_space, runner.kv_caches, [move[::-1] for move in out])

    return fastest(swap, runner.device)


# -- its plots -----------------------------------------------------------------------------------

INK, INK_AT_NIGHT, ON_BARS = "#1f2328", "#e6edf3", "#101010"
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "nanopaged", "font.size": 9, "axes.titlesize": 10,
    "legend.fontsize": 8, "legend.frameon": False, "figure.constrained_layout.use": True,
    "axes.spines.top": False, "axes.spines.right": False, "font.family": "sans-serif",
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "axes.titlecolor": INK,
    "xtick.color": INK, "ytick.color": INK,
}  # fmt: skip
SLOT_COLORS = {
    "tokens": ("token states", "#2da44e"), "reserved": ("reserved for later tokens", "#54aeff"),
    "internal": ("internal: never used", "#d4a72c"),
    "rounding": ("external: rounding to 2^k", "#e16f24"), "free": ("external: free", "#8c959f"),
}  # fmt: skip
COLORS = ("#2da44e", "#54aeff", "#d4a72c")
DIAMOND: Any = {"marker": "D", "linestyle": "", "color": "#ffffff", "markeredgecolor": ON_BARS,
           "markersize": 5}  # fmt: skip


def draw_plots(figures: Figures, folder: Path) -> None:
    """The figures as SVG files, readable on light and on dark pages."""
    try:
        import matplotlib
    except ImportError:
        print('\nNo plots without matplotlib: pip install -e ".[bench]"')
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    def save(figure: Any, name: str, *captions: str) -> None:
        text = "\n".join(fill(CAPTIONS[caption], int(16.5 * figure.get_figwidth()))
                         for caption in captions)  # fmt: skip
        figure.supxlabel(text, x=0.01, ha="left", fontsize=7.5)
        figure.savefig(folder / name, transparent=True, metadata={"Date": None, "Title": text})
        rules = "".join(f' [style*="{key}: {INK}"] {{ {key}: {INK_AT_NIGHT} !important }}'
                        for key in ("fill", "stroke"))  # fmt: skip
        dark = f"@media (prefers-color-scheme: dark) {{{rules} }}</style>"
        svg = (folder / name).read_text()
        (folder / name).write_text(svg.replace("</style>", dark, 1))
        pyplot.close(figure)

    def bars(axis: Any, ours: dict[str, list[float]], paper: list[list[Any]], keys: list[str],
             style: str) -> None:  # fmt: skip
        """A group of bars for every name, and the paper's numbers as diamonds."""
        for i, (key, color) in enumerate(zip(keys, COLORS, strict=False)):
            at = [group + (i - (len(keys) - 1) / 2) * 0.28 for group in range(len(ours))]
            heights = [values[i] for values in ours.values()]
            axis.bar(at, heights, 0.26, color=color, label=key)
            for x, height in zip(at, heights, strict=True):
                axis.text(x, 0, style % height, color=ON_BARS, ha="center", va="bottom", size=7)
            label = "the paper's" if key == keys[-1] else ""
            axis.plot(at, [numbers[i] for numbers in paper], label=label, **DIAMOND)
        axis.set_xticks(range(len(ours)), [name.replace(", ", "\n") for name in ours])
        axis.legend(loc="upper left", ncols=2)

    def lines(axis: Any, title: str, ours: dict[str, list[float]]) -> None:
        for color, (label, values) in zip(COLORS, ours.items(), strict=False):
            axis.plot(sizes, values, "o-", color=color, label=label)
        axis.set(title=title, xlabel="block size", ylim=(0, None))
        axis.legend()

    folder.mkdir(parents=True, exist_ok=True)
    runs, saved, by_size = (figures[key] for key in ("allocation", "sharing", "block_size"))
    names, sizes, widths = list(runs), list(by_size), list(saved["Alpaca, beams"])
    with pyplot.rc_context(STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 4.6), width_ratios=(2, 3))
        bottom = np.zeros(len(names))
        for part, (label, color) in SLOT_COLORS.items():
            slots = np.array([run.get(part, 0.0) for run in runs.values()])
            drawn = left.bar(range(len(names)), slots, 0.6, bottom, color=color, label=label)
            bottom += slots
            if part == "tokens":
                left.bar_label(drawn, fmt="%.1f", label_type="center", color=ON_BARS)
        left.plot([PAPER_TOKENS[name] for name in names], label="token states in the paper",
                  **DIAMOND)
        left.set(title="KV memory, % of all slots", ylim=(0, 155), yticks=range(0, 101, 20))
        left.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names])
        left.legend(loc="upper left")
        bars(right, {name: list(values.values()) for name, values in saved.items()},
             [[PAPER_SAVED[name, kind.removeprefix("real ")].get(n) for n in widths]
              for name, kind in (key.split(", ") for key in saved)],
             [f"{n} sequences" for n in widths], "%.0f")
        right.set(title="blocks saved by sharing, %", ylim=(0, 105))
        save(figure, "memory.svg", "allocation", "sharing")

        figure, axis = pyplot.subplots(figsize=(6, 3.2))
        bars(axis, {name: [run["running"]] for name, run in runs.items()},
             [[PAPER_RUNNING[name]] for name in names], ["ours"], "%.1f")
        axis.set(title="requests in a batch")
        save(figure, "running.svg", "allocation")

        figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(9.6, 3.4))
        lines(left, "slots without a token, %",
              {name: [100 - run[name]["tokens"] for run in by_size.values()] for name in LENGTHS})
        lines(middle, "requests in a batch",
              {name: [run[name]["running"] for run in by_size.values()] for name in LENGTHS})
        lines(right, "tokens/s",
              {"Alpaca": [run["recompute"]["median"] for run in by_size.values()]})
        save(figure, "block_size.svg", "block size")

        figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 3.4))
        for axis, title, key, unit in ((left, f"ms for {SWAPPED} tokens", "back_s", 1e3),
                                       (right, "tokens/s", "median", 1)):
            lines(axis, title, {mode: [run[mode][key] * unit for run in by_size.values()]
                                for mode in ("recompute", "swap")})
        save(figure, "preemption.svg", "preemption")


# -- kernels -------------------------------------------------------------------------------------

# (past, new) tokens of every sequence: with Qwen3-0.6B's heads, and for Triton's interpreter.
KERNELS: dict[str, Figures] = {
    "qwen3-0.6b": {
        "heads": (16, 8, 128), "stored": 8192, "blocks": 256, "layers": 28,
        "decode": {f"{n} x {length}": [(length - 1, 1)] * n
                   for length in (1024, 4096) for n in (64, 128, 256)}
                  | {"1 x 4096": [(4095, 1)],
                     "256 x 100..2048": [(99 + 1948 * (97 * i % 256) // 255, 1)
                                         for i in range(256)]},
        "prefill": {f"{n}": [(0, n)] for n in (1024, 4096, 16384)}
                   | {"2048 behind 6144": [(6144, 2048)]},
    },
    "tiny": {
        "heads": (4, 2, 16), "stored": 8, "blocks": 4, "layers": 2,
        "decode": {"2 x 24": [(23, 1)] * 2, "1 x 300": [(299, 1)], "mixed": [(4, 1), (19, 1)]},
        "prefill": {"40": [(0, 40)], "8 behind 20": [(20, 8)]},
    },
}  # fmt: skip


def bench_kernels(args: argparse.Namespace) -> Figures:
    """Every kernel against what the device can do, beside torch's own way to the same result.

    Rates count what must be done: K and V of all keys once for a decode, the operations of causal
    attention for a prompt, reads and writes for what only moves. K and V lie in scattered blocks
    for ours; for torch they are gathered before, at no cost. Each call is a replayed CUDA graph,
    as in the engine, behind a flush of the L2 cache.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (torch.cuda.is_available() or interpreted):
        raise SystemExit("kernels needs a CUDA device; TRITON_INTERPRET=1 runs tiny shapes without")
    device = torch.device("cpu" if interpreted else "cuda")
    dtype = torch.float32 if interpreted else torch.bfloat16  # the interpreter has no bfloat16
    shapes = KERNELS["tiny" if interpreted or args.shape == "tiny" else "qwen3-0.6b"]
    limits = machine_limits(device, dtype)
    figures: Figures = {"limits": limits, "dtype": str(dtype)}
    rows: list[tuple[str, ...]] = [("", "us", "10..90%", "", "of limit", "torch, us", "ratio")]
    tasks = [(f"{kind} {name}", partial(attention_task, seqs))
             for kind in ("decode", "prefill") for name, seqs in shapes[kind].items()]  # fmt: skip
    tasks += [(f"store_kv {shapes['stored']}", store_task),
              (f"block copy {shapes['blocks'] // 2}", copy_task)]  # fmt: skip
    for name, make in tasks:
        figures[name] = run = attempt(lambda make=make: measure(make(shapes, args, dtype, device),
                                                                limits, device))  # fmt: skip
        rows.append((name, "FAILED", run["failed"]) if "failed" in run else kernel_row(name, run))
        release_memory(device)
    copy, products = limits["copy_bytes_per_s"] / 1e9, limits["flops_per_s"] / 1e12
    tries = [(name, *(f"{way}: {run['variants'][way]['median_s'] * 1e6:,.1f}"
                      for way in run["variants"] if "failed" not in run["variants"][way]))
             for name, run in figures.items() if isinstance(run, dict) and run.get("variants")]
    table(f"{dtype}, blocks of {args.block_size}; limits: {copy:,.0f} GB/s copied, "
          f"{products:,.2f} TFLOP/s of matrix products", rows)  # fmt: skip
    table("us in other ways: by the number of splits, the engine takes the first; the flash "
          "backend, its copies of K and V included", tries)  # fmt: skip
    return figures


def kernel_row(name: str, run: Figures) -> tuple[str, ...]:
    unit, scale = ("GB/s", 1e9) if run["limit"] == "copy_bytes_per_s" else ("TFLOP/s", 1e12)
    p10, p90 = (run["spread_s"][i] * 1e6 for i in range(2))
    row = (name, f"{run['median_s'] * 1e6:,.1f}", f"{p10:,.1f}..{p90:,.1f}",
           f"{run['rate'] / scale:,.1f} {unit}", f"{run['share']:.1%}")  # fmt: skip
    peer = run.get("fastest_torch")
    if peer is None:
        return row
    return *row, f"{run['torch'][peer]['median_s'] * 1e6:,.1f} ({peer})", f"{run['ratio']:.2f}x"


def measure(task: Figures, limits: Figures, device: torch.device) -> Figures:
    """task: `run`, the `work` in bytes or operations, their `limit`, and other ways (`torch`).

    Its `variants` are our own ways to do it that the engine does not choose.
    """
    graph = task.get("graph", True)
    run = {"work": task["work"], "limit": task["limit"],
           **kernel_seconds(task["run"], device, graph)}  # fmt: skip
    run["rate"] = run["work"] / run["median_s"]
    run["share"] = run["rate"] / limits[run["limit"]]
    run["variants"] = {name: attempt(lambda way=way: kernel_seconds(way, device, graph))
                       for name, way in task.get("variants", {}).items()}  # fmt: skip
    run["torch"] = {}
    ours = task["run"]() if task["torch"] else None
    for name, way in task["torch"].items():
        run["torch"][name] = peer = attempt(lambda way=way: kernel_seconds(way, device, graph))
        if "failed" in peer:  # a way that this torch does not have is no failure of ours
            peer["unavailable"] = peer.pop("failed")
            continue
        if ours is not None:  # right first, then fast
            expected = way().float()
            error = (ours.view(expected.shape).float() - expected).norm() / expected.norm()
            peer["difference"] = error.item()
            if not peer["difference"] < 2e-2:
                run["failed"] = f"differs from torch's {name} by {error.item():.2g}"
    known = {name: peer["median_s"] for name, peer in run["torch"].items() if "median_s" in peer}
    if known:
        run["fastest_torch"] = min(known, key=lambda name: known[name])
        run["ratio"] = min(known.values()) / run["median_s"]  # above 1: we are faster
    return run


def kernel_seconds(function: Callable[[], Any], device: torch.device, graph: bool) -> Figures:
    if device.type == "cpu":
        once = fastest(function, device, runs=1)  # in the interpreter: no figure to look at
        return {"median_s": once, "spread_s": [once, once]}
    from triton.testing import do_bench

    if graph:
        function, _ = record_cuda_graph(torch.cuda.graph_pool_handle(), function)
    p50, p10, p90 = do_bench(function, warmup=20, rep=200, quantiles=[0.5, 0.1, 0.9])
    return {"median_s": p50 / 1e3, "spread_s": [p10 / 1e3, p90 / 1e3]}


def attention_task(seqs: list[tuple[int, int]], shapes: Figures, args: argparse.Namespace,
                   dtype: torch.dtype, device: torch.device) -> Figures:  # fmt: skip
    """One layer's attention of a step in which each sequence has `past` and `new` tokens."""
    heads, kv_heads, dim = shapes["heads"]
    past, new = (np.array(column) for column in zip(*seqs, strict=True))
    width = -(-(past + new).max() // args.block_size)
    order = np.random.default_rng(args.seed).permutation(len(seqs) * width)
    tables = order.reshape(len(seqs), width)
    shape = len(order), 2, kv_heads, args.block_size, dim
    cache = torch.randn(shape, device=device, dtype=dtype)
    q = torch.randn(new.sum(), heads, dim, device=device, dtype=dtype)
    backend = TritonAttention(heads, kv_heads, dim, args.block_size, dtype, device)
    metadata = backend.prepare(tables, past, new)
    task: Figures = {"run": lambda: backend.attend(q, cache, metadata), "torch": {}}
    if new.max() == 1:
        keys = int((past + new).sum())
        task |= {"work": 2 * keys * kv_heads * dim * dtype.itemsize, "limit": "copy_bytes_per_s"}
        task["variants"] = {}
        programs = backend.num_programs
        for factor in (1, 2, 4, 8, 16):  # had the chip room for so many times as many programs
            backend.num_programs = factor * programs
            other = backend.prepare(tables, past, new)
            name = f"{other.plan[-1]} splits"
            task["variants"].setdefault(name, partial(backend.attend, q, cache, other))
    else:
        pairs = int((new * past + new * (new + 1) // 2).sum())
        task |= {"work": 4 * heads * dim * pairs, "limit": "flops_per_s"}
        flash = FlashAttention(heads, kv_heads, dim, args.block_size, dtype, device)
        task["variants"] = {"flash": partial(flash.attend, q, cache,
                                             flash.prepare(tables, past, new))}  # fmt: skip
    if len(set(seqs)) == 1:  # torch's wants all of one length
        blocks = cache[torch.from_numpy(tables).to(device)].permute(2, 0, 3, 1, 4, 5)
        dense = blocks.reshape(2, len(seqs), kv_heads, -1, dim)[:, :, :, : sum(seqs[0])]
        task["torch"] = torch_attention(q, *dense.contiguous(), *seqs[0])
    return task


def torch_attention(q: Tensor, k: Tensor, v: Tensor, past: int, new: int) -> Figures:
    """Torch's ways; q [num_tokens, num_heads, head_dim], k, v [n, num_kv_heads, keys, head_dim]"""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    n, kv_heads, keys, dim = k.shape
    attend = F.scaled_dot_product_attention
    ways: dict[str, Callable[[], Tensor]] = {}
    if new == 1:  # the query heads of one KV head as query rows: K and V are read once
        rows = q.view(n, kv_heads, -1, dim)
        ways["sdpa"] = lambda: attend(rows, k, v).reshape(n, -1)
        return ways
    k, v = (x.repeat_interleave(q.shape[1] // kv_heads, 1) for x in (k, v))
    q_heads = q.transpose(0, 1)[None].contiguous()  # [1, num_heads, num_tokens, head_dim]

    def dense(backend: Any) -> Tensor:
        with sdpa_kernel(backend):
            out = attend(q_heads, k, v, is_causal=True)
        return out[0].transpose(0, 1).flatten(1)

    if not past:
        if q.is_cuda:
            return {"flash": partial(dense, SDPBackend.FLASH_ATTENTION),
                    "cudnn": partial(dense, SDPBackend.CUDNN_ATTENTION)}  # fmt: skip
        return {"sdpa": partial(dense, SDPBackend.MATH)}
    mask = torch.ones(new, keys, dtype=torch.bool, device=q.device).tril(past)
    ways["sdpa, mask"] = lambda: attend(q_heads, k, v, mask)[0].transpose(0, 1).flatten(1)
    if q.is_cuda:
        ways["varlen"] = partial(varlen, q, k[0].transpose(0, 1).contiguous(),
                                 v[0].transpose(0, 1).contiguous())  # fmt: skip
    return ways


def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    ends = [torch.arange(2, device=q.device, dtype=torch.int32) * len(x) for x in (q, k)]
    new = "window_size" in inspect.signature(varlen_attn).parameters
    causal: Figures = {"window_size": (-1, 0)} if new else {"is_causal": True}  # torch 2.10
    out: Any = varlen_attn(q, k, v, *ends, len(q), len(k), **causal)
    return out.flatten(1)  # type: ignore[no-any-return]


def store_task(shapes: Figures, args: argparse.Namespace, dtype: torch.dtype,
               device: torch.device) -> Figures:  # fmt: skip
    """K and V of a step's tokens go to their places; they come as columns of one matrix."""
    heads, kv_heads, dim = shapes["heads"]
    count, size = shapes["stored"], args.block_size
    qkv = torch.randn(count, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
    k, v = (x.view(count, kv_heads, dim)
            for x in qkv[:, heads * dim :].split(kv_heads * dim, dim=1))  # fmt: skip
    tables = np.random.default_rng(args.seed).permutation(-(-count // size))[None]
    where = tables, np.zeros(1, np.int64), np.array([count])
    shape = tables.size, 2, kv_heads, size, dim
    ways = []
    for kind in (TritonAttention, TorchAttention):
        backend = kind(heads, kv_heads, dim, size, dtype, device)
        cache = torch.zeros(shape, device=device, dtype=dtype)
        ways.append(partial(store_into, cache, backend, k, v, backend.prepare(*where)))
    work = 2 * 2 * k.numel() * dtype.itemsize  # K and V, read and written
    return {"run": ways[0], "torch": {"index_put": ways[1]}, "work": work,
            "limit": "copy_bytes_per_s"}  # fmt: skip


def store_into(cache: Tensor, backend: TorchAttention, k: Tensor, v: Tensor,
               metadata: Any) -> Tensor:  # fmt: skip
    backend.store(k, v, cache, metadata)
    return cache


def copy_task(shapes: Figures, args: argparse.Namespace, dtype: torch.dtype,
              device: torch.device) -> Figures:  # fmt: skip
    """Copy-on-write of many blocks in every layer; its lists go to the device, so no graph."""
    _, kv_heads, dim = shapes["heads"]
    count = shapes["blocks"]
    shape = shapes["layers"], count, 2, kv_heads, args.block_size, dim
    pool = torch.randn(shape, device=device, dtype=dtype)
    order = np.random.default_rng(args.seed).permutation(count).tolist()
    moves = list(zip(order[: count // 2], order[count // 2 :], strict=True))
    runner: Any = SimpleNamespace(num_blocks=count, swap_space=None)
    return {"run": lambda: ModelRunner._move_blocks(runner, pool, pool, moves), "torch": {},
            "work": pool.nbytes, "limit": "copy_bytes_per_s", "graph": False}  # fmt: skip


# -- where the time of a step goes ---------------------------------------------------------------


def bench_timeline(args: argparse.Namespace) -> Figures:
    """The share of the wall time of decode steps in which the device runs nothing.

    The wall time is that of steps that nobody watches; the busy time is the union of all kernels
    and copies that torch.profiler saw in as many steps. On a CPU: of torch's operators.
    """
    count, half = max(args.batch_sizes), (args.tokens - 2) // 2
    llm = make_engine(args, enable_prefix_caching=False, max_num_seqs=count)
    device, vocab_size = llm.runner.device, llm.model_config.vocab_size
    random.seed(args.seed)
    figures: Figures = {"device": device.type}
    prompts = [random_prompt(args.prompt_len, vocab_size) for _ in range(count)]
    rows: list[tuple[str, ...]] = [("sequences", "ms a step", "watched", "busy", "idle")]
    generate(llm, [(prompt, 4) for prompt in prompts], args.temperature)
    for size in args.batch_sizes:
        for prompt in prompts[:size]:
            llm.add_request(prompt, sampling(args.temperature, args.tokens + 64))
        while sum(len(x.outputs[0].token_ids) > 1 for x in llm.step()) < size:
            pass
        figures[str(size)] = run = watch(llm, half)
        while llm.has_unfinished_requests():
            llm.step()
        times = (run["step_s"], run["watched_step_s"], run["busy_s"])
        rows.append((f"{size}", *(f"{s * 1e3:.3f}" for s in times), f"{run['idle_share']:.1%}"))
    llm.shutdown()
    table(f"decode steps, {args.prompt_len} tokens and more a sequence", rows)
    for name, seconds in run["kernels_s"].items():
        print(f"  {seconds * 1e6:10,.1f} us a step  {name}")
    return figures


def watch(llm: LLM, steps: int) -> Figures:
    """Seconds of a step: of the wall, of the wall while it is profiled, and of busy device time."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = llm.runner.device.type == "cuda"

    def run() -> float:
        wait = torch.cuda.synchronize if on_gpu else (lambda: None)
        wait()
        began = time.perf_counter()
        for _ in range(steps):
            llm.step()
        wait()
        return (time.perf_counter() - began) / steps

    wall = run()
    activity, kind = ((ProfilerActivity.CUDA, DeviceType.CUDA) if on_gpu
                      else (ProfilerActivity.CPU, DeviceType.CPU))  # fmt: skip
    with profile(activities=[activity]) as profiler:
        watched = run()
    events = [e for e in profiler.events() or () if e.device_type == kind]
    spans = [(e.time_range.start, e.time_range.end) for e in events]
    busy = union(spans) / 1e6 / steps
    spent: Counter[str] = Counter()
    for event, (start, end) in zip(events, spans, strict=True):
        spent[event.name[:80]] += end - start
    kernels = {name: time / 1e6 / steps for name, time in spent.most_common(15)}
    return {"step_s": wall, "watched_step_s": watched, "busy_s": busy, "steps": steps,
            "idle_share": max(0.0, 1 - busy / wall), "watched_idle_share": 1 - busy / watched,
            "events_per_step": len(events) / steps, "kernels_s": kernels}  # fmt: skip


def union(spans: list[tuple[float, float]]) -> float:
    """The length of what these intervals cover."""
    total, reached = 0.0, -inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


# -- everything that wants a GPU -----------------------------------------------------------------

ROOT = Path(__file__).resolve().parent
TINY = "--shape tiny --repeats 1 --threads 1"
FEW = "--batch-sizes 1 2 --tokens 8 --prompt-len 16"
SIZES = "--batch-sizes 1 8 32 64 128 256 --tokens 128 --repeats 2"
SOME = "--batch-sizes 1 32 256 --tokens 96 --repeats 1"
PART_SECONDS = 180  # one that hangs leaves time for others
MANY = " -n 6" * (importlib.util.find_spec("xdist") is not None)  # most of its time is compilation

# What is worth most comes first. Name: arguments on a GPU, arguments of --quick, both of bench.py
# (pytest's where they begin with tests/); a part without the latter cannot do without a GPU.
PARTS: dict[str, tuple[str, str | None]] = {
    "kernels": ("kernels", "kernels --shape tiny"),
    "workload": ("workload --full --repeats 2", f"workload --requests 4 {TINY}"),
    "timeline": ("timeline --batch-sizes 1 256 --prompt-len 512 --tokens 108",
                 f"timeline {FEW} {TINY}"),
    "kernel-tests": (f"tests/test_kernels.py{MANY}", None),
    "gpu-tests": ("tests/ -m gpu", None),
    "decode": (f"decode {SIZES}", f"decode {FEW} {TINY}"),
    "decode-no-graphs": (f"decode {SOME} --enforce-eager", f"decode {FEW} {TINY} --enforce-eager"),
    "decode-not-ahead": (f"decode {SOME} --steps-ahead 0", f"decode {FEW} {TINY} --steps-ahead 0"),
    "transformers": ("workload --requests 64 --input-len 100 512 --output-len 32 256 --repeats 1 "
                     "--vs transformers --vs-batch 64",
                     f"workload --requests 4 {TINY} --vs transformers"),
    "workload-not-ahead": ("workload --full --repeats 1 --steps-ahead 0",
                           f"workload --requests 4 {TINY} --steps-ahead 0"),
    "workload-no-graphs": ("workload --full --repeats 1 --enforce-eager",
                           f"workload --requests 4 {TINY} --enforce-eager"),
    "workload-flash": ("workload --full --repeats 1 --attention-backend flash", None),
}  # fmt: skip


def bench_gpu(args: argparse.Namespace) -> Figures:
    """All parts, each a process of its own: one that breaks the device breaks no other."""
    on_gpu = torch.cuda.is_available()
    if not (on_gpu or args.quick):
        raise SystemExit("gpu needs a CUDA device; --quick runs tiny shapes without")
    ends = time.monotonic() + 60 * args.minutes
    figures: Figures = {}
    for name in args.only:
        full, quick = PARTS[name]
        command = quick if args.quick else full
        left = ends - time.monotonic()
        if command is None:
            figures[name] = {"skipped": "--quick" if on_gpu else "needs a CUDA device"}
        elif left < 10:
            figures[name] = {"skipped": f"--minutes {args.minutes:g} were over"}
        else:
            print(f"\n== {name}: {command}", flush=True)
            figures[name] = run_part(command, min(left, PART_SECONDS))
        args.write(figures)
    rows = []
    for name, part in figures.items():
        ending = part.get("failed", part.get("skipped", "")).strip().splitlines()
        word = next((key for key in ("failed", "skipped") if key in part), "done")
        seconds = f"{part['seconds']:.0f} s" if "seconds" in part else ""
        rows.append((name, seconds, word, (ending or [""])[-1][:90]))
    table("parts", rows)
    return figures


def run_part(command: str, seconds: float) -> Figures:
    """Its figures; what it printed where it failed, without the places of files."""
    is_test = command.startswith("tests/")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        words = ["-m", "pytest", "-v", "--tb=short", "-W", "default", "-p", "no:cacheprovider",
                 f"--junitxml={out}"]  # fmt: skip
        if not is_test:
            words = [str(ROOT / "bench.py"), f"--json={out}"]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {"HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": paths}
        if command.startswith("kernels") and not torch.cuda.is_available():
            env["TRITON_INTERPRET"] = "1"
        began = time.monotonic()
        try:
            run = subprocess.run([sys.executable, *words, *shlex.split(command)], env=env, cwd=ROOT,
                                 capture_output=True, text=True, timeout=seconds)  # fmt: skip
            code, told, ending = run.returncode, run.stdout, run.stderr
        except subprocess.TimeoutExpired as error:
            streams = [x.decode() if isinstance(x, bytes) else x or ""
                       for x in (error.stdout, error.stderr)]  # fmt: skip
            code, (told, ending) = -1, streams
            ending += f"\n{told[-500:] if is_test else ''}\nstopped after {seconds:.0f} s"
        figures: Figures = {"command": command, "seconds": time.monotonic() - began}
        print(scrubbed(told[-2000:]) if is_test else told, flush=True)
        if is_test and out.exists():
            figures |= read_junit(out)
        elif out.exists():
            report = json.loads(out.read_text())
            figures |= {"figures": report[report["arguments"]["command"]]}
    if code:
        ending = ending.strip() or told.strip() or f"exit status {code}"
        figures["failed"] = scrubbed(ending[-6000:])
        print(figures["failed"][-2000:], flush=True)
    return figures


def read_junit(file: Path) -> Figures:
    """Counts, and the texts of failures."""
    cases = list(ElementTree.parse(file).iter("testcase"))
    kinds = ("failure", "error", "skipped")
    found = {kind: [case for case in cases if case.find(kind) is not None] for kind in kinds}
    bad = [*found["failure"], *found["error"]]
    texts = {f"{case.get('classname')}::{case.get('name')}": scrubbed(
                 "".join(part.text or "" for part in case if part.tag in kinds)[-3000:])
             for case in bad}  # fmt: skip
    return {"tests": len(cases), "failures": texts, "skipped_tests": len(found["skipped"]),
            "passed": len(cases) - len(bad) - len(found["skipped"])}  # fmt: skip


def scrubbed(text: str) -> str:
    """Where things lie on this machine concerns nobody: of absolute paths the last part stays."""
    return re.sub(r"(?<![\w.)])(?:/[\w.@+-]+)+/([\w.@+-]+)", r"\1", text)


# -- the command line ----------------------------------------------------------------------------

COMMANDS = {"workload": bench_workload, "decode": bench_decode, "host": bench_host,
            "prefix": bench_prefix, "memory": bench_memory, "kernels": bench_kernels,
            "timeline": bench_timeline, "gpu": bench_gpu}  # fmt: skip


def table(title: str, rows: list[tuple[str, ...]]) -> None:
    columns = max(len(row) for row in rows)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]
    print(f"\n{title}")
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=False)]
        print("  " + "  ".join((first.ljust(widths[0]), *cells)))


def report_failure(figures: Figures) -> None:
    if "failed" in figures:
        print(f"\ntransformers FAILED: {figures['failed']}")


def spread(values: Figures, unit: str) -> str:
    return " / ".join(f"{values[key] * 1e3:,.1f}" for key in ("mean", "p50", "p99")) + f" {unit}"


def release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def machine() -> Figures:
    """What the figures were measured with."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "nanopaged"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "source tree" if package == "nanopaged" else "none"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"versions": versions, "cpu": (names or [platform.processor()])[0],
            "threads": torch.get_num_threads(), "gpu": gpu}  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("command", nargs="?", choices=COMMANDS, default="workload")
    add("--shape", choices=SHAPES, help="random weights of this shape; default: qwen3-0.6b, and "
        "for memory the bundled model")
    add("--model", help="a checkpoint's directory instead")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--threads", type=int, help="of torch on the CPU")
    add("--seed", type=int, default=0)
    add("--repeats", type=int, default=3, help="measured runs, of which the median counts")
    add("--block-size", type=int, default=16)
    add("--num-blocks", type=int)
    add("--max-num-seqs", type=int, default=256)
    add("--max-num-batched-tokens", type=int, default=8192)
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add("--attention-backend", default="auto", help="auto, torch, triton, flash")
    add("--tensor-parallel-size", type=int, default=1, help="ranks; the limit is one device's")
    add("--steps-ahead", type=int, choices=(0, 1), help="default: 1 on a GPU, 0 on a CPU")
    add("--vs", choices=["transformers"], help="workload, decode: measure this one too")
    add("--vs-batch", type=int, default=16, help="its static batches")
    add("--json", type=Path, metavar="FILE", help="write every figure there")
    add = parser.add_argument_group("workload").add_argument
    add("--requests", type=int, help="default: 32; memory: 2000")
    add("--input-len", type=int, nargs=2, default=(16, 128), metavar=("MIN", "MAX"))
    add("--output-len", type=int, nargs=2, default=(16, 128), metavar=("MIN", "MAX"))
    add("--shared-prefix", type=int, default=0, metavar="N", help="tokens all begin with")
    add("--temperature", type=float, default=0.6)
    add("--full", action="store_true", help="256 requests, 100 to 1024 tokens in and out")
    add = parser.add_argument_group("decode, timeline and host").add_argument
    add("--batch-sizes", type=int, nargs="+", default=[1, 8, 16, 32])
    add("--host-sizes", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 4096])
    add("--prompt-len", type=int, default=128)
    add("--tokens", type=int, default=64, help="generated for each prompt")
    add = parser.add_argument_group("prefix").add_argument
    add("--prefix-len", type=int, default=1024)
    add("--own-len", type=int, default=32, help="tokens that follow the prefix")
    add = parser.add_argument_group("memory").add_argument
    add("--kv-block-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    add("--widths", type=int, nargs="+", default=[2, 4, 6], help="n and beam widths")
    add("--plots", type=Path, metavar="DIR", help="draw the figures there, as SVG files")
    add = parser.add_argument_group("gpu").add_argument
    add("--quick", action="store_true", help="tiny shapes, on the CPU too: does all of it run?")
    add("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
        help=", ".join(PARTS))
    add("--minutes", type=float, default=7.8, help="after these no part goes on")
    args = parser.parse_args(argv)
    if args.requests is None:
        args.requests = 2000 if args.command == "memory" else 32
    if args.command == "memory" and not (args.shape or args.model):
        args.model = str(Path(nanopaged.__file__).parent / "shakespeare")
    args.shape = args.shape or "qwen3-0.6b"
    if args.tokens < 4 or args.repeats < 1 or args.requests < 1:
        parser.error("--tokens must be at least 4, --repeats and --requests at least 1")
    if args.full:
        args.requests, args.input_len, args.output_len = 256, (100, 1024), (100, 1024)
    return args


def failed(figures: Any) -> bool:
    return isinstance(figures, dict) and bool(
        figures.get("failed") or any(map(failed, figures.values()))
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command; 1 if a peer or a part failed."""
    args = parse(argv)
    arguments = {key: value for key, value in vars(args).items() if key != "json"}
    if args.threads:
        torch.set_num_threads(args.threads)
    setting = machine()
    where = f"{setting['gpu'] or setting['cpu']}, {setting['threads']} threads"
    print(f"{where}, torch {setting['versions']['torch']}, {args.model or args.shape}")
    with tempfile.TemporaryDirectory() as folder:
        args.load_format = "auto" if args.model else "dummy"
        args.model = args.model or write_config(Path(folder), args.shape)
        # What is known already is written too: `gpu` does that after each of its parts.
        args.write = partial(write_json, args.json, arguments, setting, args.command)
        figures = COMMANDS[args.command](args)
    args.write(figures)
    return int(failed(figures))


def write_json(file: Path | None, arguments: Figures, setting: Figures, command: str,
               figures: Figures) -> None:  # fmt: skip
    if file:
        report = {"arguments": arguments, "machine": setting, command: figures}
        file.write_text(json.dumps(report, indent=1, default=str) + "\n")


if __name__ == "__main__":
    sys.exit(main())
