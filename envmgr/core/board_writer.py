"""The thread that writes the board of a manager, which other processes (`envmgr top`) read.

It looks at the table once a second, and only reads it. Steps have nothing to note for it, so it
costs them nothing; the board is only as exact as these looks are frequent.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from envmgr.core.activities import activities_of
from envmgr.core.engine import Engine, Follower
from envmgr.errors import EnvFailure
from envmgr.interruptible import SoleThread, frames_of_threads, join_thread
from envmgr.texts import logged
from envmgr.transport.fds import forget_fd, keep_from_children
from envmgr.transport.process.threads import thread_name
from envmgr.types import Clock
from envmgr.wire.board import Board, BoardPlan, PostedBoard, put_text, text_in
from envmgr.wire.latencies import KINDS, NUMBERS, summary

LOOK_EVERY_S = 1.0
_LEAST_REST = 100
"""The thread rests at least this many times as long as its last look took.

With many envs, it therefore looks less often.
"""

_MOST_CALLS = 12

_NUMBERS = itertools.count()
"""Gives boards their numbers, in the order of launches."""

_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_COMMANDS = f"{_OURS}cli{os.sep}"


class BoardWriter(SoleThread):
    """The writer of an engine's board.

    If no fd or thread can be had for it, there is no board, and everything else goes on.

    Args:
        clock: monotonic seconds.

    Attributes:
        followers: what is ended together with the writer.
    """

    def __init__(self, kind: str, clock: Clock) -> None:
        super().__init__(thread_name("board of the envs"))
        self.followers: list[Follower] = []
        self._kind = kind
        self._clock = clock
        self._posted: PostedBoard | None = None
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._tokens = np.empty(0, np.uint64)
        self._latest: EnvFailure | None = None

    @property
    def board(self) -> Board | None:
        """The board that is written; None if there is none, or none any more."""
        return None if self._posted is None else self._posted.board

    def begin(self, engine: Engine) -> None:
        """Begin to watch an engine."""
        hosts = engine.supervisor.hosts
        plan = BoardPlan(
            os.getpid(),
            self._kind,
            hosts.env_num,
            len(hosts.envs),
            len(hosts.groups),
            NUMBERS if hosts.settings.measures else 0,
            next(_NUMBERS),
        )
        try:
            self._posted = posted = PostedBoard(plan)
            if posted.fd is not None:
                keep_from_children(posted.fd)
            self._engine = engine
            self._tokens = hosts.table.tokens.copy()
            if (board := posted.board) is not None:
                board.since[...] = board.call_since[...] = self._clock()
            self.look()
            self.start()
        except (OSError, RuntimeError, ValueError) as error:
            logged(logging.DEBUG, "there is no board of this manager: %s", error)
            self._close()

    def end(self) -> None:
        """Let go of the board; idempotent."""
        for follower in self.followers:
            follower.end()
        thread = self.thread
        self._ended.put(None)
        if thread is not None and thread is not threading.current_thread():
            join_thread(thread)
        self._close()

    def _close(self) -> None:
        posted = self._posted
        if posted is not None:
            if posted.fd is not None:
                forget_fd(posted.fd)
            posted.close()

    def _run(self) -> None:
        rest_s = LOOK_EVERY_S
        while True:
            with contextlib.suppress(queue.Empty):
                self._ended.get(timeout=rest_s)
                return
            began = self._clock()
            try:
                self.look()
            except Exception as error:  # a defect of ours must not vanish with the thread
                text = "the board of a manager is not kept any more"
                logged(logging.ERROR, text, exc_info=error)
                return
            rest_s = max(LOOK_EVERY_S, _LEAST_REST * (self._clock() - began))

    # -- looking ----------------------------------------------------------------------------

    def look(self) -> None:
        """Write the present state of the envs to the board."""
        board, now = self.board, self._clock()
        if board is None:
            return
        hosts, states = self._engine.supervisor.hosts, self._engine.supervisor.states
        activities, tokens = activities_of(hosts), hosts.table.tokens.copy()
        seen = np.frombuffer(bytes(states.column), np.uint8)
        envs = hosts.envs
        with board.writing():
            changed = activities != board.activities
            changed |= tokens != self._tokens
            changed |= seen != board.states
            board.since[changed] = now
            board.activities[...], board.states[...], self._tokens = activities, seen, tokens
            board.hosts[...] = [env.group.index for env in envs]
            board.generations[...] = [env.generation for env in envs]
            board.episodes[...] = hosts.table.episodes_done
            pids = self._engine.transport.pids
            board.pids[...] = [pids.get(group.host_id or 0, 0) for group in hosts.groups]
            if hosts.settings.measures and (block := hosts.block) is not None:
                board.latencies[:, : hosts.env_num] = block.latencies
            has_moved = self._write_counters(board)
            self._write_failures(board)
            self._write_call(board, now, is_new=has_moved)
            board.looked_at[0] = now

    def _write_counters(self, board: Board) -> bool:
        """Write the counters; return whether steps were sent or delivered since the last look."""
        counted = self._engine.supervisor.statistics
        before = board.counters[:2].tolist()
        board.counters[...] = (
            counted.actions,
            counted.timesteps,
            counted.episodes,
            sum(counted.failures_by_kind.copy().values()),
            counted.renewals,
        )
        return bool(board.counters[:2].tolist() != before)

    def _write_failures(self, board: Board) -> None:
        """Write down the failures that have come since the last look."""
        counted = self._engine.supervisor.statistics
        latest = tuple(counted.latest_failures)
        if not latest or latest[-1] is self._latest:
            return
        known = [i for i, failure in enumerate(latest) if failure is self._latest]
        self._latest = latest[-1]
        for failure in latest[known[0] + 1 if known else 0 :]:
            put_text(board.errors[failure.env_id], str(failure))
        for env_id, count in counted.failures_by_env.copy().items():
            board.failed[env_id] = count

    def _write_call(self, board: Board, now: float, *, is_new: bool) -> None:
        """Write down which call the trainer is in, and where its main thread is.

        Args:
            board: the board to write to.
            now: the time of this look.
            is_new: whether this is not the call that the last look saw, even if its name is the
                same.
        """
        caller = self._engine.caller
        call = "" if caller is None else caller.f_code.co_name
        if is_new or call != text_in(board.call):
            put_text(board.call, call)
            board.call_since[0] = now
        ident = threading.main_thread().ident or 0
        # No variable holds the frame: if it is the frame of this very function, the reference cycle
        # would keep the board open.
        calls = _calls(frames_of_threads().get(ident))
        put_text(board.where, "\n".join(itertools.islice(calls, _MOST_CALLS)))


def figures_of(engine: Engine) -> Callable[[], dict[str, Any]]:
    """Return a function that gives the figures of a transport, and how long steps and resets take.

    It may be called from any thread. Once the engine is closed, it gives the times that its last
    call before that gave.
    """
    hosts, transport = engine.supervisor.hosts, engine.transport
    measured: dict[str, Any] = {}

    def figures() -> dict[str, Any]:
        block = hosts.block
        if block is not None and block.plan.measures:
            rows = zip(KINDS, block.latencies.copy(), strict=True)
            measured["latency"] = {kind: summary(some) for kind, some in rows}
        return {**transport.figures(), **measured}

    return figures


def _calls(frame: FrameType | None) -> Iterator[str]:
    """Yield the calls of a thread, the innermost first, in faulthandler's form.

    The innermost calls, inside envmgr, are left out: which public call they belong to is known. If
    a command of envmgr is the trainer, the command's own code is shown, but not that of the
    packages that called it.
    """
    while frame is not None and _is_of_manager(frame):
        frame = frame.f_back
    in_command = False
    while frame is not None:
        code = frame.f_code
        if in_command and not code.co_filename.startswith(_OURS):
            return
        in_command = in_command or code.co_filename.startswith(_COMMANDS)
        yield f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}'
        frame = frame.f_back


def _is_of_manager(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(_OURS) and not name.startswith(_COMMANDS)
