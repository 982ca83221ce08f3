"""More throughput than one engine has: Ray Data runs an `LLM` in each worker.

This is the README's recipe on a local Ray with two workers, without a network. Every
prompt gets the text that one engine gives it, and the results come in the prompts'
order.
"""

import json
import re

import pytest

from helpers import ROOT, run_python
from nanopaged import LLM, SamplingParams

README = ROOT / "README.md"
RECIPE = re.search(
    r"```py\n(import ray\n.*?)```", README.read_text("utf-8"), re.DOTALL
)[1]
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
def test_two_workers_give_what_one_engine_gives_in_order(tmp_path):
    pytest.importorskip("ray", reason="pip install nanopaged[ray]")
    (tmp_path / "script.py").write_text(BEFORE + RECIPE + AFTER)
    run_python(
        "script.py",
        cwd=tmp_path,
        timeout=300,
        RAY_USAGE_STATS_ENABLED="0",
        OMP_NUM_THREADS="1",
        RAY_ADDRESS=None,  # ignore a cluster that happens to run here
    )
    rows = json.loads((tmp_path / "rows.json").read_text())
    prompts = [f"ACT {i}:\n" for i in range(64)]
    assert [row["prompt"] for row in rows] == prompts

    with LLM(dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=16)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]

    assert [row["text"] for row in rows] == texts
    assert len(set(texts)) > 5, "any order would pass"
