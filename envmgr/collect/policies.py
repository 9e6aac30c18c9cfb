"""Policies, which choose the actions of a collection.

A policy is a callable `{env_id: obs} -> {env_id: action}`: it gets the observations of the envs
that act now, and returns one action for each of them. Which envs come together in one call depends
on timing; a policy whose actions for an env depend only on that env's observations (and on the
env_id) gives the same trajectories under every kind of manager.

A config names a policy by its factory: `collect.policy: package.module:callable` is called once, as
`factory(observation_space, action_space, seed)`, and returns the policy. A class with such an
`__init__` and a `__call__` is the usual form:

    class AlwaysLeft:
        def __init__(self, observation_space, action_space, seed):
            ...

        def __call__(self, obs):
            return {env_id: 0 for env_id in obs}

To have other values recorded along with the actions, a policy returns a `PolicyStep` with both.

A policy with a method `initial_state` is recurrent: `initial_state(n)` returns the states of n envs
at the start of an episode, as an array (n, ...) or a dict or tuple of such. The policy is called as
`policy(obs, state, episode_starts)`, each by env_id, and the state in its `PolicyStep` is passed in
at the next step of these envs.

`seed` is an integer, or None for a run without seeds. With V2 managers an observation is a row of
the stacked treetensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np

from envmgr.collect.goals import seeds_of, spaces_of
from envmgr.config.imports import FilePolicy, import_object
from envmgr.env.contract import takes
from envmgr.errors import ActionError, ConfigError
from envmgr.seeding import Samplers
from envmgr.spaces import leafwise
from envmgr.spaces.reading import short_text

Policy = Callable[[dict[int, Any]], Mapping[int, Any]]
"""Chooses an action for each env_id of the observations it gets."""

PolicyFactory = Callable[[Any, Any, "int | None"], Policy]
"""Called with the observation space, the action space and the seed; returns a policy."""


class PolicyStep(NamedTuple):
    """The return value of a policy that returns more than actions.

    Attributes:
        actions: by env_id, or as a batch with one row for each observation.
        extras: further values to record, by name, such as "logprob" and "value": each by env_id or
            as a batch, like the actions.
        state: the state that a recurrent policy is given at the next step of these envs; likewise.
    """

    actions: Any
    extras: Mapping[str, Any] = MappingProxyType({})
    state: Any = None


BatchPolicy = Callable[..., Any]
"""Chooses actions (k, ...) for observations (k, *shape): see `RolloutCollector`."""

_PROTOCOL = (
    "it is called as factory(observation_space, action_space, seed) and returns the policy, which "
    "is called with {env_id: obs} and returns {env_id: action}"
)


class RandomPolicy:
    """A policy that samples the action space, with a separate random stream for each env.

    With a seed, the nth action of an env does not depend on what the other envs do, or on timing.

    Args:
        observation_space: not used.
        action_space: the space to sample.
        seed: the seed of all streams; None for fresh entropy.
    """

    def __init__(self, observation_space: Any, action_space: Any, seed: int | None = None) -> None:
        self._action_space = action_space
        self._spaces: Sequence[Any] = ()
        self._entropy = np.random.SeedSequence(seed).entropy
        self._streams: dict[int, Samplers] = {}

    @classmethod
    def of(cls, manager: Any) -> RandomPolicy:
        """Return a random policy for the envs of a manager, seeded from their seeds."""
        made = cls(None, None, policy_seed(seeds_of(manager)))
        made._spaces = [acted for _, acted in spaces_of(manager)]
        return made

    def __call__(self, obs: Mapping[int, Any]) -> dict[int, Any]:
        """Return a random action for each env of `obs`."""
        return {i: self._stream(i).sample(0, partial(obs.get, i)) for i in obs}

    def _stream(self, env_id: int) -> Samplers:
        stream = self._streams.get(env_id)
        if stream is None:
            # Not `seed + env_id`, which is what the env itself is seeded with.
            sequence = np.random.SeedSequence(self._entropy, spawn_key=(env_id,))
            space = self._spaces[env_id] if self._spaces else self._action_space
            stream = self._streams[env_id] = Samplers([space])
            stream.seed({0: int(sequence.generate_state(1)[0])})
        return stream


def parts_of(step: Any) -> Any:
    """Return what a policy returned as (actions, extras, state).

    Raises:
        ActionError: its extras are not a mapping.
    """
    if type(step) is not PolicyStep:
        return step, _NOTHING, None
    if not isinstance(step.extras, Mapping):
        raise ActionError(
            f"the extras of a PolicyStep should be a mapping of names, {{}} if there are none; "
            f"found {short_text(step.extras)}. Nothing was sent to any env."
        )
    return step


def check_names(extras: Mapping[str, Any], before: Collection[str]) -> None:
    """Refuse extras that have other names than before.

    Raises:
        ActionError: the names differ.
    """
    if extras.keys() != set(before):
        raise ActionError(
            f"the policy returned the extras {sorted(extras)}, and {sorted(before)} before; it "
            "should return the same ones each time. Nothing was sent to any env."
        )


def check_rows(name: str, batch: Any, count: int, like: Any = None, axes: int = 1) -> None:
    """Refuse a batch that does not have one row for each observation.

    Args:
        name: the name of the batch, for messages.
        batch: what a policy returned.
        count: the number of observations.
        like: a batch with rows of the right shapes, nested in the same way; None if any shape is
            right.
        axes: how many axes `like` has before those of its rows.

    Raises:
        ActionError: it does not, or its rows have other shapes than those of `like`.
    """

    def check(part: Any, *others: Any) -> None:
        if part.shape[:1] != (count,):
            raise ValueError(f"{len(part)} rows" if part.ndim else "one value")
        for other in others:
            if part.shape[1:] != other.shape[axes:]:
                raise ValueError(f"rows of shape {part.shape[1:]}, not {other.shape[axes:]}")

    try:
        leafwise(check, batch, *(() if like is None else (like,)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise unfit(name, count, error) from error


def unfit(name: str, count: int, error: Exception) -> ActionError:
    """Return the error for a part of a policy's return value that is refused."""
    return ActionError(
        f"what the policy returned as {name} does not fit: {error}. It should have one row "
        f"for each of the {count} observations, and the same shape each time. Nothing was "
        "sent to any env."
    )


