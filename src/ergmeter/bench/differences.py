"""What makes a cell another one than those that are there already?

The trap: "4 of 4 cells are not in the plan". The id is a digest, so it says that something changed
and not what; and an option such as `--memory` changes every cell without being one of its settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ergmeter.bench import erg_train
from ergmeter.bench.cells import Cell

# What `--memory` changes of a cell, in erg train's file and in sft_trainer's command.
_OF_MEMORY = ("metrics.hf_memory", "--skip_memory_metrics")
_SHOWN = 3


def difference(cell: Cell, others: Iterable[Cell]) -> str:
    """The names of what it has otherwise than the one among the others that is most like it."""
    new = list(_parts(cell))
    unlike = [[*_unlike(new, list(_parts(other)))] for other in others]
    nearest = min(unlike, key=lambda parts: sum(map(len, parts)))
    # A setting is also in the command or a file: what comes first says it all.
    names = next((part for part in nearest if part), ["what they run"])
    said = list(dict.fromkeys("--memory" if name in _OF_MEMORY else name for name in names))
    return ", ".join(said[:_SHOWN]) + (f" and {len(said) - _SHOWN} more" if said[_SHOWN:] else "")


def _parts(cell: Cell) -> Iterator[Mapping[str, Any]]:
    """All that its id is made of, by names that tell something, in pieces by how much they tell."""
    yield {"another scenario": cell.scenario}
    yield cell.settings
    yield {f"environment {name}": value for name, value in cell.environment.items()}
    yield {"launch": (cell.launch, cell.launch_options, cell.nodes)}
    words: dict[str, tuple[str, ...]] = {}
    flag = "the command"
    for word in cell.command:
        flag = word if word.startswith("--") else flag
        words[flag] = (*words.get(flag, ()), word)
    files = [_flat(erg_train.parsed(text)) for text in cell.files.values()]
    yield {**words, **{name: value for one in files for name, value in one.items()}}
    yield {"the repeat": cell.repeat}


def _unlike(new: list[Mapping[str, Any]], old: list[Mapping[str, Any]]) -> Iterator[list[str]]:
    for one, other in zip(new, old, strict=True):
        yield [name for name in {**one, **other} if one.get(name) != other.get(name)]


def _flat(value: Any, name: str = "") -> dict[str, Any]:  # noqa: ANN401  of YAML
    """`{"metrics.warmup_s": 1.0}` of nested keys; a seed is the repeat's."""
    if not isinstance(value, dict):
        return {} if name == "seed" else {name: value}
    found: dict[str, Any] = {}
    for key, one in value.items():
        found |= _flat(one, f"{name}.{key}" if name else str(key))
    return found
