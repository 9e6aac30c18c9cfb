"""Calls a batched policy for the rollout collector, and keeps the states of recurrent ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envmgr.collect.policies import (
    BatchPolicy,
    PolicyStep,
    RandomPolicy,
    check_rows,
    parts_of,
    unfit,
)
from envmgr.collect.rollout_buffer import Bools, Ints, put_in
from envmgr.errors import ActionError
from envmgr.spaces import as_batch, codec_of, put_rows, rows_of, zeros_for
from envmgr.spaces.reading import short_text


class BatchPolicyCaller:
    """A caller of a policy, which keeps a recurrent one's states until the step has been taken.

    Args:
        policy: see `RolloutCollector`; with a `RandomPolicy`, each env has its own actions.

    Attributes:
        initial: (n, ...): the states at episodes' starts; None if the policy is not recurrent.
        next_states: (n, ...): the state that the policy has returned for each env, to be used after
            the step that it has chosen; None before the first call.
    """

    def __init__(self, policy: BatchPolicy, action_space: Any, n: int) -> None:
        self._policy: Any = policy
        self._actions = codec_of(action_space)
        self._none_begins: Bools = np.zeros(n, np.bool_)
        self._every = np.arange(n)
        self.initial: Any = None
        self.next_states: Any = None
        if hasattr(policy, "initial_state"):
            initial = as_batch(policy.initial_state(n))
            self.initial = rows_of(initial, self._every)  # the policy may use its own again

    def choose(
        self, env_ids: Ints, obs: Any, states: Any, starts: Bools | None
    ) -> tuple[Any, Mapping[str, Any], Any]:
        """Return actions, extras, and the states that the policy was given.

        Args:
            env_ids: (k,).
            obs: (k, *shape).
            states: (n, ...) the states of all envs; None without states.
            starts: (n,) whether each env begins an episode; None: none does.

        Raises:
            ActionError: a recurrent policy returned no state, or one that does not fit; or the
                extras of a policy are not a mapping.
        """
        given = None
        if states is None:
            is_random = type(self._policy) is RandomPolicy
            step = self._random(env_ids) if is_random else self._policy(obs)
        else:
            begins = (self._none_begins if starts is None else starts)[env_ids]
            step = self._policy(obs, rows_of(states, env_ids), begins)
            self._keep(env_ids, step)
            given = rows_of(states, env_ids)  # once more: the policy may have changed its own
        actions, extras, _ = parts_of(step)
        if type(actions) is not np.ndarray:
            actions = self._actions.stack(actions) if type(actions) is list else as_batch(actions)
        if extras:
            extras = {name: as_batch(rows) for name, rows in extras.items()}
        return actions, extras, given

    def _random(self, env_ids: Ints) -> Any:
        return list(self._policy(dict.fromkeys(env_ids.tolist())).values())

    def _keep(self, env_ids: Ints, step: Any) -> None:
        if type(step) is not PolicyStep or step.state is None:
            raise ActionError(
                "a policy with initial_state should return PolicyStep(actions, extras, state) with "
                f"the next state of each env, found {short_text(step)}. Nothing was sent"
            )
        new = as_batch(step.state)
        check_rows("state", new, len(env_ids), self.initial)
        if self.next_states is None:
            self.next_states = zeros_for(new, len(self._every))
        try:
            self.next_states = put_in(self.next_states, env_ids, new)
        except (ValueError, TypeError) as error:
            raise unfit("state", len(env_ids), error) from error

    def states_after_step(self, states: Any, env_ids: Ints, ended: Ints) -> Any:
        """Return the states of all envs after steps of `env_ids`; episodes of `ended` ended."""
        after = rows_of(states, self._every)
        after = put_in(after, env_ids, rows_of(self.next_states, env_ids))
        if len(ended):
            put_rows(after, ended, rows_of(self.initial, ended))
        return after


def hint_of_form(actions: Any) -> str:
    """Return a hint on the form of actions that were refused; empty if their form is right."""
    found = ""
    if isinstance(actions, Mapping) and any(isinstance(key, int) for key in actions):
        found = "a dict by env_id, as policies of the other collectors do; make it an array"
    elif isinstance(actions, tuple):
        found = (
            "a tuple; what there is besides the actions goes into PolicyStep(actions, "
            "{name: array})"
        )
    return found and (
        "The policy of a RolloutCollector returns actions (k, ...) for observations (k, *shape), "
        f"and this one returned {found}."
    )
