"""A check of an env before a manager runs it: everything that would make it fail there."""

from __future__ import annotations

import functools
import math
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from envmgr import pickles
from envmgr.env import adapt
from envmgr.env.async_env import as_blocking
from envmgr.env.play import RandomPlay
from envmgr.errors import EnvManagerError
from envmgr.spaces import ValueMismatchError, codec_of, space_text
from envmgr.testing.checksums import UNKNOWN, checksum_of, reward_checksum
from envmgr.types import EnvTimestep, is_abnormal

KINDS = ("factory", "spaces", "reset", "observation", "step", "seed", "close")
"""What a problem may be about."""


class Problem(NamedTuple):
    """Something that is wrong with an env.

    Attributes:
        kind: one of `KINDS`.
        message: what was found, what was expected and what to do.
    """

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class EnvCheckError(EnvManagerError, AssertionError):
    """An env has problems.

    Attributes:
        problems: all that were found.
    """

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("the env has problems:\n" + "\n".join(f"- {one}" for one in problems))
        self.problems = problems


def check_env(factory: Callable[[], Any], *, n_steps: int = 50, seed: int = 0) -> None:
    """Raise an error if `env_problems` finds any problem.

    Raises:
        EnvCheckError: there are problems; it holds all of them.
    """
    problems = env_problems(factory, n_steps=n_steps, seed=seed)
    if problems:
        raise EnvCheckError(problems)


def env_problems(
    factory: Callable[[], Any], *, n_steps: int = 50, seed: int = 0, forgives: bool = False
) -> list[Problem]:
    """Return the problems that these envs would have in a manager; empty if there are none.

    Builds three envs in this process, one after the other, takes random actions, and checks that
    the factory can be sent to a worker; the spaces are there and can be laid out; observations have
    the structure, shape and kind of their space; timesteps have the right types; the same seed and
    actions give the same trajectory; and `close` works, also without a reset.

    Args:
        factory: builds one env, of any kind that managers take.
        n_steps: the number of steps to take, with resets where episodes end.
        seed: the seed to reset with; envs that take no seeds need not repeat a trajectory.
        forgives: if true, a step that raises is no problem, and ends the comparison.
    """
    play_of = functools.partial(RandomPlay, forgives=forgives)
    problems, first = problems_of_one(factory, n_steps=n_steps, seed=seed, play_of=play_of)
    if not problems and first is not None and first.is_seeded:
        problems += Trial(factory, n_steps, seed, play_of=play_of).differences(first)
    return problems


def problems_of_one(
    factory: Callable[[], Any],
    *,
    n_steps: int,
    seed: int,
    play_of: Callable[[Any], RandomPlay],
    limit_s: float = math.inf,
) -> tuple[list[Problem], Trial | None]:
    """Return what `env_problems` finds without comparing two envs, and the trial of the one.

    Args:
        factory: builds one env.
        n_steps: as for `env_problems`.
        seed: likewise.
        play_of: given the env, returns the play that takes the steps.
        limit_s: seconds after which no further step is taken.
    """
    problems = [*_check_factory(factory), *_check_unused(factory)]
    if problems:
        return problems, None
    first = Trial(factory, n_steps, seed, play_of=play_of, limit_s=limit_s)
    return first.problems, first


def _check_factory(factory: Callable[[], Any]) -> Iterator[Problem]:
    try:
        pickle.loads(pickles.dumps(factory))  # noqa: S301 - what was pickled just here
    except Exception as error:  # whatever a __reduce__ may raise
        yield Problem(
            "factory",
            f"it cannot be sent to a worker process: {type(error).__name__}: {error}. Build what "
            "cannot be pickled inside of the factory.",
        )


def _check_unused(factory: Callable[[], Any]) -> Iterator[Problem]:
    """Build an env, look at its spaces, and close it without a reset."""
    try:
        env = as_blocking(factory())
    except Exception as error:  # the user's code
        yield Problem("factory", f"it raised {type(error).__name__}: {error}")
        return
    try:
        adapt.close_env(env)
    except Exception as error:  # the user's code
        text = f"closing an env that was never reset raised {type(error).__name__}: {error}"
        yield Problem("close", text)


