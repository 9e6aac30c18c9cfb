"""Boards: what is written is what others read, and what is none is refused."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import envmgr
from envmgr.core import board_writer as watching
from envmgr.core.board_writer import BoardWriter
from envmgr.errors import ConfigError, StateError, UnreadableRunError
from envmgr.lifecycle import EnvState
from envmgr.observing.boards import PROCESS, boards_of, pid_of, process_facts
from envmgr.observing.dump import dump_of
from envmgr.wire.board import (
    HEADER_BYTES,
    TEXT_BYTES,
    Activity,
    Board,
    BoardPlan,
    PostedBoard,
    board_in,
    own_boards,
    put_text,
    text_in,
)
from tests.rig import Rig

PLAN = BoardPlan(os.getpid(), "subprocess", 3, 4, 2)


@pytest.fixture
def posted() -> Iterator[PostedBoard]:
    posted = PostedBoard(PLAN)
    yield posted
    posted.close()


def opened(posted: PostedBoard) -> Board:
    assert posted.board is not None
    return posted.board


def test_a_copy_is_of_one_moment_and_stays(posted: PostedBoard) -> None:
    board = opened(posted)
    with board.writing():
        board.since[...] = [1, 2, 3, 4]
        put_text(board.errors[3], "ä" * TEXT_BYTES)
    copy = board.read()
    with board.writing():
        board.since[...] = 0.0
        put_text(board.errors[3], "short")
    assert copy.since.tolist() == [1, 2, 3, 4]
    assert text_in(copy.errors[3]) == "ä" * (TEXT_BYTES // 2)
    assert text_in(board.errors[3]) == "short"
    board.version += np.uint64(1)  # killed while it wrote: what there is, is read
    assert board.read().since.tolist() == [0, 0, 0, 0]


def test_boards_are_found_until_they_are_closed(posted: PostedBoard) -> None:
    opened(posted).episodes[2] = 7
    assert own_boards() == [opened(posted)]
    if posted.fd is not None:
        (found,) = boards_of(os.getpid())
        assert found.plan == PLAN
        assert found.episodes[2] == 7
        with pytest.raises(ValueError, match="read-only"):
            found.episodes[2] = 8
    posted.close()
    assert own_boards() == []


def header(**changes: Any) -> bytes:
    return json.dumps({"envmgr_board": 1, **PLAN._asdict(), **changes}).encode()


@pytest.mark.parametrize(
    ("start", "text"),
    [
        (b"", "no board"),
        (b"\xff\xfe{", "no board"),
        (b"[1, 2]", "no board"),
        (header()[:-9], "no board"),
        (header(envmgr_board=2), "version 2"),
        (header(env_num="3"), "header is wrong"),
        (header(total=-1), "header is wrong"),
        (header(total=10**9), "not whole"),
        (header(n_hosts=10**30), "not whole"),
    ],
)
def test_what_is_no_board_is_refused(start: bytes, text: str) -> None:
    memory = start.ljust(PLAN.nbytes, b"\0")
    with pytest.raises(UnreadableRunError, match=text):
        board_in(memory, len(memory))


def test_a_board_that_is_cut_short_is_refused() -> None:
    memory = header().ljust(PLAN.nbytes, b"\0")
    assert board_in(memory, len(memory)).plan == PLAN
    for size in (PLAN.nbytes - 8, HEADER_BYTES):
        with pytest.raises(UnreadableRunError, match="not whole"):
            board_in(memory[:size], size)


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


def test_the_envs_of_a_shared_host_wait_for_the_one_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "LOOK_EVERY_S", 3600.0)
    rig = Rig(4, has_block=True, num_workers=2)
    rig.launch()
    watch = BoardWriter("subprocess", rig.clock)
    watch.begin(rig.engine)
    (board,) = own_boards()
    rig.send({0: 0, 1: 0, 2: 0})
    block = rig.hosts.block
    assert block is not None
    block.running[0] = 1 + 1
    watch.look()
    queued, stepping = Activity.QUEUED, Activity.STEPPING
    assert board.activities.tolist() == [queued, stepping, stepping, Activity.READY]
    block.replies[2] = block.requests[2]
    watch.look()
    assert board.activities.tolist() == [queued, stepping, Activity.ANSWERED, Activity.READY]
    before = int(board.version[0])
    assert before % 2 == 0, "readers would wait"
    with board.writing():
        assert board.version[0] == before + 1
    assert board.version[0] == before + 2
    watch.end()


class TestSignals:
    @pytest.fixture(autouse=True)
    def handlers(self) -> Iterator[None]:
        before = signal.getsignal(signal.SIGUSR1)
        yield
        signal.signal(signal.SIGUSR1, before)

    def test_a_dump_is_written_and_the_handler_that_was_there_is_called(
        self, posted: PostedBoard, tmp_path: Path
    ) -> None:
        seen: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
        envmgr.dump_on_signal(file=str(tmp_path / "first"))
        envmgr.dump_on_signal(file=str(tmp_path / "dump"))  # in place of it, not besides
        signal.raise_signal(signal.SIGUSR1)
        text = awaited_text(tmp_path / "dump")
        assert "subprocess manager of 3 envs" in text
        assert seen == [signal.SIGUSR1]
        assert not (tmp_path / "first").exists()

    def test_what_cannot_be_had_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError, match="no signal"):
            envmgr.dump_on_signal(4711)
        with pytest.raises(ConfigError, match="can have no handler"):
            envmgr.dump_on_signal(signal.SIGKILL)
        with monkeypatch.context() as patched:
            patched.setattr(signal, "getsignal", lambda number: None)
            with pytest.raises(ConfigError, match="not Python's"):
                envmgr.dump_on_signal()
        errors: list[BaseException] = []

        def elsewhere() -> None:
            try:
                envmgr.dump_on_signal()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert isinstance(errors[0], StateError)


def awaited_text(path: Path) -> str:
    """Return what is in a file, once it ends with a line."""
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        if path.exists() and (text := path.read_text()).endswith("\n"):
            return text
        time.sleep(0.01)
    raise AssertionError(f"nothing was written to {path}")


def test_what_names_no_trainer_is_refused(tmp_path: Path) -> None:
    assert pid_of(str(os.getpid())) == os.getpid()
    cases = {
        "nowhere": "neither a pid nor a folder",
        "empty": "no folder of a run that goes on",
        "over": "has ended: see summary.json",
        "cut": "does not say which process",
        "list": "does not say which process",
        "odd": "its pid is",
        "gone": "has ended: it was process",
        "far": "look at it there",
    }
    for name in [*cases][1:]:
        (tmp_path / name).mkdir()
    (tmp_path / "over" / "summary.json").write_text("{}")
    facts = process_facts()
    contents = {
        "cut": json.dumps(facts)[:-5],
        "list": "[1]",
        "odd": json.dumps({**facts, "pid": -1}),
        "gone": json.dumps({**facts, "started": "some time"}),
        "far": json.dumps({**facts, "host": "elsewhere"}),
    }
    for name, content in contents.items():
        (tmp_path / name / PROCESS).write_text(content)
    for name, text in cases.items():
        with pytest.raises(UnreadableRunError, match=text):
            pid_of(str(tmp_path / name))
    (tmp_path / PROCESS).write_text(json.dumps(facts))
    assert pid_of(str(tmp_path)) == os.getpid()
    with pytest.raises(UnreadableRunError, match="there is no process"):
        boards_of(2**22 + 1)
