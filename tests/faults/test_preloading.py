"""F49: modules that cannot be imported once for all, and the worker server that imports others."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import site
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envmgr.errors import ConfigError, ManagerClosedError
from envmgr.transport.process import server_spawner, template_servers
from envmgr.worker import imported_modules
from tests.contract.envs import Do
from tests.contract.harness import (
    DEFAULT,
    INLINE,
    PATIENCE_S,
    Setup,
    World,
    meanwhile,
    over,
    ready_all,
    step_all,
    wait_ended,
)
from tests.faults.preloaded import Env, LateEnv
from tests.leak_guard import _read_process

MARK = "import os\nPID = os.getpid()\n"
"""A module that says which process has imported it."""


class Modules:
    """Modules of distributions that are installed for the user alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, **sources: str) -> None:
        for name, source in sources.items():
            (self.folder / f"{name}.py").write_text(MARK + textwrap.dedent(source))
        importlib.invalidate_caches()


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path / "user"))
    monkeypatch.setattr(site, "USER_BASE", None)
    monkeypatch.setattr(site, "USER_SITE", None)
    folder = Path(site.getusersitepackages())
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(folder))
    imported_modules._folders.cache_clear()
    modules = Modules(folder)
    modules.install(good_module="")
    yield modules
    sys.modules.pop("good_module", None)  # of envs inline
    imported_modules._folders.cache_clear()


class Log(logging.Handler):
    """What envmgr logs, and events for what is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []
        self._preloaded: list[str] = []
        self._changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            self.warnings.append(text)
        with self._changed:
            self._preloaded += [text] if text.startswith("preloaded") else []
            self._changed.notify()

    def await_preloaded(self, name: str) -> None:
        """Wait until a module is preloaded, which goes on behind the caller."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: any(name in text for text in self._preloaded), PATIENCE_S
            )
        assert found, f"{name} is not preloaded"

    def left_out(self) -> str:
        """Return the one line that says what is not preloaded."""
        [text] = [text for text in self.warnings if "preload" in text]
        return text


@pytest.fixture
def log() -> Iterator[Log]:
    logger, handler = logging.getLogger("envmgr"), Log()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


def make(world: World, n: int = 2, setup: Setup = DEFAULT, **cfg: Any) -> Any:
    manager = world.make(setup, n, env=Env, **cfg)
    ready_all(manager)
    return manager


def is_shared(manager: Any, name: str) -> bool:
    """Return whether the workers have a module from the server; all have, or none."""
    answers = set(manager.call("imports", name))
    assert len(answers) == 1
    was_there, from_elsewhere = answers.pop()
    assert was_there is from_elsewhere
    return from_elsewhere


# -- what cannot be preloaded ---------------------------------------------------------------------

FAULTS = {
    "raises": ("raise RuntimeError('not here')", "RuntimeError: not here"),
    "needs what is absent": ("import nothing_of_that_name", "ModuleNotFoundError"),
    "does not compile": ("def (", "SyntaxError"),
    "sys.exit": ("raise SystemExit(3)", "SystemExit"),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "os._exit": ("os._exit(0)", "ended the process"),
    "crashes": ("os.kill(os.getpid(), 11)", "ended the process"),
    "thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
        "starts threads",
    ),
    "child": ("import subprocess\nsubprocess.Popen(['sleep', '1000'])", "starts processes"),
    "daemon": (
        "import subprocess\nsubprocess.run(['sh', '-c', 'setsid sleep 1000 & true'], check=True)",
        "starts processes",
    ),
    "zombie": ("import subprocess\nos.posix_spawnp('true', ['true'], os.environ)", "processes"),
    "fork": ("import signal\nif os.fork() == 0:\n    signal.pause()", "starts processes"),
    "fork that goes on": ("os.fork()", "starts processes"),
    "socket": ("import socket\nkept = socket.socket()", "opens socket:"),
    "device": ("kept = os.open('/dev/ptmx', os.O_RDWR)", "opens /dev/ptmx"),
    "shared memory": ("import mmap\nkept = mmap.mmap(-1, 4096)", "maps "),
    "handler": (
        "import signal\nsignal.signal(signal.SIGUSR1, lambda *args: None)",
        "how signals are handled",
    ),
    "handler in C": (
        "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR2)",
        "how signals are handled",
    ),
    "mask": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])",
        "how signals are handled",
    ),
}


