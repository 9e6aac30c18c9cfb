"""Any `gymnasium.vector.VectorEnv` as a batched env: each of its rows an env of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from envmgr.env.batched import BatchedEnv, First
from envmgr.env.contract import EnvContractError, describe, env_name
from envmgr.env.gym_spaces import convert_space
from envmgr.env.gymnasium_env import set_through_wrappers
from envmgr.env.pictures import RowPictures
from envmgr.env.reset_arguments import ResetArguments
from envmgr.env.vector_forms import (
    check_form,
    check_rows,
    is_of,
    knows_reset_mask,
    mode_of,
    own,
    takes_lists,
)
from envmgr.env.vector_infos import RowInfos
from envmgr.spaces import codec_of, indexed

_ANY = -1
"""A seed that counts as equal to every other seed."""

_FINAL = frozenset(("final_obs", "_final_obs", "final_info", "_final_info"))


class VectorBatch(BatchedEnv):
    """A vector env whose rows have env_ids, episodes and resets of their own.

    Episodes begin when the env begins them. Resetting some rows and not the others requires
    `options["reset_mask"]`, which gymnasium's own vector envs support, and so do envs without
    autoreset. Other envs ignore it and reset all rows, so you have to say if one supports it
    (`partial_resets`). Without it, rows can be reset by hand only all together. An env that does
    not say when it begins episodes is refused, and so are a version of gymnasium without that
    setting, and an env that gives the results of only some of its rows at a time (`batch_size`).

    Args:
        env: the vector env.
        autoreset_mode: used in place of `env.metadata["autoreset_mode"]`.
        partial_resets: whether `reset` supports `reset_mask`; None: only if the env is known to.
        at_once: whether a row is reset, by its mask, as soon as its episode has ended, without
            waiting for a next step. Needs `partial_resets`; for envs in the mode NEXT_STEP.

    Attributes:
        env: the vector env.
        num_envs: the number of its rows.
        mode: when the env begins episodes.
    """

    def __init__(
        self,
        env: Any,
        *,
        autoreset_mode: Any = None,
        partial_resets: bool | None = None,
        at_once: bool = False,
    ) -> None:
        check_form(env)
        self.env = env
        self.num_envs = int(env.num_envs)
        self.metadata = getattr(env, "metadata", None) or {}
        self.spec = getattr(env, "spec", None)
        self.render_mode = getattr(env, "render_mode", None)
        self.observation_space = convert_space(env.single_observation_space)
        self.action_space = convert_space(env.single_action_space)
        self.mode = mode_of(env, self.metadata, autoreset_mode)
        known = self.mode is AutoresetMode.DISABLED or knows_reset_mask(env)
        self.resets_alone = known if partial_resets is None else partial_resets
        if not self.resets_alone and (at_once or self.mode is AutoresetMode.DISABLED):
            raise EnvContractError(
                f"{env_name(env)} cannot reset some of its rows and leave the others, which it "
                "takes to reset them at once (reset_inplace). If its reset does know "
                "options['reset_mask'], say so: VectorBatch(env, partial_resets=True)"
            )
        self.begins_late = self.mode is AutoresetMode.NEXT_STEP and not at_once
        layouts = [codec_of(s).layout for s in (self.observation_space, self.action_space)]
        self._obs_is_array, self._action_is_array = [
            layout is not None and type(layout.skeleton) is int for layout in layouts
        ]
        self._all = list(range(self.num_envs))
        # First observations and infos of rows that are still to be reset, as a step or the reset of
        # other rows has already begun their next episodes.
        self._first: dict[int, First] = {}
        self._seeds: dict[int, int | None] = {}
        self._was_reset = False
        self._in_episode = np.zeros(self.num_envs, np.bool_)
        # Rows whose episodes had ended with the latest step, as the env sees it.
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._pictures = RowPictures(env)
        self._reset_arguments = ResetArguments(env)

    # -- resets -----------------------------------------------------------------------------

    def resettable(self, asked: Mapping[int, bool], *, others: bool) -> Sequence[int]:
        """Return the rows that need not wait for a step, or for more rows to be reset."""
        if not others and not (self.resets_alone and any(asked.values())):
            return list(asked)
        return [
            row
            for row, is_ordered in asked.items()
            if row in self._first or (self.resets_alone and (is_ordered or not self.begins_late))
        ]

    def leave(self, row: int) -> None:
        """Note that a row no longer takes part."""
        self._in_episode[row] = False
        self._pictures.leave(row)

    def reset(
        self,
        rows: Sequence[int],
        seeds: Sequence[int | None],
        params: Sequence[Mapping[str, Any]],
    ) -> tuple[Sequence[Any], Sequence[Mapping[str, Any]] | None]:
        """Begin an episode in some rows, unless the env has done that already."""
        due = [
            (row, seed, dict(given))
            for row, seed, given in zip(rows, seeds, params, strict=True)
            if row not in self._first or given or self._seeds.get(row) not in (seed, _ANY)
        ]
        if due:
            self._begin(due)
        begun = [self._first.pop(row) for row in rows]
        for row in rows:
            self._seeds.pop(row, None)
        self._in_episode[list(rows)] = True
        if self._pictures.rows:
            self._pictures.begun(rows)
        firsts, infos = zip(*begun, strict=True)
        obs: Any = np.array(firsts) if self._obs_is_array else firsts
        return obs, infos if any(infos) else None

    def _begin(self, due: list[tuple[int, int | None, dict[str, Any]]]) -> None:
        rows = [row for row, _, _ in due]
        others = self._in_episode.copy()
        others[rows] = False
        params = due[0][2]
        # What a row begins with is not given to others: only a first reset has to be of all.
        alone = self.resets_alone and self._was_reset and len(due) < self.num_envs
        if not (alone or others.any()) and all(given == params for _, _, given in due):
            self._begin_all(due, params)
        elif self.resets_alone:
            while due:
                params = due[0][2]
                self._begin_some([one for one in due if one[2] == params], params)
                due = [one for one in due if one[2] != params]
        else:
            raise EnvContractError(
                f"{env_name(self.env)} cannot reset rows {rows} and leave the others. If its reset "
                "does know options['reset_mask'], say so: VectorBatch(env, partial_resets=True)"
            )

    def _begin_all(
        self, due: list[tuple[int, int | None, dict[str, Any]]], params: dict[str, Any]
    ) -> None:
        """Reset the whole env; rows not asked for now may still be, before the next step."""
        seeds = {row: seed for row, seed, _ in due}
        first = due[0][0]
        base = None if due[0][1] is None else due[0][1] - first
        consecutive: dict[int, int | None] = {
            row: None if base is None else base + row for row in self._all
        }
        given: Any = base
        if (base is not None and base < 0) or any(seeds[row] != consecutive[row] for row in seeds):
            given = self._seeds_of(self._all, seeds)
            # An env that takes one seed has been given that of its first row.
            consecutive = dict.fromkeys(self._all, None if self.resets_alone else _ANY)
        result = self.env.reset(**self._reset_arguments.of(given, params))
        self._seeds = consecutive
        self._was_reset = True
        self._keep(result, self._all)
        if params and self.resets_alone:
            for row in self._first.keys() - seeds.keys():
                del self._first[row]

    def _begin_some(
        self, due: list[tuple[int, int | None, dict[str, Any]]], params: dict[str, Any]
    ) -> None:
        rows = [row for row, _, _ in due]
        mask = np.zeros(self.num_envs, np.bool_)
        mask[rows] = True
        given = self._seeds_of(rows, {row: seed for row, seed, _ in due})
        result = self.env.reset(seed=given, options={**params, "reset_mask": mask})
        self._keep(result, rows)

    def _seeds_of(self, rows: Sequence[int], seeds: Mapping[int, int | None]) -> Any:
        """Return rows' seeds in the form that the env takes; a single one if it takes only one."""
        given = [seeds.get(row) for row in rows]
        if all(seed is None for seed in given):
            return None
        if is_of(self.env, "gymnasium"):
            listed: list[int | None] = [None] * self.num_envs
            for row, seed in zip(rows, given, strict=True):
                listed[row] = seed
            if takes_lists(self.env):
                return listed
        if is_of(self.env, "ale_py"):
            return np.array([-1 if seed is None else seed for seed in given])
        return next(seed for seed in given if seed is not None)

    def _keep(self, result: Any, rows: Sequence[int]) -> None:
        """Keep the first observations and infos of rows."""
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise EnvContractError(
                f"reset of {env_name(self.env)} should return (obs, infos) as gymnasium's vector "
                f"envs do, it returned {describe(result)}"
            )
        obs, infos = result
        each = self._observations(obs)
        check_rows(self.env, "reset", each, self.num_envs)
        told = RowInfos(infos, rows, self.num_envs)
        for k, row in enumerate(rows):
            self._first[row] = own(each[row]), told[k]
        self._ended[list(rows)] = False

    # -- steps ------------------------------------------------------------------------------

    def step(self, rows: Sequence[int], actions: Any) -> Sequence[Any]:
        """Take one action in each of some rows; the others take an arbitrary one."""
        if len(rows) == self.num_envs:
            given = actions if self._action_is_array else self._concatenated(list(actions))
            return self._step(rows, given)
        some, whole = np.asarray(rows), dict.fromkeys(self._all, actions[0])
        whole.update(zip(rows, actions, strict=True))
        every: Any = list(whole.values())
        if not self._action_is_array:
            every = self._concatenated(every)
        obs, rewards, terminated, truncated, told = self._step(rows, every)
        obs = obs[some] if self._obs_is_array else [obs[row] for row in rows]
        infos = None if told is None else [told[row] for row in rows]
        return obs, rewards[some], terminated[some], truncated[some], infos

    def step_whole(self, rows: Any, actions: Any) -> Sequence[Any]:
        """Do what `step` does, with an entry for every row."""
        every = np.empty(actions.shape, actions.dtype)
        every[...] = actions[rows[0]]
        every[rows] = actions[rows]
        return self._step(rows, every)

    def _step(self, rows: Sequence[int], actions: Any) -> Sequence[Any]:
        """Take a step with an action for every row of the env; only `rows` are meant to step."""
        if self.mode is AutoresetMode.DISABLED and 1 in self._ended.tobytes():
            self._begin_some([(row, None, {}) for row in self._ended.nonzero()[0].tolist()], {})
        if self._action_is_array:
            actions = np.asarray(actions, dtype=self.action_space.dtype)
        result = self.env.step(actions)
        if not isinstance(result, (tuple, list)) or len(result) != 5:
            raise EnvContractError(
                f"step of {env_name(self.env)} should return (obs, rewards, terminations, "
                f"truncations, infos) as gymnasium's vector envs do, it returned {describe(result)}"
            )
        obs, rewards, terminated, truncated, infos = result
        if type(obs) is not np.ndarray or not self._obs_is_array:
            obs = self._observations(obs)
        if len(obs) != self.num_envs:
            check_rows(self.env, "step", obs, self.num_envs)
        self._first.clear()  # what nobody has asked for before this step is over
        self._seeds.clear()
        begun, self._ended = self._ended, np.logical_or(terminated, truncated)
        if self.mode is AutoresetMode.NEXT_STEP and 1 in begun.tobytes():
            self._note_begun(begun.nonzero()[0].tolist(), obs, infos)
        told: Any = RowInfos(infos, self._all, self.num_envs, _FINAL) if infos else None
        ended: list[int] = []
        if 1 in self._ended.tobytes():
            ended = self._ended.nonzero()[0].tolist()
            self._in_episode[ended] = False
            if self.mode is AutoresetMode.SAME_STEP:
                obs, told = self._note_begun_anew(ended, obs, infos)
        if self._pictures.rows:
            shows_next = self.mode is AutoresetMode.SAME_STEP
            self._pictures.stepped(rows, ended, shows_next=shows_next)
        return obs, rewards, terminated, truncated, told

    def _note_begun(self, begun: list[int], obs: Any, infos: Mapping[str, Any]) -> None:
        """Keep the first observations of rows whose next episodes the step began (NEXT_STEP)."""
        begun = [row for row in begun if not self._in_episode[row]]
        told: Any = RowInfos(infos, begun, self.num_envs) if infos else [{}] * len(begun)
        found = obs[begun] if self._obs_is_array else [own(obs[row]) for row in begun]
        self._first.update(zip(begun, zip(found, told, strict=True), strict=True))

    def _note_begun_anew(
        self, ended: list[int], obs: Any, infos: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Keep the first observations of rows that the step has ended and begun anew (SAME_STEP).

        Returns:
            The step's observations and infos, with those of the ended episodes for these rows.
        """
        final = infos.get("final_obs")
        if final is None:
            raise EnvContractError(
                f"{env_name(self.env)} says that it begins episodes in the step that ends others "
                "(metadata['autoreset_mode']: SameStep), but its infos have no 'final_obs'"
            )
        self._ended[ended] = False
        told = RowInfos(infos, self._all, self.num_envs, _FINAL)
        last = RowInfos(infos.get("final_info") or {}, self._all, self.num_envs)
        for row in ended:
            self._first[row] = own(obs[row]), told[row]
        each: Any = obs.copy() if self._obs_is_array else list(obs)
        for row in ended:
            each[row] = final[row] if not isinstance(final, Mapping) else indexed(final, row)
        instead = {row: last[row] for row in ended}
        return each, RowInfos(infos, self._all, self.num_envs, _FINAL, instead)

    def _concatenated(self, actions: list[Any]) -> Any:
        """Return an action for each row in the form that the env takes."""
        space = self.env.single_action_space
        empty: Any = create_empty_array(space, self.num_envs)
        return concatenate(space, actions, empty)

    def _observations(self, obs: Any) -> Any:
        """Return the observations of all rows: an array, or a list."""
        if self._obs_is_array:
            if not isinstance(obs, np.ndarray):
                obs = np.asarray(obs)
            return obs
        return list(iterate(self.env.observation_space, obs))

    # -- the rest ---------------------------------------------------------------------------

    def close(self) -> None:
        """Close the env."""
        self.env.close()

    def attribute(self, row: int, name: str) -> Any:
        """Return an attribute of a row's env if rows are separate envs, else of the vector env.

        `render` returns the row's part of what the env renders, and saved pictures show the row.
        """
        if name in ("observation_space", "action_space", "reward_space", "metadata"):
            return getattr(self, name)
        if name == "render":
            return lambda mode=None: self.env.render()[row]
        if name in ("enable_save_replay", "enable_save_figure"):
            pictures = self._pictures.of(row, self.first_env_id + row)
            return pictures.save_videos if name.endswith("replay") else pictures.save_figures
        env = self._env_of(row)
        return getattr(self.env, name) if env is None else env.get_wrapper_attr(name)

    def set_attribute(self, row: int, name: str, value: Any) -> None:
        """Set an attribute of a row's env, if rows are separate envs.

        Raises:
            EnvAttributeError: rows are not separate envs.
        """
        env = self._env_of(row)
        if env is None:
            super().set_attribute(row, name, value)
        else:
            set_through_wrappers(env, name, value)

    def _env_of(self, row: int) -> Any:
        envs = getattr(getattr(self.env, "unwrapped", self.env), "envs", None)
        return envs[row] if isinstance(envs, list) and len(envs) == self.num_envs else None
