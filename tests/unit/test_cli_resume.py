"""What a run that is resumed takes from its folder."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest

from envmgr.cli.output import LOCK, RunLock
from envmgr.cli.prepare import RunOptions
from envmgr.cli.resume import UNKNOWN, ResumedFolder, RunFacts, read_earlier, resuming_command
from envmgr.cli.run import execute
from envmgr.config_file import resolve_config_of_run
from envmgr.errors import ConfigError, MissingDependencyError, UnreadableRunError
from envmgr.reporting.files import Sample
from tests.unit.test_collect_records import record_of

SAMPLE: dict[str, Any] = {
    **dict.fromkeys(Sample.__struct_fields__, 0),
    "elapsed_s": 4.5,
    "steps": 99,
    "failures": 3,
}


def line_of(**changes: Any) -> str:
    return json.dumps(record_of(**changes).as_dict()) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that was killed in the middle of its third line."""
    lines = [line_of(length=5), line_of(length=7, env_id=1, seed=8, abnormal=True, failure="x")]
    (tmp_path / "episodes.jsonl").write_text("".join(lines) + line_of()[:30])
    (tmp_path / "config.yaml").write_text("env: {id: CartPole-v1}\n")
    (tmp_path / "samples.jsonl").write_text(json.dumps(SAMPLE) + "\n" + '{"elapsed')
    (tmp_path / "run.json").write_bytes(RunFacts("c.yaml", "2030-01-02T03:04:05").as_json())
    return tmp_path


class TestWhatWasCollected:
    def test_counts_whole_lines_only(self, run: Path) -> None:
        found = read_earlier(run).statistics
        assert (found.steps, found.episodes, found.abnormal_episodes) == (12, 1, 1)
        assert found.elapsed_s == 4.5  # of the latest sample: later than the latest episode
        assert found.as_dict()["return"]["mean"] == 1.0

    def test_of_a_killed_part_the_kinds_of_failures_are_unknown(self, run: Path) -> None:
        found = read_earlier(run).failures
        assert (found.count, found.by_kind, found.by_env) == (3, {UNKNOWN: 3}, {1: 1})

    def test_of_an_interrupted_part_all_failures_are_known(self, run: Path) -> None:
        stats = {
            "failures": 4,
            "failures_by_kind": {"EnvCrash": 4},
            "failures_by_env": {"0": 1, "1": 3},
        }
        summary = {"ending": "interrupted", "stats": stats}
        (run / "summary.json").write_text(json.dumps(summary))
        earlier = read_earlier(run)
        found = earlier.failures
        assert (found.count, found.by_kind, found.by_env) == (4, {"EnvCrash": 4}, {0: 1, 1: 3})
        more = {
            "failures": 1,
            "failures_by_kind": {"EnvCrash": 1},
            "failures_by_env": {1: 1},
            "timesteps": 20,
        }
        assert earlier.count_in(more) == {
            "failures": 5,
            "failures_by_kind": {"EnvCrash": 5},
            "failures_by_env": {0: 1, 1: 4},
            "timesteps": 32,
        }

    def test_what_is_not_finite_does_not_stop_it(self, run: Path) -> None:
        (run / "episodes.jsonl").write_text(line_of(episode_return=float("nan")))
        assert read_earlier(run).statistics.as_dict()["return"]["mean"] is None

    def test_a_line_that_is_damaged_is_no_end(self, run: Path) -> None:
        (run / "episodes.jsonl").write_text(line_of() + "{}\n" + line_of())
        with pytest.raises(UnreadableRunError, match=r"damaged.*line 2"):
            read_earlier(run)


class TestSeeds:
    @pytest.mark.parametrize("seed", [7, [7, 8, None], {0: 7, 2: 8}])
    def test_are_others_and_the_same_each_time(self, run: Path, seed: Any) -> None:
        def flat(found: Any) -> list[Any]:
            return [*(found.values() if isinstance(found, dict) else found)]

        earlier = read_earlier(run)
        found, again = (earlier.seed_of_rest(seed, 3) for _ in range(2))
        assert found == again
        assert type(found) is type(seed)
        old, new = ([seed], [found]) if isinstance(seed, int) else (flat(seed), flat(found))
        assert [one is None for one in old] == [one is None for one in new]
        assert not {*old, 7, 8} & {one for one in new if one is not None}

    def test_that_were_used_are_not_used_again(self, run: Path) -> None:
        earlier = read_earlier(run)
        first = earlier.seed_of_rest(7, 3)
        earlier.seeds.add(first + 2)  # of the third env
        assert earlier.seed_of_rest(7, 2) == first
        assert earlier.seed_of_rest(7, 3) != first

    def test_none_stay_none(self, run: Path) -> None:
        assert read_earlier(run).seed_of_rest(None, 3) is None


