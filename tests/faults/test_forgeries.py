"""F12: bytes that are no frame, replies that no request asked for, late and malformed ones.

An env that got hold of its worker's connection writes messages of the protocol into it. What
matters is not that envs do so, but that the manager believes nothing that does not fit its
requests.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from envmgr.errors import EnvProtocolError
from envmgr.testing.faulty import worker_channel
from envmgr.types import EnvTimestep
from envmgr.wire.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, encode
from envmgr.wire.messages import AfterStep, Message, Op
from envmgr.worker.sinks import BlockSink
from tests.contract.envs import OBS_SPACE, ScriptedEnv, seen
from tests.contract.harness import (
    Setup,
    World,
    process_kinds,
    ready_all,
    step_all,
)

FORGED = 7.5
"""What forged observations are full of."""


def stepped(reference: Any) -> tuple[Any, ...]:
    return (reference, FORGED, False, {"forged": True}, int(AfterStep.NOTHING))


def _by_message(timestep: EnvTimestep) -> EnvTimestep:
    """Have the answer follow what was forged: through the block it may be seen before that."""
    return timestep._replace(info={**timestep.info, "listed": []})


class Forger(ScriptedEnv):
    """Sends a message of its own before it answers a step with action 9."""

    forgery = "none"

    def step(self, action: Any) -> Any:
        if action == 9:
            channel = worker_channel()
            for message in self._forge(_request_in_progress()):
                channel.send(encode(message))
        return _by_message(super().step(action))

    def _forge(self, request: Message) -> list[Message]:
        obs = [bytearray(np.full(OBS_SPACE.shape, FORGED).data)]
        reply = request._replace(op=Op.STEPPED, payload=stepped(obs))
        slot = request._replace(op=Op.STEPPED, payload=stepped(0))
        other_env, generation = (self.script.env_id + 1) % 3, request.generation
        return {
            "another env": [reply._replace(env_id=other_env)],
            "another generation": [reply._replace(generation=generation + 1)],
            "an older request": [slot._replace(request_id=request.request_id - 1)],
            "a later request": [slot._replace(request_id=request.request_id + 1)],
            "another operation": [request._replace(op=Op.RESET_DONE, payload=(obs, {}))],
            "a request": [request],
            "an unknown operation": [request._replace(op=99, payload=None)],
            "a slot out of range": [slot._replace(payload=stepped(99))],
            "a negative slot": [slot._replace(payload=stepped(-1))],
            "no slot": [slot._replace(payload=stepped("here"))],
            "leaves too many": [reply._replace(payload=stepped(obs * 2))],
            "leaves of another shape": [reply._replace(payload=stepped([bytearray(16)]))],
            "fields missing": [slot._replace(payload=(0, 1.0))],
            "no payload": [slot._replace(payload=None)],
            "no failure": [request._replace(op=Op.FAILED, payload="sorry")],
            "no description": [request._replace(op=Op.HELLO, payload=None)],
        }[self.forgery]


class Scribe(ScriptedEnv):
    """Writes bytes of its own into the connection before it answers a step with action 9."""

    scribble = "none"

    def step(self, action: Any) -> Any:
        if action == 9:
            self._write(SCRIBBLES[self.scribble](_request_in_progress()))
        return _by_message(super().step(action))

    def _write(self, data: bytes) -> None:
        fd = worker_channel().fds[-1]
        try:
            while data:
                data = data[os.write(fd, data) :]
        except BrokenPipeError:
            time.sleep(1000)  # the trainer has let go of it, and kills it


def _frame(request: Message) -> bytes:
    obs = [bytearray(np.full(4, FORGED).data)]
    return encode(request._replace(op=Op.STEPPED, payload=stepped(obs)))


def _flipped(data: bytes, byte: int) -> bytes:
    return data[:byte] + bytes([data[byte] ^ 4]) + data[byte + 1 :]


SCRIBBLES: dict[str, Callable[[Message], bytes]] = {
    "a line of text": lambda request: b"terminate called after throwing an instance of\n",
    "twos": lambda request: b"\2" * 4096,
    "noise without end": lambda request: bytes(range(2, 256)) * (1 << 18),
    "a truncated frame": lambda request: _frame(request)[:-3],
    "half of a header": lambda request: _frame(request)[: HEADER_BYTES // 2],
    "a flipped bit in a header": lambda request: _flipped(_frame(request), 9),
    "a flipped bit in a length": lambda request: _flipped(_frame(request), 22),
    "a flipped bit in a payload": lambda request: _flipped(_frame(request), HEADER_BYTES + 20),
    "an absurd length": lambda request: _sealed(MAX_PAYLOAD_BYTES + 1),
    "a frame of another version": lambda request: _flipped(_frame(request), 2),
}


@process_kinds
def test_f12_bells_that_nobody_asked_for_are_harmless(
    world: World, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCRIBBLES, "bells", lambda request: b"\0\1" * 4096)
    manager = world.make(setup, 3, env=Scribe)
    manager.set_attr("scribble", "bells")
    ready_all(manager)
    timesteps = step_all(manager, {0: 4, 1: 9, 2: 5})
    assert [seen(t.obs)[3:5] for t in timesteps.values()] == [(1, 4), (1, 9), (1, 5)]
    assert manager.stats()["failures"] == 0


def _sealed(length: int) -> bytes:
    header = struct.pack("<HBBIIQI", 0xE17A, 1, Op.STEPPED, 1, 0, 1, length)
    return header + struct.pack("<II", zlib.crc32(header), 0)


@process_kinds
def test_f12_bytes_that_are_no_frame_end_their_worker_alone(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, env=Scribe, max_failures=99, max_failures_total=99)
    for number, scribble in enumerate(SCRIBBLES):
        manager.set_attr("scribble", scribble)
        check_that_action_9_breaks_the_protocol(world, manager, number)


def check_that_action_9_breaks_the_protocol(world: World, manager: Any, number: int) -> None:
    """Have env 1 take it, for the so-manieth time; the others must not feel it."""
    ready_all(manager)
    last = step_all(manager, {0: 1, 1: 2, 2: 3})
    timesteps = step_all(manager, {0: 4, 1: 9, 2: 5})
    error = timesteps[1].info["error"]
    assert isinstance(error, EnvProtocolError)
    assert "env 1" in str(error)
    assert timesteps[1].obs.tobytes() == last[1].obs.tobytes()
    step = 3 * number + 2
    assert [seen(timesteps[i].obs)[:5] for i in (0, 2)] == [(0, 0, 0, step, 4), (2, 0, 0, step, 5)]
    assert all("forged" not in t.info for t in timesteps.values())
    assert seen(ready_all(manager)[1])[:4] == (1, number + 1, 0, 0)
    pids = {pid for _, pid in world.noted(1, "build")}
    assert len(pids) == number + 2, "a host that broke the protocol was used again"
    following = step_all(manager, {0: 6, 1: 7, 2: 8})
    assert [seen(t.obs)[3:5] for t in following.values()] == [(step + 1, 6), (1, 7), (step + 1, 8)]
    assert manager.stats()["failures_by_kind"] == {"EnvProtocolError": number + 1}


def _request_in_progress() -> Message:
    """Return the request that the worker is running, from the frames of its host."""
    import sys

    frame = sys._getframe()
    while frame.f_back is not None:
        message = frame.f_locals.get("message")
        if isinstance(message, Message):
            return message
        sink = frame.f_locals.get("sink")
        if isinstance(sink, BlockSink):  # it came through the block, on the short way or the other
            local = frame.f_locals
            return sink.request(local["key"] if "key" in local else local["token"])
        frame = frame.f_back
    raise AssertionError("no request is in progress")


FORGERIES = (
    "another env",
    "another generation",
    "an older request",
    "a later request",
    "another operation",
    "a request",
    "an unknown operation",
    "a slot out of range",
    "a negative slot",
    "no slot",
    "leaves too many",
    "leaves of another shape",
    "fields missing",
    "no payload",
    "no failure",
    "no description",
)


@process_kinds
def test_f12_forged_replies_are_never_delivered(world: World, setup: Setup) -> None:
    manager = world.make(setup, 3, env=Forger, max_failures=99, max_failures_total=99)
    for number, forgery in enumerate(FORGERIES):
        manager.set_attr("forgery", forgery)
        check_that_action_9_breaks_the_protocol(world, manager, number)
