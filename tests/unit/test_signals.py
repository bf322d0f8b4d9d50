"""Signals are handled within a block, and as before after it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from ergmeter import signals


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_calls_the_handler_within_the_block_alone() -> None:
    numbers: list[int] = []
    outside: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: outside.append(number))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run may ignore it
    with signals.handled(lambda number, _frame: numbers.append(number)):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    assert numbers == [signal.SIGTERM, signal.SIGINT]
    assert outside == [signal.SIGTERM]


def test_an_ignored_signal_stays_ignored() -> None:
    numbers: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with signals.handled(lambda number, _frame: numbers.append(number)):
        signal.raise_signal(signal.SIGINT)
    assert numbers == []
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_outside_of_the_main_thread_nothing_changes() -> None:
    before = signal.getsignal(signal.SIGTERM)
    within: list[object] = []

    def block() -> None:
        with signals.handled(lambda *_: None):
            within.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert within == [before]
