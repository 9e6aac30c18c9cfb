"""Runs an env that fails beside others, and compares what they give with a run without faults.

The envs are told what to do by step number, so a run without faults is always the same, whatever
runs the envs. It is made once, inline, and every other run is compared with it byte for byte.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.contract.envs import Do, ScriptedEnv
from tests.contract.harness import INLINE, Setup, World, ready_all, step_all

N_STEPS = 8
EPISODE_LENGTH = 3
FAULTY, AT_STEP = 1, 4
"""The env that fails, and the step in which it does."""
GAP = N_STEPS - AT_STEP
"""How many steps there are from one fault to the next, where there are more."""

Entry = tuple[Any, ...]
"""What an env gave in one step: what it saw before, observation, reward, done and info."""


class Run(NamedTuple):
    """What became of a run.

    Attributes:
        given: the entries of each env, a step each.
        timesteps: of the faulty env, a step each.
        stats: of the manager, at the end.
        builds: how often each env was built.
        pids: the processes that each env was built in.
        executed: the actions that each env has begun to execute.
    """

    given: dict[int, list[Entry]]
    timesteps: list[Any]
    stats: dict[str, Any]
    builds: list[int]
    pids: list[set[int]]
    executed: list[list[int]]

    @property
    def timestep(self) -> Any:
        """Of the faulty env in the faulty step."""
        return self.timesteps[AT_STEP]


def run(
    folder: Path,
    setup: Setup,
    action: Do | None = None,
    *,
    faults: Mapping[int, Do] | None = None,
    env_num: int | None = None,
    env: Callable[..., Any] = ScriptedEnv,
    meanwhile: Callable[[World], None] | None = None,
    n_steps: int = N_STEPS,
    **cfg: Any,
) -> Run:
    """Run scripted envs.

    Args:
        folder: an empty folder, or one that is not there yet.
        setup: what runs them.
        action: what the faulty env is made to do in the faulty step; None lets it go on.
        faults: what it is made to do in other steps.
        env_num: how many envs; None: enough to have some in another host than the faulty one.
        env: of which style they are.
        meanwhile: called in the faulty step, when all actions are sent.
        n_steps: how many each env takes.
        cfg: of the manager; `script` is that of the envs.
    """
    folder.mkdir(exist_ok=True)
    env_num = env_num or (3 if setup.num_workers is None else 2 * setup.num_workers + 1)
    world = World(folder)
    given: dict[int, list[Entry]] = {i: [] for i in range(env_num)}
    faulty: list[Any] = []
    troubles = {**(faults or {}), **({} if action is None else {AT_STEP: action})}
    cfg["script"] = {"episode_length": EPISODE_LENGTH, **cfg.get("script", {})}
    cfg = {"seed": 6, "max_failures": 99, "retry_waiting_time": 0.0, **cfg}
    try:
        manager = world.make(setup, env_num, env=env, **cfg)
        for k in range(n_steps):
            ready = ready_all(manager)
            actions = {i: int(Do.JITTER if (i + k) % 2 else k % N_STEPS) for i in range(env_num)}
            if k in troubles:
                actions[FAULTY] = int(troubles[k])
            if k == AT_STEP and meanwhile is not None:
                manager.send(actions)
                meanwhile(world)
                timesteps: dict[int, Any] = {}
                while len(timesteps) < env_num:
                    more = manager.recv()
                    assert not more.keys() & timesteps.keys(), "two timesteps for one action"
                    timesteps.update(more)
            else:
                timesteps = step_all(manager, actions)
            faulty.append(timesteps[FAULTY])
            for i, timestep in timesteps.items():
                given[i].append(_entry(ready[i], timestep))
        ready_all(manager)
        stats = manager.stats()
        assert stats["actions"] == stats["timesteps"] == n_steps * env_num
        builds = [world.noted(i, "build") for i in range(env_num)]
        pids = [{pid for _, pid in built} for built in builds]
        executed = [world.actions(i) for i in range(env_num)]
        return Run(given, faulty, stats, [*map(len, builds)], pids, executed)
    finally:
        world.close()


def _entry(ready: Any, timestep: Any) -> Entry:
    obs, reward, done, info = timestep
    said = {key: value for key, value in info.items() if key != "error"}
    return ready.tobytes(), obs.tobytes(), reward, done, repr(sorted(said.items()))


@functools.cache
def untroubled(
    env_num: int, env: Callable[..., Any] = ScriptedEnv, n_steps: int = N_STEPS
) -> dict[int, list[Entry]]:
    """Return what envs give that run inline and without faults."""
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), INLINE, env_num=env_num, env=env, n_steps=n_steps).given


def check_others(folder: Path, setup: Setup, action: Do, **options: Any) -> Any:
    """As `check_each`, with one fault; return its timestep."""
    return check_each(folder, setup, [action], **options)[action]


def check_each(
    folder: Path, setup: Setup, actions: Sequence[Do], *, host_lost: bool, **options: Any
) -> dict[Do, Any]:
    """Run with faults, one after the other in the same manager; none may touch anything else.

    Args:
        folder: see `run`.
        setup: see `run`.
        actions: what the faulty env is made to do, in its step AT_STEP and then every GAP steps.
        host_lost: whether each fault costs the faulty env its host, and its neighbours theirs.
        options: see `run`.

    Returns:
        The abnormal timesteps of the faulty env, by action.
    """
    steps = {AT_STEP + GAP * k: action for k, action in enumerate(actions)}
    n_steps = AT_STEP + GAP * len(actions)
    troubled = run(folder, setup, faults=steps, n_steps=n_steps, **options)
    env_num = len(troubled.given)
    expected = untroubled(env_num, n_steps=n_steps)
    neighbours = neighbours_of(FAULTY, env_num, setup.num_workers) if host_lost else set()
    for i in range(env_num):
        if i == FAULTY or i in neighbours:
            assert troubled.given[i][:AT_STEP] == expected[i][:AT_STEP]
            assert troubled.given[i][AT_STEP][0] == expected[i][AT_STEP][0]
            assert len(troubled.given[i]) == n_steps
        else:
            assert troubled.given[i] == expected[i], f"env {i} has felt the failure"
            assert troubled.builds[i] == 1
            assert len(troubled.executed[i]) == n_steps
    assert len(troubled.executed[FAULTY]) == n_steps, "lost, or run twice"
    if setup.has_processes:
        assert troubled.builds[FAULTY] == (1 + len(actions) if host_lost else 1)
    assert troubled.stats["failures"] == len(actions)
    for step, action in steps.items():
        ready, timestep = troubled.given[FAULTY][step][0], troubled.timesteps[step]
        assert timestep.obs.tobytes() == ready, f"not its last good observation: {action!r}"
        assert (timestep.reward, timestep.done) == (0.0, True), action
        flags = [timestep.info[name] for name in ("abnormal", "terminated", "truncated")]
        assert flags == [True, False, True], action
        assert timestep.info["error"].env_id == FAULTY
    return {action: troubled.timesteps[step] for step, action in steps.items()}


def neighbours_of(env_id: int, env_num: int, num_workers: int | None) -> set[int]:
    """Return the envs that share a host with an env: consecutive ones do, larger groups first."""
    if num_workers is None:
        return set()
    size, n_larger = divmod(env_num, num_workers)
    begin = 0
    for index in range(num_workers):
        end = begin + size + (index < n_larger)
        if begin <= env_id < end:
            return set(range(begin, end)) - {env_id}
        begin = end
    raise AssertionError(f"there is no env {env_id}")
