"""Where answers go: into messages or into the block, as what they were, or by message after all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envmgr.wire.block import INFO_BYTES
from envmgr.wire.frames import encode
from envmgr.wire.messages import (
    FailureKind,
    Message,
    Op,
)
from tests.unit.host_rigs import PLAN, BlockRig, block_step, failure_of, launched, step

# -- in the block ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reward",
    [0.5, -0.0, 3, -(1 << 52), np.float64(1.5), np.float32("inf"), np.int64(5), True],
    ids=repr,
)
def test_rewards_come_out_as_they_were(reward: Any) -> None:
    rig = BlockRig()
    assert rig.step(block_step(reward=reward)) == []
    assert type(rig.reward()) is type(reward)
    assert rig.reward() == reward


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 2, 8])
def test_arrays_of_rewards_come_out_as_they_were(n: int, dtype: Any) -> None:
    reward = np.linspace(-0.1, 9.0, 2 * n, dtype=dtype)[::2]
    reward[-1] = np.nan if n == 2 else 0.1
    reward.flags.writeable = False
    rig = BlockRig()
    assert rig.step(block_step(reward=reward)) == []
    assert type(rig.reward()) is np.ndarray
    assert rig.reward().dtype == dtype
    np.testing.assert_array_equal(rig.reward(), reward)


@pytest.mark.parametrize("n", [1, 3])
def test_an_env_may_use_its_array_of_rewards_again_in_its_next_reset(n: int) -> None:
    rig = BlockRig(plan=PLAN._replace(inplace=True))
    reward = np.ones(n)

    class Reset:
        """An observation whose making zeroes the reward."""

        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            reward[:] = 0.0
            return np.zeros(2, np.float32)

    rig.envs[0].resets.append(Reset())
    assert rig.step(block_step(reward=reward, done=True)) == []
    assert (reward.tolist(), rig.reward().tolist()) == ([0.0] * n, [1.0] * n)


@pytest.mark.parametrize(
    "reward",
    [
        *(1 << 53, -(1 << 60), np.int64(1 << 60), np.float16(1), {"a": 1.0}, [1.0]),
        *(np.array(1.0), np.ones(1, int), np.ones(1, ">f8"), np.ones((1, 1)), np.ones(0)),
        *(np.ones(9), np.ma.ones(1)),
    ],
    ids=repr,
)
def test_odd_rewards_go_by_message(reward: Any) -> None:
    rig = BlockRig()
    assert rig.step(block_step(reward=reward)) == [Op.STEPPED]
    assert not rig.has_replied()
    assert rig.sent[0].payload[1] is reward
    assert rig.sent[0][1:4] == (0, 0, rig.request_id)


def test_infos_in_the_block_and_beside_it() -> None:
    rig = BlockRig()
    assert rig.step(block_step(info={"a": 1, "b": np.float32(2)})) == []
    assert rig.info() == {"a": 1, "b": np.float32(2)}
    for odd in ({"a": [1]}, {1: 2}, {"a": "x" * INFO_BYTES}, [{"agent": 0}]):
        assert rig.step(block_step(info=odd)) == [Op.STEPPED]
        assert rig.sent[0].payload[3] == odd
    assert rig.step(block_step()) == []
    assert rig.info() == {}


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (ValueError("no"), FailureKind.RAISED),
        (KeyboardInterrupt(), FailureKind.EXITED),
        (SystemExit(3), FailureKind.EXITED),
        (block_step(np.zeros(3, np.float32)), FailureKind.PROTOCOL),
        (block_step(reward=None), FailureKind.PROTOCOL),
        (block_step(info={"abnormal": True}), FailureKind.ABNORMAL),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failures_go_by_message(given: Any, kind: FailureKind) -> None:
    rig = BlockRig()
    assert rig.step(given) == [Op.FAILED]
    assert rig.sent[0].payload.kind is kind
    assert not rig.has_replied()
    assert rig.step(block_step()) == []
    assert rig.has_replied()


def test_a_reset_that_fails_or_has_an_odd_info_goes_by_message() -> None:
    rig = BlockRig()
    rig.envs[0].resets.append(ValueError("no"))
    rig.step(block_step(done=True))
    assert rig.run() == [(0, Op.FAILED)]
    assert rig.sent[0].payload.during == "reset"
    assert not rig.has_reset()
    rig.envs[0].reset_info = {"odd": [1]}
    rig.step(block_step(done=True))
    assert rig.run() == [(0, Op.RESET_DONE)]
    assert not rig.has_reset()


def test_a_step_in_place_counts_when_the_next_episode_has_begun() -> None:
    rig = BlockRig(plan=PLAN._replace(inplace=True))
    seen: list[bool] = []
    rig.envs[0].reset = lambda **_: (seen.append(rig.has_replied()), np.zeros(2, np.float32))[1]  # type: ignore[method-assign]
    rig.step(block_step(done=True))
    assert seen == [False]
    assert rig.has_replied()
    assert rig.has_reset()


# -- by message: what cannot be sent --------------------------------------------------------------


def unsendable(message: Message) -> Message:
    """Encode as workers do, and hand the message on."""
    encode(message)
    return message


@pytest.mark.parametrize(
    ("op", "payload", "during"),
    [(Op.CALL, ("give", ()), "call"), (Op.GET_ATTR, "held", "call")],
)
def test_results_that_cannot_be_sent_are_reported(op: Op, payload: Any, during: str) -> None:
    harness = launched(encode=unsendable)
    harness.env.held = (n for n in ())
    harness.env.give = lambda: harness.env.held
    failure = failure_of(harness.run(op, payload))
    assert (failure.kind, failure.during) == (FailureKind.PROTOCOL, during)


def test_infos_that_cannot_be_sent_are_reported() -> None:
    harness = launched(step(info={"g": (n for n in ())}), encode=unsendable)
    failure = failure_of(harness.run(Op.STEP, 0))
    assert (failure.kind, failure.during) == (FailureKind.PROTOCOL, "step")
    harness.env.reset_info = {"g": (n for n in ())}
    failure = failure_of(harness.reset())
    assert (failure.kind, failure.during) == (FailureKind.PROTOCOL, "reset")


def test_an_abnormal_info_that_cannot_be_sent_is_still_an_abnormal_step() -> None:
    info = {"abnormal": True, "g": (n for n in ())}
    failure = failure_of(launched(step(info=info), encode=unsendable).run(Op.STEP, 0))
    assert failure.kind is FailureKind.ABNORMAL
    assert failure.info is None
    assert "its info cannot be sent" in failure.message