class Trial:
    """One env, stepped with random actions.

    Attributes:
        is_seeded: whether the env takes seeds.
        sums: checksums of the observations and rewards, in order.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        n_steps: int,
        seed: int,
        *,
        play_of: Callable[[Any], RandomPlay],
        limit_s: float = math.inf,
    ) -> None:
        self.problems: list[Problem] = []
        self._limit_s = limit_s
        self._play_of = play_of
        self.sums: list[tuple[int, int]] = []
        self.is_seeded = False
        self._doing = "factory"
        env = None
        try:
            env = as_blocking(factory())
            self._run(env, n_steps, seed)
        except Exception as error:  # the user's code, or what an adapter says of it
            text = f"{type(error).__name__}: {error}"
            self.problems.append(Problem(self._doing, text))
        finally:
            if env is not None:
                self._close(env)

    def _run(self, env: Any, n_steps: int, seed: int) -> None:
        self._doing = "spaces"
        observation_space = adapt.spaces_of(env)[0]
        if not codec_of(observation_space).structure.is_placed:
            self._note(
                "spaces",
                f"observations of {space_text(observation_space)} have no fixed layout, or parts "
                "of them have none, which are pickled in every step. Use Box, Discrete, "
                "MultiBinary, MultiDiscrete, Text, Dict and Tuple.",
            )
        self._space, self._of_obs = observation_space, checksum_of(observation_space)
        self.is_seeded = adapt.takes_seeds(env)
        play = self._play_of(env)
        for timestep in seeded_run(
            env, play, n_steps, seed, begin=self._begin, limit_s=self._limit_s
        ):
            if is_abnormal(timestep.info):
                self._note("step", "it says itself that a step was abnormal (info['abnormal'])")
                return
            self._take(timestep.obs, timestep.reward)

    def _begin(self, what: str) -> None:
        self._doing = what

    def _take(self, obs: Any, reward: Any) -> None:
        problem = misfit(self._space, obs)
        if problem:
            self._note("observation", f"of a {self._doing}: {problem}")
        sums = self._of_obs(obs), reward_checksum(reward)
        if sums[1] == UNKNOWN:
            text = f"the reward is a {type(reward).__name__}, neither a number nor an array of them"
            self._note("step", text)
        self.sums.append(sums)

    def _note(self, kind: str, text: str) -> None:
        problem = Problem(kind, text)
        if problem not in self.problems:
            self.problems.append(problem)

    def _close(self, env: Any) -> None:
        try:
            adapt.close_env(env)
        except Exception as error:  # the user's code
            self._note("close", f"it raised {type(error).__name__}: {error}")

    def differences(self, other: Trial) -> list[Problem]:
        """Return where this trial differs from one with the same seed.

        This is for tests with `EnvContract`. `envmgr check` runs the envs in processes of their
        own, and compares them in `testing.checkup.verdicts`.
        """
        pairs = zip(self.sums, other.sums, strict=False)
        place = next((k for k, (one, two) in enumerate(pairs) if one != two), None)
        if place is None:
            return self.problems
        return [
            *self.problems,
            Problem(
                "seed",
                f"two envs with the same seed and actions differ from observation {place} on. Draw "
                "all random numbers from generators that reset or seed sets.",
            ),
        ]


def seeded_run(
    env: Any,
    play: RandomPlay,
    n_steps: int,
    seed: int,
    begin: Callable[[str], None] = lambda what: None,
    limit_s: float = math.inf,
) -> Iterator[EnvTimestep]:
    """Seed an env and its actions, and play; yield what resets (with the reward 0) and steps give.

    The run ends where a step has raised, as the env's generators may be in any state then.

    Args:
        env: the env that `play` steps.
        play: takes the steps.
        n_steps: how many steps to take; there is a reset where an episode ends.
        seed: the seed of the env and of the actions.
        begin: called with "seed", "reset" or "step" before each.
        limit_s: seconds after which no further step is taken.
    """

    def first() -> EnvTimestep:
        begin("reset")
        return EnvTimestep(play.reset()[0], 0.0, False, {})

    end = time.monotonic() + limit_s
    adapt.spaces_of(env)[1].seed(seed)
    begin("seed")
    if adapt.takes_seeds(env):
        adapt.seed_env(env, seed, None)
    yield first()
    for n in range(n_steps):
        if n and time.monotonic() >= end:
            return
        begin("step")
        timestep = play.step(play.action())
        if play.n_failed:
            return
        yield timestep
        if timestep.done:
            yield first()


def misfit(space: Any, value: Any) -> str:
    """Return what managers say of an observation that does not fit its space; empty if it fits.

    As in managers, values of another dtype of the same kind are accepted (float64 for float32).
    """
    try:
        codec_of(space).structure.flatten(value)
    except ValueMismatchError as error:
        return str(error)
    return ""
