"""Seeds of renewed envs: F42."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.contract.envs import Do
from tests.contract.harness import (
    ALL_BLOCK,
    INLINE,
    SOME_BLOCK,
    SOME_MESSAGE,
    SOME_MESSAGE_SHARED,
    Setup,
    World,
    over,
    ready_all,
    step_all,
)

SEED = 40
FAULTS = {2: Do.SYS_EXIT, 5: Do.SYS_EXIT, 6: Do.END}
"""What env 1 of three does, by step; SYS_EXIT costs an env of any kind its object, not more."""

N_STEPS = 9


def derived(generation: int, episode: int) -> int:
    """Return the seed that env 1 has to get."""
    sequence = np.random.SeedSequence((SEED + 1, 1, generation, episode))
    return int(sequence.generate_state(1)[0])


class Life(NamedTuple):
    """What became of a run.

    Attributes:
        given: what each env gave, in all steps.
        seeds: what each env was seeded with.
    """

    given: dict[int, list[Any]]
    seeds: list[list[int]]


def live(folder: Path, setup: Setup, faults: dict[int, Do], **cfg: Any) -> Life:
    """Run three envs, of which env 1 does as `faults` say."""
    folder.mkdir()
    world = World(folder)
    given: dict[int, list[Any]] = {i: [] for i in range(3)}
    try:
        manager = world.make(setup, 3, seed=SEED, max_failures=99, retry_waiting_time=0.0, **cfg)
        for k in range(N_STEPS):
            ready = ready_all(manager)
            timesteps = step_all(manager, {0: k, 1: int(faults.get(k, k)), 2: k})
            for i, (obs, reward, done, _) in timesteps.items():
                # Not which build it is: with a host of their own, envs are built in another order.
                given[i].append((ready[i].tobytes(), obs.tobytes(), reward, done))
        ready_all(manager)
        return Life(given, [[seed for seed, _ in world.noted(i, "seed")] for i in range(3)])
    finally:
        world.close()


@over(INLINE, ALL_BLOCK, SOME_MESSAGE, SOME_BLOCK, SOME_MESSAGE_SHARED)
def test_f42_a_renewed_env_gets_a_seed_that_follows_from_generation_and_episode(
    tmp_path: Path, setup: Setup
) -> None:
    life = live(tmp_path / "one", setup, FAULTS)
    # Generation 0 began episode 0; the next ones began when episodes 0 and 1 had begun before.
    assert life.seeds == [[SEED], [SEED + 1, derived(1, 1), derived(2, 2)], [SEED + 2]]
    again = live(tmp_path / "two", setup, FAULTS)
    assert again == life, "the run does not repeat"
    inline = live(tmp_path / "three", INLINE, FAULTS)
    assert inline == life, "the run depends on what runs the envs"
    untroubled = live(tmp_path / "four", INLINE, {})
    for sibling in (0, 2):
        assert untroubled.given[sibling] == life.given[sibling]


@pytest.mark.parametrize("action", [Do.KILL, Do.HANG, Do.RAISE], ids=lambda action: action.name)
@over(ALL_BLOCK, SOME_BLOCK)
def test_f42_whatever_the_failure_was(tmp_path: Path, setup: Setup, action: Do) -> None:
    cfg = {"step_timeout": 1.0, "retry_type": "renew"}
    life = live(tmp_path / "one", setup, {2: action}, **cfg)
    assert life.seeds[1] == [SEED + 1, derived(1, 1)]
    exited = live(tmp_path / "two", setup, {2: Do.SYS_EXIT}, **cfg)
    assert exited == life


@over(ALL_BLOCK, SOME_BLOCK)
def test_f42_a_later_seed_is_the_base_from_its_reset_on(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, seed=1)
    ready_all(manager)
    manager.seed([SEED, SEED + 1])
    manager.reset({1: None})
    step_all(manager, {0: 0, 1: Do.KILL})
    ready_all(manager)
    assert [seed for seed, _ in world.noted(1, "seed")] == [2, SEED + 1, derived(1, 2)]
    step_all(manager, {0: Do.KILL, 1: 0})
    ready_all(manager)
    old_base = np.random.SeedSequence((1, 0, 1, 1)).generate_state(1)[0]
    assert [seed for seed, _ in world.noted(0, "seed")] == [1, int(old_base)], "not reset since"
