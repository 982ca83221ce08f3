"""The README's picture, drawn from one frame of a real run: block tables and the pool.

    write(Path(".github/assets"))  # paged.svg

The picture follows the reader's colour scheme. It shows what the trace holds, so it
changes when the engine does, and a test compares it with the one in the repository.
"""

import html
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from nanopaged import LLM, SamplingParams
from nanopaged.tour.events import refs
from nanopaged.tour.recorder import Trace, trace
from nanopaged.tour.state import State

Texts: TypeAlias = dict[int | str, str]  # of tokens

NAME = "paged.svg"
NUM_STEPS = 3  # of the run, when the picture is taken

WIDTH = 860
TOP = 104  # of the first row
ROW = 31  # from one block to the next
SLOT = 36  # the width of a slot, with its token
BLOCK_HEIGHT = 24
LEFT, RIGHT = 52, 452  # of the logical and the physical blocks

STYLE = """
  svg { --ink: #1f2328; --soft: #59636e; --line: #c8cfd6; --back: #fbfcfd;
    --hatch: #e6e9ed; --hue0: #0969da; --hue1: #bc4c00; --hue2: #1a7f37;
    --hue3: #8250df }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #e6edf3; --soft: #9198a1; --line: #444c56; --back: #12161c;
      --hatch: #262c35; --hue0: #58a6ff; --hue1: #f0883e; --hue2: #56d364;
      --hue3: #bc8cff }
  }
  text { font: 12px -apple-system, BlinkMacSystemFont, "Segoe UI", "Noto Sans",
    Helvetica, Arial, sans-serif; fill: var(--ink) }
  .title { font-size: 18px; font-weight: 600 }
  .head { font-size: 13px; font-weight: 600 }
  .note { fill: var(--soft) }
  .token { font: 11px ui-monospace, Menlo, Consolas, monospace; text-anchor: middle }
  .id { font-weight: 600; text-anchor: end }
  .back { fill: var(--back); stroke: var(--line) }
  .block { fill: none; stroke: var(--hue, var(--line)); stroke-width: 1.25 }
  .wash { fill: var(--hue); fill-opacity: 0.1 }
  .cached { fill: url(#hatch); stroke: var(--line) }
  .stripe { stroke: var(--hatch); stroke-width: 4 }
  .free { fill: none; stroke: var(--line); stroke-dasharray: 3 3 }
  .slot { stroke: var(--line); stroke-width: 0.75 }
  .tip { fill: var(--soft); fill: context-stroke }
  .arrow { fill: none; stroke: var(--hue); stroke-width: 1.4; stroke-opacity: 0.75;
    marker-end: url(#tip) }
  .said { font-size: 12px; font-weight: 400; fill: var(--soft); stroke: none }
  .name { font-size: 13px; font-weight: 600; fill: var(--hue) }
  .h0 { --hue: var(--hue0) } .h1 { --hue: var(--hue1) } .h2 { --hue: var(--hue2) }
  .shared { --hue: var(--hue3) }
"""


def write(directory: str | Path) -> Path:
    """Write the picture to this directory; returns its path."""
    path = Path(directory) / NAME
    run = record()
    state = run.states()[-1]
    path.write_text(draw(state, run.pieces.texts), encoding="utf-8")
    return path


def record() -> Trace:
    """Two samples of one prompt, and a request that begins with the same words.

    A request that ended before has left blocks that are free and still cached.
    """
    with LLM(
        device="cpu",
        dtype="float32",
        attention_backend="torch",
        block_size=4,
        num_blocks=12,
        max_model_len=32,
        swap_space=0,
    ) as llm:
        with trace(llm) as run:
            before = SamplingParams(temperature=0, max_tokens=1)
            llm.generate(["JULIET:\nO Romeo"], before, use_tqdm=False)
            samples = SamplingParams(n=2, temperature=0.8, max_tokens=12, seed=3)
            llm.add_request("First Citizen:\nHear me", samples)
            llm.add_request(
                "First Citizen:\nWhy", SamplingParams(temperature=0, max_tokens=12)
            )
            for _ in range(NUM_STEPS):
                llm.step()
        return run


def draw(state: State, pieces: Texts) -> str:
    """The picture of a state, as SVG; `pieces` has the text of every token."""
    seqs = {key: seq for key, seq in state["seqs"].items() if seq["table"]}
    num_rows = sum(len(seq["table"]) + 1 for seq in seqs.values())
    height = TOP + ROW * max(num_rows, state["num_blocks"]) + 8
    title = "Block tables map logical to physical blocks: a moment of a real run"
    note = (
        f"{len(seqs)} sequences of {len(state['running'])} requests, after "
        f"{NUM_STEPS} steps. A block has {state['block_size']} slots. Sequences that "
        "begin alike share blocks; none is reserved ahead."
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-labelledby="title desc">',
        f'<title id="title">{title}</title>',
        f'<desc id="desc">{describe(state, seqs)}</desc>',
        f"<style>{STYLE}</style>",
        '<defs><pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path class="stripe" d="M2 0v8"/></pattern>'
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path class="tip" d="M0 1L8 4L0 7z"/></marker>'
        "</defs>",
        f'<rect class="back" x="0.5" y="0.5" width="{WIDTH - 1}" '
        f'height="{height - 1}" rx="12"/>',
        f'<text class="title" x="24" y="36">{title}</text>',
        f'<text class="note" x="24" y="58">{note}</text>',
        f'<text class="head" x="{LEFT}" y="88">Logical blocks</text>',
        f'<text class="head" x="{RIGHT}" y="88">Physical blocks</text>',
        *draw_tables(state, seqs, pieces),
        *draw_pool(state, seqs, pieces),
        "</svg>\n",
    ]
    return "\n".join(parts)


