"""What a lent GPU is asked for, in two calls: gpu/lease.sh, tiny, on a pretended GPU.

It runs from a copy of the checkout, in an environment in which the package is not
installed, as on a machine that one gets for a quarter of an hour, and Numba neither,
which may not fit to the NumPy there. So a change of names breaks a test, and not the
first run on a GPU.
"""

import json
import os
import re
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
    "workload": {"limits": ["attention's GB/s"], "timeline": ["lines"],
                 "nano-vllm's": ["output_tokens_per_s", "share_of_limit", "runs"]},
    "nano": {"nano-vllm's": ["skipped"]},
    "speed": {"decode and prefill": ["decode, batch 1", "decode, batch 2", "prefill",
                                     "share_of_limit"]},
    "step": {"step of 2": ["step_ms", "floor_ms", "share of the limit", "host_ms",
                       "clocks"],
             "pieces of 2": ["recorded_ms", "head_ms", "greedy_ms", "drawn_ms",
                             "top_p_ms", "penalties_host_us", "replay_host_us"],
             "kernels of 2": ["kernels_ms", "launches", "lines"],
             "host of 2": ["lines"], "step of 1": ["step_ms"],
             "pieces of 1": ["recorded_ms"],
             "chunks beside 1": ["launched_ms", "done_ms", "kernels_ms"],
             "prompts": ["launched_ms", "done_ms", "kernels_ms"]},
    "shapes": {"256 x 600": ["us", "share of the limit"], "64 x 600": ["us"]},
    "peer": {"both": ["output_tokens_per_s", "transformers"]}}

VARIANTS = ["base", "no_draws", "no_kernel_pdl", "no_pdl", "no_split", "two_stages"]
SECOND = "kernels", "peer"  # the parts of the second call
STATES = [f"== {part}: complete" for part in FIGURES if part not in SECOND]


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
        machine = part["tasks"]["machine"]
        assert machine["versions"]["nanopaged"] and machine["commit"] == "a1b2"
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
        ".git", ".peers", "__pycache__", ".*_cache", "*.egg-info", "build",
        "dist"))
    env = os.environ | {
        "QUICK": "1", "OUT": str(out), "PYTHON": str(python),
        "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1", "COMMIT": "a1b2",
        "PARTS": "nano"}  # of variants
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
                       (2, ["== kernels: complete, ", "== peer: complete, ",
                            "commit a1b2", '"output_tokens_per_s": '])):
        shown = run("bash", checkout / "tests/gpu/lease.sh", str(call))
        assert len(shown) < 12_000, "more than a terminal may keep"
        end = shown[-3000:]
        assert [words for words in last if words not in end] == []
    parts = {}
    for file in out.glob("*.json"):
        parts |= json.loads(file.read_text())["parts"]
    assert parts.keys() == FIGURES.keys()
    report = json.loads((out / "1-workload.json").read_text())
    assert [*report["parts"]] == ["workload", "nano", "step", "shapes", "speed"]
    check_figures(parts)
    # The third one compares variants. Each is a copy with a change of its own.
    shown = run("bash", checkout / "tests/gpu/lease.sh", "3")
    assert re.findall(r"== nano: complete.* commit a1b2 (\w+)", shown) == VARIANTS * 2
    folders = [checkout / ".peers/variants" / name for name in VARIANTS]
    engines = {"".join(path.read_text() for path in sorted(folder.rglob("*.py")))
               for folder in folders}
    assert len(engines) == len(VARIANTS)


def test_a_call_that_does_not_exist_is_an_error():
    script = ROOT / "tests/gpu/lease.sh"
    result = subprocess.run(["bash", script, "4"], capture_output=True, text=True)
    assert result.returncode == 2 and "usage:" in result.stderr
