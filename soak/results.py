"""What a run of `make soak` has measured, as it is kept in figures.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import machine

FIGURES = "figures.json"


def now() -> dict[str, Any]:
    """Return when and where: goes with the figures of each entry."""
    load = Path("/proc/loadavg")
    return {
        **machine.when(),
        "machine": machine.describe(),
        "load_before": load.read_text().split()[0] if load.exists() else "unknown",
    }


def read(folder: Path) -> dict[str, Any]:
    """Return the results in a folder, by entry; empty if there are none."""
    path = folder / FIGURES
    return dict(json.loads(path.read_text())) if path.exists() else {}


def write(folder: Path, results: dict[str, Any]) -> None:
    """Write results into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FIGURES).write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
