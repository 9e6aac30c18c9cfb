"""Envs of many kinds whose every value follows from their seed and all the actions they were given.

So two envs that were given the same seed and actions show whether they also got them in the same
types, took each of them once, and lost nothing of what they returned.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from envmgr import BaseEnv, EnvTimestep

OBSERVATIONS: dict[str, Any] = {
    "vector": Box(-1.0, 1.0, (4,), np.float32),
    "image": Box(0, 255, (40, 41, 3), np.uint8),
    "dict": Dict({"x": Box(-9.0, 9.0, (2, 2), np.float64), "n": Discrete(7), "b": MultiBinary(3)}),
    "tuple": Tuple((Box(0, 1, (), np.float32), Dict({"m": MultiDiscrete([3, 4])}))),
    "discrete": Discrete(1000, start=-5),
    "point": Box(-1.0, 1.0, (), np.float64),
    "empty": Box(-1.0, 1.0, (2, 0), np.float32),
    "dict with an empty part": Dict({"none": Box(-1.0, 1.0, (0,), np.float32), "n": Discrete(7)}),
}
ACTIONS: dict[str, Any] = {
    "discrete": Discrete(6, start=1),
    "box": Box(-1.0, 1.0, (2,), np.float32),
    "multidiscrete": MultiDiscrete([3, 2]),
    "multibinary": MultiBinary(4),
    "dict": Dict({"turn": Discrete(3), "push": Box(-1.0, 1.0, (1,), np.float32)}),
    "tuple": Tuple((Discrete(4), MultiBinary(2))),
    "empty": Box(-1.0, 1.0, (0,), np.float32),
    "dict with an empty part": Dict({"none": Box(-1.0, 1.0, (3, 0), np.float64), "n": Discrete(3)}),
}


class Family(NamedTuple):
    """One kind of envs."""

    observation: str
    action: str
    style: str

    def __str__(self) -> str:
        return f"{self.style}-{self.observation}-{self.action}"

    def __call__(self) -> Any:
        env = GymnasiumMember if self.style == "gymnasium" else BaseMember
        return env(OBSERVATIONS[self.observation], ACTIONS[self.action])


def fill(space: Any, rng: np.random.Generator) -> Any:
    """Return a value of a space, of exactly its types."""
    if isinstance(space, Dict):
        return {key: fill(part, rng) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(fill(part, rng) for part in space.spaces)
    if isinstance(space, Discrete):
        return np.int64(space.start + rng.integers(space.n))
    if isinstance(space, MultiDiscrete):
        return rng.integers(space.nvec).astype(space.dtype)
    if isinstance(space, MultiBinary):
        return rng.integers(0, 2, space.shape).astype(space.dtype)
    if np.dtype(space.dtype).kind == "f":
        return np.asarray(rng.uniform(-1.0, 1.0, space.shape)).astype(space.dtype)
    return rng.integers(0, 256, space.shape).astype(space.dtype)


def described(value: Any) -> str:
    """Return a value and the types in it as text."""
    if isinstance(value, dict):
        return f"{type(value).__name__}{[(key, described(value[key])) for key in sorted(value)]}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}{[described(part) for part in value]}"
    if isinstance(value, np.ndarray):
        return f"array({value.dtype}, {value.shape}, {value.tobytes().hex()})"
    return f"{type(value).__name__}({value!r})"


class Odd:
    """An object that is equal to its like."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd) and self.number == other.number

    __hash__ = None  # type: ignore[assignment]


class FamilyError(Exception):
    """What these envs raise."""


