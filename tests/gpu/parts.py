"""The parts of run.py: `python parts.py NAME FILE [--quick]`.

Speed is compared with a limit: a decode step reads all weights once, and K and V of all
sequences, at the highest bandwidth that this GPU reaches, which is measured first: that
of a sum, of a copy, or of this engine's attention. So

    seconds >= (bytes of weights + sequences * tokens * KV bytes of a token) / bandwidth

Where there is no GPU, the parts run on one that is only pretended.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from functools import partial
from hashlib import sha256
from importlib import import_module
from operator import eq
from pathlib import Path
from shutil import which
from statistics import median
from unittest.mock import patch

import numpy as np
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = torch.device("cuda:0")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from torch._dynamo.utils import counters  # noqa: E402

import bench  # noqa: E402
from attention_cases import Case, make_backend  # noqa: E402
from gpu.run import write  # noqa: E402
from nanopaged import LLM, SamplingParams, fused, sampler  # noqa: E402
from nanopaged.batch import Batch  # noqa: E402
from nanopaged.logits import to_device  # noqa: E402
from nanopaged.model_runner import ModelRunner  # noqa: E402
from nanopaged.sequence import SequenceGroup  # noqa: E402

# Of Qwen3-0.6B in bfloat16: bytes of all weights, and of one token's K and V.
WEIGHT_BYTES, TOKEN_BYTES = 1.19e9, 114_688
GREEDY, QWEN3 = {"temperature": 0}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.5}
SAMPLERS = {"greedy": GREEDY, "drawn": {}, "top_p": {"top_p": 0.9},
            "top_k": {"top_k": 50}, "min_p": {"min_p": 0.1}, "Qwen3's": QWEN3,
            "penalties": PENALTIES}
# Half of the requests of `same` are greedy.
MIX = [GREEDY, {}, GREEDY | PENALTIES, QWEN3,
       GREEDY, PENALTIES, GREEDY, QWEN3 | {"n": 2}]
# Arguments of bench.py for a quick try.
ENGINE = {"dtype": "float32", "num_blocks": 64, "max_num_seqs": 2, "max_model_len": 128,
          "max_num_batched_tokens": 64}
SMALL = ["--shape", "tiny", "--repeats", "1", "--requests", "2", "--input-len", "4",
         "8", "--output-len", "4", "8", "--engine", json.dumps(ENGINE)]


def tokens(task, quick):
    """Graphs and eager mode give the tokens of the CPU, as transformers does."""
    from conftest import write_model
    from helpers import CPU, draw_requests, serve

    sizes = {"block_size": 4, "num_blocks": 40, "max_model_len": 64, "max_num_seqs": 6,
             "max_num_batched_tokens": 16}
    requests = list(draw_requests(
        5, 3 if quick else 24, vocab_size=160, stop=(), max_tokens=6 if quick else 24,
        lengths=[1, 3, 8, 17]))

    def compare(path, enforce_eager):
        def serve_on(**changes):
            with LLM(path, **(CPU | sizes | changes)) as llm:
                return serve(llm, requests)

        expected = serve_on(attention_backend="torch")
        got = serve_on(device="cuda", enforce_eager=enforce_eager)
        share = sum(map(eq, got, expected)) / len(requests)
        # At a near-tie, rounding decides, so a few may differ.
        assert share >= 0.9, f"only {share:.0%} of the answers equal the reference's"
        return {"requests": len(requests), "share that is equal": share}

    for family in ("llama",) if quick else ("llama", "qwen2", "qwen3"):
        path = write_model(family, Path(tempfile.mkdtemp()))
        task(f"{family}, graphs", partial(compare, path, False))
        task(f"{family}, eager", partial(compare, path, True))
    task("draws", partial(draws, 1000 if quick else 151_936))


def draws(vocab_size, rows=64):
    """From a real model's number of logits, compiled, and as the CPU draws them."""
    logits, numbers = torch.randn(rows, vocab_size), torch.rand(rows, 1).double()
    arguments = 2 * logits.bfloat16(), torch.full((rows, 1), 0.8), numbers
    expected = sampler.draw(*arguments).tolist()
    got = fused.compiled(sampler.draw, False)(*(x.to(DEVICE) for x in arguments))
    share = sum(map(eq, got.tolist(), expected)) / rows
    assert share > 0.9, f"only {share:.0%} of the draws equal the CPU's"
    return {"share that is equal": share}


