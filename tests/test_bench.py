"""bench.py runs: every subcommand, small, writes its figures and its table."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

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


@pytest.mark.parametrize("name", COMMANDS)
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
