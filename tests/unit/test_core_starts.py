"""Caps on what is built and reset at one time: whose turn it is, over fakes."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from envmgr.core import Phase
from envmgr.core.activities import activities_of
from envmgr.core.launching import begin_envs, build_envs
from envmgr.core.phases import Next
from envmgr.core.slots import SlotRules
from envmgr.core.starts import WARN_AFTER_S
from envmgr.errors import LaunchError
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy, StartCaps
from envmgr.shared_caps import SharedUnits
from envmgr.wire.board import Activity
from envmgr.wire.messages import Op
from tests.fake_hosts import FakeEnvs, FakeHost
from tests.rig import Rig, over_routes, route
from tests.unit.test_core_slots import Leases

__all__ = ["route"]

pytestmark = over_routes


def capped(env_num: int, at_once: int | None = None, per_s: float | None = None, **how: Any) -> Rig:
    return Rig(env_num, caps=StartCaps(at_once, per_s), **how)


def launched(env_num: int, at_once: int, **how: Any) -> Rig:
    """Return launched envs, whose first resets were given a turn each."""
    return capped(env_num, at_once, **how).launch()


def phases(rig: Rig) -> list[Phase]:
    return [env.phase for env in rig.hosts.envs]


def waiting(rig: Rig) -> list[int]:
    assert rig.hosts.starts is not None
    return rig.hosts.starts.waiting


def end(rig: Rig, *env_ids: int) -> None:
    """Have the episodes of envs end, and their timesteps be delivered, one after another."""
    for env_id in env_ids:
        rig.send(env_id)
    for env_id in env_ids:
        rig.stepped(env_id, "terminal", done=True)
        rig.deliver(env_id)


class Busy:
    """Answers in time, and remembers how many envs were at it at one time.

    Args:
        rig: whose hosts these are.
        seconds: how long a construction and a reset take.
    """

    def __init__(self, rig: Rig, seconds: float) -> None:
        self.envs = FakeEnvs(seconds=dict.fromkeys((Op.HELLO, Op.RENEW, Op.RESET), seconds))
        self.rig, self.most, self.begun = rig, 0, list[float]()

    def __call__(self, host: FakeHost, message: Any) -> Any:
        if message.op in (Op.HELLO, Op.RENEW, Op.RESET):
            self.begun.append(self.rig.clock())
        assert self.rig.hosts.starts is not None
        self.most = max(self.most, self.rig.hosts.starts.at_it)
        return self.envs(host, message)


def launch_in_time(rig: Rig, seconds: float) -> Busy:
    """Launch as a manager does, with hosts that take their time."""
    rig.transport.answer = busy = Busy(rig, seconds)
    with rig.engine.calling:
        build_envs(rig.engine, same_spaces=True)
        begin_envs(rig.engine, None)
    return busy


# -- launch ---------------------------------------------------------------------------------------


def test_a_launch_builds_and_resets_so_many_at_a_time_in_order() -> None:
    rig = capped(5, 2)
    began = rig.clock()
    busy = launch_in_time(rig, 1.0)
    assert busy.most <= 2
    assert rig.clock() - began == 3.0 + 3.0  # three rounds of constructions, three of resets
    assert rig.ready() == [0, 1, 2, 3, 4]
    assert [h.env_id for h in rig.transport.hosts.values()] == [0, 1, 2, 3, 4]


def test_until_its_first_reset_no_env_is_said_to_wait_for_an_action() -> None:
    rig = capped(5, 2)
    rig.transport.answer = Busy(rig, 1.0)
    with rig.engine.calling:
        build_envs(rig.engine, same_spaces=True)
        assert Activity.READY not in activities_of(rig.hosts)
        begin_envs(rig.engine, None)
    assert activities_of(rig.hosts).tolist() == [Activity.READY] * 5


def test_a_launch_with_one_at_a_time_works_in_shared_hosts_too() -> None:
    rig = capped(5, 1, num_workers=2)
    began = rig.clock()
    launch_in_time(rig, 1.0)
    assert rig.clock() - began == 10.0
    assert rig.ready() == [0, 1, 2, 3, 4]
    assert [env.generation for env in rig.hosts.envs] == [0] * 5, "each was built once"


def test_the_hosts_of_envs_that_share_some_work_side_by_side() -> None:
    rig = capped(4, 2, num_workers=2)
    rig.supervisor.start_hosts(range(4))
    assert phases(rig) == [Phase.STARTING, Phase.PAUSING, Phase.STARTING, Phase.PAUSING]
    assert len(rig.transport.hosts) == 2


def test_a_launch_begins_so_many_in_a_second() -> None:
    rig = capped(5, None, 2)
    busy = launch_in_time(rig, 0.0)
    assert [t - busy.begun[0] for t in busy.begun] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_a_rate_below_one_is_one_in_so_many_seconds() -> None:
    rig = capped(2, None, 0.5)
    busy = launch_in_time(rig, 0.0)
    assert [t - busy.begun[0] for t in busy.begun] == [0, 2, 4, 6]


def test_who_waits_to_be_built_has_no_deadline_before_its_turn() -> None:
    rig = capped(4, 1, deadlines=Deadlines(connect_s=3.0, reset_s=3.0))
    busy = launch_in_time(rig, 2.0)
    assert len(busy.begun) == 8
    assert rig.ready() == [0, 1, 2, 3]
    assert rig.supervisor.statistics.failures_by_kind == {}


def test_its_deadline_counts_from_its_turn() -> None:
    rig = capped(2, 1, deadlines=Deadlines(connect_s=3.0))
    rig.supervisor.start_hosts(range(2))
    rig.advance(2.0)
    rig.hello(0)
    assert phases(rig) == [Phase.IDLE, Phase.STARTING]
    assert rig.slot(1).deadline == rig.clock() + 3.0


def test_a_launch_that_has_failed_gives_nobody_a_turn() -> None:
    rig = capped(3, 1)
    rig.transport.answer = Busy(rig, 1.0)
    began = rig.clock()
    rig.transport.call_after(0.5, lambda: rig.transport.die(0))
    with rig.engine.calling, pytest.raises(LaunchError):
        build_envs(rig.engine, same_spaces=True)
    assert len(rig.transport.hosts) == 1
    assert rig.clock() - began < 2.0, "nor does it wait for them"
    rig.engine.close(0.0)
    assert waiting(rig) == []


def test_the_spaces_of_the_first_env_may_be_asked_for_before() -> None:
    rig = capped(3, 1)
    rig.supervisor.start_hosts([0])
    rig.supervisor.start_hosts(range(3))
    rig.supervisor.start_hosts(range(3))  # of a launch that was interrupted
    assert waiting(rig) == [1, 2]
    assert set(rig.supervisor.table.env_states()) == {EnvState.INIT}


# -- episodes -------------------------------------------------------------------------------------


def test_episodes_that_end_together_begin_so_many_at_a_time() -> None:
    rig = launched(4, 2)
    end(rig, 2, 0, 3, 1)
    assert phases(rig) == [Phase.RESETTING, Phase.PAUSING, Phase.RESETTING, Phase.PAUSING]
    assert waiting(rig) == [3, 1], "in order of asking"
    rig.reset_done(0)
    assert waiting(rig) == [1]
    assert rig.ready() == [0]
    rig.reset_done(3)
    assert waiting(rig) == []
    rig.reset_done(2)
    rig.reset_done(1)
    assert rig.ready() == [0, 1, 2, 3]
    assert all(env.episode == 2 for env in rig.supervisor.envs)


def test_the_engine_gives_turns_by_itself() -> None:
    """Nobody asks for anything: what arrives has to be enough."""
    rig = launched(2, 1)
    rig.send({0: 1, 1: 1})
    for env_id in (0, 1):
        rig.transport.reply(env_id, Op.STEPPED, ("terminal", 1.0, True, {}, 0))
    taken = rig.exactly(0, 1)
    assert all(timestep.done for timestep in taken.values())
    assert waiting(rig) == [1]
    rig.transport.reply(0, Op.RESET_DONE, ("first", {}), after_s=1.0)
    assert not rig.engine.wait_until(lambda: False, deadline=rig.clock() + 2.0, doing="this")
    assert rig.phase(1) is Phase.RESETTING


def test_hosts_begin_no_reset_by_themselves() -> None:
    rig = launched(2, 2)
    assert not any(request.plan.auto_reset for request in rig.reset_requests(0))
    free = Rig(1).launch()
    assert free.reset_requests()[0].plan.auto_reset, "without caps they do"


def test_a_timestep_that_waits_for_the_reset_comes_after_its_turn() -> None:
    rig = launched(2, 1, reset_inplace=True)
    rig.send({0: 1, 1: 1})
    for env_id in (0, 1):
        rig.stepped(env_id, "terminal", done=True)
    assert not rig.has_arrived(0)
    assert not rig.has_arrived(1)
    rig.reset_done(0)
    assert rig.has_arrived(0)
    rig.reset_done(1)
    assert sorted(rig.deliver()) == [0, 1]


def test_explicit_resets_wait_too_and_join_one_that_waits() -> None:
    rig = launched(3, 1)
    for env_id in range(3):
        rig.reset(env_id)
    assert waiting(rig) == [1, 2]
    rig.reset(2, {"level": 5})
    assert waiting(rig) == [1, 2], "it keeps its place"
    for env_id in range(3):
        rig.reset_done(env_id)
    assert rig.ready() == [0, 1, 2]
    assert [r.params for r in rig.reset_requests(2)][1:] == [{"level": 5}], "reset once, with that"


def test_one_that_is_to_be_reset_again_goes_on_in_its_place() -> None:
    rig = launched(2, 1)
    rig.reset(0)
    rig.reset(1)
    rig.reset(0, {"level": 2})
    rig.reset_done(0)
    assert phases(rig) == [Phase.RESETTING, Phase.PAUSING]
    rig.reset_done(0)
    assert phases(rig) == [Phase.IDLE, Phase.RESETTING]


# -- failures -------------------------------------------------------------------------------------


def test_envs_that_fail_together_are_renewed_one_after_another() -> None:
    rig = launched(3, 1)
    rig.send(dict.fromkeys(range(3), 1))
    for env_id in range(3):
        rig.die(env_id)
    assert sorted(rig.deliver()) == [0, 1, 2]
    assert phases(rig) == [Phase.STARTING, Phase.PAUSING, Phase.PAUSING]
    rig.hello(0)
    # It is built, and asks for its reset behind those who have asked before.
    assert phases(rig) == [Phase.PAUSING, Phase.STARTING, Phase.PAUSING]
    assert waiting(rig) == [2, 0]
    rig.hello(1)
    rig.hello(2)
    for env_id in range(3):
        rig.reset_done(env_id)
    assert rig.ready() == [0, 1, 2]
    assert [env.generation for env in rig.supervisor.envs] == [1, 1, 1]


def test_nobody_has_a_turn_while_hosts_wait_for_the_next_call() -> None:
    rig = launched(2, 1)
    rig.send(dict.fromkeys(range(2), 1))
    for env_id in range(2):
        rig.die(env_id)
    rig.deliver()
    rig.transport.must_wait_for_call = True
    rig.hello(0)
    rig.run(60.0)
    assert phases(rig) == [Phase.PAUSING, Phase.PAUSING]
    rig.transport.must_wait_for_call = False
    rig.run(0.1)
    assert phases(rig) == [Phase.PAUSING, Phase.STARTING]
    rig.hello(1)
    for env_id in range(2):
        rig.reset_done(env_id)
    assert rig.ready() == [0, 1]


def test_a_failure_at_it_frees_the_place_for_the_next() -> None:
    rig = launched(2, 1, policy=FailurePolicy(retry_waiting_s=4.0))
    end(rig, 0, 1)
    rig.die(0)
    assert phases(rig) == [Phase.PAUSING, Phase.RESETTING]
    rig.reset_done(1)
    rig.hello(0)
    rig.reset_done(0)
    assert rig.ready() == [0, 1]


def test_one_that_dies_while_it_waits_asks_anew() -> None:
    rig = launched(3, 1)
    end(rig, 0, 1, 2)
    rig.die(1)
    assert waiting(rig) == [2, 1]
    assert rig.slot(1).follow_up is Next.BUILD
    rig.reset_done(0)
    rig.reset_done(2)
    rig.hello(1)
    rig.reset_done(1)
    assert rig.ready() == [0, 1, 2]


def test_who_waits_for_a_host_that_ends_lets_others_go_first() -> None:
    rig = launched(3, 1, num_workers=1, kill_takes_s=1.0, policy=FailurePolicy(max_failures=9))
    rig.send(1)
    rig.die(1)
    rig.deliver()
    assert phases(rig) == [Phase.STARTING, Phase.PAUSING, Phase.PAUSING]
    rig.hello(0)
    assert waiting(rig) == [2, 0]
    rig.fail(1, "construction")  # alone in being built; it is tried again after a pause
    rig.transport.garbage(2)
    rig.pump()
    assert rig.slot(2).group.is_ending
    assert rig.hosts.starts is not None
    assert not rig.hosts.starts.has_turn
    rig.advance(1.0)
    for _ in range(20):
        for env in list(rig.transport.host_of(0).newest.values()):
            if rig.phase(env.env_id) is Phase.STARTING:
                rig.hello(env.env_id)
            elif rig.phase(env.env_id) is Phase.RESETTING:
                rig.reset_done(env.env_id)
        rig.advance(0.5)
    assert rig.ready() == [0, 1, 2]


def test_a_failed_env_that_its_user_acts_on_while_it_waits_is_as_any_other() -> None:
    rig = launched(2, 1)
    end(rig, 0)
    rig.die(1)  # while it was ready
    assert waiting(rig) == [1]
    rig.send(1)
    assert rig.deliver(1)[1].info["abnormal"]
    assert rig.state(1) is EnvState.ERROR
    rig.reset_done(0)
    assert rig.state(1) is EnvState.INIT
    rig.hello(1)
    rig.reset_done(1)
    assert rig.ready() == [0, 1]


def test_spares_take_turns_as_envs_do_and_a_swap_needs_none() -> None:
    rig = capped(2, 1, spare_num=1).launch()
    starts = rig.hosts.starts
    assert starts is not None
    assert rig.supervisor.spares is not None
    assert rig.supervisor.spares.figures()["spares_ready"] == 1
    end(rig, 0)
    assert starts.at_it <= 1
    rig.transport.answer = FakeEnvs(
        observe=lambda env, request, kind: kind  # who adopts one answers by itself
    )
    rig.pump()
    assert rig.supervisor.statistics.swaps == 1


def test_closing_forgets_who_waits() -> None:
    rig = launched(3, 1)
    end(rig, 0, 1, 2)
    rig.engine.close(0.0)
    assert waiting(rig) == []
    assert set(rig.supervisor.table.env_states()) == {EnvState.VOID}
    assert rig.supervisor.hosts.limits.turn_at == float("inf")


# -- what is told ---------------------------------------------------------------------------------


def test_the_log_names_who_has_waited_for_long_and_for_what(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = launched(4, 1)
    end(rig, 0, 1, 2)
    rig.run(WARN_AFTER_S - 1.0)
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING, "envmgr"):
        rig.run(2.0)
    (text,) = caplog.messages
    assert "envs 1, 2 for reset" in text
    assert "limits.starting is 1" in text
    assert "At it: env 0 for reset" in text
    caplog.clear()
    rig.run(WARN_AFTER_S - 4.0)
    assert caplog.messages == []
    rig.run(WARN_AFTER_S)
    assert len([text for text in caplog.messages if "envs 1, 2" in text]) == 1
    caplog.clear()
    for env_id in (0, 1, 2):
        rig.reset_done(env_id)
    for _ in range(3):
        rig.advance(WARN_AFTER_S)
    assert caplog.messages == []


def test_figures_tell_how_many_are_at_it_and_how_many_wait() -> None:
    rig = launched(4, 1)
    end(rig, 0, 1, 2)
    assert rig.hosts.starts is not None
    assert rig.hosts.starts.figures() == {"starting": 1, "waiting_to_start": 2}


def test_without_caps_there_is_nothing_to_ask() -> None:
    assert Rig(2, caps=StartCaps()).hosts.starts is None


# -- leases ---------------------------------------------------------------------------------------


def test_so_many_envs_are_leased_at_a_time_in_order_of_asking() -> None:
    of = Leases(Rig(4).launch(), SlotRules(most=2))
    asked = [of.ask() for _ in range(4)]
    of.serve()
    assert [t.env_id for t in asked] == [0, 1, None, None]
    assert of.slots.counts == (2, 2)
    of.slots.give_back(asked[1])
    of.serve()
    assert [t.env_id is None for t in asked] == [False, False, False, True]
    of.slots.give_back(asked[0])
    of.slots.give_back(asked[3])
    of.serve()
    assert of.slots.counts == (1, 0)


def test_the_limit_of_a_leased_reset_counts_from_its_turn() -> None:
    of = Leases(launched(2, 1), SlotRules(episode_s=20.0))
    first, second = of.lease(), of.lease()
    limits = {first: None, second: 5.0}
    calls = [of.call(tenancy, "reset", limit, seed=3) for tenancy, limit in limits.items()]
    assert waiting(of.rig) == [1]
    assert of.slots.until == float("inf"), "nothing has begun that could be late"
    of.rig.advance(6.0)
    of.serve()
    assert not calls[1].is_over
    of.rig.reset_done(0)
    of.rig.advance(4.0)
    of.serve()
    assert calls[0].is_over
    assert not calls[1].is_over, "10 s after it was asked for, 4 after it has begun"
    of.rig.reset_done(1)
    of.serve()
    assert calls[1].error is None
    assert second.episode_began_s == of.rig.clock() - 4.0
    assert first.episode_began_s == of.rig.clock() - 10.0


def test_a_leased_reset_that_has_had_its_turn_has_its_limit() -> None:
    of = Leases(launched(2, 1), SlotRules())
    first, second = of.lease(), of.lease()
    calls = [of.call(tenancy, "reset", 5.0, seed=3) for tenancy in (first, second)]
    of.rig.advance(4.0)
    of.rig.reset_done(0)
    of.serve()
    assert of.slots.until == float("inf"), "the env's own deadline is enough"
    of.rig.advance(5.0)
    of.serve()
    assert calls[1].is_over
    assert "5 s of timeout_s" in str(calls[1].error)


def test_who_leaves_while_the_reset_waits_leaves_nothing_behind() -> None:
    of = Leases(launched(2, 1), SlotRules())
    first, second = of.lease(), of.lease()
    call = of.call(first, "reset", seed=3)
    waits = of.call(second, "reset", seed=3)
    of.slots.abandon(second, waits)
    of.slots.give_back(second)
    of.serve()
    of.rig.reset_done(0)
    of.rig.reset_done(1)
    of.serve()
    assert call.is_over
    assert of.rig.ready() == [1]
    assert of.rig.supervisor.hosts.limits.own == {}


# -- shared ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("looked_at", [False, True])
def test_a_launch_waits_for_units_looks_four_times_a_second_and_says_so(
    looked_at: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "caps"
    folder.mkdir(mode=0o700)
    others, ours = (SharedUnits({"browser": 3}, 2, str(folder)) for _ in range(2))
    assert others.take()
    rig = Rig(2, answer=FakeEnvs())
    rig.engine.units = ours
    began = rig.clock()
    rig.transport.call_after(40.1, others.release)
    if looked_at:  # another trainer looks for units as the launch does
        fd = os.open(folder / ".lock", os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        rig.transport.call_after(2.0, lambda: os.close(fd))
    with rig.engine.calling:
        build_envs(rig.engine, same_spaces=True)
        begin_envs(rig.engine, None)
    assert 40.1 <= rig.clock() - began <= 40.5
    assert ours.is_held
    first, again = caplog.messages
    assert first.startswith("the launch waits for 2 of the 3 of browser: held are 2 by process")
    assert "waiting for 30 s, for 2 of the 3 of browser" in again
    rig.engine.close(0.0)
    assert not ours.is_held


def test_who_pauses_joins_the_end_of_a_host_that_another_began_meanwhile() -> None:
    rig = launched(2, 1, num_workers=1, kill_takes_s=5.0)
    rig.die(0)
    assert phases(rig) == [Phase.STARTING, Phase.PAUSING]
    rig.die(0)  # again: there is a pause before it is built once more
    assert phases(rig) == [Phase.PAUSING, Phase.STARTING], "the other one has its turn"
    rig.transport.garbage(1)
    rig.pump()
    rig.run(2.0)
    assert phases(rig) == [Phase.ENDING] * 2, "its pause is over, and that host is not"
    rig.transport.answer = FakeEnvs()
    rig.run(20.0)
    assert phases(rig) == [Phase.IDLE] * 2
