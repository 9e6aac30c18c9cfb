"""The plan, the search and the written config of `envmgr tune`, without processes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from envmgr.config.yaml_text import load_yaml
from envmgr.tuning.plan import candidates, most_entrants, window_of
from envmgr.tuning.search import Measured, compare, search, sizes_of
from envmgr.tuning.settings import Setting, changes_of, setting_of, without_workers
from envmgr.tuning.yaml_edit import edited
from envmgr.worker.profiling import Trial


def trial(step_s: float, reset_s: float = 1e-5, episode_steps: int = 0) -> Trial:
    n = 1000
    n_episodes = n // episode_steps if episode_steps else 0
    return Trial(n, n * step_s, 0.0, n_episodes, n_episodes or 1, (n_episodes or 1) * reset_s)


NULL = trial(1e-7)
CARTPOLE = trial(5e-6, 10e-6, 22)
SLOW_STEPS = trial(3e-3)
SLOW_RESET = trial(1e-3, 0.2, 100)
SYNC, ASYNC = Setting("subprocess"), Setting("async_subprocess", None, 4)


# -- the plan -------------------------------------------------------------------------------------


def test_the_plan_holds_the_present_setting_and_every_sort() -> None:
    found = candidates(SYNC, 8, 2, SLOW_RESET)
    assert found[0] == SYNC
    assert len(found) == len(set(found)) == 15
    assert {setting.kind for setting in found} == {"subprocess", "async_subprocess"}
    assert {s.num_workers for s in found if s.kind == "subprocess"} == {1, 2, 4, "auto", None}
    assert {s.wait_num for s in found if s.kind != "subprocess"} == {1, 2, 4, 6}
    assert {s.spare_env_num for s in found} == {0, 8, 16}
    assert all(s.num_workers is None for s in found if s.spare_env_num)
    assert not any(s.spare_env_num for s in candidates(SYNC, 8, 2, NULL))
    v2 = candidates(Setting("subprocess_v2"), 8, 2, NULL)
    assert {s.kind for s in v2} == {"subprocess_v2", "async_subprocess_v2"}
    assert candidates(SYNC, 1, 2, NULL) == [SYNC]
    assert candidates(SYNC, 4, 2, NULL, ["base"]) == [SYNC, Setting("base")]
    assert Setting("base") in candidates(SYNC, 4, 2, NULL, ["base", "subprocess"])
    for n in (2, 3, 64):
        assert 1 in {s.num_workers for s in candidates(ASYNC, n, 1, NULL)}


def test_what_tells_most_comes_first() -> None:
    def first(one: Trial) -> list[tuple[str, bool, bool]]:
        few = candidates(SYNC, 8, 2, one)[:5]
        return [(s.kind[:5], s.num_workers is None, s.spare_env_num > 0) for s in few]

    present, shared, gathered = ("subpr", True, False), ("subpr", False, False), "async"
    each, few = (gathered, True, False), (gathered, False, False)
    assert first(NULL) == [present, shared, few, each, shared]
    assert first(SLOW_STEPS) == [present, *[(gathered, True, False)] * 4]
    assert first(SLOW_RESET) == [
        present,
        (gathered, True, False),
        ("subpr", True, True),
        (gathered, True, True),
        ("subpr", True, True),
    ]


def test_what_is_not_measured_is_for_want_of_time_or_memory() -> None:
    def most(seconds: float = 40.0, launch_s: float = 0.2, **keys: int | None) -> int:
        return most_entrants(
            seconds, launch_s, 8, 0.13, **{"worker_bytes": None, "free_bytes": 10**9, **keys}
        )

    assert most() == 16
    assert most(launch_s=1.0) == 8
    assert most(launch_s=60.0) == most(seconds=0.5) == 5
    assert most(worker_bytes=10**7) == 6
    assert most(worker_bytes=10**9) == 2


@pytest.mark.parametrize("n", range(1, 12))
def test_rounds_halve(n: int) -> None:
    sizes = sizes_of(n)
    assert sizes[0] == n
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == min(n, 3)


def test_windows_see_several_episodes_where_resets_take_long() -> None:
    for env in (NULL, CARTPOLE, SLOW_STEPS, SLOW_RESET):
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
    first, other = (
        Measured(setting, dict(enumerate(rates)))
        for setting, rates in ((SYNC, (100.0, 150.0)), (ASYNC, (300.0, 200.0)))
    )
    compare([first, other])
    assert first.ratio == pytest.approx(1.0), "whatever others do"


def test_those_that_lose_are_dropped_at_once() -> None:
    settings = [Setting("subprocess", n) for n in range(1, 9)]
    its = Race({setting: float(setting.num_workers or 0) for setting in settings})
    its.run()
    assert len(its.dropped) == 5
    assert settings[0] not in its.dropped
    assert settings[-1] not in its.dropped


# -- settings and configs -------------------------------------------------------------------------


def config(**keys: Any) -> dict[str, Any]:
    plain = {"type": "subprocess", "num_workers": None, "wait_num": math.inf, "spare_env_num": 0}
    return {**plain, "env_num": 8, **keys}


def test_a_setting_is_read_from_a_config_and_changes_it() -> None:
    assert setting_of(config()) == setting_of(config(num_workers=8)) == SYNC
    two, auto = Setting("subprocess", 2), setting_of(config(num_workers="auto"))
    assert auto == Setting("subprocess", "auto")
    assert changes_of(two, SYNC) == {"num_workers": 2}
    assert changes_of(SYNC, setting_of(config(num_workers=8))) == {}
    assert changes_of(auto, auto) == {}
    assert changes_of(SYNC, auto) == {"num_workers": None}
    assert changes_of(ASYNC, SYNC) == {"type": "async_subprocess", "wait_num": 4.0}
    assert str(auto) == "subprocess, auto"
    assert without_workers(ASYNC) == Setting("base")
    assert without_workers(Setting("subprocess_v2", 2)) == Setting("base_v2")
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


@pytest.mark.parametrize("comment", ["# wait_num: 4", "#  wait_num: 4  # some", "#wait_num:"])
def test_wherever_in_its_section_a_key_stands_as_a_comment(comment: str) -> None:
    for text in (
        f"manager:\n  {comment}\n  type: base\n",
        f"# manager\nmanager:\n  type: base\n  {comment}\n  env_num: 3\n",
    ):
        found = edited(text, {("manager", "wait_num"): 2}, {})
        assert found == text.replace(comment, "wait_num: 2")


def test_comments_stay_where_they_are() -> None:
    changes = {("manager", "type"): "async_subprocess", ("manager", "num_workers"): 2}
    found = edited(TEXT, changes, {("manager", "num_workers"): "tuned"})
    assert found == TEXT.replace(": subprocess ", ": async_subprocess ").replace(
        "  env_num: 8\n", "  env_num: 8\n  num_workers: 2  # tuned\n"
    )
    marked = edited(TEXT, changes, {("manager", "type"): "tuned"})
    (line,) = (one for one in TEXT.splitlines() if "type:" in one)
    line = line.replace(": subprocess", ": async_subprocess")
    assert f"manager:\n  # tuned\n{line}\n  env_num: 8\n" in marked, "the comment is the user's"


def test_a_note_leaves_a_comment_that_goes_on_in_the_next_line_as_it_is() -> None:
    text = "manager:\n  num_workers: auto  # as many as\n                     # there are cores\n"
    found = edited(text, {("manager", "num_workers"): 2}, {("manager", "num_workers"): "tuned"})
    assert found == text.replace("  num_workers: auto", "  # tuned\n  num_workers: 2")


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
