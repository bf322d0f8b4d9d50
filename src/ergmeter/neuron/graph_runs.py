"""How often each graph ran: the weights of an overall ratio.

The trap: a cache holds a graph once, whether it ran a million times or never. Unweighted, an
initialisation graph counts as much as the training step. The compiler does not know; the user may
(a profile, a counter), and gives it as a file of modules and counts.
"""

from __future__ import annotations

import json
from pathlib import Path

from ergmeter.errors import FormatError, UsageError


def read_graph_runs(path: str) -> dict[str, int]:
    """Runs by module: a JSON object, or a line `MODULE_... 1234` (or with a comma) for each."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"--graph-runs {path} can't be read: {why}") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"--graph-runs {path} is no text: {error}") from error
    if text.lstrip().startswith("{"):
        try:
            pairs = list(json.loads(text).items())
        except ValueError as error:
            raise FormatError(f"--graph-runs {path} is not JSON: {error}") from error
    else:
        pairs = _lines(text, path)
    runs: dict[str, int] = {}
    for module, count in pairs:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise FormatError(f"--graph-runs {path}: {module} must have a whole number of runs")
        runs[module] = count
    if not runs:
        raise FormatError(f"--graph-runs {path} is empty; write MODULE_... and a number a line")
    return runs


def _lines(text: str, path: str) -> list[tuple[str, int]]:
    pairs = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.replace(",", " ").split()
        if not words or words[0].startswith("#") or words[0].lower() == "module":
            continue
        if len(words) != 2 or not words[1].isdigit():
            raise FormatError(
                f"--graph-runs {path}, line {number}: a module and its number of runs are needed;"
                f" got {line.strip()[:80]!r}"
            )
        pairs.append((words[0], int(words[1])))
    return pairs


def name_in(runs: dict[str, int], module: str | None) -> str | None:
    """What the file calls a module: with or without its flags; None where it does not name it."""
    names = () if module is None else (module, module.partition("+")[0])
    return next((name for name in names if name in runs), None)


def runs_of(module: str | None, runs: dict[str, int]) -> int:
    """How often a module ran; one that the file does not name has no weight."""
    name = name_in(runs, module)
    return 0 if name is None else runs[name]
