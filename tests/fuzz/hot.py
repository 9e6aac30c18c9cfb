"""The ordinary step in C and in Python: the same cases, and all is equal afterwards.

A case is what an env gives in a step, on the side of a worker; and on that of a trainer a state of
the table and of the block, actions for it, and replies to them, forged ones included. Each is put
to two rigs that differ in `envmgr._hot` alone.

python -m tests.fuzz.hot 1000000
"""

from __future__ import annotations

import collections
import itertools
import random
import re
import sys
import time
import types
import weakref
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple

from envmgr import BaseEnv, EnvTimestep
from envmgr.core import collect, replies, submit
from envmgr.core.observations import Arena, Arenas
from envmgr.core.phases import Phase
from envmgr.core.replies import BlockReplies
from envmgr.hot import hot
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines
from envmgr.spaces import codec_of
from envmgr.wire import info_forms
from envmgr.wire.arenas import COPIED, ObservationRules, arena_arrays, plan_placements
from envmgr.wire.block import (
    BUFFER_BITS,
    DONE,
    ENDING_GIVEN_BIT,
    ENDING_SHIFT,
    HAS_INFO,
    MAX_REQUEST_ID,
    NEXT_STEP_END,
    PLAIN_END,
    REWARD_SHIFT,
    RING_EACH,
    RING_LAST,
    RING_ONCE,
    Block,
    BlockPlan,
    items,
    token_of,
)
from envmgr.wire.info_columns import InfoColumn
from envmgr.wire.messages import EpisodePlan, Message, Op
from envmgr.worker import block_steps, env_runner
from tests.rig import Rig
from tests.unit.host_rigs import BlockRig

CASES_PER_RIG = 200

_ADDRESS = re.compile("0x[0-9a-f]+")

Make = Callable[[], Any]
"""Makes the same anew: each of the two sides gets its own."""


@contextmanager
def without_c(*modules: Any) -> Iterator[None]:
    """Have these modules find no C."""
    before = [module.hot for module in modules]
    for module in modules:
        module.hot = None
    try:
        yield
    finally:
        for module, found in zip(modules, before, strict=True):
            module.hot = found


class Different(AssertionError):
    """The two sides have done different things."""


def plain(value: Any) -> Any:
    """Return what a value is, types included, so that equal ones are equal."""
    if type(value) is weakref.ProxyType:  # whose object is gone: whatever is asked of it raises
        return weakref.ProxyType
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return type(value), value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    if isinstance(value, float):
        return type(value), value.hex()
    if isinstance(value, dict):
        return type(value), [(plain(key), plain(part)) for key, part in value.items()]
    if is_dataclass(value) and not isinstance(value, type):  # tracebacks have other frames
        names = [field.name for field in fields(value) if field.name != "traceback_text"]
        return type(value), [(name, plain(getattr(value, name))) for name in names]
    if isinstance(value, InfoColumn):
        return type(value), value.kind, plain(value.values), plain(value.present)
    if isinstance(value, (tuple, list)):
        return type(value), [plain(part) for part in tuple.__iter__(value)] if isinstance(
            value, tuple
        ) else [plain(part) for part in value]
    if isinstance(value, str):
        return type(value), _ADDRESS.sub("0x", value)
    if isinstance(value, (int, bytes, bytearray, type(None))):
        return type(value), value
    return type(value)


def compare(case: object, in_c: Any, in_python: Any) -> None:
    """Raise if the two sides differ.

    Raises:
        Different: they do; it says in what.
    """
    if in_c == in_python:
        return
    if isinstance(in_c, dict) and isinstance(in_python, dict):
        for name in in_c.keys() | in_python.keys():
            if in_c.get(name) != in_python.get(name):
                text = f"{name}: in C {in_c.get(name)!r}, in Python {in_python.get(name)!r}"
                raise Different(f"{case}\n{text}")
    raise Different(f"{case}\nin C {in_c!r}\nin Python {in_python!r}")


# -- what envs give ---------------------------------------------------------------------------


class FloatKind(float):
    """A float of a kind of its own."""


class ArrayKind(np.ndarray):  # type: ignore[type-arg]
    """An array of a kind of its own."""


class DictKind(dict):  # type: ignore[type-arg]
    """A dict of a kind of its own."""


class TupleKind(tuple):  # type: ignore[type-arg]
    """A tuple of a kind of its own."""

    __slots__ = ()


class OddKey:
    """A key that cannot be compared with the one that is looked for."""

    def __hash__(self) -> int:
        return hash("abnormal")

    def __eq__(self, other: object) -> bool:
        raise ValueError("cannot be compared")


class OddOtherKey(OddKey):
    """A key that no key can be compared with, and that is not where the one looked for would be."""

    def __hash__(self) -> int:
        return 1


class SamePlace:
    """A key that says that it is the one that is looked for."""

    def __hash__(self) -> int:
        return hash("abnormal")

    def __eq__(self, other: object) -> bool:
        return True


class Raising:
    """Stands for an exception that a step raises."""

    def __init__(self, error: Make) -> None:
        self.error = error


class NeedsTwo(Exception):
    """An exception that one argument is not enough for."""

    def __init__(self, one: Any, two: Any) -> None:
        super().__init__(one, two)


BaseEnvTimestep = namedtuple("BaseEnvTimestep", ["obs", "reward", "done", "info"])
Reordered = namedtuple("Reordered", ["reward", "obs", "done", "info"])
Longer = namedtuple("Longer", ["obs", "reward", "done", "info", "more"])


class Backwards(BaseEnvTimestep):
    """Gives its values in another order than it holds them."""

    __slots__ = ()

    def __iter__(self) -> Any:
        return iter((self[0], 7.0, False, {}))


class Attributes:
    """Has the values of a timestep as attributes."""

    def __init__(self, *values: Any) -> None:
        self.obs, self.reward, self.done, self.info = values


class FieldsOfItsOwn(type):
    """Looking for the fields of such a type raises."""

    @property
    def _fields(cls) -> Any:
        raise AttributeError("none")


class OddFields(tuple):  # type: ignore[type-arg]
    """A tuple of four whose fields cannot be compared with those of a timestep."""

    __slots__ = ()
    _fields = ("obs", "reward", "done", OddKey())


class Fieldless(tuple, metaclass=FieldsOfItsOwn):
    """A tuple of four whose type has no fields to show."""

    __slots__ = ()


class TextKind(str):
    """Not a str."""


class OddMapping(collections.UserDict):  # type: ignore[type-arg]
    """A mapping that is no dict."""


