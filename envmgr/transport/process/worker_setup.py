"""What workers are told first: their envs, and how to set themselves up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from envmgr import pickles
from envmgr.errors import ConfigError
from envmgr.transport.process.needed_modules import NamedModules
from envmgr.types import EnvFactory
from envmgr.wire.hosts import EnvToBuild, HostSpec, WorkerSettings, WorkerSetup
from envmgr.wire.large_messages import buffer_offset
from envmgr.wire.messages import UNANSWERED


class WorkerSetupWriter:
    """Writes the setup of workers; each object is pickled once for all of them.

    Args:
        settings: how workers are set up.
        with_factories: whether a setup includes the factories of envs.
    """

    def __init__(self, settings: WorkerSettings, *, with_factories: bool) -> None:
        self._settings = settings
        self._with_factories = with_factories
        self._pickled: dict[int, tuple[Any, bytes]] = {}
        self._named = NamedModules()

    def setup_of(self, spec: HostSpec, *, has_buffer: bool = False) -> WorkerSetup:
        """Return the setup of one worker.

        Args:
            spec: the worker.
            has_buffer: whether it may put large messages into a buffer of its own.

        Raises:
            ConfigError: a factory cannot be pickled.
        """
        pickled: dict[bytes, int] = {}  # equal factories travel once
        envs: list[tuple[int, int, int, int]] = []
        for env in spec.envs:
            factory = self._pickle(env.factory, env) if self._with_factories else b""
            index = pickled.setdefault(factory, len(pickled))
            envs.append((env.env_id, env.generation, env.request_id, index))
        settings = self._pickle(spec.settings, spec.envs[0])
        buffer = buffer_offset(spec.host_id) if has_buffer else None
        return WorkerSetup(
            tuple(envs), tuple(pickled), spec.index, settings, self._settings, buffer
        )

    def modules_named_by(self, factories: Sequence[EnvFactory]) -> tuple[str, ...]:
        """Pickle factories, and return the modules that they name.

        Factories that were pickled before count, too.

        Raises:
            ConfigError: a factory cannot be pickled.
        """
        for env_id, factory in enumerate(factories):
            self._pickle(factory, EnvToBuild(env_id, 0, UNANSWERED, factory), self._named.note)
        return tuple(self._named.names)

    def _pickle(
        self, value: Any, env: EnvToBuild, note: Callable[[Any], None] | None = None
    ) -> bytes:
        known = self._pickled.get(id(value))
        if known is None:
            try:
                known = (value, pickles.dumps(value, note))
            except Exception as error:  # whatever a __reduce__ may raise
                raise ConfigError(
                    f"the env_fn of env {env.env_id} ({env.factory!r}), or a space that was "
                    f"given with it, cannot be sent to a worker process: {type(error).__name__}: "
                    f"{error}. Build such objects inside the function, or use context: fork or "
                    "type: base."
                ) from error
            self._pickled[id(value)] = known
        return known[1]
