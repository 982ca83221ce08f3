"""The engine's source, found by the name of what is shown.

    source("block_manager.BlockManager.grow")

A name that does not exist any more is an error, so prose that quotes the source cannot
outlive it.
"""

import inspect
import textwrap
from importlib.resources import files
from pkgutil import resolve_name
from typing import Any


def find(symbol: str) -> Any:
    """What a symbol of the package stands for, such as "engine.Engine.step"."""
    found = resolve_name(f"nanopaged.{symbol}")
    found = getattr(found, "py_func", found)  # what Numba compiles
    return getattr(found, "fget", found)  # of a property


def source(symbol: str) -> str:
    """The source of a function or class, at indentation 0, or a file's text."""
    if symbol.endswith(".py"):  # which may need a package that is not installed
        return files("nanopaged").joinpath(symbol).read_text("utf-8")
    code = inspect.getsource(inspect.unwrap(find(symbol)))
    return textwrap.dedent(code).rstrip()


def place(symbol: str) -> tuple[str, str]:
    """The file that a symbol is in, and its name there."""
    module = find(symbol).__module__
    name = symbol.removeprefix(module.removeprefix("nanopaged.") + ".")
    return module.replace(".", "/") + ".py", name
