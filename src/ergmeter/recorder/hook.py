"""The hook that a recorded command's Pythons load, and the reason if none loaded it.

A folder with a sitecustomize is put first on PYTHONPATH, and each Python that starts leaves a
report in the run directory. A Python that ignores its environment (-I, -E, -S) or has no ergmeter
is measured from outside only; the user gets the reason and what to do.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from ergmeter.units import listed_by

FOLDER = ".hook"
FLUSH_LINES = "ERGMETER_FLUSH_LINES"  # set: the hook has standard output flushed line by line
_BOOTSTRAP = Path(__file__).with_name("bootstrap")
_OLDEST = (3, 10)
_NO_REPORT = (
    "it started no Python that loads the hook (Python with -I, -E or -S does not: remove that"
    " option)"
)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that make a command's Pythons load the hook."""
    paths = [str(_BOOTSTRAP), *filter(None, [variables.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def why_no_steps(run: Path) -> str:
    """Why the hook saw no step in any process of the command."""
    reports = [_hook_report(path) for path in sorted((run / FOLDER).glob("*"))]
    attached = {name for report in reports for name in report.get("attached", [])}
    failed = [name for name in attached if ": " in name]
    if failed:
        return f"the hook failed in it ({failed[0]})"
    if "torch" in attached:
        return "no torch optimizer stepped in it"
    if not reports:
        return _NO_REPORT
    if any("yes" in report.get("ergmeter", []) for report in reports):
        return "its Python loaded no torch"
    return _without(reports[0])


def _without(report: Mapping[str, list[str]]) -> str:
    python, version = (report.get(name, [""])[0] for name in ("executable", "version"))
    if version and tuple(map(int, version.split("."))) < _OLDEST:
        return f"the hook can't look into Python {version}, which is older than 3.10"
    return (
        f"the hook can't look into {python}, which has no ergmeter"
        f" (cure: {shlex.quote(python)} -m pip install ergmeter)"
    )


def _hook_report(path: Path) -> dict[str, list[str]]:
    """The report of one Python: a name and a value on each line."""
    lines = (line.partition("\t") for line in path.read_text(errors="replace").splitlines())
    return listed_by((name, word) for name, tab, word in lines if tab)
