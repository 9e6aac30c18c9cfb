"""`envmgr check`: checks an env before a long run.

Everything that runs code of the env does so in worker processes: what crashes or hangs there is a
finding. `check_up` says in which order; `probes` has what runs in the workers, `verdicts` what is
thought of it.
"""

from __future__ import annotations

from envmgr.testing.checkup.checkup import CheckOptions, check_up
from envmgr.testing.checkup.findings import Finding, Level, verdict_of

__all__ = ["CheckOptions", "Finding", "Level", "check_up", "verdict_of"]
