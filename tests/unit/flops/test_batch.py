"""Which positions meet which, and how a batch is laid out: by hand, and as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.errors import UsageError
from ergmeter.flops.analytic import step_flops, total
from ergmeter.flops.batch import Batch, Sequences
from ergmeter.flops.config import ModelConfig
from ergmeter.flops.graph.graph import Attention
from ergmeter.flops.source import model_graph, read_graph
from ergmeter.flops.work import step_work

CAUSAL = Attention(1, 1, 1, 1)
FULL = Attention(1, 1, 1, 1, mask="full")
LENGTHS = st.integers(1, 60)


def windowed(window: int) -> Attention:
    return Attention(1, 1, 1, 1, window=window)


def banded(window: int) -> Attention:
    return Attention(1, 1, 1, 1, mask="full", window=window)


def chunked(chunk: int) -> Attention:
    return Attention(1, 1, 1, 1, chunk=chunk)


def _met(attention: Attention, new: int, past: int = 0) -> int:
    """The pairs one by one: what the formulas must come to."""
    count = 0
    for query in range(past, past + new):
        for key in range(past + new):
            if attention.mask == "causal" and key > query:
                continue
            if attention.window is not None:
                far = abs(query - key)
                reach = attention.window // 2 if attention.mask == "full" else attention.window - 1
                if far > reach:
                    continue
            if attention.chunk is not None and key // attention.chunk != query // attention.chunk:
                continue
            count += 1
    return count


@pytest.mark.parametrize(
    ("attention", "new", "past", "pairs"),
    [
        (CAUSAL, 4, 0, 1 + 2 + 3 + 4),
        (CAUSAL, 1, 7, 8),
        (CAUSAL, 2, 3, 4 + 5),
        (FULL, 4, 0, 16),
        (windowed(2), 4, 0, 1 + 2 + 2 + 2),
        (windowed(3), 2, 5, 3 + 3),
        (chunked(3), 5, 0, (1 + 2 + 3) + (1 + 2)),
        (chunked(4), 2, 3, 4 + 1),
        (banded(2), 4, 0, 2 + 3 + 3 + 2),
        (banded(4), 4, 0, 3 + 4 + 4 + 3),
    ],
)
def test_pairs_by_hand(attention: Attention, new: int, past: int, pairs: int) -> None:
    assert Sequences(new, past=past).pairs(attention, "needed") == pairs
    assert Sequences(new, count=3, past=past).pairs(attention, "needed") == 3 * pairs


@given(new=LENGTHS, past=st.integers(0, 40), size=st.integers(1, 80))
def test_pairs_are_those_that_the_mask_lets_meet(new: int, past: int, size: int) -> None:
    for attention in (CAUSAL, FULL, windowed(size), chunked(size)):
        pairs = Sequences(new, past=past).pairs(attention, "needed")
        assert pairs == _met(attention, new, past)
    assert Sequences(new).pairs(banded(size), "needed") == _met(banded(size), new)


@given(length=LENGTHS, more=st.integers(0, 30))
def test_a_window_as_long_as_the_sequence_is_no_window(length: int, more: int) -> None:
    sequence = Sequences(length)
    causal = sequence.pairs(CAUSAL, "needed")
    assert sequence.pairs(windowed(length + more), "needed") == causal
    assert sequence.pairs(chunked(length + more), "needed") == causal
    assert sequence.pairs(banded(2 * length + more), "needed") == length * length


@given(new=LENGTHS, past=st.integers(0, 40), size=st.integers(1, 80))
def test_needed_is_within_computed(new: int, past: int, size: int) -> None:
    sequence = Sequences(new, past=past)
    for attention in (CAUSAL, FULL, windowed(size), chunked(size)):
        needed = sequence.pairs(attention, "needed")
        assert needed <= sequence.pairs(attention, "computed") == new * (past + new)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_documents_meet_less_than_the_grid_they_are_laid_out_in(lengths: list[int]) -> None:
    seq_len = sum(lengths)
    packed = Batch.of(1, seq_len, lengths=lengths)
    padded = Batch.of(len(lengths), max(lengths), lengths=lengths)
    for batch in (packed, padded):
        needed = sum(document.pairs(CAUSAL, "needed") for document in batch.documents)
        grid = sum(document.pairs(CAUSAL, "needed") for document in batch.grid().documents)
        assert needed == sum(length * (length + 1) // 2 for length in lengths)
        assert needed <= grid
        assert batch.tokens_real == seq_len <= batch.tokens


@pytest.mark.parametrize("lengths", [(512,), (256, 256), (100, 300, 112)])
def test_padding_is_computed_however_many_documents_there_are(lengths: tuple[int, ...]) -> None:
    """By hand: 2 layers of 12 h^2 and a gate, a head; 6 for each weight and row of the grid."""
    hidden, vocab, grid = 64, 1000, 4096
    graph = read_graph(f"hidden={hidden},layers=2,ffn=256,heads=4,vocab={vocab}")
    work = step_work(graph, Batch.of(1, grid, lengths=lengths)).chosen
    weights = 2 * (4 * hidden * hidden + 3 * hidden * 256) + hidden * vocab
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    attention = 3 * 2 * 4 * hidden * pairs  # the documents' own, in both
    assert work.model_per_step == 6 * weights * 512 + attention
    assert work.hardware_per_step == 6 * weights * grid + attention
    assert any("3584 of 4096 positions are padding" in line for line in work.assumptions)


def test_without_padding_packed_documents_cost_what_they_need() -> None:
    graph = read_graph("hidden=64,layers=2,ffn=256,heads=4,vocab=1000")
    work = step_work(graph, Batch.of(1, 512, lengths=[256, 256])).chosen
    assert work.hardware_per_step == work.model_per_step
    assert not any("padding" in line for line in work.assumptions)


def test_padding_is_in_the_tokens_and_not_in_the_real_ones() -> None:
    batch = Batch.of(2, 10, lengths=[10, 4])
    assert (batch.tokens, batch.tokens_real, batch.is_grid) == (20, 14, False)
    assert batch.grid().is_grid
    assert Batch.of(2, 10, lengths=[10, 10]).is_grid
    assert Batch.of(2, 10).is_grid


@pytest.mark.parametrize("lengths", [[5, 6], [11]])
def test_documents_that_do_not_fit_are_refused(lengths: list[int]) -> None:
    with pytest.raises(UsageError, match="do not fit 1 sequences of 10"):
        Batch.of(1, 10, lengths=lengths)


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "8"])
def test_a_batch_of_nothing_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="must be a whole number of 1 or more"):
        Batch.of(value, 8)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="must be a whole number of 1 or more"):
        Batch.of(1, value)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="must be a whole number of 1 or more"):
        Batch.of(1, 8, lengths=[value])  # type: ignore[list-item]


def test_an_empty_list_of_documents_and_a_negative_past_are_refused() -> None:
    with pytest.raises(UsageError, match="no documents"):
        Batch.of(1, 8, lengths=[])
    with pytest.raises(UsageError, match="can't be negative"):
        Batch.of(1, 8, past=-1)


def test_a_source_is_read_once_and_then_remembered() -> None:
    first = Batch.of(2, 5, source_len=9)
    later = Batch.of(2, 1, past=5, source_len=9)
    assert (first.rows("source"), later.rows("source")) == (18, 0)
    assert later.stream("source") == (Sequences(0, 2, past=9),)


def test_a_source_of_known_length_has_its_frames() -> None:
    facts = {"source_len": 1500, "frames_per_source": 2}
    batch = Batch.of(3, 8, facts=facts)
    assert (batch.rows("source"), batch.rows("frames")) == (4500, 9000)


# -- images ----------------------------------------------------------------------------------------

FACTS = {
    "grid_rows": 6,
    "grid_columns": 10,
    "patches_per_view": 61,
    "features_per_view": 15,
    "views_per_image": 1,
    "tokens_per_image": 15,
}


def test_the_rows_of_images_by_stream() -> None:
    batch = Batch.of(2, 64, images=3, facts=FACTS)
    assert batch.rows("patch grid") == 180
    assert batch.stream("patches") == (Sequences(61, 3),)
    assert batch.rows("features") == 45
    assert batch.tokens == 128  # an image's tokens are among them
    assert Batch.of(2, 64, facts=FACTS).rows("patches") == 0


def test_an_image_of_several_views_is_as_many_sequences() -> None:
    batch = Batch.of(1, 200, images=2, facts={**FACTS, "views_per_image": 5})
    assert batch.stream("patches") == (Sequences(61, 10),)


def test_windows_tile_the_image_with_what_is_left_at_its_edges() -> None:
    batch = Batch.of(1, 64, images=2, facts={**FACTS, "window_side": 4})
    # 6 rows are 4 and 2; 10 columns are 4, 4 and 2.
    assert batch.stream("patch windows") == (
        Sequences(16, 4),
        Sequences(8, 2),
        Sequences(8, 4),
        Sequences(4, 2),
    )


@given(rows=st.integers(1, 40), columns=st.integers(1, 40), side=st.integers(1, 12))
def test_windows_hold_every_patch_once(rows: int, columns: int, side: int) -> None:
    facts = {**FACTS, "grid_rows": rows, "grid_columns": columns, "window_side": side}
    batch = Batch.of(1, 64, images=1, facts=facts)
    assert batch.rows("patch windows") == rows * columns == batch.rows("patch grid")


def test_images_that_do_not_fit_the_sequences_are_refused() -> None:
    with pytest.raises(UsageError, match="5 images of 15 tokens do not fit 1 sequences of 64"):
        Batch.of(1, 64, images=5, facts=FACTS)
    with pytest.raises(UsageError, match="the number of images must be"):
        Batch.of(1, 64, images=-1, facts=FACTS)


# -- models of images ------------------------------------------------------------------------------

VIT = {
    "model_type": "vit", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "image_size": 224, "patch_size": 16, "num_channels": 3,
    "qkv_bias": True, "architectures": ["ViTForImageClassification"], "num_labels": 1000,
}  # fmt: skip


def test_a_sequence_of_a_vit_is_its_image() -> None:
    """ViT-B/16 has 86.6 M parameters and, as torchvision counts it, 17.56 GMAC an image."""
    graph = model_graph(ModelConfig(VIT, where="x"))
    assert graph.params == 86_567_656
    batch = Batch.of(2, 197, facts=graph.facts)
    forward = total(step_flops(graph, batch, trainable=None)).forward / 2
    layer = 12 * 768 * 768 * 197 + 2 * 768 * 197 * 197
    by_hand = 196 * 768 * 768 + 12 * layer + 768 * 1000
    assert forward == 2 * by_hand
    assert by_hand / 1e9 == pytest.approx(17.56, abs=0.01)


@pytest.mark.parametrize(("seq_len", "images"), [(64, 0), (197, 1)])
def test_another_length_than_an_images_own_is_refused(seq_len: int, images: int) -> None:
    facts = model_graph(ModelConfig(VIT, where="x")).facts
    with pytest.raises(UsageError, match="an image of 197 patches"):
        Batch.of(2, seq_len, images=images, facts=facts)


def test_texts_and_images_of_clip_are_counted_each_in_its_own_rows() -> None:
    graph = model_graph(ModelConfig({"model_type": "clip"}, where="x"))
    assert graph.params == 151_277_313  # as OpenAI's ViT-B/32 has
    none, some = (
        step_flops(graph, Batch.of(8, 77, images=images, facts=graph.facts)) for images in (0, 8)
    )
    assert none["mlp"] == some["mlp"]
    assert none["vision mlp"].model == 0
    # Of 32 x 32 pixels each: 49 patches and the class token, through 12 layers of 2 x 4 x 768^2.
    assert some["vision mlp"].forward == 8 * 50 * 12 * 2 * 8 * 768**2
