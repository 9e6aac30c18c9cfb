"""What users call: the manager, its snapshots, and what it has while envs run."""

from __future__ import annotations

from envmgr.core import ArrayBatch, InfoColumn, InfoColumns
from envmgr.manager.manager import EnvManager

__all__ = ["ArrayBatch", "EnvManager", "InfoColumn", "InfoColumns"]
