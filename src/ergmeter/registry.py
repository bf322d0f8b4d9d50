"""Finds plugins by entry point. Ours are declared in pyproject.toml like anybody's.

Nothing is imported until it is asked for, so a heavy import stands at the top of its leaf module.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from ergmeter.errors import PluginError

Kind = Literal["probes", "importers", "metrics", "flops", "sinks", "launchers"]


@cache
def _entry_points(kind: Kind) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=f"ergmeter.{kind}")}


def names(kind: Kind) -> list[str]:
    """The installed plugins of a kind, by name."""
    return sorted(_entry_points(kind))


def load(kind: Kind, name: str) -> Any:  # noqa: ANN401  each kind has its own protocol, in ports
    """Import one plugin. Raises PluginError with what is there, or with what its import said."""
    found = _entry_points(kind)
    if name not in found:
        known = ", ".join(sorted(found)) or "none; is ergmeter installed (pip install -e .)?"
        raise PluginError(f"no plugin {name!r} among the {kind} (there is: {known})")
    try:
        return found[name].load()
    except ImportError as error:
        extra = _extra(found[name])
        cure = f"; pip install 'ergmeter[{extra}]'" if extra else ""
        raise PluginError(f"the {kind} plugin {name!r} does not load: {error}{cure}") from error


def _extra(entry: EntryPoint) -> str | None:
    """The extra that brings what one of our own plugins needs: it has the plugin's name."""
    if entry.dist is None or entry.dist.name != "ergmeter":
        return None
    return entry.name if entry.name in entry.dist.metadata.get_all("Provides-Extra", []) else None
