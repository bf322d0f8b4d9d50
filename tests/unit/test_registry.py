"""Plugins by entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoints

import pytest

from ergmeter import registry
from ergmeter.errors import PluginError


def test_a_package_that_is_imported_but_not_installed_names_the_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of the sources on the path has no metadata, so no entry points."""
    registry._entry_points.cache_clear()
    monkeypatch.setattr(registry, "_installed", lambda: EntryPoints(()))
    with pytest.raises(PluginError, match=r"pip install it again \(pip install -e \. in a clone"):
        registry.names("metrics")
