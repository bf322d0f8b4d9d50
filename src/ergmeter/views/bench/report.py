"""The report of a bench by configuration: terminal, Markdown and CSV."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ergmeter.bench.overview import MEMORY, Configuration, Overview, of_repeats, spread
from ergmeter.compare.pairing import configuration_name
from ergmeter.units import duration, scaled, significant
from ergmeter.views.blocks import escaped, markdown_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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


def page(overview: Overview) -> RenderableType:
    """Render a line for each configuration, repeats averaged; then failures with reasons."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for head in HEADS:
        is_text = head in ("cell", "status", "tokens/s", "memory")  # may wrap
        table.add_column(head, min_width=12 if head == "cell" else None, no_wrap=not is_text)
    for line in lines(overview):
        table.add_row(*[Text(cell) for cell in line])
    parts: list[RenderableType] = [_totals(overview), table]
    parts += [Text(line, "dim") for line in more_in_words(overview.more, "configurations")]
    parts += [Text(line, "red") for line in overview.troubles]
    parts += [Text(line, "dim") for line in more_in_words(overview.more_troubles, "troubles")]
    parts += [Text(line, "dim") for line in notes(overview)]
    return Group(*parts)


def markdown(overview: Overview) -> str:
    """Render the same report as Markdown."""
    rows = [totals(overview), "", *markdown_table(HEADS, lines(overview))]
    remarks = [*more_in_words(overview.more, "configurations"), *overview.troubles]
    remarks += [*more_in_words(overview.more_troubles, "troubles"), *notes(overview)]
    rows += ["", *(f"- {escaped(line)}" for line in remarks)]
    return "\n".join(rows).rstrip() + "\n"


def totals(overview: Overview) -> str:
    """Return the number of cells by outcome."""
    counts = ", ".join(f"{number} {status}" for status, number in overview.statuses.most_common())
    return f"{overview.cells} cells: {counts}"


def figure_in_words(configuration: Configuration, name: str) -> str:
    """Return a configuration's mean; tokens that include padding are marked."""
    value = configuration.figures[name]
    if not math.isfinite(value):
        return str(value)
    if name.endswith("_bytes"):
        return scaled(value, "B")
    if name.endswith("_frac"):
        mark = " (impossible)" if name in configuration.impossible else ""
        return f"{significant(value * 100, 3)} %{mark}"
    if name == "runtime_s":
        return duration(value)
    return significant(value) + "*" * (configuration.is_padded and name.startswith("tokens_"))


def more_in_words(number: int, what: str) -> list[str]:
    """Return the number of rows not shown, and how to see them."""
    return [f"and {number} more {what}: --all shows them"] if number else []


def notes(overview: Overview) -> list[str]:
    """Return notes on how to read the metrics."""
    remarks = overview.absences.lines
    if overview.is_repeated:
        remarks.append(
            "figures are geometric means of the repeats that are ok; beside tokens/s is the"
            " interval of the mean (95 %, three repeats or more) or both of two"
        )
    if any(_mark(rows) for rows in overview.groups.values()):
        remarks.append(f"figures marked {_UNWELL} are of runs that did not end well")
    if "run" in overview.rates_from:
        remarks.append(
            "tokens/s and samples/s are the pace of training: steps after the warm-up, without"
            " evaluation and checkpoints (timed_steps in timed_s of --export); tokens/s of the"
            " whole run stand beside them; time is of the whole training or, where nobody told"
            " that, of the run"
        )
    if "computed" in overview.tokens_counted:
        remarks.append(
            "tokens/s marked * counts padding, as the program did: real ones are not known"
        )
    used = [f"{source}: {_MEMORY_SAID[source]}" for source in sorted(overview.memory)]
    if used:
        remarks.append(f"memory is the highest of the repeats; {', '.join(used)}")
    if "trainer" in overview.rates_from:
        remarks.append(
            "rates that transformers printed are of the whole training, its first steps included"
        )
    return remarks


def _totals(overview: Overview) -> Text:
    parts: list[Any] = [(f"{overview.cells} cells", "bold")]
    for status, number in overview.statuses.most_common():
        parts += ["  ", (f"{number} {status}", _COLORS.get(status, "red"))]
    return Text.assemble(*parts)


def lines(overview: Overview) -> list[tuple[str, ...]]:
    """Return a line for each configuration, with the columns of HEADS."""
    return [_line(rows, overview.shown_columns) for rows in overview.groups.values()]


def _line(rows: Sequence[Mapping[str, Any]], settings: Sequence[str]) -> tuple[str, ...]:
    ok = [row for row in rows if row["status"] == "ok"] or list(rows)
    mark = _mark(rows)
    star = mark + "*" * any(row["tokens_counted"] == "computed" for row in ok)
    counts = Counter(row["status"] for row in rows)
    status = ", ".join(f"{n} {s}" if len(rows) > 1 else s for s, n in counts.most_common())
    return (
        configuration_name(rows[0], settings) or f"cell {rows[0]['index']}",
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
    """Return the mark for values from repeats none of which succeeded."""
    if any(row["status"] == "ok" for row in rows):
        return ""
    return _UNWELL if any(row[column] is not None for row in rows for column in _MARKED) else ""


def _spread(rows: Sequence[Mapping[str, Any]]) -> str:
    speed = spread(rows, "tokens_per_s")
    return "" if speed is None else f" ({significant(speed.low)} to {significant(speed.high)})"


def _mean(rows: Sequence[Mapping[str, Any]], column: str, mark: str = "") -> str:
    mean = of_repeats(rows, column)
    return "-" if mean is None else significant(mean) + mark


def _peak(rows: Sequence[Mapping[str, Any]], mark: str) -> str:
    for column, source in MEMORY.items():
        peak = of_repeats(rows, column)
        if peak is not None:
            return f"{scaled(peak, 'B')}{mark} {source}"
    return "-"


def _time(rows: Sequence[Mapping[str, Any]], mark: str) -> str:
    runtime = of_repeats(rows, "runtime_s")
    return "-" if runtime is None else duration(runtime) + mark
