"""Turns what the probes have found into findings. Pure: figures in, findings out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from envmgr.config import ManagerConfig
from envmgr.errors import EnvTimeout
from envmgr.testing.checkup.findings import Finding, Level
from envmgr.testing.checkup.interrupting import Interrupted
from envmgr.testing.checkup.laboratory import ProbeResult, own_frames
from envmgr.testing.checkup.probes import CUT, Description, Outside, Plays, Trajectory
from envmgr.testing.checkup.processes import Holdings
from envmgr.texts import counted, short_time

_KINDS_OF_CONTRACT = {"spaces": "spaces", "observation": "spaces", "seed": "determinism"}
CHEAP_STEP_S = 50e-6
UNEVEN = 4.0
TOLERATED = ManagerConfig().max_failure_share
SLOW_RESET_STEPS = 20


def failed(part: str, result: ProbeResult, doing: str) -> Finding:
    """Return the finding for a probe that raised, crashed or hung."""
    text = f"{doing}: {result.text}"
    advice = "Run the env by itself with the same steps, and mend it."
    if result.stack:
        text += f"\n{result.stack.rstrip()}"
    if isinstance(result.failure, EnvTimeout):
        advice = "The stack says where it hangs. Set step_timeout and reset_timeout in any case."
    return Finding(part, Level.PROBLEM, text, advice)


def of_description(found: Description) -> list[Finding]:
    """Judge the construction, the dtypes and what can be sent."""
    grown = _difference(found.before, found.after)
    figures = {"construction_s": found.construction_s, **grown}
    text = f"{found.name}, built in {short_time(found.construction_s)}"
    if grown.get("rss_bytes", 0) > 0:
        text += f", with {grown['rss_bytes'] / 1e6:,.0f} MB more memory (imports included)"
    findings = [Finding("construction", Level.OK, text, figures=figures)]
    if found.handlers:
        findings.append(
            Finding(
                "signals",
                Level.WARNING,
                f"its construction replaces the handlers of {', '.join(found.handlers)}",
                "Workers are ended by SIGTERM, and trainers by Ctrl-C: leave signals alone.",
            )
        )
    if grown.get("children", 0) > 0:
        findings.append(
            Finding(
                "processes",
                Level.NOTE,
                f"it starts {grown['children']} processes",
                "They end with the worker, as long as they stay in its session. Needs daemon: "
                "false if it starts them by multiprocessing.",
            )
        )
    findings.append(_of_dtypes(found))
    findings += [_of_bounds(path, one, found) for path, one in found.outside.items()]
    if found.unpicklable:
        text = f"an info cannot be sent to the trainer: {found.unpicklable}"
        advice = "Put plain values and arrays into infos."
        findings.append(Finding("pickling", Level.PROBLEM, text, advice))
    return findings


def _of_dtypes(found: Description) -> Finding:
    if found.casts:
        return Finding(
            "dtypes",
            Level.NOTE,
            "; ".join(found.casts),
            "Each observation is cast; strict_dtype: true would refuse it. Return the space's.",
        )
    return Finding("dtypes", Level.OK, f"as its space says: {found.spaces[0]}")


def _of_bounds(path: str, found: Outside, described: Description) -> Finding:
    bound = f"{'high' if found.value > found.bound else 'low'} is {found.bound:g}"
    return Finding(
        "bounds",
        Level.WARNING,
        f"{path} is outside of its Box in {found.n} of "
        f"{counted(described.n_observations, 'observation')}: {found.value:g} at the farthest, "
        f"where {bound}",
        "Managers pass it on; what scales by the bounds of the space goes wrong. Widen the Box, or "
        "clip.",
        figures={"part": path, **found._asdict()},
    )


def of_contract(problems: Sequence[tuple[str, str]]) -> list[Finding]:
    """Judge what `env_problems` found."""
    findings = []
    for kind, message in problems:
        part, pickled = _KINDS_OF_CONTRACT.get(kind, kind), "no fixed layout" in message
        level = Level.WARNING if pickled or kind == "close" else Level.PROBLEM
        findings.append(Finding(part, level, message))
    if not findings:
        text = "spaces, observations, rewards and flags are as managers expect them"
        findings.append(Finding("contract", Level.OK, text))
    return findings


def of_trajectories(found: Mapping[str, ProbeResult]) -> list[Finding]:
    """Judge whether the same seed and actions gave the same values wherever the env ran.

    Args:
        found: trajectories by where they ran; the others are compared with the first.
    """
    findings = [
        failed("determinism", result, f"with the same seed, {name}")
        for name, result in found.items()
        if result.failure is not None
    ]
    runs: dict[str, Trajectory] = {n: o.value for n, o in found.items() if o.failure is None}
    if not runs:
        return findings
    where, reference = next(iter(runs.items()))
    if not reference.is_seeded:
        text = "the env takes no seeds, so runs cannot be repeated"
        advice = "Give it a seed method, or reset(seed=...)."
        return [*findings, Finding("determinism", Level.WARNING, text, advice)]
    place = _difference_at(reference.first, reference.again)
    if place is not None:
        findings.append(
            Finding(
                "determinism",
                Level.WARNING,
                f"the same env, reset with the same seed, differs from its first run at value "
                f"{place}",
                "Something of the first run is left over: have reset begin anew.",
            )
        )
    others = {n: _difference_at(reference.first, run.first) for n, run in runs.items()}
    differing = [name for name, place in others.items() if place is not None]
    if differing:
        findings.append(
            Finding(
                "determinism",
                Level.PROBLEM,
                f"the same seed and actions give something else {', '.join(differing)} than "
                f"{where}, from value {others[differing[0]]} on",
                "Draw all random numbers from generators that reset or seed sets; do not depend on "
                "hash order, time, pids or files.",
            )
        )
    if not findings:
        compared = [one for run in runs.values() for one in (run.first, run.again)]
        n = min(sum(value != CUT for value in one) for one in compared)
        text = f"{n} values are the same, twice over and {', '.join(runs)}"
        findings.append(Finding("determinism", Level.OK, text))
    return findings


class Losses(NamedTuple):
    """The trials in which an env's process was lost: it died, or hung.

    Attributes:
        results: the results of these trials.
        n_in_play: in how many of them random steps were taken before.
    """

    results: tuple[ProbeResult, ...] = ()
    n_in_play: int = 0

    def with_one(self, result: ProbeResult, in_play: bool) -> Losses:
        """Return these and one more."""
        return Losses((*self.results, result), self.n_in_play + in_play)


def of_failures(
    plays: Plays, losses: Mapping[str, Losses], n_tries: int, n_steps: int
) -> list[Finding]:
    """Judge failures that come now and then.

    Args:
        plays: the random steps of the probes that came to their end, and their failures.
        losses: the trials in which the process died, or hung, by the name of their number.
        n_tries: how often probes were tried.
        n_steps: the random steps of all these trials.
    """
    findings = []
    if plays.n_failed:
        share = plays.n_failed / max(plays.n_steps, 1)
        last = plays.failure.splitlines()[-1]
        text = f"{plays.n_failed:,} of {counted(plays.n_steps, 'random step')} raised: {last}"
        text += f"\n{own_frames(plays.failure)}"
        figures: dict[str, Any] = {"n_steps": plays.n_steps, "n_failed": plays.n_failed}
        findings.append(_of_share(share, text, figures))
    for name, (results, n_in_play) in losses.items():
        if not results:
            continue
        share = n_in_play / max(n_steps, 1)
        text = f"in {len(results)} of {counted(n_tries, 'trial')} {results[0].text}"
        if share:
            n = round(1 / share)
            text += f"; in about one of {n:,} random steps" if n > 1 else "; in most random steps"
        if results[0].stack:
            text += f"\n{results[0].stack.rstrip()}"
        figures = {"n_tries": n_tries, name: len(results), "share_of_steps": share}
        found = _of_share(share, text, figures)
        if name == "n_hung":
            advice = (
                f"Without step_timeout and reset_timeout a run would wait for ever. {found.advice}"
            )
            found = replace(found, advice=advice)
        findings.append(found)
    return findings


def _of_share(share: float, text: str, figures: Mapping[str, Any]) -> Finding:
    """Return the finding for failures in this share of the steps."""
    if share > TOLERATED:
        advice = f"A run ends where more fail than max_failure_share ({TOLERATED:g}). Mend it."
        return Finding("failures", Level.PROBLEM, text, advice, figures)
    advice = (
        "Managers go on with such an env, built anew or reset (on_failure: recover); the steps "
        "that fail are marked, and none is lost. Mend it where you can."
    )
    return Finding("failures", Level.WARNING, text, advice, figures)


def _difference_at(one: Sequence[int], other: Sequence[int]) -> int | None:
    if CUT in (*one[-1:], *other[-1:]):  # nothing of what came after a failure is known
        n = min(len(one) - (CUT in one), len(other) - (CUT in other))
        one, other = one[:n], other[:n]
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def of_methods(found: Mapping[str, str]) -> Finding:
    """Judge start methods that could not be tried, given the reasons by method."""
    if not found:
        return Finding("start methods", Level.OK, "every start method works")
    reasons = "; ".join(f"{name}: {' '.join(why.split())}" for name, why in found.items())
    return Finding("start methods", Level.NOTE, f"not tried: {reasons}")


def of_reset_options(empty: ProbeResult, unknown: ProbeResult) -> Finding:
    """Judge what resets do with empty params, and with params that they cannot know."""
    if empty.failure is not None:
        return failed("reset options", empty, "a second reset without params")
    if unknown.failure is None:
        return Finding("reset options", Level.OK, "resets take options; unknown ones do no harm")
    return Finding(
        "reset options",
        Level.NOTE,
        f"resets refuse options that they do not know: {unknown.text}",
        "manager.reset({env_id: params}) takes those that the env knows, and no others.",
    )


def of_pace(figures: Mapping[str, Any]) -> list[Finding]:
    """Judge the times of steps and resets."""
    step_s, reset_s = figures["step_mean_s"], figures["reset_mean_s"]
    length = figures["episode_steps"]
    text = (
        f"a step takes {short_time(step_s)} (median {short_time(figures['step_p50_s'])}, p99 "
        f"{short_time(figures['step_p99_s'])}), of which it waits "
        f"{figures['step_wait_share']:.0%}; a reset {short_time(reset_s)}"
    )
    if length is not None:
        text += f"; an episode of random actions {length:,.0f} steps"
    advice = []
    if step_s < CHEAP_STEP_S:
        advice.append("Steps are cheaper than waking a process: share workers, num_workers: auto.")
    if figures["step_p99_s"] > UNEVEN * figures["step_p50_s"] and step_s > 1e-3:
        advice.append("Steps are uneven: async_subprocess does not wait for the slowest.")
    if reset_s > SLOW_RESET_STEPS * step_s and reset_s > 1e-2 and length is not None:
        advice.append("Resets take as long as many steps: spare_env_num hides them.")
    limit_s = max(1.0, 20 * figures["step_max_s"])
    advice.append(f"A step_timeout of {limit_s:,.0f} s would find what hangs. `envmgr tune` tries.")
    return [Finding("times", Level.OK, text, " ".join(advice), figures=dict(figures))]


def of_interrupt(found: Interrupted, close_timeout_s: float) -> Finding:
    """Judge how a trainer ended after Ctrl-C."""
    part = "Ctrl-C"
    if found.problem:
        return Finding(part, Level.PROBLEM, found.problem)
    if found.left:
        text = f"{found.left} processes of the env were left {found.took_s:.1f} s after Ctrl-C"
        advice = "Have the env's processes stay in the worker's session, which is killed whole."
        return Finding(part, Level.PROBLEM, text, advice)
    figures = {"took_s": found.took_s}
    if found.took_s >= close_timeout_s:
        text = f"the trainer took {found.took_s:.1f} s to end: closing envs takes too long"
        advice = f"Workers are killed after close_timeout ({close_timeout_s:g} s): close faster."
        return Finding(part, Level.WARNING, text, advice, figures)
    text = f"a trainer with two envs ended after {found.took_s:.1f} s and left nothing"
    return Finding(part, Level.OK, text, figures=figures)


def of_rendering(found: Description, result: ProbeResult | None, mode: str | None) -> Finding:
    """Judge whether the env gives frames.

    Args:
        found: the env as it is configured.
        result: the result of rendering in `mode`; None if there is no mode to try.
        mode: the mode that was tried.
    """
    part = "render"
    if result is None:
        text = "it has no render modes" if not found.render_modes else "it has no rgb_array mode"
        return Finding(part, Level.OK, text)
    if result.failure is not None:
        level = Level.NOTE if found.render_mode is None else Level.WARNING
        text = failed(part, result, f"render_mode {mode}").text
        return Finding(part, level, text, "Frames and videos cannot be had of it.")
    kind, took_s = result.value
    given = "" if found.render_mode is not None else " (env.kwargs has none)"
    text = f"render_mode {mode}{given}: {kind} in {short_time(took_s)}"
    return Finding(part, Level.OK, text)


def _difference(before: Holdings, after: Holdings) -> dict[str, int]:
    pairs = zip(Holdings._fields, before, after, strict=True)
    return {name: b - a for name, a, b in pairs if a is not None and b is not None}
