"""FLOPs of the step that was made: programs with the shapes of well-known ones, counted by hand.

Each hand count is 2 FLOPs for a multiplication and an addition, three times a forward pass where
both inputs of a product want a gradient. Attention told to be causal counts the pairs that meet.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  as everybody calls it
from torch.utils.checkpoint import checkpoint

from ergmeter.integrations.torch_loop import watch
from ergmeter.metrics.summarize import summarize
from ergmeter.records import PHASES, Flops
from ergmeter.runlog.reader import Run

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, ROWS = 64, 32, 2, 4, 16, 4
STEPS = 4
TOKENS = ROWS * LENGTH
# Four projections of D x D and two of D x 4D; scores and values over (T + 1) / 2 pairs a token.
BLOCK = 6 * 12 * WIDTH**2 + 3 * 4 * WIDTH * (LENGTH + 1) / 2
HEAD = 6 * VOCABULARY * WIDTH
BODY_STEP = TOKENS * LAYERS * BLOCK
GPT_STEP = BODY_STEP + TOKENS * HEAD


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, shape or (ROWS, LENGTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            one.view(rows, length, HEADS, -1).transpose(1, 2) for one in self.qkv(x).split(WIDTH, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, WIDTH))
        down: torch.Tensor = self.down(F.gelu(self.up(x)))
        return x + down


class Body(nn.Module):
    """Without a head: the loop or the loss has it."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class NanoGPT(Body):
    """As nanoGPT and llm.c: without targets it computes the last position's logits only."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.head.weight

    def forward(  # type: ignore[override]
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = super().forward(tokens)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Counted:
    flops: Flops | None
    why_not: str
    tokens: list[float]
    samples: list[float]
    parameters: int | None
    note: str  # of the FLOPs of a token

    @property
    def parts(self) -> dict[str, float | None]:
        assert self.flops is not None, self.why_not
        return {part.name: part.flops for part in self.flops.hardware if part.flops != 0}


@pytest.fixture
def counted(tmp_path: Path) -> Callable[..., Counted]:
    def run(loop: Callable[[], object], *given: Any) -> Counted:
        watched = watch(*given, out=tmp_path / "run", probes=[])
        loop()
        watched.close()
        found = Run.open(watched.path)
        steps = found.steps()
        rows = steps["phase"] == PHASES.index("train")
        assert not [mark for mark in found.marks if "failed" in mark.name]
        return Counted(
            found.flops[0] if found.flops else None,
            found.no_flops,
            steps["tokens_computed"][rows].tolist(),
            steps["samples"][rows].tolist(),
            found.settings.get("parameters"),
            getattr(summarize(found).readings["compute.model_flops_per_token"], "note", ""),
        )

    return run


def trained(
    *modules: nn.Module, loss: Callable[[], torch.Tensor], steps: int = STEPS
) -> Callable[[], None]:
    """A plain loop over what these modules have."""

    def loop() -> None:
        parameters = {id(p): p for module in modules for p in module.parameters()}
        optimizer = torch.optim.AdamW(parameters.values())
        for _ in range(steps):
            loss().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    return loop


def nano_loss(model: nn.Module) -> Callable[[], torch.Tensor]:
    return lambda: model(ids(), ids())[1]


def test_a_head_that_only_targets_bring_is_counted(counted: Callable[..., Counted]) -> None:
    model = NanoGPT()
    found = counted(trained(model, loss=nano_loss(model)))
    assert found.parts == {"model": GPT_STEP}
    assert found.tokens == [TOKENS] * STEPS
    assert found.samples == [ROWS] * STEPS
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert (
        found.note
        == "counted (attention: pairs that is_causal hides are left out, all others counted)"
    )


def test_a_model_that_was_given_is_counted_as_it_is_called(
    counted: Callable[..., Counted],
) -> None:
    model = NanoGPT()
    found = counted(trained(model, loss=nano_loss(model)), model)
    assert found.parts == {"model": GPT_STEP}


def test_micro_batches_and_evaluation(counted: Callable[..., Counted]) -> None:
    """Three micro-batches a step; what is evaluated between steps is none of them."""
    model = NanoGPT()

    def loop() -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(STEPS):
            model.eval()
            with torch.no_grad():
                model(ids(), ids())
            model.train()
            for _ in range(3):
                model(ids(), ids())[1].backward()
            optimizer.step()

    found = counted(loop)
    assert found.parts == {"model": 3 * GPT_STEP}
    assert found.tokens == [3 * TOKENS] * STEPS


def test_micro_batches_of_different_lengths(counted: Callable[..., Counted]) -> None:
    """Attention goes by the square of a length: one step of 4 and 28 is not one of 16 and 16."""
    model = NanoGPT()
    lengths = [(20, 12), (4, 28), (16, 16), (8, 24)]  # the second step is recorded

    def loop() -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        for step in lengths:
            for length in step:
                model(ids(ROWS, length), ids(ROWS, length))[1].backward()
            optimizer.step()

    found = counted(loop)
    assert found.flops is not None
    rows = [length for step in lengths for length in step]
    pairs = sum(length * (length + 1) / 2 for length in rows)
    by_hand = sum(rows) * (LAYERS * 6 * 12 * WIDTH**2 + HEAD) + LAYERS * 12 * WIDTH * pairs
    assert found.flops.model_per_step * STEPS == pytest.approx(ROWS * by_hand, rel=1e-3)


def test_a_compiled_model(counted: Callable[..., Counted]) -> None:
    model = torch.compile(NanoGPT(), backend="eager")
    found = counted(trained(model, loss=nano_loss(model)))  # type: ignore[arg-type]
    assert found.parts == {"model": GPT_STEP}


def test_attention_that_is_written_out_counts_whole(counted: Callable[..., Counted]) -> None:
    """As minGPT: two batched products over T x T pairs, three times."""

    class MinGPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(VOCABULARY, WIDTH)
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
            q, k, v = self.qkv(self.wte(tokens)).split(WIDTH, 2)
            mask = torch.ones(LENGTH, LENGTH).tril() == 0
            scores = (q @ k.transpose(-2, -1)).masked_fill(mask, float("-inf"))
            logits = self.head(scores.softmax(-1) @ v)
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    model = MinGPT()
    found = counted(trained(model, loss=nano_loss(model)))
    by_hand = TOKENS * (6 * 3 * WIDTH**2 + HEAD + 3 * 4 * WIDTH * LENGTH)
    assert found.parts == {"model": by_hand}
    assert found.note == "counted (attention: every pair, as no kernel is told is_causal)"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dropout_does_not_change_the_pairs_of_a_causal_mask(
    counted: Callable[..., Counted], dropout: float
) -> None:
    """A CPU writes attention with dropout out as products; a GPU has a kernel for it."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(VOCABULARY, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, LAYERS)
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
            logits = self.head(self.layers(self.wte(tokens), mask=mask, is_causal=True))
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    model = Encoder()
    found = counted(trained(model, loss=nano_loss(model)))
    assert found.parts == {"model": GPT_STEP}


