"""The trainer's side of preloading: what to import, and in which branch of the worker server.

A branch that fails, hangs, dies or does not stay clean is given up, and the next one leaves out the
module that it was importing. The modules of a branch that has become ready are proven.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket
from collections.abc import Callable, Iterable
from time import monotonic
from typing import NamedTuple

from envmgr.transport.process import server
from envmgr.transport.process.needed_modules import installed_among, listed_modules
from envmgr.transport.process.server_imports import Preloads
from envmgr.transport.process.server_link import ServerLink
from envmgr.transport.process.template_servers import NUMBERS, TemplateServer

logger = logging.getLogger("envmgr")

_START_S = 10.0
"""How much longer a server may take until it begins with the first import."""


class PreloadRules(NamedTuple):
    """What the server imports before it forks workers.

    Attributes:
        modules: the names of the modules; None: those that envs are found to need.
        limit_s: seconds that one import may take.
    """

    modules: tuple[str, ...] | None = ()
    limit_s: float = math.inf


def say_that_nothing_is_preloaded(setting: str) -> None:
    """Log that modules were listed for a setting with which nothing is preloaded."""
    logger.warning(
        "manager.preload does not apply to %s, so nothing is preloaded: only the server of "
        "`context: server` (on Linux) imports for all workers",
        setting,
    )


class Preloading:
    """Opens branches until one is ready.

    Args:
        rules: what to import.
        watch: is called with each new branch.
        let_go: kills a branch that is given up.
        settle: is called with a branch of the template, and its modules, when they are imported.

    Attributes:
        opening: the branch that is importing modules now.
    """

    def __init__(
        self,
        rules: PreloadRules,
        watch: Callable[[ServerLink], None],
        let_go: Callable[[ServerLink], None],
        settle: Callable[[ServerLink, tuple[str, ...]], None],
    ) -> None:
        self._rules = rules
        self._watch = watch
        self._let_go = let_go
        self._settle = settle
        self._template: TemplateServer | None = None
        self._wanted: tuple[str, ...] = ()
        self._proven: tuple[str, ...] = ()
        self._left_out: dict[str, str] = {}  # with the reason
        self._untold: list[str] = []  # left out, but not logged yet
        self._latest: ServerLink | None = None
        self.opening: ServerLink | None = None
        self._wants_report = rules.modules is None

    @property
    def is_on(self) -> bool:
        """Whether anything may have to be imported."""
        return self._rules.modules != ()

    def choose(self, named: Iterable[str]) -> None:
        """Find out what to import, besides what is imported already.

        Args:
            named: the modules that the factories of envs name.

        Raises:
            ConfigError: a module that was asked for is not there.
        """
        listed = self._rules.modules
        self._want(installed_among(named) if listed is None else listed_modules(listed))

    def _want(self, names: tuple[str, ...]) -> None:
        known = {*self._proven, *self._wanted}
        self._wanted += tuple(n for n in self._without(names) if n not in known)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules that are imported, or are to be."""
        return (*self._proven, *self._wanted)

    def move_to(self, template: TemplateServer) -> None:
        """Take note of the template, and of what it has imported."""
        self._template = template
        if new := [name for name in template.modules if name not in self._proven]:
            logger.info("preloaded before, with another manager: %s", ", ".join(new))
            self._proven += tuple(new)
            self._wanted = tuple(name for name in self._wanted if name not in new)

    def _is_of_template(self, link: ServerLink) -> bool:
        return self._template is not None and link.parent is self._template.link

    def go_on(self, first: ServerLink) -> None:
        """Begin to import what is wanted, or what was lost with a server that died.

        Args:
            first: the manager's server; or its template, a branch of which becomes a template, too.
        """
        if self.opening is None:
            there = self._template.modules if self._template is not None else ()
            lost = tuple(name for name in self._proven if name not in there)
            again = lost if self._latest is None else ()
            self._open(self._latest or first, again or self._wanted)

    def server_for_worker(self, first: ServerLink) -> ServerLink:
        """Return the server that is to fork the next worker."""
        self.go_on(first)  # to import what a worker has reported
        opening = self.opening
        if opening is not None and set(opening.wanted.modules) <= set(self._proven):
            return opening  # it replaces one that was ready, and will be ready itself
        return self._latest or first

    def takes_report(self) -> bool:
        """Return whether the next worker is to report what it imports; only the first one is."""
        takes, self._wants_report = self._wants_report, False
        return takes

    def on_record(self, link: ServerLink, kind: int, number: int, data: bytes) -> None:
        """Take note of what a server says about imports."""
        if kind == server.REPORT:
            self._on_report(data)
        elif link is not self.opening:
            return
        elif kind == server.IMPORTING:
            link.begin(number, self._rules.limit_s)
        elif kind == server.SPOILT:
            self.give_up(data.decode(errors="replace"))
        elif kind == server.READY:
            self._on_ready(link)

    def _on_report(self, data: bytes) -> None:
        """Note what a worker has imported; a branch imports it when the next worker is started."""
        with contextlib.suppress(ValueError, RecursionError):  # a worker may write anything
            names = json.loads(data or b"[]")
            if isinstance(names, list) and all(isinstance(name, str) for name in names):
                self._want(installed_among(names))

    def _on_ready(self, link: ServerLink) -> None:
        self.opening, link.due = None, math.inf
        modules = link.wanted.modules
        logger.info("preloaded: %s", ", ".join(modules))
        self._proven += tuple(name for name in modules if name not in self._proven)
        self._wanted = tuple(name for name in self._wanted if name not in modules)
        if self._is_of_template(link):
            self._settle(link, modules)
        else:
            self._latest = link
        self._tell()

    def _open(self, parent: ServerLink, modules: tuple[str, ...]) -> None:
        if not modules:
            return
        wanted = Preloads(modules, tuple(self._left_out))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.opening = link = ServerLink(ours, parent, next(NUMBERS), wanted)
        link.begin(-1, self._rules.limit_s + _START_S)
        with theirs:
            try:
                self._watch(link)
                data = wanted.to_bytes()
                parent.send(server.BRANCH, link.number, 0, data, [theirs.fileno()])
            except OSError as error:
                self.give_up(str(error))

    @property
    def is_overdue(self) -> bool:
        """Whether the import of a module takes too long."""
        return self.opening is not None and self.opening.due <= monotonic()

    def expire(self) -> None:
        """Give up a branch whose import takes too long."""
        if self.is_overdue:
            self.give_up(f"its import takes more than {self._rules.limit_s:g} s (connect_timeout)")

    def on_end(self, link: ServerLink) -> None:
        """Note that a branch is gone, or the server that has forked it."""
        if link is self.opening:
            if self._template is not None and self._is_of_template(link):
                alive = self._template.is_alive
            else:
                alive = link.parent is not None and link.parent.is_open
            ended = "its import ended the process" if alive else "the worker server ended meanwhile"
            self.give_up(ended)
        elif link is self._latest:
            self._latest = None

    def give_up(self, why: str) -> None:
        """Kill the importing branch, and open another one without what it failed to import."""
        link, self.opening = self.opening, None
        if link is None or link.parent is None:
            return
        self._let_go(link)
        modules = link.wanted.modules
        failed = (
            modules if link.module_index < 0 else modules[link.module_index : link.module_index + 1]
        )
        self._left_out.update(dict.fromkeys(failed, why))
        self._untold += failed
        self._proven = self._without(self._proven)
        self._wanted = self._without(self._wanted)
        rest = self._without(modules)
        if rest and link.parent.is_open:
            self._open(link.parent, rest)
        else:
            self._tell()

    def _without(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return those modules that are neither left out nor in a package that is left out."""
        packages = tuple(f"{name}." for name in self._left_out)
        return tuple(n for n in names if n not in self._left_out and not n.startswith(packages))

    def _tell(self) -> None:
        if self._untold:
            texts = [f"{name} ({self._left_out[name]})" for name in self._untold]
            self._untold.clear()
            logger.warning(
                "left to each worker to import, since the worker server cannot preload it: %s",
                "; ".join(texts),
            )
