"""What transformers says where a configuration does not: defaults of fields, heads of classes.

A published configuration leaves out what equals its class's default: LLaVA 1.5 does not say how
wide its language model is, SmolLM3 not that its head is tied. transformers.json has the defaults of
every field that a reader looks at, as the class writes them, and what head each class has.
`scripts/transformers_table.py` writes it; a test compares it with the installed transformers.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

# Families of remote code whose configuration class is another family's.
_SAME_CLASS = {"kimi_k2": "deepseek_v3"}


@cache
def _table() -> dict[str, Any]:
    file = resources.files("ergmeter.flops") / "transformers.json"
    table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return table


def transformers_version() -> str:
    """The version of transformers that the tables were made from."""
    return str(_table()["version"])


def defaults_of(model_type: str) -> dict[str, Any]:
    """What the configuration class of a family takes for a field that is left out.

    A field whose default is None is not in it: the class derives it from other fields.
    """
    found: dict[str, Any] = _table()["defaults"].get(_SAME_CLASS.get(model_type, model_type), {})
    return found


def aliases_of(model_type: str) -> dict[str, list[str]]:
    """Other names under which the configuration class of a family takes a field."""
    found: dict[str, list[str]] = _table()["aliases"].get(model_type, {})
    return found


@cache
def _heads() -> dict[str, str]:
    return {name: head for head, names in _table()["heads"].items() for name in names}


def head_of(architecture: str) -> str | None:
    """The head that a class of transformers has, or None where its mappings do not list it."""
    return _heads().get(architecture)
