"""Calls at the wrong moment, and what they find: F37, F39 to F41."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from envmgr.errors import (
    ActionError,
    EnvManagerError,
    EnvNotReadyError,
    ManagerClosedError,
    NothingReadyError,
    StaleViewError,
    StateError,
    UnknownEnvError,
)
from tests.contract.envs import Do, ScriptedGymEnv, seen
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_BLOCK_SHARED,
    INLINE,
    SOME_BLOCK,
    SOME_MESSAGE,
    Setup,
    World,
    over,
    ready_all,
    step_all,
)
from tests.faults.traffic import sent_by

# -- F37: wrong states ----------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before launch", "after close"])
@over(INLINE, ALL_BLOCK, SOME_BLOCK)
def test_f37_a_manager_that_is_not_launched_takes_no_calls(
    world: World, setup: Setup, when: str
) -> None:
    manager = world.make(setup, 2, launch=when == "after close")
    if when == "after close":
        manager.close()
    journals = [world.journal(i) for i in (0, 1)]
    for call in (
        lambda: manager.step({0: 0}),
        lambda: manager.step({}),
        lambda: manager.send({0: 0}),
        lambda: manager.recv(),
        lambda: manager.send_arrays([0], [0]),
        lambda: manager.reset(),
        lambda: manager.ready_obs,
        lambda: manager.call("scaled", 1),
    ):
        with pytest.raises(ManagerClosedError, match=r"launch\(\)"):
            call()
    assert [world.journal(i) for i in (0, 1)] == journals


# Env 0 waits for an action, 1 has one under way, 2 has ended (auto_reset off), 3 is DONE.
REFUSED: dict[str, tuple[Any, type[EnvManagerError]]] = {
    "pending": (lambda m: m.step({0: 1, 1: 1}), EnvNotReadyError),
    "pending, alone": (lambda m: m.send({1: 1}), EnvNotReadyError),
    "ended": (lambda m: m.step({0: 1, 2: 1}), EnvNotReadyError),
    "done": (lambda m: m.step({0: 1, 3: 1}), EnvNotReadyError),
    "unknown": (lambda m: m.step({0: 1, 4: 1}), UnknownEnvError),
    "negative": (lambda m: m.step({0: 1, -1: 1}), UnknownEnvError),
    "text": (lambda m: m.step({0: 1, "1": 1}), UnknownEnvError),
    "twice": (lambda m: m.send_arrays([0, 0], np.array([1, 1])), ActionError),
    "no dict": (lambda m: m.step([1]), ActionError),
    "pending in arrays": (lambda m: m.send_arrays([0, 1], np.array([1, 1])), EnvNotReadyError),
    "unknown in arrays": (lambda m: m.send_arrays([0, 9], np.array([1, 1])), UnknownEnvError),
    "launched": (lambda m: m.launch(), StateError),
    "attribute": (lambda m: m.get_attr("label"), EnvNotReadyError),
    "reset of nobody": (lambda m: m.reset({0: None, 8: None}), UnknownEnvError),
}


@over(ALL_BLOCK, SOME_MESSAGE, SOME_BLOCK)
def test_f37_what_is_refused_sends_nothing(world: World, setup: Setup) -> None:
    manager = world.make(setup, 4, auto_reset=False, episode_num=1, wait_num=1)
    gate = world.gate
    ready_all(manager)
    step_all(manager, {2: Do.RAISE, 3: Do.END})
    manager.get_attr("label", env_ids=[0, 1])
    manager.send({1: Do.GATE})
    visit = gate.await_visit(1)
    stats, states = manager.stats(), manager.env_states
    for name, (call, error) in REFUSED.items():
        with sent_by(manager) as sent, pytest.raises(error):
            call(manager)
        assert sent == [], name
        after = manager.stats()
        assert (after["actions"], manager.env_states) == (stats["actions"], states), name
    visit.release()
    assert seen(manager.recv(min_ready=1)[1].obs)[:5] == (1, 0, 0, 1, Do.GATE)
    assert [world.actions(i) for i in range(4)] == [[], [Do.GATE], [Do.RAISE], [Do.END]]
    assert seen(step_all(manager, {0: 5})[0].obs)[:5] == (0, 0, 0, 1, 5)


@over(INLINE, ALL_BLOCK, SOME_BLOCK)
def test_f37_an_empty_step_gathers_what_is_outstanding_or_is_refused(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, wait_num=2)
    ready_all(manager)
    with sent_by(manager) as sent, pytest.raises(NothingReadyError):
        manager.step({})
    assert sent == []
    manager.send({0: 1, 1: 2})
    timesteps = manager.step({})
    assert [seen(timesteps[i].obs).action for i in (0, 1)] == [1, 2]


# -- F39: what happens between reading and acting -------------------------------------------------


@over(ALL_BLOCK, SOME_MESSAGE, SOME_BLOCK)
def test_f39_an_action_goes_to_the_env_that_it_names(world: World, setup: Setup) -> None:
    """Also when other envs have become ready, and its own host has died, since it was read."""
    manager = world.make(setup, 3, wait_num=1, scripts={0: {"reset_faults": {1: "gate"}}})
    gate = world.gate
    ready_all(manager)
    step_all(manager, {0: Do.END_THEN_GATE, 1: 1, 2: 1})
    visit = gate.await_visit(0, "reset")
    ready = manager.ready_obs
    assert [*ready] == [1, 2]
    visit.release()
    manager.get_attr("label", env_ids=0)  # it is ready now, too
    world.kill(1)
    timesteps = step_all(manager, {1: 7, 2: 8})
    assert timesteps[1].info["abnormal"]
    assert timesteps[1].obs.tobytes() == ready[1].tobytes()
    assert seen(timesteps[2].obs)[:5] == (2, 0, 0, 2, 8)
    assert [world.actions(i) for i in range(3)] == [[Do.END_THEN_GATE], [1], [1, 8]]
    assert seen(ready_all(manager)[1])[:4] == (1, 1, 0, 0)


@pytest.mark.v2
@over(
    Setup("async_subprocess_v2", "fork", True),
    Setup("async_subprocess_v2", "fork", False),
)
def test_f39_row_i_of_what_was_read_takes_action_i(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, wait_num=1, scripts={0: {"reset_faults": {1: "gate"}}})
    gate = world.gate
    manager.get_attr("label")
    _ = manager.ready_obs
    manager.step([int(Do.END_THEN_GATE), 1, 1])
    visit = gate.await_visit(0, "reset")
    while manager.stats()["outstanding"]:
        manager.recv()
    rows = manager.ready_obs
    assert rows.shape[0] == 2
    visit.release()
    manager.get_attr("label")  # env 0 is ready, too, and nobody has read that
    with pytest.raises(ActionError):
        manager.step([4, 5, 6])
    manager.step([5, 6])
    while manager.stats()["outstanding"]:
        manager.recv()
    assert [world.actions(i) for i in range(3)] == [[Do.END_THEN_GATE], [1, 5], [1, 6]]


# -- F40: calls during a reset --------------------------------------------------------------------


@over(ALL_BLOCK, SOME_MESSAGE, SOME_BLOCK, ALL_BLOCK_SHARED)
def test_f40_a_call_during_a_reset_waits_and_takes_no_reply_of_it(
    world: World, setup: Setup
) -> None:
    manager = world.make(
        setup, 2, env=ScriptedGymEnv, seed=2, scripts={0: {"reset_faults": {1: "gate"}}}
    )
    gate = world.gate
    ready_all(manager)
    step_all(manager, {1: 3, 0: Do.END})  # else a shared host may begin the reset before that step
    visit = gate.await_visit(0, "reset")
    threading.Timer(0.1, visit.release).start()
    assert manager.get_attr("label") == ["env-0", "env-1"]
    frames = manager.render(env_ids=[0, 1])
    assert [int(np.asarray(frame).max()) for frame in frames] == [0, 1]
    assert manager.call("get_wrapper_attr", "label") == ["env-0", "env-1"]
    ready = manager.ready_obs
    assert [seen(ready[i])[:4] for i in (0, 1)] == [(0, 0, 1, 0), (1, 0, 0, 1)]
    timesteps = step_all(manager, {0: 4, 1: 5})
    assert [seen(t.obs)[2:5] for t in timesteps.values()] == [(1, 1, 4), (0, 2, 5)]
    assert manager.stats()["dropped_replies"] == 0


@over(ALL_BLOCK, SOME_BLOCK)
def test_f40_a_call_during_a_step_is_refused(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, wait_num=2)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.GATE, 1: 3})
    visit = gate.await_visit(0)
    for call in (
        lambda: manager.get_attr("label"),
        lambda: manager.label,
        lambda: manager.call("user_defined"),
        lambda: manager.set_attr("knob", 1),
    ):
        with sent_by(manager) as sent, pytest.raises(EnvNotReadyError, match="recv"):
            call()
        assert sent == []
    visit.release()
    timesteps = manager.recv(min_ready=2)
    assert [seen(timesteps[i].obs).action for i in (0, 1)] == [Do.GATE, 3]


# -- F41: views -----------------------------------------------------------------------------------


@over(ALL_BLOCK, SOME_BLOCK, ALL_BLOCK_SHARED, INLINE)
def test_f41_a_view_stays_as_it_was_for_two_steps_and_over_an_end(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, copy_on_get=False)
    ready_all(manager)
    terminal = step_all(manager, {0: Do.END, 1: 1})[0].obs
    first = ready_all(manager)[0]
    kept = [(view, view.tobytes()) for view in (terminal, first)]
    for action in (3, Do.END):
        step_all(manager, {0: action, 1: 1})
        ready_all(manager)
        for view, before in kept:
            assert view.tobytes() == before, "a view has changed within two steps of its env"


@over(ALL_BLOCK, SOME_BLOCK, ALL_BLOCK_SHARED)
def test_f41_a_view_that_is_used_too_late_is_told_in_checked_mode(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, copy_on_get="checked")
    first = ready_all(manager)[0]
    for action in (1, Do.END):
        step_all(manager, {0: action, 1: 1})
        assert first.sum() is not None
        ready_all(manager)
    step_all(manager, {0: 2})
    with pytest.raises(StaleViewError):
        first.sum()
    assert seen(np.array(ready_all(manager)[0]))[2:4] == (1, 1)
