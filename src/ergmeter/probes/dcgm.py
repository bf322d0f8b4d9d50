"""Reads GPU hardware counters through NVIDIA's DCGM, where NVML has none.

DCGM reads counters of Volta to Ada too, with the permissions of its own service. It is requested by
name (`--probe nvml --probe dcgm`) and read through its tool, which prints a line per GPU and
interval. (dcgm-exporter updates every 30 s by default, without a timestamp.)

DCGM numbers GPUs in its own order, which CUDA_VISIBLE_DEVICES does not use. UUIDs and bus ids come
from `dcgmi discovery`. So an index in that variable is resolved along the bus, as in NVML, or by
CUDA where GPUs differ, and the values belong to the same GPUs that NVML reads.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from ergmeter.errors import NotMeasurable
from ergmeter.ports import DeclaredProbe, ProbeRequest
from ergmeter.probes.cuda_visible_devices import visible, with_uuids
from ergmeter.probes.stream import ToolStream
from ergmeter.records import Device, Mark, Sample
from ergmeter.units import NS_PER_S

TOOL = "dcgmi"
ANSWER_S = 8.0  # for all of its answers: a probe has 10 s to open

# DCGM's numbers of its profiling fields. Shares are fractions there, rates bytes per second.
_FIELDS = {
    1001: "graphics_frac",
    1002: "sm_frac",
    1003: "occupancy_frac",
    1004: "tensor_frac",
    1005: "dram_frac",
    1009: "pcie_sent_bytes_per_s",
    1010: "pcie_received_bytes_per_s",
    1011: "nvlink_sent_bytes_per_s",
    1012: "nvlink_received_bytes_per_s",
}
_DISCOVERED_GPU = re.compile(
    r"^\|\s*(?P<id>\d+)\s*\|\s*Name: (?P<name>.*?)\s*\|$"
    r".*?PCI Bus ID: (?P<bus>\S+).*?Device UUID: (?P<uuid>GPU-\S+)",
    re.MULTILINE | re.DOTALL,
)


class DcgmProbe(DeclaredProbe):
    """Reads the profiling fields of every GPU that the measured process can see."""

    name = "dcgm"
    kinds = ("gpu",)
    is_default = False
    usual_period_s = 1.0

    def __init__(self, request: ProbeRequest) -> None:
        super().__init__(request)
        tool = str(request.options.get("tool", TOOL))
        if shutil.which(tool) is None:
            raise NotMeasurable(f"no {tool} here: install NVIDIA's DCGM (datacenter-gpu-manager)")
        until_s = time.monotonic() + ANSWER_S
        uuids = _discover_gpus(tool, wait_s=ANSWER_S / 2)
        identities = [(gpu["uuid"], gpu["name"]) for gpu in uuids]
        by_uuid = with_uuids(request.environment, identities, wait_s=ANSWER_S / 4)
        assumed = {"order_is_assumed": True} if by_uuid is None else {}
        # Whole boards only: DCGM prints MIG instances under their board's name and a number.
        chosen = visible(by_uuid or request.environment, [uuid for uuid, _ in identities])
        gpus = [uuids[index] for index in chosen if isinstance(index, int)]
        self._ids = {gpu["id"]: gpu["uuid"] for gpu in gpus}
        self.devices: Sequence[Device] = [
            Device(
                gpu["uuid"], "gpu", gpu["name"], self.name, {"dcgm_id": int(gpu["id"]), **assumed}
            )
            for gpu in gpus
        ]
        self._since_ns = dict.fromkeys(self._ids, 0)
        fields = ",".join(map(str, _FIELDS))
        delay_ms = str(round(self.period_s * 1000))
        command = (tool, "dmon", "-e", fields, "-d", delay_ms, "-i", ",".join(self._ids))
        self._stream = ToolStream(TOOL, command)
        with self.closed_on_error():
            self._stream.first(max(0.0, until_s - time.monotonic()))

    def read(self) -> list[Sample | Mark]:
        """Samples printed since the last read. Raises NotMeasurable once the tool has ended."""
        samples = (self._sample(line.text, line.t_ns) for line in self._stream.new_lines())
        return [sample for sample in samples if sample is not None]

    def close(self) -> None:
        """End the tool."""
        self._stream.close()

    def _sample(self, text: str, t_ns: int | None) -> Sample | None:
        """One printed line as a sample: each value is the mean since the line before."""
        words = text.split()
        if len(words) != 2 + len(_FIELDS) or words[0] != "GPU" or words[1] not in self._ids:
            return None  # a heading, or a GPU that is not the program's
        values: dict[str, Any] = {
            field: float(word)
            for field, word in zip(_FIELDS.values(), words[2:], strict=True)
            if re.fullmatch(r"\d+(\.\d+)?", word)  # N/A without a value, as on its first line
        }
        t_ns = time.monotonic_ns() if t_ns is None else t_ns
        since_ns = self._since_ns[words[1]] or t_ns - round(self.period_s * NS_PER_S)
        self._since_ns[words[1]] = t_ns
        span_s = (t_ns - since_ns) / NS_PER_S
        return Sample(t_ns, self._ids[words[1]], activity_s=span_s, **values) if values else None


def _discover_gpus(tool: str, *, wait_s: float) -> list[dict[str, Any]]:
    """The GPUs that DCGM lists, in the order of the PCI bus, as in NVML."""
    try:
        done = subprocess.run(
            [tool, "discovery", "-l"], capture_output=True, text=True, timeout=wait_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotMeasurable(f"{TOOL} does not answer ({error}): is nv-hostengine up?") from None
    gpus = [match.groupdict() for match in _DISCOVERED_GPU.finditer(done.stdout)]
    if not gpus:
        answer = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[0]
        raise NotMeasurable(
            f"{TOOL} finds no GPU (it prints: {answer}): start its service, nvidia-dcgm"
        )
    return sorted(gpus, key=lambda gpu: _bus_address(gpu["bus"]))


def _bus_address(bus: str) -> tuple[int, ...]:
    """Domain, bus, device and function of "00000000:81:00.0", as numbers."""
    return tuple(int(part, 16) for part in re.findall(r"[0-9A-Fa-f]+", bus))