class _Life:
    """What members of both styles do."""

    def __init__(self, observation_space: Any) -> None:
        self.space = observation_space
        self.rng = np.random.default_rng()
        self.knob: Any = 0
        self.count = 0
        self.past = 0
        self.fails_next = False

    def begin(self, params: Any, seed: int | None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
            self.count = self.past = 0
        rng = self.draw(("reset", sorted(params.items())))
        if self.fails_next:
            self.fails_next = False
            raise FamilyError("a reset")
        return fill(self.space, rng), self.info(rng)

    def draw(self, what: Any) -> np.random.Generator:
        self.count += 1
        self.past = zlib.crc32(f"{self.past} {what} {described(self.knob)}".encode())
        return np.random.default_rng([self.past, int(self.rng.integers(1 << 32))])

    def act(self, action: Any) -> tuple[Any, Any, bool, bool, Any]:
        rng = self.draw(described(action))
        fate = 1.0 if self.knob == "calm" else rng.random()
        if fate < 0.02:
            raise FamilyError(f"step {self.count}")
        info = self.info(rng)
        if fate < 0.04:
            info["abnormal"] = True
        terminated, truncated = 0.04 < fate < 0.16, 0.14 < fate < 0.2
        self.fails_next = 0.05 < fate < 0.06
        return fill(self.space, rng), self.reward(rng), terminated, truncated, info

    def reward(self, rng: np.random.Generator) -> Any:
        number = float(rng.normal())
        kinds: list[Any] = [
            *[number] * 6,
            int(number * 100),
            *(np.float32(number), np.float64(number), np.int64(number * 9), number > 0),
            *(np.array([number], np.float32), np.array(number), np.arange(3) * number),
            (1 << 53) + int(number * 100),
        ]
        return kinds[rng.integers(len(kinds))]

    def info(self, rng: np.random.Generator) -> dict[Any, Any]:
        number = float(rng.normal())
        kinds: list[dict[Any, Any]] = [
            *[{} for _ in range(8)],
            {"x": number},
            {"n": self.count, "good": number > 0, "nothing": None, "x": number},
            {"text": f"step {self.count} ä", "empty": {}, "in": {"deep": {"x": number}, "n": 1}},
            {"array": np.arange(3) * number, "f4": np.float32(number), "i2": np.int16(self.count)},
            {"zeros": np.zeros((2, 0)), "point": np.array(number), "b": np.bool_(number > 0)},
            {"large": np.full(1000, number)},
            {f"key {k}": number * k for k in range(40)},
            {"list": [number, self.count], "tuple": (1, "two"), "set": {3}},
            {"odd": Odd(self.count), 7: "a key that is no text", ("a", 1): None},
            {"big": 1 << 70, "complex": 1j * number, "bytes": b"\0\1"},
        ]
        return kinds[rng.integers(len(kinds))]

    def peek(self, offset: int) -> int:
        """Draw a number, which changes all that follows."""
        return int(self.draw("peek").integers(1000)) + offset


class GymnasiumMember(gymnasium.Env[Any, Any]):
    """In the style of gymnasium."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.life = _Life(observation_space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.life.begin(options or {}, seed)

    def step(self, action: Any) -> Any:
        return self.life.act(action)

    def peek(self, offset: int) -> int:
        return self.life.peek(offset)

    @property
    def count(self) -> int:
        return self.life.count

    @property
    def knob(self) -> Any:
        return self.life.knob

    @knob.setter
    def knob(self, value: Any) -> None:
        self.life.knob = value


class BaseMember(BaseEnv):
    """In the style of DI-engine."""

    reward_space = Box(-np.inf, np.inf, (1,), np.float64)

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.life = _Life(observation_space)
        self._due: int | None = None

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        self._due = seed

    def reset(self, **params: Any) -> Any:
        seed, self._due = self._due, None
        obs, self.reset_info = self.life.begin(params, seed)
        return obs

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.life.act(action)
        if "n" in info:
            info = {**info, "truncated": truncated}
        many = [info, {"agent": 1}] if "list" in info else info
        return EnvTimestep(obs, reward, terminated or truncated, many)

    def close(self) -> None:
        pass

    def peek(self, offset: int) -> int:
        return self.life.peek(offset)

    @property
    def count(self) -> int:
        return self.life.count

    @property
    def knob(self) -> Any:
        return self.life.knob

    @knob.setter
    def knob(self, value: Any) -> None:
        self.life.knob = value
