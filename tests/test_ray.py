"""More throughput than one engine has: Ray Data runs an `LLM` in each of its workers.

The README's recipe on a local Ray with two workers, without a network: every prompt gets the text
that one engine gives it, and the results come in the prompts' order.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nanopaged
from nanopaged import LLM, SamplingParams

README = Path(nanopaged.__file__).parent.parent / "README.md"
RECIPE = re.search(r"```py\n(import ray\n.*?)```", README.read_text("utf-8"), re.DOTALL)[1]
BEFORE = """
import ray
ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
"""
AFTER = """
import json
with open("rows.json", "w") as file:
    json.dump(rows, file)
"""


@pytest.mark.slow
def test_two_workers_give_what_one_engine_gives_in_the_prompts_order(tmp_path):
    pytest.importorskip("ray", reason="needs the extra [ray]")
    (tmp_path / "script.py").write_text(BEFORE + RECIPE + AFTER)
    env = os.environ | {"PYTHONPATH": str(Path(nanopaged.__file__).parent.parent),
                        "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}  # fmt: skip
    env.pop("RAY_ADDRESS", None)  # no cluster that happens to run here
    result = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=env, timeout=300,
                            capture_output=True, text=True)  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    prompts = [f"ACT {i}:\n" for i in range(64)]
    assert [row["prompt"] for row in rows] == prompts
    with LLM(dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=16)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert [row["text"] for row in rows] == texts
    assert len(set(texts)) > 5, "any order would do"
