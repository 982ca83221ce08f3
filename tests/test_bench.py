"""bench.py and example.py, with models so small that each command takes seconds."""

import io
import json
import logging
import os
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from helpers import ROOT
from nanopaged.paper import figures
from tools.cpus import EACH_CPU

WORKLOAD = "workload --requests 3 --input-len 8 16 --output-len 4 8"
DECODE = "decode --batch-sizes 1 2 --tokens 8 --prompt-len 16"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    import bench

    rates = {"bytes_per_s": 1e6, "flops_per_s": 1e9}
    monkeypatch.setattr(bench, "machine_limits", lambda *_: rates)
    monkeypatch.setattr(bench, "memory_speed", lambda _: rates["bytes_per_s"])
    return bench


@pytest.fixture
def run(bench, tmp_path, capsys):
    """`run(command)`: the figures of bench.py's command, and what it printed."""
    def run(command):
        file = tmp_path / "out.json"
        command += f" --shape tiny --repeats 1 --threads 1 --json {file}"
        assert bench.main(command.split()) == 0
        report = json.loads(file.read_text())
        return report[report["arguments"]["command"]], capsys.readouterr().out

    return run


@pytest.fixture
def script(tmp_path, monkeypatch, capsys):
    """`script(command)`: what a script prints, from an empty directory.

    One space separates the arguments, so two of them have an empty one in between.
    """
    def run(command):
        monkeypatch.setattr(sys, "argv", command.split(" "))
        runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    return run


# -- bench.py --------------------------------------------------------------------------


@EACH_CPU
def test_workload(run):
    figures, text = run(WORKLOAD)
    assert 3 * 4 <= figures["tokens_out"] <= 3 * 8 and "share of the limit" in text


@EACH_CPU
def test_decode(run):
    figures, text = run(DECODE)
    rates = figures["nanopaged"]
    assert all(rate["median"] > 0 and name in text for name, rate in rates.items())
    assert {*rates} == {"decode, batch 1", "decode, batch 2", "prefill"}
    pair = rates["decode, batch 2"]  # each step has two tokens and reads all weights
    share = pair["median"] / 2 * figures["weights_bytes"] / 1e6
    assert pair["weights_share"] == pytest.approx(share)


@EACH_CPU
def test_host_tells_the_parts_of_a_step_apart(bench, run):
    figures, text = run("host --host-sizes 1 8 --tokens 8")
    for step in figures.values():
        assert all(figure > 0 and bench.label(name) in text
                   for name, figure in step.items())
    assert " us" in text and "####" in text
    assert 8 < figures["1"]["message_bytes"] < figures["8"]["message_bytes"]


@EACH_CPU
def test_prefix_computes_only_what_is_not_cached(run):
    figures, _ = run("prefix --prefix-len 64")
    assert [run["computed_tokens"] for run in figures.values()] == [64 + 32, 32]


@EACH_CPU
def test_serve_measures_what_users_wait_for(bench, run):
    figures, text = run("serve --requests 3 --rate 99 --budgets 32 --output-len 2 9")
    assert {*figures} == {"rate", "32 tokens a step", "static batches of 16"}
    assert "ttft p99" in text and "TPOT: 5" in text
    found = bench.summary([bench.Served(n, [n + 1, n + 2, n + 2 * last], 3)
                           for n, last in enumerate([1, 2, 9])], 1, 2)
    times = {"tpot_p50_s": 1.5, "tpot_p90_s": 8.5, "gap_p99_s": 16, "ttft_p99_s": 1}
    assert times.items() <= found.items()
    assert found["good_per_s"] == pytest.approx(2 / 20)  # the last gap was too long


