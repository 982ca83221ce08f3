"""One command runs everything that needs a GPU; nothing need be installed but packages.

    python tests/gpu/run.py                    # writes gpu.json
    python tests/gpu/run.py --quick            # tiny, also on a CPU

Each part (parts.py) is a process of its own with a time limit, and writes its figures
after each task. If a part fails or takes too long, the report says so, and the other
parts still run. The report names the machine and versions, and contains no directory's
name. README.md has two calls for a GPU that is lent for minutes.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Seconds that each part may take; what one leaves over goes to those that follow. With
# one GPU `ranks` does nothing, so it comes first.
PARTS = {"ranks": 60, "tokens": 160, "same": 140, "workload": 80, "step": 90}
SCRIPT = Path(__file__).with_name("parts.py")
DIRECTORY = re.compile(r"""(?<![\w.:/])/(?:[^\s/"'\\]+/)+""")


def why_no_gpu():
    """What torch says if it cannot use a GPU; an empty string if it can."""
    words = [sys.executable, "-c", "import torch; torch.cuda.init()"]
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=150)
    except subprocess.TimeoutExpired:  # a cold disk takes a minute
        return "torch.cuda.init() takes more than 150 seconds"
    return result.stderr.strip().rpartition("\n")[2] if result.returncode else ""


def run_part(name, seconds, quick, file):
    """Its tasks, and its state: "complete", "failed" or "out of time". So far they are
    in `file`, which is left if this process is killed, too.
    """
    command = [sys.executable, str(SCRIPT), name, str(file), *["--quick"] * quick]
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)),
                        "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        # In a session of its own: a signal reaches what it has started, too.
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=ROOT,
                                   start_new_session=True)
        state = "failed"
        try:
            if process.wait(max(0, seconds)) == 0:
                state = "complete"
        except subprocess.TimeoutExpired:
            state = "out of time"
        finally:
            # torchrun ends its ranks, which are in sessions of their own, if it may.
            for number, grace in ((signal.SIGTERM, 5), (signal.SIGKILL, 1)):
                with suppress(ProcessLookupError):  # nothing of it is left
                    os.killpg(process.pid, number)
                    time.sleep(0 if process.poll() is not None else grace)
            process.wait()
        log.seek(0)
        output = DIRECTORY.sub("", log.read()[-3000:])
    tasks = file.read_text() if file.exists() else "{}"
    file.unlink(missing_ok=True)
    result = {"state": state, "seconds": round(time.monotonic() - began, 1),
              "tasks": json.loads(DIRECTORY.sub("", tasks))}
    return result if state == "complete" else result | {"output": output}


def write(path, report):
    """In one go: a report that is cut off would be lost."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(path)


def show(name, part):
    """Its state and figures, in short lines."""
    tasks = json.loads(json.dumps(part["tasks"]),
                       parse_float=lambda digits: float(f"{float(digits):.4g}"))
    machine = tasks.pop("machine", {})
    print(f"== {name}: {part['state']}, {part['seconds']} s; "
          f"{machine.get('gpu')}, commit {machine.get('commit')}")
    for task, found in tasks.items():
        told = {key: value for key, value in found.items() if key != "lines"}
        told = found.get("failed", json.dumps(told)[:800]).strip()[-800:]
        lines = f"{task}: {told}", *found.get("lines", [])[:10]
        print("\n    ".join(lines), flush=True)
    if part["state"] != "complete":
        print("\n".join(part.get("output", "").splitlines()[-4:]), flush=True)


def main(argv=None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--parts", default=",".join(PARTS), help=", ".join(PARTS))
    parser.add_argument("--json", type=Path, metavar="FILE", default="gpu.json")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, help="for all parts")
    args = parser.parse_args(argv)
    names, file = args.parts.split(","), args.json.absolute()
    if unknown := set(names) - PARTS.keys():
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    ends = time.monotonic() + (args.seconds or sum(map(PARTS.get, names)))
    if not args.quick and (reason := why_no_gpu()):
        parser.error(f"torch cannot use a GPU: {reason} (--quick needs none)")

    not_run = {"state": "not run", "seconds": 0, "tasks": {}}
    report = {"quick": args.quick, "parts": dict.fromkeys(names, not_run)}
    for i, name in enumerate(names):
        # If a part hangs, it takes at most its share of what is left.
        left = (ends - time.monotonic()) * PARTS[name] / sum(map(PARTS.get, names[i:]))
        write(file, report)
        part = run_part(name, left, args.quick, file.with_suffix(f".{name}"))
        report["parts"][name] = part
        show(name, part)
    write(file, report)
    return int(any(part["state"] != "complete" for part in report["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
