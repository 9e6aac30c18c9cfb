"""Paths from config files stay below the working directory."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from envmgr.cli.prepare import RunOptions, folder_of
from envmgr.config.paths import check_confined
from envmgr.config_file import load_config, resolve_config
from envmgr.errors import ConfigError, UnreadableRunError
from envmgr.testing import FaultyEnv


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to(folder / "loop")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    return folder


ESCAPES = [
    "/tmp/x",
    "/",
    "..",
    "../elsewhere",
    "a/../../elsewhere",
    "a/../b",  # where that leads depends on what `a` is by then
    "link",
    "link/x",
    "~/x",
    "~nobody-of-that-name/x",
    "./~root/x",
    "loop/x",
    '"a\\0b"',
    '"\\ud800"',
]


def write(folder: Path, text: str) -> Path:
    file = folder / "config.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("path", ESCAPES)
def test_results_do_not_leave_the_working_directory(here: Path, path: str) -> None:
    file = write(here, f"collect: {{output: {path}}}\n")
    with pytest.raises(ConfigError, match=r"^collect\.output is "):
        folder_of(RunOptions(str(file)), resolve_config(file))
    assert list(here.parent.joinpath("elsewhere").iterdir()) == []


@pytest.mark.parametrize("path", ["/net/host/x", "~somebody/x", "./~somebody/x", "./~/x", "../x"])
def test_what_leads_out_by_what_it_says_is_not_even_looked_up(
    here: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    looked_up: list[str] = []
    monkeypatch.setattr(pwd, "getpwnam", looked_up.append)
    resolve = Path.resolve
    monkeypatch.setattr(Path, "resolve", lambda p: looked_up.append(str(p)) or resolve(p))
    with pytest.raises(ConfigError, match=r"^manager\.worker_log is .* may name folders below"):
        check_confined(path, "manager.worker_log", "")
    assert looked_up == []
    check_confined("out", "manager.worker_log", "")
    assert looked_up


def test_the_working_directory_may_be_named_through_a_link(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "seen").symlink_to(here)
    named = str(tmp_path / "seen" / "out")
    with pytest.raises(ConfigError, match="leads to"):
        check_confined(named, "collect.output", "")  # nothing says that it leads here
    monkeypatch.setenv("PWD", str(tmp_path / "seen"))
    check_confined(named, "collect.output", "")
    monkeypatch.setenv("PWD", str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="leads to"):
        check_confined(str(tmp_path / "elsewhere" / "out"), "collect.output", "")


def test_logs_of_workers_do_not_leave_it(here: Path) -> None:
    for path in ESCAPES:
        with pytest.raises(ConfigError, match=r"^manager\.worker_log is "):
            resolve_config(write(here, f"manager: {{worker_log: {path}}}\n"))
    file = write(here, "manager: {worker_log: logs}\n")
    assert resolve_config(file).values.manager.worker_log == "logs"
    given = resolve_config(file, set=["manager.worker_log=/tmp/x"])
    assert given.values.manager.worker_log == "/tmp/x"


def test_results_may_go_below_it(here: Path) -> None:
    for path in ("out", "runs/a/b", str(here / "absolute")):
        file = write(here, f"collect: {{output: {path}}}\n")
        folder = folder_of(RunOptions(str(file)), resolve_config(file))
        assert folder is not None
        assert folder.path.resolve().is_relative_to(here)
        folder.discard()


@pytest.mark.parametrize("path", [".", "mine"])
def test_results_do_not_go_where_files_of_others_are(here: Path, path: str) -> None:
    (here / "mine").mkdir()
    file = write(here, f"collect: {{output: {path}}}\n")
    for name in ("summary.json", "notes.txt", "run.json"):
        (here / path / name).write_text("{}")
    before = {one: one.read_text() for one in here.rglob("*") if one.is_file()}
    for force in (False, True):
        options = RunOptions(str(file), force=force)
        with pytest.raises(ConfigError, match=r"holds \d files \(.* --output on the command"):
            folder_of(options, resolve_config(file))
    assert {one: one.read_text() for one in here.rglob("*") if one.is_file()} == before


def test_results_may_take_the_place_of_those_of_a_run(here: Path) -> None:
    file = write(here, "collect: {output: out}\n")
    options = RunOptions(str(file), force=True)
    first = folder_of(options, resolve_config(file))
    assert first is not None
    first.begin("env: {}\n")
    with pytest.raises(ConfigError, match="still going on, as process"):
        folder_of(options, resolve_config(file))
    first.close()
    (here / "out" / "videos").symlink_to(here.parent / "elsewhere")
    with pytest.raises(UnreadableRunError, match="its videos is a link"):
        folder_of(options, resolve_config(file))
    (here / "out" / "videos").unlink()
    with pytest.raises(ConfigError, match="holds the results of another run"):
        folder_of(RunOptions(str(file)), resolve_config(file))
    second = folder_of(options, resolve_config(file))
    assert second is not None
    second.discard()


def test_who_runs_a_config_may_send_its_results_anywhere(here: Path, tmp_path: Path) -> None:
    file = write(here, "collect: {output: out}\n")
    wanted = str(tmp_path / "elsewhere" / "results")
    folder = folder_of(RunOptions(str(file), output=wanted), resolve_config(file))
    assert folder is not None
    assert folder.path == Path(wanted)
    folder.discard()
    resolved = resolve_config(file, set=[f"collect.output={wanted}"])
    folder = folder_of(RunOptions(str(file), force=True), resolved)
    assert folder is not None
    folder.discard()
    assert load_config({"collect": {"output": wanted}}).collect.output == wanted


def test_a_link_that_appears_after_the_config_was_read_is_seen(here: Path) -> None:
    file = write(here, "collect: {output: out}\n")
    resolved = resolve_config(file)
    (here / "out").symlink_to(here.parent / "elsewhere")
    with pytest.raises(ConfigError, match=r"^collect\.output is "):
        folder_of(RunOptions(str(file)), resolved)


RECORDED = """\
env:
  id: CartPole-v1
  wrappers:
    - {{path: gymnasium.wrappers.RecordVideo, kwargs: {{{kwargs}}}}}