def test_f49_modules_that_cannot_be_preloaded_are_left_out(
    world: World, modules: Modules, log: Log
) -> None:
    names = ["good_module"]
    for k, (source, _) in enumerate(FAULTS.values()):
        user = f"try:\n    import bad_{k}\nexcept ImportError:\n    pass"
        modules.install(**{f"bad_{k}": source, f"user_of_{k}": user, f"other_{k}": ""})
        names += [f"bad_{k}", f"user_of_{k}", f"other_{k}"]
    manager = make(world, preload=names)
    text = log.left_out()
    for k, (_, reason) in enumerate(FAULTS.values()):
        found = text.partition(f"bad_{k} (")[2].partition("user_of_")[0]
        assert reason in found, text
        # What it imports may have what makes that unclean.
        assert f"user_of_{k} (it imports bad_{k})" in text
        assert is_shared(manager, f"other_{k}")
    assert "other_" not in text
    assert "good_module" not in text
    assert is_shared(manager, "good_module")
    assert [*step_all(manager, {0: 1, 1: 2})] == [0, 1]


def test_f49_a_module_that_hangs_is_left_out_after_connect_timeout(
    world: World, modules: Modules, log: Log
) -> None:
    modules.install(bad_module="import signal\nsignal.pause()")
    manager = make(world, preload=["good_module", "bad_module"], connect_timeout=4.0)
    assert "bad_module (its import takes more than 4 s (connect_timeout))" in log.left_out()
    assert is_shared(manager, "good_module")


def test_f49_a_module_that_hangs_in_c_code_with_the_gil(
    world: World, modules: Modules, log: Log
) -> None:
    modules.install(bad_module="import ctypes\nctypes.PyDLL(None).pause()")
    manager = make(world, preload=["bad_module"], connect_timeout=4.0)
    assert "bad_module (its import takes" in log.left_out()
    assert is_shared(manager, "good_module") is False


def test_f49_a_module_that_kills_the_server_itself(
    world: World, modules: Modules, log: Log
) -> None:
    modules.install(
        bad_module="import signal\nos.kill(os.getppid(), signal.SIGKILL)\nsignal.pause()"
    )
    manager = make(world, preload=["good_module", "bad_module"])
    assert "bad_module (" in log.left_out()
    assert [*step_all(manager, {0: 1, 1: 2})] == [0, 1]


