"""The document of `erg estimate`: memory, verdict, time and cost, assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ergmeter.flops.estimate.estimate import AS_ASKED, Room, Serving, Way, serving_results, verdict
from ergmeter.flops.estimate.memory import KINDS, Memory
from ergmeter.flops.work import Work
from ergmeter.records import Missing, Reading, Result
from ergmeter.units import duration, scaled, significant
from ergmeter.views.calculate.flops import readings_table
from ergmeter.views.document import (
    Document,
    HeadlinePart,
    Items,
    Paragraph,
    Part,
    Section,
    State,
    Table,
    TableColumn,
    columns_of,
)
from ergmeter.views.documents import result

# Shown in the tables, the verdict or the heading.
_MAIN_KEYS = ("estimate.memory_", "estimate.batch_size_max", "estimate.micro_batch_max")


def training_document(
    memory: Memory,
    room: Room | Missing,
    results: dict[str, Result],
    ways: Sequence[Way],
    work: Work,
) -> Document:
    """Return the estimate of a training: memory by moment, changes that help, time and cost."""
    data = {
        "params": work.params,
        "params_trained": work.params_trained,
        "peak": memory.peak.name,
        "moments": {
            moment.name: {**moment.bytes, "all": moment.total_bytes} for moment in memory.moments
        },
        "pipeline_stage": memory.stage,
        "sequences_per_device": memory.sequences,
        "host_bytes": memory.host_bytes,
    }
    verdict_line = verdict(memory.peak.total_bytes, room)
    parts = _parts(_moments_table(memory), verdict_line, ways, "micro-batch", results)
    if memory.host_bytes:
        on_host = scaled(memory.host_bytes, "B")
        parts.append(Paragraph(f"and {on_host} of optimizer in memory that is paged to the host"))
    parts.append(_assumed(memory.assumptions))
    body = _data(verdict_line, ways, "micro_batch_max", results, memory.assumptions)
    return Document("Training: an estimate", tuple(parts), body | data)


def serving_document(servings: dict[str, Serving], room: Room | Missing) -> Document:
    """Return the estimate of serving, as asked and with other types for weights and caches."""
    usable = None if isinstance(room, Missing) else room.usable_bytes
    asked = servings[AS_ASKED]
    ways = [
        Way(
            name,
            each.total_bytes,
            None if usable is None else each.sequences_max(usable),
            None if usable is None else each.total_bytes <= usable,
        )
        for name, each in servings.items()
        if each is asked or each.total_bytes < asked.total_bytes
    ]
    results = serving_results(asked, room)
    data = {
        "weights_bytes": asked.weights_bytes,
        "cache_bytes_per_sequence": asked.cache_bytes,
        "sequences_per_device": asked.sequences,
        "context": asked.context,
    }
    verdict_line = verdict(asked.total_bytes, room)
    parts = _parts(_serving_table(asked), verdict_line, ways, "sequences", results)
    parts.append(_assumed(asked.assumptions))
    body = _data(verdict_line, ways, "sequences_max", results, asked.assumptions)
    return Document("Serving: an estimate", tuple(parts), {**body, "serving": data})


def _parts(
    memory: Table, verdict_line: str, ways: Sequence[Way], counted: str, results: dict[str, Result]
) -> list[Part]:
    """Return the memory table, the verdict, changes that help, and the other results."""
    verdict_part = HeadlinePart(text=verdict_line, state=_STATES[ways[0].fits])
    parts: list[Part] = [memory, verdict_part, _ways_table(ways, counted)]
    others = {key: value for key, value in results.items() if not key.startswith(_MAIN_KEYS)}
    return [*parts, readings_table(others, _figure)] if others else parts


def _assumed(assumptions: Sequence[str]) -> Section:
    return Section("assumptions", "assumed", (Items(tuple(assumptions)),))


_STATES: dict[bool | None, State] = {True: "good", False: "bad", None: "unsure"}


def _moments_table(memory: Memory) -> Table:
    """Return memory at each moment of a step; the largest is the peak."""
    columns = (
        TableColumn(
            moment.name.replace(" through ", "\nthrough ").replace("through model.", "through "),
            "number",
            "strong" if moment is memory.peak else "",
        )
        for moment in memory.moments
    )
    rows = [
        (kind, *(_gb(moment.bytes[kind]) for moment in memory.moments))
        for kind in KINDS
        if any(moment.bytes[kind] for moment in memory.moments)
    ]
    rows.append(("all", *(_gb(moment.total_bytes) for moment in memory.moments)))
    return Table((_MEMORY, *columns), tuple(rows))


_MEMORY = "GB on a device"


def _serving_table(serving: Serving) -> Table:
    cached = f"cache of {serving.sequences} x {serving.context} tokens"
    rows = (
        ("weights", _gb(serving.weights_bytes)),
        (cached, _gb(serving.sequences * serving.cache_bytes)),
        ("all", _gb(serving.total_bytes)),
    )
    return Table(columns_of(_MEMORY, "to serve"), rows)


def _gb(value: float) -> str:
    if not value:
        return "-"
    return f"{value / 1e9:.2f}" if value >= 5e6 else "<0.01"


def _ways_table(ways: Sequence[Way], counted: str) -> Table:
    """Return the peak as asked and with each change, and what fits."""
    has_room = ways[0].fits is not None
    columns = columns_of("with", "peak")
    room_columns = columns_of("fit", f"{counted}\nthat fits")
    rows = (
        (
            way.name,
            scaled(way.peak_bytes, "B"),
            *(("fits" if way.fits else "too much", _most(way)) if has_room else ()),
        )
        for way in ways
    )
    asked = (number for number, way in enumerate(ways) if way.name == AS_ASKED)
    return Table(
        (*columns, *(room_columns if has_room else ())), tuple(rows), strong_rows=frozenset(asked)
    )


def _most(way: Way) -> str:
    """Format the largest batch; "-" if nothing is cached, so that memory sets no limit."""
    if way.most is None:
        return "-" if way.fits else "none"
    return f"{way.most}"


def _figure(reading: Reading) -> str:
    value, unit = reading.value, reading.unit
    if unit == "s":
        return duration(value)
    if unit in ("B", "g"):
        return scaled(value, unit)
    return f"{significant(value)} {unit}"


def _data(
    verdict_line: str,
    ways: Sequence[Way],
    counted: str,
    results: dict[str, Result],
    assumptions: Sequence[str],
) -> dict[str, Any]:
    """Return the estimate as JSON, in base units. `counted`: the key of each way's largest fit."""
    return {
        "readings": {key: result(reading) for key, reading in results.items()},
        "verdict": verdict_line,
        "fits": ways[0].fits,
        "ways": [
            {"with": way.name, "peak_bytes": way.peak_bytes, "fits": way.fits, counted: way.most}
            for way in ways
        ],
        "assumptions": list(assumptions),
    }
