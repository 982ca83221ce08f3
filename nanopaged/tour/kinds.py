"""The kinds of events: what each is called, which line does it, where to read about it.

The line is found by the name of its function and by its text, never by a number. If the
source changes and the line is gone, a page shows only its text, and a test fails.
"""

from typing import Any, NamedTuple

from nanopaged.tour.source import place, source


class Kind(NamedTuple):
    label: str
    symbol: str  # module.qualified name, in the package
    line: str  # a part of the line that does it
    paper: str  # a section of arXiv 2309.06180, or where else it is from
    is_minor: bool = False  # its source is shown only if nothing else happened


CHUNKS = "Not in the paper: chunked prefill is from Sarathi-Serve (arXiv 2403.02310)"
CACHE = "More than section 4.4 of the paper (Shared prefix): any block, by its content"
SCHEDULER, MANAGER = "scheduler.Scheduler", "block_manager.BlockManager"
PREFIXES = "prefix_cache.PrefixCache"

# In the order in which they happen in a step.
KINDS = {
    "arrive": Kind("arrival", "engine.Engine.add", "unfinished.update(", "4.5"),
    "abort": Kind("abort", f"{SCHEDULER}.end_live", "self.finish(", "5.2 (free)"),
    "recompute": Kind("preemption, by recompute", f"{SCHEDULER}._preempt",
                      "manager.free(seq)", "4.5 (Recomputation)"),
    "swap_out": Kind("preemption, by swap", f"{SCHEDULER}._preempt",
                     "manager.swap(group.live", "4.5 (Swapping)"),
    "admit": Kind("admission", f"{SCHEDULER}._admit",
                  "self.running[group.request_id] = group", "4.3 and 4.5", True),
    "swap_in": Kind("swap in", f"{SCHEDULER}._admit", "manager.swap(",
                    "4.5 (Swapping)"),
    "prefix": Kind("prefix hit", f"{PREFIXES}.match", "found.append(", CACHE),
    "evict": Kind("eviction", f"{PREFIXES}.forget", "del self.published", CACHE, True),
    "grow": Kind("new blocks", f"{MANAGER}.grow", "table.append(self._take(", "4.3",
                 True),
    "copy": Kind("copy-on-write", f"{MANAGER}.grow", "table[first] = self._take(",
                 "4.4 (Parallel sampling)"),
    "wait": Kind("no room yet", f"{SCHEDULER}._admit", "if num_needed + watermark >",
                 "4.5", True),
    "budget": Kind("no budget left", f"{SCHEDULER}._schedule_sequence",
                   "if end == seq.num_computed_tokens:", CHUNKS, True),
    "chunk": Kind("chunk of a prompt", f"{SCHEDULER}._schedule_sequence", "end = min(",
                  CHUNKS),
    "fork": Kind("fork", f"{SCHEDULER}._fork", "manager.fork(leader, sibling)",
                 "4.4 (Parallel sampling)"),
    "publish": Kind("publication", f"{PREFIXES}.publish", "self.published.setdefault(",
                    CACHE, True),
    "compute": Kind("plan of the step", f"{SCHEDULER}._schedule_sequence",
                    "batch.add_entry(", "4.3", True),
    "sample": Kind("new tokens", f"{SCHEDULER}.update", "seq.append(token", "4.3",
                   True),
    "beam": Kind("new beams", "beam_search.advance_beams",
                 "manager.fork(parent, child)", "4.4 (Beam search)"),
    "finish": Kind("end", f"{SCHEDULER}.finish", "self.block_manager.free(seq)", "4.3"),
}


def explain(kind: Kind) -> dict[str, Any]:
    """What the page says about events of this kind: also the function that has the
    line, and where the line is in it.
    """
    try:
        lines = source(kind.symbol).splitlines()
        at = [kind.line in text for text in lines].index(True)
        file, name = place(kind.symbol)
    except (AttributeError, ValueError):  # a changed engine can be traced, too
        lines, at, file, name = [kind.line], 0, "", kind.symbol
    return {"label": kind.label, "paper": kind.paper, "minor": kind.is_minor,
            "lines": lines, "at": at, "file": file, "name": name}
