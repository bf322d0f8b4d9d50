"""Numbers on a real GPU: fetched behind the program's back, right, and without making it wait."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from ergmeter import Run
from ergmeter.integrations.batches import Counts, count_tokens
from ergmeter.integrations.torch_loop import watch
from ergmeter.integrations.training import Training
from ergmeter.integrations.unsettled_steps import Fetch, device_events

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
    count_tokens(given)  # the first use of a kernel loads it
    Fetch(count_tokens(given).laters, None).start().values()  # type: ignore[union-attr]
    torch.cuda.synchronize()
    busy(1.0)
    began_s = time.monotonic()
    counts = count_tokens(given)
    assert counts is not None
    after = device_events(counts.laters)
    told_s = time.monotonic() - began_s
    assert counts.computed == 10
    assert len(counts.laters) == 3  # real, loss, squares; the rest is told by shapes
    fetch = Fetch(counts.laters, after).start()
    assert not fetch.is_here
    values = fetch.values()
    came_s = time.monotonic() - began_s
    assert told_s < came_s / 5
    assert counts.settled(values) == Counts(10, 2, 8, 5, 34)


def test_packed_rows_on_a_device_are_counted_as_on_the_host() -> None:
    rows = {"input_ids": [[1, 2, 3, 4, 5, 0, 0]], "position_ids": [[0, 1, 2, 0, 1, 0, 0]]}
    host = {name: torch.tensor(values) for name, values in rows.items()}
    counts = count_tokens({name: value.cuda() for name, value in host.items()})
    assert counts is not None
    fetch = Fetch(counts.laters, device_events(counts.laters)).start()
    assert counts.settled(fetch.values()) == count_tokens(host) == Counts(7, 2, 5, None, 13)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_many_steps_are_fetched_in_one_copy() -> None:
    numbers = [torch.tensor(number, device="cuda") for number in range(1000)]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fetch = Fetch(numbers, device_events(numbers)).start()
        assert fetch.values() == list(range(1000))
    copies = [e for e in profile.events() if "Memcpy DtoH" in e.name]
    assert len(copies) == 1


def test_a_number_made_on_another_stream_is_not_read_too_early() -> None:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        busy(0.2)
        number = torch.ones(1000, device="cuda", dtype=torch.long).sum()
        after = device_events([number])
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


def test_numbers_of_several_places_come_in_their_order() -> None:
    numbers = [torch.tensor(number, device="cpu" if number % 3 else "cuda") for number in range(7)]
    assert Fetch(numbers, device_events(numbers)).start().values() == list(range(7))


def test_a_graph_that_is_being_captured_is_not_disturbed_by_a_fetch() -> None:
    """In the strictest mode, which is torch's own: any other thread that allocates ends it."""
    given = torch.ones(256, 256, device="cuda")
    numbers = [given.sum() for _ in range(64)]
    torch.mm(given, given)  # the first product loads its library, which can't be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    fetched: list[list[float]] = []
    begun, done, gone = threading.Event(), threading.Event(), threading.Event()

    def fetch() -> None:
        begun.wait(30)
        for size in (8, 16, 64):
            one = Fetch(numbers[:size], None).start()
            while not one.is_here and not gone.is_set():
                time.sleep(0.001)
            fetched.append(one.values())
        done.set()

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        product = given @ given
        begun.set()
        came = done.wait(30)
        gone.set()
    assert came
    thread.join(30)
    product.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert product[0, 0].item() == 256
    assert [len(one) for one in fetched] == [8, 16, 64]
    assert set(fetched[-1]) == {256.0 * 256}


def test_steps_in_a_graph_are_said_not_to_be_seen(tmp_path: Path) -> None:
    """A whole step as a graph: what was made before is counted, and a mark tells of the rest."""
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.ones(8, 64, device="cuda")
    watched = watch(model, optimizer, out=tmp_path / "run", probes=())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(rows).sum().backward()
        optimizer.step()

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step()
    before = model.weight.detach().clone()
    for _ in range(4):
        graph.replay()
    torch.cuda.synchronize()
    # The gradient of the sum is the sum of the rows: 8 in every place.
    assert torch.allclose(before - model.weight, torch.tensor(4 * 0.1 * 8.0, device="cuda"))
    watched.close()
    run = Run.open(tmp_path / "run")
    assert len(run.steps()["end_ns"]) == 3
    assert "steps_in_cuda_graph" in {mark.name for mark in run.marks}