def observation_of(rng: random.Random, space: Any, share: float = 0.4) -> Make:
    """Return what makes an observation, mostly one of the space.

    Args:
        rng: draws it.
        space: of what is usual.
        share: of those that are odd.
    """
    if isinstance(space, Dict):
        return dict_of(rng, space, share / 2)
    if isinstance(space, Tuple):
        return tuple_of(rng, space, share / 2)
    if isinstance(space, Text):
        return text_of(rng, share)
    if isinstance(space, Discrete):
        return number_of(rng, share)
    return array_of(rng, space, share)


def dict_of(rng: random.Random, space: Any, share: float) -> Make:
    """Return what makes a dict, mostly one of the space."""
    of_part = share / len(space.spaces)
    parts = {key: observation_of(rng, part, of_part) for key, part in space.spaces.items()}
    names = list(parts)
    if rng.random() < 0.3:
        rng.shuffle(names)  # in whichever order

    def made() -> dict[Any, Any]:
        return {name: parts[name]() for name in names}

    def less() -> dict[Any, Any]:
        found = made()
        del found[names[0]]
        return found

    odd: list[Make] = [
        less,
        lambda: {**made(), "more": 1},
        lambda: {**less(), "more": 1},
        lambda: {**less(), OddKey(): 1},
        lambda: {**made(), OddOtherKey(): 1},
        lambda: DictKind(made()),
        lambda: collections.OrderedDict(made()),
        lambda: OddMapping(made()),
        lambda: list(made().values()),
        lambda: tuple(made()),
        lambda: None,
        lambda: {**made(), names[-1]: _gone()},
        lambda: {TextKind(name): part for name, part in made().items()},
    ]
    return rng.choice(odd) if rng.random() < share else made


def tuple_of(rng: random.Random, space: Any, share: float) -> Make:
    """Return what makes a tuple, mostly one of the space."""
    parts = [observation_of(rng, part, share / len(space.spaces)) for part in space.spaces]

    def made() -> tuple[Any, ...]:
        return tuple(part() for part in parts)

    odd: list[Make] = [
        lambda: list(made()),
        lambda: made()[:-1],
        lambda: (*made(), 1),
        lambda: TupleKind(made()),
        lambda: dict(enumerate(made())),
        lambda: "ab",
        lambda: None,
    ]
    return rng.choice(odd) if rng.random() < share else made


def text_of(rng: random.Random, share: float) -> Make:
    """Return what makes a text, mostly one of those before."""
    text = rng.choice(("abc", "abc", "abd", "", "b" * 9, "ä€a", "a\0b"))
    odd: list[Make] = [
        lambda: "a" * 10,
        lambda: "x\udc80",
        lambda: "no such character?",
        lambda: TextKind(text),
        lambda: np.str_(text),
        lambda: text.encode(),
        lambda: None,
        lambda: 5,
    ]
    return rng.choice(odd) if rng.random() < share else lambda: text


def number_of(rng: random.Random, share: float) -> Make:
    """Return what makes a number, mostly an int, or numpy's."""
    number = rng.choice((0, 1, 7, 99, -1, (1 << 63) - 1, -(1 << 63)))
    odd: list[Make] = [
        lambda: 1 << 63,
        lambda: 1 << 70,
        lambda: bool(number % 2),
        lambda: np.bool_(True),
        lambda: np.int32(5),
        lambda: np.uint64(7),
        lambda: np.int16(7),
        lambda: 5.0,
        lambda: np.float64(5),
        lambda: np.array(number),
        lambda: np.array(5, ">i8"),
        lambda: np.array([5]),
        lambda: np.array(5).view(ArrayKind),
        lambda: "5",
        lambda: None,
        lambda: Fraction(5),
    ]
    usual: list[Make] = [lambda: number, lambda: np.int64(number), lambda: 5]
    return rng.choice(odd) if rng.random() < share else rng.choice(usual)


def array_of(rng: random.Random, space: Any, share: float) -> Make:
    """Return what makes an array, mostly one of the space."""
    shape, dtype = space.shape, space.dtype
    seed = rng.randrange(1 << 30)

    def array(shape: tuple[int, ...] = shape, dtype: Any = dtype) -> Any:
        numbers = np.random.default_rng(seed).integers(0, 100, shape)
        return np.asarray(numbers).astype(dtype)

    def filled(value: float) -> Any:
        found = array()
        if found.dtype.kind == "f" and found.size:
            found[(-1,) * found.ndim] = value
        return found

    def unaligned() -> Any:
        raw = bytearray(1 + array().nbytes)
        found = np.ndarray(shape, dtype, raw, 1)
        found[...] = array()
        return found

    def spread(step: int) -> Any:
        if not shape:
            return array()
        wide = np.zeros((*shape[:-1], 2 * shape[-1]), dtype)
        wide[..., ::2] = array()
        return wide[..., ::2] if step > 0 else array()[..., ::-1]

    def read_only() -> Any:
        found = array()
        found.flags.writeable = False
        return found

    odd: list[Make] = [
        lambda: filled(float("nan")),
        lambda: filled(float("inf")),
        lambda: filled(float("-inf")),
        lambda: array(dtype=np.float64),
        lambda: array(dtype=np.int64),
        lambda: array(dtype=np.float16),
        lambda: array(dtype=np.complex64),
        lambda: array(dtype="S4"),
        lambda: array(dtype=np.dtype(dtype).newbyteorder()),
        lambda: array((*shape, 1)),
        lambda: array((3,)),
        lambda: array(()),
        lambda: array((1, *shape)),
        lambda: array(shape[::-1]),
        lambda: np.asfortranarray(array()),
        lambda: spread(1),
        lambda: spread(-1),
        lambda: array().view(ArrayKind),
        lambda: array().tolist(),
        lambda: np.ma.masked_array(array()),
        lambda: array().astype(object),
        lambda: np.zeros(shape, "M8[s]"),
        lambda: np.zeros(shape, [("a", dtype)]),
        lambda: np.broadcast_to(array((1,) * len(shape)), shape),
        unaligned,
        read_only,
        lambda: None,
        lambda: "text",
        lambda: memoryview(array().tobytes()),
    ]
    return rng.choice(odd) if rng.random() < share else array


