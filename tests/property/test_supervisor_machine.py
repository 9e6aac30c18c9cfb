"""The supervisor under anything that envs, hosts, time and users may do, in any order.

A machine plays the hosts and the user of one manager, and checks after every move what has to hold
whatever happens: every accepted action settles exactly once, no reply is delivered that is not the
action's own, states change along the table only, and no env is stuck.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import event, note
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from envmgr.core import HandedOut, Next, Phase
from envmgr.core.phases import Change
from envmgr.core.submit import submit_calls
from envmgr.core.table import NEVER, ManagedEnv
from envmgr.errors import EnvFailure, FailuresExhaustedError, NothingReadyError
from envmgr.lifecycle import TRANSITIONS, EnvState, edges
from envmgr.policy import Deadlines, FailurePolicy, GatherPolicy, StartCaps
from envmgr.transport.base import TimedOut
from envmgr.types import EnvTimestep
from envmgr.wire.block import RING_EACH, RING_LAST, RING_ONCE, token_of
from envmgr.wire.messages import FailureKind, Message, Op
from tests.fake_hosts import HostedEnv, ObsTag
from tests.property.hosts import PlayedHosts
from tests.property.profiles import PROFILE, machine_settings
from tests.rig import Rig

TAKEN: Counter[tuple[Any, Any, Any]] = Counter()
"""Every edge that any example has taken."""

MOVES: Counter[str] = Counter()
"""How many moves there were in all examples, and by phase."""

LEAST_MOVES = 100_000
LEAST_TAKEN = 50
"""How many moves a long search makes at least, and how often it takes each edge of the table."""

MET: Counter[tuple[EnvState, Phase]] = Counter()
"""Every state and phase in which any example has reset an env."""

SECONDS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0, 64.0])
LAGS = st.sampled_from([0.0, 0.0, 0.0, 0.25, 1.0])
AWAITED = frozenset(Phase) - {Phase.IDLE, Phase.PAUSING}


@dataclass(frozen=True)
class Config:
    """What a manager was told."""

    env_num: int
    rules: dict[str, Any]
    policy: FailurePolicy
    deadlines: Deadlines
    kill_takes_s: float | None
    num_workers: int | None
    has_block: bool
    caps: StartCaps


@st.composite
def configs(draw: st.DrawFn) -> Config:
    auto_reset = draw(st.sampled_from([True, False]))
    rules = {
        "auto_reset": auto_reset,
        "reset_inplace": auto_reset and draw(st.booleans()),
        "episode_num": draw(st.sampled_from([float("inf"), 1, 2])),
    }
    policy = FailurePolicy(
        recover=draw(st.sampled_from([True, True, True, True, False])),
        max_retry=draw(st.integers(1, 3)),
        renew_between_attempts=draw(st.booleans()),
        retry_waiting_s=draw(st.sampled_from([0.0, 0.25, 1.0])),
        max_failures=draw(st.sampled_from([0, 1, 3, 1000])),
        window_s=8.0,
        drop_exhausted=draw(st.booleans()),
    )
    limit = st.sampled_from([None, 1.0, 4.0])
    deadlines = Deadlines(draw(limit), draw(limit), 8.0, draw(st.sampled_from([0.0, 1.0])))
    kill_takes_s = draw(st.sampled_from([0.0, 0.5, None]))
    env_num = draw(st.integers(1, 4))
    num_workers = draw(st.none() | st.integers(1, env_num))
    has_block = draw(st.booleans())
    caps = StartCaps(
        draw(st.sampled_from([None, None, 1, 2, 3])), draw(st.sampled_from([None, None, 1, 2, 0.5]))
    )
    return Config(env_num, rules, policy, deadlines, kill_takes_s, num_workers, has_block, caps)


INFOS: dict[str, dict[str, Any]] = {
    "none": {},
    "told": {"terminated": False, "truncated": False},
    "some": {"score": 0.5},
    "odd": {"list": [1]},  # the block has no room for it
}
"""What the info of a step or of a reset may be."""


@dataclass
class Owed:
    """An accepted action whose timestep was not delivered yet.

    Attributes:
        request_id: of the step; None if it was not sent, because the env was doomed.
        generation: of the env that took it.
        obs: the observation that it answers.
    """

    request_id: int | None
    generation: int
    obs: Any


class RecordedRows:
    """What posts and hands out ordinary steps in C, and what that makes of phases.

    Args:
        in_c: does it.
        selection: whose steps.
        expected: the phases of all envs.
    """

    def __init__(self, in_c: Any, selection: Any, expected: bytearray) -> None:
        self._in_c, self._rows, self._expected = in_c, selection.rows, expected
        self._count = selection.count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._in_c, name)

    def post(self, *args: Any) -> int:
        done: int = self._in_c.post(*args)
        if done:
            self._moves(Phase.IDLE, Change.POST, Phase.POSTED)
        return done

    def deliver(self, *args: Any) -> bool:
        were_in_run: bool = self._in_c.deliver(*args)
        assert were_in_run
        self._moves(Phase.POSTED, Change.SETTLE, Phase.IDLE)
        return were_in_run

    def _moves(self, source: Phase, change: Change, target: Phase) -> None:
        before = self._expected[self._rows]
        assert before == bytes((source,)) * self._count
        TAKEN[source, change, target] += self._count
        self._expected[self._rows] = bytes((target,)) * self._count


class SupervisorMachine(RuleBasedStateMachine):
    """One manager's supervisor, its user and its hosts."""

    def __init__(self) -> None:
        super().__init__()
        logging.getLogger("envmgr").setLevel(logging.CRITICAL + 1)
        self.phase = "new"
        self.expected: dict[Any, bytearray] = {}

    # -- launch and close -------------------------------------------------------------------

    @initialize(
        config=configs(),
        at_once=st.sampled_from([True, True, True, False]),
        early=st.sampled_from([False, False, False, True]),
    )
    def launch(self, config: Config, at_once: bool, early: bool) -> None:
        self._launch(config, at_once=at_once, early=early)

    @precondition(lambda self: self.phase == "closed")
    @rule(config=configs())
    def launch_again(self, config: Config) -> None:
        self._launch(config, at_once=True, early=False)

    def _launch(self, config: Config, *, at_once: bool, early: bool) -> None:
        self.config = config
        rig = Rig(
            config.env_num,
            policy=config.policy,
            deadlines=config.deadlines,
            kill_takes_s=config.kill_takes_s,
            num_workers=config.num_workers,
            has_block=config.has_block,
            caps=config.caps,
            **config.rules,
        )
        self.rig = rig
        self.hosts = PlayedHosts(rig.transport)
        rig.transport.answer = self.hosts
        self.owed: dict[int, Owed] = {}
        self.n_actions = self.n_delivered = self.n_cancelled = 0
        self.params: dict[int, dict[str, Any]] = {i: {} for i in range(config.env_num)}
        self.n_params = 0
        self.seeds: dict[int, int] = {}
        self.colours: dict[int, Any] = {}
        self.painting: dict[int, Any] = {}
        self.given_up: set[int] = set()
        self.generations = [0] * config.env_num
        self._record_edges()
        self._record_begins()
        if early:  # to read the spaces of the first one; and then, perhaps, nobody launches
            rig.supervisor.start_hosts([0])
            rig.pump()
            self.phase = "early"
            return
        self._start(at_once=at_once)

    @precondition(lambda self: self.phase == "early")
    @rule(at_once=st.booleans())
    def launch_after_all(self, at_once: bool) -> None:
        self._start(at_once=at_once)

    def _start(self, *, at_once: bool) -> None:
        self.rig.supervisor.start_hosts(range(self.config.env_num))
        self.phase = "building"
        self._after_move()
        if at_once:
            while self.phase in ("building", "resetting"):
                assert self._let_all_go_well()

    def _record_edges(self) -> None:
        record = self.rig.supervisor.table
        for table in (record.states, record.phases):
            self._record_changes(table)

    def _record_begins(self) -> None:
        """Remember when envs begin to be built or reset."""
        hosts, self.begun = self.rig.hosts, list[float]()
        await_reply = hosts.await_reply

        def awaiting(env: ManagedEnv, change: Change, request_id: int) -> None:
            # One that is to be reset again goes on in its own place.
            if change in (Change.BUILD, Change.RESET) and env.phase is not Phase.RESETTING:
                self.begun.append(self.rig.clock())
            await_reply(env, change, request_id)

        hosts.await_reply = awaiting  # type: ignore[method-assign]

    def _record_changes(self, table: Any) -> None:
        """Remember what each change makes of a table, and which edges were gone."""
        self.expected[table] = expected = bytearray(table.column)

        def recording(change: Callable[..., None]) -> Callable[..., None]:
            def changed(where: Any, what: Any) -> None:
                before = bytes(table.column)
                change(where, what)
                for env_id, (source, target) in enumerate(zip(before, table.column, strict=True)):
                    if source != target or (isinstance(where, int) and env_id == where):
                        TAKEN[table.members[source], what, table.members[target]] += 1
                expected[:] = table.column

            return changed

        for name in ("apply", "apply_all", "apply_at", "apply_rows"):
            setattr(table, name, recording(getattr(table, name)))

    def _record_what_is_done_in_c(self) -> None:
        """As `_record_changes`, of phases that change without a call of the table."""
        selections, phases = self.rig.supervisor.selections, self.rig.supervisor.table.phases
        make = selections.in_c
        if make is not None:
            expected = self.expected[phases]
            selections.in_c = lambda selection: RecordedRows(make(selection), selection, expected)

    def _go_on_launching(self) -> None:
        supervisor = self.rig.supervisor
        if supervisor.repair.launch_failures:
            self._close()
        elif self.phase == "building":
            phases = {slot.phase for slot in supervisor.envs}
            if not phases & {Phase.STARTING, Phase.PAUSING}:
                supervisor.place_observations(same_spaces=False)
                self._record_what_is_done_in_c()
                supervisor.begin_episodes()
                self.phase = "resetting"
        elif self.phase == "resetting" and set(supervisor.table.env_states()) == {EnvState.RUN}:
            supervisor.table.launching = False
            self.phase = "running"

    @precondition(lambda self: self.phase in ("early", "building", "resetting", "running"))
    @rule(sure=st.sampled_from([False, False, False, True]))
    def close(self, sure: bool) -> None:
        if sure:
            self._close()

    def _close(self) -> None:
        self.n_cancelled += len(self.owed)
        self.owed.clear()
        self.rig.engine.close(0.0)
        assert set(self.rig.supervisor.table.env_states()) == {EnvState.VOID}
        assert self.rig.deliver() == {}
        self.phase = "closed"

    # -- what the user does -----------------------------------------------------------------

    @precondition(lambda self: self.phase == "running" and self.rig.ready())
    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        ready = self.rig.ready()
        takes = [i for i in ready if self.rig.phase(i) is not Phase.CALLING]
        if not takes:
            return
        ids = data.draw(st.lists(st.sampled_from(takes), unique=True, min_size=1), label="envs")
        ring = data.draw(st.sampled_from([RING_LAST, RING_ONCE, RING_EACH]), label="ring")
        self._act(ids, ring)

    def _act(self, ids: list[int], ring: int = RING_EACH) -> None:
        actions = {}
        for env_id in ids:
            actions[env_id] = self.n_actions
            self.n_actions += 1
            generation = self.remembered(env_id).generation
            self.owed[env_id] = Owed(None, generation, self.rig.obs(env_id))
        n_sent = len(self.rig.transport.sent)
        self.rig.send(actions, ring)
        for _, message in self.rig.transport.sent[n_sent:]:
            if message.op == Op.STEP:
                self.owed[message.env_id].request_id = message.request_id
        self._after_move()

    def remembered(self, env_id: int) -> ManagedEnv:
        """Return what is known of an env."""
        return self.rig.hosts.envs[env_id]

    def is_posted(self, env_id: int) -> bool:
        """Whether an env takes a step whose reply stays in the block until it is gathered."""
        return self.rig.hosts.envs[env_id].phase is Phase.POSTED

    @precondition(lambda self: self.phase == "running" and self.owed)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(0, self.config.env_num - 1), unique=True))
        if not ids:
            self._deliver_what_is_there()
            self._after_move()
            return
        collector = self.rig.supervisor.collector
        arrived = [env_id for env_id in ids if collector.has_arrived(env_id)]
        if arrived:
            taken = collector.take(self.rig.selection(arrived))
            if taken is None:  # one of them is looked at by itself first
                self.rig.supervisor.apply_alone()
            else:
                assert list(self._deliver(taken)) == arrived
        self._after_move()

    def _deliver_what_is_there(self) -> None:
        now = self.rig.clock()
        if self.owed:
            self._deliver(self.rig.gather.some(GatherPolicy(1, 0.0), deadline=now, exactly=True))
        assert self.rig.clock() == now

    @precondition(lambda self: self.phase == "running")
    @rule(wait_num=st.sampled_from([1, 2, float("inf")]), seconds=SECONDS, stragglers=st.booleans())
    def gather(self, wait_num: float, seconds: float, stragglers: bool) -> None:
        rig = self.rig
        policy = GatherPolicy(wait_num, 0.25 if stragglers else 0.0)
        outstanding = sorted(self.owed)
        deadline = rig.clock() + seconds
        if not outstanding:
            with pytest.raises(NothingReadyError):
                rig.gather.some(policy, deadline=deadline)
            self._after_move()
            return
        taken = rig.gather.some(policy, deadline=deadline)
        assert rig.clock() <= deadline
        early = rig.clock() < deadline and not rig.supervisor.repair.urgent
        delivered = self._deliver(taken)
        assert list(delivered) == sorted(delivered)
        if early:
            assert len(delivered) >= policy.needed(len(outstanding))
            dones = [timestep.done for timestep in delivered.values()]
            assert list(delivered) == outstanding or not all(dones)
        self._after_move()

    def _deliver(self, taken: HandedOut | None) -> dict[int, EnvTimestep]:
        delivered = self.rig.hand_out(taken)
        for env_id, timestep in delivered.items():
            owed = self.owed.pop(env_id)  # KeyError: nothing was owed, or it came twice
            self.n_delivered += 1
            obs = timestep.obs
            if timestep.info.get("abnormal"):
                assert obs == owed.obs
                assert (timestep.reward, timestep.done) == (0.0, True)
                assert isinstance(timestep.info["error"], EnvFailure)
                assert timestep.info["error"].env_id == env_id
            else:
                kind = "terminal" if timestep.done else "next"
                assert owed.request_id is not None
                assert obs == ObsTag(env_id, owed.generation, owed.request_id, kind)
                if timestep.done and self.config.rules["reset_inplace"]:
                    self._check_next_episode_has_begun(env_id)
        return delivered

    def _check_next_episode_has_begun(self, env_id: int) -> None:
        """What comes with the next beginning is complete: nobody has to look before it goes on."""
        slot, supervisor = self.remembered(env_id), self.rig.supervisor
        state = supervisor.states[env_id]
        has_failed = env_id in supervisor.statistics.failing or state is EnvState.ERROR
        is_over = has_failed or state is EnvState.DONE or slot.waits or slot.group.is_ending
        assert is_over or env_id in self.rig.ready(), f"{state!r} {slot}"

    @precondition(lambda self: self.phase == "running")
    @rule(data=st.data(), new_params=st.booleans(), new_seed=st.booleans())
    def reset(self, data: st.DataObject, new_params: bool, new_seed: bool) -> None:
        env_id = data.draw(st.integers(0, self.config.env_num - 1), label="env")
        MET[self.rig.supervisor.states[env_id], self.rig.phase(env_id)] += 1
        params = None
        if new_params:
            self.n_params += 1
            self.params[env_id] = params = {"number": self.n_params}
        if new_seed:
            self.n_params += 1
            self.seeds[env_id] = self.remembered(env_id).new_seed = self.n_params
        if self.owed.pop(env_id, None) is not None:
            self.n_cancelled += 1
        self.given_up.discard(env_id)
        self.rig.reset(env_id, params)
        assert self.rig.supervisor.states[env_id] is EnvState.RESET
        self._after_move()

    @precondition(lambda self: self.phase == "running")
    @rule(data=st.data())
    def set_attr(self, data: st.DataObject) -> None:
        supervisor = self.rig.supervisor
        ids = [i for i in range(self.config.env_num) if self.rig.phase(i) is Phase.IDLE]
        ids = [i for i in ids if i not in self.owed and i not in self.painting]
        if not ids:
            return
        env_id = data.draw(st.sampled_from(ids), label="env")
        if not supervisor.envs[env_id].is_callable:
            return
        colour = f"colour {self.n_actions}.{len(self.colours)}.{self.n_params}"
        self.painting[env_id] = colour
        slots = supervisor.envs[env_id : env_id + 1]
        submit_calls(supervisor.hosts, slots, Op.SET_ATTR, [("colour", colour)], "setting it")
        self._after_move()

    # -- what hosts do ----------------------------------------------------------------------

    def _busy(self, *ops: Op) -> list[HostedEnv]:
        models = self.hosts.busy() if self.phase not in ("new", "closed") else []
        return [model for model in models if not ops or model.does in ops]

    def _draw(self, data: st.DataObject, models: list[HostedEnv]) -> HostedEnv:
        keys = [model.key for model in models]
        return self.hosts.of(data.draw(st.sampled_from(keys), label="host and env"))

    def _look(self, look: bool) -> None:
        if look:
            self._after_move()

    @precondition(lambda self: self._busy())
    @rule(
        data=st.data(),
        done=st.booleans(),
        recycle=st.sampled_from([False, False, True]),
        info=st.sampled_from(list(INFOS)),
        lag=LAGS,
        look=st.booleans() | st.just(True),
    )
    def host_replies(
        self, data: st.DataObject, done: bool, recycle: bool, info: str, lag: float, look: bool
    ) -> None:
        model = self._draw(data, self._busy())
        self.hosts.reply(model, done=done, recycle=recycle, info=INFOS[info], after_s=lag)
        self._look(look)

    @precondition(lambda self: any(model.is_announced for model in self._busy()))
    @rule(data=st.data(), lag=LAGS)
    def host_begins(self, data: st.DataObject, lag: float) -> None:
        announced = [model for model in self._busy() if model.is_announced]
        self.hosts.begin(self._draw(data, announced), lag)
        self._after_move()

    @precondition(lambda self: self._busy(Op.STEP))
    @rule(data=st.data(), done=st.booleans())
    def host_steps(self, data: st.DataObject, done: bool) -> None:
        self.hosts.reply(self._draw(data, self._busy(Op.STEP)), done=done)
        self._after_move()

    @precondition(lambda self: self.phase == "running" and self.rig.ready())
    @rule()
    def all_episodes_end(self) -> None:
        """What few random moves lead to: a step of every env that can, and its episode is over."""
        takes = [i for i in self.rig.ready() if self.rig.phase(i) is not Phase.CALLING]
        self._act(takes)
        for model in self._busy(Op.STEP):
            if model in self._busy(Op.STEP):
                self.hosts.reply(model, done=True)
        self._after_move()

    def _at_rest(self) -> list[HostedEnv]:
        """Return the hosts of envs that wait for their user to reset them."""
        if self.phase != "running":
            return []
        slots = [s for s in self.rig.supervisor.envs if self.rig.phase(s.env_id) is Phase.IDLE]
        slots = [s for s in slots if self.rig.supervisor.states[s.env_id] is EnvState.NEED_RESET]
        models = [self.hosts_of(slot) for slot in slots]
        return [model for model in models if model is not None and model.is_alive]

    @precondition(lambda self: self._at_rest())
    @rule(data=st.data())
    def host_dies_at_rest(self, data: st.DataObject) -> None:
        self.hosts.die(self._draw(data, self._at_rest()), -9)
        self._after_move()

    def _at_ease(self) -> list[HostedEnv]:
        """Return the hosts of envs that are ready, and have a host that lives."""
        if self.phase != "running":
            return []
        slots = [self.remembered(env_id) for env_id in self.rig.ready()]
        models = [
            self.hosts_of(s)
            for s in slots
            if s.phase is Phase.IDLE and s.failed_while_ready is None
        ]
        return [model for model in models if model is not None and model.is_alive]

    @precondition(lambda self: self._at_ease())
    @rule(data=st.data())
    def env_is_renewed_before_anybody_sees_that_it_died(self, data: st.DataObject) -> None:
        """And then it is sent its action."""
        victim = self._draw(data, self._at_ease())
        self.hosts.die(victim, -9)
        self._after_move()
        if self.phase != "running":
            return
        self.rig.run(4.0)  # the pause before a renewal
        self._after_move()
        for model in self._busy(Op.HELLO, Op.RENEW):
            if model in self._busy(Op.HELLO, Op.RENEW):
                self.hosts.reply(model)
        self._after_move()
        calling = self.rig.phase(victim.env_id) is Phase.CALLING
        if self.phase == "running" and victim.env_id in self.rig.ready() and not calling:
            self._act([victim.env_id])

    @precondition(lambda self: self._busy())
    @rule()
    def all_hosts_reply(self) -> None:
        while busy := self._busy():
            for model in busy:
                if model in self._busy():
                    self.hosts.reply(model)
        self._after_move()

    @precondition(lambda self: self._busy())
    @rule(
        data=st.data(),
        kind=st.sampled_from(list(FailureKind)),
        lag=LAGS,
        look=st.booleans() | st.just(True),
    )
    def host_fails(self, data: st.DataObject, kind: FailureKind, lag: float, look: bool) -> None:
        model = self._draw(data, self._busy())
        if model.does is Op.CLOSE:
            return
        if kind is FailureKind.NO_ATTRIBUTE and model.does is not Op.SET_ATTR:
            kind = FailureKind.RAISED
        self.hosts.fail(model, kind, lag)
        self._look(look)

    @precondition(lambda self: self.phase not in ("new", "closed") and self.hosts.alive())
    @rule(
        data=st.data(),
        status=st.sampled_from([0, 1, -9, None]),
        lag=LAGS,
        look=st.booleans() | st.just(True),
    )
    def host_dies(self, data: st.DataObject, status: int | None, lag: float, look: bool) -> None:
        self.hosts.die(self._draw(data, self.hosts.alive()), status, lag)
        self._look(look)

    @precondition(lambda self: self.phase not in ("new", "closed") and self.hosts.alive())
    @rule(data=st.data(), what=st.sampled_from(["garbage", "twice", "foreign", "malformed"]))
    def host_breaks_the_protocol(self, data: st.DataObject, what: str) -> None:
        model = self._draw(data, self.hosts.alive())
        if what == "malformed" and model.request is not None and model.does is not Op.CLOSE:
            self.hosts.malformed(model)
        elif what == "twice" and len(model.host.received) > 1:
            self.hosts.foreign(model, self._old_reply(data, model))
        elif what == "foreign":
            number = data.draw(st.integers(1, 50), label="request")
            payload = (ObsTag(0, 0, -1, "foreign"), 1.0, False, {}, 0)
            self.hosts.foreign(model, Message(Op.STEPPED, model.env_id, 99, number, payload))
        else:
            self.hosts.garbage(model)
        self._after_move()

    def _old_reply(self, data: st.DataObject, model: HostedEnv) -> Message:
        """Return a reply to a request that the host has answered, or gave up, long ago."""
        current = [m.request for m in self.hosts.envs() if m.host is model.host]
        old = [
            message
            for message in model.host.received
            if message.request_id and not any(message is one for one in current)
        ]
        request = data.draw(st.sampled_from(old or model.host.received[:1]), label="request")
        tag = ObsTag(request.env_id, request.generation, request.request_id, "late")
        return request._replace(op=Op.STEPPED, payload=(tag, 1.0, False, {}, 0))

    @precondition(lambda self: self._busy(Op.HELLO, Op.RENEW) and self.phase == "running")
    @rule(data=st.data())
    def env_comes_back_with_other_spaces(self, data: st.DataObject) -> None:
        self.hosts.other_spaces(self._draw(data, self._busy(Op.HELLO, Op.RENEW)))
        self._after_move()

    @precondition(lambda self: self.phase == "running")
    @rule(data=st.data())
    def late_reply_of_a_host_that_was_given_up(self, data: st.DataObject) -> None:
        serves = self.rig.supervisor.hosts.group_of_host.get
        models = [
            model
            for model in self.hosts.envs()
            if model.host.killed or serves(model.host.host_id) is None
        ]
        if not models:
            return
        model = self._draw(data, models)
        late = self._old_reply(data, model)
        self.rig.supervisor.handle(model.host.host_id, late)
        self.rig.supervisor.handle(model.host.host_id, TimedOut(late.request_id, 1.0))
        self._after_move()

    @precondition(lambda self: self.phase not in ("new", "closed") and self.hosts.killed())
    @rule(data=st.data())
    def killed_host_is_reaped(self, data: st.DataObject) -> None:
        self.hosts.die(self._draw(data, self.hosts.killed()), -9)
        self._after_move()

    # -- time -------------------------------------------------------------------------------

    @precondition(lambda self: self.phase not in ("new", "closed"))
    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        self.rig.run(seconds)
        self._after_move()

    @precondition(lambda self: self.phase not in ("new", "closed"))
    @rule(seconds=SECONDS)
    def nobody_looks_for_a_while(self, seconds: float) -> None:
        self.rig.advance(seconds)
        self._after_move()

    # -- after each move --------------------------------------------------------------------

    def _after_move(self) -> None:
        self.rig.pump()
        if self.phase in ("early", "building", "resetting"):
            self._go_on_launching()
            if self.phase != "closed":
                self.rig.pump()
        repair = self.rig.supervisor.repair
        if repair.urgent and self.phase == "running":
            assert not self.config.policy.recover
            self._close()
        while self.phase != "closed" and (fatal := repair.take_fatal()) is not None:
            assert isinstance(fatal, FailuresExhaustedError)
            assert not self.config.policy.drop_exhausted
            failures = self.rig.supervisor.statistics.failures_by_env
            spent = failures[fatal.failure.env_id] > self.config.policy.max_failures
            assert spent or sum(failures.values()) > 10
            self.given_up.add(fatal.failure.env_id)
        self._take_results()

    def _take_results(self) -> None:
        for env_id in list(self.painting):
            slot = self.remembered(env_id)
            if slot.phase is Phase.CALLING:
                continue
            colour = self.painting.pop(env_id)
            if slot.result is None:  # it succeeded: repeated from now on
                self.colours[env_id] = colour
                self.rig.supervisor.repeat([env_id], Op.SET_ATTR, [("colour", colour)])
            elif self.phase == "running" and self.hosts_of(slot) is not None:
                self.colours.pop(env_id, None)  # whether it was set, nobody can tell

    def hosts_of(self, slot: ManagedEnv) -> HostedEnv | None:
        """Return an env as the host that serves it sees it."""
        return None if slot.host_id is None else self.hosts.of((slot.host_id, slot.env_id))

    # -- what has to hold -------------------------------------------------------------------

    @invariant()
    def all_holds(self) -> None:
        if self.phase == "new":
            return
        MOVES[self.phase] += 1
        self._check_every_action_is_accounted_for()
        self._check_states_change_by_events_only()
        self._check_ready_and_pending_are_disjoint()
        self._check_no_step_is_executed_twice()
        self._check_what_is_remembered_of_an_env_makes_sense()
        self._check_work_and_hosts_fit()
        self._check_nothing_is_awaited_that_never_comes()
        self._check_limits_are_set()
        self._check_no_env_is_stuck()
        self._check_what_is_ready_is_of_the_env_that_will_take_the_action()
        self._check_seeds_are_used_by_resets_that_succeed()
        self._check_caps_are_kept()

    def _check_caps_are_kept(self) -> None:
        """No more envs are built or reset than may be; and if fewer are, nobody waits."""
        starts, caps = self.rig.hosts.starts, self.config.caps
        if starts is None:
            return
        assert caps.at_once is None or starts.at_it <= caps.at_once
        if caps.per_s is not None:
            most = max(1, int(caps.per_s))
            pairs = zip(self.begun, self.begun[most:], strict=False)
            assert all(later - begun >= most / caps.per_s for begun, later in pairs)
        if self.phase in ("building", "resetting", "running"):
            assert not starts.has_turn or self.rig.supervisor.repair.launch_failures
        if starts.waiting and starts.at_it == 0 and self.phase == "running":
            blocked = all(self.rig.hosts.envs[i].group.is_ending for i in starts.waiting)
            assert blocked or self.rig.supervisor.earliest_deadline < NEVER

    def _check_every_action_is_accounted_for(self) -> None:
        statistics = self.rig.supervisor.statistics
        assert statistics.actions == self.n_actions_here
        assert statistics.timesteps == self.n_delivered
        assert statistics.cancelled == self.n_cancelled
        assert statistics.outstanding == len(self.owed)
        assert self.rig.identity_holds()
        assert sorted(self.owed) == self.rig.supervisor.table.owed_ids()

    @property
    def n_actions_here(self) -> int:
        return self.n_delivered + self.n_cancelled + len(self.owed)

    def _check_states_change_by_events_only(self) -> None:
        for table, expected in self.expected.items():
            assert table.column == expected

    def _check_ready_and_pending_are_disjoint(self) -> None:
        ready, supervisor = set(self.rig.ready()), self.rig.supervisor
        assert ready.isdisjoint(self.owed)
        for slot in supervisor.envs:
            state = supervisor.states[slot.env_id]
            assert (slot.env_id in ready) is (state is EnvState.RUN and not slot.owed)

    def _check_no_step_is_executed_twice(self) -> None:
        sent = [m.payload for _, m in self.rig.transport.sent if m.op == Op.STEP]
        assert len(sent) == len(set(sent))

    def _check_what_is_remembered_of_an_env_makes_sense(self) -> None:
        if self.phase != "running":
            return
        for slot in self.rig.supervisor.envs:
            state = self.rig.supervisor.states[slot.env_id]
            where = f"{state!r} {slot}"
            if slot.timestep is not None:
                assert slot.owed, where
            if slot.awaits_reset:
                assert slot.timestep is not None, where
            if slot.failed_while_ready is not None:
                assert state is EnvState.RUN, where
            if slot.fresh is not None:
                assert slot.failed_while_ready is not None, where
                assert slot.phase in (Phase.IDLE, Phase.CALLING), where
            if slot.phase in (Phase.STEPPING, Phase.POSTED):
                assert (state, slot.owed, slot.timestep) == (EnvState.RUN, True, None), where
            if slot.phase is Phase.CANCELLING:
                assert (state, slot.owed) == (EnvState.RESET, False), where
            if slot.phase is Phase.RESETTING:
                assert state is EnvState.RESET or slot.failed_while_ready is not None, where
            assert slot.generation >= self.generations[slot.env_id], where
            self.generations[slot.env_id] = slot.generation
            if slot.phase is Phase.POSTED:
                assert slot.failed_while_ready is None, where

    def _check_work_and_hosts_fit(self) -> None:
        if self.phase not in ("resetting", "running"):
            return
        supervisor = self.rig.supervisor
        for slot in supervisor.envs:
            where = f"{self.rig.supervisor.states[slot.env_id]!r} {slot}"
            model = self.hosts_of(slot)
            if slot.phase is Phase.IDLE:
                assert slot.deadline == NEVER, where
            elif slot.phase is Phase.PAUSING:
                starts = self.rig.hosts.starts
                waits = starts is not None and starts.waits(slot)
                assert waits or slot.deadline < NEVER, where
                assert slot.follow_up is not Next.NOTHING, where
            else:
                assert slot.phase in AWAITED, where
                assert model is not None, where
                assert not model.host.reported, where
            if model is not None:
                assert supervisor.hosts.group_of_host.get(model.host.host_id) is slot.group, where
                assert model.env_id == slot.env_id, where
                assert not model.host.reported, where
            assert supervisor.hosts.limits.earliest <= slot.deadline, where
            assert supervisor.hosts.limits.earliest <= slot.group.deadline, where
        unknown = [
            model.key
            for model in self.hosts.envs()
            if model.is_alive and supervisor.hosts.group_of_host.get(model.host.host_id) is None
        ]
        assert not unknown, f"nobody looks after hosts {unknown}"

    def _check_nothing_is_awaited_that_never_comes(self) -> None:
        if self.phase != "running" or self.rig.transport.next_event is not None:
            return
        for slot in self.rig.supervisor.envs:
            where = f"{self.rig.supervisor.states[slot.env_id]!r} {slot}"
            if slot.phase not in AWAITED:
                continue
            model = self.hosts_of(slot)
            assert model is not None, where
            if model.host.killed:
                continue  # it will be reaped
            if slot.phase is Phase.ENDING:  # one of its envs was told for all of them
                assert slot.deadline < NEVER, where
                assert model.host.received[-1].request_id == slot.request_id, where
                continue
            if model.request is None and self._is_answered_in_block(slot):
                continue  # nobody has looked yet
            assert model.request is not None, where
            assert model.request.request_id == slot.request_id, where
        self._check_what_is_posted()

    def _is_answered_in_block(self, slot: ManagedEnv) -> bool:
        shared = self.rig.transport.shared
        block = None if shared is None else shared.block
        token = token_of(slot.generation, slot.request_id)
        if block is None:
            return False
        column = block.resets if slot.phase is Phase.RESETTING else block.replies
        return bool(column[slot.env_id] == token)

    def _check_what_is_posted(self) -> None:
        supervisor = self.rig.supervisor
        arrived = supervisor.collector.arrived_ids()
        for slot in supervisor.envs:
            if not self.is_posted(slot.env_id) or slot.env_id in arrived:
                continue
            model = self.hosts_of(slot)
            assert model is not None, slot
            assert model.does is Op.STEP, slot
            limit_s = supervisor.hosts.limits.of_phase(Phase.POSTED)
            assert limit_s is None or supervisor.earliest_deadline < NEVER, slot

    def _check_limits_are_set(self) -> None:
        """Whatever has a limit and runs, or could run, times out some time."""
        if self.phase != "running":
            return
        hosts = self.rig.supervisor.hosts
        for slot in hosts.envs:
            limit_s = hosts.limits.of_phase(slot.phase)
            if limit_s is None or slot.phase is Phase.POSTED:
                continue
            group = slot.group
            where = f"{slot} {group.deadline} {group.running}"
            others_are_limited = all(
                hosts.limits.of_phase(s.phase) is not None for s in group.awaited()
            )
            if not group.is_shared:
                assert slot.deadline < NEVER, where
            elif group.running is slot or (group.running is None and others_are_limited):
                assert group.deadline < NEVER, where

    def _waits_for_others(self, slot: ManagedEnv) -> bool:
        """Whether its next episode waits for the end of those of its neighbours."""
        others = [s for s in slot.group.present() if s is not slot]
        goes_on = [
            s.phase is not Phase.IDLE or self.rig.supervisor.states[s.env_id] is EnvState.RUN
            for s in others
        ]
        return slot.waits and slot.group.is_to_be_replaced and any(goes_on)

    def _check_no_env_is_stuck(self) -> None:
        if self.phase != "running":
            return
        for slot in self.rig.supervisor.envs:
            state = self.rig.supervisor.states[slot.env_id]
            where = f"{state!r} {slot}"
            ends = slot.phase in (Phase.ENDING, Phase.PAUSING) and slot.follow_up is Next.NOTHING
            works = self.rig.phase(slot.env_id) is not Phase.IDLE
            goes_on = (works and not ends) or self._waits_for_others(slot)
            if slot.owed and not self.rig.supervisor.collector.has_arrived(slot.env_id):
                assert slot.awaits_reset or self.rig.phase(slot.env_id) is Phase.STEPPING, where
                assert goes_on, where
            if state in (EnvState.RESET, EnvState.INIT):
                assert goes_on, where
            if state is EnvState.ERROR:
                assert goes_on or slot.env_id in self.given_up, where
            if state is EnvState.RUN and slot.failed_while_ready is not None and not goes_on:
                unattended = not slot.attended and slot.host_id is not None
                gone = slot.dropped or slot.env_id in self.given_up
                assert slot.fresh is not None or unattended or gone, where
            if state is EnvState.RUN and slot.failed_while_ready is None and not works:
                assert slot.host_id is not None, where

    def _check_what_is_ready_is_of_the_env_that_will_take_the_action(self) -> None:
        if self.phase != "running":
            return
        for env_id in self.rig.ready():
            slot, obs = self.remembered(env_id), self.rig.obs(env_id)
            assert isinstance(obs, ObsTag)
            assert obs.env_id == env_id
            assert obs.kind in ("first", "next")
            if slot.failed_while_ready is not None:
                continue
            assert obs.generation == slot.generation
            model = self.hosts_of(slot)
            assert model is not None
            if model.is_alive:
                assert model.params == self.params[env_id] == slot.reset_params
                if env_id in self.colours and env_id not in self.painting:
                    assert model.colour == self.colours[env_id]

    def _check_seeds_are_used_by_resets_that_succeed(self) -> None:
        if self.phase != "running":
            return
        for env_id in list(self.seeds):
            slot = self.remembered(env_id)
            if slot.seed is None and slot.new_seed is None:  # it counts as used
                seed = self.seeds.pop(env_id)
                models = self.hosts.envs()
                assert any(seed in model.seeds for model in models if model.env_id == env_id)

    # -- the end ----------------------------------------------------------------------------

    def teardown(self) -> None:
        """Have everything go well from now on: it has to come to rest, with nothing owed."""
        try:
            if self.phase in ("early", "building", "resetting", "running"):
                self._come_to_rest()
        finally:
            logging.getLogger("envmgr").setLevel(logging.NOTSET)

    def _come_to_rest(self) -> None:
        for _ in range(200):
            goes_on = self._let_all_go_well()
            if self.phase == "running":
                self._deliver_what_is_there()
                self._after_move()  # an episode that ended with that may have begun anew already
            starts = self.rig.hosts.starts
            since_then = self._busy() or (starts is not None and starts.waiting)
            if not goes_on and not since_then:
                break
        if self.phase == "closed":
            return
        assert self.phase in ("early", "running"), "a launch in which all goes well goes on"
        for slot in self.rig.supervisor.envs if self.phase == "running" else ():
            state = self.rig.supervisor.states[slot.env_id]
            where = f"{state!r} {slot}"
            note(where)
            note(self.rig.supervisor.statistics.as_dict()["latest_failures"][-3:])
            assert not self.rig.supervisor.table.owes(slot.env_id), where
            assert self.rig.phase(slot.env_id) is Phase.IDLE, where
            waits = state in (EnvState.RUN, EnvState.NEED_RESET, EnvState.DONE)
            waits = waits or self._waits_for_others(slot)
            assert waits or slot.env_id in self.given_up, where
        self.all_holds()
        event(f"failures: {min(sum(self._failures().values()), 10)}")
        self._close()
        self.all_holds()

    def _let_all_go_well(self) -> bool:
        """Have everybody answer, or else time pass; return whether there was anything to do."""
        rig = self.rig
        killed, busy = self.hosts.killed(), self._busy()
        for model in killed:
            self.hosts.die(model, -9)
        for model in busy:
            self.hosts.reply(model)
        self._after_move()
        if self.phase == "closed":
            return False
        if killed or busy or self.hosts.killed() or self._busy():
            return True
        moment = min(rig.supervisor.earliest_deadline, rig.transport.next_event or NEVER)
        if moment == NEVER:
            return False
        rig.advance(moment - rig.clock())
        self._after_move()
        return True

    def _failures(self) -> Counter[str]:
        return self.rig.supervisor.statistics.failures_by_kind


