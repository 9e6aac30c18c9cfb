"""`python -m envmgr` is `envmgr`."""

from __future__ import annotations

import sys

from envmgr.cli import main

if __name__ == "__main__":
    sys.exit(main())
