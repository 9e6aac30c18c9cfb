"""An agent learns under every kind of manager; it would not if anything were mixed up.

The agent is that of `examples/cartpole_cem.py`, in a shorter form. Every env runs a candidate of
its own, so that observations or actions of one env in the place of another's spoil the learning.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from envmgr import make

_SPEC = importlib.util.spec_from_file_location(
    "cartpole_cem", Path(__file__).parents[2] / "examples" / "cartpole_cem.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
cartpole_cem: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(cartpole_cem)

LEARNT = 120.0
"""Mean return that says that the agent has learnt. Over many seeds the short form reaches 200 to
500, and less than 50 with something mixed up; random actions reach 22."""

ENV_NUM = 4

KINDS = [
    "base",
    "subprocess",
    "async_subprocess",
    *(
        pytest.param(kind, marks=pytest.mark.v2)
        for kind in ("base_v2", "async_subprocess_v2")  # the same view of `subprocess` is theirs
    ),
]


def learn(kind: str, spoil: Callable[[Any], None] = lambda manager: None) -> float:
    """Return the mean return of what a short training gives."""
    with make("CartPole-v1", env_num=ENV_NUM, type=kind, seed=0) as manager:
        spoil(manager)
        weights = cartpole_cem.train(
            manager, seed=0, population=24, generations=8, good_enough=150.0
        )
        return float(cartpole_cem.evaluate(manager, weights, episodes=5, seed=0))


@pytest.mark.parametrize("kind", KINDS)
def test_learns(kind: str) -> None:
    assert learn(kind) >= LEARNT


class Turned:
    """Gives each env what its neighbour was given last, also where few envs come at a time."""

    def __init__(self) -> None:
        self._latest: dict[int, Any] = {}

    def __call__(self, values: Mapping[int, Any]) -> dict[int, Any]:
        """Return what each env is to have in the place of its own."""
        self._latest.update(values)
        return {i: self._latest.get((i + 1) % ENV_NUM, value) for i, value in values.items()}


def mix_up_actions(manager: Any) -> None:
    step, turned = manager.step, Turned()
    manager.step = lambda actions: step(turned(actions))


@pytest.mark.parametrize("kind", ["base", "async_subprocess"])
def test_does_not_learn_with_actions_mixed_up(kind: str) -> None:
    assert learn(kind, mix_up_actions) < LEARNT / 2


def test_does_not_learn_with_observations_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ready_obs, turned = cartpole_cem.ready_obs, Turned()
    monkeypatch.setattr(cartpole_cem, "ready_obs", lambda manager: turned(ready_obs(manager)))
    assert learn("base") < LEARNT / 2
