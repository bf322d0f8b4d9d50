"""What `erg compare` found, on the terminal: groups, verdicts, what could explain them.

The trap: a table in which the reader picks the winner. Figures stand above with how sure each is,
and the verdicts below say what they show; what is not comparable has figures and no verdict.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from ergmeter.compare.comparison import impossible_entry, mean_of
from ergmeter.compare.verdicts import DEVICE_MEMORY, HOST_MEMORY, JOULES, LOSS, RATE
from ergmeter.errors import NotMeasurable
from ergmeter.records import Reading
from ergmeter.units import ratio_text, significant
from ergmeter.views.run.card import bare, interval, value

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from ergmeter.compare.comparison import Comparison, Front, GroupPair
    from ergmeter.compare.entry import Entry
    from ergmeter.compare.grouping import Group
    from ergmeter.compare.verdicts import Measure
    from ergmeter.stats.ratio import Contrast, Mean

_HEADS = {
    RATE: "tokens/s",
    JOULES: "J/token",
    DEVICE_MEMORY: "memory",
    HOST_MEMORY: "host mem.",
    LOSS: "loss",
    "training.eval_loss": "eval loss",
    "target.time_s": "to target",
    "target.energy_j": "energy",
}
_STYLES = {
    "better": ("+ ", "green"),
    "worse": ("- ", "red"),
    "differs": ("* ", "yellow"),
    "not shown": ("= ", ""),
    "no interval": ("? ", "yellow"),
    "absent": ("  ", "dim"),
}
SIGNS = {
    "better": "+ better",
    "worse": "- worse",
    "differs": "* differs",
    "not shown": "= no difference shown",
    "no interval": "? no interval",
    "absent": "absent",
}
_ACROSS = 6  # figures beside one another in 80 columns
_MANY = 5


def page(found: Comparison) -> RenderableType:
    """All of it: figures, verdicts pair by pair, the front, what to know."""
    parts: list[RenderableType] = []
    for start in range(0, len(found.measures), _ACROSS):
        parts += [_table(found, found.measures[start : start + _ACROSS]), Text()]
    before = before_verdicts(found)
    if before:
        parts += [*(_Hanging("", "yellow", line) for line in before), Text()]
    for pair in found.pairs:
        parts += [*_pair(pair), Text()]
    if found.front:
        parts += [_Hanging("", "", front_in_words(found.front)), Text()]
    parts += [_Hanging("", "dim", f"note: {note}") for note in footnotes(found)]
    return Lines(*parts)


def head(measured: Measure) -> str:
    """A short name for a column."""
    return _HEADS.get(measured.key, measured.title)


def cell(found: Comparison, group: Group, measured: Measure) -> tuple[str, str]:
    """A group's mean and how sure it is, or a dash."""
    try:
        mean = mean_of(group, measured, confidence=found.options.confidence)
    except NotMeasurable:
        wrong = impossible_entry(group, measured.key)
        found_wrong = wrong.figures[measured.key] if wrong is not None else None
        return bare(found_wrong) if found_wrong is not None else "-", ""
    said = bare(Reading(mean.value, measured.unit, "measured"))
    if is_assumed(group, measured):
        return said, "assumed"
    return said, _spread(mean, measured)


def is_assumed(group: Group, measured: Measure) -> bool:
    """Whether a group's figure rests on an assumption, so that its repeats do not tell how sure."""
    return any(measured.key in entry.assumed for entry in group.entries)


def before_verdicts(found: Comparison) -> list[str]:
    """What one must know to judge the verdicts: which runs are not in them, and which are in them
    though something disturbed them."""
    return [
        *(f"left out: {line}" for line in found.left_out),
        *(f"compare with care: {line}" for line in found.cautions),
    ]


def footnotes(found: Comparison) -> list[str]:
    """What holds of all of it."""
    said = list(found.notes)
    sure = [v for p in found.pairs for v in p.verdicts if v.contrast and v.contrast.low is not None]
    if len(sure) >= _MANY:
        wrong = (1 - found.options.confidence) * 100
        said.append(
            f"{len(sure)} intervals, each by itself: where nothing differs, {wrong:g} % of such"
            " claim that something does"
        )
    return said


def front_in_words(front: Front) -> str:
    """Who is on the front and who is not; of many the first, and how many more there are."""
    axes = ", ".join(_HEADS.get(key, key) for key in front.axes)
    said = f"Pareto front ({axes}): {some(front.on) or 'nobody'}"
    if front.beaten:
        who = some([f"{name} (by {beaters(by)})" for name, by in front.beaten.items()])
        said += f"; beaten: {who}"
    return said + (f" ({front.remark})" if front.remark else "")


