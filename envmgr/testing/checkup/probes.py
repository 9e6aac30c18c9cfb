"""Probes, which workers run to find out about an env. Each probe builds an env of its own."""

from __future__ import annotations

import contextlib
import gc
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from envmgr import pickles
from envmgr.env import adapt
from envmgr.env.async_env import as_blocking
from envmgr.env.contract import env_name
from envmgr.env.play import RandomPlay
from envmgr.manager.tally import TalliedPlay, Tally
from envmgr.testing.checksums import checksum_of, reward_checksum
from envmgr.testing.checkup.processes import Holdings, holdings, release_free_memory
from envmgr.testing.env_problems import problems_of_one, seeded_run
from envmgr.untrusted import plain_line
from envmgr.worker.profiling import profile_env

Factory = Callable[[], Any]

MOST_SAMPLES = 40
"""How often the process is looked at, at most, while it endures episodes; and at least half as
often, unless there are fewer episodes."""

LONGEST_EPISODE = 1000
"""Steps after which an episode is cut short by a reset."""

CUT = -1
"""The last entry of a trajectory that is not whole."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Outside(NamedTuple):
    """How a part of observations was outside of its Box.

    Attributes:
        n: in how many observations it was.
        excess: by how much it was, at most.
        value: the value that was that far outside.
        bound: the bound that this value exceeds.
    """

    n: int
    excess: float
    value: float
    bound: float


class Description(NamedTuple):
    """What an env is, from its construction and a few steps.

    Attributes:
        name: the name of its class.
        spaces: the spaces of observations and actions, as text.
        casts: dtypes of observations that differ from those of the space, as text.
        outside: by their names, the parts of observations that were outside of their Box.
        n_observations: how many observations were looked at.
        unpicklable: why an info cannot be sent; empty if all can.
        construction_s: seconds until it was built.
        before: what the process had before that.
        after: what the process had with the env built and reset.
        handlers: names of signals whose handlers it changed.
        render_mode: the render mode it was built with.
        render_modes: the render modes it has.
    """

    name: str
    spaces: tuple[str, str]
    casts: tuple[str, ...]
    unpicklable: str
    construction_s: float
    before: Holdings
    after: Holdings
    handlers: tuple[str, ...]
    render_mode: str | None
    render_modes: tuple[str, ...]
    outside: Mapping[str, Outside] = MappingProxyType({})
    n_observations: int = 0


@contextlib.contextmanager
def _env_of(factory: Factory) -> Iterator[Any]:
    env = as_blocking(factory())
    try:
        yield env
    finally:
        adapt.close_env(env)


_plays: list[RandomPlay] = []
"""The plays of the probe that runs in this process."""

_tallies: list[Tally] = []
"""The tally in which that probe counts its steps: one at most."""


def _play_of(env: Any) -> RandomPlay:
    _plays.append(play := TalliedPlay(env, _tallies[0]) if _tallies else RandomPlay(env))
    return play


class Plays(NamedTuple):
    """The number of random steps, and their failures.

    Attributes:
        n_steps: how many steps were tried.
        n_failed: how many steps and resets raised.
        failure: what the first of these raised, and where, as lines.
    """

    n_steps: int = 0
    n_failed: int = 0
    failure: str = ""

    def __add__(self, other: Any) -> Plays:
        """Return both together."""
        failure = self.failure or other.failure
        return Plays(self.n_steps + other.n_steps, self.n_failed + other.n_failed, failure)


def counted_plays(tally: str, probe: Callable[..., Any], *args: Any) -> tuple[Any, Plays]:
    """Run a probe; return what it returned, and its random steps with their failures.

    Args:
        tally: path of the `Tally` of steps.
        probe: one of the probes below.
        *args: the arguments of the probe.
    """
    with contextlib.closing(Tally(tally)) as opened:
        _tallies.append(opened)
        try:
            value = probe(*args)
            return value, sum((Plays(p.n_steps, p.n_failed, p.failure) for p in _plays), Plays())
        finally:
            _plays.clear()
            _tallies.clear()


def describe(factory: Factory, n_steps: int, limit_s: float = math.inf) -> Description:
    """Build an env, reset it, and take a few steps, or as many as fit into the time."""
    handlers = [signal.getsignal(number) for number in _SIGNALS]
    before, began = holdings(), time.perf_counter()
    with _env_of(factory) as env:
        construction_s = time.perf_counter() - began
        observation_space, action_space, _ = adapt.spaces_of(env)
        play = _play_of(env)
        obs, info = play.reset()
        after, unpicklable = holdings(), _why_unpicklable(info)
        casts, outside = set(_casts(observation_space, obs)), dict[str, Outside]()
        _note_outside(outside, observation_space, obs)
        end = time.monotonic() + limit_s
        for _ in range(n_steps):
            timestep = play.step(play.action())
            casts |= set(_casts(observation_space, timestep.obs))
            _note_outside(outside, observation_space, timestep.obs)
            unpicklable = unpicklable or _why_unpicklable(timestep.info)
            if time.monotonic() >= end:
                break
            if timestep.done:
                play.reset()
        built = adapt.as_built(env)
        changed = zip(_SIGNALS, handlers, strict=True)
        return Description(
            env_name(built),
            (plain_line(str(observation_space)), plain_line(str(action_space))),
            tuple(sorted(casts)),
            unpicklable,
            construction_s,
            before,
            after,
            tuple(number.name for number, old in changed if signal.getsignal(number) is not old),
            getattr(built, "render_mode", None),
            tuple(map(str, (getattr(built, "metadata", None) or {}).get("render_modes", ()))),
            outside,
            play.n_steps + 1,
        )


def _boxes(space: Any, obs: Any, path: str = "observation") -> Iterator[tuple[str, Any, Any]]:
    """Yield the parts of an observation that have a Box: the part's name, the Box and the part."""
    if isinstance(space, gymnasium.spaces.Dict) and isinstance(obs, dict):
        for key, part in space.spaces.items():
            yield from _boxes(part, obs.get(key), f"{path}[{key!r}]")
    elif isinstance(space, gymnasium.spaces.Tuple) and isinstance(obs, (tuple, list)):
        for k, part in enumerate(space.spaces[: len(obs)]):
            yield from _boxes(part, obs[k], f"{path}[{k}]")
    elif isinstance(space, gymnasium.spaces.Box):
        yield path, space, obs


