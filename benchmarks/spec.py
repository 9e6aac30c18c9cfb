"""What one measurement is: the words that `run.py` and the measuring processes share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

RATE = "rate"
LIFETIME = "lifetime"
TRAINING = "training"


@dataclass(frozen=True)
class Spec:
    """One measurement of one library, taken in a process of its own.

    Attributes:
        library: a module of `adapters`.
        options: what the row of the library says; the adapter knows what they mean.
        env: name of an env, see `envs.env_factory`.
        env_num: how many envs.
        kind: RATE (env steps per second), LIFETIME (start, memory, close) or TRAINING (env steps
            per second of a trainer, learning included).
        seconds: how long RATE measures.
        warm_up_s: how long RATE runs before.
        busy_loops: work of one step of the env `busy`.
        trainer: whose PPO trains, with TRAINING: `sb3` or `cleanrl`.
        train_steps: env steps of a TRAINING.
    """

    library: str
    options: Mapping[str, Any] = field(default_factory=dict)
    env: str = "null"
    env_num: int = 1
    kind: str = RATE
    seconds: float = 1.0
    warm_up_s: float = 0.4
    busy_loops: int = 1
    trainer: str = ""
    train_steps: int = 0

    def to_json(self) -> str:
        """Return the spec as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """Return the spec that `to_json` wrote."""
        return cls(**json.loads(text))


class Runner(Protocol):
    """One library running one env, as an adapter gives it."""

    def start(self) -> None:
        """Build the envs, reset them and take the first observation of each."""

    def step(self) -> int:
        """Go on by one batch; return the number of env steps in it, resets not counted."""

    def close(self) -> None:
        """Close the envs."""


class Trainer(Protocol):
    """A trainer with its vector env."""

    def start(self) -> None:
        """Build the envs and the agent, and reset the envs."""

    def train(self) -> int:
        """Train; return the env steps that were taken."""

    def envs_s(self) -> float:
        """Return the seconds spent in the vector env."""

    def close(self) -> None:
        """Close the envs."""


class UnavailableError(RuntimeError):
    """A library cannot do what a row asks for; the message says why. The row is left out."""
