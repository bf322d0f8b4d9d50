"""The document of `erg estimate`: memory, verdict, time and cost, assumptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ergmeter.flops.estimate.estimate import AS_ASKED, Room, Serving, Way, serving_results, verdict
from ergmeter.flops.estimate.memory import KINDS, Memory
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

if TYPE_CHECKING:
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


def document(estimate_view: EstimateView) -> Document:
    """Return memory, verdict, changes that help, time and cost, and the assumptions."""
    parts: list[Part] = []
    if estimate_view.memory is not None:
        parts.append(_moments_table(estimate_view.memory))
    elif estimate_view.serving is not None:
        parts.append(_serving_table(estimate_view.serving))
    state = _STATES[estimate_view.fits]
    parts.append(HeadlinePart(text=estimate_view.verdict, state=state))
    if estimate_view.ways:
        parts.append(_ways_table(estimate_view))
    results = {
        key: reading
        for key, reading in estimate_view.results.items()
        if not key.startswith(_MAIN_KEYS)
    }
    if results:
        parts.append(readings_table(results, _figure))
    if estimate_view.memory is not None and estimate_view.memory.host_bytes:
        on_host = scaled(estimate_view.memory.host_bytes, "B")
        parts.append(Paragraph(f"and {on_host} of optimizer in memory that is paged to the host"))
    parts.append(Section("assumptions", "assumed", (Items(estimate_view.assumptions),)))
    what = "Serving" if estimate_view.memory is None else "Training"
    return Document(f"{what}: an estimate", tuple(parts), _data(estimate_view))


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


def _ways_table(estimate_view: EstimateView) -> Table:
    """Return the peak as asked and with each change, and what fits."""
    has_room = estimate_view.fits is not None
    counted = "micro-batch" if estimate_view.serving is None else "sequences"
    columns = columns_of("with", "peak")
    room_columns = columns_of("fit", f"{counted}\nthat fits")
    rows = (
        (
            way.name,
            scaled(way.peak_bytes, "B"),
            *(("fits" if way.fits else "too much", _most(way)) if has_room else ()),
        )
        for way in estimate_view.ways
    )
    asked = (number for number, way in enumerate(estimate_view.ways) if way.name == AS_ASKED)
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


def _data(estimate_view: EstimateView) -> dict[str, Any]:
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
