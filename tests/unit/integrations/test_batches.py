"""Tokens of batches, counted by hand beside each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ergmeter.integrations.batches import Counts, count_tokens

# Two rows of 5 places: 3 and 5 real tokens, 7 pads where the tokenizer has no pad but its end.
IDS = [[5, 6, 7, 7, 7], [8, 9, 7, 3, 7]]
MASK = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
# The first token of a row is predicted by nothing; the prompt (2 tokens of the second) is left out.
LABELS = [[5, 6, 7, -100, -100], [-100, -100, 7, 3, 7]]
PADDED = Counts(computed=10, samples=2, real=8, loss=2 + 3, squares=9 + 25)


def tensors(**rows: list[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values) for name, values in rows.items()}


def test_padding_is_what_the_mask_leaves_out_and_a_real_end_token_counts() -> None:
    assert count_tokens(tensors(input_ids=IDS, attention_mask=MASK, labels=LABELS)) == PADDED


def test_labels_that_a_model_does_not_shift_bear_loss_at_the_first_position_too() -> None:
    counts = count_tokens(tensors(input_ids=IDS, attention_mask=MASK, labels=LABELS), shifts=False)
    assert counts is not None
    assert counts.loss == 3 + 3


def test_without_a_mask_it_is_not_known_what_is_real() -> None:
    assert count_tokens(tensors(input_ids=IDS)) == Counts(10, 2, None, None, 50)


@pytest.mark.parametrize("kind", ["bool", "numbered"])
def test_masks_of_truths_and_of_document_numbers_are_masks(kind: str) -> None:
    mask = torch.tensor(MASK).bool() if kind == "bool" else torch.tensor(MASK) * 3
    counts = count_tokens({"input_ids": torch.tensor(IDS), "attention_mask": mask})
    assert counts is not None
    assert counts.real == 8


def test_a_mask_of_pairs_of_positions_does_not_say_what_is_padding() -> None:
    mask = torch.ones(2, 1, 5, 5)
    counts = count_tokens({"input_ids": torch.tensor(IDS), "attention_mask": mask})
    assert counts == Counts(10, 2, None, None, 50)


def test_a_packed_row_holds_as_many_sequences_as_positions_start_again() -> None:
    # Lengths 3, 1 and 4; the first label of each is ignored by those who pack.
    batch = tensors(
        input_ids=[[1, 2, 3, 9, 4, 5, 6, 7]],
        position_ids=[[0, 1, 2, 0, 0, 1, 2, 3]],
        labels=[[-100, 2, 3, -100, -100, 5, 6, 7]],
    )
    assert count_tokens(batch) == Counts(8, samples=3, real=8, loss=2 + 0 + 3, squares=9 + 1 + 16)


def test_a_packed_row_that_was_filled_up_holds_padding_and_no_more_sequences() -> None:
    batch = tensors(input_ids=[[1, 2, 3, 4, 5, 0, 0, 0]], position_ids=[[0, 1, 2, 0, 1, 0, 0, 0]])
    assert count_tokens(batch) == Counts(8, samples=2, real=5, loss=None, squares=9 + 4)


def test_packed_rows_with_a_mask_are_attended_to_whole() -> None:
    batch = tensors(
        input_ids=[[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 0, 0]],
        position_ids=[[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 0, 0]],
        attention_mask=[[1] * 6, [1, 1, 1, 1, 0, 0]],
    )
    assert count_tokens(batch) == Counts(12, samples=4, real=10, loss=None, squares=36 + 16)


def test_positions_that_stand_for_all_rows_or_for_pictures_are_not_taken_for_packing() -> None:
    for positions in (torch.arange(5)[None], torch.zeros(3, 2, 5, dtype=torch.long)):
        counts = count_tokens({"input_ids": torch.tensor(IDS), "position_ids": positions})
        assert counts == Counts(10, 2, None, None, 50)


def test_one_flat_row_of_several_sequences() -> None:
    batch = tensors(input_ids=[1, 2, 3, 4, 5], position_ids=[0, 1, 0, 1, 2])
    assert count_tokens(batch) == Counts(5, samples=2, real=5, loss=None, squares=4 + 9)


def test_pairs_of_answers_count_both_and_their_prompt_inside_them_once() -> None:
    batch = tensors(
        chosen_input_ids=[[1, 2, 3, 4]],
        chosen_attention_mask=[[1, 1, 1, 1]],
        chosen_labels=[[-100, -100, 3, 4]],
        rejected_input_ids=[[1, 2, 5, 0, 0]],
        rejected_attention_mask=[[1, 1, 1, 0, 0]],
        rejected_labels=[[-100, -100, 5, -100, -100]],
        prompt_input_ids=[[1, 2]],
        prompt_attention_mask=[[1, 1]],
    )
    assert count_tokens(batch) == Counts(9, samples=2, real=4 + 3, loss=2 + 1, squares=16 + 9)


def test_answers_that_are_put_behind_their_prompt_later_are_not_guessed() -> None:
    batch = tensors(prompt_input_ids=[[1, 2]], chosen_input_ids=[[3]], rejected_input_ids=[[4]])
    assert count_tokens(batch) is None


def test_the_loss_of_a_preference_is_taken_at_the_completions() -> None:
    # As TRL's collator documents it: chosen and rejected of one prompt of 3 tokens.
    batch = tensors(
        input_ids=[[1, 2, 3, 4, 5], [1, 2, 3, 6, 0]],
        attention_mask=[[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]],
        completion_mask=[[0, 0, 0, 1, 1], [0, 0, 0, 1, 0]],
    )
    assert count_tokens(batch) == Counts(10, 2, real=9, loss=3, squares=25 + 16)


def test_targets_of_another_length_bear_the_loss_of_a_translation() -> None:
    batch = tensors(input_ids=IDS, attention_mask=MASK, labels=[[1, 2, -100], [1, 2, 3]])
    counts = count_tokens(batch, shifts=False)
    assert counts is not None
    assert counts.loss == 5
    decoded = count_tokens(batch | tensors(decoder_input_ids=[[0, 1, 2], [0, 1, 2]]), shifts=False)
    assert decoded == Counts(16, 4, None, loss=5, squares=34 + 18)


def test_whatever_number_below_zero_a_loss_ignores_bears_none() -> None:
    # As minGPT, nanoGPT and nanochat: cross_entropy(..., ignore_index=-1).
    inputs, targets = torch.tensor(IDS), torch.tensor([[-1, -1, 7, 3, 7], [-1, 5, 0, 3, 7]])
    assert count_tokens((inputs, targets)) == Counts(10, 2, None, 7, 50)


def test_the_class_of_a_text_is_no_token() -> None:
    batch = tensors(input_ids=IDS, attention_mask=MASK, labels=[0, 1])
    assert count_tokens(batch) == Counts(10, 2, 8, None, squares=9 + 25)


def test_a_pair_without_names_has_targets_that_are_moved_already() -> None:
    inputs, targets = torch.tensor(IDS), torch.tensor(LABELS)
    assert count_tokens((inputs, targets)) == Counts(10, 2, None, 6, 50)
    assert count_tokens([[inputs, targets]]) == Counts(10, 2, None, 6, 50)


def test_of_three_without_names_it_is_not_known_which_are_the_targets() -> None:
    ids = torch.tensor(IDS)
    assert count_tokens((ids, torch.tensor(MASK), ids)) == Counts(10, 2, None, None, 50)


def test_a_batch_that_is_tokens_itself() -> None:
    assert count_tokens(torch.tensor(IDS)) == Counts(10, 2, None, None, 50)
    assert count_tokens(torch.tensor(IDS[0])) == Counts(5, 1, None, None, 25)


def test_pictures_with_their_classes_hold_no_tokens() -> None:
    assert count_tokens((torch.rand(4, 3, 8, 8), torch.tensor([1, 2, 3, 4]))) is None
    assert count_tokens({"pixel_values": torch.rand(4, 3, 8, 8), "labels": torch.arange(4)}) is None


def test_texts_that_are_not_tokens_yet_hold_none() -> None:
    assert count_tokens([{"prompt": "the sky is"}, {"prompt": "two and"}]) is None
    assert count_tokens("the sky is") is None
    assert count_tokens(None) is None


def test_the_batch_of_a_tokenizer_counts_as_a_dictionary_does() -> None:
    transformers = pytest.importorskip("transformers")
    batch = tensors(input_ids=IDS, attention_mask=MASK, labels=LABELS)
    assert count_tokens(transformers.BatchEncoding(batch)) == PADDED


def test_arrays_of_numpy_count_as_tensors_do() -> None:
    batch = {"input_ids": np.array(IDS), "attention_mask": np.array(MASK)}
    assert count_tokens(batch | {"labels": np.array(LABELS)}) == PADDED
    packed = {"input_ids": np.array([[1, 2, 3]]), "position_ids": np.array([[0, 0, 1]])}
    assert count_tokens(packed) == Counts(3, 2, 3, None, 5)


def test_arrays_of_jax_count_as_tensors_do() -> None:
    jnp = pytest.importorskip("jax.numpy")
    batch = {"input_ids": jnp.array(IDS), "attention_mask": jnp.array(MASK)}
    assert count_tokens(batch | {"labels": jnp.array(LABELS)}) == PADDED
    packed = {"input_ids": jnp.array([[1, 2, 3]]), "position_ids": jnp.array([[0, 0, 1]])}
    assert count_tokens(packed) == Counts(3, 2, 3, None, 5)


def test_what_jax_traces_with_has_no_tokens() -> None:
    jax = pytest.importorskip("jax")
    seen = []

    def traced(ids: Any) -> Any:
        seen.append(count_tokens({"input_ids": ids}))
        return ids

    jax.eval_shape(traced, np.array(IDS))
    assert seen == [None]


def test_shapes_without_values_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert count_tokens({"input_ids": torch.ones(2, 5, dtype=torch.long, device="meta")}) is None
    with FakeTensorMode():
        assert count_tokens({"input_ids": torch.ones(2, 5, dtype=torch.long)}) is None
    assert count_tokens({"input_ids": torch.rand(2, 5)}) is None  # embeddings by that name


def test_amounts_that_are_settled_take_their_values_in_order() -> None:
    promise = object()
    counts = Counts(10, samples=2, real=promise, loss=None, squares=promise)
    assert counts.laters == [promise, promise]
    assert counts.settled([8, 50]) == Counts(10, 2, 8, None, 50)