def draw_tables(state: State, seqs: State, pieces: Texts) -> Iterator[str]:
    """The sequences, with a line from each logical block to its physical block."""
    size = state["block_size"]
    y = TOP
    for hue, (key, seq) in enumerate(seqs.items()):
        prompt = state["groups"][key.partition(".")[0]]["prompt_tokens"]
        token_ids = [*prompt, *seq["tokens"]]
        yield (
            f'<g class="h{hue}"><text class="name" x="24" y="{y + 17}">'
            f'Sequence {key}<tspan class="said" dx="8">'
            f"{text_of(token_ids, pieces)}</tspan></text>"
        )
        for index, block_id in enumerate(seq["table"]):
            y += ROW
            held = token_ids[index * size : min(seq["computed"], (index + 1) * size)]
            yield f'<text class="id" x="{LEFT - 8}" y="{y + 17}">{index}</text>'
            yield block(LEFT, y, "wash", held, size, pieces)
            start = LEFT + size * SLOT
            end = RIGHT - 26
            target = TOP + ROW * block_id + BLOCK_HEIGHT / 2
            middle = (start + end) / 2
            yield (
                f'<path class="arrow" d="M{start} {y + BLOCK_HEIGHT / 2}'
                f"C{middle} {y + BLOCK_HEIGHT / 2} {middle} {target} "
                f'{end} {target}"/>'
            )
        y += ROW
        yield "</g>"


def draw_pool(state: State, seqs: State, pieces: Texts) -> Iterator[str]:
    """All blocks of the device: what they hold, and for whom."""
    size = state["block_size"]
    for block_id in range(state["num_blocks"]):
        y = TOP + ROW * block_id
        kind, held, note = "free", [], "free"
        owners = owners_of(block_id, seqs)
        if owners:
            key, index = owners[0]
            seq = seqs[key]
            prompt = state["groups"][key.partition(".")[0]]["prompt_tokens"]
            last = min(seq["computed"], (index + 1) * size)
            held = [*prompt, *seq["tokens"]][index * size : last]
            kind = "wash"
            note = describe_owners(state, block_id, owners)
        elif str(block_id) in state["blocks"]:
            kind = "cached"
            held = state["blocks"][str(block_id)]["tokens"]
            place = state["free"].index(block_id) + 1
            ordinal = {1: "1st", 2: "2nd", 3: "3rd"}.get(place, f"{place}th")
            note = f"free, still cached: {ordinal} to be taken"
        hue = "shared"
        if len(owners) == 1:
            hue = f"h{list(seqs).index(owners[0][0])}"
        yield f'<g class="{hue}">'
        yield f'<text class="id" x="{RIGHT - 8}" y="{y + 17}">{block_id}</text>'
        yield block(RIGHT, y, kind, held, size, pieces)
        yield (
            f'<text class="note" x="{RIGHT + size * SLOT + 14}" y="{y + 17}">'
            f"{note}</text></g>"
        )


def owners_of(block_id: int, seqs: State) -> list[tuple[str, int]]:
    """The sequences that hold a block, and which of their logical blocks it is."""
    owners = []
    for key, seq in seqs.items():
        if block_id in seq["table"]:
            owners.append((key, seq["table"].index(block_id)))
    return owners


def describe_owners(state: State, block_id: int, owners: list[tuple[str, int]]) -> str:
    names = ", ".join(key for key, _ in owners)
    num_refs = refs(state, block_id)
    return f"{names} \u00b7 {num_refs} reference{'s' if num_refs > 1 else ''}"


def block(x: int, y: int, kind: str, held: list[int], size: int, pieces: Texts) -> str:
    """A block with the tokens it holds; `kind` is a class of the style."""
    width = size * SLOT
    shape = f'x="{x}" y="{y}" width="{width}" height="{BLOCK_HEIGHT}" rx="5"'
    lines = "".join(f"M{x + SLOT * i} {y}v{BLOCK_HEIGHT}" for i in range(1, size))
    parts = [f'<rect class="{kind}" {shape}/>']
    if kind == "wash":
        parts.append(f'<rect class="block" {shape}/>')
    parts.append(f'<path class="slot" d="{lines}"/>')
    for index, token in enumerate(held):
        middle = x + SLOT * index + SLOT // 2
        text = text_of([token], pieces)
        parts.append(f'<text class="token" x="{middle}" y="{y + 16}">{text}</text>')
    return "".join(parts)


def text_of(token_ids: list[int], pieces: Texts) -> str:
    """Text with spaces and line breaks to be seen, escaped for SVG."""
    text = "".join(pieces[token] for token in token_ids)
    return html.escape(text.replace(" ", "\u00b7").replace("\n", "\u21b5"))


def describe(state: State, seqs: State) -> str:
    """The picture in words, for those who do not see it."""
    tables = [
        f"Sequence {key} has {seq['computed']} tokens in the cache, and the block "
        f"table {', '.join(map(str, seq['table']))}."
        for key, seq in seqs.items()
    ]
    free = ", ".join(map(str, state["free"]))
    return " ".join([*tables, f"Free, in the order in which they are taken: {free}."])
