"""Does `envmgr tune` pick a good setting? Compares its choice with a search among many more.

    python benchmarks/tune_check.py                      # all five envs: some ten minutes
    python benchmarks/tune_check.py --envs null          # one: two minutes

For null, CartPole, busy 100 us, uneven and slow-reset envs: tunes, then measures every combination
of workers, `wait_num` and spares in paired laps, the choice and the better ones more often, and
says whether the choice is within 10 % of the best, or within the spread of their paired ratios. The
load of the machine is printed with each: a busy one decides more than any setting does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from envs import busy_loops, env_factory

from envmgr.launch import usable_cores
from envmgr.registry import ENV_MANAGER_REGISTRY, default_config_of
from envmgr.tuning.measuring import Course, Stable
from envmgr.tuning.plan import window_of
from envmgr.tuning.search import Measured, search
from envmgr.tuning.settings import Setting
from envmgr.tuning.tune import tune

ENVS = ("null", "cartpole", "busy", "uneven", "slow-reset")
GOOD = 0.9
LEAST_LAPS = 2.6
"""Laps of all settings that there is time for at least, so that none is left out."""


def exhaustive(
    settings: Sequence[Setting], window: tuple[float, float], seconds: float, opened: Any
) -> list[Measured[Setting]]:
    """Measure every setting, the first one to the end; return them, the first one first."""
    with contextlib.closing(Stable(opened)) as stable:
        for setting in settings:  # launched before the time runs, so that none is left out
            stable.measure(setting, 0.01)
        _, found, _ = search(
            settings,
            lambda setting: stable.measure(setting, *window),
            seconds,
            time.monotonic,
            dropped=stable.drop,
        )
    return found


def judged(found: Sequence[Measured[Setting]]) -> tuple[bool, str]:
    """Return whether a choice, the first one, was good, and why.

    Of settings with few laps nothing is known well: the best is one of the finalists.
    """
    chosen = found[0]
    most = max(len(one.rates) for one in found[1:])
    best = max((one for one in found if len(one.rates) >= most), key=lambda one: one.ratio)
    share, spread = chosen.ratio / best.ratio, chosen.spread + best.spread
    n = sum(bool(one.rates) for one in found)
    text = f"{share:.0%} of the best of {n} of {len(found)} ({best.setting}), spread {spread:.0%}"
    return share >= min(GOOD, 1.0 - spread), text


def every_setting(env_num: int, cores: int, *, has_resets: bool) -> list[Setting]:
    """Return all combinations that may be worth something, most of which `tune` leaves out."""
    numbers = {1, cores, 2 * cores, *(2**k for k in range(6))}
    workers = [None, *sorted(n for n in numbers if n < env_num)]
    waits = sorted({max(1, round(env_num * share)) for share in (0.125, 0.25, 0.5, 0.75)})
    spares = sorted({max(1, env_num // 4), env_num // 2 or 1, env_num, 2 * env_num})
    plain = [Setting("subprocess"), *(Setting("async_subprocess", None, float(n)) for n in waits)]
    found = [one._replace(num_workers=n) for one in plain for n in workers]
    if has_resets:
        found += [one._replace(spare_env_num=n) for one in plain for n in spares]
    return found


def checked(name: str, options: argparse.Namespace, say: Callable[[str], None]) -> bool:
    """Tune one env, search exhaustively, and print the comparison."""
    factories = [env_factory(name, options.loops)] * options.n
    preset = default_config_of(ENV_MANAGER_REGISTRY.get("subprocess"), "subprocess")
    config = {**preset, "env_num": options.n, "seed": 0}
    began = time.monotonic()
    tuned = tune(config, factories, seconds=options.seconds)
    took_s = time.monotonic() - began
    trial = tuned.profile.trial
    others = every_setting(options.n, usable_cores(None), has_resets=trial.reset_s > 1e-3)
    settings = list(dict.fromkeys((tuned.best, *others)))
    window = window_of(options.search, trial)
    search_s = max(options.search, LEAST_LAPS * len(settings) * sum(window))
    found = exhaustive(
        settings, window, search_s, lambda setting: Course(setting, config, factories)
    )
    good, text = judged(found)
    say(
        f"{name:<11} {'good' if good else 'BAD':<5} {tuned.best}: {text}; tuned in {took_s:.0f} s; "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    for row in tuned.rows:
        if row.measured:
            say(
                f"    tune   {row.ratio or 0:5.2f} x  {row.measured:10,.0f} steps/s  "
                f"{row.spread:4.0%}  {row.setting}  {row.note}"
            )
    for one in sorted(found, key=lambda one: -one.ratio)[: options.top]:
        say(
            f"    search {one.ratio:5.2f} x  {one.rate:10,.0f} steps/s  {one.spread:4.0%}  "
            f"{len(one.rates)} laps  {one.setting}"
        )
    return good


def main() -> None:
    """Check all envs, and exit with 1 if a choice was bad."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--envs", default=",".join(ENVS), help="which, separated by commas")
    parser.add_argument("--n", type=int, default=8, help="number of envs")
    parser.add_argument("--seconds", type=float, default=40.0, help="the budget of each tuning")
    parser.add_argument("--search", type=float, default=60.0, help="that of each search among all")
    parser.add_argument("--top", type=int, default=6, help="how many of the best to print")
    options = parser.parse_args()
    options.loops = busy_loops()
    names = options.envs.split(",")
    good = [checked(name, options, lambda text: print(text, flush=True)) for name in names]
    print(f"{sum(good)} of {len(good)} choices are good")
    raise SystemExit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
