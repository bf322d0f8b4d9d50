"""Conventions: figures that others have printed or worked out, and what sets them apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.conventions import CONVENTIONS, convention, sizes
from ergmeter.flops.graph.adapters import Lora
from ergmeter.flops.graph.graph import Graph
from ergmeter.flops.source import model_graph
from ergmeter.flops.work import TrainedParts, step_work
from ergmeter.views.calculate import flops as view

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
}


def graph(fields: dict[str, object], **more: object) -> Graph:
    return model_graph(ModelConfig(fields | more, where="test"))


def per_token(name: str, model: Graph, seq_len: int, **more: object) -> float:
    work = step_work(model, Batch.of(1, seq_len), chosen=name, **more)  # type: ignore[arg-type]
    return work.chosen.model_per_step / seq_len


def test_neuron_counts_a_sequence_as_the_trainium_calculator_does() -> None:
    # 224.04 TFLOP a sequence for Llama-3.1-8B at 4096, which at 2.1 sequences/s is 15.477 % of a
    # trn1 node of 32 cores with 95 TFLOP/s.
    tflop = per_token("neuron", graph(LLAMA_8B), 4096) * 4096 / 1e12
    assert tflop == pytest.approx(224.04, abs=0.005)
    assert 100 * tflop * 2.1 / 3040 == pytest.approx(15.477, abs=0.0005)


def test_the_matmuls_of_llama_8b_at_4096_are_those_others_found() -> None:
    # 210.82 TFLOP a sequence without halving attention, 197.63 with.
    model = graph(LLAMA_8B)
    assert per_token("megatron-2024", model, 4096) * 4096 / 1e12 == pytest.approx(210.82, abs=0.01)
    assert per_token("megatron", model, 4096) * 4096 / 1e12 == pytest.approx(197.63, abs=0.01)


def test_exact_is_megatrons_half_and_the_diagonal() -> None:
    model = graph(LLAMA_8B)
    diagonal = 3 * 2 * 32 * 32 * 256 * 4096 / 2
    exact = per_token("exact", model, 4096) * 4096
    assert exact == pytest.approx(per_token("megatron", model, 4096) * 4096 + diagonal, rel=1e-12)


def test_a_window_is_seen_by_those_who_see_it() -> None:
    model = graph(GPT_OSS)
    found = {name: per_token(name, model, 4096) for name in ("exact", "megatron", "bridge", "palm")}
    # Worked out elsewhere for GPT-OSS 120B at 4096, three matrices and the window: 32.63 GFLOP.
    assert found["bridge"] / 1e9 == pytest.approx(32.63, abs=0.01)
    assert found["exact"] == pytest.approx(found["bridge"], rel=0.005)
    assert found["megatron"] > found["bridge"]


def test_latent_attention_and_experts_as_bridge_counts_them() -> None:
    deepseek = {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
    # 249.81 GFLOP a token, 259.99 with a layer that predicts one token further.
    assert per_token("megatron", graph(deepseek), 4096) / 1e9 == pytest.approx(249.81, abs=0.05)
    further = graph(deepseek, mtp_num_layers=1)
    assert per_token("megatron", further, 4096) / 1e9 == pytest.approx(259.99, abs=0.05)


def test_attention_computed_again_is_counted_as_the_convention_counts_attention() -> None:
    """Forward is a third: of 12 LHQT where every pair counts, of 6 LHQT where half of them do."""
    model, length = graph(LLAMA_8B), 4096
    how = TrainedParts(checkpointing="selective")
    work = step_work(model, Batch.of(2, length), training=how)
    core = 32 * 32 * 128 * length  # LHQT, a token
    added = {
        name: (flops.hardware_per_step - flops.model_per_step) / (2 * length)
        for name, flops in work.flops.items()
        if flops.hardware_per_step is not None
    }
    all_pairs = ("palm", "megatron-2024", "torchtitan", "mosaicml", "nanogpt", "maxtext-2024")
    half = ("megatron", "bridge", "maxtext", "verl")
    assert {name: added[name] for name in all_pairs} == pytest.approx(
        dict.fromkeys(all_pairs, 4 * core)
    )
    assert {name: added[name] for name in half} == pytest.approx(dict.fromkeys(half, 2 * core))
    assert added["exact"] == pytest.approx(2 * core * (1 + 1 / length))
    assert added["6nd"] == added["hf-6nd"] == 0  # which count no attention at all
    assert added["neuron"] == pytest.approx(4 * core + 6 * 32 * 32 * length)


def test_selective_recomputation_of_a_gpt_as_its_formula_has_it() -> None:
    """GPT-3 175B, 72 Lh^2 (1 + T/6h + V/12Lh): a third of T/6h more, 0.9 %."""
    fields = {"model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_head": 96}
    model = graph({**fields, "n_positions": 2048, "vocab_size": 51200})
    how = TrainedParts(checkpointing="selective")
    work = step_work(model, Batch.of(1, 2048), training=how, chosen="megatron-2021")
    term, head = 2048 / (6 * 12288), 51200 / (12 * 96 * 12288)
    ratio = (work.chosen.hardware_per_step or 0) / work.chosen.model_per_step
    assert ratio == pytest.approx((1 + 4 / 3 * term + head) / (1 + term + head), rel=1e-12)
    assert 100 * (ratio - 1) == pytest.approx(0.90, abs=0.005)


FULL = {name for name, one in CONVENTIONS.items() if not one.is_for_lora} - {"exact"}


def test_formulas_of_full_training_say_nothing_of_frozen_weights() -> None:
    model = graph(LLAMA_8B)
    work = step_work(
        model, Batch.of(1, 8192), training=TrainedParts(lora=Lora(16, ("q_proj", "v_proj")))
    )
    exact = work.chosen.model_per_step
    assert list(work.flops) == ["exact", "bridge-lora", "automodel-lora"]
    assert set(work.not_defined) == FULL
    assert work.not_defined["palm"] == (
        "it counts every weight as trained, and here some are frozen"
    )
    # 4 a weight that is multiplied: 7.5047 B of them.
    assert work.flops["bridge-lora"].model_per_step == 4 * 7_504_658_432 * 8192
    assert work.flops["bridge-lora"].model_per_step < exact
    assert work.flops["automodel-lora"].model_per_step < exact
    frozen = step_work(model, Batch.of(1, 64), training=TrainedParts(frozen=("mlp",)))
    assert list(frozen.flops) == ["exact"]
    with pytest.raises(NotMeasurable, match="palm: it counts every weight as trained"):
        step_work(model, Batch.of(1, 64), training=TrainedParts(frozen=("mlp",)), chosen="palm")
    # Reading a prompt trains nothing, with adapters or without.
    prefill = step_work(
        model, Batch.of(1, 64), phase="prefill", training=TrainedParts(lora=Lora(16, ("q_proj",)))
    )
    assert "palm" in prefill.flops
    assert prefill.not_defined.keys() >= {"bridge-lora", "automodel-lora"}


def test_a_formula_of_one_kind_of_layer_says_nothing_of_others() -> None:
    llama = step_work(graph(LLAMA_8B), Batch.of(1, 64))
    # (2 x 4096^2 + 2 x 4096 x 1024 + 3 x 4096 x 14336) / 4096^2 = 13 of h^2.
    assert "these have 13 h^2" in llama.not_defined["megatron-2021"]
    assert "mosaicml" in llama.flops
    gpt = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256}
    assert "megatron-2021" in step_work(graph(gpt, n_positions=64), Batch.of(1, 64)).flops
    oss = step_work(graph(GPT_OSS), Batch.of(1, 64))  # 64 heads of 64, a hidden size of 2880
    assert {"megatron-2021", "mosaicml"} <= oss.not_defined.keys()


def test_what_halves_for_a_causal_mask_says_nothing_where_there_is_none() -> None:
    bert = {
        "model_type": "bert",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "type_vocab_size": 2,
    }
    work = step_work(graph(bert), Batch.of(1, 32))
    halving = {"megatron", "bridge", "maxtext", "verl"}
    assert halving <= work.not_defined.keys()
    assert "palm" in work.flops


def test_the_letters_of_every_formula_are_explained() -> None:
    for one in CONVENTIONS.values():
        if one.weights is not None:
            assert set(re.findall("[A-Za-z]", one.formula)) == set(one.letters)
    assert CONVENTIONS["megatron-2021"].letters == {
        "L": "layers", "h": "hidden size", "V": "vocabulary", "T": "tokens of a sequence",
    }  # fmt: skip


def test_a_given_n_takes_the_place_of_ours_in_formulas_of_n_alone() -> None:
    model = graph(LLAMA_8B)
    assert per_token("6nd", model, 64, params=10**9) == 6e9
    assert per_token("megatron", model, 64, params=10**9) == per_token("megatron", model, 64)


def test_full_checkpointing_is_four_thirds_for_formulas_and_less_for_what_is_computed() -> None:
    work = step_work(
        graph(LLAMA_8B), Batch.of(1, 4096), training=TrainedParts(checkpointing="full")
    )
    palm, exact = work.flops["palm"], work.flops["exact"]
    assert palm.hardware_per_step == pytest.approx(palm.model_per_step * 4 / 3)
    assert exact.hardware_per_step is not None
    assert 1.2 < exact.hardware_per_step / exact.model_per_step < 4 / 3


def test_with_adapters_full_checkpointing_is_a_half_more() -> None:
    # Frozen weights: 2 forward and 2 for the inputs' gradients, and the forward 2 again.
    how = TrainedParts(lora=Lora(8, ("q_proj",)), checkpointing="full")
    work = step_work(graph(LLAMA_8B), Batch.of(1, 4096), training=how)
    for name in ("bridge-lora", "automodel-lora"):
        found = work.flops[name]
        assert found.hardware_per_step == pytest.approx(found.model_per_step * 6 / 4)


def test_megatron_2021_prints_hardware_flops() -> None:
    # GPT 530B of arXiv 2104.04473: 96 B s l h^2 (1 + s/6h + V/16lh) for B = 1.
    gpt = {
        "model_type": "gpt2",
        "n_embd": 20480,
        "n_layer": 105,
        "n_head": 128,
        "vocab_size": 51200,
        "n_positions": 2048,
    }
    work = step_work(
        graph(gpt),
        Batch.of(1, 2048),
        training=TrainedParts(checkpointing="full"),
        chosen="megatron-2021",
    )
    h, layers, s, v = 20480, 105, 2048, 51200
    by_hand = 96 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert work.chosen.hardware_per_step == pytest.approx(by_hand)


def test_formulas_of_all_parameters_have_nothing_to_say_about_a_decoding_step() -> None:
    batch = Batch.of(1, 1, past=4096)
    work = step_work(graph(LLAMA_8B), batch, phase="decode")
    assert list(work.flops) == ["exact"]
    with pytest.raises(NotMeasurable, match="one position"):
        step_work(graph(LLAMA_8B), batch, phase="decode", chosen="palm")


def test_reading_a_prompt_is_a_third_of_training_on_it() -> None:
    model = graph(LLAMA_8B)
    train, prefill = (
        step_work(model, Batch.of(1, 512), phase=phase) for phase in ("train", "prefill")
    )
    for name in ("exact", "palm"):
        ratio = train.flops[name].model_per_step / prefill.flops[name].model_per_step
        assert ratio == pytest.approx(3)


def test_an_unknown_convention_is_answered_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="no convention 'plam'; there are exact, palm"):
        convention("plam")


def test_every_convention_has_a_definition_and_a_source() -> None:
    for one in CONVENTIONS.values():
        assert one.formula
        assert len(one.definition) > 20
        assert one.source


def test_sizes_are_sums_over_the_model() -> None:
    found = sizes(graph(LLAMA_8B))
    assert found.params == found.params_held == 8_030_261_248
    assert found.embedding == found.head == 128256 * 4096
    assert found.core == 2 * 32 * 32 * 128
    assert found.weights == found.params - found.embedding - 65 * 4096


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[3] / "docs" / "conventions.md"
    assert page.read_text("utf-8") == view.conventions_page(), "run ./dev docs"
