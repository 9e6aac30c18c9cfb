"""Seeds of the envs of one manager, and samplers of random actions that follow from them.

This computes seeds; `Episodes.begin` in `envmgr.core.episodes` decides which one a reset gets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envmgr.errors import ConfigError, UnknownEnvError
from envmgr.spaces.agents import random_action
from envmgr.spaces.interrupts import pass_interrupt_on
from envmgr.spaces.reading import Unreadable, read_dict, read_list, short_text
from envmgr.texts import counted


class Seeds(NamedTuple):
    """The seeds that envs are given at their next explicit reset; renewals use `derived_seed`.

    Attributes:
        of_envs: the seeds by env_id; None is no seed.
        of_spares: the seeds of the spares, in their order.
        dynamic: what automatic resets do after that, as in `EnvManager.seed`.
    """

    of_envs: dict[int, int | None]
    of_spares: list[int | None]
    dynamic: bool | None = None


def seeds_by_env(
    seed: int | Sequence[int | None] | Mapping[Any, int | None] | None, env_num: int
) -> dict[int, int | None]:
    """Return the seed of each env_id that `seed` names.

    Args:
        seed: an int gives env i `seed + i`; a sequence one to each env; a mapping one to some.
            None, alone or as an entry, takes a seed back.
        env_num: number of envs.

    Raises:
        ConfigError: a seed is not an integer of 0 or more, or a sequence has another length.
        UnknownEnvError: a mapping names an env that does not exist.
    """
    if seed is None:
        return dict.fromkeys(range(env_num))
    if isinstance(seed, Mapping):
        try:
            by_key = read_dict(seed)
        except Unreadable as error:
            raise ConfigError(f"the seeds by env_id {error}") from error
        ids = [_checked_env_id(key, env_num) for key in by_key]
        values = zip(ids, by_key.values(), strict=True)
        return {i: _checked_or_none(s, f"the seed of env {i}") for i, s in values}
    if isinstance(seed, (int, np.integer)):
        first = _checked(seed, "seed")
        return {i: first + i for i in range(env_num)}
    given: Any = seed
    try:
        seeds = read_list(seed) if isinstance(given, Sequence) else None
    except Unreadable:
        seeds = None
    if seeds is None:
        raise ConfigError(
            f"seed is {short_text(seed)}; it should be an integer, a list with one for each env, "
            "or a mapping of env_id to integer"
        )
    if len(seeds) != env_num:
        raise ConfigError(
            f"seed has {len(seeds)} entries for {counted(env_num, 'env')}; give one for each, one "
            "integer for all, or a mapping by env_id"
        )
    return {i: _checked_or_none(s, f"seed[{i}]") for i, s in enumerate(seeds)}


def seeds_of_spares(
    seed: Any, seeds: Mapping[int, int | None], env_num: int, spare_num: int
) -> list[int | None]:
    """Return the seeds of the spares, whose ids follow those of the envs.

    Args:
        seed: as given to `seeds_by_env`. An int gives the spare with id i `seed + i`.
        seeds: the present seeds of all envs; where `seed` is no int, the seeds of the spares are
            derived from the first of these.
        env_num: number of envs.
        spare_num: number of spares.
    """
    ids = range(env_num, env_num + spare_num)
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + i for i in ids]
    base = next((seeds[i] for i in sorted(seeds) if seeds[i] is not None), None)
    return [None if base is None else derived_seed(base, i, 0, 0) for i in ids]


def _checked_or_none(seed: Any, name: str) -> int | None:
    return None if seed is None else _checked(seed, name)


def _checked(seed: Any, name: str) -> int:
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        number = int(seed)
        if number >= 0:
            return number
    raise ConfigError(
        f"{name} is {short_text(seed)}; it should be an integer of 0 or more, or None"
    )


def _checked_env_id(key: Any, env_num: int) -> int:
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        number = int(key)
        if 0 <= number < env_num:
            return number
    raise UnknownEnvError(f"seed names env {short_text(key)}, but the envs are 0 to {env_num - 1}")


def derived_seed(base_seed: int, env_id: int, generation: int, episode: int) -> int:
    """Return the seed (32 bits) of the first reset of a generation after the first generation."""
    sequence = np.random.SeedSequence((base_seed, env_id, generation, episode))
    return int(sequence.generate_state(1)[0])


_ACTIONS = 0xAC7
"""Sets the streams of random actions apart from all others that follow from a seed."""


_SPACES = 0x5BACE
"""Sets the streams of the spaces that a manager shows apart in the same way."""


def seeds_of_spaces(seed: int) -> list[int]:
    """Return the seeds of a manager's observation and action space, derived from env 0's seed."""
    sequence = np.random.SeedSequence((seed, _SPACES))
    return list(map(int, sequence.generate_state(2)))


def own_space(space: Any) -> Any:
    """Return a copy of a space; the space itself if it cannot be copied."""
    try:
        return copy.deepcopy(space)
    except Exception as error:  # of a class of the user's
        pass_interrupt_on(error)
        return space


class Samplers:
    """Random actions from one stream for each env, so that timing cannot mix the streams up.

    Args:
        action_spaces: the space of each env.

    Attributes:
        spaces: copies of the action spaces, as far as they can be copied, with the state of each
            stream.
    """

    def __init__(self, action_spaces: Sequence[Any]) -> None:
        self.spaces = [own_space(space) for space in action_spaces]

    def seed(self, seeds: Mapping[int, int | None]) -> None:
        """Seed the streams of some envs."""
        for env_id, seed in seeds.items():
            if seed is not None:
                # Not the seed itself: an env seeded with it draws the same numbers.
                sequence = np.random.SeedSequence((seed, _ACTIONS))
                self.spaces[env_id].seed(int(sequence.generate_state(1)[0]))

    def sample(self, env_id: int, newest: Callable[[], Any] = lambda: None) -> Any:
        """Return a random action for one env.

        Args:
            env_id: the env.
            newest: returns the observation that the env shows: the agents in it act. If it returns
                None, all agents act.

        Raises:
            ConfigError: the env's action space has no random actions.
        """
        try:
            return random_action(self.spaces[env_id], newest)
        except NotImplementedError as error:
            raise ConfigError(
                f"the action space of env {env_id} has no random values: it is a bare Space, or "
                "lacks the method sample. Give the manager an action_space, or have envs choose: "
                "call('random_action')"
            ) from error
