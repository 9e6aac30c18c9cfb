"""What hosts do, from their own side: the one model of them, in unit tests and property tests.

`HostedEnv` is one env of a host: what it was asked, what has become of it, and what it answers. Who
says when, and how it goes, is another matter: hosts answer by themselves (`FakeEnvs`), or as a test
says (`tests/property/hosts.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from envmgr.transport.base import Arrival, HostDied
from envmgr.wire.hosts import HostSettings, HostSpec
from envmgr.wire.messages import (
    UNANSWERED,
    AfterStep,
    EnvDescription,
    EpisodePlan,
    FailureKind,
    Message,
    Op,
    RemoteFailure,
)
from tests.fake_block import ACTIONS, NUMBERED, HostInBlock

_HAS_REPLY = frozenset(
    (
        Op.HELLO,
        Op.RESET,
        Op.STEP,
        Op.RENEW,
        Op.CALL,
        Op.GET_ATTR,
        Op.SET_ATTR,
        Op.CLOSE,
        Op.APPLY,
        Op.ADOPT,
    )
)
_DURING = {Op.HELLO: "construction", Op.RENEW: "construction", Op.RESET: "reset", Op.STEP: "step"}


class ObsTag(NamedTuple):
    """An observation that says where it comes from: the env, its generation, the request."""

    env_id: int
    generation: int
    request_id: int
    kind: str


Observe = Callable[["HostedEnv", Message, str], Any]
"""What an env observes: the request that it answers, and "first", "next" or "terminal"."""


def tag(env: HostedEnv, request: Message, kind: str) -> ObsTag:
    """Return an observation that says where it comes from."""
    return ObsTag(request.env_id, request.generation, request.request_id, kind)


def description(observation_space: Any = None, action_space: Any = None) -> EnvDescription:
    """Return what a host says of its env in HELLO."""
    return EnvDescription(observation_space, action_space, None, {}, None, None)


OTHER_SPACES = description(None, "another space")
"""What no other env says."""

NO_SETTINGS = HostSettings()
"""Settings of hosts that run nothing."""


@dataclass
class FakeHost:
    """A host of a `FakeTransport`, from its start to its death and beyond.

    Attributes:
        spec: as the transport was given it.
        received: all requests, in order; the first are the HELLOs that `start` implies.
        newest: the newest of them that wants a reply, of each env; the newest of all comes last.
        killed: `Transport.kill` was called.
        ended: it died; its last arrival is on its way.
        reported: its death was handed out by an earlier `poll` than the latest, and must be known.
        adopted: the env_id that it was told to serve in place of the first one.
        in_block: what it knows of the block.
        has_block: whether there is one: then observations are numbers.
        envs: what it runs, by the env_id that each serves.
    """

    spec: HostSpec
    has_block: bool = False
    received: list[Message] = field(default_factory=list)
    newest: dict[int, Message] = field(default_factory=dict)
    killed: bool = False
    ended: bool = False
    reported: bool = False
    adopted: int | None = None
    latest_arrival: float = float("-inf")
    in_block: HostInBlock = field(init=False)
    envs: dict[int, HostedEnv] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.in_block = HostInBlock(self.spec.index)
        self.envs = {order.env_id: HostedEnv(self, order.env_id) for order in self.spec.envs}
        for order in self.spec.envs:
            if order.request_id != UNANSWERED:
                self.take(Message(Op.HELLO, *order[:3], None))

    @property
    def request(self) -> Message:
        """The newest request that wants a reply."""
        return next(reversed(self.newest.values()))

    @request.setter
    def request(self, message: Message) -> None:
        self.newest.pop(message.env_id, None)
        self.newest[message.env_id] = message

    @property
    def env_ids(self) -> list[int]:
        """The envs that it serves."""
        if self.adopted is not None:
            return [self.adopted]
        return [order.env_id for order in self.spec.envs]

    @property
    def host_id(self) -> int:
        """Its id."""
        return self.spec.host_id

    @property
    def description(self) -> EnvDescription:
        """What it says of its envs."""
        return description(NUMBERED, ACTIONS) if self.has_block else description()

    @property
    def env_id(self) -> int:
        """The first env that it runs."""
        return self.env_ids[0]

    def env_for(self, message: Message) -> HostedEnv:
        """Return the env that a request is for; one that is adopted, it knows by its old id."""
        env = self.envs.get(message.env_id)
        if env is None:
            (env,) = self.envs.values()
        return env

    def generation_of(self, env_id: int) -> int:
        """Return the generation at which it was told to build an env at first."""
        return next(order.generation for order in self.spec.envs if order.env_id == env_id)

    def take(self, message: Message) -> None:
        """Remember a request."""
        self.received.append(message)
        if message.op == Op.ADOPT:
            self.adopted = message.env_id
        if message.op in _HAS_REPLY and message.request_id != UNANSWERED:
            self.request = message

    def requests(self, op: Op) -> list[Message]:
        """Return the requests of one operation, in order."""
        return [message for message in self.received if message.op == op]

    @property
    def told(self) -> list[tuple[Op, Any]]:
        """What it was told after HELLO, besides where observations go: operations and payloads."""
        told = [m for m in self.received if m.op not in (Op.HELLO, Op.ATTACH)]
        return [(Op(message.op), message.payload) for message in told]


@dataclass(eq=False)
class HostedEnv:
    """One env of a host, as the host sees it; it may be ahead of the trainer.

    It keeps the host's half of the protocol, and checks that the trainer keeps the other: an env is
    asked one thing at a time (but spares), is stepped within episodes, and adopts what was kept.

    Attributes:
        host: the one that runs it.
        env_id: the id that it serves.
        requests: what it was asked and has not answered, the oldest first: that is what it does.
        has_begun: the host has said that it begins with that.
        resetting: it has answered its step, and resets by itself under the same request.
        built: how many env objects there have been.
        episode: how many episodes have begun, of all of them.
        step: steps in the present one; -1 while there is none.
        plan: of the latest reset that was asked for.
        params: those of the latest reset that succeeded; None before.
        seeds: those of all resets that succeeded.
        reset_info: what the latest reset that succeeded has said.
        kept: what came of the reset that waits for who adopts it.
        colour: an attribute of the env.
        executed: actions that were executed.
    """

    host: FakeHost = field(repr=False)
    env_id: int
    requests: deque[Message] = field(default_factory=deque)
    has_begun: bool = False
    resetting: bool = False
    built: int = 0
    episode: int = 0
    step: int = -1
    plan: EpisodePlan | None = None
    params: Any = None
    seeds: list[int] = field(default_factory=list)
    reset_info: dict[str, Any] = field(default_factory=dict)
    kept: tuple[Any, dict[str, Any]] | RemoteFailure | None = None
    colour: Any = None
    executed: list[Any] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        """Which host and which env it is."""
        return self.host.host_id, self.env_id

    @property
    def is_alive(self) -> bool:
        """Whether anything still comes of it."""
        return not (self.host.killed or self.host.ended)

    @property
    def request(self) -> Message | None:
        """What it is busy with; None if idle."""
        return self.requests[0] if self.requests else None

    @property
    def does(self) -> Op | None:
        """What it is busy with, in a word."""
        if not self.requests:
            return None
        return Op.RESET if self.resetting else Op(self.requests[0].op)

    @property
    def is_announced(self) -> bool:
        """Whether the host has to say that it begins with this; in the block it always does."""
        if self.requests and self.host.in_block.answers_posted(self.requests[0]):
            return True
        return self.does in self.host.spec.settings.announced

    # -- requests ---------------------------------------------------------------------------

    def take(self, message: Message) -> list[Arrival]:
        """Take a request; return what is said at once, to what nobody awaits an answer to."""
        if message.op == Op.ATTACH:
            return []
        may_wait = message.op in (Op.CLOSE, Op.ADOPT) or self._serves_spare()
        assert may_wait or not self.requests, f"{self} is asked {message} while it is busy"
        self.requests.append(message)
        return self._go_on()

    def _serves_spare(self) -> bool:
        """Whether all that it was asked is about a spare, or about changing places with one."""
        if not self.requests:
            return False
        newest = self.requests[-1]
        return newest.op == Op.ADOPT or (newest.op == Op.RESET and newest.payload.keeps)

    def _go_on(self) -> list[Arrival]:
        """Do what nobody awaits an answer to, as far as it is its turn."""
        said: list[Arrival] = []
        while self.requests and self.requests[0].request_id == UNANSWERED:
            message = self.requests.popleft()
            if message.op == Op.ADOPT:
                self._serve(message.env_id)
                self.step, self.kept = -1, None
                continue
            if message.op == Op.RELEASE:
                self._forget()
            elif message.op == Op.SET_ATTR:
                self.colour = message.payload[1]
            others_run = any(env.has_begun for env in self.host.envs.values())
            if message.op in self.host.spec.settings.announced and not others_run:
                said.append(message._replace(op=Op.BEGAN, payload=None))
            said.append(message._replace(op=Op.RESULT, payload=None))
        return said

    def _serve(self, env_id: int) -> None:
        assert env_id != self.env_id
        assert len(self.host.envs) == 1
        self.env_id, self.host.envs = env_id, {env_id: self}

    def _forget(self) -> None:
        """The env is gone."""
        self.plan = self.params = self.colour = self.kept = None
        self.step = -1

    # -- replies ----------------------------------------------------------------------------

    def begin(self) -> list[Arrival]:
        """Say that the host begins with what it was asked for this env, if it has to."""
        assert self.requests
        if self.has_begun or not self.is_announced:
            return []
        self.has_begun = True
        return [self.requests[0]._replace(op=Op.BEGAN, payload=None)]

    def reply(
        self,
        *,
        done: bool = False,
        recycle: bool = False,
        info: Mapping[str, Any] | None = None,
        observe: Observe = tag,
        described: EnvDescription | None = None,
    ) -> list[Arrival]:
        """Do what it was asked, and answer as it should.

        Args:
            done: a step ends its episode.
            recycle: then the host wants to be replaced.
            info: what a step or a reset says.
            observe: what it observes.
            described: what a new env says of itself; None: what is usual.
        """
        said, request, op = self.begin(), self.requests[0], self.does
        if op in (Op.HELLO, Op.RENEW):
            self._forget()
            self.built += 1
            return said + self.answer(Op.HELLO, described or self.host.description)
        if op is Op.CLOSE:
            return [*said, request._replace(op=Op.CLOSED, payload=None), HostDied(0)]
        if op is Op.ADOPT:
            self._serve(request.env_id)
            kept, self.kept = self.kept, None
            assert kept is not None, f"{self} is to be adopted, and nothing was kept"
            failed = isinstance(kept, RemoteFailure)
            return said + self.answer(Op.FAILED if failed else Op.RESET_DONE, kept)
        assert self.env_id == request.env_id
        if op is Op.STEP:
            return said + self._step(done, recycle, dict(info or {}), observe)
        if op is Op.RESET:
            return said + self._reset(dict(info or {}), observe)
        if op is Op.SET_ATTR:
            self.colour = request.payload[1]
            return said + self.answer(Op.RESULT, None)
        return said + self.answer(Op.RESULT, (Op(request.op).name, request.payload))

    def _step(
        self, done: bool, recycle: bool, info: dict[str, Any], observe: Observe
    ) -> list[Arrival]:
        request, plan = self.requests[0], self.plan
        assert plan is not None
        assert self.step >= 0, f"{self} is stepped outside of an episode"
        assert self.kept is None, f"{self} is stepped, and nobody was given it"
        self.step += 1
        self.executed.append(request.payload)
        after = AfterStep.NOTHING
        if done and recycle:
            after = AfterStep.WANTS_RECYCLING
        elif done and plan.auto_reset and plan.episodes_left > 0:
            after = AfterStep.RESETS
            self.plan = plan._replace(episodes_left=plan.episodes_left - 1)
        obs = observe(self, request, "terminal" if done else "next")
        if done:
            self.step = -1
        payload = (obs, 1.0, done, info, int(after))
        if after is not AfterStep.RESETS:
            return self.answer(Op.STEPPED, payload)
        self.resetting, self.has_begun = True, False
        return [request._replace(op=Op.STEPPED, payload=payload)]

    def _reset(self, info: dict[str, Any], observe: Observe) -> list[Arrival]:
        request, keeps = self.requests[0], False
        if request.op == Op.RESET:
            order = request.payload
            self.plan, self.params, keeps = order.plan, order.params, order.keeps
            if order.seed is not None:
                self.seeds.append(order.seed)
        elif self.plan is not None:
            self.params = self.plan.params
        self.episode, self.step, self.reset_info = self.episode + 1, 0, info
        first = (observe(self, request, "first"), info)
        self.kept = first if keeps else None
        return self.answer(Op.RESET_DONE, None if keeps else first)

    def fail(self, kind: FailureKind, message: str = "boom") -> list[Arrival]:
        """Answer with a failure that fits what it was asked."""
        said, request, op = self.begin(), self.requests[0], self.does
        during = "call" if op is None else _DURING.get(op, "call")
        info = {"abnormal": True} if kind is FailureKind.ABNORMAL else None
        failure = RemoteFailure(kind, during, "RuntimeError", message, info=info)
        if op in (Op.HELLO, Op.RENEW):
            self._forget()
        elif op in (Op.STEP, Op.RESET):
            self.step = -1
        if request.op == Op.RESET:
            self.plan = request.payload.plan
            self.kept = failure if request.payload.keeps else None
        return said + self.answer(Op.FAILED, failure)

    def malformed(self) -> list[Arrival]:
        """Answer with the right reply, but nothing sensible in it."""
        replies = {
            Op.HELLO: Op.HELLO,
            Op.RENEW: Op.HELLO,
            Op.STEP: Op.STEPPED,
            Op.RESET: Op.RESET_DONE,
        }
        op = self.does
        return self.answer(replies.get(op, Op.FAILED) if op else Op.FAILED, "what?")

    def answer(self, op: Op, payload: Any) -> list[Arrival]:
        """Be done with what it was asked, and say this."""
        request = self.requests.popleft()
        self.resetting = self.has_begun = False
        return [request._replace(op=op, payload=payload), *self._go_on()]


class FakeEnvs:
    """Hosts that answer by themselves, in time and well: for `FakeTransport.answer`.

    Args:
        episode_length: steps per episode; None for endless ones.
        seconds: how long a request takes, by operation; 0.0 for those not named.
        observation_space: what HELLO says. None has no layout: observations travel as they are, or
            are numbered where there is a block.
        observe: what envs observe.
    """

    def __init__(
        self,
        *,
        episode_length: int | None = None,
        seconds: Mapping[Op, float] | None = None,
        observation_space: Any = None,
        observe: Observe = tag,
    ) -> None:
        self.episode_length = episode_length
        self.seconds: dict[Op, float] = dict(seconds or {})
        self.observation_space = observation_space
        self.observe = observe

    def __call__(self, host: FakeHost, message: Message) -> Iterable[tuple[float, Arrival]]:
        """Return the replies to a request."""
        env = host.env_for(message)
        replies = [(0.0, arrival) for arrival in env.take(message)]
        while env.request is not None and env.is_alive:
            op = env.does
            assert op is not None
            seconds = self.seconds.get(op, 0.0)
            replies += [(0.0, began) for began in env.begin()]
            for arrival in self._done(env, op, env.request):
                replies.append((seconds, arrival))
                seconds = 0.0
            if op is Op.CLOSE:
                break
        return replies

    def _done(self, env: HostedEnv, op: Op, request: Message) -> list[Arrival]:
        if op is Op.STEP:
            done = env.step + 1 == self.episode_length
            return env.reply(done=done, info={"action": request.payload}, observe=self.observe)
        info = {}
        if op is Op.RESET:
            asked = request.payload.params if request.op == Op.RESET else None
            planned = env.plan.params if env.plan is not None else {}
            info = {"params": dict(planned if asked is None else asked)}
        return env.reply(info=info, observe=self.observe, described=self.description_of(env))

    def description_of(self, env: HostedEnv) -> EnvDescription:
        """Return what a new env says of itself."""
        space = self.observation_space
        return description(space) if space else env.host.description


Answer = Callable[[FakeHost, Message], Iterable[tuple[float, Arrival]]]
"""What a host answers to a request: arrivals, each so many seconds after the one before it."""
