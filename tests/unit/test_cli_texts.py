from __future__ import annotations

import errno
import io
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console

from envmgr.cli import check, main
from envmgr.cli.exit_codes import OutputGoneError, say
from envmgr.cli.figures import STDOUT, write_json
from envmgr.cli.listing import annotated_yaml
from envmgr.cli.progress import Goal, LiveProgress, LogLines, PlainProgress, Progress
from envmgr.cli.summary import Ending, print_summary, summary_of
from envmgr.cli.texts import (
    echo,
    error_text,
    failures_text,
    paragraph,
    print_table,
    raised_by_envs,
    stacks_in,
)
from envmgr.collect import Collector
from envmgr.config_file import load_config, resolve_config
from envmgr.errors import (
    EnvCrash,
    EnvManagerError,
    EnvRaised,
    EnvTimeout,
    FailuresExhaustedError,
    LaunchError,
)
from envmgr.testing.checkup import Finding, Level
from envmgr.texts import counted, env_ids_text, number
from tests.unit.collect_fakes import FakeManager, answer_zero


def raised(env_id: int) -> EnvRaised:
    trace = f"Traceback (most recent call last):\n  File env_{env_id}\nValueError: boom"
    return EnvRaised(
        f"env {env_id} raised ValueError: boom\n\nTraceback in its worker:\n{trace}",
        env_id=env_id,
        during="reset",
        type_name="ValueError",
        remote_message="boom",
        remote_traceback=f"{trace}\n",
    )


class TestParagraph:
    def test_leaves_the_tracebacks_of_envs_out(self) -> None:
        failures: dict[int, Any] = {0: raised(0), 2: raised(2)}
        text = "2 of 3 envs could not be launched:\n" + "\n".join(
            f"- {f}" for f in failures.values()
        )
        assert paragraph(LaunchError(text, failures)) == (
            "2 of 3 envs could not be launched: - env 0 raised ValueError: boom "
            "- env 2 raised ValueError: boom"
        )
        exhausted = FailuresExhaustedError(f"env 0 failed 4 times. First: {raised(0)}", raised(0))
        assert paragraph(exhausted) == "env 0 failed 4 times. First: env 0 raised ValueError: boom"
        assert paragraph(raised(1)) == "env 1 raised ValueError: boom"

    def test_of_a_crash_has_no_stacks(self) -> None:
        assert paragraph(crashed(2, 300)) == "the worker of env 2 died: killed by SIGSEGV"

    def test_of_an_error_without_text(self) -> None:
        assert paragraph(ValueError()) == "ValueError"

    def test_knows_who_raised(self) -> None:
        crash = EnvCrash("it died", env_id=1, during="step")
        assert raised_by_envs(LaunchError("", {1: crash})) == []
        failure = raised(0)
        assert raised_by_envs(LaunchError("", {0: failure, 1: crash})) == [failure]


