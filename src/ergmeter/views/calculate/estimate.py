"""An estimate on the terminal and as JSON: memory, verdict, time and cost.

The layout fits 80 columns. Metrics absent for one reason share one line; assumptions have their
own block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from ergmeter.flops.estimate.estimate import AS_ASKED, Room, Serving, Way, serving_results, verdict
from ergmeter.flops.estimate.memory import KINDS, Memory
from ergmeter.records import Missing, Result
from ergmeter.units import duration, scaled, significant
from ergmeter.views.documents import result

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ergmeter.flops.work import Work

# Shown in the tables, the verdict or the heading.
_MAIN_KEYS = ("estimate.memory_", "estimate.batch_size_max", "estimate.micro_batch_max")


@dataclass(frozen=True)
class EstimateView:
    """An estimate ready to be shown."""

    verdict: str
    results: dict[str, Result]
    assumptions: tuple[str, ...]
    memory: Memory | None = None  # of a training
    ways: tuple[Way, ...] = ()
    params: tuple[int, int] | None = None  # total and trained parameters
    serving: Serving | None = None  # of serving
    fits: bool | None = None


def training_estimate(
    memory: Memory,
    room: Room | Missing,
    results: dict[str, Result],
    ways: list[Way],
    work: Work,
) -> EstimateView:
    """Estimate a training."""
    return EstimateView(
        verdict(memory.peak.total_bytes, room),
        results,
        memory.assumptions,
        memory,
        tuple(ways),
        (work.params, work.params_trained),
        fits=ways[0].fits,
    )


def serving_estimate(servings: dict[str, Serving], room: Room | Missing) -> EstimateView:
    """Estimate serving, as asked and with other types for weights and caches."""
    usable = None if isinstance(room, Missing) else room.usable_bytes
    asked = servings[AS_ASKED]
    changes = [
        Way(
            name,
            each.total_bytes,
            None if usable is None else each.sequences_max(usable),
            None if usable is None else each.total_bytes <= usable,
        )
        for name, each in servings.items()
        if each is asked or each.total_bytes < asked.total_bytes
    ]
    return EstimateView(
        verdict(asked.total_bytes, room),
        serving_results(asked, room),
        asked.assumptions,
        ways=tuple(changes),
        serving=asked,
        fits=changes[0].fits,
    )


def parts(estimate_view: EstimateView) -> list[RenderableType]:
    """Return all blocks from top to bottom."""
    blocks: list[RenderableType] = []
    if estimate_view.memory is not None:
        blocks.append(moments_table(estimate_view.memory))
    elif estimate_view.serving is not None:
        blocks.append(_serving_table(estimate_view.serving))
    blocks.append(Text(estimate_view.verdict, style="bold"))
    if estimate_view.ways:
        blocks.append(ways_table(estimate_view))
    blocks.extend(lines(estimate_view))
    blocks.append(_assumed(estimate_view.assumptions))
    return blocks


def moments_table(memory: Memory) -> Table:
    """Tabulate memory at each moment of a step; the largest is the peak."""
    table = _memory_table()
    for moment in memory.moments:
        name = moment.name.replace(" through ", "\nthrough ").replace("through model.", "through ")
        table.add_column(name, justify="right", style="bold" if moment is memory.peak else "")
    for kind in KINDS:
        if any(moment.bytes[kind] for moment in memory.moments):
            table.add_row(kind, *(_gb(moment.bytes[kind]) for moment in memory.moments))
    table.add_row("all", *(_gb(moment.total_bytes) for moment in memory.moments))
    return table


def _memory_table() -> Table:
    return Table("GB on a device", box=box.SIMPLE, pad_edge=False)


def _serving_table(serving: Serving) -> Table:
    table = _memory_table()
    table.add_column("to serve", justify="right")
    cached = f"cache of {serving.sequences} x {serving.context} tokens"
    table.add_row("weights", _gb(serving.weights_bytes))
    table.add_row(cached, _gb(serving.sequences * serving.cache_bytes))
    table.add_row("all", _gb(serving.total_bytes))
    return table


def _gb(value: float) -> str:
    if not value:
        return "-"
    return f"{value / 1e9:.2f}" if value >= 5e6 else "<0.01"


def ways_table(estimate_view: EstimateView) -> Table:
    """Tabulate the peak as asked and with each change, and what fits."""
    has_room = estimate_view.fits is not None
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("with", overflow="fold")
    table.add_column("peak", justify="right", no_wrap=True)
    if has_room:
        table.add_column("", no_wrap=True)
        counted = "micro-batch" if estimate_view.serving is None else "sequences"
        table.add_column(f"{counted}\nthat fits", justify="right")
    for way in estimate_view.ways:
        cells = [way.name, scaled(way.peak_bytes, "B")]
        if has_room:
            cells += ["fits" if way.fits else "too much", _most(way)]
        table.add_row(*cells, style="bold" if way.name == AS_ASKED else "")
    return table


def _most(way: Way) -> str:
    """Format the largest batch; "-" if nothing is cached, so that memory sets no limit."""
    if way.most is None:
        return "-" if way.fits else "none"
    return f"{way.most}"


def lines(estimate_view: EstimateView) -> list[Text]:
    """Return time, energy, carbon and cost; absent metrics grouped by reason."""
    texts, absent = [], dict[str, list[str]]()
    for key, reading in estimate_view.results.items():
        if key.startswith(_MAIN_KEYS):
            continue
        if isinstance(reading, Missing):
            absent.setdefault(reading.reason, []).append(key.removeprefix("estimate."))
            continue
        line = Text(f"{key}  ")
        line.append(_figure(reading.value, reading.unit), style="bold")
        line.append(f"  (estimate; {reading.note})", style="dim")
        texts.append(line)
    texts += [
        Text(f"{', '.join(names)}: - ({reason})", style="dim") for reason, names in absent.items()
    ]
    if estimate_view.memory is not None and estimate_view.memory.host_bytes:
        on_host = scaled(estimate_view.memory.host_bytes, "B")
        texts.append(Text(f"and {on_host} of optimizer in memory that is paged to the host"))
    return texts


def _assumed(assumptions: tuple[str, ...]) -> Table:
    """Return the block of assumptions, one a line, continued with an indent."""
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


def document(estimate_view: EstimateView) -> dict[str, Any]:
    """Return the estimate as JSON, in base units."""
    counted = "micro_batch_max" if estimate_view.serving is None else "sequences_max"
    body: dict[str, Any] = {
        "readings": {key: result(reading) for key, reading in estimate_view.results.items()},
        "verdict": estimate_view.verdict,
        "fits": estimate_view.fits,
        "ways": [
            {"with": way.name, "peak_bytes": way.peak_bytes, "fits": way.fits, counted: way.most}
            for way in estimate_view.ways
        ],
        "assumptions": list(estimate_view.assumptions),
    }
    if estimate_view.memory is not None:
        body |= _training(estimate_view, estimate_view.memory)
    if estimate_view.serving is not None:
        serving = estimate_view.serving
        body["serving"] = {
            "weights_bytes": serving.weights_bytes,
            "cache_bytes_per_sequence": serving.cache_bytes,
            "sequences_per_device": serving.sequences,
            "context": serving.context,
        }
    return body


def _training(estimate_view: EstimateView, memory: Memory) -> dict[str, Any]:
    params, trained_params = estimate_view.params or (None, None)
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
