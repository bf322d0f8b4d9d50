"""A file that several processes add to, by whole pieces.

The traps: two processes that start together both write the head of a new file; a piece written in
two calls has another process's piece in its middle; a full disk leaves half a piece, and the next
one is glued to it. So a piece is one `write` at the file's end, under a lock, and one that did not
go in whole is taken out again.

`flock` and not `lockf`: the latter's locks are the process's own, so two threads would not exclude
each other. On NFS the kernel makes the one of the other.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class AppendedFile:
    """An open file, to be read from its start and written at its end."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o666)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the other processes out meanwhile."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    @property
    def size_bytes(self) -> int:
        """How long it is now."""
        return os.fstat(self._descriptor).st_size

    def append(self, piece: bytes) -> None:
        """Write all of it, or none. Held under the lock."""
        before_bytes = self.size_bytes
        written_bytes = os.write(self._descriptor, piece)
        if written_bytes != len(piece):
            os.ftruncate(self._descriptor, before_bytes)
            raise OSError(errno.ENOSPC, "no space for a whole row", str(self.path))

    def append_line(self, line: str) -> None:
        """Write a line, on one of its own also where the last writer was cut off in its line."""
        size_bytes = self.size_bytes
        is_cut = size_bytes and os.pread(self._descriptor, 1, size_bytes - 1) != b"\n"
        self.append(("\n" if is_cut else "").encode() + line.encode() + b"\n")

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)
