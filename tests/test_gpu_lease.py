"""What a lent GPU is asked for (gpu/lease.sh), tiny, on a pretended GPU: a change of
names breaks a test, and not the first run on a GPU.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from helpers import ROOT, run_python

pytest.importorskip("triton", reason="pip install triton")

# Each, and which file of the engine it changes.
VARIANTS = {"base": None, "no_pdl": "gpu/attention.py", "late": "gpu/kernels.py"}
COMPILE = """
import triton
from nanopaged.gpu.kernels import store
types = ["*bf16", "*bf16", "*i64", "*bf16", "i32", "i32", *["constexpr"] * 4]
constants = {"SIZE": 1024, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "PDL": True}
source = triton.compiler.ASTSource(
    store, dict(zip(store.arg_names, types, strict=True)), constants)
target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
print(triton.compile(source, target, {"launch_pdl": True}).asm["ptx"])
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy, because variants are made beside the engine."""
    path = tmp_path_factory.mktemp("lease") / "checkout"
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, path, ignore=ignored)
    subprocess.run(["bash", path / "tests/gpu/variants.sh"], check=True)
    return path


def test_a_variant_has_one_change_and_late_stores_compile(checkout):
    package = ROOT / "nanopaged"
    for name, changed in VARIANTS.items():
        copy = checkout / ".peers/variants" / name
        assert [file for file in package.rglob("*.py") if file.read_bytes() != (
            copy / file.relative_to(ROOT)).read_bytes()] == (
                [package / changed] if changed else [])
    ptx = run_python("-c", COMPILE, cwd=copy, TRITON_INTERPRET=None,
                     PYTHONPATH=str(copy))  # of the last one
    order = [ptx.index(word) for word in (
        "griddepcontrol.wait", "launch_dependents", "nanosleep", "st.global")]
    assert order == sorted(order)


@pytest.mark.parametrize(("state", "other", "sentence"), [
    ("complete", "aa", None), ("complete", "ab", "the tokens differ"),
    ("out of time", "aa", "is not complete: out of time")], ids=str)
def test_variants_are_equal_only_if_all_hashes_are(state, other, sentence, tmp_path):
    for name, values in (("one", "aa"), ("other", other)):
        tasks = {task: {"sha256": value}
                 for task, value in zip(("first", "second"), values, strict=True)}
        report = {"parts": {"same": {"state": state, "tasks": tasks}}}
        (tmp_path / name).write_text(json.dumps(report))
    script = [sys.executable, ROOT / "tests/gpu/equal.py", "one", "other"]
    result = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == (0 if sentence is None else 1)
    assert (sentence or "") in result.stderr


@pytest.mark.slow
def test_two_calls_leave_reports_of_variants_that_serve_the_same(checkout, tmp_path):
    """And the answers on a GPU are those on a CPU."""
    env = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable,
                        "OMP_NUM_THREADS": "1", "COMMIT": "a1b2"}
    for name in ("PYTEST_VERSION", "TRITON_INTERPRET"):  # conftest.py sets them
        env.pop(name, None)
    gpu, python = checkout / "tests/gpu", [sys.executable]
    one, *others = (tmp_path / f"{name}-same.json" for name in VARIANTS)
    for words in (
            ["bash", gpu / "lease.sh", "a", "--quick"],
            ["bash", gpu / "lease.sh", "b", "--quick"],
            [*python, gpu / "equal.py", one, *others],
            [*python, gpu / "run.py", "--quick", "--parts", "tokens", "--json",
             tmp_path / "base-tokens.json"]):
        subprocess.run(words, env=env, check=True, timeout=600)
    states = [(file.stem, name, part["state"]) for file in tmp_path.glob("*.json")
              for name, part in json.loads(file.read_text())["parts"].items()]
    assert {state for _, _, state in states} == {"complete"}
    assert {(file, name) for file, name, _ in states} >= {
        (f"{variant}-workload", part) for variant in ("base", "no_pdl")
        for part in ("workload", "step")}
