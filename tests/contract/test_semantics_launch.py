"""Launching and closing, what envs are asked by name, and how workers are set up."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import cloudpickle
import gymnasium
import numpy as np
import pytest
from easydict import EasyDict
from gymnasium.spaces import Discrete
from gymnasium.wrappers import TimeLimit

import envmgr
import envmgr.manager.manager
from envmgr import EnvState, create_env_manager
from envmgr.errors import (
    ActionError,
    ConfigError,
    EnvAttributeError,
    EnvCrash,
    EnvFailure,
    EnvNotReadyError,
    EnvProtocolError,
    EnvRaised,
    EnvTimeout,
    LaunchError,
    MethodAccessError,
    StateError,
    UnknownEnvError,
)
from envmgr.managers import BaseEnvManager
from tests.contract.envs import Do, ScriptedEnv, ScriptedGymEnv, seen
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_BLOCK_SHARED,
    ALL_MESSAGE,
    DEFAULT,
    INLINE,
    SOME_BLOCK,
    THREADS,
    THREADS_MESSAGE_SHARED,
    Raises,
    Setup,
    World,
    every_kind,
    every_setup,
    over,
    process_kinds,
    process_setups,
    ready_all,
    step_all,
    wait_ended,
)

# -- launch ---------------------------------------------------------------------------------------


@every_setup
def test_a_manager_is_built_closed_and_starts_nothing(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, launch=False)
    assert manager.closed
    assert manager.env_num == 2
    assert manager.env_states == {0: EnvState.VOID, 1: EnvState.VOID}
    assert not manager.done
    assert world.journal(0) == []
    manager.close()
    manager.launch()
    assert not manager.closed
    assert manager.env_states == {0: EnvState.RUN, 1: EnvState.RUN}
    assert [entry[0] for entry in world.journal(1)] == ["build", "reset"]


@every_setup
def test_close_closes_the_envs_and_launch_starts_again(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    for launches in (1, 2, 3):
        assert [seen(obs)[:4] for obs in ready_all(manager).values()] == [
            (i, launches - 1, 0, 0) for i in (0, 1)
        ]
        step_all(manager, {0: 1, 1: 1})
        manager.send({0: 1})
        manager.close()
        assert [len(world.noted(i, "close")) for i in (0, 1)] == [launches, launches]
        assert manager.closed
        assert manager.env_states == {0: EnvState.VOID, 1: EnvState.VOID}
        manager.close()
        assert [len(world.noted(i, "close")) for i in (0, 1)] == [launches, launches]
        manager.launch()


@every_kind
def test_launching_twice_is_refused_and_harmless(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1)
    with Raises(StateError, "launched already", "close()"):
        manager.launch()
    assert seen(manager.ready_obs[0]).build == 0


class JustBefore:
    """Of two threads that launch the other one comes first, by a hair."""

    def __init__(self, manager: Any, does: Any) -> None:
        self._manager, self._alone, self._does = manager, manager._alone, does

    def __enter__(self) -> None:
        self._manager._alone = self._alone
        self._does()
        self._alone.__enter__()

    def __exit__(self, *details: object) -> None:
        self._alone.__exit__(*details)


@over(INLINE, ALL_BLOCK)
def test_who_launches_a_hair_too_late_is_refused_and_harmless(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, launch=False)
    manager._alone = JustBefore(manager, manager.launch)
    with Raises(StateError, "launched already"):
        manager.launch()
    manager._alone = JustBefore(manager, lambda: step_all(manager, {0: 1}))
    manager.build()
    assert manager.stats()["timesteps"] == 1
    assert len(world.noted(0, "reset")) == 1, "nothing was reset again"


@contextlib.contextmanager
def closed_meanwhile(manager: Any, after: str) -> Iterator[None]:
    """Have another thread close a manager inside a call, after a function that it calls."""
    module = envmgr.manager.manager
    does, is_closing = getattr(module, after), threading.Event()
    closer = threading.Thread(target=manager.close)

    def do(engine: Any, *args: Any) -> None:
        does(engine, *args)
        wake = engine.transport.wake
        engine.transport.wake = lambda: (is_closing.set(), wake())
        closer.start()
        assert is_closing.wait(60)  # from now on it waits for the lock, which this thread has

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, after, do)
        yield
    closer.join()


@over(INLINE, ALL_BLOCK)
def test_who_closes_in_the_last_moment_of_a_launch_has_closed(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, launch=False)
    with closed_meanwhile(manager, "begin_envs"):
        manager.launch()
    assert manager.closed
    assert manager.env_states == {0: EnvState.VOID}
    manager.launch()
    assert [*ready_all(manager)] == [0]


@over(INLINE, ALL_BLOCK)
def test_a_call_that_another_thread_closes_is_not_awaited_later(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1)
    with closed_meanwhile(manager, "send_requests"):
        manager.call_async("render")
    assert not manager.call_is_pending
    manager.launch()
    assert [*ready_all(manager)] == [0]


def test_a_manager_that_is_not_launched_can_be_copied_and_sent(world: World) -> None:
    manager = create_env_manager({"type": "base"}, env_fn=[Counting])
    for other in (copy.deepcopy(manager), cloudpickle.loads(cloudpickle.dumps(manager))):
        with other:
            assert list(other.ready_obs) == [0]


@over(INLINE, THREADS, ALL_BLOCK)
def test_a_manager_is_copied_and_sent_while_its_envs_do_not_run(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, launch=False, env_fn=[Counting])
    ways = (copy.copy, copy.deepcopy, cloudpickle.dumps)
    for begin in (manager.build, manager.launch):
        begin()
        for way in ways:
            with Raises(StateError, "not copied or sent", "make one there", "snapshot()"):
                way(manager)
    assert manager.ready_env == [0], "it goes on"
    manager.close()
    for other in (copy.deepcopy(manager), cloudpickle.loads(cloudpickle.dumps(manager))):
        with Raises(StateError, "not launched"):
            other.step({})
        with other:
            assert other.ready_env == [0]
    assert manager.closed


@every_kind
def test_a_manager_is_a_context(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, launch=False)
    with manager as entered:
        assert entered is manager
        assert not manager.closed
    assert manager.closed
    manager.launch()
    with manager:  # launched already
        assert seen(manager.ready_obs[0]).build == 1
    assert len(world.noted(0, "close")) == 2
    with pytest.raises(ZeroDivisionError), manager:
        _ = 1 / 0
    assert manager.closed


@every_setup
def test_launch_is_all_or_nothing_and_collects_all_failures(world: World, setup: Setup) -> None:
    manager = world.make(
        setup,
        5,
        launch=False,
        scripts={1: {"build_faults": {0: "raise"}}, 3: {"build_faults": {0: "raise"}}},
    )
    with Raises(LaunchError, "2 of 5", "env 1", "env 3", "scripted error in build") as raised:
        manager.launch()
    failures = raised.value.failures
    assert sorted(failures) == [1, 3]
    assert all(isinstance(f, EnvRaised) and f.during == "construction" for f in failures.values())
    assert manager.closed
    assert set(manager.env_states.values()) == {EnvState.VOID}
    for i in (0, 2, 4):
        assert len(world.noted(i, "close")) == len(world.noted(i, "build")), "a sibling is open"
        assert world.noted(i, "reset") == []
    manager.launch()  # the second build works
    assert [*ready_all(manager)] == [0, 1, 2, 3, 4]


@every_setup
def test_a_failing_first_reset_fails_the_launch(world: World, setup: Setup) -> None:
    manager = world.make(
        setup, 3, launch=False, scripts={i: {"reset_faults": {0: "raise"}} for i in (0, 2)}
    )
    with Raises(LaunchError, "2 of 3", "reset") as raised:
        manager.launch()
    assert sorted(raised.value.failures) == [0, 2]
    assert {f.during for f in raised.value.failures.values()} == {"reset"}
    assert manager.closed
    assert [len(world.noted(i, "close")) for i in range(3)] == [1, 1, 1]
    manager.launch()
    assert [*ready_all(manager)] == [0, 1, 2]


@process_setups
def test_envs_that_die_in_their_construction_fail_the_launch(world: World, setup: Setup) -> None:
    faults = ("kill", "os_exit", "sys_exit")
    manager = world.make(
        setup, 4, launch=False, scripts={i: {"build_faults": {0: f}} for i, f in enumerate(faults)}
    )
    with pytest.raises(LaunchError) as raised:
        manager.launch()
    failures = raised.value.failures
    assert sorted(failures) == [0, 1, 2]
    assert all(isinstance(failure, EnvCrash) for failure in failures.values())
    assert [getattr(failures[i], "exit_status", None) for i in (0, 1)] == [-9, 7]
    assert manager.closed
    manager.launch()


@every_kind
def test_first_resets_are_tried_as_often_as_others(world: World, setup: Setup) -> None:
    manager = world.make(
        setup,
        2,
        max_retry=3,
        retry_waiting_time=0.0,
        scripts={1: {"reset_faults": {0: "raise", 1: "raise"}}},
    )
    assert [*ready_all(manager)] == [0, 1]
    assert manager.stats()["reset_retries"] == 2


@every_kind
def test_a_factory_that_gives_no_env_says_so(world: World, setup: Setup) -> None:
    for factory, says in (
        (lambda: None, "return"),
        (lambda: 5, "reset"),
        (lambda: ScriptedEnv, "class"),
    ):
        manager = world.make(setup, launch=False, env_fn=[factory])
        with Raises(LaunchError, "env 0", says):
            manager.launch()
        assert manager.closed


@over(DEFAULT, Setup("async_subprocess", "spawn"))
def test_a_factory_that_cannot_be_sent_is_refused_before_any_process_starts(
    world: World, setup: Setup
) -> None:
    lock = threading.Lock()
    good = world.factories(1)[0]
    manager = world.make(setup, launch=False, env_fn=[good, lambda: lock])
    with Raises(ConfigError, "env 1", "cannot be sent", "lock", "context: fork"):
        manager.launch()
    assert manager.closed
    assert world.journal(0) == []
    for read in (lambda: manager.observation_space,):
        assert read() is not None  # env 0 can be sent, and is enough for this


@every_kind
def test_lambdas_closures_and_local_classes_are_fine_as_factories(
    world: World, setup: Setup
) -> None:
    folder = world.folder

    class Local(ScriptedEnv):
        def user_defined(self) -> str:
            return "local"

    manager = world.make(setup, env_fn=[lambda i=i: Local(i, folder) for i in range(2)])
    assert [*ready_all(manager)] == [0, 1]
    assert manager.call("user_defined") == ["local", "local"]


def test_env_fn_and_env_num_are_checked(world: World) -> None:
    good = world.factories(2)
    for wrong, says in (
        ([], "empty"),
        (good[0], "list"),
        (None, "list"),
        ([*good, 5], "entry 2"),
    ):
        with Raises(ConfigError, "env_fn", says):
            create_env_manager({"type": "base"}, env_fn=wrong)
    with Raises(ConfigError, "env_num is 3", "2"):
        create_env_manager({"type": "base", "env_num": 3}, env_fn=good)
    assert create_env_manager({"type": "base", "env_num": None}, env_fn=good).env_num == 2


@every_kind
def test_construction_is_bounded_by_connect_timeout(world: World, setup: Setup) -> None:
    manager = world.make(
        setup,
        2,
        launch=False,
        connect_timeout=0.4,
        close_timeout=0.1,
        scripts={1: {"build_faults": {0: "sleep"}}},
    )
    began = time.monotonic()
    with Raises(LaunchError, "connect_timeout") as raised:
        manager.launch()
    assert 0.4 <= time.monotonic() - began < 10.0
    failure = raised.value.failures[1]  # where the machine is busy, env 0 may be too late as well
    assert isinstance(failure, EnvTimeout)
    assert str(failure).startswith("env 1 (generation 0) exceeded the 0.4 s of connect_timeout")
    assert manager.closed


@over(ALL_MESSAGE)
def test_f31_fork_is_refused_with_threads_of_others(world: World, setup: Setup) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="somebody-else")
    thread.start()
    try:
        manager = world.make(setup, 1, launch=False)
        with Raises(LaunchError, "somebody-else", "context: server"):
            manager.launch()
        assert manager.closed
    finally:
        done.set()
        thread.join()


@over(ALL_MESSAGE, SOME_BLOCK)
def test_f31_threads_that_come_later_do_not_stand_in_the_way_of_renewals(
    world: World, setup: Setup
) -> None:
    """Workers are forked from a process that has one thread for all its life."""
    manager = world.make(setup, 2)
    ready_all(manager)
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        step_all(manager, {0: Do.KILL, 1: 1})
        assert seen(ready_all(manager)[0]).build == 1
    finally:
        done.set()
        thread.join()


@over(ALL_MESSAGE)
def test_f31_a_lost_fork_server_is_not_replaced_beside_threads_of_others(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 1, max_failures=99, retry_waiting_time=0.01)
    ready_all(manager)
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="somebody-else")
    thread.start()
    try:
        pid = world.pid(0)
        manager._running.engine.transport._spawner._process.kill(directly=True)
        wait_ended(pid)
        step_all(manager, {0: 1})
        while "somebody-else" not in manager.stats()["latest_failures"][-1]:
            manager.env_states  # noqa: B018
    finally:
        done.set()
        thread.join()
    manager.reset()
    assert len(world.noted(0, "build")) == 2


@over(INLINE, ALL_BLOCK, SOME_BLOCK)
def test_two_managers_at_a_time_do_not_feel_each_other(world: World, setup: Setup) -> None:
    one = world.make(setup, 2)
    two = world.make(setup, 3)
    ready_all(one)
    ready_all(two)
    one.send({0: 1})
    assert sorted(step_all(two, {0: 1, 1: 1, 2: 1})) == [0, 1, 2]
    one.close()
    assert sorted(step_all(two, {0: 2, 2: 2})) == [0, 2]


# -- env_ref and spaces ---------------------------------------------------------------------------


@every_kind
def test_env_ref_is_built_in_the_parent_only_when_it_is_read(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    here = [pid for _, pid in world.noted(0, "build") if pid == os.getpid()]
    assert len(here) == (0 if setup.has_processes else 1)
    ref = manager.env_ref
    assert manager.env_ref is ref
    assert ref.label == "env-0"
    assert len(world.noted(0, "build")) == 2
    assert world.noted(0, "build")[-1][1] == os.getpid()
    assert seen(step_all(manager, {0: 1})[0].obs).build == 0, "it is not one of those that run"
    manager.close()
    assert len(world.noted(0, "close")) == 2


@every_kind
def test_env_ref_works_before_launch(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, launch=False)
    assert manager.env_ref.user_defined() == "user-defined of 0"
    assert manager.closed
    manager.close()
    assert [entry[0] for entry in world.journal(0)] == ["build", "close"]


@every_setup
def test_envs_can_be_built_first_and_reset_with_launch(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, launch=False)
    manager.build()
    manager.build()
    assert manager.closed
    assert [[entry[0] for entry in world.journal(i)] for i in range(2)] == [["build"]] * 2
    manager.seed(5)
    manager.launch({1: {"a": 1}})
    for i in range(2):
        assert [entry[0] for entry in world.journal(i)] == ["build", "seed", "reset"]
        assert world.noted(i, "seed")[0][0] == 5 + i
    manager.build()
    manager.close()
    manager.launch()
    assert sorted(manager.ready_obs) == [0, 1]


# -- attributes -----------------------------------------------------------------------------------


@every_setup
def test_an_attribute_of_the_envs_is_read_as_a_list(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3)
    assert manager.label == ["env-0", "env-1", "env-2"]
    assert manager.get_attr("label") == manager.label
    assert manager.get_attr("label", env_ids=[2, 0]) == ["env-2", "env-0"]
    assert manager.get_attr("label", env_ids=1) == ["env-1"]
    assert len(set(manager.unique)) == 3


@every_setup
def test_what_is_no_attribute_or_a_method_says_so(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    with Raises(AttributeError, "xxx"):
        _ = manager.xxx
    with Raises(EnvAttributeError, "xxx", "env 0"):
        manager.get_attr("xxx")
    assert not hasattr(manager, "nothing_of_this_name")
    with Raises(MethodAccessError, "user_defined", "call"):
        manager.user_defined()
    with Raises(RuntimeError, "user_defined"):
        manager.get_attr("user_defined")
    with pytest.raises(AttributeError):
        _ = manager._private_name
    with Raises(UnknownEnvError, "5"):
        manager.get_attr("label", env_ids=[0, 5])
    with Raises(UnknownEnvError, "twice"):
        manager.get_attr("label", env_ids=[0, 0])
    assert manager.label == ["env-0", "env-1"], "it is not in order any more"
    assert manager.stats()["failures"] == 0


OF_OTHERS = {
    "num_envs": "env_num",
    "single_action_space": "action_space",
    "single_observation_space": "observation_space",
    "envs": "call",
    "env_method": "call",
    "step_async": "send",
    "step_wait": "recv",
}


@over(INLINE, ALL_BLOCK)
def test_names_of_other_libraries_and_mistyped_ones_are_answered_with_the_managers_own(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, launch=False)
    for _ in range(2):
        for name, ours in OF_OTHERS.items():
            assert not hasattr(manager, name)
            with Raises(EnvAttributeError, repr(name), ours):
                getattr(manager, name)
        with Raises(EnvAttributeError, "redy_obs", "'ready_obs'"):
            _ = manager.redy_obs
        manager.build()
        if manager.closed:
            manager.launch()
    manager.send({0: 1})
    with Raises(EnvNotReadyError, "recive", "'recv'"):
        _ = manager.recive
    with Raises(EnvNotReadyError, "[0]") as raised:
        _ = manager.zzz
    assert "meant" not in str(raised.value)
    manager.recv()


class WithACounter(BaseEnvManager):
    """Has an attribute of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counter = 0


