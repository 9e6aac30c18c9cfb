"""What a setting is expected to do: steps per second, from what one env and the machine are like.

A simulation of batches, in plain numbers: the trainer acts on the envs that are ready, workers take
their envs' steps one after the other, whatever computes needs a core, episodes end in resets. It
draws durations from those that were measured, always the same ones, and knows no clock.
"""

from __future__ import annotations

import bisect
import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from envmgr.tuning.settings import Setting

_SEED = 1
_LEAST_BATCHES = 60
_MOST_STEPS = 8_000
_LEAST_STEPS = 600
_CYCLES = 4
_RING_S = 200e-6
"""How long a worker goes on with a batch before it wakes the trainer for a part of it. A trainer
that watches on a core of its own could see each step at once; its rates are not those of that."""

_LEAD = 0.25
"""The part of a simulation that does not count."""


@dataclass(frozen=True)
class EnvFigures:
    """What one env is like. Times in seconds, on a core of its own.

    Attributes:
        steps_s: durations of steps, as they were measured.
        wait_share: the part of a step that needs no core.
        resets_s: durations of resets.
        reset_wait_share: likewise.
        episode_steps: steps of an episode, on average; infinity if none ends.
    """

    steps_s: Sequence[float]
    wait_share: float = 0.0
    resets_s: Sequence[float] = (0.0,)
    reset_wait_share: float = 0.0
    episode_steps: float = math.inf

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.steps_s) / len(self.steps_s)

    @property
    def reset_s(self) -> float:
        """Seconds of a reset."""
        return sum(self.resets_s) / len(self.resets_s)

    @property
    def reset_s_per_step(self) -> float:
        """Seconds of resets that come with one step."""
        return 0.0 if math.isinf(self.episode_steps) else self.reset_s / self.episode_steps


@dataclass(frozen=True)
class Machine:
    """What managers cost on a machine, in seconds of a core.

    Attributes:
        cores: that may be used.
        batch_s: of the trainer, for one call of `step`, whatever is in it.
        env_s: of the trainer, for each env of a batch.
        step_s: of a worker, for each step, the env's own time not counted.
        wake_s: of waking a worker and being answered by it, where there are as many as cores.
        crowd: a larger number of workers, and what waking one of them costs; None if nobody knows.
        policy_s: of the policy, for each batch.
    """

    cores: int
    batch_s: float = 20e-6
    env_s: float = 3e-6
    step_s: float = 3e-6
    wake_s: float = 30e-6
    crowd: tuple[int, float] | None = None
    policy_s: float = 0.0

    def wakes_s(self, n_workers: int) -> float:
        """Return what waking one of so many workers costs: nothing where they need not sleep."""
        if n_workers < self.cores:
            return 0.0
        if self.crowd is None or n_workers == self.cores:
            return self.wake_s
        crowd, crowd_s = self.crowd
        share = min(1.0, math.log(n_workers / self.cores) / math.log(crowd / self.cores))
        return self.wake_s + share * (crowd_s - self.wake_s)


def expected_rate(setting: Setting, env_num: int, env: EnvFigures, machine: Machine) -> float:
    """Return the steps per second that are expected of a setting."""
    return _Simulation(setting, env_num, env, machine).run()


