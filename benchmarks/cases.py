"""The cases: which env, how many of it, and which rows are measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rows import IDEAL, ROWS
from spec import LIFETIME, RATE

CORES = "two cores stepping alone"
SLEEP = "the envs' own sleep, nothing else"


@dataclass(frozen=True)
class Case:
    """One env, and the rows measured with it.

    Attributes:
        key: name for `--cases`.
        title: heading of its table.
        env: see `envs.env_factory`.
        rows: env_num -> keys of rows.
        quick_n: env_nums that `--quick` measures.
        kind: RATE or LIFETIME.
        ideal: what 100 % is: CORES, SLEEP or None.
        stretch: how much longer than `--seconds` a measurement takes: envs that sleep need it.
    """

    key: str
    title: str
    env: str
    rows: Mapping[int, Sequence[str]]
    quick_n: Sequence[int]
    kind: str = RATE
    ideal: str | None = None
    stretch: float = 1.0
    ideal_rows: Sequence[str] = field(default=())


_PEERS = (
    "gymnasium-async",
    "sb3-subproc",
    "tianshou-shmem",
    "pufferlib-1",
    "ding-subprocess",
)
# Stable-Baselines3 and tianshou take long to import: not everything is measured with them.
_FEWER_PEERS = ("gymnasium-async", "pufferlib-1", "ding-subprocess")
_IN_PROCESS = (
    "base",
    "base-arrays",
    "base-until-send",
    "gymnasium-sync",
    "pufferlib-serial",
)
_THREADS = ("thread", "thread-1", "thread-no-gil")
_V2 = ("subprocess-v2", "ding-subprocess-v2")
_PACKED = ("hosts1-dict", "hosts1-arrays", "hosts2-dict", "hosts2-arrays")
_ADAPTERS = ("as-gymnasium", "as-gymnasium-same", "as-sb3", "as-tianshou")
_PIPELINED = ("hosts2-dict-pipelined", "hosts2-arrays-pipelined")
_VIEWS = ("hosts1-ring", "hosts1-until-send", "hosts2-ring", "hosts2-until-send")
_IMAGES = {
    1: ("subprocess", "hosts1-arrays", "hosts1-until-send", *_IN_PROCESS, *_FEWER_PEERS),
    8: ("subprocess", "subprocess-ring", "hosts1-arrays", *_VIEWS, *_IN_PROCESS, *_PEERS),
    16: ("subprocess-ring", "hosts2-arrays", *_VIEWS, *_PEERS),
    64: ("subprocess", "hosts2-dict", "hosts2-arrays", *_VIEWS, *_IN_PROCESS, *_PEERS),
    256: ("hosts2-arrays", "hosts2-ring", "hosts2-until-send", *_FEWER_PEERS),
}


def _with_nocopy(rows: Mapping[int, Sequence[str]]) -> dict[int, Sequence[str]]:
    more = "gymnasium-async-nocopy"
    return {n: (*keys, more) if n in (16, 64) else keys for n, keys in rows.items()}


_CHEAP: dict[int, Sequence[str]] = {
    1: ("subprocess", "hosts1-dict", "hosts1-arrays", *_IN_PROCESS, *_FEWER_PEERS),
    8: ("bare-each", "bare-1", "subprocess", *_THREADS, *_V2, *_PACKED, *_IN_PROCESS, *_PEERS),
    64: (
        "bare-2",
        "bare-2-own",
        "subprocess",
        *_PACKED,
        *_PIPELINED,
        *_ADAPTERS,
        *_IN_PROCESS,
        "pufferlib-2",
        *_PEERS,
    ),
    256: ("subprocess", "hosts2-dict", "hosts2-arrays", "hosts2-arrays-pipelined", *_FEWER_PEERS),
}
_INFOS: dict[int, Sequence[str]] = {
    8: ("subprocess", "hosts1-dict", "hosts1-arrays", *_IN_PROCESS, *_FEWER_PEERS),
    64: ("hosts2-dict", "hosts2-arrays", "as-gymnasium", "as-sb3", *_IN_PROCESS, *_FEWER_PEERS),
}
_BUSY = (
    "bare-2",
    "bare-2-own",
    "subprocess",
    "hosts2-dict",
    "hosts2-arrays",
    *_PIPELINED,
    "pufferlib-2",
    *_PEERS,
)
_UNEVEN = (
    "bare-each-own",
    "async-1",
    "async",
    "gymnasium-async",
    "tianshou-one",
    "tianshou-half",
    "ding-async",
)
_SLOW_RESET = (
    "subprocess",
    "async",
    "gymnasium-async",
    "tianshou-shmem",
    "tianshou-half",
    "ding-subprocess",
    "ding-async",
)
_WAITING = ("subprocess", "thread", "thread-no-gil", "gymnasium-async", "tianshou-shmem")
_LIFETIME = ("subprocess", "hosts2-dict", "thread", *_PEERS)
_CORES = ("plain-1", "plain-2")

_CASES = (
    Case("null", "Do-nothing env, float32[4]", "null", _CHEAP, (8,), ideal_rows=("plain-1",)),
    Case(
        "runner-infos",
        "Do-nothing env whose infos are five float64, as MuJoCo's",
        "runner-infos",
        _INFOS,
        (64,),
    ),
    Case(
        "game-infos",
        "Do-nothing env whose infos are three ints, as ALE's",
        "game-infos",
        _INFOS,
        (64,),
    ),
    Case(
        "array-reward",
        "Do-nothing env, float32[4], rewards float32[1]",
        "array-reward",
        {8: ("subprocess", *_V2, "gymnasium-async", "ding-subprocess")},
        (8,),
    ),
    Case(
        "cartpole",
        "CartPole-v1, unwrapped",
        "cartpole",
        {**_CHEAP, 16: ("hosts2-dict", "hosts2-arrays", "hosts2-arrays-pipelined")},
        (64,),
        ideal=CORES,
        ideal_rows=_CORES,
    ),
    Case(
        "image",
        "84x84x4 uint8",
        "image",
        _with_nocopy({n: keys for n, keys in _IMAGES.items() if n != 16}),
        (64,),
    ),
    Case(
        "frame",
        "210x160x3 uint8",
        "frame",
        _with_nocopy({**_IMAGES, 8: ("subprocess", "subprocess-ring", *_VIEWS, *_FEWER_PEERS)}),
        (16,),
    ),
    Case(
        "busy",
        "100 us of CPU per step",
        "busy",
        {16: (*_BUSY, "hosts2-checked", "hosts2-unchecked"), 64: _BUSY},
        (16,),
        ideal=CORES,
        ideal_rows=_CORES,
    ),
    Case(
        "uneven",
        "Log-normal sleep, median 2 ms, sigma 1",
        "uneven",
        {16: _UNEVEN, 64: _UNEVEN},
        (16,),
        ideal=SLEEP,
        stretch=4.0,
    ),
    Case(
        "slow-reset",
        "Slow reset: steps sleep 1 ms, resets 200 ms, episodes of 50 to 150 steps",
        "slow-reset",
        {16: _SLOW_RESET, 64: _SLOW_RESET},
        (16,),
        ideal=SLEEP,
        stretch=4.0,
    ),
    Case(
        "waiting",
        "Steps sleep 10 ms",
        "waiting",
        dict.fromkeys((16, 64), _WAITING),
        (64,),
        ideal=SLEEP,
        stretch=4.0,
    ),
    Case(
        "start",
        "Start, memory and close (CartPole)",
        "cartpole",
        {8: _LIFETIME, 64: _LIFETIME, 256: _LIFETIME},
        (8,),
        kind=LIFETIME,
    ),
)

CASES: Mapping[str, Case] = {case.key: case for case in _CASES}

BOUNDS: Mapping[tuple[str, str], str] = {
    ("null", "subprocess"): "bare-each",
    ("null", "subprocess-v2"): "bare-each",
    ("null", "hosts1-arrays"): "bare-1",
    **{
        (case, f"hosts2-{form}"): "bare-2"
        for case in ("null", "cartpole", "busy")
        for form in ("arrays", "dict")
    },
    **{
        (case, f"hosts2-{form}-pipelined"): "bare-2-own"
        for case in ("null", "cartpole", "busy")
        for form in ("arrays", "dict")
    },
    ("uneven", "async-1"): "bare-each-own",
}
"""By case and row of envmgr: the row of processes that do the same without any library."""


@dataclass(frozen=True)
class Item:
    """One thing to measure in each round."""

    case: str
    env_num: int
    row: str


def plan(
    cases: Sequence[str], env_nums: Sequence[int] | None, libraries: Sequence[str], quick: bool
) -> list[Item]:
    """Return what one round measures, in its order.

    Args:
        cases: keys of cases.
        env_nums: only these; None: all of the case, or its `quick_n`.
        libraries: only rows of these; the ideal is always measured with them.
        quick: leave most env_nums out.
    """
    items: list[Item] = []
    for key in cases:
        case = CASES[key]
        wanted = env_nums or (case.quick_n if quick else tuple(case.rows))
        for env_num in sorted(n for n in wanted if n in case.rows):
            items += [
                Item(key, env_num, row)
                for row in case.rows[env_num]
                if ROWS[row].library in libraries
            ]
        if any(item.case == key for item in items):
            items += [Item(key, 1, row) for row in case.ideal_rows]
    return items


def rows_of(items: Sequence[Item], case: str) -> Iterator[str]:
    """Yield the keys of the rows of a case, in the order of the plan, without the ideals."""
    seen = dict.fromkeys(item.row for item in items if item.case == case)
    return (row for row in ROWS if row in seen and ROWS[row].library != IDEAL)