class TestErrorText:
    """What is said to who gave a command."""

    def test_has_a_line_for_each_cause_of_a_launch(self) -> None:
        failures: dict[int, Any] = {0: raised(0), 2: crashed(2, 40)}
        causes = "\n".join(f"- {f}" for f in failures.values())
        error = LaunchError(f"2 of 3 - all told - could not:\n{causes}", failures)
        head, *lines = error_text(error).splitlines()
        assert head == "2 of 3 - all told - could not:"
        assert lines[:2] == [
            "  - env 0 raised ValueError: boom",
            "  - the worker of env 2 died: killed by SIGSEGV",
        ]
        assert lines[2:] == [*(f"    frame {i}" for i in range(6)), "    ... 34 more lines"]

    def test_has_what_each_crash_of_a_launch_has_left_below_its_own_cause(self) -> None:
        failures: dict[int, Any] = {2: crashed(2, 1), 4: raised(4), 5: crashed(5, 2)}
        causes = "\n".join(f"- {f}" for f in failures.values())
        more = "- and 2 more (envs 6, 7), in the `failures` of this error"
        error = LaunchError(f"5 of 8 could not:\n{causes}\n{more}", failures)
        assert error_text(error).splitlines()[1:] == [
            "  - the worker of env 2 died: killed by SIGSEGV",
            "    frame 0",
            "  - env 4 raised ValueError: boom",
            "  - the worker of env 5 died: killed by SIGSEGV",
            "    frame 0",
            "    frame 1",
            "  - and 2 more (envs 6, 7)",
        ]

    def test_of_a_crash_does_not_list_the_modules_that_were_loaded(self) -> None:
        tail = "Fatal Python error: Aborted\n\nframe 0\n\nExtension modules: numpy.a, numpy.b"
        crash = EnvCrash("it died", env_id=0, during="step", stderr_tail=f"{tail} (total: 2)")
        assert error_text(crash) == "it died\n    Fatal Python error: Aborted\n    frame 0"

    def test_of_a_spent_budget_names_what_a_command_can_do(self) -> None:
        text = "too many. Call reset({0: None})"
        error = FailuresExhaustedError(text, crashed(0, 1), exceeded="env 0 failed 4 times")
        said = error_text(error)
        assert said.startswith("env 0 failed 4 times. To go on")
        assert ". The first failure of env 0 that counted:\n" in said
        assert said.endswith("  the worker of env 0 died: killed by SIGSEGV\n    frame 0")
        assert "reset(" not in said

    def test_of_a_launch_says_where_envs_hung_or_called_sys_exit(self) -> None:
        stacks = (
            'Current thread 0x1 (most recent call first):\n  File "/me/game.py", line 21 in reset'
        )
        trace = (
            "Traceback (most recent call last):\n"
            '  File "/me/game.py", line 25, in __init__\n    licence()\n'
            f'  File "{os.path.dirname(os.__file__)}/argparse.py", line 9, in exit\n'
            "SystemExit: no licence\n"
        )
        failures: dict[int, Any] = {
            0: EnvTimeout(
                f"env 0 hung in its reset\n\nWhere it was:\n{stacks}",
                **about(0, limit_s=2, stacks=stacks),
            ),
            1: EnvCrash(
                f"env 1 called sys.exit('no')\n\nTraceback in its worker:\n{trace.rstrip()}",
                **about(1, remote_traceback=trace),
            ),
        }
        causes = "\n".join(f"- {f}" for f in failures.values())
        error = LaunchError(f"2 of 3 could not:\n{causes}", failures)
        assert error_text(error).splitlines()[1:] == [
            "  - env 0 hung in its reset, at game.py:21 in reset",
            "  - env 1 called sys.exit('no'), at game.py:25 in __init__",
        ]
        assert paragraph(failures[0]) == "env 0 hung in its reset, at game.py:21 in reset"
        assert stacks_in(error) == [stacks, trace.rstrip()]

    def test_of_what_a_crash_has_caused_has_its_last_lines_as_lines(self) -> None:
        crash = crashed(0, 40)
        error = EnvManagerError(f"nothing was written. The first: {paragraph(crash)}")
        error.__cause__ = crash
        head, *lines = error_text(error).splitlines()
        assert head.endswith("The first: the worker of env 0 died: killed by SIGSEGV")
        assert lines == [*(f"    frame {i}" for i in range(6)), "    ... 34 more lines"]

    def test_of_long_lines(self) -> None:
        crash = EnvCrash("it died", env_id=0, during="step", stderr_tail="x" * 3500)
        assert max(map(len, error_text(crash).splitlines())) < 130


def about(env_id: int, **more: Any) -> dict[str, Any]:
    return {"env_id": env_id, "during": "reset", **more}


def crashed(env_id: int, n_frames: int) -> EnvCrash:
    tail = "".join(f"frame {i}\n\n" for i in range(n_frames))
    text = f"the worker of env {env_id} died: killed by SIGSEGV\n\nThe end of its stderr:\n{tail}"
    return EnvCrash(text, env_id=env_id, during="step", stderr_tail=tail)


