"""Runs the envs that share a host: what each request does, to all of them and to one.

A `Host` is given messages and sends encoded replies, wherever it runs (in a process, on a thread,
in the caller). A `HostedEnv` is one of its envs; `EnvsInUse` knows which env objects are in use.
The host also notices that it has reached its limit of memory or episodes, and asks to be replaced.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, Protocol

from envmgr.env import adapt
from envmgr.env.async_env import close_async
from envmgr.env.contract import EnvContractError, awaited, env_name
from envmgr.env.gymnasium_env import GymnasiumEnv
from envmgr.spaces.interrupts import pass_interrupt_on
from envmgr.types import EnvFactory
from envmgr.wire.arenas import Placement
from envmgr.wire.block import Block
from envmgr.wire.frames import FrameError
from envmgr.wire.hosts import HostSettings
from envmgr.wire.info_forms import HostForms, InfoField
from envmgr.wire.messages import (
    UNANSWERED,
    Attribute,
    EnvDescription,
    FailureKind,
    Message,
    Op,
    RemoteFailure,
)
from envmgr.worker.applied import AppliedEnv
from envmgr.worker.async_runner import AsyncEnvRunner
from envmgr.worker.batch_runner import AsyncBatchRunner, BatchRunner
from envmgr.worker.block_steps import BlockStepper, TimedBlockStepper
from envmgr.worker.env_runner import (
    CheckpointingEnvRunner,
    EnvRunner,
    HostContext,
    block_row_of,
)
from envmgr.worker.event_loop import (
    NO_LOOP,
    AwaitableSteps,
    EnvWork,
    Steps,
    WorkerLoop,
    finish,
    in_own_thread,
    wait_for,
)
from envmgr.worker.sinks import BlockSink, MessageSink, Send, reraise_interrupt

_METHOD_TYPES = (MethodType, FunctionType, BuiltinMethodType)


class Host:
    """Runs the envs that share a host, one request at a time.

    Resets that it begins by itself, and those that are posted in the block, are run later: the code
    that drives the host runs the requests that have come for the other envs, then `run_resets`.

    Args:
        factories: by env_id; each builds one env, when HELLO or RENEW says so.
        settings: see `HostSettings`.
        encode: encodes a reply for sending; raises FrameError for one that cannot be sent.
        memory: opens the shared memory when observations are placed in it.
        rss_bytes: returns the resident memory of this process.
        stepper: takes the steps that are posted in the block; None if there is no block.
        envs_in_use: the env objects that are in use in this process, if it has other hosts.
        loop: runs async envs; None if there can be none.

    Attributes:
        loop: likewise.
        pending_resets: functions that run the resets that wait, the oldest first.
        is_async: whether it has batched envs that go on working while nobody waits for them.
    """

    def __init__(
        self,
        factories: Mapping[int, EnvFactory],
        settings: HostSettings,
        *,
        encode: Callable[[Message], Any],
        send: Send,
        memory: Callable[[int], Any],
        rss_bytes: Callable[[], int] = lambda: 0,
        stepper: BlockStepper | None = None,
        envs_in_use: EnvsInUse | None = None,
        loop: WorkerLoop | None = None,
    ) -> None:
        envs_in_use = envs_in_use or EnvsInUse()
        self.loop = loop
        self._settings = settings
        if settings.carries:
            encode = partial(self._encode_with_observation, encode)
        self._messages = MessageSink(encode, send, settings)
        self._rss_bytes = rss_bytes
        self._stepper = stepper
        self._wants_recycling = False
        self.pending_resets: deque[Callable[[], None]] = deque()
        timer = stepper if isinstance(stepper, TimedBlockStepper) else None
        is_limited = settings.max_episodes is not None or settings.max_rss_bytes is not None
        wants_recycling = self._has_reached_a_limit if is_limited else None
        run_later = self.pending_resets.append
        self._forms = forms = HostForms(self._propose)
        context = HostContext(settings, self._messages, wants_recycling, run_later, forms, timer)
        runner_of = EnvRunner if settings.save_every is None else CheckpointingEnvRunner
        self._envs = {
            env_id: HostedEnv(
                env_id, factory, context, memory, stepper, runner_of, envs_in_use, loop
            )
            for env_id, factory in factories.items()
        }
        self._batches = [
            (BatchRunner if batch.batch_size is None else AsyncBatchRunner)(
                batch, factories[batch.first], context
            )
            for batch in settings.batches
            if batch.first in factories
        ]
        self.is_async = any(batch.is_async for batch in self._batches)
        for runner in self._batches:
            for i in runner.env_ids:
                open_row = partial(runner.open_row, i)
                self._envs[i] = HostedEnv(
                    i, open_row, context, memory, stepper, runner.runner_of, envs_in_use
                )

    def _encode_with_observation(self, encode: Callable[[Message], Any], message: Message) -> Any:
        """Encode a message with the observation itself in place of a reference to it."""
        env, payload = self._envs.get(message.env_id), message.payload
        if env is not None and payload is not None and message.op in (Op.STEPPED, Op.RESET_DONE):
            observation = env.observation_bytes(payload[0])
            message = message._replace(payload=(observation, *payload[1:]))
        return encode(message)

    @property
    def has_pending_steps(self) -> bool:
        """Whether the work that waits includes a step of a batched env."""
        return any(batch.steps or batch.only_receives for batch in self._batches)

    @property
    def only_receives(self) -> bool:
        """Whether the only work left is to await results of batched envs, which go on meanwhile."""
        n_waits = sum(batch.only_receives for batch in self._batches)
        return 0 < n_waits == len(self.pending_resets)

    def _propose(self, env_id: int, fields: tuple[InfoField, ...] | None) -> None:
        """Tell the trainer which form the infos of an env have; None says that they have none."""
        proposal = Message(Op.INFO_FORM, env_id, 0, UNANSWERED, fields)
        self._messages.send(self._messages.encode(proposal))

    def handle(self, message: Message) -> None:
        """Run one request and send its replies."""
        env = self._envs.get(message.env_id)
        if env is not None and message.op != Op.INFO_FORMS:
            if message.op in self._settings.announced and not env.is_async:
                self._messages.announce(message, message.op)
            if self.loop is None or not self.loop.is_used:
                env.handle(message)
            else:
                self.loop.run_sync(partial(env.handle, message), env.env_id)
        elif message.op == Op.INFO_FORMS:
            self._forms.learn(message.payload)
        elif message.op == Op.ADOPT:
            (env,) = self._envs.values()
            self._envs = {message.env_id: env}
            env.adopt(message)
        else:
            text = f"env {message.env_id} is not one of {list(self._envs)}, which this worker runs"
            self._messages.refuse(message, "request", text)

    def run_resets(self, count: int) -> None:
        """Run up to `count` of the resets that wait."""
        for _ in range(min(count, len(self.pending_resets))):
            self.pending_resets.popleft()()
        if self._stepper is not None:
            self._stepper.note_idle()
            self._stepper.ring_if_asleep()

    def close(self) -> None:
        """Close all envs, and ignore what their own `close` raises."""
        self.pending_resets.clear()
        if self.loop is not None and any(env.is_async for env in self._envs.values()):
            self.loop.finish(self.close_async())
            return
        for env in self._envs.values():
            finish(env.close())

    async def close_async(self) -> None:
        """Close all envs as `close` does, but concurrently, in the event loop."""
        import asyncio  # as in `event_loop`

        self.pending_resets.clear()
        await asyncio.gather(*(_closed(env) for env in self._envs.values()))

    def _has_reached_a_limit(self) -> bool:
        """Return whether this worker wants to be replaced; once it does, that does not change."""
        limit, rss_limit = self._settings.max_episodes, self._settings.max_rss_bytes
        self._wants_recycling = (
            self._wants_recycling
            or (limit is not None and sum(e.episodes for e in self._envs.values()) >= limit)
            or (rss_limit is not None and self._rss_bytes() > rss_limit)
        )
        return self._wants_recycling


# -- one env ------------------------------------------------------------------------------------


class HostedEnv:
    """What serves an env_id: builds its env, and runs requests against it.

    Args:
        factory: builds the env; called by HELLO and RENEW.
        context: what its host gives it.
        memory: opens the shared memory when observations are placed in it.
        stepper: takes the steps that are posted in the block, including those of this env when its
            placement has a block; None if there is no block.
        runner_of: returns the runner of an env that was built.
        envs_in_use: the env objects that are in use.
        loop: runs async envs; None if there can be none.
    """

    def __init__(
        self,
        env_id: int,
        factory: EnvFactory,
        context: HostContext,
        memory: Callable[[int], Any],
        stepper: BlockStepper | None,
        runner_of: Callable[[Any, HostContext], EnvRunner],
        envs_in_use: EnvsInUse,
        loop: WorkerLoop | None = None,
    ) -> None:
        self.env_id = env_id
        self._factory = factory
        self._context = context
        if loop is not None:
            self._context = replace(context, run_later=self._run_later)
        self._run_in_host = context.run_later
        self._messages = context.messages
        self._memory = memory
        self._stepper = stepper
        self._runner_of = runner_of
        self._envs_in_use = envs_in_use
        self._runner: EnvRunner | None = None
        self._work = EnvWork(loop)
        self._is_awaited = False  # what the factory returned

    def _run_later(self, reset: Callable[[], None]) -> None:
        """Have a reset of the env run later, possibly beside async envs."""
        loop = self._work.loop
        if loop is not None and loop.is_used:
            reset = partial(loop.run_sync, reset, self.env_id)
        self._run_in_host(reset)

    @property
    def is_async(self) -> bool:
        """Whether other envs of the host go on while this one serves a request."""
        return self._runner is not None and self._runner.is_async

    @property
    def episodes(self) -> int:
        """Episodes that the present env has ended."""
        return 0 if self._runner is None else self._runner.episodes

    def handle(self, message: Message) -> None:
        """Run one request and send its replies."""
        op, runner = message.op, self._runner
        if op == Op.STEP and runner is not None:  # first, for it is what comes most
            runner.step(self._messages, message, message.payload)
        elif op == Op.HELLO or op == Op.RENEW:
            self._work.run(self._build(message), message, "construction")
        elif op == Op.RELEASE:
            self._work.run(self._release(message), message, "close")
        elif op == Op.CANCEL:
            self._work.cancel(message.request_id, message.payload)
        elif op == Op.ATTACH:
            if runner is not None:
                self._attach(message, runner)
        elif op not in _CALLS and op != Op.STEP and op != Op.RESET:
            self._messages.refuse(message, "request", f"unknown operation {op}")
        elif runner is None:
            during = {Op.STEP: "step", Op.RESET: "reset"}.get(Op(op), "call")
            self._messages.refuse(message, during, "there is no env")
        elif op == Op.RESET:
            runner.reset(message)
        else:
            self._work.run(self._answer_call(message, runner), message, "call")

    def _build(self, message: Message) -> Steps[None]:
        """Build the env, in place of the previous one, and answer."""
        yield from self.close()
        env = None
        try:
            env = yield from self._built(message)
            env = adapt.as_base_env(env, self.env_id)
            if adapt.is_async(env):
                self._refuse_async_beside_posted_steps()
                self._runner = AsyncEnvRunner(env, self._context, self._work)
            else:
                self._runner = self._runner_of(env, self._context)
            reply = self._describe(message, self._runner)
        except BaseException as error:  # whatever the env's code may raise, SystemExit included
            if self._runner is None:
                yield from self._close_refused(env)
                self._envs_in_use.release(self)
            failure = self._failure_of(error, "construction")
            reply = self._messages.failure_reply(message, failure)
        self._messages.send(reply)

    def _built(self, message: Message) -> Steps[Any]:
        """Return what the factory builds, which may have to be awaited."""
        built = self._factory()
        self._is_awaited = inspect.isawaitable(built)
        if self._is_awaited:
            try:
                if self._work.loop is None:
                    raise EnvContractError(NO_LOOP)
                self._refuse_async_beside_posted_steps()
            except EnvContractError:
                if inspect.iscoroutine(built):
                    built.close()
                raise
            self._messages.announce(message, message.op, goes_on=True)
            yield
            built = yield from wait_for(awaited(built))
        self._envs_in_use.claim(built, self)
        return built

    def _close_refused(self, env: Any) -> Steps[None]:
        """Close an env that was built but is not run, and ignore what its `close` raises."""
        try:
            if not adapt.is_async(env):
                adapt.close_env(env)
            elif self._work.loop is None:
                finish(wait_for(close_async(env)))  # as far as it waits for nothing
            else:
                yield
                yield from wait_for(close_async(env))
        except BaseException as error:  # the env is gone either way
            reraise_interrupt(error, self._context.settings)

    def _refuse_async_beside_posted_steps(self) -> None:
        if self._stepper is not None and self._stepper.has_rows:
            raise EnvContractError(
                "the new env, or what builds it, is async, and that of the one before was not. All "
                "envs that a factory builds have to be alike"
            )

    def _failure_of(self, error: BaseException, during: str) -> RemoteFailure:
        """Return the failure to report for an exception, or for a cancellation."""
        return self._work.cancelled(during) or self._messages.failure_of(error, during)

    def _describe(self, message: Message, runner: EnvRunner) -> Any:
        """Return the reply that describes the env."""
        about = (getattr(runner.env, name, None) for name in ("metadata", "spec", "render_mode"))
        described = EnvDescription(*runner.spaces, *about)  # type: ignore[arg-type]
        description = described._replace(
            resets_alone=bool(runner.resets_alone),
            is_async=runner.is_async or self._is_awaited,
            converts_actions=isinstance(runner.env, GymnasiumEnv),
            params_are_options=adapt.params_are_options(runner.env),
        )
        try:
            return self._messages.reply(message, Op.HELLO, description)
        except FrameError:  # registrations may hold what cannot be sent; nothing depends on them
            description = description._replace(metadata=None, spec=None)
            return self._messages.reply(message, Op.HELLO, description)

    def close(self) -> Steps[None]:
        """Close the env, if there is one."""
        runner, self._runner = self._runner, None
        if self._stepper is not None:
            self._stepper.remove_row(self.env_id)
        try:
            if runner is not None:
                yield from runner.close_async()
        finally:
            self._envs_in_use.release(self)

    def _release(self, message: Message) -> Steps[None]:
        yield from self.close()
        self._messages.send(self._messages.reply(message, Op.RESULT, None))

    def adopt(self, message: Message) -> None:
        """Serve another env_id, and answer with the result of the reset that was kept."""
        runner = self._runner
        if self._stepper is not None:
            self._stepper.remove_row(self.env_id)
        self.env_id = message.env_id
        if runner is None:
            if message.request_id != UNANSWERED:
                self._messages.refuse(message, "reset", "there is no env")
            return
        runner.when_reset(partial(self._adopt_kept, message, runner), message)

    def _adopt_kept(self, message: Message, runner: EnvRunner) -> None:
        """Do the part of `adopt` that comes when the kept reset is over."""
        adapt.serve_env_id(runner.env, message.env_id)
        if message.payload is not None:
            self._attach(message, runner)
        else:
            runner.writer.detach()
        runner.answer_with_kept_reset(message)

    def _attach(self, message: Message, runner: EnvRunner) -> None:
        """Have observations written into the shared memory, and steps taken from there."""
        placement: Placement = message.payload
        memory = self._memory(placement.nbytes)
        runner.writer.attach(memory, placement)
        if self._stepper is not None and placement.block is not None:
            block, stepper = Block(memory, placement.block), self._stepper
            forms = self._context.forms
            forms.learn(placement.info_forms)
            sink = BlockSink(
                block, self.env_id, self.env_id, self._messages, stepper.note_running, forms
            )
            stepper.add_row(block_row_of(runner, sink, placement.action_kind))

    def observation_bytes(self, reference: Any) -> Any:
        """Return an observation's reference for a trainer that does not share the memory."""
        return reference if self._runner is None else self._runner.writer.with_bytes(reference)

    def _answer_call(self, message: Message, runner: EnvRunner) -> Steps[None]:
        op = message.op
        try:
            if runner.is_async and op == Op.APPLY:  # the function may wait for what the env does
                yield
                applying = partial(_apply, runner, message.payload)
                result = yield from wait_for(in_own_thread(applying))
            else:
                result = _CALLS[op](runner, message.payload)
            if runner.is_async and inspect.isawaitable(result):
                yield
                result = yield from wait_for(awaited(result))
            reply = self._messages.reply(message, Op.RESULT, result)
        except BaseException as error:  # as in `_build`
            failure = self._failure_of(error, "call")
            if op == Op.GET_ATTR and isinstance(error, AttributeError):
                failure = replace(failure, kind=FailureKind.NO_ATTRIBUTE)
            reply = self._messages.failure_reply(message, failure)
        self._messages.send(reply)


