"""The demo: a small model, trained for some seconds under a Meter.

On a GPU the host only queues work, so a step that ends when the queue is full looks ten times too
fast. Here each step waits for its own work. A loop that must not wait reads its loss every few
steps instead: its window is then still right, its single steps are not.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from ergmeter.errors import UsageError
from ergmeter.meter import Budget, Meter
from ergmeter.records import Reported
from ergmeter.workloads import demo_text
from ergmeter.workloads.demo_text import DemoText

# A small Llama in plain torch, with the parts whose cost matters: pre-norm with RMSNorm, rotary
# positions, grouped-query attention through the fused kernel, a SwiGLU, and an output head tied to
# the embedding. Caches, parallelism and dropout are left out.
#
# Touvron et al. 2023 (arXiv 2302.13971) for the block; Su et al. 2021 (2104.09864) for the
# rotation; Ainslie et al. 2023 (2305.13245) for the grouped heads.


_INITIAL_STD = 0.02
_EPSILON = 1e-5  # of the norms


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a model."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int  # heads / kv_heads queries share one key and one value
    hidden: int  # of the SwiGLU
    context: int  # the longest input, in tokens
    rotary_base: float = 10_000.0

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    @property
    def described(self) -> dict[str, object]:
        """The shape as the fields of a config.json, to count FLOPs from."""
        return {
            "model_type": "llama", "hidden_size": self.width, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.hidden, "vocab_size": self.vocabulary,
            "tie_word_embeddings": True,
        }  # fmt: skip

    @property
    def parameters(self) -> int:
        """How many parameters the model has; the tied head is the embedding, counted once."""
        attention = 2 * self.width**2 + 2 * self.width * self.kv_heads * self.head_width
        layer = attention + 3 * self.width * self.hidden + 2 * self.width
        return self.vocabulary * self.width + self.layers * layer + self.width


def rotation(length: int, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, (length, head_width / 2)."""
    rates = base ** (-torch.arange(0, head_width, 2).float() / head_width)
    angles = torch.outer(torch.arange(length).float(), rates)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + half]) of the last dimension by its position's angle.

    Turning both q and k makes their product depend on how far apart they are, not on where.
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).type_as(x)


