"""On a real NVIDIA GPU: MFU of a grouped-query Llama that trains in full, by LoRA and by QLoRA."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ergmeter.records import Reading

pytestmark = pytest.mark.device

BATCH, SEQ, STEPS, WARMUP = 8, 2048, 14, 4
HIDDEN, LAYERS, FFN, HEADS, KV_HEADS, VOCAB = 2048, 22, 5632, 32, 4, 32000


@pytest.fixture(scope="module")
def torch() -> Any:  # the module, which has no type
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("no CUDA device")
    return module


def llama(torch: Any, kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, intermediate_size=FFN, vocab_size=VOCAB,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, tie_word_embeddings=False,
        max_position_embeddings=SEQ,
    )  # fmt: skip
    if kind == "qlora":
        return quantized(torch, transformers, config)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return adapted(model) if kind == "lora" else model


def quantized(torch: Any, transformers: Any, config: Any) -> Any:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, module in list(part.named_children()):
                if isinstance(module, torch.nn.Linear):
                    packed = bitsandbytes.nn.Linear4bit(
                        module.in_features, module.out_features, bias=False,
                        compute_dtype=torch.bfloat16, quant_type="nf4",
                    )  # fmt: skip
                    packed.weight = bitsandbytes.nn.Params4bit(
                        module.weight.data.cpu(), requires_grad=False, quant_type="nf4"
                    )
                    setattr(part, name, packed.to("cuda"))
    return adapted(model)


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=targets))


def per_token(kind: str) -> float:
    """By hand: 6 a weight, or 4 where it is frozen, adapters 6, attention causal and in full."""
    kv = HIDDEN * KV_HEADS // HEADS
    layer = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * kv + 3 * HIDDEN * FFN
    weights = LAYERS * layer + HIDDEN * VOCAB
    core = 3 * 4 * LAYERS * HIDDEN * (SEQ + 1) / 2
    if kind == "full":
        return 6 * weights + core
    adapters = LAYERS * 16 * (2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + kv))
    # Into the lowest layer's frozen q, k and v and their adapters nothing is walked back.
    lowest = 2 * (HIDDEN * HIDDEN + 2 * HIDDEN * kv) + 2 * 3 * 16 * HIDDEN
    return 4 * weights + 6 * adapters + core - lowest


@pytest.mark.parametrize("kind", ["full", "lora", "qlora"])
def test_mfu_of_a_real_training_step(torch: Any, tmp_path: Path, kind: str) -> None:
    from ergmeter import Meter

    model = llama(torch, kind)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), device="cuda")
    began = time.perf_counter()
    with Meter(
        tmp_path / kind, model=model, seq_len=SEQ, dtype="bf16", warmup_steps=WARMUP
    ) as meter:
        counting_s = time.perf_counter() - began
        for _ in range(STEPS):
            with meter.step(tokens=BATCH * SEQ, samples=BATCH):
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                torch.cuda.synchronize()
    found = meter.summary().readings
    readings: dict[str, Reading] = {}
    for key in (
        "utilization.mfu_frac", "compute.model_flops_per_token", "throughput.tokens_per_s",
        "compute.model_flops_per_s_per_device", "energy.joules_per_token",
    ):  # fmt: skip
        one = found[key]
        assert isinstance(one, Reading), one
        readings[key] = one
    mfu = readings["utilization.mfu_frac"]
    print(
        f"\n{kind}: MFU {100 * mfu.value:.1f} %,"
        f" {readings['throughput.tokens_per_s'].value:.0f} tokens/s,"
        f" {readings['compute.model_flops_per_token'].value / 1e9:.3f} GFLOP/token,"
        f" {1e3 * readings['energy.joules_per_token'].value:.2f} mJ/token,"
        f" start with counting {counting_s:.2f} s\n  {mfu.note}"
    )
    counted = readings["compute.model_flops_per_token"].value
    assert counted == pytest.approx(per_token(kind), rel=2e-3)
    assert 0.15 < mfu.value < 0.7