class _Simulation:
    """Envs, workers, cores and a trainer, moved from batch to batch."""

    def __init__(self, setting: Setting, env_num: int, env: EnvFigures, machine: Machine) -> None:
        inline = not setting.has_workers
        n_workers = env_num if setting.num_workers is None else min(setting.num_workers, env_num)
        self._n, self._env, self._machine = env_num, env, machine
        self._wait_num = min(setting.wait_num, env_num)
        self._inline = inline
        self._wake_s = 0.0 if inline else machine.wakes_s(n_workers + setting.spare_env_num)
        self._step_s = 0.0 if inline else machine.step_s
        self._random = random.Random(_SEED)
        self._worker_of = [0 if inline else i * n_workers // env_num for i in range(env_num)]
        self._free_at = [0.0] * (1 if inline else n_workers)
        self._cores = [0.0] * (1 if inline else machine.cores)
        self._ready_at = [0.0] * env_num
        self._left = [self._length(phase=True) for _ in range(env_num)]
        self._spares = [0.0] * setting.spare_env_num
        self._done: list[tuple[float, float, int]] = []  # when finished, when rung for, which
        self._now = 0.0

    def run(self) -> float:
        """Return steps per second, once it has swung in."""
        steps, target, counted_from = 0, self._n_steps(), (0.0, 0)
        while steps < target:
            if not counted_from[1] and steps >= _LEAD * target:
                counted_from = (self._now, steps)
            steps += self._batch()
        elapsed = self._now - counted_from[0]
        return (steps - counted_from[1]) / max(elapsed, 1e-12)

    def _n_steps(self) -> float:
        """Return how many steps to simulate: enough batches, and enough episodes of each env."""
        steps = max(_LEAST_STEPS, _LEAST_BATCHES * self._n)
        if self._env.reset_s_per_step > 0.1 * self._env.step_s:
            steps = max(steps, int(_CYCLES * self._env.episode_steps * self._n))
        return min(steps, _MOST_STEPS)

    def _batch(self) -> int:
        """Act on the envs that are ready, gather, and return how many timesteps that gave."""
        if len(self._done) < self._n and min(self._ready_at) > self._now and not self._done:
            self._now = min(self._ready_at)
        ready = [i for i in range(self._n) if self._ready_at[i] <= self._now]
        machine = self._machine
        cost_s = machine.batch_s + machine.policy_s + machine.env_s * len(ready)
        self._now = self._on_core(self._now, cost_s)
        self._post(ready)
        done = sorted(self._done)
        wanted = min(int(self._wait_num), len(done))
        if not wanted:
            return 0
        enough = done[wanted - 1][0]
        if enough > self._now:
            self._now = max(self._now, min(rung for _, rung, _ in done if rung >= enough))
        taken = [one for one in done if one[0] <= self._now]
        self._done = done[len(taken) :]
        for finished, _, i in taken:
            self._take(finished, i)
        return len(taken)

    def _post(self, ready: Sequence[int]) -> None:
        """Have workers take the steps of these envs, those that are free first."""
        rings = sorted({self._worker_of[i] for i in ready}, key=lambda w: self._free_at[w])
        by_worker: dict[int, list[int]] = {worker: [] for worker in rings}
        for i in ready:
            by_worker[self._worker_of[i]].append(i)
            self._ready_at[i] = math.inf
        turns = [(max(self._now, self._free_at[w]), w, True) for w in rings]
        heapq.heapify(turns)
        rung_at = {worker: begin for begin, worker, _ in turns}
        held: dict[int, list[tuple[float, int]]] = {worker: [] for worker in rings}
        while turns:
            begin, worker, is_woken = heapq.heappop(turns)
            i = by_worker[worker].pop(0)
            wait_s, cpu_s = self._parts(self._draw(self._env.steps_s), self._env.wait_share)
            cpu_s += self._step_s + (self._wake_s if is_woken else 0.0)
            finished = self._on_core(begin, cpu_s) + wait_s
            held[worker].append((finished, i))
            if not by_worker[worker] or finished - rung_at[worker] >= _RING_S:
                self._done += [(at, finished, which) for at, which in held[worker]]
                rung_at[worker] = finished
                held[worker].clear()
            self._free_at[worker] = finished
            if by_worker[worker]:
                heapq.heappush(turns, (finished, worker, False))
        if self._inline:
            self._now = self._free_at[0]

    def _take(self, finished: float, i: int) -> None:
        """Deliver a timestep; begin a reset if it ends an episode."""
        self._left[i] -= 1
        if self._left[i] > 0:
            self._ready_at[i] = self._now
            return
        self._left[i] = self._length()
        wait_s, cpu_s = self._parts(self._draw(self._env.resets_s), self._env.reset_wait_share)
        worker = self._worker_of[i]
        if self._spares:  # takes the place of the env, whose host is reset as a spare
            self._spares.sort()
            self._ready_at[i] = max(self._now, self._spares[0])
            self._spares[0] = self._on_core(finished, cpu_s) + wait_s
            return
        begin = max(finished, self._free_at[worker])
        self._ready_at[i] = self._free_at[worker] = self._on_core(begin, cpu_s) + wait_s
        if self._inline:
            self._now = self._ready_at[i]

    def _on_core(self, begin: float, cpu_s: float) -> float:
        """Return when work is done that begins as soon as a core is free for it."""
        if cpu_s <= 0.0:
            return begin
        cores = self._cores
        # Of the cores that are free by then, the one that is free last; the others stay free.
        k = max(bisect.bisect_right(cores, begin) - 1, 0)
        end = max(begin, cores.pop(k)) + cpu_s
        bisect.insort(cores, end)
        return end

    def _parts(self, duration_s: float, wait_share: float) -> tuple[float, float]:
        return duration_s * wait_share, duration_s * (1.0 - wait_share)

    def _draw(self, durations_s: Sequence[float]) -> float:
        return self._random.choice(durations_s)

    def _length(self, *, phase: bool = False) -> float:
        """Return the steps of an episode; of one that has begun already, what is left of it."""
        mean = self._env.episode_steps
        if math.isinf(mean):
            return mean
        length = mean * self._random.uniform(0.5, 1.5)
        return max(1.0, round(length * (self._random.random() if phase else 1.0)))


@dataclass(frozen=True)
class Anchors:
    """Rates of envs that do nothing, in steps per second.

    Attributes:
        env_num: how many there were.
        one: a single env.
        shared: all in one worker.
        spread: all in as many workers as there are cores; None if that is one, or one each.
        each: a worker each.
    """

    env_num: int
    one: float
    shared: float
    each: float
    spread: float | None = None


def fitted_machine(anchors: Anchors, cores: int, kind: str) -> Machine:
    """Return what managers cost here, such that the model gives what was measured of null envs."""
    n = anchors.env_num
    batch_s = n / anchors.shared
    per_env_s = max(0.0, (batch_s - 1.0 / anchors.one) / max(n - 1, 1))
    per_env_s = min(per_env_s, batch_s / n)
    fixed_s = max(1e-6, batch_s - n * per_env_s)
    null = EnvFigures(steps_s=(0.0,))
    machine = Machine(cores, fixed_s, 0.6 * per_env_s, 0.4 * per_env_s, 0.0)
    if cores == 1:  # nobody spins: half of what one worker costs is being woken
        machine = replace(machine, batch_s=fixed_s / 2, wake_s=fixed_s / 2)
    if n == 1:
        return machine

    def solved(setting: Setting, rate: float, machine_of: Callable[[float], Machine]) -> Machine:
        wake_s = _solved(lambda s: expected_rate(setting, n, null, machine_of(s)), rate, 1e-7, 1e-2)
        return machine_of(wake_s)

    if anchors.spread is None:
        return solved(Setting(kind), anchors.each, lambda s: replace(machine, wake_s=s))
    spread = Setting(kind, cores)
    machine = solved(spread, anchors.spread, lambda s: replace(machine, wake_s=s))
    few = machine
    return solved(Setting(kind), anchors.each, lambda s: replace(few, crowd=(n, s)))


def _solved(rate_of: Callable[[float], float], rate: float, low: float, high: float) -> float:
    """Return the cost at which a rate, which falls with it, is the one that was measured."""
    for _ in range(24):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if rate_of(middle) > rate else (low, middle)
    return math.sqrt(low * high)
