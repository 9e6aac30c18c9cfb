"""What the trainer's side notes for a timeline: its public calls, and what envs' hosts are at."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from types import CodeType
from typing import TYPE_CHECKING, NamedTuple

from envmgr.core.calls import Call
from envmgr.core.phases import Phase
from envmgr.core.stats import Moment
from envmgr.types import Clock
from envmgr.wire.timeline import Done, noted

if TYPE_CHECKING:
    from envmgr.core.background import Background
    from envmgr.core.engine import Engine
    from envmgr.core.supervisor import Supervisor

_NOTED = frozenset((Phase.STARTING, Phase.ENDING, Phase.PAUSING, Phase.CALLING))
"""Of what hosts do, what they do not note themselves."""


class Notes(NamedTuple):
    """All that was noted of a launch.

    Attributes:
        env_num: how many envs there are; ids from that on are those of spares.
        calls: name, begin and end of each public call.
        phases: (env_id, what its host was at, begin, end).
        moments: failures, and recoveries.
        done: by host, what it has done.
    """

    env_num: int
    calls: Sequence[tuple[str, float, float]]
    phases: Sequence[tuple[int, str, float, float]]
    moments: Sequence[Moment]
    done: Sequence[Sequence[Done]]


class Tracer:
    """Notes what happens on the trainer's side, the newest of it.

    Args:
        clock: monotonic seconds.
        events: how much of each kind is kept.
    """

    def __init__(self, clock: Clock, events: int) -> None:
        self.clock = clock
        self.calls: deque[tuple[CodeType, float, float]] = deque(maxlen=events)
        self._phases: deque[tuple[int, str, float, float]] = deque(maxlen=events)
        self._since: dict[int, tuple[Phase, float]] = {}

    def changed(self, env_id: int, phase: Phase) -> None:
        """A host is at something else from now on."""
        now = self.clock()
        before = self._since.get(env_id)
        if before is not None and before[0] is not phase:
            self._phases.append((env_id, before[0].label, before[1], now))
            del self._since[env_id]
        if phase in _NOTED:
            self._since.setdefault(env_id, (phase, now))

    def notes(self, engine: Engine) -> Notes:
        """Return what was noted; while the engine has its block."""
        hosts, now = engine.supervisor.hosts, self.clock()
        open_now = [(i, phase.label, began, now) for i, (phase, began) in self._since.items()]
        done: list[list[Done]] = []
        if (block := hosts.block) is not None:
            counts = block.n_events.tolist()
            done = [noted(ring.copy(), n) for ring, n in zip(block.events, counts, strict=True)]
        return Notes(
            hosts.env_num,
            [(code.co_name, began, ended) for code, began, ended in list(self.calls)],
            [*self._phases, *open_now],
            list(engine.supervisor.statistics.moments),
            done,
        )


_enter, _exit = Call.__enter__, Call.__exit__
"""By their names: `super()` costs as much as the clock, and this is in every call."""


class TracedCall(Call):
    """A `Call` that is noted."""

    def __init__(
        self, engine: Engine, lock: threading.RLock, background: Background | None, tracer: Tracer
    ) -> None:
        super().__init__(engine, lock, background)
        self._clock, self._noted = tracer.clock, tracer.calls
        self._code: CodeType = _enter.__code__
        self._began = 0.0

    def __enter__(self, depth: int = 2) -> Supervisor:
        began = self._clock()
        supervisor = _enter(self, depth)
        self._began = began
        if (caller := self._engine.caller) is not None:
            self._code = caller.f_code
        return supervisor

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        try:
            _exit(self, kind, *details)
        finally:
            self._noted.append((self._code, self._began, self._clock()))
