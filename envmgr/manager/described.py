"""What envs have said of themselves, and what follows from that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from envmgr.core import ManagedEnv
from envmgr.seeding import Samplers
from envmgr.spaces import ActionCheck, codec_of, same_space
from envmgr.spaces.agents import action_check
from envmgr.views import Forms
from envmgr.wire.messages import EnvDescription


class DescribedEnvs:
    """What is known of envs once they have said what they are.

    Args:
        descriptions: of env 0, which holds for all; or of each env, where they differ. With the
            spaces of what is handed out.
        envs: all envs of the manager.
        check_actions: as in the config.
        seeds: of the streams of random actions, by env_id.

    Attributes:
        first: the description of env 0.
        spaces: the observation and the action space of each that has described itself.
        forms: stacks observations of them.
        action_checks: the check of each env's actions; None if nothing is checked.
        samplers: draws random actions.
    """

    def __init__(
        self,
        descriptions: Sequence[EnvDescription],
        envs: Sequence[ManagedEnv],
        check_actions: bool | Literal["strict"],
        seeds: Mapping[int, int | None],
    ) -> None:
        self.first = descriptions[0]
        self.spaces = [(d.observation_space, d.action_space) for d in descriptions]
        self.forms = Forms([d.observation_space for d in descriptions])
        action_spaces = [d.action_space for d in descriptions]
        if all(same_space(space, action_spaces[0]) for space in action_spaces):
            action_spaces = [action_spaces[0]] * len(envs)
        self._envs = envs
        self.action_checks = self._checks(action_spaces, check_actions) if check_actions else None
        self.samplers = Samplers(action_spaces)
        self.samplers.seed(seeds)

    def random_action(self, env_id: int) -> Any:
        """Return a random action for one env."""
        return self.samplers.sample(env_id, _newest_of(self._envs[env_id]))

    def _checks(
        self, action_spaces: list[Any], check_actions: Literal[True, "strict"]
    ) -> list[ActionCheck]:
        is_strict = check_actions == "strict"
        codecs = {id(space): codec_of(space, strict=is_strict) for space in action_spaces}
        return [
            action_check(space, codecs[id(space)].refusal, _newest_of(env))
            for env, space in zip(self._envs, action_spaces, strict=True)
        ]


def _newest_of(env: ManagedEnv) -> Callable[[], Any]:
    """Return what gives the observation that an env shows."""
    return lambda: env.obs
