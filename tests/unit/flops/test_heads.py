"""What stands on top of the layers is the class's, not the configuration's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig, head_of
from ergmeter.flops.counted.built_model import count_config
from ergmeter.flops.counted.count import count
from ergmeter.flops.families.vision import LANGUAGE_ALONE
from ergmeter.flops.live import model_work
from ergmeter.flops.source import known_families, model_graph
from ergmeter.flops.work import step_work
from tests.unit.flops.family_cases import CASES, TWO, Case

SEQ = 48
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 3000, "pad_token_id": 0, "num_labels": 5,
}  # fmt: skip
DISTIL: dict[str, Any] = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 160, "vocab_size": 3000, "num_labels": 5,
}  # fmt: skip
DECODERS = ["Llama", "Qwen3", "Mistral"]
ENCODERS = ["Bert", "Roberta", "XLMRoberta", "Electra", "DistilBert", "ModernBert", "DebertaV2"]
TOPS = ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]


def made(family: str, top: str) -> Any:
    sizes = DISTIL if family == "DistilBert" else SIZES
    if top == "ForQuestionAnswering":
        sizes = {**sizes, "num_labels": 2}
    config = getattr(transformers, f"{family}Config")(**sizes)
    with torch.device("meta"):
        return getattr(transformers, family + top)(config)


def products(held: Any) -> float:
    """By running it; the tops differ by no attention, so the bare model's is taken away."""
    return count(held, batch_size=1, seq_len=SEQ).total.model


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # DeBERTa's own
@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize("family", DECODERS + ENCODERS)
def test_a_classifier_costs_what_running_it_counts(family: str, top: str) -> None:
    held = made(family, top)
    work, _ = model_work(held, SEQ)
    assert work.params == sum(p.numel() for p in held.parameters())
    bare = made(family, "Model")
    extra = work.chosen.model_per_step - model_work(bare, SEQ)[0].chosen.model_per_step
    pooler = 0.0  # which a bare encoder computes, and no loss is made of
    if family in ("Bert", "Roberta", "XLMRoberta"):
        pooler = 2 * 2 * 64 * 64
    assert extra == products(held) - products(bare) - pooler


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS, "T5"])
def test_a_bare_model_has_no_vocabulary_to_choose_from(family: str) -> None:
    sizes: dict[str, Any] = {**SIZES, "d_model": 64, "d_ff": 160, "num_layers": 2, "num_heads": 4}
    if family == "DistilBert":
        sizes = DISTIL
    config = getattr(transformers, f"{family}Config")(**sizes).to_dict()
    graphs = {}
    for top in ("Model", None):
        name = top and family + top
        graphs[top] = model_graph(
            ModelConfig({**config, "architectures": [name] if name else None}, where="test")
        )
    batch = Batch.of(1, SEQ, source_len=SEQ, facts=graphs[None].facts)
    bare, whole = (step_work(graphs[top], batch).chosen.model_per_step for top in ("Model", None))
    assert whole - bare >= 6 * 64 * 3000 * SEQ * 0.99
    assert not any(node.stream == "logits" for node in graphs["Model"])


@pytest.mark.parametrize("family", ["Electra", "Bert"])
def test_a_class_for_pretraining_has_the_head_it_was_trained_with(family: str) -> None:
    held = made(family, "ForPreTraining")
    work, _ = model_work(held, SEQ)
    assert work.params == sum(p.numel() for p in held.parameters())
    assert work.chosen.model_per_step == products(held)


@pytest.mark.parametrize("top", ["ForSequenceClassification", "Model", "ForCausalLM"])
def test_both_engines_build_what_the_configuration_names(top: str) -> None:
    fields = {**transformers.LlamaConfig(**SIZES).to_dict(), "architectures": [f"Llama{top}"]}
    found = count_config(fields, batch_size=1, seq_len=SEQ)
    graph = model_graph(ModelConfig(fields, where="test"))
    assert found.params == graph.params
    batch = Batch.of(1, SEQ)
    assert found.needed.model == step_work(graph, batch).chosen.model_per_step


