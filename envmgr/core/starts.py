"""Starts: which envs may be built or reset now, and which wait for their turn (config: `limits`).

An env that waits is in the phase PAUSING and has no deadline; what follows is its construction or
its reset. So the rest of the code, which knows of pauses already, need not know of turns: such an
env is coming, joins an explicit reset, and loses its host like any other env that pauses. If other
code does something else with it, it waits no more.

How many envs are being built or reset is counted by their phases, not by units that are taken and
given back. So no unit can be lost. Nothing here begins anything: `Supervisor` gives the turns.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from envmgr.core.deadlines import TimeLimits
from envmgr.core.phases import Next, Phase
from envmgr.core.table import NEVER, EnvTable, ManagedEnv
from envmgr.policy import StartCaps
from envmgr.texts import env_ids_text, logged

WARN_AFTER_S = 30.0
"""An env that waits this long for its turn is logged, and again each time as much has passed."""

_LABELS = {Next.BUILD: Phase.STARTING.label, Next.RESET: Phase.RESETTING.label}
"""What may follow a turn."""


class Starts:
    """The envs that wait for their turn, in order of asking, and whether one has it now.

    Args:
        caps: how many envs may be built or reset at one time, and how many may begin in a second.
        table: of all envs.
        limits: remembers when to look again, and has the clock.
    """

    def __init__(self, caps: StartCaps, table: EnvTable, limits: TimeLimits) -> None:
        self._most = caps.at_once
        self._table = table
        self._limits = limits
        self._clock = limits.clock
        per_s = caps.per_s
        self._caps = caps
        self._burst = 0 if per_s is None else max(1, int(per_s))
        self._window_s = 0.0 if per_s is None else self._burst / per_s
        self._begun: deque[float] = deque()
        self._waiting: dict[int, float] = {}  # since when, by env_id, in order of asking
        self._turns: dict[int, float] = {}
        self._warn_at = NEVER
        self._in_turn: ManagedEnv | None = None

    # -- asking -----------------------------------------------------------------------------

    def may_begin(self, env: ManagedEnv, beside: int = 0) -> bool:
        """Return whether an env may be built or reset now; if so, it counts as begun.

        Args:
            env: the env. One that is being reset goes on with another reset in its own place.
            beside: how many others are about to begin with it.
        """
        may_pass = env.phase is Phase.RESETTING or env is self._in_turn
        if not may_pass and (self._first() is not None or not self._may_start_more(beside)):
            return False
        self._waiting.pop(env.env_id, None)
        if self._burst:
            self._begun.append(self._clock())
        return True

    def wait(self, env: ManagedEnv, follow_up: Next) -> None:
        """Have an env, which has just been made to pause, wait for its turn."""
        if not self.waits(env):
            self._waiting.pop(env.env_id, None)  # of a wait that has ended otherwise
        env.follow_up, env.pause_s, env.deadline = follow_up, 0.0, NEVER
        now = self._clock()
        self._waiting.setdefault(env.env_id, now)
        self._warn_at = min(self._warn_at, now + WARN_AFTER_S)
        self._look_later()

    def waits(self, env: ManagedEnv) -> bool:
        """Return whether an env waits for its turn."""
        if env.env_id not in self._waiting or env.phase is not Phase.PAUSING:
            return False
        return env.deadline == NEVER and env.follow_up in _LABELS

    def turn_of(self, env_id: int) -> float:
        """Return when an env that had to wait got its latest turn; for others, a time long ago."""
        return self._turns.get(env_id, -NEVER)

    # -- turns ------------------------------------------------------------------------------

    @property
    def has_turn(self) -> bool:
        """Whether an env that waits may begin now."""
        return bool(self._waiting) and self._may_start_more() and self._first() is not None

    def take_turn(self) -> ManagedEnv | None:
        """Return the env whose turn it is, for the caller to begin; None if there is none."""
        env = self._first() if self._waiting and self._may_start_more() else None
        self._in_turn = env
        if env is not None:
            self._turns[env.env_id] = self._clock()
        return env

    def all_given(self) -> None:
        """Note that no env has a turn any more: look again when time brings one."""
        self._in_turn = None
        self._warn()
        self._look_later()

    def _first(self) -> ManagedEnv | None:
        """Return the first env that waits; not one whose host has to end first."""
        for env_id in list(self._waiting):
            env = self._table.envs[env_id]
            if not self.waits(env):
                del self._waiting[env_id]
            elif not env.group.is_ending:
                return env
        return None

    def _may_start_more(self, beside: int = 0) -> bool:
        if self._most is not None and self.at_it + beside >= self._most:
            return False
        return self._next_in_time() <= self._clock()

    def _next_in_time(self) -> float:
        """Return the moment from which the rate allows one more env to begin."""
        begun = self._begun
        if len(begun) < self._burst or not self._burst:
            return -NEVER
        now = self._clock()
        while begun and begun[0] + self._window_s <= now:
            begun.popleft()
        return -NEVER if len(begun) < self._burst else begun[-self._burst] + self._window_s

    def _look_later(self) -> None:
        """Have the engine look when time brings a turn, or when a warning is due."""
        moment = NEVER
        if self._waiting:
            in_time = self._next_in_time()
            in_time = in_time if in_time > self._clock() else NEVER  # else others have to end first
            moment = min(in_time, self._warn_at)
        self._limits.look_at(moment)

    # -- what is told -----------------------------------------------------------------------

    @property
    def at_it(self) -> int:
        """How many envs are being built or reset; from any thread."""
        column = self._table.phases.column
        return column.count(Phase.STARTING) + column.count(Phase.RESETTING)

    @property
    def waiting(self) -> list[int]:
        """The envs that wait for a turn, in order of asking; from any thread."""
        envs = self._table.envs
        return [env_id for env_id in self._waiting.copy() if self.waits(envs[env_id])]

    def figures(self) -> dict[str, Any]:
        """Return what `stats()` shows; from any thread."""
        return {"starting": self.at_it, "waiting_to_start": len(self.waiting)}

    def forget(self) -> None:
        """Have no env wait any more."""
        self._waiting.clear()
        self._warn_at = NEVER
        self._look_later()

    def _warn(self) -> None:
        """Log which envs have been waiting for long, and for what."""
        now, envs = self._clock(), self._table.envs
        if now < self._warn_at:
            return
        self._waiting = {i: since for i, since in self._waiting.items() if self.waits(envs[i])}
        late = [i for i, since in self._waiting.items() if now >= since + WARN_AFTER_S]
        oldest = min(self._waiting.values(), default=NEVER)
        self._warn_at = now + WARN_AFTER_S if late else oldest + WARN_AFTER_S
        if late:
            logged(
                logging.WARNING,
                "waiting for %g s or more (%s): %s. At it: %s.",
                WARN_AFTER_S,
                self._caps,
                self._by_kind(late, lambda env: _LABELS[env.follow_up]),
                self._by_kind(
                    self._table.phases.ids_in(Phase.STARTING)
                    + self._table.phases.ids_in(Phase.RESETTING),
                    lambda env: env.phase.label,
                )
                or "nobody",
            )

    def _by_kind(self, env_ids: Iterable[int], kind_of: Callable[[ManagedEnv], str]) -> str:
        found: dict[str, list[int]] = {}
        for env_id in env_ids:
            found.setdefault(kind_of(self._table.envs[env_id]), []).append(env_id)
        return "; ".join(f"{env_ids_text(sorted(ids))} for {kind}" for kind, ids in found.items())
