"""What a bench came to: its cells by configuration, on the terminal, as Markdown and as CSV."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ergmeter.bench.overview import MEMORY, of_repeats, spread
from ergmeter.bench.plan.cells import configuration_name
from ergmeter.units import duration, scaled, significant
from ergmeter.views.analyze.markdown import escaped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import RenderableType

    from ergmeter.bench.overview import Configuration, Overview

HEADS = (
    *("cell", "status", "tokens/s", "whole run", "/device", "samples/s", "loss", "memory", "time"),
)
_UNWELL = "!"
_MARKED = ("tokens_per_s", "samples_per_s", "loss", "runtime_s", *MEMORY)
_COLORS = {"ok": "green", "pending": "dim", "running": "cyan", "skipped": "dim"}
_MEMORY_SAID = {
    "hf": "in tensors, as the Trainer tells it",
    "torch": "in tensors, as torch's allocator tells it",
    "nvidia": "on the fullest device above its first reading",
    "nvidia mean": "above the first reading, mean of the devices",
    "host": "resident on the host",
}


def page(found: Overview) -> RenderableType:
    """A line for each configuration, its repeats averaged; then what failed, and why."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for head in HEADS:
        is_text = head in ("cell", "status", "tokens/s", "memory")  # may go on below
        table.add_column(head, min_width=12 if head == "cell" else None, no_wrap=not is_text)
    for line in lines(found):
        table.add_row(*[Text(cell) for cell in line])
    parts: list[RenderableType] = [_totals(found), table]
    parts += [Text(line, "dim") for line in more_in_words(found.more, "configurations")]
    parts += [Text(line, "red") for line in found.troubles]
    parts += [Text(line, "dim") for line in more_in_words(found.more_troubles, "troubles")]
    parts += [Text(line, "dim") for line in notes(found)]
    return Group(*parts)


def markdown(found: Overview) -> str:
    """The same, to paste."""
    shown = [totals(found), "", markdown_row(HEADS), markdown_row("---" for _ in HEADS)]
    shown += [markdown_row(line) for line in lines(found)]
    said = [*more_in_words(found.more, "configurations"), *found.troubles]
    said += [*more_in_words(found.more_troubles, "troubles"), *notes(found)]
    shown += ["", *(f"- {escaped(line)}" for line in said)]
    return "\n".join(shown).rstrip() + "\n"


def totals(found: Overview) -> str:
    """How many cells there are, and how they ended."""
    counts = ", ".join(f"{number} {status}" for status, number in found.statuses.most_common())
    return f"{found.cells} cells: {counts}"


def figure_in_words(one: Configuration, name: str) -> str:
    """A configuration's mean figure; tokens that count padding are marked, as in the table."""
    value = one.figures[name]
    if not math.isfinite(value):
        return str(value)
    if name.endswith("_bytes"):
        return scaled(value, "B")
    if name.endswith("_frac"):
        mark = " (impossible)" if name in one.impossible else ""
        return f"{significant(value * 100, 3)} %{mark}"
    if name == "runtime_s":
        return duration(value)
    return significant(value) + "*" * (one.is_padded and name.startswith("tokens_"))


def more_in_words(number: int, what: str) -> list[str]:
    """What is not shown, and how to see it."""
    return [f"and {number} more {what}: --all shows them"] if number else []


def notes(found: Overview) -> list[str]:
    """How the figures are to be read."""
    said = found.absences.lines
    if found.is_repeated:
        said.append(
            "figures are geometric means of the repeats that are ok; beside tokens/s is the"
            " interval of the mean (95 %, three repeats or more) or both of two"
        )
    if any(_mark(rows) for rows in found.groups.values()):
        said.append(f"figures marked {_UNWELL} are of runs that did not end well")
    if "run" in found.rates_from:
        said.append(
            "tokens/s and samples/s are the pace of training: steps after the warm-up, without"
            " evaluation and checkpoints (timed_steps in timed_s of --export); tokens/s of the"
            " whole run stand beside them; time is of the whole training or, where nobody told"
            " that, of the run"
        )
    if "computed" in found.tokens_counted:
        said.append("tokens/s marked * counts padding, as the program did: real ones are not known")
    used = [f"{one}: {_MEMORY_SAID[one]}" for one in sorted(found.memory)]
    if used:
        said.append(f"memory is the highest of the repeats; {', '.join(used)}")
    if "trainer" in found.rates_from:
        said.append(
            "rates that transformers printed are of the whole training, its first steps included"
        )
    return said


def markdown_row(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(escaped(one) for one in cells)} |"


def _totals(found: Overview) -> Text:
    parts: list[Any] = [(f"{found.cells} cells", "bold")]
    for status, number in found.statuses.most_common():
        parts += ["  ", (f"{number} {status}", _COLORS.get(status, "red"))]
    return Text.assemble(*parts)


def lines(found: Overview) -> list[tuple[str, ...]]:
    """A line for each configuration, as HEADS names its cells."""
    return [_line(rows, found.shown) for rows in found.groups.values()]


def _line(rows: Sequence[Mapping[str, Any]], shown: Sequence[str]) -> tuple[str, ...]:
    ok = [row for row in rows if row["status"] == "ok"] or list(rows)
    mark = _mark(rows)
    star = mark + "*" * any(row["tokens_counted"] == "computed" for row in ok)
    counts = Counter(row["status"] for row in rows)
    status = ", ".join(f"{n} {s}" if len(rows) > 1 else s for s, n in counts.most_common())
    return (
        configuration_name(rows[0], shown) or f"cell {rows[0]['index']}",
        status,
        _mean(ok, "tokens_per_s", star) + _spread(ok),
        _mean(ok, "whole_run_tokens_per_s", star),
        _mean(ok, "tokens_per_s_per_device", star),
        _mean(ok, "samples_per_s", mark),
        _mean(ok, "loss", mark),
        _peak(ok, mark),
        _time(ok, mark),
    )


def _mark(rows: Sequence[Mapping[str, Any]]) -> str:
    """Said of figures where no repeat is ok, and one has any."""
    if any(row["status"] == "ok" for row in rows):
        return ""
    return _UNWELL if any(row[one] is not None for row in rows for one in _MARKED) else ""


def _spread(rows: Sequence[Mapping[str, Any]]) -> str:
    found = spread(rows, "tokens_per_s")
    return "" if found is None else f" ({significant(found.low)} to {significant(found.high)})"


def _mean(rows: Sequence[Mapping[str, Any]], column: str, mark: str = "") -> str:
    found = of_repeats(rows, column)
    return "-" if found is None else significant(found) + mark


def _peak(rows: Sequence[Mapping[str, Any]], mark: str) -> str:
    for column, source in MEMORY.items():
        found = of_repeats(rows, column)
        if found is not None:
            return f"{scaled(found, 'B')}{mark} {source}"
    return "-"


def _time(rows: Sequence[Mapping[str, Any]], mark: str) -> str:
    found = of_repeats(rows, "runtime_s")
    return "-" if found is None else duration(found) + mark
