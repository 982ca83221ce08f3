"""Checks notice what is easy to get wrong: mistakes are put into our own solutions."""

import pytest

from test_extensions import extended, run_check  # noqa: F401

# What is easy to get wrong about states, and its place in solutions/state_cache.patch.
MISTAKES = {
    "a state of later tokens": (
        "prefix_cache.py", "return [stop for", "return [stop + 1 for"),
    "a token that the state has seen is computed again": (
        "scheduler.py", "prefix, num_cached, prefix_state",
        "prefix, num_cached - bool(prefix), prefix_state"),
    "states are never dropped": (
        "prefix_cache.py", "len(self.states) > self.num_states", "False")}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_with_states_is_noticed(extended, mistake):  # noqa: F811
    name, right, wrong = MISTAKES[mistake]
    path = extended("state_cache") / "nanopaged" / name
    text = path.read_text(encoding="utf-8")
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    with pytest.raises(AssertionError, match="tokens of transformers|states are kept"):
        run_check(path.parents[1], "state_cache")