def test_serve_asks_any_server(bench, monkeypatch):
    """A chunk may bring several tokens."""
    lines = (b'data: {"choices": [{"text": "a b"}]}\n\ndata: [DONE]\ndata: {"choices": '
             b'[], "usage": {"completion_tokens": 2}}\n')
    monkeypatch.setattr(bench, "urlopen", lambda request: io.BytesIO(
        b'{"data": [{"id": ""}]}' if isinstance(request, str) else lines))
    (served,) = bench.ask_server("http://localhost", [([1], 2)], [0.0])
    assert (len(served.times), served.num_tokens) == (1, 2)
    for each in b'data:{"choices": [{}]}\n', b'data: {}\n\ndata: {"choices": [{}]}\n':
        lines = each
        (served,) = bench.ask_server("http://localhost", [([1], 2)], [0.0])
        assert len(served.times) == 1
    for each in b'data: {"error": "full"}\n', b"data: [DONE]\n", b"data: {half\n":
        lines = each
        with pytest.raises(SystemExit, match="^bench.py: http://localhost fails: "):
            bench.ask_server("http://localhost", [([1], 2)], [0.0])


@pytest.mark.slow
@pytest.mark.parametrize("command", [WORKLOAD, DECODE], ids=["workload", "decode"])
def test_transformers_serves_the_same_requests(command, run, monkeypatch):
    monkeypatch.setattr(logging, "disable", lambda level: None)  # for later tests
    figures, text = run(f"{command} --vs transformers")
    for name, peer in figures["transformers"].items():
        ratio = (peer["median"] / figures["seconds"] if command is WORKLOAD
                 else figures["nanopaged"][name]["median"] / peer["median"])
        assert peer["ratio"] == pytest.approx(ratio) and name in text


@pytest.mark.slow
def test_memory_shows_the_papers_numbers_and_draws(run, monkeypatch, tmp_path):
    for name, seconds in {"latency": 160, "memory": 40}.items():
        monkeypatch.setitem(
            figures.FIGURES, name, partial(figures.FIGURES[name], seconds))
    found, text = run(f"memory --plots {tmp_path}")
    assert "1.7 to 2.7" in text and found["rates"]["Orca (max)"]["nanopaged / this"] > 2
    assert found["running"]["Orca (max)"] == {"requests": 7, "requests (paper)": 7}
    files = list(tmp_path.glob("*.svg"))
    assert len(files) == 3 and all(str(file) in text for file in files)


def test_the_floor_counts_bytes_and_operations(bench, tmp_path):
    """One request, 3 tokens in and 2 out; options of the engine are passed on."""
    args = bench.parse(["--engine", '{"dtype": "float32", "num_blocks": 8}'])
    args.model = bench.write_config(tmp_path, bench.SHAPES["tiny"])
    with bench.make_engine(args) as llm:
        floor, other = (bench.time_floor(
            [([1, 2, 3], 2)], llm, {"bytes_per_s": 1e6, "flops_per_s": rate})
            for rate in (1e9, 1e6))
    layers, head = 2 * 64 * (2 * (4 + 2) * 16 + 3 * 128), 64 * 256
    kv_bytes = (4 + 3) * 2 * 2 * 2 * 16 * 4  # one decode reads 4, the prompt writes 3
    assert floor["bytes_s"] == (4 * 2 * (layers + head) + kv_bytes) / 1e6
    assert floor["flops_s"] == (8 * layers + 4 * head + 512 * (1 + 2 + 3 + 4)) / 1e9
    assert floor["floor_s"] == pytest.approx(floor["bytes_s"])
    # Here operations bound the prompt, and bytes the decode: no time hides the other.
    decode = (4 * (layers + head) + 4 * 512) / 1e6
    assert other["floor_s"] == pytest.approx(
        decode + (6 * layers + 2 * head + 512 * (1 + 2 + 3)) / 1e6)


def test_the_failure_of_a_peer_is_a_finding(bench, monkeypatch):
    finding = bench.repeat(lambda _: 1 / 0, 1, 2, 2)
    monkeypatch.setitem(bench.COMMANDS, "host", lambda args: finding)
    assert bench.main(["host"]) == 1 and "division by zero" in finding["failed"]


# -- example.py ------------------------------------------------------------------------


@EACH_CPU
def test_the_example_streams_and_shows_the_effect_of_the_cache(script):
    *texts, end = script("example.py --max-tokens 24").split(f"\n\n{'-' * 70}\n")
    names = [text.split(":")[0] for text in texts if len(text) > 30]
    assert names == ["ROMEO", "JULIET", "KING RICHARD III"]
    end = end.replace(" them\nare", " them are").replace(",\nand", ", and")
    counts, first, second, usage, *_ = [
        list(map(int, re.findall(r"\d+", line))) for line in end.splitlines()]
    assert counts[:2] == [3, 3 * 24]
    (length, cold), warm = first[:2], second[1]
    assert cold < warm == (length - 1) // 16 * 16  # all but the last token's block
    _, used, total, cached, hits = usage
    assert 3 <= used < total and 0 < cached <= total and warm <= hits


