"""Where the built-in models are kept between tests: to make one takes a process and seconds."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of a session; whoever is first makes a model for the others."""
    base = tmp_path_factory.getbasetemp()
    found = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "models"
    found.mkdir(exist_ok=True)
    return found
