"""Everything that needs a GPU, by one command for whoever has one:

    pip install -e ".[test]"
    python tests/gpu/run.py --json gpu.json

Tests, figures and, where it is installed, compute-sanitizer, in less than eight
minutes. Every part is a process of its own, so that one that breaks the device breaks
no other, and FILE has the results after each part. The same command again runs what is
missing: parts that were cut off by their time limit, by Ctrl-C or by the end of the
eight minutes. Parts named with `--only` run again in any case. `--quick` runs tiny
shapes, on a CPU too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import bench

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TINY = "--shape tiny --repeats 1 --threads 1"
EAGER = """--engine '{"enforce_eager": true}'"""
FLASH = """--engine '{"attention_backend": "flash", "block_size": 256}'"""
TIMELINE = "python tests/gpu/time_steps.py --json {json}"
SANITIZER = "compute-sanitizer --error-exitcode 1 --tool"
GRACE_SECONDS = 15.0  # for a process to write its report when it is asked to stop


class Part(NamedTuple):
    """A command, run in the repository's root; `python` is this interpreter.

    Where a process writes its figures to a file, {json} is its name. The limit leaves
    time to compile: a kernel takes up to 5 s in float32, and a first run has dozens of
    them.
    """

    command: str
    seconds: int = 150
    quick: str = ""  # what `--quick` runs instead; without it the part needs a GPU
    shards: int = 1  # processes that share a part's tests: compiling needs processors


def workload(options: str = "", quick: str | None = "", seconds: int = 150) -> Part:
    command = "python bench.py workload --json {json}"
    small = "" if quick is None else f"{command} --requests 4 {TINY} {quick}"
    return Part(f"{command} {options}", seconds, small)


def decode(options: str = "", quick: str = "") -> Part:
    command = "python bench.py decode --json {json}"
    few = f"--batch-sizes 1 2 --tokens 8 --prompt-len 16 {TINY} {quick}"
    return Part(f"{command} {options}", quick=f"{command} {few}")


# What is worth most comes first.
PARTS = {
    "engine-tests": Part("python -m pytest tests/gpu/test_engine.py", 240, shards=4),
    "kernels": Part(
        "python tests/gpu/time_kernels.py --json {json}",
        quick="python tests/gpu/time_kernels.py --json {json} --shape tiny",
    ),
    "workload": workload("--full"),
    "alone-tests": Part("python -m pytest tests/gpu/test_alone.py", 120),
    "kernel-tests": Part("python -m pytest tests/test_kernels.py", 240, shards=6),
    "timeline": Part(
        f"{TIMELINE} --batch-sizes 1 256 --prompt-len 512",
        quick=f"{TIMELINE} --batch-sizes 1 2 --tokens 8 --prompt-len 16 {TINY}",
    ),
    "decode": decode("--batch-sizes 1 8 32 64 128 256 --tokens 128"),
    "memcheck": Part(
        f"{SANITIZER} memcheck python tests/gpu/time_kernels.py --once", 120
    ),
    "racecheck": Part(
        f"{SANITIZER} racecheck python tests/gpu/time_kernels.py --once", 120
    ),
    "transformers": workload(
        "--requests 64 --input-len 100 512 --output-len 32 256 --repeats 1 "
        "--vs transformers --vs-batch 64",
        quick="--vs transformers",
        seconds=180,
    ),
    "workload-no-graphs": workload(f"--full --repeats 1 {EAGER}"),
    "workload-not-ahead": workload("--full --repeats 1 --steps-ahead 0"),
    "workload-flash": workload(f"--full --repeats 1 {FLASH}", quick=None),
    "decode-no-graphs": decode(f"--batch-sizes 1 32 256 {EAGER}", quick=EAGER),
    "decode-not-ahead": decode("--batch-sizes 1 32 256 --steps-ahead 0"),
}


# -- one part --------------------------------------------------------------------------


def run_part(part: Part, command: str, seconds: float) -> dict[str, Any]:
    """Its figures or its tests; `failed` says why it did, `unfinished` why it must go
    on.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            start(part, command, folder, shard) for shard in range(part.shards)
        ]
        try:
            unfinished = wait(processes, began + seconds)
        except KeyboardInterrupt:
            unfinished = "stopped by the user"
        finally:
            stop(processes)
        result = {"command": command, "seconds": round(time.monotonic() - began, 1)}
        result |= read_results(folder)
        text = "".join(
            path.read_text(errors="replace") for path in folder.glob("*.log")
        )

    print(scrubbed(text[-3000:]), flush=True)
    codes = [process.returncode for process in processes]
    if unfinished:
        result["unfinished"] = unfinished
        result["output"] = scrubbed(text[-3000:])
    elif any(
        code not in (0, 5) for code in codes
    ):  # 5: pytest had no test for this shard
        result["failed"] = scrubbed(text[-6000:]) or f"exit status {codes}"
    return result


