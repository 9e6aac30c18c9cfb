"""Envs whose data has other forms than arrays of one shape: one class for each form."""

from __future__ import annotations

import os
import string
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    GraphInstance,
    MultiBinary,
    Sequence,
    Text,
    Tuple,
)

from envmgr import BaseEnv, EnvTimestep


@dataclass
class Message:
    """What is said in a chat."""

    role: str
    text: str
    tags: list[str] = field(default_factory=list)


class Formed(BaseEnv):
    """Counts steps of episodes of four, and gives observations of some form.

    What it has returned, and what it was given, it changes afterwards, as careless envs do.
    """

    observation_space = action_space = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.reset_info = {}

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        self.rng = np.random.default_rng(seed)

    def reset(self, **params: Any) -> Any:
        self.t, self.heard = 0, ""
        return self.observe()

    def step(self, action: Any) -> EnvTimestep:
        self.t += 1
        self.heard = repr(action)
        self.spoil(action)
        return EnvTimestep(self.observe(), float(self.t), self.t == 4, {"heard": self.heard})

    def close(self) -> None:
        pass

    def observe(self) -> Any:
        raise NotImplementedError

    def spoil(self, action: Any) -> None:
        """Change what it was given."""


class Chat(Formed):
    """Has no spaces: gives the messages so far, one list that grows, and takes a message."""

    def reset(self, **params: Any) -> Any:
        self.log = [Message("system", f"be {self.rng.integers(9)}")]
        return super().reset()

    def step(self, action: Any) -> EnvTimestep:
        self.log.append(action)
        return super().step(action)

    def observe(self) -> Any:
        self.log[0].tags.append("seen")
        return self.log

    def spoil(self, action: Any) -> None:
        action.tags.append("taken")


class Dicts(Formed):
    """Has no spaces: gives a list of dicts whose keys differ, and takes dicts."""

    def observe(self) -> Any:
        self.state = [{"t": self.t}, {f"k{self.t}": [np.arange(self.t), self.heard, None]}]
        return self.state

    def spoil(self, action: Any) -> None:
        action["x"].append(1)
        self.state[0]["t"] = -1


