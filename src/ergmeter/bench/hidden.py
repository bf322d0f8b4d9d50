"""Which variables of a cell are keys, and how do they reach it without being written down?

The trap: a key in a scenario's `environment` that is copied into plan.json and every cell.json, and
leaves the house with the results. A plan says "(hidden)" in its place. The driver, which has read
the file of scenarios, hands the value to its children in a variable of its own, from which it is
put under its name when the cell starts, and only in cells of that scenario.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ergmeter.bench.cells import Cell

SAID = "(hidden)"
PREFIX = "ERGMETER_HIDDEN_"
# TOKENIZERS_PARALLELISM is none.
_KEY = re.compile(r"key|token(?!i[sz])|secret|passw|passphrase|cred|cookie", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"://[^/@\s]+@")  # who signs in, and how


def is_key(name: str, value: str = "") -> bool:
    """Whether a variable is not to be written down: by its name, or an address with a password."""
    return bool(_KEY.search(name) or _IN_ADDRESS.search(value))


def keys(environment: Mapping[str, str], *, scenario: str) -> dict[str, str]:
    """A scenario's keys, by the variables in which they are handed on."""
    there = environment.items()
    return {_handed(scenario, name): value for name, value in there if is_key(name, value)}


def hand_over(found: Mapping[str, str]) -> None:
    """Have the processes that this one starts find them."""
    os.environ.update(found)


def put(cell: Cell, around: Mapping[str, str]) -> dict[str, str]:
    """The cell's own variables, keys with their values, of what is in the environment around."""
    found = {}
    for name, value in cell.environment.items():
        if value != SAID:
            found[name] = value
            continue
        there = [one for one in (_handed(cell.scenario, name), name) if one in around]
        if not there:
            raise UsageError(
                f"{name} of scenario {cell.scenario!r} is a key, which is not kept in the plan,"
                f" and nothing hands it to this process: set {name} where cells start"
            )
        found[name] = around[there[0]]
    return found


def _handed(scenario: str, name: str) -> str:
    """Two scenarios may have different keys under one name."""
    return f"{PREFIX}{hashlib.sha256(scenario.encode()).hexdigest()[:8]}_{name}"
