"""Timelines: what was noted is what they show, and what is none is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envmgr import make
from envmgr.cli import main
from envmgr.config import ManagerConfig
from envmgr.config_file import load_config
from envmgr.core.statistics import Moment, Notes
from envmgr.errors import ConfigError, UnreadableRunError
from envmgr.observing.timeline import ENVS, HOSTS, TRAINER, read_trace, totals_of, trace_of
from envmgr.wire.timeline import BATCH, NUMBERS, RESET, STEP, Done, HostLog, noted
from tests.unit.host_rigs import BlockRig as Rig


def test_a_ring_keeps_the_newest() -> None:
    ring, count = np.zeros((4, NUMBERS)), np.zeros(1, np.uint64)
    log = HostLog(ring, count)
    for k in range(3):
        log.note(STEP, k, float(k), k + 0.5, k)
    assert noted(ring, int(count[0])) == [Done(STEP, k, float(k), k + 0.5, k) for k in range(3)]
    again = HostLog(ring, count)  # of the host that comes next
    for k in range(3, 10):
        again.note(BATCH, -1, float(k), float(k))
    assert [one.began for one in noted(ring, int(count[0]))] == [6, 7, 8, 9]


def test_what_is_noted_without_a_word_passes_nothing_over() -> None:
    ring, count = np.zeros((4, NUMBERS)), np.zeros(1, np.uint64)
    HostLog(ring, count).note(RESET, 2, 1.0, 2.0)
    assert noted(ring, 1) == [Done(RESET, 2, 1.0, 2.0, 0)]


def test_what_no_host_in_order_writes_is_left_out() -> None:
    ring = np.array([[9, np.nan, 2, 0], [7, 1, 2, 0], [9, 3, 2, 0], [-8, 1, 2, 0], [9, 1, 2, 0]])
    assert noted(ring, 5) == [Done(STEP, 0, 1.0, 2.0, 0)]
    assert noted(ring, 10**15) == noted(ring, 5)


NOTES = Notes(
    env_num=2,
    calls=[("step", 10.0, 11.0), ("step", 12.0, 13.0), ("close", 14.0, 14.5)],
    phases=[(0, "construction", 1.0, 3.0), (1, "construction", 1.0, 4.0)],
    moments=[Moment(1, 0, "failed", 12.5), Moment(1, 1, "ready", 13.5)],
    done=[
        [
            Done(STEP, 0, 10.1, 10.2, 0),
            Done(STEP, 1, 10.2, 10.4, 0),
            Done(BATCH, -1, 10.0625, 10.5, 0),
            Done(STEP, 0, 12.1, 12.2, 0),
            Done(RESET, 0, 13.1, 13.2, 0),
        ]
    ],
)


def of(found: list[dict[str, Any]], name: str) -> list[tuple[int, int, float, float]]:
    return [
        (e["pid"], e["tid"], e["ts"] / 1e6, round(e.get("dur", 0.0) / 1e6, 9))
        for e in found
        if e["name"] == name
    ]


def test_everything_that_was_noted_has_its_place(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace_of(NOTES), allow_nan=False))
    found = read_trace(path)
    for event in found:
        assert event["ph"] in ("X", "M", "i")
        assert type(event["pid"]) is type(event["tid"]) is int
        if event["ph"] == "X":
            assert event["dur"] >= 0.0
            assert event["ts"] > 0.0
    assert of(found, "batch") == [(HOSTS, 0, 10.0625, 0.4375)]
    assert of(found, "reset") == [(ENVS, 0, 13.1, 0.1)]
    assert of(found, "failed") == [(ENVS, 1, 12.5, 0.0)]
    assert of(found, "repair") == [(ENVS, 1, 12.5, 1.0)]
    assert of(found, "close") == [(TRAINER, 0, 14.0, 0.5)]
    assert len(of(found, "step")) == 5
    assert of(found, "to be gathered") == [(ENVS, 0, 10.2, 0.8), (ENVS, 0, 12.2, 0.8)]
    assert of(found, "for the policy") == [(ENVS, 0, 11.0, 1.0)]
    names = {event["args"]["name"] for event in found if event["ph"] == "M"}
    assert names == {"trainer", "workers", "envs", "public calls", "worker 0", "env 0", "env 1"}
    totals = totals_of(found)
    assert totals["call step"] == (2, pytest.approx(2.0))
    assert totals["env step"] == (3, pytest.approx(0.4))
    # `envmgr trace` prints the category in front of the name: together they read as English.
    assert {key for key in totals if key.startswith("wait ")} == {
        "wait to be gathered",
        "wait for the policy",
    }


def test_of_a_sample_no_waits_are_made_up() -> None:
    steps = [Done(STEP, 0, 10.1, 10.2, 0), Done(STEP, 0, 12.1, 12.2, 7)]
    found = trace_of(NOTES._replace(done=[steps]))["traceEvents"]
    assert of(found, "to be gathered") == of(found, "for the policy") == []


ODD_EVENTS = (
    "3",
    "[3]",
    '[{"name": 1, "ph": "X"}]',
    '[{"name": "step", "ph": "X", "dur": "1"}]',
    f'[{{"name": "step", "ph": "X", "dur": 1{"0" * 400}}}]',
    '[{"name": "step", "ph": "X", "dur": 1e999}]',
    '[{"name": "step", "ph": "X", "dur": NaN}]',
    f'[{{"name": "step", "ph": "X", "cat": {"[" * 900}{"]" * 900}}}]',
)


def test_what_is_no_whole_timeline_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    assert main(["trace", str(path)]) == 2
    printed = capsys.readouterr()
    assert "cannot be read" in printed.err
    assert not printed.out
    text = json.dumps(trace_of(NOTES), separators=(",", ":"))
    n = len(trace_of(NOTES)["traceEvents"])
    path.write_text(text)
    assert main(["trace", str(path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["category", "event", "how", "often", "in", "all"]
    assert ["env", "reset", "1", "0.100", "s"] in [line.split() for line in lines]
    path.write_text(text[: text.index(',"displayTimeUnit"') - 3])
    with pytest.raises(UnreadableRunError, match=f"{n - 1} events can be read"):
        read_trace(str(path))
    for foreign in ("[]", '{"traceEvents": []}', '{"otherData": {"envmgr_trace": 9}}'):
        path.write_text(foreign)
        with pytest.raises(UnreadableRunError, match="no timeline that this envmgr"):
            read_trace(str(path))
    for odd in ODD_EVENTS:
        path.write_text(f'{{"otherData": {{"envmgr_trace": 1}}, "traceEvents": {odd}}}')
        with pytest.raises(UnreadableRunError, match="no list of events"):
            read_trace(str(path))
    path.write_text("[" * 100_000)
    with pytest.raises(UnreadableRunError, match=r"no whole timeline: .* 0 events can be read"):
        read_trace(str(path))
    path.write_bytes(b"\xff\xfe\x00")
    assert main(["trace", str(path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("n", [1, 3])
def test_hosts_note_batches_steps_and_resets(n: int) -> None:
    rig = Rig(n, measures=True, events=100)
    for _ in range(3):
        rig.post(*range(n))
        rig.run()
    found = noted(rig.block.events[0], int(rig.block.n_events[0]))
    what = [one.what for one in found]
    assert what.count(RESET) == n, "the first ones"
    assert {one.row for one in found if one.what == STEP} == set(range(n))
    assert what.count(BATCH) == (0 if n == 1 else 3)
    assert {one.row for one in found if one.what == BATCH} <= {-1}, "no env's"


def test_a_path_alone_will_do_but_not_any_from_a_file(tmp_path: Path) -> None:
    trace = ManagerConfig(trace="a.json").trace  # type: ignore[arg-type]
    assert trace is not None
    assert (trace.path, trace.events) == ("a.json", 200_000)
    for wrong in ({}, {"path": ""}, {"path": "a", "events": 1}, 3, ["a"]):
        with pytest.raises(ConfigError, match=r"manager\.trace"):
            ManagerConfig(trace=wrong)  # type: ignore[arg-type]
    for nameless in ({}, {"events": 5000}, {"path": ""}):
        with pytest.raises(ConfigError, match=r"manager\.trace names no file"):
            ManagerConfig(trace=nameless)  # type: ignore[arg-type]
    file = tmp_path / "c.yaml"
    for text in ("/etc/a.json", "../a.json", "{path: ../a.json}"):
        file.write_text(f"manager: {{trace: {text}}}\n")
        with pytest.raises(ConfigError, match=r"manager\.trace.*--trace"):
            load_config(file)


def test_a_folder_that_is_not_there_is_found_out_before_anything_is_launched(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"manager\.trace is .*no folder .*nowhere"):
        make("CartPole-v1", type="base", trace=str(tmp_path / "nowhere/t.json")).launch()
