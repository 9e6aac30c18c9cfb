"""What hosts are from their own side: a model that keeps the host's half of the protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envmgr.transport.base import Arrival, Garbage, HostDied
from envmgr.wire.messages import (
    UNANSWERED,
    AfterStep,
    EpisodePlan,
    FailureKind,
    Message,
    Op,
    RemoteFailure,
    ResetRequest,
)
from tests.fakes import FakeHost, FakeTransport, ObsTag, description

OTHER_SPACES = description(None, "another space")
_DURING = {Op.HELLO: "construction", Op.RENEW: "construction", Op.RESET: "reset", Op.STEP: "step"}


@dataclass(eq=False)
class HostModel:
    """One env of a host, as the host sees it; it may be ahead of the supervisor.

    Attributes:
        fake: the host's place in the transport.
        env_id: the env.
        request: what it is busy with; None if idle.
        has_begun: the host has said so.
        resetting: it has answered its step, and resets by itself under the same request.
        plan: of the latest reset order.
        params: those of the latest reset that succeeded; None before.
        seeds: those of all resets that succeeded.
        reset_info: what the latest reset that succeeded has said.
        colour: an attribute of the env.
        executed: actions that were executed.
    """

    fake: FakeHost
    env_id: int
    request: Message | None = None
    has_begun: bool = False
    resetting: bool = False
    plan: EpisodePlan | None = None
    params: Any = None
    seeds: list[int] = field(default_factory=list)
    reset_info: dict[str, Any] = field(default_factory=dict)
    colour: Any = None
    executed: list[Any] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        return self.fake.host_id, self.env_id

    @property
    def is_alive(self) -> bool:
        return not (self.fake.killed or self.fake.ended)

    @property
    def does(self) -> Op | None:
        """What it is busy with."""
        if self.request is None:
            return None
        return Op.RESET if self.resetting else Op(self.request.op)

    @property
    def is_announced(self) -> bool:
        """Whether the host has to say that it begins with this; in the block it always does."""
        if self.request is not None and self.fake.in_block.answers_posted(self.request):
            return True
        return self.does in self.fake.spec.settings.announced

    def forget(self) -> None:
        """The env is gone."""
        self.plan = self.params = self.colour = None


class Hosts:
    """All hosts of a transport. Give it as the transport's `answer`."""

    def __init__(self, transport: FakeTransport) -> None:
        self.transport = transport
        self.models: dict[tuple[int, int], HostModel] = {}

    def __call__(self, fake: FakeHost, message: Message) -> Iterable[tuple[float, Arrival]]:
        """Take a request; the answer comes when the test says so."""
        if (fake.host_id, fake.env_id) not in self.models:
            for env_id in fake.env_ids:
                others = [m for m in self.models.values() if m.env_id == env_id]
                assert all(m.fake.ended for m in others), f"{fake} shares its memory with {others}"
                self.models[fake.host_id, env_id] = HostModel(fake, env_id)
        model = self.models[fake.host_id, message.env_id]
        if message.op == Op.ATTACH:
            return []
        if message.request_id == UNANSWERED:
            return self._at_once(model, message)
        if message.op != Op.CLOSE:
            assert model.request is None, f"{model} is asked {message} while it is busy"
        model.request = message
        model.resetting = model.has_begun = False
        if message.op == Op.RENEW:
            model.forget()
        return []

    def _at_once(self, model: HostModel, message: Message) -> Iterable[tuple[float, Arrival]]:
        """Take a request that nobody awaits, on a renewed env or one that is let go of."""
        assert model.request is None
        if message.op == Op.RELEASE:
            model.forget()
        else:
            assert message.op == Op.SET_ATTR
            model.colour = message.payload[1]
        replies = [message._replace(op=Op.RESULT, payload=None)]
        others = self._same_host(model)
        if message.op in model.fake.spec.settings.announced and not any(
            m.has_begun for m in others
        ):
            replies.insert(0, message._replace(op=Op.BEGAN, payload=None))
        return [(0.0, reply) for reply in replies]

    def _same_host(self, model: HostModel) -> list[HostModel]:
        return [m for m in self.models.values() if m.fake is model.fake]

    def alive(self) -> list[HostModel]:
        """Return the envs of hosts that live and were not killed."""
        return [model for model in self.models.values() if model.is_alive]

    def busy(self) -> list[HostModel]:
        """Return those of them that may reply now: hosts run one at a time."""
        return [m for m in self.alive() if m.request is not None and self._may_run(m)]

    def _may_run(self, model: HostModel) -> bool:
        mates = self._same_host(model)
        building = [m for m in mates if m.request is not None and m.request.op == Op.HELLO]
        begun = [m for m in mates if m.has_begun]
        first = begun[:1] or building[:1]  # a new host builds its envs in order
        return not first or first[0] is model

    def killed(self) -> list[HostModel]:
        """Return the killed hosts whose death is not on its way yet, one env of each."""
        found = {m.fake.host_id: m for m in self.models.values() if m.fake.killed}
        return [m for m in found.values() if not m.fake.ended]

    def of(self, key: tuple[int, int]) -> HostModel:
        """Return an env of a host."""
        return self.models[key]

    # -- what a host does -------------------------------------------------------------------

    def begin(self, model: HostModel, after_s: float = 0.0) -> None:
        """Say that the host begins with what it was asked for this env, if it has to."""
        assert model.request is not None
        if model.is_announced and not model.has_begun:
            model.has_begun = True
            self._arrive(model, model.request._replace(op=Op.BEGAN, payload=None), after_s)

    def reply(
        self,
        model: HostModel,
        *,
        done: bool = False,
        recycle: bool = False,
        info: Mapping[str, Any] | None = None,
        after_s: float = 0.0,
    ) -> None:
        """Answer what a host was asked, as it should; `info` is what a step or a reset says."""
        request = model.request
        assert request is not None
        op = model.does
        self.begin(model, after_s)
        if op in (Op.HELLO, Op.RENEW):
            self._answer(model, Op.HELLO, model.fake.description, after_s)
        elif op is Op.STEP:
            self._step(model, request, done, recycle, dict(info or {}), after_s)
        elif op is Op.RESET:
            self._reset_done(model, request, dict(info or {}), after_s)
        elif op is Op.CLOSE:
            self._arrive(model, request._replace(op=Op.CLOSED, payload=None), after_s)
            self._arrive(model, HostDied(0), after_s)
        else:
            if op is Op.SET_ATTR:
                model.colour = request.payload[1]
            self._answer(model, Op.RESULT, None, after_s)

    def _step(
        self,
        model: HostModel,
        request: Message,
        done: bool,
        recycle: bool,
        info: dict[str, Any],
        after_s: float,
    ) -> None:
        plan = model.plan
        assert plan is not None
        model.executed.append(request.payload)
        after = AfterStep.NOTHING
        if done and recycle:
            after = AfterStep.WANTS_RECYCLING
        elif done and plan.auto_reset and plan.episodes_left > 0:
            after = AfterStep.RESETS
            model.plan = plan._replace(episodes_left=plan.episodes_left - 1)
        payload = (_tag(request, "terminal" if done else "next"), 1.0, done, info, int(after))
        if after is AfterStep.RESETS:
            model.resetting = True
            model.has_begun = False
            self._arrive(model, request._replace(op=Op.STEPPED, payload=payload), after_s)
        else:
            self._answer(model, Op.STEPPED, payload, after_s)

    def _reset_done(
        self, model: HostModel, request: Message, info: dict[str, Any], after_s: float
    ) -> None:
        if request.op == Op.RESET:
            order: ResetRequest = request.payload
            model.plan, model.params = order.plan, order.params
            if order.seed is not None:
                model.seeds.append(order.seed)
        elif model.plan is not None:
            model.params = model.plan.params
        model.reset_info = info
        self._answer(model, Op.RESET_DONE, (_tag(request, "first"), info), after_s)

    def fail(self, model: HostModel, kind: FailureKind, after_s: float = 0.0) -> None:
        """Answer with a failure that fits what a host was asked."""
        op = model.does
        during = "call" if op is None else _DURING.get(op, "call")
        self.begin(model, after_s)
        info = {"abnormal": True} if kind is FailureKind.ABNORMAL else None
        if op is Op.RESET and model.request is not None and model.request.op == Op.RESET:
            model.plan = model.request.payload.plan
        failure = RemoteFailure(kind, during, "RuntimeError", "boom", info=info)
        self._answer(model, Op.FAILED, failure, after_s)

    def other_spaces(self, model: HostModel, after_s: float = 0.0) -> None:
        """Say HELLO with other spaces than before."""
        self._answer(model, Op.HELLO, OTHER_SPACES, after_s)

    def malformed(self, model: HostModel, after_s: float = 0.0) -> None:
        """Answer with the right reply, but nothing sensible in it."""
        replies = {
            Op.HELLO: Op.HELLO,
            Op.RENEW: Op.HELLO,
            Op.STEP: Op.STEPPED,
            Op.RESET: Op.RESET_DONE,
        }
        op = model.does
        self._answer(model, replies.get(op, Op.FAILED) if op else Op.FAILED, "what?", after_s)

    def die(self, model: HostModel, exit_status: int | None, after_s: float = 0.0) -> None:
        """End."""
        self._arrive(model, HostDied(exit_status), after_s)

    def garbage(self, model: HostModel, after_s: float = 0.0) -> None:
        """Send what is no message."""
        self._arrive(model, Garbage("noise"), after_s)

    def foreign(self, model: HostModel, message: Message, after_s: float = 0.0) -> None:
        """Send a message that answers nothing that was asked."""
        self.transport.arrive(model.fake.host_id, message, after_s, foreign=True)

    def _answer(self, model: HostModel, op: Op, payload: Any, after_s: float) -> None:
        request = model.request
        assert request is not None
        model.request = None
        model.resetting = model.has_begun = False
        self._arrive(model, request._replace(op=op, payload=payload), after_s)

    def _arrive(self, model: HostModel, arrival: Arrival, after_s: float) -> None:
        self.transport.arrive(model.fake.host_id, arrival, after_s)


def _tag(request: Message, kind: str) -> ObsTag:
    return ObsTag(request.env_id, request.generation, request.request_id, kind)
