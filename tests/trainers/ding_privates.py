"""envmgr's kinds in DI-engine, with the private names that DI-engine's own tests look at.

Each name stands for something public of these managers and envs; nothing is simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from envmgr.adapters import ding
from envmgr.manager.loop import ManagerLoop

_OF_THE_CONFIG = (
    "_max_retry",
    "_retry_type",
    "_reset_timeout",
    "_step_timeout",
    "_connect_timeout",
)


class Privates(ding.DingKind):
    """Looks private names up where envmgr has what they stand for."""

    def __init__(self, env_fn: Sequence[Callable[[], Any]], cfg: Any = None) -> None:
        self._env_episode_count: Counter[int] = Counter()
        super().__init__(env_fn, {**(cfg or {}), "on_failure": "raise"})  # as DI-engine's do

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_CONFIG:
            return self.cfg[name[1:]]
        if name.startswith("_") and "_running" in self.__dict__ and not self.closed:
            return self.get_attr(name)
        return super().__getattr__(name)

    @property
    def _closed(self) -> bool:
        return self.closed

    @property
    def _env_states(self) -> Any:
        return self.env_states

    def launch(self, reset_param: Any = None) -> None:
        super().launch(reset_param)
        self._env_episode_count.clear()
        _ = self.env_ref  # its private name is the same here, and it is built when it is read

    def step(self, actions: Any) -> Any:
        timesteps = super().step(actions)
        ended = [i for i, step in ManagerLoop(self)._by_id(timesteps).items() if step.done]
        self._env_episode_count.update(ended)
        return timesteps


class RecordsEnvs(Privates):
    """Keeps the envs, where they are built in this process."""

    def __init__(self, env_fn: Sequence[Callable[[], Any]], cfg: Any = None) -> None:
        self._envs: list[Any] = [None] * len(env_fn)

        def recorded(env_id: int) -> Any:
            self._envs[env_id] = env_fn[env_id]()
            return self._envs[env_id]

        super().__init__([lambda i=i: recorded(i) for i in range(len(env_fn))], cfg)


class BaseEnvManager(RecordsEnvs, ding.BaseEnvManager):
    pass


class BaseEnvManagerV2(RecordsEnvs, ding.BaseEnvManagerV2):
    pass


class SyncSubprocessEnvManager(Privates, ding.SyncSubprocessEnvManager):
    pass


class AsyncSubprocessEnvManager(Privates, ding.AsyncSubprocessEnvManager):
    pass
