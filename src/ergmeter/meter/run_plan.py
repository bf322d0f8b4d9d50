"""Makes or joins the run of a Meter: its probes, its directory, its writer.

A run that can't be written leaves no directory behind and no probe open. If a run can't be joined,
a new one is made.

One rank of a node reads the devices (`DeviceClaim`); the others record their steps and stand by. If
it ends, is killed or its probe fails, another takes over within a second. Energy counters lose
nothing meanwhile.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
import sys
import threading
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ergmeter import registry
from ergmeter.errors import UsageError
from ergmeter.meter.handover import HandOver, own_id
from ergmeter.ports import ProbeRequest
from ergmeter.records import Device, Flops
from ergmeter.runlog import format as fmt
from ergmeter.runlog.identity import launched_group, new_run_path, run_header, writer_header
from ergmeter.runlog.process_group import launcher_world_size, world_size
from ergmeter.runlog.settings import ParallelLayout, Settings
from ergmeter.runlog.writer import Writer, create_or_join
from ergmeter.sampler import Opened, Sampler, default_probes, open_probes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ergmeter.meter.alert_watch import AlertPlan


# Device claims: one process of a node reads a device for all. A rule such as "local rank 0 reads"
# fails if that rank is killed, ends early or sees only its own GPU. So the first process that
# asks gets the claim, and the kernel frees it when the process dies. A claim is an abstract
# socket that never listens: no file, no NFS lock, nothing to clean up after `kill -9`. Without
# abstract sockets, or across network namespaces, each process reads for itself; nothing is
# counted twice.


_claims: weakref.WeakSet[DeviceClaim] = weakref.WeakSet()


class DeviceClaim:
    """A claim that one process of this node holds at a time."""

    def __init__(self, *what: str) -> None:
        word = hashlib.sha256("|".join(what).encode()).hexdigest()[:32]
        self._address = f"\0ergmeter-{word}"
        self._socket: socket.socket | None = None

    def take(self) -> bool:
        """Try to take the claim. True if this process has it, or if claims don't work here."""
        if self._socket is not None or sys.platform != "linux":
            return True
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            ours.bind(self._address)
        except OSError as error:
            ours.close()
            return error.errno != errno.EADDRINUSE
        self._socket = ours
        _claims.add(self)
        return True

    def release(self) -> None:
        """Frees the claim for another process."""
        ours, self._socket = self._socket, None
        if ours is not None:
            ours.close()


def _in_child() -> None:
    """Release the claims in a forked child: its copy of a socket would outlive the parent's."""
    for claim in tuple(_claims):
        claim.release()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_in_child)


# Progress towards a budget in steps, tokens or FLOPs. A budget is this rank's: asking other ranks
# would need a collective, which delays training. Multiplying by WORLD_SIZE would count the tokens
# of tensor- and pipeline-parallel ranks several times.


