"""Fakes for tests of the core: a clock that is moved by hand, and a transport without hosts.

With them the supervisor and the engine run without processes, threads and real time: a wait moves
the clock to the moment at which the next thing happens, or by its timeout. The transport may have a
block: then its hosts find the steps that are posted there, and answer in it as workers do.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from envmgr.transport.base import Arrival, Garbage, HostDied, Transport
from envmgr.wire.hosts import HostSpec
from envmgr.wire.messages import FailureKind, Message, Op, RemoteFailure
from tests.fake_block import FakeBlock
from tests.fake_hosts import Answer, FakeHost

KILLED = -9
"""Exit status of a process that SIGKILL ended."""


class FakeClock:
    """Monotonic seconds that pass only when told to.

    Args:
        now: the first moment. Seconds that are multiples of 1/64 add up without rounding.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self.watchers: list[Callable[[], None]] = []
        """Called whenever time has passed."""

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.advance_to(self._now + seconds)

    def advance_to(self, moment: float) -> None:
        """Let time pass until `moment`.

        Raises:
            ValueError: it has passed already.
        """
        if moment < self._now:
            raise ValueError(f"the clock is at {self._now} and cannot go back to {moment}")
        self._now = moment
        for watcher in self.watchers:
            watcher()


class WouldWaitForEverError(AssertionError):
    """A wait without timeout, while nothing is on its way: a real manager would hang here."""


class BrokenContractError(AssertionError):
    """The transport was used as `Transport` says it must not be, or was told to break its word."""


class Poll(NamedTuple):
    """One call of `FakeTransport.poll`."""

    timeout_s: float | None
    pivot: int | None


