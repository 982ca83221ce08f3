"""`python -m nanopaged.tour`: the guided tour, and the memory that K and V need."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nanopaged.tour.page import check_writable

DESCRIPTION = """\
Write the guided tour of nanopaged: an hour in which you learn how LLMs are served.

It is one HTML page that needs no network. All runs on it are real. They are made while
the page is written, on this machine, with the small model that comes with the code.
That takes about a minute and needs no GPU.
"""
EXAMPLES = """\
another command:
  python -m nanopaged.tour kv CONFIG    how much memory the K and V of a model need

examples:
  python -m nanopaged.tour              writes nanopaged-tour/index.html
  python -m nanopaged.tour docs         writes docs/index.html
  python -m nanopaged.tour kv ~/models/Qwen3-8B --tokens 4096 --seqs 8 --memory 24
"""


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["kv"]:
        kv_command(arguments[1:])
    else:
        tour_command(arguments)


def tour_command(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m nanopaged.tour", description=DESCRIPTION, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "directory", nargs="?", type=Path, default=Path("nanopaged-tour"),
        metavar="DIR", help="where index.html is written; default: %(default)s")
    directory = parser.parse_args(arguments).directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        check_writable(directory / "index.html")
    except OSError as error:
        parser.error(f"{directory} must be a directory, new or not: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))

    from nanopaged.tour.guide import write

    print(f"The tour is in {write(directory, progress)}")


def progress(done: int, count: int, title: str) -> None:
    print(f"[{done}/{count}] {title}", file=sys.stderr, flush=True)


def kv_command(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m nanopaged.tour kv",
        description="How much memory the K and V of a model need. Only its config.json "
        "is read: no weights are loaded.")
    add = parser.add_argument
    add("config", help="a config.json, or a directory that has one", metavar="CONFIG")
    add("--tokens", type=positive, default=4096,
        help="in a sequence, prompt and output together; default: %(default)s")
    add("--seqs", type=positive, default=8, help="sequences; default: %(default)s")
    add("--memory", type=positive, default=24,
        help="GiB that K and V may take; default: %(default)s")
    options = parser.parse_args(arguments)

    from nanopaged.tour import kv

    try:
        shape = kv.read_shape(options.config)
    except ValueError as error:
        parser.error(str(error))
    print(kv.describe(shape, options.tokens, options.seqs, options.memory))


def positive(text: str) -> float:
    number = int(text) if text.isdecimal() else float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return number


if __name__ == "__main__":
    main(sys.argv[1:])
