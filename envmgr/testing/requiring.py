"""What suites of tests say in place of `assert`, which does nothing under `python -O`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def require(condition: object, message: str) -> None:
    """Fail unless a condition holds.

    Raises:
        AssertionError: with the message.
    """
    if not condition:
        raise AssertionError(message)


@contextmanager
def refused(*kinds: type[Exception]) -> Iterator[None]:
    """Fail unless what is done inside raises one of these errors.

    Raises:
        AssertionError: nothing was raised, or something else.
    """
    names = " or ".join(kind.__name__ for kind in kinds)
    try:
        yield
    except kinds:
        return
    except Exception as error:
        raise AssertionError(f"{names} should be raised, not {type(error).__name__}") from error
    raise AssertionError(f"{names} should be raised, and nothing was")
