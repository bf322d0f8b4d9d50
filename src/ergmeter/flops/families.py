"""The readers of decoder families, by the `model_type` that transformers writes.

A `model_type` that is not here is an error that says so: no family is ever read as its neighbour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.flops import classics, hybrids, llamas, mixtures

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.config import Config
    from ergmeter.flops.layers import Decoder

DECODERS: dict[str, Callable[[Config], Decoder]] = {
    "llama": llamas.llama,
    "mistral": llamas.mistral,
    "ministral": llamas.mistral,
    "qwen2": llamas.qwen2,
    "qwen3": llamas.qwen3,
    "gemma": llamas.gemma,
    "gemma2": llamas.gemma2,
    "gemma3_text": llamas.gemma3,
    "phi": classics.phi,
    "phi3": llamas.phi3,
    "gpt2": classics.gpt2,
    "gpt_neox": classics.gpt_neox,
    "falcon": classics.falcon,
    "mpt": classics.mpt,
    "olmo": llamas.olmo,
    "olmo2": llamas.olmo2,
    "olmo3": llamas.olmo2,
    "granite": llamas.llama,
    "smollm3": llamas.llama,
    "helium": llamas.llama,
    "cohere": llamas.cohere,
    "starcoder2": classics.starcoder2,
    "stablelm": llamas.stablelm,
    "mixtral": mixtures.mixtral,
    "qwen2_moe": mixtures.qwen2_moe,
    "qwen3_moe": mixtures.qwen3_moe,
    "qwen3_next": hybrids.qwen3_next,
    "deepseek_v2": mixtures.deepseek,
    "deepseek_v3": mixtures.deepseek,
    "kimi_k2": mixtures.deepseek,
    "gpt_oss": mixtures.gpt_oss,
    "granitemoe": mixtures.granite_moe,
    "olmoe": mixtures.olmoe,
    "llama4_text": mixtures.llama4,
    "mamba": hybrids.mamba,
    "falcon_mamba": hybrids.mamba,
    "mamba2": hybrids.mamba2,
    "jamba": hybrids.jamba,
    "bamba": hybrids.bamba,
    "falcon_h1": hybrids.falcon_h1,
    "granitemoehybrid": hybrids.granite_hybrid,
    "gptj": classics.gptj,
    "gpt_neo": classics.gpt_neo,
    "gpt_bigcode": classics.gpt_bigcode,
    "opt": classics.opt,
    "bloom": classics.bloom,
    "glm": llamas.glm,
    "glm4": llamas.glm4,
    "glm4_moe": mixtures.glm4_moe,
    "phimoe": mixtures.phimoe,
    "dbrx": mixtures.dbrx,
    "ernie4_5": llamas.ernie,
    "ernie4_5_moe": mixtures.ernie_moe,
    "exaone4": llamas.exaone4,
    "nemotron": classics.nemotron,
    "arcee": llamas.arcee,
    "seed_oss": llamas.seed_oss,
    "hunyuan_v1_dense": llamas.hunyuan,
    "cohere2": llamas.cohere2,
    "minimax_m2": mixtures.minimax_m2,
    "qwen3_5_text": hybrids.qwen3_5,
    "qwen3_5_moe_text": hybrids.qwen3_5,
    "nemotron_h": hybrids.nemotron_h,
}
