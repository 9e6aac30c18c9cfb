"""Which spawner serves which `context` of the config."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from envmgr.errors import ConfigError
from envmgr.transport.fds import has_pidfds
from envmgr.transport.process.fork_spawner import ForkSpawner
from envmgr.transport.process.multiprocessing_spawner import MultiprocessingSpawner
from envmgr.transport.process.preloading import PreloadRules
from envmgr.transport.process.server_spawner import ServerSpawner
from envmgr.transport.process.spawner import Spawner
from envmgr.types import EnvFactory
from envmgr.wire.hosts import WorkerSettings


def make_spawner(
    context: str,
    settings: WorkerSettings,
    factories: Sequence[EnvFactory],
    rules: PreloadRules | None = None,
) -> Spawner:
    """Return the spawner for a `context` of the config.

    `server`, and `fork` as it is done here, need Linux (pidfds, SEQPACKET sockets, parent-death
    signals); elsewhere `spawn` takes the place of `server`, and `multiprocessing` forks.

    Args:
        context: "server", "fork", "spawn" or "forkserver".
        settings: of the workers.
        factories: of all envs, in the order of their env_ids.
        rules: what is imported once for all workers, where that is possible; None: nothing.

    Raises:
        ConfigError: there is no interpreter to run.
    """
    if sys.platform == "linux" and has_pidfds():
        if context == "server":
            _refuse_frozen()
            return ServerSpawner(settings, rules)
        if context == "fork":
            return ForkSpawner(settings, dict(enumerate(factories)))
    return MultiprocessingSpawner("spawn" if context == "server" else context, settings)


def _refuse_frozen() -> None:
    """Refuse to run an interpreter where there is none.

    Raises:
        ConfigError: a program that was frozen would be run again and again in its place.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        raise ConfigError(
            f"manager.context is server, which runs a Python interpreter, and {sys.executable!r} "
            "is none: this program is frozen or embeds Python. Choose context: fork; or spawn, and "
            "call multiprocessing.freeze_support() where the program starts."
        )
