"""How long hosts may take: which limit applies, and whose has passed in a host that envs share."""

from __future__ import annotations

from envmgr.core.slots import NEVER, EnvSlot, HostGroup, Work
from envmgr.policy import Deadlines

_PASSED = float("inf")


class HostLimits:
    """The time limits of hosts.

    Args:
        deadlines: the limits.
        announces: shared hosts say what they begin with, whatever it is; else they do so for
            constructions only.

    Attributes:
        by_work: seconds; None or missing is no limit.
        least_s: the least of them.
    """

    def __init__(self, deadlines: Deadlines, *, announces: bool) -> None:
        self.by_work: dict[Work, float | None] = {
            Work.STARTING: deadlines.connect_s,
            Work.RESETTING: deadlines.reset_s,
            Work.STEPPING: deadlines.step_s,
            Work.CANCELLING: deadlines.step_s,
            Work.CALLING: deadlines.reset_s,
        }
        self._close_s = deadlines.close_s
        self._announces = announces
        self.least_s = min(limit for limit in self.by_work.values() if limit is not None)

    def of(self, slot: EnvSlot) -> float:
        """Return the limit of what an env is busy with, in seconds; inf for none."""
        if slot.host_id is None:
            return self._close_s  # its host lets go of it
        work = Work.CALLING if slot.work is Work.NONE else slot.work  # a repeated request
        limit_s = self.by_work.get(work)
        return NEVER if limit_s is None else limit_s

    def late_in(self, group: HostGroup, now: float) -> EnvSlot | None:
        """Return the env whose limit has passed in a shared host; else set the next deadline.

        While nothing is running, a host that has requests and stays silent exceeds the limit of
        the first of them: it counts from when the host could have begun with that.
        """
        late = group.running or self._first_limited(group)
        if late is None:
            group.deadline = NEVER
            return None
        if group.running is None:
            group.deadline = max(group.quiet_since, late.since) + self.of(late)
        if group.deadline > now:
            return None
        late.limit_s = self.of(late)
        return late

    def is_passed_over(self, group: HostGroup, posted: int, finished: int, now: float) -> bool:
        """Whether a shared host goes on with steps although a request should have come first.

        Steps that are posted for it keep a host busy. Those that it takes before it looks at its
        messages were posted before it was first found too late with one: after these, it counts
        that it does not begin with the request.

        Args:
            group: the envs.
            posted: what was posted for the host last.
            finished: what of that it was done with last.
            now: the moment.
        """
        late = self._first_limited(group)
        if late is None:
            return False
        order, first_posted = group.overdue
        if order != max(late.request_id, late.order):
            group.overdue = (max(late.request_id, late.order), posted)
        elif first_posted == _PASSED:
            return True
        elif finished > first_posted:
            group.overdue = (order, _PASSED)
            group.quiet_since = now
            return True
        return False

    def _first_limited(self, group: HostGroup) -> EnvSlot | None:
        awaited = group.awaited()
        limited = [slot for slot in awaited if self.of(slot) != NEVER]
        if not limited or (len(limited) < len(awaited) and not self._announces):
            return None  # it may be at something that has no limit
        return limited[0]
