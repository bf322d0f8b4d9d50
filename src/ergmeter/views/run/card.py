"""The summary card of a run on the terminal.

The card fits 80 columns. The next command, with the path of the run, stands below the frame on one
unwrapped line, so that it can be copied.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ergmeter.metrics.catalog import catalogue, expected_in, in_view
from ergmeter.metrics.evidence.window import BY_NUMBER
from ergmeter.records import Missing, Reading, Result, Summary
from ergmeter.runlog.reader import FINISHED, IMPORTED, RUNNING, Run
from ergmeter.units import NO_UNIT, duration, grouped, number_of, scaled, significant, tallied
from ergmeter.views.documents import label_lines
from ergmeter.views.render.terminal import BASIS_STYLES

if TYPE_CHECKING:
    from collections.abc import Sequence


OF_A_LOG = "from a log, which holds no readings of energy, devices or host memory"
BARS = "▁▂▃▄▅▆▇█"
_CELLS = 46  # bars, so that both ends of the curve fit beside them in 80 columns
_TITLE_CHARACTERS = 27  # of a title; longer ones wrap
# In a short recording most of the overhead is Python's start, so it is not representative.
_OWN_COST_FROM_S = 30.0


def show(console: Console, run: Run, summary: Summary) -> None:
    """Print the card, and how to see more of the run."""
    console.print(card(run, summary))
    console.print(Text("every metric, with its window and its note:", "dim"))
    again = f"erg report {shlex.quote(_from_here(run.path))} --all"
    console.print(Text(again), soft_wrap=True)


def _from_here(path: Path) -> str:
    """Return a path relative to the working directory if it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def card(run: Run, summary: Summary) -> RenderableType:
    """Return the card: run, metrics with their basis, notes."""
    from ergmeter.metrics.definitions.training import divergence  # noqa: PLC0415  numpy

    body: list[RenderableType] = [*_what_ran(run, summary), _figures(run, summary)]
    curve = loss_curve(run, is_lost=bool(divergence(summary.readings)))
    if curve:
        body.append(curve)
    remarks = reader_notes(summary)
    if remarks:
        body.append(_remarks(remarks))
    title = Text.assemble(" ", (summary.run, "bold"), "  ", _status(summary.status), " ")
    return Panel(Group(*body), title=title, title_align="left", width=100, padding=(0, 1))


def is_of_a_log(run: Run, summary: Summary) -> bool:
    """True if the run was made of a log, without readings of devices."""
    return summary.status == IMPORTED and not run.devices


def reader_notes(summary: Summary) -> tuple[str, ...]:
    """Return the notes, without those already given as a reason."""
    reasons = {
        reading.reason for reading in summary.readings.values() if isinstance(reading, Missing)
    }
    return tuple(note for note in summary.notes if note not in reasons)


def every_metric(summary: Summary) -> RenderableType:
    """Render every metric with interval and note; absent ones with their reason."""
    lines: list[RenderableType] = []
    named_reasons: dict[str, str] = {}
    for key, reading in summary.readings.items():
        if isinstance(reading, Reading):
            head = Text.assemble((key, "bold"), "  ", _styled_value(reading), "  ")
            lines.append(head.append_text(_basis(reading)))
            parts = (reading.impossible, interval(reading), reading.note)
            remark = "; ".join(part for part in parts if part)
        else:
            lines.append(Text.assemble((key, "bold"), "  -"))
            first = named_reasons.setdefault(reading.reason, key)
            remark = reading.reason if first == key else f"as {first}"
        lines.append(IndentedText(remark))
    return Group(*lines)


@dataclass(frozen=True)
class IndentedText:
    """A dim text, all of its lines indented. rich's own padding fills lines with blanks."""

    text: str

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        indent = " " * 4
        yield from (
            Text(line, "dim")
            for line in textwrap.wrap(
                self.text,
                options.max_width,
                initial_indent=indent,
                subsequent_indent=indent,
                break_on_hyphens=False,
            )
        )


def value(reading: Reading) -> str:
    """Format a value in a readable unit, marked if it is impossible."""
    return _in_words(reading.value, reading.unit, beside=reading.value) + reading.mark


def _styled_value(reading: Reading) -> Text:
    return Text(value(reading), "red" if reading.impossible else "")


