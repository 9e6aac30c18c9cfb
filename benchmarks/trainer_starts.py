"""How long trainers wait for envs: `python trainer_starts.py ding|tianshou [CONTEXT ...]`.

Runs each context in a process of its own, in turns, three times: there a first manager of 8
CartPoles is launched, and two more while it is open. To be run with an environment that has envmgr
and the trainer. Prints seconds, and seconds of processor time of all processes; ends with
1 if, by the medians, envs are ready later than is promised with `context: server`.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

ENV_NUM = 8
ROUNDS = 3
MANAGERS = 3

OF_IMPORTS, AND_S, NEXT_S = 1.5, 1.0, 1.0
"""The first manager is ready within so many times the imports of the trainer, and so many seconds;
the next ones within the last."""


def ding(context: str) -> Callable[[], Any]:
    """Import what a script of DI-engine does; return what launches a manager."""
    from dizoo.classic_control.cartpole.envs.cartpole_env import CartPoleEnv

    from envmgr.adapters.ding import SubprocessEnvManagerV2

    def launch() -> Any:
        cfg = SubprocessEnvManagerV2.default_config()
        cfg.context = context
        manager = SubprocessEnvManagerV2([partial(CartPoleEnv, {})] * ENV_NUM, cfg)
        manager.launch()
        return manager

    return launch


def tianshou(context: str) -> Callable[[], Any]:
    """Import what a script of tianshou's high-level API does; return what makes a vector env."""
    from tianshou.highlevel.env import EnvFactoryRegistered, EnvMode

    from envmgr.adapters.tianshou import EnvmgrVectorEnv

    class Makes:
        @staticmethod
        def create_venv(factories: Any) -> Any:
            return EnvmgrVectorEnv(factories, context=context)

    def launch() -> Any:
        made: Any = EnvFactoryRegistered(task="CartPole-v1", venv_type=Makes)
        envs = made.create_venv(ENV_NUM, EnvMode.TRAINING)
        envs.reset()
        return envs

    return launch


def measure(trainer: str, context: str) -> None:
    """Launch managers and print what it took, as JSON: imports, each manager, processor time."""
    logging.getLogger("envmgr").setLevel(logging.ERROR)
    times, began_s = [], time.perf_counter()
    launch = {"ding": ding, "tianshou": tianshou}[trainer](context)
    imports_s = time.perf_counter() - began_s
    managers = []
    for _ in range(MANAGERS):
        began_s = time.perf_counter()
        managers.append(launch())
        times.append(time.perf_counter() - began_s)
    for manager in managers:
        manager.close()
    used = os.times()
    cpu_s = used.user + used.system + used.children_user + used.children_system
    print(json.dumps([imports_s, times, cpu_s]))


def main() -> None:
    """Run all contexts in turns."""
    if sys.argv[1] == "--one":
        measure(sys.argv[2], sys.argv[3])
        return
    trainer, contexts = sys.argv[1], sys.argv[2:] or ["server", "fork"]
    found: dict[str, list[Any]] = {context: [] for context in contexts}
    for _ in range(ROUNDS):
        for context in contexts:
            command = [sys.executable, "-W", "ignore", __file__, "--one", trainer, context]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            imports_s, times, cpu_s = json.loads(done.stdout.splitlines()[-1])
            found[context].append((imports_s, *times))
            ready = "  ".join(f"{took_s:5.2f}" for took_s in times)
            print(
                f"{trainer} {context:10} imports {imports_s:5.2f}  ready {ready}  "
                f"processor {cpu_s:5.2f}",
                flush=True,
            )
    late = False
    if "server" in found:
        imports_s, first_s, *others_s = map(statistics.median, zip(*found["server"], strict=True))
        limit_s = OF_IMPORTS * imports_s + AND_S
        late = first_s > limit_s or max(others_s) > NEXT_S
        print(
            f"medians with server: {first_s:.2f} s of {limit_s:.2f} for the first, "
            f"{max(others_s):.2f} of {NEXT_S:.2f} for the next: {'missed' if late else 'met'}"
        )
    raise SystemExit(late)


if __name__ == "__main__":
    main()