def test_a_head_inside_the_loss(counted: Callable[..., Counted]) -> None:
    """As torchtune's LinearCrossEntropyLoss: it is handed the model's output projection."""

    class LinearCrossEntropy(nn.Module):
        def __init__(self, projection: nn.Module) -> None:
            super().__init__()
            self.projection = projection

        def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            total = hidden.new_zeros(())
            chunks = zip(hidden.chunk(4, 1), targets.chunk(4, 1), strict=True)
            for part, those in chunks:
                logits = self.projection(part).flatten(0, 1)
                total = total + F.cross_entropy(logits, those.flatten(), reduction="sum")
            return total / targets.numel()

    class WithHead(Body):
        def __init__(self) -> None:
            super().__init__()
            self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    model = WithHead()
    loss = LinearCrossEntropy(model.output)
    found = counted(trained(model, loss=lambda: loss(model(ids()), ids())))
    assert found.parts == {"model": GPT_STEP}
    assert found.tokens == [TOKENS] * STEPS


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_head_for_the_positions_that_have_a_label(
    counted: Callable[..., Counted], is_trained: bool
) -> None:
    """How many these are is known from the data alone, as in torchtune's loss."""

    class MaskedCrossEntropy(nn.Module):
        def __init__(self, projection: nn.Module) -> None:
            super().__init__()
            self.projection = projection

        def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            chosen = torch.where(targets.flatten() != -100)[0]
            logits = self.projection(hidden.flatten(0, 1).index_select(0, chosen))
            return F.cross_entropy(logits, targets.flatten()[chosen])

    model = Body()
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    if not is_trained:
        head.requires_grad_(False)  # its input's gradient is computed all the same
    labels = ids()
    labels[:, : LENGTH // 4] = -100
    loss = MaskedCrossEntropy(head)
    found = counted(trained(model, head, loss=lambda: loss(model(ids()), labels)))
    head_step = TOKENS * 0.75 * HEAD * (1 if is_trained else 2 / 3)
    assert found.parts == {"model": BODY_STEP + head_step}
    assert found.flops is not None
    assert found.flops.assumptions[-1].startswith(
        "given: the products of MaskedCrossEntropy in one step"
    )


class TiedHead:
    """As torchtune's TiedLinear: no module, so that its products are outside of modules."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class LabelledCrossEntropy(nn.Module):
    def __init__(self, projection: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        chosen = torch.where(targets.flatten() != -100)[0]
        logits = self.projection(hidden.flatten(0, 1).index_select(0, chosen))
        return F.cross_entropy(logits, targets.flatten()[chosen])


@pytest.mark.parametrize("is_tied", [True, False])
def test_labelled_positions_of_all_steps_count(
    counted: Callable[..., Counted], tmp_path: Path, is_tied: bool
) -> None:
    """The head's FLOPs are those of the labels of every step, not of the recorded one."""
    model = Body()
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    loss = LabelledCrossEntropy(TiedHead(model.wte.weight) if is_tied else head)
    skipped = iter([4, 8, 2, 12])  # of the first step, the recorded one and the others

    def labelled() -> torch.Tensor:
        labels = ids()
        labels[:, : next(skipped)] = -100
        found: torch.Tensor = loss(model(ids()), labels)
        return found

    found = counted(trained(model, *([] if is_tied else [head]), loss=labelled))
    labels = [ROWS * (LENGTH - none) for none in (4, 8, 2, 12)]
    assert found.flops is not None
    by_hand = STEPS * BODY_STEP + sum(labels) * HEAD
    assert found.flops.model_per_step * STEPS == pytest.approx(by_hand, rel=1e-9)
    assert "with the labels of all steps (1.188 times the recorded step's)" in found.note
    steps = Run.open(tmp_path / "run").steps()
    assert steps["tokens_loss"].tolist() == labels
    assert "_compiled_call_impl" not in loss.__dict__


def test_a_head_for_every_position_does_not_go_by_labels(counted: Callable[..., Counted]) -> None:
    model = Body()
    loss = nn.CrossEntropyLoss()
    skipped = iter([4, 8, 2, 12])

    def labelled() -> torch.Tensor:
        labels = ids()
        labels[:, : next(skipped)] = -100
        logits = model(ids()) @ model.wte.weight.T
        found: torch.Tensor = loss(logits.flatten(0, 1), labels.flatten())
        return found

    assert counted(trained(model, loss=labelled)).parts == {"model": GPT_STEP}


def test_a_loss_without_products_is_let_go(counted: Callable[..., Counted], tmp_path: Path) -> None:
    model, loss = NanoGPT(), nn.CrossEntropyLoss()
    calls: list[bool] = []

    def plain() -> torch.Tensor:
        logits, _ = model(ids(), ids())
        found: torch.Tensor = loss(logits.flatten(0, 1), ids().flatten())
        calls.append("_compiled_call_impl" in loss.__dict__)
        return found

    assert counted(trained(model, loss=plain)).parts == {"model": GPT_STEP}
    assert calls == [True] + [False] * (STEPS - 1)


def test_a_head_that_the_loop_multiplies_itself(counted: Callable[..., Counted]) -> None:
    model = Body()

    def loss() -> torch.Tensor:
        logits = model(ids()) @ model.wte.weight.T
        return F.cross_entropy(logits.flatten(0, 1), ids().flatten())

    assert counted(trained(model, loss=loss)).parts == {"model": GPT_STEP}


def test_a_loss_in_chunks_with_a_backward_pass_each(counted: Callable[..., Counted]) -> None:
    model = Body()

    def loop() -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(STEPS):
            hidden = model(ids())
            cut = hidden.detach().requires_grad_()
            for part, targets in zip(cut.chunk(4, 1), ids().chunk(4, 1), strict=True):
                logits = F.linear(part, model.wte.weight).flatten(0, 1)
                part_loss: Any = F.cross_entropy(logits, targets.flatten())
                part_loss.backward()
            hidden.backward(cut.grad)
            optimizer.step()
            optimizer.zero_grad()

    assert counted(loop).parts == {"model": GPT_STEP}


class OwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = ctx.saved_tensors
        return grads[0] @ weight, torch.einsum("btv,btd->vd", grads[0], hidden)


def test_what_can_not_be_counted_is_named(counted: Callable[..., Counted]) -> None:
    model = Body()

    def loss() -> torch.Tensor:
        logits = OwnProduct.apply(model(ids()), model.wte.weight)  # type: ignore[no-untyped-call]
        return F.cross_entropy(logits.flatten(0, 1), ids().flatten())

    found = counted(trained(model, loss=loss))
    assert found.parts == {"model": BODY_STEP}
    assert found.flops is not None
    assert found.flops.not_counted == ("OwnProduct x 1",)


def test_rows_of_a_token_more_than_the_model_reads(counted: Callable[..., Counted]) -> None:
    """As x-transformers' AutoregressiveWrapper: (B, T + 1) in, T positions computed."""

    class Autoregressive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = NanoGPT()

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.net(rows[:, :-1], rows[:, 1:])[1]
            return loss

    model = Autoregressive()
    found = counted(trained(model, loss=lambda: model(ids(ROWS, LENGTH + 1))))
    assert found.tokens == [TOKENS] * STEPS
    assert found.parts == {"model": GPT_STEP}


def test_a_frozen_teacher_is_another_models_work(counted: Callable[..., Counted]) -> None:
    student, teacher = NanoGPT(), NanoGPT().requires_grad_(False).eval()

    def loss() -> torch.Tensor:
        tokens = ids()
        with torch.no_grad():
            wanted = teacher(tokens, tokens)[0]
        return F.mse_loss(student(tokens, tokens)[0], wanted)

    found = counted(trained(student, loss=loss))
    assert found.parts == {"model": GPT_STEP, "other models": GPT_STEP / 3}
    assert found.parameters == sum(p.numel() for p in student.parameters())


def test_both_models_of_a_gan(counted: Callable[..., Counted]) -> None:
    generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12))
    critic = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 1))

    def loop() -> None:
        first = torch.optim.Adam(critic.parameters())
        second = torch.optim.Adam(generator.parameters())
        for _ in range(STEPS + 1):
            first.zero_grad()
            made = generator(torch.randn(4, 8))
            (critic(torch.randn(4, 12)).mean() - critic(made.detach()).mean()).backward()
            first.step()
            second.zero_grad()
            critic(made).mean().backward()
            second.step()

    found = counted(loop)
    # 4 rows; the first layer of each wants no gradient of its input, unless the input is made.
    making = 4 * (2 * 2 * 8 * 16 + 3 * 2 * 16 * 12)
    judging = 4 * (2 * 2 * 12 * 10 + 3 * 2 * 10)
    through = 4 * (3 * 2 * 12 * 10 + 3 * 2 * 10)
    assert found.parts == {"model": making + 2 * judging + through}
    both = [p for module in (generator, critic) for p in module.parameters()]
    assert found.parameters == sum(p.numel() for p in both)


