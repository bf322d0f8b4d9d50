"""Plays back the recording of a real GPU, on any machine.

A sample is returned once its time has come, with a timestamp of this machine's clock.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from ergmeter.errors import FormatError, NotMeasurable, UsageError
from ergmeter.ports import DeclaredProbe, ProbeRequest
from ergmeter.records import Device, Mark, Sample, Step
from ergmeter.runlog.format import json_object
from ergmeter.units import HZ_PER_MHZ, J_PER_MJ, NS_PER_S, W_PER_MW

# -- the recording ---------------------------------------------------------------------------------
# A row has two times: the quick readings, and the energy counter, whose read took milliseconds and
# is dated at its middle. At 700 W ten milliseconds are seven joules, so each row becomes two
# samples. Hardware counters are a third, dated at the end of their interval.
#
# A recording is a folder with NAME_samples.csv and, where they exist, NAME_gpm.csv, NAME_steps.csv
# and NAME_trace.json; a CSV may be gzipped. Times are nanoseconds from the recording's start.

PROBE = "replay"  # the probe's name
FRAC_PER_PERCENT = 0.01

Row = dict[str, str]
Record = TypeVar("Record")


def recorded_device(path: Path) -> Device:
    """The recorded device, under an id of its own: the recording has no UUID."""
    name, trace = _name(path), _trace(path)
    facts = {"recording": name, "driver": trace.get("driver"), "torch": trace.get("torch")}
    return Device(f"replay:{name}", "gpu", str(trace.get("device", name)), PROBE, facts)


def recorded_samples(path: Path) -> list[Sample]:
    """Every sample at its recorded time, in order."""
    device = recorded_device(path).id
    rows = _records(path, "samples.csv", lambda row: _samples_of_row(row, device))
    samples = list(chain.from_iterable(rows))
    if _file(path, "gpm.csv").exists():
        samples += _records(path, "gpm.csv", lambda row: _activity_sample(row, device))
    return sorted(samples, key=lambda sample: sample.t_ns)


def recorded_steps(path: Path) -> list[tuple[str, Step]]:
    """Every training step, with the name of the recording's phase that it is in."""
    return _records(path, "steps.csv", lambda row: (row["phase"], _step(row)))


def _samples_of_row(row: Row, device: str) -> tuple[Sample, Sample]:
    quick = Sample(
        int(row["t_ns"]),
        device,
        power_w=int(row["power_instant_mw"]) * W_PER_MW,
        # NVML's PowerUsage is a mean of about a second on this generation.
        power_average_w=int(row["power_usage_mw"]) * W_PER_MW,
        memory_bytes=int(row["memory_used_bytes"]),
        busy_frac=int(row["gpu_util_pct"]) * FRAC_PER_PERCENT,
        clock_hz=int(row["sm_clock_mhz"]) * HZ_PER_MHZ,
        temperature_c=float(row["temperature_c"]),
        throttled=int(row["throttle_reasons"]),
    )
    middle_ns = (int(row["energy_read_start_ns"]) + int(row["energy_read_end_ns"])) // 2
    return quick, Sample(middle_ns, device, energy_j=int(row["energy_counter_mj"]) * J_PER_MJ)


# A recording's columns of hardware counters, and our names for them.
_ACTIVITY = {
    "graphics_util": "graphics_frac",
    "sm_util": "sm_frac",
    "sm_occupancy": "occupancy_frac",
    "tensor_util": "tensor_frac",
    "dram_bw_util": "dram_frac",
}


def _activity_sample(row: Row, device: str) -> Sample:
    end_ns = int(row["end_ns"])
    span_s = (end_ns - int(row["start_ns"])) / NS_PER_S
    values: dict[str, Any] = {
        ours: float(row[theirs]) * FRAC_PER_PERCENT for theirs, ours in _ACTIVITY.items()
    }
    return Sample(end_ns, device, activity_s=span_s, **values)


def _step(row: Row) -> Step:
    return Step(
        int(row["start_ns"]),
        int(row["end_ns"]),
        index=int(row["step"]),
        tokens_computed=int(row["tokens"]),
        samples=int(row["samples"]),
        loss=float(row["loss"]) if row["loss"] else None,
    )


def _records(path: Path, part: str, record: Callable[[Row], Record]) -> list[Record]:
    """Read one CSV of the recording, and make a record of each row."""
    file = _file(path, part)
    records: list[Record] = []
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
        records.extend(map(record, csv.DictReader(io.StringIO(text))))
    except (OSError, EOFError, zlib.error) as error:
        raise FormatError(f"{file}: cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        where = f"{file}, line {len(records) + 2}"
        raise FormatError(f"{where}: not a recording's row: {error!r}") from error
    return records


def _name(path: Path) -> str:
    """The NAME of the one recording in a folder, or of the file given."""
    files = path.glob("*_samples.csv*") if path.is_dir() else [path]
    names = {file.name.partition("_samples.csv")[0] for file in files}
    if len(names) != 1:
        listed = ", ".join(sorted(names)) or "none"
        raise FormatError(f"{path}: one NAME_samples.csv or .csv.gz is needed here, found {listed}")
    return names.pop()


def _file(path: Path, part: str) -> Path:
    """The path of a part of the recording, gzipped where only that exists."""
    plain = (path if path.is_dir() else path.parent) / f"{_name(path)}_{part}"
    zipped = plain.with_name(f"{plain.name}.gz")
    return zipped if zipped.exists() else plain


def _trace(path: Path) -> dict[str, Any]:
    file = _file(path, "trace.json")
    return json_object(file) if file.exists() else {}


# -- the probe -------------------------------------------------------------------------------------


class ReplayProbe(DeclaredProbe):
    """Plays a recording, from the probe's creation on. Speed 1 is as fast as it was recorded.

    At another speed only times change, so joules are no longer watts times seconds.
    """

    name = PROBE
    kinds = ("gpu",)
    reads = "recording"
    is_default = False
    usual_period_s = 0.1

    def __init__(self, request: ProbeRequest) -> None:
        options = request.options
        if "path" not in options:
            raise NotMeasurable('no recording to replay: give the option "path", its folder')
        path = Path(options["path"])
        if not path.exists():
            raise NotMeasurable(f'no recording at {path}: give its folder as the option "path"')
        super().__init__(request)
        self._speed = float(options.get("speed", 1.0))
        if not (math.isfinite(self._speed) and self._speed > 0):
            raise UsageError(f"a replay's speed must be a number above 0, not {self._speed:g}")
        device = recorded_device(path)
        facts = {**device.facts, "speed": self._speed}
        self.devices: Sequence[Device] = (replace(device, facts=facts),)
        self._samples = recorded_samples(path)
        self._next = 0
        self._start_ns = time.monotonic_ns()

    def read(self) -> list[Sample | Mark]:
        """The samples that have become due since the last read; none at the recording's end."""
        reached_ns = (time.monotonic_ns() - self._start_ns) * self._speed
        due: list[Sample | Mark] = []
        while self._next < len(self._samples) and self._samples[self._next].t_ns <= reached_ns:
            sample = self._samples[self._next]
            offset_ns = round(sample.t_ns / self._speed)
            due.append(replace(sample, t_ns=self._start_ns + offset_ns))
            self._next += 1
        return due

    def close(self) -> None:
        """Release the recording."""
        self._samples = []
