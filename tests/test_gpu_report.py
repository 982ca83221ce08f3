"""The report of gpu/run.py: it comes whatever fails, with all that has not failed."""

import json
import re
import sys
from pathlib import Path

import pytest

from helpers import ROOT

pytest.importorskip("triton", reason="pip install triton")
sys.path.insert(0, str(Path(__file__).with_name("gpu")))

import run  # noqa: E402


@pytest.fixture
def report(tmp_path, monkeypatch):
    """`report(parts, fail, *options)`: the exit status and the report's parts."""

    def make(parts, fail="", *options):
        monkeypatch.setenv("NANOPAGED_FAIL", fail)
        file = tmp_path / "report.json"
        words = ["--quick", "--parts", ",".join(parts), "--json", str(file), *options]
        code = run.main(words)
        return code, json.loads(file.read_text())["parts"]

    return make


@pytest.mark.slow
def test_a_part_that_hangs_is_out_of_time_and_the_others_run(report, monkeypatch):
    monkeypatch.setitem(run.PARTS, "ranks", 2)
    monkeypatch.setitem(run.PARTS, "kernels", 8)
    code, parts = report(["ranks", "kernels"], "ranks:hang", "--seconds", "96")
    assert code == 1 and parts["ranks"]["state"] == "out of time"
    assert {"machine", "first"} == {*parts["ranks"]["tasks"]}, "what was done is lost"
    assert parts["kernels"]["state"] == "complete" and parts["kernels"]["tasks"]


def test_an_unknown_part_is_an_error_and_so_is_no_gpu(report, capsys):
    with pytest.raises(SystemExit):
        report(["tokens", "other"])
    assert "unknown parts: other" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run.main([])
    assert re.search("cannot use a GPU: .*(CUDA|NVIDIA)", capsys.readouterr().err)


@pytest.mark.slow
def test_parts_may_fail_in_any_way_and_each_other_is_complete(report):
    """test_gpu_lease.py has those that fail here."""
    words = "kernels:exit tokens:exception"
    code, parts = report(run.PARTS, words, "--seconds", "6000")  # for a busy machine
    failed = {name for name, found in parts.items() if found["state"] == "failed"}
    assert code == 1 and parts.keys() == run.PARTS.keys()
    assert failed == {"kernels", "tokens"}
    for name in parts.keys() - failed:
        assert parts[name]["state"] == "complete"
        assert len(parts[name]["tasks"]) > 1 and "failed" not in str(parts[name])
    assert str(ROOT) not in json.dumps(parts) and "parts.py" in json.dumps(parts)
