"""The card: the whole answer on the terminal, with what is missing and why.

The trap: a frame that breaks what one would copy. The card fits 80 columns, and the command with
the run's path stands below it, on a line of its own that is never cut or wrapped.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.evidence.window import BY_NUMBER
from ergmeter.records import PHASES, Missing, Reading
from ergmeter.runlog.reader import FINISHED, IMPORTED, RUNNING
from ergmeter.units import NO_UNIT, duration, number_of, scaled, significant, tallied
from ergmeter.views.labels import label_lines

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from ergmeter.records import Result, Summary
    from ergmeter.runlog.reader import Run

# What the card shows, by group. A missing one in bold print stays in its place with its reason;
# the others are left out, and `erg report --all` has them.
_GROUPS: dict[str, list[tuple[str, bool]]] = {
    "throughput": [
        ("throughput.tokens_per_s", True),
        ("throughput.whole_run_tokens_per_s", False),
        ("throughput.tokens_per_s_per_device", False),
        ("throughput.samples_per_s", False),
        ("throughput.output_tokens_per_s", False),
        ("throughput.requests_per_s", False),
        ("requests.failed", False),
        ("throughput.steps_per_s", False),
        ("tokens.per_step", False),
        ("tokens.padding_frac", False),
    ],
    "time": [
        ("time.step_s", True),
        ("time.step_median_s", False),
        ("time.step_p95_s", False),
        ("time.outside_steps_frac", False),
        ("time.eval_s", False),
        ("time.checkpoint_s", False),
        ("time.data_s", False),
        ("time.before_first_step_s", False),
    ],
    "latency": [
        ("latency.ttft_median_s", False),
        ("latency.ttft_p95_s", False),
        ("latency.tpot_median_s", False),
        ("latency.tpot_p95_s", False),
        ("latency.e2e_median_s", False),
    ],
    # With MFU, which comes next, a ladder: each rung says less than the one above it seems to.
    "activity": [
        ("utilization.busy_frac", False),
        ("activity.sm_frac", False),
        ("activity.tensor_frac", False),
        ("activity.dram_frac", False),
    ],
    "compute": [
        ("utilization.mfu_frac", False),
        ("utilization.whole_run_mfu_frac", False),
        ("utilization.mfu_of_achievable_frac", False),
        ("utilization.mfu_bf16_peak_frac", False),
        ("utilization.hfu_frac", False),
        ("utilization.bandwidth_frac", False),
        ("compute.model_flops_per_s_per_device", False),
    ],
    "energy": [
        ("energy.run_j", True),
        ("energy.joules_per_token", False),
        ("energy.whole_run_joules_per_token", False),
        ("energy.joules_per_generated_token", False),
        ("energy.mean_w", False),
        ("energy.peak_w", False),
        ("carbon.co2e_g", False),
        ("carbon.co2e_per_million_tokens_g", False),
        ("carbon.market_co2e_g", False),
        ("cost.gpu_whole_run", False),
        ("cost.gpu_per_million_tokens", False),
        ("cost.energy", False),
    ],
    "memory": [
        ("memory.device_peak_bytes", False),
        ("memory.allocator_peak_bytes", False),
        ("memory.process_peak_bytes", True),
        ("memory.process_growth_bytes_per_h", False),
    ],
    "load": [
        ("utilization.throttled_frac", False),
        ("utilization.process_cores", False),
        ("utilization.iowait_frac", False),
        ("overhead.cpu_frac", False),
    ],
}
_BASIS_STYLE = {"measured": "green", "derived": "cyan", "reported": "yellow", "assumed": "magenta"}
_OF_A_LOG = "from a log, which holds no readings of energy, devices or host memory"
_BARS = "▁▂▃▄▅▆▇█"
_OTHER_LOSS = re.compile("eval|val|test|load_balancing|aux|z_")
_CELLS = 46  # bars, so that both ends of the curve fit beside them in 80 columns
_TITLE_CHARACTERS = 27  # of a title; a longer one, or one beside a long value, goes on below
# Starting Python is most of what a short recording costs, and says nothing of a longer one.
_OWN_COST_FROM_S = 30.0


def show(console: Console, run: Run, summary: Summary) -> None:
    """Print the card, and below it how to see more of the run."""
    console.print(card(run, summary))
    console.print(Text("every metric, with its window and its note:", "dim"))
    again = f"erg report {shlex.quote(_from_here(run.path))} --all"
    console.print(Text(again), soft_wrap=True)


def _from_here(path: Path) -> str:
    """A path as one would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def card(run: Run, summary: Summary) -> RenderableType:
    """The card of a run: what ran, the figures with their basis, what to know about them."""
    from ergmeter.metrics.definitions.training import divergence  # noqa: PLC0415  numpy

    body: list[RenderableType] = [*_what_ran(run, summary), _figures(run, summary)]
    curve = sparkline(run, is_lost=bool(divergence(summary.readings)))
    if curve:
        body.append(curve)
    remarks = to_know(summary)
    if remarks:
        body.append(_remarks(remarks))
    title = Text.assemble(" ", (summary.run, "bold"), "  ", _status(summary.status), " ")
    return Panel(Group(*body), title=title, title_align="left", width=100, padding=(0, 1))


