"""Infos by every route are equal, in keys, order and types; and so are their columns."""

from __future__ import annotations

import functools
import math
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envmgr import as_gymnasium, create_env_manager
from envmgr.adapters.rows import PlainInfos
from envmgr.wire.block import block_is_possible
from tests.values import same_values

N = 4
STEPS = 30

Plan = Sequence[dict[str, Any]]
"""Infos that an env gives one after another, over and over."""


class Telling(gym.Env[Any, Any]):
    """Gives infos as planned; its episodes have different lengths.

    Args:
        plan: the infos of steps.
        first: the infos of resets.
        length: of an episode.
        last: what the infos of steps that end episodes have besides.
    """

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, plan: Plan, first: Plan, length: int, last: Plan = ({},)) -> None:
        self._plan, self._first, self._last = plan, first, last
        self._length = length
        self._n = self._t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._t, self._n = 0, self._n + 1
        return np.zeros(2, np.float32), self._first[self._n % len(self._first)]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Tell what is planned; arrays are always the same object, and change afterwards."""
        self._t, self._n = self._t + 1, self._n + 1
        info, ends = self._plan[self._n % len(self._plan)], self._t >= self._length
        if ends:
            info = {**info, **self._last[self._n % len(self._last)]}
        return np.zeros(2, np.float32), 1.0, ends, False, info


_LARGE = (1 << 62, -(1 << 63), 1 << 64, 1 << 200)
_TEXTS = ("", "text", "ä€😀", "x" * 64)
KINDS: dict[str, Callable[[random.Random], Any]] = {
    "float": lambda rng: rng.choice((0.0, -0.0, math.inf, math.nan, rng.random())),
    "int": lambda rng: rng.randrange(-9, 9) if rng.random() < 0.9 else rng.choice(_LARGE),
    "bool": lambda rng: rng.random() < 0.5,
    "none": lambda rng: None,
    "text": lambda rng: rng.choice(_TEXTS) if rng.random() < 0.9 else "ä" * 33,
    "long text": lambda rng: "x" * rng.choice((64, 65, 2000)),
    "np.float64": lambda rng: np.float64(rng.random()),
    "np.float32": lambda rng: np.float32(rng.random()),
    "np.float16": lambda rng: np.float16(rng.random()),
    "np.int64": lambda rng: np.int64(rng.randrange(-9, 9)),
    "np.uint8": lambda rng: np.uint8(rng.randrange(256)),
    "np.bool_": lambda rng: np.bool_(rng.random() < 0.5),
    "array": lambda rng: np.array([rng.random() for _ in range(3)]),
    "table": lambda rng: np.full((2, 2), rng.randrange(9), np.int16),
    "point": lambda rng: np.array(rng.random()),
    "mask": lambda rng: np.array([rng.random() < 0.5, True]),
    "no rows": lambda rng: np.zeros((0, 2), np.float32),
    "big-endian": lambda rng: np.full(3, rng.randrange(9), ">i4"),
    "growing": lambda rng: np.zeros(rng.randrange(3)),
    "large": lambda rng: np.full(200, rng.random()),
    "empty": lambda rng: {},
    "list": lambda rng: [rng.randrange(9)],
    "complex": lambda rng: rng.random() * 1j,
    "any": lambda rng: KINDS[rng.choice(_STABLE)](rng),
}
_STABLE = ("float", "int", "np.float64", "bool", "none", "text", "array")
_ODD = ("long text", "growing", "large", "list", "complex", "any")
_KEYS = ("a", "b", "c", "d", "episode", "_a", "terminated")


class InfoMaker:
    """Makes infos that are alike, as those of most envs are; odd ones now and then.

    Args:
        rng: decides.
        depth: how many dicts may be in each other.
    """

    def __init__(self, rng: random.Random, depth: int = 2) -> None:
        self._rng = rng
        keys = rng.sample(_KEYS, rng.randrange(1, 5))
        names = list(KINDS) if rng.random() < 0.3 else [k for k in KINDS if k not in _ODD]
        self._kinds: dict[str, Any] = {
            key: InfoMaker(rng, depth - 1) if depth and rng.random() < 0.3 else rng.choice(names)
            for key in keys
        }
        self._leaves_out = rng.choice((0.0, 0.0, 0.2))
        self._is_odd = rng.choice((0.0, 0.0, 0.02))

    def info(self) -> dict[str, Any]:
        """Return one more info."""
        rng, found = self._rng, dict[str, Any]()
        for key, kind in self._kinds.items():
            if rng.random() < self._leaves_out:
                continue
            odd = rng.random() < self._is_odd
            name = "any" if odd else kind
            found[key] = name.info() if isinstance(name, InfoMaker) else KINDS[name](rng)
        if rng.random() < self._is_odd:
            found = dict(reversed(found.items()))
        return found


Envs = Sequence[tuple[Plan, Plan, int, Plan]]


def envs_of(seed: int) -> Envs:
    """Return what one or two kinds of envs tell: of steps, resets and ends; and their lengths."""
    rng = random.Random(seed)
    found: list[tuple[Plan, Plan, int, Plan]] = []
    n_kinds, are_as_long = rng.choice((1, 1, 2)), rng.random() < 0.5
    for _ in range(n_kinds):
        steps, resets, ends = InfoMaker(rng), InfoMaker(rng), InfoMaker(rng)
        plans = [steps.info() for _ in range(50)]
        firsts = [resets.info() for _ in range(9)]
        lasts = [ends.info() for _ in range(9)] if rng.random() < 0.5 else [{}]
        found.append((plans, firsts, rng.randrange(2, 9), lasts))
    if are_as_long:
        return found
    each = [found[i % n_kinds] for i in range(N)]  # so that episodes end in some envs alone
    return [
        (plans, firsts, length + i, last) for i, (plans, firsts, length, last) in enumerate(each)
    ]


SEEDS = st.integers(0, 1 << 32)


def factories_of(envs: Envs) -> list[Callable[[], Any]]:
    return [functools.partial(Telling, *envs[i % len(envs)]) for i in range(N)]


def run(config: dict[str, Any], envs: Envs, *, arrays: bool) -> list[Any]:
    """Return what an episode after another tells, by a manager of some kind."""
    seen: list[Any] = []
    ids = list(range(N))
    with create_env_manager(config, env_fn=factories_of(envs)) as manager:
        for _ in range(STEPS):
            manager.ready_arrays(ids)
            begun = manager.reset_infos(ids)
            if arrays:
                manager.send_arrays(ids, np.zeros(N, np.int64))
                batch = manager.recv_arrays()
                columns = batch.info_columns
                seen.append((begun, list(batch.infos), columns, batch.info_columns))
            else:
                steps = manager.step(dict.fromkeys(ids, 0))
                seen.append((begun, [steps[i].info for i in ids]))
    return seen


ROUTES: dict[str, dict[str, Any]] = {
    "thread": {"type": "thread"},
    "fork": {"type": "subprocess", "context": "fork", "num_workers": 2},
    "in place": {"type": "base", "reset_inplace": True},
    "views": {"type": "subprocess", "context": "fork", "num_workers": 1, "copy_on_get": False},
    "messages": {"type": "subprocess", "context": "fork", "shared_memory": False},
}
FEW = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@FEW
@given(SEEDS, st.sampled_from(sorted(ROUTES)))
def test_infos_are_the_same_by_every_route(seed: int, route: str) -> None:
    envs = envs_of(seed)
    expected = run({"type": "base"}, envs, arrays=True)
    plain = run({"type": "base"}, envs, arrays=False)
    assert same_values([one[:2] for one in expected], plain)
    got = run(ROUTES[route], envs, arrays=True)
    assert same_values(got, expected)
    assert same_values(run(ROUTES[route], envs, arrays=False), plain)


MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]
UNLIKE = (ValueError, OverflowError, AttributeError, TypeError)
"""What values of unlike types raise. Which comes first depends on the order in which they are read:
env by env, or key by key."""


def gymnasium_run(env: Any) -> list[Any]:
    """Return the infos that a vector env gives, or that it cannot put them together."""
    seen: list[Any] = []
    try:
        seen.append(env.reset()[1])
        seen.extend(env.step(np.zeros(N, np.int64))[4] for _ in range(STEPS))
    except UNLIKE:
        seen.append("values of unlike types")
    except Exception as error:
        seen.append(type(error))
    finally:
        env.close()
    return seen


@pytest.mark.skipif(not block_is_possible(), reason="infos go by message here")
@pytest.mark.parametrize("mode", MODES)
@FEW
@given(seed=SEEDS, kind=st.sampled_from(["base", "subprocess"]))
def test_as_gymnasium_gives_what_a_sync_vector_env_gives(mode: Any, seed: int, kind: str) -> None:
    envs = [
        (_without_ends(plan), _without_ends(first), length, _without_ends(last))
        for plan, first, length, last in envs_of(seed)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = gymnasium_run(SyncVectorEnv(factories_of(envs), autoreset_mode=mode))
        more = {} if kind == "base" else {"context": "fork", "num_workers": 2}
        manager = create_env_manager({"type": kind, **more}, env_fn=factories_of(envs))
        got = gymnasium_run(as_gymnasium(manager, mode))
    assert same_values(got, expected, ordered=False)


@pytest.mark.parametrize("mode", MODES)
def test_as_gymnasium_looks_at_no_info_of_an_env_that_goes_on(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = [{"n": np.int64(k), "is": np.bool_(k), "text": str(k)} for k in range(3)]
    steps = [{"x": 1.0, "inner": inner[k]} for k in range(3)]
    firsts, lasts = [{"x": 2.0}, {"x": 3.0, "y": 1}], [{"episode": {"r": 1.0}}, {"episode": {}}]
    envs = [(steps, firsts, 3 + 2 * i, lasts) for i in range(N)]
    expected = gymnasium_run(SyncVectorEnv(factories_of(envs), autoreset_mode=mode))
    manager = create_env_manager({"type": "base"}, env_fn=factories_of(envs))
    env = as_gymnasium(manager, mode)
    env.reset()
    monkeypatch.setattr(PlainInfos, "_made", None)  # which makes the dicts of all envs
    got = [env.step(np.zeros(N, np.int64))[4] for _ in range(STEPS)]
    env.close()
    assert same_values(got, expected[1:], ordered=False)
    assert any("final_info" in infos or "y" in infos for infos in got)


def _without_ends(plan: Plan) -> Plan:
    return [{k: v for k, v in info.items() if k != "terminated"} for info in plan]
