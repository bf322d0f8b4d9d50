"""What one device holds of a model that is spread: against torch's own sharding, and papers.

torch's fake process group makes this one process rank 0 of several: parameters are really cut, and
collectives return at once. What each rank holds is then read off the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.estimate.memory import Kernels, Memory, Parallel, Setup, step_memory
from ergmeter.flops.source import model_graph, read_graph
from ergmeter.flops.work import TrainedParts

SEQUENCES, LENGTH, VOCAB, HIDDEN = 2, 48, 512, 128


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    count: int = request.param
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    yield count
    dist.destroy_process_group()


def llama() -> Any:
    return transformers.LlamaConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=3,
        intermediate_size=352,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCAB,
    )


def estimated(parallel: Parallel) -> Memory:
    graph = model_graph(ModelConfig(llama().to_dict(), where="the test"))
    batch = Batch.of(SEQUENCES * parallel.data, LENGTH)
    return step_memory(graph, batch, setup=Setup("fp32", parallel=parallel))


def local_bytes(tensors: Any) -> int:
    held = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    return sum(each.numel() * each.element_size() for each in held)


def test_stage_3_holds_what_fully_shard_leaves_on_a_rank(ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    made: Any = transformers.LlamaForCausalLM
    model = made(llama())
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.zeros(SEQUENCES, LENGTH, dtype=torch.long)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    step = estimated(Parallel(data=ranks, zero=3)).moments[-1].bytes
    assert step["weights"] == local_bytes(model.parameters())
    assert step["gradients"] == local_bytes(each.grad for each in model.parameters())
    states = optimizer.state.values()
    moments = (state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))
    assert step["optimizer"] == local_bytes(moments)


def split_over(ranks: int) -> Any:
    """Megatron's way: columns, then rows; the vocabulary too."""
    made: Any = transformers.LlamaForCausalLM
    model = made(llama())
    layer = "model.layers.*"
    plan: dict[str, Any] = {
        **{f"{layer}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        f"{layer}.self_attn.o_proj": RowwiseParallel(),
        f"{layer}.mlp.gate_proj": ColwiseParallel(),
        f"{layer}.mlp.up_proj": ColwiseParallel(),
        f"{layer}.mlp.down_proj": RowwiseParallel(),
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(),
    }
    return parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)


def test_tensor_parallelism_holds_what_parallelize_module_leaves_on_a_rank(ranks: int) -> None:
    model = split_over(ranks)
    step = estimated(Parallel(tensor=ranks)).moments[-1].bytes
    assert step["weights"] == local_bytes(model.parameters())


def storage_of(tensor: Any) -> Any:
    here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(here, "elem", here).untyped_storage()  # a collective's result is wrapped


def test_tensor_parallelism_keeps_what_autograd_says_on_a_rank(ranks: int) -> None:
    model = split_over(ranks)
    own = {storage_of(each).data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = storage_of(tensor)
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(SEQUENCES, LENGTH, dtype=torch.long)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(input_ids=tokens)
    assert result.logits.requires_grad
    found = estimated(Parallel(tensor=ranks)).moments[0].bytes["activations"]
    assert found == pytest.approx(sum(kept.values()), rel=0.03)


def test_zero_by_the_table_of_its_paper() -> None:
    """Rajbhandari et al., arXiv 1910.02054, figure 1: 7.5 B parameters on 64 devices, in GB."""
    graph = read_graph("hidden=4096,layers=36,ffn=16384,heads=32,vocab=50000")
    for stage, published in enumerate([120, 31.4, 16.6, 1.9]):
        setup = Setup("bf16-master", "adamw-fused", parallel=Parallel(data=64, zero=stage))
        step = step_memory(graph, Batch.of(64, 16), setup=setup).moments[-1].total_bytes
        assert step / graph.params * 7.5 == pytest.approx(published, abs=0.05)


# Korthikanti et al., arXiv 2205.05198, equations 1 to 6, of a GPT layer in 16 bits: s b h (34 +
# 5 a s / h). Its dropout takes a mask after attention and one after the feed-forward, 2 s b h, a
# mask of the probabilities and the probabilities after it, 3 a s s b: without it 32 and 2.
GPT: dict[str, Any] = {
    "n_embd": 512,
    "n_layer": 4,
    "n_head": 8,
    "vocab_size": VOCAB,
    "n_positions": 256,
}
SBH, AS_PER_H = 256 * 2 * 512, 8 * 256 / 512


@pytest.mark.parametrize(
    ("tensor", "along", "checkpointing", "per_layer"),
    [
        (1, False, "none", SBH * (32 + 2 * AS_PER_H)),
        (4, False, "none", SBH * (8 + 24 / 4 + 2 * AS_PER_H / 4)),
        (4, True, "none", SBH * (32 + 2 * AS_PER_H) / 4),
        (4, True, "selective", SBH * 32 / 4),
        (1, False, "full", SBH * 2),
    ],
)
def test_activations_of_a_gpt_layer_by_megatrons_equations(
    tensor: int, along: bool, checkpointing: Any, per_layer: float
) -> None:
    fields = transformers.GPT2Config(**GPT, activation_function="gelu").to_dict()
    setup = Setup(
        kernels=Kernels(attention="eager"),
        parallel=Parallel(tensor=tensor, is_sequence_parallel=along),
    )
    found = step_memory(
        model_graph(ModelConfig(fields, where="the paper")),
        Batch.of(2, 256),
        training=TrainedParts(checkpointing=checkpointing),
        setup=setup,
    )
    last = SBH * 4 / (tensor if along else 1)  # the norm before the head: its input and its result
    layers = found.moments[0].bytes["activations"] - last
    assert layers == pytest.approx(4 * per_layer, rel=0.01)  # two numbers a row of each norm


def test_a_pipelines_first_stage_keeps_as_much_as_all_layers_of_one_micro_batch() -> None:
    """The same paper, section 4.2.3: stages x (layers / stages), whatever the number of stages."""
    model = "hidden=256,layers=8,ffn=688,heads=4,kv_heads=4,vocab=300"
    kept = []
    for stages in (1, 2, 4):
        setup = Setup(micro_batches=8, parallel=Parallel(pipeline=stages))
        found = step_memory(read_graph(model), Batch.of(64, 512), setup=setup)
        kept.append(found.moments[0].bytes["activations"])
    outside = 8 * 512 * (256 * 8 + 4)  # the norm before the head, which is on the last stage
    assert kept[0] - outside == kept[1] == kept[2]


def test_context_parallelism_keeps_a_share_of_the_rows() -> None:
    whole, part = (estimated(Parallel(context=count)).moments[0].bytes for count in (1, 4))
    assert part["activations"] == whole["activations"] / 4
    assert part["loss"] == whole["loss"] / 4
    assert part["weights"] == whole["weights"]
