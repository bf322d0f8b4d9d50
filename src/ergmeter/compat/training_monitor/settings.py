"""What a TrainingMonitor is told by its configuration, and where each answer was found.

Two traps. The documented key, `monitoring.flops_profile_freq`, was never read; the code looked at
`monitor.freq`. Here every spelling is read, the nearest to the caller first. And a batch of 32 for
a configuration that says nothing: here it is not known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Config: TypeAlias = Mapping[str, Any]

_PROFILE_FREQ = 500
_PROFILE_KEYS = (
    "monitoring.flops_profile_freq",
    "monitor.freq.flops_profile_freq",
    "monitor.flops_profile_freq",
)
# How often the original did what, in steps.
_FREQUENCIES = {"training_log_freq": 10, "perf_log_freq": 10, "local_save_freq": 200}


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """The answers. None: the configuration does not say."""

    flops_profile_freq: int
    flops_profile_freq_from: str
    freq: Mapping[str, int]
    micro_steps: int  # forward passes a step: gradient accumulation
    batch_size: int | None  # sequences of a step, of all ranks
    batch_size_from: str
    seq_length: int | None
    wandb: Config

    @classmethod
    def of(
        cls, config: Config | None, *, flops_profile_freq: int | None, world: int
    ) -> MonitorSettings:
        """Read a configuration. An argument comes before what is written."""
        config = config if isinstance(config, Mapping) else {}
        deepspeed = _deepspeed(config)
        asked, source = _profile_freq(config, flops_profile_freq)
        freq = {
            n: _whole_number(_at(config, f"monitor.freq.{n}")) or d for n, d in _FREQUENCIES.items()
        }
        micro_steps = (
            _whole_number(deepspeed.get("gradient_accumulation_steps"))
            or _whole_number(_at(config, "training.gradient_accumulation_steps"))
            or _whole_number(config.get("gradient_accumulation_steps"))
            or 1
        )
        batch, whence = _batch(config, deepspeed, micro_steps, world)
        return cls(
            flops_profile_freq=asked,
            flops_profile_freq_from=source,
            freq=freq,
            micro_steps=micro_steps,
            batch_size=batch,
            batch_size_from=whence,
            seq_length=_whole_number(_at(config, "model.max_sequence_length")),
            wandb=_mapping(config.get("wandb")),
        )


def _profile_freq(config: Config, given: int | None) -> tuple[int, str]:
    if _whole_number(given):
        return int(given or 0), "the argument"
    for key in _PROFILE_KEYS:
        found = _whole_number(_at(config, key))
        if found:
            return found, key
    return _PROFILE_FREQ, "the default"


def _batch(
    config: Config, deepspeed: Config, micro_steps: int, world: int
) -> tuple[int | None, str]:
    """Sequences of a step: as DeepSpeed says, as its parts multiply, or as the root says."""
    whole = _whole_number(deepspeed.get("train_batch_size"))
    if whole:
        return whole, "deepspeed.train_batch_size"
    micro = _whole_number(deepspeed.get("train_micro_batch_size_per_gpu"))
    if micro:
        return micro * micro_steps * world, f"deepspeed: {micro} x {micro_steps} x {world} ranks"
    root = _whole_number(config.get("train_batch_size"))
    return (root, "train_batch_size") if root else (None, "not in the configuration")


def _deepspeed(config: Config) -> Config:
    """DeepSpeed's own configuration: here, or in the file that is named here."""
    found = config.get("deepspeed")
    if isinstance(found, str | Path):
        try:
            found = json.loads(Path(found).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
    return _mapping(found)


def _at(config: Config, key: str) -> Any:  # noqa: ANN401  whatever stands there
    found: Any = config
    for part in key.split("."):
        found = _mapping(found).get(part)
    return found


def _mapping(value: object) -> Config:
    return value if isinstance(value, Mapping) else {}


def _whole_number(value: object) -> int | None:
    """A number of 1 or more, also one that is written as text. DeepSpeed's "auto" is none."""
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return None
    return number if number >= 1 else None