def test_a_generator_that_is_called_for_the_critic_alone_too(
    counted: Callable[..., Counted],
) -> None:
    """Its first result is detached: one forward pass that nobody walks back through."""
    generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)

    def loop() -> None:
        first = torch.optim.SGD(critic.parameters(), lr=0.1)
        second = torch.optim.SGD(generator.parameters(), lr=0.1)
        for _ in range(STEPS):
            made = generator(torch.randn(16, 4))
            (critic(torch.randn(16, 8)).mean() - critic(made.detach()).mean()).backward()
            first.step()
            critic(generator(torch.randn(16, 4))).mean().backward()
            second.step()

    once, judged = 2 * 16 * 4 * 8, 2 * 16 * 8
    found = counted(loop)
    assert found.parts == {"model": 2 * once + 2 * 2 * judged + 3 * judged, "other models": once}


def test_images(counted: Callable[..., Counted]) -> None:
    """Patches of 4 x 4 out of 16 x 16 pixels: 16 positions, which all meet each other."""

    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, WIDTH, 4, 4)
            self.block = Block()
            self.head = nn.Linear(WIDTH, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            x = self.patches(images).flatten(2).transpose(1, 2)
            logits: torch.Tensor = self.head(self.block(x).mean(1))
            return logits

    model = ViT()

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(torch.randn(ROWS, 3, 16, 16)), torch.randint(0, 10, (ROWS,)))

    found = counted(trained(model, loss=loss))
    # Pixels want no gradient. Block is causal here, over the 16 patches.
    patches = 2 * 2 * ROWS * 16 * WIDTH * 3 * 4 * 4
    assert found.parts == {"model": patches + ROWS * 16 * BLOCK + ROWS * 6 * WIDTH * 10}
    assert found.samples == [ROWS] * STEPS
    assert np.isnan(found.tokens).all()
    assert found.flops is not None
    assert (found.flops.tokens_per_step, found.flops.samples_per_step) == (None, ROWS)


