"""What a failure costs, what it does not, and how it is repaired."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from envmgr import EnvState
from envmgr.errors import (
    EnvCrash,
    EnvFailure,
    EnvNotReadyError,
    EnvProtocolError,
    EnvRaised,
    EnvReportedAbnormal,
    FailuresExhaustedError,
    ManagerClosedError,
    NothingReadyError,
)
from tests.contract.envs import Do, ScriptedEnv, ScriptedGymEnv, seen
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_BLOCK_SHARED,
    INLINE,
    SOME_BLOCK,
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
)


def check_abnormal(timestep: Any, last_good: Any, kind: type[EnvFailure]) -> EnvFailure:
    """Check that a timestep is an abnormal one in all of its parts; return its failure."""
    assert np.array_equal(timestep.obs, last_good)
    assert timestep.reward == 0.0
    assert type(timestep.reward) is float
    assert timestep.done is True
    info = timestep.info
    assert info["abnormal"] is True
    assert info["terminated"] is False
    assert info["truncated"] is True
    assert type(info["error"]) is kind
    failure: EnvFailure = info["error"]
    return failure


# -- the abnormal timestep ------------------------------------------------------------------------


@pytest.mark.parametrize("env", [ScriptedEnv, ScriptedGymEnv])
@every_setup
def test_an_exception_in_a_step_gives_one_abnormal_timestep_and_then_a_new_episode(
    world: World, setup: Setup, env: Any
) -> None:
    manager = world.make(setup, 2, env=env)
    ready_all(manager)
    last = step_all(manager, {1: 3})[1].obs
    timesteps = step_all(manager, {0: 1, 1: Do.RAISE})
    assert seen(timesteps[0].obs).step == 1
    failure = check_abnormal(timesteps[1], last, EnvRaised)
    assert isinstance(failure, EnvRaised)
    assert (failure.env_id, failure.during, failure.generation) == (1, "step", 0)
    assert failure.type_name == "tests.contract.envs.ScriptedError"
    assert failure.remote_message == "scripted error in step of env 1"
    assert "in suffer" in failure.remote_traceback
    assert "env 1" in str(failure)
    timesteps[1].obs[:] = 0.0  # private, as all others
    assert not np.array_equal(last, timesteps[1].obs)
    it = seen(ready_all(manager)[1])
    assert (it.build, it.episode, it.step) == (0, 1, 0), "the same env is asked again"
    assert world.actions(1) == [3, Do.RAISE], "the step was executed twice"
    assert manager.stats()["renewals"] == 0


@pytest.mark.parametrize(
    ("action", "kind", "says"),
    [
        (Do.BAD_SHAPE, EnvProtocolError, "shape (7,)"),
        (Do.BAD_DTYPE, EnvProtocolError, "complex128"),
        (Do.NO_OBSERVATION, EnvProtocolError, "None"),
        (Do.NOT_A_TIMESTEP, EnvProtocolError, "str"),
        (Do.NO_REWARD, EnvProtocolError, "reward"),
        (Do.STRANGE_ERROR, EnvRaised, "StrangeError"),
    ],
    ids=lambda value: value.name if isinstance(value, Do) else None,
)
@pytest.mark.parametrize("env", [ScriptedEnv, ScriptedGymEnv])
@every_kind
def test_what_breaks_the_protocol_gives_an_abnormal_timestep_that_says_how(
    world: World, setup: Setup, env: Any, action: Do, kind: type[EnvFailure], says: str
) -> None:
    manager = world.make(setup, 2, env=env)
    first = ready_all(manager)
    failure = check_abnormal(step_all(manager, {0: action})[0], first[0], kind)
    assert says in str(failure)
    it = seen(ready_all(manager)[0])
    assert (it.build, it.episode, it.step) == (0, 1, 0)
    assert seen(step_all(manager, {0: 4, 1: 5})[0].obs)[2:5] == (1, 1, 4)


@process_kinds
def test_an_info_that_cannot_be_sent_is_a_failure_of_that_step(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1)
    first = ready_all(manager)[0]
    timestep = step_all(manager, {0: Do.UNPICKLABLE_INFO})[0]
    assert "cannot be pickled" in str(check_abnormal(timestep, first, EnvProtocolError))
    assert seen(ready_all(manager)[0]).build == 0


@every_setup
def test_huge_infos_travel(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3)
    ready_all(manager)
    timesteps = step_all(manager, dict.fromkeys(range(3), Do.HUGE_INFO))
    for i, timestep in timesteps.items():
        thing = timestep.info["thing"]
        assert thing.shape == (6_000_000,)
        assert (thing == i).all()
    assert seen(step_all(manager, {2: 1})[2].obs).step == 2


@process_setups
def test_env_code_that_exits_costs_its_host(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3)
    first = ready_all(manager)
    timesteps = step_all(manager, {0: Do.SYS_EXIT, 1: Do.OS_EXIT, 2: Do.KILL})
    exits = check_abnormal(timesteps[0], first[0], EnvCrash)
    assert "sys.exit(3)" in str(exits)
    died = check_abnormal(timesteps[1], first[1], EnvCrash)
    assert (died.exit_status, died.during) == (7, "step")  # type: ignore[attr-defined]
    killed = check_abnormal(timesteps[2], first[2], EnvCrash)
    assert killed.exit_status == -9  # type: ignore[attr-defined]
    assert "SIGKILL" in str(killed)
    for i, obs in ready_all(manager).items():
        assert seen(obs)[:4] == (i, 1, 0, 0)
        assert len({pid for _, pid in world.noted(i, "build")}) == 2, "the host was used again"
    assert [world.actions(i) for i in range(3)] == [[Do.SYS_EXIT], [Do.OS_EXIT], [Do.KILL]]
    assert manager.stats()["renewals"] == 3


@over(INLINE)
def test_inline_sys_exit_costs_the_env_and_ctrl_c_reaches_the_caller(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2)
    first = ready_all(manager)
    check_abnormal(step_all(manager, {0: Do.SYS_EXIT})[0], first[0], EnvCrash)
    assert seen(ready_all(manager)[0]).build == 1
    with pytest.raises(KeyboardInterrupt):
        manager.step({0: Do.KEYBOARD_INTERRUPT, 1: 1})
    # Nobody can tell what the env had done of its step: it is given up, the other one goes on.
    got: dict[int, Any] = {}
    while manager.stats()["outstanding"]:
        got.update(manager.recv())
    assert got[0].info["abnormal"]
    assert seen(got[1].obs).step == 1
    assert seen(ready_all(manager)[0]).build == 2


# -- info["abnormal"] -----------------------------------------------------------------------------


@pytest.mark.parametrize("env", [ScriptedEnv, ScriptedGymEnv])
@every_kind
def test_an_env_may_say_itself_that_a_step_was_abnormal(
    world: World, setup: Setup, env: Any
) -> None:
    manager = world.make(setup, 2, env=env)
    last = ready_all(manager)[0]
    timestep = step_all(manager, {0: Do.ABNORMAL})[0]
    check_abnormal(timestep, last, EnvReportedAbnormal)
    assert timestep.info["action"] == Do.ABNORMAL, "the env's own info is lost"
    it = seen(ready_all(manager)[0])
    assert (it.build, it.episode, it.step) == (0, 1, 0), "a healthy env needs no renewal"
    stats = manager.stats()
    assert stats["failures_by_kind"] == {"EnvReportedAbnormal": 1}
    assert (stats["abnormal"], stats["timesteps"], stats["renewals"]) == (1, 1, 0)


@every_kind
def test_what_an_env_calls_abnormal_is_not_charged_to_its_budget(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, max_failures=0, max_failures_total=0)
    for k in range(1, 4):
        ready_all(manager)
        timesteps = step_all(manager, {0: Do.ABNORMAL, 1: 1})
        assert isinstance(timesteps[0].info["error"], EnvReportedAbnormal)
        assert seen(timesteps[1].obs).step == k
    it = seen(ready_all(manager)[0])
    assert (it.build, it.episode, it.step) == (0, 3, 0)
    assert manager.stats()["failures_by_env"] == {0: 3}


@every_kind
def test_on_failure_raise_holds_for_what_an_env_calls_abnormal(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, on_failure="raise")
    ready_all(manager)
    with Raises(EnvReportedAbnormal, "env 0", "info['abnormal']"):
        step_all(manager, {0: Do.ABNORMAL})
    assert manager.closed


@every_kind
def test_an_abnormal_step_needs_neither_observation_nor_reward(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1)
    first = ready_all(manager)[0]
    check_abnormal(step_all(manager, {0: Do.ABNORMAL_EMPTY})[0], first, EnvReportedAbnormal)


@every_kind
def test_infos_may_be_lists_or_tuples_of_dicts(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1)
    ready_all(manager)
    as_list = step_all(manager, {0: Do.LIST_INFO})[0].info
    assert isinstance(as_list, list)
    assert [part["agent"] for part in as_list] == [0, 1]
    as_tuple = step_all(manager, {0: Do.TUPLE_INFO})[0].info
    assert isinstance(as_tuple, tuple)
    assert [part["agent"] for part in as_tuple] == [0, 1]
    timestep = step_all(manager, {0: Do.ABNORMAL_LIST})[0]
    assert timestep.done
    assert isinstance(timestep.info, list)
    assert [part["agent"] for part in timestep.info] == [0, 1]
    for part in timestep.info:
        assert part["abnormal"] is True
        assert isinstance(part["error"], EnvReportedAbnormal)
    assert seen(ready_all(manager)[0]).episode == 1


# -- deaths while idle ----------------------------------------------------------------------------


@process_setups
def test_an_env_that_dies_idle_stays_ready_and_its_next_action_is_not_executed(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    last = step_all(manager, {0: 7})[0].obs
    world.kill(0)
    obs = manager.ready_obs
    assert obs[0] is last
    assert manager.env_states[0] is EnvState.RUN
    timestep = step_all(manager, {0: 8})[0]
    failure = check_abnormal(timestep, last, EnvCrash)
    assert failure.exit_status == -9  # type: ignore[attr-defined]
    assert world.actions(0) == [7], "the action was executed by the new env"
    assert seen(ready_all(manager)[0])[:4] == (0, 1, 0, 0)
    assert seen(step_all(manager, {0: 9})[0].obs)[:5] == (0, 1, 0, 1, 9)
    stats = manager.stats()
    assert (stats["abnormal"], stats["failures"], stats["renewals"]) == (1, 1, 1)
    assert (stats["actions"], stats["timesteps"]) == (3, 3)


@process_kinds
def test_repair_of_an_idle_env_goes_on_behind_its_observation(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, scripts={0: {"build_faults": {1: "gate"}}})
    gate = world.gate
    ready_all(manager)
    world.kill(0)
    assert manager.ready_env == [0, 1]
    gate.await_visit(0, "build").release()  # the new env is built though nobody has stepped it
    while len(world.noted(0, "reset")) < 2:
        assert seen(step_all(manager, {1: 1})[1].obs).build == 0
    assert seen(manager.ready_obs[0])[:4] == (0, 0, 0, 0), "the old observation is still there"
    assert step_all(manager, {0: 1})[0].info["abnormal"]
    assert seen(ready_all(manager)[0])[:4] == (0, 1, 0, 0)


@pytest.mark.parametrize("moment", ["before the build", "after the reset"])
@process_kinds
def test_reset_of_an_env_that_died_idle_gives_a_new_episode_and_no_abnormal_timestep(
    world: World, setup: Setup, moment: str
) -> None:
    manager = world.make(setup, 2, scripts={0: {"build_faults": {1: "gate"}}})
    gate = world.gate
    ready_all(manager)
    world.kill(0)
    assert manager.ready_env == [0, 1]
    gate.await_visit(0, "build").release()
    if moment == "after the reset":
        while manager.stats()["resets"] < 3:
            step_all(manager, {1: 1})
    manager.reset({0: None})
    it = seen(manager.ready_obs[0])
    assert (it.build, it.step) == (1, 0)
    assert seen(step_all(manager, {0: 5})[0].obs)[3:5] == (1, 5)
    assert manager.stats()["abnormal"] == 0


@process_kinds
def test_an_env_that_dies_idle_with_auto_reset_off_needs_a_reset_after_its_abnormal_timestep(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, auto_reset=False)
    ready_all(manager)
    world.kill(0)
    assert manager.ready_env == [0, 1]
    assert step_all(manager, {0: 1})[0].info["abnormal"]
    manager.get_attr("label")
    assert manager.env_states[0] is EnvState.NEED_RESET
    manager.reset({0: None})
    assert seen(manager.ready_obs[0])[:4] == (0, 1, 0, 0)


@process_kinds
def test_a_done_env_that_dies_is_renewed_when_it_is_reset(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, episode_num=1)
    ready_all(manager)
    step_all(manager, {0: Do.END})
    world.kill(0)
    assert manager.ready_env == [1]
    assert manager.env_states[0] is EnvState.DONE
    manager.reset({0: None})
    assert seen(manager.ready_obs[0])[:4] == (0, 1, 0, 0)


# -- behind the caller's back ----------------------------------------------------------------------


@process_kinds
def test_resets_and_repairs_go_on_while_the_caller_is_away(world: World, setup: Setup) -> None:
    manager = world.make(
        setup,
        3,
        max_retry=2,
        retry_waiting_time=0.01,
        scripts={
            0: {"build_faults": {1: "gate"}},  # after its death
            1: {"reset_faults": {1: "raise", 2: "gate"}},  # the second attempt
        },
    )
    gate = world.gate
    ready_all(manager)
    step_all(manager, {0: Do.END_THEN_KILL, 1: Do.END, 2: Do.END_THEN_GATE})
    # No call of the manager from here on.
    visits = [gate.await_visit(0, "build"), gate.await_visit(1, "reset"), gate.await_visit(2)]
    for visit in visits:
        visit.release()
    while len(world.noted(0, "reset")) < 3:
        time.sleep(0.001)  # until env 0, renewed, is in its reset
    assert [seen(obs)[1] for obs in ready_all(manager).values()] == [1, 0, 0]
    assert (manager.stats()["renewals"], manager.stats()["reset_retries"]) == (1, 1)


@process_kinds
def test_failures_behind_the_caller_surface_after_what_had_arrived(
    world: World, setup: Setup
) -> None:
    manager = world.make(
        setup, 2, max_failures=0, scripts={0: {"reset_faults": {1: "gate"}}}, wait_num=2
    )
    gate = world.gate
    ready_all(manager)
    step_all(manager, {0: Do.END})
    visit = gate.await_visit(0, "reset")
    manager.send({1: 5})
    visit.kill()
    assert seen(manager.recv()[1].obs)[3:5] == (1, 5), "the timestep was lost"
    with Raises(FailuresExhaustedError, "env 0"):
        ready_all(manager)
    assert [*manager.ready_obs] == [1]


@process_kinds
def test_long_waits_are_warned_of(
    world: World,
    setup: Setup,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("envmgr.core.engine.WARN_EVERY_S", 0.05)
    manager = world.make(setup, 3)
    gate = world.gate
    ready_all(manager)
    manager.send({0: Do.GATE, 2: Do.GATE})
    visits = [gate.await_visit(0), gate.await_visit(2)]
    caplog.clear()
    warnings: list[str] = []
    while len(warnings) < 2:  # however late the machine is
        assert manager.recv(timeout_s=0.2) == {}
        warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert len(warnings) <= 5, "two short of what a second call could add"
    assert all("envs 0, 2" in text and "step_timeout" in text for text in warnings)
    for visit in visits:
        visit.release()


# -- retries --------------------------------------------------------------------------------------


@every_setup
def test_a_failed_reset_is_tried_again_on_the_same_env(world: World, setup: Setup) -> None:
    manager = world.make(
        setup,
        2,
        max_retry=3,
        retry_waiting_time=0.01,
        scripts={0: {"reset_faults": {1: "raise", 2: "raise"}}},
    )
    ready_all(manager)
    unique = manager.unique
    manager.reset({0: {"level": 1}})
    assert manager.unique == unique
    assert seen(manager.ready_obs[0])[:4] == (0, 0, 1, 0)
    assert [params for _, params, _ in world.noted(0, "reset")] == [{}, *[{"level": 1}] * 3]
    stats = manager.stats()
    assert (stats["reset_retries"], stats["renewals"], stats["failures"]) == (2, 0, 2)


@every_setup
def test_with_retry_type_renew_a_new_env_is_built_between_attempts(
    world: World, setup: Setup
) -> None:
    manager = world.make(
        setup,
        2,
        max_retry=3,
        retry_type="renew",
        retry_waiting_time=0.01,
        scripts={0: {"reset_faults": {1: "raise"}}},
    )
    ready_all(manager)
    unique = manager.unique
    pid = world.pid(0)
    manager.reset({0: None})
    assert manager.unique[0] != unique[0]
    assert manager.unique[1] == unique[1]
    assert world.pid(0) == pid, "a healthy host need not be replaced"
    assert seen(manager.ready_obs[0])[:2] == (0, 1)
    assert len(world.noted(0, "close")) == 1, "the old env was not closed"


@every_setup
def test_when_all_attempts_are_used_up_the_env_is_renewed_with_the_host_it_has_to_itself(
    world: World, setup: Setup
) -> None:
    manager = world.make(
        setup,
        2,
        max_retry=2,
        retry_waiting_time=0.01,
        scripts={0: {"reset_faults": {1: "raise", 2: "raise"}}},
    )
    ready_all(manager)
    pid = world.pid(0)
    manager.reset({0: None})
    assert seen(manager.ready_obs[0])[:4] == (0, 1, 0, 0)
    if setup.has_processes:
        assert (world.pid(0) == pid) is (setup.num_workers is not None)
    assert (manager.stats()["renewals"], manager.stats()["reset_retries"]) == (1, 1)


@every_kind
def test_with_retry_type_renew_a_failed_step_renews_the_env_in_its_host(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 1, retry_type="renew")
    ready_all(manager)
    pid = world.pid(0)
    assert step_all(manager, {0: Do.RAISE})[0].info["abnormal"]
    assert seen(ready_all(manager)[0])[:4] == (0, 1, 0, 0)
    assert world.pid(0) == pid
    assert [entry[0] for entry in world.journal(0)] == [
        "build", "reset", "step", "close", "build", "reset",
    ]  # fmt: skip


@over(INLINE, ALL_BLOCK)
def test_attempts_wait_retry_waiting_time(world: World, setup: Setup) -> None:
    manager = world.make(
        setup,
        1,
        max_retry=3,
        retry_waiting_time=0.15,
        script={"reset_faults": {1: "raise", 2: "raise"}},
    )
    ready_all(manager)
    began = time.monotonic()
    manager.reset()
    assert time.monotonic() - began >= 0.3


@every_setup
def test_a_failed_automatic_reset_is_repaired_behind_the_terminal_timestep(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2)
    ready_all(manager)
    last = step_all(manager, {0: Do.END_THEN_RAISE})[0]
    assert last.done
    assert "abnormal" not in last.info
    assert seen(last.obs).action == Do.END_THEN_RAISE
    assert seen(ready_all(manager)[0])[:4] == (0, 1, 0, 0)
    stats = manager.stats()
    assert (stats["abnormal"], stats["failures"], stats["episodes"]) == (0, 1, 1)


@pytest.mark.parametrize("mode", [{}, {"reset_inplace": True}], ids=str)
@pytest.mark.parametrize(
    "action", [Do.END_THEN_RAISE, Do.END_THEN_KILL, Do.END_THEN_SYS_EXIT], ids=lambda a: a.name
)
@process_kinds
def test_a_reset_that_fails_after_an_episode_loses_no_timestep(
    world: World, setup: Setup, action: Do, mode: dict[str, Any]
) -> None:
    manager = world.make(setup, 2, max_failures=10, **mode)
    ready_all(manager)
    for k in range(2):
        last = step_all(manager, {0: action, 1: 1})[0]
        assert (last.done, seen(last.obs)[:5]) == (True, (0, k, 0, 1, action))
        assert seen(ready_all(manager)[0])[:4] == (0, k + 1, 0, 0)
    assert manager.stats()["abnormal"] == 0


@every_kind
def test_a_renewed_env_with_other_spaces_is_a_failure(world: World, setup: Setup) -> None:
    manager = world.make(
        setup, env_fn=[ChangingFactory(world.folder)], max_failures=1, retry_type="renew"
    )
    assert ready_all(manager)[0].shape == (6,)
    step_all(manager, {0: Do.RAISE})
    with Raises(FailuresExhaustedError, "env 0", "max_failures is 1"):
        ready_all(manager)


class ChangingFactory:
    """Builds envs whose observation space differs from build to build."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self) -> Any:
        env = ScriptedEnv(0, self.folder)
        if env.script.build:
            from gymnasium.spaces import Discrete

            env.observation_space = Discrete(3)  # type: ignore[misc]
        return env


