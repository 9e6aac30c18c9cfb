"""Steps of envs that go by message, and those that no host will take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envmgr.core import failures
from envmgr.core.episodes import Episodes
from envmgr.core.hosts import Hosts
from envmgr.core.late import expect_late
from envmgr.core.phases import Phase
from envmgr.core.slots import EnvSlot
from envmgr.core.stats import Statistics
from envmgr.lifecycle import Event
from envmgr.wire.messages import Op

Submitted = tuple[EnvSlot, tuple[int, Any] | None]
"""An env and its encoded action; None for one whose host is gone: it will not be executed."""


class Sending:
    """Sends steps.

    Args:
        hosts: whose envs take them.
        statistics: where steps are counted.
        episodes: told when a host may be replaced.
    """

    def __init__(self, hosts: Hosts, statistics: Statistics, episodes: Episodes) -> None:
        self._hosts = hosts
        self._record = hosts.record
        self._states = hosts.record.states
        self._statistics = statistics
        self._episodes = episodes
        # What is to be the case when steps have been sent, also if an interrupt comes in between.
        self._unfinished: tuple[Sequence[Submitted], int] | None = None

    def forget(self) -> None:
        """Do not do what is left of sending actions."""
        self._unfinished = None

    def send(self, prepared: Sequence[Submitted]) -> None:
        """Send actions to ready envs; every one of them is owed a timestep from now on.

        Can be interrupted; `finish` does what is left.

        Args:
            prepared: envs with their encoded actions, from `prepare`.
        """
        self.begin(prepared)
        self.finish(again=False)

    def begin(self, prepared: Sequence[Submitted]) -> None:
        """Have `finish` send actions: from now on they are accepted."""
        self._unfinished = prepared, self._statistics.actions + len(prepared)

    def finish(self, *, again: bool) -> None:
        """Do what is left of sending actions; nothing if there is none.

        Args:
            again: some of it may have been done, before an interrupt.
        """
        if self._unfinished is None:
            return
        prepared, n_actions = self._unfinished
        self._statistics.actions = n_actions
        expect_late(self._hosts, (slot.env_id for slot, _ in prepared))
        self._record.observed.counted((slot.env_id for slot, _ in prepared), -n_actions)
        for slot, frame in prepared:
            if frame is None:
                self._record.unexecuted.add(slot.env_id)
            elif not again or slot.request_id != frame[0]:
                self._hosts.submit_step(slot, frame, again=again)
        self._unfinished = None

    def settle_doomed(self) -> None:
        """Give envs that died while idle, and were sent an action since, their abnormal timesteps.

        Not to be interrupted.
        """
        for env_id in sorted(self._record.unexecuted):
            self._settle_doomed(self._record.slots[env_id])
            self._record.unexecuted.discard(env_id)

    def prepare(self, slot: EnvSlot, action: Any) -> tuple[int, Any] | None:
        """Encode an action; None for an env whose host is gone (it will not be executed).

        Raises:
            FrameError: the action cannot be sent.
        """
        if slot.doomed is not None:
            return None
        return self._hosts.prepare(slot, Op.STEP, action)

    def _settle_doomed(self, slot: EnvSlot) -> None:
        """Give the action to an env that died while idle its abnormal timestep, and catch up."""
        failure = slot.doomed
        slot.doomed = None
        if failure is None:
            raise RuntimeError("an env without failure: a defect of envmgr, please report it")
        env_id = slot.env_id
        slot.timestep = failures.abnormal_timestep(slot, failure)
        self._statistics.abnormal += 1
        self._states.apply(env_id, Event.FAILED)
        if slot.dropped:
            self._states.apply(env_id, Event.DROP)
        elif slot.fresh is not None:
            (slot.obs, slot.reset_info), slot.fresh = slot.fresh, None
            self._states.apply(env_id, Event.BEGIN_RESET)
            self._states.apply(env_id, Event.RESET_SUCCEEDED)
        elif slot.phase is Phase.RESETTING:
            self._states.apply(env_id, Event.BEGIN_RESET)
        elif slot.phase is Phase.STARTING:
            self._states.apply(env_id, Event.RENEW)
        elif slot.phase is Phase.IDLE and slot.host_id is not None:  # renewed, auto_reset off
            self._states.apply(env_id, Event.REPAIRED_UNATTENDED)
        self._episodes.replace_worn_host(slot.group)
