"""`envmgr tune` and `envmgr bench`: what steps the envs of a config fastest on this machine.

`plan` says which settings are worth measuring, `search` which of those is best, by measuring them
in turns, and `tune` runs both. `bench` runs libraries in turns (`peers`, `loops`), each in a
process of its own (`benchmark_process`). `measuring` runs managers, for all of these modules.
`yaml_edit` writes the result into the config.
"""

from __future__ import annotations