class TestTheFolder:
    def test_goes_on_after_the_last_whole_line(self, run: Path) -> None:
        (run / "summary.json").write_text('{"ending": "interrupted"}')
        folder = ResumedFolder(run)
        folder.prepare()
        assert (run / "summary.json").exists()  # nothing is changed before it begins
        folder.begin("")
        folder.add(record_of(2.0, number=2))
        lines = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
        assert [(one["length"], one.get("resumed")) for one in lines] == [
            (5, None),
            (7, None),
            (5, 1),
        ]
        assert (run / "samples.jsonl").read_text() == json.dumps(SAMPLE) + "\n"
        assert not (run / "summary.json").exists()
        folder.close()
        (resumed,) = json.loads((run / "run.json").read_text())["resumed"]
        assert (resumed["steps"], resumed["episodes"], resumed["failures"]["count"]) == (12, 2, 3)
        again = ResumedFolder(run)
        again.prepare()
        again.close()
        assert again.resumed == 2
        assert again.earlier.statistics.steps == 17
        assert not (run / LOCK).exists()

    def test_is_as_it_was_if_nothing_comes_of_it(self, run: Path) -> None:
        before = {path.name: path.read_bytes() for path in run.iterdir()}
        folder = ResumedFolder(run)
        folder.prepare()
        folder.discard()
        assert {path.name: path.read_bytes() for path in run.iterdir()} == before

    @pytest.mark.parametrize("name", ["episodes.jsonl", "run.json", "config.yaml"])
    def test_without_a_file_is_no_run(self, run: Path, name: str) -> None:
        (run / name).unlink()
        with pytest.raises(UnreadableRunError, match=rf"no folder of a run.*no {name}"):
            ResumedFolder(run).prepare()

    def test_that_is_not_there_is_no_run(self, run: Path) -> None:
        with pytest.raises(UnreadableRunError, match="is no folder"):
            ResumedFolder(run / "nowhere").prepare()

    def test_whose_facts_are_broken_cannot_be_resumed(self, run: Path) -> None:
        (run / "run.json").write_text('{"config"')
        with pytest.raises(UnreadableRunError, match="not whole"):
            ResumedFolder(run).prepare()
        assert not (run / LOCK).exists()

    def test_of_a_complete_run_is_refused(self, run: Path) -> None:
        (run / "summary.json").write_text('{"ending": "done"}')
        with pytest.raises(ConfigError, match="is complete"):
            ResumedFolder(run).prepare()

    def test_of_a_run_that_goes_on_is_refused(self, run: Path) -> None:
        (run / "process.json").write_text('{"pid": 4711, "started": "", "host": ""}')
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        other = context.Process(target=_hold, args=(run, theirs))
        other.start()
        assert ours.recv() is True
        with pytest.raises(ConfigError, match="still going on, as process 4711"):
            ResumedFolder(run).prepare()
        ours.send(None)
        other.join()
        folder = ResumedFolder(run)
        folder.prepare()  # the lock has gone with that process, its file has not
        folder.discard()


