from __future__ import annotations

from tests.contract.harness import world
from tests.fake_ray import ray

__all__ = ["ray", "world"]
