"""Spares under whatever envs, hosts, time and users may do: no episode is mixed, lost or repeated.

Hosts run their requests in order, each when the machine says so, so that an env may be adopted
before, while and after it is reset. Every observation says which env of which host it is of, which
episode of that and which step; so whatever goes to the wrong place shows.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from envmgr.core import Phase
from envmgr.lifecycle import EnvState
from envmgr.policy import Deadlines, FailurePolicy
from envmgr.transport.base import Arrival, HostDied
from envmgr.wire.messages import UNANSWERED, AfterStep, FailureKind, Message, Op, RemoteFailure
from tests.fakes import FakeHost, FakeTransport, description
from tests.property.profiles import machine_settings
from tests.rig import Rig

Seen = tuple[int, int, int, int]
"""Host, env object, episode and step of an observation."""

FAILURE = RemoteFailure(FailureKind.RAISED, "reset", "RuntimeError", "boom")


@dataclass(eq=False)
class OneEnv:
    """A host of one env, from its own side.

    Attributes:
        fake: its place in the transport.
        env_id: the id that it serves.
        queue: requests that it has not looked at yet.
        built, episode, step: the env object, its episode, its step; no episode is -1.
        kept: what came of the reset that it keeps; None if it keeps none.
    """

    fake: FakeHost
    env_id: int
    queue: deque[Message] = field(default_factory=deque)
    built: int = 0
    episode: int = -1
    step: int = -1
    kept: Seen | RemoteFailure | None = None

    @property
    def is_alive(self) -> bool:
        return not (self.fake.killed or self.fake.ended)

    @property
    def seen(self) -> Seen:
        return self.fake.host_id, self.built, self.episode, self.step


class Hosts:
    """All hosts of a transport, which run a request when they are told to."""

    def __init__(self, transport: FakeTransport) -> None:
        self._transport = transport
        self.by_id: dict[int, OneEnv] = {}

    def __call__(self, fake: FakeHost, message: Message) -> Iterable[tuple[float, Arrival]]:
        """Take a request."""
        host = self.by_id.setdefault(fake.host_id, OneEnv(fake, fake.env_id))
        host.queue.append(message)
        self._look_at_unawaited(host)
        return []

    def _look_at_unawaited(self, host: OneEnv) -> None:
        while host.queue and host.queue[0].request_id == UNANSWERED:
            message = host.queue.popleft()
            if message.op == Op.ADOPT:
                assert host.env_id != message.env_id
                host.env_id = message.env_id
                host.episode += host.step >= 0  # that one is over
                host.step = -1

    @property
    def busy(self) -> list[OneEnv]:
        return [host for host in self.by_id.values() if host.is_alive and host.queue]

    def run(
        self, host: OneEnv, *, done: bool = False, fails: bool = False, worn: bool = False
    ) -> None:
        """Run the oldest request of a host, and what nobody awaits behind it."""
        message = host.queue.popleft()
        op = Op(message.op)
        if op is Op.ADOPT:
            assert host.env_id != message.env_id
            host.env_id = message.env_id
            assert host.kept is not None, "there is nothing to adopt"
            kept, host.kept = host.kept, None
            self._reply(host, message, kept)
        elif op is Op.CLOSE:
            self._arrive(host, message._replace(op=Op.CLOSED, payload=None))
            self._arrive(host, HostDied(0))
            return
        else:
            assert host.env_id == message.env_id
            self._run(host, message, done=done, fails=fails, worn=worn)
        self._look_at_unawaited(host)

    def _run(self, host: OneEnv, message: Message, *, done: bool, fails: bool, worn: bool) -> None:
        op = Op(message.op)
        if op in (Op.HELLO, Op.RENEW):
            host.built += 1
            host.episode = host.step = -1
            host.kept = None
            reply = message._replace(op=Op.HELLO, payload=description())
            self._arrive(host, reply._replace(op=Op.FAILED, payload=FAILURE) if fails else reply)
        elif op is Op.RESET:
            host.episode, host.step = host.episode + 1, 0
            outcome = FAILURE if fails else host.seen
            assert not message.payload.plan.auto_reset
            if not message.payload.keeps:
                self._reply(host, message, outcome)
                return
            host.kept = outcome
            payload = FAILURE if fails else None
            self._arrive(
                host, message._replace(op=Op.FAILED if fails else Op.RESET_DONE, payload=payload)
            )
        else:
            assert op is Op.STEP
            assert host.step >= 0
            assert host.kept is None, "a step of an env that nobody was given"
            if fails:
                self._arrive(host, message._replace(op=Op.FAILED, payload=FAILURE))
                return
            host.step += 1
            after = AfterStep.WANTS_RECYCLING if done and worn else AfterStep.NOTHING
            payload = (host.seen, 1.0, done, {}, int(after))
            self._arrive(host, message._replace(op=Op.STEPPED, payload=payload))

    def _reply(self, host: OneEnv, message: Message, outcome: Seen | RemoteFailure) -> None:
        if isinstance(outcome, RemoteFailure):
            self._arrive(host, message._replace(op=Op.FAILED, payload=outcome))
        else:
            self._arrive(host, message._replace(op=Op.RESET_DONE, payload=(outcome, {})))

    def _arrive(self, host: OneEnv, arrival: Arrival) -> None:
        self._transport.arrive(host.fake.host_id, arrival)

    def die(self, host: OneEnv) -> None:
        """A host dies."""
        self._arrive(host, HostDied(-9))


class SparesMachine(RuleBasedStateMachine):
    """The user, the hosts and the clock of a manager with spares."""

    def __init__(self) -> None:
        super().__init__()
        logging.getLogger("envmgr").setLevel(logging.CRITICAL + 1)

    @initialize(
        env_num=st.integers(1, 3),
        spare_num=st.integers(1, 3),
        in_order=st.booleans(),
        inplace=st.booleans(),
        renews=st.booleans(),
        max_retry=st.integers(1, 2),
        max_failures=st.sampled_from([1, 1000]),
        episode_num=st.sampled_from([float("inf"), 3]),
        limits=st.sampled_from([Deadlines(), Deadlines(4.0, 4.0, 8.0, 1.0)]),
        kill_takes_s=st.sampled_from([0.0, 0.5]),
    )
    def launch(self, env_num: int, spare_num: int, **how: Any) -> None:
        policy = FailurePolicy(
            max_retry=how["max_retry"],
            renew_between_attempts=how["renews"],
            retry_waiting_s=0.25,
            max_failures=how["max_failures"],
            drop_exhausted=True,
        )
        self.rig = Rig(
            env_num,
            spare_num=spare_num,
            policy=policy,
            deadlines=how["limits"],
            kill_takes_s=how["kill_takes_s"],
            reset_inplace=how["inplace"],
            spares_in_order=how["in_order"],
            episode_num=how["episode_num"],
        )
        self.hosts = Hosts(self.rig.transport)
        self.rig.transport.answer = self.hosts
        self.latest: dict[int, Seen] = {}
        self.begun: set[tuple[int, int, int]] = set()
        supervisor = self.rig.supervisor
        supervisor.start_hosts(range(env_num + spare_num))
        self._all_well()
        supervisor.place_observations(same_spaces=True)
        supervisor.begin_episodes()
        self._all_well()
        supervisor.table.launching = False
        self._look()

    def _all_well(self) -> None:
        while busy := self.hosts.busy:
            for host in busy:
                if host in self.hosts.busy:
                    self.hosts.run(host)
            self.rig.pump()

    # -- the user -----------------------------------------------------------------------------

    @precondition(lambda self: self.rig.ready())
    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(self.rig.ready()), unique=True, min_size=1))
        self.rig.send(dict.fromkeys(ids, "act"))
        self._look()

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        everybody = range(len(self.rig.supervisor.envs))
        ids = data.draw(st.lists(st.sampled_from(list(everybody)), unique=True))
        if not ids:
            return
        for env_id, timestep in self.rig.deliver(*ids).items():
            before = self.latest.pop(env_id)
            if timestep.info.get("abnormal"):
                assert timestep.obs == before
                continue
            assert timestep.obs == (*before[:3], before[3] + 1)
            if not timestep.done:
                self.latest[env_id] = timestep.obs
        self._look()

    @rule(data=st.data(), new_seeds=st.sampled_from([False, False, True]))
    def reset(self, data: st.DataObject, new_seeds: bool) -> None:
        env_id = data.draw(st.integers(0, len(self.rig.supervisor.envs) - 1))
        self.latest.pop(env_id, None)
        self.rig.slot(env_id).new_seed = 5 if new_seeds else None
        self.rig.reset(env_id)
        if new_seeds:
            for spare in self.rig.supervisor.spares.envs:
                spare.new_seed = 7
        self.rig.supervisor.resets.begin({})
        self._look()

    # -- hosts and time -------------------------------------------------------------------------

    @precondition(lambda self: self.hosts.busy)
    @rule(
        data=st.data(),
        done=st.booleans(),
        fails=st.sampled_from([False] * 7 + [True]),
        worn=st.sampled_from([False, False, True]),
        look=st.booleans(),
    )
    def host_runs(
        self, data: st.DataObject, done: bool, fails: bool, worn: bool, look: bool
    ) -> None:
        host = self._drawn(data, self.hosts.busy)
        self.hosts.run(host, done=done, fails=fails, worn=worn)
        if look:
            self._look()

    @precondition(lambda self: self.hosts.busy)
    @rule()
    def all_hosts_run(self) -> None:
        self._all_well()
        self._look()

    @precondition(lambda self: self.rig.ready())
    @rule()
    def all_episodes_end(self) -> None:
        ready = self.rig.ready()
        self.rig.send(dict.fromkeys(ready, "act"))
        self.rig.pump()
        for env_id in ready:
            host = self._host_of(env_id)
            if host is not None and host.is_alive and len(host.queue) == 1:
                self.hosts.run(host, done=True)
        self._look()

    @rule(data=st.data(), sure=st.sampled_from([False, True]))
    def host_dies(self, data: st.DataObject, sure: bool) -> None:
        alive = [host for host in self.hosts.by_id.values() if host.is_alive]
        if sure and alive:
            self.hosts.die(self._drawn(data, alive))
            self._look()

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.run(seconds)
        self._look()

    def _drawn(self, data: st.DataObject, hosts: list[OneEnv]) -> OneEnv:
        host_id = data.draw(st.sampled_from([host.fake.host_id for host in hosts]))
        return self.hosts.by_id[host_id]

    def _host_of(self, env_id: int) -> OneEnv | None:
        return self.hosts.by_id.get(self.rig.slot(env_id).host_id or 0)

    # -- what has to hold -------------------------------------------------------------------------

    def _look(self) -> None:
        """Apply all there is, and read the observations that are new."""
        self.rig.pump()
        while self.rig.supervisor.repair.take_fatal() is not None:
            pass
        for env_id in self.rig.ready():
            obs = self.rig.slot(env_id).obs
            if env_id not in self.latest:
                assert obs[3] == 0
                assert obs[:3] not in self.begun, "an episode was handed out twice"
                self.begun.add(obs[:3])
                self.latest[env_id] = obs
            assert obs == self.latest[env_id]

    @invariant()
    def all_holds(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        assert rig.identity_holds()
        assert rig.supervisor.statistics.dropped_replies == 0
        groups = [slot.group for slot in rig.hosts.envs]
        assert len({id(group) for group in groups}) == len(groups)
        assert rig.hosts.table.index_of == [s.group.index for s in rig.supervisor.envs]
        for slot in rig.hosts.envs:
            where = f"{rig.state(slot.env_id)!r} {slot}"
            assert slot.group.envs == (slot,), where
            assert slot.group.is_spare is slot.is_spare, where
            if slot.host_id is not None:
                assert slot.group.host_id == slot.host_id, where
                assert rig.hosts.group_of_host.get(slot.host_id) is slot.group, where
            if slot.is_spare:
                assert rig.state(slot.env_id) is not EnvState.RUN, where
                assert slot.phase not in (Phase.STEPPING, Phase.CANCELLING), where
            if slot.phase is Phase.RESETTING and not slot.group.is_ending:
                host = self._host_of(slot.env_id)
                assert host is not None, where
                if host.is_alive and rig.transport.next_event is None:
                    assert host.queue, where
                    assert host.queue[-1].request_id == slot.request_id, where
        served = [slot.host_id for slot in rig.hosts.envs if slot.host_id is not None]
        assert len(set(served)) == len(served)

    def teardown(self) -> None:
        """When all goes well again, every env that was not given up is ready, and every spare."""
        logging.getLogger("envmgr").setLevel(logging.NOTSET)
        if not hasattr(self, "rig"):
            return
        supervisor = self.rig.supervisor
        for _ in range(1000):  # limits are 1 s and more; a pause may be long
            self._all_well()
            self.rig.deliver()
            if not self.hosts.busy and all(s.phase is Phase.IDLE for s in self.rig.hosts.envs):
                break
            self.rig.run(0.5)
        for slot in supervisor.envs:
            state = self.rig.state(slot.env_id)
            assert state in (EnvState.RUN, EnvState.DONE), f"{state!r} {slot}"
            assert state is EnvState.DONE or not slot.owed or slot.failed_while_ready is None
        figures = supervisor.spares.figures()
        assert figures["spares_ready"] == figures["spare_env_num"]
        assert self.rig.identity_holds()


@pytest.mark.timeout(3600)  # a failure is made small before it is reported, which takes a while
def test_spares_whatever_happens() -> None:
    run_state_machine_as_test(SparesMachine, settings=machine_settings())
