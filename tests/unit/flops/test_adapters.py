"""LoRA as a rewriting of the graph: what it adds, what it freezes, which names it takes."""

from __future__ import annotations

import pytest

from ergmeter.errors import UsageError
from ergmeter.flops.analytic import step_flops, total
from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.graph.adapters import Lora, with_adapters
from ergmeter.flops.graph.graph import Graph
from ergmeter.flops.source import model_graph

H, F, V, L, S, R = 64, 160, 256, 3, 32, 4


def tiny(**more: object) -> Graph:
    fields: dict[str, object] = {
        "model_type": "llama",
        "hidden_size": H,
        "num_hidden_layers": L,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": F,
        "vocab_size": V,
        "tie_word_embeddings": False,
    }
    return model_graph(ModelConfig(fields | more, where="test"))


def test_a_frozen_base_is_two_thirds_of_its_weights_and_all_of_attention_by_hand() -> None:
    graph, trainable = with_adapters(tiny(), Lora(R, ("down_proj",)))
    parts = step_flops(graph, Batch.of(1, S), trainable=trainable, pairs="computed")
    # The lowest adapter is on layer 0's down_proj: nothing before it is walked back through.
    q, kv, o, up, down = H * H, H * H // 2, H * H, H * F, F * H
    adapters = F * R + R * H
    core = 2 * 2 * 4 * 16 * S * S  # scores and values of one layer
    forward = 2 * S * (L * (q + 2 * kv + o + 2 * up + down + adapters) + H * V) + L * core
    # Backward: layers 1 and 2 whole, with inputs' gradients alone but for the adapters.
    upper = (L - 1) * (2 * S * (q + 2 * kv + o + 2 * up + down) + 2 * core)
    # In every layer the adapters' own weights; their inputs' gradients: of lora_B's in all, of
    # lora_A's where what goes in is trained, which in layer 0 it is not.
    own = 2 * S * (L * adapters + L * R * H + (L - 1) * F * R)
    head = 2 * S * H * V
    # Layer 0's frozen down_proj: what goes into it needs no gradient.
    assert total(parts).forward == forward
    assert total(parts).backward == upper + own + head


def test_all_linear_is_every_layer_but_the_head() -> None:
    graph, trainable = with_adapters(tiny(), Lora(R, ("all-linear",)))
    trained = sum(node.params for node in graph if trainable(node))
    per_layer = R * ((H + H) + 2 * (H + H // 2) + (H + H) + 2 * (H + F) + (F + H))
    assert trained == L * per_layer
    assert graph.params == tiny().params + trained


def test_dora_trains_a_length_for_each_output_as_well() -> None:
    plain, lengths = (
        with_adapters(tiny(), Lora(R, ("q_proj",), is_dora=dora))[0].params
        for dora in (False, True)
    )
    assert lengths - plain == L * H


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("r=16,targets=q_proj,v_proj", Lora(16, ("q_proj", "v_proj"))),
        ("r=8,targets=all-linear,dora", Lora(8, ("all-linear",), is_dora=True)),
        ("targets=q_proj,r=2", Lora(2, ("q_proj",))),
    ],
)
def test_what_a_user_writes(text: str, expected: Lora) -> None:
    assert Lora.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("r=16", "no targets"),
        ("targets=q_proj", "no rank"),
        ("r=x,targets=q_proj", "must be a number; got 'x'"),
        ("r=0,targets=q_proj", "1 or more; got 0"),
        ("rang=4,targets=q_proj", "'rang=4'"),
        ("", "not understood"),
    ],
)
def test_what_can_not_be_read_says_so(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Lora.parse(text)


def test_a_target_that_is_not_there_is_an_error_with_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"called 'c_attn'.*q_proj, k_proj, v_proj, o_proj"):
        with_adapters(tiny(), Lora(R, ("q_proj", "c_attn")))


def mixture(family: str = "qwen3_moe", **more: object) -> Graph:
    own = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    return tiny(model_type=family, shared_expert_intermediate_size=80, **own, **more)


def test_model_flops_of_experts_are_those_of_two_small_matrices_by_hand() -> None:
    plain = total(step_flops(mixture(), Batch.of(1, S), trainable=None))
    adapted, trainable = with_adapters(mixture(), Lora(R, ("experts.down_proj",)))
    found = total(step_flops(adapted, Batch.of(1, S), trainable=trainable))
    assert found.forward - plain.forward == L * 2 * S * 2 * R * (96 + H)  # two experts a row
    # What PEFT does in its place: makes the update of 8 experts twice, walks back through both
    # factors, and has the gradient of the whole weight on the rows sent to it.
    spent = L * (4 * 2 * 8 * 96 * H * R + 2 * S * 2 * 96 * H)
    # Small matrices: forward, their own gradients, that between them; what goes in has none in the
    # lowest layer.
    small = L * 2 * S * 2 * R * (2 * 96 + 3 * H) + (L - 1) * 2 * S * 2 * R * 96
    assert found.hardware - found.model == spent - small


def test_what_all_linear_passes_by_is_said() -> None:
    said = with_adapters(mixture("qwen2_moe"), Lora(R, ("all-linear",)))[0].assumptions
    held = L * 8 * 3 * H * 96
    assert any(f"leaves out the experts ({held:.3g} parameters" in line for line in said)
    doubled = with_adapters(mixture(), Lora(R, ("all-linear",)))[0].assumptions
    assert any("of twice the rank on gate_up_proj" in line for line in doubled)
    dense = mixture(mlp_only_layers=[0])
    left = with_adapters(dense, Lora(R, ("all-linear",)))[0].assumptions
    assert any("down_proj, gate_proj, up_proj of dense and shared" in line for line in left)


@pytest.mark.parametrize(
    ("family", "targets", "said"),
    [
        ("qwen3_moe", ("gate_proj",), "'gate_proj' and 'up_proj' of the experts are one tensor"),
        ("qwen3_moe", ("w1",), "stored as two tensors, .* target experts, or some of q_proj"),
        ("qwen3_moe", ("nothing",), "it has q_proj, .*experts.gate_up_proj, experts.down_proj"),
        ("llama", ("experts",), "called 'experts'"),
    ],
)
def test_a_target_among_experts_that_means_nothing_says_what_would(
    family: str, targets: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        with_adapters(mixture(family), Lora(R, targets))


def test_dora_is_for_modules() -> None:
    with pytest.raises(UsageError, match=r"no DoRA for weights that are not a module, .*down"):
        with_adapters(mixture(), Lora(R, ("experts.down_proj",), is_dora=True))
