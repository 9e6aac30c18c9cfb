"""Small promises of the core that other tests take for granted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from envmgr.core import EnvTable, Phase
from envmgr.core.collect import by_env_id, ends_of
from envmgr.core.engine import LOOK_EVERY_S, Engine
from envmgr.core.launching import describe_first, preload
from envmgr.core.statistics import Moment, Tracer
from envmgr.env.batch_specs import Batch
from envmgr.errors import EnvFailure, EnvRaised
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy
from envmgr.transport.base import HostDied
from envmgr.types import EnvTimestep, Once
from envmgr.wire.block import RING_EACH
from envmgr.wire.messages import AfterStep, FailureKind, Op, SavedEnv
from tests.fake_hosts import FakeEnvs
from tests.fakes import FakeClock, FakeTransport
from tests.rig import Rig

_OTHER_SPACE = "other"


def table_of(*phases: Phase, batches: Sequence[Batch] = ()) -> EnvTable:
    """Return a table of envs in RUN whose hosts are in these phases."""
    table = EnvTable(len(phases))
    table.join_rows(batches)
    table.phases.column[:] = bytes(phases)
    table.states.column[:] = bytes([EnvState.RUN]) * len(phases)
    return table


# -- launch ---------------------------------------------------------------------------------------


class Preparing(FakeTransport):
    """Has something to import, which takes three looks."""

    @property
    def is_prepared(self) -> bool:
        return len(self.polls) >= 3


def test_an_import_is_waited_for_without_spinning() -> None:
    rig = Rig(transport=Preparing)
    preload(rig.engine, [lambda: None])
    assert all(0.0 < (poll.timeout_s or 0.0) <= 1.0 for poll in rig.transport.polls)


def test_the_first_env_says_what_it_is_before_the_others_are_started() -> None:
    rig = Rig(2, answer=FakeEnvs())
    describe_first(rig.engine)
    assert list(rig.supervisor.descriptions) == [0]
    assert len(rig.transport.hosts) == 1


# -- the table ------------------------------------------------------------------------------------


def test_rows_have_arrived_when_none_of_their_batch_is_missing() -> None:
    posted = (Phase.POSTED,) * 4
    table = table_of(*posted, batches=[Batch(0, 2, False)])
    assert table.complete([0, 1, 2]) == [0, 1, 2], "3 is late, and is no row of it"
    assert table.complete([0, 2, 3]) == [2, 3]


def test_params_for_one_reset_are_gone_after_it() -> None:
    table = table_of(Phase.RESETTING, Phase.RESETTING)
    table.reset_params.update({0: Once(level=3), 1: {"level": 4}})
    table.observed.began = lambda places: None  # type: ignore[method-assign]
    table.episodes_begun({0: 0, 1: 0}, {})
    assert table.reset_params == {1: {"level": 4}}


def test_who_lets_go_of_the_table_is_shown_nothing_more() -> None:
    table = table_of(Phase.IDLE)
    env = table.envs[0]
    env.failed_while_ready = EnvFailure("it died", env_id=0, during="idle")
    env.timestep, env.awaits_reset, env.fresh = EnvTimestep(0, 0.0, True, {}), True, (0, {})
    table.unexecuted.add(0)
    table.clear()
    assert (env.failed_while_ready, env.timestep, env.awaits_reset) == (None, None, False)
    assert (env.owed, env.fresh, env.obs) == (False, None, None)


@pytest.mark.parametrize(("n_under_way", "gives"), [(1, False), (2, True), (3, True)])
def test_a_pool_gives_something_when_a_batch_of_it_is_under_way(
    n_under_way: int, gives: bool
) -> None:
    phases = [Phase.POSTED] * n_under_way + [Phase.IDLE] * (4 - n_under_way)
    table = table_of(*phases, Phase.POSTED, batches=[Batch(0, 4, True, batch_size=2)])
    assert table.may_go_on([4]) is gives
    assert table.may_go_on([]), "of the env that is in no pool"


# -- steps ----------------------------------------------------------------------------------------


def test_arrays_for_what_is_no_selection_or_not_ready_are_not_posted() -> None:
    rig = Rig(2, has_block=True).launch()
    submitter, actions = rig.supervisor.submitter, np.ones(2, np.int64)
    assert submitter.rows([0, 0], actions, RING_EACH) is None
    assert submitter.rows([1], actions[:1], RING_EACH) is not None
    assert submitter.rows([0, 1], actions, RING_EACH) is None
    assert rig.phase(0) is Phase.IDLE


def reply(
    rig: Rig, env_id: int, done: bool, after: AfterStep = AfterStep.NOTHING, **info: Any
) -> None:
    """Have a timestep arrive, which nobody looks at yet."""
    rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, done, info, after))


def test_a_step_that_is_looked_after_by_itself_is_left_for_that() -> None:
    rig = Rig(3, has_block=True).launch()
    selection = rig.send({0: 1, 1: 1, 2: 1})
    assert selection is not None
    for env_id in range(3):
        reply(rig, env_id, done=False)
    rig.hosts.look_after(rig.hosts.envs[1])
    collector = rig.supervisor.collector
    assert collector.take(selection) is None
    assert collector.left == 1
    rig.supervisor.apply_alone()
    assert list(rig.hand_out(collector.take(selection))) == [0, 1, 2]


def test_arrays_end_episodes_whose_hosts_begin_no_other() -> None:
    rig = Rig(2, has_block=True, auto_reset=False).launch()
    selection = rig.send({0: 1, 1: 1})
    assert selection is not None
    reply(rig, 0, done=True)
    reply(rig, 1, done=False)
    collector = rig.supervisor.collector
    taken = collector.take(selection)
    assert taken is not None
    assert collector.arrays(taken) is not None
    assert rig.supervisor.table.env_states() == (EnvState.NEED_RESET, EnvState.RUN)


@pytest.mark.parametrize("after", [AfterStep.RESETS, AfterStep.RESETS_IN_NEXT_STEP])
def test_of_ends_without_infos_no_details_are_read(after: AfterStep) -> None:
    rig = Rig(2, has_block=True, batches=(Batch(0, 2, False),)).launch()
    selection = rig.send({0: 1, 1: 1})
    assert selection is not None
    reply(rig, 0, True, after, terminated=True, truncated=False)
    reply(rig, 1, False, terminated=False, truncated=False)
    taken = rig.supervisor.collector.take(selection)
    assert taken is not None
    assert list(taken.remarks.specials) == [0]
    assert taken.remarks.details == {}


def test_what_ordinary_replies_say_is_read_once() -> None:
    rig = Rig(2, has_block=True).launch()
    selection = rig.send({0: 1, 1: 1})
    assert selection is not None
    for env_id in range(2):
        reply(rig, env_id, done=False)
    assert rig.supervisor.collector.take(selection) is not None
    assert len(selection.ordinary) == 1


@pytest.mark.parametrize("info", [{}, {"truncated": True}, {"terminated": True, "truncated": True}])
def test_arrays_tell_how_an_episode_ended_as_its_timestep_does(info: dict[str, Any]) -> None:
    rig = Rig(2, has_block=True).launch()
    selection = rig.send({0: 1, 1: 1})
    assert selection is not None
    reply(rig, 0, done=False)
    reply(rig, 1, done=True, **info)
    taken = rig.supervisor.collector.take(selection)
    assert taken is not None
    batch = rig.supervisor.collector.arrays(taken)
    assert batch is not None
    terminated, truncated = ends_of(True, info)
    assert batch.terminated.tolist() == [False, terminated]
    assert batch.truncated.tolist() == [False, truncated]
    assert [timestep.done for timestep in by_env_id(batch).values()] == [False, True]


def test_a_malformed_reply_is_found_while_others_are_awaited() -> None:
    rig = Rig(2, has_block=True).launch()
    rig.send({0: 1, 1: 1})
    collector = rig.supervisor.collector
    reply(rig, 0, done=False)
    assert not collector.finds_malformed()
    block = rig.hosts.block
    assert block is not None
    block.flags[0] = 0x000F  # no place for steps
    assert collector.finds_malformed() is True
    assert collector.left == 0


# -- hosts and failures ---------------------------------------------------------------------------


def test_a_host_that_dies_is_replaced_at_once_where_nothing_is_to_be_waited_for() -> None:
    rig = Rig(policy=FailurePolicy(retry_waiting_s=0.0)).launch()
    rig.send(0)
    env = rig.hosts.envs[0]
    rig.supervisor.handle(env.host_id or 0, HostDied(-9))
    assert env.phase is Phase.STARTING
    assert not env.has_plan, "of its resets the new one knows nothing"


def test_who_loses_its_host_by_a_neighbour_is_noted_too() -> None:
    rig = Rig(3, num_workers=1).launch()
    rig.send(1)
    rig.die(1)
    assert sorted(rig.supervisor.statistics.moments) == [
        Moment(env_id, 0, "failed", rig.clock()) for env_id in range(3)
    ]


def test_the_neighbours_of_an_env_with_other_spaces_are_not_named() -> None:
    rig = Rig(2, num_workers=1, has_block=False).launch()
    rig.send(0)
    rig.fail(0, kind=FailureKind.EXITED)
    rig.hello(0, space=_OTHER_SPACE)
    (failure,) = [x for x in rig.supervisor.statistics.latest_failures if "spaces" in str(x)]
    assert "shared" not in str(failure)


def test_a_saved_state_is_resumed_from_in_its_episode_only() -> None:
    rig = Rig(2).launch()
    restorations = rig.supervisor._episodes.restorations
    for env in rig.supervisor.envs:
        restorations.saved[env.env_id] = SavedEnv(b"", None, {}, episode=env.episode + env.env_id)
        restorations.resume(env)
    assert list(restorations.due) == [0]
    assert not restorations.saved


def test_a_request_is_late_though_its_host_goes_on_with_steps_of_others() -> None:
    limits = Deadlines(step_s=2.0, reset_s=2.0)
    rig = Rig(2, num_workers=1, has_block=True, deadlines=limits).launch()
    rig.reset(1)
    for _ in range(40):  # quarters of a second
        rig.send(0)
        rig.transport.reply(0, Op.BEGAN)
        rig.advance(0.25)
        if rig.transport.killed:
            break
        reply(rig, 0, done=False)
        rig.deliver(0)
    (failure,) = rig.supervisor.statistics.latest_failures
    assert (failure.env_id, failure.during) == (1, "reset")


def test_what_a_host_has_sent_before_a_malformed_reply_counts() -> None:
    rig = Rig(2, num_workers=1, has_block=True).launch()
    rig.send(1)
    selection = rig.send(0)
    assert selection is not None
    reply(rig, 0, done=False)
    block = rig.hosts.block
    assert block is not None
    block.flags[0] = 0x000F  # no place for steps
    rig.transport.fail(1)
    assert list(rig.hand_out(rig.gather.exactly(selection))) == [0]
    assert isinstance(rig.error(1), EnvRaised)


def test_nobody_sleeps_longer_than_until_the_next_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(has_block=True, deadlines=Deadlines(step_s=LOOK_EVERY_S / 4)).launch()
    rig.send(0)
    slept: list[float] = []
    monkeypatch.setattr(rig.transport, "await_ring", slept.append)
    assert not rig.engine.see_to(lambda: False)
    assert slept == [LOOK_EVERY_S / 4]


# -- spares ---------------------------------------------------------------------------------------


def test_who_rings_for_an_env_rings_for_the_host_that_it_has_now() -> None:
    rig = Rig(2, spare_num=1, has_block=True).launch()
    before = rig.selection([0]).hosts
    rig.send(0)
    rig.stepped(0, done=True)
    rig.deliver(0)
    assert rig.selection([0]).hosts == [rig.slot(0).group.index] != before


def test_explicit_resets_go_by_message_where_there_are_spares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for spare_num, n_messages in ((0, 0), (1, 1)):
        rig = Rig(1, spare_num=spare_num, has_block=True).launch()
        sent: list[Any] = []
        monkeypatch.setattr(rig.transport, "send", lambda *what, to=sent: to.append(what))
        rig.reset(0)
        assert len(sent) == n_messages


def test_a_timestep_that_waits_for_a_spare_gets_it_from_a_mere_look() -> None:
    rig = Rig(2, spare_num=1, has_block=False, reset_inplace=True).launch()
    rig.send({0: 1, 1: 1})
    reply(rig, 0, done=True)
    rig.engine.collect()
    assert rig.requests(Op.ADOPT, 0) == []
    reply(rig, 1, done=False)
    rig.engine.collect()
    assert len(rig.requests(Op.ADOPT, 0)) == 1


# -- what is noted --------------------------------------------------------------------------------


def test_what_is_under_way_is_noted_up_to_now() -> None:
    clock = FakeClock(8.0)
    tracer = Tracer(clock, 10)
    tracer.changed(1, Phase.STARTING)
    clock.advance(2.0)
    assert tracer.notes(2, None, []).phases == [(1, "construction", 8.0, 10.0)]


def test_traced_calls_are_noted_by_their_names() -> None:
    rig = Rig().launch()
    rig.hosts.tracer = tracer = Tracer(rig.clock, 10)
    engine = Engine(rig.supervisor, rig.transport, rig.clock, background=False)
    began = rig.clock()
    with engine.calling:
        rig.clock.advance(2.0)
    ((code, *times),) = tracer.calls
    assert code.co_name == "test_traced_calls_are_noted_by_their_names"
    assert times == [began, began + 2.0]