def _in_words(number: float, unit: str, *, beside: float) -> str:
    """Format a number of a reading, with the prefix of its value."""
    if unit == "s":
        return duration(number)
    if unit == "frac":
        return f"{significant(number * 100, 3)} %"
    if unit in ("B", "B/s", "B/h", "Hz", "J", "g", "FLOP/s", "FLOP/token"):
        return scaled(number, unit, beside=beside)
    if unit == "cores":
        return f"{significant(number, 3)} of a core" if number < 1 else f"{number:.2f} cores"
    if unit in ("tokens", "steps"):
        return f"{number:,.0f} {unit}"
    text = f"{number:,.0f}" if abs(number) >= 10_000 else significant(number)
    return text if unit == NO_UNIT else f"{text} {unit}"


def interval(reading: Reading) -> str:
    """Format an interval, with the unit once if both ends share it."""
    if reading.low is None or reading.high is None:
        return ""
    # Around 0 the prefix is that of the larger end.
    beside = reading.value or max(reading.low, reading.high, key=abs)
    low, high = (_in_words(end, reading.unit, beside=beside) for end in (reading.low, reading.high))
    number, _, unit = low.partition(" ")
    has_same = " " not in unit and high.endswith(f" {unit}") and high.count(" ") == 1
    return f"{number if has_same else low} to {high}"


def _spread(reading: Reading) -> str:
    """Return half the interval in percent, in at most seven characters."""
    if reading.low is None or reading.high is None or reading.low <= 0 <= reading.high:
        return ""
    half = (reading.high - reading.low) / 2 / abs(reading.value) * 100
    if half < 0.1:
        return "< 0.1 %"
    if half > 100:
        return "> 100 %"
    return f"± {half:.1f} %" if half < 9.95 else f"± {half:.0f} %"


def _is_nothing(key: str, reading: Reading) -> bool:
    """True for a trend whose interval contains 0, and for an HFU equal to the MFU."""
    if key == "utilization.hfu_frac":
        return reading.note.startswith("nothing is computed twice")
    if reading.low is None or reading.high is None:
        return False
    return "growth" in key and reading.low <= 0 <= reading.high


def _basis(reading: Reading) -> Text:
    return Text(reading.basis, BASIS_STYLES[reading.basis])


def _status(status: str) -> Text:
    style = {FINISHED: "green", IMPORTED: "green", RUNNING: "cyan"}.get(status, "red")
    return Text(status, style)


def _what_ran(run: Run, summary: Summary) -> list[Text]:
    words = [str(word) for word in run.header.get("command") or []]
    lines = []
    if words:
        command = " ".join(shlex.join([Path(words[0]).name, *words[1:]]).split())
        lines.append(Text(command, "dim", no_wrap=True, overflow="ellipsis"))
    used = [run.devices[id_] for id_ in summary.devices if id_ in run.devices]
    accelerators = tallied(device.name for device in used if device.kind == "gpu")
    host = next((str(w.header.get("host")) for w in run.writers), "")
    window = summary.readings["time.window_s"]
    over = window.note if isinstance(window, Reading) else window.reason
    where = f"{accelerators or 'no accelerator'} on {host}"
    lines.append(Text(OF_A_LOG if is_of_a_log(run, summary) else where, "dim"))
    over, _, more = over.partition("; ")
    lines += [Text(line, "dim") for line in (f"{over}{_rule(summary)}", more) if line]
    lines += [Text.assemble((f"{what}: ", "dim"), line) for what, line in label_lines(run)]
    return lines


def _rule(summary: Summary) -> str:
    """Return how the warm-up was chosen, unless the step count already says so."""
    left_out = summary.readings["time.warmup_steps"]
    if not isinstance(left_out, Reading) or not left_out.value:
        return ""
    rule = left_out.note.removeprefix("rule: ")
    if rule == BY_NUMBER:
        return ""
    return "" if rule == number_of(round(left_out.value), "step") else f" (warm-up: {rule})"


