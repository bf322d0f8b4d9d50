"""The CPU's model name, for the probes that name one.

`platform.processor()` is empty or only the architecture on most Linux systems, so /proc/cpuinfo
comes first. ARM kernels have no model name there.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path


def cpu_model() -> str:
    """The CPU's model name, or the architecture where the system has none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()
