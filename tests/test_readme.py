"""The README is true: its code prints what it shows, its files and links exist."""

import ast
import contextlib
import dataclasses
import io
import re
from pathlib import Path

import pytest

import nanopaged

PACKAGE = Path(nanopaged.__file__).parent
ROOT = PACKAGE.parent
README = ROOT / "README.md"
FENCED = re.compile(
    r"^(?P<fence>`{3,})(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=fence)$\n?",
    re.MULTILINE | re.DOTALL,
)


@dataclasses.dataclass
class Block:
    """A fenced block: language, content, first line, and the text before it."""

    language: str
    body: str
    line: int
    before: str  # since the previous block


def fenced_blocks(text):
    blocks, end = [], 0
    for match in FENCED.finditer(text):
        line = text.count("\n", 0, match.start("body")) + 1
        blocks.append(
            Block(match["language"], match["body"], line, text[end : match.start()])
        )
        end = match.end()
    return blocks


def file_table(text):
    """The first cells of the table whose first column is named file."""
    rows = re.search(r"^\| *file *\|.*\n\|[-: |]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert rows, "no table with a column named file"
    return [row.split("|")[1].strip() for row in rows[1].splitlines()]


def links(text):
    """Targets of links and images in Markdown and HTML, outside code."""
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))
    markdown = re.findall(r"\]\(\s*<?([^)>\s]+)", prose) + re.findall(
        r"^ {0,3}\[[^\]]+\]:\s*(\S+)", prose, re.MULTILINE
    )
    return markdown + re.findall(r"\b(?:src|srcset|href)=[\"']([^\"'\s]+)", prose)


def anchors(text):
    """The anchors that GitHub gives the headings."""
    titles = re.findall(r"^#+ +(.+?) *$", FENCED.sub("", text), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
    }


@pytest.fixture(scope="module")
def text():
    return README.read_text(encoding="utf-8")


def test_blocks_tables_and_links_are_found():
    text = (
        "# A title, really\n"
        "[a](b.py#c) ![p](q/r.svg \"t\") `[no](code)` <img src='i.png'>\n"
        "[![x](y.svg)](z)\n[ref]: s.md\n\n"
        "```python\nprint(1)\n[no](link)\n```\n\n```text\n1\n```\n"
        "| file | owns |\n|---|---|\n| `llm.py` | it |\n| [`a.py`](n/a.py) | that |\n"
        "\nEnd\n"
    )

    assert [dataclasses.astuple(block)[:3] for block in fenced_blocks(text)] == [
        ("python", "print(1)\n[no](link)\n", 7),
        ("text", "1\n", 12),
    ]
    assert fenced_blocks(text)[1].before == "\n"
    assert file_table(text) == ["`llm.py`", "[`a.py`](n/a.py)"]
    assert links(text) == ["b.py#c", "q/r.svg", "y.svg", "z", "n/a.py", "s.md", "i.png"]
    assert anchors(text) == {"a-title-really"}


def test_its_python_runs_and_prints_what_it_shows(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = fenced_blocks(text)
    namespace = {"__name__": "readme"}

    compared = 0
    try:
        for block, follower in zip(blocks, [*blocks[1:], None], strict=True):
            if block.language != "python":
                continue
            where = f"README.md, line {block.line}"
            code = compile("\n" * (block.line - 1) + block.body, str(README), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                exec(code, namespace)

            if follower and follower.language == "text" and not follower.before.strip():
                shown = follower.body.rstrip("\n")
                printed = stdout.getvalue().rstrip("\n")
                assert printed == shown, f"{where}: this is not what it prints"
                compared += 1
    finally:
        for value in namespace.values():
            if isinstance(value, nanopaged.LLM):
                value.shutdown()

    languages = [block.language for block in blocks]
    assert languages.count("python") == text.count("```python") > 0, (
        "a Python block was not run"
    )
    assert compared, "no Python block with its output"


def test_its_file_table_is_the_reading_order(text):
    cells = file_table(text)
    names = [
        re.fullmatch(r"\[`(\w+(?:\.py|/))`\]\(nanopaged/([\w./]+)\)", cell)
        for cell in cells
    ]
    assert all(names), cells
    assert all(name[2].startswith(name[1].rstrip("/")) for name in names), cells

    # First the engine's files, as the package's docstring orders them.
    files = [name[1][:-3] for name in names if name[1].endswith(".py")]
    order = re.search(r"Read all files in this order: ([\w,\s]+)\.", nanopaged.__doc__)
    assert files == re.findall(r"\w+", order[1])
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert set(files) == modules - {"__init__", "__main__"}

    # Then the folders beside them.
    folders = [name[1] for name in names[len(files) :]]
    found = {f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir()}
    assert set(folders) == found - {"__pycache__/"}


def definitions(path):
    """All names that a file defines: `function`, `Class` and `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            names.update(f"{node.name}.{method.name}" for method in methods)
    return names


def test_everything_its_map_of_the_paper_names_exists(text):
    rows = re.findall(r"^\| \d(?:\.\d)? [^|]*\|(.*)\|$", text, re.MULTILINE)
    files = []
    for row in rows:
        # A file, and what follows it up to the next one.
        defined = None
        for name in re.findall(r"`([\w./]+)`", row):
            if name.endswith(".py"):
                files.append(name)
                defined = definitions(PACKAGE / name)
            else:
                assert defined is not None, f"{row}: no file"
                assert name in defined, f"{row}: no {name}"
        assert defined, f"{row}: no file"
    assert len(rows) >= 12 and len(set(files)) >= 8


def test_its_links_lead_somewhere(text):
    relative = [link for link in links(text) if not re.match(r"[a-z]+:", link)]
    assert any(link.endswith((".svg", ".png")) for link in relative), "no picture"
    for link in relative:
        path, _, anchor = link.partition("#")
        assert not path.startswith("/") and (ROOT / path).resolve().is_relative_to(
            ROOT
        ), link
        assert (ROOT / path).exists(), f"{link}: no such file"
        assert path or anchor in anchors(text), f"{link}: no such heading"
