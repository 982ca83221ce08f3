"""What the package promises as source: its size, its shape, and that it imports.

The engine stays small, imports have no cycles, the scheduling parts know
no tensors, and a machine without triton can import the package.
"""

import ast
import io
import tokenize
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import nanopaged
from helpers import run_python

PACKAGE = Path(nanopaged.__file__).parent
SOURCES = sorted(PACKAGE.glob("*.py"))
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

MOST_LINES = 3120
MOST_NODES_PER_LINE = 11.5  # of the syntax tree: 13.3 was more than readers can decode


def code_lines(source):
    """The numbers of the lines that are not blank, comment or docstring."""
    docstrings = set()
    code = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, DOCUMENTED)
            and ast.get_docstring(node, clean=False) is not None
        ):
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return code - docstrings


def test_code_lines_are_counted_without_blanks_comments_and_docstrings():
    source = (
        '"""Doc.\n\nMore."""\n\nx = 1  # why\n# what\n'
        'def f():\n    """Doc."""\n    return (\n        x)\n'
    )
    assert code_lines(source) == {5, 7, 9, 10}


def test_the_package_stays_small_and_its_lines_stay_short():
    """Kernels are dense by nature: their lines count, their nodes do not."""
    counts = {path.name: len(code_lines(path.read_text())) for path in SOURCES}
    assert 500 < sum(counts.values()) <= MOST_LINES, counts

    plain = [path for path in SOURCES if "kernel" not in path.name]
    nodes = sum(len(list(ast.walk(ast.parse(path.read_text())))) for path in plain)
    lines = sum(counts[path.name] for path in plain)
    assert nodes / lines <= MOST_NODES_PER_LINE, nodes / lines


def test_the_core_is_one_sitting():
    """The files that README.md names for one sitting, and where to stop in them."""
    core = {
        "llm": "# -- Requests one by one",
        "sequence": None,
        "block_manager": None,
        "scheduler": None,
        "model_runner": "# -- CUDA graphs",
        "attention": None,
        "cpu_kernels": None,
        "model": None,
    }
    num_lines = 0
    for name, end in core.items():
        source = (PACKAGE / f"{name}.py").read_text()
        end_line = source[: source.index(end)].count("\n") if end else len(source)
        num_lines += sum(line <= end_line for line in code_lines(source))
    assert 1200 < num_lines <= 1300, num_lines


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_function_has_more_than_60_code_lines(path):
    source = path.read_text()
    lines = code_lines(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, FUNCTIONS):
            count = len(lines & set(range(node.lineno, node.end_lineno + 1)))
            assert count <= 60, (
                f"{path.name}:{node.lineno} {node.name} has {count} lines"
            )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_file_has_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


# --- imports ---


def imported(path):
    """All modules that a file imports anywhere, as dotted names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: a relative import"
            names.add(node.module)
            if node.module == "nanopaged":
                names.update(f"nanopaged.{alias.name}" for alias in node.names)
    return names


def own(path):
    names = {
        name.split(".")[1] for name in imported(path) if name.startswith("nanopaged.")
    }
    return names & {source.stem for source in SOURCES}


def test_imports_have_no_cycles():
    graph = {path.stem: own(path) for path in SOURCES}
    assert graph["__init__"] >= {"llm", "config"}
    assert "scheduler" in graph["llm"]
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_only_the_package_itself_imports_the_engine():
    assert [path.stem for path in SOURCES if "llm" in own(path)] == ["__init__"]


@pytest.mark.parametrize("name", ["config", "sequence", "block_manager", "scheduler"])
def test_scheduling_knows_no_tensors(name):
    names = imported(PACKAGE / f"{name}.py")
    roots = {module.split(".")[0] for module in names}
    assert not roots & {"torch", "numpy", "transformers", "triton"}
    assert not names & {
        "nanopaged.model",
        "nanopaged.attention",
        "nanopaged.model_runner",
    }


@pytest.mark.parametrize("name", ["config", "block_manager", "detokenizer"])
def test_the_plainest_parts_stand_alone(name):
    assert own(PACKAGE / f"{name}.py") <= {"config", "sequence"}


@pytest.mark.parametrize("absent", [["triton"], ["triton", "flash_attn"]], ids="-".join)
def test_it_imports_where_optional_packages_are_absent(absent):
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in absent)
    code = f"import sys; {blocked}import nanopaged; print(nanopaged.LLM.__name__)"
    assert run_python("-c", code).strip() == "LLM"


def test_importing_it_leaves_the_gpu_and_torch_alone():
    code = (
        "import torch; before = torch.get_default_dtype(), torch.get_num_threads()\n"
        "import nanopaged\n"
        "print((torch.get_default_dtype(), torch.get_num_threads()) == before, "
        "torch.cuda.is_initialized())"
    )
    assert run_python("-c", code).strip() == "True False"


# --- the public names ---


def test_the_public_names_are_sorted_and_complete():
    names = nanopaged.__all__
    # As ruff sorts them: constants, then classes, then the rest, each by name.
    kinds = [(not name.isupper(), not name[0].isupper(), name) for name in names]
    assert kinds == sorted(kinds)
    assert len(set(names)) == len(names)

    (init,) = [path for path in SOURCES if path.stem == "__init__"]
    taken = [
        alias.asname or alias.name
        for node in ast.walk(ast.parse(init.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("nanopaged")
        for alias in node.names
    ]

    assert sorted(set(taken)) == sorted(names)


def test_what_users_need_is_public():
    assert {"LLM", "SamplingParams", "RequestOutput", "CompletionOutput"} <= set(
        nanopaged.__all__
    )
    for name in nanopaged.__all__:
        assert getattr(nanopaged, name).__doc__, f"{name} has no docstring"


def test_it_is_marked_as_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_the_scheduler_needs_no_torch():
    """It decides with plain numbers, and can be read and run without tensors."""
    code = (
        "import sys, nanopaged.scheduler, nanopaged.block_manager\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    run_python("-c", code)


def test_an_unknown_name_in_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'LLMM'"):
        nanopaged.LLMM  # noqa: B018
