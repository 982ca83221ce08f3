"""The guided tour stays true: its text, its numbers, its links, its exercises.

What a chapter shows is computed while the page is made, so the slow tests make it.
"""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from helpers import ROOT, SOLUTIONS, apply_patch
from nanopaged import SamplingParams, attention
from nanopaged.loader import BUNDLED
from nanopaged.scheduler import Batch
from nanopaged.sequence import Sequence
from nanopaged.tour import guide, kv
from nanopaged.tour.__main__ import main
from nanopaged.tour.guide import blockwise, claims, figures, lab, lessons
from nanopaged.tour.guide.exercises import EXERCISES
from nanopaged.tour.guide.markdown import SOURCE, Html, Renderer
from nanopaged.tour.guide.mutants import MUTANTS, apply
from nanopaged.tour.guide.source import excerpt, highlight
from test_tour_browser import SIZES, check_all_players, open_page  # noqa: F401

PACKAGE = ROOT / "nanopaged"
EXTENSIONS = ROOT / "tests" / "solutions"
CHAPTERS = [chapter.name for chapter in guide.CHAPTERS]
TEXTS = {name: guide.read_chapter(name) for name in ["opening", *CHAPTERS]}
TEXTS |= {exercise.name: exercise.text for exercise in EXERCISES}


# -- Commands --------------------------------------------------------------------------

LLAMA3 = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
          "num_key_value_heads": 8, "hidden_size": 4096, "dtype": "bfloat16"}


