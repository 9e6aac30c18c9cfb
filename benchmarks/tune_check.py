"""Does `envmgr tune` pick a good setting? Compares its choice with an exhaustive search.

    python benchmarks/tune_check.py --n 8 --seconds 40 --laps 7

For null, CartPole, busy 100 us, uneven and slow-reset envs: tunes, then measures every setting of
the plan in alternating laps, and says whether the choice is within 10 % of the best of them, or
within the spread of its paired ratios. The load of the machine is printed with each: a busy one
decides more than any setting does.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from envs import busy_loops, env_factory

from envmgr.registry import ENV_MANAGER_REGISTRY, default_config_of
from envmgr.tuning.measuring import Course, Stable
from envmgr.tuning.search import Measured, compare
from envmgr.tuning.settings import Setting
from envmgr.tuning.tune import Tuned, tune

ENVS = ("null", "cartpole", "busy", "uneven", "slow-reset")
GOOD = 0.9


def exhaustive(
    settings: Sequence[Setting], config: Any, factories: Sequence[Any], laps: int, seconds: float
) -> list[Measured[Setting]]:
    """Measure every setting in each lap, forwards and backwards by turns."""

    def opened(setting: Setting) -> Course:
        return Course(setting, config, factories)

    found = [Measured(setting) for setting in settings]
    for lap in range(laps):
        for one in reversed(found) if lap % 2 else found:
            # One at a time: the workers of dozens of settings would not fit side by side.
            with Stable(opened, seconds, seconds / 3) as stable:
                one.rates[lap] = stable.measure(one.setting)
    compare(found)
    return sorted(found, key=lambda one: -one.ratio)


def judged(tuned: Tuned, found: Sequence[Measured[Setting]]) -> tuple[bool, str]:
    """Return whether a choice was good, and why."""
    best = found[0]
    chosen = next(one for one in found if one.setting == tuned.best)
    share = chosen.ratio / best.ratio
    spread = chosen.spread + best.spread
    text = f"{share:.0%} of the best ({best.setting}), spread {spread:.0%}"
    return share >= min(GOOD, 1.0 - spread), text


def checked(name: str, options: argparse.Namespace, say: Callable[[str], None]) -> bool:
    """Tune one env, search exhaustively, and print the comparison."""
    factories = [env_factory(name, options.loops)] * options.n
    preset = default_config_of(ENV_MANAGER_REGISTRY.get("subprocess"), "subprocess")
    config = {**preset, "env_num": options.n, "seed": 0}
    began = time.monotonic()
    tuned = tune(config, factories, seconds=options.seconds)
    took_s = time.monotonic() - began
    settings = [row.setting for row in tuned.rows]
    found = exhaustive(settings, config, factories, options.laps, options.window)
    good, text = judged(tuned, found)
    measured = [row for row in tuned.rows if row.right is not None]
    n_right = sum(bool(row.right) for row in measured)
    say(
        f"{name:<11} {'good' if good else 'BAD':<5} {tuned.best}: {text}; tuned in {took_s:.0f} s, "
        f"the model was right for {n_right} of {len(measured)}; load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores"
    )
    for one in found[: options.top]:
        say(f"    {one.ratio:5.2f} x  {one.rate:10,.0f} steps/s  {one.spread:4.0%}  {one.setting}")
    return good


def main() -> None:
    """Check all envs, and exit with 1 if a choice was bad."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--envs", default=",".join(ENVS), help="which, separated by commas")
    parser.add_argument("--n", type=int, default=8, help="number of envs")
    parser.add_argument("--seconds", type=float, default=40.0, help="the budget of each tuning")
    parser.add_argument("--laps", type=int, default=5, help="laps of the exhaustive search")
    parser.add_argument("--window", type=float, default=0.6, help="seconds of each measurement")
    parser.add_argument("--top", type=int, default=4, help="how many of the best to print")
    options = parser.parse_args()
    options.loops = busy_loops()
    names = options.envs.split(",")
    good = [checked(name, options, lambda text: print(text, flush=True)) for name in names]
    print(f"{sum(good)} of {len(good)} choices are good")
    raise SystemExit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
