"""What every integration calls leaves the training as it is and tells each of its steps once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from ergmeter import Run
from ergmeter.integrations.training import Training
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Reading

if TYPE_CHECKING:
    from pathlib import Path


class Plain(nn.Module):
    """A model without a configuration: its FLOPs are known only once it is run."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 16), nn.Dropout(0.3)
        )
        self.head = nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.table(ids)))
        return logits


def losses(training: Training | None, steps: int = 40) -> list[float]:
    torch.manual_seed(3)
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if training is not None:
        training.begin(model)
    told = []
    for _ in range(steps):
        ids = torch.randint(0, 50, (4, 12))
        if training is not None:
            training.step_begin()
            training.batch(ids)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if training is not None:
            training.step_end()
            training.logged({"loss": loss})
        told.append(loss.item())
    if training is not None:
        training.end()
    return told


def test_dropout_draws_the_same_numbers_while_the_model_is_counted(tmp_path: Path) -> None:
    bare = losses(None)
    training = Training(out=tmp_path / "run", probes=())
    assert losses(training) == bare
    run = Run.open(tmp_path / "run")
    assert run.steps()["loss"].tolist() == pytest.approx(bare)
    flops = summarize(run).readings["compute.model_flops_per_token"]
    assert isinstance(flops, Reading), flops
    # Forward and backward of every product, without the gradient of what nothing is before.
    assert flops.value == 6 * (16 * 64 + 64 * 16 + 16 * 50)


def test_padding_is_in_the_hardwares_flops_and_not_in_the_models(tmp_path: Path) -> None:
    """Rows of 768, 48, 48 and 48 tokens, padded to 768: each by its own length, by hand."""
    transformers = pytest.importorskip("transformers")
    lengths, width, hidden, layers = [768, 48, 48, 48], 768, 64, 2
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    training = Training(out=tmp_path / "run", probes=(), peak_flops_per_s=1e12)
    model = transformers.LlamaForCausalLM(config)
    training.begin(model)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    for _ in range(12):
        training.step_begin()
        training.batch({"input_ids": torch.ones_like(mask), "attention_mask": mask})
        training.step_end()
    training.end()
    found = summarize(Run.open(tmp_path / "run")).readings
    tokens, positions = sum(lengths), 4 * width
    # Four square projections, three of the feed-forward, the head; 6 FLOPs a weight and token.
    weights = layers * (4 * hidden**2 + 3 * hidden * 128) + hidden * 256
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    model_flops = 6 * weights * tokens + 12 * layers * hidden * pairs
    per_token, mfu, hfu = (
        found[key]
        for key in (
            "compute.model_flops_per_token", "utilization.mfu_frac", "utilization.hfu_frac",
        )
    )  # fmt: skip
    assert isinstance(per_token, Reading)
    assert per_token.value == pytest.approx(model_flops / tokens, rel=1e-3)
    assert isinstance(mfu, Reading)
    assert isinstance(hfu, Reading)
    extra = 6 * weights * (positions - tokens)
    assert hfu.value / mfu.value == pytest.approx(1 + extra / model_flops, rel=1e-3)
    assert "on padding" in hfu.note


def test_a_model_that_is_run_to_be_counted_has_its_padding_in_the_hardwares_flops_too(
    tmp_path: Path,
) -> None:
    """One matrix and no attention: a position of padding is as dear as a token."""
    model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50))
    training = Training(out=tmp_path / "run", probes=(), peak_flops_per_s=1e12, dtype="fp32")
    training.begin(model)
    mask = (torch.arange(10) < torch.tensor([10, 5])[:, None]).long()
    for _ in range(12):
        training.step_begin()
        training.batch({"input_ids": torch.ones_like(mask), "attention_mask": mask})
        model(torch.ones_like(mask)).sum().backward()
        training.step_end()
    training.end()
    found = summarize(Run.open(tmp_path / "run")).readings
    mfu, hfu = found["utilization.mfu_frac"], found["utilization.hfu_frac"]
    assert isinstance(mfu, Reading), mfu
    assert isinstance(hfu, Reading), hfu
    assert hfu.value / mfu.value == pytest.approx(20 / 15)


def test_steps_that_are_held_are_not_written_again_by_a_forked_child(tmp_path: Path) -> None:
    training = Training(out=tmp_path / "run", probes=())
    training.begin()
    for _ in range(3):
        training.step_begin()
        training.step_end()
    child = os.fork()
    if child == 0:
        training.end()  # as it does at the exit of a child that ends in peace
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    training.end()
    run = Run.open(tmp_path / "run")
    assert len(run.writers) == 1
    assert run.steps()["index"].tolist() == [0, 1, 2]


def test_tokens_are_those_of_the_calls_where_a_batch_is_prompts(tmp_path: Path) -> None:
    """As in GRPO: what is trained on is generated, and scored once without gradients."""
    model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50))
    training = Training(out=tmp_path / "run", probes=())
    training.begin(model)
    for length in (6, 7, 8):
        training.step_begin()
        training.batch([{"prompt": "what is an erg?"}])
        made = torch.zeros(4, length, dtype=torch.long)
        with torch.no_grad():
            model(made)
        model(made).sum().backward()
        training.step_end()
    training.end()
    run = Run.open(tmp_path / "run")
    assert run.steps()["tokens_computed"].tolist() == [4 * 6, 4 * 7, 4 * 8]
    # The second step: 28 tokens through 16 x 50, thrice less the embedding's; scored beside it.
    assert [one.model_per_step for one in run.flops] == [3 * 2 * 28 * 16 * 50]
    others = run.flops[0].other_work
    assert [(part.name, part.flops) for part in others or ()] == [
        ("other models", 2 * 28 * 16 * 50)
    ]
    assert "_compiled_call_impl" not in vars(model)  # nothing is left behind
