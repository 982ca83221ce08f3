"""A course made of this engine: a copy with holes for students, and its grader.

    python tests/course/course.py make DIR [--milestone N ..] [--seed S]
    python tests/course/course.py grade DIR [--milestone N ..] [--seed S] [--json FILE]
    python tests/course/course.py pack FILE.zip [--milestone N ..] [--seed S]
    python tests/course/course.py notebook DIR/starter.ipynb [--milestone N ..]
    python tests/course/course.py slides FILE.html

`make` writes a copy of the project in which the functions of the milestones have only
their docstrings. `grade` takes from such a copy only the bodies of these functions. It
puts those of one milestone at a time into the whole engine, so that a mistake costs
only its own milestone, and runs the milestone's tests there. `pack` writes an
autograder for Gradescope, which grades in the same way. `notebook` puts a notebook into
a copy, in which the functions are written and tested. `slides` writes slides.

`COURSE.md` is the teacher's page. What follows its line "<!-- README -->" becomes the
README of the copy. That has the table of all milestones, which is read here, too.
"""

import argparse
import ast
import inspect
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from textwrap import dedent, indent
from unittest import mock
from xml.etree import ElementTree

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("COURSE.md").read_text("utf-8")
README = PAGE.partition("<!-- README -->\n")[2]
# {number: [name, points, functions, tests]}, from the table
ROWS = [line.strip("| ").replace("`", "").split(" | ") for line in README.splitlines()]
MILESTONES = {int(row[0]): row[1:] for row in ROWS if row[0].isdigit()}
FIRST = [0, 4, 5]  # they depend on nothing else, so a notebook begins with them
NO_PROJECT = (".*", "__pycache__", "nanopaged-tour")
NOT_FOR_STUDENTS = (*NO_PROJECT, "solutions", "hidden", "course", "chapters")
# The smallest engine is milestone 0, and has answers to others.
SMALLEST = ("smallest.py", "test_smallest.py")
COMPILED = "nanopaged/cpu/__pycache__"
# Whoever writes the function on the left finds the same algorithm in these.
ALSO_EMPTIED = {"paged_attention.run_program": [
    "tour.guide.blockwise.attend", "gpu.kernels.paged_attention",
    "gpu.kernels.merge_parts"]}

# A process is killed after so much work, however long a busy machine takes for it. One
# that waits does no work, so there is a limit to its patience, too.
CPU_SECONDS, SECONDS = 300, 1800

# Hypothesis draws the same examples each time, and does not look for smaller ones.
PYTEST = """
import pytest, resource, sys
from hypothesis import Phase, settings
resource.setrlimit(resource.RLIMIT_CPU, 2 * [int(sys.argv[1])])
settings.register_profile("course", derandomize=True, phases=[Phase.generate])
settings.load_profile("course")
sys.exit(pytest.main(["-Wignore", "--junitxml=../report.xml", *sys.argv[3:]]))
"""

# Ways to break the engine, in files in which students write nothing: file, old text and
# new text. All of them load and run a model.
STOPS, SEQUENCE = "frontend/detokenizer.py", "sequence.py"
FAULTS = {
    "a_stop_string_in_two_tokens": (STOPS, "- len(stop) + 1)", ")"),
    "a_stop_string_at_the_start": (STOPS, "if at >= 0:", "if at > 0:"),
    "streamed_text_stays": (STOPS, "0 if final else", "0 if self.text else"),
    "half_characters_wait": (STOPS, '"replace", final)', '"replace", True)'),
    "a_stop_token_has_no_text": (
        "frontend/outputs.py", "seq.token_ids[:-1] if seq.ended_by_token else ", ""),
    "a_stop_at_the_last_token": (
        SEQUENCE, "if self.ended_by_token:",
        "if self.ended_by_token and len(self.token_ids) < self.group.max_len:"),
    "min_tokens": (SEQUENCE, "self.num_prompt_tokens + params.min_tokens",
                   "params.min_tokens"),
    "cumulative_logprob": (SEQUENCE, "self.cumulative_logprob += logprobs",
                           "self.cumulative_logprob = logprobs"),
    "logits": ("model.py", "residual, next_norm.weight", "residual, norm.weight"),
    "copy_on_write": ("model_runner.py", "in batch.moves:", "in batch.moves[1:]:"),
    "seeds": ("engine.py", 'f"{self.config.seed} {group.request_id}"',
              'f"{self.config.seed}"'),
    "stop_reason": ("frontend/outputs.py", "seq.token_ids[-1] != self.eos_token_id",
                    "False"),
    "order_of_outputs": ("frontend/llm.py",
                         "sorted(bar, key=lambda output: int(output.request_id))",
                         "list(bar)"),
    "cache_salt": ("frontend/prompts.py", "cache_salt=cache_salt)", 'cache_salt="")'),
}