def test_sequences_first(counted: Callable[..., Counted]) -> None:
    """As torch's word_language_model: (35, 20) is 35 steps of 20 sequences."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.LSTM(WIDTH, WIDTH, 2)
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, tokens: torch.Tensor, state: Any) -> Any:
            out, state = self.layers(self.embed(tokens), state)
            return self.head(out), state

    model = Recurrent()
    zeros = torch.zeros(2, 20, WIDTH)

    def loss() -> torch.Tensor:
        logits, _ = model(ids(35, 20), (zeros, zeros))
        return F.cross_entropy(logits.flatten(0, 1), ids(700))

    found = counted(trained(model, loss=loss))
    assert found.tokens == [700] * STEPS
    assert found.samples == [20] * STEPS
    # Four gates of D x D from the input and as many from the state, in each of two layers.
    assert found.parts == {"model": 700 * 6 * (2 * 8 * WIDTH**2 + WIDTH * VOCABULARY)}


def test_an_optimizer_for_each_parameter_in_the_backward_pass(
    counted: Callable[..., Counted],
) -> None:
    model = NanoGPT()

    def loop() -> None:
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            optimizers[parameter].zero_grad()  # type: ignore[index]

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
        for _ in range(STEPS):
            model(ids(), ids())[1].backward()

    found = counted(loop)
    assert found.parts == {"model": GPT_STEP}
    assert found.why_not == ""


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_call_inside_a_checkpoint_is_computed_twice(
    counted: Callable[..., Counted], is_reentrant: bool
) -> None:
    model = NanoGPT()

    def loss() -> torch.Tensor:
        start = torch.zeros((), requires_grad=True)  # a re-entrant one asks for such an input

        def forward(_: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = model(tokens, tokens)[1]
            return found

        found: torch.Tensor = checkpoint(forward, start, ids(), use_reentrant=is_reentrant)
        return found

    found = counted(trained(model, loss=loss))
    assert found.parts == {"model": GPT_STEP, "recomputation": GPT_STEP / 3}


def test_one_step_is_enough(counted: Callable[..., Counted]) -> None:
    model = NanoGPT()
    assert counted(trained(model, loss=nano_loss(model), steps=1)).parts == {"model": GPT_STEP}


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    dist: Any = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # FSDP's own, of a group of one
@pytest.mark.usefixtures("alone_in_a_group")
@pytest.mark.parametrize("kind", ["fully_shard", "original parameters", "flat parameters", "DDP"])
def test_a_sharded_model_is_counted_whole(counted: Callable[..., Counted], kind: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model: nn.Module = NanoGPT()
    if kind == "fully_shard":
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
    elif kind == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"),
            use_orig_params=kind == "original parameters",
        )  # fmt: skip
    found = counted(trained(model, loss=nano_loss(model)))
    assert found.parts == {"model": GPT_STEP}
    assert found.tokens == [TOKENS] * STEPS


def test_a_fabric_loop(counted: Callable[..., Counted]) -> None:
    """As litgpt's: the model is in Fabric's wrapper, and its rows are cut in the loop."""
    lightning = pytest.importorskip("lightning")
    fabric = lightning.Fabric(accelerator="cpu", devices=1)

    def loop() -> None:
        model = NanoGPT()
        wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        for _ in range(STEPS):
            rows = ids(ROWS, LENGTH + 1)
            fabric.backward(wrapped(rows[:, :-1], rows[:, 1:])[1])
            optimizer.step()
            optimizer.zero_grad()

    found = counted(loop)
    assert found.parts == {"model": GPT_STEP}
    assert found.tokens == [TOKENS] * STEPS


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_a_lightning_module_without_forward(tmp_path: Path) -> None:
    """Its training_step calls two parts by itself, on rows that it has made one token shorter."""
    lightning = pytest.importorskip("lightning")
    from ergmeter.integrations.lightning import ErgmeterCallback

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.body = Body()
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            (rows,) = batch
            logits = self.head(self.body(rows[:, :-1]))
            return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    rows = torch.utils.data.TensorDataset(ids(ROWS * STEPS, LENGTH + 1))
    callback = ErgmeterCallback(tmp_path / "run", probes=[])
    lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
    ).fit(Module(), torch.utils.data.DataLoader(rows, batch_size=ROWS))  # fmt: skip
    found = Run.open(callback.path)
    assert [one.model_per_step for one in found.flops] == [GPT_STEP]
    steps = found.steps()
    train = steps["phase"] == PHASES.index("train")
    assert steps["tokens_computed"][train].tolist() == [TOKENS] * STEPS


def test_a_model_of_transformers_keeps_its_conventions_and_has_its_teacher(
    counted: Callable[..., Counted],
) -> None:
    """Counted from its configuration, as it is called: a head for the last 4 positions alone."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)

    def loss() -> torch.Tensor:
        found: torch.Tensor = model(input_ids=ids(), logits_to_keep=4).logits.square().mean()
        return found

    found = counted(trained(model, loss=loss))
    assert found.flops is not None
    assert (found.flops.engine, found.flops.convention) == ("analytic", "exact")
    layer = 6 * (4 * WIDTH**2 + 3 * WIDTH * 2 * WIDTH) + 3 * 4 * WIDTH * (LENGTH + 1) / 2
    by_hand = LAYERS * layer + HEAD * 4 / LENGTH
    assert found.flops.tokens_per_step is not None
    assert found.flops.model_per_step / found.flops.tokens_per_step == pytest.approx(by_hand)


