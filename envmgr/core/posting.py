"""Steps of envs that are posted in the shared block, a batch at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from envmgr.core.action_kinds import ActionKinds
from envmgr.core.hosts import Hosts
from envmgr.core.late import expect_late
from envmgr.core.phases import Change, Phase
from envmgr.core.selection import Selection
from envmgr.core.sending import Sending, Submitted
from envmgr.core.stats import Statistics
from envmgr.spaces import ActionColumns, Array
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
)


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
        window, phases = selection.window, self._record.phases
        if window is None:
            self._record.tokens[selection.rows] = tokens
            self._block.requests[selection.rows] = tokens
            phases.apply_at(selection.array, Change.POST)
        else:
            window.token_bytes[:] = tokens
            window.request_bytes[:] = tokens
            phases.apply_rows(selection.rows, Change.POST)
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
        indexes = dict.fromkeys(map(hosts.index_of.__getitem__, env_ids))
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
            hosts.index_of[env_id]
            for env_id in self._record.phases.ids_in(Phase.POSTED)
            if hosts.may_stay_silent(env_id)
        ]
        for index in dict.fromkeys(silent):
            hosts.ask(index)
        self._posted_for_last = False
