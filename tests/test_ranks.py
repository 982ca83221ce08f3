"""Several processes, one engine: the same tokens, and nothing is left behind.

A script runs under torchrun, with gloo on the loopback. The tokens of its ranks are
those of one rank, in pools so tight that requests are preempted. However a script ends,
and whichever process is killed, all of them end soon.
"""

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from functools import partial
from pathlib import Path

import pytest

from helpers import CPU, ROOT, draw_requests, message_of, run_python, serve
from nanopaged import LLM

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--local-addr", "127.0.0.1", "--nproc-per-node"]
OPTIONS = CPU | {"block_size": 4, "max_model_len": 96, "max_num_seqs": 12,
                 "max_num_batched_tokens": 24}
SOON = 60  # seconds, on a machine that has much else to do; else it takes a few
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


# -- The same tokens -------------------------------------------------------------------

# A process can be a rank of several engines in turn, as all of them use one process
# group here, and a batch that no engine sends takes the others on to the next engine.
SERVE = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
from helpers import counters, serve
from nanopaged import LLM
from nanopaged.parallel import Ranks
from nanopaged.scheduler import Batch
from test_ranks import draw, listening

class Next(Exception):
    pass

def run_or_go_on(run, batch):
    if batch.samples and not batch.counts:
        raise Next
    run(batch)

init, serve_rank = dist.init_process_group, Ranks.serve
dist.init_process_group = lambda *args, **options: (
    dist.is_initialized() or init(*args, **options))
Ranks.serve = lambda self, run: serve_rank(
    self, lambda batch: run_or_go_on(run, batch))

here, answers = Path(__file__).parent, []
for path, options, runs_ahead, seed in json.loads((here / "engines.json").read_text()):
    try:
        with LLM(path, tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
                 **options) as llm:
            llm.runs_ahead = runs_ahead
            answers.append([serve(llm, draw(seed)), counters(llm)])
            llm.ranks.send(Batch(samples=[0]))
    except Next:
        pass
rank = dist.get_rank()
report = {"answers": answers, "listening": listening()}
(here / f"report{rank}.json").write_text(json.dumps(report))
dist.barrier()
"""


def draw(seed):
    """Greedy and sampled requests, and beams."""
    return list(draw_requests(seed, vocab_size=160, most=4, max_tokens=20, stop=()))


def listening():
    """The addresses and ports at which this process listens, in hexadecimal."""
    inodes = set()
    for file in Path("/proc/self/fd").iterdir():
        if file.is_symlink():
            inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(file)))
    tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]


def run_ranks(size, engines, directory):
    """Run SERVE; returns what each rank reports."""
    (directory / "engines.json").write_text(json.dumps(engines))
    (directory / "script.py").write_text(SERVE)
    run_python(*TORCHRUN[1:], str(size), str(directory / "script.py"), cwd=directory,
               PYTHONPATH=f"{ROOT}{os.pathsep}{Path(__file__).parent}", OMP_NUM_THREADS="1")
    return [json.loads((directory / f"report{rank}.json").read_text())
            for rank in range(size)]


def check_answers(answers, engines, engine):
    """They are those of one rank with room for all, where nobody is preempted."""
    for (answer, stats), (path, options, _, seed) in zip(answers, engines, strict=True):
        one = engine(path, **(OPTIONS | {"num_blocks": 800, "max_num_seqs": 64}))
        expected = json.loads(json.dumps(serve(one, draw(seed))))
        assert answer == expected, (path, options)
        tokens = {token for output in expected for c in output for token in c[0]}
        assert len(tokens) > 50, "they repeat themselves"
        assert stats["blocks_used"] == 0
        mode = options["preemption_mode"]
        other = {"swap": "recompute", "recompute": "swap"}[mode]
        assert stats[f"preemptions_{mode}"] > 0 == stats[f"preemptions_{other}"]


@linux
def test_two_ranks_of_each_family_say_what_one_says(make_model, engine, tmp_path):
    """With samples, beams, chunks, both modes of preemption, and one step ahead. And
    they listen at the loopback alone.
    """
    models = [
        make_model("llama", seed=1, tie_word_embeddings=True, attention_bias=True,
                   mlp_bias=True),
        make_model("mistral", seed=2, sliding_window=None),
        make_model("qwen2", seed=3, num_attention_heads=14, tie_word_embeddings=True,
                   hidden_size=112, intermediate_size=90, num_hidden_layers=2,
                   num_key_value_heads=2, vocab_size=160, max_position_embeddings=128),
        make_model("qwen3", seed=4, attention_bias=True)]
    engines = [
        (str(path), OPTIONS | {
            "num_blocks": 28, "preemption_mode": ("recompute", "swap")[i % 2]},
         i >= 2, 2) for i, path in enumerate(models)]
    reports = run_ranks(2, engines, tmp_path)
    check_answers(reports[0]["answers"], engines, engine)
    assert reports[1]["answers"] == [], "it served, and was served nothing"
    for report in reports:
        assert report["listening"], "gloo's ranks connect to each other"
        assert all(place.startswith("0100007F:") for place in report["listening"])


@linux
@pytest.mark.slow
def test_four_ranks_say_what_one_says(make_model, engine, tmp_path):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    engines = [
        (str(make_model(family, seed=5, tie_word_embeddings=is_tied, **heads)),
         OPTIONS | {"num_blocks": 28, "preemption_mode": mode}, is_tied, 2)
        for family, mode, is_tied in [
            ("llama", "recompute", True), ("qwen3", "swap", False)]]
    check_answers(run_ranks(4, engines, tmp_path)[0]["answers"], engines, engine)


# -- What cannot be --------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [None, 1, 3, 4])
def test_torchrun_must_start_as_many_processes_as_there_are_ranks(
        world_size, llama, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size:
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
    message = message_of(partial(LLM, llama, tensor_parallel_size=2, **OPTIONS))
    assert message == (
        "tensor_parallel_size must be the number of processes that torchrun started, "
        f"{world_size or 1}, got 2")


@pytest.mark.parametrize(("size", "field"), [
    (3, "num_attention_heads=4"), (4, "num_key_value_heads=2"),
    (8, "num_attention_heads=4")])
def test_every_rank_must_get_as_many_heads(size, field, llama, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(size))
    message = message_of(partial(LLM, llama, tensor_parallel_size=size, **OPTIONS))
    assert message == f"tensor_parallel_size must be a divisor of {field}, got {size}"


@pytest.mark.parametrize(("field", "value"), [
    ("intermediate_size", 137), ("vocab_size", 161)])
def test_every_rank_must_get_as_many_rows(field, value, llama, edit_model):
    path = edit_model(llama, lambda fields: fields.update({field: value}))
    message = message_of(partial(LLM, path, tensor_parallel_size=2, **OPTIONS))
    assert message == (
        f"tensor_parallel_size must be a divisor of {field}={value}, got 2")


# -- The end ---------------------------------------------------------------------------

# What each rank does after its first steps.
ENDING = """
import os, sys
from pathlib import Path
from nanopaged import LLM, SamplingParams
from nanopaged.model_runner import ModelRunner

