"""F33, F34, F35: fds, memory and processes that are not there, at launch and later."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from envmgr.errors import EnvCrash, LaunchError
from envmgr.transport.process.multiprocessing_spawner import MultiprocessingSpawner
from envmgr.transport.ready import ReadySet
from tests.contract.harness import (
    ALL_MESSAGE,
    DEFAULT,
    PATIENCE_S,
    SOME_MESSAGE,
    Raises,
    Setup,
    World,
    over,
    ready_all,
    step_all,
)
from tests.faults.test_trainers import ROOT

setups = over(
    DEFAULT,
    SOME_MESSAGE,
    ALL_MESSAGE,
    Setup("subprocess", "fork", True),
    Setup("subprocess", "spawn"),
    Setup("subprocess", "forkserver"),
)


def n_open() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


@contextmanager
def room_for_fds(count: int) -> Iterator[None]:
    """Let so many more fds be opened, if those that are open have the lowest numbers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    holes = max(int(name) for name in os.listdir("/proc/self/fd")) + 1 - n_open()
    fillers = [os.open(os.devnull, os.O_RDONLY) for _ in range(max(holes, 0))]
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_open() + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)


# -- fds ------------------------------------------------------------------------------------------


@setups
def test_f33_too_few_fds_are_refused_before_anything_starts(world: World, setup: Setup) -> None:
    manager = world.make(setup, 6, launch=False)
    before = n_open()
    with room_for_fds(10), Raises(LaunchError, "RLIMIT_NOFILE", "6 workers", "num_workers") as it:
        manager.launch()
    assert n_open() == before
    assert manager.closed
    assert [world.noted(i, "build") for i in range(6)] == [[]] * 6, "something was started"
    found = re.search(r"need (\d+) file descriptors", str(it.value))
    assert found is not None
    with room_for_fds(int(found[1]) + 1):  # the listing of /proc/self/fd is one itself
        manager.launch()
        assert [*ready_all(manager)] == [*range(6)]
        manager.close()


