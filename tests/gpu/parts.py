"""The parts of run.py: `python parts.py NAME FILE [--quick]`.

Speed is compared with a limit: a decode step reads all weights once, and K and V of all
sequences, at the highest bandwidth that this GPU reaches, which is measured first. So

    seconds >= (bytes of weights + sequences * tokens * KV bytes of a token) / bandwidth
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
# Query heads, KV heads, head_dim.
MODELS = {
    "Qwen3-0.6B": (16, 8, 128), "Llama-3.2-1B": (32, 8, 64), "Llama-3-8B": (32, 8, 128),
    "Qwen2-0.5B": (14, 2, 64), "Qwen2-7B": (28, 4, 128), "Mistral-7B": (32, 8, 128),
    "Qwen3-32B": (64, 8, 128), "Phi-3-mini": (32, 32, 96)}
# Of Qwen3-0.6B in bfloat16: bytes of all weights, and of one token's K and V.
WEIGHT_BYTES, TOKEN_BYTES = 1.19e9, 114_688
# nano-vllm's own figures for its workload: output tokens/s.
PUBLISHED = {"nano-vllm, RTX 4070 laptop": 1434, "vLLM, RTX 4070 laptop": 1362}


def write_models(quick):
    from conftest import write_model

    for family in ("llama",) if quick else ("llama", "qwen2", "qwen3"):
        sizes = {"num_hidden_layers": 1} if quick else {}
        yield family, write_model(family, Path(tempfile.mkdtemp()), **sizes)


def tokens(task, quick):
    """Graphs and eager mode give the tokens of the CPU's reference, and it those of
    transformers.
    """
    from conftest import Reference
    from gpu.pretended import PretendedGpu
    from helpers import CPU, draw_requests, generate, greedy, serve
    from nanopaged import LLM

    count = 3 if quick else 24
    sizes = {"block_size": 4, "num_blocks": 40, "max_model_len": 64, "max_num_seqs": 6,
             "max_num_batched_tokens": 16}
    options = {"vocab_size": 160, "stop": (), "max_tokens": 6 if quick else 24,
               "lengths": [1, 3, 8, 17]}
    for family, path in write_models(quick):
        def serve_on(requests, path=path, **changes):
            with LLM(path, **(CPU | sizes | changes)) as llm:
                return serve(llm, requests)

        requests = list(draw_requests(5, count, **options))
        expected = serve_on(requests, attention_backend="torch")
        for mode in ("graphs", "eager"):
            def check(mode=mode, serve_on=serve_on, requests=requests,
                      expected=expected):
                gpu = nullcontext() if HAS_GPU else PretendedGpu()
                with gpu:
                    got = serve_on(requests, device="cuda",
                                   enforce_eager=mode == "eager")
                return share_equal(got, expected) | {"pretended": not HAS_GPU}

            task(f"{family}, {mode}", check)

        def check_transformers(path=path):
            reference, rng = Reference(), random.Random(0)
            prompts = [[rng.randrange(160) for _ in range(n)] for n in (1, 7, 20)]
            prompts = [p for p in prompts if reference.is_clear(path, p, 8)]
            wanted = [[reference.generate(path, p, 8)] for p in prompts]
            with LLM(path, attention_backend="auto", device=DEVICE.type,
                     dtype="float32", **sizes) as llm:
                return share_equal(generate(llm, prompts, greedy(8)), wanted)

        task(f"{family}, transformers", check_transformers)


def share_equal(got, expected):
    """The share of equal answers. At a near-tie, rounding decides, so a few may differ.
    """
    pairs = zip(got, expected, strict=True)
    share = sum(one == other for one, other in pairs) / len(expected)
    assert share >= 0.9, f"only {share:.0%} of the answers equal the reference's"
    return {"requests": len(expected), "share that is equal": share}


def on_device(case):
    """Output of Triton's kernels for a case of test_attention.py."""
    import test_attention
    from nanopaged.attention import Metadata

    test_attention.CPU = DEVICE
    backend = test_attention.make_backend(
        "triton", case.heads, case.block_size, case.dtype)
    host = vars(case.metadata(backend))
    metadata = Metadata(**{name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x
                           for name, x in host.items()})
    new = [dense[past:] for dense, (past, _) in zip(case.dense, case.seqs, strict=True)]
    q, cache, kv = (x.to(DEVICE) for x in (case.q, case.cache, torch.cat(new)))
    backend.store(kv[:, 0], kv[:, 1], cache, metadata.slots)
    return lambda: backend.attend(q, cache, metadata)


def kernels(task, quick):
    """Against float64, over the shapes of real models."""
    import test_attention

    dtypes = [torch.float32] if quick or not HAS_GPU else [
        torch.bfloat16, torch.float16, torch.float32]
    seqs = [(20, 1), (0, 5)] if quick else [(1500, 1), (3, 1), (0, 300), (200, 90)]
    for name, heads in list(MODELS.items())[: 1 if quick else None]:
        for dtype in dtypes:
            for kind in (seqs, [(past, 1) for past, _ in seqs]):
                def check(kind=kind, heads=heads, dtype=dtype):
                    case = test_attention.Case(kind, heads, 16, dtype)
                    out, expected = on_device(case)().cpu().double(), case.expected()
                    error = (out - expected).norm(dim=1) / expected.norm(dim=1)
                    assert error.max() < test_attention.TOLERANCE[dtype]
                    return {"error": float(error.max())}

                task(f"{name}, {dtype}, {kind}", check)


