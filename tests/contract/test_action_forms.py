"""In whatever form actions are given: which way they take, and what the env is given of them.

An env in Gymnasium's style is given what its space promises: so every form of it goes through the
shared memory. Another env is given what the caller gave: there only numbers in the forms that
are noted beside them do, and arrays that are exactly of the space.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import closing
from enum import IntEnum
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from envmgr import BaseEnv, EnvTimestep, create_env_manager
from envmgr.errors import ActionError
from tests.cases import for_each
from tests.contract.family import described
from tests.contract.harness import ALL_BLOCK, ALL_MESSAGE, INLINE, THREADS_MESSAGE_SHARED, Setup
from tests.faults.traffic import sent_by


class Turn(IntEnum):
    LEFT = 2
    RIGHT = 3


class Tensor:
    """What a library's tensor is to us: something that numpy can convert."""

    def __init__(self, value: Any) -> None:
        self._value = np.asarray(value)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._value

    def __len__(self) -> int:
        return len(self._value)

    def __getitem__(self, index: Any) -> Any:
        return type(self)(self._value[index])


class Heard(gymnasium.Env[Any, Any]):
    """Tells what it was given, and refuses what is not in its space."""

    observation_space = Box(-1, 1, (1,), np.float32)

    def __init__(self, action_space: Any) -> None:
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        text = described(action)
        heard = {
            "heard": text,
            "sum": zlib.crc32(text.encode()),  # V2 has no text in infos
            "is in it": self.action_space.contains(action),
        }
        return np.zeros(1, np.float32), 0.0, False, False, heard


class HeardPlainly(BaseEnv):
    """In the style of DI-engine: nothing converts what it is given."""

    def __init__(self, action_space: Any) -> None:
        self.observation_space = Heard.observation_space
        self.action_space = action_space

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        pass

    def reset(self, **params: Any) -> Any:
        return np.zeros(1, np.float32)

    def step(self, action: Any) -> Any:
        heard = {"heard": described(action)}
        return EnvTimestep(np.zeros(1, np.float32), 0.0, False, heard)

    def close(self) -> None:
        pass


BLOCK, MESSAGE, REFUSED = "block", "message", "refused"
FROM_2 = Discrete(3, start=2)
WIDE = Box(-1.0, 1.0, (2,), np.float64)
SMALL = Box(-9, 9, (2,), np.int16)
CHOICES = MultiDiscrete([3, 4])
BITS = MultiBinary(2)
PARTS = Dict({"turn": Discrete(3), "push": Box(-1.0, 1.0, (2,), np.float32)})
PAIR = Tuple((Discrete(3), MultiDiscrete([2, 2])))

