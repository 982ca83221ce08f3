"""Several processes, one engine: the same tokens, and nothing is left behind.

Ranks of a script talk by gloo on the loopback. Their tokens are those of one rank, in
pools so tight that requests are preempted. However a script ends under torchrun, and
whichever process is killed, all of them end soon.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import CPU, ROOT, draw_requests, serve

LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]
OPTIONS = CPU | {"block_size": 4, "max_model_len": 96, "num_blocks": 28,
                 "max_num_seqs": 12, "max_num_batched_tokens": 24}
SOON = 60  # seconds, for busy machines; usually it takes a few
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


# -- The same tokens -------------------------------------------------------------------

SERVE = """
import json, os, sys
from pathlib import Path
from helpers import counters, serve
from nanopaged import LLM
from nanopaged.model_runner import ModelRunner
from test_ranks import draw, listening

def run_and_look(self, batch):
    report = listening(), os.environ.get("GLOO_SOCKET_IFNAME")
    Path(os.environ["RANK"]).write_text(json.dumps(report))
    return run(self, batch)

path, options, runs_ahead, seed = json.loads(sys.argv[1])
run, ModelRunner.run = ModelRunner.run, run_and_look
options["tensor_parallel_size"] = int(os.environ["WORLD_SIZE"])
with LLM(path, **options) as llm:  # only the first rank comes further
    llm.engine.steps_ahead = runs_ahead
    answer = serve(llm, draw(seed)), counters(llm)
Path("answer").write_text(json.dumps(answer))
"""


def draw(seed):
    """Greedy and sampled requests, and beams."""
    return list(draw_requests(seed, vocab_size=160, most=4, max_tokens=20, stop=()))


def listening():
    """The addresses and ports at which this process listens, in hexadecimal."""
    files = [os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()]
    inodes = set(re.findall(r"socket:\[(\d+)\]", " ".join(files)))
    tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for line in "".join(tables).splitlines() if ":" in line]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}  # for four ranks
FAMILIES = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {"num_attention_heads": 14, "tie_word_embeddings": True,
              "hidden_size": 112, "intermediate_size": 90, "num_hidden_layers": 2,
              "num_key_value_heads": 2, "vocab_size": 161,
              "max_position_embeddings": 128}, "qwen3": {"attention_bias": True}}


@linux
@pytest.mark.parametrize(("size", "family", "runs_ahead"), [
    (2, "qwen3", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (2, "llama", False), (2, "mistral", False), (2, "qwen2", True),
        (4, "llama", False), (4, "qwen3", True)))])
def test_ranks_say_what_one_says(
        size, family, runs_ahead, make_model, engine, warm, tmp_path):
    """In a pool with room for all, where nobody is preempted: with samples, beams,
    chunks, both modes of preemption, and one step ahead. And they listen at the
    loopback alone.
    """
    seed = [*FAMILIES].index(family)
    mode, fields = ("recompute", "swap")[seed % 2], HEADS if size == 4 else {}
    path = make_model(family, seed=seed, **FAMILIES[family] | fields)
    options = OPTIONS | {"preemption_mode": mode}
    (tmp_path / "script.py").write_text(SERVE)
    status, said = warm(
        tmp_path / "script.py", json.dumps([str(path), options, runs_ahead, 2]),
        cwd=tmp_path, ranks=size, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    assert status == 0, said
    answer, stats = json.loads((tmp_path / "answer").read_text())
    one = engine(path, **OPTIONS | {"num_blocks": 800, "max_num_seqs": 64})
    assert answer == json.loads(json.dumps(serve(one, draw(2))))
    tokens = {token for output in answer for c in output for token in c[0]}
    assert len(tokens) > 50, "they repeat themselves"
    assert stats["blocks_used"] == 0 and stats[f"preemptions_{mode}"] > 0
    for rank in range(size):
        places, interface = json.loads((tmp_path / str(rank)).read_text())
        # A host's name may stand for the loopback anyway, but only on some machines.
        assert places and interface == "lo", "gloo's ranks connect to each other"
        assert all(place.startswith("0100007F:") for place in places)


# -- The end ---------------------------------------------------------------------------

# What each rank does after its first steps.
ENDING = """
import json, os, sys
from pathlib import Path
from datetime import timedelta
from torch.distributed import distributed_c10d
from nanopaged import LLM, SamplingParams
from nanopaged.model_runner import ModelRunner