def copy_project(folder, milestones):
    """Copy what students get for these milestones, still with all functions."""
    names = NOT_FOR_STUDENTS if 0 in milestones else NOT_FOR_STUDENTS + SMALLEST
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*names))
    shutil.rmtree(folder / "tests/tour")
    return folder


def find(folder, function):
    """The path of a function's file, and its syntax tree."""
    names = function.split(".")
    path = folder / "nanopaged"
    while path.is_dir():
        path /= names.pop(0)
        path = path if path.is_dir() else path.with_suffix(".py")
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


def break_file(name):
    """A file of the engine, and its text with this fault."""
    file, old, new = FAULTS[name]
    whole = (ROOT / "nanopaged" / file).read_text("utf-8")
    assert whole.count(old) == 1, f"{name}: {old!r} is not in {file} exactly once"
    return file, whole.replace(old, new)


def draw_faults(seed):
    return random.Random(seed).sample(sorted(FAULTS), 3)


# -- Running code that may do anything -------------------------------------------------


def run_pytest(folder, tests):
    """Run tests in a folder, and kill all processes that they leave behind. Returns
    the exit status, which is negative if it took too long.
    """
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    command = [sys.executable, "-c", PYTEST, str(CPU_SECONDS), *shlex.split(tests)]
    with subprocess.Popen(command, cwd=folder, env=env, start_new_session=True,
                          **streams) as process:
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS)
        with suppress(OSError):  # if none is left
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode


def run_tests(folder, tests):
    """The share of the tests that pass, and what the others say."""
    report = folder.parent / "report.xml"
    if run_pytest(folder, tests) not in (0, 1):
        return 0, f"The tests did not end within {CPU_SECONDS} seconds of a processor."
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = {case.get("name"): child.get("message") for case in cases
              for child in case if child.tag in ("failure", "error", "skipped")}
    share = 1 - len(failed) / len({case.get("name") for case in cases})
    return share, "\n".join(map(": ".join, failed.items()))


# -- What a student gets ---------------------------------------------------------------


def share_of_functions(args, folder, number, functions, tests):
    """The share of the points for a milestone's functions, and why it is not all."""
    for function in functions.split():
        body = ast.Module(find(args.folder, function)[1].body, [])
        replace_body(folder, function, ast.unparse(body))
    share, output = run_tests(folder, tests)
    hidden = ROOT / f"tests/hidden/test_{number}.py"
    if hidden.exists():
        shutil.copy(hidden, folder / "tests/test_hidden.py")
        hidden_share, _ = run_tests(folder, "pytest tests/test_hidden.py")
        share = (share + hidden_share) / 2
        output += f"\n{hidden_share:.0%} of the hidden tests pass."
    return share, output


def share_of_faults(args, folder, number, functions, tests):
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
    for file, broken in map(break_file, draw_faults(args.seed)):
        (folder / "nanopaged" / file).write_text(broken, "utf-8")
        caught.append(run_tests(folder, tests)[0] < 1)
        shutil.copy(ROOT / "nanopaged" / file, folder / "nanopaged" / file)
    return sum(caught) / len(caught), f"broken engines on which it fails: {caught}"


# -- The tour of the copy --------------------------------------------------------------

