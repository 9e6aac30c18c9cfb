"""Leases of real managers: by threads, by coroutines, beside calls for batches."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import gc
import math
import os
import random
import selectors
import signal
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from envmgr import create_env_manager
from envmgr.errors import (
    ActionError,
    AllEnvsFailedError,
    ConcurrentCallError,
    ConfigError,
    EnvCallAbandoned,
    EnvCrash,
    EnvLeasedError,
    EnvNotReadyError,
    EnvRaised,
    EnvTimeout,
    LeaseEndedError,
    LeaseError,
    LeaseTimeoutError,
    ManagerClosedError,
    NothingReadyError,
    SlotBusyError,
    WrongLoopError,
)
from envmgr.outcomes import OutcomeStatus
from tests.contract.cancelled import (
    cancel_everywhere,
    cancel_launch_and_close,
    use_beside_leases,
)
from tests.contract.leased import (
    AT_GATE,
    DIE,
    END,
    HANG,
    INTERRUPT,
    RAISE,
    SLOW,
    SLOW_S,
    Told,
    let_go,
)
from tests.contract.leased_stress import stress
from tests.faults.interrupting import Point, act_at

KINDS: tuple[dict[str, Any], ...] = (
    {"type": "base"},
    {"type": "thread"},
    {"type": "subprocess"},
    {"type": "async_subprocess", "shared_memory": False},
    {"type": "subprocess", "num_workers": 1},
)
every_kind = pytest.mark.parametrize("cfg", KINDS, ids=lambda cfg: "-".join(map(str, cfg.values())))
KILLABLE = KINDS[1:]
killable = pytest.mark.parametrize(
    "cfg", KILLABLE, ids=lambda cfg: "-".join(map(str, cfg.values()))
)
PROCESSES: dict[str, Any] = {"type": "subprocess"}
PATIENCE_S = 30.0

ENDLESS = {"max_failures": 10_000, "max_failures_total": 10_000, "retry_waiting_time": 0.0}


@pytest.fixture(autouse=True)
def _threads_that_hang_end() -> Iterator[None]:
    let_go.clear()
    yield
    let_go.set()


def make(cfg: dict[str, Any], env_num: int = 2, **keys: Any) -> Any:
    return create_env_manager({**cfg, **ENDLESS, **keys}, env_fn=[Told] * env_num)


def runs(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def in_threads(n: int, work: Callable[[int], None]) -> None:
    """Run something in n threads at once; raise what the first of them raises."""
    errors: list[BaseException] = []

    def run(k: int) -> None:
        try:
            work(k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    if errors:
        raise errors[0]


def accounts_of(manager: Any) -> tuple[int, ...]:
    stats = manager.stats()
    assert stats["actions"] == stats["timesteps"] + stats["cancelled"] + stats["outstanding"]
    return tuple(stats[name] for name in ("actions", "timesteps", "cancelled", "outstanding"))


def play(env: Any, seed: int, steps: int = 5) -> None:
    """Play in a leased env, and look at all that it says."""
    obs, info = env.reset(seed=seed, options={"of": seed})
    assert obs.tolist() == [seed, 0.0, -1.0]
    assert info["options"] == {"of": seed}
    for k in range(1, steps + 1):
        timestep = env.step(k)
        assert timestep.obs.tolist() == [seed, k, k]
        assert timestep.reward == float(k)
        assert env.outcome.is_completed
        assert env.outcome.env_id == env.env_id


# -- threads, coroutines ---------------------------------------------------------------------------


@every_kind
def test_many_threads_have_an_env_each(cfg: dict[str, Any]) -> None:
    with make(cfg) as manager:

        def work(k: int) -> None:
            for turn in range(3):
                with manager.lease() as env:
                    play(env, 100 * k + turn)

        in_threads(8, work)
        assert accounts_of(manager) == (120, 120, 0, 0)
        assert manager.stats()["leases"] == 24
        play_batch(manager)


def play_batch(manager: Any) -> None:
    """Step all envs that are free in one call, as if there were no leases."""
    sent = dict.fromkeys(manager.ready_arrays(range(manager.env_num)).env_ids.tolist(), 1)
    manager.send(sent)
    timesteps = {}
    while len(timesteps) < len(sent):
        timesteps.update(manager.recv())
    assert {i: t.reward for i, t in timesteps.items()} == dict.fromkeys(sent, 1.0)


@every_kind
def test_many_coroutines_have_an_env_each(cfg: dict[str, Any]) -> None:
    async def rollout(manager: Any, seed: int) -> float:
        async with manager.lease() as env:
            obs, info = await env.reset(seed=seed, options={"of": seed})
            assert obs.tolist() == [seed, 0.0, -1.0]
            assert info["options"] == {"of": seed}
            for k in range(1, 4):
                timestep = await env.step(k)
                assert timestep.obs.tolist() == [seed, k, k]
            assert env.episode_outcome is None
            await env.step(END)
            reward: float = env.episode_outcome.reward
            return reward

    async def main() -> None:
        async with make(cfg) as manager:
            rewards = await asyncio.gather(*(rollout(manager, seed) for seed in range(20)))
            assert rewards == [6.0 + END] * 20
            assert accounts_of(manager) == (80, 80, 0, 0)
        assert manager.closed

    runs(main)


def test_inline_one_thread_runs_all_code_of_envs() -> None:
    async def main() -> None:
        async with make({"type": "base"}) as manager:
            names = set()
            async with manager.lease() as env:
                names.add((await env.reset())[1]["thread"])
                names.add((await env.step(1)).info["thread"])
            batch = await manager.astep(dict.fromkeys(await manager.aready_obs(), 1))
            names |= {timestep.info["thread"] for timestep in batch.values()}
            assert len(names) == 1
            assert names != {threading.current_thread().name}

    runs(main)


@killable
def test_a_slow_env_keeps_nobody_waiting(cfg: dict[str, Any], tmp_path: Path) -> None:
    if "num_workers" in cfg:
        return  # where envs take turns
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    with make(cfg) as manager:
        slow_began, opened = threading.Event(), list[int]()

        def slow() -> None:
            with manager.lease() as env:
                env.reset(options={"gate": gate})
                slow_began.set()
                env.step(AT_GATE)

        def quick() -> None:
            try:
                with manager.lease() as env:
                    env.reset()
                    slow_began.wait(PATIENCE_S)
                    for k in range(10):
                        env.step(k)
            finally:
                opened.append(os.open(gate, os.O_RDWR))

        in_threads(2, lambda k: (slow, quick)[k]())
        os.close(opened[0])


# -- failures, limits ------------------------------------------------------------------------------


@every_kind
def test_a_failed_step_has_no_reward_and_the_env_comes_back(cfg: dict[str, Any]) -> None:
    faults = [(RAISE, EnvRaised, OutcomeStatus.FAILED)]
    if "subprocess" in cfg["type"]:
        faults.append((DIE, EnvCrash, OutcomeStatus.UNRESOLVED))
    with make(cfg) as manager, manager.lease() as env:
        for action, kind, status in faults:
            play(env, 3)
            timestep = env.step(action)
            assert timestep.reward is None
            assert timestep.done
            assert type(timestep.info["error"]) is kind
            assert env.outcome.status is status
            assert env.outcome.cause is timestep.info["error"]
            assert env.episode_outcome.during == "episode"
            assert env.episode_outcome.status is status
            with pytest.raises(EnvNotReadyError, match=r"reset\(\) first"):
                env.step(1)
        play(env, 4)


@killable
def test_a_limit_ends_the_worker_and_says_where_it_hung(cfg: dict[str, Any]) -> None:
    with make(cfg) as manager, manager.lease(episode_timeout_s=20.0) as env:
        env.reset()
        timestep = env.step(HANG, timeout_s=1.0)
        error = timestep.info["error"]
        assert isinstance(error, EnvTimeout)
        assert "1 s of timeout_s" in str(error)
        assert "leased.py" in error.stacks
        assert env.outcome.status is OutcomeStatus.UNRESOLVED
        env.reset()  # without a limit: a new worker has to be started
        with pytest.raises(EnvTimeout, match="timeout_s in its reset"):
            env.reset(seed=1, options={"hang": True}, timeout_s=1.0)
        play(env, 5)


def test_failures_raise_and_close_where_the_config_says_so() -> None:
    with make(PROCESSES, on_failure="raise") as manager, manager.lease() as env:
        env.reset()
        with pytest.raises(EnvRaised):
            env.step(RAISE)
        assert manager.closed
        with pytest.raises(ManagerClosedError):
            env.step(1)


def test_an_env_that_is_given_up_is_leased_no_more() -> None:
    with make(PROCESSES, 1, max_failures=0, on_exhausted="drop") as manager:
        with manager.lease() as env:
            env.reset()
            assert env.step(RAISE).reward is None
        with pytest.raises((AllEnvsFailedError, NothingReadyError), match="no env can be leased"):
            manager.lease().__enter__()


# -- beside calls for batches ----------------------------------------------------------------------


@every_kind
def test_calls_for_batches_go_on_beside_leases(cfg: dict[str, Any]) -> None:
    with make(cfg, 3) as manager, manager.lease() as env:
        leased = env.env_id
        free = [i for i in range(3) if i != leased]
        assert manager.ready_env == free
        assert sorted(manager.ready_obs) == free
        with pytest.raises(EnvLeasedError, match=rf"envs \[{leased}\]"):
            manager.step(dict.fromkeys(range(3), 1))
        for call in (
            lambda: manager.reset({leased: None}),
            lambda: manager.get_attr("_steps"),
            lambda: manager.call("close_all"),
            lambda: manager.send_arrays([leased], [1]),
            manager.snapshot,
        ):
            with pytest.raises(EnvLeasedError):
                call()
        done = threading.Event()

        def batches() -> None:
            for k in range(20):
                manager.send(dict.fromkeys(free, k))
                came: dict[int, Any] = {}
                while len(came) < len(free):
                    came.update(manager.recv())
                assert {i: t.reward for i, t in came.items()} == dict.fromkeys(free, float(k))
            done.set()

        def slots() -> None:
            seed = 0
            while not done.is_set() or seed < 3:
                play(env, seed)
                seed += 1

        in_threads(2, lambda k: (batches, slots)[k]())
        manager.reset()
        assert env.step(6).obs.tolist()[2] == 6.0, "reset() without ids is for those it sees"
        assert accounts_of(manager)[3] == 0


def test_one_call_for_batches_at_a_time_also_beside_leases() -> None:
    with make(PROCESSES, 2) as manager, manager.lease() as env:
        env.reset()
        (other,) = manager.ready_env
        refused: list[Exception] = []

        def second() -> None:
            while not manager.env_states or not refused:
                try:
                    manager.recv(timeout_s=0)
                except (ConcurrentCallError, NothingReadyError) as error:
                    if isinstance(error, ConcurrentCallError):
                        refused.append(error)

        thread = threading.Thread(target=second)
        thread.start()
        while not refused:
            with_retry(lambda: manager.step({other: SLOW}))
        thread.join(PATIENCE_S)
        assert env.step(1).reward == 1.0


def with_retry(call: Callable[[], Any]) -> None:
    """Make a call, again if another one is under way."""
    while True:
        try:
            call()
            return
        except ConcurrentCallError:
            pass
        except EnvNotReadyError:
            return


def test_no_env_is_leased_before_the_call_that_gathered_it_has_returned() -> None:
    with make(PROCESSES, 2) as manager:
        leased, keeps = threading.Event(), threading.Event()

        def lease() -> None:
            with manager.lease():
                leased.set()
                keeps.wait(PATIENCE_S)

        def interrupt() -> None:
            assert not leased.wait(0.3), "leased, while the call may still give the timesteps back"
            raise KeyboardInterrupt

        def gather() -> dict[int, Any]:
            gathered: dict[int, Any] = manager.recv(2)
            return gathered

        manager.send({0: 1, 1: 1})
        thread = threading.Thread(target=lease)
        code = manager.recv.__func__.__code__
        store = [i for i in dis.get_instructions(code) if i.argval == "returning"][-1]
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                act_at(Point(code, store.offset, True, 1), gather, interrupt)
            assert {i: t.reward for i, t in gather().items()} == {0: 1.0, 1: 1.0}
            assert leased.wait(PATIENCE_S)
        finally:
            keeps.set()
            thread.join(PATIENCE_S)


def test_a_lease_that_is_asked_for_within_a_step_waits_for_its_end() -> None:
    with make(PROCESSES, 2) as manager:
        delivered = []

        def lease() -> None:
            with manager.lease() as env:
                delivered.append(manager.stats()["timesteps"])
                play(env, 1)

        manager.send({0: SLOW, 1: SLOW})
        thread = threading.Thread(target=lease)
        thread.start()
        came = manager.recv(2)
        assert sorted(came) == [0, 1]
        thread.join(PATIENCE_S)
        assert delivered == [2], "until both were delivered, both envs owed a timestep"


# -- misuse ----------------------------------------------------------------------------------------


def test_misuse_of_a_lease_by_threads(tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    with make(PROCESSES, 2) as manager:
        with manager.lease() as env:
            with pytest.raises(EnvNotReadyError, match=r"reset\(\) first"):
                env.step(1)
            env.reset(options={"gate": gate})
            with pytest.raises(ActionError, match="refused"):
                env.step(-3)
            with pytest.raises(ConfigError):
                env.step(1, timeout_s=0)
            with pytest.raises(ConfigError):
                env.reset(seed="x")
            with pytest.raises(ConfigError, match="0 or more"):
                env.reset(seed=-1)
            with pytest.raises(ConfigError, match="cannot be sent"):
                env.reset(options={"lock": threading.Lock()})
            assert env.step(1).obs.tolist()[1] == 1.0, "nothing of that was sent"
            thread = threading.Thread(target=env.step, args=(AT_GATE,))
            thread.start()
            while manager.stats()["outstanding"] == 0:
                time.sleep(0.001)
            with pytest.raises(SlotBusyError):
                env.step(1)
            opened = os.open(gate, os.O_RDWR)
            thread.join(PATIENCE_S)
            os.close(opened)
            with manager.lease(), pytest.raises(LeaseTimeoutError, match="acquire_timeout_s"):
                manager.lease(acquire_timeout_s=0.1).__enter__()
        with pytest.raises(LeaseEndedError):
            env.step(1)
        lease = manager.lease()
        with lease:
            pass
        with pytest.raises(LeaseError, match="used before"), lease:
            pass
    with pytest.raises(ManagerClosedError):
        manager.lease().__enter__()
    with pytest.raises(LeaseEndedError):
        env.reset()


def test_misuse_of_a_lease_by_coroutines() -> None:
    async def main() -> None:
        async with make(PROCESSES, 1) as manager:
            async with manager.lease() as env:
                await env.reset()
                both = await asyncio.gather(env.step(SLOW), env.step(2), return_exceptions=True)
                assert both[0].reward == SLOW
                assert isinstance(both[1], SlotBusyError)

                async def elsewhere() -> None:
                    with pytest.raises(WrongLoopError):
                        await env.step(1)

                await asyncio.to_thread(asyncio.run, elsewhere())
                with pytest.raises(LeaseTimeoutError):
                    async with manager.lease(acquire_timeout_s=0.05):
                        pass
            with pytest.raises(LeaseEndedError):
                await env.step(1)

    runs(main)


def test_configs_whose_envs_cannot_be_leased() -> None:
    for keys, text in (
        ({"normalize_obs": True}, "normalize_obs"),
        ({"context": "fork"}, "context: fork"),
    ):
        with pytest.raises(ConfigError, match=text):
            make(PROCESSES, 1, **keys).lease()


@killable
def test_close_answers_everybody(cfg: dict[str, Any]) -> None:
    errors: list[Exception] = []
    manager = make(cfg, 1, close_timeout=0.1)
    with manager:
        inside = threading.Event()

        def hang() -> None:
            try:
                with manager.lease() as env:
                    env.reset()
                    inside.set()
                    env.step(HANG)
            except ManagerClosedError as error:
                errors.append(error)

        def wait() -> None:
            inside.wait(PATIENCE_S)
            try:
                with manager.lease():
                    pass
            except ManagerClosedError as error:
                errors.append(error)

        threads = [threading.Thread(target=hang), threading.Thread(target=wait)]
        for thread in threads:
            thread.start()
        inside.wait(PATIENCE_S)
        while manager.stats()["outstanding"] == 0:
            time.sleep(0.001)
        manager.close(0.1)
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(errors) == 2
        assert accounts_of(manager)[3] == 0


# -- what is cancelled -----------------------------------------------------------------------------


def test_a_cancelled_step_is_never_sent_again_and_its_env_is_ended_in_time() -> None:
    async def main() -> None:
        async with make(PROCESSES, 1, release_timeout=0.2) as manager:
            async with manager.lease() as env:
                await env.reset()
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(env.step(HANG), 0.1)
                assert env.outcome.status is OutcomeStatus.UNRESOLVED
                assert isinstance(env.outcome.cause, EnvCallAbandoned)
                with pytest.raises(EnvNotReadyError):
                    await env.step(1)
            async with manager.lease() as env:  # the same env, which had to be ended
                obs, _ = await env.reset(seed=3)
                assert obs.tolist()[0] == 3.0
                assert env.outcome.generation == 1
            assert manager.stats()["cancelled"] == 1
            accounts_of(manager)

    runs(main)


def test_a_lease_is_given_back_in_every_case() -> None:
    async def main() -> None:
        async with make(PROCESSES, 1) as manager:

            async def holds(ready: asyncio.Event) -> None:
                async with manager.lease() as env:
                    await env.reset()
                    ready.set()
                    await asyncio.sleep(600.0)

            for _ in range(3):
                ready = asyncio.Event()
                task = asyncio.ensure_future(holds(ready))
                await ready.wait()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            with pytest.raises(ZeroDivisionError):
                async with manager.lease() as env:
                    1 / 0  # noqa: B018
            async with manager.lease() as env:
                waiting = [asyncio.ensure_future(manager.lease().__aenter__()) for _ in range(3)]
                await asyncio.sleep(0)
                for one in waiting:
                    one.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
            lease = manager.lease()
            env = await lease.__aenter__()
            del lease, env  # nobody ends it
            gc.collect()
            async with manager.lease(acquire_timeout_s=PATIENCE_S) as env:
                await env.reset()

    runs(main)


def test_a_loop_that_ends_gives_its_envs_back() -> None:
    with make(PROCESSES, 1) as manager:

        async def leaves() -> None:
            env = await manager.lease().__aenter__()
            await env.reset()
            kept.append(asyncio.ensure_future(env.step(SLOW)))
            await asyncio.sleep(0)

        kept: list[Any] = []
        asyncio.run(leaves())
        kept.clear()
        gc.collect()
        with manager.lease(acquire_timeout_s=PATIENCE_S) as env:
            play(env, 1)


@pytest.mark.parametrize("awaits", ["an env", "an answer"])
def test_a_loop_that_is_closed_with_coroutines_pending_gives_its_envs_back(awaits: str) -> None:
    async def leaves() -> None:
        async with manager.lease() as env:
            await env.reset()
            pending.set()
            await env.step(SLOW)

    async def starts() -> None:
        kept.append(asyncio.ensure_future(leaves()))
        kept[0]._log_destroy_pending = False
        await asyncio.sleep(0)
        if awaits == "an answer":
            await pending.wait()

    with make(PROCESSES, 1) as manager:
        loop, pending, kept = asyncio.new_event_loop(), asyncio.Event(), list[Any]()
        with manager.lease() if awaits == "an env" else contextlib.nullcontext():
            loop.run_until_complete(starts())
            loop.close()
        with manager.lease(acquire_timeout_s=PATIENCE_S) as env:
            play(env, 1)


@pytest.mark.parametrize("cfg", KINDS[:3], ids=lambda cfg: cfg["type"])
def test_cancelled_at_any_await_nothing_is_lost(cfg: dict[str, Any]) -> None:
    """`make soak ARGS='--only leases'` does the same thousands of times."""
    n_points, wrong = cancel_everywhere(cfg, most=90)
    assert wrong == []
    assert n_points > 60


def test_cancelled_beside_a_lease_that_waits_nothing_is_lost() -> None:
    _, wrong = cancel_everywhere(PROCESSES, most=200, uses=(use_beside_leases,))
    assert wrong == []


@pytest.mark.parametrize(("cfg", "most"), [(KINDS[1], 40), (PROCESSES, 7)], ids=["thread", "each"])
def test_launch_and_close_are_cancelled_cleanly(cfg: dict[str, Any], most: int) -> None:
    assert cancel_launch_and_close(cfg, most=most) == []


# -- calls for batches, of coroutines --------------------------------------------------------------


@every_kind
def test_calls_for_batches_may_be_awaited(cfg: dict[str, Any]) -> None:
    async def main() -> None:
        async with make(cfg, 3) as manager:
            obs = await manager.aready_obs()
            assert sorted(obs) == [0, 1, 2]
            manager.send({0: 5, 1: 6, 2: 7})
            got = {}
            async for env_id, timestep in manager.arrivals():
                got[env_id] = timestep.reward
            assert got == {0: 5.0, 1: 6.0, 2: 7.0}
            with pytest.raises(NothingReadyError):
                await manager.arecv()
            manager.send(dict.fromkeys(range(3), 8))
            batch = await manager.arecv_arrays(3)
            assert batch.reward.tolist() == [8.0] * 3

    runs(main)


def test_what_arrivals_has_not_given_comes_later() -> None:
    async def main() -> None:
        async with make(PROCESSES, 3) as manager:
            manager.send({0: 5, 1: 6, 2: 7})
            got: dict[int, float] = {}
            while len(got) < 3:
                got.update({i: t.reward for i, t in (await manager.arecv(3, 0.01)).items()})
            manager.send({0: 5, 1: 6, 2: 7})
            got = {}
            arrivals = manager.arrivals()
            async for env_id, timestep in arrivals:
                got[env_id] = timestep.reward
                break
            await arrivals.aclose()
            while len(got) < 3:
                got.update({i: t.reward for i, t in (await manager.arecv(1)).items()})
            assert got == {0: 5.0, 1: 6.0, 2: 7.0}
            assert accounts_of(manager)[3] == 0

    runs(main)


def test_arrivals_may_be_left_with_nothing_else_and_lose_nothing() -> None:
    async def main() -> None:
        async with make(PROCESSES, 4) as manager:
            for _ in range(20):
                manager.send({0: 5, 1: 6, 2: 7, 3: SLOW})
                got: dict[int, float] = {}
                await asyncio.sleep(0.05)  # the first three have arrived
                async for env_id, timestep in manager.arrivals():
                    got[env_id] = timestep.reward
                    break
                while len(got) < 4:
                    got.update({i: t.reward for i, t in (await manager.arecv(1)).items()})
                assert got == {0: 5.0, 1: 6.0, 2: 7.0, 3: float(SLOW)}
            assert accounts_of(manager)[3] == 0

    runs(main)


def test_arrivals_give_envs_in_turn() -> None:
    async def main() -> None:
        async with make(KINDS[0], 3) as manager:
            manager.send(dict.fromkeys(range(3), 1))
            seen: list[int] = []
            async for env_id, _ in manager.arrivals():
                seen.append(env_id)
                if len(seen) < 60:
                    manager.send({env_id: 1})
            assert min(map(seen.count, range(3))) > 10

    runs(main)


def test_a_call_that_is_cancelled_in_the_queue_leaves_the_others_alone() -> None:
    async def main() -> None:
        async with make(PROCESSES, 2) as manager:
            manager.send({0: SLOW})
            first = asyncio.ensure_future(manager.arecv(1))
            await asyncio.sleep(0.05)
            second = asyncio.ensure_future(manager.arecv(1))
            await asyncio.sleep(0)
            second.cancel()
            assert [*(await first)] == [0]
            with pytest.raises(asyncio.CancelledError):
                await second
            manager.send({1: 3})
            assert (await manager.arecv(1))[1].reward == 3.0
            assert accounts_of(manager)[3] == 0

    runs(main)


def test_a_thread_for_calls_that_cannot_be_had_may_be_had_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, refused = threading.Thread.start, [RuntimeError("can't start new thread")]

    def refuses(thread: threading.Thread) -> None:
        if refused and "calls of coroutines" in thread.name:
            raise refused.pop()
        start(thread)

    async def main() -> None:
        async with make(PROCESSES, 1) as manager:
            monkeypatch.setattr(threading.Thread, "start", refuses)
            with pytest.raises(RuntimeError):
                await manager.aready_obs()
            assert [*(await manager.aready_obs())] == [0]

    runs(main)


def test_a_call_that_is_cancelled_at_once_does_not_wait() -> None:
    async def main() -> None:
        async with make(PROCESSES, 1) as manager:
            async with manager.lease() as env:
                await env.reset()
            await manager.aready_obs()
            for _ in range(20):
                manager.send({0: SLOW})
                call = asyncio.ensure_future(manager.arecv(1))
                await asyncio.sleep(0)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.wait_for(call, 10.0)
                assert [*(await manager.arecv(1))] == [0]

    runs(main)


# -- what must not end the thread that owns the envs -----------------------------------------------


@pytest.mark.parametrize("cfg", [KINDS[0], PROCESSES], ids=["base", "subprocess"])
def test_a_limit_may_be_as_long_as_one_likes(cfg: dict[str, Any]) -> None:
    with make(cfg, connect_timeout=30.0) as manager:
        with manager.lease(episode_timeout_s=1e9) as env:
            env.reset(timeout_s=3e6)
            manager._running.supervisor.hosts.limits.earliest = math.inf  # as after a while
            for k in range(3):
                assert env.step(k, timeout_s=3e6).reward == float(k)
        with manager.lease() as env:
            play(env, 1)


def test_an_env_that_raises_an_interrupt_fails_and_nobody_else() -> None:
    with make({"type": "base"}) as manager:
        with manager.lease() as env:
            env.reset()
            timestep = env.step(INTERRUPT)
            assert timestep.info["abnormal"]
            env.reset()
            assert env.step(2).reward == 2.0
        with manager.lease() as env:
            play(env, 1)
        play_batch(manager)


def test_a_start_of_the_owner_that_is_interrupted_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, interrupts = threading.Thread.start, [KeyboardInterrupt]

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if interrupts and "leases" in thread.name:
            raise interrupts.pop()

    with make(PROCESSES) as manager:
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            manager.lease().__enter__()
        with manager.lease(acquire_timeout_s=PATIENCE_S) as env:
            play(env, 1)
        play_batch(manager)


@pytest.mark.parametrize("closes", [False, True])
def test_a_lock_that_an_interrupted_call_has_left_keeps_nobody_waiting(closes: bool) -> None:
    async def main() -> None:
        async with make(PROCESSES) as manager:
            async with manager.lease() as env:
                await env.reset()
            manager._running.engine.lock.acquire()  # in the first bytecodes of a call
            if not closes:
                async with manager.lease(acquire_timeout_s=PATIENCE_S) as env:
                    await env.reset()
                    assert (await env.step(1)).reward == 1.0

    runs(main)


def test_a_handler_within_a_call_is_refused() -> None:
    errors: list[Exception] = []

    def handle(*_: Any) -> None:
        for call in (lambda: env.step(1), lambda: manager.lease().__enter__()):
            try:
                call()
            except Exception as error:
                errors.append(error)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with make(PROCESSES) as manager, manager.lease() as env:
            env.reset()
            with manager._running.calling:  # as in the midst of a call for batches
                signal.raise_signal(signal.SIGUSR1)
            assert [type(error) for error in errors] == [ConcurrentCallError] * 2
            assert env.step(1).reward == 1.0
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_lease_from_before_a_fork_is_refused_in_the_child() -> None:
    with make(PROCESSES) as manager, manager.lease() as env:
        env.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            signal.alarm(int(PATIENCE_S))
            try:
                env.step(1)
            except ManagerClosedError:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert env.step(2).reward == 2.0


def test_its_fd_is_readable_while_there_is_something_to_gather() -> None:
    with make({"type": "async_subprocess"}, 2) as manager, selectors.DefaultSelector() as selector:
        selector.register(manager.fileno(), selectors.EVENT_READ)
        for k in range(20):
            manager.send({0: k, 1: k})
            got: dict[int, Any] = {}
            while len(got) < 2:
                assert selector.select(PATIENCE_S)
                got.update(manager.recv(timeout_s=0))
            assert not selector.select(0), "all was gathered"


# -- all at once -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", [PROCESSES, KINDS[4]], ids=["each", "shared"])
def test_under_stress_nothing_is_lost_repeated_or_mixed_up(cfg: dict[str, Any]) -> None:
    """`make soak ARGS='--only leases'` does the same for longer."""
    is_shared = "num_workers" in cfg  # where each fault costs all of them
    faults = 0.002 if is_shared else 0.01
    seed = random.randrange(1 << 30)
    found = stress(cfg, env_num=8, n_threads=32, n_steps=500, seed=seed, faults=faults)
    assert found.wrong == []


def test_a_killed_worker_is_replaced_behind_its_lease() -> None:
    with make(PROCESSES, 1) as manager, manager.lease() as env:
        play(env, 1)
        (worker,) = manager.stats()["workers"]
        os.kill(worker["pid"], signal.SIGKILL)
        while manager.stats()["failures"] == 0:
            time.sleep(0.001)
        timestep = env.step(1)
        assert isinstance(timestep.info["error"], EnvCrash)
        assert env.outcome.status is OutcomeStatus.FAILED, "it was not sent"
        play(env, 2)
    assert SLOW_S < PATIENCE_S


@killable
def test_the_options_of_a_reset_that_failed_are_gone_with_it(cfg: dict[str, Any]) -> None:
    with make(cfg, env_num=1, max_retry=1) as manager:
        with manager.lease() as env, pytest.raises(EnvTimeout):
            env.reset(options={"hang": True}, timeout_s=0.3)
        with manager.lease() as env:
            assert env.reset()[1]["options"] == {}
        with manager.lease() as env:
            with pytest.raises(EnvTimeout):
                env.reset(options={"hang": True}, timeout_s=0.3)
            assert env.reset()[1]["options"] == {}


def test_the_seed_of_a_reset_that_failed_is_gone_with_it() -> None:
    with make(PROCESSES, env_num=1, max_retry=1) as manager, manager.lease() as env:
        with pytest.raises(EnvTimeout):
            env.reset(seed=3, options={"hang": True}, timeout_s=0.3)
        assert env.reset()[0].tolist()[0] == -1.0


# -- workers that are replaced ---------------------------------------------------------------------


@pytest.mark.parametrize("spare_env_num", [0, 1])
@pytest.mark.parametrize("cfg", [PROCESSES, KINDS[3]], ids=["block", "message"])
@pytest.mark.parametrize("leaves_lease", [False, True])
def test_a_worker_is_replaced_though_all_its_episodes_are_left(
    leaves_lease: bool, cfg: dict[str, Any], spare_env_num: int
) -> None:
    n_turns, pids = 9, set()
    keys = {"max_episodes_per_worker": 2, "spare_env_num": spare_env_num}
    with make(cfg, env_num=1, max_failures=0, **keys) as manager:
        lease = manager.lease()
        env = lease.__enter__()
        for turn in range(n_turns):
            _, info = env.reset(seed=turn)
            pids.add(info["pid"])
            assert env.step(1).obs.tolist() == [turn, 1.0, 1.0]
            if leaves_lease:
                lease.__exit__(None, None, None)
                lease = manager.lease()
                env = lease.__enter__()
        lease.__exit__(None, None, None)
        stats = manager.stats()
    assert stats["failures"] == stats["abnormal"] == 0
    assert stats["recycled"] >= 3
    assert len(pids) >= 4


def test_a_shared_worker_is_replaced_though_all_its_episodes_are_left() -> None:
    with make(PROCESSES, env_num=4, num_workers=1, max_episodes_per_worker=4) as manager:

        def rollouts(k: int) -> None:
            for turn in range(5):
                with manager.lease() as env:
                    env.reset(seed=100 * k + turn)
                    assert env.step(1).obs.tolist() == [100 * k + turn, 1.0, 1.0]

        in_threads(6, rollouts)
        stats = manager.stats()
    assert stats["failures"] == stats["abnormal"] == 0
    assert stats["recycled"] >= 1


def test_a_spare_comes_while_others_are_in_their_steps(tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    with (
        make(PROCESSES, env_num=2, spare_env_num=1) as manager,
        manager.lease() as slow,
        manager.lease() as env,
    ):
        slow.reset(options={"gate": gate})
        thread = threading.Thread(target=slow.step, args=(AT_GATE,))
        thread.start()
        while manager.stats()["outstanding"] == 0:
            time.sleep(0.001)
        env.reset()
        for _ in range(3):
            assert env.step(END).done
            env.reset(timeout_s=PATIENCE_S)
        assert manager.stats()["swaps"] >= 1
        os.close(os.open(gate, os.O_WRONLY))
        thread.join(PATIENCE_S)
