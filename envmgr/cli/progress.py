"""Progress of a run: a live display on terminals, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envmgr.cli.exit_codes import printing
from envmgr.cli.texts import place_text, states_text, wide_console
from envmgr.errors import EnvFailure, FailuresExhaustedError
from envmgr.texts import counted, number
from envmgr.types import monotonic
from envmgr.untrusted import plain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from envmgr.collect import Collector

LINE_EVERY_S = 5.0
"""How often a plain line of progress is printed."""

_SAMPLE_EVERY_S = 0.2
_RATE_OVER_S = 5.0


@dataclass(frozen=True)
class Goal:
    """What a run is to collect.

    Attributes:
        noun: "steps" or "episodes".
    """

    total: int
    noun: str


Extra = Callable[[], list[str]]
"""A function that returns further figures to show."""


class Progress(ABC):
    """A display of how a collection is getting on, between `start` and `stop`.

    Args:
        goal: what is to be collected.
        extra: returns figures besides those of the collection.

    Attributes:
        failures_before: failures before the run was resumed, from which the count goes on.
    """

    def __init__(self, goal: Goal, extra: Extra | None = None) -> None:
        self.failures_before = 0
        self._goal = goal
        self._extra = extra
        self._collector: Collector | None = None
        self._began = monotonic()
        self._samples: deque[tuple[float, int]] = deque()
        self._next_sample = 0.0

    def start(self, collector: Collector) -> None:
        """Begin to show this collection."""
        self._collector = collector
        self._began = monotonic()
        self._samples = deque([(self._began, collector.statistics.steps)])

    @abstractmethod
    def tick(self) -> None:
        """Take note of what was collected; called after each gather."""

    @abstractmethod
    def log(self, line: str) -> None:
        """Show a line apart from the progress."""

    def stop(self) -> None:
        """Show nothing more."""
        self._collector = None

    def _sample(self, now: float) -> None:
        """Keep what the rate is computed from: the step counts of the latest seconds."""
        if self._collector is None or now < self._next_sample:
            return
        self._next_sample = now + _SAMPLE_EVERY_S
        self._samples.append((now, self._collector.statistics.steps))
        while now - self._samples[1][0] > _RATE_OVER_S:
            self._samples.popleft()

    def _rate(self, now: float) -> float:
        """Return the steps per second over the latest seconds."""
        if self._collector is None:
            return 0.0
        then, steps = self._samples[0]
        return (self._collector.statistics.steps - steps) / max(now - then, 1e-9)

    def _done(self, collector: Collector) -> int:
        statistics = collector.statistics
        return statistics.steps if self._goal.noun == "steps" else statistics.episodes

    def _figures(self, collector: Collector, now: float) -> list[str]:
        statistics = collector.statistics
        n_failures = self.failures_before + collector.manager.stats().get("failures", 0)
        states = Counter(state.name for state in collector.manager.env_states.values())
        return [
            counted(statistics.steps, "step"),
            f"{self._rate(now):,.0f} steps/s",
            counted(statistics.episodes, "episode"),
            f"mean return {number(statistics.recent_mean_return)}",
            states_text(states),
            counted(n_failures, "failure"),
            *(self._extra() if self._extra is not None else ()),
        ]


class PlainProgress(Progress):
    """A line every few seconds on stdout; other lines go to stderr."""

    def __init__(self, goal: Goal, extra: Extra | None = None, *, shows: bool = True) -> None:
        super().__init__(goal, extra)
        self._shows = shows
        self._next_line = monotonic() + LINE_EVERY_S

    def start(self, collector: Collector) -> None:
        """Begin to count the seconds to the first line."""
        super().start(collector)
        self._next_line = monotonic() + LINE_EVERY_S

    def tick(self) -> None:
        """Print a line if it is time for one."""
        now = monotonic()
        self._sample(now)
        if not self._shows or now < self._next_line or self._collector is None:
            return
        self._next_line = now + LINE_EVERY_S
        figures = "  ".join(self._figures(self._collector, now))
        with printing():
            print(f"{now - self._began:6.1f} s  {figures}", flush=True)

    def log(self, line: str) -> None:
        """Print a line to stderr."""
        with contextlib.suppress(OSError):
            print(plain(line), file=sys.stderr, flush=True)


class LiveProgress(Progress):
    """A bar and figures that stay at the bottom of a terminal; other lines appear above them.

    A thread refreshes them, so that they go on while the collection waits.
    """

    def __init__(self, goal: Goal, console: Console, extra: Extra | None = None) -> None:
        super().__init__(goal, extra)
        from rich.live import Live

        self._console = console
        self._live = Live(
            console=console,
            refresh_per_second=5,
            transient=True,
            get_renderable=self._render,
        )

    def start(self, collector: Collector) -> None:
        """Begin to show the display."""
        super().start(collector)
        with printing():
            self._live.start()

    def tick(self) -> None:
        """Do nothing: the thread reads the figures itself."""

    def log(self, line: str) -> None:
        """Print a line above the display."""
        encoding = self._console.encoding
        # The console would try to write what it cannot encode again and again.
        line = plain(line).encode(encoding, "backslashreplace").decode(encoding)
        with contextlib.suppress(OSError, ValueError):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True, style="yellow")

    def stop(self) -> None:
        """Remove the display."""
        with contextlib.suppress(Exception):  # whatever it makes of a terminal that has gone
            self._live.stop()
        super().stop()

    def _render(self) -> RenderableType:
        from rich.columns import Columns
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        collector, now = self._collector, monotonic()
        if collector is None:
            return Text("")
        self._sample(now)
        done, total = self._done(collector), self._goal.total
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(ratio=1, min_width=10)
        head.add_column(no_wrap=True, justify="right")
        head.add_row(
            ProgressBar(total=total, completed=done),
            Text(f"{done:,}/{total:,} {self._goal.noun}  {_duration(now - self._began)}"),
        )
        figures = [Text(figure, style="dim") for figure in self._figures(collector, now)]
        return Group(head, Columns(figures, padding=(0, 3)))


def make_progress(goal: Goal, extra: Extra | None = None, *, shows: bool = True) -> Progress:
    """Return a live display where stdout is a terminal, else plain lines.

    Args:
        goal: what is to be collected.
        extra: returns figures besides those of the collection.
        shows: whether to print to stdout; if not, only lines for stderr are printed.
    """
    console = wide_console()
    if not shows:
        return PlainProgress(goal, extra, shows=False)
    if sys.stdout.isatty() and not console.is_dumb_terminal:
        return LiveProgress(goal, console, extra)
    return PlainProgress(goal, extra)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class LogLines(logging.Handler):
    """A handler that shows each log message as a line; of envs' stacks, the innermost call.

    It leaves out what the run reports when it ends: failures during the launch, and the error that
    says that the budget of failures is spent.

    Args:
        traceback: whether to show whole messages.
        failures: whether to show failures of envs, too.
    """

    def __init__(
        self, progress: Progress, *, traceback: bool = False, failures: bool = True
    ) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress
        self._traceback = traceback
        self._failures = failures
        self.launching = True

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record."""
        about: Any = record.args[0] if isinstance(record.args, tuple) and record.args else None
        if isinstance(about, FailuresExhaustedError):
            return
        if (self.launching or not self._failures) and isinstance(about, EnvFailure):
            return
        text = record.getMessage()
        if not self._traceback:
            text = " ".join(text.partition("\n\n")[0].split())
            if isinstance(about, EnvFailure) and (place := place_text(about)):
                text += f", {place}"
        self._progress.log(f"{record.levelname.lower()}: {text}")


@contextlib.contextmanager
def logging_to(handler: logging.Handler) -> Iterator[None]:
    """Send what envmgr logs to one handler only."""
    logger = logging.getLogger("envmgr")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


@contextlib.contextmanager
def doing(shows: bool = True) -> Iterator[Callable[[str], None]]:
    """Show on terminals what is being done, and no logs; yield the function to say it with."""
    console = wide_console()
    with logging_to(logging.NullHandler()):
        if not shows or not sys.stdout.isatty() or console.is_dumb_terminal:
            yield lambda text: None
            return
        from rich.text import Text

        with console.status("") as status:
            yield lambda text: status.update(Text(plain(f"{text} ...")))
