"""Where no process boundary is crossed, neither side sees what the other one changes later."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envmgr.types import Once
from envmgr.wire.frames import FrameError
from envmgr.wire.messages import Attribute, EpisodePlan, Message, Op, ResetRequest
from envmgr.worker.copies import copied_reply, copied_request


def message(op: Op, payload: Any) -> Message:
    return Message(op, 0, 0, 1, payload)


class Action:
    """An action of a class of the user's."""

    def __init__(self) -> None:
        self.value = 1


def test_an_action_is_copied_whatever_it_is() -> None:
    own, array, objects = Action(), np.zeros(2), np.array([Action()], object)
    copied = copied_request(message(Op.STEP, {"a": [own, array], "b": (objects,)})).payload
    own.value, array[:], objects[0].value = 2, 2.0, 2
    assert copied["a"][0].value == 1
    assert copied["a"][1].tolist() == [0.0, 0.0]
    assert copied["b"][0][0].value == 1


def test_an_action_that_cannot_be_copied_is_refused() -> None:
    class Single:
        def __deepcopy__(self, memo: Any) -> Any:
            raise ValueError("there is one of me")

    with pytest.raises(FrameError, match="cannot be copied: ValueError: there is one of me"):
        copied_request(message(Op.STEP, [Single()]))


@pytest.mark.parametrize("op", [Op.CALL, Op.SET_ATTR])
def test_arguments_are_copied_as_far_as_they_are_containers_and_arrays(op: Op) -> None:
    own, array = Action(), np.zeros(2)
    name, (first, second) = copied_request(message(op, ("name", (own, array)))).payload
    array[:] = 2.0
    assert name == "name"
    assert first is own, "whoever gives an object to an env may want to share it"
    assert second.tolist() == [0.0, 0.0]


def test_infos_and_rewards_of_a_reply_are_copied_and_its_observation_is_not() -> None:
    reference, reward, info = [bytearray(b"obs")], np.zeros(1), {"in": [np.zeros(1)]}
    reply = copied_reply(message(Op.STEPPED, (reference, reward, False, info, 0)))
    reward[:], info["in"][0][:] = 1.0, 1.0
    assert reply.payload[0] is reference
    assert reply.payload[1].tolist() == [0.0]
    assert reply.payload[3] == {"in": [np.zeros(1)]}


def test_an_attribute_is_copied_and_a_failure_is_sent_as_it_is() -> None:
    values = [1]
    copied = copied_reply(message(Op.RESULT, Attribute(False, values))).payload
    values.append(2)
    assert copied == Attribute(False, [1])
    failure = message(Op.FAILED, object())
    assert copied_reply(failure) is failure
    nothing = message(Op.RESET_DONE, None)  # what came of the reset is kept
    assert copied_reply(nothing) is nothing


def test_an_info_that_contains_itself_is_copied_once() -> None:
    info: dict[str, Any] = {"n": 1}
    info["self"] = info
    copied = copied_reply(message(Op.RESET_DONE, ([], info))).payload[1]
    assert copied is not info
    assert copied["self"] is copied


def test_reset_params_are_copied_for_this_reset_and_for_those_that_follow() -> None:
    goal = np.zeros(2)
    params = Once(goal=goal)
    reset = ResetRequest(params, None, False, EpisodePlan(True, 1, {"goal": goal}))
    copied = copied_request(message(Op.RESET, reset)).payload
    goal[:] = 2.0
    assert type(copied.params) is Once
    assert copied.params["goal"].tolist() == [0.0, 0.0]
    assert copied.plan.params["goal"].tolist() == [0.0, 0.0]
