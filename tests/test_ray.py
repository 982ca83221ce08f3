"""More throughput than one engine has: Ray Data runs an `LLM` in each worker.

RECIPE is what a user writes. Here it runs on a local Ray with two workers, without a
network: every prompt gets the text that one engine gives it, and the results come in
the prompts' order.
"""

import json

import pytest

from helpers import run_python
from nanopaged import LLM, SamplingParams

# pip install -e ".[ray]"; with GPUs, num_gpus=1 in place of num_cpus=1.
RECIPE = """
import ray
from nanopaged import LLM, SamplingParams

class Worker:
    def __init__(self):
        self.llm = LLM(dtype="float32")

    def __call__(self, batch):
        params = SamplingParams(temperature=0, max_tokens=16)
        outputs = self.llm.generate(batch["prompt"].tolist(), params, use_tqdm=False)
        return batch | {"text": [output.outputs[0].text for output in outputs]}

ray.data.DataContext.get_current().execution_options.preserve_order = True
prompts = ray.data.from_items([{"prompt": f"ACT {i}:\\n"} for i in range(64)])
workers = ray.data.ActorPoolStrategy(size=2)
results = prompts.map_batches(Worker, batch_size=16, compute=workers, num_cpus=1)
rows = results.take_all()
"""
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