# It cannot be made without the functions, so the copy has the page, made before.
GUIDE = '''"""The guided tour: a page that was written while the engine was whole."""

import shutil
from pathlib import Path


def write(directory, progress=None):
    page = Path(__file__).with_name("index.html")
    return Path(shutil.copy(page, directory)).resolve()
'''


def write_tour(copy):
    """Write the tour's page. It runs the whole engine, and shows the copy's source."""
    from nanopaged.tour import guide, source
    from nanopaged.tour.guide import markdown

    getsource = source.inspect.getsource

    def source_of_copy(found):
        _, is_ours, module = getattr(found, "__module__", "").partition("nanopaged.")
        if not is_ours:  # transformers looks at its own code when it loads a model
            return getsource(found)
        path, node = find(copy, f"{module}.{found.__qualname__}")
        lines = path.read_text("utf-8").splitlines(keepends=True)
        return "".join(lines[node.lineno - 1 : node.end_lineno])

    def part_or_all(symbol, first, last):
        if symbol.endswith(".py") and first not in (
                copy / "nanopaged" / symbol).read_text("utf-8"):
            return "(Some lines are missing here: they are for you to write.)"
        try:
            return part(symbol, first, last)
        except ValueError:  # these lines are for the student to write
            return markdown.source(symbol)

    part, folder = markdown.part, copy / "nanopaged/tour/guide"
    chapters = [each for each in guide.CHAPTERS if each.name != "build"]
    with (mock.patch.object(source.inspect, "getsource", source_of_copy),
          mock.patch.object(markdown, "part", part_or_all),
          mock.patch.object(guide, "CHAPTERS", chapters)):
        guide.write(folder)
    (folder / "__init__.py").write_text(GUIDE, "utf-8")


# -- The commands ----------------------------------------------------------------------


def make(args):
    copy_project(args.folder, args.milestone)
    (args.folder / "README.md").write_text(readme_of(args.milestone), "utf-8")
    for number in args.milestone:
        for function in MILESTONES[number][2].split():
            for each in [function, *ALSO_EMPTIED.get(function, [])]:
                replace_body(args.folder, each, "raise NotImplementedError")
    for number, name in enumerate(draw_faults(args.seed) * (8 in args.milestone), 1):
        file, broken = break_file(name)
        path = args.folder / f"broken_{number}_{Path(file).name}"
        path.write_text(broken, "utf-8")
    print("Writing the tour takes up to a minute ...", flush=True)
    write_tour(args.folder)
    print(f"The course is in {args.folder}. Its README.md has the milestones.")


def readme_of(milestones):
    """The README of a copy, which lists only its own milestones."""
    text = README
    for number in MILESTONES.keys() - {*milestones}:
        text = re.sub(rf"(?m)^\| {number} \|.*\n", "", text)
        text = text.replace(section(number), "")
    return text


def section(number):
    """What the README says about a milestone."""
    return re.search(rf"(?ms)^## {number}\. .*?(?=^## |\Z)", README)[0]


def grade(args):
    results = []
    for number in tqdm(args.milestone, "milestones", leave=False, disable=None):
        name, points, functions, tests = MILESTONES[number]
        share_of = share_of_functions if functions else share_of_faults
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as outside:
            folder = copy_project(Path(outside, "project"), [number])
            with suppress(OSError):  # what is compiled, so that each student waits less
                shutil.copytree(ROOT / COMPILED, folder / COMPILED)
            try:
                share, output = share_of(args, folder, number, functions, tests)
            except Exception as error:  # a file is missing, or is not Python
                share, output = 0, f"{type(error).__name__}: {error}"
        results.append({
            "name": f"{number} {name}", "score": round(share * int(points), 1),
            "max_score": int(points), "output": output})
        print("{name:18} {score:5} / {max_score}\n{output:.300}".format(**results[-1]))
    args.json.write_text(json.dumps({"tests": results}, indent=1), "utf-8")


