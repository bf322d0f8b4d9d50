"""Where is a directory now that was opened under a path? It is known by itself, not by its name.

The trap: a path that leads elsewhere. Somebody renames the results while a cell runs and starts
another bench at the old path; whoever goes by the path then writes into a stranger's cell. So the
directory is held open: its device and inode tell whether the path still leads to it, and Linux
says what it is called by now.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ergmeter.errors import ErgmeterError

if TYPE_CHECKING:
    from types import TracebackType


class Gone(ErgmeterError, OSError):  # noqa: N818  its text says what is
    """The directory was deleted, or moved to where it can't be found: nothing is written."""


class OpenDirectory:
    """Holds a directory open."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        self._held = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        found = os.fstat(self._held)
        self._identity = (found.st_dev, found.st_ino)

    def __enter__(self) -> OpenDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._held)

    @property
    def has_moved(self) -> bool:
        """Whether its path leads elsewhere by now, or nowhere."""
        return not self._is_at(self._path)

    @property
    def path(self) -> Path:
        """Where it is now. Raises Gone if nobody can say."""
        if not self.has_moved:
            return self._path
        try:
            now = Path(f"/proc/self/fd/{self._held}").readlink()
        except OSError:  # not on every system
            now = self._path
        if not self._is_at(now):
            raise Gone(f"{self._path} was moved or deleted; nothing more is written for it")
        return now

    def _is_at(self, path: Path) -> bool:
        """Whether it is there, for all that is known: a file system of the network that does not
        answer says nothing of where it is, and is asked again."""
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return (found.st_dev, found.st_ino) == self._identity