@pytest.mark.parametrize("is_on_labels", [True, False])
def test_a_head_that_gives_log_probabilities_in_tiles(
    counted: Callable[..., Counted], monkeypatch: pytest.MonkeyPatch, is_on_labels: bool
) -> None:
    """As TRL's trainers: all positions but the last, or where Triton works those with a label.

    Its tiles are computed again on the way back.
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)

    def fused(fused_lm_head: bool, labels: torch.Tensor, **given: Any) -> torch.Tensor:
        assert fused_lm_head
        hidden = model.model(**given).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden).flatten(0, 1)
        return F.cross_entropy(logits, labels[:, 1:].flatten())

    monkeypatch.setattr(model, "forward", fused)
    if is_on_labels:
        monkeypatch.setattr("ergmeter.integrations.torch.recorded_step._TRITON", ("cpu",))
    skipped = iter([4, 8, 2, 12])  # positions of a row without a label, the first one among them

    def loss() -> torch.Tensor:
        labels = ids()
        labels[:, : next(skipped)] = -100
        found: torch.Tensor = model(input_ids=ids(), labels=labels, fused_lm_head=True)
        return found

    found = counted(trained(model, loss=loss))
    assert found.flops is not None
    assert found.flops.tokens_per_step is not None
    layer = 6 * (4 * WIDTH**2 + 3 * WIDTH * 2 * WIDTH) + 3 * 4 * WIDTH * (LENGTH + 1) / 2
    share = (12 + 8 + 14 + 4) / 4 / LENGTH if is_on_labels else (LENGTH - 1) / LENGTH
    tokens = found.flops.tokens_per_step
    each = {name: (flops or 0.0) / tokens for name, flops in found.parts.items()}
    assert each.pop("padding") > 0
    assert each["model"] == pytest.approx(LAYERS * layer + HEAD * share)
    assert each["recomputation"] == pytest.approx(HEAD / 3 * share)


def test_flops_that_were_given_stay(tmp_path: Path) -> None:
    given = Flops(123.0, "mine", "given", tokens_per_step=TOKENS)
    watched = watch(out=tmp_path / "run", probes=[], flops=given)
    model = NanoGPT()
    trained(model, loss=nano_loss(model))()
    watched.close()
    assert Run.open(watched.path).flops == (given,)


def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    """Nobody there would end it; a child that trains by itself has a recorder of its own."""
    watched = watch(out=tmp_path / "run", probes=[])
    model = NanoGPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first: Any = nano_loss(model)()
    first.backward()
    child = os.fork()
    if not child:
        os._exit(int(torch.autograd.backward.__module__.startswith("ergmeter")))
    assert os.waitpid(child, 0)[1] == 0
    optimizer.step()
    watched.close()
    assert [one.model_per_step for one in Run.open(watched.path).flops] == [GPT_STEP]


def test_losses_are_the_same_with_and_without(tmp_path: Path) -> None:
    def run(out: Path | None) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(7)
        watched = watch(out=out, probes=[]) if out is not None else None
        model = NanoGPT()
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []
        for _ in range(6):
            loss = model(ids(), ids())[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if watched is not None:
            watched.close()
            losses.append(torch.rand(()).item())
        else:
            losses.append(torch.rand(()).item())
        return losses, [p.detach().clone() for p in model.parameters()]

    losses, parameters = run(None)
    others, those = run(tmp_path / "run")
    assert losses == others
    assert all(torch.equal(a, b) for a, b in zip(parameters, those, strict=True))


def test_no_thread_is_joined_between_the_first_step_and_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[str] = []
    join = threading.Thread.join

    def noted(self: threading.Thread, timeout: float | None = None) -> None:
        joined.append(self.name)
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", noted)
    watched = watch(out=tmp_path / "run", probes=[])
    model = NanoGPT()
    optimizer = torch.optim.AdamW(model.parameters())
    end_s = float("inf")
    while time.monotonic() < end_s:
        model(ids(), ids())[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        if end_s == float("inf"):  # making a run joins what opens its probes, in the first step
            joined.clear()
            end_s = time.monotonic() + 2.5  # by then another process counts
    assert joined == []
    watched.close()
    assert Run.open(watched.path).flops[0].model_per_step == GPT_STEP


# -- what programs do besides ---------------------------------------------------------------------


class Mode(Enum):
    TRAIN = 1


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


SCALE = torch.ones(1)


class Linear(nn.Module):
    """One product, of a batch of any kind; reads a tensor that is a global of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, batch: Any, mode: Mode = Mode.TRAIN) -> torch.Tensor:
        x = (
            batch.x
            if isinstance(batch, Slots)
            else batch["x"]
            if isinstance(batch, dict)
            else batch
        )
        found: torch.Tensor = self.inner(x * SCALE)
        return found


