"""Reads the folder of a run that has ended, goes on or was killed; it may hold anything at all.

An episode log is read, too: it is all that there is of a run that `envmgr run` has not made.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from envmgr.errors import UnreadableRunError
from envmgr.observing.status_boards import PROCESS
from envmgr.reporting.files import (
    CONFIG,
    EPISODES,
    RUN,
    SAMPLES,
    SUMMARY,
    Began,
    Episode,
    LogLine,
    Sample,
    Summary,
    sum_of,
)
from envmgr.texts import exit_text
from envmgr.untrusted import opened_file

MOST_FAILURES = 100
"""How many failures keep their texts, and how many causes their names; all are counted."""

OTHERS = "others"
"""The name under which further causes are counted."""

MOST_OF_A_TEXT = 8000
"""How many characters of a failure's text are kept: half from its beginning, half from its end."""

_LONGEST_LINE = 1 << 20
_LARGEST_FILE = 1 << 26
_LARGEST_CONFIG = 1 << 17

_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)

_Line = TypeVar("_Line", Episode, Sample, LogLine)
_Kind = TypeVar("_Kind", Episode, Sample, LogLine, Summary, Began)


@dataclass(frozen=True)
class Failed:
    """A failure of an env.

    Attributes:
        text: what it says, with stacks where there are some.
        env_id: the env that failed; None if only the text is known.
        elapsed_s: when it failed; likewise.
    """

    text: str
    env_id: int | None = None
    elapsed_s: float | None = None


@dataclass
class Run:
    """What could be read of a run.

    Attributes:
        path: path of its folder.
        name: name of its folder.
        unread: what could not be read, a sentence each.
        goes_on: whether it has not ended, or was killed.
        summary: the summary; None if there is none.
        config: the text of the config; likewise.
        began_s: when it was begun, in whole seconds since 1970; None if that is not known.
        samples: the samples, in their order.
        failures: the first `MOST_FAILURES` of those that ended episodes.
        env_ids, lengths, returns, ended_s, abnormal: values of the episodes, in their order.
        causes: how many failures of each kind an episode log has; None for a folder.
        outcomes: how many episodes of each outcome, likewise.
        failures_by_env: how many failures each env is charged with, likewise.
    """

    path: Path
    name: str
    unread: list[str] = field(default_factory=list)
    goes_on: bool = False
    summary: Summary | None = None
    config: str | None = None
    began_s: float | None = None
    samples: list[Sample] = field(default_factory=list)
    failures: list[Failed] = field(default_factory=list)
    env_ids: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[float] = field(default_factory=lambda: array("d"))
    returns: array[float] = field(default_factory=lambda: array("d"))
    ended_s: array[float] = field(default_factory=lambda: array("d"))
    abnormal: bytearray = field(default_factory=bytearray)
    causes: Counter[str] | None = None
    outcomes: Counter[str] | None = None
    failures_by_env: Counter[int] | None = None

    def add(self, episode: Episode) -> None:
        """Add an episode."""
        self.env_ids.append(episode.env_id)
        self.lengths.append(episode.length)
        found = sum_of(episode.returned)  # None if it was not finite
        self.returns.append(float("nan") if found is None else found)
        self.ended_s.append(episode.ended_s)
        self.abnormal.append(episode.abnormal)
        if episode.failure is not None and len(self.failures) < MOST_FAILURES:
            text = shortened(episode.failure)
            self.failures.append(Failed(text, episode.env_id, episode.ended_s))


