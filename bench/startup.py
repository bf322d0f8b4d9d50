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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tables

HEADER = ("command", "median ms", "range ms", "ratio to import ergmeter", "modules", "loads")
HEAVY = ("torch", "pandas", "pyarrow", "numpy", "sklearn", "rich", "requests")
BIN = Path(sys.executable).parent

# What the table calls it, and the arguments of a fresh interpreter.
ROWS: tuple[tuple[str, list[str]], ...] = (
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
OURS = slice(1, 6)
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


def wall_s(arguments: list[str], environment: Mapping[str, str] | None) -> float:
    """How long a fresh interpreter takes from its start to its end."""
    before = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=environment)
    return time.perf_counter() - before


def modules(arguments: list[str], environment: Mapping[str, str] | None) -> list[str]:
    """The names of the modules that are loaded in the end."""
    command = [sys.executable, "-c", COUNTER, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    loaded: list[str] = json.loads(done.stderr.rpartition("MODULES")[2])
    return loaded


def works(arguments: list[str], environment: Mapping[str, str] | None) -> bool:
    """Whether the command succeeds here."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, env=environment).returncode == 0


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time the commands in turns; print the table."""
    # Both versions from a folder, which is quicker than an editable installation.
    own = tables.of_version(Path(__file__).parents[1] / "src") if arguments.beside else None
    every = [(label, words, own) for label, words in ROWS]
    if arguments.beside:
        beside = tables.of_version(arguments.beside)
        every += [(f"{label}, {arguments.beside}", words, beside) for label, words in ROWS[OURS]]
    there = [row for row in every if works(*row[1:])]
    walls: dict[str, list[float]] = {label: [] for label, _, _ in there}
    for _ in range(arguments.rounds or 15):
        for label, words, environment in there:
            walls[label].append(wall_s(words, environment) * 1e3)
    ours = statistics.median(walls[ROWS[OURS.start][0]])
    rows = []
    for label, words, environment in every:
        if label not in walls:
            rows.append((label, "fails here", "-", "-", "-", "-"))
            continue
        loaded, median = modules(words, environment), statistics.median(walls[label])
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
    tables.run(bench, tables.with_beside(tables.parser(__doc__)).parse_args())


if __name__ == "__main__":
    main()