# -- on_failure: raise ----------------------------------------------------------------------------


@every_setup
def test_on_failure_raise_closes_and_raises_the_failure(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, on_failure="raise")
    ready_all(manager)
    with Raises(EnvRaised, "env 0", "scripted error in step of env 0") as raised:
        manager.step({0: Do.RAISE, 1: 1})
        manager.recv()
    assert raised.value.env_id == 0
    assert manager.closed
    assert set(manager.env_states.values()) == {EnvState.VOID}
    with pytest.raises(ManagerClosedError):
        manager.step({1: 1})
    manager.launch()
    assert [*ready_all(manager)] == [0, 1]


@process_kinds
def test_on_failure_raise_does_not_wait_for_the_others(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, on_failure="raise", close_timeout=0.1)
    gate = world.gate
    ready_all(manager)
    manager.send({1: Do.HANG})
    gate.await_visit(1)
    with pytest.raises(EnvRaised):
        manager.step({0: Do.RAISE})
    assert manager.closed


@process_kinds
def test_on_failure_raise_does_not_wait_for_others_of_the_same_step(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, on_failure="raise", wait_num=float("inf"), close_timeout=0.1)
    ready_all(manager)
    with pytest.raises(EnvRaised):
        manager.step({0: Do.RAISE, 1: Do.HANG})
    assert manager.closed


