"""Which CPU is this? For the probes that name one; itself it reads nothing over time.

The trap: `platform.processor()` is empty or just the architecture on most Linux systems, so the
kernel's own list comes first. ARM kernels have no model name there.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path


def cpu_model() -> str:
    """The CPU's model, or the nearest thing the system says."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()