def gpu_ms(function, repeats=20):
    """The median time of a call, by the GPU's clock. First it sleeps, for the host."""
    function()
    pairs = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)
        begin.record()
        function()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in pairs)


def clocks():
    """The GPU's, and its power, right after some load."""
    words = "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"
    tool = which("nvidia-smi")
    return tool and subprocess.run([tool, *words], stdout=-1, text=True).stdout.strip()


def measure_bandwidth(task, quick):
    """The limits of this GPU, also for what bench.py measures after this. Attention may
    read memory faster than a sum. It is recorded, because launches take time.
    """
    seqs, heads = ([(20, 1)], (4, 2, 16)) if quick else ([(599, 1)] * 256, (16, 8, 128))

    def measure():
        limits = bench.machine_limits(DEVICE, torch.bfloat16)
        case = Case(seqs, heads, 16, torch.bfloat16)
        attend = case.prepare(make_backend("triton", heads, 16, case.dtype, DEVICE))
        attend()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                attend()
        num_bytes = 10 * 4 * int(case.ends.sum()) * heads[1] * heads[2]
        own = 1e3 * num_bytes / gpu_ms(graph.replay)
        return limits | {"bytes_per_s": max(own, limits["bytes_per_s"]),
                         "attention's GB/s": own / 1e9, "clocks": clocks()}

    limits = task("limits", measure)
    if "failed" not in limits:
        bench.machine_limits = lambda *_: limits
    return limits.get("bytes_per_s", 1)


def bench_args(quick, *words):
    args = bench.parse([*words, *SMALL * quick])
    args.model = bench.write_config(tempfile.mkdtemp(), bench.SHAPES[args.shape])
    return args


def same(task, quick):
    """Serve a mix of requests twice, and hash all tokens. The hashes must be the same
    each time, and in each variant of the engine: see equal.py.
    """
    # Two variants run side by side, and gpu_memory_utilization counts all processes: if
    # it sized the pools, the second one would find no memory for its own.
    args = bench_args(quick, "--input-len", "100", "600", "--output-len", "96", "96",
                      "--engine", '{"num_blocks": 12288}')
    args.requests = len(MIX) if quick else 256
    began = time.perf_counter()
    llm = bench.make_engine(args, enable_prefix_caching=False)
    seconds = time.perf_counter() - began
    requests = bench.draw_requests(args, llm.model_config.vocab_size)
    prompts = [prompt for prompt, _ in requests]
    params = [SamplingParams(max_tokens=length, ignore_eos=True, seed=i,
                             **MIX[i % len(MIX)])
              for i, (_, length) in enumerate(requests)]

    def compiled():
        return counters["stats"]["unique_graphs"]

    def serve():
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens = [answer.token_ids for output in outputs for answer in output.outputs]
        return {"tokens": sum(map(len, tokens)), "unique_graphs": compiled(),
                "sha256": sha256(json.dumps(tokens).encode()).hexdigest(),
                "max_memory_reserved": torch.cuda.max_memory_reserved()}

    task("start", lambda: {"seconds": seconds, "unique_graphs": compiled()})
    task("first", serve)
    task("second", serve)


def workload(task, quick):
    """nano-vllm's, three times, and the last time step by step."""
    rows, waits = [], []

    def execute(runner, batch, execute=ModelRunner.execute):
        began = 1e3 * time.perf_counter()
        output = execute(runner, batch)
        rows.append((began, 1e3 * time.perf_counter() - began, 1e3 * sum(waits),
                     len(batch.counts), len(batch.token_ids), sum(batch.ends)))
        waits.clear()
        return output

    measure_bandwidth(task, quick)
    with patch.object(ModelRunner, "execute", execute), time_waits(waits):
        figures = task("nano-vllm's", lambda: bench.bench_workload(
            bench_args(quick, *["--full"] * (not quick))))
    task("timeline", lambda: timeline(rows[-figures["steps"]:]))


