"""What is a configuration called? One name for it, in reports, comparisons and the gate.

The trap: a name that says less than what tells two cells apart, or two names for one cell. A name
is made of the settings that vary, and of a bench's own ones where the common ones do not do.
"""

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
NOT_TOLD = ("max_seq_len", "training_data_path")
_BARE = ("scenario", "framework_config", "model_name_or_path", "peft_method", "torch_dtype")
_SHORT = {"num_gpus": "gpus", "per_device_train_batch_size": "batch", "max_seq_length": "length"}


def repeats_of(row: Mapping[str, Any]) -> tuple[object, object]:
    """What all repeats of one configuration share. The scenario is a part of it.

    Two scenarios may run one command; a row without an id is a configuration by itself.
    """
    return (row["group"], row["scenario"]) if row["group"] else (row["index"], None)


def telling(differ: Collection[str], configurations: Iterable[Mapping[str, Any]]) -> list[str]:
    """Of the settings that differ, those that a configuration is called by."""
    found = [name for name in COMMON if name in differ]
    if {"per_device_train_batch_size", "effective_batch_size"} <= set(found):
        found.remove("effective_batch_size")  # it follows from the other, but for accumulation
    several = list(configurations)
    told = {tuple(str(row.get(name)) for name in found) for row in several}
    if len(told) < len(several):
        found += sorted(set(differ) - set(COMMON) - set(NOT_TOLD))
    return found


def name(row: Mapping[str, Any], shown: Sequence[str]) -> str:
    """A configuration by these settings; empty where it has none of them."""
    parts = [
        str(row[one]) if one in _BARE else f"{_SHORT.get(one, one)} {row[one]}"
        for one in shown
        if row.get(one) not in (None, "")
    ]
    return ", ".join(parts)


def setting(name: str) -> str:
    """What a setting is called in the head of a table."""
    return _SHORT.get(name, name).replace("_", " ")
