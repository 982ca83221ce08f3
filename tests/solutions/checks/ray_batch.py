"""Ray on two nodes, both on this machine: 400 prompts, and an engine that is killed.

    python ray_batch.py [the file of another solution, with its `Engine` and `run`]

Each answer is that of a single engine, and comes once. What cannot be served is
reported, and only the batch of the engine that was killed is computed again.
"""

import importlib.util
import json
import math
import os
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict
from datetime import date
from pathlib import Path

# Ray reads these when it is imported. Without the token, others could run code here.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import pyarrow.parquet
import ray
from ray.cluster_utils import Cluster

from nanopaged import LLM, SamplingParams

SOLUTION = Path(__file__).parent.parent / "ray_batch.py"
if sys.argv[1:]:
    SOLUTION = Path(sys.argv[1])
spec = importlib.util.spec_from_file_location("solution", SOLUTION)
solution = importlib.util.module_from_spec(spec)
spec.loader.exec_module(solution)
OPTIONS = {"dtype": "float32", "device": "cpu", "attention_backend": "torch",
           "num_blocks": 2000}
PARAMS = {"temperature": 0.8, "max_tokens": 24}
BATCH_SIZE = 40
NAMES = ["ROMEO", "JULIET", "KING RICHARD III", "First Citizen", "Nurse"]
WORDS = ["love", "death", "crown", "night", "sword", "heart", "lord", "lady"]


class Engine(solution.Engine):
    """It keeps a record of its batches. The first one with a certain row fails."""

    def __call__(self, batch):
        rows = [json.loads(line) for line in batch["line"]]
        node = ray.get_runtime_context().get_node_id()
        with open(RECORD, "a") as file:
            print(json.dumps([os.getpid(), node, [r["row"] for r in rows]]), file=file)
        if any(row["name"] == "on fire" for row in rows) and not SECOND_RUN.exists():
            raise RuntimeError("the machine is on fire")
        return super().__call__(batch)


def make_rows():
    """Rows of 400 prompts, then rows that are refused, and one that fails at first."""
    rng = random.Random(0)
    rows = []
    for _ in range(400):
        name = rng.choice(NAMES)
        words = rng.choices(WORDS, k=rng.randrange(1, 20))
        rows.append({"prompt": f"{name}:\n{' '.join(words)}", "name": name})
    return [*rows, {"name": "no prompt"}, {"prompt": "", "name": "empty"},
            {"prompt": "O, " * 2000, "name": "long"},
            {"prompt": "Nurse:\nFire!", "name": "on fire"}]


def expected_outputs(rows):
    """What a single engine says of those that are not refused."""
    good = [i for i, row in enumerate(rows) if row["name"] in [*NAMES, "on fire"]]
    prompts = [rows[i]["prompt"] for i in good]
    params = [SamplingParams(**PARAMS, seed=i) for i in good]
    with LLM(**OPTIONS) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
    return {i: asdict(output)["outputs"] for i, output in zip(good, found, strict=True)}


def read(path):
    """The objects of a file with JSON lines, without a line that is half written."""
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def kill_an_engine(killed):
    """Kill one at the beginning of the fifth batch."""
    while len(read(RECORD)) < 5:
        time.sleep(0.01)
    pid, _, rows = read(RECORD)[-1]
    os.kill(pid, signal.SIGKILL)
    killed += [rows, len(read(ANSWERS))]


def check_first_run(rows, expected):
    killed = []
    thread = threading.Thread(target=kill_an_engine, args=[killed])
    thread.start()
    PROMPTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    solution.run(str(PROMPTS), str(ANSWERS), 2, OPTIONS, PARAMS, {"num_cpus": 1},
                 BATCH_SIZE)
    thread.join()

    batches = [batch for *_, batch in read(RECORD)]
    repeated, num_written = killed
    assert 0 < num_written < 300, "answers are not written as they come"
    counts = Counter(row for batch in batches for row in batch)
    assert counts == Counter([*range(len(rows)), *repeated]), "more was repeated"
    assert len({node for _, node, _ in read(RECORD)}) == 2, "a node did nothing"
    # In each batch but the first, at most one name has been begun in another batch.
    num_names = [len({rows[i]["name"] for i in batch}) for batch in batches]
    assert sum(num_names) <= len(batches) + len({row["name"] for row in rows})

    (failed,) = [batch for batch in batches if len(rows) - 1 in batch]
    check_answers(rows, expected, set(range(len(rows))) - set(failed))
    return len(batches)


def check_answers(rows, expected, answered):
    """Each row that has been answered has one line; it has the row's columns."""
    answers = sorted(read(ANSWERS), key=lambda answer: answer["row"])
    assert [answer["row"] for answer in answers] == sorted(answered)
    for answer in answers:
        row = answer["row"]
        assert answer["name"] == rows[row]["name"], answer
        if row in expected:
            assert answer["outputs"] == expected[row], (answer, expected[row])
        else:
            assert "prompt" in answer["error"] and "outputs" not in answer, answer


def check_second_run(rows, expected, num_batches):
    """It answers the rest, this time from a Parquet file, although the first run left
    half a line. A column whose name the answers need is refused.
    """
    with open(ANSWERS, "a") as file:
        file.write('{"row": 3, "prom')
    taken = PROMPTS.with_name("taken.jsonl")
    taken.write_text('{"prompt": "A", "row": 5}')
    try:
        solution.run(str(taken), str(ANSWERS), 1, OPTIONS, PARAMS, {})
    except ValueError as error:
        assert "row 0" in str(error), error
    else:
        raise AssertionError("the column was overwritten")
    for data, words in ((b'{"a": 1', "line 2"), (b"[1]", "line 2"), (b'"A"', "line 2"),
                        ('{"a": 1}'.encode("utf-16"), "line 2")):
        taken.write_bytes(b'\xef\xbb\xbf{"prompt": "A"}\n' + data)
        try:
            solution.read(str(taken))
        except ValueError as error:
            assert "taken.jsonl" in str(error) and words in str(error), error
        else:
            raise AssertionError(f"{data} was read")
    taken.write_bytes(b'\xef\xbb\xbf{"prompt": "A"}\n\n')
    assert solution.read(str(taken)) == [{"prompt": "A"}]
    assert solution.as_json({"day": date(2026, 1, 1), "x": math.inf}) == (
        '{"day": "2026-01-01", "x": "Infinity"}')
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, PROMPTS.with_suffix(".parquet"))
    SECOND_RUN.touch()
    solution.run(str(PROMPTS.with_suffix(".parquet")), str(ANSWERS), 1, OPTIONS, PARAMS,
                 {"num_cpus": 1}, BATCH_SIZE)
    check_answers(rows, expected, range(len(rows)))
    assert len(read(RECORD)) - num_batches <= 2, "it did not go on where it stopped"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        PROMPTS, ANSWERS = Path(name, "prompts.jsonl"), Path(name, "answers.jsonl")
        RECORD, SECOND_RUN = Path(name, "record"), Path(name, "second run")
        all_rows = make_rows()
        outputs = expected_outputs(all_rows)
        cluster = Cluster(initialize_head=True, connect=True)  # each has one core
        cluster.add_node()
        solution.Engine = Engine
        count = check_first_run(all_rows, outputs)
        check_second_run(all_rows, outputs, count)
        ray.shutdown()
        cluster.shutdown()
    print("ray_batch: ok")