def reward_of(rng: random.Random) -> Make:
    """Return what makes a reward, mostly a float."""
    number = rng.choice((0.0, 1.5, -2.25, 1e300, rng.random()))
    special = rng.choice((float("nan"), float("inf"), float("-inf")))
    odd: list[Make] = [
        lambda: special,
        lambda: int(min(number, 1e6)),
        lambda: 1 << 60,
        lambda: (1 << 53) + 1,
        lambda: 10**400,
        lambda: True,
        lambda: np.float64(number),
        lambda: np.float64(special),
        lambda: np.float32(1.5),
        lambda: np.float32(special),
        lambda: np.float16(1.5),
        lambda: np.int64(5),
        lambda: np.bool_(True),
        lambda: FloatKind(number),
        lambda: Fraction(1, 3),
        *(
            lambda dtype=dtype, shape=shape, value=value: np.full(shape, value, dtype)  # type: ignore[misc]
            for dtype in ("f4", "f8", ">f4", ">f8", "f2", "i8", "?", "S3", "O")
            for shape in ((1,), (1,), (1,), (), (1, 1), (2,), (0,))
            for value in ((1, special) if dtype in ("f4", "f8") else (1,))
        ),
        lambda: np.ndarray((1,), "f4", bytearray(5), 1),
        lambda: np.ones(1, "f8").view(ArrayKind),
        lambda: np.ones(2, "f4")[::2],
        lambda: np.zeros(1, "M8[s]"),
        lambda: None,
        lambda: "1",
        lambda: [1.0],
        lambda: (1.0, 2.0),
        lambda: {"a": 1.0},
    ]
    return rng.choice(odd) if rng.random() < 0.5 else lambda: number


def flag_of(rng: random.Random) -> Make:
    """Return what makes `terminated`, `truncated` or `done`, mostly False."""
    odd: list[Make] = [
        lambda: True,
        lambda: True,
        lambda: True,
        lambda: 0,
        lambda: 1,
        lambda: np.bool_(False),
        lambda: np.bool_(True),
        lambda: np.array([True]),
        lambda: np.zeros(2, bool),
        lambda: None,
        lambda: "?",
        lambda: [],
    ]
    return rng.choice(odd) if rng.random() < 0.2 else lambda: False


USUAL_INFOS: list[dict[str, Any]] = [
    {},
    {"x": 1.5},
    {"x": 1.5, "n": 3},
    {"x": np.float64(1.5), "told": "text", "place": np.arange(3)},
]


def _gone() -> Any:
    """Return a reference to an object that is gone: whatever is asked of it raises."""
    return weakref.proxy(OddKey())


def info_of(rng: random.Random, usual: dict[str, Any]) -> Make:
    """Return what makes an info, mostly an empty one or such a one."""
    first = next(iter(usual), "x")
    odd: list[Make] = [
        lambda: {"a": 1, "b": [1.5, "text"]},
        lambda: {"a": np.float64(1.5), "b": np.arange(3)},
        lambda: {"long": "x" * 400},
        lambda: {"abnormal": True},
        lambda: {"abnormal": False},
        lambda: {"abnormal": 0, "a": 1},
        lambda: {"terminated": True},
        lambda: {1: 2},
        lambda: {OddKey(): 1},
        lambda: {OddOtherKey(): 1},
        lambda: {OddOtherKey(): 1, "n": 3},
        lambda: {**usual, first: _gone()},
        lambda: {**usual, first: 1 << 70},
        lambda: {**usual, "more": 1},
        lambda: {SamePlace(): True},
        lambda: {"object": object()},
        lambda: collections.OrderedDict(),
        lambda: DictKind(),
        lambda: DictKind(a=1),
        lambda: None,
        lambda: [],
        lambda: [{}],
        lambda: ({"abnormal": True},),
        lambda: 7,
    ]
    if rng.random() < 0.3:
        return rng.choice(odd)
    return usual.copy if rng.random() < 0.6 else dict


ERRORS: list[Make] = [
    lambda: ValueError("boom"),
    lambda: KeyboardInterrupt(),
    lambda: SystemExit("bye"),
    lambda: StopIteration(3),
    lambda: GeneratorExit(),
    lambda: MemoryError(),
    lambda: NeedsTwo(1, 2),
    lambda: BaseException("of no kind"),
]


def result_of(rng: random.Random, space: Any, usual: dict[str, Any], *, gives_five: bool) -> Make:
    """Return what makes the result of a step; `Raising` stands for one that raises."""
    if rng.random() < 0.03:
        error = rng.choice(ERRORS)
        return lambda: Raising(error)
    obs, reward, info = observation_of(rng, space), reward_of(rng), info_of(rng, usual)
    one, other = flag_of(rng), flag_of(rng)
    if gives_five:
        kinds: list[Any] = [tuple] * 12 + [list, TupleKind, lambda v: v[:4], lambda v: (*v, 1)]
        kind = rng.choice(kinds)
        return lambda: kind((obs(), reward(), one(), other(), info()))
    kinds = [lambda v: EnvTimestep(*v)] * 8 + [lambda v: BaseEnvTimestep(*v)] * 4
    kinds += [tuple, list, TupleKind, Fieldless, OddFields]
    kinds += [lambda v: Reordered(*v), lambda v: Backwards(*v)]
    kinds += [lambda v: Longer(*v, 3), lambda v: Attributes(*v), lambda v: v[:3], lambda v: None]
    kinds += [lambda v: (v[0], v[1], v[2], False, v[3])]
    kind = rng.choice(kinds)
    return lambda: kind((obs(), reward(), one(), info()))


# -- workers ----------------------------------------------------------------------------------

LAST_FORM = 27
"""Of those in which actions that are numbers are sent; see `spaces.columns.in_form`."""

OVERLAPPING = np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 2]})
"""One of those dtypes whose arrays have no buffer."""

OBSERVATIONS: list[Any] = [
    Box(-9, 9, (2,), np.float32),
    Box(-9, 9, (2,), np.float64),
    Box(0, 255, (3, 4, 2), np.uint8),
    Box(-9, 9, (2, 3), np.float16),
    Box(-9, 9, (), np.float32),
    Box(-9, 9, (0,), np.float32),
    Box(0, 1, (1,) * 10, np.int8),
    Box(-9, 9, (3,), np.dtype(">f4")),
    Box(-9, 9, (3,), np.int64),
    gymnasium.Space((2,), np.dtype("M8[s]")),
    gymnasium.Space((2,), OVERLAPPING),
    Discrete(100),
    Dict(a=Box(-9, 9, (2,), np.float32), b=Box(0, 255, (3, 4, 2), np.uint8)),
    Dict(image=Box(0, 255, (3, 4), np.uint8), direction=Discrete(4), mission=Text(9, min_length=0)),
    Dict(
        n=Discrete(4),
        of=Dict(x=Box(-9, 9, (), np.float64), y=Tuple((Discrete(3), Box(0, 9, (2,))))),
    ),
    Tuple((Box(-9, 9, (2,), np.float32), Discrete(5, start=-2))),
    Tuple((Box(-9, 9, (2,), np.float16), Box(-9, 9, (2,), np.float32))),
    Dict(text=Text(9)),
    Text(9, charset="abcd"),
    Dict({str(i): Box(0, 9, (1,), np.int64) for i in range(16)}),
    Dict({str(i): Box(0, 9, (1,), np.int64) for i in range(17)}),
    Dict(a=Box(-9, 9, (2,), np.float32), b=gymnasium.Space((2,), OVERLAPPING)),
]


