"""What vector envs say about themselves, and the forms in which they take and give values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from envmgr.env.contract import EnvContractError, attribute, env_name
from envmgr.spaces import leafwise


def is_vector_env(built: Any) -> bool:
    """Return whether something is a vector env, or looks like one."""
    return isinstance(built, gymnasium.vector.VectorEnv) or (
        hasattr(built, "single_observation_space") and hasattr(built, "num_envs")
    )


def mode_of(env: Any, metadata: Mapping[str, Any], given: Any) -> AutoresetMode:
    """Return when an env begins episodes: as given or, if `given` is None, as it says itself.

    Raises:
        EnvContractError: the env does not say.
    """
    found = metadata.get("autoreset_mode") if given is None else given
    try:
        return AutoresetMode(getattr(found, "value", found))
    except ValueError:
        raise EnvContractError(
            f"{env_name(env)} should say in metadata['autoreset_mode'] when it begins the next "
            f"episode of a row: NextStep, SameStep or Disabled; it says {found!r}. If you know it: "
            "VectorBatch(env, autoreset_mode='NextStep')"
        ) from None


_PARTS = ("num_envs", "single_observation_space", "single_action_space", "observation_space")


def check_form(env: Any) -> None:
    """Check that an env has what vector envs of gymnasium's kind have, and steps all its rows.

    Raises:
        EnvContractError: it lacks something, or does not step all its rows.
    """
    missing = [name for name in _PARTS if attribute(env, name) is None]
    if missing:
        raise EnvContractError(
            f"{env_name(env)} has no {' and no '.join(missing)}, which gymnasium's vector envs "
            "have. If it is made of one multi-agent env, as those of SuperSuit are, give that "
            "env itself in env_fn, in the wrapper AgentRows if its agents are to be rows of arrays"
        )
    size, n_rows = attribute(getattr(env, "unwrapped", env), "batch_size"), env.num_envs
    if isinstance(size, int) and size != n_rows:
        raise EnvContractError(
            f"{env_name(env)} was made with batch_size={size} for {n_rows} rows: it gives results "
            "of those that are done first, and takes actions for just these, in their order. Make "
            f"it without batch_size; or give several of {size} rows, each a BatchedEnvSpec, to "
            "type: async_subprocess, which hands out those that are done first"
        )


def check_rows(env: Any, method: str, observations: Any, n_rows: int) -> None:
    """Check that there are observations of all rows.

    Raises:
        EnvContractError: there are more or fewer.
    """
    if len(observations) != n_rows:
        raise EnvContractError(
            f"{method} of {env_name(env)} should return observations of all its {n_rows} rows, it "
            f"returned {len(observations)}"
        )


def is_of(env: Any, package: str) -> bool:
    """Return whether the class of an env, without wrappers, is from a package."""
    return type(getattr(env, "unwrapped", env)).__module__.partition(".")[0] == package


def takes_lists(env: Any) -> bool:
    """Return whether an env takes a list of seeds."""
    kinds = (gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv)
    return isinstance(getattr(env, "unwrapped", env), kinds)


def knows_reset_mask(env: Any) -> bool:
    """Return whether an env is known to be able to reset only some of its rows."""
    return takes_lists(env) or is_of(env, "ale_py")


def own(observation: Any) -> Any:
    """Return an observation that no later step changes."""
    return leafwise(lambda part: part.copy() if isinstance(part, np.ndarray) else part, observation)
