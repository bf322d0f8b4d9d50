"""Stand-ins for monitoring tools: scripts that print a file's lines, as the real ones stream."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# It keeps what it was called with, prints its lines one after the other, and stays, as a monitor
# does.
_SCRIPT = """#!/bin/sh
here=$(dirname "$0")
echo "$@" > "$here/called_with"
for last in "$@"; do :; done
test -f "$last" && cp "$last" "$here/config"
while IFS= read -r line; do printf '%s\\n' "$line"; sleep {pause_s}; done < "$here/lines"
{ending}
"""


def tool(
    folder: Path, name: str, lines: Sequence[str], *, pause_s: float = 0.02, ending: str = ""
) -> Path:
    """An executable of this name that prints these lines; then it waits to be ended."""
    path = folder / name
    (folder / "lines").write_text("".join(f"{line}\n" for line in lines))
    path.write_text(_SCRIPT.format(pause_s=pause_s, ending=ending or "exec sleep 60"))
    path.chmod(0o755)
    return path


def gathered(read: Callable[[], Sequence[T]], count: int) -> list[T]:
    """Read until so many records have come."""
    records: list[T] = []
    deadline_s = time.monotonic() + 60
    while len(records) < count and time.monotonic() < deadline_s:
        records += read()
        time.sleep(0.01)
    return records


def is_running(name: str) -> bool:
    """Whether a process that was started from this path is there."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(name) in command.split(b"\0"):
            return True
    return False