@pytest.mark.parametrize("mode", [{}, {"reset_inplace": True}], ids=str)
@every_kind
def test_on_failure_raise_holds_for_resets_too(
    world: World, setup: Setup, mode: dict[str, Any]
) -> None:
    manager = world.make(setup, 1, on_failure="raise", **mode)
    ready_all(manager)
    with Raises(EnvRaised, "reset", "env 0"):
        manager.step({0: Do.END_THEN_RAISE})
        _ = manager.ready_obs
    assert manager.closed


@process_kinds
def test_on_failure_raise_holds_for_deaths(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, on_failure="raise")
    ready_all(manager)
    world.kill_and_await_report(0)
    with Raises(EnvCrash, "env 0", "SIGKILL"):
        _ = manager.ready_obs
    assert manager.closed


@every_kind
def test_on_failure_raise_after_the_allowed_attempts_at_a_reset(world: World, setup: Setup) -> None:
    manager = world.make(
        setup,
        1,
        on_failure="raise",
        max_retry=2,
        retry_waiting_time=0.01,
        script={"reset_faults": {1: "raise", 3: "raise", 4: "raise"}},
    )
    ready_all(manager)
    manager.reset()  # the second attempt succeeds
    with pytest.raises(EnvRaised):
        manager.reset()
    assert manager.closed


