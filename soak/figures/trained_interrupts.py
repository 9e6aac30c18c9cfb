"""Interrupts in adapters and collectors; see `interrupts`."""

from __future__ import annotations

from figures.interrupts import measure_trained as measure

__all__ = ["measure"]
