"""A scripted NVML: GPUs whose true power is known, read through NVIDIA's real Python binding.

Mocking `pynvml` tests the mock. Here the binding is the real one and only the C library
under it is ours (`scripted_nvml.c`, whose head explains the script's grammar), so error classes,
structures and symbol names are checked as well.

In another process, for any program that uses NVML:

    nvml = build(directory)
    script = Script([Gpu(power_w=[(0, 100), (10, 300)])], epoch_ns=time.monotonic_ns())
    subprocess.run([...], env={**os.environ, **nvml.environment(script)})

In this process, with a clock that stands where the test puts it:

    nvml.load()
    monkeypatch.setenv("SCRIPTED_NVML", str(nvml.written(Script([Gpu(power_w=300)], stand_at_s=0))))
    probe = NvmlProbe(request)
    nvml.stand_at(2.5)
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import pynvml

NOT_KNOWN = -1  # bytes, as a driver says it in a container
SONAME = "libnvidia-ml.so.1"
SOURCE = Path(__file__).with_name("scripted_nvml.c")

# A constant, or the (seconds since the epoch, value) points of a line; a time given twice jumps.
Curve: TypeAlias = "float | Sequence[tuple[float, float]]"


@dataclass(frozen=True)
class Fault:
    """A query that fails with an NVML error code, in a span of time and at most so many times.

    `query` is one of: handle name uuid pci power fields instant average energy memory utilization
    clock temperature events throttle limit compute_mode persistence processes mig virtualization
    gpm all.
    """

    query: str
    error: int
    from_s: float = -math.inf
    until_s: float = math.inf
    times: float = math.inf


@dataclass(frozen=True)
class Mig:
    """A MIG instance of a GPU: its two numbers there, and what it has of its own."""

    gpu_instance: int
    compute_instance: int
    uuid: str
    memory_bytes: Curve = 0.0
    memory_total_bytes: int = 18_790_481_920
    name: str = "NVIDIA H200 MIG 1g.18gb"
    power_w: Curve | None = None  # of a driver that answers with its board's
    processes: Sequence[tuple[int | str, int]] = ()

    def lines(self) -> Iterator[str]:
        """The script's lines for it, after those of its GPU."""
        yield f"mig {self.gpu_instance} {self.compute_instance}"
        yield f"name {self.name}"
        yield f"uuid {self.uuid}"
        yield f"memory_total {self.memory_total_bytes}"
        yield f"curve memory {_numbers(self.memory_bytes)}"
        if self.power_w is not None:
            yield f"curve power {_numbers(self.power_w)}"
        yield from _process_lines(self.processes)