def test_an_encoder_alone_is_half_of_its_encoder_decoder() -> None:
    config = transformers.T5Config(d_model=64, d_ff=160, num_layers=2, num_heads=4, d_kv=16)
    with torch.device("meta"):
        held: Any = transformers.T5EncoderModel(config)
    graph = model_graph(ModelConfig(config.to_dict(), where="test"), architecture="T5EncoderModel")
    assert graph.params == sum(p.numel() for p in held.parameters())
    batch = Batch.of(1, SEQ, source_len=SEQ, facts=graph.facts)
    assert step_work(graph, batch).chosen.model_per_step == products(held)


def test_a_class_nobody_knows_is_said() -> None:
    config = transformers.LlamaConfig(**SIZES).to_dict()
    graph = model_graph(ModelConfig({**config, "architectures": ["LlamaForOracles"]}, where="test"))
    assert any("LlamaForOracles is not known" in said for said in graph.assumptions)
    assert any(node.role == "head" for node in graph)


REMOTE = {"kimi_k2"}  # families that are not in transformers


def classes(kind: str) -> set[str]:
    """Every class of a family in the mappings of transformers."""
    found: set[str] = set()
    for name in dir(modeling_auto):
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES"):
            mapped = getattr(modeling_auto, name).get(kind, ())
            found.update([mapped] if isinstance(mapped, str) else mapped)
    return found


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # GPT-BigCode's own
@pytest.mark.parametrize("kind", sorted(set(known_families()) - REMOTE - set(LANGUAGE_ALONE)))
def test_a_class_called_a_model_has_the_head_that_transformers_gives_it(kind: str) -> None:
    """By their parameters: MarianModel has no head, and MarianMTModel has one."""
    case = CASES.get(kind, Case())
    found = {name for name in classes(kind) if name.endswith("Model") or head_of(name) == "bare"}
    assert found
    for name in found:
        config = CONFIG_MAPPING[kind](**(case.changes or TWO))
        with torch.device("meta"):
            held = getattr(transformers, name)(config)
        fields = {**config.to_dict(), "architectures": [name]}
        graph = model_graph(ModelConfig(fields, where=kind), image_size=case.image_size)
        assert graph.params == sum(p.numel() for p in held.parameters()), name
        assert not any("is not known" in line for line in graph.assumptions), name


def test_the_head_of_marian_is_counted() -> None:
    """A step of its head is 6 x hidden x vocabulary FLOPs a token."""
    fields = {"model_type": "marian", "d_model": 64, "encoder_layers": 2, "decoder_layers": 2}
    fields |= {"encoder_ffn_dim": 160, "decoder_ffn_dim": 160, "encoder_attention_heads": 4}
    fields |= {"decoder_attention_heads": 4, "vocab_size": 3000, "max_position_embeddings": 64}
    step = {}
    for name in ("MarianModel", "MarianMTModel"):
        graph = model_graph(ModelConfig({**fields, "architectures": [name]}, where="x"))
        batch = Batch.of(1, SEQ, source_len=SEQ, facts=graph.facts)
        step[name] = step_work(graph, batch).chosen.model_per_step
    assert step["MarianMTModel"] - step["MarianModel"] == 6 * 64 * 3000 * SEQ


@pytest.mark.parametrize("name", ["BartForCausalLM", "BartForSequenceClassification"])
def test_another_class_of_an_encoder_decoder_is_named(name: str) -> None:
    fields = {"model_type": "bart", "encoder_layers": 1, "decoder_layers": 1}
    graph = model_graph(ModelConfig({**fields, "architectures": [name]}, where="x"))
    line = f"the class {name} is not known: counted as an encoder-decoder with its own head"
    assert line in graph.assumptions
