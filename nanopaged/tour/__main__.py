"""`python -m nanopaged.tour`: the guided tour, and two small tools beside it."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nanopaged.tour.page import check_writable

DESCRIPTION = """\
Write the guided tour of nanopaged: an hour in which one learns how LLMs are served.

It is one HTML page that needs no network. All runs on it are real: they are made
while the page is written, on this machine, with the small model that comes with the
code. That takes less than a minute and needs no GPU.
"""
EXAMPLES = """\
other commands:
  python -m nanopaged.tour kv CONFIG    how much memory the K and V of a model need
  python -m nanopaged.tour picture DIR  the README's picture, from a frame of a real run

examples:
  python -m nanopaged.tour              writes nanopaged-tour/index.html
  python -m nanopaged.tour docs         writes docs/index.html
  python -m nanopaged.tour kv ~/models/Qwen3-8B --tokens 4096 --seqs 8 --memory 24
"""


def main(arguments: Sequence[str]) -> None:
    """Run a command; the first word names it, and without a name it is the tour."""
    commands: dict[str, Callable[[Sequence[str]], None]] = {
        "kv": kv_command, "picture": picture_command}
    name = arguments[0] if arguments else ""
    if name in commands:
        commands[name](arguments[1:])
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
    make_directory(parser, directory, "index.html")

    from nanopaged.tour.guide import write

    print(f"The tour is in {write(directory, progress)}")


def make_directory(parser: argparse.ArgumentParser, directory: Path, name: str) -> None:
    """End with a sentence if no file of this name can be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        check_writable(directory / name)
    except OSError as error:
        parser.error(f"{directory} must be a directory, new or not: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))


def progress(done: int, count: int, title: str) -> None:
    print(f"[{done}/{count}] {title}", file=sys.stderr, flush=True)


def kv_command(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m nanopaged.tour kv",
        description="How much memory the K and V of a model need. It reads the "
        "config.json alone: no weights, and no model is made.")
    parser.add_argument(
        "config", help="a config.json, or a directory that has one", metavar="CONFIG")
    parser.add_argument(
        "--tokens", type=positive_int, default=4096,
        help="in a sequence, prompt and output together; default: %(default)s")
    parser.add_argument(
        "--seqs", type=positive_int, default=8, help="sequences; default: %(default)s")
    parser.add_argument(
        "--memory", type=positive_float, default=24,
        help="GiB that K and V may take; default: %(default)s")
    parser.add_argument(
        "--dtype", help="of K and V, if it is not the checkpoint's: float16, ...")
    options = parser.parse_args(arguments)

    from nanopaged.tour import kv

    try:
        shape = kv.read_shape(options.config, options.dtype)
    except ValueError as error:
        parser.error(str(error))
    print(kv.describe(shape, options.tokens, options.seqs, options.memory))


def picture_command(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m nanopaged.tour picture",
        description="Draw the README's picture from a frame of a real run, as SVG.")
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="where the picture is written")
    directory = parser.parse_args(arguments).directory

    from nanopaged.tour import picture

    make_directory(parser, directory, picture.NAME)
    print(f"The picture is in {picture.write(directory)}")


def positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def positive_float(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return number


if __name__ == "__main__":
    main(sys.argv[1:])
