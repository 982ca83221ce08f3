"""Four extensions of the engine, as somebody who forks it would write them.

Each is a patch in solutions/, and a script in solutions/checks/ shows that it works.
So a change of the engine that makes one of them impossible is noticed here. A patch
that no longer applies has to be made anew.
"""

import json
import runpy
from difflib import SequenceMatcher

import pytest

from helpers import ROOT, SOLUTIONS, apply_patch, code_lines, copy_package, run_python

# How many lines of code each may add, and in how many files.
SIZES = {
    "priorities": (15, 3), "speculation": (45, 7), "int8_kv": (35, 4),
    "sliding_window": (30, 5)}


@pytest.fixture
def extended(tmp_path):
    """`extended(name)`: a folder with a copy of the package that has this extension."""

    def make(name):
        copy_package(tmp_path)
        apply_patch(name, tmp_path)
        return tmp_path

    return make


def check(folder, name, *arguments):
    """Run the script of an extension; returns what it says about itself."""
    script = SOLUTIONS / "checks" / f"{name}.py"
    said = run_python(script, *map(str, arguments), cwd=folder,
                      PYTHONPATH=str(folder), OMP_NUM_THREADS="1")
    print(said)
    assert len(said.splitlines()) == 1
    return said


def lines_of_code(path):
    """Their text, without comments."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    numbers = sorted(code_lines(text))
    return [lines[number - 1].partition("  #")[0] for number in numbers]


def count_added(old, new):
    opcodes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return sum(end - first for kind, *_, first, end in opcodes if kind != "equal")


@pytest.mark.parametrize("name", SIZES)
def test_it_takes_few_lines_in_few_files(extended, name):
    folder = extended(name)
    new = folder / "nanopaged"
    added = [count_added(lines_of_code(path), lines_of_code(new / path.name))
             for path in (ROOT / "nanopaged").glob("*.py")]
    most_lines, most_files = SIZES[name]
    assert 0 < sum(added) <= most_lines
    assert sum(map(bool, added)) <= most_files


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 250])
def test_speculation_gives_the_same_tokens_in_fewer_steps(extended, first):
    """The answers to expect are those of the engine as it is, without the patch."""
    script = SOLUTIONS / "checks" / "speculation.py"
    answers = runpy.run_path(str(script))["plain_answers"](250, first)
    folder = extended("speculation")
    (folder / "answers.json").write_text(json.dumps(answers))
    said = check(folder, "speculation", 250, first, '"answers.json"')
    assert "the same tokens in 250 random runs" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["priorities", "int8_kv", "sliding_window"])
def test_many_random_runs(extended, name):
    check(extended(name), name, 60)
