"""Boards: what is written is what others read, and what is none is refused."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import envmgr
from envmgr.errors import ConfigError, StateError, UnreadableRunError
from envmgr.observing.status_boards import PROCESS, boards_of, pid_of, process_facts
from envmgr.wire.board import (
    HEADER_BYTES,
    TEXT_BYTES,
    Board,
    BoardPlan,
    PostedBoard,
    board_in,
    own_boards,
    put_text,
    text_in,
)

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


def board_of(content: bytes) -> Board:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return board_in(file.fileno())


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
        (b"[" * 4000, "no board"),
        (header(total=10**5), "not whole"),
        (header(total=10**9), "header is wrong"),
        (header(total=2**61), "header is wrong"),
        (header(total=2), "header is wrong"),  # fewer than there are envs
        (header(n_hosts=10**30), "header is wrong"),
        (header(latencies=10**6), "header is wrong"),
        (header(latencies=1), "header is wrong"),
        (header(kind=7), "header is wrong"),
    ],
)
def test_what_is_no_board_is_refused(start: bytes, text: str) -> None:
    with pytest.raises(UnreadableRunError, match=text):
        board_of(start.ljust(PLAN.nbytes, b"\0"))


def test_a_board_that_is_cut_short_is_refused() -> None:
    memory = header().ljust(PLAN.nbytes, b"\0")
    assert board_of(memory).plan == PLAN
    for size in (PLAN.nbytes - 8, HEADER_BYTES):
        with pytest.raises(UnreadableRunError, match="not whole"):
            board_of(memory[:size])


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
