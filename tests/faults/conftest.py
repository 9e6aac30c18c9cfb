from __future__ import annotations

from tests.contract.harness import world

__all__ = ["world"]
