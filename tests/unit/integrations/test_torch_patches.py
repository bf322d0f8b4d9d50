"""Modules that other threads import while we look for who holds a function."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from ergmeter.integrations.torch import patches


class Growing(dict[str, Any]):
    """As names are in it while it is gone through, one more comes, as by an import elsewhere."""

    def items(self) -> Any:
        for one in super().items():
            self[f"imported_{len(self)}"] = None
            yield one


def test_modules_that_come_while_they_are_gone_through_are_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def save() -> str:
        return "saved"

    def timed() -> str:
        return "timed"

    holder = ModuleType("holder")
    holder.save = save  # type: ignore[attr-defined]
    home = SimpleNamespace(save=save, other=1)
    save.__module__ = "home"
    with pytest.raises(RuntimeError, match="changed size"):
        list(Growing(a=1, b=2).items())
    loaded = Growing({"builtins": SimpleNamespace(), "home": home, "holder": holder})
    monkeypatch.setattr(patches, "sys", SimpleNamespace(modules=loaded))
    patches._replace(holder, "save", save, timed)
    assert holder.save is timed
    assert home.save is timed
    assert home.other == 1
