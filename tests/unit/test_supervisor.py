"""The supervisor while nothing fails: launch, steps, episodes, resets, calls, seeds, memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr.core import Phase
from envmgr.core.submit import submit_calls
from envmgr.core.table import NEVER
from envmgr.errors import ActionError, IllegalTransitionError, LaunchError, SpaceMismatchError
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, GatherPolicy
from envmgr.seeding import derived_seed
from envmgr.transport.base import HostDied
from envmgr.wire.arenas import Placement, place_arrays
from envmgr.wire.block import RING_EACH
from envmgr.wire.frames import FrameError
from envmgr.wire.messages import (
    UNANSWERED,
    AfterStep,
    Attribute,
    EpisodePlan,
    FailureKind,
    Message,
    Op,
    ResetRequest,
)
from tests.fake_hosts import FakeEnvs, description
from tests.rig import Rig, over_routes

pytestmark = over_routes

FLOATS = Box(-1, 1, (2,), np.float32)
INF = float("inf")


# -- launch ---------------------------------------------------------------------------------------


def test_launching_starts_a_host_for_each_env_and_resets_all() -> None:
    rig = Rig(3)
    rig.supervisor.start_hosts(range(3))
    assert rig.supervisor.table.env_states() == (EnvState.INIT,) * 3
    hosts = rig.transport.hosts
    assert [hosts[i].env_id for i in sorted(hosts)] == [0, 1, 2]
    assert [slot.phase for slot in rig.supervisor.envs] == [Phase.STARTING] * 3
    for env_id in (2, 0, 1):
        rig.hello(env_id)
    assert [slot.phase for slot in rig.supervisor.envs] == [Phase.IDLE] * 3
    assert rig.supervisor.table.env_states() == (EnvState.INIT,) * 3
    rig.supervisor.place_observations(same_spaces=True)
    rig.supervisor.begin_episodes()
    assert rig.supervisor.table.env_states() == (EnvState.RESET,) * 3
    rig.reset_done(1, "first of 1", level=3)
    assert rig.ready() == [1]
    assert rig.obs(1) == "first of 1"
    assert rig.slot(1).reset_info == {"level": 3}
    rig.reset_done(0)
    rig.reset_done(2)
    assert rig.ready() == [0, 1, 2]


def test_a_host_that_was_started_early_is_not_started_again() -> None:
    rig = Rig(2, answer=FakeEnvs())
    rig.supervisor.start_hosts([0])
    rig.pump()
    assert rig.supervisor.table.env_states() == (EnvState.INIT, EnvState.VOID)
    rig.supervisor.start_hosts(range(2))
    rig.pump()
    assert len(rig.transport.hosts) == 2
    assert rig.supervisor.table.env_states() == (EnvState.INIT, EnvState.INIT)


def test_the_first_reset_carries_params_seed_and_plan() -> None:
    rig = Rig(2, episode_num=3).launch(seeds={0: 7}, params={1: {"level": 3}})
    assert rig.reset_requests(0) == [ResetRequest({}, 7, None, EpisodePlan(True, 2, {}), episode=1)]
    assert rig.reset_requests(1) == [
        ResetRequest({"level": 3}, None, None, EpisodePlan(True, 2, {"level": 3}), episode=1)
    ]


@pytest.mark.parametrize(
    ("spaces", "text"),
    [
        ((FLOATS, None), "env 1 has observation_space Box(0.0, 1.0, (2,), float32), env 0 has"),
        ((None, Discrete(2)), "env 1 has action_space Discrete(2), env 0 has Discrete(3)"),
    ],
)
def test_envs_of_one_manager_have_equal_spaces(spaces: Any, text: str) -> None:
    rig = Rig(2)
    rig.supervisor.start_hosts(range(2))
    other = description(spaces[0] and Box(0, 1, (2,), np.float32), spaces[1])
    rig.transport.reply(0, Op.HELLO, description(spaces[0], spaces[1] and Discrete(3)))
    rig.transport.reply(1, Op.HELLO, other)
    rig.pump()
    with pytest.raises(SpaceMismatchError) as caught:
        rig.supervisor.place_observations(same_spaces=True)
    assert text in str(caught.value)
    rig.supervisor.place_observations(same_spaces=False)


def test_envs_may_have_other_spaces_where_the_user_says_so() -> None:
    rig = Rig(2, has_memory=True)
    rig.supervisor.start_hosts(range(2))
    rig.transport.reply(0, Op.HELLO, description(FLOATS))
    rig.transport.reply(1, Op.HELLO, description(Discrete(4)))
    rig.pump()
    rig.supervisor.place_observations(same_spaces=False)
    rig.supervisor.begin_episodes()
    placements = [rig.requests(Op.ATTACH, i)[0].payload for i in (0, 1)]
    assert placements[0].layout != placements[1].layout
    rig.reset_done(0, 0)
    rig.reset_done(1, 0)
    assert rig.obs(0).shape == (2,)
    assert rig.obs(1) == 0


def test_memory_that_cannot_be_had_fails_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(2, answer=FakeEnvs(observation_space=FLOATS))
    rig.supervisor.start_hosts(range(2))
    rig.pump()

    def place(nbytes: int) -> Any:
        raise OSError(28, "no space left")

    monkeypatch.setattr(rig.transport, "place", place)
    with pytest.raises(LaunchError, match=r"MiB of shared memory .* of 2 envs .*no space left"):
        rig.supervisor.place_observations(same_spaces=True)


# -- memory ---------------------------------------------------------------------------------------


def write(rig: Rig, env_id: int, slot: int, values: Any) -> None:
    """Write an observation as the host of an env does."""
    placement: Placement = rig.requests(Op.ATTACH, env_id)[-1].payload
    place_arrays(rig.transport.memory, placement)[0][slot] = values


def launched_with_memory(**rules: Any) -> Rig:
    rig = Rig(2, has_memory=True, **rules)
    rig.transport.answer = FakeEnvs(observation_space=FLOATS)
    rig.start()
    rig.transport.answer = None
    rig.supervisor.begin_episodes()
    for env_id in (0, 1):
        slot = rig.requests(Op.ATTACH, env_id)[-1].payload.reset_place
        write(rig, env_id, slot, [env_id, 0.5])
        rig.reset_done(env_id, slot)
    rig.supervisor.table.launching = False
    return rig


def test_every_env_learns_its_place_before_its_first_reset() -> None:
    rig = launched_with_memory()
    for env_id in (0, 1):
        ops = [m.op for _, m in rig.transport.sent if m.env_id == env_id]
        assert ops[:2] == [Op.ATTACH, Op.RESET]
    assert rig.obs(0).tolist() == [0, 0.5]
    assert rig.obs(1).tolist() == [1, 0.5]


def test_observations_are_read_from_the_slot_that_the_reply_names() -> None:
    rig = launched_with_memory()
    write(rig, 1, 1, [7, 8])
    rig.send(1)
    rig.stepped(1, 1)
    assert rig.deliver(1)[1].obs.tolist() == [7, 8]
    write(rig, 1, 1, [0, 0])
    assert rig.obs(1).tolist() == [7, 8]  # it was copied


def test_views_are_handed_out_where_the_user_wants_no_copies() -> None:
    rig = launched_with_memory(copy_on_get=False)
    write(rig, 1, 1, [7, 8])
    rig.send(1)
    rig.stepped(1, 1)
    obs = rig.deliver(1)[1].obs
    write(rig, 1, 1, [0, 0])
    assert obs.tolist() == [0, 0]


def test_a_renewed_env_goes_on_with_the_slot_after_the_last_one_that_was_read() -> None:
    rig = launched_with_memory(copy_on_get=False)
    first = rig.requests(Op.ATTACH, 1)[0].payload
    assert (first.step_place, first.reset_place) == (0, 3)
    for step in range(5):  # round the slots, to slot 1
        write(rig, 1, step % 3, [step, 0])
        rig.send(1)
        rig.stepped(1, step % 3)
        view = rig.deliver(1)[1].obs
    rig.die(1)
    rig.hello(1, FLOATS)
    placement = rig.requests(Op.ATTACH, 1)[-1].payload
    assert (placement.step_place, placement.reset_place) == (2, 4)
    write(rig, 1, placement.step_place, [99, 99])
    assert view.tolist() == [4, 0]


def test_nothing_holds_the_memory_after_the_end() -> None:
    rig = launched_with_memory()
    memory = rig.transport.memory
    assert memory is not None
    rig.supervisor.stop()
    owner = memory.obj
    assert isinstance(owner, bytearray)
    memory.release()
    rig.transport.memory = None
    owner.clear()  # BufferError if a reader still held it


def test_spaces_without_layout_need_no_memory() -> None:
    rig = Rig(2, has_memory=True).launch()
    assert rig.transport.memory is not None
    assert len(rig.transport.memory) == 0
    assert rig.requests(Op.ATTACH) == []


# -- steps ----------------------------------------------------------------------------------------


def test_a_step_is_sent_answered_and_delivered_once() -> None:
    rig = Rig(2).launch()
    rig.send({1: "left"})
    (request,) = rig.requests(Op.STEP, 1)
    assert request.payload == "left"
    assert request[1:3] == (1, 0)
    slot = rig.slot(1)
    assert (slot.phase, slot.owed, slot.timestep) == (Phase.STEPPING, True, None)
    assert rig.ready() == [0]
    assert rig.supervisor.table.owed_ids() == [1]
    assert rig.deliver() == {}
    rig.stepped(1, "next", reward=0.5, info=1)
    assert (slot.phase, slot.owed) == (Phase.IDLE, True)
    assert rig.ready() == [0]  # not before its timestep has been delivered
    delivered = rig.deliver()
    assert delivered == {1: ("next", 0.5, False, {"info": 1})}
    assert rig.ready() == [0, 1]
    assert rig.supervisor.table.owed_ids() == []
    assert rig.deliver() == {}
    assert rig.obs(slot.env_id) == "next"
    assert rig.identity_holds()
    assert rig.supervisor.statistics.timesteps == 1


def test_timesteps_are_delivered_in_the_order_that_was_asked_for() -> None:
    rig = Rig(3).launch()
    rig.send({0: 1, 1: 1, 2: 1})
    for env_id in (2, 0):
        rig.stepped(env_id)
    assert list(rig.deliver(2, 1, 0)) == [2, 0]
    rig.stepped(1)
    assert list(rig.deliver(0, 1)) == [1]


def test_the_timesteps_observation_is_the_one_that_is_ready() -> None:
    rig = Rig(has_block=False).launch()
    obs = np.zeros(2)
    rig.send(0)
    rig.stepped(0, obs)
    assert rig.deliver(0)[0].obs is rig.obs() is obs


def test_requests_have_rising_ids_of_their_own() -> None:
    rig = Rig(2).launch()
    for _ in range(3):
        rig.send({0: 1, 1: 1})
        rig.stepped(0)
        rig.stepped(1)
        rig.deliver()
    ids = [m.request_id for _, m in rig.transport.sent if m.request_id != UNANSWERED]
    assert ids == sorted(ids)
    named = [(m.env_id, m.request_id) for _, m in rig.transport.sent if m.op == Op.STEP]
    assert len(named) == len(set(named)) == 6


def test_a_batch_that_cannot_be_prepared_whole_sends_nothing() -> None:
    rig = Rig(2).launch()
    rig.transport.refused[1] = FrameError("no")
    sent = len(rig.transport.sent)
    with pytest.raises(ActionError):
        rig.supervisor.submitter.checked({0: 1, 1: 1}, RING_EACH, None)
    assert len(rig.transport.sent) == sent
    assert rig.ready() == [0, 1]


# -- the end of an episode ------------------------------------------------------------------------


def test_the_host_begins_the_next_episode_by_itself() -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.stepped(0, "terminal", done=True, after=AfterStep.RESETS)
    assert rig.state() is EnvState.RESET
    assert len(rig.reset_requests()) == 1  # nobody asks it to
    assert rig.deliver(0)[0][:3] == ("terminal", 1.0, True)
    assert rig.ready() == []
    rig.reset_done(0, "first", level=2)
    assert rig.ready() == [0]
    assert rig.obs() == "first"
    assert rig.slot().reset_info == {"level": 2}
    assert rig.supervisor.statistics.episodes == 1
    assert rig.supervisor.statistics.resets == 2


def test_a_first_observation_never_replaces_a_terminal_one_that_waits() -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.stepped(0, "terminal", done=True, after=AfterStep.RESETS)
    rig.reset_done(0, "first")
    assert rig.ready() == []  # pending still
    assert rig.deliver(0)[0].obs == "terminal"
    assert rig.ready() == [0]
    assert rig.obs() == "first"


def test_a_host_that_does_not_reset_by_itself_is_told_to() -> None:
    rig = Rig().launch(params={0: {"level": 3}})
    rig.send(0)
    rig.stepped(done=True, after=AfterStep.NOTHING)
    assert rig.state() is EnvState.RESET
    assert rig.reset_requests()[-1] == ResetRequest(
        {"level": 3}, None, None, EpisodePlan(True, INF, {"level": 3}), episode=2
    )


def test_in_place_the_timestep_waits_for_the_reset() -> None:
    rig = Rig(reset_inplace=True).launch()
    rig.send(0)
    rig.stepped(0, "terminal", done=True, after=AfterStep.RESETS)
    assert rig.slot().timestep is not None
    assert not rig.has_arrived()
    assert rig.deliver(0) == {}
    rig.reset_done(0, "first")
    assert rig.deliver(0)[0].obs == "terminal"
    assert rig.ready() == [0]
    assert rig.obs() == "first"


@pytest.mark.parametrize("deadlines", [Deadlines(), Deadlines(reset_s=9.0)], ids=["", "limited"])
@pytest.mark.parametrize("info", [{}, {"level": 3}, {"levels": [3]}], ids=["", "some", "odd"])
def test_in_place_an_env_is_ready_with_its_timestep_whatever_its_reset_says(
    info: dict[str, Any], deadlines: Deadlines
) -> None:
    rig = Rig(reset_inplace=True, deadlines=deadlines).launch()
    rig.send(0)
    rig.transport.reply(0, Op.STEPPED, ("terminal", 1.0, True, {"n": 1}, AfterStep.RESETS))
    rig.transport.reply(0, Op.RESET_DONE, ("first", info))
    assert rig.exactly(0)[0].obs == "terminal"
    assert (rig.ready(), rig.obs(), rig.slot().reset_info) == ([0], "first", info)


@pytest.mark.parametrize("after", [AfterStep.NOTHING, AfterStep.WANTS_RECYCLING])
def test_in_place_the_timestep_waits_for_a_reset_that_its_host_leaves_to_others(
    after: AfterStep,
) -> None:
    rig = Rig(reset_inplace=True).launch()
    rig.send(0)
    rig.transport.reply(0, Op.STEPPED, ("terminal", 1.0, True, {}, after))
    at_once = GatherPolicy(1, 0.0)
    found = rig.gather.some(at_once, deadline=rig.clock(), exactly=True)
    assert rig.hand_out(found) == {}
    if after is AfterStep.WANTS_RECYCLING:
        rig.die(exit_status=0)
        rig.hello()
    rig.reset_done(0, "first")
    assert rig.deliver(0)[0].obs == "terminal"
    assert rig.obs() == "first"
    assert not rig.slot().awaits_reset


def test_in_place_only_the_end_of_an_episode_waits() -> None:
    rig = Rig(reset_inplace=True).launch()
    rig.send(0)
    rig.stepped()
    assert list(rig.deliver(0)) == [0]


def test_without_auto_reset_an_ended_env_waits_for_its_user() -> None:
    rig = Rig(auto_reset=False).launch()
    assert rig.reset_requests()[-1].plan.auto_reset is False
    rig.send(0)
    rig.stepped(0, done=True)
    assert rig.state() is EnvState.NEED_RESET
    assert rig.deliver(0)[0].done
    assert rig.ready() == []
    assert rig.slot().phase is Phase.IDLE
    rig.reset(0, {"level": 3})
    assert rig.reset_requests()[-1].params == {"level": 3}
    rig.reset_done()
    assert rig.ready() == [0]


def test_an_env_is_done_when_its_episodes_are_spent() -> None:
    rig = Rig(episode_num=2).launch()
    assert rig.reset_requests()[-1].plan.episodes_left == 1
    rig.send(0)
    rig.stepped(done=True, after=AfterStep.RESETS)
    rig.reset_done()
    rig.deliver(0)
    rig.send(0)
    rig.stepped(0, "terminal", done=True)
    assert rig.state() is EnvState.DONE
    assert rig.slot().phase is Phase.IDLE
    assert rig.deliver(0)[0].obs == "terminal"
    assert rig.ready() == []


def test_a_done_env_that_is_reset_has_a_whole_new_budget() -> None:
    rig = Rig(episode_num=2).launch()
    for _ in range(2):
        rig.send(0)
        rig.stepped(done=True, after=AfterStep.RESETS if rig.slot().episodes_done == 0 else 0)
        if rig.slot().phase is Phase.RESETTING:
            rig.reset_done()
        rig.deliver(0)
    assert rig.state() is EnvState.DONE
    rig.reset()
    assert rig.reset_requests()[-1].plan.episodes_left == 1
    assert rig.slot().episodes_done == 0
    rig.reset_done()
    assert rig.ready() == [0]


def test_an_explicit_reset_in_an_episode_spends_nothing_of_the_budget() -> None:
    rig = Rig(episode_num=2).launch()
    rig.reset()
    assert rig.reset_requests()[-1].plan.episodes_left == 1
    rig.reset_done()
    rig.send(0)
    rig.stepped(done=True, after=AfterStep.RESETS)
    assert rig.state() is EnvState.RESET


def test_without_auto_reset_the_last_episode_ends_in_done() -> None:
    rig = Rig(episode_num=1, auto_reset=False).launch()
    rig.send(0)
    rig.stepped(done=True)
    assert rig.state() is EnvState.DONE


# -- recycling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("auto_reset", [True, False])
def test_a_worker_that_has_reached_a_limit_is_replaced_at_the_episodes_end(
    auto_reset: bool,
) -> None:
    rig = Rig(auto_reset=auto_reset).launch(seeds={0: 7})
    old = rig.transport.host_of(0)
    rig.send(0)
    rig.stepped(0, "terminal", done=True, after=AfterStep.WANTS_RECYCLING)
    assert rig.state() is (EnvState.RESET if auto_reset else EnvState.NEED_RESET)
    assert rig.deliver(0)[0].obs == "terminal"
    assert old.requests(Op.CLOSE)
    assert not old.killed
    assert rig.slot().phase is Phase.ENDING
    assert len(rig.transport.hosts) == 1  # not before the old one is gone
    rig.transport.reply(0, Op.CLOSED)
    rig.pump()
    assert len(rig.transport.hosts) == 1
    rig.die(0, exit_status=0)
    new = rig.transport.host_of(0)
    assert new is not old
    assert new.generation_of(0) == 1
    rig.hello()
    if auto_reset:
        assert rig.reset_requests()[-1].seed == derived_seed(7, 0, 1, 1)
        rig.reset_done()
        assert rig.ready() == [0]
    else:
        assert rig.state() is EnvState.NEED_RESET
        assert rig.slot().phase is Phase.IDLE
    statistics = rig.supervisor.statistics
    assert (statistics.recycled, statistics.renewals) == (1, 1)
    assert statistics.latest_failures == type(statistics.latest_failures)(maxlen=100)


def test_a_worker_that_does_not_end_when_asked_is_killed_after_its_grace() -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.stepped(done=True, after=AfterStep.WANTS_RECYCLING)
    host = rig.transport.host_of(0)
    rig.advance(4.75)
    assert not host.killed
    rig.advance(0.25)
    assert host.killed
    rig.pump()
    assert rig.transport.host_of(0) is not host
    assert rig.supervisor.statistics.failures_by_env == {}


def test_in_place_the_terminal_timestep_waits_for_the_new_worker_too() -> None:
    rig = Rig(reset_inplace=True).launch()
    rig.send(0)
    rig.stepped(0, "terminal", done=True, after=AfterStep.WANTS_RECYCLING)
    rig.die(0, exit_status=0)
    rig.hello()
    assert rig.deliver(0) == {}
    rig.reset_done(0, "first")
    assert rig.deliver(0)[0].obs == "terminal"
    assert rig.obs() == "first"


def test_a_done_env_is_not_recycled() -> None:
    rig = Rig(episode_num=1).launch()
    rig.send(0)
    rig.stepped(done=True, after=AfterStep.WANTS_RECYCLING)
    assert rig.state() is EnvState.DONE
    assert rig.slot().phase is Phase.IDLE
    assert rig.supervisor.statistics.recycled == 0


# -- explicit resets ------------------------------------------------------------------------------


def test_params_are_kept_for_later_resets_until_they_are_cleared() -> None:
    rig = Rig().launch(params={0: {"level": 1}})
    expected = [{"level": 1}]
    given: list[Any] = [None, {"level": 2}, None, {}, None]
    for params, found in zip(
        given, [{"level": 1}, {"level": 2}, {"level": 2}, {}, {}], strict=True
    ):
        rig.reset(0, params)
        rig.reset_done()
        expected.append(found)
    assert [request.params for request in rig.reset_requests()] == expected
    assert [request.plan.params for request in rig.reset_requests()] == expected


def test_the_callers_dict_of_params_may_be_changed_afterwards() -> None:
    rig = Rig().launch()
    params = {"level": 1}
    rig.reset(0, params)
    params["level"] = 2
    rig.reset_done()
    rig.reset()
    assert rig.reset_requests()[-1].params == {"level": 1}


# -- seeds ----------------------------------------------------------------------------------------


def test_a_seed_is_used_once_by_the_next_explicit_reset() -> None:
    rig = Rig().launch(seeds={0: 7})
    rig.slot().new_seed = 99
    rig.send(0)
    rig.stepped(done=True)  # an automatic reset passes no seed
    rig.reset_done()
    rig.deliver(0)
    rig.reset()
    rig.reset_done()
    rig.reset()
    rig.reset_done()
    assert [request.seed for request in rig.reset_requests()] == [7, None, 99, None]


def test_dynamic_seed_goes_with_the_seed() -> None:
    rig = Rig(dynamic_seed=True).launch(seeds={0: 7})
    assert rig.reset_requests()[0].dynamic_seed is True


def test_later_generations_derive_seeds_from_the_one_given_last() -> None:
    rig = Rig().launch(seeds={0: 7})
    rig.die()
    rig.hello()
    assert rig.reset_requests()[-1].seed == derived_seed(7, 0, 1, 1)
    rig.reset_done()
    rig.send(0)
    rig.deliver(0)
    rig.slot().new_seed = 50
    rig.reset()
    rig.reset_done()
    rig.die()
    rig.hello()
    assert rig.reset_requests()[-1].seed == derived_seed(50, 0, 2, 3)


def test_an_unseeded_env_stays_unseeded() -> None:
    rig = Rig().launch()
    rig.die()
    rig.hello()
    assert rig.reset_requests()[-1].seed is None


def test_only_the_first_reset_of_a_generation_is_seeded() -> None:
    rig = Rig().launch(seeds={0: 7})
    rig.die()
    rig.hello()
    rig.reset_done()
    rig.send(0)
    rig.deliver(0)
    rig.send(0)
    rig.stepped(done=True)
    assert rig.reset_requests()[-1].seed is None


def test_a_given_seed_is_used_exactly_even_by_a_new_generation() -> None:
    rig = Rig().launch(seeds={0: 7})
    rig.slot().new_seed = 99
    rig.reset()
    rig.die()  # before that reset had succeeded
    rig.hello()
    assert rig.reset_requests()[-1].seed == 99


def test_generations_of_different_envs_have_different_seeds() -> None:
    rig = Rig(2).launch(seeds={0: 7, 1: 7})
    for env_id in (0, 1):
        rig.die(env_id)
        rig.hello(env_id)
    assert rig.reset_requests(0)[-1].seed != rig.reset_requests(1)[-1].seed


# -- calls ----------------------------------------------------------------------------------------


def test_a_call_keeps_its_result_for_the_caller() -> None:
    rig = Rig(2).launch()
    assert rig.slot(1).is_callable
    rig.call(1, "double")
    assert rig.requests(Op.CALL, 1)[0].payload == ("double", ())
    assert not rig.slot(1).is_callable
    rig.transport.reply(1, Op.RESULT, 8)
    rig.pump()
    assert rig.slot(1).result == 8
    assert rig.slot(1).phase is Phase.IDLE
    assert rig.ready() == [0, 1]


def test_a_call_that_raises_leaves_the_env_as_it_was() -> None:
    rig = Rig().launch()
    obs = rig.obs()
    rig.call()
    rig.fail(0, "call")
    assert "boom" in str(rig.slot().result)
    assert rig.ready() == [0]
    assert rig.obs() is obs
    assert rig.supervisor.statistics.failures_by_env == {}


def test_an_attribute_that_is_not_there_is_a_result() -> None:
    rig = Rig().launch()
    submit_calls(rig.hosts, rig.hosts.envs[:1], Op.GET_ATTR, ["colour"], "reading it")
    rig.fail(0, "call", kind=FailureKind.NO_ATTRIBUTE)
    assert rig.slot().result.kind is FailureKind.NO_ATTRIBUTE
    assert rig.ready() == [0]


def test_a_result_of_an_earlier_call_is_forgotten() -> None:
    rig = Rig().launch()
    rig.call()
    rig.transport.reply(0, Op.RESULT, Attribute(False, 1))
    rig.pump()
    rig.call()
    assert rig.slot().result is None


def test_an_env_without_host_or_with_work_is_not_callable() -> None:
    rig = Rig(kill_takes_s=None).launch()
    rig.send(0)
    assert not rig.slot(0).is_callable
    rig.transport.garbage(0)
    rig.pump()
    assert not rig.slot(0).is_callable
    rig.die()
    assert not rig.slot(0).is_callable
    rig.hello()
    rig.deliver()
    assert not rig.slot(0).is_callable
    rig.reset_done()
    assert rig.slot(0).is_callable


# -- what is repeated on renewed envs -------------------------------------------------------------


def test_set_attr_is_repeated_on_renewed_envs_before_their_first_reset() -> None:
    rig = Rig(2).launch()
    rig.supervisor.repeat([0], Op.SET_ATTR, [("colour", "red")])
    rig.supervisor.repeat([0], Op.SET_ATTR, [("size", 3)])
    rig.die(0)
    rig.die(1)
    rig.hello(0)
    rig.hello(1)
    received = rig.transport.host_of(0).told
    assert [op for op, _ in received] == [Op.SET_ATTR, Op.SET_ATTR, Op.RESET]
    assert [payload for _, payload in received[:2]] == [("colour", "red"), ("size", 3)]
    assert [op for op, _ in rig.transport.host_of(1).told] == [Op.RESET]


def test_of_requests_with_one_name_the_latest_is_repeated_and_comes_last() -> None:
    rig = Rig().launch()
    repeat = rig.supervisor.repeat
    repeat([0], Op.SET_ATTR, [("colour", "red")])
    repeat([0], Op.CALL, [("colour", ())])
    repeat([0], Op.SET_ATTR, [("size", 3)])
    repeat([0], Op.SET_ATTR, [("colour", "blue")])
    rig.die()
    rig.hello()
    assert rig.transport.host_of(0).told[:-1] == [
        (Op.CALL, ("colour", ())),
        (Op.SET_ATTR, ("size", 3)),
        (Op.SET_ATTR, ("colour", "blue")),
    ]


def test_replies_to_what_is_repeated_are_not_taken_for_others() -> None:
    rig = Rig().launch()
    rig.supervisor.repeat([0], Op.SET_ATTR, [("colour", "red")])
    rig.die()
    rig.hello()
    host = rig.transport.host_of(0)
    (repeated,) = host.requests(Op.SET_ATTR)
    assert repeated.request_id == 0
    rig.transport.arrive(host.host_id, repeated._replace(op=Op.RESULT, payload=None))
    rig.pump()
    assert rig.slot().phase is Phase.RESETTING
    rig.reset_done()
    assert rig.slot().phase is Phase.IDLE
    assert rig.supervisor.statistics.dropped_replies == 0


def test_a_repeated_request_that_fails_is_logged_and_goes_no_further(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig().launch()
    rig.supervisor.repeat([0], Op.SET_ATTR, [("colour", "red")])
    rig.die()
    rig.hello()
    host = rig.transport.host_of(0)
    (repeated,) = host.requests(Op.SET_ATTR)
    reset = host.request
    host.request = repeated
    rig.fail(0, "call", message="there is no colour any more")
    host.request = reset
    assert "repeating a request on a renewed env: there is no colour any more" in caplog.text
    rig.reset_done()
    assert rig.slot().fresh is not None
    assert sum(rig.supervisor.statistics.failures_by_env.values()) == 1  # the death alone


def test_a_renewed_env_is_attached_again_before_anything_is_repeated() -> None:
    rig = launched_with_memory()
    rig.supervisor.repeat([0], Op.SET_ATTR, [("colour", "red")])
    rig.die()
    rig.hello(0, FLOATS)
    ops = [m.op for m in rig.transport.host_of(0).received[1:]]
    assert ops == [Op.ATTACH, Op.SET_ATTR, Op.RESET]


# -- notices --------------------------------------------------------------------------------------


def test_notices_are_logged_once_and_disturb_nothing(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(2).launch()
    rig.send({0: 1, 1: 1})
    for env_id in (0, 1, 0):
        rig.transport.reply(env_id, Op.NOTICE, "float64 is cast")
        rig.pump()
    assert caplog.text.count("observations of env 0: float64 is cast (reported once)") == 1
    assert "env 1" not in caplog.text
    rig.stepped(0)
    rig.stepped(1)
    assert list(rig.deliver()) == [0, 1]


# -- the end --------------------------------------------------------------------------------------


def test_stopping_makes_every_env_void_and_cancels_what_is_owed() -> None:
    rig = Rig(4, auto_reset=False).launch()
    rig.send({0: 1, 1: 1, 2: 1})
    rig.stepped(1)
    rig.stepped(2)
    rig.deliver(2)
    rig.supervisor.stop()
    assert rig.supervisor.table.env_states() == (EnvState.VOID,) * 4
    statistics = rig.supervisor.statistics
    assert (statistics.actions, statistics.timesteps, statistics.cancelled) == (3, 1, 2)
    assert statistics.outstanding == 0
    assert rig.identity_holds()
    assert rig.ready() == []
    assert rig.deliver() == {}


def test_a_cancelled_step_is_counted_once_though_the_manager_is_closed_before_its_reply() -> None:
    rig = Rig().launch()
    rig.send(0)
    rig.reset()
    assert rig.supervisor.statistics.cancelled == 1
    assert rig.identity_holds()
    rig.supervisor.stop()
    assert rig.supervisor.statistics.cancelled == 1


def test_what_arrives_from_hosts_that_nobody_knows_is_ignored() -> None:
    rig = Rig().launch()
    before = rig.slot().request_id
    rig.supervisor.handle(999, Message(Op.STEPPED, 0, 0, before, None))
    rig.supervisor.handle(999, HostDied(1))
    assert rig.ready() == [0]
    assert rig.slot().deadline == NEVER


def test_a_void_env_cannot_be_reset() -> None:
    rig = Rig()
    with pytest.raises(IllegalTransitionError):
        rig.reset()


def test_what_a_call_had_in_hand_that_did_not_return_is_cancelled_at_the_end() -> None:
    rig = Rig(2, has_block=True).launch()
    rig.send({0: 1, 1: 1})
    rig.stepped(0)
    rig.exactly(0)
    rig.stepped(1)
    rig.supervisor.collector.timesteps(rig.gather.exactly(rig.selection([1])))
    supervisor = rig.supervisor
    accounts = {"actions": 2, "timesteps": 1, "cancelled": 0, "outstanding": 1}
    assert supervisor.statistics.accounts() == accounts
    rig.engine.close(0.0)
    assert supervisor.statistics.accounts() == {**accounts, "cancelled": 1, "outstanding": 0}


def test_what_an_interrupt_has_left_of_a_hand_out_is_done_again_at_every_point_of_it() -> None:
    rig = Rig(2, has_block=True).launch()
    rig.send({0: 1, 1: 1})
    told = {"terminated": True, "truncated": False}
    for env_id, done in ((0, True), (1, False)):
        after = AfterStep.RESETS if done else AfterStep.NOTHING
        rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, done, told if done else {}, after))
    supervisor = rig.supervisor
    collected = supervisor.collector.take(rig.selection([0, 1]))
    assert collected is not None
    supervisor.collector.timesteps(collected)
    for _ in range(2):
        returning = supervisor.journal.returning
        assert returning is not None
        assert returning.timesteps is collected
        assert [rig.phase(i) for i in range(2)] == [Phase.RESETTING, Phase.IDLE]
        assert rig.slot(0).next_episode == rig.slot(0).episode + 1
        assert (supervisor.statistics.timesteps, supervisor.statistics.episodes) == (2, 1)
        supervisor.journal.do(supervisor.collector._redo, collected)  # as after an interrupt
    rig.reset_done(0)
    assert rig.ready() == [0, 1]
