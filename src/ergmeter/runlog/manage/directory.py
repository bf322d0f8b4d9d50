"""Finds the runs in a directory. One may go while somebody looks: it is no run then."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ergmeter.errors import FormatError
from ergmeter.runlog import format as fmt


def run_paths(parent: Path) -> list[Path]:
    """The run directories directly under a directory, the newest last."""
    if not parent.is_dir():
        raise FormatError(
            f"no directory {parent}; `erg record` and `erg demo` make runs under runs/"
        )
    headers = (path for path in parent.glob(f"*/{fmt.RUN_FILE}") if path.parent.name[0] != ".")
    made = {}
    for header in headers:
        with suppress(OSError):
            made[header.parent] = header.stat().st_mtime
    return sorted(made, key=made.__getitem__)


def newest_run(parent: Path) -> Path:
    """The run that was made last."""
    found = run_paths(parent)
    if not found:
        raise FormatError(f"no run in {parent}; `erg record -- COMMAND` makes one")
    return found[-1]
