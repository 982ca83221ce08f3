"""Four extensions of the engine, as somebody who forks it would write them.

Each is a patch in solutions/, and a script in solutions/checks/ shows that it works.
So a change of the engine that makes one of them impossible is noticed here. A patch
that no longer applies has to be made anew.
"""

import ast
import io
import json
import runpy
import shutil
import tokenize
from difflib import SequenceMatcher

import pytest

from helpers import ROOT, SOLUTIONS, apply_patch, run_python

# How many lines of code each may add, and in how many files.
SIZES = {
    "priorities": (15, 3), "speculation": (45, 7), "int8_kv": (35, 4),
    "sliding_window": (45, 7)}


@pytest.fixture
def extended(tmp_path):
    """`extended(name)`: a folder with a copy of the package that has this extension."""

    def make(name):
        ignored = shutil.ignore_patterns("tour")
        shutil.copytree(ROOT / "nanopaged", tmp_path / "nanopaged", ignore=ignored)
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


def code_lines(path):
    """The lines of a file without blank ones, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    numbers = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING):
            numbers |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            numbers -= set(range(node.lineno, node.end_lineno + 1))
    lines = text.splitlines()
    return [lines[number - 1].partition("  #")[0] for number in sorted(numbers)]


def count_added(old, new):
    opcodes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return sum(end - first for kind, *_, first, end in opcodes if kind != "equal")


@pytest.mark.parametrize("name", SIZES)
def test_it_takes_few_lines_in_few_files(extended, name):
    folder = extended(name)
    added = [count_added(code_lines(path), code_lines(folder / "nanopaged" / path.name))
             for path in (ROOT / "nanopaged").glob("*.py")]
    most_lines, most_files = SIZES[name]
    assert 0 < sum(added) <= most_lines
    assert sum(map(bool, added)) <= most_files


@pytest.mark.parametrize("name", SIZES)
def test_every_patch_has_a_check(name):
    assert (SOLUTIONS / "checks" / f"{name}.py").is_file()


def test_priorities_decide_who_comes_first_and_who_gives_way(extended):
    assert "nobody starves" in check(extended("priorities"), "priorities", 8)


def test_speculation_gives_the_same_tokens_in_fewer_steps(extended):
    check_speculation(extended, 24)


def test_k_and_v_in_int8_are_exact_enough_and_take_half_the_memory(extended):
    assert "lost no token" in check(extended("int8_kv"), "int8_kv", 5)


def test_with_a_sliding_window_tokens_are_transformers_and_blocks_few(extended):
    check(extended("sliding_window"), "sliding_window", 5)


def check_speculation(extended, num_runs):
    """The answers to expect are those of the engine as it is, without the patch."""
    script = SOLUTIONS / "checks" / "speculation.py"
    answers = runpy.run_path(str(script))["plain_answers"](num_runs)
    folder = extended("speculation")
    (folder / "answers.json").write_text(json.dumps(answers))
    said = check(folder, "speculation", num_runs, '"answers.json"')
    assert f"the same tokens in {num_runs} random runs" in said


@pytest.mark.slow
def test_speculation_in_many_random_runs(extended):
    check_speculation(extended, 500)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["priorities", "int8_kv", "sliding_window"])
def test_many_random_runs(extended, name):
    check(extended(name), name, 60)
