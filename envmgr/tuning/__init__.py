"""`envmgr tune`: which setting of a config steps an env fastest on this machine.

`profile` measures one env and what managers cost here; `model` says what it expects of a setting,
`plan` which settings are worth a look, `search` which of those is best, by measuring them in turns.
`yaml_edit` writes what came of it into the config. All but `measuring` is pure.
"""

from __future__ import annotations
