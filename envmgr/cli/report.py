"""`envmgr report`: reports of runs that have ended, go on, or were killed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envmgr.errors import ConfigError
from envmgr.observing.status_boards import PROCESS
from envmgr.reporting.comparison import comparison_of, comparison_page
from envmgr.reporting.figures import figures_of
from envmgr.reporting.files import EPISODES, FIGURES, PAGE, RESULTS
from envmgr.reporting.folder import read_run
from envmgr.reporting.page import page_of
from envmgr.reporting.pictures import pictures_in
from envmgr.whole_files import write_whole

COMPARISON = "comparison.html"

_BEGINNING = b'{"envmgr_report"'
"""What the figures of a report begin with."""

_OF_THE_RUN = {*RESULTS, PROCESS} - {PAGE, FIGURES}
"""The files in the folder of a run that a report does not replace."""


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a run, and its figures beside it; return where the page is.

    Args:
        folder: the folder of the run, or an episode log.
        out: path of the page; None means `report.html` in the folder, or for a log a file beside it
            with its name.

    Raises:
        UnreadableRunError: nothing of the run can be read.
        ConfigError: the report would replace what it reports on.
        OSError: the report cannot be written.
    """
    run = read_run(folder)
    figures = figures_of(run)
    is_log = folder.is_file()
    if out is None:
        out = folder.with_suffix(Path(PAGE).suffix) if is_log else folder / PAGE
        if is_log:  # nobody has named these files
            _refuse_others(out)
    pictures = [] if is_log else pictures_in(folder, run.began_s)
    return _write(out, page_of(figures, pictures), figures, [folder])


def _refuse_others(page: Path) -> None:
    """Refuse to replace a file that is not a report, if the page is only named after a log.

    Raises:
        ConfigError: there is such a file.
    """
    figures = page.with_suffix(Path(FIGURES).suffix)
    is_report = figures.is_file() and figures.read_bytes().startswith(_BEGINNING)
    there = [path for path in (page, figures) if path.exists()]
    if there and not is_report:
        raise ConfigError(
            f"the report would replace {str(there[0])!r}, which `envmgr report` has not written. "
            "Name another file with --out."
        )


def _write(
    page: Path, text: str, figures: Mapping[str, Any], runs: Sequence[str | os.PathLike[str]]
) -> Path:
    suffix = Path(FIGURES).suffix
    if page.is_dir() or page.suffix.lower() == suffix:
        why = "is a folder" if page.is_dir() else "is where the figures go, beside the page"
        raise ConfigError(
            f"the report cannot be {str(page)!r}, which {why}. Name another file with --out, such "
            "as compared.html."
        )
    beside = page.with_suffix(suffix)
    for path in (page, beside):
        is_of_a_run = path.name in _OF_THE_RUN and (path.parent / EPISODES).exists()
        if path.exists() and (is_of_a_run or any(path.samefile(run) for run in runs)):
            raise ConfigError(
                f"the report, {str(page)!r} with its figures in {str(beside)!r}, would replace "
                f"{str(path)!r}, which a run has written. Name another file with --out."
            )
    write_whole(beside, json.dumps(figures, allow_nan=False).encode())
    write_whole(page, text.encode())
    return page


def execute(folders: Sequence[str], out: str | None) -> Path:
    """Write a report of one run, or one that compares several; return where the page is.

    Args:
        folders: folders of the runs, or episode logs.
        out: path of the page; None: as for `write_report`, or `comparison.html` for several runs.

    Raises:
        UnreadableRunError: nothing of one of the runs can be read.
        ConfigError: the report cannot be written, or would replace what it reports on.
    """
    try:
        if len(folders) == 1:
            return write_report(Path(folders[0]), None if out is None else Path(out))
        figures = comparison_of([figures_of(read_run(folder)) for folder in folders])
        return _write(Path(out or COMPARISON), comparison_page(figures), figures, folders)
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written: {error}. Name another place with --out."
        ) from error
