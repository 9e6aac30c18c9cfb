"""Envs with tools, in the form that TRL's trainers want, in a module that workers can import."""

from __future__ import annotations

import os
import time
from typing import Any


class Counter:
    """Counts up to a goal."""

    def reset(self, goal: int = 3, **row: Any) -> str | None:
        """Begin a rollout."""
        if row.get("trouble") == "hang":
            time.sleep(600)
        if row.get("trouble") == "raise":
            raise RuntimeError("no such goal")
        self.goal, self.n = goal, 0
        return f" Count to {goal}." if row.get("tell") else None

    def increment(self, step: int) -> int:
        """Add to the count.

        Args:
            step: Value to add. 666 ends the process, 777 takes for ever.

        Returns:
            The count.
        """
        if step == 666:
            os._exit(6)
        if step == 777:
            time.sleep(600)
        if step < 0:
            raise ValueError("up, not down")
        self.n += step
        return self.n

    async def decrement(self, step: int) -> int:
        """Subtract from the count.

        Args:
            step: Value to subtract.

        Returns:
            The count.
        """
        self.n -= step
        return self.n

    def get_reward(self) -> float:
        """Return how near the goal is."""
        if self.n == 99:
            raise RuntimeError("no judge")
        return 1.0 - abs(self.goal - self.n) / self.goal


class Silent:
    """Has one tool and no reward of its own."""

    def reset(self, **row: Any) -> None:
        """Begin a rollout."""

    def look(self) -> str:
        """Look around."""
        return f"process {os.getpid()}"
