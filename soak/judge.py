"""Turns what was seen of a fault into a cell of the scoreboard."""

from __future__ import annotations

from typing import Any, NamedTuple

from faults import ENV_NUM, FAULTS, VICTIM, Fault
from observe import names_victim
from probe import ENOUGH

PACKAGES = {
    "envmgr": "envmgr",
    "gymnasium": "gymnasium",
    "sb3": "stable_baselines3",
    "tianshou": "tianshou",
    "ding": "ding",
    "torchrl": "torchrl",
    "rllib": "ray",
    "pufferlib": "pufferlib",
}
_OWN_ERRORS = {
    "raise-step": "RuntimeError",
    "raise-reset": "RuntimeError",
    "raise-build": "RuntimeError",
    "local-exception": "LocalError",
    "two-arguments": "TwoArgumentsError",
}
_DOCUMENTED = {("sb3", "nan"): "ValueError"}
"""The error that the documentation of a library announces for a fault."""

_VICTIM_KEYS = (str(VICTIM), VICTIM)

CHECKS = {
    "goes_on": "the other envs go on, without a reset of all",
    "victim_back": "the env itself comes back",
    "typed": "the error is the library's own, the env's own, or a timeout",
    "named": "the error, or the log, names the env",
    "right_data": "no wrong data is delivered",
    "closes": "`close()` ends within 10 s and raises nothing",
    "clean": "no process is left running",
    "reaped": "no zombie is left while the trainer lives",
}


class Cell(NamedTuple):
    """What a library did with a fault.

    Attributes:
        text: what it did, in a few words.
        checks: whether each of CHECKS held, by name; None where the question does not arise.
        error: the first error that the trainer saw, as `probe.describe` gives it.
    """

    text: str
    checks: dict[str, bool | None]
    error: dict[str, Any] | None


NOT_OFFERED = Cell("not offered", dict.fromkeys(CHECKS), None)
"""The cell of a library that has nothing like what the fault is about."""


def judge(library: str, fault: str, facts: dict[str, Any]) -> Cell:
    """Return the cell of one library and one fault."""
    line = FAULTS[fault]
    steps = [c for c in facts["calls"] if c["after_fault"] and c["call"] in ("step", "reset")]
    error = _first_error(line, facts["calls"] if line.where == "build" else steps)
    checks: dict[str, bool | None] = dict.fromkeys(CHECKS)
    if line.where in ("step", "idle", "reset"):
        counts = _right_counts(steps)
        others = _others_are_right(counts) and not _others_waited(line, steps)
        checks["goes_on"] = others and not _was_reset(steps)
        checks["victim_back"] = counts[VICTIM] > 0
        checks["right_data"] = not any(call.get("wrong") for call in steps)
    if error is not None:
        checks["typed"] = _is_typed(library, fault, error)
        checks["named"] = (
            error["env_id"] == VICTIM or names_victim(error["text"]) or facts["named_in_log"]
        )
    elif line.where in ("step", "idle", "reset") and not checks["goes_on"]:
        checks["typed"] = checks["named"] = False
    checks["closes"] = _closes(facts)
    left = facts.get("left_after_close")
    checks["clean"] = "process" not in [*(left or ()), *facts["left_after_end"]]
    checks["reaped"] = None if left is None else "zombie" not in left
    verdict = _verdict(line, facts, steps, checks, error)
    return Cell(_text(line, verdict, facts, checks), checks, error)


def _first_error(line: Fault, calls: list[dict[str, Any]]) -> dict[str, Any] | None:
    if line.where not in ("step", "idle", "reset", "build"):
        return None
    for call in calls:
        if call["error"] is not None and call["error"]["type"] != "KeyboardInterrupt":
            return dict(call["error"])
        for key in _VICTIM_KEYS:
            if key in call.get("errors", {}):
                return dict(call["errors"][key])
    return None


def _right_counts(steps: list[dict[str, Any]]) -> dict[int, int]:
    """Return how many right timesteps each env gave; of the victim, after the faulty call."""
    counts = dict.fromkeys(range(ENV_NUM), 0)
    for number, call in enumerate(steps):
        for env_id in call.get("right", ()):
            if env_id != VICTIM or number > 0:
                counts[env_id] += 1
    return counts


