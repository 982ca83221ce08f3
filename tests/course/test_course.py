"""The course: what its copy leaves out, and what a student gets for which code.

A student's code may end the process, never end, or claim that all tests have passed.
None of that may give points, or take any from another milestone. And whatever else the
machine does, the same code gets the same points.
"""

import argparse
import ast
import html
import json
import re
import shlex
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import course
from helpers import ROOT

# Milestones whose tests are quick, and functions of some of them.
SMALLEST, BLOCKS, SCHEDULER, TRAFFIC, BROKEN = 0, 1, 3, 7, 8
MATCH = "smallest.BlockManager.match"
SCHEDULE, KERNEL = "scheduler.Scheduler.schedule", "paged_attention.run_program"
FORGED = """
print('51 passed')
import pathlib
for path in pathlib.Path('tests').glob('test_*'):
    path.write_text('def test_nothing(): pass')
return
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """What `make` writes."""
    folder = tmp_path_factory.mktemp("course") / "copy"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(course, "write_tour", lambda copy: None)  # that takes a minute
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


def emptied():
    """All functions without bodies in the copy."""
    listed = {name for row in course.MILESTONES.values() for name in row[2].split()}
    return listed.union(*course.ALSO_EMPTIED.values())


@pytest.fixture
def quick(warm, monkeypatch):
    """Tests run in forks of a process that has imported torch."""
    monkeypatch.setattr(course, "run_pytest", lambda folder, tests: warm(
        "-c", course.PYTEST, course.CPU_SECONDS, *shlex.split(tests), cwd=folder)[0])


def scores(student, *numbers, seed=1):
    report = student.parent / "results.json"
    course.grade(argparse.Namespace(
        folder=student, milestone=numbers, seed=seed, json=report))
    return [test["score"] for test in json.loads(report.read_text())["tests"]]


def test_the_copy_has_signatures_and_docstrings_and_the_tests_as_they_are(student):
    for function in emptied():
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
    for path in (student / "nanopaged").glob("*.py"):
        code, path = path.read_text("utf-8"), ROOT / "nanopaged" / path.name
        assert ast.unparse(ast.parse(code)) == ast.unparse(ast.parse(path.read_bytes()))


def assert_no_answers(folder):
    """One line of a function may be quoted, but not two."""
    texts = {file: file.read_text("utf-8", errors="replace")
             for file in folder.rglob("*.*")
             if file.is_file() and file.suffix != ".safetensors"}
    for file in folder.rglob("*.html"):
        texts[file] = html.unescape(re.sub("<[^>]+>", "", texts[file]))
    for function in emptied():
        path, node = course.find(ROOT, function)
        code = path.read_text("utf-8").splitlines()
        lines = map(str.strip, code[node.body[0].end_lineno : node.end_lineno])
        lines = {line for line in lines if len(line) >= 30}
        for file, text in texts.items():
            quoted = [line for line in lines if line in text]
            assert len(quoted) < 2, f"{file}: {quoted} of {function}"


def test_the_copy_has_no_answers(copy):
    assert_no_answers(copy)


def test_only_the_first_milestone_comes_with_the_smallest_engine(tmp_path):
    """It has answers to the others."""
    for number in course.MILESTONES:
        folder = course.copy_project(tmp_path / str(number), [number])
        found = {path.name for path in folder.rglob("*smallest.py")}
        assert found == (set() if number else {"smallest.py", "test_smallest.py"})


@pytest.mark.parametrize("name", course.FAULTS)
def test_a_broken_engine_differs_in_one_line_of_a_file_that_students_leave(name):
    file, broken = course.break_file(name)
    whole = (ROOT / "nanopaged" / file).read_text("utf-8").splitlines()
    changed = [pair for pair in zip(whole, broken.splitlines(), strict=True)
               if pair[0] != pair[1]]
    assert len(changed) == 1
    ast.parse(broken)
    assert file not in {f"{name.split('.')[0]}.py" for name in emptied()}


def test_the_autograder_has_two_scripts_and_the_whole_project(tmp_path):
    course.pack(argparse.Namespace(
        folder=tmp_path / "autograder.zip", seed=7, milestone=[4, 5]))
    with zipfile.ZipFile(tmp_path / "autograder.zip") as packed:
        packed.extractall(tmp_path)
        modes = [packed.getinfo(name).external_attr >> 16 & 0o111
                 for name in ("setup.sh", "run_autograder")]
    assert all(modes), "they can be run"
    assert {each.name for each in tmp_path.iterdir()} == {
        "autograder.zip", "project", "run_autograder", "setup.sh"}
    for name in ("setup.sh", "run_autograder"):
        subprocess.run(["bash", "-n", tmp_path / name], check=True)
    assert "--seed 7 --milestone 4 5" in (tmp_path / "run_autograder").read_text()
    packed_course = tmp_path / "project/tests/course/course.py"
    assert packed_course.read_bytes() == Path(course.__file__).read_bytes()


# -- The notebook and the slides -------------------------------------------------------


def run_cells(cells):
    """What Jupyter does with cells of code, one after the other."""
    names = {"get_ipython": mock.Mock()}
    for code in cells:
        if code.startswith("%%write "):
            names["write"](*code.removeprefix("%%write ").split("\n", 1))
        else:
            exec(code, names)


def with_our_body(code):
    """A cell in which a student has written the function as we did."""
    magic, _, _ = code.partition("\n")
    return f"{magic}\n{ast.unparse(course.find(ROOT, magic.split()[1])[1])}"


@pytest.mark.slow
def test_the_cells_of_a_notebook_fail_until_the_functions_are_written(
        student, warm, monkeypatch, capfd):
    monkeypatch.setattr(subprocess, "run", lambda words, stdout, text: SimpleNamespace(
        stdout=warm(*words[1:], "-Wignore", cwd=student)[1]))
    args = argparse.Namespace(folder=student / "starter.ipynb", milestone=[TRAFFIC])
    course.notebook(args)
    notebook = json.loads(args.folder.read_text("utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 4)
    keys = {each["cell_type"]: {*each} for each in notebook["cells"]}
    both = {"cell_type", "metadata", "source"}
    assert keys == {"markdown": both, "code": both | {"execution_count", "outputs"}}
    set_up, *empty, tests = ("".join(each["source"]) for each in notebook["cells"]
                             if each["cell_type"] == "code")
    monkeypatch.chdir(student)
    run_cells([set_up, *empty, tests])
    assert "NotImplementedError" in capfd.readouterr().out
    run_cells([set_up, *map(with_our_body, empty), tests])
    assert re.search(r"= \d+ passed", capfd.readouterr().out), "none of them failed"
    with pytest.raises(SystemExit, match="has a body"):
        course.notebook(args)


def test_slides_compute_their_numbers_and_need_no_network(tmp_path):
    course.slides(argparse.Namespace(folder=tmp_path / "slides.html"))
    text = (tmp_path / "slides.html").read_text("ascii")
    assert not re.search(r"(src|href)=.https?:|url\(|@import|{[{%]", text)
    slides = text.split('<section class="slide"')
    for number, expected in [
            (2, "bends at 153 tokens"), (4, "131,072 bytes"), (7, "np-player"),
            (5, "27,866 blocks of 16 tokens"), (9, "524,288 bytes"), (10, "</html>")]:
        assert expected in slides[number]


# -- Grades ----------------------------------------------------------------------------

@pytest.mark.slow
def test_each_milestone_is_graded_alone(student):
    solve(student, TRAFFIC)
    course.replace_body(student, SCHEDULE, "import os; os._exit(0)")
    (student / "nanopaged/block_manager.py").write_text("def")
    assert scores(student, BLOCKS, SCHEDULER, TRAFFIC) == [0, 0, 5]


@pytest.mark.slow
@pytest.mark.parametrize("code", [
    "import sys; sys.exit(0)", "while True: pass", "import time; time.sleep(10**6)",
    FORGED], ids=["exit", "loop", "wait", "lie"])
def test_hostile_code_gets_nothing(code, student, monkeypatch):
    monkeypatch.setattr(course, "SECONDS", 12 if "sleep" in code else 30)
    monkeypatch.setattr(course, "CPU_SECONDS", 15)
    course.replace_body(student, MATCH, code)
    course.replace_body(student, KERNEL, code)
    assert scores(student, SMALLEST, TRAFFIC) == [0, 0]


@pytest.mark.slow
def test_an_empty_copy_gets_nothing(student, quick):
    assert sum(scores(student, *course.MILESTONES)) == 0


@pytest.mark.slow
def test_a_stub_in_the_smallest_engine_costs_half_of_its_points(student, quick):
    """In one that is whole otherwise. On the first evening, it shares nothing."""
    solve(student, SMALLEST)
    whole = student / "nanopaged/smallest.py"
    text = whole.read_text("utf-8")
    stubs = {"match": "return", "free": "return", "grow": "return True",
             "mark_computed": "seq.num_computed_tokens = end", "schedule": "return []",
             "attend": "return query.flatten()"}
    for function in course.MILESTONES[SMALLEST][2].split():
        stub = stubs[function.split(".")[-1]]
        course.replace_body(student, function, stub)
        (points,) = scores(student, SMALLEST)
        assert points <= 5, f"{points} for {function}: {stub}"
        whole.write_text(text, "utf-8")


@pytest.mark.slow
def test_a_test_earns_the_broken_engines_that_it_sees(student, quick, monkeypatch):
    """Here one of two, which it knows by its source."""
    monkeypatch.setattr(course, "draw_faults", lambda seed: ["min_tokens", "seeds"])
    (student / "tests/test_broken.py").write_text(
        "def test_one():\n    with open('nanopaged/sequence.py') as file:\n"
        "        assert 'num_prompt_tokens + params.min_tokens' in file.read()\n")
    assert scores(student, BROKEN) == [5]


@pytest.mark.slow
def test_the_whole_engine_gets_all_points_but_those_for_own_tests(student, quick):
    for number in course.MILESTONES:
        solve(student, number)
    points = scores(student, *course.MILESTONES)
    assert points == [10, 10, 10, 15, 15, 10, 10, 5, 0, 5]


@pytest.mark.slow
def test_the_tour_of_the_copy_runs_and_shows_no_answers(warm, tmp_path):
    folder = tmp_path / "copy"
    course.make(argparse.Namespace(
        folder=folder, milestone=list(course.MILESTONES), seed=1))
    status, said = warm("-m", "nanopaged.tour", tmp_path / "page", cwd=folder)
    assert status == 0, said
    assert "What is the loop?" in (tmp_path / "page/index.html").read_text("ascii")
    assert_no_answers(folder)
