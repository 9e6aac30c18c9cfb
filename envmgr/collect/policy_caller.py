"""Calls a policy of dicts by env_id for collectors, and keeps the states of recurrent ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from envmgr.collect.policies import (
    PolicyStep,
    check_names,
    check_rows,
    checked_actions,
    parts_of,
    unfit,
)
from envmgr.errors import ActionError
from envmgr.spaces import (
    ValueMismatchError,
    as_batch,
    codec_of,
    indexed,
    leafwise,
    split_batch,
    stacked,
)
from envmgr.spaces.interrupts import pass_interrupt_on


class Acted(NamedTuple):
    """What a policy has chosen for one env.

    Attributes:
        obs: the observation for which it chose.
        action: what it chose.
        extras: what else it returned, by name.
        given: the state it was given; None without states.
        state: the state it is given next; None without states.
    """

    obs: Any
    action: Any
    extras: dict[str, Any]
    given: Any
    state: Any


class PolicyCaller:
    """A caller of a policy with dicts by env_id; see `envmgr.collect.policies`.

    Args:
        own: turns an env's observation into one that stays as it is, if steps are kept; None if
            they are not.
    """

    def __init__(self, policy: Any, own: Callable[[int, Any], Any] | None) -> None:
        self._policy = policy
        self._own = own
        self._is_recurrent = hasattr(policy, "initial_state")
        self._names: frozenset[str] | None = None

    def choose(
        self, obs: Mapping[int, Any], states: Mapping[int, Any]
    ) -> tuple[dict[int, Any], dict[int, Acted]]:
        """Return the actions by env_id, in the order of `obs`, and what else is to be kept of them.

        Args:
            obs: the observations by env_id.
            states: the states of the envs in the middle of an episode; the others begin one.

        Raises:
            ActionError: there is not one action for each env, an extra or a state is missing, or
                the extras have other names than before.
        """
        env_ids = list(obs)
        given: dict[int, Any] = {}
        if self._is_recurrent:
            initial = indexed(as_batch(self._policy.initial_state(1)), 0)
            given = {i: states.get(i, initial) for i in env_ids}
            own = {i: copied(state) for i, state in given.items()}  # which it may change
            step = self._policy(obs, own, {i: i not in states for i in env_ids})
        else:
            step = self._policy(obs)
        actions, extras, state = parts_of(step)
        actions = checked_actions(actions, env_ids)
        keep = self._own
        if keep is None and not self._is_recurrent:
            return actions, {}
        self._check(extras, state, env_ids)
        if not self._is_recurrent:
            given = state = dict.fromkeys(env_ids)
        if keep is None:
            return actions, {i: Acted(None, None, {}, None, copied(state[i])) for i in env_ids}
        return actions, {
            i: Acted(
                keep(i, obs[i]),
                copied(actions[i]),
                {name: _recorded(name, by_id[i], i) for name, by_id in extras.items()},
                _recorded("state", given[i], i) if self._is_recurrent else None,
                copied(state[i]),
            )
            for i in env_ids
        }

    def _check(self, extras: Mapping[str, Any], state: Any, env_ids: list[int]) -> None:
        found = {**extras, "state": state} if self._is_recurrent else extras
        for name, by_id in found.items():
            lacking = [i for i in env_ids if not isinstance(by_id, Mapping) or i not in by_id]
            if lacking:
                raise ActionError(
                    f"the policy returned no {name} for envs {lacking}; a PolicyStep has it by "
                    "env_id, as the actions. Nothing was sent to any env."
                )
        if self._names is not None:
            check_names(extras, self._names)
        self._names = frozenset(extras)


def copied(value: Any) -> Any:
    """Return a value that stays as it is, whatever the policy does with its own arrays."""
    return leafwise(_copied, value)


def _copied(value: Any) -> Any:
    copy = getattr(value, "copy", None) or getattr(value, "clone", None)  # of tensors
    return copy() if callable(copy) else value


def _recorded(name: str, value: Any, env_id: int) -> Any:
    """Return an extra as it is to be recorded."""
    try:
        return copied(as_batch(value))
    except (ValueError, TypeError, KeyError):
        return copied(value)  # of no shape: it becomes an object
    except Exception as error:  # a tensor's own, of one that has a gradient
        pass_interrupt_on(error)
        raise ActionError(
            f"what the policy returned as {name} for env {env_id} cannot become an array: {error}. "
            "Nothing was sent to any env."
        ) from error


def by_env(policy: Callable[..., Any], observation_space: Any) -> Callable[..., PolicyStep]:
    """Return a policy of dicts by env_id that calls a policy of batches (see `RolloutCollector`).

    Use it for `EpisodeCollector` and everything else that takes policies of dicts.

    Args:
        policy: the policy of batches.
        observation_space: the observation space of one env.
    """
    return _ByEnv(policy, observation_space)


class _ByEnv:
    def __init__(self, policy: Any, observation_space: Any) -> None:
        self._policy = policy
        self._codec = codec_of(observation_space)
        if hasattr(policy, "initial_state"):
            self.initial_state = policy.initial_state

    def __call__(self, obs: Mapping[int, Any], state: Any = None, starts: Any = None) -> PolicyStep:
        env_ids, seen = list(obs), self._codec.stack(list(obs.values()))
        if state is None:
            step = self._policy(seen)
        else:
            is_start = np.array([starts[i] for i in env_ids], np.bool_)
            step = self._policy(seen, stacked([state[i] for i in env_ids]), is_start)
        actions, extras, after = parts_of(step)
        batch = actions if type(actions) is list else as_batch(actions)
        try:
            rows = split_batch(batch, len(env_ids))
        except ValueMismatchError as error:
            raise unfit("actions", len(env_ids), error) from error
        return PolicyStep(
            dict(zip(env_ids, rows, strict=True)),
            {name: _rows(name, as_batch(column), env_ids) for name, column in extras.items()},
            None if state is None else _rows("state", as_batch(after), env_ids),
        )


def _rows(name: str, batch: Any, env_ids: list[int]) -> dict[int, Any]:
    check_rows(name, batch, len(env_ids))
    return {env_id: indexed(batch, k) for k, env_id in enumerate(env_ids)}
