"""Spares under whatever envs, hosts, time and users may do: no episode is mixed, lost or repeated.

Hosts run their requests in order, each when the machine says so, so that an env may be adopted
before, while and after it is reset. Every observation says which env of which host it is of, which
episode of that and which step; so whatever goes to the wrong place shows.
"""

from __future__ import annotations

import logging
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
from envmgr.policy import Deadlines, FailurePolicy, StartCaps
from envmgr.wire.messages import FailureKind, Message, Op
from tests.fake_hosts import HostedEnv
from tests.fakes import KILLED
from tests.property.hosts import PlayedHosts
from tests.property.profiles import machine_settings
from tests.rig import Rig

Seen = tuple[int, int, int, int]
"""Host, env object, episode and step of an observation."""


def seen(env: HostedEnv, request: Message, kind: str) -> Seen:
    """Return an observation that says all that there is to mix up."""
    return env.host.host_id, env.built, env.episode, env.step


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
        caps=st.builds(
            StartCaps, st.sampled_from([None, None, 1, 2]), st.sampled_from([None, None, 4, 0.5])
        ),
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
            caps=how["caps"],
            reset_inplace=how["inplace"],
            spares_in_order=how["in_order"],
            episode_num=how["episode_num"],
        )
        self.hosts = PlayedHosts(self.rig.transport)
        self.rig.transport.answer = self.hosts
        self.latest: dict[int, Seen] = {}
        self.begun: set[tuple[int, int, int]] = set()
        supervisor = self.rig.supervisor
        supervisor.start_hosts(range(env_num + spare_num))
        self._all_in_turn()
        supervisor.place_observations(same_spaces=True)
        supervisor.begin_episodes()
        self._all_in_turn()
        supervisor.table.launching = False
        self._look()

    def _all_well(self) -> None:
        while busy := self.hosts.busy():
            for env in busy:
                if env in self.hosts.busy():
                    self.hosts.reply(env, observe=seen)
            self.rig.pump()

    def _all_in_turn(self) -> None:
        self._all_well()
        starts = self.rig.hosts.starts
        while starts is not None and starts.waiting:
            self.rig.run(0.5)
            self._all_well()

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

    @precondition(lambda self: self.hosts.busy())
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
        env = self._drawn(data, self.hosts.busy())
        if fails and env.does not in (Op.ADOPT, Op.CLOSE):
            self.hosts.fail(env, FailureKind.RAISED)
        else:
            self.hosts.reply(env, done=done, recycle=worn, observe=seen)
        if look:
            self._look()

    @precondition(lambda self: self.hosts.busy())
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
            env = self._served(env_id)
            if env is not None and env.is_alive and len(env.requests) == 1:
                self.hosts.reply(env, done=True, observe=seen)
        self._look()

    @rule(data=st.data(), sure=st.sampled_from([False, True]))
    def host_dies(self, data: st.DataObject, sure: bool) -> None:
        alive = self.hosts.alive()
        if sure and alive:
            self.hosts.die(self._drawn(data, alive), KILLED)
            self._look()

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.run(seconds)
        self._look()

    def _drawn(self, data: st.DataObject, envs: list[HostedEnv]) -> HostedEnv:
        return self.hosts.of(data.draw(st.sampled_from([env.key for env in envs])))

    def _served(self, env_id: int) -> HostedEnv | None:
        """Return what serves an env, under whatever id it was told of last."""
        host = self.rig.transport.hosts.get(self.rig.slot(env_id).host_id or 0)
        return None if host is None else next(iter(host.envs.values()))

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
                env = self._served(slot.env_id)
                assert env is not None, where
                if env.is_alive and rig.transport.next_event is None:
                    assert env.requests, where
                    assert env.requests[-1].request_id == slot.request_id, where
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
            if not self.hosts.busy() and all(s.phase is Phase.IDLE for s in self.rig.hosts.envs):
                break
            self.rig.run(0.5)
        for slot in supervisor.envs:
            state = self.rig.state(slot.env_id)
            assert state in (EnvState.RUN, EnvState.DONE), f"{state!r} {slot}"
            assert state is EnvState.DONE or not slot.owed or slot.failed_while_ready is None
        figures = supervisor.spares.figures()
        assert figures["spares_ready"] == figures["spare_env_num"]
        assert self.rig.identity_holds()
        resets = [m.payload for _, m in self.rig.transport.sent if m.op == Op.RESET]
        assert not any(order.plan.auto_reset for order in resets)  # spares begin the next episodes


@pytest.mark.timeout(3600)  # a failure is made small before it is reported, which takes a while
def test_spares_whatever_happens() -> None:
    run_state_machine_as_test(SparesMachine, settings=machine_settings())