# -- the failure budget ---------------------------------------------------------------------------


@every_setup
def test_an_env_that_fails_too_often_raises_and_the_others_are_as_they_were(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, max_failures=2)
    ready_all(manager)
    for k in range(3):
        timestep = step_all(manager, {0: Do.RAISE})[0]
        assert timestep.info["abnormal"]  # delivered first, also when the budget is spent
        if k < 2:
            ready_all(manager)
    with Raises(FailuresExhaustedError, "env 0 failed 3 times", "max_failures is 2", "drop") as e:
        _ = manager.ready_obs
    assert isinstance(e.value.failure, EnvRaised)
    assert e.value.__cause__ is e.value.failure
    assert not manager.closed
    assert manager.env_states == {0: EnvState.ERROR, 1: EnvState.RUN}
    assert [*manager.ready_obs] == [1], "it is raised once"
    assert seen(step_all(manager, {1: 1})[1].obs).step == 1
    manager.reset({0: None})  # repairs
    assert [*manager.ready_obs] == [0, 1]
    assert step_all(manager, {0: Do.RAISE})[0].info["abnormal"]  # its failures are forgiven
    assert [*ready_all(manager)] == [0, 1]


@every_setup
def test_on_exhausted_drop_goes_on_without_the_env(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, max_failures=1, on_exhausted="drop", episode_num=3)
    ready_all(manager)
    step_all(manager, {0: Do.RAISE})
    ready_all(manager)
    assert step_all(manager, {0: Do.RAISE})[0].info["abnormal"]
    assert manager.env_states == {0: EnvState.DONE, 1: EnvState.RUN}
    assert [*manager.ready_obs] == [1]
    with pytest.raises(EnvNotReadyError):
        manager.step({0: 1})
    for _ in range(3):
        ready_all(manager, [1])
        step_all(manager, {1: Do.END})
    assert manager.done
    assert manager.ready_obs == {}
    manager.reset({0: None})
    assert seen(ready_all(manager, [0])[0]).step == 0


