"""The guided tour stays true: its text, its numbers, its links, its exercises.

What a chapter shows is computed while the page is made, so the slow tests make it.
"""

import ast
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

import nanopaged
from helpers import ROOT, browse, run_python, text_of_element
from nanopaged import SamplingParams
from nanopaged.loader import BUNDLED
from nanopaged.tour import guide, kv
from nanopaged.tour.__main__ import main
from nanopaged.tour.guide import blockwise, claims, figures, lab, paper
from nanopaged.tour.guide.exercises import EXERCISES
from nanopaged.tour.guide.markdown import SOURCE, Html, Renderer
from nanopaged.tour.guide.mutants import MUTANTS, Edit, apply, change
from nanopaged.tour.guide.source import excerpt, find, highlight, part
from solutions import SOLUTIONS

PACKAGE = ROOT / "nanopaged"
SOURCES = sorted(PACKAGE.glob("*.py"))
TEXTS = {path.stem: path.read_text(encoding="utf-8")
         for path in sorted((PACKAGE / "tour/guide/chapters").glob("*.md"))}
STATEMENTS = {exercise.name: exercise.text for exercise in EXERCISES}


# --- KV arithmetic ---


@pytest.fixture
def write_config(tmp_path):
    def write(**fields):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(fields))
        return file

    return write


QWEN3_SMALL = {
    "model_type": "qwen3", "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 1024,
    "torch_dtype": "bfloat16",
}
LLAMA3_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "dtype": "bfloat16",
}
LLAMA2_7B = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    "hidden_size": 4096, "torch_dtype": "float16",
}
LLAMA3_70B = {
    "model_type": "llama", "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "hidden_size": 8192, "torch_dtype": "bfloat16",
}
PICTURES = {"model_type": "llava", "text_config": LLAMA3_8B}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}


@pytest.mark.parametrize(
    "fields, name, bytes_per_token",
    [
        (QWEN3_SMALL, "Qwen3-0.6B", 114_688),
        (LLAMA3_8B, "Llama-3-8B", 131_072),
        (LLAMA2_7B, "Llama-2-7B", 524_288),
        (LLAMA3_70B, "Llama-3-70B", 327_680),
        (PICTURES, "Llama-3-8B", 131_072),
        (GPT2, None, 36_864),
    ],
    ids=["qwen3", "llama3", "llama2", "70b", "pictures", "gpt2"],
)
def test_the_bytes_of_a_token_follow_from_a_config(
    write_config, fields, name, bytes_per_token
):
    shape = kv.read_shape(write_config(**fields))
    assert shape.bytes_per_token == bytes_per_token
    assert name is None or shape == kv.MODELS[name]


def test_a_70b_model_with_grouped_heads_needs_10_gib_and_80_without():
    shape = kv.MODELS["Llama-3-70B"]
    assert shape.total(4096, 8) == 10 * kv.GIB
    assert shape.ungrouped.total(4096, 8) == 80 * kv.GIB
    assert shape.sequences_in(24 * kv.GIB, 4096) == 19
    assert shape.ungrouped.sequences_in(24 * kv.GIB, 4096) == 2


def test_the_command_takes_a_directory_and_agrees_with_the_engine(capsys):
    main(["kv", str(BUNDLED), "--tokens", "100", "--seqs", "3", "--memory", "0.5"])
    printed = capsys.readouterr().out
    with lab.engine(dtype="bfloat16") as llm:
        token_bytes = llm.runner.token_bytes
    assert f"= {token_bytes:,} bytes\n" in printed
    assert f"{0.5 * kv.GIB // (100 * token_bytes):,.0f} sequences" in printed
    assert "each for 2 of the 4 query heads" in printed
    assert "Without grouped heads" in printed


def test_a_dtype_can_be_chosen_and_heads_may_be_ungrouped(write_config, capsys):
    main(["kv", str(write_config(**LLAMA2_7B)), "--dtype", "float32"])
    printed = capsys.readouterr().out
    assert "1,048,576 bytes" in printed
    assert "are not grouped" in printed


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, "must be a config.json that transformers knows"),
        ({"model_type": "no such model"}, "no such model"),
        (LLAMA3_8B | {"dtype": "float64"}, "dtype must be one of float32"),
        ({"model_type": "deepseek_v3"}, "compressed latents"),
        ({"model_type": "qwen3_next"}, "linear_attention"),
    ],
    ids=["empty", "unknown", "dtype", "latents", "linear"],
)
def test_what_has_no_kv_arithmetic_is_refused_with_the_reason(
    write_config, capsys, fields, message
):
    with pytest.raises(SystemExit):
        main(["kv", str(write_config(**fields))])
    assert message in capsys.readouterr().err


