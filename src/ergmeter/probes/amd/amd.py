"""What do this machine's AMD GPUs draw, and what are they doing? From amdsmi, without root.

Power is the current one where the GPU has it (MI300 and newer), else the average; the facts say
which. Energy is the hardware's accumulator, in steps of the resolution it states (15.3 uJ).

The trap: AMD's binding prints to stdout and fails with a KeyError where it finds no library, so it
is imported only where the kernel's driver is, and its words are kept. It asks the firmware at each
call: power is asked for at every reading, the rest once a second.

And a board with two dies and one sensor: what an MI250X draws is read on its first die. Whoever
computes on the other one is company, also where the program is shown only one of them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ergmeter.errors import NotMeasurable
from ergmeter.ports import ProbeRequest
from ergmeter.probes.amd.amd_gpu import AmdGpu, error_text, number, scaled
from ergmeter.probes.usage import UsageWatch
from ergmeter.records import Device, Mark, Sample

# -- hip -------------------------------------------------------------------------------------------
# Which of the GPUs that amdsmi lists can a process see?
#
# The trap: two lists, one on top of the other. ROCR_VISIBLE_DEVICES chooses from what there is, by
# index or by UUID; HIP_VISIBLE_DEVICES (or CUDA_VISIBLE_DEVICES, which HIP heeds too) then counts
# from 0 in what the first one left. amdsmi heeds neither, and its order is HIP's only by its word.


def visible(environment: Mapping[str, str], gpus: Sequence[dict[str, Any]]) -> list[int]:
    """The amdsmi indices of the GPUs that HIP shows to a process, by the facts known of each.

    As the runtimes read a list: it ends at the first entry that names no GPU.
    """
    if not gpus:
        raise NotMeasurable("the AMD driver shows no GPU: see `amd-smi list`")
    shown = sorted(range(len(gpus)), key=lambda index: gpus[index].get("hip_index", index))
    if any("hip_index" not in gpu for gpu in gpus) and len(gpus) > 1:
        for gpu in gpus:
            gpu["order_is_assumed"] = True
    for names in (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")):
        variable = next((name for name in names if environment.get(name) is not None), None)
        if variable is not None:
            shown = _chosen(variable, environment[variable], shown, gpus)
    return shown


def _chosen(
    variable: str, value: str, shown: Sequence[int], gpus: Sequence[Mapping[str, Any]]
) -> list[int]:
    chosen: list[int] = []
    for entry in value.split(","):
        index = _named(entry.strip(), shown, gpus)
        if index is None or index in chosen:
            break
        chosen.append(index)
    if not chosen:
        raise NotMeasurable(
            f'{variable}="{value}" hides every AMD GPU: unset it, or name one of 0 to'
            f" {len(shown) - 1}"
        )
    return chosen


def _named(entry: str, shown: Sequence[int], gpus: Sequence[Mapping[str, Any]]) -> int | None:
    if entry.upper().startswith("GPU-"):
        wanted = entry[4:].lower()
        matches = [i for i in shown if str(gpus[i].get("serial", "")).lower() == f"0x{wanted}"]
        return matches[0] if len(matches) == 1 else None
    return shown[int(entry)] if entry.isdecimal() and int(entry) < len(shown) else None


# -- amd -------------------------------------------------------------------------------------------


KFD = "/dev/kfd"  # the compute driver's door: without it no program computes on an AMD GPU
PERIOD_S = 0.1
SLOW_PERIOD_S = 1.0
SILENT_READINGS = 5  # in a row that gave nothing: the GPU is lost

_W_PER_UW = 1e-6  # a power cap is in microwatts
_PERMISSION, _NOT_LOADED = 10, 34  # of amdsmi_status_t


class AmdProbe:
    """Reads every AMD GPU that the measured process can see."""

    name = "amd"

    def __init__(self, request: ProbeRequest) -> None:
        self.period_s = float(request.options.get("period_s", PERIOD_S))
        self._slow_due_s = 0.0
        self._usage = UsageWatch(request.pid, request.environment)
        self._smi = _binding(Path(request.options.get("kfd", KFD)))
        try:
            with contextlib.ExitStack() as undo:
                self._smi.amdsmi_init()
                undo.callback(self.close)
                self._gpus = _opened(self._smi, request.environment)
                undo.pop_all()
        except self._smi.AmdSmiException as error:
            raise NotMeasurable(_refusal(error)) from error
        self.devices: Sequence[Device] = [gpu.device for gpu in self._gpus]

    def read(self) -> Sequence[Sample | Mark]:
        """Power of every GPU; once a second also its counter and what else it says.

        A lost GPU gives one Mark. Raises NotMeasurable once there is none left.
        """
        return self._reading(slow=time.monotonic() >= self._slow_due_s)

    def read_last(self) -> Sequence[Sample | Mark]:
        """The same, everything in any case; and that the use of the GPUs is unknown, if it is."""
        records = list(self._reading(slow=True))
        if not self._usage.has_recognised:
            why = "amdsmi listed no process of the run on any GPU"
            t_ns = time.monotonic_ns()
            records += [Mark(t_ns, "device_unknown", f"{g.device.id} {why}") for g in self._gpus]
        return records

    def close(self) -> None:
        """Let go of the library."""
        with contextlib.suppress(self._smi.AmdSmiException):
            self._smi.amdsmi_shut_down()

    def processes(self) -> dict[str, list[int]]:
        """Who computes on each GPU now."""
        return {gpu.device.id: gpu.processes() for gpu in self._gpus}

    def _reading(self, *, slow: bool) -> Sequence[Sample | Mark]:
        if not self._gpus:
            raise NotMeasurable("no AMD GPU is left to read: see `amd-smi list`")
        if slow:
            self._slow_due_s = time.monotonic() + SLOW_PERIOD_S - self.period_s / 2
        records: list[Sample | Mark] = []
        for gpu in self._gpus:
            records += gpu.samples(slow=slow)
        lost = [gpu for gpu in self._gpus if gpu.silent >= SILENT_READINGS]
        self._gpus = [gpu for gpu in self._gpus if gpu not in lost]
        t_ns = time.monotonic_ns()
        for gpu in lost:
            detail = f"{gpu.device.id} ({gpu.device.name}): amdsmi says {gpu.error}"
            records.append(Mark(t_ns, "device_lost", detail))
        used, shared = self._usage.changes([(g.device.id, g.processes) for g in self._gpus])
        records += [Mark(t_ns, "device_used", device) for device in used]
        records += [Mark(t_ns, "device_shared", f"{gpu} {who}") for gpu, who in shared.items()]
        return records


# What does not change during a run.
_FACTS: dict[str, Callable[[Any, Any], Any]] = {
    "pci_bus_id": lambda smi, gpu: smi.amdsmi_get_gpu_device_bdf(gpu),
    "driver": lambda smi, gpu: smi.amdsmi_get_gpu_driver_info(gpu)["driver_version"],
    "power_limit_w": lambda smi, gpu: scaled(
        smi.amdsmi_get_power_cap_info(gpu)["power_cap"], _W_PER_UW
    ),
    "memory_total_bytes": lambda smi, gpu: number(
        smi.amdsmi_get_gpu_memory_total(gpu, smi.AmdSmiMemoryType.VRAM)
    ),
    "serial": lambda smi, gpu: smi.amdsmi_get_gpu_asic_info(gpu)["asic_serial"],
    "partition": lambda smi, gpu: smi.amdsmi_get_gpu_compute_partition(gpu),
    "hip_index": lambda smi, gpu: smi.amdsmi_get_gpu_enumeration_info(gpu)["hip_id"],
}


def _binding(kfd: Path) -> Any:  # noqa: ANN401  the binding has no types
    """The binding, where there is a driver for it to talk to."""
    if not kfd.exists():
        raise NotMeasurable(f"no AMD GPU to compute on here: {kfd} does not exist")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module("amdsmi")
    except ModuleNotFoundError:
        raise NotMeasurable(
            "an AMD GPU is read through AMD's Python package amdsmi, which is not installed:"
            " `pip install /opt/rocm/share/amd_smi`, or `pip install 'ergmeter[amd]'`"
        ) from None
    except (OSError, KeyError, AttributeError) as error:
        raise NotMeasurable(
            f"the Python package amdsmi does not fit ROCm's library libamd_smi.so ({error}):"
            " install the one that came with ROCm, `pip install /opt/rocm/share/amd_smi`"
        ) from error


def _opened(smi: Any, environment: Mapping[str, str]) -> list[AmdGpu]:  # noqa: ANN401
    handles = smi.amdsmi_get_processor_handles()
    facts = [_facts(smi, handle) for handle in handles]
    indices = visible(environment, facts)
    for index in indices:
        mode = facts[index].get("partition")
        if mode not in (None, "SPX"):
            raise NotMeasurable(
                f"the AMD GPU at {facts[index].get('pci_bus_id')} is split into partitions ({mode})"
                " and its energy can't be attributed to one of them: measure on a whole one"
                " (`sudo amd-smi set --compute-partition SPX`)"
            )

    def gpu(index: int) -> AmdGpu:
        handle = handles[index]
        return AmdGpu(smi, handle, _device(smi, handle, index, facts[index]))

    gpus = {index: gpu(index) for index in indices}
    two_dies = any("MI250" in one.device.name for one in gpus.values())
    unseen = [index for index in range(len(handles)) if two_dies and index not in gpus]
    _note_second_dies(gpus, {index: gpu(index) for index in unseen})
    return list(gpus.values())


def _device(smi: Any, handle: Any, index: int, facts: Mapping[str, Any]) -> Device:  # noqa: ANN401
    name = smi.amdsmi_get_gpu_asic_info(handle)["market_name"]
    uuid = smi.amdsmi_get_gpu_device_uuid(handle)
    return Device(uuid, "gpu", name, AmdProbe.name, {**facts, "index": index})


def _facts(smi: Any, handle: Any) -> dict[str, Any]:  # noqa: ANN401
    found = {}
    for fact, query in _FACTS.items():
        # An older binding lacks a function, an older library a query.
        with contextlib.suppress(smi.AmdSmiException, AttributeError, KeyError, TypeError):
            found[fact] = query(smi, handle)
    return {fact: value for fact, value in found.items() if value not in (None, "", "N/A")}


def _note_second_dies(gpus: Mapping[int, AmdGpu], unseen: Mapping[int, AmdGpu]) -> None:
    """Of two dies on one board only the first has a sensor, and it shows what both draw.

    By the library's numbers, where they are neighbours; `unseen` are not shown to the program.
    """
    every = {**gpus, **unseen}
    for index in sorted(every):
        first, second = every[index], every.get(index + 1)
        if second is None or not _is_one_board(first, second):
            continue
        one, other = first.device.facts, second.device.facts
        other["energy_counted_in"] = first.device.id
        why = f"what it draws is in the readings of {first.device.id}, the board's first die"
        if index in unseen:
            why += ", which is not shown to this program"
        other["absent"] = {why: ["power_w", "energy_j"]}
        if index in gpus and index + 1 in unseen:
            one["scope"] = (
                f"the whole board, with its second die {second.device.id}, which is not shown to"
                " this program"
            )
            first.beside = second


def _is_one_board(first: AmdGpu, second: AmdGpu) -> bool:
    other = second.device.facts
    is_silent = not other["has_energy_counter"] and other["power_field"] is None
    has_sensor = first.device.facts["power_field"] is not None
    return "MI250" in second.device.name and is_silent and has_sensor


def _refusal(error: Any) -> str:  # noqa: ANN401  an exception of the binding's
    code = error.get_error_code() if hasattr(error, "get_error_code") else None
    if code == _PERMISSION:
        return (
            "no permission to use the AMD driver: add this user to the groups render and video"
            " (`sudo usermod -a -G render,video $USER`), and log in again"
        )
    if code == _NOT_LOADED:
        return "the AMD driver is not loaded: run `sudo modprobe amdgpu`, and if that fails `dmesg`"
    return f"amdsmi says {error_text(error)}: run `amd-smi list`; what it needs, this needs too"
