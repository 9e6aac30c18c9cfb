"""Reports: from the folder of a run to a page, whatever is in the folder."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from envmgr.cli.report import execute
from envmgr.config import MAX_ENV_NUM
from envmgr.errors import ConfigError, UnreadableRunError
from envmgr.reporting.charts import lines, times
from envmgr.reporting.figures import MOST_ENVS, MOST_POINTS, figures_of
from envmgr.reporting.files import Sample
from envmgr.reporting.folder import MOST_FAILURES, MOST_OF_A_TEXT, read_run
from envmgr.reporting.pictures import MOST_BYTES, pictures_in
from envmgr.untrusted import opened_file

# Found, not imported: the product takes back what importing it does to `sys.meta_path`.
pytestmark = pytest.mark.skipif(find_spec("pygal") is None, reason="pygal is not installed")

FILES = ("config.yaml", "episodes.jsonl", "samples.jsonl", "summary.json")
PNG = b"\x89PNG\r\n\x1a\n"


def episode(number: int, **changes: Any) -> dict[str, Any]:
    n = number % 40
    return {
        "episode": number,
        "env_id": number % 4,
        "return": float(n),
        "length": 20,
        "terminated": True,
        "truncated": False,
        "abnormal": False,
        "failure": None,
        "ended_s": 0.01 * number,
        **changes,
    }


def sample(at: int, **changes: Any) -> Sample:
    figures: dict[str, Any] = {
        "elapsed_s": float(at),
        "steps": 1000 * at,
        "failures": 0,
        "policy_s": 0.1 * at,
        "trainer_cpu_s": 0.3 * at,
        "trainer_queued_s": 0.05 * at,
        "env_step_s": 1.0 * at,
        "env_reset_s": 0.5 * at,
        "workers": 2,
        "workers_s": 2.0 * at,
        "workers_cpu_s": 1.6 * at,
        "workers_queued_s": 0.2 * at,
        "trainer_bytes": 50_000_000,
        "workers_bytes": 80_000_000 + at,
        "largest_bytes": 40_000_000,
    }
    return Sample(**{**figures, **changes})


def latency(step_s: list[float]) -> dict[str, Any]:
    names = ("mean", "p50", "p90", "p99", "max")
    return {"count": [100.0] * len(step_s), **dict.fromkeys(names, step_s)}


def summary(**changes: Any) -> dict[str, Any]:
    return {
        "ending": "done",
        "error": None,
        "config": "c.yaml",
        "env": "CartPole-v1",
        "manager": "subprocess",
        "env_num": 4,
        "seed": [1, None],
        "policy": "random",
        "began_at": "2026-01-01T00:00:00+00:00",
        "versions": {"envmgr": "0.1.0"},
        "steps": 4000,
        "elapsed_s": 4.0,
        "steps_per_s": 1000.0,
        "episodes": 200,
        "abnormal_episodes": 0,
        "return": {"mean": 19.5, "mean_of_last_100": 19.0},
        "length": {"mean": 20.0},
        "stats": {
            "num_workers": 2,
            "failures": 0,
            "failures_by_kind": {},
            "failures_by_env": {},
            "latest_failures": [],
            "latency": {
                "step": latency([1e-4, 1.1e-4, 1e-3, 0.9e-4]),
                "reset": latency([0.01] * 4),
            },
        },
        **changes,
    }


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    def make(
        name: str = "run",
        episodes: list[dict[str, Any]] | None = None,
        samples: list[Sample] | None = None,
        **changes: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        episodes = [episode(i) for i in range(200)] if episodes is None else episodes
        samples = [sample(i) for i in range(5)] if samples is None else samples
        lines = "".join(json.dumps(one) + "\n" for one in episodes)
        (folder / "episodes.jsonl").write_text(lines)
        encoded = b"".join(msgspec.json.encode(one) + b"\n" for one in samples)
        (folder / "samples.jsonl").write_bytes(encoded)
        (folder / "summary.json").write_text(json.dumps(summary(**changes)))
        (folder / "config.yaml").write_text("manager: {type: subprocess}\n")
        return folder

    return make


class Seen(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def seen(page: Path) -> Seen:
    found = Seen(page.read_text())
    assert not {"script", "iframe", "object", "embed", "link", "base", "form"} & {*found.tags}
    for name, value in found.attributes:
        assert not name.startswith("on")
        if name in ("src", "href", "xlink:href", "srcset", "action"):
            assert str(value).startswith("data:")
    assert "url(" not in page.read_text()
    policies = [v for name, v in found.attributes if name == "content" and "default-src" in str(v)]
    assert policies == [
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:"
    ]
    return found


class TestFigures:
    def test_are_those_of_the_files(self, make_run: Callable[..., Path]) -> None:
        found = figures_of(read_run(make_run()))
        assert found["unread"] == []
        assert found["summary"]["steps"] == 4000
        over_time = found["episodes_over_time"]
        assert sum(over_time["episodes"]) == 200
        assert max(over_time["elapsed_s"]) <= 1.99
        counted = zip(over_time["episodes"], over_time["return_mean"], strict=True)
        assert sum(n * mean for n, mean in counted) / 200 == pytest.approx(19.5, rel=1e-4)
        assert set(over_time["length_p90"]) == {20.0}
        assert found["samples_over_time"]["steps_per_s"] == [1000.0] * 4
        assert found["memory"]["largest_worker_mb"] == 40.0

    def test_say_where_the_time_went(self, make_run: Callable[..., Path]) -> None:
        time = figures_of(read_run(make_run()))["time"]
        # of 4 s, and of 8 s of two workers
        assert time["trainer"] == pytest.approx(
            {"policy": 0.4, "envmgr": 0.8, "queued": 0.2, "waiting": 2.6}
        )
        assert time["workers"] == pytest.approx(
            {
                "env steps": 4.0,
                "env resets": 2.0,
                "envmgr": 0.4,
                "waiting": 1.6,
                "of it queued": 0.8,
            }
        )

    def test_of_envs_in_the_trainer_are_in_its_time(self, make_run: Callable[..., Path]) -> None:
        samples = [
            sample(i, trainer_cpu_s=1.7 * i, workers_s=0.0, elapsed_s=2.0 * i) for i in range(5)
        ]
        time = figures_of(read_run(make_run(manager="base", samples=samples)))["time"]
        assert "workers" not in time
        parts = {"policy": 0.4, "env steps": 4.0, "env resets": 2.0, "envmgr": 0.4}
        assert time["trainer"] == pytest.approx({**parts, "queued": 0.2, "waiting": 1.0})

    def test_have_no_rate_of_the_last_moment(self, make_run: Callable[..., Path]) -> None:
        samples = [*(sample(i) for i in range(5)), sample(4, elapsed_s=4.01)]
        over_time = figures_of(read_run(make_run(samples=samples)))["samples_over_time"]
        assert over_time["elapsed_s"] == [1.0, 2.0, 3.0, 4.01]
        assert min(over_time["steps_per_s"]) > 980

    def test_name_stragglers(self, make_run: Callable[..., Path]) -> None:
        found = figures_of(read_run(make_run()))
        assert [one["env_id"] for one in found["stragglers"]["envs"]] == [2]
        assert found["stragglers"]["envs"][0]["times_the_median"] == pytest.approx(1e-3 / 1.05e-4)
        assert [env["env_id"] for env in found["envs"]] == [2, 1, 0, 3]

    def test_name_no_straggler_for_what_does_not_matter(
        self, make_run: Callable[..., Path]
    ) -> None:
        def named(means: list[float], **quantiles: list[float]) -> list[int]:
            steps = {**latency([1e-4] * 4), "mean": means, **quantiles}
            run = make_run(f"run {len(tried)}", stats={"latency": {"step": steps}})
            tried.append(run)
            return [one["env_id"] for one in figures_of(read_run(run))["stragglers"]["envs"]]

        tried: list[Path] = []
        longer = {"p99": [1e-4, 1e-4, 1e-4, 4e-3]}
        assert named([1e-5, 1e-5, 1e-5, 9e-5], **longer) == [], "nine times as long: 80 us"
        assert named([1e-4, 1e-4, 1e-4, 2.1e-4]) == [], "of one step in the midst of many"
        assert named([1e-4, 1e-4, 1e-4, 2.1e-4], **longer) == [3]
        assert named([1e-2, 1e-2, 1e-2, 1.4e-2], **longer) == [], "as envs differ"
        assert named([0.0] * 4) == []

    def test_have_failures_of_episodes_and_others_once(self, make_run: Callable[..., Path]) -> None:
        lost = episode(7, abnormal=True, failure="env 3 died\n\nstack")
        stats = {
            "failures": 3,
            "failures_by_kind": {"EnvCrash": 3},
            "latest_failures": ["env 3 died\n\nstack", "env 1 could not be reset"],
        }
        failures = figures_of(read_run(make_run(episodes=[lost], stats=stats)))["failures"]
        assert failures["count"] == 3
        assert failures["left_out"] == 1
        assert failures["shown"] == [
            {"env_id": 3, "elapsed_s": 0.07, "text": "env 3 died\n\nstack"},
            {"env_id": None, "elapsed_s": None, "text": "env 1 could not be reset"},
        ]

    def test_say_when_envs_failed(self, make_run: Callable[..., Path]) -> None:
        lost = [episode(7, abnormal=True, ended_s=at) for at in (2.5, 0.5)]
        counts = (0, 1, 1, 3, 4)  # between the last ones, a reset
        samples = [sample(i, failures=n) for i, n in enumerate(counts)]
        run = read_run(make_run(episodes=[episode(1), *lost], samples=samples))
        assert figures_of(run)["failures"]["elapsed_s"] == [0.5, 2.5, 4.0]
        many = [episode(i, abnormal=True, ended_s=float(i)) for i in range(1000)]
        shown = figures_of(read_run(make_run("many", episodes=many)))["failures"]["elapsed_s"]
        assert (shown[0], shown[-1], len(shown)) == (0.0, 999.0, 150)

    def test_of_a_long_run_are_few(self, make_run: Callable[..., Path]) -> None:
        stats = {"latency": {"step": latency([1e-4] * 1000), "reset": latency([1e-4] * 1000)}}
        samples = [sample(i) for i in range(2000)]
        run = make_run(episodes=[], samples=samples, stats=stats, env_num=1000)
        line = (
            json.dumps(episode(0, env_id=1, ended_s=2.5)).replace("1,", "%d,").replace("2.5", "%f")
        )
        with open(run / "episodes.jsonl", "w") as file:
            file.writelines(f"{line}\n" % (i % 1000, i * 0.01) for i in range(50_000))  # 10^6 steps
        page = execute([str(run)], None)
        assert page.stat().st_size < 1_000_000
        figures = json.loads((run / "report.json").read_text())
        assert len(figures["episodes_over_time"]["elapsed_s"]) == MOST_POINTS
        assert len(figures["samples_over_time"]["elapsed_s"]) == MOST_POINTS
        assert (len(figures["envs"]), figures["envs_left_out"]) == (MOST_ENVS, 1000 - MOST_ENVS)
        seen(page)


class TestPage:
    def test_has_everything_and_loads_nothing(self, make_run: Callable[..., Path]) -> None:
        run = make_run(ending="failed", error="no env is left")
        page = execute([str(run)], None)
        assert page == run / "report.html"
        found = seen(page)
        for text in ("the run failed: no env is left", "Stragglers: env 2", "type: subprocess"):
            assert text in found.text
        assert found.tags.count("svg") == 7
        assert json.loads((run / "report.json").read_text()) == figures_of(read_run(run))

    def test_draws_what_is_zero_and_not_what_there_is_none_of(
        self, make_run: Callable[..., Path]
    ) -> None:
        samples = [sample(i, workers=0, workers_bytes=0, largest_bytes=0) for i in range(5)]
        episodes = [episode(i, **{"return": 0.0}) for i in range(9)]
        page = execute([str(make_run(episodes=episodes, samples=samples))], None)
        found = seen(page)
        assert "nothing was recorded" not in found.text
        assert "largest worker" not in found.text

    def test_shows_what_envs_write_and_no_more(self, make_run: Callable[..., Path]) -> None:
        text = (
            "</pre><script>alert(1)</script><img src=x onerror=alert(2)> &lt;b&gt; \" ' "
            "]]> <!-- \x00\x1b[31m\u202e\ud800 <svg/onload=alert(3)>\n  File 'a.py', line 3"
        )
        lost = [episode(i, abnormal=True, failure=text) for i in range(3)]
        changes = dict.fromkeys(("env", "policy", "error", "ending"), text)
        run = make_run(episodes=lost, versions={text: text}, **changes)
        (run / "config.yaml").write_text(text, errors="replace")
        found = seen(execute([str(run)], None))
        assert "</pre><script>alert(1)</script><img src=x onerror=alert(2)> &lt;b&gt;" in found.text
        assert "\\x00\\x1b[31m\\u202e\\ud800 <svg/onload=alert(3)>\n  File" in found.text
        other = run.parent / "<svg onload=alert(4)>&amp;"
        shutil.copytree(run, other)
        out = run.parent / "two.html"
        assert "<svg onload=alert(4)>&amp;" in seen(execute([str(run), str(other)], str(out))).text

    def test_leaves_nothing_behind(self, make_run: Callable[..., Path]) -> None:
        execute([str(make_run())], None)
        assert not [one for one in sys.meta_path if type(one).__module__.startswith("pygal")]

    def test_compares_runs(self, make_run: Callable[..., Path], tmp_path: Path) -> None:
        runs = [make_run(name) for name in ("one", "two", "three")]
        (runs[1] / "config.yaml").write_text("manager: {type: base}\n")
        page = execute([*map(str, runs), str(runs[0])], str(tmp_path / "all.html"))
        found = seen(page)
        assert "-manager: {type: subprocess}\n+manager: {type: base}" in found.text
        assert "the same" in found.text
        figures = json.loads((tmp_path / "all.json").read_text())
        assert list(figures["runs"]) == ["one", "two", "three", "one (2)"]

    def test_says_what_draws_it_where_that_is_missing(
        self, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pygal", None)
        found = seen(execute([str(make_run())], None))
        assert "pip install pygal" in found.text
        assert "Stragglers: env 2" in found.text

    def test_has_the_newest_pictures_that_fit(self, make_run: Callable[..., Path]) -> None:
        run = make_run()
        (run / "videos").mkdir()
        for age, (name, size) in enumerate(
            [("new.png", 10), ("big.mp4", MOST_BYTES), ("old.mp4", 9)]
        ):
            path = run / "videos" / name
            path.write_bytes(PNG + b"\0" * size)
            os.utime(path, (1e9 - age, 1e9 - age))
        (run / "videos/link.png").symlink_to("/etc/passwd")
        assert [(one.name, bool(one.data)) for one in pictures_in(run)] == [
            ("videos/new.png", True),
            ("videos/big.mp4", False),
            ("videos/old.mp4", True),
        ]
        began_at = "2001-09-09T03:46:39+02:00"  # 1e9 - 1 seconds after 1970
        (run / "run.json").write_text(json.dumps({"began_at": began_at}))
        began_s = read_run(run).began_s
        assert [one.name for one in pictures_in(run, began_s)] == [
            "videos/new.png",
            "videos/big.mp4",
        ]
        found = seen(execute([str(run)], None))
        assert found.tags.count("img") == 1
        assert found.tags.count("video") == 0
        for unknown in ("{", "{}", '{"began_at": "soon"}', '{"began_at": "0001-01-01T00:00:00"}'):
            (run / "run.json").write_text(unknown)
            found = seen(execute([str(run)], None))
            assert found.tags.count("img") == found.tags.count("video") == 1


def test_a_run_that_was_killed_has_a_report(make_run: Callable[..., Path]) -> None:
    run = make_run()
    (run / "summary.json").unlink()
    (run / "process.json").touch()
    with open(run / "episodes.jsonl", "a") as file:
        file.write('{"episode": 200, "env_id":')
    found = figures_of(read_run(run))
    assert found["goes_on"]
    assert found["summary"]["steps"] == 4000
    assert found["unread"] == [
        "1 of 201 lines of episodes.jsonl cannot be read; the first, line 201: Expecting value: "
        "line 1 column 27 (char 26)",
        "the run has not ended, or was killed: there is no summary.json",
    ]
    assert "cannot be read" in seen(execute([str(run)], None)).text


class TestBadInput:
    def test_no_folder_of_a_run(self, tmp_path: Path) -> None:
        with pytest.raises(UnreadableRunError, match="is no folder of a run"):
            read_run(tmp_path)
        with pytest.raises(UnreadableRunError, match=r"is no episode log: .* Give one, or the fol"):
            read_run(__file__)
        for other in (tmp_path / "none", "nul\0"):
            with pytest.raises(UnreadableRunError, match=r"cannot be read: .* Give the folder"):
                read_run(other)

    @pytest.mark.parametrize(
        "text", ["", "{}", "[1, 2]", '{"traceEvents": []}', "\0\xff", "[" * 9999]
    )
    def test_foreign_files(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "summary.json").write_text(text)
        (tmp_path / "episodes.jsonl").write_text(text + "\n")
        with pytest.raises(UnreadableRunError, match=r"(?s)nothing can be read.*summary\.json is"):
            read_run(tmp_path)

    def test_what_is_no_file_is_not_waited_for(self, make_run: Callable[..., Path]) -> None:
        run = make_run()
        for name in FILES:
            (run / name).unlink()
            os.mkfifo(run / name)
        with pytest.raises(UnreadableRunError, match="it is no file"):
            read_run(run)

    def test_lines_and_values_that_no_run_writes(self, make_run: Callable[..., Path]) -> None:
        run = make_run()
        odd = ['"x"', "5", "x" * (1 << 21), json.dumps(episode(1, env_id=-1)), "\ud800"]
        odd += [json.dumps(episode(1)).replace("0.01", text) for text in ("1e999", "NaN")]
        good = [episode(1, **{"return": value}) for value in (1e308, None, [1.0, None], [])]
        lines = [*odd, *map(json.dumps, good)]
        (run / "episodes.jsonl").write_text("\n".join(lines), errors="surrogatepass")
        found = figures_of(read_run(run))
        assert sum(found["episodes_over_time"]["episodes"]) == 4
        assert re_found("9 of 13 lines of episodes.jsonl", found["unread"])
        seen(execute([str(run)], None))

    def test_places_that_cannot_be_written(self, make_run: Callable[..., Path]) -> None:
        with pytest.raises(ConfigError, match="the report cannot be written"):
            execute([str(make_run())], "/proc/nowhere/x.html")

    @pytest.mark.parametrize(
        ("runs", "out", "said"),
        [
            (["log.json"], None, "replace 'log.html', which"),
            (["log.html"], None, "replace 'log.html', which"),
            (["log.json", "run"], "log.htm", "replace 'log.json', which"),
            (["log.json", "run"], "./link.html", "replace 'link.json', which"),
            (["log.json"], "log.json", "cannot be 'log.json', which is where the figures go"),
            (["run"], "page.json", "cannot be 'page.json', which is where the figures go"),
            (["run"], "run", "cannot be 'run', which is a folder"),
            (["run"], ".", "cannot be '.', which is a folder"),
            (["run"], "run/summary.html", "replace 'run/summary.json', which"),
            (["run"], "run/run.htm", "replace 'run/run.json', which"),
            (["run"], "run/config.yaml", "replace 'run/config.yaml', which"),
            (["run", "run"], "run/samples.jsonl", "replace 'run/samples.jsonl', which"),
            (["log.json"], "run/process.html", "replace 'run/process.json', which"),
        ],
    )
    def test_a_report_does_not_replace_what_a_run_has_written(
        self,
        make_run: Callable[..., Path],
        monkeypatch: pytest.MonkeyPatch,
        runs: list[str],
        out: str | None,
        said: str,
    ) -> None:
        run = make_run()
        monkeypatch.chdir(run.parent)
        run.rename("run")
        for name in ("run.json", "process.json"):
            Path("run", name).touch()
        line = {"envmgr_log": 1, "what": "episode", "time": 1.0, "env_id": 0}
        for name in ("log.json", "log.html"):
            Path(name).write_text(json.dumps({**line, "outcome": "completed"}) + "\n")
        Path("link.json").symlink_to("log.json")
        before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
        with pytest.raises(ConfigError, match=re.escape(said) + r".*--out"):
            execute(runs, out)
        assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
        assert execute(["log.json"], "page.html") == Path("page.html")
        assert execute(["run"], "run.html") == execute(["run"], "run.html")  # a folder of no run

    @pytest.mark.parametrize("seed", range(12))
    def test_damaged_files_give_a_report_or_an_error(
        self, make_run: Callable[..., Path], seed: int
    ) -> None:
        rng, run = random.Random(seed), make_run(episodes=[episode(i) for i in range(30)])
        for name in rng.sample(FILES, rng.randint(1, 4)):
            data = bytearray((run / name).read_bytes())
            for _ in range(rng.randint(1, 20)):
                data[rng.randrange(len(data))] = rng.choice(b'0123456789-{}[]",:eE\0\xff<&')
            (run / name).write_bytes(data[: rng.randint(0, len(data))])
        with contextlib.suppress(UnreadableRunError):
            seen(execute([str(run)], None))


def re_found(text: str, notes: list[str]) -> bool:
    return any(text in note for note in notes)


def test_long_texts_lose_their_middle(make_run: Callable[..., Path]) -> None:
    text = "begin " + "x" * 100_000 + " end"
    run = make_run(episodes=[episode(1, abnormal=True, failure=text)])
    (shown,) = figures_of(read_run(run))["failures"]["shown"]
    assert len(shown["text"]) < 1.01 * MOST_OF_A_TEXT
    assert shown["text"].startswith("begin ")
    assert "[... 92,010 characters ...]" in shown["text"]
    assert shown["text"].endswith(" end")


def test_only_so_many_failures_are_shown(make_run: Callable[..., Path]) -> None:
    lost = [episode(i, abnormal=True, failure=f"env {i} died") for i in range(500)]
    failures = figures_of(read_run(make_run(episodes=lost)))["failures"]
    assert len(failures["shown"]) == MOST_FAILURES
    assert (failures["count"], failures["left_out"]) == (500, 400)


@pytest.mark.parametrize("n", [1, 2, 5, 64, 1000])
def test_env_ids_below_charts_are_whole(n: int) -> None:
    drawn = str(times("Times", {"p50": [(i, 1e-3 * (1 + i)) for i in range(n)]}, x="env"))
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    numbers = [label for label in labels if re.fullmatch(r"[\d.,]+", label)]
    assert numbers[0] == "0"
    assert not [label for label in numbers if "." in label]
    assert len(numbers) == min(n, 10)


@pytest.mark.parametrize("heights", [(1.0, 3.0), (2.0, 2.0)])
def test_failures_are_marked_at_the_bottom_of_lines(heights: tuple[float, float]) -> None:
    series = {"n": list(enumerate(heights)), "none": []}
    drawn = str(lines("Returns", "return", series, failures=[0.25, 0.75]))
    marks = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="4"', drawn)
    assert len({x for x, _ in marks}) == 2
    (of,) = {float(y) for _, y in marks}
    of_lines = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)" r="2"', drawn)]
    assert of >= max(of_lines)
    assert "failures" in drawn
    assert "var(--c6)" in drawn
    assert "failures" not in str(lines("Returns", "return", {}, failures=[0.25]))


@pytest.mark.parametrize("value", [0.0, 20.0, -3.5])
def test_what_stays_the_same_is_in_the_middle(value: float) -> None:
    drawn = str(lines("Failures", "n", {"n": [(0.0, value), (1.0, value)]}))
    (height,) = re.findall(r'<path d="M[\d.]+ ([\d.]+) L[^"]*" class="line reactive', drawn)
    of = re.findall(r'<rect[^>]*height="([\d.]+)" class="background"', drawn)[-1]
    assert float(height) / float(of) == pytest.approx(0.5)


def test_of_several_lines_none_is_on_the_border() -> None:
    drawn = str(lines("Envs", "n", {"a": [(0.0, 8), (1.0, 8)], "b": [(0.0, 2), (1.0, 2)]}))
    heights = re.findall(r'<path d="M[\d.]+ ([\d.]+) L[^"]*" class="line reactive', drawn)
    of = float(re.findall(r'<rect[^>]*height="([\d.]+)" class="background"', drawn)[-1])
    assert len(heights) == 2
    assert all(0.03 * of < float(height) < 0.97 * of for height in heights)


class TestWhatOthersPutThere:
    """A folder of somebody else's, who would have the reader's own files in the page."""

    def test_links_are_not_followed(self, make_run: Callable[..., Path], tmp_path: Path) -> None:
        run = make_run()
        (tmp_path / "secret").write_text("password: hunter2\n")
        (run / "config.yaml").unlink()
        (run / "config.yaml").symlink_to(tmp_path / "secret")
        found = read_run(run)
        assert found.config is None
        assert found.unread == ["config.yaml cannot be read: it is a link, which is not followed"]
        assert "hunter2" not in execute([str(run)], None).read_text()
        for name in ("episodes.jsonl", "samples.jsonl", "summary.json"):
            (run / name).rename(tmp_path / name)
            (run / name).symlink_to(tmp_path / name)
        with pytest.raises(UnreadableRunError, match="it is a link"):
            read_run(run)

    def test_a_log_that_was_named_may_be_a_link(self, tmp_path: Path) -> None:
        line = {"envmgr_log": 1, "what": "episode", "time": 1.0, "env_id": 0}
        (tmp_path / "log.jsonl").write_text(json.dumps({**line, "outcome": "completed"}) + "\n")
        (tmp_path / "link.jsonl").symlink_to("log.jsonl")
        assert read_run(tmp_path / "link.jsonl").outcomes == {"completed": 1}

    def test_pictures_that_cannot_be_read_are_left_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for n in range(15):
            (tmp_path / f"{n:02}.png").write_bytes(PNG)
            os.utime(tmp_path / f"{n:02}.png", (n, n))
        os.mkfifo(tmp_path / "pipe.png")
        (tmp_path / "link.png").symlink_to("00.png")

        def failing(path: Path) -> Any:
            if path.name == "14.png":
                raise PermissionError(13, "Permission denied", str(path))
            if path.name == "13.png":
                path.unlink()
            return opened_file(path)

        monkeypatch.setattr("envmgr.reporting.pictures.opened_file", failing)
        lstat = Path.lstat

        def vanishing(path: Path) -> os.stat_result:
            if path.name == "12.png":
                path.unlink(missing_ok=True)
            return lstat(path)

        monkeypatch.setattr(Path, "lstat", vanishing)
        names = [picture.name for picture in pictures_in(tmp_path)]
        assert names == [f"{n:02}.png" for n in reversed(range(12))], "others take their places"

    def test_of_a_picture_that_grows_no_more_is_read_than_fits(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "a.png").write_bytes(PNG)
        asked: list[int] = []

        class Growing:
            def __enter__(self) -> Growing:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def read(self, most: int) -> bytes:
                asked.append(most)
                return bytes(most)

        monkeypatch.setattr("envmgr.reporting.pictures.opened_file", lambda _: Growing())
        (picture,) = pictures_in(tmp_path)
        assert picture.data == ""
        assert asked == [MOST_BYTES + 1]


NESTED: list[Any] = []
for _ in range(700):
    NESTED = [NESTED]


class TestCrafted:
    @pytest.mark.parametrize(
        "changes",
        [
            {"stats": {"latency": {"step": latency([0.0] * (MAX_ENV_NUM + 1))}}},
            {"stats": {"failures_by_env": {str(2 * MAX_ENV_NUM): 1}}},
            {"stats": {"failures_by_kind": {f"Kind{i}": 1 for i in range(2000)}}},
            {"stats": {"latest_failures": [""] * 2000}},
            {"seed": NESTED},
            {"seed": {"0": NESTED}},
            {"resumed": [{"at": NESTED}]},
            {"resumed": [{"at": "noon", "more": NESTED, "seed": NESTED}]},
            {"versions": {f"package{i}": "1" for i in range(2000)}},
        ],
    )
    def test_summaries_that_no_run_writes_are_not_read(
        self, make_run: Callable[..., Path], changes: dict[str, Any]
    ) -> None:
        run = make_run(**changes)
        found = read_run(run)
        assert found.summary is None
        assert "summary.json is not whole, or none of envmgr" in found.unread[0]
        execute([str(run)], None)

    @pytest.mark.parametrize("value", ["1e999", "-1e999", "NaN", "Infinity"])
    def test_figures_that_are_not_finite_are_none_beside_half_a_letter_too(
        self, make_run: Callable[..., Path], value: str
    ) -> None:
        run = make_run(error="\ud800")
        text = (run / "summary.json").read_text()
        for figure in ("20.0", "1000.0", "19.5"):
            (run / "summary.json").write_text(text.replace(figure, value))
            assert "is not whole, or none of envmgr" in read_run(run).unread[0]
            execute([str(run)], None)

    @pytest.mark.parametrize("returned", ["9" * 400, "[" * 990 + "]" * 990, "1e999"])
    def test_returns_that_are_no_numbers_make_no_lines_of_a_log(
        self, tmp_path: Path, returned: str
    ) -> None:
        line = {"envmgr_log": 1, "what": "episode", "time": 1.0, "env_id": 0}
        text = json.dumps({**line, "outcome": "completed", "return": 7})
        log = tmp_path / "log.jsonl"
        log.write_text(text.replace("7", returned) + "\n")
        with pytest.raises(UnreadableRunError, match="1 of 1 lines of log"):
            read_run(log)
        log.write_text(text + "\n" + text.replace("7", returned) + "\n" + text + "\n")
        found = read_run(log)
        assert found.returns.tolist() == [7.0, 7.0]
        assert "1 of 3 lines of log.jsonl cannot be read; the first, line 2" in found.unread[0]

    def test_a_log_of_many_causes_names_some(self, tmp_path: Path) -> None:
        line = {"envmgr_log": 1, "what": "failure", "time": 1.0, "env_id": 0, "outcome": "failed"}
        lines = [json.dumps({**line, "cause": f"Cause{i % 500}"}) for i in range(1000)]
        (tmp_path / "log.jsonl").write_text("\n".join(lines))
        causes = read_run(tmp_path / "log.jsonl").causes
        assert causes is not None
        assert len(causes) == 101
        assert (causes["Cause0"], causes["others"]) == (2, 800)

    def test_returns_whose_sum_is_too_large_are_left_out(
        self, make_run: Callable[..., Path]
    ) -> None:
        run = make_run(episodes=[episode(0, **{"return": [1e308, 1e308]})])
        assert figures_of(read_run(run))["envs"][0]["return_mean"] is None
