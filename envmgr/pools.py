"""From a config to an EnvPool (PyPI `envpool`) that has all envs of a manager."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envmgr.config import ManagerConfig
from envmgr.config.checks import nearest
from envmgr.config.kind_sections import EnvPool
from envmgr.config.merge import to_plain
from envmgr.env import BatchedEnvSpec
from envmgr.env.pool_batch import AsyncPoolBatch, PoolBatch
from envmgr.errors import ConfigError
from envmgr.optional_packages import imported
from envmgr.types import EnvFactory


@dataclass(frozen=True)
class PoolFactory:
    """A factory of the pool of a manager.

    Attributes:
        options: see `EnvPool`.
        size: how many envs the pool has.
        seed: the seed of the first env.
    """

    options: EnvPool
    size: int
    seed: int

    @property
    def batch_size(self) -> int | None:
        """How many envs give their results at a time; None: all those that were sent actions."""
        some = self.options.batch_size
        return None if some == self.size else some

    def __call__(self) -> PoolBatch:
        """Return a new pool, as a batched env."""
        kind = PoolBatch if self.batch_size is None else AsyncPoolBatch
        return kind(self._make, self.seed, self.options.infos)

    def _make(self, seed: int | list[int]) -> Any:
        envpool = imported_envpool()
        options, known = self.options, ("num_threads", *_OF_ATARI)
        given = {key: value for key in known if (value := getattr(options, key)) is not None}
        if self.batch_size is not None:
            given["batch_size"] = self.batch_size
        return envpool.make(
            options.env_id,
            env_type="gymnasium",
            num_envs=self.size,
            seed=seed,
            **given,
            **to_plain(options.kwargs),
        )


_OF_ATARI = ("episodic_life", "reward_clip", "stack_num", "gray_scale", "frame_skip")


def imported_envpool() -> Any:
    """Return the package envpool.

    Raises:
        MissingDependencyError: it is not installed.
    """
    return imported(
        "envpool",
        "type: env_pool needs the package envpool",
        extra="envpool",
        note=". It has wheels for Linux and macOS",
    )


def rows_of_pool(env_fn: Sequence[EnvFactory] | None, config: ManagerConfig) -> list[EnvFactory]:
    """Return the factories of the rows of a pool.

    Args:
        env_fn: None or empty: the pool has its own envs.
        config: the config of the manager.

    Raises:
        ConfigError: the config does not say which envs or how many, or what it says does not fit.
        MissingDependencyError: envpool is not installed.
    """
    options, size = config.env_pool, config.env_num
    if env_fn:
        raise ConfigError(
            f"type: env_pool makes its envs itself, but env_fn has {len(env_fn)} factories. Give "
            "none, and say in manager.env_pool.env_id which envs it is to make."
        )
    if options is None or options.env_id is None or size is None:
        raise ConfigError(
            "type: env_pool makes its envs itself: say in manager.env_pool.env_id which (such as "
            "Pong-v5), and in manager.env_num how many."
        )
    if options.batch_size is not None and size % options.batch_size:
        raise ConfigError(
            f"manager.env_pool.batch_size is {options.batch_size}, which does not divide the "
            f"{size} envs: the pool gives the results of so many at a time, and those of the last "
            "few would never come. Give a divisor of env_num, or null for steps of all that were "
            "sent actions."
        )
    known = imported_envpool().list_all_envs()
    if options.env_id not in known:
        alike = nearest(options.env_id, known)
        guess = f": did you mean {alike!r}?" if alike else "."
        raise ConfigError(
            f"manager.env_pool.env_id is {options.env_id!r}, which envpool does not have{guess} "
            "envpool.list_all_envs() names all of them."
        )
    seed = config.seed if isinstance(config.seed, int) else 0
    factory = PoolFactory(options, size, seed)
    spec = BatchedEnvSpec(factory, size, partial_steps=True, batch_size=factory.batch_size)
    return [spec] * size