def test_a_file_that_is_missing_or_no_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match="hf download"):
        kv.read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="that transformers knows"):
        kv.read_shape(tmp_path)


@pytest.mark.parametrize("option", ["--tokens=0", "--seqs=-1", "--memory=nan"])
def test_the_command_refuses_numbers_that_make_no_sense(option, capsys):
    with pytest.raises(SystemExit):
        main(["kv", str(BUNDLED), option])
    assert "must be" in capsys.readouterr().err


def test_kv_arithmetic_does_not_load_the_engine():
    code = (
        "import sys; from nanopaged.tour.__main__ import main; "
        f"main(['kv', {str(BUNDLED)!r}]); "
        "print([m for m in sys.modules if m in "
        "('nanopaged.llm', 'nanopaged.model_runner', 'numba')])"
    )
    assert run_python("-c", code).endswith("\n[]\n")


# --- the command ---


def test_help_names_all_commands(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("DIR", "kv CONFIG", "picture DIR"))


def test_the_command_writes_the_page_and_prints_where_it_is(
    tmp_path, monkeypatch, capsys
):
    def make_page(progress):
        progress(1, 2, "A chapter")
        return "<p>\u201cquoted\u201d</p>"

    monkeypatch.setattr(guide, "make_page", make_page)
    main([str(tmp_path / "new" / "tour")])
    path = tmp_path / "new" / "tour" / "index.html"
    assert path.read_bytes() == b"<p>&#8220;quoted&#8221;</p>"
    captured = capsys.readouterr()
    assert str(path) in captured.out
    assert captured.err == "[1/2] A chapter\n"


# --- attention, block by block ---


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_blockwise_attention_is_the_engines(backend):
    with lab.engine(attention_backend=backend) as llm:
        params = SamplingParams(n=2, max_tokens=9, seed=1, ignore_eos=True)
        recorded = blockwise.record(llm, ["ROMEO:\n", "JULIET:\nAy me"], params)
        num_layers = llm.model_config.num_hidden_layers
    assert len(recorded) == 9 * num_layers
    assert max(abs(step.out).max() for step in recorded) > 1
    assert blockwise.max_difference(recorded) < 2e-5
    assert blockwise.difference_when_moved(recorded[-1]) == 0


def test_blockwise_attention_is_the_plain_formula():
    rng = np.random.default_rng(0)
    blocks = 5 * rng.normal(size=(6, 2, 4, 8))
    query = 5 * rng.normal(size=8)
    keys, values = blocks[[4, 1, 3]].transpose(1, 0, 2, 3).reshape(2, 12, 8)[:, :10]
    weights = np.exp(keys @ query / np.sqrt(8))
    expected = weights @ values / weights.sum()
    np.testing.assert_allclose(blockwise.attend(query, blocks, [4, 1, 3], 10), expected)
    # What is after the last key is not read.
    blocks[3, :, 2:] = np.nan
    np.testing.assert_allclose(blockwise.attend(query, blocks, [4, 1, 3], 10), expected)


# --- the text ---


def outside_code(text):
    """Prose without code, names of values and targets of links."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"\{[^}]*\}", "", text)


# Numbers that are names: of models, of formats, of a decade, of parts of the paper.
NAMED = re.compile(
    r"Llama-\d-\d+B|Llama \d|OPT-\d+B|A100|70B model|float\d\d|\d+s|40 GB"
    r"|equation \d|Figure \d+|2 x n x H x D|x 2 x 2 bytes|Pow2")


@pytest.mark.parametrize("name", [*TEXTS, *STATEMENTS])
def test_every_number_in_the_text_is_computed(name):
    text = (TEXTS | STATEMENTS)[name]
    assert re.findall(r"\S*\d\S*", NAMED.sub("", outside_code(text))) == []


def names_in(paths):
    """All identifiers that occur in these files, and the files' own names."""
    names = set()
    for path in paths:
        names |= {path.name, *re.findall(r"[A-Za-z_]\w*", path.read_text("utf-8"))}
    return names