def _casts(space: Any, obs: Any) -> Iterator[str]:
    for path, box, part in _boxes(space, obs):
        dtype = getattr(part, "dtype", None)
        if isinstance(dtype, np.dtype) and dtype != box.dtype:
            yield f"{path} is {dtype}, its space {box.dtype}"


def _note_outside(outside: dict[str, Outside], space: Any, obs: Any) -> None:
    """Note which parts of an observation are outside of their Box; ones without numbers are not."""
    for path, box, part in _boxes(space, obs):
        values = np.asarray(part)
        if values.shape != box.shape or values.dtype.kind not in "biuf":
            continue  # `contract` says that
        if not ((values < box.low) | (values > box.high)).any():
            continue
        low, high, values = (np.asarray(one, np.float64) for one in (box.low, box.high, values))
        excess = np.fmax(low - values, values - high)
        farthest = np.nanargmax(excess)
        value, by = values.flat[farthest], excess.flat[farthest]
        bound = (low if value < low.flat[farthest] else high).flat[farthest]
        before = outside.get(path, Outside(0, 0.0, 0.0, 0.0))
        worst = before[1:] if before.excess >= by else (float(by), float(value), float(bound))
        outside[path] = Outside(before.n + 1, *worst)


def _why_unpicklable(info: Any) -> str:
    try:
        pickles.dumps(info)  # which messages fall back on
    except Exception as error:  # whatever a __reduce__ may raise
        return f"{type(error).__name__}: {error}"
    return ""


def contract(
    factory: Factory, n_steps: int, seed: int, limit_s: float = math.inf
) -> list[tuple[str, str]]:
    """Return what `env_problems` finds, as pairs of kind and message.

    It does not compare two runs with the same seed: `trajectory` is for that.
    """
    problems, _ = problems_of_one(
        factory, n_steps=n_steps, seed=seed, play_of=_play_of, limit_s=limit_s
    )
    return [(problem.kind, problem.message) for problem in problems]


