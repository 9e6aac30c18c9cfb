"""Loaded by each Python that is started by a test under `lines.py`: traces what it runs, too."""

import os

import lines

if os.path.exists(os.path.join(os.environ["LINES_OUT"], "running")):
    lines.pytest_sessionstart()
    lines.trace_started_process()
