"""Notices when the machine stands still, so that nobody mistakes that for what is measured."""

from __future__ import annotations

import threading
import time


class Stalls:
    """How long the machine has stood still: how late a thread was that wakes all the time.

    Attributes:
        longest_s: the longest it was late. A measured time may hold as much that is not envmgr's.
    """

    EVERY_S = 0.02

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        due_s = time.monotonic() + self.EVERY_S
        while not self._ended.wait(max(due_s - time.monotonic(), 0.0)):
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - due_s)
            due_s = now + self.EVERY_S
