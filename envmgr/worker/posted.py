"""The child side of the shared block: takes the steps posted there for the envs of a host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from envmgr.wire.block import (
    ORDERS,
    RING_EACH,
    RING_MASK,
    items,
)
from envmgr.worker.actions import ActionReader, KindsReader
from envmgr.worker.bulk import bulks_of
from envmgr.worker.seats import Seat, Step

_RING_AT_LEAST_S = 200e-6
"""How often a host rings at most for each env: a parent that is woken for every cheap step of many
takes from the hosts what it gains. It looks around by itself, too."""

_NOTHING_SEEN = -1
"""Equal to nothing that is posted."""

_Known = tuple[Seat, int, int]
"""A seat, and the tokens of the step and of the order that it has taken last."""

_SPINS = 16
_LEAST_SHARE = 16


def _silent() -> None:
    """Ring for nobody."""


def _gone(token: int, action: Any) -> None:
    """Take no step, in place of an env that was closed in the midst of a batch."""


class PostedSteps:
    """The posted steps of all envs of a host.

    Who has slept runs with cold caches, where each call costs a microsecond: so for a lone env
    `run` calls nothing but the env.

    Args:
        index: which of the manager's hosts it is.
        ring: rings the parent's bell; None where it is the parent who runs the steps.
        timed: say when each step began, because there are time limits.
        spin_s: how long to watch the block before sleeping; 0 never does.

    Attributes:
        ring: rings the parent's bell.
        interrupted: the env_id of the env whose code `run` was running when something went through
            it (Ctrl-C, where envs run in the caller); None if that was no env's code.
    """

    def __init__(
        self, index: int, ring: Callable[[], None] | None, *, timed: bool, spin_s: float = 0.0
    ) -> None:
        self._index = index
        self.ring = ring or _silent
        self._is_heard = ring is not None
        self._timed = timed
        self._spin_s = self._most_s = spin_s
        self._seats: list[Seat] = []
        self._steps: list[Step] = []
        self._taken: list[int] = []
        self._ordered: list[int] = []
        # Who is to take part, while that changes.
        self._arranged: list[_Known] | None = None
        self._batch: tuple[list[Seat], list[Step]] = ([], [])
        self._seen = 0
        self._mail: Any = (0,) * (index + 1)
        self._fence = threading.Lock()  # of this host alone: it may be one of many threads
        self._read = _NOTHING_SEEN
        self.interrupted: int | None = None

    # -- who takes part ---------------------------------------------------------------------

    @property
    def has_seats(self) -> bool:
        """Whether an env takes part."""
        return bool(self._seats)

    def seat(self, seat: Seat) -> None:
        """An env takes its row, in place of the one that had it before."""
        row, block = seat.row, seat.sink.block
        self.leave(row)
        self._posting = items(block.posted)
        self._finished = items(block.finished)
        self._mail = items(block.mail)
        self._requests = items(block.requests)
        self._orders = items(block.orders)
        self._running = items(block.running)
        self._since = items(block.since)
        self._sleeping = items(block.sleeping)
        # What was posted there before is not for this env.
        new = (seat, int(block.requests[row]), int(block.orders[row]))
        self._arrange(sorted((*self._known(), new), key=lambda known: known[0].row))

    def leave(self, row: int) -> None:
        """An env is closed, and takes no steps any more."""
        seats, steps = self._batch
        for position, seat in enumerate(seats):
            if seat.row == row:
                steps[position] = _gone
        known = self._known()
        left = [one for one in known if one[0].row != row]
        if len(left) < len(known):
            self._arrange(left)

    def _known(self) -> list[_Known]:
        """Return who takes part, with the tokens that each has taken last.

        Where envs run in the caller an interrupt may have come into `_arrange`: then its beginning
        counts.
        """
        if self._arranged is not None:
            return self._arranged
        return list(zip(self._seats, self._taken, self._ordered, strict=True))

    def _arrange(self, known: list[_Known]) -> None:
        """Have these take part, in this order."""
        self._arranged = known
        self._apply(known)
        self._arranged = None

    def _apply(self, known: list[_Known]) -> None:
        self._seats = seats = [seat for seat, _, _ in known]
        self._taken = [token for _, token, _ in known]
        self._ordered = [token for _, _, token in known]
        self._steps = [seat.step for seat in seats]
        self._bulks = bulks_of(seats)
        self._is_lone = len(seats) == 1 and not self._timed  # there is a short way for those
        if not seats:
            return
        self._rows = [seat.row for seat in seats]
        self._shown = [row + 1 for row in self._rows]
        self._first, self._end = self._rows[0], self._rows[-1] + 1
        self._is_dense = self._end - self._first == len(seats)
        takes_any = all(seat.takes_any_number for seat in seats)
        block, kinds = seats[0].sink.block, [seat.action_kind for seat in seats]
        self._actions: ActionReader | KindsReader
        if len(set(kinds)) == 1:
            rows, kind = self._rows, kinds[0]
            self._actions = ActionReader(block, rows, takes_any_number=takes_any, kind=kind)
        else:
            self._actions = KindsReader(block, self._rows, kinds, takes_any_number=takes_any)
        self._readers = self._actions.readers

    @property
    def is_due(self) -> bool:
        """Whether something is posted that has not been looked at."""
        return bool(self._seats) and self._posting[self._index] != self._seen

    def has_mail(self) -> bool:
        """Return whether messages were sent to this host since this was asked last."""
        read, self._read = self._read, self._mail[self._index]
        return bool(read != self._read)

    def _spin(self, seen: int) -> bool:
        """Watch for something to do, for a while; return whether there is.

        How long depends on how it went before: where the parent takes its time, it is not worth it.
        """
        posting, index = self._posting, self._index
        end = monotonic() + self._spin_s
        while monotonic() < end:
            for _ in range(_SPINS):
                if posting[index] != seen:
                    self._spin_s = self._most_s
                    return True
        self._spin_s = max(self._spin_s / 2, self._most_s / _LEAST_SHARE)
        return False

    # -- steps ------------------------------------------------------------------------------

    def run(self, await_bell: Callable[[], bool] | None) -> bool | None:
        """Take the steps that are posted, batch after batch, until there is something else to do.

        `await_bell` sleeps until the host is rung for; False is more than that. None: one batch.

        Returns:
            Whether resets follow the batch that was taken last; None if none was taken since then.
        """
        if not self._has_seats():
            return None
        index, posted, finished, mail = self._index, self._posting, self._finished, self._mail
        sleeping, mail_read, own_fence = self._sleeping, self._read, self._fence
        is_heard, watches, is_lone = self._is_heard, self._most_s > 0.0, self._is_lone
        requests, row, taken, step = self._requests, self._first, self._taken, self._steps[0]
        number, read = self._readers
        while True:
            posting = posted[index]
            if posting == self._seen:
                if await_bell is None:
                    return None
                if watches and self._spin(posting):
                    continue
                sleeping[index] = True
                with own_fence:
                    pass
                is_rung = posted[index] != posting or await_bell()
                sleeping[index] = False
                if is_rung:
                    continue
                return None
            follows: bool | None = not is_lone and self._take_batch(posting)
            if is_lone and (token := requests[row]) != taken[0]:
                try:
                    self._seen, taken[0] = posting, token
                    follows = step(token, read()[0] if number is None else number[0])
                except BaseException:  # as in `_take_batch`
                    self.interrupted = self._seats[0].sink.env_id
                    raise
            self._seen = posting
            if posting & ORDERS:
                follows = self._take_orders() or follows
            finished[index] = posting
            if is_heard:
                with own_fence:
                    pass
                if sleeping[-1] and (posting & RING_MASK or self._is_last(posting)):
                    self.ring()
            if follows or await_bell is None or mail[index] != mail_read:
                return bool(follows)

    def _has_seats(self) -> bool:
        """Return whether an env takes part, after what an interrupt has left half arranged."""
        if self._arranged is not None:
            self._arrange(self._arranged)
        return bool(self._seats)

    def _take_batch(self, posting: int) -> bool:
        """Take the steps of a batch; return whether resets follow."""
        each = bool(posting & RING_EACH)  # also where it was to ring at the end anyhow
        requests = self._in_rows(self._requests)
        taken, rung, follows = self._taken, monotonic() if each else 0.0, False
        if self._bulks:
            follows = self._take_bulks(requests)
            if (taken := self._taken) == requests:
                self.rest()
                return follows
        actions = self._actions.read()
        running, index, shown = self._running, self._index, self._shown
        since = self._since if self._timed else None
        self._batch = seats, steps = self._seats, self._steps
        position = -1
        try:
            self._seen, self._taken = posting, requests
            for position, (step, token, action) in enumerate(
                zip(steps, requests, actions, strict=True)
            ):
                if token == taken[position]:
                    continue
                if since is not None:
                    since[index] = monotonic()
                running[index] = shown[position]
                if step(token, action):
                    follows = True
                if each and (now := monotonic()) - rung >= _RING_AT_LEAST_S:
                    self.wake_parent()
                    rung = now
        except BaseException:  # Ctrl-C, where envs run in the caller: the others are not lost
            self.interrupted = None if position < 0 else seats[position].sink.env_id
            if seats is self._seats:
                self._taken = [*requests[: position + 1], *taken[position + 1 :]]
            self._seen = _NOTHING_SEEN
            raise
        self.rest()
        return follows

    def _take_bulks(self, requests: list[int]) -> bool:
        """Take the steps of batched envs that can be taken in columns; as `_take_batch`."""
        follows, seats = False, self._seats  # a signal handler may close all of them
        for first, end, bulk in self._bulks:
            new, old, taken = requests[first:end], self._taken[first:end], self._taken
            if new == old:
                continue
            self.begin(self._rows[first])
            try:
                self._taken = [*taken[:first], *new, *taken[end:]]  # also if that is interrupted
                done = bulk.take(new, old)
                if done is None:
                    self._taken = taken
            except BaseException:  # as in `_take_batch`
                self.interrupted, self._seen = seats[first].sink.env_id, _NOTHING_SEEN
                raise
            follows = follows or bool(done)
        return follows

    def _take_orders(self) -> bool:
        """Have the envs reset for which that was asked anew; return whether there are any."""
        orders, before = self._in_rows(self._orders), self._ordered
        self._ordered = orders
        for seat, token, known in zip(self._seats, orders, before, strict=True):
            if token != known:
                seat.order_reset(seat.sink, token)
        return orders != before

    def _in_rows(self, column: Any) -> list[int]:
        """Return the items of a column that belong to the envs."""
        items: list[int] = column[self._first : self._end].tolist()
        return items if self._is_dense else [items[row - self._first] for row in self._rows]

    def begin(self, row: int) -> None:
        """Say which env is run from now on."""
        if self._timed:
            self._since[self._index] = monotonic()
        self._running[self._index] = row + 1

    def rest(self) -> None:
        """Say that none is."""
        if self._seats:
            self._running[self._index] = 0
            if self._timed:
                self._since[self._index] = monotonic()

    # -- the parent's bell ------------------------------------------------------------------

    def _is_last(self, posting: int) -> bool:
        """Return whether all hosts that the same was posted for have finished.

        Of two that finish at once at least one finds that: each has said so before it looks. The
        host that was rung last is asked first, for it is the one most likely to be busy still.
        """
        posted, finished = self._posting, self._finished
        for index in range(len(posted) - 1, -1, -1):
            if posted[index] == posting and finished[index] != posting:
                return False
        return True

    def wake_parent(self) -> None:
        """Ring for the parent, if it sleeps."""
        if self._seats and self._is_heard:
            with self._fence:
                pass
            if self._sleeping[-1]:
                self.ring()
