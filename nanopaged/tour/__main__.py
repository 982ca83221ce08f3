"""Write the guided tour of nanopaged, in which you learn how LLMs are served: in a
quarter of an hour, or in three hours. It is one HTML page that needs no network.

All runs on it are real. They are made while the page is written, on this machine, with
the small model that comes with the code. That takes ten to thirty seconds, and no GPU.

With --serve, you try prompts and settings of your own in a browser instead. With
--sizes, it prints how many GPUs a model and a load need, and why.
"""

import argparse
import sys
from pathlib import Path

from nanopaged.tour import sizes


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m nanopaged.tour", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "directory", nargs="?", type=Path, default=Path("nanopaged-tour"),
        metavar="DIR", help="where index.html is written; default: %(default)s")
    what.add_argument("--serve", action="store_true",
                      help="serve a page to this machine where you type the prompts")
    parser.add_argument("--port", type=int, default=8000,
                        help="where --serve listens; default: %(default)s")
    what.add_argument("--sizes", action="store_true",
                      help="print how many GPUs a load needs, and why")
    sizing = parser.add_argument_group("with --sizes")
    sizing.add_argument("--model", default=sizes.DATA["defaults"]["model"],
                        help=f"{', '.join(sizes.DATA['models'])}, or a config.json; "
                             "default: %(default)s")
    sizing.add_argument("--gpu", default=sizes.DATA["defaults"]["gpu"],
                        help=f"{', '.join(sizes.DATA['gpus'])}; default: %(default)s")
    for name in sizes.OPTIONS:
        sizing.add_argument(
            f"--{name.replace('_', '-')}", type=float, metavar="N",
            default=sizes.DATA["defaults"][name],
            help=f"{sizes.INPUTS[name][0]}; default: %(default)s")
    options = parser.parse_args(arguments)
    if options.sizes:
        print_sizes(parser, options)
    elif options.serve:
        serve(parser, options.port)
    else:
        write(parser, options.directory)


def print_sizes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    chosen = {name: getattr(options, name) for name in sizes.OPTIONS}
    try:
        print(sizes.table(options.model, options.gpu, **chosen))
    except ValueError as error:
        name, rest = str(error).split(maxsplit=1)
        is_option = name in chosen or name.rstrip(":") in ("model", "gpu")
        parser.error(f"--{name.replace('_', '-')} {rest}" if is_option
                     else f"--model: {error}")


def serve(parser: argparse.ArgumentParser, port: int) -> None:
    from nanopaged.tour import live

    try:
        live.serve(port)
    except (OSError, OverflowError) as error:
        parser.error(f"port {port} cannot be used: {error}")
    except KeyboardInterrupt:
        print("\nThe live page has ended.")


def write(parser: argparse.ArgumentParser, directory: Path) -> None:
    from nanopaged.tour.page import check_writable

    try:
        directory.mkdir(parents=True, exist_ok=True)
        check_writable(directory / "index.html")
    except OSError as error:
        parser.error(f"{directory} must be a directory, new or not: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))

    from nanopaged.tour import guide

    print(f"The tour is in {guide.write(directory, progress)}")


def progress(done: int, count: int, title: str) -> None:
    print(f"[{done}/{count}] {title}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit("\nnanopaged.tour: interrupted")
