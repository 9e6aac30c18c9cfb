"""Leases and awaited calls where trio runs the coroutines."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import trio

from envmgr import create_env_manager
from envmgr.errors import EnvTimeout, LeaseTimeoutError, WrongLoopError
from envmgr.manager.threads import LAUNCHING
from tests.contract.cancelled import TRIO, cancel_everywhere, cancel_launch_and_close
from tests.contract.leased import HANG, SLOW, SLOW_S, Told
from tests.contract.test_leases import ENDLESS, PATIENCE_S, accounts_of

KINDS: tuple[dict[str, Any], ...] = ({"type": "base"}, {"type": "thread"}, {"type": "subprocess"})
every_kind = pytest.mark.parametrize("cfg", KINDS, ids=lambda cfg: cfg["type"])
PROCESSES = KINDS[2]


def make(cfg: dict[str, Any], env_num: int = 2, **keys: Any) -> Any:
    return create_env_manager({**cfg, **ENDLESS, **keys}, env_fn=[Told] * env_num)


def runs(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def within() -> None:
        with trio.fail_after(PATIENCE_S):
            await main()

    trio.run(within)


@every_kind
def test_many_tasks_have_an_env_each(cfg: dict[str, Any]) -> None:
    async def main() -> None:
        async with make(cfg) as manager:

            async def work(k: int) -> None:
                async with manager.lease() as env:
                    for turn in range(2):
                        obs, _ = await env.reset(seed=10 * k + turn)
                        assert obs.tolist() == [10 * k + turn, 0.0, -1.0]
                        timestep = await env.step(3)
                        assert timestep.obs.tolist() == [10 * k + turn, 1.0, 3.0]

            async with trio.open_nursery() as nursery:
                for k in range(8):
                    nursery.start_soon(work, k)
            assert accounts_of(manager) == (16, 16, 0, 0)

    runs(main)


@every_kind
def test_calls_for_batches_may_be_awaited(cfg: dict[str, Any]) -> None:
    async def main() -> None:
        async with make(cfg, 3) as manager:
            assert sorted(await manager.aready_obs()) == [0, 1, 2]
            manager.send({0: 5, 1: 6, 2: 7})
            got = {i: t.reward async for i, t in manager.arrivals()}
            assert got == {0: 5.0, 1: 6.0, 2: 7.0}

    runs(main)


def test_limits_of_ours_and_of_the_caller() -> None:
    async def main() -> None:
        async with make(PROCESSES, release_timeout=0.2) as manager:
            async with manager.lease() as env:
                await env.reset()
                timestep = await env.step(HANG, timeout_s=0.2)
                assert isinstance(timestep.info["error"], EnvTimeout)
                await env.reset()
                with trio.move_on_after(0.1) as scope:
                    await env.step(HANG)
                assert scope.cancelled_caught
            async with manager.lease() as one, manager.lease() as other:
                for leased in (one, other):
                    await leased.reset()
                    assert (await leased.step(4)).reward == 4.0
                with pytest.raises(LeaseTimeoutError):
                    async with manager.lease(acquire_timeout_s=0.1):
                        pass

    runs(main)


def test_a_lease_of_another_loop_is_refused() -> None:
    with make(PROCESSES) as manager:
        leases: list[Any] = []

        async def take() -> None:
            lease = manager.lease()
            leases.append((lease, await lease.__aenter__()))

        async def use() -> None:
            with pytest.raises(WrongLoopError):
                await leases[0][1].reset()

        runs(take)
        runs(use)
        leases.clear()


@every_kind
def test_cancelled_at_any_await_nothing_is_lost(cfg: dict[str, Any]) -> None:
    n_points, wrong = cancel_everywhere(cfg, most=60, library=TRIO)
    assert wrong == []
    assert n_points > 30


@pytest.mark.parametrize(("cfg", "most"), [(KINDS[1], 20), (PROCESSES, 5)], ids=["thread", "each"])
def test_launch_and_close_are_cancelled_cleanly(cfg: dict[str, Any], most: int) -> None:
    assert cancel_launch_and_close(cfg, most=most, library=TRIO) == []


def test_ctrl_c_in_a_call_is_no_cancellation_and_loses_nothing_either() -> None:
    """trio raises it in the main task, in whatever that awaits."""

    async def main() -> None:
        async with make(PROCESSES, 1) as manager:
            await manager.aready_obs()
            manager.send({0: SLOW})
            timer = threading.Timer(SLOW_S / 6, signal.raise_signal, [signal.SIGINT])
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                await manager.arecv(1)
            timer.join()
            assert (await manager.arecv(1))[0].reward == SLOW
            assert accounts_of(manager)[3] == 0

    trio.run(main)


def test_ctrl_c_in_a_launch_closes_what_is_launched() -> None:
    manager = make(PROCESSES, 4)

    async def main() -> None:
        timer = threading.Timer(0.05, signal.raise_signal, [signal.SIGINT])
        timer.start()
        try:
            await manager.__aenter__()
        finally:
            timer.join()

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    while threading.active_count() > 1 and any(
        thread.name == LAUNCHING for thread in threading.enumerate()
    ):
        pass  # it goes on behind, and is undone
    assert manager.closed
