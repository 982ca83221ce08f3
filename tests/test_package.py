"""What the package promises as a whole: that it stays small, that the README is true,
and that what is published is complete.

A fork may well fail the gates marked upstream, which are about this repository's size
and README. They run with `-m upstream`.
"""

import ast
import contextlib
import io
import re
import shutil
import tokenize
from collections import namedtuple
from graphlib import TopologicalSorter

import pytest

import nanopaged
from helpers import FUNCTIONS, ROOT, code_lines, run_python

PACKAGE = ROOT / "nanopaged"
SOURCES = {path.stem: path for path in sorted(PACKAGE.glob("*.py"))}

# Whoever reads a file has read these before it, or looks them up. So any file may
# import them.
FIRST = {"config", "outputs", "sequence"}
# These also import what stands above them in the README's first list.
UPWARD = {
    "batch": {"block_manager"}, "scheduler": {"batch", "block_manager"},
    "beam_search": {"block_manager"}, "model_runner": {"batch"}}


def read(path):
    return path.read_text(encoding="utf-8")


def parse(path):
    return ast.parse(read(path))


def files():
    """All files of the repository that someone wrote."""
    patterns = ("*.md", "*.py", "nanopaged/**/*", "tests/**/*", ".github/**/*")
    found = [path for pattern in patterns for path in ROOT.glob(pattern)
             if path.is_file()
             and not re.search(r"__pycache__|/\.", path.relative_to(ROOT).as_posix())]
    return [ROOT / "LICENSE", ROOT / "pyproject.toml", *found]


# -- Size ------------------------------------------------------------------------------


def count(paths):
    """{path: number of code lines}."""
    return {str(path): len(code_lines(read(path))) for path in paths}


def test_code_lines_are_counted_without_blanks_comments_and_docstrings():
    source = ('"""Doc.\n\nMore."""\n\nx = 1  # why\n# what\n'
              'def f():\n    """Doc."""\n    return (\n        x)\n')
    assert code_lines(source) == {5, 7, 9, 10}


@pytest.mark.upstream
def test_the_engine_stays_small():
    counts = count(SOURCES.values())
    assert 500 < sum(counts.values()) <= 2090, counts
    tour = count((PACKAGE / "tour").rglob("*.py"))
    assert sum(tour.values()) <= 1970, "the tour stays smaller than the engine"


@pytest.mark.upstream
def test_the_first_reading_takes_two_hours():
    lengths = {name: len(read(SOURCES[name]).splitlines())
               for name in reading_order()[0]}
    assert max(lengths.values()) <= 200 and sum(lengths.values()) <= 1500, lengths


@pytest.mark.upstream
def test_its_lines_stay_short():
    """Nodes of the syntax tree; kernels are dense by nature."""
    plain = [path for name, path in SOURCES.items() if "kernels" not in name]
    nodes = sum(1 for path in plain for _ in ast.walk(parse(path)))
    assert nodes / sum(count(plain).values()) <= 11.3


@pytest.mark.upstream
@pytest.mark.parametrize("name", SOURCES)
def test_its_functions_stay_short(name):
    most = 60 if "kernels" in name else 40
    code = code_lines(read(SOURCES[name]))
    for node in ast.walk(parse(SOURCES[name])):
        if isinstance(node, FUNCTIONS):
            length = len(code & set(range(node.lineno, node.end_lineno + 1)))
            assert length <= most, f"{node.name} has {length} lines"


@pytest.mark.upstream
def test_the_tests_stay_small():
    counts = count((ROOT / "tests").glob("*.py"))
    assert {name: lines for name, lines in counts.items() if lines > 500} == {}
    assert sum(counts.values()) <= 5630, counts
    counts = count((ROOT / "tests/gpu").glob("*.py"))
    assert sum(counts.values()) <= 900, counts


# -- Imports and names -----------------------------------------------------------------


def imports(name):
    """All modules that a file of the engine imports, wherever it does."""
    for node in ast.walk(parse(SOURCES[name])):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: a relative import"
            names = [f"nanopaged.{alias.name}" for alias in node.names]
            yield from names if node.module == "nanopaged" else [node.module]


def own_imports(name):
    return {module.split(".")[1] for module in imports(name)
            if module.startswith("nanopaged.")}