@every_kind
def test_public_names_that_the_class_lacks_are_not_set(
    world: World, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = world.make(setup, 2)
    with Raises(ConfigError, "auto_reset", "key of the config", "make(..., auto_reset=False)"):
        manager.auto_reset = False
    with Raises(EnvAttributeError, "nothing in the envs", "manager.set_attr('label', 'other')"):
        manager.label = "other"
    assert manager.label == ["env-0", "env-1"]
    manager._own = 1
    manager.step = manager.step  # what the class has may be replaced in a manager, as tests do
    assert WithACounter([partial(ScriptedEnv, 0, "")], {}).counter == 0
    ready_all(manager)
    assigned: list[str] = []
    monkeypatch.setattr(
        envmgr.manager.manager.EnvManager,
        "__setattr__",
        lambda _, name, value: assigned.append(name),
    )
    step_all(manager, {0: Do.END, 1: 1})
    ready_all(manager)
    manager.send_arrays([0, 1], [1, 1])
    manager.recv_arrays()
    monkeypatch.undo()
    assert not assigned, "steps would pay for it"


@every_kind
def test_attributes_are_refused_before_launch_and_while_steps_are_pending(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, launch=False)
    with Raises(AttributeError, "label", "launch()"):
        _ = manager.label
    manager.launch()
    manager.send({1: 1})
    with Raises(EnvNotReadyError, "[1]", "recv"):
        _ = manager.label
    assert manager.get_attr("label", env_ids=0) == ["env-0"]
    manager.recv()
    assert manager.label == ["env-0", "env-1"]


@process_kinds
def test_attributes_wait_for_resets(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    gate = world.gate
    ready_all(manager)
    step_all(manager, {0: Do.END_THEN_GATE})
    threading.Timer(0.1, gate.await_visit(0, "reset").release).start()
    assert manager.label == ["env-0", "env-1"]
    assert manager.ready_env == [0, 1]


@every_setup
def test_set_attr_is_repeated_on_renewed_envs_and_call_is_not(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    manager.set_attr("knob", "turned")
    manager.set_attr("knob", ["left"], env_ids=[0])
    manager.call("remember", 5)
    assert manager.knob == ["left", "turned"]
    ready_all(manager)
    step_all(manager, {0: Do.SYS_EXIT, 1: Do.SYS_EXIT})
    assert [seen(obs).build for obs in ready_all(manager).values()] == [1, 1]
    assert manager.knob == ["left", "turned"]
    assert manager.call("remember", 6) == [[6], [6]]
    journal = world.journal(0)
    rebuilt = max(k for k, entry in enumerate(journal) if entry[0] == "build")
    assert [entry[0] for entry in journal[rebuilt:]] == ["build", "knob", "reset"]
    manager.close()
    manager.launch()
    assert manager.knob == ["factory", "factory"], "a new launch begins anew"


class InWrappers(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An env inside of a wrapper that has an attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(ScriptedGymEnv(*args, **kwargs))
        self.volume = 1


@every_kind
def test_set_attr_reaches_the_env_inside_and_says_once_that_an_attribute_is_new(
    world: World, setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    manager = world.make(setup, 2, env=InWrappers)
    manager.set_attr("volume", 2)
    assert manager.volume == [2, 2]
    assert not caplog.records
    for _ in range(2):
        manager.set_attr("gravty", 5)
    (record,) = caplog.records
    assert "no env had an attribute 'gravty': set_attr has made one" in record.message
    assert manager.get_attr("gravty") == [5, 5]
    assert manager.apply(lambda env: vars(env.unwrapped).get("gravty")) == [5, 5]
    manager.set_attr("level", 3, env_ids=1)
    assert "env 1 had no attribute 'level'" in caplog.records[-1].message


@every_kind
def test_set_attr_takes_one_value_or_a_list(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3)
    manager.set_attr("knob", {"a": [1]})
    assert manager.knob == [{"a": [1]}] * 3
    manager.set_attr("knob", [1, 2, 3])
    assert manager.knob == [1, 2, 3]
    manager.set_attr("knob", [[1, 2]] * 3)
    assert manager.knob == [[1, 2]] * 3
    with Raises(ConfigError, "2 values for 3 envs"):
        manager.set_attr("knob", [1, 2])
    with pytest.raises(EnvFailure):
        manager.set_attr("label", "cannot be set")
    assert manager.knob == [[1, 2]] * 3
    ready_all(manager)
    assert seen(step_all(manager, {0: 1})[0].obs).step == 1, "its episode goes on"


# -- calls ----------------------------------------------------------------------------------------


@every_setup
def test_call_runs_a_method_of_envs(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3)
    assert manager.call("scaled", 10.0) == [0.0, 10.0, 20.0]
    assert manager.call("scaled", 10.0, 1.0, env_ids=[2, 0]) == [21.0, 1.0]
    assert manager.call("scaled", 2.0, env_ids=1) == [2.0]
    assert manager.call("scaled", factor=2.0, env_ids=1) == [2.0]
    assert world.noted(0, "call") == [["scaled", 10.0, 0.0], ["scaled", 10.0, 1.0]]


@every_setup
def test_call_refuses_what_goes_past_the_states_of_the_manager(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    for name in ("reset", "step", "seed", "close", "_private", "__init__", 5):
        with Raises(MethodAccessError, "refused"):
            manager.call(name)
        with Raises(MethodAccessError, "refused"):
            manager.call_async(name)
    with Raises(UnknownEnvError, "2"):
        manager.call("scaled", 1.0, env_ids=2)
    ready_all(manager)
    manager.send({0: 1})
    with Raises(EnvNotReadyError, "[0]"):
        manager.call("scaled", 1.0)
    manager.recv()
    assert [entry[0] for entry in world.journal(1)] == ["build", "reset"]


@every_kind
def test_a_call_that_raises_leaves_the_episode_alone(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    step_all(manager, {0: 1, 1: 1})
    with Raises(EnvRaised, "env 0", "scripted error in call"):
        manager.call("fail", "raise")
    with Raises(EnvFailure, "no_such_method"):
        manager.call("no_such_method")
    assert manager.call("scaled", 1.0) == [0.0, 1.0]
    assert seen(step_all(manager, {0: 1})[0].obs)[2:4] == (0, 2)
    assert manager.stats()["failures"] == 0


@process_kinds
def test_a_call_that_kills_its_env_raises_and_the_env_is_repaired(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    with Raises(EnvCrash, "env 1", "SIGKILL"):
        manager.call("fail", "kill", env_ids=1)
    assert manager.ready_env == [0, 1]
    assert step_all(manager, {1: 1})[1].info["abnormal"]
    assert seen(ready_all(manager)[1]).build == 1


@every_kind
def test_a_call_is_bounded_by_reset_timeout(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, reset_timeout=2.0)
    ready_all(manager)
    with Raises(EnvTimeout, "env 1", "the 2 s"):
        manager.call("fail", "sleep", env_ids=1)
    assert step_all(manager, {1: 1})[1].info["abnormal"]
    assert seen(ready_all(manager)[1]).build == 1


@over(INLINE, ALL_BLOCK)
def test_apply_runs_a_function_on_the_envs_as_they_were_built(world: World, setup: Setup) -> None:
    wrapped = partial(ScriptedGymEnv, 1, world.folder)
    plain, _ = world.factories(2)
    manager = world.make(setup, env_fn=[plain, lambda: TimeLimit(wrapped(), max_episode_steps=9)])
    offset = 5

    def look(env: Any, number: int) -> tuple[str, int]:
        if number == 7:
            raise ZeroDivisionError("of the function")
        return type(env).__name__, number + offset

    assert manager.apply(look, 1) == [("ScriptedEnv", 6), ("TimeLimit", 6)]
    assert manager.apply(look, 2, env_ids=1) == [("TimeLimit", 7)]
    with Raises(EnvRaised, "env 0", "of the function"):
        manager.apply(look, 7)
    with Raises(ConfigError, "found a str"):
        manager.apply("look")
    if setup.has_processes:
        with Raises(ActionError, "cannot be sent"):
            manager.apply(look, threading.Lock())
    ready_all(manager)
    manager.send({0: 1})
    with Raises(EnvNotReadyError, "[0]"):
        manager.apply(look, 1)


@process_kinds
def test_call_async_and_call_wait(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    gate = world.gate
    ready_all(manager)
    with Raises(StateError, "call_async"):
        manager.call_wait()
    manager.call_async("fail", "gate", env_ids=1)
    visit = gate.await_visit(1, "call")
    with Raises(StateError, "call_wait"):
        manager.step({0: 1})
    with pytest.raises(TimeoutError):
        manager.call_wait(timeout_s=0.05)
    visit.release()
    assert manager.call_wait() == [None]
    with pytest.raises(StateError):
        manager.call_wait()
    assert seen(step_all(manager, {1: 1})[1].obs).step == 1


@every_kind
def test_frames(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, env=ScriptedGymEnv, auto_reset=False)
    ready_all(manager)
    step_all(manager, {1: Do.END})
    frames = manager.render()
    assert {i: (f.shape, int(f.max())) for i, f in frames.items()} == {
        i: ((2, 2, 3), i) for i in range(3)
    }
    assert [*manager.render(env_ids=[2])] == [2]
    assert [*manager.ready_imgs] == [0, 2]
    with Raises(EnvFailure, "human"):
        manager.render(mode="human")
    assert manager.render_mode == "rgb_array"


class Recorder(ScriptedEnv):
    """Writes down what it is to save, and where."""

    def enable_save_replay(self, path: str) -> None:
        self.script.note("replay", path)

    def enable_save_figure(self, path: str) -> None:
        self.script.note("figure", path)


@every_kind
def test_replays_are_saved_from_the_first_reset_on_and_by_renewed_envs_too(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, env=Recorder, launch=False)
    manager.enable_save_replay("here")
    assert world.journal(0) == []
    manager.launch()
    ready_all(manager)
    step_all(manager, {0: Do.SYS_EXIT})
    ready_all(manager)
    kinds = [entry[0] for entry in world.journal(0) if entry[0] != "close"]
    assert kinds == ["build", "replay", "reset", "step", "build", "replay", "reset"]
    assert world.noted(1, "replay") == [["here"]]
    manager.enable_save_replay(["one", "two"])
    assert [world.noted(i, "replay")[-1] for i in (0, 1)] == [["one"], ["two"]]
    manager.enable_save_figure(1, "figures")
    assert [world.noted(i, "figure") for i in (0, 1)] == [[], [["figures"]]]


@every_kind
def test_envs_that_save_no_replays_say_so(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, launch=False)
    manager.enable_save_replay("here")
    with Raises(LaunchError, "env 0", "save replays"):
        manager.launch()
    assert manager.closed


@every_kind
def test_reward_shaping_and_random_actions_of_envs(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2)
    transitions = [{"reward": 1.0}]
    assert manager.reward_shaping(1, transitions) == transitions
    assert manager.action_space.contains(manager.call("random_action")[0])


# -- what a manager says of itself ----------------------------------------------------------------


@every_kind
def test_a_manager_says_what_it_is(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, seed=1, max_retry=4)
    assert manager.metadata == {"name": "scripted"}
    cfg = manager.cfg
    assert (cfg.type, cfg.max_retry, cfg.env_num, cfg.seed) == (setup.kind, 4, 2, 1)
    cfg.max_retry = 9
    assert manager.cfg.max_retry == 4
    assert {"reset", "step", "seed", "close"} <= set(manager.method_name_list)


@pytest.mark.parametrize("key", ["base", "subprocess", "async_subprocess"])
def test_the_default_config_is_whole_and_a_copy(key: str) -> None:
    cls = envmgr.get_env_manager_cls({"type": key})
    default = cls.default_config()
    assert isinstance(default, EasyDict)
    assert default.type == key
    assert default.wait_num == (2 if key == "async_subprocess" else float("inf"))
    assert default.step_wait_timeout == 0.0
    assert default.auto_reset is True
    default.auto_reset = False
    assert cls.default_config().auto_reset is True


def test_the_class_chain_of_di_engine_holds() -> None:
    assert issubclass(envmgr.SubprocessEnvManagerV2, envmgr.SyncSubprocessEnvManager)
    assert issubclass(envmgr.SyncSubprocessEnvManager, envmgr.AsyncSubprocessEnvManager)
    assert issubclass(envmgr.AsyncSubprocessEnvManager, envmgr.BaseEnvManager)
    assert issubclass(envmgr.BaseEnvManagerV2, envmgr.BaseEnvManager)


# -- workers --------------------------------------------------------------------------------------

_WORKER_SETUPS = (
    Setup("subprocess", "server"),
    Setup("subprocess", "fork"),
    Setup("subprocess", "spawn"),
    Setup("subprocess", "forkserver"),
)


@over(*_WORKER_SETUPS)
def test_the_environment_of_workers(
    world: World, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KEPT_ONE", "SECRET_TOKEN", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.setenv(name, "here")
    manager = world.make(
        setup,
        1,
        worker_threads=2,
        worker_env={"deny": ["SECRET_*"], "set": {"ADDED": "yes"}},
    )
    environment = manager.call("environment")[0]
    assert environment["KEPT_ONE"] == "here"
    assert environment["ADDED"] == "yes"
    assert not {"SECRET_TOKEN", "OMPI_COMM_WORLD_RANK", "PMI_RANK"} & environment.keys()
    assert environment["OMP_NUM_THREADS"] == "2"
    assert os.environ["SECRET_TOKEN"] == "here"  # noqa: S105
    assert "ADDED" not in os.environ
    assert "OMP_NUM_THREADS" not in os.environ or os.environ["OMP_NUM_THREADS"] != "2"


class WorkerProbe(ScriptedEnv):
    """Says what its process is like."""

    def randoms(self) -> tuple[float, float]:
        import random

        return random.random(), float(np.random.random())

    def open_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def cores(self) -> list[int]:
        return sorted(os.sched_getaffinity(0))

    def has_child_processes(self) -> bool:
        import multiprocessing

        child = multiprocessing.get_context("fork").Process(target=int)
        child.start()
        child.join()
        return True


@over(*_WORKER_SETUPS[:2])
def test_workers_have_random_state_of_their_own(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, env=WorkerProbe)
    randoms = manager.call("randoms")
    assert len({value for pair in randoms for value in pair}) == 6


@over(*_WORKER_SETUPS)
def test_workers_hold_no_fds_of_their_siblings(world: World, setup: Setup) -> None:
    few = world.make(setup, 1, env=WorkerProbe)
    alone = few.call("open_files")[0]
    few.close()
    many = world.make(setup, 2, env=WorkerProbe)
    assert max(many.call("open_files")) <= alone


@over(Setup("subprocess", "fork"))
def test_workers_run_on_the_cores_they_are_given(world: World, setup: Setup) -> None:
    core = min(os.sched_getaffinity(0))
    manager = world.make(setup, 2, env=WorkerProbe, worker_affinity=[core])
    assert manager.call("cores") == [[core], [core]]
    nowhere = world.make(setup, 1, env=WorkerProbe, worker_affinity=[4095], launch=False)
    with Raises(LaunchError, "worker_affinity gives a worker the cores [4095], none of which"):
        nowhere.launch()


@over(Setup("subprocess", "fork"), Setup("subprocess", "server"))
def test_envs_may_start_processes_only_without_daemon(world: World, setup: Setup) -> None:
    strict = world.make(setup, 1, env=WorkerProbe)
    if sys.flags.optimize:  # it is an assert of multiprocessing that refuses
        assert strict.call("has_child_processes") == [True]
    else:
        with Raises(EnvFailure, "daemonic"):
            strict.call("has_child_processes")
    free = world.make(setup, 1, env=WorkerProbe, daemon=False)
    assert free.call("has_child_processes") == [True]


class Counting(gymnasium.Env[Any, Any]):
    """Notes in its class whatever is done to one of its kind."""

    observation_space = action_space = Discrete(2)
    done: ClassVar[list[str]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.done.append("reset")
        return 0, {}

    def step(self, action: Any) -> Any:
        if action == 1:
            raise RuntimeError("a step")
        return 0, 0.0, False, False, {}

    def close(self) -> None:
        self.done.append("close")


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["the env", "a wrapper"])
@over(INLINE, THREADS, THREADS_MESSAGE_SHARED, ALL_BLOCK_SHARED)
def test_one_object_is_not_two_envs(world: World, setup: Setup, is_wrapped: bool) -> None:
    """Where they share a process, before any of them is reset."""
    env = Counting()
    Counting.done.clear()
    factory = partial(gymnasium.Wrapper, env) if is_wrapped else lambda: env
    manager = world.make(setup, env_fn=[Counting, factory, factory], launch=False)
    with Raises(
        LaunchError, "one object cannot be two envs", "env_fn=[lambda: MyEnv()] * n"
    ) as raised:
        manager.launch()
    ((env_id, failure),) = raised.value.failures.items()
    assert type(failure) is EnvProtocolError
    first, second = (1, 2) if env_id == 2 else (2, 1)  # threads are built at once
    assert f"the factory of env {second} returned" in str(failure)
    assert f"serves env {first}:" in str(failure)
    assert manager.closed
    if not setup.has_processes:
        assert Counting.done == ["close", "close"], "of the two that there are"
    # What is closed is nobody's any more.
    again = world.make(setup, env_fn=[factory, Counting])
    assert len(ready_all(again)) == 2


@over(INLINE, THREADS, ALL_BLOCK_SHARED)
def test_a_factory_may_return_an_env_again_that_was_closed(world: World, setup: Setup) -> None:
    """It serves its env_id alone, as before: whether it can begin anew is its own matter."""
    env = Counting()
    manager = world.make(setup, env_fn=[lambda: env, Counting], retry_type="renew", max_retry=2)
    ready_all(manager)
    timesteps = step_all(manager, {0: 1, 1: 0})
    assert timesteps[0].info["abnormal"]
    assert len(ready_all(manager)) == 2
    assert "abnormal" not in step_all(manager, {0: 0})[0].info


def test_processes_have_copies_of_one_object(world: World) -> None:
    env = Counting()
    assert len(ready_all(world.make(ALL_BLOCK, env_fn=[lambda: env] * 2))) == 2


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_a_launch_that_gets_no_memory_is_a_launch_error(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: Any) -> None:
        raise error

    manager = world.make(INLINE, 1, launch=False)
    with monkeypatch.context() as patched:
        patched.setattr("envmgr.manager.manager.begin_envs", fail)
        with Raises(LaunchError, "no memory or no thread", "RLIMIT_AS"):
            manager.launch()
    manager.launch()
