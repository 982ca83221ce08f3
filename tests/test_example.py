"""example.py runs from any directory, offline, with the bundled model and --chat."""

import re
import runpy

import pytest

from helpers import ROOT, run_python
from nanopaged.loader import BUNDLED

EXAMPLE = ROOT / "example.py"
RULE = "\n\n" + "-" * 70 + "\n"


@pytest.fixture(scope="module")
def example():
    """The script's names, without running it."""
    return runpy.run_path(str(EXAMPLE), run_name="example")


@pytest.fixture
def run(tmp_path):
    """`run(*arguments)`: the script's standard output, from an empty directory."""

    def run(*arguments):
        stdout = run_python(EXAMPLE, *arguments, cwd=tmp_path, HF_HUB_OFFLINE="1")
        assert not list(tmp_path.iterdir()), "it left files behind"
        return stdout

    return run


def test_it_streams_its_prompts_and_shows_the_effect_of_the_cache(run, example):
    *texts, numbers = run("--max-tokens", "24").split(RULE)
    assert len(texts) == len(example["PLAYS"])
    for prompt, text in zip(example["PLAYS"], texts, strict=True):
        assert text.startswith(prompt)
        assert len(text[len(prompt) :].strip()) > 10, f"no text after {prompt!r}"

    counts, first, second, usage = numbers.splitlines()
    match = re.fullmatch(r"(\d+) requests, (\d+) tokens in \d+\.\d\d s", counts)
    assert match and [int(number) for number in match.groups()] == [3, 3 * 24]

    timed = (
        r"(\d+) prompt tokens for the {} time: (\d+) cached, "
        r"\d+\.\d ms to the first token"
    )
    length, cold = map(int, re.fullmatch(timed.format("first"), first).groups())
    again, warm = map(int, re.fullmatch(timed.format("second"), second).groups())
    assert length == again > 3 * 16
    assert warm == (length - 1) // 16 * 16, (
        "every full block but the last token's is cached"
    )
    assert cold < warm and cold % 16 == 0

    match = re.fullmatch(
        r"After 20 steps of the same requests: (\d+) of (\d+) blocks are in use, "
        r"and (\d+)% of their slots hold a token\. "
        r"(\d+) blocks are cached; (\d+) of (\d+) prompt tokens were found there\.",
        usage,
    )
    assert match, usage

    used, total, percent, cached, hits, queries = map(int, match.groups())
    assert len(example["PLAYS"]) <= used < total
    assert 50 < percent <= 100
    assert 0 < cached <= total
    assert warm <= hits < queries


@pytest.mark.slow
def test_it_writes_a_page_that_shows_every_step(example, tmp_path):
    page = tmp_path / "run.html"
    arguments = ["--max-tokens", "4", "--trace", page, "ROMEO:"]
    stdout = run_python(EXAMPLE, *arguments, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert stdout.startswith("ROMEO:")
    text = page.read_text(encoding="utf-8")
    assert text.count('"phase":"scheduled"') >= 4 and "</html>" in text


@pytest.mark.slow
def test_it_chats_with_a_model_from_a_directory(run, example):
    stdout = run("--model", str(BUNDLED), "--chat", "--max-tokens", "24")
    start, *answers = stdout.split("\n> ")
    assert not start and len(answers) == len(example["QUESTIONS"])
    for question, answer in zip(example["QUESTIONS"], answers, strict=True):
        asked, _, text = answer.partition("\n")
        assert asked == question
        assert len(text.strip()) > 10, f"no answer to {question!r}"