def timeline(rows):
    """The averages of some steps at a time."""
    table = np.array(rows)
    table[:-1, 0] = np.diff(table[:, 0])  # from the start of each step to the next
    names = ("ms", "ms to launch", "ms waiting", "sequences", "tokens", "keys")
    pieces = np.split(table[:-1], [16, *range(128, len(table), 128)])
    return {"lines": [", ".join(map("{1} {0:.6g}".format, piece.mean(0), names))
                      for piece in pieces if len(piece)]}


# -- A decode step taken apart ---------------------------------------------------------
# These three know what the engine is made of. A change of names breaks a test.


def recorded_step(llm, size):
    """Of so many sequences: what runs it, what computes its logits, and these."""
    graph, hidden, logits, *_ = llm.engine.runner.graphs.recorded[size]
    return graph.replay, partial(llm.engine.runner.model.head, hidden), logits


def sampling(runner, logits, params):
    """What samples from these logits, after prompts of 600 tokens."""
    group = SequenceGroup([0] * 600, SamplingParams(**params), set(), 1000)
    n, row = len(logits), [0.5, *group.params.draw_numbers]
    batch = Batch(ends=[600] * n, sample_entries=[*range(n)],
                  receivers=group.sequences * n, draws=row * n)
    draws = to_device(batch.draws, DEVICE, torch.float64).view(-1, 8).T
    return partial(
        sampler.sample, batch, runner.token_counts, runner.ops, logits, draws)


def time_waits(waits):
    """In here, the seconds that the host waits for tokens are appended."""
    def read(output, read=sampler.SamplerOutput.read):
        began = time.perf_counter()
        tokens = read(output)
        waits.append(time.perf_counter() - began)
        return tokens

    return patch.object(sampler.SamplerOutput, "read", read)


def host_us(function, before=None, count=10):
    """How long the host takes for each call, if the GPU is idle, or after `before`."""
    before, times = before or torch.cuda.synchronize, []
    for _ in range(count):
        before()
        began = time.perf_counter()
        function()
        times.append(1e6 * (time.perf_counter() - began))
    return times


def step(task, quick):
    """Of sequences of about 600 tokens: all of it, its pieces, the host's share."""
    sizes, length, count = ([2, 1], 4, 2) if quick else ([256, 128, 64, 8, 1], 570, 24)
    bandwidth = measure_bandwidth(task, quick)
    args, room = bench_args(quick), 64 if quick else 16384
    llm = bench.make_engine(args, enable_prefix_caching=False, max_num_seqs=sizes[0],
                            max_num_batched_tokens=room)
    prompt = bench.random_prompt(length, llm.model_config.vocab_size)
    params = bench.sampling(100 if quick else 600, 0.6)
    ids = [llm.add_request(prompt, params) for _ in range(sizes[0])]
    waits = []

    def time_steps(size):
        while len(llm.step()) < size:
            pass
        for _ in range(4):
            outputs = llm.step()
        waits.clear()
        began = time.perf_counter()
        for _ in range(count):
            outputs = llm.step()
        ms = 1e3 * (time.perf_counter() - began) / count
        keys = size * (length + len(outputs[0].outputs[0].token_ids))
        floor = 1e3 * (WEIGHT_BYTES + keys * TOKEN_BYTES) / bandwidth
        return {"step_ms": ms, "floor_ms": floor, "share of the limit": floor / ms,
                "host_ms": ms - 1e3 * sum(waits) / count, "keys": keys,
                "clocks": clocks()}

    @torch.inference_mode()
    def time_pieces(size):
        """With the last inputs. Does a replay take longer while the GPU is busy?"""
        replay, head, logits = recorded_step(llm, size)
        pieces = {"recorded": replay, "head": head}
        samplers = {name: sampling(llm.engine.runner, logits, params)
                    for name, params in SAMPLERS.items()}
        times = {f"{name}_ms": gpu_ms(run, 2 if quick else 20)
                 for name, run in (pieces | samplers).items()}
        times |= {f"{name}_host_us": median(host_us(run))
                  for name, run in samplers.items()}
        sleep = partial(torch.cuda._sleep, 40_000_000)
        return times | {"replay_host_us": {
            "idle": median(host_us(replay)), "busy": host_us(replay, lambda: None, 8),
            "behind a sleep": host_us(replay, sleep, 1)}}

    with time_waits(waits):
        for size in sizes:
            while len(ids) > size:
                llm.abort_request(ids.pop())
            task(f"step of {size}", partial(time_steps, size))
            task(f"pieces of {size}", partial(time_pieces, size))
            task(f"kernels of {size}", partial(profile_steps, llm))
            if size == sizes[1]:
                task(f"chunks beside {size}", partial(
                    time_prompts, llm, prompt[:128], 1 if quick else 4, size))
    llm.shutdown()