def shortened(text: str) -> str:
    """Return the text of a failure without its middle, if it is long."""
    if len(text) <= MOST_OF_A_TEXT:
        return text
    half = MOST_OF_A_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Return what can be read of a run.

    Args:
        folder: the folder of the run, or an episode log.

    Raises:
        UnreadableRunError: it is not the folder of a run, or nothing in it can be read; the message
            says what was found.
    """
    path = Path(folder)
    if path.is_file():
        return _read_log(path)
    try:
        names = set(os.listdir(path))
    except (OSError, ValueError) as error:  # ValueError: a NUL
        raise UnreadableRunError(
            f"{str(folder)!r} cannot be read: {getattr(error, 'strerror', None) or error}. Give "
            "the folder that `envmgr run` wrote its results into."
        ) from error
    run = Run(path, path.resolve().name or str(path))
    if not names & {EPISODES, SUMMARY}:
        raise UnreadableRunError(
            f"{str(folder)!r} is no folder of a run: there is neither {EPISODES} nor {SUMMARY} in "
            "it. Give the folder that `envmgr run` wrote its results into."
        )
    run.goes_on = PROCESS in names and SUMMARY not in names
    for episode in _lines(run, EPISODES, Episode):
        run.add(episode)
    run.samples += _lines(run, SAMPLES, Sample)
    _read_summary(run)
    _read_config(run)
    _read_began(run)
    if run.summary is None and not run.ended_s and run.unread and not run.samples:
        raise UnreadableRunError(
            f"nothing can be read of the run in {str(folder)!r}: {'; '.join(run.unread)}"
        )
    return run


def _read_log(path: Path) -> Run:
    """Return what can be read of an episode log.

    Raises:
        UnreadableRunError: no line of it can be read.
    """
    causes, outcomes = Counter[str](), Counter[str]()
    by_env = Counter[int]()
    run = Run(path, path.name, causes=causes, outcomes=outcomes, failures_by_env=by_env)
    began: float | None = None
    for line in _lines(run, "", LogLine, named=path.name):
        began = line.time if began is None else began
        elapsed_s = max(line.time - began, 0.0)  # clocks are set
        if line.what == "failure":
            cause = line.cause or "?"
            causes[cause if cause in causes or len(causes) < MOST_FAILURES else OTHERS] += 1
            by_env[line.env_id] += 1
            if len(run.failures) < MOST_FAILURES:
                run.failures.append(Failed(_told(line), line.env_id, elapsed_s))
            continue
        outcomes[line.outcome] += 1
        is_abnormal = line.outcome != "completed"
        length = line.length or 0
        run.add(Episode(line.env_id, length, is_abnormal, elapsed_s, None, line.returned))
    if began is None:
        why = "; ".join(run.unread) or "it is empty"
        raise UnreadableRunError(
            f"{str(path)!r} is no episode log: {why}. Give one, or the folder that `envmgr run` "
            "wrote its results into."
        )
    return run


def _told(line: LogLine) -> str:
    """Return what a line says of a failure."""
    why = line.raised
    if line.exit_status is not None:
        why = exit_text(line.exit_status)
    elif line.limit_s is not None:
        why = f"limit {line.limit_s:g} s"
    where = f"env {line.env_id} (generation {line.generation})"
    reason = "" if why is None else f" ({why})"
    return shortened(f"{line.cause}{reason} of {where} in its {line.during}: {line.outcome}")


def _decoded(decoder: msgspec.json.Decoder[_Kind], data: bytes) -> _Kind:
    """Return the value of a JSON text.

    Raises:
        MsgspecError, ValueError, RecursionError: it is not JSON, or not of the decoder's type.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:  # or it has half of a surrogate pair, as Python writes them
        found = json.loads(data, parse_constant=int, parse_float=_finite)  # int refuses NaN
        return msgspec.convert(found, decoder.type, str_keys=True)


def _finite(text: str) -> float:
    if math.isinf(found := float(text)):
        raise ValueError(f"{text[:40]} is too large")
    return found


def _lines(run: Run, name: str, kind: type[_Line], named: str = "") -> Iterator[_Line]:
    """Yield the lines that can be read, and note how many cannot.

    Args:
        run: the run that the lines are of.
        name: name of the file in the run's folder; "" if the run's path is that of the file.
        kind: type of the lines.
        named: what to call the file in messages.
    """
    decoder = msgspec.json.Decoder(kind)
    n = n_bad = 0
    first, named = "", named or name
    try:
        # Links in a folder are not followed: they would bring other files of the reader into the
        # page. A log is a file that the user has named.
        with opened_file(run.path / name, follows=not name) as file:
            for n, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
                try:
                    yield _decoded(decoder, line)
                except _UNREADABLE as error:
                    n_bad += 1
                    first = first or f"line {n}: {error}"
    except OSError as error:
        if name != SAMPLES or not isinstance(error, FileNotFoundError):  # it failed at its launch
            run.unread.append(f"{named} cannot be read: {error.strerror or error}")
    if n_bad:
        run.unread.append(f"{n_bad:,} of {n:,} lines of {named} cannot be read; the first, {first}")


def _read_summary(run: Run) -> None:
    if run.goes_on:
        run.unread.append(f"the run has not ended, or was killed: there is no {SUMMARY}")
        return
    try:
        with opened_file(run.path / SUMMARY) as file:
            decoder = msgspec.json.Decoder(Summary)
            run.summary = _decoded(decoder, file.read(_LARGEST_FILE))
    except OSError as error:
        run.unread.append(f"{SUMMARY} cannot be read: {error.strerror or error}")
    except _UNREADABLE as error:
        run.unread.append(f"{SUMMARY} is not whole, or none of envmgr: {error}")


def _read_config(run: Run) -> None:
    try:
        with opened_file(run.path / CONFIG) as file:
            data = file.read(_LARGEST_CONFIG + 1)
    except OSError as error:
        run.unread.append(f"{CONFIG} cannot be read: {error.strerror or error}")
        return
    run.config = data[:_LARGEST_CONFIG].decode(errors="replace")
    if len(data) > _LARGEST_CONFIG:
        run.unread.append(f"{CONFIG} is larger than {_LARGEST_CONFIG:,} bytes: its begin is shown")


def _read_began(run: Run) -> None:
    # OverflowError: a year that the system has no seconds for. Only pictures depend on this time.
    with (
        contextlib.suppress(OSError, OverflowError, *_UNREADABLE),
        opened_file(run.path / RUN) as file,
    ):
        decoder = msgspec.json.Decoder(Began)
        run.began_s = _decoded(decoder, file.read(_LARGEST_FILE)).began_at.timestamp()
