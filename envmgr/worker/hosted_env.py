"""One env on the child side: runs its requests and says what came of them.

This module imports nothing of managers, torch or treetensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from envmgr.env import adapt
from envmgr.env.gymnasium_env import GymnasiumEnv
from envmgr.types import EnvFactory
from envmgr.wire.arenas import Placement
from envmgr.wire.block import Block
from envmgr.wire.frames import FrameError
from envmgr.wire.messages import (
    UNANSWERED,
    Attribute,
    EnvDescription,
    FailureKind,
    Message,
    Op,
)
from envmgr.worker.applied import AppliedEnv
from envmgr.worker.in_service import InService
from envmgr.worker.posted import PostedSteps
from envmgr.worker.running import RunningEnv, Surroundings
from envmgr.worker.seats import seat_of
from envmgr.worker.sinks import BlockSink

_METHOD_TYPES = (MethodType, FunctionType, BuiltinMethodType)


class HostedEnv:
    """What serves an env_id: builds its env, and runs requests against it.

    Args:
        env_id: the env's id.
        factory: builds the env; called by HELLO and RENEW.
        given: what its host gives it.
        memory: opens the shared memory when observations are placed in it.
        posted: the host's posted steps, which the env takes part in when its placement has a
            block; None where there are none.
        run: returns what takes the steps of an env that was built.
        in_service: the env objects that are in use.

    Attributes:
        env_id: the env's id.
    """

    def __init__(
        self,
        env_id: int,
        factory: EnvFactory,
        given: Surroundings,
        memory: Callable[[int], Any],
        posted: PostedSteps | None,
        run: Callable[[Any, Surroundings], RunningEnv],
        in_service: InService,
    ) -> None:
        self.env_id = env_id
        self._factory = factory
        self._given = given
        self._messages = given.messages
        self._memory = memory
        self._posted = posted
        self._run = run
        self._in_service = in_service
        self._running: RunningEnv | None = None

    @property
    def episodes(self) -> int:
        """Episodes that the present env has ended."""
        return 0 if self._running is None else self._running.episodes

    def handle(self, message: Message) -> None:
        """Run one request and send its replies."""
        op, running = message.op, self._running
        if op == Op.STEP and running is not None:  # first, for it is what comes most
            running.step(self._messages, message, message.payload)
        elif op == Op.HELLO or op == Op.RENEW:
            self._messages.send(self._renew(message))
        elif op == Op.RELEASE:
            self.close()
            self._messages.send(self._messages.reply(message, Op.RESULT, None))
        elif op == Op.ATTACH:
            if running is not None:
                self._attach(message, running)
        elif op not in _CALLS and op != Op.STEP and op != Op.RESET:
            self._messages.refuse(message, "request", f"unknown operation {op}")
        elif running is None:
            during = {Op.STEP: "step", Op.RESET: "reset"}.get(Op(op), "call")
            self._messages.refuse(message, during, "there is no env")
        elif op == Op.RESET:
            running.reset(message)
        else:
            self._messages.send(self._run_call(message, running))

    def _renew(self, message: Message) -> Any:
        self.close()
        try:
            built = self._factory()
            self._in_service.take(built, self)
            env = adapt.as_base_env(built, self.env_id)
            self._running = running = self._run(env, self._given)
            return self._hello(message, running)
        except BaseException as error:  # whatever the env's code may raise, SystemExit included
            if self._running is None:
                self._in_service.leave(self)
            return self._messages.raised(message, error, "construction")

    def _hello(self, message: Message, running: RunningEnv) -> Any:
        about = (getattr(running.env, name, None) for name in ("metadata", "spec", "render_mode"))
        described = EnvDescription(*running.spaces, *about)  # type: ignore[arg-type]
        description = described._replace(
            resets_alone=bool(running.resets_alone),
            converts_actions=isinstance(running.env, GymnasiumEnv),
        )
        try:
            return self._messages.reply(message, Op.HELLO, description)
        except FrameError:  # registrations may hold what cannot be sent; nothing depends on them
            description = description._replace(metadata=None, spec=None)
            return self._messages.reply(message, Op.HELLO, description)

    def close(self) -> None:
        """Close the env, if there is one."""
        running, self._running = self._running, None
        if self._posted is not None:
            self._posted.leave(self.env_id)
        try:
            if running is not None:
                running.close()
        finally:
            self._in_service.leave(self)

    def adopt(self, message: Message) -> None:
        """Serve another env_id, and answer with what came of the reset that was kept."""
        running = self._running
        if self._posted is not None:
            self._posted.leave(self.env_id)
        self.env_id = message.env_id
        if running is None:
            if message.request_id != UNANSWERED:
                self._messages.refuse(message, "reset", "there is no env")
            return
        adapt.serve_env_id(running.env, message.env_id)
        if message.payload is not None:
            self._attach(message, running)
        else:
            running.writer.detach()
        running.hand_over(message)

    def _attach(self, message: Message, running: RunningEnv) -> None:
        placement: Placement = message.payload
        memory = self._memory(placement.nbytes)
        running.writer.attach(memory, placement)
        if self._posted is not None and placement.block is not None:
            block, posted = Block(memory, placement.block), self._posted
            sink = BlockSink(block, self.env_id, self.env_id, self._messages, posted.begin)
            posted.seat(seat_of(running, sink, placement.action_kind))

    def carried(self, reference: Any) -> Any:
        """Return what stands for an observation wherever the memory is not that it was put in."""
        return reference if self._running is None else self._running.writer.carried(reference)

    def _run_call(self, message: Message, running: RunningEnv) -> Any:
        op = message.op
        try:
            return self._messages.reply(message, Op.RESULT, _CALLS[op](running, message.payload))
        except BaseException as error:  # as in `_renew`
            failure = self._messages.failure_of(error, "call")
            if op == Op.GET_ATTR and isinstance(error, AttributeError):
                failure = replace(failure, kind=FailureKind.NO_ATTRIBUTE)
            return self._messages.failed(message, failure)


def _call(running: RunningEnv, payload: Any) -> Any:
    name, args, *kwargs = payload  # which are there if there are any
    return adapt.env_attribute(running.env, name)(*args, **(kwargs[0] if kwargs else {}))


def _get_attr(running: RunningEnv, name: str) -> Attribute:
    value = adapt.env_attribute(running.env, name)
    is_method = isinstance(value, _METHOD_TYPES)
    return Attribute(is_method, None if is_method else value)


def _set_attr(running: RunningEnv, payload: Any) -> None:
    name, value = payload
    adapt.set_env_attribute(running.env, name, value)


def _apply(running: RunningEnv, payload: Any) -> Any:
    function, args = payload
    _, action_space, _ = running.spaces
    applied = AppliedEnv(
        running.env, running.step_result, action_space, running.plan.params, running.episodes
    )
    return function(applied, *args)


_CALLS: dict[int, Callable[[RunningEnv, Any], Any]] = {
    Op.CALL: _call,
    Op.GET_ATTR: _get_attr,
    Op.SET_ATTR: _set_attr,
    Op.APPLY: _apply,
}
"""What returns the results of requests that neither step nor reset the env."""
