"""Examples may set the logger and register things; the tests after them must not notice."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from envmgr import ENV_MANAGER_REGISTRY
from envmgr.spaces.codecs import CODECS


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("envmgr")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def tables_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ENV_MANAGER_REGISTRY.keys()  # the built-in ones and entry points are to stay
    monkeypatch.setattr(ENV_MANAGER_REGISTRY, "_entries", {**ENV_MANAGER_REGISTRY._entries})
    known = set(CODECS)
    yield
    for cls in CODECS.keys() - known:
        del CODECS[cls]
