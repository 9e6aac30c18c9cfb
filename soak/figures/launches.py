"""Launches with random faults and settings: each of them ends, ready or with a typed error."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from envmgr import EnvState, create_env_manager
from envmgr.errors import EnvManagerError
from envmgr.testing import Fault, FaultyEnv
from figures import Figure
from figures.commands import run_tests

LAUNCHES, QUICK_LAUNCHES = 2_000, 40
PATIENCE_S = 120.0
"""All attempts of a launch, one after the other, take less than this, on a busy machine too."""

PROPERTIES = "tests/property/test_launches.py"
LIMIT_S = 7200.0

RESET_S, CONNECT_S = 0.7, 10.0
ENDS = ("os_exit", "kill", "segfault", "abort", "sys_exit", "keyboard_interrupt")
STUCK = ("hang", "hang_holding_gil", "stop")
RAISED = ("raise", "raise_strange", "raise_two_arguments")
SPOILT = ("wrong_shape", "no_observation", "not_a_timestep", "nan_observation", "wrong_structure")
HARMLESS = ("slow", "fork_child", "close_streams", "unpicklable_info", "huge_info")


class FragileEnv(FaultyEnv):
    """A `FaultyEnv` whose process may die some time after it was built, whatever it is doing.

    Args:
        env_id: see `FaultyEnv`.
        plan: likewise.
        folder: likewise.
        dies_after_s: seconds after which the process of the first env of this id dies, counted from
            when that env was built; None: it never does.
    """

    def __init__(
        self, env_id: int, plan: Sequence[Fault], folder: str, dies_after_s: float | None
    ) -> None:
        super().__init__(env_id, plan, folder=folder)
        if dies_after_s is not None and self.build == 0:
            threading.Thread(target=_die_after, args=(dies_after_s,), daemon=True).start()


def _die_after(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(9)


@dataclass
class Launched:
    """The outcomes of launches.

    Attributes:
        outcomes: how often each outcome came: "ready", or the name of the error.
        after_failures: how many launches were ready after envs had failed.
        wrong: what happened but must not, each with the number by which to repeat the launch.
        slowest_s: seconds that the slowest launch took.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    after_failures: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


def measure(quick: bool) -> Sequence[Figure]:
    """Launch managers of real envs, and run the property test of launches at length."""
    figures = [real_ones(QUICK_LAUNCHES if quick else LAUNCHES)]
    if not quick:
        ran = run_tests(PROPERTIES, limit_s=LIMIT_S, HYPOTHESIS_PROFILE="long")
        figures.append(
            Figure("20,000 launches of fakes", ran.summary, "each ends in time", ran.passed)
        )
    return figures


def real_ones(n_launches: int, seed: int = 0) -> Figure:
    """Launch managers with random faults and settings."""
    launched = launch_many(n_launches, seed)
    ready = launched.outcomes.pop("ready", 0)
    refused = ", ".join(f"{n:,} {name}" for name, n in launched.outcomes.most_common())
    wrong = "; ".join(launched.wrong[:3]) or "0 hung or wrong"
    return Figure(
        f"{n_launches:,} launches with random faults and settings",
        f"{ready:,} ready, {launched.after_failures:,} of them after failures; "
        f"{refused or '0 refused'}; {wrong}; the slowest {launched.slowest_s:.1f} s",
        "each ready, or refused with a typed error; 0 hung",
        not launched.wrong,
    )


def launch_many(n_launches: int, seed: int = 0, first: int = 0) -> Launched:
    """Launch managers, one after another, and step those that are ready.

    Args:
        n_launches: how many.
        seed: the seed of the faults and settings.
        first: the number of the first launch; each has its own, by which it can be repeated.
    """
    launched = Launched()
    for number in range(first, first + n_launches):
        rng = random.Random(f"{seed}.{number}")
        cfg = settings(rng)
        with tempfile.TemporaryDirectory() as folder:
            env_fn = faulty_envs(rng, cfg, folder)
            began = time.monotonic()
            manager = create_env_manager(cfg, env_fn=env_fn)
            # An inline manager uses the alarm itself; nothing hangs there.
            with contextlib.nullcontext() if cfg["type"] == "base" else _ended_when_late():
                outcome = _launch_one(manager, launched, early=rng.random() < 0.2)
            launched.slowest_s = max(launched.slowest_s, time.monotonic() - began)
        if outcome.startswith("wrong"):
            launched.wrong.append(f"launch {seed}.{number} {outcome[6:]} with {cfg}")
        launched.outcomes[outcome.partition(":")[0]] += 1
    return launched


class HungError(BaseException):
    """A launch has taken too long."""


