"""What a lent GPU is asked for (gpu/lease.sh), tiny, on a pretended GPU: a change of
names breaks a test, and not the first run on a GPU.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from helpers import ROOT

pytest.importorskip("triton", reason="pip install triton")

PARTS = {"tokens", "workload", "nano", "step", "shapes", "speed", "kernels", "peer"}


@pytest.mark.slow
def test_a_lease_leaves_a_report_of_each_part_and_all_variants_differ(tmp_path):
    """From a copy, because variants are copies beside the engine."""
    checkout, out, parts = tmp_path / "copy", tmp_path / "out", {}
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".*", "*.egg-info"))
    env = os.environ | {"QUICK": "1", "OUT": str(out), "PYTHON": sys.executable,
                        "OMP_NUM_THREADS": "1", "COMMIT": "a1b2"}
    for name in ("PYTEST_VERSION", "TRITON_INTERPRET"):  # conftest.py sets them
        env.pop(name, None)
    for words in (["lease.sh", "1"], ["lease.sh", "2"], ["variants.sh"]):
        script, *rest = words
        subprocess.run(["bash", checkout / "tests/gpu" / script, *rest], env=env,
                       check=True, timeout=900)
    for file in out.glob("*.json"):
        parts |= json.loads(file.read_text())["parts"]
    assert {name: part["state"] for name, part in parts.items()} == dict.fromkeys(
        PARTS, "complete"), parts
    assert all(len(part["tasks"]) > 1 for part in parts.values())