@pytest.mark.parametrize("name", [*TEXTS, *STATEMENTS])
def test_every_symbol_in_the_text_exists(name):
    known = names_in([*SOURCES, *(PACKAGE / "tour").rglob("*.py")])
    text = (TEXTS | STATEMENTS)[name]
    for code in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"[A-Z]\w+\.\w+", code):  # a method or an attribute
            owner, _, attribute = code.partition(".")
            [path] = [path for path in SOURCES
                      if f"\nclass {owner}" in path.read_text("utf-8")]
            assert hasattr(find(f"{path.stem}.{owner}"), attribute), code
        elif re.fullmatch(r"[\w.]+", code):
            assert code in known or set(code.split(".")) <= known, code
    for symbol in SOURCE.findall(text):
        assert "<pre" in excerpt(symbol)


def test_the_chapters_fill_the_hour_and_each_asks_first():
    ends = [chapter.end for chapter in guide.CHAPTERS]
    assert [chapter.start for chapter in guide.CHAPTERS] == [0, *ends[:-1]]
    assert ends[-1] == 60
    names = [chapter.name for chapter in guide.CHAPTERS]
    assert {*names, "opening", "claims", "glossary"} == set(TEXTS)
    for name in set(names) - {"build"}:
        assert "?" in TEXTS[name][:400], f"{name} begins without a question"
        assert "\n::: Check yourself: " in TEXTS[name]


def test_claims_are_checked_with_the_numbers_of_the_design():
    values = claims.check()
    assert (values["grouped"], values["ungrouped"]) == ("10", "80")
    assert (values["claimed"], values["read_ms"]) == ("40", "11")
    assert values["recompute_s"] == "1.8"  # 2 * 70e9 * 4096 / 312e12
    guide.render("claims", values)


# --- from text to HTML ---


@pytest.mark.parametrize(
    "text, expected",
    [
        ("One\ntwo.\n\nThree.", "<p>One two.</p>\n<p>Three.</p>"),
        ("## A title", '<h3 id="a-title">A title</h3>'),
        ("- a\n  b\n- *c*", "<ul><li>a b</li><li><em>c</em></li></ul>"),
        ("**a `b`** [c](#d)", '<p><strong>a <code>b</code></strong> '
         '<a href="#d">c</a></p>'),
        ("> a\n> b", '<aside class="note"><p>a b</p></aside>'),
        ("a `x < {n}` & {n}", "<p>a <code>x &lt; 3</code> &amp; 3</p>"),
        ("[step {n}](#run={n})", '<p><a href="#run=3">step 3</a></p>'),
        ("{block}", "<hr>"),
    ],
)
def test_markdown(text, expected):
    renderer = Renderer({"n": 3, "block": Html("<hr>")})
    assert renderer.render(text) == expected


def test_tables_and_folds():
    table = Renderer({}).render("| | a |\n|---|---|\n| b | c |")
    assert '<th scope="col"></th><th scope="col">a</th>' in table
    assert '<tr><th scope="row">b</th><td>c</td></tr>' in table
    fold = Renderer({}).render("::: Why?\nBecause.\n\n- so\n:::")
    assert "<summary>Why?</summary>\n<p>Because.</p>\n<ul><li>so</li></ul>" in fold


def test_hostile_values_are_shown_as_text():
    hostile = "</script><img src=x onerror=alert(1)>\"'&{n}`*a*`"
    for text in ("{hostile}", "a {hostile} b", "`{hostile}`", "[a]({hostile})",
                 "```text\n{hostile}\n```", "| {hostile} |\n|---|\n| {hostile} |"):
        rendered = Renderer({"hostile": hostile, "n": 1}).render(text)
        assert "<img" not in rendered and "</script" not in rendered
        assert "<em>" not in rendered
        assert '"\'' not in rendered, "a quote may end an attribute"
    figure = figures.bars(hostile, {hostile: {hostile: 1.0}}, hostile, unit=hostile)
    assert "<img" not in figure and "</script" not in figure


def test_an_unknown_name_and_an_unused_value_are_errors(monkeypatch):
    with pytest.raises(KeyError, match="no_such_value"):
        Renderer({}).render("a {no_such_value}")
    with pytest.raises(AssertionError, match="no end"):
        Renderer({}).render("```python\nx")
    monkeypatch.setattr(guide, "read_chapter", lambda name: "{a}")
    with pytest.raises(ValueError, match="uses no b"):
        guide.render("x", {"a": 1, "b": 2})


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_highlighting_changes_no_character(path):
    code = path.read_text("utf-8")
    highlighted = highlight(code)
    assert html.unescape(re.sub(r"<[^>]+>", "", highlighted)) == code
    assert '<span class="keyword">def</span>' in highlighted or "import" in code


