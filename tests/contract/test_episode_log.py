"""`episode_log` with real managers: batches, arrays, leases, and both beside each other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmgr import create_env_manager
from envmgr.cli import main
from envmgr.errors import EnvFailure
from tests.contract.leased import AT_GATE, DIE, END, RAISE, Told

ENDLESS = {"max_failures": 10_000, "max_failures_total": 10_000, "retry_waiting_time": 0.0}
KINDS = ({"type": "base"}, {"type": "subprocess"}, {"type": "subprocess", "num_workers": 1})


def lines_of(path: Path, what: str = "episode") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in found if line["what"] == what]


@pytest.mark.parametrize("cfg", KINDS, ids=lambda cfg: "-".join(map(str, cfg.values())))
def test_every_episode_and_failure_has_its_line(cfg: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    plan = ((1, RAISE), (2, 1), (END, 3), (4, END), (5, 6))
    expected: list[tuple[Any, ...]] = []
    sums, lengths = [0.0, 0.0], [0, 0]
    with create_env_manager({**cfg, **ENDLESS, "episode_log": str(log)}, [Told] * 2) as manager:
        for k, actions in enumerate((*plan, *plan)):
            while len(manager.ready_obs) < 2:
                pass
            if k % 2:
                manager.send_arrays([0, 1], np.array(actions))
                manager.recv_arrays(2)
            else:
                manager.step(dict(enumerate(actions)))
            for env_id, action in enumerate(actions):
                sums[env_id] += action
                lengths[env_id] += 1
                if action in (END, RAISE):
                    status = "completed" if action == END else "failed"
                    total = sums[env_id] if action == END else None
                    expected.append((env_id, None, status, total, lengths[env_id]))
                    sums[env_id], lengths[env_id] = 0.0, 0
            assert len(lines_of(log)) == len(expected)  # readable while it grows
        with manager.lease() as env:
            env.reset()
            env.step(3)
            env.step(END)
            env.reset()
            env.step(RAISE)
            expected.append((env.env_id, 1, "completed", END + 3.0, 2))
            expected.append((env.env_id, 2, "failed", None, 1))
            env.reset()
            env.step(1)  # and left: nobody knows how it would have ended
    keys = ("env_id", "attempt", "outcome", "return", "length")
    assert [tuple(line[key] for key in keys) for line in lines_of(log)] == expected
    failures = lines_of(log, "failure")
    assert Counter(line["raised"] for line in failures) == {"RuntimeError": 3}
    assert {line["generation"] for line in failures} == {0}


def test_deaths_are_unresolved_and_say_of_which_generation(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    cfg = {"type": "subprocess", **ENDLESS, "episode_log": str(log)}
    with create_env_manager(cfg, [Told]) as manager:
        for _ in range(2):
            manager.step({0: 1})
            manager.step({0: DIE})
            assert manager.ready_obs
        with manager.lease() as env:
            env.reset()
            env.step(DIE)
            env.reset()
            env.step(END)
    keys = ("generation", "outcome", "cause", "length")
    assert [tuple(line[key] for key in keys) for line in lines_of(log)] == [
        (0, "unresolved", "EnvCrash", 2),
        (1, "unresolved", "EnvCrash", 2),
        (2, "unresolved", "EnvCrash", 1),
        (3, "completed", None, 1),
    ]
    failures = lines_of(log, "failure")
    assert [line["generation"] for line in failures] == [0, 1, 2]
    assert {line["exit_status"] for line in failures} == {7}


def test_a_cancelled_step_is_unresolved_and_what_arrivals_keep_is_counted_once(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log.jsonl"
    gate = str(tmp_path / "gate")  # an answer that came before the step is cancelled would count
    os.mkfifo(gate)
    opened: list[int] = []
    cfg = {"type": "subprocess", **ENDLESS, "episode_log": str(log)}

    async def run() -> None:
        async with create_env_manager(cfg, [Told] * 3) as manager:
            manager.send({0: END, 1: END, 2: END})
            while manager.stats()["outstanding"]:
                async with contextlib.aclosing(manager.arrivals()) as arrivals:
                    async for _ in arrivals:
                        break  # the others come again
            await manager.aready_obs()
            async with manager.lease() as env:
                await env.reset(options={"gate": gate})
                step = asyncio.ensure_future(env.step(AT_GATE))
                await asyncio.sleep(0)
                step.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await step
                with pytest.raises(EnvFailure):
                    raise env.episode_outcome.cause
                opened.append(os.open(gate, os.O_RDWR))
                await env.reset()

    asyncio.run(run())
    os.close(opened[0])
    *of_batches, cancelled = lines_of(log)
    found = sorted((line["env_id"], line["return"], line["length"]) for line in of_batches)
    assert found == [(i, float(END), 1) for i in range(3)]
    assert (cancelled["outcome"], cancelled["cause"]) == ("unresolved", "EnvCallAbandoned")


def test_the_report_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    cfg = {"type": "base", **ENDLESS, "episode_log": str(log)}
    with create_env_manager(cfg, [Told] * 2) as manager:
        for action in (1, END, RAISE, END):
            manager.step(dict.fromkeys(manager.ready_obs, action))
    with log.open("a") as file:
        file.write('{"envmgr_log":1,"what":')  # of a program that was killed in it
    assert main(["report", str(log)]) == 0
    figures = json.loads((tmp_path / "log.json").read_text())
    about = figures["summary"]
    assert (about["episodes"], about["abnormal_episodes"], about["failures"]) == (4, 2, 2)
    assert about["outcomes"] == {"completed": 4, "failed": 2}
    assert about["return"]["mean"] == END + 0.5
    assert figures["failures"]["by_kind"] == {"EnvRaised": 2}
    assert "RuntimeError" in figures["failures"]["shown"][0]["text"]
    assert "1 of 9 lines of log.jsonl cannot be read" in figures["unread"][0]
    page = (tmp_path / "log.html").read_text()
    assert "completed" in page
    assert "RuntimeError" in page
    assert main(["report", str(log)]) == 0, "it may be made anew"
    capsys.readouterr()


@pytest.mark.parametrize("name", ["exp.json", "exp.html"])
def test_the_report_of_a_log_replaces_nothing_that_is_no_report(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, mine = tmp_path / "exp.jsonl", tmp_path / name
    with create_env_manager({"type": "base", "episode_log": str(log)}, [Told]) as manager:
        manager.step({0: END})
    mine.write_text('{"learning_rate": 1}')
    assert main(["report", str(log)]) == 2
    assert (
        f"would replace '{mine}', which `envmgr report` has not written" in capsys.readouterr().err
    )
    assert mine.read_text() == '{"learning_rate": 1}'
    assert main(["report", str(log), "--out", str(tmp_path / "page.html")]) == 0