def linear_step(rows: int) -> int:
    """Its forward pass, and the gradient of its weights."""
    return 2 * 2 * rows * WIDTH**2


def test_the_programs_classes_stay_its_own(counted: Callable[..., Counted]) -> None:
    """Classes are sent by value, and what is loaded in the same process must be another one."""
    model, forward = Linear(), Linear.forward
    counted(trained(model, loss=lambda: model(torch.randn(ROWS, WIDTH)).sum()))
    assert Linear.forward is forward
    assert forward.__globals__ is globals()
    assert type(model(torch.randn(ROWS, WIDTH))) is torch.Tensor


def test_batches_of_any_kind_are_told_apart_by_their_shapes(
    counted: Callable[..., Counted],
) -> None:
    def in_defaultdict(x: torch.Tensor) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = defaultdict(lambda: x)
        found["x"] = x
        return found

    model = Linear()

    def loss() -> torch.Tensor:
        calls = [model(Slots(torch.randn(rows, WIDTH))) for rows in (1, 2)]
        calls += [model(in_defaultdict(torch.randn(rows, WIDTH))) for rows in (4, 8)]
        calls += [model(torch.randn(16, WIDTH), mode=Mode.TRAIN)]
        return torch.stack([one.sum() for one in calls]).sum()

    assert counted(trained(model, loss=loss)).parts == {"model": linear_step(31)}


