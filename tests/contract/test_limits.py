"""`limits`: how many envs are built, reset and leased at one time, and how many a machine has."""

from __future__ import annotations

import _thread
import asyncio
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from envmgr import create_env_manager
from envmgr.env import BatchedEnvSpec
from envmgr.errors import (
    CapMismatchError,
    ConfigError,
    EnvFailure,
    LeaseTimeoutError,
    ManagerClosedError,
)
from envmgr.proc import stat_of
from tests.contract.async_envs import Plain
from tests.contract.envs import Do
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_BLOCK_SHARED,
    DEFAULT,
    PATIENCE_S,
    SOME_MESSAGE,
    THREADS,
    Setup,
    World,
    over,
    ready_all,
    step_all,
)
from tests.contract.leased import DIE, END, HANG, RAISE, Told, let_go

CONTEXTS = ("server", "fork", "spawn", "forkserver")


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this user's files: one for each test."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture(autouse=True)
def hangs_end() -> Iterator[None]:
    let_go.clear()
    yield
    let_go.set()


class SlowToBegin(Plain):
    """Lets others come in before its reset is over; says how many it has met there."""

    at_it: ClassVar[int] = 0

    async def reset(self, **params: Any) -> Any:
        """Begin an episode."""
        SlowToBegin.at_it += 1
        most = 0
        for _ in range(20):
            most = max(most, SlowToBegin.at_it)
            await asyncio.sleep(0.002)
        SlowToBegin.at_it -= 1
        obs, _ = await super().reset(**params)
        return obs, {"most": most}


class InThread:
    """A call in a thread of its own, and what comes of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error

    def end(self) -> BaseException | None:
        """Wait for its end, and return what it has raised."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.error


def limits_of(manager: Any) -> dict[str, Any]:
    limits: dict[str, Any] = manager.stats()["limits"]
    return limits