"""


@pytest.mark.parametrize("path", ESCAPES)
def test_videos_of_wrappers_do_not_leave_it_either(here: Path, path: str) -> None:
    file = write(here, RECORDED.format(kwargs=f"video_folder: {path}"))
    with pytest.raises(ConfigError, match=r"^env\.wrappers\[0\]\.kwargs\.video_folder is "):
        load_config(file)


@pytest.mark.parametrize("prefix", ["../x", "/x", "a/b", "3", '"\\0"'])
def test_nor_do_the_names_of_videos(here: Path, prefix: str) -> None:
    file = write(here, RECORDED.format(kwargs=f"video_folder: videos, name_prefix: {prefix}"))
    with pytest.raises(ConfigError, match="name_prefix is "):
        load_config(file)


def test_videos_may_go_below_it(here: Path) -> None:
    file = write(here, RECORDED.format(kwargs="video_folder: videos, name_prefix: mine"))
    assert load_config(file).env.wrappers[0]["kwargs"]["video_folder"] == "videos"
    assert load_config(file, set=["env.wrappers=[]"]).env.wrappers == []


OUT_OF_IT = "x/../../../victim"


@pytest.mark.parametrize("env_id", [f'"{OUT_OF_IT}"', '"0"', "1.5", "true", "[0]"])
def test_files_that_count_builds_do_not_leave_it_by_the_env_id(here: Path, env_id: str) -> None:
    text = "env:\n  entry: envmgr.testing:FaultyEnv\n  kwargs: {{folder: counts, env_id: {}}}\n"
    with pytest.raises(ConfigError, match=r"^env\.kwargs\.env_id is .*must be an integer"):
        load_config(write(here, text.format(env_id)))
    assert load_config(write(here, text.format(3))).env.kwargs["env_id"] == 3


def test_an_env_that_fails_on_command_takes_no_text_as_its_env_id(here: Path) -> None:
    (here / "counts").mkdir()
    (here / "counts" / "builds-of-env-x").mkdir()
    with pytest.raises(TypeError, match="integer"):
        FaultyEnv(OUT_OF_IT, folder=str(here / "counts"))  # type: ignore[arg-type]
    assert not (here.parent / "victim").exists()
    (here.parent / "victim").write_text("mine")
    (here / "counts" / "builds-of-env-0").symlink_to(here.parent / "victim")
    with pytest.raises(OSError, match="it is a link"):
        FaultyEnv(0, folder=str(here / "counts"))
    assert (here.parent / "victim").read_text() == "mine"
