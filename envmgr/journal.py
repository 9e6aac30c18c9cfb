"""Interrupts: how what a public call changes is never left half done.

Ctrl-C, or a signal handler that raises or closes the manager, can come between any two bytecodes of
a public call, in the main thread. What a call changes is therefore changed in one of two ways:

- *By a journal*, which is cheap, and is the way of everything that happens in each step. `do`
  stores a note of what is about to be done, does it, and forgets the note by one more store. An
  interrupt before the first store has changed nothing; one after the last has come too late to
  matter; and one between them leaves the note, with which `finish` does all of it again. So what is
  done this way has to be such that doing it once more, after any part of it was done, comes to the
  same: it stores what is in the note, and neither counts on nor adds to what it finds; and what
  cannot be done twice, as reading from a pipe, notes what has come in the same C call. Nothing else
  happens between an interrupt and `finish`: the next call, or the end of this one, begins with it.
- *On a thread that signal handlers do not reach*: `uninterrupted` of `core.journal`. It costs two
  changes of threads, and is the way of what changes many things at once (a failure, a renewal, a
  launch, a close). Its caller can be interrupted while it waits; what was begun comes to its end
  all the same.

Whoever reads or writes another module has to know which of the two ways something goes, and that is
all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

N = TypeVar("N")


class Journal:
    """What is being done, for whoever has to do it again after an interrupt."""

    __slots__ = ("_unfinished",)

    def __init__(self) -> None:
        self._unfinished: tuple[Callable[[Any, bool], None], Any] | None = None

    def do(self, redo: Callable[[N, bool], None], note: N) -> None:
        """Do something that can be done again, after an interrupt at any point of it.

        Args:
            redo: does it, given the note, and whether some of it may have been done before.
            note: all that is needed for it.
        """
        self._unfinished = redo, note
        redo(note, False)
        self._unfinished = None

    def finish(self) -> None:
        """Do again what an interrupt has left; nothing if that is nothing.

        Can be interrupted itself, and called again.
        """
        unfinished = self._unfinished
        if unfinished is not None:
            redo, note = unfinished
            redo(note, True)
            self._unfinished = None

    def forget(self) -> None:
        """Do nothing of what an interrupt has left."""
        self._unfinished = None
