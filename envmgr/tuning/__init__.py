"""`envmgr tune`: which setting of a config steps an env fastest on this machine.

`task` measures one env; `model` says what it expects of a setting, from what managers cost here;
`plan` which settings are worth a look, `search` which of those is best, by measuring them in turns.
`yaml_edit` writes what came of it into the config. `measuring`, `task` and `tune` run things; all
else is pure.
"""

from __future__ import annotations
