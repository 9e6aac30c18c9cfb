"""The model, the plan, the search and the written config of `envmgr tune`, without processes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from envmgr.config.yaml_text import load_yaml
from envmgr.tuning.measuring import stills_of
from envmgr.tuning.model import (
    Anchors,
    EnvFigures,
    Machine,
    expected_rate,
    fitted_machine,
)
from envmgr.tuning.plan import candidates, entrants, sizes_of
from envmgr.tuning.search import Measured, compare, is_right, search
from envmgr.tuning.settings import Setting, changes_of, setting_of
from envmgr.tuning.task import window_of
from envmgr.tuning.yaml_edit import edited

MACHINE = Machine(cores=2, batch_s=20e-6, env_s=2e-6, step_s=3e-6, wake_s=30e-6)
NULL = EnvFigures((0.0,))
CARTPOLE = EnvFigures((5e-6,), 0.0, (10e-6,), 0.0, 22)
BUSY = EnvFigures((100e-6,))
UNEVEN = EnvFigures([0.002 * math.exp(random.Random(k).gauss(0, 1)) for k in range(300)], 1.0)
SLOW_RESET = EnvFigures((1e-3,), 1.0, (0.2,), 1.0, 100)
SYNC, ASYNC = Setting("subprocess"), Setting("async_subprocess", None, 4)


def rate(setting: Setting, env: EnvFigures = NULL, n: int = 8, machine: Machine = MACHINE) -> float:
    return expected_rate(setting, n, env, machine)


# -- the model ------------------------------------------------------------------------------------


def test_one_env_in_one_worker_is_a_sum() -> None:
    alone = rate(SYNC, BUSY, 1)
    assert 1 / alone == pytest.approx(20e-6 + 2e-6 + 3e-6 + 100e-6)
    many = Machine(cores=1, batch_s=20e-6, env_s=2e-6, step_s=3e-6, wake_s=30e-6)
    assert 1 / rate(SYNC, BUSY, 1, many) == pytest.approx(155e-6)  # nobody spins on one core
    assert 1 / rate(Setting("base"), BUSY, 4) == pytest.approx(100e-6 + 2e-6 + 5e-6)


def test_cheap_envs_share_workers_and_waiting_ones_do_not() -> None:
    shared = Setting("subprocess", 2)
    assert rate(shared, CARTPOLE, 64) > 1.5 * rate(SYNC, CARTPOLE, 64)
    assert rate(shared, BUSY) == pytest.approx(2 / 103e-6, rel=0.3)
    waiting = EnvFigures((10e-3,), 1.0)
    assert rate(SYNC, waiting) > 3 * rate(shared, waiting)
    assert rate(SYNC, waiting) == pytest.approx(800, rel=0.1)


def test_uneven_envs_gain_by_async_and_slow_resets_by_spares() -> None:
    assert rate(ASYNC, UNEVEN) > 1.5 * rate(SYNC, UNEVEN)
    few = Setting("subprocess", None, math.inf, 4)
    assert rate(few, SLOW_RESET) > 1.2 * rate(SYNC, SLOW_RESET)
    assert rate(Setting("subprocess", 2), SLOW_RESET) < rate(SYNC, SLOW_RESET)
    assert rate(few) == pytest.approx(rate(SYNC), rel=0.05)


def test_a_trainer_is_not_woken_for_each_cheap_step_of_a_shared_worker() -> None:
    some, everyone = Setting("async_subprocess", 1, 2), Setting("subprocess", 1)
    assert rate(some) == pytest.approx(rate(everyone), rel=0.05)
    slow = EnvFigures((210e-6,))
    assert rate(some, slow) > 1.01 * rate(everyone, slow)


def test_the_model_says_the_same_twice() -> None:
    assert rate(ASYNC, UNEVEN, 16) == rate(ASYNC, UNEVEN, 16)


@pytest.mark.parametrize("n", [1, 3, 64])
@pytest.mark.parametrize("setting", [SYNC, Setting("async_subprocess", 2, 2), Setting("base")])
@pytest.mark.parametrize("env", [NULL, UNEVEN, SLOW_RESET])
def test_every_setting_has_a_rate(n: int, setting: Setting, env: EnvFigures) -> None:
    assert 0 < rate(setting, env, n) < math.inf


def test_the_machine_is_fitted_to_what_was_measured() -> None:
    def measured(setting: Setting, n: int) -> float:
        return expected_rate(setting, n, NULL, MACHINE)

    each, spread = measured(SYNC, 8), measured(Setting("subprocess", 2), 8)
    anchors = Anchors(8, measured(SYNC, 1), measured(Setting("subprocess", 1), 8), each, spread)
    assert [still.env_num for still in stills_of("subprocess", 8, 2)] == [1, 8, 8, 8]
    fitted = fitted_machine(anchors, 2, "subprocess")
    assert fitted.batch_s == pytest.approx(MACHINE.batch_s, rel=0.05)
    assert fitted.env_s + fitted.step_s == pytest.approx(5e-6, rel=0.05)
    assert expected_rate(SYNC, 8, NULL, fitted) == pytest.approx(each, rel=0.05)
    cheaper = replace(anchors, each=1.5 * each)
    fitted = fitted_machine(cheaper, 2, "subprocess")  # a worker costs less where there are many
    assert expected_rate(SYNC, 8, NULL, fitted) == pytest.approx(1.5 * each, rel=0.05)
    assert expected_rate(Setting("subprocess", 2), 8, NULL, fitted) == pytest.approx(spread)
    assert fitted.wakes_s(2) > fitted.wakes_s(4) > fitted.wakes_s(8) == fitted.wakes_s(24)
    assert fitted_machine(Anchors(1, 1e4, 1e4, 1e4), 2, "subprocess").batch_s > 0
    noise = Anchors(8, 1e5, 1e4, 1e6, 1e7)  # whatever a busy machine may give
    assert rate(SYNC, machine=fitted_machine(noise, 2, "subprocess")) > 0


# -- the plan -------------------------------------------------------------------------------------


def test_the_plan_holds_the_present_setting_and_every_sort() -> None:
    found = candidates(SYNC, 8, 2, SLOW_RESET)
    assert found[0] == SYNC
    assert len(found) == len(set(found))
    assert {setting.kind for setting in found} == {"subprocess", "async_subprocess"}
    assert {s.num_workers for s in found} == {1, 2, 4, None}
    assert any(s.spare_env_num for s in found)
    assert all(s.num_workers is None for s in found if s.spare_env_num)
    assert not any(s.spare_env_num for s in candidates(SYNC, 8, 2, NULL))
    v2 = candidates(Setting("subprocess_v2"), 8, 2, NULL)
    assert {s.kind for s in v2} == {"subprocess_v2", "async_subprocess_v2"}
    assert candidates(SYNC, 1, 2, NULL) == [SYNC]
    assert candidates(SYNC, 4, 2, NULL, ["base"]) == [SYNC, Setting("base")]


def test_what_is_measured_has_the_best_and_one_of_each_sort() -> None:
    settings = candidates(SYNC, 4, 2, SLOW_RESET)
    chosen = entrants(settings, lambda s: rate(s, SLOW_RESET, 4), 8)
    assert chosen[0].setting == SYNC
    assert len(chosen) == 8
    best = max(settings, key=lambda s: rate(s, SLOW_RESET, 4))
    assert best in [c.setting for c in chosen]
    assert {c.setting.kind for c in chosen} == {"subprocess", "async_subprocess"}
    assert {bool(c.setting.spare_env_num) for c in chosen} == {True, False}
    few = entrants(candidates(SYNC, 8, 2, BUSY), lambda s: rate(s, BUSY), 5)
    sorts = {(c.setting.kind, c.setting.num_workers is None) for c in few}
    assert len(sorts) == 4  # sync and async, shared or not, however few are measured
    unknown = entrants([SYNC, Setting("thread")], lambda s: None, 2)
    assert [c.expected for c in unknown] == [None, None]


@pytest.mark.parametrize("n", range(1, 12))
def test_rounds_halve(n: int) -> None:
    sizes = sizes_of(n)
    assert sizes[0] == n
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == min(n, 3)


def test_windows_see_several_episodes_where_resets_take_long() -> None:
    for env in (NULL, CARTPOLE, UNEVEN, SLOW_RESET):
        for left_s in (0.4, 4.0, 40.0):
            window_s, lead_s = window_of(left_s, env)
            assert 0 < lead_s < window_s
            assert window_s + lead_s <= left_s / 18
    assert sum(window_of(16.0, SLOW_RESET)) > 4 * sum(window_of(16.0, NULL))


# -- the search -----------------------------------------------------------------------------------


class Race:
    """A search among settings whose speeds are known, on a machine that is now fast and now slow.

    Args:
        speeds: by setting.
        noise: by how much the k-th measurement is off.
        launch_s: how long it takes to launch a setting.
    """

    def __init__(
        self,
        speeds: dict[Setting, float],
        noise: Callable[[int], float] = lambda k: 1.0,
        launch_s: float = 0.3,
    ) -> None:
        self._speeds, self._noise, self._launch_s = speeds, noise, launch_s
        self.launched: list[Setting] = []
        self.dropped: list[Setting] = []
        self.n, self.now_s = 0, 0.0

    def measure(self, setting: Setting) -> float:
        if setting not in self.launched:
            self.launched.append(setting)
            self.now_s += self._launch_s
        self.n += 1
        self.now_s += 0.13
        return self._speeds.get(setting, 1.0) * self._noise(self.n)

    def run(self, seconds: float = 30.0, beside: Sequence[Any] = ()) -> Setting:
        best, everyone, aside = search(
            [*self._speeds],
            self.measure,
            seconds,
            lambda: self.now_s,
            beside=beside,
            dropped=self.dropped.append,
            cost=lambda s: (s.num_workers or 99,),
        )
        assert [one.setting for one in everyone] == [*self._speeds]
        assert [one.setting for one in aside] == [*beside]
        return best.setting


def race(speeds: dict[Setting, float], noise: Callable[[int], float]) -> Setting:
    return Race(speeds, noise).run()


@pytest.mark.parametrize("sigma", [0.05, 0.15])
def test_on_a_machine_that_others_use_the_choice_is_within_10_percent_of_the_best(
    sigma: float,
) -> None:
    draws, good = random.Random(9), []
    for _ in range(100):
        settings = [Setting("subprocess", n) for n in range(1, 17)]
        speeds = {setting: math.exp(draws.gauss(0, 0.3)) for setting in settings}
        pace = [0.0]

        def noise(k: int, pace: list[float] = pace) -> float:
            pace[0] = 0.98 * pace[0] + draws.gauss(0, 0.05)  # it changes, and for a while
            hit = 0.5 if draws.random() < 0.05 else 1.0
            return hit * math.exp(pace[0] + draws.gauss(0, sigma))

        good.append(speeds[race(speeds, noise)] >= 0.9 * max(speeds.values()))
    assert sum(good) >= 95


def test_it_takes_the_time_that_it_has() -> None:
    speeds = {Setting("subprocess", n): 100.0 + n for n in range(1, 17)}
    quick = Race(speeds)
    quick.run(30.0)
    assert 28.0 < quick.now_s < 32.0
    assert len(quick.launched) == 16
    busy = Race(speeds, launch_s=4.0)
    busy.run(30.0)
    assert len(busy.launched) == 3
    assert busy.now_s < 32.0, "launching all would take twice as long"
    assert busy.n > 100, "all else of the time is spent on these"
    hopeless = Race(speeds, launch_s=60.0)
    hopeless.run(30.0)
    assert len(hopeless.launched) == 3, "or nothing can be compared"
    assert hopeless.n == 3 * 2, "as they were launched, and one lap"


def test_what_is_measured_beside_them_is_dropped_after_the_first_round() -> None:
    speeds = {Setting("subprocess", n): 100.0 + 20 * n for n in range(1, 9)}
    beside = (Setting("base"),)
    its = Race(speeds)
    assert its.run(beside=beside) == Setting("subprocess", 8)
    assert its.dropped.count(beside[0]) == 1
    assert its.launched.index(beside[0]) == 8


def test_a_machine_that_gets_slower_does_not_decide() -> None:
    speeds = {Setting("subprocess", n): 100.0 + 10 * n for n in range(1, 9)}
    assert race(speeds, lambda k: 1.0) == Setting("subprocess", 8)
    assert race(speeds, lambda k: 0.995**k) == Setting("subprocess", 8)
    draws = random.Random(3)
    noisy = race(speeds, lambda k: draws.uniform(0.93, 1.0))
    assert speeds[noisy] >= 160


def test_what_is_as_good_is_not_changed() -> None:
    assert race({SYNC: 100.0, Setting("subprocess", 2): 101.0}, lambda k: 1.0) == SYNC
    two, four = Setting("subprocess", 2), Setting("subprocess", 4)
    assert race({SYNC: 50.0, four: 101.0, two: 100.0}, lambda k: 1.0) == two
    assert race({SYNC: 100.0}, lambda k: 1.0) == SYNC


def test_what_cannot_be_run_loses() -> None:
    broken = Setting("subprocess", 2)
    assert race({SYNC: 1.0, broken: 0.0}, lambda k: 1.0) == SYNC
    assert race({broken: 0.0, SYNC: 1.0}, lambda k: 1.0) == SYNC
    assert race({broken: 0.0, SYNC: 0.0}, lambda k: 1.0) == broken


def test_laps_in_which_the_machine_was_slow_count_as_the_others() -> None:
    one, two = Measured(SYNC, {0: 100.0, 1: 10.0, 2: 100.0}), Measured(ASYNC, {0: 120.0, 1: 12.0})
    late = Measured(Setting("base"), {2: 150.0})
    compare([one, two, late])
    assert (one.ratio, two.ratio, late.ratio) == pytest.approx((1.0, 1.2, 1.5), rel=0.01)
    assert one.spread == pytest.approx(0.0, abs=0.01)
    assert (one.rate, late.rate) == (100.0, 150.0)


def test_those_that_lose_are_dropped_at_once() -> None:
    settings = [Setting("subprocess", n) for n in range(1, 9)]
    its = Race({setting: float(setting.num_workers or 0) for setting in settings})
    its.run()
    assert len(its.dropped) == 5
    assert settings[0] not in its.dropped
    assert settings[-1] not in its.dropped


def test_a_model_is_right_within_15_percent() -> None:
    assert is_right(115.0, 100.0)
    assert not is_right(116.0, 100.0)
    assert is_right(None, 100.0) is None
    assert is_right(100.0, 0.0) is None


# -- settings and configs -------------------------------------------------------------------------


def config(**keys: Any) -> dict[str, Any]:
    plain = {"type": "subprocess", "num_workers": None, "wait_num": math.inf, "spare_env_num": 0}
    return {**plain, "env_num": 8, **keys}


def test_a_setting_is_read_from_a_config_and_changes_it() -> None:
    assert setting_of(config()) == setting_of(config(num_workers=8)) == SYNC
    assert setting_of(config(num_workers="auto")) == SYNC
    two = Setting("subprocess", 2)
    assert changes_of(two, SYNC, config()) == {"num_workers": 2}
    assert changes_of(SYNC, SYNC, config(num_workers=8)) == {}
    assert changes_of(two, two, config(num_workers="auto")) == {}
    assert changes_of(SYNC, two, config(num_workers="auto")) == {"num_workers": None}
    assert changes_of(ASYNC, SYNC, config()) == {"type": "async_subprocess", "wait_num": 4.0}
    assert changes_of(ASYNC, SYNC, config(num_workers=8)).keys() == {"type", "wait_num"}
    assert str(two) == "subprocess, 2 workers"
    with_spare = Setting("async_subprocess", None, 4, 1)
    assert str(with_spare) == "async_subprocess, a worker each, wait_num 4, 1 spare"


TEXT = """\
# what it is for
env: {id: CartPole-v1}   # the env

