"""Draws docs/survival.svg: a run of eight envs whose workers are killed one after another.

    python docs/picture.py

The run is a real one: what is drawn is when each timestep came, when which worker was killed, and
by which process its env was served then. Nothing of it is made up, and it differs each time.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import gymnasium

from envmgr import make

OUT = Path(__file__).resolve().parent / "survival.svg"
ENV_NUM = 8
SECONDS = 6.0
KILL_EVERY_S = 0.45

WIDTH, LEFT, RIGHT, TOP, LANE = 860, 150, 24, 62, 27
GAP_S = 0.06
"""An env without a timestep for so long is drawn as one that is away."""


class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An env whose steps take some milliseconds, and whose start takes a tenth of a second."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        time.sleep(0.1)
        super().__init__(env)

    def step(self, action: Any) -> Any:
        """Take a step, after a pause."""
        time.sleep(0.01)
        return super().step(action)


class Record(NamedTuple):
    """What happened in a run; times are in seconds since its begin.

    Attributes:
        seconds: how long it was.
        timesteps: (when, env_id, whether it was abnormal) of each.
        kills: (when, env_id, pid) of each worker that was killed.
        workers: (when, env_id, pid) of each worker that an env got.
        actions: how many were sent.
    """

    seconds: float
    timesteps: list[tuple[float, int, bool]]
    kills: list[tuple[float, int, int]]
    workers: list[tuple[float, int, int]]
    actions: int


def make_env() -> gymnasium.Env[Any, Any]:
    """Return one of the envs."""
    return Slow(gymnasium.make("CartPole-v1"))


def record(
    env_num: int = ENV_NUM, seconds: float = SECONDS, every_s: float = KILL_EVERY_S
) -> Record:
    """Run envs, kill a worker now and then, and return what happened."""
    found = Record(seconds, [], [], [], 0)
    actions = 0
    pids: dict[int, int] = {}
    settings: dict[str, Any] = {"type": "async_subprocess", "wait_num": 1, "seed": 0}
    allowed: dict[str, Any] = {"max_failures": 1_000, "max_failures_total": 1_000}
    with make(make_env, env_num, **settings, **allowed) as manager:
        begin = time.perf_counter()
        due, victim = every_s, 0
        while (now := time.perf_counter() - begin) < seconds:
            for worker in manager.stats()["workers"]:
                (env_id,) = worker["env_ids"]
                if pids.get(env_id) != worker["pid"]:
                    pids[env_id] = worker["pid"]
                    found.workers.append((now, env_id, worker["pid"]))
            if now >= due and len(pids) == env_num:
                found.kills.append((now, victim, pids[victim]))
                os.kill(pids[victim], signal.SIGKILL)
                due, victim = due + every_s, (victim + 3) % env_num
            sent = {env_id: manager.action_space.sample() for env_id in manager.ready_obs}
            actions += len(sent)
            for env_id, timestep in manager.step(sent).items():
                moment = time.perf_counter() - begin
                found.timesteps.append((moment, env_id, bool(timestep.info.get("abnormal"))))
        while manager.stats()["outstanding"]:
            for env_id, timestep in manager.recv().items():
                moment = min(time.perf_counter() - begin, seconds)
                found.timesteps.append((moment, env_id, bool(timestep.info.get("abnormal"))))
    return found._replace(actions=actions)


def spells(moments: Sequence[float]) -> list[tuple[float, float]]:
    """Return from when to when an env gave timesteps without a gap."""
    found: list[tuple[float, float]] = []
    for moment in moments:
        if found and moment - found[-1][1] <= GAP_S:
            found[-1] = (found[-1][0], moment)
        else:
            found.append((moment, moment))
    return found


def draw(run: Record) -> str:
    """Return the picture: a lane for each env, over which time passes, again and again."""
    env_num = 1 + max(env_id for _, env_id, _ in run.timesteps)
    height = TOP + env_num * LANE + 44
    scale = (WIDTH - LEFT - RIGHT) / run.seconds
    abnormal = sum(is_abnormal for _, _, is_abnormal in run.timesteps)
    lanes, labels = [], []
    for env_id in range(env_num):
        y = TOP + env_id * LANE
        moments = [
            when for when, one, is_abnormal in run.timesteps if one == env_id and not is_abnormal
        ]
        lanes.append(
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="17" class="away"/>'
        )
        for first, last in spells(moments):
            x, width = LEFT + first * scale, max((last - first) * scale, 1.0)
            lanes.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="17" class="steps"/>'
            )
        for when, one, _ in run.kills:
            if one == env_id:
                lanes.append(
                    f'<text x="{LEFT + when * scale:.1f}" y="{y + 14}" class="kill">✕</text>'
                )
        served = [(when, pid) for when, one, pid in run.workers if one == env_id]
        labels.append(_label(env_id, y + 14, served, run.seconds))
    text = (
        f"{run.actions:,} actions, {len(run.timesteps):,} timesteps ({abnormal} abnormal), "
        f"{len(run.kills)} workers killed"
    )
    return _PAGE.format(
        width=WIDTH,
        height=height,
        title=escape(
            f"{env_num} envs in a process each, one of which is killed every now and then"
        ),
        lanes="\n".join(lanes),
        labels="\n".join(labels),
        left=LEFT,
        inner=WIDTH - LEFT - RIGHT,
        seconds=run.seconds,
        caption_y=height - 16,
        caption=escape(text),
    )


def _label(env_id: int, y: float, served: list[tuple[float, int]], seconds: float) -> str:
    """Return who serves an env, which changes with each of its workers."""
    parts = [f'<text x="18" y="{y}" class="name">env {env_id}</text>']
    for number, (when, pid) in enumerate(served):
        until = served[number + 1][0] if number + 1 < len(served) else seconds
        shown = [(0.0, "hidden"), (when / seconds, "visible"), (until / seconds, "hidden")]
        if number == 0:
            shown = [(0.0, "visible"), (until / seconds, "hidden")]
        shown = [(moment, value) for moment, value in shown if moment < 1.0]
        last = ' class="pid"' if number == len(served) - 1 else ' class="pid" visibility="hidden"'
        values = ";".join(value for _, value in shown)
        times = ";".join(f"{moment:.4f}" for moment, _ in shown)
        parts.append(
            f'<text x="72" y="{y}"{last}>pid {pid}<animate attributeName="visibility" '
            f'dur="{seconds}s" repeatCount="indefinite" calcMode="discrete" '
            f'values="{values}" keyTimes="{times}"/></text>'
        )
    return "".join(parts)


_PAGE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>{title}</title>
<style>
text {{ font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #c9d1d9 }}
.page {{ fill: #0d1117 }} .away {{ fill: #30363d }} .steps {{ fill: #2ea043 }}
.kill {{ fill: #ff7b72; font-weight: bold; text-anchor: middle }} .pid {{ fill: #8b949e }}
.head {{ font-weight: bold }}
</style>
<rect width="{width}" height="{height}" rx="8" class="page"/>
<text x="18" y="28" class="head">{title}</text>
<text x="{left}" y="50" class="pid">green: timesteps come; grey: none; ✕ kill -9</text>
{labels}
<clipPath id="past"><rect x="{left}" y="0" width="{inner}" height="{height}">
<animate attributeName="width" from="0" to="{inner}" dur="{seconds}s" repeatCount="indefinite"/>
</rect></clipPath>
<g clip-path="url(#past)">
{lanes}
</g>
<text x="18" y="{caption_y}">{caption}</text>
</svg>
"""


def main() -> None:
    """Record a run and draw it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    out: Path = parser.parse_args().out
    logging.getLogger("envmgr").setLevel(logging.ERROR)
    out.write_text(draw(record()), encoding="utf-8")


if __name__ == "__main__":
    main()
