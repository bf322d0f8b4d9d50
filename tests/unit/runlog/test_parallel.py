"""Where a rank stands, as the frameworks say it: torch's and Accelerate's own objects."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType

import pytest

from ergmeter.runlog.parallel import told_layout

# Torch's own stand-in for a group: rank 5 of 8, and no other process.
MESH = """
import json, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_shard", "tp"))
from ergmeter.runlog.parallel import told_layout
"""
DTENSOR = """
import torch
from torch.distributed.tensor import Shard, distribute_tensor
model = torch.nn.Linear(4, 4)
assert told_layout(model) is None
weight = distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)])
model.weight = torch.nn.Parameter(weight)
print(json.dumps(told_layout(model)))
"""
ACCELERATE = """
from accelerate.state import AcceleratorState
AcceleratorState._shared_state["device_mesh"] = mesh
print(json.dumps(told_layout()))
"""


@pytest.mark.parametrize(("code", "whose"), [(DTENSOR, "DeviceMesh"), (ACCELERATE, "Accelerate")])
def test_a_mesh_says_where_a_rank_is(code: str, whose: str) -> None:
    """5 of 8 in a mesh of 2 x 2 x 2 is at 1, 0, 1: the last dimension runs fastest."""
    done = subprocess.run(
        [sys.executable, "-c", MESH + code], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found == {"at": {"pp": [1, 2], "dp": [0, 2], "tp": [1, 2]}, "from": whose}


def test_megatron_is_asked_by_the_names_its_functions_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = ModuleType("megatron.core.parallel_state")
    told = {
        "tensor_model_parallel": (1, 2), "pipeline_model_parallel": (3, 4),
        "context_parallel": (0, 1), "data_parallel": (2, 8),
    }  # fmt: skip
    for name, (rank, size) in told.items():
        setattr(state, f"get_{name}_rank", lambda rank=rank: rank)
        setattr(state, f"get_{name}_world_size", lambda size=size: size)
    state.model_parallel_is_initialized = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, state.__name__, state)
    assert told_layout() == {
        "at": {"tp": [1, 2], "cp": [0, 1], "pp": [3, 4], "dp": [2, 8]}, "from": "Megatron",
    }  # fmt: skip
    state.model_parallel_is_initialized = lambda: False  # type: ignore[attr-defined]
    assert told_layout() is None