@dataclass(frozen=True, slots=True)
class Budget:
    """A goal of this rank (one of steps, tokens, flops), and limits of the run (kwh, cost, hours).

    If ranks have data of their own, give each its share: `tokens=total // world_size`. The limits
    (`cost` in the currency of the prices) are for all that this process measures. Exceeding one is
    an alert: `Meter(stop_on="budget")` stops for it.
    """

    steps: int | None = None
    tokens: int | None = None
    flops: float | None = None
    kwh: float | None = None
    cost: float | None = None
    hours: float | None = None

    def __post_init__(self) -> None:
        goals = self.as_json()
        limits = [value for value in (self.kwh, self.cost, self.hours) if value is not None]
        amounts = [*goals.values(), *limits]
        if len(goals) > 1 or not amounts or not all(amount > 0 for amount in amounts):
            raise UsageError(
                "a budget is at most one of steps, tokens and flops, and any of kwh, cost and"
                f" hours, all above 0; got {self!r}"
            )

    def as_json(self) -> dict[str, float]:
        """The goal by its unit, for the writer's header, which has the limits as alert rules."""
        goals = {"steps": self.steps, "tokens": self.tokens, "FLOPs": self.flops}
        return {unit: float(total) for unit, total in goals.items() if total is not None}

    @property
    def has_goal(self) -> bool:
        """True if the budget has a goal."""
        return bool(self.as_json())

    @property
    def unit(self) -> str:
        """The unit of the goal."""
        return next(iter(self.as_json()), "FLOPs")

    @property
    def total(self) -> float:
        """The goal's amount."""
        return sum(self.as_json().values())

    @property
    def rules(self) -> tuple[str, ...]:
        """The limits, as alert rules."""
        limits = (("energy", self.kwh, " kWh"), ("cost", self.cost, ""), ("time", self.hours, " h"))
        return tuple(f"{what} > {much:g}{unit}" for what, much, unit in limits if much is not None)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of this rank. `eta_s` is None until there is a rate."""

    done: float  # by this rank, as is the total
    total: float
    unit: str
    eta_s: float | None

    @property
    def done_frac(self) -> float:
        """The share that is done; above 1 when the budget was exceeded."""
        return self.done / self.total


_LAUNCHES = 1000  # of one name on one day
_Value = TypeVar("_Value")


def listed(option: str, values: Iterable[_Value]) -> tuple[_Value, ...]:
    """The values of an option that takes a list. UsageError for a single text."""
    if isinstance(values, str):
        raise UsageError(f"{option} is a list; got {values!r}: give {option}=[{values!r}]")
    return tuple(values)


def probe_names(asked: Iterable[str] | None) -> tuple[str, ...] | None:
    """The names of the requested probes. UsageError for an unknown name, which would otherwise be
    recorded as a probe that is not available here."""
    if asked is None:
        return None
    names = listed("probes", asked)
    for name in names:
        registry.check_name("probes", "probe", name)
    return names


@dataclass(frozen=True, slots=True)
class Around:
    """Another program to measure, into a run that was made for it already. See `Meter.watch`."""

    run: Path
    environment: dict[str, str]
    # CPU seconds of the processes that do nothing but measure; left out, our threads' are counted.
    cost_s: Callable[[], float] | None = None


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan of a Meter's run: probes, settings, path. Each way to begin makes a `HandOver`."""

    name: str
    settings: Settings
    out: Path | None
    probes: tuple[str, ...] | None  # None: the defaults of the place
    probe_options: Mapping[str, Mapping[str, Any]]
    rank: int | None
    budget: Budget | None
    flops: tuple[Flops, ...]  # of a step, under each convention, the chosen one first
    no_flops: str  # why there are none, where they were asked for
    around: Around | None
    alerts: AlertPlan | None = None

    def begun(self, *, only_joins: bool = False) -> HandOver:
        """Join the run that this process belongs to, or make a run of its own."""
        if self.around is not None:
            names = [name for name in self._wanted if name != "process"]
            return self._share(self.around.run, self._opened(names, path=self.around.run))
        named = os.environ.get(fmt.RUN_VARIABLE) if self.out is None else None
        if not named:
            if only_joins and self.out is None:  # of a Trainer that a cell made which is over
                raise UsageError("there is no run to join")
            return self._own()
        try:
            return self._joined(Path(named))
        except OSError as error:
            run = f"the run that {fmt.RUN_VARIABLE} names, {named},"
            message = f"{run} can't be joined ({os_error_text(error)})"
            if only_joins:  # the user asked for no run
                raise UsageError(message) from error
            print_notice(f"{message}; making a run of its own")
            return self._own()

    def forked(self, run: Path) -> HandOver:
        """Join `run` from a forked process. Its parent reads the probes already."""
        return self._share(run, Opened())

    def watched(self, run: Path, pid: int) -> Opened:
        """The probes that read another program from outside, if requested."""
        names = ["process"] if "process" in self._wanted else []
        return self._opened(names, path=run, pid=pid)

    def facts(self) -> dict[str, Any]:
        """The model and the declared settings, for the writer's header."""
        header: dict[str, Any] = {"settings": self.settings.as_json()}
        if self.flops:
            header["flops"] = [asdict(flops) for flops in self.flops]
        if self.no_flops:
            header["no_flops"] = self.no_flops
        return header

    @property
    def _wanted(self) -> tuple[str, ...]:
        return default_probes() if self.probes is None else self.probes

    def _opened(
        self,
        names: Iterable[str],
        *,
        path: Path,
        pid: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Opened:
        around = self.around.environment if self.around else os.environ
        # Without a pid our own, whose descendants the program's processes are in any case.
        request = ProbeRequest(pid or os.getpid(), str(path), dict(environment or around))
        return open_probes(request, names, options=self.probe_options)

    def _joined(self, run: Path) -> HandOver:
        """Join the run of the `erg record` around this program."""
        # It samples the devices already; a second reader adds only cost.
        names = ("allocator",) if self.probes is None else self.probes
        (run / fmt.RUN_FILE).stat()
        return self._share(run, self._opened(names, path=run))

    def _own(self) -> HandOver:
        group = launched_group()
        self._check_layout()
        path = self.out or new_run_path(self.name, group=group)
        is_made = False
        try:
            path = self._made(path, run_header(self.name, sys.argv, group=group))
            is_made = group is None
            names = (*default_probes(), "allocator") if self.probes is None else self.probes
            if group is None:
                return self._share(path, self._opened(names, path=Path.cwd()))
            return self._ranks_share(path, group, names)
        except OSError as error:
            if is_made:
                shutil.rmtree(path, ignore_errors=True)
            reason = f"can't be written ({os_error_text(error)})"
            raise UsageError(f"the run {path} {reason}; choose another directory") from error

    def _made(self, path: Path, header: dict[str, Any]) -> Path:
        """Make or join the run. A generated name gets a number if an earlier launch has it: a rank
        may know nothing that differs between two launches."""
        if self.out is not None or header["group"] is None:
            return create_or_join(path, header)
        for number in range(2, _LAUNCHES):
            with suppress(UsageError):
                return create_or_join(path, header)
            path = path.with_name(f"{path.name.removesuffix(f'-{number - 1}')}-{number}")
        return create_or_join(path, header)

    def _check_layout(self) -> None:
        """Raises UsageError now for a layout that the report would refuse hours later."""
        world = max(launcher_world_size(), world_size())
        if self.settings.layout is not None and world > 1:
            ParallelLayout.parsed(self.settings.layout).check(world)

    def _ranks_share(self, run: Path, group: str, names: tuple[str, ...]) -> HandOver:
        """Join `run` as one of several ranks: read its own process, and each device that no other
        rank of this node reads."""
        opened = self._opened([n for n in names if n in _OWN_PROBES], path=Path.cwd())
        word = f"{group}|{run.absolute()}"
        duties = [_Duty(self, name, word=word) for name in names if name not in _OWN_PROBES]
        taken = {duty: duty.taken() for duty in duties}
        for first in filter(None, taken.values()):
            opened.probes += first.probes
            opened.unavailable |= first.unavailable
        handover = self._share(run, opened, duties)
        handover.duties += [duty for duty, first in taken.items() if first is None]
        handover.on_end += [duty.release for duty in duties]
        return handover

    def _share(self, run: Path, opened: Opened, duties: Iterable[_Duty] = ()) -> HandOver:
        """Make a writer in this run, with its header, and the hand-over to it."""
        source, stream = ("recorder", "output") if self.around else ("meter", "")
        header = writer_header(source)
        header.update(self.facts())
        header["unavailable"] = opened.unavailable
        header["probes"] = {probe.name: {"period_s": probe.period_s} for probe in opened.probes}
        if self.budget is not None:
            header["budget"] = self.budget.as_json()
        if self.alerts is not None and self.alerts.rules:
            rules = [rule.text for rule in self.alerts.rules]
            header["alerts"] = {"rules": rules, "stop_on": list(self.alerts.stop_on)}
        cost_s = self.around.cost_s if self.around else None
        devices = [_own_device(header["writer"], whole_processes=cost_s is not None)]
        devices += [device for probe in opened.probes for device in probe.devices]
        try:
            writer = Writer(run, header=header, devices=devices)
        except OSError:
            for probe in opened.probes:
                probe.close()
            raise
        duty_of = {duty.name: duty for duty in duties}

        def failed(probe: str) -> None:
            if probe in duty_of:
                duty_of[probe].release()

        sampler = Sampler(opened.probes, on_failed=failed)
        handover = HandOver(writer, sampler, stream=stream, rank=self.rank, cost_s=cost_s)
        if "torch" in sys.modules and "allocator" in opened.unavailable:
            handover.duties.append(_AllocatorLater(self))
        return handover


def _own_device(writer: str, *, whole_processes: bool) -> Device:
    """The device under which a writer stores ergmeter's own cost; each writer has one."""
    what, counted = ("processes",) * 2 if whole_processes else ("threads", "all threads")
    return Device(own_id(writer), "self", f"ergmeter's own {what}", "self", {"counted": counted})


# Probes of one process alone; all others read the same for every process.
_OWN_PROBES = ("process", "allocator")


@dataclass(eq=False)
class _AllocatorLater:
    """Opens the allocator's probe once the program itself has initialised CUDA, never before."""

    plan: RunPlan
    is_silent: bool = True  # no process read it before

    def taken(self) -> Opened | None:
        """The probe, if CUDA is in use by now."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None
        return self.plan._opened(["allocator"], path=Path.cwd())


@dataclass(eq=False)
class _Duty:
    """The duty to read a device for all ranks of this node that see it."""

    plan: RunPlan
    name: str
    word: str
    is_silent: bool = False
    _claim: DeviceClaim | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    def taken(self) -> Opened | None:
        """The probe, or why it can't work here; None while another process reads the device."""
        if self._over.is_set() or (self._claim is not None and not self._claim.take()):
            return None
        # With several ranks, all children of their launcher count as the program's processes.
        several = {"LOCAL_WORLD_SIZE": "2", **os.environ}
        opened = self.plan._opened([self.name], path=Path.cwd(), environment=several)
        devices = sorted(device.id for probe in opened.probes for device in probe.devices)
        if self._claim is None:
            self._claim = DeviceClaim(self.word, self.name, *devices)
        # The end may have come while the probe was opened.
        if opened.probes and self._claim.take() and not self._over.is_set():
            return opened
        self._claim.release()
        for probe in opened.probes:
            probe.close()
        return None if opened.probes else opened

    def release(self) -> None:
        """Let another rank read the device. This process never claims it again: its probe has
        ended, so it would hold a claim without reading."""
        self._over.set()
        if self._claim is not None:
            self._claim.release()


def print_notice(text: str) -> None:
    """Prints a notice for which there is no run to mark."""
    sys.stderr.write(f"ergmeter: {text}\n")


def os_error_text(error: OSError) -> str:
    """The system's error text, with its file."""
    parts = (error.filename, error.strerror or error)
    return ": ".join(str(part) for part in parts if part)
