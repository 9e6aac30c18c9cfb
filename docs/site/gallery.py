"""The gallery: reports of configs/, which are run for some seconds when the site is made."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from pages import ROOT

# Name, the arguments of `envmgr run`, and what the report shows.
_RUNS = (
    (
        "cartpole",
        "configs/cartpole.yaml --steps 200000",
        "eight of CartPole-v1, which share processes as they are cheap.",
    ),
    (
        "uneven",
        "configs/uneven_async.yaml --steps 6000",
        "some steps take ten times as long, and resets longer; nobody waits for anybody.",
    ),
    (
        "together",
        "configs/uneven_async.yaml --steps 6000 --set manager.type=subprocess "
        "--set manager.wait_num=.inf",
        "the same envs in synchronous steps: all wait for the slowest.",
    ),
    (
        "fragile",
        "configs/fragile.yaml --episodes 600",
        "envs that raise, crash and hang, and a manager that goes on.",
    ),
)
_COMPARED = ("uneven", "together")


def make_gallery(folder: Path, out: Path) -> str:
    """Run the configs and write their reports; return the page that links to them.

    Args:
        folder: where the runs are kept.
        out: where the reports go, as NAME.html.
    """
    shutil.rmtree(folder, ignore_errors=True)
    out.mkdir(parents=True)
    lines = [
        "# Gallery of reports\n",
        "The pages that `envmgr run` leaves behind, of short runs:\n",
    ]
    for name, arguments, text in _RUNS:
        _envmgr("run", *arguments.split(), "--output", str(folder / name))
        shutil.copyfile(folder / name / "report.html", out / f"{name}.html")
        lines.append(f"- {_link(name)}: {text}\n\n  `envmgr run {arguments}`\n")
    runs = [str(folder / name) for name in _COMPARED]
    _envmgr("report", *runs, "--out", str(out / "comparison.html"))
    lines.append(f"- {_link('comparison')} of two of them: `envmgr report {' '.join(_COMPARED)}`")
    return "\n".join(lines) + "\n"


def _envmgr(*arguments: str) -> None:
    command = [sys.executable, "-m", "envmgr", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)  # noqa: S603 - ours
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")


def _link(name: str) -> str:
    return f'<a href="gallery/{name}.html">{name}</a>'
