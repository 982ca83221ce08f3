"""bench.py, the paper's memory figures and the runner of the GPU tests: small, here."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from nanopaged import Logprob
from nanopaged.tour import contiguous, limits, memory, workloads

ROOT = Path(__file__).parents[1]
SMALL = ["--shape", "tiny", "--repeats", "1", "--threads", "1"]
DECODE = ["decode", "--batch-sizes", "1", "2", "--tokens", "6"]
WORKLOAD = ["--requests", "4", "--input-len", "8", "16", "--output-len", "4", "8"]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look their own up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench():
    return load(ROOT / "bench.py")


@pytest.fixture(scope="module")
def runner(bench):
    return load(ROOT / "tests/gpu/run.py")


@pytest.fixture(scope="module")
def time_kernels(bench):
    pytest.importorskip("triton", reason="pip install triton")
    return load(ROOT / "tests/gpu/time_kernels.py")


@pytest.fixture(scope="module")
def time_steps(bench):
    return load(ROOT / "tests/gpu/time_steps.py")


def python(*arguments, cwd=ROOT, **environment):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/gpu")])
    env = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"} | environment
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)


def run_bench(arguments, tmp_path):
    """Its figures, and what it printed."""
    file = tmp_path / "out.json"
    run = python(ROOT / "bench.py", *arguments, "--json", file, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    return json.loads(file.read_text()), run.stdout


# --- bench.py ---


@pytest.mark.slow
def test_workload_measures_and_writes_json(tmp_path):
    report, text = run_bench([*WORKLOAD, *SMALL], tmp_path)
    figures = report["workload"]

    assert report["machine"]["threads"] == 1
    assert report["arguments"]["shape"] == "tiny"
    assert 4 * 8 <= figures["tokens_in"] <= 4 * 16
    assert 4 * 4 <= figures["tokens_out"] <= 4 * 8
    rate = figures["tokens_out"] / figures["seconds"]
    assert figures["output_tokens_per_s"] == pytest.approx(rate)
    assert 0 < figures["share_of_limit"] < 1
    assert "output_tokens_per_s" in text and "share_of_limit" in text


@pytest.mark.slow
def test_decode_measures_every_batch_size_and_prefill(tmp_path):
    report, _ = run_bench([*DECODE, *SMALL], tmp_path)
    rates = report["decode"]["nanopaged"]
    assert list(rates) == ["decode, batch 1", "decode, batch 2", "prefill, batch 32"]
    assert all(run["median"] > 0 for run in rates.values())


@pytest.mark.slow
def test_host_tells_the_parts_of_a_step_apart(tmp_path):
    report, _ = run_bench(["host", "--host-sizes", "1", "8", *SMALL], tmp_path)
    for size, step in report["host"].items():
        assert step["s_a_sequence"] == pytest.approx(step["step_s"] / int(size))
        parts = (
            "schedule_s",
            "inputs_s",
            "model_s",
            "sampler_s",
            "update_s",
            "message_s",
        )
        assert all(step[part] > 0 for part in parts)
    assert report["host"]["8"]["message_bytes"] > report["host"]["1"]["message_bytes"]


@pytest.mark.slow
def test_prefix_computes_only_what_is_not_cached(tmp_path):
    report, _ = run_bench(["prefix", "--prefix-len", "64", *SMALL], tmp_path)
    first, second = report["prefix"].values()
    assert (first["computed_tokens"], second["computed_tokens"]) == (96, 32)


@pytest.mark.slow
@pytest.mark.parametrize("command", [WORKLOAD, DECODE], ids=["workload", "decode"])
def test_transformers_serves_the_same_requests(command, tmp_path):
    report, text = run_bench([*command, *SMALL, "--vs", "transformers"], tmp_path)
    name = "decode" if command is DECODE else "workload"
    rates = report[name]["transformers"]
    expected = {
        "workload": ["static batches", "continuous batching"],
        "decode": list(report["decode"]["nanopaged"]) if command is DECODE else [],
    }
    assert list(rates) == expected[name]
    assert all(run["ratio"] > 0 for run in rates.values()), rates
    assert "ratio" in text


def test_options_of_the_engine_are_passed_on(bench, tmp_path):
    options = '{"block_size": 32, "dtype": "float32", "num_blocks": 64}'
    args = bench.parse(["--shape", "tiny", "--engine", options])
    args.model = bench.write_config(tmp_path, bench.SHAPES["tiny"])
    with bench.make_engine(args, max_num_seqs=3) as llm:
        assert (llm.config.block_size, llm.config.num_blocks) == (32, 64)
        assert llm.config.max_num_seqs == 3
        assert llm.runner.dtype == torch.float32


def test_full_is_the_reference_workload(bench):
    args = bench.parse(["--full"])
    requests = bench.draw_requests(args, 151_936)
    assert len(requests) == 256
    assert sum(len(prompt) for prompt, _ in requests) == 142_827
    assert sum(length for _, length in requests) == 133_966


def test_the_failure_of_a_peer_is_a_finding(bench):
    def fail(_):
        raise RuntimeError("out of memory")

    assert bench.repeat(fail, 1, 2, 3) == {"failed": "RuntimeError: out of memory"}
    assert bench.repeat(float, 1, 2, 3) == {"median": 2.0, "runs": [2.0, 2.0, 2.0]}


def test_tables_line_up(bench, capsys):
    bench.show(
        "title", {"a": {"x": 1234.5, "list": [1]}, "long": {"y": "text", "x": 0.5}}
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "",
        "title",
        "            x     y",
        "  a     1,234      ",
        "  long    0.5  text",
    ]


def test_the_floor_counts_bytes_and_operations(bench, tmp_path):
    """One request, 3 tokens in and 2 out, on a machine with 1 byte/s and 1 FLOP/s."""
    args = bench.parse(["--engine", '{"dtype": "float32", "num_blocks": 64}'])
    args.model = bench.write_config(tmp_path, bench.SHAPES["tiny"])
    rates = {"bytes_per_s": 1.0, "flops_per_s": 1.0}
    with bench.make_engine(args) as llm:
        floor = limits.time_floor([([1, 2, 3], 2)], llm, rates)

    layers = 2 * 64 * (2 * (4 + 2) * 16 + 3 * 128)
    head = 64 * 256
    kv_tokens = 4 + 3  # read by the one decode; written by the prompt
    assert floor["bytes_s"] == 4 * 2 * (layers + head) + kv_tokens * (
        2 * 2 * 2 * 16 * 4
    )
    keys = (1 + 2 + 3) + 4
    assert floor["flops_s"] == 2 * (4 * layers + 2 * head) + 4 * 2 * 4 * 16 * keys


# --- the paper's memory figures ---


def test_lengths_have_the_means_of_the_paper():
    for name, (prompt, output) in workloads.DATA_SETS.items():
        lengths = workloads.draw_lengths(name, 1000, seed=1)
        prompts, outputs = zip(*lengths, strict=True)
        assert sum(prompts) / 1000 == pytest.approx(prompt.mean, rel=0.01)
        assert sum(outputs) / 1000 == pytest.approx(output.mean, rel=0.01)
        assert min(prompts + outputs) >= 1
        assert max(p + n for p, n in lengths) <= workloads.LONGEST


def test_the_buddy_allocator_joins_what_it_has_split():
    pool = contiguous.BuddyAllocator(16 + 4 + 1)
    whole = {size: set(offsets) for size, offsets in pool.free.items()}

    assert [pool.take(size) for size in (2, 1, 8, 4)] == [16, 20, 0, 8]
    assert pool.take(8) is None  # 4 + 2 slots are free
    assert (pool.take(2), pool.take(4)) == (18, 12)

    for offset, size in ((16, 2), (20, 1), (0, 8), (8, 4), (18, 2), (12, 4)):
        pool.give(offset, size)
    assert pool.free == whole


def test_orca_with_the_longest_length_runs_as_many_as_fit():
    lengths = workloads.draw_lengths("ShareGPT", 100, seed=0)
    run = contiguous.serve_contiguous(lengths, contiguous.RESERVE["Orca (max)"])
    assert run["running"] == workloads.SLOTS // workloads.LONGEST == 7
    assert run["free"] == pytest.approx(100 * (1 - 7 * 2048 / workloads.SLOTS))


def test_paging_fills_the_memory_that_orca_leaves_empty():
    figures = memory.allocation(requests=40)
    for slots in figures.values():
        parts = ("tokens", "reserved", "internal", "rounding", "free")
        assert sum(slots.get(part, 0) for part in parts) == pytest.approx(100)
    assert figures["nanopaged"]["tokens"] > 90
    assert figures["Orca (oracle)"]["tokens"] < 50
    assert figures["nanopaged"]["saved"] == 0


def test_samples_and_beams_share_blocks():
    lengths = workloads.draw_lengths("Alpaca", 8, seed=0)
    rows = [
        {1: -0.5, 2: -1.0, 3: -2.0, 4: -3.0},
        {5: -0.1, 6: -2.5, 7: -4.0, 8: -5.0},
    ]
    likely = [
        {token: Logprob(value, rank=1) for token, value in row.items()} for row in rows
    ]
    samples = memory.serve_paged(lengths, width=2)["saved"]
    beams = memory.serve_paged(lengths, width=2, likely=likely)["saved"]
    assert 0 < samples < 20 < beams < 50


@pytest.mark.slow
def test_memory_has_every_figure_and_its_plots(bench, monkeypatch, capsys, tmp_path):
    few = partial(memory.measure, widths=(2, 6), block_sizes=(16, 128))
    monkeypatch.setattr(memory, "measure", few)
    file = tmp_path / "out.json"
    plots = tmp_path / "plots"
    arguments = ["memory", "--requests", "1", "--repeats", "1"]
    arguments += ["--json", str(file)]
    if importlib.util.find_spec("matplotlib"):
        arguments += ["--plots", str(plots)]
    assert bench.main(arguments) == 0
    figures = json.loads(file.read_text())["memory"]
    text = capsys.readouterr().out

    for name in ("Alpaca", "ShareGPT"):
        for kind in ("samples", "beams", "real beams"):
            saved = figures["sharing"][f"{name}, {kind}"]
            assert 0 < saved["2"] < saved["6"] < 100
        assert list(figures["waste"][name]) == ["16", "128"]
    for mode in ("recompute", "swap"):
        runs = figures["preemption"][mode].values()
        assert all(run["back_s"] > 0 and run["tokens_per_s"] > 0 for run in runs)
    for number in (20.4, 30.4, 55.2):  # of the paper
        assert str(number) in text

    drawn = sorted(plots.glob("*.svg"))
    expected = 4 if importlib.util.find_spec("matplotlib") else 0
    assert len([ElementTree.parse(file) for file in drawn]) == expected


@pytest.mark.slow
def test_without_matplotlib_the_error_says_how_to_get_it():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from nanopaged.tour import memory\n"
        "memory.draw_plots({}, 'plots')"
    )
    run = python("-c", code)
    assert run.returncode == 1
    assert "pip install nanopaged[bench]" in run.stderr.splitlines()[-1]


def test_the_engine_does_not_import_the_tour():
    code = "import sys, nanopaged; print(any('tour' in name for name in sys.modules))"
    assert python("-c", code).stdout.strip() == "False"


# --- what needs a GPU ---


def test_without_a_gpu_what_needs_one_says_so(
    runner, time_kernels, monkeypatch, tmp_path
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit, match="needs a CUDA device; or TRITON_INTERPRET=1"):
        time_kernels.main([])
    with pytest.raises(SystemExit, match="needs a CUDA device; --quick"):
        runner.main(["--json", str(tmp_path / "out.json")])


@pytest.mark.slow
def test_every_kernel_has_its_row(time_kernels, monkeypatch, tmp_path):
    rates = {"copy_bytes_per_s": 1e12, "flops_per_s": 1e15}
    monkeypatch.setattr(time_kernels, "machine_limits", lambda *_: rates)
    file = tmp_path / "out.json"
    assert time_kernels.main(["--shape", "tiny", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["kernels"]

    assert figures.pop("limits") == rates
    assert {name.split()[0] for name in figures} == {
        "decode",
        "prefill",
        "store",
        "copy",
    }
    for name, run in figures.items():
        assert run["rate"] == pytest.approx(run["work"] / run["median_s"])
        differences = [peer["difference"] for peer in run["torch"].values()]
        assert all(difference < 1e-2 for difference in differences)
        has_no_peer = name.startswith(("decode mixed", "copy"))
        assert bool(differences) == (not has_no_peer)
        has_flash = importlib.util.find_spec("flash_attn") is not None
        is_prompt = name.startswith("prefill")
        assert ("flash" in run["variants"]) == (is_prompt and has_flash)


def test_once_runs_every_kernel_without_timing(time_kernels, monkeypatch):
    monkeypatch.setattr(time_kernels, "measure", None)
    assert time_kernels.main(["--once"]) == 0


def test_a_wrong_kernel_is_not_a_fast_one(time_kernels):
    task = time_kernels.Task(
        lambda: 1.1 * torch.ones(3), 1, "rate", {"ones": lambda: torch.ones(3)}
    )
    run = time_kernels.measure(task, {"rate": 1.0}, torch.device("cpu"))
    assert run["failed"] == "differs from torch's ones by 0.1"


def test_mixed_decodes_have_the_lengths_of_the_workload(time_kernels):
    seqs = time_kernels.QWEN3.seqs["decode 256 x 100..2048"]
    lengths = [past + 1 for past, _ in seqs]
    assert (len(lengths), min(lengths), max(lengths)) == (256, 100, 2048)


def test_busy_time_counts_what_overlaps_once(time_steps):
    assert time_steps.covered([(5, 6), (0, 2), (1, 4), (1, 2), (6, 7)]) == 4 + 2
    assert time_steps.covered([]) == 0


@pytest.mark.slow
def test_the_runner_goes_on_after_a_failure_and_runs_what_is_missing(
    runner, monkeypatch, tmp_path
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    timeline = runner.PARTS["timeline"]
    parts = {
        "broken": runner.Part("", quick="python bench.py --model /no/such/model"),
        "timeline": timeline,
        "engine-tests": runner.PARTS["engine-tests"],
        "slow": runner.Part(
            "", seconds=3, quick="python -c 'import time; time.sleep(60)'"
        ),
    }
    monkeypatch.setattr(runner, "PARTS", parts)
    file = tmp_path / "out.json"
    command = ["--quick", "--json", str(file)]

    assert runner.main(command) == 2
    text = file.read_text()
    report = json.loads(text)["parts"]
    assert "model must be a directory" in report["broken"]["failed"]
    assert "/no/such" not in report["broken"]["failed"]
    assert report["engine-tests"] == {"skipped": "it needs a CUDA device"}
    assert report["timeline"]["figures"]["timeline"]["1"]["busy_s"] > 0
    assert report["slow"]["unfinished"] == "cut off by its time limit"
    assert report["slow"]["seconds"] < 25
    for place in (ROOT, sys.prefix, tmp_path):
        assert str(place) not in text

    ran = []
    monkeypatch.setattr(
        runner, "run_part", lambda part, command, seconds: ran.append(command) or {}
    )
    assert runner.main(command) == 1  # one is broken still
    assert ran == [parts["slow"].quick]
    runner.main([*command, "--only", "timeline"])
    assert ran[1:] == [timeline.quick]


def test_the_runner_stops_in_time(runner, tmp_path):
    file = tmp_path / "out.json"
    assert runner.main(["--quick", "--minutes", "0", "--json", str(file)]) == 2
    parts = json.loads(file.read_text())["parts"]
    assert list(parts) == list(runner.PARTS)
    assert all("skipped" in part or "unfinished" in part for part in parts.values())


def test_a_report_of_another_machine_is_not_continued(runner, tmp_path):
    file = tmp_path / "out.json"
    file.write_text(
        json.dumps({"machine": {"gpu": "another"}, "quick": True, "parts": {}})
    )
    with pytest.raises(SystemExit, match="from another machine: name another file"):
        runner.main(["--quick", "--json", str(file)])


@pytest.mark.slow
def test_ctrl_c_ends_the_part_that_runs_and_keeps_the_report(tmp_path):
    file = tmp_path / "out.json"
    command = [
        sys.executable,
        str(ROOT / "tests/gpu/run.py"),
        "--quick",
        "--json",
        str(file),
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    while not process.stdout.readline().startswith("== "):
        pass
    time.sleep(1)
    process.terminate()
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 2, rest
    (part,) = [
        x for x in json.loads(file.read_text())["parts"].values() if "seconds" in x
    ]
    assert part["unfinished"] == "stopped by the user"


def test_every_part_is_a_command_that_exists(bench, runner, time_kernels):
    for part in runner.PARTS.values():
        for command in filter(None, (part.command, part.quick)):
            words = shlex.split(command)
            words = words[words.index("python") + 1 :]
            files = [word for word in words if word.endswith(".py")]
            assert all((ROOT / file).exists() for file in files)
            if words[0] == "bench.py":
                assert bench.parse(words[1:]).command in bench.COMMANDS


def test_tests_report_one_by_one_and_in_shards(runner, tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import os, pytest\n"
        "def test_a(): pass\n"
        "def test_b(): assert 1 + 1 == 3\n"
        "def test_c(): pytest.skip('no')\n"
        "def test_d(): os._exit(9)\n"
    )
    for shard in range(2):
        environment = {
            "REPORT": str(tmp_path / f"tests-{shard}.jsonl"),
            "REPORT_SHARD": f"{shard}/2",
        }
        python("-m", "pytest", "-p", "report", tmp_path, cwd=tmp_path, **environment)
    results = runner.read_results(tmp_path)
    assert results["tests"] == {"passed": 1, "failed": 1, "skipped": 1, "started": 1}
    failed, started = sorted(results["failures"].items())
    assert failed[0].endswith("test_b") and "assert (1 + 1) == 3" in failed[1]
    assert started[0].endswith("test_d")  # the process died in it


def test_places_of_files_are_left_out_of_reports(runner):
    text = "/home/me/x.py:3: in f\n1 tokens/s and/or ./a/b"
    assert runner.scrubbed(text) == "x.py:3: in f\n1 tokens/s and/or ./a/b"
