"""bench.py runs: every subcommand, small, writes its figures and its table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = ["--shape", "tiny", "--repeats", "1", "--threads", "1"]
COMMANDS = {
    "workload": ["--requests", "4", "--input-len", "8", "16", "--output-len", "4", "8"],
    "decode": ["decode", "--batch-sizes", "1", "2", "--tokens", "6"],
    "host": ["host", "--host-sizes", "1", "8"],
    "prefix": ["prefix", "--prefix-len", "64"],
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
