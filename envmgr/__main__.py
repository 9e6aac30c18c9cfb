"""`python -m envmgr` is `envmgr`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from envmgr.cli import main
    except ModuleNotFoundError as error:
        if error.name != "envmgr.cli":
            raise
        sys.exit("envmgr: error: this installation lacks envmgr.cli: there are no commands")
    sys.exit(main())