manager:
  type: subprocess       # the kind
  env_num: 8

# how much
collect:
  steps: 100
"""


def test_a_key_that_is_there_as_a_comment_is_put_in_its_place() -> None:
    text = (
        "manager:\n  env_num: 8\n  # spare_env_num: 0   # to hide slow resets\n"
        "  # on_failure: recover\n\ncollect:\n  # spare_env_num: 1\n  steps: 5\n"
    )
    found = edited(text, {("manager", "spare_env_num"): 2}, {("manager", "spare_env_num"): "tuned"})
    assert found == text.replace(
        "  # spare_env_num: 0   # to hide slow resets", "  spare_env_num: 2  # tuned"
    )


def test_comments_stay_where_they_are() -> None:
    changes = {("manager", "type"): "async_subprocess", ("manager", "num_workers"): 2}
    found = edited(TEXT, changes, {("manager", "num_workers"): "tuned"})
    assert found == TEXT.replace(": subprocess ", ": async_subprocess ").replace(
        "  env_num: 8\n", "  env_num: 8\n  num_workers: 2  # tuned\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        "env: {id: A}\nmanager: {type: base, env_num: 3}\n",
        "manager: {}\n",
        "manager:\n  seed: [1,\n    2]\n  worker_env:\n    set: {A: b}\n    # last\n\n# end\n",
        "manager:\nenv: {id: A}\n",
        "env: {id: A}",
        "",
        "{manager: {type: base}}\n",
        "base: &b {type: base}\nmanager:\n  <<: *b\n  env_num: 3\n",
        'manager:\n    type: "subprocess"\n    num_workers: auto # why\n',
    ],
)
def test_any_config_comes_out_with_the_changes_and_nothing_else(text: str) -> None:
    changes: dict[tuple[str, ...], Any] = {
        ("manager", "type"): "async_subprocess",
        ("manager", "num_workers"): None,
        ("manager", "wait_num"): math.inf,
        ("env", "kwargs", "mode"): "a: b",
        ("manager", "seed"): [1, 2],
    }
    found = load_yaml(edited(text, changes, {("manager", "num_workers"): "tuned"}), "it")
    expected = load_yaml(text, "it") or {}
    for path, value in changes.items():
        section = expected
        for part in path[:-1]:
            section[part] = section.get(part) or {}
            section = section[part]
        section[path[-1]] = value
    assert found == expected
