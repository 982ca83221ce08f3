"""How many GPUs? What a model, a GPU and a load ask of each other.

    >>> round(compute(choose("Llama-3-8B", "H100"))["room_tokens"])
    461121

`sizes.json` has the inputs, each with its least and its largest value, and the
formulas. These are evaluated here and, on the tour's page, in JavaScript. They may use
what is above them, and `FUNCTIONS`. Only those of "config" are Python's alone.
"""

import json
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

Numbers: TypeAlias = dict[str, float]

DATA: dict[str, Any] = json.loads(
    files("nanopaged.tour").joinpath("sizes.json").read_text("utf-8"))
INPUTS, STAGES = DATA["inputs"], DATA["figures"]
FIGURES = DATA["searched"] | STAGES["fixed"] | STAGES["step"] | STAGES["fleet"]
FUNCTIONS = {"min": min, "max": max, "floor": math.floor, "ceil": math.ceil,
             "where": lambda condition, yes, no: yes if condition else no}
OPTIONS = [name for name in DATA["defaults"] if name in INPUTS]  # of the command


def compute(given: Numbers) -> Numbers:
    """All figures. The step is one of as many chats as the load makes run at once."""
    check(given)
    known = evaluate(given, "fixed")
    if known["most"] < 1:
        raise ValueError(
            f"gpus (GPUs a copy) must be more, or the bits fewer: {known['gpus']:g} x "
            f"{known['memory_share'] * known['memory_gb']:.1f} GB cannot hold "
            f"{known['weights_gb']:.1f} GB of weights each, and a chat beside them")

    def step(running: float) -> Numbers:
        return evaluate(known | {"running": running}, "step")

    most = int(known["most"])
    known = evaluate(step(most), "fleet")
    enough = bisect_left(range(1, most), known["load_copy"],
                         key=lambda running: step(running)["served"])
    return step(1 + enough)


def evaluate(known: Numbers, stage: str) -> Numbers:
    """These numbers, and those of the formulas of a stage."""
    known = dict(known)
    for name, (_, _, formula) in STAGES[stage].items():
        known[name] = float(eval(formula, FUNCTIONS, known))
    return known


def check(given: Numbers) -> None:
    for name, (label, least, limit) in INPUTS.items():
        value, most = given[name], eval(str(limit), FUNCTIONS, dict(given))
        is_fine = name in DATA["fractions"] or value % 1 == 0
        if not (least <= value <= most and is_fine):
            kind = "a number" if name in DATA["fractions"] else "a whole number"
            raise ValueError(
                f"{name} ({label}) must be {kind} from {written(least)} to "
                f"{written(most)}, got {value:g}")


def choose(model: str, gpu: str, **options: float) -> Numbers:
    """The inputs for a model, by name or by its config.json, and a GPU."""
    if gpu not in DATA["gpus"]:
        raise ValueError(f"gpu must be one of {', '.join(DATA['gpus'])}, got {gpu!r}")
    if model not in DATA["models"] and not Path(model).is_file():
        raise ValueError(f"model must be a config.json, or one of "
                         f"{', '.join(DATA['models'])}, got {model!r}")
    fields: Numbers = DATA["models"].get(model) or read_config(Path(model))
    defaults: Numbers = {name: DATA["defaults"].get(name, 0) for name in INPUTS}
    sizes: Numbers = DATA["gpus"][gpu]
    return defaults | fields | sizes | options


# -- A model's config.json -------------------------------------------------------------

def read_config(path: Path) -> Numbers:
    """A model's inputs. What its config.json does not have as a number is zero."""
    try:
        config = json.loads(path.read_text("utf-8"))
        config = config.get("text_config", config)
        kinds = Counter(config.get("layer_types") or [])
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"model: {path} is no model's config.json: {error}") from error
    unknown = {*kinds} - {"full_attention", "sliding_attention", "linear_attention"}
    unknown |= {key for key in config if key.startswith("mamba_")}
    if unknown:
        raise ValueError(f"model: {path} has layers that are unknown here "
                         f"({min(unknown)}): give a named model")
    known = defaultdict(int, FUNCTIONS | {"use_sliding_window": True} | {
        name: value for name, value in config.items()
        if isinstance(value, (int, float))} | kinds)
    return {name: eval(formula, {}, known) for name, formula in DATA["config"].items()}


# -- The command -----------------------------------------------------------------------

def table(model: str, gpu: str, **options: float) -> str:
    """The figures, each with its formula."""
    known = compute(choose(model, gpu, **options))
    rows = [f"{model} on {known['gpus']:g} x {gpu}"]
    for name in DATA["shown"]:
        label, unit, formula = FIGURES[name]
        value = (DATA["limits"][int(known[name])] if name == "limit"
                 else f"{written(known[name])} {unit}".strip())
        rows.append(f"{label:44}{value:>20}   {name} = {formula}")
    return "\n".join(rows)


def written(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
