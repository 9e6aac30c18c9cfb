"""Every form of data, on every way it can take."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Text

from envmgr import as_gymnasium, create_env_manager
from envmgr.errors import ActionError, ConfigError, EnvProtocolError
from tests.contract.envs import SampleEnv
from tests.contract.forms import FIXED, FORMS, Bare, Chat, Message, Odd, Small
from tests.contract.harness import (
    ALL_BLOCK,
    ALL_BLOCK_SHARED,
    ALL_MESSAGE,
    DEFAULT,
    INLINE,
    THREADS,
    Setup,
    World,
    over,
    ready_all,
    step_all,
)
from tests.faults.traffic import sent_by

EACH_WAY = (THREADS, ALL_BLOCK, ALL_MESSAGE, ALL_BLOCK_SHARED)
N_STEPS = 6


def trajectories(setup: Setup, forms: Sequence[Any], **cfg: Any) -> list[str]:
    """Run an env of each of these forms with the same actions; return what came out, as text.

    What was handed out is looked at when all is over: nothing may have changed it by then.
    """
    makes = {**FORMS, **FIXED}
    actions = [makes[form] for form in forms]
    out: list[Any] = []
    cfg = {**setup.cfg, "same_spaces": False, "seed": 3, **cfg}
    with create_env_manager(cfg, env_fn=list(forms)) as manager:
        for k in range(N_STEPS):
            ready = ready_all(manager)
            given = {i: make(k) for i, make in enumerate(actions)}
            before = copy.deepcopy(given)
            found = step_all(manager, given)
            assert str(given) == str(before), "an env has changed what it was given"
            out += [(i, ready[i], found[i]) for i in sorted(found)]
        batch = manager.ready_arrays(env_ids=range(len(forms)))
        assert batch.obs.dtype == object
        assert [str(obs) for obs in batch.obs] == [str(obs) for obs in ready_all(manager).values()]
    return [str(each) for each in out]


def test_every_form_gives_the_same_trajectories_on_every_way() -> None:
    together = (*FORMS, *FIXED)  # those with a fixed layout are posted, the others sent
    expected = trajectories(INLINE, together)
    assert len(expected) == N_STEPS * len(together)
    for setup in EACH_WAY:
        assert trajectories(setup, together) == expected, setup


INTERLEAVED = (*FIXED, *reversed(FIXED), Small)


def test_envs_of_different_layouts_give_the_same_trajectories_on_every_way() -> None:
    expected = trajectories(INLINE, INTERLEAVED)
    for setup in (*EACH_WAY, ALL_BLOCK._replace(num_workers=2)):
        assert trajectories(setup, INTERLEAVED) == expected, setup
    assert trajectories(ALL_BLOCK_SHARED, INTERLEAVED, reset_inplace=True)[:9] == expected[:9]


@over(ALL_BLOCK_SHARED, INLINE)
def test_envs_of_different_layouts_are_stepped_through_the_block(
    world: World, setup: Setup
) -> None:
    makes = {**FIXED, Chat: FORMS[Chat]}
    forms = (*INTERLEAVED, Chat)
    manager = world.make(setup, env_fn=list(forms), same_spaces=False, copy_on_get="checked")
    ids = range(len(INTERLEAVED))
    with sent_by(manager) as sent:
        ready_all(manager)
        for k in range(2):
            found = step_all(manager, {i: makes[forms[i]](k) for i in ids})
        assert [what for what, *_ in sent if what == "frame"] in ([], ["frame"] * len(forms))
        sent.clear()
        # Envs of one layout, as arrays: they are found by what is given, whoever they are.
        small = [i for i in ids if forms[i] is Small]
        manager.send_arrays(small, np.array([0, 1, 2]))
        batch = manager.recv_arrays()
        assert (batch.obs.shape, batch.obs.dtype) == ((3, 2), np.float32)
        assert batch.obs[:, 0].tolist() == [3.0, 3.0, 3.0]
        assert [info["heard"] for info in batch.infos] == [repr(np.int64(i)) for i in range(3)]
        ready = manager.ready_arrays(env_ids=small)
        assert ready.obs.tolist() == batch.obs.tolist()
        assert manager.ready_arrays(env_ids=[2, 5]).obs["picture"].shape == (2, 80, 60)
        # Of several layouts, they are objects.
        actions = [makes[forms[i]](5) for i in (1, 2)]
        manager.send_arrays([1, 2], actions)
        mixed = manager.recv_arrays()
        assert (mixed.obs.dtype, mixed.obs[1]["picture"].shape) == (np.dtype(object), (80, 60))
        assert "frame" not in [what for what, *_ in sent]
    assert str(found[1].obs[0]["name"]) == "ork"
    with pytest.raises(ActionError, match=r"env 1 .*dtype=<U8"):
        manager.step({0: 1, 1: 7})
    with pytest.raises(ActionError, match=r"one action for each"):
        manager.send_arrays([0, 1], [1])
    # With an env among them whose data has no layout, that one is sent a message.
    with sent_by(manager) as sent:
        timesteps = step_all(manager, {0: 1, 9: Message("user", "x"), 1: makes[forms[1]](1)})
        assert [what for what, *_ in sent].count("frame") == 1
    assert list(timesteps) == [0, 9, 1]
    assert timesteps[9].obs[-1].text == "x"
    ready_all(manager)
    for bad in ({0: 9, 9: Message("user", "x")}, {0: 1, 9: threading.Lock()}):
        with sent_by(manager) as sent, pytest.raises(ActionError, match=r"Nothing was sent"):
            manager.step(bad)
        assert sent == []
    stats = manager.stats()
    assert stats["actions"] == stats["timesteps"]


class Silent(SampleEnv):
    """As `SampleEnv`, without infos: nothing about its steps is out of the ordinary."""

    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], {})


@over(ALL_BLOCK_SHARED, ALL_MESSAGE, INLINE)
def test_batches_of_several_layouts_are_objects_where_actions_are_of_one(
    world: World, setup: Setup
) -> None:
    spaces = [Text(5), Text(6), Box(0, 1, (2,)), Text(5)]
    env_fn = [partial(Silent, space, episode_length=99) for space in spaces]
    manager = world.make(setup, env_fn=env_fn, same_spaces=False, seed=1)
    for ids in ([0, 1, 2, 3], [0, 3], [0, 1, 2, 3]):
        ready = manager.ready_arrays(env_ids=ids)
        manager.send_arrays(ids, np.zeros(len(ids), np.int64))
        batch = manager.recv_arrays()
        for obs in (ready.obs, batch.obs):
            assert (obs.dtype, obs.shape) == (np.dtype(object), (len(ids),))
            assert all(spaces[i].contains(one) for i, one in zip(ids, obs, strict=True))


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


@over(INLINE, THREADS, ALL_BLOCK, ALL_MESSAGE)
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


def test_objects_as_gymnasium_batches_them() -> None:
    envs = as_gymnasium(create_env_manager(ALL_BLOCK.cfg, env_fn=[Bare] * 2))
    first, _ = envs.reset(seed=1)
    obs, *_ = envs.step(("a", "b"))
    envs.close()
    assert obs == (f"{first[0]}, a", f"{first[1]}, b")
