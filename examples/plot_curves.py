"""Plot learning curves that the examples have written with `--curve FILE`.

    python examples/sb3_ppo_killed_workers.py --curve killed.json
    python examples/plot_curves.py killed.png 'PPO on CartPole-v1' 'workers killed=killed.json'

It needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path


def write_curve(path: Path | None, steps: Sequence[float], returns: Sequence[float]) -> None:
    """Write a curve into a file, if one was asked for."""
    if path is not None:
        path.write_text(json.dumps({"steps": list(steps), "returns": list(returns)}) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Plot what the command line names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path, help="where the plot goes")
    parser.add_argument("title")
    parser.add_argument("curves", nargs="+", metavar="LABEL=FILE")
    asked = parser.parse_args(arguments)
    figure, axes = pyplot.subplots(figsize=(5.4, 3.0), layout="constrained")
    for labelled in asked.curves:
        label, _, file = labelled.rpartition("=")
        curve = json.loads(Path(file).read_text())
        axes.plot([step / 1000 for step in curve["steps"]], curve["returns"], label=label)
    axes.set_title(asked.title, fontsize=8)
    axes.set_xlabel("env steps (thousands)")
    axes.set_ylabel("mean return")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(asked.picture, dpi=90)


if __name__ == "__main__":
    main()
