"""What a lent GPU is asked for, in two calls: gpu/lease.sh, tiny, on a pretended GPU.

It runs from a copy of the checkout, in an environment in which the package is not
installed, as on a machine that one gets for a quarter of an hour, and Numba neither,
which may not fit to the NumPy there. So a change of names breaks a test, and not the
first run on a GPU.
"""

import json
import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from helpers import ROOT

pytest.importorskip("triton", reason="pip install triton")

# Each part's tasks, and figures that each of these tasks must have.
FIGURES = {
    "kernels": {"Qwen3-0.6B": ["error"]},
    "tokens": {"llama, graphs": ["share that is equal"],
               "llama, eager": ["share that is equal"]},
    "workload": {"nano-vllm's": ["output_tokens_per_s", "share_of_limit", "runs"],
                 "elsewhere": ["A100"]},
    "speed": {"decode and prefill": ["decode, batch 1", "decode, batch 2", "prefill",
                                     "share_of_limit"]},
    "step": {"step of 2": ["step_ms", "floor_ms", "share of the limit", "host_ms",
                       "clocks"],
             "pieces of 2": ["recorded_ms", "head_ms", "greedy_ms", "drawn_ms",
                             "top_p_ms", "top_k_ms", "sort_ms"],
             "kernels of 2": ["kernels_ms", "launches", "longest"],
             "step of 1": ["step_ms"], "pieces of 1": ["recorded_ms"]},
    "sweep": {"elsewhere": ["FlashInfer"],
              "256 x 600: 3 stages, 32 keys, 4 warps": ["us", "share of the limit"],
              "64 x 600: 3 stages, 16 keys, 4 warps, 3 programs": ["us", "error"]},
    "peer": {"both": ["output_tokens_per_s", "transformers"]}}

STATES = [f"== {part}: complete" for part in FIGURES if part != "peer"]


@pytest.fixture
def uninstalled(tmp_path):
    """An interpreter, and a folder with all installed packages but this one and Numba.

    A folder on the path may have `.pth` files, which nobody reads, so a checkout that
    is installed is not found either.
    """
    venv.create(tmp_path / "venv", symlinks=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("nanopaged", "__editable__", "numba")):
            (packages / path.name).symlink_to(path)
    return tmp_path / "venv/bin/python", packages


def check_figures(parts):
    for name, part in parts.items():
        assert part["state"] == "complete", (name, part)
        assert part["tasks"]["machine"]["versions"]["nanopaged"]
        for wanted, figures in FIGURES[name].items():
            found = [task for task in part["tasks"] if task.startswith(wanted)]
            assert found, (name, wanted)
            for task in found:
                told = json.dumps(part["tasks"][task])
                missing = [x for x in figures if f'"{x}": ' not in told]
                assert not missing, (name, task, missing)


@pytest.mark.slow
def test_both_calls_leave_all_figures_though_nothing_is_installed(
        uninstalled, tmp_path):
    python, packages = uninstalled
    checkout, out = tmp_path / "copy", tmp_path / "out"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(
        ".git", "__pycache__", ".*_cache", "*.egg-info", "build", "dist"))
    env = os.environ | {
        "QUICK": "1", "OUT": str(out), "PYTHON": str(python),
        "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}
    for name in ("PYTEST_VERSION", "TRITON_INTERPRET"):  # conftest.py sets them
        env.pop(name, None)

    def run(*words):
        result = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True,
                                text=True, timeout=900)
        assert not result.stderr
        return result.stdout

    code = ("from importlib import metadata, util; print(util.find_spec('nanopaged'), "
            "'nanopaged' in metadata.packages_distributions(), "
            "util.find_spec('numba'))")
    assert run(python, "-c", code) == "None False None\n", "a package is installed"
    for call, last in ((1, [*STATES, '"output_tokens_per_s": ', '"step_ms": ']),
                       (2, ["== peer: complete", '"output_tokens_per_s": '])):
        shown = run("bash", checkout / "tests/gpu/lease.sh", str(call))
        assert len(shown) < 12_000, "more than a terminal may keep"
        end = shown[-3000:]
        assert [words for words in last if words not in end] == []
    assert len(list(out.iterdir())) <= 8
    parts = {}
    for file in out.glob("*.json"):
        parts |= json.loads(file.read_text())["parts"]
    assert parts.keys() == FIGURES.keys()
    report = json.loads((out / "1-workload.json").read_text())
    assert [*report["parts"]] == ["workload", "step", "sweep", "speed"]
    check_figures(parts)


def test_a_call_that_does_not_exist_is_an_error():
    script = ROOT / "tests/gpu/lease.sh"
    result = subprocess.run(["bash", script, "3"], capture_output=True, text=True)
    assert result.returncode == 2 and "usage:" in result.stderr
