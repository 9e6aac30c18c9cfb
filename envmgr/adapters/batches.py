"""All envs of a manager in every step, as rows: the base of adapters for synchronous trainers."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy.typing as npt

from envmgr.adapters.on_failure import raise_in_trainer, raises
from envmgr.adapters.rows import PlainInfos, RowIds, Rows, joined
from envmgr.env.agent_rows import refuse_agents
from envmgr.errors import (
    ConfigError,
    EnvFailure,
    EnvManagerError,
    EnvNotReadyError,
    UnknownEnvError,
)
from envmgr.manager import ArrayBatch, EnvManager
from envmgr.outcomes import failure_in
from envmgr.spaces import rows_of
from envmgr.spaces.reading import Unreadable, read_list
from envmgr.types import Once


def each_seed(seed: Any, n: int) -> list[Any] | None:
    """Return the seed of each of n envs, or None if no seed is given.

    Raises:
        ConfigError: `seed` is neither an int nor a list with one seed for each env.
    """
    if seed is None:
        return None
    if isinstance(seed, numbers.Integral):
        return [int(seed) + i for i in range(n)]
    try:
        seeds = read_list(seed)
    except Unreadable as error:
        raise ConfigError(f"seed should be an int, or a list of {n}, but {error}") from error
    if len(seeds) != n:
        raise ConfigError(
            "If seeds are passed as a list the length must match "
            f"num_envs={n} but got length={len(seeds)}."
        )
    return seeds


class Step:
    """A step of the trainer: from before it is sent until the trainer has been given its results.

    Args:
        env_ids: the envs that take the step.
        note: what the adapter keeps with the step.

    Attributes:
        env_ids: see above.
        note: see above.
        is_sent: whether the manager is known to have accepted it; if not, the manager has to be
            asked.
        batches: the batches that the manager has delivered for it.
        rows: all of these as rows, once they are complete.
        ends: copies of the terminal observations in `rows`.
        result: what the adapter has made of it.
    """

    __slots__ = ("batches", "ends", "env_ids", "is_sent", "note", "result", "rows")

    def __init__(self, env_ids: RowIds, note: Any = None) -> None:
        self.env_ids = env_ids
        self.note = note
        self.is_sent = False
        self.batches: list[ArrayBatch] = []
        self.rows: Rows | None = None
        self.ends: Any = None
        self.result: Any = None


class FixedBatches:
    """Steps and resets of all envs of a manager: each step of the trainer has all its rows.

    If the manager is not launched, the first `reset` launches it, with the seeds and options of
    that reset: no env is reset twice. `close` closes the manager.

    With `on_failure="recover"`, a step in which an env fails ends its episode: it is truncated,
    with the last good observation, reward 0.0, and an info with `abnormal=True` and `error`, which
    is text. With "raise", the exception is raised: see `on_failure.raise_in_trainer`.

    Args:
        manager: a manager of any kind; with kinds that gather only some timesteps, all are
            gathered.
        adapter: the public name of the adapter, for messages.
        on_failure: "recover", "raise", or None: what the manager does.
        auto_reset: the `auto_reset` that the manager must have: False for trainers that reset each
            env themselves.

    Raises:
        ConfigError: `manager` is not a manager, or its config does not fit; the message says what
            to change.

    What Ctrl-C leaves of a call is found out without counters beside the manager's: a step is noted
    before it is sent, and the manager, whose calls are never half done, is asked whether it was
    sent. The last thing that an adapter does before it returns is one assignment, which notes that
    the trainer has been given the results of `step`, or the first observations of envs that were
    `unseen`.

    Attributes:
        manager: the manager.
        n: number of envs.
        step: the step whose results the trainer has not been given; None if there is none. See
            `is_stepping`.
        unseen: the envs whose reset was asked for, and whose first observations the trainer has not
            been given: all envs at first, and those of a reset that Ctrl-C interrupted. They have
            to be reset.
        lost: the envs of a step that ended with an exception, until they are reset: nobody has seen
            how the step ended for them.
    """

    def __init__(
        self,
        manager: EnvManager,
        *,
        adapter: str,
        on_failure: str | None = None,
        auto_reset: bool = True,
    ) -> None:
        if not isinstance(manager, EnvManager):
            raise ConfigError(
                f"{adapter} takes a manager, such as make(...) returns, found "
                f"{type(manager).__name__}"
            )
        config = manager.cfg
        _refuse_losing_rows(config, adapter)
        if config.auto_reset != auto_reset:
            raise ConfigError(
                f"{adapter} needs a manager with auto_reset: {str(auto_reset).lower()} for this "
                f"(it has {str(config.auto_reset).lower()}): "
                + ("episodes begin by themselves" if auto_reset else "the trainer resets its envs")
            )
        self.manager = manager
        self._adapter = adapter
        self.n = manager.env_num
        self._raises = raises(on_failure, config.on_failure)
        self._all = list(range(self.n))
        self.step: Step | None = None
        self.unseen: frozenset[int] = frozenset(self._all)
        self.lost: frozenset[int] = frozenset()

    # -- resets -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def built(self) -> Iterator[None]:
        """Build the envs, unless they are built, so that what is wrong with them is known now.

        If that fails, or the body of the `with` statement does, what was built here is closed.

        Raises:
            ConfigError: they are multi-agent envs, whose observations are not rows.
            EnvManagerError: as in `EnvManager.launch`.
        """
        is_ours = self.manager.closed
        try:
            try:
                self.manager.build()
            except EnvManagerError as error:
                self.fail(error)
            refuse_agents(self.manager.observation_space, self._adapter)
            yield
        except BaseException:
            if is_ours:
                self.close()
            raise

    def reset(
        self,
        env_ids: Sequence[int] | None = None,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        begun: Sequence[int] = (),
    ) -> None:
        """Begin new episodes and wait for their first observations, which `first_obs` returns.

        A step that is under way is cancelled. The envs are `unseen` until the adapter has given
        their observations to the trainer.

        Args:
            env_ids: the envs in which they begin; None for all.
            seed: an int gives env i exactly `seed + i`; a list has one seed for each env of the
                manager; None, also in the list, leaves the generator of an env as it is.
            options: the options of these resets and no others, or a list with the options of each
                env of the manager.
            begun: envs whose episode has ended and whose next one has begun, with its first
                observation not yet read: those of them that get neither a seed nor options are not
                reset again.

        Raises:
            EnvManagerError: as in `EnvManager.launch` and `reset`; with on_failure "raise", what
                `on_failure.raise_in_trainer` raises for it.
        """
        ids = self._all if env_ids is None else list(env_ids)
        seeds = None if seed is None else each_seed(seed, self.n)
        given = [options] * self.n if options is None or isinstance(options, Mapping) else options
        if len(given) != self.n:
            raise ConfigError(f"options: a dict, or {self.n} of them, are needed, not {len(given)}")
        self._refuse_part_of_step(ids)
        before = self.unseen
        self.unseen = before.union(ids)  # first: Ctrl-C may come in the midst of it
        try:
            if seeds is not None:
                self.manager.seed({i: seeds[i] for i in ids})
            seeded = () if seeds is None else [i for i in ids if seeds[i] is not None]
            ids = [i for i in ids if i not in begun or i in seeded or given[i]]
            params = {i: Once(its) if (its := given[i]) else None for i in ids}
            if self.manager.closed:
                self.manager.launch(params)
            elif ids:
                self.manager.reset(params)
        except (ConfigError, UnknownEnvError):  # of the arguments: nothing was reset
            self.unseen = before
            raise
        except EnvManagerError as error:
            self.fail(error)
        self.step = None  # its timesteps were discarded

    def _refuse_part_of_step(self, env_ids: Sequence[int]) -> None:
        """Raise if a reset would discard only a part of the step that is under way.

        Raises:
            EnvNotReadyError: it would do so; nothing was reset.
        """
        step = self.step
        if step is None or not self.is_stepping:
            return
        others = sorted({int(env_id) for env_id in step.env_ids}.difference(env_ids))
        if others:
            raise EnvNotReadyError(
                f"the step that Ctrl-C has ended is under way in envs {others}, too, which are not "
                "to be reset: take its results with `step_wait()` (`step(None)` in tianshou), or "
                "discard it in all envs with a `reset()` without a mask"
            )

    def first_obs(self, env_ids: Sequence[int] | None = None) -> Any:
        """Return the observations that the next episodes begin with: (k, *shape), or a tree."""
        try:
            return self.manager.ready_arrays(self._all if env_ids is None else env_ids).obs
        except EnvManagerError as error:
            self.fail(error)

    def first_infos(self, env_ids: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Return the infos of the resets that began the current episodes of these envs."""
        return self.manager.reset_infos(self._all if env_ids is None else env_ids)

    # -- steps ------------------------------------------------------------------------------

    @property
    def is_stepping(self) -> bool:
        """Whether a step is under way: it was sent, and the trainer does not have its results yet.

        If Ctrl-C interrupted `send`, the manager is asked: it has accepted either all of the
        actions or none.
        """
        step = self.step
        if step is None:
            return False
        if self.manager.closed:
            step.is_sent = False
        elif not step.is_sent:
            step.is_sent = not set(self.manager.pending_env).isdisjoint(step.env_ids)
        if not step.is_sent:
            self.step = None
        return step.is_sent

    def send(self, actions: Any, env_ids: RowIds | None = None, note: Any = None) -> None:
        """Send one action to each of `env_ids` (None for all); from now on, `step` is this step.

        Args:
            actions: (k, *shape), or a dict or tuple of such, or a list of k actions.
            env_ids: the envs, ascending; if there are none, the step consists only of the
                beginnings of episodes.
            note: what the adapter wants to keep with this step.
        """
        ids: Any = self._all if env_ids is None else env_ids
        self.step = step = Step(ids, note)  # before: what Ctrl-C leaves is looked up by it
        if len(ids):
            try:
                self.manager.send_arrays(ids, actions)
            except EnvManagerError:  # refused, whole: what is pending is no step of this
                self.step = None
                raise
        step.is_sent = True

    def receive(self, timeout_s: float | None = None) -> Rows | None:
        """Return the timesteps of all actions that were sent, or None if they take too long.

        Further calls return the same timesteps until the adapter sets `step` to None, which says
        that the trainer has them: what a step has received is not lost when Ctrl-C interrupts it.

        Args:
            timeout_s: seconds to wait. What has arrived by then is kept for the next call.
        """
        step = self.step
        if step is None:
            raise EnvNotReadyError("no step is under way: there is nothing to receive")
        if step.rows is None:
            step.rows = self._receive(step, timeout_s)
        return step.rows

    def _receive(self, step: Step, timeout_s: float | None) -> Rows | None:
        batches = step.batches
        missing = len(step.env_ids)
        if batches:
            missing -= sum(len(batch.env_ids) for batch in batches)
        if missing:
            self._keep(batches, missing, timeout_s)
            if len(batches[-1].env_ids) < missing:
                return None
        if self._raises and (failure := self.failure_in(*batches)) is not None:
            self.step = None  # it ends with the exception
            self._lose()
            self.fail(failure)
        if len(batches) == 1:
            return self.rows_of(batches[0])
        return joined([(one.env_ids, self.rows_of(one)) for one in batches if len(one.env_ids)])

    def _keep(self, batches: list[ArrayBatch], min_ready: int, timeout_s: float | None) -> None:
        """Gather timesteps into a list in one go, so that Ctrl-C cannot lose any on the way."""
        try:
            batches.extend(map(self.manager.recv_arrays, (min_ready,), (timeout_s,)))
        except EnvManagerError as error:
            if self.manager.closed:
                self._lose()
            self.fail(error)

    def _lose(self) -> None:
        """Note that a step has ended with an exception: nobody has seen its results."""
        self.unseen = self.lost = frozenset(self._all)

    def last_obs(self, rows: Rows) -> Any:
        """Return copies of the terminal observations of `rows.ended`: (k, *shape), or a tree.

        Further calls return the same copies: they do not show what was done to `rows.obs` before
        Ctrl-C.
        """
        step = self.step
        if step is None or step.rows is not rows:
            return rows_of(rows.obs, rows.ended)
        if step.ends is None:
            step.ends = rows_of(rows.obs, rows.ended)
        return step.ends

    def receive_some(
        self, batches: list[ArrayBatch], min_ready: int, timeout_s: float | None = None
    ) -> ArrayBatch:
        """Return timesteps of some of the actions that were sent, ascending by env.

        Args:
            batches: the list that keeps them. The adapter empties it when it is done with them; if
                Ctrl-C came before that, it still holds those of the last call.
            min_ready: how many to wait for.
            timeout_s: seconds after which it returns what has arrived, if anything has.
        """
        while not batches or not len(batches[0].env_ids):
            batches.clear()
            self._keep(batches, min_ready, timeout_s)
        return batches[0]

    def rows_of(self, batch: ArrayBatch) -> Rows:
        """Return timesteps as rows."""
        obs, rewards, terminated, truncated = batch[1:5]
        infos = PlainInfos(batch) if batch.has_infos else None
        return Rows(obs, rewards, terminated, truncated, infos, batch.ended.tolist())

    def refuse_several_rewards(self, rewards: npt.NDArray[Any]) -> None:
        """Refuse rewards of several numbers, for a trainer that takes one for each env.

        Args:
            rewards: the rewards of `Rows`.

        Raises:
            ConfigError: they have several numbers each.
        """
        if rewards.ndim != 1 or rewards.dtype.kind == "O":
            found = f"the shape {rewards.shape[1:]}" if rewards.ndim > 1 else "several shapes"
            raise ConfigError(
                f"{self._adapter} takes one number as the reward of a step, and the rewards of "
                f"these envs have {found}. Wrap each env so that it gives one number; "
                "envmgr.env.AgentRows(env, reward='sum') does so for the rewards of agents"
            )

    def failure_in(self, *batches: ArrayBatch) -> EnvFailure | None:
        """Return the first failure in timesteps that is to be raised in the trainer, if any."""
        if self._raises:
            for batch in batches:
                for position in batch.abnormal:
                    failure = failure_in(batch.infos[position])
                    if failure is not None:
                        return failure
        return None

    # -- the rest ---------------------------------------------------------------------------

    def ask(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the manager that reaches its envs; raise an env's exception as such."""
        if self.manager.closed:  # until now the envs are only built
            self.reset()
        try:
            return getattr(self.manager, method)(*args, **kwargs)
        except EnvFailure as failure:
            raise_in_trainer(failure)

    def fail(self, error: EnvManagerError) -> NoReturn:
        """Raise an error of the manager, in the form that `on_failure` asks for."""
        if self._raises:
            raise_in_trainer(error)
        raise error

    def close(self, timeout_s: float | None = None, *, terminate: bool = False) -> None:
        """Close the manager, whatever has failed before."""
        self.step = None  # it may have views of what is released now
        self.unseen = frozenset(self._all)
        self.manager.close(timeout_s, terminate)


def _refuse_losing_rows(config: Mapping[str, Any], adapter: str) -> None:
    if config["on_exhausted"] == "drop":
        raise ConfigError(
            f"{adapter} needs every env in every step, and with on_exhausted: drop the manager "
            "goes on without those that fail too often. Take on_exhausted: raise"
        )
    if not math.isinf(config["episode_num"]):
        raise ConfigError(
            f"{adapter} needs every env in every step, and with episode_num: "
            f"{config['episode_num']} envs stop after so many episodes. Leave episode_num at .inf "
            "and have the trainer count"
        )
