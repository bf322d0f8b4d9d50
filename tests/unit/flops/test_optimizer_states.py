"""What optimizers keep, against the optimizers themselves, after one step of a small Llama."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers.optimization import Adafactor

from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.estimate.memory import Setup, step_memory
from ergmeter.flops.source import model_graph
from tests.unit.flops.live_storages import LiveStorages

LLAMA = transformers.LlamaConfig(
    hidden_size=128,
    num_hidden_layers=2,
    intermediate_size=352,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=512,
)
Make = Callable[[Any], list[torch.optim.Optimizer]]


def kept_bytes(make: Make) -> int:
    """Of what is in the optimizers' states; numbers of steps, and tables that all share, apart."""
    torch.manual_seed(0)
    made: Any = transformers.LlamaForCausalLM
    model = made(LLAMA).to(torch.bfloat16)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model(input_ids=tokens, labels=tokens).loss.backward()
    held = 0
    for optimizer in make(model):
        optimizer.step()
        for state in optimizer.state.values():
            tensors = (value for name, value in state.items() if not name.startswith("qmap"))
            held += sum(t.nbytes for t in tensors if torch.is_tensor(t) and t.numel() > 1)
    return held


def muon(model: Any) -> list[torch.optim.Optimizer]:
    inside = {n for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n}
    named = list(model.named_parameters())
    return [
        torch.optim.Muon([p for n, p in named if n in inside]),
        torch.optim.AdamW([p for n, p in named if n not in inside]),
    ]


def adafactor(model: Any) -> list[torch.optim.Optimizer]:
    made: Any = Adafactor
    return [made(model.parameters())]


def bitsandbytes(name: str) -> Make:
    def make(model: Any) -> list[torch.optim.Optimizer]:
        optim = pytest.importorskip("bitsandbytes").optim
        return [getattr(optim, name)(model.parameters())]

    return make


@pytest.mark.parametrize(
    ("name", "make", "within"),
    [
        ("adamw", lambda m: [torch.optim.AdamW(m.parameters())], 0),
        ("adamw-fused", lambda m: [torch.optim.AdamW(m.parameters(), fused=True)], 0),
        ("adamw-loop", lambda m: [torch.optim.AdamW(m.parameters(), foreach=False)], 0),
        ("sgd", lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)], 0),
        ("sgd-momentum", lambda m: [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)], 0),
        ("muon", muon, 0),
        ("adafactor", adafactor, 0.03),  # a table's sides are not known
        ("adamw-32bit", bitsandbytes("AdamW32bit"), 0),
        ("adamw-8bit", bitsandbytes("AdamW8bit"), 0),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_keeps_what_is_in_its_states(
    name: str, make: Make, within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # see test_saved.py
    graph = model_graph(ModelConfig(LLAMA.to_dict(), where="the test"))
    found = step_memory(graph, Batch.of(1, 8), setup=Setup("bf16", name)).moments[-1]
    assert found.bytes["optimizer"] == pytest.approx(kept_bytes(make), rel=within)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", lambda m: torch.optim.AdamW(m.parameters(), foreach=True)),
        ("adamw-fused", lambda m: torch.optim.AdamW(m.parameters(), fused=True)),
        ("adamw-loop", lambda m: torch.optim.AdamW(m.parameters(), foreach=False)),
        ("sgd", lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
        ("sgd-momentum", lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
    ],
)
def test_temporaries_of_a_step_are_those_that_torch_makes(
    name: str, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    made: Any = transformers.LlamaForCausalLM
    model = made(LLAMA).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    updates = make(model)
    updates.step()  # makes the states
    live = LiveStorages()
    states = [value for state in updates.state.values() for value in state.values()]
    for tensor in (*model.parameters(), *(p.grad for p in model.parameters()), *states):
        if torch.is_tensor(tensor):
            live.add(tensor)
    before = live.now
    with live:
        updates.step()
    graph = model_graph(ModelConfig(LLAMA.to_dict(), where="the test"))
    step = step_memory(graph, Batch.of(1, 8), setup=Setup("bf16", name)).moments[-1]
    temporaries = live.peaks[""] - before
    # The loop still has the quotient of the tensor before.
    assert temporaries == pytest.approx(step.bytes["working"], rel=0.01, abs=10_000)
