"""What callers may ask for: refused whole, by a typed error, before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Discrete, GraphInstance

from envmgr.core import Phase, validate
from envmgr.errors import (
    ActionError,
    ConfigError,
    EnvNotReadyError,
    MethodAccessError,
    UnknownEnvError,
)
from envmgr.lifecycle import EnvState
from envmgr.policy import FailurePolicy
from envmgr.spaces import codec_of
from envmgr.wire.block import RING_EACH
from envmgr.wire.frames import FrameError
from envmgr.wire.messages import Op
from tests.rig import Rig, over_routes
from tests.unit.core_rigs import rows_of_batches, rows_reset_in_next_step

CHECK = codec_of(Discrete(3), strict=False).refusal


def prepare(rig: Rig, actions: Any, check: Any = CHECK) -> Any:
    checks = None if check is None else [check] * len(rig.supervisor.envs)
    return validate.checked_actions(rig.supervisor.table, actions, checks)


def refused(rig: Rig, error: type[Exception], actions: Any) -> str:
    """Check that actions are refused, and that nothing was sent or changed by them."""
    before = (len(rig.transport.sent), rig.supervisor.table.env_states(), rig.ready())
    with pytest.raises(error) as caught:
        prepare(rig, actions)
    assert (len(rig.transport.sent), rig.supervisor.table.env_states(), rig.ready()) == before
    assert rig.supervisor.statistics.actions == 0
    return str(caught.value)


# -- env_ids --------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", [0, 2, np.int64(2), np.uint8(0)])
def test_known_env_ids_become_ints(env_id: Any) -> None:
    found = validate.checked_env_id(env_id, 3)
    assert found == env_id
    assert type(found) is int


@pytest.mark.parametrize("env_id", [3, -1, np.int64(3), 1.0, np.float64(1), "1", None, True, [0]])
def test_unknown_env_ids_are_refused(env_id: Any) -> None:
    with pytest.raises(UnknownEnvError, match=r"there is no env .*; the env_ids are 0 to 2"):
        validate.checked_env_id(env_id, 3)


@pytest.mark.parametrize(
    ("env_ids", "expected"),
    [
        (None, [0, 1, 2]),
        (1, [1]),
        (np.int64(1), [1]),
        ([2, 0], [2, 0]),
        ((2, np.int32(0)), [2, 0]),
        (range(2), [0, 1]),
        (np.array([2, 1]), [2, 1]),
        pytest.param(iter([1]), [1], id="iterator"),
        ([], []),
    ],
    ids=str,
)
def test_several_env_ids(env_ids: Any, expected: list[int]) -> None:
    found = validate.checked_env_ids(env_ids, 3)
    assert found == expected
    assert all(type(i) is int for i in found)


@pytest.mark.parametrize("env_ids", [[0, 3], [0, "1"], -1, [1, 1], [1, np.int64(1)], True])
def test_several_env_ids_with_a_bad_one(env_ids: Any) -> None:
    with pytest.raises(UnknownEnvError):
        validate.checked_env_ids(env_ids, 3)


# -- actions --------------------------------------------------------------------------------------


def test_good_actions_are_checked_and_not_sent() -> None:
    rig = Rig(3).launch()
    sent = len(rig.transport.sent)
    assert list(prepare(rig, {2: 1, 0: np.int64(2)})) == [2, 0]
    assert len(rig.transport.sent) == sent
    rig.supervisor.submitter.checked({2: 1, 0: np.int64(2)}, RING_EACH, None)
    assert [m.payload for _, m in rig.transport.sent[sent:]] == [1, 2]
    assert rig.supervisor.statistics.actions == 2


@pytest.mark.parametrize("actions", [[1, 2], 1, None, "ab", np.zeros(3), {1, 2}])
def test_actions_come_by_env_id(actions: Any) -> None:
    text = refused(Rig(3).launch(), ActionError, actions)
    assert text.startswith("actions should be a dict {env_id: action}, found ")


@pytest.mark.parametrize("env_id", [3, -1, "0", None, 0.5])
def test_an_unknown_env_refuses_all_actions(env_id: Any) -> None:
    refused(Rig(3).launch(), UnknownEnvError, {0: 1, env_id: 1, 1: 1})


def test_one_bad_action_refuses_all() -> None:
    text = refused(Rig(3).launch(), ActionError, {0: 1, 1: 3, 2: 1})
    assert text == (
        "the action of env 1 is refused: 3 is outside Discrete(3): 0..2. "
        "Nothing was sent to any env."
    )


def test_actions_are_not_checked_where_the_user_does_not_want_it() -> None:
    prepare(Rig(1).launch(), {0: "anything"}, check=None)


def test_time_limits_and_flags_are_taken_as_they_are() -> None:
    assert [validate.checked_seconds(x) for x in (0.25, 3, None, -1)] == [0.25, 3.0, math.inf, 0.0]
    assert validate.checked_grace(None, 5.0) == 5.0
    assert [validate.checked_flag(x, "flag") for x in (True, False)] == [True, False]
    assert [validate.checked_mode(x) for x in ("human", None)] == ["human", None]


def test_one_value_for_all_is_the_same_object_for_each() -> None:
    value = object()
    assert validate.values_for_each("colour", value, 2) == [value, value]
    assert validate.values_for_each("colour", [1, value], 2) == [1, value]


def test_an_action_that_cannot_be_sent_refuses_all() -> None:
    rig = Rig(3).launch()
    rig.transport.refused[1] = FrameError("PicklingError: it is a generator")
    before = len(rig.transport.sent)
    with pytest.raises(ActionError, match="an action cannot be sent to its env: PicklingError: it"):
        rig.supervisor.submitter.checked({0: 1, 1: 1}, RING_EACH, None)
    assert (len(rig.transport.sent), rig.ready()) == (before, [0, 1, 2])


class Twice(Mapping[Any, Any]):
    """A mapping that names an env twice."""

    def __getitem__(self, key: Any) -> Any:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter((0, np.int64(0)))

    def __len__(self) -> int:
        return 2


def test_an_env_takes_one_action_only() -> None:
    assert "has a key twice" in refused(Rig(3).launch(), ActionError, Twice())


def bring_to(state: EnvState) -> Rig:
    """Return a rig of two envs, the second in `state`."""
    never = FailurePolicy(max_failures=0)
    rig = Rig(2, auto_reset=False, episode_num=1, policy=never).launch()
    if state is EnvState.VOID:
        rig.supervisor.stop()
    elif state is EnvState.RESET:
        rig.reset(1)
    elif state is EnvState.DONE:
        rig.send(1)
        rig.stepped(1, done=True)
        rig.deliver(1)
    elif state is EnvState.ERROR:
        rig.send(1)
        rig.die(1)
        rig.deliver(1)
    elif state is EnvState.INIT:
        rig = Rig(2).launch()
        rig.send(1)
        rig.die(1)
        rig.deliver(1)
    elif state is EnvState.NEED_RESET:
        rig = Rig(2, auto_reset=False).launch()
        rig.send(1)
        rig.stepped(1, done=True)
        rig.deliver(1)
    rig.supervisor.statistics.actions = 0
    assert rig.state(1) is state
    return rig


@pytest.mark.parametrize(
    ("state", "advice"),
    [
        (EnvState.VOID, "call launch() first"),
        (EnvState.INIT, "it is being repaired; it will be in ready_obs when it is ready"),
        (EnvState.RESET, "it is being reset; it will be in ready_obs when it is ready"),
        (
            EnvState.NEED_RESET,
            "its episode ended and auto_reset is off: call reset({1: params})",
        ),
        (EnvState.DONE, "its episode budget is spent: call reset({1: None}) for a new one"),
        (EnvState.ERROR, "it failed; it is being repaired, or reset({1: None}) repairs it"),
    ],
)
def test_an_env_that_is_not_ready_refuses_all_and_says_what_to_do(
    state: EnvState, advice: str
) -> None:
    rig = bring_to(state)
    text = refused(rig, EnvNotReadyError, {1: 1} if state is EnvState.VOID else {0: 1, 1: 1})
    assert f"env 1 cannot take an action: it is in {state.name}; {advice}. " in text
    assert f"Ready now: {rig.ready()}. Nothing was sent to any env." in text
    is_coming = state in (EnvState.INIT, EnvState.RESET)
    assert ("Act on the envs and observations of ready_obs in each step" in text) is is_coming


def test_every_state_but_run_has_advice() -> None:
    assert set(validate._ADVICE) == set(EnvState) - {EnvState.RUN}


def test_a_pending_env_takes_no_action_before_its_timestep_was_delivered() -> None:
    rig = Rig(2).launch()
    rig.send(1)
    rig.supervisor.statistics.actions = 0
    advice = "an action of it is under way: gather its timestep with recv() or step({}) first"
    assert advice in refused(rig, EnvNotReadyError, {0: 1, 1: 1})
    rig.stepped(1)
    assert advice in refused(rig, EnvNotReadyError, {0: 1, 1: 1})
    rig.deliver(1)
    prepare(rig, {0: 1, 1: 1})


def test_an_env_takes_no_action_while_a_call_of_it_has_not_ended() -> None:
    rig = Rig(2).launch()
    rig.call(1)
    text = refused(rig, EnvNotReadyError, {0: 1, 1: 1})
    assert "a call of it has not ended" in text
    rig.transport.reply(1, Op.RESULT, 7)
    rig.pump()
    assert rig.slot(1).phase is Phase.IDLE
    prepare(rig, {0: 1, 1: 1})


# -- tensors of other libraries -------------------------------------------------------------------


class Tensor:
    """What a library's tensor is to us: something that numpy can convert."""

    def __init__(self, value: Any, error: Exception | None = None) -> None:
        self.value = value
        self.error = error

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        if self.error is not None:
            raise self.error
        return np.asarray(self.value)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (Tensor(2), 2),
        (Tensor([1, 2]), [1, 2]),
        ({"a": Tensor(2), "b": {"c": Tensor([1])}}, {"a": 2, "b": {"c": [1]}}),
        ((Tensor(2), 1), (2, 1)),
        ([Tensor(2), (Tensor(3),)], [2, (3,)]),
        (GraphInstance(Tensor([[2]]), None, None), GraphInstance([[2]], None, None)),
    ],
    ids=range(6),
)
def test_tensors_become_arrays_wherever_they_are(action: Any, expected: Any) -> None:
    rig = Rig(1).launch()
    sent = prepare(rig, {0: action}, check=None)[0]

    def same(one: Any, other: Any) -> bool:
        if isinstance(other, dict):
            return all(same(one[key], other[key]) for key in other)
        if isinstance(other, tuple) and isinstance(one, tuple):
            return type(one) is type(other) and all(map(same, one, other))
        if isinstance(one, list):
            return all(map(same, one, other))
        if other is None:
            return one is None
        return type(one) in (np.ndarray, int) and np.array_equal(one, other)

    assert same(sent, expected)


