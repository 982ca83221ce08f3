"""The kinds of events: what each is called, which line does it, where to read about it.

The line is found by the name of its function and by its text, never by a number. If the
source changes so that it is gone, a page goes without it, and a test fails.
"""

from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of event, and where to read about it."""

    label: str
    symbol: str  # module:qualified name, in the package
    line: str  # a part of the line that does it
    paper: str  # a section of arXiv 2309.06180, or what else it is from
    is_minor: bool = False  # a long trace leaves these out


CHUNKS = "Not in the paper: chunked prefill is from Sarathi-Serve (arXiv 2403.02310)"
CACHE = "More than section 4.4 of the paper (Shared prefix): any block, by its hash"

KINDS = {
    "arrive": Kind(
        "request arrives", "llm:LLM._serve", "self.scheduler.unfinished[", "4.5"),
    "abort": Kind("abort", "scheduler:Scheduler.abort", "self.finish(", "5.2 (free)"),
    "recompute": Kind(
        "preemption, by recompute", "scheduler:Scheduler._preempt",
        "self.stats.preemptions_recompute += 1", "4.5 (Recomputation)"),
    "swap_out": Kind(
        "preemption, by swap", "scheduler:Scheduler._preempt",
        "manager.swap(group.live, manager.free_swap_blocks)", "4.5 (Swapping)"),
    "evict": Kind(
        "eviction", "block_manager:BlockManager._take", "del self.published", CACHE,
        is_minor=True),
    "copy": Kind(
        "copy-on-write", "block_manager:BlockManager.grow",
        "table[first] = self._take(self.free_blocks)", "4.4 (Parallel sampling)"),
    "grow": Kind(
        "new block", "block_manager:BlockManager.grow",
        "table.append(self._take(self.free_blocks))", "4.3", is_minor=True),
    "admit": Kind(
        "admission", "scheduler:Scheduler._admit", "manager.replace_blocks(leader",
        "4.3 and 4.5"),
    "prefix": Kind(
        "prefix hit", "block_manager:BlockManager.match_prefix",
        "found.append(content.block_id)", CACHE),
    "swap_in": Kind(
        "swap in", "scheduler:Scheduler._admit",
        "manager.swap(group.live, manager.free_blocks)", "4.5 (Swapping)"),
    "chunk": Kind(
        "chunk of a prompt", "scheduler:Scheduler._schedule_sequence",
        "end = min(", CHUNKS, is_minor=True),
    "compute": Kind(
        "forward pass", "llm:LLM._step", "self.runner.execute(batch)", "4.3",
        is_minor=True),
    "fork": Kind(
        "fork", "scheduler:Scheduler._schedule_sequence", "manager.fork(seq, child)",
        "4.4 (Parallel sampling)"),
    "publish": Kind(
        "publication", "block_manager:BlockManager.advance",
        "self.published[content.hash] = content", CACHE, is_minor=True),
    "sample": Kind(
        "new tokens", "scheduler:Scheduler.update", "seq.append(token", "4.3", True),
    "beam": Kind(
        "beams replaced", "beam_search:advance_beams",
        "manager.fork(parent, beams[-1])", "4.4 (Beam search)"),
    "finish": Kind(
        "end", "scheduler:Scheduler.finish", "self.block_manager.free(seq)", "4.3")}
