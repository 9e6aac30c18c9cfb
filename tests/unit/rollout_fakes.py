"""A manager without envs that speaks in arrays, and what its envs went through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Text

from envmgr import EnvState
from envmgr.core import ArrayBatch, ReadyBatch
from envmgr.errors import EnvCrash, NothingReadyError
from envmgr.seeding import Seeds
from tests.unit.collect_fakes import Take, everything

VECTOR = Box(-1e9, 1e9, (3,), np.float64)
NESTED = Dict({"where": Box(-1e9, 1e9, (2,), np.float64), "step": Discrete(10**6)})
TEXT = Text(100)


class Taken(NamedTuple):
    """A step that an env has taken."""

    obs: tuple[int, int, int]
    action: float
    reward: float
    next_obs: tuple[int, ...]
    terminated: bool
    truncated: bool
    abnormal: bool


Plan = Sequence[tuple[int, str]]
"""Lengths of episodes, over and over, and how they end: terminated, truncated, abnormal or lost."""


class FakeArrays:
    """Envs whose observation is (env_id, episode, step); the reward tells of these and the action.

    Args:
        plans: of each env. After a "lost" episode the env is DONE.
        take: which of the pending envs a gather delivers; with `wait_num` inf, all are.
        space: of observations.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        *,
        take: Take | None = None,
        space: Any = VECTOR,
        auto_reset: bool = True,
        copies: bool = True,
        resets_take: Callable[[], bool] = lambda: False,
    ) -> None:
        self.env_num = len(plans)
        self.observation_space = space
        self._is_dict = isinstance(space, Dict)  # asking runs code of Python's, where tests strike
        self.action_space = Discrete(1000)
        self.cfg = SimpleNamespace(
            same_spaces=True,
            wait_num=float("inf") if take is None else 1,
            auto_reset=auto_reset,
            copy_on_get=copies,
            on_exhausted="drop" if any(how == "lost" for p in plans for _, how in p) else "raise",
            episode_num=float("inf"),
        )
        self._seeds = Seeds({i: 3 + i for i in range(self.env_num)}, [])
        self.taken: list[list[Taken]] = [[] for _ in plans]
        self._plans = plans
        self._take = take or everything
        self._resets_take = resets_take
        self._at = [(0, 0)] * self.env_num
        self._state = [EnvState.RUN] * self.env_num
        self._pending: dict[int, float] = {}

    # -- what a manager has ---------------------------------------------------------------------

    @property
    def env_states(self) -> dict[int, EnvState]:
        return dict(enumerate(self._state))

    @property
    def active_env(self) -> list[int]:
        return [i for i, state in enumerate(self._state) if state is EnvState.RUN]

    @property
    def ready_env(self) -> list[int]:
        for i, state in enumerate(self._state):
            if state is EnvState.RESET and not self._resets_take():
                self._state[i] = EnvState.RUN
        return [i for i in self.active_env if i not in self._pending]

    def ready_arrays(self, env_ids: Sequence[int] | None = None) -> ReadyBatch:
        if env_ids is not None:
            for i in env_ids:
                if self._state[i] is EnvState.RESET:
                    self._state[i] = EnvState.RUN
        ready = self.ready_env
        ids = ready if env_ids is None else list(env_ids)
        if not ids or not set(ids) <= set(ready):
            raise NothingReadyError(f"{ids} do not become ready")
        return ReadyBatch(np.array(ids), self._stacked([(i, *self._at[i]) for i in ids]))

    def send_arrays(self, env_ids: Sequence[int], actions: Any) -> None:
        ids = [int(i) for i in env_ids]
        assert set(ids) <= set(self.ready_env), "an env that is not ready got an action"
        assert len(actions) == len(ids)
        self._pending.update(zip(ids, np.asarray(actions, np.float64).tolist(), strict=True))

    def recv_arrays(self, min_ready: Any = None, timeout_s: Any = None) -> ArrayBatch:
        if not self._pending:
            raise NothingReadyError("nothing is outstanding")
        ids = sorted(self._take(sorted(self._pending)))
        steps = [self._step(i, self._pending.pop(i)) for i in ids]
        flags = [(s.terminated, s.truncated) for s in steps]
        terminated, truncated = np.array(flags, np.bool_).reshape(-1, 2).T.copy()
        obs = self._stacked([s.next_obs for s in steps])
        rewards = np.array([s.reward for s in steps])
        infos = list(map(_info_of, steps))
        return ArrayBatch(np.array(ids), obs, rewards, terminated, truncated, infos)

    def reset(self, params: Mapping[int, Any] | None = None) -> None:
        for i in range(self.env_num) if params is None else params:
            self._state[i] = EnvState.RUN

    def stats(self) -> dict[str, Any]:
        return {"outstanding": len(self._pending)}

    # -- the envs -------------------------------------------------------------------------------

    def _stacked(self, obs: Sequence[tuple[int, int, int]]) -> Any:
        """Return a batch; by itself, as the tests strike wherever envmgr's own code runs."""
        rows = np.array(obs, np.float64)
        if self._is_dict:
            return {"where": rows[:, :2], "step": rows[:, 2].astype(np.int64)}
        return np.array(list(map(str, obs)), object) if self.observation_space is TEXT else rows

    def _step(self, env_id: int, action: float) -> Taken:
        episode, step = self._at[env_id]
        plan = self._plans[env_id]
        length, how = plan[episode % len(plan)]
        obs, after = (env_id, episode, step), (env_id, episode, step + 1)
        ends = step + 1 >= length
        is_abnormal = ends and how in ("abnormal", "lost")
        taken = Taken(
            obs,
            action,
            0.0 if is_abnormal else 100.0 * env_id + 10.0 * episode + step + action / 7,
            obs if is_abnormal else after,
            ends and how == "terminated",
            ends and how != "terminated",
            is_abnormal,
        )
        self.taken[env_id].append(taken)
        self._at[env_id] = (episode + 1, 0) if ends else (episode, step + 1)
        if ends:
            auto = EnvState.RESET if self.cfg.auto_reset else EnvState.NEED_RESET
            self._state[env_id] = EnvState.DONE if how == "lost" else auto
        return taken


_DEATH = EnvCrash("the env died", env_id=0, during="step")


def _info_of(taken: Taken) -> dict[str, Any]:
    if not taken.abnormal:
        return {"terminated": taken.terminated, "truncated": taken.truncated}
    return {"abnormal": True, "terminated": False, "truncated": True, "error": _DEATH}


def values_of(obs: Any) -> Any:
    """A value function that tells observations apart."""
    return np.sin(np.asarray(obs) @ np.array([1.7, 0.6, 0.3]))