@over(Setup("subprocess", "spawn"))
def test_f33_a_lifeline_that_cannot_be_had_leaves_nothing(
    world: World, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    fails = Mock(side_effect=OSError(errno.EMFILE, "too many open files"))
    with monkeypatch.context() as patch:
        patch.setattr(MultiprocessingSpawner, "_own_lifeline", fails)
        before = n_open()
        spawner = manager._running.engine.transport._spawner
        with pytest.raises(OSError, match="too many"):
            spawner.start(Mock(factories=None, envs=[]), ())
        assert n_open() == before


def test_f33_a_server_with_many_fds_kills_and_reaps_all_there_are() -> None:
    """As that of a trainer with `context: fork` and more than 1023 open files."""
    script = """
        import os, resource, time
        from envmgr.transport.process.server import WorkerServer
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 2000), most))
        child = os.fork()
        if not child:
            time.sleep(100.0)
            os._exit(0)
        server = object.__new__(WorkerServer)
        server._host_of = {child: 0}
        server._child_ended = os.dup2(os.pipe()[0], 1500)
        server._kill_all()
        assert not os.path.exists(f"/proc/{child}")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@over(DEFAULT, ALL_MESSAGE)
def test_f33_fds_that_run_out_during_launch_leave_nothing(
    world: World, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else takes them after they were counted."""
    monkeypatch.setattr("envmgr.managers.refuse_too_many_workers", lambda *args, **kwargs: None)
    manager = world.make(setup, 4, launch=False)
    before = n_open()
    for count in range(0, 20, 2):
        with room_for_fds(count), Raises(LaunchError):
            manager.launch()
        assert n_open() == before, f"with room for {count}"
        assert manager.closed
    manager.launch()
    assert [*ready_all(manager)] == [0, 1, 2, 3]


@over(DEFAULT, ALL_MESSAGE, Setup("subprocess", "spawn"))
def test_f33_without_fds_a_renewal_fails_and_is_tried_again(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, max_failures=50, retry_waiting_time=0.05)
    ready_all(manager)
    step_all(manager, {0: 1, 1: 1})
    pid = world.pid(0)
    with room_for_fds(0):
        os.kill(pid, signal.SIGKILL)
        while manager.stats()["failures"] < 4:  # one of the worker, three of its renewal
            step_all(manager, {1: 1})
        assert any("Too many open files" in text for text in manager.stats()["latest_failures"])
    assert isinstance(step_all(manager, {0: 1})[0].info["error"], EnvCrash)
    ready_all(manager)
    assert manager.env_states[0].name == "RUN"


@contextmanager
def refused_watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Refuse one watch, as where the kernel allows no more (`fs.epoll.max_user_watches`).

    Yields:
        How many there were, `n`, and which one is `refused`, from 1.
    """
    add, watches = ReadySet.add, {"n": 0, "refused": 0}

    def add_unless(self: ReadySet, item: Any) -> None:
        watches["n"] += 1
        if watches["n"] == watches["refused"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, item)

    with monkeypatch.context() as patch:
        patch.setattr(ReadySet, "add", add_unless)
        yield watches


@setups
def test_f33_whatever_cannot_be_watched_during_launch_leaves_nothing(
    world: World, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.make(setup, 2).close()  # with it comes what stays, as a fork server
    before = n_open()
    with refused_watches(monkeypatch) as watches:
        while watches["n"] >= watches["refused"]:
            watches.update(n=0, refused=watches["refused"] + 1)
            manager = world.make(setup, 2, launch=False, max_retry=1)
            failed = ""
            try:
                manager.launch()
                assert [*ready_all(manager)] == [0, 1]
            except LaunchError as error:
                failed = str(error)
            assert not failed or "No space left on device" in failed
            manager.close()
            assert n_open() == before, f"the watch {watches['refused']} has left something"
    assert watches["refused"] > 5


@setups
def test_f33_a_renewal_that_cannot_be_watched_is_tried_again(
    world: World, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = world.make(setup, 2, max_failures=50, retry_waiting_time=0.01)
    with refused_watches(monkeypatch) as watches:
        while watches["n"] >= watches["refused"]:
            watches.update(n=0, refused=watches["refused"] + 1)
            ready_all(manager)
            failures = manager.stats()["failures"]
            os.kill(world.pid(0), signal.SIGKILL)
            assert isinstance(step_all(manager, {0: 1, 1: 1})[0].info["error"], EnvCrash)
            assert [*ready_all(manager)] == [0, 1]
            refused = watches["n"] >= watches["refused"]
            assert manager.stats()["failures"] == failures + 1 + refused
            if refused:
                assert "No space left on device" in manager.stats()["latest_failures"][-1]
    assert watches["refused"] > 1, "none was refused"


# -- memory ---------------------------------------------------------------------------------------


def run_script(folder: Path, body: str, *, prefix: tuple[str, ...] = (), **env: str) -> Any:
    path = folder / "script.py"
    path.write_text(
        textwrap.dedent(
            """
            import os, resource, sys
            from functools import partial
            from envmgr import create_env_manager
            from envmgr.errors import LaunchError
            from tests.contract.envs import Do, ScriptedEnv, seen
            from tests.contract.harness import ready_all, step_all
            FOLDER, CONTEXT = sys.argv[1:3]
            env_fn = [partial(ScriptedEnv, i, FOLDER) for i in range(2)]
            def make(**cfg):
                cfg = {"type": "subprocess", "context": CONTEXT, **cfg}
                return create_env_manager(cfg, env_fn=env_fn)
            """
        )
        + textwrap.dedent(body)
    )
    done = subprocess.run(
        [*prefix, sys.executable, str(path), str(folder), env.pop("CONTEXT", "server")],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 2,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count otherwise")
def test_f33_more_workers_are_started_than_fds_may_be_on_the_way(tmp_path: Path) -> None:
    # The limit holds for users who are not root; who is gives up what makes the difference.
    prefix = ("setpriv", "--bounding-set=-sys_resource,-sys_admin") if os.getuid() == 0 else ()
    if prefix and shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv")
    done = run_script(
        tmp_path,
        """
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (320, hard))
        env_fn = [partial(ScriptedEnv, i, FOLDER) for i in range(64)]
        for _ in range(3):
            with make() as manager:
                print(len(manager.step(dict.fromkeys(range(64), 1))))
        """,
        prefix=prefix,
    )
    assert done.stdout.split() == ["64"] * 3, done.stderr


def test_f34_memory_that_cannot_be_had_is_an_error_at_launch(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        """
        import gymnasium, numpy, signal

        class Large(gymnasium.Env):
            observation_space = gymnasium.spaces.Box(0, 1, (1 << 22,), numpy.uint8)
            action_space = gymnasium.spaces.Discrete(2)

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, resource.RLIM_INFINITY))
        env_fn = [Large] * 2
        manager = make()
        try:
            manager.launch()
        except LaunchError as error:
            print(error, manager.closed)
        """,
    )
    assert "shared memory" in done.stdout
    assert "shared_memory: false" in done.stdout
    assert done.stdout.endswith("True\n")
    assert done.stderr == ""


@over(DEFAULT, ALL_MESSAGE._replace(shared_memory=True))
def test_f34_memory_that_a_cgroup_does_not_grant_is_refused(
    world: World, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = world.make(setup, 2, launch=False)
    group = (1000, "memory.max of the cgroup is 0.0 MiB")
    monkeypatch.setattr("envmgr.transport.process.preflight.free_memory", lambda: group)
    with Raises(LaunchError, "shared memory", os.strerror(errno.ENOMEM), "memory.max"):
        manager.launch()
    assert manager.closed
    monkeypatch.undo()
    manager.launch()
    assert [*ready_all(manager)] == [0, 1]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a /dev/shm of its own")
@pytest.mark.parametrize("context", ["server", "spawn"])
def test_f34_nothing_lies_in_dev_shm(tmp_path: Path, context: str) -> None:
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "
    done = run_script(
        tmp_path,
        """
        if __name__ == "__main__":
            manager = make()
            manager.launch()
            print(os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize)
            with open("/dev/shm/full", "wb") as file:
                try:
                    file.write(bytes(1 << 20))
                    file.flush()
                except OSError:
                    print("full")
            timesteps = step_all(manager, {0: 1, 1: int(Do.HUGE_INFO)})
            step_all(manager, {0: int(Do.KILL)})
            ready_all(manager)
            print([seen(t.obs)[3:5] for t in timesteps.values()])
            manager.close()
            os.unlink("/dev/shm/full")
            print(os.listdir("/dev/shm"))
        """,
        prefix=("unshare", "--mount", "sh", "-c", f'{mount} "$@"', "sh"),
        CONTEXT=context,
    )
    assert done.stdout.splitlines() == ["65536", "full", "[(1, 1), (1, 24)]", "[]"]


# -- processes ------------------------------------------------------------------------------------

NO_FORK = """
import errno, os
_fork, _of = os.fork, os.getpid()