def test_an_excerpt_is_the_source_as_it_is_now():
    shown = excerpt("block_manager.BlockManager.fork")
    text = html.unescape(re.sub(r"<[^>]+>", "", shown))
    assert "block_manager.py, BlockManager.fork" in text
    assert "def fork(self, parent: Sequence, child: Sequence) -> None:" in text
    with pytest.raises(AttributeError):
        excerpt("block_manager.BlockManager.no_such_method")


def test_a_part_of_a_function_is_shown_without_its_indentation():
    shown = part("cpu_kernels.paged_attention", "# The sums so far", "acc[g, dim] +=")
    lines = html.unescape(re.sub(r"<[^>]+>", "", shown)).splitlines()
    assert lines[0].startswith("# The sums so far")
    assert lines[-1].startswith("        acc[g, dim] += prob")
    assert 8 < len(lines) < 18


# --- figures ---


def test_bars_are_as_high_as_their_values():
    figure = figures.bars("t", {"a": {"x": 10.0}, "b": {"x": 40.0}}, "c")
    found = re.findall(r'series-0"[^>]* height="([\d.]+)"', figure)
    heights = [float(height) for height in found]
    assert heights[1] == pytest.approx(4 * heights[0], abs=0.3)
    assert 'role="img"' in figure and "<td>40</td>" in figure


def test_stacked_bars_lie_on_top_of_each_other():
    figure = figures.stacked("t", {"a": {"x": 60.0, "y": 40.0}}, "c", {"a": 55.0})
    [low] = re.findall(r'series-0" x="[\d.]+" y="([\d.]+)" width="64', figure)
    [(y, height)] = re.findall(
        r'series-1" x="[\d.]+" y="([\d.]+)" width="64.0" height="([\d.]+)"', figure)
    assert float(y) + float(height) == pytest.approx(float(low), abs=0.2)
    assert "60 (paper: 55.0)" in figure


def test_lines_rise_with_their_values():
    figure = figures.lines("t", {"a": {"1": 0.0, "2": 5.0, "3": 2.5}}, "c", "x")
    points = re.search(r'points="([^"]+)"', figure)[1].split()
    ys = [float(point.split(",")[1]) for point in points]
    assert ys[1] < ys[2] < ys[0]


def test_the_model_of_preemption_has_the_papers_shape():
    rows = paper.modelled_milliseconds((1, 16, 32, 64, 256))
    recompute, swap = rows["recompute"], rows["swap"]
    assert len(set(recompute.values())) == 1
    assert list(swap.values()) == sorted(swap.values(), reverse=True)
    assert swap["1"] > 3 * recompute["1"]
    assert all(1 / 2 < swap[size] / recompute[size] < 2 for size in ("16", "32", "64"))


# --- mutants and exercises ---