@process_kinds
def test_a_dropped_env_that_died_idle_gives_its_abnormal_timestep_first(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, 2, max_failures=0, on_exhausted="drop")
    ready_all(manager)
    world.kill(0)
    assert [*manager.ready_obs] == [0, 1]
    assert step_all(manager, {0: 1})[0].info["abnormal"]
    assert manager.env_states == {0: EnvState.DONE, 1: EnvState.RUN}
    assert [*manager.ready_obs] == [1]


@every_kind
def test_all_envs_together_may_fail_so_often_too(world: World, setup: Setup) -> None:
    manager = world.make(setup, 4, max_failures=100)  # max(10, env_num) = 10 for all
    ready_all(manager)
    for _ in range(10):
        for i in ready_all(manager):
            if manager.stats()["failures"] < 10:
                step_all(manager, {i: Do.RAISE})
    ready_all(manager)
    assert step_all(manager, {2: Do.RAISE})[2].info["abnormal"]
    with Raises(FailuresExhaustedError, "all envs together", "10"):
        _ = manager.ready_obs


@every_kind
def test_how_often_all_envs_together_may_fail_can_be_said(world: World, setup: Setup) -> None:
    manager = world.make(setup, 4, max_failures=100, max_failures_total=2)
    for i in range(2):
        ready_all(manager)
        step_all(manager, {i: Do.RAISE})
    assert [*ready_all(manager)] == [0, 1, 2, 3]
    assert step_all(manager, {2: Do.RAISE})[2].info["abnormal"]
    with Raises(
        FailuresExhaustedError, "all envs together failed 3 times", "max_failures_total is 2"
    ):
        _ = manager.ready_obs
    ready_all(manager, [0, 1, 3])