def _others_are_right(counts: dict[int, int]) -> bool:
    return all(counts[i] >= ENOUGH for i in range(ENV_NUM) if i != VICTIM)


def _others_waited(line: Fault, steps: list[dict[str, Any]]) -> bool:
    """Return whether another env with a user of its own was late in any round: none is to wait."""
    others = {i for i in range(ENV_NUM) if i != VICTIM}
    return bool(line.users) and any(others - set(call.get("right", ())) for call in steps)


def _was_reset(steps: list[dict[str, Any]]) -> bool:
    return any(call["call"] == "reset" for call in steps)


def _is_typed(library: str, fault: str, error: dict[str, Any]) -> bool:
    return (
        error["modules"][0] == PACKAGES[library]
        or error["type"] in (_OWN_ERRORS.get(fault), _DOCUMENTED.get((library, fault)))
        or (error["is_timeout"] and (FAULTS[fault].same or fault).startswith(("hang", "stop")))
    )


def _closes(facts: dict[str, Any]) -> bool | None:
    calls = [call for call in facts["calls"] if call["call"].startswith("close")]
    hung = any(call.startswith("close") for call in facts["hangs"] or ())
    if not calls and not hung:
        return None
    return not hung and all(call["error"] is None for call in calls)


def _text(line: Fault, verdict: str, facts: dict[str, Any], checks: dict[str, bool | None]) -> str:
    parts = [verdict]
    if checks["right_data"] is False:
        parts.append("wrong data")
    parts += _close_words(facts)
    if line.users and not facts["ends"]:  # a user cannot get out of a call
        parts.append("the trainer does not end")
    parts += _left_words(facts.get("left_after_close") or [], "left behind")
    parts += _left_words(facts["left_after_end"], "left for good")
    return "; ".join(filter(None, parts))


def _left_words(left: list[str], words: str) -> list[str]:
    zombies = left.count("zombie")
    counts = ((len(left) - zombies, words), (zombies, f"as zombies {words}"))
    return [f"{n} {text}" for n, text in counts if n]


def _verdict(
    line: Fault,
    facts: dict[str, Any],
    steps: list[dict[str, Any]],
    checks: dict[str, bool | None],
    error: dict[str, Any] | None,
) -> str:
    hung = [call for call in facts["hangs"] or () if not call.startswith("close")]
    if hung:
        before = "" if error is None else f"stops: {error['type']}, then "
        return f"{before}hangs" + ("" if facts["interruptible"] else ", Ctrl-C does not help")
    early = facts["ended_early"]
    if early is not None and line.name not in ("trainer-killed", "exit-open"):
        return f"the trainer ends (status {early['status']})"
    name = "" if error is None or (line.where == "reset" and checks["goes_on"]) else error["type"]
    if line.where == "build":
        return f"refused: {name}" if name else _start_words(facts)
    if line.where in ("close", "trainer"):
        if not facts["ends"]:
            return "does not end"
        return "" if checks["closes"] is False else "ends"
    went_on = "goes on" if checks["victim_back"] else "the others go on"
    if checks["goes_on"]:
        return f"{went_on}: {name}" if name else went_on
    if _others_are_right(_right_counts(steps)):
        how = "goes on after a reset of all" if _was_reset(steps) else "the others wait with it"
        return f"{how}: {name}" if name else how
    return f"stops: {name}" if name else "stops"


def _start_words(facts: dict[str, Any]) -> str:
    """Return the words for a start that raised nothing, though an env could not be built."""
    started = [call["envs"] for call in facts["calls"] if "envs" in call]
    return "goes on without it" if any(VICTIM not in envs for envs in started) else "not noticed"


def _close_words(facts: dict[str, Any]) -> list[str]:
    hung = [call for call in facts["hangs"] or () if call.startswith("close")]
    raised = [
        f"{call['call']} raises {call['error']['type']}"
        for call in facts["calls"]
        if call["call"].startswith("close") and call["call"] not in hung and call["error"]
    ]
    return [*raised, *(f"{call} hangs" for call in hung)]
