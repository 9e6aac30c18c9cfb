"""The manager: the one launch, reset, step, send, recv and close of every kind."""

from __future__ import annotations

from envmgr.manager.manager import EnvManager

__all__ = ["EnvManager"]
