"""Files of a run that is resumed: nothing else is written through them, and no line is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest

from envmgr.cli import resume
from envmgr.cli.loggers import CsvLogger
from envmgr.cli.output import LOCK, RunLock, locked
from envmgr.cli.resume import ResumedFolder, _open_at, read_earlier
from envmgr.cli.samples import Samples
from envmgr.errors import ConfigError, UnreadableRunError
from envmgr.observing.status_boards import PROCESS
from tests.unit.test_cli_resume import line_of, run

__all__ = ["run"]

KEY = "-----BEGIN KEY-----\nxyz\n"


@pytest.mark.parametrize("name", ["samples.jsonl", "episodes.jsonl", "run.json"])
def test_links_are_not_followed(
    run: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    victim = tmp_path_factory.mktemp("home") / "id"
    victim.write_text(KEY)
    (run / name).unlink()
    (run / name).symlink_to(victim)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(UnreadableRunError, match=f"cannot be read: it is a link.*{name}"):
        ResumedFolder(run).prepare()
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    with pytest.raises(OSError, match="it is a link"):
        _open_at(run / name, 0)  # it may have become one meanwhile
    victim.unlink()
    (run / "summary.json").unlink(missing_ok=True)
    with pytest.raises(UnreadableRunError):
        ResumedFolder(run).prepare()
    assert not victim.exists(), "a link to what is not there makes no file there"


def test_nor_when_figures_over_time_go_on(run: Path, tmp_path: Path) -> None:
    (run / "victim").write_text(KEY)
    (run / "samples.jsonl").unlink()
    (run / "samples.jsonl").symlink_to("victim")
    with pytest.raises(OSError, match="it is a link"):
        Samples(run, cast(Any, None), cast(Any, None), goes_on=True)
    assert (run / "victim").read_text() == KEY


@pytest.mark.parametrize("name", ["metrics.csv", "report.html", "videos", "tensorboard", "wandb"])
def test_nor_where_it_would_be_written_later(run: Path, tmp_path: Path, name: str) -> None:
    (run / "elsewhere").mkdir()
    (run / name).symlink_to("elsewhere")
    with pytest.raises(UnreadableRunError, match=f"its {name} is a link.* Put there what"):
        ResumedFolder(run).prepare()


def test_a_pipe_is_not_waited_for(run: Path) -> None:
    os.mkfifo(run / "metrics.csv")
    with pytest.raises(UnreadableRunError, match=r"its metrics\.csv is no file"):
        ResumedFolder(run).prepare()


def test_figures_are_not_written_through_a_link(run: Path) -> None:
    (run / "victim").write_text(KEY)
    (run / "metrics.csv").symlink_to("victim")  # made since that was checked
    logger = CsvLogger()
    logger.goes_on = True
    with pytest.raises(OSError, match="it is a link"):
        logger.open(run, {})


def test_nor_for_the_lock(run: Path) -> None:
    (run / LOCK).symlink_to("made")
    with pytest.raises(ConfigError, match="it is a link"):
        locked(run)
    assert not (run / "made").exists()


@pytest.mark.parametrize(
    "text", ["{}\n{}\n", "{}\n", "{}\n{", KEY, "\n", line_of() + "{}\n", line_of() + "{}\n\0\0"]
)
def test_whole_lines_that_cannot_be_read_are_not_cut_off(run: Path, text: str) -> None:
    for name in ("episodes.jsonl", "samples.jsonl"):
        kept = (run / name).read_bytes()
        (run / name).write_text(text)
        with pytest.raises(UnreadableRunError, match=r"damaged.* line \d"):
            ResumedFolder(run).prepare()
        assert (run / name).read_text() == text
        (run / name).write_bytes(kept)


@pytest.mark.parametrize("tail", ["", "{", "\0\0\0", line_of().rstrip()])
def test_half_a_line_at_the_end_is_cut_off(run: Path, tail: str) -> None:
    (run / "episodes.jsonl").write_text(line_of() + tail)
    assert read_earlier(run).episodes_bytes == len(line_of())


def test_half_a_line_of_figures_is_not_left_for_the_next_to_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        """A file on a disk that gets full in the middle of a line."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.data = b"line\n"

        def tell(self) -> int:
            return len(self.data)

        def write(self, line: bytes) -> int:
            self.data += line[:3]
            return 3

        def truncate(self, size: int) -> None:
            self.data = self.data[:size]

    samples = object.__new__(Samples)
    file = Full()
    monkeypatch.setattr(Samples, "_sample", lambda _: {"steps": 1})
    samples.__dict__.update(_file=file, _began_s=0.0)
    samples.take()
    assert file.data == b"line\n"


def test_who_goes_on_is_not_waited_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunLock, "take", lambda _: False)
    os.mkfifo(run / PROCESS)
    with pytest.raises(ConfigError, match=r"is still going on\. End it"):
        locked(run)
    (run / PROCESS).unlink()
    (run / PROCESS).write_text(json.dumps({"pid": 12}))
    with pytest.raises(ConfigError, match=r"is still going on, as process 12\. End it"):
        locked(run)


@pytest.mark.parametrize(
    ("first", "then"),
    [(1.0, []), (1.0, [1.0]), ([1.0], None), ([1.0], [1.0, 2.0]), ([1.0, 2.0], [1.0])],
)
def test_returns_of_different_envs_are_refused(run: Path, first: Any, then: Any) -> None:
    def write(*returns: Any) -> None:
        lines = [json.dumps({**json.loads(line_of()), "return": one}) for one in returns]
        (run / "episodes.jsonl").write_text("\n".join(lines) + "\n")

    write(first, first)
    assert read_earlier(run).statistics.episodes == 2
    write(first, then)
    with pytest.raises(UnreadableRunError, match="not all returns in it"):
        read_earlier(run)


def test_files_are_read_to_a_limit(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_LARGEST_FILE", 1000)
    assert read_earlier(run).statistics.steps == 12
    summary = {"ending": "done", "error": " " * 1000}
    (run / "summary.json").write_text(json.dumps(summary))
    resume.refuse_no_run(run)  # it is not read, so the run is not known to be complete
    (run / "summary.json").unlink()
    facts = (run / "run.json").read_bytes()
    (run / "run.json").write_bytes(facts + b" " * 1000 + b"x")
    assert read_earlier(run).statistics.steps == 12, "no more is read"
    (run / "run.json").write_bytes(b" " * 1000 + facts)
    with pytest.raises(UnreadableRunError, match=r"run.json' is not whole"):
        read_earlier(run)
    (run / "run.json").write_bytes(facts)
    for end in ("", "\n"):  # which may be half a line, but of no run
        (run / "episodes.jsonl").write_text(line_of() + line_of(failure="x" * 1000) + end)
        with pytest.raises(UnreadableRunError, match=r"damaged.* line 2"):
            read_earlier(run)
