"""Answer all prompts of a file, with engines on all machines of a Ray cluster.

    python ray_batch.py prompts.jsonl answers.jsonl 8 '{"model": "Qwen/Qwen3-8B"}' \
        '{"max_tokens": 256}' '{"num_gpus": 1}'

That is 8 engines with these options, what to sample, and what each engine needs. The
prompts are JSON lines or Parquet, with a column "prompt". Each row gets a line in the
answers: its columns, its number as "row", and either "outputs" or an "error". What JSON
lacks, such as dates, is written as text. If the script is stopped or killed, run it
again: it continues with the rows that have no line yet.
"""

import json
import sys
from dataclasses import asdict

import pyarrow.parquet
from ray.data import ActorPoolStrategy, DataContext, from_items

from nanopaged import LLM, SamplingParams


class Engine:
    """An engine in a process of its own."""

    def __init__(self, options, params):
        self.llm, self.params = LLM(**options), params

    def __call__(self, batch):
        rows = [json.loads(line) for line in batch["line"]]
        return {"line": [as_json(row) + "\n" for row in self.answer(rows)]}

    def answer(self, rows):
        prompts = [{"prompt": row.get("prompt")} for row in rows]
        # Seeds that depend on nothing else: a repeated row gets the same answer again.
        params = [SamplingParams(**{"seed": row["row"]} | self.params) for row in rows]
        try:
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
        except (TypeError, ValueError) as error:  # look for the rows that are refused
            if len(rows) == 1:
                return [rows[0] | {"error": str(error)}]
            return self.answer(rows[::2]) + self.answer(rows[1::2])
        return [row | {"outputs": asdict(output)["outputs"]}
                for row, output in zip(rows, outputs, strict=True)]


def as_json(row):
    """A line. JSON has no dates and no infinity, so they become text."""
    plain = json.loads(json.dumps(row, default=str), parse_constant=str)
    return json.dumps(plain)


def read(path):
    if path.endswith(".parquet"):
        return pyarrow.parquet.read_table(path).to_pylist()
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:  # a first line may begin with a mark of the encoding
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                row = json.loads(text or "{}")
            except ValueError as error:
                raise ValueError(f"{path}, line {number} must be JSON in UTF-8: "
                                 f"{error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} must be an object, got "
                                 f"{text:.80}")
            rows += [row] if text else []
    return rows


def end_last_line(path):
    """An earlier run may have been killed in the middle of a line. Drop half a line."""
    with open(path, "a+b") as file:
        file.seek(0)
        *lines, last = file.read().split(b"\n")
        try:
            file.write(b"\n" if json.loads(last or "{}") else b"")
        except ValueError:
            file.truncate(sum(len(line) + 1 for line in lines))


def run(prompts, answers, engines, options, params, resources, batch_size=256):
    rows = read(prompts)
    for number, row in enumerate(rows):
        if taken := {"row", "outputs", "error"} & set(row):
            raise ValueError(f"{prompts}, row {number}: columns must have other names "
                             f"than row, outputs and error, got {sorted(taken)}")
    end_last_line(answers)
    with open(answers, "a", encoding="utf-8", buffering=1) as file:
        left = {*range(len(rows))} - {row["row"] for row in read(answers)}
        DataContext.get_current().max_errored_blocks = -1  # let the rest go on
        # Prompts that begin alike go to the same engine, which caches their beginning.
        order = sorted(left, key=lambda i: str(rows[i].get("prompt")))
        lines = [{"line": as_json(rows[i] | {"row": i})} for i in order]
        # Each batch is a block, so another engine repeats it if its engine is killed.
        num_batches = len(lines) // batch_size + 1
        pool = ActorPoolStrategy(size=engines, max_tasks_in_flight_per_actor=1)
        results = from_items(lines, override_num_blocks=num_batches).map_batches(
            Engine, fn_constructor_args=(options, params), compute=pool, **resources)
        for block in results.iter_batches(batch_size=None, prefetch_batches=0):
            file.writelines(block["line"])
            left -= {json.loads(line)["row"] for line in block["line"]}
    print("Rows without an answer:", sorted(left) or "none")


if __name__ == "__main__":
    run(*sys.argv[1:3], *map(json.loads, sys.argv[3:]))
