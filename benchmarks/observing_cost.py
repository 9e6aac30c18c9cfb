"""What do `metrics` and `trace` cost? Paired rounds with null envs: wall and processor time.

    python benchmarks/observing_cost.py --n 64 --workers 2 --rounds 100

Managers without either, with each, and with both run side by side. A round measures each of them
twice, forwards and backwards, for some batches; a ratio is that of the time without to the time
with it, the median over rounds. 0.97 and more is what is promised. Processor time is that of the
trainer and its workers: unlike wall time it means something on a machine that others use, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from envs import NullEnv
from paired import Cost, paired_rounds

import envmgr

PROMISED = 0.97


class Runner:
    """A manager that takes batches of steps, and says what they cost.

    Args:
        n: number of envs.
        config: of the manager.
    """

    def __init__(self, n: int, config: dict[str, Any]) -> None:
        self._manager = envmgr.make(NullEnv, n, seed=0, **config)
        self._manager.launch()
        self._actions = dict.fromkeys(range(n), 1)
        workers = self._manager.stats().get("workers") or []
        self._pids = {worker["pid"] for worker in workers if worker["pid"]} - {os.getpid()}

    def run(self, batches: int) -> Cost:
        """Take batches; return what they cost."""
        manager, actions = self._manager, self._actions
        cpu_s, began = self._cpu_s(), time.perf_counter()
        for _ in range(batches):
            len(manager.ready_obs)
            manager.step(actions)
        return time.perf_counter() - began, self._cpu_s() - cpu_s

    def _cpu_s(self) -> float:
        stats = [Path(f"/proc/{pid}/schedstat").read_text() for pid in self._pids]
        return time.process_time() + sum(int(stat.split()[0]) * 1e-9 for stat in stats)

    def close(self) -> None:
        """Close."""
        self._manager.close()


def main() -> None:
    """Measure, print, and exit with 1 if something costs more than is promised."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=64, help="number of envs")
    parser.add_argument("--workers", type=int, default=2, help="how many share them; 0: base")
    parser.add_argument("--rounds", type=int, default=100, help="of eight windows each")
    parser.add_argument("--batches", type=int, default=300, help="in each window")
    options = parser.parse_args()
    kind = {"type": "base"}
    if options.workers:
        kind = {"type": "subprocess", "num_workers": options.workers}
    with tempfile.TemporaryDirectory() as folder:

        def trace(name: str) -> dict[str, Any]:
            return {"trace": str(Path(folder, name))}

        features: dict[str, dict[str, Any]] = {
            "neither": {},
            "metrics": {"metrics": {}},
            "trace": trace("trace.json"),
            "both": {"metrics": {}, **trace("both.json")},
        }
        runners = {name: Runner(options.n, {**kind, **it}) for name, it in features.items()}
        try:
            good = _compare(runners, options.rounds, options.batches)
        finally:
            for runner in runners.values():
                runner.close()
    raise SystemExit(0 if good else 1)


def _compare(runners: dict[str, Runner], rounds: int, batches: int) -> bool:
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for costs in paired_rounds(runners, rounds, batches):
        plain = costs["neither"]
        for name, cost in costs.items():
            ratios[name].append((plain[0] / cost[0], plain[1] / cost[1]))
    good = True
    for name in list(runners)[1:]:
        wall, cpu = zip(*ratios[name], strict=True)
        good = good and statistics.median(wall) >= PROMISED
        print(f"{name:<8} wall {_shown(wall)}  processors {_shown(cpu)}")
    return good


def _shown(ratios: tuple[float, ...]) -> str:
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
