"""Running statistics of what a manager hands out: normalising, and statistics of episodes."""

from __future__ import annotations

from envmgr.normalizing.normalization import Normalization, normalization_of

__all__ = ["Normalization", "normalization_of"]
