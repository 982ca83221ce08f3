"""The guided tour stays true: its text, its numbers, its links, its exercises.

What a chapter shows is computed while the page is made, so the slow tests make it.
"""

import html
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from jinja2 import UndefinedError
from markupsafe import escape

from helpers import ROOT, apply_patch
from nanopaged import SamplingParams, attention
from nanopaged.batch import Batch
from nanopaged.sequence import Sequence
from nanopaged.tour import guide
from nanopaged.tour.__main__ import main
from nanopaged.tour.guide import blockwise, figures, lab, lessons, storm
from nanopaged.tour.guide.markdown import Html, render
from nanopaged.tour.recorder import unpack
from test_tour_browser import check_all_players, open_page  # noqa: F401

PACKAGE = ROOT / "nanopaged"
CHAPTERS = [chapter.name for chapter in guide.CHAPTERS]
TEXTS = {name: guide.read_chapter(name) for name in ["opening", *CHAPTERS]}
# What breaks the engine, in chapter "build": file, old line, new line, test.
MUTANTS = re.findall(
    r"In `(\w+\.py)`:\n\n```diff\n-(.*)\n\+(.*)\n```\n(?s:.*?)pytest (\S+::\w+)\n",
    TEXTS["build"])
# Its exercises: the text before the tests of each.
EXERCISES = {name: text for text, name in re.findall(
    r"(?s)\n#### (.*?)\npython -m pytest tests/solutions/checks/(\w+)\.py",
    TEXTS["build"])}


# -- The command -----------------------------------------------------------------------

def test_a_place_that_is_no_directory_is_refused_in_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "new"):
        with pytest.raises(SystemExit, match="2"):
            main([str(path)])
        assert f"{path} must be a directory" in capsys.readouterr().err.splitlines()[-1]


# -- Attention, block by block ---------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_blockwise_attention_is_the_engines(backend):
    with lab.engine(attention_backend=backend) as llm:
        params = SamplingParams(n=2, max_tokens=9, seed=1, ignore_eos=True)
        expected, given = blockwise.compare(llm, ["ROMEO:\n", "JULIET:\nAy me"], params)
    assert abs(given).max() > 1 and abs(expected - given).max() < 2e-5


def test_blockwise_attention_is_the_plain_formula():
    rng = np.random.default_rng(0)
    blocks, query = 5 * rng.normal(size=(6, 2, 4, 8)), 5 * rng.normal(size=8)
    keys, values = blocks[[4, 1, 3]].transpose(1, 0, 2, 3).reshape(2, 12, 8)[:, :10]
    weights = np.exp(keys @ query / np.sqrt(8))
    blocks[3, :, 2:] = np.nan  # what is after the last key is not read
    np.testing.assert_allclose(blockwise.attend(query, blocks, [4, 1, 3], 10),
                               weights @ values / weights.sum())


# -- The storm -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_storm_is_the_same_twice_loses_nothing_and_breaks_goodput():
    calm, bend, *_, worst = runs = [storm.serve(rate) for rate in storm.RATES]
    assert storm.serve(storm.RATES[-1]) == worst
    assert all(run["answers"] == calm["answers"] for run in runs)
    assert [len(tokens) for tokens in calm["answers"].values()] == [16] * storm.COUNT
    assert calm["preemptions"] == calm["again"] == 0 < bend["preemptions"]
    assert worst["again"] > bend["again"] > 0 and worst["waiting"] > bend["waiting"]
    assert worst["in_time"] < bend["in_time"] / 2 and worst["tokens"] < bend["tokens"]


# -- The text --------------------------------------------------------------------------

@pytest.mark.upstream
def test_a_run_of_a_and_b_is_the_story_that_the_files_tell():
    second = lessons.step()
    first = second["run"].scheduled()[0]["seqs"]["0.0"]
    told = re.sub(" = ", "=", f"{Sequence.__doc__}{Batch.__doc__}{attention.__doc__}")
    listing = re.sub("<[^>]+>", "", html.unescape(second["message"])).strip()
    run = listing.replace(" = ", "=").splitlines()
    run += [f"{name}={second[name]}" for name in ("positions", "slots")]
    run += [f"moves={second['third'].moves}", f"block_table={first['table']}",
            f"num_computed_tokens={first['computed']}"]
    assert len(run) > 8 and [line for line in run if line not in told] == []


# -- From text to HTML -----------------------------------------------------------------


