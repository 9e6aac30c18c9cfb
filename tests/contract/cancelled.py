"""Coroutines that are cancelled at one of their awaits, and what has to hold after that."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, NamedTuple

import trio

from envmgr import create_env_manager
from envmgr.errors import (
    EnvLeasedError,
    EnvNotReadyError,
    LeaseTimeoutError,
    NothingReadyError,
)
from tests.contract.leased import END, RAISE, Told

AT_ONCE, TWICE, WITH_ANSWER, LATER = "at once", "twice", "with the answer", "later"
MOMENTS = (AT_ONCE, TWICE, WITH_ANSWER, LATER)
"""When an await is cancelled: as soon as it waits; then, and once more while that is seen to; in
the moment in which what it waits for has come, and it was not told yet; some time in between."""

PATIENCE_S = 60.0
_LATEST_S = 0.002

Use = Callable[[Any], Coroutine[Any, Any, Any]]


class Counted:
    """A coroutine of which somebody counts how often it waits.

    Args:
        coroutine: it.
        on_wait: told the number of the wait, and what is waited for, just before it.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], on_wait: Callable[[int, Any], None]
    ) -> None:
        self._coroutine = coroutine
        self._on_wait = on_wait

    def __await__(self) -> Generator[Any, Any, Any]:
        """Run it, wait by wait."""
        n_waits, resume = 0, lambda: self._coroutine.send(None)
        while True:
            try:
                awaited = resume()
            except StopIteration as end:
                return end.value
            n_waits += 1
            self._on_wait(n_waits, awaited)
            try:
                value = yield awaited
            except BaseException as error:
                resume = lambda error=error: self._coroutine.throw(error)  # noqa: E731
            else:
                resume = lambda value=value: self._coroutine.send(value)  # noqa: E731


async def cancelled_at(use: Use, manager: Any, point: int, moment: str) -> bool:
    """Run a coroutine and cancel it at one of its waits.

    Args:
        use: what is done with the manager.
        manager: it.
        point: which of its waits, from 1 on.
        moment: one of MOMENTS.

    Returns:
        Whether it waits so often.
    """
    loop, reached = asyncio.get_running_loop(), False

    def on_wait(n_waits: int, awaited: Any) -> None:
        nonlocal reached
        if n_waits != point:
            return
        reached = True
        if moment == WITH_ANSWER and awaited is not None:  # before the task's own callback
            awaited.add_done_callback(lambda _: task.cancel())
        elif moment == LATER:
            loop.call_later(random.uniform(0.0, _LATEST_S), task.cancel)
        else:
            loop.call_soon(task.cancel)
        if moment == TWICE:
            loop.call_later(random.uniform(0.0, _LATEST_S), task.cancel)

    async def run() -> None:
        await Counted(use(manager), on_wait)

    task = asyncio.ensure_future(run())
    (found,) = await asyncio.gather(task, return_exceptions=True)
    if found is not None and not isinstance(found, asyncio.CancelledError):
        raise found
    return reached


async def cancelled_in_trio(use: Use, manager: Any, point: int, moment: str) -> bool:
    """As `cancelled_at`, where trio runs the coroutine; what is cancelled there stays cancelled."""
    reached = False

    async def later() -> None:
        await trio.sleep(0.0 if moment == AT_ONCE else random.uniform(0.0, _LATEST_S))
        scope.cancel()

    def on_wait(n_waits: int, awaited: Any) -> None:
        nonlocal reached
        if n_waits == point:
            reached = True
            trio.lowlevel.spawn_system_task(later)

    with trio.CancelScope() as scope:
        await Counted(use(manager), on_wait)
    return reached


class Library(NamedTuple):
    """What runs coroutines.

    Attributes:
        run: runs one to its end.
        within: awaits one for so many seconds at most.
        cancelled_at: see that.
        moments: those of MOMENTS that it knows.
    """

    run: Callable[[Coroutine[Any, Any, Any]], Any]
    within: Callable[[Coroutine[Any, Any, Any], float], Coroutine[Any, Any, Any]]
    cancelled_at: Callable[[Use, Any, int, str], Coroutine[Any, Any, bool]]
    moments: tuple[str, ...]


