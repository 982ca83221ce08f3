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
from collections import namedtuple
from pathlib import Path

import pytest

import nanopaged
from helpers import FUNCTIONS, ROOT, SOLUTIONS, code_lines, run_python

PACKAGE = ROOT / "nanopaged"
# The engine is the top level and gpu/. What stands around it are the other folders, and
# each may import what stands before it here, too.
MAY_IMPORT = {
    "": set(), "gpu": {""}, "cpu": {""}, "loading": {"", "cpu", "gpu"},
    "frontend": {"", "loading"}}
SOURCES = {folder: sorted((PACKAGE / folder).glob("*.py")) for folder in MAY_IMPORT}
# The engine in one file counts by itself.
SMALLEST = PACKAGE / "smallest.py"
ENGINE, EVERYTHING = ([path for path in paths if path != SMALLEST] for paths in (
    SOURCES[""] + SOURCES["gpu"], sum(SOURCES.values(), [])))
TESTS = sorted({*(ROOT / "tests").rglob("*.py")}.difference(SOLUTIONS.rglob("*.py")))
# The most code lines of each part. They may only be lowered.
CEILINGS = {
    "smallest": 150,
    "engine": 1613,
    "loading": 577,
    "any_decoder": 187,
    "cpu": 305,
    "frontend": 492,
    "all": 3174,
    "tour": 1677,
    "paper": 369,
    "tests": 5535,
    "all tests": 8679,
}


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


@pytest.mark.upstream
@pytest.mark.parametrize("name", CEILINGS)
def test_no_part_grows(name):
    """In loading/, what serves any decoder of transformers counts by itself."""
    decoder = [PACKAGE / f"loading/{stem}.py" for stem in ("any_decoder", "states")]
    parts = {"engine": ENGINE, "all": EVERYTHING, "all tests": TESTS,
             "smallest": [SMALLEST],
             "any_decoder": filter(Path.exists, decoder),
             "tests": (ROOT / "tests").glob("*.py")}
    for folder in ("loading", "cpu", "frontend", "tour", "paper"):
        parts[folder] = {*(PACKAGE / folder).rglob("*.py")}.difference(decoder)
    counts = count(parts[name])
    lines, most = sum(counts.values()), CEILINGS[name]
    assert lines <= most, (
        f"{name} has {lines} code lines, and this number only falls: it was {most}. "
        f"Leave out what is no longer needed. {counts}")


@pytest.mark.upstream
@pytest.mark.parametrize("path", [SMALLEST, *EVERYTHING], ids=lambda path: path.stem)
def test_functions_stay_short(path):
    most = 60 if path.stem in ("kernels", "paged_attention") else 40
    code = code_lines(read(path))
    for node in ast.walk(parse(path)):
        if isinstance(node, FUNCTIONS):
            length = len(code & set(range(node.lineno, node.end_lineno + 1)))
            assert length <= most, f"{node.name} has {length} lines"


# -- Imports ---------------------------------------------------------------------------


def imports(path):
    """All modules that a file imports, wherever it does."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found = PACKAGE.parent.joinpath(*node.module.split("."))
            yield from names if found.is_dir() else [node.module]


@pytest.mark.upstream
def test_folders_import_downward():
    """And the top level imports no folder. Only the package's own names are taken from
    the front end.
    """
    for folder, paths in SOURCES.items():
        for path in paths:
            upward = {"/".join(module.split(".")[1:-1]) for module in imports(path)
                      if module.startswith("nanopaged.")} - MAY_IMPORT[folder]
            upward.discard(folder)
            assert not upward or path == PACKAGE / "__init__.py", f"{path}: {upward}"


@pytest.mark.upstream
def test_scheduling_knows_no_tensors():
    for name in ("config", "sequence", "block_manager", "scheduler", "beam_search"):
        roots = {module.split(".")[0] for module in imports(PACKAGE / f"{name}.py")}
        assert not roots & {"torch", "numpy", "transformers", "triton"}, name


# -- What could be left out ------------------------------------------------------------

SERVE = """
from nanopaged import LLM, SamplingParams
with LLM(dtype="float32", device="cpu", num_blocks=64) as llm:
    params = SamplingParams(temperature=0, max_tokens=4)
    print(llm.generate([[10, 20, 30]], params, use_tqdm=False)[0].outputs[0].token_ids)
"""


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["cpu", "gpu", "paper", "tour", "frontend"])
def test_the_engine_runs_without(folder, readme, warm, tmp_path):
    """Without the CPU's folder, torch computes everything. Without the front end, a
    script that stands in the README serves token ids.
    """
    shutil.copytree(PACKAGE, tmp_path / "nanopaged")
    shutil.rmtree(tmp_path / "nanopaged" / folder)
    code, expected = SERVE, "[12, 199, 41, 70]"
    if folder == "frontend":
        (code,) = [block.body for block in fenced_blocks(readme)
                   if "engine.step()" in block.body]
        assert len(code.split("\n")) <= 15
        expected = "[10, 20, 30, 12, 199, 41, 70, 344, 277, 360, 298]"
    status, printed = warm("-c", code, cwd=tmp_path)
    assert (status, printed.strip()) == (0, expected)


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
    """The files of the top level, in the order of the README."""
    rows = r"^\d+\. \[`(\w+)\.py`\]\(nanopaged/\1\.py\): "
    return re.findall(rows, read(ROOT / "README.md"), re.M)


@pytest.mark.upstream
def test_the_readme_is_short_and_knows_the_size_of_the_engine(readme):
    assert len(readme.split()) <= 1300
    shown = re.search(r"([\d,]+) lines\s+of\s+Python", readme)
    lines = sum(count(ENGINE).values())
    assert shown and abs(int(shown[1].replace(",", "")) - lines) <= 20, lines


@pytest.mark.upstream
def test_the_map_has_all_files_and_folders(readme):
    order = reading_order()
    stems = {path.stem for path in SOURCES[""]} - {"__init__", "__main__"}
    assert set(order) == stems and len(set(order)) == len(order)
    (said,) = re.findall(r"in this order: ([\w,\s]+)\.", nanopaged.__doc__)
    assert re.findall(r"\w+", said) == order
    listed = re.findall(r"^#     (\w+)\.py  ", read(SMALLEST), re.M)
    assert ["smallest", *listed] == order
    folders = [path.name for path in PACKAGE.iterdir() if path.is_dir()]
    assert all(f"[`{name}/`]" in readme for name in folders if name.isalpha())


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
    run_python("-m", "tarfile", "-e", sdist, str(tmp_path))
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
        assert not [name for name in sys.modules
                    if name.startswith(("nanopaged.tour", "nanopaged.paper"))]
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
