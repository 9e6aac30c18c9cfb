"""The order in which an env is checked. Yields what is found as soon as it is known."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from envmgr.errors import EnvCrash, EnvManagerError, EnvTimeout
from envmgr.manager.tally import ATTEMPTS, LESS, EnvHang, Tally
from envmgr.testing.checkup import leaks, probes, verdicts
from envmgr.testing.checkup.findings import Finding, Level
from envmgr.testing.checkup.interrupting import interrupt
from envmgr.testing.checkup.laboratory import Laboratory, ProbeResult
from envmgr.texts import counted

PACE_S = 1.0
REBUILT = 6
METHODS = ("fork", "spawn", "forkserver")
FRAMES = "rgb_array"
ENOUGH = 2
"""After this many probes that hung at each attempt, the rest would only say the same."""


@dataclass(frozen=True)
class CheckOptions:
    """How thoroughly to look.

    Attributes:
        episodes: how many episodes the env is to endure.
        limit_s: how long each part may take.
        n_steps: steps whose values are compared.
        seed: the seed to reset with.
        methods: start methods to try besides the server.
        close_timeout_s: as `manager.close_timeout`.
        step_timeout_s: as `manager.step_timeout`. A step or a reset that takes longer hangs; and
            so does one that takes longer than half of `limit_s`.
        reset_timeout_s: as `manager.reset_timeout`; likewise.
        worker_log: as `manager.worker_log`.
    """

    episodes: int = 1000
    limit_s: float = 60.0
    n_steps: int = 200
    seed: int = 0
    methods: tuple[str, ...] = METHODS
    close_timeout_s: float = 5.0
    step_timeout_s: float | None = None
    reset_timeout_s: float | None = None
    worker_log: str | None = None


def check_up(
    factory: Callable[[], Any],
    options: CheckOptions | None = None,
    *,
    with_frames: Callable[[], Any] | None = None,
    begin: Callable[[str], None] = lambda part: None,
) -> Iterator[Finding]:
    """Yield findings about an env, each as soon as it is known.

    Nothing of the env runs in this process. An env that cannot be built is not looked at further.

    Args:
        factory: builds one env.
        options: how thoroughly to look.
        with_frames: builds one env in render mode `rgb_array`, if `factory` sets no mode.
        begin: called with the name of each part before it begins.

    Raises:
        EnvManagerError: no worker process can be started at all.
    """
    options = options or CheckOptions()
    limit_s, log = options.limit_s, options.worker_log
    # A probe of many steps takes them for half of the time at most: one that hangs is found before
    # all of it is over.
    step_s, reset_s = (
        min(limit_s / 2, math.inf if one is None else one)
        for one in (options.step_timeout_s, options.reset_timeout_s)
    )
    with (
        contextlib.closing(Laboratory(places=2, limit_s=limit_s, worker_log=log)) as laboratory,
        contextlib.closing(Tally(step_s=step_s, reset_s=reset_s)) as tally,
    ):
        check = _Check(laboratory, factory, options, with_frames, tally)
        for name, part in check.parts.items():
            begin(name)
            yield from part()
            if check.is_over:
                yield from check.now_and_then()
                text = f"the rest was not looked at, as it {check.is_over}"
                yield Finding("check", Level.NOTE, text)
                return
        yield from check.now_and_then()


class _Check:
    """The parts of a check, and what they have found so far.

    Attributes:
        parts: the parts by name, in their order.
        is_over: why the rest is not worth looking at; empty as long as it is.
    """

    def __init__(
        self,
        laboratory: Laboratory,
        factory: Callable[[], Any],
        options: CheckOptions,
        with_frames: Callable[[], Any] | None,
        tally: Tally,
    ) -> None:
        self._laboratory = laboratory
        self._tally = tally
        self._factory = factory
        self._options = options
        # A probe of many steps ends early if these are slow, so that only a stuck one counts as a
        # hang.
        self._probe_s = options.limit_s / 4
        self._with_frames = with_frames
        self._n_hangs = self._n_tries = 0
        self._plays = probes.Plays()
        self._losses = {"n_died": verdicts.Losses(), "n_hung": verdicts.Losses()}
        self.is_over = ""
        self.parts: dict[str, Callable[[], list[Finding]]] = {
            "construction": self._contract,
            "determinism": self._determinism,
            "reset options": self._reset_options,
            "times": self._times,
            counted(options.episodes, "episode"): self._endurance,
            "closing": self._closing,
            "render": self._rendering,
            "Ctrl-C": self._interrupt,
        }

    def _try(
        self,
        probe: Callable[..., Any],
        factory: Callable[[], Any],
        *args: Any,
        effort: float | None = None,
        place: int = 0,
    ) -> ProbeResult:
        result = self._run(self._laboratory, probe, factory, *args, effort=effort, place=place)
        self._n_hangs += isinstance(result.failure, EnvTimeout)
        if self._n_hangs >= ENOUGH:
            self.is_over = "hangs again and again"
        return result

    def _run(
        self,
        laboratory: Laboratory,
        probe: Callable[..., Any],
        factory: Callable[[], Any],
        *args: Any,
        effort: float | None = None,
        place: int = 0,
    ) -> ProbeResult:
        """Run a probe; if the env dies or hangs, as it may now and then, run it in a new process.

        A hang that is none of a random step or reset takes all of the probe's time limit, and the
        probe is not tried again.

        Args:
            laboratory: where to run the probe.
            probe: the function to run.
            factory: builds the env; the probe's first argument.
            *args: the probe's last arguments.
            effort: its argument between these, unless it is None: how many steps, seconds or the
                like the probe takes. It is reduced at each attempt.
            place: in which process of the laboratory to run the probe.
        """
        for _ in range(ATTEMPTS):
            efforts = () if effort is None else (effort,)
            packed = (self._tally.path, probe, factory, *efforts, *args)
            n_before, self._n_tries = self._tally.n, self._n_tries + 1
            result = laboratory.run(probes.counted_plays, *packed, place=place, tally=self._tally)
            failure = result.failure
            if not isinstance(failure, (EnvCrash, EnvHang)):
                break
            name = "n_hung" if isinstance(failure, EnvHang) else "n_died"
            self._losses[name] = self._losses[name].with_one(result, self._tally.n > n_before)
            if effort is not None:
                effort = max(1, effort // LESS) if isinstance(effort, int) else effort / LESS
        if result.failure is not None:
            return result
        value, plays = result.value
        self._plays += plays
        return ProbeResult(value)

    def now_and_then(self) -> list[Finding]:
        """Judge the failures that come now and then."""
        return verdicts.of_failures(self._plays, self._losses, self._n_tries, self._tally.n)

    def _judged(
        self,
        part: str,
        doing: str,
        judge: Callable[[Any], list[Finding]],
        probe: Callable[..., Any],
        effort: float,
        *args: Any,
    ) -> list[Finding]:
        result = self._try(probe, self._factory, *args, effort=effort)
        if result.failure is not None:
            return [verdicts.failed(part, result, doing)]
        return judge(result.value)

    def _contract(self) -> list[Finding]:
        options = self._options
        described = self._described = self._try(
            probes.describe, self._factory, self._probe_s, effort=options.n_steps
        )
        kept = self._try(
            probes.contract, self._factory, options.seed, self._probe_s, effort=options.n_steps
        )
        findings: list[Finding] = []
        if kept.failure is not None:
            findings.append(verdicts.failed("contract", kept, "random steps"))
        else:
            findings += verdicts.of_contract(kept.value)
        if described.failure is None:
            return [*verdicts.of_description(described.value), *findings]
        self.is_over = "cannot be built and stepped"
        if kept.failure is None and kept.value:  # which says it better
            return findings
        return [verdicts.failed("construction", described, "building it and a few steps")]

    def _determinism(self) -> list[Finding]:
        options = self._options
        n_steps = options.n_steps
        arguments = (probes.trajectory, self._factory, options.seed, n_steps, self._probe_s)
        found = {
            "in a worker": self._try(*arguments, effort=n_steps),
            "in another": self._try(*arguments, effort=n_steps, place=1),
        }
        untried = {}
        for method in options.methods if not self.is_over else ():
            try:
                opened = Laboratory(method, 1, options.limit_s, options.worker_log)
                with contextlib.closing(opened) as other:
                    found[f"with {method}"] = self._run(other, *arguments, effort=n_steps)
            except EnvManagerError as error:
                untried[method] = str(error)
        findings = verdicts.of_trajectories(found)
        return [*findings, verdicts.of_methods(untried)] if options.methods else findings

    def _reset_options(self) -> list[Finding]:
        empty, unknown = (
            self._try(probes.reset_with, self._factory, params)
            for params in ({}, {"envmgr_check": 1})
        )
        return [verdicts.of_reset_options(empty, unknown)]

    def _times(self) -> list[Finding]:
        seconds = min(PACE_S, self._probe_s)
        return self._judged("times", "random steps", verdicts.of_pace, probes.pace, seconds)

    def _endurance(self) -> list[Finding]:
        episodes, limit_s = self._options.episodes, self._options.limit_s / 2

        def judge(found: probes.Endured) -> list[Finding]:
            return leaks.of_endurance(found, episodes)

        return self._judged("leaks", "running episodes", judge, probes.endure, episodes, limit_s)

    def _closing(self) -> list[Finding]:
        doing, limit_s = "building and closing envs", self._options.limit_s / 2
        return self._judged("closing", doing, leaks.of_rebuilding, probes.rebuild, REBUILT, limit_s)

    def _rendering(self) -> list[Finding]:
        described: probes.Description = self._described.value
        mode, builds = described.render_mode, self._factory
        if mode is None and FRAMES in described.render_modes and self._with_frames is not None:
            mode, builds = FRAMES, self._with_frames
        result: ProbeResult | None = None
        if mode is not None and mode != "human":  # which would open a window
            result = self._try(probes.rendered, builds)
        return [verdicts.of_rendering(described, result, mode)]

    def _interrupt(self) -> list[Finding]:
        found = interrupt(self._factory, self._options.limit_s)
        return [verdicts.of_interrupt(found, self._options.close_timeout_s)]
