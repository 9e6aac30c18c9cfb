"""The command `envmgr`, and `python -m envmgr`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line and return the exit code."""
    try:
        from envmgr.cli import main as command_line
    except ModuleNotFoundError as error:
        if error.name != "envmgr.cli":
            raise
        sys.exit("envmgr: error: this installation lacks envmgr.cli: there are no commands")
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
