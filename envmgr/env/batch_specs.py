"""Which env_ids are the rows of batched envs: known before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from envmgr.env.batched import BatchedEnv
from envmgr.env.contract import EnvContractError, describe
from envmgr.env.vector_batch import VectorBatch
from envmgr.env.vector_forms import is_vector_env
from envmgr.errors import ConfigError
from envmgr.types import EnvFactory


@dataclass(frozen=True)
class BatchedEnvSpec:
    """The entry in `env_fn` for each row of a batched env: `env_fn=[spec] * (size * batches)`.

    Attributes:
        build: builds the env with all of its rows: a `BatchedEnv`, or a vector env of gymnasium's
            kind, whose `num_envs` is `size`.
        size: the number of rows.
        partial_steps: whether its `step` can take some of the rows that are in an episode and leave
            the others. If not, all of them have to be sent their actions in one call.
        batch_size: how many rows an `AsyncBatchedEnv` gives results for at a time; None for other
            envs.
    """

    build: Callable[[], Any]
    size: int
    partial_steps: bool = False
    batch_size: int | None = None

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ConfigError: a field has an invalid value.
        """
        if not callable(self.build):
            raise ConfigError(f"the `build` of a BatchedEnvSpec is {self.build!r}, not a function")
        if type(self.size) is not int or self.size < 1:
            raise ConfigError(f"the `size` of a BatchedEnvSpec is {self.size!r}, not 1 or more")
        some = self.batch_size
        if some is not None and (type(some) is not int or some < 1 or self.size % some):
            raise ConfigError(
                f"the `batch_size` of a BatchedEnvSpec is {some!r}, which does not divide its "
                f"{self.size} rows. Results come in batches, and those of the last would never come"
            )

    def __call__(self) -> BatchedEnv:
        """Return a new env.

        Raises:
            EnvContractError: `build` returned something other than a `BatchedEnv` or a vector env,
                or one with another number of rows.
        """
        env: Any = self.build()
        if not isinstance(env, BatchedEnv):
            if not is_vector_env(env):
                raise EnvContractError(
                    f"the `build` of a BatchedEnvSpec returned {describe(env)}, not a BatchedEnv "
                    "or a gymnasium.vector.VectorEnv"
                )
            env = _as_batch(env)
        num_envs = getattr(env, "num_envs", self.size)
        if num_envs != self.size:
            env.close()
            raise EnvContractError(
                f"the `build` of a BatchedEnvSpec returned an env of {num_envs} rows, but its "
                f"size is {self.size}. Give both the same number"
            )
        batched: BatchedEnv = env
        return batched


def _as_batch(env: Any) -> VectorBatch:
    try:
        return VectorBatch(env)
    except BaseException:
        env.close()
        raise


class Batch(NamedTuple):
    """The env_ids of a batched env's rows: `first` is row 0.

    Attributes:
        first: the lowest env_id.
        size: the number of rows.
        partial_steps: see `BatchedEnvSpec`.
        batch_size: likewise.
    """

    first: int
    size: int
    partial_steps: bool
    batch_size: int | None = None

    @property
    def env_ids(self) -> range:
        """The env_ids of all rows."""
        return range(self.first, self.first + self.size)


def batches_of(factories: Sequence[EnvFactory]) -> tuple[Batch, ...]:
    """Return the batched envs that are named in a list of one factory for each env_id.

    Raises:
        ConfigError: a batched env is not named for all of its rows.
    """
    batches: list[Batch] = []
    env_id = 0
    while env_id < len(factories):
        spec = factories[env_id]
        if not isinstance(spec, BatchedEnvSpec):
            env_id += 1
            continue
        rows = factories[env_id : env_id + spec.size]
        n_rows = next((n for n, other in enumerate(rows) if other is not spec), len(rows))
        if n_rows != spec.size:
            raise ConfigError(
                f"env_fn has a batched env of {spec.size} rows from env {env_id} on, but names it "
                f"for {n_rows} envs there. Every batch needs all of its rows, side by side: "
                f"env_fn=[spec] * ({spec.size} * n) for n batches"
            )
        is_partial = spec.partial_steps or spec.batch_size is not None
        batches.append(Batch(env_id, spec.size, is_partial, spec.batch_size))
        env_id += spec.size
    return tuple(batches)