FORMS: dict[str, tuple[Any, Any, str, str]] = {
    # what it is: its space, the action, how it goes to Gymnasium's envs, and to others
    "int": (FROM_2, 3, BLOCK, BLOCK),
    "np.int64": (FROM_2, np.int64(3), BLOCK, BLOCK),
    "np.int32": (FROM_2, np.int32(3), BLOCK, BLOCK),
    "np.uint8": (FROM_2, np.uint8(3), BLOCK, BLOCK),
    "array ()": (FROM_2, np.array(3), BLOCK, BLOCK),
    "array (1,)": (FROM_2, np.array([3]), BLOCK, BLOCK),
    "array () of int32, as jax": (FROM_2, np.array(3, np.int32), BLOCK, BLOCK),
    "array (1,) of int32": (FROM_2, np.array([3], np.int32), BLOCK, BLOCK),
    "array (1, 1)": (FROM_2, np.array([[3]]), BLOCK, MESSAGE),
    "tensor ()": (FROM_2, Tensor(3), BLOCK, BLOCK),
    "tensor (1,)": (FROM_2, Tensor([3]), BLOCK, BLOCK),
    "tensor () of int32": (FROM_2, Tensor(np.int32(3)), BLOCK, BLOCK),
    "list of one": (FROM_2, [3], BLOCK, MESSAGE),
    "enum": (FROM_2, Turn.RIGHT, BLOCK, MESSAGE),
    "bool": (FROM_2, True, REFUSED, REFUSED),
    "np.bool": (FROM_2, np.True_, REFUSED, REFUSED),
    "float": (FROM_2, 3.0, REFUSED, REFUSED),
    "array () of floats": (FROM_2, np.array(3.0), REFUSED, REFUSED),
    "array of two": (FROM_2, np.array([3, 3]), REFUSED, REFUSED),
    "box": (WIDE, np.array([0.5, 1.0]), BLOCK, BLOCK),
    "box of float32": (WIDE, np.array([0.5, 1.0], np.float32), BLOCK, MESSAGE),
    "box of ints": (WIDE, np.array([0, 1]), BLOCK, MESSAGE),
    "box, tensor": (WIDE, Tensor([0.5, 1.0]), BLOCK, BLOCK),
    "box, tensor of float32": (WIDE, Tensor(np.float32([0.5, 1.0])), BLOCK, MESSAGE),
    "box, list": (WIDE, [0.5, 1], BLOCK, MESSAGE),
    "box, tuple": (WIDE, (0.5, 1.0), BLOCK, MESSAGE),
    "box (1, 2)": (WIDE, np.array([[0.5, 1.0]]), REFUSED, REFUSED),
    "box of int16": (SMALL, np.array([5, -9], np.int16), BLOCK, BLOCK),
    "box of int16, int64": (SMALL, np.array([5, -9]), BLOCK, MESSAGE),
    "box of int16, floats": (SMALL, np.array([5.0, -9.0]), REFUSED, REFUSED),
    "multidiscrete": (CHOICES, np.array([2, 3]), BLOCK, BLOCK),
    "multidiscrete of int32": (CHOICES, np.array([2, 3], np.int32), BLOCK, MESSAGE),
    "multidiscrete, tuple": (CHOICES, (2, 3), BLOCK, MESSAGE),
    "multidiscrete, list": (CHOICES, [2, np.int64(3)], BLOCK, MESSAGE),
    "multidiscrete, tensor": (CHOICES, Tensor([2, 3]), BLOCK, BLOCK),
    "multidiscrete out of bounds": (CHOICES, (3, 3), REFUSED, REFUSED),
    "multibinary": (BITS, np.array([1, 0], np.int8), BLOCK, BLOCK),
    "multibinary, bools": (BITS, np.array([True, False]), BLOCK, MESSAGE),
    "multibinary, list": (BITS, [1, 0], BLOCK, MESSAGE),
    "dict": (PARTS, {"turn": np.int64(2), "push": np.zeros(2, np.float32)}, BLOCK, BLOCK),
    "dict, int": (PARTS, {"turn": 2, "push": np.zeros(2, np.float32)}, BLOCK, MESSAGE),
    "dict, float64": (PARTS, {"turn": np.array(2), "push": np.zeros(2)}, BLOCK, MESSAGE),
    "dict, tensors": (PARTS, {"turn": Tensor(2), "push": Tensor([0.5, 1.0])}, BLOCK, MESSAGE),
    "dict, another order": (PARTS, {"push": [0, 1], "turn": Turn.LEFT}, BLOCK, MESSAGE),
    "tuple": (PAIR, (np.int64(2), np.array([1, 0])), BLOCK, BLOCK),
    "tuple, list": (PAIR, [2, (1, 0)], BLOCK, MESSAGE),
    "tuple, tensors": (PAIR, (Tensor([2]), Tensor([1, 0])), BLOCK, MESSAGE),
}
N = 3
ENVS: list[Callable[[Any], Any]] = [Heard, HeardPlainly]


def told(
    setup: Setup, env: Callable[[Any], Any], space: Any, give: Callable[[Any], Any], **cfg: Any
) -> tuple[str, list[Any]]:
    """Return which way actions went, and what the envs tell of them.

    Args:
        setup: what the manager is.
        env: the class of its envs.
        space: of actions.
        give: steps the manager, once.
        **cfg: more of its config.
    """
    with closing(create_env_manager({**setup.cfg, **cfg}, env_fn=[partial(env, space)] * N)) as m:
        m.launch()
        assert len(m.ready_obs) == N
        with sent_by(m) as sent:
            try:
                infos = give(m)
            except ActionError:
                assert "frame" not in [what for what, *_ in sent]
                return REFUSED, []
    return (MESSAGE if "frame" in [what for what, *_ in sent] else BLOCK), infos


def by_dict(action: Any) -> Callable[[Any], list[Any]]:
    return lambda m: [t.info for t in m.step(dict.fromkeys(range(N), action)).values()]


def by_arrays(actions: Any) -> Callable[[Any], list[Any]]:
    def give(m: Any) -> list[Any]:
        m.send_arrays(range(N), actions)
        return list(m.recv_arrays().infos)

    return give


def heard(infos: list[Any]) -> list[Any]:
    return [info["heard"] for info in infos]