def to_know(summary: Summary) -> tuple[str, ...]:
    """What a reader must know beside the figures; without what stands as a reason already."""
    told = {found.reason for found in summary.readings.values() if isinstance(found, Missing)}
    return tuple(note for note in summary.notes if note not in told)


def every_metric(summary: Summary) -> RenderableType:
    """Every metric with its interval and note; the missing ones with their reason."""
    lines: list[RenderableType] = []
    told: dict[str, str] = {}
    for key, found in summary.readings.items():
        if isinstance(found, Reading):
            head = Text.assemble((key, "bold"), "  ", _styled_value(found), "  ")
            lines.append(head.append_text(_basis(found)))
            parts = (found.impossible, interval(found), found.note)
            said = "; ".join(part for part in parts if part)
        else:
            lines.append(Text.assemble((key, "bold"), "  -"))
            first = told.setdefault(found.reason, key)
            said = found.reason if first == key else f"as {first}"
        lines.append(_Indented(said))
    return Group(*lines)


@dataclass(frozen=True)
class _Indented:
    """Dim text in from the margin. rich's own padding fills each line with blanks to its end."""

    text: str

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        indent = " " * 4
        for line in textwrap.wrap(
            self.text,
            options.max_width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        ):
            yield Text(line, "dim")


def value(reading: Reading) -> str:
    """A value in the unit a person would say it in, marked if it is impossible."""
    return _in_words(reading.value, reading.unit, beside=reading.value) + reading.mark


def _styled_value(reading: Reading) -> Text:
    return Text(value(reading), "red" if reading.impossible else "")


def _in_words(number: float, unit: str, *, beside: float) -> str:
    """A number of a reading, with the prefix that its value has."""
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
    said = f"{number:,.0f}" if abs(number) >= 10_000 else significant(number)
    return said if unit == NO_UNIT else f"{said} {unit}"


def interval(reading: Reading) -> str:
    """Low to high, with the unit once where both have the same."""
    if reading.low is None or reading.high is None:
        return ""
    # Beside 0 the prefix is that of the end that is farther from it.
    beside = reading.value or max(reading.low, reading.high, key=abs)
    low, high = (_in_words(end, reading.unit, beside=beside) for end in (reading.low, reading.high))
    number, _, unit = low.partition(" ")
    has_same = " " not in unit and high.endswith(f" {unit}") and high.count(" ") == 1
    return f"{number if has_same else low} to {high}"


def _spread(reading: Reading) -> str:
    """Half the interval, in percent: what fits beside a number, in seven characters."""
    if reading.low is None or reading.high is None or reading.low <= 0 <= reading.high:
        return ""
    half = (reading.high - reading.low) / 2 / abs(reading.value) * 100
    if half < 0.1:
        return "< 0.1 %"
    if half > 100:
        return "> 100 %"
    return f"± {half:.1f} %" if half < 9.95 else f"± {half:.0f} %"


def _is_nothing(key: str, reading: Reading) -> bool:
    """Whether a trend is none, as its interval holds 0; or an HFU that is the MFU again."""
    if key == "utilization.hfu_frac":
        return reading.note.startswith("nothing is computed twice")
    if reading.low is None or reading.high is None:
        return False
    return "growth" in key and reading.low <= 0 <= reading.high


def _basis(reading: Reading) -> Text:
    return Text(reading.basis, _BASIS_STYLE[reading.basis])


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
    is_of_a_log = summary.status == IMPORTED and not run.devices
    lines.append(Text(_OF_A_LOG if is_of_a_log else where, "dim"))
    over, _, more = over.partition("; ")
    lines += [Text(line, "dim") for line in (f"{over}{_rule(summary)}", more) if line]
    lines += [Text.assemble((f"{what}: ", "dim"), said) for what, said in label_lines(run)]
    return lines


def _rule(summary: Summary) -> str:
    """How the warm-up was chosen, where its number of steps does not say so already."""
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
    for group, members in _GROUPS.items():
        label = group
        for key in [key for key, keep in members if _has_place(run, summary, key, keep=keep)]:
            if label:
                figures.add_row("", "", "", "", "")
            found = summary.readings[key]
            cells = (
                (_styled_value(found), _spread(found), _basis(found))
                if isinstance(found, Reading)
                else ("-", "", "")
            )
            figures.add_row(label, catalogue()[key].title, *cells)
            label = ""
    return Group(figures, *_absent(run, summary))


def _has_place(run: Run, summary: Summary, key: str, *, keep: bool) -> bool:
    """Whether a figure is on the card; one that is kept is there also where it is missing."""
    found = summary.readings.get(key)
    if not isinstance(found, Reading):
        return keep and found is not None and not _is_beside_the_point(run, summary, key)
    if key == "overhead.cpu_frac":
        return _is_long(summary)
    return not _is_nothing(key, found)


