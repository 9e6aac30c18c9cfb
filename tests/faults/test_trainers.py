"""Whatever becomes of the trainer: scripts that end, fail, are interrupted or killed, or fork.

F26, F27, F28, F31 and F43.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.envs import Do
from tests.contract.harness import PATIENCE_S, Gate, World, wait_ended

ROOT = Path(__file__).parents[2]
CONTEXTS = ("server", "fork", "spawn", "forkserver")
contexts = pytest.mark.parametrize("context", CONTEXTS)
no_guard_needed = pytest.mark.parametrize("context", ["server", "fork"])

PREAMBLE = """
import sys
from functools import partial
from envmgr import create_env_manager
from tests.contract.envs import Do, ScriptedEnv, seen

FOLDER, CONTEXT = sys.argv[1:3]

def make(env_num=2, type="subprocess", **cfg):
    env_fn = [partial(ScriptedEnv, i, FOLDER) for i in range(env_num)]
    return create_env_manager({"type": type, "context": CONTEXT, **cfg}, env_fn=env_fn)

def say(text):
    print(text, flush=True)
"""


class Script:
    """A trainer's script, run as a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder)
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def start(
        self, body: str, context: str = "server", *flags: str, guard: bool = True
    ) -> subprocess.Popen[str]:
        """Start a script; `body` is indented into `if __name__ == "__main__":` unless told not."""
        body = textwrap.dedent(body)
        if guard:
            body = 'if __name__ == "__main__":\n' + textwrap.indent(body, "    ")
        path = self._folder / "trainer.py"
        path.write_text(PREAMBLE + body)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-W", "error::ResourceWarning", *flags),
                *(str(path), str(self._folder), context),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self._process

    def run(self, body: str, context: str = "server", *flags: str, **options: Any) -> Any:
        """Run a script to its end; return its code, output and errors."""
        process = self.start(body, context, *flags, **options)
        out, err = process.communicate(timeout=PATIENCE_S * 2)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def await_line(self, line: str) -> None:
        """Wait until the script prints a line."""
        assert self._process is not None
        assert self._process.stdout is not None
        found = self._process.stdout.readline()
        if found != line + "\n":
            self._process.kill()
            pytest.fail(f"expected {line!r}, found {found!r}\n{self._process.communicate()[1]}")

    def read_line(self) -> str:
        """Return the next line that the script prints."""
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def await_workers_gone(self, env_num: int = 2) -> None:
        """Wait until every process that ever built an env has ended."""
        assert self._process is not None
        for i in range(env_num):
            pids = {pid for _, pid in self.world.noted(i, "build")} - {self._process.pid}
            assert pids, f"env {i} was not built"
            for pid in pids:
                wait_ended(pid)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdout, self._process.stderr):
                if stream is not None:
                    stream.close()  # unread: a worker that has survived keeps it open
        self.world.close()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    script = Script(tmp_path)
    try:
        yield script
    finally:
        script.close()


# -- ordinary ends --------------------------------------------------------------------------------


