from __future__ import annotations

from tests.fake_ray import ray
from tests.rig import route

__all__ = ["ray", "route"]
