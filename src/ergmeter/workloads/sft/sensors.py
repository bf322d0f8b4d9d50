"""Is there a sensor for the energy? Said once, in the words the guide of SFT-Play lists.

The trap: a warning that can never appear. The original swallowed the failed import and wrote 0 J as
if the training had been free. Here the three situations of its guide are looked for before the
training begins, each with what to do; the training goes on and its energy cells stay empty.
"""

from __future__ import annotations

_HEAD = "[train] Warning: Could not import metrics: "
_UNMEASURED = "training goes on, the GPU's energy is not measured"


def warning() -> str | None:
    """What keeps the GPU's sensors from being read; None where nothing does."""
    try:
        import pynvml  # noqa: PLC0415  its absence is one of the answers
    except ImportError:
        return f"{_HEAD}No module named 'pynvml' ({_UNMEASURED}: pip install nvidia-ml-py)"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
            todo = "give this user read and write access to /dev/nvidia*"
            return f"{_HEAD}Insufficient permissions ({_UNMEASURED}: {todo})"
        todo = (
            "check the NVIDIA driver with nvidia-smi; without an NVIDIA GPU this is as it must be"
        )
        return f"{_HEAD}NVML initialization failed ({error}; {_UNMEASURED}: {todo})"
    pynvml.nvmlShutdown()
    return None
