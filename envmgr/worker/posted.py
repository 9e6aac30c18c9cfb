"""The child side of the shared block: takes the steps posted there for the envs of a host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from envmgr.wire.block import FENCE, NUMPY_VALUES, RING_EACH, RING_MASK, Block, fence, items
from envmgr.worker.posted_env import Answer, PostedEnv

_RING_AT_LEAST_S = 200e-6
"""How often a host rings at most for each env: a parent that is woken for every cheap step of many
takes from the hosts what it gains. It looks around by itself, too."""

_NOTHING_SEEN = -1
"""Equal to nothing that is posted."""

_SPINS = 16
_LEAST_SHARE = 16

Send = Callable[[Any], None]


def _gone(token: int, action: Any) -> None:
    """Take no step, in place of an env that was closed in the midst of a batch."""


def _there_is_more() -> bool:
    """Return to whoever has called `run`, in place of sleeping."""
    return False


class PostedSteps:
    """The posted steps of all envs of a host.

    Args:
        index: which of the manager's hosts it is.
        ring: rings the parent's doorbell.
        timed: say when each step began, because there are time limits.
        spin_s: how long to watch the block before sleeping; 0 never does.

    Attributes:
        interrupted: the env_id of the env whose code `run` was running when something went through
            it (Ctrl-C, where envs run in the caller); None if that was no env's code.
    """

    def __init__(
        self, index: int, ring: Callable[[], None], *, timed: bool, spin_s: float = 0.0
    ) -> None:
        self._index = index
        self._ring = ring
        self._timed = timed
        self._spin_s = self._most_s = spin_s
        self._envs: list[PostedEnv] = []
        self._taken: list[int] = []
        self._resets: deque[tuple[PostedEnv, int]] = deque()
        self._batch: tuple[list[PostedEnv], list[Callable[[int, Any], Answer]]] = ([], [])
        self._seen = 0
        self._mail: Any = (0,) * (index + 1)
        self._read = _NOTHING_SEEN
        self.interrupted: int | None = None

    def seat(self, env: PostedEnv) -> None:
        """An env takes its row, in place of the one that had it before."""
        tokens = dict(zip(self._envs, self._taken, strict=True))
        others = [other for other in self._envs if other.row != env.row]
        self._envs = sorted([*others, env], key=lambda each: each.row)
        self._forget_resets(env.row)
        block = env.block
        self._posting = items(block.posted)
        self._finished = items(block.finished)
        self._mail = items(block.mail)
        self._requests = items(block.requests)
        self._running = items(block.running)
        self._since = items(block.since)
        self._sleeping = items(block.sleeping)
        self._rows = [each.row + 1 for each in self._envs]
        self._steps = [each.step for each in self._envs]
        self._taken = [tokens.get(each, each.first_token) for each in self._envs]
        rows = [each.row for each in self._envs]
        takes_any = all(each.takes_any_number for each in self._envs)
        self._actions = _ActionReader(block, rows, takes_any_number=takes_any)
        self._first, self._end = self._envs[0].row, self._envs[-1].row + 1
        self._dense = self._end - self._first == len(self._envs)

    def leave(self, row: int) -> None:
        """An env is closed, and takes no steps any more."""
        envs, steps = self._batch
        for place, env in enumerate(envs):
            if env.row == row:
                steps[place] = _gone
        left = [place for place, env in enumerate(self._envs) if env.row != row]
        self._envs = [self._envs[place] for place in left]
        self._taken = [self._taken[place] for place in left]
        self._forget_resets(row)
        if self._envs:
            self.seat(self._envs[-1])

    def _forget_resets(self, row: int) -> None:
        self._resets = deque((env, token) for env, token in self._resets if env.row != row)

    @property
    def is_alone(self) -> bool:
        """Whether there is one env, and nothing but its steps to do."""
        return len(self._envs) == 1 and not self._resets

    @property
    def is_due(self) -> bool:
        """Whether there is something to do."""
        return bool(self._envs) and (self._posting[self._index] != self._seen or bool(self._resets))

    def stays_awake(self, *, watches: bool) -> bool:
        """Return whether there is something to do, after all; if not, this host may sleep.

        Args:
            watches: look for a while first.
        """
        if not self._envs:
            return False
        if watches and self._most_s > 0.0 and self._spin(self._seen):
            return True
        self._sleeping[self._index] = True
        fence()
        return self.is_due

    def has_mail(self) -> bool:
        """Return whether messages were sent to this host since this was asked last."""
        read, self._read = self._read, self._mail[self._index]
        return bool(read != self._read)

    def wake(self) -> None:
        """This host is awake."""
        if self._envs:
            self._sleeping[self._index] = False

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

    def run(self, send: Send, *, asked: bool) -> None:
        """Take the steps that are posted now, then begin the episodes that waited before.

        So resets wait for one more batch of steps at most.

        Args:
            send: sends a message.
            asked: the parent wants a ring when the steps are taken, whatever they came with.
        """
        waiting = len(self._resets)
        if self._envs and self._posting[self._index] != self._seen:
            if self.is_alone:
                self.run_alone(send, _there_is_more)
            else:
                self._take_steps(send)
        if asked:
            self._ring()
        if not waiting:
            return
        for _ in range(min(waiting, len(self._resets))):
            env, token = self._resets.popleft()
            self._begin(env)
            try:
                messages = env.begin_episode(token)
            except BaseException:  # as in `_take_steps`
                self.interrupted = env.env_id
                raise
            for message in messages:
                send(message)
        self._rest()
        self._wake_parent()

    def run_alone(self, send: Send, await_bell: Callable[[], bool]) -> None:
        """Take the steps of a host's only env, until there is something else to do.

        Such a host sleeps between its steps, and then runs with cold caches, where each function
        that is called costs a microsecond: so this is one loop, without any but the env's own.

        Args:
            send: sends a message.
            await_bell: sleeps until this host is rung for; False if there is something else to do.
        """
        env, index, row = self._envs[0], self._index, self._first
        posted, requests, finished = self._posting, self._requests, self._finished
        sleeping, step, number, read = self._sleeping, env.step, *self._actions.readers
        mail, mail_read = self._mail, self._read
        is_timed, watches = self._timed, self._most_s > 0.0
        tokens = self._taken
        seen, taken = self._seen, tokens[0]
        try:
            while True:
                posting = posted[index]
                if posting == seen:
                    if watches and self._spin(seen):
                        continue
                    sleeping[index] = True
                    with FENCE:
                        pass
                    if posted[index] == seen and not await_bell():
                        return
                    sleeping[index] = False
                    continue
                seen, token = posting, requests[row]
                if token != taken:
                    taken = token
                    if is_timed:
                        self._begin(env)
                    try:
                        answer = step(token, read()[0] if number is None else number[0])
                        if answer is not None:
                            self._follow(env, token, answer, send)
                    except BaseException:  # as in `_take_steps`
                        self.interrupted = env.env_id
                        raise
                    if is_timed:
                        self._rest()
                finished[index] = posting
                with FENCE:
                    pass
                if sleeping[-1] and (posting & RING_MASK or self._is_last(posting)):
                    self._ring()
                if self._resets or mail[index] != mail_read:
                    return
        finally:
            sleeping[index] = False
            if self._taken is tokens:  # else the env was closed meanwhile
                self._seen, tokens[0] = seen, taken

    def _take_steps(self, send: Send) -> None:
        # Read before the requests: what is posted while these run is seen the next time.
        posting = self._posting[self._index]
        each = bool(posting & RING_EACH)  # also where it was to ring at the end anyhow
        requests = self._requests[self._first : self._end].tolist()
        if not self._dense:
            requests = [requests[env.row - self._first] for env in self._envs]
        actions = self._actions.read()
        taken = self._taken
        tells = self._timed or len(requests) > 1
        rung = monotonic() if each else 0.0
        running, index, rows = self._running, self._index, self._rows
        self._batch = envs, steps = self._envs, self._steps
        place = -1
        try:
            self._seen, self._taken = posting, requests
            for place, (step, token, action) in enumerate(
                zip(steps, requests, actions, strict=True)
            ):
                if token == taken[place]:
                    continue
                if tells:
                    if self._timed:
                        self._since[index] = monotonic()
                    running[index] = rows[place]
                answer = step(token, action)
                if answer is not None:
                    self._follow(envs[place], token, answer, send)
                if each and (now := monotonic()) - rung >= _RING_AT_LEAST_S:
                    self._wake_parent()
                    rung = now
        except BaseException:  # Ctrl-C, where envs run in the caller: the others are not lost
            self.interrupted = None if place < 0 else envs[place].env_id
            if envs is self._envs:
                self._taken = [*requests[: place + 1], *taken[place + 1 :]]
            self._seen = _NOTHING_SEEN
            raise
        if tells:
            self._rest()
        self._finish(posting)

    def _finish(self, posting: int) -> None:
        """Ring for a batch of steps, if this host has to."""
        self._finished[self._index] = posting
        fence()
        if self._sleeping[-1] and (posting & RING_MASK or self._is_last(posting)):
            self._ring()

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

    def _wake_parent(self) -> None:
        fence()
        if self._sleeping[-1]:
            self._ring()

    def _follow(
        self, env: PostedEnv, token: int, answer: tuple[Sequence[Any], bool], send: Send
    ) -> None:
        messages, resets = answer
        for message in messages:
            send(message)
        if resets:
            self._resets.append((env, token))

    def _begin(self, env: PostedEnv) -> None:
        if self._timed:
            self._since[self._index] = monotonic()
        self._running[self._index] = env.row + 1

    def _rest(self) -> None:
        self._running[self._index] = 0
        if self._timed:
            self._since[self._index] = monotonic()


class _ActionReader:
    """Reads the actions of rows from the block, as private copies.

    Args:
        block: the columns.
        rows: which.
        takes_any_number: their envs do not mind whose numbers they get.
    """

    def __init__(self, block: Block, rows: list[int], *, takes_any_number: bool) -> None:
        layout = block.plan.actions
        first, end = rows[0], rows[-1] + 1
        self._places = None if end - first == len(rows) else [row - first for row in rows]
        self._columns = [column[first:end] for column in block.actions]
        self._kinds = None if takes_any_number else block.kinds[first:end]
        self._layout = layout
        self._is_number = type(layout.skeleton) is int and layout.leaves[0].is_number

    @property
    def readers(self) -> tuple[Any, Callable[[], list[Any]]]:
        """The actions as Python's numbers, one by one, or None; and `read`, which always works."""
        integers = self._is_number and self._columns[0].dtype.kind in "iu"
        plain = integers and self._kinds is None and self._places is None
        return items(self._columns[0]) if plain else None, self.read

    def read(self) -> list[Any]:
        """Return the action of each row."""
        if self._is_number:
            actions = self._numbers()
        else:
            leaves = [
                [copy[k, ...] for k in range(len(copy))] if not leaf.is_number else list(copy)
                for leaf, copy in zip(self._layout.leaves, map(_copied, self._columns), strict=True)
            ]
            unflatten = self._layout.unflatten
            actions = [unflatten(parts) for parts in zip(*leaves, strict=True)]
        return actions if self._places is None else [actions[place] for place in self._places]

    def _numbers(self) -> list[Any]:
        (column,) = self._columns
        numbers: list[Any] = column.tolist()
        if self._kinds is None:
            return numbers
        kinds = self._kinds.tobytes()
        if NUMPY_VALUES in kinds:
            typed = column.dtype.type
            return [
                typed(number) if kind == NUMPY_VALUES else number
                for number, kind in zip(numbers, kinds, strict=True)
            ]
        return numbers


def _copied(column: Any) -> Any:
    return column.copy()