def _hold(folder: Path, pipe: Any) -> None:
    with open(folder / LOCK, "a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        pipe.send(True)
        pipe.recv()


def test_a_lock_is_taken_again_where_its_file_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lockf, n = fcntl.lockf, 0

    def removed_at_first(file: Any, how: int) -> None:
        nonlocal n
        n += 1
        lockf(file, how)
        if n == 1:
            (tmp_path / LOCK).unlink()

    monkeypatch.setattr("envmgr.cli.output.fcntl.lockf", removed_at_first)
    lock = RunLock(tmp_path)
    assert lock.take()
    assert n == 2
    assert (tmp_path / LOCK).exists()
    lock.release()
    assert not (tmp_path / LOCK).exists()


class TestModulesBesideTheFirstConfig:
    @pytest.fixture
    def first(self, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Where the run was begun: with a module beside the config."""
        folder = tmp_path_factory.mktemp("the first")
        (folder / "left_behind.py").write_text("def make(): pass\n")
        facts = RunFacts(str(folder / "c.yaml"), "2030-01-02T03:04:05")
        (run / "run.json").write_bytes(facts.as_json())
        (run / "config.yaml").write_text("env: {entry: 'left_behind:make'}\n")
        return folder

    def refusal(self, run: Path, **options: Any) -> str:
        given = RunOptions(str(run / "config.yaml"), resume=str(run), **options)
        with pytest.raises(ConfigError) as caught:
            execute(given, None)  # type: ignore[arg-type]
        return str(caught.value)

    def test_the_whole_command_is_named(self, run: Path, first: Path) -> None:
        text = self.refusal(run, overrides=("collect.steps=20",), allowed={"allow_env": ["A"]})
        assert "there is no module 'left_behind'" in text
        assert text.endswith(
            f"PYTHONPATH='{first}' envmgr run --resume {run} --allow-env A "
            "--allow-import left_behind --set collect.steps=20"
        )

    def test_where_it_is_found_and_not_allowed(
        self, run: Path, first: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(str(first))
        text = self.refusal(run)
        assert text.endswith(f"envmgr run --resume {run} --allow-import left_behind")

    def test_not_where_something_else_is_wrong(
        self, run: Path, first: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend(str(first))
        allowed = {"allow_imports": ["left_behind"]}
        assert "PYTHONPATH" not in self.refusal(run, allowed=allowed)
        (run / "config.yaml").write_text("env: {idd: CartPole-v1}\n")
        assert "PYTHONPATH" not in self.refusal(run)

    @pytest.mark.parametrize("is_here", [False, True])
    def test_a_module_in_the_folder_of_the_run_is_not_run(
        self, run: Path, monkeypatch: pytest.MonkeyPatch, is_here: bool
    ) -> None:
        (run / "in_the_run.py").write_text("def make(): pass\n")
        (run / "config.yaml").write_text("env: {entry: 'in_the_run:make'}\n")
        (run / "run.json").write_bytes(RunFacts(str(run / "c.yaml"), "2030-01-02").as_json())
        path = [*sys.path]
        if is_here:
            monkeypatch.chdir(run)
        command = f"PYTHONPATH={run} envmgr run --resume {run} --allow-import in_the_run"
        assert self.refusal(run).endswith(command)
        assert resuming_command(run, (), {}) == command
        assert "in_the_run" not in sys.modules
        assert sys.path == path
        monkeypatch.syspath_prepend(str(run))
        assert "may not import" in self.refusal(run), "to be found is not to be allowed"
        allowed = {"allow_imports": ["in_the_run"]}
        resolve_config_of_run(run / "config.yaml", (), allowed)
        sys.modules.pop("in_the_run", None)

    def test_nor_is_it_an_installed_package(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (run / "ale_py.py").write_text("raise SystemExit\n")
        about = run / "ale_py-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ale-py\nVersion: 1.0\n")
        (run / "config.yaml").write_text("env: {id: 'ale_py:ALE/Pong-v5'}\n")
        monkeypatch.chdir(run)
        monkeypatch.syspath_prepend(str(run))  # as `python -m envmgr` has it
        with pytest.raises((ConfigError, MissingDependencyError), match="ale"):
            resolve_config_of_run("config.yaml", (), {})
        assert "ale_py" not in sys.modules

    def test_the_command_that_goes_on_names_them_where_they_are_needed(
        self, run: Path, first: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        allowed = {"allow_env": ["A"]}
        command = f"envmgr run --resume {run} --allow-env A"
        whole = f"PYTHONPATH='{first}' {command} --allow-import left_behind"
        assert resuming_command(run, (), allowed) == whole
        monkeypatch.chdir(first)
        assert resuming_command(run, (), allowed) == command, "they are beside it"

    def test_the_command_that_goes_on_sets_again_what_a_file_may_not(
        self, run: Path, first: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(first)
        (run / "config.yaml").write_text("env: {id: CartPole-v1}\nmanager: {env_num: 3}\n")
        plain = ["manager.env_num=3"]
        assert resuming_command(run, plain, {}) == f"envmgr run --resume {run}"
        log = "manager.worker_log=/elsewhere/my log"
        (run / "config.yaml").write_text(
            "env: {id: CartPole-v1}\nmanager: {env_num: 3, worker_log: /elsewhere/my log}\n"
        )
        assert resuming_command(run, [log], {}) == (
            f"envmgr run --resume {run} --set 'manager.worker_log=/elsewhere/my log'"
        )
