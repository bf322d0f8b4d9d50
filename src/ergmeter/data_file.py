"""Reads TOML files: the tables of the package, beside the modules that use them, and the user's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(path: Path) -> dict[str, Any]:
    """The document in a file. OSError where it can't be read, ValueError where it is no TOML."""
    document: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    return document


def toml_beside(module: str, name: str) -> dict[str, Any]:
    """The document in the file `name` in the folder of `module`, which is a module's `__file__`."""
    return read_toml(Path(module).with_name(name))
