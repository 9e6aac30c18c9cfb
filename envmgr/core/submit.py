"""Submitting actions: they are posted in the shared block, a batch at a time, or sent."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envmgr.core import failures
from envmgr.core.episodes import Episodes
from envmgr.core.hosts import Hosts, expect_late, host_of
from envmgr.core.phases import Change, Phase
from envmgr.core.statistics import Statistics
from envmgr.core.table import EnvSlot, Selection
from envmgr.lifecycle import Event
from envmgr.spaces import ActionColumns, Array, ValueMismatchError, split_batch
from envmgr.spaces.columns import NUMPY_VALUES
from envmgr.wire.block import (
    ORDERS,
    RING_LAST,
    RING_MASK,
    RING_ONCE,
    TOKEN_BYTES,
    Block,
    fence,
    generation_of,
    items,
    posting_of,
    token_of,
)
from envmgr.wire.messages import Op, make_message


class ActionKinds:
    """Writes actions into the columns of their envs' kinds, where nobody reads them unasked.

    Args:
        block: the columns.
        columns: pack the actions of each kind.
        kind_of: the kind of each env; None for those whose steps are not posted.
    """

    def __init__(
        self, block: Block, columns: Sequence[ActionColumns], kind_of: Sequence[int | None]
    ) -> None:
        self._block = block
        self._columns = columns
        self._kind_of = kind_of

    def write(self, env_ids: Sequence[int], values: Sequence[Any]) -> bool:
        """Write one action for each of these envs; False if one needs a second look.

        Args:
            env_ids: which; their steps may be posted.
            values: their actions.
        """
        by_kind: dict[Any, tuple[list[int], list[Any]]] = {}
        for env_id, value in zip(env_ids, values, strict=True):
            ids, actions = by_kind.setdefault(self._kind_of[env_id], ([], []))
            ids.append(env_id)
            actions.append(value)
        packed = []
        for kind, (ids, actions) in by_kind.items():
            found = self._columns[kind].of_values(actions)
            if found is None:
                return False
            packed.append((kind, ids, *found))
        for kind, ids, columns, form in packed:
            self._write(kind, ids, columns, form)
        return True

    def write_batch(self, env_ids: Sequence[int], batch: Any) -> bool:
        """As `write`, given a batch with a row for each env."""
        kind, *others = {self._kind_of[env_id] for env_id in env_ids}
        if kind is None:
            return False
        if others:
            try:
                return self.write(env_ids, split_batch(batch, len(env_ids)))
            except ValueMismatchError:
                return False
        columns = self._columns[kind].of_batch(batch, len(env_ids))
        if columns is not None:
            self._write(kind, list(env_ids), columns, NUMPY_VALUES)
        return columns is not None

    def _write(self, kind: int, ids: list[int], columns: Sequence[Any], form: Any) -> None:
        for column, values in zip(self._block.actions_of[kind], columns, strict=True):
            column[ids] = values
        self._block.kinds[ids] = form


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
        if 1 in record.late:
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
        limits = self._hosts.limits
        if limits.step_s is not None:
            for env_id in tokens:
                limits.set(self._record.slots[env_id], limits.step_s)
        self._record.sent(tokens)

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
        self._record.happened(env_id, Event.FAILED)
        if slot.dropped:
            self._record.happened(env_id, Event.DROP)
        elif slot.fresh is not None:
            (slot.obs, slot.reset_info), slot.fresh = slot.fresh, None
            self._record.happened(env_id, Event.BEGIN_RESET)
            self._record.happened(env_id, Event.RESET_SUCCEEDED)
        elif slot.phase is Phase.RESETTING:
            self._record.happened(env_id, Event.BEGIN_RESET)
        elif slot.phase is Phase.STARTING:
            self._record.happened(env_id, Event.RENEW)
        elif slot.phase is Phase.IDLE and slot.host_id is not None:  # renewed, auto_reset off
            self._record.happened(env_id, Event.REPAIRED_UNATTENDED)
        self._episodes.replace_worn_host(slot.group)


class Posting:
    """Posts steps.

    Args:
        block: where.
        actions: packs actions, whose space has a fixed layout.
        hosts: rings their doorbells.
        statistics: where steps are counted.
        sending: sends what goes by message beside what is posted.

    Attributes:
        actions: packs actions.
        kinds: writes actions, where there are several kinds of them; else None.
        any_shared: whether a host serves several envs.
    """

    def __init__(
        self,
        block: Block,
        actions: ActionColumns,
        hosts: Hosts,
        statistics: Statistics,
        sending: Sending,
    ) -> None:
        self.actions = actions
        self.kinds: ActionKinds | None = None
        self.any_shared = any(group.is_shared for group in hosts.groups)
        self._block = block
        self._hosts = hosts
        self._request_ids = hosts.request_ids
        self._limits = hosts.limits
        self._record = hosts.record
        self._statistics = statistics
        self._sending = sending
        self._posted = items(block.posted)
        self._sleeping = items(block.sleeping)
        self._groups = hosts.groups
        self._transport = hosts.transport
        self._works_alone = hosts.transport.works_alone
        self._kinds = -1
        # What is to be the case when a batch has been posted, also if Ctrl-C comes in between.
        self._unfinished: tuple[Selection, Any, int, int, Sequence[Submitted]] | None = None
        # By index of a host: what was posted when it was ordered to reset envs.
        self._orders: dict[int, int] = {}
        self._latest: Selection | None = None
        self._posted_for_last = False

    def detach(self) -> None:
        """Let go of the shared memory: who still looks at this looks at nothing."""
        plan = self._block.plan
        self._block = block = Block(bytearray(plan.nbytes), plan)
        self._posted, self._sleeping = items(block.posted), items(block.sleeping)
        self._unfinished = self._latest = None

    def post(
        self,
        selection: Selection,
        actions: Sequence[Array] | None,
        *,
        form: Any,
        ring: int,
        beside: Sequence[Submitted] = (),
    ) -> None:
        """Have ready envs take a step.

        Args:
            selection: which.
            actions: per leaf (k, *shape); None if they were written, with their forms.
            form: what the envs get of them, or of each (k,): see `spaces.columns`.
            ring: when their hosts ring. With `block.RING_LAST` one does when all have replied; who
                waits for some of them has to call `have_all_ring`.
            beside: actions of other envs, which are sent with these.
        """
        rows, window = selection.rows, selection.window
        if actions is None:
            form = self._kinds
        elif window is None:
            for column, values in zip(self._block.actions, actions, strict=True):
                column[rows] = values
        else:
            for target, values in zip(window.actions, actions, strict=True):
                target[...] = values
        if type(form) is not int:
            self._kinds = -1
            self._block.kinds[rows] = form
        elif form != self._kinds:
            self._kinds = -1  # an interrupt may come in between
            self._block.kinds[rows] = form
            self._kinds = form if (self._block.kinds == form).all() else -1
        if self._limits.step_s is not None:
            self._limits.set_posted(rows)
        request_id, count, statistics = next(self._request_ids), selection.count, self._statistics
        tokens: Any  # the bytes of those of neighbours, else an array or what is that of each
        if statistics.has_generations:
            tokens = self._tokens(selection, request_id)
        elif window is None:
            tokens = request_id
        else:
            tokens = request_id.to_bytes(TOKEN_BYTES, sys.byteorder) * count
        posting = posting_of(request_id, ring)
        selection.n_posts += 1
        self._unfinished = selection, tokens, posting, statistics.actions + count, beside
        self.finish()
        if beside:
            self._sending.finish(again=False)

    def _tokens(self, selection: Selection, request_id: int) -> Any:
        """Return the tokens of a request of envs some of which are of later generations.

        The generation of an env is that of the request which it has answered last.
        """
        tokens = generation_of(self._record.tokens[selection.rows]) + np.uint64(request_id)
        return tokens if selection.window is None else tokens.tobytes()

    def finish(self) -> None:
        """Do what is left of a `post` that was interrupted; nothing if there is none."""
        unfinished = self._unfinished
        if unfinished is None:
            return
        selection, tokens, posting, self._statistics.actions, beside = unfinished
        window = selection.window
        if window is None:
            self._block.requests[selection.rows] = tokens
        else:
            window.request_bytes[:] = tokens
        self._record.posted(selection, tokens)
        self._latest = selection
        if 1 in self._record.late:
            expect_late(self._hosts, selection.ids)
        observed = self._record.observed
        if observed.counts:
            observed.counted(selection.ids, posting)
        if posting & RING_MASK == RING_LAST:
            self._posted_for_last = True
        posted, orders = self._posted, self._orders
        for index in selection.hosts:
            posted[index] = posting if index not in orders else self._with_orders(index, posting)
        self._ring(selection.hosts)
        if beside:
            self._sending.begin(beside)
        self._unfinished = None

    def order_resets(self, env_ids: Sequence[int]) -> None:
        """Have idle envs reset as their hosts know it from their plans; not to be interrupted."""
        hosts, record, request_id = self._hosts, self._record, next(self._request_ids)
        for env_id in env_ids:
            hosts.await_reply(record.slots[env_id], Change.RESET, request_id)
            self._block.orders[env_id] = record.tokens[env_id]
        indexes = dict.fromkeys(map(hosts.record.index_of.__getitem__, env_ids))
        for index in indexes:
            # What was posted before, and may not have been seen, is to be rung for as it was.
            ring = max(int(self._posted[index]) & RING_MASK, RING_ONCE)
            posting = posting_of(request_id, ring | ORDERS)
            self._posted[index] = self._orders[index] = posting
        self._ring(indexes)

    def _ring(self, indexes: Iterable[int]) -> None:
        """Ring for hosts that sleep, or may be about to."""
        if not self._works_alone:
            return
        fence()
        sleeping, groups = self._sleeping, self._groups
        self._transport.ring([groups[index].host_id or 0 for index in indexes if sleeping[index]])

    def _with_orders(self, index: int, posting: int) -> int:
        """Return what is posted for a host, which may not have seen its latest orders."""
        if self._block.finished[index] >= self._orders[index]:
            del self._orders[index]
            return posting
        return posting | ORDERS

    def sleep(self, *, soon: bool) -> None:
        """Say whether the caller is about to sleep, and has to be rung for."""
        self._sleeping[-1] = soon
        if soon:
            fence()

    def latest(self, outstanding: int) -> Selection | None:
        """Return what was posted last, if that is all that is outstanding, and it ascends."""
        selection = self._latest
        if selection is None or selection.count != outstanding or not selection.is_ascending:
            return None
        return selection if selection.is_posted(self._record.phases) else None

    def have_all_ring(self) -> None:
        """Have every host ring that need not, because its steps were to be gathered together.

        They are not when a gather waits for some of them, after `send` or Ctrl-C.
        """
        if not self._posted_for_last:
            return
        hosts = self._hosts
        silent = [
            hosts.record.index_of[env_id]
            for env_id in self._record.phases.ids_in(Phase.POSTED)
            if hosts.may_stay_silent(env_id)
        ]
        for index in dict.fromkeys(silent):
            hosts.ask(index)
        self._posted_for_last = False