async def _closed(env: HostedEnv) -> None:
    await AwaitableSteps(env.close())


def _call(runner: EnvRunner, payload: Any) -> Any:
    name, args, *kwargs = payload  # which are there if there are any
    return adapt.env_attribute(runner.env, name)(*args, **(kwargs[0] if kwargs else {}))


def _get_attr(runner: EnvRunner, name: str) -> Attribute:
    value = adapt.env_attribute(runner.env, name)
    is_method = isinstance(value, _METHOD_TYPES)
    return Attribute(is_method, None if is_method else value)


def _set_attr(runner: EnvRunner, payload: Any) -> bool:
    name, value = payload
    return adapt.set_env_attribute(runner.env, name, value)


def _apply(runner: EnvRunner, payload: Any) -> Any:
    function, args = payload
    _, action_space, _ = runner.spaces
    applied = AppliedEnv(
        runner.env, runner.step_result, action_space, runner.plan.params, runner.episodes
    )
    return function(applied, *args)


_CALLS: dict[int, Callable[[EnvRunner, Any], Any]] = {
    Op.CALL: _call,
    Op.GET_ATTR: _get_attr,
    Op.SET_ATTR: _set_attr,
    Op.APPLY: _apply,
}
"""The functions that return the results of requests that neither step nor reset the env."""


