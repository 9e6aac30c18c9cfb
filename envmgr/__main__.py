"""The command `envmgr`, and `python -m envmgr`."""

from __future__ import annotations

import sys

_INTERRUPTED = 130
"""As `exit_codes.INTERRUPTED` of `envmgr.cli`, which an interrupt of its import leaves unknown."""


def main() -> int:
    """Run the command line and return the exit code."""
    try:
        from envmgr.cli import main as command_line
    except ModuleNotFoundError as error:
        if error.name != "envmgr.cli":
            raise
        sys.exit("envmgr: error: this installation lacks envmgr.cli: there are no commands")
    except KeyboardInterrupt:  # before the command line could take care of it
        import contextlib
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one is harmless
        with contextlib.suppress(OSError, AttributeError):  # stderr may be closed (`2>&-`)
            sys.stderr.write("\nenvmgr: interrupted\n")
        return _INTERRUPTED
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