@pytest.mark.parametrize("action", [1, 1.5, "a", np.zeros(2), np.int8(1), (1, 2), [1, 2], None])
def test_plain_values_stay_what_they_are(action: Any) -> None:
    checked = prepare(Rig(1).launch(), {0: action}, check=None)
    assert type(checked[0]) is type(action)


def test_a_tensor_that_refuses_to_become_an_array_is_an_action_error() -> None:
    tensor = Tensor(1, RuntimeError("call detach() first"))
    for action in (tensor, {"a": tensor}, (1, tensor)):
        text = refused(Rig(2).launch(), ActionError, {0: 1, 1: action})
        assert "cannot be made an array: RuntimeError: call detach() first" in text


# -- calls ----------------------------------------------------------------------------------------


def test_calls_are_refused_while_a_step_is_pending() -> None:
    rig = Rig(3).launch()
    rig.send({0: 1, 2: 1})
    with pytest.raises(EnvNotReadyError, match=r"call\('x'\) needs .* but envs \[0, 2\] have one"):
        validate.refuse_while_pending(rig.supervisor.table, [0, 1, 2], "call('x')")
    validate.refuse_while_pending(rig.supervisor.table, [1], "call('x')")


@pytest.mark.parametrize(
    "name", ["reset", "step", "seed", "close", "_private", "__init__", 7, None]
)
def test_methods_that_go_past_the_manager_are_refused(name: Any) -> None:
    with pytest.raises(MethodAccessError, match="is refused"):
        validate.checked_method(name)