@contexts
def test_f28_a_script_that_closes_ends_quietly(script: Script, context: str) -> None:
    done = script.run(
        """
        with make() as manager:
            timesteps = manager.step({0: 5, 1: 6})
            say([seen(t.obs)[3:5] for t in timesteps.values()])
        """,
        context,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[(1, 5), (1, 6)]\n"
    assert [len(script.world.noted(i, "close")) for i in (0, 1)] == [1, 1]


@contexts
def test_f28_a_script_that_does_not_close_ends_quietly_too(script: Script, context: str) -> None:
    done = script.run(
        """
        manager = make()
        manager.launch()
        manager.send({0: Do.END, 1: 1})
        other = make()
        other.launch()
        """,
        context,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    script.await_workers_gone()


@no_guard_needed
def test_f28_a_script_that_fails_leaves_its_own_traceback_only(
    script: Script, context: str
) -> None:
    done = script.run(
        """
        manager = make()
        manager.launch()
        manager.step({0: Do.GATE, 1: 1} if False else {0: 1})
        raise LookupError("the trainer's own mistake")
        """,
        context,
    )
    assert done.returncode == 1
    assert done.stderr.endswith("LookupError: the trainer's own mistake\n")
    assert done.stderr.count("Traceback") == 1
    script.await_workers_gone()


@no_guard_needed
def test_a_plain_script_without_main_guard_with_lambdas(script: Script, context: str) -> None:
    done = script.run(
        """
        class Local(ScriptedEnv):
            def user_defined(self):
                return GREETING

        GREETING = "hello from a class of the script"
        env_fn = [lambda i=i: Local(i, FOLDER) for i in range(2)]
        manager = create_env_manager({"type": "subprocess", "context": CONTEXT}, env_fn=env_fn)
        manager.launch()
        say(manager.call("user_defined"))
        manager.step({0: Do.KILL, 1: 1})
        say(manager.get_attr("label"))
        manager.close()
        """,
        context,
        guard=False,
    )
    greeting = "hello from a class of the script"
    assert done.stdout == f"{[greeting] * 2}\n{['env-0', 'env-1']}\n"
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("how", ["-c", "-"])
def test_code_without_a_file_as_in_a_notebook(script: Script, how: str) -> None:
    code = PREAMBLE + (
        "manager = create_env_manager({'type': 'subprocess'},"
        " env_fn=[lambda: ScriptedEnv(0, FOLDER)])\n"
        "manager.launch()\n"
        "say(seen(manager.step({0: 5})[0].obs)[3:5])\n"
        "manager.close()\n"
    )
    done = subprocess.run(
        [sys.executable, how, *([code] if how == "-c" else []), script.world.folder, "server"],
        input=code if how == "-" else None,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 2,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("(1, 5)\n", "", 0)


@pytest.mark.parametrize("flag", ["-O", "-OO", "-I"])
def test_under_flags_of_the_interpreter(script: Script, flag: str) -> None:
    body = """
        from envmgr.errors import EnvNotReadyError, ActionError, StateError
        manager = make(auto_reset=False)
        manager.launch()
        for call, error in (
            (lambda: manager.step({0: 99}), ActionError),
            (lambda: manager.step({0: 1, 7: 1}), KeyError),
            (lambda: manager.launch(), StateError),
        ):
            try:
                call()
            except error:
                say("refused")
        timesteps = manager.step({0: Do.END, 1: Do.RAISE})
        say([t.done for t in timesteps.values()])
        try:
            manager.step({0: 1})
        except EnvNotReadyError:
            say("refused")
        manager.reset()
        say(sorted(manager.ready_obs))
        manager.close()
    """
    if flag == "-I":  # takes no notice of PYTHONPATH
        body = f"sys.path.insert(0, {str(ROOT)!r})\n" + textwrap.dedent(body)
        script_flags: tuple[str, ...] = ("-I",)
        done = _isolated(script, body)
    else:
        script_flags = (flag,)
        done = script.run(body, "server", *script_flags)
    expected = "refused\nrefused\nrefused\n[True, True]\nrefused\n[0, 1]\n"
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr


def _isolated(script: Script, body: str) -> Any:
    path = Path(script.world.folder) / "isolated.py"
    head, _, preamble = PREAMBLE.partition("import sys\n")
    path.write_text(f"{head}import sys\nsys.path.insert(0, {str(ROOT)!r})\n{preamble}{body}")
    return subprocess.run(
        [sys.executable, "-I", str(path), script.world.folder, "server"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 2,
        check=False,
    )


# -- interruptions --------------------------------------------------------------------------------

WAITING_WITH_CHILDREN = """
import json
manager = make(reset_timeout=None, daemon=False)
manager.launch()
say("launched")
say(json.dumps(manager.call("start_child")))
"""
WAITING = """
manager = make(reset_timeout=None)
manager.launch()
say("launched")
{call}
"""
CALLS = {
    "step": "manager.step({0: Do.HANG, 1: Do.HANG})",
    "reset": "manager.reset({0: {'fault': 'hang'}, 1: {'fault': 'hang'}})",
    "ready_obs": "manager.step({0: Do.END_THEN_HANG, 1: Do.END_THEN_HANG}); manager.ready_obs",
}


@pytest.mark.parametrize(
    ("context", "call"),
    [*((context, "step") for context in CONTEXTS), ("server", "reset"), ("server", "ready_obs")],
)
def test_f25_ctrl_c_ends_a_script_whose_envs_hang(script: Script, context: str, call: str) -> None:
    gate = Gate(script.world.folder)
    try:
        process = script.start(WAITING.format(call=CALLS[call]), context)
        script.await_line("launched")
        for i in (0, 1):
            gate.await_visit(i)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == -signal.SIGINT
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert err.count("Traceback") == 1
        script.await_workers_gone()
    finally:
        gate.close()


DOES = {"idle": None, "hangs": Do.HANG, "hangs-in-C": Do.HANG_IN_C, "steps": Do.JITTER}


@pytest.mark.parametrize(
    ("context", "does"),
    [
        # Nothing in the worker can do it then, but what the start method has arranged.
        *((context, "hangs-in-C") for context in CONTEXTS),
        *((context, does) for context in CONTEXTS[:2] for does in ("idle", "hangs", "steps")),
    ],
)
def test_f27_workers_and_their_children_end_within_a_second_of_a_killed_trainer(
    script: Script, context: str, does: str
) -> None:
    _check_that_all_end(script, context, DOES[does], signal.SIGKILL)


@pytest.mark.parametrize(
    ("context", "does"),
    [*((context, "hangs-in-C") for context in CONTEXTS), ("server", "steps")],
)
def test_f26_workers_and_their_children_end_within_a_second_of_a_terminated_trainer(
    script: Script, context: str, does: str
) -> None:
    _check_that_all_end(script, context, DOES[does], signal.SIGTERM)


def _check_that_all_end(
    script: Script, context: str, does: Do | None, number: signal.Signals
) -> None:
    call = {
        None: "import time; say('there'); time.sleep(1000)",
        Do.JITTER: "say('there')\nwhile True: manager.step({0: Do.JITTER, 1: Do.JITTER})",
    }.get(does, f"say('there'); manager.step({{0: {int(does or 0)}, 1: 1}})")
    gate = Gate(script.world.folder)
    try:
        process = script.start(WAITING_WITH_CHILDREN + call, context)
        script.await_line("launched")
        children = json.loads(script.read_line())
        script.await_line("there")
        if does in (Do.HANG, Do.HANG_IN_C):
            gate.await_visit(0)  # env 0 hangs in its step, env 1 has nothing to do
        process.send_signal(number)
        process.communicate(timeout=PATIENCE_S)
        began = time.monotonic()
        assert process.returncode == -number
        script.await_workers_gone()
        for pid in children:
            wait_ended(pid)
        assert time.monotonic() - began < 1.0
    finally:
        gate.close()


def test_f27_without_the_lifeline_workers_that_hold_the_gil_would_stay(
    script: Script,
) -> None:
    """What the kernel does here is not done by the thread that watches the trainer."""
    gate = Gate(script.world.folder)
    try:
        process = script.start(
            """
            from envmgr.transport.process import multiprocessing_spawner
            multiprocessing_spawner.MultiprocessingSpawner._own_lifeline = lambda self: ()
            """
            + textwrap.indent(WAITING.format(call="manager.step({0: Do.HANG_IN_C})"), " " * 12),
            "forkserver",
        )
        script.await_line("launched")
        pid = gate.await_visit(0).pid
        process.kill()
        process.wait(PATIENCE_S)  # the worker keeps its stdout open
        with open(f"/proc/{pid}/stat") as file:
            assert file.read().rpartition(")")[2].split()[0] not in "ZX"
        os.kill(pid, signal.SIGKILL)
        script.await_workers_gone()
    finally:
        gate.close()


@no_guard_needed
def test_f27_workers_do_not_outlive_a_trainer_killed_during_launch(
    script: Script, context: str
) -> None:
    gate = Gate(script.world.folder)
    try:
        process = script.start(
            """
            env_fn = [
                partial(ScriptedEnv, i, FOLDER, build_faults={0: "hang"}) for i in range(2)
            ]
            create_env_manager({"type": "subprocess", "context": CONTEXT}, env_fn=env_fn).launch()
            """,
            context,
        )
        for i in (0, 1):
            gate.await_visit(i, "build")
        process.kill()
        process.communicate(timeout=PATIENCE_S)
        script.await_workers_gone()
    finally:
        gate.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has lifelines")
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_f27_workers_that_are_still_importing_end_with_a_killed_trainer(
    script: Script, context: str
) -> None:
    fifo = Path(script.world.folder) / "import"
    os.mkfifo(fifo)
    process = script.start(
        """
        import os
        if __name__ == "__main__":
            make(env_num=1).launch()
        else:
            say(str(os.getpid()))
            open(FOLDER + "/import").readline()  # none of our own code has run here yet
        """,
        context,
        guard=False,
    )
    importing_pid = int(script.read_line())
    process.kill()
    process.wait()
    with open(fifo, "r+b", buffering=0) as end_of_import:
        if context == "forkserver" and sys.version_info >= (3, 14):
            end_of_import.write(b"\n")  # Python's fork server is the one that imports
        wait_ended(importing_pid)


@no_guard_needed
def test_f25_ctrl_c_during_launch(script: Script, context: str) -> None:
    gate = Gate(script.world.folder)
    try:
        process = script.start(
            """
            env_fn = [partial(ScriptedEnv, 0, FOLDER, build_faults={0: "hang"})]
            env_fn += [partial(ScriptedEnv, 1, FOLDER)]
            manager = create_env_manager({"type": "subprocess", "context": CONTEXT}, env_fn=env_fn)
            try:
                manager.launch()
            except KeyboardInterrupt:
                say(manager.closed)
            manager.launch()
            say(sorted(manager.ready_obs))
            manager.close()
            """,
            context,
        )
        gate.await_visit(0, "build")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (out, err, process.returncode) == ("True\n[0, 1]\n", "", 0)
    finally:
        gate.close()


@no_guard_needed
def test_f25_ctrl_c_in_the_terminal_does_not_reach_the_workers(
    script: Script, context: str
) -> None:
    # A terminal sends SIGINT to its whole foreground group.
    gate = Gate(script.world.folder)
    try:
        process = script.start(
            """
            import os
            os.setpgid(0, 0)
            manager = make()
            manager.launch()
            try:
                manager.send({0: Do.GATE})
                manager.recv()
            except KeyboardInterrupt:
                say("interrupted")
            timesteps = manager.recv()
            say([seen(t.obs)[1:5] for t in timesteps.values()])
            manager.close()
            """,
            context,
        )
        visit = gate.await_visit(0, "step")
        os.killpg(process.pid, signal.SIGINT)
        script.await_line("interrupted")
        visit.release()
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (out, err, process.returncode) == (f"[(0, 0, 1, {17})]\n", "", 0)
    finally:
        gate.close()


# -- forks of the trainer -------------------------------------------------------------------------

FORK = """
import os
manager = make()
manager.launch()
manager.step({0: Do.END, 1: 1})
for number in range(N_ENDS):
    child = os.fork()
    if child == 0:
        from envmgr.errors import ManagerClosedError
        for call in (
            lambda: manager.step({1: 1}),
            lambda: manager.ready_obs,
            lambda: manager.reset(),
            lambda: manager.recv(),
            lambda: manager.get_attr("label"),
        ):
            try:
                call()
                os._exit(1)
            except ManagerClosedError as error:
                assert "fork" in str(error), error
CHILD_ENDS
        raise AssertionError("the child goes on")
    pid, status = os.waitpid(child, 0)
    say(os.waitstatus_to_exitcode(status))
    for k in range(3):
        manager.get_attr("label")
        timesteps = manager.step({i: k for i in sorted(manager.ready_obs)})
        say([(t.done, seen(t.obs)[1]) for t in timesteps.values()])
manager.close()
"""
ENDS = (
    "os._exit(0)",
    "sys.exit(0)",
    "manager.close(); sys.exit(0)",
    "del manager; sys.exit(0)",
    "vars(manager)['itself'] = manager; del manager; import gc; gc.collect(); sys.exit(0)",
    "raise LookupError('of the child')",
)


@contexts
def test_f43_the_manager_of_a_forked_child_is_inert(script: Script, context: str) -> None:
    ends = "\n".join(f"        if number == {k}: {end}" for k, end in enumerate(ENDS))
    body = FORK.replace("CHILD_ENDS", ends).replace("N_ENDS", str(len(ENDS)))
    done = script.run(body, context, "-W", "ignore::DeprecationWarning")
    lines = done.stdout.splitlines()
    expected = []
    for end in ENDS:
        expected.append("1" if end.startswith("raise") else "0")
        expected += ["[(False, 0), (False, 0)]"] * 3
    assert lines == expected, done.stderr
    assert done.returncode == 0
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "LookupError: of the child" in done.stderr
    assert "Warning" not in done.stderr


@contexts
def test_f43_a_forked_child_that_lives_on_does_not_keep_workers(
    script: Script, context: str
) -> None:
    """It has the trainer's ends of all pipes, as a DataLoader's workers have."""
    gate = Gate(script.world.folder)
    try:
        process = script.start(
            """
            import os, time
            manager = make()
            manager.launch()
            child = os.fork()
            if child == 0:
                os.close(1)
                os.close(2)
                time.sleep(1000)
            say(child)
            manager.step({0: Do.HANG_IN_C, 1: 1})
            """,
            context,
            "-W",
            "ignore::DeprecationWarning",
        )
        child = int(script.read_line())
        gate.await_visit(0)
        process.kill()
        process.wait(PATIENCE_S)  # the standard library's helpers keep its stderr open
        try:
            script.await_workers_gone()
        finally:
            os.kill(child, signal.SIGKILL)
            wait_ended(child)
    finally:
        gate.close()


def test_f43_a_forked_child_may_launch_a_manager_of_its_own(script: Script) -> None:
    done = script.run(
        """
        import os
        manager = make()
        manager.launch()
        child = os.fork()
        if child == 0:
            own = make(env_num=1)
            own.launch()
            say(seen(own.step({0: 7})[0].obs)[3:5])
            own.close()
            os._exit(0)
        os.waitpid(child, 0)
        say(seen(manager.step({0: 8})[0].obs)[3:5])
        manager.close()
        """,
        "server",
        "-W",
        "ignore::DeprecationWarning",
    )
    assert done.stdout == "(1, 7)\n(1, 8)\n", done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("context", ["server", "fork", "spawn"])
def test_a_path_object_to_import_from_and_many_arguments(script: Script, context: str) -> None:
    done = script.run(
        """
        import pathlib
        sys.path.append(pathlib.Path("/nowhere"))  # which imports pass over
        sys.argv += ["data/part-%030d.npz" % k for k in range(5000)]  # 220 kB
        with make() as manager:
            say(sorted(manager.step({0: 1, 1: 1})))
        """,
        context,
    )
    assert done.stdout == "[0, 1]\n", done.stderr


@contexts
def test_what_envs_start_gets_no_fd_of_ours(script: Script, context: str) -> None:
    done = script.run(
        """
        import os

        def ours(env):
            found = []
            for fd in map(int, os.listdir("/proc/self/fd")):
                if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(fd):
                    found.append(os.readlink(f"/proc/self/fd/{fd}"))
            return found

        with make() as manager:
            say(max(map(len, manager.apply(ours))))
        """,
        context,
    )
    # `multiprocessing` has two pipes of its own there.
    assert done.stdout == ("2\n" if context in ("spawn", "forkserver") else "0\n"), done.stderr


@pytest.mark.parametrize("context", ["server", "spawn"])
def test_an_env_that_closes_fds_that_are_not_its_own_is_told_so(
    script: Script, context: str
) -> None:
    done = script.run(
        """
        import os
        from envmgr.errors import EnvCrash

        with make(env_num=1) as manager:
            try:
                manager.apply(lambda env: os.closerange(3, 200))
            except EnvCrash as error:
                text = " ".join(str(error).split())
                say(("descriptor that is not its own" in text, "out of memory" in text))
        """,
        context,
    )
    assert done.stdout == "(True, False)\n", done.stderr


# -- threads of the trainer -----------------------------------------------------------------------


@pytest.mark.parametrize("context", ["server", "spawn"])
def test_f31_launch_in_the_midst_of_busy_threads(script: Script, context: str) -> None:
    done = script.run(
        """
        import logging, threading
        stop = threading.Event()
        lock = threading.Lock()
        logging.basicConfig(filename=FOLDER + "/log")

        def busy():
            while not stop.is_set():
                with lock:
                    logging.getLogger("busy").warning("at work")

        threads = [threading.Thread(target=busy) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            with make() as manager:
                timesteps = manager.step({0: Do.KILL, 1: 1})
                manager.get_attr("label")
                say([t.done for t in manager.step({0: 1, 1: 1}).values()])
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        """,
        context,
    )
    assert done.stdout == "[False, False]\n", done.stderr
    assert done.returncode == 0


@no_guard_needed
def test_a_manager_that_lives_in_a_thread(script: Script, context: str) -> None:
    done = script.run(
        """
        import threading

        def work():
            with make(type="async_subprocess", wait_num=2) as manager:
                say(sorted(manager.step({0: 1, 1: 1})))

        if CONTEXT == "fork":  # needs to be alone; the thread is the only one that forks
            work()
        else:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        """,
        context,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[0, 1]\n", "", 0)
