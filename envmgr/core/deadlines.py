"""Time limits: which one applies to an env, when it passes and, in shared workers, whose it is.

The limits that leases have of their own are chosen in `envmgr.core.slots`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from envmgr.core.phases import Phase
from envmgr.core.table import NEVER, EnvTable, HostGroup, ManagedEnv
from envmgr.policy import Deadlines
from envmgr.spaces import Array
from envmgr.types import Clock
from envmgr.wire.block import Block
from envmgr.wire.messages import Op

_PASSED = float("inf")

_CONSTRUCTION = frozenset((Op.HELLO, Op.RENEW))
_ALL_WORK = _CONSTRUCTION | {Op.RESET, Op.STEP, Op.CALL, Op.GET_ATTR, Op.SET_ATTR, Op.RELEASE}


class OwnLimit(NamedTuple):
    """A limit for the present request to one env, in place of the limit for all envs.

    Attributes:
        phases: the phases that it limits.
        limit_s: the limit in seconds.
        name: the name of what sets the limit, for messages.
        charged: whether exceeding it counts against the env's failure budget.
    """

    phases: frozenset[Phase]
    limit_s: float
    name: str
    charged: bool = True


_LOOK_EVERY_S = 0.05
"""How often to look, at most, whether a host is done with something, if it does not announce it."""


class TimeLimits:
    """The time limits of what envs and their hosts do.

    Args:
        table: of all envs.
        groups: which of the envs share a host.
        deadlines: the limits.
        clock: monotonic seconds.
        announces: whether shared hosts announce everything that they begin with; otherwise they
            announce constructions only.

    Attributes:
        clock: monotonic seconds.
        step_s: the limit of steps.
        close_s: the limit of closing.
        limit_episodes: whether steps or resets have a limit.
        earliest: a moment before which no deadline passes; may be too early, never too late.
        own: limits of requests to single envs, by env_id.
        changes: a count that grows when there is something new for the background to look after.
        turn_at: when an env may have its turn (see `starts`), if nothing happens before that.
    """

    def __init__(
        self,
        table: EnvTable,
        groups: Sequence[HostGroup],
        deadlines: Deadlines,
        clock: Clock,
        *,
        announces: bool,
    ) -> None:
        self.clock = clock
        self.step_s = deadlines.step_s
        self.close_s = deadlines.close_s
        self.limit_episodes = deadlines.step_s is not None or deadlines.reset_s is not None
        self.earliest = NEVER
        self.own: dict[int, OwnLimit] = {}
        self.changes = 0
        self.turn_at = NEVER
        self._table = table
        self._groups = groups
        self._announces = announces
        self._block: Block | None = None
        self._by_phase: dict[Phase, float | None] = {
            Phase.STARTING: deadlines.connect_s,
            Phase.RESETTING: deadlines.reset_s,
            Phase.POSTED: deadlines.step_s,
            Phase.STEPPING: deadlines.step_s,
            Phase.CANCELLING: deadlines.step_s,
            Phase.CALLING: deadlines.reset_s,
        }
        self._shortest_s = min(limit for limit in self._by_phase.values() if limit is not None)

    def look_into(self, block: Block | None) -> None:
        """Read from this block what shared hosts are running; None if there is no block."""
        self._block = block

    def of_phase(self, phase: Phase) -> float | None:
        """Return the limit of a phase, in seconds; None if it has none."""
        return self._by_phase.get(phase)

    def of(self, env: ManagedEnv) -> float:
        """Return the limit of what an env is busy with, in seconds; inf for none."""
        if env.host_id is None:
            return self.close_s  # its host lets go of it
        phase = env.phase
        if (own := self.own_of(env)) is not None:
            return own.limit_s
        limit_s = self._by_phase.get(Phase.CALLING if phase is Phase.IDLE else phase)
        return NEVER if limit_s is None else limit_s

    def own_of(self, env: ManagedEnv) -> OwnLimit | None:
        """Return the own limit of what an env is busy with; None if that has none."""
        own = self.own.get(env.env_id)
        return own if own is not None and env.phase in own.phases else None

    # -- setting ------------------------------------------------------------------------------

    def set(self, env: ManagedEnv, limit_s: float | None, asked_at: float | None = None) -> None:
        """Have the request to an env time out; in a shared host, only once it has begun."""
        group = env.group
        asked_at = self.clock() if asked_at is None else asked_at
        if not group.takes_turns:
            self.set_deadline(env, limit_s, asked_at)
            return
        env.deadline = NEVER
        if limit_s is not None:
            env.since = asked_at
            if group.running is None and group.deadline == NEVER:
                self._set_of_group(group, env.since + limit_s)

    def set_own(self, env: ManagedEnv, own: OwnLimit) -> None:
        """Have the request that an env was just sent time out by a limit of its own."""
        self.own[env.env_id] = own
        self._shortest_s = min(self._shortest_s, max(own.limit_s, _LOOK_EVERY_S))
        self.set(env, own.limit_s)
        group = env.group
        if group.takes_turns and group.running is None:
            moment = env.since + own.limit_s
            if moment < group.deadline:
                self._set_of_group(group, moment)

    def set_deadline(
        self, env: ManagedEnv, limit_s: float | None, begin: float | None = None
    ) -> None:
        """Have what an env does time out `limit_s` after `begin`, or after now if that is None."""
        if limit_s is None:
            env.deadline = env.limit_s = NEVER
            return
        begin = self.clock() if begin is None else begin
        self.set_until(env, begin + limit_s, limit_s)

    def set_until(self, env: ManagedEnv, deadline: float, limit_s: float) -> None:
        """Have what an env does time out at a moment."""
        env.deadline, env.limit_s = deadline, limit_s
        self.remember(deadline)

    def set_posted(self, rows: Any) -> None:
        """Note that steps of these rows are posted now."""
        if self.step_s is not None:
            now = self.clock()
            self._table.since[rows] = now
            self.earliest = min(self.earliest, now + self.step_s)

    def look_at(self, moment: float) -> None:
        """Have the engine look at this moment whether an env has its turn."""
        self.turn_at = moment
        self.remember(moment)

    def _set_of_group(self, group: HostGroup, moment: float) -> None:
        group.deadline = moment
        self.remember(moment)

    def remember(self, moment: float) -> None:
        """Have deadlines looked at by this moment, unless they will be looked at before."""
        if moment < self.earliest:
            self.earliest = moment
            self.changes += 1

    # -- shared hosts -------------------------------------------------------------------------

    def goes_on(self, group: HostGroup) -> None:
        """Note that a host has said that it runs its envs at the same time, and not in turns.

        From now on, each env has a deadline of its own.
        """
        group.is_async, group.running, group.deadline = True, None, NEVER
        for env in group.awaited():
            limit_s = self.of(env)
            self.set_deadline(env, None if limit_s == NEVER else limit_s)

    def began(self, env: ManagedEnv) -> None:
        """Note that a shared host has said that it begins with the request for this env."""
        group = env.group
        if group.is_async:
            self.set_deadline(env, None if self.of(env) == NEVER else self.of(env))
            return
        if group.running is not env:  # as it is while the first one is built
            group.running = env
            group.quiet_since = self.clock()
            self._set_of_group(group, group.quiet_since + self.of(env))

    def finished(self, group: HostGroup) -> None:
        """Note that a shared host is done with what it ran, and may begin something else."""
        group.running = None
        group.quiet_since = self.clock()
        self._set_of_group(group, group.quiet_since + self._shortest_s)

    def _look(self, group: HostGroup, block: Block) -> None:
        """Read from the block what a shared host is running."""
        now, running = self.clock(), int(block.running[group.index])
        since = float(block.since[group.index])
        if not since <= now:  # NaN too: nobody may put off a deadline
            since = group.quiet_since
        env = group.by_id.get(running - 1)
        if env is not None and env.phase is Phase.IDLE:  # it is done with that
            env = None
        if env is None and group.running is not None and since <= group.quiet_since:
            return  # a message has said what it runs, and the block knows of nothing later
        if env is None or env.phase in _STEPS:
            posted, finished = int(block.posted[group.index]), int(block.finished[group.index])
            if self._is_passed_over(group, posted, finished, now):
                group.running = None
                return
        if env is not None and self.of(env) == NEVER:  # it may be at that for as long as it likes
            env, since = None, now
        if env is None:
            group.running = None
            group.quiet_since = max(group.quiet_since, since)
            return
        group.running = env
        group.deadline = since + self.of(env)

    def _is_passed_over(self, group: HostGroup, posted: int, finished: int, now: float) -> bool:
        """Return whether a shared host goes on with steps although a request should come first.

        Steps that are posted for a host keep it busy. Those that it takes before it looks at its
        messages were posted before the host was first found to exceed a limit with a message: once
        it has taken these steps, the time for which it does not begin with the request counts.

        Args:
            group: the envs of the host.
            posted: what the block says was posted for the host last.
            finished: what the block says the host has finished last.
            now: the time of this look.
        """
        first = self._first_limited(group)
        if first is None:
            return False
        order, first_posted = group.overdue
        if order != max(first.request_id, first.order):
            group.overdue = (max(first.request_id, first.order), posted)
        elif first_posted == _PASSED:
            return True
        elif finished > first_posted:
            group.overdue = (order, _PASSED)
            group.quiet_since = now
            return True
        return False

    def _first_limited(self, group: HostGroup) -> ManagedEnv | None:
        awaited = group.awaited()
        limited = [env for env in awaited if self.of(env) != NEVER]
        if not limited or (len(limited) < len(awaited) and not self._announces):
            return None  # it may be at something that has no limit
        return limited[0]

    def _timed_out_by_own(self, group: HostGroup, now: float) -> ManagedEnv | None:
        """Return an env that has exceeded a limit of its own, where it is unknown what is run.

        The limit counts from when the request was sent, and includes what the host does for other
        envs.
        """
        for env in group.awaited():
            own = self.own_of(env)
            if own is not None and env.since + own.limit_s <= now:
                return env
        return None

    def _timed_out_in(self, group: HostGroup, now: float) -> ManagedEnv | None:
        """Return the env whose limit has passed in a shared host; else set the next deadline.

        While nothing is running, a host that has requests and stays silent exceeds the limit of
        the first of them, which counts from when the host could have begun with that request.
        """
        env = group.running or self._first_limited(group)
        if env is None and self.own:
            env = self._timed_out_by_own(group, now)
            if env is not None:
                env.limit_s = self.of(env)
                return env
        if env is None:
            group.deadline = NEVER
            if any(self.of(other) != NEVER for other in group.awaited()):
                # What has no limit may end unannounced: look again later, and count from then.
                group.quiet_since = group.deadline = now + self._shortest_s
            return None
        if group.running is None:
            group.deadline = max(group.quiet_since, env.since) + self.of(env)
        if group.deadline > now:
            return None
        env.limit_s = self.of(env)
        return env

    # -- what is due --------------------------------------------------------------------------

    def timed_out_steps(self, now: float) -> list[int]:
        """Return the envs whose posted steps have taken too long."""
        block, limit_s = self._block, self.step_s
        if block is None or limit_s is None or now < self.earliest:
            return []
        timed_out = self._under_way(block) & (self._since + limit_s <= now)
        found: list[int] = timed_out.nonzero()[0].tolist()
        return found

    def _under_way(self, block: Block) -> Array:
        table = self._table
        column = np.frombuffer(table.phases.column, np.uint8, table.env_num)
        found: Array = (column == Phase.POSTED) & ~table.answered(block.replies, _POSTED)
        return found

    @property
    def _since(self) -> Array:
        return self._table.since[: self._table.env_num]

    def due(self, now: float) -> list[ManagedEnv]:
        """Return the envs whose deadline has passed.

        Acting on one env may change what is due for others of its group: check each of them again
        with `is_due`.

        Args:
            now: the moment that `timed_out_steps` was called with. A deadline that passes between
                two different moments would be found by neither, and `earliest` would miss it.
        """
        envs = self._table.envs
        if now < self.earliest:
            return []
        due = [env for env in envs if env.deadline <= now]
        for group in self._groups:
            if group.deadline <= now:
                if self._block is not None and group.takes_turns and not group.is_retired:
                    self._look(group, self._block)
                env = self._timed_out_in(group, now)
                due += [] if env is None else [env]
        moments = [*(s.deadline for s in envs), *(g.deadline for g in self._groups), self.turn_at]
        if self._block is not None and self.step_s is not None:
            posted = self._since[self._under_way(self._block)]
            moments += (posted + self.step_s).tolist()
        self.earliest = min((moment for moment in moments if moment > now), default=NEVER)
        return due

    def is_due(self, env: ManagedEnv) -> bool:
        """Return whether the deadline of an env, or of its host, has passed."""
        return min(env.deadline, env.group.deadline) <= self.clock()


_POSTED = np.uint8(Phase.POSTED)
_STEPS = (Phase.POSTED, Phase.STEPPING, Phase.CANCELLING)


def announced_in(deadlines: Deadlines) -> frozenset[int]:
    """Return which ops a shared host announces, so that limits count from when they begin."""
    if deadlines.step_s is None and deadlines.reset_s is None:
        return _CONSTRUCTION
    return _ALL_WORK
