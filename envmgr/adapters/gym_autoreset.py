"""A manager as a Gymnasium vector env: resets and steps in each autoreset mode, and calls."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from gymnasium.error import ResetNeeded
from gymnasium.logger import warn
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from envmgr.adapters import gym_infos
from envmgr.adapters.batches import FixedBatches, Step, each_seed
from envmgr.adapters.gym_arguments import (
    AutoresetMode,
    batched_action_space,
    batched_spaces,
    check_mask,
    checked_mode,
    is_029,
)
from envmgr.adapters.gym_calls import InThread, PendingCall
from envmgr.adapters.rows import InfosWithResets, PlainInfos, Rows, spread
from envmgr.config.schema import as_mapping
from envmgr.errors import ActionError, EnvManagerError, MethodAccessError
from envmgr.manager import EnvManager
from envmgr.spaces import codec_of, put_rows, rows_of
from envmgr.spaces.reading import error_text, read_list

GymStep = tuple[Any, npt.NDArray[Any], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]
GymReset = tuple[Any, dict[str, Any]]
Final = dict[int, tuple[Any, int]]
"""By env_id: the batch and the row in it of a terminal observation that is still being shown."""


_HALVES = "halves"
"""Marks a step begun by `step_async`, which `step_wait` has to finish."""


class ManagerVectorEnv(VectorEnv[Any, Any, Any]):
    """The vector env that `as_gymnasium` returns; the arguments are described there.

    In NEXT_STEP mode, the step after the end of an episode returns the first observation of the
    next one, with reward 0; its action is not used. In SAME_STEP mode, the step that ends an
    episode returns that observation, and the terminal one in `infos["final_obs"]`, beside
    `infos["final_info"]`. In DISABLED mode, envs are reset by
    `reset(options={"reset_mask": mask})`.

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
        self.autoreset_mode = mode = checked_mode(autoreset_mode)
        self._as_029 = is_029(info_format, mode.value)
        batches = FixedBatches(
            manager,
            adapter="as_gymnasium",
            on_failure=on_failure,
            auto_reset=mode is not AutoresetMode.DISABLED,
        )
        self.manager = manager
        self.num_envs = manager.env_num
        self._batches = batches
        self._call = PendingCall(type(self).__name__, self._pending)
        self._resetting: InThread | None = None
        self._results: list[Any] = []
        self._add = gym_infos.adding_as_029(self.num_envs) if self._as_029 else self._add_info
        is_gymnasiums = type(self)._add_info is VectorEnv._add_info
        self._takes_columns = is_gymnasiums and not self._as_029
        self._copies = manager.cfg.copy_on_get is True
        self._final: Final = {}
        self._no_rewards: npt.NDArray[Any] = np.zeros(self.num_envs)
        with batches.built():
            self.spec = manager.spec
            self.render_mode = manager.render_mode
            self.metadata = {**(manager.metadata or {}), "autoreset_mode": mode}
            self.single_action_space = manager.action_space
            self.action_space = batched_action_space([acted for _, acted in manager.env_spaces])
            self.single_observation_space, self.observation_space = batched_spaces(
                observation_mode, [observed for observed, _ in manager.env_spaces]
            )
            self._is_fixed = codec_of(self.single_observation_space).layout is not None

    def _pending(self) -> str | None:
        """Return which call is under way, which is not noted here but looked up."""
        if self._batches.is_stepping:
            return "step"
        if self._results or self.manager.call_is_pending:
            return "call"
        return None if self._resetting is None else "reset"

    # -- resets -----------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> GymReset:
        """Begin new episodes; the results of a step that Ctrl-C interrupted are discarded.

        Args:
            seed: an int gives env i exactly `seed + i`; a list gives one to each; None gives none.
            options: the options of these resets. With `reset_mask`, a bool array (num_envs,), only
                the envs where it is True are reset.

        Returns:
            The observations of all envs, and infos.

        Raises:
            EnvNotReadyError: there is a `reset_mask`, and a step that Ctrl-C interrupted is under
                way in other envs, too.
        """
        step = self._batches.step
        if step is None or step.note is _HALVES:
            self._call.refuse("reset_async")
        seeds, mask, rest = self._reset_arguments(seed, options)
        return self._reset(seeds, mask, rest)

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Begin a `reset` that runs in a thread; `reset_wait` returns its result."""
        self._call.refuse("reset_async")
        arguments = self._reset_arguments(seed, options)
        self._resetting = resetting = InThread(functools.partial(self._reset, *arguments))
        resetting.start()

    def reset_wait(self, timeout: float | None = None) -> GymReset:
        """Return the result of the last `reset_async`.

        Raises:
            CallTimeoutError: the reset takes more than `timeout` seconds. It goes on.
        """
        self._call.require("reset")
        resetting = self._resetting
        if resetting is None or not resetting.has_ended(timeout):
            raise self._call.late(timeout)
        result, error = resetting.value, resetting.error
        self._resetting = None  # the last: it is given out
        if error is not None:
            raise error
        return cast("GymReset", result)

    def _reset_arguments(self, seed: Any, options: Any) -> tuple[Any, Any, dict[str, Any]]:
        n, rest = self.num_envs, as_mapping(options, "options")
        seeds = each_seed(seed, n)
        mask = rest.pop("reset_mask", None)
        if mask is not None:
            check_mask(mask, n)
        return seeds, mask, rest

    def _reset(self, seeds: Any, mask: Any, options: dict[str, Any]) -> GymReset:
        self._call.refuse_closed()  # also in a thread that begins when this is closed already
        batches, n = self._batches, self.num_envs
        ids = list(range(n)) if mask is None else np.flatnonzero(mask).tolist()
        begun = () if self.autoreset_mode is AutoresetMode.DISABLED else tuple(self._final)
        batches.reset(ids, seed=seeds, options=options, begun=begun)
        final = {i: shown for i, shown in self._final.items() if i not in ids}
        if len(ids) == n:
            obs = batches.first_obs()
        else:  # the others show what they showed before
            others = [i for i in range(n) if i not in final]
            parts = [(others, batches.first_obs(others))]
            parts += [([i], rows_of(obs, [k])) for i, (obs, k) in final.items()]
            obs = spread(n, parts)
        by_id = dict(zip(ids, batches.first_infos(ids), strict=True))
        infos = gym_infos.batched((by_id.get(i, {}) for i in range(n)), self._add)
        result = self._shown(obs), infos
        self._final = final
        batches.lost = batches.lost.difference(ids)
        # This comes last: now the observations are seen.
        batches.unseen = batches.unseen.intersection(final) | batches.lost
        return result

    # -- steps ------------------------------------------------------------------------------

    def step(self, actions: Any) -> GymStep:
        """Step all envs.

        Args:
            actions: a batch of actions, as in `action_space`, or a list of actions.

        Returns:
            Observations, rewards (float64), terminations, truncations, and infos by key.

        Raises:
            ResetNeeded: `reset` has to be called first.
            ActionError, TypeError, ValueError: the actions do not fit; no env was stepped.
        """
        self._begin(actions, None)
        return self._step_taken(None)

    def step_async(self, actions: Any) -> None:
        """Send actions; `step_wait` returns the results."""
        self._begin(actions, _HALVES)

    def _begin(self, actions: Any, note: Any) -> None:
        self._call.refuse("step_async")
        if self._batches.unseen:
            self._refuse_unseen()
        n = self.num_envs
        if type(actions) is not np.ndarray or actions.ndim == 0 or actions.dtype == object:
            try:
                actions = read_list(iterate(self.action_space, actions))
            except TypeError:  # as of Gymnasium's own vector envs
                raise
            except Exception as error:  # whatever reading them raises
                raise ActionError(
                    f"{n} actions are needed, in the order of the envs, but {error_text(error)}. "
                    "No env was stepped"
                ) from error
        if len(actions) != n:
            raise ActionError(
                f"{len(actions)} actions were given for {n} envs; no env was stepped. Give one for "
                "each, in the order of the envs"
            )
        if not self._final or self.autoreset_mode is AutoresetMode.DISABLED:
            self._batches.send(actions, note=note)
            return
        goes_on = np.ones(n, dtype=np.bool_)
        goes_on[list(self._final)] = False
        going = goes_on.nonzero()[0]
        if isinstance(actions, list):
            actions = [actions[i] for i in going.tolist()]
        else:
            actions = actions[going]
        self._batches.send(actions, going, note)

    def _refuse_unseen(self) -> None:
        unseen = sorted(self._batches.unseen)
        if len(unseen) == self.num_envs and self.manager.closed:
            raise ResetNeeded("Cannot call env.step() before calling env.reset()")
        raise ResetNeeded(
            f"Cannot call env.step() before calling env.reset(): the observations that envs "
            f"{unseen} begin with were not given out, as when Ctrl-C has ended a reset"
        )

    def step_wait(self, timeout: float | None = None) -> GymStep:
        """Return the results of the last `step_async`, or of a `step` that Ctrl-C interrupted.

        Raises:
            CallTimeoutError: steps take more than `timeout` seconds. They go on.
            ResetNeeded: Ctrl-C interrupted a reset, which has discarded the step.
        """
        self._call.require("step")
        if self._batches.unseen:
            self._refuse_unseen()
        return self._step_taken(timeout)

    def _step_taken(self, timeout: float | None) -> GymStep:
        """Return the results of the step that is under way."""
        step: Any = self._batches.step
        if step is None:  # a signal handler has closed this
            self._call.require("step")
        if step.result is None:  # else Ctrl-C came after it was there
            step.result = self._received(step, timeout)
        if step.result is None:
            raise self._call.late(timeout)
        result: GymStep
        result, self._final = step.result
        self._batches.step = None  # the last: they are given out
        return result

    def _received(self, step: Step, timeout: float | None) -> tuple[GymStep, Final] | None:
        """Return what a step returns, and what is still shown after it; change nothing else."""
        if self.autoreset_mode is AutoresetMode.NEXT_STEP and self._final:
            rows = self._with_resets(step, timeout)
        else:
            rows = self._batches.receive(timeout)
        if rows is None:
            return None
        if rows.ended and self.autoreset_mode is AutoresetMode.SAME_STEP:
            obs, infos = self._with_next_episodes(rows)
            result = self._shown(obs), rows.rewards, rows.terminated, rows.truncated, infos
            return result, {}
        shown = {} if self.autoreset_mode is AutoresetMode.NEXT_STEP else dict(self._final)
        if rows.ended:
            self._no_rewards = np.zeros_like(rows.rewards)
            final = rows_of(rows.obs, rows.ended)
            shown.update((env_id, (final, k)) for k, env_id in enumerate(rows.ended))
        infos = {} if rows.infos is None else self._batched(rows.infos)
        result = self._shown(rows.obs), rows.rewards, rows.terminated, rows.truncated, infos
        return result, shown

    def _batched(self, infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the infos of a step as one dict."""
        found = None
        if self._takes_columns and isinstance(infos, (PlainInfos, InfosWithResets)):
            found = self._in_columns(infos)
        return gym_infos.batched(infos, self._add) if found is None else found

    def _in_columns(self, infos: PlainInfos | InfosWithResets) -> dict[str, Any] | None:
        """Return what `_batched` does, without a loop over envs that go on; None if impossible."""
        n = self.num_envs
        if isinstance(infos, PlainInfos):
            columns = infos.columns
            return None if columns is None else gym_infos.of_columns(columns, n)
        of_rows, begun = infos.of_rows, infos.begun
        columns = of_rows.columns if isinstance(of_rows, PlainInfos) else None
        return None if columns is None else self._with_more(columns, infos.positions, begun)

    def _with_more(
        self, columns: Mapping[str, Any], positions: Any, begun: Mapping[int, dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Return the infos of envs that go on and of envs that begin; None as in `_in_columns`."""
        if not gym_infos.are_like(columns, begun.values()):
            return None
        found = gym_infos.of_columns(columns, self.num_envs, positions)
        return None if found is None else gym_infos.with_more(found, begun.items(), self._add)

    def _with_resets(self, step: Step, timeout: float | None) -> Rows | None:
        """Return a step in which some envs show the first observations of their episodes."""
        n, begun = self.num_envs, sorted(self._final)
        going = cast("npt.NDArray[np.intp]", step.env_ids)
        rows = self._batches.receive(timeout) if len(going) else None
        if len(going) and rows is None:
            return None
        first, begun_infos = self._batches.first_obs(begun), self._batches.first_infos(begun)
        infos: Sequence[dict[str, Any]] | None = None
        if any(begun_infos) or (rows is not None and rows.infos is not None):
            of_rows = None if rows is None else rows.infos
            infos = InfosWithResets(n, dict(zip(begun, begun_infos, strict=True)), going, of_rows)
        if rows is None:
            no = np.zeros((2, n), dtype=np.bool_)
            return Rows(first, self._no_rewards.copy(), no[0], no[1], infos, [])
        return Rows(
            spread(n, [(going, rows.obs), (begun, first)]),
            spread(n, [(going, rows.rewards)]),
            spread(n, [(going, rows.terminated)]),
            spread(n, [(going, rows.truncated)]),
            infos,
            rows.ended,
        )

    def _with_next_episodes(self, rows: Rows) -> tuple[Any, dict[str, Any]]:
        """Return observations and infos after the envs whose episodes ended were reset."""
        n, ended, obs = self.num_envs, rows.ended, rows.obs
        first, begun = self._batches.first_obs(ended), self._batches.first_infos(ended)
        final = self._batches.last_obs(rows)
        if not self._copies:
            obs = rows_of(obs, np.arange(n))
        put_rows(obs, ended, first)
        by_id = dict(zip(ended, begun, strict=True))
        if self._as_029:
            last = [{} if rows.infos is None else rows.infos[i] for i in ended]
            infos = self._with_begun(rows.infos, by_id)
            return obs, {**infos, **gym_infos.final_as_029(n, ended, last, final)}
        infos, last_infos = self._same_step_infos(rows.infos, by_id)
        return obs, {**infos, **gym_infos.final(n, ended, last_infos, final)}

    def _same_step_infos(
        self, infos: Sequence[dict[str, Any]] | None, begun: dict[int, dict[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the infos after some envs were reset, and the last infos of these before that.

        Args:
            infos: the infos of the steps of all envs; None if all of them are empty.
            begun: the infos of resets, by env_id.
        """
        shown = last = None
        columns = infos.columns if self._takes_columns and isinstance(infos, PlainInfos) else None
        if columns is not None:
            n, ended = self.num_envs, list(begun)
            goes_on = np.ones(n, np.bool_)
            goes_on[ended] = False
            going = goes_on.nonzero()[0]
            shown = self._with_more(gym_infos.at_rows(columns, going), going, begun)
            last = gym_infos.of_columns(gym_infos.at_rows(columns, ended), n, ended)
        if shown is None:
            shown = self._with_begun(infos, begun)
        if last is None:
            of_ended = () if infos is None else ((i, infos[i]) for i in begun)
            last = gym_infos.with_more({}, of_ended, self._add)
        return shown, last

    def _with_begun(
        self, infos: Sequence[dict[str, Any]] | None, begun: dict[int, dict[str, Any]]
    ) -> dict[str, Any]:
        """Return infos as one dict, with those of resets in place of some of them."""
        each = begun.items() if infos is None else enumerate(infos)
        return gym_infos.with_more({}, ((i, begun.get(i, info)) for i, info in each), self._add)

    def _shown(self, obs: Any) -> Any:
        """Return observations; those without fixed layout as Gymnasium batches them."""
        return obs if self._is_fixed else _shown(self.single_observation_space, obs)

    # -- calls and attributes ---------------------------------------------------------------

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env, or read an attribute, and return the results by env."""
        self._call.refuse("call_async")
        self._launched()
        try:
            if args or kwargs or self._is_callable(name):
                return tuple(self.manager.call_with(name, args, kwargs))
            return tuple(self.manager.get_attr(name))
        except EnvManagerError as error:
            self._batches.fail(error)

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a `call`; `call_wait` returns its results."""
        self._call.refuse("call_async")
        self._launched()
        try:
            if args or kwargs or self._is_callable(name):
                self.manager.call_async_with(name, args, kwargs)
            else:
                self._results = [self.manager.get_attr(name)]
        except EnvManagerError as error:
            self._batches.fail(error)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Return the results of the last `call_async`.

        Raises:
            CallTimeoutError: the call takes more than `timeout` seconds. It goes on.
        """
        self._call.require("call")
        try:
            if not self._results:  # else Ctrl-C came when they were there
                self._results.extend(map(self.manager.call_wait, (timeout,)))
        except TimeoutError as error:
            if isinstance(error, EnvManagerError):  # of an env, not of this wait
                self._batches.fail(error)
            raise self._call.late(timeout) from None
        except EnvManagerError as error:
            self._batches.fail(error)
        results = tuple(self._results[0])
        self._results = []
        return results

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each env; a method is called, and its result returned."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of the envs.

        Args:
            name: the name of the attribute.
            values: a list or tuple with one value for each env, or one value for all.
        """
        self._call.refuse("set_attr")
        self._launched()
        if isinstance(values, (list, tuple)):
            values = list(values)
            if len(values) != self.num_envs:
                raise ValueError(
                    "Values must be a list or tuple with length equal to the number of "
                    f"environments. Got `{len(values)}` values for {self.num_envs} environments."
                )
        try:
            self.manager.set_attr(name, values)
        except EnvManagerError as error:
            self._batches.fail(error)

    def _launched(self) -> None:
        if self.manager.closed:
            self._batches.reset()

    def _is_callable(self, name: str) -> bool:
        try:
            return callable(self.manager.get_attr(name, env_ids=0)[0])
        except MethodAccessError:
            return True

    def render(self) -> tuple[Any, ...] | None:
        """Return a frame of each env."""
        return self.call("render")

    @property  # type: ignore[misc]  # nobody sets those of the envs here
    def np_random(self) -> Any:
        """The random generators of the envs, as a tuple of copies."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> Any:
        """The seeds of the envs' random generators, as a tuple."""
        return self.get_attr("np_random_seed")

    # -- the end ----------------------------------------------------------------------------

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the envs and the manager.

        Args:
            timeout: seconds that all envs together have to close; None: `close_timeout` of the
                manager. Whatever has not closed by then is terminated.
            terminate: terminate workers at once.
        """
        self._final = {}  # which may be views of the manager's memory
        pending = None if self._call.closed else self._call.name
        if pending is not None:
            warn(f"Calling `close` while waiting for a pending call to `{pending}` to complete.")
        self._call.closed = True
        self._batches.close(timeout, terminate=terminate)
        if self._resetting is not None:
            self._resetting.has_ended()
            # If the reset had just seen that this env is open, it has launched the manager since.
            self._batches.close(timeout, terminate=terminate)

    def __del__(self) -> None:
        """Leave the manager as it is: its user has it, too, but Gymnasium before 1.4 closes it."""


def _shown(space: Any, obs: Any) -> Any:
    """Return a batch whose parts without fixed layout are batched as Gymnasium does it."""
    if isinstance(obs, np.ndarray):
        if obs.dtype != object:
            return obs
        out: Any = create_empty_array(space, len(obs))
        return concatenate(space, list(obs), out)
    if isinstance(obs, Mapping):
        return {key: _shown(space[key], part) for key, part in obs.items()}
    return tuple(map(_shown, space, obs))
