"""Does each counter see all of a step's FLOPs?

An operator without a rule counts as nothing. One model is run through implementations
that compute the same thing, so every figure should be 1: a small Llama with grouped queries, eager
and through `scaled_dot_product_attention`, quantized to 4 bits; a small Mixtral whose experts are a
loop, and grouped. A ratio is to the products of the eager model, counted by hand in the sense that
each is a plain matrix product that all of the tools agree on.

Forward pass only, since not all of the tools see a backward one; ours and FlopCounterMode for a
training step as well. fvcore counts multiplications, so its figure is doubled.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import tables

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ergmeter.flops.counted.count import count

BATCH, LENGTH = 2, 256
hf: Any = transformers  # its own types know only the configurations it lists
LLAMA: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 704,
    "vocab_size": 1024,
}
MIXTRAL = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}


def llama(attention: str, *, keys: int = 2) -> nn.Module:
    """A small Llama."""
    config = hf.LlamaConfig(**LLAMA, num_key_value_heads=keys, use_cache=False)
    made: nn.Module = hf.LlamaForCausalLM._from_config(config, attn_implementation=attention)
    return made


def mixtral(experts: str) -> nn.Module:
    """A small Mixtral, attention eager."""
    made: Any = hf.MixtralForCausalLM._from_config(
        hf.MixtralConfig(**MIXTRAL, use_cache=False), attn_implementation="eager"
    )
    made.config._experts_implementation = experts
    model: nn.Module = made
    return model


def four_bit() -> nn.Module:
    """The small Llama with the layers of its blocks packed."""
    bitsandbytes: Any = import_module("bitsandbytes")

    model = llama("eager")
    inner: Any = model.model
    for name, layer in list(inner.named_modules()):
        if isinstance(layer, nn.Linear):
            packed = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, bias=False)
            packed.load_state_dict(layer.state_dict())
            packed.weight.requires_grad_(False)
            inner.set_submodule(name, packed.to("cpu"))
    return model


def frozen() -> nn.Module:
    """What the 4-bit one stands for: packed weights take no gradient."""
    model = llama("eager")
    for layer in model.model.modules():  # type: ignore[union-attr]
        if isinstance(layer, nn.Linear):
            layer.requires_grad_(False)
    return model


# What the table calls it, the model, and the plain one it equals.
MODELS: tuple[tuple[str, Callable[[], nn.Module], Callable[[], nn.Module]], ...] = (
    ("eager", lambda: llama("eager"), lambda: llama("eager")),
    ("sdpa", lambda: llama("sdpa", keys=8), lambda: llama("eager", keys=8)),
    ("sdpa, grouped queries", lambda: llama("sdpa"), lambda: llama("eager")),
    ("experts, a loop", lambda: mixtral("eager"), lambda: mixtral("eager")),
    ("experts, grouped_mm", lambda: mixtral("grouped_mm"), lambda: mixtral("eager")),
    ("4 bits", four_bit, frozen),
)


def ids() -> torch.Tensor:
    """A batch."""
    return torch.zeros(BATCH, LENGTH, dtype=torch.long)


def ours(model: nn.Module) -> float:
    """Forward FLOPs by `ergmeter.flops.counted.count.count`."""
    return count(model, batch_size=BATCH, seq_len=LENGTH).total.forward


def flop_counter(model: nn.Module) -> float:
    """Forward FLOPs by torch's FlopCounterMode."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids())
    return float(counter.get_total_flops())


def profiler(model: nn.Module) -> float:
    """Forward FLOPs by torch.profiler."""
    with torch.profiler.profile(with_flops=True) as seen, torch.no_grad():
        model(input_ids=ids())
    return float(sum(event.flops or 0 for event in seen.key_averages()))


def by_calflops(model: nn.Module) -> float:
    """Forward FLOPs by calflops."""
    calflops: Any = import_module("calflops")

    with torch.no_grad():
        found = calflops.calculate_flops(
            model=model,
            kwargs={"input_ids": ids()},
            print_results=False,
            output_as_string=False,
        )
    return float(found[0])


def fvcore(model: nn.Module) -> float:
    """Twice the multiplications that fvcore counts forward."""
    analysis: Any = import_module("fvcore.nn").FlopCountAnalysis

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(input_ids=tokens).logits
            return logits

    found = analysis(Logits(), ids())
    return 2.0 * float(
        found.unsupported_ops_warnings(False).uncalled_modules_warnings(False).total()
    )


def deepspeed(model: nn.Module) -> float:
    """Forward FLOPs by DeepSpeed's profiler."""
    profile: Any = import_module("deepspeed.profiling.flops_profiler").get_model_profile

    found = profile(
        model=model,
        kwargs={"input_ids": ids()},
        print_profile=False,
        as_string=False,
    )
    return float(found[0])


TOOLS: dict[str, Callable[[nn.Module], float]] = {
    "ergmeter": ours,
    "FlopCounterMode": flop_counter,
    "torch.profiler": profiler,
    "calflops": by_calflops,
    "fvcore x 2": fvcore,
    "DeepSpeed": deepspeed,
}


def ratio(tool: Callable[[nn.Module], float], model: nn.Module, truth: float) -> float | str:
    """A tool's figure as a share of the truth, or why it has none."""
    try:
        return round(tool(model) / truth, 3)
    except ImportError:
        return "not installed"
    except Exception as error:  # noqa: BLE001  a peer's failure is its result
        return f"raises {type(error).__name__}"


def step_flops(model: nn.Module) -> float:
    """A training step's FLOPs by FlopCounterMode."""
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids()).logits.sum().backward()
    return float(counter.get_total_flops())


def bench(_: argparse.Namespace) -> dict[str, Any]:
    """Count every model with every tool; print the table."""
    rows, steps = [], []
    for label, make, plain in MODELS:
        try:
            make()
        except ImportError as error:
            print(f"{label}: left out ({error})", file=sys.stderr)
            continue
        truth, step_truth = flop_counter(plain()), step_flops(plain())
        rows.append([label, *(ratio(tool, make(), truth) for tool in TOOLS.values())])
        step = [count(make(), batch_size=BATCH, seq_len=LENGTH).total.model, step_flops(make())]
        steps.append([label, *(round(flops / step_truth, 3) for flops in step)])
    version = f"torch {torch.__version__}, transformers {transformers.__version__}"
    tables.show(f"Forward FLOPs, as a share of the eager products ({version})",
                ("model", *TOOLS), rows)  # fmt: skip
    tables.show("A training step's, likewise", ("model", "ergmeter", "FlopCounterMode"), steps)
    return {"forward": rows, "step": steps}


def main() -> None:
    """Entry point."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    tables.run(bench, tables.parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
