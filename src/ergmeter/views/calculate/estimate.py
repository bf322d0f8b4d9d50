"""An estimate on the terminal and as JSON: the moments of a step, the verdict, the bill.

It is read in a terminal of 80 columns: what is absent for one reason is one line, and what was
assumed stands in a block of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from ergmeter.flops.estimate.estimate import AS_ASKED, Way, serving_results, verdict
from ergmeter.flops.estimate.memory import KINDS
from ergmeter.records import Missing
from ergmeter.units import duration, scaled, significant
from ergmeter.views.documents import result

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ergmeter.flops.estimate.estimate import Room, Serving
    from ergmeter.flops.estimate.memory import Memory
    from ergmeter.flops.work import Work
    from ergmeter.records import Result

# Shown in the tables, the verdict or the heading.
_SHOWN = ("estimate.memory_", "estimate.batch_size_max", "estimate.micro_batch_max")


@dataclass(frozen=True)
class EstimateView:
    """What there is to show."""

    verdict: str
    results: dict[str, Result]
    assumptions: tuple[str, ...]
    memory: Memory | None = None  # of a training
    ways: tuple[Way, ...] = ()
    params: tuple[int, int] | None = None  # all, trained
    held: Serving | None = None  # of serving
    fits: bool | None = None


def trained(
    memory: Memory,
    room: Room | Missing,
    results: dict[str, Result],
    ways: list[Way],
    work: Work,
) -> EstimateView:
    """A training."""
    return EstimateView(
        verdict(memory.peak.total_bytes, room),
        results,
        memory.assumptions,
        memory,
        tuple(ways),
        (work.params, work.params_trained),
        fits=ways[0].fits,
    )


def served(held: dict[str, Serving], room: Room | Missing) -> EstimateView:
    """Serving, as asked and with other types for weights and caches."""
    usable = None if isinstance(room, Missing) else room.usable_bytes
    asked = held[AS_ASKED]
    changes = [
        Way(
            name,
            each.total_bytes,
            None if usable is None else each.sequences_max(usable),
            None if usable is None else each.total_bytes <= usable,
        )
        for name, each in held.items()
        if each is asked or each.total_bytes < asked.total_bytes
    ]
    return EstimateView(
        verdict(asked.total_bytes, room),
        serving_results(asked, room),
        asked.assumptions,
        ways=tuple(changes),
        held=asked,
        fits=changes[0].fits,
    )


def parts(shown: EstimateView) -> list[RenderableType]:
    """What is printed, from top to bottom."""
    found: list[RenderableType] = []
    if shown.memory is not None:
        found.append(moments_table(shown.memory))
    elif shown.held is not None:
        found.append(_serving_table(shown.held))
    found.append(Text(shown.verdict, style="bold"))
    if shown.ways:
        found.append(ways_table(shown))
    found.extend(lines(shown))
    found.append(_assumed(shown.assumptions))
    return found


def moments_table(memory: Memory) -> Table:
    """What a device holds at each moment; the largest is the peak."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("GB on a device")
    for moment in memory.moments:
        name = moment.name.replace(" through ", "\nthrough ").replace("through model.", "through ")
        table.add_column(name, justify="right", style="bold" if moment is memory.peak else "")
    for kind in KINDS:
        if any(moment.bytes[kind] for moment in memory.moments):
            table.add_row(kind, *(_gb(moment.bytes[kind]) for moment in memory.moments))
    table.add_row("all", *(_gb(moment.total_bytes) for moment in memory.moments))
    return table


def _serving_table(held: Serving) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("GB on a device")
    table.add_column("to serve", justify="right")
    table.add_row("weights", _gb(held.weights_bytes))
    cached = f"cache of {held.sequences} x {held.context} tokens"
    table.add_row(cached, _gb(held.sequences * held.cache_bytes))
    table.add_row("all", _gb(held.total_bytes))
    return table


def _gb(value: float) -> str:
    if not value:
        return "-"
    return f"{value / 1e9:.2f}" if value >= 5e6 else "<0.01"


def ways_table(shown: EstimateView) -> Table:
    """The peak as asked and with each change; what fits beside it."""
    has_room = shown.fits is not None
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("with", overflow="fold")
    table.add_column("peak", justify="right", no_wrap=True)
    if has_room:
        table.add_column("", no_wrap=True)
        counted = "micro-batch" if shown.held is None else "sequences"
        table.add_column(f"{counted}\nthat fits", justify="right")
    for way in shown.ways:
        cells = [way.name, scaled(way.peak_bytes, "B")]
        if has_room:
            cells += ["fits" if way.fits else "too much", _most(way)]
        table.add_row(*cells, style="bold" if way.name == AS_ASKED else "")
    return table


def _most(way: Way) -> str:
    """How many; "-" where nothing is cached, so that memory sets no limit."""
    if way.most is None:
        return "-" if way.fits else "none"
    return f"{way.most}"


def lines(shown: EstimateView) -> list[Text]:
    """The readings about time, energy, carbon and cost; those absent for one reason together."""
    said, absent = [], dict[str, list[str]]()
    for key, one in shown.results.items():
        if key.startswith(_SHOWN):
            continue
        if isinstance(one, Missing):
            absent.setdefault(one.reason, []).append(key.removeprefix("estimate."))
            continue
        line = Text(f"{key}  ")
        line.append(_figure(one.value, one.unit), style="bold")
        line.append(f"  (estimate; {one.note})", style="dim")
        said.append(line)
    said += [
        Text(f"{', '.join(names)}: - ({reason})", style="dim") for reason, names in absent.items()
    ]
    if shown.memory is not None and shown.memory.host_bytes:
        held = scaled(shown.memory.host_bytes, "B")
        said.append(Text(f"and {held} of optimizer in memory that is paged to the host"))
    return said


def _assumed(assumptions: tuple[str, ...]) -> Table:
    """A block with a line for each, which a longer one continues below itself."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(style="dim", overflow="fold")
    for number, line in enumerate(assumptions):
        table.add_row("" if number else "assumed:", Text(line))
    return table


def _figure(value: float, unit: str) -> str:
    if unit == "s":
        return duration(value)
    if unit in ("B", "g"):
        return scaled(value, unit)
    return f"{significant(value)} {unit}"


def document(shown: EstimateView) -> dict[str, Any]:
    """Everything, in base units."""
    counted = "micro_batch_max" if shown.held is None else "sequences_max"
    found: dict[str, Any] = {
        "readings": {key: result(one) for key, one in shown.results.items()},
        "verdict": shown.verdict,
        "fits": shown.fits,
        "ways": [
            {"with": way.name, "peak_bytes": way.peak_bytes, "fits": way.fits, counted: way.most}
            for way in shown.ways
        ],
        "assumptions": list(shown.assumptions),
    }
    if shown.memory is not None:
        found |= _training(shown, shown.memory)
    if shown.held is not None:
        held = shown.held
        found["serving"] = {
            "weights_bytes": held.weights_bytes,
            "cache_bytes_per_sequence": held.cache_bytes,
            "sequences_per_device": held.sequences,
            "context": held.context,
        }
    return found


def _training(shown: EstimateView, memory: Memory) -> dict[str, Any]:
    params, trained_params = shown.params or (None, None)
    return {
        "params": params,
        "params_trained": trained_params,
        "peak": memory.peak.name,
        "moments": {
            moment.name: {**moment.bytes, "all": moment.total_bytes} for moment in memory.moments
        },
        "pipeline_stage": memory.stage,
        "sequences_per_device": memory.sequences,
        "host_bytes": memory.host_bytes,
    }