def first_of(space: Any) -> Any:
    """Return an observation that episodes begin with."""
    if isinstance(space, Dict):
        return {key: first_of(part) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(map(first_of, space.spaces))
    return "a" if isinstance(space, Text) else np.zeros(space.shape, space.dtype)


class _Steps:
    """Gives what is next in a list; envs below are of it."""

    def __init__(self, space: Any) -> None:
        self.observation_space, self.action_space = space, Discrete(100)
        self.gives: list[Any] = []
        self.log: list[Any] = []
        self.first = first_of(space)

    def step(self, action: Any) -> Any:
        self.log.append(action)
        given = self.gives.pop(0)
        if isinstance(given, Raising):
            raise given.error()
        return given


class FourEnv(_Steps, BaseEnv):
    """An env of envmgr."""

    reward_space = Box(-1, 1, (1,), np.float64)

    def seed(self, seed: int, dynamic_seed: bool | None = None) -> None:
        """Do nothing."""

    def reset(self, **params: Any) -> Any:
        """Return the first observation."""
        return self.first

    def close(self) -> None:
        """Do nothing."""


class FiveEnv(_Steps, gymnasium.Env):  # type: ignore[type-arg]
    """An env of gymnasium."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Return the first observation."""
        return self.first, {}


def _worker(rng: random.Random) -> tuple[BlockRig, Any, list[bool], bool]:
    space, gives_five = rng.choice(OBSERVATIONS), [rng.random() < 0.5] * 3
    if rng.random() < 0.3:  # of both kinds
        gives_five = [rng.random() < 0.5 for _ in gives_five]
    timed = rng.random() < 0.3
    kinds = iter([FiveEnv if one else FourEnv for one in gives_five])
    strict = rng.random() < 0.3
    refuses = rng.random() < 0.5
    rules = ObservationRules(strict_dtype=strict, refuse_non_finite=rng.random() < 0.5)
    plan = EpisodePlan(rng.random() < 0.8, rng.choice((float("inf"), 3)), {}, rng.random() < 0.5)
    rig = BlockRig(
        3,
        observations=space,
        env_class=lambda: next(kinds)(space),
        timed=timed,
        plan=plan,
        rules=rules,
        refuse_non_finite_rewards=refuses,
        propagate=(KeyboardInterrupt,) if rng.random() < 0.3 else (),
    )
    return rig, space, gives_five, timed


def _state_of_worker(rig: BlockRig, *, timed: bool) -> dict[str, Any]:
    block, stepper, memory = rig.block, rig.posted, bytes(rig.memory)
    if timed:  # when was that
        block.since[:] = 0
        memory = bytes(rig.memory)
    runners = [row.runner for row in stepper._block_rows]
    return {
        "memory": memory,
        "sent": [plain(tuple(message)) for message in rig.sent],
        "buffers": [(one.writer.step_buffer, one.writer.reset_buffer) for one in runners],
        "episodes": [(one.episodes, one.episodes_left) for one in runners],
        "tokens": (stepper._step_tokens, stepper._reset_tokens, stepper._seen),
        "log": [plain(getattr(env, "unwrapped", env).log) for env in rig.envs.values()],
        "pending": len(rig.host.pending_resets),
        "interrupted": stepper.interrupted_env_id,
    }


def _counted(function: Callable[..., Any], seen: Counter[str], name: str) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        seen[name] += 1
        return function(*args)

    return counted


def worker_cases(seed: int, count: int, seen: Counter[str]) -> int:
    """Take steps on two hosts; return how many.

    Args:
        seed: of the cases.
        count: how many, about.
        seen: counts what came of them.
    """
    with without_c(env_runner, block_steps):
        python, *_ = _worker(random.Random(seed))
    in_c, space, gives_five, timed = _worker(random.Random(seed))
    for row in in_c.posted._block_rows:
        row.runner.take_step = _counted(row.runner.take_step, seen, "left to Python")
    rng, done = random.Random(seed + 1), 0
    usual = rng.choice(USUAL_INFOS)
    form = info_forms.form_of(usual) if usual and rng.random() < 0.8 else None
    while done < count:
        if form is not None and rng.random() < 0.1:  # the trainer has numbered it
            for rig in (in_c, python):
                rig.host.handle(Message(Op.INFO_FORMS, -1, 0, 0, [(1, form.fields)]))
            form = None
        chosen = [i for i in range(3) if rng.random() < 0.8] or [0]
        makes = {i: result_of(rng, space, usual, gives_five=gives_five[i]) for i in chosen}
        action, ring = rng.randrange(100), rng.choice((RING_EACH, RING_ONCE, RING_LAST))
        forms = [rng.randrange(LAST_FORM + 1) if rng.random() < 0.3 else 0 for _ in range(3)]
        raised, states = [], []
        before = [int(in_c.block.replies[i]) for i in chosen]
        for rig in (in_c, python):
            for i, make in makes.items():
                rig.envs[i].gives[:] = [make()]
            rig.block.kinds[:] = forms
            rig.post(*chosen, action=action, ring=ring)
            error = None
            try:
                with without_c(block_steps) if rig is python else nullcontext():
                    rig.run()
            except BaseException as caught:  # whatever it is, both do the same
                error = caught
            raised.append((type(error), str(error)))
            states.append(_state_of_worker(rig, timed=timed))
        case = f"worker, seed {seed}, after {done}: {[make() for make in makes.values()]!r}"
        compare(case, raised[0], raised[1])
        seen["raised by the run"] += raised[0][0] is not type(None)
        compare(case, *states)
        replied = [int(in_c.block.replies[i]) != old for i, old in zip(chosen, before, strict=True)]
        seen["replied in the block"] += sum(replied)
        seen["replied by message"] += len(replied) - sum(replied)
        done += len(chosen)
    return done


# -- trainers ---------------------------------------------------------------------------------

N = 6


class Side:
    """A trainer without hosts: a submitter and a collector over a block in plain memory.

    Args:
        rng: draws what they are; two sides are given equal ones.
    """

    def __init__(self, rng: random.Random) -> None:
        n_hosts = rng.choice((1, 2, 3, N))
        deadlines = Deadlines(step_s=5.0) if rng.random() < 0.3 else None
        rules = {
            "reset_inplace": rng.random() < 0.7,
            "episode_num": rng.choice((float("inf"), float("inf"), 3)),
        }
        self.rig = rig = Rig(
            N, has_block=True, num_workers=n_hosts, deadlines=deadlines, **rules
        ).launch()
        observations = rng.choice(
            (
                [Box(-9, 9, (2,), np.float32)] * N,
                [Box(-9, 9, (), np.float32)] * N,
                [Discrete(1 << 62)] * N,
                [Box(0, 255, (70, 70), np.uint8)] * N,
                [Dict(a=Box(-9, 9, (2,), np.float32), b=Discrete(4))] * N,
                [Box(-9, 9, (2,), np.float32)] * 3 + [Box(-9, 9, (3,), np.float32)] * (N - 3),
            )
        )
        self.actions: Any = rng.choice(
            (
                *[Discrete(5)] * 4,
                *[Discrete(5, start=-2)] * 2,
                Discrete(1 << 40),
                *[Box(-np.inf, np.inf, (3,), np.float32)] * 2,
                Box(-np.inf, np.inf, (), np.float64),
                Box(-1, 1, (3,), np.float32),
                Discrete(10, start=(1 << 63) - 5),
                gymnasium.Space((2,), np.dtype("M8[s]")),
                gymnasium.Space((2,), OVERLAPPING),
            )
        )
        self.checked, any_form = rng.random() < 0.7, rng.random() < 0.5
        copies = rng.random() < 0.7
        layout = codec_of(self.actions).layout
        columns = codec_of(self.actions).action_columns(checked=self.checked, in_any_form=any_form)
        assert layout is not None
        assert columns is not None
        plan = BlockPlan(N, n_hosts, layout)
        layouts: list[Any] = [codec_of(space).layout for space in observations]
        placements, nbytes = plan_placements(layouts, COPIED, plan.nbytes)
        self.memory = bytearray(nbytes)
        self.block = block = Block(self.memory, plan)
        found: dict[Any, Arena] = {}
        arena_of: list[Any] = []
        for placement in placements:
            assert placement is not None
            if placement.layout not in found:
                ids = [i for i, p in enumerate(placements) if p and p.layout == placement.layout]
                arrays = arena_arrays(self.memory, placement)
                found[placement.layout] = Arena(
                    arrays, placement.layout, COPIED, ids, copies=copies, guard=None
                )
            arena_of.append((found[placement.layout], placement.row))
        table, supervisor = rig.supervisor.table, rig.supervisor
        arena: Any = next(iter(found.values())) if len(found) == 1 else Arenas(arena_of)
        table.observed.lay_out(arena, COPIED)
        self.arena_from = plan.nbytes
        self.collector, self.submitter = supervisor.collector, supervisor.submitter
        self.collector.share(block, BlockReplies(block, COPIED, table.may_reset_in_next_step, {}))
        self.submitter.share(block, [columns], [0] * N)
        self.rings: list[Any] = []
        self.submitter._ring = self._ring  # type: ignore[method-assign]
        self.n_commits = 0
        commit = self.submitter._commit

        def counted(*args: Any) -> None:
            self.n_commits += 1
            commit(*args)

        self.submitter._commit = counted  # type: ignore[method-assign]
        self.table, self.statistics = table, rig.supervisor.statistics
        self.collected: Any = None
        self.n_ends = self.n_ends_in_c = 0

    def _ring(self, indexes: Any, again: bool = False) -> None:
        self.rings += [index for index in indexes if self.block.sleeping[index]]

    def put(self, drawn: dict[str, Any]) -> None:
        """Have the table and the block be as was drawn."""
        table, block = self.table, self.block
        table.phases.column[:] = drawn["phases"]
        table.states.column[:] = drawn["states"]
        table.tokens[:] = drawn["tokens"]
        self.statistics.has_generations = drawn["has_generations"]
        table.undelivered.clear()
        table.undelivered.update(drawn["undelivered"])
        table.failed_while_ready.clear()
        table.failed_while_ready.update(drawn["doomed"])
        table.by_message.clear()
        table.by_message.update(drawn["by_message"])
        table.again.clear()
        table.again.update(drawn["again"])
        self.statistics.failing.clear()
        self.statistics.failing.update(drawn["failing"])
        table.episodes_done[:] = drawn["episodes_done"]
        table.reset_infos.clear()
        table.reset_infos.update(drawn["reset_infos"])
        self.submitter._resets_asked.clear()
        self.submitter._resets_asked.update(drawn["resets_asked"])
        block.sleeping[:] = drawn["sleeping"]
        block.kinds[:] = max(drawn["form"], 0)
        self.submitter._form = drawn["form"]
        self.submitter._request_ids = itertools.repeat(drawn["request_id"])
        self.memory[self.arena_from :] = drawn["arena"](len(self.memory) - self.arena_from)
        for row in block.actions:
            row[...] = 0
        table.observed._kept[:] = [None] * len(table.observed._kept)
        table.observed._in_arena[:] = bytes(len(table.observed._in_arena))
        table.since[:] = 1.0
        self.rig.supervisor.journal._unfinished = None
        self.rig.supervisor.journal.returning = None
        self.rings.clear()

    def state(self, *, posted: bool) -> dict[str, Any]:
        """Return all that a step may have changed."""
        table, submitter, block = self.table, self.submitter, self.block
        journal = self.rig.supervisor.journal
        memory = bytearray(self.memory)
        if not posted:  # nobody reads actions there unasked
            kept = [row.copy() for row in block.actions]
            for row in block.actions:
                row[...] = 0
            memory = bytearray(self.memory)
            for row, before in zip(block.actions, kept, strict=True):
                row[...] = before
        latest = submitter._latest
        returning = journal.returning
        statistics = {
            name: plain(getattr(self.statistics, name))
            for name in ("actions", "timesteps", "episodes", "cancelled", "abnormal")
        }
        observed = table.observed
        return {
            "memory": bytes(memory),
            "phases": bytes(table.phases.column),
            "states": bytes(table.states.column),
            "tokens": table.tokens.tobytes(),
            # Nobody looks at those of others.
            "since": (table.since * (table.phases.view == np.uint8(Phase.POSTED))).tobytes(),
            "steps": table.steps.tobytes(),
            "n_posts": {key: one.n_posts for key, one in submitter._selections._known.items()},
            "form": submitter._form,
            "latest": None if latest is None else latest.ids,
            "for last": submitter._posted_for_last,
            "unfinished": journal._unfinished,
            "returning": None if returning is None else plain(returning.timesteps.result),
            "rings": list(self.rings),
            "buffers": bytes(observed._buffer_bytes),
            "in arena": bytes(observed._in_arena),
            "kept": plain(list(observed._kept)),
            "undelivered": plain(table.undelivered),
            "episode numbers": (table.episodes, table.next_episodes, table.episodes_done),
            "reset infos": dict(table.reset_infos),
            "failing": sorted(self.statistics.failing),
            "where": [(each.latest_step, each.latest_reset) for each in observed._readers],
            **statistics,
        }


def _drawn(rng: random.Random, actions: Any) -> dict[str, Any]:
    """Draw a state, mostly one in which all envs are ready."""
    phases, states = [Phase.IDLE] * N, [EnvState.RUN] * N
    if rng.random() < 0.15:
        phases[rng.randrange(N)] = rng.choice(list(Phase))
    if rng.random() < 0.1:
        states[rng.randrange(N)] = rng.choice(list(EnvState))
    has_generations = rng.random() < 0.3
    generations = [rng.choice((0, 1, 2, 0xFFFF)) if has_generations else 0 for _ in range(N)]
    request_id = rng.choice((rng.randrange(2, 1 << 20), MAX_REQUEST_ID - 1))
    seed, form = rng.randrange(1 << 30), rng.choice((0, 0, 0, 1, 1, -1, 2, 9))
    timestep = EnvTimestep(np.zeros(2, np.float32), 1.0, False, {})

    def some() -> Any:
        return [rng.randrange(N)] if rng.random() < 0.06 else []

    return {
        "phases": bytes(phases),
        "states": bytes(states),
        "tokens": [token_of(generation, 1) for generation in generations],
        "has_generations": has_generations,
        "undelivered": dict.fromkeys(some(), timestep),
        "again": some(),
        "failing": some(),
        "episodes_done": [rng.choice((0, 0, 0, 1, 2)) for _ in range(N)],
        "reset_infos": {i: {"level": 1} for i in some()},
        "doomed": dict.fromkeys(some(), None),
        "by_message": some(),
        "resets_asked": {0: 1} if rng.random() < 0.06 else {},
        "sleeping": rng.choice((0, 0, 1)),
        "form": form if isinstance(actions, Discrete) else rng.choice((1, 1, 1, 0, -1)),
        "request_id": request_id,
        "arena": lambda size: np.random.default_rng(seed).bytes(size),
    }


def _ids(rng: random.Random) -> Any:
    """Draw the envs of a step: mostly all, in order."""
    kind = rng.random()
    if kind < 0.6:
        return list(range(N))
    if kind < 0.8:
        first = rng.randrange(N)
        return list(range(first, rng.randrange(first, N) + 1))
    return rng.sample(range(N), rng.randrange(1, N + 1))


def _key(rng: random.Random, env_id: int) -> Any:
    odd = [True, np.int64(env_id), float(env_id), str(env_id), -1, N, 1 << 70, None]
    return rng.choice(odd) if rng.random() < 0.01 else env_id


def _action(rng: random.Random, space: Any, form: int) -> Any:
    if isinstance(space, Discrete):
        low, n = int(space.start), int(space.n)
        number = rng.randrange(low, low + n)
        edges = (low - 1, low + n, low, low + n - 1, -(1 << 63), (1 << 63) - 1)
        if rng.random() < 0.04:
            number = rng.choice(edges)
        if rng.random() < 0.03:
            large = (1 << 63, 1 << 70, -(1 << 70), True, 1.0, "1", None, np.int32(1), np.bool_(1))
            return rng.choice((*large, np.array([1]), np.array(1), np.uint64(1), object()))
        return np.int64(number) if form and number < 1 << 63 else number
    action = np.asarray(rng.random() * np.ones(space.shape)).astype(space.dtype)
    if rng.random() < 0.04:
        return rng.choice(
            (
                np.ones(space.shape, np.int8),
                action.astype(np.dtype(space.dtype).newbyteorder()),
                np.ones((2, 2), space.dtype),
                action.tolist(),
                action.view(ArrayKind),
                np.full(space.shape, np.nan if action.dtype.kind == "f" else 1, space.dtype),
                np.ones((*space.shape, 2), space.dtype)[..., 0],
                None,
                5,
            )
        )
    return action


def _batch(rng: random.Random, space: Any, count: int) -> Any:
    n = count if rng.random() < 0.97 else rng.randrange(N + 2)
    if isinstance(space, Discrete):
        low, high = int(space.start), min(int(space.start) + int(space.n), (1 << 63) - 1)
        batch = np.array([rng.randrange(low, high) for _ in range(n)], np.int64)
        if rng.random() < 0.05 and n:
            batch[rng.randrange(n)] = rng.choice((low - 1, high, -(1 << 63)))
    else:
        batch = np.asarray(rng.random() * np.ones((n, *space.shape))).astype(space.dtype)
    kind = rng.random()
    if kind > 0.15 or not n:
        return batch
    raw = bytearray(batch.nbytes + 1)
    unaligned = np.ndarray(batch.shape, batch.dtype, raw, 1)
    unaligned[...] = batch
    numbers = batch if batch.dtype.names is None else np.zeros(batch.shape)
    odd: list[Any] = [
        batch.tolist(),
        numbers.astype(np.int32),
        batch.astype(batch.dtype.newbyteorder()),
        batch[::-1],
        batch[..., None],
        batch.view(ArrayKind),
        dict(enumerate(batch.tolist())),
        unaligned,
        numbers.astype(np.longlong),
        batch.astype(object),
        np.asfortranarray(batch),
        None,
        7,
    ]
    return rng.choice(odd)


def _reply(rng: random.Random, sides: tuple[Side, Side], ids: list[int], kinds: str) -> None:
    """Have hosts answer what was posted: rightly, late, or with what makes no sense."""
    buffer, told = rng.randrange(2), ENDING_GIVEN_BIT if rng.random() < 0.5 else 0
    for i in ids:
        token, flags = int(sides[0].table.tokens[i]), buffer | told
        if kinds == "odd":
            draw = rng.random()
            if draw < 0.1:
                token = rng.choice((token - 1, token ^ 1 << 44, 0, (1 << 64) - 1, token | 1 << 62))
            elif draw < 0.5:
                flags = rng.choice(
                    (
                        rng.randrange(1 << 16),
                        flags ^ 1,
                        flags ^ ENDING_GIVEN_BIT,
                        flags & ~BUFFER_BITS | rng.randrange(16),
                        flags | DONE,
                        flags | HAS_INFO,
                        flags | rng.randrange(32) << REWARD_SHIFT,
                    )
                )
        reward = rng.choice((0.0, -0.0, 1.5, float("nan"), float("inf"), 1e308))
        for side in sides:
            side.block.flags[i], side.block.rewards[i] = flags, reward
            side.block.replies[i] = token
    for i in ids if kinds in ("ends", "odd ends") else ():
        if rng.random() < 0.4:
            end, token = PLAIN_END | buffer, int(sides[0].table.tokens[i])
            end |= rng.randrange(4) << ENDING_SHIFT + 1
            begun = rng.choice((2, 3))
            if kinds == "odd ends":
                end = rng.choice((PLAIN_END, PLAIN_END, NEXT_STEP_END, DONE))
                end |= rng.randrange(8) << ENDING_SHIFT
                end |= buffer if rng.random() < 0.9 else rng.randrange(16)
                token -= rng.random() < 0.1
                begun = rng.choice((2, 3, 2, 3, rng.randrange(1 << 16)))
            for side in sides:
                side.block.flags[i], side.block.resets[i] = end, token
                side.block.reset_flags[i] = begun
    if kinds == "alike":  # all the same, whatever that is
        flags = rng.choice((rng.randrange(1 << 16), rng.randrange(1 << 5)))
        for side in sides:
            side.block.flags[ids] = flags


def _do(function: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what a function returns, and what it has raised."""
    try:
        return function(), None
    except Exception as error:  # both do the same
        return None, (type(error), str(error))


def _take(side: Side, ids: list[int], *, in_arrays: bool, gives_back: bool) -> Any:
    """Collect the timesteps of envs, if they have arrived; return what came of it."""
    collector, selection = side.collector, side.rig.selection(ids)
    posted = side.submitter.latest(len(ids))
    arrived = collector.have_arrived(selection), None if posted is None else posted.ids
    if not arrived[0]:
        return arrived
    taken = collector.take_arrays(selection) if in_arrays else collector.take(selection)
    left, collector.left = collector.left, None
    if taken is None:
        return arrived, left
    was_in_c = not isinstance(taken, collect.Collected) or taken.in_c is not None
    result = taken.result  # if it was made in C, and handed out
    if isinstance(taken, collect.Collected):
        result = collector.arrays(taken) if in_arrays else collector.timesteps(taken)
    if in_arrays and result is None:
        result = collector.timesteps(taken)
    infos = list(result.infos) if isinstance(result, collect.ArrayBatch) else None
    found = plain(result), plain(infos), taken.count, taken.n_before
    side.collected = was_in_c
    if isinstance(taken, collect.Collected):
        side.n_ends += len(taken.remarks.specials)
    elif taken.begun:
        side.n_ends_in_c += len(taken.begun)
    if gives_back:
        collector.give_back(taken)
    return arrived, left, found, plain(side.table.observed.of(ids))


def trainer_cases(seed: int, count: int, seen: Counter[str]) -> int:
    """Post and collect steps on two sides; return how many.

    Args:
        seed: of the cases.
        count: how many.
        seen: counts what came of them.
    """
    with without_c(submit, collect):
        python = Side(random.Random(seed))
        assert python.submitter._selections.in_c is None
    sides = in_c, python = Side(random.Random(seed)), python
    rng = random.Random(seed + 1)
    for done in range(count):
        drawn, ids = _drawn(rng, in_c.actions), _ids(rng)
        ring = rng.choice((RING_EACH, RING_ONCE, RING_LAST))
        form = drawn["form"] if rng.random() < 0.95 else 1 - drawn["form"]
        values = [_action(rng, in_c.actions, form) for _ in ids]
        actions = {_key(rng, i): value for i, value in zip(ids, values, strict=True)}
        by_id = rng.random() < 0.6
        batch = None if by_id else _batch(rng, in_c.actions, len(ids))
        given = ids if rng.random() < 0.5 else np.array(ids)
        outcomes, commits = [], in_c.n_commits
        case = f"trainer, seed {seed}, {done}: {ids} {actions if by_id else batch!r} {drawn}"
        for side in sides:
            side.put(drawn)
            if by_id:  # the envs that were stepped last are those that C knows
                side.submitter._latest = side.rig.selection(ids)
                posted = _do(partial(side.submitter.by_id, actions, ring))
            else:
                posted = _do(partial(side.submitter.rows, given, batch, ring))
            outcomes.append((None if posted[0] is None else posted[0].ids, posted[1]))
        compare(case, outcomes[0], outcomes[1])
        if outcomes[0][1] is not None:
            seen[f"post raised {outcomes[0][1]}"] += 1
        is_posted = outcomes[0][0] is not None
        states = [side.state(posted=is_posted) for side in sides]
        compare(case, *states)
        if not is_posted:
            seen["not posted"] += 1
            continue
        seen["posted in C" if in_c.n_commits == commits else "posted in Python"] += 1
        ids = outcomes[0][0]
        _reply(rng, sides, ids, rng.choice(("plain", "ends", "ends", "odd ends", "odd", "alike")))
        in_arrays, gives_back = rng.random() < 0.6, rng.random() < 0.1
        taken = []
        for side in sides:
            side.collected = None
            taken.append(_do(partial(_take, side, ids, in_arrays=in_arrays, gives_back=gives_back)))
        compare(case, taken[0], taken[1])
        if taken[0][1] is not None:
            seen[f"take raised {taken[0][1]}"] += 1
        states = [side.state(posted=True) for side in sides]
        compare(case, *states)
        names = {True: "collected in C", False: "collected in Python", None: "not collected"}
        seen[names[in_c.collected]] += 1
        seen["ends"] += in_c.n_ends
        seen["ends in C"] += in_c.n_ends_in_c
        in_c.n_ends = in_c.n_ends_in_c = 0
        assert not python.collected
    return count


# -- infos that are records -------------------------------------------------------------------


VALUES: list[Callable[[random.Random], Any]] = [
    lambda rng: rng.choice((0.0, -0.0, 1.5, float("nan"), float("inf"), rng.random())),
    lambda rng: np.float64(rng.choice((-0.0, 2.5, float("nan")))),
    lambda rng: np.float32(rng.random()),
    lambda rng: rng.choice((0, -1, 2**63 - 1, -(2**63), 2**63, 2**64, rng.randrange(99))),
    lambda rng: rng.random() < 0.5,
    lambda rng: np.bool_(rng.random() < 0.5),
    lambda rng: np.int64(rng.choice((-(2**63), 2**63 - 1, 3))),
    lambda rng: np.uint64(rng.choice((0, 2**64 - 1))),
    lambda rng: np.int8(rng.choice((-128, 127))),
    lambda rng: np.uint8(rng.choice((0, 255))),
    lambda rng: np.int16(-5),
    lambda rng: np.uint16(65535),
    lambda rng: np.int32(-(2**31)),
    lambda rng: np.uint32(2**32 - 1),
    lambda rng: rng.choice(("", "text", "\u00e9" * 32, "x" * 65)),
    lambda rng: None,
    lambda rng: np.full(2, rng.random()),
    lambda rng: {"in": rng.random()} if rng.random() < 0.7 else {},
    lambda rng: FloatKind(1.5),
    lambda rng: [1],
]
PLAIN = VALUES[:14]


class _Infos:
    """Envs that write infos, and what is read of them."""

    N = 3

    def __init__(self) -> None:
        self.memory = np.zeros((self.N, info_forms.RECORD_BYTES), np.uint8)
        self.numbers = np.zeros(self.N, np.uint8)
        self.proposed: list[Any] = []
        self.forms = info_forms.HostForms(lambda *args: self.proposed.append(args))
        self.writers = [
            info_forms.InfoWriter(
                self.forms, self.forms.of_steps, i, items(self.memory[i]), items(self.numbers), i
            )
            for i in range(self.N)
        ]

    def write(self, i: int, info: dict[Any, Any]) -> Any:
        writer = self.writers[i]
        is_written = writer.function(info)
        if not is_written:
            writer.note_odd(info)
            self.memory[i] = 0  # it may have been written in part, and no number says that it is
        return is_written

    def learn(self) -> None:
        """What was proposed is known from now on."""
        for _, form in self.proposed:
            if form is not None and len(self.forms.numbered) < info_forms.MOST_FORMS:
                self.forms.learn([(len(self.forms.numbered) + 1, form)])
        self.proposed.clear()

    def read(self) -> Any:
        """Return what a trainer reads of all rows together."""
        block: Any = types.SimpleNamespace(
            reset_flags=np.zeros(self.N, np.uint16),
            infos=self.memory,
            info_forms=self.numbers,
            plan=types.SimpleNamespace(handed_over=None),
        )
        reader = BlockReplies(block, COPIED, bool, self.forms.numbered)
        chosen: Any = types.SimpleNamespace(
            rows=slice(0, self.N), is_slice=True, count=self.N, ids=list(range(self.N))
        )
        batch = reader.infos(chosen)
        if not isinstance(batch, info_forms.RecordBatch):
            return None
        columns = batch.columns()
        return plain(batch.dicts()), plain(dict(columns)), plain(columns.present), list(batch.odd)

    def state(self) -> dict[str, Any]:
        return {
            "records": self.memory[:, :64].tobytes(),
            "numbers": self.numbers.tobytes(),
            "proposed": plain(self.proposed),
            "read": self.read(),
        }


def _changed(rng: random.Random, info: dict[Any, Any]) -> dict[Any, Any]:
    """Return an info that is not quite like this one."""
    pairs = list(info.items())
    at = rng.randrange(len(pairs))
    how = rng.randrange(6)
    if how == 0:
        pairs[at] = pairs[at][0], rng.choice(VALUES)(rng)
    elif how == 1:
        rng.shuffle(pairs)
    elif how == 2:
        del pairs[at]
    elif how == 3:
        pairs.insert(at, ("more", rng.choice(VALUES)(rng)))
    elif how == 4:
        pairs[at] = TextKind(pairs[at][0]), pairs[at][1]
    else:
        pairs[at] = rng.choice((1, (), b"k0")), pairs[at][1]
    return dict(pairs) or {"k": 1.5}


def info_cases(seed: int, count: int, seen: Counter[str]) -> int:
    """Write and read infos on two sides; return how many.

    Args:
        seed: of the cases.
        count: how many.
        seen: counts what came of them.
    """
    rng = random.Random(seed)
    with without_c(info_forms, replies):
        python = _Infos()
    in_c = _Infos()
    kinds = [rng.choice(PLAIN if rng.random() < 0.9 else VALUES) for _ in range(rng.randint(1, 6))]
    for k in range(count):
        case = f"infos, seed {seed}, number {k}"
        info: dict[Any, Any] = {"".join(("k", str(j))): kind(rng) for j, kind in enumerate(kinds)}
        if rng.random() < 0.2:
            info = _changed(rng, info)
        i = rng.randrange(_Infos.N)
        found = in_c.write(i, info)
        with without_c(info_forms, replies):
            compare(f"{case}: {info!r}", found, python.write(i, info))
            if rng.random() < 0.02:  # a host that writes what it should not
                at, byte = (rng.randrange(_Infos.N), rng.randrange(64)), rng.randrange(256)
                for side in (in_c, python):
                    side.memory[at] = byte
            if rng.random() < 0.01:
                in_c.numbers[i] = python.numbers[i] = rng.randrange(20)
            of_python = python.state()
        compare(f"{case}: {info!r}", in_c.state(), of_python)
        seen["infos written" if found else "infos not written"] += 1
        seen["infos read together"] += of_python["read"] is not None
        if rng.random() < 0.1:
            in_c.learn()
            python.learn()
    return count


def fuzz(seed: int, count: int) -> Counter[str]:
    """Put at least so many cases to both; return what came of them.

    Raises:
        Different: C and Python have done different things; it says in which case.
    """
    if hot is None:
        raise RuntimeError("envmgr._hot is not there, or left out: there is nothing to compare")
    seen: Counter[str] = Counter()
    done, number = 0, seed << 32
    while done < count:
        size = min(CASES_PER_RIG, count - done)
        done += worker_cases(number, size, seen)
        done += trainer_cases(number, size, seen)
        done += info_cases(number, size, seen)
        number += 2
    return seen


def main() -> None:
    """Run as many cases as the command line says."""
    counts = [int(argument) for argument in sys.argv[1:]] or [1000]
    began = time.monotonic()
    seen = fuzz(*(counts[1:] or [0]), counts[0])
    took_s = time.monotonic() - began
    print(f"{sum(seen.values())} outcomes compared in {took_s:.0f} s, all equal")
    print(", ".join(f"{what}: {n}" for what, n in seen.items()))


if __name__ == "__main__":
    main()
