"""Writes files and directories atomically: a reader never sees an incomplete one.

Also reads JSON and TOML files, and stores texts in the user's cache directory.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path in the same folder to write to; it replaces `path` if nothing was raised.

    The caller may create a file there, or a directory if `path` is absent or an empty directory.
    OSError if the folder can't be written to. If anything fails, the new content is removed.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield part
        part.replace(path)
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file's content by a text in UTF-8, atomically."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object, *, indent: int | None = 1) -> None:
    """Replace a file's content by a value as JSON, atomically. ValueError for a NaN or infinity."""
    write_text(path, json.dumps(value, indent=indent, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if the file is absent, unreadable or not an object."""
    try:
        document = json.loads(path.read_bytes().decode())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def cache_directory() -> Path:
    """The user's cache directory of ergmeter."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "ergmeter"


def cached_text(name: str, make: Callable[[], str]) -> str:
    """Return a cached file's text; `make` it if it is absent or other users can write to it.

    If nothing can be cached (no home directory, a full disk), `make` is called each time.
    """
    try:
        path = cache_directory() / name
    except RuntimeError:
        return make()
    with suppress(OSError, UnicodeDecodeError):
        about = path.stat()
        owner = getattr(os, "geteuid", lambda: about.st_uid)()  # Windows has no such function
        if about.st_uid == owner and not about.st_mode & 0o022:
            return path.read_text(encoding="utf-8")
    text = make()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_text(path, text)
        path.chmod(0o600)
    return text


def json_number(value: object) -> object:
    """A value for JSON: NaN and infinity, which JSON lacks, become text."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def read_toml(path: Path) -> dict[str, Any]:
    """The document in a TOML file. OSError if it can't be read, ValueError if it is not TOML."""
    document: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    return document


def toml_beside(module: str, name: str) -> dict[str, Any]:
    """The TOML document `name` in the folder of a module; `module`: the module's `__file__`."""
    return read_toml(Path(module).with_name(name))
