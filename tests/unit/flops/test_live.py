"""A model that somebody holds: what is trained is asked of its parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from ergmeter import Meter
from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.counted.count import count
from ergmeter.flops.graph.adapters import Lora
from ergmeter.flops.live import live_flops, model_work
from ergmeter.flops.source import model_graph
from ergmeter.flops.work import TrainedParts, step_work
from ergmeter.records import Missing, Reading
from ergmeter.runlog.settings import Settings

CONFIG = LlamaConfig(
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=160,
    vocab_size=256,
    tie_word_embeddings=False,
)
SEQ = 32


def model(dtype: torch.dtype = torch.float32) -> Any:
    made: Any = LlamaForCausalLM
    return made(CONFIG).to(dtype)


def declared(**how: Any) -> float:
    graph = model_graph(ModelConfig(CONFIG.to_dict(), where="test"))
    return step_work(graph, Batch.of(1, SEQ), training=TrainedParts(**how)).chosen.model_per_step


def test_a_whole_model_is_counted_as_its_configuration() -> None:
    work, dtype = model_work(model(torch.bfloat16), SEQ)
    assert work.chosen.model_per_step == declared()
    assert work.params == sum(p.numel() for p in model().parameters())
    assert dtype == "bf16"
    assert model_work(model(), SEQ)[1] is None  # fp32 weights: autocast can't be seen


def test_frozen_parameters_are_seen() -> None:
    held = model()
    held.model.embed_tokens.weight.requires_grad_(requires_grad=False)
    work, _ = model_work(held, SEQ)
    assert work.chosen.model_per_step == declared(frozen=("embed_tokens",))
    for parameter in held.model.layers[0].parameters():
        parameter.requires_grad_(requires_grad=False)
    work, _ = model_work(held, SEQ)
    assert work.chosen.model_per_step == declared(frozen=("embed_tokens", "layers.0"))


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_seen(dora: bool) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=dora)
    held = peft.get_peft_model(model(), config)
    work, _ = model_work(held, SEQ)
    lora = Lora(4, ("q_proj", "down_proj"), is_dora=dora)
    assert work.chosen.model_per_step == declared(lora=lora)
    assert work.params_trained == sum(p.numel() for p in held.parameters() if p.requires_grad)


def test_checkpointing_is_seen() -> None:
    held = model()
    held.gradient_checkpointing_enable()
    chosen = model_work(held, SEQ)[0].chosen
    assert chosen.hardware_per_step is not None
    assert chosen.hardware_per_step > chosen.model_per_step == declared()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as it loads its compiler
def test_a_compiled_or_wrapped_model_is_the_model_inside() -> None:
    held = torch.compile(model())
    assert model_work(held, SEQ)[0].chosen.model_per_step == declared()


def test_a_model_inside_somebodys_module_is_counted_and_said() -> None:
    class Task(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = model()

    chosen = model_work(Task(), SEQ)[0].chosen
    assert chosen.model_per_step == declared()
    assert "one pass through the LlamaForCausalLM inside the Task" in " ".join(chosen.assumptions)


def test_a_module_with_more_than_the_model_inside_is_not_the_model() -> None:
    class Task(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = model()
            self.classifier = torch.nn.Linear(64, 3)

    with pytest.raises(NotMeasurable, match="a Task has no configuration"):
        model_work(Task(), SEQ)


def test_a_model_changed_after_it_was_made_is_not_its_configuration() -> None:
    held = model()
    held.model.layers = held.model.layers[:1]
    with pytest.raises(NotMeasurable, match="parameters and its configuration describes"):
        model_work(held, SEQ)


def test_what_is_no_model_says_what_to_pass() -> None:
    with pytest.raises(NotMeasurable, match="Linear has no configuration"):
        model_work(torch.nn.Linear(2, 2), SEQ)
    with pytest.raises(UsageError, match="got int"):
        model_work(7, SEQ)
    with pytest.raises(UsageError, match="seq_len"):
        model_work(model(), None)


def test_a_meter_stores_the_flops_under_every_convention(tmp_path: Path) -> None:
    with Meter(
        tmp_path / "run", model=model(), seq_len=SEQ, probes=[], dtype="bf16",
        peak_flops_per_s=1e12, peak_source="a test",
    ) as meter:  # fmt: skip
        for _ in range(3):
            with meter.step(tokens=4 * SEQ):
                pass
    found = meter.summary().readings
    header = json.loads(next((tmp_path / "run").glob("*/writer.json")).read_text())
    assert [one["convention"] for one in header["flops"]][:3] == ["exact", "palm", "megatron"]
    assert header["settings"]["parameters"] == sum(p.numel() for p in model().parameters())
    mfu, rate = found["utilization.mfu_frac"], found["throughput.tokens_per_s"]
    assert isinstance(mfu, Reading)
    assert isinstance(rate, Reading)
    assert mfu.value == pytest.approx(declared() / SEQ * rate.value / 1e12)


def test_a_training_goes_on_where_its_model_can_not_be_counted(tmp_path: Path) -> None:
    meter = Meter(tmp_path / "run", model=torch.nn.Linear(2, 2), seq_len=8, probes=[])
    with meter, meter.step(tokens=8):
        pass
    found = meter.summary().readings["utilization.mfu_frac"]
    assert isinstance(found, Missing)
    assert "has no configuration" in found.reason


class Valued(torch.nn.Module):
    """A model with something of one's own beside it, as reinforcement learning has it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.value = torch.nn.Linear(inner.config.hidden_size, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.inner(input_ids=tokens, output_hidden_states=True)
        total: torch.Tensor = found.logits.sum() + self.value(found.hidden_states[-1]).sum()
        return total


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen3", "GPTNeoX", "Gemma3Text"])
def test_a_head_beside_a_model_adds_its_own_flops_and_nothing_else(kind: str) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 256,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 160,
    }  # fmt: skip
    if kind in ("Mistral", "Gemma3Text"):
        sizes["sliding_window"] = 12
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.device("meta"):
        make: Any = transformers.AutoModelForCausalLM
        inner = make.from_config(config)
    alone = model_work(inner, SEQ)[0].chosen
    (flops,), _, reason = live_flops(Valued(inner), SEQ, Settings())
    assert reason == ""
    assert flops.model_per_step == alone.model_per_step + 6 * 64 * SEQ
    assert flops.hardware_per_step == flops.model_per_step  # nothing is computed again
    assert "causal mask" in " ".join(flops.assumptions)