@every_kind
def test_failures_outside_of_the_window_do_not_count(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, max_failures=1, failure_window_s=0.02)
    for _ in range(4):
        ready_all(manager)
        assert step_all(manager, {0: Do.RAISE})[0].info["abnormal"]
        time.sleep(0.03)  # the window itself
    ready_all(manager)
    assert manager.stats()["failures"] == 4


@every_kind
def test_envs_that_cannot_be_built_again_exhaust_the_budget(world: World, setup: Setup) -> None:
    faults = {"build_faults": {0: None, -1: "raise"}}
    manager = world.make(setup, 2, retry_type="renew", retry_waiting_time=0.01, scripts={0: faults})
    ready_all(manager)
    assert step_all(manager, {0: Do.RAISE})[0].info["abnormal"]
    with Raises(FailuresExhaustedError, "env 0", "scripted error in step"):
        ready_all(manager)
    assert [*manager.ready_obs] == [1]
    assert len(world.noted(0, "build")) == 4
    with Raises(FailuresExhaustedError, "env 0"):
        manager.reset({0: None})


@every_kind
def test_calls_to_an_env_that_is_gone_are_refused(world: World, setup: Setup) -> None:
    manager = world.make(setup, 2, max_failures=0, on_exhausted="drop")
    ready_all(manager)
    step_all(manager, {0: Do.SYS_EXIT})
    assert manager.env_states[0] is EnvState.DONE
    for call in (
        lambda: manager.label,
        lambda: manager.get_attr("label"),
        lambda: manager.call("user_defined"),
        lambda: manager.set_attr("knob", 1),
    ):
        with Raises(EnvNotReadyError, "[0]", "reset"):
            call()
    assert manager.get_attr("label", env_ids=1) == ["env-1"]