def refusal(capsys, *arguments):
    """What a command says when it ends with an error: its last line."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert end.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("fields, bytes_per_token", [
    (LLAMA3, 131_072), ({"model_type": "llava", "text_config": LLAMA3}, 131_072),
    (LLAMA3 | {"num_key_value_heads": None}, 524_288),
    ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}, 36_864)])
def test_the_bytes_of_a_token_follow_from_a_config(tmp_path, fields, bytes_per_token):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert kv.read_shape(tmp_path).bytes_per_token == bytes_per_token


def test_the_kv_command_agrees_with_the_engine(capsys):
    main(["kv", str(BUNDLED), "--tokens", "100", "--seqs", "3", "--memory", "0.5"])
    printed = capsys.readouterr().out
    with lab.engine(dtype="bfloat16") as llm:
        size = kv.token_bytes(llm)
    assert f"= {size:,} bytes\n" in printed and "each for 2 of the 4 query" in printed
    assert f"{0.5 * kv.GIB // (100 * size):,.0f} sequences" in printed


@pytest.mark.parametrize("fields, message", [
    ({}, "must be a config.json that transformers knows"),
    (LLAMA3 | {"dtype": "float64"}, "dtype must be one of float32"),
    (LLAMA3 | {"num_hidden_layers": 10**30}, "num_hidden_layers must be at most"),
    ({"model_type": "deepseek_v3"}, "compressed latents"),
    ({"model_type": "qwen3_next"}, "linear_attention")])
def test_what_has_no_kv_arithmetic_is_refused_with_the_reason(
        tmp_path, capsys, fields, message):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert message in refusal(capsys, "kv", tmp_path)


def test_what_cannot_be_read_or_written_is_refused_in_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "hf download" in refusal(capsys, "kv", tmp_path)
    assert "must be" in refusal(capsys, "kv", BUNDLED, "--tokens=0")
    for command in ((), ("picture",)):
        for path in (tmp_path / "file", tmp_path / "file" / "new"):
            assert f"{path} must be a directory" in refusal(capsys, *command, path)


# -- Attention, block by block ---------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_blockwise_attention_is_the_engines(backend):
    with lab.engine(attention_backend=backend) as llm:
        params = SamplingParams(n=2, max_tokens=9, seed=1, ignore_eos=True)
        recorded = blockwise.record(llm, ["ROMEO:\n", "JULIET:\nAy me"], params)
    assert max(abs(step.out).max() for step in recorded) > 1
    assert blockwise.max_difference(recorded) < 2e-5
    assert blockwise.difference_when_moved(recorded[-1]) == 0


def test_blockwise_attention_is_the_plain_formula():
    rng = np.random.default_rng(0)
    blocks, query = 5 * rng.normal(size=(6, 2, 4, 8)), 5 * rng.normal(size=8)
    keys, values = blocks[[4, 1, 3]].transpose(1, 0, 2, 3).reshape(2, 12, 8)[:, :10]
    weights = np.exp(keys @ query / np.sqrt(8))
    blocks[3, :, 2:] = np.nan  # what is after the last key is not read
    np.testing.assert_allclose(blockwise.attend(query, blocks, [4, 1, 3], 10),
                               weights @ values / weights.sum())


# -- The text --------------------------------------------------------------------------

# Numbers that are names: of models, of formats, of a decade, of parts of the paper.
NAMED = re.compile(
    r"Llama-\d-\d+B|Llama \d|OPT-\d+B|A100|70B model|float\d\d|int8|\d+s|40 GB"
    r"|equation \d|Figure \d+|2 x n x H x D|x 2 x 2 bytes|Pow2"
    r"|OLMo-2|Phi-3|Qwen3")


@pytest.mark.parametrize("name", TEXTS)
def test_every_number_in_the_text_is_computed(name):
    prose = TEXTS[name]
    for markup in (r"(?ms)^```.*?^```$", r"(?m)^1\. ", r"`[^`]*`", r"\]\([^)]*\)",
                   r"\{[^}]*\}"):
        prose = re.sub(markup, "", prose)
    assert re.findall(r"\S*\d\S*", NAMED.sub("", prose)) == []


@pytest.mark.upstream
@pytest.mark.parametrize("name", TEXTS)
def test_every_symbol_and_quote_in_the_text_exists(name):
    paths = [*PACKAGE.rglob("*.py"), *EXTENSIONS.glob("*.p*")]
    sources = {path: path.read_text("utf-8") for path in paths}
    known = {path.name for path in sources}
    for path in EXTENSIONS.glob("*.patch"):  # what a text asks for is in its solution
        sources[path] = "\n".join(re.findall(r"(?m)^[+].*", sources[path]))
    known.update(re.findall(r"[A-Za-z_]\w*", "\n".join(sources.values())))
    for code in re.findall(r"`([\w.]+)`", TEXTS[name]):
        assert code in known or set(code.split(".")) <= known, code
    for symbol in SOURCE.findall(TEXTS[name]):
        assert "<pre" in excerpt(symbol)


@pytest.mark.upstream
def test_a_run_of_a_and_b_is_the_story_that_the_files_tell():
    first, second = lessons.loop(), lessons.step()
    told = re.sub(" = ", "=", f"{Sequence.__doc__}{Batch.__doc__}{attention.__doc__}")
    run = second["second"].replace(" = ", "=").splitlines()
    run += [f"{name}={second[name]}" for name in ("positions", "slots", "copies")]
    run += [f"block_table={first['table']}", f"num_computed_tokens={first['computed']}"]
    assert [line for line in run if line not in told] == []


def test_the_chapters_fill_the_hour_and_each_asks_first():
    assert sum(chapter.minutes for chapter in guide.CHAPTERS) == 60
    for name in CHAPTERS[: CHAPTERS.index("build")]:
        assert "?" in TEXTS[name][:400], f"{name} begins without a question"
        assert "\n::: Check yourself: " in TEXTS[name]


def test_claims_are_checked_with_the_right_numbers():
    values = claims.claims()
    assert (values["grouped"], values["ungrouped"]) == ("10", "80")
    assert (values["claimed"], values["read_ms"]) == ("40", "11")
    assert values["recompute_s"] == "1.8"  # 2 * 70e9 * 4096 / 312e12


# -- From text to HTML -----------------------------------------------------------------


@pytest.mark.parametrize("text, expected", [
    ("One\ntwo.\n\nThree.", "<p>One two.</p>\n<p>Three.</p>"),
    ("## A title", '<h3 id="a-title">A title</h3>'),
    ("- a\n  b\n- *c*", "<ul><li>a b</li><li><em>c</em></li></ul>"),
    ("[step {n}](#run={n})", '<p><a href="#run=3">step 3</a></p>'),
    ("::: Why?\n**a** `x < {n}`\n:::", '<details class="fold"><summary>Why?</summary>\n'
     "<p><strong>a</strong> <code>x &lt; 3</code></p>\n</details>"),
    ("{block}", "<hr>")])
def test_markdown(text, expected):
    assert Renderer({"n": 3, "block": Html("<hr>")}).render(text) == expected


def test_hostile_values_are_shown_as_text():
    hostile = "</script><img src=x onerror=alert(1)>\"'&{n}`*a*`"
    rendered = [Renderer({"hostile": hostile, "n": 1}).render(text) for text in (
        "{hostile}", "a {hostile} b", "`{hostile}`", "[a]({hostile})",
        "```text\n{hostile}\n```", "| {hostile} |\n|---|\n| {hostile} |")]
    rendered.append(figures.bars(hostile, {hostile: {hostile: 1.0}}, hostile))
    for markup in rendered:
        assert not re.search("<img|</script|<em>", markup)


def test_an_unknown_name_and_an_unused_value_are_errors(monkeypatch):
    with pytest.raises(KeyError, match="no_such_value"):
        Renderer({}).render("a {no_such_value}")
    monkeypatch.setattr(guide, "read_chapter", lambda name: "{a}")
    with pytest.raises(ValueError, match="uses no b"):
        guide.render("x", {"a": 1, "b": 2})


def test_quoted_source_keeps_every_character():
    for path in PACKAGE.glob("*.py"):
        code = path.read_text("utf-8")
        assert html.unescape(re.sub(r"<[^>]+>", "", highlight(code))) == code


# -- Mutants and exercises -------------------------------------------------------------


@pytest.mark.upstream
def test_every_mutant_changes_what_is_there_once():
    for edit in [mutant.edit for mutant in MUTANTS]:
        assert (PACKAGE / edit.file).read_text("utf-8").count(edit.old) == 1, edit


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_a_solution_changes_the_files_that_the_exercise_names(exercise):
    patch = (SOLUTIONS / f"{exercise.name}.patch").read_text("utf-8")
    files = re.findall(r"(?m)^--- a/nanopaged/(.*)", patch)
    assert set(files) == set(exercise.files)


@pytest.fixture
def copy(tmp_path):
    """A copy of the repository's code and tests, to change."""
    for name in ("nanopaged", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run_tests(copy, *arguments):
    """The exit status of pytest in a copy; 0: all pass, 1: some fail."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *arguments], cwd=copy, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(copy)}).returncode


@pytest.mark.slow
@pytest.mark.upstream
def test_without_a_mutant_all_these_tests_pass(copy):
    assert run_tests(copy, *{mutant.test for mutant in MUTANTS}) == 0


@pytest.mark.slow
@pytest.mark.upstream
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.title)
def test_a_mutant_is_caught_by_its_test(mutant, copy):
    apply([mutant.edit], copy / "nanopaged")
    assert run_tests(copy, mutant.test) == 1


@pytest.mark.slow
@pytest.mark.upstream
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_an_exercise_can_be_solved_and_is_not_yet(exercise, copy):
    test = copy / f"tests/test_{exercise.name}.py"
    test.write_text(exercise.test, encoding="utf-8")
    assert run_tests(copy, test) != 0
    apply_patch(exercise.name, copy)
    assert run_tests(copy, test) == 0


# -- The page --------------------------------------------------------------------------


class Page(HTMLParser):
    """Checks that tags are balanced; collects attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.open += [tag] * (tag not in ("meta", "link", "br", "hr", "img", "input"))
        self.attributes += [(tag, name, value) for name, value in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return guide.write(tmp_path_factory.mktemp("tour"))


@pytest.mark.slow
def test_the_page_is_whole_and_loads_nothing(path):
    text = path.read_bytes().decode("ascii")
    page = Page(text)
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(set(ids)) == len(ids) and set(CHAPTERS) < set(ids)
    targets = {value for tag, name, value in page.attributes
               if tag == "a" and name == "href"}
    loaded = {value for tag, name, value in page.attributes
              if name in ("src", "srcset", "poster", "action") or (
                  name == "href" and tag != "a")}
    assert loaded == {"data:,"}
    assert not re.search(r"url\(|@import|\bfetch\(|XMLHttpRequest", text)

    steps = {}
    for name, data in re.findall(
            r'class="np-player" id="([^"]+)".*?json">(.*?)</script>', text, re.DOTALL):
        steps[name] = {frame["step"] for frame in json.loads(data)["frames"]}
    assert len(steps) == 9
    for target in targets:
        name, _, step = target.removeprefix("#").partition("=")
        assert target.startswith("https://arxiv.org/") or name in ids, target
        assert not step or int(step) in steps[name], target


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_in_a_browser_all_players_step_by_keys(path, open_page, size):  # noqa: F811
    assert len(check_all_players(open_page(path, size=size))) == 9
    found = json.loads(open_page(path, "#check", size).text("#np-check"))
    assert [player["failures"] for player in found["players"]] == [[]] * 9
