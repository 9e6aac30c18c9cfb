"""What does it cost to bring batches of observations to a GPU? Paired rounds, with PyTorch.

    python benchmarks/device_batches.py --n 64 --workers 2 --rounds 10

Envs with 84x84x4 images run on workers of a manager whose trainer uses the GPU. Each way to bring a
batch there is measured by the same loop over the same envs: batches are received, copied, compared
now and then with what the envs have given (a wrong one ends the run), and acted on. Printed are
medians over rounds, in microseconds per batch: of the copies alone, from the call until the device
has all of it, and of the whole loop.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from envs import ImageEnv
from paired import Cost, paired_rounds

import envmgr

SHAPE = (84, 84, 4)
CHECKED_EVERY = 10


def plain(device: torch.device) -> Callable[[Any], torch.Tensor]:
    """Return what copies a batch as it is: PyTorch goes through pinned memory of its own."""
    return lambda obs: torch.from_numpy(obs).to(device)


def pinned(device: torch.device, n: int) -> Callable[[Any], torch.Tensor]:
    """Return what copies a batch into pinned memory first, which the device then reads itself."""
    staged = torch.empty((n, *SHAPE), dtype=torch.uint8, pin_memory=True)
    window = staged.numpy()

    def copy(obs: Any) -> torch.Tensor:
        np.copyto(window, obs)
        return staged.to(device, non_blocking=True)

    return copy


class Loop:
    """A manager, and a way of bringing its batches to the device.

    Args:
        n: number of envs.
        workers: that share them; 0 for envs in the trainer's process.
        copy_on_get: of the manager.
        to_device: copies a batch; None leaves it where it is.
    """

    def __init__(self, n: int, workers: int, copy_on_get: Any, to_device: Any) -> None:
        kind: dict[str, Any] = {"type": "subprocess", "num_workers": workers}
        self._manager = envmgr.make(
            functools.partial(ImageEnv, SHAPE),
            n,
            seed=0,
            copy_on_get=copy_on_get,
            **(kind if workers else {"type": "base"}),
        )
        self._manager.launch()
        self._to_device = to_device
        self._actions = np.ones(n, np.int64)
        self._env_ids = self._manager.ready_arrays().env_ids

    def run(self, batches: int) -> tuple[float, float]:
        """Take batches; return the seconds that the copies took, and all of it."""
        copying_s, began = 0.0, time.perf_counter()
        for number in range(batches):
            self._manager.send_arrays(self._env_ids, self._actions)
            batch = self._manager.recv_arrays()
            if self._to_device is None:
                continue
            started = time.perf_counter()
            there = self._to_device(batch.obs)
            torch.cuda.synchronize()
            copying_s += time.perf_counter() - started
            if number % CHECKED_EVERY == 0 and not np.array_equal(there.cpu().numpy(), batch.obs):
                raise AssertionError("the device has another batch than the trainer")
        return copying_s, time.perf_counter() - began

    def close(self) -> None:
        """Close."""
        self._manager.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=64, help="number of envs")
    parser.add_argument("--workers", type=int, default=2, help="0: in the trainer's process")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batches", type=int, default=100, help="in each window")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU that PyTorch can use here")
    device = torch.device("cuda")
    torch.zeros(1, device=device)  # the trainer uses the GPU before its workers are started
    ways: dict[str, tuple[Any, Any]] = {
        "left in host memory, views until the next send": ("until_send", None),
        "private arrays, .to(device)": (True, plain(device)),
        "views until the next send, .to(device)": ("until_send", plain(device)),
        "views, through one pinned buffer": ("until_send", pinned(device, options.n)),
    }
    loops = {
        name: Loop(options.n, options.workers, views, to_device)
        for name, (views, to_device) in ways.items()
    }
    found: dict[str, list[Cost]] = {name: [] for name in loops}
    for sums in paired_rounds(loops, options.rounds, options.batches):
        for name, seconds in sums.items():
            found[name].append(seconds)
    for loop in loops.values():
        loop.close()
    mib = options.n * int(np.prod(SHAPE)) / 2**20
    print(
        f"{torch.cuda.get_device_name(device)}, PyTorch {torch.__version__}; {options.n} envs on "
        f"{options.workers} workers, {mib:.1f} MiB per batch; medians of {options.rounds} rounds"
    )
    for name, seconds in found.items():
        copying, all_of_it = (
            1e6 * statistics.median(window[k] for window in seconds) / (2 * options.batches)
            for k in (0, 1)
        )
        print(f"{name:48} copies {copying:8.1f} us   whole loop {all_of_it:8.1f} us per batch")


if __name__ == "__main__":
    main()