@every_kind
def test_waiting_for_a_reset_of_a_hopeless_env_ends(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, max_failures=0)
    ready_all(manager)
    step_all(manager, {0: Do.END_THEN_RAISE})
    with pytest.raises(FailuresExhaustedError):
        _ = manager.ready_obs
    with pytest.raises(NothingReadyError):
        _ = manager.ready_obs


# -- recycling ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cfg",
    [{"max_episodes_per_worker": 2}, {"max_worker_rss_mb": 1}],
    ids=lambda cfg: next(iter(cfg)),
)
@process_kinds
def test_workers_are_replaced_at_the_end_of_an_episode(
    world: World, setup: Setup, cfg: dict[str, Any]
) -> None:
    manager = world.make(setup, 2, **cfg)
    every = cfg.get("max_episodes_per_worker", 1)
    for episode in range(4):
        first = ready_all(manager)[0]
        assert seen(first)[:4] == (0, episode // every, episode % every, 0)
        assert seen(step_all(manager, {0: 1, 1: 1})[0].obs).step == 1
        last = step_all(manager, {0: Do.END})[0]
        assert (last.done, seen(last.obs).step) == (True, 2)
        assert "abnormal" not in last.info
    ready_all(manager)
    stats = manager.stats()
    assert stats["recycled"] == stats["renewals"] == 4 // every
    assert (stats["failures"], stats["abnormal"]) == (0, 0)
    pids = [pid for _, pid in world.noted(0, "build")]
    assert len(set(pids)) == 1 + 4 // every
    assert len(world.noted(0, "close")) == 4 // every, "an env was not closed"


@process_kinds
def test_recycling_with_auto_reset_off(world: World, setup: Setup) -> None:
    manager = world.make(setup, 1, max_episodes_per_worker=1, auto_reset=False)
    ready_all(manager)
    step_all(manager, {0: Do.END})
    manager.reset({0: {"level": 1}})
    assert seen(manager.ready_obs[0])[:4] == (0, 1, 0, 0)
    assert world.noted(0, "reset")[-1][1] == {"level": 1}


@over(ALL_BLOCK_SHARED, ALL_BLOCK, SOME_BLOCK)
def test_the_last_env_of_a_host_goes_on_by_message(world: World, setup: Setup) -> None:
    """Its resets are put off behind the steps of others, also when there are none any more."""
    manager = world.make(setup, 2, max_failures=0, on_exhausted="drop")
    ready_all(manager)
    step_all(manager, {0: Do.RAISE})
    assert manager.env_states[0] is EnvState.DONE
    for _ in range(20):
        assert step_all(manager, {1: Do.END})[1].done  # an IntEnum is not packed: by message
        ready_all(manager, [1])
        assert not step_all(manager, {1: 1})[1].done
