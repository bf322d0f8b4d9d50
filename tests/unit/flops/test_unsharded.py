"""Sizes of models whose weights are packed or in pieces, without other processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import bitsandbytes
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from ergmeter.flops.counted.unsharded import sharded_by, sizes, unsharded_parameters
from ergmeter.flops.live import live_flops
from ergmeter.runlog.settings import Settings


class Words(nn.Module):
    """A table, a trained and a frozen product: 100x32 + 32x64 + 64x100, of which 64x100 is not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 32)
        self.module = nn.Linear(32, 64, bias=False)  # called as wrappers call what they wrap
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight.requires_grad = False

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.module(self.table(input_ids)))
        return logits


WHOLE = (100 * 32 + 32 * 64 + 64 * 100, 100 * 32 + 32 * 64)


@pytest.fixture
def four_ranks() -> Iterator[Any]:
    """A group of four, of which three are nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def sized(model: nn.Module) -> tuple[int, int] | None:
    return sizes(unsharded_parameters(model))


def test_names_and_sizes_of_a_plain_model_are_torchs() -> None:
    model = Words()
    found = {one.name: one.numel for one in unsharded_parameters(model)}
    assert found == {name: one.numel() for name, one in model.named_parameters()}
    assert sized(model) == WHOLE
    assert sharded_by(model) == ""


def test_what_is_tied_counts_once() -> None:
    model = Words()
    model.head = nn.Linear(32, 100, bias=False)
    model.head.weight = model.table.weight
    assert sized(model) == (100 * 32 + 32 * 64, 100 * 32 + 32 * 64)


def test_a_part_is_told_by_the_names_it_has_inside() -> None:
    outer = nn.ModuleDict({"inner": Words()})
    found = unsharded_parameters(outer, outer["inner"])
    assert [one.name for one in found] == ["table.weight", "module.weight", "head.weight"]


def test_a_shard_is_told_as_the_whole_and_never_run(four_ranks: Any) -> None:
    model: Any = Words()
    fully_shard(model, mesh=four_ranks)
    assert model.table.weight.to_local().numel() == 100 * 32 // 4
    assert sized(model) == WHOLE
    flops, settings, reason = live_flops(model, 16, Settings())
    assert flops == ()
    assert settings.parameters == WHOLE[0]
    assert "spread over processes by fully_shard, it is not run" in reason


def test_a_tensor_parallel_layer_is_told_as_the_whole_and_never_run(four_ranks: Any) -> None:
    model: Any = parallelize_module(Words(), four_ranks, {"module": ColwiseParallel()})
    assert model.module.weight.to_local().numel() == 32 * 64 // 4
    assert sized(model) == WHOLE
    assert live_flops(model, 16, Settings())[0] == ()
    assert sharded_by(model) == "DTensor"


def test_what_zero_3_has_emptied_is_told_by_the_shape_it_left() -> None:
    model = Words()
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id, parameter.ds_shape = number, parameter.shape  # type: ignore[attr-defined]
        parameter.data = torch.empty(0)
    assert sized(model) == WHOLE
    assert sharded_by(model) == "DeepSpeed"


def test_four_bits_are_unpacked() -> None:
    model = Words()
    plain = model.head.weight.detach()
    layers: Any = bitsandbytes.nn
    packed = layers.Linear4bit(64, 100, bias=False)
    packed.weight = layers.Params4bit(plain, requires_grad=False, quant_type="nf4")
    model.head = packed.to("cpu")
    assert packed.weight.numel() == 64 * 100 // 2
    assert sized(model) == WHOLE


def test_packing_that_does_not_tell_is_not_guessed() -> None:
    model = Words()
    model.head.weight = nn.Parameter(torch.zeros(3200, dtype=torch.uint8), requires_grad=False)
    assert sized(model) is None
