"""envmgr: dicts or arrays, synchronous or with half of the envs in flight; its adapters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from spec import Runner, Spec, UnavailableError

import envmgr
from adapters.actions import array_batches, list_batches
from envmgr.errors import ConfigError, MissingDependencyError
from envmgr.tuning.loops import GymnasiumLoop, Sb3Loop, TianshouLoop


class _Managed:
    """What the loops have in common: the manager's life."""

    def __init__(self, manager: Any, env_num: int) -> None:
        self._manager = manager
        self._env_num = env_num

    def start(self) -> None:
        """Launch and take the first observations."""
        self._manager.launch()
        while len(self._manager.ready_obs) < self._env_num:
            pass

    def close(self) -> None:
        """Close."""
        self._manager.close()


class DictLoop(_Managed):
    """`step` with a dict: act on the observations that are ready."""

    def __init__(self, manager: Any, env_num: int) -> None:
        super().__init__(manager, env_num)
        self._actions = list_batches(env_num)

    def step(self) -> int:
        """Act on the observations that are ready."""
        obs = self._manager.ready_obs
        timesteps = self._manager.step(dict(zip(obs, next(self._actions), strict=False)))
        for timestep in timesteps.values():
            timestep.obs.item(0)
            break
        return len(timesteps)


class V2Loop(_Managed):
    """`step` with a list: act on the rows of the observations that are ready."""

    def __init__(self, manager: Any, env_num: int) -> None:
        super().__init__(manager, env_num)
        self._actions = list_batches(env_num)

    def step(self) -> int:
        """Act on the observations that are ready."""
        obs = self._manager.ready_obs
        timesteps = self._manager.step(next(self._actions)[: len(obs)])
        timesteps[0].obs.item(0)
        return len(timesteps)


class PipelinedDictLoop(DictLoop):
    """`send` and `recv`: while one half of the envs steps, the other half is handled here."""

    def start(self) -> None:
        """Launch and send the first actions."""
        super().start()
        self._manager.send(dict(enumerate(next(self._actions))))

    def step(self) -> int:
        """Receive half of the envs and send them on."""
        timesteps = self._manager.recv(min_ready=max(1, self._env_num // 2))
        for timestep in timesteps.values():
            timestep.obs.item(0)
            break
        obs = self._manager.ready_obs
        self._manager.send(dict(zip(obs, next(self._actions), strict=False)))
        return len(timesteps)


class ArrayLoop(_Managed):
    """`send_arrays` and `recv_arrays`, all envs together, or half of them in flight.

    Episodes end with the reset done (`reset_inplace`), so that all envs of a batch take the next
    action; the first observations of new episodes come from `ready_arrays`.
    """

    def __init__(self, manager: Any, env_num: int, min_ready: int) -> None:
        super().__init__(manager, env_num)
        self._actions = array_batches(env_num)
        self._min_ready = min_ready

    def start(self) -> None:
        """Launch and send the first actions."""
        super().start()
        self._manager.send_arrays(list(range(self._env_num)), next(self._actions))

    def step(self) -> int:
        """Receive a batch and send its envs on."""
        manager = self._manager
        batch = manager.recv_arrays(min_ready=self._min_ready)
        batch.obs.item(0)
        ended = batch.ended
        if len(ended):
            manager.ready_arrays(ended).obs.item(0)
        env_ids = batch.env_ids
        manager.send_arrays(env_ids, next(self._actions)[: len(env_ids)])
        return len(env_ids)


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return the loop of `options["form"]` over a manager of its `cfg`.

    Forms are `dict`, `arrays` and `v2`; `NextStep` and `SameStep` are modes of `as_gymnasium`;
    `sb3` and `tianshou` are the adapters for these.

    Raises:
        UnavailableError: this envmgr refuses the config, treetensor or a trainer is missing, or
            there is a GIL where none is asked for.
    """
    env_num, options = spec.env_num, spec.options
    if options.get("no_gil") and getattr(sys, "_is_gil_enabled", lambda: True)():
        raise UnavailableError("not run: this Python has a GIL")
    try:
        manager = envmgr.make(factory, env_num, seed=0, **options["cfg"])
        if options["form"] == "sb3":
            vec_env = envmgr.as_sb3(manager)
            return Sb3Loop(lambda: vec_env, env_num, array_batches(env_num))
        if options["form"] == "tianshou":
            vector_env = envmgr.as_tianshou(manager)
            return TianshouLoop(lambda: vector_env, env_num, array_batches(env_num))
    except ConfigError as error:
        raise UnavailableError(f"the config is refused: {error}") from error
    except MissingDependencyError as error:
        raise UnavailableError(str(error)) from error
    if options["form"] in ("NextStep", "SameStep"):
        mode = options["form"]
        return GymnasiumLoop(
            lambda: envmgr.as_gymnasium(manager, mode),
            env_num,
            array_batches(env_num),
            resets_at_once=mode == "SameStep",
        )
    if options["form"] == "v2":
        return V2Loop(manager, env_num)
    pipelined = options.get("pipelined", False)
    if options["form"] == "arrays":
        return ArrayLoop(manager, env_num, max(1, env_num // 2) if pipelined else env_num)
    return (PipelinedDictLoop if pipelined else DictLoop)(manager, env_num)
