"""Files and texts that others may have made: in folders of runs, on boards of other processes.

No pipes are opened, and no links are followed that somebody has put there. Such texts are shown
with escapes in place of characters that would control a terminal, or change how others look.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import IO

_ODD = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    r"\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Characters that no page can hold, that control a terminal, that change how others look, or that
are invisible."""


def plain(text: str) -> str:
    """Return a text with odd characters replaced by the escapes that Python writes for them."""
    return _ODD.sub(lambda odd: ascii(odd.group())[1:-1], text)


def plain_line(text: str) -> str:
    """Return a text as `plain` does, but as one line, so that it cannot pass for several."""
    return plain(text).replace("\n", "\\n").replace("\t", "\\t")


def opened_itself(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file unless it is a link; for use as an `opener`.

    Args:
        path: the file.
        flags: flags of `os.open`.
        mode: permissions of a new file, less the umask.

    Raises:
        OSError: it is a link, and the text says so; or it cannot be opened.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, mode)
    except OSError as error:
        if os.path.islink(path):
            text = "it is a link, which is not followed"
            raise OSError(error.errno, text, os.fspath(path)) from error
        raise


def opened_file(path: Path, *, follows: bool = False) -> IO[bytes]:
    """Open a regular file for reading; refuse anything else, such as a pipe without a writer.

    Args:
        path: the file.
        follows: whether it may be a link, as a file may be that the user has named.

    Raises:
        OSError: it is no regular file, or a link, or cannot be opened.
    """

    def opener(path: str, flags: int) -> int:
        flags |= os.O_NONBLOCK
        return os.open(path, flags) if follows else opened_itself(path, flags)

    file = open(path, "rb", opener=opener)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return file
