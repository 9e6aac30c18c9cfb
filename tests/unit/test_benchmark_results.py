"""Figures of the benchmarks are compared within a run, and never with those of another one."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Benchmarks = Callable[[str], Any]
RATIOS = ("2.00 x", "3.00 x", "4.00 x")
OURS, THEIRS = "base-arrays", "gymnasium-sync"


def of_a_run(benchmarks: Benchmarks, ratio: float, *cases: str) -> Any:
    """Return results in which a row of envmgr is `ratio` times as fast as one of Gymnasium."""
    cases_, results = benchmarks("cases"), benchmarks("results")
    found = results.Results()
    found.runs.append({"date": "2026-11-28", "rounds": 1, "cases": [*cases]})
    for case in cases:
        for row, rate in ((OURS, ratio), (THEIRS, 1.0), ("again", ratio), ("hosts2-arrays", 1.0)):
            figures = {results.STEPS_PER_S: rate * 1e3, **dict.fromkeys(results.CPU_US, 1.0)}
            found.add(cases_.Item(case, 1, row), 1, figures)
        found.leave_out(cases_.Item(case, 1, "pufferlib-serial"), "not installed")
    return found


def part_of_page(folder: Path, title: str) -> str:
    """Return the part of the page that has a title."""
    page = (folder / "README.md").read_text()
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_targets_are_those_of_their_own_run(benchmarks: Benchmarks, tmp_path: Path) -> None:
    report = benchmarks("report")

    def ratios() -> set[str]:
        parts = (part_of_page(tmp_path, name) for name in ("Targets", "Rows beside themselves"))
        return {ratio for part in parts for ratio in RATIOS if ratio in part}

    report.write(of_a_run(benchmarks, 2.0, "null"), tmp_path)
    assert ratios() == {"2.00 x"}
    report.write(of_a_run(benchmarks, 3.0, "null"), tmp_path, report.TARGETS)
    assert ratios() == {"3.00 x"}
    report.write(of_a_run(benchmarks, 4.0, "null"), tmp_path)
    assert ratios() == {"3.00 x"}
    assert report.read(tmp_path).ratio("null", 1, OURS, THEIRS) == 4.0


def test_targets_alone_say_where_they_were_measured(benchmarks: Benchmarks, tmp_path: Path) -> None:
    report, results = benchmarks("report"), of_a_run(benchmarks, 3.0, "null")
    results.machine["cpu"] = "a processor"
    report.write(results, tmp_path, report.TARGETS)
    assert "- a processor" in part_of_page(tmp_path, "Machine")


def test_nothing_stays_of_a_case_that_is_measured_again(benchmarks: Benchmarks) -> None:
    found = of_a_run(benchmarks, 2.0, "null", "cartpole")
    found.runs.append({"date": "2026-11-28", "rounds": 1, "cases": ["image"]})
    found.drop({"null", "image"})
    assert {m.case for m in found.measurements} == {"cartpole"}
    assert list(found.left_out) == ["cartpole n=1 pufferlib-serial"]
    assert [run["cases"] for run in found.runs] == [["cartpole"]]


@pytest.mark.parametrize(
    "part", [["--targets"], ["--rows", OURS], ["--n", "8"], ["--libraries", "envmgr"]]
)
def test_no_part_of_a_case_is_added(
    benchmarks: Benchmarks, part: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parse = benchmarks("run").parse
    assert parse(["--add", "--out", "there", "null"]).cases == ["null"]
    with pytest.raises(SystemExit):
        parse(["--add", "--out", "there", "null", *part])
    assert "--add takes whole cases" in capsys.readouterr().err


def test_what_is_measured_says_of_which_commit(
    benchmarks: Benchmarks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = benchmarks("machine")
    assert machine.when_text({"date": "2026-11-28"}) == "2026-11-28"  # before commits were noted
    text = machine.when_text({"date": "2026-11-28", "commit": "cd0d41d2"})
    assert text == "2026-11-28, commit cd0d41d2"
    if shutil.which("git") is None:
        pytest.skip("no git")
    module, measured = tmp_path / "benchmarks/machine.py", tmp_path / "envmgr/core.py"
    monkeypatch.setattr(machine, "__file__", str(module))
    for file in (module, measured):
        file.parent.mkdir()
        file.write_text("")
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "It")):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    commit = machine.when()["commit"]
    assert re.fullmatch("[0-9a-f]{8,}", commit)
    module.write_text("changed")
    assert machine.when()["commit"] == commit
    measured.write_text("changed")
    assert machine.when()["commit"] == f"{commit}+"
