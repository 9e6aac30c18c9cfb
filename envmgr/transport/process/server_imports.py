"""Importing modules in a worker server, and noticing what makes it unfit to be forked.

Runs in a branch of the server: a fork of it that nothing depends on yet. What is imported here is
shared by all workers that are forked from it later. So a module must leave nothing behind that a
fork cannot have, or that workers would share: threads, processes, fds, writable shared mappings
(devices among them), signal handlers.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from envmgr.proc import status_of

_SETTLE_S = 0.2
"""How long something that a module has ended, such as a thread, may take to be gone."""

_MASKS = ("SigBlk", "SigIgn", "SigCgt")


class Preloads(NamedTuple):
    """What a branch is to do.

    Attributes:
        modules: the modules to import, in this order.
        left_out: modules that must not be imported here, nor any modules that import them.
    """

    modules: tuple[str, ...]
    left_out: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """Return this in the form in which it is sent to the server."""
        return json.dumps(self).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Preloads:
        """Return the object that `to_bytes` has encoded."""
        return cls(*map(tuple, json.loads(data)))


class SpoiltError(Exception):
    """A module cannot be imported here; the process is of no use any more."""


def import_all(wanted: Preloads, begin: Callable[[int], None]) -> None:
    """Import modules one after another, as long as this process stays as clean as it was.

    Args:
        wanted: the modules.
        begin: is called with the index of each module in the list before it is imported.

    Raises:
        SpoiltError: the module that was begun last made this process unfit; the error says how.
    """
    before = _Traces.now()
    for index, name in enumerate(wanted.modules):
        begin(index)
        _import(name, wanted.left_out)
        end = time.monotonic() + _SETTLE_S
        while what := before.what_is_new(_Traces.now()):
            if time.monotonic() > end:
                raise SpoiltError(what)
            time.sleep(0.002)


def _import(name: str, left_out: Sequence[str]) -> None:
    pid, refusal = os.getpid(), _Refusal(left_out)
    sys.meta_path.insert(0, refusal)
    try:
        importlib.import_module(name)
    except BaseException as error:  # SystemExit as well
        if refusal.asked_for is None:
            text = f"its import failed with {type(error).__name__}: {error}"
            raise SpoiltError(" ".join(text.split())[:500]) from None
    finally:
        if os.getpid() != pid:
            os._exit(0)  # a fork of this process, made by the module
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(refusal)
    if refusal.asked_for is not None:  # also if the module makes do without it: workers would, too
        raise SpoiltError(f"it imports {refusal.asked_for}")


class _Refusal:
    """A finder that refuses some modules, and remembers which of them it was asked for."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self.asked_for: str | None = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise ImportError for what is refused; leave everything else to other finders."""
        if name in self._names:
            self.asked_for = name
            raise ModuleNotFoundError(f"{name} is not to be imported here", name=name)


class _Traces(NamedTuple):
    """What this process has that a fork of it would share or lack."""

    n_threads: int
    has_children: bool
    fds: frozenset[str]
    mappings: frozenset[str]
    handlers: tuple[Any, ...]

    @classmethod
    def now(cls) -> _Traces:
        """Return what this process has now."""
        return cls(
            n_threads=len(os.listdir("/proc/self/task")),
            has_children=_has_children(),
            fds=frozenset(_fds()),
            mappings=frozenset(_shared_mappings()),
            handlers=tuple(_handlers()),
        )

    def what_is_new(self, now: _Traces) -> str:
        """Return in words what there is now and was not before; empty if nothing is new."""
        found = []
        if now.n_threads > self.n_threads:
            found.append("starts threads")
        if now.has_children and not self.has_children:
            found.append("starts processes")
        if opened := now.fds - self.fds:
            found.append(f"opens {', '.join(sorted(opened)[:3])}")
        if mapped := now.mappings - self.mappings:
            found.append(f"maps {', '.join(sorted(mapped)[:3])}")
        if now.handlers != self.handlers:
            found.append("changes how signals are handled")
        return f"it {' and '.join(found)}" if found else ""


def _handlers() -> Iterator[Any]:
    """Yield how each signal is handled, according to Python and according to the kernel.

    The C library has signals of its own, for threads; they are not among these.
    """
    status = status_of("self")
    masks = [int(status[name], 16) for name in _MASKS]
    for number in sorted(signal.valid_signals()):
        yield signal.getsignal(number)
        yield [mask >> (number - 1) & 1 for mask in masks]


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _fds() -> Iterator[str]:
    """Yield what the open fds refer to; for sockets, pipes and the like, that has a number."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of this listing
            yield f"{os.readlink(f'/proc/self/fd/{fd}')} (fd {fd})"


def _shared_mappings() -> Iterator[str]:
    """Yield what is mapped in such a way that writes to it reach other processes."""
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    for line in lines:
        fields = line.split(None, 5)
        if fields[1].endswith("s") and "w" in fields[1]:
            yield f"{fields[5] if len(fields) > 5 else 'shared memory'} at {fields[0]}"
