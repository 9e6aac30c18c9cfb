"""Which seeds envs get, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr.errors import ConfigError, UnknownEnvError
from tests.contract.envs import Do, ScriptedEnv, ScriptedGymEnv, seen
from tests.contract.harness import (
    ALL_BLOCK,
    INLINE,
    SOME_BLOCK,
    Raises,
    Setup,
    World,
    every_kind,
    every_setup,
    over,
    process_kinds,
    ready_all,
    step_all,
)


def seeds_of_resets(world: World, env_id: int) -> list[int | None]:
    """Return the seed that each reset of a scripted env has used; None where it used none."""
    return [seed for _, _, seed in world.noted(env_id, "reset")]


def derived(seed: int, env_id: int, generation: int, episode: int) -> int:
    """Return the seed of an episode that begins a later generation, as the design says."""
    sequence = np.random.SeedSequence((seed, env_id, generation, episode))
    return int(sequence.generate_state(1)[0])


@pytest.mark.parametrize("env", [ScriptedEnv, ScriptedGymEnv])
@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (7, [7, 8, 9]),
        (0, [0, 1, 2]),
        ([5, 5, 1], [5, 5, 1]),
        ((5, None, 1), [5, None, 1]),
        ({1: 4}, [None, 4, None]),
        ({0: 3, 1: None, 2: 1}, [3, None, 1]),
        (None, [None, None, None]),
        (np.int64(7), [7, 8, 9]),
    ],
    ids=str,
)
@over(INLINE, SOME_BLOCK)
def test_the_first_reset_uses_exactly_the_seed_it_was_given(
    world: World, setup: Setup, env: Any, seed: Any, expected: list[int | None]
) -> None:
    manager = world.make(setup, 3, env=env, launch=False)
    manager.seed(seed)
    manager.launch()
    assert [seeds_of_resets(world, i) for i in range(3)] == [[s] for s in expected]
    if env is ScriptedEnv:
        said = [world.noted(i, "seed") for i in range(3)]
        assert said == [[] if s is None else [[s, None]] for s in expected]


@over(INLINE, ALL_BLOCK)
def test_seed_of_the_config_is_that_of_the_method(world: World, setup: Setup) -> None:
    world.make(setup, 2, seed=11)
    assert [seeds_of_resets(world, i) for i in (0, 1)] == [[11], [12]]


@pytest.mark.parametrize("env", [ScriptedEnv, ScriptedGymEnv])
@pytest.mark.parametrize("mode", [{}, {"reset_inplace": True}], ids=str)
@every_kind
def test_automatic_resets_pass_no_seed(
    world: World, setup: Setup, env: Any, mode: dict[str, Any]
) -> None:
    manager = world.make(setup, 1, env=env, seed=3, **mode)
    for _ in range(3):
        ready_all(manager)
        step_all(manager, {0: Do.END})
    ready_all(manager)
    assert seeds_of_resets(world, 0) == [3, None, None, None]
    assert len(world.noted(0, "seed")) == (1 if env is ScriptedEnv else 0)


@every_kind
def test_dynamic_seed_true_gives_each_episode_a_seed_of_its_own(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, env=ScriptedGymEnv, launch=False)
    manager.seed(3, dynamic_seed=True)
    manager.launch()
    for _ in range(3):
        ready_all(manager)
        step_all(manager, {0: Do.END, 1: Do.END})
    ready_all(manager)
    seeds = [seeds_of_resets(world, i) for i in (0, 1)]
    assert [s[0] for s in seeds] == [3, 4]
    assert None not in seeds[0] + seeds[1]
    assert len({*seeds[0], *seeds[1]}) == 8
    manager.close()
    manager.launch()
    ready_all(manager)
    step_all(manager, {0: Do.END})
    ready_all(manager)
    assert seeds_of_resets(world, 0)[4:] == seeds[0][:2], "the seeds do not repeat"


@every_kind
def test_dynamic_seed_false_repeats_the_same(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, env=ScriptedGymEnv, launch=False)
    manager.seed(3, dynamic_seed=False)
    manager.launch()
    draws = []
    for _ in range(3):
        draws.append(seen(ready_all(manager)[0]).draw)
        step_all(manager, {0: Do.END})
    ready_all(manager)
    assert seeds_of_resets(world, 0) == [3, 3, 3, 3]
    assert len(set(draws)) == 1


@pytest.mark.parametrize("dynamic_seed", [None, True, False])
@every_kind
def test_dynamic_seed_is_handed_on_to_envs_of_di_engine(
    world: World, setup: Setup, dynamic_seed: bool | None
) -> None:
    manager = world.make(setup, 1, launch=False)
    manager.seed(3, dynamic_seed)
    manager.launch()
    step_all(manager, {0: Do.END})
    ready_all(manager)
    assert world.noted(0, "seed") == [[3, dynamic_seed]]


@every_setup
def test_later_generations_derive_their_seeds(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, seed=20, retry_type="renew", max_failures=5)
    ready_all(manager)
    step_all(manager, {1: Do.END})
    ready_all(manager)
    for _ in range(2):
        step_all(manager, {1: Do.RAISE})
        ready_all(manager)
    step_all(manager, {1: Do.END})
    ready_all(manager)
    assert seeds_of_resets(world, 0) == [20]
    assert seeds_of_resets(world, 1) == [
        21,
        None,
        derived(21, 1, 1, 2),
        derived(21, 1, 2, 3),
        None,
    ]


@every_kind
def test_unseeded_envs_stay_unseeded_when_they_are_renewed(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, retry_type="renew")
    ready_all(manager)
    step_all(manager, {0: Do.RAISE})
    ready_all(manager)
    assert seeds_of_resets(world, 0) == [None, None]
    assert world.noted(0, "seed") == []


@every_kind
def test_a_reset_that_is_tried_again_uses_the_same_seed(world: World, setup: Setup) -> None:
    manager = world.make(
        setup, 1, seed=5, max_retry=3, retry_waiting_time=0.0, script={"reset_faults": {0: "raise"}}
    )
    ready_all(manager)
    assert seeds_of_resets(world, 0) == [5, 5]
    untroubled = seen(world.make(setup, 1, seed=5).ready_obs[0]).draw
    assert seen(manager.ready_obs[0]).draw == untroubled


@every_kind
def test_a_relaunch_with_the_same_seed_repeats_the_run(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, seed=9, launch=False)

    def run() -> list[Any]:
        manager.launch()
        draws = []
        for k in range(6):
            draws += [seen(obs).draw for obs in ready_all(manager).values()]
            actions = dict.fromkeys((0, 1), Do.END if k % 3 == 2 else k)
            timesteps = step_all(manager, actions)
            draws += [seen(t.obs).draw for t in timesteps.values()]
            ready_all(manager)  # what is ready decides who gets a random action
            draws.append(manager.random_action())
            if k == 3:
                step_all(manager, {0: Do.SYS_EXIT})  # renewals repeat too
                draws.append(seen(ready_all(manager)[0]).draw)
        manager.close()
        return draws

    assert run() == run()


@every_setup
def test_seed_in_the_middle_of_a_run_takes_effect_at_the_next_explicit_reset_only(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 3, seed=1, env=ScriptedGymEnv)
    ready_all(manager)
    manager.seed(50)
    step_all(manager, {0: Do.END})  # an automatic reset, which does not count
    ready_all(manager)
    assert seeds_of_resets(world, 0) == [1, None]
    manager.reset({0: None})
    assert seeds_of_resets(world, 0) == [1, None, 50]
    manager.reset({0: None})
    assert seeds_of_resets(world, 0) == [1, None, 50, None]
    assert [seeds_of_resets(world, i) for i in (1, 2)] == [[2], [3]]
    manager.reset({2: {"level": 1}})
    assert seeds_of_resets(world, 2) == [3, 52]
    step_all(manager, {1: Do.END})
    ready_all(manager)
    assert seeds_of_resets(world, 1) == [2, None]
    manager.close()
    manager.launch()
    assert [seeds_of_resets(world, i)[-1] for i in range(3)] == [50, 51, 52]


@every_kind
def test_seed_is_legal_while_steps_are_pending(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, seed=1)
    ready_all(manager)
    manager.send({0: 1, 1: 1})
    manager.seed({1: 70})
    got = dict(manager.recv(min_ready=2))
    assert sorted(got) == [0, 1]
    manager.reset()
    assert [seeds_of_resets(world, i) for i in (0, 1)] == [[1, None], [2, 70]]


@every_kind
def test_a_seed_of_the_middle_of_a_run_is_that_of_later_generations_from_its_reset_on(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 1, seed=1, retry_type="renew", max_failures=9)
    ready_all(manager)
    manager.seed([60])
    step_all(manager, {0: Do.RAISE})
    ready_all(manager)
    manager.reset()
    step_all(manager, {0: Do.RAISE})
    ready_all(manager)
    assert seeds_of_resets(world, 0) == [1, derived(1, 0, 1, 1), 60, derived(60, 0, 2, 3)]


@process_kinds
def test_a_new_seed_does_not_join_a_running_reset(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, seed=1, env=ScriptedGymEnv)
    gate = world.gate
    ready_all(manager)
    step_all(manager, {0: Do.END_THEN_GATE})
    visit = gate.await_visit(0, "reset")
    manager.seed(30)
    visit.release()
    manager.reset({0: None})
    assert seeds_of_resets(world, 0) == [1, None, 30]


@every_kind
def test_none_takes_a_seed_back(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, launch=False)
    manager.seed(5)
    manager.seed({1: None})
    manager.launch()
    assert [seeds_of_resets(world, i) for i in (0, 1)] == [[5], [None]]
    manager.seed(9)
    manager.seed(None)
    manager.reset()
    assert [seeds_of_resets(world, i) for i in (0, 1)] == [[5, None], [None, None]]


@over(INLINE, ALL_BLOCK)
def test_wrong_seeds_are_refused_and_change_nothing(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, seed=4, launch=False)
    for wrong in (-1, 1.5, "7", True, [1], [1, 2, 3], [1, -2], [1, "2"], {0: -1}, {0: True}):
        with Raises(ConfigError, "seed"):
            manager.seed(wrong)
    for unknown in ({2: 1}, {-1: 1}, {"0": 1}):
        with Raises(UnknownEnvError, "0 to 1"):
            manager.seed(unknown)
    manager.launch()
    assert [seeds_of_resets(world, i) for i in (0, 1)] == [[4], [5]]
    for wrong in ({"seed": -1}, {"seed": [1]}, {"seed": {5: 1}}, {"seed": "x"}):
        with Raises(ConfigError, "seed"):
            world.make(setup, 2, launch=False, **wrong)


@every_kind
def test_random_actions_come_from_a_stream_of_each_env(world: World, setup: Setup) -> None:
    one = world.make(setup, 3, seed=4)
    ready_all(one)
    all_at_once = [one.random_action() for _ in range(4)]
    assert all(sorted(actions) == [0, 1, 2] for actions in all_at_once)
    assert all(one.action_space.contains(a) for actions in all_at_once for a in actions.values())
    two = world.make(setup, 3, seed=4, auto_reset=False)
    ready_all(two)
    step_all(two, {1: Do.END})
    others = [two.random_action() for _ in range(4)]
    assert all(sorted(actions) == [0, 2] for actions in others)
    assert [a[2] for a in others] == [a[2] for a in all_at_once], "env 2 felt that env 1 was away"


def _drawn(space: Any) -> list[int]:
    return [int(space.sample()) for _ in range(8)]


class DrawsFromItsSpace(ScriptedGymEnv):
    """Its infos say what it has drawn from its own action space."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.action_space = Discrete(64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin an episode."""
        if seed is not None:
            self.action_space.seed(seed)
        obs, info = super().reset(seed=seed, options=options)
        return obs, {**info, "drawn": _drawn(self.action_space)}


