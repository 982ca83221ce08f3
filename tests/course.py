"""A course made of this engine: a copy with holes for students, and its grader.

    python tests/course.py make DIR [--milestone N ..] [--seed S]
    python tests/course.py grade DIR [--milestone N ..] [--seed S] [--json FILE]

`make` writes a copy of the project in which the functions of the milestones have only
their docstrings. `grade` takes from such a copy only the bodies of these functions. It
puts those of one milestone at a time into the whole engine, so that a mistake costs
only its own milestone, and runs the milestone's tests there.

`COURSE.md` is the teacher's page. What follows its line "<!-- README -->" becomes the
README of the copy. That has the table of all milestones, which is read here, too.
"""

import argparse
import ast
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from textwrap import indent
from xml.etree import ElementTree

from tqdm import tqdm

import mutants

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "tests/COURSE.md").read_text("utf-8").partition("<!-- README -->\n")[2]
# {number: [name, points, functions, tests]}, from the table
ROWS = [line.strip("| ").replace("`", "").split(" | ") for line in README.splitlines()]
MILESTONES = {int(row[0]): row[1:] for row in ROWS if row[0].isdigit()}
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "solutions", "*extensions*",
                                 "*course*", "COURSE.md", "build.md")
SECONDS = 120  # a process that runs for longer is killed

BENCH = "bench.py decode --shape tiny --batch-sizes 8 --prompt-len 1500 --json out.json"
# Hypothesis draws the same examples each time, and does not look for smaller ones.
PYTEST = """
import pytest, sys
from hypothesis import Phase, settings
settings.register_profile("course", derandomize=True, phases=[Phase.generate])
settings.load_profile("course")
sys.exit(pytest.main(["-Wignore", "--junitxml=../report.xml", *sys.argv[2:]]))
"""


def find(folder, function):
    """The path of a function's file, and its syntax tree."""
    file, *names = function.split(".")
    path = folder / "nanopaged" / f"{file}.py"
    node = ast.parse(path.read_text("utf-8"))
    for name in names:
        (node,) = (each for each in node.body if getattr(each, "name", "") == name)
    return path, node


def replace_body(folder, function, code):
    """Put this code below the docstring of a function, in place of its own."""
    path, node = find(folder, function)
    lines, doc = path.read_text("utf-8").splitlines(), node.body[0]
    lines[doc.end_lineno : node.end_lineno] = [indent(code, " " * doc.col_offset)]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def draw_faults(seed):
    """Three ways to break the engine, in files in which students write nothing."""
    faults = [fault for fault in mutants.faults(None)
              if fault[0] in ("detokenizer.py", "model.py", "sequence.py")]
    return random.Random(seed).sample(faults, 3)


# -- Running code that may do anything -------------------------------------------------


def run(folder, *arguments):
    """Run Python in a folder, and kill all processes that it leaves behind. Returns
    its exit status, which is negative if it took too long.
    """
    env = os.environ | dict.fromkeys(  # a new folder, so that nothing in it is stale
        ("NUMBA_CACHE_DIR", "PYTHONPYCACHEPREFIX"), tempfile.mkdtemp(dir=folder))
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    with subprocess.Popen([sys.executable, *arguments], cwd=folder, env=env,
                          start_new_session=True, **streams) as process:
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS)
        with suppress(OSError):  # if none is left
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode


def run_tests(folder, tests):
    """The share of the tests that pass, and what the others say."""
    report = folder.parent / "report.xml"
    if run(folder, "-c", PYTEST, *shlex.split(tests)) not in (0, 1):
        return 0, f"The tests did not run to their end within {SECONDS} seconds."
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = {case.get("name"): child.get("message") for case in cases
              for child in case if child.tag in ("failure", "error", "skipped")}
    share = 1 - len(failed) / len({case.get("name") for case in cases})
    return share, "\n".join(map(": ".join, failed.items()))


def run_bench(folder):
    """Tokens per second, decoding after long prompts; 0 if that fails."""
    if run(folder, *BENCH.split()) != 0:
        return 0
    figures = json.loads((folder / "out.json").read_text("utf-8"))
    return max(figures["decode"]["nanopaged"]["decode, batch 8"]["runs"])


# -- What a student gets ---------------------------------------------------------------


def share_of_functions(args, folder, name, functions, tests):
    """The share of the points for a milestone's functions, and why it is not all."""
    ours = run_bench(folder) if name == "speed" else None
    for function in functions.split():
        body = ast.Module(find(args.folder, function)[1].body, [])
        replace_body(folder, function, ast.unparse(body))
    share, output = run_tests(folder, tests)
    if ours and share == 1:
        ratio = run_bench(folder) / ours
        return min(1, ratio / 0.5), f"{ratio:.2f} times the speed of our kernel"
    return (0 if ours else share), output  # what is wrong cannot be fast


def share_of_faults(args, folder, name, functions, tests):
    """For a test that passes on the whole engine: how many broken ones it fails on."""
    answer = tests.split()[1]
    if not (args.folder / answer).exists():
        return 0, f"There is no {answer} yet."
    for path in folder.glob("tests/test_*.py"):
        path.unlink()  # the student's test may use the fixtures, but not our tests
    shutil.copy(args.folder / answer, folder / answer)
    share, output = run_tests(folder, tests)
    if share < 1:
        return 0, f"It fails on the whole engine. {output}"
    caught = []
    for file, *_, broken in draw_faults(args.seed):
        (folder / "nanopaged" / file).write_text(broken, "utf-8")
        caught.append(run_tests(folder, tests)[0] < 1)
        shutil.copy(ROOT / "nanopaged" / file, folder / "nanopaged")
    return sum(caught) / len(caught), f"broken engines on which it fails: {caught}"


# -- The two commands ------------------------------------------------------------------


def make(args):
    print("Breaking the engine in three ways takes about half a minute ...", flush=True)
    shutil.copytree(ROOT, args.folder, ignore=IGNORED)
    (args.folder / "README.md").write_text(README, "utf-8")
    for number in args.milestone:
        for function in MILESTONES[number][2].split():
            replace_body(args.folder, function, "raise NotImplementedError")
    for number, (file, *_, broken) in enumerate(draw_faults(args.seed), 1):
        (args.folder / f"broken_{number}_{file}").write_text(broken, "utf-8")
    print(f"The course is in {args.folder}. Its README.md has the milestones.")


def grade(args):
    results = []
    for number in tqdm(args.milestone, "milestones", leave=False, disable=None):
        name, points, functions, tests = MILESTONES[number]
        share_of = share_of_functions if functions else share_of_faults
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as outside:
            folder = shutil.copytree(ROOT, Path(outside, "project"), ignore=IGNORED)
            try:
                share, output = share_of(args, folder, name, functions, tests)
            except Exception as error:  # a file is missing, or is not Python
                share, output = 0, f"{type(error).__name__}: {error}"
        results.append({
            "name": f"{number} {name}", "score": round(share * int(points), 1),
            "max_score": int(points), "output": output})
        print("{name:18} {score:5} / {max_score}\n{output:.300}".format(**results[-1]))
    args.json.write_text(json.dumps({"tests": results}, indent=1), "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("command", choices=["make", "grade"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--milestone", type=int, choices=MILESTONES, nargs="+",
                        default=list(MILESTONES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path(os.devnull))
    args = parser.parse_args()
    make(args) if args.command == "make" else grade(args)
