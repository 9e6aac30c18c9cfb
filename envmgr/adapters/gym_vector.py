"""Resets and steps of a manager as a Gymnasium vector env, in each autoreset mode."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from gymnasium.error import ResetNeeded
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from envmgr.adapters import gym_infos
from envmgr.adapters.batches import FixedBatches, Rows, put_rows, row_of, rows_of, spread
from envmgr.adapters.gym_access import GymAccess
from envmgr.adapters.gym_arguments import (
    AutoresetMode,
    batched_action_space,
    batched_spaces,
    check_mask,
    is_029,
)
from envmgr.adapters.gym_calls import InThread
from envmgr.manager import EnvManager

StepResult = tuple[
    Any, npt.NDArray[Any], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]
]
ResetResult = tuple[Any, dict[str, Any]]


class ManagerVectorEnv(GymAccess):
    """What `as_gymnasium` returns, where the arguments are described.

    In NEXT_STEP mode the step after an episode's end returns the next one's first observation, with
    reward 0; its action is not used. In SAME_STEP mode that observation comes with the end itself,
    and the terminal one in `infos["final_obs"]`, beside `infos["final_info"]`. In DISABLED mode
    envs are reset by `reset(options={"reset_mask": mask})`.

    Attributes:
        manager: the manager.
        autoreset_mode: the mode.
    """

    def __init__(
        self,
        manager: EnvManager,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        *,
        observation_mode: Any = "same",
        on_failure: str | None = None,
        info_format: str = "gymnasium",
    ) -> None:
        self.autoreset_mode = mode = AutoresetMode(autoreset_mode)
        self._as_029 = is_029(info_format, mode.value)
        batches = FixedBatches(
            manager,
            adapter="as_gymnasium",
            on_failure=on_failure,
            auto_reset=mode is not AutoresetMode.DISABLED,
        )
        super().__init__(manager, batches)
        self._add = gym_infos.adding_as_029(self.num_envs) if self._as_029 else self._add_info
        self._copies = manager.cfg.copy_on_get is True
        self._was_reset = False
        self._final: dict[int, Any] = {}  # terminal observations that are shown still
        self._going: list[int] = []
        batches.build()
        self.spec = manager.spec
        self.render_mode = manager.render_mode
        self.metadata = {**(manager.metadata or {}), "autoreset_mode": mode}
        self.single_action_space = manager.action_space
        self.action_space = batched_action_space([acted for _, acted in manager.env_spaces])
        self.single_observation_space, self.observation_space = batched_spaces(
            observation_mode, [observed for observed, _ in manager.env_spaces]
        )

    # -- resets -----------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> ResetResult:
        """Begin new episodes.

        Args:
            seed: an int gives env i exactly `seed + i`; a list one to each; None none.
            options: for the resets of the envs; those that follow have them, too, until another
                `reset`. With `reset_mask`, a bool array (num_envs,), only those envs are reset.

        Returns:
            The observations of all envs, and infos.
        """
        self._call.refuse("reset_async")
        seeds, mask, rest = self._reset_arguments(seed, options)
        return self._reset(seeds, mask, rest)

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Begin a `reset`, which goes on in a thread; `reset_wait` returns its result."""
        self._call.refuse("reset_async")
        arguments = self._reset_arguments(seed, options)
        self._resetting = InThread(functools.partial(self._reset, *arguments))
        self._call.name = "reset"

    def reset_wait(self, timeout: float | None = None) -> ResetResult:
        """Return the result of the last `reset_async`.

        Raises:
            CallTimeoutError: it takes more than `timeout` seconds. The reset goes on.
        """
        self._call.require("reset")
        resetting = self._resetting
        if resetting is None or not resetting.has_ended(timeout):
            raise self._call.late(timeout)
        self._resetting = self._call.name = None
        return cast("ResetResult", resetting.result())

    def _reset_arguments(self, seed: Any, options: Any) -> tuple[Any, Any, dict[str, Any]]:
        n, rest = self.num_envs, dict(options or {})
        if isinstance(seed, numbers.Integral):
            seed = [int(seed) + i for i in range(n)]
        elif seed is not None and len(seed) != n:
            raise ValueError(
                "If seeds are passed as a list the length must match "
                f"num_envs={n} but got length={len(seed)}."
            )
        mask = rest.pop("reset_mask", None)
        if mask is not None:
            check_mask(mask, n)
        return seed, mask, rest

    def _reset(self, seeds: Any, mask: Any, options: dict[str, Any]) -> ResetResult:
        batches, n = self._batches, self.num_envs
        ids = list(range(n)) if mask is None else np.flatnonzero(mask).tolist()
        begun = () if self.autoreset_mode is AutoresetMode.DISABLED else tuple(self._final)
        batches.reset(ids, seed=seeds, options=options, begun=begun)
        self._was_reset = True
        for env_id in ids:
            self._final.pop(env_id, None)
        if len(ids) == n:
            obs = batches.first_obs()
        else:  # the others show what they showed before
            others = [i for i in range(n) if i not in self._final]
            parts = [(others, batches.first_obs(others))]
            parts += [([i], rows_of(obs, np.newaxis)) for i, obs in self._final.items()]
            obs = spread(n, parts)
        infos = dict(zip(ids, batches.first_infos(ids), strict=True))
        return self._shown(obs), gym_infos.batched((infos.get(i, {}) for i in range(n)), self._add)

    # -- steps ------------------------------------------------------------------------------

    def step(self, actions: Any) -> StepResult:
        """Step all envs.

        Args:
            actions: a batch of actions, as in `action_space`, or a list of them.

        Returns:
            Observations, rewards (float64), terminations, truncations, and infos by key.

        Raises:
            ResetNeeded: `reset` comes first.
            ActionError, TypeError, ValueError: the actions do not fit; no env was stepped.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Send actions; `step_wait` returns what came of them."""
        self._call.refuse("step_async")
        if not self._was_reset:
            raise ResetNeeded("Cannot call env.step() before calling env.reset()")
        n = self.num_envs
        if type(actions) is not np.ndarray or actions.ndim == 0 or actions.dtype == object:
            actions = list(iterate(self.action_space, actions))
        if len(actions) != n:
            raise ValueError(
                f"{len(actions)} actions were given for {n} envs; no env was stepped. Give one for "
                "each, in the order of the envs"
            )
        if not self._final or self.autoreset_mode is AutoresetMode.DISABLED:
            self._batches.send(actions)
        else:
            self._going = [i for i in range(n) if i not in self._final]
            if isinstance(actions, list):
                actions = [actions[i] for i in self._going]
            else:
                actions = actions[self._going]
            if self._going:
                self._batches.send(actions, self._going)
        self._call.name = "step"

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Return what came of the last `step_async`.

        Raises:
            CallTimeoutError: steps take more than `timeout` seconds. They go on.
        """
        self._call.require("step")
        try:
            rows = self._received(timeout)
        except Exception:
            self._call.name = None
            raise
        if rows is None:
            raise self._call.late(timeout)
        self._call.name = None
        obs, rewards, terminated, truncated, infos, _ = rows
        batched = gym_infos.batched(infos, self._add) if infos is not None else {}
        return self._shown(obs), rewards, terminated, truncated, batched

    def _received(self, timeout: float | None) -> Rows | None:
        if self.autoreset_mode is AutoresetMode.NEXT_STEP and self._final:
            rows = self._with_resets(timeout)
        else:
            rows = self._batches.receive(timeout)
        if rows is None or not rows.ended:
            return rows
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            return self._with_next_episodes(rows)
        final = rows_of(rows.obs, rows.ended)
        for k, env_id in enumerate(rows.ended):
            self._final[env_id] = row_of(final, k)
        return rows

    def _with_resets(self, timeout: float | None) -> Rows | None:
        """Return a step in which some envs show the first observations of their episodes."""
        n, going, begun = self.num_envs, self._going, sorted(self._final)
        rows = self._batches.receive(timeout) if going else None
        if going and rows is None:
            return None
        first = self._batches.first_obs(begun)
        infos = dict(zip(begun, self._batches.first_infos(begun), strict=True))
        if rows is None:
            no = np.zeros((2, n), dtype=np.bool_)
            rows = Rows(first, np.zeros(n), no[0], no[1], [infos[i] for i in range(n)], [])
        else:
            infos.update(zip(going, rows.infos or [{}] * len(going), strict=True))
            rows = Rows(
                spread(n, [(going, rows.obs), (begun, first)]),
                spread(n, [(going, rows.rewards)]),
                spread(n, [(going, rows.terminated)]),
                spread(n, [(going, rows.truncated)]),
                [infos[i] for i in range(n)] if any(infos.values()) else None,
                rows.ended,
            )
        self._final.clear()  # not before: Ctrl-C may come while they are awaited
        return rows

    def _with_next_episodes(self, rows: Rows) -> Rows:
        """Return a step after which the envs whose episodes ended have begun new ones."""
        ended, obs = rows.ended, rows.obs
        first = self._batches.first_obs(ended)
        final = rows_of(obs, ended)
        if not self._copies:
            obs = rows_of(obs, np.arange(self.num_envs))
        put_rows(obs, ended, first)
        infos = rows.infos if rows.infos is not None else [{}] * self.num_envs
        infos = list(infos)
        for k, (i, begun) in enumerate(zip(ended, self._batches.first_infos(ended), strict=True)):
            obs_i = gym_infos.of_one_env(row_of(final, k))
            infos[i] = gym_infos.final(infos[i], obs_i, begun, as_029=self._as_029)
        return rows._replace(obs=obs, infos=infos)

    def _shown(self, obs: Any) -> Any:
        """Return observations without fixed layout as Gymnasium batches them."""
        if type(obs) is np.ndarray and obs.dtype == object:
            space = self.single_observation_space
            out: Any = create_empty_array(space, self.num_envs)
            return concatenate(space, list(obs), out)
        return obs
