"""The saboteur: when it hurts whom, and how it pairs injuries with what the manager saw."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from envmgr.core.statistics import Moment, Statistics
from envmgr.errors import ConfigError
from envmgr.testing import Saboteur, chaos
from envmgr.testing.chaos import send_signal, spread
from envmgr.testing.injuries import KINDS, signal_of
from tests.fakes import FakeClock


class FakeManager:
    """Four envs on two workers."""

    def __init__(self) -> None:
        self.workers = [{"pid": 101, "env_ids": [0, 1]}, {"pid": 102, "env_ids": [2, 3]}]
        self.generations = [0, 0, 0, 0]
        self.moments: list[Moment] = []

    def stats(self) -> dict[str, Any]:
        return {
            "workers": list(self.workers),
            "generations": list(self.generations),
            "moments": list(self.moments),
        }


class Setting:
    def __init__(self, **options: Any) -> None:
        self.clock = FakeClock()
        self.manager = FakeManager()
        self.sent: list[tuple[int, int]] = []
        self.alive = True
        options = {"rate_hz": 10.0, "kinds": ("kill",), "seed": 0, **options}
        self.saboteur = Saboteur(self.manager, clock=self.clock, send=self.send, **options)

    def send(self, pid: int, number: int) -> bool:
        if self.alive:
            self.sent.append((pid, number))
        return self.alive

    def note(self, event: str, env_id: int, generation: int) -> None:
        self.manager.moments.append(Moment(env_id, generation, event, self.clock()))

    def replace(self, pid: int, new_pid: int) -> None:
        for worker in self.manager.workers:
            if worker["pid"] == pid:
                worker["pid"] = new_pid
                for i in worker["env_ids"]:  # type: ignore[attr-defined]
                    self.manager.generations[i] += 1


def test_injuries_come_at_the_rate_and_are_not_made_up_for() -> None:
    setting = Setting()
    assert setting.saboteur.tick() is None
    setting.clock.advance(0.1)
    assert setting.saboteur.tick() is not None
    assert setting.saboteur.tick() is None
    setting.clock.advance(5.0)
    assert setting.saboteur.tick() is not None
    assert setting.saboteur.tick() is None  # no worker is left, and no burst follows the pause
    assert len(setting.sent) == 2


def test_the_same_seed_draws_the_same() -> None:
    def drawn(seed: int) -> list[tuple[str, int]]:
        setting = Setting(kinds=KINDS, seed=seed)
        for pid in range(103, 123):
            injury = setting.saboteur.injure()
            assert injury is not None
            setting.replace(injury.pid, pid)
        return [(injury.kind, injury.pid) for injury in setting.saboteur.injuries]

    assert drawn(1) == drawn(1) != drawn(2)
    assert {kind for kind, _ in drawn(1)} == set(KINDS)


def test_a_worker_is_hurt_once_and_then_its_replacement() -> None:
    setting = Setting()
    assert setting.saboteur.injure(env_id=0) is not None
    assert setting.saboteur.injure(env_id=1) is None
    assert setting.saboteur.n_skipped == 1
    setting.replace(101, 103)
    injury = setting.saboteur.injure(env_id=1)
    assert injury is not None
    assert (injury.pid, injury.env_ids, injury.generations) == (103, (0, 1), (1, 1))


def test_the_dead_are_not_hurt() -> None:
    setting = Setting()
    setting.alive = False
    assert setting.saboteur.injure() is None
    assert setting.saboteur.injuries == []


def test_an_injury_is_paired_with_its_detection_and_recovery() -> None:
    setting = Setting()
    saboteur, clock = setting.saboteur, setting.clock
    setting.note("failed", 0, 0)  # before it: another's
    setting.note("ready", 0, 0)
    clock.advance(1.0)
    injury = saboteur.injure("kill", env_id=0)
    assert injury is not None
    clock.advance(0.01)
    setting.note("failed", 2, 0)  # of another worker
    setting.note("failed", 0, 0)
    setting.note("failed", 1, 0)
    saboteur.collect()
    assert injury.detection_s == pytest.approx(0.01)
    assert not saboteur.is_settled
    clock.advance(0.01)
    setting.note("ready", 0, 1)
    saboteur.collect()
    assert injury.recovery_s is None
    clock.advance(0.01)
    setting.note("ready", 1, 1)
    saboteur.collect()
    assert injury.recovery_s == pytest.approx(0.03)
    assert saboteur.is_settled


def test_moments_are_read_once_though_the_manager_forgets_old_ones() -> None:
    setting = Setting()
    injury = setting.saboteur.injure("kill", env_id=0)
    assert injury is not None
    setting.note("failed", 0, 0)
    setting.saboteur.collect()
    setting.manager.moments.clear()
    setting.clock.advance(1.0)
    setting.note("ready", 0, 1)
    setting.saboteur.collect()
    assert injury.recovery_s == pytest.approx(1.0)


def test_a_replacement_that_is_hurt_disturbs_the_recovery() -> None:
    setting = Setting()
    first = setting.saboteur.injure(env_id=0)
    setting.note("failed", 0, 0)
    setting.replace(101, 103)
    second = setting.saboteur.injure(env_id=0)
    assert first is not None
    assert second is not None
    assert first.disturbed
    setting.clock.advance(0.5)
    setting.note("failed", 0, 1)
    setting.clock.advance(0.5)
    setting.note("ready", 0, 2)
    setting.saboteur.collect()
    assert (first.recovery_s, second.recovery_s) == (1.0, 1.0)
    figures = setting.saboteur.summary()["all"]
    assert (figures["injuries"], figures["detected"], figures["recovered"]) == (2, 2, 2)
    assert figures["recovery_s"] == {"median": 1.0, "p99": 1.0, "max": 1.0}
    assert figures["detection_s"]["max"] == pytest.approx(0.5)


def test_workers_that_start_are_only_hurt_in_ways_that_end_them_at_once() -> None:
    setting = Setting()
    for env_id in (0, 1):
        setting.note("failed", env_id, 0)
    assert setting.saboteur.injure("stop", env_id=0) is None
    assert setting.saboteur.injure("stop", env_id=2) is not None
    assert setting.saboteur.injure("kill", env_id=0) is not None
    setting.replace(101, 103)
    for env_id in (0, 1):
        setting.note("ready", env_id, 1)
    assert setting.saboteur.injure("stop", env_id=0) is not None


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(ConfigError, match="no injuries of kind 'tickle'"):
        Setting(kinds=("kill", "tickle"))
    with pytest.raises(ConfigError, match="none given"):
        Setting(kinds=())
    with pytest.raises(ConfigError, match="rate_hz is 0"):
        Setting(rate_hz=0.0)


def test_an_interrupt_at_the_beginning_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else would: `with` does not call `__exit__` then."""

    def start_and_strike(thread: threading.Thread) -> None:
        thread.start()
        raise KeyboardInterrupt

    monkeypatch.setattr(chaos, "start_thread", start_and_strike)
    saboteur = Setting().saboteur
    with pytest.raises(KeyboardInterrupt), saboteur:
        pass
    assert saboteur._thread is not None
    saboteur._thread.join()


def test_each_kind_has_a_signal_of_its_own() -> None:
    assert len({signal_of(kind) for kind in KINDS}) == len(KINDS)
    assert signal_of("kill") == signal.SIGKILL


def test_strangers_are_never_touched() -> None:
    assert not send_signal(1, 0)
    assert not send_signal(os.getppid(), 0)
    assert send_signal(os.getpid(), 0)


def test_spread_is_by_nearest_rank() -> None:
    assert spread([]) == {"median": None, "p99": None, "max": None}
    assert spread([None, 3.0, 1.0, 2.0]) == {"median": 2.0, "p99": 3.0, "max": 3.0}
    assert spread(map(float, range(1, 201)))["p99"] == 198.0


def test_statistics_note_when_envs_that_failed_are_ready_again() -> None:
    statistics = Statistics()
    statistics.note_ready(0, 0, 1.0)  # it had not failed
    statistics.note_failed(0, 0, 2.0)
    statistics.note_ready(0, 1, 3.0)
    statistics.note_ready(0, 1, 4.0)
    assert list(statistics.moments) == [Moment(0, 0, "failed", 2.0), Moment(0, 1, "ready", 3.0)]
