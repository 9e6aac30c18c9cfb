"""Which spawner serves which `context` of the config."""

from __future__ import annotations

import sys
from collections.abc import Sequence

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
        rules: what is imported once for all workers, where that can be; None: nothing.
    """
    if sys.platform == "linux" and has_pidfds():
        if context == "server":
            return ServerSpawner(settings, rules)
        if context == "fork":
            return ForkSpawner(settings, dict(enumerate(factories)))
    return MultiprocessingSpawner("spawn" if context == "server" else context, settings)
