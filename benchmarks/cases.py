"""The cases: which env, how many of it, and which rows are measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rows import ROWS
from spec import LIFETIME, RATE, TRAINING

CORES = "two cores stepping alone"
REFERENCE = "gymnasium-async"
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
        kind: RATE, LIFETIME or TRAINING.
        ideal: what 100 % is: CORES, SLEEP or None.
        stretch: how many times `--seconds` a measurement takes; slow envs need more than 1.
        trainer: the trainer, if the kind is TRAINING.
        reference: the row whose rate the others are given as multiples of.
        most_rounds: the case is left out after so many rounds; None: it is in every round.
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
    trainer: str = ""
    reference: str = REFERENCE
    most_rounds: int | None = None


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
    16: ("subprocess-ring", "hosts2-arrays", *_VIEWS, *_IN_PROCESS, *_PEERS),
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
_DOORS = ("hosts2-v2", "hosts2-rollout")
DOORS: Sequence[str] = ("hosts2-dict", *_DOORS, *_ADAPTERS)
"""Rows of the null env; a table gives the trainer's CPU that they take above `BELOW_DOORS`."""
BELOW_DOORS = "hosts2-arrays"
DOORS_N = (8, 64)
_NULL: dict[int, Sequence[str]] = {
    **_CHEAP,
    8: ("plain-all", *_CHEAP[8], "hosts2-limits", *_DOORS, *_ADAPTERS),
    64: ("plain-all", *_CHEAP[64], "again", "hosts2-limits", *_DOORS),
}
_INFOS = (
    "plain-all",
    "bare-2",
    "base-arrays",
    "hosts2-dict",
    "hosts2-arrays",
    "as-gymnasium",
    "as-sb3",
    "gymnasium-async",
    "gymnasium-sync",
    "sb3-subproc",
    "pufferlib-1",
)
_SHORT = (
    "bare-2",
    "base-arrays",
    "hosts2-arrays",
    "as-gymnasium",
    "gymnasium-sync",
    "pufferlib-1",
    "pufferlib-serial",
)
_USED = (
    "plain-all",
    "base",
    "base-arrays",
    "hosts1-arrays",
    "hosts2-dict",
    "hosts2-arrays",
    "hosts4-arrays",
    "each-arrays",
    "auto-arrays",
    "as-gymnasium-base",
    "as-gymnasium",
    "as-gymnasium-each",
    "as-gymnasium-auto",
    "as-sb3-base",
    "as-sb3",
    "as-sb3-auto",
    "gymnasium-async",
    "gymnasium-sync",
    "sb3-subproc",
    "sb3-dummy",
    "pufferlib-1",
    "pufferlib-serial",
    "envpool",
)
_SB3_TRAINING = ("as-sb3-base", "as-sb3", "as-sb3-auto", "sb3-subproc", "sb3-dummy")
_CLEANRL_TRAINING = (
    "as-gymnasium-base",
    "as-gymnasium",
    "as-gymnasium-auto",
    "gymnasium-async",
    "gymnasium-sync",
    "envpool",
)
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
    Case("null", "Do-nothing env, float32[4]", "null", _NULL, (8,), ideal_rows=("plain-1",)),
    Case(
        "null-floats",
        "Do-nothing env with MuJoCo's infos: five float64 in each step",
        "null-floats",
        {8: _INFOS, 64: _INFOS},
        (8,),
    ),
    Case(
        "null-ints",
        "Do-nothing env with Atari's infos: three ints in each step",
        "null-ints",
        {8: _INFOS, 64: _INFOS},
        (8,),
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
        "cartpole-short",
        "CartPole-v1, unwrapped, always pushed to one side: episodes of nine steps or so",
        "cartpole-short",
        {64: _SHORT},
        (64,),
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
    Case(
        "pong",
        "ALE Pong: Gymnasium's AtariPreprocessing, four frames stacked",
        "pong",
        {8: (*_USED, "ale-vector"), 16: (*_USED, "ale-vector")},
        (8,),
        stretch=6.0,
    ),
    Case(
        "halfcheetah",
        "MuJoCo HalfCheetah-v5",
        "halfcheetah",
        {8: (*_USED, "again", "base-pure", "bare-2")},
        (8,),
        stretch=2.0,
    ),
    Case(
        "minigrid",
        "MiniGrid-Empty-8x8: a Dict of an image, a number and a text",
        "minigrid",
        {8: (*_USED, "gymnasium-async-pipes")},
        (8,),
        stretch=2.0,
        reference="gymnasium-async-pipes",
    ),
    *(
        Case(
            f"{trainer}-{env}",
            f"{whose} PPO on {what}: the first steps of a training",
            env,
            {8: (*rows, "ale-vector") if (trainer, env) == ("cleanrl", "pong") else rows},
            (8,),
            kind=TRAINING,
            trainer=trainer,
            reference=reference,
            most_rounds=3,
        )
        for env, what in (("halfcheetah", "MuJoCo HalfCheetah-v5"), ("pong", "ALE Pong"))
        for trainer, whose, rows, reference in (
            ("sb3", "Stable-Baselines3's", _SB3_TRAINING, "sb3-subproc"),
            ("cleanrl", "CleanRL's", _CLEANRL_TRAINING, "gymnasium-async"),
        )
    ),
)

CASES: Mapping[str, Case] = {case.key: case for case in _CASES}

_USERS = ("pong", "halfcheetah", "minigrid")
_TRAINING = tuple(case.key for case in _CASES if case.kind == TRAINING)
GROUPS: Mapping[str, Sequence[str]] = {
    "made": [key for key in CASES if key not in (*_USERS, *_TRAINING)],
    "users": _USERS,
    "training": _TRAINING,
}
"""Cases that are measured together, by group name. `made`: envs that are made to be measured."""

BOUNDS: Mapping[tuple[str, str], str] = {
    ("null", "subprocess"): "bare-each",
    ("null", "subprocess-v2"): "bare-each",
    ("null", "hosts1-arrays"): "bare-1",
    **{
        (case, f"hosts2-{form}"): "bare-2"
        for case in ("null", "cartpole", "busy", "halfcheetah")
        for form in ("arrays", "dict")
    },
    **{
        (case, f"hosts2-{form}-pipelined"): "bare-2-own"
        for case in ("null", "cartpole", "busy")
        for form in ("arrays", "dict")
    },
    ("uneven", "async-1"): "bare-each-own",
}
"""The row of processes that do the same without any library, by case and row of envmgr."""


@dataclass(frozen=True)
class Item:
    """One thing to measure in each round."""

    case: str
    env_num: int
    row: str


def plan(
    cases: Sequence[str],
    env_nums: Sequence[int] | None,
    libraries: Sequence[str],
    quick: bool,
    rows: Collection[str] = ROWS,
) -> list[Item]:
    """Return what one round measures, in order.

    Args:
        cases: keys of cases.
        env_nums: only these; None: all of the case, or with `quick` its `quick_n`.
        libraries: only rows of these; the ideal is always measured with them.
        quick: leave most env_nums out.
        rows: only these; the ideal is measured with them.
    """
    items: list[Item] = []
    for key in cases:
        case = CASES[key]
        wanted = env_nums or (case.quick_n if quick else tuple(case.rows))
        for env_num in sorted(n for n in wanted if n in case.rows):
            items += [
                Item(key, env_num, row)
                for row in case.rows[env_num]
                if ROWS[row].library in libraries and row in rows
            ]
        if any(item.case == key for item in items):
            items += [Item(key, 1, row) for row in case.ideal_rows]
    return items