def test_the_example_chats_in_ascii_and_writes_a_page(script, tmp_path):
    """In an ASCII locale, Python reads "bé" as below, and cannot print it."""
    sys.stdout.reconfigure(encoding="ascii")
    text = script("example.py --max-tokens 8 --trace run.html --chat To b\udcc3\udca9")
    assert text.startswith("\n> To\n") and "\n> b?\n" in text
    assert (tmp_path / "run.html").read_text().startswith("<!DOCTYPE html>")


def test_the_example_ends_when_its_reader_does(script, monkeypatch):
    """As `head` does. Flushing the rest at exit must not fail again."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    with pytest.raises(SystemExit, match="1"):
        script("example.py --max-tokens 1 --chat Hi")
    sys.stdout.close()


# -- All commands, with the tour -------------------------------------------------------


@pytest.mark.parametrize("command, message", {
    "bench.py decode --batch-sizes 0": "--batch-sizes: must be at least 1, got 0",
    "bench.py --input-len 9 8": "--output-len: MIN must be at most MAX",
    'bench.py --engine {"block":16}': "unexpected keyword argument 'block'",
    "bench.py --model nowhere": "--model: there is no config.json in nowhere",
    "bench.py serve --url http://localhost:9": "http://localhost:9 does not answer",
    "example.py ": "max_model_len=1024, got 0",  # an empty prompt
    f"example.py {'to be ' * 999}": "max_model_len=1024, got ",
    "example.py --trace nowhere/run.html": "nowhere/run.html cannot be written: ",
    "example.py --model ../nowhere": "'../nowhere'",
}.items())
def test_bad_arguments_get_a_sentence(script, command, message, capsys):
    with pytest.raises(SystemExit) as caught:
        script(command)
    assert message in f"{caught.value.code} {capsys.readouterr().err}"


INTERRUPTED = """if True:
    import os, runpy, sys

    class Strike:
        def find_spec(self, name=None, *_):
            if name in (None, "torch"):
                raise KeyboardInterrupt

    when, *sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    if when == "loading":
        import nanopaged
        nanopaged.LLM.__init__ = lambda self, *_, **__: Strike().find_spec()
    else:
        sys.meta_path.insert(0, Strike())
    run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
    run(sys.argv[0], run_name="__main__")"""


@pytest.mark.parametrize("when", [
    "importing", pytest.param("loading", marks=pytest.mark.slow)])
@pytest.mark.parametrize("command", ["example.py", "bench.py", "nanopaged.tour"])
def test_ctrl_c_is_one_line(when, command, tmp_path):
    """While modules are imported, and afterwards. (Steps: test_interrupts.py.)"""
    command = command.replace("bench.py", f"{ROOT / 'bench.py'} --shape tiny")
    command = command.replace("example.py", str(ROOT / "example.py"))
    words = [sys.executable, "-c", INTERRUPTED, when, *command.split()]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert (done.stdout + done.stderr).endswith(": interrupted\n")


@pytest.mark.parametrize(("info", "expected"), [
    ("model name\t: Some EPYC\n", "Some EPYC"), ("BogoMIPS\t: 2100.00\n", "aarch64"),
    (None, "aarch64")], ids=["x86", "ARM Linux", "Mac"])
def test_figures_name_the_processor(info, expected, bench, tmp_path, monkeypatch):
    if info:
        (tmp_path / "cpuinfo").write_text(info)
    monkeypatch.setattr(bench, "Path", lambda name: tmp_path / "cpuinfo"
                        if name == "/proc/cpuinfo" else Path(name))
    monkeypatch.setattr(bench.platform, "processor", lambda: "")
    monkeypatch.setattr(bench.platform, "machine", lambda: "aarch64")
    assert bench.machine()["cpu"] == expected
