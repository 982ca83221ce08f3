"""Extensions of the engine, as somebody who forks it would write them.

Each is a patch in solutions/, and a script in solutions/checks/ shows that it works:
seven change the engine, one brings another family; a server and Ray need no patch. So a
change of the engine that makes one of them impossible is noticed here. A patch that no
longer applies has to be made anew.
"""

import json
import re
import runpy
from importlib.util import find_spec

import pytest

from helpers import SOLUTIONS, apply_patch, copy_package

# Some patches do nothing unless an option is set.
OPTIONS = {"speculation": {"num_speculative_tokens": 3},
           "int8_kv": {"kv_cache_dtype": "int8"}}
# The README of solutions/ names these pairs, and says why others fail.
TOGETHER = [
    ("priorities", "speculation"), ("priorities", "int8_kv"), ("priorities", "moe"),
    ("priorities", "sliding_window"), ("priorities", "state_cache"),
    ("int8_kv", "speculation"), ("moe", "speculation")]
# A script of solutions/checks/, and all engines in it have these options.
WITH_OPTIONS = """
import json, runpy, sys
import nanopaged
make = nanopaged.LLM
options = json.loads(sys.argv.pop(1))
nanopaged.LLM = lambda *model, **others: make(*model, **options | others)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.fixture
def extended(tmp_path):
    """`extended(name)`: a folder with a copy of the package that has this extension."""

    def make(name):
        copy_package(tmp_path)
        for each in ["speculation", "draft"] if name == "draft" else [name]:
            if (SOLUTIONS / f"{each}.patch").exists():
                apply_patch(each, tmp_path)
        return tmp_path

    return make


@pytest.fixture
def run_check(warm):
    """`run_check(folder, name, ..)`: run the script of an extension with this copy of
    the package; returns what it says.
    """
    def run(folder, name, *arguments, python=()):
        status, said = warm(*python, script_of(name), *arguments, cwd=folder)
        assert status == 0, said
        return said

    return run


@pytest.fixture
def check(extended, run_check):
    """`check(name, ..)`: the same, with a copy that has the extension."""
    return lambda name, *arguments: run_check(extended(name), name, *arguments)


def script_of(name):
    return SOLUTIONS / "checks" / f"{name}.py"


def test_the_index_has_every_exercise_and_its_links_lead_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", (SOLUTIONS / "README.md").read_text("utf-8"))
    assert all((SOLUTIONS / link).exists() for link in links)
    exercises = [*SOLUTIONS.glob("*.md"), *SOLUTIONS.glob("*.patch")]
    assert {path.name for path in exercises} - {*links} == {"README.md"}


@pytest.mark.slow
def test_speculation_gives_the_same_tokens_in_fewer_steps(check, tmp_path):
    """The answers to expect are those of the engine as it is, without the patch."""
    answers = runpy.run_path(str(script_of("speculation")))["plain_answers"](100, 0)
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    said = check("speculation", 100, 0, '"answers.json"')
    assert "the same tokens in 100 random runs" in said


@pytest.mark.slow
@pytest.mark.parametrize("name, arguments, expected", [
    ("priorities", [30], "30 random runs"), ("int8_kv", [30], "30 random runs"),
    ("sliding_window", [30], "30 random runs"), ("moe", [], "moe: ok"),
    ("state_cache", [30], "30 random runs"),
    ("look_inside", [12], "12 random runs"), ("int8_weights", [12], "12 random runs"),
    ("draft", [], "the same greedy tokens"),
    ("disaggregated", [], "12 runs of 30 requests"),
    ("rollouts", [8, 1], "rollouts: ok")])
def test_its_own_check_passes(check, name, arguments, expected):
    """Random runs; all kinds of routing; weights of a trainer, whose reward rises."""
    assert expected in check(name, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("pair", TOGETHER, ids="+".join)
def test_two_work_together(tmp_path, pair, run_check):
    """In one copy, the check of each passes while the other is switched on."""
    copy_package(tmp_path)
    for name in pair:
        apply_patch(name, tmp_path)
    for name, other in [pair, pair[::-1]]:
        options, runs = json.dumps(OPTIONS.get(other, {})), [8] * (name != "moe")
        said = run_check(
            tmp_path, name, *runs, python=["-c", WITH_OPTIONS, options])
        assert "8 random runs" in said or "moe: ok" in said


@pytest.mark.slow
def test_ranks_share_every_expert(extended, warm):
    status, said = warm(script_of("moe"), 1, cwd=extended("moe"), ranks=2)
    assert status == 0 and "moe: ok" in said, said


@pytest.mark.slow
def test_a_server_serves_eight_clients_and_survives_those_that_go_away(check):
    for package in ("openai", "fastapi", "uvicorn", "xgrammar"):
        pytest.importorskip(package)
    assert "server: ok" in check("server")


@pytest.mark.slow
def test_programs_for_vllm_find_what_vllm_answers(check):
    """Recorded by checks/vllm_answers.py."""
    assert "answers are those of vLLM" in check("as_vllm", "vllm")


@pytest.mark.slow
@pytest.mark.parametrize("name, package, expected", [
    ("names", "xgrammar", "run, or say what is not supported"),
    ("lm_eval", "lm_eval", "are those of hf"),
    ("langchain", "langchain_community", "8 texts are those of transformers"),
    ("llama_index", "llama_index", "8 texts are those of transformers"),
    ("outlines", "outlines", "4 kinds of 8 texts are those of transformers"),
    ("trl", "trl", "log-probabilities in 4 updates")])
def test_programs_for_vllm_find_what_transformers_does(check, name, package, expected):
    if not find_spec(package):
        pytest.skip(f"{package} is not installed: pip install '.[vllm]'")
    assert expected in check("as_vllm", name)


@pytest.mark.slow
def test_ray_answers_every_prompt_once_even_if_an_engine_is_killed(check):
    pytest.importorskip("ray.data", reason="pip install 'ray[data]'")
    assert "ray_batch: ok" in check("ray_batch")
