"""tianshou's ShmemVectorEnv."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from spec import Runner, Spec
from tianshou.env import ShmemVectorEnv

from adapters.actions import array_batches
from envmgr.tuning.loops import TianshouLoop


def open_runner(spec: Spec, factory: Callable[[], Any]) -> Runner:
    """Return a runner; `options["wait_share"]` of the envs are waited for, 0 means one env."""
    share = spec.options.get("wait_share")
    wait_num = None if share is None else max(1, int(share * spec.env_num))
    build = functools.partial(ShmemVectorEnv, [factory] * spec.env_num, wait_num=wait_num)
    actions = array_batches(spec)
    return TianshouLoop(build, spec.env_num, actions, gathers_some=wait_num is not None)
