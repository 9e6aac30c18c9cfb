"""The measurements of `make soak`, in small: what they count has to be right, times may be long."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.leak_guard import LeakGuard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")


@pytest.mark.parametrize("cfg", [{}, {"num_workers": 4}], ids=["a-worker-each", "4-workers"])
def test_nothing_is_lost_repeated_or_swapped_while_workers_are_hurt(
    soak: Callable[[str], Any], cfg: dict[str, Any]
) -> None:
    for figure in soak("figures.accounting").run("in small", 3_000, cfg):
        assert figure.met, figure


@pytest.mark.parametrize("context", ["server", "fork"])
def test_every_death_is_seen_and_recovered_from(soak: Callable[[str], Any], context: str) -> None:
    deaths = soak("figures.deaths")
    setup = deaths.Setup({"type": "async_subprocess", "context": context}, every_s=0.1)
    injuries = deaths.run(setup, 10)
    assert len(injuries) >= 10
    for injury in injuries:
        assert injury.failed_s is not None, injury
        assert injury.ready_s is not None, injury


@pytest.mark.parametrize("context", ["server", "fork"])
def test_renewals_leave_nothing_behind(soak: Callable[[str], Any], context: str) -> None:
    figure = soak("figures.leaks").grown(context, 15, 3, quick=True)
    assert figure.met, figure


def test_a_crash_loop_keeps_to_its_budget(soak: Callable[[str], Any]) -> None:
    figure = soak("figures.crash_loop").budget("reset", "in each reset")
    assert figure.met, figure


@pytest.mark.torch  # some are of V2 kinds
@pytest.mark.parametrize("seed", [1, 2])
def test_launches_end_whatever_fails_in_them(soak: Callable[[str], Any], seed: int) -> None:
    figure = soak("figures.launches").real_ones(6, seed)
    assert figure.met, figure


@pytest.mark.parametrize("way", ["close_twice", "_close_in_threads", "_close_renewing"])
def test_close_leaves_no_hung_worker(soak: Callable[[str], Any], way: str) -> None:
    close = soak("figures.close")
    figure = close.figure("6 hung workers", 6, getattr(close, way))
    assert "0 workers left" in figure.measured


@pytest.mark.parametrize("context", ["server", "fork"])
def test_nothing_outlives_a_trainer_killed_at_a_random_point(
    soak: Callable[[str], Any], context: str
) -> None:
    orphans = soak("figures.orphans")
    for launched in (False, True):
        found, gone_s = orphans.kill_one(
            LeakGuard(), context, random.uniform(0.0, 1.0), launched=launched
        )
        assert gone_s < orphans.PATIENCE_S
    assert found > orphans.ENV_NUM


@pytest.mark.parametrize("context", ["server", "fork"])
def test_daemons_of_envs_do_not_outlive_a_trainer_that_is_killed(
    soak: Callable[[str], Any], context: str
) -> None:
    found, took_s = soak("figures.orphans").end_daemons(context, 3, "trainer")
    assert found == 6
    assert max(took_s) < math.inf


def test_many_envs_with_few_fds(soak: Callable[[str], Any]) -> None:
    figure = soak("figures.modes").many_envs(24, 160)
    assert figure.met, figure
