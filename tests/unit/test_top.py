"""The screen of `envmgr top`: what fits, what keys do, and who is shown how."""

from __future__ import annotations

import os
import re

import pytest

from envmgr.lifecycle import EnvState
from envmgr.observing import top_screen
from envmgr.observing.top_screen import LiveTop
from envmgr.observing.top_table import SORTS, Top
from envmgr.wire.board import Board, BoardPlan, put_text
from envmgr.wire.latencies import NUMBERS


def board(n: int, number: int = 0) -> Board:
    plan = BoardPlan(1, "subprocess", n, n, n, NUMBERS, number)
    board = Board(bytearray(plan.nbytes), plan)
    board.states[...] = int(EnvState.RUN)
    board.hosts[...] = range(n)
    board.looked_at[0] = 50.0
    return board


def shown(view: LiveTop, boards: list[Board] | str, width: int = 80, height: int = 24) -> list[str]:
    return view.screen(boards, 51.0, width, height).plain.split("\n")


def chosen(view: LiveTop, boards: list[Board]) -> list[str]:
    text = view.screen(boards, 51.0, 80, 24)
    spans = [span for span in text.spans if "reverse" in str(span.style)]
    return [text.plain[span.start : span.end].split()[0] for span in spans]


@pytest.mark.parametrize("width", [20, 40, 60, 79, 80, 87, 200])
def test_lines_are_as_wide_as_the_screen_at_most(width: int) -> None:
    shown_board = board(3)
    shown_board.failed[...] = 12_345
    table = Top().table(0, shown_board, 51.0, width)
    assert max(map(len, [*table.head, table.names, *table.lines])) <= width
    if width >= 40:
        assert all("12,345" in line or "12345" in line for line in table.lines), "cut off"
    assert table.names.split()[0] == "env"
    assert all(len(line.split()) > 1 for line in table.lines)


def test_at_80_columns_what_matters_is_there_and_at_87_all() -> None:
    assert Top().table(0, board(1), 51.0, 80).names.split() == (
        ["env", "state", "at", "for", "steps/s", "p99", "fail", "MB"]
    )
    assert "p50" in Top().table(0, board(1), 51.0, 87).names


def test_an_env_whose_worker_is_not_there_is_not_said_to_need_no_memory() -> None:
    one = board(2)
    one.pids[1] = os.getpid()
    without, ours = Top().table(0, one, 51.0, 80).lines
    assert without.split()[-1] == "-"
    assert int(ours.split()[-1]) > 0


@pytest.mark.parametrize("height", [5, 10, 24])
def test_the_screen_holds_all_lines_and_follows_the_choice(height: int) -> None:
    view, boards = LiveTop(7, "env"), [board(50)]
    for env_id in range(60):
        lines = shown(view, boards, height=height)
        assert len(lines) <= height
        assert lines[0] == "process 7"
        assert lines[-1].startswith("q quit")
        assert chosen(view, boards)[0] == str(min(env_id, 49)), "the last one stays chosen"
        view.press("down")


def test_keys_choose_sort_and_end() -> None:
    view, boards = LiveTop(7, "env"), [board(3), board(2, 1)]
    boards[0].failed[1] = 4
    shown(view, boards)
    seen = []
    for key in ("down", "down", "down", "up", "up", "up", "up"):
        assert view.press(key)
        seen += chosen(view, boards)
    assert seen == ["1", "2", "0", "2", "1", "0", "0"], "of both managers, and no further"
    sorts = []
    for _ in SORTS:
        view.press("s")
        sorts.append(shown(view, boards)[-1].rpartition("(")[2].rstrip(")"))
    assert sorted(sorts) == sorted(SORTS)
    assert view.press("x"), "any other key does nothing"
    assert not view.press("q")


def test_failures_and_what_does_not_run_have_colours() -> None:
    one = board(3)
    one.failed[1], one.states[2] = 1, int(EnvState.RESET)
    view = LiveTop(7, "env")
    view.press("down")
    text = view.screen([one], 51.0, 80, 24)
    styles = {text.plain[s.start : s.end].split()[0]: str(s.style) for s in text.spans if s}
    assert styles["1"] == "red"
    assert styles["2"] == "yellow"


