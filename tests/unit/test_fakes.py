"""The fake transport: it does what workers do, and finds out waits without end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envmgr.env.contract import info_of
from envmgr.wire.block import BUFFER_BITS, ENDING_GIVEN_BIT, INFO_BYTES
from envmgr.wire.messages import AfterStep, Op
from tests.fakes import Poll, WouldWaitForEverError
from tests.rig import Rig, over_routes
from tests.unit.host_rigs import BlockRig, block_step

# -- the fakes ------------------------------------------------------------------------------------


@over_routes
def test_a_wait_that_would_never_end_is_found_out() -> None:
    rig = Rig().launch()
    with pytest.raises(WouldWaitForEverError):
        rig.transport.poll(None)


@over_routes
def test_polls_are_remembered() -> None:
    rig = Rig()
    rig.transport.poll(2.0, pivot=None)
    assert rig.transport.polls == [Poll(2.0, None)]


# -- the block ------------------------------------------------------------------------------------


CASES: dict[str, tuple[Any, bool, Any]] = {
    "plain": (1.0, False, {}),
    "end": (0.5, True, {}),
    "not a number": (float("nan"), False, {}),
    "integer": (7, False, {}),
    "numpy": (np.float32(0.1), True, {"n": np.int64(3)}),
    "bool": (True, False, {"text": "ä", "in": {"deep": 1.5}}),
    "large integer": (1 << 53, False, {}),
    "array": (np.full(1, 0.1, np.float32), True, {}),
    "wide array": (np.arange(3.0), False, {"n": 1}),
    "odd reward": (np.ones(1, int), True, {}),
    "odd info": (1.0, True, {"list": [1]}),
    "large info": (1.0, False, {"text": "x" * INFO_BYTES}),
}


@pytest.mark.parametrize("name", CASES)
def test_replies_are_those_of_a_worker(name: str) -> None:
    reward, done, info = CASES[name]
    real = BlockRig()
    sent = real.step(block_step(reward=reward, done=done, info=info))
    by_message = {Op.STEPPED} & set(sent)
    real.run()  # the reset after it

    fake = Rig(has_block=True).launch()
    transport, host = fake.transport, fake.transport.host_of(0)
    assert transport.shared is not None
    block = transport.shared.block
    assert block is not None
    fake.send(0)
    after = AfterStep.RESETS if done else AfterStep.NOTHING
    transport.reply(0, Op.STEPPED, ("next", reward, done, info, after))
    if done:
        transport.reply(0, Op.RESET_DONE, ("first", {}))
    assert (block.replies[0] == block.requests[0]) == (not by_message) == real.has_replied()
    assert (block.resets[0] == block.requests[0]) == done == real.has_reset()
    if not by_message:
        assert block.flags[0] == real.block.flags[0]
        assert block.infos[0].tobytes() == real.block.infos[0].tobytes()
        np.testing.assert_equal(block.rewards[0], real.block.rewards[0])
        np.testing.assert_equal(block.wide_rewards[0], real.block.wide_rewards[0])
    if done:
        slots = [int(b.reset_flags[0]) & BUFFER_BITS for b in (block, real.block)]
        assert slots == [3, 3]
    assert block.finished[host.in_block.index] == block.posted[host.in_block.index]


def test_an_info_that_says_how_the_episode_ended_is_told_in_the_flags() -> None:
    rig = Rig(has_block=True).launch()
    sent = rig.send(0)
    ends = {"terminated": False, "truncated": True}
    rig.transport.reply(0, Op.STEPPED, ("next", 1.0, True, {"n": 1, **ends}, AfterStep.RESETS))
    assert rig.transport.shared is not None
    assert rig.transport.shared.block is not None
    assert rig.transport.shared.block.flags[0] & ENDING_GIVEN_BIT
    timestep = rig.exactly(0)[0]
    assert not isinstance(sent, list)
    assert timestep == ("next", 1.0, True, info_of(5, {"n": 1}))


def test_observations_are_what_the_host_had_whatever_it_was() -> None:
    rig = Rig(has_block=True).launch()
    thing = object()
    rig.send(0)
    rig.transport.reply(0, Op.STEPPED, (thing, 1.0, False, {}, 0))
    assert rig.exactly(0)[0].obs is thing
    assert rig.obs() is thing
