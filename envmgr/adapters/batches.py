"""All envs of a manager in every step, as rows: what adapters for synchronous trainers stand on."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from envmgr.adapters.failures import failure_of, plain_info, raise_in_trainer, raises
from envmgr.adapters.rows import EnvIds, Rows, joined
from envmgr.env.agent_rows import refuse_agents
from envmgr.errors import ConfigError, EnvFailure, EnvManagerError
from envmgr.manager import EnvManager
from envmgr.spaces import rows_of
from envmgr.spaces.reading import Unreadable, read_list
from envmgr.types import Once


def each_seed(seed: Any, n: int) -> list[Any] | None:
    """Return the seed of each of n envs; None for none.

    Raises:
        ConfigError: it is neither an int, nor a list with one for each.
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


class FixedBatches:
    """Steps and resets all envs of a manager, so that each step of the trainer has all its rows.

    The first `reset` launches the manager, with the seeds and options that were given for it, if it
    is not launched: no env is reset twice. `close` closes it.

    With `on_failure="recover"` the step of an env that fails ends its episode: truncated, with the
    last good observation, reward 0.0, and an info with `abnormal=True` and `error`, a text. With
    "raise" the exception is raised: see `failures.raise_in_trainer`.

    Args:
        manager: of any kind; of those that gather some timesteps, all are gathered.
        adapter: the public name of the adapter, for messages.
        on_failure: "recover", "raise", or None: as the manager does.
        auto_reset: what the manager has to be set to: False for trainers that reset each env
            themselves.

    Raises:
        ConfigError: it is no manager, or one whose config does not fit; the message says what to
            change.

    Attributes:
        manager: the manager.
        n: number of envs.
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
        self._parts: list[tuple[npt.NDArray[np.int64], Rows]] = []
        self._n_sent = 0
        self._received: Rows | None = None
        self._ends: tuple[Rows, Any] | None = None

    # -- resets -----------------------------------------------------------------------------

    def build(self) -> None:
        """Build the envs, if they are not, so that what is wrong with them is known now.

        Raises:
            ConfigError: they are multi-agent envs, whose observations are no rows.
            EnvManagerError: as `EnvManager.launch`.
        """
        try:
            self.manager.build()
        except EnvManagerError as error:
            self.fail(error)
        refuse_agents(self.manager.observation_space, self._adapter)

    @contextlib.contextmanager
    def built(self) -> Iterator[None]:
        """Build the envs for what is done inside; if either fails, close what was built here.

        Raises:
            ConfigError, EnvManagerError: as `build`.
        """
        is_ours = self.manager.closed
        try:
            self.build()
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
        """Begin new episodes and wait for their first observations, which `first_obs` gives.

        Args:
            env_ids: in which envs; None for all.
            seed: an int gives env i exactly `seed + i`; a list has one for each of all envs; None,
                also in the list, leaves the generator of an env as it is.
            options: for these resets and no others, or a list with those of each of all envs.
            begun: of these envs an episode has ended, the next one has begun, and its first
                observation was not read: that will do if there is neither seed nor options.

        Raises:
            EnvManagerError: as `EnvManager.launch` and `reset`; with on_failure "raise" what
                `failures.raise_in_trainer` makes of it.
        """
        ids = self._all if env_ids is None else list(env_ids)
        if seed is not None:
            seeds = each_seed(seed, self.n) or ()
            self.manager.seed({i: seeds[i] for i in ids})
        given = [options] * self.n if options is None or isinstance(options, Mapping) else options
        if len(given) != self.n:
            raise ConfigError(f"options: a dict, or {self.n} of them, are needed, not {len(given)}")
        if seed is None and not any(given):
            ids = [i for i in ids if i not in begun]
        params = {i: Once(its) if (its := given[i]) else None for i in ids}
        self._received, self._parts = None, []
        try:
            if self.manager.closed:
                self.manager.launch(params)
            elif ids:
                self.manager.reset(params)
        except EnvManagerError as error:
            self.fail(error)

    def first_obs(self, env_ids: Sequence[int] | None = None) -> Any:
        """Return the observations that the next episodes begin with: (k, *shape), or a tree."""
        try:
            return self.manager.ready_arrays(self._all if env_ids is None else env_ids).obs
        except EnvManagerError as error:
            self.fail(error)

    def first_infos(self, env_ids: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Return the infos of the resets that the present episodes of these envs began with."""
        return self.manager.reset_infos(self._all if env_ids is None else env_ids)

    # -- steps ------------------------------------------------------------------------------

    def send(self, actions: Any, env_ids: EnvIds | None = None) -> None:
        """Send one action to each of `env_ids` (None for all).

        Args:
            actions: (k, *shape), or a dict or tuple of such, or a list of k actions.
            env_ids: which envs, ascending.
        """
        ids = self._all if env_ids is None else env_ids
        self.manager.send_arrays(ids, actions)
        self._received = None
        self._n_sent = len(ids)

    def receive(self, timeout_s: float | None = None) -> Rows | None:
        """Return the timesteps of all actions that were sent, or None if they take too long.

        Until the next `send` or `reset` it returns the same once more: what a step has received is
        not lost when Ctrl-C ends it while it waits for something else.

        Args:
            timeout_s: seconds to wait. What has come until then is kept for the next call.
        """
        if self._received is None:
            self._received = self._receive(timeout_s)
        return self._received

    def _receive(self, timeout_s: float | None) -> Rows | None:
        missing = self._n_sent - sum(len(ids) for ids, _ in self._parts)
        try:
            batch = self.manager.recv_arrays(missing, timeout_s)
        except EnvManagerError as error:
            self.fail(error)
        rows = self._rows_of(batch)
        count = len(batch.env_ids)
        if count == missing and not self._parts:
            return rows
        if count:
            self._parts.append((batch.env_ids, rows))
        if count < missing:
            return None
        parts, self._parts = self._parts, []
        return joined(parts)

    def last_obs(self, rows: Rows) -> Any:
        """Return copies of the terminal observations of `rows.ended`: (k, *shape), or a tree.

        They are the same when they are asked for again: what was done to `rows.obs` before Ctrl-C
        does not change them.
        """
        if self._ends is None or self._ends[0] is not rows:
            self._ends = rows, rows_of(rows.obs, rows.ended)
        return self._ends[1]

    def receive_some(
        self, min_ready: int, timeout_s: float | None = None
    ) -> tuple[list[int], Rows]:
        """Return timesteps of some of the actions that were sent, and whose they are, ascending.

        Args:
            min_ready: how many to wait for.
            timeout_s: after so many seconds what has come will do, if it is anything.
        """
        while True:
            try:
                batch = self.manager.recv_arrays(min_ready, timeout_s)
            except EnvManagerError as error:
                self.fail(error)
            if len(batch.env_ids):
                return batch.env_ids.tolist(), self._rows_of(batch)

    def _rows_of(self, batch: Any) -> Rows:
        obs, rewards, terminated, truncated = batch[1:5]
        told = batch.told
        infos: list[dict[str, Any]] | None = None
        if told:
            infos = [{} for _ in batch.infos]
            for position in told:
                infos[position] = plain_info(batch.infos[position])
            if self._raises:
                self._raise_first_of(batch.infos)
        return Rows(obs, rewards, terminated, truncated, infos, batch.ended.tolist())

    def _raise_first_of(self, infos: Sequence[Any]) -> None:
        for failure in map(failure_of, infos):
            if failure is not None:
                self.fail(failure)

    # -- the rest ---------------------------------------------------------------------------

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Have the manager reach its envs; what an env raises is raised as it was."""
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
        """Close the manager; whatever has failed before."""
        self._received, self._parts, self._ends = (
            None,
            [],
            None,
        )  # which may be views of what is released now
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
