"""On a real NVIDIA GPU: the memory that `erg estimate` gives beside the allocator's own peak.

Random models from transformers train on random tokens for three steps. The peak is
`torch.cuda.max_memory_allocated()` over the last two: the first one makes the optimizer's states.
It is read for the forward pass, the backward pass and the optimizer's step, so that a difference
can be traced to one of them. Needs torch, transformers and ergmeter. Every row fits 139 GiB; one
that does not fit the device says so.

    python bench/device_estimate.py [--only 8b,deep,families] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers

from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.estimate.estimate import CUBLAS_BYTES
from ergmeter.flops.estimate.memory import Kernels, Memory, Setup, step_memory
from ergmeter.flops.source import model_graph
from ergmeter.flops.work import TrainedParts

DEVICE = "cuda"
STEPS = 3
Untyped: TypeAlias = Any  # what transformers makes
LLAMA_8B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
SMALL = {
    "hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 2816, "vocab_size": 32000,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "pad_token_id": 0,
}  # fmt: skip
ALL_HEADS = {**SMALL, "num_key_value_heads": 16}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "gpt2": {
        "n_embd": 1024, "n_layer": 8, "n_head": 16, "n_positions": 2048, "vocab_size": 32000,
        **NO_DROPOUT,
    },
    "gpt_neox": ALL_HEADS,
    "phi3": SMALL,
    "gemma2": {**SMALL, "head_dim": 64},
    "qwen3": {**SMALL, "head_dim": 64},
    "mistral": {**SMALL, "sliding_window": None},
    "opt": {**ALL_HEADS, "ffn_dim": 4096, "word_embed_proj_dim": 1024, "dropout": 0.0},
}  # fmt: skip
MAKE: dict[str, Any] = {
    "adamw-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, foreach=True),
    "adamw-loop": lambda params: torch.optim.AdamW(params, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
}


@dataclass(frozen=True)
class Case:
    """A training of three steps."""

    family: str
    sizes: dict[str, Any]
    sequences: int
    length: int
    optimizer: str = "adamw-fused"
    output: str = "freed"
    is_checkpointed: bool = False
    has_cache: bool = False

    @property
    def name(self) -> str:
        """In a few words."""
        layers = self.sizes.get("num_hidden_layers", self.sizes.get("n_layer"))
        return (
            f"{self.family}, {layers} layers, {self.sequences} x {self.length}, {self.optimizer},"
            f" output {self.output}"
            + (", checkpointed" if self.is_checkpointed else "")
            + (", cache" if self.has_cache else "")
        )

    @property
    def config(self) -> Untyped:
        """Of transformers."""
        return transformers.AutoConfig.for_model(self.family, **self.sizes)


def cases(only: list[str]) -> Iterator[Case]:
    """Every row, those of one model together."""
    whole = Case("llama", LLAMA_8B, 8, 2048, is_checkpointed=True)
    if "8b" in only:
        yield whole
        yield replace(whole, output="until-next")
        yield replace(whole, optimizer="adamw")
        yield replace(whole, optimizer="adamw-loop")
        yield replace(whole, optimizer="sgd", sequences=16)
        yield replace(whole, sequences=1, length=8192)
        yield replace(whole, sequences=2, length=512)
    part = Case("llama", {**LLAMA_8B, "num_hidden_layers": 8}, 4, 2048)
    if "deep" in only:
        yield part
        yield replace(part, optimizer="adamw", output="until-next", has_cache=True)
        yield replace(part, optimizer="sgd")
        yield replace(part, sizes={**part.sizes, "vocab_size": 1000})
        yield replace(part, sizes={**part.sizes, "vocab_size": 1000}, is_checkpointed=True)
    if "families" in only:
        for family, sizes in FAMILIES.items():
            each = Case(family, sizes, 2, 2048)
            yield each
            yield replace(each, has_cache=True, output="until-next")
            yield replace(each, is_checkpointed=True)


def estimate(case: Case, model: Untyped) -> Memory:
    """What ergmeter makes of it."""
    kernels = Kernels(
        attention="eager" if model.config._attn_implementation == "eager" else "sdpa",
        has_cache=case.has_cache,
    )
    setup = Setup(
        optimizer=case.optimizer,
        output=case.output,  # type: ignore[arg-type]
        kernels=kernels,
        workspace_bytes=CUBLAS_BYTES,
    )
    graph = model_graph(ModelConfig(case.config.to_dict(), where=case.family))
    training = TrainedParts(checkpointing="full" if case.is_checkpointed else "none")
    return step_memory(graph, Batch.of(case.sequences, case.length), training=training, setup=setup)


def build(case: Case) -> Untyped:
    """The model with random weights, in bf16, made on the GPU."""
    torch.manual_seed(0)
    made: Any = transformers.AutoModelForCausalLM
    with torch.device(DEVICE):
        model = made.from_config(case.config, dtype=torch.bfloat16)
    return model.train()


def phases(case: Case, model: Untyped) -> dict[str, int]:
    """The allocator's peak in each part of the last steps, bytes."""
    model.config.use_cache = case.has_cache
    if case.is_checkpointed:
        model.gradient_checkpointing_enable()
    else:
        model.gradient_checkpointing_disable()
    optimizer = MAKE[case.optimizer](model.parameters())
    vocab = model.config.vocab_size
    tokens = torch.randint(0, vocab, (case.sequences, case.length), device=DEVICE)
    peaks = {"forward": 0, "backward": 0, "optimizer": 0}
    output = None

    def read(phase: str, step: int) -> None:
        torch.cuda.synchronize()
        if step:
            peaks[phase] = max(peaks[phase], torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    for step in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        if case.output == "freed":
            loss = model(input_ids=tokens, labels=tokens).loss
        else:
            output = model(input_ids=tokens, labels=tokens)
            loss = output.loss
        read("forward", step)
        loss.backward()
        read("backward", step)
        optimizer.step()
        read("optimizer", step)
        optimizer.zero_grad(set_to_none=True)
    del output
    return peaks


def measured(case: Case, model: Untyped) -> dict[str, Any]:
    """One row."""
    memory = estimate(case, model)
    row: dict[str, Any] = {
        "case": case.name,
        "estimated_bytes": memory.peak.total_bytes,
        "at": memory.peak.name,
        "moments": {moment.name: moment.total_bytes for moment in memory.moments},
    }
    begin = time.monotonic()
    try:
        peaks = phases(case, model)
    except torch.OutOfMemoryError:
        row["failed"] = "out of memory"
    else:
        most = max(peaks.values())
        row |= {"measured_bytes": most, "phases": peaks}
        row["ratio"] = row["estimated_bytes"] / most
    row["seconds"] = time.monotonic() - begin
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    return row


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    estimated = f"{row['estimated_bytes'] / 1e9:8.3f}"
    if "failed" in row:
        return f"{estimated}   {row['failed']:>25}  {row['case']}"
    peaks = " ".join(f"{size / 1e9:.3f}" for size in row["phases"].values())
    return (
        f"{estimated} {row['measured_bytes'] / 1e9:8.3f} {row['ratio']:7.4f}  {row['case']}\n"
        f"{'':26} measured: {peaks}; estimated: {row['at']}; {row['seconds']:.0f} s"
    )


def main() -> None:
    """Run all rows and print each as it comes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="8b,deep,families")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__},"
        f" transformers {transformers.__version__}; GB: estimated, measured, ratio;"
        " measured by forward, backward, optimizer",
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    model, built = None, None
    for case in cases(given.only.split(",")):
        if built != (case.family, case.sizes):
            model = None
            gc.collect()
            torch.cuda.empty_cache()
            model, built = build(case), (case.family, case.sizes)
        rows.append(measured(case, model))
        print(line(rows[-1]), flush=True)
        if given.out:
            given.out.write_text(json.dumps(rows, indent=1))
    off = [abs(row["ratio"] - 1) for row in rows if "ratio" in row]
    if off:
        print(f"{len(off)} of {len(rows)} rows; worst ratio is off by {max(off):.2%}")


if __name__ == "__main__":
    main()