# -- which env objects are in use ---------------------------------------------------------------


class EnvOwner(Protocol):
    """What is served by an env."""

    env_id: int


class EnvsInUse:
    """The env objects of all of a manager's hosts in one process, and whom they serve.

    An object that served two env_ids would mix up their episodes. Hosts may be threads, so each
    change here is a single operation of a dict.
    """

    def __init__(self) -> None:
        # It holds the objects themselves, so that their ids stay theirs.
        self._owners: dict[int, tuple[Any, EnvOwner]] = {}

    def claim(self, env: Any, owner: EnvOwner) -> None:
        """Note that an env serves an owner, until `release`.

        Args:
            env: what a factory returned. If it is a wrapper, the env inside counts.
            owner: whom it serves.

        Raises:
            EnvContractError: the env serves another owner.
        """
        inside = _innermost_env(env)
        _, other = self._owners.setdefault(id(inside), (inside, owner))
        if other is owner:
            return
        what = "the env" if inside is env else f"a wrapper of the env {env_name(inside)}"
        before = f"serves env {other.env_id}"
        if other.env_id == owner.env_id:
            before = "is that of an earlier generation, which has not ended"
        raise EnvContractError(
            f"the factory of env {owner.env_id} returned {what} that {before}: one object cannot "
            "be two envs, whose episodes would be mixed up. A factory has to build a new env each "
            "time it is called, as in env_fn=[lambda: MyEnv()] * n, or [MyEnv] * n"
        )

    def release(self, owner: EnvOwner) -> None:
        """Forget the env that serves an owner."""
        claimed = [key for key, (_, other) in list(self._owners.items()) if other is owner]
        for key in claimed:
            self._owners.pop(key, None)


def _innermost_env(env: Any) -> Any:
    """Return the env inside an env's wrappers; the env itself if it cannot tell."""
    try:
        inside = env.unwrapped
    except Exception as error:  # plain classes have none; what a property raises is not asked here
        pass_interrupt_on(error)
        return env
    return inside if callable(getattr(inside, "step", None)) else env
