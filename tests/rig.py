"""A supervisor and its engine over fakes, with short words for what managers do with them.

Steps travel by message, or through the block: `over_routes` runs a module's tests over both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from envmgr.core import (
    EpisodeRules,
    HandedOut,
    Hosts,
    ManagedEnv,
    Phase,
    Selection,
    Supervisor,
)
from envmgr.core.call_journal import CallJournal
from envmgr.core.engine import Engine, Gather
from envmgr.core.submit import submit_calls
from envmgr.env.batch_specs import Batch
from envmgr.errors import EnvFailure
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy, GatherPolicy, StartCaps
from envmgr.types import EnvTimestep
from envmgr.wire.block import RING_EACH
from envmgr.wire.messages import AfterStep, Message, Op, ResetRequest
from tests.fake_hosts import NO_SETTINGS, Answer, FakeEnvs, description, tag
from tests.fakes import FakeClock, FakeTransport

ROUTES = ("message", "block")
_route = "message"


over_routes = pytest.mark.parametrize("route", ROUTES, indirect=True)
"""Run a test over each route: rigs take the present one if they are not told another."""


@pytest.fixture(autouse=True)
def route(request: pytest.FixtureRequest) -> Iterator[str]:
    """The present route."""
    global _route
    before, _route = _route, getattr(request, "param", "message")
    yield _route
    _route = before


class Rig:
    """Envs that nobody runs.

    Args:
        env_num: how many.
        answer: see `FakeTransport`; None leaves all replies to the test.
        policy: of failures.
        deadlines: time limits.
        has_memory: whether the transport has memory.
        has_block: whether steps are posted in it; None: as `over_routes` says.
        kill_takes_s: see `FakeTransport`.
        num_workers: hosts that share the envs; None: one for each.
        spare_num: spares besides them.
        batches: which of the envs are rows of batched envs.
        caps: how many may be built or reset.
        transport: what hosts run on.
        clock: of all of them.
        **rules: of episodes: fields of `EpisodeRules`.
    """

    def __init__(
        self,
        env_num: int = 1,
        *,
        answer: Answer | None = None,
        policy: FailurePolicy | None = None,
        deadlines: Deadlines | None = None,
        has_memory: bool = False,
        has_block: bool | None = None,
        kill_takes_s: float | None = 0.0,
        num_workers: int | None = None,
        spare_num: int = 0,
        batches: tuple[Batch, ...] = (),
        caps: StartCaps | None = None,
        transport: type[FakeTransport] = FakeTransport,
        clock: FakeClock | None = None,
        **rules: Any,
    ) -> None:
        self.clock = clock or FakeClock()
        if has_block is None:
            has_block = _route == "block" and not has_memory
        self.transport = transport(
            self.clock,
            answer=answer,
            has_memory=has_memory,
            has_block=has_block,
            kill_takes_s=kill_takes_s,
        )
        self.hosts = Hosts(
            self.transport,
            [lambda: None] * (env_num + spare_num),
            replace(NO_SETTINGS, batches=batches),
            deadlines or Deadlines(),
            self.clock,
            num_workers=num_workers,
            spare_num=spare_num,
            caps=caps,
        )
        self.supervisor = Supervisor(
            self.hosts, EpisodeRules(**rules), policy or FailurePolicy(), CallJournal()
        )
        self.engine = Engine(self.supervisor, self.transport, self.clock, background=False)

    # -- the whole --------------------------------------------------------------------------

    def pump(self) -> None:
        """Apply what has arrived and what time has brought, until nothing more happens now."""
        self.engine.collect()
        while self._happens_now():
            self.engine.collect()

    def settle(self, env_id: int) -> None:
        """As `pump`, and apply what has come of an env."""
        self.pump()
        self.slot(env_id)
        self.pump()

    def _happens_now(self) -> bool:
        event = self.transport.next_event
        moments = (self.supervisor.earliest_deadline, float("inf") if event is None else event)
        return min(moments) <= self.clock()

    def advance(self, seconds: float) -> None:
        """Let time pass at once, and apply what it has brought."""
        self.clock.advance(seconds)
        self.pump()

    def run(self, seconds: float) -> None:
        """Let time pass bit by bit, applying everything in its moment."""
        self.engine.wait_for(lambda: False, seconds)

    def launch(
        self,
        *,
        seeds: Mapping[int, int] | None = None,
        params: Mapping[int, dict[str, Any]] | None = None,
        space: Any = None,
        envs: FakeEnvs | None = None,
    ) -> Rig:
        """Launch all envs, whatever `answer` is: they are in RUN afterwards.

        Args:
            seeds: by env_id.
            params: reset params by env_id.
            space: the observation space of all envs, whose observations are zeros then; None:
                observations travel as they are.
            envs: who answers meanwhile; None: envs like that.
        """
        transport = self.transport
        observe = tag if space is None else lambda env, request, kind: 0  # a slot
        envs = envs or FakeEnvs(observation_space=space, observe=observe)
        answer, transport.answer = transport.answer, envs
        for slot in self.supervisor.envs:
            slot.base_seed = slot.new_seed = (seeds or {}).get(slot.env_id)
            slot.reset_params = dict((params or {}).get(slot.env_id, {}))
        spares = self.supervisor.spares
        for spare in () if spares is None else spares.envs:
            spare.base_seed = spare.new_seed = (seeds or {}).get(spare.env_id)
        self.start()
        self.supervisor.begin_episodes()
        self.pump()
        self.supervisor.table.launching = False
        transport.answer = answer
        return self

    def start(self) -> None:
        """Start all hosts, which answer by themselves, and lay out the memory."""
        self.supervisor.start_hosts(range(len(self.hosts.envs)))
        self.pump()
        self.supervisor.place_observations(same_spaces=True)

    # -- what users do ----------------------------------------------------------------------

    def send(self, actions: Mapping[int, Any] | int, ring: int = RING_EACH) -> Selection | None:
        """Send actions, as a manager does; an int stands for one action of that env.

        Args:
            actions: by env_id.
            ring: see `Submitter.by_id`.

        Returns:
            Whose they are; None if there are none.
        """
        by_id = {actions: 1} if isinstance(actions, int) else actions
        submitter = self.supervisor.submitter
        sent = submitter.by_id(by_id, ring)
        if sent is None:
            sent = submitter.checked(by_id, ring, None)
            self.supervisor.repair.answer_unexecuted()
        return sent

    def selection(self, env_ids: Sequence[int]) -> Selection:
        """Envs that are stepped together."""
        selection = self.supervisor.selections.of(env_ids)
        if selection is None:
            raise AssertionError(f"{env_ids} are not different envs")
        return selection

    def deliver(self, *env_ids: int) -> dict[int, EnvTimestep]:
        """Hand out what has arrived of these envs (of all if none is named), in their order."""
        collector = self.supervisor.collector
        for env_id in env_ids or range(len(self.supervisor.envs)):
            self.slot(env_id)
        arrived = collector.arrived_ids()
        wanted = [i for i in env_ids if i in arrived] if env_ids else arrived
        return self.hand_out(collector.take(self.selection(wanted)) if wanted else None)

    def hand_out(self, taken: HandedOut | None) -> dict[int, EnvTimestep]:
        """Hand out what was gathered, with observations as the hosts had them."""
        timesteps = {}
        if taken is not None:
            timesteps = self.supervisor.collector.timesteps(taken)
        self.supervisor.journal.returning = None  # its caller gets it
        seen = self.transport.seen
        return {i: t._replace(obs=seen(t.obs)) for i, t in timesteps.items()}

    def reset(self, env_id: int = 0, params: dict[str, Any] | None = None) -> None:
        """Begin an explicit reset."""
        self.supervisor.resets.begin({env_id: params})

    def call(self, env_id: int = 0, name: str = "method") -> None:
        """Begin a call."""
        submit_calls(self.hosts, [self.hosts.envs[env_id]], Op.CALL, [(name, ())], name)

    def exactly(self, *env_ids: int) -> dict[int, EnvTimestep]:
        """Wait for the timesteps of envs that were sent actions, and hand them out."""
        return self.hand_out(self.gather.exactly(self.selection(env_ids)))

    @property
    def gather(self) -> Gather:
        """A gather over these envs."""
        return Gather(self.engine, GatherPolicy(math.inf))

    # -- what hosts do ----------------------------------------------------------------------

    def hello(self, env_id: int = 0, space: Any = None) -> None:
        """The env is built."""
        host = self.transport.host_of(env_id)
        described = host.description if space is None else description(space)
        self.transport.reply(env_id, Op.HELLO, described)
        self.settle(env_id)

    def reset_done(self, env_id: int = 0, obs: Any = "first", **info: Any) -> None:
        """The env has been reset."""
        self.transport.reply(env_id, Op.RESET_DONE, (obs, info))
        self.settle(env_id)

    def stepped(
        self,
        env_id: int = 0,
        obs: Any = "next",
        *,
        reward: float = 1.0,
        done: bool = False,
        after: AfterStep = AfterStep.NOTHING,
        **info: Any,
    ) -> None:
        """The env has executed its step."""
        self.transport.reply(env_id, Op.STEPPED, (obs, reward, done, info, after))
        self.settle(env_id)

    def began(self, env_id: int = 0) -> None:
        """The env's host, which others share, begins with what it was asked for this one."""
        self.transport.reply(env_id, Op.BEGAN)
        self.settle(env_id)

    def fail(self, env_id: int = 0, during: str = "step", **how: Any) -> None:
        """The env reports a failure."""
        self.transport.fail(env_id, during, **how)
        self.settle(env_id)

    def die(self, env_id: int = 0, exit_status: int | None = -9) -> None:
        """The env's host dies."""
        self.transport.die(env_id, exit_status)
        self.settle(env_id)

    # -- what can be seen -------------------------------------------------------------------

    def slot(self, env_id: int = 0) -> ManagedEnv:
        """What is known of an env, whose posted step is looked after from now on, or of a spare."""
        slot = self.hosts.envs[env_id]
        self.hosts.look_after(slot)
        self.supervisor.apply_rest()
        return slot

    def phase(self, env_id: int = 0) -> Phase:
        """What an env's host is busy with, whatever way its step goes."""
        phase = self.hosts.envs[env_id].phase
        return Phase.STEPPING if phase is Phase.POSTED else phase

    def has_arrived(self, env_id: int = 0) -> bool:
        """Whether the timestep of an env can be handed out."""
        self.slot(env_id)
        return self.supervisor.collector.has_arrived(env_id)

    def obs(self, env_id: int = 0) -> Any:
        """The newest observation of an env, as its host had it."""
        return self.transport.seen(self.supervisor.table.observed.of([env_id])[0])

    def state(self, env_id: int = 0) -> EnvState:
        """The state of an env, with all that it has replied."""
        self.slot(env_id)
        return self.supervisor.states[env_id]

    def requests(self, op: Op, env_id: int = 0) -> list[Message]:
        """Return all requests of one operation that were sent for an env, over all its hosts."""
        return [m for _, m in self.transport.sent if m.op == op and m.env_id == env_id]

    def reset_requests(self, env_id: int = 0) -> list[ResetRequest]:
        """Return what the resets of an env were told, in order."""
        return [message.payload for message in self.requests(Op.RESET, env_id)]

    def error(self, env_id: int = 0) -> EnvFailure:
        """Return the failure of the abnormal timestep that an env owes."""
        timestep = self.slot(env_id).timestep
        if timestep is None:
            raise AssertionError(f"env {env_id} owes no timestep that has arrived")
        error: EnvFailure = timestep.info["error"]
        return error

    def ready(self) -> list[int]:
        """Return the envs that take an action now."""
        return self.supervisor.table.ready_ids()

    def identity_holds(self) -> bool:
        """Whether every accepted action is accounted for, exactly once."""
        statistics = self.supervisor.statistics
        outstanding = len(self.supervisor.table.owed_ids())
        return statistics.actions == statistics.timesteps + statistics.cancelled + outstanding
