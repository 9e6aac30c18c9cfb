"""The manager: the one launch, reset, step, send, recv and close of every kind."""

from __future__ import annotations

from envmgr.core import ArrayBatch
from envmgr.manager.manager import EnvManager

__all__ = ["ArrayBatch", "EnvManager"]