class Trajectory(NamedTuple):
    """What one env gave for the same seed and actions, twice.

    Attributes:
        is_seeded: whether the env takes seeds.
        first: checksums of observations, rewards and ends, reset after reset; `CUT` where a step
            raised, or time was over, after which nothing can be compared.
        again: likewise, after a second reset of the same env with the same seed.
    """

    is_seeded: bool
    first: tuple[int, ...]
    again: tuple[int, ...]


def trajectory(
    factory: Factory, n_steps: int, seed: int, whole: int, limit_s: float = math.inf
) -> Trajectory:
    """Step an env with actions that follow from the seed, in two runs.

    Args:
        factory: builds the env.
        n_steps: how many steps to take.
        seed: the seed of the env and of the actions.
        whole: how many steps other trajectories take; one with fewer is not whole.
        limit_s: how long each of the two runs may go on.
    """
    with _env_of(factory) as env:
        of_obs = checksum_of(adapt.spaces_of(env)[0])

        def run() -> tuple[int, ...]:
            play = _play_of(env)
            given = seeded_run(env, play, n_steps, seed, limit_s=limit_s)
            sums = tuple(of_obs(one.obs) ^ reward_checksum(one.reward) for one in given)
            return (*sums, CUT) if play.n_failed or play.n_steps < whole else sums

        return Trajectory(adapt.takes_seeds(env), run(), run())


def reset_with(factory: Factory, params: dict[str, Any]) -> None:
    """Reset an env with these params, as `manager.reset({0: params})` does."""
    with _env_of(factory) as env:
        adapt.reset_env(env, None)
        adapt.reset_env(env, params)


def pace(factory: Factory, seconds: float) -> dict[str, Any]:
    """Return how long steps and resets take."""
    with _env_of(factory) as env:
        return profile_env(env, seconds, _play_of(env)).as_dict()


class Endured(NamedTuple):
    """What became of a process while an env ran episodes.

    Attributes:
        asked: how many episodes this process was asked for.
        cut: episodes that had not ended after `LONGEST_EPISODE` steps.
        samples: pairs of the number of episodes so far and what the process had then.
    """

    asked: int
    n_steps: int
    cut: int
    samples: tuple[tuple[int, Holdings], ...]


def endure(factory: Factory, episodes: int, limit_s: float) -> Endured:
    """Run episodes, as many as asked for or as fit into the time.

    At first the process is looked at after each episode, and less often the more there are: however
    few episodes fit into the time, there are samples of them, equally spaced in episodes.
    """
    end, every = time.monotonic() + limit_s, 1
    n_steps = cut = 0
    samples: list[tuple[int, Holdings]] = []
    with _env_of(factory) as env:
        play = _play_of(env)
        for episode in range(episodes + 1):
            over = episode == episodes or time.monotonic() >= end
            if episode % every == 0 or over:
                gc.collect()
                release_free_memory()
                samples.append((episode, holdings()))
            if over:
                break
            if len(samples) == MOST_SAMPLES:
                samples, every = samples[::2], 2 * every
            play.reset()
            taken, done = 0, False
            while not done and taken < LONGEST_EPISODE and time.monotonic() < end:
                done = play.step(play.action()).done
                taken += 1
            n_steps += taken
            cut += not done
    return Endured(episodes, n_steps, cut, tuple(samples))


def rebuild(factory: Factory, times: int, limit_s: float) -> tuple[Holdings, ...]:
    """Build, reset and close envs one after the other; return what the process had after each."""
    end = time.monotonic() + limit_s
    found = []
    for _ in range(times):
        with _env_of(factory) as env:
            adapt.reset_env(env, None)
        del env
        gc.collect()
        found.append(holdings())
        if time.monotonic() >= end:
            break
    return tuple(found)


def rendered(factory: Factory) -> tuple[str, float]:
    """Return what a frame is, in words, and how long rendering it took."""
    with _env_of(factory) as env:
        adapt.reset_env(env, None)
        render = adapt.env_attribute(env, "render")
        began = time.perf_counter()
        frame = render()
        took_s = time.perf_counter() - began
    if isinstance(frame, np.ndarray):
        return f"an array {frame.shape} of {frame.dtype}", took_s
    return "nothing" if frame is None else f"a {type(frame).__name__}", took_s