_NOTHING: Mapping[str, Any] = MappingProxyType({})


def policy_seed(seed: int | Sequence[int | None] | Mapping[int, int | None] | None) -> int | None:
    """Return the single seed of a policy, derived from `manager.seed` in any of its forms.

    An integer is used as it is, even if it is given in the form of the seeds that the envs get from
    it; from any other seeds, one is derived.
    """
    if seed is None or isinstance(seed, (int, np.integer)):
        return None if seed is None else int(seed)
    by_env = dict(seed) if isinstance(seed, Mapping) else dict(enumerate(seed))
    given = [(int(env_id), int(one)) for env_id, one in by_env.items() if one is not None]
    if not given:
        return None
    first = {one - env_id for env_id, one in given}
    if len(first) == 1 and min(first) >= 0:
        return first.pop()
    words = [word for pair in sorted(given) for word in pair]
    return int(np.random.SeedSequence(words).generate_state(1)[0])


def make_policy(
    name: str | PolicyFactory,
    observation_space: Any,
    action_space: Any,
    seed: int | None = None,
    *,
    allow: FilePolicy | None = None,
) -> Policy:
    """Return the policy that a config names.

    Args:
        name: "random", `package.module:callable`, or the factory itself.
        observation_space: passed to the factory.
        action_space: passed to the factory.
        seed: passed to the factory.
        allow: what may be imported; None for everything.

    Raises:
        ConfigError: there is no such factory, it may not be imported, it does not take these
            arguments, or it returned something that cannot be called.
    """
    shown, factory = _factory_of(name, allow)
    arguments = (observation_space, action_space, seed)
    if not takes(factory, *arguments):
        raise ConfigError(
            f"collect.policy is {shown}, which does not take three arguments: {_PROTOCOL}. Change "
            "its parameters."
        )
    policy = factory(*arguments)
    if not callable(policy):
        raise ConfigError(
            f"collect.policy is {shown}, which returned a value of type "
            f"{type(policy).__name__} that cannot be called: {_PROTOCOL}."
        )
    return cast("Policy", policy)


def _factory_of(
    name: str | PolicyFactory, allow: FilePolicy | None
) -> tuple[str, Callable[..., Any]]:
    if not isinstance(name, str):
        return repr(name), name
    if name == "random":
        return name, RandomPolicy
    return repr(name), import_object(name, allow=allow, key="collect.policy")


def checked_actions(actions: Any, env_ids: Sequence[int]) -> dict[int, Any]:
    """Return what a policy returned as `{env_id: action}`, in the order of `env_ids`.

    Raises:
        ActionError: it is not a mapping, or lacks an env, or has one that was not asked for.
    """
    if not isinstance(actions, Mapping):
        raise ActionError(
            f"the policy returned a value of type {type(actions).__name__}; it should return a "
            "mapping {env_id: action} with one action for each env of the observations it got"
        )
    missing = [env_id for env_id in env_ids if env_id not in actions]
    if missing:
        raise ActionError(
            f"the policy returned no action for envs {missing}; it was given the observations of "
            f"envs {list(env_ids)} and should return one action for each"
        )
    if len(actions) != len(env_ids):
        others = [key for key in actions if key not in set(env_ids)]
        raise ActionError(
            f"the policy returned actions for {others}, which it was not asked for; it was given "
            f"the observations of envs {list(env_ids)} and should return one action for each"
        )
    return {env_id: actions[env_id] for env_id in env_ids}