def profile_steps(llm, steps=4):
    """The fifteen kernels that take longest in a step. Compare them without PDL only:
    under PDL, a kernel's time includes its wait for the one before it.
    """
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if HAS_GPU else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(steps):
            llm.step()
        torch.cuda.synchronize()
    rows = [(getattr(row, f"self_{'device' if HAS_GPU else 'cpu'}_time_total") / steps,
             row.count / steps, row.key) for row in profiler.key_averages()]
    return {"kernels_ms": sum(us for us, _, _ in rows) / 1e3,
            "launches": sum(count for us, count, _ in rows if us),
            "lines": [f"{us:9.1f} us {count:6.1f} x {name[:60]}"
                      for us, count, name in sorted(rows, reverse=True)[:15]]}


def time_prompts(llm, prompt, count, decodes):
    """Of a step with so many such prompts, beside so many decodes."""
    def begin():
        while llm.engine.num_unfinished > decodes:
            llm.step()
        for _ in range(count):
            llm.add_request(prompt, bench.sampling(1))
        torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(2):  # the first one may compile
        began = begin()
        llm.step()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        ended = time.perf_counter()
    begin()
    return {"launched_ms": 1e3 * (launched - began), "done_ms": 1e3 * (ended - began),
            **profile_steps(llm, 1)}


def ranks(task, quick):
    """Two: their tokens, an end without `shutdown`, and a rank that is killed. Quick:
    only the last, as test_ranks.py has every end.
    """
    from conftest import write_model
    from helpers import generate, greedy
    from test_ranks import OPTIONS, check_end

    if HAS_GPU and torch.cuda.device_count() < 2:
        task("ranks", lambda: {"skipped": "there is one GPU"})
        return
    path = write_model("llama", Path(tempfile.mkdtemp()))
    options = OPTIONS | {"device": "cuda" if HAS_GPU else "cpu"}
    with LLM(path, **options) as llm:
        [[expected]] = generate(llm, [[5, 6, 7]], greedy(8))

    def check(how):
        check_end(how, str(path), options, expected, Path(tempfile.mkdtemp()))
        return {"all ranks": "have ended"}

    for how in ("the end of the script", "kill -9 of rank 1")[quick:]:
        task(how, partial(check, how))


def main():
    part, file, quick = sys.argv[1], Path(sys.argv[2]), "--quick" in sys.argv
    torch.set_num_threads(1 if quick else torch.get_num_threads())
    if quick:  # measuring them would take longer than all the rest
        bench.machine_limits = lambda *_: {"bytes_per_s": 1e9, "flops_per_s": 1e12}
    done = {}

    def task(name, function):
        """Run it, and write what all have given so far. One that fails is noted."""
        try:
            done[name] = function()
        except (Exception, SystemExit):  # the latter from wrong arguments
            done[name] = {"failed": traceback.format_exc()[-3000:]}
        write(file, done)
        return done[name]

    task("machine", lambda: bench.machine() | {"CUDA": torch.version.cuda})
    has_device = HAS_GPU or part == "ranks"  # which can use the CPU
    with (nullcontext() if has_device else import_module("gpu.pretended").PretendedGpu(
            computes=part == "tokens")):  # the interpreter is slow
        globals()[part](task, quick)
    # All is written. A normal exit would wait for Inductor's processes, for up to five
    # minutes, for threads, and for NCCL.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(any("failed" in figures for figures in done.values()))


if __name__ == "__main__":
    main()
