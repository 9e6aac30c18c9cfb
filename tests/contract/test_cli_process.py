"""The command line as a process of its own: signals, kills, pipes and terminals."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import termios
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contract.harness import PATIENCE_S, Gate, Visit

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="looks into /proc")

MODULE = '''
import json, os, socket, time
import gymnasium


def visit(where, **more):
    """Tell the test that this process is here, and wait until it is let go."""
    with socket.socket(socket.AF_UNIX) as gate:
        gate.connect("gate")
        said = {"env_id": -1, "build": 0, "where": where, "pid": os.getpid(), **more}
        gate.sendall(json.dumps(said).encode() + b"\\n")
        gate.recv(1)


class Gated:
    """Pushes CartPole's cart after the pole; visits the gate in the calls that GATE_AT names."""

    def __init__(self, observation_space, action_space, seed):
        self.calls, self.at = 0, json.loads(os.environ.get("GATE_AT", "[]"))
        self.n_actions = 0

    def __call__(self, obs):
        if self.calls in self.at:
            visit("policy", n_actions=self.n_actions)
        self.calls += 1
        self.n_actions += len(obs)
        return {env_id: int(one[2] > 0) for env_id, one in obs.items()}


class Hanging(gymnasium.Env):
    """Visits the gate and never returns, in its construction or its third step."""

    observation_space = gymnasium.spaces.Discrete(9)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, where):
        self.where, self.n = where, 0
        self.hang("build")

    def hang(self, where):
        if where == self.where:
            visit(where)
            time.sleep(1000)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        self.n += 1
        if self.n == 3:
            self.hang("step")
        return 0, 1.0, False, False, {}