@dataclass(frozen=True)
class Gpu:
    """One GPU of a script: an idle H200 unless told otherwise. Times count from the epoch."""

    power_w: Curve = 77.0
    name: str = "NVIDIA H200"
    uuid: str = ""  # empty: made from the index
    pci: str = ""  # empty: made from the index
    memory_bytes: Curve = 0.0
    memory_total_bytes: int = 150_754_820_096
    busy_frac: Curve = 0.0
    memory_busy_frac: Curve = 0.0
    clock_hz: Curve = 1_980e6
    memory_clock_hz: Curve = 3_201e6
    temperature_c: Curve = 35.0
    activity: dict[str, Curve] = field(default_factory=dict)  # by GPM's name; in NVML's own unit
    throttle: int = 0
    power_limit_w: float = 700.0
    compute_mode: int = pynvml.NVML_COMPUTEMODE_DEFAULT
    persistence: bool = True
    architecture: int = pynvml.NVML_DEVICE_ARCH_HOPPER
    brand: int = pynvml.NVML_BRAND_NVIDIA
    refresh_ms: float = 100.0  # 0: power and counter follow the curve continuously
    energy_start_j: float = 1_000_000.0  # what the counter reads at the epoch
    reset_at_s: float | None = None  # the counter begins again from 0
    frozen_energy: bool = False  # the counter never moves from energy_start_j
    lost_at_s: float | None = None  # from then on every query says GPU is lost
    no_energy: bool = False  # no counter
    no_power: bool = False  # neither power usage nor fields
    no_instant: bool = False  # no power fields; power usage works
    hang_s: tuple[float, float] | None = None  # power queries block from the first, for the second
    energy_read_ms: float = 0.0  # what one reading of the counter costs
    cost_s: dict[str, float] = field(default_factory=dict)  # by query, as in Fault
    faults: Sequence[Fault] = ()
    processes: Sequence[tuple[int | str, int]] = ()  # (pid or "self", bytes) of who computes on it
    graphics: Sequence[int | str] = ()  # processes with a graphics context
    virtualization: int = pynvml.NVML_GPU_VIRTUALIZATION_MODE_NONE
    instances: Sequence[Mig] = ()  # with any, it is in MIG mode

    def joules(self, start_s: float, end_s: float) -> float:
        """The true energy of this span: the integral of the curve, whatever the sensors show."""
        points = _points(self.power_w)
        before = (min(start_s, points[0][0]), points[0][1])
        after = (max(end_s, points[-1][0]), points[-1][1])
        total = 0.0
        for (t0, w0), (t1, w1) in itertools.pairwise([before, *points, after]):
            low, high = max(t0, start_s), min(t1, end_s)
            if low < high:
                middle_w = w0 + (w1 - w0) * ((low + high) / 2 - t0) / (t1 - t0)
                total += middle_w * (high - low)
        return total

    def lines(self, index: int) -> Iterator[str]:
        """The script's lines for this GPU as number `index`."""
        yield "gpu"
        yield f"name {self.name}"
        yield f"uuid {self.uuid or default_uuid(index)}"
        yield f"pci {self.pci or f'00000000:{0x1B + index:02X}:00.0'}"
        yield f"memory_total {self.memory_total_bytes}"
        yield f"power_limit {self.power_limit_w!r}"
        yield f"compute_mode {self.compute_mode}"
        yield f"persistence {int(self.persistence)}"
        yield f"architecture {self.architecture}"
        yield f"brand {self.brand}"
        yield f"virtualization {self.virtualization}"
        yield f"throttle {self.throttle}"
        yield f"refresh_ms {self.refresh_ms!r}"
        yield f"energy_start {self.energy_start_j!r}"
        yield from self._curve_lines()
        yield from self._event_lines()
        for instance in self.instances:
            yield from instance.lines()

    def _curve_lines(self) -> Iterator[str]:
        curves: list[tuple[str, Curve, float]] = [
            ("power", self.power_w, 1),
            ("memory", self.memory_bytes, 1),
            ("utilization", self.busy_frac, 100),
            ("memory_utilization", self.memory_busy_frac, 100),
            ("clock", self.clock_hz, 1e-6),
            ("memory_clock", self.memory_clock_hz, 1e-6),
            ("temperature", self.temperature_c, 1),
        ]
        curves += [(name, curve, 1) for name, curve in self.activity.items()]
        for name, curve, scale in curves:
            yield f"curve {name} {_numbers(curve, scale)}"

    def _event_lines(self) -> Iterator[str]:
        if self.reset_at_s is not None:
            yield f"reset_at {self.reset_at_s!r}"
        if self.frozen_energy:
            yield "frozen_energy"
        if self.hang_s is not None:
            yield f"hang {self.hang_s[0]!r} {self.hang_s[1]!r}"
        yield from _process_lines(self.processes)
        yield from (f"graphics {pid}" for pid in self.graphics)
        for fault in self._all_faults():
            span = f"{fault.from_s!r} {fault.until_s!r} {fault.times!r}"
            yield f"fail {fault.query} {fault.error} {span}"
        for query, seconds in {"energy": self.energy_read_ms / 1000, **self.cost_s}.items():
            yield f"cost {query} {seconds!r}"

    def _all_faults(self) -> list[Fault]:
        silent = ["energy"] * self.no_energy
        silent += ["power", "fields"] * self.no_power
        silent += ["instant", "average"] * self.no_instant
        faults = [Fault(query, pynvml.NVML_ERROR_NOT_SUPPORTED) for query in silent]
        if self.lost_at_s is not None:
            # First, because a lost GPU no longer says that it does not support something.
            faults.insert(0, Fault("all", pynvml.NVML_ERROR_GPU_IS_LOST, self.lost_at_s))
        return [*faults, *self.faults]


