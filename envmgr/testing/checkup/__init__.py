"""`envmgr check`: checks an env before a long run.

All code of the env is run in worker processes, so that a crash or a hang there is a finding.
`check_up` runs the checks in their order, `probes` has the code that runs in the workers, and
`verdicts` judges what it found.
"""

from __future__ import annotations

from envmgr.testing.checkup.checkup import CheckOptions, check_up
from envmgr.testing.checkup.findings import Finding, Level, verdict_of

__all__ = ["CheckOptions", "Finding", "Level", "check_up", "verdict_of"]