SET_UP = """\
#!/usr/bin/env bash
# Gradescope runs this once, when it builds the machine. Others can do the same.
set -e
apt-get update && apt-get install -y python3-venv
python3 -m venv /autograder/venv
cd /autograder/source/project
pip() { /autograder/venv/bin/pip install "$@"; }
pip torch --index-url https://download.pytorch.org/whl/cpu
pip -e ".[test]"
"""
RUN = """\
#!/usr/bin/env bash
# Gradescope runs this for each submission.
cd /autograder/source/project
/autograder/venv/bin/python tests/course/course.py grade /autograder/submission \\
    --json /autograder/results/results.json {}
"""


def pack(args):
    """A ZIP file with this project, and the two scripts that Gradescope looks for."""
    milestones = " ".join(map(str, args.milestone))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT, Path(folder, "project"),
                        ignore=shutil.ignore_patterns(*NO_PROJECT))
        options = f"--seed {args.seed} --milestone {milestones}"
        for name, text in ("setup.sh", SET_UP), ("run_autograder", RUN.format(options)):
            Path(folder, name).write_text(text, "utf-8")
            Path(folder, name).chmod(0o755)
        shutil.make_archive(str(args.folder.with_suffix("")), "zip", folder)


# -- The notebook ----------------------------------------------------------------------


def write(function, cell):
    """Put the body of the function in this cell into the copy around the notebook."""
    (node,) = ast.parse(cell).body
    body = node.body[ast.get_docstring(node) is not None :]
    replace_body(Path.cwd(), function, ast.unparse(ast.Module(body, [])))


def check(tests):
    """Run tests in the copy, until three have failed."""
    command = [sys.executable, "-m", *shlex.split(tests), "--maxfail=3", "--tb=short"]
    print(subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout)


IMPORTS = ("import ast, shlex, subprocess, sys\n"
           "from pathlib import Path\nfrom textwrap import indent\n")
REGISTER = 'get_ipython().register_magic_function(write, "cell")'


def notebook(args):
    """Write a notebook into a copy, with its empty functions."""
    parts = map(inspect.getsource, (find, replace_body, write, check))
    opening = Path(__file__).with_name("notebook.md").read_text("utf-8")
    cells = [cell("markdown", opening),
             cell("code", "\n\n".join([IMPORTS, *parts, REGISTER]))]
    written = []  # milestone 7 goes on with the code of 4
    for number in args.milestone:
        _, _, functions, tests = MILESTONES[number]
        new = [each for each in functions.split() if each not in written]
        written += new
        cells += [cell("markdown", section(number)),
                  *(empty_function(args.folder.parent, each) for each in new),
                  cell("code", f"check({tests!r})")]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    whole = dict(nbformat=4, nbformat_minor=4, metadata=metadata, cells=cells)
    args.folder.write_text(json.dumps(whole, indent=1), "utf-8")


def cell(kind, text):
    """A cell of a notebook, in version 4.4 of its format."""
    results = {"execution_count": None, "outputs": []} if kind == "code" else {}
    source = text.strip().splitlines(keepends=True)
    return {"cell_type": kind, "metadata": {}, "source": source, **results}


def empty_function(copy, function):
    """A cell with a function that `make` has emptied."""
    try:
        path, node = find(copy, function)
    except FileNotFoundError as error:
        sys.exit(f"{error.filename} is not there: name the milestones of your `make`.")
    lines = path.read_text("utf-8").splitlines()[node.lineno - 1 : node.end_lineno]
    if lines[-1].strip() != "raise NotImplementedError":
        sys.exit(f"{copy} is no fresh copy: {function} has a body. Begin with `make`.")
    return cell("code", f"%%write {function}\n" + dedent("\n".join(lines)))


def slides(args):
    """Write the slides. They run the whole engine, so this imports it."""
    import slides

    slides.write(args.folder)


COMMANDS = {"make": make, "grade": grade, "pack": pack, "notebook": notebook,
            "slides": slides}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--milestone", type=int, choices=MILESTONES, nargs="+")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path(os.devnull))
    args = parser.parse_args()
    if args.milestone is None:
        args.milestone = FIRST if args.command == "notebook" else list(MILESTONES)
    COMMANDS[args.command](args)
