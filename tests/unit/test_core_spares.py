"""Spares: who takes whose place, when, and what nobody sees of it."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest

from envmgr.config import ManagerConfig
from envmgr.core import Phase
from envmgr.core.spares import all_factories, spare_factory
from envmgr.errors import EnvCrash, EnvTimeout
from envmgr.launch import build_engine
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy
from envmgr.seeding import derived_seed
from envmgr.wire.block import RING_LAST
from envmgr.wire.messages import UNANSWERED, AfterStep, FailureKind, Message, Op
from tests.fake_hosts import FakeEnvs
from tests.fakes import FakeClock, FakeTransport
from tests.rig import Rig, over_routes
from tests.unit.core_rigs import make_one

pytestmark = over_routes


def spared(env_num: int = 2, spare_num: int = 1, **how: Any) -> Rig:
    """Launched envs with spares; what comes after that is played by the test."""
    return Rig(env_num, spare_num=spare_num, **how).launch()


def host(rig: Rig, env_id: int) -> int:
    """The host that serves an env or a spare."""
    group = rig.slot(env_id).group
    assert group.host_id is not None
    assert rig.transport.host_of(env_id).host_id == group.host_id
    return group.host_id


def end_episode(rig: Rig, env_id: int = 0, **how: Any) -> None:
    """Have an env take a step that ends its episode, and deliver it."""
    rig.send(env_id)
    rig.stepped(env_id, done=True, **how)
    assert list(rig.deliver(env_id)) == [env_id]


def keep(rig: Rig, spare: int = 2) -> None:
    """A spare has been reset."""
    rig.transport.reply(spare, Op.RESET_DONE, None)
    rig.pump()


# -- who builds them ------------------------------------------------------------------------------


def make_another() -> None: ...


def test_spares_are_built_by_the_function_that_most_envs_have() -> None:
    many = partial(make_one), make_another, partial(make_one)
    config = ManagerConfig(type="subprocess", spare_env_num=2).with_env_num(3)
    assert all_factories(many, 2)[3:] == [many[0]] * 2
    supervisor = build_engine(many, config, FakeTransport(FakeClock()), (None, None), FakeClock())
    assert supervisor.supervisor.rules.spare_takers == (True, False, True)
    supervisor.close(0.0)


def test_functions_that_cannot_be_sent_are_compared_as_objects() -> None:
    class Unsendable:
        def __call__(self) -> None: ...

        def __reduce__(self) -> Any:
            raise ValueError("not me")

    one, other = Unsendable(), Unsendable()
    assert spare_factory([one, other, other]) is other


# -- launch ---------------------------------------------------------------------------------------


def test_spares_are_reset_at_launch_and_nobody_sees_them() -> None:
    rig = spared(spare_num=2)
    assert rig.ready() == [0, 1]
    assert [order.keeps for env_id in range(4) for order in rig.reset_requests(env_id)] == [
        False,
        False,
        True,
        True,
    ]
    assert len(rig.supervisor.envs) == len(rig.supervisor.table.env_states()) == 2
    assert rig.supervisor.spares.figures() == {"spare_env_num": 2, "spares_ready": 2}
    assert rig.supervisor.statistics.resets == 2
    assert rig.supervisor.statistics.num_workers == 2
    assert sorted(rig.supervisor.descriptions) == [0, 1]


def test_hosts_do_not_begin_episodes_by_themselves_where_there_are_spares() -> None:
    rig = spared()
    assert [rig.reset_requests(i)[0].plan.auto_reset for i in range(3)] == [False] * 3


def test_seeds_of_spares_are_used_at_their_first_reset() -> None:
    rig = Rig(2, spare_num=1).launch(seeds={0: 5, 1: 6, 2: 7})
    assert [rig.reset_requests(i)[0].seed for i in range(3)] == [5, 6, 7]


# -- the end of an episode ------------------------------------------------------------------------


def test_a_ready_spare_takes_the_place_of_an_env_whose_episode_ends() -> None:
    rig = spared()
    ended, spare = host(rig, 0), host(rig, 2)
    end_episode(rig)
    assert (host(rig, 0), host(rig, 2)) == (spare, ended)
    assert rig.state(0) is EnvState.RESET
    (adopt,) = rig.requests(Op.ADOPT, 0)
    assert adopt.request_id == rig.slot(0).request_id != UNANSWERED
    to_ended = [m for h, m in rig.transport.sent if h == ended][-2:]
    assert [(m.op, m.env_id) for m in to_ended] == [(Op.ADOPT, 2), (Op.RESET, 2)]
    assert to_ended[0].request_id == UNANSWERED
    assert to_ended[1].payload.keeps
    rig.reset_done(0, "first of the spare", level=3)
    assert rig.ready() == [0, 1]
    assert rig.obs(0) == "first of the spare"
    assert rig.slot(0).reset_info == {"level": 3}
    assert rig.supervisor.statistics.swaps == 1
    assert rig.slot(0).generation == rig.slot(2).generation == 0


def test_the_env_that_ended_is_the_next_spare_when_it_has_been_reset() -> None:
    rig = spared()
    end_episode(rig, 0)
    rig.reset_done(0)
    assert rig.supervisor.spares.figures()["spares_ready"] == 0
    keep(rig)
    assert rig.supervisor.spares.figures()["spares_ready"] == 1
    ended = host(rig, 2)
    end_episode(rig, 1)
    assert host(rig, 1) == ended
    rig.reset_done(1)
    assert rig.ready() == [0, 1]
    statistics = rig.supervisor.statistics
    assert (statistics.episodes, statistics.resets, statistics.swaps) == (2, 4, 2)
    assert rig.identity_holds()


def test_a_spare_that_is_being_reset_takes_the_place_as_well() -> None:
    rig = spared()
    end_episode(rig, 0)
    rig.reset_done(0)
    spare = host(rig, 2)
    stale = rig.slot(2).request_id
    end_episode(rig, 1)
    assert host(rig, 1) == spare
    assert rig.slot(1).phase is Phase.RESETTING
    # What its host said before it was told of its new place is nobody's, and no offence.
    rig.transport.arrive(spare, Message(Op.NOTICE, 2, 0, stale, "a cast"))
    rig.transport.arrive(spare, Message(Op.RESET_DONE, 2, 0, stale, None))
    rig.pump()
    assert rig.state(1) is EnvState.RESET
    assert rig.supervisor.statistics.dropped_replies == 0
    rig.reset_done(1, "kept")
    assert rig.obs(1) == "kept"
    assert not rig.slot(1).group.obsolete_requests
    assert rig.transport.killed == []


def test_a_reply_that_nobody_asked_for_breaks_the_protocol_still() -> None:
    rig = spared()
    end_episode(rig)
    rig.transport.arrive(host(rig, 0), Message(Op.RESET_DONE, 2, 0, 12345, None))
    rig.pump()
    assert rig.supervisor.statistics.failures_by_env == {0: 1}


def test_spares_take_turns_in_the_order_of_their_resets_whatever_these_last() -> None:
    rig = spared(3, 2)
    first, second = host(rig, 3), host(rig, 4)
    end_episode(rig, 0)
    end_episode(rig, 1)
    assert (host(rig, 0), host(rig, 1)) == (first, second)
    third = host(rig, 3)
    rig.reset_done(0)
    rig.reset_done(1)
    keep(rig, 4)  # sooner than 3, whose reset has begun before
    end_episode(rig, 2)
    assert host(rig, 2) == third
    assert rig.slot(2).phase is Phase.RESETTING


def test_envs_that_end_together_get_their_successors_by_env_id_and_not_as_they_arrive() -> None:
    rig = spared(2, 2)
    first, second = host(rig, 2), host(rig, 3)
    rig.send({0: 1, 1: 1})
    rig.stepped(1, done=True)
    assert rig.requests(Op.ADOPT, 1) == []
    rig.stepped(0, done=True)
    assert rig.deliver(0, 1).keys() == {0, 1}
    assert (host(rig, 0), host(rig, 1)) == (first, second)


def test_envs_of_async_kinds_do_not_wait_for_each_other() -> None:
    rig = spared(2, 1, spares_in_order=False)
    spare = host(rig, 2)
    rig.send({0: 1, 1: 1})
    rig.stepped(1, done=True)
    assert host(rig, 1) == spare


def test_what_was_delivered_is_relieved_while_other_steps_are_under_way() -> None:
    rig = spared()
    rig.send({0: 1, 1: 1})
    rig.stepped(1, done=True)
    assert rig.requests(Op.ADOPT, 1) == []
    assert rig.deliver(1).keys() == {1}
    assert len(rig.requests(Op.ADOPT, 1)) == 1


def test_with_reset_inplace_the_timestep_is_held_until_the_spare_is_there() -> None:
    rig = spared(2, 2, reset_inplace=True)
    rig.send({0: 1, 1: 1})
    rig.stepped(1, done=True)
    rig.stepped(0)
    assert rig.requests(Op.ADOPT, 1) != []
    assert rig.deliver(0, 1).keys() == {0}
    rig.reset_done(1)
    assert rig.deliver(1).keys() == {1}
    assert rig.ready() == [0, 1]


def test_with_reset_inplace_a_spare_comes_though_others_have_replied_and_are_not_gathered() -> None:
    rig = spared(2, 2, reset_inplace=True)
    sent = rig.selection([0, 1])
    rig.send({0: 1, 1: 1}, RING_LAST)
    rig.transport.reply(0, Op.STEPPED, ("next", 1.0, True, {}, AfterStep.NOTHING))
    rig.transport.reply(1, Op.STEPPED, ("next", 1.0, False, {}, AfterStep.NOTHING))
    rig.transport.answer = FakeEnvs()
    assert rig.hand_out(rig.gather.exactly(sent)).keys() == {0, 1}
    assert rig.supervisor.statistics.swaps == 1


def test_an_env_whose_relief_was_interrupted_gets_its_successor_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = spared()
    spares = rig.supervisor.spares
    assert spares is not None

    def interrupt(slot: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(spares, "_successor_of", interrupt)
        with pytest.raises(KeyboardInterrupt):
            end_episode(rig)
    assert rig.supervisor.statistics.swaps == 0
    spares.replace_ended()
    assert rig.supervisor.statistics.swaps == 1
    assert rig.slot(0).phase is Phase.RESETTING


def test_without_a_spare_that_can_come_an_env_is_reset_as_ever() -> None:
    rig = spared(2, 1)
    rig.die(2)  # it is being renewed
    rig.send(0)
    rig.stepped(0, done=True)
    rig.deliver(0)
    assert len(rig.requests(Op.RESET, 0)) == 2
    assert not rig.reset_requests(0)[1].keeps
    rig.reset_done(0)
    assert rig.ready() == [0, 1]
    assert rig.supervisor.statistics.swaps == 0


def test_envs_with_reset_params_take_no_spare() -> None:
    rig = Rig(2, spare_num=1).launch(params={0: {"level": 1}})
    end_episode(rig, 0)
    assert len(rig.requests(Op.RESET, 0)) == 2
    end_episode(rig, 1)
    assert len(rig.requests(Op.ADOPT, 1)) == 1


def test_envs_of_another_factory_take_no_spare() -> None:
    rig = spared(spare_takers=(False, True))
    end_episode(rig, 0)
    assert rig.requests(Op.ADOPT, 0) == []
    end_episode(rig, 1)
    assert len(rig.requests(Op.ADOPT, 1)) == 1


def test_the_last_episode_of_a_budget_takes_no_spare() -> None:
    rig = spared(episode_num=1)
    end_episode(rig, 0)
    assert rig.state(0) is EnvState.DONE
    assert rig.supervisor.statistics.swaps == 0
    assert rig.supervisor.spares.figures()["spares_ready"] == 1


def test_a_worn_worker_is_replaced_behind_the_spare() -> None:
    rig = spared()
    ended = host(rig, 0)
    end_episode(rig, 0, after=AfterStep.WANTS_RECYCLING)
    assert [m.op for h, m in rig.transport.sent if h == ended][-2:] == [Op.ADOPT, Op.CLOSE]
    rig.reset_done(0)
    assert rig.ready() == [0, 1]
    rig.transport.reply(2, Op.CLOSED)
    rig.die(2, 0)
    rig.hello(2)
    assert rig.reset_requests(2)[-1].keeps
    keep(rig)
    assert rig.supervisor.spares.figures()["spares_ready"] == 1
    assert rig.supervisor.statistics.recycled == 1
    assert rig.slot(0).generation == 0
    assert rig.slot(2).generation == 1


# -- limits, and resets that fail -----------------------------------------------------------------


def test_the_limit_of_a_reset_counts_from_its_beginning_wherever_it_goes_on() -> None:
    rig = spared(deadlines=Deadlines(reset_s=4.0))
    end_episode(rig, 0)
    rig.reset_done(0)
    rig.advance(3.0)
    end_episode(rig, 1)  # the spare has been at its reset for 3 s
    rig.advance(0.5)
    assert rig.state(1) is EnvState.RESET
    rig.advance(0.5)
    assert rig.supervisor.statistics.failures_by_env == {1: 1}
    assert isinstance(rig.supervisor.statistics.latest_failures[0], EnvTimeout)


def test_a_spare_whose_reset_is_being_cancelled_takes_no_place() -> None:
    rig = spared(deadlines=Deadlines(reset_s=4.0, close_s=2.0))
    end_episode(rig, 0)
    rig.reset_done(0)
    rig.hosts.limits.goes_on(rig.slot(2).group)
    rig.advance(4.0)
    assert len(rig.requests(Op.CANCEL, 2)) == 1
    end_episode(rig, 1)
    assert rig.supervisor.statistics.swaps == 1, "that of env 0"
    rig.reset_done(1)
    assert rig.ready() == [0, 1]


def test_the_reset_of_a_spare_that_fails_is_tried_again_and_is_no_failure_of_an_env() -> None:
    rig = spared(policy=FailurePolicy(max_retry=2, retry_waiting_s=1.0))
    end_episode(rig, 0)
    rig.reset_done(0)
    rig.fail(2, "reset")
    assert rig.slot(2).phase is Phase.PAUSING
    rig.advance(1.0)
    keep(rig)
    statistics = rig.supervisor.statistics
    assert (statistics.spare_failures, dict(statistics.failures_by_env)) == (1, {})
    assert "spare env 2" in str(statistics.latest_failures[0])
    assert list(statistics.moments) == []
    assert rig.supervisor.spares.figures()["spares_ready"] == 1


def test_the_reset_that_had_failed_in_an_adopted_host_is_repaired_in_its_new_place() -> None:
    rig = spared(policy=FailurePolicy(max_retry=2, retry_waiting_s=1.0))
    end_episode(rig, 0)
    rig.reset_done(0)
    end_episode(rig, 1)
    rig.fail(1, "reset")  # the answer to ADOPT
    assert rig.supervisor.statistics.failures_by_env == {1: 1}
    rig.advance(1.0)
    assert not rig.reset_requests(1)[-1].keeps
    rig.reset_done(1)
    assert rig.ready() == [0, 1]


@pytest.mark.parametrize("recover", [True, False])
def test_a_spare_that_fails_again_and_again_is_dropped_and_nothing_is_raised(
    recover: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rig = spared(policy=FailurePolicy(recover=recover, max_failures=1, retry_waiting_s=0.0))
    rig.die(2)
    rig.hello(2)
    assert rig.slot(2).phase is Phase.RESETTING
    with caplog.at_level(logging.ERROR):
        rig.die(2)
    assert "spare env 2 failed 2 times" in caplog.text
    assert "the run goes on without it" in caplog.text
    assert rig.supervisor.repair.fatal is None
    assert rig.supervisor.spares.figures() == {"spare_env_num": 0, "spares_ready": 0}
    rig.run(100.0)
    assert rig.slot(2).host_id is None
    end_episode(rig, 0)
    rig.reset_done(0)
    assert rig.ready() == [0, 1]


def test_failures_of_spares_do_not_count_for_all_envs_together() -> None:
    rig = spared(2, 12, policy=FailurePolicy(max_failures=1, retry_waiting_s=0.0))
    for spare in range(2, 14):
        rig.die(spare)
        rig.hello(spare)
    rig.send(0)
    rig.die(0)
    assert rig.supervisor.repair.fatal is None


def test_what_a_spare_keeps_is_not_handed_out() -> None:
    rig = spared()
    end_episode(rig, 0)
    rig.transport.reply(2, Op.RESET_DONE, ("an observation", {}))
    rig.pump()
    assert rig.supervisor.statistics.spare_failures == 1
    assert rig.slot(2).group.is_ending or rig.slot(2).phase is Phase.STARTING


def test_a_non_finite_observation_of_a_spare_raises_nothing() -> None:
    rig = spared(raise_non_finite=True)
    end_episode(rig, 0)
    rig.fail(2, "reset", kind=FailureKind.NON_FINITE)
    assert rig.supervisor.repair.fatal is None


# -- failures of envs -----------------------------------------------------------------------------


def test_a_spare_takes_the_place_of_an_env_that_dies_in_a_step() -> None:
    rig = spared()
    spare = host(rig, 2)
    rig.send(0)
    rig.die(0)
    assert isinstance(rig.error(0), EnvCrash)
    assert host(rig, 0) == spare
    assert rig.deliver(0)[0].info["abnormal"]
    rig.reset_done(0, "of the spare")
    assert rig.ready() == [0, 1]
    assert rig.slot(0).generation == 1
    assert rig.supervisor.statistics.failures_by_env == {0: 1}
    assert rig.slot(2).phase is Phase.STARTING
    rig.hello(2)
    keep(rig)
    assert rig.supervisor.spares.figures()["spares_ready"] == 1
    assert rig.supervisor.statistics.renewals == 1


def test_a_spare_takes_the_place_of_an_env_that_dies_while_it_is_ready() -> None:
    rig = spared()
    before = rig.obs(0)
    rig.die(0)
    assert rig.ready() == [0, 1]
    rig.reset_done(0, "of the spare")
    assert rig.obs(0) == before
    rig.send(0)
    assert isinstance(rig.error(0), EnvCrash)
    rig.deliver(0)
    assert rig.ready() == [0, 1]
    assert rig.obs(0) == "of the spare"


def test_the_place_of_a_host_that_hangs_is_taken_when_it_is_gone_and_not_before() -> None:
    rig = spared(deadlines=Deadlines(step_s=2.0), kill_takes_s=None)
    hung = host(rig, 0)
    rig.send(0)
    rig.advance(2.0)
    assert rig.transport.killed == [hung]
    assert rig.requests(Op.ADOPT, 0) == []
    rig.die(0)
    assert len(rig.requests(Op.ADOPT, 0)) == 1
    rig.reset_done(0)
    rig.deliver(0)
    assert rig.ready() == [0, 1]


def test_an_env_whose_step_raises_gets_a_spare_and_is_reset_behind_it() -> None:
    rig = spared()
    spare = host(rig, 2)
    rig.send(0)
    rig.fail(0)
    rig.deliver(0)
    assert host(rig, 0) == spare
    assert rig.reset_requests(2)[-1].keeps
    rig.reset_done(0)
    assert rig.ready() == [0, 1]
    assert rig.slot(0).generation == 0


def test_an_env_whose_step_raises_is_renewed_behind_its_spare() -> None:
    rig = spared(policy=FailurePolicy(renew_between_attempts=True))
    rig.send(0)
    rig.fail(0)
    rig.deliver(0)
    assert len(rig.requests(Op.RENEW, 2)) == 1
    rig.hello(2)
    keep(rig)
    rig.reset_done(0)
    assert rig.ready() == [0, 1]
    assert rig.supervisor.spares.figures()["spares_ready"] == 1


def test_an_env_that_cannot_be_reset_gets_a_spare_while_its_host_ends() -> None:
    rig = spared(2, 1)
    rig.reset(0)
    spare = host(rig, 2)
    rig.fail(0, "reset")
    assert host(rig, 0) == spare
    rig.reset_done(0)
    assert rig.ready() == [0, 1]
    assert rig.slot(2).phase is Phase.ENDING


def test_the_death_of_an_env_that_waits_for_its_successor_leaves_one_successor() -> None:
    rig = spared(2, 2)
    rig.send({0: 1, 1: 1})
    rig.stepped(0, done=True)
    rig.die(0)
    assert len(rig.requests(Op.ADOPT, 0)) == 1
    rig.stepped(1)
    rig.deliver(0, 1)
    assert len(rig.requests(Op.ADOPT, 0)) == 1
    rig.reset_done(0)
    assert rig.ready() == [0, 1]


def test_an_env_that_dies_while_it_waits_is_repaired_and_waits_no_more() -> None:
    rig = spared(2, 1)
    rig.die(2)  # there is no spare now
    rig.send({0: 1, 1: 1})
    rig.stepped(0, done=True)
    rig.die(0)
    rig.stepped(1)
    rig.deliver(0, 1)
    assert rig.slot(0).phase is Phase.STARTING
    rig.hello(0)
    rig.reset_done(0)
    assert rig.ready() == [0, 1]


def test_the_death_of_an_adopted_host_is_a_failure_of_the_env() -> None:
    rig = spared()
    end_episode(rig, 0)
    rig.die(0)
    assert rig.supervisor.statistics.failures_by_env == {0: 1}


def test_a_spare_that_fails_at_launch_fails_the_launch() -> None:
    rig = Rig(2, spare_num=1, answer=FakeEnvs())
    rig.start()
    rig.transport.answer = None
    rig.supervisor.begin_episodes()
    rig.fail(2, "reset")
    assert list(rig.supervisor.repair.launch_failures) == [2]


# -- explicit resets and seeds --------------------------------------------------------------------


def test_an_explicit_reset_resets_the_env_that_is_there() -> None:
    rig = spared()
    before = host(rig, 0)
    rig.reset(0)
    assert host(rig, 0) == before
    rig.reset_done(0)
    assert rig.supervisor.statistics.swaps == 0


def test_an_explicit_reset_of_an_env_that_waits_for_its_successor_resets_it() -> None:
    rig = spared()
    before = host(rig, 0)
    rig.send({0: 1, 1: 1})
    rig.stepped(0, done=True)
    rig.reset(0)
    rig.stepped(1)
    rig.deliver(1)
    assert host(rig, 0) == before
    assert len(rig.requests(Op.RESET, 0)) == 2


def test_an_exact_seed_is_for_the_env_and_no_spare_takes_its_place() -> None:
    rig = spared()
    rig.slot(0).new_seed = 99
    rig.reset(0)
    rig.die(0)
    rig.hello(0)
    assert rig.reset_requests(0)[-1].seed == 99


def test_new_seeds_have_spares_reset_anew_in_their_order() -> None:
    rig = spared(2, 2)
    first, second = host(rig, 2), host(rig, 3)
    end_episode(rig, 0)
    rig.reset_done(0)  # now 3 comes first, and 2 is being reset
    for spare in rig.supervisor.spares.envs:
        spare.new_seed = 70 + spare.env_id
    rig.supervisor.resets.begin({})
    assert [rig.reset_requests(i)[-1].seed for i in (2, 3)] == [72, 73]
    stale, newest = (m.request_id for m in rig.requests(Op.RESET, 2)[-2:])
    here = host(rig, 2)
    assert here != first
    rig.transport.arrive(here, Message(Op.RESET_DONE, 2, 0, stale, None))
    rig.pump()
    assert rig.slot(2).phase is Phase.RESETTING
    rig.transport.arrive(here, Message(Op.RESET_DONE, 2, 0, newest, None))
    keep(rig, 3)
    assert rig.supervisor.spares.figures()["spares_ready"] == 2
    end_episode(rig, 1)
    assert host(rig, 1) == here
    assert host(rig, 3) == second


def test_the_seed_of_a_reset_that_was_taken_over_is_not_used_again() -> None:
    rig = spared()
    rig.slot(2).new_seed = 72
    rig.supervisor.resets.begin({})
    end_episode(rig, 0)  # the spare is at the reset with that seed
    assert [request.seed for request in rig.reset_requests(2)] == [None, 72, None]
    assert rig.slot(2).base_seed == 72


def test_the_derived_seed_of_a_renewed_spare_is_not_used_again() -> None:
    rig = Rig(2, spare_num=1).launch(seeds={2: 7})
    rig.die(2)
    rig.hello(2)
    end_episode(rig, 0)
    first, derived, later = (request.seed for request in rig.reset_requests(2))
    assert first == 7
    assert derived == derived_seed(7, 2, generation=1, episode=1)
    assert later is None


# -- what envs were told --------------------------------------------------------------------------


def test_attributes_set_in_all_envs_are_set_in_spares_and_others_keep_spares_away() -> None:
    rig = spared(2, 1)
    supervisor = rig.supervisor
    shared = ("speed", 2)
    supervisor.repeat([0, 1], Op.SET_ATTR, [shared, shared])
    assert [m.payload for m in rig.requests(Op.SET_ATTR, 2)] == [shared]
    supervisor.repeat([0], Op.SET_ATTR, [("speed", 3)])
    end_episode(rig, 0)
    assert rig.requests(Op.ADOPT, 0) == []
    end_episode(rig, 1)
    assert len(rig.requests(Op.ADOPT, 1)) == 1


def test_close_leaves_nothing_that_counts() -> None:
    rig = spared()
    end_episode(rig, 0)
    rig.engine.close(0.0)
    assert rig.supervisor.table.env_states() == (EnvState.VOID,) * 2
