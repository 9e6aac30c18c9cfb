"""Sending actions and gathering timesteps: which, in what order, how many, and what is refused."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from envmgr import make
from envmgr.errors import (
    ActionError,
    ConcurrentCallError,
    ConfigError,
    EnvNotReadyError,
    ManagerClosedError,
    NothingReadyError,
    UnknownEnvError,
)
from tests.contract.envs import Do, expected_reward, seen
from tests.contract.harness import (
    ALL_MESSAGE,
    INLINE,
    SOME_BLOCK,
    Raises,
    Setup,
    World,
    async_kinds,
    every_kind,
    every_setup,
    over,
    process_kinds,
    ready_all,
    step_all,
    sync_kinds,
)

# -- sync -----------------------------------------------------------------------------------------


@sync_kinds
def test_a_sync_step_returns_exactly_the_ids_it_was_given_in_their_order(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 4, script={"episode_length": 2})
    for ids in ([3, 0, 2], [1], [2, 1], [0, 3, 1], [1, 0]):
        ready_all(manager)
        assert [*manager.step(dict.fromkeys(ids, Do.JITTER))] == ids


@over(ALL_MESSAGE)
def test_a_sync_step_waits_for_all_of_its_own_and_leaves_earlier_sends_alone(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 3)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.GATE})
    visit = gate.await_visit(0)
    assert [*manager.step({2: 1, 1: 2})] == [2, 1]
    visit.release()
    assert [*manager.step({})] == [0]


@over(ALL_MESSAGE)
def test_a_sync_recv_gathers_all_that_is_outstanding_in_ascending_order(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 3)
    gate = world.gate
    ready_all(manager)
    manager.send({2: Do.GATE})
    manager.send({0: 1})
    manager.send({1: 2})
    threading.Timer(0.1, gate.await_visit(2).release).start()
    assert [*manager.recv()] == [0, 1, 2]


# -- async ----------------------------------------------------------------------------------------


@async_kinds
def test_an_async_step_returns_at_least_wait_num_in_ascending_order(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 4, wait_num=2)
    gate = world.gate
    ready_all(manager)
    manager.send({3: 1})
    assert [*manager.recv()] == [3]
    timesteps = manager.step({3: 1, 2: Do.GATE, 1: 1, 0: Do.GATE})
    assert [*timesteps] == [1, 3]
    for i in (0, 2):
        gate.await_visit(i).release()
    assert [*manager.step({})] == [0, 2]


@async_kinds
def test_an_async_step_returns_earlier_sends_too(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, wait_num=1)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.GATE})
    visit = gate.await_visit(0)
    assert [*manager.step({2: 1})] == [2]
    manager.send({2: Do.GATE, 1: Do.GATE})
    visit.release()
    assert [*manager.step({})] == [0]
    for i in (1, 2):
        gate.await_visit(i).release()


@async_kinds
def test_wait_num_is_at_most_what_is_outstanding(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, wait_num=3)
    ready_all(manager)
    assert [*manager.step({1: 1})] == [1]
    assert [*manager.step({2: 1, 0: 1})] == [0, 2]


@async_kinds
def test_an_async_step_goes_on_until_one_timestep_is_not_the_end_of_an_episode(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 4, wait_num=1)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.GATE})
    visit = gate.await_visit(0)
    # Two episodes end at once; neither is something that can be stepped next.
    threading.Timer(0.1, visit.release).start()
    timesteps = manager.step({1: Do.END, 2: Do.END})
    assert timesteps[0].done is False, "it returned although all it had were episodes' ends"


@async_kinds
def test_an_async_step_returns_ends_of_episodes_when_nothing_else_is_outstanding(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 3, wait_num=1)
    ready_all(manager)
    timesteps = manager.step({2: Do.END, 0: Do.END})
    assert [*timesteps] == [0, 2]
    assert all(t.done for t in timesteps.values())


@async_kinds
def test_stragglers_are_waited_for_after_wait_num_is_met(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, wait_num=1, step_wait_timeout=20.0)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.GATE})
    threading.Timer(0.1, gate.await_visit(0).release).start()
    began = time.monotonic()
    assert [*manager.step({2: 1, 1: 1})] == [0, 1, 2]
    assert time.monotonic() - began < 15.0, "it waited although all had arrived"


@async_kinds
def test_stragglers_are_waited_for_no_longer_than_step_wait_timeout(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, wait_num=1, step_wait_timeout=0.2)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.GATE})
    visit = gate.await_visit(0)
    began = time.monotonic()
    assert [*manager.step({1: 1})] == [1]
    assert time.monotonic() - began >= 0.2
    visit.release()


@async_kinds
def test_step_wait_timeout_never_shortens_the_wait_for_wait_num(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, wait_num=2, step_wait_timeout=0.01)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.GATE})
    threading.Timer(0.3, gate.await_visit(0).release).start()
    assert [*manager.step({1: 1})] == [0, 1]


@async_kinds
def test_null_means_no_wait_for_stragglers(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, wait_num=1, step_wait_timeout=None)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.GATE})
    visit = gate.await_visit(0)
    assert [*manager.step({1: 1})] == [1]
    visit.release()


@over(Setup("async_subprocess", "fork"))
def test_async_with_infinite_wait_num_is_sync(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, wait_num=float("inf"))
    ready_all(manager)
    assert [*manager.step({2: Do.JITTER, 0: Do.JITTER, 1: Do.END})] == [2, 0, 1]


@over(Setup("base", None), Setup("subprocess", "fork"))
def test_sync_kinds_with_wait_num_are_async(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, wait_num=1)
    ready_all(manager)
    manager.send({1: 1})
    got = dict(manager.step({0: 1}))
    while len(got) < 2:
        got.update(manager.step({}))
    assert {i: seen(t.obs).step for i, t in got.items()} == {0: 1, 1: 1}


# -- both -----------------------------------------------------------------------------------------


@every_setup
def test_an_empty_step_gathers_when_something_is_outstanding_and_raises_otherwise(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    with Raises(NothingReadyError, "outstanding", "send"):
        manager.step({})
    with Raises(NothingReadyError, "outstanding"):
        manager.recv()
    manager.send({1: 4})
    timesteps = manager.step({})
    assert [*timesteps] == [1]
    assert seen(timesteps[1].obs).action == 4
    with pytest.raises(NothingReadyError) as raised:
        manager.step({})
    assert "ready_obs" not in str(raised.value)


def test_an_empty_step_says_what_waits_for_envs_of_which_none_is_ready() -> None:
    short = {"env_kwargs": {"max_episode_steps": 1}, "auto_reset": False}
    with make("CartPole-v1", type="base", **short) as manager:
        assert manager.step(manager.random_action())[0].done
        with Raises(NothingReadyError, "outstanding", "No env takes one now: ready_obs waits"):
            manager.step(manager.random_action())


@process_kinds
def test_random_actions_wait_for_resets_but_not_for_steps(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    gate = world.gate
    ready_all(manager)
    step_all(manager, dict.fromkeys((0, 1), Do.END_THEN_GATE))
    visits = [gate.await_visit(i, "reset") for i in (0, 1)]
    threading.Timer(0.1, visits[1].release).start()
    assert [*manager.random_action()] == [1]
    manager.send({1: 1})
    assert manager.random_action() == {}, "there is a timestep to gather"
    assert [*manager.step({})] == [1]
    visits[0].release()


@every_kind
def test_send_and_recv_are_step_in_two_halves(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3)
    ready_all(manager)
    got: dict[int, Any] = {}
    manager.send({0: 7, 2: 8})
    assert manager.send({1: 9}) is None
    assert manager.ready_env == []
    while len(got) < 3:
        more = manager.recv()
        assert more
        assert not more.keys() & got.keys()
        got.update(more)
    assert {i: seen(t.obs).action for i, t in got.items()} == {0: 7, 1: 9, 2: 8}
    assert manager.ready_env == [0, 1, 2]


@process_kinds
def test_recv_returns_at_its_timeout_what_has_arrived_possibly_nothing(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 3, wait_num=float("inf"))
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.GATE, 1: Do.GATE})
    visits = [gate.await_visit(i) for i in (0, 1)]
    began = time.monotonic()
    assert manager.recv(timeout_s=0.15) == {}
    assert time.monotonic() - began >= 0.15
    assert manager.recv(timeout_s=0) == {}
    visits[0].release()
    assert [*manager.recv(min_ready=1)] == [0]
    visits[1].release()
    assert [*manager.recv(timeout_s=20.0)] == [1]


@process_kinds
def test_recv_waits_for_min_ready(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3)
    gate = world.gate
    ready_all(manager)
    manager.send({0: 1, 1: Do.GATE, 2: Do.GATE})
    visits = [gate.await_visit(i) for i in (1, 2)]
    assert [*manager.recv(min_ready=1)] == [0]
    manager.send({0: Do.END})
    threading.Timer(0.1, visits[0].release).start()
    assert [*manager.recv(min_ready=2)] == [0, 1]
    visits[1].release()
    assert [*manager.recv(min_ready=9)] == [2]  # at most what is outstanding
    with Raises(ConfigError, "min_ready", "0"):
        manager.recv(min_ready=0)


@every_kind
def test_min_ready_is_content_with_ends_of_episodes(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    manager.send({0: Do.END})
    assert manager.recv(min_ready=1)[0].done


@every_setup
def test_an_env_is_ready_again_only_when_its_timestep_was_delivered(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    manager.send({0: 1})
    for _ in range(3):  # whether it has arrived by now or not
        assert manager.ready_env == [1]
        with Raises(EnvNotReadyError, "env 0", "recv"):
            manager.send({0: 2})
    assert [*manager.recv(min_ready=1)] == [0]
    assert manager.ready_env == [0, 1]
    assert world.actions(0) == [1]


@every_kind
def test_never_two_timesteps_of_one_env_in_one_result(world: World, setup: Setup) -> None:
    manager = world.make(setup, 4, script={"episode_length": 3}, wait_num=2)
    rng = np.random.default_rng(0)
    newest: dict[int, tuple[int, int]] = dict.fromkeys(range(4), (0, 0))
    ready_all(manager)
    for _ in range(60):
        ready = manager.ready_env or [*manager.ready_obs]
        chosen = [i for i in ready if rng.random() < 0.7] or ready[:1]
        manager.send(dict.fromkeys(chosen, int(Do.JITTER)))
        for i, timestep in manager.recv().items():  # a dict has each id once; each is the next one
            it = seen(timestep.obs)
            episode, step = newest[i]
            expected = (episode, step + 1) if step < 3 else (episode + 1, 1)
            assert (it.env_id, (it.episode, it.step)) == (i, expected)
            newest[i] = expected
    for i, (episode, step) in newest.items():
        assert len(world.actions(i)) - (episode * 3 + step) in (0, 1)


# -- refusals -------------------------------------------------------------------------------------


def refused_whole(
    world: World, manager: Any, actions: Any, error: type[Exception], *parts: str
) -> None:
    """Check that a step is refused, and that no env that waits for one has been given anything."""
    waiting = manager.ready_env
    before = [world.actions(i) for i in waiting]
    stats = manager.stats()
    for method in (manager.step, manager.send):
        with Raises(error, *parts):
            method(actions)
    assert manager.stats() == stats
    assert [world.actions(i) for i in waiting] == before


@every_setup
def test_a_call_naming_an_env_that_cannot_take_an_action_is_refused_whole(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 4, auto_reset=False, episode_num=2)
    ready_all(manager)
    refused_whole(world, manager, {0: 1, 9: 1}, UnknownEnvError, "9", "0 to 3")
    refused_whole(world, manager, {0: 1, -1: 1}, UnknownEnvError, "-1")
    refused_whole(world, manager, {0: 1, "1": 1}, UnknownEnvError, "'1'")
    refused_whole(world, manager, {0: 1, True: 1}, UnknownEnvError, "True")
    refused_whole(world, manager, {0: 1, 1.0: 1}, UnknownEnvError, "1.0")
    step_all(manager, {1: Do.END})
    refused_whole(world, manager, {0: 1, 1: 1}, EnvNotReadyError, "env 1", "NEED_RESET", "reset")
    manager.reset({1: None})
    step_all(manager, {1: Do.END})
    refused_whole(world, manager, {0: 1, 1: 1}, EnvNotReadyError, "env 1", "DONE", "reset")
    manager.send({2: 5})
    refused_whole(world, manager, {0: 1, 2: 1}, EnvNotReadyError, "env 2", "under way", "recv")
    assert [*manager.recv(min_ready=1)] == [2]
    # What was refused has not been executed later either.
    step_all(manager, {0: 1, 2: 1, 3: 1})
    assert [world.actions(i) for i in (0, 2, 3)] == [[1], [5, 1], [1]]


@process_kinds
def test_a_call_naming_an_env_that_is_being_reset_or_repaired_is_refused_whole(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 3, scripts={1: {"build_faults": {1: "gate"}}})
    gate = world.gate
    ready_all(manager)
    step_all(manager, {0: Do.END_THEN_GATE})
    in_reset = gate.await_visit(0, "reset")
    refused_whole(world, manager, {2: 1, 0: 1}, EnvNotReadyError, "env 0", "RESET", "ready_obs")
    step_all(manager, {1: Do.KILL})
    assert manager.ready_env == [2]
    in_build = gate.await_visit(1, "build")
    refused_whole(world, manager, {2: 1, 1: 1}, EnvNotReadyError, "env 1", "repaired")
    in_reset.release()
    in_build.release()
    ready_all(manager)


@every_kind
def test_a_call_naming_an_env_in_error_is_refused_whole(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, max_failures=0)
    ready_all(manager)
    step_all(manager, {0: Do.RAISE})
    with pytest.raises(Exception, match="failed 1 time"):
        _ = manager.ready_obs
    refused_whole(world, manager, {1: 1, 0: 1}, EnvNotReadyError, "env 0", "ERROR", "reset")
    assert [*manager.ready_obs] == [1]


@every_setup
def test_actions_outside_the_space_are_refused_whole(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3)
    ready_all(manager)
    bad: tuple[Any, ...] = (64, -1, 1.5, "left", None, [1, 2], np.zeros(2, np.int64), {"a": 1})
    for action in bad:
        refused_whole(world, manager, {0: 1, 2: action}, ActionError, "env 2", "Nothing was sent")
    for not_a_dict in ([1, 2, 3], 5, "01", None):
        refused_whole(world, manager, not_a_dict, ActionError, "{env_id: action}")


@process_kinds
def test_actions_that_cannot_be_sent_are_refused_whole(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, check_actions=False)
    ready_all(manager)
    refused_whole(world, manager, {0: 1, 1: threading.Lock()}, ActionError, "cannot be sent")


@every_kind
def test_nothing_is_sent_before_launch_or_after_close(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, launch=False)
    calls = {
        "step": lambda: manager.step({0: 1}),
        "send": lambda: manager.send({0: 1}),
        "recv": manager.recv,
        "reset": manager.reset,
        "reset of one": lambda: manager.reset({0: None}),
        "ready_obs": lambda: manager.ready_obs,
        "ready_info": lambda: manager.ready_info,
        "ready_env": lambda: manager.ready_env,
        "ready_obs_id": lambda: manager.ready_obs_id,
        "call": lambda: manager.call("user_defined"),
        "get_attr": lambda: manager.get_attr("label"),
        "set_attr": lambda: manager.set_attr("knob", 1),
        "send_arrays": lambda: manager.send_arrays([0], [1]),
        "recv_arrays": manager.recv_arrays,
        "render": manager.render,
        "random_action": manager.random_action,
    }
    for moment in ("before launch", "after close"):
        for name, call in calls.items():
            with Raises(ManagerClosedError, "launch()"):
                call()
                pytest.fail(f"{name} {moment} was not refused")
        assert manager.closed
        assert not manager.done
        if moment == "before launch":
            assert not world.journal(0), "an env was built before launch"
            manager.launch()
            assert not manager.closed
            manager.close()


@process_kinds
def test_calls_from_two_threads_at_once_are_refused_but_for_close_stats_and_env_states(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2)
    gate = world.gate
    ready_all(manager)
    results: list[Any] = []
    waiting = threading.Thread(target=lambda: results.append(manager.step({0: Do.GATE})))
    waiting.start()
    visit = gate.await_visit(0)  # the other thread is inside of its step, or about to wait
    for call in (
        lambda: manager.step({1: 1}),
        lambda: manager.ready_obs,
        lambda: manager.reset({1: None}),
        lambda: manager.recv(),
    ):
        with Raises(ConcurrentCallError, "one thread"):
            call()
    assert manager.stats()["outstanding"] == 1
    assert [state.name for state in manager.env_states.values()] == ["RUN", "RUN"]
    visit.release()
    waiting.join()
    assert [*results[0]] == [0]
    assert world.actions(1) == []
    assert [*manager.step({1: 1})] == [1]


@every_kind
def test_calls_from_one_thread_after_another_are_fine(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1)
    ready_all(manager)
    results: list[Any] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: results.append(manager.step({0: 1})))
        thread.start()
        thread.join()
    assert [seen(r[0].obs).step for r in results] == [1, 2]
    manager.close()


# -- arrays ---------------------------------------------------------------------------------------


@every_setup
def test_send_arrays_and_recv_arrays(world: World, setup: Setup) -> None:
    manager = world.make(setup, 4)
    ready_all(manager)
    manager.send_arrays(np.array([3, 0, 2]), np.array([5, 6, int(Do.TRUNCATE)]))
    batch = manager.recv_arrays(min_ready=3)
    assert batch._fields == ("env_ids", "obs", "reward", "terminated", "truncated", "infos")
    assert batch.env_ids.tolist() == [0, 2, 3]
    assert batch.env_ids.dtype == np.int64
    assert batch.obs.shape == (3, 6)
    assert batch.obs.dtype == np.float64
    rows = [seen(row) for row in batch.obs]
    assert [(row.env_id, row.action) for row in rows] == [(0, 6), (2, Do.TRUNCATE), (3, 5)]
    assert batch.reward.tolist() == [expected_reward(row) for row in batch.obs]
    assert batch.reward.dtype == np.float64
    assert batch.terminated.dtype == batch.truncated.dtype == np.bool_
    assert (batch.terminated | batch.truncated).tolist() == [False, True, False]
    assert [info["env_id"] for info in batch.infos] == [0, 2, 3]


@every_kind
def test_send_arrays_refuses_whole(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3)
    ready_all(manager)
    with Raises(ActionError, "one action for each"):
        manager.send_arrays([0, 1], np.array([1, 2, 3]))
    with Raises(ActionError, "twice"):
        manager.send_arrays([0, 0], np.array([1, 2]))
    with Raises(UnknownEnvError, "7"):
        manager.send_arrays([0, 7], np.array([1, 2]))
    with Raises(ActionError, "env 1"):
        manager.send_arrays([0, 1], np.array([1, 99]))
    assert manager.ready_env == [0, 1, 2]
    assert not any(world.actions(i) for i in range(3))
    with pytest.raises(NothingReadyError):
        manager.recv_arrays()


@every_kind
def test_recv_arrays_tells_abnormal_timesteps(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    manager.send({0: Do.RAISE, 1: 1})
    batch = manager.recv_arrays(min_ready=2)
    assert batch.terminated.tolist() == [False, False]
    assert batch.truncated.tolist() == [True, False]
    assert batch.infos[0]["abnormal"] is True
    assert batch.reward[0] == 0.0


# -- accounting -----------------------------------------------------------------------------------


def check_books(manager: Any) -> dict[str, Any]:
    """Check that every accepted action is accounted for."""
    stats: dict[str, Any] = manager.stats()
    delivered = stats["timesteps"] + stats["cancelled"] + stats["outstanding"]
    assert stats["actions"] == delivered, stats
    return stats


@every_setup
def test_every_accepted_action_is_delivered_cancelled_or_outstanding(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 4, script={"episode_length": 4})
    ready_all(manager)
    delivered = 0
    for k in range(4):
        delivered += len(step_all(manager, dict.fromkeys(manager.ready_obs, 1)))
        check_books(manager)
        if k == 1:
            manager.send({0: 2, 1: 2})
            check_books(manager)
            manager.reset({0: None})
            stats = check_books(manager)
            assert (stats["cancelled"], stats["outstanding"]) == (1, 1)
            delivered += len(manager.recv())
        ready_all(manager)
    step_all(manager, {2: Do.RAISE})
    ready_all(manager)
    manager.send({3: 1})
    outstanding = check_books(manager)
    assert outstanding["outstanding"] == 1
    assert outstanding["timesteps"] == delivered + 1
    assert outstanding["abnormal"] == 1
    assert outstanding["failures"] == 1
    assert outstanding["failures_by_kind"] == {"EnvRaised": 1}
    assert outstanding["failures_by_env"] == {2: 1}
    assert "scripted error" in outstanding["latest_failures"][0]
    assert outstanding["states"] == {"RUN": 4}
    manager.close()
    closed = check_books(manager)
    assert (closed["cancelled"], closed["outstanding"]) == (2, 0)
    assert closed["states"] == {"VOID": 4}


@over(INLINE, SOME_BLOCK)
def test_figures_start_over_with_each_launch(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1)
    assert manager.stats()["actions"] == 0
    ready_all(manager)
    step_all(manager, {0: 1})
    manager.close()
    assert manager.stats()["actions"] == 1
    manager.launch()
    assert (manager.stats()["actions"], manager.stats()["resets"]) == (0, 1)