'''
CONFIG = """
env: {id: CartPole-v1}
manager: {type: subprocess, env_num: 3, seed: 0, close_timeout: 0.5}
collect: {policy: "cli_gated:Gated", output: out}
"""
HANGING = ("--set", "env.id=null", "--set", "env.entry=cli_gated:Hanging")


class Cli:
    """A process that runs the command line, in a folder of its own."""

    def __init__(self, folder: Path, args: Sequence[str], *, gate_at: Sequence[int], **io: Any):
        env = {**os.environ, "GATE_AT": json.dumps(gate_at), "TERM": "xterm"}
        for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
            env.pop(name, None)
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "envmgr", *args], cwd=folder, env=env, **io
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self) -> tuple[int, str, str]:
        """Wait until it has ended; return its exit code and what it printed."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out or "", err or ""

    @property
    def episodes(self) -> list[dict[str, Any]]:
        text = (self.folder / "out/episodes.jsonl").read_text()
        assert text == "" or text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "out/summary.json").read_text())
        return found

    def check_accounts(self) -> dict[str, Any]:
        """Check that every timestep delivered is in one episode; return the summary."""
        summary = self.summary
        in_episodes = sum(e["length"] for e in self.episodes)
        assert summary["steps"] == in_episodes + summary["unfinished_steps"]
        assert summary["steps"] == summary["stats"]["timesteps"]
        assert summary["episodes"] + summary["abnormal_episodes"] == len(self.episodes)
        return summary


Start = Callable[..., Cli]


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(str(tmp_path))
    yield gate
    gate.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts command lines, and kills those that are left."""
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "cli_gated.py").write_text(MODULE)
    started: list[Cli] = []

    def start(*args: str, gate_at: Sequence[int] = (), **io: Any) -> Cli:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **io}
        started.append(Cli(tmp_path, args, gate_at=gate_at, **pipes))
        return started[-1]

    yield start
    for cli in started:
        if cli.process.poll() is None:
            cli.process.kill()
        cli.process.wait()
        for pipe in (cli.process.stdout, cli.process.stderr):
            if pipe is not None:
                pipe.close()


def children_of(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for t in threads for child in (t / "children").read_text().split()]


def workers_of(pid: int) -> list[int]:
    """Return the workers of a trainer: those at the ends of its tree of processes.

    What is between them are servers, one forked from the other: the template that managers share,
    the one of this manager, and the one that has imported what the envs need.
    """
    below = children_of(pid)
    ends = [end for child in below for end in workers_of(child) or [child]]
    return sorted(ends)


def kill(pid: int) -> None:
    """Kill a process with SIGKILL and wait until it is gone."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        with selectors.DefaultSelector() as selector:
            selector.register(pidfd, selectors.EVENT_READ)
            assert selector.select(PATIENCE_S), "the process does not die"
    finally:
        os.close(pidfd)


def history(episodes: list[dict[str, Any]], env_id: int) -> list[tuple[int, int, float, bool]]:
    return [
        (e["nth"], e["length"], e["return"], e["abnormal"])
        for e in episodes
        if e["env_id"] == env_id
    ]


class TestKills:
    def test_of_workers_do_not_end_it(self, start: Start, gate: Gate, tmp_path: Path) -> None:
        eight = ("run", "c.yaml", "--episodes", "80", "--set", "manager.env_num=8")
        calm = start(*eight)
        assert calm.end()[0] == 0
        undisturbed = calm.episodes

        cli = start(*eight, "--force", gate_at=[50, 90, 130])
        victims: list[int] = []
        for _ in range(3):
            visit = gate.await_visit()
            victims.append(next(p for p in workers_of(cli.pid) if p not in victims))
            kill(victims[-1])
            visit.release()
        code, out, err = cli.end()

        assert code == 0, err
        summary = cli.check_accounts()
        assert summary["episodes"] == 80
        assert summary["stats"]["failures_by_kind"] == {"EnvCrash": 3}
        hurt = {int(i) for i in summary["stats"]["failures_by_env"]}
        assert f"3 failures: EnvCrash x3 (envs {', '.join(map(str, sorted(hurt)))})" in out
        assert sum("killed by SIGKILL" in line for line in err.splitlines()) == 3
        assert {e["env_id"] for e in cli.episodes if e["abnormal"]} == hurt
        for env_id in set(range(8)) - hurt:
            mine, before = history(cli.episodes, env_id), history(undisturbed, env_id)
            n = min(len(mine), len(before))
            assert n > 0
            assert mine[:n] == before[:n]

    def test_of_itself_keep_the_episodes(self, start: Start, gate: Gate, tmp_path: Path) -> None:
        cli = start("run", "c.yaml", "--steps", "1000000", gate_at=[200])
        gate.await_visit()
        workers = workers_of(cli.pid)
        assert len(workers) == 3
        kill(cli.pid)
        cli.end()
        assert sum(e["length"] for e in cli.episodes) > 0
        assert {path.name for path in (tmp_path / "out").iterdir()} == {
            "episodes.jsonl",
            "config.yaml",
            "samples.jsonl",
            "run.json",
            "process.json",
            "run.lock",
        }
        # and the leak guard sees to it that the workers are gone

    def test_of_itself_twice_and_it_is_resumed(
        self, start: Start, gate: Gate, tmp_path: Path
    ) -> None:
        """The whole run has exactly what was asked for, and no episode twice."""
        cli = start("run", "c.yaml", "--episodes", "60", "--set", "manager.seed=3", gate_at=[200])
        gate.await_visit()
        before = cli.episodes
        code, _, err = start("run", "--resume", "out").end()
        assert (code, f"still going on, as process {cli.pid}" in err) == (2, True)
        assert cli.episodes == before
        kill(cli.pid)
        cli.end()
        with open(tmp_path / "out/episodes.jsonl", "a") as file:
            file.write('{"episode": 17, "env_')  # the line that the kill cut off

        cli = start("run", "--resume", "out", gate_at=[200])
        gate.await_visit()
        # A line that is half written does not end with a newline; this one was dropped.
        middle = cli.episodes
        assert middle[: len(before)] == before
        assert len(before) < len(middle) < 60
        kill(cli.pid)
        cli.end()

        cli = start("run", "--resume", "out")
        code, out, err = cli.end()
        assert code == 0, err
        assert f"resuming out: {len(middle)} episodes" in out
        assert "resumed" in out
        episodes, summary = cli.episodes, cli.check_accounts()
        assert episodes[: len(middle)] == middle
        assert [e["episode"] for e in episodes] == list(range(60))
        assert summary["episodes"] == 60
        assert {e["resumed"] for e in episodes} == {0, 1, 2}
        assert len({(e["seed"], e["nth"]) for e in episodes}) == 60
        assert summary["seed"] == 3
        assert [one["episodes"] for one in summary["resumed"]] == [len(before), len(middle)]
        report = json.loads((tmp_path / "out/report.json").read_text())
        assert report["unread"] == []
        assert len(report["summary"]["resumed"]) == 2
        assert "resumed twice" in (tmp_path / "out/report.html").read_text()
        ended_s = [e["ended_s"] for e in episodes]
        assert ended_s == sorted(ended_s)
        samples = [json.loads(x) for x in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
        assert [x["steps"] for x in samples] == sorted(x["steps"] for x in samples)
        names = {path.name for path in (tmp_path / "out").iterdir()}
        assert not names & {"run.lock", "process.json"}

    def test_of_itself_while_it_counts_steps(self, start: Start, gate: Gate) -> None:
        cli = start("run", "c.yaml", "--steps", "1500", gate_at=[200])
        gate.await_visit()
        kill(cli.pid)
        cli.end()
        code, _, err = start("run", "--resume", "out").end()
        assert code == 0, err
        assert cli.check_accounts()["steps"] == 1500


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_end_it_and_keep_what_was_collected(
        self, start: Start, gate: Gate, number: signal.Signals
    ) -> None:
        cli = start("run", "c.yaml", "--steps", "1000000", gate_at=[100, 101])
        visit = gate.await_visit()
        cli.process.send_signal(number)
        visit.release()
        code, out, err = cli.end()
        assert code == 130
        assert gate.nobody_came()  # the step under way was the last one
        summary = cli.check_accounts()
        assert summary["ending"] == "interrupted"
        assert visit.said["n_actions"] <= summary["steps"] <= visit.said["n_actions"] + 3
        assert "interrupted" in out
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        kept_steps = summary["steps"] - summary["unfinished_steps"]
        n_episodes = f"{summary['episodes']:,} episodes"
        assert f"interrupted by {name}; {n_episodes} and {kept_steps:,} timesteps" in err
        *_, kept, command = err.strip().splitlines()
        assert "are kept in out, but not " in kept
        assert command == "envmgr: to go on: envmgr run --resume out"

    def test_end_chaos_with_its_accounts(self, start: Start, gate: Gate, tmp_path: Path) -> None:
        options = ("--rate", "10", "--kinds", "kill", "--json", "figures.json")
        cli = start("chaos", "c.yaml", "--steps", "1000000", *options, gate_at=[5, 9])
        gate.await_visit().release()
        visit = gate.await_visit()
        cli.process.send_signal(signal.SIGINT)
        visit.release()
        code, out, err = cli.end()
        assert code == 130, err
        assert "interrupted by Ctrl-C; the figures are those until then" in err
        assert "interrupted, nothing lost, repeated or swapped" in out
        figures = json.loads((tmp_path / "figures.json").read_text())
        accounts = figures["accounts"]
        parts = accounts["normal"] + accounts["abnormal"] + accounts["cancelled"]
        assert accounts["accepted"] == parts > 0

    @pytest.mark.parametrize("attempt", range(3))
    def test_at_full_speed_lose_no_timestep(self, start: Start, gate: Gate, attempt: int) -> None:
        cli = start("run", "c.yaml", "--steps", "1000000", gate_at=[100 + attempt])
        gate.await_visit().release()
        for _ in range(5):  # the first ends it, the others are harmless
            cli.process.send_signal(signal.SIGINT)
        assert cli.end()[0] == 130
        cli.check_accounts()

    def test_that_were_ignored_from_the_start_are_ignored_for_good(
        self, start: Start, gate: Gate
    ) -> None:
        ignore = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)  # as a shell's `&`
        options = ("--steps", "1000000")
        cli = start("run", "c.yaml", *options, gate_at=[100, 101, 102], preexec_fn=ignore)
        visit = gate.await_visit()
        cli.process.send_signal(signal.SIGINT)
        visit.release()
        visit = gate.await_visit()  # so it goes on
        cli.process.send_signal(signal.SIGTERM)
        visit.release()
        code, _, err = cli.end()
        assert code == 130
        assert "interrupted by SIGTERM" in err
        assert gate.nobody_came()
        cli.check_accounts()

    def test_while_a_policy_hangs(self, start: Start, gate: Gate) -> None:
        cli = start("run", "c.yaml", "--steps", "1000000", gate_at=[10])
        gate.await_visit()
        cli.process.send_signal(signal.SIGINT)
        assert cli.end()[0] == 130
        assert cli.check_accounts()["steps"] == 30

    @pytest.mark.parametrize("kind", ["base", "async_subprocess"])
    def test_while_an_env_hangs(self, start: Start, gate: Gate, kind: str) -> None:
        sets = ["env.kwargs.where=step", "collect.policy=random", f"manager.type={kind}"]
        if kind == "async_subprocess":
            sets.append("manager.wait_num=1")  # or an env would wait for the two that hang
        options = [f"--set={one}" for one in sets]
        cli = start("run", "c.yaml", "--steps", "1000", *HANGING, *options)
        for _ in range(1 if kind == "base" else 3):
            gate.await_visit(where="step")
        cli.process.send_signal(signal.SIGINT)
        code, _, err = cli.end()
        assert code == 130, err
        assert cli.check_accounts()["steps"] == 6
        assert "closing the envs, in 0.5 s at most" in err

    def test_while_it_launches(self, start: Start, gate: Gate, tmp_path: Path) -> None:
        cli = start("run", "c.yaml", "--steps", "10", *HANGING, "--set", "env.kwargs.where=build")
        gate.await_visit(where="build")
        cli.process.send_signal(signal.SIGINT)
        code, _, err = cli.end()
        assert (code, err.strip()) == (130, "envmgr: interrupted")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("stderr_is_closed", [False, True])
    def test_while_it_imports_the_command_line(
        self, tmp_path: Path, stderr_is_closed: bool
    ) -> None:
        script = """
            import sys
            from envmgr.__main__ import main

            class Interrupts:
                def find_spec(self, name, path, target=None):
                    if name == "envmgr.cli":
                        raise KeyboardInterrupt

            sys.meta_path.insert(0, Interrupts())
            sys.exit(main())
        """
        closes = "2>&-" if stderr_is_closed else ""
        done = subprocess.run(
            ["sh", "-c", f'exec "$0" "$@" {closes}', sys.executable, "-c", textwrap.dedent(script)],
            **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": PATIENCE_S},
        )
        said = "" if stderr_is_closed else "envmgr: interrupted"
        assert (done.returncode, done.stderr.strip()) == (130, said)


class TestPipes:
    def test_a_reader_that_goes_away_at_the_end(self, start: Start, gate: Gate) -> None:
        cli = start("run", "c.yaml", "--steps", "100", gate_at=[10])
        visit = gate.await_visit()
        assert cli.process.stdout is not None
        cli.process.stdout.close()
        visit.release()
        assert cli.process.wait(PATIENCE_S) == 0
        assert cli.process.stderr is not None
        assert cli.process.stderr.read() == ""
        assert cli.check_accounts()["ending"] == "done"

    def test_a_reader_that_goes_away_ends_it(
        self, start: Start, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        eager = "import envmgr.cli.progress as it; it.LINE_EVERY_S = 0.0\n"
        (tmp_path / "sitecustomize.py").write_text(eager)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        cli = start("run", "c.yaml", "--steps", "1000000", gate_at=[10])
        visit = gate.await_visit()
        assert cli.process.stdout is not None
        cli.process.stdout.close()
        visit.release()
        assert cli.process.wait(PATIENCE_S) == 130
        assert cli.process.stderr is not None
        assert "what read the output has gone" in cli.process.stderr.read()
        assert cli.check_accounts()["ending"] == "interrupted"

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
    @pytest.mark.parametrize(
        ("policy", "code", "ending"), [("Gated", 0, "done"), ("Absent", 2, "")]
    )
    def test_a_full_disk_below_the_output_changes_nothing(
        self, start: Start, tmp_path: Path, policy: str, code: int, ending: str
    ) -> None:
        options = ("--steps", "30", "--set", f"collect.policy=cli_gated:{policy}")
        with open("/dev/full", "w") as full:
            cli = start("run", "c.yaml", *options, stdout=full, stderr=full)
            assert cli.process.wait(PATIENCE_S) == code
        if ending:
            assert cli.check_accounts()["ending"] == ending

    def test_no_output_at_all(self, tmp_path: Path, start: Start) -> None:
        start().end()  # for the files
        closed = [sys.executable, "-m", "envmgr", "run", "c.yaml", "--steps", "30"]
        done = subprocess.run(
            ["sh", "-c", '"$@" >&- 2>&-', "sh", *closed], cwd=tmp_path, timeout=PATIENCE_S
        )
        assert done.returncode == 0
        assert json.loads((tmp_path / "out/summary.json").read_text())["steps"] == 30


class Terminal:
    """A terminal of so many columns, for a process that it controls."""

    def __init__(self, columns: int) -> None:
        self._master, self.slave = os.openpty()
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, size)

    @property
    def io(self) -> dict[str, Any]:
        """How a process is started on it."""
        return {
            "stdin": self.slave,
            "stdout": self.slave,
            "stderr": self.slave,
            "start_new_session": True,
            "preexec_fn": lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        }

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def read_until(self, text: str) -> str:
        """Return what was shown up to and with `text`."""
        shown = b""
        while text.encode() not in shown:
            shown += self._read()
        return shown.decode()

    def rest(self) -> str:
        """Return what is shown until the process has ended; this end of it must be closed."""
        shown = b""
        with contextlib.suppress(OSError):  # Linux: nobody has the other end any more
            while chunk := self._read():
                shown += chunk
        return shown.decode()

    def _read(self) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(self._master, selectors.EVENT_READ)
            assert selector.select(PATIENCE_S), "the terminal stays silent"
        return os.read(self._master, 65536)

    def hang_up(self) -> None:
        os.close(self.slave)
        self.slave = -1

    def close(self) -> None:
        for fd in (self._master, self.slave):
            if fd >= 0:
                os.close(fd)


@pytest.fixture(params=[30, 120])
def terminal(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    terminal = Terminal(request.param)
    yield terminal
    terminal.close()


class TestTerminals:
    @pytest.mark.parametrize("terminal", [30], indirect=True)
    def test_ctrl_c_twice(self, start: Start, gate: Gate, terminal: Terminal) -> None:
        cli = start("run", "c.yaml", "--steps", "1000000", gate_at=[100], **terminal.io)
        visit: Visit = gate.await_visit()
        shown = terminal.read_until("0 failures")
        terminal.hang_up()
        assert "/1,000,000 steps" in shown
        assert "\x1b[" in shown
        terminal.type(b"\x03\x03")
        visit.release()
        shown = terminal.rest()
        assert cli.process.wait(PATIENCE_S) == 130
        assert "interrupted by Ctrl-C" in shown
        assert "Traceback" not in shown
        cli.check_accounts()

    def test_failures_appear_above_the_display(
        self, start: Start, gate: Gate, terminal: Terminal
    ) -> None:
        cli = start("run", "c.yaml", "--steps", "1000", gate_at=[100], **terminal.io)
        visit = gate.await_visit()
        terminal.hang_up()
        kill(workers_of(cli.pid)[0])
        visit.release()
        shown = terminal.rest()
        assert cli.process.wait(PATIENCE_S) == 0
        assert shown.count("killed by SIGKILL") == 1
        assert cli.check_accounts()["stats"]["failures"] == 1


def test_a_crash_of_an_env_in_this_process_shows_where(tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text(
        "import faulthandler\n"
        "import gymnasium\n"
        "class Env(gymnasium.Env):\n"
        "    observation_space = action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        faulthandler._sigsegv()\n"
    )
    (tmp_path / "c.yaml").write_text("env: {entry: 'crashing:Env'}\nmanager: {env_num: 1}\n")
    done = subprocess.run(
        [sys.executable, "-m", "envmgr", "run", "c.yaml", "--steps", "5"],
        **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": PATIENCE_S},
    )
    assert done.returncode == -signal.SIGSEGV
    assert "no manager.type in the config, so base" in done.stdout
    assert f'File "{tmp_path / "crashing.py"}", line 6 in reset' in done.stderr


def test_help_is_quick_as_it_imports_nothing_heavy() -> None:
    script = (
        "import sys; from envmgr.cli import main; assert main(['run', '--help']) == 0; "
        "heavy = {'numpy', 'gymnasium', 'yaml', 'rich', 'torch', 'treetensor'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_torch_is_left_alone_by_kinds_that_do_not_need_it(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("env: {id: CartPole-v1}\nmanager: {env_num: 1}\n")
    script = (
        "import sys; from envmgr.cli import main; "
        "assert main(['run', 'c.yaml', '--steps', '5', '--no-output']) == 0; "
        "heavy = {'torch', 'treetensor'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
