"""Ten ways to break the engine in one line, each with the test that catches it."""

import html
import textwrap
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from nanopaged.tour.guide.markdown import Html
from nanopaged.tour.guide.source import code_block, fold, highlight

CONTEXT = 2  # lines that are shown on either side of a change


class Edit(NamedTuple):
    """A change of a source file: `old`, which occurs once, becomes `new`."""

    file: str  # in the package
    old: str
    new: str


class Mutant(NamedTuple):
    title: str
    edit: Edit
    test: str  # a test of the repository, as pytest names it
    effect: str  # what would go wrong


def apply(edits: Iterable[Edit], package: Path) -> None:
    """Change the files of a copy of the package."""
    for edit in edits:
        path = package / edit.file
        text = path.read_text(encoding="utf-8")
        if text.count(edit.old) != 1:
            raise ValueError(
                f"{edit.file} must have this once, to change it: {edit.old!r}")
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


MUTANTS = [
    Mutant(
        "Write into a block that somebody else reads",
        Edit(
            "block_manager.py",
            "if first < len(table) and self.ref_counts[table[first]] > 1:",
            "if first < len(table) and self.ref_counts[table[first]] > 2:",
        ),
        "tests/test_block_manager.py::test_the_story_of_the_module",
        "Of two sequences that share a block, neither copies it. Both write their "
        "next token into the same slot, and each then attends to the other's. "
        "Nothing crashes: the answers are just wrong.",
    ),
    Mutant(
        "Find a prompt in the cache to its very last token",
        Edit(
            "block_manager.py",
            "for index in range((seq.compute_end - 1) // self.block_size):",
            "for index in range(seq.compute_end // self.block_size):",
        ),
        "tests/test_block_manager.py::"
        "test_a_block_is_published_when_all_its_tokens_are_known_and_computed",
        "A prompt that fills its blocks exactly is found as a whole. Then there is "
        "nothing left to compute, so there are no logits, and nothing to sample from.",
    ),
    Mutant(
        "Trust the hash",
        Edit(
            "block_manager.py",
            "if cached and cached.before == before and cached.token_ids == token_ids:",
            "if cached:",
        ),
        "tests/test_block_manager.py::"
        "test_a_hit_follows_the_same_block_and_has_the_same_salt",
        "Whenever two hashes collide, a request continues somebody else's text. It "
        "is rare by accident, and not rare for somebody who looks for collisions.",
    ),
    Mutant(
        "Let the older of two equal blocks be found",
        Edit(
            "block_manager.py",
            "content.block_id = seq.block_table[index]",
            "content.block_id = content.block_id or seq.block_table[index]",
        ),
        "tests/test_block_manager.py::"
        "test_twins_share_their_content_and_the_newer_is_found",
        "The older block is usually taken first. From then on nobody can find the "
        "newer one, although it still holds the same.",
    ),
    Mutant(
        "Free the blocks of a sequence front first",
        Edit(
            "block_manager.py",
            "for block_id in reversed(seq.block_table):",
            "for block_id in seq.block_table:",
        ),
        "tests/test_block_manager.py::"
        "test_what_cannot_be_found_is_taken_first_then_the_least_recently_used",
        "The least recently used block is then the beginning of the prompt. It is "
        "evicted first, and what is left of the prompt can no longer be found: a "
        "prefix is looked up from its start. Answers stay right; the cache gets "
        "useless.",
    ),
    Mutant(
        "Let the oldest give way",
        Edit(
            "scheduler.py",
            "_, group = self.running.popitem()",
            "group = self.running.pop(next(iter(self.running)))",
        ),
        "tests/test_scheduler.py::"
        "test_the_youngest_is_preempted_keeps_its_tokens_and_comes_back_first",
        "The oldest request loses its work whenever a younger one needs a block. That "
        "everybody finishes rests on the other rule: nobody younger takes a block from "
        "the oldest, and alone it fits into the pool.",
    ),
    Mutant(
        "Admit requests in the step of a preemption",
        Edit(
            "scheduler.py",
            "if request_id not in self.running and len(self.running) >= num_running:",
            "if request_id not in self.running:",
        ),
        "tests/test_scheduler.py::test_groups_are_preempted_until_the_oldest_has_room_"
        "and_one_may_preempt_itself",
        "A request that was just preempted may come straight back in the same step. "
        "Then the step swaps blocks out and in, and it may compute tokens that are "
        "not known yet.",
    ),
    Mutant(
        "Do not wait for the last beam",
        Edit(
            "scheduler.py",
            "if seq is group.live[-1] and advance_beams(",
            "if seq is group.live[0] and advance_beams(",
        ),
        "tests/test_scheduler.py::"
        "test_if_the_budget_is_too_small_for_a_group_its_last_sequences_wait",
        "When the first beam has its candidates, the others have none yet. So all new "
        "beams go on from the first. Nothing crashes, and there are as many answers "
        "as before, but they are not the best ones.",
    ),
    Mutant(
        "Look into the future",
        Edit(
            "attention.py",
            "q[None, tokens].transpose(1, 2), k, v, mask, scale=self.scale,",
            "q[None, tokens].transpose(1, 2), k, v, scale=self.scale,",
        ),
        "tests/test_attention.py::test_random_steps",
        "A token of a prompt also attends to those after it, as far as its chunk goes. "
        "The text still looks like text, which is why attention is tested against "
        "numbers and never by reading.",
    ),
    Mutant(
        "Draw an impossible token",
        Edit(
            "sampler.py",
            "is_above = (probs.cumsum(-1) > numbers) & (probs > 0)",
            "is_above = probs.cumsum(-1) >= numbers",
        ),
        "tests/test_sampler.py::test_no_number_draws_an_excluded_token",
        "If the random number is exactly 0, the first token of a group is "
        "drawn, even with probability 0. It happens once in 2^32 tokens on average, "
        "and nobody will ever reproduce it.",
    ),
]


def change(edit: Edit) -> str:
    """The line before and after the change, and the lines around it, as HTML."""
    source = files("nanopaged").joinpath(edit.file).read_text(encoding="utf-8")
    old = source.splitlines()
    new = source.replace(edit.old, edit.new).splitlines()
    at = next(index for index, line in enumerate(old) if line != new[index])

    lines = [*old[at - CONTEXT : at + 1], new[at], *old[at + 1 : at + 1 + CONTEXT]]
    tags = ["span"] * CONTEXT + ["del", "ins"] + ["span"] * CONTEXT
    dedented = textwrap.dedent("\n".join(lines)).split("\n")
    parts = []
    for tag, line in zip(tags, dedented, strict=True):
        code = line.strip()
        if code in ("", '"""'):
            continue
        indent = line[: len(line) - len(line.lstrip())]
        parts.append(f'<{tag} class="line">{indent}{highlight(code)}\n</{tag}>')
    return "".join(parts)


def mutant_list() -> Html:
    """The mutants as HTML; the effect is closed, so that one can guess first."""
    items = []
    for mutant in MUTANTS:
        edit = mutant.edit
        effect = (f"<p>{html.escape(mutant.effect)}</p>"
                  + code_block(f"python -m pytest {html.escape(mutant.test)}"))
        items.append(
            f"<li><strong>{html.escape(mutant.title)}.</strong> "
            f"In <code>{edit.file}</code>:\n{code_block(change(edit))}\n"
            f"{fold('What breaks, and which test sees it', effect)}</li>")
    return Html(f'<ol class="mutants">{"".join(items)}</ol>')
