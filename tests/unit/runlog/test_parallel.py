"""Where a rank stands, as the frameworks say it: torch's and Accelerate's own objects."""

from __future__ import annotations

import json
import subprocess
import sys
from types import ModuleType

import pytest

from ergmeter.runlog.process_group import dimension_of, framework_layout

# Torch's own stand-in for a group: rank 5 of 8, and no other process.
MESH = """
import json, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_shard", "tp"))
from ergmeter.runlog.process_group import framework_layout
"""
DTENSOR = """
import torch
from torch.distributed.tensor import Shard, distribute_tensor
model = torch.nn.Linear(4, 4)
assert framework_layout(model) is None
weight = distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)])
model.weight = torch.nn.Parameter(weight)
print(json.dumps(framework_layout(model)))
"""
ACCELERATE = """
from accelerate.state import AcceleratorState
AcceleratorState._shared_state["device_mesh"] = mesh
print(json.dumps(framework_layout()))
"""


@pytest.mark.parametrize(("code", "whose"), [(DTENSOR, "DeviceMesh"), (ACCELERATE, "Accelerate")])
def test_a_mesh_says_where_a_rank_is(code: str, whose: str) -> None:
    """5 of 8 in a mesh of 2 x 2 x 2 is at 1, 0, 1: the last dimension runs fastest."""
    done = subprocess.run(
        [sys.executable, "-c", MESH + code], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found == {"at": {"pp": [1, 2], "dp": [0, 2], "tp": [1, 2]}, "from": whose}


# Meshes of some of the ranks, with DDP over them that no mesh knows of: rank 5 of 8.
PARTS = """
import json, sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from ergmeter.runlog.process_group import framework_layout
dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
for ranks in json.loads(sys.argv[1]):
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("tp", "cp")[: torch.tensor(ranks).dim()])
    model = torch.nn.Linear(4, 4)
    weight = distribute_tensor(model.weight.detach(), mesh, [Replicate()] * mesh.ndim)
    model.weight = torch.nn.Parameter(weight)
    print(json.dumps(framework_layout(model)))
"""


def test_a_mesh_of_some_of_the_ranks_is_one_of_several_where_these_cover_all() -> None:
    covering = [
        ([4, 5], {"tp": [1, 2], "dp": [2, 4]}),  # 01 23 45 67
        ([1, 5], {"tp": [1, 2], "dp": [1, 4]}),  # 04 15 26 37
        ([5, 7], {"tp": [0, 2], "dp": [3, 4]}),  # 02 13 46 57
        ([[4, 5], [6, 7]], {"tp": [0, 2], "cp": [1, 2], "dp": [1, 2]}),  # 0123 4567
    ]
    # 03 14 25 leave 6 with nobody; pairs of neighbours cover all, but 56 is none of them.
    irregular = [[2, 5], [5, 6]]
    ranks = json.dumps([*(one for one, _ in covering), *irregular])
    done = subprocess.run(
        [sys.executable, "-c", PARTS, ranks], capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for (_, at), told in zip(covering, found, strict=False):
        assert told == {"at": at, "from": "DeviceMesh"}
    for told in found[len(covering) :]:
        unknown = "DeviceMesh places 2 of the 8 ranks (tp=2)"
        assert told == {"unknown": unknown, "from": "DeviceMesh"}


@pytest.mark.parametrize(
    ("name", "dimension"),
    [
        ("tp", "tp"), ("mp", "tp"), ("tensor_parallel", "tp"), ("model", "tp"), ("tp_inner", "tp"),
        ("pp", "pp"), ("pipeline_model_parallel", "pp"), ("pipe", "pp"),
        ("cp", "cp"), ("sp", "cp"), ("sequence", "cp"),
        ("dp_shard", "dp"), ("model_replicas", "dp"), ("mp_dp", "dp"), ("spmd", "dp"),
        ("tpu", "dp"), ("expert", "dp"), ("batch", "dp"),
    ],
)  # fmt: skip
def test_a_dimension_is_called_by_whole_words(name: str, dimension: str) -> None:
    assert dimension_of(name) == dimension


def test_neuronx_distributed_calls_its_sizes_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ModuleType("neuronx_distributed.parallel_layers.parallel_state")
    told = {
        "tensor_model_parallel": (1, 2), "pipeline_model_parallel": (0, 2),
        "context_model_parallel": (1, 4), "data_parallel": (2, 8),
    }  # fmt: skip
    for name, (rank, size) in told.items():
        setattr(state, f"get_{name}_rank", lambda rank=rank: rank)
        setattr(state, f"get_{name}_size", lambda size=size: size)
    state.model_parallel_is_initialized = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, state.__name__, state)
    assert framework_layout() == {
        "at": {"tp": [1, 2], "cp": [1, 4], "pp": [0, 2], "dp": [2, 8]}, "from": "Megatron",
    }  # fmt: skip


def test_a_framework_that_places_some_of_the_ranks_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = ModuleType("megatron.mpu")
    for name, value in (("rank", 0), ("world_size", 2)):
        setattr(state, f"get_tensor_model_parallel_{name}", lambda value=value: value)
    state.model_parallel_is_initialized = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, state.__name__, state)
    monkeypatch.setattr("ergmeter.runlog.process_group.world_size", lambda: 8)
    found = framework_layout()
    assert found is not None
    assert found["unknown"] == "Megatron places 2 of the 8 ranks (tp=2)"
    assert "at" not in found


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
    assert framework_layout() == {
        "at": {"tp": [1, 2], "cp": [0, 1], "pp": [3, 4], "dp": [2, 8]}, "from": "Megatron",
    }  # fmt: skip
    state.model_parallel_is_initialized = lambda: False  # type: ignore[attr-defined]
    assert framework_layout() is None
