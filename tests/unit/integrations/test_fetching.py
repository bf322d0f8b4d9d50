"""Numbers that were asked for come back as they were. What is on a GPU is in tests/device."""

from __future__ import annotations

import pytest
import torch

from ergmeter.integrations.unsettled_steps import Fetch, device_events


def test_numbers_of_torch_come_in_their_order_and_whole() -> None:
    numbers = [torch.tensor(3, dtype=torch.int32), torch.tensor(2**40), torch.tensor(0)]
    fetch = Fetch(numbers).start()
    assert fetch.is_here
    assert fetch.values() == [3, 2**40, 0]


def test_a_number_is_the_one_it_was_when_it_was_fetched() -> None:
    number = torch.tensor(3)
    fetch = Fetch([number]).start()
    number += 1
    assert fetch.values() == [3]


def test_numbers_of_jax_come_by_being_looked_at() -> None:
    jnp = pytest.importorskip("jax.numpy")
    fetch = Fetch([jnp.array([1, 2]).sum(), jnp.array(7)]).start()
    assert fetch.is_here
    assert fetch.values() == [3, 7]


def test_on_the_host_there_is_no_queue_to_stand_in() -> None:
    assert device_events([torch.tensor(3)]) is None
    assert device_events([7]) is None