def _run_in_trio(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def main() -> Any:
        return await coroutine

    return trio.run(main)


async def _within_in_trio(coroutine: Coroutine[Any, Any, Any], seconds: float) -> Any:
    try:
        with trio.fail_after(seconds):
            return await coroutine
    except trio.TooSlowError:
        raise TimeoutError from None


ASYNCIO = Library(asyncio.run, asyncio.wait_for, cancelled_at, MOMENTS)
TRIO = Library(_run_in_trio, _within_in_trio, cancelled_in_trio, (AT_ONCE, LATER))


# -- what is done, and what holds after it ---------------------------------------------------------


async def use_all(manager: Any) -> None:
    """Use all that may be awaited of a launched manager."""
    async with manager.lease() as env:
        await env.reset(seed=1)
        for k in range(2):
            await env.step(k)
        await env.step(END)
        await env.reset()
        await env.step(1)
    async with manager.lease(acquire_timeout_s=PATIENCE_S), manager.lease():
        pass
    actions = dict.fromkeys(await manager.aready_obs(), 1)
    await manager.astep(actions)
    manager.send(dict.fromkeys(await manager.aready_obs(), 2))
    await manager.arecv(1)
    if manager.pending_env:
        await manager.arecv_arrays(1, 0.0)
    async for _ in manager.arrivals():
        pass


async def use_failing(manager: Any) -> None:
    """Use envs that fail, and wait while all are taken."""
    async with manager.lease() as env, manager.lease():
        waiting = manager.lease(acquire_timeout_s=0.05)
        with contextlib.suppress(LeaseTimeoutError):
            async with waiting:
                pass
        await env.reset(seed=1)
        await env.step(RAISE)
        await env.reset(seed=2)
        await env.step(1)


async def use_beside_leases(manager: Any) -> None:
    """Use calls for batches while a thread leases whatever is free."""
    ended, wrong = threading.Event(), list[str]()

    def lease() -> None:
        while not ended.is_set():
            with (
                contextlib.suppress(LeaseTimeoutError),
                manager.lease(acquire_timeout_s=0.05) as env,
            ):
                obs, _ = env.reset(seed=7)
                timestep = env.step(5)
                if obs.tolist() != [7.0, 0.0, -1.0] or timestep.obs.tolist() != [7.0, 1.0, 5.0]:
                    wrong.append(f"a lease gave {obs} and {timestep}")

    thread = threading.Thread(target=lease)
    thread.start()
    try:
        for k in range(3):
            # There is none, or one is leased, or reset after a lease, before it is stepped.
            with contextlib.suppress(NothingReadyError, EnvLeasedError, EnvNotReadyError):
                await manager.astep(dict.fromkeys(await manager.aready_obs(), k))
    finally:
        ended.set()
        thread.join()
    if wrong:
        raise AssertionError(wrong)


class Wrong(NamedTuple):
    """What has gone wrong after a cancellation."""

    point: int
    moment: str
    what: str


async def look(manager: Any) -> str:
    """Return what is wrong with a manager after a cancellation, in words; empty if nothing is."""
    owed = set(manager.pending_env)
    while owed:
        came = await manager.arecv(1)
        if not set(came) <= owed:
            return f"timesteps of {sorted(came)}, of which {sorted(owed)} were owed"
        owed -= set(came)
    leases = [manager.lease(acquire_timeout_s=PATIENCE_S) for _ in range(manager.env_num)]
    envs = [await lease.__aenter__() for lease in leases]  # each of them is free
    for seed, env in enumerate(envs):
        obs, _ = await env.reset(seed=seed)
        timestep = await env.step(4)
        if obs.tolist() != [seed, 0.0, -1.0] or timestep.obs.tolist() != [seed, 1.0, 4.0]:
            return f"env {env.env_id} gave {obs} and {timestep}"
    for lease in leases:
        await lease.__aexit__(None, None, None)
    stats = manager.stats()
    if stats["actions"] != stats["timesteps"] + stats["cancelled"] or stats["outstanding"]:
        return f"accounts: {stats}"
    return ""


def cancel_everywhere(
    cfg: dict[str, Any],
    *,
    most: int,
    env_num: int = 2,
    uses: Sequence[Use] = (use_all, use_failing),
    library: Library = ASYNCIO,
) -> tuple[int, list[Wrong]]:
    """Cancel coroutines at each of their awaits in turn, in each moment, and look at the manager.

    Args:
        cfg: of the manager.
        most: how many points; once all were cancelled they are begun anew.
        env_num: how many envs.
        uses: what is done with the manager.
        library: runs the coroutines.

    Returns:
        How many different points there are, and what was wrong.
    """
    wrong: list[Wrong] = []
    seen: set[tuple[str, int, str]] = set()
    keys = {"max_failures": 10**6, "max_failures_total": 10**6, "retry_waiting_time": 0.0}

    async def at(use: Use, point: int, moment: str) -> bool:
        reached = await library.within(
            library.cancelled_at(use, manager, point, moment), PATIENCE_S
        )
        if what := await library.within(look(manager), PATIENCE_S):
            wrong.append(Wrong(point, moment, what))
        return reached

    with create_env_manager({**cfg, **keys}, env_fn=[Told] * env_num) as manager:
        n_points = 0
        for use, moment in itertools.cycle(itertools.product(uses, library.moments)):
            for point in itertools.count(1):
                n_points += 1
                if n_points > most:
                    return len(seen), wrong
                try:
                    if not library.run(at(use, point, moment)):
                        break
                except TimeoutError:
                    wrong.append(Wrong(point, moment, "it waits for ever"))
                seen.add((use.__name__, point, moment))
    raise AssertionError("the cycle has an end")


def cancel_launch_and_close(
    cfg: dict[str, Any], most: int, env_num: int = 2, library: Library = ASYNCIO
) -> list[Wrong]:
    """Cancel a coroutine that launches a manager, leases an env and closes it, at each await."""
    wrong: list[Wrong] = []

    async def use(manager: Any) -> None:
        async with manager, manager.lease() as env:
            await env.reset()
            await env.step(1)

    async def at(point: int, moment: str) -> bool:
        manager = create_env_manager(cfg, env_fn=[Told] * env_num)
        try:
            return await library.within(
                library.cancelled_at(use, manager, point, moment), PATIENCE_S
            )
        finally:
            if not manager.closed:
                wrong.append(Wrong(point, moment, "it is not closed"))
                manager.close()

    n_points = 0
    for moment in itertools.cycle(library.moments):
        for point in itertools.count(1):
            n_points += 1
            if n_points > most:
                return wrong
            if not library.run(at(point, moment)):
                break
    raise AssertionError("the cycle has an end")
