"""Interrupts: how a public call never leaves its changes half done.

Ctrl-C, or a signal handler that raises or closes the manager, can come between any two bytecodes of
a public call, in the main thread. A call therefore makes each of its changes in one of two ways:

- *By a journal*, which is cheap, and is used for everything that happens in each step. `do`
  stores a note of what is about to be done, does it, and forgets the note by one more store. An
  interrupt before the first store leaves nothing changed; one after the last comes too late to
  matter; and one between them leaves the note, with which `finish` does all of it again. So what is
  done this way has to be idempotent: doing it once more, after any part of it was done, has the
  same result. It stores what is in the note, and neither relies on nor adds to what it finds; and
  an action that cannot be done twice, such as reading from a pipe, notes what has come in the same
  C call. Nothing else happens between an interrupt and `finish`: the next call, or the end of this
  one, begins with it.
- *On a thread that signal handlers do not reach*: `uninterrupted` of `core.call_journal`. It costs
  two thread switches, and is used for what changes many things at once (a failure, a renewal, a
  launch, a close). Its caller can be interrupted while it waits; what was begun is finished all the
  same.

To read or write another module, it is enough to know which of the two ways a change is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

N = TypeVar("N")


class Journal:
    """A note of what is being done, with which it can be done again after an interrupt."""

    __slots__ = ("_unfinished",)

    def __init__(self) -> None:
        self._unfinished: tuple[Callable[[Any, bool], None], Any] | None = None

    def do(self, redo: Callable[[N, bool], None], note: N) -> None:
        """Do something that can be done again after an interrupt at any point of it.

        Args:
            redo: does it, given the note, and whether some of it may have been done before.
            note: all that `redo` needs for it.
        """
        self._unfinished = redo, note
        redo(note, False)
        self._unfinished = None

    def finish(self) -> None:
        """Do again what an interrupt has left unfinished, if anything.

        This call can be interrupted itself, and made again.
        """
        unfinished = self._unfinished
        if unfinished is not None:
            redo, note = unfinished
            redo(note, True)
            self._unfinished = None

    def forget(self) -> None:
        """Drop what an interrupt has left unfinished."""
        self._unfinished = None
