from __future__ import annotations

from tests.rig import route

__all__ = ["route"]
