"""Money: device-hours x their price, and kilowatt-hours x theirs. Never the one added to the other.

The trap: paying for the electricity twice. A rented GPU-hour has power, cooling and building in its
price; a GPU of one's own has none of them, and its electricity is a bill apart. Which holds nobody
but the user knows, so they are two figures, each there where its price was given.

Figures for tokens are of the window, as all rates are. Rent runs on through the start, the warm-up,
evaluation and checkpoints: `cost.gpu_whole_run` is of all the time that was watched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric
from ergmeter.metrics.definitions.carbon import (
    building_of,
    device_hours,
    per_million_tokens,
    scaled_by,
)
from ergmeter.metrics.definitions.energy import run_j
from ergmeter.metrics.evidence.missing_ranks import need_devices
from ergmeter.records import Reading
from ergmeter.units import J_PER_KWH, scaled

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.evidence.window import TrainingWindow
    from ergmeter.records import Window

UNIT = "price units"  # where nobody said which currency


def gpu(evidence: Evidence) -> Reading:
    """The devices' rent for the window."""
    _gpu_price(evidence)
    return _rent(evidence, evidence.span, evidence.window_note)


def gpu_whole_run(evidence: Evidence) -> Reading:
    """The devices' rent for all the time that was watched."""
    _gpu_price(evidence)
    why = "start, warm-up, evaluation and checkpoints included; time before and after it is not"
    return _rent(evidence, evidence.watched, why)


def gpu_per_million_tokens(evidence: Evidence) -> Reading:
    """The devices' rent for a million tokens."""
    return per_million_tokens(evidence, gpu(evidence))


def energy(evidence: Evidence) -> Reading:
    """The bill for the energy of the window."""
    price = evidence.settings.price_per_kwh
    if price is None:
        raise NotMeasurable("no price of electricity was given: --price-per-kwh with --currency")
    drawn = run_j(evidence)
    pue, building = building_of(evidence)
    note = f"{scaled(drawn.value, 'J')} x {price:g} a kWh{building}; interval is the energy's alone"
    return scaled_by(drawn, price * pue / J_PER_KWH, _unit(evidence), note)


def energy_per_million_tokens(evidence: Evidence) -> Reading:
    """The bill for the energy of a million tokens."""
    reading = energy(evidence)
    need_devices(evidence)
    return per_million_tokens(evidence, reading)


def _gpu_price(evidence: Evidence) -> float:
    price = evidence.settings.price_per_gpu_hour
    if price is None:
        raise NotMeasurable("no price of a device was given: --price-per-gpu-hour with --currency")
    return price


def _rent(evidence: Evidence, window: Window | TrainingWindow, which: str) -> Reading:
    price = _gpu_price(evidence)
    held = device_hours(evidence, window)
    note = f"{held.said} x {price:g} an hour each; {which}"
    return Reading(held.hours * price, _unit(evidence), "assumed", note=note)


def _unit(evidence: Evidence) -> str:
    return evidence.settings.currency or UNIT


_RENT = ("devices", "a price per GPU-hour")
_BILL = ("energy", "a price per kWh")
_UNIT = "currency"

METRICS = [
    Metric(
        "cost.gpu",
        "cost of the devices",
        _UNIT,
        "lower",
        "devices x window x price per GPU-hour",
        _RENT,
        gpu,
    ),
    Metric(
        "cost.gpu_whole_run",
        "cost of the devices, whole run",
        _UNIT,
        "lower",
        "devices x time from the first hand-over to the last x price per GPU-hour",
        _RENT,
        gpu_whole_run,
    ),
    Metric(
        "cost.gpu_per_million_tokens",
        "cost of the devices per million tokens",
        _UNIT,
        "lower",
        "1e6 x cost.gpu / tokens.total",
        (*_RENT, "steps with tokens"),
        gpu_per_million_tokens,
    ),
    Metric(
        "cost.energy",
        "cost of the energy",
        _UNIT,
        "lower",
        "energy.run_j / 3.6e6 x price per kWh x PUE",
        _BILL,
        energy,
    ),
    Metric(
        "cost.energy_per_million_tokens",
        "cost of the energy per million tokens",
        _UNIT,
        "lower",
        "1e6 x cost.energy / tokens.total",
        (*_BILL, "steps with tokens"),
        energy_per_million_tokens,
    ),
]
