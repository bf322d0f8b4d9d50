"""Has this file been counted before? A small JSON file for each, in the user's cache directory.

Modules in a compiler's cache never change, so a second look at one is wasted. A file is taken for
the same if its path, size and time of change are; a change of how we count makes all memos void.
Errors are not remembered: the file may be written still.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, fields
from functools import lru_cache
from importlib.util import source_hash
from pathlib import Path
from typing import Any, TypeAlias

from ergmeter.hlo.compiled import cache_directory
from ergmeter.hlo.config import Kernel
from ergmeter.hlo.result import ModuleCount


def sources() -> list[Path]:
    """All that counts, in both languages."""
    here = Path(__file__).parent
    return sorted([*here.glob("*.py"), *here.glob("*.c")])


@lru_cache(maxsize=1)
def _version() -> str:
    """Of the code that counts: a hash of all of it, since nobody remembers to raise a number."""
    return source_hash(b"".join(source.read_bytes() for source in sources())).hex()


Key: TypeAlias = "list[object] | None"


def seen(path: Path) -> Key:
    """What tells that a file is the same as before; None where it can't be looked at."""
    try:
        state = path.stat()
    except OSError:
        return None
    return [str(path.absolute()), state.st_size, state.st_mtime_ns, _version()]


class Memo:
    """Counts of earlier runs, in a directory."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or cache_directory() / "hlo"

    def recall(self, path: Path) -> ModuleCount | None:
        """The count of this very file, if it is known."""
        try:
            kept = json.loads(self._place(path).read_bytes())
            return restored(kept["count"]) if kept["key"] == seen(path) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, path: Path, key: Key, count: ModuleCount) -> None:
        """Remember a count, unless the file is no longer what it was when it was opened."""
        if key is None or key != seen(path):
            return
        place = self._place(path)
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part = place.with_name(f"{place.name}.{os.getpid()}")
            part.write_text(json.dumps({"key": key, "count": asdict(count)}))
            part.replace(place)

    def _place(self, path: Path) -> Path:
        name = source_hash(os.fsencode(path.absolute())).hex()
        return self._directory / name[:2] / f"{name}.json"


def restored(kept: dict[str, Any]) -> ModuleCount:
    """A count from what `asdict` and JSON have made of it."""
    if set(kept) != {one.name for one in fields(ModuleCount)}:
        raise ValueError("another version's memo")
    kernels = tuple(Kernel(**one) for one in kept.pop("kernels"))
    loops, branches = (tuple(kept.pop(name)) for name in ("unknown_loops", "uneven_branches"))
    return ModuleCount(kernels=kernels, unknown_loops=loops, uneven_branches=branches, **kept)
