"""From the env factories of a manager to one vector env with a row for each."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from envmgr.config import ManagerConfig
from envmgr.config.env_factories import ConfiguredEnv
from envmgr.config.kind_sections import GymVector
from envmgr.config.merge import to_plain
from envmgr.env import BatchedEnvSpec, VectorBatch
from envmgr.env.contract import EnvContractError, describe
from envmgr.env.vector_forms import is_vector_env
from envmgr.errors import ConfigError
from envmgr.interpreters import clean_children
from envmgr.types import EnvFactory


@dataclass(frozen=True)
class VectorFactory:
    """A factory of the vector env of a manager.

    Attributes:
        factories: the factories of its rows; or a single one, of the vector env itself.
        size: how many rows it is to have.
        options: see `GymVector`.
        at_once: whether rows are reset within the step that ends their episode.
    """

    factories: tuple[EnvFactory, ...]
    size: int
    options: GymVector = field(default_factory=GymVector)
    at_once: bool = False

    def __call__(self) -> VectorBatch:
        """Return a new vector env, as a batched env.

        Raises:
            EnvContractError: the factories build something other than gymnasium envs.
        """
        with clean_children():  # a file may name the start method of their processes
            return self._built()

    def _built(self) -> VectorBatch:
        registered = _registered(self.factories) if self.options.autoreset_mode is None else None
        mode = self.options.vectorization_mode
        if registered is not None and mode in (None, "vector_entry_point"):
            return self._batch(self._as_registered(*registered))
        if len(self.factories) == 1:
            built = self.factories[0]()
            if is_vector_env(built):
                return self._batch(built)
            if mode != "async":
                return self._batch(self._stacked([partial(_the_same, built)]))
            if isinstance(built, gymnasium.Env):
                built.close()  # it is built again where it runs
        return self._batch(self._stacked([partial(_gymnasium_env, f) for f in self.factories]))

    def _batch(self, env: Any) -> VectorBatch:
        try:
            at_once = self.at_once and _begins_with_next_step(env)
            return VectorBatch(env, at_once=at_once)
        except BaseException:
            env.close()
            raise

    def _as_registered(self, source: EnvSpec, kwargs: Mapping[str, Any]) -> Any:
        return gymnasium.make_vec(
            source,
            num_envs=self.size,
            vectorization_mode="vector_entry_point",
            **to_plain(kwargs),
            **to_plain(self.options.vector_kwargs),
        )

    def _stacked(self, factories: Sequence[EnvFactory]) -> Any:
        options = self.options
        kind: Any = gymnasium.vector.SyncVectorEnv
        if options.vectorization_mode == "async":
            kind = gymnasium.vector.AsyncVectorEnv
        mode = options.autoreset_mode or "Disabled"
        return kind(factories, autoreset_mode=mode, **to_plain(options.vector_kwargs))


def _begins_with_next_step(env: Any) -> bool:
    mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    return getattr(mode, "value", mode) == "NextStep"


def _the_same(env: Any) -> Any:
    return env


def _gymnasium_env(factory: EnvFactory) -> Any:
    env = factory()
    if isinstance(env, gymnasium.Env):
        return env
    if is_vector_env(env):
        raise EnvContractError(
            f"a factory of type: gym_vector returned a vector env ({type(env).__name__}), but "
            "env_fn has one for each row. Give it once, and manager.env_num its number of rows"
        )
    raise EnvContractError(
        f"type: gym_vector drives gymnasium envs, a factory returned {describe(env)}. Other envs "
        "run under type: base"
    )


def _registered(factories: Sequence[EnvFactory]) -> tuple[EnvSpec, Mapping[str, Any]] | None:
    """Return the registration that factories have in common, if it has a vector form."""
    first = factories[0]
    if not isinstance(first, ConfiguredEnv) or not isinstance(first.source, EnvSpec):
        return None
    if first.wrappers or first.source.vector_entry_point is None:
        return None
    if first.module is not None:
        importlib.import_module(first.module)
    alike = all(factory is first for factory in factories)
    return (first.source, first.kwargs) if alike else None


def rows_of_vector_env(env_fn: Sequence[EnvFactory], config: ManagerConfig) -> list[EnvFactory]:
    """Return the factories of the rows of one vector env.

    Args:
        env_fn: factories of gymnasium envs, one for each row; or one factory, of the vector env
            (with `env_num` rows); or a `BatchedEnvSpec` for each row.
        config: the config of the manager.

    Raises:
        ConfigError: they do not make one vector env with `env_num` rows.
    """
    if any(isinstance(factory, BatchedEnvSpec) for factory in env_fn):
        return list(env_fn)
    size = config.env_num if len(env_fn) == 1 and config.env_num else len(env_fn)
    options = config.gym_vector or GymVector()
    if options.vectorization_mode == "vector_entry_point" and _registered(env_fn) is None:
        raise ConfigError(
            "manager.gym_vector.vectorization_mode is vector_entry_point, but the envs are not "
            "given by one id that gymnasium has a vector form of (or have wrappers, which it "
            "takes none of). Leave it null, or give sync."
        )
    _refuse_unknown_arguments(options)
    factory = VectorFactory(tuple(env_fn), size, options, config.reset_inplace)
    return [BatchedEnvSpec(factory, size)] * size


def _refuse_unknown_arguments(options: GymVector) -> None:
    if options.vectorization_mode not in ("sync", "async"):
        return
    vector = gymnasium.vector
    kind = vector.SyncVectorEnv if options.vectorization_mode == "sync" else vector.AsyncVectorEnv
    known = [*inspect.signature(kind).parameters]
    for name in options.vector_kwargs:
        if name not in known or name in ("env_fns", "autoreset_mode"):
            raise ConfigError(
                f"manager.gym_vector.vector_kwargs has {name!r}, which {kind.__name__} does not "
                f"take there. It takes {', '.join(known)}; the autoreset mode has a key of its own."
            )
