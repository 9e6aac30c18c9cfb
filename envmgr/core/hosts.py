"""Hosts of envs: which host serves which env_ids, requests to them, and their deadlines."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from envmgr.core.deadlines import TimeLimits, announced_in
from envmgr.core.phases import FAILS_DURING, Change, Next, Phase
from envmgr.core.starts import Starts
from envmgr.core.statistics import Tracer
from envmgr.core.table import NEVER, EnvTable, HostGroup, ManagedEnv, host_groups, names_of
from envmgr.policy import Deadlines, StartCaps
from envmgr.texts import logged
from envmgr.transport.base import Transport
from envmgr.types import Clock, EnvFactory
from envmgr.wire.block import RING_LAST, RING_MASK, Block
from envmgr.wire.hosts import EnvToBuild, HostSettings, HostSpec
from envmgr.wire.messages import UNANSWERED, Message, Op


def await_own_reset(hosts: Hosts, env: ManagedEnv, *, in_next_step: bool) -> None:
    """Await the reset that the host of an env begins by itself: now, or with a step of others."""
    env.order = next(hosts.request_ids)
    hosts.await_reply(env, Change.RESET, env.request_id)  # another reply to the same request
    if in_next_step:
        hosts.table.waits_for_step(env.env_id)


def reset_in_step_of(hosts: Hosts, env_ids: Iterable[int]) -> None:
    """Begin the episodes of rows that waited for a step of these envs; safe to repeat."""
    table = hosts.table
    begun, limit_s = table.begun_with(env_ids), hosts.limits.of_phase(Phase.RESETTING)
    if limit_s is not None:
        for env in map(table.envs.__getitem__, begun):
            if env.phase is Phase.RESETTING:
                hosts.limits.set(env, limit_s)
    table.waits_no_more(begun)


def released(hosts: Hosts, env_id: int) -> None:
    """Note that an env was released: rows that waited for its step may have no other to await."""
    if hosts.table.begins_alone(env_id):
        reset_in_step_of(hosts, (env_id,))


_LONG_PAUSE_S = 1.0
"""Pauses of at least this length are logged."""


class Hosts:
    """The hosts of envs, the requests to them, and what is awaited of them until when.

    Args:
        factories: the factories of the envs, by env_id, those of the spares last.
        clock: monotonic seconds.
        num_workers: how many hosts share the envs; None: one for each.
        spare_num: how many of the envs are spares.
        caps: how many envs may be built or reset; None if there are no caps.

    Attributes:
        env_num: the number of envs that users see, without spares.
        table: what is known of all envs.
        envs: the details of each env in the table, by env_id, those of the spares last.
        phases: what hosts are busy with; changed here, and where steps are posted and handed out.
        groups: which envs share a host.
        group_of_host: the envs that each host serves, by host_id; without hosts that were given up.
        limits: how long hosts may take.
        request_ids: gives an id to each request, in order, whichever way the request goes.
        block: where steps are posted; None where they go by message.
        settings: the settings of every host that serves one env.
        tracer: is told what hosts are doing; None if nothing is traced.
        starts: the envs that wait for their turn to be built or reset; None where there are no
            caps.
    """

    def __init__(
        self,
        transport: Transport,
        factories: Sequence[EnvFactory],
        settings: HostSettings,
        deadlines: Deadlines,
        clock: Clock,
        *,
        num_workers: int | None = None,
        spare_num: int = 0,
        caps: StartCaps | None = None,
    ) -> None:
        self.transport, self.clock = transport, clock
        self.env_num = len(factories) - spare_num
        self.table = EnvTable(self.env_num, spare_num)
        self.envs, self.phases = self.table.envs, self.table.phases
        self.table.join_rows(settings.batches)
        self.groups = host_groups(self.envs, num_workers)
        self._factories = factories
        self.settings = settings
        self.tracer: Tracer | None = None
        self._shared_settings = replace(settings, announced=announced_in(deadlines))
        self._host_ids = itertools.count(1)
        self.request_ids = itertools.count(UNANSWERED + 1)
        self.group_of_host: dict[int, HostGroup] = {}
        self._killed: set[int] = set()
        announces = Op.STEP in self._shared_settings.announced
        self.limits = TimeLimits(self.table, self.groups, deadlines, clock, announces=announces)
        self.starts = Starts(caps, self.table, self.limits) if caps else None
        together, seen = transport.posts_together, self.envs[: self.env_num]
        self.table.index_of = [0 if together else env.group.index for env in seen]
        self.block: Block | None = None

    # -- which host serves which envs ---------------------------------------------------------

    def start(self, envs: Sequence[ManagedEnv]) -> None:
        """Build envs that have no host: in a new one for each group that has none either.

        Envs that have to wait for their turn pause until then.

        Raises:
            ConfigError: a factory cannot be sent to a host; nothing was started.
        """
        if self.starts is None:
            self._start(envs)
            return
        admitted: list[ManagedEnv] = []
        later: list[ManagedEnv] = []
        for env in self.across(envs):
            may_begin = not later and self.starts.may_begin(env, beside=len(admitted))
            (admitted if may_begin else later).append(env)
        self._start(admitted)
        for env in later:
            self.await_turn(env, Next.BUILD)

    def across(self, envs: Sequence[ManagedEnv]) -> Sequence[ManagedEnv]:
        """Return envs in the order in which they are to begin.

        Where only some envs may begin at a time, the first envs of all hosts come first, because a
        host builds and resets one env at a time.
        """
        if self.starts is None:
            return envs
        return sorted(envs, key=lambda env: env.env_id - env.group.envs[0].env_id)

    def _start(self, envs: Sequence[ManagedEnv]) -> None:
        served = [env for env in envs if env.group.host_id is not None]
        starting: dict[int, list[ManagedEnv]] = {}
        for env in envs:
            if env.group.host_id is None:
                starting.setdefault(env.group.index, []).append(env)
        specs = [self._spec(self.groups[index], built) for index, built in starting.items()]
        self.transport.start(specs)
        for spec, built in zip(specs, starting.values(), strict=True):
            self._await_start(spec, built)
        for env in served:
            self._build(env)

    def _spec(self, group: HostGroup, built: Sequence[ManagedEnv]) -> HostSpec:
        envs = tuple(
            EnvToBuild(
                env.env_id,
                env.generation,
                next(self.request_ids) if env in built else UNANSWERED,
                self._factories[env.env_id],
            )
            for env in group.envs
        )
        settings = self._shared_settings if group.is_shared else self.settings
        return HostSpec(next(self._host_ids), group.index, envs, settings)

    def _await_start(self, spec: HostSpec, built: Sequence[ManagedEnv]) -> None:
        group = self.groups[spec.index]
        group.host_id = spec.host_id
        self.group_of_host[spec.host_id] = group
        for to_build in spec.envs:
            if to_build.request_id != UNANSWERED:
                env = group.by_id[to_build.env_id]
                env.host_id = spec.host_id
                self.await_reply(env, Change.BUILD, to_build.request_id)
        if group.takes_turns:
            group.running = built[0]  # its limit counts from the start of the host

    def build(self, env: ManagedEnv) -> None:
        """Have the host of an env's group build the env, in place of the previous one."""
        if self.starts is not None and not self.starts.may_begin(env):
            self.await_turn(env, Next.BUILD)
        else:
            self._build(env)

    def await_turn(self, env: ManagedEnv, follow_up: Next) -> None:
        """Have an env wait until it may be built or reset."""
        self._change(env, Change.PAUSE)
        if self.starts is not None:
            self.starts.wait(env, follow_up)

    def build_in_turn(self, env: ManagedEnv) -> None:
        """Build the env whose turn it is: in the host of its group, or in a new one."""
        env.follow_up = Next.NOTHING
        if self.starts is not None:
            self.starts.may_begin(env)
        if env.group.host_id is None:
            self._start([env])
        else:
            self._build(env)

    def _build(self, env: ManagedEnv) -> None:
        env.host_id = env.group.host_id
        self.request(env, Op.RENEW, None, Change.BUILD)

    def release(self, env: ManagedEnv) -> None:
        """Have a host that others share let go of an env."""
        self.settle(env)
        self.tell(env, Op.RELEASE, None)
        env.host_id = None

    # -- requests -----------------------------------------------------------------------------

    def prepare(self, env: ManagedEnv, op: Op, payload: Any) -> tuple[int, Any]:
        """Encode a request without sending it; return its id and what to send.

        Raises:
            FrameError: the payload cannot be sent.
        """
        request_id = next(self.request_ids)
        message = Message(op, env.env_id, env.generation, request_id, payload)
        return request_id, self.transport.prepare(host_of(env), message)

    def submit(self, env: ManagedEnv, change: Change, prepared: tuple[int, Any]) -> None:
        """Send what `prepare` returned and await its reply."""
        request_id, frame = prepared
        self.await_reply(env, change, request_id)
        self.transport.send(host_of(env), frame)

    @property
    def resets_need_no_looking_after(self) -> bool:
        """Whether resets have no time limit, and workers no limit that has them replaced."""
        return not self.are_recycled and self.limits.of_phase(Phase.RESETTING) is None

    @property
    def are_recycled(self) -> bool:
        """Whether workers are recycled: replaced once `Host` in `envmgr.worker.host` says so."""
        settings = self.settings
        return settings.max_episodes is not None or settings.max_rss_bytes is not None

    def request(self, env: ManagedEnv, op: Op, payload: Any, change: Change) -> None:
        """Send a request and await its reply."""
        self.submit(env, change, self.prepare(env, op, payload))

    def tell(self, env: ManagedEnv, op: Op, payload: Any) -> None:
        """Send a message whose reply, if there is one, is not awaited."""
        message = Message(op, env.env_id, env.generation, UNANSWERED, payload)
        host_id = host_of(env)
        self.transport.send(host_id, self.transport.prepare(host_id, message))

    def await_reply(self, env: ManagedEnv, change: Change, request_id: int) -> None:
        """Await the reply to a request, from now on."""
        self._change(env, change)
        env.request_id = request_id
        env.cancelled = UNANSWERED  # a reset that follows a step answers the same request
        env.next_episode = env.episode + 1
        own = self.limits.own_of(env)
        self.limits.set(env, self.limits.of_phase(env.phase) if own is None else own.limit_s)

    def cancel_request(self, env: ManagedEnv) -> None:
        """Have the host of an async env cancel the env's request, and await the reply.

        If that takes longer than the limit for closing, the env does not end when it is cancelled.
        """
        env.cancelled = env.request_id
        during = FAILS_DURING[env.phase]
        message = Message(Op.CANCEL, env.env_id, env.generation, env.request_id, during)
        host_id = host_of(env)
        self.transport.send(host_id, self.transport.prepare(host_id, message))
        exceeded_s = env.limit_s
        self.limits.set_deadline(env, self.limits.close_s)
        env.limit_s = exceeded_s  # what messages name

    def settle(self, env: ManagedEnv) -> None:
        """Note that nothing is awaited of this env any more."""
        self._change(env, Change.SETTLE)
        env.deadline = NEVER

    def cancel(self, env: ManagedEnv) -> None:
        """Note that nobody wants a step's timestep any more; its reply is still awaited."""
        self._change(env, Change.CANCEL)

    def pause(self, envs: Sequence[ManagedEnv], pause_s: float, follow_up: Next) -> None:
        """Have `follow_up` begin after `pause_s`, for all of these envs."""
        if pause_s >= _LONG_PAUSE_S:
            text = "%s: %s follows in %g s"
            logged(logging.WARNING, text, names_of(envs), follow_up.value, pause_s)
        for env in envs:
            self._change(env, Change.PAUSE)
            env.follow_up = follow_up
            self.limits.set_deadline(env, pause_s)

    def _change(self, env: ManagedEnv, change: Change) -> None:
        self.table.changed(env.env_id, change)
        if self.tracer is not None:
            self.tracer.changed(env.env_id, env.phase)
        self.limits.changes += 1

    # -- posted steps -------------------------------------------------------------------------

    def share(self, block: Block | None) -> None:
        """Have steps posted in this block from now on; None: in no block any more."""
        self.block = block
        self.limits.look_into(block)
        if block is not None:
            self.transport.count_messages(block.messages_sent)

    def look_after(self, env: ManagedEnv) -> None:
        """Look after an env's posted step by itself; do nothing if it takes none."""
        block = self.block
        if block is None or env.phase is not Phase.POSTED:
            return
        self.table.changed(env.env_id, Change.TAKE_OVER)
        env.order = env.request_id
        if self.limits.step_s is not None:
            self.limits.set(env, self.limits.step_s, env.since)
        if self.may_stay_silent(env.env_id):
            self.ask(self.table.index_of[env.env_id])

    def may_stay_silent(self, env_id: int) -> bool:
        """Return whether an env's posted step is unanswered and its host might not ring for it."""
        block = self.block
        if block is None:
            return False
        posting = int(block.posted[self.table.index_of[env_id]])
        tokens = self.table.tokens
        return posting & RING_MASK == RING_LAST and bool(block.replies[env_id] != tokens[env_id])

    def ask(self, index: int) -> None:
        """Have a host ring when it has done what was posted."""
        self.transport.ring((self.groups[index].host_id or 0,), asks=True)

    # -- the end of a host --------------------------------------------------------------------

    def leave(self, env: ManagedEnv, follow_up: Next, pause_s: float = 0.0) -> None:
        """Have an env leave its host; `follow_up` begins when that is gone, after a pause.

        The host ends, or is gone already. Call `end` for all of its envs together.
        """
        self._change(env, Change.END)
        env.follow_up = follow_up
        env.pause_s = pause_s
        env.waits = False
        env.deadline = NEVER

    def join(self, env: ManagedEnv, other: ManagedEnv) -> None:
        """Have an env without a host await the new host that another env of its group awaits."""
        self._change(env, Change.END if other.phase is Phase.ENDING else Change.PAUSE)
        env.host_id = other.host_id
        env.request_id = other.request_id
        env.follow_up = Next.RENEW_HOST
        env.pause_s = 0.0
        env.deadline = other.deadline

    def end(self, group: HostGroup, *, ask: bool) -> None:
        """End the host of envs that `leave` it.

        Args:
            group: the envs.
            ask: let the host close its envs first, within the limit for closing.
        """
        leaving = [env for env in group.envs if env.phase is Phase.ENDING]
        group.is_ending = True
        group.deadline = NEVER
        if ask:
            request_id, frame = self.prepare(leaving[0], Op.CLOSE, None)
            self.transport.send(host_of(leaving[0]), frame)
        else:
            request_id = UNANSWERED
            self._kill(host_of(leaving[0]))
        for env in leaving:
            env.request_id = request_id
            limit_s = self.limits.close_s if ask else self.transport.kill_patience_s
            self.limits.set_deadline(env, limit_s)

    def _kill(self, host_id: int) -> None:
        if host_id in self._killed:
            self.transport.give_up(host_id)
        else:
            self._killed.add(host_id)
            self.transport.kill(host_id)

    def _retire(self, group: HostGroup) -> None:
        """Leave its memory for good to a host that still runs although it was given up."""
        if not self.table.observed.is_open:
            return  # it was told of none
        group.is_retired = True
        for env in group.envs:
            if not env.is_spare:
                self.table.retire(env.env_id)

    def ended(self, group: HostGroup, *, lingers: bool = False) -> None:
        """Note that the host of these envs is gone and reaped, or was given up and lingers."""
        if lingers:
            self._retire(group)
        if group.host_id is not None:
            self.group_of_host.pop(group.host_id, None)
            self._killed.discard(group.host_id)
        if self.block is not None and not lingers:
            # The host does no more of what was posted for it: the other hosts need not wait for it,
            # and one of them rings for all.
            self.block.finished[group.index] = self.block.posted[group.index]
        group.host_id = group.running = None
        group.is_ending = group.is_to_be_replaced = False
        group.obsolete_requests.clear()
        group.deadline = NEVER

    def forget_all(self) -> None:
        """Forget all hosts: what still arrives from them belongs to no env."""
        self.group_of_host.clear()


def host_of(env: ManagedEnv) -> int:
    """Return the host of an env that has one."""
    if env.host_id is None:
        raise RuntimeError(f"env {env.env_id} has no host: a defect of envmgr, please report it")
    return env.host_id