class Waits(logging.Handler):
    """Tells when a launch has begun to wait for units."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "waits for" in record.getMessage():
            self.texts.append(record.getMessage())
            self._came.set()

    def awaited(self) -> str:
        """Return what the log says, once it does."""
        assert self._came.wait(PATIENCE_S)
        return self.texts[0]


@pytest.fixture
def waits() -> Iterator[Waits]:
    handler = Waits()
    logger = logging.getLogger("envmgr")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


# -- starting -------------------------------------------------------------------------------------


def let_in_two_at_a_time(world: World, manager: Any, where: str, count: int) -> None:
    """Have envs that come to the gate go on, which they may do two at a time."""
    first, second = (world.gate.await_visit(where=where) for _ in range(2))
    for left in range(count - 2, -1, -1):
        end = time.monotonic() + PATIENCE_S
        # An env may be at it before that is noted.
        while (n_starting := limits_of(manager)["starting"]) != 2:
            assert n_starting < 2
            assert time.monotonic() < end
        if left < count - 2:  # else the trainer may still be at telling the others to wait
            assert limits_of(manager)["waiting_to_start"] == left
        assert world.gate.nobody_came()
        first.release()
        if left:
            first, second = second, world.gate.await_visit(where=where)
    second.release()


@over(
    DEFAULT,
    Setup("async_subprocess", "server", False),
    THREADS,
    Setup("subprocess", "server", True, 3),
)
def test_a_launch_never_builds_or_resets_more_than_it_may(world: World, setup: Setup) -> None:
    script = {"build_faults": {-1: "gate"}, "reset_faults": {0: "gate"}}
    assert world.gate
    manager = world.make(setup, 5, launch=False, script=script, limits={"starting": 2})
    launch = InThread(manager.launch)
    let_in_two_at_a_time(world, manager, "build", 5)
    let_in_two_at_a_time(world, manager, "reset", 5)
    assert launch.end() is None
    assert all(len(world.noted(env_id, "build")) == 1 for env_id in range(5))
    assert step_all(manager, dict.fromkeys(range(5), 1)).keys() == set(range(5))


@over(ALL_BLOCK, SOME_MESSAGE, ALL_BLOCK_SHARED)
def test_episodes_that_end_together_never_begin_together(world: World, setup: Setup) -> None:
    assert world.gate
    n_hosts = None if setup.num_workers is None else 2
    manager = world.make(setup._replace(num_workers=n_hosts), 4, limits={"starting": 1})
    timesteps = step_all(manager, dict.fromkeys(range(4), Do.END_THEN_GATE))
    assert all(timestep.done for timestep in timesteps.values())
    for left in (3, 2, 1, 0):
        visit = world.gate.await_visit(where="reset")
        limits = limits_of(manager)
        assert (limits["starting"], limits["waiting_to_start"]) == (1, left)
        assert world.gate.nobody_came()
        visit.release()
    assert sorted(ready_all(manager)) == [0, 1, 2, 3]


def test_async_envs_of_one_worker_are_reset_so_many_at_a_time() -> None:
    cfg = {"type": "subprocess", "num_workers": 1, "limits": {"starting": 3}}
    with create_env_manager(cfg, env_fn=[SlowToBegin] * 12) as manager:
        assert sorted(manager.ready_obs) == list(range(12))
        assert max(info["most"] for info in manager.ready_info.values()) == 3


def test_workers_that_die_together_are_renewed_one_after_another(world: World) -> None:
    assert world.gate
    script = {"build_faults": {1: "gate"}}
    manager = world.make(ALL_BLOCK, 3, script=script, limits={"starting": 1})
    step_all(manager, dict.fromkeys(range(3), Do.KILL))
    for _ in range(3):
        visit = world.gate.await_visit(where="build")
        while limits_of(manager)["starting"] != 1:  # it may be at the gate before that is noted
            assert limits_of(manager)["starting"] == 0
        assert world.gate.nobody_came()
        visit.release()
    assert sorted(ready_all(manager)) == [0, 1, 2]


def test_the_time_limit_of_a_construction_counts_from_its_turn(world: World) -> None:
    """The first one takes nearly as long as it may; the others wait for it, and may do so, too."""
    assert world.gate
    scripts = {0: {"build_faults": {0: "gate"}}}
    manager = world.make(
        DEFAULT, 3, launch=False, scripts=scripts, limits={"starting": 1}, connect_timeout=8.0
    )
    launch = InThread(manager.launch)
    visit = world.gate.await_visit(0)
    end = time.monotonic() + PATIENCE_S
    first, *others = manager._running.supervisor.envs
    while first.deadline == float("inf"):  # it may be at the gate before that is noted
        assert time.monotonic() < end
    assert [env.deadline for env in others] == [float("inf")] * 2
    visit.release()
    assert launch.end() is None


def test_a_launch_that_waits_for_turns_can_be_closed(world: World) -> None:
    assert world.gate
    script = {"build_faults": {-1: "gate"}}
    manager = world.make(DEFAULT, 3, launch=False, script=script, limits={"starting": 1})
    launch = InThread(manager.launch)
    world.gate.await_visit(where="build")
    manager.close(terminate=True)
    assert isinstance(launch.end(), ManagerClosedError)
    assert world.noted(1, "build") == world.noted(2, "build") == []


def test_a_factory_that_cannot_be_sent_is_found_before_anything_is_started(world: World) -> None:
    factories = world.factories(3)
    factories[2] = lambda: None
    lock = threading.Lock()
    factories[2].lock = lock  # type: ignore[attr-defined]
    manager = world.make(
        Setup("subprocess", "spawn"),
        env_fn=[*factories[:2], lock.acquire],  # type: ignore[list-item]
        launch=False,
        limits={"starting": 1},
    )
    with pytest.raises(ConfigError, match="env_fn of env 2"):
        manager.launch()
    assert world.journal(0) == []


# -- leases ---------------------------------------------------------------------------------------


@over(ALL_BLOCK, THREADS)
def test_so_many_envs_are_leased_at_one_time(setup: Setup) -> None:
    cfg = {**setup.cfg, "context": "server"} if setup.has_processes else setup.cfg
    with create_env_manager({**cfg, "limits": {"running": 2}}, env_fn=[Told] * 4) as manager:
        with manager.lease(), manager.lease() as second:
            assert limits_of(manager)["leased"] == 2
            with (
                pytest.raises(LeaseTimeoutError, match=r"limits\.running is 2"),
                manager.lease(acquire_timeout_s=0.1),
            ):
                pass
            assert sorted(manager.ready_obs) == [2, 3], "calls for batches are not counted"
            step_all(manager, {2: 1, 3: 1})
            second.reset(seed=1)
        with manager.lease() as env:
            assert env.reset(seed=4)[0][0] == 4


def test_random_caps_leases_and_faults_leave_nobody_waiting(runtime: Path) -> None:
    for seed in range(3):
        rng = random.Random(seed)
        running = rng.choice([1, 2, 3])
        limits = {
            "starting": rng.choice([1, 2]),
            "starts_per_s": rng.choice([None, 200]),
            "running": running,
            "shared": {"env": 5},
        }
        config = {
            "type": "subprocess",
            "limits": limits,
            "step_timeout": 0.3,
            "retry_waiting_time": 0.0,
            "max_failures": 10_000,
            "max_failures_total": 10_000,
        }
        leased, most, guard, done = [0], [0], threading.Lock(), list[int]()
        with create_env_manager(config, env_fn=[Told] * 5) as manager:

            def user(
                number: int, manager: Any = manager, seed: int = seed, leased: Any = leased,
                most: Any = most, guard: Any = guard, done: Any = done,
            ) -> None:  # fmt: skip
                own = random.Random(1000 * seed + number)
                for episode in range(4):
                    with manager.lease() as env:
                        with guard:
                            leased[0] += 1
                            most[0] = max(most[0], leased[0])
                        try:
                            assert env.reset(seed=episode)[0][0] == episode
                            for k in range(1, 4):
                                action = own.choice([k] * 8 + [RAISE, DIE, HANG, END])
                                timestep = env.step(action)
                                if timestep.done:
                                    break
                                assert timestep.obs.tolist() == [episode, k, k]
                        except EnvFailure:
                            pass
                        finally:
                            with guard:
                                leased[0] -= 1
                done.append(number)

            users = [InThread(lambda n=n: user(n)) for n in range(6)]  # type: ignore[misc]
            assert [one.end() for one in users] == [None] * 6
            assert sorted(done) == list(range(6))
            assert 1 <= most[0] <= running
            manager.reset()
            assert sorted(manager.ready_obs) == list(range(5))
            assert limits_of(manager)["waiting_to_start"] == 0
            accounts = manager.stats()
            assert accounts["outstanding"] == 0
        assert os.listdir(runtime / "envmgr-caps") == [".lock"]


# -- shared ---------------------------------------------------------------------------------------

TRAINER = """
import json, os, sys
from envmgr import create_env_manager
from tests.contract.leased import Told

