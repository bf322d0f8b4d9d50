"""What does asking for MFU every N steps cost a training loop?

The monitors whose functions ours replace give a table of
"50 to 200 ms, 0.1 % at every 500 steps" that is arithmetic on a guess. Here the first call and the
later ones are timed on models of several sizes, and the share is of steps that were timed beside.
The old way, a forward pass under torch.profiler, takes its turn in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tables
from ergmeter.compat.training_monitor import calculate_mfu_with_profiler

EVERY = (1, 10, 50, 100, 500)
# Hidden size, layers, feed-forward, heads, key-value heads, vocabulary.
SIZES = {
    "Llama, 2 layers, 0.5 M": (128, 2, 352, 4, 2, 512),
    "Llama, 12 layers, 130 M": (768, 12, 2048, 12, 4, 32000),
    "Llama, 16 layers, 1.2 B": (2048, 16, 8192, 32, 8, 128256),
}


def config_of(size: str) -> LlamaConfig:
    """A configuration of that size."""
    hidden, layers, inner, heads, kv_heads, vocabulary = SIZES[size]
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )


class Plain(torch.nn.Module):
    """The same model without a configuration, so that it has to be run to be counted."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401  any model
        super().__init__()
        self.inner = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Its logits."""
        logits: torch.Tensor = self.inner(input_ids=input_ids, use_cache=False).logits
        return logits


def timed_ms(model: torch.nn.Module) -> float:
    """One call."""
    before = time.perf_counter()
    calculate_mfu_with_profiler(model, 4, 512, 0.1)
    return 1e3 * (time.perf_counter() - before)


def profiled_ms(model: Any) -> float:  # noqa: ANN401
    """What such monitors do: a forward pass of a made-up batch under the profiler."""
    ids = torch.zeros(4, 128, dtype=torch.long)
    before = time.perf_counter()
    with (
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, with_flops=True
        ) as profile,
        torch.no_grad(),
    ):
        model(input_ids=ids)
    sum(event.flops for event in profile.events() if event.flops)
    return 1e3 * (time.perf_counter() - before)


def step_ms(model: Any, optimizer: torch.optim.Optimizer) -> float:  # noqa: ANN401
    """One training step of the small model."""
    ids = torch.zeros(4, 128, dtype=torch.long)
    before = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return 1e3 * (time.perf_counter() - before)


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time the calls, then work out their share of steps timed in the same run."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rounds = arguments.rounds or 5
    rows = []
    later_ms = 0.0
    for name in SIZES:
        config = config_of(name)
        for kind in ("config", "shapes"):
            firsts, laters = [], []
            for _ in range(rounds):
                with torch.device("meta"):
                    made: Any = LlamaForCausalLM
                    model = made(config)
                asked = model if kind == "config" else Plain(model)
                firsts.append(timed_ms(asked))
                laters += [timed_ms(asked) for _ in range(20)]
            first, later = statistics.median(firsts), statistics.median(laters)
            rows.append((f"{name}, from its {kind}", first, tables.spread(firsts), 1e3 * later))
            later_ms = max(later_ms, statistics.median(laters))
    tables.show(
        "calculate_mfu_with_profiler", ("model", "first call ms", "range ms", "later us"), rows
    )
    made = LlamaForCausalLM
    small = made(config_of(next(iter(SIZES))))
    optimizer = torch.optim.AdamW(small.parameters())
    steps, olds = [], []
    for _ in range(4 * rounds):
        steps.append(step_ms(small, optimizer))
        olds.append(profiled_ms(small))
    step, old = statistics.median(steps[1:]), statistics.median(olds[1:])
    shares = [
        (f"every {every}", 100 * later_ms / every / step, 100 * old / every / step)
        for every in EVERY
    ]
    tables.show(
        "share of a step of the smallest model", ("asked", "ours %", "profiled forward %"), shares,
        note=f"A step of it takes {step:.1f} ms here, a profiled forward pass {old:.1f} ms, a later"
        f" call of ours {1e3 * later_ms:.0f} us; the first call is once a run.",
    )  # fmt: skip
    return {"rows": rows, "shares": shares}


if __name__ == "__main__":
    tables.run(bench, tables.parser(__doc__).parse_args())
