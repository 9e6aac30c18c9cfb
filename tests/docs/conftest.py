"""Examples may say how loud the logger is; the tests after them must not notice."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("envmgr")
    level = logger.level
    yield
    logger.setLevel(level)
