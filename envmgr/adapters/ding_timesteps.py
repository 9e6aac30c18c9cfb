"""Timesteps as DI-engine reads them: complete at an episode's end, failures as text."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import numpy as np

from envmgr.adapters.failures import failure_of, plain_info
from envmgr.errors import EnvFailure
from envmgr.types import EnvTimestep, is_abnormal
from envmgr.views import DictView, TreeView

_RETURN = "eval_episode_return"
"""What DI-engine's collectors and evaluators read in the info of an episode's last timestep."""


class Ends:
    """Completes the last timesteps of episodes, for which it adds up the rewards of each env.

    Attributes:
        failures: the latest failure of each env that has failed.
    """

    def __init__(self) -> None:
        self.failures: dict[int, EnvFailure] = {}
        self._so_far: dict[int, Any] = {}
        self._form: Any = None  # of the returns that the envs themselves give
        self._n_infos = 0  # of envs that give a list of infos, one for each of their agents

    def forget(self, env_ids: Iterable[int]) -> None:
        """Begin anew with these envs, whose episodes were cut short."""
        for env_id in env_ids:
            self._so_far[env_id] = _zero_like(self._so_far.get(env_id, 0.0))

    def complete(self, timesteps: dict[int, EnvTimestep]) -> dict[int, EnvTimestep]:
        """Complete timesteps and return them.

        At an episode's end the info has `eval_episode_return`: what the env says, else the sum of
        its rewards. After a failure the reward is a zero like the env's own, and `error` is text.
        """
        so_far = self._so_far
        for env_id, (_, reward, done, _) in timesteps.items():
            if done:
                timesteps[env_id] = self._completed(env_id, timesteps[env_id])
                continue
            try:
                so_far[env_id] = so_far.get(env_id, 0.0) + reward
            except (TypeError, ValueError):  # there are rewards that have no sum
                so_far[env_id] = 0.0
        return timesteps

    def _completed(self, env_id: int, timestep: EnvTimestep) -> EnvTimestep:
        total, info = self._so_far.get(env_id, 0.0), timestep.info
        zero = self._so_far[env_id] = _zero_like(total)
        if not is_abnormal(info):
            if isinstance(info, (list, tuple)):
                self._n_infos = len(info)
            elif _RETURN in info:
                self._form = info[_RETURN]
            try:
                total = total + timestep.reward
            except (TypeError, ValueError):
                total = 0.0
        else:
            failure = failure_of(info)
            if failure is not None:
                self.failures[env_id] = failure
            if self._n_infos and isinstance(info, MutableMapping):
                info = [dict(info) for _ in range(self._n_infos)]
            timestep = timestep._replace(reward=zero, info=info)
        self._complete_infos(info if isinstance(info, (list, tuple)) else [info], total)
        return timestep

    def _complete_infos(self, infos: Sequence[Any], total: Any) -> None:
        is_shared = len(infos) > 1 and np.size(total) == len(infos)
        for k, info in enumerate(infos):
            if isinstance(info, MutableMapping):
                info.update(plain_info(info))
                share = np.ravel(total)[k] if is_shared else total
                info.setdefault(_RETURN, _in_form_of(self._form, share))


def _zero_like(total: Any) -> Any:
    return np.zeros_like(total) if isinstance(total, np.ndarray) else 0.0


def _in_form_of(form: Any, total: Any) -> Any:
    """Return a sum of rewards as the returns of the envs are, so that they can be averaged."""
    if np.size(total) != 1:
        return total
    if isinstance(form, np.ndarray):
        return np.full_like(form, np.ravel(total)[0])
    return total if form is None else float(np.ravel(total)[0])


class CompletedDicts(DictView):
    """Timesteps by env_id, completed.

    Args:
        ends: completes them.
    """

    def __init__(self, ends: Ends) -> None:
        self._ends = ends

    def timesteps(self, timesteps: dict[int, EnvTimestep]) -> Any:
        """Return what `step` gives."""
        return self._ends.complete(timesteps)


class CompletedTrees(TreeView):
    """Timesteps as treetensors, completed.

    Args:
        ends: completes them.
    """

    def __init__(self, ends: Ends) -> None:
        super().__init__()
        self._ends = ends

    def timesteps(self, timesteps: dict[int, EnvTimestep]) -> list[Any]:
        """Return a treetensor with `obs reward done info env_id` for each timestep."""
        return super().timesteps(self._ends.complete(timesteps))
