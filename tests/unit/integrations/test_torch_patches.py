"""Modules that other threads import while we look for who holds a function."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

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


def test_modes_set_inside_a_compiled_function_break_no_graph() -> None:
    """Evaluation mode is watched without a clock, which dynamo can't trace."""
    patches.patch_torch()
    model = torch.nn.Linear(2, 2)

    def step(x: Any) -> Any:
        model.train()
        return model(x)

    x = torch.ones(1, 2)
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
