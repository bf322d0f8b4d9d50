"""Which GPUs did a run use? Used, unused, or unknown; and what counts.

A program that computes on the CPU is not billed for the idle GPU beside it, and one that uses a GPU
of eight not for the other seven. The probe marks what it saw (`probes.usage` has the rule), a
framework's allocator that holds memory on a GPU is proof that it is used, and `--devices` overrides
both. A GPU whose use is unknown counts, and what it drew is then "derived".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from ergmeter.records import Device
    from ergmeter.runlog.format import WriterLog
    from ergmeter.runlog.reader import Run

ALL, NONE = "all", "none"  # of `--devices`
_AS_GIVEN = "by --devices"
_NOBODY = "no process of the run was on it"

State: TypeAlias = Literal["used", "unused", "unknown", ""]  # "": nobody looked
# What several writers saw of one GPU: the first of these that one of them saw.
_ORDER: tuple[State, ...] = ("used", "unknown", "", "unused")
_MARKS: dict[str, State] = {f"device_{state}": state for state in _ORDER if state}


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Whether the run used a GPU, and how that is known."""

    state: State
    why: str = ""

    @property
    def counts(self) -> bool:
        """Whether its energy and its peak are the run's."""
        return self.state != "unused"


def gpu_use(run: Run, devices: str | None = None) -> dict[str, GpuUse]:
    """By the id of each GPU of a run. `devices` is what `--devices` was given.

    Where a writer recognised the program on one of its GPUs and said nothing of another, as
    recordings of version 0.1.0 do, the other is unused.
    """
    gpus = {one.id: one for one in run.devices.values() if one.kind == "gpu"}
    if devices is not None:
        chosen = _chosen(list(gpus.values()), devices)
        return {id_: GpuUse("used" if id_ in chosen else "unused", _AS_GIVEN) for id_ in gpus}
    marked = [_marked(writer) for writer in run.writers]
    used = {id_ for own in marked for id_, one in own.items() if one.state == "used"}
    seen: dict[str, list[GpuUse]] = {id_: [] for id_ in gpus}
    for writer, own in zip(run.writers, marked, strict=True):
        ids = [one.id for one in writer.devices if one.id in gpus]
        unmarked = GpuUse("unused", _NOBODY) if used.intersection(ids) else GpuUse("")
        for id_ in ids:
            seen[id_].append(own.get(id_, unmarked))
    found = {id_: _together(every) for id_, every in seen.items()}
    if any(one.state in ("unused", "unknown") for one in found.values()):
        held = _holding_memory(run) & found.keys()
        found |= dict.fromkeys(held, GpuUse("used", "the framework's allocator holds memory on it"))
    return found


def _marked(writer: WriterLog) -> dict[str, GpuUse]:
    """What a writer marked last of each GPU; once used, always used."""
    found: dict[str, GpuUse] = {}
    for mark in writer.marks:
        id_, _, why = mark.detail.partition(" ")
        before = found.get(id_, GpuUse(""))
        if mark.name in _MARKS and before.state != "used":
            found[id_] = GpuUse(_MARKS[mark.name], why)
    return found


def _together(seen: list[GpuUse]) -> GpuUse:
    by_state = {one.state: one for one in reversed(seen)}
    return next(by_state[state] for state in _ORDER if state in by_state)


def _holding_memory(run: Run) -> set[str]:
    """The GPUs on which a framework's allocator has memory."""
    books = {d.id: str(d.facts.get("uuid")) for d in run.devices.values() if d.kind == "allocator"}
    return {books[id_] for id_ in run.series("reserved_bytes") if id_ in books} if books else set()


def _chosen(gpus: list[Device], devices: str) -> set[str]:
    if devices in (ALL, NONE):
        return {one.id for one in gpus} if devices == ALL else set()
    chosen: set[str] = set()
    for word in devices.split(","):
        named = [one.id for one in gpus if _is_called(one, word.strip())]
        if not named:
            there = ", ".join(f"{one.facts.get('index', '?')} ({one.id})" for one in gpus) or "none"
            raise UsageError(f"--devices {devices}: no GPU {word.strip()!r}; there are: {there}")
        chosen.update(named)
    return chosen


def _is_called(gpu: Device, word: str) -> bool:
    if word.isdecimal():
        return gpu.facts.get("index") == int(word)
    return bool(word) and gpu.id.startswith(word)


def named(gpus: list[Device]) -> str:
    """GPUs by name and id."""
    return ", ".join(f"{one.name} [{one.id}]" for one in gpus)