def start(
    part: Part, command: str, folder: Path, shard: int
) -> subprocess.Popen[bytes]:
    """In a session of its own: a signal reaches what it has started, too."""
    words = shlex.split(command.replace("{json}", str(folder / "figures.json")))
    words = [sys.executable if word == "python" else word for word in words]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if "pytest" in words:
        paths.append(str(HERE))  # where pytest finds the plugin
        words += [
            "-p",
            "report",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            "-W",
            "default",
        ]
        environment["REPORT"] = str(folder / f"tests-{shard}.jsonl")
        environment["REPORT_SHARD"] = f"{shard}/{part.shards}"
    if "time_kernels.py" in command and not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with (folder / f"{shard}.log").open("wb") as log:
        return subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> str:
    """Wait for all of them; returns what was wrong if that took too long."""
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "cut off by its time limit"
    return ""


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs: politely, so that reports are written, and then for sure."""
    for number, grace in ((signal.SIGINT, GRACE_SECONDS), (signal.SIGKILL, 5.0)):
        running = [process for process in processes if process.poll() is None]
        for process in running:
            os.killpg(process.pid, number)
        wait(running, time.monotonic() + grace)


def read_results(folder: Path) -> dict[str, Any]:
    """What the processes of a part left: the figures of a benchmark, or tests'
    outcomes.
    """
    figures = folder / "figures.json"
    if figures.exists():
        return {"figures": json.loads(figures.read_text())}

    outcomes: dict[str, dict[str, Any]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            test = json.loads(line)
            outcomes[test.pop("test")] = test
    if not outcomes:
        return {}
    counts: dict[str, int] = {}
    told = {}
    for name, test in outcomes.items():
        counts[test["outcome"]] = counts.get(test["outcome"], 0) + 1
        if test["outcome"] in ("failed", "started"):
            told[name] = scrubbed(test.get("text", "")[-3000:])
    return {"tests": counts, "failures": told}


def scrubbed(text: str) -> str:
    """Without the places of files on this machine: only their names stay."""
    return re.sub(r"(?<![\w.)])(?:/[\w.@+-]+)+/([\w.@+-]+)", r"\1", text)


# -- all of them -----------------------------------------------------------------------


def command_of(part: Part, quick: bool) -> tuple[str, str]:
    """What to run, or else why not."""
    if quick:
        return part.quick, "" if part.quick else "it needs a CUDA device"
    program = part.command.split()[0]
    if program != "python" and not shutil.which(program):
        return "", f"{program} is not installed"
    if FLASH in part.command and importlib.util.find_spec("flash_attn") is None:
        return "", "flash-attn is not installed"
    return part.command, ""


def read_report(path: Path, quick: bool) -> dict[str, Any]:
    """What FILE has from before, if it is of this machine."""
    report: dict[str, Any] = {"machine": bench.machine(), "quick": quick, "parts": {}}
    if path.exists():
        before = json.loads(path.read_text())
        for key in ("machine", "quick"):
            if before.get(key) != report[key]:
                raise SystemExit(f"{path} is from another {key}: name another file")
        report["parts"] = before["parts"]
    return report


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    ends = time.monotonic() + 60 * args.minutes
    report = read_report(args.json, args.quick)
    parts = report["parts"]
    for name in args.only or PARTS:
        done = name in parts and "unfinished" not in parts[name]
        if done and not args.only:
            continue
        part = PARTS[name]
        command, obstacle = command_of(part, args.quick)
        left = ends - time.monotonic() - GRACE_SECONDS
        if obstacle:
            parts[name] = {"skipped": obstacle}
        elif left < 10:
            parts.setdefault(name, {"unfinished": "the time was over"})
        else:
            print(f"\n== {name}: {command}", flush=True)
            parts[name] = run_part(part, command, min(left, part.seconds))
        write(args.json, report)
        if parts[name].get("unfinished") == "stopped by the user":
            break
    return report


def write(path: Path, report: dict[str, Any]) -> None:
    """In one go: a report that is cut off would be lost."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(path)


def summarize(report: dict[str, Any]) -> None:
    rows = {}
    for name, part in report["parts"].items():
        state = next(
            (key for key in ("failed", "unfinished", "skipped") if key in part), "done"
        )
        tests = part.get("tests", {})
        if state == "done" and tests.get("failed"):
            state = "failed"
        counts = ", ".join(f"{count} {outcome}" for outcome, count in tests.items())
        reason = part.get(state, "").strip().splitlines() if state in part else []
        rows[name] = {
            "seconds": part.get("seconds", ""),
            "state": state,
            "": counts or (reason[-1][:80] if reason else ""),
        }
    bench.show("parts", rows)


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--json", type=Path, metavar="FILE", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("--minutes", type=float, default=7.8)
    args = parser.parse_args(argv)
    if not (torch.cuda.is_available() or args.quick):
        raise SystemExit(
            "this needs a CUDA device; --quick runs tiny shapes without one"
        )

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    report = run_all(args)
    summarize(report)
    parts = report["parts"].values()
    if any("unfinished" in part for part in parts):
        print("\nThe same command goes on where this run stopped.")
        return 2
    return int(any("failed" in part for part in parts))


if __name__ == "__main__":
    sys.exit(main())
