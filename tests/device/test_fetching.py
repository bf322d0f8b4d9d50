"""Numbers on a real GPU: fetched behind the program's back, right, and without making it wait."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from ergmeter import Run
from ergmeter.integrations.batches import Counts, counted
from ergmeter.integrations.fetching import Fetch, now_on
from ergmeter.integrations.training import Training

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def busy(seconds: float) -> None:
    """Give the device work for about so long, and return at once."""
    cycles = int(seconds * torch.cuda.get_device_properties(0).clock_rate * 1e3)
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def batch() -> dict[str, torch.Tensor]:
    rows = {
        "input_ids": [[5, 6, 7, 7, 7], [8, 9, 7, 3, 7]],
        "attention_mask": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
        "labels": [[5, 6, 7, -100, -100], [-100, -100, 7, 3, 7]],
    }
    return {name: torch.tensor(values, device="cuda") for name, values in rows.items()}


def test_counting_on_a_busy_device_does_not_wait_and_its_numbers_come_later() -> None:
    given = batch()
    counted(given)  # the first use of a kernel loads it
    Fetch(counted(given).laters, None).start().values()  # type: ignore[union-attr]
    torch.cuda.synchronize()
    busy(1.0)
    began_s = time.monotonic()
    counts = counted(given)
    assert counts is not None
    after = now_on(counts.laters[-1])
    told_s = time.monotonic() - began_s
    assert counts.computed == 10
    assert len(counts.laters) == 2  # real, loss; the rest is told by shapes
    fetch = Fetch(counts.laters, after).start()
    assert not fetch.is_here
    values = fetch.values()
    came_s = time.monotonic() - began_s
    assert told_s < came_s / 5
    assert counts.settled(values) == Counts(10, 2, 8, 5, 50)


def test_packed_rows_on_a_device_are_counted_as_on_the_host() -> None:
    rows = {"input_ids": [[1, 2, 3, 4, 5, 0, 0]], "position_ids": [[0, 1, 2, 0, 1, 0, 0]]}
    host = {name: torch.tensor(values) for name, values in rows.items()}
    counts = counted({name: value.cuda() for name, value in host.items()})
    assert counts is not None
    fetch = Fetch(counts.laters, now_on(counts.laters[-1])).start()
    assert counts.settled(fetch.values()) == counted(host) == Counts(7, 2, 5, None, 13)


def test_many_steps_are_fetched_in_one_copy() -> None:
    numbers = [torch.tensor(number, device="cuda") for number in range(1000)]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fetch = Fetch(numbers, now_on(numbers[-1])).start()
        assert fetch.values() == list(range(1000))
    copies = [e for e in profile.events() if "Memcpy DtoH" in e.name]
    assert len(copies) == 1


def test_a_number_made_on_another_stream_is_not_read_too_early() -> None:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        busy(0.2)
        number = torch.ones(1000, device="cuda", dtype=torch.long).sum()
        after = now_on(number)
    assert Fetch([number], after).start().values() == [1000]


def test_a_loss_on_the_device_reaches_its_step_without_being_waited_for(tmp_path: Path) -> None:
    training = Training(out=tmp_path / "run", probes=())
    training.begin()
    losses = [torch.tensor(1.5 / (number + 1), device="cuda") for number in range(5)]
    for loss in losses:
        training.step_begin()
        training.batch(batch())
        training.step_end()
        training.logged({"loss": loss})
    training.end()
    steps = Run.open(tmp_path / "run").steps()
    assert steps["loss"].tolist() == [loss.item() for loss in losses]
    assert steps["tokens_real"].tolist() == [8] * 5
