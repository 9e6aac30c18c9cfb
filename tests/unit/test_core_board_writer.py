"""The thread that keeps the board: what it writes of envs, failures and calls."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator

import pytest

import envmgr
from envmgr.core import board_writer as watching
from envmgr.core.board_writer import BoardWriter
from envmgr.lifecycle import EnvState
from envmgr.observing.dump import dump_of
from envmgr.wire.board import COUNTERS, Activity, own_boards, put_text, text_in
from tests.rig import Rig


def _calling(called: Callable[[], None], file: str) -> Callable[[], None]:
    """Return a function, of the code of a file, that calls another."""

    def call() -> None:
        called()

    call.__code__ = call.__code__.replace(co_filename=file)
    return call


class TestWatch:
    @pytest.fixture
    def rig(self) -> Rig:
        rig = Rig(3, has_block=False)
        rig.launch()
        return rig

    @pytest.fixture
    def watch(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[BoardWriter]:
        monkeypatch.setattr(watching, "LOOK_EVERY_S", 3600.0)  # the test looks itself
        watch = BoardWriter("subprocess", rig.clock)
        watch.begin(rig.engine)
        yield watch
        watch.end()
        watch.end()
        assert own_boards() == []

    def test_shows_what_envs_are_at_and_since_when(self, rig: Rig, watch: BoardWriter) -> None:
        (board,) = own_boards()
        assert set(board.activities.tolist()) == {Activity.READY}
        assert board.latencies.size == 0, "nobody measures them"
        assert set(board.states.tolist()) == {EnvState.RUN}
        rig.clock.advance(4)
        rig.send({0: 0, 1: 0})
        rig.stepped(1)
        watch.look()
        assert board.activities.tolist() == [Activity.STEPPING, Activity.ANSWERED, Activity.READY]
        assert (rig.clock() - board.since).tolist() == [0, 0, 4]
        rig.clock.advance(3)
        watch.look()
        assert (rig.clock() - board.since).tolist() == [3, 3, 7]
        assert board.looked_at[0] == rig.clock()

    def test_shows_the_last_failure_of_each_env_once(self, rig: Rig, watch: BoardWriter) -> None:
        (board,) = own_boards()
        rig.send({0: 0, 1: 0})
        rig.fail(0)
        watch.look()
        assert "env 0" in text_in(board.errors[0])
        put_text(board.errors[0], "seen")
        rig.fail(1)
        watch.look()
        assert text_in(board.errors[0]) == "seen", "what was written is not written again"
        assert "env 1" in text_in(board.errors[1])
        assert board.failed.tolist() == [1, 1, 0]

    def test_shows_where_the_trainer_is(self, rig: Rig, watch: BoardWriter) -> None:
        (board,) = own_boards()
        assert text_in(board.call) == ""
        rig.clock.advance(2)
        with rig.engine.calling:
            watch.look()
            assert text_in(board.call) == "test_shows_where_the_trainer_is"
            began = rig.clock()
            assert board.call_since[0] == began
            rig.clock.advance(2)
            watch.look()
            assert board.call_since[0] == began
            rig.engine.supervisor.statistics.timesteps += 1
            watch.look()
            assert board.call_since[0] == rig.clock(), "another call of the same name"
        assert " in test_shows_where_the_trainer_is\n" in text_in(board.where)
        assert f"{os.sep}envmgr{os.sep}core{os.sep}" not in text_in(board.where).split("\n")[0]

    def test_of_a_command_its_own_code_is_shown(self, rig: Rig, watch: BoardWriter) -> None:
        (board,) = own_boards()
        package = os.path.dirname(envmgr.__file__)
        called: Callable[[], None] = watch.look
        for file in ("manager/manager.py", "cli/run.py", "cli/commands.py"):
            called = _calling(called, os.path.join(package, *file.split("/")))
        _calling(called, "/site-packages/click/core.py")()
        files = [line.split('"')[1] for line in text_in(board.where).splitlines()]
        assert [os.path.relpath(file, package) for file in files] == [
            os.path.join("cli", "run.py"),
            os.path.join("cli", "commands.py"),
        ]

    def test_episodes_of_envs_are_those_that_are_counted(
        self, rig: Rig, watch: BoardWriter
    ) -> None:
        (board,) = own_boards()
        watch.look()
        assert board.episodes.tolist() == [0, 0, 0], "none has ended"
        rig.send({1: 0})
        rig.stepped(1, done=True)
        rig.deliver(1)
        watch.look()
        assert board.episodes.tolist() == [0, 1, 0]
        assert board.counters[COUNTERS.index("episodes")] == 1

    def test_without_a_thread_there_is_no_board(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        watch = BoardWriter("subprocess", rig.clock)
        watch.begin(rig.engine)
        assert own_boards() == []
        watch.look()
        watch.end()

    def test_looks_again_and_again_on_a_thread_of_its_own(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks: queue.SimpleQueue[int] = queue.SimpleQueue()
        monkeypatch.setattr(watching, "LOOK_EVERY_S", 0.0)
        monkeypatch.setattr(BoardWriter, "look", lambda self: looks.put(threading.get_ident()))
        watch = BoardWriter("subprocess", rig.clock)
        watch.begin(rig.engine)
        seen = {looks.get(timeout=20.0) for _ in range(3)} - {threading.get_ident()}
        assert len(seen) == 1
        watch.end()

    def test_a_dump_says_it_all(self, rig: Rig, watch: BoardWriter) -> None:
        rig.send({0: 0})
        rig.fail(0)
        watch.look()
        text = dump_of(own_boards(), stacks=False)
        lines = text.splitlines()
        assert lines[0].startswith(f"process {os.getpid()}: ")
        assert "subprocess manager of 3 envs" in lines[1]
        table = lines[lines.index("") + 1 :]
        assert table[0].split()[:5] == ["env", "state", "at", "for", "generation"]
        assert [line.split()[0] for line in table[1:]] == ["0", "1", "2"]
        assert "env 0" in table[1]
        assert "waits for an action" in table[2]


def test_a_board_that_is_being_written_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOOK_EVERY_S", 3600.0)
    rig = Rig(2, has_block=True)
    rig.launch()
    watch = BoardWriter("subprocess", rig.clock)
    watch.begin(rig.engine)
    (board,) = own_boards()
    before = int(board.version[0])
    assert before % 2 == 0, "readers would wait"
    with board.writing():
        assert board.version[0] == before + 1
    assert board.version[0] == before + 2
    watch.end()
