"""How long until a fresh interpreter has the instrument, and what else did it load?

A warm file cache flatters whoever runs second. Every command is run once uncounted, then
all take turns. The modules are counted in runs of their own, since counting costs time too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tables

HEADER = ("command", "median ms", "range ms", "ratio to import ergmeter", "modules", "loads")
HEAVY = ("torch", "pandas", "pyarrow", "numpy", "sklearn", "rich", "requests")
BIN = Path(sys.executable).parent

# What the table calls it, and the arguments of a fresh interpreter.
ROWS = (
    ("python -c pass", ["-c", "pass"]),
    ("import ergmeter", ["-c", "import ergmeter"]),
    ("from ergmeter import Meter", ["-c", "from ergmeter import Meter"]),
    ("from ergmeter.meter import Meter", ["-c", "from ergmeter.meter import Meter"]),
    ("erg --version", [str(BIN / "erg"), "--version"]),
    ("erg --help", [str(BIN / "erg"), "--help"]),
    ("import zeus.monitor", ["-c", "import zeus.monitor"]),
    ("from codecarbon import ...Tracker", ["-c", "from codecarbon import EmissionsTracker"]),
    ("codecarbon --help", [str(BIN / "codecarbon"), "--help"]),
)
OURS = 1

# Runs a script or a piece of code as above, then says what is loaded.
COUNTER = """
import atexit, json, os, runpy, sys
def count(out=os.dup(2)):
    os.write(out, ("MODULES" + json.dumps(sorted(sys.modules)) + chr(10)).encode())
atexit.register(count)
sys.argv = sys.argv[1:]
if sys.argv[0] == "-c":
    exec(sys.argv[1])
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def wall_s(arguments: list[str]) -> float:
    """How long a fresh interpreter takes from its start to its end."""
    before = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - before


def modules(arguments: list[str]) -> list[str]:
    """The names of the modules that are loaded in the end."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTER, *arguments], check=True, capture_output=True, text=True
    )
    loaded: list[str] = json.loads(done.stderr.rpartition("MODULES")[2])
    return loaded


def works(arguments: list[str]) -> bool:
    """Whether the command succeeds here."""
    return subprocess.run([sys.executable, *arguments], capture_output=True).returncode == 0


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time the commands in turns; print the table."""
    there = [(label, words) for label, words in ROWS if works(words)]
    walls: dict[str, list[float]] = {label: [] for label, _ in there}
    for _ in range(arguments.rounds or 15):
        for label, words in there:
            walls[label].append(wall_s(words) * 1e3)
    ours = statistics.median(walls[ROWS[OURS][0]])
    rows = []
    for label, words in ROWS:
        if label not in walls:
            rows.append((label, "fails here", "-", "-", "-", "-"))
            continue
        loaded, median = modules(words), statistics.median(walls[label])
        heavy = ", ".join(name for name in HEAVY if name in loaded) or "none of those looked for"
        extent = tables.spread(walls[label], 0)
        rows.append(
            (label, f"{median:.0f}", extent, f"{median / ours:.1f}", str(len(loaded)), heavy)
        )
    note = f"{arguments.rounds or 15} rounds; looked for: {', '.join(HEAVY)}."
    tables.show("Time to start, fresh interpreters", HEADER, rows, note=note)
    return {"wall_ms": walls, "rows": rows}


def main() -> None:
    """Entry point."""
    tables.run(bench, tables.parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
