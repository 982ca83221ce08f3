"""`python -m nanopaged.tour`: write the guided tour."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nanopaged.tour.page import check_writable

DESCRIPTION = """\
Write the guided tour of nanopaged: an hour, or a little more if you read all the code,
in which you learn how LLMs are served. It is one HTML page that needs no network.

All runs on it are real. They are made while the page is written, on this machine, with
the small model that comes with the code. That takes about a minute and needs no GPU.
"""


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m nanopaged.tour", description=DESCRIPTION,
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


if __name__ == "__main__":
    main(sys.argv[1:])
