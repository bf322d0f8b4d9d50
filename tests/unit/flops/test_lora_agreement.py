"""LoRA, frozen parts and checkpointing: the analytic count against the same model, run."""

from __future__ import annotations

from typing import Any

import peft
import pytest
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ergmeter.flops.adapters import Lora, with_adapters
from ergmeter.flops.analytic import step_flops, total
from ergmeter.flops.batch import Batch
from ergmeter.flops.config import Config
from ergmeter.flops.counted import count
from ergmeter.flops.models import model_graph

BATCH, SEQ = 2, 32
LLAMA = LlamaConfig(
    hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=160, vocab_size=256,
)  # fmt: skip
QWEN3 = Qwen3Config(
    hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=160, vocab_size=256,
)  # fmt: skip
GPT2 = GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=256)
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LLAMA, LlamaForCausalLM),
    "qwen3": (QWEN3, Qwen3ForCausalLM),
    "gpt2": (GPT2, GPT2LMHeadModel),
}


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", ["q_proj", "v_proj"]),
        ("llama", ["down_proj"]),
        ("llama", "all-linear"),
        ("qwen3", ["k_proj", "o_proj", "gate_proj"]),
        ("gpt2", ["c_attn"]),
        ("gpt2", ["c_fc", "c_proj"]),
    ],
)
def test_lora_costs_what_peft_computes(
    family: str, targets: Any, checkpointing: bool, dora: bool
) -> None:
    config, made = MODELS[family]
    config._attn_implementation = "eager"
    adapters = peft.LoraConfig(
        r=4, target_modules=targets, use_dora=dora, fan_in_fan_out=family == "gpt2"
    )
    model = peft.get_peft_model(made(config), adapters)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    counted = count(model, batch_size=BATCH, seq_len=SEQ)
    names = (targets,) if isinstance(targets, str) else tuple(targets)
    graph, trainable = with_adapters(
        model_graph(Config(config.to_dict(), where=family)), Lora(4, names, is_dora=dora)
    )
    analytic = total(step_flops(graph, Batch.of(BATCH, SEQ), trainable=trainable, pairs="computed"))
    if not dora:
        assert analytic.forward == counted.total.forward
    if not checkpointing and not dora:
        assert analytic.backward == counted.total.backward
    assert sum(n.params for n in graph if trainable(n)) == counted.params_trained
