"""LoRA, frozen parts and checkpointing: the analytic count against the same model, run."""

from __future__ import annotations

from typing import Any

import peft
import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ergmeter.errors import UsageError
from ergmeter.flops.analytic import step_flops, total
from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.counted.count import count
from ergmeter.flops.graph.adapters import Lora, with_adapters
from ergmeter.flops.source import model_graph

pytestmark = pytest.mark.frameworks

BATCH, SEQ = 2, 32
LLAMA = LlamaConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=160, vocab_size=256,
)  # fmt: skip
QWEN3 = Qwen3Config(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=160, vocab_size=256,
)  # fmt: skip
GPT2 = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256)
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LLAMA, LlamaForCausalLM),
    "qwen3": (QWEN3, Qwen3ForCausalLM),
    "gpt2": (GPT2, GPT2LMHeadModel),
}


@pytest.mark.parametrize(("checkpointing", "dora"), [(False, False), (True, False), (False, True)])
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
        model_graph(ModelConfig(config.to_dict(), where=family)), Lora(4, names, is_dora=dora)
    )
    analytic = total(step_flops(graph, Batch.of(BATCH, SEQ), trainable=trainable, pairs="computed"))
    if not dora:
        assert analytic.forward == counted.total.forward
    if not checkpointing and not dora:
        assert analytic.backward == counted.total.backward
    assert sum(n.params for n in graph if trainable(n)) == counted.params_trained


SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "intermediate_size": 160, "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip
FINE = {"moe_intermediate_size": 96, "num_experts": 8}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**FINE, "head_dim": 16},
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": {**FINE, "shared_expert_intermediate_size": 80},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 16},
    "deepseek_v3": {
        "moe_intermediate_size": 96, "n_routed_experts": 8, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
        "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    },
}  # fmt: skip
TENSORS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize(
    ("modules", "tensors", "targets"),
    [
        ("all-linear", None, ("all-linear",)),
        (None, TENSORS, ("experts",)),
        (["o_proj"], TENSORS[1:], ("o_proj", "experts.down_proj")),
        (["gate_proj", "up_proj"], None, ("gate_proj", "up_proj")),
        (["down_proj"], None, ("down_proj",)),
        (["gate"], None, ("gate",)),
        (["w1", "w3", "w2"], None, ("w1", "w3", "w2")),
    ],
)
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # PEFT's own
def test_experts_get_the_adapters_that_peft_gives_them(
    family: str, modules: Any, tensors: Any, targets: tuple[str, ...]
) -> None:
    """Parameters one by one; FLOPs of the hardware, for PEFT adds the update to the weight."""
    config = AutoConfig.for_model(family, **{**SIZES, **MIXTURES[family]})
    config._attn_implementation = "eager"
    adapters = peft.LoraConfig(r=4, target_modules=modules, target_parameters=tensors)
    graph = model_graph(ModelConfig(config.to_dict(), where=family))
    try:
        made: Any = AutoModelForCausalLM
        model = peft.get_peft_model(made.from_config(config), adapters)
    except ValueError:  # PEFT finds nothing of that name, or what it finds is no module
        if "down_proj" not in targets:  # the one name of a tensor that is taken without asking
            with pytest.raises(UsageError, match="called"):
                with_adapters(graph, Lora(4, targets))
        return
    counted = count(model, batch_size=BATCH, seq_len=SEQ)
    adapted, trainable = with_adapters(graph, Lora(4, targets))
    analytic = total(
        step_flops(adapted, Batch.of(BATCH, SEQ), trainable=trainable, pairs="computed")
    )
    assert sum(node.params for node in adapted if trainable(node)) == counted.params_trained
    assert analytic.hardware == counted.total.hardware