def test_the_spaces_of_a_manager_are_its_own_and_seeded_alike_under_every_kind(
    world: World,
) -> None:
    both: list[Any] = []
    for setup in (INLINE, ALL_BLOCK):
        manager = world.make(setup, 2, env=DrawsFromItsSpace, seed=4)
        drawn = _drawn(manager.action_space)
        manager.reset({0: None})
        both.append((drawn, manager.ready_info[0]["drawn"], manager.observation_space.sample()))
        assert manager.env_spaces[0][1] is manager.action_space
        manager.seed(4)
        assert _drawn(manager.action_space) == drawn
        manager.seed({1: 5})
        assert _drawn(manager.action_space) != drawn, "it is seeded with env 0"
        manager.close()
    (drawn, of_env, obs), (drawn_there, of_env_there, obs_there) = both
    assert drawn == drawn_there
    assert of_env == of_env_there
    assert np.array_equal(obs, obs_there)
    unseeded = world.make(INLINE, 1, env=DrawsFromItsSpace)
    assert unseeded.action_space is not unseeded.apply(lambda env: env.action_space)[0]


class Stubborn(Box):
    """A space that can be neither seeded nor copied."""

    def seed(self, seed: Any = None) -> Any:
        """Refuse."""
        raise RuntimeError("no seeds here")

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies of this")


class WithStubbornSpace(ScriptedGymEnv):
    """Its observations are of such a space."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own: Any = self.observation_space
        self.observation_space = Stubborn(own.low, own.high, own.shape, own.dtype)


def test_a_space_that_cannot_be_seeded_or_copied_keeps_no_env_from_being_run(world: World) -> None:
    manager = world.make(INLINE, 2, env=WithStubbornSpace, seed=4)
    assert type(manager.observation_space) is Stubborn
    step_all(manager, {0: 1, 1: 1})
    manager.close()