@pytest.mark.timeout(3600)  # a failure is made small before it is reported, which takes a while
def test_whatever_happens() -> None:
    run_state_machine_as_test(SupervisorMachine, settings=machine_settings())
    assert " moves: " in taken_table()  # which a long search is judged by


def taken_table() -> str:
    """Return how often each edge was taken, the rarest first, and how many moves there were."""
    rarest = sorted(edges(TRANSITIONS), key=lambda edge: TAKEN[edge])
    lines = [
        f"{TAKEN[edge]:8d}  {edge[0].name} --{edge[1].name}--> {edge[2].name}" for edge in rarest
    ]
    return "\n".join([f"{MOVES.total()} moves: {dict(MOVES)}", *lines])


@pytest.mark.skipif(PROFILE != "long", reason="a short search does not come everywhere")
def test_every_edge_of_the_table_was_taken() -> None:
    print(taken_table())
    assert MOVES.total() >= LEAST_MOVES
    rare = {edge: TAKEN[edge] for edge in edges(TRANSITIONS) if TAKEN[edge] < LEAST_TAKEN}
    assert not rare


@pytest.mark.skipif(PROFILE != "long", reason="a short search does not come everywhere")
def test_envs_were_reset_in_every_state_and_work() -> None:
    assert {state for state, _ in MET} == set(EnvState) - {EnvState.VOID}
    # To the moves, a posted step is one under way like any other: see `Rig.phase`.
    assert {work for _, work in MET} == set(Phase) - {Phase.POSTED}