class TestFigures:
    def test_lines_of_a_table_are_as_long_as_what_is_in_them(self) -> None:
        shown = io.StringIO()
        print_table(Console(file=shown, width=200), (), [("a", "x" * 90), ("b", "1")])
        assert max(map(len, shown.getvalue().splitlines()[2:])) < 10

    def test_env_ids(self) -> None:
        assert env_ids_text([3]) == "env 3"
        assert env_ids_text([9, 8, 0, 1, 2, 3]) == "envs 0 to 3, 8, 9"

    def test_failures(self) -> None:
        stats = {"failures": 3, "failures_by_kind": {"EnvCrash": 3}}
        by_env = {5: 1, 1: 1, 4: 1}
        assert failures_text({**stats, "failures_by_env": by_env}) == (
            "3 failures: EnvCrash x3 (envs 1, 4, 5)"
        )
        uneven = failures_text({**stats, "failures_by_env": {5: 1, 1: 2, 4: 2}})
        assert uneven.endswith("(envs 1, 4, 5; most often env 1, twice)")
        one = {"failures": 1, "failures_by_kind": {"EnvTimeout": 1}, "failures_by_env": {7: 1}}
        assert failures_text(one) == "1 failure: EnvTimeout x1 (env 7)"
        killed = {"failures": 4, "failures_by_kind": {"unknown": 4}, "failures_by_env": {}}
        assert failures_text(killed) == "4 failures: unknown x4"
        assert failures_text({"failures": 0}) == failures_text({}) == "0"

    def test_of_a_run_list_envs_in_their_order(self) -> None:
        failures = {"failures": 3, "failures_by_kind": {"EnvCrash": 3}}
        stats = {**failures, "failures_by_env": {10: 1, 9: 2}, "swaps": 1234}
        stats["latency"] = {
            "reset": {"count": [2.0, 0.0], "mean": [0.5, None]},
            "step": {"count": [10.0, 20.0], "mean": [0.1, 0.1]},
        }
        manager: Any = SimpleNamespace(stats=lambda: stats)
        summary = summary_of(
            None, manager, ending=Ending.DONE, error=None, states={"DONE": 11}, about={}
        )
        shown = io.StringIO()
        print_summary(Console(file=shown, width=200), summary, title="a run", where=None)
        assert "(envs 9, 10; most often env 9, twice)" in shown.getvalue()
        assert "last part" not in shown.getvalue()
        assert "2 resets took 1 s: 25% of the envs' own time" in shown.getvalue()
        assert "1,234 (a spare took an env's place)" in shown.getvalue()
        shown.truncate(0)
        resumed = {**summary, "resumed": [{"at": "noon"}]}
        print_summary(Console(file=shown, width=200), resumed, title="a run", where=None)
        assert "25% of the envs' own time (of the last part)" in shown.getvalue()
        assert "(a spare took an env's place) (of the last part)" in shown.getvalue()
        written = json.loads(json.dumps(summary, allow_nan=False))
        assert written["stats"]["failures_by_env"] == {"10": 1, "9": 2}

    def test_numbers(self) -> None:
        assert [number(None), number(1234.5), number([1.0, None])] == ["-", "1,234.50", "[1.00, -]"]
        assert [counted(1, "episode"), counted(2000, "step")] == ["1 episode", "2,000 steps"]


