"""Boards that others find: whose they are, and in which order."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from envmgr.config import MAX_ENV_NUM
from envmgr.core import board_writer
from envmgr.core.board_writer import BoardWriter
from envmgr.errors import UnreadableRunError
from envmgr.observing import dump, status_boards
from envmgr.observing.dump import dump_of
from envmgr.observing.status_boards import (
    PROCESS,
    boards_of,
    pid_of,
    process_facts,
)
from envmgr.observing.top_table import Top
from envmgr.proc import memfds_of
from envmgr.transport.process.stacks import Stacks
from envmgr.untrusted import plain
from envmgr.wire.board import (
    HEADER_BYTES,
    Board,
    BoardPlan,
    PostedBoard,
    board_in,
    put_text,
)
from envmgr.wire.latencies import NUMBERS
from tests.rig import Rig


@pytest.mark.skipif(sys.platform != "linux", reason="it takes /proc")
def test_managers_are_found_in_the_order_of_their_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_writer, "LOOK_EVERY_S", 3600.0)
    rig = Rig(1, has_block=False)
    rig.launch()
    kinds = ["first", "second", "third", "fourth", "fifth"]
    writers = {kind: BoardWriter(kind, rig.clock) for kind in kinds}
    gc.collect()
    gc.disable()
    try:
        for kind in kinds[:4]:
            writers[kind].begin(rig.engine)
        writers["first"].end()
        assert [board.plan.kind for board in boards_of(os.getpid())] == kinds[1:4], "and no longer"
        writers["fifth"].begin(rig.engine)  # with the fd that the first one had
        found = [board.plan for board in boards_of(os.getpid())]
        assert [plan.kind for plan in found] == kinds[1:]
        assert [board.plan for board in boards_of(os.getpid())] == found, "what tells them apart"
        assert len({plan.number for plan in found}) == 4
    finally:
        gc.enable()
        for writer in writers.values():
            writer.end()


def test_a_board_without_a_number_is_read(tmp_path: Path) -> None:
    plan, file = BoardPlan(1, "subprocess", 3, 4, 2, 0, 7), tmp_path / "board"
    header = {"envmgr_board": 1, **plan._asdict()}
    file.write_bytes(json.dumps(header).encode().ljust(plan.nbytes, b"\0"))
    with file.open("rb") as opened:
        assert board_in(opened.fileno()).plan == plan
    del header["number"]
    file.write_bytes(json.dumps(header).encode().ljust(plan.nbytes, b"\0"))
    with file.open("rb") as opened:
        assert board_in(opened.fileno()).plan == plan._replace(number=0)


def opened_memfds(name: str) -> list[str]:
    """Return what is in the memory of a name that this process has open, having written there."""
    found = []
    for fd in memfds_of(os.getpid(), name, os.O_RDWR):
        found.append(os.pread(fd, 100, 0).decode())
        os.ftruncate(fd, 0)
        os.close(fd)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="it takes /proc")
def test_a_file_that_takes_the_place_of_memory_is_neither_opened_nor_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").write_text("other")
    other = os.open(tmp_path / "other", os.O_PATH)  # which is all that its owner lets one do
    memory = os.memfd_create("envmgr-place")
    os.write(memory, b"memory")
    look = os.readlink

    def replaced(path: str) -> str:
        target = look(path)
        if target.startswith("/memfd:envmgr-place "):
            os.dup2(other, memory)
        return target

    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "readlink", replaced)
            assert opened_memfds("envmgr-place") == []
        assert look(f"/proc/self/fd/{memory}") == str(tmp_path / "other"), "it took its place"
        assert (tmp_path / "other").read_text() == "other"
    finally:
        os.close(other)
        os.close(memory)


@pytest.mark.skipif(sys.platform != "linux", reason="it takes /proc")
def test_only_memory_without_a_name_is_opened_whatever_paths_look_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").write_text("other")
    os.mkfifo(tmp_path / "pipe")  # to open it would last for ever
    fds = [os.open(tmp_path / name, os.O_PATH) for name in ("other", "pipe")]
    fds.append(os.memfd_create("envmgr-any"))
    os.write(fds[-1], b"memory")
    look = os.readlink
    ours = [f"{os.stat(fd).st_dev} {os.stat(fd).st_ino}" for fd in fds]

    def looks_alike(path: str) -> str:
        about = os.stat(path) if os.path.exists(path) else None
        is_ours = about is not None and f"{about.st_dev} {about.st_ino}" in ours
        return "/memfd:envmgr-alike (deleted)" if is_ours else look(path)

    monkeypatch.setattr(os, "readlink", looks_alike)
    try:
        assert opened_memfds("envmgr-alike") == ["memory"]
        assert (tmp_path / "other").read_text() == "other"
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.skipif(sys.platform != "linux", reason="it takes memfds")
def test_memory_that_is_cut_while_it_is_read_is_no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    posted = PostedBoard(BoardPlan(os.getpid(), "subprocess", 3, 4, 2))
    fd, read = posted.fd, os.pread
    assert fd is not None

    def cut(file: int, n: int, offset: int) -> bytes:
        if n > HEADER_BYTES:
            os.ftruncate(fd, HEADER_BYTES)
        return read(file, n, offset)

    monkeypatch.setattr(os, "pread", cut)
    with pytest.raises(UnreadableRunError, match="was cut"):
        boards_of(os.getpid())
    posted.close()


def test_a_process_is_not_looked_for_in_what_is_no_file(tmp_path: Path) -> None:
    file = tmp_path / PROCESS
    os.mkfifo(file)
    with pytest.raises(UnreadableRunError, match="it is no file"):
        pid_of(str(tmp_path))
    file.unlink()
    for target in ("/dev/zero", "other"):
        file.symlink_to(target)
        with pytest.raises(UnreadableRunError, match="it is a link"):
            pid_of(str(tmp_path))
        file.unlink()
    for text in ("[" * 5000, "5", "[]", "{}", '{"pid": "1"}', '{"pid": true}', '{"pid": 0}'):
        file.write_text(text)
        with pytest.raises(UnreadableRunError, match="does not say which process"):
            pid_of(str(tmp_path))
    file.write_text(json.dumps(process_facts()) + " " * 10_000 + "x")
    assert pid_of(str(tmp_path)) == os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="it takes memfds")
def test_no_more_of_boards_is_read_than_there_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = BoardPlan(1, "subprocess", MAX_ENV_NUM, 2 * MAX_ENV_NUM, 2 * MAX_ENV_NUM, NUMBERS)
    assert largest.nbytes < status_boards._MOST_OF_BOARDS
    plan = BoardPlan(os.getpid(), "subprocess", 3, 4, 2)
    posted = [PostedBoard(plan._replace(number=number)) for number in range(3)]
    monkeypatch.setattr(status_boards, "_MOST_OF_BOARDS", 3 * plan.nbytes)
    assert len(boards_of(os.getpid())) == 3
    monkeypatch.setattr(status_boards, "_MOST_OF_BOARDS", 3 * plan.nbytes - 1)
    with pytest.raises(UnreadableRunError, match="never have"):
        boards_of(os.getpid())
    for one in posted:
        one.close()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_a_board_says_is_shown(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(seed)
    plan = BoardPlan(1, "subprocess", 5, 7, 3, NUMBERS)
    monkeypatch.setattr(Stacks, "of", lambda self, pid: "")
    odd = np.array([np.nan, np.inf, -np.inf, 1e308, -1e308, 1e-308])
    board = Board(bytearray(random.bytes(plan.nbytes)), plan)
    for column in (board.looked_at, board.call_since, board.since, board.latencies):
        column[...] = random.choice(odd, column.shape)
    assert "manager of 5 envs" in dump_of([board])
    top = Top("slowest")
    for _ in range(2):
        assert "5 envs" in top.text([board], 51.0)
        board.looked_at[0], board.counters[...] = 50.0, 2**64 - 1


ODD = "a\x1b]0;owned\x07\x1b[2Jb\rc\x9b1md"


def test_texts_of_other_processes_do_not_command_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = BoardPlan(1, f"{ODD}\nkind", 1, 1, 1)
    board = Board(bytearray(plan.nbytes), plan)
    for cells in (board.call, board.where, board.errors[0]):
        put_text(cells, ODD)
    monkeypatch.setattr(dump, "command_of", lambda _: f"python {ODD}\nprocess 1: nothing")
    text = dump_of([board], stacks=False)
    shown = r"a\x1b]0;owned\x07\x1b[2Jb\rc\x9b1md"
    assert text.count(shown) == 5
    assert text.startswith(rf"process 1: python {shown}\nprocess 1: nothing")
    table = Top().text([board], 51.0)
    assert rf"{shown}\nkind, 1 env " in table
    for one in (text, table):
        assert all(letter == "\n" or letter.isprintable() for letter in one)
    assert plain("a\tb\nc é") == "a\tb\nc é"