library: Any = transformers


class MyModel(library.Qwen2ForCausalLM):
    """A class of one's own, called like a bare model."""


def small(kind: str, **more: Any) -> Any:
    return getattr(library, f"{kind}Config")(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=160, vocab_size=3000, tie_word_embeddings=True, pad_token_id=0, **more,
    )  # fmt: skip


def exactly(held: Any) -> float:
    return model_work(held, SEQ)[0].chosen.model_per_step


def test_a_class_of_ones_own_is_the_class_it_is_made_from() -> None:
    with torch.device("meta"):
        mine, theirs = MyModel(small("Qwen2")), library.Qwen2ForCausalLM(small("Qwen2"))
    assert exactly(mine) == exactly(theirs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as it loads its compiler
def test_a_compiled_classifier_has_a_classifiers_head() -> None:
    with torch.device("meta"):
        held = library.Qwen2ForSequenceClassification(small("Qwen2"))
    work = model_work(torch.compile(held), SEQ)[0]
    assert work.chosen.model_per_step == exactly(held)
    assert not any("not known" in said for said in work.assumptions)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"rank_pattern": {"q_proj": 16}}, "several ranks"),
        ({"modules_to_save": ["lm_head"]}, "more than its adapters"),
    ],
)
def test_adapters_that_are_not_alike_are_counted_by_running(more: Any, why: str) -> None:
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **more)
    held = peft.get_peft_model(model(), lora)
    (flops,), _, reason = live_flops(held, SEQ, Settings())
    assert reason == ""
    assert flops.model_per_step == count(held, batch_size=1, seq_len=SEQ).needed.model
    assert why in flops.assumptions[0]


def test_adapters_on_experts_are_not_what_peft_makes_of_them() -> None:
    sizes: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16}
    inner = library.Qwen3MoeForCausalLM(small("Qwen3Moe", **sizes))
    lora = peft.LoraConfig(r=4, target_parameters=["experts.down_proj"], target_modules=[])
    found, _, reason = live_flops(peft.get_peft_model(inner, lora), SEQ, Settings())
    assert found == ()
    assert "targets=experts" in reason


def test_layers_wrapped_to_be_checkpointed_are_computed_again() -> None:
    held, alike = model(), model()
    apply_activation_checkpointing(held, check_fn=lambda part: isinstance(part, LlamaDecoderLayer))
    alike.gradient_checkpointing_enable()
    (flops,), _, _ = live_flops(held, SEQ, Settings())
    wanted = model_work(alike, SEQ)[0].chosen
    assert flops.model_per_step == wanted.model_per_step
    assert flops.hardware_per_step == wanted.hardware_per_step


def test_a_window_is_that_of_the_layers_that_have_one() -> None:
    sizes: dict[str, Any] = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "use_sliding_window": True, "sliding_window": 8,
        "max_window_layers": 1,
    }  # fmt: skip
    with torch.device("meta"):
        held = library.Qwen2MoeForCausalLM(small("Qwen2Moe", **sizes))
    assert count(held, batch_size=1, seq_len=SEQ).needed.model == exactly(held)


def test_a_forward_of_several_batches_says_what_to_pass() -> None:
    class Pairs(torch.nn.Linear):
        def forward(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return chosen + rejected

    found, _, reason = live_flops(Pairs(2, 2), SEQ, Settings())
    assert found == ()
    assert "a Pairs has no configuration" in reason
    assert "must take one batch of tokens" in reason


def test_a_model_without_a_configuration_is_run_without_memory(tmp_path: Path) -> None:
    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(100, 32)
            self.head = torch.nn.Linear(32, 100, bias=False)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.embedding(input_ids))
            return logits

    meter = Meter(tmp_path / "run", model=Words(), seq_len=16, probes=[], peak_flops_per_s=1e12)
    with meter:
        for _ in range(2):
            with meter.step(tokens=16):
                pass
    found = meter.summary().readings["compute.model_flops_per_token"]
    assert isinstance(found, Reading)
    assert found.value == 6 * 32 * 100
    assert found.note == "counted"