class LlamaLayer(nn.Module):
    """Causal attention, then a SwiGLU, each normalised before and added to its input.

    Groups of query heads share a key and a value head.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.group = config.heads // config.kv_heads
        kv_width = config.kv_heads * config.head_width
        linear = partial(nn.Linear, bias=False)
        self.attention_norm = nn.RMSNorm(config.width, eps=_EPSILON)
        self.q = linear(config.width, config.width)
        self.k = linear(config.width, kv_width)
        self.v = linear(config.width, kv_width)
        self.out = linear(config.width, config.width)
        self.forward_norm = nn.RMSNorm(config.width, eps=_EPSILON)
        self.gate = linear(config.width, config.hidden)
        self.up = linear(config.width, config.hidden)
        self.down = linear(config.hidden, config.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the layer."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.forward_norm(x))

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal self-attention: mix each position with the positions before it."""
        q, k, v = (self._heads(project(x)) for project in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        # The kernel can share heads by itself (enable_gqa), but only from torch 2.5 on, and not on
        # every device; repeating is the same sum.
        k, v = (kv.repeat_interleave(self.group, dim=1) for kv in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined

    def feed_forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself: the SwiGLU."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, length, width) to (batch, heads, length, head_width)."""
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)


class Llama(nn.Module):
    """Tokens in, logits of the next token out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=_EPSILON)
        cos, sin = rotation(config.context, config.head_width, config.rotary_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=_INITIAL_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) to (batch, length, vocabulary)."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x: Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight)


# Batches, with three token counts. Documents differ in length, so a batch is in part padding; as in
# instruction tuning, the request bears no loss:
#
#     computed   every position of the rectangle, padding included: what the hardware does
#     real       the positions that hold text: what the reader of a throughput expects
#     loss       the positions whose next byte is part of a tale: what the model learns from


PADDING = 0  # a byte that no text holds
NO_LOSS = -100  # what torch's cross_entropy leaves out

# Kernels are chosen and cached by shape. A few widths keep a step from paying for a new one each
# time; the price is a little more padding, which is counted.
WIDTH_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class DemoBatch:
    """Bytes in and the byte to predict at each position, with the three counts of its tokens."""

    inputs: torch.Tensor  # (documents, width)
    targets: torch.Tensor  # the same shape; NO_LOSS in padding and within the request
    tokens_computed: int
    tokens_real: int
    tokens_loss: int

    @property
    def samples(self) -> int:
        """The number of documents."""
        return len(self.inputs)

    def to(self, device: torch.device) -> DemoBatch:
        """The same batch on a device."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))


def batch_of(documents: Sequence[DemoText], *, multiple: int = WIDTH_MULTIPLE) -> DemoBatch:
    """Documents side by side, padded on the right to the longest, rounded up to a multiple.

    A document of n bytes has n - 1 positions: its last byte is predicted and never read. With the
    padding on the right, a causal model cannot see it from any real position, so it needs no mask.
    """
    longest = max(len(document.text) - 1 for document in documents)
    width = -(-longest // multiple) * multiple
    inputs = torch.full((len(documents), width), PADDING)
    targets = torch.full((len(documents), width), NO_LOSS)
    real = bearing = 0
    for row, document in enumerate(documents):
        text = torch.tensor(list(document.text))
        positions, asked = len(text) - 1, len(document.prompt)
        inputs[row, :positions] = text[:-1]
        # Position i predicts byte i + 1, so the tale's first byte is predicted at asked - 1.
        targets[row, asked - 1 : positions] = text[asked:]
        real += positions
        bearing += len(document.tale)
    return DemoBatch(inputs, targets, inputs.numel(), real, bearing)


def endless_batches(documents: Sequence[DemoText], size: int, *, seed: int) -> Iterator[DemoBatch]:
    """Yield batches of `size` documents for ever, shuffled each round; the rest is dropped."""
    order, dice = list(documents), random.Random(seed)
    while True:
        dice.shuffle(order)
        for start in range(0, len(order) - size + 1, size):
            yield batch_of(order[start : start + size])


SEED = 7
WARMUP_STEPS = 3  # first allocations and kernel choices; the fourth step is like all later ones
_TIMED_STEPS = 5  # before the run begins, to tell how many fit into its time
_RAMP_STEPS = 10  # the learning rate rises this long: Adam's first estimates are poor
_LARGEST_GRADIENT = 1.0
_HELD_OUT_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Size:
    """A model, its batch and how much text it gets, made for one kind of device."""

    model: LlamaConfig
    documents: int  # of one batch
    learning_rate: float
    text_bytes: int  # a few epochs in 20 s, not so many that the model memorises the tales


_llama = partial(LlamaConfig, vocabulary=256, context=512)

# 0.6 million parameters: a step of about 0.1 s on one slow core, so that the loss falls in 20 s.
SMALL = Size(
    _llama(width=128, layers=3, heads=4, kv_heads=2, hidden=352), 4, 3e-3, demo_text.SIZE_BYTES
)
# 90 million: enough for the kernels, not the launching of them, to fill the time of a large GPU,
# and by the sizes of its tensors about 6 GB, so that it also fits a small one.
LARGE = Size(_llama(width=1024, layers=8, heads=16, kv_heads=4, hidden=2816), 32, 6e-4, 4_000_000)


@dataclass(frozen=True, slots=True)
class DemoProgress:
    """Progress of the training."""

    elapsed_s: float
    steps: int
    loss: float


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """The run's path and its result. Held-out losses are in nats per byte."""

    run: Path
    interrupted: bool
    held_out: tuple[float, ...]


def device_named(name: str) -> torch.device:
    """The device of that name; "auto" takes an accelerator where there is one."""
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind, is_there in there.items() if is_there)
    if not there.get(name):
        kinds = ", ".join(kind for kind, is_there in there.items() if is_there)
        raise UsageError(f"torch {torch.__version__} has no {name} device here; it has {kinds}")
    return torch.device(name)


def size_for(device: torch.device) -> Size:
    """The large model on CUDA; a laptop's GPU shares its memory with everything else."""
    return LARGE if device.type == "cuda" else SMALL


def computed_in(device: torch.device) -> str:
    """The precision of the model's matrix products on this device."""
    half = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return "bf16" if half else "fp32"


def run(
    seconds: float, *, device: torch.device, out: Path | None, tell: Callable[[DemoProgress], None]
) -> DemoOutcome:
    """Trains for some seconds, measured into a run. An interrupt ends it early."""
    size = size_for(device)
    documents = demo_text.documents(size.text_bytes)
    path = None
    held_out: list[float] = []
    try:
        steps = max(1, round(seconds / DemoTraining(size, device, documents).step_s()))
        with Meter(
            out, name="demo", warmup_steps=WARMUP_STEPS, model=size.model.described,
            seq_len=round(fmean(len(document.text) - 1 for document in documents)),
            dtype=computed_in(device), budget=Budget(steps=steps),
        ) as meter:  # fmt: skip
            path = meter.path
            training = DemoTraining(size, device, documents)  # not the one that was timed
            _train(meter, training, steps, seconds, tell, held_out)
    except KeyboardInterrupt:
        if path is None:
            raise
        return DemoOutcome(path, interrupted=True, held_out=tuple(held_out))
    except torch.cuda.OutOfMemoryError as error:
        raise UsageError(
            f"the device has too little free memory for the demo; try --device cpu ({error})"
        ) from error
    return DemoOutcome(path, interrupted=False, held_out=tuple(held_out))


class DemoTraining:
    """A model, its optimizer and its text, on one device, without any measuring."""

    def __init__(
        self,
        size: Size,
        device: torch.device,
        documents: Sequence[demo_text.DemoText] | None = None,
    ) -> None:
        torch.manual_seed(SEED)
        documents = documents or demo_text.documents(size.text_bytes)
        held_out = size.documents * _HELD_OUT_BATCHES
        self.device = device
        self.model = Llama(size.model).to(device)
        weights = self.model.parameters()
        self.optimizer = torch.optim.AdamW(weights, lr=size.learning_rate, betas=(0.9, 0.95))
        ramp = torch.optim.lr_scheduler.LambdaLR
        self.schedule = ramp(self.optimizer, lambda step: min(1.0, (step + 1) / _RAMP_STEPS))
        self.batches = endless_batches(documents[held_out:], size.documents, seed=SEED)
        self.held_out = [
            batch_of(documents[start : start + size.documents])
            for start in range(0, held_out, size.documents)
        ]

    def step(self, batch: DemoBatch) -> float:
        """One optimizer step, done when this returns."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _LARGEST_GRADIENT)
        self.optimizer.step()
        self.schedule.step()
        self._finish()
        return loss.item()

    def step_s(self) -> float:
        """Do a few steps and return the time of the fastest."""
        times_s = []
        for batch in itertools.islice(self.batches, _TIMED_STEPS):
            start_s = time.monotonic()
            self.step(batch.to(self.device))
            times_s.append(time.monotonic() - start_s)
        return min(times_s)

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss over the tales that are never trained on."""
        losses = [self._loss(batch.to(self.device)) * batch.tokens_loss for batch in self.held_out]
        return float(sum(losses)) / sum(batch.tokens_loss for batch in self.held_out)

    def _loss(self, batch: DemoBatch) -> torch.Tensor:
        half = computed_in(self.device) == "bf16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
            logits = self.model(batch.inputs)
        flat = logits.float().flatten(0, 1)
        return F.cross_entropy(flat, batch.targets.flatten(), ignore_index=NO_LOSS)

    def _finish(self) -> None:
        """Waits until the device has finished its queue."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()


def _train(
    meter: Meter,
    training: DemoTraining,
    goal: int,
    seconds: float,
    tell: Callable[[DemoProgress], None],
    held_out: list[float],
) -> None:
    """The measured loop: data, a step, now and then an evaluation; ends by its goal or its time.

    Evaluation is part of the seconds, except the one at the end.
    """
    start_s = time.monotonic()
    elapsed_s, steps = 0.0, 0
    while steps < goal and elapsed_s < seconds:
        with meter.phase("data"):
            batch = next(training.batches).to(training.device)
        with meter.step(
            batch.tokens_computed, tokens_real=batch.tokens_real, tokens_loss=batch.tokens_loss,
            samples=batch.samples,
        ) as step:  # fmt: skip
            step.learning_rate = float(training.schedule.get_last_lr()[0])
            step.loss = training.step(batch)
        steps += 1
        elapsed_s = time.monotonic() - start_s
        tell(DemoProgress(elapsed_s, steps, step.loss))
        if not held_out and elapsed_s >= seconds / 2:
            held_out.append(_evaluate(meter, training))
    held_out.append(_evaluate(meter, training))


def _evaluate(meter: Meter, training: DemoTraining) -> float:
    batches = training.held_out
    with meter.phase(
        "eval", tokens=sum(batch.tokens_computed for batch in batches),
        tokens_real=sum(batch.tokens_real for batch in batches),
        samples=sum(batch.samples for batch in batches),
    ):  # fmt: skip
        loss = training.evaluate()
    meter.record(Reported(time.monotonic_ns(), "held_out_loss", loss, "nats/token"))
    return loss
