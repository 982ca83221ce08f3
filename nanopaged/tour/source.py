"""Excerpts of the engine's source, found by the name of what they show.

    excerpt("block_manager:BlockManager.grow", "table.append")

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
    """What a symbol of the package stands for: "llm:LLM._step", or "llm.LLM._step"."""
    return resolve_name(f"nanopaged.{symbol}")


def source_lines(symbol: str) -> list[str]:
    """The lines of a function or class, at indentation 0, without its docstring."""
    lines = textwrap.dedent(inspect.getsource(find(symbol))).splitlines()
    definition: Any = ast.parse("\n".join(lines)).body[0]
    if ast.get_docstring(definition) is not None:
        docstring = definition.body[0]
        del lines[docstring.lineno - 1 : docstring.end_lineno]
    return lines


def excerpt(symbol: str, line: str) -> dict[str, Any]:
    """The lines around the first one that contains `line`, and where they are from.

    Returns {"file", "name", "lines", "at"}; `at` is the index of that line.
    """
    lines = source_lines(symbol)
    found = [index for index, text in enumerate(lines) if line in text]
    if not found:
        raise ValueError(f"{symbol} has no line with {line!r}")
    at = found[0]
    first = max(0, at - NUM_AROUND)
    shown = lines[first : at + NUM_AROUND + 1]
    if first > 0:
        shown = [*signature(lines), "    ...", *shown]
    module_name, _, name = symbol.partition(":")
    return {
        "file": f"nanopaged/{module_name}.py",
        "name": name,
        "lines": shown,
        "at": len(shown) - len(lines[at : at + NUM_AROUND + 1]),
    }


def signature(lines: list[str]) -> list[str]:
    """The first lines, up to the colon that ends the definition."""
    last = next(index for index, text in enumerate(lines) if text.endswith(":"))
    return lines[: last + 1]
