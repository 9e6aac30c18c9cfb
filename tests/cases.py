"""Many small cases of a test, run as one: pytest takes longer for each test than they take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def for_each(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """Run a test for each of `cases`, as `parametrize` would, but with the fixtures made once.

    Args:
        names: of the arguments that a case gives, with commas between them.
        cases: a value each, or a tuple of as many as there are names.
    """
    wanted, known = [name.strip() for name in names.split(",")], list(cases)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(*instance: Any, **fixtures: Any) -> None:
            assert known, "no cases"
            for case in known:
                values = case if len(wanted) > 1 else (case,)
                try:
                    test(*instance, **fixtures, **dict(zip(wanted, values, strict=True)))
                except BaseException:
                    print(f"in the case {case!r}")  # pytest shows it below the traceback
                    raise

        functools.update_wrapper(run, test)
        del run.__dict__["__wrapped__"]  # or pytest would ask for what the cases give
        signature = inspect.signature(test)
        rest = [p for p in signature.parameters.values() if p.name not in wanted]
        run.__dict__["__signature__"] = signature.replace(parameters=rest)
        return run

    return decorate
