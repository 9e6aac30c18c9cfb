"""The kinds of managers: presets of transport, gather policy and view over the one manager.

The class chain is what users of DI-engine expect from `isinstance`: a SubprocessEnvManagerV2 is a
SyncSubprocessEnvManager, which is an AsyncSubprocessEnvManager, which is a BaseEnvManager.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from envmgr.config import ManagerConfig
from envmgr.core.spares import all_factories
from envmgr.errors import ConfigError
from envmgr.launch import (
    actor_plan_of,
    checked_factories,
    deadlines_of,
    n_hosts_of,
    worker_settings_of,
)
from envmgr.manager import EnvManager
from envmgr.optional_packages import own_part
from envmgr.pools import rows_of_pool
from envmgr.registry import ENV_MANAGER_REGISTRY
from envmgr.transport.base import Transport
from envmgr.transport.inline import InlineTransport
from envmgr.transport.process.preflight import refuse_too_many_workers
from envmgr.transport.process.preloading import PreloadRules, say_that_nothing_is_preloaded
from envmgr.transport.process.start_methods import make_spawner
from envmgr.transport.process.threads import refuse_unsafe_fork
from envmgr.transport.process.transport import ProcessTransport
from envmgr.transport.thread import ThreadTransport
from envmgr.types import EnvFactory
from envmgr.vectorized import rows_of_vector_env
from envmgr.views import DictView, TreeView


@ENV_MANAGER_REGISTRY.register("base")
class BaseEnvManager(EnvManager):
    """Envs in the caller's own thread, one after another; for debugging and for cheap envs.

    Nothing protects the trainer from an env that ends the process or hangs in C code.
    """

    preset: ClassVar[Mapping[str, Any]] = {"type": "base", "wait_num": math.inf}
    _transport_cls: ClassVar[type[Transport]] = InlineTransport

    def _make_transport(self) -> Transport:
        if self._config.preload:
            say_that_nothing_is_preloaded(f"type: {self._config.type}")
        return InlineTransport(deadlines_of(self._config))


class EnvManagerV2(BaseEnvManager):
    """The base of the V2 kinds: the treetensor view, whose forms type checkers do not know."""

    if TYPE_CHECKING:
        ready_obs: Any
        step: Any
        send: Any
        recv: Any
        aready_obs: Any
        astep: Any
        arecv: Any

    def _make_view(self) -> DictView:
        return TreeView()


@ENV_MANAGER_REGISTRY.register("base_v2")
class BaseEnvManagerV2(EnvManagerV2):
    """Like `base`, with the treetensor view."""

    preset: ClassVar[Mapping[str, Any]] = {**BaseEnvManager.preset, "type": "base_v2"}


@ENV_MANAGER_REGISTRY.register("thread")
class ThreadEnvManager(BaseEnvManager):
    """Envs on threads of the trainer's process; for envs that release the GIL, or wait.

    Nothing protects the trainer from an env that ends the process or holds the GIL. A thread that
    hangs in env code is given up and stays alive; its env is renewed on another thread.
    """

    preset: ClassVar[Mapping[str, Any]] = {"type": "thread", "wait_num": math.inf}
    _transport_cls: ClassVar[type[Transport]] = ThreadTransport

    def _make_transport(self) -> Transport:
        return ThreadTransport(shared_memory=self._config.shared_memory)


@ENV_MANAGER_REGISTRY.register("gym_vector")
class GymVectorEnvManager(BaseEnvManager):
    """One `gymnasium.vector.VectorEnv` in the caller's own thread; each of its rows is an env.

    `env_fn` has a factory of a gymnasium env for each row, or one factory of the vector env with
    `env_num` rows.
    """

    preset: ClassVar[Mapping[str, Any]] = {**BaseEnvManager.preset, "type": "gym_vector"}

    def _factories_of(self, env_fn: Any, config: ManagerConfig) -> list[EnvFactory]:
        return rows_of_vector_env(checked_factories(env_fn), config)


@ENV_MANAGER_REGISTRY.register("env_pool")
class PoolEnvManager(BaseEnvManager):
    """An EnvPool (package envpool, extra `envpool`); each of its envs is one of the manager's.

    The pool makes the envs as the config section `env_pool` says, so there is no `env_fn`. Its
    threads step the envs that are given actions.
    """

    preset: ClassVar[Mapping[str, Any]] = {**BaseEnvManager.preset, "type": "env_pool"}
    makes_envs = True

    def __init__(self, env_fn: Any = None, cfg: Any = None, **given: Any) -> None:
        if cfg is None and isinstance(env_fn, Mapping):  # as DI-engine's is built
            env_fn, cfg = None, env_fn
        super().__init__(env_fn, cfg, **given)

    def _factories_of(self, env_fn: Any, config: ManagerConfig) -> list[EnvFactory]:
        return rows_of_pool(env_fn, config)


class _ImportedTransport:
    """A descriptor that gives the transport of the kind `ray`, imported only when it is read."""

    def __get__(self, manager: Any, cls: Any) -> type[Transport]:
        found: type[Transport] = own_part("transport.ray.transport", "type: ray").RayTransport
        return found


@ENV_MANAGER_REGISTRY.register("ray")
class RayEnvManager(BaseEnvManager):
    """Envs on a Ray cluster (extra `ray`): `num_workers` actors share them.

    The config section `ray` says where the actors run, what they take of the cluster, and whether
    each env has a worker process on its node.
    """

    preset: ClassVar[Mapping[str, Any]] = {"type": "ray", "wait_num": math.inf}
    _transport_cls: ClassVar[type[Transport]] = _ImportedTransport()  # type: ignore[assignment]

    def _factories_of(self, env_fn: Any, config: ManagerConfig) -> list[EnvFactory]:
        own_part("transport.ray.cluster", "type: ray").refuse_without_ray()
        if config.num_workers == "auto":
            raise ConfigError(
                "manager.num_workers is auto, which looks at the cores of this machine, but type: "
                "ray runs its hosts on a cluster. Give a number, such as that of its nodes or cores"
            )
        return super()._factories_of(env_fn, config)

    def _make_transport(self) -> Transport:
        make: Any = self._transport_cls
        transport: Transport = make(actor_plan_of(self._config, self._env_fn))
        return transport


@ENV_MANAGER_REGISTRY.register("async_subprocess")
class AsyncSubprocessEnvManager(BaseEnvManager):
    """Each env in a worker process; a step gathers `wait_num` of the outstanding timesteps."""

    preset: ClassVar[Mapping[str, Any]] = {"type": "async_subprocess", "wait_num": 2}
    _transport_cls: ClassVar[type[Transport]] = ProcessTransport

    def _make_transport(self) -> Transport:
        config = self._config
        settings = worker_settings_of(config)
        if config.context == "fork":
            refuse_unsafe_fork()
        # With `auto` one worker tries an env out first; how many there are is known afterwards.
        n_workers = 1 if config.num_workers == "auto" else n_hosts_of(config) or self.env_num
        n_workers += config.spare_env_num
        shared_memory = config.shared_memory
        refuse_too_many_workers(n_workers, config.context, shared_memory=shared_memory)
        rules = PreloadRules(
            () if config.preload is False else config.preload, config.connect_timeout
        )
        factories = all_factories(self._env_fn, config.spare_env_num)
        spawner = make_spawner(config.context, settings, factories, rules)
        if config.preload and not spawner.preloads:
            say_that_nothing_is_preloaded(f"context: {config.context}")
        return ProcessTransport(spawner, settings, shared_memory=shared_memory)


@ENV_MANAGER_REGISTRY.register("subprocess")
class SyncSubprocessEnvManager(AsyncSubprocessEnvManager):
    """Each env in a worker process; a step gathers the timesteps of all actions it was given."""

    preset: ClassVar[Mapping[str, Any]] = {"type": "subprocess", "wait_num": math.inf}


@ENV_MANAGER_REGISTRY.register("async_subprocess_v2")
class AsyncSubprocessEnvManagerV2(EnvManagerV2, AsyncSubprocessEnvManager):
    """Like `async_subprocess`, with the treetensor view."""

    preset: ClassVar[Mapping[str, Any]] = {
        **AsyncSubprocessEnvManager.preset,
        "type": "async_subprocess_v2",
    }


@ENV_MANAGER_REGISTRY.register("subprocess_v2")
class SubprocessEnvManagerV2(EnvManagerV2, SyncSubprocessEnvManager):
    """Like `subprocess`, with the treetensor view."""

    preset: ClassVar[Mapping[str, Any]] = {
        **SyncSubprocessEnvManager.preset,
        "type": "subprocess_v2",
    }
