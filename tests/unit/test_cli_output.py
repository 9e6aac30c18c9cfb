from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from envmgr.cli.output import LOCK, RunFolder, default_path
from envmgr.errors import ConfigError
from envmgr.observing.status_boards import PROCESS, process_facts
from tests.unit.test_collect_records import record_of


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class TestAFolder:
    def test_holds_the_results(self, tmp_path: Path) -> None:
        folder = RunFolder(tmp_path / "a" / "b")
        folder.prepare()
        assert not folder.begun
        folder.begin("env: {}\n")
        assert folder.begun
        folder.add(record_of(1.0))
        lines = (tmp_path / "a/b/episodes.jsonl").read_text().splitlines()
        assert [json.loads(line)["return"] for line in lines] == [1.0]  # with the system already
        folder.end({"ending": "done"})
        folder.close()
        assert names(folder.path) == {"episodes.jsonl", "config.yaml", "summary.json", "run.json"}
        assert json.loads((folder.path / "summary.json").read_text()) == {"ending": "done"}

    def test_that_holds_results_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "summary.json").touch()
        says = r"holds the results [^.]*summary\.json[^.]*\. [^.]*--force\.$"
        with pytest.raises(ConfigError, match=says):
            RunFolder(tmp_path).prepare()
        assert names(tmp_path) == {"summary.json"}

    def test_is_taken_over_by_force_once_the_run_begins(self, tmp_path: Path) -> None:
        for name in ("summary.json", "episodes.jsonl", "metrics.csv", "other.txt"):
            (tmp_path / name).write_text("old")
        folder = RunFolder(tmp_path, force=True)
        folder.prepare()
        assert (tmp_path / "episodes.jsonl").read_text() == "old"
        folder.begin("env: {}\n")
        folder.close()
        assert names(tmp_path) == {"episodes.jsonl", "config.yaml", "run.json", "other.txt"}
        assert (tmp_path / "episodes.jsonl").read_text() == ""

    def test_has_no_events_of_the_run_that_is_replaced(self, tmp_path: Path) -> None:
        events = tmp_path / "tensorboard"
        events.mkdir()
        for name in ("events.out.tfevents.1.host", "mine.txt"):
            (events / name).touch()
        with pytest.raises(ConfigError, match=r"\(tensorboard/events\.out\.tfevents\.1\.host\)"):
            RunFolder(tmp_path).prepare()
        folder = RunFolder(tmp_path, force=True)
        folder.prepare()
        folder.begin("env: {}\n")
        folder.close()
        assert names(events) == {"mine.txt"}

    def test_has_no_files_removed_where_a_link_leads(self, tmp_path: Path) -> None:
        (there := tmp_path / "elsewhere").mkdir()
        (there / "events.out.tfevents.1.host").touch()
        (out := tmp_path / "out").mkdir()
        (out / "tensorboard").symlink_to(there)
        folder = RunFolder(out, force=True)
        folder.prepare()
        folder.begin("env: {}\n")
        folder.close()
        assert names(there) == {"events.out.tfevents.1.host"}

    def test_of_two_runs_at_once_one_fails(self, tmp_path: Path) -> None:
        first, second = RunFolder(tmp_path), RunFolder(tmp_path)
        first.prepare()
        second.prepare()
        first.begin("env: {}\n")
        with pytest.raises(FileExistsError):
            second.begin("env: {}\n")
        second.discard()
        first.close()
        assert names(tmp_path) == {"episodes.jsonl", "config.yaml", "run.json"}

    def test_with_files_of_others_is_fine(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").touch()
        folder = RunFolder(tmp_path)
        folder.prepare()
        assert names(tmp_path) == {"notes.txt", LOCK}  # from now on it is this run's
        folder.discard()
        assert names(tmp_path) == {"notes.txt"}

    def test_with_files_that_only_look_like_those_of_a_run_is_refused(self, tmp_path: Path) -> None:
        def refused(name: str, text: str, says: str) -> None:
            (tmp_path / name).write_text(text)
            for folder in (RunFolder(tmp_path), RunFolder(tmp_path, force=True)):
                with pytest.raises(ConfigError, match=says):
                    folder.prepare()
            assert names(tmp_path) == {name}
            assert (tmp_path / name).read_text() == text
            (tmp_path / name).unlink()

        refused(PROCESS, '{"name": "mine"}', r"process\.json that is none of envmgr's.* Rename")
        refused(PROCESS, "", r"process\.json that is none of envmgr's.* Rename")
        refused(
            PROCESS, json.dumps(process_facts()), f"is still going on, as process {os.getpid()}"
        )
        refused(LOCK, "4711", r"its run\.lock is none of envmgr's: rename that\. Nothing was")
        os.mkfifo(tmp_path / LOCK)
        with pytest.raises(ConfigError, match="cannot be written"):
            RunFolder(tmp_path).prepare()  # nobody reads it: that is not waited for

    def test_with_what_a_run_that_was_killed_has_left_is_fine(self, tmp_path: Path) -> None:
        (tmp_path / LOCK).touch()
        left = {**process_facts(), "started": "long ago"}
        (tmp_path / PROCESS).write_text(json.dumps(left))
        folder = RunFolder(tmp_path)
        folder.prepare()
        folder.begin("env: {}\n")
        folder.close()
        assert names(tmp_path) == {"episodes.jsonl", "config.yaml", "run.json"}

    def test_is_locked_by_a_file_that_others_cannot_lock(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            folder = RunFolder(tmp_path)
            folder.prepare()
            assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o600
            folder.discard()
        finally:
            os.umask(before)

    @pytest.mark.parametrize("place", ["file", "file/below"])
    def test_that_cannot_be_made_is_refused(self, tmp_path: Path, place: str) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"cannot be written: Not a directory.*--output"):
            RunFolder(tmp_path / place).prepare()

    def test_that_came_to_nothing_goes_away(self, tmp_path: Path) -> None:
        folder = RunFolder(tmp_path / "a" / "b")
        folder.prepare()
        folder.begin("env: {}\n")
        folder.discard()
        assert names(tmp_path) == set()

    def test_that_has_a_summary_stays_whatever_fails_then(self, tmp_path: Path) -> None:
        folder = RunFolder(tmp_path / "a")
        folder.prepare()
        folder.begin("env: {}\n")
        folder.end({"ending": "done"})
        folder.discard()
        assert names(folder.path) == {"episodes.jsonl", "config.yaml", "summary.json", "run.json"}

    def test_only_what_it_has_made_goes_away(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        folder = RunFolder(tmp_path / "a" / "b")
        folder.prepare()
        folder.begin("env: {}\n")
        (folder.path / "notes.txt").touch()
        folder.discard()
        assert names(tmp_path / "a" / "b") == {"notes.txt"}

    def test_keeps_whole_lines_when_the_disk_is_full(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = RunFolder(tmp_path)
        folder.prepare()
        folder.begin("env: {}\n")
        folder.add(record_of(1.0))
        whole = (tmp_path / "episodes.jsonl").read_bytes()

        class Full:
            def __init__(self, file: Any) -> None:
                self._file = file

            def write(self, line: bytes) -> int:
                return int(self._file.write(line[:10]))

            def __getattr__(self, name: str) -> Any:
                return getattr(self._file, name)

        monkeypatch.setattr(folder, "_episodes", Full(folder._episodes))
        with pytest.raises(OSError, match="No space left"):
            folder.add(record_of(2.0))
        folder.close()
        assert (tmp_path / "episodes.jsonl").read_bytes() == whole


def test_the_default_is_new_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime(2030, 1, 2, 3, 4, 5)
    found = []
    for _ in range(3):
        found.append(default_path("configs/pole.yaml", now))
        found[-1].mkdir(parents=True)
    name = "runs/pole-20300102-030405"
    assert [str(path) for path in found] == [name, f"{name}-2", f"{name}-3"]
