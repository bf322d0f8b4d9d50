"""Batches and their three token counts, counted by hand."""

from __future__ import annotations

from itertools import islice

import torch

from ergmeter.workloads.demo_text import DemoText
from ergmeter.workloads.demo_training import NO_LOSS, PADDING, batch_of, endless_batches

LONG = DemoText(b"ab\n", b"cde\n")  # 7 bytes: 6 positions, 4 of which predict the tale
SHORT = DemoText(b"x\n", b"y\n")  # 4 bytes: 3 positions, 2 of which predict the tale


def test_the_three_counts_by_hand() -> None:
    batch = batch_of([LONG, SHORT], multiple=4)
    assert batch.inputs.shape == (
        2,
        8,
    )  # the longest has 6 positions, rounded up to a multiple of 4
    assert batch.tokens_computed == 16
    assert batch.tokens_real == 6 + 3
    assert batch.tokens_loss == 4 + 2
    assert batch.samples == 2


def test_each_position_predicts_the_next_byte_where_that_is_of_the_tale() -> None:
    batch = batch_of([LONG, SHORT], multiple=1)
    assert batch.inputs.tolist() == [
        list(b"ab\ncde"),
        [*b"x\ny", PADDING, PADDING, PADDING],
    ]
    assert batch.targets.tolist() == [
        [NO_LOSS, NO_LOSS, *b"cde\n"],
        [NO_LOSS, *b"y\n", NO_LOSS, NO_LOSS, NO_LOSS],
    ]


def test_the_counts_are_what_the_tensors_hold() -> None:
    batch = batch_of([SHORT, LONG, LONG])
    assert batch.tokens_computed == batch.inputs.numel() == 3 * 32
    assert batch.tokens_real == int((batch.inputs != PADDING).sum())
    assert batch.tokens_loss == int((batch.targets != NO_LOSS).sum())


def test_a_width_that_is_a_multiple_already_is_kept() -> None:
    assert batch_of([LONG], multiple=6).inputs.shape == (1, 6)
    assert batch_of([LONG], multiple=6).tokens_computed == batch_of([LONG], multiple=6).tokens_real


def test_moving_a_batch_keeps_its_counts() -> None:
    batch = batch_of([LONG, SHORT])
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.inputs, batch.inputs)
    assert torch.equal(moved.targets, batch.targets)
    counts = (moved.tokens_computed, moved.tokens_real, moved.tokens_loss)
    assert counts == (batch.tokens_computed, batch.tokens_real, batch.tokens_loss)


def test_one_time_round_gives_each_document_once_and_the_next_in_another_order() -> None:
    documents = [DemoText(b"%c\n" % letter, b".\n") for letter in b"abcdefgh"]
    batches = list(islice(endless_batches(documents, 2, seed=3), 8))
    letters = [
        [int(row[0]) for batch in part for row in batch.inputs]
        for part in (batches[:4], batches[4:])
    ]
    assert [sorted(part) for part in letters] == [list(b"abcdefgh")] * 2
    assert letters[0] != letters[1]


def test_the_order_is_the_same_for_the_same_seed() -> None:
    documents = [DemoText(b"%c\n" % letter, b".\n") for letter in b"abcdefgh"]
    one, same, other = (next(endless_batches(documents, 8, seed=s)).inputs for s in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
