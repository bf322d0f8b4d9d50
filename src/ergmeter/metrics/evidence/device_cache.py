"""What was found out of a device is small and stays; its readings are many and go.

The trap: a thousand GPUs and thirty metrics. Each goes through all the devices, and each time all
of their readings come from the disk again. So what a metric wants to know of one device is a
function of it, which is asked once; whoever reports visits one device after the other and asks all
there is to ask while its readings are in memory.
"""

from __future__ import annotations

from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from ergmeter.errors import NotMeasurable
from ergmeter.records import Device

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.metrics.evidence.evidence import Evidence

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


def cached_per_device(
    compute: Callable[Concatenate[Evidence, Asked], Answer],
) -> Callable[Concatenate[Evidence, Asked], Answer]:
    """Asked once of an evidence for each device and whatever else is given; also why not."""

    @wraps(compute)
    def known(evidence: Evidence, /, *about: Asked.args, **further: Asked.kwargs) -> Answer:
        key: Any = (compute, *map(_named, about), *further.items())
        if key not in evidence.answers:
            try:
                evidence.answers[key] = compute(evidence, *about, **further)
            except NotMeasurable as error:
                # Not the error itself, which holds on to the readings it came from.
                evidence.answers[key] = NotMeasurable(str(error))
        answer = evidence.answers[key]
        if isinstance(answer, NotMeasurable):
            raise NotMeasurable(str(answer))
        return cast("Answer", answer)

    return known


BOUNDARY = "boundary"  # the devices whose energy is the run's, whatever their kind
asked: dict[str, list[Callable[[Evidence, Device], object]]] = {}


def asked_of(
    *kinds: str,
) -> Callable[[Callable[[Evidence, Device], Answer]], Callable[[Evidence, Device], Answer]]:
    """Kept, and asked of each device of these kinds when it is visited."""

    def registered(
        compute: Callable[[Evidence, Device], Answer],
    ) -> Callable[[Evidence, Device], Answer]:
        known = cached_per_device(compute)
        for kind in kinds:
            asked.setdefault(kind, []).append(known)
        return known

    return registered


def ask_each(
    compute: Callable[[Evidence, str, Device], object], *columns: str, of: tuple[str, ...]
) -> None:
    """Have a kept function of a column asked of each device of these kinds."""
    for kind in of:
        asked.setdefault(kind, []).extend(_about(compute, column) for column in columns)


def _about(
    compute: Callable[[Evidence, str, Device], object], column: str
) -> Callable[[Evidence, Device], object]:
    return lambda evidence, device: compute(evidence, column, device)


def visit(evidence: Evidence, device: Device, *, is_in_boundary: bool) -> None:
    """Ask all there is to ask of a device."""
    for kind in (device.kind, BOUNDARY) if is_in_boundary else (device.kind,):
        for ask in asked.get(kind, ()):
            with suppress(Exception):  # whoever wants to know is told
                ask(evidence, device)


def _named(one: object) -> object:
    return one.id if isinstance(one, Device) else one
