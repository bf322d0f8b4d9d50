"""Readers of model families: each turns a configuration into the description of a model.

`DECODERS` has the readers of decoders by the `model_type` that transformers writes. A
`model_type` that is not listed is an error: no family is read as a similar one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.flops.families import classics, hybrids, llamas, mixtures

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.config import ModelConfig
    from ergmeter.flops.graph.layers import Decoder

DECODERS: dict[str, Callable[[ModelConfig], Decoder]] = {
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
    "olmo3": llamas.olmo3,
    "granite": llamas.llama,
    "smollm3": llamas.smollm3,
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
    "ministral3": llamas.mistral,
    "bitnet": llamas.bitnet,
    "nanochat": llamas.nanochat,
    "apertus": llamas.apertus,
    "cwm": llamas.cwm,
    "dots1": mixtures.dots1,
    "flex_olmo": mixtures.flex_olmo,
    "granitemoeshared": mixtures.granite_moe,
    "hunyuan_v1_moe": mixtures.hunyuan_moe,
    "gpt-sw3": classics.gpt2,
    "gemma3n_text": llamas.gemma3n,
    "gemma4_text": llamas.gemma4,
    "lfm2": hybrids.lfm2,
    "lfm2_moe": hybrids.lfm2_moe,
    "minimax": hybrids.minimax,
    "recurrent_gemma": hybrids.recurrent_gemma,
    "kimi_linear": hybrids.kimi_linear,
}
