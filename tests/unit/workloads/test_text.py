"""The tales: the same each time, of the size that was asked for, with something to learn."""

from __future__ import annotations

import pytest

from ergmeter.workloads.demo_text import END, SIZE_BYTES, documents


def test_the_same_seed_gives_the_same_tales_and_another_gives_others() -> None:
    assert documents(5_000) == documents(5_000)
    assert documents(5_000)[0] != documents(5_000, seed=1)[0]


def test_the_first_tale_never_changes() -> None:
    # Pinned: a run of the demo is comparable with one of last year only if the text is the same.
    first = documents(1)[0]
    assert first.prompt == b"Tell of Olav, the map and the island.\n"
    assert first.tale == (
        b"Olav had lost a map, and looked for it at the island. On the way he met the captain, who"
        b" asked about the small map. When the snow stopped, Olav counted to 34 and opened the door"
        b" of the island. Now the map hangs in the island, and Olav is glad.\n"
    )


@pytest.mark.parametrize("size_bytes", [1, 1_000, SIZE_BYTES])
def test_it_is_the_fewest_documents_that_hold_the_size(size_bytes: int) -> None:
    sizes = [len(document.text) for document in documents(size_bytes)]
    assert sum(sizes) >= size_bytes
    assert sum(sizes[:-1]) < size_bytes


def test_no_document_comes_twice() -> None:
    made = [document.text for document in documents()]
    assert len(made) > 1_000
    assert len(set(made)) == len(made)


def test_lengths_differ_enough_to_need_padding_and_fit_the_model_s_context() -> None:
    lengths = [len(document.text) for document in documents()]
    assert max(lengths) > 2 * min(lengths)
    assert max(lengths) <= 512


def test_every_tale_is_finished_ascii_that_repeats_what_was_asked_for() -> None:
    for document in documents(50_000):
        asked, tale = document.prompt.decode("ascii"), document.tale.decode("ascii")
        name, thing_and_place = asked.removeprefix("Tell of ").split(", the ")
        thing = thing_and_place.split(" and the ")[0]
        assert document.text.count(END) == 2
        assert tale.endswith(".\n")
        assert name in tale
        assert thing in tale
        assert "{" not in tale


def test_a_name_keeps_its_pronoun() -> None:
    tales = [document.tale.decode() for document in documents(100_000)]
    of_mira = [tale for tale in tales if "Mira" in tale]
    assert any(" she " in tale for tale in of_mira)
    assert not any(" he " in tale or "He " in tale for tale in of_mira)
