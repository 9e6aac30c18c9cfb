"""How envs have described themselves, and what follows from that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from envmgr.core import ManagedEnv
from envmgr.seeding import Samplers, own_space, seeds_of_spaces
from envmgr.spaces import ActionCheck, codec_of, same_space
from envmgr.spaces.agents import action_check
from envmgr.spaces.interrupts import pass_interrupt_on
from envmgr.views import Forms
from envmgr.wire.messages import EnvDescription


class DescribedEnvs:
    """What is known of envs once they have described themselves.

    Args:
        descriptions: the description of env 0, which holds for all; or that of each env, where
            they differ. Their spaces are those of what is handed out.
        envs: all envs of the manager.
        check_actions: as in the config.
        seeds: the seeds of the envs, by env_id; those of everything drawn here follow from them.

    Attributes:
        first: the description of env 0, with copies of its spaces: inline, drawing from the env's
            own spaces would change what the env draws.
        spaces: the observation and the action space of each env that has described itself.
        forms: stacks the observations of these envs.
        action_checks: the check of each env's actions; None if nothing is checked.
    """

    def __init__(
        self,
        descriptions: Sequence[EnvDescription],
        envs: Sequence[ManagedEnv],
        check_actions: bool | Literal["strict"],
        seeds: Mapping[int, int | None],
    ) -> None:
        self.first, *others = descriptions
        shown = [own_space(space) for space in self.first[:2]]
        self.first = self.first._replace(observation_space=shown[0], action_space=shown[1])
        descriptions = [self.first, *others]
        self.spaces = [(d.observation_space, d.action_space) for d in descriptions]
        self.forms = Forms([d.observation_space for d in descriptions])
        action_spaces = [d.action_space for d in descriptions]
        if all(same_space(space, action_spaces[0]) for space in action_spaces):
            action_spaces = [action_spaces[0]] * len(envs)
        self._envs = envs
        self.action_checks = self._checks(action_spaces, check_actions) if check_actions else None
        self.samplers = Samplers(action_spaces)
        self.seed(seeds)

    def seed(self, seeds: Mapping[int, int | None]) -> None:
        """Seed the random actions of some envs and, with env 0, the spaces that users see."""
        self.samplers.seed(seeds)
        of_first = seeds.get(0)
        if of_first is not None:
            for space, seed in zip(self.first[:2], seeds_of_spaces(of_first), strict=True):
                try:
                    space.seed(seed)
                except Exception as error:  # nothing that the manager does depends on it
                    pass_interrupt_on(error)

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
    """Return a function that gives the observation that an env shows."""
    return lambda: env.obs
