"""The page that plays a trace: one file, which opens without a network.

`player.js` draws it, and `player.css` says how it looks. A trace is compressed, so no
text in it can be taken for markup, and the player makes text nodes of it.
"""

from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from nanopaged.tour import sizes
from nanopaged.tour.kinds import KINDS, explain

TEMPLATES = Environment(
    loader=PackageLoader("nanopaged.tour"), autoescape=True, undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True)


def page(template: str, **values: object) -> str:
    """A page that is pure ASCII, with the style and the script of all its players."""
    here = files("nanopaged.tour")
    assets = {name.replace(".", "_"): Markup(here.joinpath(name).read_text("utf-8"))
              for name in ("player.css", "player.js")}
    kinds = {name: explain(kind) for name, kind in KINDS.items()}
    found = TEMPLATES.get_or_select_template(template)
    text = found.render(kinds=kinds, **values, **assets)
    return text.encode("ascii", "xmlcharrefreplace").decode()


def calculator() -> Markup:
    """The form that `sizes.js` fills, with the formulas."""
    script = files("nanopaged.tour").joinpath("sizes.js").read_text("utf-8")
    data = {name: value for name, value in sizes.DATA.items() if name != "config"}
    return Markup('<div class="np-sizes"><script type="application/json">{}</script>'
                  "</div>\n<script>\n{}</script>").format(
                      htmlsafe_json_dumps(data, separators=(",", ":")), Markup(script))


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
