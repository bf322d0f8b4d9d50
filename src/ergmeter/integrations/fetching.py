"""Fetches numbers from a device in bulk, behind the back of the program that computes them.

The trap: `tensor.item()` waits until the device has done everything it was given. Here numbers of
many steps are put together and copied on a stream of our own, by a thread of our own, and looked at
once the copy has arrived; the training thread only ever says up to where its own work has got.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class Fetch:
    """Numbers on their way from the device. Not started before `start`."""

    def __init__(self, numbers: Sequence[Any], after: Any = None) -> None:  # noqa: ANN401
        """`after` is what `now_on` said when the last of the numbers had been asked for."""
        self._numbers = list(numbers)
        self._after = after
        self._host: Any = None
        self._arrived: Any = None

    def start(self) -> Fetch:
        """Ask for the copy. Called on a thread of ours."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(self._numbers[0], torch.Tensor):
            return self  # jax: its arrays are fetched by looking at them, here and not in the loop
        device = self._numbers[0].device
        if device.type != "cuda":
            self._host = torch.stack([number.cpu().double() for number in self._numbers])
            return self
        with torch.cuda.device(device), torch.cuda.stream(_stream(torch, device)):
            if self._after is not None:
                torch.cuda.current_stream().wait_event(self._after)
            together = torch.stack([number.double() for number in self._numbers])
            self._host = torch.empty(len(self._numbers), dtype=torch.float64, pin_memory=True)
            self._host.copy_(together, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        return self

    @property
    def is_here(self) -> bool:
        """Whether the numbers can be looked at without waiting."""
        return self._arrived is None or bool(self._arrived.query())

    def values(self) -> list[float]:
        """The numbers. Waits for them if they are not here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        if self._host is not None:
            return [float(value) for value in self._host.tolist()]
        return [float(number) for number in self._numbers]


def now_on(number: Any) -> Any:  # noqa: ANN401  an event of the device's library
    """Where the device's queue stands now, without waiting; None where there is no such thing."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(getattr(number, "device", None), "type", "") != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(number.device))
    return event


_streams: dict[Any, Any] = {}


def _stream(torch: Any, device: Any) -> Any:  # noqa: ANN401
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
