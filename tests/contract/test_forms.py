"""Every form of data, on every way it can take."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest

from envmgr import create_env_manager
from envmgr.errors import ActionError, ConfigError, EnvProtocolError
from tests.contract.forms import FORMS, Bare, Chat, Message, Odd
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_BLOCK_SHARED,
    ALL_MESSAGE,
    DEFAULT,
    IN_LINE,
    THREADS,
    Setup,
    World,
    over,
    ready_all,
    step_all,
)

EACH_WAY = (THREADS, ALL_BLOCK, ALL_MESSAGE, ALL_BLOCK_SHARED)
N_STEPS = 6


def trajectories(setup: Setup) -> list[str]:
    """Run one env of each form with the same actions; return all that came out, as text.

    What was handed out is looked at when all is over: nothing may have changed it by then.
    """
    env_fn, actions = list(FORMS), list(FORMS.values())
    out: list[Any] = []
    cfg = {**setup.cfg, "same_spaces": False, "seed": 3}
    with create_env_manager(cfg, env_fn=env_fn) as manager:
        for k in range(N_STEPS):
            ready = ready_all(manager)
            given = {i: make(k) for i, make in enumerate(actions)}
            before = copy.deepcopy(given)
            found = step_all(manager, given)
            assert str(given) == str(before), "an env has changed what it was given"
            out += [(i, ready[i], found[i]) for i in sorted(found)]
        batch = manager.ready_arrays(env_ids=range(len(env_fn)))
        assert batch.obs.dtype == object
        assert [str(obs) for obs in batch.obs] == [str(obs) for obs in ready_all(manager).values()]
    return [str(each) for each in out]


def test_every_form_gives_the_same_trajectories_on_every_way() -> None:
    expected = trajectories(IN_LINE)
    assert len(expected) == N_STEPS * len(FORMS)
    for setup in EACH_WAY:
        assert trajectories(setup) == expected, setup


def test_objects_of_a_script_reach_workers_that_have_another_main(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = __import__("__main__")
    said = type("Said", (Message,), {"__module__": "__main__"})
    monkeypatch.setattr(main, "Said", said, raising=False)
    with create_env_manager(DEFAULT.cfg, env_fn=[Chat]) as manager:
        (timestep,) = step_all(manager, {0: said("user", "hello")}).values()
    assert type(timestep.obs[-1]) is said, timestep
    assert timestep.obs[-1].tags == ["taken"]


@over(IN_LINE, THREADS, ALL_BLOCK, ALL_MESSAGE)
def test_what_cannot_be_sent_costs_one_timestep_and_names_the_env_and_the_type(
    world: World, setup: Setup
) -> None:
    manager = world.make(setup, env_fn=[Chat, Odd])
    say = Message("user", "x")
    first, second = (step_all(manager, {0: say, 1: say}) for _ in range(2))
    assert "abnormal" not in first[1].info
    error = second[1].info["error"]
    assert type(error) is EnvProtocolError
    for text in ("env 1", "observation, a dict,", "cannot pickle '_thread.lock'"):
        assert text in str(error)
    assert str(second[1].obs) == str(first[1].obs), "the last good one"
    assert len(second[0].obs) == 3
    # Whatever becomes of the structure of objects: there is nothing that it has to be.
    ready_all(manager)
    manager.set_attr("t", 2, env_ids=[1])
    assert step_all(manager, {1: say})[1].obs == {"now": "a dict"}
    with pytest.raises(ActionError, match=r"cannot be .*lock"):
        manager.step({0: {"a": threading.Lock()}})
    with pytest.raises(ConfigError, match=r"action space of env 0 has no random values"):
        manager.random_action()
    assert step_all(manager, {0: say})[0].obs


def test_bare_spaces_are_equal() -> None:
    with create_env_manager(ALL_BLOCK.cfg, env_fn=[Bare] * 3) as manager:
        batch = manager.ready_arrays(env_ids=range(3))
        assert (batch.obs.dtype, batch.obs.shape) == (np.dtype(object), (3,))
        manager.send_arrays(batch.env_ids, np.array(["a", "b", "c"], object))
        texts = [str(text)[-1] for text in manager.recv_arrays().obs]
    assert texts == ["a", "b", "c"]
