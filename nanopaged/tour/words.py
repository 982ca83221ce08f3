"""Lists and numbers in sentences: listed([5, 6, 7], "#") -> "#5, #6 and #7"."""

from collections.abc import Iterable, Sequence

MOST_LISTED = 6  # blocks or sequences in one sentence


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def join(parts: Sequence[str]) -> str:
    """a; a and b; a, b and c; a, b, c and 4 more."""
    if len(parts) > MOST_LISTED:
        parts = [*parts[: MOST_LISTED - 1], f"{len(parts) - MOST_LISTED + 1} more"]
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def listed(items: Iterable[object], mark: str) -> str:
    return join([f"{mark}{item}" for item in items])


def listed_moves(moves: list[tuple[int, int]]) -> str:
    return join([f"#{source} to #{target}" for source, target in moves])
