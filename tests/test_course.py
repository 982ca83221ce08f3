"""The course: what its copy leaves out, and what a student gets for which code.

A student's code may end the process, never end, or claim that all tests have passed.
None of that may give points, or take any from another milestone.
"""

import argparse
import ast
import json
import shutil

import pytest

import course
from helpers import ROOT

# Milestones whose tests are quick, and functions of two of them.
BLOCKS, SCHEDULER, SAMPLING = 1, 3, 5
SCHEDULE, DRAW = "scheduler.Scheduler.schedule", "drawing.draw"
FORGED = """
print('51 passed')
import pathlib
for path in pathlib.Path('tests').glob('test_*'):
    path.write_text('def test_nothing(): pass')
return numbers
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """What `make` writes."""
    folder = tmp_path_factory.mktemp("course") / "copy"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(course, "draw_faults", lambda seed: [])  # that takes seconds
        course.make(argparse.Namespace(
            folder=folder, milestone=list(course.MILESTONES), seed=1))
    return folder


@pytest.fixture
def student(copy, tmp_path):
    """A copy that a student may change."""
    return shutil.copytree(copy, tmp_path / "copy")


def solve(student, number):
    """Put our bodies into the functions of a milestone."""
    for function in course.MILESTONES[number][2].split():
        body = ast.Module(course.find(ROOT, function)[1].body[1:], [])
        course.replace_body(student, function, ast.unparse(body))


def scores(student, *numbers):
    report = student.parent / "results.json"
    course.grade(argparse.Namespace(
        folder=student, milestone=numbers, seed=1, json=report))
    return [test["score"] for test in json.loads(report.read_text())["tests"]]


def test_the_copy_has_signatures_and_docstrings_and_the_tests_as_they_are(student):
    functions = {function for row in course.MILESTONES.values()
                 for function in row[2].split()}
    for function in functions:
        path, node = course.find(student, function)
        _, whole = course.find(ROOT, function)
        assert ast.unparse(node.args) == ast.unparse(whole.args)
        assert ast.get_docstring(node) == ast.get_docstring(whole)
        assert list(map(ast.unparse, node.body[1:])) == ["raise NotImplementedError"]
    for path in (student / "tests").glob("test_*.py"):
        assert path.read_bytes() == (ROOT / "tests" / path.name).read_bytes()
    assert not list(student.rglob("*.patch")) and not list(student.rglob("course.py"))
    for number in course.MILESTONES:
        solve(student, number)
    for path in (ROOT / "nanopaged").glob("*.py"):
        code = (student / "nanopaged" / path.name).read_text("utf-8")
        assert ast.unparse(ast.parse(code)) == ast.unparse(ast.parse(path.read_bytes()))


@pytest.mark.slow
def test_each_milestone_is_graded_alone(student):
    solve(student, SAMPLING)
    course.replace_body(student, SCHEDULE, "import os; os._exit(0)")
    (student / "nanopaged/block_manager.py").write_text("def")
    assert scores(student, BLOCKS, SCHEDULER, SAMPLING) == [0, 0, 10]


@pytest.mark.slow
@pytest.mark.parametrize("code", [
    "import sys; sys.exit(0)", "while True: pass", FORGED], ids=["exit", "loop", "lie"])
def test_hostile_code_gets_nothing(code, student, monkeypatch):
    monkeypatch.setattr(course, "SECONDS", 30)
    solve(student, SAMPLING)
    course.replace_body(student, DRAW, code)
    (score,) = scores(student, SAMPLING)
    assert score < 4  # a few tests do without this function
