"""A scripted libamd_smi.so: AMD GPUs whose answers are known, read through AMD's own binding.

Mocking `amdsmi` tests the mock. Here the binding is AMD's and only the C library under it
is ours (`scripted_amdsmi.c`, whose head explains the file it reads), so functions, structures,
errors and "N/A" are those of the real thing. No AMD GPU has been read with it: what a real one
answers is taken from AMD's documentation and from reports of those who have one.

The binding finds the library by ROCM_HOME, at its import: once a process.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("scripted_amdsmi.c")
SONAME = "libamd_smi.so"

# An MI300X at work: 600 W, its counter at 1 MJ.
RESOLUTION_UJ = 15.3
MI300X: dict[str, Any] = {
    "name": "AMD Instinct MI300X OAM",
    "bdf": "0000:05:00.0",
    "driver": "6.12.12",
    "cap": 750_000_000,
    "current": 600,
    "energy": 65_359_477_124,
    "resolution": RESOLUTION_UJ,
    "used": 100 * 2**30,
    "total": 192 * 2**30,
    "activity": 97,
    "clock": 2100,
    "hotspot": 71,
    "prochot": 0,
    "ppt": 1000,
    "socket_thm": 10,
    "vr_thm": 0,
    "hbm_thm": 0,
}


@dataclass
class Machine:
    """What the library answers: a file that it reads at every call."""

    file: Path
    gpus: list[dict[str, Any]] = field(default_factory=list)
    system: dict[str, Any] = field(default_factory=dict)

    def show(self, *gpus: dict[str, Any], **system: Any) -> None:
        """Play these GPUs. A value of None is one that the GPU lacks."""
        self.gpus, self.system = [dict(gpu) for gpu in gpus], system
        self._write()

    def change(self, index: int, **values: Any) -> None:
        """Move one GPU on."""
        self.gpus[index].update(values)
        self._write()

    def _write(self) -> None:
        lines = [f"* gpus {len(self.gpus)}", *(f"* {k} {v}" for k, v in self.system.items())]
        for index, gpu in enumerate(self.gpus):
            own = {"uuid": default_uuid(index), "serial": default_serial(index), **gpu}
            lines += [f"{index} {key} {value}" for key, value in own.items() if value is not None]
        self.file.write_text("\n".join(lines) + "\n")


def default_uuid(index: int) -> str:
    return f"{index:02x}ff74a1-0000-1000-8000-0123456789ab"


def default_serial(index: int) -> str:
    """As the driver says it; ROCR_VISIBLE_DEVICES has it after "GPU-"."""
    return f"deadbeef0000000{index}"


def build(directory: Path) -> Path:
    """Compile the library to where the binding looks for it; return what ROCM_HOME has to be."""
    library = directory / "lib" / SONAME
    library.parent.mkdir(parents=True, exist_ok=True)
    wrapper = _wrapper().read_text()
    rest = directory / "rest.c"
    rest.write_text(_stubs(wrapper, SOURCE.read_text()))
    table_bytes, counter_at = _metrics_layout(wrapper)
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
    flags += [f"-DMETRICS_BYTES={table_bytes}", f"-DMETRICS_COUNTER_AT={counter_at}"]
    unfinished = library.with_suffix(f".{os.getpid()}")
    subprocess.run(["gcc", *flags, "-o", str(unfinished), str(SOURCE), str(rest)], check=True)
    unfinished.replace(library)
    return directory


def _wrapper() -> Path:
    found = importlib.util.find_spec("amdsmi")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).with_name("amdsmi_wrapper.py")


def _stubs(wrapper: str, source: str) -> str:
    """Every other function that the binding looks up, saying "not supported"."""
    wanted = set(re.findall(rf"_libraries\['{SONAME}'\]\.(\w+)", wrapper))
    ours = set(re.findall(r"^int (\w+)\(", source, re.MULTILINE))
    return "\n".join(f"int {name}(void) {{ return 2; }}" for name in sorted(wanted - ours)) + "\n"


def _metrics_layout(wrapper: str) -> tuple[int, int]:
    """The size of the firmware's table in the binding, and where its residencies begin."""
    names: dict[str, Any] = {"ctypes": ctypes, "Structure": ctypes.Structure}
    for name in (
        "amd_metrics_table_header_t",
        "struct_amdsmi_gpu_xcp_metrics_t",
        "struct_amdsmi_gpu_metrics_t",
    ):
        fields = re.search(
            rf"^(?:struct_)?{name}\._fields_ = (\[.*?^\])", wrapper, re.DOTALL | re.MULTILINE
        )
        assert fields is not None, name
        layout = eval(fields[1], names)
        names[name] = type(name, (ctypes.Structure,), {"_pack_": 1, "_fields_": layout})
    table = names["struct_amdsmi_gpu_metrics_t"]
    return ctypes.sizeof(table), table.accumulation_counter.offset
