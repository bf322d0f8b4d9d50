"""The workloads of commands that measure, and the libraries that they need."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from ergmeter.errors import PluginError

INTERRUPTED = 130  # what a shell gives a program that Ctrl-C ended


def workload(name: str, *, what: str) -> ModuleType:
    """Import a module of ergmeter.workloads. PluginError if torch is not installed."""
    with needing("torch", what=what, extra="torch"):
        return importlib.import_module(f"ergmeter.workloads.{name}")


@contextmanager
def needing(*libraries: str, what: str, extra: str) -> Iterator[None]:
    """Raise PluginError, with what to install, if the body lacks one of these libraries."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in libraries:
            raise
        raise PluginError(f"{what} needs {missing}: pip install 'ergmeter[{extra}]'") from error