class TestAnnotatedYaml:
    def test_is_a_config_itself(self, tmp_path: Any) -> None:
        file = tmp_path / "c.yaml"
        file.write_text(
            "env:\n  id: CartPole-v1\n  kwargs: {text: 'a # b', sentence: 'word %s'}\n"
            "  wrappers: [{path: gymnasium.wrappers.TimeLimit, kwargs: {max_episode_steps: 5}}]\n"
            "manager: {type: async_subprocess, env_num: 2, seed: {1: 5}}\n"
            % ("long " * 40 + ": # x")
        )
        resolved = resolve_config(file, set=["manager.env_num=3"])
        text = annotated_yaml(resolved.values, resolved.origins)
        again = tmp_path / "again.yaml"
        again.write_text(text)
        assert load_config(again) == resolved.values
        lines = [line.split("  # ") for line in text.splitlines()]
        shown = {line[0].strip(): line[1] for line in lines if len(line) == 2}
        assert shown["env_num: 3"] == "set"
        assert shown["id: CartPole-v1"] == shown["1: 5"] == f"file {file}"
        assert shown["wait_num: 2"] == "kind async_subprocess"
        assert shown["auto_reset: true"] == "default"

    def test_keys_that_are_no_plain_words_are_read_back_as_they_are(self, tmp_path: Any) -> None:
        file = tmp_path / "c.yaml"
        file.write_text(
            "env:\n  id: CartPole-v1\n  kwargs:\n    prices: {2020-01-01: 5}\n"
            "    devices: {'cuda:0': {mem: 1}, 3: {'a: b': 2}, true: {x: null}}\n"
        )
        resolved = resolve_config(file)
        again = tmp_path / "again.yaml"
        again.write_text(annotated_yaml(resolved.values, resolved.origins))
        assert load_config(again) == resolved.values

    def test_every_value_has_its_origin(self) -> None:
        resolved = resolve_config({"env": {"id": "X"}, "manager": {"seed": [1, 2]}})
        text = annotated_yaml(resolved.values, resolved.origins)
        assert text.count("# ") == len(resolved.origins)
        assert yaml.safe_load(text)["manager"]["seed"] == [1, 2]


class Lines(Progress):
    def __init__(self) -> None:
        super().__init__(Goal(1, "steps"))
        self.lines: list[str] = []

    def tick(self) -> None: ...

    def log(self, line: str) -> None:
        self.lines.append(line)


class TestLogLines:
    def logged(self, *records: tuple[int, Any], **options: Any) -> list[str]:
        lines = Lines()
        handler = LogLines(lines, **options)
        handler.launching = False
        logger = logging.Logger("test")
        logger.addHandler(handler)
        for level, message in records:
            logger.log(level, "%s", message)
        return lines.lines

    def test_are_one_line_each(self) -> None:
        failure = EnvCrash(
            "env 1 raised: boom\nsecond\n\nTraceback:\n  File x", env_id=1, during=""
        )
        found = self.logged((logging.WARNING, failure), (logging.ERROR, "b"), (logging.INFO, "c"))
        assert found == ["warning: env 1 raised: boom second", "error: b"]

    def test_say_where_an_env_hung_or_crashed(self) -> None:
        stacks = (
            'Thread 0x1 (most recent call first):\n  File "/me/other.py", line 1 in other\n\n'
            "Current thread 0x2 (most recent call first):\n"
            f'  File "{os.path.dirname(os.__file__)}/threading.py", line 3 in wait\n'
            '  File "/me/crashy.py", line 35 in lost_in_a_loop\n'
            '  File "/me/crashy.py", line 9 in step'
        )
        hung = EnvTimeout("env 5 hung\n\nx", env_id=5, during="step", limit_s=2, stacks=stacks)
        died = EnvCrash("env 6 died", env_id=6, during="step", stderr_tail=f"Fatal\n\n{stacks}")
        unknown = EnvTimeout("env 7 hung", env_id=7, during="step", limit_s=2, stacks="no stacks")
        awaits = (
            '  File "/me/game.py", line 4, in step\n    await self.ask()\n'
            '  File "/me/game.py", line 8, in ask\n    await asyncio.sleep(9)\n'
            f'  File "{os.path.dirname(os.__file__)}/asyncio/tasks.py", line 649, in sleep\n'
        )
        waits = EnvTimeout("env 8 hung", env_id=8, during="step", limit_s=2, stacks=awaits)
        found = self.logged(*((logging.WARNING, one) for one in (hung, died, unknown, waits)))
        assert found == [
            "warning: env 5 hung, at crashy.py:35 in lost_in_a_loop",
            "warning: env 6 died, at crashy.py:35 in lost_in_a_loop",
            "warning: env 7 hung",
            "warning: env 8 hung, at game.py:8 in ask",
        ]

    def test_are_whole_if_wanted(self) -> None:
        (line,) = self.logged((logging.WARNING, raised(1)), traceback=True)
        assert "File env_1" in line

    def test_leave_to_the_end_what_the_run_ends_with(self) -> None:
        assert self.logged((logging.ERROR, FailuresExhaustedError("spent", raised(1)))) == []
        lines = Lines()
        handler = LogLines(lines)
        for about in (raised(1), "launch has been waiting for 30 s"):
            handler.handle(logging.makeLogRecord({"levelno": 30, "msg": "%s", "args": (about,)}))
        assert len(lines.lines) == 1


