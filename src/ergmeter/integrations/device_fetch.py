"""Fetches numbers from a device in bulk, behind the back of the program that computes them.

Two traps. `tensor.item()` waits until the device has done everything it was given: here numbers of
many steps are put together and copied on a stream of our own, by a thread of our own, and looked at
once the copy has arrived; the training thread only ever says up to where its own work has got. And
while any thread records a CUDA graph, an allocation or a query on another one destroys it, unless
that one has said that the two have nothing to do with each other.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

from ergmeter.meter.clock import apart_from_captures

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Events: TypeAlias = "dict[Any, Any]"  # by device: where its queue stood
_streams: dict[Any, Any] = {}


class Fetch:
    """Numbers on their way from their devices. Not started before `start`."""

    def __init__(self, numbers: Sequence[Any], after: Events | None = None) -> None:
        """`after` is what `now_on` said when the last of the numbers had been asked for."""
        self._numbers = list(numbers)
        self._after = after or {}
        self._host: list[Any] = []  # of each device: places, and the numbers in host memory
        self._arrived: list[Any] = []

    def start(self) -> Fetch:
        """Ask for the copies. Called on a thread of ours."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(self._numbers[0], torch.Tensor):
            return self  # jax: its arrays are fetched by looking at them, here and not in the loop
        places: dict[Any, list[int]] = {}
        for place, number in enumerate(self._numbers):
            places.setdefault(number.device, []).append(place)
        for device, held in places.items():
            numbers = [self._numbers[place] for place in held]
            self._host.append((held, self._copied(torch, device, numbers)))
        return self

    def _copied(self, torch: Any, device: Any, numbers: list[Any]) -> Any:  # noqa: ANN401
        if device.type != "cuda":
            return torch.stack([number.cpu().double() for number in numbers])
        with (
            apart_from_captures(),
            torch.cuda.device(device),
            torch.cuda.stream(_stream(torch, device)),
        ):
            if device in self._after:
                torch.cuda.current_stream().wait_event(self._after[device])
            together = torch.stack([number.double() for number in numbers])
            host = torch.empty(len(numbers), dtype=torch.float64, pin_memory=True)
            host.copy_(together, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._arrived.append(arrived)
        return host

    @property
    def is_here(self) -> bool:
        """Whether the numbers can be looked at without waiting."""
        if not self._arrived:
            return True
        with apart_from_captures():
            return all(event.query() for event in self._arrived)

    def values(self) -> list[float]:
        """The numbers. Waits for them if they are not here."""
        if self._arrived:
            with apart_from_captures():
                for event in self._arrived:
                    event.synchronize()
        if not self._host:
            return [float(number) for number in self._numbers]
        found = dict.fromkeys(range(len(self._numbers)), 0.0)
        for places, host in self._host:
            found |= zip(places, host.tolist(), strict=True)
        return [float(value) for value in found.values()]


def now_on(numbers: Iterable[Any]) -> Events | None:
    """Where the queues of their devices stand now, without waiting; None if there are none."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    devices = {getattr(number, "device", None) for number in numbers}
    events: Events = {}
    for device in devices:
        if getattr(device, "type", "") == "cuda":
            events[device] = torch.cuda.Event()
            events[device].record(torch.cuda.current_stream(device))
    return events or None


def _stream(torch: Any, device: Any) -> Any:  # noqa: ANN401
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
