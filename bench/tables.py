"""How the benches print: a title, a Markdown table, and on request the same numbers as JSON.

No means: a shared machine's slow moments last seconds and belong to nobody, so every
figure here is a median with its spread or its 99th percentile, and every ratio is of figures that
were taken in turns, within seconds of each other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

Row = Sequence[object]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """An argument parser with what every bench takes: --rounds and --json."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rounds", type=int, help="how often the tools take turns")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    return made


def with_beside(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser, with --beside: another version of ergmeter takes turns with this one."""
    made.add_argument("--beside", type=Path, metavar="SRC", help="another version's src folder")
    return made


def of_version(source: Path) -> dict[str, str]:
    """The environment in which `import ergmeter` takes this src folder's."""
    return {**os.environ, "PYTHONPATH": str(source.resolve())}


def machine() -> str:
    """The machine and the day, in one line."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    day = datetime.now(timezone.utc).date().isoformat()
    python = platform.python_version()
    return f"{day}, {os.cpu_count()} cores, load {load}, Python {python}, {platform.system()}"


def show(title: str, header: Sequence[str], rows: Sequence[Row], *, note: str = "") -> None:
    """Print a Markdown table. The first column is text; the others are set to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    print(f"\n### {title}\n")
    print(_line(header, widths))
    print("|" + "|".join(_rule(width, first=not i) for i, width in enumerate(widths)) + "|")
    for row in cells:
        print(_line(row, widths))
    if note:
        print(f"\n{note}")
    sys.stdout.flush()


def save(path: Path | None, numbers: dict[str, Any]) -> None:
    """Write the numbers of a bench as JSON, if a file was named."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), **numbers}, indent=1) + "\n")


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which a share q of the values lies; one of them, not a line between."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The lowest and the highest value."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def median_interval(
    values: Sequence[float], *, share: float = 0.95, draws: int = 2000
) -> tuple[float, float]:
    """An interval for the median by the bootstrap, with a fixed seed so that it can be repeated."""
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(values, k=len(values))) for _ in range(draws))
    edge = (1 - share) / 2
    return quantile(medians, edge), quantile(medians, 1 - edge)


def run(
    bench: Callable[[argparse.Namespace], dict[str, Any]], arguments: argparse.Namespace
) -> None:
    """Run a bench, say where it ran, keep its numbers."""
    print(f"\n{Path(sys.argv[0]).name}: {machine()}")
    save(arguments.json, bench(arguments))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "| " + " | ".join([first, *rest]) + " |"


def _rule(width: int, *, first: bool) -> str:
    return "-" * (width + 2) if first else "-" * (width + 1) + ":"
