"""What is asked: made-up prompts that differ, and files of prompts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from ergmeter.errors import FormatError, UsageError
from ergmeter.load.pacing import LevelLength, Open
from ergmeter.load.request_body import FromFile, MadeUp, Prompt, read_prompts


def test_made_up_prompts_differ_from_their_first_words_on_and_repeat_with_their_seed() -> None:
    made = [MadeUp(50, 8, seed=1).prompt(number).content for number in range(40)]
    assert (
        len({" ".join(str(text).split()[:4]) for text in made}) == 40
    )  # no common prefix to cache
    assert all(len(str(text).split()) == 50 for text in made)
    assert made == [MadeUp(50, 8, seed=1).prompt(number).content for number in range(40)]
    assert MadeUp(50, 8, seed=2).prompt(0).content != made[0]


def test_a_file_gives_prompts_and_messages_in_their_order_and_again(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "one", "max_tokens": 3}\n\n"two"\n'
        '{"messages": [{"role": "user", "content": "x"}]}\n'
    )
    found = read_prompts(file, output_tokens=9)
    messages = [{"role": "user", "content": "x"}]
    assert [found.prompt(n) for n in range(4)] == [
        Prompt("one", 3),
        Prompt("two", 9),
        Prompt(messages, 9),
        Prompt("one", 3),
    ]
    assert found.repeats_after == 3
    assert Prompt("one", 3).fields("completions") == {"prompt": "one"}
    assert Prompt("one", 3).fields("chat")["messages"] == [{"role": "user", "content": "one"}]
    with pytest.raises(UsageError, match="--endpoint chat"):
        Prompt(messages, 9).fields("completions")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a"}\nnot json\n', "line 2: not JSON"),
        ('{"text": "a"}\n', "line 1: neither a prompt nor messages"),
        ('{"prompt": "a", "max_tokens": 0}\n', "line 1: max_tokens"),
        ("\n\n", "has no prompts"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(FormatError, match=said):
        read_prompts(file, output_tokens=9)


def test_arrivals_are_poisson_with_their_rate() -> None:
    due_s = list(Open(50.0, seed=3).arrivals_s(LevelLength(requests=20_000)))
    gaps = [later - earlier for earlier, later in pairwise(due_s)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 50, rel=0.03)
    assert spread == pytest.approx(mean, rel=0.03)  # as of an exponential distribution
    assert due_s[0] == 0
    assert due_s == list(Open(50.0, seed=3).arrivals_s(LevelLength(requests=20_000)))
    assert all(due < 2 for due in Open(50.0).arrivals_s(LevelLength(duration_s=2)))


def test_prompts_of_a_file_are_never_empty() -> None:
    assert FromFile((Prompt("a", 1),)).prompt(10**6).content == "a"
