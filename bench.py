"""Measure how fast nanopaged is, and compare it with transformers and with the machine.

    python bench.py                           # 32 requests, random Qwen3-0.6B weights
    python bench.py --vs transformers         # transformers too, and the ratio
    python bench.py --full                    # nano-vllm's workload; use a GPU for this
    python bench.py decode --vs transformers  # tokens/s by batch size, and for prompts
    python bench.py serve                     # requests at random times: their waits
    python bench.py serve --url http://localhost:8000  # a server with OpenAI's API
    python bench.py host                      # the time a step spends outside the model
    python bench.py prefix                    # a prompt whose beginning is cached
    python bench.py memory --plots DIR        # the paper's results, and ours, simulated
    python bench.py --threads 4 --engine '{"block_size": 32, "dtype": "float32"}'
    python bench.py decode --shape tiny --repeats 1 --json FILE  # a quick try

On two quiet cores of a server, `decode` takes eight minutes, the default three,
`prefix` two, `serve` one, `host` and `memory` half a minute each; on a busy machine,
three times as long. --threads, --requests and --repeats change that.

Weights are random unless --engine says otherwise; trained ones would take as long. Each
figure is the median of `--repeats` runs after a warm-up. Both sides of a ratio are
measured in the same process. What only a GPU can show (individual kernels, timelines)
is measured by `tests/gpu/run.py`.
"""

import argparse
import json
import logging
import math
import os
import platform
import random
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import copy
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from shutil import which
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import patch
from urllib.error import HTTPError
from urllib.request import Request, urlopen

try:
    import torch
    import transformers
    from tqdm import tqdm

    import nanopaged
    from nanopaged import LLM, EngineConfig, RequestOutput, SamplingParams
    from nanopaged.attention import cdiv
    from nanopaged.checks import check
    from nanopaged.loading.weights import products
    from nanopaged.model import Linear
    from nanopaged.paper import simulation
    from nanopaged.paper.figures import FIGURES, standalone
    from nanopaged.tour.guide.lab import fastest
    from nanopaged.tour.kv import token_bytes
    from nanopaged.tour.observers import observers
    from nanopaged.tour.page import check_writable
except KeyboardInterrupt:
    sys.exit("\nbench.py: interrupted")

Args: TypeAlias = argparse.Namespace
Figures: TypeAlias = dict[str, Any]
Requests: TypeAlias = list[tuple[list[int], int]]  # a prompt, tokens to generate
RunBatch: TypeAlias = Callable[[list[list[int]], int], list[float]]

SHAPES: dict[str, dict[str, int]] = {
    "qwen3-0.6b": dict(
        num_hidden_layers=28, hidden_size=1024, intermediate_size=3072,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151_936,
    ),
    "tiny": dict(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=256,
    ),
}


# -- requests --------------------------------------------------------------------------


def write_config(folder: str, sizes: dict[str, int]) -> str:
    """Make a model directory with only a config.json, enough for random weights."""
    config = transformers.Qwen3Config(
        architectures=["Qwen3ForCausalLM"], dtype="bfloat16", tie_word_embeddings=True,
        max_position_embeddings=4096, **sizes)
    config.save_pretrained(folder)
    return folder


def make_engine(args: Args, **changes: Any) -> LLM:
    defaults = {"model": args.model, "load_format": "dummy"}
    tell("making the engine")
    llm = LLM(**(defaults | args.engine | changes))
    # Touch the KV pool's memory once, as a server will have done after a while.
    llm.engine.runner.kv_caches.zero_()
    return llm


def random_prompt(length: int, vocab_size: int) -> list[int]:
    return [random.randint(0, min(10_000, vocab_size - 1)) for _ in range(length)]


def draw_requests(args: Args, vocab_size: int) -> Requests:
    """Draw in the same order as nano-vllm's benchmark, to get the same lengths."""
    random.seed(args.seed)
    prompts = [random_prompt(random.randint(*args.input_len), vocab_size)
               for _ in range(args.requests)]
    return [(prompt, random.randint(*args.output_len)) for prompt in prompts]


def warm_up_requests(vocab_size: int) -> Requests:
    random.seed(-1)
    return [(random_prompt(24, vocab_size), 4) for _ in range(4)]


def sampling(length: int, temperature: float = 0.0, salt: str = "") -> SamplingParams:
    """Parameters for exactly `length` tokens. Cached blocks are found only by requests
    with the same salt.
    """
    return SamplingParams(
        temperature=temperature, max_tokens=length, ignore_eos=True, cache_salt=salt)


def generate(llm: LLM, requests: Requests, *more: Any, bar: bool = False
             ) -> list[RequestOutput]:
    prompts: list[Any] = [prompt for prompt, _ in requests]
    params = [sampling(length, *more) for _, length in requests]
    return llm.generate(prompts, params, use_tqdm=bar)


# -- the other engine ------------------------------------------------------------------


