"""Errors of libraries, and of one input among many, that say what they are about."""

from collections.abc import Iterator
from contextlib import contextmanager

REPAIR = "repair it or download it again"


@contextmanager
def explained(words: str) -> Iterator[None]:
    """Put these words before the message of an error, and all into one line. It becomes
    a ValueError, unless it is a TypeError.
    """
    try:
        yield
    except Exception as error:
        message = " ".join((str(error) or repr(error)).split())
        if isinstance(error, MemoryError) or "allocate" in message:
            raise  # a lack of memory, torch's too, is no fault of what the words name
        if "trust_remote_code" in message:
            message = ("it must not need Python code that the checkpoint brings along, "
                       "because such code is never run")
        # A subclass, such as UnicodeEncodeError, takes other arguments.
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(words + message) from error