def seconds_of(function, repeats, calls=10):
    """The median time of a call, of ten at a time: waiting for them takes time, too."""
    function()
    times = []
    for _ in range(repeats):
        if HAS_GPU:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            function()
        if HAS_GPU:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / calls)
    return sorted(times)[len(times) // 2]


def speed(task, quick):
    import bench
    import test_attention
    from nanopaged.tour.limits import machine_limits

    def measure_limits():
        return {"bytes_per_s": 1e9} if quick else machine_limits(DEVICE, torch.bfloat16)

    bandwidth = task("limits", measure_limits).get("bytes_per_s", 1)

    def measure_kernel():
        """Bytes of K and V over the time. If there are few, launches take most of it.
        """
        heads, dtype = (MODELS["Qwen3-0.6B"], torch.bfloat16 if HAS_GPU
                        else torch.float32)
        count, length = (2, 20) if quick else (256, 600)
        case = test_attention.Case([(length, 1)] * count, heads, 16, dtype)
        rate = 2 * count * length * heads[1] * heads[2] * case.dtype.itemsize
        rate /= seconds_of(on_device(case), 2 if quick else 50)
        return {"GB/s": rate / 1e9, "share of the limit": rate / bandwidth}

    task("attention", measure_kernel)

    def run_bench(*words):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "figures.json")
            small = ["--shape", "tiny", "--repeats", "1"] if quick else []
            bench.main([*words, *small, "--json", str(file)])
            return json.loads(file.read_text())

    def measure_decode():
        sizes, length, count = ([1, 2], 16, 8) if quick else ([1, 8, 64, 256], 128, 64)
        figures = run_bench(
            "decode", "--batch-sizes", *map(str, sizes), "--prompt-len", str(length),
            "--tokens", str(count))
        for size in () if quick else sizes:
            run = figures["nanopaged"][f"decode, batch {size}"]
            num_bytes = WEIGHT_BYTES + size * (length + count / 2) * TOKEN_BYTES
            run["limit, tokens/s"] = size * bandwidth / num_bytes
            run["share of the limit"] = run["median"] / run["limit, tokens/s"]
        return figures

    def measure_workload():
        words = ["--requests", "2"] if quick else ["--full", "--repeats", "1"]
        return run_bench("workload", *words) | {"published": PUBLISHED}

    task("decode and prefill", measure_decode)
    task("workload", measure_workload)

    def count_launches():
        from torch.profiler import ProfilerActivity, profile

        from conftest import write_model
        from helpers import greedy
        from nanopaged import LLM

        path = write_model("qwen3", Path(tempfile.mkdtemp()))
        with LLM(path, device=DEVICE.type, num_blocks=64) as llm:
            llm.add_request([1, 2, 3], greedy(20))
            for _ in range(5):
                llm.step()
            activity = ProfilerActivity.CUDA if HAS_GPU else ProfilerActivity.CPU
            with profile(activities=[activity]) as profiler:
                for _ in range(4):
                    llm.step()
        return {"events per step": len(profiler.events()) / 4}

    task("launches", count_launches)


RANK = """
import os, signal, sys
from nanopaged.tour.observers import observers
from nanopaged import LLM, SamplingParams
path, size, kill = sys.argv[1], int(sys.argv[2]), sys.argv[3]
llm = LLM(path, tensor_parallel_size=size, device=sys.argv[4], dtype="float32",
          num_blocks=64, max_model_len=64)
if kill == "kill":
    def end(phase, batch):
        os.kill(os.getpid(), signal.SIGKILL)
    observers(llm).append(end)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
outputs = llm.generate([[1, 2, 3], [4] * 20], params, use_tqdm=False)
print("TOKENS", [output.outputs[0].token_ids for output in outputs], flush=True)
"""


def ranks(task, quick):
    """Two of them: answers, an end without `shutdown`, and a rank that is killed."""
    if HAS_GPU and torch.cuda.device_count() < 2:
        task("ranks", lambda: {"skipped": "there is one GPU"})
        return
    _, path = next(write_models(True))
    script = Path(tempfile.mkdtemp(), "rank.py")
    script.write_text(RANK)

    def run(size, kill="", seconds=60):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                    str(size)] if size > 1 else []
        process = subprocess.Popen(
            [sys.executable, *launcher, str(script), str(path), str(size), kill,
             DEVICE.type], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, error = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks then
            process.wait()
            raise
        lines = [line for line in out.splitlines() if "TOKENS" in line]
        return process.returncode, lines, error[-2000:]

    def check_answers():
        one, two = run(1), run(2)
        assert one[0] == two[0] == 0, (one, two)
        assert one[1] == two[1] and one[1]
        return {"ended": True}

    def check_killed():
        code, lines, _ = run(2, "kill")
        assert code != 0 and not lines
        return {"exit status": code}

    task("answers, and an end without shutdown", check_answers)
    task("a killed rank ends the others", check_killed)


def machine():
    import bench

    return bench.machine() | {"CUDA": torch.version.cuda}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["tokens", "kernels", "speed", "ranks"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1 if args.quick else torch.get_num_threads())
    done = {}

    def task(name, function):
        """Run it, and write what all have given so far. One that fails is noted."""
        try:
            done[name] = function()
        except (Exception, SystemExit):  # the latter from wrong arguments
            done[name] = {"failed": traceback.format_exc()[-3000:]}
        partial = args.file.with_suffix(".part")
        partial.write_text(json.dumps(done))
        partial.replace(args.file)
        return done[name]

    task("machine", machine)
    # For tests of the report: "part:exception", "part:exit" or "part:hang", or several.
    words = os.environ.get("NANOPAGED_FAIL", "").split()
    failures = dict(word.split(":") for word in words)
    if args.part in failures:
        task("first", dict)
        {"exit": lambda: os._exit(3), "hang": lambda: time.sleep(10_000),
         "exception": lambda: task("injected", lambda: 1 / 0)}[failures[args.part]]()
    globals()[args.part](task, args.quick)
    return int(any("failed" in figures for figures in done.values()))


if __name__ == "__main__":
    sys.exit(main())