@dataclass(frozen=True)
class Script:
    """A machine: its GPUs, its driver, and what its clock does."""

    gpus: Sequence[Gpu] = ()
    driver: str = "580.159.03"
    nvml: str = "13.580.159.03"
    init_error: int | None = None  # NVML's code
    epoch_ns: int | None = None  # on CLOCK_MONOTONIC; None: when the library is first initialised
    stand_at_s: float | None = None  # a clock that stands still; None: it runs
    in_use: bool = True  # where no GPU lists processes, whoever asks is one of them on each

    def text(self) -> str:
        """The script in the grammar of scripted_nvml.c."""
        lines = [f"driver {self.driver}", f"nvml {self.nvml}"]
        if self.init_error is not None:
            lines.append(f"init_error {self.init_error}")
        if self.epoch_ns is not None:
            lines.append(f"epoch_ns {self.epoch_ns}")
        if self.stand_at_s is not None:
            lines.append(f"stand_at {self.stand_at_s!r}")
        gpus = self.gpus
        of_instances = [one.processes for gpu in gpus for one in gpu.instances]
        if self.in_use and not any([*of_instances, *(gpu.processes for gpu in gpus)]):
            gpus = [_in_use(gpu) for gpu in gpus]
        for index, gpu in enumerate(gpus):
            lines.extend(gpu.lines(index))
        return "\n".join(lines) + "\n"


def _in_use(gpu: Gpu) -> Gpu:
    """A GPU on which whoever asks computes."""
    ours: list[tuple[int | str, int]] = [("self", NOT_KNOWN)]
    parts = [replace(one, processes=ours) for one in gpu.instances]
    return replace(gpu, processes=ours, instances=parts)


@dataclass(frozen=True)
class Library:
    """The compiled library, and what to do with it. Made by `build`."""

    path: Path

    def written(self, script: Script) -> Path:
        """Write the script beside the library, under a name of its own."""
        with tempfile.NamedTemporaryFile(
            "w", dir=self.path.parent, prefix="script-", suffix=".txt", delete=False
        ) as file:
            file.write(script.text())
        return Path(file.name)

    def environment(self, script: Script) -> dict[str, str]:
        """Write the script; return what a process started with it must have in its environment."""
        inherited = os.environ.get("LD_LIBRARY_PATH")
        search = [str(self.path.parent), *([inherited] if inherited else [])]
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(search),
            "SCRIPTED_NVML": str(self.written(script)),
        }

    def load(self) -> None:
        """Load into this process, so that the binding finds this library under the real one's name.

        It stays loaded; without SCRIPTED_NVML in the environment it says "library not found".
        """
        ours = ctypes.CDLL(str(self.path))
        if ctypes.CDLL(SONAME)._handle != ours._handle:
            raise RuntimeError(f"another {SONAME} is already loaded in this process")

    def stand_at(self, seconds: float) -> None:
        """Stop the clock of the loaded library at this time since the epoch."""
        ctypes.CDLL(str(self.path)).scripted_nvml_stand_at(ctypes.c_double(seconds))

    def shut_down(self) -> int:
        """Undo every nvmlInit not yet undone in this process; return how many there were."""
        shutdown = ctypes.CDLL(str(self.path)).nvmlShutdown
        return sum(1 for _ in itertools.takewhile(lambda code: code == 0, iter(shutdown, None)))


def build(directory: Path) -> Library:
    """Compile the library into a directory, unless it is there and newer than its source."""
    path = directory / SONAME
    if not path.exists() or path.stat().st_mtime < SOURCE.stat().st_mtime:
        unfinished = directory / f"{SONAME}.{os.getpid()}"
        flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Werror", f"-Wl,-soname,{SONAME}"]
        subprocess.run(
            ["gcc", *flags, "-o", str(unfinished), str(SOURCE), "-lm", "-lpthread"], check=True
        )
        unfinished.replace(path)
    return Library(path)


def default_uuid(index: int) -> str:
    """The UUID of the script's GPU number `index`, unless it was given one."""
    return f"GPU-{index:08x}-5c21-4d0e-9b1a-7f3a00000000"


def _points(curve: Curve) -> Sequence[tuple[float, float]]:
    return [(0.0, float(curve))] if isinstance(curve, int | float) else curve


def _numbers(curve: Curve, scale: float = 1) -> str:
    return " ".join(f"{t_s!r} {value * scale!r}" for t_s, value in _points(curve))


def _process_lines(processes: Sequence[tuple[int | str, int]]) -> Iterator[str]:
    for pid, used_bytes in processes:
        yield f"process {pid} {used_bytes}"