path, options, how, rank = *sys.argv[1:], os.environ["RANK"]
Path(rank).write_text(str(os.getpid()))

def run_or_fail(self, batch):
    if how == "an error in rank 1" and rank == "1" and max(batch.ends) > 20:
        raise ValueError("the machine is on fire")
    return run(self, batch)

run, ModelRunner.run = ModelRunner.run, run_or_fail
# Gloo may miss that a machine has gone. Then this is how long a step waits for it.
distributed_c10d.default_pg_timeout = timedelta(seconds=20)
llm = LLM(path, tensor_parallel_size=2, **json.loads(options))
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
(output,) = llm.generate([5, 6, 7], params, use_tqdm=False)
print(output.outputs[0].token_ids, flush=True)
if how == "a second engine":
    LLM(path, tensor_parallel_size=2)
if how == "sys.exit":
    sys.exit(7)
while how != "the end of the script":
    llm.generate([[5, 6, 7]] * 3, SamplingParams(max_tokens=60), use_tqdm=False)
"""
ENDS = {  # how: what torchrun's output must have
    "the end of the script": "", "sys.exit": "exitcode *: 7",
    "a second engine": "ValueError: trying to initialize the default process group",
    "an error in rank 1": r"ValueError: the machine is on fire[\s\S]*rank *: 1",
    "kill -9 of rank 0": "Signal 9", "kill -9 of rank 1": "Signal 9",
    "kill -9 of machine 0": "", "kill -9 of machine 1": "",
    "Ctrl-C": "SIGINT|KeyboardInterrupt"}


def has_ended(pid):
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()  # as of a zombie
    except OSError:
        return True


@linux
@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_every_end_of_a_script_ends_all_its_ranks(how, llama, reference, tmp_path):
    expected = reference.generate(llama, [5, 6, 7], 8)
    check_end(how, llama, OPTIONS, expected, tmp_path)


def check_end(how, path, options, expected, folder):
    """For torchrun, a machine is a launcher with its ranks. Here each has one rank."""
    (folder / "script.py").write_text(ENDING)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    machines = [["--standalone", "--nproc-per-node", "2"]]
    if "machine" in how:
        machines = [["--nnodes", "2", "--node-rank", node, "--rdzv-endpoint", endpoint]
                    for node in "01"]
    launchers = [subprocess.Popen(
        [*LAUNCHER, *words, "script.py", path, json.dumps(options), how],
        cwd=folder, start_new_session=how == "Ctrl-C", stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, encoding="utf-8",
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
        for words in machines]
    pids = [launcher.pid for launcher in launchers]
    try:
        assert json.loads(launchers[0].stdout.readline()) == expected
        ranks = [int((folder / rank).read_text()) for rank in "01"]
        pids += ranks
        if "machine" in how:
            os.kill(launchers[int(how[-1])].pid, signal.SIGKILL)
        if how.startswith("kill"):
            os.kill(ranks[int(how[-1])], signal.SIGKILL)
        elif how == "Ctrl-C":  # a terminal sends it to all processes
            os.killpg(launchers[0].pid, signal.SIGINT)
        # Until nobody holds the pipes.
        stderr = [launcher.communicate(timeout=SOON)[1] for launcher in launchers]
        is_normal = launchers[0].returncode == 0
        assert is_normal == (how == "the end of the script"), stderr
        assert re.search(ENDS[how], stderr[0]), stderr
        assert all(map(has_ended, pids))
    finally:
        for pid in pids:
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)
        for launcher in launchers:
            launcher.communicate()
