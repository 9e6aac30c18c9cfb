"""What `top` and `ps` call the processes of envmgr."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from envmgr import make
from envmgr.proc import stat_of
from tests.contract.harness import ready_all

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")

TITLES = """
import os


def setproctitle(title):
    with open(os.environ["TITLES"], "a") as file:
        file.write(f"{os.getpid()} {title}\\n")
"""


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")


@pytest.mark.parametrize("context", ["server", "fork", "spawn"])
def test_are_names_of_what_they_do(context: str) -> None:
    ours = name_of(os.getpid())
    with make("CartPole-v1", env_num=5, num_workers=3, context=context) as manager:
        pids = [worker["pid"] for worker in manager.stats()["workers"]]
        assert [name_of(pid) for pid in pids] == ["envmgr-w0", "envmgr-w1", "envmgr-w2"]
        parents = {int(stat_of(pid)[1]) for pid in pids}
        if context == "spawn":
            assert parents == {os.getpid()}
        else:
            assert {name_of(pid) for pid in parents} == {"envmgr-server"}
        os.kill(pids[1], signal.SIGKILL)
        assert manager.step({2: 0})[2].info["abnormal"]
        ready_all(manager)  # it has another worker now
        renewed = manager.stats()["workers"][1]["pid"]
        assert renewed != pids[1]
        assert name_of(renewed) == "envmgr-w1"
    assert name_of(os.getpid()) == ours


@pytest.mark.parametrize("context", ["server", "spawn"])
def test_are_titles_where_setproctitle_is_installed(
    context: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "setproctitle.py").write_text(TITLES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TITLES", str(tmp_path / "titles"))
    with make("CartPole-v1", env_num=5, num_workers=2, context=context) as manager:
        pids = [worker["pid"] for worker in manager.stats()["workers"]]
        assert name_of(pids[1]) == "envmgr-w1"
    found = [line.split(" ", 1) for line in (tmp_path / "titles").read_text().splitlines()]
    of_workers = {int(pid): title for pid, title in found if "server" not in title}
    assert of_workers == {
        pids[0]: "envmgr worker 0 (envs 0, 1, 2)",
        pids[1]: "envmgr worker 1 (envs 3, 4)",
    }
    assert {title for _, title in found} - {*of_workers.values()} == (
        {"envmgr worker server"} if context == "server" else set()
    )
    assert "setproctitle" not in sys.modules  # never in the trainer