@for_each("form", FORMS)
def test_every_form_goes_its_way_and_means_the_same_by_message(form: str) -> None:
    space, action, *ways = FORMS[form]
    for env, way in zip(ENVS, ways, strict=True):
        found, infos = told(INLINE, env, space, by_dict(action))
        assert found == way
        assert told(INLINE, env, space, by_arrays([action] * N)) == (found, infos)
        by_message = told(THREADS_MESSAGE_SHARED, env, space, by_dict(action))
        assert by_message[0] == (REFUSED if way == REFUSED else MESSAGE)
        assert heard(by_message[1]) == heard(infos)
        for info in infos:
            assert info.get("is in it", True)
            assert len(infos) == N


@pytest.mark.parametrize("setup", [ALL_BLOCK, ALL_MESSAGE], ids=str)
def test_every_form_of_a_number_reaches_other_processes_as_it_is(setup: Setup) -> None:
    """In one call, each env is given another form."""
    numbers = [
        action for space, action, _, way in FORMS.values() if space is FROM_2 and way == BLOCK
    ]
    expected = [described(np.asarray(n) if isinstance(n, Tensor) else n) for n in numbers]
    env_fn = [partial(HeardPlainly, FROM_2)] * len(numbers)
    with closing(create_env_manager({**setup.cfg, "num_workers": 2}, env_fn=env_fn)) as m:
        m.launch()
        for _ in range(2):
            assert len(m.ready_obs) == len(numbers)
            with sent_by(m) as sent:
                timesteps = m.step(dict(enumerate(numbers)))
            assert heard([t.info for t in timesteps.values()]) == expected
            assert ("frame" in [what for what, *_ in sent]) is not setup.shared_memory


BATCHES: dict[str, tuple[Any, Any]] = {
    "numbers": (FROM_2, np.array([2, 3, 4])),
    "numbers of int32": (FROM_2, np.array([2, 3, 4], np.int32)),
    "a column of numbers": (FROM_2, np.array([[2], [3], [4]])),
    "a tensor": (FROM_2, Tensor([2, 3, 4])),
    "a tensor that is a column": (FROM_2, Tensor([[2], [3], [4]])),
    "a list of tensors": (FROM_2, [Tensor(2), Tensor([3]), np.int64(4)]),
    "float32": (WIDE, np.zeros((3, 2), np.float32)),
    "a tensor of float32": (WIDE, Tensor(np.zeros((3, 2), np.float32))),
    "lists": (WIDE, [[0.5, 1.0]] * 3),
    "a dict of tensors": (PARTS, {"turn": Tensor([0, 1, 2]), "push": Tensor(np.ones((3, 2)))}),
    "a dict with a column": (PARTS, {"turn": np.array([[0], [1], [2]]), "push": np.ones((3, 2))}),
}
"""Batches of actions of three envs, all of which go through the shared memory."""


@for_each("name", BATCHES)
def test_batches_of_every_form_go_through_the_shared_memory(name: str) -> None:
    space, batch = BATCHES[name]
    way, infos = told(INLINE, Heard, space, by_arrays(batch))
    assert way == BLOCK
    assert all(info["is in it"] for info in infos)
    assert heard(told(THREADS_MESSAGE_SHARED, Heard, space, by_arrays(batch))[1]) == heard(infos)


@pytest.mark.v2
@for_each("name", BATCHES)
def test_batches_of_every_form_do_in_v2(name: str) -> None:
    from treetensor.numpy import array

    space, batch = BATCHES[name]

    def give(m: Any) -> list[Any]:
        given = batch
        if isinstance(batch, dict):
            given = array({key: np.asarray(column) for key, column in batch.items()})
        return [int(step.info.sum) for step in m.step(given)]

    expected = [info["sum"] for info in told(INLINE, Heard, space, by_arrays(batch))[1]]
    assert told(Setup("base_v2"), Heard, space, give) == (BLOCK, expected)


@pytest.mark.torch
def test_tensors_of_torch_go_through_the_shared_memory() -> None:
    torch = pytest.importorskip("torch")
    q_values = torch.tensor([[0.0, 1.0, 0.5]] * N)
    give = q_values.argmax(dim=1)
    for form in (2 + give, list(2 + give), (2 + give)[:, None], [t[None] for t in 2 + give]):
        way, infos = told(INLINE, Heard, FROM_2, by_arrays(form))
        assert (way, heard(infos)) == (BLOCK, ["int(3)"] * N)
    assert told(INLINE, Heard, WIDE, by_arrays(q_values[:, :2]))[0] == BLOCK
    assert told(INLINE, Heard, WIDE, by_dict(q_values[0, :2]))[0] == BLOCK
    q_values.requires_grad_()
    assert told(INLINE, Heard, WIDE, by_arrays(q_values[:, :2]))[0] == REFUSED
