"""Tools to test what runs on managers: envs that sign timesteps, envs that fail, and a saboteur.

- `LedgerEnv`, `LedgerWrapper`, `ledgered`: envs that sign every timestep; a `Ledger` checks the
  timesteps, and an `AuditedLoop` tells it everything that happens.
- `FaultyEnv` and `Fault`: an env that fails where its plan says so.
- `Saboteur` and `vulnerable`: hurt random workers of a manager, and measure the consequences.
- `check_env`: find everything about an env that a manager would stumble over.
- `envmgr.testing.contract`: test suites for envs and kinds of managers of your own.
"""

from __future__ import annotations

from envmgr.testing.audited import AuditedLoop
from envmgr.testing.chaos import Injury, Saboteur
from envmgr.testing.env_problems import EnvCheckError, Problem, check_env, env_problems
from envmgr.testing.faulty import Fault, FaultError, FaultyEnv
from envmgr.testing.injuries import Vulnerable, vulnerable
from envmgr.testing.ledger import Ledger, LedgerError, LedgerReport
from envmgr.testing.ledger_env import (
    ANY_ENV,
    Ledgered,
    LedgerEnv,
    LedgerWrapper,
    Mark,
    ledgered,
    mark_of,
    without_instance,
)

__all__ = [
    "ANY_ENV",
    "AuditedLoop",
    "EnvCheckError",
    "Fault",
    "FaultError",
    "FaultyEnv",
    "Injury",
    "Ledger",
    "LedgerEnv",
    "LedgerError",
    "LedgerReport",
    "LedgerWrapper",
    "Ledgered",
    "Mark",
    "Problem",
    "Saboteur",
    "Vulnerable",
    "check_env",
    "env_problems",
    "ledgered",
    "mark_of",
    "vulnerable",
    "without_instance",
]
