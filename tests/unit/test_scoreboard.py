"""From what was seen of a fault to the words of the scoreboard, and to the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Soak = Callable[[str], Any]

CRASH = {
    "type": "EnvCrash",
    "modules": ["envmgr", "builtins"],
    "is_timeout": False,
    "env_id": 1,
    "text": "the host of env 1 died",
}
EOF_ERROR = {
    "type": "EOFError",
    "modules": ["builtins"],
    "is_timeout": False,
    "env_id": None,
    "text": "",
}


def step(
    *right: int,
    error: dict[str, Any] | None = None,
    failed: dict[str, Any] | None = None,
    wrong: str = "",
) -> dict[str, Any]:
    """Return a step after the fault."""
    return {
        "call": "step",
        "seconds": 0.1,
        "after_fault": True,
        "error": error,
        "right": list(right),
        "errors": {"1": failed} if failed else {},
        "wrong": {"1": wrong} if wrong else {},
    }


def other(call: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return another call after the fault."""
    return {"call": call, "seconds": 0.1, "after_fault": True, "error": error}


def facts(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return what was seen."""
    return {
        "hangs": None,
        "interruptible": None,
        "ended_early": None,
        "left_after_close": [],
        "left_after_end": [],
        "ends": True,
        "named_in_log": False,
        "calls": list(calls),
        **more,
    }


GOES_ON = [step(0, 1, 2)] * 6
CASES = {
    "goes on: EnvCrash": facts(step(0, 2, failed=CRASH), *GOES_ON, other("close")),
    "the others go on: EnvCrash": facts(step(0, 2, failed=CRASH), *[step(0, 2)] * 6),
    "goes on": facts(*GOES_ON, other("close")),
    "stops: EOFError; close raises EOFError; 2 left behind; 1 as zombies left behind": facts(
        step(error=EOF_ERROR),
        other("reset", EOF_ERROR),
        other("close", EOF_ERROR),
        left_after_close=["process", "zombie", "process"],
    ),
    "goes on after a reset of all: EOFError": facts(
        step(error=EOF_ERROR), other("reset"), *GOES_ON
    ),
    "goes on; wrong data": facts(step(0, 2, wrong="of another step"), *GOES_ON),
    "hangs; close hangs; 1 left for good": facts(
        hangs=["step", "close"], interruptible=True, left_after_end=["process"]
    ),
    "stops: EOFError, then hangs": facts(step(error=EOF_ERROR), hangs=["step"], interruptible=True),
    "hangs, Ctrl-C does not help": facts(hangs=["step"], interruptible=False),
    "the trainer ends (status 3)": facts(ended_early={"call": "step", "status": 3}),
}


@pytest.mark.parametrize("text", CASES)
def test_words(soak: Soak, text: str) -> None:
    assert soak("judge").judge("envmgr", "kill-step", CASES[text]).text == text


@pytest.mark.parametrize(
    ("fault", "seen", "text"),
    [
        ("die-build", facts(other("start", EOF_ERROR)), "refused: EOFError"),
        ("die-build", facts(other("start")), "not noticed"),
        ("die-build", facts({**other("start"), "envs": [0, 2]}), "goes on without it"),
        ("die-build", facts({**other("start"), "envs": [0, 1, 2]}), "not noticed"),
        ("hang-close", facts(other("close")), "ends"),
        ("hang-close", facts(hangs=["close"], interruptible=True), "close hangs"),
        ("dropped", facts(ends=False), "does not end"),
        ("exit-open", facts(ended_early={"call": "step", "status": 0}), "ends"),
    ],
)
def test_words_of_other_places(soak: Soak, fault: str, seen: dict[str, Any], text: str) -> None:
    assert soak("judge").judge("envmgr", fault, seen).text == text


def test_checks(soak: Soak) -> None:
    judge = soak("judge").judge
    good = judge("envmgr", "kill-step", CASES["goes on: EnvCrash"]).checks
    assert set(good.values()) == {True}
    bad = judge("gymnasium", "kill-step", facts(step(error=EOF_ERROR), other("close", EOF_ERROR)))
    assert bad.checks == {
        "goes_on": False,
        "victim_back": False,
        "typed": False,
        "named": False,
        "right_data": True,
        "closes": False,
        "clean": True,
        "reaped": True,
    }


TIMEOUT = {**CRASH, "type": "TimeoutError", "modules": ["builtins"], "is_timeout": True}


@pytest.mark.parametrize(
    ("steps", "text", "goes_on"),
    [
        ([step(0, 2), step(0, 2, failed=TIMEOUT), *GOES_ON], "goes on: TimeoutError", True),
        ([step(0, 2)] * 6, "the others go on", True),
        ([step(0), step(0, 2, failed=TIMEOUT), *GOES_ON], "the others wait with it: Tim", False),
        ([step(failed=TIMEOUT)] * 6, "stops: TimeoutError", False),
    ],
)
def test_envs_with_users_are_not_to_wait_for_each_other(
    soak: Soak, steps: list[dict[str, Any]], text: str, goes_on: bool
) -> None:
    cell = soak("judge").judge("torchrl", "thread-hang", facts(*steps, other("close")))
    assert cell.text.startswith(text)
    assert cell.checks["goes_on"] is goes_on
    if cell.error is not None:
        assert cell.checks["typed"] is True, "whoever hangs is told of a time limit"


def test_a_user_that_is_in_a_call_keeps_the_trainer_from_ending(soak: Soak) -> None:
    judge, seen = soak("judge").judge, facts(*GOES_ON, other("close"), ends=False)
    assert judge("torchrl", "thread-kill", seen).text == "goes on; the trainer does not end"
    assert judge("torchrl", "kill-idle", seen).text == "goes on"


def test_what_is_not_offered_counts_nowhere(soak: Soak) -> None:
    scoreboard = soak("scoreboard")
    offers = soak("peers").offers
    assert [offers("sb3", users) for users in ("", "threads", "coroutines")] == [True, False, False]
    assert offers("envmgr", "threads")
    assert offers("envmgr", "coroutines")
    cell = scoreboard.cell_of("sb3", "thread-kill", None)
    assert cell["text"] == "not offered"
    assert set(cell["checks"].values()) == {None}


def test_each_library_has_its_interpreter(soak: Soak, capsys: pytest.CaptureFixture[str]) -> None:
    parse = soak("scoreboard").parse
    pythons = parse(["--python", "torchrl=/a/python", "--python", "rllib=/b/python"]).python
    assert pythons["torchrl"] == "/a/python"
    assert pythons["rllib"] == "/b/python"
    assert pythons["sb3"] == sys.executable
    assert pythons["ding"] == f"{sys.prefix}-ding/bin/python"
    for wrong in ("/a/python", "nobody=/a/python", "sb3="):
        with pytest.raises(SystemExit):
            parse(["--python", wrong])
        assert "is not LIBRARY=PATH" in capsys.readouterr().err


def test_a_timestep_is_compared_with_the_action_that_it_answers(soak: Soak) -> None:
    outcome, run = soak("peers").Outcome, soak("probe").Run(None, None)
    obs = np.array([1.0, 77.0, 3.0, 5.0])
    given = {1: 9}
    assert run._check(given, {1: outcome(obs, 5.0, done=False, action=5)})["right"] == [1]
    assert run._check(given, {1: outcome(obs, 5.0, done=False)})["wrong"].keys() == {1}


def test_helpers_live_as_long_as_the_trainer(soak: Soak) -> None:
    observe = soak("observe")

    def is_helper(command: str, parent_pid: int, trainer_pid: int | None) -> bool:
        process = observe.Process(9, "0", parent_pid, False, command)
        return bool(observe._is_helper(process, trainer_pid))

    tracker = "python -c from multiprocessing.resource_tracker import main;main(5)"
    raylet = "/venv/lib/site-packages/ray/core/src/ray/raylet/raylet --x"
    assert is_helper(tracker, 2, 2)
    assert not is_helper(tracker, 3, 2)
    for command in (raylet, "ray::IDLE", "ray::DashboardAgent"):
        assert is_helper(command, 3, 2)
        assert not is_helper(command, 3, None)
    assert not is_helper(tracker, 2, None)
    assert not is_helper("ray::SingleAgentEnvRunner.apply", 3, 2)


def test_facts_name_no_places(soak: Soak) -> None:
    without_places = soak("observe")._without_places
    assert without_places("at /venv/lib, 10.1.2.33", "/venv/bin/python") == "at .../lib, ..."


class FakeUser:
    """A user whose steps are answered by hand."""

    def __init__(self, env_id: int) -> None:
        self.env_id, self.steps, self.has_left = env_id, list[tuple[int, Future[Any]]](), False

    def begin(self) -> Future[Any]:
        return done(f"first of {self.env_id}")

    def step(self, action: int) -> Future[Any]:
        self.steps.append((action, Future()))
        return self.steps[-1][1]

    def leave(self) -> Future[None]:
        self.has_left = True
        return done(None)


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def test_who_is_late_is_not_waited_for(soak: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    users_module, outcome = soak("peers.users"), soak("peers").Outcome
    monkeypatch.setattr(users_module, "WAIT_S", 0.0)
    users = [FakeUser(0), FakeUser(1)]
    peer = users_module.Users(users)
    peer._launch = peer._shut = lambda: None
    assert peer.start() == {0: "first of 0", 1: "first of 1"}
    assert peer.ready() == [0, 1]
    assert peer.step({0: 10, 1: 11}) == {}
    users[0].steps[-1][1].set_result(outcome("obs", 10.0, done=False))
    assert peer.step({}) == {0: outcome("obs", 10.0, done=False, action=10)}
    assert peer.ready() == [0], "the other one is under way"
    assert peer.step({0: 20, 1: 21}) == {}
    assert [action for action, _ in users[1].steps] == [11]
    error = RuntimeError("gone")
    users[1].steps[-1][1].set_exception(error)
    assert peer.ready() == [], "its answer comes first, with the next step"
    assert peer.step({})[1].error is error
    assert peer.ready() == [1]
    peer.close()
    assert all(user.has_left for user in users)


def test_what_is_left(soak: Soak) -> None:
    judge = soak("judge").judge
    left = facts(other("close"), left_after_close=["zombie"])
    checks = judge("ding", "close-twice", left).checks
    assert (checks["clean"], checks["reaped"]) == (True, False)
    checks = judge("ding", "exit-open", {**facts(), "left_after_close": None}).checks
    assert (checks["clean"], checks["reaped"]) == (True, None)
    checks = judge("ding", "exit-open", facts(left_after_end=["process"])).checks
    assert (checks["clean"], checks["reaped"]) == (False, True)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("env 1 died", True),
        ("Received the following error from Worker-1: gone", True),
        ("envs [1]", True),
        ("env 12 died", False),
        ("1 env died", False),
        ("", False),
    ],
)
def test_names(soak: Soak, text: str, named: bool) -> None:
    assert soak("observe").names_victim(text) is named


def test_the_page_has_what_the_results_have(soak: Soak, tmp_path: Path) -> None:
    machine = {"cpu": "a cpu", "usable_cores": 2, "ram_gib": 1, "kernel": "k", "python": "p"}
    figure = {"what": "a time", "measured": "2 s", "target": "1 s", "met": False}
    figures = {
        "close": {
            "date": "2000-01-01",
            "machine": machine,
            "load_before": "0.1",
            "seconds": 7.0,
            "longest_stall_s": 0.25,
            "figures": [figure],
        }
    }
    cell = soak("judge").judge("envmgr", "kill-step", CASES["goes on: EnvCrash"])
    board = {
        "date": "2000-01-01",
        "machine": machine,
        "versions": {"envmgr": "9"},
        "missing": {"ding": "no wheel"},
        "cells": {
            "kill-step": {"envmgr": cell._asdict()},
            "thread-kill": {
                "envmgr": cell._asdict(),
                "sb3": soak("judge").NOT_OFFERED._asdict(),
            },
        },
    }
    folder = tmp_path / "reliability"
    folder.mkdir()
    (folder / "figures.json").write_text(json.dumps(figures))
    (folder / "scoreboard.json").write_text(json.dumps(board))
    killed = {"unit": 2, "contract": 1}
    drawn = {
        "paths": ["core"],
        "seed": 7,
        "of": 9,
        "drawn": 4,
        "killed": killed,
        "survivors": ["x"],
    }
    (folder / "mutants.json").write_text(json.dumps({"now": drawn | {"date": "2000-01-01"}}))
    soak("page").write(folder)
    page = (tmp_path / "reliability.md").read_text()
    assert "| a time | 2 s | 1 s | MISSED |" in page
    assert "stood still for 0.250 s" in page
    assert "| SIGKILL in the middle of a step | goes on: EnvCrash |" in page
    assert "| 4 of 9, seed 7, 2000-01-01 | 2 (50.0%) | 1 (25.0%) | 1 (25.0%) |" in page
    assert "| the other envs go on, without a reset of all | 1 of 1 |" in page
    assert "1 faults, each in a run of its own" in page, "those of envs with users are apart"
    assert "not offered by Stable-Baselines3 SubprocVecEnv." in page
    assert "| with a thread of its own: SIGKILL between two steps | goes on: EnvCrash |" in page
    assert "Left out: DI-engine SyncSubprocessEnvManager: no wheel." in page
