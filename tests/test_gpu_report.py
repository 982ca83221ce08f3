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
    """`report(parts, *options, part=code)`: the exit status and the report's parts,
    where these parts do a first task, and then run the code.
    """
    def make(parts, *options, **failing):
        code = "import os, sys, time\nfrom gpu import parts\n"
        for name, failure in failing.items():
            code += f"def fail(task, quick): task('first', dict); {failure}\n"
            code += f"parts.{name} = fail\n"
        script, file = tmp_path / "script.py", tmp_path / "report.json"
        script.write_text(code + "parts.main()")
        monkeypatch.setattr(run, "SCRIPT", script)
        words = ["--quick", "--parts", ",".join(parts), "--json", str(file), *options]
        code = run.main(words)
        return code, json.loads(file.read_text())["parts"]

    return make


@pytest.mark.slow
def test_a_part_that_hangs_is_out_of_time_and_the_others_run(report, monkeypatch):
    monkeypatch.setitem(run.PARTS, "ranks", 2)
    monkeypatch.setitem(run.PARTS, "kernels", 8)
    code, parts = report(["ranks", "kernels"], "--seconds", "96",
                         ranks="time.sleep(10_000)")
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
    """test_gpu_lease.py has those that fail here, and all that are left out."""
    names = "ranks", "kernels", "tokens", "speed", "nano"
    code, parts = report(
        names, "--seconds", "6000",  # for a busy machine
        kernels="os._exit(3)", tokens="task('injected', lambda: 1 / 0)",
        speed="import atexit; atexit.register(time.sleep, 10_000)")  # but it must end
    failed = {name for name, found in parts.items() if found["state"] == "failed"}
    assert code == 1 and failed == {"kernels", "tokens"}
    for name in {*names} - failed:
        assert parts[name]["state"] == "complete"
        assert len(parts[name]["tasks"]) > 1 and "failed" not in str(parts[name])
    assert str(ROOT) not in json.dumps(parts) and "parts.py" in json.dumps(parts)