here, how, rank = Path(__file__).parent, sys.argv[1], os.environ["RANK"]
(here / rank).write_text(str(os.getpid()))
run = ModelRunner.run

def run_or_fail(self, batch):
    if how == "an error in rank 1" and rank == "1" and max(batch.ends) > 20:
        raise ValueError("the machine is on fire")
    return run(self, batch)

ModelRunner.run = run_or_fail
llm = LLM({path!r}, tensor_parallel_size=2, **{options})
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
answer = llm.generate([[5, 6, 7]] * 3, params, use_tqdm=False)[1].outputs[0].token_ids
print("the answer is", answer, flush=True)
if how == "an exception":
    raise KeyError("not in the dictionary")
if how == "sys.exit":
    sys.exit(7)
while how != "the end of the script":
    llm.generate([[5, 6, 7]] * 3, SamplingParams(max_tokens=60), use_tqdm=False)
"""
ENDS = {  # how: what torchrun's output must have
    "the end of the script": "", "sys.exit": "exitcode *: 7",
    "an exception": "KeyError: 'not in the dictionary'",
    "an error in rank 1": r"ValueError: the machine is on fire[\s\S]*rank *: 1",
    "kill -9 of rank 0": "Signal 9", "kill -9 of rank 1": "Signal 9",
    "Ctrl-C": "SIGINT|KeyboardInterrupt"}


def processes(mark):
    """The processes whose environment has the mark, and that have not ended."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (place / "environ").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue  # it is somebody else's, or has just ended
    return found


@linux
@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_every_end_of_a_script_ends_all_its_ranks(how, llama, reference, tmp_path):
    expected = reference.generate(llama, [5, 6, 7], 8)
    options = OPTIONS | {"num_blocks": 64}
    script, mark = tmp_path / "script.py", uuid.uuid4().hex
    script.write_text(
        ENDING.replace("{path!r}", repr(str(llama))).replace("{options}", str(options)))
    process = subprocess.Popen(
        [*TORCHRUN, "2", script, how], cwd=tmp_path, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                          "MARK": mark})
    try:
        assert process.stdout.readline() == f"the answer is {expected}\n"
        assert how == "the end of the script" or len(processes(mark)) >= 2
        if how.startswith("kill"):
            os.kill(int((tmp_path / how[-1]).read_text()), signal.SIGKILL)
        elif how == "Ctrl-C":  # a terminal sends it to all processes
            os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=SOON)  # until nobody holds the pipes
        assert (process.returncode == 0) == (how == "the end of the script"), stderr
        assert re.search(ENDS[how], stderr), stderr
        assert processes(mark) == []
    finally:
        for pid in processes(mark):
            os.kill(pid, signal.SIGKILL)
        process.communicate()
