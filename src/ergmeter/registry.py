"""Finds plugins by entry point. The built-in ones are declared in pyproject.toml like any other.

A plugin is imported only when it is loaded, so its module may have heavy imports at the top.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from ergmeter.errors import PluginError, UsageError, suggestion

Kind = Literal["probes", "importers", "metrics", "flops", "sinks", "launchers", "entries"]


@cache
def _installed() -> Any:  # noqa: ANN401  of two classes until Python 3.12
    """The entry points of all packages; cached, as reading them takes some 50 ms."""
    return entry_points()


@cache
def _entry_points(kind: Kind) -> dict[str, EntryPoint]:
    points = {entry.name: entry for entry in _installed().select(group=f"ergmeter.{kind}")}
    if not points:
        raise PluginError(
            f"no {kind} are declared: ergmeter is imported but not installed, or was installed"
            " from older code; pip install it again (pip install -e . in a clone)"
        )
    return points


def names(kind: Kind) -> list[str]:
    """The installed plugins of a kind, by name."""
    return sorted(_entry_points(kind))


def check_name(kind: Kind, noun: str, name: str) -> None:
    """Raise UsageError if a plugin is not installed, with the closest name and all names."""
    available = names(kind)
    if name not in available:
        hint = suggestion(name, available, "; did you mean {!r}?", cutoff=0.4)
        raise UsageError(f"no {noun} {name!r}{hint} (there are: {', '.join(available)})")


def load(kind: Kind, name: str) -> Any:  # noqa: ANN401  each kind has its own protocol, in ports
    """Import a plugin. If that fails, PluginError lists the available ones or the import error."""
    points = _entry_points(kind)
    if name not in points:
        available = ", ".join(sorted(points))
        raise PluginError(f"no plugin {name!r} among the {kind} (there is: {available})")
    try:
        return points[name].load()
    except ImportError as error:
        extra = _extra(points[name])
        cure = f"; pip install 'ergmeter[{extra}]'" if extra else ""
        raise PluginError(f"the {kind} plugin {name!r} does not load: {error}{cure}") from error


def library(name: str, what: str, package: str) -> Any:  # noqa: ANN401  a module
    """An optional library. PluginError with what needs it, and the package to install."""
    try:
        return import_module(name)
    except ImportError as error:
        raise PluginError(f"{what} needs {name}: pip install {package}") from error


def declaring(kind: Kind, **declared: object) -> tuple[str, ...]:
    """The names of plugins whose attributes have these values. Imports all plugins of the kind."""
    plugins = []
    for name in names(kind):
        with suppress(PluginError):  # opening it by name reports the error
            plugin = load(kind, name)
            if all(getattr(plugin, key, None) == value for key, value in declared.items()):
                plugins.append(name)
    return tuple(plugins)


def _extra(entry: EntryPoint) -> str | None:
    """The pip extra that installs a built-in plugin's requirements; it has the plugin's name."""
    if entry.dist is None or entry.dist.name != "ergmeter":
        return None
    return entry.name if entry.name in entry.dist.metadata.get_all("Provides-Extra", []) else None