def fork():
    if os.path.exists(os.environ["NO_FORK"]):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return _fork()

os.fork = fork
"""


@pytest.mark.parametrize("context", ["server", "fork", "forkserver"])
def test_f35_a_fork_that_fails_is_a_failed_renewal(tmp_path: Path, context: str) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(NO_FORK)
    done = run_script(
        tmp_path,
        """
        import time
        if __name__ == "__main__":
            manager = make(max_failures=50, retry_waiting_time=0.1)
            manager.launch()
            step_all(manager, {0: 1, 1: 1})
            open(os.environ["NO_FORK"], "w").close()
            began = time.monotonic()  # before it: repairs go on while nobody looks
            step_all(manager, {0: int(Do.KILL), 1: 1})
            while manager.stats()["failures"] < 4:
                step_all(manager, {1: 1})
            print(time.monotonic() - began > 0.25)  # a pause of 0.1 s, another of 0.2 s
            print(manager.stats()["latest_failures"][-1])
            os.unlink(os.environ["NO_FORK"])
            print([seen(obs)[:2] for obs in ready_all(manager).values()])
            manager.close()
        """,
        PYTHONPATH=f"{site}{os.pathsep}{ROOT}",
        NO_FORK=str(tmp_path / "no-fork"),
        CONTEXT=context,
    )
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("True", "[(0, 1), (1, 0)]"), done.stdout
    if context != "forkserver":  # Python's server dies of it, and is started anew
        assert os.strerror(errno.EAGAIN) in lines[1]


@setups
def test_f35_too_few_processes_are_refused_before_anything_starts(
    world: World, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "envmgr.transport.process.preflight.free_processes", lambda: (5, "RLIMIT_NPROC is 7")
    )
    manager = world.make(setup, 6, launch=False)
    with Raises(LaunchError, "6 workers", "RLIMIT_NPROC is 7", "num_workers"):
        manager.launch()
    assert manager.closed
    packed = world.make(setup._replace(num_workers=2), 6)
    assert [*ready_all(packed)] == [*range(6)]
