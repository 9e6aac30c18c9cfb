"""Hangs: how long after its time limit the action of a hung env is answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from envmgr import create_env_manager
from envmgr.errors import EnvTimeout
from envmgr.testing import Fault, FaultyEnv
from figures import Figure, in_ms, quantile
from figures.loop import ENDLESS

LIMIT_S = 0.2
SLACK_S = 0.050
HANGS, QUICK_HANGS = 100, 5
KINDS = {
    "hang": "hang in Python",
    "hang_holding_gil": "hang in C, holding the GIL, all signals blocked",
    "stop": "stopped by SIGSTOP",
}
PLACES: dict[str, dict[str, Any]] = {
    "a worker for each env": {},
    "one worker for all": {"num_workers": 1},
}
ENV_NUM = 4


def measure(quick: bool) -> Sequence[Figure]:
    """Measure each kind of hang, in workers of one env and of several."""
    n = QUICK_HANGS if quick else HANGS
    return [_figure(kind, place, n) for place in PLACES for kind in KINDS]


def _figure(kind: str, place: str, n: int) -> Figure:
    late = [answered_s - LIMIT_S for answered_s in _answers(kind, PLACES[place], n)]
    late_s = quantile(late, 0.99)
    return Figure(
        f"{KINDS[kind]}, {place}, {n} times: answered after the limit of {LIMIT_S:g} s, p99",
        f"+{in_ms(late_s)}, median +{in_ms(quantile(late, 0.5))}",
        f"+{in_ms(SLACK_S)}",
        late_s <= SLACK_S and min(late) >= 0.0,
    )


def _answers(kind: str, cfg: dict[str, Any], n: int) -> list[float]:
    """Return the seconds from the sending of actions to the abnormal timestep of the hung env."""
    env_fn = [_factory(env_id, kind) for env_id in range(ENV_NUM)]
    cfg = {"type": "async_subprocess", "step_timeout": LIMIT_S, "wait_num": 1, **ENDLESS, **cfg}
    answers = []
    with create_env_manager(cfg, env_fn=env_fn) as manager:
        while len(answers) < n:
            manager.reset()
            sent_s = time.monotonic()
            manager.send(dict.fromkeys(range(ENV_NUM), 1))
            answered = False
            while not answered:
                answered = 0 in manager.recv(min_ready=1)
            answers.append(time.monotonic() - sent_s)
            failures = manager.stats()["failures_by_kind"]
            if set(failures) != {EnvTimeout.__name__}:
                raise RuntimeError(f"only time-outs were expected, and there are {failures}")
    return answers


def _factory(env_id: int, kind: str) -> Callable[[], FaultyEnv]:
    return partial(FaultyEnv, env_id, (Fault(kind, env_id=0, step=1),))