@pytest.mark.parametrize("name", ["render", "reset_task", "stepper", "closed"])
def test_other_methods_are_not(name: str) -> None:
    validate.checked_method(name)


# -- batches of actions ---------------------------------------------------------------------------


def test_rows_of_a_batch_by_env_id() -> None:
    assert validate.rows_by_id([2, 0], [5, 6]) == {2: 5, 0: 6}
    by_id = validate.rows_by_id([2, 0], {"a": np.array([1, 2]), "b": np.zeros((2, 3))})
    assert by_id[0]["a"] == 2
    assert by_id[0]["b"].shape == (3,)
    assert validate.rows_by_id([], []) == {}


@pytest.mark.parametrize("batch", [[1], [1, 2, 3], 7, None, {"a": [1]}])
def test_a_batch_of_another_length_is_refused(batch: Any) -> None:
    with pytest.raises(ActionError, match=r"one action for each of envs \[2, 0\] is needed"):
        validate.rows_by_id([2, 0], batch)


def test_a_batch_that_names_an_env_twice_is_refused() -> None:
    with pytest.raises(ActionError, match=r"env_ids \[2, 2\] name an env twice"):
        validate.rows_by_id([2, 2], [1, 2])


# -- reset params ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {0: None, 1: None, 2: None}),
        ({}, {}),
        ({1: None}, {1: None}),
        ({1: {}}, {1: {}}),
        ({np.int64(1): {"level": 3}, 0: None}, {1: {"level": 3}, 0: None}),
    ],
    ids=str,
)
def test_reset_params_by_env_id(given: Any, expected: Any) -> None:
    assert validate.checked_params(given, 3) == expected