def test_a_frozen_model_that_is_gone_before_the_first_step_is_not_kept(
    counted: Callable[..., Counted],
) -> None:
    """As a text encoder, whose embeddings are computed once."""
    model, encoder = Linear(), Linear()
    gone = ref(encoder.inner.weight)
    alive = []

    def loop() -> None:
        nonlocal encoder
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            encoder(torch.randn(ROWS, WIDTH))
        del encoder
        gc.collect()
        alive.append(gone())
        for _ in range(STEPS):
            model(torch.randn(ROWS, WIDTH)).sum().backward()
            optimizer.step()

    assert counted(loop).parts == {"model": linear_step(ROWS)}
    assert alive == [None]


def test_a_backward_pass_by_autograd_grad_is_counted(counted: Callable[..., Counted]) -> None:
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        for _ in range(STEPS):
            loss = model(torch.randn(ROWS, WIDTH)).sum()
            (model.inner.weight.grad,) = torch.autograd.grad(loss, [model.inner.weight])
            optimizer.step()

    found = counted(loop)
    assert found.parts == {"model": linear_step(ROWS)}
    assert found.flops is not None
    assert any("no call of backward was seen" in one for one in found.flops.assumptions)


@pytest.mark.parametrize("losses", ["the same", "two"])
def test_a_second_backward_pass_over_one_graph_is_named(
    counted: Callable[..., Counted], losses: str
) -> None:
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        for _ in range(STEPS):
            out = model(torch.randn(ROWS, WIDTH))
            first = out.sum()
            first.backward(retain_graph=True)
            (first if losses == "the same" else out.pow(2).sum()).backward()
            optimizer.step()

    found = counted(loop)
    assert found.flops is not None
    assert found.flops.not_counted == ("a second backward pass over one graph x 1",)


def test_a_failure_of_our_own_is_the_reason(
    counted: Callable[..., Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("ergmeter.integrations.torch.calls._spec", fails)
    model = Linear()
    found = counted(trained(model, loss=lambda: model(torch.randn(ROWS, WIDTH)).sum()))
    assert found.flops is None
    assert found.why_not == (
        "ergmeter failed to record the calls of a step (ZeroDivisionError: ours)"
    )