def _figures(run: Run, summary: Summary) -> RenderableType:
    figures = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    figures.add_column(style="dim", no_wrap=True)
    figures.add_column(max_width=_TITLE_CHARACTERS)
    figures.add_column(justify="right", style="bold", no_wrap=True)
    figures.add_column(style="dim", no_wrap=True)
    figures.add_column(no_wrap=True)
    groups = grouped((at.group, key) for key, at in in_view("card").items())
    for group, members in groups.items():
        label = group
        for key in [key for key in members if _has_place(run, summary, key)]:
            if label:
                figures.add_row("", "", "", "", "")
            reading = summary.readings[key]
            cells = (
                (_styled_value(reading), _spread(reading), _basis(reading))
                if isinstance(reading, Reading)
                else ("-", "", "")
            )
            figures.add_row(label, catalogue()[key].title, *cells)
            label = ""
    return Group(figures, *_absent(run, summary))


def _has_place(run: Run, summary: Summary, key: str) -> bool:
    """True if a metric is on the card; expected ones stay there when absent."""
    reading = summary.readings.get(key)
    if not isinstance(reading, Reading):
        return reading is not None and key in _expected(run, summary)
    if key == "overhead.cpu_frac":
        return _is_long(summary)
    return not _is_nothing(key, reading)


def _expected(run: Run, summary: Summary) -> list[str]:
    """Metrics that keep their row when absent, with the reason below: those of this kind of run."""
    expected = expected_in("card")
    if is_of_a_log(run, summary):
        expected = [key for key in expected if not key.startswith(("energy.", "memory."))]
    if isinstance(summary.readings["latency.ttft_median_s"], Reading):  # inference has no steps
        expected = [key for key in expected if key != "time.step_s"]
    return expected


def _is_long(summary: Summary) -> bool:
    lasted = summary.readings["time.run_s"]
    return isinstance(lasted, Reading) and lasted.value >= _OWN_COST_FROM_S


def _absent(run: Run, summary: Summary) -> list[Text]:
    by_reason = grouped(
        (result.reason, catalogue()[key].title)
        for key in _expected(run, summary)
        if isinstance(result := summary.readings.get(key), Missing)
    )
    return [
        Text.assemble("\n", (f"no {', '.join(titles)}: ", "yellow"), short_reason(reason, run))
        for reason, titles in by_reason.items()
    ]


def short_reason(reason: str, run: Run) -> str:
    """Return a reason without the probes' messages, which `--all` and `erg doctor` show."""
    reasons = [f"{name}: {why}" for name, why in run.unavailable.items()]
    reasons = [text for text in reasons if text in reason]
    return reason.replace(f" ({'; '.join(reasons)})", "") if reasons else reason


def _remarks(notes: tuple[str, ...]) -> Table:
    lines = Table.grid(padding=(0, 1, 0, 0))
    lines.add_row("")
    for note in notes:
        lines.add_row(Text("!", "yellow"), Text(note))
    return lines


def curve_bars(values: Sequence[float], cells: int) -> str:
    """Return at most `cells` bars from the lowest to the highest mean of equal parts."""
    parts = min(cells, len(values))
    edges = [len(values) * part // parts for part in range(parts + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(edges)]
    low, height = min(means), max(means) - min(means)
    levels = [(mean - low) / height if height else 0.0 for mean in means]
    return "".join(BARS[round(level * (len(BARS) - 1))] for level in levels)


def loss_curve(run: Run, *, is_lost: bool = False) -> Text | None:
    """Return the loss over the run, each bar the mean of equally many steps; None without losses.

    `is_lost`: the loss became NaN after its last number.
    """
    from ergmeter.metrics.definitions.training import losses  # noqa: PLC0415  numpy

    values, is_printed = losses(run)
    if len(values) < 3:
        return None
    label = "loss, as printed  " if is_printed else "loss  "
    after = ", then no number" if is_lost else ""
    bars = curve_bars(values, _CELLS + len("loss  ") - len(label) - len(after))
    ends = f" {significant(values[0])} to {significant(values[-1])}"
    return Text.assemble("\n", (label, "dim"), bars, (ends, "dim"), (after, "red"))


def short_status(status: str) -> str:
    """Return a status in one word: `failed (2)`, `failed (ValueError)`, `SIGKILL`."""
    status = re.sub(r"\(exit code (\d+)\)", r"(\1)", status).removeprefix("killed by ")
    return re.sub(r"\((\w+): .*\)$", r"(\1)", status, flags=re.DOTALL)


def column_text(result: Result) -> str:
    """Format a result for a column whose title has the unit; durations keep theirs."""
    if not isinstance(result, Reading):
        return "-"
    return value(result).removesuffix(f" {result.unit}") if result.unit != "s" else value(result)
