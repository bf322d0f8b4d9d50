"""The hook that a recorded command's Pythons load, and why it was not heard.

A folder with a sitecustomize is put first on PYTHONPATH; each Python that starts says so in the run
directory. The trap: silence. A Python that ignores its environment (-I, -E, -S) or has no ergmeter
is measured from outside only, and a user who expected steps is told which it was, and the cure.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FOLDER = ".hook"
FLUSH_LINES = "ERGMETER_FLUSH_LINES"  # set: the hook has standard output flushed line by line
_BOOTSTRAP = Path(__file__).with_name("bootstrap")
_DEAF = {"I": "isolated mode", "E": "which ignores PYTHONPATH", "S": "which loads no site"}
_OLDEST = (3, 10)
_TAKE_A_VALUE = "WXcm"  # what follows -c or -m is the program's own


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """What to set for a command, so that its Pythons load the hook."""
    paths = [str(_BOOTSTRAP), *filter(None, [given.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def silence(run: Path, command: Sequence[str]) -> str:
    """Why the hook saw no step in any process of the command."""
    said = [_hook_report(path) for path in sorted((run / FOLDER).glob("*"))]
    attached = {name for one in said for name in one.get("attached", [])}
    failed = [name for name in attached if ": " in name]
    if failed:
        return f"the hook failed in it ({failed[0]})"
    if "torch" in attached:
        return "no optimizer of torch stepped in it"
    if not said:
        return _unheard(command)
    if any("yes" in one.get("ergmeter", []) for one in said):
        return "its Python loaded no torch"
    return _without(said[0])


def _without(said: Mapping[str, list[str]]) -> str:
    python, version = (said.get(name, [""])[0] for name in ("executable", "version"))
    if version and tuple(map(int, version.split("."))) < _OLDEST:
        return f"the hook can't look into Python {version}, which is older than 3.10"
    return (
        f"the hook can't look into {python}, which has no ergmeter"
        f" (cure: {shlex.quote(python)} -m pip install ergmeter)"
    )


def _unheard(command: Sequence[str]) -> str:
    """No Python has said that it was there."""
    if not Path(command[0]).name.startswith(("python", "pypy")):
        return "no Python that loads the hook was started by it (one with -I, -E or -S does not)"
    for word in command[1:]:
        if not word.startswith("-") or word.startswith("--"):
            break
        for letter in word[1:]:
            if letter in _DEAF:
                return (
                    f"the hook can't look into a Python with -{letter} ({_DEAF[letter]});"
                    f" run it without -{letter}"
                )
            if letter in _TAKE_A_VALUE:
                break
    return "its Python did not load the hook"


def _hook_report(path: Path) -> dict[str, list[str]]:
    """What one Python said of itself: a name and a value on each line."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(errors="replace").splitlines():
        name, tab, word = line.partition("\t")
        if tab:
            found.setdefault(name, []).append(word)
    return found
