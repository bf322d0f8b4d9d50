"""Names of configurations, by the settings in which they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

COMMON = (
    *("scenario", "framework_config", "model_name_or_path", "num_gpus", "nodes"),
    *("peft_method", "torch_dtype", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "packing", "max_seq_length", "learning_rate"),
    "effective_batch_size",
)
# The one is above, the others follow from what is told.
UNNAMED = ("max_seq_len", "training_data_path")
_BARE = ("scenario", "framework_config", "model_name_or_path", "peft_method", "torch_dtype")
_SHORT = {"num_gpus": "gpus", "per_device_train_batch_size": "batch", "max_seq_length": "length"}


def naming_settings(
    differ: Collection[str], configurations: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Of the settings that differ, those that a configuration is called by."""
    chosen = [name for name in COMMON if name in differ]
    if {"per_device_train_batch_size", "effective_batch_size"} <= set(chosen):
        chosen.remove("effective_batch_size")  # it follows from the other, but for accumulation
    several = list(configurations)
    distinct = {tuple(str(row.get(name)) for name in chosen) for row in several}
    if len(distinct) < len(several):
        chosen += sorted(set(differ) - set(COMMON) - set(UNNAMED))
    return chosen


def configuration_name(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """A configuration by these settings; empty where it has none of them."""
    parts = [
        str(row[setting]) if setting in _BARE else f"{_SHORT.get(setting, setting)} {row[setting]}"
        for setting in names
        if row.get(setting) not in (None, "")
    ]
    return ", ".join(parts)


def setting_title(name: str) -> str:
    """What a setting is called in the head of a table."""
    return _SHORT.get(name, name).replace("_", " ")
