"""Another thread that calls a manager at any point of a call is refused, and changes nothing.

`close`, `stats` and `env_states`, which any thread may call, are called at these points, too.
"""

from __future__ import annotations

from typing import Any

import pytest

from envmgr.core.engine import OneCaller
from envmgr.errors import ConcurrentCallError
from tests.faults.interrupted_calls import PROCESS_KINDS
from tests.faults.second_thread import run, run_closing, run_reading

INLINE = {"type": "base"}
THREADS = {"type": "thread"}
BLOCK, SOME_MESSAGES = (
    {**PROCESS_KINDS[kind], "context": "fork"}
    for kind in ("a worker each, in the block", "by message, shared, some at a time")
)


@pytest.mark.parametrize(
    ("config", "calls"),
    [
        (INLINE, ("ready_obs", "step to the end", "recv_arrays", "reset", "call", "launch")),
        (BLOCK, ("send_arrays", "recv", "recv_arrays at the end", "seed")),
        (SOME_MESSAGES, ("step", "recv one", "restore of what is stepped")),
    ],
    ids=["inline", "block", "message"],
)
def test_whoever_calls_at_any_point_of_a_call_is_refused_and_changes_nothing(
    config: dict[str, Any], calls: tuple[str, ...]
) -> None:
    figures = run(config, calls)
    assert figures["points"] > 1_000
    assert figures["refused"] > 10_000


def test_the_figures_of_actions_are_of_one_moment_whatever_goes_on_meanwhile() -> None:
    assert run_reading(INLINE) > 100


@pytest.mark.parametrize(("config", "count"), [(INLINE, 60), (THREADS, 20)], ids=str)
def test_whoever_is_in_a_call_when_another_thread_closes_comes_back(
    config: dict[str, Any], count: int
) -> None:
    assert run_closing(config, count) > count // 4


def test_what_is_done_alone_is_not_begun_within_itself() -> None:
    alone = OneCaller()
    with alone, pytest.raises(ConcurrentCallError), alone:
        pass
    with alone:
        pass
