"""Excerpts of the engine's source, found by the name of what they show.

    excerpt("block_manager.BlockManager.grow", "table.append")

A name or a line that does not exist any more is an error, so prose that quotes the
source cannot outlive it.
"""

import ast
import inspect
import textwrap
from pkgutil import resolve_name
from typing import Any

NUM_AROUND = 4  # lines shown before and after the one that matters


def find(symbol: str) -> Any:
    """What a symbol of the package stands for, such as "llm.LLM._step"."""
    found = resolve_name(f"nanopaged.{symbol}")
    found = getattr(found, "py_func", found)  # what Numba compiles
    return getattr(found, "fget", found)  # of a property


def source(symbol: str) -> str:
    """The source of a function or class, at indentation 0."""
    return textwrap.dedent(inspect.getsource(inspect.unwrap(find(symbol)))).rstrip()


def place(symbol: str) -> tuple[str, str]:
    """The file that a symbol is in, and its name there."""
    module = find(symbol).__module__.removeprefix("nanopaged.")
    return module.replace(".", "/") + ".py", symbol.removeprefix(f"{module}.")


def excerpt(symbol: str, line: str) -> dict[str, Any]:
    """The lines around the first one that contains `line`, and where they are from.

    Returns {"file", "name", "lines", "at"}; `at` is the index of that line.
    """
    lines = source(symbol).splitlines()
    definition: Any = ast.parse("\n".join(lines)).body[0]
    signature = lines[: definition.body[0].lineno - 1]
    if ast.get_docstring(definition) is not None:
        docstring = definition.body[0]
        del lines[docstring.lineno - 1 : docstring.end_lineno]
    at = next((index for index, text in enumerate(lines) if line in text), None)
    if at is None:
        raise ValueError(f"{symbol} has no line with {line!r}")
    first = max(0, at - NUM_AROUND)
    shown = lines[first : at + NUM_AROUND + 1]
    if first > 0:
        shown = [*signature, "    ...", *shown]
    file, name = place(symbol)
    return {"file": f"nanopaged/{file}", "name": name, "lines": shown,
            "at": len(shown) - len(lines[at : at + NUM_AROUND + 1])}
