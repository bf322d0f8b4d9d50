"""What a training is called in a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ergmeter.integrations.model_description import training_identity


def test_a_compiled_model_has_the_name_of_its_class() -> None:
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    assert training_identity(compiled)["model"] == "Linear"
    assert training_identity(nn.Linear(2, 2))["model"] == "Linear"
