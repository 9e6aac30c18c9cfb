"""Steps of envs that go by message, and those that no host will take."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from envmgr.core import failures
from envmgr.core.episodes import Episodes
from envmgr.core.hosts import Hosts, host_of
from envmgr.core.late import expect_late
from envmgr.core.phases import Change, Phase
from envmgr.core.slots import EnvSlot
from envmgr.core.stats import Statistics
from envmgr.lifecycle import Event
from envmgr.wire.block import token_of
from envmgr.wire.messages import Op, make_message

Submitted = tuple[EnvSlot, int, Any]
"""An env, the token of the request and what to send; None for an env whose host is gone: it will
not be executed."""


class _Sent(NamedTuple):
    """Actions that were accepted.

    Attributes:
        n_actions: accepted since launch, these included.
        tokens: of the requests, by env_id; empty once their replies are awaited.
        requests: what is to be sent, and to which host.
        unexecuted: envs that are sent nothing, as their hosts are gone.
    """

    n_actions: int
    tokens: dict[int, int]
    requests: deque[tuple[int, Any]]
    unexecuted: Sequence[int]


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
        self._unfinished: _Sent | None = None

    def prepare(self, slot: EnvSlot, action: Any) -> Submitted:
        """Encode an action.

        Raises:
            FrameError: the action cannot be sent.
        """
        if slot.env_id in self._record.doomed:
            return slot, 0, None
        hosts, generation = self._hosts, slot.generation
        request_id = next(hosts.request_ids)
        message = make_message((Op.STEP, slot.env_id, generation, request_id, action))
        prepared = hosts.transport.prepare(slot.host_id or host_of(slot), message)
        return slot, token_of(generation, request_id), prepared

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
        self._unfinished = _Sent(
            self._statistics.actions + len(prepared),
            {slot.env_id: token for slot, token, what in prepared if what is not None},
            deque([(slot.host_id or 0, what) for slot, _, what in prepared if what is not None]),
            [slot.env_id for slot, _, what in prepared if what is None],
        )

    def finish(self, *, again: bool) -> None:
        """Do what is left of sending actions; nothing if there is none.

        Can be interrupted, and called again.

        Args:
            again: some of it may have been done, before an interrupt.
        """
        if self._unfinished is None:
            return
        self._statistics.actions, tokens, requests, unexecuted = self._unfinished
        record = self._record
        if record.late:
            expect_late(self._hosts, (*tokens, *unexecuted))
        if record.observed.counts:
            record.observed.counted((*tokens, *unexecuted), -self._statistics.actions)
        record.unexecuted.update(unexecuted)
        self._await(tokens)
        tokens.clear()  # before any is sent: what has been replied is not awaited again
        self._hosts.transport.send_each(requests, again=again)
        self._unfinished = None

    def _await(self, tokens: Mapping[int, int]) -> None:
        """Await the replies to requests, given their tokens by env_id."""
        token_items, limits = self._record.token_items, self._hosts.limits
        steps = self._record.step_items
        for env_id, token in tokens.items():
            token_items[env_id] = token
            steps[env_id] += 1
        if limits.step_s is not None:
            for env_id in tokens:
                limits.set(self._record.slots[env_id], limits.step_s)
        self._hosts.phases.apply_all(tokens, Change.STEP)

    def settle_doomed(self) -> None:
        """Give envs that died while idle, and were sent an action since, their abnormal timesteps.

        Not to be interrupted.
        """
        for env_id in sorted(self._record.unexecuted):
            self._settle_doomed(self._record.slots[env_id])
            self._record.unexecuted.discard(env_id)

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