class Bare(gymnasium.Env[Any, Any]):
    """Has bare spaces, and strings both ways."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = gymnasium.Space(), gymnasium.Space()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.text = f"north {self.np_random.integers(9)}"
        return self.text, {"length": len(self.text)}

    def step(self, action: Any) -> Any:
        self.text += f", {action}"
        return self.text, 1.0, len(self.text) > 40, False, {}


SCENE = Dict(
    {
        "picture": Box(0, 255, (6, 5, 3), np.uint8),
        "task": Text(99, charset=string.printable),
        "parts": Tuple((Sequence(Box(-1, 1, (2,), np.float32)), Discrete(7), gymnasium.Space())),
        "speed": Box(-np.inf, np.inf, (), np.float64),
    }
)


class Mixed(Formed):
    """Has arrays, and beside them what has no fixed layout; its actions too."""

    observation_space = SCENE
    action_space = Dict(
        {"say": Text(99, charset=string.printable), "push": Box(-1, 1, (2,), np.float32)}
    )

    def observe(self) -> Any:
        picture = np.full((6, 5, 3), self.t, np.uint8)
        points = tuple(self.rng.random((self.t, 2), np.float32))
        self.names = [self.heard]
        return {
            "picture": picture,
            "task": f"do {self.t}",
            "parts": (points, np.int64(self.t), self.names),
            "speed": np.array(self.rng.random()),
        }

    def spoil(self, action: Any) -> None:
        action["push"][:] = 0
        self.names.append("spoilt")


class Missions(gymnasium.Space[str]):
    """Texts of any length, as MiniGrid's missions: of a class that nobody knows."""

    def __init__(self) -> None:
        super().__init__(dtype=str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return f"find {self.np_random.integers(9)}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Missions)

    __hash__ = None  # type: ignore[assignment]


class Told(gymnasium.Env[Any, Any]):
    """As envs of MiniGrid: an image, a number and a text. Each image has a text of its own.

    Args:
        env_id: is in the text, too.
        has_long: every third text is longer than there is room for.
    """

    END, RAISE, EXIT = 3, 4, 5
    """Actions; lesser ones do nothing."""

    def __init__(self, env_id: int = 0, *, has_long: bool = True) -> None:
        image = Box(0, 255, (2, 4), np.uint8)
        self.observation_space = Dict(
            {"direction": Discrete(4), "image": image, "mission": Missions()}
        )
        self.action_space = Discrete(6)
        self.env_id, self.has_long = env_id, has_long

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        if action == self.RAISE:
            raise ValueError("of the env")
        if action == self.EXIT:
            os._exit(3)
        return self.observe(), 1.0, bool(action == self.END), False, {}

    def observe(self) -> Any:
        code = int(self.np_random.integers(1 << 24))
        image = np.array([[self.env_id, *code.to_bytes(3, "big")], [int(self.has_long)] * 4])
        obs = {"image": image.astype(np.uint8), "direction": code % 4}
        return {"mission": mission_of(obs["image"]), **obs}


def mission_of(image: Any) -> str:
    """Return the text that `Told` gives beside an image."""
    env_id, *code = image[0].tolist()
    number = int.from_bytes(code, "big")
    length = 2000 if image[1, 0] and number % 3 == 0 else number % 40
    return f"env {env_id}: fetch the {number}\0ü" + "€" * length


def is_told(obs: Any) -> bool:
    """Whether an observation of `Told` has the text and the number that belong to its image."""
    image, mission = obs["image"], obs["mission"]
    assert type(mission) is str
    assert (mission, obs["direction"]) == (mission_of(image), image[0, 3] % 4)
    return list(obs) == ["direction", "image", "mission"]


class Letters(Formed):
    """Has texts and nothing else."""

    observation_space = Dict({"head": Text(9), "body": Missions()})
    action_space = Discrete(5)

    def observe(self) -> Any:
        return {"head": f"at{self.t}", "body": f"{self.rng.integers(99)} " * 10 ** min(self.t, 3)}


class Graphs(Formed):
    """Has graphs, whose values are made of arrays of any length."""

    observation_space = Tuple((Graph(Box(-1, 1, (2,)), Discrete(3)), MultiBinary(2)))
    action_space = Discrete(5)

    def observe(self) -> Any:
        n = self.t + 1
        nodes = self.rng.random((n, 2), np.float32)
        links = np.arange(2 * n).reshape(n, 2) % n
        graph = GraphInstance(nodes, np.zeros(n, np.int64), links)
        return (graph, np.array([1, self.t % 2], np.int8))


UNIT = np.dtype([("hp", np.float32), ("at", np.int16, (2,)), ("name", "U6")])


class Records(Formed):
    """Has records, as a space of its own says; takes texts of fixed length."""

    observation_space = gymnasium.Space(shape=(3,), dtype=UNIT)
    action_space = gymnasium.Space(shape=(2,), dtype=np.dtype("U8"))

    def observe(self) -> Any:
        self.units = np.zeros(3, UNIT)
        self.units["hp"], self.units["at"][1], self.units["name"] = (
            self.rng.random(3),
            self.t,
            "ork",
        )
        return self.units

    def spoil(self, action: Any) -> None:
        action[:] = "spoilt"
        self.units["hp"] = 0


class Loose(Formed):
    """Has no spaces, and gives records, texts and objects in arrays, of any shape."""

    def observe(self) -> Any:
        units = np.zeros((self.t, 2), UNIT)
        return (units, np.array(["north", self.heard]), np.array([None, {"t": self.t}], object))

    def spoil(self, action: Any) -> None:
        action[0] = {}


class Small(Formed):
    """Has a short vector, and numbers for actions."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Discrete(3)

    def observe(self) -> Any:
        return np.array([self.t, self.rng.random()], np.float32)


class Wide(Formed):
    """Has a picture in a dict, and vectors for actions."""

    observation_space = Dict({"picture": Box(0, 255, (80, 60), np.uint8), "n": Discrete(9)})
    action_space = Box(-1, 1, (2,), np.float64)

    def observe(self) -> Any:
        return {"picture": np.full((80, 60), self.rng.integers(256), np.uint8), "n": self.t}


class Wider(Wide):
    """As `Wide`, whose actions have other bounds and a name."""

    action_space = Dict({"push": Box(-9, 9, (2,), np.float64), "n": Discrete(2)})


FORMS: dict[type[Any], Callable[[int], Any]] = {
    Chat: lambda k: Message("user", f"step {k}"),
    Dicts: lambda k: {"x": [k], "y": (k, str(k))},
    Bare: lambda k: f"go {k}",
    Mixed: lambda k: {"say": f"go {k}", "push": np.full(2, k / 9, np.float32)},
    Told: lambda k: k % 3,
    Letters: lambda k: k % 5,
    Graphs: lambda k: k % 5,
    Records: lambda k: np.array(["left", str(k)], "U8"),
    Loose: lambda k: np.array([{"k": k}, [k]], object),
}
"""What builds an env of each form, and its kth action."""

FIXED: dict[type[Any], Callable[[int], Any]] = {
    Small: lambda k: k % 3,
    Records: FORMS[Records],
    Wide: lambda k: np.array([k / 9, 0.5]),
    Wider: lambda k: {"n": np.int64(k % 2), "push": np.array([float(k), 0.0])},
}
"""Those whose data has a fixed layout, each another one."""


class Odd(Chat):
    """Its second step gives what cannot be sent, then its list becomes a dict; both at once."""

    def observe(self) -> Any:
        if self.t == 2:
            return {"lock": threading.Lock()}
        return {"now": "a dict"} if self.t == 3 else super().observe()
