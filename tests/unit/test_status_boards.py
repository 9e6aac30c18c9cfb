"""Boards that others find: whose they are, and in which order."""

from __future__ import annotations

import gc
import json
import os
import sys

import pytest

from envmgr.core import board_writer
from envmgr.core.board_writer import BoardWriter
from envmgr.observing.status_boards import boards_of
from envmgr.wire.board import BoardPlan, board_in
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
