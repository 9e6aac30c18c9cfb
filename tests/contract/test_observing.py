"""A trainer is looked at from outside while it runs, and is not disturbed by it."""

from __future__ import annotations

import json
import operator
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr import make
from envmgr.cli import main
from envmgr.observing.timeline import read_trace, totals_of
from envmgr.worker.crash_report import STACKS_SIGNAL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it takes /proc")

PATIENCE_S = 60.0


class Gated(gymnasium.Env[Any, Any]):
    """An env whose steps wait for a file where the action is 2."""

    observation_space = Box(0.0, 1.0, (2,), np.float32)
    action_space = Discrete(3)

    def __init__(self, gate: Path) -> None:
        self._gate = gate

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        while action == 2 and not self._gate.exists():
            time.sleep(0.01)
        return np.ones(2, np.float32), 1.0, False, False, {}


def awaited(look: Callable[[], Any], is_so: Callable[[Any], bool]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not is_so(found := look()):
        assert time.monotonic() < end, found
        time.sleep(0.05)
    return found


def dumped() -> Any:
    found = subprocess.run(
        [sys.executable, "-m", "envmgr", "dump", "--json", str(os.getpid())],
        check=True,
        capture_output=True,
        text=True,
    )
    (figures,) = json.loads(found.stdout)
    return figures


def test_a_dump_of_a_trainer_that_waits_shows_who_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "gate"
    trace = tmp_path / "trace.json"
    kind = {"type": "subprocess", "num_workers": 2, "metrics": {}, "trace": str(trace)}
    with make(partial(Gated, gate), env_num=4, **kind) as manager:
        manager.send({0: 1, 1: 2, 2: 1, 3: 1})

        def at(figures: Any) -> list[str]:
            return [env["at"] for env in figures["envs"]]

        kept = ["waits to be gathered", "step", "waits to be gathered", "waits to be gathered"]
        figures = awaited(dumped, lambda figures: at(figures) == kept)
        assert [env["state"] for env in figures["envs"]] == ["RUN"] * 4
        workers = figures["workers"]
        assert [worker["env_ids"] for worker in workers] == [[0, 1], [2, 3]]
        assert f'File "{__file__}", line ' in workers[0]["stacks"]
        assert " in step" in workers[0]["stacks"]
        assert figures["pid"] == os.getpid()
        assert f'"{__file__}"' in figures["trainer"]
        for _ in range(300):  # more than a file of stacks that only grew would hold
            os.kill(workers[0]["pid"], STACKS_SIGNAL or 0)
        assert main(["dump", str(os.getpid())]) == 0
        text = capsys.readouterr().out
        assert f'File "{__file__}", line ' in text
        assert "envs 2, 3" in text
        assert main(["top", "--once", "--interval", "0.1", str(os.getpid())]) == 0
        rows = capsys.readouterr().out.splitlines()[2:]
        assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
        measured = [" us " in row or " ms " in row for row in rows]
        assert measured == [True, False, True, True], "it is at its first step"
        assert main(["dump", str(workers[0]["pid"])]) == 2
        assert "has no manager" in capsys.readouterr().err
        gate.touch()
        timesteps = manager.recv(min_ready=4)
        assert sorted(timesteps) == [0, 1, 2, 3]
        assert not any(timestep.done for timestep in timesteps.values())
        assert manager.stats()["failures"] == 0
    latency = manager.stats()["latency"]  # also once it is closed
    assert all(count >= 1 for kind in ("step", "reset") for count in latency[kind]["count"])
    assert latency["step"]["max"][1] > 0.05, "it has waited"
    totals = totals_of(read_trace(str(trace)))
    assert totals["env step"][0] == sum(latency["step"]["count"]) == 4
    assert totals["env step"][1] == pytest.approx(
        sum(map(operator.mul, latency["step"]["count"], latency["step"]["mean"])), rel=0.01
    )
    assert totals["env reset"][0] == sum(latency["reset"]["count"])
    assert totals["worker construction"][0] == 4
    assert totals["call send"][0] == totals["call recv"][0] == 1


@pytest.mark.parametrize(
    ("num_workers", "others"),
    [(6, "envs 1 to 5 have answered"), (3, "env 1 waits for its turn; envs 2 to 5 have answered")],
)
def test_the_warning_of_a_long_wait_names_the_env_that_hangs(
    num_workers: int,
    others: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = tmp_path / "gate"
    wanted = re.compile(f": env 0 has been in step for (< )?[1-9]+ s; {others}")

    def open_once_warned() -> None:
        try:
            awaited(lambda: caplog.text, wanted.search)
        finally:
            gate.touch()

    kind = {"type": "subprocess", "num_workers": num_workers}
    with make(partial(Gated, gate), env_num=6, **kind) as manager:
        monkeypatch.setattr("envmgr.core.engine.WARN_EVERY_S", 0.1)
        opening = threading.Thread(target=open_once_warned)
        opening.start()
        timesteps = manager.step({0: 2, **dict.fromkeys(range(1, 6), 1)})
        opening.join()
        assert len(timesteps) == 6
    (text, *_) = (text for text in caplog.messages if wanted.search(text))
    assert f"`envmgr dump {os.getpid()}` shows the line." in text


def test_top_has_a_screen_of_its_own_and_waits_for_a_launch() -> None:
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "envmgr", "top", str(os.getpid()), "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    shown = ""

    def awaits(text: str) -> None:
        nonlocal shown
        until = time.monotonic() + PATIENCE_S
        while text not in shown:
            assert select.select([ours], [], [], until - time.monotonic())[0], shown[-2000:]
            shown += os.read(ours, 1 << 16).decode()

    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, env=environment)
    os.close(theirs)
    try:
        awaits("Waiting: ")
        assert "\x1b[?1049h" in shown, "the main screen is left as it is"
        with make("CartPole-v1", env_num=2, type="subprocess"):
            awaits("subprocess, 2 envs")
            os.write(ours, b"s")
            awaits("(slowest)")
            os.write(ours, b"\r")
            awaits(", worker ")  # known from the second look on
            awaits("enter back")
            os.write(ours, b"q")
            awaits("\x1b[?1049l")
            assert process.wait(timeout=PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