@contextlib.contextmanager
def _ended_when_late() -> Iterator[None]:
    """Raise HungError in a block that takes too long; an alarm set before goes on after it."""

    def end_it(number: int, frame: Any) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, end_it)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s)
        signal.signal(signal.SIGALRM, before)


def _launch_one(manager: Any, launched: Launched, *, early: bool) -> str:
    try:
        if early:
            _ = manager.observation_space
        manager.launch()
        if set(manager.env_states.values()) != {EnvState.RUN}:
            return f"wrong: {manager.env_states}"
        launched.after_failures += manager.stats()["failures"] > 0
        manager.step(manager.random_action())
    except HungError:
        return "wrong: hung"
    except EnvManagerError as error:
        return type(error).__name__
    except Exception as error:
        return f"wrong: {type(error).__name__}: {error}"
    finally:
        manager.close(0.0)
    return "ready"


# -- faults and settings --------------------------------------------------------------------------


def settings(rng: random.Random) -> dict[str, Any]:
    """Return a config whose settings do not contradict each other."""
    kinds = ["subprocess", "async_subprocess"]
    if importlib.util.find_spec("treetensor") is not None:
        kinds.append("subprocess_v2")
    env_num = rng.randint(1, 4)
    auto_reset = rng.random() < 0.6
    cfg: dict[str, Any] = {
        "type": rng.choice([*kinds * 4, "thread", "base"]),
        "env_num": env_num,
        "auto_reset": auto_reset,
        "reset_inplace": auto_reset and rng.random() < 0.4,
        "episode_num": rng.choice([float("inf"), 1]),
        "max_retry": rng.choice([1, 2, 3]),
        "retry_type": rng.choice(["reset", "renew"]),
        "retry_waiting_time": rng.choice([0.0, 0.01, 0.1]),
        "reset_timeout": RESET_S,
        "step_timeout": RESET_S,
        "connect_timeout": CONNECT_S,
        "close_timeout": 0.5,
        "shared_memory": rng.random() < 0.7,
        "copy_on_get": rng.choice([True, True, False]),
        "start_steps": rng.choice([0, 0, 0, 3]),
        "nan_policy": rng.choice(["allow", "abnormal", "raise"]),
        "on_failure": rng.choice(["recover", "recover", "raise"]),
        "on_exhausted": rng.choice(["raise", "drop"]),
        "max_failures": rng.choice([0, 3]),
        "seed": rng.choice([None, 0]),
    }
    if cfg["type"] not in ("thread", "base"):
        cfg["context"] = rng.choice([*["server"] * 12, *["fork"] * 16, "spawn", "forkserver"])
    if cfg["type"] != "base":
        cfg["num_workers"] = rng.choice([None, "auto", *range(1, env_num + 1)])
        if rng.random() < 0.3:
            cfg["limits"] = {"starting": rng.randint(1, 2)}
    may_have_spares = cfg["type"] != "base" and auto_reset and cfg["num_workers"] is None
    if may_have_spares and rng.random() < 0.3:
        cfg["spare_env_num"] = rng.randint(1, 2)
    elif auto_reset and cfg["on_failure"] == "recover" and rng.random() < 0.2:
        cfg.update(on_failure="resume", snapshot_every=1, snapshot_copy=True)
    return cfg


def faulty_envs(
    rng: random.Random, cfg: dict[str, Any], folder: str
) -> list[Callable[[], FragileEnv]]:
    """Return envs of which some fail while they are built, or in their first resets."""
    in_process = cfg["type"] not in ("thread", "base")
    if cfg.get("spare_env_num"):  # spares have no number of their own, and are built as most are
        plan, dies_after_s = _plan(rng, in_process), _moment(rng, in_process)
        return [partial(FragileEnv, 0, plan, folder, dies_after_s)] * cfg["env_num"]
    return [
        partial(FragileEnv, i, _plan(rng, in_process), folder, _moment(rng, in_process))
        for i in range(cfg["env_num"])
    ]


def _moment(rng: random.Random, in_process: bool) -> float | None:
    return rng.random() * 0.3 if in_process and rng.random() < 0.1 else None


def _plan(rng: random.Random, in_process: bool) -> tuple[Fault, ...]:
    faults = []
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        kinds: tuple[str, ...] = (*RAISED, *SPOILT, "slow")
        if in_process:
            kinds = (*kinds, *ENDS * 2, *STUCK, *HARMLESS)
        where = "reset" if rng.random() < 0.85 else "construction"
        faults.append(
            Fault(
                rng.choice(kinds),
                where,
                episode=rng.choice([None, 0, 0]),
                build=rng.choice([None, 0, 0, 0, 1]),
            )
        )
    return tuple(faults)