def test_reset_params_are_copied() -> None:
    params = {"level": 3}
    checked = validate.checked_params({0: params}, 1)
    params["level"] = 4
    assert checked == {0: {"level": 3}}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([0], ConfigError),
        (7, ConfigError),
        ({0: 7}, ConfigError),
        ({0: [("a", 1)]}, ConfigError),
        ({0: {3: 1}}, ConfigError),
        ({3: None}, UnknownEnvError),
        ({"0": None}, UnknownEnvError),
    ],
    ids=str,
)
def test_bad_reset_params_are_refused(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        validate.checked_params(given, 3)


def test_reset_params_that_cannot_be_sent_are_refused_before_any_env_is_reset() -> None:
    rig = Rig(3).launch()
    rig.transport.refused[1] = FrameError("it is a lock")
    with pytest.raises(ConfigError, match=r"params of env 1 cannot be sent .*it is a lock.*No env"):
        validate.refuse_unsendable_params(rig.transport, {0: {"a": 1}, 1: {"a": 2}})
    validate.refuse_unsendable_params(rig.transport, {0: {"a": 1}, 1: None, 2: {}})
    assert rig.ready() == [0, 1, 2]
    assert rig.supervisor.table.env_states() == (EnvState.RUN,) * 3


def test_calls_are_refused_to_envs_that_are_gone_for_good() -> None:
    rig = Rig(3, policy=FailurePolicy(max_failures=0)).launch()
    rig.send({0: 1, 1: 1})
    rig.die(0)
    rig.fail(1)
    rig.deliver()
    assert [rig.slot(i).is_gone for i in (0, 1, 2)] == [True, True, False]
    with pytest.raises(EnvNotReadyError, match=r"envs \[0, 1\] have failed for good .*reset\("):
        validate.refuse_gone(rig.supervisor.table, [0, 1, 2], "call('x')")
    validate.refuse_gone(rig.supervisor.table, [2], "call('x')")
    rig.reset(0)
    assert not rig.slot(0).is_gone


# -- rows of batched envs -------------------------------------------------------------------------


@over_routes
def test_actions_that_lack_a_row_are_refused_whole() -> None:
    rig = rows_of_batches(env_num=4)
    with pytest.raises(EnvNotReadyError, match=r"envs \[1, 2\] were sent no action"):
        rig.send({3: 1, 0: 2})
    assert rig.ready() == [0, 1, 2, 3]
    rig.send({3: 1})
    rig.send({2: 3, 0: 1, 1: 2})
    assert len(rig.requests(Op.STEP, 1)) == 1


@over_routes
def test_resets_of_some_rows_are_refused_where_all_are_reset_together() -> None:
    rig = rows_reset_in_next_step()
    for slot in rig.supervisor.envs:
        slot.resets_alone = False
    with pytest.raises(EnvNotReadyError, match=r"while envs \[2\] are in an episode"):
        validate.refuse_partial_resets(rig.supervisor.table, {0: None, 1: None})
    with pytest.raises(ConfigError, match="the same params"):
        validate.refuse_partial_resets(rig.supervisor.table, {0: {"a": 1}, 1: None, 2: None})
    validate.refuse_partial_resets(rig.supervisor.table, {0: {"a": 1}, 1: {"a": 1}, 2: {"a": 1}})