def test_a_change_must_fit_exactly_once(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")
    apply([Edit("a.py", "x = 1", "x = 2")], tmp_path)
    assert (tmp_path / "a.py").read_text() == "x = 2\ny = 1\n"
    for old in ("\n", "no such line"):
        with pytest.raises(ValueError, match="once"):
            apply([Edit("a.py", old, "")], tmp_path)


def test_every_mutant_changes_one_line_and_names_a_test():
    assert len(MUTANTS) == 10
    for mutant in MUTANTS:
        edit = mutant.edit
        source = (PACKAGE / edit.file).read_text("utf-8")
        assert source.count(edit.old) == 1, mutant.title
        assert len(edit.old.strip().splitlines()) == 1
        assert len(edit.new.strip().splitlines()) == 1
        ast.parse(source.replace(edit.old, edit.new))
        file, _, name = mutant.test.partition("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text("utf-8"), mutant.test


def test_a_change_is_shown_between_its_neighbours():
    for mutant in MUTANTS:
        shown = change(mutant.edit)
        assert shown.count("<del ") == shown.count("<ins ") == 1
        text = html.unescape(re.sub(r"<[^>]+>", "", shown))
        assert mutant.edit.old.strip() in text and mutant.edit.new.strip() in text
        assert 5 <= len(text.splitlines()) <= 6, mutant.title


def test_every_exercise_has_a_solution_that_touches_the_files_it_names():
    assert SOLUTIONS.keys() == {exercise.name for exercise in EXERCISES}
    for exercise in EXERCISES:
        edits = SOLUTIONS[exercise.name]
        assert {edit.file for edit in edits} == set(exercise.files)
        for edit in edits:
            assert (PACKAGE / edit.file).read_text("utf-8").count(edit.old) == 1


@pytest.fixture
def copy(tmp_path):
    """A copy of the repository's code and tests, to change."""
    for name in ("nanopaged", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run_tests(copy, *arguments):
    """The exit status of pytest in a copy.

    0: all pass, 1: some fail, 2: the tests cannot be imported.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, *arguments], cwd=copy, capture_output=True, encoding="utf-8",
        env=os.environ | {"PYTHONPATH": str(copy)})
    assert result.returncode in (0, 1, 2), result.stdout + result.stderr
    return result.returncode


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.title)
def test_a_mutant_is_caught_by_its_test(mutant, copy):
    assert run_tests(copy, mutant.test) == 0
    apply([mutant.edit], copy / "nanopaged")
    assert run_tests(copy, mutant.test) == 1


@pytest.mark.slow
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_an_exercise_can_be_solved_and_is_not_yet(exercise, copy):
    """The tests of the engine that are nearest still pass with it, too."""
    test = copy / f"tests/test_{exercise.name}.py"
    test.write_text(exercise.test, encoding="utf-8")
    assert run_tests(copy, test) != 0
    apply(SOLUTIONS[exercise.name], copy / "nanopaged")
    assert run_tests(copy, test, "tests/test_sampler.py") == 0


# --- the page ---

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Checks that tags are balanced; collects ids, targets and what is loaded."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.ids = []
        self.targets = []
        self.loaded = []
        self.counts = {}
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        self.counts[tag] = self.counts.get(tag, 0) + 1
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            elif tag == "a" and name == "href":
                self.targets.append(value)
            elif name in ("src", "srcset", "data", "poster", "href", "action"):
                self.loaded.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return guide.write(tmp_path_factory.mktemp("tour"))


@pytest.fixture
def text(path):
    return path.read_bytes().decode("ascii")


@pytest.mark.slow
def test_the_page_is_whole(text):
    page = Page(text)
    assert page.counts["h1"] == page.counts["main"] == 1
    assert page.counts["h2"] == len(guide.CHAPTERS) + 2
    assert len(set(page.ids)) == len(page.ids)
    for target in page.targets:
        if target.startswith("#"):
            assert target[1:].split("=")[0] in page.ids, target
        else:
            assert target.startswith("https://arxiv.org/"), target
    assert not re.search(r"\{[a-z_]+\}", re.sub(r"<(style|script)\b.*?</\1>|<pre.*?"
                         r"</pre>", "", text, flags=re.DOTALL)), "a name is left"


@pytest.mark.slow
def test_the_page_loads_nothing(text):
    assert set(Page(text).loaded) <= {"data:,"}
    assert not re.search(r"url\(|@import|\bfetch\(|XMLHttpRequest|importScripts", text)


@pytest.mark.slow
def test_every_run_of_the_page_is_a_trace_that_links_can_reach(text):
    traces = re.findall(
        r'<section class="np-player" id="([^"]+)"[^>]*>'
        r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    steps = {name: {frame["step"] for frame in unfold(json.loads(data)["frames"])}
             for name, data in traces}
    assert len(steps) == 9
    for target in Page(text).targets:
        name, _, step = target.removeprefix("#").partition("=")
        if step and name in steps:
            assert int(step) in steps[name], target
    [opens_at] = re.findall(r'id="swap-run" data-opens-at="(\d+)"', text)
    assert int(opens_at) in steps["swap-run"]


def unfold(frames):
    """A frame without its own step is in the step of the one before."""
    step = 0
    for frame in frames:
        step = frame.get("step", step)
        yield {"step": step}


@pytest.mark.slow
@pytest.mark.browser
def test_in_a_browser_all_runs_check_out_and_nothing_is_requested(path):
    found = json.loads(text_of_element(browse(path, "#check"), "np-check"))
    assert found["errors"] == [] and found["requests"] == []
    assert len(found["players"]) == 9
    assert [player["failures"] for player in found["players"]] == [[]] * 9


@pytest.mark.slow
def test_the_page_says_the_same_numbers_as_the_runs(text):
    prose = html.unescape(re.sub(r"<[^>]+>", "", text))
    assert "counts is [10, 1]" in prose and "ends is [10, 9]" in prose
    assert "samples is [0, 0, 1]" in prose
    assert "counts is [1, 1, 1]" in prose and "copies is [[2, 4]]" in prose
    assert nanopaged.EngineConfig().block_size == 16 and "16 by default" in prose