@pytest.mark.upstream
def test_imports_point_downward():
    """A file of the second reading may import any of the first."""
    first, second = reading_order()
    for order, known in ((first, FIRST), (second, FIRST | {*first})):
        for name in order:
            upward = own_imports(name) & {*first, *order[: order.index(name)]}
            upward -= {*order[order.index(name) :]} | known | UPWARD.get(name, set())
            assert not upward, f"{name}.py imports {upward}"
    graph = {name: own_imports(name) for name in SOURCES}
    assert set().union(*graph.values()) <= set(SOURCES), "it imports what is beside it"
    list(TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.upstream
def test_scheduling_knows_no_tensors():
    for name in ("config", "sequence", "block_manager", "scheduler", "beam_search"):
        roots = {module.split(".")[0] for module in imports(name)}
        assert not roots & {"torch", "numpy", "transformers", "triton"}, name


def test_files_and_public_names_have_docstrings():
    for name, path in SOURCES.items():
        assert ast.get_docstring(parse(path)), name
    for name in nanopaged.__all__:
        public = getattr(nanopaged, name)
        methods = [value for key, value in vars(public).items()
                   if callable(value) and not key.startswith("_")]
        assert public.__doc__, name
        assert [method for method in methods if not method.__doc__] == []


# -- The README ------------------------------------------------------------------------

Block = namedtuple("Block", "language body before")  # and the text before it


@pytest.fixture(scope="module")
def readme():
    return read(ROOT / "README.md")


def fenced_blocks(text):
    blocks, end = [], 0
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$\n?", text, re.M | re.S):
        blocks.append(Block(found[1], found[2], text[end : found.start()]))
        end = found.end()
    return blocks


def reading_order():
    """The files of the engine, in the order of the README's two lists."""
    rows = r"^\d+\. \[`(\w+)\.py`\]\(nanopaged/\1\.py\): "
    text = read(ROOT / "README.md").partition("**Second reading")
    return [re.findall(rows, half, re.M) for half in (text[0], text[2])]


def names(path):
    """All names in a file's code, but not those in its comments and strings."""
    tokens = tokenize.generate_tokens(io.StringIO(read(path)).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


@pytest.mark.upstream
def test_the_readme_is_short_and_knows_the_size_of_the_engine(readme):
    assert len(readme.split()) <= 1750
    shown = re.search(r"([\d,]+) lines\s+of\s+Python", readme)
    lines = sum(count(SOURCES.values()).values())
    assert shown and abs(int(shown[1].replace(",", "")) - lines) <= 50, lines


@pytest.mark.upstream
def test_the_reading_order_has_all_files(readme):
    first, second = reading_order()
    order = first + second
    assert set(order) == set(SOURCES) - {"__init__"} and len(set(order)) == len(order)
    said = re.findall(r"reading, [\w,\s]+: ([\w,\s]+)\.", nanopaged.__doc__)
    assert [re.findall(r"\w+", names) for names in said] == [first, second]
    folders = [path.name for path in PACKAGE.iterdir() if path.is_dir()]
    assert all(f"[`{name}/`]" in readme for name in folders if name.isalpha())


@pytest.mark.upstream
def test_the_loop_is_the_one_in_the_readme(readme):
    (step,) = [node for node in ast.walk(parse(SOURCES["llm"]))
               if isinstance(node, FUNCTIONS) and node.name == "_step"]
    (shown,) = [block.body for block in fenced_blocks(readme)
                if "scheduler.schedule()" in block.body]
    body = [ast.unparse(line) for line in step.body[1:]]  # below the docstring
    assert body == [ast.unparse(line) for line in ast.parse(shown).body]


@pytest.mark.upstream
def test_all_that_its_tables_name_exists(readme):
    num_symbols = 0
    for row in re.findall(r"^\|.*\|$", readme, re.M):
        named = re.findall(r"`([\w./]*\w)`", row)
        paths = [PACKAGE / name for name in named if name.endswith(".py")]
        known = set().union(*map(names, paths or SOURCES.values()))
        symbols = {part for name in named if not name.endswith(".py")
                   for part in name.split(".")}
        assert symbols <= known, f"{row}: no {symbols - known}"
        num_symbols += len(symbols)
    assert num_symbols > 15


@pytest.mark.upstream
def test_its_links_pictures_and_commands_lead_somewhere(readme):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", readme)
             if not re.match(r"[a-z]+:", link)]
    assert any(link.endswith(".svg") for link in links)
    for link in links + re.findall(r"python (\S+\.py)", readme):
        path = (ROOT / link.partition("#")[0]).resolve()
        assert path.exists() and path.is_relative_to(ROOT), link


@pytest.mark.upstream
def test_its_python_prints_what_it_shows(readme, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = fenced_blocks(readme)
    names = {"__name__": "readme"}
    shown, printed = [], []
    for block, follower in zip(blocks, blocks[1:], strict=False):
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                exec(compile(block.body, "README.md", "exec"), names)
            if follower.language == "text" and not follower.before.strip():
                shown.append(follower.body)
                printed.append(stdout.getvalue())
    names["llm"].shutdown()
    assert printed == shown and len(shown) >= 2


# -- What is published -----------------------------------------------------------------


@pytest.mark.upstream
def test_what_is_published_is_complete(tmp_path):
    """A source distribution, the wheel that is built from it, and what that imports.

    The optional packages need not be there.
    """
    pytest.importorskip("hatchling", reason="pip install hatchling")
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path))
    shutil.unpack_archive(sdist, tmp_path, filter="data")
    root = tmp_path / f"nanopaged-{nanopaged.__version__}"
    expected = {path.relative_to(ROOT).as_posix() for path in files()}
    assert [name for name in expected if not (root / name).exists()] == []

    (wheel,) = WheelBuilder(str(root)).build(directory=str(tmp_path))
    installed = tmp_path / "installed"
    shutil.unpack_archive(wheel, installed, "zip")
    code = """if True:
        import sys
        for name in ("triton", "flash_attn", "fastapi"):
            sys.modules[name] = None
        import torch
        before = torch.get_default_dtype(), torch.get_num_threads()
        import nanopaged
        assert (torch.get_default_dtype(), torch.get_num_threads()) == before
        assert not torch.cuda.is_initialized()
        assert not [name for name in sys.modules if name.startswith("nanopaged.tour")]
        llm = nanopaged.LLM(dtype="float32", device="cpu")
        params = nanopaged.SamplingParams(temperature=0, max_tokens=4)
        (output,) = llm.generate("KING:", params, use_tqdm=False)
        print(nanopaged.__file__, len(output.outputs[0].token_ids))"""
    printed = run_python("-c", code, cwd=tmp_path, PYTHONPATH=str(installed))
    assert printed.split() == [str(installed / "nanopaged/__init__.py"), "4"]


def test_no_file_names_a_place_on_a_machine():
    places = re.compile(r"/(?:home|Users|root)/\w|" + re.escape(f"{ROOT}/"))
    found = []
    for path in files():
        with contextlib.suppress(UnicodeDecodeError):  # a binary file
            found += [f"{path.relative_to(ROOT)}: {line:.80}"
                      for line in read(path).splitlines() if places.search(line)]
    assert found == []
