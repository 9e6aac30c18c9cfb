"""Timelines in the Chrome trace event format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import bisect
import itertools
import json
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envmgr.core.engine import Engine
from envmgr.core.statistics import Notes
from envmgr.errors import UnreadableRunError
from envmgr.texts import logged
from envmgr.whole_files import write_whole
from envmgr.wire.timeline import BATCH, STEP, Done

FORMAT = 1
TRAINER, HOSTS, ENVS = 1, 2, 3
"""Processes of a timeline."""

_NAMES = ("batch", "step", "reset")
_GATHERING = frozenset(("step", "recv", "recv_arrays"))
_SENDING = frozenset(("step", "send", "send_arrays"))
_US = 1e6
_MOST_US = 1e18
"""No event lasts as long as this, 30,000 years."""


def trace_of(notes: Notes) -> dict[str, Any]:
    """Return a timeline as the value of a JSON file."""
    events = [*_names(notes), *_happened(notes)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"envmgr_trace": FORMAT, "pid": os.getpid(), "env_num": notes.env_num},
    }


def write_trace(path: str, engine: Engine) -> None:
    """Write the timeline of an engine that is about to be closed; nothing if closing has begun.

    An error that keeps it from being written is logged.
    """
    hosts, moments = engine.supervisor.hosts, engine.supervisor.statistics.moments
    if hosts.tracer is not None and hosts.block is not None:
        try:
            notes = hosts.tracer.notes(hosts.env_num, hosts.block, moments)
            text = json.dumps(trace_of(notes), allow_nan=False, separators=(",", ":"))
            write_whole(path, text.encode())
        except OSError as error:
            logged(logging.WARNING, "the timeline cannot be written to %r: %s", path, error)


def _names(notes: Notes) -> Iterator[dict[str, Any]]:
    for pid, name in ((TRAINER, "trainer"), (HOSTS, "workers"), (ENVS, "envs")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    ids = {i for i, *_ in notes.phases} | {moment.env_id for moment in notes.moments}
    ids.update(range(notes.env_num))
    threads = [(TRAINER, 0, "public calls")]
    threads += [(HOSTS, index, f"worker {index}") for index in range(len(notes.done))]
    threads += [
        (ENVS, i, f"env {i}" if i < notes.env_num else f"spare env {i}") for i in sorted(ids)
    ]
    for pid, tid, name in threads:
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _happened(notes: Notes) -> Iterator[dict[str, Any]]:
    for name, began, ended in notes.calls:
        yield _span(name, "call", TRAINER, 0, began, ended)
    for env_id, name, began, ended in notes.phases:
        yield _span(name, "worker", ENVS, env_id, began, ended)
    yield from _failures(notes)
    of_envs: dict[int, list[Done]] = defaultdict(list)
    for index, done in enumerate(notes.done):
        for one in done:
            if one.what == BATCH:
                yield _span("batch", "worker", HOSTS, index, one.began, one.ended)
            elif one.row < notes.env_num:
                name = _NAMES[one.what]
                yield _span(name, "env", ENVS, one.row, one.began, one.ended)
                of_envs[one.row].append(one)
    yield from _waits(notes, of_envs)


def _span(
    name: str, category: str, pid: int, tid: int, began: float, ended: float
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": round(began * _US, 3),
        "dur": round((ended - began) * _US, 3),
    }


def _failures(notes: Notes) -> Iterator[dict[str, Any]]:
    """Yield failures as instants, and the time from each until the env was ready as a span."""
    failed: dict[int, float] = {}
    for env_id, generation, event, time_s in notes.moments:
        if event == "failed":
            failed.setdefault(env_id, time_s)
            yield {
                "ph": "i",
                "s": "t",
                "name": "failed",
                "cat": "failure",
                "pid": ENVS,
                "tid": env_id,
                "ts": round(time_s * _US, 3),
                "args": {"generation": generation},
            }
        elif env_id in failed:
            yield _span("repair", "failure", ENVS, env_id, failed.pop(env_id), time_s)


def _waits(notes: Notes, of_envs: Mapping[int, Sequence[Done]]) -> Iterator[dict[str, Any]]:
    """Yield when envs have waited, between two steps, to be gathered and for their actions.

    This is only known between steps that directly follow each other: where just a sample of the
    steps was recorded, others may lie in between.
    """
    gathers = sorted((end, begin) for name, begin, end in notes.calls if name in _GATHERING)
    sends = sorted((begin, end) for name, begin, end in notes.calls if name in _SENDING)
    for env_id, done in of_envs.items():
        done = sorted(done, key=lambda one: one.began)
        for one, after in itertools.pairwise(done):
            if one.what != STEP or after.passed_over:
                continue
            at = bisect.bisect_left(gathers, (one.ended, 0.0))
            if at == len(gathers):
                continue
            gathered = gathers[at][0]
            if gathered <= after.began or after.what == STEP:
                end = min(gathered, after.began)
                yield _span("to be gathered", "wait", ENVS, env_id, one.ended, end)
            if after.what != STEP or gathered > after.began:
                continue
            sent = bisect.bisect_right(sends, (after.began, float("inf"))) - 1
            if sent >= 0 and sends[sent][0] >= gathered:
                begin = sends[sent][0]
                yield _span("for the policy", "wait", ENVS, env_id, gathered, begin)


# -- reading ------------------------------------------------------------------------------------


def read_trace(path: str) -> list[dict[str, Any]]:
    """Return the events of a timeline that envmgr has written.

    Raises:
        UnreadableRunError: it is not a timeline, or not whole; the message says what could be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UnreadableRunError(f"{path!r} cannot be read: {error}") from error
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        n = sum(1 for _ in _whole_events(text))
        raise UnreadableRunError(
            f"{path!r} is no whole timeline: {error}. {n} events can be read in it."
        ) from error
    about = found.get("otherData") if isinstance(found, dict) else None
    if not isinstance(about, dict) or about.get("envmgr_trace") != FORMAT:
        raise UnreadableRunError(
            f"{path!r} is no timeline that this envmgr has written: there is no "
            f"otherData.envmgr_trace of {FORMAT} in it"
        )
    events = found.get("traceEvents")
    if not isinstance(events, list) or not all(map(_is_event, events)):
        raise UnreadableRunError(f"the traceEvents of {path!r} are no list of events")
    return events


def _is_event(event: Any) -> bool:
    if not isinstance(event, dict) or "ph" not in event:
        return False
    texts = event.get("name"), event.get("cat", "")
    return all(isinstance(text, str) for text in texts) and _is_time(event.get("dur", 0.0))


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < _MOST_US


def _whole_events(text: str) -> Iterator[Any]:
    """Yield the events at the beginning of a text that is cut off somewhere."""
    decoder, at = json.JSONDecoder(), text.find("[") + 1
    while 0 < at < len(text):
        try:
            event, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        yield event
        at += 1  # the comma


def totals_of(events: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, float]]:
    """Return, by category and name, how often events happened and for how many seconds in all."""
    counts: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        if event["ph"] in ("X", "i"):
            name = f"{event.get('cat', '')} {event['name']}"
            counts[name] += 1
            seconds[name] += event.get("dur", 0.0)
    return {name: (count, seconds[name] / _US) for name, count in counts.most_common()}
