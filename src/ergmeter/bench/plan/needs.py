"""Does this interpreter have what the cells import? Asked before the first of them starts.

The trap: a matrix of forty cells that fail one by one, each after its cool-down, for one package
that nobody installed. Nothing is imported for it: whether a package is there, its files tell.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterable, Iterator

from ergmeter.bench.plan import erg_train
from ergmeter.bench.plan.cells import PYTHON, UNSLOTH_PYTHON, Cell, unsloth_python

_ALWAYS = ("torch", "transformers", "accelerate")
_OF_EXTRA = "pip install 'ergmeter[train]', or in a clone pip install '.[train]'"


def lack(cells: Iterable[Cell], *, has_gpus: bool) -> str:
    """What is missing for these cells and how it is had, in one line; empty if nothing is."""
    told: dict[str, list[str]] = {}
    for cell in {one.group: one for one in cells}.values():  # repeats need the same
        # Who sets the path of a cell's modules knows what is on it; we do not.
        if not cell.skip and "PYTHONPATH" not in cell.environment:
            for need, way in _needs(cell, has_gpus=has_gpus):
                told.setdefault(way, []).append(need)
    lines = []
    for way, needs in told.items():
        missing = [name for name in dict.fromkeys(needs) if not _is_there(name)]
        if missing:
            lines.append(f"{', '.join(missing)}: {way}")
    return f"for these cells {sys.executable} lacks {'; '.join(lines)}" if lines else ""


def _needs(cell: Cell, *, has_gpus: bool) -> Iterator[tuple[str, str]]:
    """The modules that it imports, each with how it is installed."""
    if cell.command[0] == UNSLOTH_PYTHON:
        yield unsloth_python(), "`./dev unsloth` makes it, ERGMETER_UNSLOTH_PYTHON names another"
    if cell.launch != "plain":
        yield "torch", _OF_EXTRA
    if cell.launch == "accelerate" and has_gpus:  # without them its ranks are torchrun's
        yield "accelerate", _OF_EXTRA
    if cell.command[0] != PYTHON:
        return
    if erg_train.FILE in cell.files:
        for name in (*_ALWAYS, *_asked(cell.files[erg_train.FILE])):
            yield name, _OF_EXTRA
    elif "tuning.sft_trainer" in cell.command:
        yield (
            "tuning",
            "install fms-hf-tuning in an environment of its own, and name its Python:"
            " --command '/path/of/python -m tuning.sft_trainer {arguments}'",
        )


def _asked(text: str) -> Iterator[str]:
    """What a configuration of `erg train` needs beyond."""
    said = erg_train.parsed(text)
    tuning, train = said.get("tuning", {}), said.get("train", {})
    optim = str(train.get("optim", ""))
    if tuning.get("mode", "full") != "full":
        yield "peft"
    if tuning.get("bits") or any(word in optim for word in ("bnb", "8bit", "paged")):
        yield "bitsandbytes"
    if train.get("trainer") == "trl":
        yield "trl"


def _is_there(name: str) -> bool:
    if "/" in name:
        return shutil.which(name) is not None
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # loaded, and without a word of where from
        return True
