"""A supervisor and its engine over fakes, with short words for what managers do with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envmgr.core import EnvSlot, EpisodeRules, Hosts, Supervisor, requests
from envmgr.core.engine import Engine
from envmgr.core.gather import Gather
from envmgr.errors import EnvFailure
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy
from envmgr.types import EnvTimestep
from envmgr.wire.messages import AfterStep, Message, Op, ResetOrder
from tests.fakes import NO_SETTINGS, Answer, FakeClock, FakeEnvs, FakeTransport, description


class Rig:
    """Envs that nobody runs.

    Args:
        env_num: how many.
        answer: see `FakeTransport`; None leaves all replies to the test.
        policy: of failures.
        deadlines: time limits.
        has_memory: whether the transport has memory.
        kill_takes_s: see `FakeTransport`.
        num_workers: hosts that share the envs; None: one for each.
        spare_num: spares besides them.
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
        kill_takes_s: float | None = 0.0,
        num_workers: int | None = None,
        spare_num: int = 0,
        **rules: Any,
    ) -> None:
        self.clock = FakeClock()
        self.transport = FakeTransport(
            self.clock, answer=answer, has_memory=has_memory, kill_takes_s=kill_takes_s
        )
        self.hosts = Hosts(
            self.transport,
            [lambda: None] * (env_num + spare_num),
            NO_SETTINGS,
            deadlines or Deadlines(),
            self.clock,
            num_workers=num_workers,
            spare_num=spare_num,
        )
        self.supervisor = Supervisor(self.hosts, EpisodeRules(**rules), policy or FailurePolicy())
        self.engine = Engine(self.supervisor, self.transport, self.clock, background=False)

    # -- the whole --------------------------------------------------------------------------

    def pump(self) -> None:
        """Apply what has arrived and what time has brought, until nothing more happens now."""
        self.engine.collect()
        while self._happens_now():
            self.engine.collect()

    def _happens_now(self) -> bool:
        event = self.transport.next_event
        moments = (self.hosts.earliest_deadline, float("inf") if event is None else event)
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
    ) -> Rig:
        """Launch all envs, whatever `answer` is: they are in RUN afterwards.

        Args:
            seeds: by env_id.
            params: reset params by env_id.
            space: the observation space of all envs, whose observations are zeros then; None:
                observations travel as they are.
        """
        transport = self.transport
        observe = None if space is None else lambda message, kind: 0  # a slot
        envs = FakeEnvs(observation_space=space, observe=observe)
        answer, transport.answer = transport.answer, envs
        for slot in self.supervisor.slots:
            slot.base_seed = slot.new_seed = (seeds or {}).get(slot.env_id)
            slot.reset_params = dict((params or {}).get(slot.env_id, {}))
        for spare in self.supervisor.spare_slots:
            spare.base_seed = spare.new_seed = (seeds or {}).get(spare.env_id)
        self.start()
        self.supervisor.begin_episodes()
        self.pump()
        self.supervisor.repair.launching = False
        transport.answer = answer
        return self

    def start(self) -> None:
        """Start all hosts, which answer by themselves, and lay out the memory."""
        self.supervisor.start_hosts(range(len(self.hosts.slots)))
        self.pump()
        self.supervisor.place_observations(same_spaces=True)

    # -- what users do ----------------------------------------------------------------------

    def send(self, actions: Mapping[int, Any] | int) -> None:
        """Send actions, as a manager does; an int stands for one action of that env."""
        by_id = {actions: "act"} if isinstance(actions, int) else actions
        supervisor = self.supervisor
        supervisor.submit_steps(requests.prepared_steps(supervisor, by_id, None))

    def deliver(self, *env_ids: int) -> dict[int, EnvTimestep]:
        """Hand out what has arrived of these envs (of all if none is named)."""
        return self.supervisor.deliver(env_ids or range(len(self.supervisor.slots)))

    def reset(self, env_id: int = 0, params: dict[str, Any] | None = None) -> None:
        """Begin an explicit reset."""
        self.supervisor.begin_explicit_reset(env_id, params)

    def call(self, env_id: int = 0, name: str = "method") -> None:
        """Begin a call."""
        self.supervisor.submit_calls([env_id], Op.CALL, [(name, ())])

    @property
    def gather(self) -> Gather:
        """A gather over these envs."""
        return Gather(self.engine, self.supervisor)

    # -- what hosts do ----------------------------------------------------------------------

    def hello(self, env_id: int = 0, space: Any = None) -> None:
        """The env is built."""
        self.transport.reply(env_id, Op.HELLO, description(space))
        self.pump()

    def reset_done(self, env_id: int = 0, obs: Any = "first", **info: Any) -> None:
        """The env has been reset."""
        self.transport.reply(env_id, Op.RESET_DONE, (obs, info))
        self.pump()

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
        self.pump()

    def began(self, env_id: int = 0) -> None:
        """The env's host, which others share, begins with what it was asked for this one."""
        self.transport.reply(env_id, Op.BEGAN)
        self.pump()

    def fail(self, env_id: int = 0, during: str = "step", **how: Any) -> None:
        """The env reports a failure."""
        self.transport.fail(env_id, during, **how)
        self.pump()

    def die(self, env_id: int = 0, exit_status: int | None = -9) -> None:
        """The env's host dies."""
        self.transport.die(env_id, exit_status)
        self.pump()

    # -- what can be seen -------------------------------------------------------------------

    def slot(self, env_id: int = 0) -> EnvSlot:
        """What the supervisor remembers of an env, or of a spare."""
        return self.hosts.slots[env_id]

    def state(self, env_id: int = 0) -> EnvState:
        """The state of an env."""
        return self.supervisor.states[env_id]

    def requests(self, op: Op, env_id: int = 0) -> list[Message]:
        """Return all requests of one operation that were sent for an env, over all its hosts."""
        return [m for _, m in self.transport.sent if m.op == op and m.env_id == env_id]

    def orders(self, env_id: int = 0) -> list[ResetOrder]:
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
        return self.supervisor.ready_ids()

    def identity_holds(self) -> bool:
        """Whether every accepted action is accounted for, exactly once."""
        statistics = self.supervisor.statistics
        outstanding = len(self.supervisor.owed_ids())
        return statistics.actions == statistics.timesteps + statistics.cancelled + outstanding
