"""An estimate on the terminal and as JSON: the moments of a step, the verdict, the bill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from ergmeter.flops.memory import KINDS
from ergmeter.records import Missing
from ergmeter.units import duration, scaled, significant
from ergmeter.views.documents import result

if TYPE_CHECKING:
    from ergmeter.flops.memory import Memory
    from ergmeter.records import Result


@dataclass(frozen=True)
class Shown:
    """What there is to show."""

    memory: Memory
    verdict: str
    results: dict[str, Result]
    checkpointing: dict[str, tuple[float, int | None]]  # peak, and the largest batch that fits
    chosen: str
    has_room: bool  # known, that is


def moments_table(memory: Memory) -> Table:
    """What a device holds at each moment; the largest is the peak."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("GB on a device")
    for moment in memory.moments:
        name = moment.name.replace(" through ", "\nthrough ")
        table.add_column(name, justify="right", style="bold" if moment is memory.peak else "")
    for kind in KINDS:
        if any(moment.bytes[kind] for moment in memory.moments):
            table.add_row(kind, *(_gb(moment.bytes[kind]) for moment in memory.moments))
    table.add_row("all", *(_gb(moment.total_bytes) for moment in memory.moments))
    return table


def _gb(value: float) -> str:
    if not value:
        return "-"
    return f"{value / 1e9:.2f}" if value >= 5e6 else "<0.01"


def checkpointing_table(shown: Shown) -> Table:
    """The peak with and without computing activations again."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("checkpointing")
    table.add_column("peak", justify="right")
    if shown.has_room:
        table.add_column("largest batch", justify="right")
    for name, (peak, largest) in shown.checkpointing.items():
        cells = [name, scaled(peak, "B")]
        if shown.has_room:
            cells.append("none" if largest is None else str(largest))
        table.add_row(*cells, style="bold" if name == shown.chosen else "")
    return table


def lines(shown: Shown) -> list[Text]:
    """The readings about time, energy, carbon and cost, then what was assumed."""
    said = []
    for key, one in shown.results.items():
        if key.startswith("estimate.memory_"):
            continue
        if isinstance(one, Missing):
            said.append(Text(f"{key}  - ({one.reason})", style="dim"))
            continue
        line = Text(f"{key}  ")
        line.append(_figure(one.value, one.unit), style="bold")
        line.append(f"  (estimate; {one.note})", style="dim")
        said.append(line)
    if shown.memory.host_bytes:
        held = scaled(shown.memory.host_bytes, "B")
        said.append(Text(f"and {held} of optimizer in memory that is paged to the host"))
    return said + [Text(f"assumed: {line}", style="dim") for line in shown.memory.assumptions]


def _figure(value: float, unit: str) -> str:
    if unit == "s":
        return duration(value)
    if unit in ("B", "g"):
        return scaled(value, unit)
    return f"{significant(value)} {unit}"


def document(shown: Shown) -> dict[str, Any]:
    """Everything, in base units."""
    memory = shown.memory
    return {
        "readings": {key: result(one) for key, one in shown.results.items()},
        "verdict": shown.verdict,
        "peak": memory.peak.name,
        "moments": {
            moment.name: {**moment.bytes, "all": moment.total_bytes} for moment in memory.moments
        },
        "pipeline_stage": memory.stage,
        "sequences_per_device": memory.sequences,
        "host_bytes": memory.host_bytes,
        "checkpointing": {
            name: {"peak_bytes": peak, "batch_size_max": largest}
            for name, (peak, largest) in shown.checkpointing.items()
        },
        "assumptions": list(memory.assumptions),
    }
