"""A manager with PufferLib's interface: `async_reset`, `send` and `recv`, for blocks of envs.

Up to version 3, PufferLib had a Python vectorization (`pufferlib.vector`), which version 4 no
longer has. This module has its interface, for trainers and loops that were written for it:
`as_puffer` for a manager, `make` in place of `pufferlib.vector.make`. It imports nothing of
PufferLib.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector.utils import batch_space

from envmgr.adapters import env_functions
from envmgr.adapters.batches import FixedBatches
from envmgr.adapters.rows import Rows
from envmgr.config.env_factories import checked_env_num
from envmgr.errors import ActionError, ConfigError, EnvNotReadyError, ManagerClosedError
from envmgr.manager import ArrayBatch, EnvManager
from envmgr.shortcuts import create_env_manager
from envmgr.spaces.reading import error_text

__all__ = ["DriverEnv", "PufferVecEnv", "as_puffer", "make"]


def as_puffer(
    manager: EnvManager, *, batch_size: int | None = None, on_failure: str | None = None
) -> PufferVecEnv:
    """Return a manager with the interface of `pufferlib.vector.Multiprocessing`.

    Args:
        manager: a manager with `auto_reset` and without `episode_num`; the first reset launches it.
            With `reset_inplace: true`, slow resets of one block do not hold up the others.
        batch_size: how many envs each `recv` returns, a divisor of their number; None for all.
        on_failure: "recover": the episode of an env that fails is truncated, and the env repaired;
            "raise": the exception is raised in the trainer; None: what the manager does.

    Raises:
        ConfigError: the manager's config or a space does not fit; the message says what to do.
        LaunchError: an env cannot be built.
    """
    return PufferVecEnv(manager, batch_size=batch_size, on_failure=on_failure)


def make(
    env_creator_or_creators: Callable[..., Any] | Sequence[Callable[..., Any]],
    env_args: Sequence[Any] | None = None,
    env_kwargs: Any = None,
    *,
    num_envs: int = 1,
    num_workers: int | None = None,
    batch_size: int | None = None,
    on_failure: str | None = None,
    **cfg: Any,
) -> PufferVecEnv:
    """Build envs in worker processes; takes the place of `pufferlib.vector.make`.

    Args:
        env_creator_or_creators: a function that builds one `gymnasium.Env`, or a list with one such
            creator for each env.
        env_args: arguments for the creator; for a list of creators, a list with those of each.
        env_kwargs: keyword arguments for the creator; likewise.
        num_envs: number of envs.
        num_workers: how many processes share the envs; None: one process for each.
        batch_size: see `as_puffer`.
        on_failure: see `as_puffer`.
        **cfg: further keys of the manager's config, such as `step_timeout=10.0`.

    Raises:
        ConfigError: the arguments do not fit.
        LaunchError: an env cannot be built.
    """
    num_envs = checked_env_num(num_envs, "num_envs")
    if callable(env_creator_or_creators):
        creators = [env_creator_or_creators] * num_envs
        args, kwargs = [env_args or ()] * num_envs, [env_kwargs or {}] * num_envs
    else:
        creators = list(env_creator_or_creators)
        args = list(env_args or [()] * num_envs)
        kwargs = list(env_kwargs or [{}] * num_envs)
    if not len(creators) == len(args) == len(kwargs) == num_envs:
        raise ConfigError(
            f"num_envs is {num_envs}, found {len(creators)} creators, {len(args)} lists of "
            f"arguments and {len(kwargs)} of keyword arguments: give one of each for each env"
        )
    parts = list(zip(creators, args, kwargs, strict=True))
    for _, its, named in parts:
        if not isinstance(its, (list, tuple)) or not isinstance(named, Mapping):
            raise ConfigError(
                "the arguments of an env should be a list and a dict (env_args, env_kwargs), "
                f"found {its!r} and {named!r}"
            )
    env_fn = [functools.partial(creator, *its, **named) for creator, its, named in parts]
    given = {"type": "subprocess", "reset_inplace": True, "num_workers": num_workers}
    manager = create_env_manager({**given, **cfg}, env_fn=env_fn)
    return PufferVecEnv(manager, batch_size=batch_size, on_failure=on_failure, adapter="make")


class DriverEnv:
    """What all envs have in common, for policies, and the rendering of env 0.

    Args:
        manager: the manager of the envs.

    Attributes:
        observation_space: the space of one env; `single_observation_space` is the same.
        action_space: the space of one env; `single_action_space` is the same.
        num_agents: 1.
        emulated: False: observations are as the envs give them.
        render_mode: the render mode of the envs.
    """

    num_agents = 1
    emulated = False

    def __init__(self, manager: EnvManager) -> None:
        self._manager = manager
        self.observation_space = self.single_observation_space = manager.observation_space
        self.action_space = self.single_action_space = manager.action_space
        self.render_mode = manager.render_mode

    def render(self) -> Any:
        """Return what env 0 renders; it must have no step under way."""
        return self._manager.call("render", env_ids=0)[0]


class Received(NamedTuple):
    """What `PufferVecEnv.recv` returns: k envs after a step.

    Attributes:
        observations: (k, *shape).
        rewards: (k,) float32.
        terminals: (k,) bool.
        truncations: (k,) bool.
        infos: the infos that are not empty; the info of a failed env has its `env_id`.
        env_ids: (k,), consecutive.
        masks: (k,) bool: all True.
    """

    observations: npt.NDArray[Any]
    rewards: npt.NDArray[np.float32]
    terminals: npt.NDArray[np.bool_]
    truncations: npt.NDArray[np.bool_]
    infos: list[dict[str, Any]]
    env_ids: npt.NDArray[np.int64]
    masks: npt.NDArray[np.bool_]


class Block:
    """One step of some envs, from the actions that are sent to them to its results.

    Args:
        first: the first env_id.
        size: the number of envs, whose env_ids are consecutive.
        keeps: whether what is received may be kept without a copy.
        begins: (size,) which envs show the first observations of their episodes in this step.

    Attributes:
        env_ids: (size,).
        begins: see above.
        terminals: (size,).
        truncations: (size,).
    """

    def __init__(
        self, first: int, size: int, *, keeps: bool, begins: npt.NDArray[np.bool_]
    ) -> None:
        self.env_ids = np.arange(first, first + size)
        self._first, self._size, self._keeps = first, size, keeps
        self.begins = begins
        self.terminals, self.truncations = np.zeros((2, self._size), np.bool_)
        self._awaited = ~begins
        self._obs: npt.NDArray[Any] | None = None
        self._rewards = np.zeros(self._size, np.float32)
        self._infos: list[dict[str, Any]] = [{}] * self._size

    def next(self, begins: npt.NDArray[np.bool_]) -> Block:
        """Return the next step of these envs."""
        return Block(self._first, self._size, keeps=self._keeps, begins=begins)

    @property
    def n_awaited(self) -> int:
        """How many envs have a step under way."""
        return int(np.count_nonzero(self._awaited))

    def put(self, env_ids: Sequence[int], rows: Rows, positions: npt.NDArray[np.intp]) -> None:
        """Store the rows at some positions, which belong to envs of this block."""
        places = np.asarray(env_ids) - self._first
        if self._keeps and len(rows.rewards) == len(places) == self._size:  # ascending, and all
            self._obs = rows.obs
        else:
            self._show(places, rows.obs[positions])
        self._rewards[places] = rows.rewards[positions]
        self.terminals[places] = rows.terminated[positions]
        self.truncations[places] = rows.truncated[positions]
        if rows.infos is not None:
            for place, position in zip(places.tolist(), positions.tolist(), strict=True):
                self._infos[place] = rows.infos[position]
        self._awaited[places] = False

    def show(self, obs: npt.NDArray[Any], infos: Sequence[dict[str, Any]]) -> None:
        """Store the first observations, and infos, of the envs whose episodes begin."""
        places = np.flatnonzero(self.begins)
        self._show(places, obs)
        for place, info in zip(places.tolist(), infos, strict=True):
            self._infos[place] = info

    def _show(self, places: npt.NDArray[np.intp], obs: npt.NDArray[Any]) -> None:
        if self._obs is None:
            self._obs = np.empty((self._size, *obs.shape[1:]), obs.dtype)
        self._obs[places] = obs

    def received(self) -> Received:
        """Return what has arrived, once something has for all envs of this block."""
        obs: Any = self._obs
        infos = [
            {**info, "env_id": env_id} if info.get("abnormal") else info
            for env_id, info in zip(self.env_ids.tolist(), self._infos, strict=True)
            if info
        ]
        masks = np.ones(self._size, np.bool_)
        columns = obs, self._rewards, self.terminals.copy(), self.truncations.copy()
        return Received(*columns, infos, self.env_ids.copy(), masks)


class Turn(NamedTuple):
    """Whose turn it is; replaced as a whole.

    Attributes:
        at_work: the blocks that have steps under way.
        received: the block that the trainer was given last, and sends actions to next.
    """

    at_work: list[Block]
    received: Block | None


_NOBODY = Turn([], None)


class PufferVecEnv:
    """All envs of a manager in blocks; see `as_puffer`.

    Envs 0 to `batch_size - 1` are the first block, and so on. `recv` returns a block whose steps
    have all arrived, and `send` takes the actions for it: while the trainer works on one block, the
    others step. The step after the end of an episode returns the first observation of the next one,
    with reward 0, and its action is not used.

    Args:
        manager: the manager; if it is not launched, the first reset does that. `close` closes it.
        batch_size: see `as_puffer`.
        on_failure: see `as_puffer`.
        adapter: the public name of this adapter, for messages.

    Attributes:
        manager: the manager.
        driver_env: has the spaces for a policy, and `render`.
        num_agents: number of envs.
        num_envs: number of envs in a block; `agents_per_batch` is the same.
        single_observation_space: the space of one env; `observation_space` is that of a block.
        single_action_space: likewise.
        agent_ids: (num_agents,) env_ids.
        emulated: False: observations are as the envs give them.
    """

    emulated = False

    def __init__(
        self,
        manager: EnvManager,
        *,
        batch_size: int | None = None,
        on_failure: str | None = None,
        adapter: str = "as_puffer",
    ) -> None:
        self._batches = batches = FixedBatches(manager, adapter=adapter, on_failure=on_failure)
        self.manager = manager
        self.num_agents = n = batches.n
        size: Any = n if batch_size is None else batch_size
        is_whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
        if not is_whole or size < 1 or n % size:
            raise ConfigError(
                f"{adapter}: batch_size should be a divisor of the {n} envs, found {batch_size}"
            )
        self.num_envs = self.agents_per_batch = size = int(size)
        with batches.built():
            _refuse_spaces(adapter, manager)
            self.driver_env = DriverEnv(manager)
        self.single_observation_space = manager.observation_space
        self.single_action_space = manager.action_space
        self.observation_space = batch_space(self.single_observation_space, size)
        self.action_space = batch_space(self.single_action_space, size)
        self.agent_ids = np.arange(n)
        keeps = manager.cfg.copy_on_get is True
        all_of = np.ones(size, np.bool_)
        self._first_blocks = [
            Block(first, size, keeps=keeps, begins=all_of) for first in range(0, n, size)
        ]
        self._told: set[int] = set()
        self._turn = _NOBODY
        self._arrived: list[ArrayBatch] = []
        self._closed = False

    # -- resets -----------------------------------------------------------------------------

    def async_reset(self, seed: int | Sequence[int | None] | None = None) -> None:
        """Begin new episodes in all envs; `recv` returns their observations, block by block.

        The call returns when the envs are reset. Steps that are under way are cancelled.

        Args:
            seed: an int gives env i exactly `seed + i`; a list gives one to each; None gives none.
        """
        self._refuse_closed()
        self._batches.reset(seed=seed)
        self._arrived = []
        all_of = np.ones(self.num_envs, np.bool_)
        self._turn = Turn([block.next(all_of) for block in self._first_blocks], None)
        self._batches.unseen = frozenset()  # the last: recv gives them out

    def reset(
        self, seed: int | Sequence[int | None] | None = 42
    ) -> tuple[npt.NDArray[Any], list[dict[str, Any]]]:
        """Reset all envs; return the observations and infos of the first block."""
        self.async_reset(seed)
        received = self.recv()
        return received[0], received[4]

    # -- steps ------------------------------------------------------------------------------

    def send(self, actions: Any) -> None:
        """Send actions to the envs of the block that was received last.

        Args:
            actions: (num_envs, *shape).

        Raises:
            EnvNotReadyError: `recv` has to be called first.
            ActionError: the number or shape is wrong; nothing was sent.
        """
        block = self._present().received
        if block is None:
            self._refuse_closed()
            raise EnvNotReadyError(
                "there are no observations that actions could be for: call recv() first, which "
                "comes before each send()"
            )
        try:
            actions = np.asarray(actions)
        except Exception as error:  # whatever reading them raises
            raise ActionError(f"the actions are no array: {error_text(error)}") from error
        if actions.shape[:1] != (self.num_envs,):
            came = len(actions) if actions.ndim else "no"
            raise ActionError(f"{came} actions came for {self.num_envs} envs")
        begins = block.terminals | block.truncations
        first = int(block.env_ids[0])
        if first in self._told:
            self.manager.apply(env_functions.notify, env_ids=block.env_ids.tolist())
            self._told.discard(first)
        following = block.next(begins)
        if begins.any():
            self._batches.send(actions[~begins], block.env_ids[~begins], following)
        else:
            self._batches.send(actions, block.env_ids, following)
        self._set_to_work(following)

    def _present(self) -> Turn:
        """Return whose turn it is, even after Ctrl-C in a `send`.

        Raises:
            EnvNotReadyError: the envs have to be reset.
        """
        batches = self._batches
        if batches.unseen:
            self._refuse_closed()
            raise EnvNotReadyError(
                "the envs have to be reset first, and after a reset that Ctrl-C has ended: call "
                "async_reset(), then recv() before each send()"
            )
        if batches.step is not None:
            following = batches.step.note
            if batches.is_stepping:
                self._set_to_work(following)
            batches.step = None
        return self._turn

    def _set_to_work(self, block: Block) -> None:
        """Note that a block has been sent its actions; doing so again changes nothing."""
        at_work = self._turn.at_work
        if block not in at_work:
            self._turn = Turn([*at_work, block], None)
        self._batches.step = None

    def recv(self) -> Received:
        """Return a block whose envs have all stepped.

        Returns:
            (observations, rewards, terminals, truncations, infos, env_ids, masks): arrays with a
            row for each env; the infos that are not empty, with `abnormal`, `error` and `env_id`
            for an env that failed; consecutive env_ids; masks that are all True.

        Raises:
            EnvNotReadyError: nothing was sent.
            EnvManagerError: as in `EnvManager.recv`; with on_failure "raise" what an env raised.
        """
        batches, at_work = self._batches, self._present().at_work
        if not at_work:
            self._refuse_closed()
            raise EnvNotReadyError(
                "no envs are at work: call send() before each recv(), or async_reset()"
            )
        arrived = self._arrived
        while True:
            if arrived:  # also what Ctrl-C has kept from being put into the blocks: before all else
                rows = batches.rows_of(arrived[0])
                batches.refuse_several_rewards(rows.rewards)
                self._put(at_work, arrived[0].env_ids.tolist(), rows)
                failure = batches.failure_in(arrived[0])
                arrived.clear()
                if failure is not None:
                    batches.fail(failure)
            block = next((b for b in at_work if not b.n_awaited), None)
            if block is not None:
                break
            batches.receive_some(arrived, min(b.n_awaited for b in at_work))
        begin = block.env_ids[block.begins].tolist()
        if begin:
            block.show(batches.first_obs(begin), batches.first_infos(begin))
        received = block.received()
        # This comes last: now the block is given out.
        self._turn = Turn([b for b in at_work if b is not block], block)
        return received

    def _put(self, at_work: list[Block], env_ids: list[int], rows: Rows) -> None:
        owners = np.asarray(env_ids) // self.num_envs
        for block in at_work:
            positions = np.flatnonzero(owners == block.env_ids[0] // self.num_envs)
            if len(positions):
                block.put([env_ids[p] for p in positions.tolist()], rows, positions)

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Send actions and receive: observations, rewards, terminals, truncations, infos."""
        self.send(actions)
        return self.recv()[:5]

    # -- the rest ---------------------------------------------------------------------------

    def notify(self) -> None:
        """Have each env's method `notify`, if it has one, called before its next step."""
        self._told = {int(block.env_ids[0]) for block in self._first_blocks}

    def close(self) -> None:
        """Close all envs and the manager; the results of steps under way are lost."""
        self._turn, self._arrived = _NOBODY, []
        self._batches.close()
        self._closed = True

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ManagerClosedError("this vec env is closed: build a new one")


def _refuse_spaces(adapter: str, manager: EnvManager) -> None:
    spaces = {"observation": manager.observation_space, "action": manager.action_space}
    for what, space in spaces.items():
        if not isinstance(space, (Box, Discrete, MultiDiscrete, MultiBinary)):
            raise ConfigError(
                f"{adapter}: the {what} space is a {type(space).__name__}, and what is sent and "
                "received is one array. Wrap each env so that it has a Box, Discrete, "
                "MultiDiscrete or MultiBinary, for example in gymnasium.wrappers.FlattenObservation"
            )
