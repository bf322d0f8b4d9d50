"""Readers of model families: each turns a configuration into the description of a model.

`DECODERS` has the readers of decoders by the `model_type` that transformers writes. A
`model_type` that is not listed is an error: no family is read as a similar one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.flops.families import decoders, gemma, hybrids

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.config import ModelConfig
    from ergmeter.flops.graph.layers import Decoder

DECODERS: dict[str, Callable[[ModelConfig], Decoder]] = {
    **decoders.READERS,
    "gemma3n_text": gemma.gemma3n,
    "gemma4_text": gemma.gemma4,
    "qwen3_next": hybrids.qwen3_next,
    "qwen3_5_text": hybrids.qwen3_5,
    "qwen3_5_moe_text": hybrids.qwen3_5,
    "mamba": hybrids.mamba,
    "falcon_mamba": hybrids.mamba,
    "mamba2": hybrids.mamba2,
    "jamba": hybrids.jamba,
    "bamba": hybrids.bamba,
    "falcon_h1": hybrids.falcon_h1,
    "granitemoehybrid": hybrids.granite_hybrid,
    "nemotron_h": hybrids.nemotron_h,
    "lfm2": hybrids.lfm2,
    "lfm2_moe": hybrids.lfm2_moe,
    "minimax": hybrids.minimax,
    "recurrent_gemma": hybrids.recurrent_gemma,
    "kimi_linear": hybrids.kimi_linear,
}
