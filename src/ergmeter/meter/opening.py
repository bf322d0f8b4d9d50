"""How a Meter gets its run: which probes are opened, which run is made or joined, who writes in it.

The trap: half a beginning. A run that can't be written leaves no directory behind, and no probe
open; one that can't be joined is no reason to measure nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.errors import UsageError
from ergmeter.meter.handover import HandOver, own_id
from ergmeter.ports import ProbeRequest
from ergmeter.records import Device, Flops
from ergmeter.runlog import format as fmt
from ergmeter.runlog.identity import launched_group, new_run_path, run_header, writer_header
from ergmeter.runlog.writer import Writer, create_or_join
from ergmeter.sampler import DEFAULT_PROBES, Opened, Sampler, open_probes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ergmeter.meter.progress import Budget
    from ergmeter.runlog.settings import Settings


@dataclass(frozen=True, slots=True)
class Around:
    """Another program to measure, into a run that was made for it already. See `Meter.watch`."""

    run: Path
    environment: dict[str, str]
    # CPU seconds of the processes that do nothing but measure; left out, our threads' are counted.
    cost_s: Callable[[], float] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a Meter was asked to measure, and where to. Each way to begin gives a `HandOver`."""

    name: str
    settings: Settings
    out: Path | None
    probes: tuple[str, ...] | None  # None: those that suit the place
    probe_options: Mapping[str, Mapping[str, Any]]
    rank: int | None
    budget: Budget | None
    flops: tuple[Flops, ...]  # of a step, under each convention, the chosen one first
    no_flops: str  # why there are none, where they were asked for
    around: Around | None

    def begun(self, *, only_joins: bool = False) -> HandOver:
        """A share of the run that this process belongs to, or of a run of its own."""
        if self.around is not None:
            names = [name for name in self._wanted if name != "process"]
            return self._share(self.around.run, self._opened(names, path=self.around.run))
        named = os.environ.get(fmt.RUN_VARIABLE) if self.out is None else None
        if not named:
            return self._own()
        try:
            return self._joined(Path(named))
        except OSError as error:
            said = f"the run that {fmt.RUN_VARIABLE} names, {named}, can't be joined ({why(error)})"
            if only_joins:  # nobody asked for a run
                raise UsageError(said) from error
            say(f"{said}; making a run of its own")
            return self._own()

    def forked(self, run: Path) -> HandOver:
        """The share of a forked process. Its parent reads the probes already."""
        return self._share(run, Opened())

    def watched(self, run: Path, pid: int) -> Opened:
        """What reads the program that is measured from outside, if that was asked for."""
        names = ["process"] if "process" in self._wanted else []
        return self._opened(names, path=run, pid=pid)

    def facts(self) -> dict[str, Any]:
        """What the head of a share says of the model and of what was declared."""
        said: dict[str, Any] = {"settings": self.settings.as_json()}
        if self.flops:
            said["flops"] = [asdict(flops) for flops in self.flops]
        if self.no_flops:
            said["no_flops"] = self.no_flops
        return said

    @property
    def _wanted(self) -> tuple[str, ...]:
        return DEFAULT_PROBES if self.probes is None else self.probes

    def _opened(self, names: Iterable[str], *, path: Path, pid: int | None = None) -> Opened:
        opened = Opened()
        for name in names:
            request = ProbeRequest(
                pid=pid
                or os.getpid(),  # whose descendants the program's processes are, in any case
                path=str(path),
                environment=self.around.environment if self.around else dict(os.environ),
                options=dict(self.probe_options.get(name, {})),
            )
            one = open_probes(request, [name])
            opened.probes += one.probes
            opened.unavailable |= one.unavailable
        return opened

    def _joined(self, run: Path) -> HandOver:
        """Join the run of the recorder around this program."""
        # It samples the devices already; a second reader adds only cost.
        names = ("allocator",) if self.probes is None else self.probes
        (run / fmt.RUN_FILE).stat()
        return self._share(run, self._opened(names, path=run))

    def _own(self) -> HandOver:
        names = _own_probes() if self.probes is None else self.probes
        opened = self._opened(names, path=Path.cwd())
        group = launched_group()
        path = self.out or new_run_path(self.name, group=group)
        is_made = False
        try:
            create_or_join(path, run_header(self.name, sys.argv, group=group))
            is_made = group is None
            return self._share(path, opened)
        except OSError as error:
            if is_made:
                shutil.rmtree(path, ignore_errors=True)
            raise UsageError(
                f"the run {path} can't be written ({why(error)}); choose another directory"
            ) from error

    def _share(self, run: Path, opened: Opened) -> HandOver:
        """A writer in this run, with what it needs to know at its head."""
        source, stream = ("recorder", "output") if self.around else ("meter", "")
        header = writer_header(source)
        header.update(self.facts())
        header["unavailable"] = opened.unavailable
        header["probes"] = {probe.name: {"period_s": probe.period_s} for probe in opened.probes}
        if self.budget is not None:
            header["budget"] = {self.budget.unit: self.budget.total}
        cost_s = self.around.cost_s if self.around else None
        devices = [_own_device(header["writer"], whole_processes=cost_s is not None)]
        devices += [device for probe in opened.probes for device in probe.devices]
        try:
            writer = Writer(run, header=header, devices=devices)
        except OSError:
            for probe in opened.probes:
                probe.close()
            raise
        sampler = Sampler(opened.probes)
        return HandOver(writer, sampler, stream=stream, rank=self.rank, cost_s=cost_s)


def _own_device(writer: str, *, whole_processes: bool) -> Device:
    """What this writer's own cost is written under: its own, or that of two would become one."""
    what = "processes" if whole_processes else "threads"
    return Device(own_id(writer), "self", f"ergmeter's own {what}", "self", {"counted": what})


def _own_probes() -> tuple[str, ...]:
    """What to sample from inside a program: on each node one rank reads the devices for all."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return (*DEFAULT_PROBES, "allocator")
    return ("process", "allocator")


def say(text: str) -> None:
    """Tell the user what there is no run to tell it in."""
    sys.stderr.write(f"ergmeter: {text}\n")


def why(error: OSError) -> str:
    """What the system said, and of which file."""
    parts = (error.filename, error.strerror or error)
    return ": ".join(str(part) for part in parts if part)
