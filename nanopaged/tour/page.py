"""The page that plays a trace: one file, which opens without a network.

`player.js` draws it and `player.css` says how it looks; this file only puts them and
the trace together. Text from prompts is never markup: the trace is JSON in which "<" is
escaped, so that no prompt can end it, and the player makes text nodes of it.
"""

import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

Header: TypeAlias = dict[str, Any]  # of a trace: all but its frames

HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
"""


def page(header: Header, frames: list[str]) -> str:
    """A whole page that shows one trace."""
    title = html.escape(header["title"]).encode("ascii", "xmlcharrefreplace").decode()
    head = HEAD.format(title=title)
    body = f'<body class="np-page">\n{embed(header, frames, "step")}</body>\n'
    return f"{head}{assets()}</head>\n{body}</html>\n"


def embed(
    header: Header, frames: list[str], ident: str, opens_at: int | None = None
) -> str:
    """One player, as a part of a larger page that has the `assets` once.

    header, frames: those of a trace; a frame is JSON already.
    ident: an id that no other element of the page has. A link to "#ident=12" leads to
    step 12 of this player.
    opens_at: the step at which it opens; None is the first with something to see.
    """
    start = json.dumps(header, separators=(",", ":"))
    text = ",\n".join(frames)
    data = f'{start[:-1]},"frames":[\n{text}]}}'.replace("<", "\\u003c")
    name = html.escape(ident)
    opens = "" if opens_at is None else f' data-opens-at="{opens_at}"'
    return (
        f'<section class="np-player" id="{name}"{opens}>'
        f'<script type="application/json">{data}</script>'
        "<noscript>This run is played by JavaScript, which is off.</noscript>"
        "</section>\n"
    )


def check_writable(path: str | Path) -> None:
    """ValueError, in one sentence, if there can be no file at this place."""
    path = Path(path)
    try:
        is_new = not path.exists()
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
    if is_new:
        path.unlink()


def assets() -> str:
    """The style and the script of all players on a page."""
    here = files("nanopaged.tour")
    style = here.joinpath("player.css").read_text(encoding="utf-8")
    script = here.joinpath("player.js").read_text(encoding="utf-8")
    return f"<style>\n{style}</style>\n<script>\n{script}</script>\n"
