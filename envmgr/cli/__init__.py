"""The command line: `envmgr run`, `check`, `tune`, `bench`, `init`, `chaos`, `dump` and others.

Exit codes: 0 done; 1 the run failed; 2 bad input, nothing was run; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence

from envmgr.cli.exit_codes import BAD_INPUT, DONE, FAILED, INTERRUPTED, discard_output, say

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Error numbers of a write to a full disk, or to a terminal that has gone."""

__all__ = ["BAD_INPUT", "DONE", "FAILED", "INTERRUPTED", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: the arguments; None takes those of the process, which then exits with this code.
    """
    try:  # what takes time is imported in here: an interrupt on the way is no traceback
        for name in ("stdout", "stderr"):  # None where the shell has closed them (`>&-`)
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for good
        return _run(argv)
    except KeyboardInterrupt:
        if argv is None:
            import signal

            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one is harmless
        with contextlib.suppress(OSError):
            print("\nenvmgr: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `envmgr list | head -1`
        discard_output()
        return FAILED
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:  # a defect of ours
            raise
        discard_output()
        say(f"envmgr: error: the output cannot be written: {error}", err=True)
        return FAILED


def _run(argv: Sequence[str] | None) -> int:
    import click

    from envmgr.cli.commands import envmgr
    from envmgr.cli.texts import error_text
    from envmgr.errors import (
        ConfigError,
        EnvManagerError,
        MissingDependencyError,
        UnknownKeyError,
        UnreadableRunError,
    )
    from envmgr.optional_packages import refuse_without_own

    try:
        try:
            code = envmgr.main(
                args=argv, prog_name="envmgr", standalone_mode=False, obj={"exits": argv is None}
            )
        except ModuleNotFoundError as error:
            refuse_without_own(error, "this command")
            raise
        sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except click.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        error.show()
        return BAD_INPUT
    except EnvManagerError as error:
        lists_keys = isinstance(error, UnknownKeyError)  # in lines
        say(f"envmgr: error: {error if lists_keys else error_text(error)}", err=True)
        is_bad = isinstance(error, (ConfigError, MissingDependencyError, UnreadableRunError))
        return BAD_INPUT if is_bad else FAILED
