"""FLOPs of a step done by hand beside the engine, and what is trained, frozen or done twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.errors import UsageError
from ergmeter.flops.analytic import PartFlops, step_flops, total
from ergmeter.flops.batch import Batch
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.graph.graph import Builder, Graph, Node, gradients, leading_to_loss, trains_all
from ergmeter.flops.source import model_graph

H, F, V, L, HEADS, KV, S, N = 64, 160, 256, 2, 4, 2, 32, 3
HEAD_DIM = H // HEADS
Q, K = H * H, H * KV * HEAD_DIM
ROWS = N * S
PAIRS = N * S * (S + 1) // 2  # of one head and layer
CORE = 2 * HEADS * HEAD_DIM * PAIRS  # the scores of a layer; the values cost the same
LINEAR = 2 * ROWS * (2 * Q + 2 * K + 3 * H * F)  # a layer's matrices, once
HEAD = 2 * ROWS * H * V


def llama(**more: object) -> Graph:
    fields: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": H,
        "num_hidden_layers": L,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "intermediate_size": F,
        "vocab_size": V,
        "tie_word_embeddings": False,
    }
    return model_graph(ModelConfig(fields | more, where="test"))


BATCH = Batch.of(N, S)


def test_a_forward_pass_of_two_layers_by_hand() -> None:
    parts = step_flops(llama(), BATCH, trainable=None)
    assert parts == {
        "attention qkv": PartFlops(L * 2 * ROWS * (Q + 2 * K)),
        "attention scores": PartFlops(L * CORE),
        "attention values": PartFlops(L * CORE),
        "attention output": PartFlops(L * 2 * ROWS * Q),
        "mlp": PartFlops(L * 2 * ROWS * 3 * H * F),
        "head": PartFlops(HEAD),
    }


def test_a_step_in_which_all_is_trained_is_three_forward_passes() -> None:
    parts = step_flops(llama(), BATCH)
    forward = L * (LINEAR + 2 * CORE) + HEAD
    assert total(parts) == PartFlops(forward, 2 * forward)


def test_the_parameters_of_two_layers_by_hand() -> None:
    assert llama().params == 2 * V * H + L * (2 * Q + 2 * K + 3 * H * F + 2 * H) + H
    assert llama(tie_word_embeddings=True).params == llama().params - V * H


def test_a_tied_head_costs_what_a_head_of_its_own_does() -> None:
    assert step_flops(llama(tie_word_embeddings=True), BATCH) == step_flops(llama(), BATCH)


def test_with_the_embedding_and_the_first_norm_frozen_one_gradient_ends_earlier() -> None:
    """Queries, keys and values of the first layer need no gradient of what goes into them."""
    frozen = ("model.embed_tokens", "model.layers.0.norm")
    parts = step_flops(llama(), BATCH, trainable=lambda node: node.name not in frozen)
    spared = 2 * ROWS * (Q + 2 * K)
    assert total(parts).backward == total(step_flops(llama(), BATCH)).backward - spared
    only = step_flops(llama(), BATCH, trainable=lambda node: node.name != frozen[0])
    assert only == step_flops(llama(), BATCH)  # a norm is below them still


def test_nothing_trained_has_no_backward() -> None:
    parts = step_flops(llama(), BATCH, trainable=lambda _node: False)
    assert parts == step_flops(llama(), BATCH, trainable=None)
    recomputed = step_flops(llama(), BATCH, trainable=lambda _node: False, checkpointing="full")
    assert total(recomputed).recomputed == 0


def test_a_head_alone_is_trained_without_a_layer_walked_back_through() -> None:
    parts = step_flops(llama(), BATCH, trainable=lambda node: node.role == "head")
    assert total(parts).backward == HEAD
    assert parts["head"] == PartFlops(HEAD, HEAD)


def test_the_upper_layer_alone_is_trained() -> None:
    """Down to its queries, keys and values, whose inputs come from below and are fixed."""
    parts = step_flops(
        llama(), BATCH, trainable=lambda node: node.name.startswith("model.layers.1.")
    )
    inputs = LINEAR + 4 * CORE + HEAD  # the norm is trained, so the projections pass it on
    assert total(parts).backward == inputs + LINEAR


def test_full_checkpointing_computes_a_layer_again_up_to_its_last_product() -> None:
    parts = step_flops(llama(), BATCH, checkpointing="full")
    assert total(parts).recomputed == L * (LINEAR - 2 * ROWS * F * H + 2 * CORE)
    assert parts["head"].recomputed == 0
    assert total(parts).model == total(step_flops(llama(), BATCH)).model


def test_selective_checkpointing_computes_the_core_again() -> None:
    parts = step_flops(llama(), BATCH, checkpointing="selective")
    assert total(parts).recomputed == L * 2 * CORE
    assert total(parts).hardware == total(parts).model + L * 2 * CORE


def test_frozen_layers_below_are_not_computed_again() -> None:
    parts = step_flops(
        llama(),
        BATCH,
        trainable=lambda node: node.name.startswith("model.layers.1."),
        checkpointing="full",
    )
    assert total(parts).recomputed == LINEAR - 2 * ROWS * F * H + 2 * CORE


def test_a_token_after_a_context_meets_all_of_it() -> None:
    parts = step_flops(llama(), Batch.of(1, 1, past=99), trainable=None)
    assert parts["attention scores"].forward == L * 2 * HEADS * HEAD_DIM * 100
    assert parts["mlp"].forward == L * 2 * 3 * H * F


def test_packed_documents_cost_the_same_matrices_and_fewer_pairs() -> None:
    packed = step_flops(llama(), Batch.of(1, S, lengths=[S // 2, S // 2]))
    whole = step_flops(llama(), Batch.of(1, S))
    assert packed["mlp"] == whole["mlp"]
    half = S // 2
    assert packed["attention scores"].forward == (
        L * 2 * HEADS * HEAD_DIM * 2 * (half * (half + 1) // 2)
    )


@given(lengths=st.lists(st.integers(1, S), min_size=1, max_size=6))
def test_documents_never_cost_more_than_their_grid(lengths: list[int]) -> None:
    batch = Batch.of(len(lengths), S, lengths=lengths)
    needed, grid = step_flops(llama(), batch), step_flops(llama(), batch.grid())
    assert all(needed[part].model <= grid[part].model for part in grid)


@given(window=st.integers(S, 4 * S))
def test_a_window_no_sequence_fills_changes_nothing(window: int) -> None:
    mistral = llama(model_type="mistral", sliding_window=window)
    assert step_flops(mistral, BATCH) == step_flops(llama(), BATCH)


# -- experts ---------------------------------------------------------------------------------------


def test_of_the_experts_only_those_used_are_counted_and_all_are_held() -> None:
    graph = llama(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    parts = step_flops(graph, BATCH, trainable=None)
    assert parts["experts"].forward == L * 2 * ROWS * 2 * 3 * H * F
    assert parts["router"].forward == L * 2 * ROWS * H * 8
    assert graph.params - graph.params_active == L * 6 * 3 * H * F


# -- what leads to the loss ------------------------------------------------------------------------


def _graph(b: Builder) -> Graph:
    return Graph("toy", tuple(b.nodes), H, 1, V)


def test_what_the_loss_does_not_come_from_has_a_forward_pass_and_no_other() -> None:
    b = Builder()
    first = b.linear("first", "linear", (), H, H)
    used = b.linear("used", "linear", first, H, H)
    b.linear("aside", "aside", first, H, H)
    b.linear("head", "head", used, H, V, role="head", stream="logits")
    graph = _graph(b)
    assert leading_to_loss(graph) == {"first", "used", "head"}
    assert gradients(graph, trains_all) == {
        "first": True,
        "used": True,
        "aside": False,
        "head": True,
    }
    once = 2 * ROWS * H * H
    parts = step_flops(graph, BATCH)
    assert parts["aside"] == PartFlops(once, 0)
    assert parts["linear"] == PartFlops(2 * once, 3 * once)  # `first` reads data


# -- encoders --------------------------------------------------------------------------------------

T5: dict[str, Any] = {
    "model_type": "t5",
    "d_model": H,
    "d_kv": HEAD_DIM,
    "d_ff": F,
    "num_layers": 1,
    "num_heads": HEADS,
    "vocab_size": V,
    "relative_attention_num_buckets": 32,
}
SOURCE = 20


def test_an_encoder_and_a_decoder_by_hand() -> None:
    graph = model_graph(ModelConfig(T5, where="test"))
    parts = step_flops(graph, Batch.of(N, S, source_len=SOURCE), trainable=None)
    read = N * SOURCE
    own = 2 * HEADS * HEAD_DIM
    assert parts["encoder attention qkv"].forward == 2 * read * 3 * Q
    assert parts["encoder attention scores"].forward == own * N * SOURCE * SOURCE
    assert parts["encoder mlp"].forward == 2 * read * 2 * H * F
    # Cross attention: queries and outputs for what is written, keys and values for what is read.
    assert parts["attention qkv"].forward == 2 * ROWS * 3 * Q + 2 * ROWS * Q + 2 * read * 2 * Q
    assert parts["attention scores"].forward == own * (PAIRS + N * S * SOURCE)
    assert parts["head"].forward == HEAD


def test_padding_of_what_is_written_meets_no_source() -> None:
    graph = model_graph(ModelConfig(T5, where="test"))
    batch = Batch.of(1, S, lengths=[S - 2], source_len=SOURCE)
    real, computed = (step_flops(graph, each, trainable=None) for each in (batch, batch.computed()))
    assert computed["attention scores"] == real["attention scores"]
    assert computed["encoder mlp"] == real["encoder mlp"]
    assert computed["mlp"].forward == real["mlp"].forward * S / (S - 2)
    assert computed["head"].forward == real["head"].forward * S / (S - 2)


def test_a_token_written_later_reads_the_source_from_the_cache() -> None:
    graph = model_graph(ModelConfig(T5, where="test"))
    parts = step_flops(graph, Batch.of(1, 1, past=9, source_len=SOURCE), trainable=None)
    assert parts["encoder mlp"].forward == 0
    assert parts["attention qkv"].forward == 2 * (3 * Q + Q)
    assert parts["attention scores"].forward == 2 * HEADS * HEAD_DIM * (10 + SOURCE)


def test_a_model_that_reads_a_source_is_not_counted_without_one() -> None:
    graph = model_graph(ModelConfig(T5, where="test"))
    with pytest.raises(UsageError, match="the batch has no source, which t5 reads"):
        step_flops(graph, Batch.of(N, S))


def test_a_frozen_encoder_has_no_way_back_but_its_keys_do() -> None:
    graph = model_graph(ModelConfig(T5, where="test"))
    batch = Batch.of(N, S, source_len=SOURCE)

    def trainable(node: Node) -> bool:
        return not node.name.startswith("encoder.") and node.name != "shared"

    parts = step_flops(graph, batch, trainable=trainable)
    assert parts["encoder mlp"].backward == 0
    cross = {node.name: node for node in graph}["decoder.block.0.layer.1.EncDecAttention.k"]
    assert cross.stream == "source"
    needs = gradients(graph, trainable)
    assert needs[cross.name]
    assert not any(needs[name] for name in cross.of)


BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": H,
    "num_hidden_layers": L,
    "num_attention_heads": HEADS,
    "intermediate_size": F,
    "vocab_size": V,
    "max_position_embeddings": 128,
    "type_vocab_size": 2,
}


def test_an_encoder_sees_both_ways_and_transforms_before_its_head() -> None:
    parts = step_flops(model_graph(ModelConfig(BERT, where="test")), BATCH, trainable=None)
    assert parts["attention scores"].forward == L * 2 * HEADS * HEAD_DIM * N * S * S
    assert parts["mlp"].forward == L * 2 * ROWS * 2 * H * F
    assert parts["head"].forward == 2 * ROWS * H * H + HEAD


def test_frozen_embeddings_of_an_encoder_spare_the_first_projections() -> None:
    """Its norms come after each part, so nothing trained is below them."""
    graph = model_graph(ModelConfig(BERT, where="test"))
    parts = step_flops(graph, BATCH, trainable=lambda node: "embeddings" not in node.name)
    spared = total(step_flops(graph, BATCH)).backward - total(parts).backward
    assert spared == 2 * ROWS * 3 * Q
