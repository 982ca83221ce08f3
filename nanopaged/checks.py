"""Checks of what the caller passes, and of what checkpoints hold."""

from dataclasses import MISSING, field, fields
from inspect import formatannotation
from typing import Any

from huggingface_hub.dataclasses import type_validator


def check(is_right: bool, name: str, expected: object, value: object,
          error: type[Exception] = ValueError) -> None:
    """Raise an error that names a wrong value, and says what would be right."""
    if not is_right:
        raise error(f"{name} must be {expected}, got {value!r:.200}")


def bounded(default: Any = MISSING, low: float = 0, high: float = 2**63 - 1) -> Any:
    """A number with bounds. All other numbers may be from 0 to 2**63 - 1."""
    return field(default=default, metadata={"bounds": (low, high)})


def plain(value: Any) -> Any:
    """Turn numbers of NumPy and torch into Python's, in lists and dicts, too."""
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, list):  # fast for many token ids
        is_plain = {*map(type, value)} <= {int}
        return list(value) if is_plain else [plain(each) for each in value]
    # (A class such as np.float32 has a `tolist`, too.)
    is_number = hasattr(value, "tolist") and not isinstance(value, type)
    return value.tolist() if is_number else value


class Checked:
    """Base of the dataclasses that check their fields when they are made."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]
            value = plain(getattr(self, each.name))
            object.__setattr__(self, each.name, value)  # they are frozen
            # Python 3.13 says pathlib._local.Path.
            expected = formatannotation(each.type).replace("._local", "")
            error = ValueError if expected.startswith("Literal") else TypeError
            try:
                type_validator(each.name, value, each.type)
            except TypeError:
                check(False, each.name, expected, value, error)
            if isinstance(value, int | float):
                low, high = each.metadata.get("bounds", (0, 2**63 - 1))
                check(value >= low, each.name, f"at least {low}", value)
                check(value <= high, each.name, f"at most {high}", value)