if __name__ == "__main__":
    context, forks = sys.argv[1], sys.argv[2] == "forks"
    cfg = {"type": "subprocess", "context": context, "limits": {"shared": {"browser": 3}}}
    with create_env_manager(cfg, env_fn=[Told] * 3) as manager:
        children = [worker["pid"] for worker in manager.stats()["workers"]]
        if forks:  # as a data loader does; it outlives the trainer
            told, tell = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(tell, b"!")  # what is done in each fork is done
                os.read(int(sys.argv[3]), 1)
                os._exit(0)
            os.read(told, 1)
            children.append(child)
        print(json.dumps(children), flush=True)
        sys.stdin.read()
"""


class Trainer:
    """A trainer that has all units, until it is killed."""

    def __init__(self, folder: Path, context: str, *, forks: bool = False) -> None:
        script = folder / "trainer.py"
        script.write_text(TRAINER)
        self._alive_read, self._alive = os.pipe()
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(script),
                context,
                "forks" if forks else "-",
                str(self._alive_read),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._alive_read],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self.process.stdout is not None
        self.children: list[int] = json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.process.kill()
        os.close(self._alive)  # its child ends, and with it the last who could write to its stdout
        os.close(self._alive_read)
        self.process.communicate()


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def make(context: str, **how: bool) -> Trainer:
        made.append(Trainer(tmp_path, context, **how))
        return made[-1]

    yield make
    for trainer in made:
        trainer.end()


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = int(stat_of(int(name))[1])
            except OSError:
                continue
    found, todo = list[int](), [pid]
    while todo:
        todo = [child for child, parent in parents.items() if parent in todo]
        found += todo
    return found


def opened(pid: int, folder: Path) -> list[str]:
    """Return the files below a folder that a process has open."""
    targets = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            targets.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            continue
    return [target for target in targets if target.startswith(str(folder))]


@pytest.mark.skipif(sys.platform != "linux", reason="it takes /proc")
@pytest.mark.parametrize("context", CONTEXTS)
def test_no_child_inherits_the_lock(
    context: str, trainers: Callable[..., Trainer], runtime: Path
) -> None:
    trainer = trainers(context, forks=True)
    children = descendants(trainer.process.pid)
    assert set(trainer.children) <= set(children)
    assert opened(trainer.process.pid, runtime) != []
    assert {pid: opened(pid, runtime) for pid in children} == {pid: [] for pid in children}


@pytest.mark.parametrize("context", ["server", "fork"])
def test_a_trainer_that_is_killed_frees_its_units_at_once(
    context: str, trainers: Callable[..., Trainer], world: World, waits: Waits
) -> None:
    trainer = trainers(context, forks=True)
    manager = world.make(DEFAULT, 2, launch=False, limits={"shared": {"browser": 3}})
    launch = InThread(manager.launch)
    text = waits.awaited()
    assert f"2 of the 3 of browser: held are 3 by process {trainer.process.pid}" in text
    assert limits_of(manager)["shared"] == {"browser": {"units": 3, "held": 0}}
    assert world.journal(0) == [], "nothing was started"
    trainer.kill()
    assert launch.end() is None
    os.kill(trainer.children[-1], 0)  # a fork of it is still there
    assert limits_of(manager)["shared"] == {"browser": {"units": 3, "held": 2}}


def test_managers_of_one_process_share_units_as_others_do(world: World, waits: Waits) -> None:
    limits = {"shared": {"browser": 3}}
    first = world.make(DEFAULT, 2, limits=limits)
    second = world.make(THREADS, 2, launch=False, limits=limits)
    launch = InThread(second.launch)
    waits.awaited()
    first.close()
    assert launch.end() is None
    assert step_all(second, {0: 1, 1: 1}).keys() == {0, 1}
    third = world.make(DEFAULT, 1, limits=limits)
    assert sorted(ready_all(third)) == [0]


def test_units_are_kept_while_envs_are_repaired_and_given_back_by_a_launch_that_fails(
    world: World, runtime: Path
) -> None:
    limits = {"shared": {"browser": 2}}
    manager = world.make(ALL_BLOCK, 2, limits=limits)
    step_all(manager, {0: Do.KILL, 1: 1})
    ready_all(manager)
    assert limits_of(manager)["shared"]["browser"]["held"] == 2
    manager.close()
    failing = world.make(
        ALL_BLOCK, 2, launch=False, limits=limits, scripts={1: {"build_faults": {-1: "raise"}}}
    )
    with pytest.raises(Exception, match="could not be launched"):
        failing.launch()
    assert os.listdir(runtime / "envmgr-caps") == [".lock"]


def test_reading_spaces_and_calibrating_take_units_too(world: World, runtime: Path) -> None:
    limits = {"shared": {"browser": 2}}
    manager = world.make(ALL_BLOCK, 2, launch=False, limits=limits)
    assert manager.observation_space is not None
    assert limits_of(manager)["shared"]["browser"]["held"] == 2
    manager.close()
    manager = world.make(ALL_BLOCK, 2, limits=limits, num_workers="auto")
    assert limits_of(manager)["shared"]["browser"]["held"] == 2
    manager.close()
    assert os.listdir(runtime / "envmgr-caps") == [".lock"]


def test_differing_numbers_are_refused_and_nothing_is_started(world: World) -> None:
    world.make(ALL_BLOCK, 1, limits={"shared": {"browser": 4}})
    other = world.make(ALL_BLOCK, 1, launch=False, limits={"shared": {"browser": 5}})
    n_builds = len(world.noted(0, "build"))
    with pytest.raises(CapMismatchError, match=r"browser is 5, but 4 in the manager of process"):
        other.launch()
    assert len(world.noted(0, "build")) == n_builds


@pytest.mark.parametrize("how", ["close", "ctrl_c"])
def test_who_waits_for_units_can_be_ended(world: World, waits: Waits, how: str) -> None:
    limits = {"shared": {"browser": 1}}
    world.make(DEFAULT, 1, limits=limits)
    manager = world.make(DEFAULT, 1, launch=False, limits=limits)

    def end() -> None:
        waits.awaited()
        if how == "close":
            manager.close()
        else:
            _thread.interrupt_main(signal.SIGINT)

    ending = InThread(end)
    with pytest.raises(ManagerClosedError if how == "close" else KeyboardInterrupt):
        manager.launch()
    assert ending.end() is None


# -- the config -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"starting": 0}, r"manager\.limits\.starting is 0"),
        ({"starts_per_s": 0}, r"manager\.limits\.starts_per_s is 0"),
        ({"running": 1.5}, r"manager\.limits\.running is 1\.5"),
        ({"shared": {"../x": 4}}, "cannot name a cap"),
        ({"shared": {"browser": True}}, "browser is true"),
        (
            {"shared": {"browser": 2}},
            r"browser is 2, but the manager has 3 envs.*never be launched",
        ),
        ({"shared": 4}, r"manager\.limits\.shared is 4"),
        ({"browsers": 4}, "unknown key 'browsers'"),
        ({"start": 4}, "did you mean 'starting'"),
    ],
)
def test_what_makes_no_sense_is_refused(world: World, limits: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        world.make(ALL_BLOCK, 3, launch=False, limits=limits)


def test_spares_need_units_too(world: World) -> None:
    with pytest.raises(ConfigError, match="3 envs and 1 spares"):
        world.make(ALL_BLOCK, 3, launch=False, spare_env_num=1, limits={"shared": {"browser": 3}})


def test_rows_of_batched_envs_have_no_caps() -> None:
    spec = BatchedEnvSpec(Told, 2)
    with pytest.raises(ConfigError, match="batched envs"):
        create_env_manager({"type": "subprocess", "limits": {"starting": 1}}, env_fn=[spec] * 2)


def test_limits_without_numbers_are_none(world: World) -> None:
    manager = world.make(ALL_BLOCK, 2, limits={})
    assert manager._running.supervisor.hosts.starts is None
    assert limits_of(manager) == {"leased": 0, "waiting_for_lease": 0, "shared": {}}
    assert "limits" not in world.make(ALL_BLOCK, 1).stats()