def test_f49_what_a_list_names_has_to_be_there(
    world: World, modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any, **options: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    manager = world.make(DEFAULT, 2, launch=False, preload=["good_module", "absent_module"])
    with pytest.raises(ConfigError, match=r"manager\.preload .*'absent_module'.*not there"):
        manager.launch()
    assert manager.closed


def test_f49_ctrl_c_ends_a_launch_that_waits_for_an_import(
    world: World, modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER", str(os.getpid()))
    source = "import signal\nos.kill(int(os.environ['TRAINER']), signal.SIGINT)\nsignal.pause()"
    modules.install(bad_module=source)
    manager = world.make(DEFAULT, 2, launch=False, preload=["bad_module"])
    with pytest.raises(KeyboardInterrupt):
        manager.launch()
    assert manager.closed
    modules.install(bad_module="")
    manager.launch()
    assert [*ready_all(manager)] == [0, 1]


def test_f49_close_ends_a_launch_that_waits_for_an_import(
    world: World, modules: Modules, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    modules.install(bad_module=f"import signal\nopen({str(fifo)!r}, 'w').close()\nsignal.pause()")
    manager = world.make(DEFAULT, 2, launch=False, preload=["bad_module"])

    def close_when_it_hangs() -> None:
        with open(fifo):
            manager.close()

    with meanwhile(close_when_it_hangs), pytest.raises(ManagerClosedError):
        manager.launch()
    assert manager.closed


def test_f49_a_trainer_that_is_killed_during_an_import_leaves_nothing(
    world: World, modules: Modules, tmp_path: Path
) -> None:
    """The leak guard of the tests looks for what is left."""
    modules.install(
        bad_module="""
        import signal, subprocess
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        os.kill(int(os.environ["TRAINER"]), signal.SIGKILL)
        signal.pause()
        """
    )
    script = """
        import os
        os.environ["TRAINER"] = str(os.getpid())
        from envmgr import make
        make("CartPole-v1", 2, preload=["bad_module"]).launch()
        """
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": f"{root}:{modules.folder}"},
        timeout=PATIENCE_S * 2,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL


# -- what is preloaded ----------------------------------------------------------------------------


def test_f49_by_default_installed_modules_are_preloaded_and_no_others(
    world: World, modules: Modules, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "work"
    own.mkdir()
    (own / "own_module.py").write_text(f"{MARK}import good_module\n")
    monkeypatch.syspath_prepend(str(own))
    importlib.invalidate_caches()
    folder = world.folder

    def build() -> Any:
        import own_module

        assert os.getpid() == own_module.PID
        return Env(0, folder)

    build.__module__ = "__main__"
    manager = world.make(DEFAULT, env_fn=[build] * 2)
    ready_all(manager)
    assert is_shared(manager, "good_module")
    assert set(manager.call("imports", "own_module")) == {(True, False)}
    assert log.warnings == []
    listed = make(world, preload=["own_module"])
    assert is_shared(listed, "own_module")
    none = make(world, preload=False)
    assert not is_shared(none, "good_module")


def test_f49_threads_that_have_ended_are_no_reason(
    world: World, modules: Modules, log: Log
) -> None:
    """Nor is what the C library does for the first of them, with signals of its own."""
    modules.install(good_module="import threading\nt = threading.Thread()\nt.start()\nt.join()")
    manager = make(world, preload=["good_module"])
    assert is_shared(manager, "good_module")
    assert log.warnings == []


def test_f49_workers_are_as_clean_as_without(world: World, modules: Modules) -> None:
    modules.install(good_module="import numpy\nnumpy.random.seed(0)\nimport random\nrandom.seed(0)")
    with_modules, without = make(world, preload=["good_module"]), make(world, preload=False)
    assert len(set(with_modules.call("draws"))) == 2
    [one, two] = with_modules.call("process")
    assert one == two
    [expected, _] = without.call("process")
    assert one == expected


@pytest.mark.v2
def test_f49_torch_is_seeded_apart_in_each_worker(world: World) -> None:
    manager = make(world, 3, preload=["torch"])
    assert len(set(manager.call("torch_draws"))) == 3


def test_f49_what_modules_print_is_printed_once(
    world: World,
    modules: Modules,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    modules.install(good_module="print('hello from the module')")
    make(world, 3, preload=["good_module"]).close()
    assert capfd.readouterr().out == "hello from the module\n"


# -- several managers -----------------------------------------------------------------------------


def pid_of_import(manager: Any, name: str) -> int:
    """Return which process has imported a module of the workers."""
    [pid] = set(manager.call("importer", name))
    return int(pid)


def test_f49_managers_that_are_open_together_share_what_is_imported(
    world: World, modules: Modules, log: Log
) -> None:
    modules.install(more="", private="")
    one = make(world, preload=["good_module"])
    two = make(world, preload=["good_module"])
    more = make(world, preload=["more", "good_module"])
    shared = pid_of_import(one, "good_module")
    assert pid_of_import(two, "good_module") == pid_of_import(more, "good_module") == shared
    assert is_shared(more, "more")
    # Nobody gets what another one has asked for.
    assert not is_shared(two, "more")
    less = make(world, preload=["private"])
    assert not is_shared(less, "good_module")
    # Nor what was imported with another environment.
    other = make(world, preload=["good_module"], worker_env={"set": {"OTHER": "1"}})
    assert pid_of_import(other, "good_module") != shared
    pids = [world.pid(i) for i in (0, 1)]  # of the latest
    assert len({parent_of(pid) for pid in pids}) == 1
    one.close()
    more.close()
    assert [*step_all(two, {0: 1, 1: 2})] == [0, 1]
    three = make(world, preload=["good_module"])
    assert pid_of_import(three, "good_module") == shared
    for manager in (two, less, other, three):
        manager.close()
    assert pid_of_import(make(world, preload=["good_module"]), "good_module") != shared
    assert template_servers._templates, "the last one is open"


def test_f49_modules_of_the_users_own_are_not_shared(
    world: World, modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    (tmp_path / "own_module.py").write_text(MARK)
    one = make(world, preload=["own_module"])
    two = make(world, preload=["own_module"])
    assert is_shared(one, "own_module")
    assert pid_of_import(one, "own_module") != pid_of_import(two, "own_module")


def test_a_worker_is_known_before_its_env_is(world: World, modules: Modules) -> None:
    modules.install(
        slow_module="""
        import time
        fork = os.fork
        def forked():
            pid = fork()
            if pid:
                time.sleep(0.3)  # the server gets no core for so long
            return pid
        os.fork = forked
        """
    )
    manager = make(world, preload=["slow_module"], retry_waiting_time=0.0)
    for _ in range(2):
        found = {worker["env_ids"][0]: worker["pid"] for worker in manager.stats()["workers"]}
        assert found == {i: world.pid(i) for i in (0, 1)}
        step_all(manager, {1: Do.KILL})
        ready_all(manager)
    manager.close()


@pytest.mark.parametrize(
    "depth", [0, 1, 2], ids=["the server", "its template", "the first template"]
)
def test_f49_managers_recover_from_the_death_of_a_server_that_they_share(
    world: World, modules: Modules, log: Log, depth: int
) -> None:
    one = make(world, preload=["good_module"], retry_waiting_time=0.0)
    one_pids = [world.pid(i) for i in (0, 1)]
    two = make(world, preload=["good_module"], retry_waiting_time=0.0)
    worker_pid = world.pid(0)
    pid = parent_of(worker_pid)
    for _ in range(depth):
        pid = parent_of(pid)
    os.kill(pid, signal.SIGKILL)
    wait_ended(worker_pid)
    for manager in (two, one):
        if manager is one and depth == 0:
            assert [parent_of(pid) for pid in one_pids], "another one's server is not touched"
            assert not step_all(one, {0: 1, 1: 1})[0].info.get("abnormal")
            continue
        timesteps = step_all(manager, {0: 1, 1: 1})
        assert all(t.info["abnormal"] for t in timesteps.values())
        ready_all(manager)
        assert is_shared(manager, "good_module")
    assert not [text for text in log.warnings if "preload" in text]
    one.close()
    two.close()
    assert not template_servers._templates


def test_f49_an_import_that_hangs_ends_with_its_manager_while_another_one_is_open(
    world: World, modules: Modules, tmp_path: Path
) -> None:
    one = make(world, preload=["good_module"])
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    modules.install(
        bad_module=f"import signal\nwith open({str(fifo)!r}, 'w') as f:\n    f.write(str(PID))\n"
        "signal.pause()"
    )
    two = world.make(DEFAULT, 2, launch=False, preload=["bad_module"])
    found: list[int] = []

    def close_when_it_hangs() -> None:
        found.append(int(fifo.read_text()))
        two.close()

    with meanwhile(close_when_it_hangs), pytest.raises(ManagerClosedError):
        two.launch()
    wait_ended(found[0])
    assert [*step_all(one, {0: 1, 1: 2})] == [0, 1]


@pytest.mark.parametrize("depth", [0, 1], ids=["the server", "its template"])
def test_f49_a_server_that_is_stopped_is_left_and_hurts_nobody_else(
    world: World, modules: Modules, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    monkeypatch.setattr("envmgr.transport.process.server_link._PATIENCE_S", 0.1)
    monkeypatch.setattr("envmgr.transport.process.server_spawner._SERVER_PATIENCE_S", 0.1)
    monkeypatch.setattr("envmgr.transport.base.Transport.kill_patience_s", 0.2)
    one = make(world, preload=["good_module"], step_timeout=0.3, retry_waiting_time=0.0)
    pid = parent_of(world.pid(0))
    os.kill(pid, signal.SIGSTOP)
    if depth:
        os.kill(parent_of(pid), signal.SIGSTOP)
    two = make(world, preload=["good_module"]) if not depth else None
    ready_all(one)
    os.kill(world.pid(0) if two is None else pid, 0)
    timesteps = step_all(one, {0: Do.HANG})
    assert timesteps[0].info["abnormal"]
    ready_all(one)
    if two is not None:
        assert [*step_all(two, {0: 1, 1: 2})] == [0, 1]
        two.close()
    one.close()


@pytest.mark.parametrize("depth", [0, 1], ids=["the server", "its template, too"])
def test_f49_close_does_not_wait_long_for_servers_that_are_stopped(
    world: World, modules: Modules, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    monkeypatch.setattr("envmgr.transport.process.server_link._PATIENCE_S", 1e6)
    monkeypatch.setattr("envmgr.transport.process.server_spawner._SERVER_PATIENCE_S", 1e6)
    manager = make(world, preload=["good_module"])
    pid = server_pid = parent_of(world.pid(0))
    for _ in range(depth):
        os.kill(pid, signal.SIGSTOP)
        pid = parent_of(pid)
    os.kill(pid, signal.SIGSTOP)
    manager.close(terminate=True)
    assert not template_servers._templates
    wait_ended(server_pid)


def test_f49_a_signal_handler_closes_a_manager_while_another_one_takes_a_home(
    world: World, modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make(world, preload=False)
    two = world.make(DEFAULT, 2, launch=False, preload=False, worker_env={"set": {"OTHER": "1"}})
    interrupt_after(monkeypatch, server_spawner, "_start_fresh", signal.SIGUSR1)
    before = signal.signal(signal.SIGUSR1, lambda *_: one.close())
    try:
        assert two.observation_space is not None
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert one.closed
    two.launch()
    assert [*ready_all(two)] == [0, 1]


def test_f49_ctrl_c_while_a_home_is_taken_leaves_none(
    world: World, modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = world.make(DEFAULT, 2, launch=False, preload=False)
    interrupt_after(monkeypatch, template_servers, "take", signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        _ = manager.observation_space
    manager.close()
    assert not template_servers._templates


def interrupt_after(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, number: int) -> None:
    """Have a signal come when a function returns for the first time."""
    function = getattr(module, name)

    def interrupted(*args: Any) -> Any:
        result = function(*args)
        monkeypatch.setattr(module, name, function)
        os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(module, name, interrupted)


def test_f49_a_fork_of_the_trainer_has_servers_of_its_own(world: World, modules: Modules) -> None:
    one = make(world, preload=["good_module"])
    shared = pid_of_import(one, "good_module")
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        code = 1
        try:
            two = world.make(DEFAULT, 2, env=Env, preload=["good_module"])
            ready_all(two)
            os.write(write, str(pid_of_import(two, "good_module")).encode())
            two.close()
            code = 0 if not template_servers._templates else 2
        finally:
            os._exit(code)
    os.close(write)
    with open(read) as file:
        assert int(file.read()) != shared
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [*step_all(one, {0: 1, 1: 2})] == [0, 1]


@over(INLINE, Setup("subprocess", "fork"), Setup("subprocess", "spawn"))
def test_f49_elsewhere_one_line_says_that_a_list_does_not_apply(
    world: World, modules: Modules, log: Log, setup: Setup
) -> None:
    manager = make(world, 1, setup, preload=["good_module"])
    place = "type: base" if setup is INLINE else f"context: {setup.context}"
    assert log.left_out().startswith(f"manager.preload does not apply to {place}")
    assert manager.call("imports", "good_module") == [(False, False)]
    world.make(setup, 1).close()
    assert len(log.warnings) == 1, "nobody asked for anything"


# -- renewals -------------------------------------------------------------------------------------


def test_f49_what_a_worker_has_imported_is_preloaded_for_renewals(
    world: World, modules: Modules, log: Log
) -> None:
    modules.install(late_module="")
    manager = world.make(DEFAULT, 3, env=LateEnv, retry_waiting_time=0.0)
    ready_all(manager)
    assert set(manager.call("imports", "late_module")) == {(True, False)}
    world.kill(0)
    step_all(manager, {0: 1})
    ready_all(manager)
    log.await_preloaded("late_module")
    world.kill(1)
    step_all(manager, {1: 1})
    ready_all(manager)
    assert manager.call("imports", "late_module", env_ids=[1]) == [(True, True)]
    assert manager.call("imports", "late_module", env_ids=[2]) == [(True, False)]
    assert len(world.noted(2, "build")) == 1, "the servers before go on"


def test_f49_a_late_module_that_hurts_costs_nobody_anything(
    world: World, modules: Modules, log: Log
) -> None:
    # Only an import in a server is none of a process that has imported this module before.
    source = f"import sys\nif {Env.__module__!r} not in sys.modules:\n    os._exit(3)"
    modules.install(late_module=source)
    manager = world.make(DEFAULT, 2, env=LateEnv, retry_waiting_time=0.0)
    ready_all(manager)
    world.kill(0)
    step_all(manager, {0: 1})
    ready_all(manager)
    while not log.warnings or "preload" not in log.warnings[-1]:
        manager.step({1: 1})  # the others go on meanwhile
    assert "late_module (its import ended the process)" in log.left_out()
    assert len(world.noted(1, "build")) == 1
    world.kill(0)
    step_all(manager, {0: 1})
    assert [*ready_all(manager)] == [0, 1]


@pytest.mark.parametrize("whom", ["the server", "its branch"])
def test_f49_a_server_that_dies_is_replaced_by_one_with_the_same_modules(
    world: World, modules: Modules, log: Log, whom: str
) -> None:
    manager = make(world, preload=["good_module"], retry_waiting_time=0.0)
    pids = [world.pid(i) for i in (0, 1)]
    branch = parent_of(pids[0])
    os.kill(branch if whom == "its branch" else parent_of(branch), signal.SIGKILL)
    for pid in pids:
        wait_ended(pid)
    timesteps = step_all(manager, {0: 1, 1: 1})
    assert all(t.info["abnormal"] for t in timesteps.values())
    ready_all(manager)
    assert is_shared(manager, "good_module")
    assert not [text for text in log.warnings if "preload" in text]


def parent_of(pid: int) -> int:
    process = _read_process(str(pid))
    assert process is not None
    return process.parent_pid
