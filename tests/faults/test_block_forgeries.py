"""What an env may write into the shared block in place of its host: nothing of it is believed.

An env runs in the process that answers for it, and can write wherever that can. So replies in the
block are looked at as if a stranger had written them: what does not answer the request that is
awaited is as if it were not there, and what answers it and makes no sense fails that env.
"""

from __future__ import annotations

import signal
import struct
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from envmgr.errors import EnvCrash, EnvProtocolError, EnvTimeout
from envmgr.wire.block import (
    AFTER_SHIFT,
    BUFFER_BITS,
    DONE,
    ENDING_GIVEN_BIT,
    ENDING_SHIFT,
    HAS_INFO,
    REWARD_SHIFT,
    Block,
    block_is_possible,
    request_of,
    token_of,
)
from envmgr.wire.messages import AfterStep
from envmgr.wire.rewards import KINDS, TYPES
from envmgr.worker.block_steps import BlockStepper
from tests.contract.envs import Do, ScriptedEnv, seen
from tests.contract.forms import Told, is_told
from tests.contract.harness import Setup, World, over, ready_all, step_all

pytestmark = pytest.mark.skipif(not block_is_possible(), reason="no block on this platform")

FORGE = 9
FORGED = 7.5
"""What forged rewards and infos are full of."""

ALONE = Setup("subprocess", "fork", True)
ALONE_ASYNC = Setup("async_subprocess", "fork", True)
PACKED = Setup("subprocess", "fork", True, num_workers=1)
sync_blocks = over(ALONE, PACKED)
async_blocks = over(ALONE_ASYNC, PACKED)


def reached() -> tuple[Block, BlockStepper]:
    """Return what the worker process that this code runs in answers with."""
    frame = sys._getframe()
    while frame.f_code.co_name != "run_worker":
        assert frame.f_back is not None, "this is not a worker process"
        frame = frame.f_back
    stepper = frame.f_locals["stepper"]
    return stepper._block_rows[0].sink.block, stepper


def info_bytes(value: Any, n_missing: int = 0) -> bytes:
    packed = msgspec.msgpack.encode(value)
    packed = packed[: len(packed) - n_missing]
    return struct.pack("<H", len(packed)) + packed


RESETS = int(AfterStep.RESETS) << AFTER_SHIFT
RESETS_IN_NEXT_STEP = int(AfterStep.RESETS_IN_NEXT_STEP) << AFTER_SHIFT
MALFORMED: dict[str, dict[str, Any]] = {
    "a slot that is none": {"flags": BUFFER_BITS},
    "a slot after the last": {"flags": 4},
    "a slot of resets": {"flags": 2},
    "a kind of rewards that is none": {"flags": 31 << REWARD_SHIFT},
    "the first kind of rewards that is none": {"flags": KINDS << REWARD_SHIFT},
    "an integer that is none": {"flags": TYPES.index(int) << REWARD_SHIFT, "reward": np.nan},
    "an infinite integer": {"flags": TYPES.index(np.int64) << REWARD_SHIFT, "reward": np.inf},
    "a form of infos that is none": {"flags": HAS_INFO, "form": 1},
    "the last form of infos": {"flags": HAS_INFO, "form": 255},
    "an info of zeros": {"flags": HAS_INFO, "info": bytes(32)},
    "an info of ones": {"flags": HAS_INFO, "info": b"\xff" * 248},
    "an info too short": {"flags": HAS_INFO, "info": info_bytes({"forged": 1.5}, 1)},
    "an info with objects": {
        "flags": HAS_INFO,
        "info": info_bytes({"forged": msgspec.msgpack.Ext(1, b"|O8;1;12345678")}),
    },
    "an info of many things": {
        "flags": HAS_INFO,
        "info": info_bytes({"forged": msgspec.msgpack.Ext(1, b"<f8;99999999999999999999;")}),
    },
    "an end in no slot": {"flags": DONE | RESETS | BUFFER_BITS},
    "an end with a strange info": {"flags": DONE | HAS_INFO | RESETS, "info": b"\xff" * 248},
    "an end after which others begin its episode": {
        "flags": DONE | ENDING_GIVEN_BIT | RESETS_IN_NEXT_STEP
    },
    "all bits": {"flags": 0xFFFF, "info": b"\xff" * 248},
}
"""Answers to the request that is awaited."""

