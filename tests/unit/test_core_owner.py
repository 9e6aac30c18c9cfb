"""The owner of an engine, played by the test: when it sleeps, what it does, whom it tells."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from envmgr.core import engine as engine_module
from envmgr.core import owner as owner_module
from envmgr.core.engine import LOOK_EVERY_S, MIN_INTERVAL_S, WARN_EVERY_S, Engine
from envmgr.core.owner import AwaitedCall, CallAbandonedError, Owner
from envmgr.core.slots import SlotCall, SlotRules, Slots, Tenancy
from envmgr.errors import ManagerClosedError
from envmgr.policy import Deadlines
from envmgr.wire.messages import Op
from tests.fakes import FakeTransport
from tests.rig import Rig, over_routes, route

__all__ = ["route"]

pytestmark = over_routes

UNLIMITED = Deadlines(connect_s=math.inf)

NEWS = 77
"""The fd of the transport."""


class Bell:
    """A waker that counts."""

    made = 0

    def __init__(self) -> None:
        Bell.made += 1
        self._fd = 1000 + Bell.made
        self.rings = self.silenced = 0
        self.is_closed = False

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        self.rings += 1

    def silence(self) -> None:
        self.silenced += 1

    def close(self) -> None:
        self.is_closed = True


class Beside(owner_module._Beside):
    """A call that waits; meanwhile something happens, and the owner makes its rounds."""

    play: Callable[[float], None] = staticmethod(lambda seconds: None)

    def __init__(self, finished: Callable[[], bool], **how: bool) -> None:
        super().__init__(finished, **how)
        self.woken = self  # type: ignore[assignment]

    def acquire(self, timeout: float = -1.0) -> bool:
        Beside.play(timeout)
        return self.is_woken

    def release(self) -> None:
        assert self.is_woken


class Still:
    """A thread that the test plays."""

    refuses = False
    ident = threading.get_ident()

    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        self.target, self.name = target, name
        self.is_over = False

    def start(self) -> None:
        if Still.refuses:
            raise RuntimeError("can't start new thread")

    def is_alive(self) -> bool:
        return not self.is_over

    def join(self, timeout: float | None = None) -> None:
        self.is_over = True


class Inline(FakeTransport):
    """Runs envs in the thread that polls."""

    works_alone = False


class Owned:
    """A rig with an owner whose sleeps are played: each runs the next of `happens`, the last ends.

    Attributes:
        slept: for how long it meant to, each time; None for ever.
        rung: whether its doorbell has rung before the moment when it looks at it.
    """

    def __init__(self, patch: pytest.MonkeyPatch, env_num: int = 2, **options: Any) -> None:
        transport = options.get("transport", FakeTransport)
        patch.setattr(transport, "news", lambda self: [NEWS])
        for module in (engine_module, owner_module):
            patch.setattr(module, "Waker", Bell)
        patch.setattr(owner_module, "Watch", self._watch)
        patch.setattr(owner_module, "_Beside", Beside)
        patch.setattr(Beside, "play", self._play)
        patch.setattr(Still, "refuses", False)
        self.patch = patch
        options.setdefault("deadlines", UNLIMITED)
        self.rig = rig = Rig(env_num, **options).launch()
        rules = SlotRules(step_s=options["deadlines"].step_s)
        self.engine = Engine(rig.supervisor, rig.transport, rig.clock, background=True)
        self.slots = Slots(rig.supervisor, rules)
        self.owner = Owner(self.engine, self.engine.lock, self.slots)
        self.bell: Any = self.owner._doorbell
        self.slept: list[float | None] = []
        self.happens: list[Callable[[], Any]] = []
        self.waited: list[float] = []
        self.during: Callable[[], Any] = lambda: None
        self.told: list[Any] = []

    # -- the thread --------------------------------------------------------------------------

    def run(self, *happens: Callable[[], Any]) -> None:
        """Run the thread until it has slept once more than there are things that happen."""
        if self.engine.owner is None:
            assert self.owner._take_over()
        self.happens, self.owner._ending = list(happens), False
        self.slept.clear()
        self.owner._serve()
        self.owner._ending = self.engine.closing

    def _watch(self, fds: Sequence[int]) -> Any:
        assert not fds or fds == [self.bell.fileno(), NEWS]
        sleeping = self

        class Watch:
            def __init__(self) -> None:
                self.fds = fds

            def ready(self, seconds: float | None) -> list[int]:
                return sleeping._sleep(seconds)

        return Watch()

    def _sleep(self, seconds: float | None) -> list[int]:
        assert not self.engine.lock._is_owned()  # type: ignore[attr-defined]
        self.slept.append(seconds)
        if not self.happens:
            self.owner._ending = True
            return []
        rings, arrivals = self.bell.rings, self._arrivals()
        happened = self.happens.pop(0)()
        ready = [self.bell.fileno()] if self.bell.rings > rings else []
        if self._arrivals() > arrivals:
            ready.append(NEWS)
        if not ready and happened is not True and seconds is not None:
            self.rig.clock.advance(seconds)
        return ready

    def _arrivals(self) -> int:
        return len(self.rig.transport._events) + self.rig.transport.rings

    def start(self) -> None:
        """Have the thread take the engine over, and come to rest."""
        self.run()

    # -- users -------------------------------------------------------------------------------

    def ask(self) -> Tenancy:
        """Ask for an env."""
        tenancy = Tenancy(lambda: self._tell(tenancy))
        self.slots.ask(tenancy)
        self.owner.wake()
        return tenancy

    def call(self, tenancy: Tenancy, during: str, **what: Any) -> SlotCall:
        """Begin a call."""
        call = SlotCall(lambda: self._tell(call), during, None, **what)
        self.slots.call(tenancy, call)
        self.owner.wake()
        return call

    def _tell(self, what: Any) -> bool:
        assert not self.engine.lock._is_owned(), "whom it tells may want the engine"  # type: ignore[attr-defined]
        self.told.append(what)
        return True

    def begun(self) -> Tenancy:
        """Lease an env and begin an episode."""
        asked: list[Any] = []
        self.run(
            lambda: asked.append(self.ask()),
            lambda: asked.append(self.call(asked[0], "reset")),
        )
        assert asked[1].is_over
        tenancy: Tenancy = asked[0]
        return tenancy

    # -- calls for batches -------------------------------------------------------------------

    def _play(self, seconds: float) -> None:
        """Be the owner while a call waits, for so long at most."""
        assert not self.engine.lock._is_owned(), "it was lent"  # type: ignore[attr-defined]
        self.waited.append(seconds)
        self.during()
        before = self.rig.clock()
        with self.engine.lock:
            while self.owner._round()[0]:
                pass
        self.slots.notify_all()
        beside: Any = self.owner._beside
        if beside is not None and not beside.is_woken and self.rig.clock() == before:
            self.rig.clock.advance(seconds)

    def wait(self, finished: Callable[[], bool], seconds: float = math.inf, **how: Any) -> bool:
        """Wait as calls for batches do."""
        with self.engine.lock:
            how = {"doing": "step", **how}
            found = self.engine.wait_until(finished, deadline=self.rig.clock() + seconds, **how)
            assert self.engine.lock._is_owned()  # type: ignore[attr-defined]
        return found


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as patch:
        yield patch


def never() -> bool:
    return False


# -- its thread ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "name"), [(FakeTransport, "leases"), (Inline, "envs")])
def test_its_thread_is_started_once(
    patched: pytest.MonkeyPatch, transport: type[FakeTransport], name: str
) -> None:
    it = Owned(patched, transport=transport)
    patched.setattr(owner_module.threading, "Thread", Still)
    Still.refuses = True
    with pytest.raises(RuntimeError):
        it.owner.start()
    assert it.owner.thread is None
    Still.refuses = False
    it.owner.start()
    thread = it.owner.thread
    it.owner.start()
    assert it.owner.thread is thread
    assert isinstance(thread, Still)
    assert name in thread.name


def test_it_takes_the_place_of_the_background(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    background: Any = it.engine._background
    it.start()
    assert it.engine.owner is it.owner
    assert it.engine._background is it.owner
    assert background._ending
    it.owner.await_engine()  # does not wait
    sleeping = it.rig.supervisor.submitter.sleeping
    assert sleeping is None or sleeping[-1] == 1, "all that comes is rung for"
    assert it.rig.supervisor.submitter.own_sleep is None, "by nobody else's doing"


def test_it_does_not_take_over_what_is_closing(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    it.engine.closing = True
    waiting = it.ask()
    it.owner._run()
    assert it.engine.owner is None
    assert isinstance(waiting.error, ManagerClosedError)
    assert it.told == [waiting]
    it.owner.await_engine()  # nobody waits for what does not come


def test_it_waits_until_the_call_that_is_under_way_is_over(patched: pytest.MonkeyPatch) -> None:
    it, tries = Owned(patched), list[float]()

    class Taken:
        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            assert timeout > 0.0
            tries.append(timeout)
            it.engine.closing = len(tries) == 3
            return False

    it.owner._lock = Taken()  # type: ignore[assignment]
    assert not it.owner._take_over()
    assert len(tries) == 3


# -- calls of leased envs --------------------------------------------------------------------------


def test_a_call_costs_one_ring_each_way(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    tenancy, calls = it.begun(), list[SlotCall]()
    rings = it.bell.rings
    it.run(
        lambda: calls.append(it.call(tenancy, "step", action=1)),
        lambda: it.rig.transport.reply(0, Op.STEPPED, ("next", 2.0, False, {}, 0)),
    )
    assert calls[0].result.reward == 2.0
    assert it.told[-1] is calls[0]
    assert it.bell.rings == rings + 1
    assert it.slept == [None] * 3, "it waits for ever: there is no clock in this"


def test_who_only_rings_does_not_have_it_look_at_the_transport(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    it.start()
    waiting: list[Any] = []
    looks = len(it.rig.transport.polls)
    it.run(lambda: waiting.append(it.ask()), it.ask)
    n_looked = len(it.rig.transport.polls) - looks
    assert waiting[0].env_id == 0
    assert n_looked <= 1, "once at its start"


def test_nobody_rings_for_one_who_is_awake(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    it.start()
    rings = it.bell.rings
    it.owner.wake()
    it.owner.arm()
    assert it.bell.rings == rings


def test_what_is_put_just_before_it_sleeps_is_seen(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    it.start()
    waiting = it.ask()  # it was awake: nobody rang
    it.owner._sleep(math.inf)
    assert len(it.slept) == 1, "it has not slept again"
    assert not it.owner._asleep
    it.run()
    assert waiting.env_id == 0
    seen: list[bool] = []

    class Asked(type(it.slots)):  # type: ignore[misc]
        @property
        def has_commands(self) -> bool:
            seen.append(it.owner._asleep)
            return False

    patched.setattr(it.slots, "__class__", Asked)
    it.owner._has_news = False
    it.owner._sleep(math.inf)
    assert seen == [True], "first it says that it sleeps, then it looks"


def test_what_comes_while_it_makes_a_round_has_another_one(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    tenancy, late = it.begun(), list[SlotCall]()
    serve = it.slots.serve

    def meanwhile(**how: bool) -> None:
        serve(**how)
        if not late:
            late.append(it.call(tenancy, "step", action=1))

    patched.setattr(it.slots, "serve", meanwhile)
    it.run()
    assert it.rig.supervisor.selections.steps_of(0) == 1
    assert it.slept == [None]


# -- how long it sleeps ----------------------------------------------------------------------------


def test_it_sleeps_until_a_time_limit_and_enforces_it(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched, deadlines=replace(UNLIMITED, step_s=2.0))
    tenancy, calls = it.begun(), list[SlotCall]()

    def half_a_second() -> bool:
        it.rig.clock.advance(0.5)
        return True

    it.run(
        lambda: calls.append(it.call(tenancy, "step", action=1)),
        half_a_second,
        lambda: None,
    )
    assert it.slept[:3] == [None, 2.0, 1.5]
    assert "2 s of step_timeout" in str(calls[0].result.info["error"])


def test_what_is_not_sent_yet_is_looked_after_soon(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    it.start()
    patched.setattr(FakeTransport, "has_unsent", True)
    it.run()
    assert it.slept == [MIN_INTERVAL_S]


def test_envs_that_run_here_are_run_until_nothing_is_to_be_run(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched, transport=Inline, has_block=False)  # as envs inline are
    tenancy, calls = it.begun(), list[SlotCall]()
    assert it.slept[-1] is None
    it.run(
        lambda: calls.append(it.call(tenancy, "step", action=1)),
        lambda: None,
        lambda: it.rig.transport.reply(0, Op.STEPPED, ("next", 2.0, False, {}, 0)),
    )
    assert it.slept == [None, owner_module._LOOK_INLINE_S, owner_module._LOOK_INLINE_S, None]
    assert calls[0].is_over


def test_an_fd_that_close_has_just_closed_is_no_defect(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    it.start()

    def closed() -> Any:
        raise OSError("bad file descriptor")

    it.run(closed)
    assert len(it.slept) == 2


def test_a_defect_of_ours_is_raised_by_the_next_call(
    patched: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it = Owned(patched)
    it.start()
    serve, error = it.slots.serve, ZeroDivisionError("a defect")

    def fails(**how: bool) -> None:
        patched.setattr(it.slots, "serve", serve)
        raise error

    patched.setattr(it.slots, "serve", fails)
    waiting: list[Tenancy] = []
    with caplog.at_level(logging.ERROR, "envmgr"):
        it.run(lambda: waiting.append(it.ask()))
    assert it.slept[0] == LOOK_EVERY_S
    assert "the owner of an engine failed" in caplog.text
    assert it.rig.supervisor.repair.fatal is error
    assert waiting[0].env_id == 0, "it goes on"


# -- calls for batches -----------------------------------------------------------------------------


def test_a_call_for_a_batch_waits_while_the_owner_works(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    it.start()
    it.rig.send({0: 1})
    it.during = lambda: it.rig.transport.reply(0, Op.STEPPED, ("next", 1.0, False, {}, 0))
    assert it.wait(it.rig.has_arrived)
    assert len(it.waited) == 1
    assert it.owner._beside is None
    assert it.wait(it.rig.has_arrived), "what has come already is not waited for"
    assert len(it.waited) == 1


def test_such_a_wait_ends_at_its_deadline_and_warns(
    patched: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it = Owned(patched)
    it.start()
    began = it.rig.clock()
    with caplog.at_level(logging.WARNING, "envmgr"):
        assert not it.wait(never, 2.5 * WARN_EVERY_S, doing="this")
    assert it.rig.clock() == began + 2.5 * WARN_EVERY_S
    assert len(caplog.messages) == 2
    assert max(it.waited) <= 0.5, "a signal may come just before the system call"


def test_a_wait_that_looks_often_is_woken_so_often(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    it.start()
    it.wait(never, 0.25, look_every_s=0.125)
    assert it.waited == [0.125, 0.125]


def test_a_question_that_raises_is_asked_again_by_who_waits(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    it.start()
    asked: list[int] = []

    def finished() -> bool:
        asked.append(threading.get_ident())
        if len(asked) > 1:
            raise ValueError("what is asked for is gone")
        return False

    with pytest.raises(ValueError, match="gone"):
        it.wait(finished)
    assert len(asked) == 3


def test_no_env_that_a_call_names_is_leased_meanwhile(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    it.start()
    waiting = it.ask()
    it.wait(never, 1.0, doing="reset")
    assert waiting.env_id is None
    it.wait(never, 1.0)
    assert waiting.env_id == 0


def test_collecting_has_the_owner_make_one_round(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    tenancy = it.begun()
    it.slots.give_back(tenancy)
    with it.engine.lock:
        it.engine.see_ends_of_leases()
        assert not it.rig.supervisor.table.leased
    assert len(it.waited) == 1


def test_a_manager_that_closes_ends_waits(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    it.start()

    def close() -> None:
        it.engine.closing = True

    it.during = close
    with pytest.raises(ManagerClosedError):
        it.wait(never)


@pytest.mark.parametrize("waits", [False, True])
def test_a_call_that_nobody_awaits_ends(patched: pytest.MonkeyPatch, waits: bool) -> None:
    it = Owned(patched)
    it.start()
    n_waits = len(it.waited)
    awaited = AwaitedCall()
    if waits:
        it.during = partial(it.owner.abandon, awaited)

    def call() -> None:
        if not waits:
            it.owner.abandon(awaited)
        it.wait(never)

    with pytest.raises(CallAbandonedError):
        it.owner.make(call, awaited)
    assert len(it.waited) == n_waits + waits
    it.during = lambda: None
    it.owner.make(lambda: it.wait(never, 0.25), AwaitedCall())  # the next one is not abandoned


def test_a_call_that_nobody_awaits_any_more_is_not_begun(patched: pytest.MonkeyPatch) -> None:
    it, awaited, begun = Owned(patched), AwaitedCall(), list[bool]()
    it.start()
    it.owner.abandon(awaited)
    with pytest.raises(CallAbandonedError):
        it.owner.make(lambda: begun.append(True), awaited)
    assert not begun


def test_other_calls_are_not_abandoned_with_it(patched: pytest.MonkeyPatch) -> None:
    it, other = Owned(patched), AwaitedCall()
    it.start()

    def call() -> None:
        it.owner.abandon(other)  # which waits for its turn
        assert not it.wait(never, 0.25)
        it.owner._maker += 1  # a call of another thread
        it.owner.abandon(it.owner._awaited or other)
        assert not it.wait(never, 0.25)

    it.owner.make(call, AwaitedCall())


def test_an_interrupted_wait_keeps_no_env_from_being_leased(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    it.start()

    def interrupt() -> None:
        raise KeyboardInterrupt

    it.during = interrupt
    with pytest.raises(KeyboardInterrupt), it.engine.calling:
        it.engine.wait_until(never, doing="reset")
    it.during = lambda: None
    it.owner._beside = Beside(never, names_envs=True)  # as if an interrupt had kept it there
    with pytest.raises(KeyboardInterrupt), it.engine.calling:
        raise KeyboardInterrupt
    tenancy = it.ask()
    it.run()
    assert tenancy.env_id is not None


def test_what_a_call_has_returned_to_nobody_is_owed_again(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    it.start()
    it.rig.send({0: 1})
    it.rig.transport.reply(0, Op.STEPPED, ("next", 1.0, False, {}, 0))
    it.wait(it.rig.has_arrived)
    collector, journal = it.rig.supervisor.collector, it.rig.supervisor.journal

    def call() -> None:
        with it.engine.calling:
            taken = collector.take(it.rig.selection([0]))
            assert taken is not None
            collector.timesteps(taken)

    awaited = AwaitedCall()
    it.owner.make(call, awaited)
    assert it.rig.supervisor.statistics.outstanding == 0
    it.owner.take_back(awaited)
    it.owner.take_back(awaited)  # once
    with it.engine.calling:
        assert it.rig.supervisor.statistics.outstanding == 1
        assert collector.arrived_ids() == [0]
    assert journal.returning is None


@pytest.mark.parametrize("is_under_way", [False, True])
def test_it_is_owed_again_though_there_was_another_call_since(
    patched: pytest.MonkeyPatch, is_under_way: bool
) -> None:
    it, awaited, owed = Owned(patched), AwaitedCall(), list[Any]()
    it.owner._on_owed = [owed.append]
    it.start()
    collector, statistics = it.rig.supervisor.collector, it.rig.supervisor.statistics

    def gather(env_id: int) -> None:
        with it.engine.calling:
            taken = collector.take(it.rig.selection([env_id]))
            assert taken is not None
            collector.timesteps(taken)
        it.rig.supervisor.journal.returning = None

    it.rig.send({0: 1, 1: 1})
    for env_id in (0, 1):
        it.rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, False, {}, 0))
    it.wait(it.rig.has_arrived)
    it.owner.make(partial(gather, 0), awaited)
    if is_under_way:
        with it.engine.calling:
            it.owner.take_back(awaited)
            it.engine.wait_until(lambda: collector.arrived_ids() == [0, 1], doing="step")
    else:
        gather(1)
        it.owner.take_back(awaited)
        with it.engine.calling:
            assert collector.arrived_ids() == [0]
    assert owed == [[0]]
    assert statistics.outstanding == (2 if is_under_way else 1)


@pytest.mark.parametrize("is_taken", [False, True])
def test_what_a_coroutine_may_not_have_yet_is_leased_to_nobody(
    patched: pytest.MonkeyPatch, is_taken: bool
) -> None:
    it = Owned(patched, env_num=1)
    it.start()
    it.rig.send({0: 1})
    it.rig.transport.reply(0, Op.STEPPED, ("next", 1.0, False, {}, 0))
    it.wait(it.rig.has_arrived)
    waiting, awaited = it.ask(), AwaitedCall()
    supervisor = it.rig.supervisor

    def gather() -> None:
        with it.engine.calling:
            taken = supervisor.collector.take(it.rig.selection([0]))
            assert taken is not None
            supervisor.collector.timesteps(taken)
        supervisor.journal.returning = None

    it.owner.make(gather, awaited)
    it.run(lambda: it.owner.taken(awaited) if is_taken else it.owner.take_back(awaited))
    if not is_taken:
        assert waiting.env_id is None, "it owes its timestep again"
        assert supervisor.statistics.outstanding == 1
        it.owner.make(gather, awaited)
        assert supervisor.statistics.outstanding == 0
        it.run(lambda: it.owner.taken(awaited))
    assert (waiting.env_id, waiting.error) == (0, None)
    assert it.slept == [None, None], "it was woken for that"
    assert supervisor.statistics.of_slots.cancelled == 0


def test_a_coroutine_that_was_dropped_keeps_no_env_from_being_leased(
    patched: pytest.MonkeyPatch,
) -> None:
    it, awaited, other = Owned(patched), AwaitedCall(), AwaitedCall()
    it.start()
    it.rig.send({0: 1, 1: 1})

    def gather(env_id: int) -> None:
        it.rig.transport.reply(env_id, Op.STEPPED, ("next", 1.0, False, {}, 0))
        it.wait(lambda: it.rig.has_arrived(env_id))
        with it.engine.calling:
            taken = it.rig.supervisor.collector.take(it.rig.selection([env_id]))
            assert taken is not None
            it.rig.supervisor.collector.timesteps(taken)
        it.rig.supervisor.journal.returning = None

    it.owner.make(partial(gather, 0), awaited)
    it.owner.make(partial(gather, 1), other)
    first, second = it.ask(), it.ask()
    it.run()
    assert (first.env_id, second.env_id) == (None, None)
    del awaited
    it.run(it.ask)
    assert (first.env_id, second.env_id) == (0, None)
    it.owner.taken(other)
    it.run()
    assert second.env_id == 1


# -- the fd of a manager ---------------------------------------------------------------------------


def test_its_fd_says_that_there_is_something_to_gather(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    it.start()
    news: Any = it.owner._news
    it.rig.send({0: 1})
    it.rig.transport.reply(0, Op.STEPPED, ("next", 1.0, False, {}, 0))
    it.run()
    assert news.rings == 0, "nobody has asked for it"
    assert it.owner.fileno() == news.fileno()
    it.run()
    assert news.rings == 1
    it.owner.arm()  # a call is over: it may have gathered
    assert news.silenced == 1
    it.run()
    assert news.rings == 2, "there is more"
    it.rig.deliver(0)
    it.owner.arm()
    it.run()
    assert (news.rings, news.silenced) == (2, 2)


# -- the end ---------------------------------------------------------------------------------------


def test_everybody_is_answered_when_it_ends(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    tenancy, made = it.begun(), list[SlotCall]()
    it.told.clear()
    it.run(lambda: made.append(it.call(tenancy, "step", action=1)))
    it.owner._end()
    assert isinstance(made[0].error, ManagerClosedError)
    assert it.told == made
    late = it.ask()
    assert isinstance(late.error, ManagerClosedError), "nobody has to come for it"


def test_closing_from_elsewhere_wakes_it(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched)
    it.start()
    rings = it.bell.rings
    it.run(lambda: it.engine.close(0.0))
    assert it.bell.rings == rings + 1
    assert it.slept == [None], "it did not sleep again"
    assert it.bell.is_closed
    assert it.rig.transport.closed_with_s == 0.0


def test_envs_that_ran_in_its_thread_are_closed_there(patched: pytest.MonkeyPatch) -> None:
    it = Owned(patched, transport=Inline)
    patched.setattr(owner_module.threading, "Thread", Still)
    patched.setattr(owner_module, "await_any", lambda *wait: None)
    it.owner.start()
    thread: Any = it.owner.thread
    it.start()
    closed_in: list[str] = []
    close = it.rig.transport.close

    def notes(grace_s: float) -> None:
        closed_in.append("there" if thread.is_over else "here")
        close(grace_s)

    patched.setattr(it.rig.transport, "close", notes)

    def join(timeout: float | None = None) -> None:
        if not thread.is_over:
            thread.is_over = True
            it.owner._end()

    patched.setattr(thread, "join", join)
    it.engine.close(0.5)
    assert closed_in == ["there"]
    assert it.rig.transport.closed_with_s == 0.5
    it.engine.close(0.5)
    assert closed_in == ["there"]
