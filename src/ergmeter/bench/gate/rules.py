"""What may change, in which direction, and by how much? `tokens_per_s -3%`, `loss +-1%`.

The trap: a threshold without a direction, under which a benchmark that became faster is an
outlier. The sign says which way is not wanted: `-3%` lets a figure fall by 3 %, and rise at will.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.stats.ratio import Scale

# Names to columns: the first that both sides have, so that like is held against like.
METRICS: dict[str, tuple[str, ...]] = {
    "tokens_per_s": ("real_tokens_per_s", "computed_tokens_per_s"),
    "tokens_per_s_per_device": (
        "real_tokens_per_s_per_device",
        "computed_tokens_per_s_per_device",
    ),
    "real_tokens_per_s": ("real_tokens_per_s",),
    "computed_tokens_per_s": ("computed_tokens_per_s",),
    "samples_per_s": ("samples_per_s",),
    "steps_per_s": ("steps_per_s",),
    "step_time": ("step_median_s",),
    "runtime": ("runtime_s",),
    "loss": ("loss",),
    "eval_loss": ("eval_loss",),
    "peak_memory": (
        *("memory_hf_peak_bytes", "memory_allocator_peak_bytes", "memory_nvidia_peak_bytes"),
        *("memory_nvidia_mean_bytes", "memory_hf_seed_bytes", "memory_device_peak_bytes"),
        "memory_process_peak_bytes",
    ),
    "nvidia_memory": ("memory_nvidia_mean_bytes",),
    "hf_memory": ("memory_hf_peak_bytes",),
    "mfu": ("mfu_frac",),
    "whole_run_tokens_per_s": ("whole_run_tokens_per_s",),
    "whole_run_mfu": ("whole_run_mfu_frac",),
    "whole_run_joules_per_token": ("whole_run_joules_per_token",),
    "joules_per_token": ("joules_per_token",),
    "energy": ("energy_j",),
}
_ALIASES = {
    "train_tokens_per_second": "tokens_per_s_per_device",
    "train_loss": "loss",
    "train_runtime": "runtime",
    "train_samples_per_second": "samples_per_s",
    "tok_per_s": "tokens_per_s",
    "mem_peak_torch_mem_alloc_in_bytes": "hf_memory",
    "mem_nvidia_mem_reserved": "nvidia_memory",
}
_WRITTEN = re.compile(r"\s*([\w.]+)\s+(\+-|-\+|±|\+|-)\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(%?)\s*")


@dataclass(frozen=True, slots=True)
class GateRule:
    """How far a figure may fall and rise: as a share of the reference's, or in its own unit."""

    metric: str
    fall: float | None
    rise: float | None
    scale: Scale

    @property
    def columns(self) -> tuple[str, ...]:
        """Where the figure may be found, the best first."""
        return METRICS[self.metric]

    @property
    def low(self) -> float | None:
        """The lowest new value that is allowed, as a ratio or a difference."""
        if self.fall is None:
            return None
        return 1.0 - self.fall if self.scale == "ratio" else -self.fall

    @property
    def high(self) -> float | None:
        """The highest."""
        if self.rise is None:
            return None
        return 1.0 + self.rise if self.scale == "ratio" else self.rise

    @property
    def is_two_sided(self) -> bool:
        """Whether both ways are limited."""
        return self.fall is not None and self.rise is not None

    def __str__(self) -> str:
        size = self.fall if self.fall is not None else self.rise
        sign = "+-" if self.is_two_sided else "-" if self.rise is None else "+"
        percent = self.scale == "ratio"
        return f"{self.metric} {sign}{(size or 0.0) * (100 if percent else 1):g}{'%' * percent}"


DEFAULTS = ("tokens_per_s -3%", "peak_memory +2%", "loss +-1%")


def rule(text: str) -> GateRule:
    """A rule as it is written. Raises UsageError with what was meant, as far as can be guessed."""
    found = _WRITTEN.fullmatch(text)
    if not found:
        raise UsageError(
            f"no rule: {text!r}; one is a metric, a sign and a size: 'tokens_per_s -3%',"
            " 'peak_memory +2%', 'loss +-0.01'"
        )
    name, sign, size, percent = found.groups()
    value = float(size) / 100.0 if percent else float(size)
    if percent and value >= 1.0 and sign != "+":
        raise UsageError(f"{text!r} lets the figure fall by all of it: give less than 100 %")
    return GateRule(
        metric_named(name),
        fall=None if sign == "+" else value,
        rise=None if sign == "-" else value,
        scale="ratio" if percent else "difference",
    )


def metric_named(name: str) -> str:
    """A metric of rules and comparisons, by any name it has. UsageError with the nearest else."""
    found = _ALIASES.get(name, name)
    if found in METRICS:
        return found
    near = difflib.get_close_matches(name, [*METRICS, *_ALIASES], n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(METRICS)}"
    raise UsageError(f"no metric {name!r}; {hint}")


def share(text: str) -> float:
    """A share as people write it: 1%, 0.01."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(%?)\s*", text)
    if not found:
        raise UsageError(f"no share: {text!r}; write it as 1% or 0.01")
    return float(found[1]) / (100.0 if found[2] else 1.0)


def noise(texts: Sequence[str]) -> dict[str, float]:
    """What was said of the noise of one run: by metric, and under "" for all of them."""
    found: dict[str, float] = {}
    for text in texts:
        name, is_named, size = text.rpartition("=")
        value = share(size)
        if value <= 0.0:
            raise UsageError(f"noise is a share above 0, such as 1%; got {text!r}")
        found[metric_named(name.strip()) if is_named else ""] = value
    return found
