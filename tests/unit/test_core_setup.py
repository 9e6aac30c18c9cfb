"""What hosts say of their envs, where observations go, and what each new env is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from envmgr.core import Phase
from envmgr.errors import LaunchError, SpaceMismatchError
from envmgr.wire.arenas import Placement, buffer_arrays
from envmgr.wire.messages import Op
from tests.fake_hosts import FakeEnvs, description
from tests.rig import Rig, over_routes
from tests.unit.core_rigs import FLOATS

pytestmark = over_routes


# -- spaces and memory ----------------------------------------------------------------------------


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


# -- buffers of observations -----------------------------------------------------------------------


def write(rig: Rig, env_id: int, slot: int, values: Any) -> None:
    """Write an observation as the host of an env does."""
    placement: Placement = rig.requests(Op.ATTACH, env_id)[-1].payload
    buffer_arrays(rig.transport.memory, placement)[0][slot] = values


def launched_with_memory(**rules: Any) -> Rig:
    rig = Rig(2, has_memory=True, **rules)
    rig.transport.answer = FakeEnvs(observation_space=FLOATS)
    rig.start()
    rig.transport.answer = None
    rig.supervisor.begin_episodes()
    for env_id in (0, 1):
        slot = rig.requests(Op.ATTACH, env_id)[-1].payload.reset_buffer
        write(rig, env_id, slot, [env_id, 0.5])
        rig.reset_done(env_id, slot)
    rig.supervisor.table.launching = False
    return rig


def test_every_env_learns_its_buffer_before_its_first_reset() -> None:
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
    assert (first.step_buffer, first.reset_buffer) == (0, 3)
    for step in range(5):  # round the slots, to slot 1
        write(rig, 1, step % 3, [step, 0])
        rig.send(1)
        rig.stepped(1, step % 3)
        view = rig.deliver(1)[1].obs
    rig.die(1)
    rig.hello(1, FLOATS)
    placement = rig.requests(Op.ATTACH, 1)[-1].payload
    assert (placement.step_buffer, placement.reset_buffer) == (2, 4)
    write(rig, 1, placement.step_buffer, [99, 99])
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
