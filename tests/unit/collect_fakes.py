"""A manager without envs, for tests of the collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from types import SimpleNamespace
from typing import Any

from gymnasium.spaces import Discrete, Tuple

from envmgr import EnvState, EnvTimestep
from envmgr.errors import EnvCrash, NothingReadyError
from envmgr.seeding import Seeds, seeds_by_env

Take = Callable[[list[int]], list[int]]
"""Which of the pending envs a gather delivers."""


def everything(pending: list[int]) -> list[int]:
    return pending


class FakeManager:
    """Envs that count: the nth step of an episode gives the reward n.

    Args:
        lengths: of the episodes of each env, over and over; a negative one ends abnormally.
        take: which of the pending envs a gather delivers.
        episode_num: episodes of each env before it is DONE; abnormal ones do not count.
        auto_reset: whether a new episode begins by itself.
        seed: in the config.
        gathers_per_reset: how many gathers an automatic reset goes on for.
    """

    def __init__(
        self,
        lengths: Sequence[Sequence[int]],
        *,
        take: Take = everything,
        episode_num: float = float("inf"),
        auto_reset: bool = True,
        seed: Any = None,
        gathers_per_reset: int = 0,
    ) -> None:
        self.env_num = len(lengths)
        self.cfg = SimpleNamespace(copy_on_get=True, same_spaces=True)
        self._seeds = Seeds(seeds_by_env(seed, self.env_num), [])
        self.action_space = Discrete(1000)
        self.observation_space = Tuple((Discrete(1000), Discrete(1000)))
        self.executed: list[tuple[int, Any]] = []
        self.resets: list[list[int]] = []
        self.failures: list[str] = []
        self._errors = [  # made beforehand: interrupts strike envmgr's own code
            EnvCrash(f"env {i} (generation 0) died", env_id=i, during="step")
            for i in range(self.env_num)
        ]
        self._take = take
        self._episode_num = episode_num
        self._auto_reset = auto_reset
        self._gathers_per_reset = gathers_per_reset
        self._resetting: dict[int, int] = {}
        self._lengths: list[Iterator[int]] = [cycle(one) for one in lengths]
        self._length = [next(one) for one in self._lengths]
        self._step = [0] * self.env_num
        self._budget = [0] * self.env_num
        self._pending: dict[int, Any] = {}
        self._state = [EnvState.RUN] * self.env_num

    @property
    def env_states(self) -> dict[int, EnvState]:
        return dict(enumerate(self._state))

    @property
    def done(self) -> bool:
        return all(state is EnvState.DONE for state in self._state) and not self._pending

    @property
    def ready_env(self) -> list[int]:
        return [
            i
            for i, state in enumerate(self._state)
            if state is EnvState.RUN and i not in self._pending
        ]

    ready_obs_id = ready_env

    @property
    def ready_obs(self) -> Any:
        if not self.ready_env:  # it waits for one
            self._reset_goes_on(self._gathers_per_reset)
        if not self.ready_env and not self.done:
            raise NothingReadyError("nothing is ready")
        return {i: (i, self._step[i]) for i in self.ready_env}

    def step(self, actions: Mapping[int, Any]) -> dict[int, EnvTimestep]:
        assert set(actions) <= set(self.ready_env), "an env that is not ready got an action"
        assert actions
        self._pending.update(actions)
        return self.recv()

    def recv(self, min_ready: Any = None, timeout_s: Any = None) -> dict[int, EnvTimestep]:
        if not self._pending:
            raise NothingReadyError("nothing is outstanding")
        self._reset_goes_on(1)
        return {i: self._deliver(i) for i in self._take(sorted(self._pending))}

    def _reset_goes_on(self, n_gathers: int) -> None:
        for env_id, left in list(self._resetting.items()):
            self._resetting[env_id] = left - n_gathers
            if left <= n_gathers:
                del self._resetting[env_id]
                self._state[env_id] = EnvState.RUN

    def reset(self, params: Mapping[int, Any]) -> None:
        self.resets.append(list(params))
        for env_id in params:
            self._state[env_id] = EnvState.RUN

    @property
    def generations(self) -> list[int]:
        return [0] * self.env_num

    def stats(self) -> dict[str, Any]:
        return {"latest_failures": self.failures}

    def _deliver(self, env_id: int) -> EnvTimestep:
        self.executed.append((env_id, self._pending.pop(env_id)))
        self._step[env_id] += 1
        step, length = self._step[env_id], self._length[env_id]
        obs = (env_id, step)
        if step < abs(length):
            return EnvTimestep(obs, float(step), False, {"terminated": False, "truncated": False})
        self._step[env_id] = 0
        self._length[env_id] = next(self._lengths[env_id])
        if self._gathers_per_reset and self._auto_reset:
            self._state[env_id] = EnvState.RESET
            self._resetting[env_id] = self._gathers_per_reset
        if length < 0:
            error = self._errors[env_id]
            info = {"abnormal": True, "terminated": False, "truncated": True, "error": error}
            return EnvTimestep(obs, 0.0, True, info)
        self._budget[env_id] += 1
        if self._budget[env_id] >= self._episode_num:
            self._state[env_id] = EnvState.DONE
        elif not self._auto_reset:
            self._state[env_id] = EnvState.NEED_RESET
        return EnvTimestep(obs, float(step), True, {"terminated": True, "truncated": False})


def answer_zero(obs: Mapping[int, Any]) -> dict[int, int]:
    """A policy."""
    return dict.fromkeys(obs, 0)