class Transformers:
    """transformers, with the same shape, dtype, device, and number of threads."""

    def __init__(self, args: Args, llm: LLM) -> None:
        self.temperature, self.batch_size = args.temperature, args.vs_batch
        logging.disable(logging.ERROR)  # no warning that psutil is missing
        config = transformers.AutoConfig.from_pretrained(
            args.model, trust_remote_code=False)
        loader: Any = transformers.AutoModelForCausalLM
        model = loader.from_config(config, dtype=llm.engine.runner.dtype)
        torch.cuda.empty_cache()  # it asks how much memory is free
        self.model = model.to(llm.engine.runner.device).eval()

    def run_batch(self, prompts: list[list[int]], length: int) -> list[float]:
        """Run a batch, padded on the left. Returns the times at which tokens arrive."""
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        times: list[float] = []
        clock = SimpleNamespace(  # it is called with the prompt, then with each token
            put=lambda _: times.append(time.perf_counter()), end=lambda: None)
        self.model.generate(
            ids.to(self.model.device), attention_mask=mask.to(self.model.device),
            generation_config=self.generation_config(length), streamer=clock)
        assert len(times) == 1 + length, "transformers stopped early"
        return times[1:]

    def static(self, requests: Requests) -> float:
        """Seconds for all requests; each batch runs until its longest output ends."""
        began = time.perf_counter()
        for first in range(0, len(requests), self.batch_size):
            batch = requests[first : first + self.batch_size]
            longest = max(length for _, length in batch)
            self.run_batch([prompt for prompt, _ in batch], longest)
        return time.perf_counter() - began

    def continuous(self, requests: Requests) -> float:
        """Seconds for all requests with continuous batching, not counting its setup.

        This stands in for `generate_batch`, which cannot give each output a length of
        its own.
        """
        # On a CPU, every layer multiplies all queries of a step by all keys, and by
        # default the pool takes 60% of the memory. transformers is fastest with
        # few tokens in a step and a small pool.
        options: Figures = {}
        if self.model.device.type == "cpu":
            blocks = 8 + sum(-(-(len(p) + length) // 32) for p, length in requests)
            options = {"page_size": 32, "num_blocks": blocks, "max_batch_tokens": 256}

        lengths: list[int] = []
        longest = max(length for _, length in requests)
        with self.model.continuous_batching_context_manager(
            generation_config=self.generation_config(longest),
            continuous_batching_config=transformers.ContinuousBatchingConfig(**options),
            timeout=5) as manager:
            began = time.perf_counter()
            for prompt, length in requests:
                manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
            while len(lengths) < len(requests):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    lengths.append(len(result.generated_tokens))
                assert manager.is_running(), "transformers' thread ended early"
            seconds = time.perf_counter() - began
        assert sum(lengths) == sum(n for _, n in requests), "it stopped early"
        return seconds

    def generation_config(self, length: int) -> transformers.GenerationConfig:
        return transformers.GenerationConfig(
            max_new_tokens=length, eos_token_id=-1, pad_token_id=0,
            do_sample=self.temperature > 0, temperature=self.temperature or 1.0,
            top_k=0 if self.temperature else 50)  # 0 keeps all tokens, which is faster


# -- the measurements ------------------------------------------------------------------


def repeat(run: Callable[..., float], warm_up: Any, real: Any, repeats: int,
           name: str = "") -> Figures:
    """The median of `run(real)` after `run(warm_up)`, or the error that ended it."""
    try:
        run(warm_up)
        runs = [run(real) for _ in progress(range(repeats), desc=name)]
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    return {"median": median(runs), "runs": runs}


def bench_workload(args: Args) -> Figures:
    """Serve random requests, all at once, as nano-vllm's benchmark does."""
    llm = make_engine(args)
    vocab_size = llm.model_config.vocab_size
    requests = draw_requests(args, vocab_size)
    generate(llm, warm_up_requests(vocab_size), args.temperature)
    runs = [serve(llm, requests, args.temperature)
            for _ in progress(range(args.repeats), desc="nanopaged")]
    runs.sort(key=lambda run: run["seconds"])
    figures = runs[len(runs) // 2]  # the median; of two runs, the slower one

    limits = machine_limits(llm.engine.runner.device, llm.engine.runner.dtype)
    figures = figures | limits | time_floor(requests, llm, limits)
    figures["share_of_limit"] = figures["floor_s"] / figures["seconds"]
    llm.shutdown()
    show("the workload", {label(name): {"": cell(value, name)}
                          for name, value in figures.items()})
    figures["runs"] = runs
    if not args.vs:
        return figures

    peer = Transformers(args, llm)
    ways = {"static batches": peer.static, "continuous batching": peer.continuous}
    rates: Figures = {}
    for name, way in ways.items():
        run = repeat(way, warm_up_requests(vocab_size), requests, args.repeats, name)
        if "median" in run:
            run["output_tokens_per_s"] = figures["tokens_out"] / run["median"]
            run["ratio"] = run["median"] / figures["seconds"]
        rates[name] = run
        show("transformers (ratio: nanopaged is this many times as fast)", {name: run})
    return figures | {"transformers": rates}


def serve(llm: LLM, requests: Requests, temperature: float) -> Figures:
    before = asdict(llm.stats())
    began = time.perf_counter()
    salt = str(began)  # a new one, so that nothing is cached
    outputs = generate(llm, requests, temperature, salt, bar=sys.stderr.isatty())
    seconds = time.perf_counter() - began
    spent = {name: now - before[name] for name, now in asdict(llm.stats()).items()}

    return {
        "seconds": seconds,
        "steps": spent["steps"],
        "tokens_in": sum(len(output.prompt_token_ids) for output in outputs),
        "tokens_out": spent["output_tokens"],
        "output_tokens_per_s": spent["output_tokens"] / seconds,
        "preemptions": spent["preemptions_recompute"] + spent["preemptions_swap"],
    }


def bench_decode(args: Args) -> Figures:
    """Tokens generated per second, by batch size, and prompt tokens per second.

    A decode step reads all weights once. `weights_share` is their bytes per second,
    divided by the memory's speed. A batch of one does little else, so 1 would be
    perfect. Larger batches also read more K and V, and compute more.
    """
    most = max(args.batch_sizes)
    llm = make_engine(
        args, enable_prefix_caching=False, max_num_seqs=most,
        max_num_batched_tokens=most * args.prompt_len)  # so all prompts run in one step
    vocab_size = llm.model_config.vocab_size
    random.seed(args.seed)
    prompts = [random_prompt(args.prompt_len, vocab_size) for _ in range(most)]
    device, dtype = llm.engine.runner.device, llm.engine.runner.dtype
    figures = {
        "nanopaged": measure_rates(args, prompts, partial(run_batch, llm), device)}
    shares = {} if llm.engine.runner.is_gpu else {
        f"decode, batch {size}": time_shares(llm, prompts[:size], args.tokens)
        for size in args.batch_sizes} | {"prefill": time_shares(llm, prompts, 1)}
    kv_bytes = token_bytes(llm)
    llm.shutdown()

    weights = sum(count_weights(llm.model_config)) * dtype.itemsize
    for size in args.batch_sizes:
        run = figures["nanopaged"][f"decode, batch {size}"]
        if "median" in run:
            steps = run["median"] / size  # per second
            run["weights_share"] = weights * steps / run["bytes_per_s"]
            keys = size * (args.prompt_len + args.tokens / 2)
            least = (weights + keys * kv_bytes) / run["bytes_per_s"]  # seconds
            run["share_of_limit"] = least * steps
    if args.vs:
        args.temperature = 0.0
        peer = Transformers(args, llm)
        figures["transformers"] = measure_rates(args, prompts, peer.run_batch, device)
        for name, run in figures["transformers"].items():
            if "median" in run:
                run["ratio"] = figures["nanopaged"][name]["median"] / run["median"]
    for engine, rates in figures.items():
        show(f"{engine}, tokens/s: {args.prompt_len} in, {args.tokens} out", rates,
             bar="median")
    if shares:  # the pieces of a step on a GPU: see `tests/gpu/run.py`
        show("nanopaged, where the time goes", shares)
    print(f"\nWeights: {weights / 1e6:,.0f} MB")
    return figures | {"time_shares": shares, "weights_bytes": weights}


def time_shares(llm: LLM, prompts: list[list[int]], length: int) -> Figures:
    """Of the steps of a batch, the share of each piece. Without its prompts, if more
    than one token is generated.
    """
    seconds = {"products": 0.0, "attention": 0.0, "rest": 0.0}

    def timed(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                seconds[kind] += time.perf_counter() - began
        return run

    runner = llm.engine.runner
    places = [(each, "forward", "products") for each in runner.model.modules()
              if isinstance(each, torch.nn.Linear)]
    places += [(runner.backend, "attend", "attention")]
    with ExitStack() as stack:
        for place, name, kind in places:
            piece = timed(kind, getattr(place, name))
            stack.enter_context(patch.object(place, name, piece))
        for prompt in prompts:
            llm.add_request(prompt, sampling(length))
        if length > 1:
            llm.step()
            seconds.update(dict.fromkeys(seconds, 0.0))
        began = time.perf_counter()
        while llm.has_unfinished_requests():
            llm.step()
    whole = time.perf_counter() - began
    seconds["rest"] = whole - sum(seconds.values())
    return {kind: each / whole for kind, each in seconds.items()}


def run_batch(llm: LLM, prompts: list[list[int]], length: int) -> list[float]:
    """Run a batch. Returns the times at which all sequences had one more token."""
    for prompt in prompts:
        llm.add_request(prompt, sampling(length))
    times = []
    while llm.has_unfinished_requests():
        if len(llm.step()) == len(prompts):
            times.append(time.perf_counter())
    if len(times) != length:
        raise ValueError("the pool is too small for this batch: raise num_blocks")
    return times


def measure_rates(args: Args, prompts: list[list[int]], run_batch: RunBatch,
                  device: torch.device) -> Figures:
    """Tokens/s, and beside each figure how fast the memory was at that time."""
    def prefill(batch_size: int) -> float:
        began = time.perf_counter()
        times = run_batch(prompts[:batch_size], 1)
        return batch_size * args.prompt_len / (times[0] - began)

    def decode(batch_size: int, length: int) -> float:
        times = run_batch(prompts[:batch_size], length)
        return batch_size * (length - 1) / (times[-1] - times[0])

    runs: dict[str, Any] = {
        f"decode, batch {size}": (partial(decode, size), 4, args.tokens)
        for size in args.batch_sizes}
    runs["prefill"] = prefill, 2, len(prompts)
    return {name: repeat(*run, args.repeats, name) | {
        "bytes_per_s": memory_speed(device)} for name, run in runs.items()}


class Watcher:
    """Measures how many seconds each part of each step takes."""

    def __init__(self, llm: LLM) -> None:
        self.steps: list[Figures] = []
        self.last = 0.0
        self.sent: list[int] = []  # bytes that would go to another rank
        self.ranks = copy(llm.engine.runner.ranks)
        vars(self.ranks).update(
            size=2, broadcast=lambda x, _: self.sent.append(x.nbytes))
        observers(llm).append(self.observe)
        model: Any = llm.engine.runner.model
        model.register_forward_pre_hook(lambda *_: self.note("inputs_s"))
        model.register_forward_hook(lambda *_: self.note("model_s"))

    def note(self, name: str) -> None:
        """Store the time since the last note under `name`."""
        now = time.perf_counter()
        self.steps[-1][name] = now - self.last
        self.last = time.perf_counter()

    def observe(self, phase: str, batch: Any) -> None:
        if phase == "begin":
            self.steps.append({})
            self.last = time.perf_counter()
        elif phase == "scheduled":
            self.note("schedule_s")
            self.sent.clear()
            self.ranks.send(batch)
            self.note("message_s")  # the time to tell other ranks what to run
            self.steps[-1]["message_bytes"] = sum(self.sent)
        else:
            self.note({"executed": "sampler_s", "updated": "update_s"}[phase])


def bench_host(args: Args) -> Figures:
    """Time a decode step outside the model, by number of running sequences.

    The model is as small as possible. Its time and the sampler's are not counted.
    """
    smallest = SHAPES["tiny"] | {"num_hidden_layers": 1, "vocab_size": 16}
    args.model = write_config(args.folder, smallest)
    figures = {}
    for size in progress(args.host_sizes, desc="sequences"):
        llm = make_engine(
            args, max_num_seqs=size, enforce_eager=True,
            # Admit all sequences before the first one ends, with blocks for all.
            max_num_batched_tokens=max(8192, size * (args.prompt_len // 4 + 1)),
            num_blocks=256 + size * (args.prompt_len + args.tokens) // 14)
        llm.engine.steps_ahead = False
        figures[str(size)] = host_costs(llm, size, args)
        llm.shutdown()
    show("the time of a decode step outside the model, by running sequences of "
         f"{args.prompt_len} tokens or more", figures, bar="step_s")
    return figures


def host_costs(llm: LLM, size: int, args: Args) -> Figures:
    watcher = Watcher(llm)
    random.seed(args.seed)
    for _ in range(size):
        llm.add_request(random_prompt(args.prompt_len, 16), sampling(args.tokens))

    steps = []  # only those in which all sequences decode and none ends
    while llm.has_unfinished_requests():
        lengths = [len(output.outputs[0].token_ids) for output in llm.step()]
        if len(lengths) == size and min(lengths) > 1 and max(lengths) < args.tokens:
            step = watcher.steps[-1]
            step["step_s"] = step["schedule_s"] + step["inputs_s"] + step["update_s"]
            step["sequence_s"] = step["step_s"] / size
            steps.append(step)
    return {name: median(step[name] for step in steps) for name in steps[0]}


def bench_prefix(args: Args) -> Figures:
    """Time the first token of two prompts that begin alike, one after the other."""
    llm = make_engine(args)
    vocab_size = llm.model_config.vocab_size
    random.seed(args.seed)
    generate(llm, [(random_prompt(args.prefix_len, vocab_size), 2)])
    figures: Figures = {"first prompt": {"runs": []}, "second prompt": {"runs": []}}
    for _ in progress(range(args.repeats), desc="pairs of prompts"):
        prefix = random_prompt(args.prefix_len, vocab_size)
        for run in figures.values():
            prompt = prefix + random_prompt(32, vocab_size)
            began = time.perf_counter()
            (output,) = generate(llm, [(prompt, 1)])
            run["runs"].append(time.perf_counter() - began)
            run["first_token_s"] = median(run["runs"])
            run["computed_tokens"] = len(prompt) - output.num_cached_tokens
    llm.shutdown()
    show(f"prompts of {args.prefix_len} shared tokens and 32 others", figures,
         bar="first_token_s")
    return figures


def bench_memory(args: Args) -> Figures:
    """Simulate the paper's Figures 2 and 12 to 18, and show its numbers beside ours."""
    figures: Figures = {}
    bar = progress(desc="simulated servers", unit=" servers")
    simulation.after_simulation.append(bar.update)
    for name in args.figures:
        for key, result in FIGURES[name]().items():
            show(result.title, result.rows)
            figures[key] = result.rows
            if args.plots and result.chart:
                file = args.plots.joinpath(f"{key}.svg")
                file.write_text(standalone(result.chart))
                print(f"  drawn in {file}")
    simulation.after_simulation.clear()
    bar.close()
    return figures


# -- requests that come at random times ------------------------------------------------


class Served(NamedTuple):
    """When a request came, when its tokens did, in seconds, and how many there are: a
    server may send several at once.
    """

    came: float
    times: list[float]
    num_tokens: int


def bench_serve(args: Args) -> Figures:
    """What users wait for, if requests come at random: with several budgets of tokens
    a step, and in static batches, none of which begins before the last has ended.
    """
    size = args.vs_batch
    ways = {f"{n:,} tokens a step": (n, 0) for n in args.budgets}
    ways[f"static batches of {size}"] = size * args.input_len[1], size
    if args.url:
        ways = {args.url: (0, 0)}
    requests = draw_requests(args, 256)  # ids that every tokenizer has
    arrivals: list[float] = []
    figures: Figures = {}
    for name, (budget, static) in ways.items():
        run: Callable[..., list[Served]] = partial(ask_server, args.url)
        if not args.url:
            llm = make_engine(args, max_num_seqs=size, max_num_batched_tokens=budget,
                              enable_prefix_caching=False)
            run = partial(serve_at, llm, static)
        tell(name)
        run(warm_up_requests(256), [0.0] * 4)
        if not arrivals:
            rate = args.rate or 0.8 * throughput(run(requests, [0.0] * len(requests)))
            random.seed(args.seed)  # a Poisson process
            arrivals = [*accumulate(random.expovariate(rate) for _ in requests)]
        figures[name] = summary(run(requests, arrivals), *args.limits)
        if not args.url:
            llm.shutdown()
    limits = [cell(limit, "limit_s") for limit in args.limits]
    show(f"{len(requests)} requests, {rate:.3g} a second. Good: the first token after "
         f"{limits[0]}, the others {limits[1]}, or sooner", figures, "good_per_s")
    show_percentiles(figures)
    return figures | {"rate": rate}


def serve_at(llm: LLM, static: int, requests: Requests, arrivals: list[float]
             ) -> list[Served]:
    """Serve each request when it comes. Or, if `static` is not 0, wait for the last
    batch's end, then take up to so many at once, pad their prompts to the longest, and
    compute until the longest answer is complete.
    """
    served = [Served(came, [], length)
              for came, (_, length) in zip(arrivals, requests, strict=True)]
    owners: dict[str, Served] = {}
    waiting: list[int] = []
    num_come, began = 0, time.perf_counter()
    while num_come < len(requests) or waiting or owners:
        now = time.perf_counter() - began
        while num_come < len(requests) and arrivals[num_come] <= now:
            waiting.append(num_come)
            num_come += 1
        taken = [] if static and owners else waiting[: static or len(waiting)]
        waiting = waiting[len(taken) :]
        batch = [requests[number] for number in taken]
        for number, (prompt, length) in zip(taken, batch, strict=True):
            if static:
                width = max(len(other) for other, _ in batch)
                prompt = [0] * (width - len(prompt)) + prompt
                length = max(length for _, length in batch)
            owners[llm.add_request(prompt, sampling(length))] = served[number]
        if not owners:
            time.sleep(max(0, arrivals[num_come] - now))
        for output in llm.step():
            owner = owners[output.request_id]
            if len(owner.times) < owner.num_tokens:  # what follows is padding
                owner.times.append(time.perf_counter() - began)
            if output.finished:
                del owners[output.request_id]
    return served


def ask_server(url: str, requests: Requests, arrivals: list[float]) -> list[Served]:
    """The same of a server with OpenAI's API, with a thread for each request."""
    try:
        answer = urlopen(f"{url}/v1/models")
    except OSError as error:
        sys.exit(f"bench.py: {url} does not answer: {error}")
    with answer:
        common = {"model": json.load(answer)["data"][0]["id"], "stream": True,
                  "stream_options": {"include_usage": True},
                  "temperature": 0, "ignore_eos": True}
    # Whatever the server has in its prefix cache, these prompts begin otherwise.
    start = [secrets.randbelow(256) for _ in range(8)]
    began = time.perf_counter()

    def ask(came: float, prompt: list[int], length: int) -> Served:
        prompt = (start + prompt)[: len(prompt)]
        body = common | {"prompt": prompt, "max_tokens": length}
        request = Request(f"{url}/v1/completions", json.dumps(body).encode(),
                          {"Content-Type": "application/json"})
        time.sleep(max(0, came - (time.perf_counter() - began)))
        times, count = [], 0
        with urlopen(request) as lines:
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if data == line.strip() or not data.startswith(b"{"):
                    continue
                chunk = json.loads(data)
                check(not chunk.get("error"), url, "free of errors", chunk)
                if chunk.get("choices"):
                    times.append(time.perf_counter() - began)
                count = (chunk.get("usage") or {}).get("completion_tokens", count)
        check(bool(times), url, "a stream with choices", times)
        return Served(came, times, count or len(times))

    with ThreadPoolExecutor(len(requests)) as pool:
        try:
            return [*pool.map(ask, arrivals, *zip(*requests, strict=True))]
        except (KeyError, OSError, ValueError) as error:
            said = error.read().decode() if isinstance(error, HTTPError) else ""
            sys.exit(f"bench.py: {url} fails: {error} {said:.200}".strip())


def throughput(served: list[Served]) -> float:
    """Requests per second, from the first arrival to the last token."""
    seconds = max(each.times[-1] for each in served) - min(each.came for each in served)
    return len(served) / seconds


def summary(served: list[Served], first_limit: float, next_limit: float) -> Figures:
    """Percentiles of the time to first token (TTFT), of the time per output token
    after it (TPOT), and of single gaps between tokens. Goodput: the requests per
    second for which both times were within their limits.
    """
    rate = throughput(served)
    ttft = [each.times[0] - each.came for each in served]
    tpot = [(times[-1] - times[0]) / max(1, n - 1) for _, times, n in served]
    gaps = [after - before for each in served
            for before, after in zip(each.times, each.times[1:], strict=False)]
    good = sum(first <= first_limit and rest <= next_limit
               for first, rest in zip(ttft, tpot, strict=True)) / len(served)
    return {
        f"{name}_p{p}_s": percentile(values, p)
        for name, values in {"ttft": ttft, "tpot": tpot}.items() for p in (50, 90, 99)
    } | {
        "gap_p99_s": percentile(gaps, 99),
        "tokens_per_s": rate * sum(each.num_tokens for each in served) / len(served),
        "good_per_s": rate * good}


def percentile(values: list[float], percent: int) -> float:
    """The smallest value that at least so many percent do not exceed."""
    return sorted(values)[cdiv(percent * len(values), 100) - 1] if values else 0.0


def show_percentiles(figures: Figures) -> None:
    """A line for each row, from 1 ms to 10 s on a logarithmic scale."""
    for kind in ("ttft", "tpot"):
        print(f"\n{kind.upper()}: 5 is the median, 9 the 90th percentile, * the 99th")
        for name, row in figures.items():
            marks = [" "] * 49
            for mark, p in zip("59*", (50, 90, 99), strict=True):
                place = 12 * math.log10(max(1e-9, row[f"{kind}_p{p}_s"]) / 1e-3)
                marks[min(48, max(0, round(place)))] = mark
            print(f"  {name:24.24}|{''.join(marks)}|")
        print(" " * 26 + "".join(f"{text:<12}" for text in
                                 ("1 ms", "10 ms", "100 ms", "1 s", "10 s")).rstrip())


# -- what the machine can do -----------------------------------------------------------
#
# A step cannot be faster than its bytes over the memory's bandwidth, nor than its
# operations over the rate of matrix products. Decoding a few sequences is bound by
# bytes: all weights are read for each token. Prompts are bound by operations. They come
# first, and there is little to decode meanwhile, so the two times are added.


def machine_limits(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Bytes/s and FLOP/s, measured. Operations: many rows times a large matrix, the
    engine's own `Linear`, which is packed as in the engine.
    """
    tell("measuring the machine")
    batch = 1024 if device.type == "cpu" else 8192
    rows, columns = 8192, 2048
    linear = Linear(columns, rows=rows).to(device, dtype)
    linear.requires_grad_(False).weight.normal_()
    if products:
        products.pack(linear, batch_invariant=False)
    x = torch.randn(batch, columns).to(device, dtype)
    product_s = fastest(lambda: linear(x), device)
    return {
        "bytes_per_s": memory_speed(device),
        "flops_per_s": 2 * batch * rows * columns / product_s}


def memory_speed(device: torch.device) -> float:
    """Bytes/s: the sum of a buffer of 1 GiB, which no cache can hold, or a copy of it,
    the faster of the two. (The memory of some machines changes its speed every few
    minutes, so this is measured beside each figure.)
    """
    buffer = torch.ones(2**27, dtype=torch.int64, device=device)
    other = torch.empty_like(buffer)
    seconds = min(fastest(buffer.sum, device),  # a copy reads and writes
                  fastest(lambda: other.copy_(buffer), device) / 2)
    return buffer.nbytes / seconds


def count_weights(config: Any) -> tuple[int, int]:
    """How many weights a decode step reads: in all layers, and in the output head."""
    heads = config.num_attention_heads + config.num_key_value_heads
    attention_weights = config.hidden_size * 2 * heads * config.head_dim  # q, o, k, v
    mlp_weights = config.hidden_size * 3 * config.intermediate_size
    layer_weights = config.num_hidden_layers * (attention_weights + mlp_weights)
    return layer_weights, config.hidden_size * config.vocab_size


def count_keys(num_tokens: int) -> int:
    """How many keys the first tokens of a sequence see: 1 + 2 + ... + num_tokens."""
    return num_tokens * (num_tokens + 1) // 2


def time_floor(
    requests: Requests, llm: LLM, limits: dict[str, float]) -> dict[str, float]:
    """The least time in which this machine could serve `requests`.

    Bytes: all weights once a step, in as few steps as the longest output and
    max_num_seqs allow; K and V of the whole context for every decode, and of every
    prompt once. Operations: 2 for every weight and token, and 4 x heads x head_dim for
    every query and key in every layer. Activations and writes do not count. Bytes and
    operations overlap perfectly, but only among prompts, and among decodes: the floor
    is the larger of the two for prompts, and then for decodes.
    """
    config = llm.model_config
    layer_weights, head_weights = count_weights(config)
    weights = layer_weights + head_weights
    lengths = [length for _, length in requests]
    tokens_in = sum(len(prompt) for prompt, _ in requests)
    tokens_out = sum(lengths)
    steps = max(*lengths, cdiv(tokens_out, llm.config.max_num_seqs))

    computed = 0  # tokens, of which the last one of a request is none
    keys = 0  # that the computed tokens see
    prompt_keys = 0
    for prompt, length in requests:
        num_tokens = len(prompt) + length - 1
        computed += num_tokens
        keys += count_keys(num_tokens)
        prompt_keys += count_keys(len(prompt))

    def bytes_time(steps: int, keys: int) -> float:  # keys, each with its value
        weight_bytes = steps * weights * llm.engine.runner.dtype.itemsize
        kv_bytes = keys * token_bytes(llm)
        return float((weight_bytes + kv_bytes) / limits["bytes_per_s"])

    def flops_time(tokens: int, tokens_out: int, keys: int) -> float:
        per_key = 4 * config.num_attention_heads * config.head_dim
        flops = 2 * layer_weights * tokens
        flops += 2 * head_weights * tokens_out  # prompts need the head only once
        flops += config.num_hidden_layers * per_key * keys
        return float(flops / limits["flops_per_s"])

    bytes_s = bytes_time(steps, keys - prompt_keys + tokens_in)
    flops_s = flops_time(computed, tokens_out, keys)
    prompt_bytes_s = bytes_time(1, tokens_in)
    prompt_flops_s = flops_time(tokens_in, len(requests), prompt_keys)
    prompts_s = max(prompt_bytes_s, prompt_flops_s)
    floor_s = prompts_s + max(bytes_s - prompt_bytes_s, flops_s - prompt_flops_s)
    return {"bytes_s": bytes_s, "flops_s": flops_s, "floor_s": floor_s}


# -- the command line ------------------------------------------------------------------

COMMANDS = {
    "workload": bench_workload, "decode": bench_decode, "host": bench_host,
    "prefix": bench_prefix, "memory": bench_memory, "serve": bench_serve,
}


# What figures are called in tables. Those that end in _s are seconds.
LABELS = {
    "output_tokens_per_s": "output tokens/s", "bytes_s": "time of the bytes",
    "flops_s": "time of the operations", "floor_s": "fastest possible",
    "bytes_per_s": "speed of the memory", "flops_per_s": "speed of products",
    "share_of_limit": "share of the limit", "weights_share": "share of memory's speed",
    "step_s": "in all", "sequence_s": "for each sequence",
    "first_token_s": "first token", "tokens_per_s": "tokens/s",
    "good_per_s": "good requests/s"}


def tell(phase: str) -> None:
    """Say what takes a while, to those who wait, not to those who read the figures."""
    print(f"{phase} ...", file=sys.stderr, flush=True)


def progress(*iterable: Any, desc: str, **options: Any) -> Any:
    """A line that says what is measured and, in a terminal, a bar."""
    tell(desc)
    return tqdm(*iterable, desc=desc, leave=False, disable=None, **options)


def show(title: str, rows: Figures, bar: str = "") -> None:
    """Print a table, {row: {column: number or text}}, without any other values, and a
    bar for the numbers of one column.
    """
    columns = dict.fromkeys(k for row in rows.values() for k in row if cell(row[k]))
    table, bars = [["", *map(label, columns)]], [""]
    most = max((row.get(bar, 0) for row in rows.values()), default=0) if bar else 0
    for name, row in rows.items():
        table.append([name, *(cell(row.get(k, ""), k) for k in columns)])
        bars.append("#" * round(20 * row.get(bar, 0) / most) if most else "")
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print(f"\n{title}")
    for (name, *cells), drawn in zip(table, bars, strict=True):
        padded = [text.rjust(n) for text, n in zip(cells, widths[1:], strict=True)]
        print("  ".join(("", name.ljust(widths[0]), *padded, drawn)).rstrip())


def label(name: str) -> str:
    return LABELS.get(name, name.removesuffix("_s").replace("_", " "))


def cell(value: Any, name: str = "") -> str:
    """A value as text, with a unit if its name says that it is in seconds."""
    is_number = isinstance(value, (int, float))
    if is_number and name.endswith("_s") and not name.endswith("per_s"):
        unit, factor = next(((u, f) for u, f in (("us", 1e6), ("ms", 1e3))
                             if value * f < 1000), ("s", 1))
        return f"{value * factor:.3g} {unit}"
    if unit := {"bytes_per_s": "GB/s", "flops_per_s": "GFLOP/s"}.get(name):
        return f"{value / 1e9:,.4g} {unit}"
    if is_number:
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return value if isinstance(value, str) else ""


def machine() -> Figures:
    """The machine and the versions that the figures were measured with."""
    packages = ("torch", "triton", "numba", "transformers")
    versions = {name: version(name) for name in packages if find_spec(name)}
    versions["nanopaged"] = nanopaged.__version__  # it need not be installed
    info = Path("/proc/cpuinfo")
    cpu = re.search("model name.*: (.*)", info.read_text() if info.exists() else "")
    return {
        "versions": versions | {"python": sys.version.split()[0]},
        "cpu": cpu[1] if cpu else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": find_commit(),
    }


def find_commit() -> str:
    """The commit that is measured, or what COMMIT says, where there is only a copy."""
    root, name = Path(__file__).parent, os.environ.get("COMMIT", "")
    if not name and (root / ".git").exists() and which("git"):
        words = ["git", "-C", str(root), "rev-parse", "HEAD"]
        name = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    return name or "unknown"


def at_least(low: int, kind: type = int) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        if not low <= kind(text) < float("inf"):
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {text}")
        return kind(text)
    return number


def options(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be JSON, such as '{{\"block_size\": 32}}' (in PowerShell, with a "
            f"backslash before each inner quote), got {text}: {error}"
            ) from None


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse and check the arguments, so that errors come before anything runs."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [COMMAND] [OPTIONS]", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    number = partial(parser.add_argument, type=at_least(1))
    parser.add_argument("command", nargs="?", choices=COMMANDS, default="workload")
    parser.add_argument("--shape", choices=SHAPES, help="by default "
                        "qwen3-0.6b, and for serve the bundled model's")
    parser.add_argument("--model", help="directory with a config.json")
    parser.add_argument("--engine", type=options, default={}, metavar="JSON",
                        help="keyword arguments of LLM")
    parser.add_argument("--vs", choices=["transformers"], help="for workload, decode")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="for memory")
    parser.add_argument("--figures", nargs="+", choices=FIGURES, help="for memory",
                        default=["memory", "latency"])
    parser.add_argument("--full", action="store_true", help="nano-vllm's workload")
    parser.add_argument("--temperature", type=at_least(0, float), default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="for serve: a server with OpenAI's API")
    parser.add_argument("--rate", type=at_least(0, float), default=0, help="requests/s "
                        "for serve; by default 80%% of what can be served")
    parser.add_argument("--limits", nargs=2, type=at_least(0, float), metavar="S",
                        default=(0.2, 0.02), help="for serve: TTFT and TPOT, seconds")
    number("--budgets", nargs="+", default=[1024, 256, 64], help="of serve's steps")
    number("--threads", help="for torch and the Numba kernel")
    number("--repeats", default=3, help="number of measured runs")
    number("--vs-batch", default=16, help="size of static batches, and of serve's")
    number("--requests", default=32)
    number("--input-len", nargs=2, default=(16, 128), metavar=("MIN", "MAX"))
    number("--output-len", nargs=2, default=(16, 128), metavar=("MIN", "MAX"))
    number("--batch-sizes", nargs="+", default=[1, 8, 16, 32], help="for decode")
    number("--host-sizes", nargs="+", default=[1, 16, 64, 256, 1024, 4096])
    number("--prompt-len", default=128, help="for decode, host")
    number("--tokens", type=at_least(8), default=64, help="for decode, host")
    number("--prefix-len", default=1024)
    if "serve" in (sys.argv if argv is None else argv):
        parser.set_defaults(requests=120, input_len=(16, 768))
    args = parser.parse_args(argv)
    if args.full:
        args.requests = 256
        args.input_len = args.output_len = (100, 1024)

    try:
        EngineConfig(args.model, **args.engine)
        if args.model and not Path(args.model, "config.json").is_file():
            raise ValueError(f"--model: there is no config.json in {args.model}")
        if any(low > high for low, high in (args.input_len, args.output_len)):
            raise ValueError("--input-len, --output-len: MIN must be at most MAX")
        if args.json:
            check_writable(args.json)
        if args.plots:
            args.plots.mkdir(parents=True, exist_ok=True)
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns 1 if transformers failed, otherwise 0."""
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)  # the Numba kernel uses the same number
    report = {"arguments": vars(args).copy(), "machine": machine()}
    found = report["machine"]
    print(f"{found['gpu'] or found['cpu']}, {found['threads']} threads, "
          f"commit {found['commit']}; "
          + ", ".join(f"{name} {number}" for name, number in found["versions"].items()))
    with tempfile.TemporaryDirectory() as args.folder:
        if not args.model and (args.shape or args.command != "serve"):
            shape = SHAPES[args.shape or "qwen3-0.6b"]
            args.model = write_config(args.folder, shape)
        if not args.model:  # the bundled one is faster so, on a CPU
            args.engine = {"dtype": "float32"} | args.engine
        report[args.command] = COMMANDS[args.command](args)
    text = json.dumps(report, indent=1, default=str)
    if args.json:
        args.json.write_text(text + "\n")
    return int('"failed":' in text)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\nbench.py: interrupted")
