"""Which GPUs a run used, and the facts of its hardware that comparisons need.

Energy of GPUs that the program does not use is not the run's: of an idle GPU beside a CPU program,
or of seven of eight GPUs. The probe records use in marks (`probes.usage` has the rule). Memory that
a framework's allocator holds on a GPU proves its use. `--devices` overrides both. A GPU whose use
is unknown counts, and the energy's basis is then "derived".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ergmeter.errors import UsageError
from ergmeter.records import Device
from ergmeter.runlog.format import WriterLog
from ergmeter.runlog.reader import Run

ALL, NONE = "all", "none"  # of `--devices`
_AS_GIVEN = "by --devices"
_NOBODY = "no process of the run used it"

State: TypeAlias = Literal["used", "unused", "unknown", ""]  # "": not probed
# If writers disagree on a GPU, the first of these states that any of them recorded.
_ORDER: tuple[State, ...] = ("used", "unknown", "", "unused")
_MARKS: dict[str, State] = {f"device_{state}": state for state in _ORDER if state}


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Whether the run used a GPU, and the evidence for it."""

    state: State
    why: str = ""

    @property
    def counts(self) -> bool:
        """True if the GPU's energy and peak count as the run's."""
        return self.state != "unused"


def gpu_use(run: Run, devices: str | None = None) -> dict[str, GpuUse]:
    """The use of each GPU of a run, by id. `devices` is the value of `--devices`.

    If a writer marked one of its GPUs as used and has no mark on another, as in recordings of
    version 0.1.0, the other is unused.
    """
    gpus = {device.id: device for device in run.devices.values() if device.kind == "gpu"}
    if devices is not None:
        chosen = _chosen(list(gpus.values()), devices)
        return {id_: GpuUse("used" if id_ in chosen else "unused", _AS_GIVEN) for id_ in gpus}
    marked = [_marked(writer) for writer in run.writers]
    used = {id_ for own in marked for id_, use in own.items() if use.state == "used"}
    by_writer: dict[str, list[GpuUse]] = {id_: [] for id_ in gpus}
    for writer, own in zip(run.writers, marked, strict=True):
        ids = [device.id for device in writer.devices if device.id in gpus]
        unmarked = GpuUse("unused", _NOBODY) if used.intersection(ids) else GpuUse("")
        for id_ in ids:
            by_writer[id_].append(own.get(id_, unmarked))
    uses = {id_: _together(every) for id_, every in by_writer.items()}
    if any(use.state in ("unused", "unknown") for use in uses.values()):
        in_allocator = _holding_memory(run) & uses.keys()
        uses |= dict.fromkeys(
            in_allocator, GpuUse("used", "the framework's allocator holds memory on it")
        )
    return uses


def _marked(writer: WriterLog) -> dict[str, GpuUse]:
    """The last state that a writer recorded for each GPU; "used" is final."""
    uses: dict[str, GpuUse] = {}
    for mark in writer.marks:
        id_, _, why = mark.detail.partition(" ")
        before = uses.get(id_, GpuUse(""))
        if mark.name in _MARKS and before.state != "used":
            uses[id_] = GpuUse(_MARKS[mark.name], why)
    return uses


def _together(uses: list[GpuUse]) -> GpuUse:
    by_state = {use.state: use for use in reversed(uses)}
    return next(by_state[state] for state in _ORDER if state in by_state)


def _holding_memory(run: Run) -> set[str]:
    """The GPUs on which a framework's allocator has memory."""
    books = {d.id: str(d.facts.get("uuid")) for d in run.devices.values() if d.kind == "allocator"}
    return {books[id_] for id_ in run.series("reserved_bytes") if id_ in books} if books else set()


def _chosen(gpus: list[Device], devices: str) -> set[str]:
    if devices in (ALL, NONE):
        return {gpu.id for gpu in gpus} if devices == ALL else set()
    chosen: set[str] = set()
    for word in devices.split(","):
        named = [gpu.id for gpu in gpus if _is_called(gpu, word.strip())]
        if not named:
            there = ", ".join(f"{gpu.facts.get('index', '?')} ({gpu.id})" for gpu in gpus) or "none"
            raise UsageError(f"--devices {devices}: no GPU {word.strip()!r}; there are: {there}")
        chosen.update(named)
    return chosen


def _is_called(gpu: Device, word: str) -> bool:
    if word.isdecimal():
        return gpu.facts.get("index") == int(word)
    return bool(word) and gpu.id.startswith(word)


def gpu_names(gpus: list[Device]) -> str:
    """GPUs by name and id."""
    return ", ".join(f"{gpu.name} [{gpu.id}]" for gpu in gpus)


# Hardware facts. A run without a GPU is named by its processor, since every CPU is called "cpu".


def board_facts(run: Run) -> dict[str, str | float]:
    """Device, driver, power limit and temperatures, if known; keys as in an energy ledger."""
    gpus = [run.devices[id_] for id_, use in gpu_use(run).items() if use.counts]
    facts: dict[str, str | float] = {}
    names = sorted({gpu.name for gpu in gpus} or _processors(run))
    if names:
        facts["device"] = " + ".join(names)
    drivers = sorted({str(driver) for gpu in gpus if (driver := gpu.facts.get("driver"))})
    if len(drivers) == 1:
        facts["driver"] = drivers[0]
    limits = {float(limit) for gpu in gpus if (limit := gpu.facts.get("power_limit_w"))}
    if len(limits) == 1:
        facts["power_limit_W"] = limits.pop()
    return {**facts, **_temperatures(run, {gpu.id for gpu in gpus})}


def _processors(run: Run) -> set[str]:
    """Processor names with their cores, such as "AMD EPYC, 2 cores"."""
    nodes = [device.facts for device in run.devices.values() if device.kind == "node"]
    named = {
        f"{facts['cpu_model']}, {facts['cores']} cores" for facts in nodes if facts.get("cpu_model")
    }
    return named or {device.name for device in run.devices.values() if device.kind == "cpu"}


def _temperatures(run: Run, gpus: set[str]) -> dict[str, float]:
    """The temperature of the hottest GPU at the first and at the last reading."""
    series = run.series("temperature_c")
    readings = [column.values for device, column in series.items() if device in gpus]
    edges = {"temperature_start_C": 0, "temperature_end_C": -1}
    read = [values for values in readings if len(values)]
    return {name: max(float(v[at]) for v in read) for name, at in edges.items() if read}
