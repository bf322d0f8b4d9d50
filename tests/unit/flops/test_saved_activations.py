"""What a forward pass keeps, against what torch's autograd says it saved.

`saved_tensors_hooks` hands over every tensor that autograd keeps. Its storages, each once and whole
where a view is kept, without the model's own, are summed. The model computes logits and no loss.
Nothing of the rule is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.autograd.graph import saved_tensors_hooks

from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.estimate.memory import Kernels, Setup, step_memory
from ergmeter.flops.graph.adapters import Lora
from ergmeter.flops.source import model_graph
from ergmeter.flops.work import TrainedParts

SEQUENCES, LENGTH, VOCAB = 2, 96, 600
ALL_FOUR = ("q_proj", "k_proj", "v_proj", "o_proj")
NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
Change = Callable[[Any], Any]


# transformers scripts a function of GPT-BigCode, which torch 2.13 warns about.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.frameworks,
]


@pytest.fixture(autouse=True)
def _plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    # oneDNN uses instructions for bf16 that some virtual machines announce and do not have.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def config(name: str, **fields: object) -> Any:
    sizes = {
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "intermediate_size": 352,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "pad_token_id": 0,
        **fields,
    }
    return getattr(transformers, f"{name}Config")(**sizes)


def gpt2(activation: str = "gelu_new") -> Any:
    return transformers.GPT2Config(
        n_embd=128,
        n_layer=3,
        n_head=8,
        vocab_size=VOCAB,
        n_positions=LENGTH,
        activation_function=activation,
        **NO_DROPOUT,
    )


def falcon(**fields: Any) -> Any:
    return transformers.FalconConfig(
        hidden_size=128, num_hidden_layers=3, num_attention_heads=8, vocab_size=VOCAB, **fields
    )


def kept_bytes(
    sizes: Any,
    *,
    dtype: torch.dtype = torch.bfloat16,
    attention: str = "sdpa",
    change: Change | None = None,
    autocast: bool = False,
    cache: bool = False,
) -> float:
    torch.manual_seed(0)
    make: Any = transformers.AutoModelForCausalLM
    model = make.from_config(sizes, dtype=dtype, attn_implementation=attention)
    model.config.use_cache = cache
    model = change(model) if change else model
    model.train()
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(0, VOCAB, (SEQUENCES, LENGTH))
    with (
        saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        result = model(input_ids=tokens)
    assert result.logits.requires_grad
    return sum(each.untyped_storage().nbytes() for each in kept.values())


def counted_bytes(
    sizes: Any, training: TrainedParts | None = None, setup: Setup | None = None
) -> float:
    graph = model_graph(ModelConfig(sizes.to_dict(), where="the test"))
    memory = step_memory(graph, Batch.of(SEQUENCES, LENGTH), training=training, setup=setup)
    held = memory.moments[0].bytes
    return held["activations"] + held["cast weights"]


def freezing(*names: str) -> Change:
    def change(model: Any) -> Any:
        for name, parameter in model.named_parameters():
            if any(each in name for each in names):
                parameter.requires_grad_(False)
        return model

    return change


WIDE, WINDOW = {"head_dim": 32}, {"sliding_window": 64}
GEMMA = {**WIDE, "query_pre_attn_scalar": 32}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FINE = {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2}
ROUTED = {
    "moe_intermediate_size": 96, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "num_key_value_heads": 8, "head_dim": 8,
}  # fmt: skip
BOTH = {
    "llama": config("Llama"),
    "llama without groups": config("Llama", num_key_value_heads=8),
    "qwen2": config("Qwen2"),
    "qwen3": config("Qwen3", **WIDE),
    "gemma": config("Gemma", **WIDE),
    "gemma3 with windows": config("Gemma3Text", **GEMMA, **WINDOW),
    "gemma3 within its window": config("Gemma3Text", **GEMMA, sliding_window=4096),
    "cohere": config("Cohere"),
    "cohere with norms on heads": config("Cohere", use_qk_norm=True),
    "cohere2 with windows": config("Cohere2", **WINDOW),
    "mixtral": config("Mixtral", **EXPERTS),
    "qwen3_moe": config("Qwen3Moe", **WIDE, **FINE),
    "olmoe": config("Olmoe", num_experts=8, num_experts_per_tok=2, intermediate_size=96),
    "glm4": config("Glm4", **WIDE),
    "glm4_moe": config("Glm4Moe", **WIDE, **{**ROUTED, "n_group": 1}),
    "phi3": config("Phi3"),
    "phi": config("Phi", num_key_value_heads=8),
    "olmo2": config("Olmo2"),
    "olmo": config("Olmo"),
    "gpt_neox": config("GPTNeoX"),
    "gpt2": gpt2(),
    "gpt2 with a fused gelu": gpt2("gelu"),
    "gpt_bigcode": transformers.GPTBigCodeConfig(
        n_embd=128, n_layer=3, n_head=8, vocab_size=VOCAB, n_positions=LENGTH, **NO_DROPOUT
    ),
    "mistral": config("Mistral"),
    "granite": config("Granite"),
    "starcoder2": config("Starcoder2"),
    "stablelm": config("StableLm"),
    "opt": config("OPT", ffn_dim=352, word_embed_proj_dim=128, dropout=0.0),
    "falcon with one head of keys": falcon(),
    "falcon with grouped keys": falcon(new_decoder_architecture=True, num_kv_heads=2),
}
# transformers has no sdpa for capped scores, sinks and some older families; torch has none on a CPU
# for values that are not as wide as keys.
WRITTEN_OUT = {
    "gemma2": config("Gemma2", **GEMMA, **WINDOW),
    "gpt_oss": config("GptOss", **EXPERTS, head_dim=16, intermediate_size=96),
    "deepseek_v3": config("DeepseekV3", **{**ROUTED, **LATENT}),
    "bloom": transformers.BloomConfig(hidden_size=128, n_layer=3, n_head=8, vocab_size=VOCAB),
    "mpt": transformers.MptConfig(d_model=128, n_layers=3, n_heads=8, vocab_size=VOCAB),
    "gptj": transformers.GPTJConfig(
        n_embd=128, n_layer=3, n_head=8, rotary_dim=8, vocab_size=VOCAB, **NO_DROPOUT
    ),
    "gpt_neo": transformers.GPTNeoConfig(
        hidden_size=128,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=8,
        vocab_size=VOCAB,
    ),
}
# One matrix makes queries, keys and values, and a view of its result keeps all of it.
FUSED = ("gpt2", "gpt_neox", "phi3", "gpt_bigcode")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [*BOTH, *WRITTEN_OUT])
def test_a_model_trained_in_full_keeps_what_autograd_says(name: str, attention: Any) -> None:
    if name in WRITTEN_OUT and attention == "sdpa":
        pytest.skip("not to be had on a CPU")
    sizes = (BOTH | WRITTEN_OUT)[name]
    setup = Setup(kernels=Kernels(attention=attention))
    kept = kept_bytes(sizes, attention=attention)
    within = 0.011 if name == "gpt_oss" else 0.01  # the order of its rows is a little more
    assert counted_bytes(sizes, setup=setup) == pytest.approx(kept, rel=within)


@pytest.mark.parametrize("name", FUSED)
def test_a_cache_copies_what_would_be_views(name: str) -> None:
    sizes = BOTH[name]
    kept = kept_bytes(sizes, cache=True)
    setup = Setup(kernels=Kernels(has_cache=True))
    assert counted_bytes(sizes, setup=setup) == pytest.approx(kept, rel=0.01)
    assert abs(kept / kept_bytes(sizes) - 1) > 0.01  # it makes a difference


def test_a_single_view_keeps_the_whole_buffer_by_hand() -> None:
    rows, layers = SEQUENCES * LENGTH, 3
    views = counted_bytes(BOTH["gpt_neox"])
    copies = counted_bytes(BOTH["gpt_neox"], setup=Setup(kernels=Kernels(has_cache=True)))
    # The value is a view of queries, keys and values in place of a copy of the values.
    assert views - copies == layers * rows * (3 * 128 - 128) * 2


def test_where_transformers_has_no_sdpa_attention_is_written_out() -> None:
    for name in ("gemma2", "gpt_oss", "bloom", "mpt", "gptj", "gpt_neo"):
        asked, fallback = (
            counted_bytes(WRITTEN_OUT[name], setup=Setup(kernels=Kernels(attention=attention)))
            for attention in ("sdpa", "eager")
        )
        assert asked == fallback


def test_flash_attention_knows_windows_and_keeps_no_mask() -> None:
    wide, narrow = BOTH["gemma3 within its window"], BOTH["gemma3 with windows"]
    flash = Setup(kernels=Kernels(attention="flash"))
    assert counted_bytes(narrow, setup=flash) == counted_bytes(wide)
    masks = 3 * SEQUENCES * LENGTH * LENGTH * 2  # of three layers
    repeated = 3 * SEQUENCES * LENGTH * 2 * (8 - 2) * 32 * 2  # keys and values, for each head
    assert counted_bytes(narrow) - counted_bytes(wide) == masks + repeated


def test_in_32_bits() -> None:
    sizes = config("Llama", num_key_value_heads=8)
    kept = kept_bytes(sizes, dtype=torch.float32)
    assert counted_bytes(sizes, setup=Setup("fp32")) == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "phi3", "gpt_neox", "gpt2", "glm4"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_under_autocast_the_copies_of_inputs_and_weights_are_in_it(
    name: str, attention: Any
) -> None:
    kept = kept_bytes(BOTH[name], dtype=torch.float32, autocast=True, attention=attention)
    setup = Setup("mixed", kernels=Kernels(attention=attention))
    assert counted_bytes(BOTH[name], setup=setup) == pytest.approx(kept, rel=0.01)


def test_attention_written_out_keeps_its_probabilities() -> None:
    sizes = config("Llama")
    setup = Setup(kernels=Kernels(attention="eager"))
    kept = kept_bytes(sizes, attention="eager")
    assert counted_bytes(sizes, setup=setup) == pytest.approx(kept, rel=0.02)
    assert counted_bytes(sizes) < 0.8 * kept


@pytest.mark.parametrize(
    "frozen",
    [("mlp",), ("self_attn",), ("embed_tokens", "layers.0"), ("embed_tokens", "layers", "norm")],
    ids=" ".join,
)
def test_what_is_frozen_keeps_less(frozen: tuple[str, ...]) -> None:
    sizes = config("Llama")
    kept = kept_bytes(sizes, change=freezing(*(f"{name}." for name in frozen)))
    ids = 2 * SEQUENCES * LENGTH * 8  # token numbers and labels, which we leave out
    assert counted_bytes(sizes, TrainedParts(frozen=frozen)) == pytest.approx(
        kept, rel=0.02, abs=ids
    )
    assert kept < kept_bytes(sizes)


@pytest.mark.parametrize("targets", [ALL_FOUR, ("q_proj", "v_proj"), ("all-linear",)])
@pytest.mark.parametrize("in_32_bits", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_adapters_as_peft_puts_them_in(targets: tuple[str, ...], in_32_bits: bool) -> None:
    peft = pytest.importorskip("peft")
    sizes = config("Llama")

    def adapt(model: Any) -> Any:
        wanted = "all-linear" if targets == ("all-linear",) else list(targets)
        lora = peft.LoraConfig(r=8, target_modules=wanted, task_type="CAUSAL_LM")
        return peft.get_peft_model(model, lora, autocast_adapter_dtype=in_32_bits)

    setup = Setup(kernels=Kernels(adapter_bytes=4 if in_32_bits else 2))
    counted = counted_bytes(sizes, TrainedParts(Lora(8, targets)), setup)
    assert counted == pytest.approx(kept_bytes(sizes, change=adapt), rel=0.02)


@pytest.mark.filterwarnings("ignore")
def test_adapters_with_dropout_keep_its_masks_where_something_is_trained_below() -> None:
    peft = pytest.importorskip("peft")
    sizes = config("Llama")

    def adapt(model: Any) -> Any:
        lora = peft.LoraConfig(
            r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM"
        )
        return peft.get_peft_model(model, lora)

    setup = Setup(kernels=Kernels(has_adapter_dropout=True))
    counted = counted_bytes(sizes, TrainedParts(Lora(8, ("q_proj", "v_proj"))), setup)
    # A CPU keeps a mask in 32 bits; a GPU, and so the rule, in one byte.
    counted += (4 - 1) * (3 - 1) * 2 * SEQUENCES * LENGTH * 128
    assert counted == pytest.approx(kept_bytes(sizes, change=adapt), rel=0.02)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("targets", ["all-linear", "experts"])
@pytest.mark.filterwarnings("ignore")
def test_adapters_on_experts_keep_the_whole_weight(name: str, targets: str) -> None:
    peft = pytest.importorskip("peft")
    sizes = BOTH[name]

    def adapt(model: Any) -> Any:
        tensors = ["experts.gate_up_proj", "experts.down_proj"]
        on = {"target_parameters": tensors} if targets == "experts" else {"target_modules": targets}
        return peft.get_peft_model(model, peft.LoraConfig(r=8, task_type="CAUSAL_LM", **on))

    counted = counted_bytes(sizes, TrainedParts(Lora(8, (targets,))))
    assert counted == pytest.approx(kept_bytes(sizes, change=adapt), rel=0.03)
    assert counted > counted_bytes(sizes, TrainedParts(Lora(8, ("q_proj", "v_proj"))))


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mixtral"])
@pytest.mark.filterwarnings("ignore")
def test_a_checkpointed_model_keeps_what_its_layers_were_given(name: str) -> None:
    sizes = config(name)

    def checkpoint(model: Any) -> Any:
        # The other kind of checkpoint holds its inputs where no hook sees them.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        return model

    counted = counted_bytes(sizes, TrainedParts(checkpointing="full"))
    assert counted == pytest.approx(kept_bytes(sizes, change=checkpoint), rel=0.02)