@pytest.mark.parametrize("text, expected", [
    ("One\n{{ n }}.", "<p>One\n3.</p>"), ("[step {{ n }}](#run={{ n }})",
     '<p><a href="#run=3">step 3</a></p>'), ("{{ block }}", "<hr>"),
    ("::: Why `x`?\n**a** `x < {{ n }}`\n:::", '<details class="fold"><summary>Why '
     "<code>x</code>?</summary>\n<p><strong>a</strong> <code>x &lt; 3</code></p>\n"
     "</details>")])
def test_markdown(text, expected):
    assert render(text, {"n": 3, "block": Html("<hr>")}).strip() == expected


def test_the_minutes_of_a_chapter_are_its_words_and_its_stops():
    stop = "::: Check yourself: why?\nSo.\n:::"
    assert guide.minutes(render(f"{260 * 'word '}\n\n{stop}\n\n{stop}", {})) == 4


def test_hostile_values_are_shown_as_text():
    hostile = "</script><img src=x onerror=alert(1)>\"'&{{ n }}`*a*`"
    rendered = [render(text, {"hostile": hostile}) for text in (
        "{{ hostile }}", "a {{ hostile }} b", "`{{ hostile }}`", "[a]({{ hostile }})",
        "```text\n{{ hostile }}\n```", "| {{ hostile }} |\n|---|\n| {{ hostile }} |")]
    assert all(str(escape(hostile)) in str(markup) for markup in rendered)
    rendered.append(figures.bars(hostile, {hostile: {hostile: 1.0}}, hostile).chart)
    assert not re.search("<img|</script|<em>", "".join(rendered))


def test_a_name_without_a_value_is_an_error():
    with pytest.raises(UndefinedError, match="no_such_value"):
        render("a {{ no_such_value }}", {})


# -- Mutants and exercises -------------------------------------------------------------


@pytest.fixture
def copy(tmp_path):
    """A copy of the repository's code and tests, to change."""
    for name in ("nanopaged", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.fixture
def run_tests(copy, warm):
    """`run_tests(test)`: whether pytest, which must run, passes in the copy."""
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
               "-W", "ignore::pytest.PytestAssertRewriteWarning"]

    def run(test):
        status, said = warm(*command, test, cwd=copy)
        assert re.search(r"\d (passed|failed|error)", said), said
        return status == 0

    return run


@pytest.mark.slow
@pytest.mark.upstream
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant[-1])
def test_a_mutant_is_caught_by_its_test(mutant, copy, run_tests):
    """The line that it changes is there once."""
    file, old, new, test = mutant
    path = copy / "nanopaged" / file
    text = path.read_text("utf-8")
    assert len(MUTANTS) == 5 and text.count(f"\n{old}\n") == 1
    path.write_text(text.replace(f"\n{old}\n", f"\n{new}\n"), "utf-8")
    assert not run_tests(test)


@pytest.mark.slow
@pytest.mark.upstream
@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_can_be_solved_and_is_not_yet(name, copy, run_tests):
    test = f"tests/solutions/checks/{name}.py"
    assert not run_tests(test)
    apply_patch(name, copy)
    assert run_tests(test)


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
    assert loaded == {"data:,"} and "#contents" in targets
    assert text.count("Next chapter: ") == len(CHAPTERS) - 1 and len(text) < 350_000
    assert {"description", "og:title", "og:description"} <= {
        value for tag, _, value in page.attributes if tag == "meta"}
    assert not re.search(r"url\(|@import|\bfetch\(|XMLHttpRequest", text)
    seen = re.sub(r"(?s)<(script|style|svg)[ >].*?</\1>|<[^>]+>", " ", text)
    assert len(seen.split()) <= 22_000, "no learner reads more"

    steps, num_asked = {}, 0
    for name, data in re.findall(
            r'(?s)class="np-player" id="([^"]+)".*?plain"[^>]*>(.*?)</script>', text):
        header = unpack(data)[-1]
        steps[name] = {frame["step"] for frame in header["frames"]}
        num_asked += len(header["questions"])
    assert len(steps) == 8 and num_asked >= 6
    for target in targets:
        name, _, place = target.removeprefix("#").partition("=")
        step = place.partition("-")[0]
        assert target.startswith("https://arxiv.org/") or name in ids, target
        assert not step or int(step) in steps[name], target


@pytest.mark.slow
@pytest.mark.browser
def test_in_a_browser_all_players_step_by_keys(path, open_page):  # noqa: F811
    browser = open_page(path)
    browser.want_no_motion()
    for chapter in guide.CHAPTERS[:-1]:
        browser.run(f"location.hash = '{chapter.name}'; for (let i = 0; i < 3; i += 1)"
                    "  await new Promise(requestAnimationFrame)")
        assert browser.text(".progress b") == chapter.title
    for size in ((1280, 720), (375, 812)):
        browser.resize(size)
        assert len(check_all_players(browser)) == 8
