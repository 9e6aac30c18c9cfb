"""Boards that others find: whose they are, and in which order."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import pytest

from envmgr.core import board_writer
from envmgr.core.board_writer import BoardWriter
from envmgr.errors import UnreadableRunError
from envmgr.observing import dump
from envmgr.observing.dump import dump_of
from envmgr.observing.status_boards import (
    PROCESS,
    boards_of,
    pid_of,
    process_facts,
)
from envmgr.observing.top_table import Top
from envmgr.untrusted import plain
from envmgr.wire.board import Board, BoardPlan, board_in, put_text
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


def test_a_board_without_a_number_is_read() -> None:
    plan = BoardPlan(1, "subprocess", 3, 4, 2, 0, 7)
    header = {"envmgr_board": 1, **plan._asdict()}
    memory = json.dumps(header).encode().ljust(plan.nbytes, b"\0")
    assert board_in(memory, len(memory)).plan == plan
    del header["number"]
    memory = json.dumps(header).encode().ljust(plan.nbytes, b"\0")
    assert board_in(memory, len(memory)).plan == plan._replace(number=0)


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