def test_the_stacks_of_an_env_are_those_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_screen.Stacks, "of", lambda self, pid: f'  File "game.py" of {pid}')
    one = board(2)
    one.pids[1] = 4711
    put_text(one.errors[1], "env 1 died in its step")
    put_text(one.where, '  File "train.py"')
    view = LiveTop(7, "env")
    view.press("enter")
    assert shown(view, [one])[-1].startswith("q quit"), "none was there to be chosen"
    view.press("enter")
    assert '  File "train.py"' in shown(view, [one]), "it has no worker"
    view.press("escape")
    view.press("down")
    view.press("enter")
    lines = shown(view, [one])
    assert lines[1] == "env 1, worker 4711"
    assert "env 1 died in its step" in lines
    assert '  File "game.py" of 4711' in lines
    view.press("enter")
    assert shown(view, [one])[-1].startswith("q quit")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_paths_of_calls_are_shortened_and_not_their_names(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    call = (
        '  File "/work/site-packages/gymnasium/envs/classic_control/cartpole.py", line 195 in step'
    )
    monkeypatch.setattr(top_screen.Stacks, "of", lambda self, pid: call)
    one = board(1)
    one.pids[0] = 4711
    view = LiveTop(7, "env")
    shown(view, [one], width)
    view.press("enter")
    (line,) = (line for line in shown(view, [one], width) if "File" in line)
    assert len(line) <= width
    assert line.endswith('cartpole.py", line 195 in step')
    assert (line == call) == (width == 200)
    assert width == 200 or '".../' in line, "cut between folders"


def test_a_trainer_that_launches_is_waited_for() -> None:
    view = LiveTop(os.getpid(), "env")
    lines = shown(view, "process 7 has no manager that is launched")
    assert lines[1] == "Waiting: process 7 has no manager that is launched"
    assert shown(view, [board(1)])[1].startswith("subprocess, 1 env (")


def test_of_one_there_is_one() -> None:
    one = board(1)
    one.counters[:] = 1
    head = " ".join(shown(LiveTop(7, "env"), [one])[1:3])
    for noun in ("env", "step", "episode", "failure"):
        assert re.search(rf"\b1 {noun}\b", head), head


def later(one: Board, steps: int) -> Board:
    """Return a board two seconds later, with so many steps more."""
    then = one.read()
    then.looked_at[0] += 2.0
    then.counters[1] += steps
    return then


def rates(text: str) -> list[str]:
    return [line.split(" steps/s")[0].split()[-1] for line in text.split("\n") if ")," in line]


def test_a_manager_that_closes_leaves_the_rates_of_the_others() -> None:
    top, first, second = Top(), board(4, 0), board(64, 1)
    first.counters[1] = 1000
    assert rates(top.text([first, second], 51.0)) == ["-", "-"]
    assert rates(top.text([later(first, 10), later(second, 20)], 53.0)) == ["5", "10"]
    assert rates(top.text([later(later(second, 20), 40)], 55.0)) == ["20"]
    assert rates(top.text([later(later(first, 30), 0)], 55.0)) == ["-"], (
        "what is closed is not kept"
    )


def test_another_manager_has_no_rates_of_the_one_before() -> None:
    first = board(2)
    first.counters[1] = 1000
    for other in (later(board(5), 2000), later(board(2), 10)):  # of another size; and a new one
        top = Top()
        top.table(0, first, 51.0)
        assert rates(top.table(0, other, 53.0).head[0]) == ["-"]
        cells = [line.split()[-5] for line in top.table(0, other, 53.0).lines]
        assert cells == ["-"] * other.plan.env_num


def test_stacks_are_shown_of_the_same_manager_when_another_closes() -> None:
    view, first, second = LiveTop(7, "env"), board(1, 0), board(3, 1)
    put_text(second.errors[2], "env 2 died in its step")
    shown(view, [first, second])
    for _ in range(3):
        view.press("down")
    view.press("enter")
    assert "env 2 died in its step" in shown(view, [first, second])
    assert "env 2 died in its step" in shown(view, [second])
    assert shown(view, [first])[-1].startswith("q quit"), "that manager is closed"
