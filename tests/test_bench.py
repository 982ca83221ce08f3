"""bench.py runs: every subcommand, small, writes its figures and its table."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

ROOT = Path(__file__).parents[1]
SMALL = ["--shape", "tiny", "--repeats", "1", "--threads", "1"]
COMMANDS = {
    "workload": ["--requests", "4", "--input-len", "8", "16", "--output-len", "4", "8"],
    "decode": ["decode", "--batch-sizes", "1", "2", "--tokens", "6"],
    "host": ["host", "--host-sizes", "1", "8"],
    "prefix": ["prefix", "--prefix-len", "64"],
    "memory": ["memory", "--requests", "1", "--widths", "2", "--kv-block-sizes", "16",
               "--plots", "plots"],
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name in ("memory", "prefix")))
    for name in COMMANDS])  # fmt: skip
def test_a_subcommand_measures_and_writes_json(name, tmp_path):
    file = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "bench.py"), *COMMANDS[name], *SMALL, "--json", str(file)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    figures = json.loads(file.read_text())
    assert figures["machine"]["threads"] == 1
    assert figures[name]
    assert "FAILED" not in run.stdout and "tiny" in run.stdout
    if name == "memory":
        memory = figures["memory"]
        for slots in memory["allocation"].values():
            parts = ("tokens", "reserved", "internal", "rounding", "free")
            assert sum(slots.get(part, 0) for part in parts) == pytest.approx(100)
        assert memory["allocation"]["nanopaged"]["tokens"] > 90
        assert 0 < memory["sharing"]["Alpaca, samples"]["2"] < 50
        drawn = sorted(tmp_path.glob("plots/*.svg"))
        expected = 4 if importlib.util.find_spec("matplotlib") else 0
        assert len([ElementTree.parse(file) for file in drawn]) == expected


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench", ROOT / "bench.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_memory_draws_lengths_with_the_papers_means(bench):
    for name, ((mean_in, _), (mean_out, _)) in bench.LENGTHS.items():
        lengths = bench.draw_lengths(name, 1000, seed=1)
        prompts, outputs = zip(*lengths, strict=True)
        assert sum(prompts) / 1000 == pytest.approx(mean_in, rel=0.01)
        assert sum(outputs) / 1000 == pytest.approx(mean_out, rel=0.01)
        assert min(prompts + outputs) >= 1
        assert max(prompt + output for prompt, output in lengths) <= bench.LONGEST


def test_the_buddy_allocator_joins_what_it_has_split(bench):
    pool = bench.BuddyAllocator(16 + 4 + 1)
    whole = {size: set(offsets) for size, offsets in pool.free.items()}
    assert [pool.take(size) for size in (2, 1, 8, 4)] == [16, 20, 0, 8]
    assert pool.take(8) is None  # 4 + 2 slots are free
    assert (pool.take(2), pool.take(4)) == (18, 12)
    for offset, size in ((16, 2), (20, 1), (0, 8), (8, 4), (18, 2), (12, 4)):
        pool.give(offset, size)
    assert pool.free == whole


def test_orca_with_the_longest_length_runs_as_many_as_fit(bench):
    lengths = bench.draw_lengths("ShareGPT", 100, seed=0)
    run = bench.serve_contiguous(lengths, bench.RESERVE["Orca (max)"])
    assert run["running"] == bench.SLOTS // bench.LONGEST == 7
    assert run["free"] == pytest.approx(100 * (1 - 7 * 2048 / bench.SLOTS))


def test_without_matplotlib_the_way_to_get_it_is_told(bench, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    bench.draw_plots({}, tmp_path / "plots")
    assert 'pip install -e ".[bench]"' in capsys.readouterr().out
    assert not (tmp_path / "plots").exists()


# -- what wants a GPU --


def test_without_a_gpu_what_wants_one_says_so_in_a_line(bench, monkeypatch):
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit, match="kernels needs a CUDA device"):
        bench.main(["kernels"])
    with pytest.raises(SystemExit, match="gpu needs a CUDA device; --quick"):
        bench.main(["gpu"])


def test_every_kernel_has_its_row(bench, monkeypatch, tmp_path):
    pytest.importorskip("triton", reason="pip install triton")
    limits = {"copy_bytes_per_s": 1e12, "flops_per_s": 1e15}
    monkeypatch.setattr(bench, "machine_limits", lambda *_: limits)
    file = tmp_path / "out.json"
    assert bench.main(["kernels", "--shape", "tiny", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["kernels"]
    for kind in ("decode 2 x", "decode 1 x", "decode mixed", "prefill 40", "prefill 8 behind",
                 "store_kv", "block copy"):  # fmt: skip
        (name,) = (name for name in figures if name.startswith(kind))
        run = figures[name]
        assert run["share"] == pytest.approx(run["work"] / run["median_s"] / limits[run["limit"]])
        differences = [peer["difference"] for peer in run["torch"].values()]
        assert all(difference < 1e-2 for difference in differences)
        assert bool(run["variants"]) == kind.startswith(("decode", "prefill"))
        assert bool(differences) == (not name.startswith(("decode mixed", "block copy")))


def test_a_wrong_kernel_is_no_fast_one(bench):
    task = {"run": lambda: 1.1 * torch.ones(3), "torch": {"ones": lambda: torch.ones(3)},
            "work": 1, "limit": "copy_bytes_per_s"}  # fmt: skip
    run = bench.measure(task, {"copy_bytes_per_s": 1.0}, torch.device("cpu"))
    assert run["failed"] == "differs from torch's ones by 0.1"


def test_every_decode_of_the_workload_is_a_length_that_it_has(bench):
    lengths = [past + 1 for past, _ in bench.KERNELS["qwen3-0.6b"]["decode"]["256 x 100..2048"]]
    assert (len(lengths), min(lengths), max(lengths)) == (256, 100, 2048)


def test_busy_time_counts_what_overlaps_once(bench):
    assert bench.union([(5, 6), (0, 2), (1, 4), (1, 2), (6, 7)]) == 4 + 2
    assert bench.union([]) == 0


@pytest.mark.slow
def test_gpu_writes_what_it_has_and_goes_on_after_a_failure(bench, monkeypatch, tmp_path):
    """One part is real; the others fail at once, or cannot run here."""
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    parts = {"broken": ("", "workload --model /no/such/model"), "timeline": bench.PARTS["timeline"],
             "gpu-tests": bench.PARTS["gpu-tests"]}  # fmt: skip
    monkeypatch.setattr(bench, "PARTS", parts)
    file, states = tmp_path / "out.json", []
    run_part = bench.run_part

    def run(*arguments):
        states.append(json.loads(file.read_text())["gpu"] if file.exists() else {})
        return run_part(*arguments)

    monkeypatch.setattr(bench, "run_part", run)
    assert bench.main(["gpu", "--quick", "--json", str(file)]) == 1
    text, figures = file.read_text(), json.loads(file.read_text())["gpu"]
    assert [list(state) for state in states] == [[], ["broken"]]
    assert "ValueError: model must be a directory" in figures["broken"]["failed"]
    assert figures["gpu-tests"] == {"skipped": "needs a CUDA device"}
    assert figures["timeline"]["figures"]["1"]["busy_s"] > 0
    assert str(ROOT) not in text and sys.prefix not in text and str(tmp_path) not in text


def test_gpu_stops_in_time(bench, monkeypatch, tmp_path):
    figures = bench.run_part("workload", 0.1)
    assert figures["failed"].endswith("stopped after 0 s")
    file = tmp_path / "out.json"
    assert bench.main(["gpu", "--quick", "--minutes", "0", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["gpu"]
    assert list(figures) == list(bench.PARTS)
    assert all("skipped" in part for part in figures.values())


def test_every_part_is_a_command_or_some_tests(bench):
    for command in itertools.chain(*bench.PARTS.values()):
        if command and command.startswith("tests/"):
            assert (ROOT / command.split()[0]).exists()
        elif command:
            assert bench.parse(command.split()).command in bench.COMMANDS


def test_failures_of_tests_are_told_without_places(bench, tmp_path):
    file = tmp_path / "junit.xml"
    file.write_text(
        '''<testsuites><testsuite><testcase classname="tests.test_x" name="test_a"/>
        <testcase classname="tests.test_x" name="test_b"><failure message="no">/home/me/x.py:3: in f
        1 tokens/s and/or</failure></testcase><testcase classname="c" name="d"><skipped/></testcase>
        </testsuite></testsuites>'''
    )
    report = bench.read_junit(file)
    assert (report["tests"], report["passed"], report["skipped_tests"]) == (3, 1, 1)
    (told,) = report["failures"].values()
    assert told.startswith("x.py:3: in f") and "1 tokens/s and/or" in told