def _is_beside_the_point(run: Run, summary: Summary, key: str) -> bool:
    """Whether nobody expects this of such a run: readings of a log, steps of inference."""
    is_of_a_log = summary.status == IMPORTED and not run.devices
    if is_of_a_log and key.startswith(("energy.", "memory.")):
        return True
    return key == "time.step_s" and isinstance(summary.readings["latency.ttft_median_s"], Reading)


def _is_long(summary: Summary) -> bool:
    lasted = summary.readings["time.run_s"]
    return isinstance(lasted, Reading) and lasted.value >= _OWN_COST_FROM_S


def _absent(run: Run, summary: Summary) -> list[Text]:
    kept = [key for members in _GROUPS.values() for key, keep in members if keep]
    kept = [key for key in kept if not _is_beside_the_point(run, summary, key)]
    missing = {key: summary.readings.get(key) for key in kept}
    said: dict[str, list[str]] = {}
    for key, found in missing.items():
        if isinstance(found, Missing):
            said.setdefault(found.reason, []).append(catalogue()[key].title)
    return [
        Text.assemble("\n", (f"no {', '.join(titles)}: ", "yellow"), in_short(reason, run))
        for reason, titles in said.items()
    ]


def in_short(reason: str, run: Run) -> str:
    """A reason without what each probe said, which is long: `--all` and the doctor have it."""
    said = [f"{name}: {why}" for name, why in run.unavailable.items()]
    said = [one for one in said if one in reason]
    return reason.replace(f" ({'; '.join(said)})", "") if said else reason


def _remarks(notes: tuple[str, ...]) -> Table:
    lines = Table.grid(padding=(0, 1, 0, 0))
    lines.add_row("")
    for note in notes:
        lines.add_row(Text("!", "yellow"), Text(note))
    return lines


def sparkline(run: Run, *, is_lost: bool = False) -> Text | None:
    """The loss over the run, if there was one: each bar the mean of as many steps. `is_lost`: what
    came after the last number of it is none."""
    import numpy as np  # noqa: PLC0415

    from ergmeter.metrics.evidence.steps import read_steps  # noqa: PLC0415

    steps, label, is_printed = read_steps(run), "loss  ", "imported" in run.header
    # Where nobody tells it, it may have been printed.
    if not any(np.isfinite(lane["loss"]).any() for lane in steps.lanes):
        label = "loss, as printed  " if len(steps) else label
        steps, is_printed = read_steps(run, "output"), True
    train = steps.where_each(lambda lane: lane["phase"] == PHASES.index("train"))
    start_ns = train.lowest("start_ns") if len(train) else None
    first = _before_steps(run, start_ns, is_printed=is_printed)
    tells = train.where_each(lambda lane: np.isfinite(lane["loss"]))
    if len(tells):  # of several ranks the first that tells it
        rank = min(lane["rank"].min() for lane in tells.lanes)
        tells = tells.where_each(lambda lane: lane["rank"] == rank)
    loss = np.concatenate([first, tells["loss"][np.argsort(tells["start_ns"])]])
    loss = loss[np.isfinite(loss)]
    if len(loss) < 3:
        return None
    after = ", then no number" if is_lost else ""
    cells = min(_CELLS + len("loss  ") - len(label) - len(after), len(loss))
    edges = np.linspace(0, len(loss), cells + 1).astype(int)
    means = np.array([loss[a:b].mean() for a, b in pairwise(edges)])
    low, high = float(means.min()), float(means.max())
    level = (means - low) / (high - low) if high > low else np.zeros(cells)
    bars = "".join(_BARS[round(float(x) * (len(_BARS) - 1))] for x in level)
    ends = f" {significant(float(loss[0]))} to {significant(float(loss[-1]))}"
    return Text.assemble("\n", (label, "dim"), bars, (ends, "dim"), (after, "red"))


def _before_steps(run: Run, start_ns: int | None, *, is_printed: bool) -> list[float]:
    """The loss of the printed line that the first step begins with; of a log whose lines have no
    times, all losses that it names as the first."""
    if not is_printed or (start_ns is None and "imported" not in run.header):
        return []
    said = [one for one in run.reported() if one.name.endswith("loss") and not one.unit]
    said = [one for one in said if not _OTHER_LOSS.match(one.name)]
    if start_ns is not None:
        return [one.value for one in said if one.t_ns == start_ns][:1]
    return [one.value for one in said if one.name == said[0].name]


def brief(status: str) -> str:
    """A status in one word for a column: `failed (2)`, `failed (ValueError)`, `SIGKILL`."""
    status = re.sub(r"\(exit code (\d+)\)", r"(\1)", status).removeprefix("killed by ")
    return re.sub(r"\((\w+): .*\)$", r"(\1)", status, flags=re.DOTALL)


def bare(found: Result) -> str:
    """A result in a column whose title says the unit; a duration keeps its own."""
    if not isinstance(found, Reading):
        return "-"
    return value(found).removesuffix(f" {found.unit}") if found.unit != "s" else value(found)
