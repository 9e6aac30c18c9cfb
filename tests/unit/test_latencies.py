"""How long steps and resets take: what is measured, what is read from it, and who is shown it."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from envmgr.cli import loggers
from envmgr.cli.loggers import Loggers, TensorBoardLogger
from envmgr.collect import CollectStatistics
from envmgr.errors import ConfigError, MissingDependencyError
from envmgr.observing.endpoint import Endpoint, families_of
from envmgr.observing.top_table import Top
from envmgr.wire.board import Board, BoardPlan
from envmgr.wire.latencies import (
    BOUNDS,
    MAX,
    NUMBERS,
    RESETS,
    STEPS,
    bucket_of,
    counts_of,
    note,
    quantiles,
    summary,
)
from envmgr.worker import block_steps
from tests.docs.blocks import ROOT
from tests.unit.host_rigs import BlockRig as Rig


def test_every_time_is_in_the_bucket_that_is_next_above_it() -> None:
    times = np.geomspace(1.01e-6, 250.0, 5000)
    for seconds in times.tolist():
        bucket = bucket_of(seconds)
        assert seconds < BOUNDS[bucket]
        assert BOUNDS[bucket] <= seconds * 1.1251
    assert [bucket_of(odd) for odd in (0.0, -1.0, 1e-9)] == [0, 0, 0]
    assert bucket_of(1e9) == len(BOUNDS) - 1


def test_quantiles_are_those_of_the_times() -> None:
    times = np.random.default_rng(1).lognormal(-8, 1, (2, 4000))
    rows = np.zeros((3, NUMBERS))
    for row, some in zip(rows, times, strict=False):
        for seconds in some.tolist():
            note(row, seconds)
    exact = np.quantile(times, (0.5, 0.9, 0.99), axis=1)
    found = quantiles(rows, (0.5, 0.9, 0.99))
    assert np.all(np.abs(found[:, :2] / exact - 1) < 0.13)
    shown = summary(rows)
    assert shown["count"] == [4000, 4000, 0]
    assert shown["mean"][:2] == pytest.approx(times.mean(1).tolist())
    assert shown["max"][:2] == times.max(1).tolist()
    assert [shown[name][2] for name in ("mean", "p50", "p90", "p99", "max")] == [None] * 5


def test_what_no_host_in_order_writes_is_passed_over() -> None:
    rows = np.zeros((1, NUMBERS))
    rows[0, :4] = [np.nan, np.inf, -5.0, 3.0]
    rows[0, MAX] = np.nan
    assert counts_of(rows).tolist() == [3.0]
    assert summary(rows)["p50"] == [0.0]


class TestTimedBlockStepper:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        clock = [100.0]
        monkeypatch.setattr(block_steps, "monotonic", lambda: clock[0])
        return clock

    @pytest.mark.parametrize("n", [1, 3])
    def test_slow_steps_are_all_measured(self, clock: list[float], n: int) -> None:
        rig = Rig(n, measures=True)

        def take_time(seconds: float) -> None:
            clock[0] += seconds

        for _ in range(20):
            for env_id, env in rig.envs.items():
                env.gives.append(lambda s=0.001 * (env_id + 1): take_time(s))
            rig.post(*range(n))
            rig.run()
        shown = summary(rig.block.latencies[STEPS])
        assert shown["count"] == [20.0] * n
        assert shown["mean"] == pytest.approx([0.001 * (i + 1) for i in range(n)])

    @pytest.mark.parametrize(("n", "most"), [(1, 0.03), (3, 0.009)])
    def test_of_fast_ones_a_sample_stands_for_all(
        self, clock: list[float], n: int, most: float
    ) -> None:
        rig = Rig(n, measures=True)

        def take_time() -> None:
            n_taken[0] += 1
            clock[0] += 2e-6

        def note_slowly(*given: Any) -> None:
            noted.append(1)
            original(*given)
            clock[0] += 3e-6  # does not make the steps slow ones

        n_taken, noted = [0], []
        original = block_steps.note
        block_steps.note = note_slowly
        try:
            for _ in range(2000):
                for env in rig.envs.values():
                    env.gives.append(take_time)
                rig.post(*range(n))
                rig.run()
        finally:
            block_steps.note = original
        assert n_taken == [2000 * n]
        assert len(noted) < 2000 * n * most, "most are passed over"
        counts = summary(rig.block.latencies[STEPS])["count"]
        assert all(abs(count - 2000) < 300 for count in counts if count is not None)

    def test_envs_step_in_their_order_whoever_is_measured(self, clock: list[float]) -> None:
        rig, began = Rig(4, measures=True), list[int]()

        def take_time(env_id: int) -> None:
            clock[0] += 4e-5 if env_id == 0 else 1e-5  # the first one finds cold caches
            began.append(env_id)

        for _ in range(3000):
            for env_id, env in rig.envs.items():
                env.gives.append(lambda i=env_id: take_time(i))
            rig.post(*range(4))
            rig.run()
        assert began == [0, 1, 2, 3] * 3000, "they may draw numbers from one generator"
        shown = summary(rig.block.latencies[STEPS])
        assert shown["mean"] == pytest.approx([4e-5, 1e-5, 1e-5, 1e-5])
        assert shown["count"] == pytest.approx([3000] * 4, abs=300)
        assert shown["count"][0] == shown["count"][3], "all of a batch, or none"

    def test_resets_are_measured(self, clock: list[float]) -> None:
        rig = Rig(2, measures=True)
        before = counts_of(rig.block.latencies[RESETS]).tolist()
        assert before == [1.0, 1.0], "the first ones"
        rig.step(SimpleNamespace)  # a callable that takes no time
        assert counts_of(rig.block.latencies[RESETS]).tolist() == before


def board(n: int = 3, *, measures: bool = True) -> Board:
    plan = BoardPlan(1, "subprocess", n, n, 2, NUMBERS if measures else 0)
    board = Board(bytearray(plan.nbytes), plan)
    board.states[...] = 2
    board.looked_at[0] = 50.0
    board.failed[...] = range(n)
    return board


def test_a_table_shows_rates_and_times() -> None:
    first, second = board(), board()
    for env_id, seconds in enumerate((0.001, 0.5, 2e-5)):
        note(first.latencies[STEPS, env_id], seconds)
        note(second.latencies[STEPS, env_id], seconds, 101.0)
    second.looked_at[0] = 52.0
    second.counters[1] = 600
    top = Top("slowest")
    assert "- steps/s" in top.lines(0, first, 50.0)[0]
    head, names, *rows = top.lines(0, second, 52.5)
    assert "300 steps/s" in head
    assert names.split()[:3] == ["env", "state", "at"]
    assert [row.split()[0] for row in rows[:2]] == ["1", "0"], "the slowest first"
    assert " 50 " in rows[0], "100 more steps in two seconds"
    assert "500.0 ms" in rows[0]
    top.sort_by_the_next()
    again, *_ = top.lines(0, second, 52.6)
    assert "300 steps/s" in again, "at a key press, too, before the next look"
    failing = Top("failures").lines(0, second, 52.5)
    assert failing[2].split()[0] == "2"
    text = "\n".join(Top().lines(0, board(measures=False), 50.0))
    assert "set manager.metrics" in text


class TestEndpoint:
    def test_shows_what_is_on_the_board(self) -> None:
        pytest.importorskip("prometheus_client")
        shown = board()
        note(shown.latencies[STEPS, 1], 0.001)
        shown.counters[3], shown.pids[0] = 7, os.getpid()
        families = {family.name: family for family in families_of(shown)}
        assert families["envmgr_failures"].samples[0].value == 7
        histogram = families["envmgr_step_seconds"].samples
        assert histogram[-1].value == pytest.approx(0.001)
        by_env = families["envmgr_env_step_seconds"].samples
        assert {sample.labels["env_id"] for sample in by_env} == {"1"}
        names = {sample.name for family in families.values() for sample in family.samples}
        dashboard = (ROOT / "docs" / "grafana.json").read_text()
        asked = set(re.findall(r"envmgr_[a-z_]+", dashboard))
        assert len(json.loads(dashboard)["panels"]) == 6
        assert asked <= names

    def test_what_is_not_installed_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(MissingDependencyError, match="prometheus_client"):
            Endpoint(1234, lambda: None)

    def test_a_port_that_is_taken_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*given: Any) -> Any:
            raise OSError(98, "Address already in use")

        fake = SimpleNamespace(
            CollectorRegistry=lambda: SimpleNamespace(register=lambda one: None),
            start_http_server=refuse,
        )
        monkeypatch.setitem(sys.modules, "prometheus_client", fake)
        with pytest.raises(ConfigError, match="1234, which cannot be listened on"):
            Endpoint(1234, lambda: None)

    def test_the_thread_that_answers_says_what_it_does(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        thread = threading.Thread(name="Thread-7 (serve_forever)")
        fake = SimpleNamespace(
            CollectorRegistry=lambda: SimpleNamespace(register=lambda one: None),
            start_http_server=lambda *given: (SimpleNamespace(server_port=1234), thread),
        )
        monkeypatch.setitem(sys.modules, "prometheus_client", fake)
        Endpoint(1234, lambda: None)
        assert thread.name == "envmgr-metrics"


class TestLoggers:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        clock = [100.0]
        monkeypatch.setattr(loggers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        return clock

    @pytest.fixture
    def collector(self) -> Any:
        return SimpleNamespace(statistics=CollectStatistics())

    @pytest.fixture
    def manager(self) -> Any:
        latency = {"step": summary(np.zeros((2, NUMBERS)))}
        return SimpleNamespace(stats=lambda: {"failures": 1, "latency": latency})

    def test_csv_has_a_line_every_ten_seconds_and_one_at_the_end(
        self, tmp_path: Path, clock: list[float], collector: Any, manager: Any
    ) -> None:
        writers = Loggers(["csv"], writes=True)
        writers.begin(tmp_path, {})
        for _ in range(25):
            clock[0] += 1.0
            collector.statistics.steps += 100
            collector.statistics.elapsed_s += 1.0
            writers.tick(collector, manager)
        writers.log(collector, manager)
        writers.end()
        writers.end()
        with open(tmp_path / "metrics.csv", encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
        assert [line["steps"] for line in lines] == ["1000", "2000", "2500"]
        assert [line["steps_per_s"] for line in lines] == ["100.0"] * 3
        assert lines[0]["failures"] == "1"
        assert lines[0]["step_p50_s"] == ""

    def test_the_others_get_what_is_known(
        self,
        tmp_path: Path,
        clock: list[float],
        collector: Any,
        manager: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        told: list[Any] = []
        writer = SimpleNamespace(
            add_scalar=lambda *given: told.append(given), close=lambda: told.append("closed")
        )
        run = SimpleNamespace(
            log=lambda figures, step: told.append((sorted(figures), step)),
            finish=lambda: told.append("finished"),
        )
        tensorboard = SimpleNamespace(SummaryWriter=lambda folder: writer)
        wandb = SimpleNamespace(init=lambda **how: told.append(how["mode"]) or run)
        monkeypatch.setitem(sys.modules, "tensorboardX", tensorboard)
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        monkeypatch.setattr(os, "environ", {})
        writers = Loggers(["tensorboard", "wandb"], writes=True)
        writers.begin(tmp_path, {"manager": {}})
        collector.statistics.steps = 5
        writers.log(collector, manager)
        writers.end()
        assert told[0] == "offline"
        assert os.environ == {"WANDB_ERROR_REPORTING": "false"}  # nothing is sent anywhere
        assert ("envmgr/failures", 1, 5) in told
        assert (["elapsed_s", "episodes", "failures", "steps"], 5) in told
        assert told[-2:] == ["finished", "closed"]

    def test_rewards_that_are_vectors_are_a_scalar_for_each_component(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: dict[str, float] = {}
        writer = SimpleNamespace(
            add_scalar=lambda tag, scalar, step: told.update({tag: scalar}), close=lambda: None
        )
        tensorboard = SimpleNamespace(SummaryWriter=lambda folder: writer)
        monkeypatch.setitem(sys.modules, "tensorboardX", tensorboard)
        logger = TensorBoardLogger()
        logger.open(tmp_path, {})
        logger.log({"steps": 5, "return_mean_of_last_100": [1.5, None, -2.0], "length_mean": None})
        name = "envmgr/return_mean_of_last_100"
        assert told == {f"{name}/0": 1.5, f"{name}/2": -2.0}

    def test_the_first_rate_of_a_resumed_run_is_since_it_goes_on(
        self, tmp_path: Path, clock: list[float], collector: Any, manager: Any
    ) -> None:
        statistics = collector.statistics
        statistics.elapsed_s, statistics.steps = 36_000.0, 1_000_000
        writers = Loggers(["csv"], writes=True)
        writers.begin(tmp_path, {}, before=statistics)
        statistics.elapsed_s, statistics.steps = 36_010.0, 1_000_050
        writers.log(collector, manager)
        writers.end()
        assert ",5.0," in (tmp_path / "metrics.csv").read_text().splitlines()[-1]

    def test_what_cannot_be_had_is_refused_before_anything_runs(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "wandb", None)
        monkeypatch.setattr(os, "environ", {})
        with pytest.raises(MissingDependencyError, match="pip install wandb"):
            Loggers(["wandb"], writes=True)
        with pytest.raises(ConfigError, match="nothing is to be written"):
            Loggers(["csv"], writes=False)
        assert not Loggers([], writes=False).are_wanted
