"""OpenEnv's server with each environment class isolated: what its own tests are run with."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from openenv.core.env_server.http_server import HTTPEnvServer
from openenv.core.env_server.interfaces import Environment

from envmgr.adapters.openenv import isolated


class IsolatedServer(HTTPEnvServer):
    """An `HTTPEnvServer` whose environments run in workers."""

    def __init__(self, env: Any, *args: Any, **kwargs: Any) -> None:
        inner = env.func if isinstance(env, functools.partial) else env
        if inspect.isclass(inner) and issubclass(inner, Environment):
            env = isolated(env, env_num=3, release_timeout=0.5)
        super().__init__(env, *args, **kwargs)
