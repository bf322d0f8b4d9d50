"""What a text is cleaned in: a time that grows with its length, whatever it is made of."""

from __future__ import annotations

import time

import pytest

from ergmeter.runlog.manage.anonymise import SecretWords, strings_in


@pytest.mark.parametrize("word", ["a.", "a-", "a:", "aa", "/a ", "~a ", "~a/ ", "'/a", "a@", "1."])
def test_a_long_text_takes_no_longer_for_each_of_its_letters(word: str) -> None:
    """Sixteen times the text: sixteen times the time, and not its square, which is 256."""

    def took_s(letters: int) -> float:
        text = word * (letters // len(word))
        times = []
        for _ in range(3):
            began_s = time.thread_time()
            SecretWords().clean(text)
            times.append(time.thread_time() - began_s)
        return min(times)

    assert took_s(48_000) / took_s(3_000) < 90


def test_all_texts_of_a_json_value_are_found_as_they_are() -> None:
    value = {"a b": ["C:\\x", {"ö": 5, "y": None}], "z": "é"}
    assert list(strings_in(value)) == ["a b", "C:\\x", "ö", "y", "z", "é"]


def test_letters_that_are_one_but_for_their_case_are_one_name() -> None:
    words = SecretWords()
    words.add("mass", "user")
    assert words.clean("Mass, MASS and ma\u017fs") == "user-1, user-1 and user-1"
