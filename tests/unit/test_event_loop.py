"""The event loop of a worker, and what is under way in it for each env."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from envmgr.env.contract import EnvContractError
from envmgr.wire.messages import Message, Op
from envmgr.worker.async_runner import AsyncEnvRunner
from envmgr.worker.event_loop import (
    AwaitableSteps,
    EnvWork,
    Steps,
    WorkerLoop,
    finish,
    wait_for,
)


@pytest.fixture
def noted() -> list[int]:
    return []


@pytest.fixture
def loop(noted: list[int]) -> Iterator[WorkerLoop]:
    loop = WorkerLoop(noted.append)
    yield loop
    if loop.loop is not None:
        loop.loop.close()
        asyncio.set_event_loop(None)


def request(number: int) -> Message:
    return Message(Op.STEP, 3, 0, number, None)


def told(log: list[str], *, waits: bool) -> Steps[None]:
    log.append("begun")
    if waits:
        yield
        log.append("in the loop")
        yield from wait_for(asyncio.sleep(0))
    log.append("ended")


async def awaited(steps: Steps[None]) -> None:
    await AwaitableSteps(steps)


def turn(loop: WorkerLoop, *others: Coroutine[Any, Any, Any]) -> None:
    """Let the loop run until nothing is left to be done at once."""

    async def rounds() -> None:
        for other in others:
            await other
        for _ in range(10):
            await asyncio.sleep(0)

    loop.finish(rounds())


def test_what_waits_for_nothing_needs_no_loop(loop: WorkerLoop) -> None:
    log: list[str] = []
    assert loop.run(awaited(told(log, waits=False))) is None
    finish(told(log, waits=False))
    assert log == ["begun", "ended"] * 2
    assert loop.loop is None


def test_what_waits_without_a_loop_is_refused() -> None:
    log: list[str] = []
    with pytest.raises(EnvContractError, match="event loop of a worker process"):
        finish(told(log, waits=True))
    assert log == ["begun"]


def test_the_rest_is_a_task_from_where_it_enters_the_loop(loop: WorkerLoop) -> None:
    log: list[str] = []
    task = loop.run(awaited(told(log, waits=True)))
    assert log == ["begun"]
    assert task is not None
    turn(loop)
    assert log == ["begun", "in the loop", "ended"]
    assert task.done()


def test_what_a_task_raises_ends_the_serving(loop: WorkerLoop) -> None:
    def fails() -> Steps[None]:
        yield
        raise OSError("the trainer is gone")

    async def close() -> None:
        raise AssertionError("it is not asked to")

    loop.run(awaited(fails()))
    with pytest.raises(OSError, match="the trainer is gone"):
        loop.serve(lambda: False, close, ())


def test_serving_ends_after_the_last_round(loop: WorkerLoop) -> None:
    log: list[str] = []

    async def close() -> None:
        log.append("closed")

    loop.serve(lambda: not log.append("round"), close, ())
    assert log == ["round", "closed"]


def hang(log: list[str]) -> Steps[None]:
    yield
    try:
        yield from wait_for(asyncio.Event().wait())
    except asyncio.CancelledError:
        log.append("cancelled")


def test_only_what_it_is_told_of_is_cancelled(loop: WorkerLoop) -> None:
    work, log = EnvWork(loop), list[str]()
    work.run(hang(log), request(7), "step")
    turn(loop)
    work.cancel(8, "step")
    work.cancel(7, "reset")
    turn(loop)
    assert (log, work.where) == ([], None)
    work.cancel(7, "step")
    turn(loop)
    assert log == ["cancelled"]
    assert work.where is not None
    assert "in hang" in work.where
    assert "in wait" in work.where
    work.where = None
    work.cancel(7, "step")
    assert work.where is None, "it is over"


def test_what_is_under_way_is_stopped_and_waited_for(loop: WorkerLoop) -> None:
    work, log = EnvWork(loop), list[str]()
    work.run(hang(log), request(7), "step")
    turn(loop)
    turn(loop, awaited(work.stop()), awaited(work.stop()))
    assert log == ["cancelled"]


def test_something_follows_what_is_under_way(loop: WorkerLoop) -> None:
    work, log = EnvWork(loop), list[str]()
    work.run_after(lambda: log.append("at once"), request(6), "reset")
    assert log == ["at once"]
    work.run(told(log, waits=True), request(7), "reset")
    work.run_after(lambda: log.append("after it"), request(8), "reset")
    turn(loop)
    assert log[1:] == ["begun", "in the loop", "ended", "after it"]


def test_to_cancel_what_follows_is_to_cancel_what_is_under_way(loop: WorkerLoop) -> None:
    work, log = EnvWork(loop), list[str]()
    work.run(hang(log), request(7), "reset")
    work.run_after(lambda: log.append("after it"), request(8), "reset")
    turn(loop)
    work.cancel(8, "reset")
    assert work.where is not None
    assert "in hang" in work.where
    turn(loop)
    assert log == ["cancelled", "after it"]


@pytest.mark.parametrize("turns", [False, True])
def test_a_step_that_is_cancelled_at_any_moment_is_answered(loop: WorkerLoop, turns: bool) -> None:
    work, errors = EnvWork(loop), list[BaseException]()
    runner: Any = SimpleNamespace(
        _step_with=lambda action: wait_for(asyncio.Event().wait()),
        report_exception=lambda sink, key, error: errors.append(error),
    )
    work.run(AsyncEnvRunner._step(runner, Mock(), 7, 1), request(7), "step")
    if turns:
        turn(loop)
    work.cancel(7, "step")
    turn(loop)
    assert [type(error) for error in errors] == [asyncio.CancelledError]


def test_it_says_whose_code_runs(loop: WorkerLoop, noted: list[int]) -> None:
    work, seen = EnvWork(loop), list[int]()

    def look() -> Steps[None]:
        yield
        seen.append(noted[-1])
        yield from wait_for(asyncio.sleep(0))
        seen.append(noted[-1])

    work.run(look(), request(7), "step")
    turn(loop)
    assert seen == [4, 4]
    assert noted[-1] == 0