class FakeTransport(Transport):
    """Hosts that answer as they are told to, at moments of a fake clock.

    Tests play the hosts: `reply`, `fail`, `die`, `garbage` and `arrive` make something arrive, now
    or later. With `answer`, hosts reply by themselves. `poll` never waits: it moves the clock to
    the moment at which the next thing happens, at most by its timeout.

    It keeps the promises of `Transport` (the order of each host, deaths last and always reported,
    nothing but the death of a killed host) and raises BrokenContractError when its user does not.

    With a block, steps that are posted there are requests as all others: `answer` is asked for
    their replies, and whatever is to arrive in answer to one of them (its timestep, the automatic
    reset after it, BEGAN) is written into the block in its moment, unless it is a failure or too
    odd: then it comes by message. The parent is rung for as a worker does.

    Args:
        clock: moved by `poll`.
        answer: replies of all hosts to all requests; None leaves them to the test. May be set at
            any time.
        has_memory: whether `place` gives memory.
        has_block: whether steps may be posted in it. Then observations have to be `NUMBERED`.
        kill_takes_s: seconds from `kill` to the death; None leaves the death to the test.

    Attributes:
        hosts: every host that was ever started, by host_id.
        sent: (host_id, request) of everything sent or posted, in order.
        killed: host_ids in the order of `kill`.
        given_up: host_ids in the order of `give_up`.
        polls: every call of `poll`.
        memory: what `place` gave.
        shared: what hosts do in it; None without a block.
        rings: how often the parent was rung for.
        closed_with_s: the grace that `close` was given; None until then.
        refused: env_ids whose requests `prepare` refuses, with the error it raises.
        must_wait_for_call: whether hosts can be started in calls only, and there is none.
    """

    must_wait_for_call = False

    death = HostDied(KILLED)
    """What comes of those that are killed."""

    def __init__(
        self,
        clock: FakeClock,
        *,
        answer: Answer | None = None,
        has_memory: bool = False,
        has_block: bool = False,
        kill_takes_s: float | None = 0.0,
    ) -> None:
        self.arrivals = deque()
        self.clock = clock
        self.answer = answer
        self.has_memory = has_memory or has_block
        self._has_block = has_block
        self.shared: FakeBlock | None = None
        self.rings = 0
        self.kill_takes_s = kill_takes_s
        self.hosts: dict[int, FakeHost] = {}
        self.sent: list[tuple[int, Message]] = []
        self.killed: list[int] = []
        self.given_up: list[int] = []
        self.polls: list[Poll] = []
        self.memory: memoryview | None = None
        self.closed_with_s: float | None = None
        self.refused: dict[int, Exception] = {}
        self._events: list[tuple[float, int, int | None, Any]] = []
        self._count = itertools.count()
        self._effects: list[tuple[float, int, int, Callable[[], None]]] = []
        self._woken = False
        self._rung = False
        self._dead: list[FakeHost] = []
        clock.watchers.append(self._take_effect)

    # -- what tests do ----------------------------------------------------------------------

    def host_of(self, env_id: int) -> FakeHost:
        """Return the newest host that serves an env, or those that share it."""
        serving = [host for host in self.hosts.values() if env_id in host.env_ids]
        return max(serving, key=lambda host: (not (host.ended or host.killed), host.host_id))

    def arrive(
        self, host_id: int, arrival: Arrival, after_s: float = 0.0, *, foreign: bool = False
    ) -> None:
        """Have something arrive from a host, after all that is on its way from it.

        Args:
            host_id: the host.
            arrival: what.
            after_s: when.
            foreign: it answers nothing; a message arrives as it is, whatever it says.
        """
        host = self.hosts[host_id]
        if host.ended:
            raise BrokenContractError(f"nothing comes from host {host_id}: it is dead")
        if host.killed and not isinstance(arrival, HostDied):
            raise BrokenContractError(f"host {host_id} was killed: only its death still comes")
        host.ended = isinstance(arrival, HostDied)
        moment = host.latest_arrival = max(host.latest_arrival, self.clock() + after_s)
        shared, in_block = self.shared, host.in_block
        if shared is None or foreign or not isinstance(arrival, Message):
            self._schedule(moment, host_id, arrival)
        elif shared.has_room_for(in_block, arrival):
            self._effect(moment, host_id, partial(shared.write, in_block, arrival, moment))
        else:
            self._schedule(moment, host_id, partial(shared.placed, in_block, arrival))
            self._effect(moment, host_id, partial(shared.sent, in_block, arrival))

    def reply(
        self,
        env_id: int,
        op: Op,
        payload: Any = None,
        after_s: float = 0.0,
        *,
        foreign: bool = False,
    ) -> None:
        """Have the newest host of an env reply to the newest request for it; see `arrive`."""
        host = self.host_of(env_id)
        reply = host.newest[env_id]._replace(op=op, payload=payload)
        self.arrive(host.host_id, reply, after_s, foreign=foreign)

    def fail(
        self,
        env_id: int,
        during: str = "step",
        kind: FailureKind = FailureKind.RAISED,
        *,
        message: str = "boom",
        info: Any = None,
        of_batch: bool = False,
        after_s: float = 0.0,
    ) -> None:
        """Have the newest host of an env report a failure in its newest request."""
        failure = RemoteFailure(kind, during, "RuntimeError", message, "", info, of_batch)
        self.reply(env_id, Op.FAILED, failure, after_s)

    def die(self, env_id: int, exit_status: int | None = KILLED, after_s: float = 0.0) -> None:
        """End the newest host of an env; what it has sent arrives before its death does."""
        self.arrive(self.host_of(env_id).host_id, HostDied(exit_status), after_s)

    def garbage(self, env_id: int, after_s: float = 0.0) -> None:
        """Have garbage arrive from the newest host of an env."""
        self.arrive(self.host_of(env_id).host_id, Garbage("these bytes are no frame"), after_s)

    def call_after(self, seconds: float, function: Callable[[], object]) -> None:
        """Have a function called while a `poll` waits: what another thread or a signal does."""
        self._schedule(self.clock() + seconds, None, function)

    @property
    def next_event(self) -> float | None:
        """The moment at which something happens next by itself; None for never."""
        return min((heap[0][0] for heap in (self._events, self._effects) if heap), default=None)

    def seen(self, obs: Any) -> Any:
        """Return what the parent was given as observation, as the host had it."""
        return obs if self.shared is None or obs is None else self.shared.observations[int(obs)]

    def _effect(self, moment: float, host_id: int, what: Callable[[], None]) -> None:
        heapq.heappush(self._effects, (moment, next(self._count), host_id, what))
        self._take_effect()

    def _take_effect(self) -> None:
        """Have happen in the block what is due."""
        while self._effects and self._effects[0][0] <= self.clock():
            heapq.heappop(self._effects)[3]()

    def _ring_parent(self) -> None:
        self.rings += not self._rung
        self._rung = True

    def _schedule(self, moment: float, host_id: int | None, what: Any) -> None:
        heapq.heappush(self._events, (moment, next(self._count), host_id, what))

    # -- the contract -----------------------------------------------------------------------

    def start(self, specs: Sequence[HostSpec]) -> None:
        """Remember hosts, and have them answer if they do so by themselves."""
        for spec in specs:
            if spec.host_id in self.hosts:
                raise BrokenContractError(f"host_id {spec.host_id} is used twice")
            host = self.hosts[spec.host_id] = FakeHost(spec, self._has_block)
            for request in list(host.newest.values()):
                self._answer(host, request)

    def prepare(self, host_id: int, message: Message) -> Message:
        """Return the message itself, or raise as `refused` says."""
        if message.env_id in self.refused:
            raise self.refused[message.env_id]
        return message

    def send(self, host_id: int, prepared: Any) -> None:
        """Remember a request, and have the host answer it if it does so by itself."""
        host = self.hosts[host_id]
        if host.reported:
            raise BrokenContractError(f"host {host_id} was reported dead and is sent {prepared}")
        self.sent.append((host_id, prepared))
        if host.killed or host.ended:
            return  # its death is on its way
        self._change_seats(host, prepared)
        host.take(prepared)
        self._answer(host, prepared)

    def _change_seats(self, host: FakeHost, message: Message) -> None:
        """Have envs take their rows of the block, and leave them."""
        shared, in_block = self.shared, host.in_block
        if shared is None:
            return
        if message.op == Op.RESET:
            in_block.plans[message.env_id] = message.payload
        if message.op in (Op.RENEW, Op.RELEASE, Op.ADOPT):
            for env_id in host.env_ids if message.op == Op.ADOPT else [message.env_id]:
                shared.leave(in_block, env_id)
        if message.op in (Op.ATTACH, Op.ADOPT) and message.payload is not None:
            shared.add_row(in_block, message.env_id, message.payload)

    @property
    def has_block(self) -> bool:
        """Whether steps may be posted."""
        return self._has_block

    def ring(self, host_ids: Iterable[int], *, asks: bool = False) -> None:
        """Have hosts find what was posted for them, and answer it if they do so by themselves."""
        if self.shared is None:
            raise BrokenContractError("there is no block to look at")
        for host_id in host_ids:
            host = self.hosts[host_id]
            if host.killed or host.ended:
                continue
            for message in list(self.shared.look(host.in_block, asks=asks)):
                self.sent.append((host_id, message))
                host.take(message)
                self._answer(host, message)

    def await_ring(self, timeout_s: float) -> bool:
        """Move the clock on until the parent is rung for, or something else happens."""
        limit = self.clock() + timeout_s
        while not self._woken and not (self._events and self._events[0][0] <= self.clock()):
            if self._rung:
                self._rung = False
                return True
            event = self.next_event
            if event is None or event > limit:
                self.clock.advance_to(limit)
                return False
            self.clock.advance_to(event)
        return False

    def _answer(self, host: FakeHost, message: Message) -> None:
        if self.answer is None:
            return
        after_s = 0.0
        for pause_s, arrival in self.answer(host, message):
            after_s += pause_s
            self.arrive(host.host_id, arrival, after_s)

    def poll(self, timeout_s: float | None, *, pivot: int | None = None) -> None:
        """Take what has arrived; if nothing has, move the clock on instead of waiting."""
        self.polls.append(Poll(timeout_s, pivot))
        for host in self._dead:
            host.reported = True
        self._dead.clear()
        arrived = self._take()
        if not arrived and timeout_s != 0.0:
            self._wait(timeout_s, pivot)
            arrived = self._take()
        self._woken = self._rung = False
        self.arrivals.extend(arrived)

    def _take(self) -> list[tuple[int, Arrival]]:
        arrivals: list[tuple[int, Arrival]] = []
        while self._events and self._events[0][0] <= self.clock():
            _, _, host_id, what = heapq.heappop(self._events)
            if host_id is None:
                what()
            else:
                host = self.hosts[host_id]
                if isinstance(what, HostDied):
                    self._dead.append(host)
                arrivals.append((host_id, what() if isinstance(what, partial) else what))
        return arrivals

    def _wait(self, timeout_s: float | None, pivot: int | None) -> None:
        limit = float("inf") if timeout_s is None else self.clock() + timeout_s
        while not self._woken and (pivot is not None or not self._rung):
            event = min((e for e in self._events if _ends_wait(e, pivot)), default=None)
            effect = self._effects[0][0] if self._effects else None
            if effect is not None and effect <= limit and (event is None or effect <= event[0]):
                self.clock.advance_to(effect)
                continue
            if event is None or event[0] > limit:
                if timeout_s is None:
                    raise WouldWaitForEverError("poll without timeout, and nothing is on its way")
                self.clock.advance_to(limit)
                return
            self.clock.advance_to(max(event[0], self.clock()))
            if event[2] is not None:
                return
            self._events.remove(event)
            heapq.heapify(self._events)
            event[3]()

    def waitables(self, hosts: Iterable[int]) -> list[Any]:
        """Return nothing: there is nothing to wait on."""
        return []

    def wake(self) -> None:
        """End the present wait, or the next one."""
        self._woken = True

    def place(self, nbytes: int) -> memoryview | None:
        """Give private memory, if this transport has memory."""
        if self.memory is not None:
            raise BrokenContractError("place is called once for each launch")
        if self.has_memory:
            self.memory = memoryview(bytearray(nbytes))
            if self._has_block:
                self.shared = FakeBlock(self.memory, self._ring_parent)
        return self.memory

    def kill(self, host_id: int) -> None:
        """Forget what is on its way from a host; its death follows."""
        host = self.hosts[host_id]
        if host.reported:
            raise BrokenContractError(f"host {host_id} was reported dead and is killed")
        self.killed.append(host_id)
        if host.ended:
            return
        host.killed = True
        self._events = [event for event in self._events if event[2] != host_id]
        self._effects = [effect for effect in self._effects if effect[2] != host_id]
        heapq.heapify(self._events)
        heapq.heapify(self._effects)
        if self.kill_takes_s is not None:
            self.arrive(host_id, self.death, self.kill_takes_s)

    def give_up(self, host_id: int) -> None:
        """Remember that somebody has lost patience with a host."""
        host = self.hosts[host_id]
        if host.reported or not (host.killed or host.ended):
            raise BrokenContractError(f"host {host_id} is given up, but it was not just killed")
        self.given_up.append(host_id)

    def close(self, grace_s: float) -> None:
        """Forget everything."""
        if self.closed_with_s is None:
            self.closed_with_s = grace_s
        self._events.clear()
        self._effects.clear()


class UnkillableTransport(FakeTransport):
    """One whose hosts may go on after their deaths were reported: as threads do."""

    death = HostDied(None, lingers=True)

    def haunt(self) -> None:
        """Have all hosts that were killed write all they can, with the tokens that they find."""
        block = None if self.shared is None else self.shared.block
        for host in (self.hosts[host_id] for host_id in self.killed):
            for env_row in host.in_block.rows.values() if block is not None else ():
                row = env_row.row
                block.replies[row] = block.resets[row] = block.requests[row]
                if block.reset_requests[row] != env_row.ordered:
                    block.resets[row] = block.reset_requests[row]
                block.flags[row] = block.reset_flags[row] = 0xFFFF
                block.rewards[row] = block.wide_rewards[row] = 99.0
                block.infos[row] = block.reset_infos[row] = 0xFF
                env_row.buffers[env_row.next_buffer(of_reset=False)] = -1
                index = host.in_block.index
                block.running[index], block.since[index] = row + 1, self.clock()
                block.finished[index] = block.posted[index]
                block.sleeping[index] = 0


def _ends_wait(event: tuple[float, int, int | None, Any], pivot: int | None) -> bool:
    return pivot is None or event[2] in (pivot, None) or isinstance(event[3], HostDied)