class Gone(io.StringIO):
    """A terminal that may go, or a full disk."""

    error: OSError | None = None

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


class TestProgress:
    def collector(self, n_steps: int = 0) -> Collector:
        collector = Collector(FakeManager([[2], [3]]), answer_zero)  # type: ignore[arg-type]
        if n_steps:
            collector.collect(steps=n_steps)
        return collector

    def test_plain_lines_come_when_it_is_time(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [100.0]
        monkeypatch.setattr("envmgr.cli.progress.monotonic", lambda: now[0])
        progress = PlainProgress(Goal(50, "steps"))
        collector = self.collector()
        progress.start(collector)
        for moment in (101.0, 104.9, 105.0, 105.1, 109.9, 110.0):
            now[0] = moment
            collector.collect(steps=10)
            progress.tick()
        progress.stop()
        progress.tick()
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(" s ")[0].strip() for line in lines] == ["5.0", "10.0"]
        assert "30 steps  6 steps/s  12 episodes  mean return 4.25  RUN 2  0 failures" in lines[0]

    def test_of_a_run_that_was_resumed_counts_failures_on(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [100.0]
        monkeypatch.setattr("envmgr.cli.progress.monotonic", lambda: now[0])
        progress = PlainProgress(Goal(50, "steps"))
        progress.failures_before = 7
        progress.start(self.collector())
        now[0] = 105.0
        progress.tick()
        assert "7 failures" in capsys.readouterr().out

    @pytest.mark.parametrize("width", [30, 40, 80, 200])
    def test_the_live_display_fits(self, width: int) -> None:
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, width=width, color_system=None)
        progress = LiveProgress(Goal(100, "steps"), console)
        progress.start(self.collector(20))
        progress.log("warning: [bold]env 1[/bold] died")
        progress.tick()
        progress.stop()
        text = out.getvalue()
        assert "warning: [bold]env 1[/bold] died" in text
        for figure in ("20 steps", "8 episodes", "mean return", "RUN 2", "0 failures"):
            assert figure in text
        assert "20/100 steps" in text

    @pytest.mark.parametrize("goes_at", [0, 1])
    def test_a_terminal_that_has_gone_ends_no_run(self, goes_at: int) -> None:
        out = Gone()
        console = Console(file=out, force_terminal=True, width=80)
        progress = LiveProgress(Goal(50, "steps"), console)
        progress._live.auto_refresh = False  # no thread: when it looks is left to chance
        handler = LogLines(progress)
        handler.launching = False
        for step in range(2):
            if step == goes_at:
                out.error = OSError(errno.EIO, "Input/output error")
            if step == 0:
                progress.start(self.collector(20))
        handler.handle(logging.makeLogRecord({"levelno": 30, "msg": "env 1 died"}))
        progress.tick()
        progress.stop()
        assert progress._collector is None

    def test_a_terminal_without_the_characters_shows_their_codes(self) -> None:
        raw = io.BytesIO()
        out = io.TextIOWrapper(raw, encoding="ascii")
        progress = LiveProgress(
            Goal(50, "steps"), Console(file=out, force_terminal=True, width=80, color_system=None)
        )
        progress.start(self.collector(20))
        progress.log("warning: env 1 says \xe9\ud800")
        progress.log("warning: env 2 died")
        progress.stop()
        assert b"env 1 says \\xe9\\ud800" in raw.getvalue()
        assert b"env 2 died" in raw.getvalue()

    def test_a_full_disk_ends_no_run_and_a_reader_that_goes_away_does(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("envmgr.cli.progress.LINE_EVERY_S", 0.0)
        out = Gone()
        monkeypatch.setattr("sys.stdout", out)
        progress = PlainProgress(Goal(50, "steps"))
        progress.start(self.collector(20))
        out.error = OSError(errno.ENOSPC, "No space left on device")
        progress.tick()
        out.error = None
        progress.tick()
        assert "20 steps" in out.getvalue()
        out.error = BrokenPipeError()
        with pytest.raises(OutputGoneError):
            progress.tick()


def test_figures_that_are_not_finite_are_null_in_files(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    inf = float("inf")
    figures = {"low": -inf, "rows": [inf, float("nan"), 0.1, 1 << 70], "text": "Infinity \ud800"}
    write_json(STDOUT, figures)
    assert json.loads(capsys.readouterr().out, parse_constant=refuse) == {
        "low": None,
        "rows": [None, None, 0.1, 1 << 70],
        "text": "Infinity \ud800",
    }


ODD = "\x1b]0;owned\x07\x1b[2J\x9b1m\u202e\u061c\u200b\u2060\ufeff"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b1m\u202e\u061c\u200b\u2060\ufeff"


class TestTheTerminalIsNotCommanded:
    def printed(self, capsys: pytest.CaptureFixture[str]) -> str:
        captured = capsys.readouterr()
        text = captured.out + captured.err
        assert SHOWN in text
        assert all(letter == "\n" or letter.isprintable() for letter in text)
        return text

    @pytest.mark.parametrize("err", [False, True])
    def test_by_last_words_and_others(self, err: bool, capsys: pytest.CaptureFixture[str]) -> None:
        say(f"error: {ODD}", err=err)
        echo(ODD, err=err)
        self.printed(capsys)

    def test_by_progress(self, capsys: pytest.CaptureFixture[str]) -> None:
        for progress in (
            PlainProgress(Goal(50, "steps")),
            LiveProgress(Goal(50, "steps"), Console(width=1000)),
        ):
            progress.log(f"warning: {ODD}")
            self.printed(capsys)

    def test_by_tables(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_table(Console(width=1000), ("failures",), [(ODD,)])
        self.printed(capsys)

    def test_by_findings(self, capsys: pytest.CaptureFixture[str]) -> None:
        check._print(Finding("spaces", Level.PROBLEM, f"{ODD}\n{ODD}", ODD))
        self.printed(capsys)

    def test_by_events_of_a_timeline(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        event = {"ph": "X", "cat": "env", "name": f"{ODD}\nenv step", "dur": 1.0}
        found = {"otherData": {"envmgr_trace": 1}, "traceEvents": [event]}
        (tmp_path / "trace.json").write_text(json.dumps(found))
        assert main(["trace", str(tmp_path / "trace.json")]) == 0
        assert len(self.printed(capsys).splitlines()) == 2

    def test_by_errors_of_a_config(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = json.dumps({"manager": {"worker_env": {"set": {f"A{ODD}": "1"}}}})
        (tmp_path / "config.yaml").write_text(text)
        assert main(["show", str(tmp_path / "config.yaml")]) == 2
        self.printed(capsys)

    def test_by_a_config_that_stays_one_in_a_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, kwargs = tmp_path / "config.yaml", {"goal": f"a{ODD}\u202eb", "name": "a\u202eb"}
        path.write_text(json.dumps({"env": {"id": "CartPole-v1", "kwargs": kwargs}}))
        assert main(["show", str(path)]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["env"]["kwargs"] == kwargs
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        assert main(["show", str(path)]) == 0
        text = capsys.readouterr().out
        assert all(letter == "\n" or letter.isprintable() for letter in text)
