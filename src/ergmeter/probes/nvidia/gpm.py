"""What do the parts of a GPU do? From its hardware counters, which NVML calls GPM.

The trap: taking a mean for a moment. GPM counts between two of its own samples, so each figure is
the mean over the time between two readings, and a reading says how long that was. Nothing is lost
by reading seldom, and the mean over a window weighs each figure with its time.

Hopper and newer have it; on an H200 a reading takes 0.4 ms and needs no root. The shares are
percent there and the rates MiB/s; here they are fractions and bytes per second.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import pynvml

from ergmeter.errors import NotMeasurable
from ergmeter.records import Sample

# NVIDIA asks for so much at the least between two samples: below it, they may hold the same counts.
SHORTEST_S = 0.1

_FRAC_PER_PERCENT = 0.01
_BYTES_PER_MIB = float(1 << 20)

_METRICS: dict[int, tuple[str, float]] = {
    pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL: ("graphics_frac", _FRAC_PER_PERCENT),
    pynvml.NVML_GPM_METRIC_SM_UTIL: ("sm_frac", _FRAC_PER_PERCENT),
    pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: ("occupancy_frac", _FRAC_PER_PERCENT),
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: ("tensor_frac", _FRAC_PER_PERCENT),
    pynvml.NVML_GPM_METRIC_HMMA_TENSOR_UTIL: ("tensor_half_frac", _FRAC_PER_PERCENT),
    pynvml.NVML_GPM_METRIC_IMMA_TENSOR_UTIL: ("tensor_int_frac", _FRAC_PER_PERCENT),
    pynvml.NVML_GPM_METRIC_DFMA_TENSOR_UTIL: ("tensor_double_frac", _FRAC_PER_PERCENT),
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: ("dram_frac", _FRAC_PER_PERCENT),
    pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: ("pcie_sent_bytes_per_s", _BYTES_PER_MIB),
    pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: ("pcie_received_bytes_per_s", _BYTES_PER_MIB),
    pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC: ("nvlink_sent_bytes_per_s", _BYTES_PER_MIB),
    pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC: (
        "nvlink_received_bytes_per_s",
        _BYTES_PER_MIB,
    ),
}

_NO_GPM = "this GPU has no hardware counters that NVML reads (GPM): Hopper and newer have them"
_OLD_DRIVER = "the NVIDIA driver is too old to read hardware counters (GPM): update it"
_NOT_ALLOWED = (
    "no permission to read hardware counters (GPM): run as root, or load the driver with"
    " NVreg_RestrictProfilingToAdminUsers=0"
)


class Counters:
    """The hardware counters of one GPU. Raises NotMeasurable where they can't be read.

    Not of a MIG instance: whether its shares are of the instance or of the board is not documented.
    """

    def __init__(self, handle: object) -> None:
        self._handle = handle
        self._earlier: Any = None
        self._later: Any = None
        try:
            if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                raise NotMeasurable(_NO_GPM)
            self._earlier = pynvml.nvmlGpmSampleAlloc()
            self._later = pynvml.nvmlGpmSampleAlloc()
            self._since_ns = self._sampled(self._earlier)
        except pynvml.NVMLError as error:
            self.close()
            raise NotMeasurable(_why(error)) from error
        # Made once: it is 20 kB.
        self._wanted = pynvml.c_nvmlGpmMetricsGet_t(version=pynvml.NVML_GPM_METRICS_GET_VERSION)
        self._wanted.numMetrics = len(_METRICS)
        for place, metric in enumerate(_METRICS):
            self._wanted.metrics[place].metricId = metric

    def read(self, device: str) -> Sample | None:
        """What was done since the last reading; None if that is too short ago.

        Raises NVMLError. The time until then is in the next reading that succeeds.
        """
        if time.monotonic_ns() - self._since_ns < SHORTEST_S * 1e9:
            return None
        t_ns = self._sampled(self._later)
        self._wanted.sample1, self._wanted.sample2 = self._earlier, self._later
        pynvml.nvmlGpmMetricsGet(self._wanted)
        span_s = (t_ns - self._since_ns) / 1e9
        self._earlier, self._later, self._since_ns = self._later, self._earlier, t_ns
        found: dict[str, Any] = {}
        for place, (field, scale) in enumerate(_METRICS.values()):
            metric = self._wanted.metrics[place]
            # Metrics fail one by one, inside a call that succeeds.
            if metric.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(metric.value):
                found[field] = metric.value * scale
        return Sample(t_ns, device, activity_s=span_s, **found) if found else None

    def close(self) -> None:
        """Give the samples back."""
        for sample in (self._earlier, self._later):
            if sample is not None:
                with contextlib.suppress(pynvml.NVMLError):  # of a GPU that was lost
                    pynvml.nvmlGpmSampleFree(sample)
        self._earlier = self._later = None

    def _sampled(self, into: object) -> int:
        """Take a sample; when it was taken."""
        before_ns = time.monotonic_ns()
        pynvml.nvmlGpmSampleGet(self._handle, into)
        return (before_ns + time.monotonic_ns()) // 2


def _why(error: pynvml.NVMLError) -> str:
    if isinstance(error, pynvml.NVMLError_FunctionNotFound):
        return _OLD_DRIVER
    if isinstance(error, pynvml.NVMLError_NoPermission):
        return _NOT_ALLOWED
    if isinstance(error, pynvml.NVMLError_NotSupported):
        return _NO_GPM
    return f"its hardware counters can't be read (GPM): NVML says {error}"