def beaters(names: Sequence[str], *, most: int = 3) -> str:
    """By whom a group is beaten: of many the first."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return " and ".join([*names[:most], *more])


def some(names: Sequence[str], *, most: int = 8) -> str:
    """The first of some names, and how many more there are."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])


def title(pair: GroupPair) -> str:
    """Who against whom, and how it was done."""
    done = next((v.contrast for v in pair.verdicts if v.contrast), None)
    if done is None:
        return f"{pair.other} against {pair.baseline}"
    method = "" if done.low is None else f", {done.method}"  # of one run there is no interval
    runs = f"{done.repeats[0]} and {done.repeats[1]} runs"
    return f"{pair.other} against {pair.baseline} ({runs}{method})"


def around(pair: GroupPair) -> Iterable[tuple[str, str]]:
    """What stands beside the verdicts: a style and a line each."""
    fair = pair.fairness
    for refusal in fair.refusals:
        yield "red", f"not comparable: {refusal}"
    if fair.refusals and not pair.is_comparable:
        yield "dim", "--anyway gives the verdicts all the same"
    if fair.explanations:
        so_what = "could explain it" if pair.is_comparable else "differs besides"
        yield "yellow", f"{so_what}: {', '.join(fair.explanations)}"
    for remark in fair.remarks:
        yield "yellow", remark
    if fair.unknown:
        yield "dim", f"not checked, not told by both sides: {', '.join(fair.unknown)}"


def contrast_in_words(one: Contrast | None) -> str:
    """A ratio or a difference with its interval, as short as it can be told."""
    if one is None:
        return "absent"
    said = _short(one.value, one)
    if one.low is None or one.high is None:
        return f"{said}, {'one run' if min(one.repeats) == 1 else 'no interval'}"
    if one.is_exact:
        return f"{said}, in every run"
    return f"{said} ({_short(one.low, one)} to {_short(one.high, one)})"


def _short(number: float, one: Contrast) -> str:
    return ratio_text(number) if one.scale == "ratio" else significant(number, 3)


def figure_in_words(entry: Entry, measured: Measure) -> str:
    """A run's figure with its interval and how it was obtained; or why there is none."""
    found = entry.figures.get(measured.key)
    if not isinstance(found, Reading):
        return f"- ({entry.why_not(measured.key)})"
    between = f" ({interval(found)})" if interval(found) else ""
    return f"{value(found).removesuffix(' 1')}{between}, {found.basis}"


def _table(found: Comparison, measures: tuple[Measure, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(", ".join(found.group_by), overflow="fold")
    table.add_column("runs", justify="right")
    for measured in measures:
        table.add_column(head(measured), justify="right", no_wrap=True)
    for group in found.groups:
        cells = [
            Text.assemble(value, "\n", (spread, "dim"))
            for value, spread in (cell(found, group, measured) for measured in measures)
        ]
        table.add_row(Text(group.name, "bold"), str(len(group.entries)), *cells)
    return table


def _spread(mean: Mean, measured: Measure) -> str:
    """Half of the mean's interval; of a geometric mean in percent, its longer half."""
    if mean.low is None or mean.high is None:
        return ""
    if measured.is_quality:
        return f"±{(mean.high - mean.low) / 2:.2g}"
    if mean.noise == 0:
        return "alike"
    half = (mean.high / mean.value - 1) * 100
    if half > 100:
        return ">100 %"
    return f"±{half:.1f} %" if half < 9.95 else f"±{half:.0f} %"


def _pair(pair: GroupPair) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(title(pair), "bold")]
    lines += [_Hanging(*_STYLES[one.state], one.words, indent="  ") for one in pair.verdicts]
    lines += [_Hanging("", style, line, indent="  ") for style, line in around(pair)]
    return lines


@dataclass(frozen=True)
class _Hanging:
    """A sign and a line in from the margin, which goes on below itself and not below the sign."""

    sign: str
    style: str
    text: str
    indent: str = ""

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        first = f"{self.indent}{self.sign}"
        lines = textwrap.wrap(
            self.text,
            options.max_width,
            initial_indent=first,
            subsequent_indent=" " * len(first),
            break_on_hyphens=False,
        )
        for number, line in enumerate(lines):
            cut = len(first) if number == 0 and self.sign else 0
            yield Text.assemble(
                (line[:cut], self.style), (line[cut:], "" if self.sign else self.style)
            )