FOREIGN: dict[str, Any] = {
    "the request before": lambda g, r: token_of(g, r - 1),
    "the request after": lambda g, r: token_of(g, r + 1),
    "the generation after": lambda g, r: token_of(g + 1, r),
    "the generation before": lambda g, r: token_of(g - 1, r),
    "request zero": lambda g, r: 0,
    "no request": lambda g, r: (1 << 64) - 1,
    "a token with another bit": lambda g, r: token_of(g, r) ^ 1 << 63,
}
"""Answers to other requests."""


class Forger(ScriptedEnv):
    """Writes into its row of the block in the midst of a step with action 9, or of a reset.

    Args:
        env_id: its row.
        folder: see `Script`.
        where: "step" or "reset".
    """

    forgery = "none"

    def __init__(self, env_id: int, folder: str, where: str = "step") -> None:
        super().__init__(env_id, folder)
        self._where = where
        self._forges_reset = False

    def step(self, action: Any) -> Any:
        if action != FORGE:
            return super().step(action)
        if self._where == "reset":
            self._forges_reset = True
            return super().step(Do.END)
        self.forge()
        self.script.visit("forged")  # and if the test lets it go, it answers as it should
        return super().step(5)

    def reset(self, **params: Any) -> Any:
        if self._forges_reset:
            self._forges_reset = False
            self.forge_reset()
            self.script.visit("forged")
        return super().reset(**params)

    def forge(self) -> None:
        (block, posted), row = reached(), self.script.env_id
        token = int(block.requests[row])
        forgery = MALFORMED.get(self.forgery, {"flags": 0})
        if self.forgery in FOREIGN:
            token = FOREIGN[self.forgery](*request_of(token))
        info = np.frombuffer(forgery.get("info", b""), np.uint8)
        block.infos[row, : len(info)] = info
        block.info_forms[row] = forgery.get("form", 0)
        block.rewards[row] = forgery.get("reward", FORGED)
        block.wide_rewards[row] = FORGED
        block.flags[row] = forgery["flags"]
        block.replies[row] = token % (1 << 64)
        posted.ring()

    def forge_reset(self) -> None:
        (block, posted), row = reached(), self.script.env_id
        token = int(block.requests[row])
        forgery = {**MALFORMED, "a slot of steps": {"flags": 0}}.get(self.forgery, {"flags": 2})
        if self.forgery in FOREIGN:
            token = FOREIGN[self.forgery](*request_of(token))
        info = np.frombuffer(forgery.get("info", b""), np.uint8)
        block.reset_infos[row, : len(info)] = info
        block.reset_info_forms[row] = forgery.get("form", 0)
        block.reset_flags[row] = forgery["flags"]
        block.resets[row] = token % (1 << 64)
        posted.ring()


def forgers(
    world: World,
    setup: Setup,
    where: str = "step",
    env: type[ScriptedEnv] | None = None,
    **cfg: Any,
) -> Any:
    """Return a manager of three envs; the second is a forger."""
    env_fn: list[Any] = [partial(ScriptedEnv, i, world.folder) for i in range(3)]
    env_fn[1] = partial(env or Forger, 1, world.folder, where)
    _ = world.gate
    return world.make(setup, env_fn=env_fn, max_failures=99, max_failures_total=99, **cfg)


def forgeries(manager: Any, names: Iterable[str]) -> Iterator[int]:
    """Have the forger forge one thing after the other; yield their numbers."""
    for number, name in enumerate(names):
        ready_all(manager)
        manager.set_attr("forgery", name, env_ids=[1])
        yield number


def assert_nothing_forged(timesteps: Any) -> None:
    for timestep in timesteps.values():
        assert "forged" not in timestep.info
        assert np.all(timestep.reward != FORGED)
        assert timestep.obs.dtype == np.float64


def assert_all_go_on(manager: Any, setup: Setup) -> None:
    following = step_all(manager, {0: 6, 1: 7, 2: 8})
    assert seen(following[1].obs)[4] == 7
    for i, action in ((0, 6), (2, 8)):
        if setup is not PACKED:  # else their host is gone
            assert seen(following[i].obs)[4] == action


@sync_blocks
def test_answers_that_make_no_sense_fail_their_env(world: World, setup: Setup) -> None:
    manager = forgers(world, setup)
    for number in forgeries(manager, MALFORMED):
        last = step_all(manager, {0: 1, 1: 2, 2: 3})
        timesteps = step_all(manager, {0: 4, 1: FORGE, 2: 5})
        error = timesteps[1].info["error"]
        assert isinstance(error, EnvProtocolError), error
        assert "env 1" in str(error)
        assert timesteps[1].obs.tobytes() == last[1].obs.tobytes()
        assert_nothing_forged(timesteps)
        before = {i: seen(timestep.obs) for i, timestep in last.items()}
        assert seen(timesteps[0].obs)[:5] == (*before[0][:3], before[0].step + 1, 4)
        neighbour = timesteps[2]
        if setup is PACKED:
            assert isinstance(neighbour.info["error"], EnvCrash)  # it was in the queue
            assert 5 not in world.actions(2)
        else:
            assert seen(neighbour.obs)[:5] == (*before[2][:3], before[2].step + 1, 5)
        assert seen(ready_all(manager)[1])[:4] == (1, number + 1, 0, 0)
        pids = {pid for _, pid in world.noted(1, "build")}
        assert len(pids) == number + 2, "the host was used again"
        assert_all_go_on(manager, setup)
        assert manager.stats()["failures_by_kind"] == {"EnvProtocolError": number + 1}


@async_blocks
def test_answers_to_other_requests_are_as_if_they_were_not_there(
    world: World, setup: Setup
) -> None:
    manager = forgers(world, setup)
    for number in forgeries(manager, FOREIGN):
        step_all(manager, {0: 1, 1: 2, 2: 3})
        manager.send({0: 4, 1: FORGE, 2: 5})
        visit = world.gate.await_visit(1, "forged")
        timesteps = manager.recv(3, timeout_s=0.02)
        assert 1 not in timesteps
        visit.release()
        while len(timesteps) < 3:
            timesteps.update(manager.recv())
        assert_nothing_forged(timesteps)
        step = 2 * number + 2
        assert [seen(timesteps[i].obs)[:5] for i in range(3)] == [
            (0, 0, 0, step, 4),
            (1, 0, 0, step, 5),
            (2, 0, 0, step, 5),
        ]
        assert manager.stats()["failures"] == 0


RESETS_WITHOUT_SENSE = (
    "a slot that is none",
    "a slot of steps",
    "an info of ones",
    "an info too short",
    "all bits",
)


@sync_blocks
def test_resets_that_make_no_sense_fail_their_env(world: World, setup: Setup) -> None:
    manager = forgers(world, setup, "reset")
    for number in forgeries(manager, RESETS_WITHOUT_SENSE):
        ended = step_all(manager, {1: FORGE})[1]
        assert ended.done
        assert "error" not in ended.info
        assert seen(ready_all(manager)[1])[:4] == (1, number + 1, 0, 0)
        assert manager.stats()["failures_by_kind"] == {"EnvProtocolError": number + 1}
        assert_all_go_on(manager, setup)


@async_blocks
def test_resets_after_other_requests_are_as_if_they_were_not_there(
    world: World, setup: Setup
) -> None:
    manager = forgers(world, setup, "reset")
    names = ("the request before", "the request after", "no request")
    for number in forgeries(manager, names):
        assert step_all(manager, {1: FORGE})[1].done
        visit = world.gate.await_visit(1, "forged")
        assert [*manager.ready_obs] == [0, 2]
        visit.release()
        assert seen(ready_all(manager)[1])[:4] == (1, 0, number + 1, 0)
        assert manager.stats()["failures"] == 0


class Deceiver(Forger):
    """Says that its host does something else than it does, and hangs."""

    def forge(self) -> None:
        block, _ = reached()
        running, since = {
            "idle": (0, float("inf")),
            "busy with a stranger": (99, float("inf")),
            "busy with one who does nothing": (1, float("inf")),
            "busy for ever": (2, float("inf")),
            "busy since when": (2, float("nan")),
            "idle since when": (0, float("nan")),
        }[self.forgery]
        block.since[:] = since
        block.running[:] = running


LIES = (
    "idle",
    "busy with a stranger",
    "busy with one who does nothing",
    "busy for ever",
    "busy since when",
    "idle since when",
)


@sync_blocks
def test_who_lies_about_the_time_is_timed_out_all_the_same(world: World, setup: Setup) -> None:
    manager = forgers(world, setup, env=Deceiver, step_timeout=0.3)
    for number in forgeries(manager, LIES):
        manager.send({1: FORGE})
        timesteps = manager.recv(1, timeout_s=10.0)
        assert isinstance(timesteps[1].info["error"], EnvTimeout)
        assert seen(ready_all(manager)[1])[:4] == (1, number + 1, 0, 0)


class TextForger(Told):
    """Its text makes no sense, in the step with action RAISE or in the reset that follows it."""

    forges_reset = False
    _ends_with_forgery = False

    def step(self, action: Any) -> Any:
        if action != self.RAISE:
            return super().step(action)
        if not self.forges_reset:
            self.forge(of_reset=False)
        self._ends_with_forgery = True
        return super().step(self.END)

    def reset(self, **how: Any) -> Any:
        if self._ends_with_forgery:
            self.forge(of_reset=True)
        return super().reset(**how)

    def forge(self, *, of_reset: bool) -> None:
        """Answer with an observation that has a bad text, and then do nothing any more."""
        (block, posted), row = reached(), self.env_id
        (writer,) = (r.runner.writer for r in posted._block_rows if r.sink.env_id == row)
        buffer = writer.write(self.observe(), of_reset=of_reset)
        for target in writer._targets[buffer]:
            if isinstance(target, memoryview):
                target[:4] = b"\xff" * 4
        flags = block.reset_flags if of_reset else block.flags
        tokens = block.resets if of_reset else block.replies
        flags[row] = buffer
        tokens[row] = block.requests[row]
        posted.ring()
        while True:
            signal.pause()


@sync_blocks
def test_texts_that_make_no_sense_fail_their_env(world: World, setup: Setup) -> None:
    env_fn = [partial(TextForger if i == 1 else Told, i, has_long=False) for i in range(3)]
    manager = world.make(setup, env_fn=env_fn, max_failures=99, max_failures_total=99)
    for number, forges_reset in enumerate((False, True, False)):
        ready_all(manager)
        last = step_all(manager, {0: 1, 1: 2, 2: 3})
        ready_all(manager)
        manager.set_attr("forges_reset", forges_reset, env_ids=[1])
        forged = step_all(manager, {1: Told.RAISE})[1]
        if forges_reset:
            assert forged.done
            assert is_told(forged.obs)
        else:
            error = forged.info["error"]
            assert isinstance(error, EnvProtocolError), error
            assert "value['mission'] is a text of 4294967295 bytes" in str(error)
            assert forged.obs["mission"] == last[1].obs["mission"]
        assert all(map(is_told, ready_all(manager).values()))
        assert manager.stats()["failures_by_kind"] == {"EnvProtocolError": number + 1}


def test_flags_of_the_tests_are_those_of_the_block() -> None:
    """So that a change of the block's layout is not overlooked here."""
    assert KINDS == 24
    assert (DONE, HAS_INFO, AFTER_SHIFT, REWARD_SHIFT, ENDING_SHIFT) == (0x80, 0x100, 9, 11, 4)
